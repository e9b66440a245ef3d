//! The escapes in which servers spell single characters: percent-encoding, escapes of JSON and C, references of HTML,
//! and quoted-printable.

/// Longest escape: a reference of HTML with leading zeros.
pub(super) const MAX_ESCAPE: usize = 24;
/// Most digits of a numeric reference.
const MAX_DIGITS: usize = 16;

/// A set of escapes that are decoded together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EscapeFamilies(u8);

impl EscapeFamilies {
    pub(super) const NONE: Self = EscapeFamilies(0);
    pub(super) const PERCENT: Self = EscapeFamilies(1);
    pub(super) const BACKSLASH: Self = EscapeFamilies(2);
    pub(super) const HTML: Self = EscapeFamilies(4);
    pub(super) const QUOTED: Self = EscapeFamilies(8);
    pub(super) const ALL: Self = EscapeFamilies(15);
    pub(super) const EACH: [Self; 4] = [Self::PERCENT, Self::BACKSLASH, Self::HTML, Self::QUOTED];

    /// The family that an octet starts an escape of.
    pub(super) const fn of(octet: u8) -> Self {
        match octet {
            b'%' => Self::PERCENT,
            b'\\' => Self::BACKSLASH,
            b'&' => Self::HTML,
            b'=' => Self::QUOTED,
            _ => Self::NONE,
        }
    }

    pub(super) const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(super) fn with(self, other: Self) -> Self {
        EscapeFamilies(self.0 | other.0)
    }

    /// How many families are in the set.
    pub(super) fn count(self) -> u32 {
        self.0.count_ones()
    }
}

/// What stands at the start of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Escape {
    /// An escape of this length, and the octet it means.
    Octet(usize, u8),
    /// An escape of this length for a blank or a line break.
    Blank(usize),
    /// No escape.
    None,
    /// The text ends before the escape does.
    Unfinished,
}

/// References of HTML to characters that a credential may contain.
const NAMED: &[(&[u8], u8)] = &[
    (b"DiacriticalGrave", b'`'),
    (b"VerticalLine", b'|'),
    (b"UnderBar", b'_'),
    (b"Hat", b'^'),
    (b"amp", b'&'),
    (b"AMP", b'&'),
    (b"apos", b'\''),
    (b"ast", b'*'),
    (b"bsol", b'\\'),
    (b"colon", b':'),
    (b"comma", b','),
    (b"commat", b'@'),
    (b"dollar", b'$'),
    (b"equals", b'='),
    (b"excl", b'!'),
    (b"grave", b'`'),
    (b"gt", b'>'),
    (b"GT", b'>'),
    (b"lbrace", b'{'),
    (b"lbrack", b'['),
    (b"lcub", b'{'),
    (b"lowbar", b'_'),
    (b"lpar", b'('),
    (b"lsqb", b'['),
    (b"lt", b'<'),
    (b"LT", b'<'),
    (b"midast", b'*'),
    (b"num", b'#'),
    (b"percnt", b'%'),
    (b"period", b'.'),
    (b"plus", b'+'),
    (b"quest", b'?'),
    (b"quot", b'"'),
    (b"QUOT", b'"'),
    (b"rbrace", b'}'),
    (b"rbrack", b']'),
    (b"rcub", b'}'),
    (b"rpar", b')'),
    (b"rsqb", b']'),
    (b"semi", b';'),
    (b"sol", b'/'),
    (b"verbar", b'|'),
    (b"vert", b'|'),
];

/// Returns the escape that `text` starts with, if it is of one of `families`.
pub(super) fn match_escape(text: &[u8], families: EscapeFamilies) -> Escape {
    match text {
        [b'%', rest @ ..] if families.has(EscapeFamilies::PERCENT) => percent(rest),
        [b'\\', rest @ ..] if families.has(EscapeFamilies::BACKSLASH) => backslash(rest),
        [b'&', rest @ ..] if families.has(EscapeFamilies::HTML) => reference(rest),
        [b'=', rest @ ..] if families.has(EscapeFamilies::QUOTED) => quoted(rest),
        _ => Escape::None,
    }
}

fn percent(text: &[u8]) -> Escape {
    match text {
        [b'u' | b'U', rest @ ..] => fixed_hex(rest, 4, 2),
        _ => fixed_hex(text, 2, 1),
    }
}

fn quoted(text: &[u8]) -> Escape {
    match text {
        [b'\r', b'\n', ..] => Escape::Blank(3),
        [b'\n', ..] => Escape::Blank(2),
        [b'\r'] => Escape::Unfinished,
        _ => fixed_hex(text, 2, 1),
    }
}

fn backslash(text: &[u8]) -> Escape {
    match text {
        [] => Escape::Unfinished,
        [octet @ (b'/' | b'\\' | b'"' | b'\''), ..] => Escape::Octet(2, *octet),
        [b'n' | b'r' | b't', ..] => Escape::Blank(2),
        [b'u', b'{', rest @ ..] => braced(rest),
        [b'u'] => Escape::Unfinished,
        [b'u', rest @ ..] => fixed_hex(rest, 4, 2),
        [b'x', rest @ ..] => fixed_hex(rest, 2, 2),
        [b'0'..=b'7', ..] => octal(text),
        _ => Escape::None,
    }
}

/// Exactly `count` digits; the escape is as long as they and what stands `before` them.
fn fixed_hex(text: &[u8], count: usize, before: usize) -> Escape {
    let digits = text.get(..count).unwrap_or(text);
    if !digits.iter().all(u8::is_ascii_hexdigit) {
        Escape::None
    } else if digits.len() < count {
        Escape::Unfinished
    } else {
        meaning(number(digits, 16), before + count)
    }
}

/// `\u{2f}` of JavaScript and Rust.
fn braced(text: &[u8]) -> Escape {
    let within = text.get(..=MAX_DIGITS).unwrap_or(text);
    match within.iter().position(|octet| !octet.is_ascii_hexdigit()) {
        Some(end @ 1..) if within.get(end) == Some(&b'}') => {
            meaning(number(within.get(..end).unwrap_or_default(), 16), end + 4)
        }
        Some(_) => Escape::None,
        None if text.len() <= MAX_DIGITS => Escape::Unfinished,
        None => Escape::None,
    }
}

/// Up to three digits of base 8.
fn octal(text: &[u8]) -> Escape {
    let within = text.get(..3).unwrap_or(text);
    let digits = within.iter().take_while(|octet| matches!(octet, b'0'..=b'7')).count();
    if digits == text.len() && digits < 3 {
        return Escape::Unfinished;
    }
    meaning(number(text.get(..digits).unwrap_or_default(), 8), digits + 1)
}

fn reference(text: &[u8]) -> Escape {
    match text {
        [] | [b'#'] | [b'#', b'x' | b'X'] => Escape::Unfinished,
        [b'#', b'x' | b'X', rest @ ..] => numeric(rest, 16, 3),
        [b'#', rest @ ..] => numeric(rest, 10, 2),
        _ => named(text),
    }
}

fn numeric(text: &[u8], base: u32, before: usize) -> Escape {
    let within = text.get(..=MAX_DIGITS).unwrap_or(text);
    let digits = within.iter().take_while(|octet| char::from(**octet).is_digit(base)).count();
    if digits == text.len() && digits <= MAX_DIGITS {
        return Escape::Unfinished;
    }
    if digits == 0 || digits > MAX_DIGITS {
        return Escape::None;
    }
    let closed = usize::from(text.get(digits) == Some(&b';'));
    meaning(number(text.get(..digits).unwrap_or_default(), base), before + digits + closed)
}

fn named(text: &[u8]) -> Escape {
    let mut longest: Option<(usize, u8)> = None;
    for (name, octet) in NAMED {
        if text.len() <= name.len() && name.starts_with(text) {
            return Escape::Unfinished;
        }
        if text.starts_with(name) && longest.is_none_or(|(length, _)| name.len() > length) {
            longest = Some((name.len(), *octet));
        }
    }
    match longest {
        Some((length, octet)) => {
            let closed = usize::from(text.get(length) == Some(&b';'));
            Escape::Octet(1 + length + closed, octet)
        }
        None => Escape::None,
    }
}

fn meaning(code: Option<u32>, length: usize) -> Escape {
    match code.map(u8::try_from) {
        Some(Ok(b' ' | b'\t' | b'\r' | b'\n')) => Escape::Blank(length),
        Some(Ok(octet)) => Escape::Octet(length, octet),
        Some(Err(_)) | None => Escape::None,
    }
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
    fn each_family_reads_its_own() {
        for (text, escape) in [
            ("%2Fx", Escape::Octet(3, b'/')),
            ("%u002fx", Escape::Octet(6, b'/')),
            ("%zz", Escape::None),
            ("%2", Escape::Unfinished),
            ("%0a", Escape::Blank(3)),
            (r"\/", Escape::Octet(2, b'/')),
            (r"\u002Fx", Escape::Octet(6, b'/')),
            (r"\u{2f}x", Escape::Octet(6, b'/')),
            (r"\u20ac", Escape::None),
            (r"\u00", Escape::Unfinished),
            (r"\x2f", Escape::Octet(4, b'/')),
            (r"\0571", Escape::Octet(4, b'/')),
            (r"\57x", Escape::Octet(3, b'/')),
            (r"\57", Escape::Unfinished),
            (r"\nx", Escape::Blank(2)),
            (r"\q", Escape::None),
            ("&#47;x", Escape::Octet(5, b'/')),
            ("&#47x", Escape::Octet(4, b'/')),
            ("&#X0000002F;", Escape::Octet(12, b'/')),
            ("&#x2F", Escape::Unfinished),
            ("&#8364;", Escape::None),
            ("&#;", Escape::None),
            ("&sol;", Escape::Octet(5, b'/')),
            ("&solx", Escape::Octet(4, b'/')),
            ("&commat;", Escape::Octet(8, b'@')),
            ("&comma", Escape::Unfinished),
            ("&so", Escape::Unfinished),
            ("&nothing;", Escape::None),
            ("=2F", Escape::Octet(3, b'/')),
            ("=\r\nx", Escape::Blank(3)),
            ("=\r", Escape::Unfinished),
            ("=\"", Escape::None),
            ("", Escape::None),
        ] {
            assert_eq!(match_escape(text.as_bytes(), EscapeFamilies::ALL), escape, "{text:?}");
        }
        assert_eq!(match_escape(b"%2F", EscapeFamilies::HTML), Escape::None);
    }
}
