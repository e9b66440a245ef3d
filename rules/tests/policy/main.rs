//! The policy language from text to decision, as its users meet it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod decide;
mod diff;
mod fuzz;
mod layers;
mod load;
mod memory;
mod reload;
mod report;

use std::collections::BTreeMap;

use rules::load::problem::Problem;
use rules::probe::Probe;
use rules::word::SandboxId;
use rules::{Decision, Reason, RuleSet, SandboxRef, SourceFile, Sources, compile};

fn file(path: &str, text: &str) -> SourceFile {
    SourceFile { path: path.to_owned(), bytes: text.as_bytes().to_vec() }
}

/// One policy alone.
fn lone(text: &str) -> Result<RuleSet, Vec<Problem>> {
    let sources =
        Sources { policies: vec![file("p.toml", text)], generation: 7, ..Sources::default() };
    compile(&sources, &[])
}

/// One policy with the lists it names.
fn with_lists(text: &str, lists: &[(&str, &str)]) -> Result<RuleSet, Vec<Problem>> {
    let lists: BTreeMap<_, _> = lists
        .iter()
        .map(|(path, text)| ((*path).to_owned(), Ok(text.as_bytes().to_vec())))
        .collect();
    let sources = Sources { policies: vec![file("p.toml", text)], lists, ..Sources::default() };
    compile(&sources, &[])
}

/// An operator's file with its policies.
fn operated(operator: &str, policies: &[&str]) -> Result<RuleSet, Vec<Problem>> {
    let named = |(at, text): (usize, &&str)| file(&format!("policies/{at}.toml"), text);
    let policies = policies.iter().enumerate().map(named).collect();
    let sources =
        Sources { operator: Some(file("sandbar.toml", operator)), policies, ..Sources::default() };
    compile(&sources, &[])
}

fn good(result: Result<RuleSet, Vec<Problem>>) -> RuleSet {
    result.unwrap_or_else(|problems| panic!("{}", shown(&problems).join("\n")))
}

fn shown(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

/// The texts of every error, for tables that look for a phrase.
fn errors(result: Result<RuleSet, Vec<Problem>>) -> Vec<String> {
    shown(&result.err().unwrap_or_default())
}

fn sandbox(rules: &RuleSet, id: &str) -> SandboxRef {
    rules
        .sandboxes()
        .get(&SandboxId::parse(id).unwrap())
        .unwrap_or_else(|| panic!("no sandbox {id}"))
        .clone()
}

/// Tries `text` (`[METHOD ]url`) in a sandbox: the rule that allows it, or the reason it is refused.
fn attempt(rules: &RuleSet, id: &str, text: &str) -> Result<String, Reason> {
    let (method, url) =
        text.split_once(' ').map_or((None, text), |(method, url)| (Some(method), url));
    let mut probe = Probe::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"));
    probe.method = method.map(|method| rules::facts::Method::parse(method).unwrap());
    match probe.decide(rules, &sandbox(rules, id)) {
        Decision::Allow(permit) => Ok(permit.rule().rule.to_string()),
        Decision::Deny(denial) => Err(denial.reason),
    }
}

fn table(rules: &RuleSet, id: &str, rows: &[(&str, Result<&str, Reason>)]) {
    for (text, expected) in rows {
        assert_eq!(attempt(rules, id, text).as_deref(), expected.as_ref().copied(), "{id}: {text}");
    }
}
