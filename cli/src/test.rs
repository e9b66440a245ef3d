//! `sandbar test`: runs the `[[test]]` entries of policies.

use std::process::ExitCode;

use rules::trial::Outcome;
use rules::{Decision, compile};
use serde_json::{Value, json};

use super::{BAD_INPUT, NEGATIVE, Output, check};
use crate::policy_args::PathArgs;
use crate::terminal::{BAD, FAINT, GOOD, WARN, paint, print_json};

/// Run the tests that policies carry
#[derive(clap::Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    paths: PathArgs,
}

/// Runs policy tests. Exit status: 0 all passed, 1 one failed, 2 not a good policy.
pub(crate) fn test(args: &TestArgs, output: Output) -> anyhow::Result<ExitCode> {
    let rules = match compile(&args.paths.read()?, &[]) {
        Ok(rules) => rules,
        Err(problems) => {
            check::refuse(&problems, output);
            return Ok(ExitCode::from(BAD_INPUT));
        }
    };
    let outcomes = rules.run_trials();
    let failed = outcomes.iter().filter(|outcome| !outcome.passed()).count();
    if output.json {
        let all: Vec<Value> = outcomes.iter().map(to_json).collect();
        print_json(
            &json!({ "ok": failed == 0, "passed": outcomes.len() - failed, "failed": failed, "tests": all }),
        );
    } else {
        outcomes.iter().for_each(print);
        if outcomes.is_empty() {
            anstream::println!("{}", paint(WARN, "these policies have no [[test]]"));
        }
        anstream::println!("{} passed, {failed} failed", outcomes.len() - failed);
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(NEGATIVE) })
}

/// Prints the tests that failed, and nothing when none did.
pub(crate) fn print_failed(outcomes: &[Outcome]) {
    outcomes.iter().filter(|outcome| !outcome.passed()).for_each(print);
}

fn print(outcome: &Outcome) {
    let trial = &outcome.trial;
    let word = if outcome.passed() { paint(GOOD, "pass") } else { paint(BAD, "FAIL") };
    let place = paint(FAINT, format!("{}:{}", outcome.policy.file(), trial.line));
    let name = trial.name.as_ref().map(|name| format!("  {name}")).unwrap_or_default();
    let got = if outcome.passed() {
        found(outcome)
    } else {
        format!("expected {}, got {}", outcome.expected(), found(outcome))
    };
    anstream::println!(
        "{word}  {:<40}  {got}{name}  [{}]  {place}",
        trial.probe.to_string(),
        outcome.sandbox.id
    );
}

fn found(outcome: &Outcome) -> String {
    match &outcome.decision {
        Decision::Allow(permit) => format!("allow by `{}`", permit.rule().rule),
        Decision::Deny(denial) => format!("deny {}", denial.reason),
    }
}

pub(crate) fn to_json(outcome: &Outcome) -> Value {
    json!({
        "file": outcome.policy.file(),
        "line": outcome.trial.line,
        "name": outcome.trial.name,
        "sandbox": outcome.sandbox.id.as_str(),
        "attempt": outcome.trial.probe.to_string(),
        "expected": outcome.expected(),
        "found": found(outcome),
        "passed": outcome.passed(),
    })
}
