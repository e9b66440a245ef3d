//! What the filter says to the log: one 4003 record before anything leaves, one for what was answered
//! or refused here, findings for what somebody should look at.

pub(crate) use audit::words::{channel, policy, subject};
use audit::{
    AlertFlag, DecisionDetails, DetectionFinding, FindingCode, FindingSeverity, OpenRecord,
    RecordedFacts, ScoreFeature, StableCode, Transport,
};
use rules::facts::QueryType;
use rules::{Denial, Host, Permit, Reason};

use crate::message::DnsTransport;
use crate::query::{QueryArrival, QueryTarget};

/// Carried by a query of ours.
pub(crate) const RESOLVED: StableCode = StableCode("resolve");
/// Answered here.
pub(crate) const ANSWERED: StableCode = StableCode("answer");
/// Flag of a name below a wildcard that has letters beyond ASCII.
pub(crate) const PUNYCODE: StableCode = StableCode("punycode");
/// Flag of a query that was sent to another resolver.
pub(crate) const BYPASS: StableCode = StableCode(FindingCode::DnsBypassAttempt.code());
/// Asked by a timer of ours, whatever sandboxes do.
pub(crate) const PRE_RESOLVE: StableCode = StableCode("pre_resolve");

/// How a query came to us.
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

/// How a query of ours came about.
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

/// A mark in the record that adds nothing to the score.
pub(crate) fn flag(name: StableCode) -> ScoreFeature {
    ScoreFeature { name, score: 0 }
}

/// Whether what a sandbox chose below a wildcard may look like another name to people.
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

/// A refusal that no rule made.
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

/// What no rule need allow: the sandbox's own names.
pub(crate) fn local_details(policy: audit::RecordedPolicy) -> DecisionDetails {
    DecisionDetails {
        policy: Some(policy),
        treatment: Some(ANSWERED),
        ..DecisionDetails::new(StableCode::ALLOWED)
    }
}

/// Makes a verdict stand for `count` queries of which only the first is named.
pub(crate) fn summary_details(verdict: DecisionDetails, count: u64) -> DecisionDetails {
    let message = format!("{count} queries ended so without a record; this is the first's name.");
    DecisionDetails { folded: count.saturating_sub(1), message: Some(message.into()), ..verdict }
}

/// Says the score and what it is made of, when there is one.
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

/// Marks a verdict as one that somebody should look at.
pub(crate) fn mark_alert(verdict: DecisionDetails) -> DecisionDetails {
    DecisionDetails { attention: AlertFlag::Alert, ..verdict }
}

/// What was found, in the words of the log.
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

/// A query that was meant for another resolver, and answered here all the same.
pub(crate) fn bypass_finding(aimed: Option<std::net::SocketAddr>) -> DetectionFinding {
    let to = aimed.map_or_else(|| "another resolver".to_owned(), |to| to.to_string());
    let message = format!("A query was sent to {to}; it was brought here and judged as any other.");
    finding(
        FindingCode::DnsBypassAttempt,
        "A sandbox asks another resolver",
        message,
        (0, Vec::new()),
    )
}

/// Refused names that look like a tunnel.
pub(crate) fn tunnel_finding(score: (u32, Vec<ScoreFeature>)) -> DetectionFinding {
    let message = "Refused names look like data; nothing of them left.".to_owned();
    finding(FindingCode::DnsTunnelSuspected, "DNS names look like a tunnel", message, score)
}

/// Flags what was sent to another resolver.
pub(crate) fn flag_bypass(mut verdict: DecisionDetails, arrived: &QueryArrival) -> DecisionDetails {
    if arrived.toward == QueryTarget::Elsewhere {
        verdict.features.push(flag(BYPASS));
    }
    verdict
}

/// A query of ours that came back to us.
pub(crate) fn loop_finding() -> DetectionFinding {
    let message =
        "A resolver of `[dns]` sends our queries back to us: name another in `upstreams`.";
    finding(
        FindingCode::DnsForwardingLoop,
        "DNS forwarding loop",
        message.to_owned(),
        (0, Vec::new()),
    )
}

/// Writes a finding about an attempt; a log that is down refuses the attempts themselves.
pub(crate) async fn write_finding(record: &OpenRecord, finding: &DetectionFinding) {
    if let Err(down) = record.record_finding(finding).await {
        tracing::warn!(%down, "a finding could not be written");
    }
}
