//! Mounts the jail's [`FilesystemView`]. Everything except [`runtime_dir`] runs in init, in the jail's mount namespace.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::mount::{MsFlags, mount};

use super::filesystem_view::{FilesystemView, MountAction};
use super::namespaces::{self, NamespaceOwner};
use sys::mount::{self as kernel, MountRestriction};

/// Directory inside the jail with the files that Sandbar provides.
pub(super) const JAIL_DIR: &str = "/run/sandbar";
/// Directory inside the jail with the files that make tools trust the proxy.
pub const TRUST_DIR: &str = "/run/sandbar/trust";
/// Where a file is made before it is mounted over a credential; a file system in memory.
const BLANK_FILE: &str = "/dev/shm/.sandbar-blank";
/// The address does not matter: the firewall redirects every query to the proxy.
const RESOLV_CONF: &str = "# Sandbar resolves every name.\nnameserver 127.0.0.1\n";
/// The only devices in the jail's `/dev`, those that programs expect.
const DEVICES: &[&str] = &["full", "null", "random", "tty", "urandom", "zero"];
/// Entries of `/proc` with settings of the machine, which root could write.
const READ_ONLY_PROC: &[&str] = &["acpi", "bus", "fs", "irq", "sys", "sysrq-trigger", "kcore", "scsi"];
const NOSUID_NODEV_NOEXEC: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

/// Mounts everything that the command sees; `terminal` is the caller's, if it has one.
///
/// Order: private propagation, so that nothing here reaches the caller's mounts; copies of all trees that stay as
/// they are, while they are still writable; the whole tree read-only; then the copies and the new directories on
/// top, parents before children. Sockets come last, since earlier mounts hide most of them.
pub(super) fn mount_view(
    view: &FilesystemView,
    terminal: Option<&Path>,
    users: NamespaceOwner,
) -> anyhow::Result<()> {
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot make mounts private")?;
    let detached = DetachedMounts::open(view, terminal)?;
    let resolv_conf = fs::canonicalize("/etc/resolv.conf").ok();
    kernel::restrict(Path::new("/"), MountRestriction::Everything).map_err(|error| {
        match error.raw_os_error() {
            Some(libc::ENOSYS) => anyhow::anyhow!("the kernel is too old: the jail needs Linux 5.12"),
            _ => anyhow::Error::new(error).context("cannot make the file system read-only"),
        }
    })?;
    mount_proc(users)?;
    // A new sysfs shows the interfaces of the jail's network namespace. If the kernel refuses, the old one stays,
    // read-only.
    mount(Some("sysfs"), "/sys", Some("sysfs"), NOSUID_NODEV_NOEXEC | MsFlags::MS_RDONLY, none)
        .unwrap_or_default();
    mount_dev(&detached)?;
    for ((path, action), tree) in view.changes.iter().zip(&detached.trees) {
        apply_action(path, action, tree.as_ref())
            .with_context(|| format!("cannot mount {}", path.display()))?;
    }
    create_jail_dir(resolv_conf.as_deref()).context("cannot create /run/sandbar")?;
    for socket in &view.sockets {
        hide_socket(socket).with_context(|| format!("cannot hide {}", socket.display()))?;
    }
    std::env::set_current_dir(&view.cwd).with_context(|| format!("cannot enter {}", view.cwd.display()))
}

/// Detached copies of the trees that the jail sees unchanged, taken before the rest becomes read-only.
struct DetachedMounts {
    /// One per action that needs a copy, in the order of the actions.
    trees: Vec<Option<OwnedFd>>,
    devices: Vec<(&'static str, OwnedFd)>,
    terminal: Option<OwnedFd>,
}

impl DetachedMounts {
    fn open(view: &FilesystemView, terminal: Option<&Path>) -> anyhow::Result<Self> {
        let mut trees = Vec::new();
        for (path, action) in &view.changes {
            let tree = match action {
                MountAction::Blank | MountAction::Fresh | MountAction::Hide => None,
                MountAction::Link => Some(kernel::copy_link(path)),
                MountAction::ReadOnly | MountAction::Writable => Some(kernel::copy_tree(path)),
            };
            let tree = tree.transpose();
            trees.push(tree.with_context(|| format!("cannot expose {}", path.display()))?);
        }
        let mut devices = Vec::new();
        for name in DEVICES {
            let path = Path::new("/dev").join(name);
            if path.exists() {
                let tree = kernel::copy_tree(&path);
                devices.push((*name, tree.with_context(|| format!("cannot expose /dev/{name}"))?));
            }
        }
        let terminal = terminal.and_then(|path| kernel::copy_tree(path).ok());
        Ok(DetachedMounts { trees, devices, terminal })
    }
}

fn apply_action(path: &Path, action: &MountAction, tree: Option<&OwnedFd>) -> io::Result<()> {
    match action {
        MountAction::Blank => blank_path(path),
        MountAction::Fresh => mount_tmpfs(path, "mode=1777"),
        MountAction::Hide => hide_path(path),
        MountAction::Link => tree.map_or(Ok(()), |tree| kernel::mount_tree(tree.as_fd(), path)),
        MountAction::ReadOnly | MountAction::Writable => {
            let Some(tree) = tree else { return Ok(()) };
            mount_copy(path, tree)?;
            let restriction = match action {
                MountAction::ReadOnly => MountRestriction::Everything,
                MountAction::Blank
                | MountAction::Fresh
                | MountAction::Hide
                | MountAction::Link
                | MountAction::Writable => MountRestriction::Privileges,
            };
            kernel::restrict(path, restriction)
        }
    }
}

/// Mounts a copy at its original path. Creates the mount point if an action before it has mounted a new directory
/// above.
fn mount_copy(path: &Path, tree: &OwnedFd) -> io::Result<()> {
    if !path.exists() {
        let root = fs::metadata(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(tree)));
        create_mount_point(path, root.is_ok_and(|root| root.is_dir()))?;
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

/// Covers a directory with an empty one, a file with `/dev/null`, both read-only.
pub(super) fn hide_path(path: &Path) -> io::Result<()> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    if metadata.is_dir() {
        mount_tmpfs(path, "mode=0500")?;
    } else {
        mount(Some("/dev/null"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    }
    kernel::restrict(path, MountRestriction::Writing)
}

/// Covers a directory with an empty one, a file with an empty one, both in memory and writable. A JSON file is an
/// empty object, because programs fail on one without content. Only before the command starts, which could write
/// where the file is made.
fn blank_path(path: &Path) -> io::Result<()> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    if metadata.is_dir() {
        return mount_tmpfs(path, "mode=0700");
    }
    let is_json = path.extension().is_some_and(|extension| extension == "json");
    let blank = Path::new(BLANK_FILE);
    let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(blank)?;
    file.write_all(if is_json { b"{}" } else { b"" })?;
    let mounted = mount(Some(blank), path, None::<&str>, MsFlags::MS_BIND, None::<&str>);
    fs::remove_file(blank)?; // the mount keeps the file itself
    Ok(mounted?)
}

/// Covers a unix socket, if one is visible at `path`.
pub(super) fn hide_socket(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => hide_path(path),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Mounts `/proc` of the jail's pid namespace, and forbids further namespaces through it.
fn mount_proc(users: NamespaceOwner) -> anyhow::Result<()> {
    let none = None::<&str>;
    mount(Some("proc"), "/proc", Some("proc"), NOSUID_NODEV_NOEXEC, none).context(
        "cannot mount /proc: if a container runtime has covered parts of it, start the container with `--security-opt systempaths=unconfined`",
    )?;
    namespaces::forbid_namespaces(users).context("cannot forbid further mount namespaces")?;
    if !nix::unistd::Uid::effective().is_root() {
        return Ok(()); // only root can write the entries below
    }
    for name in READ_ONLY_PROC {
        let path = Path::new("/proc").join(name);
        if !path.exists() {
            continue;
        }
        mount(Some(&path), &path, none, MsFlags::MS_BIND, none)
            .map_err(io::Error::from)
            .and_then(|()| kernel::restrict(&path, MountRestriction::Writing))
            .with_context(|| format!("cannot make {} read-only", path.display()))?;
    }
    Ok(())
}

/// Mounts a new `/dev` with a few devices, its own `devpts`, and the caller's terminal as `/dev/console`.
fn mount_dev(detached: &DetachedMounts) -> anyhow::Result<()> {
    let dev = Path::new("/dev");
    mount_tmpfs(dev, "mode=0755").context("cannot mount /dev")?;
    let file = |name: &str, tree: &OwnedFd| -> anyhow::Result<()> {
        let path = dev.join(name);
        create_mount_point(&path, false)
            .and_then(|()| kernel::mount_tree(tree.as_fd(), &path))
            .with_context(|| format!("cannot mount {}", path.display()))
    };
    for (name, tree) in &detached.devices {
        file(name, tree)?;
    }
    if let Some(terminal) = &detached.terminal {
        file("console", terminal)?;
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("ptmx", "pts/ptmx"),
        ("stderr", "/proc/self/fd/2"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
    ] {
        symlink(target, dev.join(name)).with_context(|| format!("cannot create /dev/{name}"))?;
    }
    for name in ["pts", "shm"] {
        fs::create_dir(dev.join(name)).with_context(|| format!("cannot create /dev/{name}"))?;
    }
    mount_tmpfs(&dev.join("shm"), "mode=1777").context("cannot mount /dev/shm")?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let options = Some("newinstance,ptmxmode=0666,mode=620");
    mount(Some("devpts"), &dev.join("pts"), Some("devpts"), flags, options).context("cannot mount /dev/pts")
}

/// Creates the directory for the trust files, the user's runtime directory, and `resolv.conf`.
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

/// Returns the runtime directory (`XDG_RUNTIME_DIR`) of the command.
pub fn runtime_dir() -> PathBuf {
    PathBuf::from(format!("/run/user/{}", nix::unistd::Uid::effective()))
}

/// Writes the trust files and makes [`JAIL_DIR`] read-only.
pub(super) fn write_trust_files(files: &[(String, Vec<u8>)]) -> io::Result<()> {
    for (name, content) in files {
        let path = Path::new(TRUST_DIR).join(name);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(path, content)?;
    }
    kernel::restrict(Path::new(JAIL_DIR), MountRestriction::Writing)
}
