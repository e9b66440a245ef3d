//! The answer of a memory service, looked at before the sandbox sees it.

use std::sync::Arc;

use audit::FindingCode;
use http::header::CONTENT_LENGTH;
use pingora_http::ResponseHeader;
use pingora_proxy::Session;
use rules::Reason;

use super::client::MemoryResponse;
use super::json::{self, JsonValue};
use super::{AuthorizedCall, MemoryRequest, record_finding, select};
use crate::credential::scrub::EchoPatterns;
use crate::report::refusal::Refusal;

/// Fields of an answer that belong to the connection it came on, or lead around us.
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

/// Withholds an answer that is not the sandbox's to see, and says so in the log.
pub(super) async fn check_answer(
    granted: &AuthorizedCall<'_>,
    secrets: &[Arc<EchoPatterns>],
    received: &MemoryResponse,
    held: &MemoryRequest<'_>,
) -> Result<(), Refusal> {
    let refusal = match check_content(granted, secrets, received) {
        Ok(()) => return Ok(()),
        Err(refusal) => refusal,
    };
    let finding = if refusal.reason == Reason::AnswerForeignBank {
        FindingCode::AnswerForeignBank
    } else {
        FindingCode::AnswerUnchecked
    };
    let title = "The answer of a memory service was withheld";
    let detail = refusal.detail.clone().unwrap_or_default();
    record_finding(held.record, finding, title, detail).await;
    Err(refusal)
}

fn check_content(
    granted: &AuthorizedCall<'_>,
    secrets: &[Arc<EchoPatterns>],
    received: &MemoryResponse,
) -> Result<(), Refusal> {
    let unchecked = |why: &str| Refusal::from(Reason::AnswerUnchecked).with_detail(why);
    let fields = &received.head.headers;
    let coded = |coding: &[u8]| !coding.eq_ignore_ascii_case(b"identity");
    if fields.get_all("content-encoding").iter().any(|value| coded(value.as_bytes())) {
        return Err(unchecked("it is encoded, though that was not asked for"));
    }
    let told = |text: &[u8]| secrets.iter().any(|echoes| echoes.mask(&mut text.to_vec()) > 0);
    if fields.values().any(|value| told(value.as_bytes())) || told(&received.body) {
        return Err(unchecked("it repeats the key of the service, or a token for it"));
    }
    let pointers = &granted.found.route.answer;
    if pointers.is_empty() || !received.head.status.is_success() {
        return Ok(());
    }
    let json = json::parse_json(&received.body).map_err(|fault| unchecked(&fault.to_string()))?;
    let own = |json: &JsonValue| match json {
        JsonValue::Text(text) if granted.banks.iter().any(|bank| bank.as_str() == text) => Ok(()),
        JsonValue::Text(text) => Err(Refusal::from(Reason::AnswerForeignBank)
            .with_detail(format!("it has content of bank `{}`", text.escape_default()))),
        JsonValue::Array(_)
        | JsonValue::Null
        | JsonValue::Object(_)
        | JsonValue::Other
        | JsonValue::TextTooLong => {
            Err(unchecked("it does not say which bank its content is from"))
        }
    };
    pointers.iter().try_for_each(|pointer| select::check_answer_banks(&json, pointer, &own))
}

/// Passes the answer on, in our own framing.
pub(super) async fn send_answer(
    session: &mut Session,
    received: &MemoryResponse,
    held: &MemoryRequest<'_>,
) -> Result<u16, Refusal> {
    let status = received.head.status.as_u16();
    let gone = |_| Refusal::from(Reason::UpstreamBroke).with_detail("the sandbox went away");
    let mut head = ResponseHeader::build(status, Some(16)).map_err(gone)?;
    for (name, value) in &received.head.headers {
        if !DROPPED_FIELDS.contains(&name.as_str()) {
            head.append_header(name, value.clone()).map_err(gone)?;
        }
    }
    if !matches!(status, 204 | 304) {
        head.insert_header(CONTENT_LENGTH, received.body.len()).map_err(gone)?; // RFC 9110, section 8.6
    }
    held.record.byte_count().add_received(received.body.len() as u64);
    session.write_response_header(Box::new(head), false).await.map_err(gone)?;
    session.write_response_body(Some(received.body.clone()), true).await.map_err(gone)?;
    Ok(status)
}
