//! A view: bytes as they are, or as one or two encodings give them.

use super::nested::Nested;
use super::{BoxedMatcher, Shared, UndecidedTail};
use crate::signals::Encoding;
use crate::signals::decode::MAX_DEPTH;

/// How many bytes all passes of a view take at a time, so that they find them in the cache.
const BLOCK: usize = 16 * 1024;

pub(super) struct View {
    encodings: Vec<Encoding>,
    matchers: Vec<BoxedMatcher>,
    /// What is encoded in this view, except in the deepest.
    nested: Option<Box<Nested>>,
    depth: usize,
}

impl View {
    pub(super) fn new(matchers: Vec<BoxedMatcher>, depth: usize) -> View {
        let nested = (depth < MAX_DEPTH).then(Box::default);
        View { encodings: Vec::with_capacity(MAX_DEPTH), matchers, nested, depth }
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// Begins another view with the same matchers.
    pub(super) fn begin(&mut self, encodings: &[Encoding], min_run: usize) {
        self.encodings.clear();
        self.encodings.extend_from_slice(encodings);
        if let Some(nested) = &mut self.nested {
            nested.begin(min_run);
        }
    }

    pub(super) fn declare(&mut self, encoding: Encoding) {
        if let Some(nested) = &mut self.nested {
            nested.declare(encoding);
        }
    }

    pub(super) fn feed(&mut self, bytes: &[u8], shared: &mut Shared) {
        for block in bytes.chunks(BLOCK) {
            self.matchers.iter_mut().for_each(|matcher| matcher.feed(block, &mut shared.scratch));
            shared.report(&self.encodings);
            if let Some(nested) = &mut self.nested {
                nested.feed(block, &self.encodings, shared);
            }
        }
    }

    pub(super) fn finish(&mut self, shared: &mut Shared) {
        if let Some(nested) = &mut self.nested {
            nested.finish(&self.encodings, shared);
        }
        self.matchers.iter_mut().for_each(|matcher| matcher.finish(&mut shared.scratch));
        shared.report(&self.encodings);
    }

    /// Returns how many of the last bytes of this view belong to a match that is not complete.
    pub(super) fn undecided(&self, tail: UndecidedTail) -> u64 {
        let matchers = self.matchers.iter().map(|matcher| match tail {
            UndecidedTail::Possible => matcher.undecided(),
            UndecidedTail::Begun => tail.at_least(matcher.begun()),
        });
        let nested = self.nested.as_ref().map_or(0, |nested| nested.undecided(tail));
        (matchers.max().unwrap_or_default() as u64).max(nested)
    }
}
