//! Gzip members within a view, such as a file in a `multipart/form-data` body.
//!
//! Any bytes may look like a header, so what begins with one is an attempt: corrupt data and a missing end are not
//! reported, and attempts are bounded in number. A header may hide in the name field of another; both are read.

use super::stream::Decompression;
use super::{Shared, UndecidedTail};
use crate::signals::Encoding;
use crate::signals::decode::Trouble;
use crate::signals::decode::compressed::{GZIP_START, Inflater, is_gzip_start};

/// Most gzip headers to follow per request, at any place but the beginning of a view.
pub const MAX_GZIP_PARTS: usize = 64;

/// The gzip members of one view.
#[derive(Default)]
pub(super) struct GzipParts {
    open: Vec<Decompression>,
    /// Whether a member at the beginning of the view is looked for as well, and not decompressed as the whole view.
    includes_beginning: bool,
}

impl GzipParts {
    pub(super) fn begin(&mut self) {
        self.includes_beginning = false;
    }

    /// Takes note that the view is said to be in `encoding`.
    pub(super) fn declare(&mut self, encoding: Encoding) {
        self.includes_beginning = encoding != Encoding::Gzip;
    }

    /// Takes the next bytes of the view, which come after `offset` others; `history` is the last of these.
    pub(super) fn feed(
        &mut self,
        bytes: &[u8],
        (offset, history): (u64, &[u8]),
        around: &[Encoding],
        shared: &mut Shared,
    ) {
        self.open.retain_mut(|part| feed_part(part, bytes, around, shared));

        let tail = history.get(history.len().saturating_sub(GZIP_START - 1)..).unwrap_or_default();
        if memchr::memchr(0x1f, tail).is_some() {
            let mut border = [0; 2 * (GZIP_START - 1)];
            let joined =
                tail.iter().chain(bytes).zip(&mut border).map(|(byte, place)| *place = *byte).count();
            for at in 0..tail.len() {
                let is_beginning = at == 0 && tail.len() == history.len();
                if is_gzip_start(border.get(at..joined).unwrap_or_default())
                    && (self.includes_beginning || !is_beginning)
                {
                    let begin = offset - (tail.len() - at) as u64;
                    self.start([tail.get(at..).unwrap_or_default(), bytes], begin, around, shared);
                }
            }
        }
        for at in memchr::memchr_iter(0x1f, bytes) {
            let rest = bytes.get(at..).unwrap_or_default();
            let is_beginning = at == 0 && history.is_empty();
            if is_gzip_start(rest) && (self.includes_beginning || !is_beginning) {
                self.start([&[], rest], offset + at as u64, around, shared);
            }
        }
    }

    pub(super) fn finish(&mut self, shared: &mut Shared) {
        self.open.drain(..).for_each(|mut part| part.close(shared));
    }

    pub(super) fn undecided(&self, offset: u64, tail: UndecidedTail) -> u64 {
        self.open.iter().map(|part| part.undecided(offset, tail)).max().unwrap_or_default()
    }

    fn start(&mut self, pieces: [&[u8]; 2], begin: u64, around: &[Encoding], shared: &mut Shared) {
        if shared.gzip_parts >= MAX_GZIP_PARTS {
            shared.give_up(Trouble::Budget, "too many parts of it begin like gzip");
            return;
        }
        shared.gzip_parts += 1;
        let mut part = Decompression::new(Inflater::one_member(), Encoding::Gzip, begin);
        if pieces.into_iter().all(|piece| feed_part(&mut part, piece, around, shared)) {
            self.open.push(part);
        }
    }
}

/// Decompresses `bytes`. Returns whether the member goes on.
fn feed_part(part: &mut Decompression, bytes: &[u8], around: &[Encoding], shared: &mut Shared) -> bool {
    let consumed = part.inflater().consumed();
    match part.feed(bytes, around, shared) {
        Ok(()) | Err(Trouble::Budget | Trouble::Corrupt | Trouble::Expansion | Trouble::Truncated) => {}
    }
    // Blocks may be empty, and many members may share them: input has its price too.
    let taken = usize::try_from(part.inflater().consumed() - consumed).unwrap_or(usize::MAX);
    let goes_on = (taken == 0 || shared.charge(taken)) && !part.inflater().is_over();
    if !goes_on {
        part.close(shared);
    }
    goes_on
}
