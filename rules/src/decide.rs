//! `RuleSet::decide`: the only place that decides (P3). DNS, CONNECT, TLS, HTTP and memory all end here.
//!
//! In order: the names agree, no rule denies, the sandbox's own layer allows, the base allows; then `permit`
//! says how.

use std::cmp::Reverse;
use std::net::IpAddr;

use crate::agree::agreed_host;
use crate::decision::{Decision, Denial, Layer, Permit, RuleRef};
use crate::explain::{Near, Why};
use crate::facts::{Facts, MemoryFacts, Protocol, QueryType, RequestFacts, Scheme};
use crate::load::GRANTS;
use crate::memory;
use crate::name::Host;
use crate::network::{forbidden, forms};
use crate::path::{CanonicalPath, Specificity};
use crate::policy::{By, Match, Policy, Rule, Verdict, matching};
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

    /// Asks again what `permit` was given for, after the rules have changed: it must still be allowed, be
    /// treated alike, and lead to where it was dialled.
    pub fn decide_again(&self, permit: &Permit, dialled: Option<IpAddr>) -> Decision {
        let Some(sandbox) = self.sandboxes.get(permit.sandbox()) else {
            return Decision::Deny(Box::new(self.plain(Reason::UnknownSandbox)));
        };
        let fresh = match self.decide(sandbox, permit.facts()) {
            Decision::Allow(fresh) => fresh,
            Decision::Deny(denial) if self.has_ended(permit) => {
                return Decision::Deny(Box::new(Denial { reason: Reason::GrantEnded, ..*denial }));
            }
            denied @ Decision::Deny(_) => return denied,
        };
        if fresh.how() != permit.how() {
            let denial =
                Denial { rule: Some(fresh.rule().clone()), ..self.plain(Reason::TreatmentChanged) };
            return Decision::Deny(Box::new(denial));
        }
        match dialled.map(|address| self.admit(&fresh, &[address])) {
            Some(Err(denial)) => Decision::Deny(denial),
            Some(Ok(_)) | None => Decision::Allow(fresh),
        }
    }

    /// Whether a permit was given by a grant that is no more.
    fn has_ended(&self, permit: &Permit) -> bool {
        let rule = permit.rule();
        let granted =
            self.layers.get(permit.sandbox()).into_iter().flat_map(|layers| {
                layers.sandbox.iter().filter(|policy| policy.name == rule.policy)
            });
        rule.policy.as_str() == GRANTS
            && !granted.flat_map(|policy| &policy.rules).any(|one| one.name == rule.rule)
    }

    /// Every allow and memory rule of the sandbox's own layer that names the host, and why each does not decide.
    pub(crate) fn considered(&self, sandbox: &SandboxRef, facts: &Facts) -> Vec<Near> {
        let (Some(layers), Ok(host)) = (self.layers.get(&sandbox.id), agreed_host(facts)) else {
            return Vec::new();
        };
        let Ok(attempt) = Attempt::new(sandbox, layers, facts, &host) else { return Vec::new() };
        if self.is_closed() {
            return Vec::new(); // no rule had a say
        }
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
        if self.is_closed() {
            return Err(Reason::PolicyInvalid.into());
        }
        let layers = self.layers.get(&sandbox.id).ok_or(Reason::UnknownSandbox)?;
        let current = self.sandboxes.get(&sandbox.id).ok_or(Reason::UnknownSandbox)?;
        if self.ended.contains(&sandbox.id) {
            return Err(Reason::SandboxEnded.into());
        }
        let host = agreed_host(facts)?;
        let attempt = Attempt::new(current, layers, facts, &host)?;
        attempt.refuse_denied()?;
        attempt.refuse_unguarded()?;
        attempt.permit(self.generation, &attempt.standing()?)
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
    pub(crate) fn by(reason: Reason, layer: Layer, matched: &Match<'_>) -> Self {
        Refused { reason, rule: Some(rule_ref(matched, layer)), layer }
    }
}

/// One attempt, and everything it is judged by.
pub(crate) struct Attempt<'a> {
    pub(crate) sandbox: &'a Sandbox,
    pub(crate) layers: &'a Layers,
    pub(crate) facts: &'a Facts,
    pub(crate) host: &'a Host,
    pub(crate) port: Option<u16>,
    pub(crate) ask: Ask<'a>,
    /// The special-use zone the host lies in: only a pattern within it counts.
    zone: Option<&'static str>,
    /// The rules of the sandbox's own layer that name the host.
    pub(crate) own: Vec<Match<'a>>,
    /// The rules of the base that name the host.
    pub(crate) floor: Vec<Match<'a>>,
}

/// What is asked, stage by stage; a later stage knows more.
#[derive(Clone, Copy)]
pub(crate) enum Ask<'a> {
    Connect(&'a Protocol),
    Memory(&'a MemoryFacts),
    Name(QueryType),
    Request(&'a RequestFacts),
}

/// The rules that let an attempt pass, the most specific of each layer first.
pub(crate) struct Standing<'a> {
    pub(crate) own: Vec<Match<'a>>,
    pub(crate) base: Floor<'a>,
}

/// What of the base lets an attempt pass.
pub(crate) enum Floor<'a> {
    Rules(Vec<Match<'a>>),
    Tier(Tier),
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
        match (self.host, self.ask.request()) {
            (Host::Address(address), _)
                if denies_address(self.layers, *address, self.port).is_some() =>
            {
                Err(Reason::DeniedByRule.into())
            }
            (Host::Address(_) | Host::Name(_), _) => Ok(()),
        }
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
            Some(request) => denies(rule, request),
        }
    }

    /// A memory service is only spoken to through its guard, whatever else names its host and port.
    fn refuse_unguarded(&self) -> Result<(), Refused> {
        let guarded = self.guard().filter(|_| matches!(self.ask, Ask::Request(_)));
        guarded.map_or(Ok(()), |matched| {
            Err(Refused::by(Reason::MemoryOperation, Layer::Sandbox, matched))
        })
    }

    /// The memory rule, of whichever layer, that holds the host and port.
    fn guard(&self) -> Option<&Match<'a>> {
        let guards =
            |matched: &&Match<'_>| matched.rule.memory().is_some() && self.is_here(matched);
        self.own.iter().chain(&self.floor).find(guards)
    }

    /// Whether a rule is for the port of this attempt.
    pub(crate) fn is_here(&self, matched: &Match<'_>) -> bool {
        self.port.is_some_and(|port| matched.has_port(port))
    }

    /// The rules of both layers that allow the attempt. For a look-up the rules of a layer add up; otherwise
    /// the most specific acts, and the base must let that very rule pass.
    fn standing(&self) -> Result<Standing<'a>, Refused> {
        let mut own = self.fitting(Layer::Sandbox)?;
        if !matches!(self.ask, Ask::Name(_)) {
            own.truncate(1);
        }
        let mut refused = None;
        let mut base = None;
        own.retain(|matched| match self.floor(matched) {
            Ok(floor) => {
                base.get_or_insert(floor);
                true
            }
            Err(error) => {
                refused.get_or_insert(error);
                false
            }
        });
        match base {
            Some(base) => Ok(Standing { own, base }),
            None => Err(refused.unwrap_or_else(|| Reason::BaseForbids.into())),
        }
    }

    /// The rules of a layer that allow the attempt, the most specific first; or the nearest that does not.
    fn fitting(&self, layer: Layer) -> Result<Vec<Match<'a>>, Refused> {
        let mut fitting: Vec<(Rank, Match<'a>)> = Vec::new();
        let mut nearest: Option<(Miss, Match<'a>)> = None;
        for matched in
            self.named_by(layer).iter().filter(|matched| !matched.rule.is_deny()).copied()
        {
            match self.fits(&matched, layer) {
                Ok(path) => fitting.push((Rank::of(&matched, path), matched)),
                Err(miss) if nearest.as_ref().is_none_or(|(other, _)| miss > *other) => {
                    nearest = Some((miss, matched));
                }
                Err(_) => {}
            }
        }
        // Stable: of rules that rank alike the first in the file, and the first policy's, acts.
        fitting.sort_by_key(|(rank, _)| Reverse(*rank));
        match (fitting.is_empty(), nearest) {
            (false, _) => Ok(fitting.into_iter().map(|(_, matched)| matched).collect()),
            (true, Some((miss, matched))) => Err(Refused::by(miss.reason, layer, &matched)),
            (true, None) => Err(self.unlisted().into()),
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
        if self.port.is_some() && !self.is_here(matched) {
            return Err(miss(3, Reason::PortNotListed));
        }
        let nothing = |()| Specificity::default();
        match self.ask {
            Ask::Connect(protocol) => self.speaks(matched.rule, protocol, layer).map(nothing),
            Ask::Name(query) => asks(matched.rule, query).map(nothing),
            Ask::Request(request) => serves(matched.rule, request, layer),
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

    /// Where a memory rule holds the host only such a rule opens it, and only to TLS.
    fn speaks(&self, rule: &Rule, protocol: &Protocol, layer: Layer) -> Result<(), Miss> {
        let unguarded =
            rule.memory().is_none() && layer == Layer::Sandbox && self.guard().is_some();
        match (protocol, self.port) {
            _ if unguarded => Err(miss(4, Reason::MemoryOperation)),
            (Protocol::Http { .. } | Protocol::Raw, _) if rule.memory().is_some() => {
                Err(miss(4, Reason::WrongProtocol))
            }
            _ if rule.is_raw() => Ok(()),
            (Protocol::Raw, _) => Err(miss(4, Reason::RawTcpNotAllowed)),
            (Protocol::Http { .. }, Some(443)) | (Protocol::Tls { .. }, Some(80)) => {
                Err(miss(4, Reason::WrongProtocol))
            }
            (Protocol::Http { .. } | Protocol::Tls { .. }, _) => Ok(()),
        }
    }

    /// In the sandbox's layer only a memory rule opens a memory service; a base may do with a plain one.
    fn remembers(
        &self,
        rule: &Rule,
        facts: &MemoryFacts,
        layer: Layer,
    ) -> Result<Specificity, Miss> {
        match (&rule.verdict, layer, facts.request.scheme) {
            (_, _, Scheme::Http) => Err(miss(4, Reason::WrongProtocol)),
            (Verdict::Memory(terms), ..) => memory::judge(self.sandbox, terms, facts)
                .map(|()| Specificity::default())
                .map_err(|reason| miss(7, reason)),
            (Verdict::Allow(_), Layer::Base, _) => serves(rule, &facts.request, layer),
            (Verdict::Allow(_) | Verdict::Deny, ..) => Err(miss(4, Reason::MemoryOperation)),
        }
    }

    /// What of the base lets `own` pass.
    fn floor(&self, own: &Match<'_>) -> Result<Floor<'a>, Refused> {
        let forbids = || Refused::by(Reason::BaseForbids, Layer::Base, own);
        match &self.layers.base {
            Base::Tier(tier) => {
                self.tier_allows(*tier, own).then_some(Floor::Tier(*tier)).ok_or_else(forbids)
            }
            Base::Policy(_) => {
                let rules = self.fitting(Layer::Base).map_err(in_base)?;
                let raw = matches!(self.ask, Ask::Connect(_)) && own.rule.is_raw();
                match rules.first() {
                    Some(first) if raw && !first.rule.is_raw() => {
                        Err(Refused::by(Reason::BaseForbids, Layer::Base, first))
                    }
                    _ => Ok(Floor::Rules(rules)),
                }
            }
        }
    }

    fn tier_allows(&self, tier: Tier, own: &Match<'_>) -> bool {
        let public = match self.host {
            Host::Address(address) => forbidden(*address).is_none(),
            Host::Name(_) => self.zone.is_none(),
        };
        match tier {
            Tier::System => true,
            Tier::Untrusted => false,
            Tier::User => public && !own.rule.is_raw(),
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

/// What settles which of several rules acts: memory holds its host, then the most specific host, then path. A grant
/// acts only where no rule of a policy does: a rule's budgets, credential and inspection hold whatever is granted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    memory: bool,
    lasting: bool,
    host: (usize, bool, bool),
    path: Specificity,
}

impl Rank {
    fn of(matched: &Match<'_>, path: Specificity) -> Self {
        let (rule, policy) = (matched.rule, matched.policy);
        let (memory, lasting) = (rule.memory().is_some(), policy.name.as_str() != GRANTS);
        Rank { memory, lasting, host: matched.specificity(), path }
    }
}

/// What is merely not in the base's rules is the base's refusal: no edit of the sandbox's policies helps.
fn in_base(refused: Refused) -> Refused {
    let own_fault = matches!(
        refused.reason,
        Reason::AmbiguousPath
            | Reason::BankMissing
            | Reason::ForeignBank
            | Reason::ForeignEnvironment
            | Reason::IdentityAbsent
            | Reason::IdentityInvalid
            | Reason::IdentityMismatch
            | Reason::IdentityStale
            | Reason::IdentityUnset
    );
    let reason = if own_fault { refused.reason } else { Reason::BaseForbids };
    Refused { reason, layer: Layer::Base, ..refused }
}

fn asks(rule: &Rule, query: QueryType) -> Result<(), Miss> {
    let allowed = rule.allow().map_or(&QueryType::DEFAULT[..], |terms| &terms.dns_types);
    if allowed.contains(&query) { Ok(()) } else { Err(miss(2, Reason::DnsTypeNotAllowed)) }
}

/// Raw TCP carries no requests to judge, but a base that allows any bytes allows these.
fn serves(rule: &Rule, request: &RequestFacts, layer: Layer) -> Result<Specificity, Miss> {
    match (request.scheme, request.port, layer) {
        _ if rule.memory().is_some() => Err(miss(4, Reason::MemoryOperation)),
        (Scheme::Http, 443, _) | (Scheme::Https, 80, _) => Err(miss(4, Reason::WrongProtocol)),
        (.., Layer::Sandbox) if rule.is_raw() => Err(miss(4, Reason::WrongProtocol)),
        _ => filter(rule, request),
    }
}

/// The method and path of a request against a rule's filters; an absent filter does not filter.
pub(crate) fn filter(rule: &Rule, request: &RequestFacts) -> Result<Specificity, Miss> {
    if rule.methods().is_some_and(|methods| !methods.contains(&request.method)) {
        return Err(miss(5, Reason::MethodNotAllowed));
    }
    let Some(paths) = rule.paths() else { return Ok(Specificity::default()) };
    let everything = paths.iter().any(|pattern| pattern.is_everything());
    let Ok(path) = CanonicalPath::parse(&request.path) else {
        let ambiguous = miss(6, Reason::AmbiguousPath);
        return everything.then(Specificity::default).ok_or(ambiguous);
    };
    let matching = paths.iter().filter(|pattern| pattern.matches(&path));
    matching.map(|pattern| pattern.specificity()).max().ok_or(miss(6, Reason::PathNotAllowed))
}

/// Why a deny rule refuses a request, if it does. A path with a slash at its end is denied with the one without.
fn denies(rule: &Rule, request: &RequestFacts) -> Option<Reason> {
    let trimmed = || CanonicalPath::parse(&request.path).ok().and_then(|path| path.without_slash());
    match filter(rule, request).map_err(|miss| miss.reason) {
        Ok(_) => Some(Reason::DeniedByRule),
        Err(Reason::AmbiguousPath) => Some(Reason::AmbiguousPath),
        Err(Reason::PathNotAllowed) => {
            let path = trimmed()?;
            let patterns = rule.paths().unwrap_or(&[]);
            patterns.iter().any(|pattern| pattern.matches(&path)).then_some(Reason::DeniedByRule)
        }
        Err(_) => None,
    }
}

/// The policy that denies an address whole, also when it hides inside another; whatever name led to it.
pub(crate) fn denies_address(
    layers: &Layers,
    address: IpAddr,
    port: Option<u16>,
) -> Option<&Policy> {
    let denied = |form: IpAddr, policy: &std::sync::Arc<Policy>| {
        matching(policy, &Host::Address(form)).any(|matched| {
            let here =
                port.map_or_else(|| matched.is_on_every_port(), |port| matched.has_port(port));
            matched.rule.is_deny() && !matched.rule.filters_requests() && here
        })
    };
    let policy = layers.policies().find(|policy| forms(address).any(|form| denied(form, policy)));
    policy.map(|policy| &**policy)
}

pub(crate) fn rule_ref(matched: &Match<'_>, layer: Layer) -> RuleRef {
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
