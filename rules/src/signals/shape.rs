//! How unusual the form of requests is, from bounded memory of earlier ones.
//!
//! What one request says is seldom enough to tell data from use: a signed URL is a kilobyte of base64. So each new value
//! is measured once, sums are kept per hour and day, and what a host answers excuses what it was asked: a path with the
//! digest of a layer is followed by the layer. Values that come back, identifiers that are different each time and
//! credentials that seldom are have rules of their own ([`trust`]).
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
mod memory;
#[cfg(test)]
mod tests;
mod thresholds;
mod trust;

pub use memory::{NAMES, SEEN};
pub use thresholds::ShapeThresholds;

use serde::{Deserialize, Serialize};

use super::bits::{Component, ComponentContent, ComponentPlace, RequestComponents};
use super::{Signal, SignalCode, SignalPlace};
use content::{RunWorth, ValueContent};
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// What is new in one request.
#[derive(Debug, Default)]
struct News {
    url: UrlNews,
    /// New bytes anywhere, except in credentials and identifiers.
    bytes: u64,
    /// Digest of what the request chose, except counters, credentials and identifiers.
    symbol: u64,
    /// Slots of counters that went on, and whether their own value has more than the number.
    counters: [(u64, bool); COUNTERS_PER_REQUEST],
    /// Number and bytes of new credentials.
    tokens: (u64, u64),
    /// Whether anything was added to a sum.
    added: bool,
}

/// One look at one request.
struct Look<'s> {
    shape: &'s mut HostShape,
    thresholds: &'s ShapeThresholds,
    now_ms: u64,
    found: &'s mut Vec<Signal>,
    raised: u32,
}

impl PlaceKind {
    /// Tells whether another value in this place is a choice of the sandbox, not of a library.
    fn is_chosen(self) -> bool {
        match self {
            PlaceKind::Field
            | PlaceKind::UsualField
            | PlaceKind::UserAgent
            | PlaceKind::Url
            | PlaceKind::Cookie => true,
            PlaceKind::Token | PlaceKind::Identifier => false,
        }
    }
}

impl Look<'_> {
    fn component(&mut self, request: &RequestComponents<'_>, component: &Component<'_>, news: &mut News) {
        let digest = mix(component.slot, component.digest.0);
        let known = match component.content {
            ComponentContent::List { .. } => self.shape.names.insert(digest),
            ComponentContent::Text | ComponentContent::Name => self.shape.seen.insert(digest),
        };
        let kind = PlaceKind::of(component.place, component.bytes);
        match component.content {
            ComponentContent::List { count, .. } => {
                news.symbol = mix(news.symbol, component.digest.0);
                if component.place == ComponentPlace::FieldName {
                    news.added |= !known;
                    self.fields(request, component, count as u64, known);
                } else if !known {
                    self.pair_names(request, component, news);
                }
                return;
            }
            ComponentContent::Text | ComponentContent::Name => {}
        }
        if kind == PlaceKind::UserAgent {
            let agents = self.shape.agents.observe(component.digest.0, self.now_ms);
            let place = || SignalPlace::Field("user-agent".to_owned());
            let most = self.thresholds.user_agents_per_hour;
            self.raise_above(
                SignalCode::UserAgentChanged,
                agents,
                most,
                place,
                "different values in an hour",
            );
        }
        let mut counting = false;
        if kind.is_chosen()
            && let Some((number, alone)) = content::number(component.bytes)
            && self.shape.counters.observe(component.slot, number)
        {
            counting = alone;
            if let Some(free) = news.counters.iter_mut().find(|(slot, _)| *slot == 0) {
                *free = (component.slot, !alone);
            }
        }
        if kind.is_chosen() && !counting {
            news.symbol = mix(news.symbol, component.digest.0);
        }
        if !known {
            self.value(request, component, kind, news);
        }
    }

    /// Measures a new value and adds it to the sums of its kind.
    fn value(
        &mut self,
        request: &RequestComponents<'_>,
        component: &Component<'_>,
        kind: PlaceKind,
        news: &mut News,
    ) {
        let (seen, numbers, key) = (&mut self.shape.seen, &mut self.shape.numbers, request.key());
        let content = content::measure(component.bytes, |at, run| {
            if let Some((number, true)) = content::number(run) {
                return RunWorth::Number(numbers.observe(mix(component.slot, at as u64), number));
            }
            // Short runs are measured as they are: remembering them would push out the others.
            let known = run.len() >= 4 && seen.insert(!key.digest(run).0);
            if known { RunWorth::Seen } else { RunWorth::New }
        });
        news.added = true;
        let now_ms = self.now_ms;
        let sums = &mut self.shape.sums;
        let all = content.random + content.text;
        match kind {
            PlaceKind::Field => sums.field.add(all, now_ms),
            PlaceKind::UsualField => sums.field.add(content.random, now_ms),
            PlaceKind::UserAgent => sums.user_agent.add(all, now_ms),
            PlaceKind::Cookie => sums.cookie.add(all, now_ms),
            PlaceKind::Token => news.tokens = (news.tokens.0 + 1, news.tokens.1 + all),
            PlaceKind::Identifier => sums.identifier.add(all, now_ms),
            PlaceKind::Url => {
                news.url[RANDOM] += content.random;
                news.url[MESSAGES] += if content.text >= MESSAGE { content.text } else { 0 };
                news.url[ALL] += all;
            }
        }
        if kind.is_chosen() {
            news.bytes += all;
        }
        self.runs(component, kind, content);
    }

    fn runs(&mut self, component: &Component<'_>, kind: PlaceKind, content: ValueContent) {
        let place = || component.place.signal_place();
        let most = match kind {
            PlaceKind::Token | PlaceKind::Identifier | PlaceKind::Cookie => {
                self.thresholds.token_run_characters
            }
            PlaceKind::Field | PlaceKind::UsualField | PlaceKind::UserAgent | PlaceKind::Url => {
                self.thresholds.encoded_run_characters
            }
        };
        if content.longest > most {
            let encodings = content.encoding.into_iter().collect();
            self.raise(Signal {
                code: SignalCode::EncodedRun,
                place: place(),
                encodings,
                what: "a long run that looks encoded".to_owned(),
                value: content.longest,
                threshold: most,
            });
        }
        if matches!(kind, PlaceKind::Url | PlaceKind::UsualField | PlaceKind::Field) {
            let most = self.thresholds.url_text_bytes;
            self.raise_above(
                SignalCode::UrlNovelty,
                content.text,
                most,
                place,
                "bytes of new text in one value",
            );
        }
    }

    /// Compares the names of the fields with earlier ones.
    fn fields(
        &mut self,
        request: &RequestComponents<'_>,
        component: &Component<'_>,
        count: u64,
        known: bool,
    ) {
        let place = || SignalPlace::FieldName;
        self.raise_above(
            SignalCode::ManyFields,
            count,
            self.thresholds.fields,
            place,
            "fields in one request",
        );
        if known {
            return;
        }
        let (now_ms, early) = (self.now_ms, self.shape.requests <= FIRST_REQUESTS);
        self.shape.sums.field_lists.add(1, now_ms);
        for name in request.names(component.content) {
            if self.shape.names.insert(mix(1, name.digest.0)) {
                continue;
            }
            let length = name.bytes.len() as u64;
            let most = self.thresholds.field_name_characters;
            self.raise_above(SignalCode::FieldNovelty, length, most, place, "characters of one name");
            self.shape.sums.field_name_characters.add(length, now_ms);
            self.shape.sums.field_names.add(u64::from(!early), now_ms);
        }
    }

    /// Measures new names in a query or among cookies: data can be there as well.
    fn pair_names(&mut self, request: &RequestComponents<'_>, component: &Component<'_>, news: &mut News) {
        let kind = match PlaceKind::of(component.place, &[]) {
            PlaceKind::Cookie => PlaceKind::Cookie,
            PlaceKind::Field
            | PlaceKind::UsualField
            | PlaceKind::UserAgent
            | PlaceKind::Url
            | PlaceKind::Token
            | PlaceKind::Identifier => PlaceKind::Url,
        };
        for name in request.names(component.content) {
            if !self.shape.names.insert(mix(component.slot, name.digest.0)) {
                self.value(request, name, kind, news);
            }
        }
    }

    /// Adds new credentials, unless they come with a new URL: registries give one for each repository.
    fn tokens(&mut self, news: &News) {
        if news.url[ALL] == 0 {
            self.shape.sums.tokens.add(news.tokens.0, self.now_ms);
            self.shape.sums.token.add(news.tokens.1, self.now_ms);
        }
    }

    fn sequence(&mut self, observation: &ShapeObservation) {
        for slot in observation.counters.into_iter().filter(|slot| *slot != 0) {
            let Some(counter) = self.shape.counters.with_data(slot) else { continue };
            if counter.with_data * 4 >= counter.run * 3 {
                let most = self.thresholds.sequence_steps;
                let place = || SignalPlace::Attempt;
                self.raise_above(
                    SignalCode::Sequence,
                    counter.with_data,
                    most,
                    place,
                    "steps of a counter with data",
                );
            }
        }
    }

    fn url_sums(&mut self, news: &News) {
        for (asked, amount) in self.shape.sums.url.asked.iter_mut().zip(news.url) {
            asked.add(amount, self.now_ms);
        }
    }

    fn rhythm(&mut self, observation: &ShapeObservation, sent_bytes: u64) {
        if observation.bytes < BEACON_NEWS || sent_bytes > SMALL_BODY {
            return;
        }
        let jitter = self.thresholds.beacon_jitter_percent;
        let run = self.shape.rhythms.observe(observation.kind, observation.at_ms, jitter);
        let place = || SignalPlace::Attempt;
        let most = self.thresholds.beacon_requests;
        self.raise_above(
            SignalCode::Beacon,
            run,
            most,
            place,
            "requests at one interval with something new in each",
        );
    }

    /// Compares the sums with their thresholds.
    fn sums(&mut self) {
        let (now, limits) = (self.now_ms, *self.thresholds);
        let sums = &self.shape.sums;
        let token_bytes = sums.token.hour(now);
        let tokens = if token_bytes >= 768 { sums.tokens.hour(now) } else { 0 };
        let awaited = self.shape.awaited;
        let url = &sums.url;
        let unexcused = |kind: usize, sum: fn(&WindowSums, u64) -> u64| match (
            url.asked.get(kind),
            url.excused.get(kind),
        ) {
            (Some(asked), Some(excused)) => {
                sum(asked, now).saturating_sub(sum(excused, now)).saturating_sub(awaited)
            }
            _ => 0,
        };
        let (attempt, names, query) = (SignalPlace::Attempt, SignalPlace::FieldName, SignalPlace::Query);
        let agent = SignalPlace::Field("user-agent".to_owned());
        use SignalCode as Code;
        #[rustfmt::skip]
        let rows = [
            (Code::Drip, sums.choice.day(now), limits.choice_bits_per_day, &attempt, "bits in the order of known requests in a day"),
            (Code::Drip, sums.cookie.hour(now), limits.cookie_bytes_per_hour, &attempt, "new bytes of cookies in an hour"),
            (Code::Drip, sums.cookie.day(now), limits.cookie_bytes_per_day, &attempt, "new bytes of cookies in a day"),
            (Code::Drip, sums.field.hour(now), limits.field_bytes_per_hour, &attempt, "new bytes of field values in an hour"),
            (Code::Drip, sums.field.day(now), limits.field_bytes_per_day, &attempt, "new bytes of field values in a day"),
            (Code::Drip, sums.identifier.hour(now), limits.identifier_bytes_per_hour, &attempt, "new bytes of identifiers in an hour"),
            (Code::Drip, sums.small_upload.day(now), limits.small_upload_bytes_per_day, &SignalPlace::Body, "bytes of small bodies in a day"),
            (Code::Drip, unexcused(ALL, WindowSums::hour), limits.url_bytes_per_hour, &attempt, "new bytes of URLs in an hour"),
            (Code::Drip, unexcused(ALL, WindowSums::day), limits.url_bytes_per_day, &attempt, "new bytes of URLs in a day"),
            (Code::EncodedRun, tokens, limits.tokens_per_hour, &attempt, "new credentials in an hour"),
            (Code::FieldNovelty, sums.field_lists.hour(now), limits.field_lists_per_hour, &names, "new combinations of fields in an hour"),
            (Code::FieldNovelty, sums.field_names.hour(now), limits.field_names_per_hour, &names, "new field names in an hour"),
            (Code::FieldNovelty, sums.field_name_characters.hour(now), limits.field_name_characters_per_hour, &names, "characters of new field names in an hour"),
            (Code::UrlNovelty, unexcused(RANDOM, WindowSums::hour), limits.url_random_bytes_per_hour, &query, "bytes that look random in URLs in an hour"),
            (Code::UrlNovelty, unexcused(RANDOM, WindowSums::day), limits.url_random_bytes_per_day, &query, "bytes that look random in URLs in a day"),
            (Code::UrlNovelty, unexcused(MESSAGES, WindowSums::hour), limits.url_text_bytes_per_hour, &query, "bytes of new text in URLs in an hour"),
            (Code::UserAgentChanged, sums.user_agent.hour(now), limits.user_agent_bytes_per_hour, &agent, "new bytes in an hour"),
        ];
        for (code, value, threshold, place, what) in rows {
            self.raise_above(code, value, threshold, || place.clone(), what);
        }
    }

    /// Compares what was sent in the past hour with the host's past before it.
    fn upload_ratio(&mut self) {
        let now_ms = self.now_ms;
        let shape = &self.shape;
        let (sent, received) = (shape.sent.hour(now_ms), shape.received.hour(now_ms));
        let old = (shape.requests, now_ms.saturating_sub(shape.started_ms) / HOUR_MS);
        if sent <= self.thresholds.upload_bytes_per_hour || old.0 < HISTORY.0 || old.1 < HISTORY.1 {
            return;
        }
        let past = (shape.history.0.saturating_sub(sent), shape.history.1.saturating_sub(received));
        // In tenths of a percent of what was received, so that hosts that answer much are told from those that do not.
        let share = |sent: u64, received: u64| u128::from(sent) * 1_000 / u128::from(received.max(1));
        let (now, before) = (share(sent, received), share(past.0, past.1).max(1));
        let factor = u64::try_from(now / before).unwrap_or(u64::MAX);
        let place = || SignalPlace::Body;
        let most = self.thresholds.upload_factor;
        self.raise_above(
            SignalCode::UploadRatio,
            factor,
            most,
            place,
            "times the share sent to this host before",
        );
    }

    fn raise_above(
        &mut self,
        code: SignalCode,
        value: u64,
        threshold: u64,
        place: impl FnOnce() -> SignalPlace,
        what: &str,
    ) {
        if value > threshold {
            self.raise(Signal {
                code,
                place: place(),
                encodings: Vec::new(),
                what: what.to_owned(),
                value,
                threshold,
            });
        }
    }

    /// Counts a signal, and reports it unless it was reported a short time ago.
    fn raise(&mut self, signal: Signal) {
        let code = signal.code as u8;
        self.raised |= 1 << code;
        let reports = &mut self.shape.reports;
        match reports.iter_mut().find(|(known, ..)| *known == code) {
            Some((_, last_ms, count)) => {
                *count += 1;
                if self.now_ms < last_ms.saturating_add(QUIET_MS) {
                    return;
                }
                *last_ms = self.now_ms;
            }
            None => reports.push((code, self.now_ms, 1)),
        }
        self.found.push(signal);
    }
}

fn mix(left: u64, right: u64) -> u64 {
    (left.rotate_left(23) ^ right).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
