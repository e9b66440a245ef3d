//! Which addresses a permit lets its name lead to, in words that are the same for the same addresses.

use ipnet::IpNet;

use super::Side;
use crate::decision::{Admission, Permit};
use crate::name::Host;
use crate::network::{forbidden, touches_forbidden};
use crate::policy::{By, Match};

/// The addresses that may be dialled; none when there are none.
pub(super) fn addresses(side: Side<'_>, permit: &Permit) -> Option<String> {
    match permit.host() {
        Host::Address(address) => {
            side.0.admit(permit, &[*address]).ok().map(|_| "the address itself".to_owned())
        }
        Host::Name(_) => of_name(side, permit),
    }
}

fn of_name(side: Side<'_>, permit: &Permit) -> Option<String> {
    let admissions = &permit.0.admission;
    let public = admissions.contains(&Admission::Public);
    let mut denied = denied(side, permit.port());
    if public {
        denied.retain(|net| !is_forbidden(net));
    }
    let Some(mut nets) = nets(admissions) else {
        let all = if public { "public addresses" } else { "any address" };
        return Some(format!("{all}{}", except(&denied)));
    };
    nets.retain(|net| !denied.iter().any(|no| no.contains(net)));
    nets.retain(|net| !public || !is_forbidden(net));
    denied.retain(|no| nets.iter().any(|net| net.contains(no)));
    if nets.is_empty() {
        return None;
    }
    let alone = public && nets.iter().any(touches_forbidden);
    let alone = if alone { " as far as public" } else { "" };
    Some(format!("addresses in {}{alone}{}", join(&nets), except(&denied)))
}

/// The networks that every layer with networks of its own lets pass; none when no layer has any.
fn nets(admissions: &[Admission]) -> Option<Vec<IpNet>> {
    let lists = admissions.iter().filter_map(|admission| match admission {
        Admission::Any | Admission::Public => None,
        Admission::Only(nets) => Some(nets.to_vec()),
    });
    let common = |ones: Vec<IpNet>, others: Vec<IpNet>| {
        let meet = |one: &IpNet, other: &IpNet| match (one.contains(other), other.contains(one)) {
            (true, _) => Some(*other),
            (false, true) => Some(*one),
            (false, false) => None,
        };
        let pairs = ones.iter().flat_map(|one| others.iter().map(move |other| (one, other)));
        pairs.filter_map(|(one, other)| meet(one, other)).collect()
    };
    lists.reduce(common).map(|nets| IpNet::aggregate(&nets))
}

/// The addresses a deny rule shuts whatever name led there.
fn denied((rules, sandbox): Side<'_>, port: Option<u16>) -> Vec<IpNet> {
    let mut found = Vec::new();
    for policy in rules.policies_of(sandbox) {
        for (net, rule) in policy.addresses() {
            let matched = Match { policy, rule, by: By::Address(net) };
            let here =
                port.map_or_else(|| matched.is_on_every_port(), |port| matched.has_port(port));
            if rule.is_deny() && !rule.filters_requests() && here {
                found.push(net);
            }
        }
    }
    IpNet::aggregate(&found)
}

fn is_forbidden(net: &IpNet) -> bool {
    forbidden(net.network()).is_some_and(|forbidden| forbidden.range.contains(net))
}

fn except(nets: &[IpNet]) -> String {
    if nets.is_empty() { String::new() } else { format!(" but {}", join(nets)) }
}

fn join(nets: &[IpNet]) -> String {
    nets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}
