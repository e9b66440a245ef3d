//! What is encoded in a view: runs of an alphabet, stretches with escapes, compressed streams.

use super::gzip_parts::GzipParts;
use super::view::View;
use super::{Shared, UndecidedTail};
use crate::signals::Encoding;
use crate::signals::decode::Trouble;
use crate::signals::decode::alphabet::{HEAD, MAX_PHASES, PhaseDecoder, base64_flavour, phases};
use crate::signals::decode::compressed::{Inflater, Magic, magic};
use crate::signals::decode::escapes::{Escape, EscapeSyntax, MAX_ESCAPE, SYNTAXES};
use crate::signals::decode::runs::{BASE32_LOWER, BASE32_UPPER, BASE64, HEX, RunEvent, RunTracker, has_run};

/// How far around an escape its view reaches. A secret of which one character is escaped lies within.
const ESCAPE_REACH: usize = 256;
/// How many characters are decoded at a time.
const PIECE: usize = 4096;
/// Line breaks and incomplete groups beside a match in a run.
const RUN_SLACK: usize = 24;
/// Headers of a compressed block beside a match in it.
pub(super) const BLOCK_SLACK: usize = 512;

/// Everything encoded in one view.
pub(super) struct Nested {
    /// How many bytes of the view were fed.
    offset: u64,
    /// The last of them, at most [`ESCAPE_REACH`].
    history: Vec<u8>,
    compressed: Compressed,
    gzip_parts: GzipParts,
    escapes: [Escapes; 3],
    base64_runs: RunTracker,
    base64: RunDecoder,
    /// Hex and base32, in runs of base64: their alphabets are a part of it.
    others: [(RunTracker, RunDecoder); 3],
}

impl Default for Nested {
    fn default() -> Self {
        let other = |mask, encoding| (RunTracker::new(mask, 1), RunDecoder::new(encoding));
        Nested {
            offset: 0,
            history: Vec::new(),
            compressed: Compressed::Unknown(Vec::new()),
            gzip_parts: GzipParts::default(),
            escapes: SYNTAXES.map(Escapes::new),
            base64_runs: RunTracker::new(BASE64, 1),
            base64: RunDecoder::new(Encoding::Base64),
            others: [
                other(HEX, Encoding::Hex),
                other(BASE32_UPPER, Encoding::Base32),
                other(BASE32_LOWER, Encoding::Base32),
            ],
        }
    }
}

impl Nested {
    pub(super) fn begin(&mut self, min_run: usize) {
        self.offset = 0;
        self.history.clear();
        self.compressed = Compressed::Unknown(Vec::new());
        self.gzip_parts.begin();
        self.base64_runs.begin(min_run);
        self.others.iter_mut().for_each(|(tracker, _)| tracker.begin(min_run));
    }

    pub(super) fn declare(&mut self, encoding: Encoding) {
        self.compressed = Compressed::Declared(encoding);
        self.gzip_parts.declare(encoding);
    }

    pub(super) fn feed(&mut self, bytes: &[u8], around: &[Encoding], shared: &mut Shared) {
        self.compressed.feed(bytes, around, shared);
        self.gzip_parts.feed(bytes, &self.history, around, shared);
        for escapes in &mut self.escapes {
            escapes.feed(bytes, self.offset, &self.history, around, shared);
        }
        self.feed_runs(bytes, around, shared);
        self.offset += bytes.len() as u64;
        let kept = (ESCAPE_REACH - bytes.len().min(ESCAPE_REACH)).min(self.history.len());
        self.history.drain(..self.history.len() - kept);
        self.history
            .extend_from_slice(bytes.get(bytes.len().saturating_sub(ESCAPE_REACH)..).unwrap_or_default());
    }

    pub(super) fn finish(&mut self, around: &[Encoding], shared: &mut Shared) {
        self.compressed.finish(shared);
        self.gzip_parts.finish(shared);
        self.escapes.iter_mut().for_each(|escapes| escapes.finish(shared));
        let Nested { base64_runs, base64, others, .. } = self;
        base64_runs.finish(&mut |event| pass_event(event, base64, others, around, shared));
    }

    fn feed_runs(&mut self, bytes: &[u8], around: &[Encoding], shared: &mut Shared) {
        let Nested { base64_runs, base64, others, .. } = self;
        let min = base64_runs.min();
        base64_runs.feed(bytes, |run| is_plain(run, min), &mut |event| {
            pass_event(event, base64, others, around, shared)
        });
    }

    pub(super) fn undecided(&self, tail: UndecidedTail) -> usize {
        let escapes =
            self.escapes.iter().map(|escapes| escapes.undecided(self.offset, tail)).max().unwrap_or_default();
        let others = self
            .others
            .iter()
            .map(|(tracker, decoder)| tail.at_least(tracker.carried()).max(decoder.undecided(tail)))
            .max()
            .unwrap_or_default();
        let parts = [
            tail.at_least(self.base64_runs.carried()),
            self.base64.undecided(tail),
            others,
            escapes,
            self.compressed.undecided(tail),
            self.gzip_parts.undecided(tail),
        ];
        let most = parts.into_iter().max().unwrap_or_default();
        most.min(usize::try_from(self.offset).unwrap_or(usize::MAX))
    }
}

/// Returns whether no decoder would open a view for this run: it is a long word, or part of a path.
fn is_plain(run: &[u8], min: usize) -> bool {
    run.len() < HEAD
        && !phases(Encoding::Base64, run).contains(&true)
        && ![HEX, BASE32_UPPER, BASE32_LOWER].into_iter().any(|mask| has_run(run, mask, min))
}

/// Passes what happens to a base64 run on to its decoder, and its bytes to the trackers of smaller alphabets.
fn pass_event(
    event: RunEvent,
    base64: &mut RunDecoder,
    others: &mut [(RunTracker, RunDecoder); 3],
    around: &[Encoding],
    shared: &mut Shared,
) {
    base64.take(event, around, shared);
    for (tracker, decoder) in others {
        let mut sink = |event: RunEvent| decoder.take(event, around, shared);
        match event {
            RunEvent::Begin => {}
            RunEvent::Bytes(bytes) => tracker.feed(bytes, |_| false, &mut sink),
            RunEvent::Break => tracker.feed(b"\n", |_| false, &mut sink),
            RunEvent::End => tracker.finish(&mut sink),
        }
    }
}

/// Decodes the runs of one alphabet, one after the other.
struct RunDecoder {
    encoding: Encoding,
    is_inside: bool,
    is_open: bool,
    /// The first characters of the run, until it is open.
    head: Vec<u8>,
    /// Characters and line breaks of the run so far.
    length: usize,
    views: [Option<(PhaseDecoder, View)>; MAX_PHASES],
}

impl RunDecoder {
    fn new(encoding: Encoding) -> RunDecoder {
        let views = [const { None }; MAX_PHASES];
        RunDecoder { encoding, is_inside: false, is_open: false, head: Vec::new(), length: 0, views }
    }

    fn take(&mut self, event: RunEvent, around: &[Encoding], shared: &mut Shared) {
        match event {
            RunEvent::Begin => {
                self.is_inside = true;
                self.is_open = false;
                self.head.clear();
                self.length = 0;
            }
            RunEvent::Bytes(bytes) => {
                self.length += bytes.len();
                let (head, rest) = match self.is_open {
                    true => (0, bytes),
                    false => {
                        let head = bytes.len().min(HEAD - self.head.len());
                        (head, bytes.get(head..).unwrap_or_default())
                    }
                };
                self.head.extend_from_slice(bytes.get(..head).unwrap_or_default());
                if !self.is_open && self.head.len() == HEAD {
                    self.open(around, shared);
                }
                if self.is_open {
                    self.decode(rest, shared);
                }
            }
            RunEvent::Break => self.length += 1,
            RunEvent::End => {
                if !self.is_open {
                    self.open(around, shared);
                }
                for (_, view) in self.views.iter_mut().filter_map(Option::take) {
                    shared.close_view(view);
                }
                self.is_inside = false;
            }
        }
    }

    /// Opens a view for each phase that may yield content, and decodes what came so far.
    fn open(&mut self, around: &[Encoding], shared: &mut Shared) {
        self.is_open = true;
        let is_base64 = self.encoding == Encoding::Base64;
        let encoding = if is_base64 { base64_flavour(&self.head) } else { self.encoding };
        for (phase, is_wanted) in phases(encoding, &self.head).into_iter().enumerate() {
            if is_wanted {
                let view = shared.open_view(around, encoding);
                self.views[phase] = view.map(|view| (PhaseDecoder::new(encoding, phase), view));
            }
        }
        let head = std::mem::take(&mut self.head);
        self.decode(&head, shared);
        self.head = head;
    }

    fn decode(&mut self, text: &[u8], shared: &mut Shared) {
        for (decoder, view) in self.views.iter_mut().flatten() {
            for piece in text.chunks(PIECE) {
                let mut buffer = shared.buffer();
                decoder.decode(piece, &mut buffer);
                if shared.charge(buffer.len()) {
                    view.feed(&buffer, shared);
                }
                shared.give_back(buffer);
            }
        }
    }

    fn undecided(&self, tail: UndecidedTail) -> usize {
        if !self.is_inside || tail.at_least(self.length) == 0 {
            return 0;
        }
        if !self.is_open {
            return self.length + RUN_SLACK;
        }
        let held = self.views.iter().flatten().map(|(decoder, view)| {
            let pending = if tail == UndecidedTail::Possible { decoder.pending() } else { 0 };
            match view.undecided(tail) + pending {
                0 => 0,
                // Two characters for each byte at most, and some of them break lines.
                undecided => undecided * 2 + undecided / 8 + RUN_SLACK,
            }
        });
        held.max().unwrap_or_default().min(self.length + RUN_SLACK)
    }
}

/// Replaces the escapes of one syntax, in stretches around them.
struct Escapes {
    syntax: EscapeSyntax,
    view: Option<View>,
    /// Where the open view began and where it ends, unless there is another escape before.
    begin: u64,
    end: u64,
    /// An escape without its end.
    partial: Vec<u8>,
    /// What is decoded and not yet fed to the view.
    buffer: Vec<u8>,
}

impl Escapes {
    fn new(syntax: EscapeSyntax) -> Escapes {
        Escapes { syntax, view: None, begin: 0, end: 0, partial: Vec::new(), buffer: Vec::new() }
    }

    fn feed(&mut self, bytes: &[u8], offset: u64, history: &[u8], around: &[Encoding], shared: &mut Shared) {
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

    fn finish(&mut self, shared: &mut Shared) {
        if self.view.is_some() {
            let partial = std::mem::take(&mut self.partial);
            self.buffer.extend_from_slice(&partial);
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
        self.begin = begin - (late + early) as u64;
        if self.view.is_some() {
            let [first, second] = before;
            self.syntax.copy_plain(first.get(first.len() - early..).unwrap_or_default(), &mut self.buffer);
            self.syntax.copy_plain(second.get(second.len() - late..).unwrap_or_default(), &mut self.buffer);
        }
    }

    fn replace(&mut self, escape: Escape, begin: u64, shared: &mut Shared) {
        if self.view.is_none() {
            return;
        }
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
        self.end = begin + (length + ESCAPE_REACH) as u64;
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
        self.syntax.copy_plain(bytes.get(..bytes.len().min(left)).unwrap_or_default(), &mut self.buffer);
        if left < bytes.len() {
            self.close(shared);
        } else if self.buffer.len() >= PIECE {
            self.flush(shared);
        }
    }

    fn flush(&mut self, shared: &mut Shared) {
        if let Some(view) = &mut self.view
            && !self.buffer.is_empty()
            && shared.charge(self.buffer.len())
        {
            view.feed(&self.buffer, shared);
        }
        self.buffer.clear();
    }

    fn close(&mut self, shared: &mut Shared) {
        self.flush(shared);
        if let Some(view) = self.view.take() {
            shared.close_view(view);
        }
    }

    fn undecided(&self, offset: u64, tail: UndecidedTail) -> usize {
        let since = usize::try_from(offset - self.begin.min(offset)).unwrap_or(usize::MAX);
        let open = self
            .view
            .as_ref()
            .map_or(0, |view| view.undecided(tail).saturating_mul(self.syntax.widest).min(since));
        match (tail, open) {
            (UndecidedTail::Begun, 0) => 0,
            (UndecidedTail::Begun | UndecidedTail::Possible, _) => open + self.partial.len(),
        }
    }
}

/// A view that is compressed as a whole.
enum Compressed {
    /// The first bytes, too few to tell.
    Unknown(Vec<u8>),
    /// Compressed, as the caller said.
    Declared(Encoding),
    Stream(Box<Inflater>, View),
    /// Not compressed, or at its end.
    No,
}

impl Compressed {
    fn feed(&mut self, bytes: &[u8], around: &[Encoding], shared: &mut Shared) {
        match self {
            Compressed::No => {}
            Compressed::Declared(encoding) => {
                let encoding = *encoding;
                self.begin(encoding, true, around, shared);
                self.inflate(bytes, shared);
            }
            Compressed::Unknown(head) => {
                let early = head.len();
                head.extend_from_slice(bytes.get(..bytes.len().min(3)).unwrap_or_default());
                let head = std::mem::take(head);
                match magic(&head) {
                    Magic::Unknown => {
                        *self = Compressed::Unknown(head);
                        return;
                    }
                    Magic::Gzip => self.begin(Encoding::Gzip, false, around, shared),
                    Magic::Zlib => self.begin(Encoding::Deflate, false, around, shared),
                    Magic::None => *self = Compressed::No,
                }
                self.inflate(head.get(..early).unwrap_or_default(), shared);
                self.inflate(bytes, shared);
            }
            Compressed::Stream(..) => self.inflate(bytes, shared),
        }
    }

    fn begin(&mut self, encoding: Encoding, is_declared: bool, around: &[Encoding], shared: &mut Shared) {
        *self = match (encoding, shared.open_view(around, encoding)) {
            (Encoding::Gzip | Encoding::Deflate, Some(view)) => {
                Compressed::Stream(Box::new(Inflater::new(encoding, is_declared)), view)
            }
            (_, Some(view)) => {
                shared.close_view(view);
                Compressed::No
            }
            (_, None) => Compressed::No,
        };
    }

    fn inflate(&mut self, bytes: &[u8], shared: &mut Shared) {
        let Compressed::Stream(inflater, view) = self else { return };
        let result = inflater.feed(bytes, &mut |piece| {
            let is_allowed = shared.charge(piece.len());
            if is_allowed {
                view.feed(piece, shared);
            }
            is_allowed
        });
        if let Err(trouble) = result {
            shared.trouble.count(trouble);
        }
        if inflater.is_over()
            && let Compressed::Stream(_, view) = std::mem::replace(self, Compressed::No)
        {
            shared.close_view(view);
        }
    }

    fn finish(&mut self, shared: &mut Shared) {
        if let Compressed::Stream(inflater, view) = std::mem::replace(self, Compressed::No) {
            if !inflater.is_complete() {
                shared.trouble.count(Trouble::Truncated);
            }
            shared.close_view(view);
        }
    }

    fn undecided(&self, tail: UndecidedTail) -> usize {
        match self {
            Compressed::Unknown(head) => tail.at_least(head.len()),
            Compressed::Declared(_) | Compressed::No => 0,
            Compressed::Stream(_, view) => match view.undecided(tail) {
                0 => 0,
                undecided => undecided * 2 + BLOCK_SLACK,
            },
        }
    }
}
