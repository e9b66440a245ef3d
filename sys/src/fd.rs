//! File descriptors: inherited, passed over a socket, in memory, leased.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use tokio::io::unix::AsyncFd;

use crate::done;

/// The lowest number of a duplicate: below it are the three standard streams.
const LOWEST: RawFd = 3;
/// Most file descriptors that one message carries.
pub const RIGHTS: usize = 6;

/// Duplicates a file descriptor that this process inherited, so that one named twice is not closed twice.
///
/// # Errors
///
/// Returns the kernel's error if the number is not an open file descriptor.
pub fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the number is only duplicated; the result is a descriptor of ours alone, or an error.
    let fresh = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, LOWEST) };
    done(fresh.into())?;
    // SAFETY: the call succeeded, so the number is a descriptor of ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fresh) })
}

/// Standard input, which is open as long as the process lives.
pub fn standard_input() -> BorrowedFd<'static> {
    // SAFETY: the standard library opens descriptor 0 at start if it is closed, and we never close it.
    unsafe { BorrowedFd::borrow_raw(0) }
}

/// Receives the file descriptors that came with one byte (`SCM_RIGHTS`), at most [`RIGHTS`].
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
            // SAFETY: the kernel has just made these descriptors, for us alone.
            rights.extend(numbers.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok(rights)
}

/// Registers a descriptor with tokio's reactor.
///
/// # Errors
///
/// Returns the error of the reactor.
///
/// # Panics
///
/// Panics outside a tokio runtime with I/O enabled.
pub fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` keeps its descriptor open as long as it lives, and gives out no other.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}

/// Creates a file that exists in memory only (`memfd_create(2)`).
///
/// # Errors
///
/// Returns the kernel's error.
pub fn memory_file(name: &CStr) -> io::Result<File> {
    // SAFETY: the name is a string that ends, and the call has no other pointers.
    let made = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    done(made.into())?;
    // SAFETY: the call succeeded, so the number is a descriptor of ours alone.
    Ok(unsafe { File::from_raw_fd(made) })
}

/// Whether another process has this file open for writing.
///
/// The kernel grants a read lease only while nobody has the file open for writing (fcntl(2), *Leases*), so asking for one
/// and giving it back answers the question. It grants none on files of another user; for those the answer is no.
pub fn has_writer(file: &File) -> bool {
    let lease = |kind: libc::c_int| {
        // SAFETY: the descriptor is open, and a lease is a number.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) }
    };
    if lease(libc::F_RDLCK) == 0 {
        lease(libc::F_UNLCK);
        return false;
    }
    io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
}
