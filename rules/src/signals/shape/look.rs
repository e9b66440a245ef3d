//! The detectors: one look at one request, and at what became of it.

use super::super::bits::{Component, ComponentContent, ComponentPlace, RequestComponents};
use super::super::{Signal, SignalCode, SignalPlace};
use super::content::{self, RunWorth, ValueContent};
use super::memory::{HOUR_MS, WindowSums};
use super::trust::PlaceKind;
use super::{
    ALL, BEACON_NEWS, COUNTERS_PER_REQUEST, FIRST_REQUESTS, HISTORY, HostShape, MESSAGE, MESSAGES, QUIET_MS,
    RANDOM, SMALL_BODY, ShapeObservation, ShapeThresholds, UrlNews, mix,
};

/// What is new in one request.
#[derive(Debug, Default)]
pub(super) struct News {
    pub(super) url: UrlNews,
    /// New bytes anywhere, except in credentials and identifiers.
    pub(super) bytes: u64,
    /// Digest of what the request chose, except counters, credentials and identifiers.
    pub(super) symbol: u64,
    /// Slots of counters that went on, and whether their own value has more than the number.
    pub(super) counters: [(u64, bool); COUNTERS_PER_REQUEST],
    /// Number and bytes of new credentials.
    pub(super) tokens: (u64, u64),
    /// Whether anything was added to a sum.
    pub(super) added: bool,
}

/// One look at one request.
pub(super) struct Look<'s> {
    pub(super) shape: &'s mut HostShape,
    pub(super) thresholds: &'s ShapeThresholds,
    pub(super) now_ms: u64,
    pub(super) found: &'s mut Vec<Signal>,
    pub(super) raised: u32,
}

impl Look<'_> {
    pub(super) fn component(
        &mut self,
        request: &RequestComponents<'_>,
        component: &Component<'_>,
        news: &mut News,
    ) {
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
    pub(super) fn tokens(&mut self, news: &News) {
        if news.url[ALL] == 0 {
            self.shape.sums.tokens.add(news.tokens.0, self.now_ms);
            self.shape.sums.token.add(news.tokens.1, self.now_ms);
        }
    }

    pub(super) fn sequence(&mut self, observation: &ShapeObservation) {
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

    pub(super) fn url_sums(&mut self, news: &News) {
        for (asked, amount) in self.shape.sums.url.asked.iter_mut().zip(news.url) {
            asked.add(amount, self.now_ms);
        }
    }

    pub(super) fn rhythm(&mut self, observation: &ShapeObservation, sent_bytes: u64) {
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
    pub(super) fn sums(&mut self) {
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
    pub(super) fn upload_ratio(&mut self) {
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
