//! Somebody who sees every attempt as its record is made: the list of what is pending, a person at a terminal.
//! What is seen is not the log.

use std::net::SocketAddr;
use std::sync::OnceLock;

use crate::attempt::{AttemptState, Ending, RecordedFacts, RecordedSandbox};
use crate::compose::DraftStage;
use crate::record::{HostText, StableCode};

/// What became of an attempt so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptStatus {
    /// It may go on.
    Allowed,
    /// It is over; so many bytes went from the sandbox and towards it.
    Ended { sent: u64, received: u64 },
    /// It is refused, before or after the decision.
    Refused(StableCode),
}

/// One turn of one attempt.
#[derive(Clone, Copy, Debug)]
pub struct AttemptEvent<'a> {
    pub status: AttemptStatus,
    /// Whose attempt it is, where that is known.
    pub subject: Option<&'a RecordedSandbox>,
    pub facts: &'a RecordedFacts,
    /// Where the sandbox aimed.
    pub original_dst: Option<SocketAddr>,
    /// What to do next, where somebody should.
    pub advice: Option<&'a crate::text::Text<512>>,
    /// Further attempts like it that this one stands for.
    pub folded: u64,
}

type ObserverFn = Box<dyn Fn(&AttemptEvent<'_>) + Send + Sync>;

/// Who sees. There is one, for the life of the log; it must be quick, for traffic waits for it.
#[derive(Default)]
pub(crate) struct AttemptObserver(OnceLock<ObserverFn>);

impl AttemptObserver {
    /// Seats the one who sees; false if there is one already.
    pub(crate) fn subscribe(&self, eye: ObserverFn) -> bool {
        self.0.set(eye).is_ok()
    }

    pub(crate) fn notify(&self, attempt: &AttemptState, stage: &DraftStage<'_>) {
        let (Some(eye), Some(turn)) = (self.0.get(), attempt_status(attempt, stage)) else {
            return;
        };
        let verdict = attempt.verdict.as_ref();
        eye(&AttemptEvent {
            status: turn,
            subject: attempt.subject.as_ref(),
            facts: &attempt.facts,
            original_dst: attempt.arrival.original_dst,
            advice: verdict.and_then(|verdict| verdict.message.as_ref()),
            folded: verdict.map_or(0, |verdict| verdict.folded),
        });
    }
}

fn attempt_status(attempt: &AttemptState, stage: &DraftStage<'_>) -> Option<AttemptStatus> {
    let verdict = attempt.verdict.as_ref();
    match stage {
        DraftStage::Decision => Some(AttemptStatus::Allowed),
        DraftStage::Denied => verdict.map(|verdict| AttemptStatus::Refused(verdict.reason)),
        // A name is refused by an answer too.
        DraftStage::Answered(..) => verdict
            .filter(|verdict| !verdict.allows())
            .map(|verdict| AttemptStatus::Refused(verdict.reason)),
        DraftStage::Outcome(outcome, _) => Some(match outcome.ending {
            Ending::Refused(reason) => AttemptStatus::Refused(reason),
            Ending::Revoked(reason) => AttemptStatus::Refused(reason.into()),
            Ending::Abandoned | Ending::Completed | Ending::Failed(_) | Ending::Unknown => {
                let (sent, received) = attempt.meter.sent_and_received();
                AttemptStatus::Ended { sent, received }
            }
        }),
        DraftStage::Undecided(..) => None, // nothing was sent, and nobody refused it
    }
}

impl RecordedFacts {
    /// Where the attempt wants to go, as far as it is known; a name alone for a DNS query.
    pub fn destination(&self) -> (Option<&HostText>, Option<u16>) {
        match self {
            RecordedFacts::Connection(connection) => (connection.host.as_ref(), connection.port),
            RecordedFacts::Memory(call) => (Some(&call.request.host), Some(call.request.port)),
            RecordedFacts::Query(query) => (Some(&query.name), None),
            RecordedFacts::Request(request) => (Some(&request.host), Some(request.port)),
        }
    }
}
