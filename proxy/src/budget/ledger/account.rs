//! One sandbox's account: usage of its own budgets and of each rule's, and the file that keeps it across restarts.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rules::budget::window::{self, SlidingWindow};
use rules::budget::{BudgetKind, UsageKind};
use serde::{Deserialize, Serialize};

use crate::state_file::read_state;

/// Longest window of a budget, and one part of it, by which usage may count too long.
const MAX_WINDOW: Duration = Duration::from_secs(86_400 + 1440);

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
    /// The account file must say so first: repeat the charge after its next write.
    Unwritten,
}

/// One sandbox's account.
#[derive(Debug, Default)]
pub(super) struct SandboxAccount {
    pub(super) path: PathBuf,
    kept: AccountFile,
    /// Open attempts, by rule.
    open: BTreeMap<BudgetOwner, u64>,
    /// Whether anything was charged since the last exact write.
    is_changed: bool,
    /// Whether the thread for state files will write this account.
    pub(super) is_queued: bool,
}

/// The content of the account file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AccountFile {
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

    /// Reads the account that was last written; an empty one if there is no file.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let kept = read_state(path)?.map(|bytes| serde_json::from_slice(&bytes)).transpose()?;
        let kept = kept.unwrap_or_default();
        Ok(SandboxAccount { path: path.to_owned(), kept, ..SandboxAccount::default() })
    }

    /// Deletes the file of a sandbox that is no longer configured, if nothing in it would count any more.
    pub(super) fn discard_if_old(&self, now: u64, retention: Duration) {
        let age = u128::from(now.saturating_sub(self.kept.at));
        let rules = self.kept.rules.values().chain([&self.kept.sandbox]);
        let mut budgets = rules.flat_map(BTreeMap::keys).map(|key| BudgetKind::by_key(key));
        // A lifetime that began, and a budget without a window, count until the retention ends.
        let refills = |budget: Option<BudgetKind>| budget.and_then(BudgetKind::window).is_some();
        let counts_for = match self.kept.born.is_none() && budgets.all(refills) {
            true => MAX_WINDOW,
            false => retention,
        };
        if age > counts_for.as_millis() {
            drop(fs::remove_file(&self.path)); // tried again at the next start or sweep
        }
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

    /// Starts the sandbox's lifetime, unless it has started; returns whether it did.
    pub(super) fn start_lifetime(&mut self, now: u64) -> bool {
        let starts = self.kept.born.is_none();
        if starts {
            (self.kept.born, self.is_changed) = (Some(now), true);
        }
        starts
    }

    /// Charges the same amount to every line that counts `what`: at least `least`, at most `most`, or nothing.
    ///
    /// All or nothing across the lines: the first loop finds the smallest remainder without changing anything, the
    /// second charges it everywhere. The caller holds the account's lock over both. Nothing is charged that the file
    /// does not cover yet.
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
            let left = account.left(now, line.budget, line.limit);
            if left < least {
                let free_at = account.free_at(window, line.budget.usable(line.limit), least);
                return Err(ChargeError::Spent { line: (*line).clone(), free_at });
            }
            // A lease takes what the file covers rather than wait for the next write.
            let room = account.room().max(least);
            amount = amount.min(left).min(window::max_lease(line.limit).max(least)).min(room);
        }
        self.is_changed |= !counted.is_empty();
        if counted.iter().any(|line| self.window(line).room() < amount) {
            counted.iter().for_each(|line| self.window(line).want(amount, line.limit));
            return Err(ChargeError::Unwritten);
        }
        for line in &counted {
            self.window(line).charge(now, line.budget.window(), amount);
        }
        Ok(amount)
    }

    /// Whether the allowance of a budget will soon be used up.
    pub(super) fn needs_write(&mut self, lines: &[BudgetLine]) -> bool {
        lines.iter().filter(|line| line.budget.is_counted()).any(|line| self.window(line).is_low())
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

    /// Returns what to write: the usage of now, with an allowance that may be used before the next write.
    pub(super) fn begin_write(&mut self, now: u64) -> AccountFile {
        self.is_queued = false;
        self.snapshot(now, SlidingWindow::begin_write)
    }

    /// Adopts the allowances that were written.
    pub(super) fn finish_write(&mut self, written: &AccountFile) {
        let adopt = |windows: &mut BTreeMap<String, SlidingWindow>, written: &BTreeMap<_, _>| {
            for (key, window) in windows {
                if let Some(written) = written.get(key) {
                    window.finish_write(written);
                }
            }
        };
        adopt(&mut self.kept.sandbox, &written.sandbox);
        for (rule, windows) in &mut self.kept.rules {
            if let Some(written) = written.rules.get(rule) {
                adopt(windows, written);
            }
        }
    }

    /// Returns the exact usage, without an allowance, if it is not written yet.
    pub(super) fn finalize(&mut self, now: u64) -> Option<AccountFile> {
        let changed = std::mem::take(&mut self.is_changed);
        changed.then(|| self.snapshot(now, SlidingWindow::finalize))
    }

    /// Notes that the exact usage could not be written, or that nothing may be forgotten.
    pub(super) fn mark_changed(&mut self) {
        self.is_changed = true;
    }

    pub(super) fn is_changed(&self) -> bool {
        self.is_changed
    }

    fn snapshot(&mut self, now: u64, take: impl Fn(&mut SlidingWindow) -> SlidingWindow) -> AccountFile {
        self.kept.at = now;
        let copy = |windows: &mut BTreeMap<String, SlidingWindow>| {
            windows.iter_mut().map(|(key, window)| (key.clone(), take(window))).collect()
        };
        AccountFile {
            at: now,
            born: self.kept.born,
            sandbox: copy(&mut self.kept.sandbox),
            rules: self.kept.rules.iter_mut().map(|(rule, windows)| (rule.clone(), copy(windows))).collect(),
        }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rules::signals::bits::END_BITS;

    use super::*;

    const HOUR_MS: u64 = 3_600_000;

    fn reopen(disk: Option<&String>, now: u64) -> SandboxAccount {
        let kept = disk.map(|text| serde_json::from_str(text).unwrap()).unwrap_or_default();
        let mut account = SandboxAccount { kept, ..SandboxAccount::default() };
        account.restore(now);
        account
    }

    proptest! {
        /// Whenever a charge succeeds, the hour that ends then has at most the budget, with the mark of its end:
        /// across crashes, clean stops, and reloads that lower, raise or remove the budget.
        #[test]
        fn p19_no_hour_has_more_bits_than_the_budget(
            steps in prop::collection::vec((0..12_u8, 0..700_000_u64, 1..120_u64), 1..250),
        ) {
            let (mut account, mut disk) = (reopen(None, 0), None);
            let (mut limit, mut now, mut passed) = (Some(300), 0, Vec::new());
            for (step, wait, amount) in steps {
                now += wait;
                match step {
                    0 => account = reopen(disk.as_ref(), now),
                    1 => {
                        if let Some(content) = account.finalize(now) {
                            disk = Some(serde_json::to_string(&content).unwrap());
                        }
                        account = reopen(disk.as_ref(), now);
                    }
                    2 => limit = [None, Some(50), Some(300), Some(1_000)][amount as usize % 4],
                    _ => {
                        let Some(limit) = limit else { continue };
                        let budget = BudgetKind::HeaderBitsPerHour;
                        let lines = [BudgetLine { purse: BudgetOwner::Sandbox, budget, limit }];
                        let charge = (amount, amount);
                        let mut charged = account.charge(&lines, UsageKind::HeaderBits, charge, now);
                        if charged == Err(ChargeError::Unwritten) {
                            let content = account.begin_write(now);
                            disk = Some(serde_json::to_string(&content).unwrap());
                            account.finish_write(&content);
                            charged = account.charge(&lines, UsageKind::HeaderBits, charge, now);
                        }
                        prop_assert!(charged != Err(ChargeError::Unwritten));
                        if charged.is_ok() {
                            passed.push((now, amount));
                            let hour = passed.iter().filter(|(at, _)| at + HOUR_MS > now);
                            let bits: u64 = hour.map(|(_, bits)| bits).sum();
                            prop_assert!(bits + END_BITS <= limit, "{bits} of {limit}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn p19_all_of_a_budget_but_the_mark_of_the_end_can_be_used() {
        let line =
            BudgetLine { purse: BudgetOwner::Sandbox, budget: BudgetKind::HeaderBitsPerHour, limit: 300 };
        for (amount, fits) in [(292, true), (293, false)] {
            let mut account = reopen(None, 0);
            let mut charge =
                || account.charge(std::slice::from_ref(&line), UsageKind::HeaderBits, (amount, amount), 0);
            assert_eq!(charge() == Err(ChargeError::Unwritten), fits, "{amount}");
        }
    }
}
