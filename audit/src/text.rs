//! Untrusted strings made safe for a line: bounded in their escaped length, cut at a character
//! boundary and marked, never raw bytes.

use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::encode::needs_no_escape;

/// Marks the end of a cut string; the number of bytes cut follows it.
///
/// It is a noncharacter, which [`Text`] replaces in its input, so no input can fake a cut. The encoder
/// writes it as an ellipsis, which an input may contain too: rely on `metadata.is_truncated`.
pub(crate) const TRUNCATION_MARK: char = '\u{fdd0}';
/// Room for the mark: `\u2026+` and up to 20 digits.
const MARK_BYTES: usize = 27;

/// A string of at most `CAP` bytes once escaped. Longer input is cut and marked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Text<const CAP: usize>(Arc<str>);

impl<const CAP: usize> Text<CAP> {
    /// Converts bytes that may not be UTF-8: each bad byte becomes U+FFFD and its two hex digits.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        // Input beyond the cap is cut anyway; four more bytes complete the last character.
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

    /// Returns the text as a reader of the record sees it.
    pub fn to_display(&self) -> String {
        self.0.replace(TRUNCATION_MARK, "\u{2026}+")
    }

    /// Returns the text with its mark unchanged, for records that repeat it.
    pub(crate) fn to_arc(&self) -> Arc<str> {
        Arc::clone(&self.0)
    }

    /// Returns whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Collects characters as far as they fit, each with the number of input bytes that end with it.
    fn from_letters(letters: impl Iterator<Item = (char, usize)> + Clone, size: usize) -> Self {
        let safe = |letter| if letter == TRUNCATION_MARK { '\u{fffd}' } else { letter };
        let mut room = CAP;
        let (mut fits, mut taken) = (0, 0); // characters that leave room for the mark, and their bytes
        for (letter, bytes) in letters.clone() {
            let Some(left) = room.checked_sub(escaped_len(safe(letter))) else {
                let start: String = letters.take(fits).map(|(letter, _)| safe(letter)).collect();
                return Self(format!("{start}{TRUNCATION_MARK}{}", size.saturating_sub(taken)).into());
            };
            room = left;
            if room >= MARK_BYTES {
                (fits, taken) = (fits + 1, taken + bytes);
            }
        }
        Self(letters.map(|(letter, _)| safe(letter)).collect::<String>().into())
    }
}

/// Pairs a character with its length in the input.
fn letter_with_size(letter: char) -> (char, usize) {
    (letter, letter.len_utf8())
}

/// Renders a byte that is not UTF-8 as three characters.
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

/// Returns the number of bytes that a character takes in a line.
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
