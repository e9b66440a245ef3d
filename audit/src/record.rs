//! The schema: every member of a record, in the order in which it stands in the line.
//!
//! OCSF 1.8 in JSON lines. What OCSF has no place for stands under `unmapped.sandbar`, whose last
//! member is the chain. The table in the crate's README is made from this file: one comment line a
//! member, in the order of the line.

use std::net::{IpAddr, SocketAddr};

use serde::{Serialize, Serializer};

use crate::text::Text;

/// Longest line, newline included. The caps below keep every record under it.
pub const LINE_MAX: usize = 16 * 1024;
/// Version of OCSF that the records follow.
pub const OCSF_VERSION: &str = "1.8.0";
/// Most banks, answers or features that one record lists; the rest is counted.
pub const LIST_MAX: usize = 16;

/// A sandbox, as the operator's file names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct SandboxId(pub Text<128>);

/// A tenant, as the operator's file names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct TenantId(pub Text<128>);

/// An environment such as `staging`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct Environment(pub Text<64>);

/// A reason code: lower case, stable, never renamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct StableCode(pub &'static str);

impl StableCode {
    /// Why something was allowed: the one code that is no refusal.
    pub const ALLOWED: StableCode = StableCode("allowed");
}

/// A host name as it was decided upon, or as it was sent when nothing could be made of it.
pub type HostText = Text<512>;

/// The members of a record up to its metadata.
#[derive(Debug, Default, Serialize)]
pub(crate) struct RecordMembers<'a> {
    /// When the record was made, in milliseconds since 1970 UTC. Order is told by `metadata.sequence`, not by this.
    pub(crate) time: u64,
    /// The same as text (RFC 3339, UTC).
    pub(crate) time_dt: Rfc3339Time,
    /// 4001 connection, 4002 HTTP request, 4003 DNS query, 6003 memory call, 2004 finding, 6002 lifecycle.
    pub(crate) class_uid: u16,
    /// Name of the class.
    pub(crate) class_name: &'static str,
    /// Thousands of the class: 2 findings, 4 network, 6 application.
    pub(crate) category_uid: u16,
    /// Name of the category.
    pub(crate) category_name: &'static str,
    /// What was done, numbered by class.
    pub(crate) activity_id: u8,
    /// Name of the activity.
    pub(crate) activity_name: &'static str,
    /// `class_uid` times 100 plus `activity_id`.
    pub(crate) type_uid: u32,
    /// 1 informational, 2 low, 3 medium, 4 high, 5 critical.
    pub(crate) severity_id: u8,
    /// Name of the severity.
    pub(crate) severity: &'static str,
    /// 1 success, 2 failure, 0 unknown; of a finding 1 new.
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
    /// What became of it: 1 allowed, 2 blocked, 15 detected, 24 access revoked, 27 error, 0 unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) disposition_id: Option<u8>,
    /// Name of the disposition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) disposition: Option<&'static str>,
    /// True where somebody should look: findings, and refusals marked so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) is_alert: Option<bool>,
    /// A sentence for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<&'a Text<512>>,
    /// Milliseconds from accept to the end; on outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) duration: Option<u64>,
    /// Who acted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) actor: Option<Actor<'a>>,
    /// Where it came from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) src_endpoint: Option<SourceEndpoint<'a>>,
    /// Where it wanted to go, and the address that was dialled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dst_endpoint: Option<DestinationEndpoint<'a>>,
    /// How it travelled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) connection_info: Option<Transport>,
    /// TLS as far as it was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls: Option<&'a RecordedTls>,
    /// The HTTP request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) http_request: Option<HttpRequest<'a>>,
    /// The HTTP response; on outcomes.
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
    /// The banks that were selected; at most 16.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) resources: Vec<Resource<'a>>,
    /// Sandbar itself, in lifecycle records.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) app: Option<Product>,
    /// What was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) finding_info: Option<FindingInfo<'a>>,
    /// What a finding is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) evidences: Option<[FindingEvidence<'a>; 1]>,
    /// Bytes as counted at the sandbox's side; on outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) traffic: Option<Traffic>,
    /// The rule that decided; absent when none names the destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) firewall_rule: Option<RuleName<'a>>,
    /// The policy in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) policy: Option<PolicyInForce<'a>>,
}

/// A moment as RFC 3339 text, to the millisecond.
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
    /// The sandbox; absent when the channel is nobody's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uid: Option<&'a SandboxId>,
    /// The channel, when there is nothing else to name the source by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<&'static str>,
    /// Its address, which proves nothing by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ip: Option<IpAddr>,
    /// Its port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) port: Option<u16>,
}

#[derive(Debug, Serialize)]
pub(crate) struct DestinationEndpoint<'a> {
    /// The name that was decided upon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hostname: Option<&'a HostText>,
    /// The address that was dialled; before dialling the one the sandbox aimed at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ip: Option<IpAddr>,
    /// The port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) port: Option<u16>,
}

/// TCP or UDP, always outwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Transport {
    /// 2: outbound.
    direction_id: u8,
    /// `tcp` or `udp`.
    protocol_name: &'static str,
    /// The protocol's number.
    protocol_num: u8,
}

impl Transport {
    /// TCP.
    pub const TCP: Self = Self { direction_id: 2, protocol_name: "tcp", protocol_num: 6 };
    /// UDP.
    pub const UDP: Self = Self { direction_id: 2, protocol_name: "udp", protocol_num: 17 };
}

/// TLS as far as it was seen.
#[derive(Clone, Debug, Serialize)]
pub struct RecordedTls {
    /// The version, as `1.3`; of a tunnel the highest one offered.
    pub version: Text<16>,
    /// The name the client asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sni: Option<HostText>,
}

#[derive(Debug, Serialize)]
pub(crate) struct HttpRequest<'a> {
    /// The method as it was sent.
    pub(crate) http_method: &'a Text<32>,
    /// The version, as `1.1` or `2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<&'a Text<16>>,
    /// What was asked for; absent where the process that knew it died.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) url: Option<Url<'a>>,
    /// The client's name for itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) user_agent: Option<&'a Text<256>>,
    /// Bytes of body announced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) length: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Url<'a> {
    /// `http` or `https`.
    pub(crate) scheme: &'static str,
    /// The host that was decided upon.
    pub(crate) hostname: &'a HostText,
    /// The port.
    pub(crate) port: u16,
    /// The path, without the query.
    pub(crate) path: &'a Text<2048>,
    /// The query string, only where the operator asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) query_string: Option<&'a Text<1024>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct HttpResponse {
    /// The status the sandbox was given.
    pub(crate) code: u16,
}

#[derive(Debug, Serialize)]
pub(crate) struct DnsQuestion<'a> {
    /// The name asked for.
    pub(crate) hostname: &'a HostText,
    /// The type, as `AAAA`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<&'a Text<16>>,
}

/// One DNS answer that the sandbox was given.
#[derive(Clone, Debug, Serialize)]
pub struct RecordedAnswer {
    /// The type, as `AAAA`.
    #[serde(rename = "type")]
    pub kind: Text<16>,
    /// The data in presentation form.
    pub rdata: Text<128>,
    /// Seconds it may be kept.
    pub ttl: u32,
}

#[derive(Debug, Serialize)]
pub(crate) struct ApiCall<'a> {
    /// The operation, as the service's profile names it: `recall`, `retain`.
    pub(crate) operation: &'a Text<64>,
    /// The memory service.
    pub(crate) service: ApiService<'a>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ApiService<'a> {
    /// The profile by which it was read.
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
    /// The finding's own id.
    pub(crate) uid: &'a str,
    /// What was found, in a phrase.
    pub(crate) title: &'a Text<256>,
    /// The kind of finding: its stable code.
    pub(crate) types: [StableCode; 1],
    /// The attempt it is about.
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
    /// Where the attempt wanted to go.
    pub(crate) dst_endpoint: DestinationEndpoint<'a>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Traffic {
    /// Bytes towards the sandbox.
    pub(crate) bytes_in: u64,
    /// Bytes from the sandbox.
    pub(crate) bytes_out: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct RuleName<'a> {
    /// The rule's name in its policy.
    pub(crate) name: &'a Text<256>,
}

#[derive(Debug, Serialize)]
pub(crate) struct PolicyInForce<'a> {
    /// SHA-256 of the compiled rules' sources.
    pub(crate) uid: &'a Text<80>,
    /// The generation: counts reloads and grants since the start.
    pub(crate) version: DecimalText,
}

/// A number that OCSF wants as a string.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecimalText(pub(crate) u64);

impl Serialize for DecimalText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

/// The metadata of a record; `sequence` follows when the record takes its place in the chain.
#[derive(Debug, Serialize)]
pub(crate) struct Metadata<'a> {
    /// The OCSF version: `1.8.0`.
    pub(crate) version: &'static str,
    /// Who wrote the record.
    pub(crate) product: Product,
    /// The OCSF profiles that apply.
    pub(crate) profiles: &'static [&'static str],
    /// `access`.
    pub(crate) log_name: &'static str,
    /// The record's own id; a record shipped twice has it twice.
    pub(crate) uid: &'a str,
    /// The attempt: the same in its decision, its outcome and its findings.
    pub(crate) correlation_uid: &'a str,
    /// The tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tenant_uid: Option<&'a TenantId>,
    /// True when a text was cut; a cut text ends with an ellipsis and the number of bytes cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) is_truncated: Option<bool>,
    /// Kilobytes the record would have had.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) untruncated_size: Option<u64>,
}

/// What OCSF has no place for; `chain` follows last.
#[derive(Debug, Default, Serialize)]
pub(crate) struct SandbarExtension<'a> {
    /// `decision` (before anything leaves), `outcome` (after), `answered` and `denied` (the only one: nothing was sent), `finding`, `lifecycle`.
    pub(crate) stage: &'static str,
    /// The environment of the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) environment: Option<&'a Environment>,
    /// How the sandbox was recognised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) channel: Option<&'a RecordedChannel>,
    /// How it was carried: `tunnel`, `intercept`, `hold`, `raw`, `answer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) carried: Option<StableCode>,
    /// Name of the credential that was injected, never its value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) credential: Option<&'a Text<128>>,
    /// What became of checking the signed identity of a memory call: `verified`, `from_channel`, `absent`, `not_looked_at`, or the check that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) identity: Option<StableCode>,
    /// The exfiltration score.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) score: Option<u32>,
    /// What the score is made of; at most 16.
    #[serde(skip_serializing_if = "<[ScoreFeature]>::is_empty")]
    pub(crate) features: &'a [ScoreFeature],
    /// Banks, answers or features beyond the 16 that are listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unlisted: Option<u64>,
    /// How the attempt ended: `completed`, `failed`, `refused`, `revoked`, `abandoned`, `unknown`; on outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ending: Option<&'static str>,
    /// Bytes of a memory call, for which its class has no place; on outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) traffic: Option<Traffic>,
    /// What happened to Sandbar or its log; in lifecycle records.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) event: Option<&'static str>,
    /// Further attempts that sent nothing and are only counted: alike within a window, or the log could not be written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) folded: Option<u64>,
    /// The segment that begins here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) segment: Option<SegmentStart>,
    /// Attempts open when the segment began: their decisions stand in earlier segments.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) open: Vec<OpenAttempt<'a>>,
    /// Segments that were removed, as the operator's retention asks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) removed: Option<RemovedSegments>,
    /// A file without a whole line that stood where a segment should, moved aside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) aside: Option<MovedFile>,
    /// A signed note of the chain's head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) checkpoint: Option<&'a str>,
}

/// How the sandbox was recognised.
#[derive(Clone, Debug, Serialize)]
pub struct RecordedChannel {
    /// The kind: `jail`, `dedicated`, `unix`, `interface`, `mark`, `certificate`, `proxy_protocol`, `source_address`.
    pub kind: StableCode,
    /// Which one: a listener, an interface, a mark.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<Text<256>>,
}

/// One named part of an exfiltration score.
#[derive(Clone, Debug, Serialize)]
pub struct ScoreFeature {
    /// The detector's code.
    pub name: StableCode,
    /// What it added.
    pub score: u32,
}

/// The first record of a segment says which one it follows.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SegmentStart {
    /// File name of this segment.
    pub(crate) name: String,
    /// File name of the one before; its last record is named by `chain.previous`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) after: Option<String>,
    /// An unfinished line at the end of the one before, which is not a record.
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
    /// The name it has now.
    pub(crate) name: String,
    /// Its length.
    pub(crate) bytes: u64,
    /// Its SHA-256.
    pub(crate) sha256: String,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct OpenAttempt<'a> {
    /// The attempt.
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

/// What retention removed.
#[derive(Clone, Debug, Serialize, serde::Deserialize)]
pub(crate) struct RemovedSegments {
    /// The last record that was removed.
    pub(crate) through: u64,
    /// Its hash.
    pub(crate) hash: String,
}

/// Splits an address for the two endpoint objects.
pub(crate) fn split_address(address: Option<SocketAddr>) -> (Option<IpAddr>, Option<u16>) {
    (address.map(|a| a.ip()), address.map(|a| a.port()))
}
