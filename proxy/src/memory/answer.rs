//! The answer of a memory service, checked before the sandbox sees it: no foreign bank, no secret of ours.

use audit::FindingCode;
use http::header::CONTENT_LENGTH;
use http::{HeaderName, HeaderValue};
use pingora_http::ResponseHeader;
use pingora_proxy::Session;
use rules::Reason;
use rules::ids::BankId;

use super::client::MemoryResponse;
use super::json::{self, JsonValue};
use super::record::record_finding;
use super::{AuthorizedCall, MemoryRequest, run_check, select};
use crate::credential::scrub::EchoPatterns;
use crate::inspect::REMEMBERED_BYTES;
use crate::report::refusal::{Refusal, is_refusal_field};

/// Fields that Sandbar does not pass on: they belong to the connection to the service, or point to another address.
const DROPPED_FIELDS: [&str; 9] = [
    "alt-svc",
    "connection",
    "content-length",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Refuses an answer that the sandbox must not see, and records a finding.
pub(super) async fn check_answer(
    call: &AuthorizedCall<'_>,
    secrets: &EchoPatterns,
    received: &MemoryResponse,
    request: &MemoryRequest<'_>,
) -> Result<(), Refusal> {
    let checked = run_check(request, received.body.len(), || check_content(call, secrets, received)).await;
    let refusal = match checked {
        Ok(()) => return Ok(()),
        Err(refusal) => refusal,
    };
    let finding = if refusal.reason == Reason::AnswerForeignBank {
        FindingCode::AnswerForeignBank
    } else {
        FindingCode::AnswerUnchecked
    };
    let title = "An answer of a memory service was withheld";
    let detail = refusal.detail.clone().unwrap_or_default();
    record_finding(request.record, finding, title, detail).await;
    Err(refusal)
}

fn check_content(
    call: &AuthorizedCall<'_>,
    secrets: &EchoPatterns,
    received: &MemoryResponse,
) -> Result<(), Refusal> {
    let unchecked = |why: &str| Refusal::from(Reason::AnswerUnchecked).with_detail(why);
    let fields = &received.head.headers;
    let encoded = |coding: &[u8]| !coding.eq_ignore_ascii_case(b"identity");
    if fields.get_all("content-encoding").iter().any(|value| encoded(value.as_bytes())) {
        return Err(unchecked("it is encoded, although the request did not accept an encoding"));
    }
    let in_field = |(name, value): (&HeaderName, &HeaderValue)| {
        secrets.is_in_name(name.as_str()) || secrets.is_in(value.as_bytes())
    };
    if fields.iter().any(in_field) || secrets.is_in(&received.body) {
        return Err(unchecked("it contains the service's key or token"));
    }
    let pointers = &call.matched.route.answer;
    if pointers.is_empty() || !received.head.status.is_success() {
        return Ok(());
    }
    let json = json::parse_json(&received.body).map_err(|fault| unchecked(&fault.to_string()))?;
    let check_bank = |json: &JsonValue| match json {
        JsonValue::Text(text) if call.banks.iter().any(|bank| bank.as_str() == text) => Ok(()),
        JsonValue::Text(text) => Err(Refusal::from(Reason::AnswerForeignBank)
            .with_detail(format!("it contains content of bank `{}`", text.escape_default()))),
        JsonValue::Array(_)
        | JsonValue::Null
        | JsonValue::Object(_)
        | JsonValue::Other
        | JsonValue::TextTooLong => Err(unchecked("it does not name the bank of its content")),
    };
    pointers.iter().try_for_each(|pointer| select::check_answer_banks(&json, pointer, &check_bank))
}

/// Remembers the text of an answer by its banks, before the sandbox gets it (P15).
pub(super) async fn remember_text(
    call: &AuthorizedCall<'_>,
    received: &MemoryResponse,
    request: &MemoryRequest<'_>,
) {
    let Some(first) = call.banks.first() else { return };
    let remember = || {
        let signals = call.departure.inspection.signals();
        // A larger document would take a multiple of its size in memory, and most of it would not be remembered.
        let parsed = (received.body.len() <= REMEMBERED_BYTES)
            .then(|| serde_json::from_slice::<serde_json::Value>(&received.body).ok());
        match parsed.flatten() {
            Some(json) => {
                let mut texts = Vec::new();
                collect_texts(&json, first, &call.banks, &mut texts);
                signals.remember_text(texts.into_iter());
            }
            None => signals.remember_text(std::iter::once((first, &received.body[..]))),
        }
    };
    run_check(request, received.body.len(), remember).await;
}

/// Collects every text with the bank that it belongs to: the one that an object around it names, else `bank`.
fn collect_texts<'a>(
    json: &'a serde_json::Value,
    bank: &'a BankId,
    banks: &'a [BankId],
    texts: &mut Vec<(&'a BankId, &'a [u8])>,
) {
    match json {
        serde_json::Value::String(text) => texts.push((bank, text.as_bytes())),
        serde_json::Value::Array(items) => {
            items.iter().for_each(|item| collect_texts(item, bank, banks, texts));
        }
        serde_json::Value::Object(members) => {
            let named = members.values().filter_map(serde_json::Value::as_str);
            let named = named.filter_map(|text| banks.iter().find(|bank| bank.as_str() == text)).next();
            members.values().for_each(|member| collect_texts(member, named.unwrap_or(bank), banks, texts));
        }
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::Number(_) => {}
    }
}

/// Sends the answer to the sandbox, in our own framing, and returns its status.
pub(super) async fn send_answer(session: &mut Session, received: &MemoryResponse) -> Result<u16, Refusal> {
    let status = received.head.status.as_u16();
    let gone = |_| Refusal::from(Reason::UpstreamBroke).with_detail("the client went away");
    let mut head = ResponseHeader::build(status, Some(16)).map_err(gone)?;
    for (name, value) in &received.head.headers {
        if !DROPPED_FIELDS.contains(&name.as_str()) && !is_refusal_field(name.as_str()) {
            head.append_header(name, value.clone()).map_err(gone)?;
        }
    }
    if !matches!(status, 204 | 304) {
        head.insert_header(CONTENT_LENGTH, received.body.len()).map_err(gone)?; // RFC 9110, section 8.6
    }
    session.write_response_header(Box::new(head), false).await.map_err(gone)?;
    session.write_response_body(Some(received.body.clone()), true).await.map_err(gone)?;
    Ok(status)
}
