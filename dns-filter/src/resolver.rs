//! Asks upstream resolvers: charge, record, wait for the time grid, ask, clean, cache. Look-ups of sandboxes and of the
//! proxy share this code, so no query leaves that was not charged and recorded.
//!
//! # Single flight
//!
//! Concurrent look-ups of one sandbox for the same name and type share one upstream query (a flight). `LockedState`
//! has a `watch` sender per flight, by key.
//!
//! - **Who leads.** `join_or_lead` checks cache, flights and budget and inserts the flight under one lock of the
//!   sandbox's state. So exactly one look-up leads and is charged. It runs in the task of its caller.
//! - **Who joins.** A look-up that finds a flight subscribes to its sender. It sends nothing and costs nothing; it
//!   still gets a record. At most [`FLIGHT_WAITERS`] may join, the rest are refused as `dns_overload`.
//! - **The leader finishes.** It caches the answer before it removes the flight, so a look-up in between finds one or
//!   the other. Then it sends the result, failures included, to everyone who joined.
//! - **The leader is cancelled** (its connection closed, its task panicked). `Flight::drop` removes the sender; the
//!   receivers see a closed channel and go back to `join_or_lead`, where the first becomes the leader and is charged.
//!   The first leader gets no refund, because its query may have left. After [`FLIGHT_REJOINS`] such rounds, or when
//!   the rules have changed meanwhile, the look-up fails instead: its permit is from the old rules.

use std::net::IpAddr;
use std::sync::Arc;

use audit::{DecisionDetails, DetectionFinding, Ending, FindingCode, OpenRecord, Receipt};
use rules::facts::{NameFacts, QueryType};
use rules::ids::SandboxId;
use rules::{Decision, DomainName, Facts, Host, Permit, Reason, RuleSet, SandboxRef};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::budget::{ExhaustedBudget, QueryChoice, RuleKey};
use crate::cache::CachedAnswer;
use crate::clean::{CleanAnswer, PermittedQuery, answer_outcome, clean};
use crate::filter::DnsFilter;
use crate::limits::{BUDGET_WRITE_WAIT, FLIGHT_REJOINS, FLIGHT_WAITERS};
use crate::message::Rcode;
use crate::query::{boxed_wire_key, cached_answer};
use crate::record;
use crate::sandbox_quota::{QuotaExhausted, QuotaSlot};
use crate::score::ALARM_SCORE;
use crate::state::{FlightResult, LockedState, SandboxState};

/// First octet of the cache key of an answer for the proxy only. No wire name starts with it: labels have at most 63
/// octets.
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

/// The proxy's resolver, which resolves the host of a permit before the proxy dials it.
#[derive(Clone, Debug)]
pub struct Resolver {
    filter: Arc<DnsFilter>,
}

impl Resolver {
    pub fn new(filter: Arc<DnsFilter>) -> Self {
        Resolver { filter }
    }

    /// Returns the addresses of the permit's host, which the caller must check with `RuleSet::admit`.
    ///
    /// # Errors
    ///
    /// Returns [`ResolveError`] if the host has no address, the budget is exhausted or no resolver answers.
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

    /// Returns the name that has a synthetic address in a sandbox.
    pub fn name_of(&self, sandbox: &SandboxId, address: IpAddr) -> Option<DomainName> {
        let IpAddr::V4(address) = address.to_canonical() else { return None };
        self.filter.find_state(sandbox)?.lock().synthetic.name_of(address).cloned()
    }
}

/// A look-up that the rules allow.
#[derive(Debug)]
pub(crate) struct Lookup {
    pub(crate) sandbox: SandboxRef,
    pub(crate) permit: Permit,
    pub(crate) name: DomainName,
    pub(crate) kind: QueryType,
    pub(crate) key: Box<[u8]>,
    pub(crate) arrival: audit::RecordedArrival,
    pub(crate) by: LookupCaller,
    /// A finding to write with its record.
    pub(crate) alarm: Option<DetectionFinding>,
}

/// Who asked for a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookupCaller {
    /// A cached answer gets no record of its own: the connection's record has the address.
    Proxy,
    Sandbox,
}

/// A look-up and the rules it runs under.
struct LookupContext<'a> {
    lookup: &'a Lookup,
    rules: Arc<RuleSet>,
    /// With its identity under these rules.
    sandbox: SandboxRef,
    state: Arc<SandboxState>,
}

/// The part of a look-up in a flight.
enum FlightRole {
    /// None: the answer is cached.
    Have(Arc<CachedAnswer>),
    Join(watch::Receiver<FlightResult>),
    Lead(Leader),
}

/// Why a look-up is refused before anything leaves.
enum LookupRefusal {
    Budget(ExhaustedBudget),
    Overload(String),
}

/// The leader of a flight: charged, not recorded yet.
struct Leader {
    flight: Flight,
    /// Its place among the queries in flight.
    slot: QuotaSlot,
    price: f64,
    /// First query of its rule: the budget file does not yet say that the rule has had its burst.
    fresh: bool,
}

/// Removes a flight from the sandbox's state, on every exit path.
struct Flight {
    state: Arc<SandboxState>,
    /// Empty after `finish`: another flight may use the key by the time `drop` runs.
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
    fn finish(mut self, result: &Result<Arc<CachedAnswer>, ResolveError>) {
        let key = std::mem::take(&mut self.key);
        let sender = self.state.lock().flights.remove(&key);
        if let Some(sender) = sender {
            sender.send_replace(Some(result.clone()));
        }
    }
}

/// Shows a query as in flight until dropped, so that a cancelled look-up is no longer shown.
struct InFlightGauge<'a>(&'a DnsFilter);

impl<'a> InFlightGauge<'a> {
    fn raise(filter: &'a DnsFilter) -> Self {
        filter.metrics.in_flight.increment(1.0);
        InFlightGauge(filter)
    }
}

impl Drop for InFlightGauge<'_> {
    fn drop(&mut self) {
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
        let query = PermittedQuery { rules: &rules, sandbox, permit, name, kind };
        let cleaned = match self.hosts.get(name) {
            Some(addresses) => Some(CleanAnswer::from_addresses(&query, addresses, 0)),
            None => self.pre_resolved.find(&query, Instant::now()).map(|(cleaned, _)| cleaned),
        };
        if let Some(cleaned) = cleaned {
            return Ok(cleaned.found);
        }
        let (permit, key) = proxy_lookup_key(&query);
        let (by, alarm) = (LookupCaller::Proxy, None);
        let arrival = record::own_arrival("proxy");
        let (sandbox, name) = (sandbox.clone(), name.clone());
        let lookup = Lookup { sandbox, permit, name, kind, key, arrival, by, alarm };
        self.look_up(&lookup).await.map(|entry| entry.found.clone())
    }

    /// Looks up a name: answers from the cache, joins a flight, or leads one. See the module documentation.
    pub(crate) async fn look_up(&self, lookup: &Lookup) -> Result<Arc<CachedAnswer>, ResolveError> {
        let mut context = self.lookup_context(lookup);
        for _ in 0..FLIGHT_REJOINS {
            match self.join_or_lead(&context) {
                Ok(FlightRole::Have(entry)) => {
                    if lookup.by == LookupCaller::Sandbox {
                        self.record_shared(&context, &entry);
                    }
                    return Ok(entry);
                }
                Ok(FlightRole::Join(flight)) => {
                    if let Some(result) = wait_for_flight(flight).await {
                        return self.finish_joined(&context, result);
                    }
                }
                Ok(FlightRole::Lead(leader)) => return self.lead_lookup(&context, leader).await,
                Err(refusal) => {
                    let reason = refusal.reason();
                    self.refuse_lookup(&context, refusal).await;
                    return Err(reason.into());
                }
            }
            let before = std::mem::replace(&mut context, self.lookup_context(lookup));
            if before.rules.generation() != context.rules.generation() {
                break; // the client's retry is decided under the new rules
            }
        }
        self.finish_joined(&context, Err(Reason::ResolverUnreachable.into()))
    }

    fn lookup_context<'a>(&self, lookup: &'a Lookup) -> LookupContext<'a> {
        let rules = self.rules.load_full();
        let identified = rules.sandboxes().identify_again(&lookup.sandbox);
        let sandbox = identified.unwrap_or_else(|_| lookup.sandbox.clone()); // gone: it is recorded as it was
        let state = self.sandbox_state(&rules, &sandbox);
        LookupContext { lookup, rules, sandbox, state }
    }

    fn join_or_lead(&self, context: &LookupContext<'_>) -> Result<FlightRole, LookupRefusal> {
        let (lookup, now) = (context.lookup, Instant::now());
        let mut inner = context.state.lock();
        inner.refresh(&context.rules, &context.sandbox);
        if let Some(cached) = inner.cache.find(&lookup.key, now)
            && (cached.generation == context.rules.generation()
                || cached.entry.permit.has_same_terms(&lookup.permit))
        {
            // A reload that did not change the terms of the permit keeps the cached answer.
            return Ok(FlightRole::Have(cached.entry.clone()));
        }
        if let Some(sender) = inner.flights.get(&lookup.key) {
            return match sender.receiver_count() < FLIGHT_WAITERS {
                true => Ok(FlightRole::Join(sender.subscribe())),
                false => Err(LookupRefusal::Overload(format!(
                    "{FLIGHT_WAITERS} queries wait for this name already"
                ))),
            };
        }
        let slot = self.flights.acquire(&context.rules, &lookup.sandbox.id);
        let slot = slot.map_err(|exhausted| LookupRefusal::Overload(exhausted.to_string()))?;
        let (price, fresh) = charge_lookup(&mut inner, lookup, now).map_err(LookupRefusal::Budget)?;
        inner.flights.insert(lookup.key.clone(), watch::channel(None).0);
        let flight = Flight { state: context.state.clone(), key: lookup.key.clone() };
        Ok(FlightRole::Lead(Leader { flight, slot, price, fresh }))
    }

    async fn lead_lookup(
        &self,
        context: &LookupContext<'_>,
        leader: Leader,
    ) -> Result<Arc<CachedAnswer>, ResolveError> {
        let gauge = InFlightGauge::raise(self);
        let result = self.query_upstream(context, &leader).await;
        drop((gauge, leader.slot));
        leader.flight.finish(&result);
        result
    }

    /// Records, waits for the time grid, asks, cleans and caches.
    async fn query_upstream(
        &self,
        context: &LookupContext<'_>,
        leader: &Leader,
    ) -> Result<Arc<CachedAnswer>, ResolveError> {
        if leader.fresh {
            self.note_burst(context.lookup).await?;
        }
        let (record, receipt) = self.record_sent(context, leader.price).await?;
        self.wait_for_grid().await;
        self.metrics.sent.increment(1);
        let started = Instant::now();
        let reply = self.upstreams.ask(&context.lookup.name, context.lookup.kind, &receipt).await;
        self.metrics.record_upstream_time(started.elapsed());
        let query = context.permitted_query();
        let cleaned = match &reply {
            Ok(reply) => clean(&query, &reply.message),
            Err(error) => {
                tracing::debug!(%error, "cannot resolve a name");
                Err(Reason::ResolverUnreachable)
            }
        };
        match cleaned {
            Ok(cleaned) => {
                let from = reply.ok().map(|reply| reply.from);
                Ok(self.store_answer(context, record, cached_answer(&query, cleaned, Instant::now(), from)))
            }
            Err(reason) => {
                record.close(answer_outcome(Rcode::SERVFAIL, &[], Ending::Failed(reason.into())));
                Err(reason.into())
            }
        }
    }

    /// Writes the decision record of a query that is about to leave, and waits for the receipt.
    async fn record_sent(
        &self,
        context: &LookupContext<'_>,
        price: f64,
    ) -> Result<(OpenRecord, Receipt), ResolveError> {
        let mut record = self.open_lookup_record(context);
        let verdict = self.lookup_details(context, price);
        let alarm = verdict.attention == audit::AlertFlag::Alert;
        let score = (verdict.score.unwrap_or_default(), verdict.features.clone());
        let receipt = record.record_decision(verdict).await.map_err(|down| down.reason())?;
        if alarm {
            let message = "Names below an allowed wildcard look like encoded data.".to_owned();
            let title = "DNS names look like a tunnel";
            let finding = record::finding(FindingCode::DnsTunnelSuspected, title, message, score);
            record::write_finding(&record, &finding).await;
        }
        if let Some(finding) = &context.lookup.alarm {
            record::write_finding(&record, finding).await;
        }
        Ok((record, receipt))
    }

    fn store_answer(
        &self,
        context: &LookupContext<'_>,
        record: OpenRecord,
        entry: CachedAnswer,
    ) -> Arc<CachedAnswer> {
        let ending = match entry.ede {
            Some(ede) => Ending::Refused(ede.reason.into()),
            None => Ending::Completed,
        };
        let now = Instant::now();
        let entry = Arc::new(entry);
        let mut inner = context.state.lock();
        inner.tunnel_score.note_answer(entry.rcode != Rcode::NXDOMAIN, now);
        inner.store_answer(&context.lookup.key, &entry, self.reverse, now);
        drop(inner);
        record.close(answer_outcome(entry.rcode, &entry.told, ending));
        entry
    }

    /// Writes to disk that a rule has had its burst, before its first query uses it.
    async fn note_burst(&self, lookup: &Lookup) -> Result<(), ResolveError> {
        if !self.store.has_file() {
            return Ok(());
        }
        let (store, sandbox) = (self.store.clone(), lookup.sandbox.id.clone());
        let key = RuleKey::from_permit(&lookup.permit);
        let noted = self.store_files.run(move || store.note_burst(sandbox.as_str(), &key));
        match timeout(BUDGET_WRITE_WAIT, noted).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(_)) | Err(_)) | Err(_) => Err(Reason::LogUnwritable.into()),
        }
    }

    /// Records a look-up that joined a flight and sent nothing itself.
    fn finish_joined(
        &self,
        context: &LookupContext<'_>,
        result: Result<Arc<CachedAnswer>, ResolveError>,
    ) -> Result<Arc<CachedAnswer>, ResolveError> {
        self.metrics.joined.increment(1);
        match &result {
            Ok(entry) => self.record_shared(context, entry),
            Err(refusal) => self.record_refused(context, refusal.reason, None),
        }
        result
    }

    /// Records an answer that another look-up asked for, or folds it into the record of identical answers.
    fn record_shared(&self, context: &LookupContext<'_>, entry: &Arc<CachedAnswer>) {
        let now = Instant::now();
        let due = match context.state.lock().cache.find(&context.lookup.key, now) {
            Some(cached) if Arc::ptr_eq(&cached.entry, entry) => cached.fold.count_answer(self.fold, now),
            Some(_) | None => Some(1),
        };
        if let Some(count) = due {
            self.record_answer(self.open_lookup_record(context), &context.rules, entry, count - 1);
        }
    }

    /// Records a refusal; `why` says more than the reason.
    fn record_refused(&self, context: &LookupContext<'_>, reason: Reason, why: Option<String>) {
        let permit = Some(&context.lookup.permit);
        let refused = record::refusal_details(reason, permit, self.policy(&context.rules));
        self.open_lookup_record(context).post_denial(record::add_message(refused, why));
    }

    /// Takes a place among the queries that wait.
    pub(crate) fn admit_waiting(&self, lookup: &Lookup) -> Result<QuotaSlot, QuotaExhausted> {
        self.waiting.acquire(&self.rules.load(), &lookup.sandbox.id)
    }

    /// Records a look-up that was refused because too many are waiting.
    pub(crate) fn record_overload(&self, lookup: &Lookup, exhausted: &QuotaExhausted) {
        let why = Some(exhausted.to_string());
        self.record_refused(&self.lookup_context(lookup), Reason::DnsOverload, why);
    }

    fn open_lookup_record(&self, context: &LookupContext<'_>) -> OpenRecord {
        let mut record = self.log.open_record(context.lookup.arrival.clone());
        record.set_sandbox(record::subject(&context.sandbox));
        record.set_facts(record::facts(context.lookup.name.as_str(), context.lookup.kind));
        record
    }

    fn lookup_details(&self, context: &LookupContext<'_>, price: f64) -> DecisionDetails {
        let lookup = context.lookup;
        let mut verdict =
            record::allow_details(&lookup.permit, self.policy(&context.rules), record::RESOLVED);
        verdict.features.extend(lookup.alarm.as_ref().map(|finding| record::flag(finding.code.into())));
        if lookup.permit.lookup().chosen_octets > 0 {
            let mut inner = context.state.lock();
            verdict = record::add_score(verdict, &inner.tunnel_score.score());
            verdict.message = Some(format!("charged {price:.0} bits").into());
            let alarming = verdict.score.is_some_and(|score| score >= ALARM_SCORE);
            if alarming && inner.is_finding_due(FindingCode::DnsTunnelSuspected, Instant::now()) {
                verdict = record::mark_alert(verdict);
            }
        }
        verdict
    }

    /// Records a look-up that is refused before anything leaves: budget exhausted, or too many waiting.
    async fn refuse_lookup(&self, context: &LookupContext<'_>, refusal: LookupRefusal) {
        let reason = refusal.reason();
        let (exhausted, why) = match refusal {
            LookupRefusal::Budget(exhausted) => (Some(exhausted), None),
            LookupRefusal::Overload(why) => (None, Some(why)),
        };
        self.metrics.spent.increment(u64::from(exhausted.is_some()));
        let (due, score) = context.budget_finding(exhausted);
        let record = self.open_lookup_record(context);
        let refused =
            record::refusal_details(reason, Some(&context.lookup.permit), self.policy(&context.rules));
        let mut verdict = record::add_message(record::add_score(refused, &score), why);
        if let Some(exhausted) = due {
            let title = "DNS budget exhausted";
            let message = exhausted.meaning().to_owned();
            let finding = record::finding(FindingCode::DnsBudgetExhausted, title, message, score);
            record::write_finding(&record, &finding).await;
            verdict = record::mark_alert(verdict);
        }
        record.post_denial(verdict);
    }
}

impl LookupRefusal {
    fn reason(&self) -> Reason {
        match self {
            LookupRefusal::Budget(_) => Reason::DnsBudget,
            LookupRefusal::Overload(_) => Reason::DnsOverload,
        }
    }
}

impl LookupContext<'_> {
    fn permitted_query(&self) -> PermittedQuery<'_> {
        let Lookup { sandbox, permit, name, kind, .. } = self.lookup;
        PermittedQuery { rules: &self.rules, sandbox, permit, name, kind: *kind }
    }

    /// Returns the exhausted budget, if a finding about it is due, and the score to write with it.
    fn budget_finding(
        &self,
        exhausted: Option<ExhaustedBudget>,
    ) -> (Option<ExhaustedBudget>, (u32, Vec<audit::ScoreFeature>)) {
        let mut inner = self.state.lock();
        let due = exhausted.filter(|_| inner.is_finding_due(FindingCode::DnsBudgetExhausted, Instant::now()));
        (due, inner.tunnel_score.score())
    }
}

/// Charges a query; returns the price, and whether it is the first of its rule.
fn charge_lookup(
    inner: &mut LockedState,
    lookup: &Lookup,
    now: Instant,
) -> Result<(f64, bool), ExhaustedBudget> {
    let terms = lookup.permit.lookup();
    let choice = QueryChoice {
        key: &lookup.key,
        octets: terms.chosen_octets,
        types: terms.types.len(),
        pattern_bits: inner.pattern_bits,
    };
    let fresh = !inner.budget.has_rule(&RuleKey::from_permit(&lookup.permit));
    let price = inner.budget.charge(&lookup.permit, &choice, now)?;
    if terms.chosen_octets > 0 {
        let chosen = lookup.name.as_str().get(..terms.chosen_octets).unwrap_or_default();
        inner.tunnel_score.note_sent(chosen, now);
    }
    Ok((price, fresh))
}

/// Returns the permit and cache key of a look-up by the proxy. If the sandbox itself may ask for the name, these are
/// the sandbox's, so that both share one answer. A name with a synthetic address in the sandbox gets a separate key.
fn proxy_lookup_key(query: &PermittedQuery<'_>) -> (Permit, Box<[u8]>) {
    let key = boxed_wire_key(query.name, query.kind);
    let facts = Facts::Name(NameFacts { name: query.name.clone(), query: query.kind });
    match query.rules.decide(query.sandbox, &facts) {
        Decision::Allow(permit) if !permit.lookup().synthetic => (permit, key),
        Decision::Allow(_) | Decision::Deny(_) => {
            (query.permit.clone(), [&[PROXY_KEY_PREFIX], &*key].concat().into())
        }
    }
}

/// Waits for the result of a flight; `None` if its leader was cancelled.
async fn wait_for_flight(
    mut flight: watch::Receiver<FlightResult>,
) -> Option<Result<Arc<CachedAnswer>, ResolveError>> {
    flight.wait_for(Option::is_some).await.ok()?.clone()
}
