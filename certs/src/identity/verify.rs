//! Verification: whom a token names, or why it is refused. Cheapest checks first, then the signature; what
//! is revoked is looked up last, so that nobody without a key can ask the list about others.
//!
//! The issuer is one the operator trusts, it selects the keys, the key selects the algorithm; the token
//! only says which of them it claims. A verified token is remembered by its hash until its end, but its
//! times, its audience and the revocations are looked at on every use.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rules::word::{Environment, Tenant};
use rustls_pki_types::UnixTime;

use super::claims::{ClaimReader, Identity};
use super::compact::{Compact, check_size};
use super::followed::{FollowError, Followed};
use super::keyset::{self, KeySet, KeySetError};
use super::revocation::{self, RevocationError, Revocations};
use super::subject::{SubjectTemplate, TrustDomain};
use super::{Algorithm, IdentityError};
use crate::bounded::{Bound, Bounded};
use crate::sha256;
use crate::trust::Refreshed;

/// Longest life that an issuer can be given; the usual limit is [`TrustedIssuer::DEFAULT_LIFE`].
pub const MAX_LIFE: Duration = Duration::from_secs(3600);
/// Most that two clocks may differ.
pub const MAX_SKEW: Duration = Duration::from_secs(30);
/// Half of the most verified tokens remembered.
const HALF_OF_VERIFIED: NonZeroUsize = NonZeroUsize::new(1024).unwrap();
/// Most verified tokens remembered.
pub const MAX_VERIFIED: usize = 2 * HALF_OF_VERIFIED.get();

/// Which claims an issuer's tokens must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Claims {
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
    pub algorithms: Vec<Algorithm>,
    pub claims: Claims,
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
            algorithms: vec![Algorithm::Es256],
            claims: Claims::Ours,
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
    Keys(#[from] FollowError<KeySetError>),
    #[error("an issuer without a name can only be one of the JWT-SVID kind")]
    Nameless,
    #[error("the revocations: {0}")]
    Revocations(#[from] FollowError<RevocationError>),
}

/// What the path on which a token came asks of it.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// The memory service's logical name.
    pub audience: &'a str,
    /// The SHA-256 of the client certificate on the channel, if there is one, for tokens bound to it.
    pub certificate: Option<&'a [u8; 32]>,
}

impl<'a> Expected<'a> {
    /// A token for `audience`, on a channel without a client certificate.
    pub fn audience(audience: &'a str) -> Self {
        Self { audience, certificate: None }
    }
}

/// Verifies tokens. One for the process; shared between threads.
pub struct Verifier {
    issuers: Vec<Issuer>,
    revocations: Option<Followed<Revocations, RevocationError>>,
    verified: Mutex<Bounded<[u8; 32], Verified>>,
}

struct Issuer {
    limits: TrustedIssuer,
    keys: Followed<KeySet, KeySetError>,
}

/// A token that was verified by these very keys; with other keys it is verified again.
#[derive(Clone)]
struct Verified {
    identity: Arc<Identity>,
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
            .map(|limits| Issuer::load(limits, now))
            .collect::<Result<_, _>>()?;
        let follow = |path: PathBuf| {
            Followed::load(&path, revocation::MAX_FILE, Box::new(Revocations::parse), now)
        };
        let revocations = revocations.map(follow).transpose()?;
        let verified = Mutex::new(Bounded::new(Bound::twice(HALF_OF_VERIFIED)));
        Ok(Self { issuers, revocations, verified })
    }

    /// Looks at the files and takes over those that changed and are good. For a timer; it blocks.
    ///
    /// Every file is looked at, whatever is wrong with another.
    pub fn refresh(&self, now: UnixTime) -> Result<Refreshed, Vec<VerifierError>> {
        let keys =
            self.issuers.iter().map(|issuer| issuer.keys.refresh(now).map_err(VerifierError::from));
        let revocations =
            self.revocations.iter().map(|list| list.refresh(now).map_err(VerifierError::from));
        let (good, bad): (Vec<_>, Vec<_>) = keys.chain(revocations).partition(Result::is_ok);
        if !bad.is_empty() {
            return Err(bad.into_iter().filter_map(Result::err).collect());
        }
        let changed = good.into_iter().flatten().any(|refreshed| refreshed == Refreshed::Changed);
        Ok(if changed { Refreshed::Changed } else { Refreshed::Unchanged })
    }

    /// Says whom `token` names.
    pub fn verify(
        &self,
        token: &str,
        expected: &Expected<'_>,
        now: UnixTime,
    ) -> Result<Arc<Identity>, IdentityError> {
        let now = now.as_secs();
        check_size(token)?;
        let hash = sha256(token.as_bytes());
        if let Some(known) = self.remembered(&hash, now)? {
            self.check(&known, expected, now)?;
            self.check_revoked(&known.identity, now)?;
            return Ok(known.identity);
        }
        let compact = Compact::parse(token)?;
        let claimed = self.read(&compact, now)?;
        self.check(&claimed, expected, now)?;
        let key = claimed.keys.key(&compact.key_id, now).ok_or(IdentityError::UnknownKey)?;
        if !key.verifies(compact.message, compact.signature) {
            return Err(IdentityError::Signature);
        }
        self.check_revoked(&claimed.identity, now)?;
        self.lock().keep(hash, claimed.clone());
        Ok(claimed.identity)
    }

    /// How many verified tokens are remembered.
    pub fn remembered_tokens(&self) -> usize {
        self.lock().len()
    }

    fn remembered(&self, hash: &[u8; 32], now: u64) -> Result<Option<Verified>, IdentityError> {
        let Some(known) = self.lock().ask(hash).cloned() else {
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
    fn check(
        &self,
        claimed: &Verified,
        expected: &Expected<'_>,
        now: u64,
    ) -> Result<(), IdentityError> {
        let issuer = self.issuers.get(claimed.issuer).ok_or(IdentityError::UnknownIssuer)?;
        claimed.identity.check_times(&issuer.limits, now)?;
        claimed.identity.check_expected(expected)
    }

    /// Only for a token whose signature is good: the answer tells of other sandboxes and tenants.
    fn check_revoked(&self, identity: &Identity, now: u64) -> Result<(), IdentityError> {
        let Some(list) = &self.revocations else {
            return Ok(());
        };
        list.current(now).ok_or(IdentityError::RevocationsStale)?.check(identity)
    }

    /// Everything the token claims, in the form its issuer may claim it; not yet believed.
    fn read(&self, compact: &Compact<'_>, now: u64) -> Result<Verified, IdentityError> {
        let claims = ClaimReader { claims: &compact.claims };
        let (index, issuer) = self.issuer_of(&claims)?;
        let keys = issuer.keys.current(now).ok_or(IdentityError::KeysStale)?;
        let pinned = keys.key(&compact.key_id, now).ok_or(IdentityError::UnknownKey)?.algorithm;
        if compact.algorithm != pinned.name() {
            return Err(IdentityError::Algorithm);
        }
        let identity = Arc::new(claims.identity(&issuer.limits, &compact.key_id)?);
        Ok(Verified { identity, issuer: index, keys })
    }

    fn issuer_of(&self, claims: &ClaimReader<'_>) -> Result<(usize, &Issuer), IdentityError> {
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

    fn lock(&self) -> std::sync::MutexGuard<'_, Bounded<[u8; 32], Verified>> {
        // A panic elsewhere leaves whole entries behind, so a poisoned cache is still a cache.
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let issuers: Vec<_> = self.issuers.iter().map(|issuer| &issuer.limits).collect();
        formatter.debug_struct("Verifier").field("issuers", &issuers).finish_non_exhaustive()
    }
}

impl Issuer {
    fn load(limits: TrustedIssuer, now: UnixTime) -> Result<Self, VerifierError> {
        let allowed = limits.algorithms.clone();
        let parse = Box::new(move |text: &[u8]| KeySet::parse(text, &allowed));
        let keys = Followed::load(&limits.keys, keyset::MAX_FILE, parse, now)?;
        // Later an empty set revokes; at the start it is a mistake, and better said than found out.
        if keys.current(now.as_secs()).is_none_or(|keys| keys.is_empty()) {
            let path = limits.keys.clone();
            return Err(FollowError::Content { path, source: KeySetError::NoKeys }.into());
        }
        Ok(Self { limits, keys })
    }
}

fn check_issuers(issuers: &[TrustedIssuer]) -> Result<(), VerifierError> {
    for (index, issuer) in issuers.iter().enumerate() {
        let name =
            || issuer.issuer.clone().unwrap_or_else(|| issuer.trust_domain.as_str().to_owned());
        if issuer.issuer.is_none() && issuer.claims == Claims::Ours {
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
