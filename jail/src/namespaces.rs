//! Namespaces of the jail, and why there may be none.

use std::fs;
use std::io;

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid};

/// What a jail is made of besides a user namespace.
const JAIL_NAMESPACES: CloneFlags = CloneFlags::CLONE_NEWNET
    .union(CloneFlags::CLONE_NEWNS)
    .union(CloneFlags::CLONE_NEWPID)
    .union(CloneFlags::CLONE_NEWIPC);

/// What nobody inside makes another of. In a mount namespace without our mounts what is hidden or read-only
/// could be moved away and replaced; a further cgroup namespace shows the caller's own cgroup, to be killed whole.
const NAMESPACE_LIMITS: [&str; 2] =
    ["/proc/sys/user/max_cgroup_namespaces", "/proc/sys/user/max_mnt_namespaces"];

/// Why there is no jail.
#[derive(Debug, thiserror::Error)]
pub(super) enum NamespaceError {
    #[error("cannot make a {what} namespace: {source}; {advice}")]
    Forbidden { what: &'static str, source: io::Error, advice: String },
    #[error("cannot be the same user inside ({file}): {source}; {advice}")]
    Map { file: &'static str, source: io::Error, advice: String },
}

/// Leaves the caller's namespaces for new ones; the next process made is the first of the new ones.
///
/// Inside, the caller has its own uid and gid and none other. What root may do to the machine it may not do
/// here, for its capabilities are those of the new namespace.
pub(super) fn unshare_namespaces() -> Result<NamespaceOwner, NamespaceError> {
    let user = unshare_with_user(JAIL_NAMESPACES, "network, mount or process")?;
    if user == NamespaceOwner::Own {
        // Hides where in the hierarchy the jail is; a kernel without them has nothing to hide.
        unshare(CloneFlags::CLONE_NEWCGROUP).unwrap_or_default();
    }
    Ok(user)
}

/// Forbids further namespaces of the kinds that lead around the jail, to this user namespace and all below it.
/// Where the namespaces belong to the caller's, that one allows no user namespace, and so none of these.
pub(super) fn forbid_namespaces(user: NamespaceOwner) -> io::Result<()> {
    match user {
        NamespaceOwner::Callers => Ok(()),
        NamespaceOwner::Own => NAMESPACE_LIMITS.iter().try_for_each(|file| fs::write(file, "0")),
    }
}

/// Leaves the caller's network for a new one, and nothing else.
pub(super) fn unshare_network() -> Result<(), NamespaceError> {
    unshare_with_user(CloneFlags::CLONE_NEWNET, "network").map(drop)
}

/// Whose user namespace the new ones belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NamespaceOwner {
    Callers,
    Own,
}

fn unshare_with_user(
    parts: CloneFlags,
    what: &'static str,
) -> Result<NamespaceOwner, NamespaceError> {
    let (uid, gid) = (Uid::effective(), Gid::effective());
    match unshare(CloneFlags::CLONE_NEWUSER) {
        Ok(()) => write_id_maps(uid, gid)?,
        // Root needs no user namespace for the others; it gives up its capabilities all the same.
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

/// A setting that forbids user namespaces.
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

/// The setting that forbids jails, if one does, and the command that changes it.
pub fn blocking_setting() -> Option<String> {
    find_blocking(&read_settings())
}

fn read_setting(file: &str) -> Option<String> {
    fs::read_to_string(file).map(|text| text.trim().to_owned()).ok()
}

fn read_settings() -> Vec<(&'static str, Option<String>)> {
    SETTINGS.iter().map(|setting| (setting.file, read_setting(setting.file))).collect()
}

/// Names the very setting that stands in the way, its value, and the command that changes it.
pub(super) fn explain_failure(errno: Option<Errno>) -> String {
    let filtered = read_setting("/proc/self/status").is_some_and(|status| {
        status.lines().any(|line| line.starts_with("Seccomp:") && !line.trim_end().ends_with('0'))
    });
    diagnose(&read_settings(), filtered, errno)
}

fn find_blocking(found: &[(&str, Option<String>)]) -> Option<String> {
    SETTINGS.iter().zip(found).find_map(|(setting, (_, value))| {
        let value = value.as_deref().filter(|value| (setting.forbids)(value))?;
        let name = setting.file.trim_start_matches("/proc/sys/").replace('/', ".");
        Some(format!("{name} = {value} forbids it: {}", setting.fix))
    })
}

fn diagnose(found: &[(&str, Option<String>)], filtered: bool, errno: Option<Errno>) -> String {
    if let Some(named) = find_blocking(found) {
        return named;
    }
    if errno == Some(Errno::ENOSPC) {
        return "this is a jail already, and there is none in another, or too many namespaces exist: see user.max_user_namespaces, user.max_net_namespaces and user.max_mnt_namespaces".to_owned();
    }
    if filtered {
        return "a seccomp filter is in force, as container runtimes set one: allow unshare(2) and mount(2), e.g. `docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined`".to_owned();
    }
    "no setting known to forbid it is set: ask whoever runs this machine for user namespaces, or run as root".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_that_forbids_is_named_with_what_changes_it() {
        let found = |values: [Option<&str>; 5]| -> Vec<(&'static str, Option<String>)> {
            let values = values.map(|value| value.map(str::to_owned));
            SETTINGS.iter().map(|setting| setting.file).zip(values).collect()
        };
        let fine = [Some("96343"), None, None, Some("96343"), Some("96343")];
        for (values, filtered, errno, wanted) in [
            ([Some("0"), None, None, None, None], false, None, "user.max_user_namespaces = 0"),
            (
                [Some("9"), Some("0"), None, None, None],
                false,
                None,
                "kernel.unprivileged_userns_clone=1",
            ),
            (
                [Some("9"), Some("1"), Some("1"), None, None],
                true,
                None,
                "kernel.apparmor_restrict_unprivileged_userns = 1",
            ),
            (
                [Some("9"), None, Some("0"), Some("0"), None],
                false,
                None,
                "user.max_net_namespaces = 0",
            ),
            ([Some("9"), None, None, None, Some("0")], false, None, "user.max_mnt_namespaces = 0"),
            (fine, true, Some(Errno::EPERM), "seccomp"),
            (fine, true, Some(Errno::ENOSPC), "too many"),
            (fine, false, Some(Errno::EPERM), "run as root"),
        ] {
            let said = diagnose(&found(values), filtered, errno);
            assert!(said.contains(wanted), "{values:?}: {said}");
        }
    }
}
