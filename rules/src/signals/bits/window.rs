//! The budget: how many bits requests may say in any hour.

use serde::{Deserialize, Serialize};

/// The time that a budget is for.
pub const WINDOW_MS: u64 = 60 * BUCKET_MS;
/// Resolution of the window. An hour can touch one bucket more than it has room for, so one more is kept.
const BUCKET_MS: u64 = 60_000;
const BUCKETS: usize = 61;
/// What the end of a sequence of requests costs, once per window: see the argument in [`super`].
pub(super) const END_MILLIBITS: u64 = 8_000;

/// What was charged in the past hour. One window belongs to one budget, whatever hosts that covers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BitWindow {
    /// Number of the newest bucket since the epoch of the caller's clock.
    newest: u64,
    /// Millibits by bucket, newest first.
    charged: Vec<u64>,
}

/// Error for a charge beyond the budget. Nothing was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} bits of {limit} were used in the past hour", .used_millibits.div_ceil(1_000))]
pub struct BitsExhausted {
    pub used_millibits: u64,
    /// What the request would have cost in addition.
    pub wanted_millibits: u64,
    /// The budget, in bits.
    pub limit: u64,
    /// When the same charge would succeed, if nothing else is charged. `None` if the budget is smaller than the charge.
    pub refills_in_ms: Option<u64>,
}

impl BitWindow {
    /// Charges `millibits` if the hour that ends now has room for them in a budget of `limit` bits.
    ///
    /// # Errors
    ///
    /// Returns [`BitsExhausted`] if not; the request must not leave.
    pub fn charge(&mut self, millibits: u64, limit: u64, now_ms: u64) -> Result<(), BitsExhausted> {
        self.advance(now_ms);
        let used = self.sum();
        let room = limit.saturating_mul(1_000).saturating_sub(END_MILLIBITS);
        if used.saturating_add(millibits) <= room {
            self.add(millibits);
            return Ok(());
        }
        let refills_in_ms = self.refills_in(room.checked_sub(millibits), used, now_ms);
        Err(BitsExhausted { used_millibits: used, wanted_millibits: millibits, limit, refills_in_ms })
    }

    /// Charges `millibits` whether there is room or not: for a request that leaves although the budget is exhausted.
    pub fn charge_beyond(&mut self, millibits: u64, now_ms: u64) {
        self.advance(now_ms);
        self.add(millibits);
    }

    /// Returns what was charged in the past hour, in millibits.
    pub fn used_millibits(&mut self, now_ms: u64) -> u64 {
        self.advance(now_ms);
        self.sum()
    }

    /// Starts the bucket of `now_ms`. A clock that went back stays in the newest bucket, which forgets later, not
    /// earlier.
    fn advance(&mut self, now_ms: u64) {
        let bucket = now_ms / BUCKET_MS;
        self.charged.truncate(BUCKETS);
        if self.charged.is_empty() {
            self.newest = bucket;
            self.charged.push(0);
        }
        if bucket <= self.newest {
            return;
        }
        let passed = usize::try_from(bucket - self.newest).unwrap_or(BUCKETS).min(BUCKETS);
        self.charged.splice(0..0, std::iter::repeat_n(0, passed));
        self.charged.truncate(BUCKETS);
        self.newest = bucket;
    }

    fn sum(&self) -> u64 {
        self.charged.iter().fold(0, |sum, charged| sum.saturating_add(*charged))
    }

    fn add(&mut self, millibits: u64) {
        if let Some(newest) = self.charged.first_mut() {
            *newest = newest.saturating_add(millibits);
        }
    }

    /// Returns the time until at most `target` of the `used` bits are in the window.
    fn refills_in(&self, target: Option<u64>, used: u64, now_ms: u64) -> Option<u64> {
        let target = target?;
        let mut left = used;
        for (age, charged) in self.charged.iter().enumerate().rev() {
            left = left.saturating_sub(*charged);
            if left <= target {
                // The bucket leaves when it is BUCKETS old.
                let leaves = (self.newest + (BUCKETS - age) as u64).saturating_mul(BUCKET_MS);
                return Some(leaves.saturating_sub(now_ms));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn p19_a_charge_beyond_the_budget_is_refused_until_the_hour_has_passed() {
        let mut window = BitWindow::default();
        let limit = 108; // 8 of them for the end
        assert_eq!(window.charge(60_000, limit, 30_000), Ok(()));
        assert_eq!(window.charge(40_000, limit, 90_000), Ok(()));
        let exhausted = window.charge(1, limit, 100_000).unwrap_err();
        assert_eq!((exhausted.used_millibits, exhausted.limit), (100_000, 108));
        let again = 100_000 + exhausted.refills_in_ms.unwrap();
        assert_eq!(window.clone().charge(1, limit, again - 1).map_err(|_| ()), Err(()));
        assert_eq!(window.charge(60_000, limit, again), Ok(()));
        assert_eq!(window.charge(100_001, limit, again).unwrap_err().refills_in_ms, None);
        assert_eq!(window.charge(1, 0, again).unwrap_err().refills_in_ms, None);
        // A clock that goes back frees nothing.
        assert!(window.charge(1, limit, 0).is_err());
        assert_eq!(window.used_millibits(u64::MAX), 0);
        window.charge_beyond(u64::MAX, u64::MAX);
        window.charge_beyond(u64::MAX, u64::MAX);
        assert!(window.charge(1, u64::MAX, u64::MAX).is_err());
    }

    proptest! {
        #[test]
        fn p19_no_hour_has_more_than_the_budget(
            charges in prop::collection::vec((0..300_000_u64, 0..40_000_u64), 1..300),
        ) {
            let (mut window, mut now, limit) = (BitWindow::default(), 0, 208);
            let mut passed: Vec<(u64, u64)> = Vec::new();
            for (wait, millibits) in charges {
                now += wait;
                match window.charge(millibits, limit, now) {
                    Ok(()) => passed.push((now, millibits)),
                    Err(exhausted) => {
                        let wait = exhausted.refills_in_ms.unwrap();
                        prop_assert!(window.clone().charge(millibits, limit, now + wait).is_ok());
                    }
                }
                let hour: u64 =
                    passed.iter().filter(|(at, _)| at + WINDOW_MS > now).map(|(_, millibits)| millibits).sum();
                prop_assert!(hour <= 200_000);
            }
        }
    }
}
