//! Finds rules without effect. Within a file they are errors; across layers they are warnings, because sandboxes
//! with different bases can share a policy.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use ipnet::IpNet;

use super::problem::{ProblemKind, Problems, SourceText};
use crate::configuration::{IdentitySettings, MemoryService};
use crate::credential::Credential;
use crate::host_set::PatternHit;
use crate::ids::{BankPattern, PolicyName, SandboxId};
use crate::name::{DomainName, Host};
use crate::network::is_forbidden;
use crate::pattern::{DomainPattern, HostPattern, PatternReach, PatternWidth};
use crate::policy::{
    AllowTerms, IdentityMode, MatchedEntry, MemoryTerms, Policy, PortSet, Rule, RuleMatch, matching_rules,
};
use crate::ruleset::{BaseLayer, SandboxLayers, Tier};
use crate::sandbox::Sandbox;
use crate::signals::SignalMode;
use crate::signals::settings::{MemoryReceipt, SignalKind};
use crate::special_names;

/// Most entries of a rule to compare with a base; a longer list counts as effective.
const MAX_COMPARED: usize = 256;
/// Most patterns of a base to search for names below a wildcard.
const MAX_SEARCHED: usize = 10_000;

/// Reports the problems within one policy.
pub(crate) fn lint_policy(policy: &Arc<Policy>, problems: &mut Problems) {
    let mut effects = vec![RuleEffect::default(); policy.rules.len()];
    let mut pending = effects.len();
    for hit in policy.hosts.iter() {
        let (Some(rule), Some(effect)) = (policy.rule_at(hit.rule), effects.get_mut(usize::from(hit.rule)))
        else {
            continue;
        };
        // One effective entry is enough, so a long list costs one check and not a million.
        if effect.acts {
            continue;
        }
        match never_acts_cause(policy, rule, &hit) {
            None => {
                effect.acts = true;
                pending -= 1;
                if pending == 0 {
                    break;
                }
            }
            Some(why) => effect.why = Some(why),
        }
    }
    for entry in &policy.addresses {
        if let Some(effect) = effects.get_mut(usize::from(entry.rule)) {
            effect.acts = true;
        }
    }
    for (rule, effect) in policy.rules.iter().zip(effects) {
        report_rule(rule, effect, problems);
    }
    check_ties(std::slice::from_ref(policy), problems);
    check_raw_overlaps(std::slice::from_ref(policy), problems);
    check_opaque_rules(std::slice::from_ref(policy), "this policy", problems);
    warn_of_idle_filters(policy, policy, problems);
}

/// Whether a rule has any effect, and if not, why.
#[derive(Clone, Debug, Default)]
struct RuleEffect {
    acts: bool,
    why: Option<String>,
}

fn report_rule(rule: &Rule, effect: RuleEffect, problems: &mut Problems) {
    let name = rule.name.to_string();
    let empty = |list: Option<usize>| list == Some(0);
    let filters = empty(rule.methods().map(<[_]>::len)) || empty(rule.paths().map(<[_]>::len));
    if filters || empty(rule.ports().map(<[_]>::len)) || empty(rule.resolves_to().map(<[_]>::len)) {
        let what = if rule.is_deny() { "denies" } else { "allows" };
        let why = format!("rule `{name}` has an empty list, so it {what} nothing; fill or remove the list");
        problems.warning(rule.at.clone(), ProblemKind::Pointless(why));
    }
    match effect {
        RuleEffect { acts: true, .. } => {}
        RuleEffect { why: Some(why), .. } => {
            problems.error(rule.at.clone(), ProblemKind::NeverActs { rule: name, why });
        }
        RuleEffect { why: None, .. } => {
            problems.warning(
                rule.at.clone(),
                ProblemKind::Pointless(format!("rule `{name}` lists no host, so it has no effect")),
            );
        }
    }
}

/// Returns why an entry of a rule has no effect, alone or because of other rules in its file.
fn never_acts_cause(policy: &Policy, rule: &Rule, hit: &PatternHit<'_>) -> Option<String> {
    if rule.is_deny() {
        return None;
    }
    inherent_cause(rule, hit).or_else(|| {
        let others =
            covering_entries(policy, hit).into_iter().filter(|(_, other)| !std::ptr::eq(*other, rule));
        others.into_iter().find_map(|(above, other)| shadow_cause((rule, hit), (other, &above)))
    })
}

fn inherent_cause(rule: &Rule, hit: &PatternHit<'_>) -> Option<String> {
    let name = DomainName::parse(hit.base).ok()?;
    if special_names::is_resolver_discovery(&name) {
        return Some(format!(
            "`{}` switches clients to another resolver and is always refused",
            hit.pattern()
        ));
    }
    if special_names::is_hidden_resolver(&name, hit) {
        return Some(format!(
            "`{}` covers a public resolver, which a rule must list by its exact name",
            hit.pattern()
        ));
    }
    let plain = |ports: &[u16]| !ports.is_empty() && ports.iter().all(|port| *port == 80);
    let clear = hit.port.map_or_else(|| rule.ports().is_some_and(plain), |port| port == 80);
    (rule.credential().is_some() && clear).then(|| {
        "a credential is never sent in the clear, and port 80 is plain HTTP; use port 443".to_owned()
    })
}

/// Returns why `rule` has no effect beside `other`, whose pattern covers the entry.
fn shadow_cause(
    (rule, hit): (&Rule, &PatternHit<'_>),
    (other, above): (&Rule, &PatternHit<'_>),
) -> Option<String> {
    if !ports_within((hit, rule), (above, other)) {
        return None;
    }
    let same = above.base == hit.base && above.reach == hit.reach;
    let (pattern, name) = (hit.pattern(), &other.name);
    if other.is_deny() && !other.filters_requests() {
        return Some(format!("rule `{name}` denies `{pattern}` entirely"));
    }
    if rule.is_opaque() && other.needs_requests() && other.memory_terms().is_none() {
        return Some(format!("rule `{name}` needs `{pattern}` intercepted"));
    }
    if same && other.memory_terms().is_some() && (rule.allow_terms().is_some() || other.line < rule.line) {
        return Some(format!("`{pattern}` is the memory service of rule `{name}`"));
    }
    let repeats = rule.allow_terms().is_some() && rule.allow_terms() == other.allow_terms();
    let repeats = repeats && rule.methods == other.methods && rule.paths == other.paths;
    (same && other.line < rule.line && repeats)
        .then(|| format!("rule `{name}` already allows `{pattern}` in the same way"))
}

/// Returns the entries of a policy whose pattern covers that of `hit`, with their rules.
fn covering_entries<'p>(policy: &'p Policy, hit: &PatternHit<'p>) -> Vec<(PatternHit<'p>, &'p Rule)> {
    let Some(pattern) = domain_pattern(hit) else { return Vec::new() };
    let candidates = match pattern.base() {
        Some(base) => policy.hosts.hits_above(base),
        None => policy.hosts.hits_with_base(""),
    };
    let covers = |other: &PatternHit<'_>| domain_pattern(other).is_some_and(|other| other.covers(&pattern));
    let candidates = candidates.into_iter().filter(covers);
    candidates.filter_map(|other| policy.rule_at(other.rule).map(|rule| (other, rule))).collect()
}

fn domain_pattern(hit: &PatternHit<'_>) -> Option<DomainPattern> {
    HostPattern::parse(&hit.pattern(), PatternWidth::DangerouslyWide).ok().map(|parsed| parsed.pattern)
}

/// Returns whether the second entry covers every port of the first.
fn ports_within((hit, rule): (&PatternHit<'_>, &Rule), (above, other): (&PatternHit<'_>, &Rule)) -> bool {
    let has = |port: u16| above.port.map_or_else(|| other.ports.contains(port), |written| written == port);
    match (hit.port, &rule.ports) {
        (Some(port), _) => has(port),
        (None, PortSet::All) => above.port.is_none() && other.ports == PortSet::All,
        (None, PortSet::Listed(ports)) => ports.iter().all(|port| has(*port)),
    }
}

/// Reports rules of a layer that are equally specific for some request but inject different credentials: their
/// order in the file would decide which secret Sandbar sends.
fn check_ties(policies: &[Arc<Policy>], problems: &mut Problems) {
    for (at, policy) in policies.iter().enumerate() {
        if !policy.rules.iter().any(|rule| rule.credential().is_some()) {
            continue;
        }
        for hit in policy.hosts.iter() {
            let Some(rule) = policy.rule_at(hit.rule).filter(|rule| rule.credential().is_some()) else {
                continue;
            };
            let rivals = policies.iter().enumerate().flat_map(|(index, other)| {
                other.hosts.hits_with_base(hit.base).into_iter().map(move |rival| (index, other, rival))
            });
            for (index, other, rival) in rivals {
                let Some(against) = other.rule_at(rival.rule) else { continue };
                let later = (index, against.line) < (at, rule.line) || against.credential().is_none();
                if later && is_tie((&hit, rule), (&rival, against)) {
                    let (one, other) = (against.name.to_string(), rule.name.to_string());
                    problems.error(rule.at.clone(), ProblemKind::Tie { one, other, host: hit.pattern() });
                }
            }
        }
    }
}

/// Returns whether some request matches both rules equally well while their credentials differ.
fn is_tie((hit, rule): (&PatternHit<'_>, &Rule), (rival, other): (&PatternHit<'_>, &Rule)) -> bool {
    let shape = |hit: &PatternHit<'_>| (hit.reach == PatternReach::Exact, hit.port.is_some());
    let ports = |hit: &PatternHit<'_>, rule: &Rule| match hit.port {
        Some(port) => vec![port],
        None => rule.ports().map(<[u16]>::to_vec).unwrap_or_default(),
    };
    let own = ports(hit, rule);
    other.allow_terms().is_some()
        && !other.is_raw()
        && other.credential() != rule.credential()
        && shape(hit) == shape(rival)
        && ports(rival, other).iter().any(|port| own.contains(port))
        && share_method(rule, other)
        && share_path(rule, other)
}

/// Reports rules of `policy` whose methods and paths restrict nothing, because a rule of `other` covers their host on the
/// same terms and allows more: of several rules that name a host, one that allows a request is enough.
fn warn_of_idle_filters(policy: &Arc<Policy>, other: &Arc<Policy>, problems: &mut Problems) {
    let mut compared = vec![0; policy.rules.len()];
    for hit in policy.hosts.iter() {
        let (Some(rule), Some(count)) = (policy.rule_at(hit.rule), compared.get_mut(usize::from(hit.rule)))
        else {
            continue;
        };
        if rule.is_deny() || !rule.filters_requests() || *count >= MAX_COMPARED {
            continue;
        }
        *count += 1;
        let wider = covering_entries(other, &hit).into_iter().find(|(above, wide)| {
            !std::ptr::eq(*wide, rule)
                && rule.allow_terms().is_some()
                && wide.allow_terms() == rule.allow_terms()
                && ports_within((&hit, rule), (above, wide))
                && allows_more(wide, rule)
        });
        let Some((above, wide)) = wider else { continue };
        *count = MAX_COMPARED; // one warning for each rule
        let (file, line) = other.pattern_location(wide, &above);
        let why = format!(
            "the methods and paths of rule `{}` do not restrict `{}`: rule `{}` ({file}:{line}) allows more by `{}`",
            rule.name,
            hit.pattern(),
            wide.name,
            above.pattern()
        );
        problems.warning(rule.at.clone(), ProblemKind::Pointless(why));
    }
}

/// Returns whether `wide` allows every request that `narrow` allows, and others.
fn allows_more(wide: &Rule, narrow: &Rule) -> bool {
    let all_paths =
        |rule: &Rule| rule.paths().is_none_or(|paths| paths.iter().any(|path| path.is_everything()));
    let methods = match (wide.methods(), narrow.methods()) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(wide), Some(narrow)) => narrow.iter().all(|method| wide.contains(method)),
    };
    let paths = all_paths(wide) || wide.paths == narrow.paths;
    let same_methods = match (wide.methods(), narrow.methods()) {
        (Some(wide), Some(narrow)) => wide.iter().all(|method| narrow.contains(method)),
        (None, None) => true,
        (None, Some(_)) | (Some(_), None) => false,
    };
    let same_paths = wide.paths == narrow.paths || (all_paths(wide) && all_paths(narrow));
    methods && paths && !(same_methods && same_paths)
}

fn share_method(rule: &Rule, other: &Rule) -> bool {
    match (rule.methods(), other.methods()) {
        (Some(own), Some(others)) => own.iter().any(|method| others.contains(method)),
        (None, _) | (_, None) => true,
    }
}

/// Returns whether two rules share paths that both match with the same specificity.
fn share_path(rule: &Rule, other: &Rule) -> bool {
    let whole = |rule: &Rule| rule.paths().is_none_or(|paths| paths.iter().any(|path| path.is_everything()));
    let (own, others) = (rule.paths().unwrap_or(&[]), other.paths().unwrap_or(&[]));
    let alike = own.iter().any(|path| {
        others.iter().any(|against| path.specificity() == against.specificity() && path.overlaps(against))
    });
    alike || (whole(rule) && whole(other))
}

/// Reports hosts and ports that a layer opens both to raw TCP and to requests or tunnels: raw TCP comes first, so the
/// other rule's filters, budgets and records would never apply.
fn check_raw_overlaps(policies: &[Arc<Policy>], problems: &mut Problems) {
    for policy in policies.iter().filter(|policy| policy.rules.iter().any(Rule::is_raw)) {
        for (hit, rule) in policy.hosts().filter(|(_, rule)| rule.is_raw()) {
            let Ok(name) = DomainName::parse(hit.base) else { continue };
            let host = Host::Name(name);
            let others = policies.iter().flat_map(|policy| matching_rules(policy, &host));
            report_raw_overlap(rule, &hit.pattern(), others, problems);
        }
        for (net, rule) in policy.addresses().filter(|(_, rule)| rule.is_raw()) {
            let touches = |other: &IpNet| other.contains(&net) || net.contains(other);
            let others = policies.iter().flat_map(|policy| {
                let entries = policy.addresses().filter(|(other, _)| touches(other));
                entries.map(move |(other, rule)| RuleMatch { policy, rule, by: MatchedEntry::Address(other) })
            });
            report_raw_overlap(rule, &net.to_string(), others, problems);
        }
    }
}

/// Reports the first of `others` that opens a port of the raw rule to anything but raw TCP.
fn report_raw_overlap<'p>(
    raw: &Rule,
    host: &str,
    others: impl Iterator<Item = RuleMatch<'p>>,
    problems: &mut Problems,
) {
    let ports = raw.ports().unwrap_or(&[]);
    let mut others = others.filter(|other| !other.rule.is_deny() && !other.rule.is_raw());
    let found = others.find_map(|other| Some((other, *ports.iter().find(|port| other.has_port(**port))?)));
    if let Some((other, port)) = found {
        let (raw_name, other) = (raw.name.to_string(), other.rule.name.to_string());
        let fault = ProblemKind::RawOverlap { raw: raw_name, other, host: host.to_owned(), port };
        problems.error(raw.at.clone(), fault);
    }
}

/// Reports tunnels and raw TCP beside memory: Sandbar cannot search their bytes for recalled text.
fn check_opaque_rules(policies: &[Arc<Policy>], owner: &str, problems: &mut Problems) {
    let rules = || policies.iter().flat_map(|policy| &policy.rules);
    if !rules().any(|rule| rule.memory_terms().is_some()) {
        return;
    }
    let hides = |terms: &AllowTerms| {
        terms.receipt == MemoryReceipt::Nothing
            && terms.signals.mode(SignalKind::MemoryFlow) != SignalMode::Off
    };
    for rule in rules().filter(|rule| rule.is_opaque() && rule.allow_terms().is_some_and(hides)) {
        let fault = ProblemKind::OpaqueBesideMemory { owner: owner.to_owned(), rule: rule.name.to_string() };
        problems.error(rule.at.clone(), fault);
    }
}

/// Reports the problems of a sandbox's layers in combination.
pub(crate) fn lint_sandbox(
    sandbox: &Sandbox,
    layers: &SandboxLayers,
    credentials: (&[&str], &[Credential]),
    problems: &mut Problems,
) {
    let owner = format!("sandbox `{}`", sandbox.id);
    if layers.sandbox.len() > 1 {
        check_ties(&layers.sandbox, problems);
        check_opaque_rules(&layers.sandbox, &owner, problems);
        check_raw_overlaps(&layers.sandbox, problems);
        for policy in &layers.sandbox {
            for other in layers.sandbox.iter().filter(|other| !Arc::ptr_eq(policy, other)) {
                warn_of_idle_filters(policy, other, problems);
            }
        }
    }
    for rule in
        layers.base_policies().iter().flat_map(|base| &base.rules).filter(|rule| rule.credential().is_some())
    {
        let why = format!(
            "rule `{}` is in a base policy, so Sandbar ignores its `credential`; set it in the sandbox's own policy",
            rule.name
        );
        problems.warning(rule.at.clone(), ProblemKind::Pointless(why));
    }
    for policy in &layers.sandbox {
        check_credentials(policy, credentials, problems);
        let samples = sample_patterns(policy);
        for (rule, patterns) in policy.rules.iter().zip(&samples) {
            if let Some(terms) = rule.memory_terms() {
                check_environment(sandbox, policy, rule, terms, problems);
            }
            if let Some(why) = base_cause(layers, policy, rule, patterns) {
                let why = format!("in {owner}, {why}");
                problems
                    .warning(rule.at.clone(), ProblemKind::NeverActs { rule: rule.name.to_string(), why });
            }
        }
    }
}

/// Reports rules with a credential that does not exist, or that may not be sent to all their hosts.
fn check_credentials(
    policy: &Policy,
    (known, credentials): (&[&str], &[Credential]),
    problems: &mut Problems,
) {
    for rule in &policy.rules {
        if let Some(name) = rule.credential().filter(|name| !known.contains(&name.as_str())) {
            let fault = ProblemKind::Unknown { what: "credential", name: name.to_string() };
            problems.error(rule.at.clone(), fault);
        }
    }
    let mut reported: HashSet<u16> = HashSet::new();
    for hit in policy.hosts.iter() {
        let Some(rule) = policy.rule_at(hit.rule) else { continue };
        let found = rule.credential().and_then(|name| credentials.iter().find(|one| one.name == *name));
        let (Some(credential), Some(pattern)) = (found, domain_pattern(&hit)) else { continue };
        let ports = hit.port.as_ref().map_or(rule.ports().unwrap_or(&[]), std::slice::from_ref);
        let Some(port) = ports.iter().find(|port| !credential.covers_all(&pattern, **port)) else { continue };
        if reported.insert(hit.rule) {
            let (name, host) = (credential.name.to_string(), format!("{pattern}:{port}"));
            let fault = ProblemKind::CredentialHost { credential: name, host };
            problems.error_with_help(rule.at.clone(), fault, credential.hosts_help());
        }
    }
}

/// Reports banks of another environment than the sandbox's, which no rule can open.
fn check_environment(
    sandbox: &Sandbox,
    policy: &Policy,
    rule: &Rule,
    terms: &MemoryTerms,
    problems: &mut Problems,
) {
    let Some(own) = &sandbox.environment else { return };
    let named = |bank: &BankPattern| terms.environment.clone().or_else(|| bank.environment());
    for bank in terms.recall.iter().chain(&terms.retain).chain(&terms.forget) {
        let Some(found) = named(bank).filter(|found| found != own) else { continue };
        problems.error(
            rule.at.clone(),
            ProblemKind::ForeignEnvironment {
                policy: policy.name.to_string(),
                bank: bank.to_string(),
                found: found.to_string(),
                sandbox: sandbox.id.to_string(),
                own: own.to_string(),
            },
        );
    }
}

/// Collects the first patterns of every rule in one pass over the policy.
fn sample_patterns(policy: &Policy) -> Vec<Vec<DomainPattern>> {
    let mut samples = vec![Vec::new(); policy.rules.len()];
    for hit in policy.hosts.iter() {
        if let Some(sample) = samples.get_mut(usize::from(hit.rule))
            && sample.len() <= MAX_COMPARED
        {
            sample.extend(domain_pattern(&hit));
        }
    }
    samples
}

/// Returns why the base makes a rule ineffective.
fn base_cause(
    layers: &SandboxLayers,
    policy: &Policy,
    rule: &Rule,
    patterns: &[DomainPattern],
) -> Option<String> {
    let resolves = rule.resolves_to().unwrap_or(&[]);
    let private = !resolves.is_empty() && resolves.iter().all(is_forbidden);
    let every = |test: &dyn Fn(&DomainPattern) -> bool| {
        !patterns.is_empty() && patterns.len() <= MAX_COMPARED && patterns.iter().all(test)
    };
    let own = |net: &(ipnet::IpNet, &Rule)| std::ptr::eq(net.1, rule);
    let mut addresses = policy.addresses().filter(own).map(|(net, _)| net).peekable();
    let only_private =
        patterns.is_empty() && addresses.peek().is_some() && addresses.all(|net| is_forbidden(&net));
    match &layers.base {
        _ if rule.is_deny() => None,
        BaseLayer::Tier(Tier::System) => None,
        BaseLayer::Tier(Tier::Untrusted) => Some("base `untrusted` allows nothing".to_owned()),
        BaseLayer::Tier(Tier::User) if rule.is_raw() => Some("base `user` allows no raw TCP".to_owned()),
        BaseLayer::Tier(Tier::User) if private || only_private => {
            Some("base `user` allows no private range".to_owned())
        }
        BaseLayer::Tier(Tier::User) => {
            every(&|pattern| pattern.base().is_some_and(|base| special_names::special_zone(base).is_some()))
                .then(|| "base `user` allows only public names".to_owned())
        }
        BaseLayer::Policy(base) => every(&|pattern| !base_allows(base, pattern))
            .then(|| format!("base `{}` allows none of its hosts", base.name)),
    }
}

/// Returns whether `base` allows any name of `pattern`.
fn base_allows(base: &Policy, pattern: &DomainPattern) -> bool {
    let above = pattern.base().map_or_else(Vec::new, |name| base.hosts.hits_above(name));
    let covering = |hit: &&PatternHit<'_>| domain_pattern(hit).is_some_and(|other| other.covers(pattern));
    let is_deny = |hit: &PatternHit<'_>| base.rule_at(hit.rule).is_some_and(Rule::is_deny);
    let whole = |hit: &PatternHit<'_>| {
        base.rule_at(hit.rule).is_some_and(|rule| !rule.filters_requests() && rule.ports == PortSet::All)
    };
    if above.iter().filter(covering).any(|hit| is_deny(hit) && whole(hit) && hit.port.is_none()) {
        return false;
    }
    let allows = |hit: &PatternHit<'_>| !is_deny(hit);
    let below =
        |hit: &PatternHit<'_>| allows(hit) && domain_pattern(hit).is_some_and(|other| pattern.covers(&other));
    above.iter().filter(covering).any(allows)
        || (!pattern.is_exact()
            && (base.hosts.len() > MAX_SEARCHED || base.hosts.iter().any(|hit| below(&hit))))
}

/// Reports memory rules whose requests Sandbar always refuses, because the configuration lacks what they need.
pub(crate) fn check_memory_services(
    layers: &HashMap<SandboxId, SandboxLayers>,
    services: &[MemoryService],
    identity: Option<&IdentitySettings>,
    problems: &mut Problems,
) {
    let used: BTreeMap<&PolicyName, &Arc<Policy>> = layers
        .values()
        .flat_map(|stack| stack.policies().map(|policy| (&policy.name, policy)))
        .filter(|(_, policy)| policy.rules.iter().any(|rule| rule.memory_terms().is_some()))
        .collect();
    let has_issuer = identity.is_some_and(|identity| !identity.issuers.is_empty());
    for (hit, rule) in used.values().flat_map(|policy| policy.hosts()) {
        let Some(terms) = rule.memory_terms() else { continue };
        let port = rule.ports().and_then(|ports| ports.first().copied());
        let serves =
            |service: &MemoryService| service.host.to_string() == hit.base && Some(service.port) == port;
        if !services.iter().any(serves) {
            let why = format!(
                "`{}` has no `[[memory_service]]` in the configuration, so Sandbar refuses every request under rule `{}`",
                hit.base, rule.name
            );
            problems.warning(rule.at.clone(), ProblemKind::Pointless(why));
        }
        if terms.identity == IdentityMode::Required && !has_issuer {
            let why = format!(
                "rule `{}` requires a signed identity, but the configuration has no `[[identity.issuer]]`, \
                 so Sandbar refuses every request",
                rule.name
            );
            problems.warning(rule.at.clone(), ProblemKind::Pointless(why));
        }
    }
}

/// Reports policies that no sandbox uses.
pub(crate) fn check_unused_policies(
    policies: &BTreeMap<PolicyName, Arc<Policy>>,
    layers: &HashMap<SandboxId, SandboxLayers>,
    problems: &mut Problems,
) {
    let used: std::collections::HashSet<&PolicyName> =
        layers.values().flat_map(|stack| stack.policies().map(|policy| &policy.name)).collect();
    for policy in policies.values().filter(|policy| !used.contains(&policy.name)) {
        let first = policy.rules.first().map(|rule| rule.at.clone());
        let at = first.unwrap_or_else(|| SourceText::new(&policy.file, "").location(0..0));
        problems.warning(
            at,
            ProblemKind::Pointless(format!(
                "no sandbox uses policy `{}`; add it to a `[[sandbox]]` or delete it",
                policy.name
            )),
        );
    }
}
