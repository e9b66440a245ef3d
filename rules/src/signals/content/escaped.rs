//! Stretches of a view around escapes, with the escapes replaced.

use super::origin::OriginMap;
use super::view::View;
use super::{PIECE, Shared, UndecidedTail};
use crate::signals::Encoding;
use crate::signals::decode::escapes::{Escape, EscapeSyntax, MAX_ESCAPE};

/// How far around an escape its view reaches. A secret of which one character is escaped lies within.
pub(super) const ESCAPE_REACH: usize = 256;
/// What replacing an escape counts as, in bytes that a view takes.
const ESCAPE_WORK: usize = 8;

/// Replaces the escapes of one syntax, in stretches around them.
pub(super) struct Escapes {
    syntax: EscapeSyntax,
    view: Option<View>,
    /// Where the open view ends, unless there is another escape before.
    end: u64,
    /// Where what is in the open view comes from.
    origin: OriginMap,
    /// An escape without its end.
    partial: Vec<u8>,
    /// What is decoded and not yet fed to the view, and how many escapes are in it.
    buffer: Vec<u8>,
    replaced: usize,
}

impl Escapes {
    pub(super) fn new(syntax: EscapeSyntax) -> Escapes {
        let (origin, partial, buffer) = (OriginMap::default(), Vec::new(), Vec::new());
        Escapes { syntax, view: None, end: 0, origin, partial, buffer, replaced: 0 }
    }

    /// Takes the next bytes of the view, which come after `offset` others; `history` is the last of these.
    pub(super) fn feed(
        &mut self,
        bytes: &[u8],
        (offset, history): (u64, &[u8]),
        around: &[Encoding],
        shared: &mut Shared,
    ) {
        let mut at = 0;
        if !self.partial.is_empty() {
            let known = self.partial.len();
            self.partial.extend_from_slice(bytes.get(..bytes.len().min(MAX_ESCAPE)).unwrap_or_default());
            let escape = self.syntax.parse(&self.partial);
            if escape == Escape::Incomplete {
                return;
            }
            let partial = std::mem::take(&mut self.partial);
            let begin = offset - known as u64;
            let before = history.get(..history.len().saturating_sub(known)).unwrap_or_default();
            match escape {
                Escape::Character(length, _) | Escape::Byte(length, _) => {
                    self.open(begin, [before, &[]], around, shared);
                    self.replace(escape, begin, shared);
                    at = length.saturating_sub(known);
                }
                Escape::None | Escape::Incomplete => {
                    self.copy(partial.get(..known).unwrap_or_default(), begin, shared);
                }
            }
            self.partial = partial;
            self.partial.clear();
        }
        while at < bytes.len() {
            let rest = bytes.get(at..).unwrap_or_default();
            let next = memchr::memchr(self.syntax.trigger, rest).unwrap_or(rest.len());
            let (plain, escaped) = rest.split_at(next);
            self.copy(plain, offset + at as u64, shared);
            at += next;
            if escaped.is_empty() {
                break;
            }
            let begin = offset + at as u64;
            let escape = self.syntax.parse(escaped);
            match escape {
                Escape::Character(length, _) | Escape::Byte(length, _) => {
                    self.open(begin, [history, bytes.get(..at).unwrap_or_default()], around, shared);
                    self.replace(escape, begin, shared);
                    at += length;
                }
                Escape::None => {
                    self.copy(escaped.get(..1).unwrap_or_default(), begin, shared);
                    at += 1;
                }
                Escape::Incomplete => {
                    self.partial.extend_from_slice(escaped);
                    break;
                }
            }
        }
        self.flush(shared);
    }

    pub(super) fn finish(&mut self, shared: &mut Shared) {
        if self.view.is_some() {
            let partial = std::mem::take(&mut self.partial);
            self.buffer.extend_from_slice(&partial);
            self.origin.add(partial.len());
            self.partial = partial;
            self.close(shared);
        }
        self.partial.clear();
    }

    /// Opens a view, if none is open at `begin`, with the bytes before it.
    fn open(&mut self, begin: u64, before: [&[u8]; 2], around: &[Encoding], shared: &mut Shared) {
        if self.view.is_some() {
            if begin < self.end {
                return;
            }
            self.close(shared);
        }
        self.view = shared.open_view(around, self.syntax.encoding);
        let late = before[1].len().min(ESCAPE_REACH);
        let early = before[0].len().min(ESCAPE_REACH - late);
        if self.view.is_some() {
            let [first, second] = before;
            self.origin.begin(begin - (late + early) as u64);
            self.origin.add(late + early);
            self.syntax.copy_plain(first.get(first.len() - early..).unwrap_or_default(), &mut self.buffer);
            self.syntax.copy_plain(second.get(second.len() - late..).unwrap_or_default(), &mut self.buffer);
        }
    }

    fn replace(&mut self, escape: Escape, begin: u64, shared: &mut Shared) {
        if self.view.is_none() {
            return;
        }
        let known = self.buffer.len();
        let length = match escape {
            Escape::Byte(length, byte) => {
                self.buffer.push(byte);
                length
            }
            Escape::Character(length, character) => {
                self.buffer.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                length
            }
            Escape::Incomplete | Escape::None => return,
        };
        self.origin.mark(begin);
        self.origin.add(self.buffer.len() - known);
        self.end = begin + (length + ESCAPE_REACH) as u64;
        self.replaced += 1;
        if self.buffer.len() >= PIECE {
            self.flush(shared);
        }
    }

    /// Copies bytes without escapes to the open view, up to its end.
    fn copy(&mut self, bytes: &[u8], begin: u64, shared: &mut Shared) {
        if self.view.is_none() {
            return;
        }
        let left = usize::try_from(self.end.saturating_sub(begin)).unwrap_or(usize::MAX);
        let copied = bytes.get(..bytes.len().min(left)).unwrap_or_default();
        self.origin.mark(begin);
        self.origin.add(copied.len());
        self.syntax.copy_plain(copied, &mut self.buffer);
        if left < bytes.len() {
            self.close(shared);
        } else if self.buffer.len() >= PIECE {
            self.flush(shared);
        }
    }

    fn flush(&mut self, shared: &mut Shared) {
        if let Some(view) = &mut self.view
            && !self.buffer.is_empty()
            && shared.charge(self.buffer.len() + self.replaced * ESCAPE_WORK)
        {
            view.feed(&self.buffer, shared);
        }
        self.buffer.clear();
        self.replaced = 0;
    }

    fn close(&mut self, shared: &mut Shared) {
        self.flush(shared);
        if let Some(view) = self.view.take() {
            shared.close_view(view);
        }
    }

    /// Returns how many of the `offset` bytes of the view to hold back.
    pub(super) fn undecided(&self, offset: u64, tail: UndecidedTail) -> u64 {
        let partial = match tail {
            UndecidedTail::Begun => 0,
            UndecidedTail::Possible => self.partial.len() as u64,
        };
        match self.view.as_ref().map_or(0, |view| view.undecided(tail)) {
            0 => partial,
            undecided => offset - self.origin.origin(undecided).min(offset),
        }
    }
}
