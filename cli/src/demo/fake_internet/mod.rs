//! The fake internet of the demo. Every address belongs to it, so that everything that leaves a sandbox arrives here
//! and is recorded. Steps check what arrived.

mod names;
mod origin;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use certs::{AuthorityOptions, CertificateAuthority, LeafCache, UnixTime};
use tokio::net::{TcpListener, UdpSocket};

/// Address of the fake internet's resolver.
pub(super) const RESOLVER: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 0, 53)), 53);
/// Metadata address, where clouds hand out the machine's credentials.
pub(super) const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// The first sandbox's memory in the memory service.
pub(super) const MEMORY: &str = "the launch is on Thursday";
/// A name that resolves to a public address at first, and to the metadata address after `rebind`.
pub(super) const REBINDING: &str = "logo.cdn.example";

/// The hosts and their addresses. Every name below `metrics.example` exists too.
const HOSTS: &[(&str, [u8; 4])] = &[
    ("code.example", [93, 184, 216, 10]),
    ("downloads.example", [93, 184, 216, 11]),
    ("evil.example", [93, 184, 216, 66]),
    ("memory.example", [93, 184, 216, 12]),
    ("metrics.example", [93, 184, 216, 67]),
    ("mirror.example", [93, 184, 216, 13]),
    ("model.example", [93, 184, 216, 14]),
    ("paste.example", [93, 184, 216, 68]),
];

/// Handle to the fake internet.
pub(super) struct FakeInternet {
    observed: Arc<ObservedTraffic>,
    /// Root certificate (PEM) of its servers.
    pub(super) root: String,
}

/// Everything that reached the fake internet.
#[derive(Default)]
struct ObservedTraffic {
    connections: Mutex<Vec<ObservedConnection>>,
    queries: Mutex<Vec<String>>,
    /// Bytes of endless downloads so far, by host.
    sent: Mutex<HashMap<String, Arc<AtomicU64>>>,
    /// Set to end endless downloads.
    stop_streaming: AtomicBool,
    /// Set once `REBINDING` resolves to the metadata address.
    rebound: AtomicBool,
}

/// A connection that arrived, and its request.
#[derive(Clone, Debug)]
pub(super) struct ObservedConnection {
    /// The dialled address.
    pub(super) at: SocketAddr,
    pub(super) request: Option<ObservedRequest>,
}

/// A request that arrived.
#[derive(Clone, Debug, Default)]
pub(super) struct ObservedRequest {
    pub(super) host: String,
    pub(super) line: String,
    pub(super) fields: Vec<(String, String)>,
}

impl FakeInternet {
    /// Serves until the runtime ends.
    pub(super) async fn start() -> anyhow::Result<Self> {
        let options = AuthorityOptions { name: "Demo Internet".to_owned(), ..Default::default() };
        let authority = Arc::new(CertificateAuthority::in_memory(&options, UnixTime::now())?);
        let root = authority.anchor_pem();
        let leaves = Arc::new(LeafCache::new(authority)?);
        let observed = Arc::new(ObservedTraffic::default());
        let names = UdpSocket::bind(RESOLVER).await.context("cannot bind the fake resolver")?;
        tokio::spawn(names::serve(names, observed.clone()));
        let everywhere = |port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
        let plain = everywhere(80).await.context("cannot bind the fake hosts")?;
        let secure = everywhere(443).await.context("cannot bind the fake hosts")?;
        tokio::spawn(origin::serve(plain, None, observed.clone()));
        tokio::spawn(origin::serve(secure, Some(leaves), observed.clone()));
        Ok(FakeInternet { observed, root })
    }

    /// The connections after the first `mark`.
    pub(super) fn connections_since(&self, mark: usize) -> Vec<ObservedConnection> {
        self.observed.connections().iter().skip(mark).cloned().collect()
    }

    /// The queried names after the first `mark`.
    pub(super) fn queries_since(&self, mark: usize) -> Vec<String> {
        self.observed.queries().iter().skip(mark).cloned().collect()
    }

    /// Bytes of endless downloads from a host so far.
    pub(super) fn bytes_sent(&self, host: &str) -> u64 {
        self.observed.sent_counter(host).load(Ordering::Relaxed)
    }

    /// Makes `REBINDING` resolve to the metadata address from now on.
    pub(super) fn rebind(&self) {
        self.observed.rebound.store(true, Ordering::Relaxed);
    }

    /// Sets whether endless downloads continue.
    pub(super) fn set_streaming(&self, on: bool) {
        self.observed.stop_streaming.store(!on, Ordering::Relaxed);
    }
}

impl ObservedTraffic {
    fn connections(&self) -> MutexGuard<'_, Vec<ObservedConnection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queries(&self) -> MutexGuard<'_, Vec<String>> {
        self.queries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sent_counter(&self, host: &str) -> Arc<AtomicU64> {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.entry(host.to_owned()).or_default().clone()
    }

    /// Records a connection; returns its number.
    fn add_connection(&self, at: SocketAddr) -> usize {
        let mut connections = self.connections();
        connections.push(ObservedConnection { at, request: None });
        connections.len() - 1
    }

    fn add_request(&self, number: usize, request: ObservedRequest) {
        if let Some(arrival) = self.connections().get_mut(number) {
            arrival.request = Some(request);
        }
    }
}

/// Resolves a name, before or after the rebinding; `None` if there is no such host.
fn lookup_host(name: &str, rebound: bool) -> Option<Ipv4Addr> {
    let found = HOSTS.iter().find(|(host, _)| *host == name);
    match found {
        Some((_, octets)) => Some(Ipv4Addr::from(*octets)),
        None if name == REBINDING && rebound => Some(METADATA),
        None if name == REBINDING => Some(Ipv4Addr::new(93, 184, 216, 15)),
        None if name.ends_with(".metrics.example") => Some(Ipv4Addr::new(93, 184, 216, 67)),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rebinding_name_changes_its_address() {
        for (name, rebound, expected) in [
            ("code.example", false, Some(Ipv4Addr::new(93, 184, 216, 10))),
            ("code.example", true, Some(Ipv4Addr::new(93, 184, 216, 10))),
            (REBINDING, false, Some(Ipv4Addr::new(93, 184, 216, 15))),
            (REBINDING, true, Some(METADATA)),
            ("aGVsbG8.metrics.example", false, Some(Ipv4Addr::new(93, 184, 216, 67))),
            ("nowhere.example", false, None),
        ] {
            assert_eq!(lookup_host(name, rebound), expected, "{name}, {rebound}");
        }
    }
}
