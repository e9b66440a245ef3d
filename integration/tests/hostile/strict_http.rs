//! A reader of HTTP/1 requests that forgives nothing: what it accepts, every server reads alike.

/// One request as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StrictRequest {
    pub(crate) method: String,
    pub(crate) target: String,
    /// Names as they were written.
    pub(crate) fields: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

/// What the beginning of some bytes is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StrictParse {
    /// More has to come.
    Partial,
    /// A request and its length.
    Whole(StrictRequest, usize),
    /// Nothing a server should ever be sent.
    Malformed(String),
}

impl StrictRequest {
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let found = self.fields.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }
}

/// Reads one request from the beginning of `bytes`.
pub(crate) fn parse_request(bytes: &[u8]) -> StrictParse {
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
        return StrictParse::Partial;
    };
    match parse_head(&bytes[..end]) {
        Ok(mut request) => match parse_body(&request, &bytes[end + 4..]) {
            Ok(Some((body, length))) => {
                request.body = body;
                StrictParse::Whole(request, end + 4 + length)
            }
            Ok(None) => StrictParse::Partial,
            Err(fault) => StrictParse::Malformed(fault),
        },
        Err(fault) => StrictParse::Malformed(fault),
    }
}

fn parse_head(bytes: &[u8]) -> Result<StrictRequest, String> {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let mut lines = text.split("\r\n");
    let first = lines.next().unwrap_or_default();
    if text.replace("\r\n", "").contains(['\r', '\n', '\0']) {
        return Err(format!("a bare line end or NUL in {text:?}"));
    }
    let [method, target, "HTTP/1.1"] = first.split(' ').collect::<Vec<_>>()[..] else {
        return Err(format!("request line {first:?}"));
    };
    if !method.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-') || method.is_empty() {
        return Err(format!("method {method:?}"));
    }
    if target.is_empty() || target.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
        return Err(format!("target {target:?}"));
    }
    let fields = lines.map(parse_field).collect::<Result<Vec<_>, _>>()?;
    let count = |name: &str| fields.iter().filter(|(known, _)| known.eq_ignore_ascii_case(name)).count();
    let (lengths, codings) = (count("content-length"), count("transfer-encoding"));
    if count("host") != 1 || lengths > 1 || codings > 1 || lengths + codings > 1 {
        return Err(format!("hosts, lengths or codings of {text:?}"));
    }
    Ok(StrictRequest { method: method.into(), target: target.into(), fields, body: Vec::new() })
}

fn parse_field(line: &str) -> Result<(String, String), String> {
    let fault = || format!("field {line:?}");
    let (name, value) = line.split_once(':').ok_or_else(fault)?;
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if name.is_empty() || !name.bytes().all(token) {
        return Err(fault());
    }
    if value.bytes().any(|byte| (byte < b' ' && byte != b'\t') || byte == 0x7f) {
        return Err(fault());
    }
    Ok((name.to_owned(), value.trim_matches([' ', '\t']).to_owned()))
}

/// The body and its length on the wire; none while some of it is missing.
fn parse_body(request: &StrictRequest, rest: &[u8]) -> Result<Option<(Vec<u8>, usize)>, String> {
    if let Some(coding) = request.field("transfer-encoding") {
        return if coding == "chunked" { parse_chunks(rest) } else { Err(format!("coding {coding:?}")) };
    }
    let Some(length) = request.field("content-length") else { return Ok(Some((Vec::new(), 0))) };
    if length.is_empty() || !length.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("length {length:?}"));
    }
    let length = length.parse().map_err(|_| format!("length {length:?}"))?;
    Ok(rest.get(..length).map(|body| (body.to_vec(), length)))
}

fn parse_chunks(bytes: &[u8]) -> Result<Option<(Vec<u8>, usize)>, String> {
    let (mut body, mut at) = (Vec::new(), 0);
    loop {
        let rest = &bytes[at..];
        let Some(end) = rest.windows(2).position(|window| window == b"\r\n") else {
            return if rest.len() > 18 { Err("a chunk without a size".into()) } else { Ok(None) };
        };
        let size = str::from_utf8(&rest[..end]).unwrap_or("?");
        if size.is_empty() || size.len() > 16 || !size.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(format!("chunk size {size:?}"));
        }
        let size = usize::from_str_radix(size, 16).map_err(|_| format!("chunk size {size:?}"))?;
        let Some(data) = rest.get(end + 2..).and_then(|rest| rest.get(..size.saturating_add(2))) else {
            return Ok(None);
        };
        if !data.ends_with(b"\r\n") {
            return Err("a chunk that is longer than it says, or trailers".into());
        }
        body.extend_from_slice(&data[..size]);
        at += end + 2 + size + 2;
        if size == 0 {
            return Ok(Some((body, at)));
        }
    }
}

#[test]
fn the_reader_forgives_nothing() {
    for (text, good) in [
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", true),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", true),
        ("GET / HTTP/1.1\r\n\r\n", false),
        ("GET / HTTP/1.0\r\nHost: a\r\n\r\n", false),
        ("GET / HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n", false),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: a\nb\r\n\r\n", false),
        ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\nx", false),
        ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx", false),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;x\r\nx\r\n0\r\n\r\n", false),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nxyz0\r\n\r\n", false),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n\r\n", false),
    ] {
        assert_eq!(matches!(parse_request(text.as_bytes()), StrictParse::Whole(..)), good, "{text:?}");
    }
}
