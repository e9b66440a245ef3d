//! `explain`: what people are told.

use rules::Reason::*;
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
