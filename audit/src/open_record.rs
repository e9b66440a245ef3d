//! The record of one attempt, from accept to its end. Every attempt is recorded: the caller closes
//! the record by value, and dropping it records the attempt as abandoned.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rules::ids::SandboxId;
use ulid::Ulid;

use crate::attempt::{
    AttemptOutcome, AttemptState, ByteCount, DecisionDetails, DetectionFinding, Ending, RecordedFacts,
    RecordedSandbox,
};
use crate::compose::DraftStage;
use crate::draft::{Draft, DraftError, DraftRole};
use crate::log::{Log, LogDown, Receipt};
use crate::record::StableCode;

/// A record that is not closed yet.
#[derive(Debug)]
#[must_use = "dropping a record says that its attempt was abandoned"]
pub struct OpenRecord {
    log: Log,
    attempt: AttemptState,
    opened: Instant,
    state: RecordState,
    /// Set once a finding names the attempt: its record can then not be folded, or the name would lead nowhere.
    named: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordState {
    /// All its records are written or queued, or other records stand for it.
    Closed,
    /// Its decision is written or queued: an outcome is owed.
    Decided,
    /// It is refused, but the record of that is not queued yet.
    Refused,
    Undecided,
}

impl OpenRecord {
    pub(crate) fn new(log: Log, attempt: AttemptState) -> Self {
        let named = AtomicBool::new(false);
        Self { log, attempt, opened: Instant::now(), state: RecordState::Undecided, named }
    }

    /// Returns the id that all records of the attempt share. It may be shown to the sandbox.
    pub fn id(&self) -> String {
        Ulid::from(self.attempt.id).to_string()
    }

    /// Sets the sandbox that made the attempt; none if its channel belongs to none.
    pub fn set_sandbox(&mut self, subject: impl Into<Option<RecordedSandbox>>) {
        self.attempt.subject = subject.into();
        let subject = self.attempt.subject.as_ref();
        self.attempt.sandbox = subject.and_then(|subject| SandboxId::parse(&subject.sandbox.0.to_arc()).ok());
    }

    /// Sets the facts of the attempt.
    pub fn set_facts(&mut self, facts: RecordedFacts) {
        self.attempt.facts = facts;
    }

    /// Sets the address that was dialled.
    pub fn set_dialled(&mut self, address: SocketAddr) {
        self.attempt.dialled = Some(address);
    }

    /// Returns the byte counter, for the code that relays the traffic.
    pub fn byte_count(&self) -> Arc<ByteCount> {
        Arc::clone(&self.attempt.byte_count)
    }

    /// Opens the record of one request on this connection. The connection then gets no record of its
    /// own, unless a decision was recorded for it: its requests stand for it.
    pub fn open_request(&mut self, facts: RecordedFacts) -> OpenRecord {
        if self.state == RecordState::Undecided {
            self.state = RecordState::Closed;
        }
        let mut attempt = self.log.new_attempt(self.attempt.arrival.clone());
        attempt.subject.clone_from(&self.attempt.subject);
        attempt.sandbox.clone_from(&self.attempt.sandbox);
        attempt.facts = facts;
        OpenRecord::new(self.log.clone(), attempt)
    }

    /// Records that the attempt may proceed, and waits until the record is written.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] if it is not written: the attempt must be refused.
    pub async fn record_decision(&mut self, verdict: DecisionDetails) -> Result<Receipt, LogDown> {
        self.attempt.verdict = Some(verdict);
        let draft = self.draft(DraftStage::Decision);
        // Set once queued: a caller cancelled earlier owes no outcome, one cancelled later does.
        let result = self.log.submit(draft, || self.state = RecordState::Decided).await;
        if result.as_ref().is_err_and(|down| !down.may_be_recorded()) {
            self.state = RecordState::Undecided;
        }
        result.map(Receipt::new)
    }

    /// Records that the attempt is refused, and waits until the record is written. Returns the id under which it
    /// is found: if its sandbox is refused too often, that of a summary, which is written a second later.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] if it is not written. The attempt is refused all the same, and counted.
    pub async fn record_refusal(mut self, verdict: DecisionDetails) -> Result<String, LogDown> {
        let outcome = AttemptOutcome::new(Ending::Refused(verdict.reason));
        self.attempt.verdict = Some(verdict);
        let stage = match self.state {
            // Traffic may have left after the decision: the refusal is its outcome.
            RecordState::Decided => DraftStage::Outcome(&outcome, self.opened.elapsed()),
            RecordState::Closed | RecordState::Refused | RecordState::Undecided => {
                self.state = RecordState::Refused;
                DraftStage::Denied
            }
        };
        if let Some(summary) = self.fold(&stage) {
            self.state = RecordState::Closed;
            return Ok(Ulid::from(summary).to_string());
        }
        let before = self.state;
        let draft = self.draft(stage);
        let id = self.id();
        let result = self.log.submit(draft, || self.state = RecordState::Closed).await;
        if result.as_ref().is_err_and(|down| !down.may_be_recorded()) {
            self.state = before; // `drop`, which follows at once, queues or counts it
        }
        result.map(|_| id)
    }

    /// Records a refusal without waiting: nothing was sent. If the queue is full it is only counted.
    pub fn post_denial(mut self, verdict: DecisionDetails) {
        self.attempt.verdict = Some(verdict);
        self.post(DraftStage::Denied);
    }

    /// Records an attempt that was answered here, without waiting: nothing was sent. If the queue is
    /// full it is only counted.
    pub fn post_answer(mut self, verdict: DecisionDetails, outcome: &AttemptOutcome) {
        self.attempt.verdict = Some(verdict);
        let took = self.opened.elapsed();
        self.post(DraftStage::Answered(outcome, took));
    }

    /// Records a finding in this attempt, and waits until the record is written. Repeated findings are folded like
    /// refusals.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] if it is not written.
    pub async fn record_finding(&self, finding: &DetectionFinding) -> Result<(), LogDown> {
        let folded = self.log.fold_finding(finding, &self.attempt);
        if folded.is_none_or(|named| named == self.attempt.id) {
            self.named.store(true, Ordering::Relaxed);
        }
        match folded {
            Some(_) => Ok(()),
            None => self.log.record_finding(finding, &self.attempt).await,
        }
    }

    /// Records how the attempt ended. Does not wait; outcomes are never refused.
    pub fn close(mut self, outcome: AttemptOutcome) {
        self.finish(&outcome);
    }

    fn finish(&mut self, outcome: &AttemptOutcome) {
        let took = self.opened.elapsed();
        let stage = match (self.state, outcome.ending) {
            (RecordState::Closed, _) => return,
            (RecordState::Decided, _) => DraftStage::Outcome(outcome, took),
            (RecordState::Refused, _) => DraftStage::Denied,
            (RecordState::Undecided, Ending::Refused(reason)) => {
                self.set_denial(reason);
                DraftStage::Denied
            }
            (RecordState::Undecided, _) => DraftStage::Undecided(outcome, took),
        };
        self.post(stage);
    }

    fn post(&mut self, stage: DraftStage<'_>) {
        self.state = RecordState::Closed;
        if self.fold(&stage).is_none() {
            self.log.post(self.draft(stage));
        }
    }

    /// Returns the id of the summary that counts the attempt, if it gets no record of its own.
    fn fold(&self, stage: &DraftStage<'_>) -> Option<u128> {
        let foldable = !self.named.load(Ordering::Relaxed);
        foldable.then(|| self.log.fold(&self.attempt, stage))?
    }

    fn draft(&self, stage: DraftStage<'_>) -> Result<Draft, DraftError> {
        self.log.notify_observer(&self.attempt, &stage);
        let draft = self.attempt.draft(stage, self.log.config().query_strings)?;
        if matches!(draft.role, DraftRole::Event) {
            self.log.charge_meter(&draft);
        }
        Ok(draft)
    }

    /// Replaces the reason of an earlier verdict, which had no effect.
    fn set_denial(&mut self, reason: StableCode) {
        match &mut self.attempt.verdict {
            Some(verdict) => verdict.reason = reason,
            none => *none = Some(DecisionDetails::new(reason)),
        }
    }
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        self.finish(&AttemptOutcome::new(Ending::Abandoned));
    }
}
