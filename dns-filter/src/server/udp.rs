//! UDP workers. Each has its own socket on the shared port, receives datagrams in batches, answers at once what can be
//! answered locally, and spawns a task for each query that waits for a resolver.
//!
//! # Why this is not hickory's server
//!
//! We use hickory's codec for upstream queries and answers (`upstream`, `clean`). The front, here and in `message`, is
//! our own:
//!
//! - Attribution needs the interface, mark and destination address that the kernel reports with each datagram (P2).
//!   hickory's server (0.26) passes its handler the source address only.
//! - A cached answer is sent as stored octets with patched TTLs. hickory's server encodes records for every response,
//!   receives one datagram per wake-up and spawns a task for each.
//! - The measurement that decides how much a query may cost is `integration/benches/dns.sh`, which compares CPU per
//!   query with dnsdist's. The target is 0.9; this front takes 1.11 for a cached query and 1.29 for a refused one
//!   (README.md, "Known gaps"), so it has nothing to spare for more work per query. The benchmark does not include
//!   hickory's server.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rules::{Channel, Reason};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use super::local_addresses::LocalAddresses;
use super::{DnsAttribution, DnsListener, ListenError, admit_waiting, unnamed_interface, wait_for_stop};
use crate::filter::DnsFilter;
use crate::limits::{DATAGRAM_BATCH, SHARED_SOCKETS};
use crate::message::DnsTransport;
use crate::query::{QueryArrival, QueryStep};
use sys::datagrams::{Datagram, DatagramBatch, OutgoingDatagram, send_datagrams};
use sys::socket::{self as kernel, SteerKey};

/// Receive buffer of a socket, in octets.
const RECEIVE_BUFFER: usize = 1 << 20;
/// How long the name of an interface is cached.
const NAME_AGE: Duration = Duration::from_secs(1);
/// Batches before the worker yields to other tasks.
const BATCHES_PER_YIELD: usize = 8;

/// One socket, with the caches it needs for attribution.
pub(super) struct UdpWorker {
    socket: Arc<UdpSocket>,
    attribution: DnsAttribution,
    bind: SocketAddr,
    names: InterfaceNames,
    local: LocalAddresses,
}

impl UdpWorker {
    /// Opens the sockets of one address.
    ///
    /// A socket has one queue, and when it is full the kernel drops whatever comes. So that a sandbox that floods its
    /// queue drops only its own queries, an address of several sandboxes has more sockets than workers, and the kernel
    /// chooses by what tells sandboxes apart. Two that share a socket remain possible: there are [`SHARED_SOCKETS`].
    pub(super) fn open_all(listener: &DnsListener, workers: usize) -> Result<Vec<Self>, ListenError> {
        let key = match &listener.whose {
            DnsAttribution::Dedicated(_) => None,
            DnsAttribution::Interface => Some(SteerKey::Interface),
            DnsAttribution::Mark => Some(SteerKey::Mark),
            DnsAttribution::SourceAddress => Some(SteerKey::SourceAddress),
        };
        let count = key.map_or(workers.max(1), |_| workers.max(SHARED_SOCKETS));
        let opened: Vec<Self> = (0..count).map(|_| Self::open(listener)).collect::<Result<_, _>>()?;
        if let (Some(key), Some(last)) = (key, opened.last()) {
            let (address, what) = (listener.bind, "queue");
            let steered = kernel::steer_packets(last.socket.as_fd(), address, key, count as u32);
            steered.map_err(|source| ListenError::Kernel { address, what, source })?;
        }
        Ok(opened)
    }

    fn open(listener: &DnsListener) -> Result<Self, ListenError> {
        let address = listener.bind;
        let bound = |source| ListenError::Bind { address, source };
        let socket = bind_socket(address).map_err(bound)?;
        if listener.whose == DnsAttribution::Mark {
            kernel::enable_packet_mark(socket.as_fd()).map_err(|source| ListenError::Kernel {
                address,
                what: "mark",
                source,
            })?;
        }
        super::take_foreign(socket.as_fd(), address);
        Self::from_socket(listener, socket)
    }

    /// Serves a socket that is already bound.
    pub(super) fn from_socket(
        listener: &DnsListener,
        socket: std::net::UdpSocket,
    ) -> Result<Self, ListenError> {
        let address = listener.bind;
        let bound = |source| ListenError::Bind { address, source };
        kernel::enable_packet_info(socket.as_fd(), address).map_err(|source| ListenError::Kernel {
            address,
            what: "destination",
            source,
        })?;
        let socket = UdpSocket::from_std(socket).map_err(bound)?;
        let (attribution, names, local) =
            (listener.whose.clone(), InterfaceNames::default(), LocalAddresses::new(address));
        Ok(UdpWorker { socket: Arc::new(socket), attribution, bind: address, names, local })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.bind
    }

    pub(super) async fn serve(
        mut self,
        filter: Arc<DnsFilter>,
        waiting: Arc<Semaphore>,
        mut stop: watch::Receiver<bool>,
    ) -> io::Result<()> {
        let mut batch = DatagramBatch::default();
        let socket = self.socket.clone();
        loop {
            tokio::select! {
                ready = socket.readable() => ready?,
                () = wait_for_stop(&mut stop) => return Ok(()),
            }
            for _ in 0..BATCHES_PER_YIELD {
                let taken = socket.try_io(Interest::READABLE, || batch.drain(socket.as_fd()));
                self.handle_batch(&filter, &waiting, &batch);
                match taken {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    // An ICMP error caused by an earlier answer; the socket itself is fine.
                    Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => {}
                    Err(error) => return Err(error),
                }
            }
            tokio::task::yield_now().await;
        }
    }

    fn handle_batch(&mut self, filter: &Arc<DnsFilter>, waiting: &Arc<Semaphore>, batch: &DatagramBatch) {
        let mut answers = Vec::with_capacity(DATAGRAM_BATCH);
        for datagram in batch.datagrams() {
            let arrived = self.query_arrival(&datagram);
            if datagram.source.port() == 0 {
                filter.record_unread(datagram.bytes, Reason::DnsMalformed, &arrived, None);
                continue; // forged: no reply can be sent to port 0
            }
            let route = ReplyRoute::from_datagram(&datagram);
            match filter.start_query(datagram.bytes, &arrived) {
                QueryStep::Drop => {}
                QueryStep::Answer(bytes) => answers.push(route.into_datagram(bytes)),
                QueryStep::Wait(pending) => match admit_waiting(filter, waiting, &pending) {
                    Ok(slot) => {
                        let (filter, socket) = (filter.clone(), self.socket.clone());
                        tokio::spawn(async move {
                            let bytes = filter.finish_query(*pending).await;
                            send_datagrams(socket.as_fd(), &[route.into_datagram(bytes)]);
                            drop(slot);
                        });
                    }
                    Err(exhausted) => {
                        let refused = filter.refuse_overload(*pending, &exhausted);
                        answers.push(route.into_datagram(refused));
                    }
                },
            }
        }
        if !answers.is_empty() {
            send_datagrams(self.socket.as_fd(), &answers);
        }
    }

    fn query_arrival(&mut self, datagram: &Datagram<'_>) -> QueryArrival {
        let seen = datagram.seen;
        let channel = match &self.attribution {
            DnsAttribution::Dedicated(id) => Channel::Dedicated(id.clone()),
            DnsAttribution::Interface => self.names.channel(seen.interface),
            DnsAttribution::Mark => Channel::Mark(seen.mark.unwrap_or_default()),
            DnsAttribution::SourceAddress => Channel::SourceAddress(datagram.source.ip()),
        };
        let original_dst = seen.to.map(|to| SocketAddr::new(to, self.bind.port()));
        let toward = self.local.query_target(seen.to);
        QueryArrival {
            channel,
            carrier: DnsTransport::Udp,
            source: Some(datagram.source),
            original_dst,
            toward,
        }
    }
}

/// Destination, source address and interface of a reply.
struct ReplyRoute {
    to: SocketAddr,
    from: Option<std::net::IpAddr>,
    interface: Option<u32>,
}

impl ReplyRoute {
    fn from_datagram(datagram: &Datagram<'_>) -> Self {
        let seen = datagram.seen;
        ReplyRoute { to: datagram.source, from: seen.to, interface: seen.interface }
    }

    fn into_datagram(self, bytes: Vec<u8>) -> OutgoingDatagram {
        let ReplyRoute { to, from, interface } = self;
        OutgoingDatagram { bytes, to, from, interface }
    }
}

/// Names of interfaces, cached for [`NAME_AGE`].
#[derive(Default)]
struct InterfaceNames {
    known: Vec<(u32, String, Instant)>,
}

impl InterfaceNames {
    fn channel(&mut self, index: Option<u32>) -> Channel {
        match index.and_then(|index| self.name_of(index)) {
            Some(name) => Channel::Interface(name),
            None => unnamed_interface(index),
        }
    }

    fn name_of(&mut self, index: u32) -> Option<String> {
        let now = Instant::now();
        self.known.retain(|(_, _, at)| now < *at + NAME_AGE);
        if let Some((_, name, _)) = self.known.iter().find(|(known, _, _)| *known == index) {
            return Some(name.clone());
        }
        let name = kernel::interface_name(index).ok()?;
        self.known.push((index, name.clone(), now));
        Some(name)
    }
}

fn bind_socket(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    drop(socket.set_recv_buffer_size(RECEIVE_BUFFER)); // the default size works, too
    socket.bind(&address.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p2_an_interface_that_is_gone_belongs_to_no_sandbox() {
        let mut names = InterfaceNames::default();
        let lo = names.channel(Some(1));
        assert_eq!(lo, Channel::Interface("lo".to_owned()));
        assert_eq!(names.channel(Some(u32::MAX)), Channel::Interface("unnamed/4294967295".into()));
        assert_eq!(names.channel(None), Channel::Interface("unnamed/0".into()));
    }
}
