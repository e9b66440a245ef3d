//! Whom we believe upstream, in the form Pingora reads it: a file, which here is memory of ours.
#![allow(unsafe_code, reason = "a file in memory has no safe wrapper here")]

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};

use anyhow::{Context, bail};
use certs::{HostName, Trust, TrustSource, pem};

/// The roots, kept open as long as anybody may read them.
pub(crate) struct Roots {
    file: File,
}

impl Roots {
    /// Reads the roots of `source`. They are as they were at the start: only a restart changes them.
    pub(crate) fn load(source: TrustSource) -> anyhow::Result<Self> {
        let trust = Trust::load(source).context("cannot read the roots to believe")?;
        let anybody = HostName::parse("roots.invalid").context("a name")?;
        let mut file = in_memory()?;
        for root in trust.towards(anybody).roots() {
            file.write_all(pem::from_certificate(root).as_bytes())?;
        }
        Ok(Roots { file })
    }

    pub(crate) fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.file.as_raw_fd())
    }
}

fn in_memory() -> anyhow::Result<File> {
    // SAFETY: the name is a string that ends, and the call has no other pointers.
    let made = unsafe { libc::memfd_create(c"roots".as_ptr(), libc::MFD_CLOEXEC) };
    if made < 0 {
        bail!("cannot make a file in memory: {}", std::io::Error::last_os_error());
    }
    // SAFETY: a descriptor of ours that nobody else has.
    Ok(unsafe { File::from_raw_fd(made) })
}
