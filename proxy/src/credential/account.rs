//! Account pinning: finds the header fields, cookies and parameters in which a request may carry a credential of another
//! account than ours. With an account of its own on an allowed service, a sandbox could hand data to whoever owns it.
//!
//! Services invent new names for the same few things, so words in a name count beside the names that are known. What a
//! body or a path carries is not looked at.

use std::borrow::Cow;

/// Known names of header fields without a word that gives them away, with `-` for `_`.
const FIELDS: &[&str] = &[
    "anthropic-organization",
    "anthropic-organization-id",
    "anthropic-workspace",
    "anthropic-workspace-id",
    "auth",
    "cf-access-client-id",
    "cookie",
    "cookie2",
    "dd-application-key",
    "fastly-key",
    "openai-organization",
    "openai-project",
    "x-amz-credential",
    "x-auth-email",
    "x-auth-key",
    "x-functions-key",
    "x-goog-user-project",
    "x-honeycomb-team",
    "x-key",
];

/// Words that mark a header field wherever they are in its name.
const FIELD_WORDS: &[&str] =
    &["api-key", "apikey", "authentication", "authorization", "bearer", "credential", "passwd", "password"];

/// Last words that mark a header field.
const FIELD_ENDS: &[&str] = &[
    "access-key",
    "app-key",
    "application-key",
    "auth",
    "auth-key",
    "jwt",
    "jwt-assertion",
    "secret",
    "secret-key",
    "subscription-key",
    "token",
];

/// Words that make a `…-token` something else: a place in a list, a lock, a defence of forms.
const OTHER_TOKENS: &[&str] = &[
    "cancel",
    "continuation",
    "csrf",
    "cursor",
    "idempotency",
    "lock",
    "next",
    "page",
    "resume",
    "sync",
    "xsrf",
];

/// Names of parameters, in lower case, with `_` for `-`.
const PARAMETERS: &[&str] = &[
    "access_key",
    "access_key_id",
    "access_token",
    "accesskey",
    "accesstoken",
    "api_key",
    "api_token",
    "apikey",
    "apitoken",
    "app_key",
    "application_key",
    "auth",
    "auth_key",
    "auth_token",
    "authkey",
    "authorization",
    "authtoken",
    "awsaccesskeyid",
    "bearer",
    "bearer_token",
    "client_secret",
    "credential",
    "credentials",
    "googleaccessid",
    "id_token",
    "job_token",
    "jwt",
    "key",
    "oauth_consumer_key",
    "oauth_signature",
    "oauth_token",
    "passwd",
    "password",
    "private_token",
    "pwd",
    "refresh_token",
    "sas",
    "secret",
    "secret_key",
    "session_token",
    "sessionid",
    "sig",
    "signature",
    "subscription_key",
    "token",
    "user_token",
    "x_api_key",
];

/// Beginnings of names of parameters: signed URLs.
const PARAMETER_PREFIXES: &[&str] = &["x_amz_", "x_goog_", "x_ms_signature", "ocp_apim_subscription"];

/// Cookies with which a network tells browsers from programs and balances load. They come from answers and name nobody,
/// so that a request with them alone is not refused; they are removed all the same.
const NETWORK_COOKIES: &[&str] = &["__cf_bm", "__cflb", "_cfuvid", "awsalb", "awsalbcors", "gclb"];

/// Words in the name of a WebSocket protocol that carries a credential, as browsers have no other place for one.
const PROTOCOL_WORDS: &[&str] = &[
    "api-key",
    "apikey",
    "auth",
    "bearer",
    "jwt",
    "organization.",
    "password",
    "project.",
    "secret",
    "token",
];

/// Returns whether a header field may carry a credential. `name` is in lower case.
pub(super) fn is_credential_field(name: &str) -> bool {
    let name = &*hyphenate(name); // some servers read `_` as `-`
    let is_other = || name.ends_with("token") && OTHER_TOKENS.iter().any(|word| has_word(name, word));
    FIELDS.binary_search(&name).is_ok()
        || FIELD_WORDS.iter().any(|word| name.contains(word))
        || FIELD_ENDS.iter().any(|end| name.strip_suffix(end).is_some_and(is_word_border)) && !is_other()
}

/// Returns whether a parameter of the query may carry a credential, given its name as written.
pub(super) fn is_credential_parameter(name: &[u8]) -> bool {
    let name = plain_parameter(name);
    PARAMETERS.binary_search(&name.as_str()).is_ok()
        || PARAMETER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns whether a `Cookie` holds more than what a network sets.
pub(super) fn names_somebody(cookies: &[u8]) -> bool {
    let names = cookies.split(|byte| *byte == b';').map(|pair| {
        let name = pair.split(|byte| *byte == b'=').next().unwrap_or_default();
        String::from_utf8_lossy(name.trim_ascii()).to_ascii_lowercase()
    });
    let known = |name: &str| NETWORK_COOKIES.contains(&name);
    names.filter(|name| !name.is_empty()).any(|name| !known(&name))
}

/// Returns whether an entry of `Sec-WebSocket-Protocol` carries a credential.
pub(super) fn is_credential_protocol(entry: &str) -> bool {
    let entry = entry.to_ascii_lowercase();
    PROTOCOL_WORDS.iter().any(|word| entry.contains(word))
}

/// Returns the query without the parameters that `removed` names, or `None` if it has none of them.
///
/// Some servers separate parameters by `;` too: what lies between two `&` goes as a whole.
pub(super) fn without_parameters(query: &str, removed: impl Fn(&[u8]) -> bool) -> Option<String> {
    let name = |part: &str| part.split('=').next().unwrap_or_default().as_bytes().to_vec();
    let kept: Vec<&str> =
        query.split('&').filter(|part| !part.split(';').any(|part| removed(&name(part)))).collect();
    (kept.len() < query.split('&').count()).then(|| kept.join("&"))
}

/// Returns the name of a parameter as most servers read it: percent-decoded, in lower case, without the brackets of a
/// list, with `_` for `-`.
pub(super) fn plain_parameter(name: &[u8]) -> String {
    let mut decoded = Vec::with_capacity(name.len());
    let mut rest = name;
    while let [first, tail @ ..] = rest {
        let hex = |byte: u8| char::from(byte).to_digit(16);
        match (first, tail) {
            (b'%', [high, low, after @ ..]) if hex(*high).is_some() && hex(*low).is_some() => {
                decoded.push((hex(*high).unwrap_or_default() * 16 + hex(*low).unwrap_or_default()) as u8);
                rest = after;
                continue;
            }
            (b'+', _) => decoded.push(b' '),
            (other, _) => decoded.push(*other),
        }
        rest = tail;
    }
    let decoded = String::from_utf8_lossy(&decoded).to_ascii_lowercase().replace('-', "_");
    let plain = |c: char| c.is_control() || c.is_whitespace() || c == '\u{fffd}';
    let name = decoded.split(['[', '\0']).next().unwrap_or_default();
    name.trim_matches(plain).to_owned()
}

/// Returns whether two names of header fields are one to servers that read `_` as `-`.
pub(super) fn is_same_field(one: &str, other: &str) -> bool {
    hyphenate(one) == hyphenate(other)
}

fn hyphenate(name: &str) -> Cow<'_, str> {
    match name.contains('_') {
        true => Cow::Owned(name.replace('_', "-")),
        false => Cow::Borrowed(name),
    }
}

fn is_word_border(before: &str) -> bool {
    before.is_empty() || before.ends_with('-')
}

fn has_word(name: &str, word: &str) -> bool {
    name.split('-').any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_sorted_for_the_search() {
        assert!(FIELDS.is_sorted() && PARAMETERS.is_sorted());
    }

    #[test]
    fn p11_fields_of_another_account_are_known() {
        for name in "
            authorization cookie cookie2 x-api-key api-key apikey x-apikey x_api_key x-goog-api-key private-token job-token
            deploy-token x-auth-token x-access-token x-amz-security-token x-github-token x-gitlab-token x-vault-token
            x-hf-token x-shopify-access-token openai-organization openai-project openai-api-key anthropic-organization-id
            dd-api-key dd-application-key x-honeycomb-team x-subscription-token ocp-apim-subscription-key xi-api-key
            x-authorization x_authorization x-amz-authorization x-ms-authorization-auxiliary x-goog-iam-authorization-token
            cf-access-client-id cf-access-client-secret cf-access-token cf-access-jwt-assertion x-registry-auth
            x-sentry-auth helicone-auth x-auth-key x-auth-email fastly-key x-goog-user-project x-client-secret token auth
            x-rapidapi-key x-session-token x-figma-token x-refresh-token x-password x-user-password x-jwt
        "
        .split_whitespace()
        {
            assert!(is_credential_field(name), "{name}");
        }
    }

    #[test]
    fn fields_of_honest_clients_are_left_alone() {
        for name in "
            accept accept-encoding accept-language anthropic-version anthropic-beta
            anthropic-dangerous-direct-browser-access cache-control content-type content-length date etag expect
            host idempotency-key x-idempotency-key if-match if-none-match last-event-id lock-token mcp-session-id
            mcp-protocol-version origin openai-beta range referer sec-websocket-key sec-websocket-protocol
            sec-fetch-mode traceparent tracestate user-agent x-csrf-token x-xsrf-token csrf-token x-request-id
            x-stainless-lang x-stainless-os x-stainless-arch x-stainless-package-version x-stainless-retry-count
            x-stainless-runtime x-stainless-helper-method x-stainless-timeout x-goog-api-client
            x-goog-request-params x-goog-upload-protocol x-goog-meta-original-name x-github-api-version
            x-amz-content-sha256 x-amz-date x-amz-target x-amz-acl x-amz-server-side-encryption-customer-key
            amz-sdk-invocation-id x-ms-version x-ms-date x-ms-blob-type x-page-token x-next-token x-sync-token
            x-hub-signature-256 git-protocol npm-auth-type npm-session x-datadog-trace-id tokenizer x-max-tokens
            access-control-request-headers grpc-timeout x-client-version x-correlation-id x-requested-with
        "
        .split_whitespace()
        {
            assert!(!is_credential_field(name), "{name}");
        }
    }

    #[test]
    fn p11_parameters_of_another_account_are_known_however_they_are_spelt() {
        for name in [
            "key",
            "KEY",
            "k%65y",
            "%6b%65%79",
            "key[]",
            "key%5B0%5D",
            "key%00",
            "+key",
            "api_key",
            "api-key",
            "Api%2DKey",
            "apikey",
            "access_token",
            "access%5ftoken",
            "token",
            "auth",
            "sig",
            "signature",
            "X-Amz-Signature",
            "X-Amz-Credential",
            "X-Amz-Security-Token",
            "x-goog-credential",
            "AWSAccessKeyId",
            "GoogleAccessId",
            "private_token",
            "job_token",
            "client_secret",
        ] {
            assert!(is_credential_parameter(name.as_bytes()), "{name}");
        }
        for name in [
            "model",
            "q",
            "keys",
            "key_type",
            "page_token",
            "monkey",
            "limit",
            "after",
            "%",
            "%zz",
            "",
            "ke y",
        ] {
            assert!(!is_credential_parameter(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn a_query_loses_what_is_removed_and_nothing_else() {
        for (query, left) in [
            ("a=1&b=2", None),
            ("a=1&key=x&b=2", Some("a=1&b=2")),
            ("key=x", Some("")),
            ("key", Some("")),
            ("a=1;key=x&b=2", Some("b=2")),
            ("a=key&b=2", None),
            ("a=1&K%45Y=x&key=y", Some("a=1")),
            ("&&key=1", Some("&")),
        ] {
            assert_eq!(without_parameters(query, is_credential_parameter).as_deref(), left, "{query}");
        }
    }

    #[test]
    fn cookies_and_protocols_that_name_somebody() {
        for (cookies, somebody) in [
            ("session=1", true),
            ("__cf_bm=1; _cfuvid=2", false),
            ("__cf_bm=1; sid=2", true),
            ("AWSALB=1", false),
            ("", false),
            ("novalue", true),
        ] {
            assert_eq!(names_somebody(cookies.as_bytes()), somebody, "{cookies}");
        }
        for (entry, carries) in [
            ("realtime", false),
            ("openai-beta.realtime-v1", false),
            ("openai-insecure-api-key.sk-1", true),
            ("openai-organization.org-1", true),
            ("base64url.bearer.authorization.k8s.io.abc", true),
            ("graphql-transport-ws", false),
            ("v4.channel.k8s.io", false),
        ] {
            assert_eq!(is_credential_protocol(entry), carries, "{entry}");
        }
    }
}
