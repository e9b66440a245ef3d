//! What one sandbox has used, of its own budgets and of each rule's, and the file in which that outlives us.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rules::budget::{Budget, Counted};
use serde::{Deserialize, Serialize};

use super::window::{self, Window};
use crate::state_file::{Outlives, replace};

/// One budget that an attempt counts against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// Whose it is: the sandbox's in all, or a rule's.
    pub(super) purse: Purse,
    pub(super) budget: Budget,
    pub(super) limit: u64,
}

/// Whose budget it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Purse {
    /// A rule's, as `policy/rule`: no policy's name has a slash.
    Rule(Arc<str>),
    Sandbox,
}

/// Why something cannot be charged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Bar {
    /// This one is used up, until then if at all.
    Spent { line: Line, free_at: Option<u64> },
    /// What was used could not be written.
    Unkept,
}

/// One sandbox's account.
#[derive(Debug, Default)]
pub(super) struct Account {
    path: PathBuf,
    kept: Kept,
    /// Attempts that are open, by rule.
    open: BTreeMap<Purse, u64>,
    /// Whether something was charged since it was written.
    is_changed: bool,
}

/// What is written.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// When it was written, in the ledger's time.
    at: u64,
    /// When the sandbox's life began.
    born: Option<u64>,
    #[serde(default)]
    sandbox: BTreeMap<String, Window>,
    #[serde(default)]
    rules: BTreeMap<String, BTreeMap<String, Window>>,
}

impl Account {
    pub(super) fn new(path: PathBuf) -> Self {
        Account { path, ..Account::default() }
    }

    /// Takes up what an earlier process wrote.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let kept = serde_json::from_slice(&fs::read(path)?)?;
        Ok(Account { path: path.to_owned(), kept, ..Account::default() })
    }

    /// Whether it was not written for so long that nothing in it counts any more.
    pub(super) fn is_old(&self, now: u64, age: Duration) -> bool {
        let old = u128::from(now.saturating_sub(self.kept.at)) > age.as_millis();
        // What is gone is gone: nobody reads it again.
        old && fs::remove_file(&self.path).is_ok()
    }

    /// When it was written last, in the ledger's time.
    pub(super) fn at(&self) -> u64 {
        self.kept.at
    }

    /// Counts from here on in this process.
    pub(super) fn restore(&mut self, now: u64) {
        for windows in self.kept.rules.values_mut().chain([&mut self.kept.sandbox]) {
            windows.retain(|key, _| Budget::by_key(key).is_some()); // of another version
            windows.retain(|key, window| {
                let length = Budget::by_key(key).and_then(Budget::window);
                window.restore(now, length);
                window.used(now, length) > 0
            });
        }
        self.kept.rules.retain(|_, windows| !windows.is_empty()); // of rules that are no more, too
    }

    /// When the sandbox's life began, if it has.
    pub(super) fn born(&self) -> Option<u64> {
        self.kept.born
    }

    /// Begins the sandbox's life, once.
    pub(super) fn begin(&mut self, now: u64) -> io::Result<()> {
        if self.kept.born.is_some() {
            return Ok(());
        }
        (self.kept.born, self.is_changed) = (Some(now), true);
        self.write(now)
    }

    /// Charges what counts as `what` to every line: at least `least`, at most `most`, or nothing.
    pub(super) fn charge(
        &mut self,
        lines: &[Line],
        what: Counted,
        (least, most): (u64, u64),
        now: u64,
    ) -> Result<u64, Bar> {
        let counted: Vec<&Line> = lines.iter().filter(|line| line.budget.counts(what)).collect();
        let mut amount = most;
        for line in &counted {
            let window = line.budget.window();
            let account = self.window(line);
            let left = line.limit.saturating_sub(account.used(now, window));
            if left < least {
                let free_at = account.free_at(window, line.limit, least);
                return Err(Bar::Spent { line: (*line).clone(), free_at });
            }
            amount = amount.min(left).min(window::lease(line.limit).max(least));
        }
        let mut unkept = false;
        self.is_changed = true;
        for line in &counted {
            let window = self.window(line);
            window.charge(now, line.budget.window(), amount);
            unkept |= window.is_unkept();
        }
        if unkept && self.keep(lines, now).is_err() {
            self.give_back(lines, what, amount, now);
            return Err(Bar::Unkept);
        }
        Ok(amount)
    }

    /// Takes back what was charged at `then` and not used.
    pub(super) fn give_back(&mut self, lines: &[Line], what: Counted, amount: u64, then: u64) {
        for line in lines.iter().filter(|line| line.budget.counts(what)) {
            self.window(line).give_back(then, line.budget.window(), amount);
        }
    }

    /// Takes a place among the open attempts of each rule that bounds them.
    pub(super) fn enter(&mut self, lines: &[Line]) -> Result<(), Bar> {
        let bounded = || lines.iter().filter(|line| line.budget == Budget::Connections);
        for line in bounded() {
            if self.open.get(&line.purse).is_some_and(|open| *open >= line.limit) || line.limit == 0
            {
                return Err(Bar::Spent { line: line.clone(), free_at: None });
            }
        }
        for line in bounded() {
            *self.open.entry(line.purse.clone()).or_default() += 1;
        }
        Ok(())
    }

    /// Gives the places up again.
    pub(super) fn leave(&mut self, lines: &[Line]) {
        for line in lines.iter().filter(|line| line.budget == Budget::Connections) {
            if let Some(open) = self.open.get_mut(&line.purse) {
                *open = open.saturating_sub(1);
            }
        }
        self.open.retain(|_, open| *open > 0);
    }

    /// How much of a budget is used, and when some of it comes back.
    pub(super) fn used(&mut self, line: &Line, now: u64) -> (u64, Option<u64>) {
        if line.budget == Budget::Connections {
            return (self.open.get(&line.purse).copied().unwrap_or_default(), None);
        }
        let (length, window) = (line.budget.window(), self.window(line));
        (window.used(now, length), window.first_back(length))
    }

    /// Seconds since the sandbox's life began.
    pub(super) fn age(&self, now: u64) -> u64 {
        self.kept.born.map_or(0, |born| now.saturating_sub(born) / 1000)
    }

    /// Forgets a rule that is no more.
    pub(super) fn forget(&mut self, rule: &str) -> bool {
        self.kept.rules.remove(rule).is_some()
    }

    /// Writes the account a last time: nothing is used any more.
    pub(super) fn settle(&mut self, now: u64) -> io::Result<()> {
        if !self.is_changed {
            return Ok(());
        }
        for windows in self.kept.rules.values_mut().chain([&mut self.kept.sandbox]) {
            windows.values_mut().for_each(Window::settle);
        }
        self.write(now)
    }

    /// Writes the account, with leave to use a little of each of these before it is written again.
    fn keep(&mut self, lines: &[Line], now: u64) -> io::Result<()> {
        let counted = || lines.iter().filter(|line| line.budget != Budget::Connections);
        counted().for_each(|line| self.window(line).written(line.limit));
        self.write(now).inspect_err(|_| {
            counted().for_each(|line| self.window(line).unwritten());
        })
    }

    fn write(&mut self, now: u64) -> io::Result<()> {
        self.kept.at = now;
        replace(&self.path, &self.kept, Outlives::Process)
    }

    fn window(&mut self, line: &Line) -> &mut Window {
        let key = line.budget.key();
        let windows = match &line.purse {
            Purse::Rule(rule) => self.kept.rules.entry(rule.to_string()).or_default(),
            Purse::Sandbox => &mut self.kept.sandbox,
        };
        windows.entry(key.to_owned()).or_default()
    }
}
