//! Masks credentials that an origin server echoes, in a header or in the body, before the sandbox sees them.
//!
//! One pass looks for all credentials of a sandbox at once, as they are and in the spellings that servers use: escaped
//! up to twice, in base64, in hexadecimal, in wide characters, as lists of numbers, folded into lines, and across chunk
//! boundaries. [`forms`] lists them. Encryption, a substring, or an alphabet of the server's own is not recognised.

mod answer;
mod archive;
mod cache;
mod coding;
mod escapes;
mod filter;
mod forms;
mod messages;
mod search;
mod stream;
#[cfg(test)]
mod tests;
mod views;

pub(crate) use self::answer::{AnswerError, AnswerScrubber};
pub(crate) use self::cache::{EchoCache, LabelledSecret};
pub(crate) use self::coding::{Coding, DECODER_BYTES, MAX_CODINGS, MAX_DECODED, MAX_DECODER_WINDOW};
use self::filter::{GramFilter, Pattern, WindowKind};
use self::forms::{Form, FormKind, LetterCase, Spelling, forms_of, spellings_of};
pub(crate) use self::search::MAX_HELD;
use self::search::{Findings, Search};
pub use self::stream::ResponseScrubber;
use self::views::{Extent, is_separator};

/// Replaces each octet of an echo, so that `Content-Length` stays right.
const MASK: u8 = b'*';
/// Shortest value that is searched for: a shorter one would occur by chance.
const SHORTEST: usize = 8;
/// Octets besides those of the values that an echo may consist of: letters and digits, base64, escapes and zeros.
const SYNTAX: &[u8] = b"+/=-_%\\&#;{}\0";

/// The forms in which an origin server may echo credentials.
pub struct EchoPatterns {
    forms: Vec<Form>,
    spellings: Vec<Spelling>,
    filter: GramFilter,
    /// The first two octets of each form, without case, and its index; in order.
    heads: Vec<([u8; 2], u32)>,
    /// The octets that an echo may consist of.
    alphabet: [bool; 256],
    labels: Vec<String>,
}

impl EchoPatterns {
    /// Takes values, each with what a finding calls it.
    pub fn new<L: Into<String>, V: AsRef<str>>(values: impl IntoIterator<Item = (L, V)>) -> Self {
        let (mut forms, mut spellings, mut labels) = (Vec::new(), Vec::new(), Vec::new());
        let mut alphabet = [false; 256];
        for (octet, part) in (0u8..=255).zip(&mut alphabet) {
            *part = octet.is_ascii_alphanumeric() || SYNTAX.contains(&octet) || is_separator(octet);
        }
        for (label, value) in values {
            let value = value.as_ref().as_bytes();
            if value.len() < SHORTEST {
                continue;
            }
            forms.extend(forms_of(value, labels.len()));
            spellings.extend(spellings_of(value));
            labels.push(label.into());
            for octet in value {
                if let Some(part) = alphabet.get_mut(usize::from(*octet)) {
                    *part = true;
                }
            }
        }
        let of_form = |form: &Form| match form.kind {
            FormKind::Text => WindowKind::Plain,
            FormKind::Numbers => WindowKind::Any,
        };
        let mut patterns: Vec<Pattern<'_>> = Vec::with_capacity(forms.len() + spellings.len());
        patterns.extend(forms.iter().map(|form| Pattern { text: &form.text, windows: of_form(form) }));
        patterns.extend(spellings.iter().map(|one| Pattern { text: &one.text, windows: WindowKind::Any }));
        let filter = GramFilter::new(&patterns);
        let mut heads: Vec<([u8; 2], u32)> = Vec::with_capacity(forms.len());
        for (index, form) in forms.iter().enumerate() {
            if let Some(head) = form.text.first_chunk::<2>() {
                heads.push((head.map(|octet| octet.to_ascii_lowercase()), index as u32));
            }
        }
        heads.sort_unstable();
        EchoPatterns { forms, spellings, filter, heads, alphabet, labels }
    }

    /// Masks every echo in `text` and returns how many there were.
    pub fn mask(&self, text: &mut [u8]) -> usize {
        let findings = self.search(text, Extent::Whole);
        mask_echoes(text, &findings)
    }

    /// Whether `text` contains an echo.
    pub(crate) fn is_in(&self, text: &[u8]) -> bool {
        !self.search(text, Extent::Whole).echoes.is_empty()
    }

    /// Whether there is nothing to look for.
    pub(crate) fn is_empty(&self) -> bool {
        self.forms.is_empty()
    }

    /// Whether the name of a field contains an echo. Names have no case, and HTTP/2 sends them in lower case.
    pub fn is_in_name(&self, name: &str) -> bool {
        self.label_in_name(name).is_some()
    }

    fn label_in_name(&self, name: &str) -> Option<usize> {
        let search = Search::new(self, name.as_bytes(), Extent::Whole, LetterCase::Ignored);
        search.run().echoes.first().map(|echo| echo.label)
    }

    /// Whether an echo may contain an octet.
    fn is_part(&self, octet: u8) -> bool {
        self.alphabet.get(usize::from(octet)).is_some_and(|part| *part)
    }

    fn search(&self, text: &[u8], extent: Extent) -> Findings {
        Search::new(self, text, extent, LetterCase::Exact).run()
    }

    /// The forms that begin as `text` does, by one or two octets.
    fn forms_like(&self, text: &[u8]) -> impl Iterator<Item = &Form> {
        let (from, to) = match text {
            [] => (0, 0),
            [first] => {
                let first = first.to_ascii_lowercase();
                let from = self.heads.partition_point(|(head, _)| head[0] < first);
                (from, self.heads.partition_point(|(head, _)| head[0] <= first))
            }
            [first, second, ..] => {
                let pair = [first.to_ascii_lowercase(), second.to_ascii_lowercase()];
                let from = self.heads.partition_point(|(head, _)| *head < pair);
                (from, self.heads.partition_point(|(head, _)| *head <= pair))
            }
        };
        let heads = self.heads.get(from..to).unwrap_or_default();
        heads.iter().filter_map(|(_, index)| self.forms.get(*index as usize))
    }
}

/// Masks what was found, and returns how many echoes there were: those that overlap are one.
fn mask_echoes(text: &mut [u8], findings: &Findings) -> usize {
    let (mut count, mut masked_to) = (0, 0);
    for echo in &findings.echoes {
        count += usize::from(count == 0 || echo.place.start >= masked_to);
        masked_to = masked_to.max(echo.place.end);
        if let Some(octets) = text.get_mut(echo.place.clone()) {
            octets.fill(MASK);
        }
    }
    count
}
