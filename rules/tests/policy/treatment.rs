//! What becomes of a connection: `RuleSet::treatment`, `explain` and `decide` agree on any policy (P3), raw TCP and
//! requests never share a host and port, and deny always wins.

use std::net::IpAddr;

use proptest::prelude::*;
use rules::Reason::*;
use rules::decision::{PolicyLayer, Treatment};
use rules::facts::*;
use rules::name::Host;
use rules::probe::{PolicyProbe, ProbeKind};
use rules::treatment::{ConnectionTreatment, FirstBytes};
use rules::{Decision, Facts, Reason, RuleSet, SandboxRef};

use super::{compile_configured, compile_lone, error_texts, sandbox_ref, unwrap_rules};

fn host(name: &str) -> Host {
    Host::parse(name).unwrap()
}

fn tls(name: &str) -> Protocol {
    let sni = host(name).name().map(|_| host(name));
    Protocol::Tls { sni, ech: EchPresence::Absent }
}

/// Names what becomes of a connection: the word for it and its rule, or the reason of its denial.
fn describe(
    rules: &RuleSet,
    target: &ConnectTarget,
    port: u16,
    first: &FirstBytes,
) -> Result<(&'static str, String), Reason> {
    let rule = |permit: &rules::Permit| permit.rule().rule.to_string();
    match rules.treatment(&sandbox_ref(rules, "p"), target, port, first) {
        Err(denial) => Err(denial.reason),
        Ok(ConnectionTreatment::Detect) => Ok(("detect", String::new())),
        Ok(ConnectionTreatment::Intercept(permit)) => Ok(("intercept", rule(&permit))),
        Ok(ConnectionTreatment::Relay(permit)) => Ok((permit.treatment().as_str(), rule(&permit))),
        Ok(ConnectionTreatment::Requests) => Ok(("requests", String::new())),
    }
}

#[test]
fn p3_first_bytes_and_target_say_what_becomes_of_a_connection() {
    let rules = unwrap_rules(compile_lone(
        r#"name = "p"
        [[allow]]
        name = "web"
        hosts = ["web.example", "plain.example:80"]
        [[allow]]
        name = "blind"
        hosts = ["blind.example"]
        tls = "tunnel"
        [[allow]]
        name = "db"
        hosts = ["db.example"]
        tcp = [5432]
        [[allow]]
        name = "appliance"
        addresses = ["203.0.113.7/32"]
        tcp = [22]
        [[deny]]
        hosts = ["never.example"]
        ports = [9999]
        "#,
    ));
    let named = |name: &str| ConnectTarget::Named(host(name));
    let dialled = |address: &str| ConnectTarget::Dialled(address.parse().unwrap());
    let read = FirstBytes::Read;
    let http = |name: &str| read(Protocol::Http { host: Some(host(name)) });
    for (target, port, first, expected) in [
        (named("web.example"), 443, FirstBytes::Unread, Ok(("detect", ""))),
        (named("web.example"), 443, read(tls("web.example")), Ok(("intercept", "web"))),
        (named("web.example"), 443, read(Protocol::Raw), Err(RawTcpNotAllowed)),
        (named("web.example"), 8443, FirstBytes::Unread, Err(PortNotListed)),
        (named("plain.example"), 80, FirstBytes::Unread, Ok(("detect", ""))),
        (named("plain.example"), 80, http("plain.example"), Ok(("requests", ""))),
        (named("blind.example"), 443, read(tls("blind.example")), Ok(("tunnel", "blind"))),
        // Raw TCP passes before and whatever the client speaks.
        (named("db.example"), 5432, FirstBytes::Unread, Ok(("raw", "db"))),
        (named("db.example"), 5432, read(tls("db.example")), Ok(("raw", "db"))),
        (named("db.example"), 5432, http("db.example"), Ok(("raw", "db"))),
        (named("db.example"), 443, FirstBytes::Unread, Err(PortNotListed)),
        (named("other.example"), 443, FirstBytes::Unread, Err(NotListed)),
        (dialled("203.0.113.7"), 22, FirstBytes::Unread, Ok(("raw", "appliance"))),
        // An address may still turn out to be any name, but not on a port that no rule opens.
        (dialled("203.0.113.9"), 443, FirstBytes::Unread, Ok(("detect", ""))),
        (dialled("203.0.113.9"), 80, FirstBytes::Unread, Ok(("detect", ""))),
        (dialled("203.0.113.9"), 25, FirstBytes::Unread, Err(PortNotListed)),
        (dialled("203.0.113.9"), 9999, FirstBytes::Unread, Err(PortNotListed)),
        (dialled("203.0.113.9"), 443, read(tls("web.example")), Ok(("intercept", "web"))),
    ] {
        let found = describe(&rules, &target, port, &first);
        let found = found.as_ref().map(|(word, rule)| (*word, rule.as_str())).map_err(|reason| *reason);
        assert_eq!(found, expected, "{target:?} {port} {first:?}");
    }
}

#[test]
fn p3_raw_tcp_and_requests_on_one_host_and_port_do_not_load() {
    let raw = |body: &str| format!("[[allow]]\nname = \"raw\"\n{body}\n");
    let other = |body: &str| format!("[[allow]]\nname = \"other\"\n{body}\n");
    for (one, two, overlap) in [
        ("hosts = [\"x.example\"]\ntcp = [443]", "hosts = [\"x.example\"]", Some("`x.example` on port 443")),
        (
            "hosts = [\"x.example\"]\ntcp = [22, 9085]",
            "hosts = [\"x.example\"]\nports = [9084, 9085]\nrequests_per_hour = 1",
            Some("`x.example` on port 9085"),
        ),
        (
            "hosts = [\"a.x.example\"]\ntcp = [443]",
            "hosts = [\"*.x.example\"]",
            Some("`a.x.example` on port 443"),
        ),
        (
            "hosts = [\"x.example\"]\ntcp = [8443]",
            "hosts = [\".x.example:8443\"]",
            Some("`x.example` on port 8443"),
        ),
        (
            "hosts = [\"x.example\"]\ntcp = [443]",
            "hosts = [\"x.example\"]\ntls = \"tunnel\"",
            Some("`x.example` on port 443"),
        ),
        (
            "hosts = [\"x.example\"]\ntcp = [7000]",
            "hosts = [\"*\"]\nports = [7000]\ndangerously_wide = true",
            Some("`x.example` on port 7000"),
        ),
        (
            "addresses = [\"203.0.113.0/24\"]\ntcp = [443]",
            "addresses = [\"203.0.113.7/32\"]\nports = [443]",
            Some("`203.0.113.0/24` on port 443"),
        ),
        (
            "addresses = [\"203.0.113.7/32\"]\ntcp = [443]",
            "addresses = [\"203.0.113.0/24\"]\nports = [443]",
            Some("`203.0.113.7/32` on port 443"),
        ),
        ("hosts = [\"x.example\"]\ntcp = [5432]", "hosts = [\"x.example\"]", None),
        ("hosts = [\"x.example\"]\ntcp = [443]", "hosts = [\"*.x.example\", \"y.example\"]", None),
        ("hosts = [\"x.example\"]\ntcp = [443]", "hosts = [\"x.example:80\"]", None),
        ("hosts = [\"x.example\"]\ntcp = [443]", "hosts = [\"x.example\"]\ntcp = [443, 444]", None),
        (
            "addresses = [\"203.0.113.7/32\"]\ntcp = [443]",
            "addresses = [\"203.0.113.8/32\"]\nports = [443]",
            None,
        ),
    ] {
        let together = error_texts(compile_lone(&format!("name = \"p\"\n{}{}", raw(one), other(two))));
        // The same two rules in two policies of one sandbox.
        let configuration = "[[sandbox]]\nid = \"s\"\nbase = \"system\"\npolicies = [\"p\", \"q\"]";
        let apart = [format!("name = \"p\"\n{}", raw(one)), format!("name = \"q\"\n{}", other(two))];
        let apart = error_texts(compile_configured(configuration, &[&apart[0], &apart[1]]));
        for found in [together.join("\n"), apart.join("\n")] {
            match overlap {
                None => assert_eq!(found, "", "{one}\n{two}"),
                Some(place) => {
                    let expected = format!("rule `raw` lets raw TCP pass to {place}, where rule `other`");
                    assert!(found.contains(&expected), "{one}\n{two}: {found}");
                }
            }
        }
    }
}

#[test]
fn p1_a_deny_rule_for_an_address_holds_for_every_name_that_leads_there() {
    let rules = unwrap_rules(compile_lone(
        r#"name = "p"
        [[allow]]
        name = "web"
        hosts = ["web.example"]
        resolves_to = ["10.0.0.0/8", "64:ff9b::/96", "203.0.113.0/24"]
        [[allow]]
        name = "blind"
        hosts = ["blind.example"]
        tls = "tunnel"
        resolves_to = ["203.0.113.0/24"]
        [[allow]]
        name = "raw"
        hosts = ["raw.example"]
        tcp = [5432]
        resolves_to = ["203.0.113.0/24"]
        [[deny]]
        name = "no writes"
        addresses = ["203.0.113.7/32", "10.0.0.9/32"]
        methods = ["POST"]
        [[deny]]
        name = "no admin"
        addresses = ["203.0.113.8/32"]
        paths = ["/admin/**"]
        [[deny]]
        name = "other port"
        addresses = ["203.0.113.9/32"]
        ports = [8443]
        methods = ["POST"]
        "#,
    ));
    let permit = |text: &str, raw: bool| {
        let (method, url) = text.split_once(' ').unwrap_or(("", text));
        let mut probe = PolicyProbe::parse(url).unwrap();
        probe.method = HttpMethod::parse(method).ok();
        probe.special = if raw { ProbeKind::Raw } else { ProbeKind::Connection };
        match probe.decide(&rules, &sandbox_ref(&rules, "p")) {
            Decision::Allow(permit) => permit,
            Decision::Deny(denial) => panic!("{text}: {denial:?}"),
        }
    };
    for (text, address, denied) in [
        ("POST web.example/x", "203.0.113.7", Some("no writes")),
        ("GET web.example/x", "203.0.113.7", None),
        ("POST web.example/x", "203.0.113.6", None),
        ("POST web.example/x", "10.0.0.9", Some("no writes")),
        // The same address in the NAT64 form.
        ("POST web.example/x", "64:ff9b::cb00:7107", Some("no writes")),
        ("GET web.example/admin/keys", "203.0.113.8", Some("no admin")),
        ("GET web.example/admin", "203.0.113.8", Some("no admin")),
        ("GET web.example/administer", "203.0.113.8", None),
        ("POST web.example/x", "203.0.113.9", None),
        // Bytes that pass unseen may hold a request that the rule denies.
        ("blind.example", "203.0.113.7", Some("no writes")),
        ("blind.example", "203.0.113.9", None),
        ("raw.example:5432", "203.0.113.8", Some("no admin")),
        ("raw.example:5432", "203.0.113.9", None),
    ] {
        let address: IpAddr = address.parse().unwrap();
        let found = rules.admit(&permit(text, text.starts_with("raw")), &[address]);
        match denied {
            None => assert!(found.is_ok(), "{text} at {address}: {found:?}"),
            Some(rule) => {
                let denial = found.expect_err(text);
                assert_eq!(denial.reason, DeniedByRule, "{text} at {address}");
                let named = denial.rule.as_ref().map(|rule| rule.rule.to_string());
                assert_eq!(named.as_deref(), Some(rule), "{text} at {address}");
            }
        }
    }
}

const HOSTS: [&str; 4] = ["x.example", "a.x.example", "b.a.x.example", "y.example"];
const PORTS: [u16; 4] = [80, 443, 5432, 8443];

prop_compose! {
    /// One rule: raw, tunnelled, filtered or plain, or a deny rule.
    fn any_rule(at: usize)(
        kind in 0..8u8,
        pattern in prop::sample::select(vec!["x.example", "a.x.example", "*.x.example", ".a.x.example", "y.example", "*.example"]),
        port in prop::sample::select(PORTS.to_vec()),
    ) -> String {
        let wide = if pattern == "*.example" { "dangerously_wide = true\n" } else { "" };
        let exact = pattern.trim_start_matches("*.").trim_start_matches('.');
        let open = format!("[[allow]]\nname = \"r{at}\"\nhosts = [\"{pattern}\"]\nports = [{port}]\n{wide}");
        match kind {
            0 | 1 => format!("[[allow]]\nname = \"r{at}\"\nhosts = [\"{exact}\"]\n{wide}tcp = [{port}]\n"),
            2 => format!("{open}tls = \"tunnel\"\n"),
            3 => format!("{open}methods = [\"GET\"]\n"),
            4 => format!("{open}paths = [\"/v1/**\"]\n"),
            5 => format!("[[deny]]\nname = \"r{at}\"\nhosts = [\"{pattern}\"]\nmethods = [\"POST\"]\n"),
            6 => format!("[[deny]]\nname = \"r{at}\"\nhosts = [\"{pattern}\"]\nports = [{port}]\n"),
            _ => open,
        }
    }
}

fn any_policy() -> impl Strategy<Value = RuleSet> {
    let policies = (any_rule(0), any_rule(1), any_rule(2), any_rule(3));
    // Many random policies do not load, for a rule in them never acts: each time the longest front that does is used.
    policies.prop_filter_map("no policy", |(a, b, c, d)| {
        let rules = [a, b, c, d];
        (1..=4)
            .rev()
            .find_map(|count| compile_lone(&format!("name = \"p\"\n{}", rules[..count].concat())).ok())
    })
}

fn any_probe() -> impl Strategy<Value = PolicyProbe> {
    let hosts = prop::sample::select(HOSTS.to_vec());
    let ports = prop::sample::select(PORTS.to_vec());
    let methods = prop::sample::select(vec![None, Some("GET"), Some("POST")]);
    let paths = prop::sample::select(vec![None, Some("/v1/a"), Some("/other"), Some("/v1/..%2fx")]);
    (hosts, ports, methods, paths, 0..3u8).prop_map(|(name, port, method, path, kind)| PolicyProbe {
        host: host(name),
        port,
        scheme: if kind == 0 { UrlScheme::Http } else { UrlScheme::Https },
        method: method.map(|method| HttpMethod::parse(method).unwrap()),
        path: path.map(str::to_owned),
        special: if kind == 2 { ProbeKind::Raw } else { ProbeKind::Connection },
    })
}

/// Walks through the steps of the data path: nothing read, first bytes, then a request where one can be seen.
fn walk(rules: &RuleSet, sandbox: &SandboxRef, probe: &PolicyProbe) -> Decision {
    let target = ConnectTarget::Named(probe.host.clone());
    let spoken = match (&probe.special, probe.scheme) {
        (ProbeKind::Raw, _) => Protocol::Raw,
        (_, UrlScheme::Http) => Protocol::Http { host: Some(probe.host.clone()) },
        (_, UrlScheme::Https) => tls(&probe.host.to_string()),
    };
    let connect =
        Facts::Connect(ConnectFacts { target: target.clone(), port: probe.port, protocol: spoken.clone() });
    let permit = match rules.treatment(sandbox, &target, probe.port, &FirstBytes::Unread) {
        Err(denial) => return Decision::Deny(denial),
        Ok(ConnectionTreatment::Relay(permit)) => return Decision::Allow(permit),
        Ok(ConnectionTreatment::Detect) => {
            match rules.treatment(sandbox, &target, probe.port, &FirstBytes::Read(spoken)) {
                Err(denial) => return Decision::Deny(denial),
                Ok(ConnectionTreatment::Relay(permit)) => return Decision::Allow(permit),
                Ok(ConnectionTreatment::Intercept(permit)) => permit,
                Ok(ConnectionTreatment::Requests) => match rules.decide(sandbox, &connect) {
                    Decision::Allow(permit) => permit,
                    denied @ Decision::Deny(_) => return denied,
                },
                Ok(ConnectionTreatment::Detect) => panic!("the bytes are read"),
            }
        }
        Ok(other) => panic!("nothing is read, and yet {other:?}"),
    };
    if probe.method.is_none() && probe.path.is_none() {
        return Decision::Allow(permit);
    }
    let request = RequestFacts {
        connection: Some(probe.host.clone()),
        authorities: vec![RequestAuthority { host: probe.host.clone(), port: Some(probe.port) }],
        port: probe.port,
        scheme: probe.scheme,
        version: HttpVersion::Http1,
        method: probe.method.clone().unwrap_or_else(HttpMethod::get),
        path: probe.path.clone().unwrap_or_else(|| "/".to_owned()),
    };
    rules.decide(sandbox, &Facts::Request(request))
}

fn summary(decision: &Decision) -> (Option<Reason>, Option<String>, Option<Treatment>) {
    match decision {
        Decision::Allow(permit) => {
            (None, Some(permit.rule().rule.to_string()), Some(permit.treatment().clone()))
        }
        Decision::Deny(denial) => {
            (Some(denial.reason), denial.rule.as_ref().map(|rule| rule.rule.to_string()), None)
        }
    }
}

proptest! {
    /// `explain` and `[[test]]` give the answer of the data path.
    #[test]
    fn p3_explain_agrees_with_the_steps_of_a_connection(rules in any_policy(), probe in any_probe()) {
        let sandbox = sandbox_ref(&rules, "p");
        let explained = rules.explain(&sandbox, &probe).decision;
        let walked = walk(&rules, &sandbox, &probe);
        // Where CONNECT is refused, the refusal is that of TLS, which most clients speak.
        let refused_unread = rules
            .treatment(&sandbox, &ConnectTarget::Named(probe.host.clone()), probe.port, &FirstBytes::Unread)
            .is_err();
        if refused_unread {
            prop_assert!(explained.reason().is_some() && walked.reason().is_some());
        } else {
            prop_assert_eq!(summary(&explained), summary(&walked), "{}", probe);
        }
    }

    /// No rule loads that shares a host and port with raw TCP, so no rule's filters or budgets are bypassed.
    #[test]
    fn p3_no_loaded_policy_has_raw_tcp_beside_requests(rules in any_policy(), probe in any_probe()) {
        let sandbox = sandbox_ref(&rules, "p");
        let Decision::Allow(permit) = rules.explain(&sandbox, &probe).decision else { return Ok(()) };
        if *permit.treatment() == Treatment::Raw {
            let request = PolicyProbe { special: ProbeKind::Connection, method: Some(HttpMethod::get()), ..probe };
            for facts in request.facts(&sandbox).into_iter().skip(1) {
                prop_assert!(rules.decide(&sandbox, &facts).reason().is_some(), "a rule decides requests too");
            }
        }
    }
}

/// Plain requests and plain connections to a memory service are refused whatever other rule names its host: only the
/// guard, which reads banks and identity, may go there.
#[test]
fn p12_no_other_rule_opens_the_host_and_port_of_a_memory_service() {
    let rules = unwrap_rules(compile_lone(
        r#"name = "p"
        [[allow]]
        name = "corp"
        hosts = ["*.corp.example"]
        ports = [80, 443, 8443]
        [[memory]]
        name = "team"
        host = "memory.corp.example:8443"
        profile = "astrocyte"
        recall = ["staging:a"]
        "#,
    ));
    let sandbox = sandbox_ref(&rules, "p");
    let request = |name: &str, port: u16, scheme: UrlScheme| {
        Facts::Request(RequestFacts {
            connection: Some(host(name)),
            authorities: Vec::new(),
            port,
            scheme,
            version: HttpVersion::Http1,
            method: HttpMethod::get(),
            path: "/".to_owned(),
        })
    };
    let connect = |name: &str, port: u16, protocol: Protocol| {
        Facts::Connect(ConnectFacts { target: ConnectTarget::Named(host(name)), port, protocol })
    };
    let http = |name: &str| Protocol::Http { host: Some(host(name)) };
    for (facts, expected) in [
        (request("memory.corp.example", 8443, UrlScheme::Https), Err((MemoryOperation, "team"))),
        (request("memory.corp.example", 8443, UrlScheme::Http), Err((MemoryOperation, "team"))),
        (request("memory.corp.example", 443, UrlScheme::Https), Ok("corp")),
        (request("other.corp.example", 8443, UrlScheme::Https), Ok("corp")),
        (connect("memory.corp.example", 8443, http("memory.corp.example")), Err((WrongProtocol, "team"))),
        (connect("memory.corp.example", 8443, Protocol::Raw), Err((WrongProtocol, "team"))),
        (connect("memory.corp.example", 8443, tls("memory.corp.example")), Ok("team")),
        (connect("memory.corp.example", 80, http("memory.corp.example")), Ok("corp")),
    ] {
        let decision = rules.decide(&sandbox, &facts);
        let found = match &decision {
            Decision::Allow(permit) => Ok(&*permit.rule().rule),
            Decision::Deny(denial) => {
                Err((denial.reason, denial.rule.as_ref().map_or("", |rule| &*rule.rule)))
            }
        };
        assert_eq!(found, expected, "{facts:?}");
    }
}

/// The reason of a denial is that of the rule that came closest, and only an ended grant is reported as one.
#[test]
fn p18_a_denial_has_the_reason_of_the_rule_that_came_closest() {
    let policy = |deny: &str| {
        format!(
            "name = \"p\"\n[[allow]]\nname = \"port\"\nhosts = [\"x.example:8443\"]\n\
             [[allow]]\nname = \"method\"\nhosts = [\"x.example\"]\nmethods = [\"PUT\"]\n\
             [[allow]]\nname = \"path\"\nhosts = [\"x.example\"]\nmethods = [\"GET\"]\npaths = [\"/v1/**\"]\n{deny}"
        )
    };
    let sources = |deny: &str| rules::LoadSources {
        policies: vec![super::source_file("p.toml", &policy(deny))],
        ..rules::LoadSources::default()
    };
    let grant = |id: &str, name: &str| rules::Grant {
        id: id.to_owned(),
        sandbox: rules::ids::SandboxId::parse("p").unwrap(),
        host: rules::pattern::HostPattern::parse(name, rules::pattern::PatternWidth::Narrow).unwrap(),
        methods: None,
        paths: None,
        budgets: rules::budget::Budgets::default(),
    };
    let rules = unwrap_rules(rules::compile(&sources(""), &[]));
    for (text, expected) in [
        ("POST x.example/v1/a", (MethodNotAllowed, "path")),
        ("GET x.example/v2/a", (PathNotAllowed, "path")),
        ("GET x.example:9000/v1/a", (PortNotListed, "port")),
        ("GET y.example/", (NotListed, "")),
    ] {
        let (method, url) = text.split_once(' ').unwrap();
        let mut probe = PolicyProbe::parse(url).unwrap();
        probe.method = HttpMethod::parse(method).ok();
        let Decision::Deny(denial) = probe.decide(&rules, &sandbox_ref(&rules, "p")) else {
            panic!("{text}")
        };
        let rule = denial.rule.as_ref().map_or("", |rule| &*rule.rule);
        if expected.1 == "path" && denial.reason == MethodNotAllowed {
            assert!(["method", "path"].contains(&rule), "{text}: {rule}");
        } else {
            assert_eq!((denial.reason, rule), expected, "{text}");
        }
    }

    let granted =
        unwrap_rules(rules::compile(&sources(""), &[grant("1", "g.example"), grant("2", "h.example")]));
    let probe = |name: &str| PolicyProbe::parse(name).unwrap().decide(&granted, &sandbox_ref(&granted, "p"));
    let (Decision::Allow(by_grant), Decision::Allow(by_rule)) = (probe("g.example"), probe("x.example:8443"))
    else {
        panic!("both are allowed")
    };
    let deny = |name: &str| format!("[[deny]]\nhosts = [\"{name}\"]\n");
    for (what, after, permit, expected) in [
        ("it stays", (String::new(), vec![grant("1", "g.example")]), &by_grant, None),
        ("all end", (String::new(), vec![]), &by_grant, Some(GrantEnded)),
        (
            "it ends beside another",
            (String::new(), vec![grant("2", "h.example")]),
            &by_grant,
            Some(GrantEnded),
        ),
        (
            "it stays, but a rule denies",
            (deny("g.example"), vec![grant("1", "g.example")]),
            &by_grant,
            Some(DeniedByRule),
        ),
    ] {
        let now = unwrap_rules(rules::compile(&sources(&after.0), &after.1));
        assert_eq!(now.decide_again(permit, None).reason(), expected, "{what}");
    }
    let elsewhere = policy("").replace("x.example:8443", "z.example:8443");
    let now = unwrap_rules(compile_lone(&elsewhere));
    assert_eq!(now.decide_again(&by_rule, None).reason(), Some(PortNotListed), "a rule, not a grant");
}

/// A denied address names the address, the rule that let the name resolve, and the layer that refused.
#[test]
fn p18_a_refused_address_is_named_with_its_rule() {
    let configuration = "[[sandbox]]\nid = \"p\"\nbase = \"base\"\npolicies = [\"p\"]";
    let own = "name = \"p\"\n[[allow]]\nname = \"web\"\nhosts = [\"web.example\"]\n";
    let base = "name = \"base\"\n[[allow]]\nname = \"any\"\nhosts = [\"*.example\"]\ndangerously_wide = true\n\
                [[deny]]\nname = \"no such net\"\naddresses = [\"8.8.8.0/24\"]\n";
    let rules = unwrap_rules(compile_configured(configuration, &[own, base]));
    let probe = PolicyProbe::parse("web.example").unwrap();
    let Decision::Allow(permit) = probe.decide(&rules, &sandbox_ref(&rules, "p")) else { panic!("allowed") };
    let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
    for (found, reason, address, rule, layer) in [
        (&[][..], NoAddress, None, "web", PolicyLayer::Sandbox),
        (&["10.0.0.1", "127.0.0.1"], PrivateAddress, Some("10.0.0.1"), "web", PolicyLayer::Sandbox),
        (&["8.8.8.8", "10.0.0.1"], DeniedByRule, Some("8.8.8.8"), "no such net", PolicyLayer::Base),
    ] {
        let denial = rules.admit(&permit, &addresses(found)).expect_err("refused");
        assert_eq!(denial.reason, reason, "{found:?}");
        assert_eq!(denial.address, address.map(|text| text.parse().unwrap()), "{found:?}");
        let named = denial.rule.as_ref().map_or("", |rule| &*rule.rule);
        assert_eq!((named, denial.layer), (rule, layer), "{found:?}");
    }
    // One good address is enough, and only that one is dialled.
    let admitted = rules.admit(&permit, &addresses(&["10.0.0.1", "9.9.9.9"])).unwrap();
    assert_eq!(admitted.addresses(), addresses(&["9.9.9.9"]));
}
