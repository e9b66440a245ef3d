//! Watches how long the head of an HTTP/2 request takes. `h2` waits for the end of a header block for as long as its
//! connection lives, and tells nobody that it does.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::sleep_until;

/// The preface of an HTTP/2 connection (RFC 9113, section 3.4).
pub(crate) const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length of a frame's header (RFC 9113, section 4.1).
const FRAME_HEADER: usize = 9;
/// Frame types and the flag that ends a header block (RFC 9113, sections 6.2 and 6.10).
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// Follows the frames of a client, and says since when a head is incomplete.
pub(super) struct HeadClock {
    frames: FrameScanner,
    since: watch::Sender<Option<Instant>>,
}

/// The reader of a [`HeadClock`].
pub(super) struct HeadDeadline(watch::Receiver<Option<Instant>>);

/// The position in a sequence of frames. Reads frame headers only.
#[derive(Debug)]
struct FrameScanner {
    /// Bytes to skip: of the preface, then of the payload of a frame.
    skip: usize,
    header: [u8; FRAME_HEADER],
    /// Bytes of the frame header so far.
    filled: usize,
    block: HeaderBlock,
}

/// What the current frame does to a header block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeaderBlock {
    /// Leaves it open: further frames belong to it.
    Continues,
    /// Ends it, with its last byte.
    Ends,
    /// There is none.
    None,
}

impl HeadClock {
    pub(super) fn new() -> (Self, HeadDeadline) {
        let (since, deadline) = watch::channel(None);
        (HeadClock { frames: FrameScanner::new(), since }, HeadDeadline(deadline))
    }

    /// Follows the next bytes of the client.
    pub(super) fn scan(&mut self, bytes: &[u8]) {
        let completed = self.frames.scan(bytes);
        let begun = self.frames.is_in_head();
        self.since.send_if_modified(|since| {
            let before = *since;
            let kept = since.filter(|_| !completed);
            *since = begun.then(|| kept.unwrap_or_else(Instant::now));
            *since != before
        });
    }
}

impl HeadDeadline {
    /// Returns once a head is incomplete for longer than `limit`.
    pub(super) async fn wait(&mut self, limit: Duration) {
        loop {
            let since = *self.0.borrow_and_update();
            let late = async {
                match since {
                    Some(since) => sleep_until((since + limit).into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = late => return,
                changed = self.0.changed() => if changed.is_err() {
                    return std::future::pending().await; // the connection is closed
                },
            }
        }
    }
}

impl FrameScanner {
    fn new() -> Self {
        let (header, block) = ([0; FRAME_HEADER], HeaderBlock::None);
        FrameScanner { skip: HTTP2_PREFACE.len(), header, filled: 0, block }
    }

    /// Follows the next bytes. Returns whether a frame ended among them that is no part of a head, or the last of one.
    fn scan(&mut self, mut bytes: &[u8]) -> bool {
        let mut completed = false;
        while !bytes.is_empty() {
            if self.skip == 0 {
                let taken = (FRAME_HEADER - self.filled).min(bytes.len());
                let (header, rest) = bytes.split_at_checked(taken).unwrap_or((bytes, &[]));
                if let Some(room) = self.header.get_mut(self.filled..self.filled + taken) {
                    room.copy_from_slice(header);
                }
                self.filled += taken;
                bytes = rest;
                if self.filled < FRAME_HEADER {
                    break;
                }
                self.filled = 0;
                self.begin_frame();
            }
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            if self.skip == 0 && self.block != HeaderBlock::Continues {
                (self.block, completed) = (HeaderBlock::None, true);
            }
        }
        completed
    }

    fn begin_frame(&mut self) {
        let [high, middle, low, kind, flags, ..] = self.header;
        self.skip = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        // Any other frame inside a block is an error, on which `h2` closes the connection.
        self.block = match kind {
            HEADERS | CONTINUATION if flags & END_HEADERS != 0 => HeaderBlock::Ends,
            HEADERS | CONTINUATION => HeaderBlock::Continues,
            _ => HeaderBlock::None,
        };
    }

    /// Whether a head has begun and not ended. A frame of unknown type counts as one until its header is complete.
    fn is_in_head(&self) -> bool {
        self.filled > 0 || self.block != HeaderBlock::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, kind, flags, 0, 0, 0, 1][..], payload].concat()
    }

    #[test]
    fn a_head_is_incomplete_until_its_block_ends_however_it_is_split() {
        const DATA: u8 = 0;
        const SETTINGS: u8 = 4;
        let preface = HTTP2_PREFACE.to_vec();
        let hello = [preface.clone(), frame(SETTINGS, 0, b"")].concat();
        for (what, bytes, in_head) in [
            ("a part of the preface", preface[..5].to_vec(), false),
            ("preface and settings", hello.clone(), false),
            ("settings with a payload", [preface.clone(), frame(SETTINGS, 0, b"abcdef")].concat(), false),
            ("a part of a frame header", [&hello[..], &[0, 0, 1]].concat(), true),
            ("a complete head", [&hello[..], &frame(HEADERS, END_HEADERS, b"abc")].concat(), false),
            ("an empty one", [&hello[..], &frame(HEADERS, END_HEADERS, b"")].concat(), false),
            (
                "a part of its payload",
                [&hello[..], &frame(HEADERS, END_HEADERS, b"abc")[..10]].concat(),
                true,
            ),
            ("a block without end", [&hello[..], &frame(HEADERS, 0, b"abc")].concat(), true),
            ("an empty one without end", [&hello[..], &frame(HEADERS, 0, b"")].concat(), true),
            (
                "continued",
                [&hello[..], &frame(HEADERS, 0, b"abc"), &frame(CONTINUATION, 0, b"a")].concat(),
                true,
            ),
            (
                "continued and ended",
                [&hello[..], &frame(HEADERS, 0, b"abc"), &frame(CONTINUATION, END_HEADERS, b"a")].concat(),
                false,
            ),
            (
                "a part of a body",
                [&hello[..], &frame(HEADERS, END_HEADERS, b"abc"), &frame(DATA, 0, b"abc")[..11]].concat(),
                false,
            ),
        ] {
            let mut whole = FrameScanner::new();
            whole.scan(&bytes);
            assert_eq!(whole.is_in_head(), in_head, "{what}");
            let mut single = FrameScanner::new();
            for byte in &bytes {
                single.scan(&[*byte]);
            }
            assert_eq!(single.is_in_head(), in_head, "{what}, byte by byte");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_head_has_its_own_time() {
        let (mut clock, mut deadline) = HeadClock::new();
        let limit = Duration::from_secs(10);
        clock.scan(HTTP2_PREFACE);
        clock.scan(&frame(HEADERS, 0, b"abc"));
        let first = (*deadline.0.borrow()).unwrap();
        clock.scan(b"\0");
        assert_eq!(*deadline.0.borrow(), Some(first), "a drip does not extend it");
        let mut rest = frame(CONTINUATION, END_HEADERS, b"a").split_off(1);
        rest.extend(frame(HEADERS, 0, b"abc"));
        clock.scan(&rest);
        assert!((*deadline.0.borrow()).unwrap() > first, "the first ended, a second began");
        deadline.wait(limit).await;
        clock.scan(&frame(CONTINUATION, END_HEADERS, b"a"));
        let waited = tokio::time::timeout(limit * 10, deadline.wait(limit)).await;
        assert!(waited.is_err(), "no head is open");
    }
}
