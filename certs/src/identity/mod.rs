//! Sandbox identity: signed tokens that name a sandbox, its tenant and its environment.
//!
//! The shape is the SPIFFE JWT-SVID, so that SPIRE, Vault or a control plane can issue them as well as
//! [`LocalIssuer`]. [`Verifier`] says whom a token names or why it is refused; whether that is the sandbox
//! on whose path the token came is for the caller to compare. That comparison is what stops a copied token,
//! so a token may be used until its end.

mod claims;
mod compact;
mod error;
mod issuer;
mod key;
mod keyset;
mod revocation;
mod subject;
mod verify;
mod watched_file;

pub use claims::VerifiedIdentity;
pub use compact::{MAX_TOKEN, UnverifiedToken, inspect};
pub use error::IdentityError;
pub use issuer::{IssueError, IssueRequest, IssuerOptions, LocalIssuer, PUBLISHED_AHEAD};
pub use key::{KeyError, SignedToken, SigningAlgorithm, SigningKey, jwks};
pub use keyset::{KeySetError, MAX_KEYS};
pub use revocation::{RevocationError, Revocations};
pub use rules::ids::{Environment, SandboxId, Tenant};
pub use subject::{Subject, SubjectError, SubjectTemplate, TrustDomain};
pub use verify::{
    MAX_CACHED_TOKENS, MAX_LIFE, MAX_SKEW, RequiredClaims, TrustedIssuer, Verifier, VerifierError,
    VerifyContext,
};
pub use watched_file::{MAX_STALE, WatchedFileError};

/// A claim or name of another's choosing that we repeat: short and printable.
pub(crate) fn is_plain(text: &str, limit: usize) -> bool {
    (1..=limit).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}
