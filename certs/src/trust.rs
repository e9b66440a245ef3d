//! Trust in upstreams: the roots, and the client certificate to present.
//!
//! A connection is never unverified: a client configuration comes only from a [`TlsPeer`], which has a
//! [`HostName`], which is never empty. (Some HTTP engines treat an empty server name as a request to verify
//! nothing.)

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use rustls::client::Resumption;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use rustls_native_certs::CertificateResult;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use zeroize::Zeroizing;

use crate::files::{self, FileError, FilePoller};
use crate::host::HostName;
use crate::pem::{self, PemError};
use crate::sha256;

/// Maximum number of roots in one set, including the system's.
pub const MAX_ROOTS: usize = 4096;
/// Maximum number of upstream TLS sessions per set kept for resumption.
pub const MAX_SESSIONS: usize = 1024;

/// Whether the roots of the operating system are trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SystemStore {
    Excluded,
    #[default]
    Included,
}

/// The paths of a client certificate chain and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFiles {
    pub chain: PathBuf,
    pub key: PathBuf,
}

/// The source of one set of trust: the operator's default, or that of one rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustSource {
    pub system: SystemStore,
    /// PEM files with additional roots.
    pub files: Vec<PathBuf>,
    /// Presented if the upstream asks for a client certificate.
    pub client: Option<ClientFiles>,
}

/// Why a set of trust was refused. The last good one stays in use.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("{}: unsupported private key; use ECDSA P-256 or P-384, Ed25519 or RSA", .0.display())]
    ClientKey(PathBuf),
    #[error("{}: the private key does not belong to the first certificate of {}", key.display(), chain.display())]
    ClientMismatch { chain: PathBuf, key: PathBuf },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "no root certificates to trust; install the system's CA certificates, or configure a file of roots"
    )]
    NoRoots,
    #[error("{}: {source}", path.display())]
    Pem { path: PathBuf, source: PemError },
    #[error("{}: certificate {index} cannot be a root", path.display())]
    Root { path: PathBuf, index: usize },
    #[error(
        "the system's CA certificates are no longer fully readable ({roots} roots, {errors} errors); make them readable again"
    )]
    SystemStore { roots: usize, errors: usize },
    #[error("more than {MAX_ROOTS} roots")]
    TooMany,
    #[error("this build supports no TLS version: {0}")]
    Versions(rustls::Error),
}

/// The result of checking the files for changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefreshStatus {
    Changed,
    Unchanged,
}

/// A set of trust that follows its files.
pub struct TrustStore {
    source: TrustSource,
    watch: Mutex<FilePoller>,
    current: ArcSwap<TrustSet>,
}

impl TrustStore {
    /// Loads everything in `source`.
    pub fn load(source: TrustSource) -> Result<Self, TrustError> {
        let mut watch = FilePoller::new(watched_paths(&source));
        watch.poll_changed(); // before reading, so that a change during the read is seen later
        let current = ArcSwap::from_pointee(TrustSet::load(&source, None)?);
        Ok(Self { source, watch: Mutex::new(watch), current })
    }

    /// Checks the files and adopts a change, completely or not at all. For a timer; it blocks.
    pub fn refresh(&self) -> Result<RefreshStatus, TrustError> {
        let mut watch = sys::lock(&self.watch);
        if !watch.poll_changed() {
            return Ok(RefreshStatus::Unchanged);
        }
        let before = self.current.load().system;
        let loaded = TrustSet::load(&self.source, Some(before));
        let loaded = loaded.inspect_err(|_| watch.mark_changed())?;
        if loaded.digest == self.current.load().digest {
            return Ok(RefreshStatus::Unchanged);
        }
        self.current.store(Arc::new(loaded));
        Ok(RefreshStatus::Changed)
    }

    /// Returns the upstream that must prove to be `host`.
    pub fn peer_for(&self, host: HostName) -> TlsPeer {
        TlsPeer { host, set: self.current.load_full() }
    }

    /// Returns the number of trusted roots.
    pub fn root_count(&self) -> usize {
        self.current.load().roots.len()
    }
}

impl fmt::Debug for TrustStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TrustStore").field("source", &self.source).finish_non_exhaustive()
    }
}

/// An upstream with everything needed to verify it. It always has a name.
#[derive(Clone)]
pub struct TlsPeer {
    host: HostName,
    set: Arc<TrustSet>,
}

impl TlsPeer {
    pub fn host(&self) -> &HostName {
        &self.host
    }

    /// Returns the name or address to verify, never empty, for engines that take text.
    pub fn name(&self) -> &str {
        self.host.as_str()
    }

    /// Returns the name to verify, for rustls.
    pub fn server_name(&self) -> ServerName<'static> {
        self.host.server_name().clone()
    }

    /// Returns a verifying client configuration: these roots, this client certificate, h2 and http/1.1. It is
    /// shared, so that sessions are resumed.
    pub fn client_config(&self) -> Arc<ClientConfig> {
        self.set.config.clone()
    }

    /// Creates a connection that verifies this very peer: name and configuration cannot be mixed up.
    pub fn connection(&self) -> Result<ClientConnection, rustls::Error> {
        ClientConnection::new(self.client_config(), self.server_name())
    }

    /// Returns the roots, for engines that build their own client.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.set.roots
    }

    pub fn client_certificate(&self) -> Option<&ClientCertificate> {
        self.set.client.as_ref()
    }

    /// Returns a key for connection pools: it differs for other roots or another client certificate.
    pub fn group_key(&self) -> u64 {
        let (first, _) = self.set.digest.split_first_chunk().unwrap_or((&[0; 8], &[]));
        u64::from_be_bytes(*first)
    }
}

impl fmt::Debug for TlsPeer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TlsPeer").field("host", &self.host).finish_non_exhaustive()
    }
}

/// The certificate we present to an upstream that asks for one.
pub struct ClientCertificate {
    chain: Vec<CertificateDer<'static>>,
    key: Zeroizing<PrivateKeyDer<'static>>,
}

impl ClientCertificate {
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// Returns the private key, for engines that build their own client. Do not keep a copy.
    pub fn expose_key(&self) -> &PrivateKeyDer<'static> {
        &self.key
    }

    /// Returns the SHA-256 of the certificate, to which RFC 8705 (`x5t#S256`) binds tokens.
    pub fn thumbprint(&self) -> [u8; 32] {
        self.chain.first().map(|certificate| sha256(certificate)).unwrap_or_default()
    }

    fn load(source: &ClientFiles) -> Result<(Self, CertifiedKey), TrustError> {
        let key = pem::private_key(&files::read_secret(&source.key)?).map_err(pem_error_at(&source.key))?;
        let chain_text = files::read_bounded(&source.chain, files::MAX_PEM)?;
        let chain = pem::certificates(&chain_text).map_err(pem_error_at(&source.chain))?;
        let signer = rustls::crypto::aws_lc_rs::sign::any_supported_type(&key)
            .map_err(|_| TrustError::ClientKey(source.key.clone()))?;
        let certified = CertifiedKey::new(chain.clone(), signer);
        if certified.keys_match().is_err() {
            let (chain, key) = (source.chain.clone(), source.key.clone());
            return Err(TrustError::ClientMismatch { chain, key });
        }
        Ok((Self { chain, key }, certified))
    }
}

impl fmt::Debug for ClientCertificate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ClientCertificate").finish_non_exhaustive()
    }
}

struct TrustSet {
    config: Arc<ClientConfig>,
    roots: Vec<CertificateDer<'static>>,
    system: SystemRootCount,
    client: Option<ClientCertificate>,
    digest: [u8; 32],
}

impl TrustSet {
    fn load(source: &TrustSource, before: Option<SystemRootCount>) -> Result<Self, TrustError> {
        let found = match source.system {
            SystemStore::Excluded => CertificateResult::default(),
            SystemStore::Included => rustls_native_certs::load_native_certs(),
        };
        let system = SystemRootCount { roots: found.certs.len(), errors: found.errors.len() };
        system.check(before)?;
        let (store, roots) = load_roots(source, found.certs)?;
        let client = source.client.as_ref().map(ClientCertificate::load).transpose()?;
        let (client, certified) = client.unzip();
        let digest = digest(&roots, client.as_ref());
        let config = Arc::new(client_config(store, certified)?);
        Ok(Self { config, roots, system, client, digest })
    }
}

/// The result of loading the system's store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SystemRootCount {
    roots: usize,
    errors: usize,
}

impl SystemRootCount {
    /// Fails if the store is now empty or has new errors: a lost or half-written store is not a store with
    /// fewer roots. Errors that were there from the start do not count, since a system may hold a stray file
    /// for years.
    fn check(self, before: Option<Self>) -> Result<(), TrustError> {
        let Self { roots, errors } = self;
        let lost = before.is_some_and(|before| errors > before.errors || (roots == 0 && before.roots > 0));
        if lost { Err(TrustError::SystemStore { roots, errors }) } else { Ok(()) }
    }
}

fn client_config(store: RootCertStore, client: Option<CertifiedKey>) -> Result<ClientConfig, TrustError> {
    let verified = ClientConfig::builder_with_provider(crate::crypto_provider())
        .with_safe_default_protocol_versions()
        .map_err(TrustError::Versions)?
        .with_root_certificates(store);
    let mut config = match client {
        Some(client) => verified.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(client))),
        None => verified.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.resumption = Resumption::in_memory_sessions(MAX_SESSIONS);
    Ok(config)
}

/// Returns the operating system's roots, without those that rustls cannot parse.
pub fn system_roots() -> Vec<CertificateDer<'static>> {
    rustls_native_certs::load_native_certs().certs
}

type LoadedRoots = (RootCertStore, Vec<CertificateDer<'static>>);

fn load_roots(source: &TrustSource, system: Vec<CertificateDer<'static>>) -> Result<LoadedRoots, TrustError> {
    let (mut store, mut roots) = (RootCertStore::empty(), Vec::new());
    for root in system {
        if store.add(root.clone()).is_ok() {
            roots.push(root);
        }
    }
    for path in &source.files {
        add_root_file(path, &mut store, &mut roots)?;
    }
    match roots.len() {
        0 => Err(TrustError::NoRoots),
        1..=MAX_ROOTS => Ok((store, roots)),
        _ => Err(TrustError::TooMany),
    }
}

/// Adds the roots of an operator's file, in which an unusable certificate is an error.
fn add_root_file(
    path: &Path,
    store: &mut RootCertStore,
    roots: &mut Vec<CertificateDer<'static>>,
) -> Result<(), TrustError> {
    let text = files::read_bounded(path, files::MAX_PEM)?;
    for (index, root) in pem::certificates(&text).map_err(pem_error_at(path))?.into_iter().enumerate() {
        let refused = |_| TrustError::Root { path: path.to_owned(), index: index + 1 };
        store.add(root.clone()).map_err(refused)?;
        roots.push(root);
    }
    Ok(())
}

fn digest(roots: &[CertificateDer<'_>], client: Option<&ClientCertificate>) -> [u8; 32] {
    let mut parts: Vec<[u8; 32]> = roots.iter().map(|root| sha256(root)).collect();
    parts.sort_unstable(); // directories have no defined order
    let chain = client.map(|client| client.chain.as_slice()).unwrap_or_default();
    parts.extend(chain.iter().map(|certificate| sha256(certificate)));
    // The number of roots tells a root from a client certificate. A renewed key comes with a renewed
    // certificate, so the key itself need not be hashed.
    let counted = [&roots.len().to_be_bytes()[..], parts.as_flattened()].concat();
    sha256(&counted)
}

/// Returns every path that can change the set.
fn watched_paths(source: &TrustSource) -> Vec<PathBuf> {
    let mut paths = source.files.clone();
    if let Some(client) = &source.client {
        paths.extend([client.chain.clone(), client.key.clone()]);
    }
    if source.system == SystemStore::Included {
        paths.extend(system_paths());
    }
    paths
}

/// Returns where `rustls-native-certs` looks: the two variables, or else the paths built into OpenSSL.
fn system_paths() -> Vec<PathBuf> {
    let named = ["SSL_CERT_FILE", "SSL_CERT_DIR"].into_iter().filter_map(std::env::var_os);
    let named: Vec<PathBuf> =
        named.flat_map(|value| std::env::split_paths(&value).collect::<Vec<_>>()).collect();
    if !named.is_empty() {
        return named;
    }
    let found = openssl_probe::probe();
    found.cert_file.into_iter().chain(found.cert_dir).collect()
}

fn pem_error_at(path: &Path) -> impl FnOnce(PemError) -> TrustError {
    let path = path.to_owned();
    move |source| TrustError::Pem { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AuthorityOptions, CertificateAuthority, UnixTime};

    #[test]
    fn a_store_that_is_lost_or_half_written_is_not_taken_over() {
        let of = |roots, errors| SystemRootCount { roots, errors };
        for (before, found, good) in [
            (None, of(140, 0), true),
            (None, of(140, 3), true),
            (None, of(0, 1), true),
            (Some(of(140, 0)), of(139, 0), true),
            (Some(of(140, 1)), of(141, 1), true),
            (Some(of(140, 0)), of(139, 1), false),
            (Some(of(140, 0)), of(0, 0), false),
            (Some(of(140, 2)), of(0, 1), false),
            (Some(of(0, 0)), of(0, 0), true),
        ] {
            assert_eq!(found.check(before).is_ok(), good, "{before:?} then {found:?}");
        }
    }

    #[test]
    fn half_a_file_of_roots_counts_as_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("roots.pem");
        let anchor = || CertificateAuthority::in_memory(&AuthorityOptions::default(), UnixTime::now());
        let text = anchor().unwrap().anchor_pem() + &anchor().unwrap().anchor_pem();
        for (length, errors) in [(text.len(), false), (text.len() * 3 / 4, true)] {
            std::fs::write(&path, &text.as_bytes()[..length]).unwrap();
            let found = rustls_native_certs::load_certs_from_paths(Some(&path), None);
            assert_eq!(!found.errors.is_empty(), errors, "{length}");
        }
    }

    #[test]
    fn a_root_is_not_taken_for_a_client_certificate() {
        let (mut one, mut two) = (CertificateDer::from(vec![1]), CertificateDer::from(vec![2]));
        if sha256(&one) > sha256(&two) {
            std::mem::swap(&mut one, &mut two);
        }
        let key = PrivateKeyDer::Pkcs8(vec![0].into());
        let client = ClientCertificate { chain: vec![two.clone()], key: Zeroizing::new(key) };
        let as_client = digest(std::slice::from_ref(&one), Some(&client));
        assert_ne!(digest(&[one, two], None), as_client);
    }
}
