//! What a sandbox may use: budgets that policies set, quotas of the gateway's resources, and what is open now.

pub(crate) mod cost;
pub(crate) mod gates;
pub(crate) mod ledger;
pub(crate) mod live;
pub(crate) mod quota;
