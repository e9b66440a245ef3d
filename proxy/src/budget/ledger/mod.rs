//! The ledger: how much of its budgets (requests, bytes up, bytes down) each sandbox has used, also across restarts.
//!
//! Usage is charged before it happens, so no budget overshoots. Requests are charged one at a time. Bytes are charged
//! by lease: a relay leases up to [`charges::MAX_LEASE`], moves at most that many and refunds the rest. A lease is much cheaper
//! than charging each read, and however many connections share a budget, the bytes leased never exceed it.
//!
//! What is used must be in the account file first, or a crash would refill it. Another thread writes the files, so that
//! a file system that does not answer stops no thread of the runtime: a charge that the file does not cover yet waits,
//! for at most [`charges::WRITE_WAIT`], and is refused as `budget_unkept` after that.
//!
//! Ledger time starts from the wall clock, advances with the monotonic clock, and never starts before the newest
//! timestamp on disk. Setting the wall clock back therefore refills nothing, neither now nor after a restart.

mod account;
mod charges;
mod sandbox;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use certs::LeafCache;
use rules::budget::{BudgetKind, Budgets};
use rules::ids::SandboxId;
use rules::{Permit, RuleSet};
use serde_json::{Value, json};
use sys::worker::Worker;
use tokio::time::{Instant, timeout};

use self::account::{BudgetLine, BudgetOwner, SandboxAccount};
pub(crate) use self::charges::{ByteLease, Charges};
use self::sandbox::SandboxState;
use crate::inspect::{SandboxSignals, SignalKeys};
use crate::quota::Quotas;
use crate::report::exhausted::Exhausted;

/// Directory of the account files, inside the log directory.
const BUDGETS_DIR: &str = "budgets";
/// How long to keep the lifetime of a sandbox that is no longer configured, and what it used of budgets that never
/// refill. Other usage is kept for as long as it counts: a day at most.
const ACCOUNT_RETENTION: Duration = Duration::from_secs(30 * 86_400);
/// How often the files of sandboxes that have left are looked through.
const SWEEP_INTERVAL: Duration = Duration::from_secs(3600);
/// How long a stop waits for the account files.
const FLUSH_WAIT: Duration = Duration::from_secs(5);

/// The states of all sandboxes.
pub(crate) struct Ledger {
    dir: PathBuf,
    /// Ledger time at the start, in milliseconds, and the instant of the start.
    begun: (u64, Instant),
    sandboxes: Mutex<SandboxTable>,
    state_files: Worker,
    signal_keys: SignalKeys,
    quotas: Arc<Quotas>,
}

/// The sandboxes of the rules in force, and those that have left and still have open connections.
#[derive(Debug, Default)]
struct SandboxTable {
    states: HashMap<SandboxId, Arc<SandboxState>>,
    /// The sandboxes that must stay in the table.
    configured: HashSet<SandboxId>,
    swept: Option<Instant>,
}

impl Ledger {
    /// Reads the accounts that earlier processes wrote.
    ///
    /// # Errors
    ///
    /// Returns an error for an unreadable account: starting without it would refill its budgets.
    pub(crate) fn open(
        dir: &Path,
        rules: &RuleSet,
        state_files: Worker,
        quotas: Arc<Quotas>,
    ) -> anyhow::Result<Self> {
        let signal_keys = SignalKeys::open(dir)?;
        let dir = dir.join(BUDGETS_DIR);
        let shown = dir.display();
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {shown}"))?;
        let mut accounts =
            read_accounts(&dir).with_context(|| format!("cannot read the budgets in {shown}"))?;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let latest = accounts.values().map(SandboxAccount::saved_at).max().unwrap_or_default();
        let now = u64::try_from(wall).unwrap_or_default().max(latest);
        let configured: HashSet<SandboxId> =
            rules.sandboxes().iter().map(|sandbox| sandbox.id.clone()).collect();
        let left = accounts.extract_if(|id, _| !configured.contains(id));
        left.for_each(|(_, account)| account.discard_if_old(now, ACCOUNT_RETENTION));
        let states = configured.iter().map(|id| {
            let account = accounts.remove(id);
            let account = account.unwrap_or_else(|| SandboxAccount::new(account_path(&dir, id)));
            let signals = SandboxSignals::open(&signal_keys, id, &quotas);
            (id.clone(), Arc::new(SandboxState::new(account, now, signals)))
        });
        let states: HashMap<SandboxId, Arc<SandboxState>> = states.collect();
        let sandboxes = Mutex::new(SandboxTable { states, configured, swept: None });
        Ok(Ledger { dir, begun: (now, Instant::now()), sandboxes, state_files, signal_keys, quotas })
    }

    /// Reads the accounts of sandboxes that join, before rules that name them are in force. Blocks.
    ///
    /// A sandbox whose account cannot be read gets none, and everything it attempts is refused as `budget_unkept`:
    /// without the account its budgets would be refilled.
    pub(crate) fn admit_sandboxes(&self, rules: &RuleSet) {
        let ids = || rules.sandboxes().iter().map(|sandbox| sandbox.id.clone());
        let mut table = self.table();
        table.configured = ids().collect(); // from now on none of them is pruned
        let joining: Vec<SandboxId> = ids().filter(|id| !table.states.contains_key(id)).collect();
        drop(table);
        for id in joining {
            let path = account_path(&self.dir, &id);
            match SandboxAccount::read(&path) {
                Ok(account) => {
                    let signals = SandboxSignals::open(&self.signal_keys, &id, &self.quotas);
                    let state = Arc::new(SandboxState::new(account, self.now(), signals));
                    self.table().states.insert(id, state);
                }
                Err(error) => {
                    let path = path.display();
                    tracing::error!(%error, "cannot read {path}: sandbox {id} is refused; repair or remove it");
                }
            }
        }
    }

    /// Returns the sandboxes that have left and have no open connection.
    pub(crate) fn departed(&self) -> Vec<SandboxId> {
        let table = self.table();
        let left = table.states.iter().filter(|(id, _)| !table.configured.contains(*id));
        left.filter(|(_, state)| Arc::strong_count(state) == 1).map(|(id, _)| id.clone()).collect()
    }

    /// Writes the account of a sandbox that has left, and drops its state unless a connection is still open.
    ///
    /// One at a time on the thread for state files, so that charges of other sandboxes do not wait for many.
    pub(crate) fn prune_sandbox(&self, id: &SandboxId) {
        let written = self.sandbox(id).map(|state| {
            state.signals.store()?;
            state.write_exact(self.now())
        });
        let Some(Ok(())) = written else { return }; // tried again
        let mut table = self.table();
        // Nobody can get another reference meanwhile: the table is locked.
        let unused = table
            .states
            .get(id)
            .is_some_and(|state| Arc::strong_count(state) == 1 && !sys::lock(&state.account).is_changed());
        if unused && !table.configured.contains(id) {
            table.states.remove(id);
        }
    }

    /// Whether it is time for [`Ledger::sweep_files`].
    pub(crate) fn needs_sweep(&self) -> bool {
        self.table().swept.is_none_or(|at| at.elapsed() > SWEEP_INTERVAL)
    }

    /// Deletes the files of sandboxes that left so long ago that nothing in them counts. Runs on the thread that also
    /// reads the accounts of sandboxes that join.
    pub(crate) fn sweep_files(&self) {
        let mut table = self.table();
        table.swept = Some(Instant::now());
        let known: HashSet<SandboxId> = table.states.keys().chain(&table.configured).cloned().collect();
        drop(table);
        let accounts = read_accounts(&self.dir).unwrap_or_default();
        for (_, account) in accounts.iter().filter(|(id, _)| !known.contains(*id)) {
            account.discard_if_old(self.now(), ACCOUNT_RETENTION);
        }
    }

    /// Counts the sandboxes that have a state.
    pub(crate) fn sandbox_count(&self) -> usize {
        self.table().states.len()
    }

    /// Writes what the inspection remembers, where it has changed. Blocks on the files.
    pub(crate) fn store_signals(&self) {
        let states: Vec<Arc<SandboxState>> = self.table().states.values().cloned().collect();
        for error in states.iter().filter_map(|state| state.signals.store().err()) {
            tracing::warn!(%error, "cannot write what the inspection remembers");
        }
    }

    /// Counts the cached leaf certificates of all sandboxes.
    pub(crate) fn leaf_count(&self) -> usize {
        let table = self.table();
        table.states.values().filter_map(|state| state.leaf_certs.get()).map(LeafCache::len).sum()
    }

    /// Returns the state of a sandbox, if it is configured.
    pub(crate) fn sandbox(&self, id: &SandboxId) -> Option<Arc<SandboxState>> {
        self.table().states.get(id).cloned()
    }

    /// Counts an attempt as open and returns what to charge its usage to.
    ///
    /// # Errors
    ///
    /// Returns [`Exhausted`] if a rule's `connections` budget is reached.
    pub(crate) fn open_charges(&self, permit: &Permit) -> Result<Charges, Exhausted> {
        let sandbox = self.sandbox(permit.sandbox()).ok_or(Exhausted::Unkept)?;
        Charges::open(sandbox, permit, self.state_files.clone(), self.begun)
    }

    /// Starts the lifetime of a sandbox at its first attempt.
    pub(crate) fn start_lifetime(&self, id: &SandboxId) {
        let Some(sandbox) = self.sandbox(id) else { return };
        if sys::lock(&sandbox.account).start_lifetime(self.now()) {
            sandbox.request_write(&self.state_files, self.begun);
        }
    }

    /// Returns the sandboxes whose lifetime has expired.
    pub(crate) fn expired_sandboxes(&self, rules: &RuleSet) -> BTreeSet<SandboxId> {
        let limited = rules.sandboxes().iter().filter_map(|sandbox| {
            let seconds = rules.budgets_of(sandbox).limit(BudgetKind::LifetimeSeconds)?;
            Some((sandbox.id.clone(), seconds))
        });
        let now = self.now();
        let is_over = |(id, seconds): &(SandboxId, u64)| {
            let born = self.sandbox(id).and_then(|sandbox| sys::lock(&sandbox.account).lifetime_start());
            born.is_some_and(|born| born.saturating_add(seconds.saturating_mul(1000)) <= now)
        };
        limited.filter(is_over).map(|(id, _)| id).collect()
    }

    /// Returns the usage of every budget that is set, as JSON for `sandbar budget`.
    pub(crate) fn describe(&self, rules: &RuleSet) -> Value {
        let sandboxes = rules.sandboxes().iter().filter_map(|sandbox| {
            let budgets = rules.budgets_of(sandbox);
            let total = self.describe_budgets(&sandbox.id, &BudgetOwner::Sandbox, budgets);
            let rules: Vec<Value> = rules
                .policies_of(sandbox)
                .into_iter()
                .flat_map(|policy| policy.rules().iter().map(move |rule| (policy, rule)))
                .filter(|(_, rule)| rule.budgets().limits().next().is_some())
                .map(|(policy, rule)| {
                    let purse = BudgetOwner::Rule(format!("{}/{}", policy.name(), rule.name()).into());
                    let used = self.describe_budgets(&sandbox.id, &purse, rule.budgets());
                    json!({ "policy": policy.name().as_str(), "rule": rule.name(), "budgets": used })
                })
                .collect();
            let any = !total.is_empty() || !rules.is_empty();
            any.then(|| json!({ "sandbox": sandbox.id.as_str(), "budgets": total, "rules": rules }))
        });
        Value::Array(sandboxes.collect())
    }

    fn describe_budgets(&self, id: &SandboxId, purse: &BudgetOwner, budgets: Budgets) -> Vec<Value> {
        let (now, Some(sandbox)) = (self.now(), self.sandbox(id)) else { return Vec::new() };
        let shown = budgets.limits().filter(|(budget, _)| *budget != BudgetKind::DnsBitsPerHour);
        shown
            .map(|(budget, limit)| {
                let line = BudgetLine { purse: purse.clone(), budget, limit };
                let mut account = sys::lock(&sandbox.account);
                let (used, refill) = match budget == BudgetKind::LifetimeSeconds {
                    true => (account.age(now), None),
                    false => account.amount_used(&line, now),
                };
                let refill = refill.map(|refill| refill.saturating_sub(now).div_ceil(1000));
                json!({ "budget": budget.key(), "limit": limit, "used": used, "refills_in_seconds": refill })
            })
            .collect()
    }

    /// Forgets the usage of a grant that has ended.
    pub(crate) fn forget_grant(&self, sandbox: &SandboxId, rule: &str) {
        let key = format!("{}/{rule}", rules::GRANTS_POLICY);
        if let Some(sandbox) = self.sandbox(sandbox) {
            sys::lock(&sandbox.account).forget_rule(&key);
        }
    }

    /// Writes the exact usage of every account, so that a clean stop loses no budget.
    pub(crate) async fn flush(&self) {
        let states: Vec<Arc<SandboxState>> = self.table().states.values().cloned().collect();
        let now = self.now();
        let write = move || {
            for error in states.iter().filter_map(|state| state.write_exact(now).err()) {
                tracing::warn!(%error, "cannot write budget usage");
            }
            for error in states.iter().filter_map(|state| state.signals.store().err()) {
                tracing::warn!(%error, "cannot write what the inspection remembers");
            }
        };
        if !matches!(timeout(FLUSH_WAIT, self.state_files.run(write)).await, Ok(Ok(()))) {
            tracing::warn!("cannot write budget usage: the files do not answer; some budget is lost");
        }
    }

    fn table(&self) -> MutexGuard<'_, SandboxTable> {
        sys::lock(&self.sandboxes)
    }

    fn now(&self) -> u64 {
        ledger_time(self.begun)
    }
}

fn account_path(dir: &Path, id: &SandboxId) -> PathBuf {
    dir.join(format!("{id}.json"))
}

fn read_accounts(dir: &Path) -> anyhow::Result<HashMap<SandboxId, SandboxAccount>> {
    let mut accounts = HashMap::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let id = stem.and_then(|stem| SandboxId::parse(stem).ok());
        let (Some(id), true) = (id, path.extension().is_some_and(|ext| ext == "json")) else {
            continue;
        };
        let invalid = || format!("{} is not valid: repair or remove it", path.display());
        accounts.insert(id, SandboxAccount::read(&path).with_context(invalid)?);
    }
    Ok(accounts)
}

fn ledger_time((base, begun): (u64, Instant)) -> u64 {
    base.saturating_add(u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX))
}
