//! What explicit clients ask of a proxy: CONNECT, SOCKS5 CONNECT with a host name, or a plain request in
//! absolute form. CONNECT and SOCKS are answered here; what follows inside is classified like any other.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use bytes::Buf;
use rules::facts::{ConnectFacts, Ech, Facts, Protocol, Target};
use rules::limits::Limits;
use rules::{Decision, Host, Reason, RuleSet, SandboxRef};
use tokio::io::AsyncWriteExt;

use crate::accept::detect::{self, Spoken};
use crate::egress::stream::Stream;
use crate::report::refusal::{Reader, Refusal};

const SOCKS5: u8 = 5;
const NO_PASSWORD: u8 = 0;
const NOTHING_ACCEPTED: u8 = 0xff;
const CONNECT: u8 = 1;
/// How CONNECT is granted.
const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// How refusals are said to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tongue {
    Http(Reader),
    Silent,
    Socks,
    Tls,
}

/// What an explicit client wants.
#[derive(Debug)]
pub(crate) enum Wanted {
    /// One or more plain requests in absolute form; each names its host.
    Forward,
    /// Bytes to a host and port.
    Tunnel(Host, u16),
}

/// Reads what an explicit client wants. `tongue` says how to tell it no.
pub(crate) async fn wanted(
    stream: &mut Stream,
    limits: &Limits,
    deadline: Instant,
    tongue: &mut Tongue,
) -> Result<Wanted, Refusal> {
    while stream.ahead.is_empty() {
        detect::more(stream, deadline).await?;
    }
    if stream.ahead.first() == Some(&SOCKS5) {
        *tongue = Tongue::Socks;
        return socks(stream, deadline).await;
    }
    *tongue = Tongue::Http(Reader::Person);
    let spoken = detect::classify(stream, limits, deadline).await?;
    if let Spoken::Http1(head) = &spoken {
        *tongue = Tongue::Http(Reader::of(head.accept.as_deref()));
    }
    match spoken {
        Spoken::Http1(head) if head.is_connect() => {
            let authority = head.authority.ok_or(Reason::BadRequest)?;
            let port = authority.port.ok_or(Reason::BadRequest)?;
            let length = crate::http::head::end(&stream.ahead, limits)?.unwrap_or_default();
            stream.ahead.advance(length);
            Ok(Wanted::Tunnel(authority.host, port))
        }
        Spoken::Http1(head) if head.is_absolute() => Ok(Wanted::Forward),
        Spoken::Http1(_) => Err(Refusal::from(Reason::BadRequest)
            .because("a proxy is asked with CONNECT or with an absolute http address")),
        Spoken::Http2 | Spoken::Raw | Spoken::Tls { .. } => {
            *tongue = Tongue::Silent;
            Err(Reason::WrongProtocol.into())
        }
    }
}

/// Says yes, in the client's own words.
pub(crate) async fn grant(stream: &mut Stream, tongue: Tongue) -> Result<(), Refusal> {
    let yes: &[u8] = match tongue {
        Tongue::Socks => &socks_answer(0),
        Tongue::Http(_) | Tongue::Silent | Tongue::Tls => ESTABLISHED,
    };
    stream.write_all(yes).await.map_err(|_| Reason::FirstBytesLate.into())
}

/// Whether anything at all may go to `host` and `port`, so that a client that asks first is told at once.
/// What is then said inside is decided anew.
pub(crate) fn hopeless(
    rules: &RuleSet,
    sandbox: &SandboxRef,
    host: &Host,
    port: u16,
) -> Result<(), Refusal> {
    let sni = host.name().map(|_| host.clone());
    let mut first = None;
    for protocol in [
        Protocol::Tls { sni, ech: Ech::Absent },
        Protocol::Http { host: Some(host.clone()) },
        Protocol::Raw,
    ] {
        let target = Target::Named(host.clone());
        match rules.decide(sandbox, &Facts::Connect(ConnectFacts { target, port, protocol })) {
            Decision::Allow(_) => return Ok(()),
            Decision::Deny(denial) => {
                first.get_or_insert(denial);
            }
        }
    }
    first.map_or(Ok(()), |denial| Err(denial.into()))
}

/// RFC 1928, sections 3 and 4.
async fn socks(stream: &mut Stream, deadline: Instant) -> Result<Wanted, Refusal> {
    let count = usize::from(octets::<2>(stream, 0, deadline).await?[1]);
    at_least(stream, 2 + count, deadline).await?;
    let offers = stream.ahead.get(2..2 + count).unwrap_or_default().contains(&NO_PASSWORD);
    stream.ahead.advance(2 + count);
    let chosen = if offers { NO_PASSWORD } else { NOTHING_ACCEPTED };
    stream.write_all(&[SOCKS5, chosen]).await.map_err(|_| Reason::FirstBytesLate)?;
    if !offers {
        return Err(Reason::SocksUnsupported.into());
    }
    let [version, command, _, kind] = octets::<4>(stream, 0, deadline).await?;
    if version != SOCKS5 || command != CONNECT {
        return Err(Reason::SocksUnsupported.into());
    }
    let (host, used) = match kind {
        1 => (IpAddr::from(Ipv4Addr::from(octets::<4>(stream, 4, deadline).await?)).into(), 8),
        3 => {
            let [length] = octets::<1>(stream, 4, deadline).await?;
            let end = 5 + usize::from(length);
            at_least(stream, end, deadline).await?;
            let name = String::from_utf8_lossy(stream.ahead.get(5..end).unwrap_or_default());
            let host = Host::parse(&name);
            (host.map_err(|error| Refusal::from(Reason::BadName).because(error))?, end)
        }
        4 => (IpAddr::from(Ipv6Addr::from(octets::<16>(stream, 4, deadline).await?)).into(), 20),
        _ => return Err(Reason::SocksUnsupported.into()),
    };
    let port = u16::from_be_bytes(octets::<2>(stream, used, deadline).await?);
    stream.ahead.advance(used + 2);
    Ok(Wanted::Tunnel(host, port))
}

/// The octets from `at`, once they have come.
async fn octets<const N: usize>(
    stream: &mut Stream,
    at: usize,
    deadline: Instant,
) -> Result<[u8; N], Refusal> {
    at_least(stream, at + N, deadline).await?;
    let taken = stream.ahead.get(at..at + N).and_then(|octets| octets.try_into().ok());
    taken.ok_or_else(|| Reason::SocksUnsupported.into())
}

async fn at_least(stream: &mut Stream, count: usize, deadline: Instant) -> Result<(), Refusal> {
    while stream.ahead.len() < count {
        detect::more(stream, deadline).await?;
    }
    Ok(())
}

/// RFC 1928, section 6, without an address: it is nobody's business.
pub(crate) fn socks_answer(code: u8) -> [u8; 10] {
    [SOCKS5, code, 0, 1, 0, 0, 0, 0, 0, 0]
}

/// The code of a refusal.
pub(crate) fn socks_code(reason: Reason) -> u8 {
    const NOT_ALLOWED: u8 = 2;
    const HOST_UNREACHABLE: u8 = 4;
    const COMMAND_NOT_SUPPORTED: u8 = 7;
    match crate::report::refusal::status(reason) {
        _ if reason == Reason::SocksUnsupported => COMMAND_NOT_SUPPORTED,
        502..=504 => HOST_UNREACHABLE,
        _ => NOT_ALLOWED,
    }
}
