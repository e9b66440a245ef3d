//! Connections to origin servers, each counted in the quota of its sandbox until it is closed: a descriptor, a source
//! port, memory, and a place in the `connections` budget while it is in use.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use pingora_core::ErrorType;
use pingora_core::connectors::l4::Connect;
use pingora_core::prelude::{Error, Result as PingoraResult};
use pingora_core::protocols::l4::socket::SocketAddr as PeerAddress;
use pingora_core::protocols::l4::stream::Stream;
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::protocols::{Digest, GetProxyDigest};
use pingora_http::ResponseHeader;
use rules::budget::BudgetKind;
use rules::ids::SandboxId;
use rules::quota::Resource;
use rules::{Reason, RuleSet};
use tokio::net::{TcpSocket, TcpStream};

use crate::egress::dial::{self, DialRace};
use crate::quota::cost::{DIALLED_BYTES, MAX_WINDOW, MIN_WINDOW};
use crate::quota::{DialledUse, PortReservation, Quotas, Reservation};
use crate::report::refusal::Refusal;

/// A stream gets this part of the connection's window, so that a few streams that nobody reads do not block the others.
const STREAM_WINDOW_PART: u64 = 8;
/// Bytes that may wait unsent in a socket, also of a client that does not read; the rest waits with the sender.
pub(crate) const UNSENT_BYTES: u32 = 128 << 10;

/// The type of a Pingora error whose cause is a [`Refusal`].
const REFUSED_DIAL: ErrorType = ErrorType::Custom("refused dial");

/// Dials one host for one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct CountedDialler {
    pub(crate) quotas: Arc<Quotas>,
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) sandbox: SandboxId,
    pub(crate) race: DialRace,
    /// The firewall mark of our own connections.
    pub(crate) mark: Option<u32>,
    /// Bytes of HTTP/2 window to reserve while a connection is in use; 0 for HTTP/1 and tunnels.
    pub(crate) window: Arc<AtomicU64>,
}

/// What a dialled connection holds. It lives as long as its socket.
#[derive(Debug)]
pub(crate) struct DialledConnection {
    dialler: CountedDialler,
    address: SocketAddr,
    _reserved: DialReservation,
    in_use: Mutex<Weak<DialledUse>>,
    /// Its use by the request that dialled it, until that claims it.
    unclaimed: Mutex<Option<Arc<DialledUse>>>,
}

/// What one attempt to connect reserves, and the connection after it.
#[derive(Debug)]
struct DialReservation {
    _descriptor: Reservation,
    port: PortReservation,
    _buffers: Reservation,
}

impl CountedDialler {
    /// Connects to the address that answers first. A race counts once in the `connections` budget.
    ///
    /// # Errors
    ///
    /// Returns a refusal if the sandbox has no quota left, the `connections` budget is spent, or no address accepts the
    /// connection.
    pub(crate) async fn dial(&self) -> Result<(TcpStream, DialledConnection), Refusal> {
        let in_use = Arc::new(self.begin_use()?);
        self.race.set_winner(None);
        let (stream, address, reserved) =
            dial::race(self.race.addresses(), |address| self.attempt(address)).await?;
        self.race.set_winner(Some(address));
        let dialled = DialledConnection {
            dialler: self.clone(),
            address,
            _reserved: reserved,
            in_use: Mutex::new(Arc::downgrade(&in_use)),
            unclaimed: Mutex::new(Some(in_use)),
        };
        Ok((stream, dialled))
    }

    /// Connects to one address, with its own reservations.
    async fn attempt(
        &self,
        address: SocketAddr,
    ) -> Result<(TcpStream, SocketAddr, DialReservation), Refusal> {
        let (quotas, sandbox) = (&self.quotas, &self.sandbox);
        let mut reserved = DialReservation {
            _descriptor: quotas.reserve(Resource::Descriptors, sandbox, 1)?,
            _buffers: quotas.reserve(Resource::Buffers, sandbox, DIALLED_BYTES)?,
            port: quotas.reserve_port(sandbox, address)?,
        };
        let connected = connect(address, self.mark).await;
        let stream =
            connected.map_err(|error| dial_refusal(&error).with_detail(format!("{address}: {error}")))?;
        reserved.port.set_connected();
        Ok((stream, address, reserved))
    }

    fn begin_use(&self) -> Result<DialledUse, Refusal> {
        let rules = self.rules.load();
        let sandbox = rules.sandboxes().get(&self.sandbox).ok_or(Reason::UnknownSandbox)?;
        let budget = rules.budgets_of(sandbox).limit(BudgetKind::Connections);
        self.quotas.use_dialled(&self.sandbox, budget, self.window.load(Ordering::Relaxed))
    }
}

/// The windows of a new HTTP/2 connection to an origin server, in bytes: of the connection, and of one stream.
pub(crate) fn http2_windows(quotas: &Quotas, sandbox: &SandboxId) -> (u32, u32) {
    let window = quotas.window(sandbox, MAX_WINDOW);
    let stream = (window / STREAM_WINDOW_PART).max(MIN_WINDOW);
    (u32::try_from(window).unwrap_or(u32::MAX), u32::try_from(stream).unwrap_or(u32::MAX))
}

#[async_trait]
impl Connect for CountedDialler {
    /// Pingora's address only names the peer: the addresses that race are the dialler's own.
    async fn connect(&self, _: &PeerAddress) -> PingoraResult<Stream> {
        let (stream, dialled) = self.dial().await.map_err(refused_dial)?;
        let mut stream = Stream::from(stream);
        // The digest goes where the socket goes, through TLS and pools, and drops with it.
        let placeholder = ResponseHeader::build_no_case(200, None)?;
        stream.set_proxy_digest(ProxyDigest::new(Box::new(placeholder), Some(Box::new(Arc::new(dialled)))));
        Ok(stream)
    }
}

impl DialledConnection {
    /// Finds what Pingora's connection holds.
    pub(crate) fn of(digest: Option<&Digest>) -> Option<&Arc<Self>> {
        let data = digest?.proxy_digest.as_ref()?.user_data.as_ref()?;
        data.downcast_ref::<Arc<Self>>()
    }

    /// The address it is connected to.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Counts the connection as in use until the result is dropped. Requests on one HTTP/2 connection count once.
    pub(crate) fn claim(&self) -> Result<Arc<DialledUse>, Refusal> {
        if let Some(in_use) = sys::lock(&self.unclaimed).take() {
            return Ok(in_use);
        }
        let mut in_use = sys::lock(&self.in_use);
        if let Some(in_use) = in_use.upgrade() {
            return Ok(in_use);
        }
        let fresh = Arc::new(self.dialler.begin_use()?);
        *in_use = Arc::downgrade(&fresh);
        Ok(fresh)
    }

    /// Gives the window back, for good: the connection turned out to speak HTTP/1.
    pub(crate) fn release_window(&self, in_use: &DialledUse) {
        self.dialler.window.store(0, Ordering::Relaxed);
        in_use.release_window();
    }
}

async fn connect(address: SocketAddr, mark: Option<u32>) -> io::Result<TcpStream> {
    let socket = match address.ip() {
        IpAddr::V4(_) => TcpSocket::new_v4(),
        IpAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    socket.set_nodelay(true)?;
    let socket_ref = socket2::SockRef::from(&socket);
    socket_ref.set_tcp_notsent_lowat(UNSENT_BYTES)?;
    mark.map_or(Ok(()), |mark| socket_ref.set_mark(mark))?;
    socket.connect(address).await
}

fn dial_refusal(error: &io::Error) -> Refusal {
    let kind = error.kind();
    let reason = if kind == io::ErrorKind::AddrNotAvailable {
        Reason::OutOfPorts
    } else if kind == io::ErrorKind::TimedOut {
        Reason::UpstreamTimeout
    } else {
        Reason::UpstreamUnreachable
    };
    reason.into()
}

fn refused_dial(refusal: Refusal) -> Box<Error> {
    Error::because(REFUSED_DIAL, "cannot dial", refusal)
}

/// Returns the refusal inside a Pingora error, if our dialler made it.
pub(crate) fn refusal_of_dial(error: &Error) -> Option<Refusal> {
    error.root_cause().downcast_ref::<Refusal>().cloned()
}
