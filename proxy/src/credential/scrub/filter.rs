//! Finds the places of a text that are worth a closer look, at the speed of reading it.
//!
//! From each pattern the filter takes one or two short windows that no common escape interrupts, and keeps every group
//! of four octets in them. A text is then looked at in steps as wide as the windows allow, with one bit for each hash of
//! a group; letter case is ignored.

/// Octets of a group.
const GRAM: usize = 4;
/// Longest step.
const MAX_STEP: usize = 4;
/// Windows are taken from the first octets of a pattern: what precedes them is all that may be held back unseen.
const WITHIN: usize = 64;
/// Groups that are looked up together.
const BLOCK: usize = 8;
/// Bits of the table for each group.
const BITS_PER_GRAM: usize = 32;
/// Sets this bit in each octet, so that letters have no case.
const FOLD: u32 = 0x2020_2020;

/// What windows of a pattern may consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WindowKind {
    /// Letters and digits: what servers leave as it is when they escape the rest.
    Plain,
    Any,
}

/// A pattern to find windows of.
pub(super) struct Pattern<'a> {
    pub(super) text: &'a [u8],
    pub(super) windows: WindowKind,
}

/// A group of a window, where it is in its pattern.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) pattern: u32,
    /// Of the group in the pattern.
    pub(super) offset: u32,
    /// Of the window in the pattern.
    start: u32,
}

impl Window {
    /// Returns the window as offsets in the pattern, given its length.
    pub(super) fn range(&self, length: usize) -> std::ops::Range<usize> {
        self.start as usize..self.start as usize + length
    }
}

/// The groups of all windows.
pub(super) struct GramFilter {
    bits: Vec<u64>,
    shift: u32,
    /// An open-addressed table: a group, and its part of `windows`.
    slots: Vec<(u32, u32, u32)>,
    windows: Vec<Window>,
    step: usize,
    /// Where the last window ends in its pattern.
    reach: usize,
    /// Whether a pattern has no window that escapes leave alone.
    blind: bool,
}

impl GramFilter {
    pub(super) fn new(patterns: &[Pattern<'_>]) -> Self {
        let longest = patterns.iter().map(|pattern| longest_run(pattern.text, pattern.windows));
        let blind = longest.clone().any(|run| run < GRAM);
        let usable = longest.filter(|run| *run >= GRAM).min().unwrap_or(GRAM + MAX_STEP - 1);
        let step = match usable - GRAM + 1 {
            4.. => MAX_STEP,
            2 | 3 => 2,
            _ => 1,
        };
        let length = GRAM + step - 1;
        let mut grams: Vec<(u32, Window)> = Vec::new();
        let mut reach = 0;
        for (index, pattern) in patterns.iter().enumerate() {
            let mut starts = window_starts(pattern.text, pattern.windows, length);
            if starts.is_empty() {
                starts = window_starts(pattern.text, WindowKind::Any, length);
            }
            reach = reach.max(starts.iter().max().map_or(0, |start| start + length));
            for start in starts {
                for offset in start..start + step {
                    let Some(gram) = pattern.text.get(offset..).and_then(<[u8]>::first_chunk) else {
                        continue;
                    };
                    let (pattern, offset, start) = (index as u32, offset as u32, start as u32);
                    grams.push((fold(gram), Window { pattern, offset, start }));
                }
            }
        }
        grams.sort_by_key(|(gram, window)| (*gram, window.pattern, window.offset));
        let bits = (grams.len() * BITS_PER_GRAM).next_power_of_two().clamp(1 << 12, 1 << 21);
        let mut filter = GramFilter {
            bits: vec![0; bits / 64],
            shift: 32 - bits.trailing_zeros(),
            slots: vec![(0, 0, 0); (2 * grams.len()).next_power_of_two().max(2)],
            windows: grams.iter().map(|(_, window)| *window).collect(),
            step,
            reach,
            blind,
        };
        let mut from = 0;
        for group in grams.chunk_by(|one, other| one.0 == other.0) {
            if let Some((gram, _)) = group.first() {
                filter.insert(*gram, from, group.len());
            }
            from += group.len();
        }
        filter
    }

    fn insert(&mut self, gram: u32, from: usize, count: usize) {
        let bit = hash(gram) >> self.shift;
        if let Some(word) = self.bits.get_mut(bit as usize / 64) {
            *word |= 1 << (bit % 64);
        }
        let mask = self.slots.len() - 1;
        let mut at = hash(gram).swap_bytes() as usize & mask;
        while self.slots.get(at).is_some_and(|slot| slot.2 != 0) {
            at = (at + 1) & mask;
        }
        if let Some(slot) = self.slots.get_mut(at) {
            *slot = (gram, from as u32, count as u32);
        }
    }

    /// Calls `found` with the place of each group of a window, and the windows that have it.
    pub(super) fn scan(&self, text: &[u8], mut found: impl FnMut(usize, &[Window])) {
        match self.step {
            MAX_STEP => {
                for (index, block) in text.as_chunks::<GRAM>().0.chunks(BLOCK).enumerate() {
                    // All of a block at once, without a branch: nearly always, none is set.
                    if block.iter().fold(0, |set, gram| set | self.bit(hash(fold(gram)))) == 0 {
                        continue;
                    }
                    for (at, gram) in block.iter().enumerate() {
                        self.probe((index * BLOCK + at) * GRAM, gram, &mut found);
                    }
                }
            }
            step => {
                for (index, gram) in text.windows(GRAM).step_by(step).enumerate() {
                    if let Some(gram) = gram.first_chunk() {
                        self.probe(index * step, gram, &mut found);
                    }
                }
            }
        }
    }

    /// The bit for a hash: not zero if a group may have it.
    #[inline]
    fn bit(&self, hash: u32) -> u64 {
        let bit = hash >> self.shift;
        self.bits.get(bit as usize / 64).map_or(0, |word| word >> (bit % 64) & 1)
    }

    #[inline]
    fn probe(&self, at: usize, gram: &[u8; GRAM], found: &mut impl FnMut(usize, &[Window])) {
        let folded = fold(gram);
        if self.bit(hash(folded)) != 0 {
            let windows = self.windows_of(folded);
            if !windows.is_empty() {
                found(at, windows);
            }
        }
    }

    #[cold]
    fn windows_of(&self, gram: u32) -> &[Window] {
        let mask = self.slots.len() - 1;
        let mut at = hash(gram).swap_bytes() as usize & mask;
        while let Some((known, from, count)) = self.slots.get(at)
            && *count != 0
        {
            if *known == gram {
                return self.windows.get(*from as usize..(*from + *count) as usize).unwrap_or_default();
            }
            at = (at + 1) & mask;
        }
        &[]
    }

    /// Length of every window.
    pub(super) fn window_length(&self) -> usize {
        GRAM + self.step - 1
    }

    /// Most octets of a pattern before its windows are complete.
    pub(super) fn reach(&self) -> usize {
        self.reach
    }

    /// Whether escapes may hide every window of a pattern.
    pub(super) fn is_blind(&self) -> bool {
        self.blind
    }
}

fn fold(gram: &[u8; GRAM]) -> u32 {
    u32::from_le_bytes(*gram) | FOLD
}

fn hash(gram: u32) -> u32 {
    gram.wrapping_mul(0x9e37_79b1)
}

fn longest_run(text: &[u8], kind: WindowKind) -> usize {
    let within = text.get(..WITHIN).unwrap_or(text);
    match kind {
        WindowKind::Any => within.len(),
        WindowKind::Plain => {
            let runs = within.split(|octet| !octet.is_ascii_alphanumeric());
            runs.map(<[u8]>::len).max().unwrap_or_default()
        }
    }
}

/// Chooses up to two windows: side by side where that is possible, so that lines of any usual length leave one of them
/// whole, and the rarest.
fn window_starts(text: &[u8], kind: WindowKind, length: usize) -> Vec<usize> {
    let within = text.get(..WITHIN).unwrap_or(text);
    let rank = |window: &[u8]| {
        let allowed = kind == WindowKind::Any || window.iter().all(u8::is_ascii_alphanumeric);
        allowed.then(|| commonness(window))
    };
    let ranks: Vec<Option<u32>> = within.windows(length).map(rank).collect();
    let rank = |at: usize| Some(ranks.get(at).copied().flatten()? + at as u32 / 8);
    let pair = |first: usize, second: usize| Some((rank(first)? + rank(second)?, first, second));
    let side_by_side = (0..ranks.len()).filter_map(|at| pair(at, at + length).or(pair(at, at + length + 1)));
    if let Some((_, first, second)) = side_by_side.min() {
        return vec![first, second];
    }
    let mut ranked: Vec<(u32, usize)> = (0..ranks.len()).filter_map(|at| Some((rank(at)?, at))).collect();
    ranked.sort_unstable();
    let Some((_, first)) = ranked.first().copied() else { return Vec::new() };
    let second = ranked.iter().find(|(_, at)| at.abs_diff(first) >= length).map(|(_, at)| *at);
    std::iter::once(first).chain(second).collect()
}

/// How likely a window is in ordinary text: words and numbers more than a mixture, runs of one octet most.
fn commonness(window: &[u8]) -> u32 {
    let count = |is: fn(&u8) -> bool| window.iter().filter(|octet| is(octet)).count();
    let alike = window.windows(2).filter(|pair| pair.first() == pair.last()).count();
    let classes = [count(u8::is_ascii_lowercase), count(u8::is_ascii_uppercase), count(u8::is_ascii_digit)];
    let most = classes.into_iter().max().unwrap_or_default();
    (4 * alike + 2 * most) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_found_wherever_it_stands() {
        let texts: [&[u8]; 3] = [b"sk-live-8fJ2kq0Zp7aa", b"0123456789abcdef", b"a/b+c=d9/e"];
        let patterns = texts.map(|text| Pattern { text, windows: WindowKind::Plain });
        for patterns in [&patterns[..2], &patterns[..]] {
            let filter = GramFilter::new(patterns);
            assert_eq!(filter.is_blind(), patterns.len() == 3);
            for (index, pattern) in patterns.iter().enumerate() {
                for before in 0..9 {
                    let text = [&b"---------"[..before], pattern.text, b"--------"].concat();
                    let mut found = Vec::new();
                    filter.scan(&text, |at, windows| {
                        found.extend(windows.iter().map(|one| (one.pattern, at - one.offset as usize)));
                    });
                    assert!(found.contains(&(index as u32, before)), "{index} at {before}: {found:?}");
                }
            }
        }
    }

    #[test]
    fn rare_windows_are_preferred() {
        let starts = window_starts(b"aaaaaaaaaaaaproductionx7Kq92Lz", WindowKind::Plain, 7);
        assert_eq!(starts, [14, 21], "side by side, and not among what is alike");
    }
}
