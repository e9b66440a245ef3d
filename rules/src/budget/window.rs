//! A sliding window: the limit holds for any hour, not just for each hour of the clock.
//!
//! Exact sliding windows would store a timestamp per charge. This one divides the window into `WINDOW_PARTS` parts
//! and stores the usage per part, so its size is bounded whatever a sandbox does. A part expires as a whole, once all
//! of it is older than the window. So usage may count for up to one part too long (a minute, for an hourly budget),
//! and never too short: the limit is a limit for every interval of that length.
//!
//! Writing the file for every charge would cost a write per request. Instead each write also records an allowance
//! (`ahead`, a sixteenth of the limit and what waits for the write) that may be used before the next write. After a
//! crash the whole allowance counts as used, because how much of it was used is unknown: a crash of the process can
//! cost a sandbox some budget but never refills any. (A power failure may lose the last writes, which are not synced.)
//! A clean stop writes the exact usage and no allowance.
//!
//! Another thread writes. Usage goes on meanwhile under the old allowance, so the new one covers at least what was left
//! of the old: the file covers all usage whichever of the two a crash leaves behind.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::BudgetKind;

/// Parts of a window; usage expires one part at a time.
const WINDOW_PARTS: u64 = 60;
/// The allowance between two writes is the limit divided by this; it counts as used after a crash.
const AHEAD_DIVISOR: u64 = 16;

/// Usage, by the part of time in which it happened.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlidingWindow {
    /// Parts with usage, oldest first: the part's number since time zero, and the amount.
    parts: VecDeque<(u64, u64)>,
    /// The allowance: how much may be used after the last write without another.
    ahead: u64,
    #[serde(skip)]
    used: u64,
    /// Usage since the last write.
    #[serde(skip)]
    unwritten: u64,
    /// The largest charge that waits for a write.
    #[serde(skip)]
    wanted: u64,
    /// The limit, as of the last charge.
    #[serde(skip)]
    limit: u64,
    /// `unwritten` as of the write that is under way.
    #[serde(skip)]
    under_way: u64,
}

/// Returns the largest lease for a limit: half of the allowance, so that a lease which is mostly refunded needs no
/// write.
pub fn max_lease(limit: u64) -> u64 {
    limit / AHEAD_DIVISOR / 2
}

/// Returns the length of a part in milliseconds; without a window, one part that never ends.
fn part_length(window: Option<Duration>) -> u64 {
    window.map_or(u64::MAX, |window| (window.as_millis() as u64 / WINDOW_PARTS).max(1))
}

/// Returns when a part expires. Saturates, because the part's number comes from a file.
fn part_end(at: u64, length: u64) -> u64 {
    at.saturating_add(WINDOW_PARTS + 1).saturating_mul(length)
}

impl SlidingWindow {
    /// Continues a window read from disk: the allowance of the earlier process counts as used.
    pub fn restore(&mut self, now: u64, window: Option<Duration>) {
        let ahead = std::mem::take(&mut self.ahead);
        self.used = self.parts.iter().fold(0, |sum, (_, used)| sum.saturating_add(*used));
        self.add(now / part_length(window), ahead);
    }

    /// Returns the usage within the window, dropping expired parts.
    pub fn amount_used(&mut self, now: u64, window: Option<Duration>) -> u64 {
        let current = now / part_length(window);
        while self.parts.front().is_some_and(|(at, _)| at.saturating_add(WINDOW_PARTS) < current) {
            let (_, gone) = self.parts.pop_front().unwrap_or_default();
            self.used = self.used.saturating_sub(gone);
        }
        self.used
    }

    /// Returns what is left of a budget.
    pub fn left(&mut self, now: u64, budget: BudgetKind, limit: u64) -> u64 {
        budget.usable(limit).saturating_sub(self.amount_used(now, budget.window()))
    }

    /// Counts usage, which must be within [`SlidingWindow::room`].
    pub fn charge(&mut self, now: u64, window: Option<Duration>, amount: u64) {
        self.add(now / part_length(window), amount);
        self.unwritten = self.unwritten.saturating_add(amount);
    }

    /// Refunds what was charged at `then`, unless that part has expired.
    pub fn refund(&mut self, then: u64, window: Option<Duration>, amount: u64) {
        let at = then / part_length(window);
        if let Some((_, used)) = self.parts.iter_mut().find(|(part, _)| *part == at) {
            let back = amount.min(*used);
            *used -= back;
            self.used = self.used.saturating_sub(back);
            self.unwritten = self.unwritten.saturating_sub(back);
        }
    }

    /// Returns when `amount` more can be used, or `None` if never.
    pub fn free_at(&self, window: Option<Duration>, limit: u64, amount: u64) -> Option<u64> {
        let length = window.map(|_| part_length(window))?;
        let mut used = self.used;
        for (at, gone) in &self.parts {
            used = used.saturating_sub(*gone);
            if used.saturating_add(amount.min(limit)) <= limit && limit > 0 {
                return Some(part_end(*at, length));
            }
        }
        None
    }

    /// Returns what is left of the allowance.
    pub fn room(&self) -> u64 {
        self.ahead.saturating_sub(self.unwritten)
    }

    /// Asks that the next write has room for `amount` more.
    pub fn want(&mut self, amount: u64, limit: u64) {
        (self.wanted, self.limit) = (self.wanted.max(amount), limit);
    }

    /// Whether so much of the allowance is used that the next write should begin.
    pub fn is_low(&self) -> bool {
        self.unwritten > self.ahead - self.ahead / 4
    }

    /// Returns what to write: the usage of now, and a new allowance.
    pub fn begin_write(&mut self) -> Self {
        self.under_way = self.unwritten;
        let wanted = std::mem::take(&mut self.wanted);
        let ahead = wanted.saturating_add(self.limit / AHEAD_DIVISOR).max(self.room());
        SlidingWindow { ahead, ..self.clone() }
    }

    /// Adopts the allowance that was written. Without a write, the old one stays.
    pub fn finish_write(&mut self, written: &Self) {
        self.unwritten = self.unwritten.saturating_sub(self.under_way);
        self.ahead = written.ahead;
    }

    /// Returns when the oldest usage expires.
    pub fn first_refill(&self, window: Option<Duration>) -> Option<u64> {
        let length = window.map(|_| part_length(window))?;
        self.parts.front().map(|(at, _)| part_end(*at, length))
    }

    /// Returns what the last write contains: exact usage, no allowance. Nothing may be used after it.
    pub fn finalize(&mut self) -> Self {
        (self.unwritten, self.ahead) = (0, 0);
        self.clone()
    }

    fn add(&mut self, at: u64, amount: u64) {
        self.used = self.used.saturating_add(amount);
        match self.parts.back_mut() {
            Some((last, used)) if *last >= at => *used = used.saturating_add(amount),
            _ if amount > 0 => self.parts.push_back((at, amount)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOUR: Option<Duration> = Some(Duration::from_secs(3600));

    proptest! {
        /// For any sequence of charges, no hour exceeds the limit, and expired usage can be used again.
        #[test]
        fn no_hour_sees_more_than_the_limit(
            limit in 0u64..200,
            stream in proptest::collection::vec((0u64..900_000, 1u64..60), 1..200),
        ) {
            let (mut window, mut now, mut taken) = (SlidingWindow::default(), 0, Vec::new());
            for (pause, amount) in stream {
                now += pause;
                if window.amount_used(now, HOUR) + amount <= limit {
                    window.charge(now, HOUR, amount);
                    taken.push((now, amount));
                } else if let Some(free) = window.free_at(HOUR, limit, amount) {
                    let mut later = window.clone();
                    prop_assert!(later.amount_used(free, HOUR) + amount.min(limit) <= limit);
                    prop_assert!(free > now);
                }
                let hour = taken.iter().filter(|(then, _)| then + 3_600_000 > now);
                prop_assert!(hour.map(|(_, amount)| amount).sum::<u64>() <= limit);
            }
        }
    }

    #[test]
    fn what_was_used_leaves_after_the_window_and_not_before() {
        let mut window = SlidingWindow::default();
        window.charge(59_999, HOUR, 5);
        assert_eq!(window.amount_used(3_659_999, HOUR), 5);
        assert_eq!(window.free_at(HOUR, 5, 1), Some(3_660_000));
        assert_eq!(window.amount_used(3_660_000, HOUR), 0);
        let mut endless = SlidingWindow::default();
        endless.charge(1, None, 5);
        assert_eq!(endless.amount_used(u64::MAX - 1, None), 5);
        assert_eq!(endless.free_at(None, 5, 1), None);
    }

    fn reopen(text: &str) -> SlidingWindow {
        let mut window: SlidingWindow = serde_json::from_str(text).unwrap();
        window.restore(0, HOUR);
        window
    }

    #[test]
    fn a_crash_uses_up_what_may_have_been_used() {
        let mut window = SlidingWindow::default();
        assert_eq!(window.room(), 0, "nothing is written yet");
        window.want(100, 1600);
        let written = window.begin_write();
        assert_eq!(window.room(), 0, "it is not written yet");
        window.finish_write(&written);
        let text = serde_json::to_string(&written).unwrap();
        assert_eq!(window.room(), 200);
        window.charge(0, HOUR, 200);
        assert_eq!(reopen(&text).amount_used(0, HOUR), 200);
        let text = serde_json::to_string(&window.finalize()).unwrap();
        assert_eq!(reopen(&text).amount_used(0, HOUR), 200);
    }

    #[test]
    fn usage_during_a_write_is_covered_by_the_old_file_and_the_new_one() {
        let mut window = SlidingWindow::default();
        window.want(1000, 160);
        let old = window.begin_write();
        window.finish_write(&old);
        window.charge(0, HOUR, 300);
        let new = window.begin_write();
        assert_eq!(window.room(), 710);
        window.charge(0, HOUR, 710);
        for text in [&old, &new].map(|file| serde_json::to_string(file).unwrap()) {
            assert_eq!(reopen(&text).amount_used(0, HOUR), 1010);
        }
        window.finish_write(&new);
        assert_eq!(window.room(), 0, "all of the new allowance is used");
    }

    #[test]
    fn what_was_not_used_is_given_back_to_when_it_was_taken() {
        let mut window = SlidingWindow::default();
        window.charge(0, HOUR, 10);
        window.charge(60_000, HOUR, 10);
        window.refund(0, HOUR, 4);
        assert_eq!(window.amount_used(60_000, HOUR), 16);
        assert_eq!(window.amount_used(3_660_000, HOUR), 10);
        window.refund(0, HOUR, 4);
        assert_eq!(window.amount_used(3_660_000, HOUR), 10, "that part has expired");
    }
}
