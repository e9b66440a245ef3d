//! Describes the addresses that a permit admits; equal sets of addresses have equal descriptions.

use ipnet::IpNet;

use super::DiffSide;
use crate::decision::{AddressAdmission, Permit};
use crate::name::Host;
use crate::network::{is_forbidden, spans_forbidden};
use crate::policy::{MatchedEntry, RuleMatch};

/// Describes the addresses that Sandbar may dial; `None` if there are none.
pub(super) fn dialable_addresses(side: DiffSide<'_>, permit: &Permit) -> Option<String> {
    match permit.host() {
        Host::Address(address) => {
            side.0.admit(permit, &[*address]).ok().map(|_| "the address itself".to_owned())
        }
        Host::Name(_) => name_addresses(side, permit),
    }
}

fn name_addresses(side: DiffSide<'_>, permit: &Permit) -> Option<String> {
    let [own, base] = permit.terms.admission.each_ref().map(|layer| AddressSet::new(layer));
    let AddressSet { any, public, mut nets, mut public_parts } = own.intersect(base);
    let mut denied = denied_nets(side, permit.port());
    let is_denied = |net: &IpNet| denied.iter().any(|deny| deny.contains(net));
    nets.retain(|net| !is_denied(net));
    public_parts.retain(|net| !is_denied(net));
    let within = |deny: &IpNet| nets.iter().chain(&public_parts).any(|net| net.contains(deny));
    denied.retain(|deny| any || within(deny) || (public && !is_forbidden(deny)));
    let mut words: Vec<String> = Vec::new();
    words.extend(any.then(|| "any address".to_owned()));
    words.extend(public.then(|| "public addresses".to_owned()));
    words.extend((!nets.is_empty()).then(|| format!("addresses in {}", join_nets(&nets))));
    words.extend(
        (!public_parts.is_empty()).then(|| format!("public addresses in {}", join_nets(&public_parts))),
    );
    (!words.is_empty()).then(|| format!("{}{}", words.join(" and "), describe_exceptions(&denied)))
}

/// A set of addresses.
#[derive(Default)]
struct AddressSet {
    any: bool,
    /// Whether it includes every public address.
    public: bool,
    /// Networks it includes completely.
    nets: Vec<IpNet>,
    /// Networks of which it includes only the public addresses.
    public_parts: Vec<IpNet>,
}

impl AddressSet {
    fn new(layer: &[AddressAdmission]) -> AddressSet {
        let nets = layer.iter().flat_map(|admission| match admission {
            AddressAdmission::Any | AddressAdmission::Public => &[][..],
            AddressAdmission::Only(nets) => nets,
        });
        let (any, public) =
            (layer.contains(&AddressAdmission::Any), layer.contains(&AddressAdmission::Public));
        AddressSet { any, public, nets: nets.copied().collect(), public_parts: Vec::new() }
    }

    /// Returns the addresses in both sets, in normal form.
    fn intersect(self, other: AddressSet) -> AddressSet {
        if self.any || other.any {
            let any = self.any && other.any;
            return AddressSet { any, ..if self.any { other } else { self } }.normalise();
        }
        let mut nets = intersect_nets(&self.nets, &other.nets);
        let halves = [(other.public, self.nets), (self.public, other.nets)];
        let halves = halves.into_iter().filter(|(public, _)| *public).flat_map(|(_, nets)| nets);
        let (public_parts, whole): (Vec<_>, Vec<_>) =
            halves.filter(|net| !is_forbidden(net)).partition(spans_forbidden);
        nets.extend(whole);
        AddressSet { any: false, public: self.public && other.public, nets, public_parts }.normalise()
    }

    /// Removes networks that `public` already covers, and aggregates the rest.
    fn normalise(mut self) -> AddressSet {
        if self.public {
            self.nets.retain(|net| is_forbidden(net) || spans_forbidden(net));
            self.public_parts.clear();
        }
        AddressSet {
            nets: IpNet::aggregate(&self.nets),
            public_parts: IpNet::aggregate(&self.public_parts),
            ..self
        }
    }
}

fn intersect_nets(ones: &[IpNet], others: &[IpNet]) -> Vec<IpNet> {
    let meet = |one: &IpNet, other: &IpNet| match (one.contains(other), other.contains(one)) {
        (true, _) => Some(*other),
        (false, true) => Some(*one),
        (false, false) => None,
    };
    let pairs = ones.iter().flat_map(|one| others.iter().map(move |other| (one, other)));
    pairs.filter_map(|(one, other)| meet(one, other)).collect()
}

/// Returns the networks that deny rules close, whatever name leads there.
fn denied_nets((rules, sandbox): DiffSide<'_>, port: Option<u16>) -> Vec<IpNet> {
    let mut found = Vec::new();
    for policy in rules.policies_of(sandbox) {
        for (net, rule) in policy.addresses() {
            let matched = RuleMatch { policy, rule, by: MatchedEntry::Address(net) };
            let on_port = port.map_or_else(|| matched.is_on_every_port(), |port| matched.has_port(port));
            if rule.is_deny() && !rule.filters_requests() && on_port {
                found.push(net);
            }
        }
    }
    IpNet::aggregate(&found)
}

fn describe_exceptions(nets: &[IpNet]) -> String {
    if nets.is_empty() { String::new() } else { format!(" except {}", join_nets(nets)) }
}

fn join_nets(nets: &[IpNet]) -> String {
    nets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}
