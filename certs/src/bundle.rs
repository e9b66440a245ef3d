//! The files by which the tools in a sandbox come to trust the authority.
//!
//! Most variables *replace* a tool's own store, so they must point at the system's roots and ours together;
//! a few add to it and get ours alone.

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

/// The authority's anchor alone.
pub const CA_FILE: &str = "sandbar-ca.pem";
/// The system's roots and the anchor.
pub const BUNDLE_FILE: &str = "bundle.pem";
/// The same for Java.
pub const STORE_FILE: &str = "truststore.p12";
/// For GNU Wget, which reads no variable but the name of its settings.
pub const WGETRC_FILE: &str = "wgetrc";
/// Searched by PHP for further settings.
pub const PHP_DIR: &str = "php";
const PHP_FILE: &str = "sandbar.ini";
/// What was written here, in the form of `sha256sum`.
const SUMS_FILE: &str = "SHA256SUMS";
/// Largest file that is looked at before it is replaced; ours are about a quarter of a MiB.
const MAX_FILE: u64 = 16 * 1024 * 1024;

/// What becomes of files that are there already and were not written by us.
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
    #[error("{}: it is not as `bundle` wrote it; choose another directory, remove it, or use --force", .0.display())]
    Foreign(PathBuf),
    #[error(transparent)]
    Path(#[from] BundlePathError),
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
}

/// Writes every file into `dir`, readable by everybody; `seen_at` is where the sandbox will find it.
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
    let sums: String =
        contents.iter().map(|(name, content)| sum_line(name, content) + "\n").collect();
    // What is there and what comes, so that whatever an interruption leaves is known as ours.
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

/// Every file by its name below the directory that the sandbox finds at `seen_at`.
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

/// The lines of the sums in `dir`, none where nothing was written yet.
fn read_sums(dir: &Path) -> Result<HashSet<String>, FileError> {
    match files::read_bounded(&dir.join(SUMS_FILE), files::MAX_PEM) {
        Ok(text) => Ok(String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()),
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            Ok(HashSet::new())
        }
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

/// Ours first, then the system's, each once and with an alias of its own.
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
