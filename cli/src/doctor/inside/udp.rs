//! UDP other than DNS: Sandbar does not carry it, so the firewall must reject it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use super::{InsideProbe, PeerPresence, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;

/// Longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1200);
const GROUP: &str = "UDP";
const FIX: &str = "reject UDP from the sandbox except port 53, for IPv4 and IPv6, including multicast and broadcast (`reject` instead of `drop` makes QUIC clients fall back at once)";
/// Servers ignore smaller Initial datagrams (RFC 9000, section 14.1).
const MIN_QUIC_PACKET: usize = 1200;

/// Name, description, address, port, payload, and whether the target is known to answer.
type UdpProbeRow = (&'static str, &'static str, IpAddr, u16, Vec<u8>, PeerPresence);

pub(super) fn probes(targets: &ProbeTargets) -> Vec<InsideProbe> {
    let (four, six): (IpAddr, IpAddr) = (targets.ipv4.into(), targets.ipv6.into());
    let metadata: IpAddr = Ipv4Addr::new(169, 254, 169, 254).into();
    let mdns6: IpAddr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xfb).into();
    let (mdns, ssdp) = (Ipv4Addr::new(224, 0, 0, 251), Ipv4Addr::new(239, 255, 255, 250));
    let table: [UdpProbeRow; 13] = [
        ("udp.quic", "QUIC", four, 443, quic_packet(), PeerPresence::Answers),
        ("udp.quic.six", "QUIC over IPv6", six, 443, quic_packet(), PeerPresence::Answers),
        ("udp.doq", "DNS over QUIC", targets.resolver.into(), 853, quic_packet(), PeerPresence::Perhaps),
        ("udp.ntp", "NTP", four, 123, ntp_packet(), PeerPresence::Perhaps),
        ("udp.stun", "STUN", four, 3478, stun_packet(), PeerPresence::Perhaps),
        ("udp.wireguard", "WireGuard", four, 51820, vec![1; 148], PeerPresence::Perhaps),
        ("udp.any", "a datagram on any port", four, 9999, marker_payload(), PeerPresence::Perhaps),
        ("udp.any.six", "a datagram over IPv6", six, 9999, marker_payload(), PeerPresence::Perhaps),
        ("udp.metadata", "the metadata address", metadata, 80, marker_payload(), PeerPresence::Perhaps),
        ("udp.mdns", "mDNS", mdns.into(), 5353, mdns_query(), PeerPresence::Perhaps),
        ("udp.mdns.six", "mDNS over IPv6", mdns6, 5353, mdns_query(), PeerPresence::Perhaps),
        ("udp.ssdp", "SSDP", ssdp.into(), 1900, marker_payload(), PeerPresence::Perhaps),
        (
            "udp.broadcast",
            "broadcast",
            Ipv4Addr::BROADCAST.into(),
            9999,
            marker_payload(),
            PeerPresence::Perhaps,
        ),
    ];
    table
        .into_iter()
        .map(|(name, what, address, port, payload, presence)| {
            let to = SocketAddr::new(address, port);
            InsideProbe::new(GROUP, name, format!("{what}, {to}"), FIX, move |_| {
                match send_and_receive(to, &payload) {
                    Ok(from) => ProbeVerdict::Escaped(format!("{from} answered")),
                    Err(error) => presence.judge_failure(&error),
                }
            })
        })
        .collect()
}

/// Sends a datagram and waits for an answer; returns its source address.
fn send_and_receive(to: SocketAddr, payload: &[u8]) -> io::Result<SocketAddr> {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    // A connected socket receives ICMP errors. Answers to multicast and broadcast come from other addresses, which a
    // connected socket would drop.
    if to.ip().is_multicast() || to.ip() == IpAddr::V4(Ipv4Addr::BROADCAST) {
        socket.set_broadcast(to.is_ipv4())?;
        socket.send_to(payload, to)?;
    } else {
        socket.connect(to)?;
        socket.send(payload)?;
    }
    socket.recv_from(&mut [0; 2048]).map(|(_, from)| from)
}

fn marker_payload() -> Vec<u8> {
    b"sandbar-doctor".to_vec()
}

/// A long header with an unknown version, which a server answers with Version Negotiation (RFC 9000, section 6).
fn quic_packet() -> Vec<u8> {
    let mut packet = vec![0xc0, 0x1a, 0x2a, 0x3a, 0x4a, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0];
    packet.resize(MIN_QUIC_PACKET, 0);
    packet
}

/// A client packet (RFC 5905, section 7.3).
fn ntp_packet() -> Vec<u8> {
    let mut packet = vec![0x23];
    packet.resize(48, 0);
    packet
}

/// A binding request (RFC 8489, section 5).
fn stun_packet() -> Vec<u8> {
    let mut packet = vec![0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42];
    packet.resize(20, 7);
    packet
}

/// A query for services (RFC 6763, section 9) that requests a unicast response.
fn mdns_query() -> Vec<u8> {
    let head = [0, 7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    [&head[..], b"\x09_services\x07_dns-sd\x04_udp\x05local\0\0\x0c\x80\x01"].concat()
}
