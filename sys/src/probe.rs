//! The calls that no safe wrapper offers, each as small as it can be.

use std::ffi::{c_int, c_long, c_uint};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::done;

/// Of `keyctl(2)`.
const KEYCTL_READ: c_int = 11;
/// Of `bpf(2)`: the next program that is loaded, whoever loaded it.
const BPF_PROG_GET_NEXT_ID: c_int = 11;
/// The bytes of `struct io_uring_params` and, more than enough, of `union bpf_attr`.
const PARAMS_LEN: usize = 160;
/// Most bytes of a file's handle (`MAX_HANDLE_SZ`).
const MAX_HANDLE: usize = 128;
/// A port of the host that nobody has a reason to serve.
const VSOCK_PORT: c_uint = 9999;
/// The mark of x32's calls, which share the machine and not the numbers.
#[cfg(target_arch = "x86_64")]
const X32: c_long = 0x4000_0000;

/// A keyring of the process.
#[derive(Clone, Copy, Debug)]
pub enum Keyring {
    Session = -3,
    User = -4,
}

/// How many keys a keyring has.
pub fn count_keys(keyring: Keyring) -> io::Result<usize> {
    // SAFETY: a null buffer of no length asks for the length alone.
    let length = unsafe {
        libc::syscall(libc::SYS_keyctl, KEYCTL_READ, keyring as c_int, 0 as c_long, 0 as c_long)
    };
    Ok(usize::try_from(done(length)?).unwrap_or_default() / size_of::<i32>())
}

/// Makes a ring of `io_uring`, and lets it go.
pub fn create_io_uring() -> io::Result<()> {
    let mut parameters = [0u64; PARAMS_LEN / 8];
    // SAFETY: the kernel reads and writes less than there is.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    into_owned_fd(ring).map(drop)
}

/// Loads a kernel module out of a descriptor that is none.
pub fn load_invalid_module() -> io::Result<()> {
    // SAFETY: the string ends, and lives as long as the program.
    let loaded = unsafe { libc::syscall(libc::SYS_finit_module, -1, c"".as_ptr(), 0) };
    done(loaded).map(drop)
}

/// Asks for the first program of the kernel's; whether there is one is no matter.
pub fn list_bpf_programs() -> io::Result<()> {
    let mut attributes = [0u64; PARAMS_LEN / 8];
    // SAFETY: the kernel reads and writes as many bytes as are said, and there are more.
    let found = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_PROG_GET_NEXT_ID, attributes.as_mut_ptr(), 12 as c_uint)
    };
    done(found).map(drop)
}

/// Restarts the machine, with a magic number that is none.
pub fn reboot_without_magic() -> io::Result<()> {
    // SAFETY: without its magic numbers the call does nothing.
    done(unsafe { libc::syscall(libc::SYS_reboot, 0, 0, 0, 0 as c_long) }).map(drop)
}

/// Opens the root directory by its number instead of its name, as one does to leave a mount behind.
pub fn open_by_handle() -> io::Result<()> {
    #[repr(C, align(8))]
    struct FileHandle {
        bytes: c_uint,
        kind: c_int,
        handle: [u8; MAX_HANDLE],
    }
    let mut handle = FileHandle { bytes: MAX_HANDLE as c_uint, kind: 0, handle: [0; MAX_HANDLE] };
    let mut mount: c_int = 0;
    // SAFETY: the pointers are to live locals and a string that ends; the first field says how much fits.
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
    // SAFETY: as above.
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

/// Types a letter into the terminal that is open as `terminal`.
pub fn inject_terminal_input(terminal: BorrowedFd<'_>) -> io::Result<()> {
    let letter = b' ';
    // SAFETY: the kernel reads one byte, which is there.
    done(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSTI, &raw const letter) }.into())
        .map(drop)
}

/// Makes a terminal this process's own; it must have none.
pub fn take_terminal(terminal: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a call without pointers.
    done(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) }.into()).map(drop)
}

/// Connects to the host of this virtual machine.
pub fn connect_vsock(patience: Duration) -> io::Result<()> {
    let socket =
        socket2::Socket::new(socket2::Domain::from(libc::AF_VSOCK), socket2::Type::STREAM, None)?;
    let address = socket2::SockAddr::vsock(libc::VMADDR_CID_HOST, VSOCK_PORT);
    socket.connect_timeout(&address, patience)
}

/// Makes a socket to the host by a call number of x32.
#[cfg(target_arch = "x86_64")]
pub fn vsock_by_x32() -> io::Result<()> {
    // SAFETY: a call without pointers.
    let made =
        unsafe { libc::syscall(X32 | libc::SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0) };
    into_owned_fd(made).map(drop)
}

/// There are no such numbers here.
#[cfg(not(target_arch = "x86_64"))]
pub fn vsock_by_x32() -> io::Result<()> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}

fn into_owned_fd(result: c_long) -> io::Result<OwnedFd> {
    let number = c_int::try_from(done(result)?).map_err(io::Error::other)?;
    // SAFETY: the call succeeded, so the number is a descriptor of ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
