//! Asking a resolver: charged, recorded, released on the grid, cleaned, kept. The sandbox's queries and
//! the proxy's come together here, so that nothing leaves that was not paid for and written down.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use audit::{DecisionDetails, DetectionFinding, Ending, FindingCode, OpenRecord, Receipt};
use rules::facts::{NameFacts, QueryType};
use rules::ids::SandboxId;
use rules::{Decision, DomainName, Facts, Host, Permit, Reason, RuleSet, SandboxRef};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::budget::{ExhaustedBudget, QueryChoice, RuleKey};
use crate::cache::CachedAnswer;
use crate::clean::{CleanAnswer, PermittedQuery, answer_outcome, clean};
use crate::filter::DnsFilter;
use crate::limits::{FLIGHT_REJOINS, FLIGHT_WAITERS, IN_FLIGHT, IN_FLIGHT_SANDBOX};
use crate::message::Rcode;
use crate::query::{boxed_wire_key, cached_answer};
use crate::record;
use crate::record_rate::CountedOutcome;
use crate::score::ALARM_SCORE;
use crate::state::{FlightResult, LockedState, SandboxState};

/// First octet of the key of an answer that is the proxy's alone: longer than any label.
const PROXY_KEY_PREFIX: u8 = 0xff;

/// Why a name was not resolved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {}", .reason.code(), .reason.meaning())]
pub struct ResolveError {
    pub reason: Reason,
}

impl From<Reason> for ResolveError {
    fn from(reason: Reason) -> Self {
        ResolveError { reason }
    }
}

/// The resolver of whoever has a permit: the proxy's, before it dials.
#[derive(Clone, Debug)]
pub struct Resolver {
    filter: Arc<DnsFilter>,
}

impl Resolver {
    pub fn new(filter: Arc<DnsFilter>) -> Self {
        Resolver { filter }
    }

    /// The addresses of the permit's host, not yet admitted: `RuleSet::admit` judges them.
    ///
    /// # Errors
    ///
    /// Returns [`ResolveError`] when there is none, the budget is spent or nobody answers.
    pub async fn resolve(&self, permit: &Permit) -> Result<Vec<IpAddr>, ResolveError> {
        let name = match permit.host() {
            Host::Address(address) => return Ok(vec![*address]),
            Host::Name(name) => name,
        };
        let (v4, v6) = tokio::join!(
            self.filter.resolve_addresses(permit, name, QueryType::A),
            self.filter.resolve_addresses(permit, name, QueryType::AAAA)
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
        self.filter.find_state(sandbox)?.lock().synthetic.name_of(address).cloned()
    }
}

/// One look-up that was allowed.
#[derive(Debug)]
pub(crate) struct Lookup {
    pub(crate) sandbox: SandboxRef,
    pub(crate) permit: Permit,
    pub(crate) name: DomainName,
    pub(crate) kind: QueryType,
    pub(crate) key: Box<[u8]>,
    pub(crate) arrival: audit::RecordedArrival,
    pub(crate) by: LookupCaller,
    /// What is to be found in the record of it.
    pub(crate) alarm: Option<DetectionFinding>,
}

/// Who looks up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookupCaller {
    /// Its kept answers stand in the record of the connection that wanted them.
    Proxy,
    Sandbox,
}

/// A look-up under one policy.
struct LookupContext<'a> {
    want: &'a Lookup,
    rules: Arc<RuleSet>,
    state: Arc<SandboxState>,
}

/// Whose turn it is to ask.
enum FlightRole {
    Have(Arc<CachedAnswer>),
    Join(watch::Receiver<FlightResult>),
    Lead(Leader),
}

/// A query that was paid for and is not recorded yet.
struct Leader {
    flight: Flight,
    price: f64,
    /// The first of its rule: that the rule was given its burst is not on disk yet.
    fresh: bool,
}

/// A query in flight. However it ends, those who joined are told.
struct Flight {
    state: Arc<SandboxState>,
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
    fn finish(mut self, landing: &Result<Arc<CachedAnswer>, ResolveError>) {
        let key = std::mem::take(&mut self.key);
        let sender = self.state.lock().flights.remove(&key);
        if let Some(sender) = sender {
            sender.send_replace(Some(landing.clone()));
        }
    }
}

/// A place among the queries in flight, given back also by a look-up that is cancelled.
struct InFlightGuard<'a>(&'a DnsFilter);

impl<'a> InFlightGuard<'a> {
    fn acquire(filter: &'a DnsFilter) -> Self {
        filter.in_flight.fetch_add(1, Ordering::Relaxed);
        filter.metrics.in_flight.increment(1.0);
        InFlightGuard(filter)
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.0.metrics.in_flight.decrement(1.0);
    }
}

impl DnsFilter {
    async fn resolve_addresses(
        &self,
        permit: &Permit,
        name: &DomainName,
        kind: QueryType,
    ) -> Result<Vec<IpAddr>, ResolveError> {
        if !permit.lookup().types.contains(&kind) {
            return Ok(Vec::new());
        }
        let rules = self.rules.load_full();
        let sandbox = rules.sandboxes().get(permit.sandbox()).ok_or(Reason::UnknownSandbox)?;
        let asked = PermittedQuery { rules: &rules, sandbox, permit, name, kind };
        let cleaned = match self.hosts.get(name) {
            Some(said) => Some(CleanAnswer::from_addresses(&asked, said, 0)),
            None => self.pre_resolved.find(&asked, Instant::now()).map(|(cleaned, _)| cleaned),
        };
        if let Some(cleaned) = cleaned {
            return Ok(cleaned.found);
        }
        let (permit, key) = proxy_lookup_key(&asked);
        let (by, alarm) = (LookupCaller::Proxy, None);
        let arrival = record::own_arrival("proxy");
        let (sandbox, name) = (sandbox.clone(), name.clone());
        let want = Lookup { sandbox, permit, name, kind, key, arrival, by, alarm };
        self.look_up(&want).await.map(|entry| entry.found.clone())
    }

    /// Looks a name up, or joins whoever already does so for the same sandbox.
    pub(crate) async fn look_up(&self, want: &Lookup) -> Result<Arc<CachedAnswer>, ResolveError> {
        let mut look = self.lookup_context(want);
        for _ in 0..FLIGHT_REJOINS {
            match self.join_or_lead(&look) {
                Ok(FlightRole::Have(entry)) => {
                    if want.by == LookupCaller::Sandbox {
                        self.record_shared(&look, &entry);
                    }
                    return Ok(entry);
                }
                Ok(FlightRole::Join(landing)) => {
                    if let Some(landing) = wait_for_flight(landing).await {
                        return self.finish_joined(&look, landing);
                    }
                }
                Ok(FlightRole::Lead(lead)) => return self.lead_lookup(&look, lead).await,
                Err((reason, spent)) => {
                    self.refuse_lookup(&look, reason, spent).await;
                    return Err(reason.into());
                }
            }
            let before = std::mem::replace(&mut look, self.lookup_context(want));
            if before.rules.generation() != look.rules.generation() {
                break; // what was allowed then is judged anew when it is asked again
            }
        }
        self.finish_joined(&look, Err(Reason::ResolverUnreachable.into()))
    }

    fn lookup_context<'a>(&self, want: &'a Lookup) -> LookupContext<'a> {
        let rules = self.rules.load_full();
        let state = self.sandbox_state(&rules, &want.sandbox);
        LookupContext { want, rules, state }
    }

    fn join_or_lead(
        &self,
        look: &LookupContext<'_>,
    ) -> Result<FlightRole, (Reason, Option<ExhaustedBudget>)> {
        let (want, now) = (look.want, Instant::now());
        let mut inner = look.state.lock();
        inner.refresh(&look.rules, &want.sandbox);
        if let Some(kept) = inner.cache.find(&want.key, now)
            && (kept.generation == look.rules.generation()
                || kept.entry.permit.has_same_terms(&want.permit))
        {
            return Ok(FlightRole::Have(kept.entry.clone())); // a reload that left its terms alone costs nothing
        }
        if let Some(sender) = inner.flights.get(&want.key) {
            return match sender.receiver_count() < FLIGHT_WAITERS {
                true => Ok(FlightRole::Join(sender.subscribe())),
                false => Err((Reason::DnsOverload, None)),
            };
        }
        if inner.flights.len() >= IN_FLIGHT_SANDBOX || self.in_flight() >= IN_FLIGHT {
            return Err((Reason::DnsOverload, None));
        }
        let (price, fresh) = charge_lookup(&mut inner, want, now)
            .map_err(|spent| (Reason::DnsBudget, Some(spent)))?;
        inner.flights.insert(want.key.clone(), watch::channel(None).0);
        let flight = Flight { state: look.state.clone(), key: want.key.clone() };
        Ok(FlightRole::Lead(Leader { flight, price, fresh }))
    }

    async fn lead_lookup(
        &self,
        look: &LookupContext<'_>,
        lead: Leader,
    ) -> Result<Arc<CachedAnswer>, ResolveError> {
        let place = InFlightGuard::acquire(self);
        let landing = self.query_upstream(look, &lead).await;
        drop(place);
        lead.flight.finish(&landing);
        landing
    }

    /// Records, waits for the grid, asks, cleans, keeps.
    async fn query_upstream(
        &self,
        look: &LookupContext<'_>,
        lead: &Leader,
    ) -> Result<Arc<CachedAnswer>, ResolveError> {
        if lead.fresh {
            self.note_burst(look.want).await?;
        }
        let (record, receipt) = self.record_sent(look, lead.price).await?;
        self.wait_for_grid().await;
        self.metrics.sent.increment(1);
        let begun = Instant::now();
        let told = self.upstreams.ask(&look.want.name, look.want.kind, &receipt).await;
        self.metrics.record_upstream_time(begun.elapsed());
        let asked = look.permitted_query();
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
                Ok(self.store_answer(
                    look,
                    record,
                    cached_answer(&asked, cleaned, Instant::now(), from),
                ))
            }
            Err(reason) => {
                record.close(answer_outcome(Rcode::SERVFAIL, &[], Ending::Failed(reason.into())));
                Err(reason.into())
            }
        }
    }

    /// Writes that a query is about to leave, and waits until that stands.
    async fn record_sent(
        &self,
        look: &LookupContext<'_>,
        price: f64,
    ) -> Result<(OpenRecord, Receipt), ResolveError> {
        let mut record = self.open_lookup_record(look);
        let verdict = self.lookup_details(look, price);
        let alarm = verdict.attention == audit::AlertFlag::Alert;
        let score = (verdict.score.unwrap_or_default(), verdict.features.clone());
        let receipt = record.record_decision(verdict).await.map_err(|_| Reason::LogUnwritable)?;
        if alarm {
            let message = "Names under an allowed wildcard look like data.".to_owned();
            let title = "DNS names look like a tunnel";
            let finding = record::finding(FindingCode::DnsTunnelSuspected, title, message, score);
            record::write_finding(&record, &finding).await;
        }
        if let Some(finding) = &look.want.alarm {
            record::write_finding(&record, finding).await;
        }
        Ok((record, receipt))
    }

    fn store_answer(
        &self,
        look: &LookupContext<'_>,
        record: OpenRecord,
        entry: CachedAnswer,
    ) -> Arc<CachedAnswer> {
        let ending = match entry.ede {
            Some(ede) => Ending::Refused(ede.reason.into()),
            None => Ending::Completed,
        };
        let now = Instant::now();
        let entry = Arc::new(entry);
        let mut inner = look.state.lock();
        inner.tunnel_score.note_answer(entry.rcode != Rcode::NXDOMAIN, now);
        inner.store_answer(&look.want.key, &entry, self.reverse, now);
        drop(inner);
        record.close(answer_outcome(entry.rcode, &entry.told, ending));
        entry
    }

    /// A rule's first query: that it was given its burst is on disk before the burst is used.
    async fn note_burst(&self, want: &Lookup) -> Result<(), ResolveError> {
        let (store, sandbox) = (self.store.clone(), want.sandbox.id.clone());
        let key = RuleKey::from_permit(&want.permit);
        let noted =
            tokio::task::spawn_blocking(move || store.note_burst(sandbox.as_str(), &key)).await;
        match noted {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Reason::LogUnwritable.into()),
        }
    }

    /// What another look-up brought: nothing was sent for this one, and it is recorded all the same.
    fn finish_joined(
        &self,
        look: &LookupContext<'_>,
        landing: Result<Arc<CachedAnswer>, ResolveError>,
    ) -> Result<Arc<CachedAnswer>, ResolveError> {
        self.metrics.joined.increment(1);
        match &landing {
            Ok(entry) => self.record_shared(look, entry),
            Err(refusal) => self.record_refused(look, refusal.reason),
        }
        landing
    }

    /// Records an answer that another look-up asked for, or counts it with others alike.
    fn record_shared(&self, look: &LookupContext<'_>, entry: &Arc<CachedAnswer>) {
        let now = Instant::now();
        let due = match look.state.lock().cache.find(&look.want.key, now) {
            Some(kept) if Arc::ptr_eq(&kept.entry, entry) => kept.fold.count_answer(self.fold, now),
            Some(_) | None => Some(1),
        };
        if let Some(count) = due {
            self.record_answer(self.open_lookup_record(look), &look.rules, entry, count - 1);
        }
    }

    fn record_refused(&self, look: &LookupContext<'_>, reason: Reason) {
        if look.admit_or_count(self.fold, reason) {
            let permit = Some(&look.want.permit);
            self.open_lookup_record(look).post_denial(record::refusal_details(
                reason,
                permit,
                self.policy(&look.rules),
            ));
        }
    }

    /// Records a look-up that there is no room to begin.
    pub(crate) fn record_overload(&self, want: &Lookup) {
        self.record_refused(&self.lookup_context(want), Reason::DnsOverload);
    }

    fn open_lookup_record(&self, look: &LookupContext<'_>) -> OpenRecord {
        let mut record = self.log.open_record(look.want.arrival.clone());
        record.set_sandbox(look.state.lock().subject.clone());
        record.set_facts(record::facts(look.want.name.as_str(), look.want.kind));
        record
    }

    fn lookup_details(&self, look: &LookupContext<'_>, price: f64) -> DecisionDetails {
        let want = look.want;
        let mut verdict =
            record::allow_details(&want.permit, self.policy(&look.rules), record::RESOLVED);
        verdict
            .features
            .extend(want.alarm.as_ref().map(|finding| record::flag(finding.code.into())));
        if want.permit.lookup().chosen_octets > 0 {
            let mut inner = look.state.lock();
            verdict = record::add_score(verdict, &inner.tunnel_score.score());
            verdict.message = Some(format!("charged {price:.0} bits").into());
            let alarming = verdict.score.is_some_and(|score| score >= ALARM_SCORE);
            if alarming && inner.is_finding_due(FindingCode::DnsTunnelSuspected, Instant::now()) {
                verdict = record::mark_alert(verdict);
            }
        }
        verdict
    }

    /// Nothing leaves: the budget is spent, or too much waits already.
    async fn refuse_lookup(
        &self,
        look: &LookupContext<'_>,
        reason: Reason,
        spent: Option<ExhaustedBudget>,
    ) {
        self.metrics.spent.increment(u64::from(spent.is_some()));
        let (due, score) = look.budget_finding(spent);
        if due.is_none() && !look.admit_or_count(self.fold, reason) {
            return;
        }
        let record = self.open_lookup_record(look);
        let refused =
            record::refusal_details(reason, Some(&look.want.permit), self.policy(&look.rules));
        let mut verdict = record::add_score(refused, &score);
        if let Some(spent) = due {
            let title = "DNS budget exhausted";
            let message = spent.meaning().to_owned();
            let finding = record::finding(FindingCode::DnsBudgetExhausted, title, message, score);
            record::write_finding(&record, &finding).await;
            verdict = record::mark_alert(verdict);
        }
        record.post_denial(verdict);
    }
}

impl LookupContext<'_> {
    fn permitted_query(&self) -> PermittedQuery<'_> {
        let Lookup { sandbox, permit, name, kind, .. } = self.want;
        PermittedQuery { rules: &self.rules, sandbox, permit, name, kind: *kind }
    }

    /// What is spent, if a finding of that is due, and the score it is written with.
    fn budget_finding(
        &self,
        spent: Option<ExhaustedBudget>,
    ) -> (Option<ExhaustedBudget>, (u32, Vec<audit::ScoreFeature>)) {
        let mut inner = self.state.lock();
        let due =
            spent.filter(|_| inner.is_finding_due(FindingCode::DnsBudgetExhausted, Instant::now()));
        (due, inner.tunnel_score.score())
    }

    /// Whether a refusal gets a record of its own; it is counted if not.
    fn admit_or_count(&self, fold: std::time::Duration, reason: Reason) -> bool {
        let asked = || (self.want.name.to_string(), self.want.kind);
        self.state.lock().admit_or_count(fold, CountedOutcome::Refused(reason), asked)
    }
}

/// Pays for a query; says the price, and whether it is the first of its rule.
fn charge_lookup(
    inner: &mut LockedState,
    want: &Lookup,
    now: Instant,
) -> Result<(f64, bool), ExhaustedBudget> {
    let lookup = want.permit.lookup();
    let choice = QueryChoice {
        key: &want.key,
        octets: lookup.chosen_octets,
        types: lookup.types.len(),
        pattern_bits: inner.pattern_bits,
    };
    let fresh = !inner.budget.has_rule(&RuleKey::from_permit(&want.permit));
    let price = inner.budget.charge(&want.permit, &choice, now)?;
    if lookup.chosen_octets > 0 {
        let chosen = want.name.as_str().get(..lookup.chosen_octets).unwrap_or_default();
        inner.tunnel_score.note_sent(chosen, now);
    }
    Ok((price, fresh))
}

/// What a look-up of the proxy's is asked under: the sandbox's own leave to ask for the name, so that
/// both share one answer. A name that has a synthetic address in the sandbox is kept apart from it.
fn proxy_lookup_key(asked: &PermittedQuery<'_>) -> (Permit, Box<[u8]>) {
    let own = boxed_wire_key(asked.name, asked.kind);
    let facts = Facts::Name(NameFacts { name: asked.name.clone(), query: asked.kind });
    match asked.rules.decide(asked.sandbox, &facts) {
        Decision::Allow(permit) if !permit.lookup().synthetic => (permit, own),
        Decision::Allow(_) | Decision::Deny(_) => {
            let apart = [&[PROXY_KEY_PREFIX], &*own].concat(); // no question begins so
            (asked.permit.clone(), apart.into())
        }
    }
}

/// What the look-up that was joined brings; none when whoever asked went away.
async fn wait_for_flight(
    mut landing: watch::Receiver<FlightResult>,
) -> Option<Result<Arc<CachedAnswer>, ResolveError>> {
    landing.wait_for(Option::is_some).await.ok()?.clone()
}
