//! HTTP/2: our own loop over the streams of a connection, one task each, so that each can be cut by itself:
//! dropping a stream's task resets it. Streams that break or are reset are counted, and too many end it all.

use std::sync::Arc;

use bytes::BytesMut;
use pingora_core::apps::HttpServerApp;
use pingora_core::prelude::Error;
use pingora_core::protocols::Digest;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::v2::server::{H2Accept, H2Options, HttpSession, handshake};
use rules::Reason;
use rules::facts::HttpVersion;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::carrier::{ClientStream, PingoraStream};
use super::{HttpConnection, HttpEngine, RequestMonitor};

/// The window of one stream, and of a connection: enough for a fast link, little enough for many.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;

impl HttpEngine {
    pub(super) async fn serve_http2(
        &self,
        carrier: ClientStream,
        connection: &Arc<HttpConnection>,
        stop: &watch::Receiver<bool>,
    ) {
        let first = RequestMonitor::new(connection, HttpVersion::Http2);
        let down = PingoraStream::new(carrier, BytesMut::new(), first.digest());
        let shaken = handshake(Box::new(down), Some(self.h2_options()));
        let Ok(Ok(mut streams)) = timeout(self.shared.limits.first_bytes(), shaken).await else {
            return;
        };
        let mut tasks = JoinSet::new();
        let (broke, mut broken) = mpsc::channel::<()>(1);
        let mut stop = stop.clone();
        let (mut faults, mut stopping) = (0, false);
        loop {
            let exchange = RequestMonitor::new(connection, HttpVersion::Http2);
            let digest = Digest { proxy_digest: Some(exchange.digest()), ..Digest::default() };
            let accepted = tokio::select! {
                accepted = HttpSession::from_h2_conn(&mut streams, Arc::new(digest)) => accepted,
                _ = stop.wait_for(|stop| *stop), if !stopping => {
                    stopping = true;
                    streams.graceful_shutdown();
                    continue;
                }
                Some(()) = broken.recv() => {
                    faults += 1;
                    if faults >= self.shared.limits.resets { break } else { continue }
                }
                Some(_) = tasks.join_next(), if !tasks.is_empty() => continue,
                () = tokio::time::sleep(self.shared.limits.keep_alive()), if tasks.is_empty() => break,
                () = tokio::time::sleep_until(connection.until.into()) => break, // the streams know it too
            };
            match accepted {
                Ok(Some(H2Accept::Session(session))) => {
                    tasks.spawn(self.serve_stream(session, exchange, broke.clone()));
                }
                Ok(Some(H2Accept::Rejected)) => {
                    faults += 1;
                    connection.record_refusal(&self.shared, &Reason::BadRequest.into()).await;
                }
                Ok(None) => break,
                Err(error) => {
                    if let Some(reason) = client_fault(&error) {
                        connection.record_refusal(&self.shared, &reason.into()).await;
                    }
                    break;
                }
            }
            if faults >= self.shared.limits.resets {
                break;
            }
        }
        if faults >= self.shared.limits.resets {
            connection.record_refusal(&self.shared, &Reason::TooManyResets.into()).await;
        }
    }

    fn h2_options(&self) -> H2Options {
        let limits = &self.shared.limits;
        let narrow = |bound: u64| u32::try_from(bound).unwrap_or(u32::MAX);
        let mut options = H2Options::default();
        options.max_header_list_size(narrow(limits.head_bytes));
        options.max_concurrent_streams(narrow(limits.streams));
        options.initial_window_size(STREAM_WINDOW);
        options.initial_connection_window_size(CONNECTION_WINDOW);
        options
    }

    /// One stream. That it ended before it was answered is told, for it may be a flood.
    fn serve_stream(
        &self,
        session: HttpSession,
        exchange: Arc<RequestMonitor>,
        broke: mpsc::Sender<()>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (proxy, shared, limits) = (self.proxy.clone(), self.shared.clone(), self.shared.limits);
        let (_never, running) = watch::channel(false); // GOAWAY is the connection's business
        async move {
            let mut session = ServerSession::new_http2(session);
            session.set_write_timeout(Some(limits.idle()));
            session.set_total_drain_timeout(Some(limits.head()));
            let carried = proxy.process_new_http(session, &running);
            exchange.supervise(&limits, async { carried.await.or(None) }).await;
            exchange.record_early_reject(&shared).await;
            if exchange.is_broken() {
                broke.send(()).await.unwrap_or_default(); // the connection may be gone already
            }
        }
    }
}

/// Why the connection could not go on, where it is the client's doing and not the network's.
fn client_fault(error: &Error) -> Option<Reason> {
    let error = error.root_cause().downcast_ref::<h2::Error>()?;
    match error.reason() {
        _ if error.is_io() || error.is_remote() => None,
        Some(h2::Reason::ENHANCE_YOUR_CALM) => Some(Reason::TooManyResets),
        Some(h2::Reason::NO_ERROR) | None => None,
        Some(_) => Some(Reason::BadRequest),
    }
}
