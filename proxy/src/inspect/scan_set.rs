//! What to look for: shapes of secrets, the operator's patterns, the values of credentials, and canaries; and the
//! matchers of one attempt.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use rules::Permit;
use rules::ids::BankId;
use rules::signals::canary::{self, Canary, CanaryScanner, CanarySet, CanaryShape};
use rules::signals::content::{BoxedMatcher, MatcherFactory, SearchMemory};
use rules::signals::flow::{FlowMatch, FlowMatcher};
use rules::signals::secrets::{ExactValue, OwnPattern, PatternSet, SecretMatcher, SecretSettings};
use rules::signals::settings::{SignalKind, SignalTerms};
use rules::signals::{Signal, SignalCode, SignalMode, ViewMatcher};
use serde::{Deserialize, Serialize};

use super::state::SandboxSignals;
use super::turns::ScanTurns;
use crate::credential::CredentialStore;
use crate::report::refusal::Refusal;
use crate::state_file::{Durability, read_state, write_atomic};

/// The file of the canaries, in the log directory.
const CANARY_FILE: &str = "canaries.json";

/// Knows what to look for, and follows credentials and canaries as they change.
pub(crate) struct Inspector {
    own_patterns: Vec<OwnPattern>,
    canaries: Arc<CanaryStore>,
    credentials: Arc<CredentialStore>,
    current: ArcSwap<ScanSet>,
    turns: Arc<ScanTurns>,
}

/// What to look for, compiled.
pub(crate) struct ScanSet {
    patterns: Arc<PatternSet>,
    canaries: Arc<CanarySet>,
    has_credentials: bool,
    /// The versions of credentials and canaries that it was made from.
    made_from: (u64, u64),
}

/// The canaries of an instance, kept in a file.
pub(crate) struct CanaryStore {
    path: PathBuf,
    canaries: Mutex<(u64, Vec<Canary>)>,
}

/// A canary as it is stored.
#[derive(Serialize, Deserialize)]
struct StoredCanary {
    name: String,
    shape: String,
    values: Vec<String>,
}

impl Inspector {
    pub(crate) fn new(
        own_patterns: Vec<OwnPattern>,
        canaries: Arc<CanaryStore>,
        credentials: Arc<CredentialStore>,
    ) -> anyhow::Result<Self> {
        let current = ScanSet::compile(&own_patterns, &canaries, &credentials)?;
        let (current, turns) = (ArcSwap::from_pointee(current), Arc::new(ScanTurns::new()));
        Ok(Inspector { own_patterns, canaries, credentials, current, turns })
    }

    /// Returns what to look for now.
    pub(crate) fn current(&self) -> Arc<ScanSet> {
        let current = self.current.load_full();
        if current.made_from == (self.credentials.version(), self.canaries.version()) {
            return current;
        }
        match ScanSet::compile(&self.own_patterns, &self.canaries, &self.credentials) {
            Ok(fresh) => {
                let fresh = Arc::new(fresh);
                self.current.store(fresh.clone());
                fresh
            }
            Err(error) => {
                tracing::error!(%error, "cannot compile what to search for; still using the last one");
                current
            }
        }
    }

    pub(super) fn turns(&self) -> &Arc<ScanTurns> {
        &self.turns
    }

    pub(crate) fn canaries(&self) -> &Arc<CanaryStore> {
        &self.canaries
    }
}

impl ScanSet {
    pub(super) fn compile(
        own_patterns: &[OwnPattern],
        canaries: &CanaryStore,
        credentials: &CredentialStore,
    ) -> anyhow::Result<Self> {
        let version = credentials.version();
        let (made, canaries) = sys::lock(&canaries.canaries).clone();
        let set = CanarySet::new(canaries).context("the canaries")?;
        let canary_values = set.exact_values().map(|(canary, value)| ExactValue {
            label: format!("canary \"{}\"", canary.name()),
            code: SignalCode::CanaryUsed,
            bytes: value.as_bytes().to_vec(),
        });
        let credentials: Vec<ExactValue> = credentials.exact_values();
        let has_credentials = !credentials.is_empty();
        let exact_values = canary_values.chain(credentials).collect();
        let settings =
            SecretSettings { known_shapes: true, own_patterns: own_patterns.to_vec(), exact_values };
        let patterns = PatternSet::compile(&settings).context("the patterns to search for")?;
        let (patterns, canaries) = (Arc::new(patterns), Arc::new(set));
        Ok(ScanSet { patterns, canaries, has_credentials, made_from: (version, made) })
    }
}

impl CanaryStore {
    /// Reads the canaries that earlier processes made.
    ///
    /// # Errors
    ///
    /// Returns an error for an unreadable file: starting without it would let canaries pass.
    pub(crate) fn open(log_dir: &Path) -> anyhow::Result<Self> {
        let path = log_dir.join(CANARY_FILE);
        let shown = path.display().to_string();
        let bytes = read_state(&path).with_context(|| format!("cannot read {shown}"))?;
        let stored: Vec<StoredCanary> = match bytes {
            Some(bytes) => serde_json::from_slice(&bytes).with_context(|| format!("cannot read {shown}"))?,
            None => Vec::new(),
        };
        let read = |stored: StoredCanary| {
            Ok(Canary::from_values(stored.shape.parse::<CanaryShape>()?, &stored.name, stored.values)?)
        };
        let canaries: anyhow::Result<Vec<Canary>> = stored.into_iter().map(read).collect();
        let canaries = canaries.with_context(|| format!("cannot read {shown}"))?;
        Ok(CanaryStore { path, canaries: Mutex::new((1, canaries)) })
    }

    /// Knows no canaries, and stores none.
    pub(super) fn empty() -> Self {
        CanaryStore { path: PathBuf::new(), canaries: Mutex::default() }
    }

    fn version(&self) -> u64 {
        sys::lock(&self.canaries).0
    }

    /// Lists names and shapes, never values.
    pub(crate) fn list(&self) -> Vec<(String, CanaryShape)> {
        let canaries = sys::lock(&self.canaries);
        canaries.1.iter().map(|canary| (canary.name().to_owned(), canary.shape())).collect()
    }

    /// Makes a canary and stores it. Blocks on its file.
    pub(crate) fn create(&self, name: &str, shape: CanaryShape) -> anyhow::Result<Canary> {
        let random: [u8; canary::RANDOM_BYTES] = certs::random_bytes()?;
        let made = canary::make(shape, name, &random)?;
        let mut canaries = sys::lock(&self.canaries).1.clone();
        if canaries.iter().any(|other| other.name() == name) {
            bail!("there is a canary `{name}` already: choose another name, or remove that one");
        }
        canaries.push(made.clone());
        self.replace(canaries)?;
        Ok(made)
    }

    /// Removes a canary. Blocks on its file.
    pub(crate) fn remove(&self, name: &str) -> anyhow::Result<()> {
        let mut canaries = sys::lock(&self.canaries).1.clone();
        let before = canaries.len();
        canaries.retain(|canary| canary.name() != name);
        if canaries.len() == before {
            bail!("there is no canary `{name}`: see `sandbar canary list`");
        }
        self.replace(canaries)
    }

    fn replace(&self, canaries: Vec<Canary>) -> anyhow::Result<()> {
        CanarySet::new(canaries.clone())?;
        let stored: Vec<StoredCanary> = canaries
            .iter()
            .map(|canary| StoredCanary {
                name: canary.name().to_owned(),
                shape: canary.shape().to_string(),
                values: canary.values().to_vec(),
            })
            .collect();
        let shown = self.path.display();
        write_atomic(&self.path, &stored, Durability::Disk)
            .with_context(|| format!("cannot write {shown}"))?;
        let mut current = sys::lock(&self.canaries);
        *current = (current.0 + 1, canaries);
        Ok(())
    }
}

/// Makes the matchers of one attempt, and collects the recalled text that they see.
pub(super) struct AttemptMatchers {
    patterns: Arc<PatternSet>,
    canaries: Arc<CanarySet>,
    signals: Arc<SandboxSignals>,
    /// Whether `patterns` has values that only Sandbar may send.
    has_credentials: bool,
    /// None for a name that no rule allows.
    permit: Option<Permit>,
    /// The banks that a memory call selects, whose own text may come back to them.
    own_banks: Vec<BankId>,
    now_ms: u64,
    flows: Mutex<BTreeMap<BankId, u64>>,
    /// Why the sandbox's quota had no memory for the search.
    exhausted: Mutex<Option<Refusal>>,
}

impl AttemptMatchers {
    pub(super) fn new(
        set: &ScanSet,
        signals: &Arc<SandboxSignals>,
        permit: Option<&Permit>,
        banks: &[BankId],
        now_ms: u64,
    ) -> Arc<Self> {
        Arc::new(AttemptMatchers {
            patterns: set.patterns.clone(),
            canaries: set.canaries.clone(),
            signals: signals.clone(),
            has_credentials: set.has_credentials,
            permit: permit.cloned(),
            own_banks: banks.to_vec(),
            now_ms,
            flows: Mutex::default(),
            exhausted: Mutex::default(),
        })
    }

    /// Reserves memory for the search from the sandbox's quota. Where there is none, the attempt is to be refused.
    pub(super) fn reserve(&self, bytes: usize) -> Option<SearchMemory> {
        match self.signals.reserve_search(bytes as u64) {
            Ok(memory) => Some(Box::new(memory)),
            Err(refusal) => {
                sys::lock(&self.exhausted).get_or_insert(refusal);
                None
            }
        }
    }

    /// Returns the refusal for want of memory, if there was one.
    pub(super) fn take_exhausted(&self) -> Option<Refusal> {
        sys::lock(&self.exhausted).take()
    }

    /// Returns how many characters of which banks were seen.
    pub(super) fn flows(&self) -> BTreeMap<BankId, u64> {
        sys::lock(&self.flows).clone()
    }

    pub(super) fn has_flow(&self) -> bool {
        self.signals.flow_snapshot().is_some()
    }

    pub(super) fn flow_matcher(self: &Arc<Self>) -> FlowFeed {
        FlowFeed { matcher: FlowMatcher::new(self.signals.keys().flow()), attempt: self.clone() }
    }

    pub(super) fn signals(&self) -> &SandboxSignals {
        &self.signals
    }

    /// Returns whether anything that can be found in content is denied: what Sandbar injects always is.
    pub(super) fn denies_content(&self) -> bool {
        let by_policy = || self.permit.as_ref().is_some_and(|permit| self.denies_by(permit.signals()));
        self.has_credentials || by_policy()
    }

    /// Returns whether `terms` deny anything that can be found in content.
    fn denies_by(&self, terms: &SignalTerms) -> bool {
        let denies = |kind| terms.mode(kind) == SignalMode::Deny;
        let canaries = !self.canaries.canaries().is_empty() && denies(SignalKind::Canaries);
        let flow = self.has_flow() && denies(SignalKind::MemoryFlow);
        canaries || flow || denies(SignalKind::Secrets)
    }

    /// Returns what `terms` do about a signal. Where content is denied, what cannot be searched is denied too, or it
    /// would be the way past the denial.
    pub(super) fn mode(&self, terms: &SignalTerms, signal: &Signal) -> SignalMode {
        if signal.code == SignalCode::ContentUnsearched && self.denies_by(terms) {
            return SignalMode::Deny;
        }
        let kind = SignalKind::of(signal.code, &signal.place);
        kind.map_or(SignalMode::Deny, |kind| terms.mode(kind))
    }

    fn may_receive(&self, bank: &BankId) -> bool {
        let permitted = self.permit.as_ref().is_some_and(|permit| permit.signals().may_receive(bank));
        permitted || self.own_banks.contains(bank)
    }
}

/// Lets a factory be an `Arc` that its matchers share.
pub(super) struct SharedMatchers(pub(super) Arc<AttemptMatchers>);

impl MatcherFactory for SharedMatchers {
    fn matchers(&self) -> Vec<BoxedMatcher> {
        let mut matchers: Vec<BoxedMatcher> = vec![Box::new(SecretMatcher::new(self.0.patterns.clone()))];
        if !self.0.canaries.canaries().is_empty() {
            let scanner = CanaryScanner::new(self.0.canaries.clone());
            matchers.push(Box::new(CanaryFeed { scanner, attempt: self.0.clone() }));
        }
        if self.0.has_flow() {
            matchers.push(Box::new(self.0.flow_matcher()));
        }
        matchers
    }

    fn reserve(&self, bytes: usize) -> Option<SearchMemory> {
        self.0.reserve(bytes)
    }
}

/// Passes the pieces of canaries on to the sandbox's tracker.
struct CanaryFeed {
    scanner: CanaryScanner,
    attempt: Arc<AttemptMatchers>,
}

impl ViewMatcher for CanaryFeed {
    fn feed(&mut self, bytes: &[u8], found: &mut Vec<Signal>) {
        self.scanner.feed(bytes, found);
        if self.scanner.has_pieces() {
            let CanaryFeed { scanner, attempt } = self;
            attempt.signals.record_pieces(&attempt.canaries, scanner, attempt.now_ms / 1000, found);
        }
    }

    fn finish(&mut self, found: &mut Vec<Signal>) {
        self.scanner.finish(found);
    }

    fn undecided(&self) -> usize {
        self.scanner.undecided()
    }

    fn begun(&self) -> usize {
        self.scanner.begun()
    }
}

/// Compares with recalled text, and asks the permit who may receive it.
pub(super) struct FlowFeed {
    matcher: FlowMatcher,
    attempt: Arc<AttemptMatchers>,
}

impl ViewMatcher for FlowFeed {
    fn feed(&mut self, bytes: &[u8], found: &mut Vec<Signal>) {
        let Some(snapshot) = self.attempt.signals.flow_snapshot() else { return };
        let matches = self.matcher.feed(&snapshot, bytes, self.attempt.now_ms / 1000).iter();
        let refused = matches.filter(|matched| !self.attempt.may_receive(&matched.bank));
        found.extend(refused.map(FlowMatch::signal));
    }

    fn finish(&mut self, _found: &mut Vec<Signal>) {
        if !self.matcher.matched().is_empty() {
            let mut flows = sys::lock(&self.attempt.flows);
            for matched in self.matcher.matched() {
                *flows.entry(matched.bank.clone()).or_default() += matched.characters;
            }
        }
        self.matcher.finish();
    }

    fn undecided(&self) -> usize {
        self.matcher.undecided()
    }

    /// None: every text could go on to be recalled text.
    fn begun(&self) -> usize {
        0
    }
}
