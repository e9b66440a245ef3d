//! Inspection: what leaves is searched for secrets, canaries and recalled text, and its form compared with earlier
//! requests. The detectors are those of `rules::signals`; here they get their state, and what they find gets a record.
//!
//! The departure begins an [`Inspection`] for every attempt. It looks at the names and the head before anything is
//! charged or recorded as allowed, and at the body piece by piece before each is forwarded. Where the policy denies a
//! signal, the bytes that raised it stay here: `http::outgoing` holds the body back as far as a match that is not
//! complete reaches.

mod body;
mod findings;
mod head;
mod names;
mod scan_set;
mod state;
mod trial;
mod turns;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use audit::OpenRecord;
use http::HeaderMap;
use http::header::SET_COOKIE;
use rules::Permit;
use rules::ids::BankId;
use rules::signals::settings::BodyInspection;
use rules::signals::shape::{RequestOutcome, ShapeObservation};
use rules::signals::{Signal, SignalMode};

pub(crate) use body::BodyInspector;
pub(crate) use head::RequestHead;
pub(crate) use names::{QueryInspector, inspect_name};
pub(crate) use scan_set::{CanaryStore, Inspector};
pub(crate) use state::{PricedRequest, REMEMBERED_BYTES, SandboxSignals, SignalKeys};
pub use trial::{KnownSignal, TriedBits, TriedComponent, TriedSignal, known_signals};
pub(crate) use trial::{Trial, TrialFindings, TrialSet};
pub(crate) use turns::OpenBlocks;

use crate::report::metrics;
use crate::report::refusal::Refusal;
use scan_set::AttemptMatchers;
use turns::ScanTurns;

/// A head from this size on is searched in a turn of its sandbox.
const LARGE_HEAD: usize = 4 << 10;
/// Cookies of one response that are remembered, and fields besides.
const MAX_COOKIES: usize = 64;
/// Fields of an answer whose values a client sends back, besides those of sessions.
const GIVEN_FIELDS: [&str; 5] = ["etag", "last-modified", "link", "location", "www-authenticate"];

/// What Sandbar sees of an attempt.
pub(crate) enum AttemptContent<'a> {
    /// The name alone: a tunnel, or raw TCP.
    Name,
    /// A request whose body follows in chunks.
    Request(&'a RequestHead<'a>),
    /// A memory call, read whole, and the banks that it selects.
    Call { head: &'a RequestHead<'a>, body: &'a [u8], banks: &'a [BankId] },
}

impl AttemptContent<'_> {
    /// Returns what of the attempt is searched, for its record.
    pub(crate) fn coverage(&self, permit: &Permit) -> &'static str {
        match (self, permit.signals().bodies()) {
            (AttemptContent::Name, _) => "none",
            (AttemptContent::Request(_), BodyInspection::Skipped) => "head",
            (AttemptContent::Request(head), BodyInspection::Searched) if !head.is_searchable() => "head",
            (AttemptContent::Call { .. }, _) | (AttemptContent::Request(_), BodyInspection::Searched) => {
                "all"
            }
        }
    }
}

/// The inspection of one attempt.
pub(crate) struct Inspection {
    permit: Permit,
    host: String,
    signals: Arc<SandboxSignals>,
    matchers: Arc<AttemptMatchers>,
    turns: Arc<ScanTurns>,
    observation: Option<ShapeObservation>,
}

impl Inspection {
    /// Looks at everything but a body that is still to come, records what is found, and refuses what the policy denies.
    pub(crate) async fn begin(
        inspector: &Inspector,
        signals: Arc<SandboxSignals>,
        permit: &Permit,
        content: &AttemptContent<'_>,
        record: &OpenRecord,
    ) -> Result<Self, Refusal> {
        let set = inspector.current();
        let banks = match content {
            AttemptContent::Call { banks, .. } => banks,
            AttemptContent::Name | AttemptContent::Request(_) => &[][..],
        };
        let matchers = AttemptMatchers::new(&set, &signals, Some(permit), banks, now_ms());
        let host = permit.host().to_string();
        let (permit, turns) = (permit.clone(), inspector.turns().clone());
        let mut inspection = Inspection { permit, host, signals, matchers, turns, observation: None };
        let mut found = Vec::new();
        inspection.look_at_name(&mut found);
        match content {
            AttemptContent::Name => {}
            AttemptContent::Request(head) => inspection.look_at_head(head, &mut found).await,
            AttemptContent::Call { head, body, .. } => {
                inspection.look_at_head(head, &mut found).await;
                body::search_whole(&inspection.matchers, &inspection.turns, body, &mut found).await;
            }
        }
        inspection.judge(found, record).await?;
        Ok(inspection)
    }

    /// Returns the inspector of the request's body, if bodies are searched.
    pub(crate) fn body(&self, encoding: Option<&[u8]>) -> Option<BodyInspector> {
        let searched = self.permit.signals().bodies() == BodyInspection::Searched;
        searched.then(|| BodyInspector::new(&self.matchers, encoding, &self.turns))
    }

    /// Records findings, and refuses what the policy denies, and what could not be searched for want of memory.
    pub(crate) async fn judge(&self, found: Vec<Signal>, record: &OpenRecord) -> Result<(), Refusal> {
        let mut refusal = None;
        for signal in found {
            let mode = self.mode(&signal);
            if mode == SignalMode::Off {
                continue;
            }
            metrics::count_signal(findings::code(signal.code).code(), mode);
            self.signals.count(signal.code, mode);
            record.record_finding(&findings::finding(&signal, mode, &self.permit)).await?;
            if mode == SignalMode::Deny && refusal.is_none() {
                let detail = findings::describe(&signal);
                refusal = Some(Refusal::from(findings::reason(signal.code)).with_detail(detail));
            }
        }
        self.matchers.take_exhausted().or(refusal).map_or(Ok(()), Err)
    }

    fn mode(&self, signal: &Signal) -> SignalMode {
        self.matchers.mode(self.permit.signals(), signal)
    }

    /// Prices the head of a request that leaves now; see [`SandboxSignals::price_request`].
    pub(crate) async fn price_head<'a>(
        &'a self,
        head: &'a RequestHead<'_>,
        sending: &'a str,
    ) -> PricedRequest<'a> {
        self.signals.price_request(&self.host, &head.parts(), sending).await
    }

    /// Counts the bits of a request that leaves, and flags more than is usual in an hour.
    pub(crate) async fn note_bits(&self, bits: u64, record: &OpenRecord) -> Result<(), Refusal> {
        let usual = self.permit.signals().thresholds().header_bits_per_hour;
        let found: Vec<Signal> = self.signals.note_bits(bits, usual, now_ms()).into_iter().collect();
        self.judge(found, record).await
    }

    /// Takes note of what an answer gives: sending it back says nothing new.
    pub(crate) fn learn_answer(&self, fields: &HeaderMap) {
        let cookies = fields.get_all(SET_COOKIE).iter().filter_map(|cookie| {
            let pair = cookie.as_bytes().split(|byte| *byte == b';').next()?;
            let at = pair.iter().position(|byte| *byte == b'=')?;
            let (name, value) = pair.split_at_checked(at)?;
            Some((name.trim_ascii(), value.get(1..)?.trim_ascii()))
        });
        let cookies: Vec<_> = cookies.take(MAX_COOKIES).collect();
        let given = |name: &str| GIVEN_FIELDS.contains(&name) || name.ends_with("-session-id");
        let values = fields.iter().filter(|(name, _)| given(name.as_str())).take(MAX_COOKIES);
        let values: Vec<&[u8]> = values.map(|(_, value)| value.as_bytes()).collect();
        if cookies.is_empty() && values.is_empty() {
            return;
        }
        let key = self.signals.keys().digest();
        self.signals.with_shape(&self.host, |shape| {
            cookies.iter().for_each(|(name, value)| shape.learn_cookie(key, name, value));
            values.iter().for_each(|value| shape.learn_answer(key, value));
        });
    }

    /// Takes note of how much was sent and received, and of the recalled text that left.
    pub(crate) async fn end(&mut self, outcome: RequestOutcome, record: &OpenRecord) {
        self.signals.add_flows(self.matchers.flows(), &self.host, record.id(), now_ms());
        self.end_refused(outcome, record).await;
    }

    /// Takes note of how much was sent and received of a request that was refused after it had begun to leave.
    pub(crate) async fn end_refused(&mut self, outcome: RequestOutcome, record: &OpenRecord) {
        let now = now_ms();
        let Some(observation) = self.observation.take() else { return };
        let mut found = Vec::new();
        let thresholds = self.permit.signals().thresholds();
        self.signals.with_shape(&self.host, |shape| {
            shape.observe_outcome(observation, outcome, now, &thresholds, &mut found);
        });
        // It has left, so a denial can only concern the requests that follow.
        for signal in found.iter().filter(|signal| self.mode(signal) == SignalMode::Deny) {
            self.signals.block(&self.host, signal.code, now);
        }
        drop(self.judge(found, record).await);
    }

    async fn look_at_head(&mut self, head: &RequestHead<'_>, found: &mut Vec<Signal>) {
        let (turns, signals) = (self.turns.clone(), self.signals.clone());
        let _turn = match head.size() >= LARGE_HEAD {
            true => Some(turns.wait(&signals).await),
            false => None,
        };
        let blocked = self.signals.blocked(&self.host, now_ms()).map(findings::repeated);
        found.extend(blocked.filter(|signal| self.mode(signal) == SignalMode::Deny));
        head::scan(&self.matchers, head, found);
        let (now, thresholds) = (now_ms(), self.permit.signals().thresholds());
        let components = self.signals.keys().split(&head.parts());
        let mut raised = Vec::new();
        let observation = self
            .signals
            .with_shape(&self.host, |shape| shape.observe(&components, now, &thresholds, &mut raised));
        self.add_denied(&observation, &mut raised);
        found.extend(raised);
        self.observation = Some(observation);
    }

    /// Adds signals that were reported a short time ago, where the policy denies them: each request is refused.
    fn add_denied(&self, observation: &ShapeObservation, raised: &mut Vec<Signal>) {
        for code in findings::SHAPES {
            let again = observation.raised(code) && !raised.iter().any(|signal| signal.code == code);
            let signal = findings::repeated(code);
            if again && self.mode(&signal) == SignalMode::Deny {
                raised.push(signal);
            }
        }
    }

    fn look_at_name(&self, found: &mut Vec<Signal>) {
        if let Some(name) = self.permit.host().name() {
            head::scan_name(&self.matchers, name.as_str(), found);
        }
    }

    pub(crate) fn signals(&self) -> &Arc<SandboxSignals> {
        &self.signals
    }
}

/// Milliseconds since the epoch.
pub(crate) fn now_ms() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}
