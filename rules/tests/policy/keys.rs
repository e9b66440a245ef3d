//! Keys of policies and of the configuration: `KEYS.md` lists each of them, and each has an effect.

use std::collections::BTreeSet;
use std::time::Duration;

use rules::configuration::*;
use rules::load::{configuration_schema, policy_schema, read_configuration};
use rules::policy::TlsMode;
use rules::principal::PrincipalTemplate;
use rules::{Decision, Reason};
use serde_json::Value;

use super::{
    compile_configured, compile_lone, compile_with_lists, decide_attempt, sandbox_ref, source_file,
    unwrap_rules,
};

/// Adds the dotted path of each key of a schema that is not a table.
fn collect_keys(schema: &Value, at: &Value, prefix: &str, keys: &mut BTreeSet<String>) {
    let inner = |value: &Value| -> Option<Value> {
        let options = value["anyOf"].as_array().into_iter().flatten();
        let target =
            [&value["$ref"], &value["items"]["$ref"]].into_iter().chain(options.map(|one| &one["$ref"]));
        let name = target.filter_map(Value::as_str).find_map(|name| name.strip_prefix("#/$defs/"))?;
        let found = &schema["$defs"][name];
        let tables = found["anyOf"].as_array().into_iter().flatten().chain([found]);
        tables.filter(|table| table["properties"].is_object()).next().cloned()
    };
    for (key, value) in at["properties"].as_object().unwrap() {
        let path = format!("{prefix}{key}");
        match inner(value) {
            Some(table) => collect_keys(schema, &table, &format!("{path}."), keys),
            None => drop(keys.insert(path)),
        }
    }
}

#[test]
fn the_table_lists_every_key_of_the_schemas() {
    let mut keys = BTreeSet::new();
    for schema in [policy_schema(), configuration_schema()] {
        let schema = serde_json::to_value(schema).unwrap();
        collect_keys(&schema, &schema, "", &mut keys);
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/KEYS.md");
    let table = std::fs::read_to_string(path).unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let listed: BTreeSet<String> = rows.map(str::to_owned).collect();
    assert_eq!(listed, keys, "lints/keys.py reads the keys from the source; run it with --write");
    assert!(keys.len() > 150, "{}", keys.len());
}

// proves: tls, allow.tls
#[test]
fn a_policy_sets_the_tls_mode_of_its_rules() {
    let rule = |name: &str, more: &str| {
        format!("[[allow]]\nname = \"{name}\"\nhosts = [\"{name}.example\"]\n{more}\n")
    };
    let rules =
        rule("plain", "") + &rule("own", "tls = \"intercept\"") + &rule("filter", "methods = [\"GET\"]");
    for (head, expected) in [
        ("", ["intercept", "intercept", "intercept"]),
        ("tls = \"intercept\"", ["intercept", "intercept", "intercept"]),
        ("tls = \"tunnel\"", ["tunnel", "intercept", "intercept"]),
    ] {
        let rules = unwrap_rules(compile_lone(&format!("name = \"p\"\n{head}\n{rules}")));
        let treatment = |name: &str| {
            let probe = rules::probe::PolicyProbe::parse(&format!("{name}.example")).unwrap();
            match probe.decide(&rules, &sandbox_ref(&rules, "p")) {
                Decision::Allow(permit) => permit.treatment().as_str(),
                Decision::Deny(denial) => panic!("{denial:?}"),
            }
        };
        assert_eq!(["plain", "own", "filter"].map(treatment), expected, "{head}");
    }
    assert_eq!(TlsMode::default(), TlsMode::Intercept);
}

// proves: allow.name, deny.name, memory.name
#[test]
fn a_decision_names_its_rule() {
    let policy = |names: [&str; 3]| {
        format!(
            "name = \"p\"\n[[allow]]\nname = \"{}\"\nhosts = [\"a.example\", \"b.example\"]\n\
             [[deny]]\nname = \"{}\"\nhosts = [\"b.example\"]\n\
             [[memory]]\nname = \"{}\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"s:a\"]\n",
            names[0], names[1], names[2]
        )
    };
    for names in [["one", "two", "three"], ["web", "never", "team"]] {
        let rules = unwrap_rules(compile_lone(&policy(names)));
        let named = |host: &str| {
            let probe = rules::probe::PolicyProbe::parse(host).unwrap();
            match probe.decide(&rules, &sandbox_ref(&rules, "p")) {
                Decision::Allow(permit) => permit.rule().rule.to_string(),
                Decision::Deny(denial) => denial.rule.unwrap().rule.to_string(),
            }
        };
        assert_eq!(["a.example", "b.example", "m.example"].map(named), names);
    }
}

// proves: allow.access
#[test]
fn a_read_only_rule_takes_no_other_method() {
    let text = "name = \"p\"\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\naccess = \"read-only\"\n";
    let rules = unwrap_rules(compile_lone(text));
    for (method, allowed) in
        [("GET", true), ("HEAD", true), ("OPTIONS", true), ("POST", false), ("PUT", false), ("DELETE", false)]
    {
        let found = decide_attempt(&rules, "p", &format!("{method} https://x.example/"));
        let expected = if allowed { Ok("r".to_owned()) } else { Err(Reason::MethodNotAllowed) };
        assert_eq!(found, expected, "{method}");
    }
}

// proves: deny.hosts_file
#[test]
fn a_list_of_denied_hosts_denies_them() {
    let text = "name = \"p\"\n[[allow]]\nname = \"all\"\nhosts = [\"*.x.example\"]\n[[deny]]\nhosts_file = \"l.txt\"\n";
    let rules = unwrap_rules(compile_with_lists(text, &[("l.txt", "a.x.example\n*.b.x.example\n")]));
    for (host, denied) in [("a.x.example", true), ("c.b.x.example", true), ("b.x.example", false)] {
        let found = decide_attempt(&rules, "p", host);
        let expected = if denied { Err(Reason::DeniedByRule) } else { Ok("all".to_owned()) };
        assert_eq!(found, expected, "{host}");
    }
}

/// Each row passes, and fails without or with another value of its last key.
// proves: test.name, test.path, test.protocol, test.sandbox, test.expect, test.host, test.method, test.dns, test.bank
// proves: test.operation, test.environment, test.reason, test.rule
#[test]
fn each_key_of_a_test_counts() {
    let policy = "name = \"p\"\n[[allow]]\nname = \"web\"\nhosts = [\"x.example\"]\nmethods = [\"GET\"]\npaths = [\"/a\"]\n\
        [[allow]]\nname = \"db\"\nhosts = [\"db.example\"]\ntcp = [5432]\nmemory = \"may-receive\"\n\
        [[allow]]\nname = \"txt\"\nhosts = [\"t.example\"]\ndns_types = [\"TXT\"]\n\
        [[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"s:a\"]\n";
    let operator = "[[sandbox]]\nid = \"a\"\nbase = \"system\"\npolicies = [\"p\"]\n\
        [[sandbox]]\nid = \"b\"\nbase = \"untrusted\"\npolicies = [\"p\"]\n";
    let outcomes = |test: &str| {
        let text = format!("{policy}[[test]]\n{test}");
        let rules = unwrap_rules(compile_configured(operator, &[&text]));
        let all = rules.run_tests();
        (all.len(), all.iter().all(|outcome| outcome.has_passed()), all[0].trial.name.clone())
    };
    for (common, good, bad) in [
        ("host = \"x.example\"\nsandbox = \"a\"", "expect = \"allow\"", "expect = \"deny\""),
        ("expect = \"allow\"\nsandbox = \"a\"", "host = \"x.example\"", "host = \"y.example\""),
        (
            "expect = \"allow\"\nhost = \"x.example\"\npath = \"/a\"\nsandbox = \"a\"",
            "method = \"GET\"",
            "method = \"PUT\"",
        ),
        (
            "expect = \"allow\"\nhost = \"x.example\"\nmethod = \"GET\"\nsandbox = \"a\"",
            "path = \"/a\"",
            "path = \"/b\"",
        ),
        (
            "expect = \"allow\"\nhost = \"db.example:5432\"\nsandbox = \"a\"",
            "protocol = \"tcp\"",
            "dns = \"TXT\"",
        ),
        (
            "expect = \"deny\"\nhost = \"x.example\"\nsandbox = \"a\"\nreason = \"raw_tcp_not_allowed\"",
            "protocol = \"tcp\"",
            "protocol = \"tls\"",
        ),
        ("expect = \"allow\"\nhost = \"t.example\"\nsandbox = \"a\"", "dns = \"TXT\"", "dns = \"AAAA\""),
        (
            "expect = \"allow\"\nhost = \"m.example\"\nenvironment = \"s\"\nsandbox = \"a\"",
            "bank = \"s:a\"",
            "bank = \"s:b\"",
        ),
        (
            "expect = \"allow\"\nhost = \"m.example\"\nenvironment = \"s\"\nsandbox = \"a\"\nbank = \"s:a\"",
            "operation = \"recall\"",
            "operation = \"retain\"",
        ),
        (
            "expect = \"allow\"\nhost = \"m.example\"\nsandbox = \"a\"\nbank = \"s:a\"",
            "environment = \"s\"",
            "environment = \"q\"",
        ),
        ("expect = \"allow\"\nhost = \"x.example\"", "sandbox = \"a\"", "sandbox = \"b\""),
        (
            "expect = \"deny\"\nhost = \"y.example\"\nsandbox = \"a\"",
            "reason = \"not_listed\"",
            "reason = \"denied_by_rule\"",
        ),
        ("expect = \"allow\"\nhost = \"x.example\"\nsandbox = \"a\"", "rule = \"web\"", "rule = \"db\""),
    ] {
        assert_eq!(outcomes(&format!("{common}\n{good}")), (1, true, None), "{common}\n{good}");
        assert_eq!(outcomes(&format!("{common}\n{bad}")), (1, false, None), "{common}\n{bad}");
    }
    assert_eq!(outcomes("expect = \"allow\"\nhost = \"x.example\"").0, 2, "without `sandbox`, for every one");
    let named = outcomes("expect = \"allow\"\nhost = \"x.example\"\nsandbox = \"a\"\nname = \"mine\"");
    assert_eq!(named.2.as_deref(), Some("mine"));
}

const FULL: &str = r#"
policies = "d"
on_invalid = "deny"
[log]
dir = "l"
[admin]
socket = "a.sock"
[ca]
dir = "authority"
[upstream]
roots = ["r.pem"]
system_roots = false
mark = 7
[grants]
forbid_hosts = ["*.corp.example"]
forbid_bases = ["system"]
most_seconds = 60
[dns]
upstreams = ["9.9.9.9:53"]
denial = "sinkhole"
grid_milliseconds = 250
forwards_per_hour = 33
fold_seconds = 44
pre_resolve = false
reverse = true
synthetic = "10.9.0.0/24"
[[dns.zone]]
name = "internal"
upstreams = ["10.0.0.2:53"]
[[dns.host]]
name = "h.example"
addresses = ["10.0.0.3"]
[[credential]]
name = "k"
file = "k.key"
hosts = ["n.example"]
[identity]
revocations = "revoked.json"
[[identity.issuer]]
name = "https://i"
trust_domain = "acme.example"
keys = "jwks.json"
environments = ["staging"]
tenants = ["acme"]
algorithms = ["RS256"]
life_seconds = 60
[[memory_service]]
host = "m.example:8443"
audience = "spiffe://acme.example/memory"
mode = "token"
key = "s.pem"
issuer = "https://s"
trust_domain = "acme.example"
[[memory_service]]
host = "n.example"
audience = "n"
mode = "api-key"
credential = "k"
principal = "{agent_card}:{sandbox}"
[[listener]]
mode = "tproxy"
bind = ["10.0.0.1:15002"]
identify = "mark"
[[listener]]
mode = "explicit"
bind = ["unix:s.sock"]
sandbox = "a"
[[sandbox]]
id = "a"
agent_card = "coder"
"#;

/// What the settings do is proven where they are used.
// proves: dns.upstreams, dns.zone.name, dns.zone.upstreams, dns.host.name, dns.host.addresses, dns.denial
// proves: dns.grid_milliseconds, dns.forwards_per_hour, dns.fold_seconds, dns.pre_resolve, dns.reverse, dns.synthetic
#[test]
fn every_key_reaches_its_setting() {
    let settings = read_configuration(&source_file("sandbar.toml", FULL)).unwrap();
    let address = |text: &str| text.parse().unwrap();
    assert_eq!(
        settings.dns,
        Some(DnsSettings {
            upstreams: vec![address("9.9.9.9:53")],
            zones: vec![ForwardZone {
                name: rules::DomainName::parse("internal").unwrap(),
                upstreams: vec![address("10.0.0.2:53")]
            }],
            hosts: vec![HostEntry {
                name: rules::DomainName::parse("h.example").unwrap(),
                addresses: vec!["10.0.0.3".parse().unwrap()]
            }],
            denial: DenialForm::Sinkhole,
            grid_milliseconds: 250,
            forwards_per_hour: 33,
            fold_seconds: 44,
            pre_resolve: PreResolve::Off,
            reverse: ReverseLookups::Known,
            synthetic: "10.9.0.0/24".parse().unwrap(),
        })
    );
    assert_eq!(settings.on_invalid, OnInvalid::Deny);
    assert_eq!(settings.admin_socket.as_deref(), Some("a.sock"));
    assert_eq!(settings.ca_dir.as_deref(), Some("authority"));
    let system_roots = SystemRootsSetting::Ignored;
    assert_eq!(
        settings.upstream,
        UpstreamSettings { roots: vec!["r.pem".into()], system_roots, mark: Some(7) }
    );
    assert_eq!(
        (settings.grants.most_seconds, &settings.grants.forbid_bases[..]),
        (60, &["system".to_owned()][..])
    );
    assert_eq!(settings.grants.forbid_hosts[0].to_string(), "*.corp.example");
    let credential = &settings.credentials[0];
    assert_eq!((credential.name.as_str(), credential.source.files()), ("k", vec!["k.key"]));
    let log = settings.log.unwrap();
    assert_eq!((&*log.dir, log.segment_age), ("l", Duration::from_secs(86_400)));
    let identity = settings.identity.unwrap();
    let issuer = &identity.issuers[0];
    assert_eq!((identity.revocations.as_deref(), issuer.life_seconds), (Some("revoked.json"), Some(60)));
    let names = (issuer.name.as_deref(), &*issuer.trust_domain, &*issuer.keys);
    assert_eq!(names, (Some("https://i"), "acme.example", "jwks.json"));
    assert_eq!(issuer.algorithms.as_deref(), Some(&["RS256".to_owned()][..]));
    assert_eq!(issuer.environments.as_ref().unwrap()[0].as_str(), "staging");
    assert_eq!(issuer.tenants.as_ref().unwrap()[0].as_str(), "acme");
    let [token, key] = &settings.memory_services[..] else { panic!("{:?}", settings.memory_services) };
    assert_eq!(
        (token.host.to_string().as_str(), token.port, &*token.audience),
        ("m.example", 8443, "spiffe://acme.example/memory")
    );
    let (signing, issuer, domain) = ("s.pem".to_owned(), "https://s".to_owned(), "acme.example".to_owned());
    assert_eq!(token.proof, ServiceAuthSettings::Token { key: signing, issuer, trust_domain: domain });
    assert!(
        matches!(&key.proof, ServiceAuthSettings::ApiKey { credential, .. } if credential.as_str() == "k")
    );
    let [shared, own] = &settings.listeners[..] else { panic!("{:?}", settings.listeners) };
    assert_eq!((shared.mode, &shared.attribution), (ListenerMode::Tproxy, &Attribution::Mark));
    assert_eq!((own.mode, &own.bind[..]), (ListenerMode::Explicit, &[BindTarget::Unix("s.sock".into())][..]));
    assert!(matches!(&own.attribution, Attribution::Dedicated(id) if id.as_str() == "a"));
}

// proves: sandbox.agent_card
#[test]
fn a_principal_can_name_the_agent_card() {
    let template = PrincipalTemplate::parse("{agent_card}:{sandbox}").unwrap();
    for (card, expected) in [("agent_card = \"coder\"", Some("coder:a")), ("", None)] {
        let rules = unwrap_rules(compile_configured(&format!("[[sandbox]]\nid = \"a\"\n{card}"), &[]));
        assert_eq!(template.render(&sandbox_ref(&rules, "a")).as_deref(), expected, "{card}");
    }
}
