//! What one side allows of a connection and its requests, and on which terms.

use std::collections::{BTreeMap, BTreeSet};

use super::paths::{self, PathLabel};
use super::reach::dialable_addresses;
use super::{DiffSide, targets};
use crate::budget::Budgets;
use crate::credential::PinAccount;
use crate::decision::{Decision, Permit, Treatment};
use crate::facts::{EchPresence, Facts, HttpMethod, Protocol, QueryType};
use crate::name::Host;
use crate::policy::{IdentityMode, RuleMatch};
use crate::probe::{PolicyProbe, ProbeKind};

/// The method that represents all methods no rule names.
const OTHER_METHOD: &str = "ANY-OTHER-METHOD";

/// Descriptions of terms by topic, so that only terms on the same topic are compared.
pub(super) type TermTexts = BTreeMap<&'static str, String>;

/// One connection to probe.
pub(super) struct SampleConnection<'a> {
    pub(super) probe: PolicyProbe,
    /// Its description: the pattern it represents, and the port.
    pub(super) what: String,
    /// The rules of either side that name the host.
    pub(super) matches: &'a [RuleMatch<'a>],
}

/// One request to probe on a connection.
pub(super) struct SampleRequest {
    method: Option<HttpMethod>,
    path: String,
    /// Its description.
    pub(super) shown: String,
}

/// What one side allows.
#[derive(Default)]
pub(super) struct AllowedTraffic {
    /// The connection itself; `None` if nothing passes.
    pub(super) connection: Option<AllowedProbe>,
    /// The allowed requests, by description.
    pub(super) requests: BTreeMap<String, AllowedProbe>,
}

pub(super) struct AllowedProbe {
    pub(super) rule: String,
    pub(super) terms: TermTexts,
    pub(super) treatment: Treatment,
}

impl SampleConnection<'_> {
    /// Returns every combination of methods and paths that the rules of either side distinguish for the host.
    pub(super) fn sample_requests(&self) -> Vec<SampleRequest> {
        if self.probe.special == ProbeKind::Raw {
            return Vec::new();
        }
        let here = || self.matches.iter().filter(|matched| matched.has_port(self.probe.port));
        let named: BTreeSet<&HttpMethod> =
            here().flat_map(|matched| matched.rule.methods().unwrap_or(&[])).collect();
        let patterns: Vec<_> = here().flat_map(|matched| matched.rule.paths().unwrap_or(&[])).collect();
        let other = HttpMethod::parse(OTHER_METHOD).ok();
        let methods: Vec<Option<HttpMethod>> =
            named.iter().map(|method| Some((*method).clone())).chain([None]).collect();
        let denying = here().filter(|matched| matched.rule.is_deny());
        let denied: Vec<_> = denying.flat_map(|matched| matched.rule.paths().unwrap_or(&[])).collect();
        let paths = paths::sample_paths(&patterns, &denied);
        let one = |method: &Option<HttpMethod>, path: &paths::SamplePath| SampleRequest {
            method: method.clone().or_else(|| other.clone()),
            path: path.path.clone(),
            shown: self.describe_request(method.as_ref(), !named.is_empty(), &path.shown),
        };
        methods
            .iter()
            .flat_map(|method| paths.iter().map(move |path| (method, path)))
            .map(|(method, path)| one(method, path))
            .collect()
    }

    fn describe_request(&self, method: Option<&HttpMethod>, some_named: bool, path: &PathLabel) -> String {
        let front = method.map(|method| format!("{method} ")).unwrap_or_default();
        let (pattern, paths) = match path {
            PathLabel::Ambiguous => ("", Some("ambiguous paths")),
            PathLabel::Every => ("", None),
            PathLabel::Other => ("", Some("other paths")),
            PathLabel::Pattern(pattern) => (pattern.as_str(), None),
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

impl AllowedTraffic {
    pub(super) fn new(
        side: DiffSide<'_>,
        sample: &SampleConnection<'_>,
        samples: &[SampleRequest],
    ) -> AllowedTraffic {
        let Some(connection) = decide_probe(side, &sample.probe) else {
            return AllowedTraffic::default();
        };
        let requests: BTreeMap<String, AllowedProbe> = match connection.treatment {
            Treatment::Intercept => samples
                .iter()
                .filter_map(|request| {
                    decide_probe(side, &request.probe(sample)).map(|allowed| (request.shown.clone(), allowed))
                })
                .collect(),
            // Without inspection every request passes.
            Treatment::Forward
            | Treatment::Hold { .. }
            | Treatment::Raw
            | Treatment::Resolve
            | Treatment::Tunnel => {
                samples.iter().map(|request| (request.shown.clone(), connection.opaque_request())).collect()
            }
        };
        if requests.is_empty() && !samples.is_empty() {
            return AllowedTraffic::default();
        }
        AllowedTraffic { connection: Some(connection), requests }
    }
}

impl SampleRequest {
    fn probe(&self, connection: &SampleConnection<'_>) -> PolicyProbe {
        let (method, path) = (self.method.clone(), Some(self.path.clone()));
        PolicyProbe { method, path, ..connection.probe.clone() }
    }
}

impl AllowedProbe {
    /// Returns a request on this connection that Sandbar does not inspect.
    fn opaque_request(&self) -> AllowedProbe {
        AllowedProbe { rule: self.rule.clone(), terms: TermTexts::new(), treatment: self.treatment.clone() }
    }
}

/// Describes whose credentials requests carry, without what follows from having one.
fn describe_credentials(permit: &Permit) -> String {
    let names: Vec<String> = permit.credentials().iter().map(|name| format!("`{name}`")).collect();
    let own = match names.as_slice() {
        [] => "no credential".to_owned(),
        [name] => format!("credential {name}"),
        names => format!("credentials {}", names.join(" and ")),
    };
    match (permit.pin_account(), names.is_empty()) {
        (PinAccount::Off, true) | (PinAccount::Remove, false) => own,
        (PinAccount::Off, false) => format!("{own}, other accounts pass"),
        (PinAccount::Remove, true) => format!("{own}, other accounts removed"),
        (PinAccount::Refuse, _) => format!("{own}, other accounts refused"),
    }
}

/// Decides a probe on one side; `None` if it is refused or no address could be dialled for it.
fn decide_probe(side: DiffSide<'_>, probe: &PolicyProbe) -> Option<AllowedProbe> {
    let Decision::Allow(permit) = probe.decide(side.0, side.1) else { return None };
    let mut terms = TermTexts::from([("addresses", dialable_addresses(side, &permit)?)]);
    terms.insert("budget", describe_budget(permit.rule_budgets()));
    if !matches!(permit.treatment(), Treatment::Raw | Treatment::Tunnel) {
        terms.insert("signals", format!("signals {}", permit.signals()));
    }
    match permit.treatment() {
        Treatment::Forward => {
            terms.insert("credential", describe_credentials(&permit));
        }
        Treatment::Hold { profile, identity } => {
            terms.insert("profile", format!("profile `{profile}`"));
            let required = *identity == IdentityMode::Required;
            terms.insert("identity", choose_text(required, "identity required", "identity from-channel"));
        }
        Treatment::Tunnel => {
            terms.insert("ech", choose_text(tolerates_ech(side, &permit), "ECH tolerated", "ECH refused"));
        }
        Treatment::Intercept | Treatment::Raw | Treatment::Resolve => {}
    }
    if *permit.treatment() != Treatment::Forward {
        terms.insert("how", permit.treatment().as_str().to_owned());
    }
    let rule = permit.rule().rule.to_string();
    Some(AllowedProbe { rule, terms, treatment: permit.treatment().clone() })
}

fn choose_text(condition: bool, yes: &str, no: &str) -> String {
    if condition { yes.to_owned() } else { no.to_owned() }
}

pub(super) fn describe_budget(budgets: Budgets) -> String {
    let set: Vec<String> = budgets.limits().map(|(key, limit)| format!("{key} = {limit}")).collect();
    if set.is_empty() { "no budget".to_owned() } else { format!("budget {}", set.join(", ")) }
}

/// Returns whether the same connection would pass with ECH in its ClientHello.
fn tolerates_ech((rules, sandbox): DiffSide<'_>, permit: &Permit) -> bool {
    let mut facts = permit.facts().clone();
    if let Facts::Connect(connect) = &mut facts
        && let Protocol::Tls { ech, .. } = &mut connect.protocol
    {
        *ech = EchPresence::Present;
    }
    matches!(rules.decide(sandbox, &facts), Decision::Allow(_))
}

/// Returns how a side answers DNS queries for a host; `None` if it refuses every type.
pub(super) fn decide_lookup(
    side: DiffSide<'_>,
    host: &Host,
    matches: &[RuleMatch<'_>],
) -> Option<AllowedProbe> {
    let named = matches.iter().filter_map(|matched| matched.rule.allow_terms());
    let types: BTreeSet<QueryType> =
        named.flat_map(|terms| &terms.dns_types).chain(&QueryType::DEFAULT).copied().collect();
    let mut found: Option<AllowedProbe> = None;
    let (mut allowed, mut strict) = (Vec::new(), false);
    for query in types {
        let probe = PolicyProbe { special: ProbeKind::Lookup(query), ..targets::connection_probe(host, 443) };
        let Decision::Allow(permit) = probe.decide(side.0, side.1) else { continue };
        allowed.push(query.to_string());
        strict |= permit.lookup().strict_cname;
        let rule = permit.rule().rule.to_string();
        found.get_or_insert(AllowedProbe {
            rule,
            terms: TermTexts::new(),
            treatment: permit.treatment().clone(),
        });
    }
    let mut found = found?;
    found.terms.insert("types", format!("DNS types {}", allowed.join(" ")));
    found.terms.insert("cname", choose_text(strict, "strict CNAME", "flattened CNAME"));
    Some(found)
}
