//! Shapes of keys, tokens and passwords, and exact values that must not leave.
//!
//! A search for a few hundred short literals finds candidates; only at these a shape is checked. The matcher keeps what
//! may still become a secret, at most [`MAX_SECRET`] bytes, so matches do not depend on how the bytes arrive.

mod candidate;
mod own;
mod shapes;

use std::fmt;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind, packed};
use memchr::memmem;

pub use self::own::{MAX_OWN_LENGTH, MAX_OWN_PATTERNS, MIN_OWN_PREFIX, OwnPattern, OwnPatternError};

pub(super) use self::candidate::base64;
use self::candidate::{ByteSet, Candidate, LETTER, Verdict};
use self::shapes::{SHAPES, Shape};
use super::{Signal, SignalCode, SignalPlace, ViewMatcher};

/// Longest secret to recognise: a candidate that is not decided within so many bytes is dropped.
pub const MAX_SECRET: usize = 4096;
/// Most exact values.
pub const MAX_EXACT_VALUES: usize = 1024;
/// Shortest exact value: fewer bytes would occur by chance.
pub const MIN_EXACT_VALUE: usize = 6;
/// Longest exact value.
pub const MAX_EXACT_VALUE: usize = MAX_SECRET;

/// How many bytes of a prefix the search for candidates compares.
const FINGERPRINT: usize = 8;
/// How many bytes before a candidate a shape may look at.
const LOOK_BEHIND: usize = 1;
/// Prefixes this short would slow the search for all others: each gets a search of its own.
const SHORT_PREFIX: usize = 2;
/// Shorter text is padded for the search.
const PADDED: usize = 64;
/// From so many kept bytes on, candidates are checked again only when an eighth was added.
const RETRY_EACH_BYTE: usize = 256;

/// An exact value to recognise, in upper and lower case as given.
#[derive(Clone, PartialEq, Eq)]
pub struct ExactValue {
    /// What it is, in words for an analyst. Never the value.
    pub label: String,
    pub code: SignalCode,
    pub bytes: Vec<u8>,
}

/// What every placeholder of a credential contains, before its random part.
pub const PLACEHOLDER_MARK: &str = "sbxph";
/// Characters of the random part, in lower-case base32 (RFC 4648): 130 bits.
pub const PLACEHOLDER_LENGTH: usize = 26;

/// Base32 in either letter case, which DNS and some encodings change.
const PLACEHOLDER_CLASS: ByteSet = LETTER.with_range(b'2', b'7');

/// What to look for.
#[derive(Clone, Debug)]
pub struct SecretSettings {
    /// Whether placeholders of credentials are looked for, of whatever sandbox.
    pub placeholders: bool,
    /// Whether the table of known shapes applies.
    pub known_shapes: bool,
    pub own_patterns: Vec<OwnPattern>,
    pub exact_values: Vec<ExactValue>,
}

/// Why settings do not compile. Never shows a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternSetError {
    #[error(
        "`{label}` has {length} bytes; values from {MIN_EXACT_VALUE} to {MAX_EXACT_VALUE} bytes can be recognised"
    )]
    ExactLength { label: String, length: usize },
    #[error("the search for candidates does not compile")]
    Search,
    #[error("{0} patterns; at most {MAX_OWN_PATTERNS} are possible")]
    TooManyPatterns(usize),
    #[error("{0} values; at most {MAX_EXACT_VALUES} are possible")]
    TooManyValues(usize),
}

/// Everything to look for, compiled. Shared by all matchers.
pub struct PatternSet {
    rows: Vec<Row>,
    searches: Vec<Search>,
    /// Rows and their prefix, by its first byte.
    by_first: Vec<Vec<(u16, Box<[u8]>)>>,
}

/// Finds secrets in one view.
pub struct SecretMatcher {
    set: Arc<PatternSet>,
    /// The last [`LOOK_BEHIND`] bytes that are decided, then those that are not.
    kept: Vec<u8>,
    /// How many bytes of `kept` are decided.
    context: usize,
    /// Length of `kept` at which its candidates are checked again.
    retry: usize,
    /// The rows reported in this view already.
    reported: Vec<bool>,
    has_reported: bool,
}

struct Row {
    what: String,
    code: SignalCode,
    check: RowCheck,
}

enum RowCheck {
    Exact,
    Own(OwnPattern),
    Placeholder,
    Shape(&'static Shape),
}

enum Search {
    Automaton(Box<AhoCorasick>),
    Packed(Box<packed::Searcher>),
    Short(Box<memmem::Finder<'static>>),
}

impl Default for SecretSettings {
    fn default() -> Self {
        SecretSettings {
            placeholders: false,
            known_shapes: true,
            own_patterns: Vec::new(),
            exact_values: Vec::new(),
        }
    }
}

/// Returns what each known shape of a secret is, in words.
pub fn shape_names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|shape| shape.what)
}

impl PatternSet {
    /// Compiles what to look for.
    ///
    /// # Errors
    ///
    /// Returns [`PatternSetError`] for too many patterns or values, and for values too short or too long to recognise.
    pub fn compile(settings: &SecretSettings) -> Result<PatternSet, PatternSetError> {
        if settings.own_patterns.len() > MAX_OWN_PATTERNS {
            return Err(PatternSetError::TooManyPatterns(settings.own_patterns.len()));
        }
        if settings.exact_values.len() > MAX_EXACT_VALUES {
            return Err(PatternSetError::TooManyValues(settings.exact_values.len()));
        }
        let mut set = PatternSet { rows: Vec::new(), searches: Vec::new(), by_first: vec![Vec::new(); 256] };
        let mut known = Vec::new();
        for shape in SHAPES.iter().filter(|_| settings.known_shapes) {
            let prefixes = shape.prefixes.iter().map(|prefix| prefix.as_bytes());
            known.extend(prefixes.clone().map(fingerprint));
            set.add(shape.what.to_owned(), SignalCode::SecretFound, RowCheck::Shape(shape), prefixes);
        }
        let mut given = Vec::new();
        for pattern in &settings.own_patterns {
            given.push(fingerprint(&pattern.prefix));
            let what = pattern.label.clone();
            set.add(what, SignalCode::SecretFound, RowCheck::Own(pattern.clone()), [&pattern.prefix[..]]);
        }
        if settings.placeholders {
            let upper = PLACEHOLDER_MARK.to_ascii_uppercase();
            let prefixes = [PLACEHOLDER_MARK.as_bytes(), upper.as_bytes()];
            given.extend(prefixes.map(fingerprint));
            let what = "the placeholder of a credential".to_owned();
            set.add(what, SignalCode::PlaceholderMisused, RowCheck::Placeholder, prefixes);
        }
        for value in &settings.exact_values {
            if !(MIN_EXACT_VALUE..=MAX_EXACT_VALUE).contains(&value.bytes.len()) {
                let (label, length) = (value.label.clone(), value.bytes.len());
                return Err(PatternSetError::ExactLength { label, length });
            }
            given.push(fingerprint(&value.bytes));
            set.add(value.label.clone(), value.code, RowCheck::Exact, [&value.bytes[..]]);
        }
        set.search_for(known)?;
        set.search_for(given)?;
        Ok(set)
    }

    fn add<'a>(
        &mut self,
        what: String,
        code: SignalCode,
        check: RowCheck,
        prefixes: impl IntoIterator<Item = &'a [u8]>,
    ) {
        let row = self.rows.len() as u16;
        self.rows.push(Row { what, code, check });
        for prefix in prefixes {
            if let Some(first) = prefix.first() {
                self.by_first[usize::from(*first)].push((row, prefix.into()));
            }
        }
    }

    fn search_for(&mut self, mut fingerprints: Vec<Vec<u8>>) -> Result<(), PatternSetError> {
        fingerprints.sort();
        fingerprints.dedup();
        let (short, long): (Vec<_>, Vec<_>) =
            fingerprints.into_iter().partition(|print| print.len() <= SHORT_PREFIX);
        self.searches.extend(
            short.iter().map(|print| Search::Short(Box::new(memmem::Finder::new(print).into_owned()))),
        );
        // The packed search compares as many bytes as its shortest pattern has, at most four: two searches, each
        // precise, are faster than one.
        let (three, four): (Vec<_>, Vec<_>) = long.into_iter().partition(|print| print.len() < 4);
        for prints in [three, four].into_iter().filter(|prints| !prints.is_empty()) {
            // It takes few patterns, and none on a processor without the instructions for it.
            let packed = packed::Config::new().builder().extend(&prints).build();
            self.searches.push(match packed {
                Some(packed) => Search::Packed(Box::new(packed)),
                None => AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostFirst)
                    .build(&prints)
                    .map(|automaton| Search::Automaton(Box::new(automaton)))
                    .map_err(|_| PatternSetError::Search)?,
            });
        }
        Ok(())
    }

    /// Returns how many of the last bytes of `text` may begin a prefix.
    fn partial_prefix(&self, text: &[u8]) -> usize {
        let from = text.len().saturating_sub(FINGERPRINT - 1);
        let tail = text.get(from..).unwrap_or_default();
        (0..tail.len())
            .find(|at| {
                let rest = tail.get(*at..).unwrap_or_default();
                let rows = rest.first().map(|first| &self.by_first[usize::from(*first)]);
                rows.is_some_and(|rows| rows.iter().any(|(_, prefix)| prefix.starts_with(rest)))
            })
            .map_or(0, |at| tail.len() - at)
    }

    /// Returns the positions of candidates at or after `from`, the first of each search.
    fn next_candidate(&self, search: &Search, text: &[u8], from: usize) -> Option<usize> {
        match search {
            Search::Automaton(automaton) => {
                automaton.find(aho_corasick::Input::new(text).range(from..)).map(|found| found.start())
            }
            Search::Packed(packed) => {
                // Text shorter than a few vectors would be searched a byte at a time: it is copied and padded instead.
                let rest = text.get(from..)?;
                let mut padded = [0; PADDED];
                let found = match padded.get_mut(..rest.len()) {
                    Some(copy) => {
                        copy.copy_from_slice(rest);
                        packed.find(padded).map(|found| found.start() + from)
                    }
                    None => {
                        let span = aho_corasick::Span { start: from, end: text.len() };
                        packed.find_in(text, span).map(|found| found.start())
                    }
                };
                found.filter(|at| *at < text.len())
            }
            Search::Short(finder) => finder.find(text.get(from..)?).map(|at| at + from),
        }
    }
}

impl SecretMatcher {
    pub fn new(set: Arc<PatternSet>) -> SecretMatcher {
        let reported = vec![false; set.rows.len()];
        SecretMatcher { set, kept: Vec::new(), context: 0, retry: 0, reported, has_reported: false }
    }

    /// Checks the candidates of `text` that begin in `starts`. Returns the first that is not decided.
    fn check(
        &mut self,
        text: &[u8],
        starts: std::ops::Range<usize>,
        ended: bool,
        found: &mut Vec<Signal>,
    ) -> Option<usize> {
        let set = Arc::clone(&self.set);
        let mut undecided: Option<usize> = None;
        for search in &set.searches {
            let mut from = starts.start;
            let last = undecided.unwrap_or(starts.end);
            while from < last {
                let Some(at) = set.next_candidate(search, text, from).filter(|at| *at < last) else { break };
                if self.check_at(&set, text, at, ended, found) == Verdict::More {
                    undecided = Some(at);
                    break;
                }
                from = at + 1;
            }
        }
        undecided
    }

    /// Checks every row whose prefix is at `at`. Returns [`Verdict::More`] if one of them is not decided.
    fn check_at(
        &mut self,
        set: &PatternSet,
        text: &[u8],
        at: usize,
        ended: bool,
        found: &mut Vec<Signal>,
    ) -> Verdict {
        let rest = text.get(at..).unwrap_or_default();
        // Up to the border of what is kept, the text before is that of the last call.
        let before = match text.get(..at).unwrap_or_default() {
            [] => self.kept.get(..self.context).unwrap_or_default(),
            before => before,
        };
        let last = [before.last().copied().unwrap_or_default()];
        let before = if before.is_empty() { &[][..] } else { &last[..] };
        let rows = rest.first().map(|first| &set.by_first[usize::from(*first)][..]).unwrap_or_default();
        let mut decided = Verdict::No;
        for (index, prefix) in rows {
            let index = usize::from(*index);
            if self.reported[index] {
                continue;
            }
            let row = &set.rows[index];
            let candidate = Candidate { before, text: rest, prefix: prefix.len(), ended };
            let verdict = match &row.check {
                _ if rest.len() < prefix.len() && prefix.starts_with(rest) => candidate.short(),
                _ if !rest.starts_with(prefix) => Verdict::No,
                RowCheck::Exact => Verdict::Yes,
                RowCheck::Own(pattern) => pattern.validate(&candidate),
                RowCheck::Placeholder => candidate.at_least(&PLACEHOLDER_CLASS, PLACEHOLDER_LENGTH, |_| true),
                RowCheck::Shape(shape) => (shape.validate)(&candidate),
            };
            match verdict {
                Verdict::Yes => {
                    self.reported[index] = true;
                    self.has_reported = true;
                    found.push(row.signal());
                }
                Verdict::More if rest.len() < MAX_SECRET => decided = Verdict::More,
                Verdict::More | Verdict::No => {}
            }
        }
        decided
    }

    /// Checks what is kept together with `bytes`. Returns how many of `bytes` are in `kept` now, or `None` if nothing
    /// of what was kept is undecided any more; the candidates in `bytes` are not checked then.
    fn check_kept(&mut self, bytes: &[u8], found: &mut Vec<Signal>) -> Option<usize> {
        let mut text = std::mem::take(&mut self.kept);
        let end = text.len();
        let mut taken = 0;
        for most in [64, MAX_SECRET + FINGERPRINT] {
            let more = bytes.get(taken..bytes.len().min(most)).unwrap_or_default();
            text.extend_from_slice(more);
            taken += more.len();
            if taken == bytes.len() && text.len() < self.retry {
                self.kept = text;
                return Some(taken);
            }
            let undecided = self.check(&text, self.context..end, false, found);
            let undecided = undecided.or_else(|| {
                // Too few bytes to see a whole fingerprint.
                let partial = text.len() - self.set.partial_prefix(&text);
                (taken == bytes.len() && partial < end).then_some(partial)
            });
            if undecided.is_none() {
                text.truncate(end);
                self.kept = text;
                return None;
            }
            if taken == bytes.len() {
                self.kept = text;
                self.keep_from(undecided.unwrap_or(end));
                return Some(taken);
            }
        }
        // With so many bytes after it, no candidate is undecided.
        text.truncate(end);
        self.kept = text;
        None
    }

    /// Drops what is kept before `at`, but for the context.
    fn keep_from(&mut self, at: usize) {
        let context = at.min(LOOK_BEHIND);
        self.kept.drain(..at - context);
        self.context = context;
        let length = self.kept.len();
        self.retry = if length < RETRY_EACH_BYTE { 0 } else { length + length / 8 };
    }

    fn reset(&mut self) {
        self.kept.clear();
        self.context = 0;
        self.retry = 0;
        if std::mem::take(&mut self.has_reported) {
            self.reported.fill(false);
        }
    }
}

impl ViewMatcher for SecretMatcher {
    fn feed(&mut self, bytes: &[u8], found: &mut Vec<Signal>) {
        if bytes.is_empty() {
            return;
        }
        if self.kept.len() > self.context {
            if let Some(taken) = self.check_kept(bytes, found) {
                debug_assert_eq!(taken, bytes.len());
                return;
            }
            self.keep_from(self.kept.len());
        }
        let undecided = self.check(bytes, 0..bytes.len(), false, found);
        let from = undecided.unwrap_or_else(|| bytes.len() - self.set.partial_prefix(bytes));
        let context = from.min(LOOK_BEHIND);
        if context > 0 {
            self.kept.clear();
        }
        self.kept.extend_from_slice(bytes.get(from - context..).unwrap_or_default());
        self.context = self.kept.len() - (bytes.len() - from);
        self.retry = 0;
    }

    fn finish(&mut self, found: &mut Vec<Signal>) {
        if self.kept.len() > self.context {
            let text = std::mem::take(&mut self.kept);
            self.check(&text, self.context..text.len(), true, found);
            self.kept = text;
        }
        self.reset();
    }

    /// At most [`MAX_SECRET`].
    fn undecided(&self) -> usize {
        self.kept.len() - self.context
    }
}

impl Row {
    fn signal(&self) -> Signal {
        Signal {
            code: self.code,
            place: SignalPlace::Attempt,
            encodings: Vec::new(),
            what: self.what.clone(),
            value: 1,
            threshold: 1,
        }
    }
}

impl fmt::Debug for ExactValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExactValue")
            .field("label", &self.label)
            .field("code", &self.code)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for PatternSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PatternSet").field("rows", &self.rows.len()).finish_non_exhaustive()
    }
}

fn fingerprint(prefix: &[u8]) -> Vec<u8> {
    prefix.iter().take(FINGERPRINT).copied().collect()
}

#[cfg(test)]
pub(super) mod tests;
