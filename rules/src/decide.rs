//! `RuleSet::decide`: the only place that decides (P3). DNS, CONNECT, TLS, HTTP and memory all end here.
//!
//! In order: the names agree, no rule denies, the sandbox's own layer allows, the base allows; then how.

use std::sync::Arc;

use crate::agree::agreed_host;
use crate::budget::Budgets;
use crate::decision::{Admission, Decision, Denial, How, Layer, Lookup, Permit, RuleRef, Terms};
use crate::explain::{Near, Why};
use crate::facts::{
    Ech, Facts, HttpVersion, MemoryFacts, Protocol, QueryType, RequestFacts, Scheme,
};
use crate::memory;
use crate::name::Host;
use crate::network::forbidden;
use crate::path::{CanonicalPath, Specificity};
use crate::pattern::Reach;
use crate::policy::{By, Match, Rule, Tls, Verdict, matching};
use crate::reason::Reason;
use crate::ruleset::{Base, Layers, RuleSet, Tier};
use crate::sandbox::{Sandbox, SandboxRef};
use crate::special;

impl RuleSet {
    /// Decides one attempt of `sandbox`.
    ///
    /// The sandbox is looked up anew, so that one that has left the operator's file may do nothing.
    pub fn decide(&self, sandbox: &SandboxRef, facts: &Facts) -> Decision {
        match self.judge(sandbox, facts) {
            Ok(permit) => Decision::Allow(permit),
            Err(Refused { reason, rule, layer }) => {
                Decision::Deny(Box::new(Denial { rule, layer, ..self.plain(reason) }))
            }
        }
    }

    /// Asks again what `permit` was given for, after the rules have changed.
    pub fn decide_again(&self, permit: &Permit) -> Decision {
        match self.sandboxes.get(permit.sandbox()) {
            Some(sandbox) => self.decide(sandbox, permit.facts()),
            None => Decision::Deny(Box::new(self.plain(Reason::UnknownSandbox))),
        }
    }

    /// Every allow and memory rule of the sandbox's own layer that names the host, and why each does not decide.
    pub(crate) fn considered(&self, sandbox: &SandboxRef, facts: &Facts) -> Vec<Near> {
        let (Some(layers), Ok(host)) = (self.layers.get(&sandbox.id), agreed_host(facts)) else {
            return Vec::new();
        };
        let Ok(attempt) = Attempt::new(sandbox, layers, facts, &host) else { return Vec::new() };
        let near = |matched: &Match<'_>| Near {
            rule: rule_ref(matched, Layer::Sandbox),
            pattern: matched.pattern(),
            why: match attempt.fits(matched, Layer::Sandbox) {
                Ok(_) => Why::LessSpecific,
                Err(miss) => Why::Misses(miss.reason),
            },
        };
        attempt.own.iter().filter(|matched| !matched.rule.is_deny()).map(near).collect()
    }

    pub(crate) fn plain(&self, reason: Reason) -> Denial {
        let (generation, digest) = (self.generation, self.digest);
        Denial { reason, rule: None, layer: Layer::Sandbox, generation, digest, address: None }
    }

    fn judge(&self, sandbox: &SandboxRef, facts: &Facts) -> Result<Permit, Refused> {
        let layers = self.layers.get(&sandbox.id).ok_or(Reason::UnknownSandbox)?;
        let current = self.sandboxes.get(&sandbox.id).ok_or(Reason::UnknownSandbox)?;
        let host = agreed_host(facts)?;
        let attempt = Attempt::new(current, layers, facts, &host)?;
        attempt.refuse_denied()?;
        attempt.refuse_unguarded()?;
        let own = attempt.best(Layer::Sandbox)?;
        let base = attempt.base(&own)?;
        attempt.permit(self.generation, &own, base)
    }
}

/// A refusal on its way up, before it is told which rule set it was.
#[derive(Debug)]
pub(crate) struct Refused {
    reason: Reason,
    rule: Option<RuleRef>,
    layer: Layer,
}

impl From<Reason> for Refused {
    fn from(reason: Reason) -> Self {
        Refused { reason, rule: None, layer: Layer::Sandbox }
    }
}

impl Refused {
    fn by(reason: Reason, layer: Layer, matched: &Match<'_>) -> Self {
        Refused { reason, rule: Some(rule_ref(matched, layer)), layer }
    }
}

/// One attempt, and everything it is judged by.
struct Attempt<'a> {
    sandbox: &'a Sandbox,
    layers: &'a Layers,
    facts: &'a Facts,
    host: &'a Host,
    port: Option<u16>,
    ask: Ask<'a>,
    /// The special-use zone the host lies in: only a pattern within it counts.
    zone: Option<&'static str>,
    /// The rules of the sandbox's own layer that name the host.
    own: Vec<Match<'a>>,
    /// The rules of the base that name the host.
    floor: Vec<Match<'a>>,
}

/// What is asked, stage by stage; a later stage knows more.
#[derive(Clone, Copy)]
enum Ask<'a> {
    Connect(&'a Protocol),
    Memory(&'a MemoryFacts),
    Name(QueryType),
    Request(&'a RequestFacts),
}

/// Why a rule that names the host does not allow the attempt, and how near it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Miss {
    depth: u8,
    pub(crate) reason: Reason,
}

const fn miss(depth: u8, reason: Reason) -> Miss {
    Miss { depth, reason }
}

impl<'a> Attempt<'a> {
    fn new(
        sandbox: &'a Sandbox,
        layers: &'a Layers,
        facts: &'a Facts,
        host: &'a Host,
    ) -> Result<Self, Reason> {
        let (port, ask) = match facts {
            Facts::Connect(facts) => (Some(facts.port), Ask::Connect(&facts.protocol)),
            Facts::Memory(facts) => (Some(facts.request.port), Ask::Memory(facts)),
            Facts::Name(facts) => (None, Ask::Name(facts.query)),
            Facts::Request(facts) => (Some(facts.port), Ask::Request(facts)),
        };
        if host.name().is_some_and(special::is_resolver_discovery) {
            return Err(Reason::ResolverDiscovery);
        }
        if ask.request().is_some_and(|request| !request.method.is_forwardable()) {
            return Err(Reason::MethodNotAllowed);
        }
        let zone = host.name().and_then(special::zone);
        let own = layers.sandbox.iter().flat_map(|policy| matching(policy, host)).collect();
        let floor =
            layers.base_policies().iter().flat_map(|policy| matching(policy, host)).collect();
        Ok(Attempt { sandbox, layers, facts, host, port, ask, zone, own, floor })
    }

    fn named_by(&self, layer: Layer) -> &[Match<'a>] {
        match layer {
            Layer::Base => &self.floor,
            Layer::Sandbox => &self.own,
        }
    }

    /// Deny always wins, in whichever layer it stands.
    fn refuse_denied(&self) -> Result<(), Refused> {
        for layer in [Layer::Base, Layer::Sandbox] {
            for matched in self.named_by(layer) {
                if let Some(reason) = self.denied_by(matched) {
                    return Err(Refused::by(reason, layer, matched));
                }
            }
        }
        Ok(())
    }

    /// A memory service is only spoken to through its guard, whatever else names its host.
    fn refuse_unguarded(&self) -> Result<(), Refused> {
        let guards =
            |matched: &&Match<'_>| matched.rule.memory().is_some() && self.is_here(matched);
        match (self.ask, self.own.iter().find(guards)) {
            (Ask::Request(_), Some(matched)) => {
                Err(Refused::by(Reason::MemoryOperation, Layer::Sandbox, matched))
            }
            (Ask::Connect(_) | Ask::Memory(_) | Ask::Name(_) | Ask::Request(_), _) => Ok(()),
        }
    }

    /// Whether a rule is for the port of this attempt.
    fn is_here(&self, matched: &Match<'_>) -> bool {
        self.port.is_some_and(|port| matched.has_port(port))
    }

    fn denied_by(&self, matched: &Match<'_>) -> Option<Reason> {
        let rule = matched.rule;
        let here =
            self.port.map_or_else(|| matched.is_on_every_port(), |port| matched.has_port(port));
        if !rule.is_deny() || !here {
            return None;
        }
        match self.ask.request() {
            None => (!rule.filters_requests()).then_some(Reason::DeniedByRule),
            Some(request) => match filter(rule, request) {
                Ok(_) => Some(Reason::DeniedByRule),
                Err(Miss { reason: Reason::AmbiguousPath, .. }) => Some(Reason::AmbiguousPath),
                Err(_) => None,
            },
        }
    }

    /// The most specific rule of a layer that allows the attempt, or the nearest that does not.
    fn best(&self, layer: Layer) -> Result<Match<'a>, Refused> {
        let mut best: Option<(Rank, Match<'a>)> = None;
        let mut nearest: Option<(Miss, Match<'a>)> = None;
        for matched in
            self.named_by(layer).iter().filter(|matched| !matched.rule.is_deny()).copied()
        {
            match self.fits(&matched, layer) {
                Ok(path) => {
                    let rank = Rank::of(&matched, path);
                    if best.as_ref().is_none_or(|(other, _)| rank > *other) {
                        best = Some((rank, matched));
                    }
                }
                Err(miss) if nearest.as_ref().is_none_or(|(other, _)| miss > *other) => {
                    nearest = Some((miss, matched))
                }
                Err(_) => {}
            }
        }
        match (best, nearest) {
            (Some((_, matched)), _) => Ok(matched),
            (None, Some((miss, matched))) => Err(Refused::by(miss.reason, layer, &matched)),
            (None, None) => Err(Refused { layer, ..self.unlisted().into() }),
        }
    }

    fn unlisted(&self) -> Reason {
        match (self.host, self.facts) {
            (Host::Address(_), Facts::Connect(facts)) if facts.is_nameless() => Reason::NameMissing,
            (Host::Address(_), _) => Reason::AddressNotListed,
            (Host::Name(_), _) => Reason::NotListed,
        }
    }

    /// Whether a rule that names the host allows this attempt; if so, how closely its paths describe it.
    fn fits(&self, matched: &Match<'_>, layer: Layer) -> Result<Specificity, Miss> {
        self.reaches(matched)?;
        if self.port.is_some_and(|port| !matched.has_port(port)) {
            return Err(miss(3, Reason::PortNotListed));
        }
        match self.ask {
            Ask::Connect(protocol) => {
                speaks(matched.rule, protocol, self.port).map(|()| Specificity::default())
            }
            Ask::Name(query) => asks(matched.rule, query).map(|()| Specificity::default()),
            Ask::Request(request) => serves(matched.rule, request),
            Ask::Memory(facts) => self.remembers(matched.rule, facts, layer),
        }
    }

    /// Special-use zones and public resolvers are not opened by a pattern that merely happens to cover them.
    fn reaches(&self, matched: &Match<'_>) -> Result<(), Miss> {
        let (By::Host(hit), Host::Name(name)) = (matched.by, self.host) else { return Ok(()) };
        if self.zone.is_some_and(|zone| !special::opens(hit.base, zone)) {
            return Err(miss(1, Reason::SpecialName));
        }
        if special::is_hidden_resolver(name, &hit) {
            return Err(miss(1, Reason::EncryptedResolver));
        }
        Ok(())
    }

    /// In the sandbox's layer only a memory rule opens a memory service; a base may do with a plain one.
    fn remembers(
        &self,
        rule: &Rule,
        facts: &MemoryFacts,
        layer: Layer,
    ) -> Result<Specificity, Miss> {
        match (&rule.verdict, layer) {
            (Verdict::Memory(terms), _) => memory::judge(self.sandbox, terms, facts)
                .map(|()| Specificity::default())
                .map_err(|reason| miss(7, reason)),
            (Verdict::Allow(_), Layer::Base) => serves(rule, &facts.request),
            (Verdict::Allow(_) | Verdict::Deny, _) => Err(miss(4, Reason::MemoryOperation)),
        }
    }

    fn base(&self, own: &Match<'_>) -> Result<Admission, Refused> {
        match &self.layers.base {
            Base::Tier(tier) => self.tier(*tier, own),
            Base::Policy(_) => self.best(Layer::Base).map(|matched| admission(&matched)),
        }
    }

    fn tier(&self, tier: Tier, own: &Match<'_>) -> Result<Admission, Refused> {
        let public = match self.host {
            Host::Address(address) => forbidden(*address).is_none(),
            Host::Name(_) => self.zone.is_none(),
        };
        let raw = own.rule.allow().is_some_and(|terms| terms.raw_tcp);
        match tier {
            Tier::System => Ok(Admission::Any),
            Tier::User if public && !raw => Ok(Admission::Public),
            Tier::Untrusted | Tier::User => Err(Refused::by(Reason::BaseForbids, Layer::Base, own)),
        }
    }

    fn permit(&self, generation: u64, own: &Match<'a>, base: Admission) -> Result<Permit, Refused> {
        let how = self.how(own).map_err(|reason| Refused::by(reason, Layer::Sandbox, own))?;
        let terms = own.rule.allow();
        Ok(Permit(Arc::new(Terms {
            sandbox: self.sandbox.id.clone(),
            host: self.host.clone(),
            port: self.port,
            rule: rule_ref(own, Layer::Sandbox),
            generation,
            credential: terms
                .and_then(|terms| terms.credential.clone())
                .filter(|_| how == How::Forward),
            how,
            admission: [admission(own), base].into(),
            lookup: self.lookup(own),
            sandbox_budgets: self.layers.budgets(),
            rule_budgets: terms.map_or_else(Budgets::default, |terms| terms.budgets),
            may_receive_memory: terms.is_some_and(|terms| terms.may_receive_memory),
            inspect: terms.is_some_and(|terms| terms.inspect),
            facts: self.facts.clone(),
        })))
    }

    fn how(&self, own: &Match<'_>) -> Result<How, Reason> {
        match (self.ask, &own.rule.verdict) {
            (Ask::Name(_), _) => Ok(How::Resolve),
            (Ask::Connect(_), Verdict::Memory(terms)) => {
                Ok(How::Hold { profile: terms.profile.clone(), identity: terms.identity })
            }
            (Ask::Connect(_), Verdict::Allow(terms)) if terms.raw_tcp => Ok(How::Raw),
            (Ask::Connect(protocol), _) => self.opened(own, protocol),
            (Ask::Request(request), Verdict::Allow(terms)) if terms.credential.is_some() => {
                match request.scheme {
                    Scheme::Http => Err(Reason::CredentialNeedsTls),
                    Scheme::Https => Ok(How::Forward),
                }
            }
            (Ask::Memory(_) | Ask::Request(_), _) => Ok(How::Forward),
        }
    }

    /// A connection that is neither raw nor memory: looked into unless its rule tunnels and none needs requests.
    fn opened(&self, own: &Match<'_>, protocol: &Protocol) -> Result<How, Reason> {
        let Protocol::Tls { ech, .. } = protocol else { return Ok(How::Intercept) };
        if own.rule.tls() == Tls::Intercept || self.must_see_requests() {
            return Ok(How::Intercept);
        }
        let tolerated = own.rule.allow().is_some_and(|terms| terms.tolerate_ech);
        match ech {
            Ech::Present if !tolerated => Err(Reason::EchHiddenName),
            Ech::Absent | Ech::Present => Ok(How::Tunnel),
        }
    }

    fn must_see_requests(&self) -> bool {
        let needs = |matched: &Match<'_>| self.is_here(matched) && matched.rule.needs_requests();
        self.own.iter().chain(&self.floor).any(needs)
    }

    fn lookup(&self, own: &Match<'_>) -> Lookup {
        let chosen_octets = match (self.host, own.by) {
            (Host::Name(name), By::Host(hit)) if hit.reach != Reach::Exact => {
                name.as_str().len() - hit.base.len()
            }
            _ => 0,
        };
        let raw = |matched: &Match<'_>| matched.rule.allow().is_some_and(|terms| terms.raw_tcp);
        Lookup {
            chosen_octets,
            types: own
                .rule
                .allow()
                .map_or_else(|| QueryType::DEFAULT.into(), |terms| terms.dns_types.clone()),
            synthetic: self.own.iter().any(raw),
            strict_cname: own.rule.allow().is_some_and(|terms| terms.strict_cname),
        }
    }
}

impl<'a> Ask<'a> {
    fn request(&self) -> Option<&'a RequestFacts> {
        match self {
            Ask::Connect(_) | Ask::Name(_) => None,
            Ask::Memory(facts) => Some(&facts.request),
            Ask::Request(request) => Some(request),
        }
    }
}

/// What settles which of several rules acts: memory holds its host, then the most specific host, then path,
/// then the first in the file.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    memory: bool,
    host: (usize, bool, bool),
    path: Specificity,
    first: std::cmp::Reverse<u32>,
}

impl Rank {
    fn of(matched: &Match<'_>, path: Specificity) -> Self {
        Rank {
            memory: matched.rule.memory().is_some(),
            host: matched.specificity(),
            path,
            first: std::cmp::Reverse(matched.rule.line),
        }
    }
}

fn asks(rule: &Rule, query: QueryType) -> Result<(), Miss> {
    let allowed = rule.allow().map_or(&QueryType::DEFAULT[..], |terms| &terms.dns_types);
    if allowed.contains(&query) { Ok(()) } else { Err(miss(2, Reason::DnsTypeNotAllowed)) }
}

fn speaks(rule: &Rule, protocol: &Protocol, port: Option<u16>) -> Result<(), Miss> {
    if rule.allow().is_some_and(|terms| terms.raw_tcp) {
        return Ok(());
    }
    match (protocol, port) {
        (Protocol::Raw, _) => Err(miss(4, Reason::RawTcpNotAllowed)),
        (Protocol::Http { .. }, Some(443)) | (Protocol::Tls { .. }, Some(80)) => {
            Err(miss(4, Reason::WrongProtocol))
        }
        (Protocol::Http { .. } | Protocol::Tls { .. }, _) => Ok(()),
    }
}

fn serves(rule: &Rule, request: &RequestFacts) -> Result<Specificity, Miss> {
    if rule.memory().is_some() {
        return Err(miss(4, Reason::MemoryOperation));
    }
    let raw = rule.allow().is_some_and(|terms| terms.raw_tcp);
    match (request.scheme, request.port) {
        (Scheme::Http, 443) | (Scheme::Https, 80) => Err(miss(4, Reason::WrongProtocol)),
        _ if raw => Err(miss(4, Reason::WrongProtocol)),
        _ => filter(rule, request),
    }
}

/// The method and path of a request against a rule's filters; an absent filter does not filter.
pub(crate) fn filter(rule: &Rule, request: &RequestFacts) -> Result<Specificity, Miss> {
    if rule.methods().is_some_and(|methods| !methods.contains(&request.method)) {
        return Err(miss(5, Reason::MethodNotAllowed));
    }
    let Some(paths) = rule.paths() else { return Ok(Specificity::default()) };
    if paths.iter().any(|pattern| pattern.is_everything()) {
        return Ok(Specificity::default());
    }
    let path = CanonicalPath::parse(&request.path).map_err(|_| miss(6, Reason::AmbiguousPath))?;
    let matching = paths.iter().filter(|pattern| pattern.matches(&path));
    matching.map(|pattern| pattern.specificity()).max().ok_or(miss(6, Reason::PathNotAllowed))
}

fn admission(matched: &Match<'_>) -> Admission {
    match (matched.by, matched.rule.resolves_to()) {
        (By::Address(net), _) => Admission::Only([net].into()),
        (By::Host(_), []) => Admission::Public,
        (By::Host(_), nets) => Admission::Only(nets.into()),
    }
}

fn rule_ref(matched: &Match<'_>, layer: Layer) -> RuleRef {
    let (file, line) = matched.origin();
    RuleRef {
        policy: matched.policy.name.clone(),
        rule: matched.rule.name.clone(),
        layer,
        digest: matched.policy.digest,
        file,
        line,
    }
}

/// The status of an HTTP/2 name mismatch is 421, so that honest coalescing clients try again alone.
pub(crate) fn disagreement(version: HttpVersion) -> Reason {
    match version {
        HttpVersion::Http1 => Reason::NamesDisagree,
        HttpVersion::Http2 => Reason::Misdirected,
    }
}
