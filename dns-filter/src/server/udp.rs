//! UDP workers: each has a socket of its own on the shared port, takes datagrams by the batch, answers
//! what it can at once and lets the rest wait on their own.

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
use super::{DnsAttribution, DnsListener, ListenError, unnamed_interface, wait_for_stop};
use crate::filter::DnsFilter;
use crate::limits::DATAGRAM_BATCH;
use crate::message::DnsTransport;
use crate::query::{QueryArrival, QueryStep};
use sys::datagrams::{Datagram, DatagramBatch, OutgoingDatagram, send_datagrams};
use sys::socket as kernel;

/// Octets of datagrams that wait in the kernel.
const RECEIVE_BUFFER: usize = 4 << 20;
/// How long the name of an interface is believed.
const NAME_AGE: Duration = Duration::from_secs(1);
/// Batches before others of the runtime have their turn.
const BATCHES_PER_YIELD: usize = 8;

/// One socket and what it needs to serve.
pub(super) struct UdpWorker {
    socket: Arc<UdpSocket>,
    whose: DnsAttribution,
    bind: SocketAddr,
    names: InterfaceNames,
    local: LocalAddresses,
}

impl UdpWorker {
    pub(super) fn open(listener: &DnsListener) -> Result<Self, ListenError> {
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

    /// Serves a socket that is bound already.
    pub(super) fn from_socket(
        listener: &DnsListener,
        socket: std::net::UdpSocket,
    ) -> Result<Self, ListenError> {
        let address = listener.bind;
        let bound = |source| ListenError::Bind { address, source };
        kernel::enable_packet_info(socket.as_fd(), address)
            .map_err(|source| ListenError::Kernel { address, what: "destination", source })?;
        let socket = UdpSocket::from_std(socket).map_err(bound)?;
        let (whose, names, local) =
            (listener.whose.clone(), InterfaceNames::default(), LocalAddresses::new(address));
        Ok(UdpWorker { socket: Arc::new(socket), whose, bind: address, names, local })
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
                    // An ICMP error about an answer of ours: nothing of this socket's.
                    Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => {}
                    Err(error) => return Err(error),
                }
            }
            tokio::task::yield_now().await;
        }
    }

    fn handle_batch(
        &mut self,
        filter: &Arc<DnsFilter>,
        waiting: &Arc<Semaphore>,
        batch: &DatagramBatch,
    ) {
        let mut answers = Vec::with_capacity(DATAGRAM_BATCH);
        for datagram in batch.datagrams() {
            let arrived = self.query_arrival(&datagram);
            if datagram.source.port() == 0 {
                filter.record_unread(Reason::DnsMalformed, &arrived);
                continue; // nothing can be answered there: it was forged
            }
            let envelope = ReplyRoute::from_datagram(&datagram);
            match filter.start_query(datagram.bytes, &arrived) {
                QueryStep::Drop => {}
                QueryStep::Answer(bytes) => answers.push(envelope.into_datagram(bytes)),
                QueryStep::Wait(pending) => match waiting.clone().try_acquire_owned() {
                    Ok(turn) => {
                        let (filter, socket) = (filter.clone(), self.socket.clone());
                        tokio::spawn(async move {
                            let bytes = filter.finish_query(*pending).await;
                            send_datagrams(socket.as_fd(), &[envelope.into_datagram(bytes)]);
                            drop(turn);
                        });
                    }
                    Err(_) => {
                        answers.push(envelope.into_datagram(filter.refuse_overload(*pending)))
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
        let channel = match &self.whose {
            DnsAttribution::Dedicated(id) => Channel::Dedicated(id.clone()),
            DnsAttribution::Interface => self.names.channel(seen.interface),
            DnsAttribution::Mark => Channel::Mark(seen.mark.unwrap_or_default()),
            DnsAttribution::SourceAddress => Channel::SourceAddress(datagram.source.ip()),
        };
        let aimed = seen.to.map(|to| SocketAddr::new(to, self.bind.port()));
        let toward = self.local.query_target(seen.to);
        QueryArrival {
            channel,
            carrier: DnsTransport::Udp,
            source: Some(datagram.source),
            original_dst: aimed,
            toward,
        }
    }
}

/// Where an answer goes, and from where.
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

/// Names of interfaces, asked for once in a while.
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
    drop(socket.set_recv_buffer_size(RECEIVE_BUFFER)); // the kernel's own limit is good enough
    socket.bind(&address.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p2_an_interface_that_is_gone_is_nobodys() {
        let mut names = InterfaceNames::default();
        let lo = names.channel(Some(1));
        assert_eq!(lo, Channel::Interface("lo".to_owned()));
        assert_eq!(names.channel(Some(u32::MAX)), Channel::Interface("unnamed/4294967295".into()));
        assert_eq!(names.channel(None), Channel::Interface("unnamed/0".into()));
    }
}
