//! Refusals that explain themselves (P18): one type for every step, and a response body as text or as JSON. The body is
//! for the sandbox: it names rule and policy, but no file of the gateway.

use std::time::Duration;

use audit::{AttemptedText, DecisionDetails, OpenRecord};
use rules::decision::RuleRef;
use rules::{Denial, Permit, Reason, RuleSet};
use serde_json::json;

use crate::report::{metrics, record};

/// How long a connection stays open after a refusal, so that the client can read the response.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

/// Why an attempt was refused.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) rule: Option<RuleRef>,
    /// Further detail, such as the refused address.
    pub(crate) detail: Option<String>,
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Self {
        Refusal { reason, rule: None, detail: None }
    }
}

impl From<Box<Denial>> for Refusal {
    fn from(denial: Box<Denial>) -> Self {
        let Denial { reason, rule, address, .. } = *denial;
        Refusal { reason, rule, detail: address.map(|address| address.to_string()) }
    }
}

impl From<dns_filter::ResolveError> for Refusal {
    fn from(refusal: dns_filter::ResolveError) -> Self {
        refusal.reason.into()
    }
}

impl From<audit::LogDown> for Refusal {
    fn from(down: audit::LogDown) -> Self {
        Refusal::from(down.reason()).with_detail(down)
    }
}

impl Refusal {
    /// Names the rule of the permit that preceded this refusal, unless it already names one.
    pub(crate) fn under(self, permit: &Permit) -> Self {
        let rule = self.rule.or_else(|| Some(permit.rule().clone()));
        Refusal { rule, ..self }
    }

    /// The detail as the sandbox may read it: none where it is about the gateway.
    fn client_detail(&self) -> Option<&str> {
        self.detail.as_deref().filter(|_| !concerns_operator(self.reason))
    }

    /// Adds detail to the reason.
    pub(crate) fn with_detail(self, detail: impl ToString) -> Self {
        Refusal { detail: Some(detail.to_string()), ..self }
    }
}

/// Refuses an attempt: counts it, writes its record, and returns the response for the client. `attempted` is what the
/// client wrote, if the facts of the record do not say it.
pub(crate) async fn refuse(
    record: OpenRecord,
    refusal: &Refusal,
    rules: &RuleSet,
    audience: BodyAudience,
    attempted: Option<AttemptedText>,
) -> RefusalResponse {
    metrics::count_decision(refusal.reason.code(), "refused");
    tracing::debug!(reason = %refusal.reason, detail = refusal.detail, "attempt refused");
    let id = record.id();
    let details = DecisionDetails { attempted, ..record::refusal_record(refusal, rules) };
    let recorded = record.record_refusal(details).await;
    if recorded.is_err() {
        tracing::debug!(reason = %refusal.reason, "cannot record a refusal"); // the log itself warns, once
    }
    RefusalResponse::new(refusal, rules, &recorded.unwrap_or(id), audience)
}

/// The HTTP status for a reason. Never 429, on which client libraries retry.
#[expect(clippy::wildcard_enum_match_arm, reason = "all other reasons are denials: 403")]
pub(crate) fn http_status(reason: Reason) -> u16 {
    match reason {
        Reason::BadMethod
        | Reason::BadName
        | Reason::BadRequest
        | Reason::BankMalformed
        | Reason::BodyMalformed
        | Reason::MemoryForm
        | Reason::NameMissing
        | Reason::RequestUnsignable => 400,
        Reason::BodyLate | Reason::FirstBytesLate => 408,
        Reason::BodyTooLarge => 413,
        Reason::Misdirected => 421,
        Reason::HeadTooLarge => 431,
        Reason::Internal => 500,
        Reason::AnswerForeignBank
        | Reason::AnswerTooLarge
        | Reason::AnswerUnchecked
        | Reason::AnswerUnreadable
        | Reason::CredentialUnavailable
        | Reason::DnsAnswer
        | Reason::NoAddress
        | Reason::ResolverUnreachable
        | Reason::UpstreamBroke
        | Reason::UpstreamCertificate
        | Reason::UpstreamUnreachable => 502,
        Reason::DnsOverload
        | Reason::LogQuota
        | Reason::LogUnwritable
        | Reason::OutOfPorts
        | Reason::QuotaExhausted
        | Reason::TooManyConnections => 503,
        Reason::UpstreamTimeout => 504,
        _ => 403,
    }
}

/// Whether a response field could pass for one of a refusal of ours, which an origin server must not send. Some clients
/// read `_` as `-`.
pub(crate) fn is_refusal_field(name: &str) -> bool {
    let mut bytes = name.bytes().map(|byte| if byte == b'_' { b'-' } else { byte.to_ascii_lowercase() });
    b"sandbar-".iter().all(|expected| bytes.next() == Some(*expected))
}

/// The response to a refused request: a status, and a body as text or as JSON.
#[derive(Debug)]
pub(crate) struct RefusalResponse {
    pub(crate) status: u16,
    pub(crate) kind: &'static str,
    pub(crate) body: String,
    /// `Sandbar-Reason`, `Sandbar-Generation`, `Sandbar-Record`.
    pub(crate) fields: [(&'static str, String); 3],
}

/// The reader of a response body: a program gets JSON, a person text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyAudience {
    Machine,
    Person,
}

impl BodyAudience {
    /// Chooses by the `Accept` field of a request.
    pub(crate) fn from_accept(accept: Option<&[u8]>) -> Self {
        let wants = accept.map(String::from_utf8_lossy).unwrap_or_default();
        if wants.contains("json") { BodyAudience::Machine } else { BodyAudience::Person }
    }
}

impl RefusalResponse {
    pub(crate) fn new(refusal: &Refusal, rules: &RuleSet, record: &str, audience: BodyAudience) -> Self {
        let (kind, body) = match audience {
            BodyAudience::Machine => ("application/json", json_body(refusal, rules, record)),
            BodyAudience::Person => ("text/plain; charset=utf-8", text_body(refusal, rules, record)),
        };
        let fields = [
            ("Sandbar-Reason", refusal.reason.code().to_owned()),
            ("Sandbar-Generation", rules.generation().to_string()),
            ("Sandbar-Record", record.to_owned()),
        ];
        RefusalResponse { status: http_status(refusal.reason), kind, body, fields }
    }

    /// Encodes the response as HTTP/1.1 with `Connection: close`.
    pub(crate) fn to_http1(&self) -> Vec<u8> {
        let status = ::http::StatusCode::from_u16(self.status).unwrap_or_default();
        let reason = status.canonical_reason().unwrap_or("Refused");
        let mut text = format!("HTTP/1.1 {} {reason}\r\n", self.status);
        for (name, value) in &self.fields {
            text += &format!("{name}: {value}\r\n");
        }
        text += &format!(
            "Content-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n{}",
            self.kind,
            self.body.len(),
            self.body
        );
        text.into_bytes()
    }
}

/// Whether only the operator can mend what causes a refusal. The sandbox then learns neither detail nor advice, which are
/// about files, keys and addresses of the gateway; the record has both.
fn concerns_operator(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::BudgetUnkept
            | Reason::ChannelsDisagree
            | Reason::CredentialUnavailable
            | Reason::DnsAnswer
            | Reason::LeafRefused
            | Reason::LogQuota
            | Reason::LogUnwritable
            | Reason::OwnAddress
            | Reason::PolicyInvalid
            | Reason::ResolverUnreachable
            | Reason::SandboxRevoked
            | Reason::UnknownChannel
            | Reason::UnknownSandbox
    )
}

/// The next step as the sandbox can take it.
fn client_step(reason: Reason) -> &'static str {
    if concerns_operator(reason) { "Ask the operator, and name this record." } else { reason.next_step() }
}

fn text_body(refusal: &Refusal, rules: &RuleSet, record: &str) -> String {
    let Refusal { reason, rule, .. } = refusal;
    let rule = rule
        .as_ref()
        .map_or_else(|| "no rule matched".to_owned(), |rule| format!("{} in {}", rule.rule, rule.policy));
    let detail = refusal.client_detail().map(|detail| format!(" ({detail})")).unwrap_or_default();
    format!(
        "Sandbar refused this: {reason}{detail}\n{}\n\nrule:       {rule}\ngeneration: {}\nrecord:     {record}\nnext:       {}\n",
        reason.meaning(),
        rules.generation(),
        client_step(*reason)
    )
}

fn json_body(refusal: &Refusal, rules: &RuleSet, record: &str) -> String {
    let Refusal { reason, rule, .. } = refusal;
    let rule = rule.as_ref();
    let rule = rule.map(|rule| json!({ "rule": &*rule.rule, "policy": rule.policy.as_str() }));
    let body = json!({
        "error": {
            "reason": reason.code(),
            "meaning": reason.meaning(),
            "detail": refusal.client_detail(),
            "rule": rule,
            "generation": rules.generation(),
            "record": record,
            "next_step": client_step(*reason),
        }
    });
    format!("{body}\n")
}

/// A fatal TLS alert for a handshake that was refused before it began (RFC 8446, section 6).
#[expect(clippy::wildcard_enum_match_arm, reason = "all other reasons are denials: access_denied")]
pub(crate) fn tls_alert(reason: Reason) -> [u8; 7] {
    const ACCESS_DENIED: u8 = 49;
    const DECODE_ERROR: u8 = 50;
    const UNRECOGNIZED_NAME: u8 = 112;
    let code = match reason {
        Reason::AddressAsSni | Reason::BadName | Reason::NameMissing => UNRECOGNIZED_NAME,
        Reason::BadHandshake | Reason::HeadTooLarge => DECODE_ERROR,
        _ => ACCESS_DENIED,
    };
    [21, 3, 3, 0, 2, 2, code]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words of the configuration and of the gateway's host, of which the sandbox can change nothing.
    const OPERATORS_WORDS: [&str; 8] =
        ["[[", "[dns]", "[identity]", "[log]", "disk", "directory", "the file", "sandbar status"];

    #[test]
    fn p18_the_next_step_of_a_client_is_one_it_can_take() {
        // What a policy says is the developer's to change, and a quota names the command that shows its use.
        let policy = ["[[allow]]", "[[memory]]", "sandbar status --sandbox"];
        for reason in Reason::ALL {
            if client_step(*reason).starts_with("Ask the operator") {
                continue;
            }
            let step =
                policy.iter().fold(client_step(*reason).to_owned(), |step, word| step.replace(word, ""));
            let found: Vec<_> = OPERATORS_WORDS.iter().filter(|word| step.contains(**word)).collect();
            assert!(found.is_empty(), "{reason}: {step:?} says {found:?}");
        }
    }

    #[test]
    fn p18_details_of_the_gateway_stay_in_the_record() {
        let rules = rules::compile(&rules::LoadSources::default(), &[]).unwrap();
        for (reason, shown) in [(Reason::BudgetSpent, true), (Reason::CredentialUnavailable, false)] {
            let refusal = Refusal::from(reason).with_detail("the detail");
            for audience in [BodyAudience::Person, BodyAudience::Machine] {
                let response = RefusalResponse::new(&refusal, &rules, "id", audience);
                assert_eq!(response.body.contains("the detail"), shown, "{}", response.body);
            }
            let recorded = record::refusal_record(&refusal, &rules).message.unwrap().to_display();
            assert!(recorded.starts_with("the detail. "), "{recorded}");
            assert!(recorded.ends_with(reason.next_step()), "{recorded}");
        }
    }

    #[test]
    fn fields_of_refusals_are_recognised() {
        for (name, own) in [
            ("sandbar-reason", true),
            ("Sandbar-Record", true),
            ("sandbar_generation", true),
            ("sandbar-", true),
            ("sandbar", false),
            ("x-sandbar-reason", false),
            ("sandbarred", false),
        ] {
            assert_eq!(is_refusal_field(name), own, "{name}");
        }
    }
}
