//! A request looked at without a sandbox, a record or a network, for `sandbar signals try`. It passes the same scanner,
//! account and shape detectors as one that leaves, as the first request of a sandbox to its host.

use std::path::Path;
use std::sync::Arc;

use rules::Permit;
use rules::signals::bits::HeaderAccount;
use rules::signals::secrets::OwnPattern;
use rules::signals::settings::{BodyInspection, SignalKind, SignalSettings, SignalTerms};
use rules::signals::{Signal, SignalCode, SignalMode, SignalPlace};
use serde::Serialize;

use super::body::search_at_once;
use super::head::RequestHead;
use super::scan_set::{AttemptMatchers, CanaryStore, ScanSet};
use super::state::SandboxSignals;
use super::{findings, head, now_ms};
use crate::credential::CredentialStore;

/// What a detector found in a tried request, in words. Never contains the content itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TriedSignal {
    /// The code of the finding in the log.
    pub code: &'static str,
    pub place: String,
    /// The encodings around it, outermost first.
    pub encodings: Vec<&'static str>,
    pub what: String,
    /// The measure that `threshold` is compared with; 1 of 1 where there is nothing to measure.
    pub value: u64,
    pub threshold: u64,
    /// The key of `[signals]` that governs it; none if it is always denied.
    pub key: Option<&'static str>,
    /// What the policy does about it: `off`, `flag` or `deny`.
    pub verdict: String,
    /// All of that in one line.
    pub text: String,
}

/// What a request says outside its body, in bits (P19).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TriedBits {
    pub bits: u64,
    /// The dearest components.
    pub dearest: Vec<TriedComponent>,
    /// `header_bits_per_hour`, where a policy sets it.
    pub limit: Option<u64>,
}

/// A component of a request, and its price.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TriedComponent {
    pub place: String,
    pub bits: u64,
}

/// A signal that Sandbar knows, for `sandbar signals list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KnownSignal {
    pub code: &'static str,
    pub meaning: &'static str,
    /// The keys of `[signals]` that govern it, by where it is found; none if it is always denied.
    pub keys: Vec<&'static str>,
    /// What happens if no policy says anything.
    pub default: String,
}

/// Looks at requests, by the terms of one policy.
pub(crate) struct Trial {
    signals: Arc<SandboxSignals>,
    matchers: Arc<AttemptMatchers>,
    terms: SignalTerms,
    host: String,
}

/// What the detectors found, in the order in which they look.
#[derive(Default)]
pub(crate) struct TrialFindings {
    /// Secrets, canaries and credentials.
    pub(crate) content: Vec<TriedSignal>,
    /// How unusual the head is.
    pub(crate) form: Vec<TriedSignal>,
}

/// What to search for besides the known shapes of secrets.
#[derive(Default)]
pub(crate) struct TrialSet {
    pub(crate) own_patterns: Vec<OwnPattern>,
    pub(crate) canaries: Option<CanaryStore>,
    pub(crate) credentials: Option<CredentialStore>,
}

impl TrialSet {
    /// Reads the canaries of an instance from its log directory.
    pub(crate) fn read_canaries(&mut self, log_dir: &Path) -> anyhow::Result<()> {
        self.canaries = Some(CanaryStore::open(log_dir)?);
        Ok(())
    }

    fn compile(&self) -> anyhow::Result<ScanSet> {
        let (no_canaries, no_credentials) = (CanaryStore::empty(), CredentialStore::open([])?);
        let canaries = self.canaries.as_ref().unwrap_or(&no_canaries);
        let credentials = self.credentials.as_ref().unwrap_or(&no_credentials);
        ScanSet::compile(&self.own_patterns, canaries, credentials)
    }
}

impl Trial {
    /// Without a permit, the defaults apply.
    pub(crate) fn new(set: &TrialSet, permit: Option<&Permit>, host: &str) -> anyhow::Result<Self> {
        let signals = Arc::new(SandboxSignals::unstored()?);
        let matchers = AttemptMatchers::new(&set.compile()?, &signals, permit, &[], now_ms());
        let terms = permit.map(|permit| permit.signals().clone()).unwrap_or_default();
        Ok(Trial { signals, matchers, terms, host: host.to_owned() })
    }

    pub(crate) fn terms(&self) -> &SignalTerms {
        &self.terms
    }

    /// Looks at the name of the host, which is all that is seen of a tunnel.
    pub(crate) fn look_at_name(&self, name: &str, found: &mut TrialFindings) {
        let mut signals = Vec::new();
        head::scan_name(&self.matchers, name, &mut signals);
        found.content.extend(self.describe(&signals));
    }

    /// Looks at the head, and returns its price with how it is sent.
    pub(crate) fn look_at_head(
        &self,
        head: &RequestHead<'_>,
        sending: &str,
        found: &mut TrialFindings,
    ) -> TriedBits {
        let mut signals = Vec::new();
        head::scan(&self.matchers, head, &mut signals);
        found.content.extend(self.describe(&signals));

        let (now, thresholds) = (now_ms(), self.terms.thresholds());
        let account = HeaderAccount::new(*self.signals.keys().digest());
        let components = account.split(&head.parts());
        let mut signals = Vec::new();
        self.signals.with_shape(&self.host, |shape| {
            // No answer follows, so nothing is done with the observation.
            let _observation = shape.observe(&components, now, &thresholds, &mut signals);
        });
        let components = components.sent_as(sending.as_bytes());
        let price = account.price(&self.host, &components);
        let bits = price.millibits.div_ceil(1000);
        signals.extend(self.signals.note_bits(bits, thresholds.header_bits_per_hour, now));
        found.form.extend(self.describe(&signals));
        let dearest = price.dearest(&components).into_iter();
        let dearest = dearest.map(|(place, bits)| TriedComponent { place: findings::place(&place), bits });
        TriedBits { bits, dearest: dearest.collect(), limit: None }
    }

    /// Looks at the body, unless the policy skips bodies.
    pub(crate) fn look_at_body(&self, body: &[u8], encoding: Option<&[u8]>, found: &mut TrialFindings) {
        if self.terms.bodies() == BodyInspection::Searched {
            let signals = search_at_once(&self.matchers, encoding, body);
            found.content.extend(self.describe(&signals));
        }
    }

    fn describe(&self, signals: &[Signal]) -> Vec<TriedSignal> {
        signals.iter().map(|signal| self.tried_signal(signal)).collect()
    }

    fn tried_signal(&self, signal: &Signal) -> TriedSignal {
        TriedSignal {
            code: findings::code(signal.code).code(),
            place: findings::place(&signal.place),
            encodings: signal.encodings.iter().map(|encoding| findings::encoding_name(*encoding)).collect(),
            what: signal.what.clone(),
            value: signal.value,
            threshold: signal.threshold,
            key: SignalKind::of(signal.code, &signal.place).map(SignalKind::key),
            verdict: self.matchers.mode(&self.terms, signal).to_string(),
            text: findings::describe(signal),
        }
    }
}

/// Returns every signal that Sandbar knows.
pub fn known_signals() -> Vec<KnownSignal> {
    findings::SIGNALS.into_iter().map(known_signal).collect()
}

fn known_signal(code: SignalCode) -> KnownSignal {
    // One place for each key that a place can decide by; for most signals the place does not matter. Of these, bodies
    // have one alone.
    let of_bodies = code == SignalCode::ContentUnsearched;
    let first = if of_bodies { SignalPlace::Body } else { SignalPlace::Attempt };
    let places = [first, SignalPlace::Field(String::new()), SignalPlace::Path];
    let mut kinds: Vec<SignalKind> = places.iter().filter_map(|place| SignalKind::of(code, place)).collect();
    kinds.dedup();
    let settings = SignalSettings::default();
    let modes = kinds.iter().map(|kind| settings.mode(*kind));
    let (finding, default) = (findings::code(code), modes.max().unwrap_or(SignalMode::Deny));
    KnownSignal {
        code: finding.code(),
        meaning: finding.meaning(),
        keys: kinds.iter().map(|kind| kind.key()).collect(),
        default: default.to_string(),
    }
}
