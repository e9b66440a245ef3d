//! The state of one sandbox, shared with no other: cache, flights, budgets, score, synthetic addresses, counts that
//! wait to be recorded.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard};

use audit::{FindingCode, RecordedSandbox};
use ipnet::Ipv4Net;
use rules::configuration::ReverseLookups;
use rules::{DomainName, RuleSet, SandboxRef};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::budget::DnsBudget;
use crate::cache::{AnswerCache, CachedAnswer};
use crate::limits::FINDING_INTERVAL;
use crate::lock;
use crate::record;
use crate::resolver::ResolveError;
use crate::reverse_names::ReverseNames;
use crate::score::TunnelScore;
use crate::synthetic::SyntheticAddresses;

/// The result of a flight; `None` while it is under way.
pub(crate) type FlightResult = Option<Result<Arc<CachedAnswer>, ResolveError>>;

/// The state of one sandbox, behind a lock.
#[derive(Debug)]
pub(crate) struct SandboxState {
    inner: Mutex<LockedState>,
}

#[derive(Debug)]
pub(crate) struct LockedState {
    /// Generation of the rules that `subject` and `pattern_bits` come from.
    generation: u64,
    pub(crate) subject: RecordedSandbox,
    /// log2 of the number of patterns that the sandbox can choose from.
    pub(crate) pattern_bits: f64,
    pub(crate) cache: AnswerCache,
    /// Upstream queries in flight, by key: see the documentation of `resolver`.
    pub(crate) flights: HashMap<Box<[u8]>, watch::Sender<FlightResult>>,
    pub(crate) budget: DnsBudget,
    pub(crate) tunnel_score: TunnelScore,
    pub(crate) synthetic: SyntheticAddresses,
    pub(crate) reverse_names: ReverseNames,
    last_findings: HashMap<FindingCode, Instant>,
}

impl SandboxState {
    pub(crate) fn new(
        rules: &RuleSet,
        sandbox: &SandboxRef,
        budget: DnsBudget,
        range: Ipv4Net,
        cached: Arc<AtomicUsize>,
    ) -> Self {
        let now = Instant::now();
        SandboxState {
            inner: Mutex::new(LockedState {
                generation: rules.generation(),
                subject: record::subject(sandbox),
                pattern_bits: pattern_bits(rules, sandbox),
                cache: AnswerCache::new(cached),
                flights: HashMap::new(),
                budget,
                tunnel_score: TunnelScore::new(now),
                synthetic: SyntheticAddresses::new(range),
                reverse_names: ReverseNames::default(),
                last_findings: HashMap::new(),
            }),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, LockedState> {
        lock(&self.inner)
    }
}

impl LockedState {
    /// Updates everything derived from the rules, if they have changed.
    pub(crate) fn refresh(&mut self, rules: &RuleSet, sandbox: &SandboxRef) {
        if self.generation != rules.generation() {
            self.generation = rules.generation();
            self.subject = record::subject(sandbox);
            self.pattern_bits = pattern_bits(rules, sandbox);
            self.reverse_names.clear();
        }
    }

    /// Takes the budget out of a state that is dropped.
    pub(crate) fn take_budget(&mut self, now: Instant) -> DnsBudget {
        let mut budget = std::mem::replace(&mut self.budget, DnsBudget::new(0, now));
        budget.forget_names();
        budget
    }

    /// Returns the name that an address was given for.
    pub(crate) fn name_of(&self, address: IpAddr) -> Option<DomainName> {
        let synthetic = match address {
            IpAddr::V4(v4) => self.synthetic.name_of(v4),
            IpAddr::V6(_) => None,
        };
        synthetic.or_else(|| self.reverse_names.name_of(address)).cloned()
    }

    /// Caches an answer, and its addresses for reverse look-ups if those are enabled.
    pub(crate) fn store_answer(
        &mut self,
        key: &[u8],
        entry: &Arc<CachedAnswer>,
        reverse: ReverseLookups,
        now: Instant,
    ) {
        self.cache.insert(key, entry.clone(), now);
        if reverse == ReverseLookups::Known {
            entry.addresses().for_each(|address| self.reverse_names.insert(address, &entry.name));
        }
    }

    /// Returns whether a finding with this code may be written: one per [`FINDING_INTERVAL`].
    pub(crate) fn is_finding_due(&mut self, code: FindingCode, now: Instant) -> bool {
        let due = self.last_findings.get(&code).is_none_or(|at| now >= *at + FINDING_INTERVAL);
        if due {
            self.last_findings.insert(code, now);
        }
        due
    }
}

fn pattern_bits(rules: &RuleSet, sandbox: &SandboxRef) -> f64 {
    let patterns: usize = rules.policies_of(sandbox).iter().map(|policy| policy.pattern_count()).sum();
    (patterns.max(1) as f64).log2()
}
