//! `sandbar reload`: makes the running instance load its policies now, and prints the result.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::instance::RunningInstance;
use super::{EXIT_NEGATIVE, OutputOptions};
use crate::terminal::{BAD, GOOD, paint, print_json};

/// Load the policies now; an invalid policy changes nothing and is reported with file and line
#[derive(clap::Args, Debug)]
pub(crate) struct ReloadArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// Wait until every revoked connection has closed
    #[arg(long)]
    wait: bool,
}

/// Reloads the policies. Exit status: 0 in force, 1 rejected, 2 no running instance.
pub(crate) fn reload(args: &ReloadArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let reply = args.running.request("POST", "/reload", &json!({ "wait": args.wait }))?;
    let trouble = reply.get("trouble").and_then(Value::as_str);
    let number = |name: &str| reply.get(name).and_then(Value::as_u64).unwrap_or_default();
    match (output.json, trouble) {
        (true, _) => print_json(&reply),
        (false, Some(trouble)) => {
            anstream::eprintln!("{trouble}");
            let closed = reply.get("closed").and_then(Value::as_bool).unwrap_or_default();
            let effect = if closed { "denies everything" } else { "stays in force" };
            let (word, generation) = (paint(BAD, "rejected:"), number("generation"));
            anstream::eprintln!("{word} generation {generation} {effect}");
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
