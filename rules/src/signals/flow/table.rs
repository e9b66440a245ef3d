//! The fingerprints of what one sandbox recalled.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::storage::{Entry, Insertion, MIN_CAPACITY, Storage};
use super::window::{FlowKey, Window};
use super::{
    DEFAULT_FINGERPRINTS, FlowMatch, FlowMatcher, GRAM, MAX_BANKS, MAX_FINGERPRINTS, MIN_DISTINCT,
    PAIR_DISTANCE,
};
use crate::ids::BankId;

/// Memory of the name of a bank: in the list, in the index and in what the attempts share.
const LABEL_BYTES: usize = 512;

/// A table has a label for each so many of its fingerprints.
const FINGERPRINTS_PER_BANK: usize = 16;
/// What share of a full table gives way to new entries: few enough to forget little, enough to do so rarely.
const EVICTED_SHARE: usize = 8;

/// The bounds of a [`FlowTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowLimits {
    /// Most fingerprints, at most [`MAX_FINGERPRINTS`].
    pub max_fingerprints: usize,
    /// How long after its last recall a text is recognised.
    pub lifetime: Duration,
}

/// The fingerprints of what one sandbox recalled, with the bank that each came from.
///
/// Times are seconds since the epoch. A clock that goes back delays expiry, and nothing else.
#[derive(Debug)]
pub struct FlowTable {
    key: FlowKey,
    limits: FlowLimits,
    storage: Arc<Storage>,
    len: usize,
    labels: Labels,
    evicted: u64,
}

/// What a [`FlowMatcher`] compares with. Cheap to clone; made anew by [`FlowTable::snapshot`] for each attempt.
///
/// It shares the table's storage, so that a recall copies nothing: text of known banks that is recalled later is
/// found as well, as long as the table has not moved to new storage.
#[derive(Clone, Debug)]
pub struct FlowSnapshot {
    pub(super) key: FlowKey,
    pub(super) storage: Arc<Storage>,
    pub(super) banks: Arc<[BankId]>,
    lifetime: u32,
    empty: bool,
}

/// The banks of a table by index. An index keeps its meaning as long as the storage lives.
#[derive(Debug, Default)]
struct Labels {
    banks: Vec<BankId>,
    indexes: HashMap<BankId, u16>,
    /// When each bank was recalled from last.
    times: Vec<u32>,
    shared: Option<Arc<[BankId]>>,
}

impl Default for FlowLimits {
    fn default() -> Self {
        FlowLimits { max_fingerprints: DEFAULT_FINGERPRINTS, lifetime: Duration::from_secs(24 * 60 * 60) }
    }
}

impl FlowTable {
    pub fn new(key: &FlowKey, limits: FlowLimits) -> Self {
        let max_fingerprints = limits.max_fingerprints.clamp(MIN_CAPACITY, MAX_FINGERPRINTS);
        FlowTable {
            key: key.clone(),
            limits: FlowLimits { max_fingerprints, ..limits },
            storage: Arc::new(Storage::new(MIN_CAPACITY)),
            len: 0,
            labels: Labels::default(),
            evicted: 0,
        }
    }

    /// Returns how many fingerprints the table has.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns how many fingerprints gave way before they expired. Text of these is not recognised any more.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns the memory that the fingerprints and the names of their banks occupy.
    pub fn bytes(&self) -> usize {
        Self::bytes_for(self.storage.capacity())
    }

    /// Returns the memory of a table for so many fingerprints.
    pub fn bytes_for(fingerprints: usize) -> usize {
        Storage::bytes_for(fingerprints) + max_banks(fingerprints) * LABEL_BYTES
    }

    /// Returns how many fingerprints the table must have room for so that `more` push no other out, if that is more
    /// than it may have.
    pub fn wanted_fingerprints(&self, more: usize) -> Option<usize> {
        let max = self.limits.max_fingerprints;
        (self.len + more > max && max < DEFAULT_FINGERPRINTS).then(|| max * 2)
    }

    /// Returns the bound of the table.
    pub fn max_fingerprints(&self) -> usize {
        self.limits.max_fingerprints
    }

    /// Changes the bound of the table. If it has more, the oldest give way.
    pub fn set_max_fingerprints(&mut self, max: usize, now: u64) {
        self.limits.max_fingerprints = max.clamp(MIN_CAPACITY, MAX_FINGERPRINTS);
        if self.storage.capacity() > self.limits.max_fingerprints {
            self.rebuild(seconds(now), self.limits.max_fingerprints);
        }
    }

    pub fn snapshot(&mut self) -> FlowSnapshot {
        FlowSnapshot {
            key: self.key.clone(),
            storage: Arc::clone(&self.storage),
            banks: self.labels.share(),
            lifetime: seconds(self.limits.lifetime.as_secs()),
            empty: self.is_empty(),
        }
    }

    /// Adds the fingerprints of one whole text.
    pub fn insert_text(&mut self, bank: &BankId, text: &str, now: u64) {
        Fingerprinter::new(&self.key, bank).feed(self, text.as_bytes(), now);
    }

    /// Forgets what expired and returns its memory. Expired entries are never recognised, but stay until this is
    /// called or the room is needed.
    pub fn expire(&mut self, now: u64) {
        let now = seconds(now);
        let expired = self.storage.iter().filter(|entry| self.is_expired(entry, now)).count();
        if expired > 0 {
            self.rebuild(now, self.limits.max_fingerprints);
        }
    }

    /// Returns the entries with their banks, for [`super::stored`].
    pub(super) fn entries(&self) -> (&[BankId], impl Iterator<Item = Entry>) {
        (&self.labels.banks, self.storage.iter())
    }

    pub(super) fn key(&self) -> &FlowKey {
        &self.key
    }

    /// Adds or renews one fingerprint.
    pub(super) fn insert(&mut self, bank: &BankId, hash: u64, now: u32) {
        if self.len >= self.storage.capacity() {
            let max = self.limits.max_fingerprints;
            self.rebuild(now, max - max / EVICTED_SHARE);
        }
        let bank = self.label(bank, now);
        if self.storage.insert(Entry { hash, bank, time: now }) == Insertion::Added {
            self.len += 1;
        }
    }

    /// Returns the index of a bank's label. If there are too many banks, those recalled from least recently give way.
    fn label(&mut self, bank: &BankId, now: u32) -> u16 {
        if let Some(index) = self.labels.find(bank, now) {
            return index;
        }
        let max = max_banks(self.limits.max_fingerprints);
        if self.labels.banks.len() >= max {
            let mut times = self.labels.times.clone();
            let (_, cutoff, _) = times.select_nth_unstable(max / EVICTED_SHARE);
            let cutoff = *cutoff;
            let mut spare = max / EVICTED_SHARE;
            let mut gives_way = Vec::with_capacity(times.len());
            for time in &self.labels.times {
                let gives = *time <= cutoff && spare > 0;
                spare -= usize::from(gives);
                gives_way.push(gives);
            }
            self.retain(|entry| !gives_way.get(usize::from(entry.bank)).is_some_and(|gives| *gives));
        }
        self.labels.add(bank, now)
    }

    /// Moves to new storage with what is not expired, at most the `keep` newest entries.
    fn rebuild(&mut self, now: u32, keep: usize) {
        let live = |entry: &Entry| !self.is_expired(entry, now);
        let mut times: Vec<u32> = self.storage.iter().filter(live).map(|entry| entry.time).collect();
        let excess = times.len().saturating_sub(keep);
        let cutoff = match excess {
            0 => 0,
            _ => *times.select_nth_unstable(excess - 1).1,
        };
        let lifetime = seconds(self.limits.lifetime.as_secs());
        // Of the entries as old as the newest that gives way, so many as are missing without them.
        let mut spare = excess.saturating_sub(times.iter().filter(|time| **time < cutoff).count());
        self.retain(|entry| {
            if now.saturating_sub(entry.time) >= lifetime {
                return false;
            }
            let is_spare = spare > 0 && entry.time == cutoff;
            spare -= usize::from(is_spare);
            !is_spare && entry.time >= cutoff
        });
        self.evicted += excess as u64;
    }

    /// Moves to new storage with the entries that `keep` names, and forgets banks without entries.
    fn retain(&mut self, mut keep: impl FnMut(&Entry) -> bool) {
        let kept: Vec<Entry> = self.storage.iter().filter(|entry| keep(entry)).collect();
        let capacity = (kept.len() * 2).next_power_of_two().clamp(MIN_CAPACITY, self.limits.max_fingerprints);
        let storage = Storage::new(capacity);
        let mut labels = Labels::default();
        let mut indexes: Vec<Option<u16>> = vec![None; self.labels.banks.len()];
        for entry in &kept {
            let old = usize::from(entry.bank);
            let (Some(index), Some(bank)) = (indexes.get_mut(old), self.labels.banks.get(old)) else {
                continue;
            };
            let time = self.labels.times.get(old).copied().unwrap_or_default();
            let bank = *index.get_or_insert_with(|| labels.add(bank, time));
            storage.insert(Entry { bank, ..*entry });
        }
        (self.storage, self.labels, self.len) = (Arc::new(storage), labels, kept.len());
    }

    fn is_expired(&self, entry: &Entry, now: u32) -> bool {
        now.saturating_sub(entry.time) >= seconds(self.limits.lifetime.as_secs())
    }
}

impl FlowSnapshot {
    /// Looks for recalled text in one short text, such as a name in DNS: the labels of a name are joined, because
    /// dots are dropped like all punctuation.
    pub fn match_text(&self, text: &str, now: u64) -> Vec<FlowMatch> {
        if self.empty || text.len() < GRAM {
            return Vec::new();
        }
        FlowMatcher::new(&self.key).feed(self, text.as_bytes(), now).to_vec()
    }

    /// Tells whether the table had no entry when the snapshot was made.
    pub fn is_empty(&self) -> bool {
        self.empty
    }

    pub(super) fn is_expired(&self, entry: &Entry, now: u32) -> bool {
        now.saturating_sub(entry.time) >= self.lifetime
    }
}

impl Labels {
    fn find(&mut self, bank: &BankId, now: u32) -> Option<u16> {
        let index = *self.indexes.get(bank)?;
        if let Some(time) = self.times.get_mut(usize::from(index)) {
            *time = now.max(*time);
        }
        Some(index)
    }

    /// Adds a bank, of which there are at most [`MAX_BANKS`].
    fn add(&mut self, bank: &BankId, time: u32) -> u16 {
        let index = u16::try_from(self.banks.len()).unwrap_or(u16::MAX);
        self.banks.push(bank.clone());
        self.times.push(time);
        self.indexes.insert(bank.clone(), index);
        self.shared = None;
        index
    }

    fn share(&mut self) -> Arc<[BankId]> {
        Arc::clone(self.shared.get_or_insert_with(|| Arc::from(self.banks.as_slice())))
    }
}

/// Takes the fingerprints of one recalled text while it passes to the sandbox.
///
/// The caller feeds the strings of an answer one by one, decoded, and calls [`Fingerprinter::finish`] behind each. It
/// feeds bytes before it hands them to the sandbox, so that nothing returns sooner than it is known.
#[derive(Debug)]
pub struct Fingerprinter {
    window: Window,
    bank: BankId,
    sample: Sample,
}

/// How far the sampling of a text is. A pair counts as well if the table has it already.
#[derive(Debug, Default)]
struct Sample {
    /// Where the first gram of the last pair ended.
    pair: Option<u64>,
    /// The table has the gram before this one.
    is_known: bool,
    /// The gram before this one was the first of a pair.
    is_half: bool,
}

impl Fingerprinter {
    /// Makes one for a table with the same key.
    pub fn new(key: &FlowKey, bank: &BankId) -> Self {
        Fingerprinter { window: Window::new(key), bank: bank.clone(), sample: Sample::default() }
    }

    /// Takes the next bytes of the text. A character may be split between two calls.
    pub fn feed(&mut self, table: &mut FlowTable, bytes: &[u8], now: u64) {
        let now = seconds(now);
        let (bank, sample) = (&self.bank, &mut self.sample);
        self.window.feed(bytes, |characters, hash, gram| {
            if characters < GRAM as u64 {
                return;
            }
            let is_due = sample.pair.is_none_or(|pair| characters - pair >= PAIR_DISTANCE as u64);
            let begins = is_due && is_distinct(gram);
            if !begins && !sample.is_half && !table.contains(bank, hash) {
                sample.is_known = false;
                return;
            }
            table.insert(bank, hash, now);
            match sample.is_known {
                true => (sample.pair, sample.is_half) = (Some(characters - 1), false),
                false => sample.is_half = is_due,
            }
            sample.is_known = true;
        });
    }

    /// Ends the text. The fingerprinter is ready for the next one of the same bank.
    pub fn finish(&mut self) {
        self.window.clear();
        self.sample = Sample::default();
    }
}

impl FlowTable {
    fn contains(&self, bank: &BankId, hash: u64) -> bool {
        let known = |bank: &u16| self.storage.contains(hash, *bank);
        self.storage.may_contain(hash) && self.labels.indexes.get(bank).is_some_and(known)
    }
}

/// Returns how many banks a table for so many fingerprints has labels for.
fn max_banks(fingerprints: usize) -> usize {
    (fingerprints / FINGERPRINTS_PER_BANK).clamp(EVICTED_SHARE, MAX_BANKS)
}

/// Tells whether a gram has [`MIN_DISTINCT`] different characters.
fn is_distinct(gram: &[u64; GRAM]) -> bool {
    let mut seen = [0; MIN_DISTINCT];
    let mut count = 0;
    for value in gram {
        if !seen.contains(value) {
            if let Some(slot) = seen.get_mut(count) {
                *slot = *value;
            }
            count += 1;
            if count == MIN_DISTINCT {
                return true;
            }
        }
    }
    false
}

/// Returns a time as tables keep it: four bytes last until 2106.
pub(super) fn seconds(time: u64) -> u32 {
    u32::try_from(time).unwrap_or(u32::MAX)
}
