//! `--credential` and `--with`: turns them into entries of the configuration, policies, and variables of the command.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use rules::SourceFile;
use rules::ids::CredentialName;
use serde_json::json;

use super::preset::{Preset, PresetCredential, inline};
use crate::UsageError;

/// One `--credential NAME=SOURCE[,host=HOST...][,FORM]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CredentialArg {
    name: CredentialName,
    source: SourceArg,
    hosts: Vec<String>,
    form: Option<FormArg>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum SourceArg {
    Env(String),
    File(String),
    /// A program and its arguments.
    Command(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum FormArg {
    Bearer,
    Basic(String),
    Header(String),
}

/// What the options add to a run.
#[derive(Debug, Default)]
pub(super) struct CredentialSelection {
    /// `[[credential]]` entries.
    pub(super) settings: String,
    pub(super) policies: Vec<SourceFile>,
    /// Variables of the command with fixed values.
    pub(super) variables: BTreeMap<String, String>,
    pub(super) placeholders: Vec<PlaceholderVariable>,
}

/// A variable of the command in which a tool looks for a credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlaceholderVariable {
    pub(super) variable: String,
    pub(super) credential: CredentialName,
    /// What the credential begins with, for tools that check.
    pub(super) prefix: String,
}

impl std::str::FromStr for CredentialArg {
    type Err = String;

    /// Parses an argument; the error does not echo the text, which may be a pasted secret.
    fn from_str(text: &str) -> Result<Self, String> {
        let example = "such as `anthropic=env:ANTHROPIC_API_KEY`";
        let (name, rest) = text.split_once('=').ok_or(format!("write NAME=SOURCE, {example}"))?;
        let name = CredentialName::parse(name)
            .map_err(|_| format!("that is not a name; write NAME=SOURCE, {example}"))?;
        let mut parts = rest.split(',');
        let mut source = parts.next().unwrap_or_default().to_owned();
        let (mut hosts, mut form) = (Vec::new(), None);
        for part in parts {
            let given = match part.split_once('=') {
                Some(("host", host)) => {
                    hosts.push(host.to_owned());
                    continue;
                }
                Some(("header", header)) => FormArg::Header(header.to_owned()),
                Some(("basic", user)) => FormArg::Basic(user.to_owned()),
                None if part == "bearer" => FormArg::Bearer,
                // Paths and arguments may contain commas.
                Some(_) | None if hosts.is_empty() && form.is_none() => {
                    source = format!("{source},{part}");
                    continue;
                }
                Some(_) | None => {
                    return Err(
                        "after the source write `host=HOST`, `header=FIELD`, `basic=USER` or `bearer`"
                            .to_owned(),
                    );
                }
            };
            if form.replace(given).is_some() {
                return Err("a credential has one form: `header=FIELD`, `basic=USER` or `bearer`".to_owned());
            }
        }
        Ok(CredentialArg { name, source: parse_source(&source)?, hosts, form })
    }
}

fn parse_source(text: &str) -> Result<SourceArg, String> {
    let known =
        "a source is `env:VARIABLE`, `file:PATH` or `command:PROGRAM ARGUMENT ...`, never the secret itself";
    let (kind, rest) = text.split_once(':').ok_or(known)?;
    if rest.trim().is_empty() {
        return Err(known.to_owned());
    }
    match kind {
        "env" => Ok(SourceArg::Env(rest.to_owned())),
        "file" => Ok(SourceArg::File(rest.to_owned())),
        "command" => Ok(SourceArg::Command(rest.split_whitespace().map(str::to_owned).collect())),
        _ => Err(known.to_owned()),
    }
}

impl SourceArg {
    /// The key of a `[[credential]]` and its value.
    fn setting(&self) -> anyhow::Result<String> {
        Ok(match self {
            SourceArg::Env(variable) => format!("env = {}", json!(variable)),
            SourceArg::File(path) => {
                let path = std::path::absolute(path).context("cannot resolve the path of a credential")?;
                format!("file = {}", json!(path.to_string_lossy()))
            }
            SourceArg::Command(words) => format!("command = {}", json!(words)),
        })
    }
}

impl FormArg {
    fn setting(&self) -> String {
        match self {
            FormArg::Basic(user) => format!("{{ basic = {{ user = {} }} }}", json!(user)),
            FormArg::Bearer => "\"bearer\"".to_owned(),
            FormArg::Header(name) => format!("{{ header = {} }}", json!(name)),
        }
    }
}

impl CredentialSelection {
    /// Reads the options; `is_set` tells whether a variable of the caller has a value.
    pub(super) fn build(
        with: &[String],
        given: &[CredentialArg],
        is_set: impl Fn(&str) -> bool,
    ) -> anyhow::Result<Self> {
        let mut selection = CredentialSelection::default();
        let mut names = BTreeSet::new();
        for one in given {
            if !names.insert(one.name.as_str()) {
                return Err(UsageError(format!("--credential {} is given twice", one.name)).into());
            }
        }
        let presets = select_presets(with, given)?;
        for (at, preset) in presets.iter().enumerate() {
            let path = format!("--with {}", preset.name);
            selection.policies.push(SourceFile { path, bytes: preset.policy().into_bytes() });
            selection.variables.extend(preset.variables.clone());
            let known = |one: &PresetCredential| {
                presets
                    .iter()
                    .take(at)
                    .flat_map(|earlier| &earlier.credential)
                    .any(|other| other.name == one.name)
            };
            for credential in preset.credential.iter().filter(|one| !known(one)) {
                let source = source_of(preset, credential, given, &is_set)?;
                let form = credential.form.as_ref().map(inline);
                selection.add(&credential.name, &source, form, &credential.hosts)?;
                let name = CredentialName::parse(credential.source_name());
                let name = name.with_context(|| format!("preset `{}` is malformed", preset.name))?;
                for variable in &credential.variables {
                    selection.expect_in(variable, &name, &credential.placeholder);
                }
            }
        }
        for one in given.iter().filter(|one| !one.hosts.is_empty()) {
            selection.add_custom(one)?;
        }
        Ok(selection)
    }

    /// Adds a credential with hosts of its own, and a rule for them.
    fn add_custom(&mut self, given: &CredentialArg) -> anyhow::Result<()> {
        let name = given.name.as_str();
        self.add(name, &given.source, given.form.as_ref().map(FormArg::setting), &given.hosts)?;
        if let SourceArg::Env(variable) = &given.source {
            self.expect_in(variable, &given.name, "");
        }
        let rule = json!(format!("--credential {name}"));
        let text = format!(
            "name = {}\n[[allow]]\nname = {rule}\nhosts = {}\ncredential = {}\n",
            json!(format!("credential-{name}")),
            json!(given.hosts),
            json!(name)
        );
        self.policies.push(SourceFile { path: format!("--credential {name}"), bytes: text.into_bytes() });
        Ok(())
    }

    fn add(
        &mut self,
        name: &str,
        source: &SourceArg,
        form: Option<String>,
        hosts: &[String],
    ) -> anyhow::Result<()> {
        writeln!(self.settings, "[[credential]]\nname = {}\n{}", json!(name), source.setting()?)?;
        if let Some(form) = form {
            writeln!(self.settings, "form = {form}")?;
        }
        writeln!(self.settings, "hosts = {}", json!(hosts))?;
        Ok(())
    }

    fn expect_in(&mut self, variable: &str, credential: &CredentialName, prefix: &str) {
        self.placeholders.push(PlaceholderVariable {
            variable: variable.to_owned(),
            credential: credential.clone(),
            prefix: prefix.to_owned(),
        });
    }
}

/// Returns the presets of `--with`, those that they name, and those of `--credential` without hosts, each once.
fn select_presets(with: &[String], given: &[CredentialArg]) -> anyhow::Result<Vec<Preset>> {
    let mut chosen: Vec<(String, Preset)> = Vec::new();
    let mut wanted: Vec<String> = with.iter().rev().cloned().collect();
    while let Some(entry) = wanted.pop() {
        if chosen.iter().any(|(known, _)| *known == entry) {
            continue;
        }
        let preset = Preset::find(&entry)?;
        if chosen.iter().any(|(_, known)| known.name == preset.name) {
            return Err(UsageError(format!("preset `{}` is given with two values", preset.name)).into());
        }
        wanted.extend(preset.with.iter().rev().cloned());
        chosen.push((entry, preset));
    }
    let mut presets: Vec<Preset> = chosen.into_iter().map(|(_, preset)| preset).collect();
    for one in given.iter().filter(|one| one.hosts.is_empty()) {
        let name = one.name.as_str();
        let declares = |preset: &Preset| preset.credential.iter().any(|known| known.source_name() == name);
        if let Some(form) = &one.form {
            let shown = form.setting();
            return Err(UsageError(format!("--credential {name}: the form {shown} needs host=HOST")).into());
        }
        if presets.iter().any(declares) {
            continue;
        }
        let Some(preset) = Preset::with_credential(name)? else {
            let why = "needs host=HOST, because no preset has a credential of this name";
            return Err(UsageError(format!("--credential {name} {why}")).into());
        };
        presets.push(preset);
    }
    Ok(presets)
}

/// Returns where the value of a preset's credential comes from.
fn source_of(
    preset: &Preset,
    credential: &PresetCredential,
    given: &[CredentialArg],
    is_set: impl Fn(&str) -> bool,
) -> anyhow::Result<SourceArg> {
    let name = credential.source_name();
    if let Some(one) = given.iter().find(|one| one.name.as_str() == name && one.hosts.is_empty()) {
        return Ok(one.source.clone());
    }
    let owner = preset.credential.iter().find(|one| one.name == name);
    let variables = owner.map(|one| one.variables.as_slice()).unwrap_or_default();
    let set = variables.iter().find(|variable| is_set(variable));
    set.map(|variable| SourceArg::Env(variable.clone())).ok_or_else(|| {
        let shown = variables.join(" or ");
        let help = format!("set {shown}, or use --credential {name}=file:PATH");
        UsageError(format!("preset `{}` needs a credential: {help}", preset.name)).into()
    })
}

/// Reads the file of `--config`: a configuration with nothing but what a run can use.
pub(super) fn read_config(path: &Path) -> anyhow::Result<String> {
    /// Sections that a run takes. The rest is decided by the command line, or belongs to an instance that serves many.
    const SECTIONS: [&str; 4] = ["credential", "limits", "quota", "secret_pattern"];
    let shown = path.display();
    let file = proxy::policy::files::read_config_only(path)?;
    let bytes = file.operator.map(|file| file.bytes).unwrap_or_default();
    let text = String::from_utf8(bytes).with_context(|| format!("{shown} is not UTF-8"))?;
    // What is not TOML is reported by the compiler, with its place.
    let table = text.parse::<toml::Table>().unwrap_or_default();
    if let Some(other) = table.keys().find(|key| !SECTIONS.contains(&key.as_str())) {
        let known = SECTIONS.join("`, `");
        return Err(UsageError(format!("{shown}: `run` does not take `{other}`, only `{known}`")).into());
    }
    Ok(text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<CredentialArg, String> {
        text.parse()
    }

    #[test]
    fn an_argument_is_a_name_a_source_hosts_and_a_form() {
        let one = parse("x=command:pass show a,b,host=a.example,host=*.b.example,basic=me").unwrap();
        let words = ["pass", "show", "a,b"].map(str::to_owned).to_vec();
        assert_eq!(one.source, SourceArg::Command(words));
        assert_eq!(one.hosts, ["a.example", "*.b.example"]);
        assert_eq!(one.form, Some(FormArg::Basic("me".to_owned())));
        for wrong in [
            "sk-live-0123456789abcdef",
            "x",
            "x=",
            "x=sk-live-0123456789abcdef",
            "x=env:",
            "x=vault:secret",
            "no name=env:A",
            "x=env:A,host=a.example,colour=red",
            "x=env:A,host=a.example,header=b,bearer",
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(!error.contains("sk-live"), "{error}");
        }
    }

    fn build(with: &[&str], given: &[&str], set: &[&str]) -> anyhow::Result<CredentialSelection> {
        let with: Vec<String> = with.iter().map(|one| (*one).to_owned()).collect();
        let given: Vec<CredentialArg> = given.iter().map(|one| one.parse().unwrap()).collect();
        CredentialSelection::build(&with, &given, |name| set.contains(&name))
    }

    #[test]
    fn presets_and_credentials_become_one_selection() {
        let one = build(&["github", "claude-code"], &["anthropic=file:/k"], &["GITHUB_TOKEN"]).unwrap();
        let policies: Vec<&str> = one.policies.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(policies, ["--with github", "--with claude-code", "--with anthropic"]);
        assert_eq!(one.settings.matches("env = \"GITHUB_TOKEN\"").count(), 2, "{}", one.settings);
        assert!(one.settings.contains("file = \"/k\""), "{}", one.settings);
        let variables: Vec<&str> = one.placeholders.iter().map(|one| one.variable.as_str()).collect();
        assert_eq!(variables, ["GH_TOKEN", "GITHUB_TOKEN", "ANTHROPIC_API_KEY"]);
        assert_eq!(one.variables["DISABLE_TELEMETRY"], "1");
        let implied = build(&[], &["openai=env:MINE"], &[]).unwrap();
        assert_eq!(implied.policies[0].path, "--with openai");
        let custom = build(&[], &["mine=env:MINE,host=a.example,header=x-key"], &[]).unwrap();
        assert!(custom.settings.contains("form = { header = \"x-key\" }"), "{}", custom.settings);
        assert_eq!(custom.placeholders[0].variable, "MINE");
    }

    #[test]
    fn mistakes_say_what_to_do() {
        for (with, given, wanted) in [
            (&["openai"][..], &[][..], "set OPENAI_API_KEY, or use --credential openai=file:PATH"),
            (&[], &["mine=env:A"], "needs host=HOST"),
            (&[], &["openai=env:A,bearer"], "needs host=HOST"),
            (&[], &["openai=env:A", "openai=env:B"], "given twice"),
            (&["github-write=a/b", "github-write=a/c"], &["github=env:A"], "two values"),
        ] {
            let error = build(with, given, &[]).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
