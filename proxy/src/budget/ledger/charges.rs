//! What one attempt is charged to, and what is refused when a budget is used up.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rules::budget::{BudgetKind, Budgets, UsageKind};
use rules::{Permit, RuleRef};
use sys::worker::Worker;
use tokio::time::{Instant, timeout_at};

use super::account::{BudgetLine, BudgetOwner, ChargeError};
use super::ledger_time;
use super::sandbox::SandboxState;
use crate::report::exhausted::Exhausted;

/// Largest lease in bytes: small beside any useful budget, large enough that locking the account does not matter.
pub(super) const MAX_LEASE: u64 = 256 << 10;
/// How long a charge waits until the account file covers it.
pub(super) const WRITE_WAIT: Duration = Duration::from_secs(5);

/// The budgets that one attempt is charged to: its sandbox's and its rule's. Counts as open until dropped.
#[derive(Debug)]
pub(crate) struct Charges {
    sandbox: Arc<SandboxState>,
    state_files: Worker,
    /// The budgets in force, and the generation of the rules that set them.
    lines: Mutex<(u64, Arc<[BudgetLine]>)>,
    /// The budgets whose open count this raised; `drop` lowers the same ones, even after a reload.
    opened_under: Arc<[BudgetLine]>,
    begun: (u64, Instant),
}

/// Bytes that are charged but not yet moved. Refund what does not move.
#[derive(Debug)]
pub(crate) struct ByteLease {
    what: UsageKind,
    pub(crate) bytes: u64,
    at: u64,
    /// The budgets it was charged to: a reload may change them before the refund.
    lines: Arc<[BudgetLine]>,
}

impl Charges {
    /// Counts an attempt as open.
    pub(super) fn open(
        sandbox: Arc<SandboxState>,
        permit: &Permit,
        state_files: Worker,
        begun: (u64, Instant),
    ) -> Result<Self, Exhausted> {
        let lines = budget_lines(permit);
        let opened = sys::lock(&sandbox.account).open_attempt(&lines);
        opened.map_err(|error| to_exhausted(error, ledger_time(begun)))?;
        let charged = Mutex::new((permit.generation(), lines.clone()));
        Ok(Charges { sandbox, state_files, lines: charged, opened_under: lines, begun })
    }

    /// Charges all of `amount`, or nothing.
    ///
    /// # Errors
    ///
    /// Returns the budget that has less than `amount` left.
    pub(crate) async fn charge(&self, what: UsageKind, amount: u64) -> Result<(), Exhausted> {
        self.charge_range(what, (amount, amount)).await.map(drop)
    }

    /// The same where nothing can be awaited: gives the thread's other tasks to another thread while it waits.
    pub(crate) fn charge_blocking(&self, what: UsageKind, amount: u64) -> Result<(), Exhausted> {
        match self.try_charge(what, (amount, amount)) {
            Err(ChargeError::Unwritten) => tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(self.charge(what, amount))
            }),
            charged => charged.map(drop).map_err(|error| to_exhausted(error, ledger_time(self.begun))),
        }
    }

    /// Charges all of `amount`, or nothing, for something that may turn out to cost nothing.
    pub(crate) async fn hold(&self, what: UsageKind, amount: u64) -> Result<ByteLease, Exhausted> {
        self.charge_range(what, (amount, amount)).await
    }

    /// Leases up to [`MAX_LEASE`] bytes, before they move.
    ///
    /// # Errors
    ///
    /// Returns the budget that is exhausted.
    pub(crate) async fn lease(&self, what: UsageKind) -> Result<ByteLease, Exhausted> {
        self.charge_range(what, (1, MAX_LEASE)).await
    }

    /// Refunds the part of a lease that did not move.
    pub(crate) fn refund(&self, lease: &ByteLease, moved: u64) {
        let rest = lease.bytes.saturating_sub(moved);
        if !lease.lines.is_empty() {
            sys::lock(&self.sandbox.account).refund(&lease.lines, lease.what, rest, lease.at);
        }
    }

    /// Charges to the budgets of a newer permit from now on.
    ///
    /// Two reloads may call this concurrently and in either order; the higher generation wins.
    pub(crate) fn adopt_budgets(&self, permit: &Permit) {
        let (generation, fresh) = (permit.generation(), budget_lines(permit));
        let mut charged = sys::lock(&self.lines);
        if charged.0 <= generation {
            *charged = (generation, fresh);
        }
    }

    /// Charges once the account file covers it.
    async fn charge_range(&self, what: UsageKind, range: (u64, u64)) -> Result<ByteLease, Exhausted> {
        let until = Instant::now() + WRITE_WAIT;
        loop {
            // Before the attempt, so that no write after it is missed.
            let mut written = self.sandbox.written.subscribe();
            match self.try_charge(what, range) {
                Ok(lease) => return Ok(lease),
                Err(ChargeError::Unwritten) => {}
                Err(error) => return Err(to_exhausted(error, ledger_time(self.begun))),
            }
            match timeout_at(until, written.changed()).await {
                Ok(Ok(())) if *written.borrow() => {}
                Ok(_) | Err(_) => return Err(Exhausted::Unkept),
            }
        }
    }

    /// Charges what the account file covers, and has it written again before that is used up.
    fn try_charge(&self, what: UsageKind, range: (u64, u64)) -> Result<ByteLease, ChargeError> {
        let (lines, at) = (self.lines(), ledger_time(self.begun));
        if lines.is_empty() {
            return Ok(ByteLease { what, bytes: range.1, at, lines }); // no budget applies
        }
        let mut account = sys::lock(&self.sandbox.account);
        let charged = account.charge(&lines, what, range, at);
        let unwritten = charged == Err(ChargeError::Unwritten) || account.needs_write(&lines);
        drop(account);
        if unwritten {
            self.sandbox.request_write(&self.state_files, self.begun);
        }
        charged.map(|bytes| ByteLease { what, bytes, at, lines })
    }

    fn lines(&self) -> Arc<[BudgetLine]> {
        sys::lock(&self.lines).1.clone()
    }
}

impl Drop for Charges {
    fn drop(&mut self) {
        if !self.opened_under.is_empty() {
            sys::lock(&self.sandbox.account).close_attempt(&self.opened_under);
        }
    }
}

/// Returns the budgets that an attempt is charged to.
///
/// Three budgets are enforced elsewhere: DNS bits by the DNS filter, a sandbox's connections by
/// [`Quotas`](crate::quota::Quotas), and its lifetime by the rules.
fn budget_lines(permit: &Permit) -> Arc<[BudgetLine]> {
    let here = |budgets: Budgets, purse: BudgetOwner| {
        budgets.limits().filter_map(move |(budget, limit)| {
            let charged =
                budget.is_counted() || budget == BudgetKind::Connections && purse != BudgetOwner::Sandbox;
            charged.then(|| BudgetLine { purse: purse.clone(), budget, limit })
        })
    };
    let named = |rule: &RuleRef| BudgetOwner::Rule(format!("{}/{}", rule.policy, rule.rule).into());
    // A base rule's budget covers everything that it lets pass, across all rules of the sandbox.
    let rule = permit.rule();
    let base = permit.base_budgets().filter(|(base, _)| named(base) != named(rule));
    let base = base.map(|(rule, budgets)| here(budgets, named(rule)));
    here(permit.sandbox_budgets(), BudgetOwner::Sandbox)
        .chain(here(permit.rule_budgets(), named(rule)))
        .chain(base.into_iter().flatten())
        .collect()
}

fn to_exhausted(error: ChargeError, now: u64) -> Exhausted {
    match error {
        ChargeError::Spent { line: BudgetLine { purse, budget, limit }, free_at } => {
            let rule = match purse {
                BudgetOwner::Rule(rule) => Some(rule),
                BudgetOwner::Sandbox => None,
            };
            let refills = free_at.map(|at| Duration::from_millis(at.saturating_sub(now)));
            Exhausted::Budget { budget, limit, rule, refills }
        }
        ChargeError::Unwritten => Exhausted::Unkept,
    }
}
