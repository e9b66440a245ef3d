//! `sandbar secret placeholder`: what a sandbox gets in place of a credential.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use proxy::app::load_config;
use proxy::credential::PlaceholderKey;
use proxy::policy::files::{self, CONFIG_FILE};
use proxy::policy::paths::instance_paths;
use rules::compile;
use rules::credential::CredentialForm;
use serde_json::json;

use super::OutputOptions;
use crate::terminal::print_json;

#[derive(clap::Args, Debug)]
pub(crate) struct PlaceholderArgs {
    /// Configuration file
    #[arg(long, short = 'c', value_name = "FILE", default_value = CONFIG_FILE)]
    config: PathBuf,
    /// The sandbox that gets it
    #[arg(long, value_name = "ID")]
    sandbox: String,
    /// What it begins with, for tools that check their keys; by default as the credential's form says
    #[arg(long, value_name = "TEXT")]
    prefix: Option<String>,
    /// Name of a credential in the configuration
    #[arg(value_name = "NAME")]
    name: String,
}

/// Prints a placeholder. Exit status: 0; 2 no such credential or sandbox, or the instance never ran.
pub(crate) fn placeholder(args: &PlaceholderArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let sources = files::read_config(&args.config)?;
    let configuration = load_config(&sources)?;
    let found = configuration.credentials.iter().find(|one| one.name.as_str() == args.name);
    let Some(credential) = found else {
        bail!("there is no credential `{}` in the configuration", args.name.escape_debug());
    };
    let Ok(rules) = compile(&sources, &[]) else { bail!("the policies do not load: see `sandbar check`") };
    let sandbox = rules.sandboxes().iter().find(|sandbox| sandbox.id.as_str() == args.sandbox);
    let Some(sandbox) = sandbox else {
        bail!("there is no sandbox `{}` in the configuration", args.sandbox.escape_debug());
    };
    let log = instance_paths(&args.config, &configuration)?.log;
    let key = PlaceholderKey::read(&log)?;
    let key =
        key.context("placeholders are made when the instance starts for the first time: start it once")?;
    let own = match &credential.form {
        CredentialForm::Placeholder { prefix, .. } => prefix.as_str(),
        CredentialForm::Basic { .. }
        | CredentialForm::Bearer
        | CredentialForm::DangerouslyQuery { .. }
        | CredentialForm::Header { .. }
        | CredentialForm::SigV4 { .. } => "",
    };
    let text = key.placeholder(&sandbox.id, &credential.name, args.prefix.as_deref().unwrap_or(own));
    match output.json {
        true => print_json(&json!({ "sandbox": args.sandbox, "credential": args.name, "placeholder": text })),
        false => anstream::println!("{text}"),
    }
    Ok(ExitCode::SUCCESS)
}
