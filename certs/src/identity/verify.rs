//! Verification of tokens. The cheapest checks come first and the signature last. Only then is the
//! revocation list consulted, so that a forged token cannot probe which ids are revoked.
//!
//! The operator configures the trusted issuers. The issuer selects the keys, and the key determines the
//! algorithm; the token only names them. A verified token is cached by its hash until it expires, but its
//! times, its audience and the revocations are checked at every use.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rules::ids::{Environment, Tenant};
use rules::sandbox::Sandbox;
use rustls_pki_types::UnixTime;

use super::claims::{ClaimReader, VerifiedIdentity};
use super::compact::{CompactJws, check_size};
use super::keyset::{self, KeySet, KeySetError};
use super::revocation::{self, RevocationError, Revocations};
use super::subject::{SubjectTemplate, TrustDomain};
use super::watched_file::{WatchedFile, WatchedFileError};
use super::{IdentityError, SigningAlgorithm};
use crate::bounded_cache::{BoundedCache, CacheBound};
use crate::sha256;
use crate::trust::RefreshStatus;

/// Longest token lifetime that can be configured; the default limit is [`TrustedIssuer::DEFAULT_LIFE`].
pub const MAX_LIFE: Duration = Duration::from_secs(3600);
/// Maximum clock skew.
pub const MAX_SKEW: Duration = Duration::from_secs(30);
/// Half of [`MAX_CACHED_TOKENS`].
const HALF_OF_CACHED: NonZeroUsize = NonZeroUsize::new(1024).unwrap();
/// Maximum number of cached verified tokens.
pub const MAX_CACHED_TOKENS: usize = 2 * HALF_OF_CACHED.get();

/// The claims that an issuer's tokens must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequiredClaims {
    /// The claims that JWT-SVID requires: `sub`, `aud` and `exp`. For SPIRE and similar issuers.
    JwtSvid,
    /// `iss sub aud exp nbf iat jti`, as our own issuer writes them.
    #[default]
    Ours,
}

/// A trusted issuer, and the limits of that trust.
#[derive(Clone, Debug)]
pub struct TrustedIssuer {
    /// The exact `iss`. `None` is for a SPIRE that sets none: its tokens are matched by trust domain.
    pub issuer: Option<String>,
    /// The only trust domain it may issue for.
    pub trust_domain: TrustDomain,
    /// The only environments it may name; `None` means all, including those of other issuers.
    pub environments: Option<Vec<Environment>>,
    /// The only tenants it may name; `None` means all.
    pub tenants: Option<Vec<Tenant>>,
    pub algorithms: Vec<SigningAlgorithm>,
    pub claims: RequiredClaims,
    pub subject: SubjectTemplate,
    /// Longest lifetime of its tokens.
    pub life: Duration,
    pub skew: Duration,
    /// Its JWK Set or SPIFFE bundle.
    pub keys: PathBuf,
}

impl TrustedIssuer {
    pub const DEFAULT_LIFE: Duration = Duration::from_secs(600);

    /// Returns an issuer like our own: ES256, all claims, ten minutes, every environment and tenant.
    pub fn new(issuer: &str, trust_domain: TrustDomain, keys: PathBuf) -> Self {
        Self {
            issuer: Some(issuer.to_owned()),
            trust_domain,
            environments: None,
            tenants: None,
            algorithms: vec![SigningAlgorithm::Es256],
            claims: RequiredClaims::Ours,
            subject: SubjectTemplate::default(),
            life: Self::DEFAULT_LIFE,
            skew: MAX_SKEW,
            keys,
        }
    }
}

/// Why a verifier could not be created, or a file not be adopted.
#[derive(Debug, thiserror::Error)]
pub enum VerifierError {
    #[error("issuer {0}: an issuer needs at least one algorithm")]
    Algorithms(String),
    #[error("issuer {0}: another issuer has the same name, or both have no name and the same trust domain")]
    Ambiguous(String),
    #[error("issuer {0}: the maximum token lifetime is {max} s and the maximum clock skew {skew} s", max = MAX_LIFE.as_secs(), skew = MAX_SKEW.as_secs())]
    Bounds(String),
    #[error("issuer keys: {0}")]
    Keys(#[from] WatchedFileError<KeySetError>),
    #[error("an issuer without a name must have JWT-SVID claims")]
    Nameless,
    #[error("revocation list: {0}")]
    Revocations(#[from] WatchedFileError<RevocationError>),
}

/// What the channel on which a token arrived requires of it.
#[derive(Clone, Copy, Debug)]
pub struct VerifyContext<'a> {
    /// The memory service's logical name.
    pub audience: &'a str,
    /// The SHA-256 of the client certificate on the channel, if any, for tokens bound to one.
    pub certificate: Option<&'a [u8; 32]>,
}

impl<'a> VerifyContext<'a> {
    /// Returns the context for `audience` on a channel without a client certificate.
    pub fn for_audience(audience: &'a str) -> Self {
        Self { audience, certificate: None }
    }
}

/// Verifies tokens. One for the process; shared between threads.
pub struct Verifier {
    issuers: Vec<LoadedIssuer>,
    revocations: Option<WatchedFile<Revocations, RevocationError>>,
    verified: Mutex<BoundedCache<[u8; 32], CachedToken>>,
}

struct LoadedIssuer {
    limits: TrustedIssuer,
    keys: WatchedFile<KeySet, KeySetError>,
}

/// A token that was verified with exactly these keys; with other keys it is verified again.
#[derive(Clone)]
struct CachedToken {
    identity: Arc<VerifiedIdentity>,
    issuer: usize,
    keys: Arc<KeySet>,
}

impl Verifier {
    /// Loads the keys of every issuer, and the revocation list if there is one.
    pub fn new(
        issuers: Vec<TrustedIssuer>,
        revocations: Option<PathBuf>,
        now: UnixTime,
    ) -> Result<Self, VerifierError> {
        check_issuers(&issuers)?;
        let issuers =
            issuers.into_iter().map(|limits| LoadedIssuer::load(limits, now)).collect::<Result<_, _>>()?;
        let follow =
            |path: PathBuf| WatchedFile::load(&path, revocation::MAX_FILE, Box::new(Revocations::parse), now);
        let revocations = revocations.map(follow).transpose()?;
        let verified = Mutex::new(BoundedCache::new(CacheBound::from_half(HALF_OF_CACHED)));
        Ok(Self { issuers, revocations, verified })
    }

    /// Checks the files and adopts those that changed and are valid. For a timer; it blocks.
    ///
    /// An error in one file does not prevent the others from being checked.
    pub fn refresh(&self, now: UnixTime) -> Result<RefreshStatus, Vec<VerifierError>> {
        let keys = self.issuers.iter().map(|issuer| issuer.keys.refresh(now).map_err(VerifierError::from));
        let revocations = self.revocations.iter().map(|list| list.refresh(now).map_err(VerifierError::from));
        let (good, bad): (Vec<_>, Vec<_>) = keys.chain(revocations).partition(Result::is_ok);
        if !bad.is_empty() {
            return Err(bad.into_iter().filter_map(Result::err).collect());
        }
        let changed = good.into_iter().flatten().any(|refreshed| refreshed == RefreshStatus::Changed);
        Ok(if changed { RefreshStatus::Changed } else { RefreshStatus::Unchanged })
    }

    /// Verifies `token` and returns the identity in it.
    pub fn verify(
        &self,
        token: &str,
        expected: &VerifyContext<'_>,
        now: UnixTime,
    ) -> Result<Arc<VerifiedIdentity>, IdentityError> {
        let now = now.as_secs();
        check_size(token)?;
        let hash = sha256(token.as_bytes());
        if let Some(known) = self.lookup_cached(&hash, now)? {
            self.check_claims(&known, expected, now)?;
            self.check_revocation(&known.identity, now)?;
            return Ok(known.identity);
        }
        let compact = CompactJws::parse(token)?;
        let claimed = self.read_claims(&compact, now)?;
        self.check_claims(&claimed, expected, now)?;
        let key = claimed.keys.key(&compact.key_id, now).ok_or(IdentityError::UnknownKey)?;
        if !key.verifies(compact.message, compact.signature) {
            return Err(IdentityError::Signature);
        }
        self.check_revocation(&claimed.identity, now)?;
        self.lock_cache().insert(hash, claimed.clone());
        Ok(claimed.identity)
    }

    /// Checks that the sandbox of a channel is not revoked: it is, whether it shows a token or leaves it out.
    ///
    /// # Errors
    ///
    /// Returns [`IdentityError::Revoked`], [`IdentityError::Generation`] if the list asks for a later generation than
    /// the sandbox is known to have, and [`IdentityError::RevocationsStale`] if the list cannot be read.
    pub fn check_sandbox(&self, sandbox: &Sandbox, now: UnixTime) -> Result<(), IdentityError> {
        let Some(list) = &self.revocations else { return Ok(()) };
        list.current(now.as_secs()).ok_or(IdentityError::RevocationsStale)?.check_sandbox(sandbox)
    }

    /// Returns the number of cached tokens.
    pub fn cached_tokens(&self) -> usize {
        self.lock_cache().len()
    }

    fn lookup_cached(&self, hash: &[u8; 32], now: u64) -> Result<Option<CachedToken>, IdentityError> {
        let Some(known) = self.lock_cache().get(hash).cloned() else {
            return Ok(None);
        };
        let Some(issuer) = self.issuers.get(known.issuer) else {
            return Ok(None);
        };
        let keys = issuer.keys.current(now).ok_or(IdentityError::KeysStale)?;
        let same = Arc::ptr_eq(&keys, &known.keys);
        Ok((same && keys.key(known.identity.key_id(), now).is_some()).then_some(known))
    }

    /// Checks the claims that must hold at every use, cached or not.
    fn check_claims(
        &self,
        claimed: &CachedToken,
        expected: &VerifyContext<'_>,
        now: u64,
    ) -> Result<(), IdentityError> {
        let issuer = self.issuers.get(claimed.issuer).ok_or(IdentityError::UnknownIssuer)?;
        claimed.identity.check_times(&issuer.limits, now)?;
        claimed.identity.check_expected(expected)
    }

    /// Call it only once the signature is verified: the result is information about sandboxes and tenants.
    fn check_revocation(&self, identity: &VerifiedIdentity, now: u64) -> Result<(), IdentityError> {
        let Some(list) = &self.revocations else {
            return Ok(());
        };
        list.current(now).ok_or(IdentityError::RevocationsStale)?.check(identity)
    }

    /// Reads the claims and checks that the issuer may make them. They are not verified yet.
    fn read_claims(&self, compact: &CompactJws<'_>, now: u64) -> Result<CachedToken, IdentityError> {
        let claims = ClaimReader { claims: &compact.claims };
        let (index, issuer) = self.find_issuer(&claims)?;
        let keys = issuer.keys.current(now).ok_or(IdentityError::KeysStale)?;
        let pinned = keys.key(&compact.key_id, now).ok_or(IdentityError::UnknownKey)?.algorithm;
        if compact.algorithm != pinned.name() {
            return Err(IdentityError::Algorithm);
        }
        let identity = Arc::new(claims.identity(&issuer.limits, &compact.key_id)?);
        Ok(CachedToken { identity, issuer: index, keys })
    }

    fn find_issuer(&self, claims: &ClaimReader<'_>) -> Result<(usize, &LoadedIssuer), IdentityError> {
        let (name, subject) = (claims.text("iss")?, claims.text("sub")?.unwrap_or_default());
        let domain = subject.strip_prefix("spiffe://").and_then(|rest| rest.split('/').next());
        let matches = |issuer: &TrustedIssuer| match (&issuer.issuer, name) {
            (Some(known), Some(named)) => known == named,
            (None, None) => domain == Some(issuer.trust_domain.as_str()),
            (Some(_), None) | (None, Some(_)) => false,
        };
        let found = self.issuers.iter().enumerate().find(|(_, issuer)| matches(&issuer.limits));
        found.ok_or(if name.is_none() {
            IdentityError::ClaimMissing("iss")
        } else {
            IdentityError::UnknownIssuer
        })
    }

    fn lock_cache(&self) -> std::sync::MutexGuard<'_, BoundedCache<[u8; 32], CachedToken>> {
        // A panic leaves only complete entries behind, so a poisoned cache is safe to use.
        sys::lock(&self.verified)
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let issuers: Vec<_> = self.issuers.iter().map(|issuer| &issuer.limits).collect();
        formatter.debug_struct("Verifier").field("issuers", &issuers).finish_non_exhaustive()
    }
}

impl LoadedIssuer {
    fn load(limits: TrustedIssuer, now: UnixTime) -> Result<Self, VerifierError> {
        let allowed = limits.algorithms.clone();
        let parse = Box::new(move |text: &[u8]| KeySet::parse(text, &allowed));
        let keys = WatchedFile::load(&limits.keys, keyset::MAX_FILE, parse, now)?;
        // Later, an empty set revokes every key; at startup it is a mistake, so report it.
        if keys.current(now.as_secs()).is_none_or(|keys| keys.is_empty()) {
            let path = limits.keys.clone();
            return Err(WatchedFileError::Content { path, source: KeySetError::NoKeys }.into());
        }
        Ok(Self { limits, keys })
    }
}

fn check_issuers(issuers: &[TrustedIssuer]) -> Result<(), VerifierError> {
    for (index, issuer) in issuers.iter().enumerate() {
        let name = || issuer.issuer.clone().unwrap_or_else(|| issuer.trust_domain.as_str().to_owned());
        if issuer.issuer.is_none() && issuer.claims == RequiredClaims::Ours {
            return Err(VerifierError::Nameless);
        }
        if issuer.algorithms.is_empty() {
            return Err(VerifierError::Algorithms(name()));
        }
        if issuer.life > MAX_LIFE || issuer.skew > MAX_SKEW {
            return Err(VerifierError::Bounds(name()));
        }
        let same = |other: &&TrustedIssuer| match (&issuer.issuer, &other.issuer) {
            (None, None) => issuer.trust_domain == other.trust_domain,
            (mine, other) => mine == other,
        };
        if issuers.iter().take(index).any(|other| same(&other)) {
            return Err(VerifierError::Ambiguous(name()));
        }
    }
    Ok(())
}
