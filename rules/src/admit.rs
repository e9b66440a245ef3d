//! `RuleSet::admit`: filters the addresses that a name resolved to, keeping those Sandbar may dial (P4).

use std::net::{IpAddr, SocketAddr};

use crate::decide::{PartialDenial, RequestView, find_address_deny};
use crate::decision::{AddressAdmission, Denial, DialPermit, Permit, Treatment};
use crate::facts::Facts;
use crate::name::Host;
use crate::network::{address_forms, forbidden_range};
use crate::policy::Policy;
use crate::reason::Reason;
use crate::ruleset::RuleSet;

/// Most addresses to check for one name.
pub const MAX_ADDRESSES: usize = 32;

impl RuleSet {
    /// Returns the addresses of `resolved` that the permit's rules admit.
    ///
    /// # Errors
    ///
    /// Returns the denial of the first address if none is admitted, and `no_address` if there was none.
    pub fn admit(&self, permit: &Permit, resolved: &[IpAddr]) -> Result<DialPermit, Box<Denial>> {
        let mut refused =
            Denial { rule: Some(permit.rule().clone()), ..self.build_denial(Reason::NoAddress) };
        let mut addresses = Vec::new();
        for address in resolved.iter().map(IpAddr::to_canonical).take(MAX_ADDRESSES) {
            match self.check_address(permit, address) {
                Ok(()) => addresses.push(address),
                Err(PartialDenial { reason, rule, layer }) if refused.address.is_none() => {
                    let rule = rule.or(refused.rule);
                    refused = Denial { reason, rule, layer, address: Some(address), ..refused };
                }
                Err(_) => {}
            }
        }
        match addresses.is_empty() {
            false => Ok(DialPermit { permit: permit.clone(), addresses: addresses.into() }),
            true => Err(Box::new(refused)),
        }
    }

    fn check_address(&self, permit: &Permit, address: IpAddr) -> Result<(), PartialDenial> {
        let layers = self.layers.get(permit.sandbox()).ok_or(Reason::UnknownSandbox)?;
        if self.is_own_listener(address, permit.port()) {
            return Err(Reason::OwnAddress.into());
        }
        if let Some(denied) = find_address_deny(layers, address, permit.port(), request_view(permit)) {
            return Err(denied);
        }
        if !is_guarded(permit)
            && layers.policies().any(|policy| is_memory_address(policy, address, permit.port()))
        {
            return Err(Reason::MemoryOperation.into());
        }
        if matches!(permit.host(), Host::Address(wanted) if *wanted != address) {
            return Err(Reason::AddressNotExpected.into());
        }
        permit.terms.admission.iter().try_for_each(|layer| check_layer(layer, address))?;
        Ok(())
    }

    /// Returns whether Sandbar itself listens there.
    ///
    /// A wildcard listener accepts on every local address. Every address in a special range counts as local here;
    /// local addresses in public ranges must be listed in [`LoadSources::own`](crate::LoadSources::own).
    fn is_own_listener(&self, address: IpAddr, port: Option<u16>) -> bool {
        let matches = |own: &SocketAddr, form: IpAddr| {
            let ip = own.ip().to_canonical();
            ip == form || (ip.is_unspecified() && forbidden_range(form).is_some())
        };
        let same_port = |own: &&SocketAddr| port.is_some_and(|port| own.port() == port);
        self.own.iter().filter(same_port).any(|own| address_forms(address).any(|form| matches(own, form)))
    }
}

/// Returns what a deny rule for addresses can judge: the permit's request, requests that follow, or none at all.
fn request_view(permit: &Permit) -> RequestView<'_> {
    match (permit.facts(), permit.treatment()) {
        (Facts::Request(request), _) => RequestView::Seen(request),
        (Facts::Memory(memory), _) => RequestView::Seen(&memory.request),
        (Facts::Connect(_), Treatment::Raw | Treatment::Tunnel) => RequestView::Never,
        (Facts::Connect(_) | Facts::Name(_), _) => RequestView::Later,
    }
}

/// Returns whether the permit leads to a memory service through its guard, or is for a lookup only.
fn is_guarded(permit: &Permit) -> bool {
    matches!(permit.treatment(), Treatment::Hold { .. })
        || matches!(permit.facts(), Facts::Memory(_) | Facts::Name(_))
}

/// Returns whether a memory rule of the policy covers that address and port, which no other name may lead to.
fn is_memory_address(policy: &Policy, address: IpAddr, port: Option<u16>) -> bool {
    policy.rules().iter().filter(|rule| rule.memory_terms().is_some()).any(|rule| {
        let nets = rule.resolves_to().unwrap_or(&[]);
        let here = port.is_some_and(|port| rule.ports().is_some_and(|ports| ports.contains(&port)));
        here && nets.iter().any(|net| net.contains(&address))
    })
}

/// Checks an address against one layer, where one admitting rule is enough.
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
            AddressAdmission::Only(_) | AddressAdmission::Public if private => Err(Reason::PrivateAddress),
            AddressAdmission::Only(_) => Err(Reason::AddressNotExpected),
            AddressAdmission::Public => Ok(()),
        }
    }
}
