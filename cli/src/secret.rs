//! `sandbar secret`: the credentials of the configuration, without their values.

use std::process::ExitCode;

use super::OutputOptions;
use super::placeholder::{PlaceholderArgs, placeholder};

/// Look after the credentials of the configuration; their values are never shown
#[derive(clap::Args, Debug)]
pub(crate) struct SecretArgs {
    #[command(subcommand)]
    command: SecretCommand,
}

#[derive(clap::Subcommand, Debug)]
enum SecretCommand {
    /// Print the placeholder of a credential in a sandbox, for tools that insist on a key
    Placeholder(PlaceholderArgs),
}

/// Runs a subcommand; each says its exit status.
pub(crate) fn secret(args: &SecretArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    match &args.command {
        SecretCommand::Placeholder(args) => placeholder(args, output),
    }
}
