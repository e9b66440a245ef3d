//! What every step of a connection's life needs, built once.

use std::sync::Arc;

use arc_swap::ArcSwap;
use audit::Log;
use dns_filter::Resolver;
use rules::budget::UsageKind;
use rules::limits::TrafficLimits;
use rules::{Decision, Permit, Reason, RuleSet};
use std::net::IpAddr;

use crate::budget::ledger::{Charges, Exhausted, Ledger};
use crate::budget::live::LiveConnections;
use crate::budget::slots::ConnectionLimit;
use crate::credential::CredentialStore;
use crate::policy::grants::GrantStore;
use crate::report::refusal::Refusal;

/// Rules, log, resolver, limits, and what is open.
pub(crate) struct Shared {
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) log: Log,
    pub(crate) resolver: Resolver,
    pub(crate) limits: TrafficLimits,
    pub(crate) credentials: CredentialStore,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) grants: Arc<GrantStore>,
    pub(crate) live: Arc<LiveConnections>,
    pub(crate) connection_limit: Arc<ConnectionLimit>,
    /// The firewall mark of our own connections.
    pub(crate) mark: Option<u32>,
}

impl Shared {
    /// Opens a tab for what was permitted, and charges it as one more request.
    pub(crate) fn charge(&self, permit: &Permit) -> Result<Arc<Charges>, Refusal> {
        let charged = || {
            let tab = self.ledger.open_charges(permit)?;
            tab.charge(UsageKind::Requests, 1)?;
            Ok(Arc::new(tab))
        };
        let tab = charged().map_err(|spent: Exhausted| spent.into_refusal(permit))?;
        if permit.rule().policy.as_str() == rules::GRANTS_POLICY {
            self.grants.record_use(permit, &self.log);
        }
        Ok(tab)
    }

    /// Whether what was permitted under earlier rules still is: they may have changed on the way here. It goes on
    /// by their budgets then.
    pub(crate) fn recheck_permit(
        &self,
        permit: &Permit,
        dialled: IpAddr,
        tab: &Charges,
    ) -> Result<(), Reason> {
        let rules = self.rules.load();
        if rules.generation() == permit.generation() {
            return Ok(());
        }
        match rules.decide_again(permit, Some(dialled)) {
            Decision::Allow(fresh) => {
                tab.adopt_budgets(&fresh);
                Ok(())
            }
            Decision::Deny(denial) => Err(denial.reason),
        }
    }
}
