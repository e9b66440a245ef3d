//! TCP to any address and port: it must arrive at Sandbar, or nowhere.
//!
//! A redirected connect succeeds like any other, so every probe identifies the peer: it sends an HTTP request for a
//! denied host, which Sandbar refuses with its own header fields on every port.

use std::fs;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::{InsideProbe, PeerPresence, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;
use crate::doctor::response::ProbeResponse;

/// Connect timeout, and read timeout of the response.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_millis(2500);
const GROUP: &str = "TCP";
const FIX: &str = "redirect all TCP of the sandbox to Sandbar, IPv4 and IPv6, and drop forwarded packets (nftables: a chain on the prerouting hook with `meta l4proto tcp redirect to :PORT`), or use `sandbar run`";
/// Ports that firewalls often forget.
const PORTS: [u16; 7] = [22, 25, 80, 443, 853, 5432, 8080];
/// Service ports of a gateway or node (SSH, HTTP, Docker, kubelet).
const GATEWAY_PORTS: [u16; 5] = [22, 80, 443, 2375, 10250];
/// Nearby addresses that a sandbox must not reach.
const NEARBY_ADDRESSES: &[(&str, IpAddr, &str)] = &[
    ("near.10", IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), "a private address"),
    ("near.100", IpAddr::V4(Ipv4Addr::new(100, 64, 0, 1)), "a carrier-grade NAT address"),
    ("near.172", IpAddr::V4(Ipv4Addr::new(172, 17, 0, 1)), "the default container bridge"),
    ("near.192", IpAddr::V4(Ipv4Addr::new(192, 168, 1, 1)), "a private address"),
    ("near.six", IpAddr::V6(Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 1)), "a private address"),
    ("metadata", IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)), "the metadata service"),
    ("metadata.six", IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)), "the metadata service"),
    ("metadata.azure", IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)), "the Azure wire server"),
    ("metadata.ecs", IpAddr::V4(Ipv4Addr::new(169, 254, 170, 2)), "the ECS credentials endpoint"),
];

pub(super) fn probes(targets: &ProbeTargets) -> Vec<InsideProbe> {
    let mut probes = Vec::new();
    let (four, six) = (targets.ipv4, targets.ipv6);
    let mut add = |name: String, what: String, to: SocketAddr, presence: PeerPresence| {
        let run = move |targets: &ProbeTargets| probe_connect(targets, to, presence, |_| Ok(()));
        probes.push(InsideProbe::new(GROUP, name, format!("{what}, {to}"), FIX, run));
    };
    for port in PORTS {
        let to = SocketAddr::new(four.into(), port);
        add(format!("tcp.{port}"), "TCP to an address".to_owned(), to, PeerPresence::Answers);
    }
    for port in [80, 443] {
        let to = SocketAddr::new(six.into(), port);
        add(format!("tcp.six.{port}"), "TCP over IPv6".to_owned(), to, PeerPresence::Answers);
    }
    let mapped = SocketAddr::new(four.to_ipv6_mapped().into(), 80);
    add(
        "tcp.mapped".to_owned(),
        "TCP to an IPv4-mapped IPv6 address".to_owned(),
        mapped,
        PeerPresence::Answers,
    );
    for (name, address, what) in NEARBY_ADDRESSES {
        let to = SocketAddr::new(*address, 80);
        add(format!("tcp.{name}"), format!("TCP to {what}"), to, PeerPresence::Perhaps);
    }
    for gateway in read_gateways() {
        for port in GATEWAY_PORTS {
            let to = SocketAddr::new(gateway.into(), port);
            let name = format!("tcp.gateway.{to}");
            add(name, "TCP to the gateway itself".to_owned(), to, PeerPresence::Perhaps);
        }
    }
    probes.push(InsideProbe::new(GROUP, "tcp.mptcp", "Multipath TCP (MPTCP)", FIX, |targets| {
        let to = SocketAddr::new(targets.ipv4.into(), 80);
        match Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::MPTCP)) {
            Ok(socket) => probe_socket(targets, &socket, to, PeerPresence::Answers),
            Err(error) => ProbeVerdict::Blocked(error.to_string()),
        }
    }));
    probes
}

/// Connects a socket, after `prepare` has set it up, and identifies the peer.
pub(super) fn probe_connect(
    targets: &ProbeTargets,
    to: SocketAddr,
    presence: PeerPresence,
    prepare: impl Fn(&Socket) -> std::io::Result<()>,
) -> ProbeVerdict {
    let made = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP));
    match made.and_then(|socket| prepare(&socket).map(|()| socket)) {
        Ok(socket) => probe_socket(targets, &socket, to, presence),
        Err(error) => ProbeVerdict::Blocked(error.to_string()),
    }
}

fn probe_socket(
    targets: &ProbeTargets,
    mut socket: &Socket,
    to: SocketAddr,
    presence: PeerPresence,
) -> ProbeVerdict {
    if let Err(error) = socket.connect_timeout(&to.into(), CONNECT_TIMEOUT) {
        return presence.judge_failure(&error);
    }
    let request = probe_request(&targets.denied);
    let response = socket
        .set_read_timeout(Some(CONNECT_TIMEOUT))
        .and_then(|()| socket.write_all(request.as_bytes()))
        .and_then(|()| ProbeResponse::read(&mut socket));
    match response {
        Ok(answer) => judge_response(&answer),
        Err(error) => ProbeVerdict::Escaped(format!("connected, but not to Sandbar: {error}")),
    }
}

/// An HTTP request that identifies itself as this test.
pub(super) fn probe_request(host: &str) -> String {
    format!(
        "GET /sandbar-doctor HTTP/1.1\r\nHost: {host}\r\nUser-Agent: sandbar-doctor\r\nConnection: close\r\n\r\n"
    )
}

/// The verdict on a response: refused by Sandbar, or sent by another server.
pub(super) fn judge_response(answer: &ProbeResponse) -> ProbeVerdict {
    match (answer.reason(), answer.record_id()) {
        (Some(reason), Some(record)) => {
            ProbeVerdict::Answered(format!("refused as {reason}, record {record}"))
        }
        _ if answer.is_empty() => {
            ProbeVerdict::Escaped("connected, and the peer closed without a response".to_owned())
        }
        _ => ProbeVerdict::Escaped(format!("another server answered: {}", answer.first_line())),
    }
}

/// The gateways in the routing table.
fn read_gateways() -> Vec<Ipv4Addr> {
    let routes = fs::read_to_string("/proc/net/route").unwrap_or_default();
    let mut gateways: Vec<Ipv4Addr> = routes.lines().skip(1).filter_map(parse_gateway).collect();
    gateways.sort_unstable();
    gateways.dedup();
    gateways
}

/// Parses the gateway in a line of `/proc/net/route`, which writes addresses in native byte order.
fn parse_gateway(line: &str) -> Option<Ipv4Addr> {
    let number = u32::from_str_radix(line.split_whitespace().nth(2)?, 16).ok()?;
    let address = Ipv4Addr::from(number.to_ne_bytes());
    (!address.is_unspecified()).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbar_is_told_from_other_servers() {
        let judged = |text: &str| judge_response(&ProbeResponse::read(&mut text.as_bytes()).unwrap());
        let refused = "HTTP/1.1 403 Forbidden\r\nSandbar-Reason: not_listed\r\nSandbar-Record: 01J\r\n\r\n";
        assert!(matches!(judged(refused), ProbeVerdict::Answered(_)));
        for text in ["", "HTTP/1.1 403 Forbidden\r\n\r\n", "SSH-2.0-x\r\n", "\u{1b}[2J"] {
            let verdict = judged(text);
            assert!(matches!(verdict, ProbeVerdict::Escaped(_)), "{text:?}: {verdict:?}");
            assert!(!verdict.how().contains('\u{1b}'));
        }
    }

    #[test]
    fn gateways_are_parsed() {
        let line = "eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0";
        assert_eq!(parse_gateway(line), Some(Ipv4Addr::new(192, 168, 0, 1)));
        assert_eq!(parse_gateway("lo\t00000000\t00000000\t0001"), None);
        assert_eq!(parse_gateway("x"), None);
    }
}
