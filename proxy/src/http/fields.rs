//! Header fields that Sandbar does not forward: request fields with which a sandbox claims an identity or an origin
//! (P13), fields that make some servers see another request than the decided one, and hop-by-hop response fields.

use pingora_http::{RequestHeader, ResponseHeader};

/// Fields removed from every request.
const REMOVED_FIELDS: &[&str] = &[
    "cf-connecting-ip",
    "client-ip",
    "fastly-client-ip",
    "forwarded",
    "remote-user",
    "sandbox-identity",
    "true-client-ip",
    "via",
    "x-client-cert",
    "x-client-ip",
    "x-client-verify",
    "x-cluster-client-ip",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-original-host",
    "x-original-url",
    "x-real-ip",
    "x-remote-user",
    "x-rewrite-url",
    "x-ssl-client-cert",
    "x-ssl-client-verify",
    "x-user",
    "x-user-id",
];

/// Prefixes of further fields removed from every request.
const REMOVED_PREFIXES: &[&str] = &[
    "proxy-",
    "sandbar-",
    "x-auth-request-",
    "x-envoy-",
    "x-forwarded-",
    "x-goog-authenticated-user-",
    "x-ms-client-principal",
    "x-original-forwarded-",
    "x-sandbox-",
    "x-spiffe-",
];

/// Fields that frame a message. They are never removed, and a second spelling of one never passes.
const FRAMING_FIELDS: &[&str] = &["content-length", "transfer-encoding"];

/// Response fields for the next hop only.
const HOP_BY_HOP: &[&str] = &["keep-alive", "proxy-authenticate", "proxy-connection", "upgrade"];

/// Removes what the sandbox claims about itself.
pub(super) fn strip_request(request: &mut RequestHeader) {
    let removed: Vec<_> = request.headers.keys().filter(|name| is_removed(name.as_str())).cloned().collect();
    for name in removed {
        request.remove_header(&name);
    }
}

/// Removes the response fields that are addressed to us, not to the sandbox (RFC 9110, section 7.6.1).
pub(super) fn strip_hop_by_hop(response: &mut ResponseHeader) {
    let named = response.headers.get_all("connection");
    let named = named.iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let named = named.map(|name| String::from_utf8_lossy(name.trim_ascii()).to_ascii_lowercase());
    let named: Vec<_> = named.filter(|name| !FRAMING_FIELDS.contains(&name.as_str())).collect();
    let switches = response.status == 101;
    for name in named.iter().map(String::as_str).chain(HOP_BY_HOP.iter().copied()) {
        if !(switches && name == "upgrade") {
            response.remove_header(name);
        }
    }
}

fn is_removed(name: &str) -> bool {
    // Some servers read `_` as `-`: to them `x_user` is on this list, and `content_length` is a second length.
    let original = name;
    let name = name.replace('_', "-");
    (original != name && FRAMING_FIELDS.contains(&name.as_str()))
        || REMOVED_FIELDS.binary_search(&name.as_str()).is_ok()
        || REMOVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p13_identity_claims_of_a_sandbox_are_removed() {
        assert!(REMOVED_FIELDS.is_sorted());
        for (name, removed) in [
            ("x-forwarded-for", true),
            ("x_forwarded_for", true),
            ("forwarded", true),
            ("proxy-authorization", true),
            ("sandbox-identity", true),
            ("sandbox_identity", true),
            ("x-http-method-override", true),
            ("content_length", true),
            ("transfer_encoding", true),
            ("content-length", false),
            ("authorization", false),
            ("user-agent", false),
            ("x-api-key", false),
            ("x-request-id", false),
        ] {
            assert_eq!(is_removed(name), removed, "{name}");
        }
    }
}
