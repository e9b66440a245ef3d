//! The arguments by which commands name policies.

use std::path::{Path, PathBuf};

use anyhow::bail;
use proxy::policy::files::{self, CONFIG_FILE};
use rules::LoadSources;
use rules::load::MAX_FILE;

use super::UsageError;

/// Where policies are to be found.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PolicyArgs {
    /// A policy file or a directory of them; may be given several times
    #[arg(long = "policy", short = 'p', value_name = "PATH")]
    policies: Vec<PathBuf>,
    /// The operator's file; without --policy it also says where the policies are
    #[arg(long, short = 'c', value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Policies named outright, or by the arguments above.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PathArgs {
    /// Policy files, directories of them, or a sandbar.toml; the sandbar.toml here if none is given
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    policy: PolicyArgs,
}

impl PathArgs {
    pub(crate) fn read(&self) -> anyhow::Result<LoadSources> {
        let named: Vec<PathBuf> = self.paths.iter().chain(&self.policy.policies).cloned().collect();
        PolicyArgs { policies: named, config: self.policy.config.clone() }.read()
    }
}

impl PolicyArgs {
    /// The operator's file, named or usual.
    pub(crate) fn config(&self) -> PathBuf {
        self.config.clone().unwrap_or_else(|| PathBuf::from(CONFIG_FILE))
    }

    /// Reads what the arguments name, or what `sandbar.toml` here names.
    pub(crate) fn read(&self) -> anyhow::Result<LoadSources> {
        match (&self.config, self.policies.is_empty()) {
            (None, false) => files::read_paths(&self.policies),
            (Some(config), false) => {
                let operator = Some(files::read_file(config, MAX_FILE)?);
                files::with_lists(LoadSources { operator, ..files::read_paths(&self.policies)? })
            }
            (Some(config), true) => files::read_config(config),
            (None, true) if Path::new(CONFIG_FILE).is_file() => {
                files::read_config(Path::new(CONFIG_FILE))
            }
            (None, true) => {
                let why = "no policy given: say --policy PATH, or run where";
                bail!(UsageError(format!("{why} {CONFIG_FILE} is")))
            }
        }
    }
}
