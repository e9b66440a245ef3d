//! Which banks of a memory service a side opens: each pattern of either side is tried with a bank it covers.

use std::collections::{BTreeMap, BTreeSet};

use super::DiffSide;
use super::view::SampleConnection;
use crate::decision::Decision;
use crate::facts::BankOperation;
use crate::ids::{BankId, BankPattern, Environment, Tenant};
use crate::policy::MemoryTerms;
use crate::probe::{PolicyProbe, ProbeKind};
use crate::ruleset::RuleSet;
use crate::sandbox::{Sandbox, SandboxRef};

/// The ending that stands for any a prefix leaves open.
const ANY_BANK: &str = "any-bank";
const OPERATIONS: [BankOperation; 3] =
    [BankOperation::Delete, BankOperation::Read, BankOperation::Write];

/// What is opened, in words, with the rule that opens it.
pub(super) type OpenBanks = BTreeMap<String, String>;

/// Every bank that either side's rules name at a memory service, as far as `side` opens it.
pub(super) fn open_banks(side: DiffSide<'_>, question: &SampleConnection<'_>) -> OpenBanks {
    let mut found = OpenBanks::new();
    for operation in OPERATIONS {
        for (shown, (bank, environment)) in bank_examples(question, operation) {
            let special = ProbeKind::Memory { operation, bank };
            let probe = PolicyProbe { special, ..question.probe.clone() };
            if let Decision::Allow(permit) = decide_bank(side, &probe, environment.as_ref()) {
                let what = format!("{} {shown} at {}", operation.as_str(), question.what);
                found.insert(what, permit.rule().rule.to_string());
            }
        }
    }
    found
}

type BankExamples = BTreeMap<String, (BankId, Option<Environment>)>;

/// A bank for each pattern, and the environment it is of.
fn bank_examples(question: &SampleConnection<'_>, operation: BankOperation) -> BankExamples {
    let here = question.matches.iter().filter(|matched| matched.has_port(question.probe.port));
    let mut found = BankExamples::new();
    for terms in here.filter_map(|matched| matched.rule.memory_terms()) {
        for pattern in bank_patterns(terms, operation) {
            let Some(bank) = example_bank(pattern) else { continue };
            let environment = terms.environment.clone().or_else(|| bank.environment());
            found.insert(pattern.to_string(), (bank, environment));
        }
    }
    found
}

fn bank_patterns(terms: &MemoryTerms, operation: BankOperation) -> &[BankPattern] {
    match operation {
        BankOperation::Admin | BankOperation::None => &[],
        BankOperation::Delete => &terms.forget,
        BankOperation::Read => &terms.recall,
        BankOperation::Write => &terms.retain,
    }
}

fn example_bank(pattern: &BankPattern) -> Option<BankId> {
    match pattern {
        BankPattern::Exact(bank) => Some(bank.clone()),
        BankPattern::Prefix(prefix) => {
            BankId::parse(&format!("{prefix}{ANY_BANK}")).ok().or_else(|| Some(prefix.clone()))
        }
    }
}

/// Decides for the sandbox as it is, or as if it were of the bank's environment where it has none yet.
fn decide_bank(
    (rules, sandbox): DiffSide<'_>,
    probe: &PolicyProbe,
    environment: Option<&Environment>,
) -> Decision {
    if sandbox.tenant.is_some() && sandbox.environment.is_some() {
        return probe.decide(rules, sandbox);
    }
    let (rules, sandbox) = with_identity(rules, sandbox, environment);
    probe.decide(&rules, &sandbox)
}

fn with_identity(
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
pub(super) fn missing_banks<'a>(
    ones: &'a OpenBanks,
    others: &'a OpenBanks,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    let known: BTreeSet<&String> = others.keys().collect();
    ones.iter().filter(move |(what, _)| !known.contains(what))
}
