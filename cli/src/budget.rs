//! `sandbar budget`: what is used of every budget, and when it comes back.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::Value;

use super::OutputOptions;
use super::instance::RunningInstance;
use crate::terminal::{BAD, FAINT, paint, print_json};

/// Show what is used of every budget, and when it comes back
#[derive(clap::Args, Debug)]
pub(crate) struct BudgetArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// Only this sandbox
    #[arg(long, value_name = "ID")]
    sandbox: Option<String>,
}

/// Asks. Exit status: 0, 2 nobody to ask.
pub(crate) fn budget(args: &BudgetArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let told = args.running.request("GET", "/budgets", &Value::Null)?;
    let named = |one: &&Value| {
        args.sandbox
            .as_deref()
            .is_none_or(|id| one.get("sandbox").and_then(Value::as_str) == Some(id))
    };
    let all = told.get("sandboxes").and_then(Value::as_array).into_iter().flatten();
    let all: Vec<&Value> = all.filter(named).collect();
    if output.json {
        print_json(&serde_json::json!({ "sandboxes": all }));
        return Ok(ExitCode::SUCCESS);
    }
    for sandbox in &all {
        anstream::println!("{}", text_field(sandbox, "sandbox"));
        print_budgets(sandbox);
        for rule in sandbox.get("rules").and_then(Value::as_array).into_iter().flatten() {
            anstream::println!(
                "  rule {} of {}",
                text_field(rule, "rule"),
                text_field(rule, "policy")
            );
            print_budgets(rule);
        }
    }
    if all.is_empty() {
        anstream::println!("no budget is set (that of DNS is shown by `sandbar dns`)");
    }
    Ok(ExitCode::SUCCESS)
}

fn print_budgets(holder: &Value) {
    for one in holder.get("budgets").and_then(Value::as_array).into_iter().flatten() {
        let number = |name: &str| one.get(name).and_then(Value::as_u64);
        let (used, limit) =
            (number("used").unwrap_or_default(), number("limit").unwrap_or_default());
        let used = if used >= limit { paint(BAD, used).to_string() } else { used.to_string() };
        let back = number("refills_in_seconds").map(|seconds| {
            let time = humantime::format_duration(Duration::from_secs(seconds));
            paint(FAINT, format!("some of it comes back in {time}")).to_string()
        });
        let key = text_field(one, "budget");
        anstream::println!("    {key:<26} {used} of {limit} {}", back.unwrap_or_default());
    }
}

fn text_field<'a>(value: &'a Value, name: &str) -> &'a str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}
