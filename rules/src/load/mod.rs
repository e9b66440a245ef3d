//! From the bytes of the files to a `RuleSet`, whole or not at all (P9). Reading files is the caller's.

mod document;
mod entry;
mod grants;
mod lint;
mod list;
mod memory;
mod operator;
pub mod problem;
mod read;
mod rule;
mod sandboxes;
mod schema;
mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

pub use self::list::MAX_LIST;
pub use self::operator::operator;
pub use self::schema::{operator_schema, policy_schema};

use self::document::{OperatorDocument, PolicyDocument};
use self::problem::{Fault, Place, Problem, Problems, Source};
use self::rule::Builder;
use crate::budget::{Budget, Budgets};
use crate::facts::Method;
use crate::path::PathPattern;
use crate::pattern::HostPattern;
use crate::policy::{Digest, Policy};
use crate::ruleset::{Mood, RuleSet};
use crate::word::{PolicyName, SandboxId};

/// Largest policy or operator file.
pub const MAX_FILE: usize = 4 << 20;
/// The policy name that grants are shown under.
pub const GRANTS: &str = "grants";

/// Everything that is loaded at once.
#[derive(Clone, Debug, Default)]
pub struct Sources {
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

impl Sources {
    /// The digest of everything that is read from files, by which a load that would change nothing is known.
    pub fn digest(&self) -> Digest {
        let files = self.operator.iter().chain(&self.policies);
        let files = files.flat_map(|file| [file.path.as_bytes(), &file.bytes]);
        let lists = self.lists.iter().flat_map(|(path, list)| match list {
            Ok(bytes) => [path.as_bytes(), b"read", bytes.as_slice()],
            Err(why) => [path.as_bytes(), b"missing", why.as_bytes()],
        });
        digest_of(files.chain(lists))
    }

    fn list(&self, path: &str) -> Option<&[u8]> {
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
    pub methods: Option<Vec<Method>>,
    pub paths: Option<Vec<PathPattern>>,
    /// How much may pass under the grant.
    pub budgets: Budgets,
}

/// What time gives and takes. It is input like the files, so that deciding needs no clock: a grant's start and
/// end, and the end of a sandbox's lifetime, are generations of the rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timed {
    pub grants: Vec<Grant>,
    /// Sandboxes whose lifetime is over.
    pub ended: BTreeSet<SandboxId>,
}

/// Compiles everything, or says everything that is wrong.
///
/// # Errors
///
/// Returns every problem found, up to [`problem::MAX_PROBLEMS`]; nothing is loaded then.
pub fn compile(sources: &Sources, grants: &[Grant]) -> Result<RuleSet, Vec<Problem>> {
    compile_after(None, sources, grants)
}

/// As [`compile`], but policies whose bytes are those of `before` are taken over from there: a million names
/// are not read again because another file changed.
///
/// # Errors
///
/// As [`compile`].
pub fn recompile(
    before: &RuleSet,
    sources: &Sources,
    grants: &[Grant],
) -> Result<RuleSet, Vec<Problem>> {
    compile_after(Some(before), sources, grants)
}

fn compile_after(
    before: Option<&RuleSet>,
    sources: &Sources,
    grants: &[Grant],
) -> Result<RuleSet, Vec<Problem>> {
    let mut problems = Problems::default();
    let (policies, noted) = compile_policies(before, sources, &mut problems);
    let declared = match &sources.operator {
        Some(file) => sandboxes::declared(file, &policies, &mut problems),
        None => Some(sandboxes::lone(&policies)),
    };
    problems.sort();
    let files = digest_of_all(sources, &policies);
    let rules = match declared {
        Some((sandboxes, layers)) if problems.errors.is_empty() => RuleSet {
            generation: sources.generation,
            digest: files,
            files,
            sandboxes,
            layers,
            lifetimes: policies.values().any(bounds_lives),
            policies,
            ended: BTreeSet::new(),
            own: sources.own.clone().into(),
            warnings: problems.warnings,
            noted,
            mood: Mood::Judging,
        },
        _ => return Err(problems.errors),
    };
    match grants {
        [] => Ok(rules),
        grants => {
            rules.timed(&Timed { grants: grants.into(), ..Timed::default() }, sources.generation)
        }
    }
}

impl RuleSet {
    /// The same files, under another generation, with what time gives and takes.
    ///
    /// # Errors
    ///
    /// Returns what is wrong with the grants.
    pub fn timed(&self, timed: &Timed, generation: u64) -> Result<RuleSet, Vec<Problem>> {
        let mut problems = Problems::default();
        let mut rules = RuleSet { generation, ended: timed.ended.clone(), ..self.clone() };
        for (id, layers) in &mut rules.layers {
            layers.sandbox.retain(|policy| policy.name.as_str() != GRANTS);
            layers.sandbox.extend(grants::of(id, &timed.grants, &mut problems));
        }
        let granted: Vec<String> = timed.grants.iter().map(|grant| format!("{grant:?}")).collect();
        rules.digest = match granted.as_slice() {
            [] => self.files,
            granted => digest_of(
                [&self.files.0[..]].into_iter().chain(granted.iter().map(String::as_bytes)),
            ),
        };
        if problems.errors.is_empty() { Ok(rules) } else { Err(problems.errors) }
    }
}

/// The list files a policy names, so that the caller can read them; errors are left to [`compile`].
pub fn lists_named_by(policy: &SourceFile) -> Vec<String> {
    let Ok(text) = str::from_utf8(&policy.bytes) else { return Vec::new() };
    let source = Source::new(&policy.path, text);
    let document: Option<PolicyDocument> = read::read(&source, &mut Problems::default());
    document.map(|document| lists_of(&policy.path, &document)).unwrap_or_default()
}

/// The list files of a policy, in the order its rules are compiled in.
fn lists_of(policy: &str, document: &PolicyDocument) -> Vec<String> {
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
    let source = Source::new(&operator.path, text);
    let document: OperatorDocument = read::read(&source, &mut Problems::default())?;
    document.policies.map(toml::Spanned::into_inner)
}

type Compiled = (BTreeMap<PolicyName, Arc<Policy>>, BTreeMap<PolicyName, Vec<Problem>>);

fn compile_policies(
    before: Option<&RuleSet>,
    sources: &Sources,
    problems: &mut Problems,
) -> Compiled {
    let mut compiled: BTreeMap<PolicyName, Arc<Policy>> = BTreeMap::new();
    let mut noted = BTreeMap::new();
    for file in &sources.policies {
        let known = problems.warnings.len();
        let Some((policy, named)) = compile_policy(before, file, sources, problems) else {
            continue;
        };
        if let Some(other) = compiled.get(&policy.name) {
            let name = format!("{} ({})", policy.name, other.file);
            problems.error(named, Fault::Twice { what: "policy", name, line: 1 });
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
    sources: &Sources,
    problems: &mut Problems,
) -> Option<(Arc<Policy>, Place)> {
    let source = text_of(file, problems)?;
    let document: PolicyDocument = read::read(&source, problems)?;
    let named = source.place(document.name.span());
    let lists = lists_of(&source.file, &document);
    let lists = lists.iter().filter_map(|path| sources.list(path));
    let digest = digest_of([source.text.as_bytes()].into_iter().chain(lists));
    if let Some((policy, noted)) = before.and_then(|before| unchanged(before, &source, digest)) {
        noted.iter().for_each(|warning| problems.note(warning.clone()));
        return Some((policy, named));
    }
    let policy = Arc::new(Builder::new(&source, sources, problems).policy(document, digest)?);
    lint::policy(&policy, problems);
    Some((policy, named))
}

/// The policy of an earlier load and what was noted of it, if its text and its lists are what they were. What is
/// wrong is never taken over: a policy that has errors was not loaded, and a list that is missing changes the digest.
fn unchanged<'a>(
    before: &'a RuleSet,
    source: &Source<'_>,
    digest: Digest,
) -> Option<(Arc<Policy>, &'a [Problem])> {
    let same = |policy: &&Arc<Policy>| policy.file == source.file && policy.digest == digest;
    let policy = before.policies.values().find(same)?;
    let noted = before.noted.get(&policy.name).map_or(&[][..], Vec::as_slice);
    Some((policy.clone(), noted))
}

fn text_of<'a>(file: &'a SourceFile, problems: &mut Problems) -> Option<Source<'a>> {
    let beginning = || Source::new(&file.path, "").place(0..0);
    if file.bytes.len() > MAX_FILE {
        problems.error(beginning(), Fault::TooMany { what: "bytes in one file", limit: MAX_FILE });
        return None;
    }
    match str::from_utf8(&file.bytes) {
        Ok(text) => Some(Source::new(&file.path, text)),
        Err(_) => {
            problems.error(beginning(), Fault::NotUtf8);
            None
        }
    }
}

/// The digest of one policy with its lists; where the files lie does not count.
fn bounds_lives(policy: &Arc<Policy>) -> bool {
    policy.budgets.of(Budget::LifetimeSeconds).is_some()
}

fn digest_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Digest {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    Digest(hash.finalize().into())
}

fn digest_of_all(sources: &Sources, policies: &BTreeMap<PolicyName, Arc<Policy>>) -> Digest {
    let operator = sources.operator.as_ref().map_or(&b"none"[..], |file| &file.bytes);
    let lone = [u8::from(sources.operator.is_none())];
    let policies = policies.values().map(|policy| &policy.digest.0[..]);
    digest_of([&lone[..], operator].into_iter().chain(policies))
}
