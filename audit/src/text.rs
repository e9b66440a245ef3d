//! Strings from outside, made safe to stand in a line: bounded once escaped, cut on a character
//! and marked, never raw bytes.

use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::encode::needs_no_escape;

/// What a cut text ends with, followed by the number of bytes that were cut.
///
/// A noncharacter, which inputs lose in [`ExplainText`], so that none can make a record say that it was
/// cut. In the line it is written as an ellipsis, which an input may have, too: only
/// `metadata.is_truncated` tells.
pub(crate) const TRUNCATION_MARK: char = '\u{fdd0}';
/// Room for the mark: `\u2026+` and the digits of a 64-bit number.
const MARK_BYTES: usize = 27;

/// A string of at most `CAP` bytes once escaped. Longer input is cut and marked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Text<const CAP: usize>(Arc<str>);

impl<const CAP: usize> Text<CAP> {
    /// Takes bytes that may not be UTF-8: each bad byte becomes U+FFFD and its two hex digits.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        // What is cut anyway need not be looked at; no character is longer than four bytes.
        let near = bytes.get(..CAP + 4).unwrap_or(bytes);
        if near.iter().copied().all(needs_no_escape) && bytes.len() <= CAP {
            return Self(String::from_utf8_lossy(bytes).into());
        }
        let letters = near.utf8_chunks().flat_map(|chunk| {
            let valid = chunk.valid().chars().map(letter_with_size);
            valid.chain(chunk.invalid().iter().flat_map(|byte| hex_letters(*byte)))
        });
        Self::from_letters(letters, bytes.len())
    }

    /// What a reader of the record will see.
    pub fn to_display(&self) -> String {
        self.0.replace(TRUNCATION_MARK, "\u{2026}+")
    }

    /// The text with its mark as it is kept, for records that repeat it.
    pub(crate) fn to_arc(&self) -> Arc<str> {
        Arc::clone(&self.0)
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes letters, each with the bytes of input that end with it, as far as they fit.
    fn from_letters(letters: impl Iterator<Item = (char, usize)> + Clone, size: usize) -> Self {
        let safe = |letter| if letter == TRUNCATION_MARK { '\u{fffd}' } else { letter };
        let mut room = CAP;
        let (mut fits, mut taken) = (0, 0); // letters that leave room for the mark, and their bytes
        for (letter, bytes) in letters.clone() {
            let Some(left) = room.checked_sub(escaped_len(safe(letter))) else {
                let kept: String = letters.take(fits).map(|(letter, _)| safe(letter)).collect();
                return Self(
                    format!("{kept}{TRUNCATION_MARK}{}", size.saturating_sub(taken)).into(),
                );
            };
            room = left;
            if room >= MARK_BYTES {
                (fits, taken) = (fits + 1, taken + bytes);
            }
        }
        Self(letters.map(|(letter, _)| safe(letter)).collect::<String>().into())
    }
}

/// A letter with the bytes it has in the input.
fn letter_with_size(letter: char) -> (char, usize) {
    (letter, letter.len_utf8())
}

/// A byte that is no UTF-8, as three letters.
fn hex_letters(byte: u8) -> [(char, usize); 3] {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
    [('\u{fffd}', 0), (digit(byte >> 4), 0), (digit(byte & 15), 1)]
}

impl<const CAP: usize> From<&str> for Text<CAP> {
    fn from(text: &str) -> Self {
        if text.len() <= CAP && text.bytes().all(needs_no_escape) {
            return Self(text.into());
        }
        Self::from_letters(text.chars().map(letter_with_size), text.len())
    }
}

impl<const CAP: usize> From<String> for Text<CAP> {
    fn from(text: String) -> Self {
        Self::from(text.as_str())
    }
}

impl<const CAP: usize> Default for Text<CAP> {
    fn default() -> Self {
        Self::from("")
    }
}

impl<const CAP: usize> Serialize for Text<CAP> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// How many bytes a character takes in a line.
fn escaped_len(letter: char) -> usize {
    match letter {
        '"' | '\\' => 2,
        ' '..='~' => 1,
        other => 6 * other.len_utf16(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::encode::Encoder;

    fn line<const CAP: usize>(text: &Text<CAP>) -> (String, u64) {
        let mut encoder = Encoder::default();
        text.serialize(&mut encoder).unwrap();
        (String::from_utf8(encoder.bytes).unwrap(), encoder.cut)
    }

    #[test]
    fn p8_no_input_forges_splits_or_colours_a_line() {
        for (input, expected) in [
            (&b"api.example.com"[..], r#""api.example.com""#),
            (b"a\",\"action_id\":1,\"x\":\"", r#""a\",\"action_id\":1,\"x\":\"""#),
            (b"a\nb\r\n{}", r#""a\u000ab\u000d\u000a{}""#),
            (b"\x1b[31mred\x1b[0m", r#""\u001b[31mred\u001b[0m""#),
            ("\u{202e}gnp.exe".as_bytes(), r#""\u202egnp.exe""#),
            ("a\u{2028}b\u{85}c\u{7f}".as_bytes(), r#""a\u2028b\u0085c\u007f""#),
            ("p\u{430}ypal".as_bytes(), r#""p\u0430ypal""#),
            ("\u{1f600}".as_bytes(), r#""\ud83d\ude00""#),
            (b"\xff\xfeok\xc3", r#""\ufffdff\ufffdfeok\ufffdc3""#),
            ("x\u{fdd0}9".as_bytes(), r#""x\ufffd9""#),
            (b"nul\0", r#""nul\u0000""#),
            (b"back\\slash", r#""back\\slash""#),
        ] {
            let (line, cut) = line(&Text::<200>::from_bytes(input));
            assert_eq!((line.as_str(), cut), (expected, 0), "{input:?}");
        }
    }

    #[test]
    fn p17_over_long_text_is_cut_and_marked() {
        let (line, cut) = line(&Text::<64>::from("a".repeat(1000)));
        assert_eq!(cut, 1000 - 37);
        assert!(line.ends_with("a\\u2026+963\""), "{line}");
        assert!(line.len() <= 64 + 2);
    }

    #[test]
    fn what_is_cut_is_counted_in_bytes_of_the_input() {
        for (input, cut) in [
            (&[0xff; 20][..], 16),
            (&[0xff; 8], 0),
            (&[0xff; 9], 5),
            ("\u{fdd0}".repeat(20).as_bytes(), 60 - 6 * 3),
        ] {
            let (line, found) = line(&Text::<64>::from_bytes(input));
            assert_eq!(found, cut, "{line}");
            assert_eq!(line.contains("\\u2026+"), cut > 0, "{line}");
        }
    }

    proptest! {
        #[test]
        fn p17_every_text_is_bounded_printable_and_reads_back(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let (line, _) = line(&Text::<100>::from_bytes(&bytes));
            prop_assert!(line.len() <= 100 + 2, "{line}");
            prop_assert!(line.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{line}");
            prop_assert!(serde_json::from_str::<String>(&line).is_ok(), "{line}");
        }

        #[test]
        fn what_fits_is_unchanged(text in "\\PC{0,12}") {
            let (line, cut) = line(&Text::<200>::from(text.as_str()));
            prop_assert_eq!(cut, 0);
            prop_assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
        }
    }
}
