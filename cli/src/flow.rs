//! `sandbar flow`: shows which memory bank's text a sandbox sent where.

use std::process::ExitCode;

use rules::ids::SandboxId;
use serde_json::Value;

use super::instance::RunningInstance;
use super::{OutputOptions, UsageError};
use crate::terminal::{HEAD, paint, print_json};

/// Show which memory bank's text a sandbox sent where, how much, and in which record
#[derive(clap::Args, Debug)]
pub(crate) struct FlowArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// Sandbox that sent it
    #[arg(long, value_name = "ID")]
    sandbox: String,
}

/// Prints the flows of a sandbox. Exit status: 0, 2 unknown sandbox or no running instance, 64 usage error.
pub(crate) fn flow(args: &FlowArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let sandbox = SandboxId::parse(&args.sandbox)
        .map_err(|error| UsageError(format!("invalid sandbox `{}`: {error}", args.sandbox.escape_debug())))?;
    let reply = args.running.request("GET", &format!("/sandboxes/{sandbox}/flows"), &Value::Null)?;
    if output.json {
        print_json(&reply);
        return Ok(ExitCode::SUCCESS);
    }
    let flows = reply.get("flows").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let rows: Vec<[String; 5]> = flows.iter().map(row).collect();
    match rows.is_empty() {
        true => anstream::println!("no text of a memory bank is known to have left sandbox {sandbox}"),
        false => print_table(&rows),
    }
    Ok(ExitCode::SUCCESS)
}

fn row(flow: &Value) -> [String; 5] {
    let text = |name: &str| flow.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let number = |name: &str| flow.get(name).and_then(Value::as_u64).unwrap_or_default();
    let at = i64::try_from(number("at_ms")).ok().and_then(|at| jiff::Timestamp::from_millisecond(at).ok());
    let at = at.map(|at| at.to_string()).unwrap_or_default();
    [at, text("bank"), text("host"), number("characters").to_string(), text("record")]
}

/// Prints rows below their heads, each column as wide as its widest cell.
fn print_table(rows: &[[String; 5]]) {
    let heads = ["time", "bank", "host", "characters", "record"];
    let widths: [usize; 5] = std::array::from_fn(|at| {
        let cells = rows.iter().map(|row| row[at].chars().count());
        cells.chain([heads[at].len()]).max().unwrap_or_default()
    });
    let line = |cells: [&str; 5]| {
        let cells = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    anstream::println!("{}", paint(HEAD, line(heads)));
    for row in rows {
        anstream::println!("{}", line(std::array::from_fn(|at| row[at].as_str())));
    }
}
