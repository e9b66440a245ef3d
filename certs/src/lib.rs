//! Keys: everything that signs or checks a signature. It decides nothing.
//!
//! | module | answers |
//! | --- | --- |
//! | [`authority`] | who signs the certificates a sandbox sees |
//! | [`leaf`] | which certificate a sandbox sees for the decided name |
//! | [`trust`] | whom we believe upstream, and as whom we present ourselves there |
//! | [`identity`] | which sandbox a signed token names |
//! | [`service_token`] | what a memory service gets to see instead of that token |
//! | [`bundle`], [`variables`] | how the tools in a sandbox come to trust the authority |
//!
//! Clocks are passed in, files are re-read when their owner calls `refresh`, and there is no thread
//! in here. aws-lc-rs is the only provider of cryptography.

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

/// The one provider of cryptography, shared so that nobody takes the process-wide default.
pub fn crypto_provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    PROVIDER.get_or_init(|| Arc::new(rustls::crypto::aws_lc_rs::default_provider())).clone()
}

/// The SHA-256 of `bytes`.
pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut digest = [0; 32];
    digest.copy_from_slice(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes).as_ref());
    digest
}

/// `N` bytes from the operating system's generator.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N], NoRandomness> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| NoRandomness)?;
    Ok(bytes)
}

/// The generator of randomness failed; nothing can be signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the operating system gave no randomness")]
pub struct NoRandomness;

/// `bytes` in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(u32::from(half), 16).unwrap_or_default();
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0xf)]).collect()
}
