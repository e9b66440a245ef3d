//! The life of a connection: identify, detect, decide, depart, act. Whatever happens, it has a record.

mod channel;
pub mod detect;
mod explicit;
mod inbound;
pub(crate) mod leaf_certs;
pub(crate) mod listen;
pub(crate) mod listener_set;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use audit::{AttemptOutcome, Ending, FailureCode};
use bytes::Buf;
use rules::budget::BudgetKind;
use rules::configuration::ListenerMode;
use rules::facts::{ConnectTarget, HttpVersion};
use rules::quota::Resource;
use rules::{Channel, Host, Permit, Reason, RuleSet, SandboxRef};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::accept::detect::detect;
use crate::accept::explicit::{ExplicitRequest, ReplyFormat};
use crate::accept::inbound::{InboundConnection, reply_format};
use crate::accept::leaf_certs::LeafCerts;
use crate::budget::live::CutSignal;
use crate::egress::departure::{Departure, DepartureTerms};
use crate::egress::shared::Shared;
use crate::egress::stream::{PrefixedStream, StreamSocket};
use crate::egress::tunnel::{self, TunnelContext, TunnelEnd};
use crate::http::{ClientStream, HttpConnection, HttpEngine, RequestScope};
use crate::inspect::AttemptContent;
use crate::memory::MemoryGuard;
use crate::quota::ConnectionSlot;
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::{self, BodyAudience, Refusal};

/// A connection as a listener accepted it.
#[derive(Debug)]
pub(crate) struct AcceptedConnection {
    pub(crate) socket: StreamSocket,
    pub(crate) mode: ListenerMode,
    /// The channels that the kernel reports; a connection without one is refused.
    pub(crate) channels: Vec<Channel>,
    pub(crate) source: Option<SocketAddr>,
    /// Where a transparent connection was going. Never dialled.
    pub(crate) original_dst: Option<SocketAddr>,
    pub(crate) listener: ListenerSignals,
}

/// What ends the connections of a listener.
#[derive(Clone, Debug)]
pub(crate) struct ListenerSignals {
    /// True once they should finish: no further requests.
    pub(crate) stop: watch::Receiver<bool>,
    /// Cuts those that are still open.
    pub(crate) cut: Arc<CutSignal>,
}

/// Serves connections.
pub(crate) struct ConnectionHandler {
    pub(crate) shared: Arc<Shared>,
    pub(crate) engine: HttpEngine,
    pub(crate) guard: Arc<MemoryGuard>,
    pub(crate) leaf_certs: LeafCerts,
    /// Places for connections without quota that wait for the answer of their refusal.
    pub(crate) refused: Semaphore,
}

/// How many connections without quota may wait for the answer of their refusal, for at most two seconds each.
pub(crate) const MAX_REFUSED: usize = 64;

/// How long a client has for its first bytes if nothing it could send would be allowed: enough to learn the name it
/// wants, for the record and for an answer in its protocol.
const UNREACHABLE_WAIT: Duration = Duration::from_secs(1);

/// What happens to a connection once its protocol is known.
enum NextStage {
    /// Terminate TLS for a decided host, then decide each request.
    Intercept(Host, u16),
    /// Relay bytes, unseen.
    Tunnel(Permit),
    /// Decide each plain HTTP request by itself.
    Plain(RequestScope, HttpVersion),
}

impl ConnectionHandler {
    /// Serves one accepted connection, and writes one record of it whatever happens.
    ///
    /// Each stage is boxed by itself. A task's future is as large as its largest stage, and a tunnel may live for a day:
    /// boxed, it holds the memory of the stage that runs now, not the TLS and HTTP state of those before it.
    pub(crate) async fn serve(&self, accepted: AcceptedConnection) {
        let (mut inbound, identified) = self.open(accepted);
        let admitted = identified.and_then(|sandbox| {
            let slot = self.acquire_slot(&inbound.rules, &sandbox)?;
            Ok((sandbox, slot))
        });
        let (sandbox, _slot) = match admitted {
            Ok(admitted) => admitted,
            Err(refusal) => {
                // It holds no quota, so only a few may wait for their answer; the others are closed at once.
                return match self.refused.try_acquire() {
                    Ok(_answered) => Box::pin(inbound.refuse(&refusal)).await,
                    Err(_) => Box::pin(inbound.close_refused(&refusal)).await,
                };
            }
        };
        match Box::pin(self.decide(&mut inbound, &sandbox)).await {
            Ok(NextStage::Intercept(host, port)) => {
                Box::pin(self.intercept(inbound, sandbox, host, port)).await;
            }
            Ok(NextStage::Tunnel(permit)) => {
                Box::pin(self.serve_tunnel(inbound, permit)).await;
            }
            Ok(NextStage::Plain(scope, version)) => {
                Box::pin(self.serve_plain(inbound, sandbox, scope, version)).await;
            }
            Err(refusal) => {
                self.shared.inspect_refused(&sandbox.id, inbound.host.iter(), &inbound.record).await;
                Box::pin(inbound.refuse(&refusal)).await;
            }
        }
    }

    /// Opens the record and identifies the sandbox by its channel.
    fn open(&self, accepted: AcceptedConnection) -> (InboundConnection, Result<SandboxRef, Refusal>) {
        let AcceptedConnection { socket, mode, channels, source, original_dst, listener } = accepted;
        let rules = self.shared.rules.load_full();
        let arrival = record::arrival(&channels, source, original_dst);
        let mut record = self.shared.log.open_record(arrival);
        let identified = rules.sandboxes().identify_connection(&channels.into());
        if let Ok(sandbox) = &identified {
            record.set_sandbox(record::subject(sandbox));
        }
        let stream = PrefixedStream::new(socket);
        let reply_format = ReplyFormat::Undetected;
        let host = None;
        let inbound =
            InboundConnection { stream, record, host, rules, reply_format, mode, original_dst, listener };
        (inbound, identified.map_err(Refusal::from))
    }

    /// Takes one of the sandbox's connection slots.
    fn acquire_slot(&self, rules: &RuleSet, sandbox: &SandboxRef) -> Result<ConnectionSlot, Refusal> {
        let budget = rules.budgets_of(sandbox).limit(BudgetKind::Connections);
        self.shared.quotas.reserve_connection(&sandbox.id, budget)
    }

    /// Reads from the first byte until the connection can be decided.
    ///
    /// The rules are loaded and the sandbox identified again after every wait for the client. It may take seconds to
    /// send its first bytes, and a reload meanwhile must apply; the snapshot that decides is the one that records.
    async fn decide(
        &self,
        inbound: &mut InboundConnection,
        sandbox: &SandboxRef,
    ) -> Result<NextStage, Refusal> {
        let limits = &self.shared.limits;
        let _first_bytes = self.shared.quotas.reserve(
            Resource::Buffers,
            &sandbox.id,
            limits.hello_bytes.max(limits.head_bytes),
        )?;
        let deadline = Instant::now() + limits.first_bytes();
        let Some((target, port)) = self.find_target(inbound, sandbox, deadline).await? else {
            return Ok(NextStage::Plain(RequestScope::Anywhere, HttpVersion::Http1));
        };
        let sandbox = &inbound.reload_rules(&self.shared, sandbox)?;
        let (deadline, unreachable) = match inbound.decide_unread(sandbox, &target, port) {
            Ok(Some(permit)) => return Ok(NextStage::Tunnel(permit)),
            Ok(None) => (deadline, None),
            Err(refusal) => (deadline.min(Instant::now() + UNREACHABLE_WAIT), Some(refusal)),
        };
        let detected = detect(&mut inbound.stream, limits, deadline).await;
        inbound.reply_format = reply_format(&inbound.stream, &detected);
        let detected = match (detected, unreachable) {
            (Err(late), Some(refusal)) if late.reason == Reason::FirstBytesLate => return Err(refusal),
            (detected, _) => detected?,
        };
        let sandbox = &inbound.reload_rules(&self.shared, sandbox)?;
        inbound.decide(sandbox, target, port, detected)
    }

    /// Finds where the connection goes: its original destination, or what the client of the explicit proxy asks for; none
    /// for plain requests, each of which names its own target.
    async fn find_target(
        &self,
        inbound: &mut InboundConnection,
        sandbox: &SandboxRef,
        deadline: Instant,
    ) -> Result<Option<(ConnectTarget, u16)>, Refusal> {
        if inbound.mode != ListenerMode::Explicit {
            let original = inbound.original_dst.ok_or(Reason::UnknownChannel)?;
            let name = self.shared.resolver.name_of(&sandbox.id, original.ip());
            let target = match name {
                Some(name) => ConnectTarget::Named(Host::Name(name)),
                None => ConnectTarget::Dialled(original.ip().to_canonical()),
            };
            return Ok(Some((target, original.port())));
        }
        let limits = &self.shared.limits;
        let InboundConnection { stream, reply_format, .. } = inbound;
        let request = explicit::read_request(stream, limits, deadline, reply_format).await?;
        let ExplicitRequest::Tunnel { host, port, length } = request else { return Ok(None) };
        inbound.record_facts(Some(&host), port, None);
        let sandbox = &inbound.reload_rules(&self.shared, sandbox)?;
        let target = ConnectTarget::Named(host);
        inbound.decide_unread(sandbox, &target, port)?;
        inbound.stream.ahead.advance(length);
        explicit::confirm_tunnel(&mut inbound.stream, inbound.reply_format).await?;
        // Granted: the client takes every byte from here on for the origin's, also those of a refusal.
        inbound.reply_format = ReplyFormat::Silent;
        Ok(Some((target, port)))
    }

    /// Departs and relays bytes.
    async fn serve_tunnel(&self, mut inbound: InboundConnection, permit: Permit) {
        let _quota = match self.shared.quotas.reserve_tunnel(permit.sandbox()) {
            Ok(reserved) => reserved,
            Err(refusal) => return inbound.refuse(&refusal.under(&permit)).await,
        };
        let cut = CutSignal::under(&inbound.listener.cut);
        let terms = DepartureTerms {
            upfront: inbound.stream.ahead.len() as u64,
            treatment: permit.treatment().as_str(),
            credentials: &[],
            cut: cut.clone(),
            content: AttemptContent::Name,
        };
        let (shared, rules) = (&self.shared, inbound.rules.clone());
        let departed = Departure::begin(shared, &rules, &permit, terms, &mut inbound.record).await;
        let dialled = match departed {
            Ok(departure) => departure
                .dial(shared, &mut inbound.record)
                .await
                .map(|(upstream, held)| (departure, StreamSocket::from(upstream), held)),
            Err(refusal) => Err(refusal),
        };
        let (departure, upstream, _held) = match (dialled, cut.reason()) {
            (Ok(dialled), _) => dialled,
            // Cut while it dialled: it ends as an open tunnel does.
            (Err(_), Some(reason)) => {
                return inbound.record.close(AttemptOutcome::new(record::cut_ending(reason)));
            }
            (Err(refusal), None) => return inbound.refuse(&refusal).await,
        };
        let InboundConnection { stream: PrefixedStream { ahead, socket }, record, .. } = inbound;
        let byte_count = record.byte_count();
        let context = TunnelContext {
            byte_count: &byte_count,
            cut: &cut,
            charges: &departure.charges,
            quotas: &shared.quotas,
            sandbox: departure.permit().sandbox(),
        };
        let end = tunnel::relay(&socket, &upstream, ahead, &shared.limits, context).await;
        metrics::count_bytes(&byte_count);
        record.close(AttemptOutcome::new(tunnel_ending(&end)));
    }

    /// Terminates TLS with a leaf certificate for the decided name, then serves requests.
    async fn intercept(&self, inbound: InboundConnection, sandbox: SandboxRef, host: Host, port: u16) {
        let config = match self.leaf_certs.server_config(&sandbox.id, &host) {
            Ok(config) => config,
            Err(refusal) => return inbound.refuse(&refusal).await,
        };
        let InboundConnection { stream, record, rules, listener, .. } = inbound;
        let (tls, version) = match self.accept_tls(&sandbox, config, stream).await {
            Ok(accepted) => accepted,
            Err(refusal) => {
                // The handshake took the stream with it: record the refusal, there is nobody to answer.
                drop(refusal::refuse(record, &refusal, &rules, BodyAudience::Person, None).await);
                return;
            }
        };
        let scope = RequestScope::Host(host, port);
        let connection = HttpConnection::new(sandbox, scope, &self.shared.limits, record, &listener.cut);
        self.engine.serve(ClientStream::Tls(tls), connection, version, &listener.stop).await;
    }

    async fn accept_tls(
        &self,
        sandbox: &SandboxRef,
        config: Arc<rustls::ServerConfig>,
        stream: PrefixedStream,
    ) -> Result<(Box<TlsStream<PrefixedStream>>, HttpVersion), Refusal> {
        let handshake = async {
            let _turn = self.shared.handshakes.turn(sandbox.id.clone()).await;
            TlsAcceptor::from(config).accept(stream).await
        };
        let accepted = timeout(self.shared.limits.first_bytes(), handshake).await;
        let accepted = accepted.map_err(|_| Reason::FirstBytesLate)?;
        let tls = accepted.map_err(|error| Refusal::from(Reason::BadHandshake).with_detail(error))?;
        let version = match tls.get_ref().1.alpn_protocol() {
            Some(b"h2") => HttpVersion::Http2,
            _ => HttpVersion::Http1,
        };
        Ok((Box::new(tls), version))
    }

    /// Serves requests that arrived without TLS.
    async fn serve_plain(
        &self,
        inbound: InboundConnection,
        sandbox: SandboxRef,
        scope: RequestScope,
        version: HttpVersion,
    ) {
        let InboundConnection { stream, record, listener, .. } = inbound;
        let connection = HttpConnection::new(sandbox, scope, &self.shared.limits, record, &listener.cut);
        self.engine.serve(ClientStream::Plain(stream), connection, version, &listener.stop).await;
    }
}

fn tunnel_ending(end: &TunnelEnd) -> Ending {
    match end {
        TunnelEnd::Both => Ending::Completed,
        TunnelEnd::Broken => Ending::Failed(FailureCode::ConnectionBroke.into()),
        TunnelEnd::Cut(reason) => record::cut_ending(*reason),
    }
}
