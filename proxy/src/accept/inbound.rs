//! An accepted connection until it is decided: what it asks for, and how a refusal is sent to its client.

use std::net::SocketAddr;
use std::sync::Arc;

use audit::{AttemptedText, OpenRecord};
use rules::configuration::ListenerMode;
use rules::facts::{ConnectTarget, HttpVersion, Protocol};
use rules::treatment::{ConnectionTreatment, FirstBytes};
use rules::{Host, Permit, Reason, RuleSet, SandboxRef};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::detect::{self, Detected};
use super::explicit::{self, ReplyFormat};
use super::{ListenerSignals, NextStage};
use crate::egress::shared::{self, Shared};
use crate::egress::stream::PrefixedStream;
use crate::http::RequestScope;
use crate::report::refusal::{self, BodyAudience, LINGER, Refusal, tls_alert};
use crate::report::{attempted, record};

/// Bytes read while a refused client lingers.
const LINGER_BYTES: usize = 256 << 10;

/// One accepted connection until its stage takes it over.
pub(super) struct InboundConnection {
    pub(super) stream: PrefixedStream,
    pub(super) record: OpenRecord,
    /// What the client asked for, as far as it is known.
    pub(super) host: Option<Host>,
    pub(super) rules: Arc<RuleSet>,
    pub(super) reply_format: ReplyFormat,
    pub(super) mode: ListenerMode,
    pub(super) original_dst: Option<SocketAddr>,
    pub(super) listener: ListenerSignals,
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

    /// Decides before the client sent anything: whether to relay raw TCP at once, or to wait for the first bytes.
    ///
    /// # Errors
    ///
    /// Returns the refusal of a target that no protocol is allowed to.
    pub(super) fn decide_unread(
        &mut self,
        sandbox: &SandboxRef,
        target: &ConnectTarget,
        port: u16,
    ) -> Result<Option<Permit>, Refusal> {
        match shared::treatment(&self.rules, sandbox, target, port, &FirstBytes::Unread)? {
            ConnectionTreatment::Relay(permit) | ConnectionTreatment::Intercept(permit) => {
                self.record_facts(Some(permit.host()), port, None);
                Ok(Some(permit))
            }
            ConnectionTreatment::Detect | ConnectionTreatment::Requests => Ok(None),
        }
    }

    /// Decides on the detected protocol. Plain HTTP requests are decided one by one, later.
    pub(super) fn decide(
        &mut self,
        sandbox: &SandboxRef,
        target: ConnectTarget,
        port: u16,
        detected: Detected,
    ) -> Result<NextStage, Refusal> {
        let (protocol, version, tls) = match detected {
            Detected::Http1(_) => (Protocol::Http { host: None }, HttpVersion::Http1, None),
            Detected::Http2 => (Protocol::Http { host: None }, HttpVersion::Http2, None),
            Detected::Raw => (Protocol::Raw, HttpVersion::Http1, None),
            Detected::Tls { sni, ech, version } => {
                let recorded = sni.as_ref().map(record::host);
                let tls = audit::RecordedTls { version: version.into(), sni: recorded };
                (Protocol::Tls { sni, ech }, HttpVersion::Http1, Some(tls))
            }
        };
        if !matches!(protocol, Protocol::Http { .. }) {
            self.record_facts(target_host(&target, &protocol), port, tls);
        }
        let first = FirstBytes::Read(protocol);
        Ok(match shared::treatment(&self.rules, sandbox, &target, port, &first)? {
            ConnectionTreatment::Relay(permit) => NextStage::Tunnel(permit),
            ConnectionTreatment::Intercept(permit) => NextStage::Intercept(permit.host().clone(), port),
            ConnectionTreatment::Detect | ConnectionTreatment::Requests => {
                NextStage::Plain(RequestScope::Target(target, port), version)
            }
        })
    }

    /// Writes into the record what the connection asks for.
    pub(super) fn record_facts(&mut self, host: Option<&Host>, port: u16, tls: Option<audit::RecordedTls>) {
        self.host = host.cloned();
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
        let attempted = self.attempted();
        let response = refusal::refuse(self.record, refusal, &self.rules, audience, attempted).await;
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
        let attempted = self.attempted();
        let InboundConnection { stream, record, rules, .. } = self;
        drop(stream);
        drop(refusal::refuse(record, refusal, &rules, BodyAudience::Person, attempted).await);
    }

    /// What the client asked for in the bytes that nothing has consumed, for the record of its refusal. None if they do
    /// not say: then the facts of the record do.
    fn attempted(&self) -> Option<AttemptedText> {
        let bytes = &*self.stream.ahead;
        match (self.reply_format, bytes.first()) {
            (ReplyFormat::Socks, _) => explicit::describe_socks(bytes),
            (_, Some(&detect::HANDSHAKE)) => detect::server_name(bytes).map(|name| attempted::of_host(&name)),
            (_, Some(&explicit::SOCKS4)) if self.mode == ListenerMode::Explicit => {
                explicit::describe_socks4(bytes)
            }
            (_, _) => attempted::of_head(bytes),
        }
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
