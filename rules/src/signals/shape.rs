//! How unusual the form of requests is, from bounded memory of earlier ones.
//!
//! What one request says is seldom enough to tell data from use: a signed URL is a kilobyte of base64. So each new value
//! is measured once, sums are kept per hour and day, and what a host answers excuses what it was asked: a path with the
//! digest of a layer is followed by the layer. Values that come back, identifiers that are different each time and
//! credentials that seldom are have rules of their own (`trust`).
//!
//! These detectors describe; they bound nothing. Undetected with the default thresholds are:
//! - up to four credentials an hour, of less than 4 KiB each, that are data, and more of them with URLs that are new;
//! - data in the form of identifiers, signatures and checksums, in fields and parameters with such names, up to their
//!   hourly sum;
//! - text in URLs in pieces below 48 bytes that look like words, up to `url_bytes_per_hour`;
//! - anything in URLs that the host answers with 32 times as many bytes, and choices, sequences and beacons that it
//!   answers with 4 KiB;
//! - choices of requests with bodies, requests at regular intervals with nothing new in them, and what is slower than a
//!   kilobyte a day.
//!
//! The budget of bits ([`super::bits`]) bounds all of it.

mod content;
mod look;
mod memory;
#[cfg(test)]
mod tests;
mod thresholds;
mod trust;

pub use memory::{NAMES, SEEN};
pub use thresholds::ShapeThresholds;

use serde::{Deserialize, Serialize};

use super::bits::{ComponentContent, RequestComponents};
use super::{Signal, SignalCode};
use look::{Look, News};
use memory::{Agents, Counters, HOUR_MS, Numbers, Rhythms, SeenSet, Successors, WindowSums};
use trust::PlaceKind;

/// A signal is reported once in this time per host and code; more of it is counted.
pub const QUIET_MS: u64 = HOUR_MS;
/// Requests to a host whose field names are not compared with earlier ones, because there are too few.
pub const FIRST_REQUESTS: u64 = 16;
/// Bytes of answer that excuse one new byte in a URL.
const ANSWER_PER_BYTE: u64 = 32;
/// New bytes of URLs whose answers are awaited, at most. More count at once.
const AWAITED: u64 = 8 << 10;
/// Text in one value of a URL counts as a message from this length on.
const MESSAGE: u64 = 48;
/// New bytes that make a request of a beacon differ from a poll.
const BEACON_NEWS: u64 = 4;
/// An answer of this size is content. Beacons, sequences and choices that get one are not reported.
const CONTENT: u64 = 4 << 10;
/// A body of this size could say what the choice of a request does.
const BODY: u64 = 64;
/// Small bodies, for their sum.
const SMALL_BODY: u64 = 1 << 10;
/// Counters followed in one request.
const COUNTERS_PER_REQUEST: usize = 4;
/// Requests and hours of history before uploads are compared with it.
const HISTORY: (u64, u64) = (50, 4);

/// What one sandbox's requests to one host look like.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct HostShape {
    seen: SeenSet<SEEN>,
    names: SeenSet<NAMES>,
    requests: u64,
    started_ms: u64,
    numbers: Numbers,
    counters: Counters,
    successors: Successors,
    rhythms: Rhythms,
    agents: Agents,
    sums: Sums,
    awaited: u64,
    sent: WindowSums,
    received: WindowSums,
    /// Sent and received before the current window, for the baseline.
    history: (u64, u64),
    /// Code, time of the last report, and how often it was raised. Not stored: the numbers of codes are those of a build.
    #[serde(skip)]
    reports: Vec<(u8, u64, u64)>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Sums {
    choice: WindowSums,
    cookie: WindowSums,
    field: WindowSums,
    field_lists: WindowSums,
    field_names: WindowSums,
    field_name_characters: WindowSums,
    identifier: WindowSums,
    token: WindowSums,
    tokens: WindowSums,
    small_upload: WindowSums,
    url: UrlSums,
    user_agent: WindowSums,
}

/// What URLs asked, and how much of that was excused by answers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct UrlSums {
    asked: [WindowSums; 3],
    excused: [WindowSums; 3],
}

/// What is new in a URL: bytes that look random, text in messages, and everything.
type UrlNews = [u64; 3];
const RANDOM: usize = 0;
const MESSAGES: usize = 1;
const ALL: usize = 2;

/// What was new in one request. Give it back with the outcome, also if there was no answer.
#[must_use = "without its outcome, the request counts as unanswered"]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShapeObservation {
    at_ms: u64,
    url: UrlNews,
    /// New bytes anywhere, except in credentials and identifiers.
    bytes: u64,
    /// Digest of what the request has, whatever the values.
    kind: u64,
    /// Bits that the choice among known requests is worth.
    choice: u64,
    /// Slots of counters that went on while something else changed.
    counters: [u64; COUNTERS_PER_REQUEST],
    /// What was raised, reported or not, one bit per code.
    raised: u32,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestOutcome {
    /// Bytes of the body that was sent.
    pub sent_bytes: u64,
    /// Bytes of the body that was received.
    pub received_bytes: u64,
}

impl ShapeObservation {
    /// Tells whether a request raised a signal, even if that was reported a short time ago. This is what `deny` refuses
    /// by.
    pub fn raised(&self, code: SignalCode) -> bool {
        self.raised & 1 << code as u8 != 0
    }
}

impl HostShape {
    /// Looks at a request before it leaves and adds what it raises to `found`.
    pub fn observe(
        &mut self,
        request: &RequestComponents<'_>,
        now_ms: u64,
        thresholds: &ShapeThresholds,
        found: &mut Vec<Signal>,
    ) -> ShapeObservation {
        if self.requests == 0 {
            self.started_ms = now_ms;
        }
        self.requests += 1;
        let mut look = Look { shape: self, thresholds, now_ms, found, raised: 0 };
        let mut news = News::default();
        // A repeat has nothing new, and no number that counts.
        if !look.shape.seen.insert(request.identity().0) {
            for component in request.components() {
                look.component(request, component, &mut news);
            }
        } else {
            news.symbol = request.components().iter().fold(0, |symbol, component| {
                let kind = PlaceKind::of(component.place, component.bytes);
                if kind.is_chosen() { mix(symbol, component.digest.0) } else { symbol }
            });
        }
        look.tokens(&news);
        look.url_sums(&news);
        if news.added {
            look.sums();
        }
        let raised = look.raised;
        // Later requests are not judged by this one until it had time for an answer.
        self.awaited = self.awaited.saturating_add(news.url[ALL]).min(AWAITED);

        let (changed, choice) = self.successors.observe(news.symbol);
        let counters = news.counters.map(|(slot, own_data)| if changed || own_data { slot } else { 0 });
        let lists =
            request.components().iter().filter(|component| component.content != ComponentContent::Text);
        let kind = lists.fold(0, |kind, list| mix(kind, list.digest.0));
        ShapeObservation { at_ms: now_ms, url: news.url, bytes: news.bytes, kind, choice, counters, raised }
    }

    /// Takes note of a cookie that the host set, so that sending it back is nothing new.
    pub fn learn_cookie(&mut self, key: &super::bits::DigestKey, name: &[u8], value: &[u8]) {
        let slot = super::bits::cookie_slot(key, name);
        self.seen.insert(mix(slot, key.digest(value).0));
    }

    /// Takes note of what became of a request, and adds what that raises to `found`.
    pub fn observe_outcome(
        &mut self,
        observation: ShapeObservation,
        outcome: RequestOutcome,
        now_ms: u64,
        thresholds: &ShapeThresholds,
        found: &mut Vec<Signal>,
    ) {
        let RequestOutcome { sent_bytes, received_bytes } = outcome;
        self.awaited = self.awaited.saturating_sub(observation.url[ALL]);
        let mut room = received_bytes / ANSWER_PER_BYTE;
        room = room.min(observation.url[ALL]);
        for (excused, asked) in self.sums.url.excused.iter_mut().zip(observation.url) {
            excused.add(asked.min(room), now_ms);
        }
        if sent_bytes <= SMALL_BODY {
            self.sums.small_upload.add(sent_bytes, now_ms);
        }
        self.sent.add(sent_bytes, now_ms);
        self.received.add(received_bytes, now_ms);
        self.history.0 = self.history.0.saturating_add(sent_bytes);
        self.history.1 = self.history.1.saturating_add(received_bytes);

        let mut look = Look { shape: self, thresholds, now_ms, found, raised: observation.raised };
        if received_bytes < CONTENT {
            look.rhythm(&observation, sent_bytes);
            look.sequence(&observation);
            if sent_bytes < BODY {
                look.shape.sums.choice.add(observation.choice, now_ms);
            }
        }
        look.upload_ratio();
        let added = observation.url[ALL] + observation.choice;
        if added > 0 || sent_bytes > 0 {
            look.sums();
        }
    }

    /// Returns how often a signal was raised, reported or not.
    pub fn occurrences(&self, code: SignalCode) -> u64 {
        self.reports.iter().find(|(known, ..)| *known == code as u8).map_or(0, |(.., count)| *count)
    }
}

fn mix(left: u64, right: u64) -> u64 {
    (left.rotate_left(23) ^ right).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
