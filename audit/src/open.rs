//! The record of one attempt, from accept to its end. It writes itself whatever happens: closed
//! by value, or as abandoned when it is dropped.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use ulid::Ulid;

use crate::attempt::{Attempt, Ending, Facts, Finding, Meter, Outcome, Subject, Verdict};
use crate::compose::Stage;
use crate::draft::{Draft, DraftError};
use crate::log::{Log, LogDown, Receipt};
use crate::record::Code;

/// A record that is not closed yet.
#[derive(Debug)]
#[must_use = "a record that nobody closes says that its attempt was abandoned"]
pub struct OpenRecord {
    log: Log,
    attempt: Attempt,
    opened: Instant,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// All its records are written or on their way, or others stand for it.
    Closed,
    /// Its decision is written or on its way: an outcome is owed.
    Decided,
    /// It is refused, and the record of that is not on its way yet.
    Refused,
    Undecided,
}

impl OpenRecord {
    pub(crate) fn new(log: Log, attempt: Attempt) -> Self {
        Self { log, attempt, opened: Instant::now(), state: State::Undecided }
    }

    /// The id that all records of the attempt share; fit to be shown to the sandbox.
    pub fn id(&self) -> String {
        Ulid::from(self.attempt.id).to_string()
    }

    /// Says whose attempt it is.
    pub fn sandbox(&mut self, subject: Subject) {
        self.attempt.subject = Some(subject);
    }

    /// Says what the attempt wants.
    pub fn facts(&mut self, facts: Facts) {
        self.attempt.facts = facts;
    }

    /// Says which address was dialled.
    pub fn dialled(&mut self, address: SocketAddr) {
        self.attempt.dialled = Some(address);
    }

    /// The counter for whoever carries the bytes.
    pub fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.attempt.meter)
    }

    /// Opens the record of one request that came by this connection. The connection itself then
    /// has no record, unless it was decided upon: its requests stand for it.
    pub fn request(&mut self, facts: Facts) -> OpenRecord {
        if self.state == State::Undecided {
            self.state = State::Closed;
        }
        let mut attempt = self.log.attempt(self.attempt.arrival.clone());
        attempt.subject.clone_from(&self.attempt.subject);
        attempt.facts = facts;
        OpenRecord::new(self.log.clone(), attempt)
    }

    /// Records that the attempt may go on, and waits until that is written.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] when it is not written: the attempt must be refused.
    pub async fn decided(&mut self, verdict: Verdict) -> Result<Receipt, LogDown> {
        self.attempt.verdict = Some(verdict);
        let draft = self.draft(Stage::Decision);
        // From when it is queued, for a caller cancelled before owes nothing, and one after does.
        let result = self.log.submit(draft, || self.state = State::Decided).await;
        if result.as_ref().is_err_and(|down| !down.may_be_recorded()) {
            self.state = State::Undecided;
        }
        result.map(Receipt::new)
    }

    /// Records that the attempt is refused, and waits until that is written.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] when it is not written; the attempt is refused all the same, and
    /// counted.
    pub async fn refused(mut self, verdict: Verdict) -> Result<(), LogDown> {
        let outcome = Outcome::new(Ending::Refused(verdict.reason));
        self.attempt.verdict = Some(verdict);
        let stage = match self.state {
            // What was decided may have left already: the refusal is how it ended.
            State::Decided => Stage::Outcome(&outcome, self.opened.elapsed()),
            State::Closed | State::Refused | State::Undecided => {
                self.state = State::Refused;
                Stage::Denied
            }
        };
        let before = self.state;
        let draft = self.draft(stage);
        let result = self.log.submit(draft, || self.state = State::Closed).await;
        if result.as_ref().is_err_and(|down| !down.may_be_recorded()) {
            self.state = before; // written or counted when this is dropped, a moment from now
        }
        result.map(drop)
    }

    /// Records that the attempt is refused, without waiting: nothing was sent. Where there is no
    /// room it is counted.
    pub fn denied(mut self, verdict: Verdict) {
        self.attempt.verdict = Some(verdict);
        self.post(Stage::Denied);
    }

    /// Records that the attempt was answered here, without waiting: nothing was sent. Where there
    /// is no room it is counted.
    pub fn answered(mut self, verdict: Verdict, outcome: &Outcome) {
        self.attempt.verdict = Some(verdict);
        let took = self.opened.elapsed();
        self.post(Stage::Answered(outcome, took));
    }

    /// Records a detection in this attempt, and waits until that is written.
    ///
    /// # Errors
    ///
    /// Returns [`LogDown`] when it is not written.
    pub async fn finding(&self, finding: &Finding) -> Result<(), LogDown> {
        self.log.finding(finding, &self.attempt).await
    }

    /// Writes how the attempt ended. Does not wait; outcomes are never refused.
    pub fn close(mut self, outcome: Outcome) {
        self.finish(&outcome);
    }

    fn finish(&mut self, outcome: &Outcome) {
        let took = self.opened.elapsed();
        let stage = match (self.state, outcome.ending) {
            (State::Closed, _) => return,
            (State::Decided, _) => Stage::Outcome(outcome, took),
            (State::Refused, _) => Stage::Denied,
            (State::Undecided, Ending::Refused(reason)) => {
                self.deny(reason);
                Stage::Denied
            }
            (State::Undecided, _) => Stage::Undecided(outcome, took),
        };
        self.post(stage);
    }

    fn post(&mut self, stage: Stage<'_>) {
        self.state = State::Closed;
        self.log.post(self.draft(stage));
    }

    fn draft(&self, stage: Stage<'_>) -> Result<Draft, DraftError> {
        self.log.tell(&self.attempt, &stage);
        self.attempt.draft(stage, self.log.config().query_strings)
    }

    /// What was decided before the refusal does not count: nothing came of it.
    fn deny(&mut self, reason: Code) {
        match &mut self.attempt.verdict {
            Some(verdict) => verdict.reason = reason,
            none => *none = Some(Verdict::new(reason)),
        }
    }
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        self.finish(&Outcome::new(Ending::Abandoned));
    }
}
