//! TCP: pipelined queries answered as they are ready, slow and silent peers cut, connections capped.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sys::socket as kernel;

use rules::word::SandboxId;
use rules::{Channel, Reason};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::local::Local;
use super::{Identify, ListenError, Listener, stopped, unnamed};
use crate::filter::Filter;
use crate::limits::{
    DRAIN, QUERY_BYTES, TCP_CONNECTIONS, TCP_CONNECTIONS_SANDBOX, TCP_IDLE, TCP_MESSAGE,
    TCP_PIPELINE, TCP_SEND_BUFFER, TCP_WRITE,
};
use crate::lock;
use crate::message::Carrier;
use crate::query::{Arrived, Pending, Step};

/// Connections that wait in the kernel to be accepted.
const BACKLOG: i32 = 256;
/// Pause after the process has run out of descriptors.
const BREATH: Duration = Duration::from_millis(50);

/// The open connections, by sandbox; those of nobody together.
#[derive(Clone, Default)]
pub(super) struct Connections(Arc<Mutex<HashMap<Option<SandboxId>, usize>>>);

/// A place among the open connections.
struct Place {
    all: Connections,
    whose: Option<SandboxId>,
}

/// One listening socket.
pub(super) struct Acceptor {
    listener: TcpListener,
    address: SocketAddr,
    whose: Identify,
    connections: Connections,
}

impl Acceptor {
    pub(super) fn open(listener: &Listener, connections: Connections) -> Result<Self, ListenError> {
        let address = listener.bind;
        let bound = |source| ListenError::Bind { address, source };
        let socket = bind(address).map_err(bound)?;
        if listener.whose == Identify::Interface {
            kernel::tell_destination(socket.as_fd(), address)
                .map_err(|source| ListenError::Kernel { address, what: "interface", source })?;
        }
        super::take_foreign(socket.as_fd(), address);
        Self::serving(listener, socket, connections)
    }

    /// Serves a socket that listens already.
    pub(super) fn serving(
        listener: &Listener,
        socket: std::net::TcpListener,
        connections: Connections,
    ) -> Result<Self, ListenError> {
        let address = listener.bind;
        let bound = |source| ListenError::Bind { address, source };
        let listening = TcpListener::from_std(socket).map_err(bound)?;
        let address = listening.local_addr().map_err(bound)?;
        Ok(Acceptor { listener: listening, address, whose: listener.whose.clone(), connections })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop`, then lets open connections have the answers they wait for.
    pub(super) async fn serve(
        self,
        filter: Arc<Filter>,
        waiting: Arc<Semaphore>,
        mut stop: watch::Receiver<bool>,
    ) -> io::Result<()> {
        let mut open = JoinSet::new();
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, source)) => {
                        let (filter, waiting, stop) = (filter.clone(), waiting.clone(), stop.clone());
                        let arrived = self.arrived(&stream, source);
                        let connection = Connection { filter, waiting, arrived, stop };
                        self.enter(connection, stream, &mut open);
                    }
                    Err(_) => tokio::time::sleep(BREATH).await, // of the peer, or of descriptors
                },
                Some(ended) = open.join_next() => ended.map_err(io::Error::other)?,
                () = stopped(&mut stop) => break,
            }
        }
        drop(self); // nobody new
        drain(open).await
    }

    fn enter(&self, connection: Connection, stream: TcpStream, open: &mut JoinSet<()>) {
        let rules = connection.filter.rules.load();
        let known = rules.sandboxes().identify(std::slice::from_ref(&connection.arrived.channel));
        let whose = known.ok().map(|sandbox| sandbox.id.clone());
        drop(rules);
        let Some(place) = self.connections.enter(whose) else {
            connection.filter.unread(Reason::DnsOverload, &connection.arrived);
            return;
        };
        open.spawn(async move {
            connection.serve(stream).await;
            drop(place);
        });
    }

    fn arrived(&self, stream: &TcpStream, source: SocketAddr) -> Arrived {
        let local = stream.local_addr().ok();
        let channel = match &self.whose {
            Identify::Dedicated(id) => Channel::Dedicated(id.clone()),
            Identify::Interface => {
                let index = local.and_then(|to| kernel::interface_of(stream.as_fd(), to).ok());
                let name = index.and_then(|index| kernel::interface_name(index).ok());
                name.map_or_else(|| unnamed(index), Channel::Interface)
            }
            Identify::Mark => Channel::Mark(kernel::mark_of(stream.as_fd()).unwrap_or_default()),
            Identify::SourceAddress => Channel::SourceAddress(source.ip()),
        };
        let aimed = local.and_then(|to| kernel::original_of(stream.as_fd(), to).ok()).or(local);
        let toward = Local::new(self.address).toward(aimed.map(|to| to.ip()));
        Arrived { channel, carrier: Carrier::Tcp, source: Some(source), aimed, toward }
    }
}

/// Waits for connections to end by themselves; cuts whoever does not.
async fn drain(mut open: JoinSet<()>) -> io::Result<()> {
    let all = async {
        while let Some(ended) = open.join_next().await {
            ended.map_err(io::Error::other)?;
        }
        Ok(())
    };
    timeout(DRAIN, all).await.unwrap_or(Ok(()))
}

impl Connections {
    fn enter(&self, whose: Option<SandboxId>) -> Option<Place> {
        let mut all = lock(&self.0);
        let total: usize = all.values().sum();
        let own = all.entry(whose.clone()).or_default();
        if total >= TCP_CONNECTIONS || *own >= TCP_CONNECTIONS_SANDBOX {
            return None;
        }
        *own += 1;
        Some(Place { all: self.clone(), whose })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = lock(&self.all.0);
        if let Some(count) = all.get_mut(&self.whose) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.whose);
            }
        }
    }
}

/// A place in the connection's pipeline and one among all that wait.
type Places = (OwnedSemaphorePermit, OwnedSemaphorePermit);

struct Connection {
    filter: Arc<Filter>,
    waiting: Arc<Semaphore>,
    arrived: Arrived,
    stop: watch::Receiver<bool>,
}

impl Connection {
    async fn serve(self, stream: TcpStream) {
        let (reader, writer) = stream.into_split();
        let (answers, queue) = mpsc::channel(TCP_PIPELINE);
        tokio::join!(self.read(reader, answers), write(writer, queue));
    }

    /// Reads queries until the peer is done or does not behave; answers still due are sent.
    async fn read(&self, mut reader: OwnedReadHalf, answers: mpsc::Sender<Vec<u8>>) {
        let pipeline = Arc::new(Semaphore::new(TCP_PIPELINE));
        let mut stop = self.stop.clone();
        while let Some(packet) = message(&mut reader, &mut stop).await {
            if answers.is_closed() {
                return; // the peer does not read
            }
            let Ok(slot) = pipeline.clone().acquire_owned().await else { return };
            let answer = match self.filter.begin(&packet, &self.arrived) {
                Step::Drop => continue,
                Step::Answer(answer) => answer,
                Step::Wait(pending) => match self.waiting.clone().try_acquire_owned() {
                    Ok(turn) => {
                        self.wait(*pending, answers.clone(), (slot, turn));
                        continue;
                    }
                    Err(_) => self.filter.overloaded(*pending),
                },
            };
            if answers.send(answer).await.is_err() {
                return;
            }
        }
    }

    /// Lets a query wait on its own; it holds its places meanwhile.
    fn wait(&self, pending: Pending, answers: mpsc::Sender<Vec<u8>>, places: Places) {
        let filter = self.filter.clone();
        tokio::spawn(async move {
            let answer = filter.wait(pending).await;
            drop(answers.send(answer).await); // a peer that has gone needs none
            drop(places);
        });
    }
}

/// One message; none when the peer is done, too slow, or sends what is no query.
async fn message(reader: &mut OwnedReadHalf, stop: &mut watch::Receiver<bool>) -> Option<Vec<u8>> {
    let first = tokio::select! {
        biased; // what was sent before the stop is still read
        first = timeout(TCP_IDLE, reader.read_u8()) => first.ok()?.ok()?,
        () = stopped(stop) => return None,
    };
    timeout(TCP_MESSAGE, rest(reader, first)).await.ok()?
}

async fn rest(reader: &mut OwnedReadHalf, first: u8) -> Option<Vec<u8>> {
    let second = reader.read_u8().await.ok()?;
    let length = usize::from(u16::from_be_bytes([first, second]));
    if length == 0 || length > QUERY_BYTES {
        return None;
    }
    let mut packet = vec![0; length];
    reader.read_exact(&mut packet).await.ok()?;
    Some(packet)
}

async fn write(mut writer: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>) {
    while let Some(answer) = queue.recv().await {
        let Ok(length) = u16::try_from(answer.len()) else { return };
        let mut framed = length.to_be_bytes().to_vec();
        framed.extend_from_slice(&answer);
        match timeout(TCP_WRITE, writer.write_all(&framed)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return,
        }
    }
}

fn bind(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_send_buffer_size(TCP_SEND_BUFFER)?; // connections have it from here
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
