//! Saves the DNS budgets across restarts: a sandbox gets each burst once, not at every start.
//!
//! Writing the levels at every charge would cost a disk write per query. Instead the file is pessimistic while the
//! process runs, and exact only after a clean stop:
//!
//! - At the start the levels are read into memory and the file is rewritten with zeros.
//! - When a rule gets its bucket, it is added to the file with level 0. The first query of the rule waits for that
//!   write; another query of the same rule may leave while the write is under way.
//! - A clean stop writes the true levels.
//!
//! So a crash loses what was left, and never grants a burst again; `DnsBudget::restore` raises the zeros to a small
//! amount, so that names still resolve. Time spent down is not credited. The file is replaced by a rename but not
//! synced: the promise covers a crash of the process, not of the machine. A file that cannot be parsed prevents the
//! start, because starting without it would grant every burst again.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use sys::file::{self, Durability, Mode};

use crate::budget::{BudgetLevels, RuleKey};
use crate::lock;

/// Largest file that is read.
const MAX_BYTES: u64 = 64 << 20;

/// Levels by sandbox.
type SandboxLevels = BTreeMap<String, BudgetLevels>;

/// The budget file. Without a path nothing is saved: for tests, and for sandboxes that live only once.
#[derive(Debug)]
pub(crate) struct BudgetStore {
    path: Option<PathBuf>,
    /// The levels that an earlier process left.
    restored: Mutex<SandboxLevels>,
    /// The contents of the file: every bucket, with level 0 until a clean stop.
    on_disk: Mutex<SandboxLevels>,
}

impl BudgetStore {
    /// Reads the file, and rewrites it with all levels at 0.
    pub(crate) fn open(path: Option<PathBuf>) -> io::Result<Self> {
        let restored = match &path {
            Some(path) => read_levels(path)?,
            None => SandboxLevels::new(),
        };
        let on_disk = restored.iter().map(|(id, saved)| (id.clone(), zero_levels(saved))).collect();
        let store = BudgetStore { path, restored: Mutex::new(restored), on_disk: Mutex::new(on_disk) };
        store.write()?;
        Ok(store)
    }

    pub(crate) fn has_file(&self) -> bool {
        self.path.is_some()
    }

    /// Takes the levels that an earlier process left.
    pub(crate) fn take_restored(&self, sandbox: &str) -> Option<BudgetLevels> {
        lock(&self.restored).remove(sandbox)
    }

    /// Forgets a sandbox that has left and whose budgets are full again. The file follows at the next write.
    pub(crate) fn forget(&self, sandbox: &str) {
        lock(&self.on_disk).remove(sandbox);
    }

    /// Forgets the levels that an earlier process left of sandboxes that are not configured.
    pub(crate) fn forget_restored(&self, is_configured: impl Fn(&str) -> bool) {
        let mut on_disk = lock(&self.on_disk);
        lock(&self.restored).retain(|id, _| {
            let kept = is_configured(id);
            if !kept {
                on_disk.remove(id);
            }
            kept
        });
    }

    /// Writes to disk that a rule has had its burst.
    pub(crate) fn note_burst(&self, sandbox: &str, key: &RuleKey) -> io::Result<()> {
        let mut on_disk = lock(&self.on_disk);
        let saved = on_disk.entry(sandbox.to_owned()).or_default();
        let rule = (key.policy.to_string(), key.rule.to_string(), 0.0);
        if !saved.rules.contains(&rule) {
            saved.rules.push(rule);
        }
        drop(on_disk);
        self.write()
    }

    /// Writes the levels at a clean stop.
    pub(crate) fn save(&self, levels: SandboxLevels) -> io::Result<()> {
        lock(&self.on_disk).extend(levels);
        self.write()
    }

    fn write(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        // One thread writes, so that writes do not interleave, and no lock is held while it does.
        let text = serde_json::to_vec(&*lock(&self.on_disk)).map_err(io::Error::other)?;
        file::replace(path, &text, Mode::Owner, Durability::Process)
    }
}

fn read_levels(path: &Path) -> io::Result<SandboxLevels> {
    match file::read_state(path, MAX_BYTES)? {
        Some(text) => serde_json::from_slice(&text).map_err(io::Error::other),
        None => Ok(SandboxLevels::new()),
    }
}

fn zero_levels(saved: &BudgetLevels) -> BudgetLevels {
    let rules = saved.rules.iter().map(|(policy, rule, _)| (policy.clone(), rule.clone(), 0.0));
    BudgetLevels { bits: 0.0, forwards: 0.0, rules: rules.collect() }
}

#[cfg(test)]
mod tests {
    use rules::ids::PolicyName;

    use super::*;

    #[test]
    fn p14_a_crash_leaves_zeros_and_a_clean_stop_leaves_the_levels() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget.json");
        let key = RuleKey { policy: PolicyName::parse("p").unwrap(), rule: "r".into() };
        let first = BudgetStore::open(Some(path.clone())).unwrap();
        assert!(first.take_restored("a").is_none());
        first.note_burst("a", &key).unwrap();
        let crashed = BudgetStore::open(Some(path.clone())).unwrap();
        assert_eq!(crashed.take_restored("a").unwrap().rules, [("p".into(), "r".into(), 0.0)]);
        let left = BudgetLevels { bits: 5.0, forwards: 1.0, rules: vec![("p".into(), "r".into(), 3.0)] };
        crashed.save(SandboxLevels::from([("a".to_owned(), left.clone())])).unwrap();
        let stopped = BudgetStore::open(Some(path.clone())).unwrap();
        assert_eq!(stopped.take_restored("a"), Some(left));
        std::fs::write(&path, "{").unwrap();
        assert!(BudgetStore::open(Some(path)).is_err());
    }
}
