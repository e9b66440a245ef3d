//! What the command line asks for, before anything is created: the configuration, the policies and the variables of a
//! run.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use certs::variables;
use jail::{TRUST_DIR, runtime_dir};
use proxy::app::load_config;
use proxy::credential::PlaceholderKey;
use proxy::policy::files;
use rules::credential::Credential;
use rules::ids::SandboxId;
use rules::{LoadSources, SourceFile};
use serde_json::json;

use super::RunArgs;
use super::credential::{CredentialSelection, read_config};
use super::environment::is_set;
use super::prepare::{SOCKET, create_private_dir};

/// The files of a run, most of them generated.
pub(super) struct RunDraft {
    /// Relative paths start in its directory.
    pub(super) path: PathBuf,
    /// The configuration without listeners and sandbox.
    pub(super) settings: String,
    /// The part of it that the user has written or chosen.
    pub(super) declared: String,
    pub(super) selection: CredentialSelection,
    /// What `--policy` names.
    pub(super) sources: LoadSources,
    /// What the configuration and the options declare.
    credentials: Vec<Credential>,
    /// Variables that the command keeps.
    keep: Vec<String>,
}

impl RunDraft {
    /// Reads the files and options; `dir` is for the log and the admin socket.
    pub(super) fn build(args: &RunArgs, dir: &Path) -> anyhow::Result<Self> {
        let sources = files::read_paths(&args.policy)?;
        if sources.operator.is_some() {
            bail!("--policy takes policy files; use --config for credentials of a configuration");
        }
        let selection = CredentialSelection::build(&args.with, &args.credential, is_set)?;
        let (path, given) = match &args.config {
            None => (dir.join("run.toml"), String::new()),
            Some(config) => (std::path::absolute(config)?, read_config(config)?),
        };
        let declared = given + &selection.settings;
        let settings = declared.clone() + &generated_settings(args, dir)?;
        let shown = path.display().to_string();
        let operator = Some(SourceFile { path: shown, bytes: settings.clone().into_bytes() });
        let configuration = load_config(&LoadSources { operator, ..LoadSources::default() })?;
        let keep = args.env.clone();
        let credentials = configuration.credentials;
        Ok(RunDraft { path, settings, declared, selection, sources, credentials, keep })
    }

    /// Returns the files that credentials are made from.
    pub(super) fn credential_files(&self) -> Vec<PathBuf> {
        let base = self.path.parent().unwrap_or(Path::new(""));
        self.credentials.iter().flat_map(|one| one.source.files()).map(|file| base.join(file)).collect()
    }

    /// Returns the caller's variables that the proxy needs.
    pub(super) fn wanted_variables(&self) -> BTreeSet<String> {
        self.credentials.iter().flat_map(|one| one.source.variables()).map(str::to_owned).collect()
    }

    /// Returns the variables that the command gets besides the caller's. Those for credentials have placeholders, made
    /// with the key that the proxy keeps in the directory of the log.
    pub(super) fn variables(&self, id: &SandboxId, log: &Path) -> anyhow::Result<Vec<(String, String)>> {
        let trust = variables::variables(Path::new(TRUST_DIR))?;
        let mut all: Vec<(String, String)> =
            trust.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        all.push(("SANDBAR_SANDBOX".to_owned(), id.to_string()));
        all.push(("XDG_RUNTIME_DIR".to_owned(), runtime_dir().to_string_lossy().into_owned()));
        let kept = |name: &String| self.keep.contains(name);
        if !self.selection.placeholders.is_empty() {
            create_private_dir(log)?;
            let key = PlaceholderKey::open(log)?;
            for one in self.selection.placeholders.iter().filter(|one| !kept(&one.variable)) {
                let text = key.placeholder(id, &one.credential, &one.prefix);
                all.push((one.variable.clone(), text));
            }
        }
        let fixed = self.selection.variables.iter().filter(|(name, _)| !kept(name));
        all.extend(fixed.map(|(name, value)| (name.clone(), value.clone())));
        Ok(all)
    }

    /// Returns the names of the variables that presets and credentials set.
    pub(super) fn chosen_variables(&self) -> BTreeSet<String> {
        let placeholders = self.selection.placeholders.iter().map(|one| &one.variable);
        let all = placeholders.chain(self.selection.variables.keys());
        all.filter(|name| !self.keep.contains(name)).cloned().collect()
    }
}

/// Returns text as a TOML string.
pub(super) fn quoted(text: &str) -> String {
    json!(text).to_string() // a JSON string is also a TOML string
}

fn generated_settings(args: &RunArgs, dir: &Path) -> anyhow::Result<String> {
    let absolute = |path: &PathBuf| std::path::absolute(path).map(|path| quoted(&path.to_string_lossy()));
    let resolvers: Vec<String> =
        find_resolvers(args)?.iter().map(|address| quoted(&address.to_string())).collect();
    let roots: Result<Vec<String>, _> = args.roots.iter().map(absolute).collect();
    let roots = roots.context("cannot resolve the path of --roots")?;
    let at = |name: &str| quoted(&dir.join(name).to_string_lossy());
    let mut settings = String::new();
    writeln!(settings, "[log]\ndir = {}\n[admin]\nsocket = {}", at("log"), at(SOCKET))?;
    writeln!(settings, "[dns]\nupstreams = [{}]", resolvers.join(", "))?;
    writeln!(settings, "[upstream]\nroots = [{}]", roots.join(", "))?;
    Ok(settings)
}

fn find_resolvers(args: &RunArgs) -> anyhow::Result<Vec<SocketAddr>> {
    const FILE: &str = "/etc/resolv.conf";
    if !args.resolver.is_empty() {
        return Ok(args.resolver.clone());
    }
    let text = fs::read_to_string(FILE).unwrap_or_default();
    let resolvers: Vec<SocketAddr> = text.lines().filter_map(parse_nameserver).collect();
    if resolvers.is_empty() {
        bail!("no resolver in {FILE}: use --resolver ADDRESS:PORT");
    }
    Ok(resolvers)
}

fn parse_nameserver(line: &str) -> Option<SocketAddr> {
    let mut words = line.split_whitespace();
    if words.next()? != "nameserver" {
        return None;
    }
    let address: IpAddr = words.next()?.parse().ok()?;
    Some(SocketAddr::new(address, 53))
}
