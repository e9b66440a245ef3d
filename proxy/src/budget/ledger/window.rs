//! How much was used within a time that slides: in any hour no more than the limit, not in any hour of a clock.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Parts that a window is counted in; what was used leaves it a part at a time.
const WINDOW_PARTS: u64 = 60;
/// What may be used between two writings of the file, as a part of the limit: it counts as used after a crash.
const AHEAD_DIVISOR: u64 = 16;

/// What was used, by the part of time it was used in.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SlidingWindow {
    /// Parts in which something was used, with how much.
    parts: VecDeque<(u64, u64)>,
    /// What may have been used without being written: given up by a restart, unless it was orderly.
    ahead: u64,
    #[serde(skip)]
    used: u64,
    #[serde(skip)]
    unwritten: u64,
}

/// The most that is leased of a limit at a time: half of what may be used without being written, so that a lease
/// that is hardly used writes nothing.
pub(super) fn max_lease(limit: u64) -> u64 {
    limit / AHEAD_DIVISOR / 2
}

/// The length of a part in milliseconds; one endless part where nothing is ever given back.
fn part_length(window: Option<Duration>) -> u64 {
    window.map_or(u64::MAX, |window| (window.as_millis() as u64 / WINDOW_PARTS).max(1))
}

/// When a part has left the window. A file may say anything of when it was.
fn part_end(at: u64, length: u64) -> u64 {
    at.saturating_add(WINDOW_PARTS + 1).saturating_mul(length)
}

impl SlidingWindow {
    /// Takes up what an earlier process wrote; what it may have used beyond is counted as used.
    pub(super) fn restore(&mut self, now: u64, window: Option<Duration>) {
        let ahead = std::mem::take(&mut self.ahead);
        self.used = self.parts.iter().fold(0, |sum, (_, used)| sum.saturating_add(*used));
        self.add(now / part_length(window), ahead);
    }

    /// What was used and still counts.
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

    /// Takes back what was charged at `then` and not used; what has left the window meanwhile is gone.
    pub(super) fn refund(&mut self, then: u64, window: Option<Duration>, amount: u64) {
        let at = then / part_length(window);
        if let Some((_, used)) = self.parts.iter_mut().find(|(part, _)| *part == at) {
            let back = amount.min(*used);
            *used -= back;
            self.used = self.used.saturating_sub(back);
            self.unwritten = self.unwritten.saturating_sub(back);
        }
    }

    /// When `amount` more can be used; none if never.
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

    /// Whether more was used than the file allows for.
    pub(super) fn needs_write(&self) -> bool {
        self.unwritten > self.ahead
    }

    /// As it is to be written: with leave to use a little before it is written again.
    pub(super) fn mark_written(&mut self, limit: u64) {
        (self.unwritten, self.ahead) = (0, limit / AHEAD_DIVISOR);
    }

    /// It could not be written: nothing more may be used before it is.
    pub(super) fn mark_unwritten(&mut self) {
        self.ahead = 0;
    }

    /// When the first of what was used comes back.
    pub(super) fn first_refill(&self, window: Option<Duration>) -> Option<u64> {
        let length = window.map(|_| part_length(window))?;
        self.parts.front().map(|(at, _)| part_end(*at, length))
    }

    /// As it is to be written last: nothing more will be used.
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
        /// Whatever is taken and whenever: no hour sees more than the limit, and what left it can be used again.
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
        assert!(!window.needs_write(), "so much may be used before it is written again");
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
        assert_eq!(window.amount_used(3_660_000, HOUR), 10, "that has left already");
    }
}
