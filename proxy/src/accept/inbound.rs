//! An accepted connection until it is decided: what it asks for, and how a refusal is sent to its client.

use std::net::SocketAddr;
use std::sync::Arc;

use audit::OpenRecord;
use rules::configuration::ListenerMode;
use rules::decision::Treatment;
use rules::facts::{ConnectFacts, ConnectTarget, Facts, HttpVersion, Protocol};
use rules::{Host, Permit, Reason, RuleSet, SandboxRef};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::NextStage;
use super::detect::Detected;
use super::explicit::{self, ReplyFormat};
use crate::egress::shared::{self, Shared};
use crate::egress::stream::PrefixedStream;
use crate::http::RequestScope;
use crate::report::record;
use crate::report::refusal::{self, BodyAudience, LINGER, Refusal, tls_alert};

/// Bytes read while a refused client lingers.
const LINGER_BYTES: usize = 256 << 10;

/// One accepted connection until its stage takes it over.
pub(super) struct InboundConnection {
    pub(super) stream: PrefixedStream,
    pub(super) record: OpenRecord,
    pub(super) rules: Arc<RuleSet>,
    pub(super) reply_format: ReplyFormat,
    pub(super) mode: ListenerMode,
    pub(super) original_dst: Option<SocketAddr>,
}

impl InboundConnection {
    /// Takes the rules of now, and returns the sandbox as they identify it.
    pub(super) fn reload_rules(
        &mut self,
        shared: &Shared,
        accepted: &SandboxRef,
    ) -> Result<SandboxRef, Reason> {
        self.rules = shared.rules.load_full();
        record::identify_again(&self.rules, accepted, &mut self.record)
    }

    /// A permit for raw TCP, if a rule gives one.
    pub(super) fn decide_raw(
        &mut self,
        sandbox: &SandboxRef,
        target: &ConnectTarget,
        port: u16,
    ) -> Option<Permit> {
        let facts = ConnectFacts { target: target.clone(), port, protocol: Protocol::Raw };
        let permit = shared::decide(&self.rules, sandbox, &Facts::Connect(facts)).ok()?;
        if *permit.treatment() != Treatment::Raw {
            return None;
        }
        self.record_facts(Some(permit.host()), port, None);
        Some(permit)
    }

    /// Decides on the detected protocol. Plain HTTP requests are decided one by one, later.
    pub(super) fn decide(
        &mut self,
        sandbox: &SandboxRef,
        target: ConnectTarget,
        port: u16,
        detected: Detected,
    ) -> Result<NextStage, Refusal> {
        let (protocol, tls) = match detected {
            Detected::Http1(_) => {
                let scope = RequestScope::Target(target, port);
                return Ok(NextStage::Plain(scope, HttpVersion::Http1));
            }
            Detected::Http2 => {
                let scope = RequestScope::Target(target, port);
                return Ok(NextStage::Plain(scope, HttpVersion::Http2));
            }
            Detected::Raw => (Protocol::Raw, None),
            Detected::Tls { sni, ech, version } => {
                let recorded = sni.as_ref().map(record::host);
                let tls = audit::RecordedTls { version: version.into(), sni: recorded };
                (Protocol::Tls { sni, ech }, Some(tls))
            }
        };
        self.record_facts(target_host(&target, &protocol), port, tls);
        let facts = Facts::Connect(ConnectFacts { target, port, protocol });
        let permit = shared::decide(&self.rules, sandbox, &facts)?;
        Ok(match permit.treatment() {
            Treatment::Raw | Treatment::Tunnel => NextStage::Tunnel(permit),
            Treatment::Forward | Treatment::Hold { .. } | Treatment::Intercept | Treatment::Resolve => {
                NextStage::Intercept(permit.host().clone(), port)
            }
        })
    }

    /// Writes into the record what the connection asks for.
    pub(super) fn record_facts(&mut self, host: Option<&Host>, port: u16, tls: Option<audit::RecordedTls>) {
        let host = host.map(record::host);
        let facts = audit::RecordedConnection { host, port: Some(port), tls };
        self.record.set_facts(audit::RecordedFacts::Connection(facts));
    }

    /// Refuses the connection: records it, then answers in the client's protocol where that is known.
    pub(super) async fn refuse(mut self, refusal: &Refusal) {
        let audience = match self.reply_format {
            ReplyFormat::Http(audience) => audience,
            ReplyFormat::Silent | ReplyFormat::Socks | ReplyFormat::Tls | ReplyFormat::Undetected => {
                BodyAudience::Person
            }
        };
        self.detect_reply_format().await;
        let response = refusal::refuse(self.record, refusal, &self.rules, audience).await;
        let answer = match self.reply_format {
            ReplyFormat::Http(_) => response.to_http1(),
            ReplyFormat::Silent | ReplyFormat::Undetected => return,
            ReplyFormat::Socks => explicit::socks_reply(explicit::socks_reply_code(refusal.reason)).to_vec(),
            ReplyFormat::Tls => tls_alert(refusal.reason).to_vec(),
        };
        drop(timeout(LINGER, send_and_linger(self.stream, &answer)).await); // a slow client misses it
    }

    /// Refuses the connection without an answer. Its socket is closed before its record is written.
    pub(super) async fn close_refused(self, refusal: &Refusal) {
        let InboundConnection { stream, record, rules, .. } = self;
        drop(stream);
        drop(refusal::refuse(record, refusal, &rules, BodyAudience::Person).await);
    }

    /// Finds out how to answer a client of the explicit proxy that was refused before it sent a byte.
    async fn detect_reply_format(&mut self) {
        let stream = &mut self.stream;
        if self.mode != ListenerMode::Explicit || self.reply_format != ReplyFormat::Undetected {
            return;
        }
        drop(timeout(LINGER, stream.read_ahead()).await); // a silent client gets no answer
        if stream.ahead.first().is_some_and(u8::is_ascii_alphabetic) {
            self.reply_format = ReplyFormat::Http(BodyAudience::Person);
        }
    }
}

/// How to encode a refusal for a client whose first bytes were detected like this.
pub(super) fn reply_format(stream: &PrefixedStream, detected: &Result<Detected, Refusal>) -> ReplyFormat {
    match (detected, stream.ahead.first()) {
        (Ok(Detected::Tls { .. }), _) | (Err(_), Some(22)) => ReplyFormat::Tls,
        (Ok(Detected::Http1(head)), _) => {
            ReplyFormat::Http(BodyAudience::from_accept(head.accept.as_deref()))
        }
        (Err(_), Some(first)) if first.is_ascii_alphabetic() => ReplyFormat::Http(BodyAudience::Person),
        (Ok(Detected::Http2 | Detected::Raw) | Err(_), _) => ReplyFormat::Silent,
    }
}

/// Sends the answer and reads on for a moment: closing with unread bytes sends a reset, which discards the answer.
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
