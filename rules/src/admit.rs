//! `RuleSet::admit`: from the addresses a name was found to have, to those that may be dialled (P4).

use std::net::{IpAddr, SocketAddr};

use crate::decide::find_address_deny;
use crate::decision::{AddressAdmission, Denial, DialPermit, Permit, Treatment};
use crate::facts::Facts;
use crate::name::Host;
use crate::network::{address_forms, forbidden_range};
use crate::policy::Policy;
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
            Denial { rule: Some(permit.rule().clone()), ..self.build_denial(Reason::NoAddress) };
        let mut addresses = Vec::new();
        for address in found.iter().map(IpAddr::to_canonical).take(MAX_ADDRESSES) {
            match self.check_address(permit, address) {
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

    fn check_address(&self, permit: &Permit, address: IpAddr) -> Result<(), Reason> {
        let layers = self.layers.get(permit.sandbox()).ok_or(Reason::UnknownSandbox)?;
        if self.is_own_listener(address, permit.port()) {
            return Err(Reason::OwnAddress);
        }
        if find_address_deny(layers, address, permit.port()).is_some() {
            return Err(Reason::DeniedByRule);
        }
        if !is_guarded(permit)
            && layers.policies().any(|policy| is_memory_address(policy, address, permit.port()))
        {
            return Err(Reason::MemoryOperation);
        }
        if matches!(permit.host(), Host::Address(wanted) if *wanted != address) {
            return Err(Reason::AddressNotExpected);
        }
        permit.0.admission.iter().try_for_each(|layer| check_layer(layer, address))
    }

    /// Whether Sandbar itself listens there. A wildcard listener is on every local address: of those only the
    /// public ones must be told, the others are recognised.
    fn is_own_listener(&self, address: IpAddr, port: Option<u16>) -> bool {
        let here = |own: &SocketAddr, form: IpAddr| {
            let ip = own.ip().to_canonical();
            ip == form || (ip.is_unspecified() && forbidden_range(form).is_some())
        };
        let listens = |own: &&SocketAddr| port.is_some_and(|port| own.port() == port);
        self.own
            .iter()
            .filter(listens)
            .any(|own| address_forms(address).any(|form| here(own, form)))
    }
}

/// Whether the permit is for a memory service, through its guard.
fn is_guarded(permit: &Permit) -> bool {
    matches!(permit.treatment(), Treatment::Hold { .. })
        || matches!(permit.facts(), Facts::Memory(_) | Facts::Name(_))
}

/// Whether a memory service of the policy lies at that address and port: no other name leads there.
fn is_memory_address(policy: &Policy, address: IpAddr, port: Option<u16>) -> bool {
    policy.rules().iter().filter(|rule| rule.memory_terms().is_some()).any(|rule| {
        let nets = rule.resolves_to().unwrap_or(&[]);
        let here = port.is_some_and(|port| rule.ports().is_some_and(|ports| ports.contains(&port)));
        here && nets.iter().any(|net| net.contains(&address))
    })
}

/// Within a layer rules add up: one that admits the address is enough.
fn check_layer(layer: &[AddressAdmission], address: IpAddr) -> Result<(), Reason> {
    let mut refused = Reason::NoAddress;
    for admission in layer {
        match admission.check(address) {
            Ok(()) => return Ok(()),
            Err(reason) => refused = reason,
        }
    }
    Err(refused)
}

impl AddressAdmission {
    fn check(&self, address: IpAddr) -> Result<(), Reason> {
        let private = forbidden_range(address).is_some();
        match self {
            AddressAdmission::Any => Ok(()),
            AddressAdmission::Only(nets) if nets.iter().any(|net| net.contains(&address)) => Ok(()),
            AddressAdmission::Only(_) | AddressAdmission::Public if private => {
                Err(Reason::PrivateAddress)
            }
            AddressAdmission::Only(_) => Err(Reason::AddressNotExpected),
            AddressAdmission::Public => Ok(()),
        }
    }
}
