//! Tests of the policy language through its public interface, from text to decision.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod credentials;
mod decide;
mod diff;
mod fuzz;
mod keys;
mod layers;
mod load;
mod memory;
mod reload;
mod report;
mod signals;
mod treatment;

use std::collections::BTreeMap;

use rules::ids::SandboxId;
use rules::load::problem::Problem;
use rules::probe::PolicyProbe;
use rules::{Decision, LoadSources, Reason, RuleSet, SandboxRef, SourceFile, compile};

fn source_file(path: &str, text: &str) -> SourceFile {
    SourceFile { path: path.to_owned(), bytes: text.as_bytes().to_vec() }
}

/// Compiles one policy without configuration.
fn compile_lone(text: &str) -> Result<RuleSet, Vec<Problem>> {
    let sources =
        LoadSources { policies: vec![source_file("p.toml", text)], generation: 7, ..LoadSources::default() };
    compile(&sources, &[])
}

/// Compiles one policy with its list files.
fn compile_with_lists(text: &str, lists: &[(&str, &str)]) -> Result<RuleSet, Vec<Problem>> {
    let lists: BTreeMap<_, _> =
        lists.iter().map(|(path, text)| ((*path).to_owned(), Ok(text.as_bytes().to_vec()))).collect();
    let sources =
        LoadSources { policies: vec![source_file("p.toml", text)], lists, ..LoadSources::default() };
    compile(&sources, &[])
}

/// Compiles a configuration with its policies.
fn compile_configured(configuration: &str, policies: &[&str]) -> Result<RuleSet, Vec<Problem>> {
    let named = |(at, text): (usize, &&str)| source_file(&format!("policies/{at}.toml"), text);
    let policies = policies.iter().enumerate().map(named).collect();
    let sources = LoadSources {
        operator: Some(source_file("sandbar.toml", configuration)),
        policies,
        ..LoadSources::default()
    };
    compile(&sources, &[])
}

fn unwrap_rules(result: Result<RuleSet, Vec<Problem>>) -> RuleSet {
    result.unwrap_or_else(|problems| panic!("{}", problem_texts(&problems).join("\n")))
}

fn problem_texts(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

/// Returns the text of every error.
fn error_texts(result: Result<RuleSet, Vec<Problem>>) -> Vec<String> {
    problem_texts(&result.err().unwrap_or_default())
}

fn sandbox_ref(rules: &RuleSet, id: &str) -> SandboxRef {
    rules.sandboxes().get(&SandboxId::parse(id).unwrap()).unwrap_or_else(|| panic!("no sandbox {id}")).clone()
}

/// Decides `text` (`[METHOD ]url`) in a sandbox; returns the allowing rule or the reason of the denial.
fn decide_attempt(rules: &RuleSet, id: &str, text: &str) -> Result<String, Reason> {
    let (method, url) = text.split_once(' ').map_or((None, text), |(method, url)| (Some(method), url));
    let mut probe = PolicyProbe::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"));
    probe.method = method.map(|method| rules::facts::HttpMethod::parse(method).unwrap());
    match probe.decide(rules, &sandbox_ref(rules, id)) {
        Decision::Allow(permit) => Ok(permit.rule().rule.to_string()),
        Decision::Deny(denial) => Err(denial.reason),
    }
}

fn assert_decisions(rules: &RuleSet, id: &str, rows: &[(&str, Result<&str, Reason>)]) {
    for (text, expected) in rows {
        assert_eq!(decide_attempt(rules, id, text).as_deref(), expected.as_ref().copied(), "{id}: {text}");
    }
}
