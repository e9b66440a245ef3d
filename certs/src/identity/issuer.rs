//! A local issuer, for a single host, tests and demos, where no control plane issues identities.
//!
//! Its directory holds `issuer.json`, one `<kid>.key` (0600) per key, and `jwks.json` for verifiers. A new
//! key is published before it signs. An old one stays published until its last token has expired; its entry
//! has that time (`exp`), so that verifiers drop it even if no command runs here again.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rules::ids::Environment;
use rustls_pki_types::UnixTime;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sys::file::Mode;

use super::key::generate_pkcs8;
use super::subject::{Subject, SubjectError, TrustDomain};
use super::verify::{MAX_SKEW, TrustedIssuer};
use super::{KeyError, SignedToken, SigningAlgorithm, SigningKey, is_plain};
use crate::files::{self, FileError};
use crate::{NoRandomness, hex, pem, random_bytes};

/// How long a new key is published before it signs, so that every verifier has read it by then.
pub const PUBLISHED_AHEAD: Duration = Duration::from_secs(60);
/// Largest `issuer.json`.
const MAX_DOCUMENT: u64 = 64 * 1024;
/// Maximum number of published keys; rotating faster than tokens expire is a mistake.
const MAX_KEYS: usize = 16;
/// Longest issuer or audience.
const MAX_NAME: usize = 255;

const DOCUMENT: &str = "issuer.json";
const JWKS: &str = "jwks.json";

/// How to create an issuer.
#[derive(Clone, Debug)]
pub struct IssuerOptions {
    /// The `iss` of its tokens.
    pub issuer: String,
    pub trust_domain: TrustDomain,
    /// The only environments it may name; `None` means all.
    pub environments: Option<Vec<Environment>>,
    pub algorithm: SigningAlgorithm,
}

/// The content of a token to issue.
#[derive(Clone, Copy, Debug)]
pub struct IssueRequest<'a> {
    pub tenant: &'a str,
    pub environment: &'a str,
    pub sandbox: &'a str,
    pub audience: &'a str,
    pub life: Duration,
    /// The boot of the sandbox. A later sandbox of the same name refuses tokens of an earlier generation.
    pub generation: Option<u64>,
}

/// Why there is no issuer or no token.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    #[error("the {0} must be 1 to 255 printable characters without spaces")]
    Characters(&'static str),
    #[error("{}: line {line}, column {column}: not an issuer description", path.display())]
    Document { path: PathBuf, line: usize, column: usize },
    #[error("this issuer may not issue for environment {0}; it was created for others")]
    Environment(Environment),
    #[error("{}: an issuer already exists; choose another directory, or rotate its key", .0.display())]
    Exists(PathBuf),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("{}: found a key or key set but no {DOCUMENT}; restore that, or remove this file and start over", .0.display())]
    Leftover(PathBuf),
    #[error("the lifetime of a token must be 1 to {} seconds", TrustedIssuer::DEFAULT_LIFE.as_secs())]
    Life,
    #[error("{}: no issuer found; create one with: sandbar identity init --dir {}", .0.display(), .0.display())]
    Missing(PathBuf),
    #[error("no key may sign now; check the clock")]
    NoKey,
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
    #[error(transparent)]
    Subject(#[from] SubjectError),
    #[error("the issuer has {MAX_KEYS} keys that may still be in use; wait until the oldest retires")]
    TooManyKeys,
}

/// An issuer stored in a directory.
#[derive(Debug)]
pub struct LocalIssuer {
    dir: PathBuf,
    document: IssuerFile,
}

/// `issuer.json`.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct IssuerFile {
    issuer: String,
    trust_domain: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    environments: Option<Vec<String>>,
    algorithm: String,
    keys: Vec<KeyDocument>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct KeyDocument {
    kid: String,
    /// Unix seconds.
    signs_from: u64,
    /// Unix seconds; absent for the newest key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retires_at: Option<u64>,
}

impl LocalIssuer {
    /// Creates an issuer in `dir`, with one key that signs at once.
    pub fn init(dir: &Path, options: &IssuerOptions, now: UnixTime) -> Result<Self, IssueError> {
        if !is_plain(&options.issuer, MAX_NAME) {
            return Err(IssueError::Characters("issuer"));
        }
        files::make_private_dir(dir)?;
        let _lock = files::lock_dir(dir)?;
        if dir.join(DOCUMENT).exists() {
            return Err(IssueError::Exists(dir.to_owned()));
        }
        if let Some(path) = find_leftover(dir)? {
            return Err(IssueError::Leftover(path));
        }
        let document = IssuerFile {
            issuer: options.issuer.clone(),
            trust_domain: options.trust_domain.as_str().to_owned(),
            environments: options
                .environments
                .as_ref()
                .map(|all| all.iter().map(ToString::to_string).collect()),
            algorithm: options.algorithm.name().to_owned(),
            keys: Vec::new(),
        };
        let mut issuer = Self { dir: dir.to_owned(), document };
        issuer.add_key(options.algorithm, now.as_secs())?;
        issuer.save(now.as_secs())?;
        Ok(issuer)
    }

    /// Opens the issuer in `dir` and deletes keys that have retired.
    pub fn open(dir: &Path, now: UnixTime) -> Result<Self, IssueError> {
        let found = Self::read(dir)?;
        if !found.document.keys.iter().any(|key| key.is_retired(now.as_secs())) {
            return Ok(found);
        }
        match Self::read_pruned(dir, now.as_secs()) {
            // A read-only user cannot delete them. That is safe: a retired key neither signs nor verifies.
            Err(IssueError::File(FileError::Io { source, .. })) if is_read_only(&source) => Ok(found),
            tidied => tidied,
        }
    }

    fn read_pruned(dir: &Path, now: u64) -> Result<Self, IssueError> {
        let _lock = files::lock_dir(dir)?;
        let mut issuer = Self::read(dir)?;
        issuer.drop_retired(now)?;
        Ok(issuer)
    }

    fn read(dir: &Path) -> Result<Self, IssueError> {
        let path = dir.join(DOCUMENT);
        if !path.exists() {
            return Err(IssueError::Missing(dir.to_owned()));
        }
        let text = files::read_bounded(&path, MAX_DOCUMENT)?;
        let document = serde_json::from_slice(&text).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            IssueError::Document { path, line, column }
        })?;
        Ok(Self { dir: dir.to_owned(), document })
    }

    /// Publishes a new key, which signs after [`PUBLISHED_AHEAD`], and retires the old ones.
    pub fn rotate(dir: &Path, now: UnixTime) -> Result<Self, IssueError> {
        Self::read(dir)?; // before locking, for an error that says what is missing
        let _lock = files::lock_dir(dir)?;
        let mut issuer = Self::read(dir)?;
        let now = now.as_secs();
        issuer.drop_retired(now)?;
        if issuer.document.keys.len() >= MAX_KEYS {
            return Err(IssueError::TooManyKeys);
        }
        let algorithm =
            SigningAlgorithm::from_name(&issuer.document.algorithm).ok_or(KeyError::Unsupported)?;
        let signs_from = now.saturating_add(PUBLISHED_AHEAD.as_secs());
        let longest = TrustedIssuer::DEFAULT_LIFE + MAX_SKEW;
        let last_token_ends = signs_from.saturating_add(longest.as_secs());
        for key in &mut issuer.document.keys {
            key.retires_at.get_or_insert(last_token_ends);
        }
        issuer.add_key(algorithm, signs_from)?;
        issuer.save(now)?;
        Ok(issuer)
    }

    /// Issues a token.
    pub fn issue(&self, request: &IssueRequest<'_>, now: UnixTime) -> Result<SignedToken, IssueError> {
        let life = request.life.as_secs();
        if !(1..=TrustedIssuer::DEFAULT_LIFE.as_secs()).contains(&life) {
            return Err(IssueError::Life);
        }
        if !is_plain(request.audience, MAX_NAME) {
            return Err(IssueError::Characters("audience"));
        }
        let domain = &self.document.trust_domain;
        let subject = Subject::new(domain, request.tenant, request.environment, request.sandbox)?;
        if self.allowed_environments()?.is_some_and(|all| !all.contains(&subject.environment)) {
            return Err(IssueError::Environment(subject.environment));
        }
        let now = now.as_secs();
        let mut claims = json!({
            "iss": self.document.issuer,
            "sub": subject.to_string(),
            "aud": request.audience,
            "exp": now.saturating_add(life),
            "nbf": now,
            "iat": now,
            "jti": hex(&random_bytes::<16>()?),
        });
        if let Some(generation) = request.generation {
            claims["sid"] = generation.to_string().into();
        }
        Ok(self.signing_key(now)?.sign(&claims)?)
    }

    /// Returns how to verify tokens of this issuer.
    pub fn trusted_issuer(&self) -> Result<TrustedIssuer, IssueError> {
        let algorithm = SigningAlgorithm::from_name(&self.document.algorithm).ok_or(KeyError::Unsupported)?;
        let domain = TrustDomain::parse(&self.document.trust_domain)?;
        let mut trusted = TrustedIssuer::new(&self.document.issuer, domain, self.jwks_path());
        trusted.algorithms = vec![algorithm];
        trusted.environments = self.allowed_environments()?;
        Ok(trusted)
    }

    fn allowed_environments(&self) -> Result<Option<Vec<Environment>>, SubjectError> {
        let parse = |text: &String| Environment::parse(text).map_err(SubjectError::from);
        let parsed = self.document.environments.iter();
        parsed.map(|all| all.iter().map(parse).collect()).next().transpose()
    }

    /// Returns the path of the JWK Set, for verifiers to watch.
    pub fn jwks_path(&self) -> PathBuf {
        self.dir.join(JWKS)
    }

    /// Returns the JWK Set: every key whose tokens may still be valid, and until when.
    pub fn jwks(&self, now: UnixTime) -> Result<Value, IssueError> {
        let published = self.document.keys.iter().filter(|key| !key.is_retired(now.as_secs()));
        let keys = published.map(|key| self.jwk(key)).collect::<Result<Vec<_>, _>>()?;
        Ok(json!({ "keys": keys }))
    }

    fn jwk(&self, key: &KeyDocument) -> Result<Value, IssueError> {
        let mut jwk = self.load_key(&key.kid)?.jwk().clone();
        if let Some(end) = key.retires_at {
            jwk["exp"] = end.into();
        }
        Ok(jwk)
    }

    pub fn issuer(&self) -> &str {
        &self.document.issuer
    }

    pub fn trust_domain(&self) -> &str {
        &self.document.trust_domain
    }

    /// Returns the only environments it may name; `None` means all.
    pub fn environments(&self) -> Option<&[String]> {
        self.document.environments.as_deref()
    }

    pub fn algorithm(&self) -> &str {
        &self.document.algorithm
    }

    /// Returns the `kid` of every key, the newest last.
    pub fn key_ids(&self) -> impl Iterator<Item = &str> {
        self.document.keys.iter().map(|key| key.kid.as_str())
    }

    /// Returns the newest key that may sign now.
    fn signing_key(&self, now: u64) -> Result<SigningKey, IssueError> {
        let ready = self.document.keys.iter().rfind(|key| key.signs_from <= now && !key.is_retired(now));
        self.load_key(&ready.ok_or(IssueError::NoKey)?.kid)
    }

    fn load_key(&self, kid: &str) -> Result<SigningKey, IssueError> {
        Ok(SigningKey::load(&self.key_path(kid))?)
    }

    /// Returns the path of a key. A `kid` is a thumbprint and so a valid file name; anything else stays inside the directory.
    fn key_path(&self, kid: &str) -> PathBuf {
        self.dir.join(format!("{}.key", kid.replace(['/', '.'], "_")))
    }

    fn add_key(&mut self, algorithm: SigningAlgorithm, signs_from: u64) -> Result<(), IssueError> {
        let pkcs8 = generate_pkcs8(algorithm)?;
        let kid = SigningKey::from_pkcs8(&pkcs8)?.id().to_owned();
        files::write_atomic(&self.key_path(&kid), pem::encode_private_key(&pkcs8).as_bytes(), Mode::Owner)?;
        self.document.keys.push(KeyDocument { kid, signs_from, retires_at: None });
        Ok(())
    }

    /// Drops retired keys: first from the published set, then the key files.
    fn drop_retired(&mut self, now: u64) -> Result<(), IssueError> {
        let (retired, kept): (Vec<_>, Vec<_>) =
            self.document.keys.drain(..).partition(|key| key.is_retired(now));
        self.document.keys = kept;
        if retired.is_empty() {
            return Ok(());
        }
        self.save(now)?;
        for path in retired.iter().map(|key| self.key_path(&key.kid)) {
            match std::fs::remove_file(&path) {
                Err(source) if source.kind() != ErrorKind::NotFound => {
                    return Err(FileError::io(&path, source).into());
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// Writes the JWK Set first: a key must never sign before it is published.
    fn save(&self, now: u64) -> Result<(), IssueError> {
        let published = self.jwks(UnixTime::since_unix_epoch(Duration::from_secs(now)))?;
        files::write_atomic(&self.jwks_path(), format!("{published:#}\n").as_bytes(), Mode::Everybody)?;
        let document = serde_json::to_string_pretty(&self.document).map_err(|_| KeyError::Publication)?;
        files::write_atomic(&self.dir.join(DOCUMENT), format!("{document}\n").as_bytes(), Mode::Everybody)?;
        Ok(())
    }
}

fn is_read_only(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
}

/// Finds files of an issuer that lost its description: verifiers may still trust its keys.
fn find_leftover(dir: &Path) -> Result<Option<PathBuf>, FileError> {
    let entries = std::fs::read_dir(dir).map_err(|source| FileError::io(dir, source))?;
    for entry in entries {
        let path = entry.map_err(|source| FileError::io(dir, source))?.path();
        if path.extension().is_some_and(|end| end == "key") || path.ends_with(JWKS) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

impl KeyDocument {
    fn is_retired(&self, now: u64) -> bool {
        self.retires_at.is_some_and(|end| end <= now)
    }
}
