//! Namespaces: entering those of other processes, and creating new ones as root.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{Gid, Uid};

use super::network_config::remove_table;
use super::processes::foreign_pids;
use super::{InsideProbe, PeerPresence, ProbeTargets, judge_privileged, tcp};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "namespaces";
const ENTER_FIX: &str =
    "give the sandbox its own PID namespace, and drop CAP_SYS_ADMIN and CAP_SYS_PTRACE from it";
const MAKE_FIX: &str = "drop CAP_SYS_ADMIN from the sandbox, and hide files by mounts in a namespace that the sandbox does not own";
const NAMESPACE_KINDS: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];
/// Mount options other than `ro`.
const MOUNT_OPTIONS: [(&str, MsFlags); 6] = [
    ("noatime", MsFlags::MS_NOATIME),
    ("nodev", MsFlags::MS_NODEV),
    ("nodiratime", MsFlags::MS_NODIRATIME),
    ("noexec", MsFlags::MS_NOEXEC),
    ("nosuid", MsFlags::MS_NOSUID),
    ("relatime", MsFlags::MS_RELATIME),
];
/// File systems commonly mounted to hide what is below.
const COVERING_FILESYSTEMS: [&str; 3] = ["devtmpfs", "ramfs", "tmpfs"];

pub(super) fn probes() -> Vec<InsideProbe> {
    vec![
        InsideProbe::new(
            GROUP,
            "namespaces.enter",
            "entering another process's namespaces",
            ENTER_FIX,
            probe_enter,
        ),
        InsideProbe::new(
            GROUP,
            "namespaces.init",
            "entering the namespaces of pid 1",
            ENTER_FIX,
            probe_enter_init,
        ),
        InsideProbe::new(GROUP, "namespaces.net", "a new network namespace", MAKE_FIX, |_| {
            let made = unshare(CloneFlags::CLONE_NEWNET).map_err(io::Error::from);
            judge_privileged(made, "this process has CAP_SYS_ADMIN")
        }),
        InsideProbe::new(
            GROUP,
            "namespaces.root-net",
            "a new network namespace as root of a user namespace",
            MAKE_FIX,
            probe_nested_network,
        ),
        InsideProbe::new(
            GROUP,
            "namespaces.root-firewall",
            "the firewall as root of a user namespace",
            MAKE_FIX,
            |_| match unshare_user(CloneFlags::empty()) {
                Ok(()) => judge_privileged(remove_table(), "the firewall of this namespace can be changed"),
                Err(error) => ProbeVerdict::Blocked(format!("cannot create a user namespace: {error}")),
            },
        ),
        InsideProbe::new(
            GROUP,
            "namespaces.remount",
            "remounting read-only mounts as root of a user namespace",
            MAKE_FIX,
            probe_remount,
        ),
        InsideProbe::new(
            GROUP,
            "namespaces.uncover",
            "unmounting covers as root of a user namespace",
            MAKE_FIX,
            probe_uncover,
        ),
    ]
}

/// The inode number that identifies a namespace.
fn namespace_inode(pid: &str, kind: &str) -> Option<u64> {
    fs::metadata(format!("/proc/{pid}/ns/{kind}")).ok().map(|metadata| metadata.ino())
}

/// Tries to enter every visible namespace other than this process's own.
fn probe_enter(_: &ProbeTargets) -> ProbeVerdict {
    let mut tried = Vec::new();
    for pid in foreign_pids().iter().map(ToString::to_string) {
        for kind in NAMESPACE_KINDS {
            let theirs = namespace_inode(&pid, kind);
            if theirs.is_some() && theirs != namespace_inode("self", kind) {
                tried.push(try_enter(&pid, kind));
            }
        }
    }
    ProbeVerdict::worst(tried, "no other namespace is visible")
}

fn probe_enter_init(_: &ProbeTargets) -> ProbeVerdict {
    ProbeVerdict::worst(NAMESPACE_KINDS.map(|kind| try_enter("1", kind)), "none exists")
}

fn try_enter(pid: &str, kind: &str) -> ProbeVerdict {
    let path = format!("/proc/{pid}/ns/{kind}");
    let foreign = || namespace_inode(pid, kind) != namespace_inode("self", kind);
    let file = match fs::File::open(&path) {
        Ok(_) if !foreign() => {
            return ProbeVerdict::Blocked("it is the same namespace".to_owned());
        }
        Ok(file) => file,
        Err(error) => return ProbeVerdict::Blocked(error.to_string()),
    };
    match setns(file, CloneFlags::empty()) {
        Ok(()) => ProbeVerdict::Escaped(format!("entered {path}")),
        Err(error) => ProbeVerdict::Blocked(error.to_string()),
    }
}

/// Becomes root of a new user namespace, with the namespaces in `more`. The process has all capabilities there even if
/// writing the uid map fails, so those errors are ignored.
fn unshare_user(more: CloneFlags) -> io::Result<()> {
    let (uid, gid) = (Uid::effective(), Gid::effective());
    unshare(CloneFlags::CLONE_NEWUSER | more)?;
    for (file, line) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("0 {uid} 1")),
        ("gid_map", format!("0 {gid} 1")),
    ] {
        drop(fs::write(format!("/proc/self/{file}"), line));
    }
    Ok(())
}

/// A connection from a new network namespace must lead nowhere.
fn probe_nested_network(targets: &ProbeTargets) -> ProbeVerdict {
    match unshare_user(CloneFlags::CLONE_NEWNET) {
        Ok(()) => {
            let to = SocketAddr::new(targets.ipv4.into(), 80);
            tcp::probe_connect(targets, to, PeerPresence::Answers, |_| Ok(()))
        }
        Err(error) => ProbeVerdict::Blocked(format!("cannot create a user namespace: {error}")),
    }
}

/// Moves to a private mount namespace, where no other process sees the changes. Tries without a new user namespace
/// first: mounts are not locked then, so more attempts can succeed.
fn unshare_mounts() -> io::Result<()> {
    if unshare(CloneFlags::CLONE_NEWNS).is_err() {
        unshare_user(CloneFlags::CLONE_NEWNS)?;
    }
    let none = None::<&str>;
    Ok(mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?)
}

/// A line of `/proc/self/mountinfo` (proc(5)).
struct MountPoint {
    at: PathBuf,
    read_only: bool,
    /// Other restrictions, which a remount must repeat.
    others: MsFlags,
    kind: String,
}

fn read_mounts() -> Vec<MountPoint> {
    let listed = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    listed.lines().filter_map(parse_mount).collect()
}

fn parse_mount(line: &str) -> Option<MountPoint> {
    let (before, after) = line.split_once(" - ")?;
    let mut fields = before.split(' ').skip(4);
    let at = PathBuf::from(fields.next()?);
    let options: Vec<&str> = fields.next()?.split(',').collect();
    let others = MOUNT_OPTIONS.iter().filter(|(name, _)| options.contains(name));
    let others = others.fold(MsFlags::empty(), |all, (_, flag)| all | *flag);
    let kind = after.split(' ').next()?.to_owned();
    Some(MountPoint { at, read_only: options.contains(&"ro"), others, kind })
}

fn probe_remount(_: &ProbeTargets) -> ProbeVerdict {
    if let Err(error) = unshare_mounts() {
        return ProbeVerdict::Blocked(format!("cannot create a mount namespace: {error}"));
    }
    // A mount covered by another is listed too, but its path leads to the covering one.
    let is_visible = |mount: &MountPoint| mount.read_only && is_read_only(&mount.at);
    let tried: Vec<ProbeVerdict> =
        read_mounts().iter().filter(|mount| is_visible(mount)).map(try_remount).collect();
    ProbeVerdict::worst(tried, "no mount is read-only")
}

fn try_remount(target: &MountPoint) -> ProbeVerdict {
    let (none, shown) = (None::<&str>, target.at.display());
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | target.others;
    match mount(none, &target.at, none, flags, none) {
        Ok(()) if is_read_only(&target.at) => ProbeVerdict::Blocked(format!("{shown} stays read-only")),
        Ok(()) => ProbeVerdict::Escaped(format!("{shown} became writable")),
        Err(error) => ProbeVerdict::Blocked(format!("{shown}: {error}")),
    }
}

fn is_read_only(path: &Path) -> bool {
    statvfs(path).is_ok_and(|stats| stats.flags().contains(FsFlags::ST_RDONLY))
}

fn probe_uncover(_: &ProbeTargets) -> ProbeVerdict {
    if let Err(error) = unshare_mounts() {
        return ProbeVerdict::Blocked(format!("cannot create a mount namespace: {error}"));
    }
    let covers = |mount: &MountPoint| {
        COVERING_FILESYSTEMS.contains(&mount.kind.as_str()) && mount.at != Path::new("/")
    };
    let tried = read_mounts().into_iter().filter(covers).map(|mount| {
        match umount2(&mount.at, MntFlags::MNT_DETACH) {
            Ok(()) => ProbeVerdict::Escaped(format!("{} was uncovered", mount.at.display())),
            Err(error) => ProbeVerdict::Blocked(error.to_string()),
        }
    });
    ProbeVerdict::worst(tried.collect::<Vec<_>>(), "no mount covers anything")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_is_parsed() {
        let line = "36 35 98:0 /mnt1 /mnt2 ro,noatime master:1 - tmpfs /dev/root rw,errors=continue";
        let mount = parse_mount(line).unwrap();
        assert_eq!((mount.at.as_path(), mount.kind.as_str()), (Path::new("/mnt2"), "tmpfs"));
        assert!(mount.read_only && mount.others == MsFlags::MS_NOATIME);
        assert!(parse_mount("nonsense").is_none());
    }
}
