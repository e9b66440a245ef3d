//! WebSocket: a request that asks to upgrade, sent on a connection of its own, and the relay after the 101.
//!
//! Pingora could carry this too, but its two halves learn of the end of the request and of the 101 in either order. If
//! the 101 is first, it takes the end of the request for the end of the upgraded stream, and closes. Here one task sends
//! the request, passes the 101 on, and only then relays: bytes that either side sent early wait in our buffers, in
//! order. Everything else is shared with other requests: the phases of [`RequestFilter`] choose the peer, rewrite the
//! request and check the response, and [`RequestMonitor`](super::RequestMonitor) cuts what is revoked, idle or too old.

use std::pin::pin;

use audit::ByteCount;
use bytes::{Bytes, BytesMut};
use http::{Method, StatusCode, Version};
use pingora_core::ErrorType;
use pingora_core::prelude::{Error, Result};
use pingora_core::protocols::Stream;
use pingora_core::protocols::http::v1::client::HttpSession;
use pingora_http::ResponseHeader;
use pingora_proxy::{ProxyHttp, Session};
use rules::budget::UsageKind;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};

use super::client_stream::{BufferedStream, PingoraStream};
use super::context::{DepartedRequest, RequestContext, RequestState, internal};
use super::fields::strip_request_hops;
use super::filter::RequestFilter;
use crate::budget::ledger::Charges;
use crate::credential::scrub::{AnswerScrubber, ResponseScrubber};
use crate::egress::departure::Departure;
use crate::report::refusal::Refusal;

/// Bytes read at a time from either side.
const READ_BYTES: usize = 16 << 10;

/// Why a relay stopped before both sides had closed.
enum RelayError {
    Refused(Refusal),
    ClientBroke,
    OriginBroke,
}

/// Whether a request asks for WebSocket in the only form that has one meaning: GET, HTTP/1.1, no body.
pub(super) fn is_websocket(session: &mut Session) -> bool {
    let head = session.req_header();
    let mut protocols = head.headers.get_all("upgrade").iter();
    let websocket = protocols.next().is_some_and(|name| name.as_bytes().eq_ignore_ascii_case(b"websocket"));
    let alone = protocols.next().is_none();
    let plain = head.method == Method::GET && head.version == Version::HTTP_11;
    websocket && alone && plain && session.as_mut().is_body_empty()
}

impl RequestFilter {
    /// Sends a request for an upgrade, and serves the client until either the response or the upgraded connection ends.
    pub(super) async fn upgrade(&self, session: &mut Session, request: &mut RequestContext) -> Result<()> {
        session.set_keepalive(None);
        let mut head = session.req_header().clone();
        strip_request_hops(&mut head);
        let mut origin = self.connect(session, request).await?;
        self.upstream_request_filter(session, &mut head, request).await?;
        head.insert_header("Connection", "Upgrade")?;
        head.insert_header("Upgrade", "websocket")?;
        origin.write_request_header(Box::new(head)).await.map_err(|error| error.into_up())?;
        let response = loop {
            let client = session.stream().ok_or_else(internal)?;
            let read = tokio::select! {
                read = origin.read_resp_header_parts() => read,
                () = PingoraStream::wait_closed(client) => {
                    return Err(Error::new_down(ErrorType::ConnectionClosed));
                }
            };
            let mut response = read.map_err(|error| error.into_up())?;
            let interim =
                response.status.is_informational() && response.status != StatusCode::SWITCHING_PROTOCOLS;
            if !interim {
                break response;
            }
            self.response_filter(session, &mut response, request).await?;
            session.write_response_header(response, false).await.map_err(|error| error.into_down())?;
        };
        if response.status == StatusCode::SWITCHING_PROTOCOLS {
            self.switch(session, origin, response, request).await
        } else {
            self.pass_response(session, origin, response, request).await
        }
    }

    /// Connects to the origin server. The connection is never shared.
    async fn connect(&self, session: &mut Session, request: &mut RequestContext) -> Result<HttpSession> {
        let (peer, stream) = loop {
            let peer = self.upstream_peer(session, request).await?;
            match self.connector.new_stream(&*peer).await {
                Ok(stream) => break (peer, stream),
                Err(error) => {
                    let error = self.fail_to_connect(session, &peer, request, error);
                    if !error.retry() {
                        return Err(error.into_up());
                    }
                }
            }
        };
        let mut origin = HttpSession::new(stream);
        origin.read_timeout = Some(self.shared.limits.first_byte());
        origin.write_timeout = Some(self.shared.limits.idle());
        self.connected_to_upstream(session, false, &peer, -1, Some(origin.digest()), request).await?;
        Ok(origin)
    }

    /// Passes the 101 on, and relays until both sides have closed.
    async fn switch(
        &self,
        session: &mut Session,
        mut origin: HttpSession,
        mut response: Box<ResponseHeader>,
        request: &mut RequestContext,
    ) -> Result<()> {
        request.state()?.upgraded = true;
        self.response_filter(session, &mut response, request).await?;
        session.write_response_header(response, false).await.map_err(|error| error.into_down())?;
        // What the origin server sent right behind its 101 is in the session's buffer, and the first read returns it.
        let early = tokio::select! {
            biased;
            read = origin.read_body_bytes() => read.map_err(|error| error.into_up())?,
            () = std::future::ready(()) => None,
        };
        let client = session.stream().and_then(PingoraStream::take).ok_or_else(internal)?;
        let state = request.state()?;
        let RequestState { departed: Some(departed), record: Some(record), .. } = state else {
            return Err(internal());
        };
        let DepartedRequest { departure: Departure { charges, .. }, scrubber, .. } = departed;
        let relay = Relay { byte_count: &record.byte_count(), charges };
        let scrubber = scrubber.as_mut().map(AnswerScrubber::text);
        match relay.run(client, origin.into_inner(), early, scrubber).await {
            Ok(()) => Ok(()),
            Err(RelayError::Refused(refusal)) => Err(state.fail(refusal)),
            Err(RelayError::ClientBroke) => Err(Error::new_down(ErrorType::ConnectionClosed)),
            Err(RelayError::OriginBroke) => Err(Error::new_up(ErrorType::ConnectionClosed)),
        }
    }

    /// Passes the response of an origin server that does not switch.
    async fn pass_response(
        &self,
        session: &mut Session,
        mut origin: HttpSession,
        mut response: Box<ResponseHeader>,
        request: &mut RequestContext,
    ) -> Result<()> {
        let fields = &response.headers;
        let framed = fields.contains_key("transfer-encoding") || fields.contains_key("content-length");
        if !framed && !origin.is_body_done() {
            response.set_version(Version::HTTP_11);
            response.insert_header("Transfer-Encoding", "chunked")?;
        }
        self.response_filter(session, &mut response, request).await?;
        session.write_response_header(response, false).await.map_err(|error| error.into_down())?;
        loop {
            let mut body = origin.read_body_bytes().await.map_err(|error| error.into_up())?;
            let last = body.is_none();
            self.response_body_filter(session, &mut body, last, request)?;
            let written = session.write_response_body(body, last).await;
            written.map_err(|error| error.into_down())?;
            if last {
                return Ok(());
            }
        }
    }
}

/// Relays an upgraded connection: counted, charged, and scrubbed on its way down.
struct Relay<'a> {
    byte_count: &'a ByteCount,
    charges: &'a Charges,
}

impl Relay<'_> {
    /// Relays until both sides have closed. Each closed side closes the other's write half.
    async fn run(
        &self,
        client: BufferedStream,
        origin: Stream,
        early: Option<Bytes>,
        scrubber: Option<&mut ResponseScrubber>,
    ) -> Result<(), RelayError> {
        let (from_client, to_client) = split(client);
        let (from_origin, to_origin) = split(origin);
        let mut up = pin!(self.relay_up(from_client, to_origin));
        let mut down = pin!(self.relay_down(from_origin, to_client, early, scrubber));
        let rest = tokio::select! {
            ended = &mut up => {
                ended?;
                down.await
            }
            ended = &mut down => {
                ended?;
                up.await
            }
        };
        match rest {
            Err(RelayError::Refused(refusal)) => Err(RelayError::Refused(refusal)),
            // One side had closed already, so the other may go as it likes.
            Ok(()) | Err(RelayError::ClientBroke | RelayError::OriginBroke) => Ok(()),
        }
    }

    async fn relay_up(
        &self,
        mut client: impl AsyncRead + Unpin,
        mut origin: impl AsyncWrite + Unpin,
    ) -> Result<(), RelayError> {
        let mut buffer = BytesMut::with_capacity(READ_BYTES);
        while client.read_buf(&mut buffer).await.map_err(|_| RelayError::ClientBroke)? > 0 {
            self.charge(UsageKind::Upload, buffer.len()).await?;
            self.byte_count.add_sent(buffer.len() as u64);
            origin.write_all(&buffer).await.map_err(|_| RelayError::OriginBroke)?;
            origin.flush().await.map_err(|_| RelayError::OriginBroke)?;
            buffer.clear();
        }
        origin.shutdown().await.map_err(|_| RelayError::OriginBroke)
    }

    async fn relay_down(
        &self,
        mut origin: impl AsyncRead + Unpin,
        mut client: impl AsyncWrite + Unpin,
        early: Option<Bytes>,
        mut scrubber: Option<&mut ResponseScrubber>,
    ) -> Result<(), RelayError> {
        let mut next = early.unwrap_or_default();
        let mut buffer = BytesMut::with_capacity(READ_BYTES);
        let mut over = false;
        loop {
            let bytes = match &mut scrubber {
                Some(scrubber) => scrubber.scrub(Some(&next), over),
                None => next,
            };
            if !bytes.is_empty() {
                self.charge(UsageKind::Download, bytes.len()).await?;
                self.byte_count.add_received(bytes.len() as u64);
                client.write_all(&bytes).await.map_err(|_| RelayError::ClientBroke)?;
            }
            client.flush().await.map_err(|_| RelayError::ClientBroke)?;
            if over {
                return client.shutdown().await.map_err(|_| RelayError::ClientBroke);
            }
            drop(bytes);
            buffer.reserve(READ_BYTES); // reuses the memory: nobody holds the last bytes
            over = origin.read_buf(&mut buffer).await.map_err(|_| RelayError::OriginBroke)? == 0;
            next = buffer.split().freeze();
        }
    }

    async fn charge(&self, usage: UsageKind, bytes: usize) -> Result<(), RelayError> {
        let charged = self.charges.charge(usage, bytes as u64).await;
        charged.map_err(|exhausted| RelayError::Refused(exhausted.into()))
    }
}
