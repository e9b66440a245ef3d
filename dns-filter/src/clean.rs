//! Cleans a resolver's answer for a sandbox: one owner name, admitted addresses, nothing that bypasses the proxy. It
//! makes no queries: CNAME and other targets in an answer are never looked up, since no rule has allowed those names.
#![allow(clippy::wildcard_enum_match_arm, reason = "the codec's enums: unknown kinds are dropped")]

use std::net::{IpAddr, SocketAddr};

use audit::RecordedAnswer;
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::rdata::svcb::{Alpn, IpHint, Mandatory, SvcParamKey, SvcParamValue};
use hickory_proto::rr::rdata::{A, AAAA, SVCB};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::BinEncodable;
use rules::facts::{ConnectFacts, ConnectTarget, EchPresence, NameFacts, Protocol, QueryType};
use rules::{Decision, DomainName, Facts, Host, Permit, Reason, RuleSet, SandboxRef};

use crate::limits::{
    ADDRESSES, CNAME_HOPS, RECORDS, TTL_CEILING, TTL_FLOOR, TTL_FLOOR_CHARGED, TTL_NEGATIVE,
};
use crate::message::{AnswerSection, Rcode};

/// An allowed query: name, type, sandbox and permit.
#[derive(Clone, Copy, Debug)]
pub struct PermittedQuery<'a> {
    pub rules: &'a RuleSet,
    pub sandbox: &'a SandboxRef,
    pub permit: &'a Permit,
    pub name: &'a DomainName,
    pub kind: QueryType,
}

impl PermittedQuery<'_> {
    /// Returns the shortest TTL. It is longer below a wildcard, where every query is charged.
    fn ttl_floor(&self) -> u32 {
        match self.permit.lookup().chosen_octets {
            0 => TTL_FLOOR,
            _ => TTL_FLOOR_CHARGED,
        }
    }
}

/// A cleaned answer, safe to give to the sandbox.
#[derive(Clone, Debug)]
pub struct CleanAnswer {
    pub rcode: Rcode,
    pub section: AnswerSection,
    /// How long it may be cached, in seconds.
    pub ttl: u32,
    /// Every address in the resolver's answer, including those withheld from the sandbox.
    pub found: Vec<IpAddr>,
    /// Why a record was withheld, if one was.
    pub withheld: Option<Reason>,
    /// The records in `section`, for the log.
    pub told: Vec<RecordedAnswer>,
}

/// Cleans the answer to a query.
///
/// # Errors
///
/// Returns [`Reason::DnsAnswer`] for an unusable answer, and [`Reason::ResolverUnreachable`] if the resolver reports a
/// failure.
pub fn clean(query: &PermittedQuery<'_>, message: &Message) -> Result<CleanAnswer, Reason> {
    match message.metadata.response_code {
        ResponseCode::NoError => {}
        ResponseCode::NXDomain => return Ok(negative_answer(query, Rcode::NXDOMAIN, message)),
        _ => return Err(Reason::ResolverUnreachable),
    }
    let (owner, hops) = follow_cnames(query, message)?;
    let kind = RecordType::from(query.kind.0);
    let mut answer = CleanAnswer { ttl: TTL_CEILING, ..empty_answer(Rcode::NOERROR) };
    let mut seen = false;
    for record in message.answers.iter().filter(|record| record.record_type() == kind) {
        if record.name != owner {
            continue; // not the end of the CNAME chain
        }
        seen = true;
        if usize::from(answer.section.count()) < RECORDS {
            answer.add_record(query, record);
        }
    }
    if !seen {
        return no_data_answer(query, message, hops);
    }
    answer.ttl = answer.ttl.clamp(query.ttl_floor(), TTL_CEILING);
    Ok(answer)
}

/// Returns the name at the end of the answer's CNAME chain, and the length of the chain.
fn follow_cnames(query: &PermittedQuery<'_>, message: &Message) -> Result<(Name, usize), Reason> {
    let mut owner = Name::from_ascii(format!("{}.", query.name)).map_err(|_| Reason::DnsAnswer)?;
    if query.kind.0 == u16::from(RecordType::CNAME) {
        return Ok((owner, 0));
    }
    for hops in 0..=CNAME_HOPS {
        let next = message.answers.iter().find_map(|record| match &record.data {
            RData::CNAME(target) if record.name == owner => Some(&target.0),
            _ => None,
        });
        let Some(target) = next else { return Ok((owner, hops)) };
        let name = host_name(target).ok_or(Reason::DnsAnswer)?;
        if query.permit.lookup().strict_cname {
            query.check_target(&name)?;
        }
        owner = target.clone();
    }
    Err(Reason::DnsAnswer) // a loop, or too long
}

/// Builds the answer for a name without records of the type. A CNAME chain that the resolver did not complete is an
/// error: we do not follow it.
fn no_data_answer(query: &PermittedQuery<'_>, message: &Message, hops: usize) -> Result<CleanAnswer, Reason> {
    let vouched = message.authorities.iter().any(|record| record.record_type() == RecordType::SOA);
    // Some forwarders leave out the SOA of a cached answer; for types other than A, a name without records is common.
    if hops > 0 && !vouched && query.kind == QueryType::A {
        return Err(Reason::DnsAnswer);
    }
    Ok(negative_answer(query, Rcode::NOERROR, message))
}

fn negative_answer(query: &PermittedQuery<'_>, rcode: Rcode, message: &Message) -> CleanAnswer {
    let soa = message.authorities.iter().find_map(|record| match &record.data {
        RData::SOA(soa) => Some(record.ttl.min(soa.minimum)),
        _ => None,
    });
    let ttl = soa.unwrap_or(TTL_FLOOR).clamp(1, TTL_NEGATIVE);
    // Charged names: cache a negative answer as long as a positive one.
    let ttl = if query.ttl_floor() > TTL_FLOOR { query.ttl_floor() } else { ttl };
    CleanAnswer { ttl, ..empty_answer(rcode) }
}

fn empty_answer(rcode: Rcode) -> CleanAnswer {
    let (section, found, told) = (AnswerSection::default(), Vec::new(), Vec::new());
    CleanAnswer { rcode, section, ttl: 0, found, withheld: None, told }
}

impl CleanAnswer {
    /// Builds an answer from configured addresses, which the rules must admit like any other.
    pub fn from_addresses(query: &PermittedQuery<'_>, addresses: &[IpAddr], ttl: u32) -> Self {
        let mut answer = CleanAnswer { ttl, ..empty_answer(Rcode::NOERROR) };
        for address in addresses.iter().take(ADDRESSES) {
            answer.add_address(query, *address, ttl);
        }
        answer
    }

    /// Builds an answer from addresses that need no rule: synthetic ones, and the sandbox's loopback.
    pub fn from_own_addresses(kind: QueryType, addresses: &[IpAddr], ttl: u32) -> Self {
        let mut answer = CleanAnswer { ttl, ..empty_answer(Rcode::NOERROR) };
        addresses.iter().filter(|address| matches_type(address, kind)).for_each(|address| {
            answer.push_answer(kind, ttl, &address_octets(*address), address.to_string());
        });
        answer
    }

    fn add_record(&mut self, query: &PermittedQuery<'_>, record: &Record) {
        let ttl = record.ttl.clamp(query.ttl_floor(), TTL_CEILING);
        self.ttl = self.ttl.min(ttl);
        match &record.data {
            RData::A(address) => self.add_address(query, IpAddr::V4(address.0), ttl),
            RData::AAAA(address) => self.add_address(query, IpAddr::V6(address.0), ttl),
            RData::HTTPS(service) => self.add_service(query, &service.0, ttl),
            RData::SVCB(service) => self.add_service(query, service, ttl),
            RData::CNAME(target) => self.add_target(query, &target.0, &record.data, ttl),
            RData::MX(mx) => self.add_target(query, &mx.exchange, &record.data, ttl),
            RData::SRV(srv) => self.add_target(query, &srv.target, &record.data, ttl),
            RData::TXT(_) | RData::CAA(_) => self.add_data(query, &record.data, ttl),
            _ => self.withheld = Some(Reason::DnsAnswer), // no policy can allow this type
        }
    }

    fn add_address(&mut self, query: &PermittedQuery<'_>, address: IpAddr, ttl: u32) {
        if self.found.len() >= ADDRESSES || !matches_type(&address, query.kind) {
            return;
        }
        self.found.push(address);
        match query.rules.admit(query.permit, &[address]) {
            Ok(_) => self.push_answer(query.kind, ttl, &address_octets(address), address.to_string()),
            Err(denial) => self.withheld = Some(denial.reason),
        }
    }

    /// Adds a record with a target name. With `strict_cname` the rules must allow the target; a target that is not a
    /// host name is withheld.
    fn add_target(&mut self, query: &PermittedQuery<'_>, target: &Name, data: &RData, ttl: u32) {
        let Some(name) = host_name(target) else {
            self.withheld = Some(Reason::DnsAnswer);
            return;
        };
        match query.permit.lookup().strict_cname.then(|| query.check_target(&name)) {
            Some(Err(reason)) => self.withheld = Some(reason),
            Some(Ok(())) | None => self.add_data(query, data, ttl),
        }
    }

    fn add_data(&mut self, query: &PermittedQuery<'_>, data: &RData, ttl: u32) {
        if let Ok(bytes) = data.to_bytes() {
            self.push_answer(query.kind, ttl, &bytes, data.to_string());
        }
    }

    fn add_service(&mut self, query: &PermittedQuery<'_>, service: &SVCB, ttl: u32) {
        match query.clean_service(service).map(|service| (service.to_bytes(), service)) {
            Some((Ok(bytes), service)) => self.push_answer(query.kind, ttl, &bytes, service.to_string()),
            Some((Err(_), _)) | None => self.withheld = Some(Reason::DnsAnswer),
        }
    }

    fn push_answer(&mut self, kind: QueryType, ttl: u32, data: &[u8], shown: String) {
        self.section.push(kind, ttl, data);
        self.told.push(RecordedAnswer { kind: kind.to_string().into(), rdata: shown.into(), ttl });
    }
}

impl PermittedQuery<'_> {
    fn check_target(&self, target: &DomainName) -> Result<(), Reason> {
        let facts = Facts::Name(NameFacts { name: target.clone(), query: self.kind });
        match self.rules.decide(self.sandbox, &facts) {
            Decision::Allow(_) => Ok(()),
            Decision::Deny(denial) => Err(denial.reason),
        }
    }

    /// Removes the parameters of an HTTPS or SVCB record that would bypass the proxy; `None` if it is unusable without
    /// them.
    fn clean_service(&self, service: &SVCB) -> Option<SVCB> {
        let own = service.target_name.is_root()
            || host_name(&service.target_name).is_some_and(|target| target == *self.name);
        if service.svc_priority == 0 || !own {
            return None; // an alias to another name: the client falls back to the name's addresses
        }
        let params: Vec<_> =
            service.svc_params.iter().filter_map(|(key, value)| self.clean_param(*key, value)).collect();
        let mandatory = service.svc_params.iter().find_map(|(_, value)| match value {
            SvcParamValue::Mandatory(Mandatory(keys)) => Some(keys),
            _ => None,
        });
        let has = |wanted: &SvcParamKey| params.iter().any(|(key, _)| key == wanted);
        let whole = mandatory.is_none_or(|keys| keys.iter().all(has));
        let port = service.svc_params.iter().find_map(|(_, value)| match value {
            SvcParamValue::Port(port) => Some(*port),
            _ => None,
        });
        let reachable = port.is_none_or(|port| self.may_reach_port(port));
        (whole && reachable).then(|| SVCB::new(service.svc_priority, Name::root(), params))
    }

    fn clean_param(&self, key: SvcParamKey, value: &SvcParamValue) -> Option<(SvcParamKey, SvcParamValue)> {
        let value = match value {
            SvcParamValue::Alpn(Alpn(names)) => {
                let tcp = |name: &&String| matches!(name.as_str(), "h2" | "http/1.1");
                let names: Vec<String> = names.iter().filter(tcp).cloned().collect();
                (!names.is_empty()).then_some(SvcParamValue::Alpn(Alpn(names)))?
            }
            SvcParamValue::Ipv4Hint(IpHint(hints)) => {
                let admitted = |hint: &&A| self.admits(IpAddr::V4(hint.0));
                let hints: Vec<A> = hints.iter().filter(admitted).take(ADDRESSES).copied().collect();
                (!hints.is_empty()).then_some(SvcParamValue::Ipv4Hint(IpHint(hints)))?
            }
            SvcParamValue::Ipv6Hint(IpHint(hints)) => {
                let admitted = |hint: &&AAAA| self.admits(IpAddr::V6(hint.0));
                let hints: Vec<AAAA> = hints.iter().filter(admitted).take(ADDRESSES).copied().collect();
                (!hints.is_empty()).then_some(SvcParamValue::Ipv6Hint(IpHint(hints)))?
            }
            SvcParamValue::Port(_) | SvcParamValue::NoDefaultAlpn => value.clone(),
            // ECH would hide the name from the proxy; `dohpath` and unknown keys could bypass it.
            SvcParamValue::EchConfigList(_) | SvcParamValue::Mandatory(_) | SvcParamValue::Unknown(_) => {
                return None;
            }
        };
        Some((key, value))
    }

    fn admits(&self, address: IpAddr) -> bool {
        self.rules.admit(self.permit, &[address]).is_ok()
    }

    /// Returns whether the sandbox may connect to the name on a port; 443 is always left to the proxy to decide.
    fn may_reach_port(&self, port: u16) -> bool {
        let host = Host::Name(self.name.clone());
        let protocol = Protocol::Tls { sni: Some(host.clone()), ech: EchPresence::Absent };
        let facts = ConnectFacts { target: ConnectTarget::Named(host), port, protocol };
        port == 443 || matches!(self.rules.decide(self.sandbox, &Facts::Connect(facts)), Decision::Allow(_))
    }
}

/// Converts a name in an answer; `None` if it is not a valid host name.
fn host_name(name: &Name) -> Option<DomainName> {
    match name.iter().all(<[u8]>::is_ascii) {
        true => DomainName::from_labels(name.iter()).ok(),
        false => None,
    }
}

fn matches_type(address: &IpAddr, kind: QueryType) -> bool {
    match address {
        IpAddr::V4(_) => kind == QueryType::A,
        IpAddr::V6(_) => kind == QueryType::AAAA,
    }
}

fn address_octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Returns the outcome of an answer, as recorded.
pub(crate) fn answer_outcome(
    rcode: Rcode,
    told: &[RecordedAnswer],
    ending: audit::Ending,
) -> audit::AttemptOutcome {
    let rcode = u8::try_from(rcode.0).ok();
    audit::AttemptOutcome { ending, status: None, rcode, answers: told.to_vec() }
}

/// Formats a resolver's address.
pub(crate) fn display_resolver(from: Option<SocketAddr>) -> Option<String> {
    from.map(|address| address.to_string())
}
