//! The files that make the tools in a sandbox trust the authority.
//!
//! Most environment variables *replace* a tool's own store, so they point at the system's roots and ours
//! together. A few add to it and point at ours alone.

use std::collections::HashSet;
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustls_pki_types::CertificateDer;
use sys::file::Mode;

use crate::authority::CertificateAuthority;
use crate::files::{self, FileError};
use crate::variables::{self, BundlePathError};
use crate::{NoRandomness, hex, pem, pkcs12, sha256};

/// The authority's root certificate alone.
pub const CA_FILE: &str = "sandbar-ca.pem";
/// The system's roots and the authority's.
pub const BUNDLE_FILE: &str = "bundle.pem";
/// The same for Java.
pub const STORE_FILE: &str = "truststore.p12";
/// For GNU Wget, which has no variable for roots, only one for the name of its settings file.
pub const WGETRC_FILE: &str = "wgetrc";
/// A directory that PHP scans for further settings.
pub const PHP_DIR: &str = "php";
const PHP_FILE: &str = "sandbar.ini";
/// The checksums of the files we wrote, in the format of `sha256sum`.
const SUMS_FILE: &str = "SHA256SUMS";
/// Largest existing file to compare before replacing it; ours are about a quarter of a MiB.
const MAX_FILE: u64 = 16 * 1024 * 1024;

/// What to do with existing files that were not written by us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignFiles {
    Keep,
    Replace,
}

/// Why the files were not written.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{}: not written by `bundle`, or changed since; choose another directory, remove it, or use --force", .0.display())]
    Foreign(PathBuf),
    #[error(transparent)]
    Path(#[from] BundlePathError),
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
}

/// Writes every file into `dir`, readable by everyone; `seen_at` is the path of `dir` in the sandbox.
pub fn write(
    dir: &Path,
    seen_at: &Path,
    authority: &CertificateAuthority,
    system: &[CertificateDer<'static>],
    others: ForeignFiles,
) -> Result<Vec<PathBuf>, BundleError> {
    let contents = contents(seen_at, authority, system)?;
    for dir in [dir.to_owned(), dir.join(PHP_DIR)] {
        make_public_dir(&dir)?;
    }
    let known = read_sums(dir)?;
    if others == ForeignFiles::Keep {
        for (name, _) in &contents {
            check_ours(dir, name, &known)?;
        }
    }
    let sums: String = contents.iter().map(|(name, content)| sum_line(name, content) + "\n").collect();
    // The old sums and the new ones, so that after an interruption both kinds of file count as ours.
    let both: String = known.iter().map(|line| format!("{line}\n")).chain([sums.clone()]).collect();
    files::write_atomic(&dir.join(SUMS_FILE), both.as_bytes(), Mode::Everybody)?;
    let mut written = Vec::new();
    for (name, content) in contents {
        let path: PathBuf = dir.join::<PathBuf>(name);
        files::write_atomic(&path, &content, Mode::Everybody)?;
        written.push(path);
    }
    files::write_atomic(&dir.join(SUMS_FILE), sums.as_bytes(), Mode::Everybody)?;
    Ok(written)
}

/// Returns every file by its name below the directory, which the sandbox sees at `seen_at`.
///
/// # Errors
///
/// Returns [`BundleError`] for a path that some tool would misread.
pub fn contents(
    seen_at: &Path,
    authority: &CertificateAuthority,
    system: &[CertificateDer<'static>],
) -> Result<[(PathBuf, Vec<u8>); 5], BundleError> {
    let seen_at = variables::check_path(seen_at)?;
    let roots = combine_roots(authority, system);
    let bundle = format!("{seen_at}/{BUNDLE_FILE}");
    Ok([
        (CA_FILE.into(), authority.anchor_pem().into_bytes()),
        (BUNDLE_FILE.into(), roots_to_pem(&roots).into_bytes()),
        (STORE_FILE.into(), pkcs12::trust_store(&roots)?),
        (WGETRC_FILE.into(), format!("ca_certificate = {bundle}\n").into_bytes()),
        (Path::new(PHP_DIR).join(PHP_FILE), php_ini(&bundle).into_bytes()),
    ])
}

/// Reads the lines of the checksum file in `dir`; empty if there is none yet.
fn read_sums(dir: &Path) -> Result<HashSet<String>, FileError> {
    match files::read_bounded(&dir.join(SUMS_FILE), files::MAX_PEM) {
        Ok(text) => Ok(String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()),
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(HashSet::new()),
        Err(error) => Err(error),
    }
}

fn check_ours(dir: &Path, name: &Path, known: &HashSet<String>) -> Result<(), BundleError> {
    let path = dir.join(name);
    match files::read_bounded(&path, MAX_FILE) {
        Ok(content) if known.contains(&sum_line(name, &content)) => Ok(()),
        Ok(_) => Err(BundleError::Foreign(path)),
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn sum_line(name: &Path, content: &[u8]) -> String {
    format!("{}  {}", hex(&sha256(content)), name.display())
}

/// Combines our root with the system's, each once and with a unique alias.
fn combine_roots(
    authority: &CertificateAuthority,
    system: &[CertificateDer<'static>],
) -> Vec<(String, CertificateDer<'static>)> {
    let mut roots = vec![("sandbar".to_owned(), authority.anchor().clone())];
    for root in system {
        if !roots.iter().any(|(_, known)| known == root) {
            roots.push((format!("system-{}", roots.len()), root.clone()));
        }
    }
    roots
}

fn roots_to_pem(roots: &[(String, CertificateDer<'static>)]) -> String {
    roots.iter().map(|(_, root)| pem::encode_certificate(root)).collect()
}

fn php_ini(bundle: &str) -> String {
    format!("openssl.cafile = {bundle}\ncurl.cainfo = {bundle}\n")
}

fn make_public_dir(dir: &Path) -> Result<(), FileError> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir)
        .and_then(|()| fs::set_permissions(dir, Permissions::from_mode(0o755)))
        .map_err(|source| FileError::io(dir, source))
}
