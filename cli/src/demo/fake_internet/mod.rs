//! The little world of the story: every address there is belongs to it, so that whatever leaves a sandbox
//! arrives here and is written down. Steps are judged by what arrived.

mod names;
mod origin;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use certs::{AuthorityOptions, CertificateAuthority, LeafCache, UnixTime};
use tokio::net::{TcpListener, UdpSocket};

/// Where the world is asked for names.
pub(super) const RESOLVER: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 0, 53)), 53);
/// Where clouds answer whoever asks with the keys of the machine.
pub(super) const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// What the memory service keeps for the first sandbox.
pub(super) const MEMORY: &str = "the launch is on Thursday";
/// A name that leads to a public address until it is looked at, and then to the metadata address.
pub(super) const REBINDING: &str = "logo.cdn.example";

/// The hosts, and where they are. Whatever is below `metrics.example` exists too.
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

/// The world, as the story sees it.
pub(super) struct FakeInternet {
    seen: Arc<ObservedTraffic>,
    /// The root that signs its certificates.
    pub(super) root: String,
}

/// Everything that happened in the world.
#[derive(Default)]
struct ObservedTraffic {
    arrivals: Mutex<Vec<ObservedConnection>>,
    asked: Mutex<Vec<String>>,
    /// Bytes of endless downloads so far, by host.
    sent: Mutex<HashMap<String, Arc<AtomicU64>>>,
    /// Set when endless downloads shall end after all.
    enough: AtomicBool,
    /// Set when the name that rebinds has done so.
    rebound: AtomicBool,
}

/// A connection that arrived, and what was asked on it.
#[derive(Clone, Debug)]
pub(super) struct ObservedConnection {
    /// The address that was dialled.
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
        let options = AuthorityOptions { name: "Little World".to_owned(), ..Default::default() };
        let authority = Arc::new(CertificateAuthority::in_memory(&options, UnixTime::now())?);
        let root = authority.anchor_pem();
        let leaves = Arc::new(LeafCache::new(authority)?);
        let seen = Arc::new(ObservedTraffic::default());
        let names = UdpSocket::bind(RESOLVER).await.context("no place for the world's names")?;
        tokio::spawn(names::serve(names, seen.clone()));
        let everywhere = |port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
        let plain = everywhere(80).await.context("no place for the world's hosts")?;
        let secure = everywhere(443).await.context("no place for the world's hosts")?;
        tokio::spawn(origin::serve(plain, None, seen.clone()));
        tokio::spawn(origin::serve(secure, Some(leaves), seen.clone()));
        Ok(FakeInternet { seen, root })
    }

    /// The connections that arrived, since the first `mark` of them.
    pub(super) fn connections_since(&self, mark: usize) -> Vec<ObservedConnection> {
        self.seen.connections().iter().skip(mark).cloned().collect()
    }

    /// The names that were asked for, since the first `mark` of them.
    pub(super) fn queries_since(&self, mark: usize) -> Vec<String> {
        self.seen.queries().iter().skip(mark).cloned().collect()
    }

    /// Bytes of endless downloads from a host so far.
    pub(super) fn bytes_sent(&self, host: &str) -> u64 {
        self.seen.sent_counter(host).load(Ordering::Relaxed)
    }

    /// From now on the name that rebinds leads elsewhere.
    pub(super) fn rebind(&self) {
        self.seen.rebound.store(true, Ordering::Relaxed);
    }

    /// Whether endless downloads go on.
    pub(super) fn set_streaming(&self, on: bool) {
        self.seen.enough.store(!on, Ordering::Relaxed);
    }
}

impl ObservedTraffic {
    fn connections(&self) -> MutexGuard<'_, Vec<ObservedConnection>> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queries(&self) -> MutexGuard<'_, Vec<String>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sent_counter(&self, host: &str) -> Arc<AtomicU64> {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.entry(host.to_owned()).or_default().clone()
    }

    /// Writes a connection down; its number.
    fn add_connection(&self, at: SocketAddr) -> usize {
        let mut arrivals = self.connections();
        arrivals.push(ObservedConnection { at, request: None });
        arrivals.len() - 1
    }

    fn add_request(&self, number: usize, request: ObservedRequest) {
        if let Some(arrival) = self.connections().get_mut(number) {
            arrival.request = Some(request);
        }
    }
}

/// Where a name leads, before or after the one that rebinds has done so; none if there is no such host.
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
    fn a_name_that_rebinds_leads_elsewhere_afterwards() {
        for (name, rebound, wanted) in [
            ("code.example", false, Some(Ipv4Addr::new(93, 184, 216, 10))),
            ("code.example", true, Some(Ipv4Addr::new(93, 184, 216, 10))),
            (REBINDING, false, Some(Ipv4Addr::new(93, 184, 216, 15))),
            (REBINDING, true, Some(METADATA)),
            ("aGVsbG8.metrics.example", false, Some(Ipv4Addr::new(93, 184, 216, 67))),
            ("nowhere.example", false, None),
        ] {
            assert_eq!(lookup_host(name, rebound), wanted, "{name}, {rebound}");
        }
    }
}
