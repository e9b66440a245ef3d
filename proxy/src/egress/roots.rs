//! Whom we believe upstream, in the form Pingora reads it: a file, which here is memory of ours.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

use anyhow::Context;
use certs::{HostName, TrustSource, TrustStore, pem};

/// The roots, kept open as long as anybody may read them.
pub(crate) struct UpstreamRoots {
    file: File,
}

impl UpstreamRoots {
    /// Reads the roots of `source`. They are as they were at the start: only a restart changes them.
    pub(crate) fn load(source: TrustSource) -> anyhow::Result<Self> {
        let trust = TrustStore::load(source).context("cannot read the roots to believe")?;
        let anybody = HostName::parse("roots.invalid").context("a name")?;
        let mut file = sys::fd::memory_file(c"roots").context("cannot create a file in memory")?;
        for root in trust.peer_for(anybody).roots() {
            file.write_all(pem::encode_certificate(root).as_bytes())?;
        }
        Ok(UpstreamRoots { file })
    }

    pub(crate) fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.file.as_raw_fd())
    }
}
