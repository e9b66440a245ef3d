//! Gzip members within a view, such as a file in a `multipart/form-data` body.
//!
//! Any bytes may look like a header, so what begins with one is an attempt: corrupt data and a missing end are not
//! reported, and attempts are bounded in number. A header may hide in the name field of another; both are read.

use super::nested::{BLOCK_SLACK, BOMB};
use super::view::View;
use super::{Shared, UndecidedTail};
use crate::signals::Encoding;
use crate::signals::decode::Trouble;
use crate::signals::decode::compressed::{GZIP_START, Inflater, is_gzip_start};

/// Most gzip headers to follow per request, at any place but the beginning of a view.
pub const MAX_GZIP_PARTS: usize = 64;
/// Most of them that decompress at a time, so that they leave views to other encodings.
pub const MAX_OPEN_GZIP_PARTS: usize = 8;

/// The gzip members of one view.
#[derive(Default)]
pub(super) struct GzipParts {
    open: Vec<GzipPart>,
    /// Whether a member at the beginning of the view is looked for as well, and not decompressed as the whole view.
    includes_beginning: bool,
}

struct GzipPart {
    inflater: Inflater,
    /// Open from the first decompressed byte on: most bytes that look like a header never yield one.
    view: Option<View>,
}

impl GzipParts {
    pub(super) fn begin(&mut self) {
        self.includes_beginning = false;
    }

    /// Takes note that the view is said to be in `encoding`.
    pub(super) fn declare(&mut self, encoding: Encoding) {
        self.includes_beginning = encoding != Encoding::Gzip;
    }

    /// Takes the next bytes of the view, which come after `history`.
    pub(super) fn feed(&mut self, bytes: &[u8], history: &[u8], around: &[Encoding], shared: &mut Shared) {
        self.open.retain_mut(|part| part.feed(bytes, around, shared));

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
                    self.start([tail.get(at..).unwrap_or_default(), bytes], around, shared);
                }
            }
        }
        for at in memchr::memchr_iter(0x1f, bytes) {
            let rest = bytes.get(at..).unwrap_or_default();
            let is_beginning = at == 0 && history.is_empty();
            if is_gzip_start(rest) && (self.includes_beginning || !is_beginning) {
                self.start([&[], rest], around, shared);
            }
        }
    }

    pub(super) fn finish(&mut self, shared: &mut Shared) {
        self.open.drain(..).for_each(|mut part| part.close(shared));
    }

    pub(super) fn undecided(&self, tail: UndecidedTail) -> usize {
        let views = self.open.iter().filter_map(|part| part.view.as_ref());
        let held = views.map(|view| match view.undecided(tail) {
            0 => 0,
            undecided => undecided * 2 + BLOCK_SLACK,
        });
        held.max().unwrap_or_default()
    }

    fn start(&mut self, pieces: [&[u8]; 2], around: &[Encoding], shared: &mut Shared) {
        if shared.gzip_parts >= MAX_GZIP_PARTS {
            shared.give_up(Trouble::Budget, "too many parts of it begin like gzip");
            return;
        }
        shared.gzip_parts += 1;
        let mut part = GzipPart { inflater: Inflater::one_member(), view: None };
        if pieces.into_iter().all(|piece| part.feed(piece, around, shared)) {
            self.open.push(part);
        }
    }
}

impl GzipPart {
    /// Decompresses `bytes`. Returns whether the member goes on.
    fn feed(&mut self, bytes: &[u8], around: &[Encoding], shared: &mut Shared) -> bool {
        let GzipPart { inflater, view } = self;
        let consumed = inflater.consumed();
        let result = inflater.feed(bytes, &mut |piece| {
            if view.is_none() {
                *view = open_view(around, shared);
            }
            match view {
                Some(view) if shared.charge_decompressed(piece.len()) => {
                    view.feed(piece, shared);
                    true
                }
                Some(_) | None => false,
            }
        });
        match result {
            Err(trouble @ Trouble::Expansion) => shared.give_up(trouble, BOMB),
            // The budget counts itself.
            Ok(()) | Err(Trouble::Budget | Trouble::Corrupt | Trouble::Truncated) => {}
        }
        // Blocks may be empty, and many members may share them: input has its price too.
        let taken = usize::try_from(inflater.consumed() - consumed).unwrap_or(usize::MAX);
        let goes_on = (taken == 0 || shared.charge(taken)) && !inflater.is_over();
        if !goes_on {
            self.close(shared);
        }
        goes_on
    }

    fn close(&mut self, shared: &mut Shared) {
        if let Some(view) = self.view.take() {
            shared.open_gzip_parts -= 1;
            shared.close_view(view);
        }
    }
}

fn open_view(around: &[Encoding], shared: &mut Shared) -> Option<View> {
    if shared.open_gzip_parts >= MAX_OPEN_GZIP_PARTS {
        shared.give_up(Trouble::Budget, "too many parts of it are gzip at the same place");
        return None;
    }
    let view = shared.open_view(around, Encoding::Gzip)?;
    shared.open_gzip_parts += 1;
    Some(view)
}
