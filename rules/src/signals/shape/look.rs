//! The detectors: one look at one request, and at what became of it.

use super::super::bits::{Component, ComponentContent, ComponentPlace, RequestComponents};
use super::super::{Signal, SignalCode, SignalPlace};
use super::content::{self, RunWorth, ValueContent};
use super::memory::HOUR_MS;
use super::trust::PlaceKind;
use super::{
    AWAITED, BEACON_NEWS, COUNTERS_PER_REQUEST, FIRST_REQUESTS, HISTORY, HostShape, IDENTIFIER, MESSAGE,
    PARTS, QUIET_MS, RecentNews, SIGNATURE, SMALL_BODY, ShapeObservation, ShapeThresholds, UPLOAD_FACTOR,
    WEB_TOKEN, mix,
};

/// What is new in one request.
#[derive(Debug, Default)]
pub(super) struct News {
    /// New bytes that an answer or a body can excuse.
    pub(super) recent: RecentNews,
    /// New bytes anywhere, except in credentials and identifiers.
    pub(super) bytes: u64,
    /// Digest of what the request chose, except counters, credentials and identifiers.
    pub(super) symbol: u64,
    /// Slots of counters that went on, and whether their own value has more than the number.
    pub(super) counters: [(u64, bool); COUNTERS_PER_REQUEST],
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
                news.added |= !known;
                if component.place == ComponentPlace::FieldName {
                    let (most, place) = (self.thresholds.fields_per_request, || SignalPlace::FieldName);
                    let what = "fields in one request";
                    self.raise_above(SignalCode::ManyFields, count as u64, most, place, what);
                }
                if !known {
                    self.list(request, component, count as u64, news);
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
        let all = content.all();
        let words = content.text + (content.seen + content.numbers) * (PARTS / 4);
        let (field, recent) = (&mut self.shape.sums.field, &mut news.recent);
        match kind {
            PlaceKind::Field | PlaceKind::Cookie => field.add(all, self.now_ms),
            PlaceKind::UsualField | PlaceKind::UserAgent => {
                field.add(content.random + words.div_ceil(PARTS), self.now_ms);
            }
            PlaceKind::Url if content.text + content.seen * 5 >= MESSAGE => recent.url += all * PARTS,
            PlaceKind::Url => recent.url += content.random * PARTS + words,
            PlaceKind::Answered => {
                recent.url += (content.random + content.numbers) * PARTS + words;
            }
            PlaceKind::Credential if content::is_web_token(component.bytes) => {
                recent.credential += (all / WEB_TOKEN.0).max(WEB_TOKEN.1);
            }
            PlaceKind::Credential => recent.credential += all,
            PlaceKind::Identifier if content::is_web_token(component.bytes) => recent.identifier += all,
            PlaceKind::Identifier
                if content.random <= IDENTIFIER.0 && all - content.random <= IDENTIFIER.1 =>
            {
                recent.identifier += all;
            }
            // Most of the words are the names of what is signed, the same each time.
            PlaceKind::Signature if all <= SIGNATURE => recent.identifier += all - content.seen * 3 / 4,
            PlaceKind::Identifier | PlaceKind::Signature => field.add(all, self.now_ms),
            PlaceKind::Digest => recent.digest += all,
        }
        if kind.is_chosen() {
            news.bytes += all;
            self.run(component, content);
        }
    }

    /// Looks at the longest run of a value that is neither a credential nor an identifier.
    fn run(&mut self, component: &Component<'_>, content: ValueContent) {
        let threshold = self.thresholds.encoded_run_characters;
        if content.longest > threshold && !matches!(component.place, ComponentPlace::Cookie(_)) {
            self.raise(Signal {
                code: SignalCode::EncodedRun,
                place: component.place.signal_place(),
                encodings: content.encoding.into_iter().collect(),
                what: "a long run that looks encoded".to_owned(),
                value: content.longest,
                threshold,
            });
        }
    }

    /// Takes a new list of names: which there are, and in which order, says something too.
    fn list(
        &mut self,
        request: &RequestComponents<'_>,
        component: &Component<'_>,
        count: u64,
        news: &mut News,
    ) {
        let choice = count / 4 + 1;
        let (kind, early) = (PlaceKind::of(component.place, &[]), self.shape.requests <= FIRST_REQUESTS);
        match component.place {
            ComponentPlace::FieldName | ComponentPlace::Cookies => {
                self.shape.sums.field.add(choice, self.now_ms);
            }
            ComponentPlace::Query => news.recent.url += choice * PARTS,
            ComponentPlace::Path => return,
            ComponentPlace::Method
            | ComponentPlace::Segment(_)
            | ComponentPlace::QueryValue(_)
            | ComponentPlace::Field(_)
            | ComponentPlace::Cookie(_)
            | ComponentPlace::Sending => {}
        }
        for name in request.names(component.content) {
            if self.shape.names.insert(mix(component.slot, name.digest.0)) {
                continue;
            }
            let field = component.place == ComponentPlace::FieldName;
            self.shape.sums.field_names.add(u64::from(field && !early), self.now_ms);
            self.value(request, name, kind, news);
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

    pub(super) fn rhythm(&mut self, observation: &ShapeObservation, sent_bytes: u64) {
        if observation.bytes < BEACON_NEWS || sent_bytes > SMALL_BODY {
            return;
        }
        let run = self.shape.rhythms.observe(observation.kind, observation.at_ms);
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

    /// Compares the sums, with `recent` news besides, with their thresholds.
    pub(super) fn sums(&mut self, recent: &RecentNews) {
        let (now, limits) = (self.now_ms, *self.thresholds);
        let sums = &self.shape.sums;
        let (field, awaited) = (sums.field.sum(now), self.shape.awaited.saturating_sub(AWAITED));
        let url = (sums.url.sum(now) + recent.url + awaited) / PARTS;
        let (new, place) = match url > field {
            true => (SignalCode::UrlNovelty, SignalPlace::Query),
            false => (SignalCode::Drip, SignalPlace::Attempt),
        };
        let (attempt, names) = (SignalPlace::Attempt, SignalPlace::FieldName);
        let credential = sums.credential.sum(now) + recent.credential;
        let identifier = sums.identifier.sum(now) + recent.identifier;
        use SignalCode as Code;
        #[rustfmt::skip]
        let rows = [
            (new, field + url, limits.new_bytes_per_day, place, "new bytes in fields and URLs in a day"),
            (Code::Drip, sums.choice.sum(now), limits.choice_bits_per_day, SignalPlace::Query, "bits in the order of known requests in a day"),
            (Code::Drip, identifier, limits.identifier_bytes_per_hour, attempt.clone(), "new bytes of identifiers in an hour"),
            (Code::EncodedRun, credential, limits.credential_bytes_per_hour, attempt, "new bytes of credentials in an hour"),
            (Code::FieldNovelty, sums.field_names.sum(now), limits.field_names_per_hour, names, "new field names in an hour"),
        ];
        for (code, value, threshold, place, what) in rows {
            self.raise_above(code, value, threshold, || place, what);
        }
    }

    /// Compares what was sent in the past hour with the host's past before it.
    pub(super) fn upload_ratio(&mut self) {
        let now_ms = self.now_ms;
        let shape = &self.shape;
        let (sent, received) = (shape.sent.sum(now_ms), shape.received.sum(now_ms));
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
        let what = "times the share sent to this host before";
        self.raise_above(SignalCode::UploadRatio, factor, UPLOAD_FACTOR, place, what);
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
