//! Probes: system calls that a sandbox should be refused. A success or an error other than the
//! expected one shows a hole; none of them changes the machine.

use std::ffi::{c_int, c_long, c_uint};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::done;

/// From `keyctl(2)`.
const KEYCTL_READ: c_int = 11;
/// From `bpf(2)`: finds the next loaded program of any owner.
const BPF_PROG_GET_NEXT_ID: c_int = 11;
/// At least the size of `struct io_uring_params` (120 bytes) and of the `union bpf_attr` prefix used.
const PARAMS_LEN: usize = 160;
/// Maximum size of a file handle (`MAX_HANDLE_SZ`).
const MAX_HANDLE: usize = 128;
/// A vsock port on which the host is unlikely to listen.
const VSOCK_PORT: c_uint = 9999;
/// The bit that selects the x32 ABI in a system call number (`__X32_SYSCALL_BIT`).
#[cfg(target_arch = "x86_64")]
const X32: c_long = 0x4000_0000;

/// A keyring of the process.
#[derive(Clone, Copy, Debug)]
pub enum Keyring {
    Session = -3,
    User = -4,
}

/// Counts the keys in a keyring.
pub fn count_keys(keyring: Keyring) -> io::Result<usize> {
    // SAFETY: with a null buffer of length 0 the kernel returns the length and writes nothing.
    let length =
        unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_READ, keyring as c_int, 0 as c_long, 0 as c_long) };
    Ok(usize::try_from(done(length)?).unwrap_or_default() / size_of::<i32>())
}

/// Creates an `io_uring` and closes it.
pub fn create_io_uring() -> io::Result<()> {
    let mut parameters = [0u64; PARAMS_LEN / 8];
    // SAFETY: the buffer is larger than the `io_uring_params` that the kernel reads and writes.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    into_owned_fd(ring).map(drop)
}

/// Tries to load a kernel module from an invalid descriptor.
pub fn load_invalid_module() -> io::Result<()> {
    // SAFETY: the string is NUL-terminated and static, and descriptor -1 is never valid.
    let loaded = unsafe { libc::syscall(libc::SYS_finit_module, -1, c"".as_ptr(), 0) };
    done(loaded).map(drop)
}

/// Asks for the first BPF program of the kernel. The permission matters, not whether there is one.
pub fn list_bpf_programs() -> io::Result<()> {
    let mut attributes = [0u64; PARAMS_LEN / 8];
    // SAFETY: the kernel accesses the 12 bytes announced, and the buffer is larger.
    let found =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_GET_NEXT_ID, attributes.as_mut_ptr(), 12 as c_uint) };
    done(found).map(drop)
}

/// Calls `reboot(2)` with invalid magic numbers.
pub fn reboot_without_magic() -> io::Result<()> {
    // SAFETY: the call takes no pointers here, and without its magic numbers it has no effect.
    done(unsafe { libc::syscall(libc::SYS_reboot, 0, 0, 0, 0 as c_long) }).map(drop)
}

/// Opens the root directory by file handle instead of by name, a known way out of a mount namespace.
pub fn open_by_handle() -> io::Result<()> {
    /// `struct file_handle`.
    #[repr(C, align(8))]
    struct FileHandle {
        bytes: c_uint,
        kind: c_int,
        handle: [u8; MAX_HANDLE],
    }
    let mut handle = FileHandle { bytes: MAX_HANDLE as c_uint, kind: 0, handle: [0; MAX_HANDLE] };
    let mut mount: c_int = 0;
    // SAFETY: the pointers are to live locals and a NUL-terminated string; `bytes` holds the capacity.
    let named = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            libc::AT_FDCWD,
            c"/".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            0,
        )
    };
    done(named)?;
    let root = std::fs::File::open("/")?;
    // SAFETY: `handle` is a live local that the kernel just filled in and now only reads.
    let opened = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            root.as_raw_fd(),
            &raw mut handle,
            libc::O_RDONLY | libc::O_CLOEXEC,
        )
    };
    into_owned_fd(opened).map(drop)
}

/// Injects a byte into the input of `terminal` (`TIOCSTI`).
pub fn inject_terminal_input(terminal: BorrowedFd<'_>) -> io::Result<()> {
    let letter = b' ';
    // SAFETY: the kernel reads one byte from a live local.
    done(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSTI, &raw const letter) }.into()).map(drop)
}

/// Makes `terminal` the controlling terminal of this process, which must not have one.
pub fn take_terminal(terminal: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the call takes no pointers.
    done(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) }.into()).map(drop)
}

/// Connects to the host of this virtual machine over vsock.
pub fn connect_vsock(patience: Duration) -> io::Result<()> {
    let socket = socket2::Socket::new(socket2::Domain::from(libc::AF_VSOCK), socket2::Type::STREAM, None)?;
    let address = socket2::SockAddr::vsock(libc::VMADDR_CID_HOST, VSOCK_PORT);
    socket.connect_timeout(&address, patience)
}

/// Creates a vsock socket with an x32 system call number, which a seccomp filter may overlook.
#[cfg(target_arch = "x86_64")]
pub fn vsock_by_x32() -> io::Result<()> {
    // SAFETY: the call takes no pointers.
    let made = unsafe { libc::syscall(X32 | libc::SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0) };
    into_owned_fd(made).map(drop)
}

/// Fails with `ENOSYS`: only x86-64 has the x32 ABI.
#[cfg(not(target_arch = "x86_64"))]
pub fn vsock_by_x32() -> io::Result<()> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}

fn into_owned_fd(result: c_long) -> io::Result<OwnedFd> {
    let number = c_int::try_from(done(result)?).map_err(io::Error::other)?;
    // SAFETY: the call succeeded, so the kernel just opened this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
