//! Processes: descriptors across `exec`, capabilities, seccomp, `fork`, `wait4` and signals.

use std::ffi::{c_int, c_long, c_uint};
use std::io;
use std::os::fd::RawFd;

use nix::unistd::Pid;

use crate::done;

/// From <linux/close_range.h>; not every libc has it.
const CLOSE_RANGE_CLOEXEC: c_uint = 4;
/// From `keyctl(2)`.
const KEYCTL_JOIN_SESSION_KEYRING: c_int = 1;
/// From `capset(2)`.
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;
/// Upper bound on capability numbers; no kernel has as many.
const MAX_CAPABILITIES: c_int = 64;
/// `capabilities(7)`: `NOROOT`, `NO_SETUID_FIXUP` and `NO_CAP_AMBIENT_RAISE`, all locked, and
/// `KEEP_CAPS` cleared and locked. Uid 0 gets no capabilities, and nothing can undo that.
const SECUREBITS: c_int = 0b1110_1111;

/// Sets close-on-exec on every descriptor above standard error.
pub fn close_on_exec() -> io::Result<()> {
    // SAFETY: the call takes no pointers and closes nothing before `exec`, so no owner is affected.
    let closed =
        unsafe { libc::syscall(libc::SYS_close_range, 3 as c_uint, c_uint::MAX, CLOSE_RANGE_CLOEXEC) };
    done(closed).map(drop)
}

/// Closes every descriptor above standard error except those in `keep`. For a forked child only.
pub fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<c_uint> = keep.iter().filter_map(|fd| c_uint::try_from(*fd).ok()).collect();
    keep.sort_unstable();
    let mut first = 3;
    for end in keep.into_iter().chain([c_uint::MAX]) {
        if first < end {
            // SAFETY: the call takes no pointers. This process is a forked child: the values that own
            // these descriptors run in the parent, whose descriptors stay open.
            let closed = unsafe { libc::syscall(libc::SYS_close_range, first, end - 1, 0 as c_uint) };
            done(closed)?;
        }
        first = end.saturating_add(1).max(first);
    }
    Ok(())
}

/// Joins a new, empty session keyring, which drops access to the keys of the old one.
///
/// Succeeds on a kernel without keyrings (`ENOSYS`).
pub fn join_new_keyring() -> io::Result<()> {
    // SAFETY: a null name is valid and asks for an anonymous keyring.
    let joined = unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0 as c_long) };
    match done(joined) {
        Err(error) if error.raw_os_error() != Some(libc::ENOSYS) => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Drops every capability from every set, irrevocably.
pub fn drop_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct CapabilityHeader {
        version: u32,
        pid: c_int,
    }
    for capability in 0..MAX_CAPABILITIES {
        // SAFETY: the call takes no pointers. It fails for the first number the kernel does not know.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            break;
        }
    }
    // SAFETY: neither call takes a pointer.
    unsafe {
        let cleared = libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as c_long, 0, 0, 0);
        done(cleared.into())?;
        done(libc::prctl(libc::PR_SET_SECUREBITS, SECUREBITS, 0, 0, 0).into())?;
    }
    let header = CapabilityHeader { version: CAPABILITY_VERSION_3, pid: 0 };
    let none = [0u32; 6];
    // SAFETY: both pointers are to live locals; version 3 reads a header and three pairs of `u32`.
    let set = unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) };
    done(set).map(drop)
}

/// Installs a seccomp filter on this thread and every thread and process it creates.
pub fn install_seccomp(program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: `program` is a live local with the true instruction count; the kernel only reads it.
    let set =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    done(set).map(drop)
}

/// Resources used by a process and by those of its children that it waited for.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessUsage {
    pub user: std::time::Duration,
    pub system: std::time::Duration,
    /// Peak resident set size of the largest process, in bytes.
    pub peak: u64,
}

/// Waits for a child to exit and returns its raw status and its resource usage.
pub fn wait_child(pid: Pid) -> io::Result<(c_int, ProcessUsage)> {
    let mut status = 0;
    loop {
        // SAFETY: `rusage` consists of integers, so all zeros is a valid value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to live locals of the types the call writes.
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

/// A signal, and whether a terminal sent it.
///
/// A terminal signals its whole foreground process group, so such a signal needs no forwarding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedSignal {
    pub number: i32,
    pub by_terminal: bool,
}

/// Waits for the next signal of `set`. The caller has blocked these signals in every thread.
pub fn next_signal(set: &nix::sys::signal::SigSet) -> io::Result<ReceivedSignal> {
    // SAFETY: `siginfo_t` consists of integers and pointers, so all zeros is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live values, and the kernel writes one `siginfo_t`.
    let number = unsafe { libc::sigwaitinfo(set.as_ref(), &raw mut info) };
    done(number.into())?;
    Ok(ReceivedSignal { number, by_terminal: info.si_code == libc::SI_KERNEL })
}

/// Forks. Returns the child's pid in the parent and `None` in the child.
///
/// The caller has checked [`is_single_threaded`].
pub fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: with a single thread, no lock can be held by a thread that the child lacks.
    match unsafe { nix::unistd::fork() }? {
        nix::unistd::ForkResult::Parent { child } => Ok(Some(child)),
        nix::unistd::ForkResult::Child => Ok(None),
    }
}

/// Runs `hook` in the child between `fork` and `exec` of `command`.
///
/// # Errors
///
/// Fails if this process has more than one thread: the child would never see a lock released that
/// another thread holds at the time of the fork, such as the allocator's.
pub fn before_exec(
    command: &mut std::process::Command,
    hook: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
) -> io::Result<()> {
    use std::os::unix::process::CommandExt;
    if !is_single_threaded() {
        return Err(io::Error::other("this process has more than one thread"));
    }
    // SAFETY: this process has one thread, so in the child no lock is held and `hook` may allocate.
    unsafe { command.pre_exec(hook) };
    Ok(())
}

/// Keeps the memory of this process from other processes of its user and from core dumps: clears the dumpable flag
/// (`prctl(2)`) and sets `RLIMIT_CORE` to 0, which children inherit.
///
/// # Errors
///
/// Returns the error of the system call.
pub fn hide_memory() -> io::Result<()> {
    // SAFETY: the call takes no pointers.
    done(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }.into())?;
    Ok(nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0)?)
}

/// Kills every process of the group that `leader` leads. One without processes is none.
pub fn kill_group(leader: u32) {
    let Ok(leader) = i32::try_from(leader) else { return };
    if leader > 1 {
        let killed = nix::sys::signal::killpg(Pid::from_raw(leader), nix::sys::signal::Signal::SIGKILL);
        killed.unwrap_or_default(); // fails if there is none
    }
}

/// Exits a forked child at once (`_exit(2)`): no destructors, no exit handlers, and no flush of
/// buffers it shares with its parent.
pub fn exit(status: c_int) -> ! {
    // SAFETY: the call takes no pointers and does not return.
    unsafe { libc::_exit(status) }
}

/// Returns whether this process has exactly one thread, which [`fork`] and [`before_exec`] need.
pub fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_group_is_killed_with_its_leader_and_nothing_else() {
        let start = || Command::new("sh").args(["-c", "sleep 600 & wait"]).process_group(0).spawn().unwrap();
        let (mut ended, mut other) = (start(), start());
        kill_group(ended.id());
        assert!(!ended.wait().unwrap().success());
        assert!(other.try_wait().unwrap().is_none());
        kill_group(other.id());
        other.wait().unwrap();
        kill_group(1); // would be everything
        kill_group(0); // would be the group of this test
    }

    #[test]
    fn p11_hidden_memory_is_neither_dumped_nor_read_by_others() {
        hide_memory().unwrap();
        assert!(!nix::sys::prctl::get_dumpable().unwrap());
        let (soft, hard) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_CORE).unwrap();
        assert_eq!((soft, hard), (0, 0));
    }
}
