//! The DNS listeners: UDP workers that share a port, and TCP, over IPv4 and IPv6. The channel of a query comes from
//! what the kernel reports about the packet, never from its content (P2).

mod local_addresses;
mod tcp;
mod udp;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rules::Channel;
use rules::configuration::Attribution;
use rules::ids::SandboxId;
use socket2::{Socket, Type};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use crate::filter::DnsFilter;
use crate::limits::{DRAIN_TIMEOUT, WAITING};
use crate::query::PendingQuery;
use crate::sandbox_quota::{QuotaExhausted, QuotaSlot};

/// A listener's address, and how its queries are attributed to sandboxes.
#[derive(Clone, Debug)]
pub struct DnsListener {
    pub bind: SocketAddr,
    pub whose: DnsAttribution,
}

/// How a query is attributed to a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsAttribution {
    Dedicated(SandboxId),
    Interface,
    Mark,
    SourceAddress,
}

impl DnsAttribution {
    /// Converts the attribution of a configured listener; `None` for unix sockets, which DNS does not use.
    pub fn from_rules(whose: &Attribution) -> Option<Self> {
        match whose {
            Attribution::Dedicated(id) => Some(DnsAttribution::Dedicated(id.clone())),
            Attribution::Interface => Some(DnsAttribution::Interface),
            Attribution::Mark => Some(DnsAttribution::Mark),
            Attribution::SourceAddress => Some(DnsAttribution::SourceAddress),
            Attribution::Unix => None,
        }
    }
}

/// Why a listener could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on {address}: {source}; free the address or change `bind` of the listener")]
    Bind { address: SocketAddr, source: io::Error },
    #[error(
        "cannot serve DNS on a passed socket: {source}; it must be a UDP or TCP socket bound to an address"
    )]
    Given { source: io::Error },
    #[error(
        "the kernel does not report the {what} of packets on {address}: {source}; use Linux 5.19 or newer, or another `identify`"
    )]
    Kernel { address: SocketAddr, what: &'static str, source: io::Error },
}

/// Opens listeners that share their limits.
#[derive(Clone)]
pub struct DnsFront {
    filter: Arc<DnsFilter>,
    connections: tcp::TcpConnectionLimit,
    workers: usize,
}

impl DnsFront {
    /// Listeners get `workers` UDP sockets each, or more if they serve several sandboxes.
    pub fn new(filter: Arc<DnsFilter>, workers: usize) -> Self {
        DnsFront { filter, connections: tcp::TcpConnectionLimit::new(), workers }
    }

    /// Opens listeners.
    ///
    /// # Errors
    ///
    /// Returns [`ListenError`] if one cannot be opened; none is served then.
    pub fn open(&self, listeners: &[DnsListener]) -> Result<DnsServer, ListenError> {
        let mut server = self.empty_server();
        for listener in listeners {
            let acceptor = tcp::TcpAcceptor::open(listener, self.connections.clone())?;
            let bind = acceptor.address(); // the kernel chose a port for port 0: UDP uses the same
            let listener = DnsListener { bind, ..listener.clone() };
            server.udp.extend(udp::UdpWorker::open_all(&listener, self.workers)?);
            server.tcp.push(acceptor);
        }
        Ok(server)
    }

    /// Takes a UDP or TCP socket that another process has opened, possibly in another network namespace.
    ///
    /// # Errors
    ///
    /// Returns [`ListenError`] if it is not a bound IP socket.
    pub fn adopt(&self, socket: Socket, whose: DnsAttribution) -> Result<DnsServer, ListenError> {
        let given = |source| ListenError::Given { source };
        let address = socket.local_addr().map_err(given)?;
        let Some(bind) = address.as_socket() else {
            return Err(given(io::ErrorKind::Unsupported.into()));
        };
        let listener = DnsListener { bind, whose };
        socket.set_nonblocking(true).map_err(given)?;
        let mut server = self.empty_server();
        match socket.r#type().map_err(given)? {
            Type::DGRAM => server.udp.push(udp::UdpWorker::from_socket(&listener, socket.into())?),
            _ => server.tcp.push(tcp::TcpAcceptor::from_socket(
                &listener,
                socket.into(),
                self.connections.clone(),
            )?),
        }
        Ok(server)
    }

    fn empty_server(&self) -> DnsServer {
        let (filter, waiting) = (self.filter.clone(), Arc::new(Semaphore::new(WAITING)));
        DnsServer { filter, udp: Vec::new(), tcp: Vec::new(), waiting }
    }
}

/// Bound listeners, not serving yet.
pub struct DnsServer {
    filter: Arc<DnsFilter>,
    udp: Vec<udp::UdpWorker>,
    tcp: Vec<tcp::TcpAcceptor>,
    /// Each query that waits for a resolver holds one permit.
    waiting: Arc<Semaphore>,
}

impl DnsServer {
    /// Returns the bound addresses, in the order of the listeners; those of TCP if there are any.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let tcp: Vec<SocketAddr> = self.tcp.iter().map(tcp::TcpAcceptor::address).collect();
        if tcp.is_empty() { self.udp.iter().map(udp::UdpWorker::address).collect() } else { tcp }
    }

    /// Serves until `stop` is true, then waits for queries in flight.
    ///
    /// # Errors
    ///
    /// Returns the error of a listener that failed. All listeners are closed then, so clients get an error at once.
    pub async fn run(self, stop: watch::Receiver<bool>) -> io::Result<()> {
        let mut tasks = JoinSet::new();
        for worker in self.udp {
            let (filter, waiting) = (self.filter.clone(), self.waiting.clone());
            tasks.spawn(worker.serve(filter, waiting, stop.clone()));
        }
        for acceptor in self.tcp {
            let (filter, waiting) = (self.filter.clone(), self.waiting.clone());
            tasks.spawn(acceptor.serve(filter, waiting, stop.clone()));
        }
        let ended = wait_for_all(&mut tasks).await;
        if ended.is_err() {
            tasks.shutdown().await; // all sockets are closed when this returns
            return ended;
        }
        let waiting = self.waiting.acquire_many(WAITING as u32);
        drop(tokio::time::timeout(DRAIN_TIMEOUT, waiting).await);
        Ok(())
    }
}

/// A query's place among those that wait, and its part in the wait for all of them at a stop.
type WaitSlot = (QuotaSlot, Option<OwnedSemaphorePermit>);

/// Admits a query that must wait for a resolver.
fn admit_waiting(
    filter: &DnsFilter,
    waiting: &Arc<Semaphore>,
    pending: &PendingQuery,
) -> Result<WaitSlot, QuotaExhausted> {
    let slot = filter.admit_waiting(&pending.lookup)?;
    Ok((slot, waiting.clone().try_acquire_owned().ok()))
}

/// Waits for all listeners. The first failure ends the wait: losing a worker must not go unnoticed.
async fn wait_for_all(tasks: &mut JoinSet<io::Result<()>>) -> io::Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(io::Error::other)??;
    }
    Ok(())
}

/// Returns a channel for an interface whose name the kernel does not (or no longer) know. No sandbox can have it: a
/// slash is not allowed in interface names.
fn unnamed_interface(index: Option<u32>) -> Channel {
    Channel::Interface(format!("unnamed/{}", index.unwrap_or_default()))
}

/// Resolves once `stop` is true.
async fn wait_for_stop(stop: &mut watch::Receiver<bool>) {
    drop(stop.wait_for(|stop| *stop).await); // a dropped sender stops too
}

/// Lets a socket receive queries for other resolvers that TPROXY redirects. Needs a capability, and only this does.
fn take_foreign(socket: std::os::fd::BorrowedFd<'_>, address: SocketAddr) {
    if let Err(error) = sys::socket::enable_transparent(socket, address) {
        tracing::debug!(%error, %address, "cannot receive queries redirected by TPROXY");
    }
}
