//! Finds what a policy change opens, closes and treats differently, by probing both rule sets.
//!
//! It probes one host for every class of hosts that the two sides distinguish, on every port that either side has
//! for it, with every method and path that either names and one that neither names. So layers, deny rules and
//! precedence count exactly as in enforcement, and an empty result means that nothing differs.

mod banks;
mod paths;
mod reach;
mod targets;
mod view;

use std::collections::{BTreeSet, HashSet};
use std::fmt;

use self::targets::{SampleHost, all_matches, connection_probe, host_signature, rule_ports, with_port};
use self::view::{AllowedProbe, AllowedTraffic, SampleConnection, decide_lookup, describe_budget};
use crate::decision::Treatment;
use crate::policy::RuleMatch;
use crate::probe::{PolicyProbe, ProbeKind};
use crate::ruleset::{BaseLayer, RuleSet};
use crate::sandbox::SandboxRef;

/// One difference for one sandbox.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Difference {
    pub change: ReachabilityChange,
    /// The affected pattern with its port, and the request if only some requests are affected.
    pub what: String,
    /// The rule on the side where it is reachable; empty if no rule is involved.
    pub rule: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReachabilityChange {
    BecomesReachable,
    /// Reachable before and after, but with other terms: interception, credential, addresses, budgets...
    IsTreatedOtherwise {
        from: String,
        to: String,
    },
    StopsBeingReachable,
}

/// A rule set and the sandbox to compare.
pub type DiffSide<'a> = (&'a RuleSet, &'a SandboxRef);

/// Returns what `new` opens, closes and treats differently for a sandbox, compared with `old`.
pub fn diff(old: DiffSide<'_>, new: DiffSide<'_>) -> Vec<Difference> {
    if is_identical(old, new) {
        return Vec::new();
    }
    let mut found = DifferenceSet::default();
    let sandbox_budget = |side: DiffSide<'_>| describe_budget(side.0.budgets_of(side.1));
    if has_sandbox(old) && has_sandbox(new) {
        found.add_treatment_change("the sandbox", &sandbox_budget(old), &sandbox_budget(new), "");
    }
    let mut unchanged = HashSet::new();
    for target in targets::sample_hosts([old, new]) {
        let signature = host_signature([old, new], &target.host);
        if signature.as_ref().is_some_and(|signature| unchanged.contains(signature)) {
            continue;
        }
        let before = found.0.len();
        compare_host(old, new, &target, &mut found);
        if found.0.len() == before {
            unchanged.extend(signature);
        }
    }
    found.0.into_iter().collect()
}

/// Returns whether both sides have the same files, base and identity, so that no probing is needed.
fn is_identical(old: DiffSide<'_>, new: DiffSide<'_>) -> bool {
    let layers = |(rules, sandbox): DiffSide<'_>| {
        let layers = rules.layers.get(&sandbox.id)?;
        let tier = match &layers.base {
            BaseLayer::Policy(_) => None,
            BaseLayer::Tier(tier) => Some(*tier),
        };
        let digests: Vec<_> = layers.policies().map(|policy| policy.digest).collect();
        let identity = (sandbox.tenant.clone(), sandbox.environment.clone());
        Some((tier, digests, identity))
    };
    layers(old) == layers(new)
}

fn has_sandbox((rules, sandbox): DiffSide<'_>) -> bool {
    rules.layers.contains_key(&sandbox.id)
}

/// The differences found so far, sorted and without duplicates.
#[derive(Default)]
struct DifferenceSet(BTreeSet<Difference>);

impl DifferenceSet {
    fn add(&mut self, change: ReachabilityChange, what: &str, rule: &str) {
        self.0.insert(Difference { change, what: what.to_owned(), rule: rule.to_owned() });
    }

    fn add_treatment_change(&mut self, what: &str, from: &str, to: &str, rule: &str) {
        if from != to {
            let change = ReachabilityChange::IsTreatedOtherwise { from: from.to_owned(), to: to.to_owned() };
            self.add(change, what, rule);
        }
    }
}

fn compare_host(old: DiffSide<'_>, new: DiffSide<'_>, target: &SampleHost, found: &mut DifferenceSet) {
    let matches = all_matches([old, new], &target.host);
    let (mut opened, mut closed) = (false, false);
    for port in rule_ports(&matches) {
        let what = with_port(&target.shown, port);
        let probe = connection_probe(&target.host, port);
        let sample = SampleConnection { probe, what, matches: &matches };
        let (before, after) = probe_both_sides(old, new, &sample);
        opened |= before.connection.is_none() && after.connection.is_some();
        closed |= before.connection.is_some() && after.connection.is_none();
        compare_raw(old, new, &sample, found);
        if !is_only_raw(&before) || !is_only_raw(&after) {
            compare_connections(&sample.what, &before, &after, found);
        }
        if is_memory_service(&before) || is_memory_service(&after) {
            compare_banks(old, new, &sample, found);
        }
    }
    compare_lookups((old, closed), (new, opened), target, &matches, found);
}

fn probe_both_sides(
    old: DiffSide<'_>,
    new: DiffSide<'_>,
    sample: &SampleConnection<'_>,
) -> (AllowedTraffic, AllowedTraffic) {
    let requests = sample.sample_requests();
    (AllowedTraffic::new(old, sample, &requests), AllowedTraffic::new(new, sample, &requests))
}

fn is_memory_service(traffic: &AllowedTraffic) -> bool {
    traffic.connection.as_ref().is_some_and(|allowed| matches!(allowed.treatment, Treatment::Hold { .. }))
}

/// Returns whether only raw TCP passes, which `compare_raw` reports.
fn is_only_raw(traffic: &AllowedTraffic) -> bool {
    traffic.connection.as_ref().is_none_or(|allowed| allowed.treatment == Treatment::Raw)
}

fn compare_raw(
    old: DiffSide<'_>,
    new: DiffSide<'_>,
    sample: &SampleConnection<'_>,
    found: &mut DifferenceSet,
) {
    let raw = |matched: &RuleMatch<'_>| {
        matched.rule.allow_terms().is_some_and(|terms| terms.raw_tcp) && matched.has_port(sample.probe.port)
    };
    if !sample.matches.iter().any(raw) {
        return;
    }
    let probe = PolicyProbe { special: ProbeKind::Raw, ..sample.probe.clone() };
    let what = format!("{} (raw TCP)", sample.what);
    let sample = SampleConnection { probe, what, matches: sample.matches };
    let (before, after) = probe_both_sides(old, new, &sample);
    compare_connections(&sample.what, &before, &after, found);
}

fn compare_banks(
    old: DiffSide<'_>,
    new: DiffSide<'_>,
    sample: &SampleConnection<'_>,
    found: &mut DifferenceSet,
) {
    let (before, after) = (banks::open_banks(old, sample), banks::open_banks(new, sample));
    for (what, rule) in banks::missing_banks(&after, &before) {
        found.add(ReachabilityChange::BecomesReachable, what, rule);
    }
    for (what, rule) in banks::missing_banks(&before, &after) {
        found.add(ReachabilityChange::StopsBeingReachable, what, rule);
    }
}

/// Compares lookups; one that opens or closes together with a connection is not reported separately.
fn compare_lookups(
    (old, closed): (DiffSide<'_>, bool),
    (new, opened): (DiffSide<'_>, bool),
    target: &SampleHost,
    matches: &[RuleMatch<'_>],
    found: &mut DifferenceSet,
) {
    let what = format!("DNS {}", target.shown);
    match (decide_lookup(old, &target.host, matches), decide_lookup(new, &target.host, matches)) {
        (Some(before), Some(after)) => compare_terms(&target.shown, &before, &after, found),
        (None, Some(after)) if !opened => found.add(ReachabilityChange::BecomesReachable, &what, &after.rule),
        (Some(before), None) if !closed => {
            found.add(ReachabilityChange::StopsBeingReachable, &what, &before.rule);
        }
        (None, None | Some(_)) | (Some(_), None) => {}
    }
}

fn compare_connections(
    what: &str,
    before: &AllowedTraffic,
    after: &AllowedTraffic,
    found: &mut DifferenceSet,
) {
    match (&before.connection, &after.connection) {
        (None, None) => {}
        (None, Some(to)) => found.add(ReachabilityChange::BecomesReachable, what, &to.rule),
        (Some(from), None) => found.add(ReachabilityChange::StopsBeingReachable, what, &from.rule),
        (Some(from), Some(to)) => {
            compare_terms(what, from, to, found);
            compare_requests(what, before, after, found);
        }
    }
}

fn compare_terms(what: &str, before: &AllowedProbe, after: &AllowedProbe, found: &mut DifferenceSet) {
    for (topic, to) in &after.terms {
        if let Some(from) = before.terms.get(topic) {
            found.add_treatment_change(what, from, to, &after.rule);
        }
    }
}

fn compare_requests(what: &str, before: &AllowedTraffic, after: &AllowedTraffic, found: &mut DifferenceSet) {
    for (request, allowed) in &after.requests {
        if !before.requests.contains_key(request) {
            found.add(ReachabilityChange::BecomesReachable, request, &allowed.rule);
        }
    }
    for (request, allowed) in &before.requests {
        if !after.requests.contains_key(request) {
            found.add(ReachabilityChange::StopsBeingReachable, request, &allowed.rule);
        }
    }
    let both: Vec<_> = after
        .requests
        .iter()
        .filter_map(|(request, to)| Some((request, before.requests.get(request)?, to)))
        .collect();
    let topics: BTreeSet<_> = both.iter().flat_map(|(_, _, to)| to.terms.keys()).collect();
    for topic in topics {
        compare_term(what, topic, &both, found);
    }
}

/// Compares one term over all requests; a change that is the same for all of them is reported once.
fn compare_term(
    what: &str,
    topic: &'static str,
    both: &[(&String, &AllowedProbe, &AllowedProbe)],
    found: &mut DifferenceSet,
) {
    let term = |(request, from, to): &(&String, &AllowedProbe, &AllowedProbe)| {
        let change = (from.terms.get(topic)?.clone(), to.terms.get(topic)?.clone());
        Some(((*request).clone(), change, to.rule.clone()))
    };
    let changes: Vec<_> = both.iter().filter_map(term).collect();
    let distinct: BTreeSet<_> = changes.iter().map(|(_, change, _)| change).collect();
    for (request, (from, to), rule) in &changes {
        let what = if distinct.len() == 1 { what } else { request };
        found.add_treatment_change(what, from, to, rule);
    }
}

impl fmt::Display for ReachabilityChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReachabilityChange::BecomesReachable => f.write_str("becomes reachable"),
            ReachabilityChange::IsTreatedOtherwise { from, to } => {
                write!(f, "changes from {from} to {to}")
            }
            ReachabilityChange::StopsBeingReachable => f.write_str("stops being reachable"),
        }
    }
}
