//! Keys: everything that signs or verifies a signature. It does not decide what is allowed.
//!
//! | module | purpose |
//! | --- | --- |
//! | [`authority`] | the authority that signs the certificates a sandbox sees |
//! | [`leaf`] | the certificate a sandbox sees for the decided name |
//! | [`trust`] | the roots we trust upstream, and the client certificate we present there |
//! | [`identity`] | the sandbox that a signed token names |
//! | [`service_token`] | the token a memory service gets instead of that one |
//! | [`bundle`], [`variables`] | making the tools in a sandbox trust the authority |
//!
//! Callers pass the time in and call `refresh` to read changed files again; the crate starts no
//! threads. aws-lc-rs is the only crypto provider.

pub mod authority;
mod bounded_cache;
pub mod bundle;
mod chain;
pub mod constraints;
mod exact_issuer;
pub mod files;
pub mod host;
pub mod identity;
pub mod leaf;
pub mod pem;
mod pkcs12;
pub mod service_token;
pub mod trust;
pub mod variables;

pub use authority::{AuthorityError, AuthorityOptions, CertificateAuthority};
pub use chain::{ValidityPeriod, format_date};
pub use constraints::NameConstraints;
pub use host::{HostName, HostNameError};
pub use leaf::{LeafCache, LeafError};
pub use rustls_pki_types::UnixTime;
pub use trust::{TlsPeer, TrustError, TrustSource, TrustStore};

use std::sync::{Arc, OnceLock};

use rustls::crypto::CryptoProvider;

/// Returns the only crypto provider, shared so that no code depends on the process-wide default.
pub fn crypto_provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    PROVIDER.get_or_init(|| Arc::new(rustls::crypto::aws_lc_rs::default_provider())).clone()
}

/// Returns the SHA-256 of `bytes`.
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut digest = [0; 32];
    digest.copy_from_slice(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes).as_ref());
    digest
}

/// Returns `N` bytes from the operating system's random generator.
pub fn random_bytes<const N: usize>() -> Result<[u8; N], NoRandomness> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| NoRandomness)?;
    Ok(bytes)
}

/// The random generator failed; nothing can be signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the operating system returned no random bytes")]
pub struct NoRandomness;

/// Returns `bytes` in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(u32::from(half), 16).unwrap_or_default();
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0xf)]).collect()
}
