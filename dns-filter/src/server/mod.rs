//! The listeners: UDP workers that share a port, TCP beside them, both for IPv4 and IPv6. What the
//! kernel says of a packet names its channel; nothing in the packet does (P2).

mod local;
mod tcp;
mod udp;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rules::Channel;
use rules::operator::Whose;
use rules::word::SandboxId;
use socket2::{Socket, Type};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::filter::Filter;
use crate::limits::{DRAIN, IN_FLIGHT};

/// Where queries arrive, and what tells whose they are.
#[derive(Clone, Debug)]
pub struct Listener {
    pub bind: SocketAddr,
    pub whose: Identify,
}

/// How the sandbox behind a packet is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identify {
    Dedicated(SandboxId),
    Interface,
    Mark,
    SourceAddress,
}

impl Identify {
    /// What a listener of the operator's file says; none for what DNS has no such thing of.
    pub fn of(whose: &Whose) -> Option<Self> {
        match whose {
            Whose::Dedicated(id) => Some(Identify::Dedicated(id.clone())),
            Whose::Interface => Some(Identify::Interface),
            Whose::Mark => Some(Identify::Mark),
            Whose::SourceAddress => Some(Identify::SourceAddress),
            Whose::Unix => None,
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
pub struct Server {
    filter: Arc<Filter>,
    udp: Vec<udp::Worker>,
    tcp: Vec<tcp::Acceptor>,
    connections: tcp::Connections,
    /// Queries that wait for a resolver hold one each.
    waiting: Arc<Semaphore>,
}

impl Server {
    /// Opens every listener, each with `workers` sockets for UDP.
    ///
    /// # Errors
    ///
    /// Returns [`ListenError`] when one cannot be opened: nothing is served then.
    pub fn open(
        filter: Arc<Filter>,
        listeners: &[Listener],
        workers: usize,
    ) -> Result<Self, ListenError> {
        let mut server = Server {
            filter,
            udp: Vec::new(),
            tcp: Vec::new(),
            connections: tcp::Connections::default(),
            waiting: Arc::new(Semaphore::new(IN_FLIGHT)),
        };
        for listener in listeners {
            let acceptor = tcp::Acceptor::open(listener, server.connections.clone())?;
            let bind = acceptor.address(); // port 0 was drawn by the kernel: UDP takes the same
            for _ in 0..workers.max(1) {
                server.udp.push(udp::Worker::open(&Listener { bind, ..listener.clone() })?);
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
    pub fn adopt(&mut self, socket: Socket, whose: Identify) -> Result<(), ListenError> {
        let given = |source| ListenError::Given { source };
        let address = socket.local_addr().map_err(given)?;
        let Some(bind) = address.as_socket() else {
            return Err(given(io::ErrorKind::Unsupported.into()));
        };
        let listener = Listener { bind, whose };
        socket.set_nonblocking(true).map_err(given)?;
        match socket.r#type().map_err(given)? {
            Type::DGRAM => self.udp.push(udp::Worker::serving(&listener, socket.into())?),
            _ => self.tcp.push(tcp::Acceptor::serving(
                &listener,
                socket.into(),
                self.connections.clone(),
            )?),
        }
        Ok(())
    }

    /// Where it listens, in the order of the listeners.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.tcp.iter().map(tcp::Acceptor::address).collect()
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
        let ended = all(&mut tasks).await;
        if ended.is_err() {
            tasks.shutdown().await; // closed when this returns, so that nobody asks into a void
            return ended;
        }
        let waiting = self.waiting.acquire_many(IN_FLIGHT as u32);
        drop(tokio::time::timeout(DRAIN, waiting).await);
        Ok(())
    }
}

/// Waits for every listener; the first that breaks ends it, for one worker less must not go unseen.
async fn all(tasks: &mut JoinSet<io::Result<()>>) -> io::Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(io::Error::other)??;
    }
    Ok(())
}

/// The channel of what came by an interface that the kernel cannot name (any more): nobody's, as no
/// interface has such a name.
fn unnamed(index: Option<u32>) -> Channel {
    Channel::Interface(format!("unnamed/{}", index.unwrap_or_default()))
}

/// Resolves once `stop` is true.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    drop(stop.wait_for(|stop| *stop).await); // a dropped sender stops too
}

/// Lets a socket take queries that TPROXY brings from their way to another resolver. Only that needs the privilege.
fn take_foreign(socket: std::os::fd::BorrowedFd<'_>, address: SocketAddr) {
    if let Err(error) = sys::socket::take_foreign(socket, address) {
        tracing::debug!(%error, %address, "queries on their way to others cannot be taken by TPROXY");
    }
}
