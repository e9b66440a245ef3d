//! Protocols other than TCP and UDP, and other socket families, which firewall rules about addresses do not cover.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use sys::probe as calls;

use super::{InsideProbe, PeerPresence, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;

/// Longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1500);
const GROUP: &str = "other protocols";
const PROTOCOL_FIX: &str = "reject every protocol except TCP and DNS from the sandbox, for IPv4 and IPv6: rules for TCP and UDP do not cover the others";
const RAW_FIX: &str = "drop CAP_NET_RAW from the sandbox (`--cap-drop NET_RAW`, `capabilities: drop: [ALL]`)";
const FAMILY_FIX: &str = "block socket families other than inet, inet6, unix and netlink with a system call filter: a network namespace does not restrict these";
/// Protocol and socket type numbers that not every libc defines.
const DCCP: i32 = 33;
const QIPCRTR: i32 = 42;
const SOCK_DCCP: i32 = 6;
const UDPLITE: i32 = 136;
const ECHO_REQUEST: u8 = 8;
const ECHO6_REQUEST: u8 = 128;

pub(super) fn probes() -> Vec<InsideProbe> {
    let four = |targets: &ProbeTargets| IpAddr::V4(targets.ipv4);
    let six = |targets: &ProbeTargets| IpAddr::V6(targets.ipv6);
    let mut probes = vec![
        echo_probe("icmp", "a ping", four, Type::DGRAM, ECHO_REQUEST),
        echo_probe("icmp.six", "a ping over IPv6", six, Type::DGRAM, ECHO6_REQUEST),
        echo_probe("icmp.raw", "a ping through a raw socket", four, Type::RAW, ECHO_REQUEST),
        echo_probe("icmp.raw.six", "a ping through a raw socket over IPv6", six, Type::RAW, ECHO6_REQUEST),
        raw_probe("raw.ip", "hand-made IP packets", libc::IPPROTO_RAW),
        raw_probe("raw.gre", "GRE tunnel packets", libc::IPPROTO_GRE),
        raw_probe("raw.ipip", "IP-in-IP tunnel packets", libc::IPPROTO_IPIP),
        raw_probe("raw.esp", "IPsec packets", libc::IPPROTO_ESP),
    ];
    for (name, what, kind, protocol) in [
        ("sctp", "SCTP", Type::STREAM, libc::IPPROTO_SCTP),
        ("dccp", "DCCP", Type::from(SOCK_DCCP), DCCP),
        ("udplite", "UDP-Lite", Type::DGRAM, UDPLITE),
    ] {
        probes.push(InsideProbe::new(
            GROUP,
            name,
            what,
            PROTOCOL_FIX,
            move |targets| match send_and_receive(SocketAddr::new(targets.ipv4.into(), 80), kind, protocol) {
                Ok(()) => ProbeVerdict::Escaped("the target answered".to_owned()),
                Err(error) => PeerPresence::Perhaps.judge_failure(&error),
            },
        ));
    }
    for (name, what, family) in [
        ("family.packet", "frames that bypass the firewall (AF_PACKET)", libc::AF_PACKET),
        ("family.xdp", "frames that bypass the firewall (AF_XDP)", libc::AF_XDP),
        ("family.bluetooth", "the machine's radio (AF_BLUETOOTH)", libc::AF_BLUETOOTH),
        ("family.qipcrtr", "the machine's modem (AF_QIPCRTR)", QIPCRTR),
    ] {
        probes.push(InsideProbe::new(GROUP, name, what, FAMILY_FIX, move |_| {
            match Socket::new(Domain::from(family), Type::RAW, None) {
                Ok(_) => ProbeVerdict::Escaped("such a socket can be created".to_owned()),
                Err(error) => ProbeVerdict::Blocked(error.to_string()),
            }
        }));
    }
    probes.push(InsideProbe::new(
        GROUP,
        "family.vsock",
        "the host of this virtual machine (AF_VSOCK)",
        FAMILY_FIX,
        |_| judge_vsock(calls::connect_vsock(ANSWER_TIMEOUT)),
    ));
    probes.push(InsideProbe::new(
        GROUP,
        "family.other-numbers",
        "the same with x32 system call numbers",
        FAMILY_FIX,
        |_| judge_vsock(calls::vsock_by_x32()),
    ));
    probes
}

/// A reset also proves that the host is reachable.
fn judge_vsock(connected: io::Result<()>) -> ProbeVerdict {
    match connected {
        Ok(()) => ProbeVerdict::Escaped("the host answered".to_owned()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            ProbeVerdict::Escaped("the host answered with a reset".to_owned())
        }
        Err(error) => ProbeVerdict::Blocked(error.to_string()),
    }
}

fn echo_probe(
    name: &'static str,
    what: &'static str,
    target: impl Fn(&ProbeTargets) -> IpAddr + Send + Sync + 'static,
    kind: Type,
    request: u8,
) -> InsideProbe {
    InsideProbe::new(GROUP, name, what, PROTOCOL_FIX, move |targets| {
        match send_ping(SocketAddr::new(target(targets), 0), kind, request) {
            Ok(()) => ProbeVerdict::Escaped("the target answered".to_owned()),
            Err(error) => PeerPresence::Answers.judge_failure(&error),
        }
    })
}

/// Sends an echo request (RFC 792, RFC 4443) and waits for its answer.
fn send_ping(to: SocketAddr, kind: Type, request: u8) -> io::Result<()> {
    let protocol = if to.is_ipv4() { Protocol::ICMPV4 } else { Protocol::ICMPV6 };
    let socket = Socket::new(Domain::for_address(to), kind, Some(protocol))?;
    socket.connect(&to.into())?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let id = std::process::id() as u16;
    let mut packet = [&[request, 0, 0, 0][..], &id.to_be_bytes(), &[0, 1], b"sandbar-doctor"].concat();
    let sum = checksum(&packet).to_be_bytes();
    if let Some(field) = packet.get_mut(2..4) {
        field.copy_from_slice(&sum);
    }
    socket.send(&packet)?;
    socket.recv(&mut [MaybeUninit::uninit(); 512]).map(drop)
}

/// The checksum of RFC 1071, section 1.
fn checksum(packet: &[u8]) -> u16 {
    let words = packet.chunks(2).map(|pair| match pair {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        [high] => u32::from(*high) << 8,
        _ => 0,
    });
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

fn raw_probe(name: &'static str, what: &'static str, protocol: i32) -> InsideProbe {
    InsideProbe::new(GROUP, name, what, RAW_FIX, move |targets| {
        let to = SocketAddr::new(targets.ipv4.into(), 0);
        let sent = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)))
            .and_then(|socket| socket.send_to(&raw_packet(targets, protocol), &to.into()));
        match sent {
            Ok(_) => ProbeVerdict::Escaped("a raw socket was created and sent a packet".to_owned()),
            Err(error) => ProbeVerdict::Blocked(error.to_string()),
        }
    })
}

/// The packet for a raw socket: for IPPROTO_RAW with its own IP header (RFC 791, section 3.1) and an experimental
/// protocol number (RFC 3692), so that no receiver processes it.
fn raw_packet(targets: &ProbeTargets, protocol: i32) -> Vec<u8> {
    if protocol != libc::IPPROTO_RAW {
        return vec![0; 8];
    }
    let head = [0x45, 0, 0, 20, 0, 0, 0, 0, 64, 253, 0, 0, 0, 0, 0, 0];
    [&head[..], &targets.ipv4.octets()].concat()
}

/// Connects, sends the marker and waits for an answer.
fn send_and_receive(to: SocketAddr, kind: Type, protocol: i32) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(to), kind, Some(Protocol::from(protocol)))?;
    socket.connect_timeout(&to.into(), ANSWER_TIMEOUT)?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    socket.send(b"sandbar-doctor")?;
    socket.recv(&mut [MaybeUninit::uninit(); 512]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_the_standard() {
        // The example of RFC 1071, section 3.
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        assert_eq!(checksum(&[]), 0xffff);
    }
}
