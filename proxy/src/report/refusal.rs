//! Refusals that explain themselves (P18): one type from every step, one text for people, one for machines.

use rules::decision::RuleRef;
use rules::{Denial, Reason, RuleSet};
use serde_json::json;

/// Why an attempt ended here.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) rule: Option<RuleRef>,
    /// What else is to be told, such as the address that was refused.
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
    fn from(_: audit::LogDown) -> Self {
        Reason::LogUnwritable.into()
    }
}

impl Refusal {
    /// Adds what was found to be wrong.
    pub(crate) fn with_detail(self, detail: impl ToString) -> Self {
        Refusal { detail: Some(detail.to_string()), ..self }
    }
}

/// The HTTP status that says it best. Never 429, which client libraries answer by trying again.
#[expect(clippy::wildcard_enum_match_arm, reason = "every other is forbidden by a rule")]
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
        | Reason::AnswerUnchecked
        | Reason::AnswerUnreadable
        | Reason::CredentialUnavailable
        | Reason::DnsAnswer
        | Reason::NoAddress
        | Reason::ResolverUnreachable
        | Reason::UpstreamBroke
        | Reason::UpstreamCertificate
        | Reason::UpstreamUnreachable => 502,
        Reason::DnsOverload | Reason::LogUnwritable | Reason::TooManyConnections => 503,
        Reason::UpstreamTimeout => 504,
        _ => 403,
    }
}

/// What the client is shown: a status, and a body for people or for machines.
#[derive(Debug)]
pub(crate) struct RefusalResponse {
    pub(crate) status: u16,
    pub(crate) kind: &'static str,
    pub(crate) body: String,
    /// `Sandbar-Reason`, `Sandbar-Generation`, `Sandbar-Record`.
    pub(crate) fields: [(&'static str, String); 3],
}

/// Whom a body is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyAudience {
    Machine,
    Person,
}

impl BodyAudience {
    /// By the `Accept` of a request.
    pub(crate) fn from_accept(accept: Option<&[u8]>) -> Self {
        let wants = accept.map(String::from_utf8_lossy).unwrap_or_default();
        if wants.contains("json") { BodyAudience::Machine } else { BodyAudience::Person }
    }
}

impl RefusalResponse {
    pub(crate) fn new(
        refusal: &Refusal,
        rules: &RuleSet,
        record: &str,
        reader: BodyAudience,
    ) -> Self {
        let (kind, body) = match reader {
            BodyAudience::Machine => ("application/json", json_body(refusal, rules, record)),
            BodyAudience::Person => {
                ("text/plain; charset=utf-8", text_body(refusal, rules, record))
            }
        };
        let fields = [
            ("Sandbar-Reason", refusal.reason.code().to_owned()),
            ("Sandbar-Generation", rules.generation().to_string()),
            ("Sandbar-Record", record.to_owned()),
        ];
        RefusalResponse { status: http_status(refusal.reason), kind, body, fields }
    }

    /// The whole of it as HTTP/1.1, after which the connection is closed.
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
        || "none names it".to_owned(),
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

/// A fatal TLS alert for a handshake that never began (RFC 8446, section 6).
#[expect(clippy::wildcard_enum_match_arm, reason = "every other is forbidden by a rule")]
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
