//! `RuleSet`: everything that was loaded, compiled, under one generation number.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use crate::budget::Budgets;
use crate::load::problem::Problem;
use crate::policy::{Digest, Policy};
use crate::sandbox::{Given, SandboxRef, Sandboxes};
use crate::word::{PolicyName, SandboxId};

/// The compiled rules of every sandbox. Made by [`crate::compile`], swapped whole, never changed.
#[derive(Clone, Debug)]
pub struct RuleSet {
    pub(crate) generation: u64,
    pub(crate) digest: Digest,
    /// The digest of the files alone, without what time gives and takes.
    pub(crate) files: Digest,
    pub(crate) sandboxes: Sandboxes,
    pub(crate) layers: HashMap<SandboxId, Layers>,
    pub(crate) policies: BTreeMap<PolicyName, Arc<Policy>>,
    /// Sandboxes whose lifetime is over: they may do nothing.
    pub(crate) ended: BTreeSet<SandboxId>,
    /// Whether any policy bounds the life of a sandbox.
    pub(crate) lifetimes: bool,
    pub(crate) own: Box<[SocketAddr]>,
    pub(crate) warnings: Vec<Problem>,
    /// The warnings of each policy by itself, for the load that takes the policy over.
    pub(crate) noted: BTreeMap<PolicyName, Vec<Problem>>,
    pub(crate) mood: Mood,
}

/// Whether the rules are asked at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    /// Every attempt is refused: the files on disk are not good, and the operator wants nothing to pass then.
    Closed,
    Judging,
}

/// What a sandbox is judged by: every layer must allow, none may deny.
#[derive(Clone, Debug)]
pub(crate) struct Layers {
    pub(crate) base: Base,
    pub(crate) sandbox: Vec<Arc<Policy>>,
}

/// The operator's floor.
#[derive(Clone, Debug)]
pub(crate) enum Base {
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

    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The digest of the files alone: the same for as long as they are.
    pub fn files(&self) -> Digest {
        self.files
    }

    pub fn sandboxes(&self) -> &Sandboxes {
        &self.sandboxes
    }

    /// The same rules, under the next generation, with the identity of a sandbox that waited for one.
    ///
    /// None if the sandbox is unknown or has an identity: it is fixed then.
    pub fn identified(&self, given: &Given) -> Option<RuleSet> {
        let mut rules = self.clone();
        rules.generation += 1;
        rules.sandboxes.give(given).then_some(rules)
    }

    /// The same sandboxes under the next generation, and nothing allowed to any of them.
    pub fn closed(&self) -> RuleSet {
        RuleSet { generation: self.generation + 1, mood: Mood::Closed, ..self.clone() }
    }

    pub fn is_closed(&self) -> bool {
        self.mood == Mood::Closed
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
            Base::Policy(_) => None,
            Base::Tier(tier) => Some(tier),
        }
    }

    /// The base of a sandbox, as the operator's file names it.
    pub fn base_of(&self, sandbox: &SandboxRef) -> Option<&str> {
        self.layers.get(&sandbox.id).map(|layers| match &layers.base {
            Base::Policy(policy) => policy.name.as_str(),
            Base::Tier(tier) => tier.name(),
        })
    }

    /// Whether any policy bounds the life of a sandbox.
    pub fn has_lifetimes(&self) -> bool {
        self.lifetimes
    }

    /// The budgets of a sandbox: the smallest of each over its policies.
    pub fn budgets_of(&self, sandbox: &SandboxRef) -> Budgets {
        self.layers.get(&sandbox.id).map_or_else(Budgets::default, Layers::budgets)
    }
}

impl Layers {
    pub(crate) fn base_policies(&self) -> &[Arc<Policy>] {
        match &self.base {
            Base::Policy(policy) => std::slice::from_ref(policy),
            Base::Tier(_) => &[],
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
