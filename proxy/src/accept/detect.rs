//! Protocol detection from a connection's first bytes, under one deadline and within a byte cap.

use std::time::Instant;

use bytes::Buf;
use rules::facts::EchPresence;
use rules::limits::TrafficLimits;
use rules::{Host, Reason};
use rustls::server::Acceptor;
use tokio::time::timeout_at;

use crate::egress::stream::PrefixedStream;
use crate::http::HTTP2_PREFACE;
use crate::http::head::{self, HeadFault, RequestHead};
use crate::report::refusal::Refusal;

/// First byte of a TLS handshake record.
pub(super) const HANDSHAKE: u8 = 22;
/// RFC 9849, section 5.
const ECH: u16 = 0xfe0d;
/// RFC 6066, section 3: the extension, and where in it the first name begins.
const SERVER_NAME: u16 = 0;
const SERVER_NAME_OFFSET: usize = 5;
const SUPPORTED_VERSIONS: u16 = 43;
/// Length of the longest method.
const MAX_METHOD_LEN: usize = rules::facts::MAX_METHOD;

/// The protocol of a connection.
#[derive(Debug)]
pub(crate) enum Detected {
    /// A request with its complete head.
    Http1(Box<RequestHead>),
    /// HTTP/2 with prior knowledge; each request names its host.
    Http2,
    Raw,
    Tls {
        sni: Option<Host>,
        ech: EchPresence,
        version: &'static str,
    },
}

/// Reads from `stream` until its protocol is certain.
pub(crate) async fn detect(
    stream: &mut PrefixedStream,
    limits: &TrafficLimits,
    deadline: Instant,
) -> Result<Detected, Refusal> {
    loop {
        if let Some(detected) = detect_prefix(&stream.ahead, limits)? {
            if let Detected::Http1(_) = &detected {
                let ignored = stream.ahead.len() - head::skip_empty_line(&stream.ahead).len();
                stream.ahead.advance(ignored); // the readers of the request expect its first byte
            }
            return Ok(detected);
        }
        read_more(stream, deadline).await?;
    }
}

/// Names the protocol of a connection that begins with `bytes`; `more` while that is not certain.
///
/// # Errors
///
/// Returns the reason if these bytes alone are refused.
pub fn protocol_name(bytes: &[u8], limits: &TrafficLimits) -> Result<&'static str, Reason> {
    match detect_prefix(bytes, limits) {
        Ok(None) => Ok("more"),
        Ok(Some(Detected::Http1(_))) => Ok("http1"),
        Ok(Some(Detected::Http2)) => Ok("http2"),
        Ok(Some(Detected::Raw)) => Ok("raw"),
        Ok(Some(Detected::Tls { .. })) => Ok("tls"),
        Err(refusal) => Err(refusal.reason),
    }
}

/// Waits for more of the first bytes.
pub(crate) async fn read_more(stream: &mut PrefixedStream, deadline: Instant) -> Result<(), Refusal> {
    match timeout_at(deadline.into(), stream.read_ahead()).await {
        Ok(Ok(0)) | Ok(Err(_)) => Err(ClientGone.into()),
        Ok(Ok(_)) => Ok(()),
        Err(_) => Err(Reason::FirstBytesLate.into()),
    }
}

/// The client closed the connection before its protocol was known.
struct ClientGone;

impl From<ClientGone> for Refusal {
    fn from(_: ClientGone) -> Self {
        Refusal::from(Reason::FirstBytesLate).with_detail("the client closed the connection first")
    }
}

impl From<HeadFault> for Refusal {
    fn from(fault: HeadFault) -> Self {
        Refusal::from(fault.reason()).with_detail(fault)
    }
}

fn detect_prefix(bytes: &[u8], limits: &TrafficLimits) -> Result<Option<Detected>, Refusal> {
    match bytes {
        [] => Ok(None),
        [HANDSHAKE, ..] => detect_tls(bytes, limits),
        _ if bytes.starts_with(HTTP2_PREFACE) => Ok(Some(Detected::Http2)),
        _ if HTTP2_PREFACE.starts_with(bytes) => Ok(None),
        b"\r" | b"\r\n" => Ok(None), // an empty line may precede a request
        _ if is_request(head::skip_empty_line(bytes)) => {
            let bytes = head::skip_empty_line(bytes);
            let Some(length) = head::find_end(bytes, limits)? else { return Ok(None) };
            let head = head::parse(bytes.get(..length).unwrap_or_default(), limits)?;
            Ok(Some(Detected::Http1(Box::new(head))))
        }
        _ => Ok(Some(Detected::Raw)),
    }
}

/// Whether `bytes` begin like a request, with a method and a space, or are a prefix of one that does.
fn is_request(bytes: &[u8]) -> bool {
    let letters = bytes.iter().take_while(|byte| byte.is_ascii_alphabetic() || **byte == b'-').count();
    match bytes.get(letters) {
        Some(next) => (1..=MAX_METHOD_LEN).contains(&letters) && *next == b' ',
        None => letters <= MAX_METHOD_LEN,
    }
}

/// Reads a ClientHello with rustls' own parser; none while it is incomplete.
fn detect_tls(bytes: &[u8], limits: &TrafficLimits) -> Result<Option<Detected>, Refusal> {
    let mut acceptor = Acceptor::default();
    let mut rest = bytes;
    while !rest.is_empty() {
        if acceptor.read_tls(&mut rest).is_err() {
            return Err(Reason::BadHandshake.into());
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => return read_hello(bytes, &accepted.client_hello()).map(Some),
            Ok(None) => {}
            Err((error, _)) => return Err(Refusal::from(Reason::BadHandshake).with_detail(error)),
        }
    }
    if bytes.len() as u64 >= limits.hello_bytes {
        return Err(Reason::HeadTooLarge.into());
    }
    Ok(None)
}

/// Reads name, ECH and version from a ClientHello.
///
/// rustls reports no server name when the SNI is not a valid DNS name. We parse the extension ourselves, so that such a name
/// is refused instead of ignored.
fn read_hello(bytes: &[u8], hello: &rustls::server::ClientHello<'_>) -> Result<Detected, Refusal> {
    let extensions = parse_extensions(bytes).unwrap_or_default();
    let extension = extensions.iter().find(|(kind, _)| *kind == SERVER_NAME);
    let raw_name = extension
        .map(|(_, body)| String::from_utf8_lossy(body.get(SERVER_NAME_OFFSET..).unwrap_or_default()));
    let sni = hello.server_name().map(str::to_owned).or(raw_name.map(Into::into));
    let sni = sni.as_deref().map(Host::parse).transpose();
    let sni = sni.map_err(|error| Refusal::from(Reason::BadName).with_detail(error))?;
    let ech = match extensions.iter().any(|(kind, _)| *kind == ECH) {
        false => EchPresence::Absent,
        true => EchPresence::Present,
    };
    Ok(Detected::Tls { sni, ech, version: highest_version(&extensions) })
}

/// The server name in a ClientHello that may be incomplete or malformed, for the record of its refusal.
pub(super) fn server_name(bytes: &[u8]) -> Option<Vec<u8>> {
    let extensions = parse_extensions(bytes)?;
    let (_, list) = extensions.into_iter().find(|(kind, _)| *kind == SERVER_NAME)?;
    let mut name = list.get(SERVER_NAME_OFFSET - 2..)?;
    Some(take_vector(&mut name, 2).or(list.get(SERVER_NAME_OFFSET..))?.to_vec())
}

/// The highest version offered: 1.2 unless the extension of RFC 8446, section 4.2.1, lists 1.3.
fn highest_version(extensions: &[(u16, Vec<u8>)]) -> &'static str {
    let list = extensions.iter().find(|(kind, _)| *kind == SUPPORTED_VERSIONS);
    let offers = |list: &[u8]| list.get(1..).unwrap_or_default().chunks(2).any(|one| one == [3, 4]);
    if list.is_some_and(|(_, list)| offers(list)) { "1.3" } else { "1.2" }
}

/// Parses the extensions of a ClientHello, because rustls does not expose all of them. Of an incomplete one, those that
/// are complete.
fn parse_extensions(bytes: &[u8]) -> Option<Vec<(u16, Vec<u8>)>> {
    let message = handshake_message(bytes)?;
    let mut rest = message.get(4 + 2 + 32..)?; // type and length, version, random
    take_vector(&mut rest, 1)?; // session id
    take_vector(&mut rest, 2)?; // cipher suites
    take_vector(&mut rest, 1)?; // compression methods
    let mut rest = take_vector(&mut rest, 2).or(rest.get(2..))?;
    let mut found = Vec::new();
    while let [high, low, tail @ ..] = rest {
        rest = tail;
        let Some(body) = take_vector(&mut rest, 2) else { break };
        found.push((u16::from_be_bytes([*high, *low]), body.to_vec()));
    }
    Some(found)
}

/// Joins the records of the first handshake message.
fn handshake_message(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut message = Vec::new();
    while let [HANDSHAKE, _, _, tail @ ..] = bytes {
        bytes = tail;
        message.extend_from_slice(take_vector(&mut bytes, 2).or(bytes.get(2..))?);
    }
    Some(message)
}

/// Takes a vector that is preceded by its length in `width` octets.
fn take_vector<'a>(rest: &mut &'a [u8], width: usize) -> Option<&'a [u8]> {
    let (length, tail) = rest.split_at_checked(width)?;
    let length = length.iter().fold(0, |sum, octet| sum << 8 | usize::from(*octet));
    let (taken, tail) = tail.split_at_checked(length)?;
    *rest = tail;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_say_what_it_is() {
        let limits = TrafficLimits::default();
        for (bytes, expected) in [
            (&b""[..], "more"),
            (b"G", "more"),
            (b"GET / HTTP/1.1\r\n", "more"),
            (b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", "http1"),
            (b"\r", "more"),
            (b"\r\n", "more"),
            (b"\r\nGET / HTTP/1.1\r\n", "more"),
            (b"\r\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n", "http1"),
            (b"\r\n\r\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n", "raw"),
            (b"\r\n\r\n\0\r\nQUIT\n", "raw"),
            (b"\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n", "raw"),
            (b"\rGET / HTTP/1.1\r\nHost: a.example\r\n\r\n", "raw"),
            (b"\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "refused"),
            (b"PRI * HTTP/2.0\r\n\r\n", "more"),
            (HTTP2_PREFACE, "http2"),
            (b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n", "raw"),
            (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", "raw"),
            (b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "raw"),
            // The same word, complete: how the client splits its bytes must not choose the protocol.
            (b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA / HTTP/1.1\r\n", "raw"),
            (b"GET / HTTP/1.1\nHost: a\n\n", "refused"),
            (b"\x16\x03\x01\x00\x05", "more"),
            (b"\x16\x03\x01\x00\x05hello", "refused"),
        ] {
            assert_eq!(protocol_name(bytes, &limits).unwrap_or("refused"), expected, "{bytes:?}");
        }
    }
}
