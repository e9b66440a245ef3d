//! `sandbar demo`: shows every main feature in one command. Two jails, one proxy, and a fake internet on loopback
//! that observes everything that leaves them; no root. Every step checks its result, so the demo is also a test.
//!
//! A step is a file in `steps` and a line in its list.

pub(crate) mod agent;
mod context;
mod fake_internet;
mod files;
mod report;
mod sandbox;
mod steps;

use std::process::ExitCode;
use std::time::Instant;

use serde_json::{Value, json};

use self::context::DemoContext;
use self::report::{StepReport, StepResult};
use self::steps::{DemoStep, STEPS};
use super::{EXIT_NEGATIVE, OutputOptions, UsageError};
use crate::terminal::{BAD, FAINT, GOOD, paint, print_json};

/// Run a demonstration: what is allowed, what is denied, and why
///
/// Starts a fake internet and two sandboxes on this machine. It needs no network, sends nothing out and leaves nothing
/// behind. Exit status: 0 if every step passed, 1 if a step failed or no jail could be created.
#[derive(clap::Args, Debug)]
pub(crate) struct DemoArgs {
    /// Run only this step; repeatable
    #[arg(long, value_name = "NAME")]
    step: Vec<String>,
    /// List the steps
    #[arg(long)]
    list: bool,
    /// Keep policies, keys and log, and print their directory
    #[arg(long)]
    keep: bool,
}

/// Runs the demo. Exit status: see [`DemoArgs`].
pub(crate) fn demo(args: &DemoArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    if args.list {
        list_steps(output);
        return Ok(ExitCode::SUCCESS);
    }
    let status = run_steps(&select_steps(&args.step)?, args.keep, output).unwrap_or_else(|error| {
        anstream::eprintln!("{} {error:#}", paint(BAD, "sandbar:"));
        EXIT_NEGATIVE
    });
    Ok(ExitCode::from(status))
}

/// Sets up the context, runs the steps and prints the results; returns the exit status.
fn run_steps(steps: &[&DemoStep<DemoContext>], keep: bool, output: OutputOptions) -> anyhow::Result<u8> {
    let started = Instant::now();
    let mut context = DemoContext::set_up().inspect_err(|error| {
        if output.json {
            print_json(&json!({ "ok": false, "error": format!("{error:#}") }));
        }
    })?;
    let mut results = Vec::new();
    for step in steps {
        context.begin_step();
        let one = run_step(step, &mut context);
        if !output.json {
            one.print(results.len() + 1);
        }
        results.push(one);
    }
    let ended = context.finish(keep);
    match output.json {
        true => print_json(&results.iter().map(StepResult::to_json).collect::<Value>()),
        false => print_line(&summarize(&results, started)),
    }
    if let Some(dir) = ended? {
        anstream::eprintln!("{}", paint(FAINT, format!("kept: {}", dir.display())));
    }
    Ok(exit_status(&results))
}

/// Runs one step.
fn run_step<S>(step: &DemoStep<S>, context: &mut S) -> StepResult {
    let (mut report, started) = (StepReport::default(), Instant::now());
    let wrong = (step.run)(context, &mut report).err().map(|wrong| wrong.0);
    StepResult { name: step.name, title: step.title, report, wrong, took: started.elapsed() }
}

/// Fails if any step failed, or if there were none.
fn exit_status(results: &[StepResult]) -> u8 {
    let good = !results.is_empty() && results.iter().all(|step| step.wrong.is_none());
    if good { 0 } else { EXIT_NEGATIVE }
}

fn summarize(results: &[StepResult], started: Instant) -> String {
    let seconds = started.elapsed().as_secs_f64();
    let wrong: Vec<&str> = results.iter().filter(|step| step.wrong.is_some()).map(|step| step.name).collect();
    let count = results.len();
    match wrong.is_empty() {
        true => {
            format!("{} in {seconds:.1} s", paint(GOOD, format!("{}, all passed,", step_count(count))))
        }
        false => {
            let text = format!("{} of {} failed: {}", wrong.len(), step_count(count), wrong.join(", "));
            format!("{}; {seconds:.1} s", paint(BAD, text))
        }
    }
}

fn step_count(count: usize) -> String {
    if count == 1 { "1 step".to_owned() } else { format!("{count} steps") }
}

/// Returns the steps with these names in demo order, or all steps if `names` is empty.
fn select_steps(names: &[String]) -> anyhow::Result<Vec<&'static DemoStep<DemoContext>>> {
    if let Some(name) = names.iter().find(|name| !STEPS.iter().any(|step| step.name == **name)) {
        return Err(UsageError(format!("unknown step `{name}`: see `sandbar demo --list`")).into());
    }
    let wanted =
        |step: &&DemoStep<DemoContext>| names.is_empty() || names.iter().any(|name| name == step.name);
    Ok(STEPS.iter().filter(wanted).collect())
}

fn list_steps(output: OutputOptions) {
    if output.json {
        let steps = STEPS.iter().map(|step| json!({ "step": step.name, "title": step.title }));
        return print_json(&steps.collect::<Value>());
    }
    for step in STEPS {
        print_line(&format!("{:<11} {}", step.name, paint(FAINT, step.title)));
    }
}

fn print_line(text: &str) {
    anstream::println!("{text}");
}

#[cfg(test)]
mod tests {
    use super::report::StepFailure;
    use super::*;

    const GOOD: DemoStep<u32> = DemoStep {
        name: "good",
        title: "Passes",
        run: |context, report| {
            *context += 1;
            report.note_attempt("something");
            Ok(())
        },
    };
    const BAD: DemoStep<u32> = DemoStep {
        name: "bad",
        title: "Fails",
        run: |_, report| {
            report.note_attempt("something else");
            Err(StepFailure("something arrived".to_owned()))
        },
    };

    #[test]
    fn one_failed_step_fails_the_demo() {
        let mut context = 0;
        for (steps, wanted, expected) in [
            (&[][..], 1, "0 steps"),
            (&[&GOOD, &GOOD], 0, "2 steps, all passed"),
            (&[&GOOD, &BAD], 1, "1 of 2 steps failed: bad"),
        ] {
            let results: Vec<StepResult> = steps.iter().map(|step| run_step(step, &mut context)).collect();
            assert_eq!(exit_status(&results), wanted, "{expected}");
            let summary = summarize(&results, Instant::now());
            assert!(summary.contains(expected), "{summary}");
        }
        assert_eq!(context, 3);
    }

    #[test]
    fn a_failed_step_reports_what_it_tried() {
        let result = run_step(&BAD, &mut 0).to_json();
        assert_eq!(result["good"], false);
        assert_eq!(result["wrong"], "something arrived");
        assert_eq!(result["tried"][0], "something else");
    }

    #[test]
    fn step_names_are_unique() {
        let mut names: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
        assert!(select_steps(&["nothing".to_owned()]).is_err());
        assert_eq!(select_steps(&["log".to_owned(), "allowed".to_owned()]).unwrap().len(), 2);
    }
}
