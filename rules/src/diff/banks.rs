//! Which banks of a memory service a side opens: each pattern of either side is tried with a bank it covers.

use std::collections::{BTreeMap, BTreeSet};

use super::Side;
use super::view::Question;
use crate::decision::Decision;
use crate::facts::Operation;
use crate::policy::MemoryTerms;
use crate::probe::{Probe, Special};
use crate::ruleset::RuleSet;
use crate::sandbox::{Sandbox, SandboxRef};
use crate::word::{BankId, BankPattern, Environment, Tenant};

/// The ending that stands for any a prefix leaves open.
const ANY: &str = "any-bank";
const OPERATIONS: [Operation; 3] = [Operation::Delete, Operation::Read, Operation::Write];

/// What is opened, in words, with the rule that opens it.
pub(super) type Banks = BTreeMap<String, String>;

/// Every bank that either side's rules name at a memory service, as far as `side` opens it.
pub(super) fn banks(side: Side<'_>, question: &Question<'_>) -> Banks {
    let mut found = Banks::new();
    for operation in OPERATIONS {
        for (shown, (bank, environment)) in named(question, operation) {
            let special = Special::Memory { operation, bank };
            let probe = Probe { special, ..question.probe.clone() };
            if let Decision::Allow(permit) = decide(side, &probe, environment.as_ref()) {
                let what = format!("{} {shown} at {}", operation.word(), question.what);
                found.insert(what, permit.rule().rule.to_string());
            }
        }
    }
    found
}

type Named = BTreeMap<String, (BankId, Option<Environment>)>;

/// A bank for each pattern, and the environment it is of.
fn named(question: &Question<'_>, operation: Operation) -> Named {
    let here = question.matches.iter().filter(|matched| matched.has_port(question.probe.port));
    let mut found = Named::new();
    for terms in here.filter_map(|matched| matched.rule.memory()) {
        for pattern in opened(terms, operation) {
            let Some(bank) = example(pattern) else { continue };
            let environment = terms.environment.clone().or_else(|| bank.environment());
            found.insert(pattern.to_string(), (bank, environment));
        }
    }
    found
}

fn opened(terms: &MemoryTerms, operation: Operation) -> &[BankPattern] {
    match operation {
        Operation::Admin | Operation::None => &[],
        Operation::Delete => &terms.forget,
        Operation::Read => &terms.recall,
        Operation::Write => &terms.retain,
    }
}

fn example(pattern: &BankPattern) -> Option<BankId> {
    match pattern {
        BankPattern::Exact(bank) => Some(bank.clone()),
        BankPattern::Prefix(prefix) => {
            BankId::parse(&format!("{prefix}{ANY}")).ok().or_else(|| Some(prefix.clone()))
        }
    }
}

/// Decides for the sandbox as it is, or as if it were of the bank's environment where it has none yet.
fn decide(
    (rules, sandbox): Side<'_>,
    probe: &Probe,
    environment: Option<&Environment>,
) -> Decision {
    if sandbox.tenant.is_some() && sandbox.environment.is_some() {
        return probe.decide(rules, sandbox);
    }
    let (rules, sandbox) = settled(rules, sandbox, environment);
    probe.decide(&rules, &sandbox)
}

fn settled(
    rules: &RuleSet,
    sandbox: &SandboxRef,
    environment: Option<&Environment>,
) -> (RuleSet, SandboxRef) {
    let who = Sandbox {
        tenant: sandbox.tenant.clone().or_else(|| Tenant::parse("any").ok()),
        environment: sandbox.environment.clone().or_else(|| environment.cloned()),
        ..Sandbox::clone(sandbox)
    };
    let mut rules = rules.clone();
    rules.sandboxes.insert(who.clone());
    (rules, SandboxRef::new(who))
}

/// What the first opens and the second does not.
pub(super) fn missing<'a>(
    ones: &'a Banks,
    others: &'a Banks,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    let known: BTreeSet<&String> = others.keys().collect();
    ones.iter().filter(move |(what, _)| !known.contains(what))
}
