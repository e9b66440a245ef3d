//! Matches a credential in escaped text: percent-encoding, JSON and HTML escapes, base64 broken into lines.
//!
//! Each escape is decoded once, and a match does not depend on the text before it.

/// Longest escape: `&#x0000002f;`.
pub(super) const MAX_ESCAPE: usize = 12;

/// Octets that start an escape, or are one.
pub(super) const ESCAPE_STARTS: [bool; 256] = {
    let mut begins = [false; 256];
    let mut at = 0;
    while at < 5 {
        begins[b"%\\&\r\n"[at] as usize] = true;
        at += 1;
    }
    begins
};

/// The five predefined entities.
const HTML_ENTITIES: [(&[u8], u8); 5] =
    [(b"amp;", b'&'), (b"apos;", b'\''), (b"gt;", b'>'), (b"lt;", b'<'), (b"quot;", b'"')];

/// The result of matching a form at the start of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    /// How many octets spell the form; the longest match if several are possible.
    pub(super) echo: Option<usize>,
    /// More input could change the result.
    pub(super) undecided: bool,
}

/// The escape at the start of a text.
pub(super) enum EscapeMatch {
    /// An escape of this length, and the octet it stands for; none for a line break.
    Means(usize, Option<u8>),
    Nothing,
    /// The text ends before the escape does.
    Unfinished,
}

/// Matches `form` at the start of `text`, each octet plain or escaped, with line breaks anywhere.
///
/// An escape may also be meant literally: `%736b` matches both `s6b` and `736b`. So this follows every possible
/// reading at once, as a set of positions. Choosing one would depend on the text before `text`, and a streaming
/// scrubber has already passed that on if a chunk ended there; whole and chunked input would then differ.
pub(super) fn read(form: &[u8], text: &[u8]) -> Reading {
    let plain = |(octet, sent): &(&u8, &u8)| octet == sent && !ESCAPE_STARTS[usize::from(**sent)];
    let alike = form.iter().zip(text).take_while(plain).count();
    if text.get(alike).is_some_and(|sent| alike < form.len() && !ESCAPE_STARTS[usize::from(*sent)]) {
        return Reading::default(); // the common case
    }
    let mut places = vec![alike];
    let mut undecided = false;
    for (index, octet) in form.iter().enumerate().skip(alike) {
        let mut behind = Vec::new();
        for mut place in places {
            loop {
                let rest = text.get(place..).unwrap_or_default();
                if rest.first() == Some(octet) {
                    behind.push(place + 1);
                }
                match match_escape(rest) {
                    EscapeMatch::Means(length, None) if index > 0 => {
                        place += length;
                        continue;
                    }
                    EscapeMatch::Means(length, Some(meant)) if meant == *octet => {
                        behind.push(place + length);
                    }
                    EscapeMatch::Means(..) | EscapeMatch::Nothing => {}
                    EscapeMatch::Unfinished => undecided = true,
                }
                break;
            }
        }
        behind.sort_unstable();
        behind.dedup(); // without this the readings of a run of backslashes grow exponentially
        places = behind;
        if places.is_empty() {
            break;
        }
    }
    Reading { echo: places.last().copied(), undecided }
}

/// Returns `text` with every escape decoded.
pub(super) fn unescape(mut text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    while let [first, rest @ ..] = text {
        text = match match_escape(text) {
            EscapeMatch::Means(length, meant) => {
                plain.extend(meant);
                text.get(length..).unwrap_or_default()
            }
            EscapeMatch::Nothing | EscapeMatch::Unfinished => {
                plain.push(*first);
                rest
            }
        };
    }
    plain
}

/// Returns the escape that `text` starts with.
pub(super) fn match_escape(text: &[u8]) -> EscapeMatch {
    match text {
        [] => EscapeMatch::Unfinished,
        [b'%', high, low, ..] => match parse_hex(&[*high, *low]) {
            Some(octet) => EscapeMatch::Means(3, u8::try_from(octet).ok()),
            None => EscapeMatch::Nothing,
        },
        [b'%', digits @ ..] if digits.iter().all(u8::is_ascii_hexdigit) => EscapeMatch::Unfinished,
        [b'\\', rest @ ..] => json_escape(rest),
        [b'&', rest @ ..] => html_escape(rest),
        // A single line end may be where base64 was wrapped; an empty line ends the encoded text.
        [b'\r', b'\n', b'\r' | b'\n', ..] | [b'\n', b'\r' | b'\n', ..] => EscapeMatch::Nothing,
        [b'\r', b'\n', ..] => EscapeMatch::Means(2, None),
        [b'\n', ..] => EscapeMatch::Means(1, None),
        [b'\r'] => EscapeMatch::Unfinished,
        _ => EscapeMatch::Nothing,
    }
}

fn json_escape(text: &[u8]) -> EscapeMatch {
    match text {
        [] => EscapeMatch::Unfinished,
        [octet @ (b'/' | b'\\' | b'"'), ..] => EscapeMatch::Means(2, Some(*octet)),
        [b'n' | b'r', ..] => EscapeMatch::Means(2, None),
        [b'u', a, b, c, d, ..] => match parse_hex(&[*a, *b, *c, *d]).map(u8::try_from) {
            Some(Ok(octet)) => EscapeMatch::Means(6, Some(octet)),
            Some(Err(_)) | None => EscapeMatch::Nothing,
        },
        [b'u', digits @ ..] if digits.iter().all(u8::is_ascii_hexdigit) => EscapeMatch::Unfinished,
        _ => EscapeMatch::Nothing,
    }
}

fn html_escape(text: &[u8]) -> EscapeMatch {
    let within = text.get(..MAX_ESCAPE - 1).unwrap_or(text);
    let Some(end) = within.iter().position(|octet| *octet == b';') else {
        let begun = |octet: &u8| octet.is_ascii_alphanumeric() || *octet == b'#';
        let unfinished = text.len() < MAX_ESCAPE - 1 && text.iter().all(begun);
        return if unfinished { EscapeMatch::Unfinished } else { EscapeMatch::Nothing };
    };
    let octet = match text.get(..end) {
        Some([b'#', b'x' | b'X', digits @ ..]) => parse_hex(digits),
        Some([b'#', digits @ ..]) => parse_number(digits, 10),
        _ => {
            let named = HTML_ENTITIES.iter().find(|(name, _)| text.starts_with(name));
            named.map(|(_, octet)| u32::from(*octet))
        }
    };
    match octet.map(u8::try_from) {
        Some(Ok(octet)) => EscapeMatch::Means(end + 2, Some(octet)),
        Some(Err(_)) | None => EscapeMatch::Nothing,
    }
}

fn parse_hex(digits: &[u8]) -> Option<u32> {
    parse_number(digits, 16)
}

fn parse_number(digits: &[u8], base: u32) -> Option<u32> {
    let add = |sum: u32, digit: &u8| {
        let digit = char::from(*digit).to_digit(base)?;
        sum.checked_mul(base)?.checked_add(digit)
    };
    (!digits.is_empty()).then(|| digits.iter().try_fold(0, add)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(length: usize) -> Reading {
        Reading { echo: Some(length), undecided: false }
    }

    #[test]
    fn each_escape_is_decoded_once() {
        for (sent, meant) in [
            ("a%2Fb%2fc", "a/b/c"),
            ("a%252F", "a%2F"),
            (r"a\/b\u002Fc\\u002f", r"a/b/c\u002f"),
            (r"a\nb\rc", "abc"),
            ("a&#x2F;b&#47;c&amp;d", "a/b/c&d"),
            ("a&#X0000002F;b", "a/b"),
            ("ab\r\ncd\nef", "abcdef"),
            ("ab\n\ncd\r\n\r\nef", "ab\ncd\r\nef"),
            ("100% of a&b; \\x", "100% of a&b; \\x"),
            ("%zz &#; &#x; \\u20ac &#8364;", "%zz &#; &#x; \\u20ac &#8364;"),
            ("é%C3%A9", "éé"),
        ] {
            assert_eq!(read(meant.as_bytes(), sent.as_bytes()), whole(sent.len()), "{sent}");
        }
        for (sent, form) in [("a%252F", "a/"), (r"a\\u002f", "a/"), ("ab\n\ncd", "abcd"), ("\nab", "ab")] {
            assert_eq!(read(form.as_bytes(), sent.as_bytes()), Reading::default(), "{sent}");
        }
    }

    #[test]
    fn an_escape_that_may_go_on_is_not_decoded_yet() {
        for sent in ["ab%", "ab%2", "ab\\", "ab\\u00", "ab&", "ab&#x2", "ab&am", "ab\r", "ab\n", "ab"] {
            let reading = read(b"ab&", sent.as_bytes());
            assert!(reading.undecided, "{sent}");
        }
    }

    #[test]
    fn what_looks_like_an_escape_may_stand_for_itself() {
        assert_eq!(read(b"ab%2F", b"ab%2F"), whole(5));
        assert_eq!(read(b"ab/", b"ab%2F"), whole(5));
        assert_eq!(read(br"a\b", br"a\\b"), whole(4));
        let backslashes = [b'\\'; 400];
        assert_eq!(read(&backslashes[..200], &backslashes).echo, Some(400));
        assert_eq!(read(&[&backslashes[..200], b"x"].concat(), &backslashes).echo, None);
    }
}
