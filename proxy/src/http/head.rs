//! Parses the head of an HTTP/1 request before Pingora does, and refuses whatever two servers could read differently:
//! bare CR or LF, repeated or conflicting lengths, folded lines, two hosts.

use std::borrow::Cow;

use bytes::BytesMut;
use http::uri::PathAndQuery;
use rules::facts::RequestAuthority;
use rules::limits::TrafficLimits;
use rules::{Host, Reason};

/// Fields that `httparse` has room for; more than the largest allowed `head_fields`.
const MAX_FIELDS: usize = 256;
/// Digits of the largest `Content-Length`: it fits in 63 bits, so it does not overflow in any server.
const MAX_LENGTH_DIGITS: usize = 18;
/// Fields that `Connection` must not remove: they determine the sender, the destination and the end of a request.
const PROTECTED_FIELDS: [&str; 4] = ["content-length", "host", "sandbox-identity", "transfer-encoding"];

/// Why a head was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadFault {
    #[error("the head contains a bare CR")]
    BareCarriageReturn,
    #[error("the head contains a bare LF")]
    BareLineFeed,
    #[error("`Connection` lists a protected field")]
    Connection,
    #[error("the request starts with more than one empty line")]
    EmptyLine,
    #[error("the request does not have exactly one `Host`")]
    Host,
    #[error("`Content-Length` is repeated, not a number, or combined with `Transfer-Encoding`")]
    Length,
    #[error("the host is malformed")]
    Name,
    #[error("`Host` and the request target name different hosts")]
    Names,
    #[error("the head is not valid HTTP/1.0 or HTTP/1.1")]
    Syntax,
    #[error("the request target is neither a path nor an `http://` URL")]
    Target,
    #[error("the head is longer than `head_bytes`")]
    TooLarge,
    #[error("the head has more fields than `head_fields`")]
    TooMany,
    #[error("`Transfer-Encoding` is not exactly `chunked`, or the version is HTTP/1.0")]
    TransferCoding,
}

impl HeadFault {
    pub fn reason(self) -> Reason {
        match self {
            HeadFault::Name => Reason::BadName,
            HeadFault::Names => Reason::NamesDisagree,
            HeadFault::TooLarge | HeadFault::TooMany => Reason::HeadTooLarge,
            HeadFault::BareCarriageReturn
            | HeadFault::BareLineFeed
            | HeadFault::Connection
            | HeadFault::EmptyLine
            | HeadFault::Host
            | HeadFault::Length
            | HeadFault::Syntax
            | HeadFault::Target
            | HeadFault::TransferCoding => Reason::BadRequest,
        }
    }
}

/// The parts of a head that matter before Pingora parses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHead {
    pub method: String,
    /// As the client sent it.
    pub target: String,
    /// The destination it names, in the target or in `Host`.
    pub authority: Option<RequestAuthority>,
    pub accept: Option<Vec<u8>>,
    pub body: BodyFraming,
    form: TargetForm,
}

/// How the end of a body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFraming {
    Chunked,
    /// By `Content-Length`; 0 if there is none.
    Measured(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetForm {
    Absolute,
    Authority,
    Origin,
}

/// Returns what follows the one empty line that may precede a request (RFC 9112, section 2.2), or `bytes` if they do
/// not begin with it. Old clients send one after a body.
pub fn skip_empty_line(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\r\n").unwrap_or(bytes)
}

/// Returns the length of the head at the start of `bytes`, or none if it is incomplete.
///
/// # Errors
///
/// Returns a fault as soon as one is certain, even if the head is incomplete.
pub fn find_end(bytes: &[u8], limits: &TrafficLimits) -> Result<Option<usize>, HeadFault> {
    let limit = usize::try_from(limits.head_bytes).unwrap_or(usize::MAX);
    let mut line_start = 0;
    let mut previous = 0;
    for (at, byte) in bytes.iter().enumerate() {
        match (previous, *byte) {
            (b'\r', b'\n') if at == line_start + 1 && line_start == 0 => {
                return Err(HeadFault::EmptyLine);
            }
            (b'\r', b'\n') if at == line_start + 1 => return check_length(at + 1, limit).map(Some),
            (b'\r', b'\n') => line_start = at + 1,
            (_, b'\n') => return Err(HeadFault::BareLineFeed),
            (b'\r', _) => return Err(HeadFault::BareCarriageReturn),
            _ => {}
        }
        previous = *byte;
    }
    check_length(bytes.len(), limit).map(|_| None)
}

fn check_length(length: usize, limit: usize) -> Result<usize, HeadFault> {
    if length > limit { Err(HeadFault::TooLarge) } else { Ok(length) }
}

/// Parses a complete head.
///
/// # Errors
///
/// Returns what makes it malformed or ambiguous.
pub fn parse(bytes: &[u8], limits: &TrafficLimits) -> Result<RequestHead, HeadFault> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => return Err(HeadFault::TooMany),
        Ok(httparse::Status::Partial) | Err(_) => return Err(HeadFault::Syntax),
    }
    if request.headers.len() as u64 > limits.head_fields {
        return Err(HeadFault::TooMany);
    }
    let (Some(method), Some(target), Some(version)) = (request.method, request.path, request.version) else {
        return Err(HeadFault::Syntax);
    };
    let fields = HeaderFields { all: request.headers, version };
    let body = fields.body_framing()?;
    fields.check_connection()?;
    let form = target_form(method, target)?;
    // Pingora would answer a target that it cannot parse with a bare 400, without a reason and a record.
    if form != TargetForm::Authority && origin_target(form, target).parse::<PathAndQuery>().is_err() {
        return Err(HeadFault::Target);
    }
    let authority = fields.find_authority(form, target)?;
    let accept = fields.values("accept").next().map(<[u8]>::to_vec);
    let (method, target) = (method.to_owned(), target.to_owned());
    Ok(RequestHead { method, target, authority, accept, body, form })
}

fn target_form(method: &str, target: &str) -> Result<TargetForm, HeadFault> {
    let absolute = target.get(..7).is_some_and(|start| start.eq_ignore_ascii_case("http://"));
    match method {
        _ if target.contains('#') => Err(HeadFault::Target),
        "CONNECT" => Ok(TargetForm::Authority),
        "OPTIONS" if target == "*" => Ok(TargetForm::Origin),
        _ if absolute => Ok(TargetForm::Absolute),
        _ if target.starts_with('/') => Ok(TargetForm::Origin),
        _ => Err(HeadFault::Target),
    }
}

struct HeaderFields<'a, 'b> {
    all: &'b [httparse::Header<'a>],
    version: u8,
}

impl<'a> HeaderFields<'a, '_> {
    fn values<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'a [u8]> + 's {
        let named = move |field: &&httparse::Header<'a>| field.name.eq_ignore_ascii_case(name);
        self.all.iter().filter(named).map(|field| field.value)
    }

    /// Finds the body's framing by RFC 9112, section 6.3, without the cases that it tolerates.
    fn body_framing(&self) -> Result<BodyFraming, HeadFault> {
        let mut lengths = self.values("content-length");
        let mut codings = self.values("transfer-encoding");
        match (lengths.next(), codings.next()) {
            (None, None) => Ok(BodyFraming::Measured(0)),
            (Some(_), Some(_)) => Err(HeadFault::Length),
            (Some(length), None) => {
                let number =
                    (1..=MAX_LENGTH_DIGITS).contains(&length.len()) && length.iter().all(u8::is_ascii_digit);
                if !number || lengths.next().is_some() {
                    return Err(HeadFault::Length);
                }
                let length = str::from_utf8(length).ok().and_then(|length| length.parse().ok());
                length.map(BodyFraming::Measured).ok_or(HeadFault::Length)
            }
            (None, Some(coding)) => {
                let chunked = coding.eq_ignore_ascii_case(b"chunked") && self.version == 1;
                let alone = codings.next().is_none();
                if chunked && alone { Ok(BodyFraming::Chunked) } else { Err(HeadFault::TransferCoding) }
            }
        }
    }

    /// Refuses a `Connection` that lists fields which determine the destination: the next hop would remove them.
    fn check_connection(&self) -> Result<(), HeadFault> {
        let names = self.values("connection").flat_map(|value| value.split(|byte| *byte == b','));
        let mut names = names.map(<[u8]>::trim_ascii);
        let protected =
            |name: &[u8]| PROTECTED_FIELDS.iter().any(|field| name.eq_ignore_ascii_case(field.as_bytes()));
        if names.any(protected) { Err(HeadFault::Connection) } else { Ok(()) }
    }

    fn find_authority(&self, form: TargetForm, target: &str) -> Result<Option<RequestAuthority>, HeadFault> {
        let mut hosts = self.values("host");
        let host = hosts.next();
        let missing = host.is_none() && self.version == 1 && form != TargetForm::Authority;
        if hosts.next().is_some() || missing {
            return Err(HeadFault::Host);
        }
        let host = host.map(parse_authority).transpose()?;
        let target = match form {
            TargetForm::Absolute => Some(parse_authority(absolute_authority(target).as_bytes())?),
            TargetForm::Authority => Some(parse_authority(target.as_bytes())?),
            TargetForm::Origin => None,
        };
        match (target, host) {
            (Some(target), Some(host)) if !same_authority(&target, &host) => Err(HeadFault::Names),
            (Some(target), _) => Ok(Some(target)),
            (None, host) => Ok(host),
        }
    }
}

fn parse_authority(bytes: &[u8]) -> Result<RequestAuthority, HeadFault> {
    let text = std::str::from_utf8(bytes).map_err(|_| HeadFault::Name)?;
    RequestAuthority::parse(text).map_err(|_| HeadFault::Name)
}

/// Whether two authorities have the same host, and the same port unless one omits it.
fn same_authority(one: &RequestAuthority, other: &RequestAuthority) -> bool {
    let ports = one.port.zip(other.port).is_none_or(|(one, other)| one == other);
    one.host == other.host && ports
}

fn absolute_authority(target: &str) -> &str {
    let rest = target.get("http://".len()..).unwrap_or_default();
    rest.split(['/', '?']).next().unwrap_or_default()
}

/// The target in origin form.
fn origin_target(form: TargetForm, target: &str) -> Cow<'_, str> {
    if form != TargetForm::Absolute {
        return target.into();
    }
    let path = target.get("http://".len() + absolute_authority(target).len()..).unwrap_or_default();
    if path.starts_with('/') { path.into() } else { format!("/{path}").into() }
}

impl RequestHead {
    pub fn host(&self) -> Option<&Host> {
        self.authority.as_ref().map(|authority| &authority.host)
    }

    /// Whether the target is in absolute form, as requests to a forward proxy have it.
    pub fn is_absolute(&self) -> bool {
        self.form == TargetForm::Absolute
    }

    pub fn is_connect(&self) -> bool {
        self.form == TargetForm::Authority
    }

    /// Rewrites a head from absolute to origin form, with the target's host in `Host` (RFC 9112, section 3.2.2), so
    /// that it names one host only.
    pub fn to_origin_form(&self, bytes: &mut BytesMut, length: usize) {
        let host = absolute_authority(&self.target);
        let path = origin_target(self.form, &self.target);
        let rest = bytes.split_off(length);
        let mut lines = bytes.as_ref().split(|byte: &u8| *byte == b'\n');
        let first = lines.next().unwrap_or_default();
        let version = first.rsplit(|byte| *byte == b' ').next().unwrap_or_default();
        let mut rewritten = BytesMut::with_capacity(bytes.len() + rest.len());
        rewritten.extend_from_slice(format!("{} {path} ", self.method).as_bytes());
        rewritten.extend_from_slice(version);
        rewritten.extend_from_slice(format!("\nHost: {host}\r\n").as_bytes());
        for line in lines.filter(|line| !line.is_empty() && !is_host_line(line)) {
            rewritten.extend_from_slice(line);
            rewritten.extend_from_slice(b"\n");
        }
        rewritten.extend_from_slice(&rest);
        *bytes = rewritten;
    }
}

fn is_host_line(line: &[u8]) -> bool {
    line.get(..5).is_some_and(|start| start.eq_ignore_ascii_case(b"host:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<RequestHead, HeadFault> {
        let limits = TrafficLimits::default();
        let length = find_end(text.as_bytes(), &limits)?.ok_or(HeadFault::Syntax)?;
        parse(&text.as_bytes()[..length], &limits)
    }

    #[test]
    fn ambiguous_heads_are_refused() {
        let fine = "GET / HTTP/1.1\r\nHost: a.example\r\n";
        for (text, fault) in [
            (format!("{fine}\r\n"), None),
            (format!("{fine}Content-Length: 0\r\n\r\n"), None),
            (format!("{fine}Transfer-Encoding: Chunked\r\n\r\n"), None),
            ("GET http://a.example/x HTTP/1.1\r\nHost: A.example.\r\n\r\n".into(), None),
            ("GET http://a.example/ HTTP/1.0\r\n\r\n".into(), None),
            ("CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n".into(), None),
            ("\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n".into(), Some(HeadFault::EmptyLine)),
            ("GET / HTTP/1.1\nHost: a.example\n\n".into(), Some(HeadFault::BareLineFeed)),
            (format!("{fine}X: a\rb\r\n\r\n"), Some(HeadFault::BareCarriageReturn)),
            (format!("{fine}Host: a.example\r\n\r\n"), Some(HeadFault::Host)),
            (format!("{fine}hOST: b.example\r\n\r\n"), Some(HeadFault::Host)),
            ("GET / HTTP/1.1\r\nX: y\r\n\r\n".into(), Some(HeadFault::Host)),
            ("GET http://a.example/ HTTP/1.1\r\nHost: b.example\r\n\r\n".into(), Some(HeadFault::Names)),
            ("GET http://u@a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Name)),
            ("GET / HTTP/1.1\r\nHost: a.example\0.evil.test\r\n\r\n".into(), Some(HeadFault::Syntax)),
            ("GET / HTTP/1.1\r\nHost: [a.example]\r\n\r\n".into(), Some(HeadFault::Name)),
            ("GET https://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Target)),
            ("GET a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Target)),
            ("GET /#x HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Target)),
            ("GET /<x> HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Target)),
            ("GET http://a.example/` HTTP/1.0\r\n\r\n".into(), Some(HeadFault::Target)),
            ("OPTIONS * HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), None),
            ("GET / HTTP/2.0\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Syntax)),
            ("GET  / HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Syntax)),
            (format!("{fine}X : y\r\n\r\n"), Some(HeadFault::Syntax)),
            (format!("{fine}X: y\r\n z\r\n\r\n"), Some(HeadFault::Syntax)),
            (format!("{fine}Content-Length: 1\r\nContent-Length: 1\r\n\r\n"), Some(HeadFault::Length)),
            (format!("{fine}Content-Length: 1, 1\r\n\r\n"), Some(HeadFault::Length)),
            (format!("{fine}Content-Length: {}\r\n\r\n", "9".repeat(18)), None),
            (format!("{fine}Content-Length: {}\r\n\r\n", "9".repeat(19)), Some(HeadFault::Length)),
            (format!("{fine}Content-Length: +1\r\n\r\n"), Some(HeadFault::Length)),
            (format!("{fine}Content-Length: -1\r\n\r\n"), Some(HeadFault::Length)),
            (format!("{fine}Content-Length: 0x1\r\n\r\n"), Some(HeadFault::Length)),
            (format!("{fine}Content-Length:\r\n\r\n"), Some(HeadFault::Length)),
            (
                format!("{fine}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
                Some(HeadFault::Length),
            ),
            (format!("{fine}Transfer-Encoding: xchunked\r\n\r\n"), Some(HeadFault::TransferCoding)),
            (format!("{fine}Transfer-Encoding: chunked, identity\r\n\r\n"), Some(HeadFault::TransferCoding)),
            (format!("{fine}Transfer-Encoding: gzip, chunked\r\n\r\n"), Some(HeadFault::TransferCoding)),
            (
                format!("{fine}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"),
                Some(HeadFault::TransferCoding),
            ),
            (
                "GET / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".into(),
                Some(HeadFault::TransferCoding),
            ),
            (format!("{fine}Connection: close, Host\r\n\r\n"), Some(HeadFault::Connection)),
            (format!("{fine}Connection: close\r\n\r\n"), None),
            (format!("{fine}{}\r\n", "X: y\r\n".repeat(101)), Some(HeadFault::TooMany)),
            (format!("{fine}{}\r\n", "X: y\r\n".repeat(300)), Some(HeadFault::TooMany)),
            (format!("{fine}X: {}\r\n\r\n", "y".repeat(40_000)), Some(HeadFault::TooLarge)),
        ] {
            assert_eq!(parse_text(&text).err(), fault, "{text:?}");
        }
    }

    #[test]
    fn a_fault_is_found_in_an_incomplete_head() {
        let limits = TrafficLimits::default();
        assert_eq!(find_end(b"GET / HTTP/1.1\n", &limits), Err(HeadFault::BareLineFeed));
        assert_eq!(find_end(b"GET / HTTP/1.1\r\nHost: a\r\n", &limits), Ok(None));
        assert_eq!(find_end(&[b'x'; 40_000], &limits), Err(HeadFault::TooLarge));
    }

    #[test]
    fn absolute_form_becomes_origin_form_with_one_host() {
        for (text, written) in [
            (
                "GET http://a.example/x?y HTTP/1.1\r\nhost: A.EXAMPLE\r\nX: y\r\n\r\nbody",
                "GET /x?y HTTP/1.1\r\nHost: a.example\r\nX: y\r\n\r\nbody",
            ),
            (
                "GET http://a.example:81?y HTTP/1.1\r\nHost: a.example\r\n\r\n",
                "GET /?y HTTP/1.1\r\nHost: a.example:81\r\n\r\n",
            ),
        ] {
            let mut bytes = BytesMut::from(text);
            let limits = TrafficLimits::default();
            let length = find_end(&bytes, &limits).unwrap().unwrap();
            let head = parse(&bytes[..length], &limits).unwrap();
            head.to_origin_form(&mut bytes, length);
            assert_eq!(std::str::from_utf8(&bytes).unwrap(), written);
        }
    }
}
