//! The body of a request on its way out: searched, held back as far as a match that is not complete reaches, and cut
//! into blocks of one size, so that the sizes in which the client writes it do not reach the origin server (P19).
//!
//! What leaves depends on the kind of body:
//!
//! - A body that announces its length waits for nothing but its own bytes, so what is undecided and less than a block
//!   stay until more comes. Over HTTP/1 its pieces are invisible and it is not cut.
//! - A body without a length leaves in full blocks while more of it is ready. When the client has nothing more ready,
//!   it may be waiting for an answer: everything leaves but the beginning of a match ([`UndecidedTail::Begun`]). The
//!   boundary of the shorter block is a choice of the client and has a price.
//! - A body of messages, each with its length in front (gRPC), leaves message by message: a server can do nothing with
//!   a part of one. At the end of a message there is no match so far, and nothing of it is held back. Which messages
//!   leave together is a choice and costs a bit for each.
//!
//! [`UndecidedTail::Begun`]: rules::signals::content::UndecidedTail

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use rules::signals::Signal;
use rules::signals::bits::{PartialBlock, partial_block_price};
use rules::signals::content::UndecidedTail;

use crate::inspect::{BodyInspector, OpenBlocks, SandboxSignals};
use crate::quota::cost::BLOCK_BYTES;

/// Bytes before each message: a flag and the length.
const MESSAGE_HEADER: usize = 5;

/// What of a body the server can wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyKind {
    /// Its length is announced, so the server expects all of it.
    Length,
    /// Without a length.
    Open,
    /// Without a length, in messages.
    Messages,
}

impl BodyKind {
    /// Reads the kind from the announced length, if there is one, and the header fields.
    pub(super) fn of(length: Option<u64>, fields: &HeaderMap) -> Self {
        // The messages of grpc-web-text are in base64: what looks like their lengths is none.
        let grpc = has_type(fields, b"application/grpc") && !has_type(fields, b"application/grpc-web-text");
        match length {
            Some(_) => BodyKind::Length,
            None if grpc || has_type(fields, b"application/connect+") => BodyKind::Messages,
            None => BodyKind::Open,
        }
    }
}

/// Returns whether the content type begins so, in any letter case.
pub(super) fn has_type(fields: &HeaderMap, kind: &[u8]) -> bool {
    let begins = |given: &[u8]| given.get(..kind.len()).is_some_and(|given| given.eq_ignore_ascii_case(kind));
    fields.get(CONTENT_TYPE).is_some_and(|given| begins(given.as_bytes()))
}

/// What is known about the rest of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyRest {
    /// More of it has arrived.
    Ready,
    /// Nothing more has arrived, as far as is known.
    Awaited,
    /// There is none.
    Over,
}

/// The body of one request.
pub(super) struct OutgoingBody {
    kind: BodyKind,
    /// Searches it, if the rule has it searched.
    inspector: Option<BodyInspector>,
    /// Whether the origin server sees the pieces in which it leaves.
    pieces: PieceSizes,
    /// What came and has not left.
    held: BytesMut,
    /// Bytes that came.
    taken: u64,
    /// Full blocks since the beginning or the last piece of another size.
    full_blocks: u64,
    messages: MessageReader,
    /// Counts it among the open bodies of the sandbox.
    open: OpenBlocks,
}

/// Whether the origin server sees the sizes of the pieces in which a body leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceSizes {
    Hidden,
    Visible,
}

/// What leaves next.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pub(super) found: Vec<Signal>,
    pub(super) bytes: Option<Bytes>,
    /// What the size of `bytes` says, in bits.
    pub(super) bits: u64,
}

/// Finds the ends of messages.
#[derive(Clone, Copy, Debug, Default)]
struct MessageReader {
    header: [u8; MESSAGE_HEADER],
    /// Bytes of the header so far.
    filled: usize,
    /// Bytes of the message that are still to come.
    left: u64,
    /// Bytes since the last end.
    since_end: u64,
    /// Ends that have not left.
    ends: u64,
}

impl OutgoingBody {
    pub(super) fn new(
        kind: BodyKind,
        inspector: Option<BodyInspector>,
        signals: &Arc<SandboxSignals>,
    ) -> Self {
        OutgoingBody {
            kind,
            inspector,
            pieces: PieceSizes::Visible,
            held: BytesMut::new(),
            taken: 0,
            full_blocks: 0,
            messages: MessageReader::default(),
            open: OpenBlocks::new(signals),
        }
    }

    /// Begins again, for a request that is sent in this version, perhaps not for the first time.
    pub(super) fn restart(&mut self, version: http::Version) {
        if let Some(inspector) = &mut self.inspector {
            inspector.restart();
        }
        self.pieces = match (self.kind, version) {
            (BodyKind::Length, http::Version::HTTP_2) => PieceSizes::Visible,
            (BodyKind::Length, _) => PieceSizes::Hidden,
            (BodyKind::Open | BodyKind::Messages, _) => PieceSizes::Visible,
        };
        self.held.clear();
        (self.taken, self.full_blocks, self.messages) = (0, 0, MessageReader::default());
    }

    /// Returns whether the client's bytes are to be read in blocks: more at once would have to leave at once.
    pub(super) fn is_cut(&self) -> bool {
        self.pieces == PieceSizes::Visible
    }

    /// Returns how many bodies of the sandbox are on their way out, this one included.
    pub(super) fn open_bodies(&self) -> u32 {
        self.open.count()
    }

    /// Returns how many bytes of the body came.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// Takes the next bytes, and returns what leaves unless that is denied.
    pub(super) async fn take(&mut self, chunk: Option<&Bytes>, rest: BodyRest) -> Outgoing {
        let mut out = Outgoing::default();
        if let Some(inspector) = &mut self.inspector {
            out.found = inspector.search(chunk, rest == BodyRest::Over).await;
        }
        let arrived = chunk.map_or(0, Bytes::len);
        self.taken += arrived as u64;
        if self.kind == BodyKind::Messages {
            self.messages.read(chunk.map_or(&[][..], |chunk| chunk));
        }
        let waiting = self.held.len() + arrived;
        let leaving = self.leaving(waiting, rest);
        out.bits = self.price(leaving, rest);
        out.bytes = match chunk {
            Some(chunk) if self.held.is_empty() && leaving == waiting => Some(chunk.clone()),
            Some(_) | None => {
                self.held.extend_from_slice(chunk.map_or(&[][..], |chunk| chunk));
                Some(self.held.split_to(leaving).freeze())
            }
        };
        out.bytes = out.bytes.filter(|bytes| !bytes.is_empty());
        out
    }

    /// Returns how many of the `waiting` bytes leave.
    fn leaving(&self, waiting: usize, rest: BodyRest) -> usize {
        let decided = |tail| waiting.saturating_sub(self.undecided(tail));
        let blocks = |bytes: usize| bytes / BLOCK_BYTES * BLOCK_BYTES;
        match (rest, self.kind) {
            (BodyRest::Over, _) => waiting,
            (_, BodyKind::Length) => match self.pieces {
                PieceSizes::Hidden => decided(UndecidedTail::Possible),
                PieceSizes::Visible => blocks(decided(UndecidedTail::Possible)).min(BLOCK_BYTES),
            },
            (_, BodyKind::Messages) if self.messages.ends > 0 => {
                let incomplete = usize::try_from(self.messages.since_end).unwrap_or(usize::MAX);
                waiting.saturating_sub(incomplete)
            }
            (BodyRest::Ready, BodyKind::Open) | (_, BodyKind::Messages) => {
                blocks(decided(UndecidedTail::Possible)).min(BLOCK_BYTES)
            }
            (BodyRest::Awaited, BodyKind::Open) => decided(UndecidedTail::Begun),
        }
    }

    fn undecided(&self, tail: UndecidedTail) -> usize {
        self.inspector.as_ref().map_or(0, |inspector| inspector.undecided(tail))
    }

    /// Returns what it says, in bits, that `leaving` bytes leave together, and counts the piece.
    fn price(&mut self, leaving: usize, rest: BodyRest) -> u64 {
        let ends = match leaving {
            0 => 0,
            _ => std::mem::take(&mut self.messages.ends),
        };
        let is_usual = match rest {
            BodyRest::Over => leaving <= BLOCK_BYTES,
            BodyRest::Ready | BodyRest::Awaited => leaving == BLOCK_BYTES || leaving == 0,
        };
        if self.pieces == PieceSizes::Hidden || leaving == 0 {
            return 0;
        }
        let at_message = ends > 0 && leaving <= BLOCK_BYTES;
        if is_usual || at_message {
            self.full_blocks = if leaving == BLOCK_BYTES { self.full_blocks + 1 } else { 0 };
            return ends;
        }
        let (length, full_blocks) = (leaving as u64, std::mem::take(&mut self.full_blocks));
        let open_bodies = self.open.count();
        ends + partial_block_price(&PartialBlock { length, full_blocks, open_bodies })
    }
}

impl MessageReader {
    fn read(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let header = (MESSAGE_HEADER - self.filled).min(bytes.len());
            let (head, rest) = bytes.split_at_checked(header).unwrap_or((bytes, &[]));
            if let Some(room) = self.header.get_mut(self.filled..self.filled + header) {
                room.copy_from_slice(head);
            }
            self.filled += header;
            if header > 0 && self.filled == MESSAGE_HEADER {
                let [_, length @ ..] = self.header;
                self.left = u64::from(u32::from_be_bytes(length));
            }
            let skipped = match self.filled {
                MESSAGE_HEADER => usize::try_from(self.left).unwrap_or(usize::MAX).min(rest.len()),
                _ => 0,
            };
            self.left -= skipped as u64;
            self.since_end += (header + skipped) as u64;
            bytes = rest.get(skipped..).unwrap_or_default();
            if self.filled == MESSAGE_HEADER && self.left == 0 {
                *self = MessageReader { ends: self.ends + 1, ..MessageReader::default() };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(kind: BodyKind, version: http::Version) -> OutgoingBody {
        let signals = Arc::new(SandboxSignals::unstored().unwrap());
        let mut body = OutgoingBody::new(kind, None, &signals);
        body.restart(version);
        body
    }

    /// Sizes and prices of what leaves.
    async fn pass(body: &mut OutgoingBody, pieces: &[(usize, BodyRest)]) -> Vec<(usize, u64)> {
        let mut passed = Vec::new();
        for (length, rest) in pieces {
            let out = body.take(Some(&Bytes::from(vec![b'x'; *length])), *rest).await;
            passed.push((out.bytes.map_or(0, |bytes| bytes.len()), out.bits));
        }
        passed
    }

    #[tokio::test]
    async fn p19_a_body_without_a_length_leaves_in_blocks_and_boundaries_have_a_price() {
        use BodyRest::{Awaited, Over, Ready};
        const B: usize = BLOCK_BYTES;
        for (pieces, expected) in [
            (vec![(100, Ready), (B, Ready), (B - 100, Ready), (7, Over)], vec![0, B, B, 7]),
            (vec![(100, Ready), (5, Over)], vec![0, 105]),
            (vec![(B, Awaited), (B, Awaited), (0, Over)], vec![B, B, 0]),
            (vec![(0, Awaited), (0, Over)], vec![0, 0]),
        ] {
            let passed = pass(&mut body(BodyKind::Open, http::Version::HTTP_11), &pieces).await;
            assert_eq!(passed, expected.into_iter().map(|size| (size, 0)).collect::<Vec<_>>(), "{pieces:?}");
        }
        let mut open = body(BodyKind::Open, http::Version::HTTP_11);
        let passed = pass(&mut open, &[(B, Ready), (100, Awaited), (1, Awaited), (3, Over)]).await;
        let priced =
            |length, full_blocks| partial_block_price(&PartialBlock { length, full_blocks, open_bodies: 1 });
        assert_eq!(passed, [(B, 0), (100, priced(100, 1)), (1, priced(1, 0)), (3, 0)]);
        let other = OpenBlocks::new(open.open.signals());
        assert_eq!(other.count(), 2);
        drop(other);
        assert_eq!(open.open.count(), 1);
    }

    #[tokio::test]
    async fn a_body_with_a_length_is_cut_for_http2_alone() {
        use BodyRest::{Awaited, Over};
        let pieces = [(100, Awaited), (BLOCK_BYTES, Awaited), (10, Over)];
        let passed = pass(&mut body(BodyKind::Length, http::Version::HTTP_11), &pieces).await;
        assert_eq!(passed, [(100, 0), (BLOCK_BYTES, 0), (10, 0)]);
        let passed = pass(&mut body(BodyKind::Length, http::Version::HTTP_2), &pieces).await;
        assert_eq!(passed, [(0, 0), (BLOCK_BYTES, 0), (110, 0)]);
    }

    #[tokio::test]
    async fn p19_messages_leave_as_they_end_at_a_bit_each() {
        let message = |length: u32| [&[0][..], &length.to_be_bytes(), &vec![7; length as usize]].concat();
        let bytes = [message(3), message(0), message(40_000)].concat();
        let mut messages = body(BodyKind::Messages, http::Version::HTTP_2);
        let mut passed = Vec::new();
        for piece in [&bytes[..4], &bytes[4..10], &bytes[10..20], &bytes[20..20_000], &bytes[20_000..]] {
            let out = messages.take(Some(&Bytes::copy_from_slice(piece)), BodyRest::Awaited).await;
            passed.push((out.bytes.map_or(0, |bytes| bytes.len()), out.bits));
        }
        let (rest, full_blocks, open_bodies) = (40_005 - BLOCK_BYTES, 1, 1);
        let length = rest as u64;
        let priced = partial_block_price(&PartialBlock { length, full_blocks, open_bodies });
        assert_eq!(passed, [(0, 0), (8, 1), (5, 1), (BLOCK_BYTES, 0), (rest, 1 + priced)]);
    }

    #[test]
    fn messages_are_read_where_they_are() {
        for (kind, length, expected) in [
            ("application/grpc", None, BodyKind::Messages),
            ("Application/GRPC+proto", None, BodyKind::Messages),
            ("application/grpc-web+proto", None, BodyKind::Messages),
            ("application/connect+json", None, BodyKind::Messages),
            ("application/grpc-web-text", None, BodyKind::Open),
            ("application/grpc-web-text+proto", None, BodyKind::Open),
            ("application/json", None, BodyKind::Open),
            ("application/grpc", Some(5), BodyKind::Length),
        ] {
            let fields = HeaderMap::from_iter([(CONTENT_TYPE, kind.parse().unwrap())]);
            assert_eq!(BodyKind::of(length, &fields), expected, "{kind}");
        }
        assert_eq!(BodyKind::of(None, &HeaderMap::new()), BodyKind::Open);
    }

    #[test]
    fn messages_end_where_they_do_however_they_are_split() {
        let bytes = [&[0, 0, 0, 0, 2, b'a', b'b'][..], &[1, 0, 0, 0, 0], &[0, 0, 0, 0, 9, b'c']].concat();
        for piece in 1..bytes.len() {
            let mut reader = MessageReader::default();
            bytes.chunks(piece).for_each(|bytes| reader.read(bytes));
            assert_eq!((reader.ends, reader.since_end, reader.left), (2, 6, 8), "by {piece}");
        }
    }
}
