//! HTTP/1: our own loop over the requests of a connection. It reads and checks each head, under a deadline and a size
//! limit, before Pingora sees it.
//!
//! Pingora could read requests from the stream itself. We read the head first for four reasons:
//!
//! - Pingora's parser is lenient where servers disagree. It accepts lines that end with a bare LF, escapes bytes that
//!   are illegal in a target, merges repeated lengths, and drops `Content-Length` beside `Transfer-Encoding`. By the
//!   time a filter runs, the evidence is gone. [`head`] sees the original bytes and refuses them.
//! - Pingora answers what it does refuse with a bare 400 before any filter runs, so there would be no reason, no
//!   record and no explanation for the client.
//! - Pingora's timeout applies to each read and its limit is one megabyte, so a client could send a head
//!   one byte at a time. Ours is one deadline for the whole head, and `head_bytes`.
//! - Between two requests no Pingora session exists, so an idle keep-alive connection costs little more than its
//!   socket.
//!
//! The checked bytes then go in front of the stream ([`PingoraStream`]), and Pingora parses them again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use pingora_core::apps::HttpServerApp;
use pingora_core::protocols::http::ServerSession;
use rules::Reason;
use rules::facts::HttpVersion;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::{timeout, timeout_at};

use super::client_stream::{ClientStream, PingoraStream};
use super::{HttpConnection, HttpEngine, RequestMonitor, RequestScope};
use crate::http::head::{self, BodyFraming, RequestHead};
use crate::report::attempted;
use crate::report::refusal::{self, BodyAudience, LINGER, Refusal};

/// Buffer space reserved before each read of a head.
const READ_BYTES: usize = 4096;

/// The outcome of waiting for the next request.
enum WaitOutcome {
    /// The client closed or was idle for too long, the connection reached its deadline, or the program stops.
    Over,
    Request,
}

impl HttpEngine {
    pub(super) async fn serve_http1(
        &self,
        stream: ClientStream,
        connection: &Arc<HttpConnection>,
        stop: &watch::Receiver<bool>,
    ) {
        let mut idle_limit = self.shared.limits.first_bytes();
        let mut next = Some((stream, BytesMut::new()));
        while let Some((mut stream, mut buffered)) = next.take() {
            match self.wait_request(&mut stream, &mut buffered, idle_limit, connection, stop).await {
                WaitOutcome::Over => break,
                WaitOutcome::Request => {}
            }
            idle_limit = self.shared.limits.keep_alive();
            next = match self.read_head(&mut stream, &mut buffered, connection).await {
                Ok(framing) => {
                    Box::pin(self.serve_request(stream, buffered, framing, connection, stop)).await
                }
                Err(refusal) => {
                    Box::pin(self.refuse_head(stream, &buffered, connection, &refusal)).await;
                    None
                }
            };
        }
    }

    /// Waits for the first byte of a request, behind an empty line if there is one. Allocates no buffer before it
    /// arrives: most connections wait here.
    async fn wait_request(
        &self,
        stream: &mut ClientStream,
        buffered: &mut BytesMut,
        idle_limit: Duration,
        connection: &HttpConnection,
        stop: &watch::Receiver<bool>,
    ) -> WaitOutcome {
        let mut stop = stop.clone();
        tokio::select! {
            biased; // a request that was sent ahead gets its answer, or the record of a refusal
            begun = timeout(idle_limit, begin_request(stream, buffered)) => begun.unwrap_or(WaitOutcome::Over),
            () = tokio::time::sleep_until(connection.deadline.into()) => WaitOutcome::Over,
            _ = stop.wait_for(|stop| *stop) => WaitOutcome::Over,
        }
    }

    /// Reads the rest of a head into `buffered` and checks it. Rewrites absolute form to origin form. Returns its length
    /// and the framing of the body.
    async fn read_head(
        &self,
        stream: &mut ClientStream,
        buffered: &mut BytesMut,
        connection: &HttpConnection,
    ) -> Result<(usize, BodyFraming), Refusal> {
        let limits = &self.shared.limits;
        let deadline = Instant::now() + limits.head();
        let length = loop {
            if let Some(length) = head::find_end(buffered, limits)? {
                break length;
            }
            buffered.reserve(READ_BYTES);
            match timeout_at(deadline.into(), stream.read_buf(buffered)).await {
                Ok(Ok(0)) | Ok(Err(_)) => return Err(Reason::BadRequest.into()),
                Ok(Ok(_)) => {}
                Err(_) => return Err(Reason::FirstBytesLate.into()),
            }
        };
        let head = head::parse(buffered.get(..length).unwrap_or_default(), limits)?;
        check_form(&head, connection)?;
        let body = buffered.len() - length;
        if head.is_absolute() {
            head.to_origin_form(buffered, length);
        }
        Ok((buffered.len() - body, head.body))
    }

    /// Lets Pingora proxy one request. Returns the connection and its buffered bytes if it can take another request;
    /// otherwise records those that were sent ahead and get no answer.
    async fn serve_request(
        &self,
        stream: ClientStream,
        buffered: BytesMut,
        framing: (usize, BodyFraming),
        connection: &Arc<HttpConnection>,
        stop: &watch::Receiver<bool>,
    ) -> Option<(ClientStream, BytesMut)> {
        let limits = &self.shared.limits;
        let monitor = RequestMonitor::new(connection, HttpVersion::Http1);
        let stream = PingoraStream::http1(stream, buffered, framing, &monitor);
        let mut session = ServerSession::new_http1(Box::new(stream));
        session.set_keepalive((!*stop.borrow()).then_some(limits.keep_alive_seconds));
        session.set_read_timeout(Some(limits.idle()));
        session.set_write_timeout(Some(limits.idle()));
        session.set_total_drain_timeout(Some(limits.head()));
        let request = self.proxy.process_new_http(session, stop);
        let reusable = monitor.supervise(limits, request).await;
        monitor.record_early_reject(&self.shared).await;
        let stream =
            reusable.and_then(|reusable| reusable.consume().0.into_any().downcast::<PingoraStream>().ok());
        if stream.is_none() && monitor.is_followed() && !monitor.is_switched() {
            connection.record_refusal(&self.shared, &Reason::ConnectionClosing.into()).await;
        }
        stream?.into_parts()
    }

    /// Records the refusal of a head, responds with it and closes the connection.
    async fn refuse_head(
        &self,
        mut stream: ClientStream,
        head: &[u8],
        connection: &HttpConnection,
        refusal: &Refusal,
    ) {
        let rules = self.shared.rules.load_full();
        let (record, _) = connection.open_request(&rules, connection.audit_facts());
        let (audience, attempted) = (BodyAudience::Person, attempted::of_head(head));
        let response = refusal::refuse(record, refusal, &rules, audience, attempted).await;
        let answered = async {
            stream.write_all(&response.to_http1()).await?;
            stream.shutdown().await?;
            let mut rest = [0; READ_BYTES];
            // Closing a socket with unread bytes sends a RST, which can discard the response in flight.
            while stream.read(&mut rest).await? > 0 {}
            std::io::Result::Ok(())
        };
        drop(timeout(LINGER, answered).await); // a client that is slower than this may miss the response
    }
}

/// Reads up to the first byte of a request. An empty line before it is skipped (RFC 9112, section 2.2), but only one.
async fn begin_request(stream: &mut ClientStream, buffered: &mut BytesMut) -> WaitOutcome {
    let mut skipped = false;
    loop {
        if !skipped && buffered.starts_with(b"\r\n") {
            buffered.advance(2);
            skipped = true;
        }
        if !matches!(buffered.as_ref(), b"" | b"\r") {
            return WaitOutcome::Request;
        }
        let mut first = [0; 1];
        match stream.read(&mut first).await {
            Ok(1) => {
                buffered.reserve(READ_BYTES);
                buffered.extend_from_slice(&first);
            }
            Ok(_) | Err(_) => return WaitOutcome::Over,
        }
    }
}

/// Checks the form of the target: a forward proxy takes absolute form only, and CONNECT does not nest.
fn check_form(head: &RequestHead, connection: &HttpConnection) -> Result<(), Refusal> {
    let forward = matches!(connection.scope, RequestScope::Anywhere);
    match (forward, head.is_absolute(), head.is_connect()) {
        (_, _, true) => {
            Err(Refusal::from(Reason::BadRequest).with_detail("CONNECT inside an established connection"))
        }
        (true, false, false) => {
            Err(Refusal::from(Reason::BadRequest)
                .with_detail("a forward proxy takes absolute `http://` URLs"))
        }
        (true, true, false) | (false, _, false) => Ok(()),
    }
}
