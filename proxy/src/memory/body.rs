//! The body of a memory request: read within its bounds, parsed strictly, and drained when the request is refused.

use bytes::{Bytes, BytesMut};
use pingora_proxy::Session;
use rules::Reason;
use tokio::time::timeout;

use super::json::{self, JsonValue};
use super::profile::ProfileRoute;
use super::{MemoryRequest, form};
use crate::report::refusal::{LINGER, Refusal};

/// Bytes drained at most.
const DRAIN_BYTES: usize = 16 << 20;

/// Reads the body within its bounds; where none belongs there must be none.
pub(super) async fn read_body(
    session: &mut Session,
    route: &ProfileRoute,
    held: &MemoryRequest<'_>,
) -> Result<Bytes, Refusal> {
    let limits = &held.shared.limits;
    let head = session.req_header();
    let most = if route.has_body() { limits.memory_body_bytes } else { 0 };
    if route.has_body() {
        form::check_json_type(head)?;
    } else if !form::has_no_body(head) {
        return Err(form::form_refusal("it has a body, and such requests have none"));
    }
    if held.recorded.length.is_some_and(|length| length > most) {
        return Err(Reason::BodyTooLarge.into());
    }
    if head.headers.contains_key("expect") {
        let told = session.write_continue_response().await;
        told.map_err(|_| Refusal::from(Reason::BodyLate))?;
    }
    let read = timeout(limits.memory_body(), read_to_end(session, most)).await;
    let body = read.map_err(|_| Refusal::from(Reason::BodyLate))??;
    held.record.byte_count().add_sent(body.len() as u64);
    Ok(body)
}

async fn read_to_end(session: &mut Session, most: u64) -> Result<Bytes, Refusal> {
    let mut all = BytesMut::new();
    loop {
        match session.downstream_session.read_request_body().await {
            Ok(Some(bytes)) if (all.len() + bytes.len()) as u64 > most => {
                return Err(Reason::BodyTooLarge.into());
            }
            Ok(Some(bytes)) => all.extend_from_slice(&bytes),
            Ok(None) => return Ok(all.freeze()),
            Err(_) => return Err(Refusal::from(Reason::BodyLate).with_detail("it broke off")),
        }
    }
}

/// Reads on what a client is still sending, for a moment: a connection that is closed on it takes the refusal
/// back before the client gets to see it.
pub(super) async fn drain_body(session: &mut Session) {
    if session.req_header().headers.contains_key("expect") {
        return; // it waits to be told
    }
    let mut left = DRAIN_BYTES;
    let reading = async {
        while let Ok(Some(bytes)) = session.downstream_session.read_request_body().await {
            match left.checked_sub(bytes.len()) {
                Some(fewer) => left = fewer,
                None => break,
            }
        }
    };
    drop(timeout(LINGER, reading).await); // whoever sends more is left
}

/// Reads the body as JSON, strictly.
pub(super) fn parse_body(body: &[u8], route: &ProfileRoute) -> Result<Option<JsonValue>, Refusal> {
    if !route.has_body() {
        return Ok(None);
    }
    let malformed =
        |why: &dyn ToString| Refusal::from(Reason::BodyMalformed).with_detail(why.to_string());
    match json::parse_json(body).map_err(|fault| malformed(&fault))? {
        json @ JsonValue::Object(_) => Ok(Some(json)),
        JsonValue::Array(_)
        | JsonValue::Null
        | JsonValue::Other
        | JsonValue::Text(_)
        | JsonValue::TextTooLong => Err(malformed(&"it is not an object")),
    }
}
