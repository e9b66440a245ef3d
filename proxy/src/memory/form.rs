//! The canonical form of a memory request. Servers interpret anything else differently, so the guard refuses it:
//! upgrades, encodings, other content types, unknown query parameters, paths that are not canonical.

use pingora_http::RequestHeader;
use rules::Reason;
use rules::url_path::CanonicalPath;

use super::profile::{BankSelector, ProfileRoute, RouteMatch};
use crate::report::refusal::Refusal;

/// Fields that ask for another protocol. After an upgrade, some servers parse the body as a request.
const UPGRADE_FIELDS: [&str; 2] = ["http2-settings", "upgrade"];

/// The query of a request: each parameter once, decoded.
#[derive(Debug)]
pub(super) struct QueryParams<'a>(Vec<(&'a str, String)>);

/// Checks the form of a head, and returns its canonical path.
pub(super) fn check_head(head: &RequestHeader) -> Result<CanonicalPath, Refusal> {
    let present = |name: &&str| head.headers.contains_key(*name);
    let upgrade = header_values(head, "connection").any(|value| contains_token(value, b"upgrade"));
    if upgrade || UPGRADE_FIELDS.iter().any(present) {
        return Err(form_refusal("it asks for an upgrade"));
    }
    let plain = |value: &[u8]| value.eq_ignore_ascii_case(b"identity");
    if header_values(head, "content-encoding").any(|value| !plain(value)) {
        return Err(Refusal::from(Reason::BodyMalformed).with_detail("the body is encoded"));
    }
    if header_values(head, "expect").any(|value| !value.eq_ignore_ascii_case(b"100-continue")) {
        return Err(form_refusal("it has an `Expect` other than `100-continue`"));
    }
    let path = head.uri.path();
    let sent = head.uri.path_and_query().map(|target| target.as_str().as_bytes());
    let ambiguous = |why: String| Refusal::from(Reason::AmbiguousPath).with_detail(why);
    let canonical = CanonicalPath::parse(path).map_err(|error| ambiguous(error.to_string()))?;
    if canonical.as_str() != path || sent != Some(head.raw_path()) {
        return Err(ambiguous("it is not in canonical form".to_owned()));
    }
    Ok(canonical)
}

/// Checks that `Content-Type` is JSON, exactly once.
pub(super) fn check_json_type(head: &RequestHeader) -> Result<(), Refusal> {
    let mut kinds = header_values(head, "content-type");
    match (kinds.next(), kinds.next()) {
        (Some(kind), None) if is_plain_json(kind) => Ok(()),
        _ => Err(Refusal::from(Reason::BodyMalformed)
            .with_detail("its `Content-Type` is not exactly `application/json`")),
    }
}

fn is_plain_json(kind: &[u8]) -> bool {
    let mut parts = kind.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
    let json = parts.next().is_some_and(|kind| kind.eq_ignore_ascii_case(b"application/json"));
    match (parts.next(), parts.next()) {
        (None, _) => json,
        (Some(charset), None) => json && charset.eq_ignore_ascii_case(b"charset=utf-8"),
        (Some(_), Some(_)) => false,
    }
}

/// Whether the head announces no body.
pub(super) fn has_no_body(head: &RequestHeader) -> bool {
    let none = header_values(head, "content-length").all(|length| length == b"0");
    none && !head.headers.contains_key("transfer-encoding")
}

impl<'a> QueryParams<'a> {
    /// Parses the query of a request. Takes only parameters that the route knows, each once, with names not encoded.
    pub(super) fn parse(text: Option<&str>, matched: &RouteMatch<'a>) -> Result<Self, Refusal> {
        let mut all: Vec<(&'a str, String)> = Vec::new();
        for pair in text.into_iter().flat_map(|text| text.split('&')) {
            let (name, value) =
                pair.split_once('=').ok_or_else(|| form_refusal("a query parameter has no value"))?;
            let name = known_parameter(matched.route, name)
                .ok_or_else(|| form_refusal("it has a query parameter that the route does not take"))?;
            if all.iter().any(|(known, _)| *known == name) {
                return Err(form_refusal("a query parameter is repeated"));
            }
            all.push((
                name,
                percent_decode(value).ok_or_else(|| form_refusal("a query parameter is malformed"))?,
            ));
        }
        Ok(QueryParams(all))
    }

    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    /// Encodes the query in canonical form.
    pub(super) fn to_query_string(&self) -> String {
        let pairs: Vec<String> =
            self.0.iter().map(|(name, value)| format!("{name}={}", percent_encode(value))).collect();
        if pairs.is_empty() { String::new() } else { format!("?{}", pairs.join("&")) }
    }
}

fn known_parameter<'a>(route: &'a ProfileRoute, name: &str) -> Option<&'a str> {
    let selectors = route.banks.iter().filter_map(|selector| match selector {
        BankSelector::Query(known) => Some(known.as_str()),
        BankSelector::Body(_) | BankSelector::Path(_) => None,
    });
    selectors.chain(route.query.iter().map(String::as_str)).find(|known| *known == name)
}

/// Decodes `%XX` and `+`. Refuses control characters, which could forge terminal output or log lines.
fn percent_decode(value: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let (high, low) = (hex_digit(rest.next()?)?, hex_digit(rest.next()?)?);
                high << 4 | low
            }
            b'+' => b' ',
            b';' => return None, // some servers take it for a separator
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok().filter(|text| !text.chars().any(char::is_control))
}

fn hex_digit(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

fn percent_encode(value: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:@".contains(&byte);
    let each = |byte: u8| {
        if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    value.bytes().map(each).collect()
}

pub(super) fn form_refusal(why: &str) -> Refusal {
    Refusal::from(Reason::MemoryForm).with_detail(why)
}

pub(super) fn header_values<'a>(
    head: &'a RequestHeader,
    name: &'static str,
) -> impl Iterator<Item = &'a [u8]> {
    head.headers.get_all(name).iter().map(|value| value.as_bytes())
}

fn contains_token(value: &[u8], token: &[u8]) -> bool {
    value.split(|byte| *byte == b',').any(|part| part.trim_ascii().eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use rules::ids::ProfileName;

    use super::super::profile::MemoryProfile;
    use super::*;

    #[test]
    fn p12_a_query_has_each_parameter_once_under_its_plain_name() {
        let profile = MemoryProfile::by_name(&ProfileName::parse("astrocyte").unwrap()).unwrap();
        let found = profile.find_route("GET", "/v1/mental-models").unwrap();
        for (query, sent) in [
            ("bank_id=staging:a", Some("?bank_id=staging:a")),
            ("bank_id=staging%3aa&limit=5", Some("?bank_id=staging:a&limit=5")),
            ("bank_id=a+b", Some("?bank_id=a%20b")),
            ("bank_id=a&bank_id=a", None),
            ("bank%5fid=a", None),
            ("bank_id[]=a", None),
            ("bank_id", None),
            ("", None),
            ("bank_id=a;bank_id=b", None),
            ("bank_id=a%0a", None),
            ("bank_id=%ff", None),
            ("bank_id=%", None),
            ("bank_id=%4", None),
            ("bank_id=%+1", None),
            ("bank_id=a&scope=x&tenant=y", None),
            ("bank_id=a&", None),
        ] {
            let read = QueryParams::parse(Some(query), &found).map(|query| query.to_query_string()).ok();
            assert_eq!(read.as_deref(), sent, "{query:?}");
        }
    }

    #[test]
    fn p12_a_body_is_json_in_one_charset() {
        for (kind, good) in [
            ("application/json", true),
            ("Application/JSON; charset=UTF-8", true),
            ("application/json;charset=utf-16", false),
            ("application/json; charset=utf-8; charset=utf-16", false),
            ("application/vnd.api+json", false),
            ("text/plain", false),
            ("application/json, text/plain", false),
            ("", false),
        ] {
            assert_eq!(is_plain_json(kind.as_bytes()), good, "{kind:?}");
        }
    }
}
