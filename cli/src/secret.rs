//! `sandbar secret`: the credentials of the configuration, without their values.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use proxy::app::load_config;
use proxy::credential::{CredentialError, CredentialTrial, kind, try_credential};
use proxy::policy::files::{self, CONFIG_FILE};
use rules::configuration::Configuration;
use rules::credential::{Credential, CredentialForm};
use serde_json::{Value, json};

use super::instance::RunningInstance;
use super::placeholder::{PlaceholderArgs, placeholder};
use super::{EXIT_NEGATIVE, OutputOptions};
use crate::terminal::{BAD, FAINT, GOOD, HEAD, paint, print_json};

/// List and try the credentials of the configuration; their values are never shown
#[derive(clap::Args, Debug)]
pub(crate) struct SecretArgs {
    #[command(subcommand)]
    command: SecretCommand,
}

#[derive(clap::Subcommand, Debug)]
enum SecretCommand {
    /// List name, source, form and hosts of each credential, and its state in the running instance
    List {
        /// Configuration file
        #[arg(long, short = 'c', value_name = "FILE", default_value = CONFIG_FILE)]
        config: PathBuf,
        /// Admin socket, if not the one in the configuration file
        #[arg(long, value_name = "PATH")]
        socket: Option<PathBuf>,
    },
    /// Fetch a credential once, as this user, and print its length and how long it is valid
    Test {
        /// Configuration file
        #[arg(long, short = 'c', value_name = "FILE", default_value = CONFIG_FILE)]
        config: PathBuf,
        /// Name of a credential in the configuration
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Print the placeholder of a credential in a sandbox, for tools that insist on a key
    Placeholder(PlaceholderArgs),
}

/// Lists or tries credentials. Exit status: 0; 1 the credential cannot be fetched; 2 no such configuration or credential.
pub(crate) fn secret(args: &SecretArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    match &args.command {
        SecretCommand::List { config, socket } => list(config, socket.clone(), output),
        SecretCommand::Test { config, name } => test(config, name, output),
        SecretCommand::Placeholder(args) => placeholder(args, output),
    }
}

fn read_configuration(config: &Path) -> anyhow::Result<Configuration> {
    files::read_config_only(config).and_then(|sources| load_config(&sources))
}

fn list(config: &Path, socket: Option<PathBuf>, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let configuration = read_configuration(config)?;
    let running = RunningInstance::new(config.to_owned(), socket);
    let status = running.request("GET", "/status", &Value::Null).unwrap_or_default(); // it need not run
    let states = status.get("credentials").and_then(Value::as_array).cloned().unwrap_or_default();
    let state = |name: &str| states.iter().find(|state| state.get("name").is_some_and(|known| known == name));
    if output.json {
        let entries = configuration.credentials.iter().map(|one| {
            json!({
                "name": one.name.as_str(),
                "source": kind(&one.source),
                "form": describe_form(&one.form),
                "hosts": hosts(one),
                "state": state(one.name.as_str()),
            })
        });
        print_json(&json!({ "credentials": entries.collect::<Vec<_>>() }));
        return Ok(ExitCode::SUCCESS);
    }
    for one in &configuration.credentials {
        let (name, source) = (paint(HEAD, &one.name), kind(&one.source));
        anstream::println!("{name}  {source}, {}, for {}", describe_form(&one.form), hosts(one).join(" "));
        let state =
            state(one.name.as_str()).map_or_else(|| "not in a running instance".to_owned(), describe_state);
        anstream::println!("  {}", paint(FAINT, state));
    }
    if configuration.credentials.is_empty() {
        anstream::println!("the configuration has no `[[credential]]`");
    }
    Ok(ExitCode::SUCCESS)
}

fn test(config: &Path, name: &str, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let configuration = read_configuration(config)?;
    let found = configuration.credentials.iter().find(|one| one.name.as_str() == name);
    let Some(credential) = found else {
        bail!("there is no credential `{}`: see `sandbar secret list`", name.escape_debug());
    };
    let base = config.parent().unwrap_or(Path::new(""));
    drop(rustls::crypto::CryptoProvider::install_default(certs::crypto_provider().as_ref().clone()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    let tried = runtime.block_on(try_credential(credential, &configuration, base))?;
    runtime.shutdown_background(); // a file that hangs must not keep us
    match output.json {
        true => print_json(&trial_json(credential, &tried)),
        false => print_trial(credential, &tried),
    }
    Ok(if tried.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

fn trial_json(credential: &Credential, tried: &Result<CredentialTrial, CredentialError>) -> Value {
    let name = credential.name.as_str();
    match tried {
        Ok(trial) => json!({
            "ok": true,
            "name": name,
            "source": kind(&credential.source),
            "length": trial.length,
            "expires_in_seconds": trial.life.map(|life| life.as_secs()),
            "cached_seconds": trial.cache.map(|cache| cache.as_secs()),
            "milliseconds": trial.took.as_millis() as u64,
        }),
        Err(error) => json!({
            "ok": false, "name": name, "source": kind(&credential.source), "error": error.to_string(),
        }),
    }
}

fn print_trial(credential: &Credential, tried: &Result<CredentialTrial, CredentialError>) {
    let name = &credential.name;
    match tried {
        Ok(trial) => {
            let until = match (trial.life, trial.cache) {
                (Some(life), _) => format!("valid for {}", seconds(life)),
                (None, Some(cache)) => format!("fetched again after {} at the latest", seconds(cache)),
                (None, None) => "valid as long as Sandbar runs".to_owned(),
            };
            let (length, took) = (trial.length, trial.took.as_millis());
            let word = paint(GOOD, "ok:");
            anstream::println!(
                "{word} credential `{name}`: {length} characters, {until}, fetched in {took} ms"
            );
        }
        Err(error) => anstream::println!("{} credential `{name}`: {error}", paint(BAD, "failed:")),
    }
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}

fn hosts(one: &Credential) -> Vec<String> {
    one.hosts.iter().map(ToString::to_string).collect()
}

/// Describes how a request carries a credential, as in the configuration.
fn describe_form(form: &CredentialForm) -> String {
    match form {
        CredentialForm::Bearer => "bearer".to_owned(),
        CredentialForm::Header { name, .. } => format!("header {name}"),
        CredentialForm::Basic { user } => format!("basic with user {user}"),
        CredentialForm::SigV4 { service, region } => format!("sigv4 for {service} in {region}"),
        CredentialForm::DangerouslyQuery { name } => format!("query parameter {name}"),
        CredentialForm::Placeholder { headers, .. } => format!("placeholder in {}", headers.join(", ")),
    }
}

/// Describes the state of a credential in the running instance.
pub(crate) fn describe_state(state: &Value) -> String {
    let number = |name: &str| state.get(name).and_then(Value::as_u64);
    let usable = state.get("usable").and_then(Value::as_bool).unwrap_or_default();
    let fetching = state.get("fetching").and_then(Value::as_bool).unwrap_or_default();
    let mut said = match (usable, fetching) {
        (true, _) => "usable".to_owned(),
        (false, true) => "being fetched".to_owned(),
        (false, false) => "not usable".to_owned(),
    };
    if let Some(age) = number("age_seconds") {
        said.push_str(&format!(", {age} s old"));
    }
    if let Some(left) = number("expires_in_seconds") {
        said.push_str(&format!(", expires in {left} s"));
    }
    if let Some(error) = state.get("error").and_then(Value::as_str) {
        said.push_str(&format!("; last error: {error}"));
    }
    said
}
