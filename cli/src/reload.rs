//! `sandbar reload`: makes the running instance load its configuration and policies now, and prints what changed.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::instance::RunningInstance;
use super::{EXIT_NEGATIVE, OutputOptions};
use crate::terminal::{BAD, GOOD, paint, print_json};

/// Load the configuration and policies now; an invalid file changes nothing and is reported with its line
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
        (false, None) => {
            let (word, generation) = (paint(GOOD, "in force:"), number("generation"));
            anstream::println!("{word} generation {generation}, {} connections cut", number("cut"));
            print_list(&reply, "listeners_opened", "opened:");
            print_list(&reply, "listeners_closed", "closed:");
            print_list(&reply, "unapplied", &paint(BAD, "not applied until a restart:"));
        }
    }
    Ok(if trouble.is_none() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

/// Prints the strings of a list on one line, if there are any.
fn print_list(reply: &Value, key: &str, label: &str) {
    let listed = reply.get(key).and_then(Value::as_array).into_iter().flatten();
    let listed: Vec<&str> = listed.filter_map(Value::as_str).collect();
    if !listed.is_empty() {
        anstream::println!("{label} {}", listed.join(", "));
    }
}
