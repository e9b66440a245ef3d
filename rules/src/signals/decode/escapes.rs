//! Escapes in text: percent, JSON and HTML.

use crate::signals::Encoding;

/// Longest escape: `&#x0010ffff;`.
pub(crate) const MAX_ESCAPE: usize = 12;

/// What is at the beginning of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Escape {
    /// An escape of so many bytes that stands for a character.
    Character(usize, char),
    /// An escape of so many bytes that stands for a byte.
    Byte(usize, u8),
    /// Perhaps an escape; its end is missing.
    Incomplete,
    None,
}

/// An encoding that replaces single characters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EscapeSyntax {
    pub encoding: Encoding,
    /// The byte that every escape begins with.
    pub trigger: u8,
    parse: fn(&[u8]) -> Escape,
}

pub(crate) const SYNTAXES: [EscapeSyntax; 3] = [
    EscapeSyntax { encoding: Encoding::HtmlEscapes, trigger: b'&', parse: html },
    EscapeSyntax { encoding: Encoding::JsonEscapes, trigger: b'\\', parse: json },
    EscapeSyntax { encoding: Encoding::Percent, trigger: b'%', parse: percent },
];

impl EscapeSyntax {
    /// Parses the escape that `text` begins with, at its trigger.
    pub(crate) fn parse(&self, text: &[u8]) -> Escape {
        (self.parse)(text)
    }

    /// Adds text without escapes to `out`. Beside percent escapes `+` is a space, as forms write it
    /// (`application/x-www-form-urlencoded`).
    pub(crate) fn copy_plain(&self, text: &[u8], out: &mut Vec<u8>) {
        let length = out.len();
        out.extend_from_slice(text);
        if self.encoding == Encoding::Percent {
            let added = out.get_mut(length..).unwrap_or_default();
            added.iter_mut().for_each(|byte| *byte = if *byte == b'+' { b' ' } else { *byte });
        }
    }
}

fn percent(text: &[u8]) -> Escape {
    match (text.get(1).map(digit), text.get(2).map(digit)) {
        (Some(Some(high)), Some(Some(low))) => Escape::Byte(3, (high << 4 | low) as u8),
        (None, None) | (Some(Some(_)), None) => Escape::Incomplete,
        _ => Escape::None,
    }
}

/// Parses JSON escapes (RFC 8259, section 7), and `\x41` and `\'` of programming languages.
fn json(text: &[u8]) -> Escape {
    let Some(kind) = text.get(1) else { return Escape::Incomplete };
    match kind {
        b'"' | b'\\' | b'/' | b'\'' => Escape::Byte(2, *kind),
        b'n' => Escape::Byte(2, b'\n'),
        b'r' => Escape::Byte(2, b'\r'),
        b't' => Escape::Byte(2, b'\t'),
        b'b' => Escape::Byte(2, 8),
        b'f' => Escape::Byte(2, 12),
        b'u' => match digits(text, 2, 4) {
            Ok(unit) => Escape::Character(6, char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER)),
            Err(escape) => escape,
        },
        b'x' => match digits(text, 2, 2) {
            Ok(byte) => Escape::Byte(4, byte as u8),
            Err(escape) => escape,
        },
        _ => Escape::None,
    }
}

fn html(text: &[u8]) -> Escape {
    const NAMED: [(&[u8], u8); 10] = [
        (b"&amp;", b'&'),
        (b"&apos;", b'\''),
        (b"&colon;", b':'),
        (b"&equals;", b'='),
        (b"&gt;", b'>'),
        (b"&lowbar;", b'_'),
        (b"&lt;", b'<'),
        (b"&nbsp;", b' '),
        (b"&quot;", b'"'),
        (b"&sol;", b'/'),
    ];
    if text.get(1).is_some_and(|second| *second != b'#') {
        return NAMED
            .iter()
            .find_map(|(name, byte)| {
                if text.starts_with(name) {
                    return Some(Escape::Byte(name.len(), *byte));
                }
                name.starts_with(text).then_some(Escape::Incomplete)
            })
            .unwrap_or(Escape::None);
    }
    let (radix, from) = match text.get(2) {
        None => return Escape::Incomplete,
        Some(b'x' | b'X') => (16, 3),
        Some(_) => (10, 2),
    };
    let mut code = 0_u32;
    for (at, byte) in text.iter().enumerate().take(MAX_ESCAPE).skip(from) {
        match (*byte as char).to_digit(radix) {
            Some(digit) => code = code.saturating_mul(radix).saturating_add(digit),
            None if *byte == b';' && at > from => {
                let character = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
                return Escape::Character(at + 1, character);
            }
            None => return Escape::None,
        }
    }
    if text.len() < MAX_ESCAPE { Escape::Incomplete } else { Escape::None }
}

fn digit(byte: &u8) -> Option<u32> {
    (*byte as char).to_digit(16)
}

/// Reads `count` hex digits from `from` on.
fn digits(text: &[u8], from: usize, count: usize) -> Result<u32, Escape> {
    let given = text.iter().skip(from).take(count);
    let value = given.clone().try_fold(0, |value, byte| digit(byte).map(|digit| value << 4 | digit));
    match value {
        None => Err(Escape::None),
        Some(_) if given.count() < count => Err(Escape::Incomplete),
        Some(value) => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_read_or_left_alone() {
        for (text, expected) in [
            ("%41", Escape::Byte(3, b'A')),
            ("%4", Escape::Incomplete),
            ("%", Escape::Incomplete),
            ("%zz", Escape::None),
            ("%z", Escape::None),
            (r"\n", Escape::Byte(2, b'\n')),
            (r"\/", Escape::Byte(2, b'/')),
            (r"\u0041", Escape::Character(6, 'A')),
            (r"\u004", Escape::Incomplete),
            (r"\u00g", Escape::None),
            (r"\ud83d", Escape::Character(6, char::REPLACEMENT_CHARACTER)),
            (r"\x41", Escape::Byte(4, b'A')),
            (r"\q", Escape::None),
            (r"\", Escape::Incomplete),
            ("&amp;", Escape::Byte(5, b'&')),
            ("&am", Escape::Incomplete),
            ("&", Escape::Incomplete),
            ("&&", Escape::None),
            ("&#65;", Escape::Character(5, 'A')),
            ("&#x41;", Escape::Character(6, 'A')),
            ("&#;", Escape::None),
            ("&#99999999999999", Escape::None),
            ("&#9999999;", Escape::Character(10, char::REPLACEMENT_CHARACTER)),
            ("&#6", Escape::Incomplete),
            ("&copy=1", Escape::None),
        ] {
            let syntax =
                SYNTAXES.iter().find(|syntax| text.as_bytes().first() == Some(&syntax.trigger)).unwrap();
            assert_eq!(syntax.parse(text.as_bytes()), expected, "{text}");
        }
    }
}
