//! What the proxy keeps for one sandbox: its account and the writing of it, its leaf certificates, and what the
//! inspection remembers.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use certs::{CertificateAuthority, LeafCache};
use sys::worker::Worker;
use tokio::sync::watch;
use tokio::time::Instant;

use super::account::{AccountFile, SandboxAccount};
use super::ledger_time;
use crate::inspect::SandboxSignals;
use crate::state_file::{Durability, write_atomic};

/// What the proxy keeps for one sandbox: dropped when the sandbox has left the configuration and its connections are
/// closed.
#[derive(Debug)]
pub(crate) struct SandboxState {
    pub(super) account: Mutex<SandboxAccount>,
    /// Whether the last write of the account succeeded; changes with every write.
    pub(super) written: watch::Sender<bool>,
    pub(super) leaf_certs: OnceLock<LeafCache>,
    /// What the inspection remembers.
    pub(crate) signals: Arc<SandboxSignals>,
}

impl SandboxState {
    pub(super) fn new(mut account: SandboxAccount, now: u64, signals: SandboxSignals) -> Self {
        account.restore(now);
        let (account, leaf_certs) = (Mutex::new(account), OnceLock::new());
        SandboxState { account, written: watch::channel(true).0, leaf_certs, signals: Arc::new(signals) }
    }

    /// Returns the cache of leaf certificates, made at its first use.
    pub(crate) fn leaf_certs(
        &self,
        authority: &Arc<CertificateAuthority>,
    ) -> Result<&LeafCache, rustls::Error> {
        if let Some(cache) = self.leaf_certs.get() {
            return Ok(cache);
        }
        let cache = LeafCache::new(authority.clone())?;
        Ok(self.leaf_certs.get_or_init(|| cache))
    }

    /// Has the account written, unless it waits for that already.
    pub(super) fn request_write(self: &Arc<Self>, state_files: &Worker, begun: (u64, Instant)) {
        if std::mem::replace(&mut sys::lock(&self.account).is_queued, true) {
            return;
        }
        let state = self.clone();
        if state_files.post(move || state.write(ledger_time(begun))).is_err() {
            sys::lock(&self.account).is_queued = false;
            self.written.send_replace(false);
        }
    }

    /// Writes the account with a new allowance, and tells those who wait. Holds no lock while it writes.
    fn write(&self, now: u64) {
        let mut account = sys::lock(&self.account);
        let (path, content) = (account.path.clone(), account.begin_write(now));
        drop(account);
        let written = write_account(&path, &content);
        match &written {
            Ok(()) => sys::lock(&self.account).finish_write(&content),
            Err(error) if *self.written.borrow() => {
                tracing::warn!(%error, path = %path.display(), "cannot write budget usage");
            }
            Err(_) => {}
        }
        self.written.send_replace(written.is_ok());
    }

    /// Writes the exact usage without an allowance, unless that is written.
    pub(super) fn write_exact(&self, now: u64) -> std::io::Result<()> {
        let mut account = sys::lock(&self.account);
        let (path, Some(content)) = (account.path.clone(), account.finalize(now)) else { return Ok(()) };
        drop(account);
        write_account(&path, &content).inspect_err(|_| sys::lock(&self.account).mark_changed())
    }
}

fn write_account(path: &Path, content: &AccountFile) -> std::io::Result<()> {
    write_atomic(path, content, Durability::Process)
}
