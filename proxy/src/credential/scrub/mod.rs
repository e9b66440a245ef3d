//! A credential that an origin sends back, in a header or in the body, is made unreadable on its way to the
//! sandbox: as it is, in base64, in hexadecimal, escaped in any of the usual ways, and across the borders of
//! chunks. What an origin does to it beyond that (a cipher, a part of it) is not recognised.

mod decoded;
mod messages;

use std::ops::Range;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use bytes::{Bytes, BytesMut};
use zeroize::Zeroizing;

use decoded::UnescapedText;
use messages::GrpcFraming;

/// What stands in place of every octet of a credential: lengths stay as they were announced.
const MASK: u8 = b'*';
/// Octets of each form that are searched for; the rest is compared, so that what searches, which nobody
/// wipes, does not know a credential.
const SEARCH_PREFIX: usize = 4;

/// The forms a credential may come back in.
pub struct EchoPatterns {
    forms: Vec<Zeroizing<Vec<u8>>>,
    heads: Option<AhoCorasick>,
    longest: usize,
}

impl EchoPatterns {
    pub fn new(value: &str) -> Self {
        let mut forms = vec![Zeroizing::new(value.as_bytes().to_vec())];
        forms.extend([hex_form(value, b"0123456789abcdef"), hex_form(value, b"0123456789ABCDEF")]);
        forms.extend(base64_forms(value.as_bytes()));
        forms.sort_unstable_by(|one, other| one.as_slice().cmp(other));
        forms.dedup();
        let heads = AhoCorasick::builder()
            .kind(Some(AhoCorasickKind::DFA))
            .match_kind(MatchKind::LeftmostFirst)
            .build(forms.iter().map(|form| form.get(..SEARCH_PREFIX).unwrap_or(form)));
        let longest = forms.iter().map(|form| form.len()).max().unwrap_or_default();
        EchoPatterns { forms, heads: heads.ok(), longest }
    }

    /// Covers every echo in `text`; the number of them.
    pub fn mask(&self, text: &mut [u8]) -> usize {
        let Some(heads) = &self.heads else {
            text.fill(MASK); // what cannot be searched is all covered
            return 1;
        };
        let plain = self.find_echoes(heads, text);
        mask_ranges(text, &plain);
        let Some(decoded) = UnescapedText::decode(text) else { return plain.len() };
        let mut escaped = self.find_echoes(heads, &decoded.text);
        for echo in &mut escaped {
            *echo = decoded.source_offset(echo.start)..decoded.source_offset(echo.end);
        }
        mask_ranges(text, &escaped);
        plain.len() + escaped.len()
    }

    fn find_echoes(&self, heads: &AhoCorasick, text: &[u8]) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(head) = text.get(from..).and_then(|rest| heads.find(rest)) {
            let start = from + head.start();
            let rest = text.get(start..).unwrap_or_default();
            let whole = self.forms.iter().filter(|form| rest.starts_with(form));
            match whole.map(|form| form.len()).max() {
                None => from = start + 1,
                Some(length) => {
                    from = start + length;
                    found.push(start..from);
                }
            }
        }
        found
    }

    /// How many octets at the end of `text` could be the beginning of an echo.
    fn partial_suffix(&self, text: &[u8]) -> usize {
        let reach = self.longest.saturating_mul(decoded::MAX_ESCAPE);
        let end = text.get(text.len().saturating_sub(reach)..).unwrap_or(text);
        let escaped = UnescapedText::decode(end).map_or(0, |decoded| {
            end.len()
                - decoded.source_offset(decoded.text.len() - self.prefix_overlap(&decoded.text))
        });
        self.prefix_overlap(end).max(escaped)
    }

    /// The longest end of `text` that a form begins with.
    fn prefix_overlap(&self, text: &[u8]) -> usize {
        let begins = |form: &Zeroizing<Vec<u8>>| {
            let most = text.len().min(form.len() - 1);
            (1..=most).rev().find(|length| text.get(text.len() - length..) == form.get(..*length))
        };
        self.forms.iter().filter_map(begins).max().unwrap_or_default()
    }
}

fn mask_ranges(text: &mut [u8], echoes: &[Range<usize>]) {
    for echo in echoes {
        if let Some(echo) = text.get_mut(echo.clone()) {
            echo.fill(MASK);
        }
    }
}

/// The answer to one request on its way.
pub struct ResponseScrubber {
    echoes: Arc<EchoPatterns>,
    held: BytesMut,
    messages: Option<GrpcFraming>,
    found: usize,
}

impl ResponseScrubber {
    pub fn new(echoes: Arc<EchoPatterns>) -> Self {
        ResponseScrubber { echoes, held: BytesMut::new(), messages: None, found: 0 }
    }

    /// Takes the body for messages of gRPC's: it holds nothing back when one ends.
    pub(crate) fn expect_grpc(&mut self) {
        self.messages = Some(GrpcFraming::default());
    }

    /// How many echoes were covered.
    pub fn echo_count(&self) -> usize {
        self.found
    }

    /// Covers every echo in a field; the number of them.
    pub(crate) fn mask_field(&mut self, field: &mut [u8]) -> usize {
        let found = self.echoes.mask(field);
        self.found += found;
        found
    }

    /// Takes the next piece; what may be passed on. Only what could be the beginning of an echo waits for
    /// the next, so that events are not held up.
    pub fn scrub(&mut self, piece: Option<&Bytes>, last: bool) -> Bytes {
        let piece = piece.map(Bytes::as_ref).unwrap_or_default();
        let over = self.messages.as_mut().is_some_and(|messages| messages.advance(piece));
        let mut text = std::mem::take(&mut self.held);
        text.extend_from_slice(piece);
        self.found += self.echoes.mask(&mut text);
        let waits = if last || over { 0 } else { self.echoes.partial_suffix(&text) };
        self.held = text.split_off(text.len() - waits);
        text.freeze()
    }
}

fn hex_form(value: &str, digits: &[u8; 16]) -> Zeroizing<Vec<u8>> {
    let mut form = Zeroizing::new(Vec::with_capacity(2 * value.len()));
    for octet in value.bytes() {
        form.push(digits[usize::from(octet >> 4)]);
        form.push(digits[usize::from(octet & 15)]);
    }
    form
}

/// What of its base64 does not depend on what stands around it, for each of the three alignments.
fn base64_forms(value: &[u8]) -> Vec<Zeroizing<Vec<u8>>> {
    let mut forms = Vec::new();
    for before in 0..3usize {
        let padded: Zeroizing<Vec<u8>> = Zeroizing::new([&[0; 2][..before.min(2)], value].concat());
        let first = (before * 8).div_ceil(6); // the first digit made of the value's bits alone
        let last = padded.len() * 8 / 6;
        for text in [STANDARD_NO_PAD.encode(&*padded), URL_SAFE_NO_PAD.encode(&*padded)] {
            let text = Zeroizing::new(text);
            let form = text.as_bytes().get(first..last).unwrap_or_default();
            forms.push(Zeroizing::new(form.to_vec()));
        }
    }
    forms
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::STANDARD;

    const SECRET: &str = "sk-live/0123+456789==";

    fn slice(text: &str, from: usize, to: usize) -> String {
        text.get(from..to).unwrap().to_owned()
    }

    fn scrub_in_chunks(text: &[u8], sizes: &[usize]) -> (Vec<u8>, usize) {
        let mut scrubber = ResponseScrubber::new(Arc::new(EchoPatterns::new(SECRET)));
        let mut out = Vec::new();
        let (mut rest, mut sizes) = (Bytes::copy_from_slice(text), sizes.iter().cycle());
        while !rest.is_empty() {
            let size = (*sizes.next().unwrap()).min(rest.len());
            out.extend_from_slice(&scrubber.scrub(Some(&rest.split_to(size)), false));
        }
        out.extend_from_slice(&scrubber.scrub(None, true));
        (out, scrubber.echo_count())
    }

    /// Every octet escaped by itself, in a way of its own.
    fn escape_each(each: fn(u8) -> String) -> String {
        SECRET.bytes().map(each).collect()
    }

    #[test]
    fn p11_every_form_is_covered_whatever_the_chunks() {
        let wrapped = |before: &str| STANDARD.encode(format!("{before}{SECRET} and more"));
        let plain = |form: &str| (form.to_owned(), form.to_owned());
        let broken = |end: &str| {
            let based = STANDARD.encode(SECRET);
            format!("{}{end}{}", slice(&based, 0, 12), slice(&based, 12, based.len()))
        };
        for (form, hidden) in [
            plain(SECRET),
            ("sk-live%2F0123%2B456789%3D%3D".to_owned(), "sk-live%2F0123".to_owned()),
            ("sk-live%2f0123%2b456789%3d%3d".to_owned(), "sk-live%2f0123".to_owned()),
            plain("sk-live/0123%2B456789%3D%3D"), // as Python quotes
            plain("sk-live%2f0123%2B456789=%3D"),
            plain("%73k-live/0123+456789=="),
            plain(&escape_each(|octet| format!("%{octet:02X}"))),
            plain(&escape_each(|octet| format!("\\u{octet:04x}"))),
            plain(&escape_each(|octet| format!("&#{octet};"))),
            plain(r"sk-live\/0123+456789=="),
            plain(r"sk-live/0123\u002B456789\u003d\u003D"),
            plain("sk-live/0123+456789&#x3D;&#x3D;"),
            plain(&escape_each(|octet| format!("{octet:02x}"))),
            plain(&escape_each(|octet| format!("{octet:02X}"))),
            (broken("\r\n"), slice(&STANDARD.encode(SECRET), 0, 12)),
            (broken("\\n"), slice(&STANDARD.encode(SECRET), 12, 20)),
            (STANDARD.encode(SECRET), slice(&STANDARD.encode(SECRET), 0, 20)),
            (wrapped(""), slice(&STANDARD.encode(SECRET), 0, 20)),
            (wrapped("x"), slice(&wrapped("x"), 2, 20)),
            (wrapped("Bearer "), slice(&wrapped("Bearer "), 12, 30)),
            (wrapped("xy"), slice(&wrapped("xy"), 3, 20)),
        ] {
            let text = format!("{{\"you sent\": \"{form}\"}}");
            for sizes in [&[1][..], &[2], &[7], &[3, 5], &[1000]] {
                let (out, found) = scrub_in_chunks(text.as_bytes(), sizes);
                let shown = String::from_utf8(out).unwrap();
                assert_eq!(found, 1, "{form} by {sizes:?}");
                assert!(!shown.contains(&hidden), "{form} by {sizes:?}: {shown}");
                assert_eq!(shown.len(), text.len(), "lengths stay as they were announced");
                assert!(
                    shown.starts_with("{\"you sent\": \"") && shown.ends_with("\"}"),
                    "{shown}"
                );
            }
        }
    }

    #[test]
    fn what_is_no_echo_passes_unchanged_and_at_once() {
        for text in [
            &b"data: {\"token\": \"sk-live/0123\"}\n\n"[..],
            b"100% of sk-live%2F0123 \\u0073k- &amp; \\ %",
            b"sk-sk-sk-live/0123+45678",
        ] {
            assert_eq!(scrub_in_chunks(text, &[5]), (text.to_vec(), 0));
        }
        for event in ["data: one\n\n", "data: three s\n\n", "data: {\"a\":\"s\"}\n"] {
            let mut scrubber = ResponseScrubber::new(Arc::new(EchoPatterns::new(SECRET)));
            let event = Bytes::copy_from_slice(event.as_bytes());
            assert_eq!(scrubber.scrub(Some(&event), false), event, "an event is not held up");
        }
    }

    #[test]
    fn p11_an_echo_after_what_begins_like_one_is_covered() {
        for text in [format!("sk-sk-live/{SECRET}"), format!("sk-l%73{SECRET}")] {
            for size in 1..text.len() {
                let (out, found) = scrub_in_chunks(text.as_bytes(), &[size]);
                assert_eq!(found, 1, "{text} by {size}");
                assert!(!String::from_utf8(out).unwrap().contains(SECRET), "{text} by {size}");
            }
        }
    }

    #[test]
    fn a_message_that_ends_like_an_echo_begins_is_passed_whole() {
        let mut scrubber = ResponseScrubber::new(Arc::new(EchoPatterns::new(SECRET)));
        scrubber.expect_grpc();
        let message = Bytes::from_static(b"\0\0\0\0\x04ends\0\0\0\0\x02sk");
        assert_eq!(scrubber.scrub(Some(&message), false), message);
        let begun = Bytes::from_static(b"\0\0\0\0\x18sk-live/");
        assert_eq!(scrubber.scrub(Some(&begun), false).len(), 5, "in the middle it waits");
    }
}
