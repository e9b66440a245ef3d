//! Reads policies from disk into [`LoadSources`]; nothing else in the proxy does.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rules::load::{MAX_FILE, MAX_LIST, list_files, policy_dir};
use rules::{LoadSources, SourceFile};
use sys::file;

use crate::report::UsageError;

/// Default name of the configuration file.
pub const CONFIG_FILE: &str = "sandbar.toml";

/// Reads policy files, directories of policy files, or a configuration with the policies it names.
pub fn read_paths(paths: &[PathBuf]) -> anyhow::Result<LoadSources> {
    let mut sources = LoadSources { generation: 1, ..LoadSources::default() };
    for path in paths {
        let _note = file::note_call(path);
        if path.file_name().is_some_and(|name| name == CONFIG_FILE) {
            add_config(&mut sources, path)?;
        } else if path.is_dir() && path.join(CONFIG_FILE).is_file() {
            add_config(&mut sources, &path.join(CONFIG_FILE))?;
        } else if path.is_dir() {
            sources.policies.extend(read_dir(path)?);
        } else {
            sources.policies.push(read_file(path, MAX_FILE)?);
        }
    }
    with_lists(sources)
}

/// Reads the configuration and the policies it names.
pub fn read_config(config: &Path) -> anyhow::Result<LoadSources> {
    let mut sources = LoadSources { generation: 1, ..LoadSources::default() };
    add_config(&mut sources, config)?;
    with_lists(sources)
}

/// Reads the configuration only: the instance's paths do not depend on its policies.
pub fn read_config_only(config: &Path) -> anyhow::Result<LoadSources> {
    Ok(LoadSources { operator: Some(read_file(config, MAX_FILE)?), ..LoadSources::default() })
}

fn add_config(sources: &mut LoadSources, config: &Path) -> anyhow::Result<()> {
    if sources.operator.is_some() {
        let shown = config.display();
        bail!(UsageError(format!("{shown}: a configuration was already given")));
    }
    let operator = read_file(config, MAX_FILE)?;
    if let Some(named) = policy_dir(&operator) {
        let dir = config.parent().unwrap_or(Path::new("")).join(named);
        sources.policies.extend(read_dir(&dir)?);
    }
    sources.operator = Some(operator);
    Ok(())
}

/// Reads every `*.toml` of a directory, sorted by name. Skips hidden entries, which belong to an editor or to a
/// mounted ConfigMap.
fn read_dir(dir: &Path) -> anyhow::Result<Vec<SourceFile>> {
    let shown = dir.display();
    let _note = file::note_call(dir);
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read the directory {shown}"))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot read the directory {shown}"))?.path();
        let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if !hidden && path.extension().is_some_and(|extension| extension == "toml") {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        bail!("{shown} holds no policy: it contains no *.toml file");
    }
    paths.sort();
    paths.iter().map(|path| read_file(path, MAX_FILE)).collect()
}

pub fn with_lists(mut sources: LoadSources) -> anyhow::Result<LoadSources> {
    let named: Vec<String> = sources.policies.iter().flat_map(list_files).collect();
    for path in named {
        let read = read_list(Path::new(&path));
        sources.lists.insert(path, read);
    }
    Ok(sources)
}

/// Reads a list. Checks its size first, so that a huge file is not read only to be rejected.
fn read_list(path: &Path) -> Result<Vec<u8>, String> {
    let note = file::note_call(path);
    let size = fs::metadata(path).map(|found| found.len());
    drop(note);
    if size.is_ok_and(|size| size > MAX_LIST as u64) {
        return Err(format!("it is larger than {MAX_LIST} bytes"));
    }
    let read = read_file(path, MAX_LIST).map(|file| file.bytes);
    read.map_err(|error| error.root_cause().to_string())
}

/// Reads a regular file up to `limit` bytes and one more, which tells the compiler that the file is too large.
pub fn read_file(path: &Path, limit: usize) -> anyhow::Result<SourceFile> {
    let shown = path.display();
    let bytes = file::read_regular(path, limit as u64).with_context(|| format!("cannot read {shown}"))?;
    Ok(SourceFile { path: shown.to_string(), bytes })
}
