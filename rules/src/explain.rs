//! Explains a decision: the rules that came close, and the edit that would allow the attempt.

mod advice;

use crate::decision::{Decision, PolicyLayer, RuleRef};
use crate::facts::Facts;
use crate::name::{DomainName, Host};
use crate::policy::Policy;
use crate::probe::PolicyProbe;
use crate::reason::Reason;
use crate::ruleset::RuleSet;
use crate::sandbox::SandboxRef;

/// Most near misses to report.
const MAX_NEAR_MISSES: usize = 5;
/// Jaro-Winkler similarity from which one name counts as a likely misspelling of the other.
const MIN_SIMILARITY: f64 = 0.9;

/// A decision with its context.
#[derive(Clone, Debug)]
pub struct Explanation {
    pub decision: Decision,
    /// Rules that name the host, or a similar one, and did not decide.
    pub near: Vec<NearMiss>,
    /// The edit that would allow it; `None` if none would or none is needed.
    pub change: Option<PolicyEdit>,
    /// Why no rule can ever allow it, if the reason's own text does not say so.
    pub never: Option<&'static str>,
}

/// A rule that came close.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NearMiss {
    pub rule: RuleRef,
    /// The pattern that covers the host, or a similar one.
    pub pattern: String,
    pub why: MissCause,
}

/// Why a rule that came close did not decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissCause {
    /// It would allow the attempt, but the base does not.
    BaseRefuses,
    /// It would allow the attempt, but a deny rule wins.
    DenyWins,
    /// It allows the attempt too, but another rule is more specific.
    LessSpecific,
    /// It names the host and refuses for this reason.
    Misses(Reason),
    /// It names a similar host.
    OtherName,
}

/// An edit that would allow the attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyEdit {
    /// Lines to add to a policy.
    Add(String),
    /// An entry to add to a key of an existing rule.
    Extend { rule: RuleRef, key: &'static str, entry: String },
    /// A key of an existing rule to replace, and the key to remove in exchange, if present.
    Set { rule: RuleRef, key: &'static str, entries: Vec<String>, instead_of: Option<&'static str> },
}

impl RuleSet {
    /// Decides a probe and explains the decision.
    pub fn explain(&self, sandbox: &SandboxRef, probe: &PolicyProbe) -> Explanation {
        let decision = probe.decide(self, sandbox);
        let steps = probe.facts(sandbox);
        let near = steps.last().map_or_else(Vec::new, |facts| self.near_misses(sandbox, facts, &decision));
        let change = match &decision {
            Decision::Allow(_) => None,
            Decision::Deny(denial) => advice::suggest_edit(self, sandbox, probe, denial),
        };
        let forwardable = probe.method.as_ref().is_none_or(|method| method.is_forwardable());
        let never = (!forwardable && decision.reason() == Some(Reason::MethodNotAllowed))
            .then_some("CONNECT and TRACE are never forwarded, whatever a rule allows.");
        Explanation { decision, near, change, never }
    }

    fn near_misses(&self, sandbox: &SandboxRef, facts: &Facts, decision: &Decision) -> Vec<NearMiss> {
        let decided = match decision {
            Decision::Allow(permit) => Some(permit.rule()),
            Decision::Deny(denial) => denial.rule.as_ref(),
        };
        let mut near = self.candidate_rules(sandbox, facts);
        if matches!(decision, Decision::Deny(denial) if denial.reason == Reason::NotListed && denial.layer == PolicyLayer::Sandbox)
        {
            near.extend(self.similar_patterns(sandbox, facts));
        }
        let mut reported: Vec<_> = decided.map(rule_key).into_iter().collect();
        near.retain_mut(|near| {
            let first = !reported.contains(&rule_key(&near.rule));
            reported.push(rule_key(&near.rule));
            near.why = self.refine_cause(sandbox, near.why, decision);
            first
        });
        near.truncate(MAX_NEAR_MISSES);
        near
    }

    /// Corrects `LessSpecific` for a denied attempt: the rule would allow it, so the base or a deny rule refused.
    fn refine_cause(&self, sandbox: &SandboxRef, why: MissCause, decision: &Decision) -> MissCause {
        let Decision::Deny(denial) = decision else { return why };
        let denies = |rule: &RuleRef| {
            let policies = self.policies_of(sandbox);
            let mut rules =
                policies.iter().filter(|policy| policy.name == rule.policy).flat_map(|policy| &policy.rules);
            rules.any(|other| other.name == rule.rule && other.is_deny())
        };
        match (why, denial.layer) {
            (MissCause::LessSpecific, PolicyLayer::Base) => MissCause::BaseRefuses,
            (MissCause::LessSpecific, PolicyLayer::Sandbox) if denial.rule.as_ref().is_some_and(denies) => {
                MissCause::DenyWins
            }
            (why, PolicyLayer::Base | PolicyLayer::Sandbox) => why,
        }
    }

    /// Returns rules for hosts that the requested name likely misspells, the most similar first.
    fn similar_patterns(&self, sandbox: &SandboxRef, facts: &Facts) -> Vec<NearMiss> {
        let Ok(Host::Name(name)) = crate::host_agreement::agreed_host(facts) else {
            return Vec::new();
        };
        let Some(layers) = self.layers.get(&sandbox.id) else { return Vec::new() };
        let base = layers.base_policies().iter().map(|policy| (policy, PolicyLayer::Base));
        let own = layers.sandbox.iter().map(|policy| (policy, PolicyLayer::Sandbox));
        let mut found: Vec<(u32, NearMiss)> = Vec::new();
        for (policy, layer) in own.chain(base) {
            for (similarity, near) in similar_hosts(policy, layer, &name) {
                if found.iter().any(|(_, other)| rule_key(&other.rule) == rule_key(&near.rule)) {
                    continue;
                }
                found.push((similarity, near));
                found.sort_by_key(|(similarity, _)| std::cmp::Reverse(*similarity));
                found.truncate(MAX_NEAR_MISSES);
            }
        }
        found.into_iter().map(|(_, near)| near).collect()
    }
}

/// Returns the identity of a rule, independent of the line that matched.
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
        let similarity =
            strsim::jaro_winkler(name.as_str(), hit.base).max(f64::from(name.is_within(hit.base)));
        if similarity < MIN_SIMILARITY || hit.base.is_empty() {
            return None;
        }
        let (file, line) = policy.pattern_location(rule, &hit);
        let (policy, digest) = (policy.name.clone(), policy.digest);
        let rule = RuleRef { policy, rule: rule.name.clone(), layer, digest, file, line };
        let near = NearMiss { rule, pattern: hit.pattern(), why: MissCause::OtherName };
        Some(((similarity * 1000.0) as u32, near))
    })
}
