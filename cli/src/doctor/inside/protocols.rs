//! Protocols beside TCP and UDP, and sockets of other families, which no rule about addresses sees.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use sys::probe as calls;

use super::{Ground, Presence, Probe};
use crate::doctor::probe::Verdict;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_millis(1500);
const GROUP: &str = "other protocols";
const PROTOCOL_FIX: &str = "reject every protocol but TCP and DNS from the sandbox, IPv4 and IPv6: a rule for TCP and UDP alone lets the rest pass";
const RAW_FIX: &str =
    "take CAP_NET_RAW from the sandbox (`--cap-drop NET_RAW`, `capabilities: drop: [ALL]`)";
const FAMILY_FIX: &str = "have a system call filter refuse sockets other than of the internet, unix and netlink: no network namespace stands in the way of these";
/// Numbers of protocols and kinds that not every libc has.
const DCCP: i32 = 33;
const QIPCRTR: i32 = 42;
const SOCK_DCCP: i32 = 6;
const UDPLITE: i32 = 136;
const ECHO: u8 = 8;
const ECHO6: u8 = 128;

pub(super) fn probes() -> Vec<Probe> {
    let four = |ground: &Ground| IpAddr::V4(ground.four);
    let six = |ground: &Ground| IpAddr::V6(ground.six);
    let mut probes = vec![
        echo("icmp", "a ping", four, Type::DGRAM, ECHO),
        echo("icmp.six", "a ping over IPv6", six, Type::DGRAM, ECHO6),
        echo("icmp.raw", "a ping by a raw socket", four, Type::RAW, ECHO),
        echo("icmp.raw.six", "a ping by a raw socket over IPv6", six, Type::RAW, ECHO6),
        raw("raw.ip", "packets of one's own making", libc::IPPROTO_RAW),
        raw("raw.gre", "a GRE tunnel's packets", libc::IPPROTO_GRE),
        raw("raw.ipip", "an IP-in-IP tunnel's packets", libc::IPPROTO_IPIP),
        raw("raw.esp", "IPsec packets", libc::IPPROTO_ESP),
    ];
    for (name, what, kind, protocol) in [
        ("sctp", "SCTP", Type::STREAM, libc::IPPROTO_SCTP),
        ("dccp", "DCCP", Type::from(SOCK_DCCP), DCCP),
        ("udplite", "UDP-Lite", Type::DGRAM, UDPLITE),
    ] {
        probes.push(Probe::new(GROUP, name, what, PROTOCOL_FIX, move |ground| {
            match spoken(SocketAddr::new(ground.four.into(), 80), kind, protocol) {
                Ok(()) => Verdict::Escaped("it was answered".to_owned()),
                Err(error) => Presence::Perhaps.failed(&error),
            }
        }));
    }
    for (name, what, family) in [
        ("family.packet", "frames past the firewall (AF_PACKET)", libc::AF_PACKET),
        ("family.xdp", "frames past the firewall (AF_XDP)", libc::AF_XDP),
        ("family.bluetooth", "the machine's radio (AF_BLUETOOTH)", libc::AF_BLUETOOTH),
        ("family.qipcrtr", "the machine's modem (AF_QIPCRTR)", QIPCRTR),
    ] {
        probes.push(Probe::new(GROUP, name, what, FAMILY_FIX, move |_| {
            match Socket::new(Domain::from(family), Type::RAW, None) {
                Ok(_) => Verdict::Escaped("such a socket can be made".to_owned()),
                Err(error) => Verdict::Blocked(error.to_string()),
            }
        }));
    }
    probes.push(Probe::new(
        GROUP,
        "family.vsock",
        "the host of this virtual machine (AF_VSOCK)",
        FAMILY_FIX,
        |_| vsock(calls::connect_vsock(PATIENCE)),
    ));
    probes.push(Probe::new(
        GROUP,
        "family.other-numbers",
        "the same by another machine's call numbers (x32)",
        FAMILY_FIX,
        |_| vsock(calls::vsock_by_x32()),
    ));
    probes
}

/// Whoever resets a connection is there.
fn vsock(connected: io::Result<()>) -> Verdict {
    match connected {
        Ok(()) => Verdict::Escaped("the host answered".to_owned()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            Verdict::Escaped("the host answered, by a reset".to_owned())
        }
        Err(error) => Verdict::Blocked(error.to_string()),
    }
}

fn echo(
    name: &'static str,
    what: &'static str,
    whom: impl Fn(&Ground) -> IpAddr + Send + Sync + 'static,
    kind: Type,
    request: u8,
) -> Probe {
    Probe::new(GROUP, name, what, PROTOCOL_FIX, move |ground| {
        match answered(SocketAddr::new(whom(ground), 0), kind, request) {
            Ok(()) => Verdict::Escaped("it was answered".to_owned()),
            Err(error) => Presence::Answers.failed(&error),
        }
    })
}

/// Sends an echo request (RFC 792, RFC 4443) and waits for its answer.
fn answered(to: SocketAddr, kind: Type, request: u8) -> io::Result<()> {
    let protocol = if to.is_ipv4() { Protocol::ICMPV4 } else { Protocol::ICMPV6 };
    let socket = Socket::new(Domain::for_address(to), kind, Some(protocol))?;
    socket.connect(&to.into())?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let id = std::process::id() as u16;
    let mut packet =
        [&[request, 0, 0, 0][..], &id.to_be_bytes(), &[0, 1], b"sandbar-doctor"].concat();
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

fn raw(name: &'static str, what: &'static str, protocol: i32) -> Probe {
    Probe::new(GROUP, name, what, RAW_FIX, move |ground| {
        let to = SocketAddr::new(ground.four.into(), 0);
        let sent = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)))
            .and_then(|socket| socket.send_to(&header(ground, protocol), &to.into()));
        match sent {
            Ok(_) => Verdict::Escaped("a raw socket was made, and sent what it liked".to_owned()),
            Err(error) => Verdict::Blocked(error.to_string()),
        }
    })
}

/// What a raw socket sends: a header of its own where it must bring one (RFC 791, section 3.1), of a protocol
/// for experiments (RFC 3692), so that nobody takes it for anything.
fn header(ground: &Ground, protocol: i32) -> Vec<u8> {
    if protocol != libc::IPPROTO_RAW {
        return vec![0; 8];
    }
    let head = [0x45, 0, 0, 20, 0, 0, 0, 0, 64, 253, 0, 0, 0, 0, 0, 0];
    [&head[..], &ground.four.octets()].concat()
}

/// Connects, says a word, and waits for one.
fn spoken(to: SocketAddr, kind: Type, protocol: i32) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(to), kind, Some(Protocol::from(protocol)))?;
    socket.connect_timeout(&to.into(), PATIENCE)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send(b"sandbar-doctor")?;
    socket.recv(&mut [MaybeUninit::uninit(); 512]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // The example of RFC 1071, section 3.
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        assert_eq!(checksum(&[]), 0xffff);
    }
}
