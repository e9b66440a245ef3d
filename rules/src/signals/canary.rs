//! Canaries: values that no honest program sends.
//!
//! A canary looks like a key, a token, a sentence or a name, and lies where only a thief or a program that goes
//! through everything finds it. [`make`] produces one, [`CanarySet::exact_values`] is for matchers of whole values, and
//! a [`CanaryTracker`] recognises a canary that leaves in pieces, over the fields of a request or over several
//! requests, in any order, in either case.
//!
//! # Pieces
//!
//! A piece is [`MIN_PIECE`] or more consecutive characters of a canary ([`MIN_SENTENCE_PIECE`] of a sentence, because
//! syllables occur by chance). The tracker notes which characters of a canary left within its window of time and
//! raises the alarm when they are three quarters of it, and at least [`MIN_COVERED`]. Fixed beginnings (`AKIA`,
//! `ghp_`) do not count. Shorter pieces are not seen: whoever sends one to five characters per request passes here, and
//! is bounded by the account of [`super::bits`].
//!
//! # False alarms
//!
//! A given piece of six characters is in 10 MB of random base64 (1,000 requests of 10 KB within one window) with a
//! chance of about 1 in 180; prose, JSON and code have far fewer. An alarm needs three to five pieces that complement
//! each other. In those 10 MB the chance is below 1 in 1,000,000 for one canary of any shape, and below 1 in 10,000
//! for 100 canaries.

mod scan;
#[cfg(test)]
mod tests;
mod tracker;

use std::fmt;
use std::str::FromStr;

pub use scan::{CanaryScanner, CanarySet};
pub use tracker::CanaryTracker;

/// Most canaries in a set.
pub const MAX_CANARIES: usize = 1024;

/// The fewest consecutive characters that count as a piece.
pub const MIN_PIECE: usize = 6;

/// The fewest consecutive characters that count as a piece of a sentence.
pub const MIN_SENTENCE_PIECE: usize = 12;

/// The fewest characters that raise an alarm, or all of a shorter value: more than two pieces by chance.
pub const MIN_COVERED: usize = 18;

/// The random bytes that [`make`] needs.
pub const RANDOM_BYTES: usize = 64;

/// Longest name of a canary.
pub const MAX_CANARY_NAME: usize = 63;

const BASE62: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const BASE32: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
const CONSONANTS: &[u8; 16] = b"bdfghjklmnprstvz";
const VOWELS: &[u8; 5] = b"aeiou";

const AWS_PREFIX: &str = "AKIA";
const AWS_RANDOM: usize = 16;
const AWS_SECRET: usize = 40;
const GITHUB_PREFIX: &str = "ghp_";
const GITHUB_RANDOM: usize = 30;
const GITHUB_CHECKSUM: usize = 6;
const TOKEN: usize = 40;
const WORDS: usize = 5;
const WORD: usize = 7;
const LABEL: usize = 26;

/// What a canary looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CanaryShape {
    /// An AWS access key: id and secret.
    AwsKey,
    /// A name of a host.
    DnsName,
    /// A personal access token of GitHub.
    GithubToken,
    /// A sentence with a secret phrase.
    Sentence,
    /// Letters and digits.
    Token,
}

/// A value that no honest program sends.
#[derive(Clone, PartialEq, Eq)]
pub struct Canary {
    name: String,
    shape: CanaryShape,
    values: Vec<String>,
}

/// Why something is not a canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CanaryError {
    #[error("two canaries have the same name or value")]
    Duplicate,
    #[error("a name has 1 to {MAX_CANARY_NAME} letters, digits, `.`, `_` and `-`")]
    Name,
    #[error("{found} random bytes are not enough; {RANDOM_BYTES} are needed")]
    Random { found: usize },
    #[error("the shapes are aws-key, dns-name, github-token, sentence and token")]
    Shape,
    #[error("there are more than {MAX_CANARIES} canaries")]
    TooMany,
    #[error("the value does not have the structure of a canary of this shape")]
    Value,
}

/// Makes a canary from random bytes, of which the first [`RANDOM_BYTES`] are used. Structure and checksums are those
/// of real values.
///
/// # Errors
///
/// Returns [`CanaryError`] if the name is not a short plain word or there are too few random bytes.
pub fn make(shape: CanaryShape, name: &str, random: &[u8]) -> Result<Canary, CanaryError> {
    let Some(random) = random.first_chunk::<RANDOM_BYTES>() else {
        return Err(CanaryError::Random { found: random.len() });
    };
    let values = match shape {
        CanaryShape::AwsKey => {
            let (id, rest) = random.split_at(10);
            vec![aws_key_id(id), pick(rest, AWS_SECRET, BASE64)]
        }
        CanaryShape::DnsName => vec![pick(random, LABEL, BASE32).to_ascii_lowercase()],
        CanaryShape::GithubToken => {
            let token = pick(random, GITHUB_RANDOM, BASE62);
            vec![format!("{GITHUB_PREFIX}{token}{}", github_checksum(&token))]
        }
        CanaryShape::Sentence => {
            let words: Vec<String> = random.chunks(WORD).take(WORDS).map(word).collect();
            vec![words.join("-")]
        }
        CanaryShape::Token => vec![pick(random, TOKEN, BASE62)],
    };
    Canary::from_values(shape, name, values)
}

impl Canary {
    /// Reads a canary that was kept as its [`Canary::values`].
    ///
    /// # Errors
    ///
    /// Returns [`CanaryError`] if the name is not a short plain word or the values do not have the shape.
    pub fn from_values(shape: CanaryShape, name: &str, values: Vec<String>) -> Result<Self, CanaryError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > MAX_CANARY_NAME || !name.bytes().all(plain) {
            return Err(CanaryError::Name);
        }
        match is_well_formed(shape, &values) {
            true => Ok(Canary { name: name.to_owned(), shape, values }),
            false => Err(CanaryError::Value),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn shape(&self) -> CanaryShape {
        self.shape
    }

    /// Returns what no honest program sends, each of it an alarm: the id and the secret of a key, the phrase of a
    /// sentence, the first label of a name.
    pub fn values(&self) -> &[String] {
        &self.values
    }

    /// Returns the text to put where a thief finds it.
    pub fn text(&self) -> String {
        match (self.shape, self.values.as_slice()) {
            (CanaryShape::AwsKey, [id, secret]) => {
                format!("aws_access_key_id = {id}\naws_secret_access_key = {secret}")
            }
            (CanaryShape::DnsName, [label]) => format!("{label}.internal"),
            (CanaryShape::Sentence, [phrase]) => format!("The recovery phrase of the archive is {phrase}."),
            (_, values) => values.join("\n"),
        }
    }

    /// Returns the part of each value that is random.
    fn random_parts(&self) -> impl Iterator<Item = &str> {
        let prefix = match self.shape {
            CanaryShape::AwsKey => AWS_PREFIX,
            CanaryShape::GithubToken => GITHUB_PREFIX,
            CanaryShape::DnsName | CanaryShape::Sentence | CanaryShape::Token => "",
        };
        let first = self.values.first().and_then(|value| value.strip_prefix(prefix));
        first.into_iter().chain(self.values.iter().skip(1).map(String::as_str))
    }
}

impl fmt::Debug for Canary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Canary").field("name", &self.name).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl CanaryShape {
    pub const ALL: [CanaryShape; 5] = [
        CanaryShape::AwsKey,
        CanaryShape::DnsName,
        CanaryShape::GithubToken,
        CanaryShape::Sentence,
        CanaryShape::Token,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            CanaryShape::AwsKey => "aws-key",
            CanaryShape::DnsName => "dns-name",
            CanaryShape::GithubToken => "github-token",
            CanaryShape::Sentence => "sentence",
            CanaryShape::Token => "token",
        }
    }
}

impl fmt::Display for CanaryShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for CanaryShape {
    type Err = CanaryError;

    fn from_str(text: &str) -> Result<Self, CanaryError> {
        CanaryShape::ALL.into_iter().find(|shape| shape.as_str() == text).ok_or(CanaryError::Shape)
    }
}

/// Returns the id of an AWS access key. Its first 47 bits are, after one that is set since 2019, the number of an account
/// with twelve digits and seven more bits.
fn aws_key_id(random: &[u8]) -> String {
    let bits = random.iter().take(10).fold(0_u128, |bits, byte| bits << 8 | u128::from(*byte));
    let account = (bits >> 39 & ((1 << 40) - 1)) % 1_000_000_000_000;
    let bits = 1 << 79 | account << 39 | bits & ((1 << 39) - 1);
    let digits = (0..AWS_RANDOM).rev().map(|at| char::from(BASE32[(bits >> (5 * at) & 31) as usize]));
    AWS_PREFIX.chars().chain(digits).collect()
}

/// Returns the end of a GitHub token: the CRC-32 of the random part in base 62.
fn github_checksum(random: &str) -> String {
    let mut rest = crc32(random.as_bytes());
    let mut digits = [b'0'; GITHUB_CHECKSUM];
    for digit in digits.iter_mut().rev() {
        *digit = BASE62[(rest % 62) as usize];
        rest /= 62;
    }
    digits.map(char::from).into_iter().collect()
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| (crc >> 1) ^ ((crc & 1) * 0xedb8_8320);
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

fn word(random: &[u8]) -> String {
    let letters = random.iter().enumerate().map(|(at, byte)| match at % 2 {
        0 => CONSONANTS[usize::from(*byte) % CONSONANTS.len()],
        _ => VOWELS[usize::from(*byte) % VOWELS.len()],
    });
    letters.map(char::from).collect()
}

fn pick(random: &[u8], length: usize, alphabet: &[u8]) -> String {
    let letters =
        random.iter().take(length).filter_map(|byte| alphabet.get(usize::from(*byte) % alphabet.len()));
    letters.map(|byte| char::from(*byte)).collect()
}

fn is_well_formed(shape: CanaryShape, values: &[String]) -> bool {
    let is_in = |text: &str, length: usize, alphabet: &[u8]| {
        text.len() == length && text.bytes().all(|byte| alphabet.contains(&byte))
    };
    match (shape, values) {
        (CanaryShape::AwsKey, [id, secret]) => {
            let is_id = |random| is_in(random, AWS_RANDOM, BASE32);
            id.strip_prefix(AWS_PREFIX).is_some_and(is_id) && is_in(secret, AWS_SECRET, BASE64)
        }
        (CanaryShape::DnsName, [label]) => is_in(label, LABEL, b"abcdefghijklmnopqrstuvwxyz234567"),
        (CanaryShape::GithubToken, [token]) => {
            let token =
                token.strip_prefix(GITHUB_PREFIX).and_then(|token| token.split_at_checked(GITHUB_RANDOM));
            token.is_some_and(|(random, checksum)| {
                is_in(random, GITHUB_RANDOM, BASE62) && checksum == github_checksum(random)
            })
        }
        (CanaryShape::Sentence, [phrase]) => {
            let is_word =
                |word: &str| word.len() == WORD && word.bytes().all(|byte| byte.is_ascii_lowercase());
            phrase.split('-').count() == WORDS && phrase.split('-').all(is_word)
        }
        (CanaryShape::Token, [token]) => is_in(token, TOKEN, BASE62),
        (_, _) => false,
    }
}
