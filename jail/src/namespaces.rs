//! Creates the jail's namespaces, and explains why the kernel refused.
//!
//! The sequence, in the keeper unless stated otherwise:
//!
//! 1. User namespace, alone and first. It gives an unprivileged caller the capabilities for the rest, valid only for
//!    namespaces that it owns, so root in the jail is not root on the machine.
//! 2. Id maps: the caller's uid and gid, mapped to themselves, and no others. `setgroups` must be denied before the
//!    kernel accepts the gid map of an unprivileged process (user_namespaces(7)).
//! 3. Network, mount, pid and IPC namespaces in one call, owned by the new user namespace. The pid namespace applies
//!    to the next child, which is init.
//! 4. Cgroup namespace, if the kernel has it.
//! 5. In init: mounts, because `/proc` can be mounted only from inside the pid namespace; then, through the new
//!    `/proc`, the limits that forbid further mount and cgroup namespaces; then the network.
//!
//! Where user namespaces are forbidden, root skips steps 1, 2 and 4: it may create the others directly.

use std::fs;
use std::io;

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid};

/// The namespaces of a jail besides the user namespace.
const JAIL_NAMESPACES: CloneFlags = CloneFlags::CLONE_NEWNET
    .union(CloneFlags::CLONE_NEWNS)
    .union(CloneFlags::CLONE_NEWPID)
    .union(CloneFlags::CLONE_NEWIPC);

/// Limits that init sets to 0. In a new mount namespace the command could move our hidden or read-only mounts away
/// and replace them; in a new cgroup namespace it could see, and kill, the caller's whole cgroup.
const NAMESPACE_LIMITS: [&str; 2] =
    ["/proc/sys/user/max_cgroup_namespaces", "/proc/sys/user/max_mnt_namespaces"];

/// Why the namespaces could not be created.
#[derive(Debug, thiserror::Error)]
pub(super) enum NamespaceError {
    #[error("cannot create a {what} namespace: {source}; {advice}")]
    Forbidden { what: &'static str, source: io::Error, advice: String },
    #[error("cannot map the caller's uid and gid ({file}): {source}; {advice}")]
    Map { file: &'static str, source: io::Error, advice: String },
}

/// Moves the keeper into the jail's namespaces; the next process it forks is pid 1. Runs in the keeper.
pub(super) fn unshare_namespaces() -> Result<NamespaceOwner, NamespaceError> {
    let owner = unshare_with_user(JAIL_NAMESPACES, "network, mount or process")?;
    if owner == NamespaceOwner::Own {
        // Hides the jail's place in the cgroup hierarchy. Kernels without cgroup namespaces do without.
        unshare(CloneFlags::CLONE_NEWCGROUP).unwrap_or_default();
    }
    Ok(owner)
}

/// Forbids new mount and cgroup namespaces in this user namespace and all below it. Runs in init.
///
/// If the jail belongs to the caller's user namespace, that one allows no user namespaces, and without one the
/// command, which has no capabilities, cannot create the others either.
pub(super) fn forbid_namespaces(owner: NamespaceOwner) -> io::Result<()> {
    match owner {
        NamespaceOwner::Callers => Ok(()),
        NamespaceOwner::Own => NAMESPACE_LIMITS.iter().try_for_each(|file| fs::write(file, "0")),
    }
}

/// Moves the calling process into a new network namespace only. Runs in `sandbar demo`, not in a jail.
pub(super) fn unshare_network() -> Result<(), NamespaceError> {
    unshare_with_user(CloneFlags::CLONE_NEWNET, "network").map(drop)
}

/// The user namespace that owns the new namespaces: the caller's, or a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NamespaceOwner {
    Callers,
    Own,
}

fn unshare_with_user(parts: CloneFlags, what: &'static str) -> Result<NamespaceOwner, NamespaceError> {
    let (uid, gid) = (Uid::effective(), Gid::effective());
    match unshare(CloneFlags::CLONE_NEWUSER) {
        Ok(()) => write_id_maps(uid, gid)?,
        // Root needs no user namespace to create the others. The command loses its capabilities in either case.
        Err(_) if uid.is_root() && unshare(parts).is_ok() => return Ok(NamespaceOwner::Callers),
        Err(errno) => return Err(unshare_error("user", errno)),
    }
    unshare(parts).map_err(|errno| unshare_error(what, errno))?;
    Ok(NamespaceOwner::Own)
}

fn write_id_maps(uid: Uid, gid: Gid) -> Result<(), NamespaceError> {
    let lines = [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("{uid} {uid} 1")),
        ("/proc/self/gid_map", format!("{gid} {gid} 1")),
    ];
    for (file, line) in lines {
        fs::write(file, line).map_err(|source| NamespaceError::Map {
            file,
            source,
            advice: explain_failure(None),
        })?;
    }
    Ok(())
}

fn unshare_error(what: &'static str, errno: Errno) -> NamespaceError {
    NamespaceError::Forbidden { what, source: errno.into(), advice: explain_failure(Some(errno)) }
}

/// A kernel setting that can forbid the namespaces of a jail.
struct KernelSetting {
    file: &'static str,
    forbids: fn(&str) -> bool,
    fix: &'static str,
}

const SETTINGS: &[KernelSetting] = &[
    KernelSetting {
        file: "/proc/sys/user/max_user_namespaces",
        forbids: |value| value == "0",
        fix: "sudo sysctl -w user.max_user_namespaces=10000",
    },
    KernelSetting {
        file: "/proc/sys/kernel/unprivileged_userns_clone",
        forbids: |value| value == "0",
        fix: "sudo sysctl -w kernel.unprivileged_userns_clone=1",
    },
    KernelSetting {
        file: "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        forbids: |value| value != "0",
        fix: "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give the binary an AppArmor profile with `userns,`",
    },
    KernelSetting {
        file: "/proc/sys/user/max_net_namespaces",
        forbids: |value| value == "0",
        fix: "sudo sysctl -w user.max_net_namespaces=10000",
    },
    KernelSetting {
        file: "/proc/sys/user/max_mnt_namespaces",
        forbids: |value| value == "0",
        fix: "sudo sysctl -w user.max_mnt_namespaces=10000",
    },
];

/// Returns the first kernel setting that forbids jails, with the command that changes it.
pub fn blocking_setting() -> Option<String> {
    find_blocking(&read_settings())
}

fn read_setting(file: &str) -> Option<String> {
    fs::read_to_string(file).map(|text| text.trim().to_owned()).ok()
}

fn read_settings() -> Vec<(&'static str, Option<String>)> {
    SETTINGS.iter().map(|setting| (setting.file, read_setting(setting.file))).collect()
}

/// Explains a failed call: names the setting that forbids it, its value, and the command that changes it.
pub(super) fn explain_failure(errno: Option<Errno>) -> String {
    let filtered = read_setting("/proc/self/status").is_some_and(|status| {
        status.lines().any(|line| line.starts_with("Seccomp:") && !line.trim_end().ends_with('0'))
    });
    diagnose(&read_settings(), filtered, errno)
}

fn find_blocking(values: &[(&str, Option<String>)]) -> Option<String> {
    SETTINGS.iter().zip(values).find_map(|(setting, (_, value))| {
        let value = value.as_deref().filter(|value| (setting.forbids)(value))?;
        let name = setting.file.trim_start_matches("/proc/sys/").replace('/', ".");
        Some(format!("{name} = {value} forbids it: {}", setting.fix))
    })
}

fn diagnose(values: &[(&str, Option<String>)], filtered: bool, errno: Option<Errno>) -> String {
    if let Some(setting) = find_blocking(values) {
        return setting;
    }
    if errno == Some(Errno::ENOSPC) {
        return "this process is already in a jail, and jails cannot be nested, or too many namespaces exist: see user.max_user_namespaces, user.max_net_namespaces and user.max_mnt_namespaces".to_owned();
    }
    if filtered {
        return "a seccomp filter is active, probably a container runtime's: allow unshare(2) and mount(2), e.g. `docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined`".to_owned();
    }
    "no known setting forbids it: ask the administrator of this machine to allow user namespaces, or run as root".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocking_setting_is_named_with_the_command_that_changes_it() {
        let settings = |values: [Option<&str>; 5]| -> Vec<(&'static str, Option<String>)> {
            let values = values.map(|value| value.map(str::to_owned));
            SETTINGS.iter().map(|setting| setting.file).zip(values).collect()
        };
        let fine = [Some("96343"), None, None, Some("96343"), Some("96343")];
        for (values, filtered, errno, wanted) in [
            ([Some("0"), None, None, None, None], false, None, "user.max_user_namespaces = 0"),
            ([Some("9"), Some("0"), None, None, None], false, None, "kernel.unprivileged_userns_clone=1"),
            (
                [Some("9"), Some("1"), Some("1"), None, None],
                true,
                None,
                "kernel.apparmor_restrict_unprivileged_userns = 1",
            ),
            ([Some("9"), None, Some("0"), Some("0"), None], false, None, "user.max_net_namespaces = 0"),
            ([Some("9"), None, None, None, Some("0")], false, None, "user.max_mnt_namespaces = 0"),
            (fine, true, Some(Errno::EPERM), "seccomp"),
            (fine, true, Some(Errno::ENOSPC), "too many"),
            (fine, false, Some(Errno::EPERM), "run as root"),
        ] {
            let diagnosis = diagnose(&settings(values), filtered, errno);
            assert!(diagnosis.contains(wanted), "{values:?}: {diagnosis}");
        }
    }
}
