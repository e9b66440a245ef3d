//! Looks for recalled text in what leaves.

use hashbrown::HashMap;

use super::table::{FlowSnapshot, seconds};
use super::window::{FlowKey, Window};
use super::{GUARANTEED_RUN, MAX_UNDECIDED};
use crate::ids::BankId;
use crate::signals::{Signal, SignalCode, SignalPlace};

/// How much of a bank's text was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowMatch {
    pub bank: BankId,
    /// The normalised characters that match, estimated: the middle of what the matching fingerprints allow.
    pub characters: u64,
}

/// Looks for recalled text in one view of what leaves, and returns each bank once, at the first match;
/// [`FlowMatcher::matched`] has the running count. Who may receive a bank's text is decided by the caller, who also
/// brings the snapshot for each piece: a matcher that kept one would keep the memory of outdated tables.
///
/// A view may be more than one stretch of bytes. Fields of a request, or the values of its query, fed in sequence
/// without [`FlowMatcher::finish`] between them, count as one text: a text that is split over them is recognised. A
/// text that is split over requests is recognised if each piece has [`GUARANTEED_RUN`] characters.
#[derive(Debug)]
pub struct FlowMatcher {
    window: Window,
    found: Found,
    fed: usize,
}

#[derive(Debug, Default)]
struct Found {
    matches: Vec<FlowMatch>,
    /// For each bank its place in `matches` and where it matched last.
    places: HashMap<BankId, (usize, u64), foldhash::fast::FixedState>,
}

impl FlowMatch {
    /// Returns the signal for a destination that may not receive the bank's text.
    pub fn signal(&self) -> Signal {
        Signal {
            code: SignalCode::MemoryFlow,
            place: SignalPlace::Body,
            encodings: Vec::new(),
            what: format!("text of memory bank `{}`", self.bank),
            value: self.characters,
            threshold: GUARANTEED_RUN as u64,
        }
    }
}

impl FlowMatcher {
    /// Makes one for tables with the same key.
    pub fn new(key: &FlowKey) -> Self {
        FlowMatcher { window: Window::new(key), found: Found::default(), fed: 0 }
    }

    /// Returns what was found in this view so far.
    pub fn matched(&self) -> &[FlowMatch] {
        &self.found.matches
    }

    /// Takes the next bytes, and returns the banks that are found in this view for the first time.
    pub fn feed(&mut self, snapshot: &FlowSnapshot, bytes: &[u8], now: u64) -> &[FlowMatch] {
        if snapshot.is_empty() {
            return &[];
        }
        let known = self.found.matches.len();
        self.fed = self.fed.saturating_add(bytes.len());
        let (now, found) = (seconds(now), &mut self.found);
        self.window.feed_alternate(bytes, |characters, hash| {
            if snapshot.storage.may_contain(hash) {
                found.look_up(snapshot, hash, characters, now);
            }
        });
        self.found.matches.get(known..).unwrap_or_default()
    }

    /// Ends the view. The matcher is ready for another one.
    pub fn finish(&mut self) {
        self.window.clear();
        self.found = Found::default();
        self.fed = 0;
    }

    /// Returns how many of the last bytes may belong to a run that is not recognised yet.
    pub fn undecided(&self) -> usize {
        self.fed.min(MAX_UNDECIDED)
    }
}

impl Found {
    #[cold]
    #[inline(never)]
    fn look_up(&mut self, snapshot: &FlowSnapshot, hash: u64, characters: u64, now: u32) {
        snapshot.storage.find(hash, |entry| {
            if snapshot.is_expired(&entry, now) {
                return;
            }
            // A bank that is newer than the snapshot has no label here.
            let Some(bank) = snapshot.banks.get(usize::from(entry.bank)) else { return };
            // By name: the index of a bank may change with the snapshot.
            if !self.places.contains_key(bank) {
                self.places.insert(bank.clone(), (self.matches.len(), 0));
                self.matches.push(FlowMatch { bank: bank.clone(), characters: 0 });
            }
            let Some((at, last)) = self.places.get_mut(bank) else { return };
            // Around one matching gram, a run has up to 24 more characters on either side, so 24 on average, and the
            // next gram of the same run adds its distance.
            let run = GUARANTEED_RUN as u64;
            if let Some(found) = self.matches.get_mut(*at) {
                let added =
                    if found.characters == 0 { run } else { characters.saturating_sub(*last).min(run) };
                found.characters = found.characters.saturating_add(added);
            }
            *last = characters;
        });
    }
}
