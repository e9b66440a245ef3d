//! Scrubs one response as it streams through.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::messages::GrpcFraming;
use super::search::MAX_HELD;
use super::views::Extent;
use super::{EchoPatterns, mask_echoes};

/// Octets held back from which on small pieces wait for each other: each search takes as long as all that is held.
const PATIENT_FROM: usize = 1 << 10;
/// A piece of this part of what is held back is searched at once.
const PATIENT_PART: usize = 8;

/// Scrubs one response as it streams through.
pub struct ResponseScrubber {
    patterns: Arc<EchoPatterns>,
    held: BytesMut,
    /// How much of what is held back was searched.
    searched: usize,
    messages: Option<GrpcFraming>,
    found: usize,
    labels: BTreeSet<usize>,
}

impl ResponseScrubber {
    pub fn new(patterns: Arc<EchoPatterns>) -> Self {
        let (held, labels) = (BytesMut::new(), BTreeSet::new());
        ResponseScrubber { patterns, held, searched: 0, messages: None, found: 0, labels }
    }

    /// Treats the body as gRPC messages: nothing is held back at the end of a message.
    pub(crate) fn expect_grpc(&mut self) {
        self.messages = Some(GrpcFraming::default());
    }

    /// How many octets are held back.
    pub(super) fn held_back(&self) -> usize {
        self.held.len()
    }

    /// Returns how many echoes were masked.
    pub fn echo_count(&self) -> usize {
        self.found
    }

    /// What the credentials are called that were masked.
    pub(crate) fn found_labels(&self) -> impl Iterator<Item = &str> {
        self.labels.iter().filter_map(|label| self.patterns.labels.get(*label)).map(String::as_str)
    }

    /// Begins another text for the same credentials.
    pub(super) fn fresh(&self) -> Self {
        ResponseScrubber::new(self.patterns.clone())
    }

    /// Takes note of what was found in another text.
    pub(super) fn add_found(&mut self, other: &ResponseScrubber) {
        self.found += other.found;
        self.labels.extend(&other.labels);
    }

    /// Masks every echo in a header field and returns how many there were.
    pub(crate) fn mask_field(&mut self, field: &mut [u8]) -> usize {
        let findings = self.patterns.search(field, Extent::Whole);
        self.labels.extend(findings.echoes.iter().map(|echo| echo.label));
        let found = mask_echoes(field, &findings);
        self.found += found;
        found
    }

    /// Whether the name of a field contains an echo, which then counts as found. The field must not be passed on.
    pub(crate) fn find_in_name(&mut self, name: &str) -> bool {
        let label = self.patterns.label_in_name(name);
        self.labels.extend(label);
        self.found += usize::from(label.is_some());
        label.is_some()
    }

    /// Takes the next chunk and returns what may be passed on. Holds back only a tail that could be the start of an
    /// echo, so that server-sent events are not delayed.
    pub fn scrub(&mut self, piece: Option<&Bytes>, last: bool) -> Bytes {
        let over = match (&mut self.messages, piece) {
            (Some(messages), Some(piece)) => messages.advance(piece),
            (Some(_), None) | (None, _) => false,
        };
        let extent = if last || over { Extent::Whole } else { Extent::Begun };
        let text = match piece {
            Some(piece) if self.held.is_empty() => piece.clone(),
            _ => {
                self.held.extend_from_slice(piece.map(Bytes::as_ref).unwrap_or_default());
                if extent == Extent::Begun && self.is_patient() {
                    return Bytes::new();
                }
                std::mem::take(&mut self.held).freeze()
            }
        };
        let findings = self.patterns.search(&text, extent);
        self.held = BytesMut::from(text.get(findings.decided..).unwrap_or_default());
        self.searched = self.held.len();
        if findings.echoes.is_empty() {
            return text.slice(..findings.decided);
        }
        self.labels.extend(findings.echoes.iter().map(|echo| echo.label));
        let mut masked = BytesMut::from(text.get(..findings.decided).unwrap_or_default());
        self.found += mask_echoes(&mut masked, &findings);
        masked.freeze()
    }

    /// Whether what is held back waits for more: it is long, and what came since it was searched is little and goes on
    /// like an echo.
    fn is_patient(&self) -> bool {
        let fresh = self.held.get(self.searched..).unwrap_or_default();
        let goes_on = |octet: &u8| *octet != b'\n' && self.patterns.is_part(*octet);
        (PATIENT_FROM..MAX_HELD).contains(&self.held.len())
            && fresh.len() < self.searched / PATIENT_PART
            && fresh.iter().all(goes_on)
    }
}
