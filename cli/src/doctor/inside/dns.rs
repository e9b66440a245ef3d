//! DNS to any resolver: only Sandbar may answer.
//!
//! Sandbar gives the reason for a refusal in an extended DNS error (RFC 8914) with a reason code as its text.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use rules::Reason;

use super::tcp::CONNECT_TIMEOUT;
use super::{InsideProbe, PeerPresence, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;

/// Longest wait for an answer. Sandbar forwards queries on a fixed time grid, so answers are delayed.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
const GROUP: &str = "DNS";
const FIX: &str = "redirect UDP and TCP port 53 of the sandbox to Sandbar's `dns` listener, IPv4 and IPv6, and reject other UDP";
/// In some clouds also a resolver.
const METADATA: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254));
/// Record types.
const TYPE_A: u16 = 1;
const TYPE_NULL: u16 = 10;
const TYPE_TXT: u16 = 16;

/// How a query is sent.
#[derive(Clone, Copy, Debug)]
enum QueryTransport {
    Tcp,
    Udp,
}

pub(super) fn probes() -> Vec<InsideProbe> {
    let four = |targets: &ProbeTargets| IpAddr::V4(targets.resolver);
    let six = |targets: &ProbeTargets| IpAddr::V6(targets.resolver6);
    let mut probes = vec![
        dns_probe("dns.udp", "DNS to another resolver", four, 53, QueryTransport::Udp, TYPE_A),
        dns_probe("dns.tcp", "DNS over TCP to another resolver", four, 53, QueryTransport::Tcp, TYPE_A),
        dns_probe("dns.udp.six", "DNS to another resolver over IPv6", six, 53, QueryTransport::Udp, TYPE_A),
        dns_probe("dns.tcp.six", "DNS over TCP and IPv6", six, 53, QueryTransport::Tcp, TYPE_A),
        dns_probe("dns.txt", "a TXT query, as tunnels use", four, 53, QueryTransport::Udp, TYPE_TXT),
        dns_probe("dns.null", "a NULL query, as tunnels use", four, 53, QueryTransport::Udp, TYPE_NULL),
        dns_probe("dns.odd-port", "DNS on another port", four, 9953, QueryTransport::Udp, TYPE_A),
        dns_probe(
            "dns.metadata",
            "DNS to the metadata address",
            |_| METADATA,
            53,
            QueryTransport::Udp,
            TYPE_A,
        ),
    ];
    probes.push(InsideProbe::new(
        GROUP,
        "dns.system",
        "a denied name through the system's resolver",
        FIX,
        |targets| match std::net::ToSocketAddrs::to_socket_addrs(&(targets.denied.as_str(), 80)) {
            Err(error) => ProbeVerdict::Blocked(error.to_string()),
            Ok(resolved) => {
                let addresses: Vec<String> = resolved.map(|to| to.ip().to_string()).collect();
                ProbeVerdict::Unknown(format!("it resolved to {}", addresses.join(", ")))
            }
        },
    ));
    probes
}

fn dns_probe(
    name: &'static str,
    what: &str,
    target: impl Fn(&ProbeTargets) -> IpAddr + Send + Sync + 'static,
    port: u16,
    transport: QueryTransport,
    kind: u16,
) -> InsideProbe {
    InsideProbe::new(GROUP, name, what, FIX, move |targets| {
        let to = SocketAddr::new(target(targets), port);
        let query = encode_query(&targets.denied, kind);
        let answer = match transport {
            QueryTransport::Tcp => query_tcp(to, &query),
            QueryTransport::Udp => query_udp(to, &query),
        };
        match answer {
            Ok(answer) => judge_answer(&answer),
            Err(error) if to.ip() == METADATA => PeerPresence::Perhaps.judge_failure(&error),
            Err(error) => PeerPresence::Answers.judge_failure(&error),
        }
    })
}

fn judge_answer(answer: &[u8]) -> ProbeVerdict {
    match find_reason_code(answer) {
        Some(code) => ProbeVerdict::Answered(format!("refused as {code}")),
        None if answer.is_empty() => {
            ProbeVerdict::Blocked("the connection was closed without an answer".to_owned())
        }
        None => {
            let code = answer.get(3).map_or(0, |byte| byte & 15);
            ProbeVerdict::Escaped(format!("another resolver answered, with code {code}"))
        }
    }
}

/// The reason code in the answer, if it came from Sandbar.
fn find_reason_code(answer: &[u8]) -> Option<&'static str> {
    /// EDNS option code of an extended DNS error.
    const OPTION: u16 = 15;
    Reason::ALL.iter().map(|reason| reason.code()).find(|code| {
        let length = u16::try_from(2 + code.len()).unwrap_or(u16::MAX);
        let head = [OPTION.to_be_bytes(), length.to_be_bytes()].concat();
        answer
            .windows(6 + code.len())
            .any(|window| window.starts_with(&head) && window.ends_with(code.as_bytes()))
    })
}

fn query_udp(to: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    socket.send(query)?;
    let mut answer = vec![0; 4096];
    let length = socket.recv(&mut answer)?;
    answer.truncate(length);
    Ok(answer)
}

fn query_tcp(to: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&to, CONNECT_TIMEOUT)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], query].concat())?;
    let mut answer = Vec::new();
    let mut length = [0; 2];
    match stream.read_exact(&mut length) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(answer),
        Err(error) => return Err(error),
    }
    stream.take(u64::from(u16::from_be_bytes(length))).read_to_end(&mut answer)?;
    Ok(answer)
}

/// A query with an OPT record, so that the answer can carry an extended error.
fn encode_query(name: &str, kind: u16) -> Vec<u8> {
    let id = std::process::id() as u16;
    let mut query = id.to_be_bytes().to_vec();
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 1]);
    for label in name.split('.').filter(|label| !label.is_empty()) {
        query.push(u8::try_from(label.len()).unwrap_or(u8::MAX));
        query.extend(label.as_bytes());
    }
    query.push(0);
    query.extend(kind.to_be_bytes());
    query.extend([0, 1]);
    query.extend([0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
    query
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sandbar_gives_a_reason_code() {
        let code = Reason::NotListed.code().as_bytes();
        let length = u8::try_from(2 + code.len()).unwrap();
        let head = [7, 7, 0x81, 0x83, 0, 1, 0, 0, 0, 0, 0, 1];
        let option = [&[0, 15, 0, length, 0, 15][..], code].concat();
        let ours = [&head[..], &option].concat();
        assert!(matches!(judge_answer(&ours), ProbeVerdict::Answered(_)));
        let theirs = [&head[..], &[0, 15, 0, 7, 0, 15], b"other"].concat();
        for answer in [&theirs[..], &head[..], code] {
            assert!(matches!(judge_answer(answer), ProbeVerdict::Escaped(_)), "{answer:?}");
        }
        assert!(matches!(judge_answer(&[]), ProbeVerdict::Blocked(_)));
    }

    #[test]
    fn queries_are_encoded() {
        let query = encode_query("a.example", TYPE_TXT);
        assert_eq!(&query[12..], b"\x01a\x07example\0\0\x10\0\x01\0\0\x29\x04\xd0\0\0\0\0\0\0");
    }
}
