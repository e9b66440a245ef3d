//! Sandbox identity: signed tokens that name a sandbox, its tenant and its environment.
//!
//! The format is the SPIFFE JWT-SVID, so that SPIRE, Vault or a control plane can issue tokens as well as
//! [`LocalIssuer`]. [`Verifier`] returns the identity in a token or why it is refused. The caller then
//! compares it with the sandbox of the channel. That comparison, not single use, is what stops a copied
//! token, so a token may be used until it expires.

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

/// Returns whether a claim or name from outside is short and printable, so that we may repeat it.
pub(crate) fn is_plain(text: &str, limit: usize) -> bool {
    (1..=limit).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}
