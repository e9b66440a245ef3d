//! The calls that no safe wrapper offers, each as small as it can be.

use std::ffi::{CString, c_int, c_long, c_uint};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::unistd::Pid;

use crate::done;

/// Of `open_tree(2)` and `mount_setattr(2)`, whose numbers not every libc has.
const OPEN_TREE_CLONE: c_uint = 1;
const MOVE_MOUNT_F_EMPTY_PATH: c_uint = 4;
const CLOSE_RANGE_CLOEXEC: c_uint = 4;
const MOUNT_ATTR_RDONLY: u64 = 1;
const MOUNT_ATTR_NOSUID: u64 = 2;
const MOUNT_ATTR_NODEV: u64 = 4;
/// Of `keyctl(2)`.
const KEYCTL_JOIN_SESSION_KEYRING: c_int = 1;
/// Of `capset(2)`.
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;
/// More capabilities than any kernel has.
const MAX_CAPABILITIES: c_int = 64;
/// Of `capabilities(7)`: root is nobody special, no capability is kept or raised, and that stays so.
const SECUREBITS: c_int = 0b1110_1111;

/// What a mount loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountRestriction {
    /// Devices and privileged programs in it mean nothing, and it cannot be written.
    Everything,
    /// Devices and privileged programs in it mean nothing.
    Privileges,
    /// It cannot be written.
    Writing,
}

/// Takes a copy of what is mounted at and below `path`, not mounted anywhere yet.
pub fn copy_tree(path: &Path) -> io::Result<OwnedFd> {
    open_tree(path, libc::AT_RECURSIVE as c_uint)
}

/// Takes a copy of a symbolic link itself.
pub fn copy_link(path: &Path) -> io::Result<OwnedFd> {
    open_tree(path, libc::AT_SYMLINK_NOFOLLOW as c_uint)
}

fn open_tree(path: &Path, how: c_uint) -> io::Result<OwnedFd> {
    let path = to_cstring(path)?;
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as c_uint | how;
    // SAFETY: the path is a string that ends, and lives until the call returns.
    let tree = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
    let tree = c_int::try_from(done(tree)?).map_err(io::Error::other)?;
    // SAFETY: the call succeeded, so the number is a descriptor of ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(tree) })
}

/// Mounts a copy at `path`, which is not followed if it is a symbolic link.
pub fn mount_tree(tree: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = to_cstring(path)?;
    // SAFETY: both paths are strings that end, and live until the call returns.
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
    let path = to_cstring(path)?;
    // SAFETY: the pointers are to live locals, and the length is that of the second.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_RECURSIVE as c_uint,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    done(set).map(drop)
}

/// Has every descriptor above the three of a terminal close itself at the next `exec`.
pub fn close_on_exec() -> io::Result<()> {
    // SAFETY: a call without pointers; descriptors stay open until `exec`.
    let closed = unsafe {
        libc::syscall(libc::SYS_close_range, 3 as c_uint, c_uint::MAX, CLOSE_RANGE_CLOEXEC)
    };
    done(closed).map(drop)
}

/// Closes every descriptor above the three of a terminal, but these.
pub fn close_all_but(kept: &[RawFd]) -> io::Result<()> {
    let mut kept: Vec<c_uint> = kept.iter().filter_map(|fd| c_uint::try_from(*fd).ok()).collect();
    kept.sort_unstable();
    let mut first = 3;
    for end in kept.into_iter().chain([c_uint::MAX]) {
        if first < end {
            // SAFETY: a call without pointers; whoever owned these descriptors is in another process.
            let closed =
                unsafe { libc::syscall(libc::SYS_close_range, first, end - 1, 0 as c_uint) };
            done(closed)?;
        }
        first = end.saturating_add(1).max(first);
    }
    Ok(())
}

/// Leaves the keys of the caller's session behind. A kernel without keys has none to leave.
pub fn join_new_keyring() -> io::Result<()> {
    // SAFETY: a null name asks for a keyring without one.
    let joined =
        unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0 as c_long) };
    match done(joined) {
        Err(error) if error.raw_os_error() != Some(libc::ENOSYS) => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Gives up every capability, for good.
pub fn drop_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct CapabilityHeader {
        version: u32,
        pid: c_int,
    }
    for capability in 0..MAX_CAPABILITIES {
        // SAFETY: a call without pointers. One that does not exist is refused, and ends the list.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            break;
        }
    }
    // SAFETY: calls without pointers.
    unsafe {
        let cleared =
            libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as c_long, 0, 0, 0);
        done(cleared.into())?;
        done(libc::prctl(libc::PR_SET_SECUREBITS, SECUREBITS, 0, 0, 0).into())?;
    }
    let header = CapabilityHeader { version: CAPABILITY_VERSION_3, pid: 0 };
    let none = [0u32; 6];
    // SAFETY: both pointers are to live locals of the form that the version stands for.
    let set = unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) };
    done(set).map(drop)
}

/// Binds this thread, and all that comes of it, to a filter of system calls.
pub fn install_seccomp(program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: the kernel reads as many instructions as there are, and writes nothing.
    let set = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    };
    done(set).map(drop)
}

/// What a process and all its children that were waited for have used.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessUsage {
    pub user: std::time::Duration,
    pub system: std::time::Duration,
    /// The most memory that any one process held, in bytes.
    pub peak: u64,
}

/// Waits for the end of a child; its raw status, and what it used.
pub fn wait_child(pid: Pid) -> io::Result<(c_int, ProcessUsage)> {
    let mut status = 0;
    loop {
        // SAFETY: numbers, for which zero is a value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to live locals.
        let ended = unsafe { libc::wait4(pid.as_raw(), &raw mut status, 0, &raw mut usage) };
        match done(ended.into()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(_) => {
                let time = |time: libc::timeval| {
                    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
                    let micros = u64::try_from(time.tv_usec).unwrap_or_default();
                    std::time::Duration::from_micros(seconds * 1_000_000 + micros)
                };
                let peak = u64::try_from(usage.ru_maxrss).unwrap_or_default() * 1024;
                return Ok((
                    status,
                    ProcessUsage { user: time(usage.ru_utime), system: time(usage.ru_stime), peak },
                ));
            }
        }
    }
}

/// A signal, and whether a terminal sent it, which then has told the whole process group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedSignal {
    pub number: i32,
    pub by_terminal: bool,
}

/// Waits for the next of these signals, which are blocked in every thread.
pub fn next_signal(set: &nix::sys::signal::SigSet) -> io::Result<ReceivedSignal> {
    // SAFETY: numbers, for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to things that live until the call returns.
    let number = unsafe { libc::sigwaitinfo(set.as_ref(), &raw mut info) };
    done(number.into())?;
    Ok(ReceivedSignal { number, by_terminal: info.si_code == libc::SI_KERNEL })
}

/// A second process, which goes on here too.
pub fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: there is one thread, so that the second process finds every lock free.
    match unsafe { nix::unistd::fork() }? {
        nix::unistd::ForkResult::Parent { child } => Ok(Some(child)),
        nix::unistd::ForkResult::Child => Ok(None),
    }
}

/// Has `hook` run between fork and exec of `command`. It must not allocate or lock more than a process of one thread may.
///
/// # Errors
///
/// Fails if this process has more than one thread: a lock that another thread holds would stay locked in the child.
pub fn before_exec(
    command: &mut std::process::Command,
    hook: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
) -> io::Result<()> {
    use std::os::unix::process::CommandExt;
    if !is_single_threaded() {
        return Err(io::Error::other("this process has more than one thread"));
    }
    // SAFETY: the process that forks has one thread, so that the child finds every lock free.
    unsafe { command.pre_exec(hook) };
    Ok(())
}

/// Ends this process without a word to what it shares with the one it came from.
pub fn exit(status: c_int) -> ! {
    // SAFETY: it does not return.
    unsafe { libc::_exit(status) }
}

/// Whether this process has one thread, as a second process made of it needs.
pub fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

fn to_cstring(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}
