//! How many connections are open, in all and by sandbox, and no more than the limits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use rules::Reason;
use rules::ids::SandboxId;
use rules::limits::TrafficLimits;

use crate::budget::ledger::Exhausted;
use crate::report::refusal::Refusal;

/// The connections that are taken.
#[derive(Debug, Default)]
pub(crate) struct ConnectionLimit(Mutex<SlotCounts>);

#[derive(Debug, Default)]
struct SlotCounts {
    all: u64,
    by: HashMap<SandboxId, u64>,
}

/// One connection's place, given up when this is dropped.
#[derive(Debug)]
#[must_use = "a seat that is not held is free for the next"]
pub(crate) struct Slot {
    seats: Arc<ConnectionLimit>,
    whose: SandboxId,
}

impl ConnectionLimit {
    /// Takes a place for a connection of `whose`, which may have as many open as its budget says.
    pub(crate) fn acquire(
        self: &Arc<Self>,
        whose: &SandboxId,
        limits: &TrafficLimits,
        budget: Option<u64>,
    ) -> Result<Slot, Refusal> {
        let mut taken = self.lock();
        let own = taken.by.get(whose).copied().unwrap_or_default();
        if let Some(limit) = budget.filter(|limit| own >= *limit) {
            return Err(Exhausted::connections(limit).into());
        }
        if taken.all >= limits.connections || own >= limits.connections_per_sandbox {
            return Err(Reason::TooManyConnections.into());
        }
        taken.all += 1;
        taken.by.insert(whose.clone(), own + 1);
        Ok(Slot { seats: self.clone(), whose: whose.clone() })
    }

    /// Connections in all.
    pub(crate) fn in_use(&self) -> u64 {
        self.lock().all
    }

    fn lock(&self) -> MutexGuard<'_, SlotCounts> {
        sys::lock(&self.0)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.seats.lock();
        taken.all -= 1;
        if let Some(own) = taken.by.get_mut(&self.whose) {
            *own -= 1;
            if *own == 0 {
                taken.by.remove(&self.whose);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p17_no_more_than_the_limits_and_each_is_given_back() {
        let limits = TrafficLimits {
            connections: 3,
            connections_per_sandbox: 2,
            ..TrafficLimits::default()
        };
        let (seats, a, b) =
            (Arc::new(ConnectionLimit::default()), SandboxId::parse("a"), SandboxId::parse("b"));
        let (a, b) = (a.unwrap(), b.unwrap());
        let refused = |id, budget| seats.acquire(id, &limits, budget).unwrap_err().reason;
        let one = seats.acquire(&a, &limits, Some(2)).unwrap();
        assert_eq!(refused(&a, Some(1)), Reason::BudgetSpent);
        let _two = seats.acquire(&a, &limits, None).unwrap();
        assert_eq!(refused(&a, Some(9)), Reason::TooManyConnections);
        let _three = seats.acquire(&b, &limits, None).unwrap();
        assert_eq!(refused(&b, None), Reason::TooManyConnections);
        drop(one);
        assert!(seats.acquire(&b, &limits, None).is_ok());
        assert_eq!(seats.in_use(), 2);
    }
}
