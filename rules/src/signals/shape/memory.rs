//! What is remembered of earlier requests: digests, counters and times, each in a table of fixed size.

use hashbrown::HashTable;
use serde::{Deserialize, Serialize};

use super::super::bits::clock;

/// Values and runs remembered per host.
pub const SEEN: usize = 1_024;
/// Field names and combinations of them remembered per host.
pub const NAMES: usize = 512;
/// Numbers in values that the next is compared with.
const NUMBERS: usize = 128;
/// Slots whose numbers are followed.
const COUNTERS: usize = 32;
/// Requests whose successor is remembered, in buckets.
const SUCCESSORS: usize = 1_024;
const BUCKET: usize = 4;
/// Kinds of requests whose intervals are followed.
const RHYTHMS: usize = 16;
/// `User-Agent` values remembered.
const AGENTS: usize = 32;
/// Steps by which a counter may go on.
const LARGEST_STEP: u64 = 1_000;
/// Percent by which the intervals of a beacon may differ.
const JITTER: u64 = 10;
/// Below this interval requests are a burst, not a beacon.
const SHORTEST_INTERVAL_MS: u64 = 1_000;

pub(super) const MINUTE_MS: u64 = 60_000;
pub(super) const HOUR_MS: u64 = 60 * MINUTE_MS;

/// A set of at most `N` digests that forgets by the CLOCK rule.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct SeenSet<const N: usize> {
    entries: Vec<(u64, bool)>,
    hand: usize,
    /// Made again after a restart.
    #[serde(skip)]
    index: HashTable<u16>,
}

impl<const N: usize> SeenSet<N> {
    /// Adds a digest and returns whether it was there.
    pub(super) fn insert(&mut self, digest: u64) -> bool {
        if self.index.len() != self.entries.len() {
            self.rebuild();
        }
        let found =
            self.index.find(digest, |at| self.entries.get(usize::from(*at)).is_some_and(|e| e.0 == digest));
        if let Some(entry) = found.copied().and_then(|at| self.entries.get_mut(usize::from(at))) {
            entry.1 = true;
            return true;
        }
        let at = if self.entries.len() < N {
            self.entries.push((digest, true));
            self.entries.len() - 1
        } else {
            let at = clock(&mut self.entries, &mut self.hand, |entry| &mut entry.1);
            if let Some(entry) = self.entries.get_mut(at) {
                let (old, _) = std::mem::replace(entry, (digest, true));
                if let Ok(index) = self.index.find_entry(old, |other| usize::from(*other) == at) {
                    index.remove();
                }
            }
            at
        };
        let entries = &self.entries;
        self.index
            .insert_unique(digest, at as u16, |at| entries.get(usize::from(*at)).map_or(0, |entry| entry.0));
        false
    }

    fn rebuild(&mut self) {
        let entries = std::mem::take(&mut self.entries);
        self.index.clear();
        self.hand = 0;
        for (digest, _) in entries.into_iter().take(N) {
            let known = self
                .index
                .find(digest, |at| self.entries.get(usize::from(*at)).is_some_and(|e| e.0 == digest));
            if known.is_none() {
                self.entries.push((digest, false));
                let (at, entries) = (self.entries.len() - 1, &self.entries);
                self.index.insert_unique(digest, at as u16, |at| {
                    entries.get(usize::from(*at)).map_or(0, |entry| entry.0)
                });
            }
        }
    }
}

/// A sum over the past hour: twelve buckets of five minutes, and one more, so that it is always covered.
pub(super) type HourSum = RecentSum<13, { 5 * MINUTE_MS }>;
/// A sum over the past day.
pub(super) type DaySum = RecentSum<25, HOUR_MS>;

/// A sum over `BUCKETS` of `LENGTH_MS` milliseconds each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RecentSum<const BUCKETS: usize, const LENGTH_MS: u64> {
    newest: u64,
    sums: Vec<u64>,
}

impl<const BUCKETS: usize, const LENGTH_MS: u64> RecentSum<BUCKETS, LENGTH_MS> {
    pub(super) fn add(&mut self, amount: u64, now_ms: u64) {
        if amount == 0 {
            return;
        }
        let bucket = now_ms / LENGTH_MS;
        if self.sums.is_empty() {
            self.newest = bucket;
        }
        let passed = usize::try_from(bucket.saturating_sub(self.newest)).unwrap_or(BUCKETS).min(BUCKETS);
        self.sums.splice(0..0, std::iter::repeat_n(0, passed));
        if self.sums.is_empty() {
            self.sums.push(0);
        }
        self.sums.truncate(BUCKETS);
        self.newest = self.newest.max(bucket);
        if let Some(newest) = self.sums.first_mut() {
            *newest = newest.saturating_add(amount);
        }
    }

    pub(super) fn sum(&self, now_ms: u64) -> u64 {
        let passed = usize::try_from((now_ms / LENGTH_MS).saturating_sub(self.newest)).unwrap_or(BUCKETS);
        let inside = self.sums.iter().take(BUCKETS.saturating_sub(passed));
        inside.fold(0, |sum, bucket| sum.saturating_add(*bucket))
    }
}

/// The last number of each slot, and how long it has been counting.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counters {
    entries: Vec<Counter>,
    next: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counter {
    slot: u64,
    last: u64,
    step: u64,
    /// Numbers that followed one another by the same step.
    pub(super) run: u64,
    /// How many of these came with other data.
    pub(super) with_data: u64,
}

/// The last number at each position in a value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Numbers {
    entries: Vec<(u64, u64)>,
    next: usize,
}

impl Numbers {
    /// Returns the bits of the difference from the number before, or of the number itself if it is the first.
    pub(super) fn observe(&mut self, position: u64, number: u64) -> u32 {
        let difference = match self.entries.iter_mut().find(|(known, _)| *known == position) {
            Some((_, last)) => number.abs_diff(std::mem::replace(last, number)),
            None => {
                if self.entries.len() < NUMBERS {
                    self.entries.push((position, number));
                } else if let Some(entry) = self.entries.get_mut(self.next % NUMBERS) {
                    *entry = (position, number);
                    self.next = self.next % NUMBERS + 1;
                }
                number
            }
        };
        u64::BITS - difference.leading_zeros()
    }
}

impl Counters {
    /// Returns whether a number goes on counting.
    pub(super) fn observe(&mut self, slot: u64, number: u64) -> bool {
        let Some(counter) = self.entries.iter_mut().find(|counter| counter.slot == slot) else {
            let counter = Counter { slot, last: number, ..Counter::default() };
            if self.entries.len() < COUNTERS {
                self.entries.push(counter);
            } else if let Some(entry) = self.entries.get_mut(self.next % COUNTERS) {
                *entry = counter;
                self.next = self.next % COUNTERS + 1;
            }
            return false;
        };
        let step = number.wrapping_sub(counter.last);
        counter.last = number;
        let counts = (1..=LARGEST_STEP).contains(&step);
        if counts && step == counter.step {
            counter.run += 1;
        } else {
            *counter = Counter { slot, last: number, step, run: u64::from(counts), with_data: 0 };
        }
        counts && counter.run >= 2
    }

    /// Notes that the number of `slot` came with other data, and returns its counter.
    pub(super) fn with_data(&mut self, slot: u64) -> Option<Counter> {
        let counter = self.entries.iter_mut().find(|counter| counter.slot == slot)?;
        counter.with_data += 1;
        Some(*counter)
    }
}

/// Which request usually follows which, to tell a choice from a routine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Successors {
    /// Requests and what followed each last. A request is in the bucket that its digest names.
    entries: Vec<(u32, u32)>,
    last: u32,
    known: u32,
    /// The entry of a full bucket that is replaced next.
    next: usize,
}

impl Successors {
    /// Returns whether the request before was another, and the bits that the choice of this one among the known is
    /// worth: none if it followed the one before the last time too, or is new.
    pub(super) fn observe(&mut self, request: u64) -> (bool, u64) {
        let request = ((request >> 32) as u32).max(1); // 0 is a free entry
        if self.entries.len() != SUCCESSORS {
            self.entries = vec![(0, 0); SUCCESSORS];
            self.known = 0;
        }
        let last = std::mem::replace(&mut self.last, request);
        let mut predicted = false;
        if let Some(entry) = self.bucket(last).iter_mut().find(|entry| entry.0 == last) {
            predicted = entry.1 == request;
            entry.1 = request;
        }
        if self.bucket(request).iter().any(|entry| entry.0 == request) {
            // A guess that fails half of the time is worth two bits when it fails.
            let bits = if predicted { 0 } else { u64::from(self.known.max(1).ilog2()) + 1 };
            return (last != request, bits);
        }
        let next = self.next;
        let bucket = self.bucket(request);
        let free = bucket.iter().position(|entry| entry.0 == 0);
        if let Some(entry) = bucket.get_mut(free.unwrap_or(next % BUCKET)) {
            *entry = (request, 0);
        }
        self.known += u32::from(free.is_some());
        self.next = (next + 1) % BUCKET;
        (true, 0)
    }

    fn bucket(&mut self, request: u32) -> &mut [(u32, u32)] {
        let at = request as usize % (SUCCESSORS / BUCKET) * BUCKET;
        self.entries.get_mut(at..at + BUCKET).unwrap_or_default()
    }
}

/// How regular the requests of each kind are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rhythms {
    entries: Vec<Rhythm>,
    next: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Rhythm {
    kind: u64,
    last_ms: u64,
    interval_ms: u64,
    run: u64,
}

impl Rhythms {
    /// Returns how many requests of this kind came at about the same interval.
    pub(super) fn observe(&mut self, kind: u64, now_ms: u64) -> u64 {
        let Some(rhythm) = self.entries.iter_mut().find(|rhythm| rhythm.kind == kind) else {
            let rhythm = Rhythm { kind, last_ms: now_ms, ..Rhythm::default() };
            if self.entries.len() < RHYTHMS {
                self.entries.push(rhythm);
            } else if let Some(entry) = self.entries.get_mut(self.next % RHYTHMS) {
                *entry = rhythm;
                self.next = self.next % RHYTHMS + 1;
            }
            return 0;
        };
        let interval = now_ms.saturating_sub(std::mem::replace(&mut rhythm.last_ms, now_ms));
        let regular = interval >= SHORTEST_INTERVAL_MS
            && interval.abs_diff(rhythm.interval_ms) <= rhythm.interval_ms.saturating_mul(JITTER) / 100;
        if regular {
            rhythm.run += 1;
            rhythm.interval_ms = (rhythm.interval_ms.saturating_mul(7).saturating_add(interval)) / 8;
        } else {
            rhythm.run = 0;
            rhythm.interval_ms = interval;
        }
        rhythm.run
    }
}

/// `User-Agent` values of the past hour.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Agents {
    /// Digest and time of last use.
    entries: Vec<(u64, u64)>,
}

impl Agents {
    /// Returns how many were used in the past hour.
    pub(super) fn observe(&mut self, agent: u64, now_ms: u64) -> u64 {
        self.entries.retain(|(_, last_ms)| last_ms.saturating_add(HOUR_MS) > now_ms);
        if let Some((_, last_ms)) = self.entries.iter_mut().find(|(known, _)| *known == agent) {
            *last_ms = now_ms;
        } else if self.entries.len() < AGENTS {
            self.entries.push((agent, now_ms));
        }
        self.entries.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seen_sets_are_bounded_and_survive_storage() {
        let mut seen = SeenSet::<SEEN>::default();
        for digest in 0..10_000_u64 {
            assert!(!seen.insert((digest + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            assert!(seen.insert(1) == (digest > 0));
        }
        assert_eq!((seen.entries.len(), seen.index.len()), (SEEN, SEEN));
        let json = serde_json::to_string(&seen).unwrap();
        let mut restored: SeenSet<SEEN> = serde_json::from_str(&json).unwrap();
        assert!(restored.insert(1));
        assert!(!restored.insert(2));
        assert_eq!(restored.index.len(), restored.entries.len());
        let mut hostile: SeenSet<SEEN> =
            serde_json::from_str(r#"{"entries":[[7,true],[7,false]],"hand":99}"#).unwrap();
        assert!(hostile.insert(7));
    }

    #[test]
    fn sums_forget() {
        let (mut hour, mut day) = (HourSum::default(), DaySum::default());
        for (amount, at) in [(5, 0), (7, 30 * MINUTE_MS)] {
            hour.add(amount, at);
            day.add(amount, at);
        }
        for (at, expected) in [(59 * MINUTE_MS, (12, 12)), (80 * MINUTE_MS, (7, 12)), (26 * HOUR_MS, (0, 0))]
        {
            assert_eq!((hour.sum(at), day.sum(at)), expected, "{at}");
        }
        hour.add(u64::MAX, u64::MAX);
        hour.add(u64::MAX, 0);
        assert_eq!(hour.sum(u64::MAX), u64::MAX);
    }

    #[test]
    fn routines_are_not_choices() {
        let mut successors = Successors::default();
        let bits: u64 = (0..3_000_u64).map(|at| successors.observe((at % 3 + 10) << 32).1).sum();
        assert!(bits < 12, "{bits}");
        let mut state = 1_u64;
        let bits: u64 = (0..1_000)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                successors.observe(((state >> 61) + 100) << 32).1
            })
            .sum();
        assert!((2_500..4_500).contains(&bits), "{bits}");
    }

    #[test]
    fn beacons_are_regular() {
        let mut rhythms = Rhythms::default();
        let regular = (0..30_u64).map(|at| rhythms.observe(1, at * 60_000 + at % 3 * 1_000)).last();
        assert!(regular >= Some(27), "{regular:?}");
        let irregular = (0..30_u64).map(|at| rhythms.observe(2, at * 60_000 + at * at % 17 * 2_000)).max();
        assert!(irregular < Some(6), "{irregular:?}");
        let burst = (0..300_u64).map(|at| rhythms.observe(3, at * 20)).max();
        assert_eq!(burst, Some(0));
    }
}
