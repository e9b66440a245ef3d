//! Normalises text and rolls a keyed hash over it.

use std::fmt;
use std::sync::{Arc, LazyLock};

use sha2::{Digest, Sha256};

use super::GRAM;

/// How many bytes are normalised before their hashes are computed.
const CHUNK: usize = 1024;

/// The longest UTF-8 sequence.
const MAX_SEQUENCE: usize = 4;

/// Spreads the hash over the bits that filter and table use.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The secret of fingerprints: without it, they say nothing about the text.
#[derive(Clone)]
pub struct FlowKey(Arc<KeyTables>);

struct KeyTables {
    /// The value of each ASCII byte; 0 is dropped, and both cases have one value.
    ascii: [u64; 256],
    others: [u64; 3],
    check: u64,
}

impl FlowKey {
    /// Derives the key from a secret that the caller keeps as long as it keeps tables.
    pub fn new(secret: &[u8; 32]) -> Self {
        let derive = |at: u8| {
            let digest = Sha256::new().chain_update(b"sandbar flow").chain_update(secret).chain_update([at]);
            digest.finalize().iter().take(8).fold(0, |value, byte| value << 8 | u64::from(*byte)) | 1
        };
        let mut ascii = [0; 256];
        for (byte, value) in (0..128_u8).zip(ascii.iter_mut()) {
            if byte.is_ascii_alphanumeric() {
                *value = derive(byte.to_ascii_lowercase());
            }
        }
        FlowKey(Arc::new(KeyTables {
            ascii,
            others: [derive(0x80), derive(0x81), derive(0x82)],
            check: derive(0x83),
        }))
    }

    /// Returns a number that tells whether a stored table was made with this key.
    pub(super) fn check(&self) -> u64 {
        self.0.check
    }

    /// Returns the value of a character, or 0 if it is dropped.
    fn value(&self, character: char) -> u64 {
        let folded = match FOLDED.get(character as usize) {
            Some(folded) => u32::from(*folded),
            None => fold(character),
        };
        match (folded, u8::try_from(folded)) {
            (0, _) => 0,
            (_, Ok(byte)) if byte.is_ascii() => self.0.ascii[usize::from(byte)],
            _ => {
                let [add, first, second] = self.0.others;
                let value = (u64::from(folded) ^ add).wrapping_mul(first);
                (value ^ value >> 32).wrapping_mul(second).rotate_left(32) | 1
            }
        }
    }
}

impl fmt::Debug for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FlowKey(..)")
    }
}

/// The normalised form of each character of the Basic Multilingual Plane. Unicode's own tables are searched, which
/// takes ten times as long as reading this.
static FOLDED: LazyLock<Box<[u16]>> = LazyLock::new(|| {
    let folded = |code| char::from_u32(code).map_or(0, fold);
    (0..=0xffff).map(|code| u16::try_from(folded(code)).unwrap_or_default()).collect()
});

/// Returns the normalised form of a character, or 0 if it is dropped.
fn fold(character: char) -> u32 {
    let character = match character {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(character as u32 - 0xfee0).unwrap_or(character),
        'ς' => 'σ',
        _ => character,
    };
    match character.is_alphanumeric() {
        true => character.to_lowercase().next().unwrap_or(character) as u32,
        false => 0,
    }
}

/// The last characters of a text that is fed in pieces, and the hash of the last [`GRAM`] of them.
#[derive(Clone, Debug)]
pub(super) struct Window {
    key: FlowKey,
    /// The values of the last [`GRAM`] characters, then those of the chunk at hand.
    values: Box<[u64]>,
    hash: u64,
    /// How many characters the text has so far.
    characters: u64,
    /// The beginning of a UTF-8 sequence that the next piece continues.
    pending: [u8; MAX_SEQUENCE],
    pending_length: usize,
}

impl Window {
    pub(super) fn new(key: &FlowKey) -> Self {
        Window {
            key: key.clone(),
            values: vec![0; GRAM + CHUNK + 1].into(),
            hash: 0,
            characters: 0,
            pending: [0; MAX_SEQUENCE],
            pending_length: 0,
        }
    }

    pub(super) fn clear(&mut self) {
        self.values[..GRAM].fill(0);
        (self.hash, self.characters, self.pending_length) = (0, 0, 0);
    }

    /// Takes the next bytes of the text. Calls `each` for each character with the number of characters so far, the
    /// hash of the last [`GRAM`] and their values.
    pub(super) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(u64, u64, &[u64; GRAM])) {
        for chunk in bytes.chunks(CHUNK) {
            let added = self.normalize(chunk);
            for window in self.values.array_windows::<{ GRAM + 1 }>().take(added) {
                let ([outgoing, gram @ ..], [.., incoming]) = (window, window);
                self.hash = roll(self.hash, *incoming, *outgoing);
                self.characters += 1;
                each(self.characters, spread(self.hash), gram);
            }
            self.values.copy_within(added..added + GRAM, 0);
        }
    }

    /// Takes the next bytes of the text. Calls `each` at least for every second character, with the number of
    /// characters so far and the hash of the last [`GRAM`].
    pub(super) fn feed_alternate(&mut self, bytes: &[u8], mut each: impl FnMut(u64, u64)) {
        for chunk in bytes.chunks(CHUNK) {
            let added = self.normalize(chunk);
            let (outgoing, incoming) = (self.values.get(..added), self.values.get(GRAM..GRAM + added));
            let (outgoing, last_outgoing) = outgoing.unwrap_or_default().as_chunks::<2>();
            let (incoming, last_incoming) = incoming.unwrap_or_default().as_chunks::<2>();
            let (mut hash, mut characters) = (self.hash, self.characters);
            for ([first, second], [first_out, second_out]) in incoming.iter().zip(outgoing) {
                // Two steps at once: what enters and leaves is combined beside the chain of hashes.
                hash = hash.rotate_left(2) ^ roll(roll(0, *first, *first_out), *second, *second_out);
                characters += 2;
                each(characters, spread(hash));
            }
            if let ([incoming], [outgoing]) = (last_incoming, last_outgoing) {
                hash = roll(hash, *incoming, *outgoing);
                characters += 1;
                each(characters, spread(hash));
            }
            (self.hash, self.characters) = (hash, characters);
            self.values.copy_within(added..added + GRAM, 0);
        }
    }

    /// Writes the values of the characters of `chunk` behind the last ones and returns their number.
    fn normalize(&mut self, chunk: &[u8]) -> usize {
        let mut rest = chunk;
        let mut added = 0;
        let ascii = &self.key.0.ascii;
        let Some(out) = self.values.get_mut(GRAM..) else { return 0 };
        let mut push = |value: u64| {
            // Written always and kept if it counts: a branch here would be mispredicted at every word's end.
            if let Some(slot) = out.get_mut(added) {
                *slot = value;
                added += usize::from(value != 0);
            }
        };
        while self.pending_length > 0 {
            let [first, after @ ..] = rest else { return added };
            if let Some(slot) = self.pending.get_mut(self.pending_length) {
                *slot = *first;
            }
            match Sequence::read(self.pending.get(..=self.pending_length).unwrap_or_default()) {
                Sequence::Character(character, _) => push(self.key.value(character)),
                Sequence::Incomplete => {
                    (rest, self.pending_length) = (after, self.pending_length + 1);
                    continue;
                }
                Sequence::Invalid => {
                    self.pending_length = 0;
                    break;
                }
            }
            (rest, self.pending_length) = (after, 0);
        }
        loop {
            let mut at = 0;
            for byte in rest {
                if !byte.is_ascii() {
                    break;
                }
                push(ascii[usize::from(*byte)]);
                at += 1;
            }
            rest = rest.get(at..).unwrap_or_default();
            if rest.is_empty() {
                return added;
            }
            let length = match Sequence::read(rest) {
                Sequence::Character(character, length) => {
                    push(self.key.value(character));
                    length
                }
                Sequence::Invalid => 1,
                Sequence::Incomplete => {
                    for (slot, byte) in self.pending.iter_mut().zip(rest) {
                        *slot = *byte;
                    }
                    self.pending_length = rest.len().min(MAX_SEQUENCE - 1);
                    return added;
                }
            };
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

/// Returns the hash after one character entered and one left.
#[inline(always)]
fn roll(hash: u64, incoming: u64, outgoing: u64) -> u64 {
    hash.rotate_left(1) ^ incoming ^ outgoing.rotate_left(GRAM as u32)
}

/// Returns the hash as the table keeps it, never 0.
#[inline(always)]
fn spread(hash: u64) -> u64 {
    hash.wrapping_mul(SPREAD).max(1)
}

/// What stands at the beginning of some bytes, of which the first is not ASCII.
enum Sequence {
    /// A character and the number of its bytes.
    Character(char, usize),
    /// The bytes end before the character does.
    Incomplete,
    Invalid,
}

impl Sequence {
    fn read(bytes: &[u8]) -> Self {
        let (length, smallest, first) = match bytes.first() {
            Some(byte @ 0xc2..=0xdf) => (2, 0x80, byte & 0x1f),
            Some(byte @ 0xe0..=0xef) => (3, 0x800, byte & 0x0f),
            Some(byte @ 0xf0..=0xf4) => (4, 0x1_0000, byte & 0x07),
            Some(_) | None => return Sequence::Invalid,
        };
        let mut code = u32::from(first);
        for at in 1..length {
            match bytes.get(at) {
                None => return Sequence::Incomplete,
                Some(byte @ 0x80..=0xbf) => code = code << 6 | u32::from(byte & 0x3f),
                Some(_) => return Sequence::Invalid,
            }
        }
        match char::from_u32(code) {
            Some(character) if code >= smallest => Sequence::Character(character, length),
            Some(_) | None => Sequence::Invalid,
        }
    }
}
