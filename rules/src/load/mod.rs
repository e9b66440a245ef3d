//! Compiles the bytes of the files to a `RuleSet`, completely or not at all (P9). The caller reads the files.

mod configuration;
mod credential;
mod credential_document;
mod credential_source;
mod document;
mod entry;
mod grants;
mod lint;
mod list;
mod log;
mod memory;
mod policy_builder;
mod policy_test;
pub mod problem;
mod read;
mod sandboxes;
mod schema;
mod suspicion;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

pub use self::configuration::read_configuration;
pub use self::list::MAX_LIST;
pub use self::schema::{configuration_schema, policy_schema};

use self::document::{ConfigurationDocument, PolicyDocument};
use self::policy_builder::PolicyBuilder;
use self::problem::{Problem, ProblemKind, Problems, SourceLocation, SourceText};
use crate::budget::{BudgetKind, Budgets};
use crate::facts::HttpMethod;
use crate::ids::{PolicyName, SandboxId};
use crate::pattern::HostPattern;
use crate::policy::{Policy, PolicyDigest};
use crate::ruleset::{EnforcementMode, RuleSet};
use crate::url_path::PathPattern;

/// Largest policy or configuration file, in bytes.
pub const MAX_FILE: usize = 4 << 20;
/// The policy name of compiled grants.
pub const GRANTS_POLICY: &str = "grants";

/// The input of one load.
#[derive(Clone, Debug, Default)]
pub struct LoadSources {
    /// The configuration; without it each policy gets a sandbox with the policy's name.
    pub operator: Option<SourceFile>,
    pub policies: Vec<SourceFile>,
    /// The list files of the policies by [`list_path`], or the error text of reading one.
    pub lists: BTreeMap<String, Result<Vec<u8>, String>>,
    /// The generation number of this load.
    pub generation: u64,
    /// Sandbar's own listen addresses, which it never dials, whatever a rule allows.
    pub own: Vec<SocketAddr>,
}

impl LoadSources {
    /// Returns the digest of all file content and paths; a reload with the same digest changes nothing.
    pub fn digest(&self) -> PolicyDigest {
        let files = self.operator.iter().chain(&self.policies);
        let files = files.flat_map(|file| [file.path.as_bytes(), &file.bytes]);
        let lists = self.lists.iter().flat_map(|(path, list)| match list {
            Ok(bytes) => [path.as_bytes(), b"read", bytes.as_slice()],
            Err(why) => [path.as_bytes(), b"missing", why.as_bytes()],
        });
        hash_parts(files.chain(lists))
    }

    fn list_bytes(&self, path: &str) -> Option<&[u8]> {
        self.lists.get(path).and_then(|list| list.as_deref().ok())
    }
}

/// One file, with the path that messages show.
#[derive(Clone, Debug)]
pub struct SourceFile {
    pub path: String,
    pub bytes: Vec<u8>,
}

/// A temporary permission from an operator; while it lasts it acts as an allow rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub id: String,
    pub sandbox: SandboxId,
    pub host: HostPattern,
    pub methods: Option<Vec<HttpMethod>>,
    pub paths: Option<Vec<PathPattern>>,
    /// Limits on the traffic that the grant allows.
    pub budgets: Budgets,
}

/// The state that depends on time. It is input like the files, so that deciding needs no clock: the start and
/// end of a grant, and the end of a sandbox's lifetime, each produce a new generation of the rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimedState {
    pub grants: Vec<Grant>,
    /// Sandboxes that reached their lifetime.
    pub ended: BTreeSet<SandboxId>,
}

/// Compiles all files.
///
/// # Errors
///
/// Returns every error found, up to [`problem::MAX_PROBLEMS`]; nothing is loaded then.
pub fn compile(sources: &LoadSources, grants: &[Grant]) -> Result<RuleSet, Vec<Problem>> {
    compile_with(None, sources, grants)
}

/// Compiles all files like [`compile`], but reuses each policy of `before` with unchanged bytes: a change to one
/// file does not parse the million names of another again.
///
/// # Errors
///
/// As [`compile`].
pub fn recompile(before: &RuleSet, sources: &LoadSources, grants: &[Grant]) -> Result<RuleSet, Vec<Problem>> {
    compile_with(Some(before), sources, grants)
}

fn compile_with(
    before: Option<&RuleSet>,
    sources: &LoadSources,
    grants: &[Grant],
) -> Result<RuleSet, Vec<Problem>> {
    let mut problems = Problems::default();
    let (policies, policy_warnings) = compile_policies(before, sources, &mut problems);
    let declared = match &sources.operator {
        Some(file) => sandboxes::read_sandboxes(file, &policies, &mut problems),
        None => Some(sandboxes::lone_sandboxes(&policies)),
    };
    problems.sort();
    let files = hash_sources(sources, &policies);
    let rules = match declared {
        Some((sandboxes, layers)) if problems.errors.is_empty() => RuleSet {
            generation: sources.generation,
            digest: files,
            files,
            sandboxes,
            layers,
            lifetimes: policies.values().any(has_lifetime),
            policies,
            ended: BTreeSet::new(),
            own: sources.own.clone().into(),
            warnings: problems.warnings,
            policy_warnings,
            mode: EnforcementMode::Enforcing,
        },
        _ => return Err(problems.errors),
    };
    match grants {
        [] => Ok(rules),
        grants => rules.with_timed_state(
            &TimedState { grants: grants.into(), ..TimedState::default() },
            sources.generation,
        ),
    }
}

impl RuleSet {
    /// Returns the same files compiled under another generation, with the given timed state.
    ///
    /// # Errors
    ///
    /// Returns the errors of the grants.
    pub fn with_timed_state(&self, timed: &TimedState, generation: u64) -> Result<RuleSet, Vec<Problem>> {
        let mut problems = Problems::default();
        let mut rules = RuleSet { generation, ended: timed.ended.clone(), ..self.clone() };
        for (id, layers) in &mut rules.layers {
            layers.sandbox.retain(|policy| policy.name.as_str() != GRANTS_POLICY);
            layers.sandbox.extend(grants::compile_grants(id, &timed.grants, &mut problems));
        }
        let granted: Vec<String> = timed.grants.iter().map(|grant| format!("{grant:?}")).collect();
        rules.digest = match granted.as_slice() {
            [] => self.files,
            granted => {
                hash_parts([&self.files.0[..]].into_iter().chain(granted.iter().map(String::as_bytes)))
            }
        };
        if problems.errors.is_empty() { Ok(rules) } else { Err(problems.errors) }
    }
}

/// Returns the paths of a policy's list files, for the caller to read; [`compile`] reports errors.
pub fn list_files(policy: &SourceFile) -> Vec<String> {
    let Ok(text) = str::from_utf8(&policy.bytes) else { return Vec::new() };
    let source = SourceText::new(&policy.path, text);
    let document: Option<PolicyDocument> = read::read_document(&source, &mut Problems::default());
    document.map(|document| list_paths(&policy.path, &document)).unwrap_or_default()
}

/// Returns the paths of a policy's list files, in the order that its rules are compiled in.
fn list_paths(policy: &str, document: &PolicyDocument) -> Vec<String> {
    let allow = document.allow.iter().filter_map(|rule| rule.get_ref().hosts_file.as_ref());
    let deny = document.deny.iter().filter_map(|rule| rule.get_ref().hosts_file.as_ref());
    allow.chain(deny).filter_map(|entry| list_path(policy, entry.get_ref())).collect()
}

/// Resolves the path of a list file against the policy's directory; `None` if it leads outside.
pub fn list_path(policy: &str, entry: &str) -> Option<String> {
    let inside = entry.split('/').all(|part| !matches!(part, "" | "." | ".."));
    let dir = policy.rsplit_once('/').map_or("", |(dir, _)| dir);
    match (inside, dir) {
        (false, _) => None,
        (true, "") if !policy.starts_with('/') => Some(entry.to_owned()),
        (true, dir) => Some(format!("{dir}/{entry}")),
    }
}

/// Returns the policy directory that the configuration sets, as written there.
pub fn policy_dir(operator: &SourceFile) -> Option<String> {
    let text = str::from_utf8(&operator.bytes).ok()?;
    let source = SourceText::new(&operator.path, text);
    let document: ConfigurationDocument = read::read_document(&source, &mut Problems::default())?;
    document.policies.map(toml::Spanned::into_inner)
}

type CompiledPolicies = (BTreeMap<PolicyName, Arc<Policy>>, BTreeMap<PolicyName, Vec<Problem>>);

fn compile_policies(
    before: Option<&RuleSet>,
    sources: &LoadSources,
    problems: &mut Problems,
) -> CompiledPolicies {
    let mut compiled: BTreeMap<PolicyName, Arc<Policy>> = BTreeMap::new();
    let mut policy_warnings = BTreeMap::new();
    for file in &sources.policies {
        let first = problems.warnings.len();
        let Some((policy, named)) = compile_policy(before, file, sources, problems) else {
            continue;
        };
        if let Some(other) = compiled.get(&policy.name) {
            let name = format!("{} ({})", policy.name, other.file);
            problems.error(named, ProblemKind::Twice { what: "policy", name, line: 1 });
            continue;
        }
        let own = problems.warnings.iter().skip(first).cloned().collect();
        policy_warnings.insert(policy.name.clone(), own);
        compiled.insert(policy.name.clone(), policy);
    }
    (compiled, policy_warnings)
}

fn compile_policy(
    before: Option<&RuleSet>,
    file: &SourceFile,
    sources: &LoadSources,
    problems: &mut Problems,
) -> Option<(Arc<Policy>, SourceLocation)> {
    let source = decode_file(file, problems)?;
    let document: PolicyDocument = read::read_document(&source, problems)?;
    let named = source.location(document.name.span());
    let lists = list_paths(&source.file, &document);
    let lists = lists.iter().filter_map(|path| sources.list_bytes(path));
    let digest = hash_parts([source.text.as_bytes()].into_iter().chain(lists));
    if let Some((policy, warnings)) = before.and_then(|before| reuse_policy(before, &source, digest)) {
        warnings.iter().for_each(|warning| problems.add_warning(warning.clone()));
        return Some((policy, named));
    }
    let policy = Arc::new(PolicyBuilder::new(&source, sources, problems).build(document, digest)?);
    lint::lint_policy(&policy, problems);
    Some((policy, named))
}

/// Returns the policy of an earlier load with its warnings, if its text and lists are unchanged.
///
/// This never hides an error: a policy with errors was not loaded, and a missing list changes the digest.
fn reuse_policy<'a>(
    before: &'a RuleSet,
    source: &SourceText<'_>,
    digest: PolicyDigest,
) -> Option<(Arc<Policy>, &'a [Problem])> {
    let same = |policy: &&Arc<Policy>| policy.file == source.file && policy.digest == digest;
    let policy = before.policies.values().find(same)?;
    let warnings = before.policy_warnings.get(&policy.name).map_or(&[][..], Vec::as_slice);
    Some((policy.clone(), warnings))
}

fn decode_file<'a>(file: &'a SourceFile, problems: &mut Problems) -> Option<SourceText<'a>> {
    let start = || SourceText::new(&file.path, "").location(0..0);
    if file.bytes.len() > MAX_FILE {
        problems.error(start(), ProblemKind::TooMany { what: "bytes in one file", limit: MAX_FILE });
        return None;
    }
    match str::from_utf8(&file.bytes) {
        Ok(text) => Some(SourceText::new(&file.path, text)),
        Err(_) => {
            problems.error(start(), ProblemKind::NotUtf8);
            None
        }
    }
}

fn has_lifetime(policy: &Arc<Policy>) -> bool {
    policy.budgets.limit(BudgetKind::LifetimeSeconds).is_some()
}

/// Hashes the parts, each with its length, so that moving bytes from one part to the next changes the digest.
fn hash_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> PolicyDigest {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    PolicyDigest(hash.finalize().into())
}

/// Returns the digest of the compiled files; their paths do not count.
fn hash_sources(sources: &LoadSources, policies: &BTreeMap<PolicyName, Arc<Policy>>) -> PolicyDigest {
    let operator = sources.operator.as_ref().map_or(&b"none"[..], |file| &file.bytes);
    let lone = [u8::from(sources.operator.is_none())];
    let policies = policies.values().map(|policy| &policy.digest.0[..]);
    hash_parts([&lone[..], operator].into_iter().chain(policies))
}
