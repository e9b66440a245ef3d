//! The revocation list: ids refused although their token is valid and has not expired.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use rules::ids::{Environment, SandboxId, Tenant};
use rules::sandbox::Sandbox;
use serde::{Deserialize, Deserializer, de};

use super::claims::{MAX_TEXT, VerifiedIdentity};
use super::compact::MAX_KEY_ID;
use super::{IdentityError, is_plain};

/// Largest revocation list.
pub(super) const MAX_FILE: u64 = 4 * 1024 * 1024;

/// Why a revocation list was refused. The last good one stays in use until it is stale.
///
/// The message contains nothing of the file, which may not be a revocation list at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is not a revocation list, or it contains an invalid id: line {line}, column {column}")]
pub struct RevocationError {
    pub line: usize,
    pub column: usize,
}

impl From<serde_json::Error> for RevocationError {
    fn from(error: serde_json::Error) -> Self {
        Self { line: error.line(), column: error.column() }
    }
}

/// Compiled revocations.
#[derive(Debug, Default)]
pub struct Revocations {
    sandboxes: HashSet<RevokedSandbox>,
    generations: HashMap<RevokedSandbox, u64>,
    tenants: HashMap<Tenant, u64>,
    keys: HashSet<String>,
    tokens: HashSet<String>,
}

impl Revocations {
    /// Parses the list: JSON with `sandboxes`, `generations`, `tenants`, `keys` and `tokens`, all optional.
    pub fn parse(text: &[u8]) -> Result<Self, RevocationError> {
        let document: RevocationDocument = serde_json::from_slice(text)?;
        Ok(Self {
            sandboxes: document.sandboxes.into_iter().collect(),
            generations: strictest_limits(
                document.generations.into_iter().map(RevokedGeneration::into_limit),
            ),
            tenants: strictest_limits(
                document.tenants.into_iter().map(|found| (found.tenant, found.issued_before)),
            ),
            keys: document.keys.into_iter().map(|KeyId(id)| id).collect(),
            tokens: document.tokens.into_iter().map(|TokenId(id)| id).collect(),
        })
    }

    pub(super) fn check(&self, identity: &VerifiedIdentity) -> Result<(), IdentityError> {
        let sandbox = RevokedSandbox::from_identity(identity);
        let tenant_since = self.tenants.get(&sandbox.tenant).copied().unwrap_or(0);
        let revoked = self.keys.contains(identity.key_id())
            || identity.token_id().is_some_and(|id| self.tokens.contains(id))
            // A token without `iat` cannot prove that it was issued later.
            || identity.issued_at().unwrap_or(0) < tenant_since;
        if revoked {
            return Err(IdentityError::Revoked);
        }
        self.check_generation(&sandbox, identity.generation())
    }

    /// Checks the sandbox of a channel. One without an identity cannot be on the list.
    pub(super) fn check_sandbox(&self, sandbox: &Sandbox) -> Result<(), IdentityError> {
        let (Some(tenant), Some(environment)) = (sandbox.tenant.clone(), sandbox.environment.clone()) else {
            return Ok(());
        };
        let listed = RevokedSandbox { tenant, environment, sandbox: sandbox.id.clone() };
        self.check_generation(&listed, sandbox.generation)
    }

    fn check_generation(
        &self,
        sandbox: &RevokedSandbox,
        generation: Option<u64>,
    ) -> Result<(), IdentityError> {
        if self.sandboxes.contains(sandbox) {
            return Err(IdentityError::Revoked);
        }
        match self.generations.get(sandbox) {
            // Without a generation, nothing proves that it is new enough.
            Some(oldest) if generation.is_none_or(|found| found < *oldest) => Err(IdentityError::Generation),
            Some(_) | None => Ok(()),
        }
    }
}

/// Keeps the stricter of two limits for the same thing.
fn strictest_limits<K: Eq + Hash>(limits: impl Iterator<Item = (K, u64)>) -> HashMap<K, u64> {
    limits.fold(HashMap::new(), |mut all, (key, limit)| {
        let strictest = all.entry(key).or_insert(limit);
        *strictest = limit.max(*strictest);
        all
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RevocationDocument {
    #[serde(default)]
    sandboxes: Vec<RevokedSandbox>,
    /// Recreated sandboxes: tokens of an older generation are refused.
    #[serde(default)]
    generations: Vec<RevokedGeneration>,
    #[serde(default)]
    tenants: Vec<RevokedTenant>,
    #[serde(default)]
    keys: Vec<KeyId>,
    #[serde(default)]
    tokens: Vec<TokenId>,
}

/// A `kid`.
#[derive(Deserialize)]
struct KeyId(#[serde(deserialize_with = "key_id")] String);

/// A `jti`.
#[derive(Deserialize)]
struct TokenId(#[serde(deserialize_with = "token_id")] String);

#[derive(Debug, Deserialize, PartialEq, Eq, Hash)]
#[serde(deny_unknown_fields)]
struct RevokedSandbox {
    #[serde(deserialize_with = "tenant")]
    tenant: Tenant,
    #[serde(deserialize_with = "environment")]
    environment: Environment,
    #[serde(deserialize_with = "sandbox")]
    sandbox: SandboxId,
}

impl RevokedSandbox {
    fn from_identity(identity: &VerifiedIdentity) -> Self {
        let subject = identity.subject();
        Self {
            tenant: subject.tenant.clone(),
            environment: subject.environment.clone(),
            sandbox: subject.sandbox.clone(),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RevokedGeneration {
    #[serde(deserialize_with = "tenant")]
    tenant: Tenant,
    #[serde(deserialize_with = "environment")]
    environment: Environment,
    #[serde(deserialize_with = "sandbox")]
    sandbox: SandboxId,
    oldest: u64,
}

impl RevokedGeneration {
    fn into_limit(self) -> (RevokedSandbox, u64) {
        let Self { tenant, environment, sandbox, oldest } = self;
        (RevokedSandbox { tenant, environment, sandbox }, oldest)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RevokedTenant {
    #[serde(deserialize_with = "tenant")]
    tenant: Tenant,
    /// Unix seconds: tokens issued earlier are refused.
    issued_before: u64,
}

// Each entry is parsed as the id that it names: an entry that matches no token would revoke nothing, and
// look as if it did.

fn tenant<'de, D: Deserializer<'de>>(input: D) -> Result<Tenant, D::Error> {
    deserialize_text(input, |text| Tenant::parse(text).ok())
}

fn environment<'de, D: Deserializer<'de>>(input: D) -> Result<Environment, D::Error> {
    deserialize_text(input, |text| Environment::parse(text).ok())
}

fn sandbox<'de, D: Deserializer<'de>>(input: D) -> Result<SandboxId, D::Error> {
    deserialize_text(input, |text| SandboxId::parse(text).ok())
}

fn key_id<'de, D: Deserializer<'de>>(input: D) -> Result<String, D::Error> {
    deserialize_text(input, |text| is_plain(text, MAX_KEY_ID).then(|| text.to_owned()))
}

fn token_id<'de, D: Deserializer<'de>>(input: D) -> Result<String, D::Error> {
    deserialize_text(input, |text| is_plain(text, MAX_TEXT).then(|| text.to_owned()))
}

fn deserialize_text<'de, D: Deserializer<'de>, T>(
    input: D,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, D::Error> {
    let text = String::deserialize(input)?;
    parse(&text).ok_or_else(|| de::Error::custom("not an id"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_that_matches_no_token_is_refused_without_being_repeated() {
        let sandbox = |name: &str| {
            format!(r#"{{"sandboxes":[{{"tenant":"acme","environment":"staging","sandbox":"{name}"}}]}}"#)
        };
        for (text, good) in [
            (sandbox("build-7"), true),
            (sandbox("build-7 "), false),
            (sandbox(""), false),
            (sandbox("s3cr3t/value"), false),
            (r#"{"tenants":[{"tenant":"a c","issued_before":1}]}"#.to_owned(), false),
            (r#"{"keys":["abc"],"tokens":["abc"]}"#.to_owned(), true),
            (r#"{"keys":["s3cr3t value"]}"#.to_owned(), false),
            (r#"{"tokens":[""]}"#.to_owned(), false),
            (r#"{"keys":"s3cr3t-value"}"#.to_owned(), false),
            (r#"{"s3cr3t":[]}"#.to_owned(), false),
        ] {
            let found = Revocations::parse(text.as_bytes());
            assert_eq!(found.is_ok(), good, "{text}");
            let message = found.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(!message.contains("s3cr3t"), "{message}");
        }
    }
}
