//! The hosts and ports to probe: one host for every class of hosts that the patterns of the two sides distinguish.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::DiffSide;
use crate::facts::UrlScheme;
use crate::host_set::PatternHit;
use crate::name::{DomainName, Host};
use crate::network::forbidden_range;
use crate::pattern::PatternReach;
use crate::policy::{MatchedEntry, Policy, RuleMatch, matching_rules};
use crate::probe::{PolicyProbe, ProbeKind};
use crate::special_names;

/// The label that represents any name below a wildcard.
const ANY_LABEL: &str = "any-name";
/// The port that is always probed.
const DEFAULT_PORT: u16 = 443;

/// A host to probe.
pub(super) struct SampleHost {
    pub(super) host: Host,
    /// The pattern it represents.
    pub(super) shown: String,
}

/// Returns a probe of a connection as a client would open it.
pub(super) fn connection_probe(host: &Host, port: u16) -> PolicyProbe {
    let scheme = if port == 80 { UrlScheme::Http } else { UrlScheme::Https };
    let (host, special) = (host.clone(), ProbeKind::Connection);
    PolicyProbe { host, port, scheme, method: None, path: None, special }
}

/// Returns every policy of both sides, the old side's first.
pub(super) fn all_policies<'a>(sides: [DiffSide<'a>; 2]) -> Vec<&'a std::sync::Arc<Policy>> {
    sides.into_iter().flat_map(|(rules, sandbox)| rules.policies_of(sandbox)).collect()
}

/// Returns every rule of either side that names `host`.
pub(super) fn all_matches<'a>(sides: [DiffSide<'a>; 2], host: &'a Host) -> Vec<RuleMatch<'a>> {
    all_policies(sides).into_iter().flat_map(|policy| matching_rules(policy, host)).collect()
}

pub(super) fn sample_hosts(sides: [DiffSide<'_>; 2]) -> impl Iterator<Item = SampleHost> {
    let nets: BTreeSet<IpNet> =
        all_policies(sides).into_iter().flat_map(|policy| policy.addresses().map(|(net, _)| net)).collect();
    let target = |(shown, host)| SampleHost { host, shown };
    sample_names(sides).into_iter().map(target).chain(sample_addresses(&nets))
}

fn sample_names(sides: [DiffSide<'_>; 2]) -> BTreeMap<String, Host> {
    let all = all_policies(sides);
    let hits = || all.iter().flat_map(|policy| policy.hosts()).map(|(hit, _)| hit);
    let taken: BTreeSet<&str> = hits().filter_map(|hit| hit.base.split('.').next()).collect();
    let mut label = ANY_LABEL.to_owned();
    while taken.contains(label.as_str()) {
        label.push('x');
    }
    let mut found = BTreeMap::new();
    for hit in hits() {
        for (shown, name) in names_for(&hit, &label) {
            found.entry(shown).or_insert(Host::Name(name));
        }
    }
    found
}

/// Returns a name for each kind of name that the pattern covers.
fn names_for(hit: &PatternHit<'_>, label: &str) -> Vec<(String, DomainName)> {
    let below = || match hit.base {
        "" => parse_sample("*".to_owned(), label),
        // A base name of nearly maximum length leaves room for a single letter only.
        base => parse_sample(format!("*.{base}"), &format!("{label}.{base}"))
            .or_else(|| parse_sample(format!("*.{base}"), &format!("a.{base}"))),
    };
    let own = || parse_sample(hit.base.to_owned(), hit.base);
    let both = match hit.reach {
        PatternReach::Below => [None, below()],
        PatternReach::Exact => [own(), None],
        PatternReach::Tree => [own(), below()],
    };
    both.into_iter().flatten().collect()
}

fn parse_sample(shown: String, name: &str) -> Option<(String, DomainName)> {
    DomainName::parse(name).ok().map(|name| (shown, name))
}

/// Returns the first address of every range whose addresses are in the same networks and equally public.
fn sample_addresses(nets: &BTreeSet<IpNet>) -> Vec<SampleHost> {
    let mut starts: BTreeSet<IpAddr> = BTreeSet::new();
    for net in nets {
        starts.insert(net.network());
        starts.extend(next_address(net.broadcast()));
    }
    let mut special: Vec<IpAddr> = starts.iter().copied().collect();
    while let Some(address) = special.pop() {
        let next = forbidden_range(address).and_then(|forbidden| next_address(forbidden.range.broadcast()));
        special.extend(next.filter(|next| starts.insert(*next)));
    }
    let narrowest =
        |address: &IpAddr| nets.iter().filter(|net| net.contains(address)).max_by_key(|net| net.prefix_len());
    let target = |address: IpAddr| {
        let shown = narrowest(&address)?.to_string();
        Some(SampleHost { host: Host::Address(address), shown })
    };
    starts.into_iter().filter_map(target).collect()
}

fn next_address(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(address) => address.to_bits().checked_add(1).map(|bits| IpAddr::V4(bits.into())),
        IpAddr::V6(address) => address.to_bits().checked_add(1).map(|bits| IpAddr::V6(bits.into())),
    }
}

/// Returns every port that a rule has for the host; on other ports no rule allows anything.
pub(super) fn rule_ports(matches: &[RuleMatch<'_>]) -> BTreeSet<u16> {
    let mut found = BTreeSet::from([DEFAULT_PORT]);
    for matched in matches {
        match matched.by {
            MatchedEntry::Host(PatternHit { port: Some(port), .. }) => found.extend([port]),
            MatchedEntry::Host(_) | MatchedEntry::Address(_) => {
                found.extend(matched.rule.ports().unwrap_or(&[]))
            }
        }
    }
    found
}

/// Returns `shown` with its port, unless that is the default port.
pub(super) fn with_port(shown: &str, port: u16) -> String {
    match port {
        DEFAULT_PORT => shown.to_owned(),
        port => format!("{shown}:{port}"),
    }
}

/// Everything that a decision on a name depends on. Names with the same signature get the same decision, so a long
/// list is probed once and not a million times.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct HostSignature {
    rules: Vec<(usize, u16, Option<u16>, u8, usize)>,
    zone: Option<&'static str>,
    refused: bool,
}

/// Returns the signature of a name; `None` for an address, of which there are few.
pub(super) fn host_signature(sides: [DiffSide<'_>; 2], host: &Host) -> Option<HostSignature> {
    let name = host.name()?;
    let (mut rules, mut refused) = (Vec::new(), special_names::is_resolver_discovery(name));
    for (at, policy) in all_policies(sides).into_iter().enumerate() {
        for hit in policy.hosts.hits(name) {
            refused |= special_names::is_hidden_resolver(name, &hit);
            // The length of an exact name does not affect precedence: every other match has a shorter base.
            let length = if hit.reach == PatternReach::Exact { 0 } else { hit.base.len() };
            rules.push((at, hit.rule, hit.port, hit.reach as u8, length));
        }
    }
    Some(HostSignature { rules, zone: special_names::special_zone(name), refused })
}
