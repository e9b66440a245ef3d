//! Why a decision fell as it did: the rules that came near, and what one would add to allow it.

use crate::decision::{Decision, Layer, RuleRef};
use crate::facts::Facts;
use crate::load::problem::printable;
use crate::name::{DomainName, Host};
use crate::policy::Policy;
use crate::probe::{Probe, Special};
use crate::reason::Reason;
use crate::ruleset::RuleSet;
use crate::sandbox::SandboxRef;

/// Most near misses that are told.
const MAX_NEAR: usize = 5;
/// How alike two names must be for one to be a likely slip of the other.
const ALIKE: f64 = 0.9;

/// A decision with its surroundings.
#[derive(Clone, Debug)]
pub struct Explanation {
    pub decision: Decision,
    /// Rules that name the host, or a name like it, and did not decide.
    pub near: Vec<Near>,
    /// What to change to allow it; none when nothing would, or nothing needs to.
    pub change: Option<Change>,
}

/// A rule that came near.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Near {
    pub rule: RuleRef,
    /// The pattern that covers the host, or almost does.
    pub pattern: String,
    pub why: Why,
}

/// Why a rule that came near did not decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It would allow the attempt too, but another is more specific.
    LessSpecific,
    /// It names the host and refuses for this reason.
    Misses(Reason),
    /// It names another host that looks alike.
    OtherName,
}

/// An edit that would allow the attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Lines to add to a policy.
    Add(String),
    /// An entry to add to a key of a rule that exists.
    Extend { rule: RuleRef, key: &'static str, entry: String },
}

impl RuleSet {
    /// Decides a probe and says why.
    pub fn explain(&self, sandbox: &SandboxRef, probe: &Probe) -> Explanation {
        let decision = probe.decide(self, sandbox);
        let steps = probe.facts(sandbox);
        let near = steps.last().map_or_else(Vec::new, |facts| self.near(sandbox, facts, &decision));
        let change = match &decision {
            Decision::Allow(_) => None,
            Decision::Deny(denial) => change(probe, denial.reason, denial.rule.as_ref()),
        };
        Explanation { decision, near, change }
    }

    fn near(&self, sandbox: &SandboxRef, facts: &Facts, decision: &Decision) -> Vec<Near> {
        let decided = match decision {
            Decision::Allow(permit) => Some(permit.rule()),
            Decision::Deny(denial) => denial.rule.as_ref(),
        };
        let mut near = self.considered(sandbox, facts);
        near.retain(|near| Some(&near.rule) != decided);
        if decision.reason() == Some(Reason::NotListed) {
            near.extend(self.look_alikes(sandbox, facts));
        }
        near.truncate(MAX_NEAR);
        near
    }

    /// Patterns whose name is a likely slip of the one asked for, the likeliest first.
    fn look_alikes(&self, sandbox: &SandboxRef, facts: &Facts) -> Vec<Near> {
        let Ok(Host::Name(name)) = crate::agree::agreed_host(facts) else { return Vec::new() };
        let mut found: Vec<(u32, Near)> = Vec::new();
        for policy in self.policies_of(sandbox) {
            for (likeness, near) in alike(policy, &name) {
                found.push((likeness, near));
                found.sort_by_key(|(likeness, _)| std::cmp::Reverse(*likeness));
                found.truncate(MAX_NEAR);
            }
        }
        found.into_iter().map(|(_, near)| near).collect()
    }
}

fn alike<'p>(policy: &'p Policy, name: &DomainName) -> impl Iterator<Item = (u32, Near)> + 'p {
    let name = name.clone();
    policy.hosts().filter_map(move |(hit, rule)| {
        let likeness =
            strsim::jaro_winkler(name.as_str(), hit.base).max(f64::from(name.is_within(hit.base)));
        let (file, line) = policy.origin(rule, &hit);
        let (policy, digest) = (policy.name.clone(), policy.digest);
        let reference =
            RuleRef { policy, rule: rule.name.clone(), layer: Layer::Sandbox, digest, file, line };
        let near = Near { rule: reference, pattern: hit.pattern(), why: Why::OtherName };
        (likeness >= ALIKE && !hit.base.is_empty()).then_some(((likeness * 1000.0) as u32, near))
    })
}

fn change(probe: &Probe, reason: Reason, rule: Option<&RuleRef>) -> Option<Change> {
    let extend =
        |key, entry: String| rule.map(|rule| Change::Extend { rule: rule.clone(), key, entry });
    match reason {
        Reason::NotListed
        | Reason::AddressNotListed
        | Reason::NameMissing
        | Reason::RawTcpNotAllowed
        | Reason::EncryptedResolver
        | Reason::SpecialName => Some(Change::Add(addition(probe))),
        Reason::PortNotListed => match probe.special {
            Special::Raw => Some(Change::Add(addition(probe))),
            Special::Connection | Special::Lookup(_) | Special::Memory { .. } => {
                extend("hosts", format!("{}:{}", probe.host, probe.port))
            }
        },
        Reason::MethodNotAllowed => probe
            .method
            .as_ref()
            .filter(|method| method.is_forwardable())
            .and_then(|method| extend("methods", method.to_string())),
        Reason::PathNotAllowed => {
            extend("paths", probe.path.clone().unwrap_or_else(|| "/".to_owned()))
        }
        Reason::DnsTypeNotAllowed => match &probe.special {
            Special::Lookup(query)
                if crate::facts::QueryType::by_name(&query.to_string()).is_some() =>
            {
                extend("dns_types", query.to_string())
            }
            Special::Connection | Special::Lookup(_) | Special::Memory { .. } | Special::Raw => {
                None
            }
        },
        Reason::ForeignBank => match &probe.special {
            Special::Memory { operation, bank } => extend(operation.word(), bank.to_string()),
            Special::Connection | Special::Lookup(_) | Special::Raw => None,
        },
        Reason::AddressAsSni
        | Reason::AddressNotExpected
        | Reason::AmbiguousPath
        | Reason::BadMethod
        | Reason::BadName
        | Reason::BankMissing
        | Reason::BaseForbids
        | Reason::ChannelsDisagree
        | Reason::CredentialNeedsTls
        | Reason::DeniedByRule
        | Reason::DnsAnswer
        | Reason::DnsBudget
        | Reason::DnsMalformed
        | Reason::DnsOperation
        | Reason::DnsOverload
        | Reason::EchHiddenName
        | Reason::ForeignEnvironment
        | Reason::IdentityAbsent
        | Reason::IdentityInvalid
        | Reason::IdentityMismatch
        | Reason::IdentityStale
        | Reason::IdentityUnset
        | Reason::LogUnwritable
        | Reason::MemoryOperation
        | Reason::Misdirected
        | Reason::NamesDisagree
        | Reason::NoAddress
        | Reason::OwnAddress
        | Reason::PrivateAddress
        | Reason::ResolverDiscovery
        | Reason::ResolverUnreachable
        | Reason::UnknownChannel
        | Reason::UnknownSandbox
        | Reason::WrongProtocol => None,
    }
}

/// A rule that allows just what was tried.
fn addition(probe: &Probe) -> String {
    let (host, port) = (&probe.host, probe.port);
    let raw = probe.special == Special::Raw;
    let target = match host {
        Host::Address(address) => {
            format!("addresses = [\"{address}/{}\"]", if address.is_ipv4() { 32 } else { 128 })
        }
        Host::Name(_) if port == 443 || raw => format!("hosts = [\"{host}\"]"),
        Host::Name(_) => format!("hosts = [\"{host}:{port}\"]"),
    };
    let ports = match (host, raw) {
        (_, true) => format!("\ntcp = [{port}]"),
        (Host::Address(_), false) => format!("\nports = [{port}]"),
        (Host::Name(_), false) => String::new(),
    };
    let method = probe
        .method
        .as_ref()
        .map(|method| format!("\nmethods = [\"{method}\"]"))
        .unwrap_or_default();
    printable_lines(&format!("[[allow]]\nname = \"{host}\"\n{target}{ports}{method}"))
}

fn printable_lines(text: &str) -> String {
    text.lines().map(printable).collect::<Vec<_>>().join("\n")
}
