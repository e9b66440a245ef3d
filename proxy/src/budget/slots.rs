//! The connection limit: how many connections may be open, in total and per sandbox.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use rules::Reason;
use rules::ids::SandboxId;
use rules::limits::TrafficLimits;

use crate::budget::ledger::Exhausted;
use crate::report::refusal::Refusal;

/// Counts open connections.
#[derive(Debug, Default)]
pub(crate) struct ConnectionLimit(Mutex<SlotCounts>);

#[derive(Debug, Default)]
struct SlotCounts {
    all: u64,
    by: HashMap<SandboxId, u64>,
}

/// One connection's slot, released on drop.
#[derive(Debug)]
#[must_use = "dropping a slot releases it"]
pub(crate) struct Slot {
    limit: Arc<ConnectionLimit>,
    sandbox: SandboxId,
}

impl ConnectionLimit {
    /// Takes a slot for a connection of `sandbox`.
    ///
    /// # Errors
    ///
    /// Returns a refusal if the sandbox's `connections` budget or one of the limits is reached.
    pub(crate) fn acquire(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        limits: &TrafficLimits,
        budget: Option<u64>,
    ) -> Result<Slot, Refusal> {
        let mut taken = self.lock();
        let open = taken.by.get(sandbox).copied().unwrap_or_default();
        if let Some(limit) = budget.filter(|limit| open >= *limit) {
            return Err(Exhausted::connections(limit).into());
        }
        if taken.all >= limits.connections || open >= limits.connections_per_sandbox {
            return Err(Reason::TooManyConnections.into());
        }
        taken.all += 1;
        taken.by.insert(sandbox.clone(), open + 1);
        Ok(Slot { limit: self.clone(), sandbox: sandbox.clone() })
    }

    /// Returns the number of open connections.
    pub(crate) fn in_use(&self) -> u64 {
        self.lock().all
    }

    fn lock(&self) -> MutexGuard<'_, SlotCounts> {
        sys::lock(&self.0)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.limit.lock();
        taken.all -= 1;
        if let Some(open) = taken.by.get_mut(&self.sandbox) {
            *open -= 1;
            if *open == 0 {
                taken.by.remove(&self.sandbox);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p17_no_more_than_the_limits_and_each_is_given_back() {
        let limits = TrafficLimits { connections: 3, connections_per_sandbox: 2, ..TrafficLimits::default() };
        let (limit, a, b) =
            (Arc::new(ConnectionLimit::default()), SandboxId::parse("a"), SandboxId::parse("b"));
        let (a, b) = (a.unwrap(), b.unwrap());
        let refused = |id, budget| limit.acquire(id, &limits, budget).unwrap_err().reason;
        let one = limit.acquire(&a, &limits, Some(2)).unwrap();
        assert_eq!(refused(&a, Some(1)), Reason::BudgetSpent);
        let _two = limit.acquire(&a, &limits, None).unwrap();
        assert_eq!(refused(&a, Some(9)), Reason::TooManyConnections);
        let _three = limit.acquire(&b, &limits, None).unwrap();
        assert_eq!(refused(&b, None), Reason::TooManyConnections);
        drop(one);
        assert!(limit.acquire(&b, &limits, None).is_ok());
        assert_eq!(limit.in_use(), 2);
    }
}
