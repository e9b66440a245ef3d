//! `sandbar explain`: prints one decision, the rule that made it, near misses, and what would change it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use proxy::admin::explain::{ExplainReply, ExplainRequest, MemoryVerb};
use rules::compile;

use super::instance::RunningInstance;
use super::policy_args::PolicyArgs;
use super::{EXIT_BAD_INPUT, EXIT_NEGATIVE, OutputOptions, check, print_json};

/// Explain the decision about an attempt: the result, the reason, and what would change it
#[derive(clap::Args)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    policy: PolicyArgs,
    /// Ask the running instance instead of reading the files
    #[arg(long, conflicts_with = "policies")]
    live: bool,
    /// Admin socket of the running instance, if not the one in the configuration file
    #[arg(long, value_name = "PATH", requires = "live")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    attempt: AttemptArgs,
}

/// The attempt to explain.
#[derive(clap::Args, Clone, Debug)]
struct AttemptArgs {
    /// Sandbox that makes the attempt; optional if there is only one
    #[arg(long, short, value_name = "ID")]
    sandbox: Option<String>,
    /// Request method
    #[arg(long, short, value_name = "METHOD")]
    method: Option<String>,
    /// Explain a DNS query of this type instead of a connection
    #[arg(long, value_name = "TYPE", conflicts_with_all = ["method", "tcp", "bank"])]
    dns: Option<String>,
    /// Explain raw TCP instead of TLS or HTTP
    #[arg(long, conflicts_with_all = ["method", "bank"])]
    tcp: bool,
    /// Explain a memory request for this bank
    #[arg(long, value_name = "BANK", conflicts_with = "method")]
    bank: Option<String>,
    /// Operation of the memory request
    #[arg(long, value_enum, default_value_t, requires = "bank", value_name = "OPERATION")]
    operation: VerbArg,
    /// URL, or host with port if not 443
    #[arg(value_name = "URL|HOST[:PORT]")]
    target: String,
}

#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum VerbArg {
    Forget,
    #[default]
    Recall,
    Retain,
}

/// Explains one attempt. Exit status: 0 allowed, 1 denied, 2 invalid policy or no running instance, 64 usage
/// error.
pub(crate) fn explain(args: &ExplainArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let reply = if args.live {
        ask_instance(args)?
    } else {
        match compile(&args.policy.read()?, &[]) {
            Ok(rules) => args.attempt.request().answer(&rules)?,
            Err(problems) => {
                check::print_load_errors(&problems, output);
                return Ok(ExitCode::from(EXIT_BAD_INPUT));
            }
        }
    };
    match output.json {
        true => print_json(&reply.json),
        false => anstream::print!("{}", reply.text),
    }
    Ok(if reply.allowed { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

fn ask_instance(args: &ExplainArgs) -> anyhow::Result<ExplainReply> {
    let request = serde_json::to_value(args.attempt.request())?;
    let running = RunningInstance::new(args.policy.config(), args.socket.clone());
    let reply = running.request("POST", "/explain", &request)?;
    serde_json::from_value(reply).context("the running instance sent an invalid response")
}

impl AttemptArgs {
    fn request(&self) -> ExplainRequest {
        let operation = match self.operation {
            VerbArg::Forget => MemoryVerb::Forget,
            VerbArg::Recall => MemoryVerb::Recall,
            VerbArg::Retain => MemoryVerb::Retain,
        };
        let AttemptArgs { sandbox, method, dns, tcp, bank, target, .. } = self.clone();
        ExplainRequest { sandbox, method, dns, tcp, bank, operation, target }
    }
}
