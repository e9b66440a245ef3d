//! The token a memory service sees: ours, short-lived, and about the sandbox of the channel.
//!
//! Sandbar never forwards the sandbox's own token, because anyone who receives a bearer token can use it. It
//! signs a new one, caches it for half its life, and publishes a JWK Set for the service to verify it.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rustls_pki_types::UnixTime;
use serde_json::{Value, json};

use crate::bounded_cache::{BoundedCache, CacheBound};
use crate::identity::{KeyError, MAX_SKEW, SignedToken, SigningAlgorithm, SigningKey, Subject, is_plain};
use crate::{NoRandomness, hex, random_bytes, sha256};

/// Longest lifetime of a token for a service.
pub const MAX_LIFE: Duration = Duration::from_secs(60);
/// Shortest lifetime that still leaves time to use the token.
pub const MIN_LIFE: Duration = Duration::from_secs(4);
/// Half of [`MAX_TOKENS`].
const HALF_OF_TOKENS: NonZeroUsize = NonZeroUsize::new(1024).unwrap();
/// Maximum number of cached tokens.
pub const MAX_TOKENS: usize = 2 * HALF_OF_TOKENS.get();
/// Maximum number of banks in a token, so that it still fits a header.
pub const MAX_BANKS: usize = 64;
/// Largest token: servers commonly accept 8 KiB per header line, and there is other content.
pub const MAX_BYTES: usize = 6 * 1024;
/// Longest issuer, audience or bank.
const MAX_NAME: usize = 255;

/// The claims that a service reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceProfile {
    /// The claims that Astrocyte's OpenID Connect mode maps. It accepts RS256 only.
    Astrocyte,
    /// Plain claims: `tid`, `env`, `banks`.
    #[default]
    Generic,
}

/// Why there is no token for a service.
#[derive(Debug, thiserror::Error)]
pub enum ServiceTokenError {
    #[error("this service accepts RS256 only; configure an RSA key for it")]
    Algorithm,
    #[error("the {0} must be 1 to 255 printable characters without spaces")]
    Characters(&'static str),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("tokens for a service must be signed with ES256 or RS256")]
    KeyKind,
    #[error("the lifetime of a token for a service must be {} to {} seconds", MIN_LIFE.as_secs(), MAX_LIFE.as_secs())]
    Life,
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
    #[error("the token would be larger than {MAX_BYTES} bytes; grant fewer banks or shorter names")]
    TooLarge,
    #[error("a token can name at most {MAX_BANKS} banks")]
    TooManyBanks,
}

/// The content of a token for a service.
#[derive(Clone, Copy, Debug)]
pub struct ServiceClaims<'a> {
    /// The sandbox of the channel, not one that the sandbox claims to be.
    pub subject: &'a Subject,
    /// The service's logical name.
    pub audience: &'a str,
    /// The banks that the policy grants, so that the service can enforce them too.
    pub banks: &'a [String],
    /// The SHA-256 of the client certificate we present; it makes the token useless to others.
    pub certificate: Option<&'a [u8; 32]>,
}

/// Signs tokens for services and caches each for half its life.
pub struct ServiceTokens {
    key: SigningKey,
    previous: Option<PreviousKey>,
    issuer: String,
    actor: String,
    profile: ServiceProfile,
    life: Duration,
    cache: Mutex<BoundedCache<[u8; 32], CachedServiceToken>>,
}

/// The public half of a key that no longer signs.
struct PreviousKey {
    jwk: Value,
    /// Unix seconds at which the last token it signed has expired everywhere.
    ends: u64,
}

#[derive(Clone)]
struct CachedServiceToken {
    token: Arc<SignedToken>,
    issued_at: u64,
}

impl ServiceTokens {
    /// Signs with `key` as `issuer`, which is also the actor in every token unless [`Self::with_actor`] sets one.
    pub fn new(
        key: SigningKey,
        issuer: &str,
        profile: ServiceProfile,
        life: Duration,
    ) -> Result<Self, ServiceTokenError> {
        match (key.algorithm(), profile) {
            (SigningAlgorithm::EdDsa, _) => return Err(ServiceTokenError::KeyKind),
            (SigningAlgorithm::Es256, ServiceProfile::Astrocyte) => {
                return Err(ServiceTokenError::Algorithm);
            }
            (SigningAlgorithm::Es256, ServiceProfile::Generic) | (SigningAlgorithm::Rs256, _) => {}
        }
        if !(MIN_LIFE..=MAX_LIFE).contains(&life) {
            return Err(ServiceTokenError::Life);
        }
        if !is_plain(issuer, MAX_NAME) {
            return Err(ServiceTokenError::Characters("issuer"));
        }
        let cache = Mutex::new(BoundedCache::new(CacheBound::from_half(HALF_OF_TOKENS)));
        let (issuer, actor) = (issuer.to_owned(), issuer.to_owned());
        Ok(Self { key, previous: None, issuer, actor, profile, life, cache })
    }

    /// Sets the actor (`act.sub`), for several proxies that sign as one issuer.
    pub fn with_actor(mut self, actor: &str) -> Result<Self, ServiceTokenError> {
        if !is_plain(actor, MAX_NAME) {
            return Err(ServiceTokenError::Characters("actor"));
        }
        self.actor = actor.to_owned();
        Ok(self)
    }

    /// Takes over from `previous`, whose key stays published until the tokens it signed have expired.
    pub fn with_previous(mut self, previous: &Self, now: UnixTime) -> Self {
        let ends = now.as_secs().saturating_add((previous.life + MAX_SKEW).as_secs());
        let mut jwk = previous.key.jwk().clone();
        jwk["exp"] = ends.into();
        self.previous = Some(PreviousKey { jwk, ends });
        self
    }

    /// Returns a token with `claims`, valid for at least half its lifetime.
    pub fn token(
        &self,
        claims: &ServiceClaims<'_>,
        now: UnixTime,
    ) -> Result<Arc<SignedToken>, ServiceTokenError> {
        check_claims(claims)?;
        let now = now.as_secs();
        let content = self.build_claims(claims);
        let hash = sha256(content.to_string().as_bytes());
        let cached = self.lock_cache().get(&hash).cloned();
        // If the clock was set back, the cached token may be issued in the future: sign a new one.
        let half = self.life.as_secs() / 2;
        let fresh =
            |cached: &CachedServiceToken| now.checked_sub(cached.issued_at).is_some_and(|age| age < half);
        if let Some(cached) = cached.filter(fresh) {
            return Ok(cached.token);
        }
        let token = Arc::new(self.sign(content, now)?);
        self.lock_cache().insert(hash, CachedServiceToken { token: token.clone(), issued_at: now });
        Ok(token)
    }

    /// Returns the JWK Set with which services verify.
    pub fn jwks(&self, now: UnixTime) -> Value {
        let previous = self.previous.as_ref().filter(|previous| now.as_secs() < previous.ends);
        let keys: Vec<&Value> =
            previous.map(|previous| &previous.jwk).into_iter().chain([self.key.jwk()]).collect();
        json!({ "keys": keys })
    }

    /// Returns the number of cached tokens.
    pub fn len(&self) -> usize {
        self.lock_cache().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Builds all claims except the times, which is what tells cached tokens apart.
    fn build_claims(&self, claims: &ServiceClaims<'_>) -> Value {
        let Subject { tenant, environment, sandbox, .. } = claims.subject;
        let mut content = json!({
            "iss": self.issuer,
            "sub": claims.subject.to_string(),
            "aud": claims.audience,
            "act": { "sub": self.actor },
            "tid": tenant.as_str(),
            "env": environment.as_str(),
            "banks": claims.banks,
        });
        if let Some(thumbprint) = claims.certificate {
            content["cnf"] = json!({ "x5t#S256": URL_SAFE_NO_PAD.encode(thumbprint) });
        }
        if self.profile == ServiceProfile::Astrocyte {
            content["astrocyte_actor_type"] = "agent".into();
            content["astrocyte_principal"] = format!("agent:{sandbox}").into();
        }
        content
    }

    fn sign(&self, mut claims: Value, now: u64) -> Result<SignedToken, ServiceTokenError> {
        claims["iat"] = now.into();
        claims["nbf"] = now.into();
        claims["exp"] = now.saturating_add(self.life.as_secs()).into();
        claims["jti"] = hex(&random_bytes::<16>()?).into();
        let token = self.key.sign(&claims)?;
        if token.expose().len() > MAX_BYTES { Err(ServiceTokenError::TooLarge) } else { Ok(token) }
    }

    fn lock_cache(&self) -> std::sync::MutexGuard<'_, BoundedCache<[u8; 32], CachedServiceToken>> {
        // A panic leaves only complete entries behind, so a poisoned cache is safe to use.
        sys::lock(&self.cache)
    }
}

impl fmt::Debug for ServiceTokens {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ServiceTokens").field("key", &self.key).finish_non_exhaustive()
    }
}

fn check_claims(claims: &ServiceClaims<'_>) -> Result<(), ServiceTokenError> {
    if !is_plain(claims.audience, MAX_NAME) {
        return Err(ServiceTokenError::Characters("audience"));
    }
    if claims.banks.len() > MAX_BANKS {
        return Err(ServiceTokenError::TooManyBanks);
    }
    if claims.banks.iter().all(|bank| is_plain(bank, MAX_NAME)) {
        Ok(())
    } else {
        Err(ServiceTokenError::Characters("bank"))
    }
}
