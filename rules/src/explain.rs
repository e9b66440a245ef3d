//! Why a decision fell as it did: the rules that came near, and what one would change to allow it.

mod advice;

use crate::decision::{Decision, PolicyLayer, RuleRef};
use crate::facts::Facts;
use crate::name::{DomainName, Host};
use crate::policy::Policy;
use crate::probe::PolicyProbe;
use crate::reason::Reason;
use crate::ruleset::RuleSet;
use crate::sandbox::SandboxRef;

/// Most near misses that are told.
const MAX_NEAR_MISSES: usize = 5;
/// How alike two names must be for one to be a likely slip of the other.
const MIN_SIMILARITY: f64 = 0.9;

/// A decision with its surroundings.
#[derive(Clone, Debug)]
pub struct Explanation {
    pub decision: Decision,
    /// Rules that name the host, or a name like it, and did not decide.
    pub near: Vec<NearMiss>,
    /// What to change to allow it; none when nothing would, or nothing needs to.
    pub change: Option<PolicyEdit>,
    /// Why no rule could ever allow it, where the reason does not say so by itself.
    pub never: Option<&'static str>,
}

/// A rule that came near.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NearMiss {
    pub rule: RuleRef,
    /// The pattern that covers the host, or almost does.
    pub pattern: String,
    pub why: MissCause,
}

/// Why a rule that came near did not decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissCause {
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
pub enum PolicyEdit {
    /// Lines to add to a policy.
    Add(String),
    /// An entry to add to a key of a rule that exists.
    Extend { rule: RuleRef, key: &'static str, entry: String },
    /// A key of a rule that exists to write anew, and the one to drop for it if it is there.
    Set { rule: RuleRef, key: &'static str, entries: Vec<String>, instead_of: Option<&'static str> },
}

impl RuleSet {
    /// Decides a probe and says why.
    pub fn explain(&self, sandbox: &SandboxRef, probe: &PolicyProbe) -> Explanation {
        let decision = probe.decide(self, sandbox);
        let steps = probe.facts(sandbox);
        let near =
            steps.last().map_or_else(Vec::new, |facts| self.near_misses(sandbox, facts, &decision));
        let change = match &decision {
            Decision::Allow(_) => None,
            Decision::Deny(denial) => advice::suggest_edit(self, sandbox, probe, denial),
        };
        let forwardable = probe.method.as_ref().is_none_or(|method| method.is_forwardable());
        let never = (!forwardable && decision.reason() == Some(Reason::MethodNotAllowed))
            .then_some("CONNECT and TRACE are never forwarded, whatever a rule says.");
        Explanation { decision, near, change, never }
    }

    fn near_misses(
        &self,
        sandbox: &SandboxRef,
        facts: &Facts,
        decision: &Decision,
    ) -> Vec<NearMiss> {
        let decided = match decision {
            Decision::Allow(permit) => Some(permit.rule()),
            Decision::Deny(denial) => denial.rule.as_ref(),
        };
        let mut near = self.candidate_rules(sandbox, facts);
        if matches!(decision, Decision::Deny(denial) if denial.reason == Reason::NotListed && denial.layer == PolicyLayer::Sandbox)
        {
            near.extend(self.similar_patterns(sandbox, facts));
        }
        let mut told: Vec<_> = decided.map(rule_key).into_iter().collect();
        near.retain_mut(|near| {
            let first = !told.contains(&rule_key(&near.rule));
            told.push(rule_key(&near.rule));
            near.why = self.refine_cause(sandbox, near.why, decision);
            first
        });
        near.truncate(MAX_NEAR_MISSES);
        near
    }

    /// A rule that would allow what was refused was not less specific: something else refused.
    fn refine_cause(&self, sandbox: &SandboxRef, why: MissCause, decision: &Decision) -> MissCause {
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
            (MissCause::LessSpecific, PolicyLayer::Base) => MissCause::BaseRefuses,
            (MissCause::LessSpecific, PolicyLayer::Sandbox)
                if denial.rule.as_ref().is_some_and(denies) =>
            {
                MissCause::DenyWins
            }
            (why, PolicyLayer::Base | PolicyLayer::Sandbox) => why,
        }
    }

    /// Patterns whose name is a likely slip of the one asked for, the likeliest first.
    fn similar_patterns(&self, sandbox: &SandboxRef, facts: &Facts) -> Vec<NearMiss> {
        let Ok(Host::Name(name)) = crate::host_agreement::agreed_host(facts) else {
            return Vec::new();
        };
        let Some(layers) = self.layers.get(&sandbox.id) else { return Vec::new() };
        let base = layers.base_policies().iter().map(|policy| (policy, PolicyLayer::Base));
        let own = layers.sandbox.iter().map(|policy| (policy, PolicyLayer::Sandbox));
        let mut found: Vec<(u32, NearMiss)> = Vec::new();
        for (policy, layer) in own.chain(base) {
            for (likeness, near) in similar_hosts(policy, layer, &name) {
                if found.iter().any(|(_, other)| rule_key(&other.rule) == rule_key(&near.rule)) {
                    continue;
                }
                found.push((likeness, near));
                found.sort_by_key(|(likeness, _)| std::cmp::Reverse(*likeness));
                found.truncate(MAX_NEAR_MISSES);
            }
        }
        found.into_iter().map(|(_, near)| near).collect()
    }
}

/// What a rule is known by, wherever in its file the host stands.
fn rule_key(rule: &RuleRef) -> (crate::ids::PolicyName, std::sync::Arc<str>) {
    (rule.policy.clone(), rule.rule.clone())
}

fn similar_hosts<'p>(
    policy: &'p Policy,
    layer: PolicyLayer,
    name: &DomainName,
) -> impl Iterator<Item = (u32, NearMiss)> + 'p {
    let name = name.clone();
    let allowing = policy.hosts().filter(|(_, rule)| !rule.is_deny());
    allowing.filter_map(move |(hit, rule)| {
        let likeness =
            strsim::jaro_winkler(name.as_str(), hit.base).max(f64::from(name.is_within(hit.base)));
        if likeness < MIN_SIMILARITY || hit.base.is_empty() {
            return None;
        }
        let (file, line) = policy.pattern_location(rule, &hit);
        let (policy, digest) = (policy.name.clone(), policy.digest);
        let rule = RuleRef { policy, rule: rule.name.clone(), layer, digest, file, line };
        let near = NearMiss { rule, pattern: hit.pattern(), why: MissCause::OtherName };
        Some(((likeness * 1000.0) as u32, near))
    })
}
