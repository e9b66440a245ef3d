//! `Filter`: everything the life of a query needs, built once.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use audit::{Log, OpenRecord, Outcome, Verdict};
use rules::operator::{DenialForm, DnsSettings, PreResolve, Reverse};
use rules::word::SandboxId;
use rules::{DomainName, RuleSet, SandboxRef};
use tokio::time::Instant;

use crate::ahead::Ahead;
use crate::budget::Budget;
use crate::cache::Entry;
use crate::limits::MALFORMED_RECORDS;
use crate::lock;
use crate::message::Rcode;
use crate::meter::{Fate, Meter, Rest};
use crate::record;
use crate::state::State;
use crate::store::Store;
use crate::tally::Tally;
use crate::upstream::{Exchange, Upstreams};

/// What the filter is built from.
#[derive(Clone, Debug)]
pub struct Config {
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
pub struct Filter {
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) log: Log,
    pub(crate) upstreams: Arc<dyn Exchange>,
    pub(crate) denial: DenialForm,
    pub(crate) hosts: HashMap<DomainName, Vec<IpAddr>>,
    pub(crate) fold: Duration,
    pub(crate) reverse: Reverse,
    pub(crate) ahead: Ahead,
    pub(crate) in_flight: AtomicUsize,
    pub(crate) tally: Tally,
    pub(crate) malformed: Mutex<Meter>,
    pub(crate) store: Arc<Store>,
    settings: DnsSettings,
    states: RwLock<hashbrown::HashMap<SandboxId, Arc<State>, foldhash::quality::RandomState>>,
    cached: Arc<AtomicUsize>,
    /// The grid's first line.
    epoch: Instant,
    policy: Mutex<Option<audit::Policy>>,
}

impl Filter {
    /// Builds the filter that asks the resolvers of `config`.
    ///
    /// # Errors
    ///
    /// Returns [`StartError`] when budgets of an earlier process cannot be read: starting without
    /// them would give every burst again.
    pub fn new(
        rules: Arc<ArcSwap<RuleSet>>,
        log: Log,
        config: Config,
    ) -> Result<Arc<Self>, StartError> {
        let upstreams = Arc::new(Upstreams::new(&config.settings));
        Self::with_upstreams(rules, log, config, upstreams)
    }

    /// Builds the filter that asks `upstreams`.
    ///
    /// # Errors
    ///
    /// As [`Filter::new`].
    pub fn with_upstreams(
        rules: Arc<ArcSwap<RuleSet>>,
        log: Log,
        config: Config,
        upstreams: Arc<dyn Exchange>,
    ) -> Result<Arc<Self>, StartError> {
        let Config { settings, budgets } = config;
        let shown = budgets.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        let store =
            Store::open(budgets).map_err(|source| StartError::Budgets { path: shown, source })?;
        Ok(Arc::new(Filter {
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
            ahead: Ahead::default(),
            in_flight: AtomicUsize::new(0),
            tally: Tally::new(),
            malformed: Mutex::new(Meter::new(MALFORMED_RECORDS)),
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
    pub async fn tend(self: &Arc<Self>) {
        let ahead = async {
            match self.is_ahead() {
                false => std::future::pending().await,
                true => self.resolve_ahead().await,
            }
        };
        tokio::join!(ahead, self.tell_counts());
    }

    /// Keeps the budgets and tells what was only counted, at a clean stop.
    pub fn stop(&self) {
        self.tell_untold(None);
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

    pub(crate) fn is_ahead(&self) -> bool {
        self.settings.pre_resolve == PreResolve::On
    }

    /// The sandbox's own part.
    pub(crate) fn state(&self, rules: &RuleSet, sandbox: &SandboxRef) -> Arc<State> {
        let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = states.get(&sandbox.id) {
            return state.clone();
        }
        drop(states);
        let mut states = self.states.write().unwrap_or_else(PoisonError::into_inner);
        let fresh = || {
            let now = Instant::now();
            let mut budget = Budget::new(self.settings.forwards_per_hour, now);
            if let Some(saved) = self.store.restored(sandbox.id.as_str()) {
                budget.restore(saved, now);
            }
            Arc::new(State::new(
                rules,
                sandbox,
                budget,
                self.settings.synthetic,
                self.cached.clone(),
            ))
        };
        states.entry(sandbox.id.clone()).or_insert_with(fresh).clone()
    }

    pub(crate) fn known(&self, sandbox: &SandboxId) -> Option<Arc<State>> {
        self.states.read().unwrap_or_else(PoisonError::into_inner).get(sandbox).cloned()
    }

    /// The rules in force, in the log's words.
    pub(crate) fn policy(&self, rules: &RuleSet) -> audit::Policy {
        let mut kept = lock(&self.policy);
        match &*kept {
            Some(policy) if policy.generation == rules.generation() => policy.clone(),
            Some(_) | None => kept.insert(record::policy(rules)).clone(),
        }
    }

    /// Waits for the next line of the grid, so that the moment of a query says little.
    pub(crate) async fn grid(&self) {
        let grid = self.settings.grid_milliseconds;
        let since = self.epoch.elapsed().as_millis() as u64;
        if let Some(line) = since.checked_div(grid) {
            let next = Duration::from_millis((line + 1) * grid);
            tokio::time::sleep_until(self.epoch + next).await;
        }
    }

    /// Tells now and then what was folded.
    async fn tell_counts(&self) {
        let every = (self.fold / 2).clamp(Duration::from_secs(1), Duration::from_secs(30));
        loop {
            tokio::time::sleep(every).await;
            self.tell_untold(Some(Instant::now()));
        }
    }

    /// Tells what waits; at a stop, when there is no `now`, all of it.
    fn tell_untold(&self, now: Option<Instant>) {
        let rules = self.rules.load_full();
        for rest in lock(&self.malformed).untold(now) {
            self.tell_rest(&rules, rest);
        }
        let states: Vec<Arc<State>> = {
            let states = self.states.read().unwrap_or_else(PoisonError::into_inner);
            states.values().cloned().collect()
        };
        for state in states {
            self.tell_state(&rules, &state, now);
        }
    }

    fn tell_state(&self, rules: &RuleSet, state: &State, now: Option<Instant>) {
        let mut inner = state.lock();
        let answers = match now {
            None => inner.cache.untold(None),
            Some(now) => {
                let before = now.checked_sub(self.fold);
                before.map(|before| inner.cache.untold(Some(before))).unwrap_or_default()
            }
        };
        let rest = inner.metered.untold(now);
        let subject = inner.subject.clone();
        drop(inner);
        for (entry, count) in answers {
            let mut record = self.log.open_record(record::own_arrival("folded"));
            record.sandbox(subject.clone());
            self.record_answer(record, rules, &entry, count.saturating_sub(1));
        }
        for rest in rest {
            self.tell_rest(rules, Rest { subject: Some(subject.clone()), ..rest });
        }
    }

    /// Writes one record for queries that were only counted, under their own reason.
    fn tell_rest(&self, rules: &RuleSet, rest: Rest) {
        let mut record = self.log.open_record(record::own_arrival("folded"));
        if let Some(subject) = rest.subject {
            record.sandbox(subject);
        }
        record.facts(record::facts(&rest.name, rest.kind));
        let policy = self.policy(rules);
        match rest.fate {
            Fate::Answered => {
                let verdict = record::summary(record::answered_here(policy), rest.count);
                let outcome = crate::clean::outcome(Rcode::NOERROR, &[], audit::Ending::Completed);
                record.answered(verdict, &outcome);
            }
            Fate::Refused(reason) => {
                record.denied(record::summary(record::refused(reason, None, policy), rest.count));
            }
        }
    }

    /// Writes that an answer was given without asking anybody, `folded` times more than once.
    pub(crate) fn record_answer(
        &self,
        mut record: OpenRecord,
        rules: &RuleSet,
        entry: &Entry,
        folded: u64,
    ) {
        record.facts(record::facts(entry.name.as_str(), entry.kind));
        let (verdict, outcome) = self.told(rules, entry, folded);
        record.answered(verdict, &outcome);
    }

    /// What the record of a kept answer says.
    pub(crate) fn told(&self, rules: &RuleSet, entry: &Entry, folded: u64) -> (Verdict, Outcome) {
        let verdict = record::allowed(&entry.permit, self.policy(rules), record::ANSWERED);
        let outcome = crate::clean::outcome(entry.rcode, &entry.told, audit::Ending::Completed);
        (Verdict { folded, ..verdict }, outcome)
    }
}

impl std::fmt::Debug for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Filter").finish_non_exhaustive()
    }
}
