//! The revocation list: what is refused although its token is good and has not ended.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use serde::Deserialize;

use super::IdentityError;
use super::claims::Identity;

/// Largest revocation list.
pub(super) const MAX_FILE: u64 = 4 * 1024 * 1024;

/// Why a revocation list was refused. The last good one stays in use, for a while.
#[derive(Debug, thiserror::Error)]
#[error("it is not a revocation list: {0}")]
pub struct RevocationError(#[from] serde_json::Error);

/// Compiled revocations.
#[derive(Debug, Default)]
pub struct Revocations {
    sandboxes: HashSet<SandboxDocument>,
    generations: HashMap<SandboxDocument, u64>,
    tenants: HashMap<String, u64>,
    keys: HashSet<String>,
    tokens: HashSet<String>,
}

impl Revocations {
    /// Reads the list: JSON with `sandboxes`, `generations`, `tenants`, `keys` and `tokens`, all optional.
    pub fn parse(text: &[u8]) -> Result<Self, RevocationError> {
        let document: Document = serde_json::from_slice(text)?;
        Ok(Self {
            sandboxes: document.sandboxes.into_iter().collect(),
            generations: latest(document.generations.into_iter().map(GenerationDocument::split)),
            tenants: latest(
                document.tenants.into_iter().map(|found| (found.tenant, found.issued_before)),
            ),
            keys: document.keys.into_iter().collect(),
            tokens: document.tokens.into_iter().collect(),
        })
    }

    pub(super) fn check(&self, identity: &Identity) -> Result<(), IdentityError> {
        let sandbox = SandboxDocument::of(identity);
        let tenant_since = self.tenants.get(&sandbox.tenant).copied().unwrap_or(0);
        let revoked = self.keys.contains(identity.key_id())
            || identity.token_id().is_some_and(|id| self.tokens.contains(id))
            || self.sandboxes.contains(&sandbox)
            // Who does not say when it was issued cannot show that it came after.
            || identity.issued_at().unwrap_or(0) < tenant_since;
        if revoked {
            return Err(IdentityError::Revoked);
        }
        match self.generations.get(&sandbox) {
            // Who does not say its generation cannot show that it is new enough.
            Some(oldest) if identity.generation().is_none_or(|found| found < *oldest) => {
                Err(IdentityError::Generation)
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// Of two limits for one thing the stricter counts.
fn latest<K: Eq + Hash>(limits: impl Iterator<Item = (K, u64)>) -> HashMap<K, u64> {
    limits.fold(HashMap::new(), |mut all, (key, limit)| {
        let kept = all.entry(key).or_insert(limit);
        *kept = limit.max(*kept);
        all
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default)]
    sandboxes: Vec<SandboxDocument>,
    /// Sandboxes that were made anew: tokens of an older generation are refused.
    #[serde(default)]
    generations: Vec<GenerationDocument>,
    #[serde(default)]
    tenants: Vec<TenantDocument>,
    /// Each a `kid`.
    #[serde(default)]
    keys: Vec<String>,
    /// Each a `jti`.
    #[serde(default)]
    tokens: Vec<String>,
}

#[derive(Debug, Deserialize, PartialEq, Eq, Hash)]
#[serde(deny_unknown_fields)]
struct SandboxDocument {
    tenant: String,
    environment: String,
    sandbox: String,
}

impl SandboxDocument {
    fn of(identity: &Identity) -> Self {
        let subject = identity.subject();
        Self {
            tenant: subject.tenant.to_string(),
            environment: subject.environment.to_string(),
            sandbox: subject.sandbox.to_string(),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GenerationDocument {
    tenant: String,
    environment: String,
    sandbox: String,
    oldest: u64,
}

impl GenerationDocument {
    fn split(self) -> (SandboxDocument, u64) {
        let Self { tenant, environment, sandbox, oldest } = self;
        (SandboxDocument { tenant, environment, sandbox }, oldest)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantDocument {
    tenant: String,
    /// Unix seconds: what was issued earlier is refused.
    issued_before: u64,
}
