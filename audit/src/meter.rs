//! The denial meter: how many attempts that sent nothing get a record of their own (P17, P20).
//!
//! A sandbox makes refusals as fast as it can ask, so each sandbox, and each of the unknown channels together, has a
//! rate of records and of bytes. Attempts beyond it are *folded*: one summary record per kind (class, stage and
//! reason), made of the first of them, with the exact number, and time, host and `attempted` of the last.
//! Observers see every attempt. Attempts with a decision are never folded: something may have left.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rules::ids::SandboxId;

use crate::attempt::{AlertFlag, AttemptOutcome, AttemptState, DetectionFinding};
use crate::compose::{self, DraftStage};
use crate::config::{DenialRate, QueryStrings};
use crate::draft::{Draft, DraftError};
use crate::record::{AttemptedText, HostText};
use crate::text::Text;

/// How long a summary collects attempts before it is written.
const FOLD_TIME: Duration = Duration::from_secs(1);
/// Summaries that one sandbox can have at a time. Attempts of further kinds are only counted.
const FOLD_KINDS_MAX: usize = 32;

/// The meters of all sandboxes. Unknown channels share one.
#[derive(Debug)]
pub(crate) struct DenialMeter {
    rate: DenialRate,
    meters: Mutex<HashMap<Option<SandboxId>, SandboxMeter>>,
}

/// What an attempt that sent nothing gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metered {
    /// Neither a record nor a summary: too many kinds. It must be counted.
    Counted,
    /// A place in the summary with this id.
    Folded(u128),
    /// A record of its own.
    Recorded,
}

/// The kind of a record: records of one kind share a summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FoldKind {
    class_uid: u16,
    stage: &'static str,
    code: &'static str,
    alert: bool,
}

/// Attempts of one kind without records of their own.
#[derive(Debug)]
pub(crate) struct Fold {
    first: FoldedRecord,
    since: Instant,
    /// How many attempts it stands for.
    pub(crate) count: u64,
    last: LastAttempt,
}

/// The last attempt of a summary.
#[derive(Clone, Debug)]
pub(crate) struct LastAttempt {
    /// Milliseconds since 1970.
    pub(crate) time: u64,
    pub(crate) host: Option<HostText>,
    /// What a refused one asked for.
    pub(crate) attempted: Option<AttemptedText>,
}

/// The summary in a record: it stands for more than its own attempt.
#[derive(Clone, Debug)]
pub(crate) struct FoldSummary {
    pub(crate) count: u64,
    pub(crate) last: LastAttempt,
    pub(crate) message: Text<512>,
}

/// The record of the first attempt, not drafted yet.
#[derive(Debug)]
pub(crate) enum FoldedRecord {
    Answered(AttemptState, AttemptOutcome, Duration),
    Denied(AttemptState),
    Finding(AttemptState, DetectionFinding, u128),
    Undecided(AttemptState, AttemptOutcome, Duration),
}

#[derive(Debug)]
struct SandboxMeter {
    records: f64,
    bytes: f64,
    at: Instant,
    folds: HashMap<FoldKind, Fold>,
}

impl FoldKind {
    /// Returns the kind of a record; `None` if something may have left.
    pub(crate) fn of_attempt(attempt: &AttemptState, stage: &DraftStage<'_>) -> Option<Self> {
        let verdict = attempt.verdict.as_ref();
        match stage {
            DraftStage::Decision | DraftStage::Outcome(..) => None,
            DraftStage::Answered(..) | DraftStage::Denied | DraftStage::Undecided(..) => Some(Self {
                class_uid: attempt.class().uid(),
                stage: stage.name(),
                code: verdict.map_or("", |verdict| verdict.reason.0),
                alert: verdict.is_some_and(|verdict| verdict.attention == AlertFlag::Alert),
            }),
        }
    }

    pub(crate) fn of_finding(finding: &DetectionFinding) -> Self {
        Self { class_uid: 2004, stage: "finding", code: finding.code.code(), alert: true }
    }
}

impl DenialMeter {
    pub(crate) fn new(rate: DenialRate) -> Self {
        Self { rate, meters: Mutex::default() }
    }

    /// Gives an attempt a record of its own, or counts it in a summary; calls `first` if it is the first there.
    /// `count` is the number of attempts it stands for. `room` says whether its sandbox may write records at all.
    pub(crate) fn admit_or_fold(
        &self,
        sandbox: Option<SandboxId>,
        kind: FoldKind,
        (count, last): (u64, LastAttempt),
        room: bool,
        first: impl FnOnce() -> FoldedRecord,
    ) -> Metered {
        let now = Instant::now();
        let mut meters = self.lock();
        let meter = meters.entry(sandbox).or_insert_with(|| SandboxMeter::new(&self.rate, now));
        meter.refill(&self.rate, now);
        if room && meter.records >= 1.0 && meter.bytes > 0.0 {
            meter.records -= 1.0;
            return Metered::Recorded;
        }
        if let Some(fold) = meter.folds.get_mut(&kind) {
            (fold.count, fold.last) = (fold.count.saturating_add(count), last);
            return Metered::Folded(fold.first.id());
        }
        if meter.folds.len() >= FOLD_KINDS_MAX {
            return Metered::Counted;
        }
        let first = first();
        let id = first.id();
        meter.folds.insert(kind, Fold { first, since: now, count, last });
        Metered::Folded(id)
    }

    /// Charges the bytes of a record. The rate may be overdrawn by one line.
    pub(crate) fn charge(&self, sandbox: Option<&SandboxId>, bytes: usize) {
        if let Some(meter) = self.lock().get_mut(&sandbox.cloned()) {
            meter.bytes -= bytes as f64;
        }
    }

    /// Takes the summaries that are old enough, or all. `due` decides for each sandbox how many of them may be written.
    pub(crate) fn take_due(
        &self,
        all: bool,
        mut due: impl FnMut(Option<&SandboxId>) -> SummaryRoom,
    ) -> Vec<(Option<SandboxId>, Fold)> {
        let now = Instant::now();
        let mut taken = Vec::new();
        let mut meters = self.lock();
        for (sandbox, meter) in meters.iter_mut() {
            let ripe = |fold: &Fold| all || now.duration_since(fold.since) >= FOLD_TIME;
            if meter.folds.values().any(ripe) {
                let folds = meter.take(ripe, if all { SummaryRoom::Free } else { due(sandbox.as_ref()) });
                taken.extend(folds.into_iter().map(|fold| (sandbox.clone(), fold)));
            }
        }
        // What is full again holds no state.
        meters.retain(|_, meter| {
            meter.refill(&self.rate, now);
            !meter.folds.is_empty() || !meter.is_full(&self.rate)
        });
        taken
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Option<SandboxId>, SandboxMeter>> {
        sys::lock(&self.meters)
    }
}

/// How many summaries of a sandbox may be written now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SummaryRoom {
    Free,
    /// The sandbox has used up its part of the log: only this many, the largest first.
    Few(usize),
}

impl SandboxMeter {
    fn new(rate: &DenialRate, now: Instant) -> Self {
        let (records, bytes) = (f64::from(rate.records_burst), f64::from(rate.bytes_burst));
        Self { records, bytes, at: now, folds: HashMap::new() }
    }

    fn refill(&mut self, rate: &DenialRate, now: Instant) {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        self.records =
            (self.records + seconds * f64::from(rate.records_per_second)).min(f64::from(rate.records_burst));
        self.bytes =
            (self.bytes + seconds * f64::from(rate.bytes_per_second)).min(f64::from(rate.bytes_burst));
        self.at = now;
    }

    fn is_full(&self, rate: &DenialRate) -> bool {
        self.records >= f64::from(rate.records_burst) && self.bytes >= f64::from(rate.bytes_burst)
    }

    fn take(&mut self, ripe: impl Fn(&Fold) -> bool, room: SummaryRoom) -> Vec<Fold> {
        let ripe = self.folds.iter().filter(|(_, fold)| ripe(fold));
        let mut kinds: Vec<(u64, FoldKind)> = ripe.map(|(kind, fold)| (fold.count, *kind)).collect();
        if let SummaryRoom::Few(most) = room {
            kinds.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
            kinds.truncate(most);
        }
        kinds.iter().filter_map(|(_, kind)| self.folds.remove(kind)).collect()
    }
}

impl FoldedRecord {
    pub(crate) fn of_attempt(attempt: &AttemptState, stage: &DraftStage<'_>) -> Self {
        let attempt = attempt.clone();
        match stage {
            DraftStage::Answered(outcome, took) => Self::Answered(attempt, (*outcome).clone(), *took),
            DraftStage::Undecided(outcome, took) => Self::Undecided(attempt, (*outcome).clone(), *took),
            DraftStage::Decision | DraftStage::Denied | DraftStage::Outcome(..) => Self::Denied(attempt),
        }
    }

    /// Returns the id under which the summary is found.
    fn id(&self) -> u128 {
        match self {
            Self::Answered(attempt, ..)
            | Self::Denied(attempt)
            | Self::Finding(attempt, ..)
            | Self::Undecided(attempt, ..) => attempt.id,
        }
    }
}

impl Fold {
    /// Drafts the summary.
    pub(crate) fn draft(self, queries: QueryStrings) -> Result<Draft, DraftError> {
        let Self { first, count, last, .. } = self;
        let message = match count {
            1 => None,
            _ => Some(FoldSummary {
                count,
                last,
                message: format!(
                    "Summary of {count} attempts with this result; names and addresses are those of the first."
                )
                .into(),
            }),
        };
        let with = |attempt: AttemptState| AttemptState { summary: message, ..attempt };
        match first {
            FoldedRecord::Answered(attempt, outcome, took) => {
                with(attempt).draft(DraftStage::Answered(&outcome, took), queries)
            }
            FoldedRecord::Denied(attempt) => with(attempt).draft(DraftStage::Denied, queries),
            FoldedRecord::Finding(attempt, finding, uid) => {
                compose::draft_finding(&finding, uid, Some(&with(attempt)))
            }
            FoldedRecord::Undecided(attempt, outcome, took) => {
                with(attempt).draft(DraftStage::Undecided(&outcome, took), queries)
            }
        }
    }
}
