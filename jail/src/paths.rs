//! Where a path leads: the symbolic links along it, and the other mount points that show the same file. Runs in the
//! proxy, before the jail exists.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Number of links that the kernel follows in one path (`MAXSYMLINKS`).
const MAX_SYMLINKS: usize = 40;

/// Returns the symbolic links along `path`, each by its real path.
pub(super) fn find_symlinks(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(path) = std::path::absolute(path) else { return found };
    let mut remaining = reverse_components(&path);
    let mut at = PathBuf::from("/");
    while let Some(next) = remaining.pop() {
        if next == ".." {
            at.pop();
            continue;
        }
        let here = at.join(&next);
        match fs::read_link(&here) {
            Ok(target) if found.len() < MAX_SYMLINKS => {
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                remaining.extend(reverse_components(&target));
                found.push(here);
            }
            Ok(_) | Err(_) => at = here,
        }
    }
    found
}

/// Returns the components of a path, last first.
fn reverse_components(path: &Path) -> Vec<OsString> {
    let names = path.iter().filter(|name| *name != "/" && *name != ".");
    names.map(OsString::from).rev().collect()
}

/// The mounts of this process's mount namespace.
pub(super) struct MountTable(Vec<MountEntry>);

struct MountEntry {
    device: String,
    /// The directory of the file system that is mounted here.
    root: PathBuf,
    at: PathBuf,
}

impl MountTable {
    /// Reads the mounts that this process sees; empty if `/proc` is not readable.
    pub(super) fn read() -> Self {
        Self::parse(&fs::read("/proc/self/mountinfo").unwrap_or_default())
    }

    fn parse(text: &[u8]) -> Self {
        MountTable(text.split(|byte| *byte == b'\n').filter_map(MountEntry::parse).collect())
    }

    /// Returns the other paths that lead to the same file as `path`.
    pub(super) fn aliases(&self, path: &Path) -> Vec<PathBuf> {
        let Ok(target) = fs::symlink_metadata(path) else { return Vec::new() };
        let same = |other: &PathBuf| {
            fs::symlink_metadata(other)
                .is_ok_and(|other| (other.dev(), other.ino()) == (target.dev(), target.ino()))
        };
        self.candidates(path).into_iter().filter(same).collect()
    }

    fn candidates(&self, path: &Path) -> Vec<PathBuf> {
        let over = self.0.iter().filter(|mount| path.starts_with(&mount.at));
        // Of several mounts at one path `max_by_key` returns the last, which covers the others.
        let Some(mount) = over.max_by_key(|mount| mount.at.as_os_str().len()) else {
            return Vec::new();
        };
        let Ok(below) = path.strip_prefix(&mount.at) else { return Vec::new() };
        let inner = mount.root.join(below);
        let others = self.0.iter().filter(|other| other.device == mount.device);
        let others = others.filter_map(|mount| Some(mount.at.join(inner.strip_prefix(&mount.root).ok()?)));
        others.filter(|other| other != path).collect()
    }
}

impl MountEntry {
    /// Parses the third to fifth field of a line of proc_pid_mountinfo(5).
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let device = String::from_utf8(fields.next()?.to_vec()).ok()?;
        let (root, at) = (unescape_octal(fields.next()?), unescape_octal(fields.next()?));
        Some(MountEntry { device, root, at })
    }
}

/// Decodes a field of mountinfo, in which the kernel writes a space as a backslash and three octal digits.
fn unescape_octal(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| *first == b'\\');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn every_link_along_a_path_is_found_by_its_real_path() {
        let dir = tempfile::tempdir().unwrap();
        let dir = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir_all(dir.join("real/deep")).unwrap();
        symlink("real", dir.join("one")).unwrap();
        symlink(dir.join("one/deep"), dir.join("two")).unwrap();
        symlink("../../two", dir.join("real/deep/back")).unwrap();
        symlink("round", dir.join("round")).unwrap();
        for (path, wanted) in [
            ("real/deep", &[][..]),
            ("one/deep", &["one"]),
            ("two/x", &["two", "one"]),
            ("real/deep/back/x", &["real/deep/back", "two", "one"]),
            ("one/../missing", &["one"]),
        ] {
            let wanted: Vec<PathBuf> = wanted.iter().map(|name| dir.join(name)).collect();
            assert_eq!(find_symlinks(&dir.join(path)), wanted, "{path}");
        }
        assert_eq!(find_symlinks(&dir.join("round")).len(), MAX_SYMLINKS, "a loop ends");
    }

    #[test]
    fn a_path_is_found_at_every_mount_of_its_file_system() {
        let mounts = MountTable::parse(
            b"20 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
              21 20 8:2 / /persist rw - ext4 /dev/sda2 rw\n\
              22 20 8:2 /home /home rw - ext4 /dev/sda2 rw\n\
              23 20 8:2 /home/ann /mnt/with\\040space rw - ext4 /dev/sda2 rw\n\
              24 20 8:2 /home/ben /mnt/ben rw - ext4 /dev/sda2 rw\n",
        );
        let found = mounts.candidates(Path::new("/home/ann/.ssh"));
        let wanted = ["/persist/home/ann/.ssh", "/mnt/with space/.ssh"].map(PathBuf::from);
        assert_eq!(found, wanted);
        assert!(mounts.candidates(Path::new("/etc/passwd")).is_empty());
    }
}
