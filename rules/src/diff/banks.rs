//! Finds the banks that one side opens: probes each bank pattern of either side with a bank it matches.

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

/// The suffix that represents all banks under a prefix.
const ANY_BANK: &str = "any-bank";
const OPERATIONS: [BankOperation; 3] = [BankOperation::Delete, BankOperation::Read, BankOperation::Write];

/// Descriptions of open banks, with the rule that opens each.
pub(super) type OpenBanks = BTreeMap<String, String>;

/// Returns the banks that `side` opens, of all that either side's rules name at a memory service.
pub(super) fn open_banks(side: DiffSide<'_>, sample: &SampleConnection<'_>) -> OpenBanks {
    let mut found = OpenBanks::new();
    for operation in OPERATIONS {
        for (shown, (bank, environment)) in bank_examples(sample, operation) {
            let special = ProbeKind::Memory { operation, bank };
            let probe = PolicyProbe { special, ..sample.probe.clone() };
            if let Decision::Allow(permit) = decide_bank(side, &probe, environment.as_ref()) {
                let what = format!("{} {shown} at {}", operation.as_str(), sample.what);
                found.insert(what, permit.rule().rule.to_string());
            }
        }
    }
    found
}

type BankExamples = BTreeMap<String, (BankId, Option<Environment>)>;

/// Returns a bank for each pattern, with its environment.
fn bank_examples(sample: &SampleConnection<'_>, operation: BankOperation) -> BankExamples {
    let matching = sample.matches.iter().filter(|matched| matched.has_port(sample.probe.port));
    let mut found = BankExamples::new();
    for terms in matching.filter_map(|matched| matched.rule.memory_terms()) {
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

/// Decides for the sandbox, or, if it has no identity yet, as if it were in the bank's environment.
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
    let identified = Sandbox {
        tenant: sandbox.tenant.clone().or_else(|| Tenant::parse("any").ok()),
        environment: sandbox.environment.clone().or_else(|| environment.cloned()),
        ..Sandbox::clone(sandbox)
    };
    let mut rules = rules.clone();
    rules.sandboxes.insert(identified.clone());
    (rules, SandboxRef::new(identified))
}

/// Returns the banks that are open in `ones` and not in `others`.
pub(super) fn missing_banks<'a>(
    ones: &'a OpenBanks,
    others: &'a OpenBanks,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    let known: BTreeSet<&String> = others.keys().collect();
    ones.iter().filter(move |(what, _)| !known.contains(what))
}
