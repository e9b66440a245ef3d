//! Files that are read and replaced whole: a reader, or a crash, finds the old content or the new one.
//!
//! A file system may never answer: a dead NFS server, a CSI driver that hangs. No deadline ends such a call, so these
//! functions belong on a thread of their own ([`crate::worker`]), and each notes its call while it lasts, so that
//! [`calls_longer_than`] can say which file hangs.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::lock;

/// The calls under way on all threads.
static CALLS: Mutex<Vec<FileCall>> = Mutex::new(Vec::new());

/// A file call that has not returned yet.
#[derive(Clone, Debug)]
pub struct FileCall {
    pub path: PathBuf,
    pub since: Instant,
    /// The name of the thread that waits.
    pub thread: String,
}

/// Keeps a call in the list until dropped.
#[must_use = "the call counts as returned when this is dropped"]
pub struct CallNote {
    path: PathBuf,
    since: Instant,
}

/// Notes that this thread is about to use `path`.
pub fn note_call(path: &Path) -> CallNote {
    let (path, since) = (path.to_owned(), Instant::now());
    let thread = std::thread::current().name().unwrap_or_default().to_owned();
    lock(&CALLS).push(FileCall { path: path.clone(), since, thread });
    CallNote { path, since }
}

impl Drop for CallNote {
    fn drop(&mut self) {
        let mut calls = lock(&CALLS);
        let ours = calls.iter().position(|call| call.since == self.since && call.path == self.path);
        if let Some(at) = ours {
            calls.swap_remove(at);
        }
    }
}

/// Returns the calls that have been under way for longer than `age`, oldest first.
pub fn calls_longer_than(age: Duration) -> Vec<FileCall> {
    let mut calls: Vec<FileCall> =
        lock(&CALLS).iter().filter(|call| call.since.elapsed() > age).cloned().collect();
    calls.sort_by_key(|call| call.since);
    calls
}

/// Opens a regular file for reading.
///
/// Without `O_NONBLOCK`, opening a named pipe would wait until a process opens it for writing.
///
/// # Errors
///
/// Returns an error for everything that is not a regular file: reading from a pipe or a device may never end.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// Reads a regular file, up to `limit` bytes and one more, which tells the caller that the file is too large.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let _note = note_call(path);
    let file = open_regular(path)?;
    // Allocated at full size, so that a buffer that grows leaves no copy of a secret behind.
    let size = file.metadata()?.len().min(limit).saturating_add(1);
    let mut content = Vec::with_capacity(usize::try_from(size).unwrap_or_default());
    file.take(limit.saturating_add(1)).read_to_end(&mut content)?;
    Ok(content)
}

/// Reads a file of state of at most `limit` bytes; `None` if there is none.
pub fn read_state(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    match read_regular(path, limit) {
        Ok(content) if content.len() as u64 > limit => Err(ErrorKind::FileTooLarge.into()),
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns whether the caller may be able to write a file through another name of it: the file has several hard links,
/// and belongs to the caller or is writable for it.
///
/// A read-only mount of one name does not protect such a file. The other name may be anywhere in the file system, so
/// this does not look for it.
pub fn has_writable_link(path: &Path) -> bool {
    let _note = note_call(path);
    let Ok(found) = fs::metadata(path) else { return false };
    // SAFETY: the call takes no arguments and cannot fail.
    let owned = found.uid() == unsafe { libc::geteuid() };
    // A read-only mount of this name (`EROFS`) says nothing of the other.
    let forbidden =
        || nix::unistd::access(path, nix::unistd::AccessFlags::W_OK) == Err(nix::errno::Errno::EACCES);
    found.is_file() && found.nlink() > 1 && (owned || !forbidden())
}

use nix::sys::statfs::statfs;

/// Who may read a file, whatever the umask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every user reads it, the owner writes it (0644).
    Everybody = 0o644,
    /// Only the owner reads and writes it (0600).
    Owner = 0o600,
}

/// Which failure the new content survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// A power failure: the call waits for the disk.
    Disk,
    /// A crash of this process.
    Process,
}

/// Replaces the content of `path`, or creates it.
///
/// The content goes to a temporary file beside `path`, which then takes its name. `rename(2)` is atomic, so no
/// reader sees half a file. For [`Durability::Disk`] the order matters: the content reaches the disk before the
/// rename does, or a power failure could leave the new name on an empty file; then the directory, which is where
/// the rename is stored.
///
/// The temporary file has one name per `path`, so a crash leaves at most one behind and the next call removes it.
/// Two processes that replace one path at the same time disturb each other: one of them gets
/// [`ErrorKind::ResourceBusy`].
///
/// # Errors
///
/// Returns the error of the file system; `path` then has its old content, except where only the final sync of the
/// directory failed.
pub fn replace(path: &Path, content: &[u8], mode: Mode, durability: Durability) -> io::Result<()> {
    let _note = note_call(path);
    let temporary = temporary_path(path);
    let replaced =
        write_temporary(&temporary, content, mode, durability).and_then(|()| fs::rename(&temporary, path));
    if replaced.is_err() {
        drop(fs::remove_file(&temporary)); // the write's own error says more
        return replaced;
    }
    match durability {
        Durability::Disk => sync_directory(path),
        Durability::Process => Ok(()),
    }
}

/// Returns whether a file system is on this machine, so that `write(2)` ends in the page cache. On a network or in
/// user space a write can wait for ever. An unknown answer counts as no.
pub fn is_local(path: &Path) -> bool {
    const REMOTE: [i64; 9] = [
        0x6969,      // NFS
        0x517b,      // SMB
        0xff53_4d42, // CIFS
        0xfe53_4d42, // SMB 2
        0x6573_5546, // FUSE
        0x0102_1997, // 9P
        0x00c3_6400, // Ceph
        0x5346_414f, // AFS
        0x0bd0_0bd0, // Lustre
    ];
    statfs(path).is_ok_and(|found| !REMOTE.contains(&found.filesystem_type().0))
}

/// Returns the bytes that are free to unprivileged users on the file system of `path`.
///
/// # Errors
///
/// Returns the error of `statfs(2)`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let found = statfs(path)?;
    Ok(found.blocks_available().saturating_mul(found.block_size() as u64))
}

fn temporary_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".new");
    path.with_file_name(name)
}

fn write_temporary(path: &Path, content: &[u8], mode: Mode, durability: Durability) -> io::Result<()> {
    let mode = mode as u32;
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {} // a crash may have left one behind
    }
    // `create_new` is O_EXCL, which follows no symbolic link. The mode is set from the first moment on, and once
    // more because the umask may have removed bits.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(content)?;
    if durability == Durability::Disk {
        file.sync_all()?;
    }
    // Another writer may have removed our file as a leftover; the name is then that of its unfinished file.
    let (ours, named) = (file.metadata()?, fs::symlink_metadata(path)?);
    match (ours.dev(), ours.ino()) == (named.dev(), named.ino()) {
        true => Ok(()),
        false => Err(ErrorKind::ResourceBusy.into()),
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<OsString> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn p16_a_pipe_or_a_device_is_refused_and_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [pipe.as_path(), Path::new("/dev/zero"), dir.path()] {
            let error = read_regular(path, 10).unwrap_err();
            assert_eq!(error.to_string(), "it is not a regular file", "{}", path.display());
        }
        let file = dir.path().join("file");
        fs::write(&file, "0123456789ab").unwrap();
        assert_eq!(read_regular(&file, 10).unwrap(), b"0123456789a");
        assert!(read_state(&file, 10).is_err());
        assert_eq!(read_state(&dir.path().join("none"), 10).unwrap(), None);
    }

    #[test]
    fn a_call_is_listed_while_it_lasts() {
        let path = Path::new("/mnt/dead/key");
        let listed = || calls_longer_than(Duration::ZERO).iter().filter(|call| call.path == path).count();
        let (one, two) = (note_call(path), note_call(path));
        assert_eq!(listed(), 2);
        drop(one);
        assert_eq!(listed(), 1);
        drop(two);
        assert_eq!(listed(), 0);
    }

    #[test]
    fn content_and_mode_are_replaced_and_nothing_is_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file.json");
        for (content, mode, durability, bits) in [
            ("first", Mode::Everybody, Durability::Disk, 0o644),
            ("second, longer", Mode::Owner, Durability::Process, 0o600),
            ("", Mode::Everybody, Durability::Process, 0o644),
        ] {
            replace(&path, content.as_bytes(), mode, durability).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, bits, "{content}");
            assert_eq!(names(dir.path()), ["file.json"]);
        }
    }

    #[test]
    fn what_a_crash_left_is_replaced_and_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("key"), dir.path().join("other"));
        let temporary = temporary_path(&path);
        fs::write(&temporary, "half of a longer text").unwrap();
        fs::set_permissions(&temporary, Permissions::from_mode(0o666)).unwrap();
        replace(&path, b"whole", Mode::Owner, Durability::Disk).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "whole");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);

        fs::write(&other, "untouched").unwrap();
        std::os::unix::fs::symlink(&other, &temporary).unwrap();
        replace(&path, b"again", Mode::Owner, Durability::Disk).unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "untouched");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        assert_eq!(names(dir.path()), ["key", "other"]);
    }

    #[test]
    fn a_failure_leaves_the_old_file_and_no_temporary_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::create_dir(&path).unwrap(); // a file cannot be renamed over a directory
        fs::write(path.join("old"), "old").unwrap();
        assert!(replace(&path, b"new", Mode::Owner, Durability::Disk).is_err());
        assert_eq!(fs::read_to_string(path.join("old")).unwrap(), "old");
        assert_eq!(names(dir.path()), ["file"]);

        let path = dir.path().join("other");
        replace(&path, b"old", Mode::Owner, Durability::Disk).unwrap();
        fs::create_dir(temporary_path(&path)).unwrap(); // nor a file created where one is
        assert!(replace(&path, b"new", Mode::Owner, Durability::Disk).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert!(replace(&dir.path().join("no/file"), b"", Mode::Owner, Durability::Disk).is_err());
    }

    #[test]
    fn two_writers_never_leave_half_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let contents = ["a", "b"].map(|letter| letter.repeat(1 << 16));
        std::thread::scope(|scope| {
            for content in &contents {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..200 {
                        drop(replace(path, content.as_bytes(), Mode::Owner, Durability::Process));
                    }
                });
            }
        });
        assert!(contents.contains(&fs::read_to_string(&path).unwrap()));
    }
}
