//! What the filter keeps of one sandbox, apart from every other's: cache, flights, budgets, score,
//! synthetic addresses, what waits to be told.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use audit::Subject;
use ipnet::Ipv4Net;
use rules::facts::QueryType;
use rules::operator::Reverse;
use rules::{DomainName, RuleSet, SandboxRef};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::budget::Budget;
use crate::cache::{Cache, Entry};
use crate::learned::Learned;
use crate::limits::{DENIED_RECORDS, FINDING_PAUSE};
use crate::lock;
use crate::meter::{Fate, Meter};
use crate::record;
use crate::resolver::Refusal;
use crate::score::Watch;
use crate::synthetic::Synthetic;

/// What a flight brings back.
pub(crate) type Landing = Option<Result<Arc<Entry>, Refusal>>;

/// One sandbox's part of the filter.
#[derive(Debug)]
pub(crate) struct State {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    /// The rules that `subject` and `pattern_bits` were taken from.
    generation: u64,
    pub(crate) subject: Subject,
    /// log2 of the patterns the sandbox can choose from.
    pub(crate) pattern_bits: f64,
    pub(crate) cache: Cache,
    pub(crate) flights: HashMap<Box<[u8]>, watch::Sender<Landing>>,
    pub(crate) budget: Budget,
    pub(crate) watch: Watch,
    pub(crate) synthetic: Synthetic,
    pub(crate) learned: Learned,
    pub(crate) metered: Meter,
    told: HashMap<&'static str, Instant>,
}

impl State {
    pub(crate) fn new(
        rules: &RuleSet,
        sandbox: &SandboxRef,
        budget: Budget,
        range: Ipv4Net,
        cached: Arc<AtomicUsize>,
    ) -> Self {
        let now = Instant::now();
        State {
            inner: Mutex::new(Inner {
                generation: rules.generation(),
                subject: record::subject(sandbox),
                pattern_bits: pattern_bits(rules, sandbox),
                cache: Cache::new(cached),
                flights: HashMap::new(),
                budget,
                watch: Watch::new(now),
                synthetic: Synthetic::new(range),
                learned: Learned::default(),
                metered: Meter::new(DENIED_RECORDS),
                told: HashMap::new(),
            }),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

impl Inner {
    /// Brings what was taken from the rules up to date.
    pub(crate) fn refresh(&mut self, rules: &RuleSet, sandbox: &SandboxRef) {
        if self.generation != rules.generation() {
            self.generation = rules.generation();
            self.subject = record::subject(sandbox);
            self.pattern_bits = pattern_bits(rules, sandbox);
            self.learned.clear();
        }
    }

    /// Whether what sent nothing gets a record of its own; it is counted if not.
    pub(crate) fn records(
        &mut self,
        fold: Duration,
        fate: Fate,
        asked: impl FnOnce() -> (String, QueryType),
    ) -> bool {
        let own = fold.is_zero() || self.metered.admits(Instant::now());
        if !own {
            self.metered.count(fate, None, asked);
        }
        own
    }

    /// The name that an address was given for.
    pub(crate) fn name_of(&self, address: IpAddr) -> Option<DomainName> {
        let synthetic = match address {
            IpAddr::V4(v4) => self.synthetic.name_of(v4),
            IpAddr::V6(_) => None,
        };
        synthetic.or_else(|| self.learned.name_of(address)).cloned()
    }

    /// Keeps an answer, and what it teaches where that is wanted.
    pub(crate) fn keep(&mut self, key: &[u8], entry: &Arc<Entry>, reverse: Reverse, now: Instant) {
        self.cache.insert(key, entry.clone(), now);
        if reverse == Reverse::Known {
            entry.addresses().for_each(|address| self.learned.learn(address, &entry.name));
        }
    }

    /// Whether a finding of this kind is due; at most one in a while.
    pub(crate) fn is_due(&mut self, code: &'static str, now: Instant) -> bool {
        let due = self.told.get(code).is_none_or(|at| now >= *at + FINDING_PAUSE);
        if due {
            self.told.insert(code, now);
        }
        due
    }
}

fn pattern_bits(rules: &RuleSet, sandbox: &SandboxRef) -> f64 {
    let patterns: usize = rules.policies_of(sandbox).iter().map(|policy| policy.patterns()).sum();
    (patterns.max(1) as f64).log2()
}
