//! Verification: whom a token names, or why it is refused. Cheapest checks first, then the signature; what
//! is revoked is looked up last, so that nobody without a key can ask the list about others.
//!
//! The issuer is one the operator trusts, it selects the keys, the key selects the algorithm; the token
//! only says which of them it claims. A verified token is remembered by its hash until its end, but its
//! times, its audience and the revocations are looked at on every use.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rules::ids::{Environment, Tenant};
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

/// Longest life that an issuer can be given; the usual limit is [`TrustedIssuer::DEFAULT_LIFE`].
pub const MAX_LIFE: Duration = Duration::from_secs(3600);
/// Most that two clocks may differ.
pub const MAX_SKEW: Duration = Duration::from_secs(30);
/// Half of the most verified tokens remembered.
const HALF_OF_CACHED: NonZeroUsize = NonZeroUsize::new(1024).unwrap();
/// Most verified tokens remembered.
pub const MAX_CACHED_TOKENS: usize = 2 * HALF_OF_CACHED.get();

/// Which claims an issuer's tokens must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequiredClaims {
    /// What JWT-SVID asks for: `sub`, `aud` and `exp`. For SPIRE and its like.
    JwtSvid,
    /// `iss sub aud exp nbf iat jti`, as our own issuer writes them.
    #[default]
    Ours,
}

/// An issuer whose tokens are believed, and how far.
#[derive(Clone, Debug)]
pub struct TrustedIssuer {
    /// The exact `iss`. `None` is for a SPIRE that sets none: its tokens are known by their trust domain.
    pub issuer: Option<String>,
    /// The only trust domain it may speak for.
    pub trust_domain: TrustDomain,
    /// The only environments it may name; `None` is every one, also those of other issuers.
    pub environments: Option<Vec<Environment>>,
    /// The only tenants it may name; `None` is every one.
    pub tenants: Option<Vec<Tenant>>,
    pub algorithms: Vec<SigningAlgorithm>,
    pub claims: RequiredClaims,
    pub subject: SubjectTemplate,
    /// Longest life of its tokens.
    pub life: Duration,
    pub skew: Duration,
    /// Its JWK Set or SPIFFE bundle.
    pub keys: PathBuf,
}

impl TrustedIssuer {
    pub const DEFAULT_LIFE: Duration = Duration::from_secs(600);

    /// An issuer like our own: ES256, all claims, ten minutes, every environment and tenant.
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

/// Why there is no verifier, or why a file was not taken over.
#[derive(Debug, thiserror::Error)]
pub enum VerifierError {
    #[error("issuer {0}: an issuer needs at least one algorithm")]
    Algorithms(String),
    #[error("issuer {0}: another issuer has the same name, or none and the same trust domain")]
    Ambiguous(String),
    #[error("issuer {0}: tokens may live {max} s and clocks may differ {skew} s at most", max = MAX_LIFE.as_secs(), skew = MAX_SKEW.as_secs())]
    Bounds(String),
    #[error("the keys of an issuer: {0}")]
    Keys(#[from] WatchedFileError<KeySetError>),
    #[error("an issuer without a name can only be one of the JWT-SVID kind")]
    Nameless,
    #[error("the revocations: {0}")]
    Revocations(#[from] WatchedFileError<RevocationError>),
}

/// What the path on which a token came asks of it.
#[derive(Clone, Copy, Debug)]
pub struct VerifyContext<'a> {
    /// The memory service's logical name.
    pub audience: &'a str,
    /// The SHA-256 of the client certificate on the channel, if there is one, for tokens bound to it.
    pub certificate: Option<&'a [u8; 32]>,
}

impl<'a> VerifyContext<'a> {
    /// A token for `audience`, on a channel without a client certificate.
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

/// A token that was verified by these very keys; with other keys it is verified again.
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
        let issuers = issuers
            .into_iter()
            .map(|limits| LoadedIssuer::load(limits, now))
            .collect::<Result<_, _>>()?;
        let follow = |path: PathBuf| {
            WatchedFile::load(&path, revocation::MAX_FILE, Box::new(Revocations::parse), now)
        };
        let revocations = revocations.map(follow).transpose()?;
        let verified = Mutex::new(BoundedCache::new(CacheBound::from_half(HALF_OF_CACHED)));
        Ok(Self { issuers, revocations, verified })
    }

    /// Looks at the files and takes over those that changed and are good. For a timer; it blocks.
    ///
    /// Every file is looked at, whatever is wrong with another.
    pub fn refresh(&self, now: UnixTime) -> Result<RefreshStatus, Vec<VerifierError>> {
        let keys =
            self.issuers.iter().map(|issuer| issuer.keys.refresh(now).map_err(VerifierError::from));
        let revocations =
            self.revocations.iter().map(|list| list.refresh(now).map_err(VerifierError::from));
        let (good, bad): (Vec<_>, Vec<_>) = keys.chain(revocations).partition(Result::is_ok);
        if !bad.is_empty() {
            return Err(bad.into_iter().filter_map(Result::err).collect());
        }
        let changed =
            good.into_iter().flatten().any(|refreshed| refreshed == RefreshStatus::Changed);
        Ok(if changed { RefreshStatus::Changed } else { RefreshStatus::Unchanged })
    }

    /// Says whom `token` names.
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

    /// How many verified tokens are remembered.
    pub fn cached_tokens(&self) -> usize {
        self.lock_cache().len()
    }

    fn lookup_cached(
        &self,
        hash: &[u8; 32],
        now: u64,
    ) -> Result<Option<CachedToken>, IdentityError> {
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

    /// What the claims must say at every use, remembered or not.
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

    /// Only for a token whose signature is good: the answer tells of other sandboxes and tenants.
    fn check_revocation(&self, identity: &VerifiedIdentity, now: u64) -> Result<(), IdentityError> {
        let Some(list) = &self.revocations else {
            return Ok(());
        };
        list.current(now).ok_or(IdentityError::RevocationsStale)?.check(identity)
    }

    /// Everything the token claims, in the form its issuer may claim it; not yet believed.
    fn read_claims(
        &self,
        compact: &CompactJws<'_>,
        now: u64,
    ) -> Result<CachedToken, IdentityError> {
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

    fn find_issuer(
        &self,
        claims: &ClaimReader<'_>,
    ) -> Result<(usize, &LoadedIssuer), IdentityError> {
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
        // A panic elsewhere leaves whole entries behind, so a poisoned cache is still a cache.
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
        // Later an empty set revokes; at the start it is a mistake, and better said than found out.
        if keys.current(now.as_secs()).is_none_or(|keys| keys.is_empty()) {
            let path = limits.keys.clone();
            return Err(WatchedFileError::Content { path, source: KeySetError::NoKeys }.into());
        }
        Ok(Self { limits, keys })
    }
}

fn check_issuers(issuers: &[TrustedIssuer]) -> Result<(), VerifierError> {
    for (index, issuer) in issuers.iter().enumerate() {
        let name =
            || issuer.issuer.clone().unwrap_or_else(|| issuer.trust_domain.as_str().to_owned());
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
