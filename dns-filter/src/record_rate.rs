//! Records of what sends nothing, metered: so many a second have one of their own; the rest are counted
//! by what became of them, and told a little later with that count. No flood fills the log, and nothing
//! is told under another's reason.

use std::collections::HashMap;
use std::time::Duration;

use audit::RecordedSandbox;
use rules::facts::QueryType;
use rules::ids::SandboxId;
use rules::{Reason, SandboxRef};
use tokio::time::Instant;

use crate::record;

/// What became of a query that sent nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CountedOutcome {
    Answered,
    Refused(Reason),
}

/// How many records of one kind are written each second, and what is only counted.
#[derive(Debug)]
pub(crate) struct RecordRate {
    most: u32,
    since: Option<Instant>,
    written: u32,
    rest: HashMap<(&'static str, Option<SandboxId>), UnrecordedQueries>,
}

/// Queries of one fate that have no record yet.
#[derive(Debug)]
pub(crate) struct UnrecordedQueries {
    pub(crate) fate: CountedOutcome,
    /// Whose they are; none when nobody's, or when whoever keeps the meter knows.
    pub(crate) subject: Option<RecordedSandbox>,
    /// What the first of them asked for.
    pub(crate) name: String,
    pub(crate) kind: QueryType,
    pub(crate) count: u64,
}

impl RecordRate {
    pub(crate) fn new(most: u32) -> Self {
        RecordRate { most, since: None, written: 0, rest: HashMap::new() }
    }

    /// Whether one more gets a record of its own; one that does not is to be [`RecordRate::count_query`]ed.
    pub(crate) fn admits(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now >= since + Duration::from_secs(1)) {
            (self.since, self.written) = (Some(now), 0);
        }
        let admitted = self.written < self.most;
        self.written += u32::from(admitted);
        admitted
    }

    /// Counts one that has no record of its own; `asked` is only wanted of the first.
    pub(crate) fn count_query(
        &mut self,
        fate: CountedOutcome,
        whose: Option<&SandboxRef>,
        asked: impl FnOnce() -> (String, QueryType),
    ) {
        let key = (fate.code(), whose.map(|sandbox| sandbox.id.clone()));
        let first = || {
            let (name, kind) = asked();
            UnrecordedQueries { fate, subject: whose.map(record::subject), name, kind, count: 0 }
        };
        self.rest.entry(key).or_insert_with(first).count += 1;
    }

    /// What is counted and not told yet, once the second is over.
    pub(crate) fn take_unrecorded(&mut self, now: Option<Instant>) -> Vec<UnrecordedQueries> {
        let over =
            |now: Instant| self.since.is_none_or(|since| now >= since + Duration::from_secs(1));
        match now.is_none_or(over) {
            true => self.rest.drain().map(|(_, rest)| rest).collect(),
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
    fn the_rest_keeps_its_reasons_and_the_first_name_of_each() {
        let (mut meter, now) = (RecordRate::new(2), Instant::now());
        let mut own = 0;
        for (at, reason) in [Reason::NotListed, Reason::BadName].iter().cycle().take(10).enumerate()
        {
            match meter.admits(now) {
                true => own += 1,
                false => {
                    let asked = || (format!("n{at}.example"), QueryType::A);
                    meter.count_query(CountedOutcome::Refused(*reason), None, asked);
                }
            }
        }
        assert_eq!(own, 2, "no more than the meter allows");
        assert!(meter.take_unrecorded(Some(now)).is_empty(), "the second is not over");
        let mut rest = meter.take_unrecorded(Some(now + Duration::from_secs(1)));
        rest.sort_by(|a, b| a.name.cmp(&b.name));
        let told: Vec<_> = rest.iter().map(|one| (one.fate, &*one.name, one.count)).collect();
        let refused = CountedOutcome::Refused;
        assert_eq!(
            told,
            [
                (refused(Reason::NotListed), "n2.example", 4),
                (refused(Reason::BadName), "n3.example", 4)
            ]
        );
        assert!(meter.take_unrecorded(None).is_empty(), "told once");
    }
}
