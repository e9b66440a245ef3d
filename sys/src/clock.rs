//! The kernel's clock.

use std::io;

/// Whether the kernel knows of a service that keeps its clock synchronised.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn is_synchronised() -> io::Result<bool> {
    // SAFETY: a struct of numbers, for which zero is a value; no mode bit is set, so nothing changes.
    let mut time: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live local.
    match unsafe { libc::adjtimex(&raw mut time) } {
        -1 => Err(io::Error::last_os_error()),
        state => Ok(state != libc::TIME_ERROR),
    }
}
