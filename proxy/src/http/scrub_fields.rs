//! Makes answers searchable, and masks echoes of credentials in response heads and trailers. `credential::scrub` masks
//! those in bodies.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version};
use pingora_core::prelude::Result;
use pingora_http::{RequestHeader, ResponseHeader};

use crate::credential::scrub::{AnswerError, AnswerScrubber, Coding, MAX_CODINGS, ResponseScrubber};

/// Request fields that ask for a response that cannot be searched: compression inside the body, and parts of it. Two
/// parts of the same body can have a credential on the border between them, and neither would show it.
const UNSEARCHABLE_FIELDS: [&str; 6] = [
    "a-im",
    "connect-accept-encoding",
    "grpc-accept-encoding",
    "if-range",
    "range",
    "sec-websocket-extensions",
];
/// Fields that announce messages that are encoded one by one.
const MESSAGE_ENCODINGS: [&str; 2] = ["connect-content-encoding", "grpc-encoding"];
/// Fields that describe the body as it was sent.
const OF_ENCODED_BODY: [&str; 7] = [
    "accept-ranges",
    "content-digest",
    "content-encoding",
    "content-length",
    "content-md5",
    "digest",
    "repr-digest",
];

/// How the answers of a host are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScrubbedHost {
    /// It gets a credential: what cannot be searched does not pass.
    Credential,
    /// Another host of a sandbox that has credentials: a copy is searched, where it can be.
    Other,
}

/// Whether a response could be searched for echoes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScrubOutcome {
    Scrubbed,
    /// The body is encoded in an unknown way, so the response must be withheld.
    Unreadable,
}

/// Has a request ask for an answer that can be searched: of the codings that the client takes, those that Sandbar
/// decodes.
pub(super) fn ask_searchable(request: &mut RequestHeader, host: ScrubbedHost) -> Result<()> {
    if host == ScrubbedHost::Credential {
        for name in UNSEARCHABLE_FIELDS {
            request.remove_header(name);
        }
    }
    let asked = request.headers.get_all("accept-encoding").iter();
    let asked = asked.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let kept: Vec<String> = asked
        .map(str::trim)
        .filter(|item| {
            let name = item.split(';').next().unwrap_or_default().trim();
            name.eq_ignore_ascii_case("identity") || Coding::parse(name).is_some()
        })
        .map(str::to_owned)
        .collect();
    let kept = if kept.is_empty() { "identity".to_owned() } else { kept.join(", ") };
    request.insert_header("Accept-Encoding", kept)
}

/// Masks echoes of credentials in the fields of a response head, removes fields whose name contains one, and prepares
/// for the body.
pub(super) fn scrub_response(
    response: &mut ResponseHeader,
    scrubber: &mut AnswerScrubber,
    host: ScrubbedHost,
    has_body: bool,
) -> Result<ScrubOutcome> {
    let text = scrubber.text();
    if has_grpc_messages(response) {
        text.expect_grpc();
    }
    response.set_reason_phrase(None)?; // may contain an echo too, and clients ignore it
    let names: Vec<_> = response.headers.keys().cloned().collect();
    for name in names {
        if text.find_in_name(name.as_str()) {
            response.remove_header(&name);
            continue;
        }
        let values = response.headers.get_all(&name).iter();
        let mut values: Vec<Vec<u8>> = values.map(|value| value.as_bytes().to_vec()).collect();
        let echoes: usize = values.iter_mut().map(|value| text.mask_field(value)).sum();
        if echoes > 0 {
            response.remove_header(&name);
            for value in values {
                response.append_header(name.clone(), value)?;
            }
        }
    }
    if response.status.is_informational() {
        return Ok(ScrubOutcome::Scrubbed);
    }
    prepare_body(response, scrubber, host, has_body)
}

fn prepare_body(
    response: &mut ResponseHeader,
    scrubber: &mut AnswerScrubber,
    host: ScrubbedHost,
    has_body: bool,
) -> Result<ScrubOutcome> {
    let messages = MESSAGE_ENCODINGS.iter().flat_map(|name| response.headers.get_all(*name));
    let plain = |encoding: &HeaderValue| encoding.as_bytes().eq_ignore_ascii_case(b"identity");
    let codings = content_codings(response).filter(|_| messages.into_iter().all(plain));
    let has_body = has_body && !matches!(response.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let prepared = match (host, &codings) {
        (_, Some(_)) if !has_body => return Ok(ScrubOutcome::Scrubbed),
        (ScrubbedHost::Credential, Some(codings)) => scrubber.expect_body(codings).is_ok(),
        (ScrubbedHost::Credential, None) => false,
        (ScrubbedHost::Other, Some(codings)) => scrubber.expect_copy(codings).is_ok(),
        (ScrubbedHost::Other, None) => return Ok(ScrubOutcome::Scrubbed),
    };
    if !prepared {
        return Ok(ScrubOutcome::Unreadable);
    }
    if host == ScrubbedHost::Credential && codings.is_some_and(|codings| !codings.is_empty()) {
        announce_decoded(response)?;
    }
    Ok(ScrubOutcome::Scrubbed)
}

/// Describes a body that is passed on decoded.
fn announce_decoded(response: &mut ResponseHeader) -> Result<()> {
    for name in OF_ENCODED_BODY {
        response.remove_header(name);
    }
    let tag = response.headers.get("etag").map(HeaderValue::as_bytes).filter(|tag| tag.starts_with(b"\""));
    if let Some(weak) = tag.map(|tag| [b"W/", tag].concat()) {
        response.insert_header("ETag", weak)?; // equal in meaning, not in bytes (RFC 9110, section 8.8.1)
    }
    if response.version != Version::HTTP_2 {
        response.set_version(Version::HTTP_11);
        response.insert_header("Transfer-Encoding", "chunked")?; // Pingora adds it only before this phase
    }
    Ok(())
}

/// The codings of a body, in the order in which they were applied; `None` if one is not known, or there are too many.
fn content_codings(response: &ResponseHeader) -> Option<Vec<Coding>> {
    let mut codings = Vec::new();
    for value in response.headers.get_all("content-encoding") {
        for name in value.to_str().ok()?.split(',').map(str::trim) {
            if !name.eq_ignore_ascii_case("identity") && !name.is_empty() {
                codings.push(Coding::parse(name)?);
            }
        }
    }
    Some(codings).filter(|codings| codings.len() <= MAX_CODINGS)
}

/// Masks echoes in trailers, and returns the end of the body, which the scrubber held back until now.
pub(super) fn scrub_trailers(
    trailers: &mut HeaderMap,
    scrubber: &mut AnswerScrubber,
) -> Result<Bytes, AnswerError> {
    let rest = scrubber.pass(None, true)?;
    mask_trailers(trailers, scrubber.text());
    Ok(rest)
}

fn mask_trailers(trailers: &mut HeaderMap, scrubber: &mut ResponseScrubber) {
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
}

/// Whether the body is a sequence of length-prefixed gRPC messages.
fn has_grpc_messages(response: &ResponseHeader) -> bool {
    let kind = response.headers.get("content-type").map(|kind| kind.as_bytes());
    kind.is_some_and(|kind| {
        kind.starts_with(b"application/grpc") && !kind.starts_with(b"application/grpc-web-text")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p11_a_request_asks_only_for_what_can_be_searched() {
        for (asked, host, sent) in [
            (&["gzip, deflate, br, zstd"][..], ScrubbedHost::Credential, "gzip, deflate, br, zstd"),
            (&["gzip;q=0.5, compress", "dcb, *"], ScrubbedHost::Other, "gzip;q=0.5"),
            (&["dcz"], ScrubbedHost::Credential, "identity"),
            (&[], ScrubbedHost::Credential, "identity"),
            (&["identity"], ScrubbedHost::Credential, "identity"),
        ] {
            let mut request = RequestHeader::build("GET", b"/", None).unwrap();
            for value in asked {
                request.append_header("Accept-Encoding", *value).unwrap();
            }
            for name in UNSEARCHABLE_FIELDS {
                request.append_header(name, "x").unwrap();
            }
            ask_searchable(&mut request, host).unwrap();
            assert_eq!(request.headers["accept-encoding"], sent, "{asked:?}");
            let left = UNSEARCHABLE_FIELDS.iter().filter(|name| request.headers.contains_key(**name)).count();
            assert_eq!(left, if host == ScrubbedHost::Other { UNSEARCHABLE_FIELDS.len() } else { 0 });
        }
    }

    #[test]
    fn codings_are_known_or_the_answer_is_unreadable() {
        for (fields, codings) in [
            (&[][..], Some(vec![])),
            (&["identity"], Some(vec![])),
            (&["gzip"], Some(vec![Coding::Gzip])),
            (&["gzip, br"], Some(vec![Coding::Gzip, Coding::Brotli])),
            (&["identity", "X-GZIP"], Some(vec![Coding::Gzip])),
            (&["compress"], None),
            (&["gzip, gzip, gzip"], None),
        ] {
            let mut response = ResponseHeader::build(200, None).unwrap();
            for field in fields {
                response.append_header("Content-Encoding", *field).unwrap();
            }
            assert_eq!(content_codings(&response), codings, "{fields:?}");
        }
    }
}
