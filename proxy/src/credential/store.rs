//! The credentials of the configuration and their values of now: each file is read off the path of requests.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rules::Reason;
use rules::ids::CredentialName;
use rules::signals::SignalCode;
use rules::signals::secrets::ExactValue;
use sys::file;
use zeroize::Zeroizing;

use crate::credential::value::{CredentialValue, SHORTEST};
use crate::report::refusal::Refusal;

/// How often a credential file is checked. A changed, deleted or broken one counts after this time.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// How long the last value is used while its file system does not answer. Long enough for an NFS server or a CSI
/// driver to come back; short, because a key that was withdrawn meanwhile must not be used for ever.
const MAX_SILENCE: Duration = Duration::from_secs(60);
/// How long the start waits for the first look at all files.
const FIRST_LOOK: Duration = Duration::from_secs(5);
/// Stack of a thread that looks at a file.
const READER_STACK: usize = 256 << 10;
/// Longest credential, in bytes.
const LENGTH: u64 = 8192;

/// The credentials of the configuration.
///
/// A request never waits for a file: each file has a thread that looks at it again and again, and requests use what it
/// saw last. A thread of its own for each, so that a file that hangs keeps no other from being read.
pub(crate) struct CredentialStore {
    by: HashMap<CredentialName, Arc<CredentialSource>>,
    /// Grows whenever a value changes.
    version: Arc<AtomicU64>,
}

/// A credential file, and what was last seen in it.
struct CredentialSource {
    path: PathBuf,
    seen: Mutex<LastLook>,
    looked: Condvar,
    version: Arc<AtomicU64>,
}

/// What a look at a credential file found.
struct LastLook {
    /// `None` before the first look.
    version: Option<FileVersion>,
    credential: Result<Arc<CredentialValue>, CredentialError>,
    at: Instant,
}

/// Metadata that changes when a file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Why a credential cannot be used. Never contains its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CredentialError {
    #[error("other users can write its file (mode {mode:03o}): chmod 600 {}", .path.display())]
    Exposed { path: PathBuf, mode: u32 },
    #[error("cannot read the file: {0}")]
    File(String),
    #[error("it is longer than {LENGTH} bytes")]
    Long,
    #[error("it contains characters that a header field cannot carry")]
    Malformed,
    #[error("it is shorter than {SHORTEST} characters")]
    Short,
    #[error("its file has not answered for {} s", .0.as_secs())]
    Silent(Duration),
}

impl From<io::Error> for CredentialError {
    fn from(error: io::Error) -> Self {
        CredentialError::File(error.to_string())
    }
}

impl CredentialStore {
    /// Starts looking at the files, and waits until each was looked at once, or [`FIRST_LOOK`].
    ///
    /// # Errors
    ///
    /// Fails if other users can write a file. A file that is missing or broken may be mended later.
    pub(crate) fn open(files: impl IntoIterator<Item = (CredentialName, PathBuf)>) -> anyhow::Result<Self> {
        let until = Instant::now() + FIRST_LOOK;
        let (mut by, version) = (HashMap::new(), Arc::<AtomicU64>::default());
        for (name, path) in files {
            let source = Arc::new(CredentialSource::new(path, version.clone()));
            let thread = std::thread::Builder::new().name("credential".to_owned()).stack_size(READER_STACK);
            let watched = Arc::downgrade(&source);
            thread.spawn(move || watch_file(&watched)).context("cannot start a thread")?;
            by.insert(name, source);
        }
        for (name, source) in &by {
            source.wait_for_look(until);
            if let Err(error @ CredentialError::Exposed { .. }) = source.current(Instant::now()) {
                bail!("credential `{name}`: {error}");
            }
        }
        Ok(CredentialStore { by, version })
    }

    /// Returns a number that grows whenever a value changes.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Returns the values of now, to recognise them where they must not be.
    pub(crate) fn exact_values(&self) -> Vec<ExactValue> {
        let value = |(name, source): (&CredentialName, &Arc<CredentialSource>)| {
            let credential = source.current(Instant::now()).ok()?;
            let label = format!("the value of credential `{name}`");
            let bytes = credential.expose().as_bytes().to_vec();
            Some(ExactValue { label, code: SignalCode::CredentialLeaving, bytes })
        };
        self.by.iter().filter_map(value).collect()
    }

    /// Returns the credential that the file held when it was last looked at.
    ///
    /// # Errors
    ///
    /// Returns a refusal if there is none: the request must not leave without it.
    pub(crate) fn current(&self, name: &CredentialName) -> Result<Arc<CredentialValue>, Refusal> {
        let refused = |why: String| {
            Refusal::from(Reason::CredentialUnavailable).with_detail(format!("credential `{name}`: {why}"))
        };
        let source = self.by.get(name).ok_or_else(|| refused("it is not in the configuration".to_owned()))?;
        source.current(Instant::now()).map_err(|error| refused(error.to_string()))
    }
}

impl CredentialSource {
    fn new(path: PathBuf, version: Arc<AtomicU64>) -> Self {
        let at = Instant::now();
        let unseen = LastLook { version: None, credential: Err(CredentialError::Silent(Duration::ZERO)), at };
        CredentialSource { path, seen: Mutex::new(unseen), looked: Condvar::new(), version }
    }

    /// Returns what was last seen, unless that was longer than [`MAX_SILENCE`] ago.
    fn current(&self, now: Instant) -> Result<Arc<CredentialValue>, CredentialError> {
        let last = sys::lock(&self.seen);
        let silence = now.saturating_duration_since(last.at);
        match &last.credential {
            Err(CredentialError::Silent(_)) => Err(CredentialError::Silent(silence)),
            Ok(_) if silence > MAX_SILENCE => Err(CredentialError::Silent(silence)),
            seen => seen.clone(),
        }
    }

    fn wait_for_look(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let unseen = |last: &mut LastLook| matches!(last.credential, Err(CredentialError::Silent(_)));
        drop(self.looked.wait_timeout_while(sys::lock(&self.seen), left, unseen));
    }

    /// Looks at the file, and reads it if it has changed. Blocks while the file system does not answer.
    fn look(&self) {
        let version = file_version(&self.path);
        let known = sys::lock(&self.seen).version;
        let read = match &version {
            Ok(version) if Some(*version) == known => None,
            Ok(_) => Some(read_credential(&self.path)),
            Err(error) => Some(Err(error.clone())),
        };
        let mut last = sys::lock(&self.seen);
        last.at = Instant::now();
        if let Some(credential) = read {
            // A file that could not be read is read again, whether it changes or not.
            last.version = version.ok().filter(|_| credential.is_ok());
            if let Err(error) = &credential
                && last.credential.as_ref().err() != Some(error)
            {
                tracing::warn!(path = %self.path.display(), %error, "a credential cannot be used");
            }
            last.credential = credential;
            self.version.fetch_add(1, Ordering::Release);
        }
        drop(last);
        self.looked.notify_all();
    }
}

/// Looks at a file until its store is dropped.
fn watch_file(source: &Weak<CredentialSource>) {
    while let Some(source) = source.upgrade() {
        source.look();
        drop(source);
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn file_version(path: &Path) -> Result<FileVersion, CredentialError> {
    let _note = file::note_call(path);
    Ok(FileVersion::from_metadata(&fs::metadata(path)?))
}

fn read_credential(path: &Path) -> Result<Arc<CredentialValue>, CredentialError> {
    let bytes = Zeroizing::new(file::read_regular(path, LENGTH)?);
    match FileAccess::of(path)? {
        FileAccess::WrittenByOthers { mode } => {
            return Err(CredentialError::Exposed { path: path.to_owned(), mode });
        }
        FileAccess::ReadByOthers { mode } => {
            tracing::warn!(path = %path.display(), "every user of the machine can read a credential (mode {mode:03o})");
        }
        FileAccess::Private => {}
    }
    if bytes.len() as u64 > LENGTH {
        return Err(CredentialError::Long);
    }
    let text = std::str::from_utf8(&bytes).map_err(|_| CredentialError::Malformed)?;
    CredentialValue::parse(text).map(Arc::new)
}

/// Who besides its owner may use a credential file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// At most its group reads it: orchestrators hand secrets to other users that way.
    Private,
    /// Every user reads it, which is what mounted secrets of Kubernetes look like inside their container.
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
            mode if mode & 0o004 != 0 => FileAccess::ReadByOthers { mode },
            _ => FileAccess::Private,
        })
    }
}

impl FileVersion {
    fn from_metadata(metadata: &fs::Metadata) -> Self {
        FileVersion {
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// What requests get, once the thread has seen what it should.
    fn wait_for(store: &CredentialStore, name: &CredentialName, wanted: Result<&str, &str>) {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let current = store.current(name);
            let value = current.as_ref().map(|one| one.expose().to_owned());
            let detail = |refusal: &&Refusal| refusal.detail.clone().unwrap_or_default();
            let as_wanted = match (&value, wanted) {
                (Ok(value), Ok(wanted)) => value == wanted,
                (Err(refusal), Err(wanted)) => detail(refusal).contains(wanted),
                _ => false,
            };
            if as_wanted {
                return;
            }
            assert!(Instant::now() < until, "{:?} instead of {wanted:?}", value.map_err(|one| detail(&one)));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_file_is_read_again_when_it_changes_and_not_used_when_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let name = CredentialName::parse("openai").unwrap();
        let store = CredentialStore::open([(name.clone(), path.clone())]).unwrap();
        wait_for(&store, &name, Err("cannot read the file"));
        fs::write(&path, "sk-first-value\n").unwrap();
        wait_for(&store, &name, Ok("sk-first-value"));
        fs::write(dir.path().join("new"), "sk-other-value\n").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        wait_for(&store, &name, Ok("sk-other-value"));
        fs::remove_file(&path).unwrap();
        wait_for(&store, &name, Err("cannot read the file"));
    }

    #[test]
    fn a_file_that_others_can_write_is_not_used_until_it_is_mended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let name = CredentialName::parse("openai").unwrap();
        fs::write(&path, "sk-first-value\n").unwrap();
        let set_mode = |mode: u32| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        for (mode, good) in [(0o600, true), (0o440, true), (0o644, true), (0o660, false), (0o602, false)] {
            set_mode(mode);
            let opened = CredentialStore::open([(name.clone(), path.clone())]);
            assert_eq!(opened.is_ok(), good, "{mode:o}");
            let why = opened.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(good || why.contains("other users can write") && !why.contains("sk-"), "{why}");
        }
        set_mode(0o600);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let store = CredentialStore::open([(name.clone(), link)]).unwrap();
        wait_for(&store, &name, Ok("sk-first-value"));
        set_mode(0o666);
        wait_for(&store, &name, Err("other users can write its file (mode 666): chmod 600"));
        set_mode(0o640);
        wait_for(&store, &name, Ok("sk-first-value"));
    }

    #[test]
    fn p16_a_pipe_is_no_credential_and_a_huge_file_is_none_either() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, huge) = (dir.path().join("pipe"), dir.path().join("huge"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        fs::File::create(&huge).unwrap().set_len(1 << 40).unwrap();
        let names = ["pipe", "huge"].map(|name| CredentialName::parse(name).unwrap());
        let store = CredentialStore::open(names.clone().into_iter().zip([pipe, huge])).unwrap();
        wait_for(&store, &names[0], Err("it is not a regular file"));
        wait_for(&store, &names[1], Err("it is longer than 8192 bytes"));
    }

    #[test]
    fn p16_a_silent_file_keeps_its_value_for_a_while_and_then_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, "sk-first-value\n").unwrap();
        let source = CredentialSource::new(path, Arc::default());
        let start = sys::lock(&source.seen).at;
        assert!(source.current(start).is_err(), "nothing was seen yet");
        source.look();
        let seen = sys::lock(&source.seen).at;
        assert!(source.current(seen + MAX_SILENCE).is_ok());
        let late = source.current(seen + MAX_SILENCE + Duration::from_secs(1)).err().unwrap();
        assert_eq!(late.to_string(), "its file has not answered for 61 s");
        source.look();
        let again = sys::lock(&source.seen).at;
        assert!(source.current(again).is_ok());
    }
}
