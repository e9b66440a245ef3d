//! The explicit proxy: CONNECT, SOCKS5 CONNECT with a host name, or a plain request in absolute form. CONNECT and SOCKS are
//! answered here; the protocol inside is detected as on any other connection.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use audit::AttemptedText;
use bytes::Buf;
use rules::limits::TrafficLimits;
use rules::{Host, Reason};
use tokio::io::AsyncWriteExt;

use crate::accept::detect::{self, Detected};
use crate::egress::stream::PrefixedStream;
use crate::report::attempted;
use crate::report::refusal::{BodyAudience, Refusal};

/// The version octet of SOCKS4, which is not served.
pub(super) const SOCKS4: u8 = 4;
const SOCKS5: u8 = 5;
const NO_AUTH: u8 = 0;
const NO_ACCEPTABLE_METHODS: u8 = 0xff;
const CONNECT: u8 = 1;
/// The answer to CONNECT.
const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// How a refusal is encoded for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyFormat {
    Http(BodyAudience),
    Silent,
    Socks,
    Tls,
    /// The client has not said anything yet.
    Undetected,
}

/// What a client of the explicit proxy asks for.
#[derive(Debug)]
pub(crate) enum ExplicitRequest {
    /// One or more plain requests in absolute form; each names its host.
    Forward,
    /// A tunnel to a host and port. The request, of `length` bytes, stays in front of the stream until it is granted: a
    /// refusal describes it.
    Tunnel { host: Host, port: u16, length: usize },
}

/// Reads the client's request, and sets how to encode a refusal of it.
pub(crate) async fn read_request(
    stream: &mut PrefixedStream,
    limits: &TrafficLimits,
    deadline: Instant,
    reply_format: &mut ReplyFormat,
) -> Result<ExplicitRequest, Refusal> {
    while stream.ahead.is_empty() {
        detect::read_more(stream, deadline).await?;
    }
    if stream.ahead.first() == Some(&SOCKS5) {
        *reply_format = ReplyFormat::Socks;
        return read_socks(stream, deadline).await;
    }
    *reply_format = ReplyFormat::Http(BodyAudience::Person);
    let detected = detect::detect(stream, limits, deadline).await?;
    if let Detected::Http1(head) = &detected {
        *reply_format = ReplyFormat::Http(BodyAudience::from_accept(head.accept.as_deref()));
    }
    match detected {
        Detected::Http1(head) if head.is_connect() => {
            let authority = head.authority.ok_or(Reason::BadRequest)?;
            let port = authority.port.ok_or(Reason::BadRequest)?;
            let length = crate::http::head::find_end(&stream.ahead, limits)?.unwrap_or_default();
            Ok(ExplicitRequest::Tunnel { host: authority.host, port, length })
        }
        Detected::Http1(head) if head.is_absolute() => Ok(ExplicitRequest::Forward),
        Detected::Http1(_) => Err(Refusal::from(Reason::BadRequest)
            .with_detail("a proxy takes CONNECT, or a request with an absolute http URL")),
        Detected::Http2 | Detected::Raw | Detected::Tls { .. } => {
            *reply_format = ReplyFormat::Silent;
            Err(Reason::WrongProtocol.into())
        }
    }
}

/// Confirms the tunnel in the client's protocol.
pub(crate) async fn confirm_tunnel(
    stream: &mut PrefixedStream,
    reply_format: ReplyFormat,
) -> Result<(), Refusal> {
    let answer: &[u8] = match reply_format {
        ReplyFormat::Socks => &socks_reply(0),
        ReplyFormat::Http(_) | ReplyFormat::Silent | ReplyFormat::Tls | ReplyFormat::Undetected => {
            ESTABLISHED
        }
    };
    stream.write_all(answer).await.map_err(|_| Reason::FirstBytesLate.into())
}

/// RFC 1928, sections 3 and 4.
async fn read_socks(stream: &mut PrefixedStream, deadline: Instant) -> Result<ExplicitRequest, Refusal> {
    let count = usize::from(peek_octets::<2>(stream, 0, deadline).await?[1]);
    read_at_least(stream, 2 + count, deadline).await?;
    let offers = stream.ahead.get(2..2 + count).unwrap_or_default().contains(&NO_AUTH);
    stream.ahead.advance(2 + count);
    let chosen = if offers { NO_AUTH } else { NO_ACCEPTABLE_METHODS };
    stream.write_all(&[SOCKS5, chosen]).await.map_err(|_| Reason::FirstBytesLate)?;
    if !offers {
        return Err(Reason::SocksUnsupported.into());
    }
    let [version, command, _, kind] = peek_octets::<4>(stream, 0, deadline).await?;
    if version != SOCKS5 || command != CONNECT {
        return Err(Reason::SocksUnsupported.into());
    }
    let (host, used) = match kind {
        1 => (IpAddr::from(Ipv4Addr::from(peek_octets::<4>(stream, 4, deadline).await?)).into(), 8),
        3 => {
            let [length] = peek_octets::<1>(stream, 4, deadline).await?;
            let end = 5 + usize::from(length);
            read_at_least(stream, end, deadline).await?;
            let name = String::from_utf8_lossy(stream.ahead.get(5..end).unwrap_or_default());
            let host = Host::parse(&name);
            (host.map_err(|error| Refusal::from(Reason::BadName).with_detail(error))?, end)
        }
        4 => (IpAddr::from(Ipv6Addr::from(peek_octets::<16>(stream, 4, deadline).await?)).into(), 20),
        _ => return Err(Reason::SocksUnsupported.into()),
    };
    let port = u16::from_be_bytes(peek_octets::<2>(stream, used, deadline).await?);
    Ok(ExplicitRequest::Tunnel { host, port, length: used + 2 })
}

/// Describes a SOCKS5 request, complete or not, for the record of its refusal.
pub(super) fn describe_socks(bytes: &[u8]) -> Option<AttemptedText> {
    let [version, command, _, kind, rest @ ..] = bytes else { return None };
    let (address, after) = match kind {
        1 => rest
            .split_first_chunk::<4>()
            .map(|(octets, after)| (Ipv4Addr::from(*octets).to_string().into(), after)),
        3 => rest.split_first().and_then(|(length, rest)| {
            let (name, after) = rest.split_at_checked(usize::from(*length))?;
            Some((attempted::mask_user(name), after))
        }),
        4 => rest
            .split_first_chunk::<16>()
            .map(|(octets, after)| (format!("[{}]", Ipv6Addr::from(*octets)).into(), after)),
        other => Some((format!("address type {other}").into_bytes(), &[][..])),
    }?;
    let version = if *version == SOCKS5 { String::new() } else { format!("version {version} ") };
    let port =
        after.first_chunk::<2>().map(|port| format!(":{}", u16::from_be_bytes(*port))).unwrap_or_default();
    let command = format!("SOCKS {version}{} ", socks_command(*command));
    Some(AttemptedText::from_bytes(&[command.as_bytes(), &address, port.as_bytes()].concat()))
}

/// Describes a SOCKS4 request for the record of its refusal.
pub(super) fn describe_socks4(bytes: &[u8]) -> Option<AttemptedText> {
    let [_, command, high, low, a, b, c, d, ..] = bytes else { return None };
    let (address, port) = (Ipv4Addr::new(*a, *b, *c, *d), u16::from_be_bytes([*high, *low]));
    Some(format!("SOCKS4 {} {address}:{port}", socks_command(*command)).into())
}

fn socks_command(command: u8) -> Cow<'static, str> {
    match command {
        CONNECT => "CONNECT".into(),
        2 => "BIND".into(),
        3 => "UDP".into(),
        other => format!("command {other}").into(),
    }
}

/// Returns the octets from `at` on, without consuming them.
async fn peek_octets<const N: usize>(
    stream: &mut PrefixedStream,
    at: usize,
    deadline: Instant,
) -> Result<[u8; N], Refusal> {
    read_at_least(stream, at + N, deadline).await?;
    let taken = stream.ahead.get(at..at + N).and_then(|octets| octets.try_into().ok());
    taken.ok_or_else(|| Reason::SocksUnsupported.into())
}

async fn read_at_least(stream: &mut PrefixedStream, count: usize, deadline: Instant) -> Result<(), Refusal> {
    while stream.ahead.len() < count {
        detect::read_more(stream, deadline).await?;
    }
    Ok(())
}

/// A SOCKS5 reply without a bound address, which is not the client's business (RFC 1928, section 6).
pub(crate) fn socks_reply(code: u8) -> [u8; 10] {
    [SOCKS5, code, 0, 1, 0, 0, 0, 0, 0, 0]
}

/// The SOCKS5 reply code of a refusal.
pub(crate) fn socks_reply_code(reason: Reason) -> u8 {
    const NOT_ALLOWED: u8 = 2;
    const HOST_UNREACHABLE: u8 = 4;
    const COMMAND_NOT_SUPPORTED: u8 = 7;
    match crate::report::refusal::http_status(reason) {
        _ if reason == Reason::SocksUnsupported => COMMAND_NOT_SUPPORTED,
        502..=504 => HOST_UNREACHABLE,
        _ => NOT_ALLOWED,
    }
}
