//! `[[test]]` entries of policies. `check` and `test` run them, and so does every reload before it takes effect.

use std::sync::Arc;

use crate::decision::Decision;
use crate::ids::{Environment, SandboxId, Tenant};
use crate::load::problem::SourceLocation;
use crate::policy::Policy;
use crate::probe::PolicyProbe;
use crate::reason::Reason;
use crate::ruleset::RuleSet;
use crate::sandbox::{Sandbox, SandboxRef};

/// An attempt and its expected decision.
#[derive(Clone, Debug)]
pub struct PolicyTest {
    pub name: Option<String>,
    pub line: u32,
    /// The location of the test, for problems found after parsing.
    pub at: SourceLocation,
    pub expect: ExpectedDecision,
    pub probe: PolicyProbe,
    /// The sandbox to test; `None` means every sandbox with the policy.
    pub(crate) sandbox: Option<SandboxId>,
    pub(crate) environment: Option<Environment>,
    pub(crate) reason: Option<Reason>,
    pub(crate) rule: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedDecision {
    Allow,
    Deny,
}

/// The outcome of a test in one sandbox.
#[derive(Clone, Debug)]
pub struct TestOutcome {
    pub policy: Arc<Policy>,
    pub trial: PolicyTest,
    pub sandbox: SandboxRef,
    pub decision: Decision,
}

impl RuleSet {
    /// Runs every `[[test]]` in every sandbox it applies to.
    pub fn run_tests(&self) -> Vec<TestOutcome> {
        self.policies()
            .flat_map(|policy| policy.trials.iter().flat_map(|trial| self.run_test(policy, trial)))
            .collect()
    }

    fn run_test(&self, policy: &Arc<Policy>, trial: &PolicyTest) -> Vec<TestOutcome> {
        let applies = |sandbox: &&SandboxRef| match &trial.sandbox {
            Some(id) => sandbox.id == *id,
            None => self.policies_of(sandbox).iter().any(|other| other.name == policy.name),
        };
        let outcome = |sandbox: &SandboxRef| TestOutcome {
            policy: policy.clone(),
            trial: trial.clone(),
            sandbox: sandbox.clone(),
            decision: trial.decide(self, sandbox),
        };
        self.sandboxes().iter().filter(applies).map(outcome).collect()
    }
}

impl PolicyTest {
    fn decide(&self, rules: &RuleSet, sandbox: &SandboxRef) -> Decision {
        match (&self.environment, &sandbox.environment) {
            (Some(environment), None) => rules
                .with_environment(sandbox, environment, |rules, sandbox| self.probe.decide(rules, sandbox)),
            _ => self.probe.decide(rules, sandbox),
        }
    }
}

impl RuleSet {
    /// Decides as if a sandbox without environment were in `environment`, so that a policy can be tested alone.
    fn with_environment<T>(
        &self,
        sandbox: &SandboxRef,
        environment: &Environment,
        decide: impl Fn(&RuleSet, &SandboxRef) -> T,
    ) -> T {
        let tenant = sandbox.tenant.clone().or_else(|| Tenant::parse("any").ok());
        let identified =
            Sandbox { tenant, environment: Some(environment.clone()), ..Sandbox::clone(sandbox) };
        let mut rules = self.clone();
        rules.sandboxes.insert(identified.clone());
        decide(&rules, &SandboxRef::new(identified))
    }
}

impl TestOutcome {
    /// Returns whether the decision, its reason and its rule are as expected.
    pub fn has_passed(&self) -> bool {
        let rule_matches = |rule: Option<&Arc<str>>| match &self.trial.rule {
            None => true,
            Some(wanted) => rule.is_some_and(|rule| **rule == **wanted),
        };
        match (&self.decision, self.trial.expect) {
            (Decision::Allow(permit), ExpectedDecision::Allow) => rule_matches(Some(&permit.rule().rule)),
            (Decision::Deny(denial), ExpectedDecision::Deny) => {
                let reason = self.trial.reason.is_none_or(|wanted| wanted == denial.reason);
                reason && rule_matches(denial.rule.as_ref().map(|rule| &rule.rule))
            }
            (Decision::Allow(_), ExpectedDecision::Deny) | (Decision::Deny(_), ExpectedDecision::Allow) => {
                false
            }
        }
    }

    /// Describes the expected decision.
    pub fn describe_expected(&self) -> String {
        let verb = match self.trial.expect {
            ExpectedDecision::Allow => "allow",
            ExpectedDecision::Deny => "deny",
        };
        let reason = self.trial.reason.map(|reason| format!(" as {reason}")).unwrap_or_default();
        let rule = self.trial.rule.as_ref().map(|rule| format!(" by `{rule}`")).unwrap_or_default();
        format!("{verb}{reason}{rule}")
    }
}
