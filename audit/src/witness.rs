//! Somebody who sees every attempt as its record is made: the list of what is pending, a person at a terminal.
//! What is seen is not the log.

use std::net::SocketAddr;
use std::sync::OnceLock;

use crate::attempt::{Attempt, Ending, Facts, Subject};
use crate::compose::Stage;
use crate::record::{Code, Host};

/// What became of an attempt so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It may go on.
    Allowed,
    /// It is over; so many bytes went from the sandbox and towards it.
    Ended { sent: u64, received: u64 },
    /// It is refused, before or after the decision.
    Refused(Code),
}

/// One turn of one attempt.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    pub turn: Turn,
    /// Whose attempt it is, where that is known.
    pub subject: Option<&'a Subject>,
    pub facts: &'a Facts,
    /// Where the sandbox aimed.
    pub aimed: Option<SocketAddr>,
    /// What to do next, where somebody should.
    pub advice: Option<&'a crate::text::Text<512>>,
    /// Further attempts like it that this one stands for.
    pub folded: u64,
}

type Eye = Box<dyn Fn(&Seen<'_>) + Send + Sync>;

/// Who sees. There is one, for the life of the log; it must be quick, for traffic waits for it.
#[derive(Default)]
pub(crate) struct Witness(OnceLock<Eye>);

impl Witness {
    /// Seats the one who sees; false if there is one already.
    pub(crate) fn seat(&self, eye: Eye) -> bool {
        self.0.set(eye).is_ok()
    }

    pub(crate) fn see(&self, attempt: &Attempt, stage: &Stage<'_>) {
        let (Some(eye), Some(turn)) = (self.0.get(), turn(attempt, stage)) else { return };
        let verdict = attempt.verdict.as_ref();
        eye(&Seen {
            turn,
            subject: attempt.subject.as_ref(),
            facts: &attempt.facts,
            aimed: attempt.arrival.aimed,
            advice: verdict.and_then(|verdict| verdict.message.as_ref()),
            folded: verdict.map_or(0, |verdict| verdict.folded),
        });
    }
}

fn turn(attempt: &Attempt, stage: &Stage<'_>) -> Option<Turn> {
    let verdict = attempt.verdict.as_ref();
    match stage {
        Stage::Decision => Some(Turn::Allowed),
        Stage::Denied => verdict.map(|verdict| Turn::Refused(verdict.reason)),
        // A name is refused by an answer too.
        Stage::Answered(..) => {
            verdict.filter(|verdict| !verdict.allows()).map(|verdict| Turn::Refused(verdict.reason))
        }
        Stage::Outcome(outcome, _) => Some(match outcome.ending {
            Ending::Refused(reason) | Ending::Revoked(reason) => Turn::Refused(reason),
            Ending::Abandoned | Ending::Completed | Ending::Failed(_) | Ending::Unknown => {
                let (sent, received) = attempt.meter.read();
                Turn::Ended { sent, received }
            }
        }),
        Stage::Undecided(..) => None, // nothing was sent, and nobody refused it
    }
}

impl Facts {
    /// Where the attempt wants to go, as far as it is known; a name alone for a DNS query.
    pub fn destination(&self) -> (Option<&Host>, Option<u16>) {
        match self {
            Facts::Connection(connection) => (connection.host.as_ref(), connection.port),
            Facts::Memory(call) => (Some(&call.request.host), Some(call.request.port)),
            Facts::Query(query) => (Some(&query.name), None),
            Facts::Request(request) => (Some(&request.host), Some(request.port)),
        }
    }
}
