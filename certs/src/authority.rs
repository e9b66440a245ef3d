//! The certificate authority that signs the leaves a sandbox sees instead of the real ones.
//!
//! It is created at first start, created in memory for one run, or provided by the operator as PEM. An
//! authority that ordinary clients would reject does not load: a sample leaf is minted and verified first.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm, SigningKey,
};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use sys::file::Mode;
use zeroize::{Zeroize, Zeroizing};

use crate::chain::{self, CheckedChain, ValidityPeriod, format_date, to_datetime};
use crate::constraints::{NameConstraints, NameLimits};
use crate::exact_issuer::{self, PlaceholderSigner};
use crate::files::{self, FileError};
use crate::host::HostName;
use crate::pem::{self, PemError};
use crate::{NoRandomness, hex, random_bytes, sha256};

/// How far an authority is backdated, for sandboxes with a slow clock.
pub const BACKDATED: Duration = Duration::from_secs(24 * 3600);
/// Longest lifetime of an authority created here: ten years of 365.25 days.
pub const MAX_LIFE: Duration = Duration::from_secs(10 * 31_557_600);
/// Maximum number of certificates in an operator's chain.
pub const MAX_CHAIN: usize = 8;

const KEY_FILE: &str = "ca.key";
const CHAIN_FILE: &str = "ca.pem";

/// How to create an authority.
#[derive(Clone, Debug)]
pub struct AuthorityOptions {
    /// Shown in certificate viewers; a random suffix tells two authorities apart.
    pub name: String,
    pub life: Duration,
    /// The names it may issue for; `None` means all.
    pub permitted: Option<NameConstraints>,
}

impl Default for AuthorityOptions {
    fn default() -> Self {
        let life = Duration::from_secs(365 * 24 * 3600);
        Self { name: "Sandbar".to_owned(), life, permitted: None }
    }
}

/// Why an authority could not be created or loaded.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("certificate {0} of the chain cannot be read as X.509")]
    Certificate(usize),
    #[error(
        "certificate {0} of the chain is not signed by the one after it; order the file from the signing certificate up to the root"
    )]
    Chain(usize),
    #[error("the name constraints of certificate {0} are not supported, or permit no name")]
    Constraints(usize),
    #[error("{}: an authority already exists; remove it first, or choose another directory", .0.display())]
    Exists(PathBuf),
    #[error("certificate {index} of the chain is not valid now; it is valid from {from} to {to}")]
    Expired { index: usize, from: String, to: String },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{}: found {found} but not {missing}, perhaps after an interrupted start; restore {missing}, or remove {found} and start over", dir.display())]
    Half { dir: PathBuf, found: &'static str, missing: &'static str },
    #[error("the private key does not belong to the first certificate of the chain")]
    KeyMismatch,
    #[error("the lifetime of an authority must be between one hour and ten years")]
    Life,
    #[error("the chain has more than {MAX_CHAIN} certificates")]
    LongChain,
    #[error("{}: no authority found; create one with: sandbar ca init --dir {}", .0.display(), .0.display())]
    Missing(PathBuf),
    #[error(
        "the chain does not end with a root certificate, which most clients need; append the certificates up to it"
    )]
    NoRoot,
    #[error("certificate {0} of the chain may not sign certificates (it needs CA:TRUE and keyCertSign)")]
    NotAuthority(usize),
    #[error("certificate {0} of the chain allows fewer authorities below it (pathlen) than there are")]
    PathLength(usize),
    #[error("{}: {source}", path.display())]
    Pem { path: PathBuf, source: PemError },
    #[error("certificate {0} of the chain is not for servers (its extended key usage lacks serverAuth)")]
    Purpose(usize),
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
    #[error("clients would reject what this authority signs: {0}")]
    Refused(rustls::Error),
    #[error("the authority cannot sign: {0}")]
    Signing(rcgen::Error),
    #[error("unsupported private key; use ECDSA P-256 or P-384, Ed25519 or RSA")]
    UnsupportedKey,
}

/// Signs leaves. Its key never leaves it and is zeroized on drop.
pub struct CertificateAuthority {
    pair: ZeroizingKeyPair,
    issuer: Issuer<'static, PlaceholderSigner>,
    /// The subject of the signing certificate, as raw DER.
    subject: Vec<u8>,
    leaf_key: LeafKey,
    served: Vec<CertificateDer<'static>>,
    anchor: CertificateDer<'static>,
    limits: Vec<NameLimits>,
    valid: ValidityPeriod,
}

/// The public facts about an authority.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct AuthorityInfo {
    pub subject: String,
    pub key: &'static str,
    pub valid_from: String,
    pub valid_to: String,
    pub valid_to_unix: u64,
    /// Of the certificate that clients must trust.
    pub anchor_sha256: String,
    /// Certificates sent along with a leaf.
    pub intermediates: usize,
    /// The names it may issue for; empty means all except `excluded`.
    pub permitted: Vec<String>,
    /// The names it may not issue for.
    pub excluded: Vec<String>,
}

impl CertificateAuthority {
    /// Creates an authority in memory only, for one run.
    pub fn in_memory(options: &AuthorityOptions, now: UnixTime) -> Result<Self, AuthorityError> {
        let (pair, certificate) = generate_root(options, now)?;
        Self::assemble(pair, vec![certificate], now)
    }

    /// Creates an authority and stores it in `dir`, the key readable by its owner only.
    pub fn create(dir: &Path, options: &AuthorityOptions, now: UnixTime) -> Result<Self, AuthorityError> {
        files::make_private_dir(dir)?;
        let _lock = files::lock_dir(dir)?;
        create_locked(dir, options, now)
    }

    /// Opens the authority stored in `dir`.
    pub fn open(dir: &Path, now: UnixTime) -> Result<Self, AuthorityError> {
        if !exists(dir)? {
            return Err(AuthorityError::Missing(dir.to_owned()));
        }
        Self::load(&dir.join(KEY_FILE), &dir.join(CHAIN_FILE), now)
    }

    /// Opens the authority stored in `dir`, or creates it at the first start.
    pub fn open_or_create(
        dir: &Path,
        options: &AuthorityOptions,
        now: UnixTime,
    ) -> Result<Self, AuthorityError> {
        files::make_private_dir(dir)?;
        let _lock = files::lock_dir(dir)?;
        if exists(dir)? { Self::open(dir, now) } else { create_locked(dir, options, now) }
    }

    /// Loads an operator's key and chain, which starts with the signing certificate.
    pub fn load(key: &Path, chain: &Path, now: UnixTime) -> Result<Self, AuthorityError> {
        AuthorityFiles::read(key, chain)?.load_authority(now)
    }

    /// Checks an operator's key and chain and stores a copy in `dir`.
    pub fn import(dir: &Path, key: &Path, chain: &Path, now: UnixTime) -> Result<Self, AuthorityError> {
        let given = AuthorityFiles::read(key, chain)?;
        let authority = given.load_authority(now)?;
        files::make_private_dir(dir)?;
        let _lock = files::lock_dir(dir)?;
        if exists(dir)? {
            return Err(AuthorityError::Exists(dir.to_owned()));
        }
        save_files(dir, &given.key_text, &given.chain_text)?;
        Ok(authority)
    }

    fn assemble(
        pair: ZeroizingKeyPair,
        mut chain: Vec<CertificateDer<'static>>,
        now: UnixTime,
    ) -> Result<Self, AuthorityError> {
        let checked = chain::check_chain(pair.der_bytes(), &chain, now)?;
        let (Some(signing), Some(anchor)) = (chain.first().cloned(), chain.pop()) else {
            return Err(AuthorityError::Certificate(1));
        };
        let served = chain;
        let blank = PlaceholderSigner { public_key: pair.der_bytes().to_vec(), algorithm: pair.algorithm() };
        let issuer = Issuer::from_ca_cert_der(&signing, blank).map_err(AuthorityError::Signing)?;
        let (subject, leaf_key) = (chain::raw_subject(&signing), LeafKey::generate()?);
        let CheckedChain { limits, valid } = checked;
        let authority = Self { pair, issuer, subject, leaf_key, served, anchor, limits, valid };
        authority.verify_sample_leaf(now)?;
        Ok(authority)
    }

    /// Mints a leaf and verifies it as an ordinary client would.
    fn verify_sample_leaf(&self, now: UnixTime) -> Result<(), AuthorityError> {
        let mut names =
            self.limits.iter().flat_map(NameLimits::examples).chain(HostName::parse("sandbar.example"));
        let Some(name) = names.find(|name| self.permits(name)) else {
            return Err(AuthorityError::Constraints(1)); // it permits no name at all
        };
        let valid =
            ValidityPeriod { from: now.as_secs().saturating_sub(60), to: now.as_secs().saturating_add(60) };
        let leaf = self.sign(&name, valid).map_err(AuthorityError::Signing)?;
        let mut roots = RootCertStore::empty();
        roots.add(self.anchor.clone()).map_err(AuthorityError::Refused)?;
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), crate::crypto_provider())
            .build()
            .map_err(|error| AuthorityError::Refused(rustls::Error::General(error.to_string())))?
            .verify_server_cert(&leaf, &self.served, name.server_name(), &[], now)
            .map_err(AuthorityError::Refused)?;
        Ok(())
    }

    /// Returns whether clients would accept a leaf of this authority for `host`.
    pub fn permits(&self, host: &HostName) -> bool {
        self.limits.iter().all(|limits| limits.permits(host))
    }

    /// Returns the period during which the whole chain is valid.
    pub fn valid(&self) -> ValidityPeriod {
        self.valid
    }

    /// Returns the certificate that clients must trust, as PEM.
    pub fn anchor_pem(&self) -> String {
        pem::encode_certificate(&self.anchor)
    }

    /// Returns the certificate that clients must trust.
    pub fn anchor(&self) -> &CertificateDer<'static> {
        &self.anchor
    }

    /// Returns the certificates to send after the leaf: the chain without its root.
    pub(crate) fn intermediates(&self) -> &[CertificateDer<'static>] {
        &self.served
    }

    pub(crate) fn leaf_signer(&self) -> Arc<dyn rustls::sign::SigningKey> {
        self.leaf_key.signer.clone()
    }

    pub fn describe(&self) -> AuthorityInfo {
        AuthorityInfo {
            subject: chain::subject(self.served.first().unwrap_or(&self.anchor)),
            key: key_name(self.pair.algorithm()),
            valid_from: format_date(self.valid.from),
            valid_to: format_date(self.valid.to),
            valid_to_unix: self.valid.to,
            anchor_sha256: hex(&sha256(&self.anchor)),
            intermediates: self.served.len(),
            permitted: self.limits.iter().flat_map(NameLimits::describe_permitted).collect(),
            excluded: self.limits.iter().flat_map(NameLimits::describe_excluded).collect(),
        }
    }

    /// Signs a certificate for `host`. The caller has checked [`Self::permits`] and chosen the validity.
    pub(crate) fn sign(
        &self,
        host: &HostName,
        valid: ValidityPeriod,
    ) -> Result<CertificateDer<'static>, rcgen::Error> {
        let params = crate::leaf::leaf_params(host, valid)?;
        let blank = params.signed_by(&self.leaf_key.pair, &self.issuer)?;
        exact_issuer::issue_certificate(blank.der(), &self.subject, &self.pair)
    }
}

/// An operator's files, read once, so that the bytes that are checked are the bytes that are stored.
struct AuthorityFiles<'a> {
    key: &'a Path,
    key_text: Zeroizing<Vec<u8>>,
    chain: &'a Path,
    chain_text: Vec<u8>,
}

impl<'a> AuthorityFiles<'a> {
    fn read(key: &'a Path, chain: &'a Path) -> Result<Self, AuthorityError> {
        let (key_text, chain_text) = (files::read_secret(key)?, files::read_bounded(chain, files::MAX_PEM)?);
        Ok(Self { key, key_text, chain, chain_text })
    }

    fn load_authority(&self, now: UnixTime) -> Result<CertificateAuthority, AuthorityError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| AuthorityError::Pem { path, source }
        };
        let der = pem::private_key(&self.key_text).map_err(at(self.key))?;
        let certificates = pem::certificates(&self.chain_text).map_err(at(self.chain))?;
        let pair = KeyPair::try_from(&*der).map_err(|_| AuthorityError::UnsupportedKey)?;
        CertificateAuthority::assemble(ZeroizingKeyPair(pair), certificates, now)
    }
}

impl fmt::Debug for CertificateAuthority {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("CertificateAuthority").field(&self.describe()).finish()
    }
}

/// An rcgen key pair that zeroizes rcgen's copy of the key; aws-lc zeroizes its own.
struct ZeroizingKeyPair(KeyPair);

impl Drop for ZeroizingKeyPair {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl PublicKeyData for ZeroizingKeyPair {
    fn der_bytes(&self) -> &[u8] {
        self.0.der_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl SigningKey for ZeroizingKeyPair {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        self.0.sign(message)
    }
}

/// The key of all leaves, generated at every start. A key per name would cost time and gain nothing.
struct LeafKey {
    pair: ZeroizingKeyPair,
    signer: Arc<dyn rustls::sign::SigningKey>,
}

impl LeafKey {
    fn generate() -> Result<Self, AuthorityError> {
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(AuthorityError::Signing)?;
        let der = Zeroizing::new(PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pair.serialize_der())));
        let signer = rustls::crypto::aws_lc_rs::sign::any_ecdsa_type(&der);
        Ok(Self { pair: ZeroizingKeyPair(pair), signer: signer.map_err(AuthorityError::Refused)? })
    }
}

/// Returns whether `dir` has an authority. Half of one is always an error.
fn exists(dir: &Path) -> Result<bool, AuthorityError> {
    let half = |found, missing| AuthorityError::Half { dir: dir.to_owned(), found, missing };
    match (dir.join(KEY_FILE).exists(), dir.join(CHAIN_FILE).exists()) {
        (true, true) => Ok(true),
        (false, false) => Ok(false),
        (true, false) => Err(half(KEY_FILE, CHAIN_FILE)),
        (false, true) => Err(half(CHAIN_FILE, KEY_FILE)),
    }
}

/// Writes the chain first: a lone key could not be told from one that is still needed.
fn save_files(dir: &Path, key: &[u8], chain: &[u8]) -> Result<(), FileError> {
    files::write_atomic(&dir.join(CHAIN_FILE), chain, Mode::Everybody)?;
    files::write_atomic(&dir.join(KEY_FILE), key, Mode::Owner)
}

fn create_locked(
    dir: &Path,
    options: &AuthorityOptions,
    now: UnixTime,
) -> Result<CertificateAuthority, AuthorityError> {
    if exists(dir)? {
        return Err(AuthorityError::Exists(dir.to_owned()));
    }
    let (pair, certificate) = generate_root(options, now)?;
    let key = pem::encode_private_key(pair.0.serialized_der());
    let chain = pem::encode_certificate(&certificate);
    // Verify before writing, so that a failure leaves nothing behind.
    let authority = CertificateAuthority::assemble(pair, vec![certificate], now)?;
    save_files(dir, key.as_bytes(), chain.as_bytes())?;
    Ok(authority)
}

fn generate_root(
    options: &AuthorityOptions,
    now: UnixTime,
) -> Result<(ZeroizingKeyPair, CertificateDer<'static>), AuthorityError> {
    if options.life > MAX_LIFE || options.life < Duration::from_secs(3600) {
        return Err(AuthorityError::Life);
    }
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(AuthorityError::Signing)?;
    let pair = ZeroizingKeyPair(pair);
    let certificate = authority_params(options, now)?.self_signed(&pair);
    Ok((pair, certificate.map_err(AuthorityError::Signing)?.der().clone()))
}

fn authority_params(options: &AuthorityOptions, now: UnixTime) -> Result<CertificateParams, AuthorityError> {
    let mut params = CertificateParams::default();
    let name = format!("{} {}", options.name, hex(&random_bytes::<3>()?));
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "Sandbar");
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(random_serial()?);
    params.not_before = to_datetime(now.as_secs().saturating_sub(BACKDATED.as_secs()));
    params.not_after = to_datetime(now.as_secs().saturating_add(options.life.as_secs()));
    // It signs leaves for servers only, and no further authority.
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.name_constraints = options.permitted.as_ref().map(NameConstraints::to_extension);
    Ok(params)
}

fn key_name(algorithm: &SignatureAlgorithm) -> &'static str {
    match algorithm {
        alg if alg == &PKCS_ECDSA_P256_SHA256 => "ECDSA P-256",
        alg if alg == &rcgen::PKCS_ECDSA_P384_SHA384 => "ECDSA P-384",
        alg if alg == &rcgen::PKCS_ED25519 => "Ed25519",
        alg if alg == &rcgen::PKCS_RSA_SHA256 => "RSA",
        _ => "other",
    }
}

/// Returns a positive serial number of 127 random bits, as RFC 5280 (4.1.2.2) and strict clients require.
pub(crate) fn random_serial() -> Result<rcgen::SerialNumber, NoRandomness> {
    let mut bytes = random_bytes::<16>()?;
    bytes[0] = bytes[0] & 0x7f | 0x40; // positive, and always 16 bytes
    Ok(rcgen::SerialNumber::from_slice(&bytes))
}
