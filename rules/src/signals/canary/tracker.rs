//! Puts the pieces of canaries together over requests.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use super::scan::{CanaryScanner, CanarySet};
use crate::signals::{Signal, SignalCode, SignalPlace};

/// Which characters of which canaries left one sandbox, and when. Keeps at most 4 bytes per character of each value.
#[derive(Debug)]
pub struct CanaryTracker {
    set: Arc<CanarySet>,
    window: u64,
    /// For each value that was seen at all, when each of its characters was seen last; 0 is never.
    seen: HashMap<u16, Box<[u32]>, foldhash::fast::FixedState>,
}

impl CanaryTracker {
    /// Makes a tracker that puts together what leaves within `window`.
    pub fn new(set: Arc<CanarySet>, window: Duration) -> Self {
        CanaryTracker { set, window: window.as_secs(), seen: HashMap::default() }
    }

    /// Uses another set from now on. What was seen of canaries that stay is kept.
    pub fn replace_set(&mut self, set: Arc<CanarySet>) {
        let mut seen = HashMap::default();
        for (at, value) in (0_u16..).zip(&set.values) {
            let same = (0_u16..).zip(&self.set.values).find(|(_, old)| old.text == value.text);
            if let Some(times) = same.and_then(|(old, _)| self.seen.remove(&old)) {
                seen.insert(at, times);
            }
        }
        (self.set, self.seen) = (set, seen);
    }

    /// Takes the pieces that a scanner found, and reports each canary of which enough left. Its count begins anew then.
    ///
    /// Pieces of a scanner with another set are dropped. `now` is in seconds since the epoch.
    pub fn record(
        &mut self,
        scanner: &mut CanaryScanner,
        place: &SignalPlace,
        now: u64,
        found: &mut Vec<Signal>,
    ) {
        let is_current = Arc::ptr_eq(&self.set, scanner.set());
        for (index, covered) in scanner.take_pieces() {
            let Some(value) = self.set.values.get(usize::from(index)).filter(|_| is_current) else {
                continue;
            };
            let times = self.seen.entry(index).or_insert_with(|| vec![0; value.text.len()].into());
            for (position, time) in times.iter_mut().enumerate() {
                if covered >> position & 1 == 1 {
                    *time = u32::try_from(now).unwrap_or(u32::MAX).max(1);
                }
            }
            let is_recent = |time: &&u32| **time != 0 && now.saturating_sub(u64::from(**time)) < self.window;
            let count = times.iter().filter(is_recent).count();
            if count < value.threshold {
                continue;
            }
            self.seen.remove(&index);
            let Some(canary) = self.set.canaries().get(value.canary) else { continue };
            found.push(Signal {
                code: SignalCode::CanaryUsed,
                place: place.clone(),
                encodings: Vec::new(),
                what: format!("canary \"{}\"", canary.name()),
                value: count as u64,
                threshold: value.threshold as u64,
            });
        }
    }

    /// Forgets what is older than the window, so that an idle sandbox keeps nothing.
    pub fn expire(&mut self, now: u64) {
        let is_recent = |time: &u32| *time != 0 && now.saturating_sub(u64::from(*time)) < self.window;
        self.seen.retain(|_, times| times.iter().any(is_recent));
    }

    /// Returns how many values were seen in part.
    pub fn len(&self) -> usize {
        self.seen.len()
    }

    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }
}
