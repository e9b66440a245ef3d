//! The budgets across a restart: a burst is given once in a sandbox's life, not with every start.
//!
//! The file is written when a rule gets its bucket, with nothing in it, and with the true levels at a
//! clean stop. After a crash, then, there is nothing left to spend but what comes in anew.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use sys::file::{self, Durability, Mode};

use crate::budget::{BudgetLevels, RuleKey};
use crate::lock;

/// Largest file that is read.
const MAX_BYTES: u64 = 64 << 20;

/// By sandbox.
type SandboxLevels = BTreeMap<String, BudgetLevels>;

/// Where budgets are kept; nowhere, for tests and for sandboxes that live once.
#[derive(Debug)]
pub(crate) struct BudgetStore {
    path: Option<PathBuf>,
    /// What an earlier process left.
    restored: SandboxLevels,
    /// What a crash would leave: every bucket, empty.
    known: Mutex<SandboxLevels>,
}

impl BudgetStore {
    /// Reads the file and marks all it holds as spent, until a clean stop says otherwise.
    pub(crate) fn open(path: Option<PathBuf>) -> io::Result<Self> {
        let restored = match &path {
            Some(path) => read_levels(path)?,
            None => SandboxLevels::new(),
        };
        let known = restored.iter().map(|(id, saved)| (id.clone(), zero_levels(saved))).collect();
        let store = BudgetStore { path, restored, known: Mutex::new(known) };
        store.write()?;
        Ok(store)
    }

    pub(crate) fn restored_levels(&self, sandbox: &str) -> Option<&BudgetLevels> {
        self.restored.get(sandbox)
    }

    /// Notes that a rule has been given its burst.
    pub(crate) fn note_burst(&self, sandbox: &str, key: &RuleKey) -> io::Result<()> {
        let mut known = lock(&self.known);
        let saved = known.entry(sandbox.to_owned()).or_default();
        saved.rules.push((key.policy.to_string(), key.rule.to_string(), 0.0));
        drop(known);
        self.write()
    }

    /// Keeps the levels at a clean stop.
    pub(crate) fn save(&self, levels: SandboxLevels) -> io::Result<()> {
        lock(&self.known).extend(levels);
        self.write()
    }

    fn write(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let known = lock(&self.known); // held while writing: the last writer has the last word
        let text = serde_json::to_vec(&*known).map_err(io::Error::other)?;
        file::replace(path, &text, Mode::Owner, Durability::Process)
    }
}

fn read_levels(path: &Path) -> io::Result<SandboxLevels> {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(SandboxLevels::new()),
        Err(error) => return Err(error),
    };
    if metadata.len() > MAX_BYTES {
        return Err(io::Error::other("it is larger than budgets can be"));
    }
    serde_json::from_slice(&std::fs::read(path)?).map_err(io::Error::other)
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
    fn p14_a_crash_leaves_nothing_and_a_clean_stop_leaves_the_levels() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget.json");
        let key = RuleKey { policy: PolicyName::parse("p").unwrap(), rule: "r".into() };
        let first = BudgetStore::open(Some(path.clone())).unwrap();
        assert!(first.restored_levels("a").is_none());
        first.note_burst("a", &key).unwrap();
        let crashed = BudgetStore::open(Some(path.clone())).unwrap();
        assert_eq!(crashed.restored_levels("a").unwrap().rules, [("p".into(), "r".into(), 0.0)]);
        let left =
            BudgetLevels { bits: 5.0, forwards: 1.0, rules: vec![("p".into(), "r".into(), 3.0)] };
        crashed.save(SandboxLevels::from([("a".to_owned(), left.clone())])).unwrap();
        let stopped = BudgetStore::open(Some(path.clone())).unwrap();
        assert_eq!(stopped.restored_levels("a"), Some(&left));
        std::fs::write(&path, "{").unwrap();
        assert!(BudgetStore::open(Some(path)).is_err());
    }
}
