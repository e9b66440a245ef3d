//! Identities assigned to sandboxes of a warm pool: once, then fixed, also across restarts.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use rules::ids::{AgentCard, Environment, SandboxId, Tenant};
use rules::{IdentityAssignment, RuleSet};
use serde::{Deserialize, Serialize};

use crate::state_file::{Durability, read_state, write_atomic};

/// File of the assigned identities, in the log directory.
const IDENTITIES_FILE: &str = "identities.json";

/// One identity, as sent to the admin socket and as stored on disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AssignedIdentity {
    pub(crate) sandbox: String,
    pub(crate) tenant: String,
    pub(crate) environment: String,
    #[serde(default)]
    pub(crate) agent_card: Option<String>,
}

/// The assigned identities.
pub(crate) struct IdentityStore {
    path: PathBuf,
    assigned: Mutex<Vec<AssignedIdentity>>,
}

impl IdentityStore {
    /// Reads the identities that earlier processes assigned.
    pub(crate) fn open(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join(IDENTITIES_FILE);
        let shown = path.display();
        let read = read_state(&path).with_context(|| format!("cannot read {shown}"))?;
        let assigned = read.map(|bytes| serde_json::from_slice(&bytes)).transpose();
        let assigned = assigned.with_context(|| format!("{shown} is not valid: repair or remove it"))?;
        let assigned = assigned.unwrap_or_default();
        Ok(IdentityStore { path, assigned: Mutex::new(assigned) })
    }

    /// Returns the rules with every assigned identity, skipping sandboxes that are no longer configured.
    pub(crate) fn apply(&self, rules: RuleSet) -> anyhow::Result<RuleSet> {
        let assigned = sys::lock(&self.assigned);
        assigned
            .iter()
            .try_fold(rules, |rules, one| Ok(rules.with_identity(&parse_identity(one)?).unwrap_or(rules)))
    }

    /// Stores the identity of a waiting sandbox. It counts once [`IdentityStore::publish`] has been called.
    pub(crate) fn store(
        &self,
        rules: &RuleSet,
        identity: AssignedIdentity,
    ) -> anyhow::Result<AssignedIdentity> {
        if rules.with_identity(&parse_identity(&identity)?).is_none() {
            bail!("sandbox `{}` is unknown, or already has an identity", identity.sandbox);
        }
        let all: Vec<AssignedIdentity> =
            sys::lock(&self.assigned).iter().cloned().chain([identity.clone()]).collect();
        self.save(&all)?;
        Ok(identity)
    }

    /// Puts a stored identity into the rules.
    pub(crate) fn publish(
        &self,
        rules: &ArcSwap<RuleSet>,
        identity: AssignedIdentity,
    ) -> anyhow::Result<u64> {
        let Some(fresh) = rules.load().with_identity(&parse_identity(&identity)?) else {
            bail!("sandbox `{}` has left meanwhile, or has an identity", identity.sandbox);
        };
        sys::lock(&self.assigned).push(identity);
        let generation = fresh.generation();
        rules.store(std::sync::Arc::new(fresh));
        Ok(generation)
    }

    fn save(&self, all: &[AssignedIdentity]) -> anyhow::Result<()> {
        write_atomic(&self.path, &all, Durability::Disk)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

fn parse_identity(identity: &AssignedIdentity) -> anyhow::Result<IdentityAssignment> {
    let bad = |what: &str, error: rules::ids::IdError| anyhow::anyhow!("{what}: {error}");
    let card = identity.agent_card.as_deref().map(AgentCard::parse).transpose();
    Ok(IdentityAssignment {
        sandbox: SandboxId::parse(&identity.sandbox).map_err(|error| bad("sandbox", error))?,
        tenant: Tenant::parse(&identity.tenant).map_err(|error| bad("tenant", error))?,
        environment: Environment::parse(&identity.environment).map_err(|error| bad("environment", error))?,
        agent_card: card.map_err(|error| bad("agent card", error))?,
    })
}
