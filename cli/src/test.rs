//! `sandbar test`: runs the `[[test]]` entries of policies.

use std::process::ExitCode;

use rules::policy_test::TestOutcome;
use rules::{Decision, compile};
use serde_json::{Value, json};

use super::{EXIT_BAD_INPUT, EXIT_NEGATIVE, OutputOptions, check};
use crate::policy_args::PathArgs;
use crate::terminal::{BAD, FAINT, GOOD, WARN, paint, print_json};

/// Run the `[[test]]` entries of policies
#[derive(clap::Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    paths: PathArgs,
}

/// Runs policy tests. Exit status: 0 all passed, 1 a test failed, 2 invalid policy.
pub(crate) fn test(args: &TestArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let rules = match compile(&args.paths.read()?, &[]) {
        Ok(rules) => rules,
        Err(problems) => {
            check::print_load_errors(&problems, output);
            return Ok(ExitCode::from(EXIT_BAD_INPUT));
        }
    };
    let outcomes = rules.run_tests();
    let failed = outcomes.iter().filter(|outcome| !outcome.has_passed()).count();
    if output.json {
        let all: Vec<Value> = outcomes.iter().map(outcome_json).collect();
        print_json(
            &json!({ "ok": failed == 0, "passed": outcomes.len() - failed, "failed": failed, "tests": all }),
        );
    } else {
        outcomes.iter().for_each(print_outcome);
        if outcomes.is_empty() {
            anstream::println!("{}", paint(WARN, "no [[test]] in these policies"));
        }
        anstream::println!("{} passed, {failed} failed", outcomes.len() - failed);
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

/// Prints the tests that failed, if any.
pub(crate) fn print_failed(outcomes: &[TestOutcome]) {
    outcomes.iter().filter(|outcome| !outcome.has_passed()).for_each(print_outcome);
}

fn print_outcome(outcome: &TestOutcome) {
    let trial = &outcome.trial;
    let word = if outcome.has_passed() { paint(GOOD, "pass") } else { paint(BAD, "FAIL") };
    let location = paint(FAINT, format!("{}:{}", outcome.policy.file(), trial.line));
    let name = trial.name.as_ref().map(|name| format!("  {name}")).unwrap_or_default();
    let got = if outcome.has_passed() {
        decision_text(outcome)
    } else {
        format!("expected {}, got {}", outcome.describe_expected(), decision_text(outcome))
    };
    anstream::println!(
        "{word}  {:<40}  {got}{name}  [{}]  {location}",
        trial.probe.to_string(),
        outcome.sandbox.id
    );
}

fn decision_text(outcome: &TestOutcome) -> String {
    match &outcome.decision {
        Decision::Allow(permit) => format!("allow by `{}`", permit.rule().rule),
        Decision::Deny(denial) => format!("deny {}", denial.reason),
    }
}

pub(crate) fn outcome_json(outcome: &TestOutcome) -> Value {
    json!({
        "file": outcome.policy.file(),
        "line": outcome.trial.line,
        "name": outcome.trial.name,
        "sandbox": outcome.sandbox.id.as_str(),
        "attempt": outcome.trial.probe.to_string(),
        "expected": outcome.describe_expected(),
        "found": decision_text(outcome),
        "passed": outcome.has_passed(),
    })
}
