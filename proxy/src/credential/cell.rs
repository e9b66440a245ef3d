//! The value of one credential as it is now, and the task that keeps it fresh.
//!
//! A task for each credential fetches its value, so there is one flight at a time and no request ever fetches. A value is
//! fetched again when 75 to 85 % of its life has passed; the jitter keeps many instances from asking at once. After a
//! failure the task rests, longer each time, and the last value is used until it ends. A request that finds no value
//! waits for the flight in progress; while the task rests it learns at once why the last one failed.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rules::ids::CredentialName;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::credential::error::CredentialError;
use crate::credential::known::KnownValues;
use crate::credential::source::Lifetime;
use crate::credential::value::CredentialValue;
use crate::report::metrics;

/// A value is not used for this long before its stated end: a request takes time, and clocks differ.
pub(super) const MARGIN: Duration = Duration::from_secs(10);
/// Rest after the first failure; it doubles with each.
const FIRST_REST: Duration = Duration::from_secs(1);
/// Longest rest after a failure.
pub(super) const LONGEST_REST: Duration = Duration::from_secs(60);
/// Shortest time from one fetch to the next, however short a life is.
const SHORTEST_REST: Duration = Duration::from_secs(1);
/// How long the last value of a file is used while its file system does not answer. Long enough for an NFS server or a
/// CSI driver to come back; short, because a key that was withdrawn meanwhile must not be used for ever.
pub(super) const MAX_SILENCE: Duration = Duration::from_secs(60);

/// The value of one credential.
pub(super) struct CredentialCell {
    name: CredentialName,
    /// The deadline of one fetch, and how long a request waits for one.
    timeout: Duration,
    state: watch::Sender<CellState>,
    /// Wakes the task when a value has ended before its time, as after a machine slept.
    ended: Notify,
    known: Arc<KnownValues>,
}

/// Gives the values of a credential.
pub(super) trait ValueSource: Send {
    /// Asks for a value. The caller sets the deadline, by dropping the future.
    fn fetch(&mut self) -> impl Future<Output = Result<(CredentialValue, Lifetime), CredentialError>> + Send;
}

/// What is known about a credential.
#[derive(Default)]
struct CellState {
    held: Option<HeldValue>,
    flight: Flight,
    /// Why the last fetch failed; `None` if it succeeded.
    error: Option<CredentialError>,
}

struct HeldValue {
    value: Arc<CredentialValue>,
    at: Instant,
    /// When it may no longer be used. By both clocks: one stands still while the machine sleeps, the other can be set.
    until: Option<(Instant, SystemTime)>,
    /// Whether its source stated that end.
    stated: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flight {
    /// A fetch is in progress, or about to begin.
    #[default]
    Flying,
    Resting,
}

/// What people may know about the value of a credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ValueStatus {
    pub(crate) age: Option<Duration>,
    /// How long it is until the value ends, if its source states that.
    pub(crate) left: Option<Duration>,
    pub(crate) usable: bool,
    pub(crate) fetching: bool,
    pub(crate) error: Option<String>,
}

impl CellState {
    fn usable(&self) -> Option<&Arc<CredentialValue>> {
        let held = self.held.as_ref()?;
        let ended = |(until, wall)| Instant::now() >= until || SystemTime::now() >= wall;
        (!held.until.is_some_and(ended)).then_some(&held.value)
    }
}

impl HeldValue {
    fn new(value: Arc<CredentialValue>, lifetime: Lifetime) -> Self {
        let (at, wall) = (Instant::now(), SystemTime::now());
        let until = lifetime.usable().map(|usable| (at + usable, wall + usable));
        HeldValue { value, at, until, stated: matches!(lifetime, Lifetime::Stated(_)) }
    }
}

impl Lifetime {
    /// How long a value is used; `None`: as long as Sandbar runs.
    fn usable(self) -> Option<Duration> {
        match self {
            Lifetime::Stated(life) => Some(life.saturating_sub(MARGIN)),
            Lifetime::Cached(cache) => Some(cache),
            Lifetime::Endless => None,
        }
    }

    /// When to fetch again; `chance` is between 0 and 1.
    fn refresh_after(self, chance: f64) -> Option<Duration> {
        let part = 0.75 + 0.1 * chance;
        let (Lifetime::Stated(life) | Lifetime::Cached(life)) = self else { return None };
        let usable = self.usable().unwrap_or(life);
        // Of a short life, the margin is a large part.
        Some(life.mul_f64(part).min(usable.mul_f64(part.max(0.8))).max(SHORTEST_REST))
    }
}

/// How long to rest after `failures` in a row; `chance` is between 0 and 1.
fn rest_after(failures: u32, chance: f64) -> Duration {
    let doubled =
        FIRST_REST.saturating_mul(1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX));
    doubled.min(LONGEST_REST).mul_f64(1.0 - 0.25 * chance).max(FIRST_REST)
}

impl CredentialCell {
    pub(super) fn new(name: CredentialName, timeout: Duration, known: Arc<KnownValues>) -> Self {
        let state = watch::Sender::new(CellState::default());
        CredentialCell { name, timeout, state, ended: Notify::new(), known }
    }

    /// Returns the value of now, and waits for the flight in progress if there is none.
    pub(super) async fn value(&self) -> Result<Arc<CredentialValue>, CredentialError> {
        let mut state = self.state.subscribe();
        {
            let now = state.borrow();
            if let Some(value) = now.usable() {
                return Ok(value.clone());
            }
            if now.flight == Flight::Resting && now.error.is_none() {
                self.ended.notify_one();
            }
        }
        let until = Instant::now() + self.timeout;
        let waited = timeout_at(until, async {
            loop {
                {
                    let now = state.borrow_and_update();
                    if let Some(value) = now.usable() {
                        return Ok(value.clone());
                    }
                    if let (Flight::Resting, Some(error)) = (now.flight, &now.error) {
                        return Err(error.clone());
                    }
                }
                if state.changed().await.is_err() {
                    return Err(CredentialError::Ended);
                }
            }
        });
        waited.await.unwrap_or(Err(CredentialError::TimedOut(self.timeout)))
    }

    /// Returns the value of now without waiting.
    pub(super) fn usable(&self) -> Option<Arc<CredentialValue>> {
        self.state.borrow().usable().cloned()
    }

    pub(super) fn status(&self) -> ValueStatus {
        let state = self.state.borrow();
        let held = state.held.as_ref();
        let usable = state.usable().is_some();
        let left = held
            .filter(|held| held.stated)
            .and_then(|held| held.until)
            .map(|(until, _)| until.saturating_duration_since(Instant::now()) + MARGIN);
        let error = state.error.as_ref().map(ToString::to_string);
        ValueStatus {
            age: held.map(|held| held.at.elapsed()),
            left: left.filter(|_| usable),
            usable,
            fetching: state.flight == Flight::Flying,
            error: error.or_else(|| (held.is_some() && !usable).then(|| CredentialError::Ended.to_string())),
        }
    }

    /// Keeps the value fresh with what `source` gives, until it is dropped.
    pub(super) async fn keep_fresh(&self, mut source: impl ValueSource) {
        let mut failures: u32 = 0;
        loop {
            self.state.send_modify(|state| state.flight = Flight::Flying);
            let fetched = timeout(self.timeout, source.fetch()).await;
            let fetched = fetched.unwrap_or(Err(CredentialError::TimedOut(self.timeout)));
            let fetched = fetched.and_then(|(value, lifetime)| match lifetime.usable() {
                Some(Duration::ZERO) => Err(CredentialError::EndsAtOnce(MARGIN)),
                Some(_) | None => Ok((Arc::new(value), lifetime)),
            });
            let now = Instant::now();
            let next = match &fetched {
                Ok((_, lifetime)) => {
                    failures = 0;
                    lifetime.refresh_after(rand::random()).map(|after| now + after)
                }
                Err(_) => {
                    failures = failures.saturating_add(1);
                    Some(now + rest_after(failures, rand::random()))
                }
            };
            let failed = fetched.is_err();
            self.publish(fetched);
            let due = async {
                match next {
                    Some(next) => sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = self.ended.notified(), if !failed => sleep_until(now + SHORTEST_REST).await,
            }
        }
    }

    /// Publishes the outcome of a fetch.
    fn publish(&self, fetched: Result<(Arc<CredentialValue>, Lifetime), CredentialError>) {
        metrics::count_credential_fetch(self.name.as_str(), fetched.is_ok());
        if let Ok((value, _)) = &fetched {
            // First: once a request can carry it, answers are searched for it.
            self.known.adopt(&self.name, value);
        }
        let name = &self.name;
        self.state.send_modify(|state| {
            state.flight = Flight::Resting;
            match fetched {
                Ok((value, lifetime)) => {
                    if state.error.take().is_some() {
                        tracing::info!(credential = %name, "the credential can be used again");
                    }
                    state.held = Some(HeldValue::new(value, lifetime));
                }
                Err(error) => {
                    if state.error.as_ref() != Some(&error) {
                        let usable = state.usable().is_some();
                        tracing::warn!(credential = %name, %error, usable, "a credential cannot be fetched");
                    }
                    state.error = Some(error);
                }
            }
        });
    }

    /// Publishes what a look at a file found: a value, a fault, or nothing new.
    pub(super) fn publish_look(&self, found: Option<Result<Arc<CredentialValue>, CredentialError>>) {
        if let Some(Ok(value)) = &found {
            self.known.adopt(&self.name, value);
        }
        if let Some(found) = &found {
            metrics::count_credential_fetch(self.name.as_str(), found.is_ok());
        }
        let silence = Lifetime::Cached(MAX_SILENCE);
        self.state.send_if_modified(|state| {
            let fresh = found.is_some() || state.flight == Flight::Flying;
            state.flight = Flight::Resting;
            match found {
                Some(Ok(value)) => (state.held, state.error) = (Some(HeldValue::new(value, silence)), None),
                Some(Err(error)) => {
                    if state.error.as_ref() != Some(&error) {
                        tracing::warn!(credential = %self.name, %error, "a credential cannot be used");
                    }
                    // A file that is gone or broken was withdrawn: its value is not used any more.
                    (state.held, state.error) = (None, Some(error));
                }
                None => {
                    if let Some(held) = &mut state.held {
                        self.known.adopt(&self.name, &held.value); // another of this name may have come and gone
                        *held = HeldValue { at: held.at, ..HeldValue::new(held.value.clone(), silence) };
                    }
                }
            }
            fresh
        });
    }

    /// Returns the value of a file, or since when its file system does not answer.
    pub(super) async fn file_value(&self, path: &Path) -> Result<Arc<CredentialValue>, CredentialError> {
        let silent = |silence| CredentialError::Silent { path: path.to_owned(), silence };
        let mut state = self.state.subscribe();
        let looked = timeout(self.timeout, state.wait_for(|state| state.flight == Flight::Resting)).await;
        let Ok(Ok(state)) = looked else { return Err(silent(self.timeout)) };
        match (state.usable(), &state.error, &state.held) {
            (Some(value), ..) => Ok(value.clone()),
            (None, Some(error), _) => Err(error.clone()),
            (None, None, held) => Err(silent(held.as_ref().map_or(MAX_SILENCE, |held| held.silence()))),
        }
    }
}

impl HeldValue {
    /// How long its file has not answered, once that is longer than [`MAX_SILENCE`].
    fn silence(&self) -> Duration {
        let since = self.until.map(|(until, _)| Instant::now().saturating_duration_since(until));
        MAX_SILENCE + since.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use tokio::time::{advance, sleep};

    use super::*;

    type Outcome = Result<(&'static str, Lifetime), CredentialError>;

    /// A source that gives one outcome after the other, the last one again and again, and counts.
    #[derive(Clone)]
    struct Script {
        outcomes: Arc<Mutex<VecDeque<Outcome>>>,
        fetches: Arc<Mutex<Vec<Instant>>>,
        takes: Duration,
    }

    impl Script {
        fn new(outcomes: impl IntoIterator<Item = Outcome>) -> Self {
            let outcomes = Arc::new(Mutex::new(outcomes.into_iter().collect()));
            Script { outcomes, fetches: Arc::default(), takes: Duration::from_millis(100) }
        }

        fn count(&self) -> usize {
            self.fetches.lock().unwrap().len()
        }

        async fn next(&self) -> Result<(CredentialValue, Lifetime), CredentialError> {
            self.fetches.lock().unwrap().push(Instant::now());
            sleep(self.takes).await;
            let outcome = {
                let mut outcomes = self.outcomes.lock().unwrap();
                if outcomes.len() > 1 { outcomes.pop_front() } else { outcomes.front().cloned() }
            };
            let (text, lifetime) = outcome.unwrap()?;
            Ok((CredentialValue::parse(text)?, lifetime))
        }

        fn start(&self) -> Arc<CredentialCell> {
            let name = CredentialName::parse("key").unwrap();
            let cell = Arc::new(CredentialCell::new(name, Duration::from_secs(10), Arc::default()));
            let (kept, script) = (cell.clone(), self.clone());
            tokio::spawn(async move { kept.keep_fresh(script).await });
            cell
        }
    }

    impl ValueSource for Script {
        fn fetch(
            &mut self,
        ) -> impl Future<Output = Result<(CredentialValue, Lifetime), CredentialError>> + Send {
            self.next()
        }
    }

    fn stated(text: &'static str, seconds: u64) -> Outcome {
        Ok((text, Lifetime::Stated(Duration::from_secs(seconds))))
    }

    fn down() -> Outcome {
        Err(CredentialError::Busy)
    }

    async fn text(cell: &CredentialCell) -> Result<String, CredentialError> {
        cell.value().await.map(|value| value.text().unwrap().to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_is_fetched_again_when_three_quarters_of_its_life_have_passed() {
        let script = Script::new([stated("first-value", 3600), stated("other-value", 3600)]);
        let (cell, start) = (script.start(), Instant::now());
        assert_eq!(text(&cell).await.unwrap(), "first-value");
        while text(&cell).await.unwrap() == "first-value" {
            sleep(Duration::from_secs(5)).await;
        }
        let after = start.elapsed().as_secs();
        assert!((2695..=3070).contains(&after), "{after} s");
        assert_eq!(script.count(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn p17_a_hundred_requests_wait_for_one_fetch() {
        let script = Script::new([stated("first-value", 3600)]);
        let cell = script.start();
        let requests: Vec<_> = (0..100)
            .map(|_| {
                let cell = cell.clone();
                tokio::spawn(async move { text(&cell).await })
            })
            .collect();
        for request in requests {
            assert_eq!(request.await.unwrap().unwrap(), "first-value");
        }
        assert_eq!(script.count(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn p16_the_last_value_is_used_until_ten_seconds_before_its_end_and_no_longer() {
        let script = Script::new([stated("first-value", 100), down()]);
        let (cell, start) = (script.start(), Instant::now());
        while text(&cell).await.is_ok() {
            sleep(Duration::from_millis(500)).await;
        }
        let after = start.elapsed().as_secs_f64();
        assert!((89.5..=91.5).contains(&after), "{after} s");
        assert!(script.count() > 3, "it was tried again meanwhile");
        let status = cell.status();
        assert!(!status.usable && status.left.is_none() && status.error.is_some(), "{status:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn p17_a_source_that_is_down_is_asked_less_and_less_and_requests_learn_at_once() {
        let script = Script::new([down()]);
        let cell = script.start();
        assert_eq!(text(&cell).await.unwrap_err(), CredentialError::Busy);
        let asked = Instant::now();
        for _ in 0..100 {
            assert!(text(&cell).await.is_err());
        }
        assert!(asked.elapsed() < Duration::from_secs(2), "they do not wait while the task rests");
        sleep(Duration::from_secs(1000)).await;
        let times = script.fetches.lock().unwrap().clone();
        let rests: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        assert!(rests[0] >= 1.0 && rests[0] < 1.5, "{rests:?}");
        assert!(rests.iter().skip(7).all(|rest| (45.0..=61.0).contains(rest)), "{rests:?}");
        assert!((20..=32).contains(&times.len()), "{rests:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn p16_a_source_that_hangs_costs_its_deadline_and_then_recovers() {
        let script =
            Script { takes: Duration::from_secs(3600), ..Script::new([stated("first-value", 3600)]) };
        let (cell, start) = (script.start(), Instant::now());
        let ended = text(&cell).await.unwrap_err();
        assert_eq!(ended, CredentialError::TimedOut(Duration::from_secs(10)));
        assert!(start.elapsed() <= Duration::from_secs(11));
        let script = Script::new([down(), stated("first-value", 3600)]);
        let cell = script.start();
        assert!(text(&cell).await.is_err());
        sleep(Duration::from_secs(2)).await;
        assert_eq!(text(&cell).await.unwrap(), "first-value");
        assert_eq!(cell.status().error, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_life_within_the_margin_is_refused_and_a_short_one_is_not_asked_for_all_the_time() {
        for seconds in [0, 1, 10] {
            let cell = Script::new([stated("first-value", seconds)]).start();
            assert_eq!(text(&cell).await.unwrap_err(), CredentialError::EndsAtOnce(MARGIN), "{seconds}");
        }
        let script = Script::new([stated("first-value", 11)]);
        let cell = script.start();
        sleep(Duration::from_secs(60)).await;
        assert!((40..=60).contains(&script.count()), "{}", script.count());
        assert!(cell.status().usable || cell.status().fetching);
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_no_end_is_fetched_once_and_a_cached_value_again() {
        let endless = Script::new([Ok(("first-value", Lifetime::Endless))]);
        let cached = Script::new([
            Ok(("first-value", Lifetime::Cached(Duration::from_secs(300)))),
            Ok(("other-value", Lifetime::Cached(Duration::from_secs(300)))),
        ]);
        let (kept, changed) = (endless.start(), cached.start());
        advance(Duration::from_secs(1)).await;
        assert_eq!(text(&changed).await.unwrap(), "first-value");
        sleep(Duration::from_secs(260)).await;
        assert_eq!(text(&changed).await.unwrap(), "other-value");
        sleep(Duration::from_secs(86_400)).await;
        assert_eq!(text(&kept).await.unwrap(), "first-value");
        assert_eq!(endless.count(), 1);
        assert_eq!(kept.status().left, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_that_ended_while_the_machine_slept_is_fetched_again() {
        let script = Script::new([stated("first-value", 3600), stated("other-value", 3600)]);
        let cell = script.start();
        assert_eq!(text(&cell).await.unwrap(), "first-value");
        // The wall clock has moved, the monotonic one has not.
        cell.state.send_modify(|state| {
            let held = state.held.as_mut().unwrap();
            held.until = held.until.map(|(until, _)| (until, SystemTime::now()));
        });
        sleep(Duration::from_secs(2)).await;
        assert_eq!(text(&cell).await.unwrap(), "other-value");
        assert_eq!(script.count(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn p16_a_silent_file_keeps_its_value_for_a_while_and_a_broken_one_has_none() {
        let name = CredentialName::parse("key").unwrap();
        let cell = CredentialCell::new(name, Duration::from_secs(1), Arc::default());
        let path = Path::new("/mnt/key");
        let unseen = cell.file_value(path).await.err().unwrap();
        assert_eq!(unseen.to_string(), "its file /mnt/key has not answered for 1 s");
        let value = Arc::new(CredentialValue::parse("first-value").unwrap());
        cell.publish_look(Some(Ok(value)));
        advance(MAX_SILENCE - Duration::from_secs(1)).await;
        assert!(cell.file_value(path).await.is_ok());
        cell.publish_look(None);
        advance(MAX_SILENCE - Duration::from_secs(1)).await;
        assert!(cell.file_value(path).await.is_ok(), "the same file was seen again");
        advance(Duration::from_secs(2)).await;
        let late = cell.file_value(path).await.err().unwrap();
        assert_eq!(late.to_string(), "its file /mnt/key has not answered for 61 s");
        cell.publish_look(None);
        assert!(cell.file_value(path).await.is_ok(), "it is back");
        cell.publish_look(Some(Err(CredentialError::Empty)));
        assert_eq!(cell.file_value(path).await.err(), Some(CredentialError::Empty));
    }
}
