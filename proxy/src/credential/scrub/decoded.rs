//! A text as whoever reads it would decode it: percent signs, the escapes of JSON and HTML, lines that base64 is
//! broken into. Each is taken away once, and every octet knows where it came from.

/// Longest escape: `&#x0000002f;`.
pub(super) const MAX_ESCAPE: usize = 12;

/// What begins an escape, or is one.
const ESCAPE_STARTS: [bool; 256] = {
    let mut begins = [false; 256];
    let mut at = 0;
    while at < 5 {
        begins[b"%\\&\r\n"[at] as usize] = true;
        at += 1;
    }
    begins
};

/// The five that HTML cannot do without.
const HTML_ENTITIES: [(&[u8], u8); 5] =
    [(b"amp;", b'&'), (b"apos;", b'\''), (b"gt;", b'>'), (b"lt;", b'<'), (b"quot;", b'"')];

/// The decoded text, up to an escape that may be unfinished.
pub(super) struct UnescapedText {
    pub(super) text: Vec<u8>,
    /// Behind each escape: where that is here, and where it is in what was sent.
    behind: Vec<(usize, usize)>,
}

/// What stands where an escape may begin.
enum EscapeMatch {
    /// So many octets that mean this one, or none at all.
    Means(usize, Option<u8>),
    Nothing,
    /// More is needed to tell.
    Unfinished,
}

impl UnescapedText {
    /// Decodes `sent`; none where there is nothing to decode.
    pub(super) fn decode(sent: &[u8]) -> Option<Self> {
        let begins = |text: &[u8]| text.iter().position(|octet| ESCAPE_STARTS[usize::from(*octet)]);
        begins(sent)?;
        let mut text = Vec::with_capacity(sent.len());
        let mut behind = Vec::new();
        let mut rest = sent;
        while let Some((plain, escape)) = begins(rest).and_then(|at| rest.split_at_checked(at)) {
            text.extend_from_slice(plain);
            let length = match match_escape(escape) {
                EscapeMatch::Means(length, octet) => {
                    text.extend(octet);
                    behind.push((text.len(), sent.len() - escape.len() + length));
                    length
                }
                EscapeMatch::Nothing => {
                    text.extend(escape.first());
                    1
                }
                EscapeMatch::Unfinished => return Some(UnescapedText { text, behind }),
            };
            rest = escape.get(length..).unwrap_or_default();
        }
        text.extend_from_slice(rest);
        Some(UnescapedText { text, behind })
    }

    /// Where the octet `at` stands in what was sent.
    pub(super) fn source_offset(&self, at: usize) -> usize {
        let passed = self.behind.partition_point(|(here, _)| *here <= at);
        let last = passed.checked_sub(1).and_then(|last| self.behind.get(last));
        last.map_or(at, |(here, there)| there + (at - here))
    }
}

fn match_escape(text: &[u8]) -> EscapeMatch {
    match text {
        [b'%', high, low, ..] => match parse_hex(&[*high, *low]) {
            Some(octet) => EscapeMatch::Means(3, u8::try_from(octet).ok()),
            None => EscapeMatch::Nothing,
        },
        [b'%', digits @ ..] if digits.iter().all(u8::is_ascii_hexdigit) => EscapeMatch::Unfinished,
        [b'\\', rest @ ..] => json_escape(rest),
        [b'&', rest @ ..] => html_escape(rest),
        // A line end inside is where base64 was broken; an empty line ends whatever it was.
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
            let decoded = UnescapedText::decode(sent.as_bytes()).unwrap();
            assert_eq!(String::from_utf8_lossy(&decoded.text), meant, "{sent}");
        }
        assert!(UnescapedText::decode(b"plain").is_none());
    }

    #[test]
    fn an_escape_that_may_go_on_is_not_decoded_yet() {
        for sent in ["ab%", "ab%2", "ab\\", "ab\\u00", "ab&", "ab&#x2", "ab&am", "ab\r"] {
            let decoded = UnescapedText::decode(sent.as_bytes()).unwrap();
            assert_eq!(decoded.text, b"ab", "{sent}");
            assert_eq!(decoded.source_offset(2), 2, "{sent}");
        }
    }

    #[test]
    fn octets_know_where_they_came_from() {
        let decoded = UnescapedText::decode(b"a%2Fb\\u0063d").unwrap();
        assert_eq!(decoded.text, b"a/bcd");
        let places: Vec<usize> = (0..=5).map(|at| decoded.source_offset(at)).collect();
        assert_eq!(places, [0, 1, 4, 5, 11, 12]);
    }
}
