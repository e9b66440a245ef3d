//! Header fields that Sandbar does not forward: request fields with which a sandbox claims an identity or an origin
//! (P13), fields that make some servers see another request than the decided one, hop-by-hop response fields, and
//! response fields with which an origin server speaks as Sandbar.

use http::{HeaderMap, HeaderName};
use pingora_http::{RequestHeader, ResponseHeader};

use crate::report::refusal::is_refusal_field;

/// Fields removed from every request.
const REMOVED_FIELDS: &[&str] =
    &["cf-ipcountry", "cf-visitor", "sandbox-identity", "via", "x-http-method", "x-user", "x-user-id"];

/// Prefixes of further fields removed from every request: what one proxy or platform tells the servers behind it.
const REMOVED_PREFIXES: &[&str] = &[
    "cloudfront-",
    "oidc-claim-",
    "proxy-",
    "sandbar-",
    "wl-proxy-",
    "x-amzn-oidc-",
    "x-appengine-",
    "x-arr-",
    "x-auth-request-",
    "x-azure-",
    "x-envoy-",
    "x-ms-client-principal",
    "x-proxy-",
    "x-sandbox-",
    "x-spiffe-",
];

/// Words, or several in a row, that mark a field for removal wherever they are in its name. New proxies invent new
/// names for the same few things, so a list of names is never complete.
const REMOVED_WORDS: &[&str] = &[
    // the address of the client
    "addr",
    "clientip",
    "ip",
    "ipv4",
    "ipv6",
    "realip",
    "remote",
    "remoteip",
    "socketip",
    // the user or certificate of the client
    "auth-user",
    "authenticated-user",
    "client-cert",
    "client-dn",
    "client-issuer",
    "client-s-dn",
    "client-subject",
    "client-verify",
    "clientcert",
    "webauth-user",
    // another host, path or method than the decided one
    "destinationurl",
    "host",
    "hostname",
    "original",
    "override",
    "request-uri",
    "rewrite",
    "unencoded-url",
    // the scheme, and who ended TLS
    "front-end",
    "https",
    "proto",
    "scheme",
    "ssl",
];

/// Removed wherever it is in a name, also as a part of a word.
const FORWARDED: &str = "forwarded";

/// Prefixes of fields in which clients of object stores keep names of their own choice. No server reads them as claims.
const METADATA_PREFIXES: &[&str] = &["x-amz-meta-", "x-goog-meta-", "x-ms-meta-", "x-object-meta-"];

/// Fields that frame a message. They are never removed, and a second spelling of one never passes.
const FRAMING_FIELDS: &[&str] = &["content-length", "transfer-encoding"];

/// Response fields for the next hop only.
const HOP_BY_HOP: &[&str] = &["keep-alive", "proxy-authenticate", "proxy-connection", "upgrade"];

/// Fields that must not follow a body (RFC 9110, section 6.5.1): they frame, route, authenticate or control the
/// message, or say how to read its content.
const NOT_IN_TRAILERS: &[&str] = &[
    "alt-svc",
    "authorization",
    "cache-control",
    "connection",
    "content-encoding",
    "content-length",
    "content-range",
    "content-type",
    "host",
    "keep-alive",
    "location",
    "proxy-authenticate",
    "proxy-connection",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "www-authenticate",
];

/// Request fields for the next hop only, besides those with the prefix `proxy-`.
const REQUEST_HOP_BY_HOP: &[&str] =
    &["connection", "http2-settings", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"];

/// Removes the request fields that are addressed to us, as Pingora does for the requests that it forwards.
pub(super) fn strip_request_hops(request: &mut RequestHeader) {
    let named: Vec<_> = connection_options(&request.headers).collect();
    for name in named.iter().map(String::as_str).chain(REQUEST_HOP_BY_HOP.iter().copied()) {
        request.remove_header(name);
    }
}

/// The fields that `Connection` lists, in lower case.
fn connection_options(fields: &HeaderMap) -> impl Iterator<Item = String> {
    let listed = fields.get_all("connection").iter();
    let listed = listed.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    listed.map(|name| String::from_utf8_lossy(name.trim_ascii()).to_ascii_lowercase())
}

/// Removes what the sandbox claims about itself.
pub(super) fn strip_request(request: &mut RequestHeader) {
    let removed: Vec<_> = request.headers.keys().filter(|name| is_removed(name.as_str())).cloned().collect();
    for name in removed {
        request.remove_header(&name);
    }
}

/// Removes the response fields that only Sandbar may send.
pub(super) fn strip_forged(response: &mut ResponseHeader) {
    let forged: Vec<HeaderName> =
        response.headers.keys().filter(|name| is_refusal_field(name.as_str())).cloned().collect();
    for name in forged {
        response.remove_header(&name);
    }
}

/// Removes from trailers what does not belong there, and what only Sandbar may send.
pub(super) fn strip_trailers(trailers: &mut HeaderMap) {
    let misplaced = |name: &str| NOT_IN_TRAILERS.binary_search(&name).is_ok() || is_refusal_field(name);
    let removed: Vec<HeaderName> = trailers.keys().filter(|name| misplaced(name.as_str())).cloned().collect();
    for name in removed {
        trailers.remove(name);
    }
}

/// Removes the response fields that are addressed to us, not to the sandbox (RFC 9110, section 7.6.1).
pub(super) fn strip_hop_by_hop(response: &mut ResponseHeader) {
    let named = connection_options(&response.headers);
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
    if original == "host" || METADATA_PREFIXES.iter().any(|prefix| original.starts_with(prefix)) {
        return false;
    }
    (original != name && FRAMING_FIELDS.contains(&name.as_str()))
        || REMOVED_FIELDS.contains(&name.as_str())
        || REMOVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || REMOVED_WORDS.iter().any(|words| has_words(&name, words))
        || name.contains(FORWARDED)
}

/// Whether `name` contains `words`, bounded by hyphens or its ends.
fn has_words(name: &str, words: &str) -> bool {
    name.match_indices(words).any(|(at, _)| {
        let before = name.get(..at).unwrap_or_default();
        let after = name.get(at + words.len()..).unwrap_or_default();
        (before.is_empty() || before.ends_with('-')) && (after.is_empty() || after.starts_with('-'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p13_claims_of_a_sandbox_are_removed() {
        for name in "
            forwarded x-forwarded-for x_forwarded_for x-forwardedfor x-original-forwarded-for x-forwarded-prefix
            x-forwarded-client-cert x-amz-forwarded x-real-ip x_real_ip true-client-ip client-ip x-client-ip
            x-cluster-client-ip cf-connecting-ip cf-connecting-ipv6 cf-pseudo-ipv4 fastly-client-ip fly-client-ip
            akamai-client-ip x-azure-clientip x-azure-socketip x-azure-fdid x-remote-ip x-remote-addr remote-addr
            x-proxyuser-ip x-originating-ip x-source-ip x-user-ip x-client-ip-address wl-proxy-client-ip
            x-appengine-user-ip remote-user x-remote-user x_remote_user x-webauth-user x-auth-user x-user x-user-id
            x-auth-request-email x-goog-authenticated-user-email cf-access-authenticated-user-email
            x-ms-client-principal-name x-amzn-oidc-identity oidc_claim_sub x-spiffe-id
            client-cert client-cert-chain x-client-cert x-client-verify x-ssl-client-cert x-ssl-client-s-dn
            x-ssl-client-verify x-arr-clientcert x-client-dn
            x-host x-original-host x-http-host-override x-host-override x-backend-host disguised-host x-hostname
            x-original-url x-original-uri x-original-path x-rewrite-url x-rewrite-uri x-request-uri x-override-url
            x-http-destinationurl x-waws-unencoded-url x-envoy-original-path
            x-http-method x-http-method-override x-method-override
            front-end-https x-url-scheme x-scheme x-forwarded-proto x-proto x-https fastly-ssl x-arr-ssl cf-visitor
            cloudfront-viewer-address via proxy-authorization proxy-connection x-proxy-user sandbar-record
            sandbox-identity sandbox_identity x-sandbox-id content_length transfer_encoding _host host_
        "
        .split_whitespace()
        {
            assert!(is_removed(name), "{name}");
        }
    }

    #[test]
    fn fields_of_honest_clients_are_kept() {
        for name in "
            host accept accept-encoding accept-language authorization cache-control connection content-encoding
            content-length content-type cookie date dnt etag expect if-match if-none-match idempotency-key
            keep-alive link origin pragma prefer priority range referer te trailer traceparent tracestate
            transfer-encoding upgrade upgrade-insecure-requests user-agent x-csrf-token x-requested-with
            access-control-request-headers access-control-request-method sec-ch-ua-platform sec-fetch-mode
            sec-websocket-extensions sec-websocket-key sec-websocket-protocol sec-websocket-version
            api-key x-api-key x-auth-token x-request-id x-correlation-id x-client-version x-client-name
            x-client-request-id x-http-protocol-version x-trace-id x-b3-traceid b3 baggage
            anthropic-version anthropic-beta anthropic-dangerous-direct-browser-access openai-organization
            openai-project openai-beta helicone-auth x-stainless-lang x-stainless-os x-stainless-arch
            x-stainless-package-version x-stainless-retry-count x-stainless-runtime x-stainless-helper-method
            x-goog-api-client x-goog-api-key x-goog-user-project x-goog-request-params x-goog-upload-protocol
            x-goog-meta-original-name x-server-timeout grpc-timeout grpc-encoding grpc-accept-encoding
            x-github-api-version x-github-media-type x-github-request-id x-gitlab-event private-token job-token
            git-protocol x-hub-signature-256
            x-amz-content-sha256 x-amz-date x-amz-security-token x-amz-target x-amz-user-agent x-amz-acl
            x-amz-copy-source x-amz-server-side-encryption x-amz-meta-original-filename x-amz-meta-client-ip
            x-amzn-trace-id amz-sdk-invocation-id amz-sdk-request x-amz-checksum-crc32
            x-ms-version x-ms-date x-ms-blob-type x-ms-client-request-id x-ms-meta-host ocp-apim-subscription-key
            npm-session npm-command npm-auth-type npm-in-ci x-pypi-cache docker-distribution-api-version
            x-registry-auth depth destination overwrite lock-token mcp-session-id mcp-protocol-version
            last-event-id x-datadog-trace-id dd-api-key x-sentry-auth x-honeycomb-team x-shopify-access-token
            x-vercel-id x-hf-token x-cloud-trace-context cf-access-client-id cf-access-client-secret fastly-key
            x-tenant-id x-zip-code x-skip-cache impersonate-group x-kubernetes-pf-flowschema-uid
        "
        .split_whitespace()
        {
            assert!(!is_removed(name), "{name}");
        }
    }

    #[test]
    fn trailers_neither_frame_nor_route() {
        assert!(NOT_IN_TRAILERS.is_sorted());
        let mut trailers = HeaderMap::new();
        for name in
            ["content-length", "transfer-encoding", "set-cookie", "sandbar-reason", "grpc-status", "x-sum"]
        {
            trailers.append(name, http::HeaderValue::from_static("1"));
        }
        strip_trailers(&mut trailers);
        let mut kept: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
        kept.sort_unstable();
        assert_eq!(kept, ["grpc-status", "x-sum"]);
    }
}
