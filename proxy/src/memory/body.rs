//! The body of a memory request: read within limits, parsed strictly, and drained when the request is refused.

use bytes::Bytes;
use pingora_proxy::Session;
use rules::Reason;
use tokio::time::timeout;

use super::json::{self, JsonValue};
use super::profile::ProfileRoute;
use super::{MemoryRequest, form};
use crate::quota::ReservedBuffer;
use crate::report::refusal::{LINGER, Refusal};

/// Limit of the bytes that are drained.
const DRAIN_BYTES: usize = 16 << 20;

/// Reads the body within its limits and the sandbox's quota. Refuses a body on a route that takes none.
pub(super) async fn read_body(
    session: &mut Session,
    route: &ProfileRoute,
    request: &mut MemoryRequest<'_>,
) -> Result<Bytes, Refusal> {
    let limits = &request.shared.limits;
    let head = session.req_header();
    let limit = if route.has_body() { limits.memory_body_bytes } else { 0 };
    if route.has_body() {
        form::check_json_type(head)?;
    } else if !form::has_no_body(head) {
        return Err(form::form_refusal("it has a body, which this route does not take"));
    }
    if request.recorded.length.is_some_and(|length| length > limit) {
        return Err(Reason::BodyTooLarge.into());
    }
    if head.headers.contains_key("expect") {
        let written = session.write_continue_response().await;
        written.map_err(|_| Refusal::from(Reason::BodyLate))?;
    }
    let buffer = ReservedBuffer::new(request.buffers);
    let read = timeout(limits.memory_body(), read_to_end(session, limit, buffer)).await;
    read.map_err(|_| Refusal::from(Reason::BodyLate))?
}

async fn read_to_end(
    session: &mut Session,
    limit: u64,
    mut all: ReservedBuffer<'_>,
) -> Result<Bytes, Refusal> {
    loop {
        match session.downstream_session.read_request_body().await {
            Ok(Some(bytes)) if all.len() + bytes.len() as u64 > limit => {
                return Err(Reason::BodyTooLarge.into());
            }
            Ok(Some(bytes)) => all.extend(&bytes, limit)?,
            Ok(None) => return Ok(all.freeze()),
            Err(_) => {
                return Err(
                    Refusal::from(Reason::BodyLate).with_detail("the client went away before its end")
                );
            }
        }
    }
}

/// Reads and discards what the client is still sending, for a moment. Closing the connection on unread bytes would
/// reset it, and the client might lose the refusal.
pub(super) async fn drain_body(session: &mut Session) {
    if session.req_header().headers.contains_key("expect") {
        return; // the client waits for 100 Continue and sends nothing
    }
    let mut left = DRAIN_BYTES;
    let draining = async {
        while let Ok(Some(bytes)) = session.downstream_session.read_request_body().await {
            match left.checked_sub(bytes.len()) {
                Some(fewer) => left = fewer,
                None => break,
            }
        }
    };
    drop(timeout(LINGER, draining).await); // a client that sends more may lose the refusal
}

/// Parses the body as a JSON object, strictly. None if the route takes no body.
pub(super) fn parse_body(body: &[u8], route: &ProfileRoute) -> Result<Option<JsonValue>, Refusal> {
    if !route.has_body() {
        return Ok(None);
    }
    let malformed = |why: &dyn ToString| Refusal::from(Reason::BodyMalformed).with_detail(why.to_string());
    match json::parse_json(body).map_err(|fault| malformed(&fault))? {
        json @ JsonValue::Object(_) => Ok(Some(json)),
        JsonValue::Array(_)
        | JsonValue::Null
        | JsonValue::Other
        | JsonValue::Text(_)
        | JsonValue::TextTooLong => Err(malformed(&"it is not a JSON object")),
    }
}
