//! `explain` and `diff`: what people are told.

use rules::Reason::*;
use rules::diff::diff;
use rules::explain::{Change, Why};
use rules::probe::Probe;
use rules::{Decision, RuleSet};

use super::{good, lone, sandbox};

fn policy(body: &str) -> RuleSet {
    good(lone(&format!("name = \"p\"\n{body}")))
}

fn rule(name: &str, body: &str) -> String {
    format!("[[allow]]\nname = \"{name}\"\n{body}\n")
}

fn explain(rules: &RuleSet, text: &str) -> rules::explain::Explanation {
    let (method, url) =
        text.split_once(' ').map_or((None, text), |(method, url)| (Some(method), url));
    let mut probe = Probe::parse(url).unwrap();
    probe.method = method.map(|method| rules::facts::Method::parse(method).unwrap());
    rules.explain(&sandbox(rules, "p"), &probe)
}

#[test]
fn a_denial_says_what_would_allow_it() {
    let rules = policy(
        &(rule("code", "hosts = [\"github.com\"]\nmethods = [\"GET\"]\npaths = [\"/acme/**\"]")
            + &rule("api", "hosts = [\"api.example\"]")),
    );
    for (text, expected) in [
        (
            "pastebin.example",
            "[[allow]]\nname = \"pastebin.example\"\nhosts = [\"pastebin.example\"]",
        ),
        (
            "pastebin.example:8443",
            "[[allow]]\nname = \"pastebin.example\"\nhosts = [\"pastebin.example:8443\"]",
        ),
        (
            "8.8.8.8:853",
            "[[allow]]\nname = \"8.8.8.8\"\naddresses = [\"8.8.8.8/32\"]\nports = [853]",
        ),
        (
            "POST https://new.example/",
            "[[allow]]\nname = \"new.example\"\nhosts = [\"new.example\"]\nmethods = [\"POST\"]",
        ),
    ] {
        let found = explain(&rules, text);
        let Some(Change::Add(lines)) = found.change else { panic!("{text}: {found:?}") };
        assert_eq!(lines, expected, "{text}");
        let mended = policy(&lines);
        assert!(
            matches!(explain(&mended, text).decision, Decision::Allow(_)),
            "the advice for {text} does not help"
        );
    }
    for (text, key, entry) in [
        ("POST https://github.com/acme/x", "methods", "POST"),
        ("GET https://github.com/other", "paths", "/other"),
        ("github.com:8443", "hosts", "github.com:8443"),
    ] {
        let found = explain(&rules, text);
        let Some(Change::Extend { rule, key: found_key, entry: found_entry }) = found.change else {
            panic!("{text}: {found:?}")
        };
        assert_eq!((&*rule.rule, found_key, found_entry.as_str()), ("code", key, entry), "{text}");
    }
    assert_eq!(explain(&rules, "TRACE https://github.com/").change, None);
}

#[test]
fn near_misses_are_told() {
    let rules = policy(
        &(rule("code", "hosts = [\"github.com\"]\nmethods = [\"GET\"]")
            + &rule("wide", "hosts = [\"*.example.com\"]")
            + &rule("one", "hosts = [\"a.example.com\"]")),
    );
    let slip = explain(&rules, "githud.com");
    assert_eq!(
        (slip.near.len(), slip.near[0].why, slip.near[0].pattern.as_str()),
        (1, Why::OtherName, "github.com")
    );
    let apex = explain(&rules, "example.com");
    assert!(apex.near.iter().any(|near| near.pattern == "*.example.com"), "{apex:?}");
    let both = explain(&rules, "GET https://a.example.com/");
    assert_eq!((both.near.len(), both.near[0].why), (1, Why::LessSpecific));
    let method = explain(&rules, "POST https://github.com/");
    assert_eq!(method.decision.reason(), Some(MethodNotAllowed));
    assert_eq!(method.near, [], "the rule that refused is named by the decision itself");
}

fn told(old: &str, new: &str) -> Vec<String> {
    let (old, new) = (policy(old), policy(new));
    let (before, after) = (sandbox(&old, "p"), sandbox(&new, "p"));
    diff((&old, &before), (&new, &after))
        .iter()
        .map(|d| format!("{} {}", d.what, d.change))
        .collect()
}

#[test]
fn a_diff_tells_what_opens_and_closes() {
    let code = rule("code", "hosts = [\"github.com\"]");
    for (old, new, expected) in [
        (code.clone(), code.clone(), vec![]),
        (String::new(), code.clone(), vec!["github.com becomes reachable"]),
        (code.clone(), String::new(), vec!["github.com stops being reachable"]),
        (code.clone(), rule("renamed", "hosts = [\"github.com\"]"), vec![]),
        (code.clone(), rule("code", "hosts = [\".github.com\"]"), vec!["*.github.com becomes reachable"]),
        (code.clone(), rule("code", "hosts = [\"github.com\", \"github.com:8443\"]"), vec!["github.com:8443 becomes reachable"]),
        (code.clone(), rule("code", "hosts = [\"github.com\"]\nmethods = [\"GET\"]"), vec!["POST github.com stops being reachable"]),
        (
            rule("code", "hosts = [\"github.com\"]\nmethods = [\"GET\"]"),
            rule("code", "hosts = [\"github.com\"]\nmethods = [\"GET\", \"DELETE\"]"),
            vec!["DELETE github.com becomes reachable"],
        ),
        (
            rule("code", "hosts = [\"github.com\"]\npaths = [\"/a/**\"]"),
            rule("code", "hosts = [\"github.com\"]\npaths = [\"/b/**\"]"),
            vec![
                "GET github.com/b/** becomes reachable",
                "POST github.com/b/** becomes reachable",
                "GET github.com/a/** stops being reachable",
                "POST github.com/a/** stops being reachable",
            ],
        ),
        (
            rule("w", "hosts = [\"*.x.example\"]"),
            rule("w", "hosts = [\"*.x.example\"]") + "[[deny]]\nhosts = [\"bad.x.example\"]",
            vec!["bad.x.example stops being reachable"],
        ),
        (code.clone(), rule("code", "hosts = [\"github.com\"]\ntls = \"tunnel\""), vec!["github.com changes from intercept to tunnel"]),
        (
            code.clone(),
            rule("code", "hosts = [\"github.com\"]\ncredential = \"k\""),
            vec![
                "GET github.com changes from no credential to credential `k`",
                "POST github.com changes from no credential to credential `k`",
            ],
        ),
        (
            rule("db", "hosts = [\"db.example\"]\ntcp = [5432]"),
            rule("db", "hosts = [\"db.example\"]\ntcp = [5433]"),
            vec!["db.example:5433 (raw TCP) becomes reachable", "db.example:5432 (raw TCP) stops being reachable"],
        ),
        (
            rule("a", "addresses = [\"10.0.0.0/24\"]\nports = [1]"),
            rule("a", "addresses = [\"10.0.0.0/23\"]\nports = [1]"),
            vec!["10.0.0.0/23:1 becomes reachable"],
        ),
        (rule("e", "hosts = [\"x.example\"]"), rule("e", "hosts = [\"x.example\"]\nmethods = []"), vec!["x.example stops being reachable"]),
        (
            "[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"mcp\"\nrecall = [\"s:a\"]".to_owned(),
            "[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"mcp\"\nrecall = [\"s:a\", \"s:b\"]".to_owned(),
            vec!["recall s:b at m.example becomes reachable"],
        ),
    ] {
        assert_eq!(told(&old, &new), expected, "{old}\n-->\n{new}");
    }
}
