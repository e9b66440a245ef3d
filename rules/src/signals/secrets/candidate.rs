//! One place where a secret may begin, and the questions that a shape asks about it.

/// A set of byte values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteSet([u64; 4]);

impl ByteSet {
    pub(super) const EMPTY: ByteSet = ByteSet([0; 4]);

    /// Returns the set of the bytes in `bytes`.
    pub(super) const fn of(bytes: &[u8]) -> ByteSet {
        let mut set = ByteSet::EMPTY;
        let mut at = 0;
        while at < bytes.len() {
            set = set.with_range(bytes[at], bytes[at]);
            at += 1;
        }
        set
    }

    pub(super) const fn with_range(mut self, first: u8, last: u8) -> ByteSet {
        let mut byte = first as usize;
        while byte <= last as usize {
            self.0[byte >> 6] |= 1 << (byte & 63);
            byte += 1;
        }
        self
    }

    pub(super) const fn union(self, other: ByteSet) -> ByteSet {
        let (a, b) = (self.0, other.0);
        ByteSet([a[0] | b[0], a[1] | b[1], a[2] | b[2], a[3] | b[3]])
    }

    pub(super) const fn contains(&self, byte: u8) -> bool {
        self.0[(byte >> 6) as usize] & (1 << (byte & 63)) != 0
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == ByteSet::EMPTY
    }
}

pub(super) const DIGIT: ByteSet = ByteSet::EMPTY.with_range(b'0', b'9');
pub(super) const UPPER: ByteSet = ByteSet::EMPTY.with_range(b'A', b'Z');
pub(super) const LOWER: ByteSet = ByteSet::EMPTY.with_range(b'a', b'z');
pub(super) const LETTER: ByteSet = UPPER.union(LOWER);
pub(super) const ALNUM: ByteSet = LETTER.union(DIGIT);
/// The characters of most tokens, and of base64url.
pub(super) const TOKEN: ByteSet = ALNUM.union(ByteSet::of(b"-_"));
pub(super) const BASE64: ByteSet = ALNUM.union(ByteSet::of(b"+/"));
pub(super) const LOWER_HEX: ByteSet = DIGIT.with_range(b'a', b'f');
pub(super) const BASE32: ByteSet = UPPER.with_range(b'2', b'7');

/// What a shape says about a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is not a secret of this shape.
    No,
    /// The bytes that decide are still to come.
    More,
    Yes,
}

impl Verdict {
    pub(super) fn from_check(holds: bool) -> Verdict {
        if holds { Verdict::Yes } else { Verdict::No }
    }
}

/// Bytes that begin with the prefix of a shape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    /// The bytes before it, as far back as [`super::LOOK_BEHIND`].
    pub before: &'a [u8],
    /// The bytes from the prefix on.
    pub text: &'a [u8],
    /// Length of the prefix.
    pub prefix: usize,
    /// Whether the view ends with `text`.
    pub ended: bool,
}

impl<'a> Candidate<'a> {
    /// Returns whether no letter or digit comes right before.
    pub(super) fn begins_word(&self) -> bool {
        !self.before.last().is_some_and(|byte| ALNUM.contains(*byte))
    }

    /// Returns what follows the prefix.
    pub(super) fn rest(&self) -> &'a [u8] {
        self.text.get(self.prefix..).unwrap_or_default()
    }

    /// Returns what is missing: more bytes, or everything, if there are none to come.
    pub(super) fn short(&self) -> Verdict {
        if self.ended { Verdict::No } else { Verdict::More }
    }

    /// Decides a shape whose prefix is followed by exactly `length` characters of `class`, and then by another character.
    pub(super) fn exactly(&self, class: &ByteSet, length: usize, check: fn(&[u8]) -> bool) -> Verdict {
        self.between(class, length, length, check)
    }

    /// Decides a shape whose prefix is followed by `min` to `max` characters of `class`, and then by another character.
    pub(super) fn between(
        &self,
        class: &ByteSet,
        min: usize,
        max: usize,
        check: fn(&[u8]) -> bool,
    ) -> Verdict {
        let rest = self.rest();
        let length = run(rest, class, max + 1);
        if length > max {
            return Verdict::No;
        }
        if length == rest.len() && !self.ended {
            return Verdict::More;
        }
        Verdict::from_check(length >= min && rest.get(..length).is_some_and(check))
    }

    /// Decides a shape whose prefix is followed by `min` characters of `class` or more.
    pub(super) fn at_least(&self, class: &ByteSet, min: usize, check: fn(&[u8]) -> bool) -> Verdict {
        let rest = self.rest();
        let length = run(rest, class, min);
        if length < min {
            return if length == rest.len() { self.short() } else { Verdict::No };
        }
        Verdict::from_check(rest.get(..min).is_some_and(check))
    }
}

/// Returns how many of the first `most` bytes are in `class` without a gap.
pub(super) fn run(bytes: &[u8], class: &ByteSet, most: usize) -> usize {
    bytes.iter().take(most).take_while(|byte| class.contains(**byte)).count()
}

/// Returns whether `token` looks drawn at random, unlike `XXXXXXXX` or an example from documentation.
pub(super) fn is_varied(token: &[u8]) -> bool {
    const EXAMPLES: [&[u8]; 7] =
        [b"EXAMPLE", b"example", b"Example", b"xxxx", b"XXXX", b"1234567890", b"abcdefgh"];
    let mut seen = [false; 256];
    let mut distinct = 0;
    for byte in token {
        distinct += usize::from(!std::mem::replace(&mut seen[usize::from(*byte)], true));
    }
    distinct * 4 >= token.len().min(32)
        && distinct >= 5
        && !EXAMPLES.iter().any(|example| memchr::memmem::find(token, example).is_some())
}

/// Returns whether `token` is varied and mixes upper case, lower case and digits.
pub(super) fn is_mixed(token: &[u8]) -> bool {
    is_varied(token)
        && [UPPER, LOWER, DIGIT].iter().all(|class| token.iter().any(|byte| class.contains(*byte)))
}

/// Decodes base64url or base64 without padding; `None` for other characters.
pub(in crate::signals) fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut held) = (0_u32, 0);
    for byte in text {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            decoded.push((bits >> held) as u8);
        }
    }
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(text: &str, ended: bool) -> Candidate<'_> {
        Candidate { before: b"", text: text.as_bytes(), prefix: 2, ended }
    }

    #[test]
    fn lengths_are_decided_with_the_byte_after_them() {
        for (text, ended, expected) in [
            ("p_abc", false, Verdict::More),
            ("p_abc", true, Verdict::Yes),
            ("p_abc ", false, Verdict::Yes),
            ("p_ab", true, Verdict::No),
            ("p_ab ", false, Verdict::No),
            ("p_abcd", false, Verdict::No),
            ("p_", false, Verdict::More),
        ] {
            assert_eq!(candidate(text, ended).exactly(&LOWER, 3, |_| true), expected, "{text:?} {ended}");
        }
    }

    #[test]
    fn open_shapes_are_decided_at_their_least_length() {
        for (text, ended, expected) in [
            ("p_abc", false, Verdict::Yes),
            ("p_abcdef", false, Verdict::Yes),
            ("p_ab", false, Verdict::More),
            ("p_ab", true, Verdict::No),
            ("p_a!", false, Verdict::No),
        ] {
            assert_eq!(candidate(text, ended).at_least(&LOWER, 3, |_| true), expected, "{text:?} {ended}");
        }
    }

    #[test]
    fn examples_are_not_varied() {
        for (token, varied) in [
            (&b"Zq81LmPw02RtYxKd"[..], true),
            (b"XXXXXXXXXXXXXXXX", false),
            (b"IOSFODNN7EXAMPLE", false),
            (b"1234567890123456", false),
            (b"0000000000000000", false),
        ] {
            assert_eq!(is_varied(token), varied, "{token:?}");
        }
    }
}
