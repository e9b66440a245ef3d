//! Compiles grants to one more policy of the sandbox's own layer: deny rules and the base still win, and a rule
//! of the sandbox's own policies that allows an attempt takes precedence over a grant, even a more specific one.

use std::sync::Arc;

use super::entry::DEFAULT_PORT;
use super::problem::{ProblemKind, Problems, SourceText};
use super::{GRANTS_POLICY, Grant, hash_parts};
use crate::budget::Budgets;
use crate::facts::QueryType;
use crate::host_set::HostSet;
use crate::ids::{PolicyName, SandboxId};
use crate::policy::{AllowTerms, MAX_RULES, Policy, PortSet, Rule, RuleAction, open_ports};

/// Compiles the grants of one sandbox; returns `None` if it has none.
pub(super) fn compile_grants(
    id: &SandboxId,
    grants: &[Grant],
    problems: &mut Problems,
) -> Option<Arc<Policy>> {
    let own: Vec<&Grant> = grants.iter().filter(|grant| grant.sandbox == *id).collect();
    let name = PolicyName::parse(GRANTS_POLICY).ok().filter(|_| !own.is_empty())?;
    let source = SourceText::new(GRANTS_POLICY, "");
    if own.len() > MAX_RULES {
        problems.error(
            source.location(0..0),
            ProblemKind::TooMany { what: "grants for one sandbox", limit: MAX_RULES },
        );
        return None;
    }
    let mut hosts = HostSet::default();
    let mut rules = Vec::new();
    for grant in &own {
        if let Err(full) = hosts.insert(&grant.host, rules.len() as u16, rules.len() as u32 + 1) {
            problems.error(source.location(0..0), ProblemKind::Set(full));
            return None;
        }
        rules.push(grant_rule(grant, rules.len() as u32 + 1, &source));
    }
    let texts: Vec<String> = own.iter().map(|grant| format!("{grant:?}")).collect();
    let digest = hash_parts(texts.iter().map(String::as_bytes));
    let (budgets, addresses, trials) = (Budgets::default(), Vec::new(), Vec::new());
    Some(Arc::new(Policy {
        name,
        file: GRANTS_POLICY.into(),
        digest,
        open_ports: open_ports(&rules, &hosts),
        rules,
        hosts,
        addresses,
        budgets,
        trials,
    }))
}

fn grant_rule(grant: &Grant, line: u32, source: &SourceText<'_>) -> Rule {
    let terms =
        AllowTerms { dns_types: QueryType::DEFAULT.into(), budgets: grant.budgets, ..AllowTerms::default() };
    Rule {
        name: format!("grant {}", grant.id).into(),
        line,
        at: source.location(0..0),
        list: None,
        ports: PortSet::Listed([DEFAULT_PORT].into()),
        methods: grant.methods.clone().map(Into::into),
        paths: grant.paths.clone().map(Into::into),
        verdict: RuleAction::Allow(terms),
    }
}
