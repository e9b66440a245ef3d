//! `sandbar doctor`: inside a sandbox it tries to get around Sandbar; outside it looks at the set-up.
//!
//! Inside, each way around is really tried, in a process of its own, and came to nothing, was answered by Sandbar,
//! or got out. Nothing is sent but what says that it is this test, and nothing is changed: where a change would
//! prove it, one is asked for that cannot be made and whose refusal differs with the privilege.

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

/// The operator's file, where nothing else is said.
const CONFIG_FILE: &str = "sandbar.toml";

/// Try every way around Sandbar from inside a sandbox, or look at the set-up from outside
///
/// Exit status: 0 nothing bad, 1 something escaped or is wrong, 2 it could not be looked at.
#[derive(clap::Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Try the ways around: this is a sandbox
    #[arg(long, conflicts_with_all = ["outside", "config"])]
    inside: bool,
    /// Look at the set-up: this is where Sandbar runs
    #[arg(long)]
    outside: bool,
    /// The operator's file of the instance to look at [default: sandbar.toml, if there is one]
    #[arg(long, short = 'c', value_name = "FILE")]
    config: Option<PathBuf>,
    /// A host that the policy allows, to be reached by https as evidence and to be misused
    #[arg(long, value_name = "HOST")]
    allowed: Option<String>,
    /// A host that no policy allows
    #[arg(long, value_name = "HOST", default_value = "sandbar-doctor.example")]
    denied: String,
    /// Inside: an address that answers whoever reaches it, on every port that is tried [default: public resolvers]
    #[arg(long, value_name = "ADDRESS")]
    witness: Vec<IpAddr>,
    /// Inside: something that must be neither read nor written
    #[arg(long, value_name = "PATH")]
    path: Vec<PathBuf>,
    /// Inside: something that may be read and must not be written
    #[arg(long, value_name = "PATH")]
    policy: Vec<PathBuf>,
    /// Try one thing alone, and say only what came of it
    #[arg(long, value_name = "NAME", hide = true)]
    probe: Option<String>,
}

/// Where the doctor is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DoctorSide {
    Inside,
    /// With the operator's file, if there is one.
    Outside(Option<PathBuf>),
}

/// Examines. Exit status: 0 nothing bad, 1 something escaped or is wrong, 2 it could not be looked at.
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

/// Where this is: as told, or by what a jail of `sandbar run` has and nothing else.
fn choose_side(args: &DoctorArgs) -> anyhow::Result<DoctorSide> {
    let usual = || Path::new(CONFIG_FILE).is_file().then(|| PathBuf::from(CONFIG_FILE));
    match (args.inside, &args.config) {
        (true, _) => Ok(DoctorSide::Inside),
        (false, Some(config)) => Ok(DoctorSide::Outside(Some(config.clone()))),
        (false, None) if args.outside => Ok(DoctorSide::Outside(usual())),
        (false, None) if is_in_jail() => Ok(DoctorSide::Inside),
        (false, None) => match usual() {
            Some(config) => Ok(DoctorSide::Outside(Some(config))),
            None => bail!(UsageError(format!(
                "say --inside in a sandbox, or --outside where Sandbar runs: there is no {CONFIG_FILE} here, and this is no jail of `sandbar run`"
            ))),
        },
    }
}

/// Whether this is a jail of `sandbar run`: its trust files are there, and no interface but `lo`.
fn is_in_jail() -> bool {
    let interfaces = nix::net::if_::if_nameindex();
    let alone = interfaces.is_ok_and(|all| all.iter().all(|one| one.name() == c"lo"));
    alone && Path::new(TRUST_DIR).is_dir()
}
