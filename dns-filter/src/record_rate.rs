//! Limits the rate of records for queries that sent nothing. A number per second get a record of their own; the rest
//! are counted by outcome, and each count is recorded later. A flood cannot fill the log, and no query is recorded with
//! another's reason.

use std::collections::HashMap;
use std::time::Duration;

use audit::RecordedSandbox;
use rules::facts::QueryType;
use rules::ids::SandboxId;
use rules::{Reason, SandboxRef};
use tokio::time::Instant;

use crate::record;

/// The outcome of a query that sent nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CountedOutcome {
    Answered,
    Refused(Reason),
}

/// Limits records per second, and counts the queries beyond that.
#[derive(Debug)]
pub(crate) struct RecordRate {
    per_second: u32,
    since: Option<Instant>,
    written: u32,
    unrecorded: HashMap<(&'static str, Option<SandboxId>), UnrecordedQueries>,
}

/// Queries with the same outcome that have no record yet.
#[derive(Debug)]
pub(crate) struct UnrecordedQueries {
    pub(crate) outcome: CountedOutcome,
    /// The sandbox; `None` if it is unknown, or if this rate limit belongs to one sandbox.
    pub(crate) subject: Option<RecordedSandbox>,
    /// Name and type of the first of them.
    pub(crate) name: String,
    pub(crate) kind: QueryType,
    pub(crate) count: u64,
}

impl RecordRate {
    pub(crate) fn new(per_second: u32) -> Self {
        RecordRate { per_second, since: None, written: 0, unrecorded: HashMap::new() }
    }

    /// Returns whether a query gets a record of its own. If not, the caller must [count](Self::count_query) it.
    pub(crate) fn admits(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now >= since + Duration::from_secs(1)) {
            (self.since, self.written) = (Some(now), 0);
        }
        let admitted = self.written < self.per_second;
        self.written += u32::from(admitted);
        admitted
    }

    /// Counts a query without a record of its own; calls `question` only for the first of its outcome.
    pub(crate) fn count_query(
        &mut self,
        outcome: CountedOutcome,
        sandbox: Option<&SandboxRef>,
        question: impl FnOnce() -> (String, QueryType),
    ) {
        let key = (outcome.code(), sandbox.map(|sandbox| sandbox.id.clone()));
        let first = || {
            let (name, kind) = question();
            UnrecordedQueries { outcome, subject: sandbox.map(record::subject), name, kind, count: 0 }
        };
        self.unrecorded.entry(key).or_insert_with(first).count += 1;
    }

    /// Takes the counts, once the second is over; at any time if `now` is `None`.
    pub(crate) fn take_unrecorded(&mut self, now: Option<Instant>) -> Vec<UnrecordedQueries> {
        let over = |now: Instant| self.since.is_none_or(|since| now >= since + Duration::from_secs(1));
        match now.is_none_or(over) {
            true => self.unrecorded.drain().map(|(_, unrecorded)| unrecorded).collect(),
            false => Vec::new(),
        }
    }
}

impl CountedOutcome {
    fn code(self) -> &'static str {
        match self {
            CountedOutcome::Answered => "",
            CountedOutcome::Refused(reason) => reason.code(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_queries_keep_their_reason_and_the_first_name() {
        let (mut rate, now) = (RecordRate::new(2), Instant::now());
        let mut admitted_count = 0;
        for (at, reason) in [Reason::NotListed, Reason::BadName].iter().cycle().take(10).enumerate() {
            match rate.admits(now) {
                true => admitted_count += 1,
                false => {
                    let question = || (format!("n{at}.example"), QueryType::A);
                    rate.count_query(CountedOutcome::Refused(*reason), None, question);
                }
            }
        }
        assert_eq!(admitted_count, 2, "at most the limit");
        assert!(rate.take_unrecorded(Some(now)).is_empty(), "the second is not over");
        let mut unrecorded = rate.take_unrecorded(Some(now + Duration::from_secs(1)));
        unrecorded.sort_by(|a, b| a.name.cmp(&b.name));
        let summary: Vec<_> = unrecorded.iter().map(|one| (one.outcome, &*one.name, one.count)).collect();
        let refused = CountedOutcome::Refused;
        assert_eq!(
            summary,
            [(refused(Reason::NotListed), "n2.example", 4), (refused(Reason::BadName), "n3.example", 4)]
        );
        assert!(rate.take_unrecorded(None).is_empty(), "taken once");
    }
}
