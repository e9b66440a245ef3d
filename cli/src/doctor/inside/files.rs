//! Files: what Sandbar keeps, what proves who the caller is, and what is run or obeyed outside later.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::{InsideProbe, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "files";
const OWN_FIX: &str =
    "do not mount Sandbar's directories into the sandbox; `sandbar run` hides them by itself";
const POLICY_FIX: &str = "mount the directory of the policies read-only, or not at all";
/// Where Sandbar keeps its things, where nothing else is said.
const SANDBAR_DIRS: [&str; 5] = [
    "/etc/sandbar",
    "/var/lib/sandbar",
    "/var/log/sandbar",
    ".config/sandbar",
    ".local/state/sandbar",
];
/// In the home directory: what proves who somebody is.
const CREDENTIALS: [&str; 14] = [
    ".aws/credentials",
    ".azure",
    ".config/gcloud",
    ".config/gh",
    ".docker/config.json",
    ".git-credentials",
    ".gnupg",
    ".kube/config",
    ".local/share/keyrings",
    ".netrc",
    ".password-store",
    ".pki",
    ".ssh",
    ".vault-token",
];
/// In the home directory: what programs outside run or obey.
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
/// What a cluster mounts into every container.
const TOKENS: [&str; 2] = [
    "/var/run/secrets/kubernetes.io/serviceaccount/token",
    "/var/run/secrets/eks.amazonaws.com/serviceaccount/token",
];
/// What the machine runs or obeys.
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

pub(super) fn probes(ground: &ProbeTargets) -> Vec<InsideProbe> {
    let mut probes = vec![
        InsideProbe::new(
            GROUP,
            "files.own",
            "Sandbar's policies, log, state and keys",
            OWN_FIX,
            |ground| {
                let usual =
                    SANDBAR_DIRS.map(|name| resolve_path(ground, name)).into_iter().flatten();
                let state = std::env::var_os("XDG_STATE_HOME")
                    .map(|dir| PathBuf::from(dir).join("sandbar"));
                let tried: Vec<ProbeVerdict> =
                    usual.chain(state).map(|path| probe_hidden(&path)).collect();
                ProbeVerdict::worst(tried, "there is no home directory")
            },
        ),
        InsideProbe::new(
            GROUP,
            "files.credentials",
            "credentials in the home directory",
            "hide these from the sandbox, and let Sandbar add credentials to requests (`[[credential]]`)",
            |ground| {
                let tried = CREDENTIALS
                    .iter()
                    .filter_map(|name| resolve_path(ground, name))
                    .map(|path| probe_readable(&path));
                ProbeVerdict::worst(tried.collect::<Vec<_>>(), "there is no home directory")
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
            "writing what is run outside later",
            "make these read-only for the sandbox",
            |ground| {
                let paths = STARTUP.iter().filter_map(|name| resolve_path(ground, name));
                probe_persistent_writes(
                    ground,
                    paths.collect(),
                    "whether anybody outside obeys the files of this home directory cannot be seen from here",
                )
            },
        ),
        InsideProbe::new(
            GROUP,
            "files.system",
            "writing the system's files",
            "make the file system of the sandbox read-only",
            |ground| {
                probe_persistent_writes(
                    ground,
                    SYSTEM.map(PathBuf::from).to_vec(),
                    "whether these files are anybody else's cannot be seen from here",
                )
            },
        ),
        InsideProbe::new(
            GROUP,
            "files.program",
            "writing this program, which is run outside too",
            "make the program read-only for the sandbox",
            |ground| {
                let own = std::env::current_exe().ok();
                probe_persistent_writes(
                    ground,
                    own.into_iter().collect(),
                    "whether this program is run outside too cannot be seen from here",
                )
            },
        ),
    ];
    for path in &ground.hidden {
        let path = path.clone();
        let (name, what) = (format!("files.path.{}", path.display()), path.display().to_string());
        probes.push(InsideProbe::new(GROUP, name, what, OWN_FIX, move |_| probe_hidden(&path)));
    }
    for path in &ground.kept {
        let path = path.clone();
        let name = format!("files.policy.{}", path.display());
        let what = format!("writing {}", path.display());
        probes
            .push(InsideProbe::new(GROUP, name, what, POLICY_FIX, move |_| probe_writable(&path)));
    }
    probes
}

/// A name below the home directory, or a path as it is.
fn resolve_path(ground: &ProbeTargets, name: &str) -> Option<PathBuf> {
    match name.starts_with('/') {
        true => Some(PathBuf::from(name)),
        false => ground.home.as_ref().map(|home| home.join(name)),
    }
}

/// Neither to be read nor to be written.
fn probe_hidden(path: &Path) -> ProbeVerdict {
    let read = probe_readable(path);
    if read.is_bad() {
        return read;
    }
    let write = probe_writable(path);
    if write.is_bad() { write } else { read }
}

/// Whether there is anything to be read.
fn probe_readable(path: &Path) -> ProbeVerdict {
    let shown = path.display();
    match has_content(path) {
        Ok(true) => ProbeVerdict::Escaped(format!("{shown} can be read")),
        Ok(false) => ProbeVerdict::Blocked(format!("{shown} is empty")),
        Err(error) => ProbeVerdict::Blocked(format!("{shown}: {error}")),
    }
}

/// Whether a directory has an entry, or a file a byte. Nothing else is looked at.
fn has_content(path: &Path) -> io::Result<bool> {
    let found = fs::metadata(path)?;
    if found.is_dir() {
        return Ok(fs::read_dir(path)?.next().is_some());
    }
    if !found.is_file() {
        return Ok(false); // a device is no file with anything in it
    }
    Ok(fs::File::open(path)?.read(&mut [0])? > 0)
}

/// Whether it could be written. It is not.
fn probe_writable(path: &Path) -> ProbeVerdict {
    let shown = path.display();
    match access(path, AccessFlags::W_OK) {
        Ok(()) if is_null_device(path) => ProbeVerdict::Blocked(format!("{shown} is covered")),
        Ok(()) => ProbeVerdict::Escaped(format!("{shown} can be written")),
        Err(error) => ProbeVerdict::Blocked(format!("{shown}: {error}")),
    }
}

/// Whether it is a device that keeps nothing, as is put over what is hidden.
fn is_null_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::metadata(path).is_ok_and(|found| found.file_type().is_char_device())
}

/// Writing is bad in a jail, whose files are the caller's. In a container they may be nobody else's.
fn probe_persistent_writes(
    ground: &ProbeTargets,
    paths: Vec<PathBuf>,
    unclear: &str,
) -> ProbeVerdict {
    let tried = paths.iter().map(|path| probe_writable(path));
    let worst = ProbeVerdict::worst(tried.collect::<Vec<_>>(), "there are none");
    match worst.is_bad() && !ground.jail {
        true => ProbeVerdict::Unknown(format!("{}; {unclear}", worst.how())),
        false => worst,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_read_or_written_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (file, empty) = (dir.path().join("file"), dir.path().join("empty"));
        fs::write(&file, "x").unwrap();
        fs::create_dir(&empty).unwrap();
        assert!(
            probe_readable(&file).is_bad()
                && probe_hidden(&file).is_bad()
                && probe_readable(dir.path()).is_bad()
        );
        assert!(!probe_readable(&empty).is_bad(), "there is nothing in it");
        assert!(probe_hidden(&empty).is_bad(), "something could be put into it");
        assert!(!probe_hidden(&dir.path().join("none")).is_bad());
        assert!(!probe_hidden(Path::new("/dev/null")).is_bad(), "as a jail covers files");
    }
}
