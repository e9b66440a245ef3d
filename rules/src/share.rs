//! Shares: how a total is divided among sandboxes, so that none can take what another needs (P20).
//!
//! Each sandbox has a *share* that nobody else can take. What the shares leave of the total is *common*: a sandbox
//! that needs more than its share borrows from it, up to its own cap. So one busy sandbox can use most of an idle
//! gateway, and still a quiet one always gets its share.

use std::collections::HashMap;
use std::fmt;

use crate::ids::SandboxId;

/// How one total is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareTerms {
    /// What all sandboxes may use together.
    pub total: u64,
    /// What one sandbox may use at most.
    pub cap: u64,
    /// What is kept for each sandbox.
    pub share: u64,
}

/// A total, and what each sandbox uses of it.
#[derive(Clone, Debug)]
pub struct SharedTotal {
    terms: ShareTerms,
    /// How many sandboxes have a share.
    sandboxes: u64,
    used: HashMap<SandboxId, u64>,
    in_use: u64,
    /// What sandboxes use beyond their shares.
    borrowed: u64,
}

/// Why a sandbox cannot have more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareExhausted {
    pub bound: ShareBound,
    /// What the sandbox uses already.
    pub used: u64,
    /// What it asked for in addition.
    pub wanted: u64,
    pub terms: ShareTerms,
}

/// The bound that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareBound {
    /// The sandbox's own cap.
    Cap,
    /// The sandbox has its share, and the common part is used up.
    Common,
}

/// Error for shares that do not fit into their total.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{sandboxes} sandboxes x {share} = {}, but the total is {total}", .sandboxes.saturating_mul(*.share))]
pub struct SharesExceedTotal {
    pub sandboxes: u64,
    pub share: u64,
    pub total: u64,
}

impl ShareTerms {
    /// Divides `total` among `sandboxes`: half of it in equal shares, half in common.
    pub fn halved(total: u64, cap: u64, sandboxes: u64) -> Self {
        let share = total / 2 / sandboxes.max(1);
        ShareTerms { total, cap, share: share.min(cap) }
    }

    /// Checks that the shares fit into the total.
    ///
    /// # Errors
    ///
    /// Returns [`SharesExceedTotal`], which shows the arithmetic.
    pub fn check(&self, sandboxes: u64) -> Result<(), SharesExceedTotal> {
        let ShareTerms { total, share, .. } = *self;
        match sandboxes.saturating_mul(share) > total {
            true => Err(SharesExceedTotal { sandboxes, share, total }),
            false => Ok(()),
        }
    }
}

impl SharedTotal {
    pub fn new(terms: ShareTerms, sandboxes: u64) -> Self {
        SharedTotal { terms, sandboxes, used: HashMap::new(), in_use: 0, borrowed: 0 }
    }

    /// Takes `amount` for a sandbox.
    ///
    /// # Errors
    ///
    /// Returns [`ShareExhausted`] if the sandbox reached its cap, or has its share and nothing common is left. Nothing
    /// is taken then.
    pub fn take(&mut self, sandbox: &SandboxId, amount: u64) -> Result<(), ShareExhausted> {
        let used = self.used_by(sandbox);
        let wanted = used.saturating_add(amount);
        let exhausted = |bound| ShareExhausted { bound, used, wanted: amount, terms: self.terms };
        if wanted > self.terms.cap {
            return Err(exhausted(ShareBound::Cap));
        }
        let borrow = self.beyond_share(wanted) - self.beyond_share(used);
        if borrow > 0 && self.borrowed.saturating_add(borrow) > self.common() {
            return Err(exhausted(ShareBound::Common));
        }
        self.borrowed += borrow;
        self.in_use += amount;
        match self.used.get_mut(sandbox) {
            Some(used) => *used = wanted,
            None => drop(self.used.insert(sandbox.clone(), wanted)),
        }
        Ok(())
    }

    /// Gives back what [`SharedTotal::take`] took.
    pub fn give_back(&mut self, sandbox: &SandboxId, amount: u64) {
        let Some(used) = self.used.get(sandbox).copied() else { return };
        let rest = used.saturating_sub(amount);
        self.borrowed -= self.beyond_share(used) - self.beyond_share(rest);
        self.in_use -= used - rest;
        match self.used.get_mut(sandbox) {
            Some(used) if rest > 0 => *used = rest,
            Some(_) | None => drop(self.used.remove(sandbox)),
        }
    }

    /// Applies new terms. What is in use stays in use, even if it exceeds them.
    pub fn set_terms(&mut self, terms: ShareTerms, sandboxes: u64) {
        (self.terms, self.sandboxes) = (terms, sandboxes);
        self.borrowed = self.used.values().map(|used| self.beyond_share(*used)).sum();
    }

    pub fn terms(&self) -> ShareTerms {
        self.terms
    }

    pub fn used_by(&self, sandbox: &SandboxId) -> u64 {
        self.used.get(sandbox).copied().unwrap_or_default()
    }

    /// Returns how much more a sandbox could take.
    pub fn available(&self, sandbox: &SandboxId) -> u64 {
        let used = self.used_by(sandbox);
        let own = self.terms.share.saturating_sub(used);
        let common = self.common().saturating_sub(self.borrowed);
        own.saturating_add(common).min(self.terms.cap.saturating_sub(used))
    }

    /// Returns how much a sandbox uses beyond what it could take now: after new terms, if it used much before.
    pub fn excess(&self, sandbox: &SandboxId) -> u64 {
        let used = self.used_by(sandbox);
        let borrowed_too_much = self.borrowed.saturating_sub(self.common()).min(self.beyond_share(used));
        borrowed_too_much.max(used.saturating_sub(self.terms.cap))
    }

    /// Returns every sandbox that uses something, and how much.
    pub fn used(&self) -> impl Iterator<Item = (&SandboxId, u64)> {
        self.used.iter().map(|(id, used)| (id, *used))
    }

    /// Returns what all sandboxes use together.
    pub fn in_use(&self) -> u64 {
        self.in_use
    }

    fn beyond_share(&self, used: u64) -> u64 {
        used.saturating_sub(self.terms.share)
    }

    /// Returns what the shares leave.
    fn common(&self) -> u64 {
        self.terms.total.saturating_sub(self.terms.share.saturating_mul(self.sandboxes))
    }
}

impl fmt::Display for ShareExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ShareExhausted { used, wanted, terms, .. } = self;
        match self.bound {
            ShareBound::Cap => {
                write!(f, "uses {used} of the {} it may use and asked for {wanted}", terms.cap)
            }
            ShareBound::Common => write!(
                f,
                "uses {used} (its share is {}) and asked for {wanted}, but what is common to all sandboxes is used up",
                terms.share
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(number: u64) -> SandboxId {
        SandboxId::parse(&format!("s{number}")).unwrap()
    }

    #[test]
    fn p20_a_share_cannot_be_taken_by_another() {
        let mut total = SharedTotal::new(ShareTerms { total: 100, cap: 100, share: 25 }, 2);
        assert_eq!(total.take(&id(1), 75), Ok(()), "its share and all that is common");
        let refused = total.take(&id(1), 1).unwrap_err();
        assert_eq!((refused.bound, refused.used), (ShareBound::Common, 75));
        assert_eq!(total.take(&id(2), 25), Ok(()));
        assert_eq!(total.take(&id(2), 1).unwrap_err().bound, ShareBound::Common);
        total.give_back(&id(1), 50);
        assert_eq!(total.take(&id(2), 50), Ok(()));
        assert_eq!(total.in_use(), 100);
    }

    #[test]
    fn p17_a_cap_bounds_what_is_borrowed() {
        let mut total = SharedTotal::new(ShareTerms { total: 100, cap: 30, share: 10 }, 2);
        assert_eq!(total.take(&id(1), 31).unwrap_err().bound, ShareBound::Cap);
        assert_eq!(total.take(&id(1), 30), Ok(()));
        assert_eq!(total.take(&id(1), 1).unwrap_err().bound, ShareBound::Cap);
    }

    #[test]
    fn p17_what_new_terms_do_not_allow_is_excess() {
        let mut total = SharedTotal::new(ShareTerms { total: 100, cap: 100, share: 50 }, 1);
        assert_eq!(total.take(&id(1), 100), Ok(()));
        assert_eq!(total.excess(&id(1)), 0);
        total.set_terms(ShareTerms { total: 100, cap: 100, share: 25 }, 2);
        assert_eq!((total.excess(&id(1)), total.excess(&id(2))), (25, 0));
        total.give_back(&id(1), 25);
        assert_eq!(total.excess(&id(1)), 0);
        assert_eq!(total.take(&id(2), 25), Ok(()));
        total.set_terms(ShareTerms { total: 100, cap: 30, share: 25 }, 2);
        assert_eq!(total.excess(&id(1)), 45);
    }

    #[test]
    fn shares_must_fit() {
        let terms = ShareTerms { total: 100, cap: 100, share: 30 };
        assert!(terms.check(3).is_ok());
        let error = terms.check(4).unwrap_err().to_string();
        assert_eq!(error, "4 sandboxes x 30 = 120, but the total is 100");
        for sandboxes in [0, 1, 3, 1000] {
            assert!(ShareTerms::halved(100, 100, sandboxes).check(sandboxes).is_ok());
        }
    }

    proptest! {
        /// Whatever the others do, a sandbox below its share gets it, and the total is never exceeded.
        #[test]
        fn p20_shares_hold_for_every_sequence(
            total in 1_u64..1000,
            cap in 1_u64..1000,
            steps in prop::collection::vec((0_u64..4, 0_u64..400, any::<bool>()), 1..80),
        ) {
            let terms = ShareTerms::halved(total, cap, 4);
            let mut shared = SharedTotal::new(terms, 4);
            let mut held: HashMap<u64, Vec<u64>> = HashMap::new();
            for (who, amount, give) in steps {
                if give {
                    if let Some(amount) = held.entry(who).or_default().pop() {
                        shared.give_back(&id(who), amount);
                    }
                } else {
                    let used = shared.used_by(&id(who));
                    let taken = shared.take(&id(who), amount);
                    if used + amount <= terms.share {
                        prop_assert_eq!(taken, Ok(()));
                    }
                    if taken.is_ok() {
                        held.entry(who).or_default().push(amount);
                    }
                }
                let expected: u64 = held.values().flatten().sum();
                prop_assert_eq!(shared.in_use(), expected);
                prop_assert!(shared.in_use() <= total);
            }
        }
    }
}
