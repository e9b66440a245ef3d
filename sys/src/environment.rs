//! The environment of this process: values that must not stay in it.
//!
//! The kernel shows the memory that a process got its environment in (`/proc/PID/environ`), whatever the process
//! removes later; a forked child has a copy. So a value is overwritten there.

use std::ffi::{CStr, OsStr, c_char};
use std::io;
use std::os::unix::ffi::OsStrExt;

use crate::process::is_single_threaded;

unsafe extern "C" {
    /// From `environ(7)`: pointers to `NAME=VALUE`, and a null pointer.
    static mut environ: *mut *mut c_char;
}

/// Removes a variable and overwrites its value with zeros.
///
/// # Errors
///
/// Fails if the process has more than one thread: another could be reading the environment.
pub fn erase(name: &OsStr) -> io::Result<()> {
    demand_one_thread()?;
    let prefix = [name.as_bytes(), b"="].concat();
    // SAFETY: no other thread exists, so nobody changes or reads the environment meanwhile. The list ends with a null
    // pointer, each of its strings is NUL-terminated, and only bytes before the NUL are written.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            let length = CStr::from_ptr(*entry).to_bytes().len();
            if CStr::from_ptr(*entry).to_bytes().starts_with(&prefix) {
                for at in prefix.len()..length {
                    (*entry).add(at).write_volatile(0);
                }
            }
            entry = entry.add(1);
        }
        std::env::remove_var(name);
    }
    Ok(())
}

/// Sets a variable of this process.
///
/// # Errors
///
/// Fails if the process has more than one thread: another could be reading the environment.
pub fn set(name: &OsStr, value: &OsStr) -> io::Result<()> {
    demand_one_thread()?;
    // SAFETY: no other thread exists, so nobody reads the environment meanwhile.
    unsafe { std::env::set_var(name, value) };
    Ok(())
}

fn demand_one_thread() -> io::Result<()> {
    match is_single_threaded() {
        true => Ok(()),
        false => Err(io::Error::other("the environment can change only before the first thread is started")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_keeps_its_environment() {
        // A test runs in a thread of its own.
        let before: Vec<_> = std::env::vars_os().collect();
        assert!(erase(OsStr::new("PATH")).is_err() && set(OsStr::new("PATH"), OsStr::new("x")).is_err());
        assert_eq!(std::env::vars_os().collect::<Vec<_>>(), before);
    }
}
