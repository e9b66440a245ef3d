//! The command line: the subcommands and the exit codes they share.
//!
//! | status | meaning |
//! | --- | --- |
//! | 0 | success |
//! | 1 | the command ran and the answer is negative: denied, not ready, test failed, log tampered with |
//! | 2 | invalid policy, file or log, or no running instance |
//! | 64 | usage error |
//!
//! `sandbar run` exits with the status of its command; see `run/mod.rs` for its own codes.

mod budget;
mod ca;
mod canary;
mod check;
mod demo;
mod diff;
mod dns;
mod doctor;
mod explain;
mod flow;
mod grant;
mod identity;
mod instance;
mod log;
mod manual;
mod placeholder;
mod policy_args;
mod reference;
mod reload;
mod run;
mod secret;
mod serve;
mod signals;
mod status;
mod terminal;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use serde_json::json;

pub(crate) use proxy::report::UsageError;
use terminal::{ColorMode, print_json};

/// Exit status of a command that ran with a negative answer: denied, or a test failed.
pub(crate) const EXIT_NEGATIVE: u8 = 1;
/// Exit status for an invalid policy, file or log, or an instance that cannot be reached.
pub(crate) const EXIT_BAD_INPUT: u8 = 2;
/// Exit status for a usage error (`EX_USAGE` of sysexits.h).
pub(crate) const EXIT_USAGE: u8 = 64;

/// Sandbar is an egress gateway for sandboxes that run untrusted agent code.
///
/// It sits on the sandbox's only network path, enforces an allowlist, and records every attempt to get out.
#[derive(Parser)]
#[command(name = "sandbar", version, max_term_width = 100, arg_required_else_help = true)]
pub(crate) struct CliArguments {
    #[command(flatten)]
    output: OutputOptions,
    #[command(subcommand)]
    command: CliCommand,
}

/// Output options of every subcommand.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct OutputOptions {
    /// Print machine-readable JSON instead of text
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// When to use colours
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    pub(crate) color: ColorMode,
}

#[derive(Subcommand)]
enum CliCommand {
    Budget(budget::BudgetArgs),
    Ca(ca::CaArgs),
    Canary(canary::CanaryArgs),
    Check(check::CheckArgs),
    Completions(manual::CompletionsArgs),
    Demo(demo::DemoArgs),
    #[command(hide = true)]
    DemoAgent(demo::agent::AgentArgs),
    Diff(diff::DiffArgs),
    Dns(dns::DnsArgs),
    Doctor(doctor::DoctorArgs),
    Explain(explain::ExplainArgs),
    Flow(flow::FlowArgs),
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
    Secret(secret::SecretArgs),
    Serve(serve::ServeArgs),
    Signals(signals::SignalsArgs),
    Status(status::StatusArgs),
    Test(test::TestArgs),
}

/// Requests allocate many small blocks, for which the system allocator takes a sixth more time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Parses the arguments, runs the subcommand, and prints its error once.
fn main() -> ExitCode {
    let arguments = match CliArguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return handle_usage_error(&error),
    };
    arguments.output.color.apply();
    let output = arguments.output;
    let result = match arguments.command {
        CliCommand::Budget(args) => budget::budget(&args, output),
        CliCommand::Ca(args) => ca::ca(&args, output),
        CliCommand::Canary(args) => canary::canary(&args, output),
        CliCommand::Check(args) => check::check(&args, output),
        CliCommand::Completions(args) => manual::completions(&args),
        CliCommand::Demo(args) => demo::demo(&args, output),
        CliCommand::DemoAgent(args) => demo::agent::run_agent(&args),
        CliCommand::Diff(args) => diff::diff(&args, output),
        CliCommand::Dns(args) => dns::dns(&args, output),
        CliCommand::Doctor(args) => doctor::doctor(&args, output),
        CliCommand::Explain(args) => explain::explain(&args, output),
        CliCommand::Flow(args) => flow::flow(&args, output),
        CliCommand::Grant(args) => grant::grant(&args, output),
        CliCommand::Grants(args) => grant::grants(&args, output),
        CliCommand::Identity(args) => identity::identity(&args, output),
        CliCommand::Limits(args) => reference::limits(&args, output),
        CliCommand::Log(args) => log::run(&args, output),
        CliCommand::Man(args) => manual::man(&args),
        CliCommand::Pending(args) => grant::pending(&args, output),
        CliCommand::Reasons(args) => reference::reasons(&args, output),
        CliCommand::Reload(args) => reload::reload(&args, output),
        CliCommand::Revoke(args) => grant::revoke(&args, output),
        CliCommand::Run(args) => Ok(run::run(&args, output)),
        CliCommand::Schema(args) => reference::schema(&args),
        CliCommand::Secret(args) => secret::secret(&args, output),
        CliCommand::Serve(args) => serve::serve(&args),
        CliCommand::Signals(args) => signals::signals(&args, output),
        CliCommand::Status(args) => status::status(&args, output),
        CliCommand::Test(args) => test::test(&args, output),
    };
    result.unwrap_or_else(|error| print_error(&error, output))
}

/// Prints an error, with `--json` also as JSON, and returns the exit status.
fn print_error(error: &anyhow::Error, output: OutputOptions) -> ExitCode {
    terminal::print_error(error);
    if output.json {
        print_json(&json!({ "ok": false, "error": format!("{error:#}") }));
    }
    let usage = error.downcast_ref::<UsageError>().is_some();
    ExitCode::from(if usage { EXIT_USAGE } else { EXIT_BAD_INPUT })
}

/// Prints what clap returned. Help and version exit with 0; everything else is a usage error.
fn handle_usage_error(error: &clap::Error) -> ExitCode {
    let printed = error.print();
    // The arguments did not parse, so look for `--json` by hand.
    if error.use_stderr() && std::env::args_os().any(|argument| argument == "--json") {
        print_json(&json!({ "ok": false, "error": error.render().to_string() }));
    }
    match (error.use_stderr(), printed) {
        (false, Ok(())) => ExitCode::SUCCESS,
        (true, _) | (_, Err(_)) => ExitCode::from(EXIT_USAGE),
    }
}
