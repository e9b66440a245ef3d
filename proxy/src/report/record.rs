//! Converts the proxy's types to the audit log's, so that all records use the same words.

use audit::words::channel;
pub(crate) use audit::words::{host, policy, subject};
use audit::{DecisionDetails, Ending, OpenRecord, StableCode, Text};
use rules::ids::CredentialName;
use rules::{Channel, Permit, Reason, RuleSet, SandboxRef};

use crate::report::refusal::Refusal;

/// Describes how a connection arrived.
pub(crate) fn arrival(
    channels: &[Channel],
    source: Option<std::net::SocketAddr>,
    original_dst: Option<std::net::SocketAddr>,
) -> audit::RecordedArrival {
    let unknown = audit::RecordedChannel { kind: StableCode("unknown"), detail: None };
    let channel = channels.first().map_or(unknown, channel);
    audit::RecordedArrival { channel, transport: audit::Transport::TCP, source, original_dst }
}

/// Identifies a connection again under the rules of now, and notes in its record who makes the attempt (P2).
///
/// # Errors
///
/// Returns why the connection serves no longer: its channel belongs to another sandbox than when it was accepted, for
/// which it holds a slot, or to none.
pub(crate) fn identify_again(
    rules: &RuleSet,
    accepted: &SandboxRef,
    record: &mut OpenRecord,
) -> Result<SandboxRef, Reason> {
    let identified = rules.sandboxes().identify_again(accepted);
    record.set_sandbox(identified.as_ref().ok().map(subject));
    match identified {
        Ok(now) if now.id == accepted.id => Ok(now),
        Ok(_) => Err(Reason::IdentityChanged),
        Err(reason) => Err(reason),
    }
}

/// Returns the names of injected credentials as a record has them.
pub(crate) fn credential_names(names: &[CredentialName]) -> Option<Text<520>> {
    let names: Vec<&str> = names.iter().map(CredentialName::as_str).collect();
    (!names.is_empty()).then(|| names.join(",").as_str().into())
}

pub(crate) fn permit_record(permit: &Permit, rules: &RuleSet) -> DecisionDetails {
    DecisionDetails {
        rule: Some((&*permit.rule().rule).into()),
        policy: Some(policy(rules)),
        treatment: Some(StableCode(permit.treatment().as_str())),
        credential: credential_names(permit.credentials()),
        ..DecisionDetails::new(StableCode::ALLOWED)
    }
}

pub(crate) fn refusal_record(refusal: &Refusal, rules: &RuleSet) -> DecisionDetails {
    let next = refusal.reason.next_step();
    let message: Text<512> = match &refusal.detail {
        Some(detail) => format!("{detail}. {next}").into(),
        None => next.into(),
    };
    DecisionDetails {
        rule: refusal.rule.as_ref().map(|rule| (&*rule.rule).into()),
        policy: Some(policy(rules)),
        message: Some(message),
        ..DecisionDetails::new(refusal.reason.into())
    }
}

/// The ending of an attempt that was cut: failed by one of our timeouts, or revoked.
pub(crate) fn cut_ending(reason: Reason) -> Ending {
    let timeout = matches!(
        reason,
        Reason::BodyLate | Reason::IdleTooLong | Reason::LifetimeSpent | Reason::UpstreamTimeout
    );
    if timeout { Ending::Failed(reason.into()) } else { Ending::Revoked(reason) }
}
