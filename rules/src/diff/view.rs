//! What one side makes of a connection and of the requests on it, and on which terms.

use std::collections::{BTreeMap, BTreeSet};

use super::paths::{self, Shown};
use super::reach::addresses;
use super::{Side, targets};
use crate::budget::Budgets;
use crate::decision::{Decision, How, Permit};
use crate::facts::{Ech, Facts, Method, Protocol, QueryType};
use crate::name::Host;
use crate::policy::{IdentityMode, Match};
use crate::probe::{Probe, Special};

/// The method that stands for any a rule does not name.
const OTHER_METHOD: &str = "ANY-OTHER-METHOD";

/// Terms by what they are about, so that like is compared with like.
pub(super) type Terms = BTreeMap<&'static str, String>;

/// One connection worth trying.
pub(super) struct Question<'a> {
    pub(super) probe: Probe,
    /// The words for it: the pattern it stands for, and the port.
    pub(super) what: String,
    /// The rules of either side that name the host.
    pub(super) matches: &'a [Match<'a>],
}

/// One request worth trying on a connection.
pub(super) struct Try {
    method: Option<Method>,
    path: String,
    /// The words for it.
    pub(super) shown: String,
}

/// What a side lets pass.
#[derive(Default)]
pub(super) struct View {
    /// The connection itself; none when nothing gets through.
    pub(super) connection: Option<Pass>,
    /// The requests that pass, by their words.
    pub(super) requests: BTreeMap<String, Pass>,
}

pub(super) struct Pass {
    pub(super) rule: String,
    pub(super) terms: Terms,
    pub(super) how: How,
}

impl Question<'_> {
    /// Every method with every path that a rule of either side tells apart for the host.
    pub(super) fn tries(&self) -> Vec<Try> {
        if self.probe.special == Special::Raw {
            return Vec::new();
        }
        let here = || self.matches.iter().filter(|matched| matched.has_port(self.probe.port));
        let named: BTreeSet<&Method> =
            here().flat_map(|matched| matched.rule.methods().unwrap_or(&[])).collect();
        let patterns: Vec<_> =
            here().flat_map(|matched| matched.rule.paths().unwrap_or(&[])).collect();
        let other = Method::parse(OTHER_METHOD).ok();
        let methods: Vec<Option<Method>> =
            named.iter().map(|method| Some((*method).clone())).chain([None]).collect();
        let denying = here().filter(|matched| matched.rule.is_deny());
        let denied: Vec<_> =
            denying.flat_map(|matched| matched.rule.paths().unwrap_or(&[])).collect();
        let paths = paths::witnesses(&patterns, &denied);
        let one = |method: &Option<Method>, path: &paths::Witness| Try {
            method: method.clone().or_else(|| other.clone()),
            path: path.path.clone(),
            shown: self.shown(method.as_ref(), !named.is_empty(), &path.shown),
        };
        methods
            .iter()
            .flat_map(|method| paths.iter().map(move |path| (method, path)))
            .map(|(method, path)| one(method, path))
            .collect()
    }

    fn shown(&self, method: Option<&Method>, some_named: bool, path: &Shown) -> String {
        let front = method.map(|method| format!("{method} ")).unwrap_or_default();
        let (pattern, paths) = match path {
            Shown::Ambiguous => ("", Some("ambiguous paths")),
            Shown::Every => ("", None),
            Shown::Other => ("", Some("other paths")),
            Shown::Pattern(pattern) => (pattern.as_str(), None),
        };
        let methods = (method.is_none() && some_named).then_some("other methods");
        let others: Vec<&str> = methods.into_iter().chain(paths).collect();
        let others = match others.is_empty() {
            true => String::new(),
            false => format!(" ({})", others.join(", ")),
        };
        format!("{front}{}{pattern}{others}", self.what)
    }
}

impl View {
    pub(super) fn of(side: Side<'_>, question: &Question<'_>, tries: &[Try]) -> View {
        let Some(connection) = pass(side, &question.probe) else { return View::default() };
        let requests: BTreeMap<String, Pass> = match connection.how {
            How::Intercept => tries
                .iter()
                .filter_map(|request| {
                    pass(side, &request.probe(question)).map(|pass| (request.shown.clone(), pass))
                })
                .collect(),
            // What passes unseen passes whatever it asks for.
            How::Forward | How::Hold { .. } | How::Raw | How::Resolve | How::Tunnel => {
                tries.iter().map(|request| (request.shown.clone(), connection.request())).collect()
            }
        };
        if requests.is_empty() && !tries.is_empty() {
            return View::default();
        }
        View { connection: Some(connection), requests }
    }
}

impl Try {
    fn probe(&self, question: &Question<'_>) -> Probe {
        let (method, path) = (self.method.clone(), Some(self.path.clone()));
        Probe { method, path, ..question.probe.clone() }
    }
}

impl Pass {
    /// A request of which nothing is seen.
    fn request(&self) -> Pass {
        Pass { rule: self.rule.clone(), terms: Terms::new(), how: self.how.clone() }
    }
}

/// What becomes of a probe on one side; none when it is refused or no address could be dialled for it.
fn pass(side: Side<'_>, probe: &Probe) -> Option<Pass> {
    let Decision::Allow(permit) = probe.decide(side.0, side.1) else { return None };
    let mut terms = Terms::from([("addresses", addresses(side, &permit)?)]);
    terms.insert("budget", budget(permit.rule_budgets()));
    terms.insert("inspect", yes(permit.inspect(), "inspected", "not inspected"));
    let receives = permit.may_receive_memory();
    terms.insert("memory", yes(receives, "may receive memory", "may not receive memory"));
    match permit.how() {
        How::Forward => {
            let name = permit.credential();
            let text = name.map(|name| format!("credential `{name}`"));
            terms.insert("credential", text.unwrap_or_else(|| "no credential".to_owned()));
        }
        How::Hold { profile, identity } => {
            terms.insert("profile", format!("profile `{profile}`"));
            let required = *identity == IdentityMode::Required;
            terms.insert("identity", yes(required, "identity required", "identity from-path"));
        }
        How::Tunnel => {
            terms.insert("ech", yes(tolerates_ech(side, &permit), "ECH tolerated", "ECH refused"));
        }
        How::Intercept | How::Raw | How::Resolve => {}
    }
    if *permit.how() != How::Forward {
        terms.insert("how", permit.how().word().to_owned());
    }
    let rule = permit.rule().rule.to_string();
    Some(Pass { rule, terms, how: permit.how().clone() })
}

fn yes(is: bool, one: &str, other: &str) -> String {
    if is { one.to_owned() } else { other.to_owned() }
}

pub(super) fn budget(budgets: Budgets) -> String {
    let set: Vec<String> = budgets.set().map(|(key, limit)| format!("{key} = {limit}")).collect();
    if set.is_empty() { "no budget".to_owned() } else { format!("budget {}", set.join(", ")) }
}

/// Whether the same connection would pass with an encrypted hello in it.
fn tolerates_ech((rules, sandbox): Side<'_>, permit: &Permit) -> bool {
    let mut facts = permit.facts().clone();
    if let Facts::Connect(connect) = &mut facts
        && let Protocol::Tls { ech, .. } = &mut connect.protocol
    {
        *ech = Ech::Present;
    }
    matches!(rules.decide(sandbox, &facts), Decision::Allow(_))
}

/// How a side answers DNS questions for a host; none when it answers no type of them.
pub(super) fn lookup(side: Side<'_>, host: &Host, matches: &[Match<'_>]) -> Option<Pass> {
    let named = matches.iter().filter_map(|matched| matched.rule.allow());
    let types: BTreeSet<QueryType> =
        named.flat_map(|terms| &terms.dns_types).chain(&QueryType::DEFAULT).copied().collect();
    let mut found: Option<Pass> = None;
    let (mut allowed, mut strict) = (Vec::new(), false);
    for query in types {
        let probe = Probe { special: Special::Lookup(query), ..targets::probe(host, 443) };
        let Decision::Allow(permit) = probe.decide(side.0, side.1) else { continue };
        allowed.push(query.to_string());
        strict |= permit.lookup().strict_cname;
        let rule = permit.rule().rule.to_string();
        found.get_or_insert(Pass { rule, terms: Terms::new(), how: permit.how().clone() });
    }
    let mut found = found?;
    found.terms.insert("types", format!("DNS types {}", allowed.join(" ")));
    found.terms.insert("cname", yes(strict, "strict CNAME", "flattened CNAME"));
    Some(found)
}
