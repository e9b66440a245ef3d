//! Files that hold a credential as it is: each has a thread that looks at it again and again. A thread of its own, so
//! that a file that hangs keeps no other from being read, and no request ever waits for one.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Weak};
use std::time::Duration;

use sys::file;

use crate::credential::cell::CredentialCell;
use crate::credential::error::CredentialError;
use crate::credential::secret_file::read_line;
use crate::credential::value::CredentialValue;

/// How often a credential file is checked. A changed, deleted or broken one counts after this time.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Stack of a thread that looks at a file.
const READER_STACK: usize = 256 << 10;

/// Metadata that changes when a file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    mode: u32,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Starts a thread that looks at a file until the cell is dropped, from the message on that the caller sends.
pub(super) fn watch(path: PathBuf, cell: &Arc<CredentialCell>) -> io::Result<Sender<()>> {
    let thread = std::thread::Builder::new().name("credential".to_owned()).stack_size(READER_STACK);
    let (start, started) = mpsc::channel();
    let cell = Arc::downgrade(cell);
    thread.spawn(move || started.recv().is_ok().then(|| watch_file(&path, &cell)))?;
    Ok(start)
}

fn watch_file(path: &Path, cell: &Weak<CredentialCell>) {
    let mut known = None;
    while cell.strong_count() > 0 {
        let found = look(path, &mut known); // without the cell: this may hang
        let Some(cell) = cell.upgrade() else { return };
        cell.publish_look(found);
        drop(cell);
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Looks at a file, and reads it if it has changed. Blocks while the file system does not answer.
fn look(
    path: &Path,
    known: &mut Option<FileVersion>,
) -> Option<Result<Arc<CredentialValue>, CredentialError>> {
    match file_version(path) {
        Ok(version) if *known == Some(version) => None,
        Ok(version) => {
            let read = read_value(path).map(Arc::new);
            // A file that could not be read is read again, whether it changes or not.
            *known = read.is_ok().then_some(version);
            Some(read)
        }
        Err(error) => {
            *known = None;
            Some(Err(CredentialError::File { path: path.to_owned(), why: error.to_string() }))
        }
    }
}

/// Reads the value in a file.
pub(super) fn read_value(path: &Path) -> Result<CredentialValue, CredentialError> {
    CredentialValue::parse(&read_line(path)?)
}

fn file_version(path: &Path) -> io::Result<FileVersion> {
    let _note = file::note_call(path);
    let metadata = fs::metadata(path)?;
    Ok(FileVersion {
        inode: metadata.ino(),
        mode: metadata.mode(),
        size: metadata.size(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;

    use rules::ids::CredentialName;
    use tokio::time::{Instant, sleep};

    use super::*;

    struct Watched {
        dir: tempfile::TempDir,
        path: PathBuf,
        cell: Arc<CredentialCell>,
    }

    impl Watched {
        fn start() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let (path, name) = (dir.path().join("key"), CredentialName::parse("key").unwrap());
            let cell = Arc::new(CredentialCell::new(name, Duration::from_secs(10), Arc::default()));
            watch(path.clone(), &cell).unwrap().send(()).unwrap();
            Watched { dir, path, cell }
        }

        fn write(&self, name: &str, text: &str) -> PathBuf {
            let path = self.dir.path().join(name);
            let mut options = fs::OpenOptions::new();
            let file = options.write(true).create(true).truncate(true).mode(0o600).open(&path);
            io::Write::write_all(&mut file.unwrap(), text.as_bytes()).unwrap();
            path
        }

        /// Waits until requests get this, once the thread has seen what it should.
        async fn wait_for(&self, wanted: Result<&str, &str>) {
            let until = Instant::now() + Duration::from_secs(30);
            loop {
                let value = self.cell.file_value(&self.path).await;
                let value =
                    value.map(|value| value.text().unwrap().to_owned()).map_err(|error| error.to_string());
                match (&value, wanted) {
                    (Ok(value), Ok(wanted)) if value == wanted => return,
                    (Err(error), Err(wanted)) if error.contains(wanted) => return,
                    _ => assert!(Instant::now() < until, "{value:?} instead of {wanted:?}"),
                }
                sleep(Duration::from_millis(5)).await;
            }
        }
    }

    #[tokio::test]
    async fn a_file_is_read_again_when_it_changes_and_not_used_when_it_is_gone() {
        let watched = Watched::start();
        watched.wait_for(Err("cannot read the file")).await;
        watched.write("key", "sk-first-value\n");
        watched.wait_for(Ok("sk-first-value")).await;
        fs::rename(watched.write("new", "sk-other-value\n"), &watched.path).unwrap();
        watched.wait_for(Ok("sk-other-value")).await;
        fs::remove_file(&watched.path).unwrap();
        watched.wait_for(Err("cannot read the file")).await;
        std::os::unix::fs::symlink(watched.write("other", "sk-third-value\n"), &watched.path).unwrap();
        watched.wait_for(Ok("sk-third-value")).await;
        use std::os::unix::fs::PermissionsExt;
        let set_mode = |mode| fs::set_permissions(&watched.path, fs::Permissions::from_mode(mode)).unwrap();
        set_mode(0o666);
        watched.wait_for(Err("other users can write its file (mode 666): chmod 600")).await;
        set_mode(0o640);
        watched.wait_for(Ok("sk-third-value")).await;
    }

    #[tokio::test]
    async fn p16_a_pipe_is_no_credential_and_a_huge_file_is_none_either() {
        let pipe = Watched::start();
        assert!(std::process::Command::new("mkfifo").arg(&pipe.path).status().unwrap().success());
        pipe.wait_for(Err("it is not a regular file")).await;
        let huge = Watched::start();
        let path = huge.write("huge", "");
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        fs::rename(path, &huge.path).unwrap();
        huge.wait_for(Err("it is longer than 8192 bytes")).await;
    }
}
