//! What a new value is made of: how much of it looks random, and how much is text.

use std::borrow::Cow;

use super::super::Encoding;
use super::super::secrets::base64;

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
/// Runs of about two letters or digits, from which on they are data.
const SCATTERED_RUNS: usize = 8;
/// Characters of a value with much punctuation, from which on it is data.
const SHORTEST_MARKED: usize = 10;
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
    /// Characters of text that was not seen before.
    pub(super) text: u64,
    /// Bytes of the differences of numbers from those before them.
    pub(super) numbers: u64,
    /// Runs that were seen before: a choice among them is worth about a byte.
    pub(super) seen: u64,
}

impl ValueContent {
    pub(super) fn all(&self) -> u64 {
        self.random + self.text + self.numbers + self.seen
    }
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
    let (decoded, needless) = match memchr::memchr(b'%', scanned) {
        Some(_) => {
            let (decoded, needless) = percent_decode(scanned);
            (Cow::Owned(decoded), needless)
        }
        None => (Cow::Borrowed(scanned), 0),
    };
    let text = std::str::from_utf8(&decoded).ok().filter(|text| !text.chars().any(is_data));
    match text {
        Some(text) if needless < NEEDLESS_ESCAPES => content.add_text(text, &mut worth),
        _ => {
            let encoding = (decoded.len() < scanned.len()).then_some(Encoding::Percent);
            content.add_random(decoded.len() as u64, scanned.len() as u64, encoding);
        }
    }
    content
}

impl ValueContent {
    fn add_text(&mut self, text: &str, worth: &mut impl FnMut(usize, &[u8]) -> RunWorth) {
        if !text.is_ascii() {
            let wide = text.chars().filter(|character| !character.is_ascii());
            let (letters, symbols): (Vec<char>, Vec<char>) = wide.partition(|one| one.is_alphabetic());
            self.text += letters.len() as u64;
            self.random += symbols.len() as u64;
        }
        let text = text.as_bytes();
        if let Some(bytes) = scattered(text) {
            return self.add_random(bytes, text.len() as u64, None);
        }
        for (at, run) in runs(text).enumerate() {
            match worth(at, run) {
                RunWorth::Seen => self.seen += 1,
                RunWorth::Number(bits) if bits > NUMBER_BITS => self.random += u64::from(bits.div_ceil(8)),
                RunWorth::Number(bits) => self.numbers += u64::from(bits.div_ceil(8)),
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

/// Returns what text decodes to that is cut into runs too short for words: hexadecimal digits with dots between them, or
/// an alphabet that uses most of the punctuation, such as base85.
fn scattered(text: &[u8]) -> Option<u64> {
    let (mut runs, mut symbols, mut marks, mut letters, mut inside) = (0, 0, 0, 0, false);
    for byte in text {
        let run = byte.is_ascii_alphanumeric();
        runs += usize::from(run && !inside);
        inside = run;
        symbols += usize::from(run);
        marks += usize::from(byte.is_ascii_punctuation() && !b"-./:,;=&?~@_".contains(byte));
        letters += usize::from(byte.is_ascii_alphabetic());
    }
    if runs >= SCATTERED_RUNS && symbols <= runs * 2 && symbols * 2 >= text.len() && letters > 0 {
        return Some((symbols / 2) as u64);
    }
    let changes = text.windows(2).filter(|pair| changes_class(pair)).count();
    let mixed = changes * 4 >= symbols && symbols <= runs * 6;
    (text.len() >= SHORTEST_MARKED && marks * 8 >= text.len() && mixed).then(|| (text.len() * 4 / 5) as u64)
}

/// Tells whether a value is a JSON web token, perhaps behind the name of a scheme: a header with a known algorithm, an
/// object, and a signature of the length that the algorithm has.
pub(super) fn is_web_token(value: &[u8]) -> bool {
    let token = value.rsplit(|byte| *byte == b' ').next().unwrap_or_default();
    let parts: Vec<&[u8]> = token.split(|byte| *byte == b'.').collect();
    let [header, claims, signature] = parts.as_slice() else { return false };
    let object = |part: &[u8]| {
        let json = base64(part)?;
        let text = std::str::from_utf8(&json).ok()?.trim();
        (text.starts_with('{') && text.ends_with('}')).then(|| text.replace(' ', ""))
    };
    let (Some(header), Some(_), Some(signature)) = (object(header), object(claims), base64(signature)) else {
        return false;
    };
    let algorithm = header.split_once("\"alg\":\"").and_then(|(_, rest)| rest.split('"').next());
    match algorithm {
        Some("HS256") => signature.len() == 32,
        Some("HS384") => signature.len() == 48,
        Some("ES256" | "EdDSA" | "HS512") => signature.len() == 64,
        Some("ES384") => signature.len() == 96,
        Some("RS256" | "RS384" | "RS512" | "PS256" | "PS384" | "PS512") => {
            [256, 384, 512].contains(&signature.len())
        }
        _ => false,
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
    let letters = lower + upper;
    if letters <= 3 && digits >= letters * 4 && symbols <= NUMBER_DIGITS {
        return None; // a date and time
    }
    // Words have vowels.
    let random = longest_without_vowel(run) >= VOWEL_DISTANCE;
    let changes = run.windows(2).filter(|pair| changes_class(pair)).count();
    if one_case {
        // Digits stand at the ends of words, and between the letters of what is random.
        let random = random || changes >= 3 && letters >= digits;
        let base32 = run.iter().all(|byte| matches!(byte, b'2'..=b'7' | b'=') || byte.is_ascii_alphabetic());
        let capitals = base32 && lower == 0 && length >= SHORTEST_CAPITALS;
        return (random || capitals).then(|| (base32.then_some(Encoding::Base32), bytes(5)));
    }
    // Small letters, capitals and digits seldom change places in words, and mostly do in what is random.
    if !random && changes * 5 <= symbols * 2 {
        return None;
    }
    let url = run.iter().any(|byte| matches!(byte, b'-' | b'_'));
    Some((Some(if url { Encoding::Base64Url } else { Encoding::Base64 }), bytes(6)))
}

/// Splits text into runs of letters, digits and what encodings use besides.
pub(super) fn runs(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| !is_run(*byte)).filter(|run| !run.is_empty())
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

/// Tells characters that text in a URL does not contain: those that control, and those that nobody sees.
fn is_data(character: char) -> bool {
    let unseen = matches!(character, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(character, '\u{2060}'..='\u{206f}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}')
        || matches!(character, '\u{e000}'..='\u{f8ff}' | '\u{e0000}'..);
    unseen || character.is_control() && !matches!(character, '\t' | '\n' | '\r')
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
            ("20240501T120000Z", None),
            ("z7r2k4q6ma", Some(Some(Encoding::Base32))),
            ("f0.f1.f2.0a.1b.2c.3d.4e.5f", Some(None)),
            ("10.0.0.1", None),
            ("text/html;q=0.9,text/plain;q=0.8", None),
            ("@bU8V!4`1$($3aR~", Some(None)),
            (
                r#"pip/24.0 {"ci":null,"cpu":"x86_64","distro":{"id":"bookworm","libc":{"lib":"glibc"}}}"#,
                None,
            ),
            ("ok%E2%80%8B%E2%80%8C", Some(Some(Encoding::Percent))),
            ("%F0%9F%98%BB%F0%9F%98%AB", Some(None)),
        ] {
            assert_eq!(encoding(value), expected, "{value}");
        }
    }

    #[test]
    fn sizes_are_those_of_what_is_decoded() {
        let content = measure(&[b'0', b'a'].repeat(512), |_, _| RunWorth::New);
        assert_eq!((content.random, content.longest, content.text), (512, 1_024, 0));
        let content = measure(b"word another", |at, _| if at == 0 { RunWorth::Seen } else { RunWorth::New });
        assert_eq!((content.random, content.text, content.seen), (0, 7, 1));
        assert_eq!(measure(&vec![b' '; 20_000], |_, _| RunWorth::New).random, 20_000 - SCANNED as u64);
        assert_eq!(measure(b"%", |_, _| RunWorth::New), ValueContent::default());
    }

    #[test]
    fn web_tokens_are_told_by_their_structure() {
        let header = "eyJhbGciOiJIUzI1NiJ9"; // {"alg":"HS256"}
        for (value, expected) in [
            (format!("Bearer {header}.e30.{}", "A".repeat(43)), true),
            (format!("{header}.e30.{}", "A".repeat(43)), true),
            (format!("{header}.e30.{}", "A".repeat(342)), false),
            (format!("{header}.AAAA.{}", "A".repeat(43)), false),
            (format!("e30.e30.{}", "A".repeat(43)), false),
            (format!("{header}.e30"), false),
            (String::new(), false),
        ] {
            assert_eq!(is_web_token(value.as_bytes()), expected, "{value}");
        }
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
