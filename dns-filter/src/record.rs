//! What the filter says to the log: one 4003 record before anything leaves, one for what was answered
//! or refused here, findings for what somebody should look at.

pub(crate) use audit::words::{channel, policy, subject};
use audit::{Attention, Code, Facts, Feature, Finding, OpenRecord, Severity, Transport, Verdict};
use rules::facts::QueryType;
use rules::{Denial, Host, Permit, Reason};

use crate::message::Carrier;
use crate::query::{Arrived, Toward};

/// Carried by a query of ours.
pub(crate) const RESOLVED: Code = Code("resolve");
/// Answered here.
pub(crate) const ANSWERED: Code = Code("answer");
/// Flag of a name below a wildcard that has letters beyond ASCII.
pub(crate) const PUNYCODE: Code = Code("punycode");
/// Flag, and finding, of a query that was sent to another resolver.
pub(crate) const BYPASS: Code = Code("dns_bypass_attempt");
/// Finding of a query of ours that came back to us.
pub(crate) const LOOP: Code = Code("dns_forwarding_loop");
/// Asked by a timer of ours, whatever sandboxes do.
pub(crate) const AHEAD: Code = Code("pre_resolve");

/// How a query came to us.
pub(crate) fn arrival(arrived: &Arrived) -> audit::Arrival {
    let transport = match arrived.carrier {
        Carrier::Tcp => Transport::TCP,
        Carrier::Udp => Transport::UDP,
    };
    audit::Arrival {
        channel: channel(&arrived.channel),
        transport,
        source: arrived.source,
        aimed: arrived.aimed,
    }
}

/// How a query of ours came about.
pub(crate) fn own_arrival(kind: &'static str) -> audit::Arrival {
    audit::Arrival {
        channel: audit::Channel { kind: Code(kind), detail: None },
        transport: Transport::UDP,
        source: None,
        aimed: None,
    }
}

pub(crate) fn facts(name: &str, kind: QueryType) -> Facts {
    Facts::Query(audit::Query { name: name.into(), kind: kind.to_string().into() })
}

pub(crate) fn allowed(permit: &Permit, policy: audit::Policy, carried: Code) -> Verdict {
    Verdict {
        rule: Some((&*permit.rule().rule).into()),
        policy: Some(policy),
        carried: Some(carried),
        features: if is_punycode(permit) { vec![flag(PUNYCODE)] } else { Vec::new() },
        ..Verdict::new(Code::ALLOWED)
    }
}

/// A mark in the record that adds nothing to the score.
pub(crate) fn flag(name: Code) -> Feature {
    Feature { name, score: 0 }
}

/// Whether what a sandbox chose below a wildcard may look like another name to people.
fn is_punycode(permit: &Permit) -> bool {
    let Host::Name(name) = permit.host() else { return false };
    let chosen = name.as_str().get(..permit.lookup().chosen_octets).unwrap_or_default();
    chosen.split('.').any(|label| label.starts_with("xn--"))
}

pub(crate) fn denied(denial: &Denial, policy: audit::Policy) -> Verdict {
    Verdict {
        rule: denial.rule.as_ref().map(|rule| (&*rule.rule).into()),
        policy: Some(policy),
        message: Some(denial.reason.next_step().into()),
        ..Verdict::new(Code(denial.reason.code()))
    }
}

/// A refusal that no rule made.
pub(crate) fn refused(reason: Reason, permit: Option<&Permit>, policy: audit::Policy) -> Verdict {
    Verdict {
        rule: permit.map(|permit| (&*permit.rule().rule).into()),
        policy: Some(policy),
        message: Some(reason.next_step().into()),
        ..Verdict::new(Code(reason.code()))
    }
}

/// What no rule need allow: the sandbox's own names.
pub(crate) fn answered_here(policy: audit::Policy) -> Verdict {
    Verdict { policy: Some(policy), carried: Some(ANSWERED), ..Verdict::new(Code::ALLOWED) }
}

/// Makes a verdict stand for `count` queries of which only the first is named.
pub(crate) fn summary(verdict: Verdict, count: u64) -> Verdict {
    let message = format!("{count} queries ended so without a record; this is the first's name.");
    Verdict { folded: count.saturating_sub(1), message: Some(message.into()), ..verdict }
}

/// Says the score and what it is made of, when there is one.
pub(crate) fn scored(verdict: Verdict, (score, features): &(u32, Vec<Feature>)) -> Verdict {
    match score {
        0 => verdict,
        _ => {
            let features = verdict.features.iter().chain(features).cloned().collect();
            Verdict { score: Some(*score), features, ..verdict }
        }
    }
}

/// Marks a verdict as one that somebody should look at.
pub(crate) fn alert(verdict: Verdict) -> Verdict {
    Verdict { attention: Attention::Alert, ..verdict }
}

/// What was found, in the words of the log.
pub(crate) fn finding(
    code: &'static str,
    title: &str,
    message: String,
    (score, features): (u32, Vec<Feature>),
) -> Finding {
    Finding {
        code: Code(code),
        title: title.into(),
        severity: Severity::Medium,
        message: Some(message.into()),
        score: Some(score).filter(|score| *score > 0),
        features,
    }
}

/// A query that was meant for another resolver, and answered here all the same.
pub(crate) fn bypass(aimed: Option<std::net::SocketAddr>) -> Finding {
    let to = aimed.map_or_else(|| "another resolver".to_owned(), |to| to.to_string());
    let message = format!("A query was sent to {to}; it was brought here and judged as any other.");
    finding(BYPASS.0, "A sandbox asks another resolver", message, (0, Vec::new()))
}

/// Refused names that look like a tunnel.
pub(crate) fn refused_tunnel(score: (u32, Vec<Feature>)) -> Finding {
    let message = "Refused names look like data; nothing of them left.".to_owned();
    finding("dns_tunnel_suspected", "DNS names look like a tunnel", message, score)
}

/// Flags what was sent to another resolver.
pub(crate) fn aimed(mut verdict: Verdict, arrived: &Arrived) -> Verdict {
    if arrived.toward == Toward::Elsewhere {
        verdict.features.push(flag(BYPASS));
    }
    verdict
}

/// A query of ours that came back to us.
pub(crate) fn looped() -> Finding {
    let message =
        "A resolver of `[dns]` sends our queries back to us: name another in `upstreams`.";
    finding(LOOP.0, "DNS forwarding loop", message.to_owned(), (0, Vec::new()))
}

/// Writes a finding about an attempt; a log that is down refuses the attempts themselves.
pub(crate) async fn tell(record: &OpenRecord, finding: &Finding) {
    if let Err(down) = record.finding(finding).await {
        tracing::warn!(%down, "a finding could not be written");
    }
}
