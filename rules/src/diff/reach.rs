//! Which addresses a permit lets its name lead to, in words that are the same for the same addresses.

use ipnet::IpNet;

use super::Side;
use crate::decision::{Admission, Permit};
use crate::name::Host;
use crate::network::{is_forbidden, is_wide};
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
    let [own, base] = permit.0.admission.each_ref().map(|layer| Set::of(layer));
    let Set { any, public, mut nets, mut partly } = own.meet(base);
    let mut denied = denied(side, permit.port());
    let shut = |net: &IpNet| denied.iter().any(|no| no.contains(net));
    nets.retain(|net| !shut(net));
    partly.retain(|net| !shut(net));
    let within = |no: &IpNet| nets.iter().chain(&partly).any(|net| net.contains(no));
    denied.retain(|no| any || within(no) || (public && !is_forbidden(no)));
    let mut words: Vec<String> = Vec::new();
    words.extend(any.then(|| "any address".to_owned()));
    words.extend(public.then(|| "public addresses".to_owned()));
    words.extend((!nets.is_empty()).then(|| format!("addresses in {}", join(&nets))));
    words.extend((!partly.is_empty()).then(|| format!("public addresses in {}", join(&partly))));
    (!words.is_empty()).then(|| format!("{}{}", words.join(" and "), except(&denied)))
}

/// Addresses: all, the public ones, those of networks, and the public ones of networks.
#[derive(Default)]
struct Set {
    any: bool,
    public: bool,
    nets: Vec<IpNet>,
    partly: Vec<IpNet>,
}

impl Set {
    fn of(layer: &[Admission]) -> Set {
        let nets = layer.iter().flat_map(|admission| match admission {
            Admission::Any | Admission::Public => &[][..],
            Admission::Only(nets) => nets,
        });
        let (any, public) = (layer.contains(&Admission::Any), layer.contains(&Admission::Public));
        Set { any, public, nets: nets.copied().collect(), partly: Vec::new() }
    }

    /// What both layers let pass, each part in one way only.
    fn meet(self, other: Set) -> Set {
        if self.any || other.any {
            let any = self.any && other.any;
            return Set { any, ..if self.any { other } else { self } }.tidy();
        }
        let mut nets = common(&self.nets, &other.nets);
        let halves = [(other.public, self.nets), (self.public, other.nets)];
        let halves = halves.into_iter().filter(|(public, _)| *public).flat_map(|(_, nets)| nets);
        let (partly, whole): (Vec<_>, Vec<_>) =
            halves.filter(|net| !is_forbidden(net)).partition(is_wide);
        nets.extend(whole);
        Set { any: false, public: self.public && other.public, nets, partly }.tidy()
    }

    fn tidy(mut self) -> Set {
        if self.public {
            self.nets.retain(|net| is_forbidden(net) || is_wide(net));
            self.partly.clear();
        }
        Set { nets: IpNet::aggregate(&self.nets), partly: IpNet::aggregate(&self.partly), ..self }
    }
}

fn common(ones: &[IpNet], others: &[IpNet]) -> Vec<IpNet> {
    let meet = |one: &IpNet, other: &IpNet| match (one.contains(other), other.contains(one)) {
        (true, _) => Some(*other),
        (false, true) => Some(*one),
        (false, false) => None,
    };
    let pairs = ones.iter().flat_map(|one| others.iter().map(move |other| (one, other)));
    pairs.filter_map(|(one, other)| meet(one, other)).collect()
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

fn except(nets: &[IpNet]) -> String {
    if nets.is_empty() { String::new() } else { format!(" but {}", join(nets)) }
}

fn join(nets: &[IpNet]) -> String {
    nets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}
