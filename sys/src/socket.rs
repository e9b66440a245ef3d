//! Socket options of packets and connections: interface, firewall mark, original destination.

use std::ffi::{CStr, c_int};
use std::io;
use std::mem::{size_of, size_of_val};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Since Linux 5.19; not every libc has it.
const SO_RCVMARK: c_int = 75;
/// The packet information option of RFC 2292, which also works for accepted TCP connections.
const IPV6_2292PKTOPTIONS: c_int = 6;

/// Makes the kernel report the destination address and interface of each packet.
pub fn enable_packet_info(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    match address {
        SocketAddr::V4(_) => enable_option(socket, libc::IPPROTO_IP, libc::IP_PKTINFO),
        SocketAddr::V6(_) => enable_option(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    }
}

/// Makes the kernel report the firewall mark of each packet.
pub fn enable_packet_mark(socket: BorrowedFd<'_>) -> io::Result<()> {
    enable_option(socket, libc::SOL_SOCKET, SO_RCVMARK)
}

/// What decides which of the sockets that share a port (`SO_REUSEPORT`) receives a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SteerKey {
    Interface,
    Mark,
    SourceAddress,
}

/// Makes the kernel choose among the first `sockets` sockets that share this one's port by `key`, rather than by a hash
/// that includes the source port: all packets with one key then wait in one queue, and fill no other.
pub fn steer_packets(
    socket: BorrowedFd<'_>,
    local: SocketAddr,
    key: SteerKey,
    sockets: u32,
) -> io::Result<()> {
    // Offsets that the kernel understands as "ancillary data" and "from the network header", see bpf(2) and
    // <linux/filter.h>; they are negative, and the field is unsigned.
    const ANCILLARY: u32 = -0x1000_i32 as u32;
    const NETWORK: u32 = -0x10_0000_i32 as u32;
    const SKF_AD_IFINDEX: u32 = 8;
    const SKF_AD_MARK: u32 = 20;
    let step = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load = |offset: u32| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let mut program = match (key, local) {
        (SteerKey::Interface, _) => vec![load(ANCILLARY.wrapping_add(SKF_AD_IFINDEX))],
        (SteerKey::Mark, _) => vec![load(ANCILLARY.wrapping_add(SKF_AD_MARK))],
        (SteerKey::SourceAddress, SocketAddr::V4(_)) => vec![load(NETWORK.wrapping_add(12))],
        (SteerKey::SourceAddress, SocketAddr::V6(_)) => {
            let words = [8, 12, 16, 20].map(|at| load(NETWORK.wrapping_add(at)));
            let [first, rest @ ..] = words;
            let fold = rest.into_iter().flat_map(|word| {
                let keep = step(libc::BPF_MISC | libc::BPF_TAX, 0);
                [keep, word, step(libc::BPF_ALU | libc::BPF_XOR | libc::BPF_X, 0)]
            });
            std::iter::once(first).chain(fold).collect()
        }
    };
    program.push(step(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, sockets.max(1)));
    program.push(step(libc::BPF_RET | libc::BPF_A, 0));
    let length = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len: length, filter: program.as_mut_ptr() };
    // SAFETY: `program` is a live local that points to `length` instructions, which the kernel copies.
    let attached = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if attached == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets the socket accept traffic for addresses that are not local, and reply from them
/// (`IP_TRANSPARENT`). Only TPROXY redirection needs it, which needs the same privilege.
pub fn enable_transparent(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    let (level, option) = match address {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TRANSPARENT),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT),
    };
    enable_option(socket, level, option)
}

/// Returns the destination of an accepted connection before the firewall redirected it.
pub fn original_dst(socket: BorrowedFd<'_>, local: SocketAddr) -> io::Result<SocketAddr> {
    let level = match local {
        SocketAddr::V4(_) => libc::SOL_IP,
        SocketAddr::V6(_) => libc::SOL_IPV6,
    };
    let fill = |storage: *mut socket2::SockAddrStorage, length: *mut _| {
        // SAFETY: `try_init` passes storage for any address and the length of that storage.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                level,
                libc::SO_ORIGINAL_DST, // the same number for both families
                storage.cast(),
                length,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: if `fill` succeeds, the kernel has written an address of the socket's family.
    let ((), address) = unsafe { socket2::SockAddr::try_init(fill)? };
    address.as_socket().ok_or_else(|| io::Error::other("not an IP address"))
}

/// Returns the firewall mark of an accepted connection (needs the sysctl `tcp_fwmark_accept`).
pub fn socket_mark(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut mark = 0u32;
    let mut length = size_of::<u32>() as libc::socklen_t;
    // SAFETY: both pointers are to live locals, and `length` is the size of `mark`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MARK,
            (&raw mut mark).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(mark) } else { Err(io::Error::last_os_error()) }
}

/// Returns the index of the interface on which an accepted connection arrived.
pub fn arrival_interface(socket: BorrowedFd<'_>, local: SocketAddr) -> io::Result<u32> {
    let mut control = [0u64; 32]; // `u64` for the alignment of a control message header
    let mut length = size_of_val(&control) as libc::socklen_t;
    let (level, option) = match local {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_PKTOPTIONS),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, IPV6_2292PKTOPTIONS),
    };
    // SAFETY: both pointers are to live locals, and `length` is the size of `control`.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, control.as_mut_ptr().cast(), &raw mut length)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut header = empty_header();
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = length as usize;
    let info = read_packet_info(&header);
    info.interface.ok_or_else(|| io::Error::other("the kernel does not report the interface"))
}

/// Returns the name of an interface.
pub fn interface_name(index: u32) -> io::Result<String> {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: `name` has the `IF_NAMESIZE` bytes that the call may write.
    let result = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    if result.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so `name` holds a NUL-terminated string.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

/// The control messages of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketInfo {
    /// The destination address.
    pub to: Option<std::net::IpAddr>,
    pub interface: Option<u32>,
    pub mark: Option<u32>,
}

/// Reads the control messages that the kernel wrote into the control buffer of `header`.
pub(crate) fn read_packet_info(header: &libc::msghdr) -> PacketInfo {
    let mut packet = PacketInfo::default();
    // SAFETY: `header` describes a live control buffer that the kernel filled in, so the `CMSG`
    // macros stay within it, and each type below has the payload that the kernel defines for it.
    // Payloads may be unaligned, hence `read_unaligned`.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while !message.is_null() {
            let data = libc::CMSG_DATA(message);
            match ((*message).cmsg_level, (*message).cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info: libc::in_pktinfo = data.cast::<libc::in_pktinfo>().read_unaligned();
                    packet.interface = u32::try_from(info.ipi_ifindex).ok();
                    let octets = info.ipi_addr.s_addr.to_ne_bytes();
                    packet.to = Some(std::net::Ipv4Addr::from(octets).into());
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO | 2) => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    packet.interface = Some(info.ipi6_ifindex);
                    packet.to = Some(std::net::Ipv6Addr::from(info.ipi6_addr.s6_addr).into());
                }
                (libc::SOL_SOCKET, libc::SO_MARK) => {
                    packet.mark = Some(data.cast::<u32>().read_unaligned());
                }
                _ => {}
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
    packet
}

pub(crate) fn empty_header() -> libc::msghdr {
    // SAFETY: `msghdr` consists of integers and raw pointers, so all zeros is a valid value.
    unsafe { std::mem::zeroed() }
}

fn enable_option(socket: BorrowedFd<'_>, level: c_int, option: c_int) -> io::Result<()> {
    let on: c_int = 1;
    // SAFETY: the pointer is to a live local of the size passed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const on).cast(),
            size_of::<c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
