//! The life of a query: parse, identify the sandbox, decide, then answer locally or ask a resolver. A local answer is
//! built without waiting; only a query that must leave waits.

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use audit::{AttemptOutcome, DecisionDetails, DetectionFinding, FindingCode};
use rules::configuration::{DenialForm, ReverseLookups};
use rules::facts::{NameFacts, QueryType};
use rules::{
    Channel, Decision, Denial, DomainName, Facts, Permit, Reason, RuleSet, SandboxRef, special_zone,
};
use tokio::time::Instant;

use crate::cache::CachedAnswer;
use crate::clean::{CleanAnswer, PermittedQuery};
use crate::filter::DnsFilter;
use crate::limits::{TTL_CEILING, TTL_FLOOR, TTL_SYNTHETIC};
use crate::message::{
    AnswerSection, DnsQuery, DnsTransport, Ede, QueryError, Rcode, display_question, wire_key,
};
use crate::record;
use crate::resolver::{Lookup, LookupCaller};
use crate::reverse_names::parse_reverse_name;
use crate::sandbox_quota::QuotaExhausted;
use crate::score::ALARM_SCORE;
use crate::state::SandboxState;

/// Zone transfers (RFC 5936, 1995).
const TRANSFERS: [u16; 2] = [251, 252];
const PTR: QueryType = QueryType(12);
/// Stands for the name of a packet that has none.
const UNREADABLE: &str = "(unreadable)";

/// How a query arrived, as the kernel reports it.
#[derive(Clone, Debug)]
pub struct QueryArrival {
    pub channel: Channel,
    pub carrier: DnsTransport,
    pub source: Option<SocketAddr>,
    /// The destination that the sandbox sent it to.
    pub original_dst: Option<SocketAddr>,
    pub toward: QueryTarget,
}

/// The resolver that a query was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryTarget {
    /// Another resolver; the firewall redirected the query here.
    Elsewhere,
    /// Sandbar, as far as is known.
    Us,
}

/// The next step for a packet.
#[derive(Debug)]
pub enum QueryStep {
    Answer(Vec<u8>),
    Drop,
    /// Ask a resolver: [`DnsFilter::finish_query`] returns the answer.
    Wait(Box<PendingQuery>),
}

/// An allowed query that waits for a resolver.
#[derive(Debug)]
pub struct PendingQuery {
    packet: Vec<u8>,
    carrier: DnsTransport,
    pub(crate) lookup: Lookup,
}

impl DnsFilter {
    /// Processes a packet as far as possible without waiting.
    pub fn start_query(self: &Arc<Self>, packet: &[u8], arrived: &QueryArrival) -> QueryStep {
        let query = match DnsQuery::parse(packet) {
            Ok(query) => query,
            Err(error) => return self.answer_malformed(packet, error, arrived),
        };
        let rules = self.rules.load(); // one snapshot, so one query sees one policy
        let sandbox = match rules.sandboxes().identify(std::slice::from_ref(&arrived.channel)) {
            Ok(sandbox) => sandbox,
            Err(reason) => return self.refuse_unknown_channel(&query, arrived, reason, &rules),
        };
        let state = self.sandbox_state(&rules, &sandbox);
        let alarm = Cell::new(due_bypass_finding(&state, arrived));
        let local = LocalAnswer { filter: self, rules: &rules, sandbox, state, query, arrived, alarm };
        match local.answer_locally() {
            LocalResult::Answer(answer) => QueryStep::Answer(answer),
            LocalResult::Ask(lookup) => QueryStep::Wait(Box::new(PendingQuery {
                packet: packet.to_vec(),
                carrier: arrived.carrier,
                lookup: *lookup,
            })),
        }
    }

    /// Looks up the name of a query that [`DnsFilter::start_query`] could not answer locally, and builds the answer.
    pub async fn finish_query(&self, pending: PendingQuery) -> Vec<u8> {
        let PendingQuery { packet, carrier, lookup } = pending;
        let result = self.look_up(&lookup).await;
        let Ok(query) = DnsQuery::parse(&packet) else { return Vec::new() }; // cannot fail: `start_query` parsed it
        match result {
            Ok(entry) => build_cached_answer(&query, &entry, Instant::now(), carrier),
            Err(refusal) => self.build_refusal(&query, refusal.reason, carrier),
        }
    }

    /// Records and answers a query that is refused because too many are waiting.
    pub(crate) fn refuse_overload(&self, pending: PendingQuery, exhausted: &QuotaExhausted) -> Vec<u8> {
        let PendingQuery { packet, carrier, lookup } = pending;
        self.record_overload(&lookup, exhausted);
        let Ok(query) = DnsQuery::parse(&packet) else { return Vec::new() };
        self.build_refusal(&query, Reason::DnsOverload, carrier)
    }

    /// Runs both steps; `None` if the packet gets no answer.
    pub async fn answer(self: &Arc<Self>, packet: &[u8], arrived: &QueryArrival) -> Option<Vec<u8>> {
        match self.start_query(packet, arrived) {
            QueryStep::Answer(answer) => Some(answer),
            QueryStep::Drop => None,
            QueryStep::Wait(pending) => Some(self.finish_query(*pending).await),
        }
    }

    /// Answers a packet that is not a valid query. The record is rate limited, so that such packets cannot flood the
    /// log.
    fn answer_malformed(&self, packet: &[u8], error: QueryError, arrived: &QueryArrival) -> QueryStep {
        let (answer, reason) = match error {
            QueryError::Drop => (QueryStep::Drop, Reason::DnsMalformed),
            QueryError::Malformed(head, rcode) => {
                (QueryStep::Answer(head.bare_answer(rcode)), Reason::DnsMalformed)
            }
            QueryError::Operation(head, rcode) => {
                (QueryStep::Answer(head.bare_answer(rcode)), Reason::DnsOperation)
            }
        };
        self.record_unread(packet, reason, arrived, None);
        answer
    }

    /// Records a packet or connection that was not processed: not a valid query, or beyond a limit.
    pub(crate) fn record_unread(
        &self,
        packet: &[u8],
        reason: Reason,
        arrived: &QueryArrival,
        why: Option<String>,
    ) {
        let rules = self.rules.load_full();
        self.metrics.unread.increment(1);
        let sandbox = rules.sandboxes().identify(std::slice::from_ref(&arrived.channel)).ok();
        let mut record = self.log.open_record(record::arrival(arrived));
        if let Some(sandbox) = &sandbox {
            record.set_sandbox(record::subject(sandbox));
        }
        record.set_facts(record::facts(UNREADABLE, QueryType(0)));
        let attempted = display_question(packet).unwrap_or_else(|| UNREADABLE.to_owned());
        let refused = record::refusal_details(reason, None, self.policy(&rules));
        let refused = DecisionDetails { attempted: Some(attempted.into()), ..refused };
        record.post_denial(record::add_message(refused, why));
    }

    /// Refuses a query whose channel belongs to no sandbox, or to two.
    fn refuse_unknown_channel(
        &self,
        query: &DnsQuery<'_>,
        arrived: &QueryArrival,
        reason: Reason,
        rules: &RuleSet,
    ) -> QueryStep {
        let mut record = self.log.open_record(record::arrival(arrived));
        record.set_facts(record::facts(&query.display_name(), query.kind));
        record.post_denial(record::mark_alert(record::refusal_details(reason, None, self.policy(rules))));
        QueryStep::Answer(self.build_refusal(query, reason, arrived.carrier))
    }

    /// Builds the answer to a refused query. A denied name is answered in the configured form (`denial`).
    pub(crate) fn build_refusal(
        &self,
        query: &DnsQuery<'_>,
        reason: Reason,
        carrier: DnsTransport,
    ) -> Vec<u8> {
        self.metrics.refused.increment(1);
        let mut section = AnswerSection::default();
        let (rcode, code) = match refusal_form(reason) {
            RefusalForm::Failure(code) => (Rcode::SERVFAIL, code),
            RefusalForm::Name => (self.denial_rcode(query, &mut section), Ede::BLOCKED),
            RefusalForm::Operation => (Rcode::REFUSED, Ede::PROHIBITED),
            RefusalForm::Withheld => (Rcode::NOERROR, Ede::FILTERED),
        };
        let ede = Some(Ede { code, reason });
        query.build_answer(rcode, &section, 0, ede, carrier)
    }

    fn denial_rcode(&self, query: &DnsQuery<'_>, section: &mut AnswerSection) -> Rcode {
        match (self.denial, query.kind) {
            (DenialForm::NxDomain, _) => Rcode::NXDOMAIN,
            (DenialForm::Refused, _) => Rcode::REFUSED,
            (DenialForm::NoData, _) => Rcode::NOERROR,
            (DenialForm::Sinkhole, QueryType::A) => {
                section.push(query.kind, TTL_FLOOR, &Ipv4Addr::UNSPECIFIED.octets());
                Rcode::NOERROR
            }
            (DenialForm::Sinkhole, QueryType::AAAA) => {
                section.push(query.kind, TTL_FLOOR, &Ipv6Addr::UNSPECIFIED.octets());
                Rcode::NOERROR
            }
            (DenialForm::Sinkhole, _) => Rcode::NOERROR,
        }
    }
}

/// How the client sees a refusal.
enum RefusalForm {
    /// A temporary failure, with its extended error code: the client may retry.
    Failure(u16),
    /// The name is denied.
    Name,
    /// The client sent something that a stub resolver should not send.
    Operation,
    /// The name exists, but its addresses are denied.
    Withheld,
}

#[expect(clippy::wildcard_enum_match_arm, reason = "every other reason is a denial of the name")]
fn refusal_form(reason: Reason) -> RefusalForm {
    match reason {
        Reason::ResolverUnreachable => RefusalForm::Failure(Ede::NETWORK),
        Reason::DnsAnswer => RefusalForm::Failure(Ede::UNREACHABLE),
        Reason::DnsOverload
        | Reason::LogQuota
        | Reason::LogUnwritable
        | Reason::NoAddress
        | Reason::PolicyInvalid
        | Reason::QuotaExhausted => RefusalForm::Failure(Ede::OTHER),
        Reason::DnsOperation
        | Reason::DnsMalformed
        | Reason::UnknownChannel
        | Reason::ChannelsDisagree
        | Reason::UnknownSandbox => RefusalForm::Operation,
        Reason::PrivateAddress | Reason::AddressNotExpected | Reason::OwnAddress => RefusalForm::Withheld,
        _ => RefusalForm::Name,
    }
}

/// Builds the answer to a query from a cached answer.
fn build_cached_answer(
    query: &DnsQuery<'_>,
    entry: &CachedAnswer,
    now: Instant,
    carrier: DnsTransport,
) -> Vec<u8> {
    query.build_answer(entry.rcode, &entry.section, entry.age(now), entry.ede, carrier)
}

/// A query on its way through everything that can answer it locally.
struct LocalAnswer<'a> {
    filter: &'a Arc<DnsFilter>,
    rules: &'a RuleSet,
    sandbox: SandboxRef,
    state: Arc<SandboxState>,
    query: DnsQuery<'a>,
    arrived: &'a QueryArrival,
    /// A finding to write with the first record of the query.
    alarm: Cell<Option<DetectionFinding>>,
}

enum LocalResult {
    Answer(Vec<u8>),
    Ask(Box<Lookup>),
}

impl LocalAnswer<'_> {
    fn answer_locally(&self) -> LocalResult {
        if !self.query.is_internet() || TRANSFERS.contains(&self.query.kind.0) {
            return self.refuse(Reason::DnsOperation);
        }
        let mut buffer = [0; 257];
        let key = self.query.wire_key(&mut buffer);
        let now = Instant::now();
        if let Some(answer) = self.answer_from_cache(key, now) {
            self.filter.metrics.cached.increment(1);
            return LocalResult::Answer(answer);
        }
        if self.filter.upstreams.is_own(self.query.id(), self.query.question()) {
            return self.refuse_loop();
        }
        let Ok(name) = self.query.name() else { return self.refuse(Reason::BadName) };
        if let Some(answer) = self.answer_localhost(&name).or_else(|| self.answer_reverse(&name)) {
            return LocalResult::Answer(answer);
        }
        let facts = Facts::Name(NameFacts { name: name.clone(), query: self.query.kind });
        let decision = self.rules.decide(&self.sandbox, &facts);
        if let Some(reason) = self.inspect_name(&name, &decision)
            && let Decision::Allow(permit) = &decision
        {
            return self.refuse_with_permit(reason, Some(permit));
        }
        match decision {
            Decision::Allow(permit) => self.answer_allowed(permit, name, key, now),
            Decision::Deny(denial) => self.deny(&denial, &name),
        }
    }

    /// Lets the inspection look at a name, denied or not. Returns the reason if it must not be asked for.
    fn inspect_name(&self, name: &DomainName, decision: &Decision) -> Option<Reason> {
        let permit = match decision {
            Decision::Allow(permit) => Some(permit),
            Decision::Deny(_) => None,
        };
        let inspected = self.filter.name_inspector.get()?.inspect(&self.sandbox, name, permit)?;
        self.alarm.set(Some(inspected.finding));
        inspected.refusal
    }

    /// Answers an allowed name locally if possible, otherwise returns the look-up.
    fn answer_allowed(&self, permit: Permit, name: DomainName, key: &[u8], now: Instant) -> LocalResult {
        let filter = self.filter;
        let (rules, sandbox, kind) = (self.rules, &self.sandbox, self.query.kind);
        let question = PermittedQuery { rules, sandbox, permit: &permit, name: &name, kind };
        let configured = filter.hosts.get(&name);
        if configured.is_none() && special_zone(&name).is_some() && !filter.upstreams.has_zone(&name) {
            return self.refuse_with_permit(Reason::SpecialName, Some(&permit));
        }
        if permit.lookup().synthetic {
            return self.answer_synthetic(&question, key, now);
        }
        if let Some(addresses) = configured {
            let cleaned = CleanAnswer::from_addresses(&question, addresses, TTL_CEILING);
            return self.answer_and_cache(&question, cleaned, key, now);
        }
        if let Some((cleaned, born)) = filter.pre_resolved.find(&question, now) {
            return self.answer_and_cache(&question, cleaned, key, born);
        }
        let (sandbox, arrival) = (self.sandbox.clone(), record::arrival(self.arrived));
        let (key, by, alarm) = (key.into(), LookupCaller::Sandbox, self.alarm.take());
        LocalResult::Ask(Box::new(Lookup { sandbox, kind, arrival, key, name, permit, by, alarm }))
    }

    /// Answers from the cache, if the rules still give the answer's permit.
    fn answer_from_cache(&self, key: &[u8], now: Instant) -> Option<Vec<u8>> {
        let mut inner = self.state.lock();
        let cached = inner.cache.find(key, now)?;
        if cached.generation != self.rules.generation() {
            if !self.still_allows(&cached.entry.permit) {
                inner.cache.remove(key);
                return None;
            }
            cached.generation = self.rules.generation();
        }
        let entry = cached.entry.clone();
        let due = match self.is_alarming() {
            true => Some(cached.fold.flush(now)),
            false => cached.fold.count_answer(self.filter.fold, now),
        };
        drop(inner);
        if let Some(count) = due {
            self.record_answer(&entry, count - 1);
        }
        Some(build_cached_answer(&self.query, &entry, now, self.arrived.carrier))
    }

    /// Returns whether the current rules give a permit with the same terms as that of a cached answer.
    fn still_allows(&self, cached: &Permit) -> bool {
        match self.rules.decide(&self.sandbox, cached.facts()) {
            Decision::Allow(permit) => !permit.lookup().strict_cname && permit.has_same_terms(cached),
            Decision::Deny(_) => false,
        }
    }

    fn record_answer(&self, entry: &CachedAnswer, folded: u64) {
        let (verdict, outcome) = self.filter.answer_details(self.rules, entry, folded);
        self.write_record(verdict, Some(outcome));
    }

    /// Answers `localhost` with the loopback addresses; such names never leave (RFC 6761, 6.3).
    fn answer_localhost(&self, name: &DomainName) -> Option<Vec<u8>> {
        let kind = self.query.kind;
        let cleaned = if name.is_within("localhost") {
            let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
            CleanAnswer::from_own_addresses(kind, &loopback, TTL_CEILING)
        } else if name.is_within("127.in-addr.arpa") {
            let mut cleaned = CleanAnswer::from_own_addresses(kind, &[], TTL_CEILING);
            if kind == PTR {
                cleaned.section.push(PTR, TTL_CEILING, b"\x09localhost\x00");
            }
            cleaned
        } else {
            return None;
        };
        self.record_local_answer(&cleaned);
        Some(self.query.build_answer(cleaned.rcode, &cleaned.section, 0, None, self.arrived.carrier))
    }

    /// Records an answer that needs no rule.
    fn record_local_answer(&self, cleaned: &CleanAnswer) {
        self.filter.metrics.here.increment(1);
        let verdict = record::local_details(self.filter.policy(self.rules));
        let ending = audit::Ending::Completed;
        self.write_record(verdict, Some(crate::clean::answer_outcome(cleaned.rcode, &cleaned.told, ending)));
    }

    /// Answers a reverse look-up for an address that the sandbox was given, if the configuration enables that.
    fn answer_reverse(&self, name: &DomainName) -> Option<Vec<u8>> {
        if self.query.kind != PTR || self.filter.reverse == ReverseLookups::Off {
            return None;
        }
        let address = parse_reverse_name(name)?;
        let mut inner = self.state.lock();
        inner.refresh(self.rules, &self.sandbox);
        let known = inner.name_of(address)?;
        drop(inner);
        let mut cleaned = CleanAnswer::from_own_addresses(PTR, &[], TTL_FLOOR);
        let wire = wire_key(&known, PTR);
        cleaned.section.push(PTR, TTL_FLOOR, wire.get(..wire.len() - 2)?);
        self.record_local_answer(&cleaned);
        Some(self.query.build_answer(cleaned.rcode, &cleaned.section, 0, None, self.arrived.carrier))
    }

    /// Refuses our own query that an upstream resolver sent back, instead of asking again.
    fn refuse_loop(&self) -> LocalResult {
        if self.state.lock().is_finding_due(FindingCode::DnsForwardingLoop, Instant::now()) {
            self.alarm.set(Some(record::loop_finding()));
        }
        self.refuse(Reason::ResolverUnreachable)
    }

    /// Answers a name for raw TCP with its synthetic address, the only one through which the sandbox can reach it.
    fn answer_synthetic(&self, question: &PermittedQuery<'_>, key: &[u8], now: Instant) -> LocalResult {
        let address = self.state.lock().synthetic.address_of(question.name);
        match address {
            Some(address) => {
                let cleaned =
                    CleanAnswer::from_own_addresses(question.kind, &[IpAddr::V4(address)], TTL_SYNTHETIC);
                self.answer_and_cache(question, cleaned, key, now)
            }
            None => self.refuse_with_permit(Reason::NoAddress, Some(question.permit)),
        }
    }

    /// Caches and returns an answer that needed no upstream query.
    fn answer_and_cache(
        &self,
        question: &PermittedQuery<'_>,
        cleaned: CleanAnswer,
        key: &[u8],
        born: Instant,
    ) -> LocalResult {
        if let (true, Some(reason)) = (cleaned.section.is_empty(), cleaned.withheld) {
            return self.refuse_with_permit(reason, Some(question.permit));
        }
        self.filter.metrics.here.increment(1);
        let now = Instant::now();
        let entry = Arc::new(cached_answer(question, cleaned, born, None));
        let mut inner = self.state.lock();
        inner.store_answer(key, &entry, self.filter.reverse, now);
        let due =
            inner.cache.find(key, now).and_then(|cached| cached.fold.count_answer(self.filter.fold, now));
        drop(inner);
        if let Some(count) = due {
            self.record_answer(&entry, count - 1);
        }
        LocalResult::Answer(build_cached_answer(&self.query, &entry, now, self.arrived.carrier))
    }

    fn refuse(&self, reason: Reason) -> LocalResult {
        self.refuse_with_permit(reason, None)
    }

    /// Refuses a query for a reason that is not a denial by a rule.
    fn refuse_with_permit(&self, reason: Reason, permit: Option<&Permit>) -> LocalResult {
        let verdict = record::refusal_details(reason, permit, self.filter.policy(self.rules));
        self.write_record(verdict, None);
        LocalResult::Answer(self.filter.build_refusal(&self.query, reason, self.arrived.carrier))
    }

    fn deny(&self, denial: &Denial, name: &DomainName) -> LocalResult {
        let now = Instant::now();
        let mut inner = self.state.lock();
        inner.tunnel_score.note_denied(name.as_str(), now);
        if denial.reason == Reason::DnsTypeNotAllowed {
            inner.tunnel_score.note_odd_type(now);
        }
        let score = inner.tunnel_score.score();
        let alarm = score.0 >= ALARM_SCORE && inner.is_finding_due(FindingCode::DnsTunnelSuspected, now);
        drop(inner);
        let verdict = record::denial_details(denial, self.filter.policy(self.rules));
        let verdict = record::add_score(verdict, &score);
        if alarm {
            self.alarm.set(Some(record::tunnel_finding(score)));
        }
        self.write_record(verdict, None);
        LocalResult::Answer(self.filter.build_refusal(&self.query, denial.reason, self.arrived.carrier))
    }

    fn is_alarming(&self) -> bool {
        let alarm = self.alarm.take();
        let alarming = alarm.is_some();
        self.alarm.set(alarm);
        alarming
    }

    /// Queues the record of an answer or, without an outcome, of a refusal. The client's answer does not wait for it.
    fn write_record(&self, verdict: DecisionDetails, outcome: Option<AttemptOutcome>) {
        let (record, verdict) = (self.open_record(), record::flag_bypass(verdict, self.arrived));
        match self.alarm.take() {
            None => close_record(record, verdict, outcome),
            Some(finding) => drop(tokio::spawn(async move {
                record::write_finding(&record, &finding).await;
                close_record(record, record::mark_alert(verdict), outcome);
            })),
        }
    }

    fn open_record(&self) -> audit::OpenRecord {
        let mut record = self.filter.log.open_record(record::arrival(self.arrived));
        record.set_sandbox(record::subject(&self.sandbox)); // of the snapshot that decided, not of an earlier one
        record.set_facts(record::facts(&self.query.display_name(), self.query.kind));
        record
    }
}

fn close_record(record: audit::OpenRecord, verdict: DecisionDetails, outcome: Option<AttemptOutcome>) {
    match outcome {
        Some(outcome) => record.post_answer(verdict, &outcome),
        None => record.post_denial(verdict),
    }
}

/// Returns the finding for a query that was sent to another resolver, if one is due.
fn due_bypass_finding(state: &SandboxState, arrived: &QueryArrival) -> Option<DetectionFinding> {
    let sent_elsewhere = arrived.toward == QueryTarget::Elsewhere;
    let due = sent_elsewhere && state.lock().is_finding_due(FindingCode::DnsBypassAttempt, Instant::now());
    due.then(|| record::bypass_finding(arrived.original_dst))
}

/// Converts a cleaned answer into its cached form.
pub(crate) fn cached_answer(
    question: &PermittedQuery<'_>,
    cleaned: CleanAnswer,
    born: Instant,
    from: Option<SocketAddr>,
) -> CachedAnswer {
    let empty = cleaned.section.is_empty();
    let withheld = cleaned.withheld.filter(|_| empty);
    CachedAnswer {
        name: question.name.clone(),
        kind: question.kind,
        rcode: cleaned.rcode,
        section: cleaned.section,
        ede: withheld.map(|reason| Ede { code: Ede::FILTERED, reason }),
        found: cleaned.found,
        told: cleaned.told,
        born,
        expires: born + std::time::Duration::from_secs(u64::from(cleaned.ttl)),
        permit: question.permit.clone(),
        from,
    }
}

/// Returns the cache key of a name and type.
pub(crate) fn boxed_wire_key(name: &DomainName, kind: QueryType) -> Box<[u8]> {
    wire_key(name, kind).into()
}
