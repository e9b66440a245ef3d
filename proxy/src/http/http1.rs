//! HTTP/1: our own loop over the requests of a connection. Each head is read and checked here, under a
//! deadline and a byte cap, before Pingora sees it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use pingora_core::apps::HttpServerApp;
use pingora_core::protocols::http::ServerSession;
use rules::Reason;
use rules::facts::HttpVersion;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::{timeout, timeout_at};

use super::carrier::{ClientStream, PingoraStream};
use super::{HttpConnection, HttpEngine, RequestMonitor, RequestScope};
use crate::http::head::{self, RequestHead};
use crate::report::refusal::{self, BodyAudience, LINGER, Refusal};

/// Bytes asked for at a time while a head is read.
const READ_BYTES: usize = 4096;

/// What became of waiting for the next request.
enum WaitOutcome {
    /// Nobody asks any more.
    Over,
    Request,
}

/// How the end of a request's body is told.
#[derive(Clone, Copy, Debug)]
enum BodyFraming {
    /// In chunks, after so many bytes of head.
    Chunked { after: usize },
    /// By its length, which may be none.
    Measured,
}

impl HttpEngine {
    pub(super) async fn serve_http1(
        &self,
        carrier: ClientStream,
        connection: &Arc<HttpConnection>,
        stop: &watch::Receiver<bool>,
    ) {
        let mut patience = self.shared.limits.first_bytes();
        let mut rest = Some((carrier, BytesMut::new()));
        while let Some((mut carrier, mut ahead)) = rest.take() {
            match self.wait_request(&mut carrier, &mut ahead, patience, connection, stop).await {
                WaitOutcome::Over => break,
                WaitOutcome::Request => {}
            }
            patience = self.shared.limits.keep_alive();
            rest = match self.read_head(&mut carrier, &mut ahead, connection).await {
                Ok(body) => {
                    Box::pin(self.serve_request(carrier, ahead, body, connection, stop)).await
                }
                Err(refusal) => {
                    Box::pin(self.refuse_head(carrier, connection, &refusal)).await;
                    None
                }
            };
        }
    }

    /// Waits for the first byte of a request, holding as little as can be.
    async fn wait_request(
        &self,
        carrier: &mut ClientStream,
        ahead: &mut BytesMut,
        patience: Duration,
        connection: &HttpConnection,
        stop: &watch::Receiver<bool>,
    ) -> WaitOutcome {
        if !ahead.is_empty() {
            return WaitOutcome::Request;
        }
        let mut stop = stop.clone();
        let mut first = [0; 1];
        let read = tokio::select! {
            read = timeout(patience, carrier.read(&mut first)) => read,
            () = tokio::time::sleep_until(connection.until.into()) => return WaitOutcome::Over,
            _ = stop.wait_for(|stop| *stop) => return WaitOutcome::Over,
        };
        match read {
            Ok(Ok(1)) => {
                ahead.reserve(READ_BYTES);
                ahead.extend_from_slice(&first);
                WaitOutcome::Request
            }
            Ok(_) | Err(_) => WaitOutcome::Over,
        }
    }

    /// Reads the rest of a head and checks it; one in absolute form is written anew.
    async fn read_head(
        &self,
        carrier: &mut ClientStream,
        ahead: &mut BytesMut,
        connection: &HttpConnection,
    ) -> Result<BodyFraming, Refusal> {
        let limits = &self.shared.limits;
        let deadline = Instant::now() + limits.head();
        let length = loop {
            if let Some(length) = head::find_end(ahead, limits)? {
                break length;
            }
            ahead.reserve(READ_BYTES);
            match timeout_at(deadline.into(), carrier.read_buf(ahead)).await {
                Ok(Ok(0)) | Ok(Err(_)) => return Err(Reason::BadRequest.into()),
                Ok(Ok(_)) => {}
                Err(_) => return Err(Reason::FirstBytesLate.into()),
            }
        };
        let head = head::parse(ahead.get(..length).unwrap_or_default(), limits)?;
        check_form(&head, connection)?;
        let rest = ahead.len() - length;
        if head.is_absolute() {
            head.to_origin_form(ahead, length);
        }
        Ok(if head.chunked {
            BodyFraming::Chunked { after: ahead.len() - rest }
        } else {
            BodyFraming::Measured
        })
    }

    /// Lets Pingora carry one request; what is left of the connection if it can take another.
    async fn serve_request(
        &self,
        carrier: ClientStream,
        ahead: BytesMut,
        body: BodyFraming,
        connection: &Arc<HttpConnection>,
        stop: &watch::Receiver<bool>,
    ) -> Option<(ClientStream, BytesMut)> {
        let limits = &self.shared.limits;
        let exchange = RequestMonitor::new(connection, HttpVersion::Http1);
        let down = PingoraStream::new(carrier, ahead, exchange.digest());
        let down = match body {
            BodyFraming::Chunked { after } => down.with_chunk_guard(after, &exchange),
            BodyFraming::Measured => down,
        };
        let mut session = ServerSession::new_http1(Box::new(down));
        session.set_keepalive((!*stop.borrow()).then_some(limits.keep_alive_seconds));
        session.set_read_timeout(Some(limits.idle()));
        session.set_write_timeout(Some(limits.idle()));
        session.set_total_drain_timeout(Some(limits.head()));
        let carried = self.proxy.process_new_http(session, stop);
        let done = exchange.supervise(limits, carried).await;
        exchange.record_early_reject(&self.shared).await;
        let (stream, _) = done?.consume();
        let down = stream.into_any().downcast::<PingoraStream>().ok()?;
        Some(down.into_parts())
    }

    /// Records that a head was refused, and says why.
    async fn refuse_head(
        &self,
        mut carrier: ClientStream,
        connection: &HttpConnection,
        refusal: &Refusal,
    ) {
        let rules = self.shared.rules.load_full();
        let record = connection.record().open_request(connection.audit_facts());
        let response = refusal::refuse(record, refusal, &rules, BodyAudience::Person).await;
        let answered = async {
            carrier.write_all(&response.to_http1()).await?;
            carrier.shutdown().await?;
            let mut rest = [0; READ_BYTES];
            while carrier.read(&mut rest).await? > 0 {} // unread bytes would reset the connection
            std::io::Result::Ok(())
        };
        drop(timeout(LINGER, answered).await); // a slow client misses it
    }
}

/// A connection for one host takes requests in origin form, one of a proxy's in absolute form.
fn check_form(head: &RequestHead, connection: &HttpConnection) -> Result<(), Refusal> {
    let forward = matches!(connection.scope, RequestScope::Anywhere);
    match (forward, head.is_absolute(), head.is_connect()) {
        (_, _, true) => {
            Err(Refusal::from(Reason::BadRequest).with_detail("CONNECT inside a connection"))
        }
        (true, false, false) => {
            Err(Refusal::from(Reason::BadRequest)
                .with_detail("a proxy takes absolute http addresses"))
        }
        (true, true, false) | (false, _, false) => Ok(()),
    }
}
