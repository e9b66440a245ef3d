//! What the proxy says to the log, in the log's words.

use audit::words::channel;
pub(crate) use audit::words::{host, policy, subject};
use audit::{Code, Ending, Text, Verdict};
use rules::{Channel, Permit, Reason, RuleSet};

use crate::report::refusal::Refusal;

/// How a connection came to us.
pub(crate) fn arrival(
    channels: &[Channel],
    source: Option<std::net::SocketAddr>,
    aimed: Option<std::net::SocketAddr>,
) -> audit::Arrival {
    let unknown = audit::Channel { kind: Code("unknown"), detail: None };
    let channel = channels.first().map_or(unknown, channel);
    audit::Arrival { channel, transport: audit::Transport::TCP, source, aimed }
}

pub(crate) fn allowed(permit: &Permit, rules: &RuleSet) -> Verdict {
    Verdict {
        rule: Some((&*permit.rule().rule).into()),
        policy: Some(policy(rules)),
        carried: Some(Code(permit.how().word())),
        credential: permit.credential().map(|name| name.as_str().into()),
        ..Verdict::new(Code::ALLOWED)
    }
}

pub(crate) fn refused(refusal: &Refusal, rules: &RuleSet) -> Verdict {
    let next = refusal.reason.next_step();
    let message: Text<512> = match &refusal.detail {
        Some(detail) => format!("{detail}. {next}").into(),
        None => next.into(),
    };
    Verdict {
        rule: refusal.rule.as_ref().map(|rule| (&*rule.rule).into()),
        policy: Some(policy(rules)),
        message: Some(message),
        ..Verdict::new(Code(refusal.reason.code()))
    }
}

/// How something that was cut has ended: by a bound of ours, or because its permission did.
pub(crate) fn cut(reason: Reason) -> Ending {
    let code = Code(reason.code());
    let bound =
        matches!(reason, Reason::IdleTooLong | Reason::LifetimeSpent | Reason::UpstreamTimeout);
    if bound { Ending::Failed(code) } else { Ending::Revoked(code) }
}
