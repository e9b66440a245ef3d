//! The code that the prices are those of: encodes a sequence of requests to bits, and decodes it from the bits alone.
//!
//! The decoder keeps the same table as the account, and learns the content of each digest from what it decodes.

use std::collections::HashMap;

use super::super::baseline::{
    FIELD_LISTS, TextForm, WORD_TOKENS, WORDS, WORDS_END, baseline, field_list_price, field_list_weights,
    next_word, word_weight,
};
use super::super::digest::Digest;
use super::super::literal::{CLASSES, smallest_class};
use super::super::request::{ComponentPlace, SEGMENT_SLOTS, SlotKind};
use super::super::table::HostTable;
use super::super::{REQUEST_SLOT, RequestComponents, RequestParts};
use super::coder::Coder;
use super::key;

type Bytes = Vec<u8>;
/// Names and, behind `=`, values.
type Pairs = Vec<(Bytes, Option<Bytes>)>;

/// A request in parts. An empty query is none; cookies come last among the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PlainRequest {
    pub(super) method: Bytes,
    pub(super) segments: Vec<Bytes>,
    pub(super) query: Pairs,
    pub(super) fields: Vec<(String, Bytes)>,
    pub(super) cookies: Option<Pairs>,
    pub(super) sending: Bytes,
}

impl PlainRequest {
    /// Splits it as the account does.
    pub(super) fn with_components<T>(&self, use_components: impl FnOnce(RequestComponents<'_>) -> T) -> T {
        self.with_parts(|parts| use_components(RequestComponents::new(&key(), parts).sent_as(&self.sending)))
    }

    pub(super) fn with_parts<T>(&self, use_parts: impl FnOnce(&RequestParts<'_>) -> T) -> T {
        let path = self.segments.join(&b'/');
        let join = |pairs: &Pairs, separator: &[u8]| {
            let pairs: Vec<Bytes> = pairs
                .iter()
                .map(|(name, value)| match value {
                    Some(value) => [name.as_slice(), b"=", value].concat(),
                    None => name.clone(),
                })
                .collect();
            pairs.join(separator)
        };
        let query = (!self.query.is_empty()).then(|| join(&self.query, b"&"));
        let cookies = self.cookies.as_ref().map(|cookies| join(cookies, b"; "));
        let mut fields: Vec<(&str, &[u8])> =
            self.fields.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
        fields.extend(cookies.iter().map(|cookies| ("cookie", cookies.as_slice())));
        use_parts(&RequestParts {
            method: std::str::from_utf8(&self.method).unwrap(),
            path: &path,
            query: query.as_deref(),
            fields: &fields,
        })
    }
}

/// What pairs of names and values belong to.
#[derive(Clone, Copy)]
enum PairPlace {
    Query,
    Cookies,
}

impl PairPlace {
    fn names(self) -> ComponentPlace<'static> {
        match self {
            PairPlace::Query => ComponentPlace::Query,
            PairPlace::Cookies => ComponentPlace::Cookies,
        }
    }

    fn value(self, name: &[u8]) -> ComponentPlace<'_> {
        match self {
            PairPlace::Query => ComponentPlace::QueryValue(name),
            PairPlace::Cookies => ComponentPlace::Cookie(name),
        }
    }
}

pub(super) struct Codec {
    coder: Coder,
    table: HostTable,
    started: bool,
    requests: HashMap<Digest, PlainRequest>,
    texts: HashMap<Digest, Bytes>,
    /// Names, and whether a value follows.
    names: HashMap<Digest, (Bytes, bool)>,
    lists: HashMap<Digest, Vec<(Bytes, bool)>>,
}

impl Codec {
    fn new(coder: Coder) -> Self {
        Codec {
            coder,
            table: HostTable::default(),
            started: false,
            requests: HashMap::new(),
            texts: HashMap::new(),
            names: HashMap::new(),
            lists: HashMap::new(),
        }
    }

    pub(super) fn encoder() -> Self {
        Codec::new(Coder::encoder())
    }

    pub(super) fn decoder(bits: Vec<bool>) -> Self {
        Codec::new(Coder::decoder(bits))
    }

    pub(super) fn encode(&mut self, request: &PlainRequest) {
        let mark = usize::from(!self.started);
        self.coder.choose(&[252, 1, 1, 1, 1], Some(mark));
        self.request(Some(request));
    }

    pub(super) fn finish(mut self) -> Vec<bool> {
        self.coder.choose(&[252, 1, 1, 1, 1], Some(4));
        self.coder.finish()
    }

    /// Returns the next request, or `None` at the end.
    pub(super) fn decode(&mut self) -> Option<PlainRequest> {
        match self.coder.choose(&[252, 1, 1, 1, 1], None) {
            4 => None,
            _ => Some(self.request(None)),
        }
    }

    fn request(&mut self, given: Option<&PlainRequest>) -> PlainRequest {
        self.started = true;
        let identity = given.map(|request| request.with_components(|components| components.identity()));
        let request = match self.known(REQUEST_SLOT, identity) {
            Some(identity) => self.requests[&identity].clone(),
            None => self.components(given),
        };
        request.with_components(|components| {
            self.table.learn_request(&components);
            self.requests.insert(components.identity(), request.clone());
        });
        self.table.check();
        request
    }

    fn components(&mut self, given: Option<&PlainRequest>) -> PlainRequest {
        let method =
            self.text(ComponentPlace::Method, SlotKind::Method.key(0), given.map(|given| &given.method));
        let count = given.map(|given| given.segments.len() as u64);
        let count = match self.known(SlotKind::PathLength.key(0), count.map(|count| Digest(count, 0))) {
            Some(Digest(count, _)) => count,
            None => self.coder.count(count),
        };
        let segments = (0..count as usize)
            .map(|at| {
                let slot = SlotKind::Segment.key(at.min(SEGMENT_SLOTS) as u64);
                self.text(ComponentPlace::Segment(at), slot, given.map(|given| &given.segments[at]))
            })
            .collect();
        let kinds = (SlotKind::QueryList, SlotKind::QueryName, SlotKind::QueryValue);
        let query = self.pairs(kinds, PairPlace::Query, given.map(|given| &given.query));

        let given_names = given.map(|given| {
            let names = given.fields.iter().map(|(name, _)| (name.clone().into_bytes(), true));
            names.chain(given.cookies.iter().map(|_| (b"cookie".to_vec(), true))).collect()
        });
        let names =
            self.list(SlotKind::FieldList, SlotKind::FieldName, ComponentPlace::FieldName, given_names);
        let mut request = PlainRequest { method, segments, query, ..PlainRequest::default() };
        for (at, (name, _)) in names.into_iter().enumerate() {
            if name == b"cookie" {
                let kinds = (SlotKind::CookieList, SlotKind::CookieName, SlotKind::CookieValue);
                request.cookies = Some(self.pairs(
                    kinds,
                    PairPlace::Cookies,
                    given.and_then(|given| given.cookies.as_ref()),
                ));
                continue;
            }
            let slot = SlotKind::FieldValue.key(key().digest(&name).0);
            let name_text = String::from_utf8(name).unwrap();
            let place = ComponentPlace::Field(&name_text);
            let value = self.text(place, slot, given.map(|given| &given.fields[at].1));
            request.fields.push((name_text, value));
        }
        let slot = SlotKind::Sending.key(0);
        request.sending = self.text(ComponentPlace::Sending, slot, given.map(|given| &given.sending));
        request
    }

    fn pairs(
        &mut self,
        kinds: (SlotKind, SlotKind, SlotKind),
        place: PairPlace,
        given: Option<&Pairs>,
    ) -> Pairs {
        let names = given.map(|given| {
            given.iter().map(|(name, value)| (name.clone(), value.is_some())).collect::<Vec<_>>()
        });
        let names = self.list(kinds.0, kinds.1, place.names(), names);
        names
            .into_iter()
            .enumerate()
            .map(|(at, (name, valued))| {
                let slot = kinds.2.key(key().digest(&name).0);
                let value = valued.then(|| {
                    let given = given.map(|given| given[at].1.as_ref().unwrap());
                    self.text(place.value(&name), slot, given)
                });
                (name, value)
            })
            .collect()
    }

    fn list(
        &mut self,
        list: SlotKind,
        name: SlotKind,
        place: ComponentPlace<'_>,
        given: Option<Vec<(Bytes, bool)>>,
    ) -> Vec<(Bytes, bool)> {
        let digest_of = |names: &[(Bytes, bool)]| {
            let mut list = key().list();
            names.iter().for_each(|name| list.add(name_digest(name)));
            list.finish()
        };
        if let Some(known) = self.known(list.key(0), given.as_deref().map(digest_of)) {
            return self.lists[&known].clone();
        }
        if place == ComponentPlace::FieldName {
            let known = given.as_ref().map(|given| {
                let found = field_list_price(given.iter().map(|(name, _)| name.as_slice())).0;
                found.unwrap_or(FIELD_LISTS.len())
            });
            let known = self.coder.choose(&field_list_weights(), known);
            if let Some(list) = FIELD_LISTS.get(known) {
                let names: Vec<(Bytes, bool)> =
                    list.names.iter().map(|name| (name.as_bytes().to_vec(), true)).collect();
                names.iter().for_each(|name| drop(self.names.insert(name_digest(name), name.clone())));
                self.lists.insert(digest_of(&names), names.clone());
                return names;
            }
        }
        let count = self.coder.count(given.as_ref().map(|given| given.len() as u64));
        let (mut names, mut previous) = (Vec::new(), 0);
        for at in 0..count as usize {
            let given = given.as_ref().map(|given| &given[at]);
            let found = match self.known(name.key(previous), given.map(name_digest)) {
                Some(known) => self.names[&known].clone(),
                None => {
                    let text = self.new_text(place, given.map(|(name, _)| name));
                    let valued = place == ComponentPlace::FieldName
                        || self.coder.uniform(2, given.map(|(_, valued)| u32::from(*valued))) == 1;
                    (text, valued)
                }
            };
            previous = name_digest(&found).0;
            self.names.insert(name_digest(&found), found.clone());
            names.push(found);
        }
        self.lists.insert(digest_of(&names), names.clone());
        names
    }

    fn text(&mut self, place: ComponentPlace<'_>, slot: u64, given: Option<&Bytes>) -> Bytes {
        let text = match self.known(slot, given.map(|given| key().digest(given))) {
            Some(known) => self.texts[&known].clone(),
            None => self.new_text(place, given),
        };
        self.texts.insert(key().digest(&text), text.clone());
        text
    }

    /// Codes a text that its slot does not know, by the baseline of its place.
    fn new_text(&mut self, place: ComponentPlace<'_>, given: Option<&Bytes>) -> Bytes {
        let baseline = baseline(place);
        let form = given.map(|given| match baseline.cheapest(given).0 {
            TextForm::Literal => 0,
            TextForm::Words => 1,
            TextForm::Entry(at) => at + 2,
        });
        match self.coder.choose(&baseline.weights(), form) {
            0 => self.literal(given.map(Vec::as_slice)),
            1 => self.words(given),
            at => {
                let entry = &baseline.entries()[at - 2];
                let rest = given.map(|given| &given[entry.text.len()..]);
                let rest = if entry.is_stem() { self.literal(rest) } else { Bytes::new() };
                [entry.text.as_bytes(), &rest].concat()
            }
        }
    }

    fn words(&mut self, given: Option<&Bytes>) -> Bytes {
        let weights: Vec<u32> = (0..WORD_TOKENS).map(word_weight).chain([WORDS_END]).collect();
        let mut text = Bytes::new();
        loop {
            let token =
                given.map(|given| next_word(&given[text.len()..]).map_or(WORD_TOKENS, |(token, _)| token));
            match self.coder.choose(&weights, token) {
                WORD_TOKENS => return text,
                token if token < WORDS.len() => text.extend_from_slice(WORDS[token].as_bytes()),
                token => text.push((token - WORDS.len()) as u8 + 0x20),
            }
        }
    }

    fn literal(&mut self, given: Option<&[u8]>) -> Bytes {
        let class = self.coder.uniform(8, given.map(|given| smallest_class(given).0 as u32));
        let class = &CLASSES[class as usize];
        let alphabet: Bytes = (0..=255).filter(|byte| (class.contains)(*byte)).collect();
        let length = self.coder.count(given.map(|given| given.len() as u64));
        (0..length as usize)
            .map(|at| {
                let symbol = given.and_then(|given| alphabet.iter().position(|byte| *byte == given[at]));
                alphabet[self.coder.uniform(class.size, symbol.map(|at| at as u32)) as usize]
            })
            .collect()
    }

    /// Codes a choice among the known values of a slot; `None` is the escape.
    fn known(&mut self, slot: u64, given: Option<Digest>) -> Option<Digest> {
        let (values, unknown) = self.table.alternatives(slot);
        let mut weights: Vec<u32> = values.iter().map(|(_, weight)| *weight).collect();
        weights.push(unknown);
        let given =
            given.map(|given| values.iter().position(|(value, _)| *value == given).unwrap_or(values.len()));
        values.get(self.coder.choose(&weights, given)).map(|(value, _)| *value)
    }
}

fn name_digest((name, valued): &(Bytes, bool)) -> Digest {
    let Digest(low, high) = key().digest(name);
    Digest(low, high ^ u64::from(!valued))
}
