//! Batched UDP: one system call receives or sends many datagrams, each with its packet information.

use std::io;
use std::mem::size_of;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

use socket2::SockAddr;

use crate::socket::{PacketInfo, empty_header, read_packet_info};

/// Datagrams per system call.
pub const BATCH: usize = 32;
/// Longest datagram to receive; a longer one is reported as empty.
pub const DATAGRAM_BYTES: usize = 1232;

/// Room for the control messages of one datagram; `u64` for the alignment of their header.
type ControlBuffer = [u64; 16];

/// Reusable buffers for one batch.
pub struct DatagramBatch {
    buffers: Vec<[u8; DATAGRAM_BYTES]>,
    controls: Vec<ControlBuffer>,
    sources: Vec<libc::sockaddr_storage>,
    slices: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    received: usize,
}

// SAFETY: the pointers in `headers` and `slices` point into heap buffers that the other fields own.
// Moving the batch to another thread moves that ownership along and leaves the buffers in place.
unsafe impl Send for DatagramBatch {}

/// One datagram of a batch.
pub struct Datagram<'a> {
    pub bytes: &'a [u8],
    pub source: SocketAddr,
    pub seen: PacketInfo,
}

/// A datagram to send; `from` is the address the peer sent its query to.
pub struct OutgoingDatagram {
    pub bytes: Vec<u8>,
    pub to: SocketAddr,
    pub from: Option<IpAddr>,
    pub interface: Option<u32>,
}

impl Default for DatagramBatch {
    fn default() -> Self {
        let mut batch = DatagramBatch {
            buffers: vec![[0; DATAGRAM_BYTES]; BATCH],
            controls: vec![[0; 16]; BATCH],
            sources: vec![empty_address(); BATCH],
            slices: Vec::with_capacity(BATCH),
            headers: Vec::with_capacity(BATCH),
            received: BATCH, // so that the first `reset_headers` fills in all headers
        };
        let slice = |buffer: &mut [u8; DATAGRAM_BYTES]| libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: DATAGRAM_BYTES,
        };
        batch.slices.extend(batch.buffers.iter_mut().map(slice));
        let none = libc::mmsghdr { msg_hdr: empty_header(), msg_len: 0 };
        batch.headers.resize(BATCH, none);
        batch
    }
}

impl DatagramBatch {
    /// Receives what has arrived, without blocking.
    ///
    /// A batch that is not full has drained the socket. It returns [`io::ErrorKind::WouldBlock`] then,
    /// which saves the caller another system call to find that out.
    pub fn drain(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        match self.receive(socket)? {
            BATCH => Ok(()),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.reset_headers();
        // SAFETY: every header points at an iovec, a source address and a control buffer of this
        // batch, with their true lengths. No vector is resized, so none of them moves.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                self.headers.len() as libc::c_uint,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        self.received = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        Ok(self.received)
    }

    /// Restores the headers that the kernel wrote to in the last batch.
    fn reset_headers(&mut self) {
        let buffers = self.controls.iter_mut().zip(&mut self.sources).zip(&mut self.slices);
        let written = self.headers.iter_mut().zip(buffers).take(self.received);
        for (header, ((control, source), slice)) in written {
            let header = &mut header.msg_hdr;
            header.msg_name = (&raw mut *source).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_iov = slice;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = size_of::<ControlBuffer>();
            header.msg_flags = 0;
        }
        self.received = 0;
    }

    /// Returns the datagrams of the last batch. One that did not fit its buffer has no bytes.
    pub fn datagrams(&self) -> impl Iterator<Item = Datagram<'_>> {
        let parts = self.headers.iter().zip(&self.buffers).zip(&self.sources).take(self.received);
        parts.filter_map(|((header, buffer), source)| {
            let truncated = header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
            let bytes = buffer.get(..header.msg_len as usize);
            let bytes = bytes.filter(|_| !truncated).unwrap_or_default();
            let source = socket_address(source)?;
            Some(Datagram { bytes, source, seen: read_packet_info(&header.msg_hdr) })
        })
    }
}

fn empty_address() -> libc::sockaddr_storage {
    // SAFETY: `sockaddr_storage` consists of integers, so all zeros is a valid value.
    unsafe { std::mem::zeroed() }
}

fn socket_address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let from = (&raw const *storage).cast::<libc::sockaddr_in6>();
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the storage holds a `sockaddr_in`, as its family says, and is larger than one.
            let v4 = unsafe { from.cast::<libc::sockaddr_in>().read_unaligned() };
            let octets = v4.sin_addr.s_addr.to_ne_bytes();
            Some(SocketAddr::from((octets, u16::from_be(v4.sin_port))))
        }
        libc::AF_INET6 => {
            // SAFETY: the storage holds a `sockaddr_in6`, as its family says, and is larger than one.
            let v6 = unsafe { from.read_unaligned() };
            let (ip, port) = (v6.sin6_addr.s6_addr.into(), u16::from_be(v6.sin6_port));
            let scope = v6.sin6_scope_id; // needed to reply to a link-local address
            Some(SocketAddr::V6(std::net::SocketAddrV6::new(ip, port, 0, scope)))
        }
        _ => None,
    }
}

/// Sends without blocking. A datagram that the kernel does not accept now is lost, as UDP allows.
pub fn send_datagrams(socket: BorrowedFd<'_>, all: &[OutgoingDatagram]) {
    for some in all.chunks(BATCH) {
        let mut rest = some;
        while !rest.is_empty() {
            match send_batch(socket, rest) {
                Ok(0) | Err(_) => rest = rest.get(1..).unwrap_or_default(), // skip the one that failed
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
            }
        }
    }
}

fn send_batch(socket: BorrowedFd<'_>, some: &[OutgoingDatagram]) -> io::Result<usize> {
    let targets: Vec<SockAddr> = some.iter().map(|one| SockAddr::from(one.to)).collect();
    let mut controls = vec![[0u64; 8]; some.len()];
    let mut slices: Vec<libc::iovec> = some
        .iter()
        .map(|one| libc::iovec { iov_base: one.bytes.as_ptr().cast_mut().cast(), iov_len: one.bytes.len() })
        .collect();
    let parts = some.iter().zip(&targets).zip(&mut controls).zip(&mut slices);
    let mut headers: Vec<libc::mmsghdr> = parts
        .map(|(((one, target), control), slice)| {
            let mut header = empty_header();
            header.msg_name = target.as_ptr().cast_mut().cast();
            header.msg_namelen = target.len();
            header.msg_iov = slice;
            header.msg_iovlen = 1;
            set_source_address(&mut header, control, one);
            libc::mmsghdr { msg_hdr: header, msg_len: 0 }
        })
        .collect();
    // SAFETY: every header points at an address, an iovec and a control buffer that outlive the call,
    // with their true lengths. `sendmmsg` reads them and writes only `msg_len` of each header.
    let count = unsafe {
        libc::sendmmsg(
            socket.as_raw_fd(),
            headers.as_mut_ptr(),
            headers.len() as libc::c_uint,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Sets the source address of a datagram, so that a reply comes from the address the query went to.
fn set_source_address(header: &mut libc::msghdr, control: &mut [u64; 8], one: &OutgoingDatagram) {
    let Some(from) = one.from else { return };
    let index = one.interface.unwrap_or_default();
    header.msg_control = control.as_mut_ptr().cast();
    match from {
        IpAddr::V4(address) => {
            let address = libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) };
            // Interface 0 leaves the choice to the routing table, as for any reply.
            let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: address, ipi_addr: address };
            put_control_message(header, libc::IPPROTO_IP, libc::IP_PKTINFO, info);
        }
        IpAddr::V6(address) => {
            let scoped = address.is_unicast_link_local();
            let info = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr { s6_addr: address.octets() },
                ipi6_ifindex: if scoped { index } else { 0 },
            };
            put_control_message(header, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
        }
    }
}

fn put_control_message<T>(header: &mut libc::msghdr, level: i32, kind: i32, data: T) {
    let length = size_of::<T>() as libc::c_uint;
    // SAFETY: the control buffer has 64 bytes, more than `CMSG_SPACE` of either type, so the header
    // and the payload fit. `CMSG_DATA` may be unaligned for `T`, hence `write_unaligned`.
    unsafe {
        header.msg_controllen = libc::CMSG_SPACE(length) as usize;
        let message = libc::CMSG_FIRSTHDR(header);
        if message.is_null() {
            return;
        }
        (*message).cmsg_level = level;
        (*message).cmsg_type = kind;
        (*message).cmsg_len = libc::CMSG_LEN(length) as usize;
        libc::CMSG_DATA(message).cast::<T>().write_unaligned(data);
    }
}
