//! Somebody who sees every attempt as its record is made: for a person who waits at a terminal. What is seen
//! is not the log, and nothing waits for it.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::attempt::{Attempt, Ending, Facts};
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
    pub facts: &'a Facts,
    /// Where the sandbox aimed.
    pub aimed: Option<SocketAddr>,
    /// What to do next, where somebody should.
    pub advice: Option<&'a crate::text::Text<512>>,
}

/// Called for every turn, on the thread of the attempt: it must not wait.
#[derive(Clone)]
pub struct Witness(Arc<dyn Fn(&Seen<'_>) + Send + Sync>);

impl Witness {
    pub fn new(see: impl Fn(&Seen<'_>) + Send + Sync + 'static) -> Self {
        Witness(Arc::new(see))
    }

    pub(crate) fn see(&self, attempt: &Attempt, stage: &Stage<'_>) {
        let verdict = attempt.verdict.as_ref();
        let turn = match stage {
            Stage::Answered(..) | Stage::Undecided(..) => return, // nothing was sent, nothing refused
            Stage::Decision => Turn::Allowed,
            Stage::Denied => {
                let Some(verdict) = verdict else { return };
                Turn::Refused(verdict.reason)
            }
            Stage::Outcome(outcome, _) => match outcome.ending {
                Ending::Refused(reason) | Ending::Revoked(reason) => Turn::Refused(reason),
                Ending::Abandoned | Ending::Completed | Ending::Failed(_) | Ending::Unknown => {
                    let (sent, received) = attempt.meter.read();
                    Turn::Ended { sent, received }
                }
            },
        };
        let advice = verdict.and_then(|verdict| verdict.message.as_ref());
        (self.0)(&Seen { turn, facts: &attempt.facts, aimed: attempt.arrival.aimed, advice });
    }
}

impl fmt::Debug for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Witness")
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
