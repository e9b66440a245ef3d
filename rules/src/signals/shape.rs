//! How unusual the form of requests is, from bounded memory of earlier ones.
//!
//! What one request says is seldom enough to tell data from use: a signed URL is a kilobyte of base64. So each new value
//! is measured once, in bytes, and the sums count. Words that were seen before are worth a byte, and in places that hold
//! words a quarter of one; new words there count an eighth of their length. What an answer gave (cookies, locations,
//! entity tags) is not new. What a host answers excuses 1/32 of its size in the URL, the credential and the identifiers
//! that asked for it, up to [`EXCUSED_PER_HOUR`], because a path with the digest of a layer is followed by the layer; a
//! body excuses 1/8 of its size, because it could say the same.
//!
//! These detectors describe; they bound nothing. What remains undetected with the default thresholds, per host, because
//! an honest client does the same:
//! - 896 bytes a day of anything, and 1 KiB an hour in credentials;
//! - 8 KiB an hour in JSON web tokens, which count an eighth of their length and at least 64 bytes;
//! - 32 KiB an hour in identifiers of at most 32 random bytes and in signatures, in fields with such names;
//! - 32 bytes a request in checksums of requests with bodies;
//! - 7 KiB a day of text that looks like words, in values of URLs below 48 characters and in fields for words;
//! - 256 KiB an hour in what answers of 32 times the size excuse; choices, sequences and beacons that are answered with
//!   4 KiB;
//! - in requests with bodies: choices among them, and an eighth of the body's size;
//! - requests at regular intervals with nothing new in them.
//!
//! The budget of bits ([`super::bits`]) bounds all of it, over all hosts together.

mod content;
mod look;
mod memory;
#[cfg(test)]
mod tests;
mod thresholds;
mod trust;

pub use memory::{NAMES, SEEN};
pub use thresholds::ShapeThresholds;
pub(crate) use thresholds::{ThresholdSettings, ThresholdsDocument};

use serde::{Deserialize, Serialize};

use super::bits::{ComponentContent, RequestComponents};
use super::{Signal, SignalCode};
use look::{Look, News};
use memory::{Agents, Counters, DaySum, HOUR_MS, HourSum, Numbers, Rhythms, SeenSet, Successors};
use trust::PlaceKind;

/// A signal is reported once in this time per host and code; more of it is counted.
pub const QUIET_MS: u64 = HOUR_MS;
/// Requests to a host whose field names are not compared with earlier ones, because there are too few.
pub const FIRST_REQUESTS: u64 = 16;
/// Bytes of answer and of body that excuse one new byte.
const ANSWER_PER_BYTE: u64 = 32;
const BODY_PER_BYTE: u64 = 8;
/// Bytes that answers and bodies excuse in an hour.
pub const EXCUSED_PER_HOUR: u64 = 256 << 10;
/// What is new in URLs is counted in parts of a byte, because words and counters are worth less than one.
const PARTS: u64 = 8;
/// Parts of new bytes of URLs whose answers are awaited, at most. More count at once.
const AWAITED: u64 = (8 << 10) * PARTS;
/// Text in one value of a URL counts as a message from this length on.
const MESSAGE: u64 = 48;
/// Random bytes of an identifier, and bytes besides. A longer one counts as a field.
const IDENTIFIER: (u64, u64) = (32, 64);
/// Bytes of a signature of one request, with the names of what it signs.
const SIGNATURE: u64 = 512;
/// A JSON web token counts the first part of its length, and at least the second in bytes.
const WEB_TOKEN: (u64, u64) = (8, 64);
/// By how many times the share of what is sent may exceed that of the host's past.
const UPLOAD_FACTOR: u64 = 8;
/// Values of answers are remembered in runs of at least this length.
const ANSWERED_RUN: usize = 8;
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
    sent: HourSum,
    received: HourSum,
    /// Sent and received before the current window, for the baseline.
    history: (u64, u64),
    /// Code, time of the last report, and how often it was raised. Not stored: the numbers of codes are those of a build.
    #[serde(skip)]
    reports: Vec<(u8, u64, u64)>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Sums {
    choice: DaySum,
    credential: HourSum,
    excused: HourSum,
    /// Fields and cookies.
    field: DaySum,
    field_names: HourSum,
    identifier: HourSum,
    /// In parts of bytes.
    url: DaySum,
}

/// New bytes that an answer or a body can excuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RecentNews {
    /// In parts of bytes.
    url: u64,
    credential: u64,
    identifier: u64,
    /// In checksums: excused by any body.
    digest: u64,
}

/// What was new in one request. Give it back with the outcome, also if there was no answer.
#[must_use = "without its outcome, the request counts as unanswered"]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShapeObservation {
    at_ms: u64,
    recent: RecentNews,
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
    /// Whether the answer confirms that the host knows what the request named: status 304.
    pub unchanged: bool,
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
        if news.added {
            look.sums(&news.recent);
        }
        let raised = look.raised;
        // Later requests are not judged by this one until it had time for an answer.
        self.awaited = self.awaited.saturating_add(news.recent.url);

        let (changed, choice) = self.successors.observe(news.symbol);
        let counters = news.counters.map(|(slot, own_data)| if changed || own_data { slot } else { 0 });
        let lists =
            request.components().iter().filter(|component| component.content != ComponentContent::Text);
        let kind = lists.fold(0, |kind, list| mix(kind, list.digest.0));
        ShapeObservation {
            at_ms: now_ms,
            recent: news.recent,
            bytes: news.bytes,
            kind,
            choice,
            counters,
            raised,
        }
    }

    /// Takes note of a cookie that the host set, so that sending it back is nothing new.
    pub fn learn_cookie(&mut self, key: &super::bits::DigestKey, name: &[u8], value: &[u8]) {
        let slot = super::bits::cookie_slot(key, name);
        self.seen.insert(mix(slot, key.digest(value).0));
    }

    /// Takes note of a value in the fields of an answer: what it gave is nothing new either.
    pub fn learn_answer(&mut self, key: &super::bits::DigestKey, value: &[u8]) {
        for run in content::runs(value).filter(|run| run.len() >= ANSWERED_RUN) {
            self.seen.insert(!key.digest(run).0);
        }
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
        let RequestOutcome { sent_bytes, received_bytes, .. } = outcome;
        self.excuse(&observation.recent, outcome, now_ms);
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
        if observation.recent != RecentNews::default() || observation.choice > 0 {
            look.sums(&RecentNews::default());
        }
    }

    /// Adds what a request said to the sums, except what its answer and its body excuse.
    fn excuse(&mut self, recent: &RecentNews, outcome: RequestOutcome, now_ms: u64) {
        self.awaited = self.awaited.saturating_sub(recent.url);
        let most = EXCUSED_PER_HOUR.saturating_sub(self.sums.excused.sum(now_ms));
        let room = match outcome.unchanged {
            true => most,
            false => {
                (outcome.received_bytes / ANSWER_PER_BYTE + outcome.sent_bytes / BODY_PER_BYTE).min(most)
            }
        };
        let digest = if outcome.sent_bytes == 0 { recent.digest } else { 0 };
        let url = recent.url + digest * PARTS;
        let excused = url.min(room * PARTS);
        self.sums.url.add(url - excused, now_ms);
        let mut left = room - excused.div_ceil(PARTS);
        let mut unexcused = |amount: u64| {
            let excused = amount.min(left);
            left -= excused;
            amount - excused
        };
        self.sums.credential.add(unexcused(recent.credential), now_ms);
        self.sums.identifier.add(unexcused(recent.identifier), now_ms);
        self.sums.excused.add(room - left, now_ms);
    }

    /// Returns how often a signal was raised, reported or not.
    pub fn occurrences(&self, code: SignalCode) -> u64 {
        self.reports.iter().find(|(known, ..)| *known == code as u8).map_or(0, |(.., count)| *count)
    }
}

fn mix(left: u64, right: u64) -> u64 {
    (left.rotate_left(23) ^ right).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
