//! `RuleSet::decide`: the only code that decides (P3). DNS, CONNECT, TLS, HTTP and memory all call it.
//!
//! It checks in order that the names agree, that no rule denies, that the sandbox's own layer allows, and that the
//! base allows; `permit` then builds the permit.

use std::cmp::Reverse;
use std::net::IpAddr;

use crate::decision::{Decision, Denial, Permit, PolicyLayer, RuleRef};
use crate::explain::{MissCause, NearMiss};
use crate::facts::{Facts, MemoryFacts, Protocol, QueryType, RequestFacts, UrlScheme};
use crate::host_agreement::agreed_host;
use crate::load::GRANTS_POLICY;
use crate::memory;
use crate::name::Host;
use crate::network::{address_forms, forbidden_range};
use crate::policy::{MatchedEntry, Rule, RuleAction, RuleMatch, matching_rules};
use crate::reason::Reason;
use crate::ruleset::{BaseLayer, RuleSet, SandboxLayers, Tier};
use crate::sandbox::SandboxRef;
use crate::special_names;
use crate::url_path::{PathSpecificity, RequestPath};

impl RuleSet {
    /// Decides one attempt of `sandbox`.
    ///
    /// Identifies the sandbox again, so that it refuses one whose channel belongs to another by now, or that the
    /// configuration no longer has.
    pub fn decide(&self, sandbox: &SandboxRef, facts: &Facts) -> Decision {
        match self.evaluate(sandbox, facts) {
            Ok(permit) => Decision::Allow(permit),
            Err(PartialDenial { reason, rule, layer }) => {
                Decision::Deny(Box::new(Denial { rule, layer, ..self.build_denial(reason) }))
            }
        }
    }

    /// Decides the attempt of `permit` again after the rules changed: its channel must still belong to the same
    /// sandbox with the same identity, and the rules must still allow the attempt, handle it the same way, and admit
    /// the address that was dialled.
    pub fn decide_again(&self, permit: &Permit, dialled: Option<IpAddr>) -> Decision {
        let sandbox = match self.sandboxes.identify_again(permit.holder()) {
            Ok(now) if permit.holder().keeps_identity(&now) => now,
            Ok(_) => return Decision::Deny(Box::new(self.build_denial(Reason::IdentityChanged))),
            Err(reason) => return Decision::Deny(Box::new(self.build_denial(reason))),
        };
        let fresh = match self.decide(&sandbox, permit.facts()) {
            Decision::Allow(fresh) => fresh,
            Decision::Deny(denial) if self.is_grant_ended(permit) => {
                return Decision::Deny(Box::new(Denial { reason: Reason::GrantEnded, ..*denial }));
            }
            denied @ Decision::Deny(_) => return denied,
        };
        if fresh.treatment() != permit.treatment() {
            let denial =
                Denial { rule: Some(fresh.rule().clone()), ..self.build_denial(Reason::TreatmentChanged) };
            return Decision::Deny(Box::new(denial));
        }
        match dialled.map(|address| self.admit(&fresh, &[address])) {
            Some(Err(denial)) => Decision::Deny(denial),
            Some(Ok(_)) | None => Decision::Allow(fresh),
        }
    }

    /// Returns whether the permit came from a grant that has ended.
    fn is_grant_ended(&self, permit: &Permit) -> bool {
        let rule = permit.rule();
        let granted = self
            .layers
            .get(permit.sandbox())
            .into_iter()
            .flat_map(|layers| layers.sandbox.iter().filter(|policy| policy.name == rule.policy));
        rule.policy.as_str() == GRANTS_POLICY
            && !granted.flat_map(|policy| &policy.rules).any(|one| one.name == rule.rule)
    }

    /// Returns every allow and memory rule of the sandbox's own layer that names the host, with why it did not decide.
    pub(crate) fn candidate_rules(&self, sandbox: &SandboxRef, facts: &Facts) -> Vec<NearMiss> {
        let (Some(layers), Ok(host)) = (self.layers.get(&sandbox.id), agreed_host(facts)) else {
            return Vec::new();
        };
        let Ok(attempt) = AttemptContext::new(sandbox, layers, facts, &host) else {
            return Vec::new();
        };
        if self.is_closed() {
            return Vec::new(); // closed rules consult no rule
        }
        let near = |matched: &RuleMatch<'_>| NearMiss {
            rule: rule_ref(matched, PolicyLayer::Sandbox),
            pattern: matched.pattern(),
            why: match attempt.check_rule(matched, PolicyLayer::Sandbox) {
                Ok(_) => MissCause::LessSpecific,
                Err(miss) => MissCause::Misses(miss.reason),
            },
        };
        attempt.own.iter().filter(|matched| !matched.rule.is_deny()).map(near).collect()
    }

    pub(crate) fn build_denial(&self, reason: Reason) -> Denial {
        let (generation, digest) = (self.generation, self.digest);
        Denial { reason, rule: None, layer: PolicyLayer::Sandbox, generation, digest, address: None }
    }

    fn evaluate(&self, sandbox: &SandboxRef, facts: &Facts) -> Result<Permit, PartialDenial> {
        if self.is_closed() {
            return Err(Reason::PolicyInvalid.into());
        }
        let current = self.sandboxes.identify_again(sandbox)?;
        if current.id != sandbox.id {
            return Err(Reason::IdentityChanged.into());
        }
        let layers = self.layers.get(&current.id).ok_or(Reason::UnknownSandbox)?;
        if self.ended.contains(&sandbox.id) {
            return Err(Reason::SandboxEnded.into());
        }
        let host = agreed_host(facts)?;
        let attempt = AttemptContext::new(&current, layers, facts, &host)?;
        attempt.refuse_denied()?;
        attempt.refuse_unguarded()?;
        attempt.build_permit(self.generation, &attempt.allowing_rules()?)
    }
}

/// A denial that still lacks the generation and digest of the rule set.
#[derive(Debug)]
pub(crate) struct PartialDenial {
    pub(crate) reason: Reason,
    pub(crate) rule: Option<RuleRef>,
    pub(crate) layer: PolicyLayer,
}

impl From<Reason> for PartialDenial {
    fn from(reason: Reason) -> Self {
        PartialDenial { reason, rule: None, layer: PolicyLayer::Sandbox }
    }
}

impl PartialDenial {
    pub(crate) fn from_rule(reason: Reason, layer: PolicyLayer, matched: &RuleMatch<'_>) -> Self {
        PartialDenial { reason, rule: Some(rule_ref(matched, layer)), layer }
    }
}

/// One attempt with the rules that apply to it.
pub(crate) struct AttemptContext<'a> {
    pub(crate) sandbox: &'a SandboxRef,
    pub(crate) layers: &'a SandboxLayers,
    pub(crate) facts: &'a Facts,
    pub(crate) host: &'a Host,
    pub(crate) port: Option<u16>,
    pub(crate) stage: DecisionStage<'a>,
    /// The special-use zone of the host, which only a pattern in that zone can open.
    zone: Option<&'static str>,
    /// The rules of the sandbox's own layer that name the host.
    pub(crate) own: Vec<RuleMatch<'a>>,
    /// The rules of the base that name the host.
    pub(crate) base: Vec<RuleMatch<'a>>,
}

/// The stage of an attempt; a later stage has more facts.
#[derive(Clone, Copy)]
pub(crate) enum DecisionStage<'a> {
    Connect(&'a Protocol),
    Memory(&'a MemoryFacts),
    Name(QueryType),
    Request(&'a RequestFacts),
}

/// The rules that allow an attempt, the most specific of each layer first.
pub(crate) struct AllowingRules<'a> {
    pub(crate) own: Vec<RuleMatch<'a>>,
    pub(crate) base: BaseAllowance<'a>,
}

/// What in the base allows an attempt.
pub(crate) enum BaseAllowance<'a> {
    Rules(Vec<RuleMatch<'a>>),
    Tier(Tier),
}

/// Why a rule that names the host does not allow the attempt, and how many checks it passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RuleMiss {
    depth: u8,
    pub(crate) reason: Reason,
}

const fn rule_miss(depth: u8, reason: Reason) -> RuleMiss {
    RuleMiss { depth, reason }
}

impl<'a> AttemptContext<'a> {
    fn new(
        sandbox: &'a SandboxRef,
        layers: &'a SandboxLayers,
        facts: &'a Facts,
        host: &'a Host,
    ) -> Result<Self, Reason> {
        let (port, stage) = match facts {
            Facts::Connect(facts) => (Some(facts.port), DecisionStage::Connect(&facts.protocol)),
            Facts::Memory(facts) => (Some(facts.request.port), DecisionStage::Memory(facts)),
            Facts::Name(facts) => (None, DecisionStage::Name(facts.query)),
            Facts::Request(facts) => (Some(facts.port), DecisionStage::Request(facts)),
        };
        if host.name().is_some_and(special_names::is_resolver_discovery) {
            return Err(Reason::ResolverDiscovery);
        }
        if stage.request().is_some_and(|request| !request.method.is_forwardable()) {
            return Err(Reason::MethodNotAllowed);
        }
        let zone = host.name().and_then(special_names::special_zone);
        let own = layers.sandbox.iter().flat_map(|policy| matching_rules(policy, host)).collect();
        let base = layers.base_policies().iter().flat_map(|policy| matching_rules(policy, host)).collect();
        Ok(AttemptContext { sandbox, layers, facts, host, port, stage, zone, own, base })
    }

    fn matches_in(&self, layer: PolicyLayer) -> &[RuleMatch<'a>] {
        match layer {
            PolicyLayer::Base => &self.base,
            PolicyLayer::Sandbox => &self.own,
        }
    }

    /// Refuses the attempt if a rule of any layer denies it: deny always wins.
    fn refuse_denied(&self) -> Result<(), PartialDenial> {
        for layer in [PolicyLayer::Base, PolicyLayer::Sandbox] {
            for matched in self.matches_in(layer) {
                if let Some(reason) = self.denial_reason(matched) {
                    return Err(PartialDenial::from_rule(reason, layer, matched));
                }
            }
        }
        let Host::Address(address) = self.host else { return Ok(()) };
        let view = self.stage.request().map_or(RequestView::Later, RequestView::Seen);
        find_address_deny(self.layers, *address, self.port, view).map_or(Ok(()), Err)
    }

    fn denial_reason(&self, matched: &RuleMatch<'_>) -> Option<Reason> {
        let request = self.stage.request();
        let view = request.map_or(RequestView::Later, RequestView::Seen);
        let is_spelled_out = || request.is_some_and(|request| self.is_spelled_out(request));
        deny_reason(matched, self.port, view)
            .filter(|reason| *reason != Reason::AmbiguousPath || !is_spelled_out())
    }

    /// Returns whether an allow rule of the sandbox allows this path by spelling its encoded slashes, so that a deny rule
    /// that matches under neither reading of them leaves it alone.
    fn is_spelled_out(&self, request: &RequestFacts) -> bool {
        let Ok(path) = RequestPath::parse(&request.path) else { return false };
        let spells = |rule: &Rule| {
            let mut paths = rule.paths().unwrap_or(&[]).iter();
            paths.any(|pattern| !pattern.is_everything() && pattern.matches(&path))
        };
        self.own
            .iter()
            .filter(|matched| !matched.rule.is_deny() && self.is_on_port(matched))
            .any(|matched| spells(matched.rule) && check_filters(matched.rule, request).is_ok())
    }

    /// Refuses plain requests to a memory service, whatever other rule names its host and port: only the guard
    /// forwards there.
    fn refuse_unguarded(&self) -> Result<(), PartialDenial> {
        let guarded = self.memory_guard().filter(|_| matches!(self.stage, DecisionStage::Request(_)));
        guarded.map_or(Ok(()), |matched| {
            Err(PartialDenial::from_rule(Reason::MemoryOperation, PolicyLayer::Sandbox, matched))
        })
    }

    /// Returns the memory rule of any layer that guards the host and port.
    fn memory_guard(&self) -> Option<&RuleMatch<'a>> {
        let guards =
            |matched: &&RuleMatch<'_>| matched.rule.memory_terms().is_some() && self.is_on_port(matched);
        self.own.iter().chain(&self.base).find(guards)
    }

    /// Returns whether a rule applies to the port of this attempt.
    pub(crate) fn is_on_port(&self, matched: &RuleMatch<'_>) -> bool {
        self.port.is_some_and(|port| matched.has_port(port))
    }

    /// Returns the rules of both layers that allow the attempt.
    ///
    /// For a lookup every matching rule of the own layer counts, because any of them can lead to a connection
    /// later. Otherwise only the most specific one does, and the base must allow exactly that rule: a less specific
    /// rule never replaces one that the base forbids.
    fn allowing_rules(&self) -> Result<AllowingRules<'a>, PartialDenial> {
        let mut own = self.fitting_rules(PolicyLayer::Sandbox)?;
        if !matches!(self.stage, DecisionStage::Name(_)) {
            own.truncate(1);
        }
        let mut refused = None;
        let mut base = None;
        own.retain(|matched| match self.check_base(matched) {
            Ok(allowance) => {
                base.get_or_insert(allowance);
                true
            }
            Err(error) => {
                refused.get_or_insert(error);
                false
            }
        });
        match base {
            Some(base) => Ok(AllowingRules { own, base }),
            None => Err(refused.unwrap_or_else(|| Reason::BaseForbids.into())),
        }
    }

    /// Returns the rules of a layer that allow the attempt, the most specific first, or the denial of the rule that
    /// came closest.
    fn fitting_rules(&self, layer: PolicyLayer) -> Result<Vec<RuleMatch<'a>>, PartialDenial> {
        let mut fitting: Vec<(RuleRank, RuleMatch<'a>)> = Vec::new();
        let mut nearest: Option<(RuleMiss, RuleMatch<'a>)> = None;
        for matched in self.matches_in(layer).iter().filter(|matched| !matched.rule.is_deny()).copied() {
            match self.check_rule(&matched, layer) {
                Ok(path) => fitting.push((RuleRank::new(&matched, path), matched)),
                Err(miss) if nearest.as_ref().is_none_or(|(other, _)| miss > *other) => {
                    nearest = Some((miss, matched));
                }
                Err(_) => {}
            }
        }
        // The sort is stable: among equal ranks the first policy, and the first rule in its file, wins.
        fitting.sort_by_key(|(rank, _)| Reverse(*rank));
        match (fitting.is_empty(), nearest) {
            (false, _) => Ok(fitting.into_iter().map(|(_, matched)| matched).collect()),
            (true, Some((miss, matched))) => Err(PartialDenial::from_rule(miss.reason, layer, &matched)),
            (true, None) => Err(self.unlisted_reason().into()),
        }
    }

    fn unlisted_reason(&self) -> Reason {
        match (self.host, self.facts) {
            (Host::Address(_), Facts::Connect(facts)) if facts.is_nameless() => Reason::NameMissing,
            (Host::Address(_), _) => Reason::AddressNotListed,
            (Host::Name(_), _) => Reason::NotListed,
        }
    }

    /// Checks whether a rule that names the host allows this attempt; returns the specificity of its paths.
    fn check_rule(&self, matched: &RuleMatch<'_>, layer: PolicyLayer) -> Result<PathSpecificity, RuleMiss> {
        self.check_reach(matched)?;
        if self.port.is_some() && !self.is_on_port(matched) {
            return Err(rule_miss(3, Reason::PortNotListed));
        }
        let no_path = |()| PathSpecificity::default();
        match self.stage {
            DecisionStage::Connect(protocol) => {
                self.check_protocol(matched.rule, protocol, layer).map(no_path)
            }
            DecisionStage::Name(query) => check_query_type(matched.rule, query).map(no_path),
            DecisionStage::Request(request) => check_request(matched.rule, request, layer),
            DecisionStage::Memory(facts) => self.check_memory(matched.rule, facts, layer),
        }
    }

    /// Rejects a pattern that covers a special-use zone or a public resolver only by accident.
    fn check_reach(&self, matched: &RuleMatch<'_>) -> Result<(), RuleMiss> {
        let (MatchedEntry::Host(hit), Host::Name(name)) = (matched.by, self.host) else {
            return Ok(());
        };
        if self.zone.is_some_and(|zone| !special_names::is_within_zone(hit.base, zone)) {
            return Err(rule_miss(1, Reason::SpecialName));
        }
        if special_names::is_hidden_resolver(name, &hit) {
            return Err(rule_miss(1, Reason::EncryptedResolver));
        }
        Ok(())
    }

    /// Checks the protocol; where a memory rule guards the host, only that rule opens it, and only to TLS.
    fn check_protocol(&self, rule: &Rule, protocol: &Protocol, layer: PolicyLayer) -> Result<(), RuleMiss> {
        let unguarded =
            rule.memory_terms().is_none() && layer == PolicyLayer::Sandbox && self.memory_guard().is_some();
        match (protocol, self.port) {
            _ if unguarded => Err(rule_miss(4, Reason::MemoryOperation)),
            (Protocol::Http { .. } | Protocol::Raw, _) if rule.memory_terms().is_some() => {
                Err(rule_miss(4, Reason::WrongProtocol))
            }
            _ if rule.is_raw() => Ok(()),
            (Protocol::Raw, _) => Err(rule_miss(4, Reason::RawTcpNotAllowed)),
            (Protocol::Http { .. }, Some(443)) | (Protocol::Tls { .. }, Some(80)) => {
                Err(rule_miss(4, Reason::WrongProtocol))
            }
            (Protocol::Http { .. } | Protocol::Tls { .. }, _) => Ok(()),
        }
    }

    /// Checks a memory request; in the sandbox's own layer only a memory rule opens a memory service, while in a
    /// base an allow rule is enough.
    fn check_memory(
        &self,
        rule: &Rule,
        facts: &MemoryFacts,
        layer: PolicyLayer,
    ) -> Result<PathSpecificity, RuleMiss> {
        match (&rule.verdict, layer, facts.request.scheme) {
            (_, _, UrlScheme::Http) => Err(rule_miss(4, Reason::WrongProtocol)),
            (RuleAction::Memory(terms), ..) => memory::authorize(self.sandbox, terms, facts)
                .map(|()| PathSpecificity::default())
                .map_err(|reason| rule_miss(7, reason)),
            (RuleAction::Allow(_), PolicyLayer::Base, _) => check_request(rule, &facts.request, layer),
            (RuleAction::Allow(_) | RuleAction::Deny, ..) => Err(rule_miss(4, Reason::MemoryOperation)),
        }
    }

    /// Returns what in the base allows `own`.
    fn check_base(&self, own: &RuleMatch<'_>) -> Result<BaseAllowance<'a>, PartialDenial> {
        let forbids = || PartialDenial::from_rule(Reason::BaseForbids, PolicyLayer::Base, own);
        match &self.layers.base {
            BaseLayer::Tier(tier) => {
                self.tier_allows(*tier, own).then_some(BaseAllowance::Tier(*tier)).ok_or_else(forbids)
            }
            BaseLayer::Policy(_) => {
                let rules = self.fitting_rules(PolicyLayer::Base).map_err(as_base_denial)?;
                let raw = matches!(self.stage, DecisionStage::Connect(_)) && own.rule.is_raw();
                match rules.first() {
                    Some(first) if raw && !first.rule.is_raw() => {
                        Err(PartialDenial::from_rule(Reason::BaseForbids, PolicyLayer::Base, first))
                    }
                    _ => Ok(BaseAllowance::Rules(rules)),
                }
            }
        }
    }

    fn tier_allows(&self, tier: Tier, own: &RuleMatch<'_>) -> bool {
        let public = match self.host {
            Host::Address(address) => forbidden_range(*address).is_none(),
            Host::Name(_) => self.zone.is_none(),
        };
        match tier {
            Tier::System => true,
            Tier::Untrusted => false,
            Tier::User => public && !own.rule.is_raw(),
        }
    }
}

impl<'a> DecisionStage<'a> {
    fn request(&self) -> Option<&'a RequestFacts> {
        match self {
            DecisionStage::Connect(_) | DecisionStage::Name(_) => None,
            DecisionStage::Memory(facts) => Some(&facts.request),
            DecisionStage::Request(request) => Some(request),
        }
    }
}

/// Precedence among the rules that allow an attempt; fields compare in order.
///
/// A memory rule wins for its host. A rule of a policy wins over a grant, even a more specific one, so that a grant
/// never bypasses the rule's budgets and credential. Then the most specific host wins, then path.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct RuleRank {
    memory: bool,
    permanent: bool,
    host: (usize, bool, bool),
    path: PathSpecificity,
}

impl RuleRank {
    fn new(matched: &RuleMatch<'_>, path: PathSpecificity) -> Self {
        let (rule, policy) = (matched.rule, matched.policy);
        let (memory, permanent) = (rule.memory_terms().is_some(), policy.name.as_str() != GRANTS_POLICY);
        RuleRank { memory, permanent, host: matched.specificity(), path }
    }
}

/// Turns a denial by the base's rules into `base_forbids`, since editing the sandbox's policies does not help,
/// except where the request itself is at fault.
fn as_base_denial(refused: PartialDenial) -> PartialDenial {
    let is_request_fault = matches!(
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
    let reason = if is_request_fault { refused.reason } else { Reason::BaseForbids };
    PartialDenial { reason, layer: PolicyLayer::Base, ..refused }
}

fn check_query_type(rule: &Rule, query: QueryType) -> Result<(), RuleMiss> {
    let allowed = rule.allow_terms().map_or(&QueryType::DEFAULT[..], |terms| &terms.dns_types);
    if allowed.contains(&query) { Ok(()) } else { Err(rule_miss(2, Reason::DnsTypeNotAllowed)) }
}

/// Checks a request against a rule. A raw TCP rule allows no requests in the sandbox's own layer; in a base it
/// allows any bytes, and so requests too.
fn check_request(
    rule: &Rule,
    request: &RequestFacts,
    layer: PolicyLayer,
) -> Result<PathSpecificity, RuleMiss> {
    match (request.scheme, request.port, layer) {
        _ if rule.memory_terms().is_some() => Err(rule_miss(4, Reason::MemoryOperation)),
        (UrlScheme::Http, 443, _) | (UrlScheme::Https, 80, _) => Err(rule_miss(4, Reason::WrongProtocol)),
        (.., PolicyLayer::Sandbox) if rule.is_raw() => Err(rule_miss(4, Reason::WrongProtocol)),
        _ => check_filters(rule, request),
    }
}

/// Checks the method and path of a request against a rule's filters; an absent filter matches everything, and an encoded
/// slash only a pattern that spells it.
pub(crate) fn check_filters(rule: &Rule, request: &RequestFacts) -> Result<PathSpecificity, RuleMiss> {
    if rule.methods().is_some_and(|methods| !methods.contains(&request.method)) {
        return Err(rule_miss(5, Reason::MethodNotAllowed));
    }
    let Some(paths) = rule.paths() else { return Ok(PathSpecificity::default()) };
    let everything = paths.iter().any(|pattern| pattern.is_everything());
    let ambiguous = rule_miss(6, Reason::AmbiguousPath);
    let Ok(path) = RequestPath::parse(&request.path) else {
        return everything.then(PathSpecificity::default).ok_or(ambiguous);
    };
    let missed = if path.has_encoded_slash() { ambiguous } else { rule_miss(6, Reason::PathNotAllowed) };
    let matching = paths.iter().filter(|pattern| pattern.matches(&path));
    matching.map(|pattern| pattern.specificity()).max().ok_or(missed)
}

/// What Sandbar sees of the requests that a deny rule may filter.
#[derive(Clone, Copy)]
pub(crate) enum RequestView<'a> {
    /// Each request is decided by itself, later.
    Later,
    /// Requests pass unseen.
    Never,
    Seen(&'a RequestFacts),
}

/// Returns why a rule denies an attempt, if it does. Where requests pass unseen, one that the rule denies could be
/// among them.
fn deny_reason(matched: &RuleMatch<'_>, port: Option<u16>, view: RequestView<'_>) -> Option<Reason> {
    let rule = matched.rule;
    let on_port = port.map_or_else(|| matched.is_on_every_port(), |port| matched.has_port(port));
    if !rule.is_deny() || !on_port {
        return None;
    }
    match view {
        RequestView::Later if rule.filters_requests() => None,
        RequestView::Later | RequestView::Never => Some(Reason::DeniedByRule),
        RequestView::Seen(request) => deny_request_reason(rule, request),
    }
}

/// Returns why a deny rule refuses a request, if it does; denying a path also denies it with a trailing slash, and with
/// slashes encoded.
fn deny_request_reason(rule: &Rule, request: &RequestFacts) -> Option<Reason> {
    match check_filters(rule, request).map_err(|miss| miss.reason) {
        Ok(_) => Some(Reason::DeniedByRule),
        Err(missed @ (Reason::AmbiguousPath | Reason::PathNotAllowed)) => {
            let Ok(path) = RequestPath::parse(&request.path) else { return Some(missed) };
            let denied = rule.paths().unwrap_or(&[]).iter().any(|pattern| pattern.denies(&path));
            let reason = if denied { Reason::DeniedByRule } else { missed };
            (reason != Reason::PathNotAllowed).then_some(reason)
        }
        Err(_) => None,
    }
}

/// Returns the denial of the rule that denies an address, whatever name led to it; also checks IPv4 addresses
/// embedded in IPv6 ones.
pub(crate) fn find_address_deny(
    layers: &SandboxLayers,
    address: IpAddr,
    port: Option<u16>,
    view: RequestView<'_>,
) -> Option<PartialDenial> {
    let base = layers.base_policies().iter().map(|policy| (policy, PolicyLayer::Base));
    let own = layers.sandbox.iter().map(|policy| (policy, PolicyLayer::Sandbox));
    base.chain(own).find_map(|(policy, layer)| {
        address_forms(address).find_map(|form| {
            matching_rules(policy, &Host::Address(form)).find_map(|matched| {
                let reason = deny_reason(&matched, port, view)?;
                Some(PartialDenial::from_rule(reason, layer, &matched))
            })
        })
    })
}

pub(crate) fn rule_ref(matched: &RuleMatch<'_>, layer: PolicyLayer) -> RuleRef {
    let (file, line) = matched.location();
    RuleRef {
        policy: matched.policy.name.clone(),
        rule: matched.rule.name.clone(),
        layer,
        digest: matched.policy.digest,
        file,
        line,
    }
}
