//! What every step of a connection's life needs, built once.

use std::sync::Arc;

use arc_swap::ArcSwap;
use audit::Log;
use dns_filter::Resolver;
use rules::limits::Limits;
use rules::{Decision, Permit, Reason, RuleSet};
use std::net::IpAddr;

use crate::inject::Credentials;
use crate::live::Live;
use crate::seats::Seats;

/// Rules, log, resolver, limits, and what is open.
pub(crate) struct Shared {
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) log: Log,
    pub(crate) resolver: Resolver,
    pub(crate) limits: Limits,
    pub(crate) credentials: Credentials,
    pub(crate) live: Arc<Live>,
    pub(crate) seats: Arc<Seats>,
    /// The firewall mark of our own connections.
    pub(crate) mark: Option<u32>,
}

impl Shared {
    /// Whether what was permitted under earlier rules still is: they may have changed on the way here.
    pub(crate) fn still_allows(&self, permit: &Permit, dialled: IpAddr) -> Result<(), Reason> {
        let rules = self.rules.load();
        if rules.generation() == permit.generation() {
            return Ok(());
        }
        match rules.decide_again(permit, Some(dialled)) {
            Decision::Allow(_) => Ok(()),
            Decision::Deny(denial) => Err(denial.reason),
        }
    }
}
