//! A netlink client, as small as the jail and `sandbar doctor` allow: messages with nested attributes, sent to the
//! kernel, each acknowledged or refused. It serves both rtnetlink (`network`) and nftables (`firewall`).
//!
//! It is our own code because of nftables. Of the crates for that, `nftnl` links a C library, `nftables` runs the
//! `nft` program, and `rustables` is licensed under GPL-3.0: none of them fits a static binary without dependencies
//! on the machine and under our licence. The jail loads one fixed ruleset, so this file and the expressions in
//! `firewall` are all that it takes.

use std::io::{self, Read, Write};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

/// Largest response of the kernel to the requests made here.
const MAX_RESPONSE: usize = 64 << 10;
/// The kernel responds at once; the timeout only guards against waiting forever.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// `struct nlmsghdr`.
const HEADER_LEN: usize = 16;

/// A netlink socket that sends one batch of requests at a time.
pub struct NetlinkSocket {
    socket: Socket,
    sequence: u32,
}

impl NetlinkSocket {
    pub fn open(protocol: i32) -> io::Result<Self> {
        let kind = Type::RAW.cloexec();
        let socket = Socket::new(Domain::from(libc::AF_NETLINK), kind, Some(Protocol::from(protocol)))?;
        socket.set_read_timeout(Some(REPLY_TIMEOUT))?;
        Ok(NetlinkSocket { socket, sequence: 0 })
    }

    /// Sends messages in one datagram, and waits for the acknowledgement of each that has [`FLAG_ACK`].
    ///
    /// # Errors
    ///
    /// Returns the first error that the kernel reports.
    pub fn request(&mut self, messages: Vec<NetlinkMessage>) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut pending = 0;
        for message in messages {
            self.sequence += 1;
            pending += usize::from(message.flags & FLAG_ACK != 0);
            bytes.extend(message.encode(self.sequence));
        }
        (&self.socket).write_all(&bytes)?;
        while pending > 0 {
            pending -= self.read_acks()?.min(pending);
        }
        Ok(())
    }

    /// Reads one datagram of responses, and returns how many acknowledgements it has.
    fn read_acks(&self) -> io::Result<usize> {
        let mut buffer = vec![0; MAX_RESPONSE];
        let length = (&self.socket).read(&mut buffer)?;
        let mut rest = buffer.get(..length).unwrap_or_default();
        let mut acks = 0;
        while let Some((length, kind, code)) = parse_response(rest) {
            if kind == libc::NLMSG_ERROR as u16 {
                match code {
                    0 => acks += 1,
                    code => return Err(io::Error::from_raw_os_error(-code)),
                }
            }
            rest = rest.get(align(length)..).unwrap_or_default();
        }
        Ok(acks)
    }
}

/// Returns length, type and error code of the first response in `bytes`; `None` if it is incomplete.
fn parse_response(bytes: &[u8]) -> Option<(usize, u16, i32)> {
    let length = u32::from_ne_bytes(bytes.first_chunk::<4>().copied()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let code = i32::from_ne_bytes(bytes.get(HEADER_LEN..HEADER_LEN + 4)?.try_into().ok()?);
    (length >= HEADER_LEN).then_some((length, kind, code))
}

fn align(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// `NLM_F_REQUEST`.
pub(super) const FLAG_REQUEST: u16 = 1;
/// `NLM_F_ACK`.
pub const FLAG_ACK: u16 = 4;
/// `NLM_F_CREATE | NLM_F_EXCL`.
pub(super) const FLAG_CREATE: u16 = 0x400 | 0x200;
/// `NLM_F_CREATE | NLM_F_APPEND`.
pub(super) const FLAG_APPEND: u16 = 0x400 | 0x800;

/// A request under construction.
pub struct NetlinkMessage {
    kind: u16,
    flags: u16,
    body: Vec<u8>,
}

impl NetlinkMessage {
    /// Starts a message of type `kind`; `head` is the fixed header of its family, such as `struct ifinfomsg`.
    pub fn new(kind: u16, flags: u16, head: &[u8]) -> Self {
        NetlinkMessage { kind, flags: FLAG_REQUEST | flags, body: head.to_vec() }
    }

    pub fn with(mut self, attribute: &NetlinkAttribute) -> Self {
        attribute.encode_into(&mut self.body);
        self
    }

    fn encode(self, sequence: u32) -> Vec<u8> {
        let length = (HEADER_LEN + self.body.len()) as u32;
        let mut bytes = Vec::with_capacity(HEADER_LEN + self.body.len());
        bytes.extend(length.to_ne_bytes());
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend(self.flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.body);
        bytes
    }
}

/// `NLA_F_NESTED`.
const FLAG_NESTED: u16 = 0x8000;

/// A netlink attribute: bytes, or nested attributes.
pub enum NetlinkAttribute {
    Bytes(u16, Vec<u8>),
    Nested(u16, Vec<NetlinkAttribute>),
}

impl NetlinkAttribute {
    pub fn string(kind: u16, text: &str) -> Self {
        NetlinkAttribute::Bytes(kind, text.bytes().chain([0]).collect())
    }

    /// A number in network byte order, as netfilter expects.
    pub(super) fn u32_be(kind: u16, number: u32) -> Self {
        NetlinkAttribute::Bytes(kind, number.to_be_bytes().to_vec())
    }

    /// A number in native byte order, as rtnetlink expects.
    pub(super) fn u32_ne(kind: u16, number: u32) -> Self {
        NetlinkAttribute::Bytes(kind, number.to_ne_bytes().to_vec())
    }

    fn encode_into(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; 4]);
        let kind = match self {
            NetlinkAttribute::Bytes(kind, bytes) => {
                out.extend(bytes);
                *kind
            }
            NetlinkAttribute::Nested(kind, list) => {
                list.iter().for_each(|attribute| attribute.encode_into(out));
                *kind | FLAG_NESTED
            }
        };
        let length = (out.len() - start) as u16;
        let header: Vec<u8> = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        out.splice(start..start + 4, header);
        out.resize(start + align(out.len() - start), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_but_carry_their_unpadded_length() {
        let list = vec![NetlinkAttribute::string(1, "ab"), NetlinkAttribute::u32_be(2, 7)];
        let message =
            NetlinkMessage::new(9, FLAG_ACK, &[1, 2, 3, 4]).with(&NetlinkAttribute::Nested(3, list));
        let bytes = message.encode(5);
        let mut wanted = Vec::new();
        wanted.extend(40u32.to_ne_bytes());
        wanted.extend([9u16.to_ne_bytes(), 5u16.to_ne_bytes()].concat());
        wanted.extend(5u32.to_ne_bytes());
        wanted.extend([0, 0, 0, 0, 1, 2, 3, 4]);
        wanted.extend([20u16.to_ne_bytes(), (3 | FLAG_NESTED).to_ne_bytes()].concat());
        wanted.extend([7u16.to_ne_bytes(), 1u16.to_ne_bytes()].concat());
        wanted.extend(b"ab\0\0");
        wanted.extend([8u16.to_ne_bytes(), 2u16.to_ne_bytes()].concat());
        wanted.extend(7u32.to_be_bytes());
        assert_eq!(bytes, wanted);
    }

    #[test]
    fn a_truncated_response_is_not_parsed() {
        for bytes in [&[][..], &[1, 2], &[0; 16], &[0; 19]] {
            assert!(parse_response(bytes).is_none(), "{bytes:?}");
        }
    }

    #[test]
    fn an_error_of_the_kernel_is_returned() {
        let mut netlink = NetlinkSocket::open(libc::NETLINK_ROUTE).unwrap();
        // No interface has this index.
        let head = [&[0u8; 4][..], &u32::MAX.to_ne_bytes(), &[0; 8]].concat();
        let result = netlink.request(vec![NetlinkMessage::new(libc::RTM_SETLINK, FLAG_ACK, &head)]);
        assert!(result.is_err());
    }
}
