//! Refusals that explain themselves (P18): one type for every step, and a response body as text or as JSON.

use std::time::Duration;

use audit::OpenRecord;
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
        let refusal = Refusal::from(down.reason());
        match down.reason() == Reason::LogUnwritable {
            true => refusal, // the sandbox need not know what is wrong with the disk
            false => refusal.with_detail(down),
        }
    }
}

impl Refusal {
    /// Names the rule of the permit that preceded this refusal, unless it already names one.
    pub(crate) fn under(self, permit: &Permit) -> Self {
        let rule = self.rule.or_else(|| Some(permit.rule().clone()));
        Refusal { rule, ..self }
    }

    /// Adds detail to the reason.
    pub(crate) fn with_detail(self, detail: impl ToString) -> Self {
        Refusal { detail: Some(detail.to_string()), ..self }
    }
}

/// Refuses an attempt: counts it, writes its record, and returns the response for the client.
pub(crate) async fn refuse(
    record: OpenRecord,
    refusal: &Refusal,
    rules: &RuleSet,
    audience: BodyAudience,
) -> RefusalResponse {
    metrics::count_decision(refusal.reason.code(), "refused");
    tracing::debug!(reason = %refusal.reason, detail = refusal.detail, "attempt refused");
    let id = record.id();
    let recorded = record.record_refusal(record::refusal_record(refusal, rules)).await;
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
        | Reason::NameMissing => 400,
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

fn text_body(refusal: &Refusal, rules: &RuleSet, record: &str) -> String {
    let Refusal { reason, rule, detail } = refusal;
    let rule = rule.as_ref().map_or_else(
        || "no rule matched".to_owned(),
        |rule| format!("{} in {} ({}:{})", rule.rule, rule.policy, rule.file, rule.line),
    );
    let detail = detail.as_ref().map(|detail| format!(" ({detail})")).unwrap_or_default();
    format!(
        "Sandbar refused this: {reason}{detail}\n{}\n\nrule:       {rule}\ngeneration: {}\nrecord:     {record}\nnext:       {}\n",
        reason.meaning(),
        rules.generation(),
        reason.next_step()
    )
}

fn json_body(refusal: &Refusal, rules: &RuleSet, record: &str) -> String {
    let Refusal { reason, rule, detail } = refusal;
    let rule = rule.as_ref().map(|rule| {
        json!({ "rule": &*rule.rule, "policy": rule.policy.as_str(), "file": &*rule.file, "line": rule.line })
    });
    let body = json!({
        "error": {
            "reason": reason.code(),
            "meaning": reason.meaning(),
            "detail": detail,
            "rule": rule,
            "generation": rules.generation(),
            "record": record,
            "next_step": reason.next_step(),
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
