//! `diff`: it reports every difference, and nothing else.

use proptest::prelude::*;
use rules::decision::Treatment;
use rules::diff::diff;
use rules::facts::{HttpMethod, QueryType};
use rules::probe::{PolicyProbe, ProbeKind};
use rules::{Decision, RuleSet, SandboxRef};

use super::{compile_configured, compile_lone, sandbox_ref, unwrap_rules};

fn policy(body: &str) -> RuleSet {
    unwrap_rules(compile_lone(&format!("name = \"p\"\n{body}")))
}

fn allow(body: &str) -> String {
    format!("[[allow]]\nname = \"a\"\n{body}\n")
}

fn deny(body: &str) -> String {
    format!("[[deny]]\n{body}\n")
}

fn memory(name: &str, body: &str) -> String {
    format!("[[memory]]\nname = \"{name}\"\nhost = \"m.example\"\n{body}\n")
}

fn differences(old: &str, new: &str) -> Vec<String> {
    compare_sandbox(&policy(old), &policy(new), "p")
}

fn compare_sandbox(old: &RuleSet, new: &RuleSet, id: &str) -> Vec<String> {
    let (before, after) = (sandbox_ref(old, id), sandbox_ref(new, id));
    let found = diff((old, &before), (new, &after));
    found.iter().map(|found| format!("{} {}", found.what, found.change)).collect()
}

fn assert_differences(rows: &[(String, String, &[&str])]) {
    for (old, new, expected) in rows {
        assert_eq!(differences(old, new), *expected, "{old}\n-->\n{new}");
        assert_eq!(differences(new, old).is_empty(), expected.is_empty(), "{new}\n-->\n{old}");
    }
}

#[test]
fn opened_and_closed_hosts_and_ports_are_reported() {
    let code = allow("hosts = [\"github.com\"]");
    let wide = allow("hosts = [\"*.x.example:8443\"]");
    let range = allow("addresses = [\"10.1.0.0/16\"]\nports = [8443]");
    assert_differences(&[
        (code.clone(), code.clone(), &[]),
        (String::new(), code.clone(), &["github.com becomes reachable"]),
        (code.clone(), String::new(), &["github.com stops being reachable"]),
        (code.clone(), code.replace("\"a\"", "\"renamed\""), &[]),
        (code.clone(), allow("hosts = [\".github.com\"]"), &["*.github.com becomes reachable"]),
        (
            code.clone(),
            allow("hosts = [\"github.com\", \"github.com:8443\"]"),
            &["github.com:8443 becomes reachable"],
        ),
        (
            wide.clone(),
            wide.clone() + &deny("hosts = [\"a.x.example\"]"),
            &["a.x.example:8443 stops being reachable"],
        ),
        (
            wide.clone(),
            wide + &deny("hosts = [\"a.x.example:8443\"]"),
            &["a.x.example:8443 stops being reachable"],
        ),
        (
            range.clone(),
            range.clone() + &deny("addresses = [\"10.1.2.3/32\"]"),
            &["10.1.2.3/32:8443 stops being reachable"],
        ),
        (
            allow("addresses = [\"10.0.0.0/24\"]\nports = [1]"),
            allow("addresses = [\"10.0.0.0/23\"]\nports = [1]"),
            &["10.0.0.0/23:1 becomes reachable"],
        ),
        (
            range.clone() + &deny("addresses = [\"10.1.0.0/17\", \"10.1.192.0/18\"]"),
            range + &deny("addresses = [\"10.1.0.0/16\"]"),
            &["10.1.0.0/16:8443 stops being reachable"],
        ),
        (
            allow("hosts = [\"db.example\"]\ntcp = [5432]"),
            allow("hosts = [\"db.example\"]\ntcp = [5433]"),
            &[
                "db.example:5433 (raw TCP) becomes reachable",
                "db.example:5432 (raw TCP) stops being reachable",
            ],
        ),
        (String::new(), allow("hosts = [\"x.example\"]\nports = []"), &["DNS x.example becomes reachable"]),
    ]);
}

#[test]
fn opened_and_closed_requests_are_reported() {
    let host = |rest: &str| allow(&format!("hosts = [\"x.example\"]\n{rest}"));
    assert_differences(&[
        (host(""), host("methods = [\"GET\"]"), &["x.example (other methods) stops being reachable"]),
        (host("methods = [\"GET\", \"POST\"]"), host(""), &["x.example (other methods) becomes reachable"]),
        (
            host("methods = [\"GET\"]"),
            host("methods = [\"GET\", \"DELETE\"]"),
            &["DELETE x.example becomes reachable"],
        ),
        (host("methods = [\"GET\"]"), host("methods = [\"GET\", \"GET\"]"), &[]),
        (host(""), host("methods = []"), &["x.example stops being reachable"]),
        (
            host("paths = [\"/a/**\"]"),
            host("paths = [\"/b/**\"]"),
            &["x.example/b/** becomes reachable", "x.example/a/** stops being reachable"],
        ),
        (host("paths = [\"/v1/*\"]"), host("paths = [\"/v1/**\"]"), &["x.example/v1/** becomes reachable"]),
        (
            host("paths = [\"/*\"]"),
            host(""),
            &["x.example (ambiguous paths) becomes reachable", "x.example (other paths) becomes reachable"],
        ),
        (host("paths = [\"/**\"]"), host(""), &[]),
        (
            host("") + &deny("hosts = [\"x.example\"]\npaths = [\"/a/**\"]"),
            host("") + &deny("hosts = [\"x.example\"]\npaths = [\"/a/*\"]"),
            &["x.example/a/** becomes reachable"],
        ),
        (
            host("") + &deny("hosts = [\"x.example\"]\npaths = [\"/a\"]"),
            host("") + &deny("hosts = [\"x.example\"]\npaths = [\"/a/\"]"),
            &["x.example/a becomes reachable"],
        ),
        (
            host("paths = [\"/v1/*\"]"),
            host("paths = [\"/v1/*\"]")
                + &deny("hosts = [\"x.example\"]\npaths = [\"/*/b\"]\nmethods = [\"POST\"]"),
            &["POST x.example/*/b (such as /v1/b) stops being reachable"],
        ),
        (
            host("paths = [\"/@a/*\"]"),
            host("paths = [\"/@a/*\", \"/@a%2f*\"]"),
            &["x.example/@a%2F* becomes reachable"],
        ),
        (
            host("paths = [\"/*%2f*\"]"),
            host("paths = [\"/*%2f*\"]") + &deny("hosts = [\"x.example\"]\npaths = [\"/@evil/**\"]"),
            &["x.example/*%2F* (such as /@evil%2Fany) stops being reachable"],
        ),
    ]);
}

#[test]
fn other_terms_are_reported() {
    let host = |rest: &str| allow(&format!("hosts = [\"x.example\"]\n{rest}"));
    assert_differences(&[
        (host(""), host("tls = \"tunnel\""), &["x.example changes from intercept to tunnel"]),
        (host(""), host("credential = \"k\""), &["x.example changes from no credential to credential `k`"]),
        (
            host("resolves_to = [\"10.1.0.0/16\"]"),
            host("resolves_to = [\"0.0.0.0/0\"]\ndangerously_wide = true"),
            &["x.example changes from addresses in 10.1.0.0/16 to addresses in 0.0.0.0/0"],
        ),
        (
            host("resolves_to = [\"10.0.0.0/9\", \"10.128.0.0/9\"]"),
            host("resolves_to = [\"10.0.0.0/8\"]"),
            &[],
        ),
        (
            host(""),
            host("") + &deny("addresses = [\"1.2.3.0/24\"]"),
            &["x.example changes from public addresses to public addresses except 1.2.3.0/24"],
        ),
        (host(""), host("") + &deny("addresses = [\"10.0.0.0/8\"]"), &[]),
        (
            host(""),
            host("dns_types = [\"A\", \"AAAA\", \"HTTPS\", \"TXT\"]"),
            &["x.example changes from DNS types A AAAA HTTPS to DNS types A TXT AAAA HTTPS"],
        ),
        (host(""), host("cname = \"strict\""), &["x.example changes from flattened CNAME to strict CNAME"]),
        (
            host("tls = \"tunnel\""),
            host("tls = \"tunnel\"\nech = \"tolerate\""),
            &["x.example changes from ECH refused to ECH tolerated"],
        ),
        (
            host("budget = { connections = 1 }"),
            host("budget = { connections = 2 }"),
            &["x.example changes from budget connections = 1 to budget connections = 2"],
        ),
        (
            host(""),
            host("") + "[budget]\nrequests_per_hour = 3",
            &["the sandbox changes from no budget to budget requests_per_hour = 3"],
        ),
    ]);
}

#[test]
fn banks_and_memory_terms_are_reported() {
    let plain = "profile = \"astrocyte\"\nrecall = [\"s:a\"]";
    assert_differences(&[
        (memory("m", plain), memory("renamed", plain), &[]),
        (
            memory("m", plain),
            memory("m", "profile = \"astrocyte\"\nrecall = [\"s:a\", \"s:b-*\"]"),
            &["recall s:b-* at m.example becomes reachable"],
        ),
        (
            memory("m", "profile = \"astrocyte\"\nrecall = [\"s:a\", \"s:*\"]"),
            memory("m", "profile = \"astrocyte\"\nrecall = [\"s:*\"]"),
            &[],
        ),
        (
            memory("m", plain),
            memory("m", &format!("{plain}\nidentity = \"from-channel\"")),
            &["m.example changes from identity required to identity from-channel"],
        ),
        (
            String::new(),
            memory("m", plain),
            &["m.example becomes reachable", "recall s:a at m.example becomes reachable"],
        ),
    ]);
}

fn compile_under(base: &str, environment: &str, body: &str) -> RuleSet {
    let operator = format!(
        "[[sandbox]]\nid = \"s\"\ntenant = \"t\"\nenvironment = \"{environment}\"\nbase = \"{base}\"\npolicies = [\"p\"]\n"
    );
    unwrap_rules(compile_configured(&operator, &[&format!("name = \"p\"\n{body}")]))
}

#[test]
fn bases_and_environments_count() {
    let private = allow("hosts = [\"db.example\"]\nresolves_to = [\"10.1.0.0/16\"]");
    let public = allow("hosts = [\"x.example\"]");
    let plain = memory("m", "profile = \"astrocyte\"\nrecall = [\"s:a\"]");
    let other = memory("m", "profile = \"astrocyte\"\nrecall = [\"s:a\", \"s:b\"]");
    for (old, new, expected) in [
        (
            compile_under("system", "s", &private),
            compile_under("user", "s", &private),
            &["db.example stops being reachable"][..],
        ),
        (compile_under("system", "s", &public), compile_under("user", "s", &public), &[]),
        (
            compile_under("user", "s", &public),
            compile_under("untrusted", "s", &public),
            &["x.example stops being reachable"],
        ),
        (compile_under("untrusted", "s", &plain), compile_under("untrusted", "s", &other), &[]),
        (
            compile_under("user", "s", &plain),
            compile_under("user", "s", &other),
            &["recall s:b at m.example becomes reachable"],
        ),
    ] {
        assert_eq!(compare_sandbox(&old, &new, "s"), expected);
    }
}

#[test]
fn a_long_list_is_compared_quickly() {
    let list: String = (0..20_000).map(|at| format!("host-{at}.mirror.example\n")).collect();
    let of = |method: &str| {
        let text = format!(
            "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts_file = \"l\"\n[[allow]]\nname = \"b\"\nhosts = [\"x.example\"]\nmethods = [\"{method}\"]"
        );
        unwrap_rules(super::compile_with_lists(&text, &[("l", &list)]))
    };
    let found = compare_sandbox(&of("GET"), &of("PUT"), "p");
    assert_eq!(found, ["PUT x.example becomes reachable", "GET x.example stops being reachable"]);
}

/// Generates a rule from a small vocabulary, so that rules often overlap.
fn rule_strategy() -> impl Strategy<Value = String> {
    let hosts = prop::sample::subsequence(
        vec![
            "x.example",
            "*.x.example",
            ".x.example",
            "a.x.example",
            "*.a.x.example",
            "x.example:8443",
            "*.x.example:8443",
            "a.x.example:80",
        ],
        1..=2,
    );
    let nets = prop::sample::subsequence(vec!["10.1.0.0/16", "10.1.2.0/24", "10.1.2.3/32"], 1..=2);
    let ports = prop::sample::select(vec!["", "ports = [443]", "ports = [80, 8443]"]);
    let methods = prop::sample::select(vec![
        "",
        "",
        "methods = [\"GET\"]",
        "methods = [\"GET\", \"POST\"]",
        "methods = []",
    ]);
    let paths = prop::option::of(prop::sample::subsequence(
        vec!["/", "/*", "/**", "/v1/*", "/v1/**", "/*/b", "/v1/b", "/v1/", "/**/b"],
        1..=2,
    ));
    let tail = prop::sample::select(vec!["", "", "", "tls = \"tunnel\"", "credential = \"k\""]);
    let kind = (any::<bool>(), prop::bool::weighted(0.2));
    (kind, hosts, nets, ports, methods, paths, tail).prop_map(
        |((denies, literal), hosts, nets, ports, methods, paths, tail)| {
            let (head, tail) = if denies { ("deny", "") } else { ("allow", tail) };
            let target = match literal {
                true => format!("addresses = {nets:?}"),
                false => format!("hosts = {hosts:?}"),
            };
            let paths = paths.map(|paths| format!("paths = {paths:?}")).unwrap_or_default();
            format!("[[{head}]]\nname = \"NAME\"\n{target}\n{ports}\n{methods}\n{paths}\n{tail}\n")
        },
    )
}

/// Generates two policies that differ in one rule, or in the order of their rules.
fn policy_pair() -> impl Strategy<Value = (Vec<String>, Vec<String>)> {
    (
        prop::collection::vec(rule_strategy(), 1..4),
        prop::option::of(rule_strategy()),
        any::<prop::sample::Index>(),
    )
        .prop_map(|(old, other, at)| {
            let mut new = old.clone();
            let at = at.index(old.len());
            match other {
                None => drop(new.remove(at)),
                Some(rule) if rule.len() % 2 == 0 => new.push(rule),
                Some(rule) => new[at] = rule,
            }
            (old, new)
        })
}

fn compile_rules(rules: &[String]) -> Option<RuleSet> {
    let named = |(at, rule): (usize, &String)| rule.replace("NAME", &format!("r{at}"));
    let body: String = rules.iter().enumerate().map(named).collect();
    compile_lone(&format!("name = \"p\"\n{body}")).ok()
}

/// Describes the decision on an attempt as far as it is visible outside.
fn visible_outcome(rules: &RuleSet, sandbox: &SandboxRef, probe: &PolicyProbe) -> Option<String> {
    let connect = PolicyProbe { method: None, path: None, ..probe.clone() };
    for probe in [&connect, probe] {
        match probe.decide(rules, sandbox) {
            Decision::Deny(_) => return None,
            Decision::Allow(permit) if *permit.treatment() == Treatment::Intercept => {}
            Decision::Allow(permit) => {
                return Some(format!(
                    "{} {:?}",
                    permit.treatment().as_str(),
                    (permit.credentials(), permit.pin_account())
                ));
            }
        }
    }
    Some(String::new())
}

fn probes() -> Vec<PolicyProbe> {
    let mut all = Vec::new();
    for host in
        ["x.example", "a.x.example", "b.x.example", "z.a.x.example", "10.1.0.1", "10.1.2.3", "10.1.2.9"]
    {
        for port in [80, 443, 8443, 9] {
            let plain = PolicyProbe::parse(&format!("{host}:{port}")).unwrap();
            for (method, path) in ["GET", "POST", "PUT"].iter().flat_map(|method| {
                let paths = ["/", "/v1", "/v1/", "/v1/b", "/v1/c", "/v1/c/b", "/q/b", "/b", "/a//b"];
                paths.into_iter().map(move |path| (method, path))
            }) {
                let (method, path) = (HttpMethod::parse(method).ok(), Some(path.to_owned()));
                all.push(PolicyProbe { method, path, ..plain.clone() });
            }
            all.push(PolicyProbe { special: ProbeKind::Lookup(QueryType::A), ..plain });
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn unreported_means_unchanged((old, new) in policy_pair()) {
        let (Some(before), Some(after)) = (compile_rules(&old), compile_rules(&new)) else { return Ok(()) };
        let one = sandbox_ref(&before, "p");
        let other = sandbox_ref(&after, "p");
        let found = diff((&before, &one), (&after, &other));
        if found.is_empty() {
            for probe in probes() {
                let (was, is) = (visible_outcome(&before, &one, &probe), visible_outcome(&after, &other, &probe));
                prop_assert_eq!(was, is, "{}\n{}\n-->\n{}", probe, old.concat(), new.concat());
            }
        }
    }
}
