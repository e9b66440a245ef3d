//! The client for memory services: sends one request, and reads one answer completely within limits. A connection is
//! reused only after a complete answer, and only for the same sandbox.
//!
//! The guard needs a request and a response in memory, which Pingora's proxy phases do not offer: they stream. This
//! client therefore calls the layer below, Pingora's `Connector`, which is what the proxy itself connects with. So
//! everything that makes an upstream connection safe is shared with other requests: the peer from `http_peer`
//! (admitted address, name to verify, pool group of the sandbox, socket mark, timeouts), the trust roots, the TLS
//! handshake, the HTTP/1 framing and the keep-alive pool. Nothing of HTTP is implemented here. What remains is policy:
//! limits on interim responses, on the body and on the total time, trying the next address, and one retry of reads.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use pingora_core::connectors::ConnectorOptions;
use pingora_core::connectors::http::Connector;
use pingora_core::prelude::{Error, HttpPeer};
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::server::configuration::ServerConf;
use pingora_http::{RequestHeader, ResponseHeader};
use rules::Reason;
use rules::limits::TrafficLimits;
use tokio::time::timeout;

use crate::egress::connect::DialledConnection;
use crate::egress::departure::Departure;
use crate::egress::dial::DialRace;
use crate::egress::roots::UpstreamRoots;
use crate::egress::upstream::{
    check_answer_fields, check_interim_answers, refusal_from_error, request_bytes, response_bytes,
};
use crate::quota::{Reservation, ReservedBuffer};
use crate::report::metrics;
use crate::report::refusal::Refusal;

/// Sends requests to memory services.
pub(super) struct MemoryClient {
    connector: Connector,
    limits: TrafficLimits,
}

/// A complete answer.
#[derive(Debug)]
pub(super) struct MemoryResponse {
    pub(super) head: ResponseHeader,
    pub(super) body: Bytes,
}

impl MemoryResponse {
    /// Bytes that the service sent.
    pub(super) fn bytes(&self) -> u64 {
        response_bytes(&self.head) + self.body.len() as u64
    }
}

/// A request to a memory service.
pub(super) struct ServiceRequest<'a> {
    pub(super) head: RequestHeader,
    pub(super) body: Bytes,
    /// Whether to send it again if a reused connection turns out to be stale.
    pub(super) retry: RetryPolicy,
    /// Counts and charges each time it is sent.
    pub(super) departure: &'a Departure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryPolicy {
    Never,
    Once,
}

/// Why a round trip failed, and whether a new connection may help.
enum CallError {
    /// A reused connection gave no response at all: the service may have closed it while it was idle.
    Stale(Refusal),
    Fatal(Refusal),
}

impl MemoryClient {
    pub(super) fn new(limits: &TrafficLimits, roots: &UpstreamRoots) -> Self {
        let conf = ServerConf {
            ca_file: Some(roots.path()),
            upstream_keepalive_pool_size: usize::try_from(limits.pool_connections).unwrap_or(usize::MAX),
            ..ServerConf::default()
        };
        let options = ConnectorOptions::from_server_conf(&conf);
        MemoryClient { connector: Connector::new(Some(options)), limits: *limits }
    }

    /// Sends a request to the address of `race` that answers first, and reads the answer. `set_dialled` gets the address
    /// of each connection before it is used, and may refuse it.
    pub(super) async fn send(
        &self,
        race: DialRace,
        peer: impl Fn(&DialRace) -> Option<Box<HttpPeer>>,
        request: &ServiceRequest<'_>,
        set_dialled: impl FnMut(SocketAddr) -> Result<(), Refusal>,
        buffers: &mut Reservation,
    ) -> Result<MemoryResponse, Refusal> {
        let tried = self.try_addresses(race, peer, request, set_dialled, buffers);
        match timeout(self.limits.memory_answer(), tried).await {
            Ok(received) => received,
            Err(_) => Err(Reason::UpstreamTimeout.into()),
        }
    }

    async fn try_addresses(
        &self,
        mut race: DialRace,
        peer: impl Fn(&DialRace) -> Option<Box<HttpPeer>>,
        request: &ServiceRequest<'_>,
        mut set_dialled: impl FnMut(SocketAddr) -> Result<(), Refusal>,
        buffers: &mut Reservation,
    ) -> Result<MemoryResponse, Refusal> {
        loop {
            let peer = peer(&race).ok_or(Reason::NoAddress)?;
            let started = Instant::now();
            let (session, reused) = match self.connector.get_http_session(&*peer).await {
                Ok(connected) => connected,
                Err(_) if race.next_try() => continue,
                Err(error) => return Err(to_refusal(&error)),
            };
            metrics::count_upstream(reused, started.elapsed());
            set_dialled(address_of(&session)?)?;
            return match self.round_trip(session, &peer, request, reused, buffers).await {
                Ok(received) => Ok(received),
                Err(CallError::Stale(_)) if request.retry == RetryPolicy::Once => {
                    self.retry_fresh(&peer, request, set_dialled, buffers).await
                }
                Err(CallError::Stale(refusal) | CallError::Fatal(refusal)) => Err(refusal),
            };
        }
    }

    /// Sends the request again, on a new connection.
    async fn retry_fresh(
        &self,
        peer: &HttpPeer,
        request: &ServiceRequest<'_>,
        mut set_dialled: impl FnMut(SocketAddr) -> Result<(), Refusal>,
        buffers: &mut Reservation,
    ) -> Result<MemoryResponse, Refusal> {
        let mut unpooled = peer.clone();
        // The connector has no call that skips the pool; no connection is ever released under this key.
        unpooled.group_key = unpooled.group_key.wrapping_add(1);
        let connected = self.connector.get_http_session(&unpooled).await;
        let (session, _) = connected.map_err(|error| to_refusal(&error))?;
        set_dialled(address_of(&session)?)?;
        self.round_trip(session, peer, request, false, buffers).await.map_err(|error| match error {
            CallError::Stale(refusal) | CallError::Fatal(refusal) => refusal,
        })
    }

    async fn round_trip(
        &self,
        mut session: HttpSession,
        peer: &HttpPeer,
        request: &ServiceRequest<'_>,
        reused: bool,
        buffers: &mut Reservation,
    ) -> Result<MemoryResponse, CallError> {
        let in_use = DialledConnection::of(session.digest()).map(|connection| connection.claim());
        let _in_use = in_use.transpose().map_err(CallError::Fatal)?;
        let early = |error: Box<Error>| match reused {
            true => CallError::Stale(to_refusal(&error)),
            false => CallError::Fatal(to_refusal(&error)),
        };
        let bytes = request_bytes(&request.head) + request.body.len() as u64;
        let counted = request.departure.count_send(bytes).await;
        counted.map_err(|exhausted| CallError::Fatal(exhausted.into()))?;
        session.set_write_timeout(Some(self.limits.idle()));
        session.set_read_timeout(Some(self.limits.memory_answer()));
        session.write_request_header(Box::new(request.head.clone())).await.map_err(early)?;
        session.write_request_body(request.body.clone(), true).await.map_err(early)?;
        session.finish_request_body().await.map_err(early)?;
        session.read_response_header().await.map_err(early)?;
        let head = self.read_head(&mut session).await.map_err(CallError::Fatal)?;
        check_answer_fields(&head.headers, &self.limits).map_err(CallError::Fatal)?;
        let body = self.read_body(&mut session, buffers).await.map_err(CallError::Fatal)?;
        if let HttpSession::H1(session) = &mut session {
            session.respect_keepalive(); // the service may have asked to close
        }
        let idle = Some(self.limits.keep_alive());
        self.connector.release_http_session(session, peer, idle).await;
        Ok(MemoryResponse { head, body })
    }

    /// Returns the final response head, after any interim ones.
    async fn read_head(&self, session: &mut HttpSession) -> Result<ResponseHeader, Refusal> {
        let mut interim = 0;
        loop {
            match session.response_header() {
                Some(head) if head.status.as_u16() == 101 => break,
                Some(head) if head.status.is_informational() => interim += 1,
                Some(head) => return Ok(head.clone()),
                None => break,
            }
            check_interim_answers(interim, &self.limits)?;
            session.read_response_header().await.map_err(|error| to_refusal(&error))?;
        }
        Err(Reason::UpstreamBroke.into())
    }

    async fn read_body(
        &self,
        session: &mut HttpSession,
        buffers: &mut Reservation,
    ) -> Result<Bytes, Refusal> {
        let (limit, mut all) = (self.limits.memory_answer_bytes, ReservedBuffer::new(buffers));
        while let Some(bytes) = session.read_response_body().await.map_err(|error| to_refusal(&error))? {
            if all.len() + bytes.len() as u64 > limit {
                let why = "the answer is longer than `memory_answer_bytes`";
                return Err(Refusal::from(Reason::AnswerUnchecked).with_detail(why));
            }
            all.extend(&bytes, limit)?;
        }
        Ok(all.freeze())
    }
}

/// The address that a session is connected to.
fn address_of(session: &HttpSession) -> Result<SocketAddr, Reason> {
    DialledConnection::of(session.digest()).map(|dialled| dialled.address()).ok_or(Reason::Internal)
}

/// The refusal for a Pingora error. All errors here are the upstream's; there is no client on this side.
fn to_refusal(error: &Error) -> Refusal {
    refusal_from_error(error).unwrap_or_else(|| Reason::UpstreamBroke.into())
}
