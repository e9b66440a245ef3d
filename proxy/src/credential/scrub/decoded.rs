//! A text as whoever reads it would decode it: percent signs, the escapes of JSON and HTML, lines that base64 is
//! broken into. Each is taken away once, and every octet knows where it came from.

/// Longest escape: `&#x0000002f;`.
pub(super) const LONGEST: usize = 12;

/// What begins an escape, or is one.
const BEGINS: [bool; 256] = {
    let mut begins = [false; 256];
    let mut at = 0;
    while at < 5 {
        begins[b"%\\&\r\n"[at] as usize] = true;
        at += 1;
    }
    begins
};

/// The five that HTML cannot do without.
const NAMED: [(&[u8], u8); 5] =
    [(b"amp;", b'&'), (b"apos;", b'\''), (b"gt;", b'>'), (b"lt;", b'<'), (b"quot;", b'"')];

/// The decoded text, up to an escape that may be unfinished.
pub(super) struct Decoded {
    pub(super) text: Vec<u8>,
    /// Behind each escape: where that is here, and where it is in what was sent.
    behind: Vec<(usize, usize)>,
}

/// What stands where an escape may begin.
enum Escape {
    /// So many octets that mean this one, or none at all.
    Means(usize, Option<u8>),
    Nothing,
    /// More is needed to tell.
    Unfinished,
}

impl Decoded {
    /// Decodes `sent`; none where there is nothing to decode.
    pub(super) fn of(sent: &[u8]) -> Option<Self> {
        let begins = |text: &[u8]| text.iter().position(|octet| BEGINS[usize::from(*octet)]);
        begins(sent)?;
        let mut text = Vec::with_capacity(sent.len());
        let mut behind = Vec::new();
        let mut rest = sent;
        while let Some((plain, escape)) = begins(rest).and_then(|at| rest.split_at_checked(at)) {
            text.extend_from_slice(plain);
            let length = match escape_at(escape) {
                Escape::Means(length, octet) => {
                    text.extend(octet);
                    behind.push((text.len(), sent.len() - escape.len() + length));
                    length
                }
                Escape::Nothing => {
                    text.extend(escape.first());
                    1
                }
                Escape::Unfinished => return Some(Decoded { text, behind }),
            };
            rest = escape.get(length..).unwrap_or_default();
        }
        text.extend_from_slice(rest);
        Some(Decoded { text, behind })
    }

    /// Where the octet `at` stands in what was sent.
    pub(super) fn sent_at(&self, at: usize) -> usize {
        let passed = self.behind.partition_point(|(here, _)| *here <= at);
        let last = passed.checked_sub(1).and_then(|last| self.behind.get(last));
        last.map_or(at, |(here, there)| there + (at - here))
    }
}

fn escape_at(text: &[u8]) -> Escape {
    match text {
        [b'%', high, low, ..] => match hex(&[*high, *low]) {
            Some(octet) => Escape::Means(3, u8::try_from(octet).ok()),
            None => Escape::Nothing,
        },
        [b'%', digits @ ..] if digits.iter().all(u8::is_ascii_hexdigit) => Escape::Unfinished,
        [b'\\', rest @ ..] => json(rest),
        [b'&', rest @ ..] => html(rest),
        // A line end inside is where base64 was broken; an empty line ends whatever it was.
        [b'\r', b'\n', b'\r' | b'\n', ..] | [b'\n', b'\r' | b'\n', ..] => Escape::Nothing,
        [b'\r', b'\n', ..] => Escape::Means(2, None),
        [b'\n', ..] => Escape::Means(1, None),
        [b'\r'] => Escape::Unfinished,
        _ => Escape::Nothing,
    }
}

fn json(text: &[u8]) -> Escape {
    match text {
        [] => Escape::Unfinished,
        [octet @ (b'/' | b'\\' | b'"'), ..] => Escape::Means(2, Some(*octet)),
        [b'n' | b'r', ..] => Escape::Means(2, None),
        [b'u', a, b, c, d, ..] => match hex(&[*a, *b, *c, *d]).map(u8::try_from) {
            Some(Ok(octet)) => Escape::Means(6, Some(octet)),
            Some(Err(_)) | None => Escape::Nothing,
        },
        [b'u', digits @ ..] if digits.iter().all(u8::is_ascii_hexdigit) => Escape::Unfinished,
        _ => Escape::Nothing,
    }
}

fn html(text: &[u8]) -> Escape {
    let within = text.get(..LONGEST - 1).unwrap_or(text);
    let Some(end) = within.iter().position(|octet| *octet == b';') else {
        let begun = |octet: &u8| octet.is_ascii_alphanumeric() || *octet == b'#';
        let unfinished = text.len() < LONGEST - 1 && text.iter().all(begun);
        return if unfinished { Escape::Unfinished } else { Escape::Nothing };
    };
    let octet = match text.get(..end) {
        Some([b'#', b'x' | b'X', digits @ ..]) => hex(digits),
        Some([b'#', digits @ ..]) => number(digits, 10),
        _ => {
            let named = NAMED.iter().find(|(name, _)| text.starts_with(name));
            named.map(|(_, octet)| u32::from(*octet))
        }
    };
    match octet.map(u8::try_from) {
        Some(Ok(octet)) => Escape::Means(end + 2, Some(octet)),
        Some(Err(_)) | None => Escape::Nothing,
    }
}

fn hex(digits: &[u8]) -> Option<u32> {
    number(digits, 16)
}

fn number(digits: &[u8], base: u32) -> Option<u32> {
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
            let decoded = Decoded::of(sent.as_bytes()).unwrap();
            assert_eq!(String::from_utf8_lossy(&decoded.text), meant, "{sent}");
        }
        assert!(Decoded::of(b"plain").is_none());
    }

    #[test]
    fn an_escape_that_may_go_on_is_not_decoded_yet() {
        for sent in ["ab%", "ab%2", "ab\\", "ab\\u00", "ab&", "ab&#x2", "ab&am", "ab\r"] {
            let decoded = Decoded::of(sent.as_bytes()).unwrap();
            assert_eq!(decoded.text, b"ab", "{sent}");
            assert_eq!(decoded.sent_at(2), 2, "{sent}");
        }
    }

    #[test]
    fn octets_know_where_they_came_from() {
        let decoded = Decoded::of(b"a%2Fb\\u0063d").unwrap();
        assert_eq!(decoded.text, b"a/bcd");
        let places: Vec<usize> = (0..=5).map(|at| decoded.sent_at(at)).collect();
        assert_eq!(places, [0, 1, 4, 5, 11, 12]);
    }
}
