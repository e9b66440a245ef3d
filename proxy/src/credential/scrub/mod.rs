//! A credential that an origin sends back, in a header or in the body, is made unreadable on its way to the
//! sandbox: as it is, in base64, in hexadecimal, escaped in any of the usual ways, and across the borders of
//! chunks. What an origin does to it beyond that (a cipher, a part of it) is not recognised.

mod decoded;
mod messages;

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use bytes::{Bytes, BytesMut};
use zeroize::Zeroizing;

use decoded::{BEGINS, Escape, Reading};
use messages::Messages;

/// What stands in place of every octet of a credential: lengths stay as they were announced.
const COVER: u8 = b'*';

/// The forms a credential may come back in.
pub struct Echoes {
    forms: Vec<Zeroizing<Vec<u8>>>,
    /// The first octets of the forms.
    firsts: [bool; 256],
    /// The longest that an echo may be, with all its escapes and lines.
    reach: usize,
}

/// Whether a text goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    Begun,
    Whole,
}

impl Echoes {
    pub fn of(value: &str) -> Self {
        let mut forms = vec![Zeroizing::new(value.as_bytes().to_vec())];
        forms.extend([hex(value, b"0123456789abcdef"), hex(value, b"0123456789ABCDEF")]);
        forms.extend(base64s(value.as_bytes()));
        forms.retain(|form| !form.is_empty());
        forms.sort_unstable_by(|one, other| one.as_slice().cmp(other));
        forms.dedup();
        let mut firsts = [false; 256];
        for first in forms.iter().filter_map(|form| form.first()) {
            firsts[usize::from(*first)] = true;
        }
        let longest = forms.iter().map(|form| form.len()).max().unwrap_or_default();
        Echoes { forms, firsts, reach: longest.saturating_mul(decoded::LONGEST) }
    }

    /// Covers every echo in `text`; the number of them.
    pub fn cover(&self, text: &mut [u8]) -> usize {
        self.scan(text, Extent::Whole).0
    }

    /// Covers every echo in `text`, up to where one may have begun; the number of them, and where that is.
    ///
    /// What becomes of an octet depends on what follows it and on no piece that was passed on before, so a
    /// text is covered alike whole and in pieces.
    fn scan(&self, text: &mut [u8], extent: Extent) -> (usize, usize) {
        let begins = |octet: &u8| self.firsts[usize::from(*octet)] || BEGINS[usize::from(*octet)];
        let (mut found, mut at) = (0, 0);
        while let Some(rest) = text.get_mut(at..)
            && let Some(skipped) = rest.iter().position(begins)
        {
            at += skipped;
            let rest = rest.get_mut(skipped..).unwrap_or_default();
            let reading = self.read(rest, extent);
            if reading.undecided {
                return (found, at);
            }
            match reading.echo.and_then(|length| rest.get_mut(..length)) {
                Some(echo) => {
                    echo.fill(COVER);
                    found += 1;
                    at += echo.len();
                }
                None => at += 1,
            }
        }
        (found, text.len())
    }

    /// The longest echo that `text` begins with.
    fn read(&self, text: &[u8], extent: Extent) -> Reading {
        let (text, extent) = match text.get(..self.reach) {
            Some(most) => (most, Extent::Whole),
            None => (text, extent),
        };
        let plain = text.first().copied();
        let escaped = match decoded::escape_at(text) {
            Escape::Means(_, octet) => octet,
            Escape::Unfinished if extent == Extent::Begun => {
                return Reading { echo: None, undecided: true };
            }
            Escape::Unfinished | Escape::Nothing => None,
        };
        let mut longest = Reading::default();
        for form in &self.forms {
            let first = form.first().copied();
            if first != plain && first != escaped {
                continue;
            }
            let reading = decoded::read(form, text);
            longest.echo = longest.echo.max(reading.echo);
            longest.undecided |= extent == Extent::Begun && reading.undecided;
        }
        longest
    }
}

/// The answer to one request on its way.
pub struct Scrubber {
    echoes: Arc<Echoes>,
    held: BytesMut,
    messages: Option<Messages>,
    found: usize,
}

impl Scrubber {
    pub fn new(echoes: Arc<Echoes>) -> Self {
        Scrubber { echoes, held: BytesMut::new(), messages: None, found: 0 }
    }

    /// Takes the body for messages of gRPC's: it holds nothing back when one ends.
    pub(crate) fn expect_messages(&mut self) {
        self.messages = Some(Messages::default());
    }

    /// How many echoes were covered.
    pub fn found(&self) -> usize {
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
    pub fn pass(&mut self, piece: Option<&Bytes>, last: bool) -> Bytes {
        let piece = piece.map(Bytes::as_ref).unwrap_or_default();
        let over = self.messages.as_mut().is_some_and(|messages| messages.read(piece));
        let mut text = std::mem::take(&mut self.held);
        text.extend_from_slice(piece);
        let extent = if last || over { Extent::Whole } else { Extent::Begun };
        let (found, decided) = self.echoes.scan(&mut text, extent);
        self.found += found;
        self.held = text.split_off(decided);
        text.freeze()
    }
}

fn hex(value: &str, digits: &[u8; 16]) -> Zeroizing<Vec<u8>> {
    let mut form = Zeroizing::new(Vec::with_capacity(2 * value.len()));
    for octet in value.bytes() {
        form.push(digits[usize::from(octet >> 4)]);
        form.push(digits[usize::from(octet & 15)]);
    }
    form
}

/// What of its base64 does not depend on what stands around it, for each of the three alignments.
fn base64s(value: &[u8]) -> Vec<Zeroizing<Vec<u8>>> {
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

    /// Every octet escaped by itself, in a way of its own.
    fn escaped(each: fn(u8) -> String) -> String {
        SECRET.bytes().map(each).collect()
    }

    #[test]
    fn every_form_is_covered_whatever_the_chunks() {
        let wrapped = |before: &str| STANDARD.encode(format!("{before}{SECRET} and more"));
        let plain = |form: &str| (form.to_owned(), form.to_owned());
        let broken = |end: &str| {
            let based = STANDARD.encode(SECRET);
            format!("{}{end}{}", part(&based, 0, 12), part(&based, 12, based.len()))
        };
        for (form, hidden) in [
            plain(SECRET),
            ("sk-live%2F0123%2B456789%3D%3D".to_owned(), "sk-live%2F0123".to_owned()),
            ("sk-live%2f0123%2b456789%3d%3d".to_owned(), "sk-live%2f0123".to_owned()),
            plain("sk-live/0123%2B456789%3D%3D"), // as Python quotes
            plain("sk-live%2f0123%2B456789=%3D"),
            plain("%73k-live/0123+456789=="),
            plain(&escaped(|octet| format!("%{octet:02X}"))),
            plain(&escaped(|octet| format!("\\u{octet:04x}"))),
            plain(&escaped(|octet| format!("&#{octet};"))),
            plain(r"sk-live\/0123+456789=="),
            plain(r"sk-live/0123\u002B456789\u003d\u003D"),
            plain("sk-live/0123+456789&#x3D;&#x3D;"),
            plain(&escaped(|octet| format!("{octet:02x}"))),
            plain(&escaped(|octet| format!("{octet:02X}"))),
            (broken("\r\n"), part(&STANDARD.encode(SECRET), 0, 12)),
            (broken("\\n"), part(&STANDARD.encode(SECRET), 12, 20)),
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
            assert_eq!(scrubbed(text, &[5]), (text.to_vec(), 0));
        }
        for event in ["data: one\n\n", "data: three s\n\n", "data: {\"a\":\"s\"}\n"] {
            let mut scrubber = Scrubber::new(Arc::new(Echoes::of(SECRET)));
            let event = Bytes::copy_from_slice(event.as_bytes());
            assert_eq!(scrubber.pass(Some(&event), false), event, "an event is not held up");
        }
    }

    #[test]
    fn an_echo_after_what_begins_like_one_is_covered() {
        for text in [format!("sk-sk-live/{SECRET}"), format!("sk-l%73{SECRET}")] {
            for size in 1..text.len() {
                let (out, found) = scrubbed(text.as_bytes(), &[size]);
                assert_eq!(found, 1, "{text} by {size}");
                assert!(!String::from_utf8(out).unwrap().contains(SECRET), "{text} by {size}");
            }
        }
    }

    /// A reader of pieces had passed the percent sign on, and read digits where a reader of the whole read `s`.
    #[test]
    fn digits_behind_a_percent_sign_are_covered_across_lines() {
        let digits = escaped(|octet| format!("{octet:02X}"));
        let text = format!("%{}\n{}", part(&digits, 0, 12), part(&digits, 12, digits.len()));
        let covered = format!("%{}", "*".repeat(digits.len() + 1));
        for size in 1..=text.len() {
            let (out, found) = scrubbed(text.as_bytes(), &[size]);
            assert_eq!((String::from_utf8(out).unwrap(), found), (covered.clone(), 1), "by {size}");
        }
    }

    #[test]
    fn a_value_too_short_for_some_forms_ends_the_search() {
        for (value, covered) in [("a", "%b*c"), ("", "%bac")] {
            let mut text = *b"%bac";
            Echoes::of(value).cover(&mut text);
            assert_eq!(text.as_slice(), covered.as_bytes(), "{value:?}");
        }
    }

    #[test]
    fn lines_without_end_are_not_held_back() {
        let text = format!("s{}", "\\n".repeat(10_000));
        let mut scrubber = Scrubber::new(Arc::new(Echoes::of(SECRET)));
        let passed = scrubber.pass(Some(&Bytes::from(text.clone())), false);
        assert_eq!(passed, text);
    }

    #[test]
    fn a_message_that_ends_like_an_echo_begins_is_passed_whole() {
        let mut scrubber = Scrubber::new(Arc::new(Echoes::of(SECRET)));
        scrubber.expect_messages();
        let message = Bytes::from_static(b"\0\0\0\0\x04ends\0\0\0\0\x02sk");
        assert_eq!(scrubber.pass(Some(&message), false), message);
        let begun = Bytes::from_static(b"\0\0\0\0\x18sk-live/");
        assert_eq!(scrubber.pass(Some(&begun), false).len(), 5, "in the middle it waits");
    }
}
