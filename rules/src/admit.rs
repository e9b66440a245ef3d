//! `RuleSet::admit`: from the addresses a name was found to have, to those that may be dialled (P4).

use std::net::{IpAddr, SocketAddr};

use crate::decision::{Admission, Denial, DialPermit, Permit};
use crate::name::Host;
use crate::network::forbidden;
use crate::policy::{Match, matching};
use crate::reason::Reason;
use crate::ruleset::RuleSet;

/// Most addresses that are tried for one name.
pub const MAX_ADDRESSES: usize = 32;

impl RuleSet {
    /// Leaves of `found` what the permit's rules let its name lead to.
    ///
    /// # Errors
    ///
    /// Returns the denial of the first address when none is left, and `no_address` when there was none.
    pub fn admit(&self, permit: &Permit, found: &[IpAddr]) -> Result<DialPermit, Box<Denial>> {
        let mut refused =
            Denial { rule: Some(permit.rule().clone()), ..self.plain(Reason::NoAddress) };
        let mut addresses = Vec::new();
        for address in found.iter().map(IpAddr::to_canonical).take(MAX_ADDRESSES) {
            match self.admits(permit, address) {
                Ok(()) => addresses.push(address),
                Err(reason) if refused.address.is_none() => {
                    refused = Denial { reason, address: Some(address), ..refused };
                }
                Err(_) => {}
            }
        }
        match addresses.is_empty() {
            false => Ok(DialPermit { permit: permit.clone(), addresses: addresses.into() }),
            true => Err(Box::new(refused)),
        }
    }

    fn admits(&self, permit: &Permit, address: IpAddr) -> Result<(), Reason> {
        let own = |port| self.own.contains(&SocketAddr::new(address, port));
        if permit.port().is_some_and(own) {
            return Err(Reason::OwnAddress);
        }
        if self.denies_address(permit, address) {
            return Err(Reason::DeniedByRule);
        }
        if matches!(permit.host(), Host::Address(wanted) if *wanted != address) {
            return Err(Reason::AddressNotExpected);
        }
        permit.0.admission.iter().try_for_each(|admission| admission.admits(address))
    }
}

impl RuleSet {
    /// A deny rule for an address holds whatever name led to it.
    fn denies_address(&self, permit: &Permit, address: IpAddr) -> bool {
        let host = Host::Address(address);
        let Some(layers) = self.layers.get(permit.sandbox()) else { return true };
        let denies = |matched: Match<'_>| {
            let here = permit
                .port()
                .map_or_else(|| matched.is_on_every_port(), |port| matched.has_port(port));
            matched.rule.is_deny() && !matched.rule.filters_requests() && here
        };
        layers.policies().any(|policy| matching(policy, &host).any(denies))
    }
}

impl Admission {
    fn admits(&self, address: IpAddr) -> Result<(), Reason> {
        let private = forbidden(address).is_some();
        match self {
            Admission::Any => Ok(()),
            Admission::Only(nets) if nets.iter().any(|net| net.contains(&address)) => Ok(()),
            Admission::Only(_) | Admission::Public if private => Err(Reason::PrivateAddress),
            Admission::Only(_) => Err(Reason::AddressNotExpected),
            Admission::Public => Ok(()),
        }
    }
}
