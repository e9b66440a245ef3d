//! Presets: ready-made hosts, forms and variables of services. They are the files of `deploy/presets`, compiled in.

use std::collections::BTreeMap;

use anyhow::Context;
use rules::load::problem::nearest;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::UsageError;
use crate::terminal::{HEAD, paint, print_json};

macro_rules! presets {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../deploy/presets/", $name, ".toml")))),*]
    };
}
/// The presets, sorted by name.
const FILES: &[(&str, &str)] = presets![
    "anthropic",
    "azure-openai",
    "brave-search",
    "claude-code",
    "codex",
    "cohere",
    "datadog",
    "deepseek",
    "fireworks",
    "gemini",
    "github",
    "github-write",
    "gitlab",
    "groq",
    "huggingface",
    "linear",
    "mistral",
    "notion",
    "openai",
    "openrouter",
    "sentry",
    "slack",
    "together",
    "xai",
];

/// A file of `deploy/presets`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Preset {
    #[serde(skip)]
    pub(super) name: String,
    /// What it opens, in a few words.
    pub(super) about: String,
    /// What must be given as `NAME=VALUE`, such as `RESOURCE`; the preset writes it as `$RESOURCE`.
    pub(super) parameter: Option<String>,
    /// Presets that belong to it.
    #[serde(default)]
    pub(super) with: Vec<String>,
    /// Requests that it opens, to show what it is for.
    pub(super) allows: Vec<String>,
    /// Requests near them that it does not open.
    pub(super) refuses: Vec<String>,
    /// Variables of the command that it sets.
    #[serde(default)]
    pub(super) variables: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) credential: Vec<PresetCredential>,
    /// Rules, as in a policy.
    #[serde(default)]
    allow: Vec<toml::Value>,
    #[serde(default)]
    deny: Vec<toml::Value>,
}

/// A credential without its source, which is the user's.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PresetCredential {
    pub(super) name: String,
    /// The credential of the preset whose source it shares.
    pub(super) source: Option<String>,
    /// Variables in which tools look for it, and outside the source if `--credential` names no other.
    #[serde(default)]
    pub(super) variables: Vec<String>,
    /// What it begins with, for tools that check.
    #[serde(default)]
    pub(super) placeholder: String,
    /// As in the configuration.
    pub(super) form: Option<toml::Value>,
    pub(super) hosts: Vec<String>,
}

impl PresetCredential {
    /// The name by which `--credential` gives its source.
    pub(super) fn source_name(&self) -> &str {
        self.source.as_deref().unwrap_or(&self.name)
    }
}

impl Preset {
    fn parse(name: &str, text: &str, value: Option<&str>) -> anyhow::Result<Self> {
        let filled = match value {
            None => text.to_owned(),
            Some(value) => fill(text, value)?,
        };
        let preset: Preset =
            toml::from_str(&filled).with_context(|| format!("preset `{name}` is malformed"))?;
        Ok(Preset { name: name.to_owned(), ..preset })
    }

    /// Returns the preset that `--with` names, as `NAME` or `NAME=VALUE`.
    pub(super) fn find(entry: &str) -> anyhow::Result<Self> {
        let (name, value) = match entry.split_once('=') {
            None => (entry, None),
            Some((name, value)) => (name, Some(value)),
        };
        let Some((_, text)) = FILES.iter().find(|(known, _)| *known == name) else {
            let near = nearest(name, FILES.iter().map(|(known, _)| *known));
            let help = near.map_or("`sandbar run --list-presets` lists them".to_owned(), |near| {
                format!("did you mean `{near}`?")
            });
            return Err(UsageError(format!("no preset is called `{name}`; {help}")).into());
        };
        let preset = Preset::parse(name, text, None)?;
        match (&preset.parameter, value) {
            (None, None) => Ok(preset),
            (Some(_), Some(value)) => Preset::parse(name, text, Some(value)),
            (Some(parameter), None) => {
                Err(UsageError(format!("preset `{name}` needs a value: --with {name}={parameter}")).into())
            }
            (None, Some(_)) => Err(UsageError(format!("preset `{name}` takes no value")).into()),
        }
    }

    /// Returns the preset without a parameter that declares a credential.
    pub(super) fn with_credential(name: &str) -> anyhow::Result<Option<Self>> {
        for (preset, text) in FILES {
            let preset = Preset::parse(preset, text, None)?;
            let declares = preset.credential.iter().any(|one| one.source_name() == name);
            if declares && preset.parameter.is_none() {
                return Ok(Some(preset));
            }
        }
        Ok(None)
    }

    /// Returns the name of its policy.
    pub(super) fn policy_name(&self) -> String {
        format!("preset-{}", self.name)
    }

    /// Returns its rules as a policy.
    pub(super) fn policy(&self) -> String {
        let mut text = format!("name = {}\n", json!(self.policy_name()));
        for (table, rules) in [("allow", &self.allow), ("deny", &self.deny)] {
            for rule in rules {
                text += &format!("\n[[{table}]]\n");
                for (key, value) in rule.as_table().into_iter().flatten() {
                    text += &format!("{key} = {}\n", inline(value));
                }
            }
        }
        text
    }
}

/// Fills in the parameter of a preset. Its name stands in the text itself, as `parameter = "NAME"`.
fn fill(text: &str, value: &str) -> anyhow::Result<String> {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-._/".contains(letter);
    let whole = value.split('/').all(|part| !part.is_empty() && !part.starts_with('.'));
    if !whole || !value.chars().all(allowed) {
        return Err(UsageError(format!("`{value}` cannot be the value of a preset")).into());
    }
    #[derive(Deserialize)]
    struct Head {
        parameter: String,
    }
    let head: Head = toml::from_str(text)?;
    if head.parameter.split('/').count() != value.split('/').count() {
        return Err(UsageError(format!("`{value}` is not of the form {}", head.parameter)).into());
    }
    Ok(text.replace(&format!("${}", head.parameter), value))
}

/// Writes a value as TOML in one line.
pub(super) fn inline(value: &toml::Value) -> String {
    let join = |values: Vec<String>| values.join(", ");
    match value {
        toml::Value::String(text) => json!(text).to_string(), // a JSON string is also a TOML string
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        toml::Value::Boolean(whether) => whether.to_string(),
        toml::Value::Datetime(time) => time.to_string(),
        toml::Value::Array(values) => format!("[{}]", join(values.iter().map(inline).collect())),
        toml::Value::Table(table) => {
            let entry = |(key, value): (&String, &toml::Value)| format!("{} = {}", json!(key), inline(value));
            format!("{{ {} }}", join(table.iter().map(entry).collect()))
        }
    }
}

/// Prints the presets.
pub(super) fn list(json: bool) -> anyhow::Result<()> {
    let mut listed = Vec::new();
    for (name, text) in FILES {
        let preset = Preset::parse(name, text, None)?;
        let variables: Vec<&String> = preset.credential.iter().flat_map(|one| &one.variables).collect();
        if json {
            listed.push(json!({
                "name": name,
                "about": preset.about,
                "parameter": preset.parameter,
                "with": preset.with,
                "variables": variables,
                "allows": preset.allows,
                "refuses": preset.refuses,
            }));
            continue;
        }
        let shown = preset.parameter.map_or((*name).to_owned(), |parameter| format!("{name}={parameter}"));
        anstream::println!("{} {}", paint(HEAD, format!("{shown:<23}")), preset.about);
    }
    if json {
        print_json(&Value::from(listed));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rules::load::problem::Problem;
    use rules::{LoadSources, SourceFile, compile};

    use super::*;

    #[test]
    fn presets_are_sorted_and_every_file_is_one() {
        assert!(FILES.is_sorted_by(|one, other| one.0 < other.0));
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/presets");
        let mut files: Vec<String> = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        files.sort();
        assert_eq!(files, FILES.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>());
    }

    #[test]
    fn a_preset_is_found_by_its_name_and_value() {
        for (entry, wanted) in [
            ("openai", None),
            ("opnai", Some("did you mean `openai`?")),
            ("github-write=acme/site", None),
            ("github-write", Some("--with github-write=OWNER/REPO")),
            ("github-write=acme", Some("not of the form OWNER/REPO")),
            ("github-write=acme/**", Some("cannot be the value")),
            ("github-write=../x", Some("cannot be the value")),
            ("azure-openai=a\"b", Some("cannot be the value")),
            ("openai=x", Some("takes no value")),
        ] {
            let error = Preset::find(entry).err().map(|error| format!("{error:#}"));
            match (wanted, error) {
                (None, None) => {}
                (Some(wanted), Some(error)) => assert!(error.contains(wanted), "{entry}: {error}"),
                (wanted, error) => panic!("{entry}: {error:?} instead of {wanted:?}"),
            }
        }
        let policy = Preset::find("github-write=acme/site").unwrap().policy();
        assert!(policy.contains("/acme/site.git/git-receive-pack") && !policy.contains('$'), "{policy}");
    }

    /// Loads a preset as `sandbar run` does, with its examples as tests of the policy.
    fn load(preset: &Preset, value: &str) -> Result<(), String> {
        let with = preset.with.iter().map(|name| Preset::find(name).unwrap());
        let presets: Vec<Preset> = with.chain([preset.clone()]).collect();
        let mut settings = "[log]\ndir = \"log\"\n[dns]\nupstreams = [\"127.0.0.1:53\"]\n".to_owned();
        let mut sources = LoadSources { generation: 1, ..LoadSources::default() };
        let mut names = Vec::new();
        for one in &presets {
            for credential in &one.credential {
                let form = credential.form.as_ref().map(|form| format!("form = {}\n", inline(form)));
                let name = json!(credential.name);
                settings += &format!("[[credential]]\nname = {name}\nenv = \"SOME_VARIABLE\"\n");
                settings += &format!("hosts = {}\n{}", json!(credential.hosts), form.unwrap_or_default());
            }
            let mut text = one.policy();
            if one.name == preset.name {
                for (expect, requests) in [("allow", &one.allows), ("deny", &one.refuses)] {
                    for request in requests {
                        let (method, url) = request.split_once(' ').unwrap();
                        text += &format!("\n[[test]]\nexpect = {}\n", json!(expect));
                        text += &format!("host = {}\nmethod = {}\n", json!(url), json!(method));
                    }
                }
            }
            names.push(one.policy_name());
            sources.policies.push(SourceFile { path: one.policy_name(), bytes: text.into_bytes() });
        }
        settings +=
            "[[sandbox]]\nid = \"one\"\ntenant = \"local\"\nenvironment = \"local\"\nbase = \"user\"\n";
        settings += &format!("policies = {}\n", json!(names));
        sources.operator = Some(SourceFile { path: "run.toml".to_owned(), bytes: settings.into_bytes() });
        let why = |problems: Vec<Problem>| format!("{value}: {problems:#?}");
        compile(&sources, &[]).map(drop).map_err(why)
    }

    #[test]
    fn every_preset_loads_and_decides_as_it_says() {
        for (name, text) in FILES {
            let parameter = Preset::parse(name, text, None).unwrap().parameter;
            let value = parameter.map(|parameter| format!("={}", parameter.to_lowercase()));
            let preset = Preset::find(&format!("{name}{}", value.unwrap_or_default())).unwrap();
            assert!(!preset.allows.is_empty() && !preset.refuses.is_empty(), "{name}");
            load(&preset, name).unwrap();
            // The examples are tests that can fail.
            let (allows, refuses) = (preset.refuses.clone(), preset.allows.clone());
            assert!(load(&Preset { allows, refuses, ..preset }, name).is_err(), "{name}");
        }
    }
}
