//! Files: Sandbar's own, the caller's credentials, and files that take effect outside later.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::unistd::{AccessFlags, access};

use super::{InsideProbe, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;
use jail::{SYSTEM_CREDENTIALS, home_credentials};

const GROUP: &str = "files";
const OWN_FIX: &str = "do not mount Sandbar's directories into the sandbox (`sandbar run` hides them)";
const POLICY_FIX: &str = "mount the policy directory read-only, or not at all";
/// Default directories of Sandbar.
const SANDBAR_DIRS: [&str; 5] =
    ["/etc/sandbar", "/var/lib/sandbar", "/var/log/sandbar", ".config/sandbar", ".local/state/sandbar"];
/// Files in the home directory that programs outside run or obey.
const STARTUP: [&str; 10] = [
    ".bash_profile",
    ".bashrc",
    ".config/autostart",
    ".config/git",
    ".config/systemd",
    ".gitconfig",
    ".profile",
    ".ssh",
    ".vimrc",
    ".zshrc",
];
/// Tokens that a cluster mounts into every container.
const TOKENS: [&str; 2] = [
    "/var/run/secrets/kubernetes.io/serviceaccount/token",
    "/var/run/secrets/eks.amazonaws.com/serviceaccount/token",
];
/// Files that the machine runs or obeys.
const SYSTEM: [&str; 8] = [
    "/etc",
    "/etc/ld.so.preload",
    "/etc/passwd",
    "/etc/sudoers.d",
    "/usr/bin",
    "/usr/lib",
    "/var/spool/cron",
    "/boot",
];

pub(super) fn probes(targets: &ProbeTargets) -> Vec<InsideProbe> {
    let mut probes = vec![
        InsideProbe::new(GROUP, "files.own", "Sandbar's policies, log, state and keys", OWN_FIX, |targets| {
            let usual = SANDBAR_DIRS.map(|name| resolve_path(targets, name)).into_iter().flatten();
            let state = std::env::var_os("XDG_STATE_HOME").map(|dir| PathBuf::from(dir).join("sandbar"));
            let tried: Vec<ProbeVerdict> = usual.chain(state).map(|path| probe_hidden(&path)).collect();
            ProbeVerdict::worst(tried, "no home directory")
        }),
        InsideProbe::new(
            GROUP,
            "files.credentials",
            "credentials in the home directory",
            "hide these files from the sandbox, and let Sandbar inject credentials into requests (`[[credential]]`)",
            |targets| {
                let in_home = targets.home.iter().flat_map(|home| home_credentials(home));
                // Those of a container are its own.
                let system: &[&str] = if targets.jail { SYSTEM_CREDENTIALS } else { &[] };
                let tried = in_home.chain(system.iter().map(PathBuf::from)).map(|path| probe_readable(&path));
                ProbeVerdict::worst(tried.collect::<Vec<_>>(), "no home directory")
            },
        ),
        InsideProbe::new(
            GROUP,
            "files.token",
            "the cluster's token",
            "set `automountServiceAccountToken: false` in the pod",
            |_| ProbeVerdict::worst(TOKENS.map(|path| probe_readable(Path::new(path))), "none"),
        ),
        InsideProbe::new(
            GROUP,
            "files.startup",
            "writing files that run outside later",
            "make these files read-only for the sandbox",
            |targets| {
                let paths = STARTUP.iter().filter_map(|name| resolve_path(targets, name));
                probe_persistent_writes(
                    targets,
                    paths.collect(),
                    "whether anyone outside uses this home directory cannot be determined from here",
                )
            },
        ),
        InsideProbe::new(
            GROUP,
            "files.system",
            "writing system files",
            "make the file system of the sandbox read-only",
            |targets| {
                probe_persistent_writes(
                    targets,
                    SYSTEM.map(PathBuf::from).to_vec(),
                    "whether anyone else uses these files cannot be determined from here",
                )
            },
        ),
        InsideProbe::new(
            GROUP,
            "files.program",
            "writing this binary, which may also run outside",
            "make the binary read-only for the sandbox",
            |targets| {
                let binary = std::env::current_exe().ok();
                probe_persistent_writes(
                    targets,
                    binary.into_iter().collect(),
                    "whether this binary also runs outside cannot be determined from here",
                )
            },
        ),
    ];
    for path in &targets.hidden {
        let path = path.clone();
        let (name, what) = (format!("files.path.{}", path.display()), path.display().to_string());
        probes.push(InsideProbe::new(GROUP, name, what, OWN_FIX, move |_| probe_hidden(&path)));
    }
    for path in &targets.read_only {
        let path = path.clone();
        let name = format!("files.policy.{}", path.display());
        let what = format!("writing {}", path.display());
        probes.push(InsideProbe::new(GROUP, name, what, POLICY_FIX, move |_| probe_writable(&path)));
    }
    probes
}

/// Resolves a name below the home directory; returns an absolute path unchanged.
fn resolve_path(targets: &ProbeTargets, name: &str) -> Option<PathBuf> {
    match name.starts_with('/') {
        true => Some(PathBuf::from(name)),
        false => targets.home.as_ref().map(|home| home.join(name)),
    }
}

/// The path must be neither readable nor writable.
fn probe_hidden(path: &Path) -> ProbeVerdict {
    let read = probe_readable(path);
    if read.is_bad() {
        return read;
    }
    let write = probe_writable(path);
    if write.is_bad() { write } else { read }
}

/// The path must have no readable content.
fn probe_readable(path: &Path) -> ProbeVerdict {
    let shown = path.display();
    match has_content(path) {
        Ok(true) => ProbeVerdict::Escaped(format!("{shown} can be read")),
        Ok(false) => ProbeVerdict::Blocked(format!("{shown} is empty")),
        Err(error) => ProbeVerdict::Blocked(format!("{shown}: {error}")),
    }
}

/// Whether a directory has an entry, or a file more than an empty JSON object. Reads no more than that.
fn has_content(path: &Path) -> io::Result<bool> {
    let metadata = fs::metadata(path)?;
    if metadata.is_dir() {
        return Ok(fs::read_dir(path)?.next().is_some());
    }
    if !metadata.is_file() {
        return Ok(false); // a device has no content
    }
    let mut begin = Vec::new();
    fs::File::open(path)?.take(3).read_to_end(&mut begin)?;
    Ok(!begin.is_empty() && begin != b"{}")
}

/// The path must not be writable. Checks with access(2), without writing.
fn probe_writable(path: &Path) -> ProbeVerdict {
    let shown = path.display();
    match access(path, AccessFlags::W_OK) {
        Ok(()) if is_null_device(path) || is_in_memory(path) => {
            ProbeVerdict::Blocked(format!("{shown} is covered"))
        }
        Ok(()) => ProbeVerdict::Escaped(format!("{shown} can be written")),
        Err(error) => ProbeVerdict::Blocked(format!("{shown}: {error}")),
    }
}

/// Whether it is a character device such as /dev/null, with which a jail covers hidden files.
fn is_null_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_char_device())
}

/// Whether it is a directory in memory that is mounted there, with which a jail covers hidden directories.
fn is_in_memory(path: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).ok().map(|metadata| metadata.dev());
    let is_mount = path.parent().is_some_and(|parent| device(parent) != device(path));
    is_mount && statfs(path).is_ok_and(|found| found.filesystem_type() == TMPFS_MAGIC)
}

/// Writable files escape in a jail, whose files are the caller's. In a container they may be private to it.
fn probe_persistent_writes(targets: &ProbeTargets, paths: Vec<PathBuf>, unclear: &str) -> ProbeVerdict {
    let tried = paths.iter().map(|path| probe_writable(path));
    let worst = ProbeVerdict::worst(tried.collect::<Vec<_>>(), "none exist");
    match worst.is_bad() && !targets.jail {
        true => ProbeVerdict::Unknown(format!("{}; {unclear}", worst.how())),
        false => worst,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readable_and_writable_paths_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let (file, empty) = (dir.path().join("file"), dir.path().join("empty"));
        fs::write(&file, "x").unwrap();
        fs::create_dir(&empty).unwrap();
        assert!(
            probe_readable(&file).is_bad()
                && probe_hidden(&file).is_bad()
                && probe_readable(dir.path()).is_bad()
        );
        assert!(!probe_readable(&empty).is_bad(), "it is empty");
        assert!(probe_hidden(&empty).is_bad(), "it is writable");
        assert!(!probe_hidden(&dir.path().join("none")).is_bad());
        assert!(!probe_hidden(Path::new("/dev/null")).is_bad(), "as a jail covers files");
        fs::write(&file, "{}").unwrap();
        assert!(!probe_readable(&file).is_bad(), "as a jail covers JSON files");
        fs::write(&file, "{} ").unwrap();
        assert!(probe_readable(&file).is_bad());
    }
}
