//! Bit account of what requests say outside their bodies (P19).
//!
//! Each request is priced as a codeword of a prefix code, given what the same sandbox said to the same host before.
//! The code, in order:
//!
//! 1. A mark with five values: the next request; the same after a memory was lost or began; a partial block of an open
//!    body, or the end of one that is broken off, both of which `block` codes; the end of all. The last four cost 8 bits
//!    each, the first log2(256/252).
//! 2. The request as a whole, if it is an exact repeat of a known one: the choice among the known.
//! 3. Otherwise, after the escape of step 2, its components in order: method, number of segments, segments, names in
//!    the query, their values, names of the fields, their values, within a `cookie` field its names and values, and at
//!    the end how the request is sent: scheme, version, framing and port. Each is a choice among the values known for its slot, or the escape and a new text. That is a choice again, with fixed
//!    and public weights (`baseline`): a usual value of its place, a usual beginning and a literal, or a literal. A
//!    literal is a class of 8 alphabets, the length in the Elias delta code, and the symbols. A list of names is one
//!    choice if the whole list is known, from earlier requests or from the baseline.
//!
//! Every step divides the code space that is left among alternatives whose shares add up to at most 1 (`table`,
//! `baseline`, `literal`), each step's alternatives follow from what was decoded before, and `request` restores the request from
//! its components. Prices are -log2 of the shares, rounded up.
//! So by Kraft's inequality the sum of 2^-price over all sequences of requests that end with the mark of the end is at
//! most 1. Each sequence of at most N - 8 bits costs at most N with that mark, so there are at most 2^N of them, and
//! whoever sees one learns at most N bits, however the sandbox chose it. A budget sets the [`END_BITS`] aside
//! ([`crate::budget::BudgetKind::usable`]). There is one sequence for each host, so receivers who put together what
//! several hosts got learn at most 8 bits more for each further host. Not counted are bodies, and time: when requests
//! are sent, and in which order among several hosts.
//!
//! The receiver knows only what left, so [`HeaderAccount::learn`] is called for that alone, when nothing can refuse it
//! any more. A refused request is priced and forgotten. Price, charge and learning of one request are one step: the
//! caller holds a lock over them.
//!
//! Forgetting keeps the bound, because the code is a prefix code in every state of the tables: a forgotten value is
//! new again and costs its literal, a forgotten host begins with a mark of 8 bits.

mod baseline;
mod block;
mod digest;
mod literal;
mod request;
mod table;
#[cfg(test)]
mod tests;

pub use block::{PartialBlock, broken_body_price, partial_block_price};
pub use digest::{Digest, DigestKey};
pub use request::{COMPONENTS, RequestComponents, RequestParts};
pub use table::{HOST_BYTES, SLOTS, VALUES};

pub(crate) use request::{Component, ComponentContent, ComponentPlace, cookie_slot};
pub(crate) use table::clock;

use serde::{Deserialize, Serialize};

use crate::signals::SignalPlace;
use baseline::{baseline, field_list_price};
use literal::{BIT, choice_price, count_price};
use table::{HostTable, TableState, Weight};

/// Hosts remembered per sandbox. The one that was used least recently is forgotten first.
pub const HOSTS: usize = 64;
/// What the end of a sequence of requests costs. A budget sets it aside: see the argument above.
pub const END_BITS: u64 = 8;
/// Components that a price names.
const DEAREST: usize = 4;

/// log2(256/252): the mark of a request like any other, where the four others have 1/256 each.
const NEXT: u64 = 22_721;
/// The mark of the first request of a memory.
const FIRST: u64 = 8 * BIT;
/// The slot of whole requests. Keys of other slots are products, and a coincidence would be harmless.
const REQUEST_SLOT: u64 = 0;

/// What one sandbox said to each host.
#[derive(Clone, Debug)]
pub struct HeaderAccount {
    key: DigestKey,
    /// Sorted by nothing: there are few.
    hosts: Vec<HostAccount>,
    /// Counts calls, to find the host that was used least recently.
    uses: u64,
    most_hosts: usize,
}

#[derive(Clone, Debug)]
struct HostAccount {
    host: Digest,
    used: u64,
    table: HostTable,
}

/// What one request costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Price {
    pub millibits: u64,
    /// Whether it repeats a known request exactly.
    pub repeat: bool,
    /// The dearest components: their index among those of the request, and millionths of a bit.
    dearest: [(u16, u64); DEAREST],
}

/// An account as it is stored. Contains keyed digests, never content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountState {
    /// From the host that was used least recently to the newest.
    hosts: Vec<(Digest, TableState)>,
}

impl HeaderAccount {
    /// Opens the account of a sandbox that said nothing yet.
    ///
    /// The first request to a host pays for all its fields, as far as the baseline does not have them.
    pub fn new(key: DigestKey) -> Self {
        HeaderAccount { key, hosts: Vec::new(), uses: 0, most_hosts: HOSTS }
    }

    /// Opens an account from its stored state. The key must be the one that the state was made with; with another,
    /// everything is new again.
    pub fn from_state(key: DigestKey, state: &AccountState) -> Self {
        let skipped = state.hosts.len().saturating_sub(HOSTS);
        let hosts = state.hosts.iter().skip(skipped).zip(1..).map(|((host, table), used)| HostAccount {
            host: *host,
            used,
            table: HostTable::from_state(table),
        });
        let hosts: Vec<_> = hosts.collect();
        HeaderAccount { key, uses: hosts.len() as u64, hosts, most_hosts: HOSTS }
    }

    /// Returns the account as it is stored.
    pub fn state(&self) -> AccountState {
        let mut hosts: Vec<&HostAccount> = self.hosts.iter().collect();
        hosts.sort_by_key(|host| host.used);
        AccountState { hosts: hosts.iter().map(|host| (host.host, host.table.state())).collect() }
    }

    /// Returns how many hosts are remembered.
    pub fn host_count(&self) -> usize {
        self.hosts.len()
    }

    /// Tells whether a host is remembered, or could be without another being forgotten.
    pub fn has_room_for(&self, host: &str) -> bool {
        let host = self.key.digest(host.as_bytes());
        self.hosts.len() < self.most_hosts || self.hosts.iter().any(|known| known.host == host)
    }

    /// Remembers at most so many hosts from now on, and at most [`HOSTS`]; forgets those used least recently.
    pub fn limit_hosts(&mut self, most: usize) {
        self.most_hosts = most.min(HOSTS);
        self.hosts.sort_by_key(|host| std::cmp::Reverse(host.used));
        self.hosts.truncate(self.most_hosts);
        self.hosts.shrink_to_fit();
    }

    /// Splits a request with the key of this account.
    pub fn split<'a>(&self, parts: &RequestParts<'a>) -> RequestComponents<'a> {
        RequestComponents::new(&self.key, parts)
    }

    /// Returns what a request to `host` costs, and learns nothing.
    #[must_use = "a price is charged before the request leaves"]
    pub fn price(&self, host: &str, request: &RequestComponents<'_>) -> Price {
        let host = self.key.digest(host.as_bytes());
        match self.hosts.iter().find(|known| known.host == host) {
            Some(known) => known.table.price(NEXT, request),
            None => HostTable::default().price(FIRST, request),
        }
    }

    /// Remembers a request that leaves for `host`, so that what it has in common with later ones is cheap.
    pub fn learn(&mut self, host: &str, request: &RequestComponents<'_>) {
        let host = self.key.digest(host.as_bytes());
        self.uses += 1;
        let at = self.hosts.iter().position(|known| known.host == host).unwrap_or_else(|| self.open(host));
        if let Some(known) = self.hosts.get_mut(at) {
            known.used = self.uses;
            known.table.learn_request(request);
        }
    }

    fn open(&mut self, host: Digest) -> usize {
        let entry = HostAccount { host, used: self.uses, table: HostTable::default() };
        if self.hosts.len() < self.most_hosts {
            self.hosts.push(entry);
            return self.hosts.len() - 1;
        }
        let oldest = self.hosts.iter().enumerate().min_by_key(|(_, host)| host.used).map_or(0, |(at, _)| at);
        if let Some(host) = self.hosts.get_mut(oldest) {
            *host = entry;
        }
        oldest
    }
}

impl Price {
    /// Returns the dearest components, the dearest first: where they are, and their price in bits, rounded up.
    pub fn dearest(&self, request: &RequestComponents<'_>) -> Vec<(SignalPlace, u64)> {
        let priced = self.dearest.iter().filter(|(_, price)| *price > 0);
        priced
            .filter_map(|(at, price)| {
                let component = request.components().get(usize::from(*at))?;
                Some((component.place.signal_place(), price.div_ceil(BIT)))
            })
            .collect()
    }
}

impl HostTable {
    fn price(&self, mark: u64, request: &RequestComponents<'_>) -> Price {
        let whole = self.weight(REQUEST_SLOT, request.identity());
        let mut price = mark + whole.price();
        let mut dearest = [(0, 0); DEAREST];
        if !whole.known {
            price = price.saturating_add(request.excess());
            for (at, component) in request.components().iter().enumerate() {
                let part = self.component_price(request, component);
                price = price.saturating_add(part);
                note_dearest(&mut dearest, at, part);
            }
        }
        Price { millibits: price.div_ceil(BIT / 1_000), repeat: whole.known, dearest }
    }

    fn component_price(&self, request: &RequestComponents<'_>, component: &Component<'_>) -> u64 {
        let weight = self.weight(component.slot, component.digest);
        if weight.known {
            return weight.price();
        }
        let text = || baseline(component.place).cheapest(component.bytes).1;
        let new = match (component.content, component.place) {
            (ComponentContent::Text, _) | (ComponentContent::Name, ComponentPlace::FieldName) => text(),
            (ComponentContent::Name, _) => text() + BIT, // whether it has a value
            (ComponentContent::List { count, .. }, place) => {
                self.list_price(request, component, count, place)
            }
        };
        weight.price().saturating_add(new)
    }

    fn list_price(
        &self,
        request: &RequestComponents<'_>,
        list: &Component<'_>,
        count: usize,
        place: ComponentPlace<'_>,
    ) -> u64 {
        let names = request.names(list.content).iter();
        let mut price = 0;
        if place == ComponentPlace::FieldName {
            let (known, choice) = field_list_price(names.clone().map(|name| name.bytes));
            if known.is_some() {
                return choice;
            }
            price = choice;
        }
        price + count_price(count as u64) + names.map(|name| self.component_price(request, name)).sum::<u64>()
    }

    /// Counts what a request says. A repeat says one thing, and so does a known list.
    fn learn_request(&mut self, request: &RequestComponents<'_>) {
        let repeat = self.weight(REQUEST_SLOT, request.identity()).known;
        self.learn(REQUEST_SLOT, request.identity());
        if repeat {
            return;
        }
        for component in request.components() {
            let names = request.names(component.content);
            if !names.is_empty() && !self.weight(component.slot, component.digest).known {
                for name in names {
                    self.learn(name.slot, name.digest);
                }
            }
            self.learn(component.slot, component.digest);
        }
    }
}

impl Weight {
    fn price(self) -> u64 {
        choice_price(self.weight, self.total)
    }
}

fn note_dearest(dearest: &mut [(u16, u64); DEAREST], at: usize, price: u64) {
    let Some(last) = dearest.last_mut() else { return };
    if price <= last.1 {
        return;
    }
    *last = (at as u16, price);
    dearest.sort_unstable_by_key(|(_, price)| std::cmp::Reverse(*price));
}
