//! Quotas of the filter: a total that sandboxes share, of which each has a part that no other can take (P20).

use std::fmt;
use std::sync::{Arc, Mutex};

use rules::RuleSet;
use rules::ids::SandboxId;
use rules::share::{ShareExhausted, ShareTerms, SharedTotal};

use crate::lock;

/// One total and who uses it.
#[derive(Debug)]
pub(crate) struct SandboxQuota {
    /// What is counted, for records.
    what: &'static str,
    /// The total, and the most that one sandbox may have of it.
    bounds: (usize, usize),
    used: Mutex<QuotaUse>,
}

#[derive(Debug)]
struct QuotaUse {
    /// Generation of the rules that the shares come from.
    generation: u64,
    total: SharedTotal,
}

/// One place in a quota, until dropped.
#[derive(Debug)]
pub(crate) struct QuotaSlot {
    quota: Arc<SandboxQuota>,
    sandbox: SandboxId,
}

/// A sandbox has no place left.
#[derive(Clone, Debug)]
pub(crate) struct QuotaExhausted {
    what: &'static str,
    sandbox: SandboxId,
    exhausted: ShareExhausted,
}

impl SandboxQuota {
    /// A quota of `total` places, of which one sandbox may have `cap`.
    pub(crate) fn new(what: &'static str, total: usize, cap: usize) -> Arc<Self> {
        let used = SharedTotal::new(ShareTerms::halved(total as u64, cap as u64, 1), 1);
        Arc::new(SandboxQuota {
            what,
            bounds: (total, cap),
            used: Mutex::new(QuotaUse { generation: 0, total: used }),
        })
    }

    /// Takes a place for a sandbox. The shares follow the number of sandboxes in the rules.
    pub(crate) fn acquire(
        self: &Arc<Self>,
        rules: &RuleSet,
        sandbox: &SandboxId,
    ) -> Result<QuotaSlot, QuotaExhausted> {
        let mut used = lock(&self.used);
        if rules.generation() > used.generation {
            let (count, (total, cap)) = (rules.sandboxes().iter().count() as u64, self.bounds);
            used.total.set_terms(ShareTerms::halved(total as u64, cap as u64, count), count);
            used.generation = rules.generation();
        }
        match used.total.take(sandbox, 1) {
            Ok(()) => Ok(QuotaSlot { quota: self.clone(), sandbox: sandbox.clone() }),
            Err(exhausted) => Err(QuotaExhausted { what: self.what, sandbox: sandbox.clone(), exhausted }),
        }
    }

    pub(crate) fn in_use(&self) -> usize {
        lock(&self.used).total.in_use() as usize
    }
}

impl Drop for QuotaSlot {
    fn drop(&mut self) {
        lock(&self.quota.used).total.give_back(&self.sandbox, 1);
    }
}

impl fmt::Display for QuotaExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let QuotaExhausted { what, sandbox, exhausted } = self;
        write!(f, "{what}: sandbox `{sandbox}` {exhausted}")
    }
}
