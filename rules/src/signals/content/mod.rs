//! One pass over the content of a request, raw and decoded, for all matchers.
//!
//! The raw bytes are a view; each encoded run, escaped stretch or compressed stream in it is a view of its own, up to
//! two deep. Findings do not depend on how the bytes are split into pieces.

mod escaped;
mod gzip_parts;
mod nested;
mod origin;
mod stream;
mod view;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use self::gzip_parts::MAX_GZIP_PARTS;
use self::view::View;
use super::decode::compressed::StreamMemory;
use super::decode::{DecodeTrouble, MAX_DECOMPRESSED, STREAM_BYTES, Trouble};
use super::{Encoding, Signal, SignalCode, SignalPlace, ViewMatcher};

/// Most bytes that [`ContentScanner::undecided`] asks to hold back.
pub const MAX_UNDECIDED: usize = 64 * 1024;
/// Fewest bytes of an incomplete match, in the view where it is, that [`UndecidedTail::Begun`] counts: fewer occur in
/// any text, and say too little to wait for.
pub const MIN_BEGUN: usize = 12;
/// Most findings per request: of canaries, credentials and recalled text together, and as many of everything else.
pub const MAX_SIGNALS: usize = 32;
/// Most decoded views open at a time.
pub const MAX_OPEN_VIEWS: usize = 48;
/// Memory of a view at most, with what its matchers keep.
pub const VIEW_BYTES: usize = 48 * 1024;
/// Most compressed streams open at a time. Honest content has one for each depth; more begin where bytes only look like
/// a stream, or are made to.
pub const MAX_OPEN_STREAMS: usize = 8;
/// Most work of decoding for each byte of content, in bytes that views take. Ordinary content needs up to three.
pub const MAX_WORK: u64 = 8;
/// Work that is free, so that small content may be anything.
pub const FREE_WORK: u64 = 64 * 1024;
/// What opening a view counts as, in bytes.
const VIEW_WORK: u64 = 256;
/// Most bytes of fields to look at together.
const MAX_JOINED: usize = 4 * 1024;
/// Why content is not searched that the owner of the search has no memory for.
const NO_MEMORY: &str = "there is no memory to decode it";
/// Comes between them: in no alphabet, and in no value of a field.
const FIELD_END: u8 = 0;
/// Shortest encoded run in a body to decode.
pub const MIN_BODY_RUN: usize = 24;
/// How many bytes are decoded at a time.
const PIECE: usize = 4096;
/// Shortest encoded run elsewhere to decode.
pub const MIN_FIELD_RUN: usize = 16;

pub type BoxedMatcher = Box<dyn ViewMatcher + Send + Sync>;

/// Makes the matchers of a view.
pub trait MatcherFactory: Send + Sync {
    fn matchers(&self) -> Vec<BoxedMatcher>;

    /// Reserves memory that the search of one request needs beside its raw view: [`VIEW_BYTES`] for each decoded view,
    /// [`STREAM_BYTES`] for each compressed stream. Given back when the result is dropped. Where there is none, what
    /// needs it is not searched, which is a signal.
    fn reserve(&self, _bytes: usize) -> Option<SearchMemory> {
        Some(Box::new(()))
    }
}

/// What was reserved for a search.
pub type SearchMemory = Box<dyn Send + Sync>;

/// Which incomplete matches count as undecided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UndecidedTail {
    /// All that are possible, however little of them is there. More of the content follows, so nobody waits for it.
    Possible,
    /// Those of which at least [`MIN_BEGUN`] bytes are there. What follows may depend on an answer to what came so far,
    /// so nothing is held back that every text could be.
    Begun,
}

/// Bounds of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanLimits {
    /// Decompressed bytes, all views together.
    pub decompressed: u64,
    /// Findings.
    pub signals: usize,
}

/// Looks at the content of one request: its body in pieces, other parts at once.
pub struct ContentScanner {
    raw: View,
    place: SignalPlace,
    shared: Shared,
}

/// What the views of a request share.
struct Shared {
    factory: Arc<dyn MatcherFactory>,
    limits: ScanLimits,
    /// Bytes that came, raw and decompressed.
    content: u64,
    decompressed: u64,
    /// Bytes that views took, and [`VIEW_WORK`] for each view.
    work: u64,
    open: usize,
    /// Gzip headers followed.
    gzip_parts: usize,
    open_streams: Arc<AtomicUsize>,
    /// What is reserved for views, those in `pool` included.
    view_memory: Vec<SearchMemory>,
    trouble: DecodeTrouble,
    /// Why a part of the content is not searched, once that is known.
    unsearched: Option<&'static str>,
    is_unsearched_reported: bool,
    /// Views that are not in use, by the depth of what they hold.
    pool: [Vec<View>; 3],
    /// Buffers that are not in use.
    buffers: Vec<Vec<u8>>,
    /// What a matcher reports.
    scratch: Vec<Signal>,
    /// What was reported in this request.
    seen: Vec<(SignalCode, String, Vec<Encoding>)>,
    /// What is new since the last call.
    found: Vec<Signal>,
}

/// Counts a compressed stream while it is open.
struct OpenStream {
    count: Arc<AtomicUsize>,
    _memory: SearchMemory,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<F: Fn() -> Vec<BoxedMatcher> + Send + Sync> MatcherFactory for F {
    fn matchers(&self) -> Vec<BoxedMatcher> {
        self()
    }
}

impl UndecidedTail {
    /// Returns `bytes` if there are enough of them to count.
    fn at_least(self, bytes: usize) -> usize {
        match self {
            UndecidedTail::Possible => bytes,
            UndecidedTail::Begun => {
                if bytes < MIN_BEGUN {
                    0
                } else {
                    bytes
                }
            }
        }
    }
}

impl Default for ScanLimits {
    fn default() -> Self {
        ScanLimits { decompressed: MAX_DECOMPRESSED, signals: MAX_SIGNALS }
    }
}

impl ContentScanner {
    pub fn new(place: SignalPlace, factory: Arc<dyn MatcherFactory>, limits: ScanLimits) -> ContentScanner {
        let shared = Shared {
            factory,
            limits,
            content: 0,
            decompressed: 0,
            work: 0,
            open: 0,
            gzip_parts: 0,
            open_streams: Arc::default(),
            view_memory: Vec::new(),
            trouble: DecodeTrouble::default(),
            unsearched: None,
            is_unsearched_reported: false,
            pool: Default::default(),
            buffers: Vec::new(),
            scratch: Vec::new(),
            seen: Vec::new(),
            found: Vec::new(),
        };
        let mut raw = shared.build(0);
        raw.begin(&[], min_run(&place));
        ContentScanner { raw, place, shared }
    }

    /// Begins with another part of the same request, after [`ContentScanner::finish`].
    pub fn restart(&mut self, place: SignalPlace) {
        self.raw.begin(&[], min_run(&place));
        self.place = place;
    }

    /// Says how the content is compressed, as in `Content-Encoding`: gzip or deflate. Others have no effect.
    pub fn declare(&mut self, encoding: Encoding) {
        self.raw.declare(encoding);
    }

    /// Takes the next bytes and adds what they complete to `signals`. If a part of the content cannot be searched, for
    /// its cost or its form, that is a signal too, once.
    pub fn feed(&mut self, bytes: &[u8], signals: &mut Vec<Signal>) {
        self.shared.content += bytes.len() as u64;
        self.raw.feed(bytes, &mut self.shared);
        if self.raw.undecided(UndecidedTail::Possible) > MAX_UNDECIDED as u64 {
            self.shared
                .give_up(Trouble::Budget, "an encoding spreads what may be a match over too much of it");
        }
        self.hand_over(signals);
    }

    /// Ends the content.
    pub fn finish(&mut self, signals: &mut Vec<Signal>) {
        self.raw.finish(&mut self.shared);
        self.hand_over(signals);
    }

    /// Looks at a small part of a request at once: the value of a field, a segment of a path.
    pub fn scan_field(
        &mut self,
        bytes: &[u8],
        place: impl FnOnce() -> SignalPlace,
        signals: &mut Vec<Signal>,
    ) {
        self.raw.begin(&[], MIN_FIELD_RUN);
        self.shared.content += bytes.len() as u64;
        self.raw.feed(bytes, &mut self.shared);
        self.raw.finish(&mut self.shared);
        if !self.shared.found.is_empty() || self.shared.has_unsearched() {
            self.place = place();
            self.hand_over(signals);
        }
    }

    /// Looks at many small parts of a request: at all together, and if there is something, at each. Says where by its
    /// position in `fields`.
    pub fn scan_fields(
        &mut self,
        fields: &[&[u8]],
        place: impl Fn(usize) -> SignalPlace,
        signals: &mut Vec<Signal>,
    ) {
        let mut joined = self.shared.buffer();
        let mut first = 0;
        for (at, field) in fields.iter().enumerate() {
            if joined.len() + field.len() > MAX_JOINED {
                self.scan_joined(&joined, first, fields.get(first..at).unwrap_or_default(), &place, signals);
                joined.clear();
                first = at;
            }
            joined.extend_from_slice(field);
            joined.push(FIELD_END);
        }
        self.scan_joined(&joined, first, fields.get(first..).unwrap_or_default(), &place, signals);
        self.shared.give_back(joined);
    }

    fn scan_joined(
        &mut self,
        joined: &[u8],
        first: usize,
        fields: &[&[u8]],
        place: &impl Fn(usize) -> SignalPlace,
        signals: &mut Vec<Signal>,
    ) {
        let seen = self.shared.seen.len();
        self.raw.begin(&[], MIN_FIELD_RUN);
        self.shared.content += joined.len() as u64;
        self.raw.feed(joined, &mut self.shared);
        self.raw.finish(&mut self.shared);
        if self.shared.found.is_empty() && !self.shared.has_unsearched() {
            return;
        }
        self.shared.found.clear();
        self.shared.seen.truncate(seen);
        for (at, field) in fields.iter().enumerate() {
            self.scan_field(field, || place(first + at), signals);
        }
    }

    /// Returns how many of the last raw bytes to hold back, so that nothing of a match that is not complete has left,
    /// raw or encoded: those from the earliest place on where one may have begun. At most [`MAX_UNDECIDED`]; content in
    /// which one began longer ago is reported as not searched.
    pub fn undecided(&self, tail: UndecidedTail) -> usize {
        let undecided = self.raw.undecided(tail).min(MAX_UNDECIDED as u64);
        usize::try_from(undecided).unwrap_or(MAX_UNDECIDED)
    }

    /// Returns what did not decode so far in this request.
    pub fn trouble(&self) -> DecodeTrouble {
        self.shared.trouble
    }

    fn hand_over(&mut self, signals: &mut Vec<Signal>) {
        if let Some(why) = self.shared.unsearched.filter(|_| self.shared.has_unsearched()) {
            self.shared.is_unsearched_reported = true;
            signals.push(Signal {
                code: SignalCode::ContentUnsearched,
                place: self.place.clone(),
                encodings: Vec::new(),
                what: format!("content that is not searched to its end, because {why},"),
                value: 1,
                threshold: 1,
            });
        }
        signals
            .extend(self.shared.found.drain(..).map(|signal| Signal { place: self.place.clone(), ..signal }));
    }
}

impl Shared {
    fn build(&self, depth: usize) -> View {
        View::new(self.factory.matchers(), depth)
    }

    /// Opens a view for content in `encoding` within the encodings `around`, if the bounds allow another.
    fn open_view(&mut self, around: &[Encoding], encoding: Encoding) -> Option<View> {
        if self.open >= MAX_OPEN_VIEWS {
            self.give_up(Trouble::Budget, "too much is encoded in it at the same place");
            return None;
        }
        if !self.charge_work(VIEW_WORK) {
            return None;
        }
        self.open += 1;
        let depth = around.len() + 1;
        let mut view = match self.pool.get_mut(depth).and_then(Vec::pop) {
            Some(view) => view,
            None => {
                let Some(memory) = self.factory.reserve(VIEW_BYTES) else {
                    self.open -= 1;
                    self.give_up(Trouble::Budget, NO_MEMORY);
                    return None;
                };
                self.view_memory.push(memory);
                self.build(depth)
            }
        };
        let mut encodings = [encoding; 2];
        encodings[..around.len().min(1)].copy_from_slice(&around[..around.len().min(1)]);
        view.begin(&encodings[..depth.min(2)], MIN_BODY_RUN);
        Some(view)
    }

    /// Reserves what a compressed stream needs, if the bounds allow another.
    fn open_stream(&mut self) -> Option<StreamMemory> {
        if self.open_streams.load(Ordering::Relaxed) >= MAX_OPEN_STREAMS {
            self.give_up(Trouble::Budget, "too much of it is compressed at the same place");
            return None;
        }
        let Some(memory) = self.factory.reserve(STREAM_BYTES) else {
            self.give_up(Trouble::Budget, NO_MEMORY);
            return None;
        };
        self.open_streams.fetch_add(1, Ordering::Relaxed);
        Some(Box::new(OpenStream { count: self.open_streams.clone(), _memory: memory }))
    }

    /// Ends a view and keeps it for the next.
    fn close_view(&mut self, mut view: View) {
        view.finish(self);
        self.open -= 1;
        if let Some(pool) = self.pool.get_mut(view.depth()) {
            pool.push(view);
        }
    }

    /// Takes decoded bytes from the budget of the request. Returns whether it allows them.
    fn charge(&mut self, bytes: usize) -> bool {
        self.charge_work(bytes as u64)
    }

    /// The same for decompressed bytes, which are content like what came raw.
    fn charge_decompressed(&mut self, bytes: usize) -> bool {
        if self.decompressed >= self.limits.decompressed {
            self.give_up(Trouble::Budget, "it decompresses to too much");
            return false;
        }
        self.decompressed += bytes as u64;
        self.content += bytes as u64;
        self.charge_work(bytes as u64)
    }

    fn charge_work(&mut self, work: u64) -> bool {
        if self.work >= FREE_WORK + self.content * MAX_WORK {
            self.give_up(Trouble::Budget, "decoding it takes too long");
            return false;
        }
        self.work += work;
        true
    }

    /// Takes note that a part of the content is not searched.
    fn give_up(&mut self, trouble: Trouble, why: &'static str) {
        self.trouble.count(trouble);
        self.unsearched.get_or_insert(why);
    }

    fn has_unsearched(&self) -> bool {
        self.unsearched.is_some() && !self.is_unsearched_reported
    }

    fn buffer(&mut self) -> Vec<u8> {
        self.buffers.pop().unwrap_or_default()
    }

    fn give_back(&mut self, mut buffer: Vec<u8>) {
        buffer.clear();
        self.buffers.push(buffer);
    }

    /// Takes over what matchers of a view within `encodings` put into `scratch`.
    fn report(&mut self, encodings: &[Encoding]) {
        for mut signal in self.scratch.drain(..) {
            let is_seen = self.seen.iter().any(|(code, what, around)| {
                *code == signal.code && *what == signal.what && around == encodings
            });
            // What is only flagged must not use up the bound of what is denied by default.
            let same_bound = self.seen.iter().filter(|(code, ..)| is_grave(*code) == is_grave(signal.code));
            if is_seen || same_bound.count() >= self.limits.signals {
                continue;
            }
            signal.encodings = encodings.to_vec();
            self.seen.push((signal.code, signal.what.clone(), encodings.to_vec()));
            self.found.push(signal);
        }
    }
}

/// Returns whether a signal means that a particular value or text leaves, not something of its shape.
fn is_grave(code: SignalCode) -> bool {
    matches!(code, SignalCode::CanaryUsed | SignalCode::CredentialLeaving | SignalCode::MemoryFlow)
}

fn min_run(place: &SignalPlace) -> usize {
    if *place == SignalPlace::Body { MIN_BODY_RUN } else { MIN_FIELD_RUN }
}
