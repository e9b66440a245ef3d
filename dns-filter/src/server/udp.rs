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

use super::local::Local;
use super::{Identify, ListenError, Listener, stopped, unnamed};
use crate::filter::Filter;
use crate::limits::BATCH;
use crate::message::Carrier;
use crate::query::{Arrived, Step};
use sys::datagrams::{Batch, Datagram, Outgoing, send};
use sys::socket as kernel;

/// Octets of datagrams that wait in the kernel.
const RECEIVE_BUFFER: usize = 4 << 20;
/// How long the name of an interface is believed.
const NAME_AGE: Duration = Duration::from_secs(1);
/// Batches before others of the runtime have their turn.
const TURN: usize = 8;

/// One socket and what it needs to serve.
pub(super) struct Worker {
    socket: Arc<UdpSocket>,
    whose: Identify,
    bind: SocketAddr,
    names: Names,
    local: Local,
}

impl Worker {
    pub(super) fn open(listener: &Listener) -> Result<Self, ListenError> {
        let address = listener.bind;
        let bound = |source| ListenError::Bind { address, source };
        let socket = bind(address).map_err(bound)?;
        if listener.whose == Identify::Mark {
            kernel::tell_mark(socket.as_fd()).map_err(|source| ListenError::Kernel {
                address,
                what: "mark",
                source,
            })?;
        }
        super::take_foreign(socket.as_fd(), address);
        Self::serving(listener, socket)
    }

    /// Serves a socket that is bound already.
    pub(super) fn serving(
        listener: &Listener,
        socket: std::net::UdpSocket,
    ) -> Result<Self, ListenError> {
        let address = listener.bind;
        let bound = |source| ListenError::Bind { address, source };
        kernel::tell_destination(socket.as_fd(), address)
            .map_err(|source| ListenError::Kernel { address, what: "destination", source })?;
        let socket = UdpSocket::from_std(socket).map_err(bound)?;
        let (whose, names, local) = (listener.whose.clone(), Names::default(), Local::new(address));
        Ok(Worker { socket: Arc::new(socket), whose, bind: address, names, local })
    }

    pub(super) async fn serve(
        mut self,
        filter: Arc<Filter>,
        waiting: Arc<Semaphore>,
        mut stop: watch::Receiver<bool>,
    ) -> io::Result<()> {
        let mut batch = Batch::new();
        let socket = self.socket.clone();
        loop {
            tokio::select! {
                ready = socket.readable() => ready?,
                () = stopped(&mut stop) => return Ok(()),
            }
            for _ in 0..TURN {
                let taken = socket.try_io(Interest::READABLE, || batch.drain(socket.as_fd()));
                self.pass(&filter, &waiting, &batch);
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

    fn pass(&mut self, filter: &Arc<Filter>, waiting: &Arc<Semaphore>, batch: &Batch) {
        let mut answers = Vec::with_capacity(BATCH);
        for datagram in batch.datagrams() {
            let arrived = self.arrived(&datagram);
            if datagram.source.port() == 0 {
                filter.unread(Reason::DnsMalformed, &arrived);
                continue; // nothing can be answered there: it was forged
            }
            let envelope = Envelope::of(&datagram);
            match filter.begin(datagram.bytes, &arrived) {
                Step::Drop => {}
                Step::Answer(bytes) => answers.push(envelope.with(bytes)),
                Step::Wait(pending) => match waiting.clone().try_acquire_owned() {
                    Ok(turn) => {
                        let (filter, socket) = (filter.clone(), self.socket.clone());
                        tokio::spawn(async move {
                            let bytes = filter.wait(*pending).await;
                            send(socket.as_fd(), &[envelope.with(bytes)]);
                            drop(turn);
                        });
                    }
                    Err(_) => answers.push(envelope.with(filter.overloaded(*pending))),
                },
            }
        }
        if !answers.is_empty() {
            send(self.socket.as_fd(), &answers);
        }
    }

    fn arrived(&mut self, datagram: &Datagram<'_>) -> Arrived {
        let seen = datagram.seen;
        let channel = match &self.whose {
            Identify::Dedicated(id) => Channel::Dedicated(id.clone()),
            Identify::Interface => self.names.channel(seen.interface),
            Identify::Mark => Channel::Mark(seen.mark.unwrap_or_default()),
            Identify::SourceAddress => Channel::SourceAddress(datagram.source.ip()),
        };
        let aimed = seen.to.map(|to| SocketAddr::new(to, self.bind.port()));
        let toward = self.local.toward(seen.to);
        Arrived { channel, carrier: Carrier::Udp, source: Some(datagram.source), aimed, toward }
    }
}

/// Where an answer goes, and from where.
struct Envelope {
    to: SocketAddr,
    from: Option<std::net::IpAddr>,
    interface: Option<u32>,
}

impl Envelope {
    fn of(datagram: &Datagram<'_>) -> Self {
        let seen = datagram.seen;
        Envelope { to: datagram.source, from: seen.to, interface: seen.interface }
    }

    fn with(self, bytes: Vec<u8>) -> Outgoing {
        let Envelope { to, from, interface } = self;
        Outgoing { bytes, to, from, interface }
    }
}

/// Names of interfaces, asked for once in a while.
#[derive(Default)]
struct Names {
    known: Vec<(u32, String, Instant)>,
}

impl Names {
    fn channel(&mut self, index: Option<u32>) -> Channel {
        match index.and_then(|index| self.of(index)) {
            Some(name) => Channel::Interface(name),
            None => unnamed(index),
        }
    }

    fn of(&mut self, index: u32) -> Option<String> {
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

fn bind(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
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
    fn an_interface_that_is_gone_is_nobodys() {
        let mut names = Names::default();
        let lo = names.channel(Some(1));
        assert_eq!(lo, Channel::Interface("lo".to_owned()));
        assert_eq!(names.channel(Some(u32::MAX)), Channel::Interface("unnamed/4294967295".into()));
        assert_eq!(names.channel(None), Channel::Interface("unnamed/0".into()));
    }
}
