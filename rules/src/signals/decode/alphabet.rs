//! Decoders of base64, hex and base32 runs.
//!
//! The first [`HEAD`] characters of a run decide how it is read. Text may be glued to what comes before it, so each
//! phase that yields ASCII is decoded; in short runs others are ordinary words, and not worth a view.

use super::runs::{CLASS, HEX};
use crate::signals::Encoding;

/// How many characters of a run decide how it is read.
pub(crate) const HEAD: usize = 256;
/// Two blocks of so many characters in a row must be ASCII in a phase.
const BLOCK: usize = 8;
/// Runs of so many characters are decoded from their beginning, whatever they contain. In shorter ones a secret shows:
/// it is ASCII, and long enough to fill two blocks.
const LONG: usize = HEAD;
/// Most phases of a run: base64 has four.
pub(crate) const MAX_PHASES: usize = 4;

/// The value of each base64 character of either alphabet, shifted to its place in a group of four.
const BASE64_VALUES: [[u32; 256]; 4] = {
    let mut values = [[0; 256]; 4];
    let mut at = 0;
    while at < 256 {
        let value = base64_value(at as u8) as u32;
        values[0][at] = value << 18;
        values[1][at] = value << 12;
        values[2][at] = value << 6;
        values[3][at] = value;
        at += 1;
    }
    values
};

const fn base64_value(byte: u8) -> u8 {
    match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' | b'-' => 62,
        b'/' | b'_' => 63,
        _ => 0,
    }
}

/// Decodes a run from one phase on.
#[derive(Clone, Debug)]
pub(crate) struct PhaseDecoder {
    bits_each: u32,
    /// Characters to leave out before the first group.
    skip: usize,
    bits: u32,
    held: u32,
    encoding: Encoding,
}

impl PhaseDecoder {
    pub(crate) fn new(encoding: Encoding, phase: usize) -> PhaseDecoder {
        PhaseDecoder { bits_each: bits_each(encoding), skip: phase, bits: 0, held: 0, encoding }
    }

    /// Returns how many characters are not decoded yet.
    pub(crate) fn pending(&self) -> usize {
        usize::from(self.held > 0) * 8
    }

    /// Decodes characters of the alphabet to `out`.
    pub(crate) fn decode(&mut self, mut text: &[u8], out: &mut Vec<u8>) {
        let skipped = self.skip.min(text.len());
        self.skip -= skipped;
        text = text.get(skipped..).unwrap_or_default();
        if self.bits_each != 6 {
            text.iter().for_each(|byte| self.push(*byte, out));
            return;
        }
        while self.held > 0 {
            let Some((first, rest)) = text.split_first() else { return };
            self.push(*first, out);
            text = rest;
        }
        let (groups, rest) = text.as_chunks::<4>();
        let [first, second, third, fourth] = &BASE64_VALUES;
        let length = out.len();
        out.resize(length + groups.len() * 3, 0);
        let (triples, _) = out.get_mut(length..).unwrap_or_default().as_chunks_mut::<3>();
        for ([a, b, c, d], triple) in groups.iter().zip(triples) {
            let bits = first[usize::from(*a)]
                | second[usize::from(*b)]
                | third[usize::from(*c)]
                | fourth[usize::from(*d)];
            let [_, x, y, z] = bits.to_be_bytes();
            *triple = [x, y, z];
        }
        rest.iter().for_each(|byte| self.push(*byte, out));
    }

    fn push(&mut self, byte: u8, out: &mut Vec<u8>) {
        self.bits = self.bits << self.bits_each | u32::from(value(self.encoding, byte));
        self.held += self.bits_each;
        if self.held >= 8 {
            self.held -= 8;
            out.push((self.bits >> self.held) as u8);
        }
        self.bits &= (1 << self.held) - 1;
    }
}

fn bits_each(encoding: Encoding) -> u32 {
    match encoding {
        Encoding::Hex => 4,
        Encoding::Base32 => 5,
        Encoding::Base64
        | Encoding::Base64Url
        | Encoding::Deflate
        | Encoding::Gzip
        | Encoding::HtmlEscapes
        | Encoding::JsonEscapes
        | Encoding::Percent => 6,
    }
}

fn value(encoding: Encoding, byte: u8) -> u8 {
    match bits_each(encoding) {
        4 => (byte as char).to_digit(16).unwrap_or_default() as u8,
        5 if byte.is_ascii_digit() => byte.wrapping_sub(b'2').wrapping_add(26) & 31,
        5 => byte.to_ascii_lowercase().wrapping_sub(b'a') & 31,
        _ => base64_value(byte),
    }
}

/// Returns which phases of a run to decode, by its first characters.
pub(crate) fn phases(encoding: Encoding, head: &[u8]) -> [bool; MAX_PHASES] {
    match bits_each(encoding) {
        4 => hex_phases(head),
        5 => [true, false, false, false],
        _ => base64_phases(head),
    }
}

/// Returns the alphabet of base64 that `head` uses.
pub(crate) fn base64_flavour(head: &[u8]) -> Encoding {
    if memchr::memchr2(b'-', b'_', head).is_some() { Encoding::Base64Url } else { Encoding::Base64 }
}

/// Returns whether a run begins like content that is compressed.
pub(crate) fn is_compressed(encoding: Encoding, head: &[u8]) -> bool {
    match bits_each(encoding) {
        4 => head.get(..4).is_some_and(|magic| {
            magic.eq_ignore_ascii_case(b"1f8b")
                || magic.starts_with(b"78") && CLASS[usize::from(magic[2])] & HEX != 0
        }),
        5 => false,
        _ => head.starts_with(b"H4sI") || is_zlib_base64(head),
    }
}

fn base64_phases(head: &[u8]) -> [bool; MAX_PHASES] {
    let mut phases = u8::from(head.len() >= LONG || is_compressed(Encoding::Base64, head));
    let (blocks, _) = head.as_chunks::<BLOCK>();
    let at = |index: usize| blocks.get(index).map_or(0, ascii_phases);
    // Of two blocks in a row one has an odd index.
    for index in (1..blocks.len()).step_by(2) {
        let now = at(index);
        if now != 0 {
            phases |= now & (at(index - 1) | at(index + 1));
        }
    }
    [phases & 1 != 0, phases & 2 != 0, phases & 4 != 0, phases & 8 != 0]
}

/// Returns the phases in which a block of base64 is ASCII, one bit for each.
///
/// Of four characters, 0x20 in the first, 0x08 in the second and 0x02 in the third begin a byte each: zero in ASCII.
#[inline]
fn ascii_phases(block: &[u8; BLOCK]) -> u8 {
    let value = |at: usize| BASE64_VALUES[3][usize::from(block[at])];
    let any = [value(0) | value(4), value(1) | value(5), value(2) | value(6), value(3) | value(7)];
    let high = |phase: usize| any[phase] & 0x20 | any[(phase + 1) % 4] & 0x08 | any[(phase + 2) % 4] & 0x02;
    u8::from(high(0) == 0)
        | u8::from(high(1) == 0) << 1
        | u8::from(high(2) == 0) << 2
        | u8::from(high(3) == 0) << 3
}

/// Returns whether base64 begins with the bytes of a zlib header, 0x78 and one of four.
fn is_zlib_base64(head: &[u8]) -> bool {
    let [b'e', flags @ ..] = head else { return false };
    matches!(
        flags,
        [b'A', b'E'..=b'H', ..] | [b'F', b'4'..=b'7', ..] | [b'J', b'w'..=b'z', ..] | [b'N', b'o'..=b'r', ..]
    )
}

fn hex_phases(head: &[u8]) -> [bool; MAX_PHASES] {
    const ROW: usize = 3 * BLOCK;
    let mut phases = [head.len() >= LONG || is_compressed(Encoding::Hex, head), false, false, false];
    let mut ascii = [0, 0];
    for (at, byte) in head.iter().enumerate() {
        // A high digit of 2 to 7 begins a printable character; white space adds 0.
        let is_ascii = matches!(byte, b'0' | b'2'..=b'7');
        ascii[at % 2] = if is_ascii { ascii[at % 2] + 1 } else { 0 };
        phases[at % 2] |= ascii[at % 2] >= ROW / 2;
    }
    phases
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(encoding: Encoding, phase: usize, text: &str, piece: usize) -> String {
        let mut decoder = PhaseDecoder::new(encoding, phase);
        let mut out = Vec::new();
        text.as_bytes().chunks(piece).for_each(|piece| decoder.decode(piece, &mut out));
        String::from_utf8_lossy(&out).into_owned()
    }

    #[test]
    fn runs_decode_in_any_pieces() {
        for (encoding, phase, text, expected) in [
            (Encoding::Base64, 0, "aGVsbG8gd29ybGQ", "hello world"),
            (Encoding::Base64, 1, "xaGVsbG8gd29ybGQ", "hello world"),
            (Encoding::Base64, 0, "Pz8_Pj4-", "???>>>"),
            (Encoding::Base64, 0, "Pz8/Pj4+", "???>>>"),
            (Encoding::Hex, 0, "68656c6C6F", "hello"),
            (Encoding::Hex, 1, "068656c6C6F", "hello"),
            (Encoding::Base32, 0, "NBSWY3DPEB3W64TMMQ", "hello world"),
            (Encoding::Base32, 0, "nbswy3dpeb3w64tmmq", "hello world"),
        ] {
            for piece in 1..=text.len() {
                assert_eq!(decode(encoding, phase, text, piece), expected, "{text} by {piece}");
            }
        }
    }

    #[test]
    fn phases_are_those_that_yield_text() {
        for (encoding, head, expected) in [
            (Encoding::Base64, "aGVsbG8gd29ybGQgYWdhaW4", [true, false, false, false]),
            (Encoding::Base64, "xaGVsbG8gd29ybGQgYWdhaW4", [false, true, false, false]),
            (Encoding::Base64, "keyaGVsbG8gd29ybGQgYWdhaW4", [false, false, false, true]),
            (Encoding::Base64, "repos/octocat/Hello-World/issues", [false; 4]),
            (Encoding::Hex, "68656c6c6f20776f726c6420616761696e", [true, false, false, false]),
            (Encoding::Hex, "a68656c6c6f20776f726c6420616761696e", [false, true, false, false]),
            (Encoding::Hex, "d670460b4b4aece5915caf5c68d12f560a9fe3e4", [false; 4]),
        ] {
            assert_eq!(phases(encoding, head.as_bytes()), expected, "{head}");
        }
    }
}
