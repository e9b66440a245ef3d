//! `sandbar demo`: the story in one command. Two jails, one proxy, and a little world that sees everything that
//! leaves them; loopback only, no root. Every step is judged, so it is a test too.
//!
//! A step is a file in `steps`, and a line in its list.

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

/// Tell the story: what passes, what does not, and why
///
/// A little world and two sandboxes, on this machine alone: nothing is needed, nothing leaves, nothing stays. Exit
/// status: 0 if every step went as promised, 1 if one did not or there can be no jail.
#[derive(clap::Args, Debug)]
pub(crate) struct DemoArgs {
    /// Play this step only; may be repeated
    #[arg(long, value_name = "NAME")]
    step: Vec<String>,
    /// Name the steps
    #[arg(long)]
    list: bool,
    /// Keep policies, keys and log, and say where
    #[arg(long)]
    keep: bool,
}

/// Plays. Exit status: see above.
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

/// Sets the stage, plays the steps and tells how they went; the exit status.
fn run_steps(
    steps: &[&DemoStep<DemoContext>],
    keep: bool,
    output: OutputOptions,
) -> anyhow::Result<u8> {
    let started = Instant::now();
    let mut stage = DemoContext::set_up().inspect_err(|error| {
        if output.json {
            print_json(&json!({ "ok": false, "error": format!("{error:#}") }));
        }
    })?;
    let mut played = Vec::new();
    for step in steps {
        stage.begin_step();
        let one = run_step(step, &mut stage);
        if !output.json {
            one.print(played.len() + 1);
        }
        played.push(one);
    }
    let ended = stage.finish(keep);
    match output.json {
        true => print_json(&played.iter().map(StepResult::to_json).collect::<Value>()),
        false => print_line(&summarize(&played, started)),
    }
    if let Some(dir) = ended? {
        anstream::eprintln!("{}", paint(FAINT, format!("kept: {}", dir.display())));
    }
    Ok(exit_status(&played))
}

/// Plays one step and judges it.
fn run_step<S>(step: &DemoStep<S>, stage: &mut S) -> StepResult {
    let (mut told, started) = (StepReport::default(), Instant::now());
    let wrong = (step.run)(stage, &mut told).err().map(|wrong| wrong.0);
    StepResult { name: step.name, title: step.title, told, wrong, took: started.elapsed() }
}

/// One step that misbehaves is one too many; so is a story without steps.
fn exit_status(played: &[StepResult]) -> u8 {
    let good = !played.is_empty() && played.iter().all(|step| step.wrong.is_none());
    if good { 0 } else { EXIT_NEGATIVE }
}

fn summarize(played: &[StepResult], started: Instant) -> String {
    let seconds = started.elapsed().as_secs_f64();
    let wrong: Vec<&str> =
        played.iter().filter(|step| step.wrong.is_some()).map(|step| step.name).collect();
    let count = played.len();
    match wrong.is_empty() {
        true => {
            format!(
                "{} in {seconds:.1} s",
                paint(GOOD, format!("{}, all as promised,", step_count(count)))
            )
        }
        false => {
            let text = format!(
                "{} of {} misbehaved: {}",
                wrong.len(),
                step_count(count),
                wrong.join(", ")
            );
            format!("{}; {seconds:.1} s", paint(BAD, text))
        }
    }
}

fn step_count(count: usize) -> String {
    if count == 1 { "1 step".to_owned() } else { format!("{count} steps") }
}

/// The steps of these names, in the order of the story; all where none is named.
fn select_steps(names: &[String]) -> anyhow::Result<Vec<&'static DemoStep<DemoContext>>> {
    if let Some(name) = names.iter().find(|name| !STEPS.iter().any(|step| step.name == **name)) {
        return Err(
            UsageError(format!("there is no step `{name}`: see `sandbar demo --list`")).into()
        );
    }
    let wanted = |step: &&DemoStep<DemoContext>| {
        names.is_empty() || names.iter().any(|name| name == step.name)
    };
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
        title: "Goes well",
        run: |stage, told| {
            *stage += 1;
            told.note_attempt("something");
            Ok(())
        },
    };
    const BAD: DemoStep<u32> = DemoStep {
        name: "bad",
        title: "Goes wrong",
        run: |_, told| {
            told.note_attempt("something else");
            Err(StepFailure("something arrived".to_owned()))
        },
    };

    #[test]
    fn one_step_that_misbehaves_is_one_too_many() {
        let mut stage = 0;
        for (steps, wanted, said) in [
            (&[][..], 1, "0 steps"),
            (&[&GOOD, &GOOD], 0, "2 steps, all as promised"),
            (&[&GOOD, &BAD], 1, "1 of 2 steps misbehaved: bad"),
        ] {
            let played: Vec<StepResult> =
                steps.iter().map(|step| run_step(step, &mut stage)).collect();
            assert_eq!(exit_status(&played), wanted, "{said}");
            let summary = summarize(&played, Instant::now());
            assert!(summary.contains(said), "{summary}");
        }
        assert_eq!(stage, 3);
    }

    #[test]
    fn what_was_tried_is_told_of_a_step_that_misbehaves_too() {
        let told = run_step(&BAD, &mut 0).to_json();
        assert_eq!(told["good"], false);
        assert_eq!(told["wrong"], "something arrived");
        assert_eq!(told["tried"][0], "something else");
    }

    #[test]
    fn steps_are_named_once() {
        let mut names: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
        assert!(select_steps(&["nothing".to_owned()]).is_err());
        assert_eq!(select_steps(&["log".to_owned(), "allowed".to_owned()]).unwrap().len(), 2);
    }
}
