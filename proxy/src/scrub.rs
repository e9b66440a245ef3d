//! A credential that an origin sends back, in a header or in the body, is made unreadable on its way to the
//! sandbox: as it is, in base64, percent-encoded, and across the borders of chunks.

use aho_corasick::{AhoCorasick, MatchKind};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use bytes::{Bytes, BytesMut};
use zeroize::Zeroizing;

/// What stands in place of every octet of a credential: lengths stay as they were announced.
const COVER: u8 = b'*';

/// The forms a credential may come back in.
pub(crate) struct Echoes {
    forms: Vec<Zeroizing<Vec<u8>>>,
    finder: Option<AhoCorasick>,
}

impl Echoes {
    pub(crate) fn of(value: &str) -> Self {
        let mut forms = vec![value.as_bytes().to_vec()];
        forms.extend(percent(value));
        forms.extend(base64s(value.as_bytes()));
        forms.sort();
        forms.dedup();
        let finder =
            AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&forms).ok();
        Echoes { forms: forms.into_iter().map(Zeroizing::new).collect(), finder }
    }

    /// Covers every echo in `text`; the number of them.
    pub(crate) fn cover(&self, text: &mut [u8]) -> usize {
        let Some(finder) = &self.finder else {
            text.fill(COVER); // a finder that could not be built finds everything
            return 1;
        };
        let found: Vec<_> = finder.find_iter(&*text).map(|found| found.range()).collect();
        for range in &found {
            if let Some(echo) = text.get_mut(range.clone()) {
                echo.fill(COVER);
            }
        }
        found.len()
    }

    /// How many octets at the end of `text` could be the beginning of an echo.
    fn undecided(&self, text: &[u8]) -> usize {
        let begins = |form: &Zeroizing<Vec<u8>>| {
            let most = text.len().min(form.len() - 1);
            (1..=most).rev().find(|length| text.get(text.len() - length..) == form.get(..*length))
        };
        self.forms.iter().filter_map(begins).max().unwrap_or_default()
    }
}

/// The body of one answer on its way.
pub(crate) struct Scrubber {
    echoes: std::sync::Arc<Echoes>,
    held: BytesMut,
    found: usize,
}

impl Scrubber {
    pub(crate) fn new(echoes: std::sync::Arc<Echoes>) -> Self {
        Scrubber { echoes, held: BytesMut::new(), found: 0 }
    }

    /// How many echoes were covered.
    pub(crate) fn found(&self) -> usize {
        self.found
    }

    /// Covers every echo in a field; the number of them.
    pub(crate) fn cover(&mut self, field: &mut [u8]) -> usize {
        let found = self.echoes.cover(field);
        self.found += found;
        found
    }

    /// Takes the next piece; what may be passed on. Only what could be the beginning of an echo waits for
    /// the next, so that events are not held up.
    pub(crate) fn pass(&mut self, piece: Option<&Bytes>, last: bool) -> Bytes {
        let mut text = std::mem::take(&mut self.held);
        text.extend_from_slice(piece.map(Bytes::as_ref).unwrap_or_default());
        self.found += self.echoes.cover(&mut text);
        let waits = if last { 0 } else { self.echoes.undecided(&text) };
        self.held = text.split_off(text.len() - waits);
        text.freeze()
    }
}

/// Percent-encoded: what must be, and everything; in both cases of the digits.
fn percent(value: &str) -> Vec<Vec<u8>> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let all = |_: u8| false;
    let encode = |kept: &dyn Fn(u8) -> bool, upper: bool| -> Vec<u8> {
        let octet = |byte: u8| match (kept(byte), upper) {
            (true, _) => vec![byte],
            (false, true) => format!("%{byte:02X}").into_bytes(),
            (false, false) => format!("%{byte:02x}").into_bytes(),
        };
        value.bytes().flat_map(octet).collect()
    };
    vec![encode(&plain, true), encode(&plain, false), encode(&all, true), encode(&all, false)]
}

/// What of its base64 does not depend on what stands around it, for each of the three alignments.
fn base64s(value: &[u8]) -> Vec<Vec<u8>> {
    let mut forms = Vec::new();
    for before in 0..3usize {
        let padded: Zeroizing<Vec<u8>> = Zeroizing::new([&[0; 2][..before.min(2)], value].concat());
        let first = (before * 8).div_ceil(6); // the first digit made of the value's bits alone
        let last = padded.len() * 8 / 6;
        for text in [STANDARD_NO_PAD.encode(&*padded), URL_SAFE_NO_PAD.encode(&*padded)] {
            forms.extend(text.as_bytes().get(first..last).map(<[u8]>::to_vec));
        }
    }
    forms
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::STANDARD;
    use std::sync::Arc;

    const SECRET: &str = "sk-live/0123+456789==";

    fn part(text: &str, from: usize, to: usize) -> String {
        text.get(from..to).unwrap().to_owned()
    }

    fn scrubbed(text: &[u8], sizes: &[usize]) -> (Vec<u8>, usize) {
        let mut scrubber = Scrubber::new(Arc::new(Echoes::of(SECRET)));
        let mut out = Vec::new();
        let (mut rest, mut sizes) = (Bytes::copy_from_slice(text), sizes.iter().cycle());
        while !rest.is_empty() {
            let size = (*sizes.next().unwrap()).min(rest.len());
            out.extend_from_slice(&scrubber.pass(Some(&rest.split_to(size)), false));
        }
        out.extend_from_slice(&scrubber.pass(None, true));
        (out, scrubber.found())
    }

    #[test]
    fn every_form_is_covered_whatever_the_chunks() {
        let wrapped = |before: &str| STANDARD.encode(format!("{before}{SECRET} and more"));
        for (form, hidden) in [
            (SECRET.to_owned(), SECRET.to_owned()),
            ("sk-live%2F0123%2B456789%3D%3D".to_owned(), "sk-live%2F0123".to_owned()),
            ("sk-live%2f0123%2b456789%3d%3d".to_owned(), "sk-live%2f0123".to_owned()),
            (STANDARD.encode(SECRET), part(&STANDARD.encode(SECRET), 0, 20)),
            (wrapped(""), part(&STANDARD.encode(SECRET), 0, 20)),
            (wrapped("x"), part(&wrapped("x"), 2, 20)),
            (wrapped("Bearer "), part(&wrapped("Bearer "), 12, 30)),
            (wrapped("xy"), part(&wrapped("xy"), 3, 20)),
        ] {
            let text = format!("{{\"you sent\": \"{form}\"}}");
            for sizes in [&[1][..], &[2], &[7], &[3, 5], &[1000]] {
                let (out, found) = scrubbed(text.as_bytes(), sizes);
                let shown = String::from_utf8(out).unwrap();
                assert!(found > 0, "{form} by {sizes:?}");
                assert!(!shown.contains(&hidden), "{form} by {sizes:?}: {shown}");
                assert_eq!(shown.len(), text.len(), "lengths stay as they were announced");
            }
        }
    }

    #[test]
    fn what_is_no_echo_passes_unchanged_and_at_once() {
        let text = b"data: {\"token\": \"sk-live/0123\"}\n\n";
        assert_eq!(scrubbed(text, &[5]), (text.to_vec(), 0));
        let mut scrubber = Scrubber::new(Arc::new(Echoes::of(SECRET)));
        let event = Bytes::from_static(b"data: one\n\n");
        assert_eq!(scrubber.pass(Some(&event), false), event, "an event is not held up");
    }
}
