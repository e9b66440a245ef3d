//! What one sandbox has used, of its own budgets and of each rule's, and the file in which that outlives us.

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

/// One budget that an attempt counts against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BudgetLine {
    /// Whose it is: the sandbox's in all, or a rule's.
    pub(super) purse: BudgetOwner,
    pub(super) budget: BudgetKind,
    pub(super) limit: u64,
}

/// Whose budget it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BudgetOwner {
    /// A rule's, as `policy/rule`: no policy's name has a slash.
    Rule(Arc<str>),
    Sandbox,
}

/// Why something cannot be charged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChargeError {
    /// This one is used up, until then if at all.
    Spent { line: BudgetLine, free_at: Option<u64> },
    /// What was used could not be written.
    Unkept,
}

/// One sandbox's account.
#[derive(Debug, Default)]
pub(super) struct SandboxAccount {
    path: PathBuf,
    kept: AccountFile,
    /// Attempts that are open, by rule.
    open: BTreeMap<BudgetOwner, u64>,
    /// Whether something was charged since it was written.
    is_changed: bool,
}

/// What is written.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AccountFile {
    /// When it was written, in the ledger's time.
    at: u64,
    /// When the sandbox's life began.
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

    /// Takes up what an earlier process wrote.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let kept = serde_json::from_slice(&fs::read(path)?)?;
        Ok(SandboxAccount { path: path.to_owned(), kept, ..SandboxAccount::default() })
    }

    /// Whether it was not written for so long that nothing in it counts any more.
    pub(super) fn discard_if_old(&self, now: u64, age: Duration) -> bool {
        let old = u128::from(now.saturating_sub(self.kept.at)) > age.as_millis();
        // What is gone is gone: nobody reads it again.
        old && fs::remove_file(&self.path).is_ok()
    }

    /// When it was written last, in the ledger's time.
    pub(super) fn saved_at(&self) -> u64 {
        self.kept.at
    }

    /// Counts from here on in this process.
    pub(super) fn restore(&mut self, now: u64) {
        for windows in self.kept.rules.values_mut().chain([&mut self.kept.sandbox]) {
            windows.retain(|key, _| BudgetKind::by_key(key).is_some()); // of another version
            windows.retain(|key, window| {
                let length = BudgetKind::by_key(key).and_then(BudgetKind::window);
                window.restore(now, length);
                window.amount_used(now, length) > 0
            });
        }
        self.kept.rules.retain(|_, windows| !windows.is_empty()); // of rules that are no more, too
    }

    /// When the sandbox's life began, if it has.
    pub(super) fn lifetime_start(&self) -> Option<u64> {
        self.kept.born
    }

    /// Begins the sandbox's life, once.
    pub(super) fn start_lifetime(&mut self, now: u64) -> io::Result<()> {
        if self.kept.born.is_some() {
            return Ok(());
        }
        (self.kept.born, self.is_changed) = (Some(now), true);
        self.write(now)
    }

    /// Charges what counts as `what` to every line: at least `least`, at most `most`, or nothing.
    pub(super) fn charge(
        &mut self,
        lines: &[BudgetLine],
        what: UsageKind,
        (least, most): (u64, u64),
        now: u64,
    ) -> Result<u64, ChargeError> {
        let counted: Vec<&BudgetLine> =
            lines.iter().filter(|line| line.budget.counts(what)).collect();
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
        let mut unkept = false;
        self.is_changed = true;
        for line in &counted {
            let window = self.window(line);
            window.charge(now, line.budget.window(), amount);
            unkept |= window.needs_write();
        }
        if unkept && self.save(lines, now).is_err() {
            self.refund(lines, what, amount, now);
            return Err(ChargeError::Unkept);
        }
        Ok(amount)
    }

    /// Takes back what was charged at `then` and not used.
    pub(super) fn refund(&mut self, lines: &[BudgetLine], what: UsageKind, amount: u64, then: u64) {
        for line in lines.iter().filter(|line| line.budget.counts(what)) {
            self.window(line).refund(then, line.budget.window(), amount);
        }
    }

    /// Takes a place among the open attempts of each rule that bounds them.
    pub(super) fn open_attempt(&mut self, lines: &[BudgetLine]) -> Result<(), ChargeError> {
        let bounded = || lines.iter().filter(|line| line.budget == BudgetKind::Connections);
        for line in bounded() {
            if self.open.get(&line.purse).is_some_and(|open| *open >= line.limit) || line.limit == 0
            {
                return Err(ChargeError::Spent { line: line.clone(), free_at: None });
            }
        }
        for line in bounded() {
            *self.open.entry(line.purse.clone()).or_default() += 1;
        }
        Ok(())
    }

    /// Gives the places up again.
    pub(super) fn close_attempt(&mut self, lines: &[BudgetLine]) {
        for line in lines.iter().filter(|line| line.budget == BudgetKind::Connections) {
            if let Some(open) = self.open.get_mut(&line.purse) {
                *open = open.saturating_sub(1);
            }
        }
        self.open.retain(|_, open| *open > 0);
    }

    /// How much of a budget is used, and when some of it comes back.
    pub(super) fn amount_used(&mut self, line: &BudgetLine, now: u64) -> (u64, Option<u64>) {
        if line.budget == BudgetKind::Connections {
            return (self.open.get(&line.purse).copied().unwrap_or_default(), None);
        }
        let (length, window) = (line.budget.window(), self.window(line));
        (window.amount_used(now, length), window.first_refill(length))
    }

    /// Seconds since the sandbox's life began.
    pub(super) fn age(&self, now: u64) -> u64 {
        self.kept.born.map_or(0, |born| now.saturating_sub(born) / 1000)
    }

    /// Forgets a rule that is no more.
    pub(super) fn forget_rule(&mut self, rule: &str) -> bool {
        self.kept.rules.remove(rule).is_some()
    }

    /// Writes the account a last time: nothing is used any more.
    pub(super) fn flush(&mut self, now: u64) -> io::Result<()> {
        if !self.is_changed {
            return Ok(());
        }
        for windows in self.kept.rules.values_mut().chain([&mut self.kept.sandbox]) {
            windows.values_mut().for_each(SlidingWindow::finalize);
        }
        self.write(now)
    }

    /// Writes the account, with leave to use a little of each of these before it is written again.
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
