//! How many connections are open, in all and by sandbox, and no more than the limits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rules::Reason;
use rules::limits::Limits;
use rules::word::SandboxId;

use crate::budget::ledger::Spent;
use crate::report::refusal::Refusal;

/// The connections that are taken.
#[derive(Debug, Default)]
pub(crate) struct Seats(Mutex<Taken>);

#[derive(Debug, Default)]
struct Taken {
    all: u64,
    by: HashMap<SandboxId, u64>,
}

/// One connection's place, given up when this is dropped.
#[derive(Debug)]
#[must_use = "a seat that is not held is free for the next"]
pub(crate) struct Seat {
    seats: Arc<Seats>,
    whose: SandboxId,
}

impl Seats {
    /// Takes a place for a connection of `whose`, which may have as many open as its budget says.
    pub(crate) fn take(
        self: &Arc<Self>,
        whose: &SandboxId,
        limits: &Limits,
        budget: Option<u64>,
    ) -> Result<Seat, Refusal> {
        let mut taken = self.lock();
        let own = taken.by.get(whose).copied().unwrap_or_default();
        if let Some(limit) = budget.filter(|limit| own >= *limit) {
            return Err(Spent::connections(limit).into());
        }
        if taken.all >= limits.connections || own >= limits.connections_per_sandbox {
            return Err(Reason::TooManyConnections.into());
        }
        taken.all += 1;
        taken.by.insert(whose.clone(), own + 1);
        Ok(Seat { seats: self.clone(), whose: whose.clone() })
    }

    /// Connections in all.
    pub(crate) fn taken(&self) -> u64 {
        self.lock().all
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
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
    fn no_more_than_the_limits_and_each_is_given_back() {
        let limits = Limits { connections: 3, connections_per_sandbox: 2, ..Limits::default() };
        let (seats, a, b) =
            (Arc::new(Seats::default()), SandboxId::parse("a"), SandboxId::parse("b"));
        let (a, b) = (a.unwrap(), b.unwrap());
        let refused = |id, budget| seats.take(id, &limits, budget).unwrap_err().reason;
        let one = seats.take(&a, &limits, Some(2)).unwrap();
        assert_eq!(refused(&a, Some(1)), Reason::BudgetSpent);
        let _two = seats.take(&a, &limits, None).unwrap();
        assert_eq!(refused(&a, Some(9)), Reason::TooManyConnections);
        let _three = seats.take(&b, &limits, None).unwrap();
        assert_eq!(refused(&b, None), Reason::TooManyConnections);
        drop(one);
        assert!(seats.take(&b, &limits, None).is_ok());
        assert_eq!(seats.taken(), 2);
    }
}
