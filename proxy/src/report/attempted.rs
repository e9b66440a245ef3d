//! What a refused sandbox asked for, as it wrote it: text for the record of the refusal.
//!
//! It comes from bytes that no parser accepted, so nothing here decides anything. It takes methods, names and paths, in
//! this order, because a long path may be cut. It takes nothing that may be a secret: neither the query nor the user
//! information of a target, no field but `Host`, no body.

use audit::AttemptedText;
use pingora_http::RequestHeader;

/// Longest method that is repeated; the rest of it is left out.
const METHOD_MAX: usize = 64;
/// Stands for the user information in front of a host.
const MASK: &[u8] = b"***";

/// Describes the HTTP/1 request at the start of `bytes`, complete or not; none if they do not look like one.
pub(crate) fn of_head(bytes: &[u8]) -> Option<AttemptedText> {
    let lines = bytes.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let head = lines.skip_while(|line| line.is_empty()).take_while(|line| !line.is_empty());
    let mut lines = head.flat_map(|line| line.split(|byte| *byte == b'\r'));
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t');
    let mut words = lines.next()?.split(is_space).filter(|word| !word.is_empty());
    let (method, target, version) = (words.next()?, words.next()?, words.next());
    let versioned = version.is_some_and(|version| version.starts_with(b"HTTP/"));
    // The rest of a body that is longer than announced stands where a request should: it is not repeated.
    if !versioned && !target.starts_with(b"/") && scheme_length(target) == 0 {
        return None;
    }
    Some(describe_request(method, target, lines.filter_map(host_field)))
}

/// Describes a parsed request.
pub(crate) fn of_request(head: &RequestHeader) -> AttemptedText {
    let origin = match (head.uri.scheme_str(), head.uri.authority()) {
        (Some(scheme), Some(authority)) => format!("{scheme}://{authority}"),
        (None, Some(authority)) => authority.to_string(),
        (_, None) => String::new(),
    };
    let path = Some(head.raw_path()).filter(|path| path.starts_with(b"/")).unwrap_or_default();
    let target = [origin.as_bytes(), path].concat();
    let hosts = head.headers.get_all("host").iter().map(|host| host.as_bytes());
    describe_request(head.method.as_str().as_bytes(), &target, hosts)
}

/// Describes a host or authority, without its user information.
pub(crate) fn of_host(host: &[u8]) -> AttemptedText {
    AttemptedText::from_bytes(&mask_user(without_query(host)))
}

fn describe_request<'a>(
    method: &[u8],
    target: &[u8],
    hosts: impl Iterator<Item = &'a [u8]>,
) -> AttemptedText {
    let target = without_query(target);
    let (scheme, rest) = target.split_at(scheme_length(target));
    let (authority, path) = rest.split_at(rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len()));
    let authority = mask_user(authority);
    let mut names: Vec<Vec<u8>> = Vec::new();
    for host in hosts.map(|host| mask_user(without_query(host))) {
        let repeats = |name: &Vec<u8>| name.eq_ignore_ascii_case(&host);
        if !repeats(&authority) && !names.iter().any(repeats) {
            names.push(host);
        }
    }
    let mut words = vec![method.get(..METHOD_MAX).unwrap_or(method).to_vec(), [scheme, &authority].concat()];
    words.append(&mut names);
    words.push(path.to_vec());
    words.retain(|word| !word.is_empty());
    AttemptedText::from_bytes(&words.join(&b' '))
}

/// Returns the value of a `Host` field, also of a malformed one.
fn host_field(line: &[u8]) -> Option<&[u8]> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let (name, value) = line.split_at_checked(colon)?;
    name.trim_ascii().eq_ignore_ascii_case(b"host").then(|| value.get(1..).unwrap_or_default().trim_ascii())
}

/// Returns the length of `scheme://` at the start of a target, or 0.
fn scheme_length(target: &[u8]) -> usize {
    let is_scheme = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
    let name = target.iter().take_while(|byte| is_scheme(byte)).count();
    if name > 0 && target.get(name..).is_some_and(|rest| rest.starts_with(b"://")) { name + 3 } else { 0 }
}

fn without_query(target: &[u8]) -> &[u8] {
    target.split(|byte| matches!(byte, b'?' | b'#')).next().unwrap_or_default()
}

/// Replaces the user information of an authority.
pub(crate) fn mask_user(authority: &[u8]) -> Vec<u8> {
    match authority.iter().rposition(|byte| *byte == b'@').and_then(|at| authority.get(at..)) {
        Some(host) => [MASK, host].concat(),
        None => authority.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(head: &[u8]) -> Option<String> {
        of_head(head).map(|text| text.to_display())
    }

    #[test]
    fn p18_a_head_is_described_however_it_is_malformed() {
        for (head, expected) in [
            (&b"GET /x HTTP/1.1\r\nHost: a.test\r\n\r\n"[..], Some("GET a.test /x")),
            (b"GET http://a.test/x HTTP/1.1\r\nHost: A.test\r\n\r\n", Some("GET http://a.test /x")),
            (b"GET http://a.test HTTP/1.1\r\nHost: b.test:1\r\n", Some("GET http://a.test b.test:1")),
            (b"\r\nGET /x HTTP/1.1\nhost : b.test\n", Some("GET b.test /x")),
            (b"GET /x HTTP/1.1\r\nX: y\rHost: b.test\r\n\r\n", Some("GET b.test /x")),
            (b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\nhost: A\r\n\r\n", Some("GET a b /x")),
            (b"CONNECT a.test\0.b.test:443 HTTP/1.1\r\n", Some("CONNECT a.test\0.b.test:443")),
            (b"CONNECT a.test:443", None),
            (b"OPTIONS * HTTP/1.1\r\nHost: a.test\r\n", Some("OPTIONS * a.test")),
            (b"GET http:a.test/x HTTP/1.1\r\n", Some("GET http:a.test /x")),
            (b"GET \xff\xfe.test HTTP/1.1\r\n", Some("GET \u{fffd}ff\u{fffd}fe.test")),
            (b"", None),
            (b"GET", None),
            (b"\r\n\r\n", None),
        ] {
            assert_eq!(described(head).as_deref(), expected, "{:?}", String::from_utf8_lossy(head));
        }
    }

    #[test]
    fn p11_no_secret_is_described() {
        for head in [
            "GET /x?key=hunter2 HTTP/1.1\r\nHost: a.test\r\n\r\n",
            "GET /x#hunter2 HTTP/1.1\r\n\r\n",
            "GET http://u:hunter2@a.test/x HTTP/1.1\r\n\r\n",
            "GET http://hunter2@a.test@b.test/x HTTP/1.1\r\n\r\n",
            "GET http://a.test\\hunter2@b.test?hunter2 HTTP/1.1\r\n\r\n",
            "CONNECT hunter2@a.test:443 HTTP/1.1\r\nHost: hunter2@a.test:443\r\n\r\n",
            "GET /x HTTP/1.1\r\nHost: a.test?hunter2\r\n\r\n",
            "GET /x HTTP/1.1\r\nAuthorization: hunter2\r\nCookie: hunter2\r\n\r\n",
            "GET /x HTTP/1.1\r\n\r\nHost: hunter2",
            "GET /x HTTP/1.1\nX: y\n\nHost: hunter2",
            "the password is hunter2",
            "user=me&password=hunter2 and more\r\n",
            "{\"password\": \"hunter2\"}",
        ] {
            let text = described(head.as_bytes()).unwrap_or_default();
            assert!(!text.contains("hunter2"), "{head:?}: {text}");
        }
        assert_eq!(of_host(b"u:hunter2@a.test:443").to_display(), "***@a.test:443");
    }

    #[test]
    fn p17_two_long_names_fit_and_a_long_path_is_cut() {
        let name = |letter: &str| format!("{}.{}", vec![letter.repeat(62); 3].join("."), letter.repeat(62));
        let (one, other) = (name("a"), name("b"));
        let head = format!("GET http://{one}:65535/{} HTTP/1.1\r\nHost: {other}:65535\r\n", "x".repeat(9999));
        let text = described(head.as_bytes()).unwrap();
        assert!(text.starts_with(&format!("GET http://{one}:65535 {other}:65535 /x")), "{text}");
        assert!(text.contains('\u{2026}') && text.len() <= 640, "{text}");
    }
}
