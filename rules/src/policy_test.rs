//! A `Trial`: one `[[test]]` of a policy. Run by `check`, by `test`, and before every reload takes effect.

use std::sync::Arc;

use crate::decision::Decision;
use crate::ids::{Environment, SandboxId, Tenant};
use crate::load::problem::SourceLocation;
use crate::policy::Policy;
use crate::probe::PolicyProbe;
use crate::reason::Reason;
use crate::ruleset::RuleSet;
use crate::sandbox::{Sandbox, SandboxRef};

/// An attempt and what must become of it.
#[derive(Clone, Debug)]
pub struct PolicyTest {
    pub name: Option<String>,
    pub line: u32,
    /// Where the test stands, for problems that are found after parsing.
    pub at: SourceLocation,
    pub expect: ExpectedDecision,
    pub probe: PolicyProbe,
    /// Only this sandbox; every one that has the policy otherwise.
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

/// What became of a trial in one sandbox.
#[derive(Clone, Debug)]
pub struct TestOutcome {
    pub policy: Arc<Policy>,
    pub trial: PolicyTest,
    pub sandbox: SandboxRef,
    pub decision: Decision,
}

impl RuleSet {
    /// Runs every `[[test]]` in every sandbox it is for.
    pub fn run_tests(&self) -> Vec<TestOutcome> {
        self.policies()
            .flat_map(|policy| policy.trials.iter().flat_map(|trial| self.run_test(policy, trial)))
            .collect()
    }

    fn run_test(&self, policy: &Arc<Policy>, trial: &PolicyTest) -> Vec<TestOutcome> {
        let concerned = |sandbox: &&SandboxRef| match &trial.sandbox {
            Some(id) => sandbox.id == *id,
            None => self.policies_of(sandbox).iter().any(|other| other.name == policy.name),
        };
        let outcome = |sandbox: &SandboxRef| TestOutcome {
            policy: policy.clone(),
            trial: trial.clone(),
            sandbox: sandbox.clone(),
            decision: trial.decide(self, sandbox),
        };
        self.sandboxes().iter().filter(concerned).map(outcome).collect()
    }
}

impl PolicyTest {
    fn decide(&self, rules: &RuleSet, sandbox: &SandboxRef) -> Decision {
        match (&self.environment, &sandbox.environment) {
            (Some(environment), None) => {
                rules.with_environment(sandbox, environment, |rules, who| {
                    self.probe.decide(rules, who)
                })
            }
            _ => self.probe.decide(rules, sandbox),
        }
    }
}

impl RuleSet {
    /// Judges as if a sandbox without environment were of `environment`: a policy can be tested on its own.
    fn with_environment<T>(
        &self,
        sandbox: &SandboxRef,
        environment: &Environment,
        ask: impl Fn(&RuleSet, &SandboxRef) -> T,
    ) -> T {
        let tenant = sandbox.tenant.clone().or_else(|| Tenant::parse("any").ok());
        let who =
            Sandbox { tenant, environment: Some(environment.clone()), ..Sandbox::clone(sandbox) };
        let mut rules = self.clone();
        rules.sandboxes.insert(who.clone());
        ask(&rules, &SandboxRef::new(who))
    }
}

impl TestOutcome {
    pub fn has_passed(&self) -> bool {
        let by = |rule: Option<&Arc<str>>| match &self.trial.rule {
            None => true,
            Some(wanted) => rule.is_some_and(|rule| **rule == **wanted),
        };
        match (&self.decision, self.trial.expect) {
            (Decision::Allow(permit), ExpectedDecision::Allow) => by(Some(&permit.rule().rule)),
            (Decision::Deny(denial), ExpectedDecision::Deny) => {
                let reason = self.trial.reason.is_none_or(|wanted| wanted == denial.reason);
                reason && by(denial.rule.as_ref().map(|rule| &rule.rule))
            }
            (Decision::Allow(_), ExpectedDecision::Deny)
            | (Decision::Deny(_), ExpectedDecision::Allow) => false,
        }
    }

    /// What was expected, in words.
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
