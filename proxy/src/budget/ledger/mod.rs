//! The ledger: how much of its budgets (requests, bytes up, bytes down) each sandbox has used, also across restarts.
//!
//! Usage is charged before it happens, so no budget overshoots. Requests are charged one at a time. Bytes are charged
//! by lease: a relay leases up to [`MAX_LEASE`], moves at most that many and refunds the rest. A lease is much cheaper
//! than charging each read, and however many connections share a budget, the bytes leased never exceed it.
//!
//! What is used must be in the account file first, or a crash would refill it. Another thread writes the files, so that
//! a file system that does not answer stops no thread of the runtime: a charge that the file does not cover yet waits,
//! for at most [`WRITE_WAIT`], and is refused as `budget_unkept` after that.
//!
//! Ledger time starts from the wall clock, advances with the monotonic clock, and never starts before the newest
//! timestamp on disk. Setting the wall clock back therefore refills nothing, neither now nor after a restart.

mod account;
mod window;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use certs::{CertificateAuthority, LeafCache};
use rules::budget::{BudgetKind, Budgets, UsageKind};
use rules::ids::SandboxId;
use rules::{Permit, Reason, RuleRef, RuleSet};
use serde_json::{Value, json};
use sys::worker::Worker;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use self::account::{AccountFile, BudgetLine, BudgetOwner, ChargeError, SandboxAccount};
use crate::inspect::{SandboxSignals, SignalKeys};
use crate::report::refusal::Refusal;
use crate::state_file::{Durability, write_atomic};

/// Directory of the account files, inside the log directory.
const BUDGETS_DIR: &str = "budgets";
/// Largest lease in bytes: small beside any useful budget, large enough that locking the account does not matter.
pub(crate) const MAX_LEASE: u64 = 256 << 10;
/// How long to keep the lifetime of a sandbox that is no longer configured, and what it used of budgets that never
/// refill. Other usage is kept for as long as it counts: a day at most.
const ACCOUNT_RETENTION: Duration = Duration::from_secs(30 * 86_400);
/// How often the files of sandboxes that have left are looked through.
const SWEEP_INTERVAL: Duration = Duration::from_secs(3600);
/// How long a charge waits until the account file covers it.
const WRITE_WAIT: Duration = Duration::from_secs(5);
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
}

/// The sandboxes of the rules in force, and those that have left and still have open connections.
#[derive(Debug, Default)]
struct SandboxTable {
    states: HashMap<SandboxId, Arc<SandboxState>>,
    /// The sandboxes that must stay in the table.
    configured: HashSet<SandboxId>,
    swept: Option<Instant>,
}

/// What the proxy keeps for one sandbox: dropped when the sandbox has left the configuration and its connections are
/// closed.
#[derive(Debug)]
pub(crate) struct SandboxState {
    account: Mutex<SandboxAccount>,
    /// Whether the last write of the account succeeded; changes with every write.
    written: watch::Sender<bool>,
    leaf_certs: OnceLock<LeafCache>,
    /// What the inspection remembers.
    pub(crate) signals: Arc<SandboxSignals>,
}

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

/// Which budget is exhausted, and when it refills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Exhausted {
    Budget {
        budget: BudgetKind,
        limit: u64,
        rule: Option<Arc<str>>,
        refills: Option<Duration>,
    },
    /// The account file cannot be written, so nothing may be used.
    Unkept,
}

impl Ledger {
    /// Reads the accounts that earlier processes wrote.
    ///
    /// # Errors
    ///
    /// Returns an error for an unreadable account: starting without it would refill its budgets.
    pub(crate) fn open(dir: &Path, rules: &RuleSet, state_files: Worker) -> anyhow::Result<Self> {
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
            let signals = SandboxSignals::open(&signal_keys, id);
            (id.clone(), Arc::new(SandboxState::new(account, now, signals)))
        });
        let states: HashMap<SandboxId, Arc<SandboxState>> = states.collect();
        let sandboxes = Mutex::new(SandboxTable { states, configured, swept: None });
        Ok(Ledger { dir, begun: (now, Instant::now()), sandboxes, state_files, signal_keys })
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
                    let signals = SandboxSignals::open(&self.signal_keys, &id);
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
        let (lines, begun) = (budget_lines(permit), self.begun);
        sys::lock(&sandbox.account).open_attempt(&lines).map_err(|error| to_exhausted(error, self.now()))?;
        let charged = Mutex::new((permit.generation(), lines.clone()));
        let state_files = self.state_files.clone();
        Ok(Charges { sandbox, state_files, lines: charged, opened_under: lines, begun })
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

impl SandboxState {
    fn new(mut account: SandboxAccount, now: u64, signals: SandboxSignals) -> Self {
        account.restore(now);
        let (account, leaf_certs) = (Mutex::new(account), OnceLock::new());
        SandboxState { account, written: watch::channel(true).0, leaf_certs, signals: Arc::new(signals) }
    }

    /// Returns the cache of leaf certificates, made at its first use.
    pub(crate) fn leaf_certs(
        &self,
        authority: &Arc<CertificateAuthority>,
    ) -> Result<&LeafCache, rustls::Error> {
        if let Some(cache) = self.leaf_certs.get() {
            return Ok(cache);
        }
        let cache = LeafCache::new(authority.clone())?;
        Ok(self.leaf_certs.get_or_init(|| cache))
    }

    /// Has the account written, unless it waits for that already.
    fn request_write(self: &Arc<Self>, state_files: &Worker, begun: (u64, Instant)) {
        if std::mem::replace(&mut sys::lock(&self.account).is_queued, true) {
            return;
        }
        let state = self.clone();
        if state_files.post(move || state.write(ledger_time(begun))).is_err() {
            sys::lock(&self.account).is_queued = false;
            self.written.send_replace(false);
        }
    }

    /// Writes the account with a new allowance, and tells those who wait. Holds no lock while it writes.
    fn write(&self, now: u64) {
        let mut account = sys::lock(&self.account);
        let (path, content) = (account.path.clone(), account.begin_write(now));
        drop(account);
        let written = write_account(&path, &content);
        match &written {
            Ok(()) => sys::lock(&self.account).finish_write(&content),
            Err(error) if *self.written.borrow() => {
                tracing::warn!(%error, path = %path.display(), "cannot write budget usage");
            }
            Err(_) => {}
        }
        self.written.send_replace(written.is_ok());
    }

    /// Writes the exact usage without an allowance, unless that is written.
    fn write_exact(&self, now: u64) -> std::io::Result<()> {
        let mut account = sys::lock(&self.account);
        let (path, Some(content)) = (account.path.clone(), account.finalize(now)) else { return Ok(()) };
        drop(account);
        write_account(&path, &content).inspect_err(|_| sys::lock(&self.account).mark_changed())
    }
}

impl Charges {
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

impl Exhausted {
    /// Returns the reason for cutting an open connection.
    pub(crate) fn reason(&self) -> Reason {
        match self {
            Exhausted::Budget { .. } => Reason::BudgetSpent,
            Exhausted::Unkept => Reason::BudgetUnkept,
        }
    }

    /// The sandbox's `connections` budget is reached.
    pub(crate) fn connections(limit: u64) -> Self {
        Exhausted::Budget { budget: BudgetKind::Connections, limit, rule: None, refills: None }
    }
}

impl From<Exhausted> for Refusal {
    fn from(spent: Exhausted) -> Self {
        let Exhausted::Budget { budget, limit, rule, refills } = spent else {
            return Reason::BudgetUnkept.into();
        };
        let owner = rule.map_or_else(|| "of the sandbox".to_owned(), |rule| format!("of rule {rule}"));
        let refills = match refills {
            Some(time) => format!("it refills in {} s", time.as_secs().max(1)),
            None if budget == BudgetKind::Connections => "close one first".to_owned(),
            None => "it does not refill".to_owned(),
        };
        Refusal::from(Reason::BudgetSpent)
            .with_detail(format!("{budget} = {limit} {owner} is used up; {refills}"))
    }
}

/// Returns the budgets that an attempt is charged to.
///
/// Three budgets are enforced elsewhere: DNS bits by the DNS filter, a sandbox's connections by
/// [`Quotas`](crate::budget::quota::Quotas), and its lifetime by the rules.
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

fn ledger_time((base, begun): (u64, Instant)) -> u64 {
    base.saturating_add(u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX))
}

fn account_path(dir: &Path, id: &SandboxId) -> PathBuf {
    dir.join(format!("{id}.json"))
}

fn write_account(path: &Path, content: &AccountFile) -> std::io::Result<()> {
    write_atomic(path, content, Durability::Process)
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use rules::facts::{ConnectFacts, ConnectTarget, EchPresence, Protocol};
    use rules::{Decision, DomainName, Facts, Host, LoadSources, SourceFile, compile};

    use super::*;

    fn open(dir: &Path, rules: &RuleSet) -> anyhow::Result<Ledger> {
        Ledger::open(dir, rules, Worker::start("state-files").unwrap())
    }

    fn wait<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
    }

    impl Charges {
        fn charge_now(&self, what: UsageKind, amount: u64) -> Result<(), Exhausted> {
            wait(self.charge(what, amount))
        }

        fn lease_now(&self, what: UsageKind) -> Result<ByteLease, Exhausted> {
            wait(self.lease(what))
        }
    }

    fn rules(budget: &str) -> RuleSet {
        let text = format!(
            "name = \"p\"\n[budget]\n{budget}\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\ntls = \"tunnel\"\n\
             [allow.budget]\nconnections = 2\nrequests_per_minute = 1000\n"
        );
        let policy = SourceFile { path: "p.toml".into(), bytes: text.into() };
        compile(&LoadSources { policies: vec![policy], ..LoadSources::default() }, &[]).unwrap()
    }

    fn permit(rules: &RuleSet) -> Permit {
        permit_to(rules, "x.example")
    }

    fn permit_to(rules: &RuleSet, host: &str) -> Permit {
        let host = Host::Name(DomainName::parse(host).unwrap());
        let protocol = Protocol::Tls { sni: Some(host.clone()), ech: EchPresence::Absent };
        let facts = ConnectFacts { target: ConnectTarget::Named(host), port: 443, protocol };
        match rules.decide(rules.sandboxes().iter().next().unwrap(), &Facts::Connect(facts)) {
            Decision::Allow(permit) => permit,
            Decision::Deny(denial) => panic!("{denial:?}"),
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(24))]

        /// Concurrent leases and refunds never move more than the limit, and all of the limit can be moved.
        #[test]
        fn budgets_are_exact_under_concurrency(limit in 1u64..4_000_000, part in 1u64..300_000) {
            let dir = tempfile::tempdir().unwrap();
            let rules = rules(&format!("upload_bytes_per_hour = {limit}"));
            let ledger = open(dir.path(), &rules).unwrap();
            let moved = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    let (ledger, moved, permit) = (&ledger, &moved, permit(&rules));
                    scope.spawn(move || {
                        let charges = ledger.open_charges(&permit).unwrap();
                        let mut wanted = part + thread;
                        while let Ok(lease) = charges.lease_now(UsageKind::Upload) {
                            let now = lease.bytes.min(wanted);
                            moved.fetch_add(now, Ordering::SeqCst);
                            assert!(moved.load(Ordering::SeqCst) <= limit);
                            charges.refund(&lease, now);
                            wanted = wanted * 7 % 90_001 + 1;
                        }
                    });
                }
            });
            // One thread may have held a lease when the other was refused; after its refund the rest is available.
            let charges = ledger.open_charges(&permit(&rules)).unwrap();
            while let Ok(lease) = charges.lease_now(UsageKind::Upload) {
                moved.fetch_add(lease.bytes, Ordering::SeqCst);
            }
            proptest::prop_assert_eq!(moved.into_inner(), limit);
        }
    }

    #[test]
    fn a_restart_gives_nothing_back_and_a_crash_takes_a_little() {
        let rules = rules("requests_per_hour = 160\nupload_bytes_per_day = 1000");
        for (how, used) in [("orderly", 100), ("by a crash", 110)] {
            let dir = tempfile::tempdir().unwrap();
            let ledger = open(dir.path(), &rules).unwrap();
            let charges = ledger.open_charges(&permit(&rules)).unwrap();
            (0..100).for_each(|_| charges.charge_now(UsageKind::Requests, 1).unwrap());
            if how == "orderly" {
                wait(ledger.flush());
            }
            drop((charges, ledger));
            let ledger = open(dir.path(), &rules).unwrap();
            let charges = ledger.open_charges(&permit(&rules)).unwrap();
            let left = (0..200).filter(|_| charges.charge_now(UsageKind::Requests, 1).is_ok()).count();
            assert!((160 - used..=60).contains(&left), "{how}: {left} are left");
            let spent = charges.charge_now(UsageKind::Requests, 1).unwrap_err();
            let Exhausted::Budget { budget, limit, rule, refills } = spent else { panic!("{spent:?}") };
            assert_eq!((budget, limit, rule), (BudgetKind::RequestsPerHour, 160, None));
            assert!(refills.is_some_and(|time| time > Duration::from_secs(3500)), "{refills:?}");
        }
    }

    #[test]
    fn a_lease_is_given_back_to_what_it_was_taken_from() {
        let dir = tempfile::tempdir().unwrap();
        let free = rules("");
        let ledger = open(dir.path(), &free).unwrap();
        let bound = rules("upload_bytes_per_hour = 1000");
        let (other, charges) =
            (ledger.open_charges(&permit(&bound)).unwrap(), ledger.open_charges(&permit(&free)).unwrap());
        other.charge_now(UsageKind::Upload, 1000).unwrap();
        let lease = charges.lease_now(UsageKind::Upload).unwrap();
        charges.adopt_budgets(&permit(&bound)); // a reload while a lease is held
        charges.refund(&lease, 0);
        assert!(
            other.charge_now(UsageKind::Upload, 1).is_err(),
            "a refund must not free another attempt's usage"
        );
    }

    #[test]
    fn the_later_of_two_changes_stands() {
        let dir = tempfile::tempdir().unwrap();
        let free = rules("");
        let ledger = open(dir.path(), &free).unwrap();
        let charges = ledger.open_charges(&permit(&free)).unwrap();
        let later =
            rules("upload_bytes_per_hour = 5").with_timed_state(&rules::TimedState::default(), 9).unwrap();
        charges.adopt_budgets(&permit(&later));
        charges
            .adopt_budgets(&permit(&rules("").with_timed_state(&rules::TimedState::default(), 8).unwrap()));
        assert!(charges.charge_now(UsageKind::Upload, 6).is_err());
    }

    #[test]
    fn a_drip_does_not_write_the_file_for_every_byte() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules("upload_bytes_per_hour = 1000000"));
        let ledger = open(dir.path(), &rules).unwrap();
        let charges = ledger.open_charges(&permit(&rules)).unwrap();
        let drip = || {
            let lease = charges.lease_now(UsageKind::Upload)?;
            charges.refund(&lease, 1);
            Ok::<(), Exhausted>(())
        };
        drip().unwrap();
        std::fs::remove_dir_all(dir.path().join(BUDGETS_DIR)).unwrap(); // a write would fail now
        (0..1000).for_each(|at| assert_eq!(drip(), Ok(()), "byte {at}"));
    }

    #[test]
    fn a_rule_of_the_base_bounds_all_that_passes_by_it() {
        let file = |path: &str, text: &str| SourceFile { path: path.into(), bytes: text.into() };
        let operator = "[[sandbox]]\nid = \"s\"\nbase = \"b\"\npolicies = [\"p\"]\n";
        let own = "name = \"p\"\n[[allow]]\nname = \"one\"\nhosts = [\"x.example\"]\ntls = \"tunnel\"\n\
                   [[allow]]\nname = \"two\"\nhosts = [\"y.example\"]\ntls = \"tunnel\"\n";
        let base = "name = \"b\"\n[[allow]]\nname = \"all\"\nhosts = [\".example\"]\ndangerously_wide = true\n\
                    tls = \"tunnel\"\n[allow.budget]\nupload_bytes_per_hour = 10\n";
        let sources = LoadSources {
            operator: Some(file("sandbar.toml", operator)),
            policies: vec![file("p.toml", own), file("b.toml", base)],
            ..LoadSources::default()
        };
        let rules = compile(&sources, &[]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let ledger = open(dir.path(), &rules).unwrap();
        let charges = |host| ledger.open_charges(&permit_to(&rules, host)).unwrap();
        charges("x.example").charge_now(UsageKind::Upload, 6).unwrap();
        let spent = charges("y.example").charge_now(UsageKind::Upload, 6).unwrap_err();
        let Exhausted::Budget { rule, .. } = spent else { panic!("{spent:?}") };
        assert_eq!(rule.as_deref(), Some("b/all"));
        charges("y.example").charge_now(UsageKind::Upload, 4).unwrap();
    }

    // proves: budget.download_bytes_per_day, budget.download_bytes_per_hour, budget.requests_per_day
    // proves: budget.requests_per_hour, budget.requests_per_minute, budget.upload_bytes_per_day
    // proves: budget.upload_bytes_per_hour, allow.budget.download_bytes_per_day, allow.budget.download_bytes_per_hour
    // proves: allow.budget.requests_per_day, allow.budget.requests_per_hour, allow.budget.requests_per_minute
    // proves: allow.budget.upload_bytes_per_day, allow.budget.upload_bytes_per_hour
    #[test]
    fn each_budget_of_a_policy_and_of_a_rule_is_counted_in_its_window() {
        const MINUTE: u64 = 60;
        for (key, what, window) in [
            ("download_bytes_per_day", UsageKind::Download, 1440 * MINUTE),
            ("download_bytes_per_hour", UsageKind::Download, 60 * MINUTE),
            ("requests_per_day", UsageKind::Requests, 1440 * MINUTE),
            ("requests_per_hour", UsageKind::Requests, 60 * MINUTE),
            ("requests_per_minute", UsageKind::Requests, MINUTE),
            ("upload_bytes_per_day", UsageKind::Upload, 1440 * MINUTE),
            ("upload_bytes_per_hour", UsageKind::Upload, 60 * MINUTE),
        ] {
            for owner in [None, Some("p/r")] {
                let (sandbox, rule) = if owner.is_none() { (100, 900) } else { (900, 100) };
                let text = format!(
                    "name = \"p\"\n[budget]\n{key} = {sandbox}\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\n\
                     tls = \"tunnel\"\n[allow.budget]\n{key} = {rule}\n"
                );
                let policy = SourceFile { path: "p.toml".into(), bytes: text.into() };
                let sources = LoadSources { policies: vec![policy], ..LoadSources::default() };
                let (dir, rules) = (tempfile::tempdir().unwrap(), compile(&sources, &[]).unwrap());
                let ledger = open(dir.path(), &rules).unwrap();
                let charges = ledger.open_charges(&permit(&rules)).unwrap();
                charges.charge_now(what, 100).unwrap();
                let spent = charges.charge_now(what, 1).unwrap_err();
                let Exhausted::Budget { budget, limit, rule, refills } = spent else {
                    panic!("{key}: {spent:?}")
                };
                assert_eq!((budget.key(), limit, rule.as_deref()), (key, 100, owner));
                let refills = refills.unwrap().as_secs();
                assert!((window - 10..=window + window / 10).contains(&refills), "{key}: {refills} s");
                for other in [UsageKind::Download, UsageKind::Requests, UsageKind::Upload] {
                    assert!(
                        other == what || charges.charge_now(other, 1000).is_ok(),
                        "{key} counts {other:?}"
                    );
                }
            }
        }
    }

    // proves: allow.budget.connections
    #[test]
    fn p17_so_many_are_open_at_once_and_a_place_is_given_up() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules(""));
        let ledger = open(dir.path(), &rules).unwrap();
        let one = ledger.open_charges(&permit(&rules)).unwrap();
        let _two = ledger.open_charges(&permit(&rules)).unwrap();
        let spent = ledger.open_charges(&permit(&rules)).unwrap_err();
        let Exhausted::Budget { budget, rule, .. } = spent else { panic!("{spent:?}") };
        assert_eq!((budget, rule.as_deref()), (BudgetKind::Connections, Some("p/r")));
        drop(one);
        assert!(ledger.open_charges(&permit(&rules)).is_ok());
    }

    #[test]
    fn p16_what_cannot_be_written_cannot_be_used() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules("requests_per_hour = 9"));
        let ledger = open(dir.path(), &rules).unwrap();
        let charges = ledger.open_charges(&permit(&rules)).unwrap();
        charges.charge_now(UsageKind::Requests, 1).unwrap();
        std::fs::remove_dir_all(dir.path().join(BUDGETS_DIR)).unwrap();
        for _ in 0..3 {
            assert_eq!(charges.charge_now(UsageKind::Requests, 1), Err(Exhausted::Unkept));
        }
        std::fs::create_dir(dir.path().join(BUDGETS_DIR)).unwrap();
        assert_eq!((0..20).filter(|_| charges.charge_now(UsageKind::Requests, 1).is_ok()).count(), 8);
    }

    #[test]
    fn p16_a_charge_waits_for_its_file_but_not_for_long() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules("requests_per_hour = 9"));
        let files = Worker::start("state-files").unwrap();
        let ledger = Ledger::open(dir.path(), &rules, files.clone()).unwrap();
        let charges = ledger.open_charges(&permit(&rules)).unwrap();
        charges.charge_now(UsageKind::Requests, 1).unwrap();
        let (release, hang) = std::sync::mpsc::channel::<()>();
        files.post(move || assert!(hang.recv().is_err())).unwrap(); // a file system that does not answer
        let started = std::time::Instant::now();
        assert_eq!(charges.charge_now(UsageKind::Requests, 1), Err(Exhausted::Unkept));
        assert!(started.elapsed() >= WRITE_WAIT);
        assert_eq!(ledger.describe(&rules)[0]["budgets"][0]["used"], 1, "and nobody else waits");
        drop(release);
        assert_eq!((0..20).filter(|_| charges.charge_now(UsageKind::Requests, 1).is_ok()).count(), 8);
    }

    #[test]
    fn leaving_and_returning_refills_nothing() {
        let (dir, with) = (tempfile::tempdir().unwrap(), rules("requests_per_hour = 160"));
        let other = SourceFile {
            path: "q.toml".into(),
            bytes: "name = \"q\"\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\n".into(),
        };
        let without = compile(&LoadSources { policies: vec![other], ..LoadSources::default() }, &[]).unwrap();
        let ledger = Arc::new(open(dir.path(), &with).unwrap());
        let prune = || {
            let pruned = ledger.clone();
            let prune_all = move || pruned.departed().iter().for_each(|id| pruned.prune_sandbox(id));
            wait(ledger.state_files.run(prune_all)).unwrap();
        };
        let charges = ledger.open_charges(&permit(&with)).unwrap();
        (0..100).for_each(|_| charges.charge_now(UsageKind::Requests, 1).unwrap());
        ledger.admit_sandboxes(&without);
        prune();
        assert_eq!(ledger.sandbox_count(), 2, "it has an open connection");
        charges.charge_now(UsageKind::Requests, 1).unwrap();
        drop(charges);
        for round in 0..3 {
            ledger.admit_sandboxes(&without);
            prune();
            assert_eq!(ledger.sandbox_count(), 1, "round {round}");
            assert!(ledger.open_charges(&permit(&with)).is_err(), "refused while it is not configured");
            ledger.admit_sandboxes(&with);
        }
        let charges = ledger.open_charges(&permit(&with)).unwrap();
        assert_eq!((0..200).filter(|_| charges.charge_now(UsageKind::Requests, 1).is_ok()).count(), 59);
        drop(charges);
        let path = dir.path().join(BUDGETS_DIR).join("p.json");
        ledger.admit_sandboxes(&without);
        prune();
        std::fs::write(&path, "{").unwrap();
        ledger.admit_sandboxes(&with);
        let spent = ledger.open_charges(&permit(&with)).unwrap_err();
        assert_eq!(spent, Exhausted::Unkept, "an account that cannot be read refuses its sandbox");
    }

    #[test]
    fn the_file_of_a_sandbox_that_left_is_deleted_once_nothing_in_it_counts() {
        const HOURS: u64 = 3_600_000;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        for (content, age, kept) in [
            (r#"{"at":0,"born":null,"sandbox":{"requests_per_day":{"parts":[],"ahead":0}}}"#, 24, true),
            (r#"{"at":0,"born":null,"sandbox":{"requests_per_day":{"parts":[],"ahead":0}}}"#, 25, false),
            (r#"{"at":0,"born":1}"#, 25, true),
            (r#"{"at":0,"born":1}"#, 30 * 24 + 1, false),
            (r#"{"at":0,"born":null,"rules":{"g":{"bytes":{"parts":[],"ahead":0}}}}"#, 25, true),
        ] {
            std::fs::write(&path, content).unwrap();
            SandboxAccount::read(&path).unwrap().discard_if_old(age * HOURS, ACCOUNT_RETENTION);
            assert_eq!(path.exists(), kept, "{content} after {age} h");
        }
    }

    #[test]
    fn p16_a_broken_file_stops_the_start() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules(""));
        std::fs::create_dir(dir.path().join(BUDGETS_DIR)).unwrap();
        std::fs::write(dir.path().join(BUDGETS_DIR).join("p.json"), "{").unwrap();
        let error = format!("{:#}", open(dir.path(), &rules).err().unwrap());
        assert!(error.contains("p.json is not valid: repair or remove it"), "{error}");
    }
}
