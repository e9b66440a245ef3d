//! HTTP behind the decision: every request is an attempt of its own, decided and recorded by itself, then
//! carried by Pingora. The engine sits behind `serve_http1` and `serve_http2`, so that it stays replaceable.

mod carrier;
pub mod chunks;
mod fields;
mod filter;
pub mod head;
mod http1;
mod http2;
mod request;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use audit::{ByteCount, OpenRecord};
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::server::configuration::ServerConf;
use pingora_http::ResponseHeader;
use pingora_proxy::HttpProxy;
use rules::facts::{ConnectTarget, HttpVersion, UrlScheme};
use rules::limits::TrafficLimits;
use rules::{Host, Reason, SandboxRef};
use tokio::sync::watch;

pub(crate) use carrier::ClientStream;

use crate::budget::live::CutSignal;
use crate::egress::shared::Shared;
use crate::egress::tunnel::wait_idle;
use crate::http::chunks::ChunkFault;
use crate::memory::MemoryGuard;
use crate::report::record;
use crate::report::refusal::{self, BodyAudience, Refusal};
use filter::RequestFilter;

/// Pingora's own time-outs, which can still be explained to the client, come first by so much.
const TIMEOUT_GRACE: Duration = Duration::from_secs(1);

/// Pingora's proxy, fed with connections of our own.
pub(crate) struct HttpEngine {
    shared: Arc<Shared>,
    proxy: Arc<HttpProxy<RequestFilter>>,
}

/// What is known of where the requests of a connection go.
#[derive(Clone, Debug)]
pub(crate) enum RequestScope {
    /// Wherever each of them says: they are written for a proxy.
    Anywhere,
    /// In TLS, to a host that was decided with the connection.
    Host(Host, u16),
    /// Without TLS, where the connection was sent or said it goes.
    Target(ConnectTarget, u16),
}

/// One HTTP connection.
pub(crate) struct HttpConnection {
    pub(crate) sandbox: SandboxRef,
    pub(crate) scope: RequestScope,
    /// The host of its first request: one connection is for one host, except where it is a proxy's.
    pinned: OnceLock<Host>,
    until: Instant,
    record: Mutex<OpenRecord>,
}

/// One request on its connection: what the filters and whoever watches them share.
pub(crate) struct RequestMonitor {
    pub(crate) connection: Arc<HttpConnection>,
    pub(crate) version: HttpVersion,
    pub(crate) cut: Arc<CutSignal>,
    /// Counts the bytes of the request, once it has a record.
    byte_count: Mutex<Option<Arc<ByteCount>>>,
    /// Whether the client went away in the middle of it.
    broken: AtomicBool,
    /// Whether the origin has begun to answer.
    answered: AtomicBool,
    /// What is wrong with its body.
    body_fault: OnceLock<ChunkFault>,
    /// Whether it came as far as our filters, which make its record.
    reached_filter: AtomicBool,
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
        let mut proxy = HttpProxy::new(RequestFilter::new(shared.clone(), guard), conf);
        proxy.handle_init_modules();
        HttpEngine { shared, proxy: Arc::new(proxy) }
    }

    /// Serves the requests of one connection until either side is done.
    pub(crate) async fn serve(
        &self,
        carrier: ClientStream,
        connection: HttpConnection,
        version: HttpVersion,
        stop: &watch::Receiver<bool>,
    ) {
        let connection = Arc::new(connection);
        match version {
            HttpVersion::Http1 => self.serve_http1(carrier, &connection, stop).await,
            HttpVersion::Http2 => self.serve_http2(carrier, &connection, stop).await,
        }
    }
}

impl HttpConnection {
    pub(crate) fn new(
        sandbox: SandboxRef,
        scope: RequestScope,
        limits: &TrafficLimits,
        record: OpenRecord,
    ) -> Self {
        let pinned = match &scope {
            RequestScope::Host(host, _) => OnceLock::from(host.clone()),
            RequestScope::Anywhere | RequestScope::Target(..) => OnceLock::new(),
        };
        let until = Instant::now() + limits.connection();
        HttpConnection { sandbox, scope, pinned, until, record: Mutex::new(record) }
    }

    pub(crate) fn scheme(&self) -> UrlScheme {
        match self.scope {
            RequestScope::Host(..) => UrlScheme::Https,
            RequestScope::Anywhere | RequestScope::Target(..) => UrlScheme::Http,
        }
    }

    /// The port that requests go to where they do not say.
    pub(crate) fn port(&self) -> u16 {
        match self.scope {
            RequestScope::Anywhere => 80,
            RequestScope::Host(_, port) | RequestScope::Target(_, port) => port,
        }
    }

    /// The one host of this connection, once it is known.
    pub(crate) fn host(&self) -> Option<&Host> {
        self.pinned.get()
    }

    /// What can be said of it without a request.
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

    fn record(&self) -> MutexGuard<'_, OpenRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a refusal for which no request could be parsed.
    async fn record_refusal(&self, shared: &Shared, refusal: &Refusal) {
        let rules = shared.rules.load_full();
        let record = self.record().open_request(self.audit_facts());
        drop(refusal::refuse(record, refusal, &rules, BodyAudience::Person).await);
    }
}

impl RequestMonitor {
    fn new(connection: &Arc<HttpConnection>, version: HttpVersion) -> Arc<Self> {
        Arc::new(RequestMonitor {
            connection: connection.clone(),
            version,
            cut: Arc::default(),
            byte_count: Mutex::default(),
            broken: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            body_fault: OnceLock::new(),
            reached_filter: AtomicBool::new(false),
        })
    }

    /// In the only form in which Pingora passes data of ours to the filters, for HTTP/1 and HTTP/2 alike.
    fn digest(self: &Arc<Self>) -> Arc<ProxyDigest> {
        let nobody = ResponseHeader::build_no_case(200, None).map(Box::new);
        let response = nobody.unwrap_or_else(|_| unreachable!("200 is a status"));
        Arc::new(ProxyDigest::new(response, Some(Box::new(self.clone()))))
    }

    fn set_byte_count(&self, meter: Arc<ByteCount>) {
        *self.byte_count.lock().unwrap_or_else(PoisonError::into_inner) = Some(meter);
    }

    fn set_broken(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    fn set_answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Returns when the origin has not begun to answer although nothing is sent any more.
    async fn wait_unanswered(&self, patience: Duration) {
        loop {
            let before = self.byte_total();
            tokio::time::sleep(patience + TIMEOUT_GRACE).await;
            match (self.answered.load(Ordering::Relaxed), self.byte_total() == before) {
                (true, _) => return std::future::pending().await,
                (false, true) => return,
                (false, false) => {}
            }
        }
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    fn set_body_fault(&self, fault: ChunkFault) {
        self.body_fault.get_or_init(|| fault); // the first is the one
    }

    /// What is wrong with the body, if it was found to be.
    fn body_refusal(&self) -> Option<Refusal> {
        self.body_fault.get().map(|fault| Refusal::from(Reason::BadRequest).with_detail(fault))
    }

    fn set_reached_filter(&self) {
        self.reached_filter.store(true, Ordering::Relaxed);
    }

    /// Records a request that Pingora turned down before our filters saw it: it too was an attempt.
    async fn record_early_reject(&self, shared: &Shared) {
        if !self.reached_filter.load(Ordering::Relaxed) {
            self.connection.record_refusal(shared, &Reason::BadRequest.into()).await;
        }
    }

    fn byte_total(&self) -> Option<u64> {
        let meter = self.byte_count.lock().unwrap_or_else(PoisonError::into_inner);
        meter.as_ref().map(|meter| meter.total())
    }

    /// Runs a request until it is done, cut, silent for too long, or its connection too old. Dropping it closes the connection, or
    /// resets the stream.
    async fn supervise<T>(
        &self,
        limits: &TrafficLimits,
        request: impl Future<Output = Option<T>>,
    ) -> Option<T> {
        tokio::select! {
            done = request => done,
            _ = self.cut.wait() => None,
            () = tokio::time::sleep_until(self.connection.until.into()) => {
                self.cut.trigger(Reason::LifetimeSpent);
                None
            }
            () = self.wait_unanswered(limits.first_byte()) => {
                self.cut.trigger(Reason::UpstreamTimeout);
                None
            }
            () = wait_idle(limits.idle().max(limits.first_byte()) / 2 + TIMEOUT_GRACE, || self.byte_total()) => {
                self.cut.trigger(Reason::IdleTooLong);
                None
            }
        }
    }
}
