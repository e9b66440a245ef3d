//! Our own client towards memory services: one request in our own framing, one answer read whole within its
//! bounds. A connection is used again only after an answer that ended as it should, and only for its sandbox.

use std::time::Instant;

use bytes::{Bytes, BytesMut};
use pingora_core::connectors::ConnectorOptions;
use pingora_core::connectors::http::Connector;
use pingora_core::prelude::{Error, HttpPeer};
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::server::configuration::ServerConf;
use pingora_http::{RequestHeader, ResponseHeader};
use rules::Reason;
use rules::limits::TrafficLimits;
use tokio::time::timeout;

use crate::egress::roots::UpstreamRoots;
use crate::egress::upstream::{head_bytes, refusal_from_error};
use crate::report::metrics;
use crate::report::refusal::Refusal;

/// Interim answers (100, 103) that are read over before the real one.
const MAX_INTERIM: usize = 8;

/// Sends requests.
pub(super) struct MemoryClient {
    connector: Connector,
    limits: TrafficLimits,
}

/// An answer, whole.
#[derive(Debug)]
pub(super) struct MemoryResponse {
    pub(super) head: ResponseHeader,
    pub(super) body: Bytes,
}

impl MemoryResponse {
    /// Bytes of it that the sandbox gets.
    pub(super) fn bytes(&self) -> u64 {
        head_bytes(&self.head.headers) + self.body.len() as u64
    }
}

/// A request as it is sent.
#[derive(Debug)]
pub(super) struct ServiceRequest {
    pub(super) head: RequestHeader,
    pub(super) body: Bytes,
    /// Whether it may be sent again if nobody answers on a connection that was used before.
    pub(super) repeat: RetryPolicy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryPolicy {
    Never,
    Once,
}

/// What went wrong, and whether the service can have seen the request.
enum CallError {
    /// A connection that was used before gave no answer at all.
    Stale(Refusal),
    Fatal(Refusal),
}

impl MemoryClient {
    pub(super) fn new(limits: &TrafficLimits, roots: &UpstreamRoots) -> Self {
        let conf = ServerConf {
            ca_file: Some(roots.path()),
            upstream_keepalive_pool_size: usize::try_from(limits.pool_connections)
                .unwrap_or(usize::MAX),
            ..ServerConf::default()
        };
        let options = ConnectorOptions::from_server_conf(&conf);
        MemoryClient { connector: Connector::new(Some(options)), limits: *limits }
    }

    /// Sends a request to one of `peers`, which are tried in turn, and reads the answer. `before_dial` gets the index of
    /// each peer before it is tried, and may refuse it.
    pub(super) async fn send(
        &self,
        peers: &[HttpPeer],
        request: &ServiceRequest,
        before_dial: impl FnMut(usize) -> Result<(), Refusal>,
    ) -> Result<MemoryResponse, Refusal> {
        let tried = self.try_peers(peers, request, before_dial);
        match timeout(self.limits.memory_answer(), tried).await {
            Ok(received) => received,
            Err(_) => Err(Reason::UpstreamTimeout.into()),
        }
    }

    async fn try_peers(
        &self,
        peers: &[HttpPeer],
        request: &ServiceRequest,
        mut before_dial: impl FnMut(usize) -> Result<(), Refusal>,
    ) -> Result<MemoryResponse, Refusal> {
        let mut failed = Refusal::from(Reason::UpstreamUnreachable);
        for (index, peer) in peers.iter().enumerate() {
            before_dial(index)?;
            let started = Instant::now();
            let (session, reused) = match self.connector.get_http_session(peer).await {
                Ok(connected) => connected,
                Err(error) => {
                    failed = to_refusal(&error);
                    continue;
                }
            };
            metrics::count_upstream(reused, started.elapsed());
            match self.round_trip(session, peer, request, reused).await {
                Ok(received) => return Ok(received),
                Err(CallError::Stale(_)) if request.repeat == RetryPolicy::Once => {
                    return self.retry_fresh(peer, request).await;
                }
                Err(CallError::Stale(refusal) | CallError::Fatal(refusal)) => return Err(refusal),
            }
        }
        Err(failed)
    }

    /// Sends the request again, on a connection of its own.
    async fn retry_fresh(
        &self,
        peer: &HttpPeer,
        request: &ServiceRequest,
    ) -> Result<MemoryResponse, Refusal> {
        let mut alone = peer.clone();
        alone.group_key = alone.group_key.wrapping_add(1); // finds nothing in the pool
        let connected = self.connector.get_http_session(&alone).await;
        let (session, _) = connected.map_err(|error| to_refusal(&error))?;
        self.round_trip(session, peer, request, false).await.map_err(|failed| match failed {
            CallError::Stale(refusal) | CallError::Fatal(refusal) => refusal,
        })
    }

    async fn round_trip(
        &self,
        mut session: HttpSession,
        peer: &HttpPeer,
        request: &ServiceRequest,
        reused: bool,
    ) -> Result<MemoryResponse, CallError> {
        let early = |error: Box<Error>| match reused {
            true => CallError::Stale(to_refusal(&error)),
            false => CallError::Fatal(to_refusal(&error)),
        };
        session.set_write_timeout(Some(self.limits.idle()));
        session.set_read_timeout(Some(self.limits.memory_answer()));
        session.write_request_header(Box::new(request.head.clone())).await.map_err(early)?;
        session.write_request_body(request.body.clone(), true).await.map_err(early)?;
        session.finish_request_body().await.map_err(early)?;
        session.read_response_header().await.map_err(early)?;
        let head = self.read_head(&mut session).await.map_err(CallError::Fatal)?;
        let body = self.read_body(&mut session).await.map_err(CallError::Fatal)?;
        if let HttpSession::H1(session) = &mut session {
            session.respect_keepalive(); // as the service wishes
        }
        let idle = Some(self.limits.keep_alive());
        self.connector.release_http_session(session, peer, idle).await;
        Ok(MemoryResponse { head, body })
    }

    /// The head of the real answer.
    async fn read_head(&self, session: &mut HttpSession) -> Result<ResponseHeader, Refusal> {
        for _ in 0..MAX_INTERIM {
            match session.response_header() {
                Some(head) if head.status.as_u16() == 101 => break,
                Some(head) if head.status.is_informational() => {}
                Some(head) => return Ok(head.clone()),
                None => break,
            }
            session.read_response_header().await.map_err(|error| to_refusal(&error))?;
        }
        Err(Reason::UpstreamBroke.into())
    }

    async fn read_body(&self, session: &mut HttpSession) -> Result<Bytes, Refusal> {
        let mut all = BytesMut::new();
        while let Some(bytes) =
            session.read_response_body().await.map_err(|error| to_refusal(&error))?
        {
            if (all.len() + bytes.len()) as u64 > self.limits.memory_answer_bytes {
                let why = "it is longer than `memory_answer_bytes`";
                return Err(Refusal::from(Reason::AnswerUnchecked).with_detail(why));
            }
            all.extend_from_slice(&bytes);
        }
        Ok(all.freeze())
    }
}

/// Whatever goes wrong here goes wrong between us and the service.
fn to_refusal(error: &Error) -> Refusal {
    refusal_from_error(error).unwrap_or_else(|| Reason::UpstreamBroke.into())
}
