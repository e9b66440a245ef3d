//! `Filter`: everything the life of a query needs, built once.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use audit::{AttemptOutcome, DecisionDetails, Log, OpenRecord};
use rules::configuration::{DenialForm, DnsSettings, PreResolve, ReverseLookups};
use rules::ids::SandboxId;
use rules::{DomainName, RuleSet, SandboxRef};
use tokio::time::Instant;

use crate::budget::DnsBudget;
use crate::budget_store::BudgetStore;
use crate::cache::CachedAnswer;
use crate::limits::MALFORMED_RECORDS;
use crate::lock;
use crate::message::Rcode;
use crate::pre_resolve::PreResolvedNames;
use crate::query_metrics::DnsMetrics;
use crate::record;
use crate::record_rate::{CountedOutcome, RecordRate, UnrecordedQueries};
use crate::state::SandboxState;
use crate::upstream::{ResolverPool, UpstreamClient};

/// What the filter is built from.
#[derive(Clone, Debug)]
pub struct DnsConfig {
    pub settings: DnsSettings,
    /// Where budgets outlive the process; nowhere, if it is none.
    pub budgets: Option<PathBuf>,
}

/// Why the filter does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot use the budgets kept in {path}: {source}; mend or remove the file")]
    Budgets { path: String, source: io::Error },
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
    pub(crate) in_flight: AtomicUsize,
    pub(crate) metrics: DnsMetrics,
    pub(crate) malformed: Mutex<RecordRate>,
    pub(crate) store: Arc<BudgetStore>,
    settings: DnsSettings,
    states:
        RwLock<hashbrown::HashMap<SandboxId, Arc<SandboxState>, foldhash::quality::RandomState>>,
    cached: Arc<AtomicUsize>,
    /// The grid's first line.
    epoch: Instant,
    policy: Mutex<Option<audit::RecordedPolicy>>,
}

impl DnsFilter {
    /// Builds the filter that asks the resolvers of `config`.
    ///
    /// # Errors
    ///
    /// Returns [`StartError`] when budgets of an earlier process cannot be read: starting without
    /// them would give every burst again.
    pub fn new(
        rules: Arc<ArcSwap<RuleSet>>,
        log: Log,
        config: DnsConfig,
    ) -> Result<Arc<Self>, StartError> {
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
        let store = BudgetStore::open(budgets)
            .map_err(|source| StartError::Budgets { path: shown, source })?;
        Ok(Arc::new(DnsFilter {
            rules,
            log,
            upstreams,
            denial: settings.denial,
            hosts: settings
                .hosts
                .iter()
                .map(|host| (host.name.clone(), host.addresses.clone()))
                .collect(),
            fold: Duration::from_secs(settings.fold_seconds),
            reverse: settings.reverse,
            pre_resolved: PreResolvedNames::default(),
            in_flight: AtomicUsize::new(0),
            metrics: DnsMetrics::new(),
            malformed: Mutex::new(RecordRate::new(MALFORMED_RECORDS)),
            store: Arc::new(store),
            states: RwLock::default(),
            cached: Arc::default(),
            epoch: Instant::now(),
            policy: Mutex::default(),
            settings,
        }))
    }

    /// What runs beside the queries: names resolved ahead, and counts that wait to be told.
    ///
    /// Runs until it is dropped.
    pub async fn run_periodic(self: &Arc<Self>) {
        let ahead = async {
            match self.is_pre_resolving() {
                false => std::future::pending().await,
                true => self.run_pre_resolve().await,
            }
        };
        tokio::join!(ahead, self.flush_periodically());
    }

    /// Keeps the budgets and tells what was only counted, at a clean stop.
    pub fn stop(&self) {
        self.flush_counts(None);
        let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let levels: BTreeMap<_, _> = states
            .iter()
            .map(|(id, state)| (id.to_string(), state.lock().budget.save(now)))
            .collect();
        if let Err(error) = self.store.save(levels) {
            tracing::warn!(%error, "the DNS budgets could not be kept: they start empty next time");
        }
    }

    /// Queries that wait for a resolver now.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(crate) fn is_pre_resolving(&self) -> bool {
        self.settings.pre_resolve == PreResolve::On
    }

    /// The sandbox's own part.
    pub(crate) fn sandbox_state(&self, rules: &RuleSet, sandbox: &SandboxRef) -> Arc<SandboxState> {
        let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = states.get(&sandbox.id) {
            return state.clone();
        }
        drop(states);
        let mut states = self.states.write().unwrap_or_else(PoisonError::into_inner);
        let fresh = || {
            let now = Instant::now();
            let mut budget = DnsBudget::new(self.settings.forwards_per_hour, now);
            if let Some(saved) = self.store.restored_levels(sandbox.id.as_str()) {
                budget.restore(saved, now);
            }
            Arc::new(SandboxState::new(
                rules,
                sandbox,
                budget,
                self.settings.synthetic,
                self.cached.clone(),
            ))
        };
        states.entry(sandbox.id.clone()).or_insert_with(fresh).clone()
    }

    pub(crate) fn find_state(&self, sandbox: &SandboxId) -> Option<Arc<SandboxState>> {
        self.states.read().unwrap_or_else(PoisonError::into_inner).get(sandbox).cloned()
    }

    /// The rules in force, in the log's words.
    pub(crate) fn policy(&self, rules: &RuleSet) -> audit::RecordedPolicy {
        let mut kept = lock(&self.policy);
        match &*kept {
            Some(policy) if policy.generation == rules.generation() => policy.clone(),
            Some(_) | None => kept.insert(record::policy(rules)).clone(),
        }
    }

    /// Waits for the next line of the grid, so that the moment of a query says little.
    pub(crate) async fn wait_for_grid(&self) {
        let grid = self.settings.grid_milliseconds;
        let since = self.epoch.elapsed().as_millis() as u64;
        if let Some(line) = since.checked_div(grid) {
            let next = Duration::from_millis((line + 1) * grid);
            tokio::time::sleep_until(self.epoch + next).await;
        }
    }

    /// Tells now and then what was folded.
    async fn flush_periodically(&self) {
        let every = (self.fold / 2).clamp(Duration::from_secs(1), Duration::from_secs(30));
        loop {
            tokio::time::sleep(every).await;
            self.flush_counts(Some(Instant::now()));
        }
    }

    /// Tells what waits; at a stop, when there is no `now`, all of it.
    fn flush_counts(&self, now: Option<Instant>) {
        let rules = self.rules.load_full();
        for rest in lock(&self.malformed).take_unrecorded(now) {
            self.record_summary(&rules, rest);
        }
        let states: Vec<Arc<SandboxState>> = {
            let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
            states.values().cloned().collect()
        };
        for state in states {
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
        let rest = inner.record_rate.take_unrecorded(now);
        let subject = inner.subject.clone();
        drop(inner);
        for (entry, count) in answers {
            let mut record = self.log.open_record(record::own_arrival("folded"));
            record.set_sandbox(subject.clone());
            self.record_answer(record, rules, &entry, count.saturating_sub(1));
        }
        for rest in rest {
            self.record_summary(
                rules,
                UnrecordedQueries { subject: Some(subject.clone()), ..rest },
            );
        }
    }

    /// Writes one record for queries that were only counted, under their own reason.
    fn record_summary(&self, rules: &RuleSet, rest: UnrecordedQueries) {
        let mut record = self.log.open_record(record::own_arrival("folded"));
        if let Some(subject) = rest.subject {
            record.set_sandbox(subject);
        }
        record.set_facts(record::facts(&rest.name, rest.kind));
        let policy = self.policy(rules);
        match rest.fate {
            CountedOutcome::Answered => {
                let verdict = record::summary_details(record::local_details(policy), rest.count);
                let outcome =
                    crate::clean::answer_outcome(Rcode::NOERROR, &[], audit::Ending::Completed);
                record.post_answer(verdict, &outcome);
            }
            CountedOutcome::Refused(reason) => {
                record.post_denial(record::summary_details(
                    record::refusal_details(reason, None, policy),
                    rest.count,
                ));
            }
        }
    }

    /// Writes that an answer was given without asking anybody, `folded` times more than once.
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

    /// What the record of a kept answer says.
    pub(crate) fn answer_details(
        &self,
        rules: &RuleSet,
        entry: &CachedAnswer,
        folded: u64,
    ) -> (DecisionDetails, AttemptOutcome) {
        let verdict = record::allow_details(&entry.permit, self.policy(rules), record::ANSWERED);
        let outcome =
            crate::clean::answer_outcome(entry.rcode, &entry.told, audit::Ending::Completed);
        (DecisionDetails { folded, ..verdict }, outcome)
    }
}

impl std::fmt::Debug for DnsFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DnsFilter").finish_non_exhaustive()
    }
}
