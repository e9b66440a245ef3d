//! How a request is sent: what of it the sandbox chooses and the origin server sees, besides the head and the body. All
//! of it is either priced with the head (P19), as one text of its code, or leaves in one form whatever the client did:
//!
//! | choice | what becomes of it |
//! | --- | --- |
//! | port, TLS or not | priced |
//! | HTTP/1 or HTTP/2 | priced; in TLS the origin server chooses, not the client |
//! | body with a length, without one, or none | priced |
//! | `Content-Length: 0` or no such field | one form for each method ([`normalize_framing`]) |
//! | `TE` of gRPC | always sent |
//! | HTTP/1.0 or HTTP/1.1 | Pingora sends 1.1 |
//! | sizes of chunks and of DATA frames | blocks of one size; others are priced (`http/outgoing.rs`) |
//! | trailers | refused, or not forwarded |

use ::http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use ::http::{HeaderValue, Version};
use pingora_core::prelude::Result;
use pingora_http::RequestHeader;
use rules::facts::UrlScheme;

/// How the end of a request's body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SentFraming {
    /// There is no body.
    Empty,
    Length,
    /// By a last chunk, or the end of a stream.
    Open,
}

impl SentFraming {
    /// Reads it from the length of a body, if that is known.
    pub(crate) fn of_length(length: Option<u64>) -> Self {
        match length {
            Some(0) => SentFraming::Empty,
            Some(_) => SentFraming::Length,
            None => SentFraming::Open,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            SentFraming::Empty => "none",
            SentFraming::Length => "length",
            SentFraming::Open => "open",
        }
    }
}

/// Describes how a request is sent, for its price.
pub(crate) fn describe_sending(
    scheme: UrlScheme,
    version: Version,
    framing: SentFraming,
    port: Option<u16>,
) -> String {
    let scheme = match scheme {
        UrlScheme::Http => "http",
        UrlScheme::Https => "https",
    };
    let version = if version == Version::HTTP_2 { 2 } else { 1 };
    format!("{scheme} {version} {} {}", framing.as_str(), port.unwrap_or_default())
}

/// Gives a request without a body one form: a length of 0 for methods that usually have one (RFC 9110, section 8.6), and
/// no field for others.
pub(crate) fn normalize_framing(upstream: &mut RequestHeader, framing: SentFraming) -> Result<()> {
    if framing != SentFraming::Empty {
        return Ok(());
    }
    upstream.remove_header(&TRANSFER_ENCODING);
    upstream.remove_header(&CONTENT_LENGTH);
    match upstream.method.as_str() {
        "PATCH" | "POST" | "PUT" => upstream.insert_header(CONTENT_LENGTH, HeaderValue::from_static("0")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p19_how_a_request_is_sent_has_one_text_for_each_choice() {
        let mut all = Vec::new();
        for scheme in [UrlScheme::Http, UrlScheme::Https] {
            for version in [Version::HTTP_11, Version::HTTP_2] {
                for framing in [SentFraming::Empty, SentFraming::Length, SentFraming::Open] {
                    for port in [80, 443, 8443] {
                        all.push(describe_sending(scheme, version, framing, Some(port)));
                    }
                }
            }
        }
        let distinct: std::collections::BTreeSet<&String> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert!(all.contains(&"https 2 none 443".to_owned()), "the usual one, as the baseline spells it");
    }

    #[test]
    fn p19_a_request_without_a_body_has_one_form() {
        for (method, sent, expected) in [
            ("GET", None, None),
            ("GET", Some("0"), None),
            ("DELETE", Some("0"), None),
            ("POST", None, Some("0")),
            ("POST", Some("0"), Some("0")),
            ("PUT", None, Some("0")),
        ] {
            let mut head = RequestHeader::build(method, b"/", None).unwrap();
            sent.into_iter().for_each(|length| head.insert_header(CONTENT_LENGTH, length).unwrap());
            normalize_framing(&mut head, SentFraming::Empty).unwrap();
            let leaves = head.headers.get(CONTENT_LENGTH).map(|length| length.to_str().unwrap());
            assert_eq!(leaves, expected, "{method} with {sent:?}");
            let mut other = head.clone();
            normalize_framing(&mut other, SentFraming::Length).unwrap();
            assert_eq!(other.headers, head.headers, "a body keeps its framing");
        }
    }
}
