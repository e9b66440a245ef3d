//! `sandbar budget`: shows how much of every budget is used, and when it refills.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::Value;

use super::OutputOptions;
use super::instance::RunningInstance;
use crate::terminal::{BAD, FAINT, paint, print_json};

/// Show how much of every budget is used, and when it refills
#[derive(clap::Args, Debug)]
pub(crate) struct BudgetArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// Show only this sandbox
    #[arg(long, value_name = "ID")]
    sandbox: Option<String>,
}

/// Prints the budgets of the running instance. Exit status: 0, or 2 if it cannot be reached.
pub(crate) fn budget(args: &BudgetArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let reply = args.running.request("GET", "/budgets", &Value::Null)?;
    let is_selected = |one: &&Value| {
        args.sandbox.as_deref().is_none_or(|id| one.get("sandbox").and_then(Value::as_str) == Some(id))
    };
    let all = reply.get("sandboxes").and_then(Value::as_array).into_iter().flatten();
    let all: Vec<&Value> = all.filter(is_selected).collect();
    if output.json {
        print_json(&serde_json::json!({ "sandboxes": all }));
        return Ok(ExitCode::SUCCESS);
    }
    for sandbox in &all {
        anstream::println!("{}", text_field(sandbox, "sandbox"));
        print_budgets(sandbox);
        for rule in sandbox.get("rules").and_then(Value::as_array).into_iter().flatten() {
            anstream::println!("  rule {} of {}", text_field(rule, "rule"), text_field(rule, "policy"));
            print_budgets(rule);
        }
    }
    if all.is_empty() {
        anstream::println!("no budget is set (for DNS budgets see `sandbar dns`)");
    }
    Ok(ExitCode::SUCCESS)
}

fn print_budgets(holder: &Value) {
    for one in holder.get("budgets").and_then(Value::as_array).into_iter().flatten() {
        let number = |name: &str| one.get(name).and_then(Value::as_u64);
        let (used, limit) = (number("used").unwrap_or_default(), number("limit").unwrap_or_default());
        let used = if used >= limit { paint(BAD, used).to_string() } else { used.to_string() };
        let refill = number("refills_in_seconds").map(|seconds| {
            let time = humantime::format_duration(Duration::from_secs(seconds));
            paint(FAINT, format!("starts to refill in {time}")).to_string()
        });
        let key = text_field(one, "budget");
        anstream::println!("    {key:<26} {used} of {limit} {}", refill.unwrap_or_default());
    }
}

fn text_field<'a>(value: &'a Value, name: &str) -> &'a str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}
