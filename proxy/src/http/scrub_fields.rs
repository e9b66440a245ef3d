//! Masks echoes of an injected credential in response heads and trailers. `credential::scrub` masks those in bodies.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use pingora_core::prelude::Result;
use pingora_http::ResponseHeader;

use crate::credential::scrub::ResponseScrubber;

/// Fields that announce an encoded body, or encoded messages in it.
const ENCODINGS: [&str; 3] = ["connect-content-encoding", "content-encoding", "grpc-encoding"];

/// Whether a response could be searched for echoes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScrubOutcome {
    Scrubbed,
    /// The body is encoded, so the response must be withheld.
    Unreadable,
}

/// Masks echoes of a credential in the fields of a response head, and removes fields whose name contains one.
pub(super) fn scrub_response(
    response: &mut ResponseHeader,
    scrubber: &mut ResponseScrubber,
) -> Result<ScrubOutcome> {
    let encodings = ENCODINGS.iter().flat_map(|name| response.headers.get_all(*name));
    let plain = |encoding: &HeaderValue| encoding.as_bytes().eq_ignore_ascii_case(b"identity");
    if !encodings.into_iter().all(plain) {
        return Ok(ScrubOutcome::Unreadable);
    }
    if has_grpc_messages(response) {
        scrubber.expect_grpc();
    }
    response.set_reason_phrase(None)?; // may contain an echo too, and clients ignore it
    let names: Vec<_> = response.headers.keys().cloned().collect();
    for name in names {
        if scrubber.find_in_name(name.as_str()) {
            response.remove_header(&name);
            continue;
        }
        let values = response.headers.get_all(&name).iter();
        let mut values: Vec<Vec<u8>> = values.map(|value| value.as_bytes().to_vec()).collect();
        let echoes: usize = values.iter_mut().map(|value| scrubber.mask_field(value)).sum();
        if echoes > 0 {
            response.remove_header(&name);
            for value in values {
                response.append_header(name.clone(), value)?;
            }
        }
    }
    Ok(ScrubOutcome::Scrubbed)
}

/// Does the same in trailers, and returns the end of the body, which the scrubber held back until now.
pub(super) fn scrub_trailers(trailers: &mut HeaderMap, scrubber: &mut ResponseScrubber) -> Bytes {
    let names: Vec<HeaderName> =
        trailers.keys().filter(|name| scrubber.find_in_name(name.as_str())).cloned().collect();
    for name in names {
        trailers.remove(name);
    }
    for value in trailers.values_mut() {
        let mut text = value.as_bytes().to_vec();
        if scrubber.mask_field(&mut text) > 0 {
            *value = HeaderValue::from_bytes(&text).unwrap_or(HeaderValue::from_static(""));
        }
    }
    scrubber.scrub(None, true)
}

/// Whether the body is a sequence of length-prefixed gRPC messages.
fn has_grpc_messages(response: &ResponseHeader) -> bool {
    let kind = response.headers.get("content-type").map(|kind| kind.as_bytes());
    kind.is_some_and(|kind| {
        kind.starts_with(b"application/grpc") && !kind.starts_with(b"application/grpc-web-text")
    })
}
