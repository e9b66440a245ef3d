//! Files: bounded reads, protected key files, and cheap detection of changes.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use sys::file::{self, Durability, Mode};
use zeroize::Zeroizing;

/// Largest PEM file to read: a full system store is about a quarter of it.
pub(crate) const MAX_PEM: u64 = 1024 * 1024;
/// Largest private key file to read: an RSA key of 8192 bits is about 7 KiB.
pub(crate) const MAX_KEY: u64 = 64 * 1024;

/// Longest wait for another process that is creating the same keys.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// Interval between attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A file written twice within one tick of a coarse file system clock looks unchanged. Files younger than
/// this are therefore read again and compared by content.
const YOUNG_FILE_AGE: Duration = Duration::from_secs(2);

/// Maximum number of directory entries to watch; a system store has some 300.
const MAX_ENTRIES: usize = 4096;

/// Why a file could not be used. The message never contains its content.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{}: other users can read it (mode {mode:04o}); run: chmod 600 {}", path.display(), path.display())]
    Exposed { path: PathBuf, mode: u32 },
    #[error("{}: owned by user {owner}; a key must be owned by the current user or root", path.display())]
    Foreign { path: PathBuf, owner: u32 },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: larger than {limit} bytes", path.display())]
    Large { path: PathBuf, limit: u64 },
    #[error("{}: not a regular file; remove it", path.display())]
    Link { path: PathBuf },
    #[error("{}: another process has held this lock for {} s; stop that process first", path.display(), LOCK_PATIENCE.as_secs())]
    Locked { path: PathBuf },
    #[error("{}: other users can write to this directory (mode {mode:04o}); run: chmod go-w {}", path.display(), path.display())]
    OpenDirectory { path: PathBuf, mode: u32 },
}

impl FileError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
}

/// Reads at most `limit` bytes of `path`.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let _note = file::note_call(path);
    let file = file::open_regular(path).map_err(|source| FileError::io(path, source))?;
    read_handle(path, &file, limit)
}

/// Reads a private key. Refuses one that other users can read or that the group can write.
pub(crate) fn read_secret(path: &Path) -> Result<Zeroizing<Vec<u8>>, FileError> {
    let _note = file::note_call(path);
    let file = file::open_regular(path).map_err(|source| FileError::io(path, source))?;
    let found = file.metadata().map_err(|source| FileError::io(path, source))?;
    let mode = found.mode() & 0o777;
    if !is_trusted(found.uid(), current_user()?) {
        return Err(FileError::Foreign { path: path.to_owned(), owner: found.uid() });
    }
    check_parent_dir(path)?;
    // Orchestrators hand secrets to non-root processes through group read permission.
    if mode & 0o037 != 0 {
        return Err(FileError::Exposed { path: path.to_owned(), mode });
    }
    read_handle(path, &file, MAX_KEY).map(Zeroizing::new)
}

/// The owner of a file can change it, so it must be us or root.
fn is_trusted(owner: u32, user: u32) -> bool {
    owner == user || owner == 0
}

/// Returns the effective user of this process.
fn current_user() -> Result<u32, FileError> {
    let path = Path::new("/proc/self/status");
    let status = fs::read_to_string(path).map_err(|source| FileError::io(path, source))?;
    // Uid: real, effective, saved, file system; see proc(5).
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let effective = ids.and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok());
    effective.ok_or_else(|| FileError::io(path, io::ErrorKind::InvalidData.into()))
}

/// Refuses a key in a directory where other users could replace it. In a sticky directory, which
/// orchestrators use for secrets, users can replace only their own files.
fn check_parent_dir(path: &Path) -> Result<(), FileError> {
    let real = fs::canonicalize(path).map_err(|source| FileError::io(path, source))?;
    let Some(dir) = real.parent() else {
        return Ok(());
    };
    let mode = fs::metadata(dir).map_err(|source| FileError::io(dir, source))?.mode() & 0o7777;
    if mode & 0o022 != 0 && mode & 0o1000 == 0 {
        return Err(FileError::OpenDirectory { path: dir.to_owned(), mode });
    }
    Ok(())
}

fn read_handle(path: &Path, file: &File, limit: u64) -> Result<Vec<u8>, FileError> {
    let size = file.metadata().map_err(|source| FileError::io(path, source))?.len();
    // Allocated at full size, so that a buffer that grows leaves no copy of a key behind.
    let mut content = Vec::with_capacity(usize::try_from(size.min(limit)).unwrap_or(0) + 1);
    let read = file.take(limit + 1).read_to_end(&mut content);
    read.map_err(|source| FileError::io(path, source))?;
    if content.len() as u64 > limit {
        return Err(FileError::Large { path: path.to_owned(), limit });
    }
    Ok(content)
}

/// Replaces `path` with `content`, atomically and durably.
pub(crate) fn write_atomic(path: &Path, content: &[u8], mode: Mode) -> Result<(), FileError> {
    file::replace(path, content, mode, Durability::Disk).map_err(|source| FileError::io(path, source))
}

/// Creates `dir` (mode 0700) if it is missing. An existing one must not be writable by other users.
pub(crate) fn make_private_dir(dir: &Path) -> Result<(), FileError> {
    if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent).map_err(|source| FileError::io(parent, source))?;
    }
    match DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => check_private_dir(dir),
        Err(source) => Err(FileError::io(dir, source)),
    }
}

fn check_private_dir(dir: &Path) -> Result<(), FileError> {
    let found = fs::metadata(dir).map_err(|source| FileError::io(dir, source))?;
    if !is_trusted(found.uid(), current_user()?) {
        return Err(FileError::Foreign { path: dir.to_owned(), owner: found.uid() });
    }
    match found.mode() & 0o7777 {
        mode if mode & 0o022 != 0 => Err(FileError::OpenDirectory { path: dir.to_owned(), mode }),
        _ => Ok(()),
    }
}

/// Locks `dir` until the file is dropped, so that two processes do not create two sets of keys.
pub(crate) fn lock_dir(dir: &Path) -> Result<File, FileError> {
    // No other user can write here, so the lock file cannot be swapped between check and open.
    check_private_dir(dir)?;
    let path = dir.join(".lock");
    if fs::symlink_metadata(&path).is_ok_and(|found| !found.is_file()) {
        return Err(FileError::Link { path });
    }
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = file.map_err(|source| FileError::io(&path, source))?;
    wait_for_lock(&path, &file, LOCK_PATIENCE)?;
    Ok(file)
}

fn wait_for_lock(path: &Path, file: &File, patience: Duration) -> Result<(), FileError> {
    let began = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if began.elapsed() < patience => sleep(LOCK_PAUSE),
            Err(TryLockError::WouldBlock) => {
                return Err(FileError::Locked { path: path.to_owned() });
            }
            Err(TryLockError::Error(source)) => return Err(FileError::io(path, source)),
        }
    }
}

/// The metadata of a file when it was last read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    /// Follows symbolic links, so that a swapped link is a change.
    fn read(path: &Path) -> io::Result<Self> {
        let _note = file::note_call(path);
        let found = fs::metadata(path)?;
        Ok(Self {
            device: found.dev(),
            inode: found.ino(),
            size: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }

    fn is_young(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let changed = Duration::from_secs(u64::try_from(self.changed.0).unwrap_or(0));
        now.saturating_sub(changed) < YOUNG_FILE_AGE
    }
}

/// A set of files or directories, and whether any of them changed since the last poll.
///
/// An unchanged set costs one `stat` per path and per directory entry: the metadata of a directory does not
/// show when an entry is overwritten or the target of a link changes. The caller reads the files itself.
#[derive(Debug)]
pub(crate) struct FilePoller {
    paths: Vec<PathBuf>,
    stamps: Vec<(Option<FileStamp>, PathBuf)>,
    young: bool,
}

impl FilePoller {
    /// Starts with everything changed, so that the first poll leads to a read.
    pub(crate) fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths, stamps: Vec::new(), young: true }
    }

    /// Returns whether to read again. Call it before reading: a change during the read is seen next time.
    pub(crate) fn poll_changed(&mut self) -> bool {
        let entries = self.paths.iter().flat_map(|path| list_entries(path));
        let seen: Vec<PathBuf> = self.paths.iter().cloned().chain(entries).collect();
        let too_many = seen.len() > self.paths.len() + MAX_ENTRIES;
        let stamp = |path: PathBuf| (FileStamp::read(&path).ok(), path);
        let stamps: Vec<_> = seen.into_iter().take(self.paths.len() + MAX_ENTRIES).map(stamp).collect();
        let changed = self.young || stamps != self.stamps;
        let young =
            |(stamp, _): &(Option<FileStamp>, PathBuf)| stamp.as_ref().is_some_and(FileStamp::is_young);
        // Entries beyond the bound are not watched, so the set is read every time.
        self.young = too_many || stamps.iter().any(young);
        self.stamps = stamps;
        changed
    }

    /// Reports a change at the next poll, because the read after this one failed.
    pub(crate) fn mark_changed(&mut self) {
        self.young = true;
    }
}

/// Lists the entries of `path`, sorted, if it is a directory.
fn list_entries(path: &Path) -> Vec<PathBuf> {
    let _note = file::note_call(path);
    let found = fs::read_dir(path).into_iter().flatten().flatten();
    let mut entries: Vec<PathBuf> = found.map(|entry| entry.path()).take(MAX_ENTRIES + 1).collect();
    entries.sort_unstable();
    entries
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn key_files_are_written_for_the_owner_and_refused_when_exposed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        write_atomic(&path, b"secret", Mode::Owner).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        for (mode, read) in [
            (0o600, true),
            (0o400, true),
            (0o440, true),
            (0o640, true),
            (0o644, false),
            (0o660, false),
            (0o604, false),
        ] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_secret(&path).is_ok(), read, "{mode:o}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let complaint = read_secret(&path).unwrap_err().to_string();
        assert!(complaint.contains("chmod 600") && !complaint.contains("secret"), "{complaint}");
    }

    #[test]
    fn keys_belong_to_their_user_or_to_root() {
        for (owner, user, trusted) in
            [(1000, 1000, true), (0, 1000, true), (0, 0, true), (1001, 1000, false), (1000, 0, false)]
        {
            assert_eq!(is_trusted(owner, user), trusted, "{owner} for {user}");
        }
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(current_user().unwrap(), fs::metadata(dir.path()).unwrap().uid());
        let path = dir.path().join("key");
        write_atomic(&path, b"secret", Mode::Owner).unwrap();
        if std::os::unix::fs::chown(&path, Some(65534), None).is_ok() {
            assert!(matches!(read_secret(&path), Err(FileError::Foreign { owner: 65534, .. })));
        }
    }

    #[test]
    fn a_directory_that_others_write_into_holds_no_keys() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("a/keys");
        make_private_dir(&inner).unwrap();
        assert_eq!(fs::metadata(&inner).unwrap().mode() & 0o777, 0o700);
        let path = inner.join("key");
        write_atomic(&path, b"secret", Mode::Owner).unwrap();
        for (mode, reads, made) in [
            (0o700, true, true),
            (0o755, true, true),
            (0o770, false, false),
            (0o777, false, false),
            (0o1777, true, false),
        ] {
            fs::set_permissions(&inner, Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_secret(&path).is_ok(), reads, "{mode:o}");
            assert_eq!(make_private_dir(&inner).is_ok(), made, "{mode:o}");
            assert_eq!(lock_dir(&inner).is_ok(), made, "{mode:o}");
        }
        fs::set_permissions(&inner, Permissions::from_mode(0o700)).unwrap();
        fs::remove_file(inner.join(".lock")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), inner.join(".lock")).unwrap();
        assert!(matches!(lock_dir(&inner), Err(FileError::Link { .. })));
        assert!(!dir.path().join("elsewhere").exists());
    }

    #[test]
    fn p17_reading_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        write_atomic(&path, &[0; 100], Mode::Everybody).unwrap();
        assert_eq!(read_bounded(&path, 100).unwrap().len(), 100);
        assert!(matches!(read_bounded(&path, 99), Err(FileError::Large { limit: 99, .. })));
        let device = read_bounded(Path::new("/dev/zero"), 10).unwrap_err();
        assert_eq!(device.to_string(), "/dev/zero: it is not a regular file");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(matches!(read_bounded(&path, 10), Err(FileError::Large { .. })));
    }

    #[test]
    fn a_watch_sees_content_replacement_removal_and_swapped_links() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two, link) = (dir.path().join("1"), dir.path().join("2"), dir.path().join("link"));
        for path in [&one, &two] {
            fs::write(path, "same").unwrap();
            make_old(path);
        }
        std::os::unix::fs::symlink(&one, &link).unwrap();
        let mut watch = FilePoller::new(vec![link.clone()]);
        assert!(watch.poll_changed(), "the first poll leads to a read");
        watch.young = false;
        assert!(!watch.poll_changed());

        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(&two, &link).unwrap();
        assert!(watch.poll_changed(), "link swapped to a file of the same size and time");
        watch.young = false;
        fs::remove_file(&two).unwrap();
        assert!(watch.poll_changed(), "removed");
    }

    #[test]
    fn a_watched_directory_is_its_entries_and_what_they_lead_to() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (entry, target) = (dir.path().join("12345678.0"), elsewhere.path().join("root.pem"));
        for path in [&entry, &target] {
            fs::write(path, "two roots").unwrap();
        }
        std::os::unix::fs::symlink(&target, dir.path().join("87654321.0")).unwrap();
        let mut watch = FilePoller::new(vec![dir.path().to_owned()]);
        let mut changed = || {
            let changed = watch.poll_changed();
            watch.young = false;
            changed
        };
        assert!(changed() && !changed());
        fs::write(&entry, "one root").unwrap();
        assert!(changed() && !changed(), "written over in place");
        fs::write(&target, "one root").unwrap();
        assert!(changed() && !changed(), "the target of a link changed");
        fs::remove_file(&target).unwrap();
        assert!(changed() && !changed(), "a dangling link");
        fs::remove_file(&entry).unwrap();
        assert!(changed() && !changed(), "removed");
    }

    #[test]
    fn a_young_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "a").unwrap();
        let mut watch = FilePoller::new(vec![path]);
        assert!(watch.poll_changed());
        assert!(watch.poll_changed(), "it may have changed within one tick");
    }

    #[test]
    fn p17_a_lock_that_is_held_is_waited_for_within_bounds() {
        let dir = tempfile::tempdir().unwrap();
        let _held = lock_dir(dir.path()).unwrap();
        let path = dir.path().join(".lock");
        let again = File::options().write(true).open(&path).unwrap();
        let refused = wait_for_lock(&path, &again, Duration::from_millis(50));
        assert!(matches!(refused, Err(FileError::Locked { .. })));
    }

    fn make_old(path: &Path) {
        let long_ago = SystemTime::now() - Duration::from_secs(3600);
        File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
    }
}
