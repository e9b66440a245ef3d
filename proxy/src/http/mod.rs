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

use audit::{Meter, OpenRecord};
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::server::configuration::ServerConf;
use pingora_http::ResponseHeader;
use pingora_proxy::HttpProxy;
use rules::facts::{HttpVersion, Scheme, Target};
use rules::limits::Limits;
use rules::{Host, Reason, SandboxRef};
use tokio::sync::watch;

pub(crate) use carrier::Carrier;
pub(crate) use filter::{failure, head_bytes, request_bytes};

use crate::budget::live::Cut;
use crate::egress::shared::Shared;
use crate::http::chunks::ChunkFault;
use crate::memory::Guard;
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::Refusal;
use filter::Filter;

/// Pingora's own time-outs, which can still be explained to the client, come first by so much.
const GRACE: Duration = Duration::from_secs(1);

/// Pingora's proxy, fed with connections of our own.
pub(crate) struct Engine {
    shared: Arc<Shared>,
    proxy: Arc<HttpProxy<Filter>>,
}

/// What is known of where the requests of a connection go.
#[derive(Clone, Debug)]
pub(crate) enum Scope {
    /// Wherever each of them says: they are written for a proxy.
    Anywhere,
    /// In TLS, to a host that was decided with the connection.
    Host(Host, u16),
    /// Without TLS, where the connection was sent or said it goes.
    Target(Target, u16),
}

/// One HTTP connection.
pub(crate) struct Connection {
    pub(crate) sandbox: SandboxRef,
    pub(crate) scope: Scope,
    /// The host of its first request: one connection is for one host, except where it is a proxy's.
    pinned: OnceLock<Host>,
    until: Instant,
    record: Mutex<OpenRecord>,
}

/// One request on its connection: what the filters and whoever watches them share.
pub(crate) struct Exchange {
    pub(crate) connection: Arc<Connection>,
    pub(crate) version: HttpVersion,
    pub(crate) cut: Arc<Cut>,
    /// Counts the bytes of the request, once it has a record.
    meter: Mutex<Option<Arc<Meter>>>,
    /// Whether the client went away in the middle of it.
    broken: AtomicBool,
    /// Whether the origin has begun to answer.
    answered: AtomicBool,
    /// What is wrong with its body.
    malformed: OnceLock<ChunkFault>,
    /// Whether it came as far as our filters, which make its record.
    met: AtomicBool,
}

impl Engine {
    pub(crate) fn new(
        shared: Arc<Shared>,
        guard: Arc<Guard>,
        trust: &crate::egress::roots::Roots,
    ) -> Self {
        let conf = Arc::new(ServerConf {
            ca_file: Some(trust.path()),
            upstream_keepalive_pool_size: usize::try_from(shared.limits.pool_connections)
                .unwrap_or(usize::MAX),
            max_retries: crate::egress::dial::ATTEMPTS,
            ..ServerConf::default()
        });
        let mut proxy = HttpProxy::new(Filter::new(shared.clone(), guard), conf);
        proxy.handle_init_modules();
        Engine { shared, proxy: Arc::new(proxy) }
    }

    /// Serves the requests of one connection until either side is done.
    pub(crate) async fn serve(
        &self,
        carrier: Carrier,
        connection: Connection,
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

impl Connection {
    pub(crate) fn new(
        sandbox: SandboxRef,
        scope: Scope,
        limits: &Limits,
        record: OpenRecord,
    ) -> Self {
        let pinned = match &scope {
            Scope::Host(host, _) => OnceLock::from(host.clone()),
            Scope::Anywhere | Scope::Target(..) => OnceLock::new(),
        };
        let until = Instant::now() + limits.connection();
        Connection { sandbox, scope, pinned, until, record: Mutex::new(record) }
    }

    pub(crate) fn scheme(&self) -> Scheme {
        match self.scope {
            Scope::Host(..) => Scheme::Https,
            Scope::Anywhere | Scope::Target(..) => Scheme::Http,
        }
    }

    /// The port that requests go to where they do not say.
    pub(crate) fn port(&self) -> u16 {
        match self.scope {
            Scope::Anywhere => 80,
            Scope::Host(_, port) | Scope::Target(_, port) => port,
        }
    }

    /// The one host of this connection, once it is known.
    pub(crate) fn host(&self) -> Option<&Host> {
        self.pinned.get()
    }

    /// What can be said of it without a request.
    fn told(&self) -> audit::Facts {
        let host = self.host().map(record::host);
        audit::Facts::Connection(audit::Connection { host, port: Some(self.port()), tls: None })
    }

    fn pin(&self, host: &Host) {
        match self.scope {
            Scope::Anywhere => {}
            Scope::Host(..) | Scope::Target(..) => {
                self.pinned.get_or_init(|| host.clone());
            }
        }
    }

    fn record(&self) -> MutexGuard<'_, OpenRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records what was refused without a request that could be told of.
    async fn note(&self, shared: &Shared, refusal: &Refusal) {
        let rules = shared.rules.load_full();
        metrics::decision(refusal.reason.code(), "refused");
        let record = self.record().request(self.told());
        if record.refused(record::refused(refusal, &rules)).await.is_err() {
            tracing::warn!(reason = %refusal.reason, "a refusal could not be recorded");
        }
    }
}

impl Exchange {
    fn new(connection: &Arc<Connection>, version: HttpVersion) -> Arc<Self> {
        Arc::new(Exchange {
            connection: connection.clone(),
            version,
            cut: Arc::default(),
            meter: Mutex::default(),
            broken: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            malformed: OnceLock::new(),
            met: AtomicBool::new(false),
        })
    }

    /// In the only form in which Pingora passes data of ours to the filters, for HTTP/1 and HTTP/2 alike.
    fn digest(self: &Arc<Self>) -> Arc<ProxyDigest> {
        let nobody = ResponseHeader::build_no_case(200, None).map(Box::new);
        let response = nobody.unwrap_or_else(|_| unreachable!("200 is a status"));
        Arc::new(ProxyDigest::new(response, Some(Box::new(self.clone()))))
    }

    fn count_with(&self, meter: Arc<Meter>) {
        *self.meter.lock().unwrap_or_else(PoisonError::into_inner) = Some(meter);
    }

    fn set_broken(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    fn set_answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Returns when the origin has not begun to answer although nothing is sent any more.
    async fn unanswered(&self, patience: Duration) {
        loop {
            let before = self.carried();
            tokio::time::sleep(patience + GRACE).await;
            match (self.answered.load(Ordering::Relaxed), self.carried() == before) {
                (true, _) => return std::future::pending().await,
                (false, true) => return,
                (false, false) => {}
            }
        }
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    fn set_malformed(&self, fault: ChunkFault) {
        self.malformed.get_or_init(|| fault); // the first is the one
    }

    /// What is wrong with the body, if it was found to be.
    fn malformed(&self) -> Option<Refusal> {
        self.malformed.get().map(|fault| Refusal::from(Reason::BadRequest).because(fault))
    }

    fn set_met(&self) {
        self.met.store(true, Ordering::Relaxed);
    }

    /// Records a request that Pingora turned down before our filters saw it: it too was an attempt.
    async fn note_unmet(&self, shared: &Shared) {
        if !self.met.load(Ordering::Relaxed) {
            self.connection.note(shared, &Reason::BadRequest.into()).await;
        }
    }

    fn carried(&self) -> Option<u64> {
        let meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
        meter.as_ref().map(|meter| meter.total())
    }

    /// Runs a request until it is done, cut, silent for too long, or its connection too old. Dropping it closes the connection, or
    /// resets the stream.
    async fn supervise<T>(
        &self,
        limits: &Limits,
        request: impl Future<Output = Option<T>>,
    ) -> Option<T> {
        tokio::select! {
            done = request => done,
            _ = self.cut.cut() => None,
            () = tokio::time::sleep_until(self.connection.until.into()) => {
                self.cut.now(Reason::LifetimeSpent);
                None
            }
            () = self.unanswered(limits.first_byte()) => {
                self.cut.now(Reason::UpstreamTimeout);
                None
            }
            () = self.silence(limits.idle().max(limits.first_byte())) => {
                self.cut.now(Reason::IdleTooLong);
                None
            }
        }
    }

    async fn silence(&self, patience: Duration) {
        let mut before = self.carried();
        let mut still = 0;
        while still < 2 {
            tokio::time::sleep(patience / 2 + GRACE).await;
            let now = self.carried();
            still = if now == before { still + 1 } else { 0 };
            before = now;
        }
    }
}
