//! Arguments that select policies.

use std::path::{Path, PathBuf};

use anyhow::bail;
use proxy::policy::files::{self, CONFIG_FILE};
use rules::LoadSources;
use rules::load::MAX_FILE;

use super::UsageError;

/// Where to read policies from.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PolicyArgs {
    /// Policy file, or directory of policy files; repeatable
    #[arg(long = "policy", short = 'p', value_name = "PATH")]
    policies: Vec<PathBuf>,
    /// Configuration file; without --policy it also names the policies
    #[arg(long, short = 'c', value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Policies given as positional arguments or as options.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PathArgs {
    /// Policy files, directories of them, or a sandbar.toml [default: ./sandbar.toml]
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
    /// The configuration file, given or default.
    pub(crate) fn config(&self) -> PathBuf {
        self.config.clone().unwrap_or_else(|| PathBuf::from(CONFIG_FILE))
    }

    /// Whether [`PolicyArgs::read`] has something to read.
    pub(crate) fn is_given(&self) -> bool {
        self.config.is_some() || !self.policies.is_empty() || Path::new(CONFIG_FILE).is_file()
    }

    /// Reads the policies that the arguments or the `sandbar.toml` in the current directory name.
    pub(crate) fn read(&self) -> anyhow::Result<LoadSources> {
        match (&self.config, self.policies.is_empty()) {
            (None, false) => files::read_paths(&self.policies),
            (Some(config), false) => {
                let operator = Some(files::read_file(config, MAX_FILE)?);
                files::with_lists(LoadSources { operator, ..files::read_paths(&self.policies)? })
            }
            (Some(config), true) => files::read_config(config),
            (None, true) if Path::new(CONFIG_FILE).is_file() => files::read_config(Path::new(CONFIG_FILE)),
            (None, true) => {
                let why = "no policy given: use --policy PATH, or run in a directory with a";
                bail!(UsageError(format!("{why} {CONFIG_FILE}")))
            }
        }
    }
}
