//! The head of an HTTP/1 request, looked at before anything else reads it. Whatever two servers could read
//! in two ways is refused: bare line ends, repeated or mixed lengths, folded lines, two hosts.

use std::borrow::Cow;

use bytes::BytesMut;
use http::uri::PathAndQuery;
use rules::facts::RequestAuthority;
use rules::limits::TrafficLimits;
use rules::{Host, Reason};

/// Most fields that `httparse` is given room for; `head_fields` can be no more.
const MAX_FIELDS: usize = 256;
/// Digits of the largest length that is believed: it fits in 63 bits, so that no server reads another.
const MAX_LENGTH_DIGITS: usize = 18;
/// Fields that no `Connection` may take away: they say where a request goes and where it ends.
const PROTECTED_FIELDS: [&str; 4] =
    ["content-length", "host", "sandbox-identity", "transfer-encoding"];

/// Why a head was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadFault {
    #[error("a carriage return stands alone")]
    BareCarriageReturn,
    #[error("a line feed stands alone")]
    BareLineFeed,
    #[error("`Connection` names a field that must stay")]
    Connection,
    #[error("the request begins with an empty line")]
    EmptyLine,
    #[error("there is not exactly one Host")]
    Host,
    #[error("the length of the body is said more than once, or is no number")]
    Length,
    #[error("the host is malformed")]
    Name,
    #[error("Host and target name two hosts")]
    Names,
    #[error("the head is not one of HTTP/1.0 or HTTP/1.1")]
    Syntax,
    #[error("the target is neither a path nor an http address")]
    Target,
    #[error("the head has more bytes than are allowed")]
    TooLarge,
    #[error("the head has more fields than are allowed")]
    TooMany,
    #[error("the transfer coding is not `chunked` alone")]
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

/// What of a head matters before the request is decided upon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHead {
    pub method: String,
    /// As it was sent.
    pub target: String,
    /// Where it says it goes.
    pub authority: Option<RequestAuthority>,
    pub accept: Option<Vec<u8>>,
    /// Whether its body comes in chunks.
    pub chunked: bool,
    form: TargetForm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetForm {
    Absolute,
    Authority,
    Origin,
}

/// The length of the head at the beginning of `bytes`, once all of it is there.
///
/// # Errors
///
/// Returns a fault as soon as one is certain, so that nobody waits for the rest.
pub fn find_end(bytes: &[u8], limits: &TrafficLimits) -> Result<Option<usize>, HeadFault> {
    let most = usize::try_from(limits.head_bytes).unwrap_or(usize::MAX);
    let mut line = 0;
    let mut before = 0;
    for (at, byte) in bytes.iter().enumerate() {
        match (before, *byte) {
            (b'\r', b'\n') if at == line + 1 && line == 0 => return Err(HeadFault::EmptyLine),
            (b'\r', b'\n') if at == line + 1 => return check_length(at + 1, most).map(Some),
            (b'\r', b'\n') => line = at + 1,
            (_, b'\n') => return Err(HeadFault::BareLineFeed),
            (b'\r', _) => return Err(HeadFault::BareCarriageReturn),
            _ => {}
        }
        before = *byte;
    }
    check_length(bytes.len(), most).map(|_| None)
}

fn check_length(length: usize, most: usize) -> Result<usize, HeadFault> {
    if length > most { Err(HeadFault::TooLarge) } else { Ok(length) }
}

/// Reads a whole head.
///
/// # Errors
///
/// Returns what makes it ambiguous or malformed.
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
    let (Some(method), Some(target), Some(version)) =
        (request.method, request.path, request.version)
    else {
        return Err(HeadFault::Syntax);
    };
    let fields = HeaderFields { all: request.headers, version };
    fields.check_body_length()?;
    fields.check_connection()?;
    let form = target_form(method, target)?;
    // What Pingora cannot read it would refuse by itself, without a record and under its own name.
    if form != TargetForm::Authority && origin_target(form, target).parse::<PathAndQuery>().is_err()
    {
        return Err(HeadFault::Target);
    }
    let authority = fields.find_authority(form, target)?;
    let accept = fields.values("accept").next().map(<[u8]>::to_vec);
    let chunked = fields.values("transfer-encoding").next().is_some();
    let (method, target) = (method.to_owned(), target.to_owned());
    Ok(RequestHead { method, target, authority, accept, chunked, form })
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

    /// RFC 9112, section 6.3, without what it tolerates.
    fn check_body_length(&self) -> Result<(), HeadFault> {
        let mut lengths = self.values("content-length");
        let mut codings = self.values("transfer-encoding");
        match (lengths.next(), codings.next()) {
            (None, None) => Ok(()),
            (Some(_), Some(_)) => Err(HeadFault::Length),
            (Some(length), None) => {
                let number = (1..=MAX_LENGTH_DIGITS).contains(&length.len())
                    && length.iter().all(u8::is_ascii_digit);
                if number && lengths.next().is_none() { Ok(()) } else { Err(HeadFault::Length) }
            }
            (None, Some(coding)) => {
                let chunked = coding.eq_ignore_ascii_case(b"chunked") && self.version == 1;
                let alone = codings.next().is_none();
                if chunked && alone { Ok(()) } else { Err(HeadFault::TransferCoding) }
            }
        }
    }

    /// A hop-by-hop list that takes away what says where the request goes is an attack.
    fn check_connection(&self) -> Result<(), HeadFault> {
        let names = self.values("connection").flat_map(|value| value.split(|byte| *byte == b','));
        let mut names = names.map(<[u8]>::trim_ascii);
        let taken = |name: &[u8]| {
            PROTECTED_FIELDS.iter().any(|kept| name.eq_ignore_ascii_case(kept.as_bytes()))
        };
        if names.any(taken) { Err(HeadFault::Connection) } else { Ok(()) }
    }

    fn find_authority(
        &self,
        form: TargetForm,
        target: &str,
    ) -> Result<Option<RequestAuthority>, HeadFault> {
        let mut hosts = self.values("host");
        let host = hosts.next();
        let missing = host.is_none() && self.version == 1 && form != TargetForm::Authority;
        if hosts.next().is_some() || missing {
            return Err(HeadFault::Host);
        }
        let host = host.map(parse_authority).transpose()?;
        let said = match form {
            TargetForm::Absolute => Some(parse_authority(absolute_authority(target).as_bytes())?),
            TargetForm::Authority => Some(parse_authority(target.as_bytes())?),
            TargetForm::Origin => None,
        };
        match (said, host) {
            (Some(said), Some(host)) if !same_authority(&said, &host) => Err(HeadFault::Names),
            (Some(said), _) => Ok(Some(said)),
            (None, host) => Ok(host),
        }
    }
}

fn parse_authority(bytes: &[u8]) -> Result<RequestAuthority, HeadFault> {
    let text = std::str::from_utf8(bytes).map_err(|_| HeadFault::Name)?;
    RequestAuthority::parse(text).map_err(|_| HeadFault::Name)
}

/// The same host, and the same port unless one leaves it out.
fn same_authority(one: &RequestAuthority, other: &RequestAuthority) -> bool {
    let ports = one.port.zip(other.port).is_none_or(|(one, other)| one == other);
    one.host == other.host && ports
}

fn absolute_authority(target: &str) -> &str {
    let rest = target.get("http://".len()..).unwrap_or_default();
    rest.split(['/', '?']).next().unwrap_or_default()
}

/// The target as an origin is sent it.
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

    /// Whether it is written for a proxy.
    pub fn is_absolute(&self) -> bool {
        self.form == TargetForm::Absolute
    }

    pub fn is_connect(&self) -> bool {
        self.form == TargetForm::Authority
    }

    /// Writes a head in absolute form anew in origin form, its one host in `Host` (RFC 9112, section 3.2.2),
    /// so that nothing behind us can choose between two.
    pub fn to_origin_form(&self, bytes: &mut BytesMut, length: usize) {
        let host = absolute_authority(&self.target);
        let path = origin_target(self.form, &self.target);
        let rest = bytes.split_off(length);
        let mut lines = bytes.as_ref().split(|byte: &u8| *byte == b'\n');
        let first = lines.next().unwrap_or_default();
        let version = first.rsplit(|byte| *byte == b' ').next().unwrap_or_default();
        let mut fresh = BytesMut::with_capacity(bytes.len() + rest.len());
        fresh.extend_from_slice(format!("{} {path} ", self.method).as_bytes());
        fresh.extend_from_slice(version);
        fresh.extend_from_slice(format!("\nHost: {host}\r\n").as_bytes());
        for line in lines.filter(|line| !line.is_empty() && !is_host_line(line)) {
            fresh.extend_from_slice(line);
            fresh.extend_from_slice(b"\n");
        }
        fresh.extend_from_slice(&rest);
        *bytes = fresh;
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
    fn whatever_can_be_read_in_two_ways_is_refused() {
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
            (
                "GET http://a.example/ HTTP/1.1\r\nHost: b.example\r\n\r\n".into(),
                Some(HeadFault::Names),
            ),
            (
                "GET http://u@a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n".into(),
                Some(HeadFault::Name),
            ),
            (
                "GET / HTTP/1.1\r\nHost: a.example\0.evil.test\r\n\r\n".into(),
                Some(HeadFault::Syntax),
            ),
            ("GET / HTTP/1.1\r\nHost: [a.example]\r\n\r\n".into(), Some(HeadFault::Name)),
            (
                "GET https://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n".into(),
                Some(HeadFault::Target),
            ),
            ("GET a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Target)),
            ("GET /#x HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Target)),
            ("GET /<x> HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Target)),
            ("GET http://a.example/` HTTP/1.0\r\n\r\n".into(), Some(HeadFault::Target)),
            ("OPTIONS * HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), None),
            ("GET / HTTP/2.0\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Syntax)),
            ("GET  / HTTP/1.1\r\nHost: a.example\r\n\r\n".into(), Some(HeadFault::Syntax)),
            (format!("{fine}X : y\r\n\r\n"), Some(HeadFault::Syntax)),
            (format!("{fine}X: y\r\n z\r\n\r\n"), Some(HeadFault::Syntax)),
            (
                format!("{fine}Content-Length: 1\r\nContent-Length: 1\r\n\r\n"),
                Some(HeadFault::Length),
            ),
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
            (
                format!("{fine}Transfer-Encoding: chunked, identity\r\n\r\n"),
                Some(HeadFault::TransferCoding),
            ),
            (
                format!("{fine}Transfer-Encoding: gzip, chunked\r\n\r\n"),
                Some(HeadFault::TransferCoding),
            ),
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
    fn a_fault_is_told_before_the_rest_has_come() {
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
