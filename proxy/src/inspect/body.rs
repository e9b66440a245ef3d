//! Bodies, searched piece by piece before each is forwarded.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rules::signals::content::{ContentScanner, ScanLimits, UndecidedTail};
use rules::signals::{Encoding, Signal, SignalPlace};

use super::scan_set::{AttemptMatchers, SharedMatchers};
use super::turns::ScanTurns;
use crate::quota::cost::SEARCH_BYTES;

/// Most bytes that are searched in one turn.
const PIECE_BYTES: usize = 16 << 10;
/// A piece that takes longer than this is hard to search, and those after it are searched off the workers.
const LONG_PIECE: Duration = Duration::from_millis(1);

/// Searches the body of one request.
pub(crate) struct BodyInspector {
    search: BodySearch,
    /// How the body is compressed, if that is declared and known.
    encoding: Option<Encoding>,
    /// Whether a policy, or what we inject, can make us deny what is found.
    denies: bool,
}

/// The search of one body, in turns.
pub(super) struct BodySearch {
    matchers: Arc<AttemptMatchers>,
    scanner: ContentScanner,
    turns: Arc<ScanTurns>,
    is_hard: bool,
}

impl BodyInspector {
    pub(super) fn new(
        matchers: &Arc<AttemptMatchers>,
        encoding: Option<&[u8]>,
        turns: &Arc<ScanTurns>,
    ) -> Self {
        let encoding = encoding.and_then(known_encoding);
        let (search, denies) = (BodySearch::new(matchers, encoding, turns), matchers.denies_content());
        BodyInspector { search, encoding, denies }
    }

    /// Begins again, for a request that is sent again.
    pub(crate) fn restart(&mut self) {
        self.search.scanner = scanner(&self.search.matchers, self.encoding);
    }

    /// Searches the next bytes, and returns what was found.
    pub(crate) async fn search(&mut self, bytes: Option<&Bytes>, last: bool) -> Vec<Signal> {
        let mut found = Vec::new();
        self.search.feed(bytes.map_or(&[][..], |bytes| bytes), &mut found).await;
        if last {
            self.search.finish(&mut found).await;
        }
        found
    }

    /// Returns how many of the last bytes must not leave yet.
    pub(crate) fn undecided(&self, tail: UndecidedTail) -> usize {
        match (tail, self.denies) {
            (UndecidedTail::Begun, false) => 0, // nobody would refuse it
            (UndecidedTail::Begun, true) | (UndecidedTail::Possible, _) => {
                self.search.scanner.undecided(tail)
            }
        }
    }
}

impl BodySearch {
    pub(super) fn new(
        matchers: &Arc<AttemptMatchers>,
        encoding: Option<Encoding>,
        turns: &Arc<ScanTurns>,
    ) -> Self {
        let scanner = scanner(matchers, encoding);
        BodySearch { matchers: matchers.clone(), scanner, turns: turns.clone(), is_hard: false }
    }

    pub(super) async fn feed(&mut self, bytes: &[u8], found: &mut Vec<Signal>) {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.run(|scanner, found| scanner.feed(piece, found), found).await;
        }
    }

    pub(super) async fn finish(&mut self, found: &mut Vec<Signal>) {
        self.run(ContentScanner::finish, found).await;
    }

    async fn run(
        &mut self,
        search: impl FnOnce(&mut ContentScanner, &mut Vec<Signal>),
        found: &mut Vec<Signal>,
    ) {
        let _turn = self.turns.wait(self.matchers.signals()).await;
        let started = Instant::now();
        match self.is_hard {
            // Gives the other tasks of this worker to another thread meanwhile.
            true => tokio::task::block_in_place(|| search(&mut self.scanner, found)),
            false => search(&mut self.scanner, found),
        }
        self.is_hard = started.elapsed() > LONG_PIECE;
    }
}

fn known_encoding(coding: &[u8]) -> Option<Encoding> {
    match coding.to_ascii_lowercase().as_slice() {
        b"gzip" | b"x-gzip" => Some(Encoding::Gzip),
        b"deflate" => Some(Encoding::Deflate),
        _ => None,
    }
}

fn scanner(matchers: &Arc<AttemptMatchers>, encoding: Option<Encoding>) -> ContentScanner {
    let factory = Arc::new(SharedMatchers(matchers.clone()));
    let mut scanner = ContentScanner::new(SignalPlace::Body, factory, ScanLimits::default());
    if let Some(encoding) = encoding {
        scanner.declare(encoding);
    }
    scanner
}

/// Searches a body for a trial, in which nobody waits.
pub(super) fn search_at_once(
    matchers: &Arc<AttemptMatchers>,
    coding: Option<&[u8]>,
    body: &[u8],
) -> Vec<Signal> {
    let (mut scanner, mut found) = (scanner(matchers, coding.and_then(known_encoding)), Vec::new());
    scanner.feed(body, &mut found);
    scanner.finish(&mut found);
    found
}

/// Searches a body that is there as a whole. Without memory for that, the attempt is refused when it is judged.
pub(super) async fn search_whole(
    matchers: &Arc<AttemptMatchers>,
    turns: &Arc<ScanTurns>,
    body: &[u8],
    found: &mut Vec<Signal>,
) {
    let Some(_memory) = matchers.reserve(body.len().min(SEARCH_BYTES)) else { return };
    let mut search = BodySearch::new(matchers, None, turns);
    search.feed(body, found).await;
    search.finish(found).await;
}
