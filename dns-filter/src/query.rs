//! The life of a query: read, identify, decide, then answer here or ask. Whatever can be answered here
//! is answered at once; only what must leave waits.

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use audit::{Finding, Outcome, Verdict};
use rules::facts::{NameFacts, QueryType};
use rules::operator::{DenialForm, Reverse};
use rules::{
    Channel, Decision, Denial, DomainName, Facts, Permit, Reason, RuleSet, SandboxRef, special_zone,
};
use tokio::time::Instant;

use crate::cache::Entry;
use crate::clean::{Asked, Cleaned};
use crate::filter::Filter;
use crate::learned::reversed;
use crate::limits::{TTL_CEILING, TTL_FLOOR, TTL_SYNTHETIC};
use crate::lock;
use crate::message::{Carrier, Ede, Query, Rcode, Section, Unfit, key_of};
use crate::meter::Fate;
use crate::record;
use crate::resolver::{By, Want};
use crate::score::ALARM;
use crate::state::{Inner, State};

/// Zone transfers (RFC 5936, 1995).
const TRANSFERS: [u16; 2] = [251, 252];
const PTR: QueryType = QueryType(12);

/// How a query came to us, as the kernel tells it.
#[derive(Clone, Debug)]
pub struct Arrived {
    pub channel: Channel,
    pub carrier: Carrier,
    pub source: Option<SocketAddr>,
    /// Where the sandbox sent it.
    pub aimed: Option<SocketAddr>,
    pub toward: Toward,
}

/// Whom a query was meant for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Toward {
    /// Another resolver: it is known to have been brought here from its way there.
    Elsewhere,
    /// Us, as far as it is known.
    Us,
}

/// What becomes of a packet.
#[derive(Debug)]
pub enum Step {
    Answer(Vec<u8>),
    Drop,
    /// Something has to be asked; [`Filter::wait`] has the answer.
    Wait(Box<Pending>),
}

/// A query that was allowed and waits for a resolver.
#[derive(Debug)]
pub struct Pending {
    packet: Vec<u8>,
    carrier: Carrier,
    want: Want,
}

impl Filter {
    /// Takes one packet as far as it goes without waiting.
    pub fn begin(self: &Arc<Self>, packet: &[u8], arrived: &Arrived) -> Step {
        let query = match Query::read(packet) {
            Ok(query) => query,
            Err(unfit) => return self.unfit(unfit, arrived),
        };
        let rules = self.rules.load(); // one snapshot, so one query sees one policy
        let sandbox = match rules.sandboxes().identify(std::slice::from_ref(&arrived.channel)) {
            Ok(sandbox) => sandbox,
            Err(reason) => return self.stranger(&query, arrived, reason, &rules),
        };
        let state = self.state(&rules, &sandbox);
        let alarm = Cell::new(bypass(&state, arrived));
        let judging =
            Judging { filter: self, rules: &rules, sandbox, state, query, arrived, alarm };
        match judging.locally() {
            Judged::Answer(answer) => Step::Answer(answer),
            Judged::Ask(want) => Step::Wait(Box::new(Pending {
                packet: packet.to_vec(),
                carrier: arrived.carrier,
                want: *want,
            })),
        }
    }

    /// Asks for what [`Filter::begin`] could not answer, and answers.
    pub async fn wait(&self, pending: Pending) -> Vec<u8> {
        let Pending { packet, carrier, want } = pending;
        let found = self.look_up(&want).await;
        let Ok(query) = Query::read(&packet) else { return Vec::new() }; // it was read before
        match found {
            Ok(entry) => given(&query, &entry, Instant::now(), carrier),
            Err(refusal) => self.refusal(&query, refusal.reason, carrier),
        }
    }

    /// The answer to a query that cannot even wait.
    pub(crate) fn overloaded(&self, pending: Pending) -> Vec<u8> {
        let Pending { packet, carrier, want } = pending;
        self.record_overload(&want);
        let Ok(query) = Query::read(&packet) else { return Vec::new() };
        self.refusal(&query, Reason::DnsOverload, carrier)
    }

    /// Both steps, for callers that have nothing else to do meanwhile; none when nothing is answered.
    pub async fn answer(self: &Arc<Self>, packet: &[u8], arrived: &Arrived) -> Option<Vec<u8>> {
        match self.begin(packet, arrived) {
            Step::Answer(answer) => Some(answer),
            Step::Drop => None,
            Step::Wait(pending) => Some(self.wait(*pending).await),
        }
    }

    /// Packets that are no query cannot flood the log: a few a second, the rest counted.
    fn unfit(&self, unfit: Unfit, arrived: &Arrived) -> Step {
        let (answer, reason) = match unfit {
            Unfit::Drop => (Step::Drop, Reason::DnsMalformed),
            Unfit::Malformed(head, rcode) => (Step::Answer(head.bare(rcode)), Reason::DnsMalformed),
            Unfit::Operation(head, rcode) => (Step::Answer(head.bare(rcode)), Reason::DnsOperation),
        };
        self.unread(reason, arrived);
        answer
    }

    /// Records what came and was not even read: no query, or more than is served.
    pub(crate) fn unread(&self, reason: Reason, arrived: &Arrived) {
        let rules = self.rules.load_full();
        self.tally.unread.increment(1);
        let whose = rules.sandboxes().identify(std::slice::from_ref(&arrived.channel)).ok();
        let asked = || ("(unreadable)".to_owned(), QueryType(0));
        if self.is_metered(reason, whose.as_ref(), asked) {
            let mut record = self.log.open_record(record::arrival(arrived));
            if let Some(sandbox) = &whose {
                record.sandbox(record::subject(sandbox));
            }
            record.facts(record::facts("(unreadable)", QueryType(0)));
            record.denied(record::refused(reason, None, self.policy(&rules)));
        }
    }

    /// A query by a path that is nobody's, or two sandboxes' at once.
    fn stranger(
        &self,
        query: &Query<'_>,
        arrived: &Arrived,
        reason: Reason,
        rules: &RuleSet,
    ) -> Step {
        if self.is_metered(reason, None, || (query.shown(), query.kind)) {
            let mut record = self.log.open_record(record::arrival(arrived));
            record.facts(record::facts(&query.shown(), query.kind));
            record.denied(record::alert(record::refused(reason, None, self.policy(rules))));
        }
        Step::Answer(self.refusal(query, reason, arrived.carrier))
    }

    /// Whether what belongs to no sandbox's meter gets a record of its own; it is counted if not.
    fn is_metered(
        &self,
        reason: Reason,
        whose: Option<&SandboxRef>,
        asked: impl FnOnce() -> (String, QueryType),
    ) -> bool {
        let mut meter = lock(&self.malformed);
        let own = meter.admits(Instant::now());
        if !own {
            meter.count(Fate::Refused(reason), whose, asked);
        }
        own
    }

    /// The answer to a query that is refused, in the operator's form where it is about a name.
    pub(crate) fn refusal(&self, query: &Query<'_>, reason: Reason, carrier: Carrier) -> Vec<u8> {
        self.tally.refused.increment(1);
        let mut section = Section::default();
        let (rcode, code) = match form(reason) {
            Form::Failure(code) => (Rcode::SERVFAIL, code),
            Form::Name => (self.denial_rcode(query, &mut section), Ede::BLOCKED),
            Form::Operation => (Rcode::REFUSED, Ede::PROHIBITED),
            Form::Withheld => (Rcode::NOERROR, Ede::FILTERED),
        };
        let ede = Some(Ede { code, text: reason.code() });
        query.answer(rcode, &section, 0, ede, carrier)
    }

    fn denial_rcode(&self, query: &Query<'_>, section: &mut Section) -> Rcode {
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

/// How a refusal is told.
enum Form {
    /// Not our doing, or not for ever: the client may try again.
    Failure(u16),
    /// The name is not for this sandbox.
    Name,
    /// Nothing a stub resolver should send.
    Operation,
    /// The name is there; its addresses are not for this sandbox.
    Withheld,
}

#[expect(clippy::wildcard_enum_match_arm, reason = "every other is a rule's word on the name")]
fn form(reason: Reason) -> Form {
    match reason {
        Reason::ResolverUnreachable => Form::Failure(Ede::NETWORK),
        Reason::DnsAnswer => Form::Failure(Ede::UNREACHABLE),
        Reason::DnsOverload | Reason::LogUnwritable | Reason::NoAddress | Reason::PolicyInvalid => {
            Form::Failure(Ede::OTHER)
        }
        Reason::DnsOperation
        | Reason::DnsMalformed
        | Reason::UnknownChannel
        | Reason::ChannelsDisagree
        | Reason::UnknownSandbox => Form::Operation,
        Reason::PrivateAddress | Reason::AddressNotExpected | Reason::OwnAddress => Form::Withheld,
        _ => Form::Name,
    }
}

/// An entry as the answer to a query.
fn given(query: &Query<'_>, entry: &Entry, now: Instant, carrier: Carrier) -> Vec<u8> {
    query.answer(entry.rcode, &entry.section, entry.age(now), entry.ede, carrier)
}

/// One query on its way through what can be said without asking anybody.
struct Judging<'a> {
    filter: &'a Arc<Filter>,
    rules: &'a RuleSet,
    sandbox: SandboxRef,
    state: Arc<State>,
    query: Query<'a>,
    arrived: &'a Arrived,
    /// What is to be found in the first record of the query.
    alarm: Cell<Option<Finding>>,
}

enum Judged {
    Answer(Vec<u8>),
    Ask(Box<Want>),
}

impl Judging<'_> {
    fn locally(&self) -> Judged {
        if !self.query.is_internet() || TRANSFERS.contains(&self.query.kind.0) {
            return self.refuse(Reason::DnsOperation);
        }
        let mut buffer = [0; 257];
        let key = self.query.key(&mut buffer);
        let now = Instant::now();
        if let Some(answer) = self.cached(key, now) {
            self.filter.tally.cached.increment(1);
            return Judged::Answer(answer);
        }
        if self.filter.upstreams.is_own(self.query.id(), self.query.question()) {
            return self.looped();
        }
        let Ok(name) = self.query.name() else { return self.refuse(Reason::BadName) };
        if let Some(answer) = self.own_host(&name).or_else(|| self.reverse(&name)) {
            return Judged::Answer(answer);
        }
        let facts = Facts::Name(NameFacts { name: name.clone(), query: self.query.kind });
        match self.rules.decide(&self.sandbox, &facts) {
            Decision::Allow(permit) => self.allowed(permit, name, key, now),
            Decision::Deny(denial) => self.deny(&denial, &name),
        }
    }

    /// What can be said of a name that may be asked for; else it is to be asked.
    fn allowed(&self, permit: Permit, name: DomainName, key: &[u8], now: Instant) -> Judged {
        let filter = self.filter;
        let (rules, sandbox, kind) = (self.rules, &self.sandbox, self.query.kind);
        let asked = Asked { rules, sandbox, permit: &permit, name: &name, kind };
        let said = filter.hosts.get(&name);
        if said.is_none() && special_zone(&name).is_some() && !filter.upstreams.has_zone(&name) {
            return self.refuse_by(Reason::SpecialName, Some(&permit));
        }
        if permit.lookup().synthetic {
            return self.synthetic(&asked, key, now);
        }
        if let Some(addresses) = said {
            let cleaned = Cleaned::of_addresses(&asked, addresses, TTL_CEILING);
            return self.say(&asked, cleaned, key, now);
        }
        if let Some((cleaned, born)) = filter.ahead.find(&asked, now) {
            return self.say(&asked, cleaned, key, born);
        }
        let (sandbox, arrival) = (self.sandbox.clone(), record::arrival(self.arrived));
        let (key, by, alarm) = (key.into(), By::Sandbox, self.alarm.take());
        Judged::Ask(Box::new(Want { sandbox, kind, arrival, key, name, permit, by, alarm }))
    }

    /// An answer that is kept, if its permission still is.
    fn cached(&self, key: &[u8], now: Instant) -> Option<Vec<u8>> {
        let mut inner = self.state.lock();
        let kept = inner.cache.find(key, now)?;
        if kept.generation != self.rules.generation() {
            if !self.still_allows(&kept.entry.permit) {
                inner.cache.remove(key);
                return None;
            }
            kept.generation = self.rules.generation();
        }
        let entry = kept.entry.clone();
        let due = match self.is_alarming() {
            true => Some(kept.fold.end(now)),
            false => kept.fold.count(self.filter.fold, now),
        };
        drop(inner);
        if let Some(count) = due {
            self.record_given(&entry, count - 1);
        }
        Some(given(&self.query, &entry, now, self.arrived.carrier))
    }

    /// Whether the rules of now give the permit that an answer was asked by.
    fn still_allows(&self, given: &Permit) -> bool {
        match self.rules.decide(&self.sandbox, given.facts()) {
            Decision::Allow(permit) => !permit.lookup().strict_cname && permit.same_terms(given),
            Decision::Deny(_) => false,
        }
    }

    fn record_given(&self, entry: &Entry, folded: u64) {
        let (verdict, outcome) = self.filter.told(self.rules, entry, folded);
        self.write(verdict, Some(outcome));
    }

    /// `localhost` is the sandbox's own, and never asked for elsewhere (RFC 6761, 6.3).
    fn own_host(&self, name: &DomainName) -> Option<Vec<u8>> {
        let kind = self.query.kind;
        let cleaned = if name.is_within("localhost") {
            let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
            Cleaned::of_own(kind, &loopback, TTL_CEILING)
        } else if name.is_within("127.in-addr.arpa") {
            let mut cleaned = Cleaned::of_own(kind, &[], TTL_CEILING);
            if kind == PTR {
                cleaned.section.push(PTR, TTL_CEILING, b"\x09localhost\x00");
            }
            cleaned
        } else {
            return None;
        };
        self.told_here(&cleaned);
        Some(self.query.answer(cleaned.rcode, &cleaned.section, 0, None, self.arrived.carrier))
    }

    /// Records an answer that no rule need allow.
    fn told_here(&self, cleaned: &Cleaned) {
        self.filter.tally.here.increment(1);
        if self.is_recorded(Fate::Answered) {
            let verdict = record::answered_here(self.filter.policy(self.rules));
            let ending = audit::Ending::Completed;
            self.write(verdict, Some(crate::clean::outcome(cleaned.rcode, &cleaned.told, ending)));
        }
    }

    /// The name of an address that the sandbox was given, where the operator wants that answered.
    fn reverse(&self, name: &DomainName) -> Option<Vec<u8>> {
        if self.query.kind != PTR || self.filter.reverse == Reverse::Off {
            return None;
        }
        let address = reversed(name)?;
        let mut inner = self.state.lock();
        inner.refresh(self.rules, &self.sandbox);
        let known = inner.name_of(address)?;
        drop(inner);
        let mut cleaned = Cleaned::of_own(PTR, &[], TTL_FLOOR);
        let wire = key_of(&known, PTR);
        cleaned.section.push(PTR, TTL_FLOOR, wire.get(..wire.len() - 2)?);
        self.told_here(&cleaned);
        Some(self.query.answer(cleaned.rcode, &cleaned.section, 0, None, self.arrived.carrier))
    }

    /// A query of our own that a resolver sent back: it is asked nowhere again.
    fn looped(&self) -> Judged {
        if self.state.lock().is_due(record::LOOP.0, Instant::now()) {
            self.alarm.set(Some(record::looped()));
        }
        self.refuse(Reason::ResolverUnreachable)
    }

    /// A name for raw TCP: an address that stands for it, and no other way to reach it.
    fn synthetic(&self, asked: &Asked<'_>, key: &[u8], now: Instant) -> Judged {
        let address = self.state.lock().synthetic.address_of(asked.name);
        match address {
            Some(address) => {
                let cleaned = Cleaned::of_own(asked.kind, &[IpAddr::V4(address)], TTL_SYNTHETIC);
                self.say(asked, cleaned, key, now)
            }
            None => self.refuse_by(Reason::NoAddress, Some(asked.permit)),
        }
    }

    /// Gives an answer that nobody was asked for, and keeps it.
    fn say(&self, asked: &Asked<'_>, cleaned: Cleaned, key: &[u8], born: Instant) -> Judged {
        if let (true, Some(reason)) = (cleaned.section.is_empty(), cleaned.withheld) {
            return self.refuse_by(reason, Some(asked.permit));
        }
        self.filter.tally.here.increment(1);
        let now = Instant::now();
        let entry = Arc::new(entry_of(asked, cleaned, born, None));
        let mut inner = self.state.lock();
        inner.keep(key, &entry, self.filter.reverse, now);
        let due =
            inner.cache.find(key, now).and_then(|kept| kept.fold.count(self.filter.fold, now));
        drop(inner);
        if let Some(count) = due {
            self.record_given(&entry, count - 1);
        }
        Judged::Answer(given(&self.query, &entry, now, self.arrived.carrier))
    }

    fn refuse(&self, reason: Reason) -> Judged {
        self.refuse_by(reason, None)
    }

    /// A refusal that no rule made.
    fn refuse_by(&self, reason: Reason, permit: Option<&Permit>) -> Judged {
        if self.is_recorded(Fate::Refused(reason)) {
            let verdict = record::refused(reason, permit, self.filter.policy(self.rules));
            self.write(verdict, None);
        }
        Judged::Answer(self.filter.refusal(&self.query, reason, self.arrived.carrier))
    }

    fn deny(&self, denial: &Denial, name: &DomainName) -> Judged {
        let now = Instant::now();
        let mut inner = self.state.lock();
        inner.watch.denied(name.as_str(), now);
        if denial.reason == Reason::DnsTypeNotAllowed {
            inner.watch.odd_type(now);
        }
        let score = inner.watch.score();
        let alarm = score.0 >= ALARM && inner.is_due("dns_tunnel_suspected", now);
        let own = alarm || self.records(&mut inner, Fate::Refused(denial.reason));
        drop(inner);
        if own {
            let verdict = record::denied(denial, self.filter.policy(self.rules));
            let verdict = record::scored(verdict, &score);
            if alarm {
                self.alarm.set(Some(record::refused_tunnel(score)));
            }
            self.write(verdict, None);
        }
        Judged::Answer(self.filter.refusal(&self.query, denial.reason, self.arrived.carrier))
    }

    /// Whether what sends nothing gets a record of its own; it is counted if not.
    fn is_recorded(&self, fate: Fate) -> bool {
        self.records(&mut self.state.lock(), fate)
    }

    fn records(&self, inner: &mut Inner, fate: Fate) -> bool {
        self.is_alarming()
            || inner.records(self.filter.fold, fate, || (self.query.shown(), self.query.kind))
    }

    fn is_alarming(&self) -> bool {
        let alarm = self.alarm.take();
        let alarming = alarm.is_some();
        self.alarm.set(alarm);
        alarming
    }

    /// Writes the record of what was answered or, without an outcome, refused; nobody waits for it.
    fn write(&self, verdict: Verdict, outcome: Option<Outcome>) {
        let (record, verdict) = (self.open(), record::aimed(verdict, self.arrived));
        match self.alarm.take() {
            None => close(record, verdict, outcome),
            Some(finding) => drop(tokio::spawn(async move {
                record::tell(&record, &finding).await;
                close(record, record::alert(verdict), outcome);
            })),
        }
    }

    fn open(&self) -> audit::OpenRecord {
        let mut record = self.filter.log.open_record(record::arrival(self.arrived));
        record.sandbox(self.state.lock().subject.clone());
        record.facts(record::facts(&self.query.shown(), self.query.kind));
        record
    }
}

fn close(record: audit::OpenRecord, verdict: Verdict, outcome: Option<Outcome>) {
    match outcome {
        Some(outcome) => record.answered(verdict, &outcome),
        None => record.denied(verdict),
    }
}

/// The finding of a query that was sent elsewhere, at most one in a while.
fn bypass(state: &State, arrived: &Arrived) -> Option<Finding> {
    let sent_elsewhere = arrived.toward == Toward::Elsewhere;
    let due = sent_elsewhere && state.lock().is_due(record::BYPASS.0, Instant::now());
    due.then(|| record::bypass(arrived.aimed))
}

/// A cleaned answer as it is kept.
pub(crate) fn entry_of(
    asked: &Asked<'_>,
    cleaned: Cleaned,
    born: Instant,
    from: Option<SocketAddr>,
) -> Entry {
    let empty = cleaned.section.is_empty();
    let withheld = cleaned.withheld.filter(|_| empty);
    Entry {
        name: asked.name.clone(),
        kind: asked.kind,
        rcode: cleaned.rcode,
        section: cleaned.section,
        ede: withheld.map(|reason| Ede { code: Ede::FILTERED, text: reason.code() }),
        found: cleaned.found,
        told: cleaned.told,
        born,
        expires: born + std::time::Duration::from_secs(u64::from(cleaned.ttl)),
        permit: asked.permit.clone(),
        from,
    }
}

/// The key of a name and type.
pub(crate) fn key(name: &DomainName, kind: QueryType) -> Box<[u8]> {
    key_of(name, kind).into()
}
