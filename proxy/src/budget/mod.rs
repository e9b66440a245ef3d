//! What a sandbox may use: budgets that policies set, and what is open now.

pub(crate) mod gates;
pub(crate) mod ledger;
pub(crate) mod live;
