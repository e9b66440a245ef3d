//! What is recorded, told to whoever looks on as it happens: the list of pending refusals, a person at a terminal.

use std::sync::OnceLock;

use crate::attempt::{Attempt, Ending, Facts, Subject, Verdict};
use crate::compose::Stage;

/// One moment of an attempt, as it is recorded.
#[derive(Debug)]
pub struct Noted<'a> {
    /// Whose attempt it is, where that is known.
    pub subject: Option<&'a Subject>,
    pub facts: &'a Facts,
    pub verdict: Option<&'a Verdict>,
    pub moment: Moment,
    /// Bytes from the sandbox so far.
    pub sent: u64,
    /// Bytes towards the sandbox so far.
    pub received: u64,
}

/// Which moment it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// It may go on.
    Decided,
    Ended(Ending),
    /// It is refused, and nothing was sent.
    Refused,
}

type Eye = Box<dyn Fn(&Noted<'_>) + Send + Sync>;

/// Who looks on. There is one, for the life of the log; it must be quick, for traffic waits for it.
#[derive(Default)]
pub(crate) struct Onlooker(OnceLock<Eye>);

impl Onlooker {
    /// Seats the one who looks on; false if there is one already.
    pub(crate) fn seat(&self, eye: Eye) -> bool {
        self.0.set(eye).is_ok()
    }

    pub(crate) fn tell(&self, attempt: &Attempt, stage: &Stage<'_>) {
        let Some(eye) = self.0.get() else { return };
        let verdict = attempt.verdict.as_ref();
        let (sent, received) = attempt.meter.read();
        let moment = moment(verdict, stage);
        let (subject, facts) = (attempt.subject.as_ref(), &attempt.facts);
        eye(&Noted { subject, facts, verdict, moment, sent, received });
    }
}

fn moment(verdict: Option<&Verdict>, stage: &Stage<'_>) -> Moment {
    match stage {
        Stage::Decision => Moment::Decided,
        Stage::Denied => Moment::Refused,
        // A name is refused by an answer too.
        Stage::Answered(..) if verdict.is_some_and(|verdict| !verdict.allows()) => Moment::Refused,
        Stage::Answered(outcome, _) | Stage::Outcome(outcome, _) | Stage::Undecided(outcome, _) => {
            Moment::Ended(outcome.ending)
        }
    }
}
