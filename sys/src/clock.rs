//! The state of the kernel's clock.

use std::io;

/// Returns whether a time service, such as NTP, keeps the kernel's clock synchronised.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn is_synchronised() -> io::Result<bool> {
    // SAFETY: `timex` consists of integers, so all zeros is a valid value. `modes` is 0: a pure read.
    let mut time: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live local, and without mode bits the call changes no clock.
    match unsafe { libc::adjtimex(&raw mut time) } {
        -1 => Err(io::Error::last_os_error()),
        state => Ok(state != libc::TIME_ERROR),
    }
}
