//! The command line: which subcommands there are, and the exit codes they share.

mod budget;
mod ca;
mod check;
mod demo;
mod diff;
mod dns;
mod doctor;
mod explain;
mod grant;
mod identity;
mod log;
mod manual;
mod policy_args;
mod reference;
mod reload;
mod run;
mod running;
mod serve;
mod status;
mod terminal;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use serde_json::json;

pub(crate) use proxy::report::UsageError;
use terminal::{BAD, Color, paint, print_json};

/// Exit status of a command that ran and says no: denied, or a test failed.
pub(crate) const NEGATIVE: u8 = 1;
/// Exit status for a policy, a file or a log that is not good.
pub(crate) const BAD_INPUT: u8 = 2;
/// Exit status for a command line that makes no sense (`EX_USAGE`).
pub(crate) const USAGE: u8 = 64;

/// The one guarded crossing between a sandbox and everything outside it.
#[derive(Parser)]
#[command(name = "sandbar", version, max_term_width = 100, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    output: Output,
    #[command(subcommand)]
    command: Command,
}

/// How to answer, for every subcommand.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct Output {
    /// Print machine-readable JSON instead of text
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// When to use colours
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    pub(crate) color: Color,
}

#[derive(Subcommand)]
enum Command {
    Budget(budget::BudgetArgs),
    Ca(ca::CaArgs),
    Check(check::CheckArgs),
    Completions(manual::CompletionsArgs),
    Demo(demo::DemoArgs),
    #[command(hide = true)]
    DemoAgent(demo::agent::AgentArgs),
    Diff(diff::DiffArgs),
    Dns(dns::DnsArgs),
    Doctor(doctor::DoctorArgs),
    Explain(explain::ExplainArgs),
    Grant(grant::GrantArgs),
    Grants(grant::GrantsArgs),
    Identity(identity::IdentityArgs),
    Limits(reference::LimitsArgs),
    Log(log::LogArgs),
    Man(manual::ManArgs),
    Pending(grant::PendingArgs),
    Reasons(reference::ReasonsArgs),
    Reload(reload::ReloadArgs),
    Revoke(grant::RevokeArgs),
    Run(run::RunArgs),
    Schema(reference::SchemaArgs),
    Serve(serve::ServeArgs),
    Status(status::StatusArgs),
    Test(test::TestArgs),
}

/// Requests make many small blocks; the system's allocator takes a sixth more time for them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Parses the arguments, runs the subcommand, and prints its error once.
fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    arguments.output.color.apply();
    let output = arguments.output;
    let result = match arguments.command {
        Command::Budget(args) => budget::budget(&args, output),
        Command::Ca(args) => ca::ca(&args, output),
        Command::Check(args) => check::check(&args, output),
        Command::Completions(args) => manual::completions(&args),
        Command::Demo(args) => demo::demo(&args, output),
        Command::DemoAgent(args) => demo::agent::agent(&args),
        Command::Diff(args) => diff::diff(&args, output),
        Command::Dns(args) => dns::dns(&args, output),
        Command::Doctor(args) => doctor::doctor(&args, output),
        Command::Explain(args) => explain::explain(&args, output),
        Command::Grant(args) => grant::grant(&args, output),
        Command::Grants(args) => grant::grants(&args, output),
        Command::Identity(args) => identity::identity(&args, output),
        Command::Limits(args) => reference::limits(&args, output),
        Command::Log(args) => log::run(&args, output),
        Command::Man(args) => manual::man(&args),
        Command::Pending(args) => grant::pending(&args, output),
        Command::Reasons(args) => reference::reasons(&args, output),
        Command::Reload(args) => reload::reload(&args, output),
        Command::Revoke(args) => grant::revoke(&args, output),
        Command::Run(args) => Ok(run::run(&args, output)),
        Command::Schema(args) => reference::schema(&args),
        Command::Serve(args) => serve::serve(&args),
        Command::Status(args) => status::status(&args, output),
        Command::Test(args) => test::test(&args, output),
    };
    result.unwrap_or_else(|error| fail(&error, output))
}

/// Prints an error, for machines too if they listen, and tells the exit status.
fn fail(error: &anyhow::Error, output: Output) -> ExitCode {
    anstream::eprintln!("{} {error:#}", paint(BAD, "sandbar:"));
    if output.json {
        print_json(&json!({ "ok": false, "error": format!("{error:#}") }));
    }
    let usage = error.downcast_ref::<UsageError>().is_some();
    ExitCode::from(if usage { USAGE } else { BAD_INPUT })
}

/// Help and version are answers; everything else clap says is a usage error.
fn usage(error: &clap::Error) -> ExitCode {
    let printed = error.print();
    // Where the arguments cannot be parsed, whether JSON was asked for must be looked up by hand.
    if error.use_stderr() && std::env::args_os().any(|argument| argument == "--json") {
        print_json(&json!({ "ok": false, "error": error.render().to_string() }));
    }
    match (error.use_stderr(), printed) {
        (false, Ok(())) => ExitCode::SUCCESS,
        (true, _) | (_, Err(_)) => ExitCode::from(USAGE),
    }
}
