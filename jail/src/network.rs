//! The jail's network, set up by init: one interface, `lo`, to which every route leads, and the listening sockets
//! that receive all traffic. Init binds them inside the jail; the proxy serves them from outside.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use socket2::{Domain, Protocol, Socket, Type};

use super::netlink::{FLAG_ACK, FLAG_CREATE, NetlinkAttribute, NetlinkMessage, NetlinkSocket};

/// Addresses of the jail. It needs one that is not loopback: without it, stub resolvers consider the machine offline
/// and UDP replies do not come back.
pub(super) const JAIL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 255, 255, 1);
pub(super) const JAIL_ADDRESS6: Ipv6Addr = Ipv6Addr::new(0xfd53, 0x616e, 0x6462, 0x6172, 0, 0, 0, 1);
/// Port of the DNS listeners.
pub(super) const DNS_PORT: u16 = 53;
/// Port that every TCP connection is redirected to. Both ports are privileged, so the command cannot bind them.
pub(super) const TCP_PORT: u16 = 1;
/// Connections that the kernel queues until they are accepted.
const BACKLOG: i32 = 4096;
/// Index of `lo`, the first interface of every network namespace.
const LO_INDEX: u32 = 1;

/// Sockets bound inside, in the order in which init passes them to the proxy.
pub(super) struct BoundSockets {
    pub(super) dns: Vec<OwnedFd>,
    pub(super) tcp: Vec<OwnedFd>,
}

/// The IP versions available inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IpVersions {
    Both,
    /// The kernel has no IPv6, or it is disabled: there is no IPv6 route then.
    Four,
}

/// Brings `lo` up and adds default routes through it. Runs in init.
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

/// Brings `lo` up and makes every IPv4 address a local one, so no connection can leave. Runs in `sandbar demo`.
pub(super) fn claim_all_addresses() -> io::Result<()> {
    let mut netlink = NetlinkSocket::open(libc::NETLINK_ROUTE)?;
    netlink.request(vec![link_up_message()])?;
    netlink.request(vec![local_route_message()])
}

/// Binds the listening sockets that receive the jail's traffic. Runs in init.
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

/// `struct rtmsg`: the default route, which gives packets `address` as their source.
fn default_route_message(address: IpAddr) -> NetlinkMessage {
    let (family, _) = address_family(address);
    let scope = match address {
        IpAddr::V4(_) => libc::RT_SCOPE_LINK,
        IpAddr::V6(_) => libc::RT_SCOPE_UNIVERSE,
    };
    let head =
        [&[family, 0, 0, 0, libc::RT_TABLE_MAIN, libc::RTPROT_BOOT, scope, libc::RTN_UNICAST][..], &[0; 4]]
            .concat();
    NetlinkMessage::new(libc::RTM_NEWROUTE, FLAG_ACK | FLAG_CREATE, &head)
        .with(&NetlinkAttribute::u32_ne(libc::RTA_OIF, LO_INDEX))
        .with(&NetlinkAttribute::Bytes(libc::RTA_PREFSRC, octets(address)))
}

/// `struct rtmsg`: every address is local.
fn local_route_message() -> NetlinkMessage {
    let (family, table, scope) = (libc::AF_INET as u8, libc::RT_TABLE_LOCAL, libc::RT_SCOPE_HOST);
    let head = [&[family, 0, 0, 0, table, libc::RTPROT_BOOT, scope, libc::RTN_LOCAL][..], &[0; 4]].concat();
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
