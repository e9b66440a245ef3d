//! Finds pieces of canaries in what leaves.
//!
//! Six consecutive characters contain four that begin at a multiple of three, wherever they stand. So only every third
//! group of four bytes is looked up in a filter. Where it passes, the bytes around it are compared with the canaries.

use std::hash::Hash;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::{Canary, CanaryError, CanaryShape, MAX_CANARIES, MIN_COVERED, MIN_PIECE, MIN_SENTENCE_PIECE};
use crate::signals::{Signal, ViewMatcher};

/// How many bytes are looked up together.
const GROUP: usize = 4;

/// How many bytes the groups that are looked up are apart.
const STRIDE: usize = MIN_PIECE - GROUP + 1;

/// How many bytes at the end of a piece of content may continue in the next.
const TAIL: usize = MIN_SENTENCE_PIECE - 1;

/// Bits of filter per group, so that at most one of 64 unknown groups passes in a set of usual size.
const FILTER_BITS: usize = 64;

/// The filter's bits at least and at most: 1 KB, and 32 KB, which stay in the first cache.
const MIN_FILTER_BITS: usize = 1 << 13;
const MAX_FILTER_BITS: usize = 1 << 18;

/// Makes ASCII letters lower case, and mixes up a few other characters, which the filter may.
const FOLD: u128 = u128::from_ne_bytes([0x20; 16]);

type FixedMap<K, V> = HashMap<K, V, foldhash::fast::FixedState>;

/// Canaries, compiled for a [`CanaryScanner`].
#[derive(Debug)]
pub struct CanarySet {
    canaries: Vec<Canary>,
    pub(super) values: Vec<Value>,
    filter: Box<[u64]>,
    shift: u32,
    /// The places of each group: value and position.
    groups: FixedMap<u32, Vec<(u16, u8)>>,
}

/// The random part of one value, in lower case.
#[derive(Debug)]
pub(super) struct Value {
    pub(super) canary: usize,
    pub(super) text: Box<[u8]>,
    min_piece: usize,
    /// How many characters raise an alarm.
    pub(super) threshold: usize,
}

/// Looks for pieces of canaries in one view after the other, and keeps what it found for a [`super::CanaryTracker`].
///
/// As a [`ViewMatcher`] it reports nothing itself: other requests count, so the tracker decides. The caller passes the
/// scanner to it while [`CanaryScanner::has_pieces`], which is rarely.
#[derive(Debug)]
pub struct CanaryScanner {
    set: Arc<CanarySet>,
    /// For each value which of its characters were seen.
    covered: FixedMap<u16, u128>,
    tail: [u8; TAIL],
    tail_length: usize,
}

impl CanarySet {
    /// Compiles canaries.
    ///
    /// # Errors
    ///
    /// Returns [`CanaryError`] if there are more than [`MAX_CANARIES`], or two have the same name or value.
    pub fn new(canaries: Vec<Canary>) -> Result<Self, CanaryError> {
        if canaries.len() > MAX_CANARIES {
            return Err(CanaryError::TooMany);
        }
        if !all_differ(canaries.iter().map(Canary::name)) {
            return Err(CanaryError::Duplicate);
        }
        let mut values = Vec::new();
        for (at, canary) in canaries.iter().enumerate() {
            for text in canary.random_parts() {
                values.push(Value::new(at, canary.shape(), text));
            }
        }
        if !all_differ(values.iter().map(|value| &value.text)) {
            return Err(CanaryError::Duplicate);
        }
        let mut groups: FixedMap<u32, Vec<(u16, u8)>> = HashMap::default();
        for (at, value) in (0_u16..).zip(&values) {
            for (position, group) in (0_u8..).zip(value.text.array_windows::<GROUP>()) {
                // The syllables of a sentence occur in other text; where two words meet is rare. Each piece of a
                // sentence contains three consecutive groups with a hyphen, so one is looked up.
                if value.min_piece == MIN_PIECE || group.contains(&b'-') {
                    groups.entry(fold_group(*group)).or_default().push((at, position));
                }
            }
        }
        let bits = (groups.len() * FILTER_BITS).next_power_of_two().clamp(MIN_FILTER_BITS, MAX_FILTER_BITS);
        let shift = u32::BITS - bits.trailing_zeros();
        let mut filter = vec![0_u64; bits / 64].into_boxed_slice();
        for group in groups.keys() {
            let bit = filter_bit(*group, shift);
            if let Some(word) = filter.get_mut((bit >> 6) as usize) {
                *word |= 1 << (bit & 63);
            }
        }
        Ok(CanarySet { canaries, values, filter, shift, groups })
    }

    pub fn canaries(&self) -> &[Canary] {
        &self.canaries
    }

    /// Returns each value with its canary, for matchers of whole values. Names in DNS may come in either case.
    pub fn exact_values(&self) -> impl Iterator<Item = (&Canary, &str)> {
        self.canaries
            .iter()
            .flat_map(|canary| canary.values().iter().map(move |value| (canary, value.as_str())))
    }

    #[inline(always)]
    fn may_contain(&self, group: u32) -> bool {
        let bit = filter_bit(group, self.shift);
        self.filter.get((bit >> 6) as usize).is_some_and(|word| word >> (bit & 63) & 1 == 1)
    }

    /// Finds the pieces in `bytes` and marks their characters.
    fn scan(&self, bytes: &[u8], covered: &mut FixedMap<u16, u128>) {
        const BLOCK: usize = 4 * STRIDE;
        let mut at = 0;
        let mut rest = bytes;
        while let Some(block) = rest.first_chunk::<16>() {
            let folded = u128::from_le_bytes(*block) | FOLD;
            let groups = [folded as u32, (folded >> 24) as u32, (folded >> 48) as u32, (folded >> 72) as u32];
            // One branch for four groups: hardly any passes.
            if groups.iter().fold(false, |any, group| any | self.may_contain(*group)) {
                for (step, group) in groups.into_iter().enumerate() {
                    if self.may_contain(group) {
                        self.look_up(bytes, at + step * STRIDE, group, covered);
                    }
                }
            }
            at += BLOCK;
            rest = rest.get(BLOCK..).unwrap_or_default();
        }
        while let Some(group) = rest.first_chunk::<GROUP>() {
            let group = fold_group(*group);
            if self.may_contain(group) {
                self.look_up(bytes, at, group, covered);
            }
            at += STRIDE;
            rest = rest.get(STRIDE..).unwrap_or_default();
        }
    }

    #[cold]
    #[inline(never)]
    fn look_up(&self, bytes: &[u8], at: usize, group: u32, covered: &mut FixedMap<u16, u128>) {
        for (index, position) in self.groups.get(&group).into_iter().flatten() {
            let Some(value) = self.values.get(usize::from(*index)) else { continue };
            let Some((start, end)) = value.extend(bytes, at, usize::from(*position)) else { continue };
            let characters = (1_u128 << (end - start)) - 1;
            *covered.entry(*index).or_default() |= characters << start;
        }
    }
}

impl Value {
    fn new(canary: usize, shape: CanaryShape, text: &str) -> Self {
        let min_piece = match shape {
            CanaryShape::Sentence => MIN_SENTENCE_PIECE,
            CanaryShape::AwsKey | CanaryShape::DnsName | CanaryShape::GithubToken | CanaryShape::Token => {
                MIN_PIECE
            }
        };
        let threshold = (text.len() * 3).div_ceil(4).max(MIN_COVERED).min(text.len());
        Value { canary, text: text.to_ascii_lowercase().into_bytes().into(), min_piece, threshold }
    }

    /// Returns the characters of the value that stand around `at`, where `position` is, if they are a piece.
    fn extend(&self, bytes: &[u8], at: usize, position: usize) -> Option<(usize, usize)> {
        let same = |pair: &(&u8, &u8)| pair.0.to_ascii_lowercase() == *pair.1;
        let (before, after) = bytes.split_at_checked(at)?;
        let (text_before, text_after) = self.text.split_at_checked(position)?;
        let right = after.iter().zip(text_after).take_while(same).count();
        let left = before.iter().rev().zip(text_before.iter().rev()).take_while(same).count();
        (right >= GROUP && left + right >= self.min_piece).then_some((position - left, position + right))
    }
}

impl CanaryScanner {
    pub fn new(set: Arc<CanarySet>) -> Self {
        CanaryScanner { set, covered: HashMap::default(), tail: [0; TAIL], tail_length: 0 }
    }

    /// Tells whether there are pieces that the tracker has not seen.
    pub fn has_pieces(&self) -> bool {
        !self.covered.is_empty()
    }

    pub(super) fn set(&self) -> &Arc<CanarySet> {
        &self.set
    }

    pub(super) fn take_pieces(&mut self) -> impl Iterator<Item = (u16, u128)> {
        self.covered.drain()
    }

    /// Takes the next bytes of the view.
    pub fn scan(&mut self, bytes: &[u8]) {
        if self.set.values.is_empty() || bytes.is_empty() {
            return;
        }
        if self.tail_length > 0 {
            // A piece that began in the bytes before: all its characters that are not in one of the two stretches
            // alone are in these.
            let mut seam = [0; 2 * TAIL];
            let mut length = 0;
            let tail = self.tail.iter().take(self.tail_length);
            for (slot, byte) in seam.iter_mut().zip(tail.chain(bytes.iter().take(TAIL))) {
                *slot = *byte;
                length += 1;
            }
            self.set.scan(seam.get(..length).unwrap_or_default(), &mut self.covered);
        }
        self.set.scan(bytes, &mut self.covered);
        self.keep_tail(bytes);
    }

    fn keep_tail(&mut self, bytes: &[u8]) {
        let kept = TAIL.saturating_sub(bytes.len()).min(self.tail_length);
        self.tail.copy_within(self.tail_length - kept..self.tail_length, 0);
        let added = bytes.len().min(TAIL);
        for (slot, byte) in self.tail.iter_mut().skip(kept).zip(bytes.iter().skip(bytes.len() - added)) {
            *slot = *byte;
        }
        self.tail_length = kept + added;
    }
}

impl ViewMatcher for CanaryScanner {
    fn feed(&mut self, bytes: &[u8], _found: &mut Vec<Signal>) {
        self.scan(bytes);
    }

    fn finish(&mut self, _found: &mut Vec<Signal>) {
        self.tail_length = 0;
    }

    fn undecided(&self) -> usize {
        self.tail_length
    }

    /// None: whole values are matched elsewhere, and the tail is kept whatever it is.
    fn begun(&self) -> usize {
        0
    }
}

fn all_differ<T: Eq + Hash>(items: impl Iterator<Item = T>) -> bool {
    let mut seen: HashSet<T, foldhash::fast::FixedState> = HashSet::default();
    items.into_iter().all(|item| seen.insert(item))
}

fn fold_group(group: [u8; GROUP]) -> u32 {
    u32::from_le_bytes(group) | 0x2020_2020
}

#[inline(always)]
fn filter_bit(group: u32, shift: u32) -> u32 {
    group.wrapping_mul(0x9e37_79b1) >> shift
}
