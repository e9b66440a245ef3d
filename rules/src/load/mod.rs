//! From the bytes of the files to a `RuleSet`, whole or not at all (P9). Reading files is the caller's.

mod configuration;
mod document;
mod entry;
mod grants;
mod lint;
mod list;
mod memory;
mod policy_builder;
mod policy_test;
pub mod problem;
mod read;
mod sandboxes;
mod schema;

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

/// Largest policy or operator file.
pub const MAX_FILE: usize = 4 << 20;
/// The policy name that grants are shown under.
pub const GRANTS_POLICY: &str = "grants";

/// Everything that is loaded at once.
#[derive(Clone, Debug, Default)]
pub struct LoadSources {
    /// The operator's file; without it every policy stands alone, as a sandbox of its own name.
    pub operator: Option<SourceFile>,
    pub policies: Vec<SourceFile>,
    /// The list files the policies name, by [`list_path`]; an error text where one could not be read.
    pub lists: BTreeMap<String, Result<Vec<u8>, String>>,
    /// The number of this load.
    pub generation: u64,
    /// Where Sandbar itself listens: never dialled, whatever a rule says.
    pub own: Vec<SocketAddr>,
}

impl LoadSources {
    /// The digest of everything that is read from files, by which a load that would change nothing is known.
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

/// One file, and what to call it in messages.
#[derive(Clone, Debug)]
pub struct SourceFile {
    pub path: String,
    pub bytes: Vec<u8>,
}

/// A time-limited permission, made by an operator and audited elsewhere; while it lasts it is an allow rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub id: String,
    pub sandbox: SandboxId,
    pub host: HostPattern,
    pub methods: Option<Vec<HttpMethod>>,
    pub paths: Option<Vec<PathPattern>>,
    /// How much may pass under the grant.
    pub budgets: Budgets,
}

/// What time gives and takes. It is input like the files, so that deciding needs no clock: a grant's start and
/// end, and the end of a sandbox's lifetime, are generations of the rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimedState {
    pub grants: Vec<Grant>,
    /// Sandboxes whose lifetime is over.
    pub ended: BTreeSet<SandboxId>,
}

/// Compiles everything, or says everything that is wrong.
///
/// # Errors
///
/// Returns every problem found, up to [`problem::MAX_PROBLEMS`]; nothing is loaded then.
pub fn compile(sources: &LoadSources, grants: &[Grant]) -> Result<RuleSet, Vec<Problem>> {
    compile_with(None, sources, grants)
}

/// As [`compile`], but policies whose bytes are those of `before` are taken over from there: a million names
/// are not read again because another file changed.
///
/// # Errors
///
/// As [`compile`].
pub fn recompile(
    before: &RuleSet,
    sources: &LoadSources,
    grants: &[Grant],
) -> Result<RuleSet, Vec<Problem>> {
    compile_with(Some(before), sources, grants)
}

fn compile_with(
    before: Option<&RuleSet>,
    sources: &LoadSources,
    grants: &[Grant],
) -> Result<RuleSet, Vec<Problem>> {
    let mut problems = Problems::default();
    let (policies, noted) = compile_policies(before, sources, &mut problems);
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
            noted,
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
    /// The same files, under another generation, with what time gives and takes.
    ///
    /// # Errors
    ///
    /// Returns what is wrong with the grants.
    pub fn with_timed_state(
        &self,
        timed: &TimedState,
        generation: u64,
    ) -> Result<RuleSet, Vec<Problem>> {
        let mut problems = Problems::default();
        let mut rules = RuleSet { generation, ended: timed.ended.clone(), ..self.clone() };
        for (id, layers) in &mut rules.layers {
            layers.sandbox.retain(|policy| policy.name.as_str() != GRANTS_POLICY);
            layers.sandbox.extend(grants::compile_grants(id, &timed.grants, &mut problems));
        }
        let granted: Vec<String> = timed.grants.iter().map(|grant| format!("{grant:?}")).collect();
        rules.digest = match granted.as_slice() {
            [] => self.files,
            granted => hash_parts(
                [&self.files.0[..]].into_iter().chain(granted.iter().map(String::as_bytes)),
            ),
        };
        if problems.errors.is_empty() { Ok(rules) } else { Err(problems.errors) }
    }
}

/// The list files a policy names, so that the caller can read them; errors are left to [`compile`].
pub fn list_files(policy: &SourceFile) -> Vec<String> {
    let Ok(text) = str::from_utf8(&policy.bytes) else { return Vec::new() };
    let source = SourceText::new(&policy.path, text);
    let document: Option<PolicyDocument> = read::read_document(&source, &mut Problems::default());
    document.map(|document| list_paths(&policy.path, &document)).unwrap_or_default()
}

/// The list files of a policy, in the order its rules are compiled in.
fn list_paths(policy: &str, document: &PolicyDocument) -> Vec<String> {
    let allow = document.allow.iter().filter_map(|rule| rule.get_ref().hosts_file.as_ref());
    let deny = document.deny.iter().filter_map(|rule| rule.get_ref().hosts_file.as_ref());
    allow.chain(deny).filter_map(|entry| list_path(policy, entry.get_ref())).collect()
}

/// Where a list named in a policy lies: beside the policy or below, never elsewhere.
pub fn list_path(policy: &str, entry: &str) -> Option<String> {
    let inside = entry.split('/').all(|part| !matches!(part, "" | "." | ".."));
    let dir = policy.rsplit_once('/').map_or("", |(dir, _)| dir);
    match (inside, dir) {
        (false, _) => None,
        (true, "") if !policy.starts_with('/') => Some(entry.to_owned()),
        (true, dir) => Some(format!("{dir}/{entry}")),
    }
}

/// The policy directory the operator's file names, as written there.
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
    let mut noted = BTreeMap::new();
    for file in &sources.policies {
        let known = problems.warnings.len();
        let Some((policy, named)) = compile_policy(before, file, sources, problems) else {
            continue;
        };
        if let Some(other) = compiled.get(&policy.name) {
            let name = format!("{} ({})", policy.name, other.file);
            problems.error(named, ProblemKind::Twice { what: "policy", name, line: 1 });
            continue;
        }
        let own = problems.warnings.iter().skip(known).cloned().collect();
        noted.insert(policy.name.clone(), own);
        compiled.insert(policy.name.clone(), policy);
    }
    (compiled, noted)
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
    if let Some((policy, noted)) = before.and_then(|before| reuse_policy(before, &source, digest)) {
        noted.iter().for_each(|warning| problems.add_warning(warning.clone()));
        return Some((policy, named));
    }
    let policy = Arc::new(PolicyBuilder::new(&source, sources, problems).build(document, digest)?);
    lint::lint_policy(&policy, problems);
    Some((policy, named))
}

/// The policy of an earlier load and what was noted of it, if its text and its lists are what they were. What is
/// wrong is never taken over: a policy that has errors was not loaded, and a list that is missing changes the digest.
fn reuse_policy<'a>(
    before: &'a RuleSet,
    source: &SourceText<'_>,
    digest: PolicyDigest,
) -> Option<(Arc<Policy>, &'a [Problem])> {
    let same = |policy: &&Arc<Policy>| policy.file == source.file && policy.digest == digest;
    let policy = before.policies.values().find(same)?;
    let noted = before.noted.get(&policy.name).map_or(&[][..], Vec::as_slice);
    Some((policy.clone(), noted))
}

fn decode_file<'a>(file: &'a SourceFile, problems: &mut Problems) -> Option<SourceText<'a>> {
    let beginning = || SourceText::new(&file.path, "").location(0..0);
    if file.bytes.len() > MAX_FILE {
        problems.error(
            beginning(),
            ProblemKind::TooMany { what: "bytes in one file", limit: MAX_FILE },
        );
        return None;
    }
    match str::from_utf8(&file.bytes) {
        Ok(text) => Some(SourceText::new(&file.path, text)),
        Err(_) => {
            problems.error(beginning(), ProblemKind::NotUtf8);
            None
        }
    }
}

/// The digest of one policy with its lists; where the files lie does not count.
fn has_lifetime(policy: &Arc<Policy>) -> bool {
    policy.budgets.limit(BudgetKind::LifetimeSeconds).is_some()
}

fn hash_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> PolicyDigest {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    PolicyDigest(hash.finalize().into())
}

fn hash_sources(
    sources: &LoadSources,
    policies: &BTreeMap<PolicyName, Arc<Policy>>,
) -> PolicyDigest {
    let operator = sources.operator.as_ref().map_or(&b"none"[..], |file| &file.bytes);
    let lone = [u8::from(sources.operator.is_none())];
    let policies = policies.values().map(|policy| &policy.digest.0[..]);
    hash_parts([&lone[..], operator].into_iter().chain(policies))
}
