//! A sliding window: the limit holds for any hour, not just for each hour of the clock.
//!
//! Exact sliding windows would store a timestamp per charge. This one divides the window into [`WINDOW_PARTS`] parts
//! and stores the usage per part, so its size is bounded whatever a sandbox does. A part expires as a whole, once all
//! of it is older than the window. So usage may count for up to one part too long (a minute, for an hourly budget),
//! and never too short: the limit is a limit for every interval of that length.
//!
//! Writing the file for every charge would cost a write per request. Instead each write also records an allowance
//! (`ahead`, a sixteenth of the limit) that may be used before the next write. After a crash the whole allowance
//! counts as used, because how much of it was used is unknown: a crash of the process can cost a sandbox some budget
//! but never refills any. (A power failure may lose the last writes, which are not synced.) A clean stop writes the
//! exact usage and no allowance.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Parts of a window; usage expires one part at a time.
const WINDOW_PARTS: u64 = 60;
/// The allowance between two writes is the limit divided by this; it counts as used after a crash.
const AHEAD_DIVISOR: u64 = 16;

/// Usage, by the part of time in which it happened.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SlidingWindow {
    /// Parts with usage, oldest first: the part's number since time zero, and the amount.
    parts: VecDeque<(u64, u64)>,
    /// The allowance: how much may be used after the last write without another.
    ahead: u64,
    #[serde(skip)]
    used: u64,
    #[serde(skip)]
    unwritten: u64,
}

/// Returns the largest lease for a limit: half of the allowance, so that a lease which is mostly refunded needs no
/// write.
pub(super) fn max_lease(limit: u64) -> u64 {
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
    pub(super) fn restore(&mut self, now: u64, window: Option<Duration>) {
        let ahead = std::mem::take(&mut self.ahead);
        self.used = self.parts.iter().fold(0, |sum, (_, used)| sum.saturating_add(*used));
        self.add(now / part_length(window), ahead);
    }

    /// Returns the usage within the window, dropping expired parts.
    pub(super) fn amount_used(&mut self, now: u64, window: Option<Duration>) -> u64 {
        let current = now / part_length(window);
        while self.parts.front().is_some_and(|(at, _)| at.saturating_add(WINDOW_PARTS) < current) {
            let (_, gone) = self.parts.pop_front().unwrap_or_default();
            self.used = self.used.saturating_sub(gone);
        }
        self.used
    }

    pub(super) fn charge(&mut self, now: u64, window: Option<Duration>, amount: u64) {
        self.add(now / part_length(window), amount);
        self.unwritten = self.unwritten.saturating_add(amount);
    }

    /// Refunds what was charged at `then`, unless that part has expired.
    pub(super) fn refund(&mut self, then: u64, window: Option<Duration>, amount: u64) {
        let at = then / part_length(window);
        if let Some((_, used)) = self.parts.iter_mut().find(|(part, _)| *part == at) {
            let back = amount.min(*used);
            *used -= back;
            self.used = self.used.saturating_sub(back);
            self.unwritten = self.unwritten.saturating_sub(back);
        }
    }

    /// Returns when `amount` more can be used, or `None` if never.
    pub(super) fn free_at(&self, window: Option<Duration>, limit: u64, amount: u64) -> Option<u64> {
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

    /// Whether usage since the last write exceeds the allowance.
    pub(super) fn needs_write(&self) -> bool {
        self.unwritten > self.ahead
    }

    /// Prepares for a write: grants a new allowance.
    pub(super) fn mark_written(&mut self, limit: u64) {
        (self.unwritten, self.ahead) = (0, limit / AHEAD_DIVISOR);
    }

    /// Withdraws the allowance after a failed write, so that the next charge tries to write again.
    pub(super) fn mark_unwritten(&mut self) {
        self.ahead = 0;
    }

    /// Returns when the oldest usage expires.
    pub(super) fn first_refill(&self, window: Option<Duration>) -> Option<u64> {
        let length = window.map(|_| part_length(window))?;
        self.parts.front().map(|(at, _)| part_end(*at, length))
    }

    /// Prepares for the last write: exact usage, no allowance.
    pub(super) fn finalize(&mut self) {
        (self.unwritten, self.ahead) = (0, 0);
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

    #[test]
    fn a_crash_uses_up_what_may_have_been_used() {
        let mut window = SlidingWindow::default();
        window.charge(0, HOUR, 100);
        assert!(window.needs_write());
        window.mark_written(1600);
        let text = serde_json::to_string(&window).unwrap();
        window.charge(0, HOUR, 100);
        assert!(!window.needs_write(), "the allowance needs no write");
        let mut crashed: SlidingWindow = serde_json::from_str(&text).unwrap();
        crashed.restore(0, HOUR);
        assert_eq!(crashed.amount_used(0, HOUR), 200);
        window.finalize();
        let mut orderly: SlidingWindow =
            serde_json::from_str(&serde_json::to_string(&window).unwrap()).unwrap();
        orderly.restore(0, HOUR);
        assert_eq!(orderly.amount_used(0, HOUR), 200);
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
