//! The open connections and streams: who they are, what they were permitted, and how to end each of them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use audit::ByteCount;
use rules::{Permit, Reason};
use tokio_util::sync::CancellationToken;

use crate::budget::ledger::Charges;

/// Ends one connection or stream, and remembers why.
#[derive(Debug, Default)]
pub(crate) struct CutSignal {
    token: CancellationToken,
    why: OnceLock<Reason>,
}

impl CutSignal {
    /// Ends it, for the first reason that is given.
    pub(crate) fn trigger(&self, reason: Reason) {
        self.why.get_or_init(|| reason); // the first reason stands
        self.token.cancel();
    }

    /// Waits until it is to end.
    pub(crate) async fn wait(&self) -> Reason {
        self.token.cancelled().await;
        self.reason().unwrap_or(Reason::CutByOperator)
    }

    /// Why it ended, if it was made to.
    pub(crate) fn reason(&self) -> Option<Reason> {
        self.why.get().copied()
    }
}

/// Everything that is open.
#[derive(Debug, Default)]
pub(crate) struct LiveConnections {
    next: AtomicU64,
    open: Mutex<HashMap<u64, Arc<LiveConnection>>>,
}

/// One open connection or stream.
#[derive(Debug)]
pub(crate) struct LiveConnection {
    pub(crate) id: u64,
    pub(crate) permit: Permit,
    /// The address that is dialled, or the first that may be.
    dialled: Mutex<Option<IpAddr>>,
    pub(crate) since: Instant,
    pub(crate) meter: Arc<ByteCount>,
    pub(crate) cut: Arc<CutSignal>,
    pub(crate) tab: Arc<Charges>,
}

/// Its place among the open ones, given up when this is dropped.
#[derive(Debug)]
#[must_use = "what is not held is not known to be open"]
pub(crate) struct LiveEntry {
    live: Arc<LiveConnections>,
    connection: Arc<LiveConnection>,
}

impl LiveConnections {
    pub(crate) fn register(
        self: &Arc<Self>,
        permit: &Permit,
        dialled: Option<IpAddr>,
        meter: Arc<ByteCount>,
        cut: Arc<CutSignal>,
        tab: Arc<Charges>,
    ) -> LiveEntry {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::new(LiveConnection {
            id,
            permit: permit.clone(),
            dialled: Mutex::new(dialled),
            since: Instant::now(),
            meter,
            cut,
            tab,
        });
        self.lock().insert(id, connection.clone());
        LiveEntry { live: self.clone(), connection }
    }

    pub(crate) fn list(&self) -> Vec<Arc<LiveConnection>> {
        let mut all: Vec<_> = self.lock().values().cloned().collect();
        all.sort_by_key(|open| open.id);
        all
    }

    pub(crate) fn is_open(&self, id: u64) -> bool {
        self.lock().contains_key(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Ends one of them; false if it is not open.
    pub(crate) fn cut(&self, id: u64, reason: Reason) -> bool {
        let open = self.lock().get(&id).cloned();
        open.is_some_and(|open| {
            open.cut.trigger(reason);
            true
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<LiveConnection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LiveConnection {
    pub(crate) fn dialled(&self) -> Option<IpAddr> {
        *self.dialled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LiveEntry {
    pub(crate) fn set_dialled(&self, address: IpAddr) {
        let mut dialled = self.connection.dialled.lock().unwrap_or_else(PoisonError::into_inner);
        *dialled = Some(address);
    }
}

impl Drop for LiveEntry {
    fn drop(&mut self) {
        self.live.lock().remove(&self.connection.id);
    }
}
