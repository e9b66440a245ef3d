//! One sandbox's account: usage of its own budgets and of each rule's, and the file that keeps it across restarts.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rules::budget::{BudgetKind, UsageKind};
use serde::{Deserialize, Serialize};

use super::window::{self, SlidingWindow};
use crate::state_file::{Durability, write_atomic};

/// One budget that an attempt is charged to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BudgetLine {
    pub(super) purse: BudgetOwner,
    pub(super) budget: BudgetKind,
    pub(super) limit: u64,
}

/// What a budget belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BudgetOwner {
    /// A rule, as `policy/rule`; a policy name contains no slash.
    Rule(Arc<str>),
    Sandbox,
}

/// Why a charge failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChargeError {
    /// This budget has too little left, until `free_at` or for good.
    Spent { line: BudgetLine, free_at: Option<u64> },
    /// The account file cannot be written.
    Unkept,
}

/// One sandbox's account.
#[derive(Debug, Default)]
pub(super) struct SandboxAccount {
    path: PathBuf,
    kept: AccountFile,
    /// Open attempts, by rule.
    open: BTreeMap<BudgetOwner, u64>,
    /// Whether anything was charged since the last write.
    is_changed: bool,
}

/// The content of the account file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AccountFile {
    /// Ledger time of the write, in milliseconds.
    at: u64,
    /// Ledger time at which the sandbox's lifetime started.
    born: Option<u64>,
    #[serde(default)]
    sandbox: BTreeMap<String, SlidingWindow>,
    #[serde(default)]
    rules: BTreeMap<String, BTreeMap<String, SlidingWindow>>,
}

impl SandboxAccount {
    pub(super) fn new(path: PathBuf) -> Self {
        SandboxAccount { path, ..SandboxAccount::default() }
    }

    /// Reads the account that an earlier process wrote.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let kept = serde_json::from_slice(&fs::read(path)?)?;
        Ok(SandboxAccount { path: path.to_owned(), kept, ..SandboxAccount::default() })
    }

    /// Deletes the file if its last write is older than `age`; returns whether it did.
    pub(super) fn discard_if_old(&self, now: u64, age: Duration) -> bool {
        let old = u128::from(now.saturating_sub(self.kept.at)) > age.as_millis();
        old && fs::remove_file(&self.path).is_ok()
    }

    /// Ledger time of the last write.
    pub(super) fn saved_at(&self) -> u64 {
        self.kept.at
    }

    /// Continues an account read from disk: counts the unwritten allowance as used and drops expired usage.
    pub(super) fn restore(&mut self, now: u64) {
        for windows in self.kept.rules.values_mut().chain([&mut self.kept.sandbox]) {
            windows.retain(|key, _| BudgetKind::by_key(key).is_some()); // written by another version
            windows.retain(|key, window| {
                let length = BudgetKind::by_key(key).and_then(BudgetKind::window);
                window.restore(now, length);
                window.amount_used(now, length) > 0
            });
        }
        self.kept.rules.retain(|_, windows| !windows.is_empty()); // includes those of removed rules
    }

    /// Ledger time at which the sandbox's lifetime started, if it has.
    pub(super) fn lifetime_start(&self) -> Option<u64> {
        self.kept.born
    }

    /// Starts the sandbox's lifetime, unless it has started.
    pub(super) fn start_lifetime(&mut self, now: u64) -> io::Result<()> {
        if self.kept.born.is_some() {
            return Ok(());
        }
        (self.kept.born, self.is_changed) = (Some(now), true);
        self.write(now)
    }

    /// Charges the same amount to every line that counts `what`: at least `least`, at most `most`, or nothing.
    ///
    /// All or nothing across the lines: the first loop finds the smallest remainder without changing anything, the
    /// second charges it everywhere. The caller holds the account's lock over both.
    pub(super) fn charge(
        &mut self,
        lines: &[BudgetLine],
        what: UsageKind,
        (least, most): (u64, u64),
        now: u64,
    ) -> Result<u64, ChargeError> {
        let counted: Vec<&BudgetLine> = lines.iter().filter(|line| line.budget.counts(what)).collect();
        let mut amount = most;
        for line in &counted {
            let window = line.budget.window();
            let account = self.window(line);
            let left = line.limit.saturating_sub(account.amount_used(now, window));
            if left < least {
                let free_at = account.free_at(window, line.limit, least);
                return Err(ChargeError::Spent { line: (*line).clone(), free_at });
            }
            amount = amount.min(left).min(window::max_lease(line.limit).max(least));
        }
        let mut needs_write = false;
        self.is_changed = true;
        for line in &counted {
            let window = self.window(line);
            window.charge(now, line.budget.window(), amount);
            needs_write |= window.needs_write();
        }
        if needs_write && self.save(lines, now).is_err() {
            self.refund(lines, what, amount, now);
            return Err(ChargeError::Unkept);
        }
        Ok(amount)
    }

    /// Refunds what was charged at `then` and not used.
    pub(super) fn refund(&mut self, lines: &[BudgetLine], what: UsageKind, amount: u64, then: u64) {
        for line in lines.iter().filter(|line| line.budget.counts(what)) {
            self.window(line).refund(then, line.budget.window(), amount);
        }
    }

    /// Counts an attempt as open against every `connections` budget of `lines`.
    pub(super) fn open_attempt(&mut self, lines: &[BudgetLine]) -> Result<(), ChargeError> {
        let bounded = || lines.iter().filter(|line| line.budget == BudgetKind::Connections);
        for line in bounded() {
            if self.open.get(&line.purse).is_some_and(|open| *open >= line.limit) || line.limit == 0 {
                return Err(ChargeError::Spent { line: line.clone(), free_at: None });
            }
        }
        for line in bounded() {
            *self.open.entry(line.purse.clone()).or_default() += 1;
        }
        Ok(())
    }

    /// Reverses [`SandboxAccount::open_attempt`].
    pub(super) fn close_attempt(&mut self, lines: &[BudgetLine]) {
        for line in lines.iter().filter(|line| line.budget == BudgetKind::Connections) {
            if let Some(open) = self.open.get_mut(&line.purse) {
                *open = open.saturating_sub(1);
            }
        }
        self.open.retain(|_, open| *open > 0);
    }

    /// Returns how much of a budget is used, and when the first part of it refills.
    pub(super) fn amount_used(&mut self, line: &BudgetLine, now: u64) -> (u64, Option<u64>) {
        if line.budget == BudgetKind::Connections {
            return (self.open.get(&line.purse).copied().unwrap_or_default(), None);
        }
        let (length, window) = (line.budget.window(), self.window(line));
        (window.amount_used(now, length), window.first_refill(length))
    }

    /// Seconds since the sandbox's lifetime started.
    pub(super) fn age(&self, now: u64) -> u64 {
        self.kept.born.map_or(0, |born| now.saturating_sub(born) / 1000)
    }

    /// Forgets the usage of a rule that no longer exists.
    pub(super) fn forget_rule(&mut self, rule: &str) -> bool {
        self.kept.rules.remove(rule).is_some()
    }

    /// Writes the exact usage at a clean stop, without an unwritten allowance.
    pub(super) fn flush(&mut self, now: u64) -> io::Result<()> {
        if !self.is_changed {
            return Ok(());
        }
        for windows in self.kept.rules.values_mut().chain([&mut self.kept.sandbox]) {
            windows.values_mut().for_each(SlidingWindow::finalize);
        }
        self.write(now)
    }

    /// Writes the account, including an allowance that may be used before the next write.
    fn save(&mut self, lines: &[BudgetLine], now: u64) -> io::Result<()> {
        let counted = || lines.iter().filter(|line| line.budget != BudgetKind::Connections);
        counted().for_each(|line| self.window(line).mark_written(line.limit));
        self.write(now).inspect_err(|_| {
            counted().for_each(|line| self.window(line).mark_unwritten());
        })
    }

    fn write(&mut self, now: u64) -> io::Result<()> {
        self.kept.at = now;
        write_atomic(&self.path, &self.kept, Durability::Process)
    }

    fn window(&mut self, line: &BudgetLine) -> &mut SlidingWindow {
        let key = line.budget.key();
        let windows = match &line.purse {
            BudgetOwner::Rule(rule) => self.kept.rules.entry(rule.to_string()).or_default(),
            BudgetOwner::Sandbox => &mut self.kept.sandbox,
        };
        windows.entry(key.to_owned()).or_default()
    }
}
