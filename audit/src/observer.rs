//! An observer of attempts: it sees each one as its record is drafted, whether or not the record is
//! written. Feeds the pending list and the terminal output of `sandbar run`.

use std::net::SocketAddr;
use std::sync::OnceLock;

use crate::attempt::{AttemptState, Ending, RecordedFacts, RecordedSandbox};
use crate::compose::DraftStage;
use crate::record::{HostText, StableCode};

/// The state of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptStatus {
    /// It may proceed.
    Allowed,
    /// It has ended; `sent` bytes left the sandbox and `received` bytes went to it.
    Ended { sent: u64, received: u64 },
    /// It was refused, before or after the decision.
    Refused(StableCode),
}

/// A change in the state of an attempt.
#[derive(Clone, Copy, Debug)]
pub struct AttemptEvent<'a> {
    pub status: AttemptStatus,
    /// The sandbox, if known.
    pub subject: Option<&'a RecordedSandbox>,
    pub facts: &'a RecordedFacts,
    /// The original destination.
    pub original_dst: Option<SocketAddr>,
    /// What the operator can do next, if anything.
    pub advice: Option<&'a crate::text::Text<512>>,
    /// Further attempts of the same kind that this one stands for.
    pub folded: u64,
}

type ObserverFn = Box<dyn Fn(&AttemptEvent<'_>) + Send + Sync>;

/// The only observer of a log. It runs on the path of the traffic, so it must be quick.
#[derive(Default)]
pub(crate) struct AttemptObserver(OnceLock<ObserverFn>);

impl AttemptObserver {
    /// Sets the observer. Returns false if there is one already.
    pub(crate) fn subscribe(&self, observer: ObserverFn) -> bool {
        self.0.set(observer).is_ok()
    }

    pub(crate) fn notify(&self, attempt: &AttemptState, stage: &DraftStage<'_>) {
        let (Some(observer), Some(status)) = (self.0.get(), attempt_status(attempt, stage)) else {
            return;
        };
        let verdict = attempt.verdict.as_ref();
        observer(&AttemptEvent {
            status,
            subject: attempt.subject.as_ref(),
            facts: &attempt.facts,
            original_dst: attempt.arrival.original_dst,
            advice: verdict.and_then(|verdict| verdict.message.as_ref()),
            folded: attempt.folded(),
        });
    }
}

fn attempt_status(attempt: &AttemptState, stage: &DraftStage<'_>) -> Option<AttemptStatus> {
    let verdict = attempt.verdict.as_ref();
    match stage {
        DraftStage::Decision => Some(AttemptStatus::Allowed),
        DraftStage::Denied => verdict.map(|verdict| AttemptStatus::Refused(verdict.reason)),
        // A DNS answer can carry a refusal too.
        DraftStage::Answered(..) => {
            verdict.filter(|verdict| !verdict.allows()).map(|verdict| AttemptStatus::Refused(verdict.reason))
        }
        DraftStage::Outcome(outcome, _) => Some(match outcome.ending {
            Ending::Refused(reason) => AttemptStatus::Refused(reason),
            Ending::Revoked(reason) => AttemptStatus::Refused(reason.into()),
            Ending::Abandoned | Ending::Completed | Ending::Failed(_) | Ending::Unknown => {
                let (sent, received) = attempt.byte_count.sent_and_received();
                AttemptStatus::Ended { sent, received }
            }
        }),
        DraftStage::Undecided(..) => None, // nothing was sent or refused
    }
}

impl RecordedFacts {
    /// Returns the destination as far as it is known; of a DNS query only the name.
    pub fn destination(&self) -> (Option<&HostText>, Option<u16>) {
        match self {
            RecordedFacts::Connection(connection) => (connection.host.as_ref(), connection.port),
            RecordedFacts::Memory(call) => (Some(&call.request.host), Some(call.request.port)),
            RecordedFacts::Query(query) => (Some(&query.name), None),
            RecordedFacts::Request(request) => (Some(&request.host), Some(request.port)),
        }
    }
}
