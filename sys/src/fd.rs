//! File descriptors: duplicating inherited ones, receiving them over a socket, memory files, leases.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use tokio::io::unix::AsyncFd;

use crate::done;

/// Lowest number for a duplicate, above the three standard streams.
const LOWEST: RawFd = 3;
/// Maximum number of file descriptors in one message.
pub const RIGHTS: usize = 6;

/// Duplicates an inherited file descriptor, so that a number given twice is not closed twice.
///
/// # Errors
///
/// Returns the kernel's error if the number is not an open file descriptor.
pub fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers and fails with `EBADF` if `number` is not open.
    let duplicated = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, LOWEST) };
    done(duplicated.into())?;
    // SAFETY: the call succeeded, so the kernel just opened this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(duplicated) })
}

/// Returns standard input.
pub fn standard_input() -> BorrowedFd<'static> {
    // SAFETY: the standard library opens descriptor 0 at startup if it is closed, and we never close it.
    unsafe { BorrowedFd::borrow_raw(0) }
}

/// Receives one byte and the file descriptors sent with it (`SCM_RIGHTS`), at most [`RIGHTS`].
///
/// # Errors
///
/// Returns the kernel's error.
pub fn receive_rights(socket: BorrowedFd<'_>) -> io::Result<Vec<OwnedFd>> {
    let mut byte = [0];
    let mut data = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!([RawFd; RIGHTS]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut data, Some(&mut space), flags)?;
    let mut rights = Vec::new();
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = message {
            // SAFETY: the kernel just installed these descriptors, and nothing else owns them.
            rights.extend(numbers.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok(rights)
}

/// Registers a descriptor with tokio's reactor.
///
/// # Errors
///
/// Returns the reactor's error.
///
/// # Panics
///
/// Panics outside a tokio runtime with I/O enabled.
pub fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` keeps its descriptor open while it lives and always returns the same number.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}

/// Creates a file that exists in memory only (`memfd_create(2)`).
///
/// # Errors
///
/// Returns the kernel's error.
pub fn memory_file(name: &CStr) -> io::Result<File> {
    // SAFETY: `name` is NUL-terminated and outlives the call.
    let created = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    done(created.into())?;
    // SAFETY: the call succeeded, so the kernel just opened this descriptor and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(created) })
}

/// Returns whether another process has this file open for writing.
///
/// The kernel grants a read lease only while no process has the file open for writing (`fcntl(2)`,
/// *Leases*), so taking a lease and releasing it answers the question. It grants no lease on files
/// of another user; for those this returns false.
pub fn has_writer(file: &File) -> bool {
    let lease = |kind: libc::c_int| {
        // SAFETY: the descriptor is open for the call, which takes no pointers.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) }
    };
    if lease(libc::F_RDLCK) == 0 {
        lease(libc::F_UNLCK);
        return false;
    }
    io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
}
