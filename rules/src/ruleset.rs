//! `RuleSet`: all compiled rules, under one generation number.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use crate::budget::Budgets;
use crate::ids::{CredentialName, PolicyName, SandboxId};
use crate::load::problem::Problem;
use crate::policy::{Policy, PolicyDigest, Rule};
use crate::sandbox::{IdentityAssignment, SandboxRef, Sandboxes};

/// The compiled rules of every sandbox: built by [`crate::compile`], immutable, replaced as a whole.
#[derive(Clone, Debug)]
pub struct RuleSet {
    pub(crate) generation: u64,
    pub(crate) digest: PolicyDigest,
    /// The digest of the files alone, without timed state.
    pub(crate) files: PolicyDigest,
    pub(crate) sandboxes: Sandboxes,
    pub(crate) layers: HashMap<SandboxId, SandboxLayers>,
    pub(crate) policies: BTreeMap<PolicyName, Arc<Policy>>,
    /// Sandboxes that reached their lifetime; Sandbar refuses all their attempts.
    pub(crate) ended: BTreeSet<SandboxId>,
    /// Whether any policy sets a lifetime.
    pub(crate) lifetimes: bool,
    pub(crate) own: Box<[SocketAddr]>,
    pub(crate) warnings: Vec<Problem>,
    /// The warnings of each policy alone, for a later load that reuses the policy.
    pub(crate) policy_warnings: BTreeMap<PolicyName, Vec<Problem>>,
    pub(crate) mode: EnforcementMode,
}

/// Whether the rules apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EnforcementMode {
    /// Refuses every attempt: the files on disk are invalid and the configuration sets `on_invalid = "deny"`.
    Closed,
    Enforcing,
}

/// The layers of a sandbox: both must allow an attempt, and neither may deny it.
#[derive(Clone, Debug)]
pub(crate) struct SandboxLayers {
    pub(crate) base: BaseLayer,
    pub(crate) sandbox: Vec<Arc<Policy>>,
}

/// The base layer, which the operator sets.
#[derive(Clone, Debug)]
pub(crate) enum BaseLayer {
    Policy(Arc<Policy>),
    Tier(Tier),
}

/// The built-in bases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Allows anything.
    System,
    /// Allows nothing.
    Untrusted,
    /// Allows any public name, but no raw TCP and no private range.
    User,
}

impl RuleSet {
    /// Returns the number of this load; every decision, record and refusal carries it.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    pub fn digest(&self) -> PolicyDigest {
        self.digest
    }

    /// Returns the digest of the files alone, which changes only when they do.
    pub fn files_digest(&self) -> PolicyDigest {
        self.files
    }

    pub fn sandboxes(&self) -> &Sandboxes {
        &self.sandboxes
    }

    /// Returns the same rules under the next generation, with an identity for a sandbox that has none yet.
    ///
    /// Returns `None` if the sandbox is unknown or already has an identity, which never changes.
    pub fn with_identity(&self, given: &IdentityAssignment) -> Option<RuleSet> {
        let mut rules = self.clone();
        rules.generation += 1;
        rules.sandboxes.assign_identity(given).then_some(rules)
    }

    /// Returns the same sandboxes under the next generation, with every attempt refused.
    pub fn to_closed(&self) -> RuleSet {
        RuleSet { generation: self.generation + 1, mode: EnforcementMode::Closed, ..self.clone() }
    }

    pub fn is_closed(&self) -> bool {
        self.mode == EnforcementMode::Closed
    }

    pub fn policies(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.policies.values()
    }

    /// Returns the warnings: what loaded but is likely a mistake.
    pub fn warnings(&self) -> &[Problem] {
        &self.warnings
    }

    /// Returns the policies of a sandbox, those of its base first.
    pub fn policies_of(&self, sandbox: &SandboxRef) -> Vec<&Arc<Policy>> {
        self.layers.get(&sandbox.id).map_or_else(Vec::new, |layers| layers.policies().collect())
    }

    /// Returns the sandbox's own policies, without those of its base.
    pub fn own_policies_of(&self, sandbox: &SandboxRef) -> &[Arc<Policy>] {
        self.layers.get(&sandbox.id).map_or(&[], |layers| &layers.sandbox)
    }

    /// Returns the tier of a sandbox, if its base is one.
    pub fn tier_of(&self, sandbox: &SandboxRef) -> Option<Tier> {
        match self.layers.get(&sandbox.id)?.base {
            BaseLayer::Policy(_) => None,
            BaseLayer::Tier(tier) => Some(tier),
        }
    }

    /// Returns the base of a sandbox, by its name in the configuration.
    pub fn base_of(&self, sandbox: &SandboxRef) -> Option<&str> {
        self.layers.get(&sandbox.id).map(|layers| match &layers.base {
            BaseLayer::Policy(policy) => policy.name.as_str(),
            BaseLayer::Tier(tier) => tier.name(),
        })
    }

    /// Returns the credentials that rules of a sandbox inject, each once, in order.
    pub fn credentials_of(&self, sandbox: &SandboxRef) -> Vec<&CredentialName> {
        let rules = self.layers.get(&sandbox.id).into_iter().flat_map(SandboxLayers::policies);
        let names: BTreeSet<&CredentialName> =
            rules.flat_map(|policy| &policy.rules).flat_map(Rule::credentials).collect();
        names.into_iter().collect()
    }

    /// Returns whether any policy sets a lifetime.
    pub fn has_lifetimes(&self) -> bool {
        self.lifetimes
    }

    /// Returns the budgets of a sandbox: the smallest of each kind over its policies.
    pub fn budgets_of(&self, sandbox: &SandboxRef) -> Budgets {
        self.layers.get(&sandbox.id).map_or_else(Budgets::default, SandboxLayers::budgets)
    }
}

impl SandboxLayers {
    pub(crate) fn base_policies(&self) -> &[Arc<Policy>] {
        match &self.base {
            BaseLayer::Policy(policy) => std::slice::from_ref(policy),
            BaseLayer::Tier(_) => &[],
        }
    }

    pub(crate) fn policies(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.base_policies().iter().chain(&self.sandbox)
    }

    pub(crate) fn budgets(&self) -> Budgets {
        self.policies().fold(Budgets::default(), |least, policy| least.min(policy.budgets))
    }
}

impl Tier {
    pub(crate) fn by_name(name: &str) -> Option<Self> {
        [Tier::System, Tier::Untrusted, Tier::User].into_iter().find(|tier| tier.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Tier::System => "system",
            Tier::Untrusted => "untrusted",
            Tier::User => "user",
        }
    }
}
