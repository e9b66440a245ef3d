//! What the filter says to the log: one 4003 record before anything leaves, one for what was answered
//! or refused here, findings for what somebody should look at.

use audit::{Attention, Code, Facts, Finding, OpenRecord, Severity, Subject, Transport, Verdict};
use rules::facts::QueryType;
use rules::{Channel, Denial, Permit, Reason, RuleSet, SandboxRef};

use crate::message::Carrier;
use crate::query::Arrived;

/// Why something was allowed.
pub(crate) const ALLOWED: Code = Code("allowed");
/// Carried by a query of ours.
pub(crate) const RESOLVED: Code = Code("resolve");
/// Answered here.
pub(crate) const ANSWERED: Code = Code("answer");
/// Asked by a timer of ours, whatever sandboxes do.
pub(crate) const AHEAD: Code = Code("pre_resolve");

/// How a query came to us.
pub(crate) fn arrival(arrived: &Arrived) -> audit::Arrival {
    let (kind, detail) = match &arrived.channel {
        Channel::Dedicated(id) => ("dedicated", id.to_string()),
        Channel::Interface(name) => ("interface", name.clone()),
        Channel::Mark(mark) => ("mark", format!("{mark:#x}")),
        Channel::SourceAddress(address) => ("source_address", address.to_string()),
        Channel::UnixUser(uid) => ("unix", uid.to_string()),
    };
    let transport = match arrived.carrier {
        Carrier::Tcp => Transport::TCP,
        Carrier::Udp => Transport::UDP,
    };
    audit::Arrival {
        channel: audit::Channel { kind: Code(kind), detail: Some(detail.into()) },
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

pub(crate) fn subject(sandbox: &SandboxRef) -> Subject {
    let unset = "unset";
    let tenant = sandbox.tenant.as_ref().map_or(unset, |tenant| tenant.as_str());
    let environment = sandbox.environment.as_ref().map_or(unset, |name| name.as_str());
    Subject {
        sandbox: audit::SandboxId(sandbox.id.as_str().into()),
        tenant: audit::TenantId(tenant.into()),
        environment: audit::Environment(environment.into()),
    }
}

pub(crate) fn facts(name: &str, kind: QueryType) -> Facts {
    Facts::Query(audit::Query { name: name.into(), kind: kind.to_string().into() })
}

pub(crate) fn policy(rules: &RuleSet) -> audit::Policy {
    audit::Policy { digest: rules.digest().to_string().into(), generation: rules.generation() }
}

pub(crate) fn allowed(permit: &Permit, policy: audit::Policy, carried: Code) -> Verdict {
    Verdict {
        rule: Some((&*permit.rule().rule).into()),
        policy: Some(policy),
        carried: Some(carried),
        ..Verdict::new(ALLOWED)
    }
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
    Verdict { policy: Some(policy), carried: Some(ANSWERED), ..Verdict::new(ALLOWED) }
}

/// Makes a verdict stand for `count` queries of which only the first is named.
pub(crate) fn summary(verdict: Verdict, count: u64) -> Verdict {
    let message = format!("{count} queries ended so without a record; this is the first's name.");
    Verdict { folded: count.saturating_sub(1), message: Some(message.into()), ..verdict }
}

/// Says the score and what it is made of, when there is one.
pub(crate) fn scored(verdict: Verdict, (score, features): &(u32, Vec<audit::Feature>)) -> Verdict {
    match score {
        0 => verdict,
        _ => Verdict { score: Some(*score), features: features.clone(), ..verdict },
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
    (score, features): (u32, Vec<audit::Feature>),
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

/// Writes a finding about an attempt; a log that is down refuses the attempts themselves.
pub(crate) async fn tell(record: &OpenRecord, finding: &Finding) {
    if let Err(down) = record.finding(finding).await {
        tracing::warn!(%down, "a finding could not be written");
    }
}
