//! Asking a resolver: charged, recorded, released on the grid, cleaned, kept. The sandbox's queries and
//! the proxy's come together here, so that nothing leaves that was not paid for and written down.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use audit::{Code, Ending};
use rules::facts::{NameFacts, QueryType};
use rules::word::SandboxId;
use rules::{Decision, DomainName, Facts, Host, Permit, Reason, RuleSet, SandboxRef};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::budget::{Choice, RuleKey, Spent};
use crate::cache::Entry;
use crate::clean::{Asked, Cleaned, clean, outcome};
use crate::filter::Filter;
use crate::limits::{IN_FLIGHT_SANDBOX, WAITERS};
use crate::message::Rcode;
use crate::query::{entry_of, key};
use crate::record;
use crate::score::ALARM;
use crate::state::{Landing, State};

/// First octet of the key of an answer that is the proxy's alone: longer than any label.
const APART: u8 = 0xff;

/// Why a name was not resolved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {}", .reason.code(), .reason.meaning())]
pub struct Refusal {
    pub reason: Reason,
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Self {
        Refusal { reason }
    }
}

/// The resolver of whoever has a permit: the proxy's, before it dials.
#[derive(Clone, Debug)]
pub struct Resolver {
    filter: Arc<Filter>,
}

impl Resolver {
    pub fn new(filter: Arc<Filter>) -> Self {
        Resolver { filter }
    }

    /// The addresses of the permit's host, not yet admitted: `RuleSet::admit` judges them.
    ///
    /// # Errors
    ///
    /// Returns [`Refusal`] when there is none, the budget is spent or nobody answers.
    pub async fn resolve(&self, permit: &Permit) -> Result<Vec<IpAddr>, Refusal> {
        let name = match permit.host() {
            Host::Address(address) => return Ok(vec![*address]),
            Host::Name(name) => name,
        };
        let (v4, v6) = tokio::join!(
            self.filter.addresses(permit, name, QueryType::A),
            self.filter.addresses(permit, name, QueryType::AAAA)
        );
        match (v4, v6) {
            (Ok(v4), Ok(v6)) if v4.is_empty() && v6.is_empty() => Err(Reason::NoAddress.into()),
            (Ok(v4), Ok(v6)) => Ok(v4.into_iter().chain(v6).collect()),
            (Ok(some), Err(_)) | (Err(_), Ok(some)) if !some.is_empty() => Ok(some),
            (Err(refusal), _) | (_, Err(refusal)) => Err(refusal),
        }
    }

    /// The name that a synthetic address stands for in a sandbox.
    pub fn name_of(&self, sandbox: &SandboxId, address: IpAddr) -> Option<DomainName> {
        let IpAddr::V4(address) = address.to_canonical() else { return None };
        self.filter.known(sandbox)?.lock().synthetic.name_of(address).cloned()
    }
}

/// One look-up that was allowed.
#[derive(Debug)]
pub(crate) struct Want {
    pub(crate) sandbox: SandboxRef,
    pub(crate) permit: Permit,
    pub(crate) name: DomainName,
    pub(crate) kind: QueryType,
    pub(crate) key: Box<[u8]>,
    pub(crate) arrival: audit::Arrival,
}

/// Alarm, earlier refusals that a record stands for, score.
type Noted = (bool, Option<u64>, (u32, Vec<audit::Feature>));

/// Whose turn it is to ask.
enum Turn {
    Have(Arc<Entry>),
    Join(watch::Receiver<Landing>),
    Lead { flight: Flight, price: f64, fresh: bool },
}

/// A query in flight. However it ends, those who joined are told.
struct Flight {
    state: Arc<State>,
    key: Box<[u8]>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.state.lock().flights.remove(&self.key);
    }
}

impl Flight {
    fn land(self, landing: &Result<Arc<Entry>, Refusal>) {
        let sender = self.state.lock().flights.remove(&self.key);
        if let Some(sender) = sender {
            sender.send_replace(Some(landing.clone()));
        }
    }
}

impl Filter {
    async fn addresses(
        &self,
        permit: &Permit,
        name: &DomainName,
        kind: QueryType,
    ) -> Result<Vec<IpAddr>, Refusal> {
        if !permit.lookup().types.contains(&kind) {
            return Ok(Vec::new());
        }
        let rules = self.rules.load_full();
        let sandbox = rules.sandboxes().get(permit.sandbox()).ok_or(Reason::UnknownSandbox)?;
        let asked = Asked { rules: &rules, sandbox, permit, name, kind };
        let cleaned = match self.hosts.get(name) {
            Some(said) => Some(Cleaned::of_addresses(&asked, said, 0)),
            None => self.ahead.find(&asked, Instant::now()).map(|(cleaned, _)| cleaned),
        };
        if let Some(cleaned) = cleaned {
            return Ok(cleaned.found);
        }
        let (permit, key) = account(&asked);
        let arrival = record::own_arrival("proxy");
        let (sandbox, name) = (sandbox.clone(), name.clone());
        let want = Want { sandbox, permit, name, kind, key, arrival };
        self.look_up(&want).await.map(|entry| entry.found.clone())
    }

    /// Looks a name up, or joins whoever already does so for the same sandbox.
    pub(crate) async fn look_up(&self, want: &Want) -> Result<Arc<Entry>, Refusal> {
        let rules = self.rules.load_full();
        let state = self.state(&rules, &want.sandbox);
        match self.turn(want, &rules, &state) {
            Ok(Turn::Have(entry)) => Ok(entry),
            Ok(Turn::Join(landing)) => joined(landing).await,
            Ok(Turn::Lead { flight, price, fresh }) => {
                self.in_flight.fetch_add(1, Ordering::Relaxed);
                let landing = self.fly(want, &rules, &state, price, fresh).await;
                self.in_flight.fetch_sub(1, Ordering::Relaxed);
                flight.land(&landing);
                landing
            }
            Err((reason, spent)) => {
                self.turned_away(want, &rules, &state, reason, spent).await;
                Err(reason.into())
            }
        }
    }

    fn turn(
        &self,
        want: &Want,
        rules: &RuleSet,
        state: &Arc<State>,
    ) -> Result<Turn, (Reason, Option<Spent>)> {
        let now = Instant::now();
        let mut inner = state.lock();
        inner.refresh(rules, &want.sandbox);
        if let Some(kept) = inner.cache.find(&want.key, now)
            && kept.generation == rules.generation()
        {
            return Ok(Turn::Have(kept.entry.clone()));
        }
        if let Some(sender) = inner.flights.get(&want.key) {
            if sender.receiver_count() >= WAITERS {
                return Err((Reason::DnsOverload, None));
            }
            return Ok(Turn::Join(sender.subscribe()));
        }
        if inner.flights.len() >= IN_FLIGHT_SANDBOX {
            return Err((Reason::DnsOverload, None));
        }
        let lookup = want.permit.lookup();
        let choice = Choice {
            key: &want.key,
            octets: lookup.chosen_octets,
            types: lookup.types.len(),
            pattern_bits: inner.pattern_bits,
        };
        let fresh = !inner.budget.knows(&RuleKey::of(&want.permit));
        let charged = inner.budget.charge(&want.permit, &choice, now);
        let price = charged.map_err(|spent| (Reason::DnsBudget, Some(spent)))?;
        if lookup.chosen_octets > 0 {
            let chosen = want.name.as_str().get(..lookup.chosen_octets).unwrap_or_default();
            inner.watch.sent(chosen, now);
        }
        inner.flights.insert(want.key.clone(), watch::channel(None).0);
        let flight = Flight { state: state.clone(), key: want.key.clone() };
        Ok(Turn::Lead { flight, price, fresh })
    }

    /// Records, waits for the grid, asks, cleans, keeps.
    async fn fly(
        &self,
        want: &Want,
        rules: &Arc<RuleSet>,
        state: &Arc<State>,
        price: f64,
        fresh: bool,
    ) -> Result<Arc<Entry>, Refusal> {
        if fresh {
            self.note(want).await?;
        }
        let mut record = self.open(want, state);
        let verdict = self.verdict(want, rules, state, price);
        let alarm = verdict.attention == audit::Attention::Alert;
        let score = (verdict.score.unwrap_or_default(), verdict.features.clone());
        let receipt = record.decided(verdict).await.map_err(|_| Reason::LogUnwritable)?;
        if alarm {
            let message = "Names under an allowed wildcard look like data.".to_owned();
            let title = "DNS names look like a tunnel";
            record::tell(&record, &record::finding("dns_tunnel_suspected", title, message, score))
                .await;
        }
        self.grid().await;
        let told = self.upstreams.ask(&want.name, want.kind, &receipt).await;
        let asked = Asked {
            rules,
            sandbox: &want.sandbox,
            permit: &want.permit,
            name: &want.name,
            kind: want.kind,
        };
        let cleaned = match &told {
            Ok(told) => clean(&asked, &told.message),
            Err(error) => {
                tracing::debug!(%error, "a name was not resolved");
                Err(Reason::ResolverUnreachable)
            }
        };
        match cleaned {
            Ok(cleaned) => {
                let from = told.ok().map(|told| told.from);
                Ok(self.keep(want, state, record, entry_of(&asked, cleaned, Instant::now(), from)))
            }
            Err(reason) => {
                record.close(outcome(Rcode::SERVFAIL, &[], Ending::Failed(Code(reason.code()))));
                Err(reason.into())
            }
        }
    }

    fn keep(
        &self,
        want: &Want,
        state: &Arc<State>,
        record: audit::OpenRecord,
        entry: Entry,
    ) -> Arc<Entry> {
        let ending = match entry.ede {
            Some(ede) => Ending::Refused(Code(ede.text)),
            None => Ending::Completed,
        };
        let now = Instant::now();
        let entry = Arc::new(entry);
        let mut inner = state.lock();
        inner.watch.answered(entry.rcode != Rcode::NXDOMAIN, now);
        inner.cache.insert(&want.key, entry.clone(), now);
        drop(inner);
        record.close(outcome(entry.rcode, &entry.told, ending));
        entry
    }

    /// A rule's first query: that it was given its burst is on disk before the burst is used.
    async fn note(&self, want: &Want) -> Result<(), Refusal> {
        let (store, sandbox) = (self.store.clone(), want.sandbox.id.clone());
        let key = RuleKey::of(&want.permit);
        let noted = tokio::task::spawn_blocking(move || store.note(sandbox.as_str(), &key)).await;
        match noted {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Reason::LogUnwritable.into()),
        }
    }

    fn open(&self, want: &Want, state: &State) -> audit::OpenRecord {
        let mut record = self.log.open_record(want.arrival.clone());
        record.sandbox(state.lock().subject.clone());
        record.facts(record::facts(want.name.as_str(), want.kind));
        record
    }

    fn verdict(&self, want: &Want, rules: &RuleSet, state: &State, price: f64) -> audit::Verdict {
        let mut verdict = record::allowed(&want.permit, self.policy(rules), record::RESOLVED);
        if want.permit.lookup().chosen_octets > 0 {
            let mut inner = state.lock();
            let (score, features) = inner.watch.score();
            if score > 0 {
                (verdict.score, verdict.features) = (Some(score), features);
            }
            verdict.message = Some(format!("charged {price:.0} bits").into());
            if score >= ALARM && inner.is_due("dns_tunnel_suspected", Instant::now()) {
                verdict = record::alert(verdict);
            }
        }
        verdict
    }

    /// Whether a refusal is worth an alarm and a record, and the score it is written with.
    fn noted(&self, state: &State, spent: Option<Spent>) -> Noted {
        let now = Instant::now();
        let mut inner = state.lock();
        let alarm = spent.is_some() && inner.is_due("dns_budget_exhausted", now);
        let counted = if self.fold.is_zero() { Some(0) } else { inner.denials.count(now) };
        (alarm, counted, inner.watch.score())
    }

    /// Nothing leaves: the budget is spent, or too much waits already.
    async fn turned_away(
        &self,
        want: &Want,
        rules: &RuleSet,
        state: &Arc<State>,
        reason: Reason,
        spent: Option<Spent>,
    ) {
        let (alarm, counted, score) = self.noted(state, spent);
        if counted.is_none() && !alarm {
            return;
        }
        let record = self.open(want, state);
        let mut verdict = record::refused(reason, Some(&want.permit), self.policy(rules));
        verdict.folded = counted.unwrap_or_default();
        if score.0 > 0 {
            (verdict.score, verdict.features) = (Some(score.0), score.1.clone());
        }
        if alarm {
            let message = match spent {
                Some(Spent::Forwards) => "The queries of this hour are used up.",
                Some(Spent::Rule) => "The bits of this rule are used up.",
                Some(Spent::Sandbox) | None => "The bits of this sandbox are used up.",
            };
            let title = "DNS budget exhausted";
            let finding = record::finding("dns_budget_exhausted", title, message.to_owned(), score);
            record::tell(&record, &finding).await;
            verdict = record::alert(verdict);
        }
        record.denied(verdict);
    }
}

/// What a look-up of the proxy's is asked under: the sandbox's own leave to ask for the name, so that
/// both share one answer. A name that has a synthetic address in the sandbox is kept apart from it.
fn account(asked: &Asked<'_>) -> (Permit, Box<[u8]>) {
    let own = key(asked.name, asked.kind);
    let facts = Facts::Name(NameFacts { name: asked.name.clone(), query: asked.kind });
    match asked.rules.decide(asked.sandbox, &facts) {
        Decision::Allow(permit) if !permit.lookup().synthetic => (permit, own),
        Decision::Allow(_) | Decision::Deny(_) => {
            let apart = [&[APART], &*own].concat(); // no question begins so
            (asked.permit.clone(), apart.into())
        }
    }
}

async fn joined(mut landing: watch::Receiver<Landing>) -> Result<Arc<Entry>, Refusal> {
    match landing.wait_for(Option::is_some).await {
        Ok(landed) => landed.clone().unwrap_or(Err(Reason::ResolverUnreachable.into())),
        Err(_) => Err(Reason::ResolverUnreachable.into()), // whoever asked went away
    }
}
