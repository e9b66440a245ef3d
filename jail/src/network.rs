//! The jail's network: one interface, `lo`, to which every address of the world leads, and the sockets at
//! which what leaves arrives. They are made inside and served outside.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use socket2::{Domain, Protocol, Socket, Type};

use super::netlink::{ACKNOWLEDGE, Attribute, CREATE, Message, Netlink};

/// The jail's own addresses. Without one that is not loopback resolvers take the machine for offline, and
/// answers over UDP would not come back.
pub(super) const OWN: Ipv4Addr = Ipv4Addr::new(10, 255, 255, 1);
pub(super) const OWN6: Ipv6Addr = Ipv6Addr::new(0xfd53, 0x616e, 0x6462, 0x6172, 0, 0, 0, 1);
/// Where names are resolved.
pub(super) const DNS_PORT: u16 = 53;
/// Where every other connection is sent. Like the one above it is a port that nobody inside can take.
pub(super) const TCP_PORT: u16 = 1;
/// Connections that wait in the kernel to be accepted.
const BACKLOG: i32 = 4096;
/// The number of `lo`, which is the first interface of every network.
const LO: u32 = 1;

/// Sockets made inside, in the order in which they are handed over.
pub(super) struct Sockets {
    pub(super) dns: Vec<OwnedFd>,
    pub(super) tcp: Vec<OwnedFd>,
}

/// The versions of the protocol that there are inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Versions {
    Both,
    /// The kernel has no IPv6, or it is switched off: then nothing leads anywhere by it.
    Four,
}

/// Brings `lo` up and has every address lead to it.
pub(super) fn raise() -> io::Result<Versions> {
    let mut netlink = Netlink::open(libc::NETLINK_ROUTE)?;
    netlink.ask(vec![up()])?;
    netlink.ask(vec![give(OWN.into())])?;
    netlink.ask(vec![lead_from(OWN.into())])?;
    if netlink.ask(vec![give(OWN6.into())]).is_err() {
        return Ok(Versions::Four);
    }
    netlink.ask(vec![lead_from(OWN6.into())])?;
    Ok(Versions::Both)
}

/// Brings `lo` up and makes every address of IPv4 one of its own: whatever is dialled is answered here or nowhere.
pub(super) fn own_everything() -> io::Result<()> {
    let mut netlink = Netlink::open(libc::NETLINK_ROUTE)?;
    netlink.ask(vec![up()])?;
    netlink.ask(vec![own()])
}

/// Makes the sockets at which everything arrives.
pub(super) fn sockets(versions: Versions) -> io::Result<Sockets> {
    let loopback: &[IpAddr] = match versions {
        Versions::Both => &[IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)],
        Versions::Four => &[IpAddr::V4(Ipv4Addr::LOCALHOST)],
    };
    let mut sockets = Sockets { dns: Vec::new(), tcp: Vec::new() };
    for address in loopback.iter().copied() {
        sockets.dns.push(bound(SocketAddr::new(address, DNS_PORT), Type::DGRAM)?);
        sockets.dns.push(bound(SocketAddr::new(address, DNS_PORT), Type::STREAM)?);
        sockets.tcp.push(bound(SocketAddr::new(address, TCP_PORT), Type::STREAM)?);
    }
    Ok(sockets)
}

fn bound(address: SocketAddr, kind: Type) -> io::Result<OwnedFd> {
    let protocol = if kind == Type::DGRAM { Protocol::UDP } else { Protocol::TCP };
    let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
    socket.bind(&address.into())?;
    if kind == Type::STREAM {
        socket.listen(BACKLOG)?;
    }
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// `struct ifinfomsg`.
fn up() -> Message {
    let up = (libc::IFF_UP as u32).to_ne_bytes();
    let head = [&[0u8; 4][..], &LO.to_ne_bytes(), &up, &up].concat();
    Message::new(libc::RTM_SETLINK, ACKNOWLEDGE, &head)
}

/// `struct ifaddrmsg`.
fn give(address: IpAddr) -> Message {
    let (family, bits) = family(address);
    let head = [&[family, bits, libc::IFA_F_NODAD as u8, 0][..], &LO.to_ne_bytes()].concat();
    Message::new(libc::RTM_NEWADDR, ACKNOWLEDGE | CREATE, &head)
        .with(&Attribute::Bytes(libc::IFA_LOCAL, octets(address)))
        .with(&Attribute::Bytes(libc::IFA_ADDRESS, octets(address)))
}

/// `struct rtmsg`: the default route, by which packets get `address` for their source.
fn lead_from(address: IpAddr) -> Message {
    let (family, _) = family(address);
    let scope = match address {
        IpAddr::V4(_) => libc::RT_SCOPE_LINK,
        IpAddr::V6(_) => libc::RT_SCOPE_UNIVERSE,
    };
    let head = [
        &[family, 0, 0, 0, libc::RT_TABLE_MAIN, libc::RTPROT_BOOT, scope, libc::RTN_UNICAST][..],
        &[0; 4],
    ]
    .concat();
    Message::new(libc::RTM_NEWROUTE, ACKNOWLEDGE | CREATE, &head)
        .with(&Attribute::native(libc::RTA_OIF, LO))
        .with(&Attribute::Bytes(libc::RTA_PREFSRC, octets(address)))
}

/// `struct rtmsg`: every address is local.
fn own() -> Message {
    let (family, table, scope) = (libc::AF_INET as u8, libc::RT_TABLE_LOCAL, libc::RT_SCOPE_HOST);
    let head = [&[family, 0, 0, 0, table, libc::RTPROT_BOOT, scope, libc::RTN_LOCAL][..], &[0; 4]]
        .concat();
    Message::new(libc::RTM_NEWROUTE, ACKNOWLEDGE | CREATE, &head)
        .with(&Attribute::native(libc::RTA_OIF, LO))
}

fn family(address: IpAddr) -> (u8, u8) {
    match address {
        IpAddr::V4(_) => (libc::AF_INET as u8, 32),
        IpAddr::V6(_) => (libc::AF_INET6 as u8, 128),
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}
