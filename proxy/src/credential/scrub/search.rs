//! One pass over a text: the filter names places, and each is compared as it stands or in a view of the text around it.
//!
//! The text around a place goes from one octet that cannot be part of an echo to the next, so each part of a text is
//! read once, whatever it contains, and how a text is read does not depend on how it arrived in pieces.

use std::ops::Range;

use super::EchoPatterns;
use super::escapes::EscapeFamilies;
use super::filter::Window;
use super::forms::{Form, FormKind, LetterCase, Reading};
use super::views::{Extent, MAX_BLANKS, View};

/// Most octets of a text for one octet of an echo: the longest escape, and blanks before it.
const MAX_SPELLED: usize = super::escapes::MAX_ESCAPE + MAX_BLANKS;

/// Most octets that are held back. An echo that goes on for longer is masked as far as it came.
pub(crate) const MAX_HELD: usize = 128 << 10;

/// A part of a text that spells a credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Echo {
    pub(super) place: Range<usize>,
    /// Which of the credentials.
    pub(super) label: usize,
}

/// What a search found.
#[derive(Debug)]
pub(super) struct Findings {
    /// In order of their start; they may overlap.
    pub(super) echoes: Vec<Echo>,
    /// Where what may still become an echo begins.
    pub(super) decided: usize,
}

/// The views that a part of the text is to be read in.
#[derive(Clone, Copy, Debug, Default)]
struct Readings {
    unescaped: bool,
    numbers: bool,
    narrowed: bool,
}

/// A part of the text around a place.
#[derive(Clone, Debug)]
struct Region {
    range: Range<usize>,
    readings: Readings,
}

/// How a form compares with the start of a text.
enum Comparison {
    /// The form is this many octets of the text.
    Same(usize),
    /// As far as the text goes.
    Begun,
    Different,
}

pub(super) struct Search<'a> {
    patterns: &'a EchoPatterns,
    text: &'a [u8],
    extent: Extent,
    case: LetterCase,
    region: Option<Region>,
    /// Where the last region ended that was read.
    read_to: usize,
    echoes: Vec<Echo>,
    /// Where the earliest echo begins that the text does not finish, and its credential.
    pending: Option<(usize, usize)>,
}

impl<'a> Search<'a> {
    pub(super) fn new(patterns: &'a EchoPatterns, text: &'a [u8], extent: Extent, case: LetterCase) -> Self {
        let echoes = Vec::new();
        Search { patterns, text, extent, case, region: None, read_to: 0, echoes, pending: None }
    }

    pub(super) fn run(mut self) -> Findings {
        let patterns = self.patterns;
        if patterns.forms.is_empty() {
            return Findings { echoes: self.echoes, decided: self.text.len() };
        }
        if patterns.filter.is_blind() {
            let readings = Readings { unescaped: true, ..Readings::default() };
            self.region = Some(Region { range: 0..self.text.len(), readings });
        }
        patterns.filter.scan(self.text, |at, windows| {
            for window in windows {
                self.look(at, window);
            }
        });
        if self.extent == Extent::Begun {
            self.add_tail();
        }
        self.read_region();
        let mut decided = self.text.len();
        if let Some((start, label)) = self.pending {
            decided = start;
            if self.text.len() - start > MAX_HELD {
                decided = self.text.len();
                self.echoes.push(Echo { place: start..decided, label });
            }
        }
        self.echoes.sort_by_key(|echo| (echo.place.start, echo.place.end));
        // An echo that may be longer than it looks is held back, too, and searched for again.
        for echo in self.echoes.iter().rev() {
            if echo.place.start < decided && decided < echo.place.end {
                decided = echo.place.start;
            }
        }
        self.echoes.retain(|echo| echo.place.start < decided);
        Findings { echoes: self.echoes, decided }
    }

    /// Looks at a group of a window in the text itself.
    fn look(&mut self, at: usize, window: &Window) {
        let index = window.pattern as usize;
        let Some(form) = self.patterns.forms.get(index) else {
            let spelling = self.patterns.spellings.get(index - self.patterns.forms.len());
            if let Some(spelling) = spelling
                && !self.is_requested(at, spelling.reading)
                && self.is_window(at, window, &spelling.text)
            {
                self.request(at, spelling.reading);
            }
            return;
        };
        if form.kind != FormKind::Text || !self.is_window(at, window, &form.text) {
            return;
        }
        let start = at.checked_sub(window.offset as usize);
        let rest = start.and_then(|start| self.text.get(start..));
        match (start, rest.map(|rest| self.compare(form, rest, self.extent))) {
            (Some(start), Some(Comparison::Same(length))) => {
                self.echoes.push(Echo { place: start..start + length, label: form.label });
                if form.text.last().is_some_and(|last| EscapeFamilies::of(*last) != EscapeFamilies::NONE) {
                    self.request(at, Reading::Unescaped); // its last octet may begin an escape that spells it
                }
            }
            (Some(start), Some(Comparison::Begun)) => {
                self.pend(start, form.label);
                self.request(at, Reading::Unescaped);
            }
            (_, Some(Comparison::Different) | None) | (None, Some(_)) => self.request(at, Reading::Unescaped),
        }
    }

    /// Whether the whole window of a group stands in the text.
    fn is_window(&self, at: usize, window: &Window, pattern: &[u8]) -> bool {
        let range = window.range(self.patterns.filter.window_length());
        let start = (at + range.start).checked_sub(window.offset as usize);
        let stands = start.and_then(|start| self.text.get(start..start + range.len()));
        let window = pattern.get(range);
        stands.zip(window).is_some_and(|(stands, window)| stands.eq_ignore_ascii_case(window))
    }

    fn compare(&self, form: &Form, text: &[u8], extent: Extent) -> Comparison {
        let length = form.text.len().min(text.len());
        let pair = form.text.get(..length).zip(text.get(..length));
        let same = pair.is_some_and(|(form_part, text_part)| match (form.case, self.case) {
            (LetterCase::Exact, LetterCase::Exact) => form_part == text_part,
            (LetterCase::Ignored, _) | (_, LetterCase::Ignored) => form_part.eq_ignore_ascii_case(text_part),
        });
        match same {
            false => Comparison::Different,
            true if text.len() >= form.length => Comparison::Same(form.length),
            true if extent == Extent::Begun => Comparison::Begun,
            // The rest of a form that was found by its head ends with the text.
            true if text.len() >= form.text.len() => Comparison::Same(text.len()),
            true => Comparison::Different,
        }
    }

    fn pend(&mut self, start: usize, label: usize) {
        if self.pending.is_none_or(|(before, _)| start < before) {
            self.pending = Some((start, label));
        }
    }

    /// Whether the text around a place is read in a view anyway.
    fn is_requested(&self, at: usize, reading: Reading) -> bool {
        let region = self.region.as_ref().filter(|region| at < region.range.end);
        region.is_some_and(|region| match reading {
            Reading::Unescaped => region.readings.unescaped,
            Reading::Numbers => region.readings.numbers,
            Reading::Narrowed => region.readings.narrowed,
        })
    }

    /// Has the text around a place read in a view.
    fn request(&mut self, at: usize, reading: Reading) {
        if self.region.as_ref().is_none_or(|region| region.range.end <= at) {
            self.read_region();
            let is_part = |octet: &u8| self.patterns.is_part(*octet);
            let before = self.text.get(self.read_to..at).unwrap_or_default();
            let start = at - before.iter().rev().take_while(|octet| is_part(octet)).count();
            let after = self.text.get(at..).unwrap_or_default();
            let end = at + after.iter().take_while(|octet| is_part(octet)).count();
            self.region = Some(Region { range: start..end, readings: Readings::default() });
        }
        if let Some(region) = &mut self.region {
            match reading {
                Reading::Unescaped => region.readings.unescaped = true,
                Reading::Numbers => region.readings.numbers = true,
                Reading::Narrowed => region.readings.narrowed = true,
            }
        }
    }

    /// Has the end of the text read in every view: an echo may begin there that has no window yet.
    fn add_tail(&mut self) {
        let Some(last) = self.text.len().checked_sub(1) else { return };
        if self.region.as_ref().is_none_or(|region| region.range.end <= last) {
            self.read_region();
            let most = self.patterns.filter.reach() * MAX_SPELLED;
            let from = self.text.len().saturating_sub(most).max(self.read_to);
            let tail = self.text.get(from..).unwrap_or_default();
            let length = tail.iter().rev().take_while(|octet| self.patterns.is_part(**octet)).count();
            let range = self.text.len() - length..self.text.len();
            self.region = Some(Region { range, readings: Readings::default() });
        }
        if let Some(region) = &mut self.region {
            region.readings = Readings { unescaped: true, numbers: true, narrowed: true };
        }
    }

    /// Reads the region in its views.
    fn read_region(&mut self) {
        let Some(Region { range, readings }) = self.region.take() else { return };
        let whole = self.text;
        let Some(source) = whole.get(range.clone()) else { return };
        self.read_to = range.end;
        let extent = if range.end == whole.len() { self.extent } else { Extent::Whole };
        let base = range.start;
        if extent == Extent::Begun {
            self.pend_suffix(source, FormKind::Text, |at| base + at);
        }
        let families = families_in(source);
        let blanks = source.iter().any(|octet| matches!(octet, b' ' | b'\t' | b'\r' | b'\n'));
        let zeros = source.contains(&0);
        if readings.numbers {
            self.search_view(&View::separated(source), FormKind::Numbers, base, extent);
        }
        if readings.narrowed && zeros {
            let narrow = View::narrowed(source);
            self.search_view(&narrow, FormKind::Text, base, extent);
            let escapes = families_in(&narrow.text);
            self.search_unescaped(escapes, base, extent, |families| narrow.unescape_again(families, extent));
        }
        if !readings.unescaped || (families == EscapeFamilies::NONE && !blanks) {
            return;
        }
        let decode = |families| View::unescaped(source, families, extent);
        let (once, twice) = self.search_unescaped(families, base, extent, decode);
        // The next part of the text is read from where an escape begins, as this one was.
        if let Some((start, label)) = self.pending
            && start >= base
            && extent == Extent::Begun
        {
            let aligned = once.token_start(start - base);
            let aligned = twice.map_or(aligned, |twice| twice.token_start(aligned));
            self.pend(base + aligned, label);
        }
    }

    /// Searches what `decode` makes of a text, which has escapes of these families, once and twice.
    fn search_unescaped(
        &mut self,
        families: EscapeFamilies,
        base: usize,
        extent: Extent,
        decode: impl Fn(EscapeFamilies) -> View,
    ) -> (View, Option<View>) {
        let mut search = |families: EscapeFamilies| {
            let once = decode(families);
            self.search_view(&once, FormKind::Text, base, extent);
            let twice = once.has_escapes().then(|| once.unescape_again(families, extent));
            if let Some(twice) = &twice {
                self.search_view(twice, FormKind::Text, base, extent);
            }
            (once, twice)
        };
        // What looks like an escape of one family may be literal text to a server that uses another.
        for family in EscapeFamilies::EACH {
            if families.count() > 1 && families.has(family) {
                search(family);
            }
        }
        search(EscapeFamilies::ALL)
    }

    fn search_view(&mut self, view: &View, kind: FormKind, base: usize, extent: Extent) {
        let patterns = self.patterns;
        patterns.filter.scan(&view.text, |at, windows| {
            for window in windows {
                let form = patterns.forms.get(window.pattern as usize).filter(|form| form.kind == kind);
                let Some((form, start)) = form.zip(at.checked_sub(window.offset as usize)) else { continue };
                match self.compare(form, view.text.get(start..).unwrap_or_default(), extent) {
                    Comparison::Same(length) => {
                        let place =
                            base + view.source_start(start)..base + view.source_end(start + length - 1);
                        self.echoes.push(Echo { place, label: form.label });
                    }
                    Comparison::Begun => self.pend(base + view.source_start(start), form.label),
                    Comparison::Different => {}
                }
            }
        });
        if extent == Extent::Begun {
            self.pend_suffix(&view.text, kind, |at| base + view.source_start(at));
            if let Some(open) = view.open {
                self.pend(base + open, 0);
            }
        }
    }

    /// Notes where the end of a text may be the start of a form that shows no window yet.
    fn pend_suffix(&mut self, text: &[u8], kind: FormKind, place: impl Fn(usize) -> usize) {
        for start in text.len().saturating_sub(self.patterns.filter.reach())..text.len() {
            let suffix = text.get(start..).unwrap_or_default();
            let begun = self.patterns.forms_like(suffix).find(|form| {
                form.kind == kind && matches!(self.compare(form, suffix, Extent::Begun), Comparison::Begun)
            });
            if let Some(form) = begun {
                self.pend(place(start), form.label);
                return;
            }
        }
    }
}

fn families_in(text: &[u8]) -> EscapeFamilies {
    text.iter().fold(EscapeFamilies::NONE, |families, octet| families.with(EscapeFamilies::of(*octet)))
}
