//! What one sandbox said to one host, as counted digests in slots: the model that prices the next request.
//!
//! A slot is a place in a request, such as the second segment of the path or the value of `accept`. Both tables have a
//! fixed size and forget by the CLOCK rule: a hand passes over the entries in order, spares one that was used since it
//! last passed, and takes the first that was not. Everything here is a function of the requests learned so far.

use hashbrown::HashTable;
use serde::{Deserialize, Serialize};

use super::digest::Digest;

/// Values known per host, of all slots together.
pub const VALUES: usize = 1_024;
/// Slots known per host.
pub const SLOTS: usize = 256;
/// What one host takes in memory at most.
pub const HOST_BYTES: usize = 64 << 10;
/// Bytes of an index per entry at most: hashbrown has at most 16/7 places of 3 bytes for each.
const INDEX_BYTES: usize = 8;
const _: () = assert!(
    VALUES * (size_of::<ValueEntry>() + INDEX_BYTES) + SLOTS * (size_of::<SlotEntry>() + INDEX_BYTES)
        <= HOST_BYTES
);
/// By how much a use raises the count of a value.
const STEP: u16 = 2;
/// Above this, uses do not raise the count of a value.
const MOST_COUNTED: u16 = 2_046;

/// The values of one host.
#[derive(Clone, Debug, Default)]
pub(super) struct HostTable {
    slots: Vec<SlotEntry>,
    slot_index: HashTable<u16>,
    slot_hand: usize,
    values: Vec<ValueEntry>,
    value_index: HashTable<u16>,
    value_hand: usize,
    /// The serial of the newest slot.
    serial: u32,
}

#[derive(Clone, Copy, Debug)]
struct SlotEntry {
    key: u64,
    /// Tells this slot from an earlier one in the same entry, whose values are still in the table.
    serial: u32,
    /// Sum of the counts of its values.
    total: u32,
    /// Number of its values.
    distinct: u32,
    /// The entry of the value with about the largest count.
    top: u16,
    used: bool,
}

#[derive(Clone, Copy, Debug)]
struct ValueEntry {
    digest: Digest,
    serial: u32,
    slot: u16,
    count: u16,
    used: bool,
}

/// Share of the code space of a slot that a value has, or that all unknown ones have together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Weight {
    pub(super) weight: u32,
    pub(super) total: u32,
    pub(super) known: bool,
}

/// A table as it is stored. Contains digests, never content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TableState {
    /// Keys of the slots.
    slots: Vec<u64>,
    /// Slot, digest and count of each value.
    values: Vec<(u16, Digest, u16)>,
}

impl HostTable {
    /// Returns the share of `digest` among what `slot` may contain. The shares of the known values and of the unknown
    /// add up to 1.
    pub(super) fn weight(&self, slot: u64, digest: Digest) -> Weight {
        let Some((at, entry)) = self.find_slot(slot) else {
            return Weight { weight: 1, total: 1, known: false };
        };
        let unknown = entry.unknown();
        let total = entry.total + unknown;
        match self.find_value(entry.serial, digest) {
            Some(value) => {
                debug_assert_eq!(value.slot, at);
                Weight { weight: u32::from(value.count), total, known: true }
            }
            None => Weight { weight: unknown, total, known: false },
        }
    }

    /// Counts one use of `digest` in `slot`.
    pub(super) fn learn(&mut self, slot: u64, digest: Digest) {
        let slot_at = self.enter_slot(slot);
        let Some(serial) = self.slots.get(usize::from(slot_at)).map(|slot| slot.serial) else { return };
        let found = self
            .value_index
            .find(value_hash(serial, digest), |at| self.value_is(*at, serial, digest))
            .copied();
        let value_at = found.unwrap_or_else(|| self.insert_value(slot_at, serial, digest));
        let (Some(slot), Some(value)) =
            (self.slots.get_mut(usize::from(slot_at)), self.values.get_mut(usize::from(value_at)))
        else {
            return;
        };
        value.used = true;
        if value.count + STEP <= MOST_COUNTED {
            value.count += STEP;
            slot.total += u32::from(STEP);
        }
        let count = value.count;
        // What is used now takes over from what was used before, in a few dozen uses.
        let top_at = std::mem::replace(&mut slot.top, value_at);
        if top_at == value_at {
            return;
        }
        let Some(top) = self.values.get_mut(usize::from(top_at)).filter(|top| top.serial == serial) else {
            return;
        };
        let faded = top.count / 4;
        top.count -= faded;
        slot.total -= u32::from(faded);
        if top.count > count {
            slot.top = top_at;
        }
    }

    pub(super) fn state(&self) -> TableState {
        let values = self.values.iter().filter(|value| {
            self.slots.get(usize::from(value.slot)).is_some_and(|slot| slot.serial == value.serial)
        });
        TableState {
            slots: self.slots.iter().map(|slot| slot.key).collect(),
            values: values.map(|value| (value.slot, value.digest, value.count)).collect(),
        }
    }

    /// Rebuilds a table. What does not fit, or makes no sense, is dropped, so any state gives a valid table.
    pub(super) fn from_state(state: &TableState) -> Self {
        let mut table = HostTable::default();
        for key in state.slots.iter().take(SLOTS) {
            table.enter_slot(*key);
        }
        for (slot, digest, count) in state.values.iter().take(VALUES) {
            let Some(key) = state.slots.get(usize::from(*slot)) else { continue };
            let Some((at, serial)) = table.find_slot(*key).map(|(at, slot)| (at, slot.serial)) else {
                continue;
            };
            if table.find_value(serial, *digest).is_some() {
                continue;
            }
            let value_at = table.insert_value(at, serial, *digest);
            let count = (*count).clamp(1, MOST_COUNTED);
            let top_count = table.slots.get(usize::from(at)).and_then(|slot| {
                table
                    .values
                    .get(usize::from(slot.top))
                    .filter(|top| top.serial == serial)
                    .map(|top| top.count)
            });
            if let (Some(value), Some(slot)) =
                (table.values.get_mut(usize::from(value_at)), table.slots.get_mut(usize::from(at)))
            {
                value.count = count;
                slot.total += u32::from(count);
                if top_count.is_none_or(|top| count > top) {
                    slot.top = value_at;
                }
            }
        }
        table
    }

    fn find_slot(&self, key: u64) -> Option<(u16, &SlotEntry)> {
        let at = *self.slot_index.find(key, |at| self.slot_is(*at, key))?;
        Some((at, self.slots.get(usize::from(at))?))
    }

    fn slot_is(&self, at: u16, key: u64) -> bool {
        self.slots.get(usize::from(at)).is_some_and(|slot| slot.key == key)
    }

    fn find_value(&self, serial: u32, digest: Digest) -> Option<&ValueEntry> {
        let at =
            *self.value_index.find(value_hash(serial, digest), |at| self.value_is(*at, serial, digest))?;
        self.values.get(usize::from(at))
    }

    fn value_is(&self, at: u16, serial: u32, digest: Digest) -> bool {
        self.values.get(usize::from(at)).is_some_and(|value| value.digest == digest && value.serial == serial)
    }

    /// Returns the entry of a slot, which replaces another if the table is full.
    fn enter_slot(&mut self, key: u64) -> u16 {
        if let Some(at) = self.slot_index.find(key, |at| self.slot_is(*at, key)).copied() {
            if let Some(slot) = self.slots.get_mut(usize::from(at)) {
                slot.used = true;
            }
            return at;
        }
        self.serial = self.serial.wrapping_add(1);
        let entry = SlotEntry { key, serial: self.serial, total: 0, distinct: 0, top: u16::MAX, used: true };
        let at = if self.slots.len() < SLOTS {
            self.slots.push(entry);
            (self.slots.len() - 1) as u16
        } else {
            let at = clock(&mut self.slots, &mut self.slot_hand, |slot| &mut slot.used);
            if let Some(slot) = self.slots.get_mut(at) {
                let old = std::mem::replace(slot, entry);
                if let Ok(index) = self.slot_index.find_entry(old.key, |other| usize::from(*other) == at) {
                    index.remove();
                }
            }
            at as u16
        };
        let slots = &self.slots;
        self.slot_index.insert_unique(key, at, |at| slots.get(usize::from(*at)).map_or(0, |slot| slot.key));
        at
    }

    /// Adds a value that its slot does not have, with a count of 0. It replaces another if the table is full.
    fn insert_value(&mut self, slot_at: u16, serial: u32, digest: Digest) -> u16 {
        let entry = ValueEntry { digest, serial, slot: slot_at, count: 0, used: true };
        let at = if self.values.len() < VALUES {
            self.values.push(entry);
            (self.values.len() - 1) as u16
        } else {
            let at = clock(&mut self.values, &mut self.value_hand, |value| &mut value.used);
            if let Some(value) = self.values.get_mut(at) {
                let old = std::mem::replace(value, entry);
                let hash = value_hash(old.serial, old.digest);
                if let Ok(index) = self.value_index.find_entry(hash, |other| usize::from(*other) == at) {
                    index.remove();
                }
                if let Some(slot) =
                    self.slots.get_mut(usize::from(old.slot)).filter(|slot| slot.serial == old.serial)
                {
                    slot.total -= u32::from(old.count);
                    slot.distinct -= 1;
                }
            }
            at as u16
        };
        if let Some(slot) = self.slots.get_mut(usize::from(slot_at)) {
            slot.distinct += 1;
        }
        let values = &self.values;
        self.value_index.insert_unique(value_hash(serial, digest), at, |at| {
            values.get(usize::from(*at)).map_or(0, |value| value_hash(value.serial, value.digest))
        });
        at
    }
}

impl SlotEntry {
    /// Returns the weight of all unknown values together: one for each known value, as PPM's method C has it.
    fn unknown(&self) -> u32 {
        self.distinct.max(1)
    }
}

fn value_hash(serial: u32, digest: Digest) -> u64 {
    digest.0 ^ u64::from(serial).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Moves the hand to the first entry that was not used since the hand last passed it, and returns its index.
pub(crate) fn clock<T>(entries: &mut [T], hand: &mut usize, used: impl Fn(&mut T) -> &mut bool) -> usize {
    // In one round every mark is removed, so the second finds an entry.
    for _ in 0..=entries.len() {
        let at = *hand % entries.len().max(1);
        *hand = at + 1;
        if let Some(entry) = entries.get_mut(at)
            && !std::mem::replace(used(entry), false)
        {
            return at;
        }
    }
    0
}

#[cfg(test)]
impl HostTable {
    /// Returns the known values of a slot with their weights, in the order of the table, and the weight of the unknown.
    pub(super) fn alternatives(&self, key: u64) -> (Vec<(Digest, u32)>, u32) {
        let Some((_, slot)) = self.find_slot(key) else { return (Vec::new(), 1) };
        let of_slot = self.values.iter().filter(|value| value.serial == slot.serial);
        (of_slot.map(|value| (value.digest, u32::from(value.count))).collect(), slot.unknown())
    }

    /// Checks that counts, indexes and bounds agree.
    pub(super) fn check(&self) {
        assert!(self.slots.len() <= SLOTS && self.values.len() <= VALUES);
        assert_eq!(self.slot_index.len(), self.slots.len());
        assert_eq!(self.value_index.len(), self.values.len());
        for slot in &self.slots {
            let of_slot: Vec<_> = self.values.iter().filter(|value| value.serial == slot.serial).collect();
            assert_eq!(slot.distinct as usize, of_slot.len());
            assert_eq!(slot.total, of_slot.iter().map(|value| u32::from(value.count)).sum::<u32>());
            assert!(of_slot.iter().all(|value| (1..=MOST_COUNTED).contains(&value.count)));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn digest(number: u64) -> Digest {
        Digest(number.wrapping_mul(0x9e37_79b9_7f4a_7c15), number)
    }

    #[test]
    fn tables_stay_within_their_bounds() {
        let mut table = HostTable::default();
        for number in 0..20_000 {
            table.learn(number % 700, digest(number));
            table.learn(1 << 40, digest(1)); // what is used all the time stays
        }
        table.check();
        assert_eq!((table.slots.len(), table.values.len()), (SLOTS, VALUES));
        assert!(table.weight(1 << 40, digest(1)).known);
    }

    #[test]
    fn a_constant_becomes_free_and_a_change_is_learned() {
        let mut table = HostTable::default();
        for _ in 0..2_000 {
            table.learn(1, digest(1));
        }
        let bits = |table: &HostTable, number| {
            let Weight { weight, total, .. } = table.weight(1, digest(number));
            f64::from(total).log2() - f64::from(weight).log2()
        };
        assert!(bits(&table, 1) < 0.001);
        let mut change = 0.0;
        for _ in 0..40 {
            change += bits(&table, 2);
            table.learn(1, digest(2));
        }
        assert!(change < 120.0, "{change}");
        assert!(bits(&table, 2) < 0.6, "{}", bits(&table, 2));
    }

    proptest! {
        #[test]
        fn p19_any_state_is_a_valid_table(
            slots in prop::collection::vec(0..20_u64, 0..40),
            values in prop::collection::vec((0..50_u16, 0..90_u64, any::<u16>()), 0..200),
            uses in prop::collection::vec((0..30_u64, 0..90_u64), 0..300),
        ) {
            let values = values.into_iter().map(|(slot, number, count)| (slot, digest(number), count)).collect();
            let mut table = HostTable::from_state(&TableState { slots, values });
            table.check();
            for (slot, number) in uses {
                table.learn(slot, digest(number));
            }
            table.check();
            let copy = HostTable::from_state(&table.state());
            copy.check();
            for slot in 0..30 {
                for number in 0..90 {
                    let (left, right) = (table.weight(slot, digest(number)), copy.weight(slot, digest(number)));
                    prop_assert_eq!(left, right);
                }
            }
        }
    }
}
