//! Where the bytes of a decoded view come from, so that what is held back begins where a match began, however far its
//! encoding spreads it.

use std::collections::VecDeque;

use super::MAX_UNDECIDED;

/// How far apart marks are, in bytes of the enclosing view.
const GRAIN: u64 = 512;
/// How far back marks reach, in bytes of the enclosing view.
const REACH: u64 = MAX_UNDECIDED as u64;

/// Maps places in a decoded view to places in the enclosing one.
#[derive(Debug, Default)]
pub(super) struct OriginMap {
    /// How many bytes were decoded, and a place that nothing behind these comes from before. In order.
    marks: VecDeque<(u64, u64)>,
    decoded: u64,
}

impl OriginMap {
    /// Begins another view, of which nothing comes from before `place`.
    pub(super) fn begin(&mut self, place: u64) {
        self.marks.clear();
        self.marks.push_back((0, place));
        self.decoded = 0;
    }

    /// Takes note that what is decoded next does not come from before `place`.
    pub(super) fn mark(&mut self, place: u64) {
        if self.marks.back().is_some_and(|(_, last)| place < last.saturating_add(GRAIN)) {
            return;
        }
        self.marks.push_back((self.decoded, place));
        while self.marks.get(1).is_some_and(|(_, second)| second.saturating_add(REACH) < place) {
            self.marks.pop_front();
        }
    }

    /// Counts bytes that were decoded.
    pub(super) fn add(&mut self, decoded: usize) {
        self.decoded += decoded as u64;
    }

    /// Returns a place that the last `bytes` of the view do not come from before; with none, what is decoded next. It is
    /// the beginning of the enclosing view if that is too long ago to be known.
    pub(super) fn origin(&self, bytes: u64) -> u64 {
        let from = self.decoded.saturating_sub(bytes);
        self.marks.iter().rev().find(|(decoded, _)| *decoded <= from).map_or(0, |(_, place)| *place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_never_too_late_and_hardly_too_early() {
        for (step, decoded) in [(1, 1), (3, 1), (17, 1), (1, 40), (1000, 7), (5, 0)] {
            let (mut map, mut place) = (OriginMap::default(), 100);
            let mut places = Vec::new();
            map.begin(place);
            for _ in 0..50_000 {
                map.mark(place);
                map.add(decoded);
                places.extend(std::iter::repeat_n(place, decoded));
                place += step;
            }
            for bytes in [0, 1, 2, 50, 1000, 4096].into_iter().filter(|bytes| *bytes <= places.len()) {
                let exact = match bytes {
                    0 => place - step,
                    bytes => {
                        places.len().checked_sub(bytes).and_then(|at| places.get(at)).copied().unwrap_or(100)
                    }
                };
                let origin = map.origin(bytes as u64);
                assert!(origin <= exact, "{bytes} bytes by {step}: {origin}, not {exact}");
                let is_near = origin + GRAIN + step > exact;
                assert!(is_near || place - exact > REACH, "{bytes} bytes by {step}: {origin}, not {exact}");
            }
            assert!(map.marks.len() as u64 <= REACH / GRAIN + 3, "{} marks", map.marks.len());
        }
    }
}
