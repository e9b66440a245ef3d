//! A request outside its body, split into components: what the bit account prices and the shape detectors compare.
//!
//! The split loses nothing: joined again, the components give the same method, path, query and fields. So two requests
//! that differ, differ in a component.

use super::digest::{Digest, DigestKey, ListDigest};
use super::literal::{BIT, literal_price};
use crate::signals::SignalPlace;

/// Components kept per request, and names besides. What a request has beyond is priced as literals.
pub const COMPONENTS: usize = 1_024;
/// Segments of a path from this one on share a slot.
pub(super) const SEGMENT_SLOTS: usize = 16;
/// Components that most requests do not exceed.
const USUAL_COMPONENTS: usize = 48;

/// What a request says outside its body, as the sandbox chose it. Fields that Sandbar sets or derives, such as `host`
/// or a `content-length`, are left out by the caller.
#[derive(Clone, Copy, Debug)]
pub struct RequestParts<'a> {
    pub method: &'a str,
    /// The path, with its leading slash and as it will be sent.
    pub path: &'a [u8],
    /// What follows the question mark, if there is one.
    pub query: Option<&'a [u8]>,
    /// Lower-case names and values, in the order they will be sent.
    pub fields: &'a [(&'a str, &'a [u8])],
}

/// The components of one request with their digests. Made once, for [`super::HeaderAccount`] and
/// [`crate::signals::shape::HostShape`].
#[derive(Clone, Debug)]
pub struct RequestComponents<'a> {
    components: Vec<Component<'a>>,
    names: Vec<Component<'a>>,
    /// Digest of the request as a whole.
    identity: Digest,
    /// Price of what exceeds [`COMPONENTS`].
    excess: u64,
    key: DigestKey,
}

/// One choice that a request makes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Component<'a> {
    pub(crate) place: ComponentPlace<'a>,
    pub(crate) slot: u64,
    pub(crate) digest: Digest,
    pub(crate) bytes: &'a [u8],
    pub(crate) content: ComponentContent,
}

/// What a component is a choice of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ComponentContent {
    /// A text.
    Text,
    /// A name in a list. A name without `=` has no value.
    Name,
    /// How many things follow, and their names, if they have any: those from `first` on, `kept` of them.
    List { count: usize, first: usize, kept: usize },
}

/// Where in its request a component is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ComponentPlace<'a> {
    Method,
    Path,
    Segment(usize),
    Query,
    /// The value of the pair with this name.
    QueryValue(&'a [u8]),
    FieldName,
    Field(&'a str),
    Cookies,
    Cookie(&'a [u8]),
    /// How the request is sent.
    Sending,
}

/// The kinds of slots. A slot key is a kind combined with a position or the digest of a name.
#[derive(Clone, Copy)]
pub(super) enum SlotKind {
    Method = 1,
    PathLength,
    Segment,
    QueryList,
    QueryName,
    QueryValue,
    FieldList,
    FieldName,
    FieldValue,
    CookieList,
    CookieName,
    CookieValue,
    Sending,
}

impl SlotKind {
    /// Returns the key of a slot. Two slots with one key would be priced as one, which is harmless.
    pub(super) fn key(self, of: u64) -> u64 {
        (of ^ (self as u64) << 58).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

impl<'a> RequestComponents<'a> {
    /// Splits a request.
    pub fn new(key: &DigestKey, parts: &RequestParts<'a>) -> Self {
        let mut splitter = Splitter {
            key,
            components: Vec::with_capacity(USUAL_COMPONENTS),
            names: Vec::with_capacity(USUAL_COMPONENTS),
            identity: key.list(),
            excess: 0,
        };
        splitter.text(ComponentPlace::Method, SlotKind::Method.key(0), parts.method.as_bytes());
        splitter.path(parts.path);
        splitter.query(parts.query);
        splitter.fields(parts.fields);
        let Splitter { components, names, identity, excess, .. } = splitter;
        RequestComponents { components, names, identity: identity.finish(), excess, key: *key }
    }

    /// Adds how the request is sent, in one text: what the origin server sees of it and the sandbox chose. An account
    /// prices all requests with it, or all without.
    #[must_use]
    pub fn sent_as(mut self, sending: &'a [u8]) -> Self {
        let (place, slot) = (ComponentPlace::Sending, SlotKind::Sending.key(0));
        let digest = self.key.digest(sending);
        let mut identity = self.key.list();
        identity.add(self.identity);
        identity.add(digest);
        self.identity = identity.finish();
        match self.components.len() < COMPONENTS {
            true => {
                let content = ComponentContent::Text;
                self.components.push(Component { place, slot, digest, bytes: sending, content });
            }
            false => self.excess += literal_price(sending),
        }
        self
    }

    pub(crate) fn components(&self) -> &[Component<'a>] {
        &self.components
    }

    /// Returns the names of a list.
    pub(crate) fn names(&self, content: ComponentContent) -> &[Component<'a>] {
        match content {
            ComponentContent::List { first, kept, .. } => {
                self.names.get(first..first + kept).unwrap_or_default()
            }
            ComponentContent::Text | ComponentContent::Name => &[],
        }
    }

    pub(crate) fn identity(&self) -> Digest {
        self.identity
    }

    /// Returns the key that the digests were made with.
    pub(crate) fn key(&self) -> &DigestKey {
        &self.key
    }

    pub(crate) fn excess(&self) -> u64 {
        self.excess
    }
}

impl ComponentPlace<'_> {
    /// Returns the place for a report.
    pub(crate) fn signal_place(self) -> SignalPlace {
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        match self {
            ComponentPlace::Method => SignalPlace::Method,
            ComponentPlace::Path | ComponentPlace::Segment(_) => SignalPlace::Path,
            ComponentPlace::Query | ComponentPlace::QueryValue(_) => SignalPlace::Query,
            ComponentPlace::FieldName => SignalPlace::FieldName,
            ComponentPlace::Field(name) => SignalPlace::Field(name.to_owned()),
            ComponentPlace::Cookies => SignalPlace::Field("cookie".to_owned()),
            ComponentPlace::Cookie(name) => SignalPlace::Cookie(text(name)),
            ComponentPlace::Sending => SignalPlace::Attempt,
        }
    }
}

/// Returns the slot of the values of a cookie.
pub(crate) fn cookie_slot(key: &DigestKey, name: &[u8]) -> u64 {
    SlotKind::CookieValue.key(key.digest(name).0)
}

struct Splitter<'k, 'a> {
    key: &'k DigestKey,
    components: Vec<Component<'a>>,
    names: Vec<Component<'a>>,
    identity: ListDigest,
    excess: u64,
}

/// A list of names that is being read.
struct OpenList {
    /// The component of the list, if there was room for it.
    at: Option<usize>,
    first: usize,
    kept: usize,
    count: usize,
    digest: ListDigest,
    /// Digest of the previous name: what follows it is likely to be what followed it before.
    previous: u64,
}

impl<'a> Splitter<'_, 'a> {
    fn path(&mut self, path: &'a [u8]) {
        let count = memchr::memchr_iter(b'/', path).count() + 1;
        self.push(Component {
            place: ComponentPlace::Path,
            slot: SlotKind::PathLength.key(0),
            digest: Digest(count as u64, 0),
            bytes: &[],
            content: ComponentContent::List { count, first: 0, kept: 0 },
        });
        for (at, segment) in path.split(|byte| *byte == b'/').enumerate() {
            let slot = SlotKind::Segment.key(at.min(SEGMENT_SLOTS) as u64);
            self.text(ComponentPlace::Segment(at), slot, segment);
        }
    }

    fn query(&mut self, query: Option<&'a [u8]>) {
        let kinds = (SlotKind::QueryName, SlotKind::QueryValue);
        let list = self.open_list(ComponentPlace::Query, SlotKind::QueryList);
        let pairs = query.into_iter().flat_map(|query| query.split(|byte| *byte == b'&'));
        self.pairs(list, pairs, kinds, ComponentPlace::Query, ComponentPlace::QueryValue);
    }

    fn cookies(&mut self, cookies: &'a [u8]) {
        let kinds = (SlotKind::CookieName, SlotKind::CookieValue);
        let list = self.open_list(ComponentPlace::Cookies, SlotKind::CookieList);
        self.pairs(list, CookiePairs(Some(cookies)), kinds, ComponentPlace::Cookies, ComponentPlace::Cookie);
    }

    fn fields(&mut self, fields: &'a [(&'a str, &'a [u8])]) {
        let mut list = self.open_list(ComponentPlace::FieldName, SlotKind::FieldList);
        let first = list.first;
        for (name, _) in fields {
            let digest = self.key.digest(name.as_bytes());
            self.name(&mut list, ComponentPlace::FieldName, SlotKind::FieldName, digest, name.as_bytes());
        }
        self.close_list(list);
        for (at, (name, value)) in fields.iter().enumerate() {
            if *name == "cookie" {
                self.cookies(value);
                continue;
            }
            let known = self.names.get(first + at).map(|name| name.digest);
            let digest = known.unwrap_or_else(|| self.key.digest(name.as_bytes()));
            self.text(ComponentPlace::Field(name), SlotKind::FieldValue.key(digest.0), value);
        }
    }

    /// Adds a list of pairs: all names first, and then the values of those that have one.
    fn pairs(
        &mut self,
        mut list: OpenList,
        pairs: impl Iterator<Item = &'a [u8]>,
        (name_kind, value_kind): (SlotKind, SlotKind),
        place: ComponentPlace<'a>,
        value_place: impl Fn(&'a [u8]) -> ComponentPlace<'a>,
    ) {
        for pair in pairs {
            let equals = memchr::memchr(b'=', pair);
            let (name, value) = match equals.and_then(|at| pair.split_at_checked(at)) {
                Some((name, value)) => (name, value.get(1..)),
                None => (pair, None),
            };
            let mut digest = self.key.digest(name);
            if value.is_none() {
                digest.1 ^= 1;
            }
            self.name(&mut list, place, name_kind, digest, name);
            if let Some(value) = value {
                self.text(value_place(name), value_kind.key(digest.0), value);
            }
        }
        self.close_list(list);
    }

    fn text(&mut self, place: ComponentPlace<'a>, slot: u64, bytes: &'a [u8]) {
        let digest = self.key.digest(bytes);
        self.identity.add(digest);
        self.push(Component { place, slot, digest, bytes, content: ComponentContent::Text });
    }

    fn name(
        &mut self,
        list: &mut OpenList,
        place: ComponentPlace<'a>,
        kind: SlotKind,
        digest: Digest,
        bytes: &'a [u8],
    ) {
        list.digest.add(digest);
        list.count += 1;
        let slot = kind.key(std::mem::replace(&mut list.previous, digest.0));
        // A list is a range of the names, so a list within another would break it: each is read to its end first.
        if self.names.len() < COMPONENTS {
            list.kept += 1;
            self.names.push(Component { place, slot, digest, bytes, content: ComponentContent::Name });
        } else {
            self.excess += literal_price(bytes) + BIT;
        }
    }

    fn open_list(&mut self, place: ComponentPlace<'a>, kind: SlotKind) -> OpenList {
        let at = self.components.len();
        let pushed = self.push(Component {
            place,
            slot: kind.key(0),
            digest: Digest::default(),
            bytes: &[],
            content: ComponentContent::List { count: 0, first: 0, kept: 0 },
        });
        let at = pushed.then_some(at);
        OpenList { at, first: self.names.len(), kept: 0, count: 0, digest: self.key.list(), previous: 0 }
    }

    fn close_list(&mut self, list: OpenList) {
        let digest = list.digest.finish();
        self.identity.add(digest);
        let (count, first, kept) = (list.count, list.first, list.kept);
        match list.at.and_then(|at| self.components.get_mut(at)) {
            Some(component) => {
                component.digest = digest;
                component.content = ComponentContent::List { count, first, kept };
            }
            None => {
                // No component prices these names, so they are literals too.
                let names = self.names.drain(first..);
                self.excess += names.map(|name| literal_price(name.bytes) + BIT).sum::<u64>();
                self.excess += super::literal::count_price(count as u64);
            }
        }
    }

    /// Returns whether there was room for the component.
    fn push(&mut self, component: Component<'a>) -> bool {
        if self.components.len() < COMPONENTS {
            self.components.push(component);
            return true;
        }
        match component.content {
            ComponentContent::Text | ComponentContent::Name => self.excess += literal_price(component.bytes),
            ComponentContent::List { .. } => {} // priced when it is closed
        }
        false
    }
}

/// Splits the value of `cookie` at each `"; "`.
struct CookiePairs<'a>(Option<&'a [u8]>);

impl<'a> Iterator for CookiePairs<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let rest = self.0?;
        let end = memchr::memmem::find(rest, b"; ");
        self.0 = end.and_then(|at| rest.get(at + 2..));
        Some(end.and_then(|at| rest.get(..at)).unwrap_or(rest))
    }
}
