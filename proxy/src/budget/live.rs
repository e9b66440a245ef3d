//! The registry of open connections and streams: what each was permitted, its byte count and charges, and the signal
//! that cuts it. A reload uses it to cut connections that have lost their permission (P10).

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use audit::ByteCount;
use rules::{Permit, Reason};
use tokio_util::sync::CancellationToken;

use crate::budget::ledger::Charges;

/// Cuts one connection or stream, and keeps the reason. A cut of its parent, the listener's, cuts it, too.
#[derive(Debug, Default)]
pub(crate) struct CutSignal {
    token: CancellationToken,
    reason: OnceLock<Reason>,
    parent: Option<Arc<CutSignal>>,
}

impl CutSignal {
    pub(crate) fn under(parent: &Arc<CutSignal>) -> Arc<Self> {
        let (token, reason) = (parent.token.child_token(), OnceLock::new());
        Arc::new(CutSignal { token, reason, parent: Some(parent.clone()) })
    }

    /// Cuts the connection. The first reason wins.
    pub(crate) fn trigger(&self, reason: Reason) {
        self.reason.get_or_init(|| reason);
        self.token.cancel();
    }

    /// Waits for the cut, and returns its reason.
    pub(crate) async fn wait(&self) -> Reason {
        self.token.cancelled().await;
        self.reason().unwrap_or(Reason::CutByOperator)
    }

    /// The reason of the cut, if there was one.
    pub(crate) fn reason(&self) -> Option<Reason> {
        let inherited = || self.parent.as_ref().and_then(|parent| parent.reason());
        self.reason.get().copied().or_else(inherited)
    }
}

/// All open connections and streams.
#[derive(Debug, Default)]
pub(crate) struct LiveConnections {
    next: AtomicU64,
    open: Mutex<HashMap<u64, Arc<LiveConnection>>>,
}

/// One open connection or stream.
#[derive(Debug)]
pub(crate) struct LiveConnection {
    pub(crate) id: u64,
    /// As last decided: under the rules in force, with the identity of now.
    permit: Mutex<Permit>,
    /// The address that is dialled, or the first admitted one.
    dialled: Mutex<Option<IpAddr>>,
    pub(crate) since: Instant,
    pub(crate) byte_count: Arc<ByteCount>,
    pub(crate) cut: Arc<CutSignal>,
    pub(crate) charges: Arc<Charges>,
}

/// An entry in the registry, removed on drop.
#[derive(Debug)]
#[must_use = "dropping the entry removes the connection from the registry"]
pub(crate) struct LiveEntry {
    live: Arc<LiveConnections>,
    connection: Arc<LiveConnection>,
}

impl LiveConnections {
    pub(crate) fn register(
        self: &Arc<Self>,
        permit: &Permit,
        dialled: Option<IpAddr>,
        byte_count: Arc<ByteCount>,
        cut: Arc<CutSignal>,
        charges: Arc<Charges>,
    ) -> LiveEntry {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::new(LiveConnection {
            id,
            permit: Mutex::new(permit.clone()),
            dialled: Mutex::new(dialled),
            since: Instant::now(),
            byte_count,
            cut,
            charges,
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

    /// Cuts one connection. Returns false if it is not open.
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
    pub(crate) fn permit(&self) -> Permit {
        self.permit.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Goes on under a permit that newer rules gave for the same attempt.
    pub(crate) fn adopt_permit(&self, fresh: Permit) {
        self.charges.adopt_budgets(&fresh);
        *self.permit.lock().unwrap_or_else(PoisonError::into_inner) = fresh;
    }

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
