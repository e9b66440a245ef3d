//! The life of a connection: identify, classify, decide, record, act. Whatever happens it has a record.

mod channel;
pub mod detect;
mod explicit;
pub(crate) mod leaf_certs;
pub(crate) mod listen;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use audit::{AttemptOutcome, Ending, OpenRecord, StableCode};
use rules::budget::{BudgetKind, UsageKind};
use rules::configuration::ListenerMode;
use rules::decision::Treatment;
use rules::facts::{ConnectFacts, ConnectTarget, Facts, HttpVersion, Protocol};
use rules::{Channel, Decision, Host, Permit, Reason, RuleSet, SandboxRef};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::accept::detect::{Detected, detect};
use crate::accept::explicit::{ExplicitRequest, ReplyFormat};
use crate::accept::leaf_certs::LeafCerts;
use crate::budget::live::CutSignal;
use crate::budget::slots::Slot;
use crate::egress::dial::dial;
use crate::egress::shared::Shared;
use crate::egress::stream::{PrefixedStream, StreamSocket};
use crate::egress::tunnel::{self, TunnelContext, TunnelEnd};
use crate::http::{ClientStream, HttpConnection, HttpEngine, RequestScope};
use crate::memory::MemoryGuard;
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::{BodyAudience, Refusal, RefusalResponse, tls_alert};

/// How long a client that was refused is read on, so that it gets to see why.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes read on meanwhile.
const LINGER_BYTES: usize = 256 << 10;

/// A connection as it was accepted.
#[derive(Debug)]
pub(crate) struct AcceptedConnection {
    pub(crate) socket: StreamSocket,
    pub(crate) mode: ListenerMode,
    /// What the kernel says of it; none where it does not, and then it is refused.
    pub(crate) channels: Vec<Channel>,
    pub(crate) source: Option<SocketAddr>,
    /// Where a transparent connection was sent: never dialled.
    pub(crate) original_dst: Option<SocketAddr>,
}

/// What serves connections.
pub(crate) struct ConnectionHandler {
    pub(crate) shared: Arc<Shared>,
    pub(crate) engine: HttpEngine,
    pub(crate) guard: Arc<MemoryGuard>,
    pub(crate) leaf_certs: LeafCerts,
    pub(crate) stop: watch::Receiver<bool>,
}

/// One connection on its way.
struct InboundConnection {
    stream: Option<PrefixedStream>,
    record: Option<OpenRecord>,
    rules: Arc<RuleSet>,
    reply_format: ReplyFormat,
    mode: ListenerMode,
    original_dst: Option<SocketAddr>,
    sandbox: Option<SandboxRef>,
    slot: Option<Slot>,
}

/// What is to be done with a connection, once it is known what it speaks.
enum NextStage {
    /// Requests in TLS to a host that is decided; each is decided by itself too.
    Intercept(Host, u16),
    /// Bytes, unseen.
    Pass(Permit),
    /// Requests without TLS: each says where it goes.
    Plain(RequestScope, HttpVersion),
}

impl ConnectionHandler {
    /// Serves one accepted connection. Its stages are boxed one by one, so that a long-lived one holds no
    /// memory of those before it.
    pub(crate) async fn serve(&self, accepted: AcceptedConnection) {
        let mut visit = self.identify(accepted);
        let next = Box::pin(self.decide(&mut visit)).await;
        let done = match next {
            Ok(NextStage::Intercept(host, port)) => {
                Box::pin(self.intercept(&mut visit, host, port)).await
            }
            Ok(NextStage::Pass(permit)) => Box::pin(self.serve_tunnel(&mut visit, permit)).await,
            Ok(NextStage::Plain(scope, version)) => {
                Box::pin(self.serve_plain(&mut visit, scope, version)).await
            }
            Err(refusal) => Err(refusal),
        };
        if let Err(refusal) = done {
            Box::pin(visit.refuse(&refusal)).await;
        }
    }

    fn identify(&self, accepted: AcceptedConnection) -> InboundConnection {
        let AcceptedConnection { socket, mode, channels, source, original_dst: aimed } = accepted;
        let rules = self.shared.rules.load_full(); // one snapshot, so one connection sees one policy
        let mut record = self.shared.log.open_record(record::arrival(&channels, source, aimed));
        let sandbox = rules.sandboxes().identify(&channels).ok();
        if let Some(sandbox) = &sandbox {
            record.set_sandbox(record::subject(sandbox));
        }
        let (stream, record) = (Some(PrefixedStream::new(socket)), Some(record));
        InboundConnection {
            stream,
            record,
            rules,
            reply_format: ReplyFormat::Silent,
            mode,
            original_dst: aimed,
            sandbox,
            slot: None,
        }
    }

    /// From the first byte to what is to be done.
    async fn decide(&self, visit: &mut InboundConnection) -> Result<NextStage, Refusal> {
        let limits = &self.shared.limits;
        let sandbox = visit.sandbox.clone().ok_or(Reason::UnknownChannel)?;
        let budget = visit.rules.budgets_of(&sandbox).limit(BudgetKind::Connections);
        visit.slot = Some(self.shared.connection_limit.acquire(&sandbox.id, limits, budget)?);
        let deadline = Instant::now() + limits.first_bytes();
        let Some((target, port)) = self.find_target(visit, &sandbox, deadline).await? else {
            return Ok(NextStage::Plain(RequestScope::Anywhere, HttpVersion::Http1));
        };
        visit.rules = self.shared.rules.load_full(); // those of now: the client may have taken its time
        // A server may be the first to speak: where raw bytes are allowed nobody waits for the client's.
        if let Some(permit) = visit.decide_raw(&sandbox, &target, port) {
            return Ok(NextStage::Pass(permit));
        }
        let stream = visit.stream.as_mut().ok_or(Reason::FirstBytesLate)?;
        if matches!(visit.reply_format, ReplyFormat::Http(_)) {
            visit.reply_format = ReplyFormat::Silent; // what is said inside is not said to the proxy
        }
        let spoken = detect(stream, limits, deadline).await;
        visit.reply_format = reply_format(stream, &spoken);
        visit.rules = self.shared.rules.load_full();
        visit.decide(&sandbox, target, port, spoken?)
    }

    /// Where the connection goes, by what it was told or where it was sent; none for plain requests.
    async fn find_target(
        &self,
        visit: &mut InboundConnection,
        sandbox: &SandboxRef,
        deadline: Instant,
    ) -> Result<Option<(ConnectTarget, u16)>, Refusal> {
        if visit.mode != ListenerMode::Explicit {
            let aimed = visit.original_dst.ok_or(Reason::UnknownChannel)?;
            let named = self.shared.resolver.name_of(&sandbox.id, aimed.ip());
            let target = match named {
                Some(name) => ConnectTarget::Named(Host::Name(name)),
                None => ConnectTarget::Dialled(aimed.ip().to_canonical()),
            };
            return Ok(Some((target, aimed.port())));
        }
        let stream = visit.stream.as_mut().ok_or(Reason::FirstBytesLate)?;
        let limits = &self.shared.limits;
        let wanted =
            explicit::read_request(stream, limits, deadline, &mut visit.reply_format).await?;
        let ExplicitRequest::Tunnel(host, port) = wanted else { return Ok(None) };
        visit.record_facts(Some(&host), port, None);
        explicit::check_reachable(&visit.rules, sandbox, &host, port)?;
        let stream = visit.stream.as_mut().ok_or(Reason::FirstBytesLate)?;
        explicit::confirm_tunnel(stream, visit.reply_format).await?;
        Ok(Some((ConnectTarget::Named(host), port)))
    }

    /// Passes bytes: records, resolves, dials, relays.
    async fn serve_tunnel(
        &self,
        visit: &mut InboundConnection,
        permit: Permit,
    ) -> Result<(), Refusal> {
        let shared = &self.shared;
        let tab = shared.charge(&permit)?;
        let said = visit.stream.as_ref().map_or(0, |stream| stream.ahead.len() as u64);
        tab.charge(UsageKind::Upload, said).map_err(|spent| spent.into_refusal(&permit))?;
        let verdict = record::permit_record(&permit, &visit.rules);
        let record = visit.record.as_mut().ok_or(Reason::LogUnwritable)?;
        metrics::count_decision("allowed", permit.treatment().as_str());
        let receipt = record.record_decision(verdict).await?;
        let found = shared.resolver.resolve(&permit).await?;
        let leave = visit.rules.admit(&permit, &found)?;
        let (upstream, address) =
            dial(&leave, &receipt, shared.mark, shared.limits.connect()).await?;
        record.set_dialled(address);
        let (meter, cut) = (record.byte_count(), Arc::new(CutSignal::default()));
        let _place = shared.live.register(
            &permit,
            Some(address.ip()),
            meter.clone(),
            cut.clone(),
            tab.clone(),
        );
        shared.recheck_permit(&permit, address.ip(), &tab)?;
        let PrefixedStream { ahead, socket } = visit.stream.take().ok_or(Reason::FirstBytesLate)?;
        let upstream = StreamSocket::from(upstream);
        meter.add_sent(ahead.len() as u64);
        let ended = match tunnel::write_all(&upstream, &ahead).await {
            Ok(()) => {
                drop(ahead);
                let passage = TunnelContext { byte_count: &meter, cut: &cut, charges: &tab };
                tunnel::relay(&socket, &upstream, &shared.limits, passage).await
            }
            Err(_) => TunnelEnd::Broken,
        };
        metrics::count_bytes(&meter);
        visit.close_record(ended);
        Ok(())
    }

    /// Ends TLS with a leaf for the decided name, then reads requests.
    async fn intercept(
        &self,
        visit: &mut InboundConnection,
        host: Host,
        port: u16,
    ) -> Result<(), Refusal> {
        let sandbox = visit.sandbox.clone().ok_or(Reason::UnknownChannel)?;
        let server = self.leaf_certs.server_config(&sandbox.id, &host)?;
        let stream = visit.stream.take().ok_or(Reason::FirstBytesLate)?;
        let handshake = TlsAcceptor::from(server).accept(stream);
        let shaken = timeout(self.shared.limits.first_bytes(), handshake).await;
        let shaken = shaken.map_err(|_| Reason::FirstBytesLate)?;
        let tls = shaken.map_err(|error| Refusal::from(Reason::BadHandshake).with_detail(error))?;
        let version = match tls.get_ref().1.alpn_protocol() {
            Some(b"h2") => HttpVersion::Http2,
            _ => HttpVersion::Http1,
        };
        let record = visit.record.take().ok_or(Reason::LogUnwritable)?;
        let connection = HttpConnection::new(
            sandbox,
            RequestScope::Host(host, port),
            &self.shared.limits,
            record,
        );
        let carrier = ClientStream::Tls(Box::new(tls));
        self.engine.serve(carrier, connection, version, &self.stop).await;
        Ok(())
    }

    /// Reads requests that came without TLS.
    async fn serve_plain(
        &self,
        visit: &mut InboundConnection,
        scope: RequestScope,
        version: HttpVersion,
    ) -> Result<(), Refusal> {
        let sandbox = visit.sandbox.clone().ok_or(Reason::UnknownChannel)?;
        let stream = visit.stream.take().ok_or(Reason::FirstBytesLate)?;
        let record = visit.record.take().ok_or(Reason::LogUnwritable)?;
        let connection = HttpConnection::new(sandbox, scope, &self.shared.limits, record);
        self.engine.serve(ClientStream::Plain(stream), connection, version, &self.stop).await;
        Ok(())
    }
}

/// How to say no to a client that spoke like this.
fn reply_format(stream: &PrefixedStream, spoken: &Result<Detected, Refusal>) -> ReplyFormat {
    match (spoken, stream.ahead.first()) {
        (Ok(Detected::Tls { .. }), _) | (Err(_), Some(22)) => ReplyFormat::Tls,
        (Ok(Detected::Http1(head)), _) => {
            ReplyFormat::Http(BodyAudience::from_accept(head.accept.as_deref()))
        }
        (Err(_), Some(first)) if first.is_ascii_alphabetic() => {
            ReplyFormat::Http(BodyAudience::Person)
        }
        (Ok(Detected::Http2 | Detected::Raw) | Err(_), _) => ReplyFormat::Silent,
    }
}

impl InboundConnection {
    /// Leave to pass raw bytes, if there is such a rule.
    fn decide_raw(
        &mut self,
        sandbox: &SandboxRef,
        target: &ConnectTarget,
        port: u16,
    ) -> Option<Permit> {
        let facts = ConnectFacts { target: target.clone(), port, protocol: Protocol::Raw };
        match self.rules.decide(sandbox, &Facts::Connect(facts)) {
            Decision::Allow(permit) if *permit.treatment() == Treatment::Raw => {
                self.record_facts(Some(permit.host()), port, None);
                Some(permit)
            }
            Decision::Allow(_) | Decision::Deny(_) => None,
        }
    }

    /// Decides on what was said. Requests without TLS are decided one by one.
    fn decide(
        &mut self,
        sandbox: &SandboxRef,
        target: ConnectTarget,
        port: u16,
        spoken: Detected,
    ) -> Result<NextStage, Refusal> {
        let (protocol, tls) = match spoken {
            Detected::Http1(_) => {
                return Ok(NextStage::Plain(
                    RequestScope::Target(target, port),
                    HttpVersion::Http1,
                ));
            }
            Detected::Http2 => {
                return Ok(NextStage::Plain(
                    RequestScope::Target(target, port),
                    HttpVersion::Http2,
                ));
            }
            Detected::Raw => (Protocol::Raw, None),
            Detected::Tls { sni, ech, version } => {
                let seen = sni.as_ref().map(record::host);
                let tls = audit::RecordedTls { version: version.into(), sni: seen };
                (Protocol::Tls { sni, ech }, Some(tls))
            }
        };
        self.record_facts(target_host(&target, &protocol), port, tls);
        let started = Instant::now();
        let facts = Facts::Connect(ConnectFacts { target, port, protocol });
        let decision = self.rules.decide(sandbox, &facts);
        metrics::observe_decide(started.elapsed());
        match decision {
            Decision::Allow(permit)
                if matches!(permit.treatment(), Treatment::Raw | Treatment::Tunnel) =>
            {
                Ok(NextStage::Pass(permit))
            }
            Decision::Allow(permit) => Ok(NextStage::Intercept(permit.host().clone(), port)),
            Decision::Deny(denial) => Err(denial.into()),
        }
    }

    /// Says in the record what the connection wants.
    fn record_facts(&mut self, host: Option<&Host>, port: u16, tls: Option<audit::RecordedTls>) {
        let host = host.map(record::host);
        let facts = audit::RecordedConnection { host, port: Some(port), tls };
        if let Some(record) = &mut self.record {
            record.set_facts(audit::RecordedFacts::Connection(facts));
        }
    }

    fn close_record(&mut self, ended: TunnelEnd) {
        let ending = match ended {
            TunnelEnd::Both => Ending::Completed,
            TunnelEnd::Broken => Ending::Failed(StableCode("connection_broke")),
            TunnelEnd::Cut(reason) => record::cut_ending(reason),
        };
        if let Some(record) = self.record.take() {
            record.close(AttemptOutcome::new(ending));
        }
    }

    /// Writes the refusal down, then tells the client in words it understands.
    async fn refuse(&mut self, refusal: &Refusal) {
        metrics::count_decision(refusal.reason.code(), "refused");
        tracing::debug!(reason = %refusal.reason, detail = refusal.detail, "refused");
        let Some(record) = self.record.take() else { return };
        let id = record.id();
        if record.record_refusal(record::refusal_record(refusal, &self.rules)).await.is_err() {
            tracing::warn!(reason = %refusal.reason, "a refusal could not be recorded");
        }
        self.detect_reply_format().await;
        let Some(stream) = self.stream.take() else { return };
        let answer = match self.reply_format {
            ReplyFormat::Http(reader) => {
                RefusalResponse::new(refusal, &self.rules, &id, reader).to_http1()
            }
            ReplyFormat::Silent => Vec::new(),
            ReplyFormat::Socks => {
                explicit::socks_reply(explicit::socks_reply_code(refusal.reason)).to_vec()
            }
            ReplyFormat::Tls => tls_alert(refusal.reason).to_vec(),
        };
        if !answer.is_empty() {
            drop(timeout(LINGER, send_and_linger(stream, &answer)).await); // a client that does not listen is left
        }
    }
}

impl InboundConnection {
    /// A client of an explicit proxy that was refused before its first byte is told in what it speaks.
    async fn detect_reply_format(&mut self) {
        let Some(stream) = &mut self.stream else { return };
        if self.mode != ListenerMode::Explicit
            || self.reply_format != ReplyFormat::Silent
            || !stream.ahead.is_empty()
        {
            return;
        }
        drop(timeout(LINGER, stream.read_ahead()).await); // one that says nothing is told nothing
        if stream.ahead.first().is_some_and(u8::is_ascii_alphabetic) {
            self.reply_format = ReplyFormat::Http(BodyAudience::Person);
        }
    }
}

/// Says the last word and reads on for a moment: closing with bytes unread would take it back.
async fn send_and_linger(mut stream: PrefixedStream, answer: &[u8]) -> std::io::Result<()> {
    stream.socket.write_all(answer).await?;
    stream.socket.shutdown_write();
    let mut rest = [0; 4096];
    let mut read = 0;
    while read < LINGER_BYTES {
        match stream.socket.read(&mut rest).await? {
            0 => break,
            more => read += more,
        }
    }
    Ok(())
}

fn target_host<'a>(target: &'a ConnectTarget, protocol: &'a Protocol) -> Option<&'a Host> {
    match (target, protocol) {
        (ConnectTarget::Named(host), _) => Some(host),
        (_, Protocol::Http { host } | Protocol::Tls { sni: host, .. }) => host.as_ref(),
        (ConnectTarget::Dialled(_), Protocol::Raw) => None,
    }
}
