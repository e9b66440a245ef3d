//! Runs of the characters of an encoding, found in pieces.
//!
//! The search for a run takes whole words of eight bytes at a time, without a branch for each byte: a run of 24
//! characters contains two such words in a row, and ordinary text has few.

use std::ops::Range;

/// Bits of [`CLASS`].
pub(crate) const BASE64: u8 = 1;
pub(crate) const HEX: u8 = 2;
pub(crate) const BASE32_UPPER: u8 = 4;
pub(crate) const BASE32_LOWER: u8 = 8;

/// The alphabets of each byte. Base64 stands for both of its alphabets.
pub(crate) const CLASS: [u8; 256] = {
    let mut class = [0; 256];
    let mut at = 0;
    while at < 256 {
        let byte = at as u8;
        if byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_') {
            class[at] |= BASE64;
        }
        if byte.is_ascii_hexdigit() {
            class[at] |= HEX;
        }
        if byte.is_ascii_uppercase() || matches!(byte, b'2'..=b'7') {
            class[at] |= BASE32_UPPER;
        }
        if byte.is_ascii_lowercase() || matches!(byte, b'2'..=b'7') {
            class[at] |= BASE32_LOWER;
        }
        at += 1;
    }
    class
};

/// Longest `min` of a tracker.
pub(crate) const MAX_MIN_RUN: usize = 24;
/// Most white space between two lines of a run.
const MAX_LINE_BREAK: u8 = 16;

/// What happens to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunEvent<'a> {
    /// A run begins. Its first bytes may have come with earlier pieces.
    Begin,
    /// The next bytes of it, and where the first of them is.
    Bytes(&'a [u8], u64),
    /// A line ends within the run.
    Break,
    End,
}

/// Finds runs of one alphabet that are `min` characters long or longer. Lines may break them after that.
#[derive(Clone, Debug)]
pub(crate) struct RunTracker {
    mask: u8,
    min: usize,
    state: RunState,
    /// The last characters of the alphabet, fewer than `min`.
    carry: [u8; MAX_MIN_RUN],
    carried: usize,
    /// Where the next byte is.
    place: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunState {
    Outside,
    Inside,
    /// After a line break, with so many bytes of white space.
    Between(u8),
}

impl RunTracker {
    pub(crate) fn new(mask: u8, min: usize) -> RunTracker {
        let min = min.clamp(1, MAX_MIN_RUN);
        RunTracker { mask, min, state: RunState::Outside, carry: [0; MAX_MIN_RUN], carried: 0, place: 0 }
    }

    /// Begins another view, with another least length.
    pub(crate) fn begin(&mut self, min: usize) {
        self.min = min.clamp(1, MAX_MIN_RUN);
        self.state = RunState::Outside;
        self.carried = 0;
    }

    /// Returns the least length of a run.
    pub(crate) fn min(&self) -> usize {
        self.min
    }

    /// Returns how many of the last bytes may begin a run.
    pub(crate) fn carried(&self) -> usize {
        self.carried
    }

    /// Takes the next bytes, of which the first is at `place`. A run that `is_plain` and lies within them, in one line,
    /// may be passed over.
    pub(crate) fn feed(
        &mut self,
        bytes: &[u8],
        place: u64,
        is_plain: impl Fn(&[u8]) -> bool,
        sink: &mut impl FnMut(RunEvent),
    ) {
        let mut rest = bytes;
        while let Some(first) = rest.first() {
            self.place = place + (bytes.len() - rest.len()) as u64;
            rest = match self.state {
                RunState::Outside if self.carried > 0 => self.extend_carry(rest, sink),
                RunState::Outside => self.search(rest, &is_plain, sink),
                RunState::Inside => self.pass(rest, sink),
                RunState::Between(_) if self.holds(*first) => {
                    self.state = RunState::Inside;
                    rest
                }
                RunState::Between(seen) if seen < MAX_LINE_BREAK && b"\r\n \t".contains(first) => {
                    self.state = RunState::Between(seen + 1);
                    rest.get(1..).unwrap_or_default()
                }
                RunState::Between(_) => {
                    self.end(sink);
                    rest
                }
            };
        }
    }

    /// Ends the view, or a run that another tracker found the end of.
    pub(crate) fn finish(&mut self, sink: &mut impl FnMut(RunEvent)) {
        if self.state != RunState::Outside {
            self.end(sink);
        }
        self.carried = 0;
    }

    fn holds(&self, byte: u8) -> bool {
        CLASS[usize::from(byte)] & self.mask != 0
    }

    fn end(&mut self, sink: &mut impl FnMut(RunEvent)) {
        self.state = RunState::Outside;
        sink(RunEvent::End);
    }

    fn extend_carry<'a>(&mut self, bytes: &'a [u8], sink: &mut impl FnMut(RunEvent)) -> &'a [u8] {
        let missing = self.min - self.carried;
        let more = bytes.iter().take(missing).take_while(|byte| self.holds(**byte)).count();
        let (taken, rest) = bytes.split_at(more);
        if let Some(free) = self.carry.get_mut(self.carried..self.carried + more) {
            free.copy_from_slice(taken);
        }
        // They follow each other: a gap ends them.
        let begin = self.place.saturating_sub(self.carried as u64);
        self.carried += more;
        if more == missing {
            self.state = RunState::Inside;
            sink(RunEvent::Begin);
            sink(RunEvent::Bytes(self.carry.get(..self.min).unwrap_or_default(), begin));
            self.carried = 0;
        } else if !rest.is_empty() {
            self.carried = 0;
        }
        rest
    }

    /// Searches for the beginning of a run. Returns what is left: from the run on, or nothing.
    fn search<'a>(
        &mut self,
        bytes: &'a [u8],
        is_plain: &impl Fn(&[u8]) -> bool,
        sink: &mut impl FnMut(RunEvent),
    ) -> &'a [u8] {
        let mut start = 0;
        while let Some(found) = self.next_run(bytes, start) {
            let run = bytes.get(found.clone()).unwrap_or_default();
            match bytes.get(found.end) {
                Some(end) if !b"\r\n".contains(end) && is_plain(run) => start = found.end,
                _ => {
                    self.state = RunState::Inside;
                    sink(RunEvent::Begin);
                    return bytes.get(found.start..).unwrap_or_default();
                }
            }
        }
        let tail = bytes.get(start.max(bytes.len().saturating_sub(self.min - 1))..).unwrap_or_default();
        let from = tail.iter().rposition(|byte| !self.holds(*byte)).map_or(0, |gap| gap + 1);
        let carry = tail.get(from..).unwrap_or_default();
        if let Some(free) = self.carry.get_mut(..carry.len()) {
            free.copy_from_slice(carry);
        }
        self.carried = carry.len();
        &[]
    }

    /// Returns the first run of `min` characters or more that begins at `start` or later.
    fn next_run(&self, bytes: &[u8], mut start: usize) -> Option<Range<usize>> {
        if self.mask == BASE64 && self.min >= MIN_WORDS_RUN {
            return next_base64_run(bytes, start, self.min);
        }
        // A run covers every `min`th position: from the last position of a window, walk left to the first gap.
        loop {
            let window = bytes.get(start..start + self.min)?;
            match window.iter().rposition(|byte| !self.holds(*byte)) {
                Some(gap) => start += gap + 1,
                None => {
                    let length = run_length(bytes.get(start..).unwrap_or_default(), self.mask);
                    return Some(start..start + length);
                }
            }
        }
    }

    fn pass<'a>(&mut self, bytes: &'a [u8], sink: &mut impl FnMut(RunEvent)) -> &'a [u8] {
        let length = run_length(bytes, self.mask);
        let (run, rest) = bytes.split_at(length);
        if !run.is_empty() {
            sink(RunEvent::Bytes(run, self.place));
        }
        match rest.first() {
            None => {}
            Some(b'\r' | b'\n') => {
                self.state = RunState::Between(0);
                sink(RunEvent::Break);
            }
            Some(_) => self.end(sink),
        }
        rest
    }
}

/// How many bytes the search for runs of base64 tests at a time, in two words.
const BLOCK: usize = 16;
const WORD: usize = BLOCK / 2;
/// A run so long contains a whole word, wherever it begins.
const MIN_WORDS_RUN: usize = 2 * WORD - 1;

/// Returns the first run of `min` characters of base64 or more that begins at `start` or later.
///
/// `min` is [`MIN_WORDS_RUN`] at least; one word longer, and a run contains two whole words in a row. Ordinary text has
/// few of either, so that one branch for each block suffices.
fn next_base64_run(bytes: &[u8], mut start: usize, min: usize) -> Option<Range<usize>> {
    let needs_two = min >= MIN_WORDS_RUN + WORD;
    'search: loop {
        let rest = bytes.get(start..).unwrap_or_default();
        let mut previous = false;
        for (index, block) in rest.chunks(BLOCK).enumerate() {
            let [first, second] = whole_words(block);
            let is_candidate = if needs_two { first & (previous | second) } else { first | second };
            previous = second;
            if !is_candidate {
                continue;
            }
            let whole = start + index * BLOCK + if first { 0 } else { WORD };
            let before = bytes.get(start..whole).unwrap_or_default();
            let begin = start + before.iter().rposition(|byte| !is_base64(*byte)).map_or(0, |gap| gap + 1);
            let length = run_length(bytes.get(begin..).unwrap_or_default(), BASE64);
            if length >= min {
                return Some(begin..begin + length);
            }
            start = begin + length + 1;
            continue 'search;
        }
        return None;
    }
}

/// Returns which of the two words of a block are of base64 characters alone. In a form that compilers turn into vector
/// instructions. What a short block lacks is none.
#[inline(always)]
fn whole_words(block: &[u8]) -> [bool; 2] {
    let block = match block.first_chunk::<BLOCK>() {
        Some(block) => *block,
        None => {
            let mut padded = [0; BLOCK];
            padded.iter_mut().zip(block).for_each(|(place, byte)| *place = *byte);
            padded
        }
    };
    let mut outside = [0; BLOCK];
    for (flag, byte) in outside.iter_mut().zip(block) {
        *flag = if is_base64(byte) { 0 } else { u8::MAX };
    }
    let both = u128::from_le_bytes(outside);
    [both as u64 == 0, both >> 64 == 0]
}

/// The same as [`CLASS`], without a table.
#[inline(always)]
fn is_base64(byte: u8) -> bool {
    ((byte | 0x20).wrapping_sub(b'a') < 26)
        | (byte.wrapping_sub(b'/') < 11)
        | (byte == b'+')
        | (byte == b'-')
        | (byte == b'_')
}

/// Returns whether `bytes` has a run of `min` characters of an alphabet.
pub(crate) fn has_run(bytes: &[u8], mask: u8, min: usize) -> bool {
    let mut start = 0;
    while let Some(window) = bytes.get(start..start + min) {
        match window.iter().rposition(|byte| CLASS[usize::from(*byte)] & mask == 0) {
            Some(gap) => start += gap + 1,
            None => return true,
        }
    }
    false
}

/// Returns how many bytes at the beginning are in one of the alphabets of `mask`.
fn run_length(bytes: &[u8], mask: u8) -> usize {
    let mut length = 0;
    for block in bytes.chunks_exact(8) {
        if block.iter().fold(mask, |all, byte| all & CLASS[usize::from(*byte)]) == 0 {
            break;
        }
        length += 8;
    }
    let rest = bytes.get(length..).unwrap_or_default();
    length + rest.iter().take_while(|byte| CLASS[usize::from(**byte)] & mask != 0).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the runs as text, line breaks as `|`.
    fn runs(pieces: &[&[u8]]) -> Vec<String> {
        let mut found: Vec<String> = Vec::new();
        let mut open = false;
        let mut tracker = RunTracker::new(BASE64, 4);
        let (all, mut place) = (pieces.concat(), 0);
        let mut sink = |event: RunEvent| match event {
            RunEvent::Begin => {
                assert!(!std::mem::replace(&mut open, true));
                found.push(String::new());
            }
            RunEvent::Bytes(bytes, place) => {
                let place = usize::try_from(place).unwrap();
                assert_eq!(all.get(place..place + bytes.len()), Some(bytes), "at its place");
                found.last_mut().unwrap().push_str(str::from_utf8(bytes).unwrap());
            }
            RunEvent::Break => found.last_mut().unwrap().push('|'),
            RunEvent::End => assert!(std::mem::replace(&mut open, false)),
        };
        for piece in pieces {
            tracker.feed(piece, place, |_| false, &mut sink);
            place += piece.len() as u64;
        }
        tracker.finish(&mut sink);
        assert!(!open);
        found
    }

    #[test]
    fn runs_begin_at_their_least_length() {
        for (text, expected) in [
            ("abc def ghij", &["ghij"][..]),
            ("abcdefghijk", &["abcdefghijk"]),
            (" abcd.efgh=ij", &["abcd", "efgh"]),
            ("abcd\r\n  ef\ngh ij", &["abcd|ef|gh"]),
            ("abcd\n=", &["abcd|"]),
            ("abc\ndef", &[]),
            ("", &[]),
        ] {
            assert_eq!(runs(&[text.as_bytes()]), expected, "{text:?}");
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
            assert_eq!(runs(&pieces), expected, "{text:?} a byte at a time");
        }
    }

    #[test]
    fn the_arithmetic_is_that_of_the_table() {
        for byte in 0..=255 {
            assert_eq!(is_base64(byte), CLASS[usize::from(byte)] & BASE64 != 0, "{byte}");
        }
    }

    proptest! {
        #[test]
        fn words_find_what_windows_find(text in "(([a-z]{0,30}|[a-z]{14,26})[ -]){0,12}", start in 0..20_usize) {
            let bytes = text.as_bytes();
            for min in [15, 16, 22, 23, 24] {
                let mut runs = bytes.get(start..).unwrap_or_default().split(|byte| *byte == b' ');
                let long = runs.find(|run| run.len() >= min);
                let found = next_base64_run(bytes, start, min);
                let expected = long.map(|run| run.as_ptr() as usize - bytes.as_ptr() as usize);
                prop_assert_eq!(found.as_ref().map(|found| found.start), expected, "{}", min);
                prop_assert_eq!(found.map(|found| found.len()), long.map(<[u8]>::len));
            }
        }

        #[test]
        fn runs_do_not_depend_on_pieces(text in "[a-d \n=]{0,60}", cut in any::<prop::sample::Index>()) {
            let (first, second) = text.as_bytes().split_at(cut.index(text.len() + 1));
            prop_assert_eq!(runs(&[first, second]), runs(&[text.as_bytes()]));
        }
    }
}
