//! Why a decision fell as it did: the rules that came near, and what one would change to allow it.

mod advice;

use crate::decision::{Decision, Layer, RuleRef};
use crate::facts::Facts;
use crate::name::{DomainName, Host};
use crate::policy::Policy;
use crate::probe::Probe;
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
    /// Why no rule could ever allow it, where the reason does not say so by itself.
    pub never: Option<&'static str>,
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
    /// It would allow the attempt, and the base does not.
    BaseRefuses,
    /// It would allow the attempt, and a deny rule wins.
    DenyWins,
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
    /// A key of a rule that exists to write anew, and the one to drop for it if it is there.
    Set { rule: RuleRef, key: &'static str, entries: Vec<String>, instead_of: Option<&'static str> },
}

impl RuleSet {
    /// Decides a probe and says why.
    pub fn explain(&self, sandbox: &SandboxRef, probe: &Probe) -> Explanation {
        let decision = probe.decide(self, sandbox);
        let steps = probe.facts(sandbox);
        let near = steps.last().map_or_else(Vec::new, |facts| self.near(sandbox, facts, &decision));
        let change = match &decision {
            Decision::Allow(_) => None,
            Decision::Deny(denial) => advice::change(self, sandbox, probe, denial),
        };
        let forwardable = probe.method.as_ref().is_none_or(|method| method.is_forwardable());
        let never = (!forwardable && decision.reason() == Some(Reason::MethodNotAllowed))
            .then_some("CONNECT and TRACE are never forwarded, whatever a rule says.");
        Explanation { decision, near, change, never }
    }

    fn near(&self, sandbox: &SandboxRef, facts: &Facts, decision: &Decision) -> Vec<Near> {
        let decided = match decision {
            Decision::Allow(permit) => Some(permit.rule()),
            Decision::Deny(denial) => denial.rule.as_ref(),
        };
        let mut near = self.considered(sandbox, facts);
        if matches!(decision, Decision::Deny(denial) if denial.reason == Reason::NotListed && denial.layer == Layer::Sandbox)
        {
            near.extend(self.look_alikes(sandbox, facts));
        }
        let mut told: Vec<_> = decided.map(key).into_iter().collect();
        near.retain_mut(|near| {
            let first = !told.contains(&key(&near.rule));
            told.push(key(&near.rule));
            near.why = self.why(sandbox, near.why, decision);
            first
        });
        near.truncate(MAX_NEAR);
        near
    }

    /// A rule that would allow what was refused was not less specific: something else refused.
    fn why(&self, sandbox: &SandboxRef, why: Why, decision: &Decision) -> Why {
        let Decision::Deny(denial) = decision else { return why };
        let denies = |rule: &RuleRef| {
            let policies = self.policies_of(sandbox);
            let mut rules = policies
                .iter()
                .filter(|policy| policy.name == rule.policy)
                .flat_map(|policy| &policy.rules);
            rules.any(|other| other.name == rule.rule && other.is_deny())
        };
        match (why, denial.layer) {
            (Why::LessSpecific, Layer::Base) => Why::BaseRefuses,
            (Why::LessSpecific, Layer::Sandbox) if denial.rule.as_ref().is_some_and(denies) => {
                Why::DenyWins
            }
            (why, Layer::Base | Layer::Sandbox) => why,
        }
    }

    /// Patterns whose name is a likely slip of the one asked for, the likeliest first.
    fn look_alikes(&self, sandbox: &SandboxRef, facts: &Facts) -> Vec<Near> {
        let Ok(Host::Name(name)) = crate::agree::agreed_host(facts) else { return Vec::new() };
        let Some(layers) = self.layers.get(&sandbox.id) else { return Vec::new() };
        let base = layers.base_policies().iter().map(|policy| (policy, Layer::Base));
        let own = layers.sandbox.iter().map(|policy| (policy, Layer::Sandbox));
        let mut found: Vec<(u32, Near)> = Vec::new();
        for (policy, layer) in own.chain(base) {
            for (likeness, near) in alike(policy, layer, &name) {
                if found.iter().any(|(_, other)| key(&other.rule) == key(&near.rule)) {
                    continue;
                }
                found.push((likeness, near));
                found.sort_by_key(|(likeness, _)| std::cmp::Reverse(*likeness));
                found.truncate(MAX_NEAR);
            }
        }
        found.into_iter().map(|(_, near)| near).collect()
    }
}

/// What a rule is known by, wherever in its file the host stands.
fn key(rule: &RuleRef) -> (crate::word::PolicyName, std::sync::Arc<str>) {
    (rule.policy.clone(), rule.rule.clone())
}

fn alike<'p>(
    policy: &'p Policy,
    layer: Layer,
    name: &DomainName,
) -> impl Iterator<Item = (u32, Near)> + 'p {
    let name = name.clone();
    let allowing = policy.hosts().filter(|(_, rule)| !rule.is_deny());
    allowing.filter_map(move |(hit, rule)| {
        let likeness =
            strsim::jaro_winkler(name.as_str(), hit.base).max(f64::from(name.is_within(hit.base)));
        if likeness < ALIKE || hit.base.is_empty() {
            return None;
        }
        let (file, line) = policy.origin(rule, &hit);
        let (policy, digest) = (policy.name.clone(), policy.digest);
        let rule = RuleRef { policy, rule: rule.name.clone(), layer, digest, file, line };
        let near = Near { rule, pattern: hit.pattern(), why: Why::OtherName };
        Some(((likeness * 1000.0) as u32, near))
    })
}
