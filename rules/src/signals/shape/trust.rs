//! Which parts of honest requests are long, random or different each time.
//!
//! These lists keep honest clients from raising alarms, and a sandbox may use the names in them as well as others. What
//! it says there stays below the limits that [`super::ShapeThresholds`] has for them, and within the budget of bits.

use std::sync::LazyLock;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::super::bits::ComponentPlace;

/// What is expected in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlaceKind {
    /// The method or a field that is not listed here: neither long nor different each time.
    Field,
    /// A field with one of a few values that are text, and the name of a field.
    UsualField,
    UserAgent,
    /// A path or query value.
    Url,
    /// A value that an earlier answer gave, or the part of it that is wanted.
    Answered,
    /// A credential: long and random, and seldom another.
    Credential,
    /// An identifier or time of one request: random and different each time, and short.
    Identifier,
    /// The signature of one request, with the names of what it signs.
    Signature,
    /// A checksum of the body.
    Digest,
    /// A cookie: the host says what it is, and scripts of its pages make some.
    Cookie,
}

const ANSWERED_FIELDS: &[&str] = &[
    "content-range",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "last-event-id",
    "pacote-integrity",
    "range",
    "referer",
    "upload-offset",
];

const DIGEST_FIELDS: &[&str] = &[
    "content-digest",
    "content-md5",
    "digest",
    "repr-digest",
    "x-amz-checksum-crc32",
    "x-amz-checksum-crc32c",
    "x-amz-checksum-crc64nvme",
    "x-amz-checksum-sha1",
    "x-amz-checksum-sha256",
    "x-amz-content-sha256",
];

/// Identifiers of one request, and its time.
const IDENTIFIER_FIELDS: &[&str] = &[
    "baggage",
    "content-length",
    "date",
    "dpop",
    "grpc-timeout",
    "grpc-trace-bin",
    "idempotency-key",
    "newrelic",
    "sec-websocket-key",
    "sentry-trace",
    "traceparent",
    "tracestate",
    "uber-trace-id",
    "x-amz-copy-source",
    "x-amz-date",
    "x-amz-decoded-content-length",
    "x-b3-spanid",
    "x-b3-traceid",
    "x-cloud-trace-context",
    "x-ms-date",
];
/// Ends of the names of such fields.
const IDENTIFIER_ENDS: &[&str] = &["-id", "-nonce", "-signature", "-timestamp"];

/// Credentials.
const CREDENTIAL_FIELDS: &[&str] = &[
    "api-key",
    "apikey",
    "authorization",
    "private-token",
    "proxy-authorization",
    "x-amz-security-token",
    "x-api-key",
    "x-auth-token",
    "x-csrf-token",
    "x-goog-api-key",
    "x-xsrf-token",
];

/// Schemes of `authorization` that sign each request.
const SIGNING_SCHEMES: &[&[u8]] =
    &[b"AWS4-", b"Digest ", b"GOOG4-", b"Hawk ", b"OAuth ", b"SharedKey ", b"Signature "];

/// Fields whose values are text, usually one of a few.
const USUAL_FIELDS: &[&str] = &[
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "access-control-request-headers",
    "access-control-request-method",
    "cache-control",
    "connection",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "dnt",
    "expect",
    "forwarded",
    "from",
    "git-protocol",
    "grpc-accept-encoding",
    "grpc-encoding",
    "keep-alive",
    "origin",
    "pragma",
    "prefer",
    "priority",
    "purpose",
    "save-data",
    "te",
    "trailer",
    "upgrade",
    "upgrade-insecure-requests",
    "via",
    "x-requested-with",
];

/// Query parameters that hold a credential, or stand for a session. Compared in lower case.
const CREDENTIAL_PARAMETERS: &[&[u8]] = &[
    b"access_token",
    b"auth",
    b"client_secret",
    b"code",
    b"code_challenge",
    b"id_token",
    b"jwt",
    b"key",
    b"relaystate",
    b"samlrequest",
    b"samlresponse",
    b"state",
    b"token",
    b"uploadid",
    b"x-amz-security-token",
];

/// Longest name in the lists of parameters.
const LONGEST_PARAMETER: usize = 24;

/// The listed fields. The names are ours, so the hash needs no secret.
static FIELD_KINDS: LazyLock<HashMap<&str, PlaceKind, FixedState>> = LazyLock::new(|| {
    let of = |names: &'static [&str], kind| names.iter().map(move |name| (*name, kind));
    of(ANSWERED_FIELDS, PlaceKind::Answered)
        .chain(of(DIGEST_FIELDS, PlaceKind::Digest))
        .chain(of(IDENTIFIER_FIELDS, PlaceKind::Identifier))
        .chain(of(CREDENTIAL_FIELDS, PlaceKind::Credential))
        .chain(of(USUAL_FIELDS, PlaceKind::UsualField))
        .chain([("user-agent", PlaceKind::UserAgent)])
        .collect()
});

impl PlaceKind {
    /// Returns what is expected of `value` in `place`.
    pub(super) fn of(place: ComponentPlace<'_>, value: &[u8]) -> Self {
        match place {
            ComponentPlace::Method | ComponentPlace::Sending => PlaceKind::Field,
            ComponentPlace::FieldName => PlaceKind::UsualField,
            ComponentPlace::Path | ComponentPlace::Segment(_) | ComponentPlace::Query => PlaceKind::Url,
            ComponentPlace::Cookies | ComponentPlace::Cookie(_) => PlaceKind::Cookie,
            ComponentPlace::QueryValue(name) => PlaceKind::of_parameter(name),
            ComponentPlace::Field(name) => PlaceKind::of_field(name, value),
        }
    }

    /// Tells whether another value in this place is a choice of the sandbox, not of a library.
    pub(super) fn is_chosen(self) -> bool {
        match self {
            PlaceKind::Field
            | PlaceKind::UsualField
            | PlaceKind::UserAgent
            | PlaceKind::Url
            | PlaceKind::Cookie => true,
            PlaceKind::Answered
            | PlaceKind::Credential
            | PlaceKind::Digest
            | PlaceKind::Identifier
            | PlaceKind::Signature => false,
        }
    }

    fn of_field(name: &str, value: &[u8]) -> Self {
        let signed = || SIGNING_SCHEMES.iter().any(|scheme| value.starts_with(scheme));
        match FIELD_KINDS.get(name) {
            Some(PlaceKind::Credential) if signed() => PlaceKind::Signature,
            // Its boundary is drawn for each request.
            Some(PlaceKind::UsualField) if value.starts_with(b"multipart/") => PlaceKind::Identifier,
            Some(kind) => *kind,
            None if IDENTIFIER_ENDS.iter().any(|end| name.ends_with(end)) => PlaceKind::Identifier,
            None if name.starts_with("sec-") => PlaceKind::UsualField,
            None => PlaceKind::Field,
        }
    }

    fn of_parameter(name: &[u8]) -> Self {
        let mut lower = [0; LONGEST_PARAMETER];
        let Some(lower) = lower.get_mut(..name.len()) else { return PlaceKind::Url };
        lower.copy_from_slice(name);
        lower.make_ascii_lowercase();
        let lower: &[u8] = lower;
        if CREDENTIAL_PARAMETERS.binary_search(&lower).is_ok() {
            PlaceKind::Credential
        } else {
            PlaceKind::Url
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sorted() {
        let lists = [ANSWERED_FIELDS, DIGEST_FIELDS, IDENTIFIER_FIELDS, CREDENTIAL_FIELDS, USUAL_FIELDS];
        assert!(lists.iter().all(|list| list.is_sorted()) && CREDENTIAL_PARAMETERS.is_sorted());
        let listed: usize = lists.iter().map(|list| list.len()).sum();
        assert_eq!(FIELD_KINDS.len(), listed + 1, "a field is listed twice");
        assert!(CREDENTIAL_PARAMETERS.iter().map(|name| name.len()).max() <= Some(LONGEST_PARAMETER));
    }

    #[test]
    fn places_have_their_kinds() {
        let field = |name, value: &'static str| PlaceKind::of(ComponentPlace::Field(name), value.as_bytes());
        for (name, value, kind) in [
            ("authorization", "Bearer x", PlaceKind::Credential),
            ("authorization", "AWS4-HMAC-SHA256 Credential=x", PlaceKind::Signature),
            ("content-type", "multipart/form-data; boundary=x", PlaceKind::Identifier),
            ("content-type", "text/plain", PlaceKind::UsualField),
            ("x-request-id", "", PlaceKind::Identifier),
            ("x-hub-signature", "", PlaceKind::Identifier),
            ("sec-fetch-mode", "cors", PlaceKind::UsualField),
            ("user-agent", "curl/8", PlaceKind::UserAgent),
            ("if-none-match", "x", PlaceKind::Answered),
            ("x-data", "", PlaceKind::Field),
        ] {
            assert_eq!(field(name, value), kind, "{name}: {value}");
        }
        let parameter = |name: &'static str| PlaceKind::of(ComponentPlace::QueryValue(name.as_bytes()), b"");
        assert_eq!(parameter("X-Amz-Signature"), PlaceKind::Url);
        assert_eq!(parameter("State"), PlaceKind::Credential);
        assert_eq!(parameter("page"), PlaceKind::Url);
        assert_eq!(parameter("a-name-that-is-longer-than-any-in-the-list"), PlaceKind::Url);
    }
}
