//! [`DnsFilter`]: settings, rules, log, upstreams and the state of all sandboxes, built once and shared by all queries.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use audit::{AttemptOutcome, DecisionDetails, DetectionFinding, Log, OpenRecord};
use rules::configuration::{DenialForm, DnsSettings, PreResolve, ReverseLookups};
use rules::ids::SandboxId;
use rules::{DomainName, Permit, Reason, RuleSet, SandboxRef};
use sys::worker::Worker;
use tokio::time::Instant;

use crate::budget::DnsBudget;
use crate::budget_store::BudgetStore;
use crate::cache::CachedAnswer;
use crate::limits::{
    BUDGET_REFILL, BUDGET_SAVE_WAIT, DEPARTED_SANDBOXES, IN_FLIGHT, IN_FLIGHT_SANDBOX, WAITING,
    WAITING_SANDBOX,
};
use crate::lock;
use crate::pre_resolve::PreResolvedNames;
use crate::query_metrics::DnsMetrics;
use crate::record;
use crate::sandbox_quota::SandboxQuota;
use crate::state::SandboxState;
use crate::upstream::{ResolverPool, UpstreamClient};

/// The configuration of a filter.
#[derive(Clone, Debug)]
pub struct DnsConfig {
    pub settings: DnsSettings,
    /// The file that saves budgets across restarts; `None` saves nothing.
    pub budgets: Option<PathBuf>,
}

/// Why the filter cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot use the DNS budgets in {path}: {source}; repair or remove the file")]
    Budgets { path: String, source: io::Error },
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

/// The sandbox's resolver.
pub struct DnsFilter {
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) log: Log,
    pub(crate) upstreams: Arc<dyn UpstreamClient>,
    pub(crate) denial: DenialForm,
    pub(crate) hosts: HashMap<DomainName, Vec<IpAddr>>,
    pub(crate) fold: Duration,
    pub(crate) reverse: ReverseLookups,
    pub(crate) pre_resolved: PreResolvedNames,
    /// Upstream queries in flight.
    pub(crate) flights: Arc<SandboxQuota>,
    /// Queries that wait for one.
    pub(crate) waiting: Arc<SandboxQuota>,
    pub(crate) metrics: DnsMetrics,
    pub(crate) store: Arc<BudgetStore>,
    /// The thread that writes the budget file.
    pub(crate) store_files: Worker,
    settings: DnsSettings,
    states: RwLock<hashbrown::HashMap<SandboxId, Arc<SandboxState>, foldhash::quality::RandomState>>,
    /// The budgets of sandboxes that have left, until they are full again.
    departed: Mutex<HashMap<SandboxId, DnsBudget>>,
    cached: Arc<AtomicUsize>,
    /// Origin of the time grid.
    epoch: Instant,
    policy: Mutex<Option<audit::RecordedPolicy>>,
    pub(crate) name_inspector: OnceLock<Arc<dyn NameInspector>>,
}

/// Looks at the names that sandboxes ask for, whether a rule allows them or not.
pub trait NameInspector: Send + Sync {
    /// Returns what is wrong with a name; `permit` is that of an allowed one.
    fn inspect(
        &self,
        sandbox: &SandboxRef,
        name: &DomainName,
        permit: Option<&Permit>,
    ) -> Option<InspectedName>;
}

/// What is wrong with a name.
#[derive(Debug)]
pub struct InspectedName {
    pub finding: DetectionFinding,
    /// Set if the name must not be asked for.
    pub refusal: Option<Reason>,
}

impl DnsFilter {
    /// Sets who looks at names; once.
    pub fn set_name_inspector(&self, inspector: Arc<dyn NameInspector>) {
        drop(self.name_inspector.set(inspector)); // the first one stays
    }

    /// Builds the filter that asks the resolvers of `config`.
    ///
    /// # Errors
    ///
    /// Returns [`StartError`] if the budget file cannot be read: starting without it would grant every burst again.
    pub fn new(rules: Arc<ArcSwap<RuleSet>>, log: Log, config: DnsConfig) -> Result<Arc<Self>, StartError> {
        let upstreams = Arc::new(ResolverPool::new(&config.settings));
        Self::with_upstreams(rules, log, config, upstreams)
    }

    /// Builds the filter that asks `upstreams`.
    ///
    /// # Errors
    ///
    /// As [`DnsFilter::new`].
    pub fn with_upstreams(
        rules: Arc<ArcSwap<RuleSet>>,
        log: Log,
        config: DnsConfig,
        upstreams: Arc<dyn UpstreamClient>,
    ) -> Result<Arc<Self>, StartError> {
        let DnsConfig { settings, budgets } = config;
        let shown = budgets.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        let store =
            BudgetStore::open(budgets).map_err(|source| StartError::Budgets { path: shown, source })?;
        Ok(Arc::new(DnsFilter {
            name_inspector: OnceLock::new(),
            rules,
            log,
            upstreams,
            denial: settings.denial,
            hosts: settings.hosts.iter().map(|host| (host.name.clone(), host.addresses.clone())).collect(),
            fold: Duration::from_secs(settings.fold_seconds),
            reverse: settings.reverse,
            pre_resolved: PreResolvedNames::default(),
            flights: SandboxQuota::new("DNS look-ups in flight", IN_FLIGHT, IN_FLIGHT_SANDBOX),
            waiting: SandboxQuota::new("waiting DNS queries", WAITING, WAITING_SANDBOX),
            metrics: DnsMetrics::new(),
            store: Arc::new(store),
            store_files: Worker::start("dns-budget").map_err(StartError::Thread)?,
            departed: Mutex::default(),
            states: RwLock::default(),
            cached: Arc::default(),
            epoch: Instant::now(),
            policy: Mutex::default(),
            settings,
        }))
    }

    /// Runs the background work until dropped: pre-resolves names, and records what was only counted.
    pub async fn run_periodic(self: &Arc<Self>) {
        let pre_resolve = async {
            match self.is_pre_resolving() {
                false => std::future::pending().await,
                true => self.run_pre_resolve().await,
            }
        };
        tokio::join!(pre_resolve, self.flush_periodically());
    }

    /// Saves the budgets and records what was only counted, at a clean stop.
    pub fn stop(&self) {
        self.flush_counts(None);
        let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let present = states.iter().map(|(id, state)| (id.to_string(), state.lock().budget.save(now)));
        let departed = lock(&self.departed);
        let departed = departed.iter().map(|(id, budget)| (id.to_string(), budget.save(now)));
        let levels: BTreeMap<_, _> = departed.chain(present).collect();
        let (store, (saved, result)) = (self.store.clone(), sync_channel(1));
        let posted = self.store_files.post(move || drop(saved.send(store.save(levels))));
        let result = posted.ok().and_then(|()| result.recv_timeout(BUDGET_SAVE_WAIT).ok());
        if !matches!(result, Some(Ok(()))) {
            tracing::warn!(
                ?result,
                "cannot save the DNS budgets: they are nearly empty after the next start"
            );
        }
    }

    /// Drops the state of sandboxes that have left the configuration and have no query under way.
    ///
    /// Their budgets are kept until they are full again, at most a few hours: a sandbox that leaves and returns gets
    /// no second burst.
    pub fn prune_sandboxes(&self) {
        let rules = self.rules.load_full();
        let has_left = |id: &SandboxId| rules.sandboxes().get(id).is_none();
        let room = self.forget_full_budgets(&rules);
        let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<SandboxId> = states.keys().filter(|id| has_left(id)).take(room).cloned().collect();
        drop(states);
        let mut dropped = Vec::new();
        for id in gone {
            let mut states = self.states.write().unwrap_or_else(PoisonError::into_inner);
            // Nobody gets another reference meanwhile: the table is locked.
            if states.get(&id).is_some_and(|state| Arc::strong_count(state) == 1)
                && let Some(state) = states.remove(&id)
            {
                let budget = state.lock().take_budget(Instant::now());
                lock(&self.departed).insert(id, budget); // before a query can create the state again
                dropped.push(state);
            }
        }
        dropped.iter().for_each(|state| self.flush_sandbox(&rules, state, None));
    }

    /// Forgets the budgets of sandboxes that have left and that are full again; returns how many more can be kept.
    fn forget_full_budgets(&self, rules: &RuleSet) -> usize {
        let now = Instant::now();
        let mut departed = lock(&self.departed);
        departed.retain(|id, budget| {
            let is_kept = !budget.is_full(now);
            if !is_kept && rules.sandboxes().get(id).is_none() {
                self.store.forget(id.as_str());
            }
            is_kept
        });
        if self.epoch.elapsed() > BUDGET_REFILL {
            let is_configured =
                |id: &str| SandboxId::parse(id).is_ok_and(|id| rules.sandboxes().get(&id).is_some());
            self.store.forget_restored(is_configured);
        }
        DEPARTED_SANDBOXES.saturating_sub(departed.len())
    }

    /// Counts the sandboxes that have left and whose budgets are kept.
    pub fn departed_count(&self) -> usize {
        lock(&self.departed).len()
    }

    /// Counts the sandboxes that have a state.
    pub fn sandbox_count(&self) -> usize {
        self.states.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns the number of queries that wait for a resolver.
    pub fn in_flight(&self) -> usize {
        self.flights.in_use()
    }

    pub(crate) fn is_pre_resolving(&self) -> bool {
        self.settings.pre_resolve == PreResolve::On
    }

    /// Returns the state of a sandbox, created on its first query.
    pub(crate) fn sandbox_state(&self, rules: &RuleSet, sandbox: &SandboxRef) -> Arc<SandboxState> {
        let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = states.get(&sandbox.id) {
            return state.clone();
        }
        drop(states);
        let mut states = self.states.write().unwrap_or_else(PoisonError::into_inner);
        let fresh = || {
            let budget = lock(&self.departed).remove(&sandbox.id);
            let budget = budget.unwrap_or_else(|| self.restore_budget(&sandbox.id, Instant::now()));
            Arc::new(SandboxState::new(rules, sandbox, budget, self.settings.synthetic, self.cached.clone()))
        };
        states.entry(sandbox.id.clone()).or_insert_with(fresh).clone()
    }

    /// Returns the budget that an earlier process left, or a full one.
    fn restore_budget(&self, sandbox: &SandboxId, now: Instant) -> DnsBudget {
        let mut budget = DnsBudget::new(self.settings.forwards_per_hour, now);
        if let Some(saved) = self.store.take_restored(sandbox.as_str()) {
            budget.restore(&saved, now);
        }
        budget
    }

    pub(crate) fn find_state(&self, sandbox: &SandboxId) -> Option<Arc<SandboxState>> {
        self.states.read().unwrap_or_else(PoisonError::into_inner).get(sandbox).cloned()
    }

    /// Returns the policy as it is recorded, cached per generation.
    pub(crate) fn policy(&self, rules: &RuleSet) -> audit::RecordedPolicy {
        let mut cached = lock(&self.policy);
        match &*cached {
            Some(policy) if policy.generation == rules.generation() => policy.clone(),
            Some(_) | None => cached.insert(record::policy(rules)).clone(),
        }
    }

    /// Waits for the next point of the time grid, a multiple of `grid_milliseconds` after the start of the filter.
    ///
    /// A sandbox can encode data not only in names but also in when it asks. Charging for names does not see that; the
    /// grid bounds it: an observer at the resolver learns which grid point a query left at, and nothing finer
    /// ([`timing_bits`](crate::budget::timing_bits) adds it up). The wait comes last, after charge and record, so the
    /// time those take does not show either. It always ends at the *next* point, even if a query arrives exactly on
    /// one, and all queries of that interval leave together. The grid is the same for all sandboxes. Retries at
    /// another resolver do not wait again: a resolver's failure triggers them, not the sandbox.
    ///
    /// `grid_milliseconds = 0` disables the grid (`checked_div` returns `None`).
    pub(crate) async fn wait_for_grid(&self) {
        let grid = self.settings.grid_milliseconds;
        let elapsed = self.epoch.elapsed().as_millis() as u64;
        if let Some(point) = elapsed.checked_div(grid) {
            let next = Duration::from_millis((point + 1) * grid);
            tokio::time::sleep_until(self.epoch + next).await;
        }
    }

    /// Records folded answers periodically.
    async fn flush_periodically(&self) {
        let interval = (self.fold / 2).clamp(Duration::from_secs(1), Duration::from_secs(30));
        loop {
            tokio::time::sleep(interval).await;
            self.flush_counts(Some(Instant::now()));
        }
    }

    /// Records what was only counted and is due at `now`; all of it at a stop, when `now` is `None`.
    fn flush_counts(&self, now: Option<Instant>) {
        let rules = self.rules.load_full();
        let states: Vec<(SandboxId, Arc<SandboxState>)> = {
            let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
            states.iter().map(|(id, state)| (id.clone(), state.clone())).collect()
        };
        for (id, state) in states {
            if let Some(sandbox) = rules.sandboxes().get(&id) {
                state.lock().refresh(&rules, sandbox); // a summary names the identity of its generation
            }
            self.flush_sandbox(&rules, &state, now);
        }
    }

    fn flush_sandbox(&self, rules: &RuleSet, state: &SandboxState, now: Option<Instant>) {
        let mut inner = state.lock();
        let answers = match now {
            None => inner.cache.take_unrecorded(None),
            Some(now) => {
                let before = now.checked_sub(self.fold);
                before.map(|before| inner.cache.take_unrecorded(Some(before))).unwrap_or_default()
            }
        };
        let subject = inner.subject.clone();
        drop(inner);
        for (entry, count) in answers {
            let mut record = self.log.open_record(record::own_arrival("folded"));
            record.set_sandbox(subject.clone());
            self.record_answer(record, rules, &entry, count.saturating_sub(1));
        }
    }

    /// Writes the record of an answer given without an upstream query, and `folded` identical ones.
    pub(crate) fn record_answer(
        &self,
        mut record: OpenRecord,
        rules: &RuleSet,
        entry: &CachedAnswer,
        folded: u64,
    ) {
        record.set_facts(record::facts(entry.name.as_str(), entry.kind));
        let (verdict, outcome) = self.answer_details(rules, entry, folded);
        record.post_answer(verdict, &outcome);
    }

    /// Returns decision and outcome for the record of a cached answer.
    pub(crate) fn answer_details(
        &self,
        rules: &RuleSet,
        entry: &CachedAnswer,
        folded: u64,
    ) -> (DecisionDetails, AttemptOutcome) {
        let verdict = record::allow_details(&entry.permit, self.policy(rules), record::ANSWERED);
        let outcome = crate::clean::answer_outcome(entry.rcode, &entry.told, audit::Ending::Completed);
        (DecisionDetails { folded, ..verdict }, outcome)
    }
}

impl std::fmt::Debug for DnsFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DnsFilter").finish_non_exhaustive()
    }
}
