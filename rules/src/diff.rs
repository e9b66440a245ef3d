//! What a change of policy opens, closes and treats otherwise, told by asking both rule sets the same questions.
//!
//! A host is tried for every kind of host the two sides tell apart, on every port either has for it, with
//! every method and path either names and one that none does. So layers, denies and precedence count as
//! they do when enforced, and no answer means that nothing differs.

mod banks;
mod paths;
mod reach;
mod targets;
mod view;

use std::collections::{BTreeSet, HashSet};
use std::fmt;

use self::targets::{Target, matches, ports, probe, signature, with_port};
use self::view::{Pass, Question, View, budget, lookup};
use crate::decision::How;
use crate::policy::Match;
use crate::probe::{Probe, Special};
use crate::ruleset::{Base, RuleSet};
use crate::sandbox::SandboxRef;

/// One difference for one sandbox.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Difference {
    pub change: Change,
    /// What it is about: a pattern with its port, and the request if only some are concerned.
    pub what: String,
    /// The rule on the side where it is reachable; empty where none is concerned.
    pub rule: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    BecomesReachable,
    /// Reachable before and after, but on other terms: interception, credential, addresses, budgets...
    IsTreatedOtherwise {
        from: String,
        to: String,
    },
    StopsBeingReachable,
}

/// A rule set and the sandbox that is asked about.
pub type Side<'a> = (&'a RuleSet, &'a SandboxRef);

/// What `new` opens, closes and treats otherwise for a sandbox compared with `old`.
pub fn diff(old: Side<'_>, new: Side<'_>) -> Vec<Difference> {
    if is_same(old, new) {
        return Vec::new();
    }
    let mut found = Found::default();
    let sandbox_budget = |side: Side<'_>| budget(side.0.budgets_of(side.1));
    if exists(old) && exists(new) {
        found.otherwise("the sandbox", &sandbox_budget(old), &sandbox_budget(new), "");
    }
    let mut alike = HashSet::new();
    for target in targets::targets([old, new]) {
        let signature = signature([old, new], &target.host);
        if signature.as_ref().is_some_and(|signature| alike.contains(signature)) {
            continue;
        }
        let before = found.0.len();
        compare_host(old, new, &target, &mut found);
        if found.0.len() == before {
            alike.extend(signature);
        }
    }
    found.0.into_iter().collect()
}

/// Whether both sides are the same text under the same base, which needs no questions.
fn is_same(old: Side<'_>, new: Side<'_>) -> bool {
    let layers = |(rules, sandbox): Side<'_>| {
        let layers = rules.layers.get(&sandbox.id)?;
        let tier = match &layers.base {
            Base::Policy(_) => None,
            Base::Tier(tier) => Some(*tier),
        };
        let digests: Vec<_> = layers.policies().map(|policy| policy.digest).collect();
        let identity = (sandbox.tenant.clone(), sandbox.environment.clone());
        Some((tier, digests, identity))
    };
    layers(old) == layers(new)
}

fn exists((rules, sandbox): Side<'_>) -> bool {
    rules.layers.contains_key(&sandbox.id)
}

/// The differences found so far, each once and in order.
#[derive(Default)]
struct Found(BTreeSet<Difference>);

impl Found {
    fn note(&mut self, change: Change, what: &str, rule: &str) {
        self.0.insert(Difference { change, what: what.to_owned(), rule: rule.to_owned() });
    }

    fn otherwise(&mut self, what: &str, from: &str, to: &str, rule: &str) {
        if from != to {
            let change = Change::IsTreatedOtherwise { from: from.to_owned(), to: to.to_owned() };
            self.note(change, what, rule);
        }
    }
}

fn compare_host(old: Side<'_>, new: Side<'_>, target: &Target, found: &mut Found) {
    let matches = matches([old, new], &target.host);
    let (mut opened, mut closed) = (false, false);
    for port in ports(&matches) {
        let what = with_port(&target.shown, port);
        let probe = probe(&target.host, port);
        let question = Question { probe, what, matches: &matches };
        let (before, after) = views(old, new, &question);
        opened |= before.connection.is_none() && after.connection.is_some();
        closed |= before.connection.is_some() && after.connection.is_none();
        compare_raw(old, new, &question, found);
        if !only_raw(&before) || !only_raw(&after) {
            compare(&question.what, &before, &after, found);
        }
        if holds(&before) || holds(&after) {
            compare_banks(old, new, &question, found);
        }
    }
    compare_lookups((old, closed), (new, opened), target, &matches, found);
}

fn views(old: Side<'_>, new: Side<'_>, question: &Question<'_>) -> (View, View) {
    let tries = question.tries();
    (View::of(old, question, &tries), View::of(new, question, &tries))
}

fn holds(view: &View) -> bool {
    view.connection.as_ref().is_some_and(|pass| matches!(pass.how, How::Hold { .. }))
}

/// Whether nothing passes but what raw TCP lets pass, of which raw TCP itself tells.
fn only_raw(view: &View) -> bool {
    view.connection.as_ref().is_none_or(|pass| pass.how == How::Raw)
}

fn compare_raw(old: Side<'_>, new: Side<'_>, question: &Question<'_>, found: &mut Found) {
    let raw = |matched: &Match<'_>| {
        matched.rule.allow().is_some_and(|terms| terms.raw_tcp)
            && matched.has_port(question.probe.port)
    };
    if !question.matches.iter().any(raw) {
        return;
    }
    let probe = Probe { special: Special::Raw, ..question.probe.clone() };
    let what = format!("{} (raw TCP)", question.what);
    let question = Question { probe, what, matches: question.matches };
    let (before, after) = views(old, new, &question);
    compare(&question.what, &before, &after, found);
}

fn compare_banks(old: Side<'_>, new: Side<'_>, question: &Question<'_>, found: &mut Found) {
    let (before, after) = (banks::banks(old, question), banks::banks(new, question));
    for (what, rule) in banks::missing(&after, &before) {
        found.note(Change::BecomesReachable, what, rule);
    }
    for (what, rule) in banks::missing(&before, &after) {
        found.note(Change::StopsBeingReachable, what, rule);
    }
}

/// Look-ups that come or go with a connection are told by it.
fn compare_lookups(
    (old, closed): (Side<'_>, bool),
    (new, opened): (Side<'_>, bool),
    target: &Target,
    matches: &[Match<'_>],
    found: &mut Found,
) {
    let what = format!("DNS {}", target.shown);
    match (lookup(old, &target.host, matches), lookup(new, &target.host, matches)) {
        (Some(before), Some(after)) => compare_terms(&target.shown, &before, &after, found),
        (None, Some(after)) if !opened => found.note(Change::BecomesReachable, &what, &after.rule),
        (Some(before), None) if !closed => {
            found.note(Change::StopsBeingReachable, &what, &before.rule);
        }
        (None, None | Some(_)) | (Some(_), None) => {}
    }
}

fn compare(what: &str, before: &View, after: &View, found: &mut Found) {
    match (&before.connection, &after.connection) {
        (None, None) => {}
        (None, Some(pass)) => found.note(Change::BecomesReachable, what, &pass.rule),
        (Some(pass), None) => found.note(Change::StopsBeingReachable, what, &pass.rule),
        (Some(from), Some(to)) => {
            compare_terms(what, from, to, found);
            compare_requests(what, before, after, found);
        }
    }
}

fn compare_terms(what: &str, before: &Pass, after: &Pass, found: &mut Found) {
    for (about, to) in &after.terms {
        if let Some(from) = before.terms.get(about) {
            found.otherwise(what, from, to, &after.rule);
        }
    }
}

fn compare_requests(what: &str, before: &View, after: &View, found: &mut Found) {
    for (request, pass) in &after.requests {
        if !before.requests.contains_key(request) {
            found.note(Change::BecomesReachable, request, &pass.rule);
        }
    }
    for (request, pass) in &before.requests {
        if !after.requests.contains_key(request) {
            found.note(Change::StopsBeingReachable, request, &pass.rule);
        }
    }
    let both: Vec<_> = after
        .requests
        .iter()
        .filter_map(|(request, to)| Some((request, before.requests.get(request)?, to)))
        .collect();
    let abouts: BTreeSet<_> = both.iter().flat_map(|(_, _, to)| to.terms.keys()).collect();
    for about in abouts {
        compare_term(what, about, &both, found);
    }
}

/// One term of every request: told once where it changes for all of them alike.
fn compare_term(
    what: &str,
    about: &'static str,
    both: &[(&String, &Pass, &Pass)],
    found: &mut Found,
) {
    let term = |(request, from, to): &(&String, &Pass, &Pass)| {
        let change = (from.terms.get(about)?.clone(), to.terms.get(about)?.clone());
        Some(((*request).clone(), change, to.rule.clone()))
    };
    let changes: Vec<_> = both.iter().filter_map(term).collect();
    let alike: BTreeSet<_> = changes.iter().map(|(_, change, _)| change).collect();
    for (request, (from, to), rule) in &changes {
        let what = if alike.len() == 1 { what } else { request };
        found.otherwise(what, from, to, rule);
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::BecomesReachable => f.write_str("becomes reachable"),
            Change::IsTreatedOtherwise { from, to } => write!(f, "changes from {from} to {to}"),
            Change::StopsBeingReachable => f.write_str("stops being reachable"),
        }
    }
}
