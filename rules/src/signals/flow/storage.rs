//! Hash table of fingerprints that one owner extends while others read it, behind a filter that fits into the cache.
//!
//! Entries are only added, and their times only renewed, until the owner copies what is left into new storage. So
//! readers need no lock and see a consistent table: an entry's label and time are written before its hash. What a
//! reader finds may be newer than the snapshot it holds, never older.

use std::sync::atomic::{AtomicU64, Ordering};

use super::MAX_BANKS_PER_GRAM;

/// Bits of filter per fingerprint when the storage is full. Three of them are set for each, all in one word, so one
/// of about 200 unknown grams passes.
const FILTER_BITS: usize = 16;

/// Fingerprints in the smallest storage.
pub(super) const MIN_CAPACITY: usize = 1024;

/// One fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) hash: u64,
    /// The index of the bank's label.
    pub(super) bank: u16,
    /// When the text was recalled last, in seconds.
    pub(super) time: u32,
}

#[derive(Debug)]
pub(super) struct Storage {
    capacity: usize,
    filter: Box<[AtomicU64]>,
    filter_shift: u32,
    /// 0 where a slot is free. At most three quarters are taken.
    hashes: Box<[AtomicU64]>,
    /// Label and time of the entry in the same slot of `hashes`.
    entries: Box<[AtomicU64]>,
}

/// What became of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Insertion {
    Added,
    Renewed,
}

impl Storage {
    pub(super) fn new(capacity: usize) -> Self {
        let zeros = |length| (0..length).map(|_| AtomicU64::new(0)).collect::<Box<[_]>>();
        let capacity = capacity.max(MIN_CAPACITY);
        let (slots, words) = Self::lengths(capacity);
        let filter_shift = 64 - words.trailing_zeros();
        Storage { capacity, filter: zeros(words), filter_shift, hashes: zeros(slots), entries: zeros(slots) }
    }

    /// Returns how many entries this storage has room for.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the memory of a storage with room for `capacity` entries.
    pub(super) fn bytes_for(capacity: usize) -> usize {
        let (slots, words) = Self::lengths(capacity);
        (words + 2 * slots) * size_of::<AtomicU64>()
    }

    /// Returns the lengths of the table and of the filter.
    fn lengths(capacity: usize) -> (usize, usize) {
        (capacity * 4 / 3 + 1, (capacity * FILTER_BITS / 64).next_power_of_two())
    }

    /// Tells whether a hash can be in the table.
    #[inline(always)]
    pub(super) fn may_contain(&self, hash: u64) -> bool {
        let bits = filter_bits(hash);
        let word = self.filter.get((hash >> self.filter_shift) as usize);
        word.is_some_and(|word| word.load(Ordering::Relaxed) & bits == bits)
    }

    /// Calls `each` for each entry with this hash.
    pub(super) fn find(&self, hash: u64, mut each: impl FnMut(Entry)) {
        for slot in self.slots(hash) {
            match self.hashes[slot].load(Ordering::Acquire) {
                0 => return,
                found if found == hash => each(unpack(hash, self.entries[slot].load(Ordering::Relaxed))),
                _ => {}
            }
        }
    }

    pub(super) fn contains(&self, hash: u64, bank: u16) -> bool {
        let mut contains = false;
        self.find(hash, |entry| contains |= entry.bank == bank);
        contains
    }

    /// Adds or renews an entry. Only the owner may call this, and only while there is room.
    pub(super) fn insert(&self, entry: Entry) -> Insertion {
        let mut same = 0;
        let mut oldest: Option<(usize, u32)> = None;
        for slot in self.slots(entry.hash) {
            let found = self.hashes[slot].load(Ordering::Relaxed);
            if found == 0 {
                if let Some((slot, _)) = oldest.filter(|_| same >= MAX_BANKS_PER_GRAM) {
                    self.entries[slot].store(pack(entry), Ordering::Relaxed);
                    return Insertion::Renewed;
                }
                self.entries[slot].store(pack(entry), Ordering::Relaxed);
                self.hashes[slot].store(entry.hash, Ordering::Release);
                if let Some(word) = self.filter.get((entry.hash >> self.filter_shift) as usize) {
                    word.fetch_or(filter_bits(entry.hash), Ordering::Relaxed);
                }
                return Insertion::Added;
            }
            if found == entry.hash {
                let known = unpack(entry.hash, self.entries[slot].load(Ordering::Relaxed));
                if known.bank == entry.bank {
                    let time = known.time.max(entry.time);
                    self.entries[slot].store(pack(Entry { time, ..entry }), Ordering::Relaxed);
                    return Insertion::Renewed;
                }
                same += 1;
                if oldest.is_none_or(|(_, time)| known.time < time) {
                    oldest = Some((slot, known.time));
                }
            }
        }
        Insertion::Renewed
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> {
        let slots = self.hashes.iter().zip(&self.entries);
        let entries =
            slots.map(|(hash, entry)| (hash.load(Ordering::Relaxed), entry.load(Ordering::Relaxed)));
        entries.filter(|(hash, _)| *hash != 0).map(|(hash, entry)| unpack(hash, entry))
    }

    /// Returns the slots in which an entry with this hash can be, in order of probing.
    fn slots(&self, hash: u64) -> impl Iterator<Item = usize> {
        let slots = self.hashes.len();
        let first = ((u128::from(hash) * slots as u128) >> 64) as usize;
        (first..slots).chain(0..first)
    }
}

#[inline(always)]
fn filter_bits(hash: u64) -> u64 {
    1 << (hash & 63) | 1 << (hash >> 6 & 63) | 1 << (hash >> 12 & 63)
}

fn pack(entry: Entry) -> u64 {
    u64::from(entry.time) << 32 | u64::from(entry.bank)
}

fn unpack(hash: u64, packed: u64) -> Entry {
    Entry { hash, bank: packed as u16, time: (packed >> 32) as u32 }
}
