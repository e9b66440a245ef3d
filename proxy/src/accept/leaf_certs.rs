//! Leaf certificates for intercepted connections. Each sandbox has its own cache, so that none can evict another's.

use std::sync::Arc;

use certs::{CertificateAuthority, HostName, UnixTime};
use rules::ids::SandboxId;
use rules::{Host, Reason};
use rustls::ServerConfig;

use crate::budget::ledger::Ledger;
use crate::report::refusal::Refusal;

/// Makes the leaf certificates of every sandbox.
pub(crate) struct LeafCerts {
    authority: Arc<CertificateAuthority>,
    ledger: Arc<Ledger>,
}

impl LeafCerts {
    pub(crate) fn new(authority: Arc<CertificateAuthority>, ledger: Arc<Ledger>) -> Self {
        LeafCerts { authority, ledger }
    }

    /// Returns a TLS server configuration for `host`, as one sandbox sees it.
    pub(crate) fn server_config(&self, id: &SandboxId, host: &Host) -> Result<Arc<ServerConfig>, Refusal> {
        let refused = |error: &dyn std::fmt::Display| Refusal::from(Reason::LeafRefused).with_detail(error);
        let host = HostName::try_from(host.clone()).map_err(|error| refused(&error))?;
        let sandbox = self.ledger.sandbox(id).ok_or(Reason::UnknownSandbox)?;
        let cache = sandbox.leaf_certs(&self.authority).map_err(|error| refused(&error))?;
        let leaf = cache.leaf(&host, UnixTime::now()).map_err(|error| refused(&error))?;
        Ok(leaf.server_config().clone())
    }
}
