//! What is encoded in a view: runs of an alphabet here, stretches with escapes and compressed streams beside it.

use super::escaped::{ESCAPE_REACH, Escapes};
use super::gzip_parts::GzipParts;
use super::origin::OriginMap;
use super::stream::Compressed;
use super::view::View;
use super::{PIECE, Shared, UndecidedTail};
use crate::signals::Encoding;
use crate::signals::decode::alphabet::{
    HEAD, MAX_PHASES, PhaseDecoder, base64_flavour, is_compressed, phases,
};
use crate::signals::decode::escapes::SYNTAXES;
use crate::signals::decode::runs::{BASE32_LOWER, BASE32_UPPER, BASE64, HEX, RunEvent, RunTracker, has_run};

/// How many characters are decoded before their place is noted again.
const STRIDE: usize = 256;
/// Comes between decoded runs: in no alphabet.
const RUN_END: u8 = 0;
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
        self.gzip_parts.feed(bytes, (self.offset, &self.history), around, shared);
        for escapes in &mut self.escapes {
            escapes.feed(bytes, (self.offset, &self.history), around, shared);
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
        let Nested { offset, base64_runs, base64, others, .. } = self;
        let min = base64_runs.min();
        base64_runs.feed(bytes, *offset, |run| is_plain(run, min), &mut |event| {
            pass_event(event, base64, others, around, shared)
        });
    }

    /// Returns how many of the last bytes belong to something encoded that holds a match that is not complete.
    pub(super) fn undecided(&self, tail: UndecidedTail) -> u64 {
        let offset = self.offset;
        let carried = |tracker: &RunTracker| tail.at_least(tracker.carried()) as u64;
        let escapes = self.escapes.iter().map(|escapes| escapes.undecided(offset, tail));
        let others = self
            .others
            .iter()
            .map(|(tracker, decoder)| carried(tracker).max(decoder.undecided(offset, tail)));
        let parts = [
            carried(&self.base64_runs),
            self.base64.undecided(offset, tail),
            self.compressed.undecided(offset, tail),
            self.gzip_parts.undecided(offset, tail),
        ];
        parts.into_iter().chain(escapes).chain(others).max().unwrap_or_default().min(offset)
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
            RunEvent::Bytes(bytes, place) => tracker.feed(bytes, place, |_| false, &mut sink),
            RunEvent::Break => tracker.feed(b"\n", 0, |_| false, &mut sink),
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
    /// Where the run begins.
    begin: u64,
    phases: [Option<OpenPhase>; MAX_PHASES],
    /// Short runs that ended, decoded, by the alphabet: a view for each alone would cost far more than its content.
    batches: Vec<(Encoding, Vec<u8>)>,
}

/// A long run, decoded from one of its phases on.
struct OpenPhase {
    decoder: PhaseDecoder,
    view: View,
    /// Where what is decoded comes from.
    origin: OriginMap,
    /// Where the last two characters are: what is decoded next may begin in them.
    last: [u64; 2],
    /// What is decoded and not yet fed to the view: lines may be short.
    buffer: Vec<u8>,
}

impl OpenPhase {
    /// Decodes characters of which the first is at `place`.
    fn decode(&mut self, text: &[u8], mut place: u64, shared: &mut Shared) {
        for piece in text.chunks(STRIDE) {
            let [earliest, _] = self.last;
            self.origin.mark(if self.decoder.pending() == 0 { place } else { earliest });
            let known = self.buffer.len();
            self.decoder.decode(piece, &mut self.buffer);
            self.origin.add(self.buffer.len() - known);
            let end = place + piece.len() as u64;
            let [_, before] = self.last;
            self.last = [if piece.len() > 1 { end - 2 } else { before }, end - 1];
            place = end;
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
            begin: 0,
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
            RunEvent::Bytes(bytes, place) => {
                if self.length == 0 {
                    self.begin = place;
                }
                self.length += bytes.len();
                let missing = if self.is_open { 0 } else { HEAD - self.head.len() };
                let (head, rest) = bytes.split_at(bytes.len().min(missing));
                self.head.extend_from_slice(head);
                if !self.is_open && self.head.len() == HEAD {
                    self.open(around, shared);
                }
                let place = place + head.len() as u64;
                self.phases.iter_mut().flatten().for_each(|phase| phase.decode(rest, place, shared));
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
                let mut origin = OriginMap::default();
                origin.begin(self.begin);
                let (last, buffer) = ([self.begin; 2], shared.buffer());
                let mut open = OpenPhase { decoder, view, origin, last, buffer };
                // Lines may break within the head: all of it counts as one place.
                open.decode(&self.head, self.begin, shared);
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

    /// Returns how many of the `offset` bytes of the view to hold back.
    fn undecided(&self, offset: u64, tail: UndecidedTail) -> u64 {
        let since = |place: u64| offset - place.min(offset);
        if !self.is_inside || tail.at_least(self.length) == 0 {
            return 0;
        }
        if !self.is_open {
            return since(self.begin);
        }
        let held = self.phases.iter().flatten().map(|phase| {
            let pending = tail == UndecidedTail::Possible && phase.decoder.pending() > 0;
            match phase.view.undecided(tail) {
                0 if !pending => 0,
                undecided => since(phase.origin.origin(undecided)),
            }
        });
        held.max().unwrap_or_default()
    }
}
