//! Asking a resolver: charged, recorded, released on the grid, cleaned, kept. The sandbox's queries and
//! the proxy's come together here, so that nothing leaves that was not paid for and written down.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use audit::{Code, Ending, Finding, OpenRecord, Receipt, Verdict};
use rules::facts::{NameFacts, QueryType};
use rules::word::SandboxId;
use rules::{Decision, DomainName, Facts, Host, Permit, Reason, RuleSet, SandboxRef};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::budget::{Choice, RuleKey, Spent};
use crate::cache::Entry;
use crate::clean::{Asked, Cleaned, clean, outcome};
use crate::filter::Filter;
use crate::limits::{IN_FLIGHT, IN_FLIGHT_SANDBOX, REJOINS, WAITERS};
use crate::message::Rcode;
use crate::meter::Fate;
use crate::query::{entry_of, key};
use crate::record;
use crate::score::ALARM;
use crate::state::{Inner, Landing, State};

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
    pub(crate) by: By,
    /// What is to be found in the record of it.
    pub(crate) alarm: Option<Finding>,
}

/// Who looks up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// Its kept answers stand in the record of the connection that wanted them.
    Proxy,
    Sandbox,
}

/// A look-up under one policy.
struct Look<'a> {
    want: &'a Want,
    rules: Arc<RuleSet>,
    state: Arc<State>,
}

/// Whose turn it is to ask.
enum Turn {
    Have(Arc<Entry>),
    Join(watch::Receiver<Landing>),
    Lead(Lead),
}

/// A query that was paid for and is not recorded yet.
struct Lead {
    flight: Flight,
    price: f64,
    /// The first of its rule: that the rule was given its burst is not on disk yet.
    fresh: bool,
}

/// A query in flight. However it ends, those who joined are told.
struct Flight {
    state: Arc<State>,
    /// Empty once it has landed: the key may be another flight's by then.
    key: Box<[u8]>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.key.is_empty() {
            self.state.lock().flights.remove(&self.key);
        }
    }
}

impl Flight {
    fn land(mut self, landing: &Result<Arc<Entry>, Refusal>) {
        let key = std::mem::take(&mut self.key);
        let sender = self.state.lock().flights.remove(&key);
        if let Some(sender) = sender {
            sender.send_replace(Some(landing.clone()));
        }
    }
}

/// A place among the queries in flight, given back also by a look-up that is cancelled.
struct InFlight<'a>(&'a Filter);

impl<'a> InFlight<'a> {
    fn enter(filter: &'a Filter) -> Self {
        filter.in_flight.fetch_add(1, Ordering::Relaxed);
        filter.tally.in_flight.increment(1.0);
        InFlight(filter)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.0.tally.in_flight.decrement(1.0);
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
        let (by, alarm) = (By::Proxy, None);
        let arrival = record::own_arrival("proxy");
        let (sandbox, name) = (sandbox.clone(), name.clone());
        let want = Want { sandbox, permit, name, kind, key, arrival, by, alarm };
        self.look_up(&want).await.map(|entry| entry.found.clone())
    }

    /// Looks a name up, or joins whoever already does so for the same sandbox.
    pub(crate) async fn look_up(&self, want: &Want) -> Result<Arc<Entry>, Refusal> {
        let mut look = self.look(want);
        for _ in 0..REJOINS {
            match self.turn(&look) {
                Ok(Turn::Have(entry)) => {
                    if want.by == By::Sandbox {
                        self.record_shared(&look, &entry);
                    }
                    return Ok(entry);
                }
                Ok(Turn::Join(landing)) => {
                    if let Some(landing) = joined(landing).await {
                        return self.land_joined(&look, landing);
                    }
                }
                Ok(Turn::Lead(lead)) => return self.lead(&look, lead).await,
                Err((reason, spent)) => {
                    self.turned_away(&look, reason, spent).await;
                    return Err(reason.into());
                }
            }
            let before = std::mem::replace(&mut look, self.look(want));
            if before.rules.generation() != look.rules.generation() {
                break; // what was allowed then is judged anew when it is asked again
            }
        }
        self.land_joined(&look, Err(Reason::ResolverUnreachable.into()))
    }

    fn look<'a>(&self, want: &'a Want) -> Look<'a> {
        let rules = self.rules.load_full();
        let state = self.state(&rules, &want.sandbox);
        Look { want, rules, state }
    }

    fn turn(&self, look: &Look<'_>) -> Result<Turn, (Reason, Option<Spent>)> {
        let (want, now) = (look.want, Instant::now());
        let mut inner = look.state.lock();
        inner.refresh(&look.rules, &want.sandbox);
        if let Some(kept) = inner.cache.find(&want.key, now)
            && (kept.generation == look.rules.generation()
                || kept.entry.permit.same_terms(&want.permit))
        {
            return Ok(Turn::Have(kept.entry.clone())); // a reload that left its terms alone costs nothing
        }
        if let Some(sender) = inner.flights.get(&want.key) {
            return match sender.receiver_count() < WAITERS {
                true => Ok(Turn::Join(sender.subscribe())),
                false => Err((Reason::DnsOverload, None)),
            };
        }
        if inner.flights.len() >= IN_FLIGHT_SANDBOX || self.in_flight() >= IN_FLIGHT {
            return Err((Reason::DnsOverload, None));
        }
        let (price, fresh) =
            charge(&mut inner, want, now).map_err(|spent| (Reason::DnsBudget, Some(spent)))?;
        inner.flights.insert(want.key.clone(), watch::channel(None).0);
        let flight = Flight { state: look.state.clone(), key: want.key.clone() };
        Ok(Turn::Lead(Lead { flight, price, fresh }))
    }

    async fn lead(&self, look: &Look<'_>, lead: Lead) -> Result<Arc<Entry>, Refusal> {
        let place = InFlight::enter(self);
        let landing = self.fly(look, &lead).await;
        drop(place);
        lead.flight.land(&landing);
        landing
    }

    /// Records, waits for the grid, asks, cleans, keeps.
    async fn fly(&self, look: &Look<'_>, lead: &Lead) -> Result<Arc<Entry>, Refusal> {
        if lead.fresh {
            self.note(look.want).await?;
        }
        let (record, receipt) = self.record_sent(look, lead.price).await?;
        self.grid().await;
        self.tally.sent.increment(1);
        let begun = Instant::now();
        let told = self.upstreams.ask(&look.want.name, look.want.kind, &receipt).await;
        self.tally.took(begun.elapsed());
        let asked = look.asked();
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
                Ok(self.keep(look, record, entry_of(&asked, cleaned, Instant::now(), from)))
            }
            Err(reason) => {
                record.close(outcome(Rcode::SERVFAIL, &[], Ending::Failed(Code(reason.code()))));
                Err(reason.into())
            }
        }
    }

    /// Writes that a query is about to leave, and waits until that stands.
    async fn record_sent(
        &self,
        look: &Look<'_>,
        price: f64,
    ) -> Result<(OpenRecord, Receipt), Refusal> {
        let mut record = self.open(look);
        let verdict = self.verdict(look, price);
        let alarm = verdict.attention == audit::Attention::Alert;
        let score = (verdict.score.unwrap_or_default(), verdict.features.clone());
        let receipt = record.decided(verdict).await.map_err(|_| Reason::LogUnwritable)?;
        if alarm {
            let message = "Names under an allowed wildcard look like data.".to_owned();
            let title = "DNS names look like a tunnel";
            let finding = record::finding("dns_tunnel_suspected", title, message, score);
            record::tell(&record, &finding).await;
        }
        if let Some(finding) = &look.want.alarm {
            record::tell(&record, finding).await;
        }
        Ok((record, receipt))
    }

    fn keep(&self, look: &Look<'_>, record: OpenRecord, entry: Entry) -> Arc<Entry> {
        let ending = match entry.ede {
            Some(ede) => Ending::Refused(Code(ede.text)),
            None => Ending::Completed,
        };
        let now = Instant::now();
        let entry = Arc::new(entry);
        let mut inner = look.state.lock();
        inner.watch.answered(entry.rcode != Rcode::NXDOMAIN, now);
        inner.keep(&look.want.key, &entry, self.reverse, now);
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

    /// What another look-up brought: nothing was sent for this one, and it is recorded all the same.
    fn land_joined(
        &self,
        look: &Look<'_>,
        landing: Result<Arc<Entry>, Refusal>,
    ) -> Result<Arc<Entry>, Refusal> {
        self.tally.joined.increment(1);
        match &landing {
            Ok(entry) => self.record_shared(look, entry),
            Err(refusal) => self.record_refused(look, refusal.reason),
        }
        landing
    }

    /// Records an answer that another look-up asked for, or counts it with others alike.
    fn record_shared(&self, look: &Look<'_>, entry: &Arc<Entry>) {
        let now = Instant::now();
        let due = match look.state.lock().cache.find(&look.want.key, now) {
            Some(kept) if Arc::ptr_eq(&kept.entry, entry) => kept.fold.count(self.fold, now),
            Some(_) | None => Some(1),
        };
        if let Some(count) = due {
            self.record_answer(self.open(look), &look.rules, entry, count - 1);
        }
    }

    fn record_refused(&self, look: &Look<'_>, reason: Reason) {
        if look.records(self.fold, reason) {
            let permit = Some(&look.want.permit);
            self.open(look).denied(record::refused(reason, permit, self.policy(&look.rules)));
        }
    }

    /// Records a look-up that there is no room to begin.
    pub(crate) fn record_overload(&self, want: &Want) {
        self.record_refused(&self.look(want), Reason::DnsOverload);
    }

    fn open(&self, look: &Look<'_>) -> OpenRecord {
        let mut record = self.log.open_record(look.want.arrival.clone());
        record.sandbox(look.state.lock().subject.clone());
        record.facts(record::facts(look.want.name.as_str(), look.want.kind));
        record
    }

    fn verdict(&self, look: &Look<'_>, price: f64) -> Verdict {
        let want = look.want;
        let mut verdict = record::allowed(&want.permit, self.policy(&look.rules), record::RESOLVED);
        verdict.features.extend(want.alarm.as_ref().map(|finding| record::flag(finding.code)));
        if want.permit.lookup().chosen_octets > 0 {
            let mut inner = look.state.lock();
            verdict = record::scored(verdict, &inner.watch.score());
            verdict.message = Some(format!("charged {price:.0} bits").into());
            let alarming = verdict.score.is_some_and(|score| score >= ALARM);
            if alarming && inner.is_due("dns_tunnel_suspected", Instant::now()) {
                verdict = record::alert(verdict);
            }
        }
        verdict
    }

    /// Nothing leaves: the budget is spent, or too much waits already.
    async fn turned_away(&self, look: &Look<'_>, reason: Reason, spent: Option<Spent>) {
        self.tally.spent.increment(u64::from(spent.is_some()));
        let (due, score) = look.exhausted(spent);
        if due.is_none() && !look.records(self.fold, reason) {
            return;
        }
        let record = self.open(look);
        let refused = record::refused(reason, Some(&look.want.permit), self.policy(&look.rules));
        let mut verdict = record::scored(refused, &score);
        if let Some(spent) = due {
            let title = "DNS budget exhausted";
            let message = spent.meaning().to_owned();
            let finding = record::finding("dns_budget_exhausted", title, message, score);
            record::tell(&record, &finding).await;
            verdict = record::alert(verdict);
        }
        record.denied(verdict);
    }
}

impl Look<'_> {
    fn asked(&self) -> Asked<'_> {
        let Want { sandbox, permit, name, kind, .. } = self.want;
        Asked { rules: &self.rules, sandbox, permit, name, kind: *kind }
    }

    /// What is spent, if a finding of that is due, and the score it is written with.
    fn exhausted(&self, spent: Option<Spent>) -> (Option<Spent>, (u32, Vec<audit::Feature>)) {
        let mut inner = self.state.lock();
        let due = spent.filter(|_| inner.is_due("dns_budget_exhausted", Instant::now()));
        (due, inner.watch.score())
    }

    /// Whether a refusal gets a record of its own; it is counted if not.
    fn records(&self, fold: std::time::Duration, reason: Reason) -> bool {
        let asked = || (self.want.name.to_string(), self.want.kind);
        self.state.lock().records(fold, Fate::Refused(reason), asked)
    }
}

/// Pays for a query; says the price, and whether it is the first of its rule.
fn charge(inner: &mut Inner, want: &Want, now: Instant) -> Result<(f64, bool), Spent> {
    let lookup = want.permit.lookup();
    let choice = Choice {
        key: &want.key,
        octets: lookup.chosen_octets,
        types: lookup.types.len(),
        pattern_bits: inner.pattern_bits,
    };
    let fresh = !inner.budget.knows(&RuleKey::of(&want.permit));
    let price = inner.budget.charge(&want.permit, &choice, now)?;
    if lookup.chosen_octets > 0 {
        let chosen = want.name.as_str().get(..lookup.chosen_octets).unwrap_or_default();
        inner.watch.sent(chosen, now);
    }
    Ok((price, fresh))
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

/// What the look-up that was joined brings; none when whoever asked went away.
async fn joined(mut landing: watch::Receiver<Landing>) -> Option<Result<Arc<Entry>, Refusal>> {
    landing.wait_for(Option::is_some).await.ok()?.clone()
}
