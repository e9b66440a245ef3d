//! Rules that can never act. Within a file they are errors, across layers warnings: a policy may be
//! shared by sandboxes whose bases differ.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::problem::{Fault, Problems};
use crate::network::touches_forbidden;
use crate::pattern::{DomainPattern, HostPattern, Reach, Width};
use crate::policy::{MemoryTerms, Policy, Ports, Rule};
use crate::ruleset::{Base, Layers, Tier};
use crate::sandbox::Sandbox;
use crate::set::Hit;
use crate::special;
use crate::word::{BankPattern, CredentialName, PolicyName, SandboxId};

/// Most entries of a rule that are compared with a base policy; lists beyond it are taken to act.
const MAX_COMPARED: usize = 256;

/// What is wrong within one file.
pub(crate) fn policy(policy: &Policy, problems: &mut Problems) {
    let mut fates = vec![Fate::default(); policy.rules.len()];
    for hit in policy.hosts.unordered() {
        let (Some(rule), Some(fate)) =
            (policy.rule(hit.rule), fates.get_mut(usize::from(hit.rule)))
        else {
            continue;
        };
        // One entry that acts is enough, so a long list costs one look and not a million.
        if fate.acts && rule.allow().is_some() {
            continue;
        }
        match killer(policy, rule, &hit) {
            None => fate.acts = true,
            Some(why) => fate.why = Some(why),
        }
    }
    for entry in &policy.addresses {
        if let Some(fate) = fates.get_mut(usize::from(entry.rule)) {
            fate.acts = true;
        }
    }
    for (rule, fate) in policy.rules.iter().zip(fates) {
        judge(rule, fate, problems);
    }
    ties(policy, problems);
}

/// What becomes of a rule's entries.
#[derive(Clone, Debug, Default)]
struct Fate {
    acts: bool,
    why: Option<String>,
}

fn judge(rule: &Rule, fate: Fate, problems: &mut Problems) {
    let name = rule.name.to_string();
    let empty = |list: Option<usize>| list == Some(0);
    if empty(rule.methods().map(<[_]>::len))
        || empty(rule.paths().map(<[_]>::len))
        || empty(rule.ports().map(<[_]>::len))
    {
        let why = format!("rule `{name}` has an empty filter, which nothing passes");
        problems.warning(rule.at.clone(), Fault::Pointless(why));
    }
    match fate {
        Fate { acts: true, .. } => {}
        Fate { why: Some(why), .. } => {
            problems.error(rule.at.clone(), Fault::NeverActs { rule: name, why })
        }
        Fate { why: None, .. } => {
            problems
                .warning(rule.at.clone(), Fault::Pointless(format!("rule `{name}` lists no host")));
        }
    }
}

/// Why an entry of an allow or memory rule can never act beside the others of its file.
fn killer(policy: &Policy, rule: &Rule, hit: &Hit<'_>) -> Option<String> {
    if rule.is_deny() {
        return None;
    }
    let others = over(policy, hit).filter(|(_, other)| !std::ptr::eq(*other, rule));
    for (above, other) in others {
        let ports = same_ports((hit, rule), (&above, other));
        let whole = other.is_deny() && !other.filters_requests() && ports;
        if whole {
            return Some(format!("`{}` is denied whole by `{}`", hit.pattern(), other.name));
        }
        let same = above.base == hit.base && above.reach == hit.reach && ports;
        if same && other.memory().is_some() && rule.allow().is_some() {
            return Some(format!(
                "`{}` is the memory service of `{}`, which holds every request",
                hit.pattern(),
                other.name
            ));
        }
        if same && other.needs_requests() && rule.is_opaque() {
            return Some(format!("`{}` must be intercepted for `{}`", hit.pattern(), other.name));
        }
        if same && other.line < rule.line && is_repeated(rule, other) {
            return Some(format!(
                "`{}` opens `{}` in the same way before it",
                other.name,
                hit.pattern()
            ));
        }
    }
    None
}

/// The entries of a policy whose pattern covers that of `hit`.
fn over<'p>(policy: &'p Policy, hit: &Hit<'p>) -> impl Iterator<Item = (Hit<'p>, &'p Rule)> {
    let pattern = pattern_of(hit);
    let base = pattern.as_ref().and_then(DomainPattern::base).cloned();
    let candidates: Vec<Hit<'p>> = match base {
        Some(base) => policy.hosts.around(&base),
        None => policy
            .hosts
            .unordered()
            .filter(|other| other.base.is_empty())
            .take(MAX_COMPARED)
            .collect(),
    };
    candidates.into_iter().filter_map(move |other| {
        let covers = pattern_of(&other)?.covers(pattern.as_ref()?);
        policy.rule(other.rule).filter(|_| covers).map(|rule| (other, rule))
    })
}

fn pattern_of(hit: &Hit<'_>) -> Option<DomainPattern> {
    HostPattern::parse(&hit.pattern(), Width::DangerouslyWide).ok().map(|parsed| parsed.pattern)
}

/// Whether every port of the first entry is one of the second's.
fn same_ports((hit, rule): (&Hit<'_>, &Rule), (other_hit, other): (&Hit<'_>, &Rule)) -> bool {
    let has =
        |port: u16| other_hit.port.map_or_else(|| other.ports.contains(port), |own| own == port);
    match (hit.port, &rule.ports) {
        (Some(port), _) => has(port),
        (None, Ports::All) => other_hit.port.is_none() && other.ports == Ports::All,
        (None, Ports::Listed(ports)) => ports.iter().all(|port| has(*port)),
    }
}

/// Whether two allow rules filter and act alike, so that the later adds nothing.
fn is_repeated(rule: &Rule, other: &Rule) -> bool {
    let (Some(own), Some(others)) = (rule.allow(), other.allow()) else { return false };
    let alike = own.credential == others.credential
        && own.raw_tcp == others.raw_tcp
        && own.resolves_to == others.resolves_to;
    alike && rule.methods == other.methods && rule.paths == other.paths
}

/// Rules that tie for a host must agree on the credential, or it would be a matter of luck which is sent.
fn ties(policy: &Policy, problems: &mut Problems) {
    let carriers = policy.rules.iter().filter(|rule| rule.credential().is_some()).count();
    if carriers == 0 {
        return;
    }
    for hit in policy.hosts.unordered() {
        let Some(rule) = policy.rule(hit.rule).filter(|rule| rule.credential().is_some()) else {
            continue;
        };
        for (other_hit, other) in over(policy, &hit) {
            let same = other_hit.base == hit.base
                && (other_hit.reach == Reach::Exact) == (hit.reach == Reach::Exact);
            let earlier = other.line < rule.line || other.credential().is_none();
            let ports = shares_port((&hit, rule), (&other_hit, other));
            if same
                && earlier
                && ports
                && other.allow().is_some()
                && other.credential() != rule.credential()
                && overlaps(rule, other)
            {
                let (one, other) = (other.name.to_string(), rule.name.to_string());
                problems.error(rule.at.clone(), Fault::Tie { one, other, host: hit.pattern() });
            }
        }
    }
}

fn shares_port((hit, rule): (&Hit<'_>, &Rule), (other_hit, other): (&Hit<'_>, &Rule)) -> bool {
    let ports = |hit: &Hit<'_>, rule: &Rule| match hit.port {
        Some(port) => vec![port],
        None => rule.ports().map(<[u16]>::to_vec).unwrap_or_default(),
    };
    let own = ports(hit, rule);
    ports(other_hit, other).iter().any(|port| own.contains(port))
}

/// Whether some request could be both rules' with equally specific paths.
fn overlaps(rule: &Rule, other: &Rule) -> bool {
    let methods = match (rule.methods(), other.methods()) {
        (Some(own), Some(others)) => own.iter().any(|method| others.contains(method)),
        (None, _) | (_, None) => true,
    };
    let paths = match (rule.paths(), other.paths()) {
        (None, None) => true,
        (Some(own), Some(others)) => own.iter().any(|path| others.contains(path)),
        (None, Some(_)) | (Some(_), None) => false,
    };
    methods && paths
}

/// What is wrong with a sandbox's layers together.
pub(crate) fn sandbox(
    sandbox: &Sandbox,
    layers: &Layers,
    credentials: &[CredentialName],
    problems: &mut Problems,
) {
    let remembers =
        layers.sandbox.iter().any(|policy| policy.rules.iter().any(|rule| rule.memory().is_some()));
    for rule in layers
        .base_policies()
        .iter()
        .flat_map(|base| &base.rules)
        .filter(|rule| rule.credential().is_some())
    {
        let why = format!(
            "rule `{}` is of a base, and credentials come from the sandbox's own policies only",
            rule.name
        );
        problems.warning(rule.at.clone(), Fault::Pointless(why));
    }
    for policy in &layers.sandbox {
        for (at, rule) in policy.rules.iter().enumerate() {
            check_credential(rule, credentials, problems);
            if let Some(terms) = rule.memory() {
                check_environment(sandbox, policy, rule, terms, problems);
            }
            let receives = rule.allow().is_some_and(|terms| terms.may_receive_memory);
            if remembers && rule.is_opaque() && !receives {
                let fault = Fault::TunnelBesideMemory {
                    sandbox: sandbox.id.to_string(),
                    rule: rule.name.to_string(),
                };
                problems.error(rule.at.clone(), fault);
            }
            if let Some(why) = floor(layers, policy, rule, at as u16) {
                let fault = Fault::NeverActs {
                    rule: rule.name.to_string(),
                    why: format!("in sandbox `{}`, {why}", sandbox.id),
                };
                problems.warning(rule.at.clone(), fault);
            }
        }
    }
}

fn check_credential(rule: &Rule, known: &[CredentialName], problems: &mut Problems) {
    if let Some(name) = rule.credential().filter(|name| !known.contains(name)) {
        problems
            .error(rule.at.clone(), Fault::Unknown { what: "credential", name: name.to_string() });
    }
}

/// A bank of another environment is out of reach whatever a rule says, so the rule is wrong.
fn check_environment(
    sandbox: &Sandbox,
    policy: &Policy,
    rule: &Rule,
    terms: &MemoryTerms,
    problems: &mut Problems,
) {
    let Some(own) = &sandbox.environment else { return };
    let banks = terms.recall.iter().chain(&terms.retain).chain(&terms.forget);
    let foreign = |bank: &&BankPattern| {
        let environment = terms.environment.clone().or_else(|| bank.environment());
        environment.is_some_and(|environment| environment != *own)
    };
    for bank in banks.filter(foreign) {
        let found = terms.environment.clone().or_else(|| bank.environment());
        problems.error(
            rule.at.clone(),
            Fault::ForeignEnvironment {
                policy: policy.name.to_string(),
                bank: bank.to_string(),
                found: found.map(|environment| environment.to_string()).unwrap_or_default(),
                sandbox: sandbox.id.to_string(),
                own: own.to_string(),
            },
        );
    }
}

/// Why the base leaves nothing of a rule.
fn floor(layers: &Layers, policy: &Policy, rule: &Rule, at: u16) -> Option<String> {
    let raw = rule.allow().is_some_and(|terms| terms.raw_tcp);
    let private =
        !rule.resolves_to().is_empty() && rule.resolves_to().iter().all(touches_forbidden);
    match &layers.base {
        _ if rule.is_deny() => None,
        Base::Tier(Tier::System) => None,
        Base::Tier(Tier::Untrusted) => Some("base `untrusted` allows nothing".to_owned()),
        Base::Tier(Tier::User) if raw => Some("base `user` allows no raw TCP".to_owned()),
        Base::Tier(Tier::User) if private => Some("base `user` allows no private range".to_owned()),
        Base::Tier(Tier::User) => {
            let special = every(policy, at, |name| {
                name.base().is_some_and(|base| special::zone(base).is_some())
            });
            special.then(|| "base `user` allows only public names".to_owned())
        }
        Base::Policy(base) => {
            let shut = every(policy, at, |pattern| !meets(base, pattern));
            shut.then(|| format!("base `{}` allows none of its hosts", base.name))
        }
    }
}

/// Whether `test` holds for every host entry of a rule; long lists are taken to have one where it does not.
fn every(policy: &Policy, at: u16, test: impl Fn(&DomainPattern) -> bool) -> bool {
    let mut entries = policy.hosts.unordered().filter(|hit| hit.rule == at).take(MAX_COMPARED + 1);
    let first = entries.next();
    let all = first.iter().copied().chain(entries).enumerate().all(|(count, hit)| {
        count < MAX_COMPARED && pattern_of(&hit).is_some_and(|pattern| test(&pattern))
    });
    first.is_some() && all
}

/// Whether some name of `pattern` is allowed by some rule of `base` and not denied whole.
fn meets(base: &Policy, pattern: &DomainPattern) -> bool {
    let touches = |other: &DomainPattern| other.covers(pattern) || pattern.covers(other);
    let allowed = base.hosts.unordered().any(|hit| {
        base.rule(hit.rule).is_some_and(|rule| !rule.is_deny())
            && pattern_of(&hit).is_some_and(|other| touches(&other))
    });
    let denied = base.hosts.unordered().any(|hit| {
        let whole = base.rule(hit.rule).is_some_and(|rule| {
            rule.is_deny() && !rule.filters_requests() && rule.ports == Ports::All
        });
        whole && hit.port.is_none() && pattern_of(&hit).is_some_and(|other| other.covers(pattern))
    });
    allowed && !denied
}

/// Policies no sandbox names: loaded, and without effect.
pub(crate) fn unused(
    policies: &BTreeMap<PolicyName, Arc<Policy>>,
    layers: &HashMap<SandboxId, Layers>,
    problems: &mut Problems,
) {
    let used = |policy: &Arc<Policy>| {
        layers.values().any(|stack| stack.policies().any(|other| Arc::ptr_eq(other, policy)))
    };
    for policy in policies.values().filter(|policy| !used(policy)) {
        let at = policy.rules.first().map(|rule| rule.at.clone());
        let at = at.unwrap_or_else(|| {
            super::problem::Source { file: policy.file.clone(), text: "" }.place(0..0)
        });
        problems
            .warning(at, Fault::Pointless(format!("no sandbox names policy `{}`", policy.name)));
    }
}
