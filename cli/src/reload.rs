//! `sandbar reload`: makes the running program load its policies now, and says what came of it.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::instance::RunningInstance;
use super::{EXIT_NEGATIVE, OutputOptions};
use crate::terminal::{BAD, GOOD, paint, print_json};

/// Load the policies now; a bad one changes nothing and is shown with its place
#[derive(clap::Args, Debug)]
pub(crate) struct ReloadArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// Wait until every connection that lost its permission has gone
    #[arg(long)]
    wait: bool,
}

/// Reloads. Exit status: 0 in force, 1 refused, 2 nobody to ask.
pub(crate) fn reload(args: &ReloadArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let told = args.running.request("POST", "/reload", &json!({ "wait": args.wait }))?;
    let trouble = told.get("trouble").and_then(Value::as_str);
    let number = |name: &str| told.get(name).and_then(Value::as_u64).unwrap_or_default();
    match (output.json, trouble) {
        (true, _) => print_json(&told),
        (false, Some(trouble)) => {
            anstream::eprintln!("{trouble}");
            let closed = told.get("closed").and_then(Value::as_bool).unwrap_or_default();
            let what = if closed { "lets nothing pass" } else { "stays in force" };
            let (word, generation) = (paint(BAD, "refused:"), number("generation"));
            anstream::eprintln!("{word} generation {generation} {what}");
        }
        (false, None) => anstream::println!(
            "{} generation {}, {} connections cut",
            paint(GOOD, "in force:"),
            number("generation"),
            number("cut")
        ),
    }
    Ok(if trouble.is_none() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}
