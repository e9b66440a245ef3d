//! Netlink, as much of it as a jail and its examination need: messages with nested attributes, sent to the kernel, each
//! acknowledged or refused.

use std::io::{self, Read, Write};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

/// Largest answer of the kernel to anything that is asked here.
const ANSWER: usize = 64 << 10;
/// The kernel answers at once; whoever waits longer waits for nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// `struct nlmsghdr`.
const HEADER: usize = 16;

/// Asks the kernel one thing after the other.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    pub fn open(protocol: i32) -> io::Result<Self> {
        let kind = Type::RAW.cloexec();
        let socket =
            Socket::new(Domain::from(libc::AF_NETLINK), kind, Some(Protocol::from(protocol)))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Netlink { socket, sequence: 0 })
    }

    /// Sends messages as one, and waits until the kernel has taken each that wants to be acknowledged.
    ///
    /// # Errors
    ///
    /// Returns the first refusal.
    pub fn ask(&mut self, messages: Vec<Message>) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut owed = 0;
        for message in messages {
            self.sequence += 1;
            owed += usize::from(message.flags & ACKNOWLEDGE != 0);
            bytes.extend(message.finish(self.sequence));
        }
        (&self.socket).write_all(&bytes)?;
        while owed > 0 {
            owed -= self.answers()?.min(owed);
        }
        Ok(())
    }

    /// Reads one datagram of answers; how many were good.
    fn answers(&self) -> io::Result<usize> {
        let mut buffer = vec![0; ANSWER];
        let length = (&self.socket).read(&mut buffer)?;
        let mut rest = buffer.get(..length).unwrap_or_default();
        let mut good = 0;
        while let Some((length, kind, code)) = answer(rest) {
            if kind == libc::NLMSG_ERROR as u16 {
                match code {
                    0 => good += 1,
                    code => return Err(io::Error::from_raw_os_error(-code)),
                }
            }
            rest = rest.get(aligned(length)..).unwrap_or_default();
        }
        Ok(good)
    }
}

/// Length, type and first number of the answer that `bytes` begin with.
fn answer(bytes: &[u8]) -> Option<(usize, u16, i32)> {
    let length = u32::from_ne_bytes(bytes.first_chunk::<4>().copied()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let code = i32::from_ne_bytes(bytes.get(HEADER..HEADER + 4)?.try_into().ok()?);
    (length >= HEADER).then_some((length, kind, code))
}

fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// `NLM_F_REQUEST`.
pub(super) const REQUEST: u16 = 1;
/// `NLM_F_ACK`.
pub const ACKNOWLEDGE: u16 = 4;
/// `NLM_F_CREATE | NLM_F_EXCL`.
pub(super) const CREATE: u16 = 0x400 | 0x200;
/// `NLM_F_CREATE | NLM_F_APPEND`.
pub(super) const APPEND: u16 = 0x400 | 0x800;

/// One message on its way to being sent.
pub struct Message {
    kind: u16,
    flags: u16,
    body: Vec<u8>,
}

impl Message {
    /// `head` is the fixed part that every message of its family begins with.
    pub fn new(kind: u16, flags: u16, head: &[u8]) -> Self {
        Message { kind, flags: REQUEST | flags, body: head.to_vec() }
    }

    pub fn with(mut self, attribute: &Attribute) -> Self {
        attribute.write(&mut self.body);
        self
    }

    fn finish(self, sequence: u32) -> Vec<u8> {
        let length = (HEADER + self.body.len()) as u32;
        let mut bytes = Vec::with_capacity(HEADER + self.body.len());
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
const NESTED: u16 = 0x8000;

/// A typed value, or a list of such.
pub enum Attribute {
    Bytes(u16, Vec<u8>),
    Nested(u16, Vec<Attribute>),
}

impl Attribute {
    pub fn text(kind: u16, text: &str) -> Self {
        Attribute::Bytes(kind, text.bytes().chain([0]).collect())
    }

    /// A number in the order of the network, as netfilter has it.
    pub(super) fn number(kind: u16, number: u32) -> Self {
        Attribute::Bytes(kind, number.to_be_bytes().to_vec())
    }

    /// A number in the order of this machine, as routing has it.
    pub(super) fn native(kind: u16, number: u32) -> Self {
        Attribute::Bytes(kind, number.to_ne_bytes().to_vec())
    }

    fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; 4]);
        let kind = match self {
            Attribute::Bytes(kind, bytes) => {
                out.extend(bytes);
                *kind
            }
            Attribute::Nested(kind, list) => {
                list.iter().for_each(|attribute| attribute.write(out));
                *kind | NESTED
            }
        };
        let length = (out.len() - start) as u16;
        let header: Vec<u8> = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        out.splice(start..start + 4, header);
        out.resize(start + aligned(out.len() - start), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_but_say_their_true_length() {
        let list = vec![Attribute::text(1, "ab"), Attribute::number(2, 7)];
        let message = Message::new(9, ACKNOWLEDGE, &[1, 2, 3, 4]).with(&Attribute::Nested(3, list));
        let bytes = message.finish(5);
        let mut wanted = Vec::new();
        wanted.extend(40u32.to_ne_bytes());
        wanted.extend([9u16.to_ne_bytes(), 5u16.to_ne_bytes()].concat());
        wanted.extend(5u32.to_ne_bytes());
        wanted.extend([0, 0, 0, 0, 1, 2, 3, 4]);
        wanted.extend([20u16.to_ne_bytes(), (3 | NESTED).to_ne_bytes()].concat());
        wanted.extend([7u16.to_ne_bytes(), 1u16.to_ne_bytes()].concat());
        wanted.extend(b"ab\0\0");
        wanted.extend([8u16.to_ne_bytes(), 2u16.to_ne_bytes()].concat());
        wanted.extend(7u32.to_be_bytes());
        assert_eq!(bytes, wanted);
    }

    #[test]
    fn answers_that_are_cut_off_are_none() {
        for bytes in [&[][..], &[1, 2], &[0; 16], &[0; 19]] {
            assert!(answer(bytes).is_none(), "{bytes:?}");
        }
    }

    #[test]
    fn the_kernel_refuses_in_numbers() {
        let mut netlink = Netlink::open(libc::NETLINK_ROUTE).unwrap();
        // No interface has this number.
        let head = [&[0u8; 4][..], &u32::MAX.to_ne_bytes(), &[0; 8]].concat();
        let refused = netlink.ask(vec![Message::new(libc::RTM_SETLINK, ACKNOWLEDGE, &head)]);
        assert!(refused.is_err());
    }
}
