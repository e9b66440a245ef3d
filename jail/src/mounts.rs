//! The view of the files, mounted: done by the first process of the jail, in its own mount namespace.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::mount::{MsFlags, mount};

use super::filesystem_view::{FilesystemView, MountAction};
use super::namespaces::{self, NamespaceOwner};
use sys::mount::{self as kernel, MountRestriction};

/// Where the jail finds what is made for it.
pub(super) const JAIL_DIR: &str = "/run/sandbar";
/// What makes tools trust the proxy.
pub const TRUST_DIR: &str = "/run/sandbar/trust";
/// Asked for every name; wherever a query is sent, it arrives at the proxy.
const RESOLV_CONF: &str = "# Every name is resolved by Sandbar.\nnameserver 127.0.0.1\n";
/// The devices that programs expect, and no other.
const DEVICES: &[&str] = &["full", "null", "random", "tty", "urandom", "zero"];
/// What even a reader of `/proc` must not write when the caller is root: the machine's own settings.
const READ_ONLY_PROC: &[&str] =
    &["acpi", "bus", "fs", "irq", "sys", "sysrq-trigger", "kcore", "scsi"];
const NOSUID_NODEV_NOEXEC: MsFlags =
    MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

/// Arranges everything that is seen inside; `terminal` is the caller's, if it has one.
pub(super) fn mount_view(
    view: &FilesystemView,
    terminal: Option<&Path>,
    users: NamespaceOwner,
) -> anyhow::Result<()> {
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot make mounts private")?;
    let kept = DetachedMounts::open(view, terminal)?;
    let resolv_conf = fs::canonicalize("/etc/resolv.conf").ok();
    kernel::restrict(Path::new("/"), MountRestriction::Everything).map_err(|error| match error
        .raw_os_error()
    {
        Some(libc::ENOSYS) => anyhow::anyhow!("the kernel is too old: Linux 5.12 is needed"),
        _ => anyhow::Error::new(error).context("cannot make the file system read-only"),
    })?;
    mount_proc(users)?;
    // The devices of the new network, not of the machine's; where it cannot be, the old stay, read-only.
    mount(Some("sysfs"), "/sys", Some("sysfs"), NOSUID_NODEV_NOEXEC | MsFlags::MS_RDONLY, none)
        .unwrap_or_default();
    mount_dev(&kept)?;
    for ((path, change), tree) in view.changes.iter().zip(&kept.trees) {
        let done = apply_action(path, change, tree.as_ref());
        done.with_context(|| format!("cannot arrange {}", path.display()))?;
    }
    create_jail_dir(resolv_conf.as_deref()).context("cannot make /run/sandbar")?;
    for socket in &view.sockets {
        hide_socket(socket).with_context(|| format!("cannot hide {}", socket.display()))?;
    }
    std::env::set_current_dir(&view.cwd)
        .with_context(|| format!("cannot enter {}", view.cwd.display()))
}

/// Copies of what is seen as it is outside, taken before the rest is made read-only.
struct DetachedMounts {
    /// One for each change that needs it.
    trees: Vec<Option<OwnedFd>>,
    devices: Vec<(&'static str, OwnedFd)>,
    terminal: Option<OwnedFd>,
}

impl DetachedMounts {
    fn open(view: &FilesystemView, terminal: Option<&Path>) -> anyhow::Result<Self> {
        let mut trees = Vec::new();
        for (path, change) in &view.changes {
            let tree = match change {
                MountAction::Fresh | MountAction::Hide => None,
                MountAction::Link => Some(kernel::copy_link(path)),
                MountAction::ReadOnly | MountAction::Writable => Some(kernel::copy_tree(path)),
            };
            let tree = tree.transpose();
            trees.push(tree.with_context(|| format!("cannot show {}", path.display()))?);
        }
        let mut devices = Vec::new();
        for name in DEVICES {
            let path = Path::new("/dev").join(name);
            if path.exists() {
                let tree = kernel::copy_tree(&path);
                devices.push((*name, tree.with_context(|| format!("cannot show /dev/{name}"))?));
            }
        }
        let terminal = terminal.and_then(|path| kernel::copy_tree(path).ok());
        Ok(DetachedMounts { trees, devices, terminal })
    }
}

fn apply_action(path: &Path, change: &MountAction, tree: Option<&OwnedFd>) -> io::Result<()> {
    match change {
        MountAction::Fresh => mount_tmpfs(path, "mode=1777"),
        MountAction::Hide => hide_path(path),
        MountAction::Link => tree.map_or(Ok(()), |tree| kernel::mount_tree(tree.as_fd(), path)),
        MountAction::ReadOnly | MountAction::Writable => {
            let Some(tree) = tree else { return Ok(()) };
            mount_copy(path, tree)?;
            let what = match change {
                MountAction::ReadOnly => MountRestriction::Everything,
                MountAction::Fresh
                | MountAction::Hide
                | MountAction::Link
                | MountAction::Writable => MountRestriction::Privileges,
            };
            kernel::restrict(path, what)
        }
    }
}

/// Mounts a copy where it was. In a directory that is new by now its place is made first.
fn mount_copy(path: &Path, tree: &OwnedFd) -> io::Result<()> {
    if !path.exists() {
        let below =
            fs::metadata(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(tree)));
        create_mount_point(path, below.is_ok_and(|below| below.is_dir()))?;
    }
    kernel::mount_tree(tree.as_fd(), path)
}

fn create_mount_point(path: &Path, dir: bool) -> io::Result<()> {
    if dir {
        return fs::create_dir_all(path);
    }
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::File::create(path).map(drop)
}

fn mount_tmpfs(path: &Path, mode: &str) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    Ok(mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(mode))?)
}

/// A directory is empty then, and a file has nothing in it; neither can be written.
fn hide_path(path: &Path) -> io::Result<()> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    if found.is_dir() {
        mount_tmpfs(path, "mode=0500")?;
    } else {
        mount(Some("/dev/null"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    }
    kernel::restrict(path, MountRestriction::Writing)
}

/// A socket that is still there after everything else is hidden by itself.
pub(super) fn hide_socket(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => hide_path(path),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// The processes of the jail instead of the machine's.
fn mount_proc(users: NamespaceOwner) -> anyhow::Result<()> {
    let none = None::<&str>;
    mount(Some("proc"), "/proc", Some("proc"), NOSUID_NODEV_NOEXEC, none).context(
        "cannot mount /proc: where a container runtime has covered parts of it, start the container with `--security-opt systempaths=unconfined`",
    )?;
    namespaces::forbid_namespaces(users).context("cannot forbid further mount namespaces")?;
    if !nix::unistd::Uid::effective().is_root() {
        return Ok(()); // who is not root cannot write them anyway
    }
    for name in READ_ONLY_PROC {
        let path = Path::new("/proc").join(name);
        if !path.exists() {
            continue;
        }
        mount(Some(&path), &path, none, MsFlags::MS_BIND, none)
            .map_err(io::Error::from)
            .and_then(|()| kernel::restrict(&path, MountRestriction::Writing))
            .with_context(|| format!("cannot guard {}", path.display()))?;
    }
    Ok(())
}

/// A few devices, terminals of its own, and the caller's one where `/dev/console` is expected.
fn mount_dev(kept: &DetachedMounts) -> anyhow::Result<()> {
    let dev = Path::new("/dev");
    mount_tmpfs(dev, "mode=0755").context("cannot make /dev")?;
    let file = |name: &str, tree: &OwnedFd| -> anyhow::Result<()> {
        let path = dev.join(name);
        let placed =
            create_mount_point(&path, false).and_then(|()| kernel::mount_tree(tree.as_fd(), &path));
        placed.with_context(|| format!("cannot make {}", path.display()))
    };
    for (name, tree) in &kept.devices {
        file(name, tree)?;
    }
    if let Some(terminal) = &kept.terminal {
        file("console", terminal)?;
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("ptmx", "pts/ptmx"),
        ("stderr", "/proc/self/fd/2"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
    ] {
        symlink(target, dev.join(name)).with_context(|| format!("cannot make /dev/{name}"))?;
    }
    for name in ["pts", "shm"] {
        fs::create_dir(dev.join(name)).with_context(|| format!("cannot make /dev/{name}"))?;
    }
    mount_tmpfs(&dev.join("shm"), "mode=1777").context("cannot make /dev/shm")?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let options = Some("newinstance,ptmxmode=0666,mode=620");
    mount(Some("devpts"), &dev.join("pts"), Some("devpts"), flags, options)
        .context("cannot make /dev/pts")
}

/// The runtime directory of the user, the resolver's file, and room for the trust files.
fn create_jail_dir(resolv_conf: Option<&Path>) -> io::Result<()> {
    fs::create_dir_all(JAIL_DIR)?;
    mount_tmpfs(Path::new(JAIL_DIR), "mode=0755")?;
    fs::create_dir_all(TRUST_DIR)?;
    let runtime = runtime_dir();
    fs::create_dir_all(&runtime)?;
    fs::set_permissions(&runtime, fs::Permissions::from_mode(0o700))?;
    let file = Path::new(JAIL_DIR).join("resolv.conf");
    fs::write(&file, RESOLV_CONF)?;
    let Some(path) = resolv_conf else { return Ok(()) };
    if !path.exists() {
        return create_mount_point(path, false).and_then(|()| fs::write(path, RESOLV_CONF));
    }
    Ok(mount(Some(&file), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?)
}

/// The directory that stands in for the caller's runtime directory.
pub fn runtime_dir() -> PathBuf {
    PathBuf::from(format!("/run/user/{}", nix::unistd::Uid::effective()))
}

/// Writes the trust files, after which nothing of ours is written any more.
pub(super) fn write_trust_files(files: &[(String, Vec<u8>)]) -> io::Result<()> {
    for (name, content) in files {
        let path = Path::new(TRUST_DIR).join(name);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(path, content)?;
    }
    kernel::restrict(Path::new(JAIL_DIR), MountRestriction::Writing)
}
