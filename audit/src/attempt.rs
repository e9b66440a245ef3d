//! The facts about an attempt as plain data: arrival, sandbox, destination, decision, outcome.
//! `compose` turns them into records.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rules::Reason;

use crate::codes::{EndCode, FindingCode};
use crate::meter::FoldSummary;
use crate::record::{
    AttemptedText, Environment, HostText, RecordedAnswer, RecordedChannel, RecordedTls, SandboxId,
    ScoreFeature, StableCode, TenantId, Transport,
};
use crate::text::Text;

/// How a connection or a query arrived. Known at accept.
#[derive(Clone, Debug)]
pub struct RecordedArrival {
    pub channel: RecordedChannel,
    pub transport: Transport,
    /// The peer's address, which proves nothing by itself.
    pub source: Option<SocketAddr>,
    /// The original destination. Never trusted; recorded only until an address is dialled.
    pub original_dst: Option<SocketAddr>,
}

/// The sandbox that made an attempt.
#[derive(Clone, Debug)]
pub struct RecordedSandbox {
    pub sandbox: SandboxId,
    pub tenant: TenantId,
    pub environment: Environment,
}

/// What the attempt wants. It determines the class of the records.
#[derive(Clone, Debug)]
pub enum RecordedFacts {
    /// 4001: a tunnel, or a connection without a request.
    Connection(RecordedConnection),
    /// 6003: a call to a memory service.
    Memory(MemoryCall),
    /// 4003: a DNS query.
    Query(RecordedQuery),
    /// 4002: an intercepted HTTP request.
    Request(RecordedRequest),
}

/// A connection without a visible request.
#[derive(Clone, Debug, Default)]
pub struct RecordedConnection {
    pub host: Option<HostText>,
    pub port: Option<u16>,
    pub tls: Option<RecordedTls>,
}

/// A DNS query.
#[derive(Clone, Debug)]
pub struct RecordedQuery {
    pub name: HostText,
    /// The type, such as `AAAA`.
    pub kind: Text<16>,
}

/// An intercepted HTTP request. It has no fields for bodies and headers.
#[derive(Clone, Debug)]
pub struct RecordedRequest {
    pub method: Text<32>,
    pub scheme: HttpScheme,
    pub host: HostText,
    pub port: u16,
    pub version: Option<Text<16>>,
    pub user_agent: Option<Text<256>>,
    /// The announced length of the body, in bytes.
    pub length: Option<u64>,
    path: Text<2048>,
    query: Option<Text<1024>>,
}

/// Whether the request arrived over TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpScheme {
    Http,
    Https,
}

impl RecordedRequest {
    /// Splits the target as it was sent. The query is kept apart, so that it is not logged by accident;
    /// an authority is dropped, because it may contain a password.
    pub fn new(method: &[u8], scheme: HttpScheme, host: HostText, port: u16, target: &[u8]) -> Self {
        let target = target.split(|byte| *byte == b'#').next().unwrap_or_default();
        let mut parts = target.splitn(2, |byte| *byte == b'?');
        let path = Text::from_bytes(without_authority(parts.next().unwrap_or_default()));
        let query = parts.next().map(Text::from_bytes);
        let method = Text::from_bytes(method);
        let (version, user_agent, length) = (None, None, None);
        Self { method, scheme, host, port, version, user_agent, length, path, query }
    }

    /// Returns the path as a reader of the record sees it, without the query.
    pub fn display_path(&self) -> String {
        self.path.to_display()
    }

    pub(crate) fn path(&self) -> &Text<2048> {
        &self.path
    }

    pub(crate) fn query(&self) -> Option<&Text<1024>> {
        self.query.as_ref()
    }
}

/// Returns the path of a target in absolute form (RFC 9112, section 3.2.2); of any other form, the
/// target without leading user information.
fn without_authority(target: &[u8]) -> &[u8] {
    let scheme = target.windows(3).position(|three| three == b"://");
    let named = |at: &usize| target.iter().take(*at).all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(b));
    if let Some(at) = scheme.filter(named) {
        let rest = target.get(at + 3..).unwrap_or_default();
        let path = rest.iter().position(|byte| *byte == b'/');
        return path.and_then(|at| rest.get(at..)).unwrap_or(b"/");
    }
    let authority = target.iter().position(|byte| *byte == b'/').unwrap_or(target.len());
    let user = target.iter().take(authority).rposition(|byte| *byte == b'@');
    user.and_then(|at| target.get(at + 1..)).unwrap_or(target)
}

/// A call to a memory service.
#[derive(Clone, Debug)]
pub struct MemoryCall {
    pub request: RecordedRequest,
    /// The profile used to parse the request, such as `astrocyte`.
    pub service: Text<64>,
    /// The operation in the profile's terms, such as `recall`.
    pub operation: Text<64>,
    pub effect: MemoryEffect,
    /// Every selected bank.
    pub banks: Vec<Text<256>>,
    /// The signed identity, after its signature was checked.
    pub identity: Option<Text<300>>,
    /// The result of checking it: `verified`, `from_channel`, `absent`, `not_looked_at`, or the check that failed.
    pub checked: StableCode,
}

/// The effect of a memory operation on a bank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryEffect {
    Admin,
    Delete,
    Read,
    Write,
}

/// Why an attempt was allowed or refused, and by which rule and policy.
#[derive(Clone, Debug)]
pub struct DecisionDetails {
    pub reason: StableCode,
    /// The rule; absent if no rule matched.
    pub rule: Option<Text<256>>,
    pub policy: Option<RecordedPolicy>,
    /// How the traffic is handled: `tunnel`, `intercept`, `hold`, `raw`, `answer`.
    pub treatment: Option<StableCode>,
    /// What was searched for signs of exfiltration: `all`, `head` or `none`.
    pub inspected: Option<StableCode>,
    /// The names of the injected credentials, with commas between them.
    pub credential: Option<Text<520>>,
    /// The exfiltration score, if one was computed.
    pub score: Option<u32>,
    pub features: Vec<ScoreFeature>,
    /// A sentence for people: what to do next.
    pub message: Option<Text<512>>,
    pub attention: AlertFlag,
    /// Further attempts of the same kind that sent nothing and are only counted here.
    pub folded: u64,
    /// What a refused sandbox asked for, as it wrote it, if the facts do not say it all: the name that disagrees, the
    /// text that is not a name.
    pub attempted: Option<AttemptedText>,
}

/// Whether a record deserves attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlertFlag {
    Alert,
    None,
}

impl DecisionDetails {
    /// Creates a decision with a reason and nothing else.
    pub fn new(reason: StableCode) -> Self {
        Self {
            reason,
            rule: None,
            policy: None,
            treatment: None,
            inspected: None,
            credential: None,
            score: None,
            features: Vec::new(),
            message: None,
            attention: AlertFlag::None,
            folded: 0,
            attempted: None,
        }
    }

    /// Returns whether the attempt may proceed.
    pub(crate) fn allows(&self) -> bool {
        self.reason == StableCode::ALLOWED
    }
}

/// The rules in force.
#[derive(Clone, Debug)]
pub struct RecordedPolicy {
    /// SHA-256 of their sources.
    pub digest: Text<80>,
    pub generation: u64,
}

/// The outcome of an attempt.
#[derive(Clone, Debug)]
pub struct AttemptOutcome {
    pub ending: Ending,
    /// The HTTP status sent to the sandbox.
    pub status: Option<u16>,
    /// The DNS response code sent to the sandbox.
    pub rcode: Option<u8>,
    /// The DNS answers sent to the sandbox.
    pub answers: Vec<RecordedAnswer>,
}

impl AttemptOutcome {
    /// Creates an outcome with an ending and nothing else.
    pub fn new(ending: Ending) -> Self {
        Self { ending, status: None, rcode: None, answers: Vec::new() }
    }
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Its task was dropped before it recorded an ending.
    Abandoned,
    Completed,
    /// The connection to the destination failed.
    Failed(EndCode),
    /// Refused after the decision, for example by the address rules.
    Refused(StableCode),
    /// Cut because the permission ended.
    Revoked(Reason),
    /// The process that decided it died.
    Unknown,
}

/// The bytes of an attempt, counted by the code that relays them.
#[derive(Debug, Default)]
pub struct ByteCount {
    sent: AtomicU64,
    received: AtomicU64,
    /// How often the request was sent.
    sends: AtomicU64,
}

impl ByteCount {
    /// Returns the bytes in both directions.
    pub fn total(&self) -> u64 {
        let (sent, received) = self.sent_and_received();
        sent + received
    }

    /// Counts one send of a request, with the bytes that leave at once. A request that is sent again counts again.
    pub fn add_send(&self, bytes: u64) {
        self.sends.fetch_add(1, Ordering::Relaxed);
        self.add_sent(bytes);
    }

    /// Counts bytes from the sandbox.
    pub fn add_sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes to the sandbox.
    pub fn add_received(&self, bytes: u64) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes from the sandbox and to it.
    pub fn sent_and_received(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    /// Returns how often the request was sent.
    pub fn sends(&self) -> u64 {
        self.sends.load(Ordering::Relaxed)
    }
}

/// Everything known about one attempt so far.
#[derive(Clone, Debug)]
pub(crate) struct AttemptState {
    pub(crate) id: u128,
    pub(crate) arrival: RecordedArrival,
    pub(crate) subject: Option<RecordedSandbox>,
    /// The same sandbox, whose quotas the attempt counts against.
    pub(crate) sandbox: Option<rules::ids::SandboxId>,
    pub(crate) facts: RecordedFacts,
    pub(crate) verdict: Option<DecisionDetails>,
    pub(crate) dialled: Option<SocketAddr>,
    pub(crate) byte_count: Arc<ByteCount>,
    /// Set if its record stands for other attempts, too.
    pub(crate) summary: Option<FoldSummary>,
}

/// A detection that gets a record of its own.
#[derive(Clone, Debug)]
pub struct DetectionFinding {
    /// The stable code of the finding.
    pub code: FindingCode,
    pub title: Text<256>,
    pub severity: FindingSeverity,
    pub message: Option<Text<512>>,
    pub score: Option<u32>,
    pub features: Vec<ScoreFeature>,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingSeverity {
    Critical,
    High,
    Low,
    Medium,
}

/// An event in the life of Sandbar itself.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    pub event: LifecycleEvent,
    pub message: Option<Text<512>>,
    pub policy: Option<RecordedPolicy>,
}

/// The kind of a [`Lifecycle`] event. The log adds events of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifecycleEvent {
    CanaryMade,
    CanaryRemoved,
    GrantEnded,
    GrantMade,
    GrantRefused,
    GrantUsed,
    PolicyLoaded,
    PolicyRejected,
    RunEnded,
    Started,
    Stopped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_target_leaks_a_password() {
        for (target, path, query) in [
            (&b"/p?q"[..], "/p", Some("q")),
            (b"/p#f?q", "/p", None),
            (b"/p?q#f", "/p", Some("q")),
            (b"http://user:hunter2@h/p?q", "/p", Some("q")),
            (b"HTTPS://user:hunter2@h", "/", None),
            (b"http://user:hunter2@h?q", "/", Some("q")),
            (b"user:hunter2@h:443", "h:443", None),
            (b"h:443", "h:443", None),
            (b"*", "*", None),
            (b"/a@b://c", "/a@b://c", None),
            (b"", "", None),
        ] {
            let request = RecordedRequest::new(b"GET", HttpScheme::Http, "h".into(), 80, target);
            let found = (request.path().to_display(), request.query().map(Text::to_display));
            assert_eq!(found, (path.to_owned(), query.map(str::to_owned)), "{target:?}");
        }
    }
}
