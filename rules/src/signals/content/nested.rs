//! What is encoded in a view: runs of an alphabet, stretches with escapes, compressed streams.

use super::gzip_parts::GzipParts;
use super::view::View;
use super::{Shared, UndecidedTail};
use crate::signals::Encoding;
use crate::signals::decode::Trouble;
use crate::signals::decode::alphabet::{
    HEAD, MAX_PHASES, PhaseDecoder, base64_flavour, is_compressed, phases,
};
use crate::signals::decode::compressed::{Inflater, Magic, magic};
use crate::signals::decode::escapes::{Escape, EscapeSyntax, MAX_ESCAPE, SYNTAXES};
use crate::signals::decode::runs::{BASE32_LOWER, BASE32_UPPER, BASE64, HEX, RunEvent, RunTracker, has_run};

/// How far around an escape its view reaches. A secret of which one character is escaped lies within.
const ESCAPE_REACH: usize = 256;
/// What replacing an escape counts as, in bytes that a view takes.
const ESCAPE_WORK: usize = 8;
/// How many characters are decoded at a time.
const PIECE: usize = 4096;
/// Line breaks and incomplete groups beside a match in a run.
const RUN_SLACK: usize = 24;
/// Comes between decoded runs: in no alphabet.
const RUN_END: u8 = 0;
/// Headers of a compressed block beside a match in it.
pub(super) const BLOCK_SLACK: usize = 512;

/// Why a stream is given up that yields far more than it has.
pub(super) const BOMB: &str = "it expands like a bomb";

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
        self.flush_runs(around, shared);
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
        self.flush_runs(around, shared);
    }

    /// Feeds what the runs decoded to: between two pieces, everything is looked at.
    fn flush_runs(&mut self, around: &[Encoding], shared: &mut Shared) {
        self.base64.flush(around, shared);
        self.others.iter_mut().for_each(|(_, decoder)| decoder.flush(around, shared));
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
    phases: [Option<OpenPhase>; MAX_PHASES],
    /// Short runs that ended, decoded, by the alphabet: a view for each alone would cost far more than its content.
    batches: Vec<(Encoding, Vec<u8>)>,
}

/// A long run, decoded from one of its phases on.
struct OpenPhase {
    decoder: PhaseDecoder,
    view: View,
    /// What is decoded and not yet fed to the view: lines may be short.
    buffer: Vec<u8>,
}

impl OpenPhase {
    fn decode(&mut self, text: &[u8], shared: &mut Shared) {
        for piece in text.chunks(PIECE) {
            self.decoder.decode(piece, &mut self.buffer);
            if self.buffer.len() >= PIECE {
                self.flush(shared);
            }
        }
    }

    fn flush(&mut self, shared: &mut Shared) {
        if !self.buffer.is_empty() && shared.charge(self.buffer.len()) {
            self.view.feed(&self.buffer, shared);
        }
        self.buffer.clear();
    }
}

impl RunDecoder {
    fn new(encoding: Encoding) -> RunDecoder {
        RunDecoder {
            encoding,
            is_inside: false,
            is_open: false,
            head: Vec::new(),
            length: 0,
            phases: [const { None }; MAX_PHASES],
            batches: Vec::new(),
        }
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
                let missing = if self.is_open { 0 } else { HEAD - self.head.len() };
                let (head, rest) = bytes.split_at(bytes.len().min(missing));
                self.head.extend_from_slice(head);
                if !self.is_open && self.head.len() == HEAD {
                    self.open(around, shared);
                }
                self.phases.iter_mut().flatten().for_each(|phase| phase.decode(rest, shared));
            }
            RunEvent::Break => self.length += 1,
            RunEvent::End => {
                if !self.is_open {
                    self.end_short(around, shared);
                }
                for mut phase in self.phases.iter_mut().filter_map(Option::take) {
                    phase.flush(shared);
                    shared.give_back(phase.buffer);
                    shared.close_view(phase.view);
                }
                self.is_inside = false;
            }
        }
    }

    /// Opens a view for each phase that may yield content, and decodes what came so far.
    fn open(&mut self, around: &[Encoding], shared: &mut Shared) {
        self.is_open = true;
        let encoding = self.flavour();
        for (phase, is_wanted) in phases(encoding, &self.head).into_iter().enumerate() {
            let view = if is_wanted { shared.open_view(around, encoding) } else { None };
            if let Some(view) = view {
                let decoder = PhaseDecoder::new(encoding, phase);
                let mut open = OpenPhase { decoder, view, buffer: shared.buffer() };
                open.decode(&self.head, shared);
                self.phases[phase] = Some(open);
            }
        }
    }

    /// Decodes a run that ended within its head.
    fn end_short(&mut self, around: &[Encoding], shared: &mut Shared) {
        if is_compressed(self.encoding, &self.head) {
            // Compression shows at the beginning of a view.
            return self.open(around, shared);
        }
        let encoding = self.flavour();
        for (phase, is_wanted) in phases(encoding, &self.head).into_iter().enumerate() {
            if is_wanted {
                let at = self.batches.iter().position(|(other, _)| *other == encoding);
                let at = at.unwrap_or_else(|| {
                    self.batches.push((encoding, shared.buffer()));
                    self.batches.len() - 1
                });
                if let Some((_, batch)) = self.batches.get_mut(at) {
                    PhaseDecoder::new(encoding, phase).decode(&self.head, batch);
                    batch.push(RUN_END);
                }
            }
        }
        if self.batches.iter().any(|(_, batch)| batch.len() >= PIECE) {
            self.flush_batches(around, shared);
        }
    }

    /// Feeds what is decoded to the views.
    fn flush(&mut self, around: &[Encoding], shared: &mut Shared) {
        self.phases.iter_mut().flatten().for_each(|phase| phase.flush(shared));
        self.flush_batches(around, shared);
    }

    fn flush_batches(&mut self, around: &[Encoding], shared: &mut Shared) {
        for (encoding, batch) in self.batches.drain(..) {
            if let Some(mut view) = shared.open_view(around, encoding) {
                if shared.charge(batch.len()) {
                    view.feed(&batch, shared);
                }
                shared.close_view(view);
            }
            shared.give_back(batch);
        }
    }

    fn flavour(&self) -> Encoding {
        if self.encoding == Encoding::Base64 { base64_flavour(&self.head) } else { self.encoding }
    }

    fn undecided(&self, tail: UndecidedTail) -> usize {
        if !self.is_inside || tail.at_least(self.length) == 0 {
            return 0;
        }
        if !self.is_open {
            return self.length + RUN_SLACK;
        }
        let held = self.phases.iter().flatten().map(|phase| {
            let pending = if tail == UndecidedTail::Possible { phase.decoder.pending() } else { 0 };
            match phase.view.undecided(tail) + pending {
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
    /// What is decoded and not yet fed to the view, and how many escapes are in it.
    buffer: Vec<u8>,
    replaced: usize,
}

impl Escapes {
    fn new(syntax: EscapeSyntax) -> Escapes {
        Escapes { syntax, view: None, begin: 0, end: 0, partial: Vec::new(), buffer: Vec::new(), replaced: 0 }
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

/// Whether a stream is one because the client says so. Else it only looks like one, and may be cut, as parts of an upload
/// are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Declared,
    Magic,
}

/// A view that is compressed as a whole.
enum Compressed {
    /// The first bytes, too few to tell.
    Unknown(Vec<u8>),
    /// Compressed, as the caller said.
    Declared(Encoding),
    Stream(Box<Inflater>, View, Origin),
    /// Not compressed, or at its end.
    No,
}

impl Compressed {
    fn feed(&mut self, bytes: &[u8], around: &[Encoding], shared: &mut Shared) {
        match self {
            Compressed::No => {}
            Compressed::Declared(encoding) => {
                let encoding = *encoding;
                self.begin(encoding, Origin::Declared, around, shared);
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
                    Magic::Gzip => self.begin(Encoding::Gzip, Origin::Magic, around, shared),
                    Magic::Zlib => self.begin(Encoding::Deflate, Origin::Magic, around, shared),
                    Magic::None => *self = Compressed::No,
                }
                self.inflate(head.get(..early).unwrap_or_default(), shared);
                self.inflate(bytes, shared);
            }
            Compressed::Stream(..) => self.inflate(bytes, shared),
        }
    }

    fn begin(&mut self, encoding: Encoding, origin: Origin, around: &[Encoding], shared: &mut Shared) {
        *self = match (encoding, shared.open_view(around, encoding)) {
            (Encoding::Gzip | Encoding::Deflate, Some(view)) => Compressed::Stream(
                Box::new(Inflater::new(encoding, origin == Origin::Declared)),
                view,
                origin,
            ),
            (_, Some(view)) => {
                shared.close_view(view);
                Compressed::No
            }
            (_, None) => Compressed::No,
        };
    }

    fn inflate(&mut self, bytes: &[u8], shared: &mut Shared) {
        let Compressed::Stream(inflater, view, origin) = self else { return };
        let result = inflater.feed(bytes, &mut |piece| {
            let is_allowed = shared.charge_decompressed(piece.len());
            if is_allowed {
                view.feed(piece, shared);
            }
            is_allowed
        });
        match (result, *origin) {
            // The budget counts itself.
            (Ok(()) | Err(Trouble::Budget), _) => {}
            (Err(trouble @ Trouble::Expansion), _) => shared.give_up(trouble, BOMB),
            (Err(trouble), Origin::Declared) => shared.give_up(trouble, "its compression is corrupt"),
            (Err(trouble), Origin::Magic) => shared.trouble.count(trouble),
        }
        if inflater.is_over()
            && let Compressed::Stream(_, view, _) = std::mem::replace(self, Compressed::No)
        {
            shared.close_view(view);
        }
    }

    fn finish(&mut self, shared: &mut Shared) {
        if let Compressed::Stream(inflater, view, origin) = std::mem::replace(self, Compressed::No) {
            match (inflater.is_complete(), origin) {
                (true, _) => {}
                (false, Origin::Declared) => shared.give_up(Trouble::Truncated, "its compression ends early"),
                (false, Origin::Magic) => shared.trouble.count(Trouble::Truncated),
            }
            shared.close_view(view);
        }
    }

    fn undecided(&self, tail: UndecidedTail) -> usize {
        match self {
            Compressed::Unknown(head) => tail.at_least(head.len()),
            Compressed::Declared(_) | Compressed::No => 0,
            Compressed::Stream(_, view, _) => match view.undecided(tail) {
                0 => 0,
                undecided => undecided * 2 + BLOCK_SLACK,
            },
        }
    }
}
