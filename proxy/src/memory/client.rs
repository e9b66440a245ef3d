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
use rules::limits::Limits;
use tokio::time::timeout;

use crate::egress::roots::Roots;
use crate::http::failure;
use crate::report::metrics;
use crate::report::refusal::Refusal;

/// Interim answers (100, 103) that are read over before the real one.
const MAX_INTERIM: usize = 8;

/// Sends requests.
pub(super) struct Client {
    connector: Connector,
    limits: Limits,
}

/// An answer, whole.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) head: ResponseHeader,
    pub(super) body: Bytes,
}

impl Received {
    /// Bytes of it that the sandbox gets.
    pub(super) fn bytes(&self) -> u64 {
        crate::http::head_bytes(&self.head.headers) + self.body.len() as u64
    }
}

/// A request as it is sent.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) head: RequestHeader,
    pub(super) body: Bytes,
    /// Whether it may be sent again if nobody answers on a connection that was used before.
    pub(super) repeat: Repeat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    Never,
    Once,
}

/// What went wrong, and whether the service can have seen the request.
enum Failed {
    /// A connection that was used before gave no answer at all.
    Stale(Refusal),
    Told(Refusal),
}

impl Client {
    pub(super) fn new(limits: &Limits, roots: &Roots) -> Self {
        let conf = ServerConf {
            ca_file: Some(roots.path()),
            upstream_keepalive_pool_size: usize::try_from(limits.pool_connections)
                .unwrap_or(usize::MAX),
            ..ServerConf::default()
        };
        let options = ConnectorOptions::from_server_conf(&conf);
        Client { connector: Connector::new(Some(options)), limits: *limits }
    }

    /// Sends a request to one of `peers`, which are tried in turn, and reads the answer.
    pub(super) async fn send(
        &self,
        peers: &[HttpPeer],
        request: &Outgoing,
    ) -> Result<Received, Refusal> {
        match timeout(self.limits.memory_answer(), self.exchange(peers, request)).await {
            Ok(received) => received,
            Err(_) => Err(Reason::UpstreamTimeout.into()),
        }
    }

    async fn exchange(&self, peers: &[HttpPeer], request: &Outgoing) -> Result<Received, Refusal> {
        let mut failed = Refusal::from(Reason::UpstreamUnreachable);
        for peer in peers {
            let started = Instant::now();
            let (session, reused) = match self.connector.get_http_session(peer).await {
                Ok(connected) => connected,
                Err(error) => {
                    failed = refusal(&error);
                    continue;
                }
            };
            metrics::upstream(reused, started.elapsed());
            match self.ask(session, peer, request, reused).await {
                Ok(received) => return Ok(received),
                Err(Failed::Stale(_)) if request.repeat == Repeat::Once => {
                    return self.anew(peer, request).await;
                }
                Err(Failed::Stale(refusal) | Failed::Told(refusal)) => return Err(refusal),
            }
        }
        Err(failed)
    }

    /// Sends the request again, on a connection of its own.
    async fn anew(&self, peer: &HttpPeer, request: &Outgoing) -> Result<Received, Refusal> {
        let mut alone = peer.clone();
        alone.group_key = alone.group_key.wrapping_add(1); // finds nothing in the pool
        let connected = self.connector.get_http_session(&alone).await;
        let (session, _) = connected.map_err(|error| refusal(&error))?;
        self.ask(session, peer, request, false).await.map_err(|failed| match failed {
            Failed::Stale(refusal) | Failed::Told(refusal) => refusal,
        })
    }

    async fn ask(
        &self,
        mut session: HttpSession,
        peer: &HttpPeer,
        request: &Outgoing,
        reused: bool,
    ) -> Result<Received, Failed> {
        let early = |error: Box<Error>| match reused {
            true => Failed::Stale(refusal(&error)),
            false => Failed::Told(refusal(&error)),
        };
        session.set_write_timeout(Some(self.limits.idle()));
        session.set_read_timeout(Some(self.limits.memory_answer()));
        session.write_request_header(Box::new(request.head.clone())).await.map_err(early)?;
        session.write_request_body(request.body.clone(), true).await.map_err(early)?;
        session.finish_request_body().await.map_err(early)?;
        session.read_response_header().await.map_err(early)?;
        let head = self.head(&mut session).await.map_err(Failed::Told)?;
        let body = self.body(&mut session).await.map_err(Failed::Told)?;
        if let HttpSession::H1(session) = &mut session {
            session.respect_keepalive(); // as the service wishes
        }
        let idle = Some(self.limits.keep_alive());
        self.connector.release_http_session(session, peer, idle).await;
        Ok(Received { head, body })
    }

    /// The head of the real answer.
    async fn head(&self, session: &mut HttpSession) -> Result<ResponseHeader, Refusal> {
        for _ in 0..MAX_INTERIM {
            match session.response_header() {
                Some(head) if head.status.as_u16() == 101 => break,
                Some(head) if head.status.is_informational() => {}
                Some(head) => return Ok(head.clone()),
                None => break,
            }
            session.read_response_header().await.map_err(|error| refusal(&error))?;
        }
        Err(Reason::UpstreamBroke.into())
    }

    async fn body(&self, session: &mut HttpSession) -> Result<Bytes, Refusal> {
        let mut all = BytesMut::new();
        while let Some(bytes) =
            session.read_response_body().await.map_err(|error| refusal(&error))?
        {
            if (all.len() + bytes.len()) as u64 > self.limits.memory_answer_bytes {
                let why = "it is longer than `memory_answer_bytes`";
                return Err(Refusal::from(Reason::AnswerUnchecked).because(why));
            }
            all.extend_from_slice(&bytes);
        }
        Ok(all.freeze())
    }
}

/// Whatever goes wrong here goes wrong between us and the service.
fn refusal(error: &Error) -> Refusal {
    failure(error).unwrap_or_else(|| Reason::UpstreamBroke.into())
}
