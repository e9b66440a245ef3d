//! The listeners: UDP workers that share a port, TCP beside them, both for IPv4 and IPv6. What the
//! kernel says of a packet names its channel; nothing in the packet does (P2).

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
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::filter::DnsFilter;
use crate::limits::{DRAIN_TIMEOUT, IN_FLIGHT};

/// Where queries arrive, and what tells whose they are.
#[derive(Clone, Debug)]
pub struct DnsListener {
    pub bind: SocketAddr,
    pub whose: DnsAttribution,
}

/// How the sandbox behind a packet is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsAttribution {
    Dedicated(SandboxId),
    Interface,
    Mark,
    SourceAddress,
}

impl DnsAttribution {
    /// What a listener of the operator's file says; none for what DNS has no such thing of.
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
    #[error(
        "cannot listen on {address}: {source}; free the address or change `bind` of the listener"
    )]
    Bind { address: SocketAddr, source: io::Error },
    #[error(
        "a socket that was passed on cannot serve DNS: {source}; it must be bound to an address, for UDP or TCP"
    )]
    Given { source: io::Error },
    #[error(
        "the kernel does not tell the {what} of packets on {address}: {source}; it needs Linux 5.19 or `identify` of another kind"
    )]
    Kernel { address: SocketAddr, what: &'static str, source: io::Error },
}

/// Open listeners, not serving yet.
pub struct DnsServer {
    filter: Arc<DnsFilter>,
    udp: Vec<udp::UdpWorker>,
    tcp: Vec<tcp::TcpAcceptor>,
    connections: tcp::TcpConnectionLimit,
    /// Queries that wait for a resolver hold one each.
    waiting: Arc<Semaphore>,
}

impl DnsServer {
    /// Opens every listener, each with `workers` sockets for UDP.
    ///
    /// # Errors
    ///
    /// Returns [`ListenError`] when one cannot be opened: nothing is served then.
    pub fn open(
        filter: Arc<DnsFilter>,
        listeners: &[DnsListener],
        workers: usize,
    ) -> Result<Self, ListenError> {
        let mut server = DnsServer {
            filter,
            udp: Vec::new(),
            tcp: Vec::new(),
            connections: tcp::TcpConnectionLimit::default(),
            waiting: Arc::new(Semaphore::new(IN_FLIGHT)),
        };
        for listener in listeners {
            let acceptor = tcp::TcpAcceptor::open(listener, server.connections.clone())?;
            let bind = acceptor.address(); // port 0 was drawn by the kernel: UDP takes the same
            for _ in 0..workers.max(1) {
                server.udp.push(udp::UdpWorker::open(&DnsListener { bind, ..listener.clone() })?);
            }
            server.tcp.push(acceptor);
        }
        Ok(server)
    }

    /// Takes a socket that another has opened, for UDP or TCP as it is: answers go out by it, in whatever
    /// network it was made.
    ///
    /// # Errors
    ///
    /// Returns [`ListenError`] when it is no bound socket of the internet.
    pub fn adopt(&mut self, socket: Socket, whose: DnsAttribution) -> Result<(), ListenError> {
        let given = |source| ListenError::Given { source };
        let address = socket.local_addr().map_err(given)?;
        let Some(bind) = address.as_socket() else {
            return Err(given(io::ErrorKind::Unsupported.into()));
        };
        let listener = DnsListener { bind, whose };
        socket.set_nonblocking(true).map_err(given)?;
        match socket.r#type().map_err(given)? {
            Type::DGRAM => self.udp.push(udp::UdpWorker::from_socket(&listener, socket.into())?),
            _ => self.tcp.push(tcp::TcpAcceptor::from_socket(
                &listener,
                socket.into(),
                self.connections.clone(),
            )?),
        }
        Ok(())
    }

    /// Where it listens, in the order of the listeners.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.tcp.iter().map(tcp::TcpAcceptor::address).collect()
    }

    /// Serves until `stop` turns true, then finishes what is in flight.
    ///
    /// # Errors
    ///
    /// Returns the error of a listener that broke: the port is closed then, and nothing is answered.
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
            tasks.shutdown().await; // closed when this returns, so that nobody asks into a void
            return ended;
        }
        let waiting = self.waiting.acquire_many(IN_FLIGHT as u32);
        drop(tokio::time::timeout(DRAIN_TIMEOUT, waiting).await);
        Ok(())
    }
}

/// Waits for every listener; the first that breaks ends it, for one worker less must not go unseen.
async fn wait_for_all(tasks: &mut JoinSet<io::Result<()>>) -> io::Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(io::Error::other)??;
    }
    Ok(())
}

/// The channel of what came by an interface that the kernel cannot name (any more): nobody's, as no
/// interface has such a name.
fn unnamed_interface(index: Option<u32>) -> Channel {
    Channel::Interface(format!("unnamed/{}", index.unwrap_or_default()))
}

/// Resolves once `stop` is true.
async fn wait_for_stop(stop: &mut watch::Receiver<bool>) {
    drop(stop.wait_for(|stop| *stop).await); // a dropped sender stops too
}

/// Lets a socket take queries that TPROXY brings from their way to another resolver. Only that needs the privilege.
fn take_foreign(socket: std::os::fd::BorrowedFd<'_>, address: SocketAddr) {
    if let Err(error) = sys::socket::enable_transparent(socket, address) {
        tracing::debug!(%error, %address, "queries on their way to others cannot be taken by TPROXY");
    }
}
