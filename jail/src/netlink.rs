//! Netlink, as much of it as a jail and its examination need: messages with nested attributes, sent to the kernel, each
//! acknowledged or refused.

use std::io::{self, Read, Write};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

/// Largest answer of the kernel to anything that is asked here.
const MAX_RESPONSE: usize = 64 << 10;
/// The kernel answers at once; whoever waits longer waits for nothing.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// `struct nlmsghdr`.
const HEADER_LEN: usize = 16;

/// Asks the kernel one thing after the other.
pub struct NetlinkSocket {
    socket: Socket,
    sequence: u32,
}

impl NetlinkSocket {
    pub fn open(protocol: i32) -> io::Result<Self> {
        let kind = Type::RAW.cloexec();
        let socket =
            Socket::new(Domain::from(libc::AF_NETLINK), kind, Some(Protocol::from(protocol)))?;
        socket.set_read_timeout(Some(REPLY_TIMEOUT))?;
        Ok(NetlinkSocket { socket, sequence: 0 })
    }

    /// Sends messages as one, and waits until the kernel has taken each that wants to be acknowledged.
    ///
    /// # Errors
    ///
    /// Returns the first refusal.
    pub fn request(&mut self, messages: Vec<NetlinkMessage>) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut owed = 0;
        for message in messages {
            self.sequence += 1;
            owed += usize::from(message.flags & FLAG_ACK != 0);
            bytes.extend(message.encode(self.sequence));
        }
        (&self.socket).write_all(&bytes)?;
        while owed > 0 {
            owed -= self.read_acks()?.min(owed);
        }
        Ok(())
    }

    /// Reads one datagram of answers; how many were good.
    fn read_acks(&self) -> io::Result<usize> {
        let mut buffer = vec![0; MAX_RESPONSE];
        let length = (&self.socket).read(&mut buffer)?;
        let mut rest = buffer.get(..length).unwrap_or_default();
        let mut good = 0;
        while let Some((length, kind, code)) = parse_response(rest) {
            if kind == libc::NLMSG_ERROR as u16 {
                match code {
                    0 => good += 1,
                    code => return Err(io::Error::from_raw_os_error(-code)),
                }
            }
            rest = rest.get(align(length)..).unwrap_or_default();
        }
        Ok(good)
    }
}

/// Length, type and first number of the answer that `bytes` begin with.
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

/// One message on its way to being sent.
pub struct NetlinkMessage {
    kind: u16,
    flags: u16,
    body: Vec<u8>,
}

impl NetlinkMessage {
    /// `head` is the fixed part that every message of its family begins with.
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

/// A typed value, or a list of such.
pub enum NetlinkAttribute {
    Bytes(u16, Vec<u8>),
    Nested(u16, Vec<NetlinkAttribute>),
}

impl NetlinkAttribute {
    pub fn string(kind: u16, text: &str) -> Self {
        NetlinkAttribute::Bytes(kind, text.bytes().chain([0]).collect())
    }

    /// A number in the order of the network, as netfilter has it.
    pub(super) fn u32_be(kind: u16, number: u32) -> Self {
        NetlinkAttribute::Bytes(kind, number.to_be_bytes().to_vec())
    }

    /// A number in the order of this machine, as routing has it.
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
    fn attributes_are_padded_but_say_their_true_length() {
        let list = vec![NetlinkAttribute::string(1, "ab"), NetlinkAttribute::u32_be(2, 7)];
        let message = NetlinkMessage::new(9, FLAG_ACK, &[1, 2, 3, 4])
            .with(&NetlinkAttribute::Nested(3, list));
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
    fn answers_that_are_cut_off_are_none() {
        for bytes in [&[][..], &[1, 2], &[0; 16], &[0; 19]] {
            assert!(parse_response(bytes).is_none(), "{bytes:?}");
        }
    }

    #[test]
    fn the_kernel_refuses_in_numbers() {
        let mut netlink = NetlinkSocket::open(libc::NETLINK_ROUTE).unwrap();
        // No interface has this number.
        let head = [&[0u8; 4][..], &u32::MAX.to_ne_bytes(), &[0; 8]].concat();
        let refused =
            netlink.request(vec![NetlinkMessage::new(libc::RTM_SETLINK, FLAG_ACK, &head)]);
        assert!(refused.is_err());
    }
}
