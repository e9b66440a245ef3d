//! Mount trees: copy, attach and restrict mounts through descriptors (`open_tree(2)`, `move_mount(2)`,
//! `mount_setattr(2)`), which neither libc nor `nix` wraps.

use std::ffi::{CStr, CString, c_int, c_uint};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::done;

// From <linux/mount.h>; not every libc has them.
const OPEN_TREE_CLONE: c_uint = 1;
const MOVE_MOUNT_F_EMPTY_PATH: c_uint = 4;
const MOUNT_ATTR_RDONLY: u64 = 1;
const MOUNT_ATTR_NOSUID: u64 = 2;
const MOUNT_ATTR_NODEV: u64 = 4;

/// The restrictions to add to a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountRestriction {
    /// Read-only, and devices and set-user-ID programs have no effect.
    Everything,
    /// Devices and set-user-ID programs have no effect.
    Privileges,
    /// Read-only.
    Writing,
}

/// Clones the mounts at and below `path`. The clone is not attached anywhere yet.
pub fn copy_tree(path: &Path) -> io::Result<OwnedFd> {
    open_tree(path, libc::AT_RECURSIVE as c_uint)
}

/// Clones the mount of a symbolic link itself, without following it.
pub fn copy_link(path: &Path) -> io::Result<OwnedFd> {
    open_tree(path, libc::AT_SYMLINK_NOFOLLOW as c_uint)
}

fn open_tree(path: &Path, how: c_uint) -> io::Result<OwnedFd> {
    let path = to_cstring(path)?;
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as c_uint | how;
    // SAFETY: `path` is NUL-terminated and outlives the call.
    let tree = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
    let tree = c_int::try_from(done(tree)?).map_err(io::Error::other)?;
    // SAFETY: the call succeeded, so the kernel just opened this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(tree) })
}

/// Attaches a cloned tree at `path`, without following `path` if it is a symbolic link.
pub fn mount_tree(tree: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = to_cstring(path)?;
    // SAFETY: both paths are NUL-terminated and outlive the call.
    let moved = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    done(moved).map(drop)
}

/// Restricts every mount at and below `path`.
pub fn restrict(path: &Path, what: MountRestriction) -> io::Result<()> {
    set_attributes(libc::AT_FDCWD, &to_cstring(path)?, libc::AT_RECURSIVE, what)
}

/// Restricts a cloned tree that is not attached yet.
pub fn restrict_tree(tree: BorrowedFd<'_>, what: MountRestriction) -> io::Result<()> {
    set_attributes(tree.as_raw_fd(), c"", libc::AT_RECURSIVE | libc::AT_EMPTY_PATH, what)
}

fn set_attributes(dir: c_int, path: &CStr, how: c_int, what: MountRestriction) -> io::Result<()> {
    /// `struct mount_attr`.
    #[repr(C)]
    struct MountAttributes {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    let set = match what {
        MountRestriction::Everything => MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV,
        MountRestriction::Privileges => MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV,
        MountRestriction::Writing => MOUNT_ATTR_RDONLY,
    };
    let attributes = MountAttributes { set, clear: 0, propagation: 0, user_namespace: 0 };
    // SAFETY: `path` is NUL-terminated, `attributes` is a live local, and the size passed is its size.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            dir,
            path.as_ptr(),
            how as c_uint,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    done(set).map(drop)
}

fn to_cstring(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}
