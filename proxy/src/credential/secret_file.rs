//! Files that hold secrets: who may use them, and reading them within bounds.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sys::file;
use sys::worker::{JobLost, Worker};
use zeroize::Zeroizing;

use crate::credential::error::CredentialError;

/// Longest credential, in bytes.
pub(super) const LENGTH: u64 = 8192;
/// Longest file of a source: a private key with its certificates, or a key file in JSON.
pub(super) const SOURCE_FILE: u64 = 65_536;
/// Name of the thread that reads the files of one source.
const READER: &str = "credential";

/// Who besides its owner may use a credential file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// At most its group reads it: orchestrators hand secrets to other users that way.
    Private,
    /// Every user reads it, and it lies where orchestrators mount secrets for one container, in which that is usual.
    MountedForAll { mode: u32 },
    /// Every user reads it.
    ReadByOthers { mode: u32 },
    /// Its group or every user writes it: whoever does chooses the credential.
    WrittenByOthers { mode: u32 },
}

impl FileAccess {
    /// Looks at the file that a path leads to.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn of(path: &Path) -> io::Result<Self> {
        let _note = file::note_call(path);
        let mode = fs::metadata(path)?.mode() & 0o777;
        Ok(match mode {
            mode if mode & 0o022 != 0 => FileAccess::WrittenByOthers { mode },
            mode if mode & 0o004 != 0 && is_mounted(path) => FileAccess::MountedForAll { mode },
            mode if mode & 0o004 != 0 => FileAccess::ReadByOthers { mode },
            _ => FileAccess::Private,
        })
    }
}

/// Whether a path lies where orchestrators mount secrets: below /run/secrets, in systemd's credentials directory, or in
/// a volume of the kubelet, which swaps its content through the symbolic link `..data`.
fn is_mounted(path: &Path) -> bool {
    let systemd = std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from);
    let known = ["/run/secrets", "/var/run/secrets"].map(PathBuf::from);
    let known = known.into_iter().chain(systemd.filter(|directory| directory.is_absolute()));
    let volume = path.parent().map(|directory| directory.join("..data"));
    known.into_iter().any(|directory| path.starts_with(directory))
        || volume.is_some_and(|link| fs::symlink_metadata(link).is_ok_and(|found| found.is_symlink()))
}

/// Reads a file that holds a secret. Blocks while the file system does not answer.
///
/// # Errors
///
/// Fails if others can write it, or read it where that is not usual.
pub(super) fn read(path: &Path, limit: u64) -> Result<Zeroizing<Vec<u8>>, CredentialError> {
    let failed = |error: io::Error| CredentialError::File { path: path.to_owned(), why: error.to_string() };
    let bytes = Zeroizing::new(file::read_regular(path, limit).map_err(failed)?);
    match FileAccess::of(path).map_err(failed)? {
        FileAccess::WrittenByOthers { mode } => {
            return Err(CredentialError::Exposed { path: path.to_owned(), mode });
        }
        FileAccess::ReadByOthers { mode } => {
            return Err(CredentialError::Readable { path: path.to_owned(), mode });
        }
        FileAccess::MountedForAll { .. } | FileAccess::Private => {}
    }
    if bytes.len() as u64 > limit { Err(CredentialError::Long) } else { Ok(bytes) }
}

/// Reads a file that holds one line.
pub(super) fn read_line(path: &Path) -> Result<Zeroizing<String>, CredentialError> {
    let bytes = read(path, LENGTH)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| CredentialError::Malformed)?;
    Ok(Zeroizing::new(
        text.strip_suffix('\n').map_or(text, |line| line.strip_suffix('\r').unwrap_or(line)).to_owned(),
    ))
}

/// Reads the files of one source, on a thread of their own: a file may be on a mount that never answers.
#[derive(Clone, Debug)]
pub(super) struct SecretFiles {
    base: PathBuf,
    worker: Worker,
}

impl SecretFiles {
    pub(super) fn start(base: &Path) -> io::Result<Self> {
        Ok(SecretFiles { base: base.to_owned(), worker: Worker::start(READER)? })
    }

    pub(super) fn resolve(&self, path: &str) -> PathBuf {
        self.base.join(path)
    }

    /// Runs `job` on the thread.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, CredentialError> + Send + 'static,
    ) -> Result<T, CredentialError> {
        self.worker.run(job).await.unwrap_or_else(|JobLost| Err(CredentialError::Busy))
    }

    /// Runs `job` on the thread without waiting for it.
    pub(super) fn post(&self, job: impl FnOnce() + Send + 'static) {
        drop(self.worker.post(job)); // a full queue means that the thread hangs; its jobs are lost anyway
    }

    pub(super) async fn line(&self, path: &str) -> Result<Zeroizing<String>, CredentialError> {
        let path = self.resolve(path);
        self.run(move || read_line(&path)).await
    }

    pub(super) async fn bytes(&self, path: &str) -> Result<Zeroizing<Vec<u8>>, CredentialError> {
        let path = self.resolve(path);
        self.run(move || read(&path, SOURCE_FILE)).await
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn p11_only_files_that_others_neither_read_nor_write_are_used_except_in_mounted_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, "sk-0123456789\n").unwrap();
        for (mode, plain, mounted) in [
            (0o600, true, true),
            (0o640, true, true),
            (0o440, true, true),
            (0o644, false, true),
            (0o444, false, true),
            (0o604, false, true),
            (0o660, false, false),
            (0o602, false, false),
            (0o666, false, false),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_line(&path).is_ok(), plain, "{mode:o}");
            symlink(dir.path(), dir.path().join("..data")).unwrap();
            assert_eq!(read_line(&path).is_ok(), mounted, "{mode:o} in a volume of the kubelet");
            fs::remove_file(dir.path().join("..data")).unwrap();
        }
        // A directory of that name is not the kubelet's.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        fs::create_dir(dir.path().join("..data")).unwrap();
        let why = read_line(&path).unwrap_err().to_string();
        assert!(why.contains("every user of the machine can read its file (mode 644): chmod 600 "), "{why}");
        assert!(!why.contains("sk-"), "{why}");
    }
}
