//! `sandbar schema`, `reasons` and `limits`: reference data generated from the code.

use std::process::ExitCode;

use audit::{FailureCode, FindingCode};
use rules::Reason;
use rules::limits::TrafficLimits;
use rules::load::problem::nearest;
use rules::load::{configuration_schema, policy_schema};
use serde_json::{Value, json};

use super::{OutputOptions, UsageError};
use crate::terminal::{HEAD, paint, print_json};

/// Print the JSON Schema of a policy or the configuration, for editors
#[derive(clap::Args)]
pub(crate) struct SchemaArgs {
    /// Kind of file
    #[arg(value_enum, default_value_t)]
    file: FileArg,
}

#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum FileArg {
    /// The configuration (sandbar.toml)
    Operator,
    /// A policy file
    #[default]
    Policy,
}

/// List reason codes, with the meaning and the next step of each
#[derive(clap::Args)]
pub(crate) struct ReasonsArgs {
    /// Show only this code
    code: Option<String>,
    /// Print a Markdown table, as in the documentation
    #[arg(long, conflicts_with = "code")]
    markdown: bool,
}

/// List the limits that `[limits]` in the configuration can set
#[derive(clap::Args)]
pub(crate) struct LimitsArgs {
    /// Print a Markdown table, as in the documentation
    #[arg(long)]
    markdown: bool,
}

/// Prints a schema. Exit status: 0.
pub(crate) fn schema(args: &SchemaArgs) -> anyhow::Result<ExitCode> {
    let schema = match args.file {
        FileArg::Operator => configuration_schema(),
        FileArg::Policy => policy_schema(),
    };
    print_json(&serde_json::to_value(schema)?);
    Ok(ExitCode::SUCCESS)
}

/// Prints reasons. Exit status: 0, or 64 for an unknown code.
pub(crate) fn reasons(args: &ReasonsArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    if args.markdown {
        anstream::print!("{}", rules::reason::markdown_table());
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = match &args.code {
        None => Reason::ALL.to_vec(),
        Some(code) => vec![find_reason(code)?],
    };
    let all = args.code.is_none();
    if output.json {
        let reasons: Value = chosen.iter().map(reason_json).collect();
        let listed = json!({
            "reasons": reasons,
            "failures": code_table(FailureCode::ALL, |one| (one.code(), one.meaning())),
            "findings": code_table(FindingCode::ALL, |one| (one.code(), one.meaning())),
        });
        print_json(if all { &listed } else { &listed["reasons"] });
    } else {
        chosen.iter().for_each(print_reason);
    }
    if all && !output.json {
        anstream::println!("\n{}", paint(HEAD, "How an allowed attempt can fail besides"));
        FailureCode::ALL.iter().for_each(|one| print_code(one.code(), one.meaning()));
        anstream::println!("\n{}", paint(HEAD, "Findings"));
        FindingCode::ALL.iter().for_each(|one| print_code(one.code(), one.meaning()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the limits. Exit status: 0.
pub(crate) fn limits(args: &LimitsArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    if args.markdown {
        anstream::print!("{}", proxy::limits_markdown());
    } else if output.json {
        let all = TrafficLimits::TABLE.iter().map(|(name, default, max, meaning)| {
            json!({ "name": name, "default": default, "most": max, "meaning": meaning })
        });
        print_json(&all.collect());
    } else {
        for (name, default, max, meaning) in TrafficLimits::TABLE {
            anstream::println!("{} = {default} (1 to {max})\n  {meaning}", paint(HEAD, name));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn find_reason(code: &str) -> anyhow::Result<Reason> {
    let found = Reason::ALL.iter().copied().find(|reason| reason.code() == code);
    let near = nearest(code, Reason::ALL.iter().map(|reason| reason.code()));
    let help =
        near.map_or("`sandbar reasons` lists all codes".to_owned(), |near| format!("did you mean `{near}`?"));
    Ok(found.ok_or_else(|| UsageError(format!("unknown reason code `{code}`; {help}")))?)
}

fn print_reason(reason: &Reason) {
    anstream::println!("{}\n  {}\n  {}", paint(HEAD, reason), reason.meaning(), reason.next_step());
}

fn print_code(code: &str, meaning: &str) {
    anstream::println!("{}\n  {meaning}", paint(HEAD, code));
}

fn code_table<T: Copy>(codes: &[T], texts: impl Fn(T) -> (&'static str, &'static str)) -> Vec<Value> {
    let row = |one: &T| {
        let (code, meaning) = texts(*one);
        json!({ "code": code, "meaning": meaning })
    };
    codes.iter().map(row).collect()
}

fn reason_json(reason: &Reason) -> Value {
    json!({ "code": reason.code(), "meaning": reason.meaning(), "next_step": reason.next_step() })
}
