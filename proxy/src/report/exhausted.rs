//! What is refused when a budget is used up (P18).

use std::sync::Arc;
use std::time::Duration;

use rules::Reason;
use rules::budget::BudgetKind;

use crate::report::refusal::Refusal;

/// Which budget is exhausted, and when it refills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Exhausted {
    Budget {
        budget: BudgetKind,
        limit: u64,
        rule: Option<Arc<str>>,
        refills: Option<Duration>,
    },
    /// The account file cannot be written, so nothing may be used.
    Unkept,
}

impl Exhausted {
    /// Returns the reason for cutting an open connection.
    pub(crate) fn reason(&self) -> Reason {
        match self {
            Exhausted::Budget { .. } => Reason::BudgetSpent,
            Exhausted::Unkept => Reason::BudgetUnkept,
        }
    }

    /// The sandbox's `connections` budget is reached.
    pub(crate) fn connections(limit: u64) -> Self {
        Exhausted::Budget { budget: BudgetKind::Connections, limit, rule: None, refills: None }
    }
}

impl From<Exhausted> for Refusal {
    fn from(spent: Exhausted) -> Self {
        let Exhausted::Budget { budget, limit, rule, refills } = spent else {
            return Reason::BudgetUnkept.into();
        };
        let owner = rule.map_or_else(|| "of the sandbox".to_owned(), |rule| format!("of rule {rule}"));
        let refills = match refills {
            Some(time) => format!("it refills in {} s", time.as_secs().max(1)),
            None if budget == BudgetKind::Connections => "close one first".to_owned(),
            None => "it does not refill".to_owned(),
        };
        Refusal::from(Reason::BudgetSpent)
            .with_detail(format!("{budget} = {limit} {owner} is used up; {refills}"))
    }
}
