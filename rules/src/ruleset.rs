//! `RuleSet`: everything that was loaded, compiled, under one generation number.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use crate::budget::Budgets;
use crate::ids::{PolicyName, SandboxId};
use crate::load::problem::Problem;
use crate::policy::{Policy, PolicyDigest};
use crate::sandbox::{IdentityAssignment, SandboxRef, Sandboxes};

/// The compiled rules of every sandbox. Made by [`crate::compile`], swapped whole, never changed.
#[derive(Clone, Debug)]
pub struct RuleSet {
    pub(crate) generation: u64,
    pub(crate) digest: PolicyDigest,
    /// The digest of the files alone, without what time gives and takes.
    pub(crate) files: PolicyDigest,
    pub(crate) sandboxes: Sandboxes,
    pub(crate) layers: HashMap<SandboxId, SandboxLayers>,
    pub(crate) policies: BTreeMap<PolicyName, Arc<Policy>>,
    /// Sandboxes whose lifetime is over: they may do nothing.
    pub(crate) ended: BTreeSet<SandboxId>,
    /// Whether any policy bounds the life of a sandbox.
    pub(crate) lifetimes: bool,
    pub(crate) own: Box<[SocketAddr]>,
    pub(crate) warnings: Vec<Problem>,
    /// The warnings of each policy by itself, for the load that takes the policy over.
    pub(crate) noted: BTreeMap<PolicyName, Vec<Problem>>,
    pub(crate) mode: EnforcementMode,
}

/// Whether the rules are asked at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EnforcementMode {
    /// Every attempt is refused: the files on disk are not good, and the operator wants nothing to pass then.
    Closed,
    Enforcing,
}

/// What a sandbox is judged by: every layer must allow, none may deny.
#[derive(Clone, Debug)]
pub(crate) struct SandboxLayers {
    pub(crate) base: BaseLayer,
    pub(crate) sandbox: Vec<Arc<Policy>>,
}

/// The operator's floor.
#[derive(Clone, Debug)]
pub(crate) enum BaseLayer {
    Policy(Arc<Policy>),
    Tier(Tier),
}

/// The ready-made bases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Anything.
    System,
    /// Nothing.
    Untrusted,
    /// Any public name; no raw TCP, no private range.
    User,
}

impl RuleSet {
    /// Counts loads; it stands in every decision, record and refusal.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    pub fn digest(&self) -> PolicyDigest {
        self.digest
    }

    /// The digest of the files alone: the same for as long as they are.
    pub fn files_digest(&self) -> PolicyDigest {
        self.files
    }

    pub fn sandboxes(&self) -> &Sandboxes {
        &self.sandboxes
    }

    /// The same rules, under the next generation, with the identity of a sandbox that waited for one.
    ///
    /// None if the sandbox is unknown or has an identity: it is fixed then.
    pub fn with_identity(&self, given: &IdentityAssignment) -> Option<RuleSet> {
        let mut rules = self.clone();
        rules.generation += 1;
        rules.sandboxes.assign_identity(given).then_some(rules)
    }

    /// The same sandboxes under the next generation, and nothing allowed to any of them.
    pub fn to_closed(&self) -> RuleSet {
        RuleSet { generation: self.generation + 1, mode: EnforcementMode::Closed, ..self.clone() }
    }

    pub fn is_closed(&self) -> bool {
        self.mode == EnforcementMode::Closed
    }

    pub fn policies(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.policies.values()
    }

    /// What was accepted but is likely not meant.
    pub fn warnings(&self) -> &[Problem] {
        &self.warnings
    }

    /// The policies of a sandbox, the base's first.
    pub fn policies_of(&self, sandbox: &SandboxRef) -> Vec<&Arc<Policy>> {
        self.layers.get(&sandbox.id).map_or_else(Vec::new, |layers| layers.policies().collect())
    }

    /// The policies of a sandbox without those of its base.
    pub fn own_policies_of(&self, sandbox: &SandboxRef) -> &[Arc<Policy>] {
        self.layers.get(&sandbox.id).map_or(&[], |layers| &layers.sandbox)
    }

    /// The ready-made base of a sandbox, if it is one.
    pub fn tier_of(&self, sandbox: &SandboxRef) -> Option<Tier> {
        match self.layers.get(&sandbox.id)?.base {
            BaseLayer::Policy(_) => None,
            BaseLayer::Tier(tier) => Some(tier),
        }
    }

    /// The base of a sandbox, as the operator's file names it.
    pub fn base_of(&self, sandbox: &SandboxRef) -> Option<&str> {
        self.layers.get(&sandbox.id).map(|layers| match &layers.base {
            BaseLayer::Policy(policy) => policy.name.as_str(),
            BaseLayer::Tier(tier) => tier.name(),
        })
    }

    /// Whether any policy bounds the life of a sandbox.
    pub fn has_lifetimes(&self) -> bool {
        self.lifetimes
    }

    /// The budgets of a sandbox: the smallest of each over its policies.
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
