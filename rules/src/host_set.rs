//! `HostSet`: up to millions of host patterns, looked up by name in well under a microsecond without allocating.
//!
//! It consists of one arena of base names, one 16-byte entry per pattern, and one hash index of 8-byte slots. A
//! lookup walks the suffixes of the name, longest first, so it returns the most specific patterns first.

use std::hash::BuildHasher;
use std::mem::size_of;

use foldhash::fast::FixedState;
use hashbrown::{HashTable, hash_table};

use crate::name::DomainName;
use crate::pattern::{DomainPattern, HostPattern, PatternReach, RawPattern};

/// Most patterns in a set, so that a runaway list is refused instead of exhausting memory.
pub const MAX_PATTERNS: usize = 4_000_000;
/// Most bytes of base names in a set.
pub const MAX_TEXT_BYTES: usize = 256 << 20;

/// Most entries with the same base name: each adds a step to every lookup of that name.
pub const MAX_PER_BASE: usize = 256;

/// Most exact names to collect for resolving in advance.
const MAX_LITERALS: usize = 1024;

const END_OF_CHAIN: u32 = u32::MAX;
/// The bit of a line number that marks a line of a list file; size limits keep line numbers below 2^31.
const LIST_LINE_BIT: u32 = 1 << 31;

/// Patterns with the rule each belongs to.
#[derive(Clone, Debug, Default)]
pub struct HostSet {
    /// Base names, each preceded by its length, so that comparing a slot does not touch its entry.
    text: Vec<u8>,
    entries: Vec<PatternEntry>,
    index: HashTable<IndexSlot>,
    hasher: FixedState,
    /// The first exact names of the policy itself, not of its lists, with their rules.
    literals: Vec<(DomainName, u16)>,
}

#[derive(Clone, Copy, Debug)]
struct IndexSlot {
    /// Offset of the base name in the text.
    offset: u32,
    /// The first entry with that base.
    entry: u32,
}

#[derive(Clone, Copy, Debug)]
struct PatternEntry {
    line: u32,
    /// The next entry with the same base, or [`END_OF_CHAIN`].
    next: u32,
    rule: u16,
    port: u16,
    reach: PatternReach,
    /// Whether it is the first with its base. Such entries are in the order of the text, on which `iter` relies.
    begins: bool,
}

/// A pattern of the set that covers a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatternHit<'a> {
    pub rule: u16,
    /// The port of the pattern; `None` means the ports of the rule.
    pub port: Option<u16>,
    /// The line of the pattern.
    pub line: u32,
    pub origin: PatternOrigin,
    pub reach: PatternReach,
    /// The base name; empty for `*`.
    pub base: &'a str,
}

/// The kind of file that a pattern is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatternOrigin {
    List,
    Policy,
}

/// Why a set rejects a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostSetError {
    #[error("more than {MAX_PER_BASE} entries for one name in one policy")]
    Crowded,
    #[error("more than {MAX_PATTERNS} patterns, or {MAX_TEXT_BYTES} bytes of names, in one policy")]
    Full,
}

impl HostSet {
    /// Adds one pattern of `rule`; adding it again has no effect.
    ///
    /// # Errors
    ///
    /// Returns [`HostSetError`] when a limit is reached.
    pub fn insert(&mut self, pattern: &HostPattern, rule: u16, line: u32) -> Result<(), HostSetError> {
        let base = pattern.pattern.base().map_or("", DomainName::as_str);
        let reach = match pattern.pattern {
            DomainPattern::Any | DomainPattern::Tree(_) => PatternReach::Tree,
            DomainPattern::Below(_) => PatternReach::Below,
            DomainPattern::Exact(_) => PatternReach::Exact,
        };
        let raw = RawPattern { reach, base: base.into(), port: pattern.port };
        self.insert_raw(&raw, rule, line, PatternOrigin::Policy)?;
        if let DomainPattern::Exact(name) = &pattern.pattern
            && self.literals.len() < MAX_LITERALS
        {
            self.literals.push((name.clone(), rule));
        }
        Ok(())
    }

    /// Returns the first exact names of the policy itself, not of its lists, with their rules.
    pub(crate) fn literals(&self) -> &[(DomainName, u16)] {
        &self.literals
    }

    pub(crate) fn insert_raw(
        &mut self,
        raw: &RawPattern<'_>,
        rule: u16,
        line: u32,
        origin: PatternOrigin,
    ) -> Result<(), HostSetError> {
        if self.entries.len() >= MAX_PATTERNS || self.text.len() + raw.base.len() >= MAX_TEXT_BYTES {
            return Err(HostSetError::Full);
        }
        let line = match origin {
            PatternOrigin::List => line | LIST_LINE_BIT,
            PatternOrigin::Policy => line & !LIST_LINE_BIT,
        };
        let (port, reach) = (raw.port.unwrap_or(0), raw.reach);
        let entry = PatternEntry { line, next: END_OF_CHAIN, rule, port, reach, begins: false };
        let base = raw.base.as_bytes();
        let (text, hasher) = (&self.text, &self.hasher);
        let place = self.index.entry(
            hasher.hash_one(base),
            |slot| base_at(text, slot.offset) == base,
            |slot| hasher.hash_one(base_at(text, slot.offset)),
        );
        match place {
            hash_table::Entry::Occupied(found) => {
                let first = found.get().entry;
                self.append(first, entry)
            }
            hash_table::Entry::Vacant(free) => {
                let (offset, at) = (self.text.len() as u32, self.entries.len() as u32);
                free.insert(IndexSlot { offset, entry: at });
                self.text.push(base.len() as u8);
                self.text.extend_from_slice(base);
                self.entries.push(PatternEntry { begins: true, ..entry });
                Ok(())
            }
        }
    }

    fn find_slot(&self, base: &str) -> Option<IndexSlot> {
        let hash = self.hasher.hash_one(base.as_bytes());
        self.index.find(hash, |slot| base_at(&self.text, slot.offset) == base.as_bytes()).copied()
    }

    /// Appends an entry to the chain of its base name, so that the chain keeps the order of the file.
    fn append(&mut self, first: u32, entry: PatternEntry) -> Result<(), HostSetError> {
        let new = self.entries.len() as u32;
        let mut at = first;
        for _ in 1..MAX_PER_BASE {
            let Some(other) = self.entries.get_mut(at as usize) else { break };
            if (other.reach, other.port, other.rule) == (entry.reach, entry.port, entry.rule) {
                return Ok(());
            }
            if other.next == END_OF_CHAIN {
                other.next = new;
                self.entries.push(entry);
                return Ok(());
            }
            at = other.next;
        }
        Err(HostSetError::Crowded)
    }

    /// Reserves capacity for `patterns` more, so that a long list loads without repeated growth.
    pub(crate) fn reserve(&mut self, patterns: usize, bytes: usize) {
        let patterns = patterns.min(MAX_PATTERNS);
        self.text.reserve(bytes.min(MAX_TEXT_BYTES));
        self.entries.reserve(patterns);
        let (text, hasher) = (&self.text, &self.hasher);
        self.index.reserve(patterns, |slot| hasher.hash_one(base_at(text, slot.offset)));
    }

    /// Releases unused capacity.
    pub fn shrink(&mut self) {
        self.text.shrink_to_fit();
        self.entries.shrink_to_fit();
        let (text, hasher) = (&self.text, &self.hasher);
        self.index.shrink_to_fit(|slot| hasher.hash_one(base_at(text, slot.offset)));
    }

    /// Returns every pattern that covers `name`, the longest base first.
    pub fn hits<'a>(&'a self, name: &'a DomainName) -> impl Iterator<Item = PatternHit<'a>> {
        let whole = name.as_str().len();
        name.suffixes().chain(std::iter::once("")).flat_map(move |suffix| {
            let own = suffix.len() == whole;
            self.entries_for(suffix).filter(move |hit| match hit.reach {
                PatternReach::Below => !own,
                PatternReach::Exact => own,
                PatternReach::Tree => true,
            })
        })
    }

    /// Returns the entries with this base name, of any reach.
    fn entries_for(&self, base: &str) -> impl Iterator<Item = PatternHit<'_>> {
        let slot = self.find_slot(base);
        let first = slot.and_then(|slot| Some((self.entries.get(slot.entry as usize)?, slot.offset)));
        first.into_iter().flat_map(|(first, offset)| self.chain_from(first, offset))
    }

    /// Returns an entry and the rest of its chain; `offset` is that of their base name.
    fn chain_from<'a>(
        &'a self,
        first: &'a PatternEntry,
        offset: u32,
    ) -> impl Iterator<Item = PatternHit<'a>> {
        let base = str::from_utf8(base_at(&self.text, offset)).unwrap_or("");
        let next = |entry: &&PatternEntry| self.entries.get(entry.next as usize);
        std::iter::successors(Some(first), next).map(move |entry| entry.hit(base))
    }

    /// Returns the patterns with this base name, of any reach.
    pub(crate) fn hits_with_base(&self, base: &str) -> Vec<PatternHit<'_>> {
        self.entries_for(base).collect()
    }

    /// Returns the patterns whose base is `name` or a parent of it: all that can cover a pattern with that base.
    pub(crate) fn hits_above<'a>(&'a self, name: &DomainName) -> Vec<PatternHit<'a>> {
        name.suffixes().chain(std::iter::once("")).flat_map(|suffix| self.entries_for(suffix)).collect()
    }

    /// Returns every pattern of the set, grouped by base name in the order of insertion.
    pub fn iter(&self) -> impl Iterator<Item = PatternHit<'_>> {
        let begin = self.entries.iter().filter(|entry| entry.begins);
        let placed = begin.scan(0, |end, entry| {
            let offset = *end;
            *end += 1 + base_at(&self.text, offset).len() as u32;
            Some((entry, offset))
        });
        placed.flat_map(|(entry, offset)| self.chain_from(entry, offset))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the memory of the set in bytes, without the names themselves.
    pub fn overhead(&self) -> usize {
        let names: usize = self.index.iter().map(|slot| base_at(&self.text, slot.offset).len()).sum();
        self.entries.capacity() * size_of::<PatternEntry>()
            + self.index.allocation_size()
            + self.text.capacity()
            + self.literals.capacity() * size_of::<(DomainName, u16)>()
            - names
    }
}

impl PatternEntry {
    fn hit<'a>(&self, base: &'a str) -> PatternHit<'a> {
        PatternHit {
            rule: self.rule,
            port: Some(self.port).filter(|port| *port != 0),
            line: self.line & !LIST_LINE_BIT,
            origin: if self.line & LIST_LINE_BIT == 0 { PatternOrigin::Policy } else { PatternOrigin::List },
            reach: self.reach,
            base,
        }
    }
}

impl PatternHit<'_> {
    /// Returns the pattern as written in a policy, without its port.
    pub fn pattern(&self) -> String {
        match (self.reach, self.base) {
            (_, "") => "*".to_owned(),
            (PatternReach::Below, base) => format!("*.{base}"),
            (PatternReach::Exact, base) => base.to_owned(),
            (PatternReach::Tree, base) => format!(".{base}"),
        }
    }

    /// Describes what the pattern covers.
    pub fn describe(&self) -> String {
        let Ok(base) = DomainName::parse(self.base) else { return DomainPattern::Any.describe() };
        match self.reach {
            PatternReach::Below => DomainPattern::Below(base).describe(),
            PatternReach::Exact => DomainPattern::Exact(base).describe(),
            PatternReach::Tree => DomainPattern::Tree(base).describe(),
        }
    }
}

fn base_at(text: &[u8], offset: u32) -> &[u8] {
    let Some((length, rest)) = text.get(offset as usize..).and_then(<[u8]>::split_first) else {
        return &[];
    };
    rest.get(..usize::from(*length)).unwrap_or(&[])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pattern::PatternWidth;

    fn host_set(patterns: &[&str]) -> HostSet {
        let mut set = HostSet::default();
        for (at, text) in patterns.iter().enumerate() {
            let pattern = HostPattern::parse(text, PatternWidth::DangerouslyWide).unwrap();
            set.insert(&pattern, at as u16, at as u32 + 1).unwrap();
        }
        set
    }

    fn matching_rules(set: &HostSet, name: &str) -> Vec<u16> {
        set.hits(&DomainName::parse(name).unwrap()).map(|hit| hit.rule).collect()
    }

    #[test]
    fn hits_come_most_specific_first() {
        let set = host_set(&["*", "*.com", ".x.com", "a.x.com", "*.a.x.com", "a.x.com:80", "b.x.com"]);
        assert_eq!(matching_rules(&set, "a.x.com"), [3, 5, 2, 1, 0]);
        assert_eq!(matching_rules(&set, "x.com"), [2, 1, 0]);
        assert_eq!(matching_rules(&set, "com"), [0]);
        assert_eq!(matching_rules(&set, "z.a.x.com"), [4, 2, 1, 0]);
        assert_eq!(matching_rules(&set, "x.com.evil"), [0]);
    }

    #[test]
    fn p17_repeated_and_crowded_names_are_bounded() {
        let mut set = HostSet::default();
        let pattern = |port| HostPattern {
            port: Some(port),
            ..HostPattern::parse("x.com", PatternWidth::Narrow).unwrap()
        };
        for _ in 0..3 {
            set.insert(&pattern(1), 0, 1).unwrap();
        }
        assert_eq!(set.len(), 1);
        for port in 2..=256 {
            set.insert(&pattern(port), 0, 1).unwrap();
        }
        assert_eq!(set.insert(&pattern(257), 0, 1), Err(HostSetError::Crowded));
        assert_eq!(matching_rules(&set, "x.com").len(), MAX_PER_BASE);
    }

    #[test]
    fn p1_an_empty_set_covers_nothing() {
        assert_eq!(matching_rules(&HostSet::default(), "x.com"), [0u16; 0]);
    }

    #[test]
    fn a_hundred_thousand_patterns_cost_at_most_forty_bytes_each() {
        let mut set = HostSet::default();
        for at in 0..100_000 {
            let text = format!("h{at}.d{}.example", at % 977);
            set.insert(&HostPattern::parse(&text, PatternWidth::Narrow).unwrap(), 0, at).unwrap();
        }
        set.shrink();
        assert!(set.overhead() <= 40 * set.len(), "{} bytes per pattern", set.overhead() / set.len());
        assert_eq!(matching_rules(&set, "h99999.d345.example"), [0]);
        assert_eq!(matching_rules(&set, "h99999.d346.example"), [0u16; 0]);
    }

    #[test]
    fn patterns_come_back_in_the_order_of_the_file() {
        let set = host_set(&["b.com", "*.a.com", "b.com:80", "c.com", ".a.com", "*"]);
        let all: Vec<(String, u16)> = set.iter().map(|hit| (hit.pattern(), hit.rule)).collect();
        let all: Vec<(&str, u16)> = all.iter().map(|(text, rule)| (text.as_str(), *rule)).collect();
        let grouped = [("b.com", 0), ("b.com", 2), ("*.a.com", 1), (".a.com", 4), ("c.com", 3), ("*", 5)];
        assert_eq!(all, grouped, "grouped by base, in order of insertion");
        let literals: Vec<&str> = set.literals().iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(literals, ["b.com", "b.com", "c.com"]);
    }

    proptest! {
        #[test]
        fn lookup_agrees_with_a_naive_matcher(
            patterns in proptest::collection::vec("(\\*\\.|\\.)?[ab](\\.[ab]){0,3}|\\*", 0..12), name in "[ab](\\.[ab]){0,4}",
        ) {
            let texts: Vec<&str> = patterns.iter().map(String::as_str).collect();
            let name = DomainName::parse(&name).unwrap();
            let mut naive: Vec<u16> = (0..texts.len() as u16)
                .filter(|at| HostPattern::parse(texts[*at as usize], PatternWidth::DangerouslyWide).unwrap().pattern.matches(&name))
                .collect();
            let mut found: Vec<u16> = host_set(&texts).hits(&name).map(|hit| hit.rule).collect();
            found.sort_unstable();
            naive.sort_unstable();
            prop_assert_eq!(found, naive);
        }
    }
}
