//! The jail's network: one interface, `lo`, to which every address of the world leads, and the sockets at
//! which what leaves arrives. They are made inside and served outside.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use socket2::{Domain, Protocol, Socket, Type};

use super::netlink::{FLAG_ACK, FLAG_CREATE, NetlinkAttribute, NetlinkMessage, NetlinkSocket};

/// The jail's own addresses. Without one that is not loopback resolvers take the machine for offline, and
/// answers over UDP would not come back.
pub(super) const JAIL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 255, 255, 1);
pub(super) const JAIL_ADDRESS6: Ipv6Addr =
    Ipv6Addr::new(0xfd53, 0x616e, 0x6462, 0x6172, 0, 0, 0, 1);
/// Where names are resolved.
pub(super) const DNS_PORT: u16 = 53;
/// Where every other connection is sent. Like the one above it is a port that nobody inside can take.
pub(super) const TCP_PORT: u16 = 1;
/// Connections that wait in the kernel to be accepted.
const BACKLOG: i32 = 4096;
/// The number of `lo`, which is the first interface of every network.
const LO_INDEX: u32 = 1;

/// Sockets made inside, in the order in which they are handed over.
pub(super) struct BoundSockets {
    pub(super) dns: Vec<OwnedFd>,
    pub(super) tcp: Vec<OwnedFd>,
}

/// The versions of the protocol that there are inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IpVersions {
    Both,
    /// The kernel has no IPv6, or it is switched off: then nothing leads anywhere by it.
    Four,
}

/// Brings `lo` up and has every address lead to it.
pub(super) fn set_up_loopback() -> io::Result<IpVersions> {
    let mut netlink = NetlinkSocket::open(libc::NETLINK_ROUTE)?;
    netlink.request(vec![link_up_message()])?;
    netlink.request(vec![add_address_message(JAIL_ADDRESS.into())])?;
    netlink.request(vec![default_route_message(JAIL_ADDRESS.into())])?;
    if netlink.request(vec![add_address_message(JAIL_ADDRESS6.into())]).is_err() {
        return Ok(IpVersions::Four);
    }
    netlink.request(vec![default_route_message(JAIL_ADDRESS6.into())])?;
    Ok(IpVersions::Both)
}

/// Brings `lo` up and makes every address of IPv4 one of its own: whatever is dialled is answered here or nowhere.
pub(super) fn claim_all_addresses() -> io::Result<()> {
    let mut netlink = NetlinkSocket::open(libc::NETLINK_ROUTE)?;
    netlink.request(vec![link_up_message()])?;
    netlink.request(vec![local_route_message()])
}

/// Makes the sockets at which everything arrives.
pub(super) fn bind_sockets(versions: IpVersions) -> io::Result<BoundSockets> {
    let loopback: &[IpAddr] = match versions {
        IpVersions::Both => &[IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)],
        IpVersions::Four => &[IpAddr::V4(Ipv4Addr::LOCALHOST)],
    };
    let mut sockets = BoundSockets { dns: Vec::new(), tcp: Vec::new() };
    for address in loopback.iter().copied() {
        sockets.dns.push(bind_socket(SocketAddr::new(address, DNS_PORT), Type::DGRAM)?);
        sockets.dns.push(bind_socket(SocketAddr::new(address, DNS_PORT), Type::STREAM)?);
        sockets.tcp.push(bind_socket(SocketAddr::new(address, TCP_PORT), Type::STREAM)?);
    }
    Ok(sockets)
}

fn bind_socket(address: SocketAddr, kind: Type) -> io::Result<OwnedFd> {
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
fn link_up_message() -> NetlinkMessage {
    let up = (libc::IFF_UP as u32).to_ne_bytes();
    let head = [&[0u8; 4][..], &LO_INDEX.to_ne_bytes(), &up, &up].concat();
    NetlinkMessage::new(libc::RTM_SETLINK, FLAG_ACK, &head)
}

/// `struct ifaddrmsg`.
fn add_address_message(address: IpAddr) -> NetlinkMessage {
    let (family, bits) = address_family(address);
    let head = [&[family, bits, libc::IFA_F_NODAD as u8, 0][..], &LO_INDEX.to_ne_bytes()].concat();
    NetlinkMessage::new(libc::RTM_NEWADDR, FLAG_ACK | FLAG_CREATE, &head)
        .with(&NetlinkAttribute::Bytes(libc::IFA_LOCAL, octets(address)))
        .with(&NetlinkAttribute::Bytes(libc::IFA_ADDRESS, octets(address)))
}

/// `struct rtmsg`: the default route, by which packets get `address` for their source.
fn default_route_message(address: IpAddr) -> NetlinkMessage {
    let (family, _) = address_family(address);
    let scope = match address {
        IpAddr::V4(_) => libc::RT_SCOPE_LINK,
        IpAddr::V6(_) => libc::RT_SCOPE_UNIVERSE,
    };
    let head = [
        &[family, 0, 0, 0, libc::RT_TABLE_MAIN, libc::RTPROT_BOOT, scope, libc::RTN_UNICAST][..],
        &[0; 4],
    ]
    .concat();
    NetlinkMessage::new(libc::RTM_NEWROUTE, FLAG_ACK | FLAG_CREATE, &head)
        .with(&NetlinkAttribute::u32_ne(libc::RTA_OIF, LO_INDEX))
        .with(&NetlinkAttribute::Bytes(libc::RTA_PREFSRC, octets(address)))
}

/// `struct rtmsg`: every address is local.
fn local_route_message() -> NetlinkMessage {
    let (family, table, scope) = (libc::AF_INET as u8, libc::RT_TABLE_LOCAL, libc::RT_SCOPE_HOST);
    let head = [&[family, 0, 0, 0, table, libc::RTPROT_BOOT, scope, libc::RTN_LOCAL][..], &[0; 4]]
        .concat();
    NetlinkMessage::new(libc::RTM_NEWROUTE, FLAG_ACK | FLAG_CREATE, &head)
        .with(&NetlinkAttribute::u32_ne(libc::RTA_OIF, LO_INDEX))
}

fn address_family(address: IpAddr) -> (u8, u8) {
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
