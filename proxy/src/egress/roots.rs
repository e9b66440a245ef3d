//! The CA certificates trusted upstream, as the file that Pingora reads: an in-memory one.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

use anyhow::Context;
use certs::{HostName, TrustSource, TrustStore, pem};

/// The trusted roots. The file exists as long as this is alive.
pub(crate) struct UpstreamRoots {
    file: File,
}

impl UpstreamRoots {
    /// Reads the roots of `source`. Later changes need a restart.
    pub(crate) fn load(source: TrustSource) -> anyhow::Result<Self> {
        let trust = TrustStore::load(source).context("cannot read the CA certificates to trust")?;
        let any_host = HostName::parse("roots.invalid").context("an invalid placeholder name")?;
        let mut file = sys::fd::memory_file(c"roots").context("cannot create a file in memory")?;
        for root in trust.peer_for(any_host).roots() {
            file.write_all(pem::encode_certificate(root).as_bytes())?;
        }
        Ok(UpstreamRoots { file })
    }

    pub(crate) fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.file.as_raw_fd())
    }
}
