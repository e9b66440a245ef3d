//! HTTP/2: our own loop over the streams of a connection, with one task per stream and a limit on resets.
//!
//! Each stream is an attempt with its own permit, so a reload or a budget must be able to cut one stream and leave its
//! siblings alone. Hence one task per stream: [`RequestMonitor::supervise`] drops the request's future when it is cut,
//! the stream's `h2` handles drop with it, and `h2` sends RST_STREAM. Dropping the `JoinSet` at the end of the loop
//! ends all streams with their connection. The loop itself must keep polling `from_h2_conn`, which drives the I/O of
//! the whole connection, and so never awaits a stream.
//!
//! Resets are counted because they are cheap for a client and expensive for us: a reset stream no longer counts
//! towards the limit of concurrent streams, yet it cost a decision, a record and perhaps an upstream request (rapid
//! reset, CVE-2023-44487). `h2` limits resets only of streams that we have not accepted yet, and Pingora limits
//! malformed streams only in its own accept loop, which we do not use. So the loop counts each stream that the client
//! abandons and each one that Pingora rejects, and closes the connection with `too_many_resets` at `resets`.

use std::sync::Arc;

use pingora_core::apps::HttpServerApp;
use pingora_core::prelude::Error;
use pingora_core::protocols::Digest;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::v2::server::{H2Accept, H2Options, HttpSession, handshake};
use rules::Reason;
use rules::facts::HttpVersion;
use rules::quota::Resource;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::client_stream::{ClientStream, PingoraStream};
use super::frames::HeadClock;
use super::{HttpConnection, HttpEngine, RequestMonitor};
use crate::quota::cost::{HTTP2_STREAM_WINDOW, HTTP2_WINDOW, SEND_QUEUE_BYTES};
use crate::report::refusal::LINGER;

impl HttpEngine {
    pub(super) async fn serve_http2(
        &self,
        stream: ClientStream,
        connection: &Arc<HttpConnection>,
        stop: &watch::Receiver<bool>,
    ) {
        let sandbox = &connection.sandbox.id;
        let window = self.shared.quotas.window(sandbox, HTTP2_WINDOW);
        let _window = match self.shared.quotas.reserve(Resource::Buffers, sandbox, window) {
            Ok(reserved) => reserved,
            Err(refusal) => return connection.record_refusal(&self.shared, &refusal).await,
        };
        let unused = RequestMonitor::new(connection, HttpVersion::Http2); // each stream brings its own
        let (clock, mut head_deadline) = HeadClock::new();
        let stream = PingoraStream::http2(stream, unused.digest(), clock);
        let handshake = handshake(Box::new(stream), Some(self.h2_options(window)));
        let Ok(Ok(mut streams)) = timeout(self.shared.limits.first_bytes(), handshake).await else {
            return;
        };
        let mut tasks = JoinSet::new();
        let (report_broken, mut broken) = mpsc::channel::<()>(1);
        let mut stop = stop.clone();
        let (mut faults, mut stopping) = (0, false);
        loop {
            let monitor = RequestMonitor::new(connection, HttpVersion::Http2);
            let digest = Digest { proxy_digest: Some(monitor.digest()), ..Digest::default() };
            let accepted = tokio::select! {
                accepted = HttpSession::from_h2_conn(&mut streams, Arc::new(digest)) => accepted,
                () = stop_or_disowned(&mut stop, connection), if !stopping => {
                    stopping = true;
                    streams.graceful_shutdown();
                    continue;
                }
                Some(()) = broken.recv() => {
                    faults += 1;
                    if faults >= self.shared.limits.resets { break } else { continue }
                }
                Some(_) = tasks.join_next(), if !tasks.is_empty() => continue,
                () = head_deadline.wait(self.shared.limits.head()) => {
                    connection.record_refusal(&self.shared, &Reason::FirstBytesLate.into()).await;
                    break;
                }
                () = tokio::time::sleep(self.shared.limits.keep_alive()), if tasks.is_empty() => break,
                () = tokio::time::sleep_until(connection.deadline.into()) => break, // streams watch it too
            };
            match accepted {
                Ok(Some(H2Accept::Session(session))) => {
                    tasks.spawn(self.serve_stream(session, monitor, report_broken.clone()));
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
            return;
        }
        // A client that has its answer may close at once. Its stream's task then still writes the outcome record;
        // dropping the set would abort it, and a completed request would be recorded as abandoned.
        drop(broken); // nobody counts any more, and no task may wait to be counted
        let finished = async { while tasks.join_next().await.is_some() {} };
        drop(timeout(LINGER, finished).await); // what is still open then ends as abandoned
    }

    fn h2_options(&self, window: u64) -> H2Options {
        let limits = &self.shared.limits;
        let narrow = |bound: u64| u32::try_from(bound).unwrap_or(u32::MAX);
        let mut options = H2Options::default();
        options.max_header_list_size(narrow(limits.head_bytes));
        options.max_concurrent_streams(narrow(limits.streams));
        options.initial_window_size(narrow(window.min(HTTP2_STREAM_WINDOW)));
        options.initial_connection_window_size(narrow(window));
        options.max_send_buffer_size(usize::try_from(SEND_QUEUE_BYTES).unwrap_or(usize::MAX));
        options
    }

    /// Serves one stream, and reports on `report_broken` if the client abandoned it.
    fn serve_stream(
        &self,
        session: HttpSession,
        monitor: Arc<RequestMonitor>,
        report_broken: mpsc::Sender<()>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (proxy, shared, limits) = (self.proxy.clone(), self.shared.clone(), self.shared.limits);
        let (_stop, running) = watch::channel(false); // never stops: the connection's loop sends GOAWAY
        async move {
            let mut session = ServerSession::new_http2(session);
            session.set_write_timeout(Some(limits.idle()));
            session.set_total_drain_timeout(Some(limits.head()));
            let request = proxy.process_new_http(session, &running);
            monitor.supervise(&limits, async { request.await.or(None) }).await;
            monitor.record_early_reject(&shared).await;
            if monitor.is_broken() {
                report_broken.send(()).await.unwrap_or_default(); // the connection may be closed already
            }
        }
    }
}

/// Waits until the program stops, or the connection's channel belongs to its sandbox no longer.
async fn stop_or_disowned(stop: &mut watch::Receiver<bool>, connection: &HttpConnection) {
    tokio::select! {
        _ = stop.wait_for(|stop| *stop) => {}
        () = connection.disowned.cancelled() => {}
    }
}

/// The reason for a connection error that the client caused; none for errors of the network.
fn client_fault(error: &Error) -> Option<Reason> {
    let error = error.root_cause().downcast_ref::<h2::Error>()?;
    match error.reason() {
        _ if error.is_io() || error.is_remote() => None,
        Some(h2::Reason::ENHANCE_YOUR_CALM) => Some(Reason::TooManyResets),
        Some(h2::Reason::NO_ERROR) | None => None,
        Some(_) => Some(Reason::BadRequest),
    }
}
