//! Builds the filter's records: a class 4003 record before a query leaves, one for each query answered or refused
//! locally, and findings for the operator.

pub(crate) use audit::words::{channel, policy, subject};
use audit::{
    AlertFlag, DecisionDetails, DetectionFinding, FindingCode, FindingSeverity, OpenRecord, RecordedFacts,
    ScoreFeature, StableCode, Transport,
};
use rules::facts::QueryType;
use rules::{Denial, Host, Permit, Reason};

use crate::message::DnsTransport;
use crate::query::{QueryArrival, QueryTarget};

/// Treatment: sent to an upstream resolver.
pub(crate) const RESOLVED: StableCode = StableCode("resolve");
/// Treatment: answered locally.
pub(crate) const ANSWERED: StableCode = StableCode("answer");
/// Flag: a name below a wildcard with punycode labels.
pub(crate) const PUNYCODE: StableCode = StableCode("punycode");
/// Flag and finding: a query that was sent to another resolver.
pub(crate) const BYPASS: StableCode = StableCode(FindingCode::DnsBypassAttempt.code());
/// Treatment: asked by our timer, independently of sandboxes.
pub(crate) const PRE_RESOLVE: StableCode = StableCode("pre_resolve");

/// Returns the arrival of a query, as recorded.
pub(crate) fn arrival(arrived: &QueryArrival) -> audit::RecordedArrival {
    let transport = match arrived.carrier {
        DnsTransport::Tcp => Transport::TCP,
        DnsTransport::Udp => Transport::UDP,
    };
    audit::RecordedArrival {
        channel: channel(&arrived.channel),
        transport,
        source: arrived.source,
        original_dst: arrived.original_dst,
    }
}

/// Returns the arrival of a query that Sandbar itself makes; `kind` says why.
pub(crate) fn own_arrival(kind: &'static str) -> audit::RecordedArrival {
    audit::RecordedArrival {
        channel: audit::RecordedChannel { kind: StableCode(kind), detail: None },
        transport: Transport::UDP,
        source: None,
        original_dst: None,
    }
}

pub(crate) fn facts(name: &str, kind: QueryType) -> RecordedFacts {
    RecordedFacts::Query(audit::RecordedQuery { name: name.into(), kind: kind.to_string().into() })
}

pub(crate) fn allow_details(
    permit: &Permit,
    policy: audit::RecordedPolicy,
    carried: StableCode,
) -> DecisionDetails {
    DecisionDetails {
        rule: Some((&*permit.rule().rule).into()),
        policy: Some(policy),
        treatment: Some(carried),
        features: if is_punycode(permit) { vec![flag(PUNYCODE)] } else { Vec::new() },
        ..DecisionDetails::new(StableCode::ALLOWED)
    }
}

/// Returns a flag: a feature with a score of 0.
pub(crate) fn flag(name: StableCode) -> ScoreFeature {
    ScoreFeature { name, score: 0 }
}

/// Returns whether a label that the sandbox chose below a wildcard is punycode, which may look like another name.
fn is_punycode(permit: &Permit) -> bool {
    let Host::Name(name) = permit.host() else { return false };
    let chosen = name.as_str().get(..permit.lookup().chosen_octets).unwrap_or_default();
    chosen.split('.').any(|label| label.starts_with("xn--"))
}

pub(crate) fn denial_details(denial: &Denial, policy: audit::RecordedPolicy) -> DecisionDetails {
    DecisionDetails {
        rule: denial.rule.as_ref().map(|rule| (&*rule.rule).into()),
        policy: Some(policy),
        message: Some(denial.reason.next_step().into()),
        ..DecisionDetails::new(denial.reason.into())
    }
}

/// Returns the details of a refusal that is not a denial by a rule.
pub(crate) fn refusal_details(
    reason: Reason,
    permit: Option<&Permit>,
    policy: audit::RecordedPolicy,
) -> DecisionDetails {
    DecisionDetails {
        rule: permit.map(|permit| (&*permit.rule().rule).into()),
        policy: Some(policy),
        message: Some(reason.next_step().into()),
        ..DecisionDetails::new(reason.into())
    }
}

/// Puts a message before the one that a verdict has.
pub(crate) fn add_message(verdict: DecisionDetails, message: Option<String>) -> DecisionDetails {
    let Some(message) = message else { return verdict };
    let next = verdict.message.map(|next| format!(". {}", next.to_display())).unwrap_or_default();
    DecisionDetails { message: Some(format!("{message}{next}").into()), ..verdict }
}

/// Returns the details of an answer that needs no rule, such as `localhost`.
pub(crate) fn local_details(policy: audit::RecordedPolicy) -> DecisionDetails {
    DecisionDetails {
        policy: Some(policy),
        treatment: Some(ANSWERED),
        ..DecisionDetails::new(StableCode::ALLOWED)
    }
}

/// Adds the score and its features, if the score is not 0.
pub(crate) fn add_score(
    verdict: DecisionDetails,
    (score, features): &(u32, Vec<ScoreFeature>),
) -> DecisionDetails {
    match score {
        0 => verdict,
        _ => {
            let features = verdict.features.iter().chain(features).cloned().collect();
            DecisionDetails { score: Some(*score), features, ..verdict }
        }
    }
}

/// Marks a verdict as an alert.
pub(crate) fn mark_alert(verdict: DecisionDetails) -> DecisionDetails {
    DecisionDetails { attention: AlertFlag::Alert, ..verdict }
}

/// Builds a finding of medium severity.
pub(crate) fn finding(
    code: FindingCode,
    title: &str,
    message: String,
    (score, features): (u32, Vec<ScoreFeature>),
) -> DetectionFinding {
    DetectionFinding {
        code,
        title: title.into(),
        severity: FindingSeverity::Medium,
        message: Some(message.into()),
        score: Some(score).filter(|score| *score > 0),
        features,
    }
}

/// Returns the finding for a query that was sent to another resolver and redirected here.
pub(crate) fn bypass_finding(original_dst: Option<std::net::SocketAddr>) -> DetectionFinding {
    let to = original_dst.map_or_else(|| "another resolver".to_owned(), |to| to.to_string());
    let message = format!("The sandbox sent a query to {to}; it was redirected here and decided as usual.");
    finding(FindingCode::DnsBypassAttempt, "A sandbox asks another resolver", message, (0, Vec::new()))
}

/// Returns the finding for denied names that look like a tunnel.
pub(crate) fn tunnel_finding(score: (u32, Vec<ScoreFeature>)) -> DetectionFinding {
    let message = "Denied names look like encoded data; none of them left.".to_owned();
    finding(FindingCode::DnsTunnelSuspected, "DNS names look like a tunnel", message, score)
}

/// Flags a query that was sent to another resolver.
pub(crate) fn flag_bypass(mut verdict: DecisionDetails, arrived: &QueryArrival) -> DecisionDetails {
    if arrived.toward == QueryTarget::Elsewhere {
        verdict.features.push(flag(BYPASS));
    }
    verdict
}

/// Returns the finding for our own query that came back to us.
pub(crate) fn loop_finding() -> DetectionFinding {
    let message = "A resolver of `[dns]` forwards our queries back to us: use another one in `upstreams`.";
    finding(FindingCode::DnsForwardingLoop, "DNS forwarding loop", message.to_owned(), (0, Vec::new()))
}

/// Writes a finding about an attempt. An error is only logged: if the log is down, the attempts themselves are refused.
pub(crate) async fn write_finding(record: &OpenRecord, finding: &DetectionFinding) {
    if let Err(error) = record.record_finding(finding).await {
        tracing::warn!(%error, "cannot write a finding");
    }
}
