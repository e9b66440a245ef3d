//! `sandbar check`: parses and compiles policies, runs their tests, and prints the effective rules.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use proxy::admin::explain::budget_json;
use proxy::credential::FileAccess;
use rules::host_set::PatternHit;
use rules::policy::{Policy, Rule};
use rules::terms::TermValue;
use rules::{LoadSources, RuleSet, compile};
use serde_json::{Value, json};

use super::{EXIT_BAD_INPUT, EXIT_NEGATIVE, OutputOptions, test};
use crate::policy_args::PathArgs;
use crate::terminal::{FAINT, GOOD, HEAD, paint, print_json, print_problems};
use proxy::report::diagnostics::{DiagnosticLevel, to_json};

/// Patterns printed per rule without `--all`.
const SHOWN_PATTERNS: usize = 8;

/// Check policies: parse and compile them, run their tests, and print the effective rules
#[derive(clap::Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    paths: PathArgs,
    /// Print every pattern, even of long lists
    #[arg(long)]
    all: bool,
    /// Print only problems and the result
    #[arg(long, short)]
    quiet: bool,
}

/// Checks policies. Exit status: 0 valid, 1 a test failed, 2 invalid.
pub(crate) fn check(args: &CheckArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let sources = args.paths.read()?;
    let rules = match compile(&sources, &[]) {
        Ok(rules) => rules,
        Err(problems) => {
            print_load_errors(&problems, output);
            return Ok(ExitCode::from(EXIT_BAD_INPUT));
        }
    };
    if let Some(exposed) = check_credential_files(&sources)? {
        match output.json {
            true => {
                print_json(&json!({ "ok": false, "problems": [{ "level": "error", "message": exposed }] }))
            }
            false => anstream::eprintln!("{} {exposed}", paint(crate::terminal::BAD, "error:")),
        }
        return Ok(ExitCode::from(EXIT_BAD_INPUT));
    }
    let outcomes = rules.run_tests();
    let failed = outcomes.iter().filter(|outcome| !outcome.has_passed()).count();
    if output.json {
        print_json(&rules_json(&rules, &sources, &outcomes));
    } else {
        print_problems(rules.warnings(), DiagnosticLevel::Warning);
        if !args.quiet {
            print_rules(&rules, args);
        }
        test::print_failed(&outcomes);
        print_result(&rules, &sources, outcomes.len(), failed);
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

/// Returns which credential file other users can write: `serve` refuses it. Warns of those that they can read. A file
/// that is not on this machine is not checked.
fn check_credential_files(sources: &LoadSources) -> anyhow::Result<Option<String>> {
    let Some(operator) = &sources.operator else { return Ok(None) };
    let base = Path::new(&operator.path).parent().unwrap_or(Path::new(""));
    let credentials = proxy::app::load_config(sources)?.credentials;
    for (name, file) in
        credentials.iter().flat_map(|one| one.source.files().into_iter().map(|file| (&one.name, file)))
    {
        let path = base.join(file);
        let shown = path.display();
        match FileAccess::of(&path) {
            Ok(FileAccess::WrittenByOthers { mode }) => {
                let why = format!("other users can write {shown} (mode {mode:03o}): chmod 600 {shown}");
                return Ok(Some(format!("credential `{name}`: {why}")));
            }
            Ok(FileAccess::ReadByOthers { mode }) => anstream::eprintln!(
                "{} credential `{name}`: every user of the machine can read {shown} (mode {mode:03o})",
                paint(crate::terminal::WARN, "warning:")
            ),
            Ok(FileAccess::Private) | Err(_) => {}
        }
    }
    Ok(None)
}

/// Prints the errors that keep a policy from loading; every command that loads one uses it.
pub(crate) fn print_load_errors(problems: &[rules::load::problem::Problem], output: OutputOptions) {
    if output.json {
        let all: Vec<Value> =
            problems.iter().map(|problem| to_json(problem, DiagnosticLevel::Error)).collect();
        print_json(&json!({ "ok": false, "problems": all }));
    } else {
        print_problems(problems, DiagnosticLevel::Error);
        let plural = if problems.len() == 1 { "error" } else { "errors" };
        anstream::eprintln!("sandbar: {} {plural}; nothing was loaded", problems.len());
    }
}

/// The targets of one rule.
#[derive(Default)]
struct RuleTargets<'a> {
    hosts: Vec<PatternHit<'a>>,
    addresses: Vec<String>,
    /// Number of patterns left out.
    more: usize,
}

/// The targets of every rule of a policy, collected in one pass because a list can hold a million.
fn collect_targets(policy: &Policy, shown: usize) -> Vec<RuleTargets<'_>> {
    let mut all: Vec<RuleTargets<'_>> = policy.rules().iter().map(|_| RuleTargets::default()).collect();
    for (hit, _) in policy.hosts() {
        match all.get_mut(usize::from(hit.rule)) {
            Some(targets) if targets.hosts.len() < shown => targets.hosts.push(hit),
            Some(targets) => targets.more += 1,
            None => {}
        }
    }
    let numbers: BTreeMap<&str, usize> =
        policy.rules().iter().enumerate().map(|(at, rule)| (rule.name(), at)).collect();
    for (net, rule) in policy.addresses() {
        if let Some(targets) = numbers.get(rule.name()).and_then(|at| all.get_mut(*at)) {
            targets.addresses.push(net.to_string());
        }
    }
    all
}

fn print_rules(rules: &RuleSet, args: &CheckArgs) {
    let shown = if args.all { usize::MAX } else { SHOWN_PATTERNS };
    for policy in rules.policies() {
        let digest = paint(FAINT, format!("digest {}", policy.digest().short()));
        anstream::println!("{} {}  {digest}", paint(HEAD, policy.name()), policy.file());
        for (rule, targets) in policy.rules().iter().zip(collect_targets(policy, shown)) {
            print_rule(policy, rule, &targets);
        }
        for (key, limit) in policy.budgets().limits() {
            anstream::println!("  budget: {key} = {limit}");
        }
    }
    for sandbox in rules.sandboxes().iter() {
        print_sandbox(rules, sandbox);
    }
}

fn print_rule(policy: &Policy, rule: &Rule, targets: &RuleTargets<'_>) {
    let origin = paint(FAINT, format!("{}:{}", policy.file(), rule.line()));
    let terms = paint(FAINT, format!("({})", describe_terms(rule)));
    anstream::println!("  {} {terms}  {origin}", rule.name());
    for hit in &targets.hosts {
        let (file, line) = policy.pattern_location(rule, hit);
        anstream::println!(
            "    {:<32} {}  {}",
            hit.pattern(),
            describe_pattern(hit, rule),
            paint(FAINT, format!("{file}:{line}"))
        );
    }
    match targets.more {
        0 => {}
        more => anstream::println!("    ... and {more} more (--all prints them)"),
    }
    for net in &targets.addresses {
        anstream::println!("    {net:<32} this address range, {}", describe_ports(None, rule));
    }
}

fn print_sandbox(rules: &RuleSet, sandbox: &rules::SandboxRef) {
    let names = policy_names(rules, sandbox);
    let base = rules.base_of(sandbox).unwrap_or("none");
    let environment = sandbox.environment.as_ref().map_or("unset", |environment| environment.as_str());
    let tenant = sandbox.tenant.as_ref().map_or("unset", |tenant| tenant.as_str());
    anstream::println!(
        "sandbox {}  tenant {tenant}, environment {environment}, base {base}, policies {}",
        paint(HEAD, &sandbox.id),
        if names.is_empty() { "none: nothing is allowed".to_owned() } else { names.join(", ") }
    );
}

/// The sandbox's own policies, without its base.
fn policy_names<'a>(rules: &'a RuleSet, sandbox: &rules::SandboxRef) -> Vec<&'a str> {
    rules.own_policies_of(sandbox).iter().map(|policy| policy.name().as_str()).collect()
}

fn print_result(rules: &RuleSet, sources: &LoadSources, tests: usize, failed: usize) {
    let patterns: usize = rules.policies().map(|policy| policy.hosts().count()).sum();
    let count: usize = rules.policies().map(|policy| policy.rules().len()).sum();
    if sources.operator.is_none() {
        anstream::println!(
            "{}",
            paint(
                FAINT,
                "not checked without a sandbar.toml: sandboxes, bases, banks and environments, credentials"
            )
        );
    }
    let result = if failed == 0 { paint(GOOD, "ok") } else { paint(crate::terminal::BAD, "tests failed") };
    anstream::println!(
        "{result}: {} policies, {count} rules, {patterns} patterns, {} of {tests} tests passed, digest {}",
        rules.policies().count(),
        tests - failed,
        rules.digest().short(),
    );
}

/// Describes what a pattern covers.
fn describe_pattern(hit: &PatternHit<'_>, rule: &Rule) -> String {
    format!("{}, {}", hit.describe(), describe_ports(hit.port, rule))
}

fn describe_ports(written: Option<u16>, rule: &Rule) -> String {
    match (written, rule.ports()) {
        (Some(port), _) => format!("port {port}"),
        (None, None) => "every port".to_owned(),
        (None, Some([])) => "no port".to_owned(),
        (None, Some([port])) => format!("port {port}"),
        (None, Some(ports)) => format!("ports {}", join(ports)),
    }
}

/// Describes a rule's treatment and conditions in a few words.
fn describe_terms(rule: &Rule) -> String {
    let mut words = vec![rule.describe().to_owned()];
    words.extend(rule.methods().map(
        |methods| {
            if methods.is_empty() { "no method".to_owned() } else { join(methods) }
        },
    ));
    words.extend(rule.paths().map(|paths| if paths.is_empty() { "no path".to_owned() } else { join(paths) }));
    words.extend(rule.credential().map(|name| format!("credential {name}")));
    words.extend(rule.resolves_to().map(|nets| format!("resolves to {}", join(nets))));
    // `Rule::describe` covers `tls`.
    for term in rule.terms().into_iter().filter(|term| term.key != "tls") {
        words.push(match term.value {
            TermValue::List(items) => format!("{} {}", term.key, items.join(" ")),
            TermValue::Word(word) => format!("{} {word}", term.key),
        });
    }
    words.extend(rule.budgets().limits().map(|(key, limit)| format!("{key} = {limit}")));
    words.join("; ")
}

fn join<T: ToString>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn rules_json(rules: &RuleSet, sources: &LoadSources, outcomes: &[rules::policy_test::TestOutcome]) -> Value {
    let warnings: Vec<Value> =
        rules.warnings().iter().map(|problem| to_json(problem, DiagnosticLevel::Warning)).collect();
    json!({
        "ok": outcomes.iter().all(rules::policy_test::TestOutcome::has_passed),
        "digest": rules.digest().to_string(),
        "judged": { "sandboxes": sources.operator.is_some() },
        "policies": rules.policies().map(|policy| policy_json(policy)).collect::<Vec<_>>(),
        "sandboxes": rules.sandboxes().iter().map(|sandbox| json!({
            "id": sandbox.id.as_str(),
            "tenant": sandbox.tenant.as_ref().map(|tenant| tenant.as_str()),
            "environment": sandbox.environment.as_ref().map(|environment| environment.as_str()),
            "base": rules.base_of(sandbox),
            "policies": policy_names(rules, sandbox),
        })).collect::<Vec<_>>(),
        "problems": warnings,
        "tests": outcomes.iter().map(test::outcome_json).collect::<Vec<_>>(),
    })
}

fn policy_json(policy: &Policy) -> Value {
    let rules = policy.rules().iter().zip(collect_targets(policy, usize::MAX));
    json!({
        "name": policy.name().as_str(),
        "file": policy.file(),
        "digest": policy.digest().to_string(),
        "budget": budget_json(policy.budgets()),
        "rules": rules.map(|(rule, targets)| rule_json(policy, rule, &targets)).collect::<Vec<_>>(),
    })
}

fn rule_json(policy: &Policy, rule: &Rule, targets: &RuleTargets<'_>) -> Value {
    let host = |hit: &PatternHit<'_>| {
        let (file, line) = policy.pattern_location(rule, hit);
        json!({ "pattern": hit.pattern(), "covers": describe_pattern(hit, rule), "port": hit.port, "file": *file, "line": line })
    };
    let mut value = json!({
        "name": rule.name(),
        "does": rule.describe(),
        "line": rule.line(),
        "hosts": targets.hosts.iter().map(host).collect::<Vec<_>>(),
        "addresses": targets.addresses,
        "ports": rule.ports(),
        "methods": rule.methods().map(|methods| methods.iter().map(ToString::to_string).collect::<Vec<_>>()),
        "paths": rule.paths().map(|paths| paths.iter().map(ToString::to_string).collect::<Vec<_>>()),
        "credential": rule.credential().map(|name| name.as_str()),
        "resolves_to": rule.resolves_to().map(|nets| nets.iter().map(ToString::to_string).collect::<Vec<_>>()),
        "budget": budget_json(rule.budgets()),
    });
    for term in rule.terms() {
        value[term.key] = match term.value {
            TermValue::List(items) => json!(items),
            TermValue::Word(word) => json!(word),
        };
    }
    value
}
