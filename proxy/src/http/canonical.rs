//! The canonical form of a request's header fields. The order of fields, the letter case of their names and whether a
//! list is one field or several carry no meaning for a server, and could carry a message to one: they leave in one form.

use http::{HeaderName, HeaderValue};
use pingora_http::RequestHeader;

/// Fields that pass whatever a rule lists: HTTP itself needs them, or Sandbar sets them.
const ALWAYS_LISTED: [&str; 8] = [
    "accept",
    "accept-encoding",
    "content-encoding",
    "content-length",
    "content-type",
    "host",
    "te",
    "transfer-encoding",
];

/// Removes the fields that a rule with `headers` does not list.
pub(super) fn strip_unlisted(request: &mut RequestHeader, listed: &[String]) {
    let passes =
        |name: &str| ALWAYS_LISTED.binary_search(&name).is_ok() || listed.iter().any(|listed| listed == name);
    let removed: Vec<HeaderName> =
        request.headers.keys().filter(|name| !passes(name.as_str())).cloned().collect();
    for name in removed {
        request.remove_header(&name);
    }
}

/// Sorts the fields by name, `Host` first, joins those of one name, and writes names in one letter case.
pub(super) fn normalize_fields(request: &mut RequestHeader) -> pingora_core::prelude::Result<()> {
    let names: Vec<HeaderName> = request.headers.keys().cloned().collect();
    let mut fields: Vec<(HeaderName, HeaderValue)> = Vec::with_capacity(names.len());
    for name in names {
        let values: Vec<HeaderValue> = request.headers.get_all(&name).iter().cloned().collect();
        request.remove_header(&name);
        if let Some(value) = join_values(&name, values) {
            fields.push((name, value));
        }
    }
    for (name, value) in &mut fields {
        if *name == http::header::CONTENT_LENGTH
            && let Some(length) = value.to_str().ok().and_then(|length| length.parse::<u64>().ok())
        {
            *value = HeaderValue::from(length); // without zeros in front
        }
    }
    fields.sort_by(|(one, _), (other, _)| {
        let rank = |name: &HeaderName| (*name != http::header::HOST, name.as_str().to_owned());
        rank(one).cmp(&rank(other))
    });
    for (name, value) in fields {
        request.append_header(title_case(name.as_str()), value)?;
    }
    Ok(())
}

/// Writes a name as most servers expect it in HTTP/1: `X-Api-Key`.
fn title_case(name: &str) -> String {
    let mut first = true;
    let cased = name.chars().map(|letter| {
        let cased = if first { letter.to_ascii_uppercase() } else { letter };
        first = letter == '-';
        cased
    });
    cased.collect()
}

/// Joins the values of one name as RFC 9110, section 5.3, lets a proxy do; cookies as RFC 9113, section 8.2.3, does.
/// Without a space after the comma, which signatures over header fields (AWS) expect.
fn join_values(name: &HeaderName, values: Vec<HeaderValue>) -> Option<HeaderValue> {
    if values.len() <= 1 {
        return values.into_iter().next();
    }
    let separator: &[u8] = if *name == http::header::COOKIE { b"; " } else { b"," };
    let sensitive = values.iter().any(HeaderValue::is_sensitive);
    let joined = values.iter().map(HeaderValue::as_bytes).collect::<Vec<_>>().join(separator);
    let mut joined = HeaderValue::from_bytes(&joined).ok()?; // valid parts make a valid whole
    joined.set_sensitive(sensitive);
    Some(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fields: &[(&'static str, &str)]) -> RequestHeader {
        let mut request = RequestHeader::build("GET", b"/", None).unwrap();
        for (name, value) in fields {
            request.append_header(*name, *value).unwrap();
        }
        request
    }

    fn wire(request: &RequestHeader) -> String {
        let mut bytes = Vec::new();
        request.header_to_h1_wire(&mut bytes);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn p19_order_case_and_repetition_do_not_leave() {
        let forms = [
            vec![("X-B", "1"), ("x-a", "2"), ("x-a", "3"), ("Host", "h"), ("Cookie", "c=1; d=2")],
            vec![("host", "h"), ("x-A", "2,3"), ("X-b", "1"), ("cookie", "c=1"), ("COOKIE", "d=2")],
            vec![("cookie", "c=1; d=2"), ("X-A", "2"), ("x-B", "1"), ("HOST", "h"), ("X-a", "3")],
        ];
        let mut sent: Vec<String> = forms
            .iter()
            .map(|form| {
                let mut request = request(form);
                normalize_fields(&mut request).unwrap();
                wire(&request)
            })
            .collect();
        assert!(sent[0].to_ascii_lowercase().starts_with("host: h\r\n"), "{}", sent[0]);
        sent.dedup();
        assert_eq!(sent.len(), 1, "{sent:?}");
    }

    #[test]
    fn only_listed_fields_pass() {
        assert!(ALWAYS_LISTED.is_sorted());
        let mut request = request(&[
            ("Host", "h"),
            ("Accept", "*/*"),
            ("X-Known", "1"),
            ("X-Other", "2"),
            ("Cookie", "c=1"),
        ]);
        strip_unlisted(&mut request, &["x-known".to_owned()]);
        let mut names: Vec<&str> = request.headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["accept", "host", "x-known"]);
    }
}
