//! The schema: every member of a record, in the order of the line.
//!
//! OCSF 1.8 as JSON lines. Members that OCSF does not define are under `unmapped.sandbar`, which ends
//! with the chain. A test generates the table in the crate's README from the doc comments in this
//! file: one line per member.

use std::net::{IpAddr, SocketAddr};

use serde::{Serialize, Serializer};

use crate::text::Text;

/// Longest line, newline included. The limits on strings and lists keep every record below it.
pub const LINE_MAX: usize = 16 * 1024;
/// The version of OCSF that the records follow.
pub const OCSF_VERSION: &str = "1.8.0";
/// Maximum number of banks, answers or features that one record lists; the rest is counted.
pub const LIST_MAX: usize = 16;

/// A sandbox, as named in the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct SandboxId(pub Text<128>);

/// A tenant, as named in the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct TenantId(pub Text<128>);

/// An environment such as `staging`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct Environment(pub Text<64>);

/// A stable code, such as a reason: lower case, never renamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct StableCode(pub &'static str);

impl StableCode {
    /// The reason of a permitted attempt: the only reason that is not a refusal.
    pub const ALLOWED: StableCode = StableCode("allowed");
}

/// A host name as used in the decision, or as sent if it could not be parsed.
pub type HostText = Text<512>;

/// What a refused sandbox asked for. Two host names of the maximum length with their ports, and a method, fit.
pub type AttemptedText = Text<640>;

/// The members of a record up to its metadata.
#[derive(Debug, Default, Serialize)]
pub(crate) struct RecordMembers<'a> {
    /// When the record was made, in milliseconds since 1970 UTC. Records are ordered by `metadata.sequence`, not by time.
    pub(crate) time: u64,
    /// The same as text (RFC 3339, UTC).
    pub(crate) time_dt: Rfc3339Time,
    /// 4001 connection, 4002 HTTP request, 4003 DNS query, 6003 memory call, 2004 finding, 6002 lifecycle.
    pub(crate) class_uid: u16,
    /// Name of the class.
    pub(crate) class_name: &'static str,
    /// `class_uid` divided by 1000: 2 findings, 4 network, 6 application.
    pub(crate) category_uid: u16,
    /// Name of the category.
    pub(crate) category_name: &'static str,
    /// What was done; the numbers depend on the class.
    pub(crate) activity_id: u8,
    /// Name of the activity.
    pub(crate) activity_name: &'static str,
    /// `class_uid` times 100 plus `activity_id`.
    pub(crate) type_uid: u32,
    /// 1 informational, 2 low, 3 medium, 4 high, 5 critical.
    pub(crate) severity_id: u8,
    /// Name of the severity.
    pub(crate) severity: &'static str,
    /// 1 success, 2 failure, 0 unknown; for a finding 1 new.
    pub(crate) status_id: u8,
    /// Name of the status.
    pub(crate) status: &'static str,
    /// The reason code: why it was allowed or denied, or how it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status_detail: Option<StableCode>,
    /// 1 allowed, 2 denied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) action_id: Option<u8>,
    /// Name of the action.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) action: Option<&'static str>,
    /// The result: 1 allowed, 2 blocked, 15 detected, 24 access revoked, 27 error, 0 unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) disposition_id: Option<u8>,
    /// Name of the disposition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) disposition: Option<&'static str>,
    /// True if the record deserves attention: findings, and refusals marked as alerts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) is_alert: Option<bool>,
    /// A sentence for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<&'a Text<512>>,
    /// Milliseconds from accept to the end; in outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) duration: Option<u64>,
    /// Who acted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) actor: Option<Actor<'a>>,
    /// The source of the attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) src_endpoint: Option<SourceEndpoint<'a>>,
    /// The destination, and the address that was dialled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dst_endpoint: Option<DestinationEndpoint<'a>>,
    /// The transport.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) connection_info: Option<Transport>,
    /// TLS, as far as it is visible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls: Option<&'a RecordedTls>,
    /// The HTTP request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) http_request: Option<HttpRequest<'a>>,
    /// The HTTP response; in outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) http_response: Option<HttpResponse>,
    /// The DNS question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) query: Option<DnsQuestion<'a>>,
    /// The DNS answers; at most 16.
    #[serde(skip_serializing_if = "<[RecordedAnswer]>::is_empty")]
    pub(crate) answers: &'a [RecordedAnswer],
    /// The DNS response code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rcode_id: Option<u8>,
    /// The memory operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) api: Option<ApiCall<'a>>,
    /// The selected banks; at most 16.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) resources: Vec<Resource<'a>>,
    /// Sandbar itself, in lifecycle records.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) app: Option<Product>,
    /// The finding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) finding_info: Option<FindingInfo<'a>>,
    /// The subject of a finding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) evidences: Option<[FindingEvidence<'a>; 1]>,
    /// Bytes of heads and bodies; in outcomes. A head counts as its text in HTTP/1, whatever its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) traffic: Option<Traffic>,
    /// The rule that decided; absent if no rule matched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) firewall_rule: Option<RuleName<'a>>,
    /// The policy in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) policy: Option<PolicyInForce<'a>>,
}

/// A time as RFC 3339 text, to the millisecond.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rfc3339Time(pub(crate) u64);

impl Serialize for Rfc3339Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let millis = i64::try_from(self.0).unwrap_or(i64::MAX);
        let moment = jiff::Timestamp::from_millisecond(millis).unwrap_or(jiff::Timestamp::MAX);
        serializer.collect_str(&format_args!("{moment:.3}"))
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Actor<'a> {
    /// The sandbox.
    pub(crate) app_uid: &'a SandboxId,
    /// The signed identity that was presented.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<User<'a>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct User<'a> {
    /// The `sub` of the token, after its signature was checked.
    pub(crate) uid: &'a Text<300>,
}

#[derive(Debug, Serialize)]
pub(crate) struct SourceEndpoint<'a> {
    /// The sandbox; absent if the channel belongs to no sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uid: Option<&'a SandboxId>,
    /// The kind of channel, if neither sandbox nor address is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<&'static str>,
    /// The source address, which proves nothing by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ip: Option<IpAddr>,
    /// The source port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) port: Option<u16>,
}

#[derive(Debug, Serialize)]
pub(crate) struct DestinationEndpoint<'a> {
    /// The name used in the decision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hostname: Option<&'a HostText>,
    /// The address that was dialled; before dialling, the original destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ip: Option<IpAddr>,
    /// The port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) port: Option<u16>,
}

/// TCP or UDP, always outbound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Transport {
    /// 2: outbound.
    direction_id: u8,
    /// `tcp` or `udp`.
    protocol_name: &'static str,
    /// The IP protocol number.
    protocol_num: u8,
}

impl Transport {
    /// TCP.
    pub const TCP: Self = Self { direction_id: 2, protocol_name: "tcp", protocol_num: 6 };
    /// UDP.
    pub const UDP: Self = Self { direction_id: 2, protocol_name: "udp", protocol_num: 17 };
}

/// TLS, as far as it is visible.
#[derive(Clone, Debug, Serialize)]
pub struct RecordedTls {
    /// The version, such as `1.3`; for a tunnel, the highest one offered.
    pub version: Text<16>,
    /// The server name that the client sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sni: Option<HostText>,
}

#[derive(Debug, Serialize)]
pub(crate) struct HttpRequest<'a> {
    /// The method, as sent.
    pub(crate) http_method: &'a Text<32>,
    /// The version, such as `1.1` or `2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<&'a Text<16>>,
    /// The target; absent if the process that knew it died.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) url: Option<Url<'a>>,
    /// The `User-Agent` of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) user_agent: Option<&'a Text<256>>,
    /// The announced length of the body, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) length: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Url<'a> {
    /// `http` or `https`.
    pub(crate) scheme: &'static str,
    /// The host used in the decision.
    pub(crate) hostname: &'a HostText,
    /// The port.
    pub(crate) port: u16,
    /// The path, without the query.
    pub(crate) path: &'a Text<2048>,
    /// The query string; only if enabled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) query_string: Option<&'a Text<1024>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct HttpResponse {
    /// The status sent to the sandbox.
    pub(crate) code: u16,
}

#[derive(Debug, Serialize)]
pub(crate) struct DnsQuestion<'a> {
    /// The name in the question.
    pub(crate) hostname: &'a HostText,
    /// The type, such as `AAAA`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<&'a Text<16>>,
}

/// A DNS answer sent to the sandbox.
#[derive(Clone, Debug, Serialize)]
pub struct RecordedAnswer {
    /// The type, such as `AAAA`.
    #[serde(rename = "type")]
    pub kind: Text<16>,
    /// The data in presentation form.
    pub rdata: Text<128>,
    /// Time to live, in seconds.
    pub ttl: u32,
}

#[derive(Debug, Serialize)]
pub(crate) struct ApiCall<'a> {
    /// The operation in the terms of the service's profile, such as `recall` or `retain`.
    pub(crate) operation: &'a Text<64>,
    /// The memory service.
    pub(crate) service: ApiService<'a>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ApiService<'a> {
    /// The profile used to parse the request.
    pub(crate) name: &'a Text<64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Resource<'a> {
    /// The bank.
    pub(crate) uid: &'a Text<256>,
    /// Always `memory bank`.
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Product {
    /// `Sandbar`.
    pub(crate) name: &'static str,
    /// `Sandbar`.
    pub(crate) vendor_name: &'static str,
    /// The version that wrote the record.
    pub(crate) version: &'static str,
}

impl Product {
    pub(crate) const SELF: Self =
        Self { name: "Sandbar", vendor_name: "Sandbar", version: env!("CARGO_PKG_VERSION") };
}

#[derive(Debug, Serialize)]
pub(crate) struct FindingInfo<'a> {
    /// The id of the finding.
    pub(crate) uid: &'a str,
    /// A short description of the finding.
    pub(crate) title: &'a Text<256>,
    /// The kind of finding: its stable code.
    pub(crate) types: [StableCode; 1],
    /// The attempt it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) related_events: Option<[RelatedEvent<'a>; 1]>,
}

#[derive(Debug, Serialize)]
pub(crate) struct RelatedEvent<'a> {
    /// The `metadata.correlation_uid` of the attempt.
    pub(crate) uid: &'a str,
}

#[derive(Debug, Serialize)]
pub(crate) struct FindingEvidence<'a> {
    /// The destination of the attempt.
    pub(crate) dst_endpoint: DestinationEndpoint<'a>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Traffic {
    /// Bytes to the sandbox; of an HTTP response, as the origin server sent its head.
    pub(crate) bytes_in: u64,
    /// Bytes from the sandbox; of an HTTP request, what was sent upstream, and again if it was sent again.
    pub(crate) bytes_out: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct RuleName<'a> {
    /// The rule's name in its policy.
    pub(crate) name: &'a Text<256>,
}

#[derive(Debug, Serialize)]
pub(crate) struct PolicyInForce<'a> {
    /// SHA-256 of the sources of the compiled rules.
    pub(crate) uid: &'a Text<80>,
    /// The generation: the number of reloads and grants since the start.
    pub(crate) version: DecimalText,
}

/// A number that OCSF defines as a string.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecimalText(pub(crate) u64);

impl Serialize for DecimalText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

/// The metadata of a record; `sequence` is added when the record is sealed into the chain.
#[derive(Debug, Serialize)]
pub(crate) struct Metadata<'a> {
    /// The OCSF version: `1.8.0`.
    pub(crate) version: &'static str,
    /// The product that wrote the record.
    pub(crate) product: Product,
    /// The OCSF profiles that apply.
    pub(crate) profiles: &'static [&'static str],
    /// `access`.
    pub(crate) log_name: &'static str,
    /// The id of the record; a record delivered twice has the same id both times.
    pub(crate) uid: &'a str,
    /// The id of the attempt: the same in its decision, its outcome and its findings.
    pub(crate) correlation_uid: &'a str,
    /// The tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tenant_uid: Option<&'a TenantId>,
    /// True if a string was cut; it then ends with an ellipsis and the number of bytes cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) is_truncated: Option<bool>,
    /// Kilobytes the record would have without the cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) untruncated_size: Option<u64>,
}

/// Members that OCSF does not define; `chain` is added last.
#[derive(Debug, Default, Serialize)]
pub(crate) struct SandbarExtension<'a> {
    /// `decision` (before anything leaves), `outcome` (after), `answered` and `denied` (the only record: nothing was sent), `finding`, `lifecycle`.
    pub(crate) stage: &'static str,
    /// The environment of the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) environment: Option<&'a Environment>,
    /// The channel that identified the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) channel: Option<&'a RecordedChannel>,
    /// What the sandbox asked for, as it wrote it; in refusals. Without query, password, fields and body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) attempted: Option<AttemptedText>,
    /// How the traffic is handled: `tunnel`, `intercept`, `hold`, `raw`, `answer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) carried: Option<StableCode>,
    /// What was searched for signs of exfiltration: `all`, `head` (the body was not), `none` (tunnels and raw TCP).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) inspected: Option<StableCode>,
    /// The names of the injected credentials with commas between them, never their values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) credential: Option<&'a Text<520>>,
    /// The result of checking the signed identity of a memory call: `verified`, `from_channel`, `absent`, `not_looked_at`, or the check that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) identity: Option<StableCode>,
    /// The exfiltration score.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) score: Option<u32>,
    /// The parts of the score; at most 16.
    #[serde(skip_serializing_if = "<[ScoreFeature]>::is_empty")]
    pub(crate) features: &'a [ScoreFeature],
    /// Number of banks, answers or features beyond the 16 listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unlisted: Option<u64>,
    /// How the attempt ended: `completed`, `failed`, `refused`, `revoked`, `abandoned`, `unknown`; in outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ending: Option<&'static str>,
    /// How often the request was sent, if more than once: a pooled connection gave no response, and another was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sends: Option<u64>,
    /// Bytes of a memory call, for which its class has no member; in outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) traffic: Option<Traffic>,
    /// The event in the life of Sandbar or its log; in lifecycle records.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) event: Option<&'static str>,
    /// Further attempts that sent nothing and are only counted: repeated within a window, or made while the log could not be written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) folded: Option<u64>,
    /// The last of the attempts that this record stands for; with `folded`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last: Option<LastFolded<'a>>,
    /// The segment that starts here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) segment: Option<SegmentStart>,
    /// Attempts open when the segment started; their decisions are in earlier segments.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) open: Vec<OpenAttempt<'a>>,
    /// Segments removed by the retention limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) removed: Option<RemovedSegments>,
    /// A file without a complete line in the place of a segment, moved aside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) aside: Option<MovedFile>,
    /// A signed note of the head of the chain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) checkpoint: Option<&'a str>,
}

/// The last attempt of a summary.
#[derive(Debug, Serialize)]
pub(crate) struct LastFolded<'a> {
    /// When it was made (RFC 3339, UTC).
    pub(crate) time_dt: Rfc3339Time,
    /// Its destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hostname: Option<&'a HostText>,
    /// What it asked for; in refusals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) attempted: Option<&'a AttemptedText>,
}

/// The channel that identified the sandbox.
#[derive(Clone, Debug, Serialize)]
pub struct RecordedChannel {
    /// The kind: `jail`, `dedicated`, `unix`, `interface`, `mark`, `certificate`, `proxy_protocol`, `source_address`.
    pub kind: StableCode,
    /// Which one: a listener, an interface, a mark.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<Text<256>>,
}

/// One part of an exfiltration score.
#[derive(Clone, Debug, Serialize)]
pub struct ScoreFeature {
    /// The code of the detector.
    pub name: StableCode,
    /// Its contribution.
    pub score: u32,
}

/// Where a segment starts, in its first record.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SegmentStart {
    /// File name of this segment.
    pub(crate) name: String,
    /// File name of the previous segment; `chain.previous` is the hash of its last record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) after: Option<String>,
    /// An unfinished line at the end of the previous segment, which is not a record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) torn: Option<TornLine>,
}

/// An unfinished line, left where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub(crate) struct TornLine {
    /// Its length.
    pub(crate) bytes: u64,
    /// Its SHA-256.
    pub(crate) sha256: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MovedFile {
    /// Its new name.
    pub(crate) name: String,
    /// Its length.
    pub(crate) bytes: u64,
    /// Its SHA-256.
    pub(crate) sha256: String,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct OpenAttempt<'a> {
    /// The id of the attempt.
    pub(crate) uid: String,
    /// The class of its records.
    pub(crate) class_uid: u16,
    /// Its sandbox.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(crate) sandbox: &'a str,
    /// Its tenant.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(crate) tenant: &'a str,
    /// Its host.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(crate) host: &'a str,
}

/// The segments that retention removed.
#[derive(Clone, Debug, Serialize, serde::Deserialize)]
pub(crate) struct RemovedSegments {
    /// The number of the last record removed.
    pub(crate) through: u64,
    /// Its hash.
    pub(crate) hash: String,
}

/// Splits an address for the two endpoint objects.
pub(crate) fn split_address(address: Option<SocketAddr>) -> (Option<IpAddr>, Option<u16>) {
    (address.map(|a| a.ip()), address.map(|a| a.port()))
}
