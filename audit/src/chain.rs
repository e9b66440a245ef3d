//! The chain: each record carries its number, the hash of the previous record and its own hash.
//!
//! The hash is SHA-256 over the exact bytes of the line before `,"hash":`, which include the hash of
//! the previous record. Checking it needs neither a parser nor a canonical form.
//!
//! The chain alone does not stop an attacker who can write the files: they can change a record and
//! recompute every later hash. Signed notes of the chain head pin it, see `checkpoint`.

use sha2::{Digest, Sha256};

use crate::draft::Draft;

const PREVIOUS: &[u8] = br#","chain":{"previous":""#;
const HASH: &[u8] = br#"","hash":""#;
const END: &[u8] = br#""}}}}"#;
const SEQUENCE: &[u8] = br#","sequence":"#;
/// Length of a hash in hex digits.
const HEX: usize = 64;
/// Bytes at the end of a line, without its newline, that the hash does not cover. The hash does cover
/// the quote that closes `previous`.
const UNHASHED_BYTES: usize = HASH.len() - 1 + HEX + END.len();

/// A SHA-256 in lower-case hex, as in a line.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ChainHash([u8; HEX]);

impl ChainHash {
    /// The `previous` hash of the very first record.
    pub const NONE: Self = Self([b'0'; HEX]);

    /// Hashes `bytes`.
    pub fn digest(bytes: &[u8]) -> Self {
        Self::from_bytes(&Sha256::digest(bytes).into())
    }

    /// Encodes the 32 bytes of a hash.
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        let mut hex = [0; HEX];
        for (pair, byte) in hex.chunks_exact_mut(2).zip(bytes) {
            pair.copy_from_slice(&[hex_digit(byte >> 4), hex_digit(byte & 15)]);
        }
        Self(hex)
    }

    /// Parses 64 lower-case hex digits.
    pub fn parse(hex: &[u8]) -> Option<Self> {
        let hex: [u8; HEX] = hex.try_into().ok()?;
        hex.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')).then_some(Self(hex))
    }

    /// Returns the hex digits.
    pub fn as_str(&self) -> &str {
        str::from_utf8(&self.0).unwrap_or_default()
    }

    /// Returns the 32 bytes.
    pub fn bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(self.0.chunks_exact(2)) {
            *byte = pair.iter().fold(0, |sum, digit| sum << 4 | hex_value(*digit));
        }
        bytes
    }
}

impl std::fmt::Debug for ChainHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

fn hex_digit(nibble: u8) -> u8 {
    b"0123456789abcdef".get(usize::from(nibble)).copied().unwrap_or(b'0')
}

fn hex_value(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => digit.wrapping_sub(b'a').wrapping_add(10) & 15,
    }
}

/// The end of the chain: the number and the hash of the last record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainHead {
    /// Number of the last record; the first is 1.
    pub sequence: u64,
    /// Its hash.
    pub hash: ChainHash,
}

impl ChainHead {
    /// The head before the first record.
    pub const START: Self = Self { sequence: 0, hash: ChainHash::NONE };

    /// Seals `draft`: appends the finished line to `out` and advances the head to it.
    pub(crate) fn seal(&mut self, draft: &Draft, out: &mut Vec<u8>) {
        let start = out.len();
        let (before, after) = draft.bytes.split_at(draft.split);
        self.sequence += 1;
        out.extend_from_slice(before);
        out.extend_from_slice(SEQUENCE);
        out.extend_from_slice(self.sequence.to_string().as_bytes());
        out.extend_from_slice(after);
        out.extend_from_slice(PREVIOUS);
        out.extend_from_slice(&self.hash.0);
        out.push(b'"');
        self.hash = ChainHash::digest(out.get(start..).unwrap_or_default());
        out.extend_from_slice(HASH.get(1..).unwrap_or_default());
        out.extend_from_slice(&self.hash.0);
        out.extend_from_slice(END);
        out.push(b'\n');
    }
}

/// A line's place in the chain, and whether its own hash is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChainLink {
    pub(crate) previous: ChainHash,
    pub(crate) head: ChainHead,
    pub(crate) content: LineIntegrity,
}

/// Whether the bytes of a line match its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LineIntegrity {
    Changed,
    Intact,
}

impl ChainLink {
    /// Parses the link of a line without its newline; `None` if it is not a record of ours.
    pub(crate) fn parse(line: &[u8]) -> Option<Self> {
        let (covered, rest) = line.split_at_checked(line.len().checked_sub(UNHASHED_BYTES)?)?;
        let hash = rest.strip_prefix(HASH.get(1..)?)?.strip_suffix(END)?;
        let hash = ChainHash::parse(hash)?;
        let (members, previous) = covered.split_at_checked(covered.len().checked_sub(HEX + 1)?)?;
        let previous = ChainHash::parse(previous.strip_suffix(b"\"")?)?;
        let members = members.strip_suffix(PREVIOUS)?;
        let sequence = find_sequence(members)?;
        let content =
            if ChainHash::digest(covered) == hash { LineIntegrity::Intact } else { LineIntegrity::Changed };
        Some(Self { previous, head: ChainHead { sequence, hash }, content })
    }
}

/// Finds the number in `metadata`. No string can contain the key, because its quotes would be escaped.
fn find_sequence(members: &[u8]) -> Option<u64> {
    let at = memchr::memmem::rfind(members, SEQUENCE)? + SEQUENCE.len();
    let rest = members.get(at..)?;
    let digits = rest.get(..rest.iter().position(|byte| !byte.is_ascii_digit())?)?;
    let canonical = digits.first().is_some_and(|first| *first != b'0');
    str::from_utf8(digits).ok()?.parse().ok().filter(|_| canonical)
}
