//! An HTTP/2 client that sends whatever it is told, frame by frame, and the attacks that need one.

use crate::wire::RawConnection;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const PRIORITY: u8 = 2;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PUSH_PROMISE: u8 = 5;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The header table of the answers: none, so that every status is written out.
const NO_HEADER_TABLE: [u8; 6] = [0, 1, 0, 0, 0, 0];

pub(crate) type HeaderList = Vec<(String, Vec<u8>)>;

/// One frame as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

impl Frame {
    /// Whether it is a GOAWAY after which `stream` gets no answer: a graceful one promises those up to its last
    /// stream (RFC 9113, section 6.8).
    fn ends_stream(&self, stream: u32) -> bool {
        let last = self.payload.first_chunk().map(|last| u32::from_be_bytes(*last) & 0x7fff_ffff);
        let graceful = self.payload.get(4..8) == Some(&[0; 4]);
        self.kind == GOAWAY && !(graceful && last >= Some(stream))
    }
}

/// How something ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// An answer with this status.
    Status(u16),
    /// The stream was reset.
    Reset,
    /// The connection was told to go, or closed.
    Gone,
}

/// An HTTP/2 connection of a client.
pub(crate) struct Http2Client {
    pub(crate) wire: RawConnection,
    frames: Vec<Frame>,
}

impl Http2Client {
    /// Says hello; what the other side says is read when it is needed.
    pub(crate) fn new(wire: RawConnection) -> Self {
        let mut connection = Http2Client { wire, frames: Vec::new() };
        connection.wire.send(PREFACE);
        connection.send_frame(SETTINGS, 0, 0, &NO_HEADER_TABLE);
        connection
    }

    pub(crate) fn send_frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.wire.send(encode_frame(kind, flags, stream, payload));
    }

    pub(crate) fn send_headers(&mut self, stream: u32, fields: &HeaderList, over: bool) {
        let flags = if over { END_HEADERS | END_STREAM } else { END_HEADERS };
        self.send_frame(HEADERS, flags, stream, &encode_headers(fields));
    }

    /// The status of the answer on `stream`; none where it was reset or the connection ended.
    pub(crate) fn wait_for_status(&mut self, stream: u32) -> Option<u16> {
        match self.wait_for_end(stream) {
            StreamEnd::Status(status) => Some(status),
            StreamEnd::Reset | StreamEnd::Gone => None,
        }
    }

    /// How `stream` ended, or at least began to be answered.
    pub(crate) fn wait_for_end(&mut self, stream: u32) -> StreamEnd {
        loop {
            let seen = self.frames.iter().find(|frame| frame.stream == stream);
            let fate = seen.and_then(|frame| match frame.kind {
                HEADERS => Some(StreamEnd::Status(decode_status(&frame.payload))),
                RST_STREAM => Some(StreamEnd::Reset),
                _ => None,
            });
            if let Some(fate) = fate {
                return fate;
            }
            if self.frames.iter().any(|frame| frame.ends_stream(stream)) || !self.read_frame() {
                return StreamEnd::Gone;
            }
        }
    }

    /// Whether the connection was ended by the other side, in so many words or without.
    pub(crate) fn is_ended(&mut self) -> bool {
        while self.frames.iter().all(|frame| frame.kind != GOAWAY) {
            if !self.read_frame() {
                return true;
            }
        }
        true
    }

    /// Whether `stream` was answered with 200, by what has come so far.
    pub(crate) fn has_ok_status(&self, stream: u32) -> bool {
        let mut own = self.frames.iter().filter(|frame| frame.stream == stream);
        own.any(|frame| frame.kind == HEADERS && decode_status(&frame.payload) == 200)
    }

    /// Reads one more frame; false at the end.
    fn read_frame(&mut self) -> bool {
        let Some(head) = self.wire.read_exact(9) else { return false };
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let Some(payload) = self.wire.read_exact(length) else { return false };
        let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
        let frame = Frame { kind: head[3], flags: head[4], stream, payload };
        match frame.kind {
            SETTINGS if frame.flags & 1 == 0 => self.send_frame(SETTINGS, 1, 0, &[]),
            PING if frame.flags & 1 == 0 => self.send_frame(PING, 1, 0, &frame.payload),
            _ => {}
        }
        self.frames.push(frame);
        true
    }
}

pub(crate) fn encode_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The fields of a plain request.
pub(crate) fn request_fields(method: &str, scheme: &str, authority: &str, path: &str) -> HeaderList {
    let fields = [(":method", method), (":scheme", scheme), (":authority", authority), (":path", path)];
    fields.map(|(name, value)| (name.to_owned(), value.as_bytes().to_vec())).to_vec()
}

/// Fields as literals that no table keeps (RFC 7541, section 6.2.2).
pub(crate) fn encode_headers(fields: &HeaderList) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        block.extend(encode_string(name.as_bytes()));
        block.extend(encode_string(value));
    }
    block
}

fn encode_string(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    match bytes.len() {
        short @ 0..127 => text.push(short as u8),
        long => {
            text.push(127);
            let mut rest = long - 127;
            while rest >= 128 {
                text.push((rest % 128) as u8 | 0x80);
                rest /= 128;
            }
            text.push(rest as u8);
        }
    }
    text.extend_from_slice(bytes);
    text
}

/// The status that a header block begins with, table size updates aside (RFC 7541, sections 6.1 and 6.3).
fn decode_status(block: &[u8]) -> u16 {
    let block = &block[block.iter().take_while(|byte| **byte & 0xe0 == 0x20).count()..];
    match block {
        [indexed, ..] if *indexed & 0x80 != 0 => {
            [200, 204, 206, 304, 400, 404, 500][usize::from(*indexed & 0x7f) - 8]
        }
        [literal, length, value @ ..] if matches!(literal & 0x3f, 8) || *literal & 0x0f == 8 => {
            let value = &value[..usize::from(*length & 0x7f)];
            let text = if *length & 0x80 == 0 { value.to_vec() } else { decode_digits(value) };
            String::from_utf8(text).unwrap().parse().unwrap()
        }
        other => panic!("no status in {other:?}"),
    }
}

/// Digits in the code of RFC 7541, appendix B.
fn decode_digits(bytes: &[u8]) -> Vec<u8> {
    let bits: Vec<u8> = bytes.iter().flat_map(|byte| (0..8).rev().map(move |at| byte >> at & 1)).collect();
    let mut rest = &bits[..];
    let mut text = Vec::new();
    let number = |bits: &[u8]| bits.iter().fold(0, |sum, bit| sum << 1 | bit);
    while rest.len() >= 5 && rest.contains(&0) {
        let short = number(&rest[..5]);
        let (digit, length) = if short < 3 { (short, 5) } else { (number(&rest[..6]) - 22, 6) };
        text.push(b'0' + digit);
        rest = &rest[length..];
    }
    text
}
