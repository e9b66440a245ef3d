//! `sandbar explain`: one decision, the rule that made it, what came near, and what would change it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use proxy::admin::explain::{ExplainReply, ExplainRequest, MemoryVerb};
use rules::compile;

use super::instance::RunningInstance;
use super::policy_args::PolicyArgs;
use super::{EXIT_BAD_INPUT, EXIT_NEGATIVE, OutputOptions, check, print_json};

/// Say what would become of an attempt, why, and what would change it
#[derive(clap::Args)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    policy: PolicyArgs,
    /// Ask the rules of the running instance rather than the files
    #[arg(long, conflicts_with = "policies")]
    live: bool,
    /// The admin socket of the running instance, where it is not the one of the operator's file
    #[arg(long, value_name = "PATH", requires = "live")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    attempt: AttemptArgs,
}

/// The attempt to be explained.
#[derive(clap::Args, Clone, Debug)]
struct AttemptArgs {
    /// The sandbox that tries; not needed where there is only one
    #[arg(long, short, value_name = "ID")]
    sandbox: Option<String>,
    /// The request method
    #[arg(long, short, value_name = "METHOD")]
    method: Option<String>,
    /// Try a DNS look-up of this type instead of a connection
    #[arg(long, value_name = "TYPE", conflicts_with_all = ["method", "tcp", "bank"])]
    dns: Option<String>,
    /// Try raw TCP instead of TLS or HTTP
    #[arg(long, conflicts_with_all = ["method", "bank"])]
    tcp: bool,
    /// Try a memory request for this bank
    #[arg(long, value_name = "BANK", conflicts_with = "method")]
    bank: Option<String>,
    /// What the memory request does
    #[arg(long, value_enum, default_value_t, requires = "bank", value_name = "OPERATION")]
    operation: VerbArg,
    /// A URL, or a host with its port if not 443
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

/// Explains one attempt. Exit status: 0 allowed, 1 denied, 2 not a good policy or nobody to ask, 64 not a good
/// question.
pub(crate) fn explain(args: &ExplainArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let told = if args.live {
        ask_instance(args)?
    } else {
        match compile(&args.policy.read()?, &[]) {
            Ok(rules) => args.attempt.question().answer(&rules)?,
            Err(problems) => {
                check::print_load_errors(&problems, output);
                return Ok(ExitCode::from(EXIT_BAD_INPUT));
            }
        }
    };
    match output.json {
        true => print_json(&told.json),
        false => anstream::print!("{}", told.text),
    }
    Ok(if told.allowed { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

/// Asks the running instance.
fn ask_instance(args: &ExplainArgs) -> anyhow::Result<ExplainReply> {
    let question = serde_json::to_value(args.attempt.question())?;
    let running = RunningInstance::new(args.policy.config(), args.socket.clone());
    let told = running.request("POST", "/explain", &question)?;
    serde_json::from_value(told).context("the running program gave no answer that is one")
}

impl AttemptArgs {
    fn question(&self) -> ExplainRequest {
        let operation = match self.operation {
            VerbArg::Forget => MemoryVerb::Forget,
            VerbArg::Recall => MemoryVerb::Recall,
            VerbArg::Retain => MemoryVerb::Retain,
        };
        let AttemptArgs { sandbox, method, dns, tcp, bank, target, .. } = self.clone();
        ExplainRequest { sandbox, method, dns, tcp, bank, operation, target }
    }
}
