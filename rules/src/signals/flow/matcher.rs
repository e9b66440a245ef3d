//! Looks for recalled text in what leaves.

use hashbrown::HashMap;

use super::table::{FlowSnapshot, seconds};
use super::window::Window;
use super::{GRAM, GUARANTEED_RUN, MAX_UNDECIDED};
use crate::ids::{BankId, BankPattern};
use crate::signals::{Signal, SignalCode, SignalPlace, ViewMatcher};

/// The banks whose text one destination may receive: a host, or the bank that a request retains into. Who may receive
/// what is decided elsewhere; the default is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowRules {
    may_receive: Vec<BankPattern>,
}

/// How much of a bank's text was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowMatch {
    pub bank: BankId,
    /// The normalised characters that match, estimated: the middle of what the matching fingerprints allow.
    pub characters: u64,
}

/// The end of what left, so that a text that is split over requests is recognised when it continues. It has room for
/// [`GRAM`] - 1 characters, kept as keyed values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowCarry([u64; GRAM]);

/// Looks for recalled text in one view of what leaves, and reports each bank that the destination may not receive
/// once, at the first match. [`FlowMatcher::matched`] has the running count.
///
/// A view may be more than one stretch of bytes. Fields of a request, or the values of its query, fed in sequence
/// without [`ViewMatcher::finish`] between them, count as one text: a text that is split over them is recognised. A
/// text that is split over requests is recognised if each piece has [`GUARANTEED_RUN`] characters, or if the caller
/// keeps a [`FlowCarry`] for each sandbox and host and the pieces come in order.
#[derive(Debug)]
pub struct FlowMatcher {
    snapshot: FlowSnapshot,
    rules: FlowRules,
    now: u32,
    place: SignalPlace,
    window: Window,
    found: Found,
    fed: usize,
    is_finished: bool,
}

#[derive(Debug, Default)]
struct Found {
    matches: Vec<FlowMatch>,
    /// For each bank its place in `matches` and where it matched last.
    places: HashMap<u16, (usize, u64), foldhash::fast::FixedState>,
    /// How many of `matches` were reported or passed over.
    reported: usize,
}

impl FlowRules {
    pub fn new(may_receive: Vec<BankPattern>) -> Self {
        FlowRules { may_receive }
    }

    pub fn may_receive(&self, bank: &BankId) -> bool {
        self.may_receive.iter().any(|pattern| pattern.matches(bank))
    }
}

impl FlowMatcher {
    pub fn new(snapshot: FlowSnapshot, rules: FlowRules, now: u64) -> Self {
        FlowMatcher {
            window: Window::new(&snapshot.key),
            snapshot,
            rules,
            now: seconds(now),
            place: SignalPlace::Body,
            found: Found::default(),
            fed: 0,
            is_finished: false,
        }
    }

    /// Names the place that the next findings are in; at first it is the body.
    pub fn set_place(&mut self, place: SignalPlace) {
        self.place = place;
    }

    /// Continues behind what left earlier.
    pub fn resume(&mut self, carry: &FlowCarry) {
        self.begin();
        self.window.resume(&carry.0);
    }

    /// Returns the end of the view, also after [`ViewMatcher::finish`].
    pub fn carry(&self) -> FlowCarry {
        let mut tail = self.window.tail();
        // A whole gram would match again.
        if let Some(first) = tail.first_mut() {
            *first = 0;
        }
        FlowCarry(tail)
    }

    /// Returns what was found in this view, or in the last one until the next begins. Banks that the destination may
    /// receive are included.
    pub fn matched(&self) -> &[FlowMatch] {
        &self.found.matches
    }

    /// Takes the next bytes without reporting.
    pub(super) fn take(&mut self, bytes: &[u8]) {
        if self.is_finished {
            self.begin();
        }
        if self.snapshot.is_empty() {
            return;
        }
        self.fed = self.fed.saturating_add(bytes.len());
        let (snapshot, now, found) = (&self.snapshot, self.now, &mut self.found);
        self.window.feed_alternate(bytes, |characters, hash| {
            if snapshot.storage.may_contain(hash) {
                found.look_up(snapshot, hash, characters, now);
            }
        });
    }

    fn begin(&mut self) {
        self.window.clear();
        self.found.clear();
        (self.fed, self.is_finished) = (0, false);
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
            let (at, last) = self.places.entry(entry.bank).or_insert_with(|| {
                self.matches.push(FlowMatch { bank: bank.clone(), characters: 0 });
                (self.matches.len() - 1, 0)
            });
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

    fn clear(&mut self) {
        self.matches.clear();
        self.places.clear();
        self.reported = 0;
    }
}

impl ViewMatcher for FlowMatcher {
    fn feed(&mut self, bytes: &[u8], found: &mut Vec<Signal>) {
        self.take(bytes);
        for new in self.found.matches.iter().skip(self.found.reported) {
            if !self.rules.may_receive(&new.bank) {
                found.push(Signal {
                    code: SignalCode::MemoryFlow,
                    place: self.place.clone(),
                    encodings: Vec::new(),
                    what: format!("text of bank \"{}\"", new.bank),
                    value: new.characters,
                    threshold: GUARANTEED_RUN as u64,
                });
            }
        }
        self.found.reported = self.found.matches.len();
    }

    fn finish(&mut self, _found: &mut Vec<Signal>) {
        self.is_finished = true;
    }

    fn undecided(&self) -> usize {
        match self.is_finished {
            true => 0,
            false => self.fed.min(MAX_UNDECIDED),
        }
    }

    /// None: every text could go on to be recalled text.
    fn begun(&self) -> usize {
        0
    }
}
