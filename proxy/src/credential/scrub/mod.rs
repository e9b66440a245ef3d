//! Masks a credential that an origin server echoes, in a header or in the body, before the sandbox sees it: plain,
//! in base64, in hexadecimal, escaped in the usual ways, and across chunk boundaries. Other transformations, such as
//! encryption or a substring, are not recognised.

mod decoded;
mod messages;

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use bytes::{Bytes, BytesMut};
use zeroize::Zeroizing;

use decoded::{ESCAPE_STARTS, EscapeMatch, Reading};
use messages::GrpcFraming;

/// Replaces each octet of an echo, so that `Content-Length` stays right.
const MASK: u8 = b'*';

/// The forms in which an origin server may echo a credential.
pub struct EchoPatterns {
    forms: Vec<Zeroizing<Vec<u8>>>,
    /// The first octets of the forms.
    firsts: [bool; 256],
    /// Length of the longest possible echo, with every octet escaped.
    reach: usize,
}

/// Whether more text follows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    Begun,
    Whole,
}

impl EchoPatterns {
    pub fn new(value: &str) -> Self {
        let mut forms = vec![Zeroizing::new(value.as_bytes().to_vec())];
        forms.extend([hex_form(value, b"0123456789abcdef"), hex_form(value, b"0123456789ABCDEF")]);
        forms.extend(base64_forms(value.as_bytes()));
        forms.retain(|form| !form.is_empty());
        forms.sort_unstable_by(|one, other| one.as_slice().cmp(other));
        forms.dedup();
        let mut firsts = [false; 256];
        for first in forms.iter().filter_map(|form| form.first()) {
            firsts[usize::from(*first)] = true;
        }
        let longest = forms.iter().map(|form| form.len()).max().unwrap_or_default();
        EchoPatterns { forms, firsts, reach: longest.saturating_mul(decoded::MAX_ESCAPE) }
    }

    /// Masks every echo in `text` and returns how many there were.
    pub fn mask(&self, text: &mut [u8]) -> usize {
        self.scan(text, Extent::Whole).0
    }

    /// Whether the name of a field contains an echo. Names have no case, and HTTP/2 sends them in lower case.
    pub fn is_in_name(&self, name: &str) -> bool {
        let unescaped = decoded::unescape(name.as_bytes());
        [name.as_bytes(), unescaped.as_slice()].iter().any(|text| {
            let echoes = |form: &[u8]| text.windows(form.len()).any(|part| part.eq_ignore_ascii_case(form));
            self.forms.iter().any(|form| echoes(form))
        })
    }

    /// Masks every echo in `text` up to where an unfinished one may start. Returns how many there were, and that
    /// offset.
    ///
    /// Whether an octet is masked depends only on what follows it, never on text passed on before, so whole and
    /// chunked input give the same result.
    fn scan(&self, text: &mut [u8], extent: Extent) -> (usize, usize) {
        let begins = |octet: &u8| self.firsts[usize::from(*octet)] || ESCAPE_STARTS[usize::from(*octet)];
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
                    echo.fill(MASK);
                    found += 1;
                    at += echo.len();
                }
                None => at += 1,
            }
        }
        (found, text.len())
    }

    /// Returns the longest echo at the start of `text`.
    fn read(&self, text: &[u8], extent: Extent) -> Reading {
        let (text, extent) = match text.get(..self.reach) {
            Some(most) => (most, Extent::Whole),
            None => (text, extent),
        };
        let plain = text.first().copied();
        let escaped = match decoded::match_escape(text) {
            EscapeMatch::Means(_, octet) => octet,
            EscapeMatch::Unfinished if extent == Extent::Begun => {
                return Reading { echo: None, undecided: true };
            }
            EscapeMatch::Unfinished | EscapeMatch::Nothing => None,
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

/// Scrubs one response as it streams through.
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

    /// Treats the body as gRPC messages: nothing is held back at the end of a message.
    pub(crate) fn expect_grpc(&mut self) {
        self.messages = Some(GrpcFraming::default());
    }

    /// Returns how many echoes were masked.
    pub fn echo_count(&self) -> usize {
        self.found
    }

    /// Masks every echo in a header field and returns how many there were.
    pub(crate) fn mask_field(&mut self, field: &mut [u8]) -> usize {
        let found = self.echoes.mask(field);
        self.found += found;
        found
    }

    /// Whether the name of a field contains an echo, which then counts as found. The field must not be passed on.
    pub(crate) fn find_in_name(&mut self, name: &str) -> bool {
        let found = self.echoes.is_in_name(name);
        self.found += usize::from(found);
        found
    }

    /// Takes the next chunk and returns what may be passed on. Holds back only a tail that could be the start of an
    /// echo, so that server-sent events are not delayed.
    pub fn scrub(&mut self, piece: Option<&Bytes>, last: bool) -> Bytes {
        let piece = piece.map(Bytes::as_ref).unwrap_or_default();
        let over = self.messages.as_mut().is_some_and(|messages| messages.advance(piece));
        let mut text = std::mem::take(&mut self.held);
        text.extend_from_slice(piece);
        let extent = if last || over { Extent::Whole } else { Extent::Begun };
        let (found, decided) = self.echoes.scan(&mut text, extent);
        self.found += found;
        self.held = text.split_off(decided);
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

/// The part of the base64 that does not depend on the surrounding bytes, for each of the three alignments.
fn base64_forms(value: &[u8]) -> Vec<Zeroizing<Vec<u8>>> {
    let mut forms = Vec::new();
    for before in 0..3usize {
        let padded: Zeroizing<Vec<u8>> = Zeroizing::new([&[0; 2][..before.min(2)], value].concat());
        let first = (before * 8).div_ceil(6); // the first digit that consists of the value's bits only
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

    /// The secret with every octet escaped.
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
                assert_eq!(shown.len(), text.len(), "the length must not change");
                assert!(shown.starts_with("{\"you sent\": \"") && shown.ends_with("\"}"), "{shown}");
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
            assert_eq!(scrubber.scrub(Some(&event), false), event, "an event must not be delayed");
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

    /// A chunk boundary after the percent sign must not change how the digits are read.
    #[test]
    fn digits_behind_a_percent_sign_are_covered_across_lines() {
        let digits = escape_each(|octet| format!("{octet:02X}"));
        let text = format!("%{}\n{}", slice(&digits, 0, 12), slice(&digits, 12, digits.len()));
        let covered = format!("%{}", "*".repeat(digits.len() + 1));
        for size in 1..=text.len() {
            let (out, found) = scrub_in_chunks(text.as_bytes(), &[size]);
            assert_eq!((String::from_utf8(out).unwrap(), found), (covered.clone(), 1), "by {size}");
        }
    }

    #[test]
    fn a_value_too_short_for_some_forms_ends_the_search() {
        for (value, covered) in [("a", "%b*c"), ("", "%bac")] {
            let mut text = *b"%bac";
            EchoPatterns::new(value).mask(&mut text);
            assert_eq!(text.as_slice(), covered.as_bytes(), "{value:?}");
        }
    }

    #[test]
    fn lines_without_end_are_not_held_back() {
        let text = format!("s{}", "\\n".repeat(10_000));
        let mut scrubber = ResponseScrubber::new(Arc::new(EchoPatterns::new(SECRET)));
        let passed = scrubber.scrub(Some(&Bytes::from(text.clone())), false);
        assert_eq!(passed, text);
    }

    #[test]
    fn a_message_that_ends_like_an_echo_begins_is_passed_whole() {
        let mut scrubber = ResponseScrubber::new(Arc::new(EchoPatterns::new(SECRET)));
        scrubber.expect_grpc();
        let message = Bytes::from_static(b"\0\0\0\0\x04ends\0\0\0\0\x02sk");
        assert_eq!(scrubber.scrub(Some(&message), false), message);
        let begun = Bytes::from_static(b"\0\0\0\0\x18sk-live/");
        assert_eq!(
            scrubber.scrub(Some(&begun), false).len(),
            5,
            "within a message the start of an echo is held back"
        );
    }

    #[test]
    fn an_echo_is_found_in_a_name_whatever_its_case() {
        let echoes = EchoPatterns::new("Sk-Live-0123_456");
        let hex: String = "Sk-Live-0123_456".bytes().map(|octet| format!("{octet:02X}")).collect();
        let base64 = STANDARD.encode("Sk-Live-0123_456").replace('=', "");
        for (name, found) in [
            ("X-You-Sent-Sk-Live-0123_456", true),
            ("x-you-sent-sk-live-0123_456-thanks", true),
            ("SK-LIVE-0123_456", true),
            ("sk%2Dlive%2d0123%5F456", true),
            ("%53k-live-0123_456", true),
            (&*format!("x-{hex}"), true),
            (&*format!("x-{}", base64.to_ascii_lowercase()), true),
            ("sk-live-0123_45", false),
            ("content-type", false),
            ("", false),
        ] {
            assert_eq!(echoes.is_in_name(name), found, "{name}");
        }
    }
}
