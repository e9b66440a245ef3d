//! The canonical form of a request, which is what a signature covers.
//!
//! Servers rebuild this form from what they receive, and differ in whether they decode the path and the query first.
//! So requests leave in a form in which that makes no difference: the query, and towards S3 the path, are encoded as
//! AWS defines it before they are signed and sent.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::SigningFault;

/// Fields that are signed, besides those of AWS.
const SIGNED_FIELDS: [&str; 4] = ["content-md5", "content-type", "host", "range"];
const AWS_FIELDS: &str = "x-amz-";

/// A parameter of a query, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    pub(super) name: Vec<u8>,
    /// `None` without `=`.
    pub(super) value: Option<Vec<u8>>,
}

impl Parameter {
    /// Returns whether it has this name, in any letter case.
    pub(super) fn is_named(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name.as_bytes())
    }
}

/// Parses a query. Nothing between two `&` is no parameter; `+` is a space, as in the forms of HTML.
pub(super) fn parse_query(query: &str) -> Result<Vec<Parameter>, SigningFault> {
    let decode = |text: &str| decode(&text.replace('+', " ")).ok_or(SigningFault::Query);
    let parameter = |part: &str| match part.split_once('=') {
        Some((name, value)) => Ok(Parameter { name: decode(name)?, value: Some(decode(value)?) }),
        None => Ok(Parameter { name: decode(part)?, value: None }),
    };
    query.split('&').filter(|part| !part.is_empty()).map(parameter).collect()
}

/// Returns a query as it is sent: in its order.
pub(super) fn query_text(parameters: &[Parameter]) -> String {
    let parts = parameters.iter().map(|parameter| match &parameter.value {
        Some(value) => format!("{}={}", encode(&parameter.name), encode(value)),
        None => encode(&parameter.name),
    });
    parts.collect::<Vec<_>>().join("&")
}

/// Returns a query as it is signed: sorted, each name with a value.
pub(super) fn canonical_query(parameters: &[Parameter]) -> String {
    let pair = |parameter: &Parameter| {
        (encode(&parameter.name), encode(parameter.value.as_deref().unwrap_or_default()))
    };
    let mut pairs: Vec<(String, String)> = parameters.iter().map(pair).collect();
    pairs.sort_unstable();
    pairs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
}

/// Returns the path of an object in S3 as it is sent and signed: each segment decoded and encoded again, and nothing
/// else, because keys may contain `//` and `..`.
pub(super) fn object_path(path: &str) -> Result<String, SigningFault> {
    let segment = |segment: &str| decode(segment).map(|bytes| encode(&bytes)).ok_or(SigningFault::Path);
    Ok(path.split('/').map(segment).collect::<Result<Vec<_>, _>>()?.join("/"))
}

/// Returns a path towards other services as it is signed: without empty and dot segments, encoded once more.
pub(super) fn service_path(path: &str) -> String {
    let mut segments: Vec<&str> = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            _ => segments.push(segment),
        }
    }
    let mut canonical = String::new();
    for segment in &segments {
        canonical.push('/');
        canonical += &encode(segment.as_bytes());
    }
    if canonical.is_empty() || path.ends_with('/') {
        canonical.push('/');
    }
    canonical
}

/// The fields that are signed: their names, with `;` between, and their lines.
pub(super) fn canonical_fields(fields: &HeaderMap) -> (String, Vec<u8>) {
    let is_signed =
        |name: &HeaderName| SIGNED_FIELDS.contains(&name.as_str()) || name.as_str().starts_with(AWS_FIELDS);
    let mut names: Vec<&str> = fields.keys().filter(|name| is_signed(name)).map(HeaderName::as_str).collect();
    names.sort_unstable();
    let mut lines = Vec::new();
    for name in &names {
        lines.extend_from_slice(name.as_bytes());
        lines.push(b':');
        let values: Vec<Vec<u8>> = fields.get_all(*name).iter().map(trimmed).collect();
        lines.extend_from_slice(&values.join(&b","[..]));
        lines.push(b'\n');
    }
    (names.join(";"), lines)
}

/// Returns a value without space around it, and with one space in place of several.
fn trimmed(value: &HeaderValue) -> Vec<u8> {
    let words = value.as_bytes().split(|byte| matches!(byte, b' ' | b'\t'));
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(&b" "[..])
}

/// Returns the canonical form of a whole request, as its signature covers it.
pub(super) fn canonical_request(
    method: &str,
    path: &str,
    query: &str,
    (names, lines): &(String, Vec<u8>),
    payload: &str,
) -> Vec<u8> {
    let mut canonical = format!("{method}\n{path}\n{query}\n").into_bytes();
    canonical.extend_from_slice(lines);
    canonical.extend_from_slice(format!("\n{names}\n{payload}").as_bytes());
    canonical
}

/// Percent-encodes all but the unreserved characters of RFC 3986.
fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                text.push(char::from(*byte));
            }
            _ => text += &format!("%{byte:02X}"),
        }
    }
    text
}

/// Decodes percent-encoding; `None` if a `%` begins none.
fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => bytes.push(digit(rest.next()?)? << 4 | digit(rest.next()?)?),
            _ => bytes.push(byte),
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_the_form_that_the_service_rebuilds() {
        for (path, object, service) in [
            ("/", Some("/"), "/"),
            ("/a/b", Some("/a/b"), "/a/b"),
            ("/a//b/", Some("/a//b/"), "/a/b/"),
            ("/a/./../b", Some("/a/./../b"), "/b"),
            ("/../..", Some("/../.."), "/"),
            ("/./", Some("/./"), "/"),
            ("/a b", Some("/a%20b"), "/a%20b"),
            ("/a%20b", Some("/a%20b"), "/a%2520b"),
            ("/a+b", Some("/a%2Bb"), "/a%2Bb"),
            ("/a%2bb", Some("/a%2Bb"), "/a%252bb"),
            ("/%7Ea~", Some("/~a~"), "/%257Ea~"),
            ("/a%2Fb", Some("/a%2Fb"), "/a%252Fb"),
            ("/arn:aws:x", Some("/arn%3Aaws%3Ax"), "/arn%3Aaws%3Ax"),
            ("/%C3%BC", Some("/%C3%BC"), "/%25C3%25BC"),
            ("/%zz", None, "/%25zz"),
            ("/a%2", None, "/a%252"),
        ] {
            assert_eq!(object_path(path).ok().as_deref(), object, "{path}");
            assert_eq!(service_path(path), service, "{path}");
        }
    }

    #[test]
    fn queries_are_sorted_and_encoded_once() {
        for (query, sent, signed) in [
            ("", "", ""),
            ("uploads", "uploads", "uploads="),
            ("b=2&a=1&a=0", "b=2&a=1&a=0", "a=0&a=1&b=2"),
            ("&&a=1&", "a=1", "a=1"),
            ("a=b=c", "a=b%3Dc", "a=b%3Dc"),
            ("=x", "=x", "=x"),
            ("p=a+b%2Bc%2bd", "p=a%20b%2Bc%2Bd", "p=a%20b%2Bc%2Bd"),
            ("prefix=a/b~%7e", "prefix=a%2Fb~~", "prefix=a%2Fb~~"),
            ("B=1&a-=2&a=3", "B=1&a-=2&a=3", "B=1&a=3&a-=2"),
        ] {
            let parameters = parse_query(query).unwrap();
            assert_eq!(query_text(&parameters), sent, "{query}");
            assert_eq!(canonical_query(&parameters), signed, "{query}");
        }
        for query in ["%", "a=%1", "%g0=1", "a=%0g"] {
            assert_eq!(parse_query(query), Err(SigningFault::Query), "{query}");
        }
    }

    #[test]
    fn only_fields_that_nobody_on_the_way_changes_are_signed() {
        let mut fields = HeaderMap::new();
        for (name, value) in [
            ("host", "h:8443"),
            ("x-amz-meta-b", "  two   words "),
            ("x-amz-meta-a", "1"),
            ("x-amz-meta-a", "2"),
            ("x-amzn-trace-id", "Root=1"),
            ("user-agent", "u"),
            ("content-length", "3"),
            ("content-type", "text/plain;\t charset=utf-8"),
            ("range", "bytes=0-9"),
            ("expect", "100-continue"),
        ] {
            fields.append(name, HeaderValue::from_static(value));
        }
        let (names, lines) = canonical_fields(&fields);
        assert_eq!(names, "content-type;host;range;x-amz-meta-a;x-amz-meta-b");
        assert_eq!(
            String::from_utf8(lines).unwrap(),
            "content-type:text/plain; charset=utf-8\nhost:h:8443\nrange:bytes=0-9\nx-amz-meta-a:1,2\nx-amz-meta-b:two words\n"
        );
    }
}
