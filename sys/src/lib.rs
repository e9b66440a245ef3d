//! Every `unsafe` block of Sandbar: system calls that neither the standard library, `nix` nor
//! `socket2` wraps safely, and what every crate needs: [`mod@file`], [`worker`] and [`lock`]. Functions are small
//! and know nothing about their callers.

pub mod clock;
pub mod datagrams;
pub mod environment;
pub mod fd;
pub mod file;
pub mod machine;
pub mod memory;
pub mod mount;
pub mod probe;
pub mod process;
pub mod socket;
pub mod splice;
pub mod worker;

use std::ffi::c_long;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, even if a thread panicked while holding it.
///
/// Only for data that every holder changes in one step, so that a panic leaves it whole.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns the return value of a system call into a result; a negative value means that `errno` is set.
fn done(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
