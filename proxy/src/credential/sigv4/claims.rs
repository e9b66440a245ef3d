//! Removes the sandbox's own signature from a request, wherever AWS takes one: in header fields, in the query of a
//! presigned URL, and in forms, where it cannot be removed and the request is refused.

use http::Uri;
use http::uri::PathAndQuery;
use pingora_http::RequestHeader;

use super::SigningFault;
use super::canonical::{Parameter, parse_query, query_text};

/// Fields and parameters of signatures, version 4, and of sessions.
const SIGNATURE_NAMES: [&str; 11] = [
    "x-amz-algorithm",
    "x-amz-content-sha256",
    "x-amz-credential",
    "x-amz-date",
    "x-amz-expires",
    "x-amz-region-set",
    "x-amz-s3session-token",
    "x-amz-security-token",
    "x-amz-signature",
    "x-amz-signedheaders",
    "x-amz-trailer-signature",
];
/// Parameters of signatures, version 2, which some services still take.
const OLD_SIGNATURE_NAMES: [&str; 5] =
    ["awsaccesskeyid", "securitytoken", "signature", "signaturemethod", "signatureversion"];

/// Where a client says how it computed the digest of the body.
pub(super) const DECLARED_DIGEST: &str = "x-amz-content-sha256";

/// Removes the sandbox's own signature from the fields and the query.
///
/// # Errors
///
/// Fails if the query is malformed.
pub(crate) fn strip_signature(request: &mut RequestHeader) -> Result<(), SigningFault> {
    request.remove_header("authorization");
    for name in SIGNATURE_NAMES {
        request.remove_header(name);
    }
    let parameters = match request.uri.query() {
        Some(query) => parse_query(query)?,
        None => return Ok(()),
    };
    let kept: Vec<Parameter> = parameters.iter().filter(|parameter| !is_claim(parameter)).cloned().collect();
    if kept.len() == parameters.len() {
        return Ok(());
    }
    let path = request.uri.path().to_owned();
    set_target(request, &path, &query_text(&kept))
}

/// Refuses a form in which the sandbox authenticates itself: `Authorization` would not override it everywhere.
pub(super) fn check_form(body: &[u8]) -> Result<(), SigningFault> {
    // What cannot be parsed has no parameter either.
    let parameters = std::str::from_utf8(body).ok().and_then(|text| parse_query(text).ok());
    match parameters.unwrap_or_default().iter().any(is_claim) {
        true => Err(SigningFault::Form),
        false => Ok(()),
    }
}

fn is_claim(parameter: &Parameter) -> bool {
    SIGNATURE_NAMES.iter().chain(&OLD_SIGNATURE_NAMES).any(|name| parameter.is_named(name))
}

/// Sets the path and the query, which are encoded.
pub(super) fn set_target(request: &mut RequestHeader, path: &str, query: &str) -> Result<(), SigningFault> {
    let target = match query {
        "" => path.to_owned(),
        _ => format!("{path}?{query}"),
    };
    let mut parts = request.uri.clone().into_parts();
    parts.path_and_query = Some(target.parse::<PathAndQuery>().map_err(|_| SigningFault::Path)?);
    request.set_uri(Uri::from_parts(parts).map_err(|_| SigningFault::Path)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p11_no_signature_of_the_sandbox_stays() {
        assert!(SIGNATURE_NAMES.is_sorted() && OLD_SIGNATURE_NAMES.is_sorted());
        for (target, kept) in [
            ("/b/k", "/b/k"),
            ("/b/k?list-type=2&prefix=a", "/b/k?list-type=2&prefix=a"),
            (
                "/b/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIDMINE%2F20200101%2Fr%2Fs3%2Faws4_request\
                 &X-Amz-Date=20200101T000000Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=00&versionId=1",
                "/b/k?versionId=1",
            ),
            ("/?x-amz-security-TOKEN=mine", "/"),
            ("/?%58-Amz-Security-Token=mine&a=1", "/?a=1"),
            ("/?X-Amz-Security-Token=1&X-Amz-Security-Token=2&X-Amz-Security-Token", "/"),
            ("/?AWSAccessKeyId=AKIDMINE&Signature=x&Expires=1", "/?Expires=1"),
            ("https://h/b?X-Amz-Date=1", "https://h/b"),
        ] {
            let mut request = RequestHeader::build("GET", b"/", None).unwrap();
            request.set_uri(target.parse().unwrap()); // with an authority over HTTP/2
            for name in SIGNATURE_NAMES.into_iter().chain(["AUTHORIZATION", "X-Amz-Meta-A"]) {
                request.append_header(name, "mine").unwrap();
                request.append_header(name, "mine too").unwrap();
            }
            strip_signature(&mut request).unwrap();
            assert_eq!(request.uri.to_string(), kept, "{target}");
            let names: Vec<_> = request.headers.keys().map(http::HeaderName::as_str).collect();
            assert_eq!(names, ["x-amz-meta-a"], "{target}");
        }
    }

    #[test]
    fn p11_a_form_does_not_authenticate_the_sandbox() {
        for (form, accepted) in [
            ("Action=SendMessage&MessageBody=Signature", true),
            ("", true),
            ("Action=SendMessage&%41WSAccessKeyId=AKIDMINE", false),
            ("Action=GetCallerIdentity&X-Amz-Credential=AKIDMINE", false),
            ("x-amz-security-token", false),
            ("SIGNATURE=x", false),
        ] {
            assert_eq!(check_form(form.as_bytes()).is_ok(), accepted, "{form}");
        }
    }
}
