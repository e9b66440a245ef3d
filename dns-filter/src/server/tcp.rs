//! DNS over TCP. Pipelined queries are answered as they are ready, out of order; slow and idle clients are cut; the
//! number of connections is limited per sandbox and in all.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use sys::socket as kernel;

use rules::{Channel, Reason, RuleSet};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::local_addresses::LocalAddresses;
use super::{
    DnsAttribution, DnsListener, ListenError, WaitSlot, admit_waiting, unnamed_interface, wait_for_stop,
};
use crate::filter::DnsFilter;
use crate::limits::{
    DRAIN_TIMEOUT, QUERY_BYTES, TCP_CONNECTIONS, TCP_CONNECTIONS_SANDBOX, TCP_CONNECTIONS_UNKNOWN,
    TCP_IDLE_TIMEOUT, TCP_MESSAGE_TIMEOUT, TCP_PIPELINE, TCP_SEND_BUFFER, TCP_WRITE_TIMEOUT,
};
use crate::message::DnsTransport;
use crate::query::{PendingQuery, QueryArrival, QueryStep};
use crate::sandbox_quota::{QuotaSlot, SandboxQuota};

/// Connections that the kernel queues until they are accepted.
const BACKLOG: i32 = 256;
/// Pause after a failed `accept`: the process may be out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The open connections of sandboxes, and those of channels that belong to none.
#[derive(Clone)]
pub(super) struct TcpConnectionLimit {
    sandboxes: Arc<SandboxQuota>,
    unknown: Arc<Semaphore>,
}

/// Counts a connection until dropped.
enum TcpSlot {
    Sandbox(#[expect(dead_code, reason = "held until dropped")] QuotaSlot),
    Unknown(#[expect(dead_code, reason = "held until dropped")] OwnedSemaphorePermit),
}

/// One listening socket.
pub(super) struct TcpAcceptor {
    listener: TcpListener,
    address: SocketAddr,
    attribution: DnsAttribution,
    connections: TcpConnectionLimit,
}

impl TcpAcceptor {
    pub(super) fn open(listener: &DnsListener, connections: TcpConnectionLimit) -> Result<Self, ListenError> {
        let address = listener.bind;
        let bound = |source| ListenError::Bind { address, source };
        let socket = bind_listener(address).map_err(bound)?;
        if listener.whose == DnsAttribution::Interface {
            kernel::enable_packet_info(socket.as_fd(), address).map_err(|source| ListenError::Kernel {
                address,
                what: "interface",
                source,
            })?;
        }
        super::take_foreign(socket.as_fd(), address);
        Self::from_socket(listener, socket, connections)
    }

    /// Serves a socket that is already listening.
    pub(super) fn from_socket(
        listener: &DnsListener,
        socket: std::net::TcpListener,
        connections: TcpConnectionLimit,
    ) -> Result<Self, ListenError> {
        let address = listener.bind;
        let bound = |source| ListenError::Bind { address, source };
        let listening = TcpListener::from_std(socket).map_err(bound)?;
        let address = listening.local_addr().map_err(bound)?;
        let attribution = listener.whose.clone();
        Ok(TcpAcceptor { listener: listening, address, attribution, connections })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop`, then waits until open connections have their pending answers.
    pub(super) async fn serve(
        self,
        filter: Arc<DnsFilter>,
        waiting: Arc<Semaphore>,
        mut stop: watch::Receiver<bool>,
    ) -> io::Result<()> {
        let mut open = JoinSet::new();
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, source)) => {
                        let (filter, waiting, stop) = (filter.clone(), waiting.clone(), stop.clone());
                        let arrived = self.query_arrival(&stream, source);
                        let connection = TcpConnection { filter, waiting, arrived, stop };
                        self.spawn_connection(connection, stream, &mut open);
                    }
                    Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
                },
                Some(ended) = open.join_next() => ended.map_err(io::Error::other)?,
                () = wait_for_stop(&mut stop) => break,
            }
        }
        drop(self); // closes the listening socket
        drain(open).await
    }

    fn spawn_connection(&self, connection: TcpConnection, stream: TcpStream, open: &mut JoinSet<()>) {
        let rules = connection.filter.rules.load();
        let slot = match self.connections.acquire(&rules, &connection.arrived.channel) {
            Ok(slot) => slot,
            Err(why) => {
                let TcpConnection { filter, arrived, .. } = &connection;
                return filter.record_unread(&[], Reason::DnsOverload, arrived, Some(why));
            }
        };
        drop(rules);
        open.spawn(async move {
            connection.serve(stream).await;
            drop(slot);
        });
    }

    fn query_arrival(&self, stream: &TcpStream, source: SocketAddr) -> QueryArrival {
        let local = stream.local_addr().ok();
        let channel = match &self.attribution {
            DnsAttribution::Dedicated(id) => Channel::Dedicated(id.clone()),
            DnsAttribution::Interface => {
                let index = local.and_then(|to| kernel::arrival_interface(stream.as_fd(), to).ok());
                let name = index.and_then(|index| kernel::interface_name(index).ok());
                name.map_or_else(|| unnamed_interface(index), Channel::Interface)
            }
            DnsAttribution::Mark => Channel::Mark(kernel::socket_mark(stream.as_fd()).unwrap_or_default()),
            DnsAttribution::SourceAddress => Channel::SourceAddress(source.ip()),
        };
        let original_dst = local.and_then(|to| kernel::original_dst(stream.as_fd(), to).ok()).or(local);
        let toward = LocalAddresses::new(self.address).query_target(original_dst.map(|to| to.ip()));
        QueryArrival { channel, carrier: DnsTransport::Tcp, source: Some(source), original_dst, toward }
    }
}

/// Waits for connections to close; cuts those that take longer than [`DRAIN_TIMEOUT`].
async fn drain(mut open: JoinSet<()>) -> io::Result<()> {
    let all = async {
        while let Some(ended) = open.join_next().await {
            ended.map_err(io::Error::other)?;
        }
        Ok(())
    };
    timeout(DRAIN_TIMEOUT, all).await.unwrap_or(Ok(()))
}

impl TcpConnectionLimit {
    pub(super) fn new() -> Self {
        let sandboxes =
            SandboxQuota::new("DNS connections over TCP", TCP_CONNECTIONS, TCP_CONNECTIONS_SANDBOX);
        TcpConnectionLimit { sandboxes, unknown: Arc::new(Semaphore::new(TCP_CONNECTIONS_UNKNOWN)) }
    }

    /// Takes a place for a connection; the error says whose places are used up.
    fn acquire(&self, rules: &RuleSet, channel: &Channel) -> Result<TcpSlot, String> {
        match rules.sandboxes().identify(std::slice::from_ref(channel)) {
            Ok(sandbox) => {
                let slot = self.sandboxes.acquire(rules, &sandbox.id);
                slot.map(TcpSlot::Sandbox).map_err(|exhausted| exhausted.to_string())
            }
            Err(_) => {
                let slot = self.unknown.clone().try_acquire_owned();
                let why = "DNS connections over TCP: those of unknown channels are used up";
                slot.map(TcpSlot::Unknown).map_err(|_| why.to_owned())
            }
        }
    }
}

/// A slot in the connection's pipeline, and one among all waiting queries.
type PipelineSlots = (OwnedSemaphorePermit, WaitSlot);

struct TcpConnection {
    filter: Arc<DnsFilter>,
    waiting: Arc<Semaphore>,
    arrived: QueryArrival,
    stop: watch::Receiver<bool>,
}

impl TcpConnection {
    async fn serve(self, stream: TcpStream) {
        let (reader, writer) = stream.into_split();
        let (answers, queue) = mpsc::channel(TCP_PIPELINE);
        tokio::join!(self.read_queries(reader, answers), write_answers(writer, queue));
    }

    /// Reads queries until the client closes, is too slow or sends something else; pending answers are still sent.
    async fn read_queries(&self, mut reader: OwnedReadHalf, answers: mpsc::Sender<Vec<u8>>) {
        let pipeline = Arc::new(Semaphore::new(TCP_PIPELINE));
        let mut stop = self.stop.clone();
        while let Some(packet) = read_message(&mut reader, &mut stop).await {
            if answers.is_closed() {
                return; // the client does not read
            }
            let Ok(slot) = pipeline.clone().acquire_owned().await else { return };
            let answer = match self.filter.start_query(&packet, &self.arrived) {
                QueryStep::Drop => continue,
                QueryStep::Answer(answer) => answer,
                QueryStep::Wait(pending) => match admit_waiting(&self.filter, &self.waiting, &pending) {
                    Ok(wait) => {
                        self.spawn_query(*pending, answers.clone(), (slot, wait));
                        continue;
                    }
                    Err(exhausted) => self.filter.refuse_overload(*pending, &exhausted),
                },
            };
            if answers.send(answer).await.is_err() {
                return;
            }
        }
    }

    /// Finishes a query in a task of its own, which holds the slots until then.
    fn spawn_query(&self, pending: PendingQuery, answers: mpsc::Sender<Vec<u8>>, slots: PipelineSlots) {
        let filter = self.filter.clone();
        tokio::spawn(async move {
            let answer = filter.finish_query(pending).await;
            drop(answers.send(answer).await); // fails if the client is gone
            drop(slots);
        });
    }
}

/// Reads one message; `None` if the client closes, is too slow, or announces a length that no query has.
async fn read_message(reader: &mut OwnedReadHalf, stop: &mut watch::Receiver<bool>) -> Option<Vec<u8>> {
    let first = tokio::select! {
        biased; // queries sent before the stop are still read
        first = timeout(TCP_IDLE_TIMEOUT, reader.read_u8()) => first.ok()?.ok()?,
        () = wait_for_stop(stop) => return None,
    };
    timeout(TCP_MESSAGE_TIMEOUT, read_body(reader, first)).await.ok()?
}

async fn read_body(reader: &mut OwnedReadHalf, first: u8) -> Option<Vec<u8>> {
    let second = reader.read_u8().await.ok()?;
    let length = usize::from(u16::from_be_bytes([first, second]));
    if length == 0 || length > QUERY_BYTES {
        return None;
    }
    let mut packet = vec![0; length];
    reader.read_exact(&mut packet).await.ok()?;
    Some(packet)
}

async fn write_answers(mut writer: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>) {
    while let Some(answer) = queue.recv().await {
        let Ok(length) = u16::try_from(answer.len()) else { return };
        let mut framed = length.to_be_bytes().to_vec();
        framed.extend_from_slice(&answer);
        match timeout(TCP_WRITE_TIMEOUT, writer.write_all(&framed)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return,
        }
    }
}

fn bind_listener(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_send_buffer_size(TCP_SEND_BUFFER)?; // accepted connections inherit it
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
