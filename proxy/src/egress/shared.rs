//! What every step of a connection's life needs, built once.

use std::sync::Arc;

use arc_swap::ArcSwap;
use audit::Log;
use dns_filter::Resolver;
use rules::budget::Counted;
use rules::limits::Limits;
use rules::{Decision, Permit, Reason, RuleSet};
use std::net::IpAddr;

use crate::budget::ledger::{Ledger, Spent, Tab};
use crate::budget::live::Live;
use crate::budget::slots::Seats;
use crate::credential::Credentials;
use crate::policy::grants::Grants;
use crate::report::refusal::Refusal;

/// Rules, log, resolver, limits, and what is open.
pub(crate) struct Shared {
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) log: Log,
    pub(crate) resolver: Resolver,
    pub(crate) limits: Limits,
    pub(crate) credentials: Credentials,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) grants: Arc<Grants>,
    pub(crate) live: Arc<Live>,
    pub(crate) seats: Arc<Seats>,
    /// The firewall mark of our own connections.
    pub(crate) mark: Option<u32>,
}

impl Shared {
    /// Opens a tab for what was permitted, and charges it as one more request.
    pub(crate) fn charge(&self, permit: &Permit) -> Result<Arc<Tab>, Refusal> {
        let charged = || {
            let tab = self.ledger.tab(permit)?;
            tab.charge(Counted::Requests, 1)?;
            Ok(Arc::new(tab))
        };
        let tab = charged().map_err(|spent: Spent| spent.of(permit))?;
        if permit.rule().policy.as_str() == rules::GRANTS {
            self.grants.use_of(permit, &self.log);
        }
        Ok(tab)
    }

    /// Whether what was permitted under earlier rules still is: they may have changed on the way here. It goes on
    /// by their budgets then.
    pub(crate) fn still_allows(
        &self,
        permit: &Permit,
        dialled: IpAddr,
        tab: &Tab,
    ) -> Result<(), Reason> {
        let rules = self.rules.load();
        if rules.generation() == permit.generation() {
            return Ok(());
        }
        match rules.decide_again(permit, Some(dialled)) {
            Decision::Allow(fresh) => {
                tab.retune(&fresh);
                Ok(())
            }
            Decision::Deny(denial) => Err(denial.reason),
        }
    }
}
