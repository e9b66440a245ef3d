//! Where an instance's rules come from, to be read now and after every change.

use std::path::{Path, PathBuf};

use rules::{LoadSources, SourceFile};

use crate::policy::files;

/// The files of an instance.
#[derive(Clone, Debug)]
pub enum PolicySource {
    /// An operator's file and the policies it names.
    ConfigFile(PathBuf),
    /// Settings made up for one run, and policies that were named on the command line.
    Run(Box<RunFiles>),
}

/// What `sandbar run` is told instead of by an operator's file.
#[derive(Clone, Debug)]
pub struct RunFiles {
    /// Where relative paths begin, and what the settings are called in messages.
    pub path: PathBuf,
    /// The sandbox, as TOML writes it.
    pub id: String,
    /// Everything but the `[[sandbox]]`.
    pub settings: String,
    /// The `[[sandbox]]` without its `policies`.
    pub sandbox: String,
    /// Read again and again.
    pub policies: Vec<PathBuf>,
    /// Read once: the command line, and files that the command could write.
    pub once: LoadSources,
}

impl PolicySource {
    pub fn read(&self) -> anyhow::Result<LoadSources> {
        match self {
            PolicySource::ConfigFile(config) => files::read_config(config),
            PolicySource::Run(run) => run.read(),
        }
    }

    /// The operator's file, or what stands for it: paths in it begin where it is.
    pub fn path(&self) -> &Path {
        match self {
            PolicySource::ConfigFile(config) => config,
            PolicySource::Run(run) => &run.path,
        }
    }

    /// Whether there is such a file, or should be: settings that are made up are none.
    pub fn is_file(&self, path: &Path) -> bool {
        match self {
            PolicySource::ConfigFile(_) => true,
            PolicySource::Run(run) => path != run.path,
        }
    }
}

impl RunFiles {
    fn read(&self) -> anyhow::Result<LoadSources> {
        let mut sources = files::read_paths(&self.policies)?;
        sources.policies.extend(self.once.policies.iter().cloned());
        sources.lists.extend(self.once.lists.clone());
        let names: Vec<String> = sources.policies.iter().filter_map(policy_name).collect();
        let names = serde_json::json!(names); // a list of JSON is one of TOML
        let text = format!("{}{}policies = {names}\n", self.settings, self.sandbox);
        let path = self.path.display().to_string();
        sources.operator = Some(SourceFile { path, bytes: text.into_bytes() });
        Ok(sources)
    }
}

/// What a policy calls itself; what is wrong with one that does not say so is told when it is compiled.
fn policy_name(policy: &SourceFile) -> Option<String> {
    let text = std::str::from_utf8(&policy.bytes).ok()?;
    let table: toml::Table = text.parse().ok()?;
    table.get("name").and_then(toml::Value::as_str).map(str::to_owned)
}
