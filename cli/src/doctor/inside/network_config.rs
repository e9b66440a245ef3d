//! Changing the network configuration: addresses, routes, interfaces, the firewall, and privileged socket options.
//!
//! The requests name objects that do not exist, so they cannot succeed. The kernel checks the privilege first: without
//! it the error is EPERM, with it ENOENT or similar.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use nix::net::if_::if_nameindex;
use socket2::{Domain, Protocol, Socket, Type};

use super::{InsideProbe, PeerPresence, ProbeTargets, judge_privileged, tcp};
use crate::doctor::probe::ProbeVerdict;
use jail::netlink::{FLAG_ACK, NetlinkAttribute, NetlinkMessage, NetlinkSocket};

const GROUP: &str = "network configuration";
const FIX: &str = "drop CAP_NET_ADMIN from the sandbox (`--cap-drop ALL`), and do not let it share Sandbar's network namespace";
/// Index of an interface that does not exist.
const NO_INTERFACE: u32 = 0x7fff_fffe;
/// An address reserved for documentation (RFC 5737).
const TEST_NET_ADDRESS: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
/// Name of an nftables table that does not exist.
const NO_TABLE: &str = "sandbar-doctor-none";
/// `NFNL_SUBSYS_NFTABLES`, `NFT_MSG_DELTABLE`, and the messages that begin and end a batch.
const NFTABLES: u16 = 10;
const DELETE_TABLE: u16 = NFTABLES << 8 | 2;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
const INET: u8 = 1;
/// A firewall mark, such as exempts Sandbar's own connections from redirects.
const MARK: u32 = 1;

pub(super) fn probes() -> Vec<InsideProbe> {
    let mut probes = Vec::new();
    for (name, what, ask) in [
        ("network.address", "changing addresses", remove_address as fn() -> io::Result<()>),
        ("network.firewall", "flushing the firewall", remove_table),
        ("network.interface", "changing interfaces", remove_interface),
        ("network.neighbour", "changing neighbours", remove_neighbour),
        ("network.route", "changing routes", remove_route),
    ] {
        probes.push(InsideProbe::new(GROUP, name, what, FIX, move |_| {
            judge_privileged(ask(), "the network configuration can be changed")
        }));
    }
    probes.push(InsideProbe::new(GROUP, "network.tun", "creating a network interface (tun)", FIX, |_| {
        match std::fs::File::options().read(true).write(true).open("/dev/net/tun") {
            Ok(_) => match remove_interface() {
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                    ProbeVerdict::Blocked("the device opens, but no interface can be created".to_owned())
                }
                _ => ProbeVerdict::Escaped("an interface can be created".to_owned()),
            },
            Err(error) => ProbeVerdict::Blocked(error.to_string()),
        }
    }));
    probes.push(InsideProbe::new(GROUP, "socket.mark", "setting a firewall mark on packets", FIX, |_| {
        judge_privileged(
            tcp_socket().and_then(|socket| socket.set_mark(MARK)),
            "packets can be marked as Sandbar's own",
        )
    }));
    probes.push(InsideProbe::new(
        GROUP,
        "socket.transparent",
        "a transparent socket with any source address",
        FIX,
        |_| {
            let set = tcp_socket().and_then(|socket| socket.set_ip_transparent_v4(true));
            judge_privileged(set, "connections can use any source address")
        },
    ));
    probes.push(InsideProbe::new(
        GROUP,
        "socket.spoofed",
        "binding to a source address that is not local",
        redirect_fix(),
        probe_spoofed_source,
    ));
    probes.push(InsideProbe::new(
        GROUP,
        "socket.device",
        "binding to each interface",
        redirect_fix(),
        probe_bound_device,
    ));
    probes
}

fn redirect_fix() -> &'static str {
    "redirect by incoming interface instead of source address, and drop forwarded packets"
}

fn tcp_socket() -> io::Result<Socket> {
    Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))
}

fn probe_spoofed_source(targets: &ProbeTargets) -> ProbeVerdict {
    let to = SocketAddr::new(targets.ipv4.into(), 80);
    tcp::probe_connect(targets, to, PeerPresence::Answers, |socket| {
        socket.set_freebind_v4(true)?;
        socket.bind(&SocketAddr::new(TEST_NET_ADDRESS.into(), 0).into())
    })
}

/// Connects through each interface.
fn probe_bound_device(targets: &ProbeTargets) -> ProbeVerdict {
    let Ok(all) = if_nameindex() else {
        return ProbeVerdict::Unknown("the interfaces cannot be listed".to_owned());
    };
    let to = SocketAddr::new(targets.ipv4.into(), 80);
    let tried = all.iter().map(|one| {
        let name = one.name().to_bytes();
        tcp::probe_connect(targets, to, PeerPresence::Answers, |socket| socket.bind_device(Some(name)))
    });
    ProbeVerdict::worst(tried.collect::<Vec<_>>(), "no interface exists")
}

fn send_route(message: NetlinkMessage) -> io::Result<()> {
    NetlinkSocket::open(libc::NETLINK_ROUTE)?.request(vec![message])
}

/// `struct ifaddrmsg`.
fn remove_address() -> io::Result<()> {
    let head = [&[libc::AF_INET as u8, 32, 0, 0][..], &NO_INTERFACE.to_ne_bytes()].concat();
    send_route(
        NetlinkMessage::new(libc::RTM_DELADDR, FLAG_ACK, &head)
            .with(&NetlinkAttribute::Bytes(libc::IFA_LOCAL, TEST_NET_ADDRESS.octets().to_vec())),
    )
}

/// `struct ifinfomsg`.
fn remove_interface() -> io::Result<()> {
    let head = [&[0; 4][..], &NO_INTERFACE.to_ne_bytes(), &[0; 8]].concat();
    send_route(NetlinkMessage::new(libc::RTM_DELLINK, FLAG_ACK, &head))
}

/// `struct ndmsg`.
fn remove_neighbour() -> io::Result<()> {
    let head = [&[libc::AF_INET as u8, 0, 0, 0][..], &NO_INTERFACE.to_ne_bytes(), &[0; 4]].concat();
    send_route(
        NetlinkMessage::new(libc::RTM_DELNEIGH, FLAG_ACK, &head)
            .with(&NetlinkAttribute::Bytes(1, TEST_NET_ADDRESS.octets().to_vec())),
    )
}

/// `struct rtmsg`.
fn remove_route() -> io::Result<()> {
    let head = [&[libc::AF_INET as u8, 32, 0, 0, libc::RT_TABLE_MAIN, 0, 0, 0][..], &[0; 4]].concat();
    send_route(
        NetlinkMessage::new(libc::RTM_DELROUTE, FLAG_ACK, &head)
            .with(&NetlinkAttribute::Bytes(libc::RTA_DST, TEST_NET_ADDRESS.octets().to_vec())),
    )
}

pub(super) fn remove_table() -> io::Result<()> {
    let [high, low] = NFTABLES.to_be_bytes();
    let frame = |kind| NetlinkMessage::new(kind, 0, &[0, 0, high, low]);
    let delete = NetlinkMessage::new(DELETE_TABLE, FLAG_ACK, &[INET, 0, 0, 0])
        .with(&NetlinkAttribute::string(1, NO_TABLE));
    let batch = vec![frame(BATCH_BEGIN), delete, frame(BATCH_END)];
    NetlinkSocket::open(libc::NETLINK_NETFILTER)?.request(batch)
}
