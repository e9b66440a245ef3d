//! `explain`: the explanation is right, and its advice works.

use rules::Reason::*;
use rules::decision::PolicyLayer;
use rules::explain::{Explanation, MissCause, PolicyEdit};
use rules::facts::{BankOperation, HttpMethod, QueryType};
use rules::ids::BankId;
use rules::probe::{PolicyProbe, ProbeKind};
use rules::{Decision, RuleSet};

use super::{compile_configured, compile_lone, unwrap_rules};

fn policy(body: &str) -> RuleSet {
    unwrap_rules(compile_lone(&format!("name = \"p\"\n{body}")))
}

fn allow_rule(name: &str, body: &str) -> String {
    format!("[[allow]]\nname = \"{name}\"\n{body}\n")
}

/// Parses `[METHOD ]url`, `tcp url`, `dns TYPE name` or `recall BANK url`.
fn parse_probe(text: &str) -> PolicyProbe {
    let words: Vec<&str> = text.split(' ').collect();
    let mut probe = PolicyProbe::parse(words.last().unwrap()).unwrap();
    match words[..] {
        ["dns", query, _] => probe.special = ProbeKind::Lookup(QueryType::by_name(query).unwrap()),
        ["recall", bank, _] => {
            let bank = BankId::parse(bank).unwrap();
            probe.special = ProbeKind::Memory { operation: BankOperation::Read, bank };
        }
        ["tcp", _] => probe.special = ProbeKind::Raw,
        [method, _] => probe.method = Some(HttpMethod::parse(method).unwrap()),
        _ => {}
    }
    probe
}

fn explain(rules: &RuleSet, text: &str) -> Explanation {
    let sandbox = rules.sandboxes().iter().next().unwrap();
    rules.explain(sandbox, &parse_probe(text))
}

const CONFIGURATION: &str = "[[sandbox]]\nid = \"p\"\ntenant = \"t\"\nenvironment = \"s\"\nbase = \"system\"\npolicies = [\"p\"]\n[[credential]]\nname = \"k\"\nfile = \"k\"\nhosts = [\"key.example\"]\n";

fn compile_with(configuration: &str, text: &str) -> RuleSet {
    unwrap_rules(compile_configured(configuration, &[text]))
}

/// Returns the policy after applying the advice.
fn apply_edit(text: &str, change: &PolicyEdit) -> String {
    let (rule, key, entries, instead_of) = match change {
        PolicyEdit::Add(lines) => return format!("{text}\n{lines}\n"),
        PolicyEdit::Extend { rule, key, entry } => (rule, *key, vec![entry.clone()], None),
        PolicyEdit::Set { rule, key, entries, instead_of } => (rule, *key, entries.clone(), *instead_of),
    };
    let block = text.split("[[").find(|block| block.contains(&format!("name = \"{}\"\n", rule.rule)));
    let block = block.unwrap();
    let begins = |line: &str, key: &str| line.starts_with(&format!("{key} = "));
    let old = block.lines().find(|line| begins(line, key)).map(|line| line.trim_end_matches(']'));
    let entries = format!("{entries:?}");
    let line = match (change, old) {
        (PolicyEdit::Extend { .. }, Some(old)) => {
            format!("{old}, {}", entries.trim_start_matches('['))
        }
        _ => format!("{key} = {entries}"),
    };
    let rest = block
        .lines()
        .filter(|line| !begins(line, key) && !instead_of.is_some_and(|other| begins(line, other)));
    let new = rest.chain([line.as_str(), ""]).collect::<Vec<_>>().join("\n");
    text.replace(block, &new)
}

fn describe_edit(change: &PolicyEdit) -> String {
    match change {
        PolicyEdit::Add(lines) => lines.lines().skip(1).collect::<Vec<_>>().join("; "),
        PolicyEdit::Extend { rule, key, entry } => format!("{}: {key} += {entry}", rule.rule),
        PolicyEdit::Set { rule, key, entries, instead_of } => {
            format!("{}: {key} = {entries:?} without {instead_of:?}", rule.rule)
        }
    }
}

#[test]
fn p18_advice_loads_and_works() {
    let text = "name = \"p\"\n".to_owned()
        + &allow_rule("code", "hosts = [\"github.com\"]\nmethods = [\"GET\"]\npaths = [\"/acme/**\"]")
        + &allow_rule("api", "hosts = [\"api.example\", \"*.wide.example\", \"*.amazonaws.com\"]")
        + &allow_rule("read", "hosts = [\"read.example\"]\naccess = \"read-only\"")
        + &allow_rule("key", "hosts = [\"key.example\"]\ncredential = \"k\"")
        + &allow_rule("net", "addresses = [\"10.2.3.0/24\"]\nports = [8443]")
        + &allow_rule("10.2.3.4", "hosts = [\"taken.example\"]")
        + &allow_rule("db", "hosts = [\"db.example\"]\ntcp = [5432]\nmemory = \"may-receive\"")
        + &allow_rule("txt", "hosts = [\"txt.example\"]\ndns_types = [\"A\"]")
        + "[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"s:a\"]\n"
        + "[[deny]]\nhosts = [\"denied.example:8443\"]\n";
    let rules = compile_with(CONFIGURATION, &text);
    for (attempt, reason, expected) in [
        ("pastebin.example", NotListed, "name = \"pastebin.example\"; hosts = [\"pastebin.example\"]"),
        (
            "pastebin.example:8443",
            NotListed,
            "name = \"pastebin.example\"; hosts = [\"pastebin.example:8443\"]",
        ),
        ("8.8.8.8:853", AddressNotListed, "name = \"8.8.8.8\"; addresses = [\"8.8.8.8/32\"]; ports = [853]"),
        (
            "[2001:4860::1]:443",
            AddressNotListed,
            "name = \"[2001:4860::1]\"; addresses = [\"2001:4860::1/128\"]; ports = [443]",
        ),
        (
            "POST https://new.example/",
            NotListed,
            "name = \"new.example\"; hosts = [\"new.example\"]; methods = [\"POST\"]",
        ),
        ("db.corp.internal", NotListed, "name = \"db.corp.internal\"; hosts = [\"db.corp.internal\"]"),
        ("github.io", NotListed, "name = \"github.io\"; hosts = [\"github.io\"]; dangerously_wide = true"),
        (
            "s3.amazonaws.com:8443",
            PortNotListed,
            "name = \"s3.amazonaws.com\"; hosts = [\"s3.amazonaws.com:8443\"]; dangerously_wide = true",
        ),
        ("dns A new.example", NotListed, "name = \"new.example\"; hosts = [\"new.example\"]"),
        (
            "dns TXT new.example",
            NotListed,
            "name = \"new.example\"; hosts = [\"new.example\"]; dns_types = [\"A\", \"AAAA\", \"HTTPS\", \"TXT\"]",
        ),
        (
            "dns TXT api.example",
            DnsTypeNotAllowed,
            "api: dns_types = [\"A\", \"AAAA\", \"HTTPS\", \"TXT\"] without None",
        ),
        ("dns TXT txt.example", DnsTypeNotAllowed, "txt: dns_types = [\"A\", \"TXT\"] without None"),
        ("POST https://github.com/acme/x", MethodNotAllowed, "code: methods += POST"),
        (
            "POST https://github.com/other",
            MethodNotAllowed,
            "name = \"github.com\"; hosts = [\"github.com\"]; methods = [\"POST\"]",
        ),
        ("GET https://github.com/other", PathNotAllowed, "code: paths += /other"),
        (
            "POST https://read.example/",
            MethodNotAllowed,
            "read: methods = [\"GET\", \"HEAD\", \"OPTIONS\", \"POST\"] without Some(\"access\")",
        ),
        ("github.com:8443", PortNotListed, "code: hosts += github.com:8443"),
        (
            "POST https://github.com:8443/",
            PortNotListed,
            "name = \"github.com\"; hosts = [\"github.com:8443\"]; methods = [\"POST\"]",
        ),
        ("a.wide.example:8443", PortNotListed, "api: hosts += a.wide.example:8443"),
        (
            "GET http://key.example/",
            PortNotListed,
            "name = \"key.example\"; hosts = [\"key.example:80\"]; methods = [\"GET\"]",
        ),
        (
            "10.2.3.4:443",
            PortNotListed,
            "name = \"10.2.3.4 2\"; addresses = [\"10.2.3.4/32\"]; ports = [443]",
        ),
        ("db.example:443", PortNotListed, "name = \"db.example\"; hosts = [\"db.example\"]"),
        ("recall s:b m.example", ForeignBank, "m: recall += s:b"),
    ] {
        let found = explain(&rules, attempt);
        assert_eq!(found.decision.reason(), Some(reason), "{attempt}");
        let Some(change) = found.change else { panic!("no advice for {attempt}") };
        assert_eq!(describe_edit(&change), expected, "{attempt}");
        let edited = compile_with(CONFIGURATION, &apply_edit(&text, &change));
        let after = explain(&edited, attempt).decision;
        assert!(matches!(after, Decision::Allow(_)), "the advice for {attempt} does not work: {after:?}");
    }
}

#[test]
fn raw_tcp_is_advised_where_no_rule_decides_requests() {
    let text = "name = \"p\"\n".to_owned() + &allow_rule("api", "hosts = [\"api.example\"]");
    let rules = compile_with(CONFIGURATION, &text);
    let attempt = "tcp api.example:22";
    let change = explain(&rules, attempt).change.unwrap();
    assert_eq!(describe_edit(&change), "name = \"api.example\"; hosts = [\"api.example\"]; tcp = [22]");
    let edited = compile_with(CONFIGURATION, &apply_edit(&text, &change));
    assert!(matches!(explain(&edited, attempt).decision, Decision::Allow(_)));
    // On port 443 rule `api` decides requests, so a raw TCP rule would not load.
    assert_eq!(explain(&rules, "tcp api.example:443").change, None);
}

#[test]
fn denials_that_no_edit_should_lift_get_no_advice() {
    let text = "name = \"p\"\n".to_owned()
        + &allow_rule(
            "wide",
            "hosts = [\"*.google\", \"x.example\"]\npaths = [\"/a\"]\ndangerously_wide = true",
        )
        + "[[deny]]\nhosts = [\"denied.example\"]\n"
        + "[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"s:a\"]\n";
    let rules = compile_with(CONFIGURATION, &text);
    for (attempt, reason) in [
        ("dns.google", EncryptedResolver),
        ("cloudflare-dns.com", NotListed),
        ("denied.example", DeniedByRule),
        ("use-application-dns.net", ResolverDiscovery),
        ("https://new.example:80", NotListed),
        ("https://x.example:80", PortNotListed),
        ("https://x.example/a*b", PathNotAllowed),
        ("https://x.example/%2f", AmbiguousPath),
        ("tcp x.example:443", RawTcpNotAllowed),
        ("m.example:8443", PortNotListed),
        ("dns TXT m.example", DnsTypeNotAllowed),
        ("recall other:a m.example", ForeignBank),
        ("recall s:a new.example", NotListed),
    ] {
        let found = explain(&rules, attempt);
        assert_eq!(found.decision.reason(), Some(reason), "{attempt}");
        let advice = found.change.as_ref().map(describe_edit);
        assert_eq!(advice, None, "{attempt}");
    }
    for method in ["TRACE", "CONNECT"] {
        let found = explain(&rules, &format!("{method} https://x.example/"));
        assert_eq!((found.change, found.never.is_some()), (None, true), "{method}");
    }
}

#[test]
fn no_advice_is_given_against_the_base() {
    let own = "name = \"p\"\n".to_owned()
        + &allow_rule("r", "hosts = [\"x.example\", \".x.example\", \"y.example\"]");
    let base = "name = \"floor\"\n".to_owned()
        + &allow_rule("f", "hosts = [\"y.example\", \"githup.com\"]\nmethods = [\"GET\"]");
    let of = |floor: &str| {
        let configuration = CONFIGURATION.replace("system", floor);
        unwrap_rules(compile_configured(&configuration, &[&own, &base]))
    };
    for (floor, attempt) in
        [("untrusted", "x.example"), ("floor", "x.example"), ("floor", "POST https://y.example/")]
    {
        let found = explain(&of(floor), attempt);
        let Decision::Deny(denial) = &found.decision else { panic!("{floor}: {attempt}") };
        assert_eq!((denial.layer, &found.change), (PolicyLayer::Base, &None), "{floor}: {attempt}");
        let allowed = found.near.iter().filter(|near| &*near.rule.rule == "r");
        let whys: Vec<MissCause> = allowed.map(|near| near.why).collect();
        let decided = denial.rule.as_ref().is_some_and(|rule| &*rule.rule == "r");
        let expected = if decided { vec![] } else { vec![MissCause::BaseRefuses] };
        assert_eq!(whys, expected, "{floor}: {attempt}: each rule is reported once");
    }
    let misspelt = explain(&of("floor"), "github.com");
    assert_eq!((misspelt.near.len(), misspelt.near[0].rule.layer), (1, PolicyLayer::Base));
    for (floor, attempt) in
        [("user", "tcp x.example:443"), ("untrusted", "new.example"), ("user", "a.internal")]
    {
        assert_eq!(explain(&of(floor), attempt).change, None, "{floor}: {attempt}");
    }
}

#[test]
fn near_misses_are_reported() {
    let rules = policy(
        &(allow_rule("code", "hosts = [\"github.com\"]\nmethods = [\"GET\"]")
            + &allow_rule("wide", "hosts = [\"*.example.com\"]")
            + &allow_rule("one", "hosts = [\"a.example.com\"]")
            + "[[deny]]\nhosts = [\"b.example.com\"]"),
    );
    let misspelt = explain(&rules, "githud.com");
    assert_eq!(
        (misspelt.near.len(), misspelt.near[0].why, misspelt.near[0].pattern.as_str()),
        (1, MissCause::OtherName, "github.com")
    );
    let apex = explain(&rules, "example.com");
    assert!(apex.near.iter().any(|near| near.pattern == "*.example.com"), "{apex:?}");
    let both = explain(&rules, "GET https://a.example.com/");
    assert_eq!((both.near.len(), both.near[0].why), (1, MissCause::LessSpecific));
    let denied = explain(&rules, "b.example.com");
    assert_eq!((denied.near.len(), denied.near[0].why), (1, MissCause::DenyWins));
    let method = explain(&rules, "POST https://github.com/");
    assert_eq!(method.decision.reason(), Some(MethodNotAllowed));
    assert_eq!(method.near, [], "the decision already names the rule that refused");
}
