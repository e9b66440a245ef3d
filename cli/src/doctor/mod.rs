//! `sandbar doctor`: inside a sandbox it tries to get around Sandbar; outside it checks the set-up.
//!
//! Inside, it really makes each attempt, in a process of its own; the attempt is blocked, refused by Sandbar, or
//! escapes. Everything it sends identifies itself as this test, and it changes nothing: where a change would be the
//! proof, it requests one that cannot succeed and that fails with a different error if the privilege is missing.

mod inside;
mod outside;
mod probe;
mod report;
mod response;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;

use super::{EXIT_NEGATIVE, OutputOptions, UsageError};
use jail::TRUST_DIR;

/// Default configuration file.
const CONFIG_FILE: &str = "sandbar.toml";

/// Try every way around Sandbar from inside a sandbox, or check the set-up from outside
///
/// Exit status: 0 no problem found, 1 an attempt escaped or a check failed, 2 the checks could not run.
#[derive(clap::Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Try ways around Sandbar: this is a sandbox
    #[arg(long, conflicts_with_all = ["outside", "config"])]
    inside: bool,
    /// Check the set-up: this is where Sandbar runs
    #[arg(long)]
    outside: bool,
    /// Configuration file of the instance to check [default: sandbar.toml, if it exists]
    #[arg(long, short = 'c', value_name = "FILE")]
    config: Option<PathBuf>,
    /// Host that the policy allows; requested over HTTPS as evidence, and target of misuse attempts
    #[arg(long, value_name = "HOST")]
    allowed: Option<String>,
    /// Host that no policy allows
    #[arg(long, value_name = "HOST", default_value = "sandbar-doctor.example")]
    denied: String,
    /// Inside: address that answers everyone, on every port tried [default: public resolvers]
    #[arg(long, value_name = "ADDRESS")]
    witness: Vec<IpAddr>,
    /// Inside: path that must be neither readable nor writable
    #[arg(long, value_name = "PATH")]
    path: Vec<PathBuf>,
    /// Inside: path that may be readable but must not be writable
    #[arg(long, value_name = "PATH")]
    policy: Vec<PathBuf>,
    /// Run a single probe and print its verdict
    #[arg(long, value_name = "NAME", hide = true)]
    probe: Option<String>,
}

/// Where the doctor runs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DoctorSide {
    Inside,
    /// With the configuration file, if there is one.
    Outside(Option<PathBuf>),
}

/// Runs the checks. Exit status: see [`DoctorArgs`].
pub(crate) fn doctor(args: &DoctorArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    if let Some(name) = &args.probe {
        return inside::run_probe(args, name);
    }
    let report = match choose_side(args)? {
        DoctorSide::Inside => inside::examine(args)?,
        DoctorSide::Outside(config) => outside::examine(args, config.as_deref())?,
    };
    match output.json {
        true => report.print_json(),
        false => report.print(),
    }
    Ok(if report.is_bad() { ExitCode::from(EXIT_NEGATIVE) } else { ExitCode::SUCCESS })
}

/// Chooses the side: from the arguments, or else inside in a jail of `sandbar run`, outside beside a sandbar.toml.
fn choose_side(args: &DoctorArgs) -> anyhow::Result<DoctorSide> {
    let default = || Path::new(CONFIG_FILE).is_file().then(|| PathBuf::from(CONFIG_FILE));
    match (args.inside, &args.config) {
        (true, _) => Ok(DoctorSide::Inside),
        (false, Some(config)) => Ok(DoctorSide::Outside(Some(config.clone()))),
        (false, None) if args.outside => Ok(DoctorSide::Outside(default())),
        (false, None) if is_in_jail() => Ok(DoctorSide::Inside),
        (false, None) => match default() {
            Some(config) => Ok(DoctorSide::Outside(Some(config))),
            None => bail!(UsageError(format!(
                "use --inside in a sandbox, or --outside where Sandbar runs: there is no {CONFIG_FILE} here, and this is not a jail of `sandbar run`"
            ))),
        },
    }
}

/// Whether this is a jail of `sandbar run`: it has the trust files, and `lo` is its only interface.
fn is_in_jail() -> bool {
    let interfaces = nix::net::if_::if_nameindex();
    let alone = interfaces.is_ok_and(|all| all.iter().all(|one| one.name() == c"lo"));
    alone && Path::new(TRUST_DIR).is_dir()
}
