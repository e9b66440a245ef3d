//! The seccomp filter: refuses system calls that bypass the namespaces.
//!
//! It refuses socket families other than IPv4, IPv6, unix and netlink: `AF_VSOCK` reaches the hypervisor, and no
//! network namespace confines it. It refuses `io_uring`, which creates sockets without a `socket` call; typing into
//! the terminal (`TIOCSTI`, `TIOCLINUX`), which the caller's shell would read afterwards; and the caller's keyrings.
//! System calls of another architecture have other numbers, so the filter refuses all of them.
//!
//! A command in a pipeline shares the process group of its caller, and signals to a group ignore pid namespaces. The
//! proxy is in that group, so such a command may not signal it.

use std::io;

use super::child::JobPlacement;
use sys::process as kernel;

#[cfg(target_arch = "x86_64")]
const MACHINE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const MACHINE: u32 = 0xc000_00b7;
/// First call number of the x32 ABI, which has the architecture of x86-64 but other numbers.
#[cfg(target_arch = "x86_64")]
const FOREIGN: u32 = 0x4000_0000;
#[cfg(target_arch = "aarch64")]
const FOREIGN: u32 = u32::MAX;
/// Offsets in `struct seccomp_data`: call number, architecture, low halves of the arguments.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const FIRST: u32 = 16;
const SECOND: u32 = 24;
const FOURTH: u32 = 40;

/// Socket families that stay inside the namespaces or are redirected to the proxy.
const ALLOWED_FAMILIES: [u32; 4] =
    [libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32, libc::AF_NETLINK as u32];
/// Requests that insert input into a terminal.
const TERMINAL_IOCTLS: [u32; 2] = [libc::TIOCSTI as u32, libc::TIOCLINUX as u32];
/// Calls that are refused with any arguments, and the error. On `ENOSYS`, libraries fall back from `io_uring`.
const REFUSED_SYSCALLS: [(libc::c_long, i32); 6] = [
    (libc::SYS_io_uring_setup, libc::ENOSYS),
    (libc::SYS_io_uring_enter, libc::ENOSYS),
    (libc::SYS_io_uring_register, libc::ENOSYS),
    (libc::SYS_add_key, libc::EPERM),
    (libc::SYS_keyctl, libc::EPERM),
    (libc::SYS_request_key, libc::EPERM),
];

/// Installs the filter for this thread and everything it starts. Runs in the command's process, between fork and exec.
pub(super) fn install_filter(place: JobPlacement) -> io::Result<()> {
    kernel::install_seccomp(&build_filter(place))
}

/// Builds the filter. Each block ends in a return, or falls through to the next with the call number loaded.
fn build_filter(place: JobPlacement) -> Vec<libc::sock_filter> {
    let mut steps = vec![load(ARCHITECTURE), skip_if(MACHINE, 1), return_errno(libc::ENOSYS), load(NUMBER)];
    steps.extend([skip_unless_from(FOREIGN, 1), return_errno(libc::ENOSYS)]);
    for (call, error) in REFUSED_SYSCALLS {
        steps.extend([skip_unless(call as u32, 1), return_errno(error)]);
    }
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        let mut block = vec![load(FIRST)];
        for (at, family) in ALLOWED_FAMILIES.iter().enumerate() {
            block.push(skip_if(*family, (ALLOWED_FAMILIES.len() - at) as u8));
        }
        block.extend([return_errno(libc::EAFNOSUPPORT), return_allow()]);
        steps.push(skip_unless(call as u32, block.len() as u8));
        steps.extend(block);
    }
    if place == JobPlacement::Shared {
        // 0 means the caller's own group; groups outside have no number inside.
        let group = [load(FIRST), skip_unless(0, 1), return_errno(libc::EPERM), return_allow()];
        steps.push(skip_unless(libc::SYS_kill as u32, group.len() as u8));
        steps.extend(group);
        let flagged = [load(FOURTH), skip_if(0, 1), return_errno(libc::EPERM), return_allow()];
        steps.push(skip_unless(libc::SYS_pidfd_send_signal as u32, flagged.len() as u8));
        steps.extend(flagged);
    }
    let mut block = vec![load(SECOND)];
    for (at, request) in TERMINAL_IOCTLS.iter().enumerate() {
        block.push(skip_if(*request, (TERMINAL_IOCTLS.len() - at) as u8));
    }
    block.extend([return_allow(), return_errno(libc::EPERM)]);
    steps.push(skip_unless(libc::SYS_ioctl as u32, block.len() as u8));
    steps.extend(block);
    steps.push(return_allow());
    steps
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

fn load(offset: u32) -> libc::sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0)
}

fn skip_if(value: u32, steps: u8) -> libc::sock_filter {
    instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, steps, 0)
}

fn skip_unless(value: u32, steps: u8) -> libc::sock_filter {
    instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, 0, steps)
}

fn skip_unless_from(value: u32, steps: u8) -> libc::sock_filter {
    instruction(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, value, 0, steps)
}

fn return_errno(error: i32) -> libc::sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | error as u32, 0, 0)
}

fn return_allow() -> libc::sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interprets the filter as the kernel would, for the few instructions that it uses.
    fn run_filter(machine: u32, call: libc::c_long, arguments: [u64; 2]) -> u32 {
        run_filter_in(JobPlacement::Background, machine, call, arguments)
    }

    /// Uses the second argument as the fourth, too.
    fn run_filter_in(place: JobPlacement, machine: u32, call: libc::c_long, arguments: [u64; 2]) -> u32 {
        let program = build_filter(place);
        let (mut at, mut loaded) = (0, 0);
        loop {
            let step = program[at];
            at += 1;
            let code = u32::from(step.code);
            if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS {
                loaded = match step.k {
                    NUMBER => call as u32,
                    ARCHITECTURE => machine,
                    FIRST => arguments[0] as u32,
                    SECOND | FOURTH => arguments[1] as u32,
                    other => panic!("offset {other}"),
                };
            } else if code == libc::BPF_RET | libc::BPF_K {
                return step.k;
            } else {
                let more = code == libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
                let taken = if more { loaded >= step.k } else { loaded == step.k };
                at += usize::from(if taken { step.jt } else { step.jf });
            }
        }
    }

    #[test]
    fn a_shared_process_group_cannot_be_signalled() {
        let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let allowed = libc::SECCOMP_RET_ALLOW;
        for (place, call, arguments, wanted) in [
            (JobPlacement::Shared, libc::SYS_kill, [0, 9], refused),
            (JobPlacement::Shared, libc::SYS_kill, [1 << 32, 9], refused),
            (JobPlacement::Shared, libc::SYS_kill, [2, 9], allowed),
            (JobPlacement::Shared, libc::SYS_kill, [u64::MAX, 9], allowed),
            (JobPlacement::Shared, libc::SYS_pidfd_send_signal, [3, 4], refused),
            (JobPlacement::Shared, libc::SYS_pidfd_send_signal, [3, 0], allowed),
            (JobPlacement::Shared, libc::SYS_ioctl, [0, libc::TIOCSTI], refused),
            (JobPlacement::Shared, libc::SYS_read, [0, 0], allowed),
            (JobPlacement::Background, libc::SYS_kill, [0, 9], allowed),
            (JobPlacement::Foreground, libc::SYS_kill, [0, 9], allowed),
        ] {
            let verdict = run_filter_in(place, MACHINE, call, arguments);
            assert_eq!(verdict, wanted, "{place:?} {call} {arguments:?}");
        }
    }

    #[test]
    fn calls_that_bypass_the_namespaces_are_refused_and_no_others() {
        let refused = |error: i32| libc::SECCOMP_RET_ERRNO | error as u32;
        let allowed = libc::SECCOMP_RET_ALLOW;
        for (call, arguments, wanted) in [
            (libc::SYS_read, [0, 0], allowed),
            (libc::SYS_socket, [libc::AF_INET as u64, 0], allowed),
            (libc::SYS_socket, [libc::AF_INET6 as u64, 0], allowed),
            (libc::SYS_socket, [libc::AF_UNIX as u64, 0], allowed),
            (libc::SYS_socket, [libc::AF_NETLINK as u64, 0], allowed),
            (libc::SYS_socketpair, [libc::AF_UNIX as u64, 0], allowed),
            (libc::SYS_socket, [libc::AF_VSOCK as u64, 0], refused(libc::EAFNOSUPPORT)),
            (libc::SYS_socket, [libc::AF_PACKET as u64, 0], refused(libc::EAFNOSUPPORT)),
            (libc::SYS_socket, [libc::AF_ALG as u64, 0], refused(libc::EAFNOSUPPORT)),
            // The kernel uses the low half of the argument, and so does the filter.
            (libc::SYS_socket, [1 << 32 | libc::AF_VSOCK as u64, 0], refused(libc::EAFNOSUPPORT)),
            (libc::SYS_socketpair, [libc::AF_VSOCK as u64, 0], refused(libc::EAFNOSUPPORT)),
            (libc::SYS_io_uring_setup, [0, 0], refused(libc::ENOSYS)),
            (libc::SYS_keyctl, [0, 0], refused(libc::EPERM)),
            (libc::SYS_ioctl, [0, libc::TIOCSTI], refused(libc::EPERM)),
            (libc::SYS_ioctl, [0, 1 << 32 | libc::TIOCSTI], refused(libc::EPERM)),
            (libc::SYS_ioctl, [0, libc::TIOCLINUX], refused(libc::EPERM)),
            (libc::SYS_ioctl, [0, libc::TIOCGWINSZ], allowed),
            (libc::SYS_ptrace, [0, 0], allowed),
        ] {
            assert_eq!(run_filter(MACHINE, call, arguments), wanted, "{call} {arguments:?}");
        }
        assert_eq!(run_filter(0x4000_0003, 102, [0, 0]), refused(libc::ENOSYS), "i386");
        #[cfg(target_arch = "x86_64")]
        assert_eq!(run_filter(MACHINE, 0x4000_0029, [0, 0]), refused(libc::ENOSYS), "x32");
    }
}
