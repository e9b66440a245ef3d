//! The life of a connection: identify, classify, decide, record, act. Whatever happens it has a record.

mod channel;
pub mod detect;
mod explicit;
pub(crate) mod leaf_certs;
pub(crate) mod listen;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use audit::{Code, Ending, OpenRecord, Outcome};
use rules::budget::{Budget, Counted};
use rules::decision::How;
use rules::facts::{ConnectFacts, Facts, HttpVersion, Protocol, Target};
use rules::operator::Mode;
use rules::{Channel, Decision, Host, Permit, Reason, RuleSet, SandboxRef};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::accept::detect::{Spoken, classify};
use crate::accept::explicit::{Tongue, Wanted};
use crate::accept::leaf_certs::Leaves;
use crate::budget::live::Cut;
use crate::budget::slots::Seat;
use crate::egress::dial::dial;
use crate::egress::shared::Shared;
use crate::egress::stream::{Socket, Stream};
use crate::egress::tunnel::{self, Ended, Passage};
use crate::http::{Carrier, Connection, Engine, Scope};
use crate::memory::Guard;
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::{Answer, Reader, Refusal, tls_alert};

/// How long a client that was refused is read on, so that it gets to see why.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes read on meanwhile.
const LINGER_BYTES: usize = 256 << 10;

/// A connection as it was accepted.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) socket: Socket,
    pub(crate) mode: Mode,
    /// What the kernel says of it; none where it does not, and then it is refused.
    pub(crate) channels: Vec<Channel>,
    pub(crate) source: Option<SocketAddr>,
    /// Where a transparent connection was sent: never dialled.
    pub(crate) aimed: Option<SocketAddr>,
}

/// What serves connections.
pub(crate) struct Gate {
    pub(crate) shared: Arc<Shared>,
    pub(crate) engine: Engine,
    pub(crate) guard: Arc<Guard>,
    pub(crate) leaves: Leaves,
    pub(crate) stop: watch::Receiver<bool>,
}

/// One connection on its way.
struct Visit {
    stream: Option<Stream>,
    record: Option<OpenRecord>,
    rules: Arc<RuleSet>,
    tongue: Tongue,
    mode: Mode,
    aimed: Option<SocketAddr>,
    sandbox: Option<SandboxRef>,
    seat: Option<Seat>,
}

/// What is to be done with a connection, once it is known what it speaks.
enum Next {
    /// Requests in TLS to a host that is decided; each is decided by itself too.
    Intercept(Host, u16),
    /// Bytes, unseen.
    Pass(Permit),
    /// Requests without TLS: each says where it goes.
    Plain(Scope, HttpVersion),
}

impl Gate {
    /// Serves one accepted connection. Its stages are boxed one by one, so that a long-lived one holds no
    /// memory of those before it.
    pub(crate) async fn serve(&self, accepted: Accepted) {
        let mut visit = self.visit(accepted);
        let next = Box::pin(self.decide(&mut visit)).await;
        let done = match next {
            Ok(Next::Intercept(host, port)) => {
                Box::pin(self.intercept(&mut visit, host, port)).await
            }
            Ok(Next::Pass(permit)) => Box::pin(self.pass(&mut visit, permit)).await,
            Ok(Next::Plain(scope, version)) => {
                Box::pin(self.plain(&mut visit, scope, version)).await
            }
            Err(refusal) => Err(refusal),
        };
        if let Err(refusal) = done {
            Box::pin(visit.refuse(&refusal)).await;
        }
    }

    fn visit(&self, accepted: Accepted) -> Visit {
        let Accepted { socket, mode, channels, source, aimed } = accepted;
        let rules = self.shared.rules.load_full(); // one snapshot, so one connection sees one policy
        let mut record = self.shared.log.open_record(record::arrival(&channels, source, aimed));
        let sandbox = rules.sandboxes().identify(&channels).ok();
        if let Some(sandbox) = &sandbox {
            record.sandbox(record::subject(sandbox));
        }
        let (stream, record) = (Some(Stream::new(socket)), Some(record));
        Visit { stream, record, rules, tongue: Tongue::Silent, mode, aimed, sandbox, seat: None }
    }

    /// From the first byte to what is to be done.
    async fn decide(&self, visit: &mut Visit) -> Result<Next, Refusal> {
        let limits = &self.shared.limits;
        let sandbox = visit.sandbox.clone().ok_or(Reason::UnknownChannel)?;
        let budget = visit.rules.budgets_of(&sandbox).of(Budget::Connections);
        visit.seat = Some(self.shared.seats.take(&sandbox.id, limits, budget)?);
        let deadline = Instant::now() + limits.first_bytes();
        let Some((target, port)) = self.target(visit, &sandbox, deadline).await? else {
            return Ok(Next::Plain(Scope::Anywhere, HttpVersion::Http1));
        };
        visit.rules = self.shared.rules.load_full(); // those of now: the client may have taken its time
        // A server may be the first to speak: where raw bytes are allowed nobody waits for the client's.
        if let Some(permit) = visit.ask_raw(&sandbox, &target, port) {
            return Ok(Next::Pass(permit));
        }
        let stream = visit.stream.as_mut().ok_or(Reason::FirstBytesLate)?;
        if matches!(visit.tongue, Tongue::Http(_)) {
            visit.tongue = Tongue::Silent; // what is said inside is not said to the proxy
        }
        let spoken = classify(stream, limits, deadline).await;
        visit.tongue = tongue(stream, &spoken);
        visit.rules = self.shared.rules.load_full();
        visit.ask(&sandbox, target, port, spoken?)
    }

    /// Where the connection goes, by what it was told or where it was sent; none for plain requests.
    async fn target(
        &self,
        visit: &mut Visit,
        sandbox: &SandboxRef,
        deadline: Instant,
    ) -> Result<Option<(Target, u16)>, Refusal> {
        if visit.mode != Mode::Explicit {
            let aimed = visit.aimed.ok_or(Reason::UnknownChannel)?;
            let named = self.shared.resolver.name_of(&sandbox.id, aimed.ip());
            let target = match named {
                Some(name) => Target::Named(Host::Name(name)),
                None => Target::Dialled(aimed.ip().to_canonical()),
            };
            return Ok(Some((target, aimed.port())));
        }
        let stream = visit.stream.as_mut().ok_or(Reason::FirstBytesLate)?;
        let limits = &self.shared.limits;
        let wanted = explicit::wanted(stream, limits, deadline, &mut visit.tongue).await?;
        let Wanted::Tunnel(host, port) = wanted else { return Ok(None) };
        visit.tell(Some(&host), port, None);
        explicit::hopeless(&visit.rules, sandbox, &host, port)?;
        let stream = visit.stream.as_mut().ok_or(Reason::FirstBytesLate)?;
        explicit::grant(stream, visit.tongue).await?;
        Ok(Some((Target::Named(host), port)))
    }

    /// Passes bytes: records, resolves, dials, relays.
    async fn pass(&self, visit: &mut Visit, permit: Permit) -> Result<(), Refusal> {
        let shared = &self.shared;
        let tab = shared.charge(&permit)?;
        let said = visit.stream.as_ref().map_or(0, |stream| stream.ahead.len() as u64);
        tab.charge(Counted::Upload, said).map_err(|spent| spent.of(&permit))?;
        let verdict = record::allowed(&permit, &visit.rules);
        let record = visit.record.as_mut().ok_or(Reason::LogUnwritable)?;
        metrics::decision("allowed", permit.how().word());
        let receipt = record.decided(verdict).await?;
        let found = shared.resolver.resolve(&permit).await?;
        let leave = visit.rules.admit(&permit, &found)?;
        let (upstream, address) =
            dial(&leave, &receipt, shared.mark, shared.limits.connect()).await?;
        record.dialled(address);
        let (meter, cut) = (record.meter(), Arc::new(Cut::default()));
        let _place =
            shared.live.enter(&permit, Some(address.ip()), meter.clone(), cut.clone(), tab.clone());
        shared.still_allows(&permit, address.ip(), &tab)?;
        let Stream { ahead, socket } = visit.stream.take().ok_or(Reason::FirstBytesLate)?;
        let upstream = Socket::from(upstream);
        meter.sent(ahead.len() as u64);
        let ended = match tunnel::write_all(&upstream, &ahead).await {
            Ok(()) => {
                drop(ahead);
                let passage = Passage { meter: &meter, cut: &cut, tab: &tab };
                tunnel::relay(&socket, &upstream, &shared.limits, passage).await
            }
            Err(_) => Ended::Broken,
        };
        metrics::bytes(&meter);
        visit.close(ended);
        Ok(())
    }

    /// Ends TLS with a leaf for the decided name, then reads requests.
    async fn intercept(&self, visit: &mut Visit, host: Host, port: u16) -> Result<(), Refusal> {
        let sandbox = visit.sandbox.clone().ok_or(Reason::UnknownChannel)?;
        let server = self.leaves.server(&sandbox.id, &host)?;
        let stream = visit.stream.take().ok_or(Reason::FirstBytesLate)?;
        let handshake = TlsAcceptor::from(server).accept(stream);
        let shaken = timeout(self.shared.limits.first_bytes(), handshake).await;
        let shaken = shaken.map_err(|_| Reason::FirstBytesLate)?;
        let tls = shaken.map_err(|error| Refusal::from(Reason::BadHandshake).because(error))?;
        let version = match tls.get_ref().1.alpn_protocol() {
            Some(b"h2") => HttpVersion::Http2,
            _ => HttpVersion::Http1,
        };
        let record = visit.record.take().ok_or(Reason::LogUnwritable)?;
        let connection =
            Connection::new(sandbox, Scope::Host(host, port), &self.shared.limits, record);
        let carrier = Carrier::Tls(Box::new(tls));
        self.engine.serve(carrier, connection, version, &self.stop).await;
        Ok(())
    }

    /// Reads requests that came without TLS.
    async fn plain(
        &self,
        visit: &mut Visit,
        scope: Scope,
        version: HttpVersion,
    ) -> Result<(), Refusal> {
        let sandbox = visit.sandbox.clone().ok_or(Reason::UnknownChannel)?;
        let stream = visit.stream.take().ok_or(Reason::FirstBytesLate)?;
        let record = visit.record.take().ok_or(Reason::LogUnwritable)?;
        let connection = Connection::new(sandbox, scope, &self.shared.limits, record);
        self.engine.serve(Carrier::Plain(stream), connection, version, &self.stop).await;
        Ok(())
    }
}

/// How to say no to a client that spoke like this.
fn tongue(stream: &Stream, spoken: &Result<Spoken, Refusal>) -> Tongue {
    match (spoken, stream.ahead.first()) {
        (Ok(Spoken::Tls { .. }), _) | (Err(_), Some(22)) => Tongue::Tls,
        (Ok(Spoken::Http1(head)), _) => Tongue::Http(Reader::of(head.accept.as_deref())),
        (Err(_), Some(first)) if first.is_ascii_alphabetic() => Tongue::Http(Reader::Person),
        (Ok(Spoken::Http2 | Spoken::Raw) | Err(_), _) => Tongue::Silent,
    }
}

impl Visit {
    /// Leave to pass raw bytes, if there is such a rule.
    fn ask_raw(&mut self, sandbox: &SandboxRef, target: &Target, port: u16) -> Option<Permit> {
        let facts = ConnectFacts { target: target.clone(), port, protocol: Protocol::Raw };
        match self.rules.decide(sandbox, &Facts::Connect(facts)) {
            Decision::Allow(permit) if *permit.how() == How::Raw => {
                self.tell(Some(permit.host()), port, None);
                Some(permit)
            }
            Decision::Allow(_) | Decision::Deny(_) => None,
        }
    }

    /// Decides on what was said. Requests without TLS are decided one by one.
    fn ask(
        &mut self,
        sandbox: &SandboxRef,
        target: Target,
        port: u16,
        spoken: Spoken,
    ) -> Result<Next, Refusal> {
        let (protocol, tls) = match spoken {
            Spoken::Http1(_) => {
                return Ok(Next::Plain(Scope::Target(target, port), HttpVersion::Http1));
            }
            Spoken::Http2 => {
                return Ok(Next::Plain(Scope::Target(target, port), HttpVersion::Http2));
            }
            Spoken::Raw => (Protocol::Raw, None),
            Spoken::Tls { sni, ech, version } => {
                let seen = sni.as_ref().map(record::host);
                let tls = audit::Tls { version: version.into(), sni: seen };
                (Protocol::Tls { sni, ech }, Some(tls))
            }
        };
        self.tell(named(&target, &protocol), port, tls);
        let started = Instant::now();
        let facts = Facts::Connect(ConnectFacts { target, port, protocol });
        let decision = self.rules.decide(sandbox, &facts);
        metrics::decided_in(started.elapsed());
        match decision {
            Decision::Allow(permit) if matches!(permit.how(), How::Raw | How::Tunnel) => {
                Ok(Next::Pass(permit))
            }
            Decision::Allow(permit) => Ok(Next::Intercept(permit.host().clone(), port)),
            Decision::Deny(denial) => Err(denial.into()),
        }
    }

    /// Says in the record what the connection wants.
    fn tell(&mut self, host: Option<&Host>, port: u16, tls: Option<audit::Tls>) {
        let host = host.map(record::host);
        let facts = audit::Connection { host, port: Some(port), tls };
        if let Some(record) = &mut self.record {
            record.facts(audit::Facts::Connection(facts));
        }
    }

    fn close(&mut self, ended: Ended) {
        let ending = match ended {
            Ended::Both => Ending::Completed,
            Ended::Broken => Ending::Failed(Code("connection_broke")),
            Ended::Cut(reason) => record::cut(reason),
        };
        if let Some(record) = self.record.take() {
            record.close(Outcome::new(ending));
        }
    }

    /// Writes the refusal down, then tells the client in words it understands.
    async fn refuse(&mut self, refusal: &Refusal) {
        metrics::decision(refusal.reason.code(), "refused");
        tracing::debug!(reason = %refusal.reason, detail = refusal.detail, "refused");
        let Some(record) = self.record.take() else { return };
        let id = record.id();
        if record.refused(record::refused(refusal, &self.rules)).await.is_err() {
            tracing::warn!(reason = %refusal.reason, "a refusal could not be recorded");
        }
        self.listen().await;
        let Some(stream) = self.stream.take() else { return };
        let answer = match self.tongue {
            Tongue::Http(reader) => Answer::new(refusal, &self.rules, &id, reader).to_http1(),
            Tongue::Silent => Vec::new(),
            Tongue::Socks => explicit::socks_answer(explicit::socks_code(refusal.reason)).to_vec(),
            Tongue::Tls => tls_alert(refusal.reason).to_vec(),
        };
        if !answer.is_empty() {
            drop(timeout(LINGER, part(stream, &answer)).await); // a client that does not listen is left
        }
    }
}

impl Visit {
    /// A client of an explicit proxy that was refused before its first byte is told in what it speaks.
    async fn listen(&mut self) {
        let Some(stream) = &mut self.stream else { return };
        if self.mode != Mode::Explicit || self.tongue != Tongue::Silent || !stream.ahead.is_empty()
        {
            return;
        }
        drop(timeout(LINGER, stream.look()).await); // one that says nothing is told nothing
        if stream.ahead.first().is_some_and(u8::is_ascii_alphabetic) {
            self.tongue = Tongue::Http(Reader::Person);
        }
    }
}

/// Says the last word and reads on for a moment: closing with bytes unread would take it back.
async fn part(mut stream: Stream, answer: &[u8]) -> std::io::Result<()> {
    stream.socket.write_all(answer).await?;
    stream.socket.end();
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

fn named<'a>(target: &'a Target, protocol: &'a Protocol) -> Option<&'a Host> {
    match (target, protocol) {
        (Target::Named(host), _) => Some(host),
        (_, Protocol::Http { host } | Protocol::Tls { sni: host, .. }) => host.as_ref(),
        (Target::Dialled(_), Protocol::Raw) => None,
    }
}
