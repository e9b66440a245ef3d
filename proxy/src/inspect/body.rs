//! Bodies, searched chunk by chunk before each is forwarded.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use rules::signals::content::{ContentScanner, MAX_UNDECIDED, ScanLimits};
use rules::signals::{Encoding, Signal, SignalPlace};

use super::scan_set::{AttemptMatchers, SharedMatchers};

/// Memory that the inspection of one body takes: what is held back, and the scanner with its views.
pub(crate) const HELD_BYTES: u64 = 2 * MAX_UNDECIDED as u64;

/// Searches the body of one request.
pub(crate) struct BodyInspector {
    matchers: Arc<AttemptMatchers>,
    /// How the body is compressed, if that is declared and known.
    encoding: Option<Encoding>,
    scanner: ContentScanner,
    /// Seen, and not forwarded yet: it may be the beginning of a match.
    held: BytesMut,
    hold: HoldBack,
}

/// How a body arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyFraming {
    /// Its length is announced, so the server expects all of it.
    Length,
    Chunks,
    /// Client and server exchange messages in one request, as gRPC does.
    Messages,
}

/// Whether bytes wait for the end of a match.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HoldBack {
    /// The server may wait for the very bytes that we would hold: a stream of messages, or a body without a length that
    /// nothing is denied in.
    Never,
    Undecided,
}

impl BodyInspector {
    pub(super) fn new(
        matchers: &Arc<AttemptMatchers>,
        encoding: Option<&[u8]>,
        framing: BodyFraming,
    ) -> Self {
        let encoding = encoding.and_then(|coding| match coding.to_ascii_lowercase().as_slice() {
            b"gzip" | b"x-gzip" => Some(Encoding::Gzip),
            b"deflate" => Some(Encoding::Deflate),
            _ => None,
        });
        let hold = match framing {
            BodyFraming::Length => HoldBack::Undecided,
            BodyFraming::Chunks if matchers.denies_content() => HoldBack::Undecided,
            BodyFraming::Chunks | BodyFraming::Messages => HoldBack::Never,
        };
        let (matchers, scanner) = (matchers.clone(), scanner(matchers, encoding));
        BodyInspector { matchers, encoding, scanner, held: BytesMut::new(), hold }
    }

    /// Begins anew, for a request that is sent again.
    pub(crate) fn restart(&mut self) {
        self.scanner = scanner(&self.matchers, self.encoding);
        self.held.clear();
    }

    /// Searches the next chunk. Returns what was found, and what may be forwarded unless that is denied.
    pub(crate) fn feed(&mut self, chunk: Option<&Bytes>, last: bool) -> (Vec<Signal>, Option<Bytes>) {
        let mut found = Vec::new();
        if let Some(chunk) = chunk {
            self.scanner.feed(chunk, &mut found);
        }
        if last {
            self.scanner.finish(&mut found);
        }
        let undecided = match self.hold {
            HoldBack::Undecided if !last => self.scanner.undecided(),
            HoldBack::Never | HoldBack::Undecided => 0,
        };
        (found, self.release(chunk, undecided))
    }

    /// Returns all but the last `undecided` bytes.
    fn release(&mut self, chunk: Option<&Bytes>, undecided: usize) -> Option<Bytes> {
        if self.held.is_empty() && undecided == 0 {
            return chunk.cloned();
        }
        if let Some(chunk) = chunk {
            self.held.extend_from_slice(chunk);
        }
        let ready = self.held.len().saturating_sub(undecided);
        (ready > 0).then(|| self.held.split_to(ready).freeze())
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

/// Searches a body that is there as a whole.
pub(super) fn scan_whole(matchers: &Arc<AttemptMatchers>, body: &[u8], found: &mut Vec<Signal>) {
    let mut scanner = scanner(matchers, None);
    scanner.feed(body, found);
    scanner.finish(found);
}
