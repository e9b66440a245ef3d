//! What a new value is made of: how much of it looks random, and how much is text.

use super::super::Encoding;

/// Bytes of one value that are looked at. What follows counts as random.
const SCANNED: usize = 8 << 10;
/// Runs below this length are text.
const SHORTEST_RUN: usize = 8;
/// A run of capitals of at least this length counts as base32.
const SHORTEST_CAPITALS: usize = 12;
/// Letters and digits in a row that are not vowels, from which on a run is not a word.
const VOWEL_DISTANCE: usize = 5;
/// Escapes of letters and digits, which need none, from which on a value counts as percent-encoded data.
const NEEDLESS_ESCAPES: usize = 8;
/// Digits of a number that may be a counter, an id or a time. More are data.
const NUMBER_DIGITS: usize = 19;

/// What a new value contains, apart from what was seen before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ValueContent {
    /// Bytes that the runs that look random decode to.
    pub(super) random: u64,
    /// The longest of these runs, in characters as sent.
    pub(super) longest: u64,
    pub(super) encoding: Option<Encoding>,
    /// Characters of text.
    pub(super) text: u64,
}

/// What a run is worth, as far as it is known before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunWorth {
    Seen,
    /// A number that differs from the one before by as many bits.
    Number(u32),
    /// Nothing is known of it.
    New,
}

/// A change of a number by more bits than this is data, not time or counting.
const NUMBER_BITS: u32 = 41;

/// Measures `value`. What each run is worth is asked of `worth` first, with the position of the run.
pub(super) fn measure(value: &[u8], mut worth: impl FnMut(usize, &[u8]) -> RunWorth) -> ValueContent {
    let (scanned, rest) = value.split_at(value.len().min(SCANNED));
    let mut content = ValueContent::default();
    content.add_random(rest.len() as u64, rest.len() as u64, None);
    if memchr::memchr(b'%', scanned).is_none() {
        content.add_text(scanned, &mut worth);
        return content;
    }
    let (decoded, needless) = percent_decode(scanned);
    let data = std::str::from_utf8(&decoded).map_or(true, |text| text.chars().any(is_data));
    if data || needless >= NEEDLESS_ESCAPES {
        content.add_random(decoded.len() as u64, scanned.len() as u64, Some(Encoding::Percent));
    } else {
        content.add_text(&decoded, &mut worth);
    }
    content
}

impl ValueContent {
    fn add_text(&mut self, text: &[u8], worth: &mut impl FnMut(usize, &[u8]) -> RunWorth) {
        let runs = text.split(|byte| !is_run(*byte)).filter(|run| !run.is_empty());
        for (at, run) in runs.enumerate() {
            match worth(at, run) {
                RunWorth::Seen => {}
                RunWorth::Number(bits) if bits > NUMBER_BITS => self.random += u64::from(bits.div_ceil(8)),
                RunWorth::Number(bits) => self.text += u64::from(bits.div_ceil(8)),
                RunWorth::New => match classify(run) {
                    Some((encoding, bytes)) => self.add_random(bytes, run.len() as u64, encoding),
                    None => self.text += run.len() as u64,
                },
            }
        }
    }

    fn add_random(&mut self, bytes: u64, characters: u64, encoding: Option<Encoding>) {
        self.random += bytes;
        if characters > self.longest {
            self.longest = characters;
            self.encoding = encoding;
        }
    }
}

/// Returns what a run decodes to, if it looks random: its encoding, if it is one, and its bytes.
fn classify(run: &[u8]) -> Option<(Option<Encoding>, u64)> {
    let length = run.len();
    if length < SHORTEST_RUN {
        return None;
    }
    let count = |belongs: fn(&u8) -> bool| run.iter().filter(|byte| belongs(byte)).count();
    let (digits, lower, upper) =
        (count(u8::is_ascii_digit), count(u8::is_ascii_lowercase), count(u8::is_ascii_uppercase));
    let symbols = digits + lower + upper;
    let bytes = |bits: usize| (symbols * bits / 8) as u64;
    if digits == symbols {
        return (digits > NUMBER_DIGITS).then(|| (None, (digits * 5 / 12) as u64));
    }
    let one_case = lower == 0 || upper == 0;
    let hex = run.iter().all(|byte| byte.is_ascii_hexdigit() || *byte == b'-');
    if hex && one_case && digits * 4 >= symbols {
        return Some((Some(Encoding::Hex), bytes(4)));
    }
    // Words have vowels.
    let random = longest_without_vowel(run) >= VOWEL_DISTANCE;
    if one_case {
        let base32 = run.iter().all(|byte| matches!(byte, b'2'..=b'7' | b'=') || byte.is_ascii_alphabetic());
        let capitals = base32 && lower == 0 && length >= SHORTEST_CAPITALS;
        return (random || capitals).then(|| (base32.then_some(Encoding::Base32), bytes(5)));
    }
    // Small letters, capitals and digits seldom change places in words, and mostly do in what is random.
    let changes = run.windows(2).filter(|pair| changes_class(pair)).count();
    if !random && changes * 2 < symbols {
        return None;
    }
    let url = run.iter().any(|byte| matches!(byte, b'-' | b'_'));
    Some((Some(if url { Encoding::Base64Url } else { Encoding::Base64 }), bytes(6)))
}

fn is_run(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_' | b'=')
}

fn changes_class(pair: &[u8]) -> bool {
    let class = |byte: u8| match byte {
        b'0'..=b'9' => Some(0),
        b'a'..=b'z' => Some(1),
        b'A'..=b'Z' => Some(2),
        _ => None,
    };
    match pair {
        [left, right] => matches!((class(*left), class(*right)), (Some(left), Some(right)) if left != right),
        _ => false,
    }
}

fn longest_without_vowel(run: &[u8]) -> usize {
    let vowel = |byte: &u8| matches!(byte.to_ascii_lowercase(), b'a' | b'e' | b'i' | b'o' | b'u' | b'y');
    run.split(|byte| vowel(byte) || !byte.is_ascii_alphanumeric()).map(<[u8]>::len).max().unwrap_or(0)
}

/// Tells characters that text in a URL does not contain.
fn is_data(character: char) -> bool {
    character.is_control() && !matches!(character, '\t' | '\n' | '\r')
}

/// Returns the decoded value, and how many escapes were of letters and digits.
fn percent_decode(value: &[u8]) -> (Vec<u8>, usize) {
    let mut decoded = Vec::with_capacity(value.len());
    let (mut rest, mut needless) = (value, 0);
    while let Some((first, after)) = rest.split_first() {
        let escape = match (first, after) {
            (b'%', [high, low, ..]) => hex_digit(*high).zip(hex_digit(*low)),
            _ => None,
        };
        match escape {
            Some((high, low)) => {
                let byte = high << 4 | low;
                needless += usize::from(byte.is_ascii_alphanumeric());
                decoded.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                decoded.push(*first);
                rest = after;
            }
        }
    }
    (decoded, needless)
}

fn hex_digit(byte: u8) -> Option<u8> {
    (byte as char).to_digit(16).map(|digit| digit as u8)
}

/// Returns the number that a value is, starts with or ends with, if other characters separate it from letters, and
/// whether the value has nothing else.
pub(super) fn number(value: &[u8]) -> Option<(u64, bool)> {
    let leading = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if leading == value.len() {
        return Some((parse(value)?, true));
    }
    let trailing = value.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let (start, rest) = value.split_at_checked(leading)?;
    if leading > 0 && rest.first().is_some_and(|byte| !byte.is_ascii_alphanumeric()) {
        return Some((parse(start)?, false));
    }
    let (rest, end) = value.split_at_checked(value.len() - trailing)?;
    if trailing > 0 && rest.last().is_some_and(|byte| !byte.is_ascii_alphanumeric()) {
        return Some((parse(end)?, false));
    }
    None
}

fn parse(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > NUMBER_DIGITS {
        return None;
    }
    Some(digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_runs_are_told_from_text() {
        let encoding = |value: &str| {
            let content = measure(value.as_bytes(), |_, _| RunWorth::New);
            (content.random > 0).then_some(content.encoding)
        };
        for (value, expected) in [
            ("requests", None),
            ("serde_json-1.0.128.crate", None),
            ("internationalization", None),
            ("getElementsByTagName", None),
            ("python3-django-oauth2", None),
            ("x86_64-unknown-linux-gnu", None),
            ("20240131", None),
            ("1700000000000", None),
            ("manylinux_2_17_x86_64", None),
            ("application/vnd.github+json", None),
            ("Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36", None),
            ("application/vnd.docker.distribution.manifest.v2+json", None),
            ("how%20to%20parse%20json%20in%20rust", None),
            ("%E3%83%86%E3%82%B9%E3%83%88", None),
            ("https%3A%2F%2Fexample.com%2Fpage", None),
            ("0123456789abcdef0123456789abcdef", Some(Some(Encoding::Hex))),
            ("7f3a0b1c-8d9e-4f00-a1b2-c3d4e5f60718", Some(Some(Encoding::Hex))),
            ("JBSWY3DPEBLW64TMMQQQ====", Some(Some(Encoding::Base32))),
            ("jbswy3dpeblw64tmmqqq", Some(Some(Encoding::Base32))),
            ("SGVsbG8sIFdvcmxkISBIb3cgYXJl", Some(Some(Encoding::Base64))),
            ("eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9", Some(Some(Encoding::Base64))),
            ("aB3-dE6_gH9jK2mN5pQ8", Some(Some(Encoding::Base64Url))),
            ("%00%01%02%ff%fe", Some(Some(Encoding::Percent))),
            ("%68%65%6c%6c%6f%20%77%6f%72%6c%64", Some(Some(Encoding::Percent))),
            ("31415926535897932384626433", Some(None)),
        ] {
            assert_eq!(encoding(value), expected, "{value}");
        }
    }

    #[test]
    fn sizes_are_those_of_what_is_decoded() {
        let content = measure(&[b'0', b'a'].repeat(512), |_, _| RunWorth::New);
        assert_eq!((content.random, content.longest, content.text), (512, 1_024, 0));
        let content = measure(b"word another", |at, _| if at == 0 { RunWorth::Seen } else { RunWorth::New });
        assert_eq!((content.random, content.text), (0, 7));
        assert_eq!(measure(&vec![b' '; 20_000], |_, _| RunWorth::New).random, 20_000 - SCANNED as u64);
        assert_eq!(measure(b"%", |_, _| RunWorth::New), ValueContent::default());
    }

    #[test]
    fn numbers_are_found_at_the_ends() {
        for (value, expected) in [
            ("17", Some((17, true))),
            ("17.QQ", Some((17, false))),
            ("part-0017", Some((17, false))),
            ("v17", None),
            ("17th", None),
            ("", None),
            ("-", None),
            ("99999999999999999999", None),
            ("9999999999999999999", Some((9_999_999_999_999_999_999, true))),
        ] {
            assert_eq!(number(value.as_bytes()), expected, "{value}");
        }
    }
}
