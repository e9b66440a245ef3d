//! Budgets of a sandbox: bytes, requests, open connections.

pub(crate) mod ledger;
pub(crate) mod live;
pub(crate) mod slots;
