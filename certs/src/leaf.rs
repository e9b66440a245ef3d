//! Leaf certificates: minted on the fly for the decided name, kept in a bounded cache.
//!
//! The name is the decided one, never the client's SNI. Each sandbox has a cache of its own, so that one
//! sandbox cannot evict what another needs; within a sandbox, a flood of random names evicts only other
//! random names.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyUsagePurpose, SanType,
};
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert, ServerSessionMemoryCache, StoresServerSessions};
use rustls::sign::CertifiedKey;
use rustls_pki_types::UnixTime;

use crate::authority::{CertificateAuthority, random_serial};
use crate::bounded_cache::{BoundedCache, CacheBound};
use crate::chain::{ValidityPeriod, to_datetime};
use crate::host::HostName;

/// How far a leaf is backdated, for sandboxes with a slow clock.
pub const BACKDATED: Duration = Duration::from_secs(6 * 3600);
/// How long a leaf is valid after minting.
pub const LIFE: Duration = Duration::from_secs(48 * 3600);
/// Half of [`MAX_LEAVES`]; a leaf takes some 3 KiB.
const HALF_OF_LEAVES: NonZeroUsize = NonZeroUsize::new(1024).unwrap();
/// Maximum number of leaves per cache.
pub const MAX_LEAVES: usize = 2 * HALF_OF_LEAVES.get();
/// Maximum number of TLS sessions per cache kept for resumption.
pub const MAX_SESSIONS: usize = 1024;
/// Longest common name (RFC 5280, appendix A).
const MAX_COMMON_NAME: usize = 64;

/// Why a leaf could not be minted.
#[derive(Debug, thiserror::Error)]
pub enum LeafError {
    #[error("the certificate authority is not valid now; create a new one, or correct the clock")]
    AuthorityExpired,
    #[error("the certificate authority may not issue for {0}; create one whose name constraints include it")]
    OutsideConstraints(HostName),
    #[error("cannot sign the leaf: {0}")]
    Signing(rcgen::Error),
}

impl LeafError {
    /// Returns the stable code for records and metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::AuthorityExpired => "authority_expired",
            Self::OutsideConstraints(_) => "authority_constrained",
            Self::Signing(_) => "leaf_not_signed",
        }
    }
}

/// A leaf, ready for a handshake.
#[derive(Clone)]
pub struct Leaf {
    certified: Arc<CertifiedKey>,
    config: Arc<ServerConfig>,
    valid: ValidityPeriod,
    minted: u64,
}

impl Leaf {
    /// Returns the chain and the key, for callers with their own resolver.
    pub fn certified_key(&self) -> &Arc<CertifiedKey> {
        &self.certified
    }

    /// Returns a TLS server configuration that presents this leaf whatever the SNI; h2 and http/1.1.
    pub fn server_config(&self) -> &Arc<ServerConfig> {
        &self.config
    }

    pub fn valid(&self) -> ValidityPeriod {
        self.valid
    }

    /// Whether the leaf is in the first half of its life and the clock has not gone back beyond its start.
    fn is_fresh(&self, now: u64) -> bool {
        let half = self.minted + self.valid.to.saturating_sub(self.minted) / 2;
        now < half && now.saturating_add(BACKDATED.as_secs() / 2) >= self.minted
    }
}

impl fmt::Debug for Leaf {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Leaf").field("valid", &self.valid).finish_non_exhaustive()
    }
}

/// The leaves of one sandbox.
pub struct LeafCache {
    authority: Arc<CertificateAuthority>,
    template: ServerConfig,
    leaves: Mutex<BoundedCache<HostName, Leaf>>,
}

impl LeafCache {
    /// Creates an empty cache of leaves signed by `authority`.
    ///
    /// # Errors
    ///
    /// Fails only if this build of rustls supports no TLS version.
    pub fn new(authority: Arc<CertificateAuthority>) -> Result<Self, rustls::Error> {
        let mut template = ServerConfig::builder_with_provider(crate::crypto_provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(NoCertResolver));
        template.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        template.session_storage = ServerSessionMemoryCache::new(MAX_SESSIONS);
        let leaves = Mutex::new(BoundedCache::new(CacheBound::from_half(HALF_OF_LEAVES)));
        Ok(Self { authority, template, leaves })
    }

    /// Returns the leaf for `host`, from the cache or newly minted.
    pub fn leaf(&self, host: &HostName, now: UnixTime) -> Result<Leaf, LeafError> {
        let cached = self.lock_leaves().get(host).cloned();
        if let Some(leaf) = cached
            && leaf.is_fresh(now.as_secs())
        {
            return Ok(leaf);
        }
        // Mint without the lock: two at once for one name cost a signature, but do not block the others.
        let leaf = self.mint(host, now)?;
        self.lock_leaves().insert(host.clone(), leaf.clone());
        Ok(leaf)
    }

    /// Returns the number of cached leaves.
    pub fn len(&self) -> usize {
        self.lock_leaves().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn authority(&self) -> &Arc<CertificateAuthority> {
        &self.authority
    }

    fn mint(&self, host: &HostName, now: UnixTime) -> Result<Leaf, LeafError> {
        let valid = self.leaf_validity(now.as_secs())?;
        if !self.authority.permits(host) {
            return Err(LeafError::OutsideConstraints(host.clone()));
        }
        let mut chain = vec![self.authority.sign(host, valid).map_err(LeafError::Signing)?];
        chain.extend_from_slice(self.authority.intermediates());
        let certified = Arc::new(CertifiedKey::new(chain, self.authority.leaf_signer()));
        let mut config = self.template.clone();
        config.cert_resolver = Arc::new(FixedCertResolver(certified.clone()));
        let all = self.template.session_storage.clone();
        config.session_storage = Arc::new(HostSessions { host: host.clone(), all });
        Ok(Leaf { certified, config: Arc::new(config), valid, minted: now.as_secs() })
    }

    /// Limits the validity to that of the authority, so that the whole chain is valid or none of it.
    fn leaf_validity(&self, now: u64) -> Result<ValidityPeriod, LeafError> {
        let authority = self.authority.valid();
        if now < authority.from || now >= authority.to {
            return Err(LeafError::AuthorityExpired);
        }
        Ok(ValidityPeriod {
            from: now.saturating_sub(BACKDATED.as_secs()).max(authority.from),
            to: now.saturating_add(LIFE.as_secs()).min(authority.to),
        })
    }

    fn lock_leaves(&self) -> std::sync::MutexGuard<'_, BoundedCache<HostName, Leaf>> {
        // A panic leaves only complete entries behind, so a poisoned cache is safe to use.
        sys::lock(&self.leaves)
    }
}

impl fmt::Debug for LeafCache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("LeafCache").field("leaves", &self.len()).finish_non_exhaustive()
    }
}

/// Builds the parameters of a leaf for `host`.
pub(crate) fn leaf_params(host: &HostName, valid: ValidityPeriod) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.subject_alt_names = alternative_names(host)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name(host));
    params.serial_number = Some(random_serial().map_err(|_| rcgen::Error::RingUnspecified)?);
    params.not_before = to_datetime(valid.from);
    params.not_after = to_datetime(valid.to);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// Returns the decided name as the only alternative name.
fn alternative_names(host: &HostName) -> Result<Vec<SanType>, rcgen::Error> {
    match host.address() {
        None => Ok(vec![SanType::DnsName(host.as_str().try_into()?)]),
        Some(address) => Ok(vec![SanType::IpAddress(address)]),
    }
}

/// Returns the common name, for people only: clients check the alternative names. It is empty for an
/// address, which some clients would check as a name against name constraints.
fn common_name(host: &HostName) -> &str {
    let fits = host.address().is_none() && host.as_str().len() <= MAX_COMMON_NAME;
    if fits { host.as_str() } else { "Sandbar leaf" }
}

/// Presents one certificate whatever the client asks for.
struct FixedCertResolver(Arc<CertifiedKey>);

impl ResolvesServerCert for FixedCertResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

impl fmt::Debug for FixedCertResolver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Only")
    }
}

/// The sessions of one name within the shared store. No session is resumed under another name, where the
/// client would not see the certificate of that name.
#[derive(Debug)]
struct HostSessions {
    host: HostName,
    all: Arc<dyn StoresServerSessions>,
}

impl HostSessions {
    fn scoped_key(&self, key: &[u8]) -> Vec<u8> {
        [self.host.as_str().as_bytes(), &[0], key].concat()
    }
}

impl StoresServerSessions for HostSessions {
    fn put(&self, key: Vec<u8>, value: Vec<u8>) -> bool {
        self.all.put(self.scoped_key(&key), value)
    }

    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.all.get(&self.scoped_key(key))
    }

    fn take(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.all.take(&self.scoped_key(key))
    }

    fn can_cache(&self) -> bool {
        self.all.can_cache()
    }
}

/// Presents nothing: the template itself must never serve.
#[derive(Debug)]
struct NoCertResolver;

impl ResolvesServerCert for NoCertResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}
