//! Every `unsafe` block of Sandbar: system calls that neither the standard library, `nix` nor
//! `socket2` wraps safely. Each function is as small as it can be and knows nothing of its callers.

pub mod clock;
pub mod datagrams;
pub mod fd;
pub mod file;
pub mod memory;
pub mod probe;
pub mod process;
pub mod socket;
pub mod splice;

use std::ffi::c_long;
use std::io;

/// The result of a system call that answers a negative number when it fails.
fn done(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
