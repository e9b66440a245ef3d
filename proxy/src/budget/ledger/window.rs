//! How much was used within a time that slides: in any hour no more than the limit, not in any hour of a clock.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Parts that a window is counted in; what was used leaves it a part at a time.
const PARTS: u64 = 60;
/// What may be used between two writings of the file, as a part of the limit: it counts as used after a crash.
const AHEAD: u64 = 16;

/// What was used, by the part of time it was used in.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Window {
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
pub(super) fn lease(limit: u64) -> u64 {
    limit / AHEAD / 2
}

/// The length of a part in milliseconds; one endless part where nothing is ever given back.
fn part(window: Option<Duration>) -> u64 {
    window.map_or(u64::MAX, |window| (window.as_millis() as u64 / PARTS).max(1))
}

/// When a part has left the window. A file may say anything of when it was.
fn end(at: u64, length: u64) -> u64 {
    at.saturating_add(PARTS + 1).saturating_mul(length)
}

impl Window {
    /// Takes up what an earlier process wrote; what it may have used beyond is counted as used.
    pub(super) fn restore(&mut self, now: u64, window: Option<Duration>) {
        let ahead = std::mem::take(&mut self.ahead);
        self.used = self.parts.iter().fold(0, |sum, (_, used)| sum.saturating_add(*used));
        self.add(now / part(window), ahead);
    }

    /// What was used and still counts.
    pub(super) fn used(&mut self, now: u64, window: Option<Duration>) -> u64 {
        let current = now / part(window);
        while self.parts.front().is_some_and(|(at, _)| at.saturating_add(PARTS) < current) {
            let (_, gone) = self.parts.pop_front().unwrap_or_default();
            self.used = self.used.saturating_sub(gone);
        }
        self.used
    }

    pub(super) fn charge(&mut self, now: u64, window: Option<Duration>, amount: u64) {
        self.add(now / part(window), amount);
        self.unwritten = self.unwritten.saturating_add(amount);
    }

    /// Takes back what was charged at `then` and not used; what has left the window meanwhile is gone.
    pub(super) fn give_back(&mut self, then: u64, window: Option<Duration>, amount: u64) {
        let at = then / part(window);
        if let Some((_, used)) = self.parts.iter_mut().find(|(part, _)| *part == at) {
            let back = amount.min(*used);
            *used -= back;
            self.used = self.used.saturating_sub(back);
            self.unwritten = self.unwritten.saturating_sub(back);
        }
    }

    /// When `amount` more can be used; none if never.
    pub(super) fn free_at(&self, window: Option<Duration>, limit: u64, amount: u64) -> Option<u64> {
        let length = window.map(|_| part(window))?;
        let mut used = self.used;
        for (at, gone) in &self.parts {
            used = used.saturating_sub(*gone);
            if used.saturating_add(amount.min(limit)) <= limit && limit > 0 {
                return Some(end(*at, length));
            }
        }
        None
    }

    /// Whether more was used than the file allows for.
    pub(super) fn is_unkept(&self) -> bool {
        self.unwritten > self.ahead
    }

    /// As it is to be written: with leave to use a little before it is written again.
    pub(super) fn written(&mut self, limit: u64) {
        (self.unwritten, self.ahead) = (0, limit / AHEAD);
    }

    /// It could not be written: nothing more may be used before it is.
    pub(super) fn unwritten(&mut self) {
        self.ahead = 0;
    }

    /// When the first of what was used comes back.
    pub(super) fn first_back(&self, window: Option<Duration>) -> Option<u64> {
        let length = window.map(|_| part(window))?;
        self.parts.front().map(|(at, _)| end(*at, length))
    }

    /// As it is to be written last: nothing more will be used.
    pub(super) fn settle(&mut self) {
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
            let (mut window, mut now, mut taken) = (Window::default(), 0, Vec::new());
            for (pause, amount) in stream {
                now += pause;
                if window.used(now, HOUR) + amount <= limit {
                    window.charge(now, HOUR, amount);
                    taken.push((now, amount));
                } else if let Some(free) = window.free_at(HOUR, limit, amount) {
                    let mut later = window.clone();
                    prop_assert!(later.used(free, HOUR) + amount.min(limit) <= limit);
                    prop_assert!(free > now);
                }
                let hour = taken.iter().filter(|(then, _)| then + 3_600_000 > now);
                prop_assert!(hour.map(|(_, amount)| amount).sum::<u64>() <= limit);
            }
        }
    }

    #[test]
    fn what_was_used_leaves_after_the_window_and_not_before() {
        let mut window = Window::default();
        window.charge(59_999, HOUR, 5);
        assert_eq!(window.used(3_659_999, HOUR), 5);
        assert_eq!(window.free_at(HOUR, 5, 1), Some(3_660_000));
        assert_eq!(window.used(3_660_000, HOUR), 0);
        let mut endless = Window::default();
        endless.charge(1, None, 5);
        assert_eq!(endless.used(u64::MAX - 1, None), 5);
        assert_eq!(endless.free_at(None, 5, 1), None);
    }

    #[test]
    fn a_crash_uses_up_what_may_have_been_used() {
        let mut window = Window::default();
        window.charge(0, HOUR, 100);
        assert!(window.is_unkept());
        window.written(1600);
        let text = serde_json::to_string(&window).unwrap();
        window.charge(0, HOUR, 100);
        assert!(!window.is_unkept(), "so much may be used before it is written again");
        let mut crashed: Window = serde_json::from_str(&text).unwrap();
        crashed.restore(0, HOUR);
        assert_eq!(crashed.used(0, HOUR), 200);
        window.settle();
        let mut orderly: Window =
            serde_json::from_str(&serde_json::to_string(&window).unwrap()).unwrap();
        orderly.restore(0, HOUR);
        assert_eq!(orderly.used(0, HOUR), 200);
    }

    #[test]
    fn what_was_not_used_is_given_back_to_when_it_was_taken() {
        let mut window = Window::default();
        window.charge(0, HOUR, 10);
        window.charge(60_000, HOUR, 10);
        window.give_back(0, HOUR, 4);
        assert_eq!(window.used(60_000, HOUR), 16);
        assert_eq!(window.used(3_660_000, HOUR), 10);
        window.give_back(0, HOUR, 4);
        assert_eq!(window.used(3_660_000, HOUR), 10, "that has left already");
    }
}
