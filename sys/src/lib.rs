//! Every `unsafe` block of Sandbar: system calls that neither the standard library, `nix` nor
//! `socket2` wraps safely. Functions are small and know nothing about their callers.

pub mod clock;
pub mod datagrams;
pub mod fd;
pub mod memory;
pub mod mount;
pub mod probe;
pub mod process;
pub mod socket;
pub mod splice;

use std::ffi::c_long;
use std::io;

/// Turns the return value of a system call into a result; a negative value means that `errno` is set.
fn done(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
