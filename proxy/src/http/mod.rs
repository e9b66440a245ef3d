//! HTTP: every request on a connection is its own attempt, with its own decision and record. Pingora does the
//! proxying; `serve_http1` and `serve_http2` are the only calls into it, so that it stays replaceable.

mod canonical;
pub mod chunks;
mod client_stream;
mod context;
mod fields;
mod filter;
mod frames;
pub mod head;
mod http1;
mod http2;
mod outgoing;
mod request;
mod scrub_fields;
mod upgrade;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use audit::{ByteCount, OpenRecord};
use pingora_core::connectors::{ConnectorOptions, TransportConnector};
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::server::configuration::ServerConf;
use pingora_http::ResponseHeader;
use pingora_proxy::HttpProxy;
use rules::facts::{ConnectTarget, HttpVersion, UrlScheme};
use rules::limits::TrafficLimits;
use rules::{Host, Reason, RuleSet, SandboxRef};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(crate) use client_stream::ClientStream;
pub(crate) use filter::outgoing_head;
pub(crate) use frames::HTTP2_PREFACE;

use crate::budget::live::CutSignal;
use crate::egress::shared::Shared;
use crate::egress::tunnel::wait_idle;
use crate::http::chunks::ChunkFault;
use crate::memory::MemoryGuard;
use crate::report::record;
use crate::report::refusal::{self, BodyAudience, Refusal};
use filter::RequestFilter;
use outgoing::BodyRest;

/// How much later than Pingora's timeouts ours fire: after one of Pingora's, the client still gets a response that
/// explains it.
const TIMEOUT_GRACE: Duration = Duration::from_secs(1);

/// Runs Pingora's proxy on connections that our own listeners accepted.
pub(crate) struct HttpEngine {
    shared: Arc<Shared>,
    proxy: Arc<HttpProxy<RequestFilter>>,
}

/// Where the requests of a connection may go, as far as the connection determines it.
#[derive(Clone, Debug)]
pub(crate) enum RequestScope {
    /// A forward proxy connection: each request names its destination in absolute form.
    Anywhere,
    /// TLS, to the host that was decided with the connection.
    Host(Host, u16),
    /// Without TLS, to the original destination, or to the target of CONNECT or SOCKS.
    Target(ConnectTarget, u16),
}

/// One HTTP connection.
pub(crate) struct HttpConnection {
    /// The sandbox it was accepted from, by its channels: each request is identified again.
    pub(crate) sandbox: SandboxRef,
    pub(crate) scope: RequestScope,
    /// The host of the first request. All later requests must name the same one, except on a forward proxy connection.
    pinned: OnceLock<Host>,
    /// When the connection reaches its maximum lifetime.
    deadline: Instant,
    /// Its channel belongs to another sandbox by now, or to none: it takes no more requests.
    disowned: CancellationToken,
    /// Cuts every request on it, with all others of its listener.
    listener_cut: Arc<CutSignal>,
    record: Mutex<OpenRecord>,
}

/// The half of a request's state that our loops share with the filters; [`RequestContext`](context::RequestContext) is
/// the other.
pub(crate) struct RequestMonitor {
    pub(crate) connection: Arc<HttpConnection>,
    pub(crate) version: HttpVersion,
    pub(crate) cut: Arc<CutSignal>,
    /// The byte count of the request's record, once it has one.
    byte_count: Mutex<Option<Arc<ByteCount>>>,
    /// The client went away before the response was complete.
    broken: AtomicBool,
    /// The origin server has sent a response head.
    answered: AtomicBool,
    /// Bytes of a next request arrived before this one was answered.
    followed: AtomicBool,
    /// The connection has switched to another protocol.
    switched: AtomicBool,
    /// The body that must keep up with `body_bytes_per_second`.
    paced: Mutex<PacedBody>,
    /// Bytes of the body that have arrived, if they are counted ahead of Pingora.
    arrived_body: AtomicU64,
    /// Bytes of the body that Pingora has passed on. Some may wait to leave, so they are the client's progress.
    uploaded: AtomicU64,
    /// The body is to be read in pieces of a block.
    cut_body: AtomicBool,
    /// The first fault in the framing of a chunked body.
    body_fault: OnceLock<ChunkFault>,
    /// The request reached our filters, which open its record.
    reached_filter: AtomicBool,
}

/// The body of an exchange that has a least rate, so that a peer that drips bytes does not hold it for a day.
///
/// A request's body has one until the response begins: from then on both sides may be talking to each other, as in a
/// gRPC stream, and only silence ends them (`idle_seconds`). A response has one if it announces its length, because its
/// sender has all of it; a stream of events has as little to say as it likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PacedBody {
    #[default]
    None,
    Request,
    Response,
}

impl HttpEngine {
    pub(crate) fn new(
        shared: Arc<Shared>,
        guard: Arc<MemoryGuard>,
        trust: &crate::egress::roots::UpstreamRoots,
    ) -> Self {
        let conf = Arc::new(ServerConf {
            ca_file: Some(trust.path()),
            upstream_keepalive_pool_size: usize::try_from(shared.limits.pool_connections)
                .unwrap_or(usize::MAX),
            max_retries: crate::egress::dial::MAX_DIAL_ADDRESSES,
            ..ServerConf::default()
        });
        let connector = TransportConnector::new(Some(ConnectorOptions::from_server_conf(&conf)));
        let filter = RequestFilter::new(shared.clone(), guard, connector);
        let mut proxy = HttpProxy::new(filter, conf);
        proxy.handle_init_modules();
        HttpEngine { shared, proxy: Arc::new(proxy) }
    }

    /// Serves the requests of one connection until either side is done.
    pub(crate) async fn serve(
        &self,
        stream: ClientStream,
        connection: HttpConnection,
        version: HttpVersion,
        stop: &watch::Receiver<bool>,
    ) {
        let connection = Arc::new(connection);
        match version {
            HttpVersion::Http1 => self.serve_http1(stream, &connection, stop).await,
            HttpVersion::Http2 => self.serve_http2(stream, &connection, stop).await,
        }
    }
}

impl HttpConnection {
    pub(crate) fn new(
        sandbox: SandboxRef,
        scope: RequestScope,
        limits: &TrafficLimits,
        record: OpenRecord,
        listener_cut: &Arc<CutSignal>,
    ) -> Self {
        let pinned = match &scope {
            RequestScope::Host(host, _) => OnceLock::from(host.clone()),
            RequestScope::Anywhere | RequestScope::Target(..) => OnceLock::new(),
        };
        let deadline = Instant::now() + limits.connection();
        let (disowned, record) = (CancellationToken::new(), Mutex::new(record));
        let listener_cut = listener_cut.clone();
        HttpConnection { sandbox, scope, pinned, deadline, disowned, listener_cut, record }
    }

    pub(crate) fn scheme(&self) -> UrlScheme {
        match self.scope {
            RequestScope::Host(..) => UrlScheme::Https,
            RequestScope::Anywhere | RequestScope::Target(..) => UrlScheme::Http,
        }
    }

    /// The port of requests that do not name one.
    pub(crate) fn port(&self) -> u16 {
        match self.scope {
            RequestScope::Anywhere => 80,
            RequestScope::Host(_, port) | RequestScope::Target(_, port) => port,
        }
    }

    /// The host that this connection is pinned to, once it is known.
    pub(crate) fn host(&self) -> Option<&Host> {
        self.pinned.get()
    }

    /// The facts for a record of a request that could not be parsed.
    fn audit_facts(&self) -> audit::RecordedFacts {
        let host = self.host().map(record::host);
        audit::RecordedFacts::Connection(audit::RecordedConnection {
            host,
            port: Some(self.port()),
            tls: None,
        })
    }

    fn pin(&self, host: &Host) {
        match self.scope {
            RequestScope::Anywhere => {}
            RequestScope::Host(..) | RequestScope::Target(..) => {
                self.pinned.get_or_init(|| host.clone());
            }
        }
    }

    /// Opens the record of a request, and identifies the sandbox that makes it under the rules that will decide it.
    ///
    /// A connection whose channel went to another sandbox serves neither: it was accepted, and perhaps given a
    /// certificate, for the first. The request is refused under the name of the second, and the connection ends.
    fn open_request(
        &self,
        rules: &RuleSet,
        facts: audit::RecordedFacts,
    ) -> (OpenRecord, Result<SandboxRef, Reason>) {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let identified = record::identify_again(rules, &self.sandbox, &mut record);
        if identified.is_err() {
            self.disowned.cancel();
        }
        (record.open_request(facts), identified)
    }

    /// Records a refusal for which no request could be parsed.
    async fn record_refusal(&self, shared: &Shared, refusal: &Refusal) {
        let rules = shared.rules.load_full();
        let (record, _) = self.open_request(&rules, self.audit_facts());
        drop(refusal::refuse(record, refusal, &rules, BodyAudience::Person, None).await);
    }
}

impl RequestMonitor {
    fn new(connection: &Arc<HttpConnection>, version: HttpVersion) -> Arc<Self> {
        Arc::new(RequestMonitor {
            connection: connection.clone(),
            version,
            cut: CutSignal::under(&connection.listener_cut),
            byte_count: Mutex::default(),
            broken: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            followed: AtomicBool::new(false),
            switched: AtomicBool::new(false),
            paced: Mutex::default(),
            arrived_body: AtomicU64::new(0),
            uploaded: AtomicU64::new(0),
            cut_body: AtomicBool::new(false),
            body_fault: OnceLock::new(),
            reached_filter: AtomicBool::new(false),
        })
    }

    /// Wraps the monitor in a Pingora digest, so that `request_filter` finds it.
    ///
    /// Pingora creates the filters' context itself, without arguments (`ProxyHttp::new_ctx`), and offers no parameter
    /// through which a caller of `process_new_http` could hand over its own state. A session does expose the digest of
    /// its stream, and a `ProxyDigest`, meant for the CONNECT response of an upstream proxy, carries user data of any
    /// type. It is the only such place that both protocol versions have: HTTP/1 takes the digest from the stream
    /// ([`PingoraStream`](client_stream::PingoraStream)), HTTP/2 takes one with each accepted stream. The response
    /// head in it is a placeholder that nothing reads.
    ///
    /// There is one monitor, and so one digest, per request, never per connection. The loop that calls Pingora holds
    /// one reference, because it must see bytes, cut and faults while Pingora owns the session; the digest holds
    /// another, and `request_filter` clones a third into the context. State that is closed exactly once (record,
    /// departure, scrubber) belongs in the context instead, which drops with the request even if its task is
    /// cancelled.
    fn digest(self: &Arc<Self>) -> Arc<ProxyDigest> {
        let placeholder = ResponseHeader::build_no_case(200, None).map(Box::new);
        let response = placeholder.unwrap_or_else(|_| unreachable!("200 is a valid status"));
        Arc::new(ProxyDigest::new(response, Some(Box::new(self.clone()))))
    }

    fn set_byte_count(&self, byte_count: Arc<ByteCount>) {
        *self.byte_count.lock().unwrap_or_else(PoisonError::into_inner) = Some(byte_count);
    }

    fn set_broken(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    fn set_answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    fn set_followed(&self) {
        self.followed.store(true, Ordering::Relaxed);
    }

    fn is_followed(&self) -> bool {
        self.followed.load(Ordering::Relaxed)
    }

    fn set_switched(&self) {
        self.switched.store(true, Ordering::Relaxed);
    }

    fn is_switched(&self) -> bool {
        self.switched.load(Ordering::Relaxed)
    }

    fn set_paced(&self, body: PacedBody) {
        *sys::lock(&self.paced) = body;
    }

    /// Counts bytes of the request's body, whether they leave now or are held back.
    fn add_upload(&self, bytes: u64) {
        self.uploaded.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The request's body is complete.
    fn end_upload(&self) {
        let mut paced = sys::lock(&self.paced);
        if *paced == PacedBody::Request {
            *paced = PacedBody::None;
        }
    }

    /// The body with a least rate, and how many of its bytes have passed.
    fn paced_progress(&self) -> (PacedBody, u64) {
        let paced = *sys::lock(&self.paced);
        let byte_count = sys::lock(&self.byte_count);
        let received = byte_count.as_ref().map_or(0, |byte_count| byte_count.sent_and_received().1);
        match paced {
            PacedBody::None => (paced, 0),
            // What is held back counts too: blocks leave at once, however evenly their bytes come.
            PacedBody::Request => (paced, self.uploaded.load(Ordering::Relaxed)),
            PacedBody::Response => (paced, received),
        }
    }

    /// Returns once a body stayed below `body_bytes_per_second` on average over `idle_seconds`.
    async fn wait_slow(&self, limits: &TrafficLimits) {
        let least = limits.body_bytes_per_second.saturating_mul(limits.idle_seconds);
        loop {
            let (body, before) = self.paced_progress();
            tokio::time::sleep(limits.idle()).await;
            let (now, after) = self.paced_progress();
            if body != PacedBody::None && now == body && after - before < least {
                return;
            }
        }
    }

    /// Returns once the origin server has sent no response head for `limit` after the last byte of the request. Never
    /// returns if it answers.
    async fn wait_unanswered(&self, limit: Duration) {
        loop {
            let before = self.progress();
            tokio::time::sleep(limit + TIMEOUT_GRACE).await;
            match (self.answered.load(Ordering::Relaxed), self.progress() == before) {
                (true, _) => return std::future::pending().await,
                (false, true) => return,
                (false, false) => {}
            }
        }
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Sets how many bytes of the body have arrived, all of which Pingora will pass on without more from the client.
    fn set_arrived_body(&self, bytes: u64) {
        self.arrived_body.store(bytes, Ordering::Relaxed);
    }

    /// What is known about the rest of a body of which `taken` bytes were passed on. Of an HTTP/2 stream, that is
    /// nothing: `h2` does not tell what it has received.
    fn body_rest(&self, taken: u64) -> BodyRest {
        match taken < self.arrived_body.load(Ordering::Relaxed) {
            true => BodyRest::Ready,
            false => BodyRest::Awaited,
        }
    }

    fn set_cut_body(&self, cut: bool) {
        self.cut_body.store(cut, Ordering::Relaxed);
    }

    fn is_cut_body(&self) -> bool {
        self.cut_body.load(Ordering::Relaxed)
    }

    fn set_body_fault(&self, fault: ChunkFault) {
        self.body_fault.get_or_init(|| fault); // the first fault wins
    }

    /// The refusal for a malformed body, if it is malformed.
    fn body_refusal(&self) -> Option<Refusal> {
        self.body_fault.get().map(|fault| Refusal::from(Reason::BadRequest).with_detail(fault))
    }

    fn set_reached_filter(&self) {
        self.reached_filter.store(true, Ordering::Relaxed);
    }

    /// Records a request that Pingora rejected before it reached our filters: it was an attempt too.
    async fn record_early_reject(&self, shared: &Shared) {
        if !self.reached_filter.load(Ordering::Relaxed) {
            self.connection.record_refusal(shared, &Reason::BadRequest.into()).await;
        }
    }

    /// Bytes that passed in either direction, and those of the request's body, which may wait to leave.
    fn progress(&self) -> (Option<u64>, u64) {
        let byte_count = self.byte_count.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = byte_count.as_ref().map(|byte_count| byte_count.total());
        (passed, self.uploaded.load(Ordering::Relaxed))
    }

    /// Runs a request until it completes, is cut, is idle for too long, or its connection reaches its maximum
    /// lifetime. In all but the first case it drops `request`, which closes an HTTP/1 connection and resets an HTTP/2
    /// stream.
    async fn supervise<T>(
        &self,
        limits: &TrafficLimits,
        request: impl Future<Output = Option<T>>,
    ) -> Option<T> {
        // Dropped after the cut is triggered, so that its record closes with the reason: `select!` drops the futures that
        // it owns before it runs the branch.
        let request = std::pin::pin!(request);
        tokio::select! {
            done = request => done,
            _ = self.cut.wait() => None,
            () = tokio::time::sleep_until(self.connection.deadline.into()) => {
                self.cut.trigger(Reason::LifetimeSpent);
                None
            }
            () = self.wait_unanswered(limits.first_byte()) => {
                self.cut.trigger(Reason::UpstreamTimeout);
                None
            }
            () = self.wait_slow(limits) => {
                self.cut.trigger(Reason::BodyLate);
                None
            }
            () = wait_idle(limits.idle().max(limits.first_byte()) / 2 + TIMEOUT_GRACE, || self.progress()) => {
                self.cut.trigger(Reason::IdleTooLong);
                None
            }
        }
    }
}
