//! What a change of policy opens and closes, told by asking both rule sets the same questions.
//!
//! Every pattern of either side is tried with a name it covers, on every port, method and path that
//! either side speaks of. So layers, denies and precedence count as they do when enforced.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::decision::{Decision, How};
use crate::facts::{Method, Scheme};
use crate::name::{DomainName, Host};
use crate::pattern::Reach;
use crate::policy::{Rule, matching};
use crate::probe::{Probe, Special};
use crate::ruleset::RuleSet;
use crate::sandbox::SandboxRef;
use crate::set::Hit;

/// The label that stands for any name below a wildcard.
const ANY: &str = "any-name";
/// The path that stands for any a rule does not name.
const ANY_PATH: &str = "/any-path";
/// The methods that are always tried beside those a rule names.
const METHODS: [&str; 2] = ["GET", "POST"];

/// One difference for one sandbox.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Difference {
    pub change: Change,
    /// What it is about: a pattern with its port, and the request if only some are concerned.
    pub what: String,
    /// The rule on the side where it is reachable.
    pub rule: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    BecomesReachable,
    /// Reachable before and after, but otherwise: tunnel or interception, credential.
    IsTreatedOtherwise {
        from: String,
        to: String,
    },
    StopsBeingReachable,
}

/// What `new` opens and closes for a sandbox compared with `old`.
pub fn diff(old: Side<'_>, new: Side<'_>) -> Vec<Difference> {
    let mut found = BTreeSet::new();
    for question in questions(old, new).into_values() {
        let tries = question.tries(old, new);
        compare(
            &question,
            View::of(old, &question, &tries),
            View::of(new, &question, &tries),
            &mut found,
        );
    }
    let (before, after) = (banks(old), banks(new));
    note_all(&mut found, Change::BecomesReachable, after.difference(&before));
    note_all(&mut found, Change::StopsBeingReachable, before.difference(&after));
    found.into_iter().collect()
}

fn note_all<'a>(
    found: &mut BTreeSet<Difference>,
    change: Change,
    banks: impl Iterator<Item = &'a (String, String)>,
) {
    found.extend(banks.map(|(what, rule)| Difference {
        change: change.clone(),
        what: what.clone(),
        rule: rule.clone(),
    }));
}

/// A rule set and the sandbox that is asked about.
pub type Side<'a> = (&'a RuleSet, &'a SandboxRef);

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::BecomesReachable => f.write_str("becomes reachable"),
            Change::IsTreatedOtherwise { from, to } => write!(f, "changes from {from} to {to}"),
            Change::StopsBeingReachable => f.write_str("stops being reachable"),
        }
    }
}

/// One connection worth trying.
struct Question {
    probe: Probe,
    /// The words for it: the pattern it stands for, and the port.
    what: String,
}

/// One request worth trying on a connection.
struct Try {
    method: Method,
    path: String,
    /// The words for it.
    shown: String,
}

/// Every connection either side speaks of, each once.
fn questions(old: Side<'_>, new: Side<'_>) -> BTreeMap<String, Question> {
    let mut all = BTreeMap::new();
    for (rules, sandbox) in [old, new] {
        for policy in rules.policies_of(sandbox) {
            for (hit, rule) in policy.hosts() {
                ports(&hit, rule)
                    .into_iter()
                    .for_each(|port| ask(&mut all, witnesses(&hit), port, rule));
            }
            for (net, rule) in policy.addresses() {
                let ends = [net.network(), net.broadcast()];
                let target = || ends.map(|end| (Host::from(end), net.to_string())).to_vec();
                rule.ports()
                    .unwrap_or(&[443])
                    .iter()
                    .for_each(|port| ask(&mut all, target(), *port, rule));
            }
        }
    }
    all
}

fn ask(all: &mut BTreeMap<String, Question>, hosts: Vec<(Host, String)>, port: u16, rule: &Rule) {
    let raw = rule.allow().is_some_and(|terms| terms.raw_tcp);
    let special = if raw { Special::Raw } else { Special::Connection };
    let scheme = if port == 80 { Scheme::Http } else { Scheme::Https };
    for (host, shown) in hosts {
        let what = match (raw, port) {
            (true, port) => format!("{shown}:{port} (raw TCP)"),
            (false, 443) => shown,
            (false, port) => format!("{shown}:{port}"),
        };
        let probe =
            Probe { host, port, scheme, method: None, path: None, special: special.clone() };
        all.entry(format!("{what} {}", probe.host)).or_insert(Question { probe, what });
    }
}

fn ports(hit: &Hit<'_>, rule: &Rule) -> Vec<u16> {
    match hit.port {
        Some(port) => vec![port],
        None => rule.ports().map_or_else(|| vec![443], <[u16]>::to_vec),
    }
}

/// A name for each kind of name the pattern covers.
fn witnesses(hit: &Hit<'_>) -> Vec<(Host, String)> {
    let below = match hit.base {
        "" => (format!("{ANY}.example"), "*".to_owned()),
        base => (format!("{ANY}.{base}"), format!("*.{base}")),
    };
    let own = (hit.base.to_owned(), hit.base.to_owned());
    let names = match hit.reach {
        Reach::Below => vec![below],
        Reach::Exact => vec![own],
        Reach::Tree => vec![own, below],
    };
    let named =
        |(name, shown): (String, String)| Some((Host::Name(DomainName::parse(&name).ok()?), shown));
    names.into_iter().filter_map(named).collect()
}

impl Question {
    /// Every method with every path that a rule of either side has for the host, and one more of each.
    fn tries(&self, old: Side<'_>, new: Side<'_>) -> Vec<Try> {
        let mut methods: BTreeSet<Method> =
            METHODS.iter().filter_map(|method| Method::parse(method).ok()).collect();
        let mut paths = BTreeMap::from([(ANY_PATH.to_owned(), None)]);
        for (rules, sandbox) in [old, new] {
            for policy in rules.policies_of(sandbox) {
                for matched in matching(policy, &self.probe.host) {
                    methods.extend(matched.rule.methods().unwrap_or(&[]).iter().cloned());
                    let patterns = matched.rule.paths().unwrap_or(&[]).iter();
                    paths.extend(
                        patterns.map(|pattern| (pattern.example(), Some(pattern.to_string()))),
                    );
                }
            }
        }
        let other = if paths.len() > 1 { " (other paths)" } else { "" };
        let shown = |method: &Method, path: &Option<String>| match path {
            None => format!("{method} {}{other}", self.what),
            Some(path) => format!("{method} {}{path}", self.what),
        };
        let one = |method: &Method, (path, pattern): (&String, &Option<String>)| Try {
            method: method.clone(),
            path: path.clone(),
            shown: shown(method, pattern),
        };
        methods
            .iter()
            .flat_map(|method| paths.iter().map(move |path| (method, path)))
            .map(|(m, p)| one(m, p))
            .collect()
    }
}

/// What one side makes of a connection.
struct View {
    /// How it is treated; none when nothing gets through.
    treated: Option<&'static str>,
    rule: String,
    /// The requests that pass, with the credential they are given.
    requests: BTreeMap<String, Option<String>>,
}

impl View {
    fn of(side: Side<'_>, question: &Question, tries: &[Try]) -> View {
        let Decision::Allow(permit) = question.probe.decide(side.0, side.1) else {
            return View::shut();
        };
        let requests: BTreeMap<_, _> = match permit.how() {
            How::Intercept => {
                tries.iter().filter_map(|request| question.pass(side, request)).collect()
            }
            How::Forward | How::Hold { .. } | How::Raw | How::Resolve | How::Tunnel => {
                tries.iter().map(|request| (request.shown.clone(), None)).collect()
            }
        };
        if requests.is_empty() {
            return View::shut();
        }
        View { treated: Some(permit.how().word()), rule: permit.rule().rule.to_string(), requests }
    }

    fn shut() -> View {
        View { treated: None, rule: String::new(), requests: BTreeMap::new() }
    }
}

impl Question {
    fn pass(&self, (rules, sandbox): Side<'_>, request: &Try) -> Option<(String, Option<String>)> {
        let (method, path) = (Some(request.method.clone()), Some(request.path.clone()));
        let probe = Probe { method, path, ..self.probe.clone() };
        match probe.decide(rules, sandbox) {
            Decision::Allow(permit) => {
                Some((request.shown.clone(), permit.credential().map(ToString::to_string)))
            }
            Decision::Deny(_) => None,
        }
    }
}

fn compare(question: &Question, before: View, after: View, found: &mut BTreeSet<Difference>) {
    let mut note = |change, what: &str, rule: &str| {
        found.insert(Difference { change, what: what.to_owned(), rule: rule.to_owned() });
    };
    match (before.treated, after.treated) {
        (None, None) => return,
        (None, Some(_)) => return note(Change::BecomesReachable, &question.what, &after.rule),
        (Some(_), None) => return note(Change::StopsBeingReachable, &question.what, &before.rule),
        (Some(from), Some(to)) if from != to => {
            note(otherwise(from, to), &question.what, &after.rule)
        }
        (Some(_), Some(_)) => {}
    }
    for (request, key) in &after.requests {
        match before.requests.get(request) {
            None => note(Change::BecomesReachable, request, &after.rule),
            Some(other) if other != key && before.treated == after.treated => {
                note(otherwise(&credential(other), &credential(key)), request, &after.rule);
            }
            Some(_) => {}
        }
    }
    for request in before.requests.keys().filter(|request| !after.requests.contains_key(*request)) {
        note(Change::StopsBeingReachable, request, &before.rule);
    }
}

fn otherwise(from: &str, to: &str) -> Change {
    Change::IsTreatedOtherwise { from: from.to_owned(), to: to.to_owned() }
}

fn credential(name: &Option<String>) -> String {
    name.as_ref().map_or("no credential".to_owned(), |name| format!("credential `{name}`"))
}

/// Every bank a side opens, with the rule that does.
fn banks((rules, sandbox): Side<'_>) -> BTreeSet<(String, String)> {
    let mut all = BTreeSet::new();
    for policy in rules.policies_of(sandbox) {
        for (hit, rule) in policy.hosts() {
            let Some(terms) = rule.memory() else { continue };
            let opened =
                [("forget", &terms.forget), ("recall", &terms.recall), ("retain", &terms.retain)];
            for (operation, bank) in
                opened.iter().flat_map(|(word, banks)| banks.iter().map(move |bank| (word, bank)))
            {
                all.insert((format!("{operation} {bank} at {}", hit.base), rule.name().to_owned()));
            }
        }
    }
    all
}
