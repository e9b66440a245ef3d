//! Leaf certificates for intercepted connections. Each sandbox has its own cache, so that none can evict another's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use certs::{CertificateAuthority, HostName, LeafCache, UnixTime};
use rules::ids::SandboxId;
use rules::{Host, Reason};
use rustls::ServerConfig;

use crate::report::refusal::Refusal;

/// The leaf certificates of every sandbox.
pub(crate) struct LeafCerts {
    authority: Arc<CertificateAuthority>,
    by_sandbox: Mutex<HashMap<SandboxId, Arc<LeafCache>>>,
}

impl LeafCerts {
    pub(crate) fn new(authority: Arc<CertificateAuthority>) -> Self {
        LeafCerts { authority, by_sandbox: Mutex::default() }
    }

    /// Returns a TLS server configuration for `host`, as one sandbox sees it.
    pub(crate) fn server_config(
        &self,
        sandbox: &SandboxId,
        host: &Host,
    ) -> Result<Arc<ServerConfig>, Refusal> {
        let refused = |error: &dyn std::fmt::Display| Refusal::from(Reason::LeafRefused).with_detail(error);
        let host = HostName::try_from(host.clone()).map_err(|error| refused(&error))?;
        let cache = self.sandbox_cache(sandbox).map_err(|error| refused(&error))?;
        let leaf = cache.leaf(&host, UnixTime::now()).map_err(|error| refused(&error))?;
        Ok(leaf.server_config().clone())
    }

    /// Counts the cached certificates of all sandboxes.
    pub(crate) fn len(&self) -> usize {
        let caches = self.by_sandbox.lock().unwrap_or_else(PoisonError::into_inner);
        caches.values().map(|cache| cache.len()).sum()
    }

    fn sandbox_cache(&self, sandbox: &SandboxId) -> Result<Arc<LeafCache>, rustls::Error> {
        let mut caches = self.by_sandbox.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cache) = caches.get(sandbox) {
            return Ok(cache.clone());
        }
        let cache = Arc::new(LeafCache::new(self.authority.clone())?);
        caches.insert(sandbox.clone(), cache.clone());
        Ok(cache)
    }
}
