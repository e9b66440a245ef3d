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

use super::carrier::{Carrier, Down};
use super::{Connection, Engine, Exchange, Scope};
use crate::http::head::{self, Head};
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::{Answer, Reader, Refusal};

/// How long a client that was refused is read on, so that it gets to see why.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes asked for at a time while a head is read.
const READ: usize = 4096;

/// What became of waiting for the next request.
enum Waited {
    /// Nobody asks any more.
    Over,
    Request,
}

/// How the end of a request's body is told.
#[derive(Clone, Copy, Debug)]
enum Body {
    /// In chunks, after so many bytes of head.
    Chunked { after: usize },
    /// By its length, which may be none.
    Measured,
}

impl Engine {
    pub(super) async fn serve_http1(
        &self,
        carrier: Carrier,
        connection: &Arc<Connection>,
        stop: &watch::Receiver<bool>,
    ) {
        let mut patience = self.shared.limits.first_bytes();
        let mut rest = Some((carrier, BytesMut::new()));
        while let Some((mut carrier, mut ahead)) = rest.take() {
            match self.wait(&mut carrier, &mut ahead, patience, connection, stop).await {
                Waited::Over => break,
                Waited::Request => {}
            }
            patience = self.shared.limits.keep_alive();
            rest = match self.head(&mut carrier, &mut ahead, connection).await {
                Ok(body) => Box::pin(self.request(carrier, ahead, body, connection, stop)).await,
                Err(refusal) => {
                    Box::pin(self.turn_down(carrier, connection, &refusal)).await;
                    None
                }
            };
        }
    }

    /// Waits for the first byte of a request, holding as little as can be.
    async fn wait(
        &self,
        carrier: &mut Carrier,
        ahead: &mut BytesMut,
        patience: Duration,
        connection: &Connection,
        stop: &watch::Receiver<bool>,
    ) -> Waited {
        if !ahead.is_empty() {
            return Waited::Request;
        }
        let mut stop = stop.clone();
        let mut first = [0; 1];
        let read = tokio::select! {
            read = timeout(patience, carrier.read(&mut first)) => read,
            () = tokio::time::sleep_until(connection.until.into()) => return Waited::Over,
            _ = stop.wait_for(|stop| *stop) => return Waited::Over,
        };
        match read {
            Ok(Ok(1)) => {
                ahead.reserve(READ);
                ahead.extend_from_slice(&first);
                Waited::Request
            }
            Ok(_) | Err(_) => Waited::Over,
        }
    }

    /// Reads the rest of a head and checks it; one in absolute form is written anew.
    async fn head(
        &self,
        carrier: &mut Carrier,
        ahead: &mut BytesMut,
        connection: &Connection,
    ) -> Result<Body, Refusal> {
        let limits = &self.shared.limits;
        let deadline = Instant::now() + limits.head();
        let length = loop {
            if let Some(length) = head::end(ahead, limits)? {
                break length;
            }
            ahead.reserve(READ);
            match timeout_at(deadline.into(), carrier.read_buf(ahead)).await {
                Ok(Ok(0)) | Ok(Err(_)) => return Err(Reason::BadRequest.into()),
                Ok(Ok(_)) => {}
                Err(_) => return Err(Reason::FirstBytesLate.into()),
            }
        };
        let head = head::read(ahead.get(..length).unwrap_or_default(), limits)?;
        for_this(&head, connection)?;
        let rest = ahead.len() - length;
        if head.is_absolute() {
            head.to_origin_form(ahead, length);
        }
        Ok(if head.chunked { Body::Chunked { after: ahead.len() - rest } } else { Body::Measured })
    }

    /// Lets Pingora carry one request; what is left of the connection if it can take another.
    async fn request(
        &self,
        carrier: Carrier,
        ahead: BytesMut,
        body: Body,
        connection: &Arc<Connection>,
        stop: &watch::Receiver<bool>,
    ) -> Option<(Carrier, BytesMut)> {
        let limits = &self.shared.limits;
        let exchange = Exchange::new(connection, HttpVersion::Http1);
        let down = Down::new(carrier, ahead, exchange.digest());
        let down = match body {
            Body::Chunked { after } => down.guarded(after, &exchange),
            Body::Measured => down,
        };
        let mut session = ServerSession::new_http1(Box::new(down));
        session.set_keepalive((!*stop.borrow()).then_some(limits.keep_alive_seconds));
        session.set_read_timeout(Some(limits.idle()));
        session.set_write_timeout(Some(limits.idle()));
        session.set_total_drain_timeout(Some(limits.head()));
        let carried = self.proxy.process_new_http(session, stop);
        let done = exchange.supervise(limits, carried).await;
        exchange.note_unmet(&self.shared).await;
        let (stream, _) = done?.consume();
        let down = stream.into_any().downcast::<Down>().ok()?;
        Some(down.into_parts())
    }

    /// Records that a head was refused, and says why.
    async fn turn_down(&self, mut carrier: Carrier, connection: &Connection, refusal: &Refusal) {
        let rules = self.shared.rules.load_full();
        metrics::decision(refusal.reason.code(), "refused");
        let record = connection.record().request(connection.told());
        let answer = Answer::new(refusal, &rules, &record.id(), Reader::Person);
        if record.refused(record::refused(refusal, &rules)).await.is_err() {
            tracing::warn!(reason = %refusal.reason, "a refusal could not be recorded");
        }
        let told = async {
            carrier.write_all(&answer.to_http1()).await?;
            carrier.shutdown().await?;
            let mut rest = [0; READ];
            while carrier.read(&mut rest).await? > 0 {} // closing on unread bytes would take it back
            std::io::Result::Ok(())
        };
        drop(timeout(LINGER, told).await); // whoever does not listen is left
    }
}

/// A connection for one host takes requests in origin form, one of a proxy's in absolute form.
fn for_this(head: &Head, connection: &Connection) -> Result<(), Refusal> {
    let forward = matches!(connection.scope, Scope::Anywhere);
    match (forward, head.is_absolute(), head.is_connect()) {
        (_, _, true) => {
            Err(Refusal::from(Reason::BadRequest).because("CONNECT inside a connection"))
        }
        (true, false, false) => {
            Err(Refusal::from(Reason::BadRequest).because("a proxy takes absolute http addresses"))
        }
        (true, true, false) | (false, _, false) => Ok(()),
    }
}
