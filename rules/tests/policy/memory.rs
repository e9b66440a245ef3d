//! Memory: the identity must match the channel, banks must match the rules, and the environment always counts.

use rules::Reason::*;
use rules::facts::*;
use rules::ids::{BankId, Environment, SandboxId, Tenant};
use rules::name::Host;
use rules::{Decision, Facts, Reason, RuleSet};

use super::{compile_configured, compile_lone, error_texts, problem_texts, sandbox_ref, unwrap_rules};

const POLICY: &str = r#"
name = "team"
[[allow]]
name = "web"
hosts = ["docs.example"]
[[memory]]
name = "team memory"
host = "memory.corp.example:8443"
resolves_to = ["10.3.0.0/16"]
profile = "astrocyte"
recall = ["staging:team-a", "staging:shared-*"]
retain = ["staging:team-a"]
[[memory]]
name = "given"
host = "given.corp.example"
profile = "astrocyte"
identity = "from-channel"
environment = "staging"
recall = ["bank-a"]
"#;

const CONFIGURATION: &str = r#"
[[sandbox]]
id = "a"
tenant = "acme"
environment = "staging"
generation = 4
base = "system"
policies = ["team"]
[[sandbox]]
id = "pooled"
base = "system"
policies = ["team"]
"#;

fn identity_claim(sandbox: &str, tenant: &str, environment: &str, generation: Option<u64>) -> IdentityClaim {
    IdentityClaim::Verified(TokenIdentity {
        sandbox: SandboxId::parse(sandbox).unwrap(),
        tenant: Tenant::parse(tenant).unwrap(),
        environment: Environment::parse(environment).unwrap(),
        generation,
    })
}

fn own_claim() -> IdentityClaim {
    identity_claim("a", "acme", "staging", Some(4))
}

fn memory_facts(
    host: &str,
    port: u16,
    operation: BankOperation,
    banks: &[&str],
    identity: IdentityClaim,
) -> Facts {
    let host = Host::parse(host).unwrap();
    Facts::Memory(MemoryFacts {
        request: RequestFacts {
            connection: Some(host.clone()),
            authorities: vec![RequestAuthority { host, port: None }],
            port,
            scheme: UrlScheme::Https,
            version: HttpVersion::Http1,
            method: HttpMethod::parse("POST").unwrap(),
            path: "/v1/recall".to_owned(),
        },
        operation,
        banks: banks.iter().map(|bank| BankId::parse(bank).unwrap()).collect(),
        identity,
    })
}

fn team_facts(operation: BankOperation, banks: &[&str], identity: IdentityClaim) -> Facts {
    memory_facts("memory.corp.example", 8443, operation, banks, identity)
}

fn decide_facts(rules: &RuleSet, id: &str, facts: &Facts) -> Result<&'static str, Reason> {
    match rules.decide(&sandbox_ref(rules, id), facts) {
        Decision::Allow(permit) => Ok(permit.treatment().as_str()),
        Decision::Deny(denial) => Err(denial.reason),
    }
}

// proves: memory.host, memory.identity
#[test]
fn p12_a_request_needs_its_own_identity_and_open_banks() {
    use BankOperation::{Admin, Delete, None as Nothing, Read, Write};
    let rules = unwrap_rules(compile_configured(CONFIGURATION, &[POLICY]));
    let given = |identity| memory_facts("given.corp.example", 443, Read, &["bank-a"], identity);
    for (who, facts, expected) in [
        ("a", team_facts(Read, &["staging:team-a"], own_claim()), Ok("forward")),
        ("a", team_facts(Read, &["staging:team-a", "staging:shared-1"], own_claim()), Ok("forward")),
        ("a", team_facts(Write, &["staging:team-a"], own_claim()), Ok("forward")),
        ("a", team_facts(Nothing, &[], IdentityClaim::Absent), Ok("forward")),
        ("a", team_facts(Nothing, &[], own_claim()), Ok("forward")),
        (
            "a",
            team_facts(Nothing, &[], identity_claim("b", "acme", "staging", Some(4))),
            Err(IdentityMismatch),
        ),
        ("a", team_facts(Nothing, &[], IdentityClaim::Invalid("expired")), Err(IdentityInvalid)),
        ("a", team_facts(Nothing, &[], IdentityClaim::Revoked), Err(SandboxRevoked)),
        ("a", team_facts(Read, &["staging:team-a"], IdentityClaim::Revoked), Err(SandboxRevoked)),
        ("a", team_facts(Nothing, &["staging:team-a"], own_claim()), Err(MemoryOperation)),
        ("a", team_facts(Read, &["staging:team-a", "staging:team-b"], own_claim()), Err(ForeignBank)),
        ("a", team_facts(Write, &["staging:shared-1"], own_claim()), Err(ForeignBank)),
        ("a", team_facts(Delete, &["staging:team-a"], own_claim()), Err(ForeignBank)),
        ("a", team_facts(Read, &["production:team-a"], own_claim()), Err(ForeignBank)),
        ("a", team_facts(Read, &[], own_claim()), Err(BankMissing)),
        ("a", team_facts(Admin, &["staging:team-a"], own_claim()), Err(MemoryOperation)),
        ("a", team_facts(Read, &["staging:team-a"], IdentityClaim::Absent), Err(IdentityAbsent)),
        ("a", team_facts(Read, &["staging:team-a"], IdentityClaim::Invalid("expired")), Err(IdentityInvalid)),
        (
            "a",
            team_facts(Read, &["staging:team-a"], identity_claim("b", "acme", "staging", Some(4))),
            Err(IdentityMismatch),
        ),
        (
            "a",
            team_facts(Read, &["staging:team-a"], identity_claim("A", "acme", "staging", Some(4))),
            Err(IdentityMismatch),
        ),
        (
            "a",
            team_facts(Read, &["staging:team-a"], identity_claim("a", "evil", "staging", Some(4))),
            Err(IdentityMismatch),
        ),
        (
            "a",
            team_facts(Read, &["staging:team-a"], identity_claim("a", "acme", "production", Some(4))),
            Err(IdentityMismatch),
        ),
        (
            "a",
            team_facts(Read, &["staging:team-a"], identity_claim("a", "acme", "staging", Some(3))),
            Err(IdentityStale),
        ),
        (
            "a",
            team_facts(Read, &["staging:team-a"], identity_claim("a", "acme", "staging", None)),
            Err(IdentityStale),
        ),
        ("pooled", team_facts(Read, &["staging:team-a"], own_claim()), Err(IdentityUnset)),
        ("a", given(IdentityClaim::Absent), Ok("forward")),
        ("a", given(IdentityClaim::Revoked), Err(SandboxRevoked)),
        ("a", given(own_claim()), Ok("forward")),
        ("a", given(identity_claim("b", "acme", "staging", Some(4))), Err(IdentityMismatch)),
        (
            "a",
            memory_facts("memory.corp.example", 443, Read, &["staging:team-a"], own_claim()),
            Err(PortNotListed),
        ),
        (
            "a",
            memory_facts("docs.example", 443, Read, &["staging:team-a"], own_claim()),
            Err(MemoryOperation),
        ),
        ("a", memory_facts("other.example", 443, Read, &["staging:team-a"], own_claim()), Err(NotListed)),
    ] {
        assert_eq!(decide_facts(&rules, who, &facts), expected, "{who}: {facts:?}");
    }
}

#[test]
fn p12_a_memory_host_is_guarded_and_refuses_plain_requests() {
    let rules = unwrap_rules(compile_configured(CONFIGURATION, &[POLICY]));
    let probe = rules::probe::PolicyProbe::parse("https://memory.corp.example:8443/v1/recall").unwrap();
    let steps = probe.facts(&sandbox_ref(&rules, "a"));
    assert_eq!(decide_facts(&rules, "a", &steps[0]), Ok("hold"));
    assert_eq!(decide_facts(&rules, "a", &steps[1]), Err(MemoryOperation));
}

// proves: memory.environment
#[test]
fn p12_a_bank_of_another_environment_is_a_load_error() {
    let production = CONFIGURATION.replace("\"staging\"", "\"production\"");
    let found = error_texts(compile_configured(&production, &[POLICY])).join("\n");
    assert!(
        found.contains(
            "bank `staging:team-a` is in environment `staging`, but sandbox `a` is in `production`"
        ),
        "{found}"
    );
    assert!(found.contains("bank `bank-a` is in environment `staging`"), "{found}");
    unwrap_rules(compile_lone(POLICY));
}

#[test]
fn banks_must_name_their_environment() {
    let rule = |extra: &str| {
        format!(
            "name = \"p\"\n[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\n{extra}"
        )
    };
    for (extra, part) in [
        ("recall = [\"team-a\"]", "bank `team-a` names no environment"),
        ("recall = [\"*\"]", "invalid bank `*`"),
        ("recall = [\"staging:a b\"]", "invalid bank `staging:a b`"),
        ("recall = []", "it opens no bank"),
        ("recall = [\"staging:a\"]\nenvironment = \"a b\"", "invalid environment `a b`"),
        (
            "recall = [\"production:*\"]\nenvironment = \"staging\"",
            "bank `production:*` names environment `production`",
        ),
    ] {
        let found = error_texts(compile_lone(&rule(extra))).join("\n");
        assert!(found.contains(part), "{extra}\n---\n{found}");
    }
    unwrap_rules(compile_lone(&rule("recall = [\"team-a\"]\nenvironment = \"staging\"")));
}

#[test]
fn the_former_name_of_from_channel_is_refused_with_a_hint() {
    let problems = compile_lone(&POLICY.replace("from-channel", "from-path")).unwrap_err();
    let [problem] = &problems[..] else { panic!("{problems:?}") };
    assert_eq!(problem.to_string(), "p.toml:17:12: `from-path` is not one of `from-channel`, `required`");
    assert_eq!((problem.at.excerpt.as_str(), problem.at.width), ("identity = \"from-path\"", 11));
    assert_eq!(problem.help.as_deref(), Some("it is now called `from-channel`"));
}

// proves: memory.profile
#[test]
fn profiles_that_do_not_exist_are_refused_with_a_hint() {
    for (profile, help) in
        [("mcp", "built-in profiles: astrocyte"), ("astrocite", "did you mean `astrocyte`?")]
    {
        let problems =
            compile_lone(&POLICY.replacen("\"astrocyte\"", &format!("\"{profile}\""), 1)).unwrap_err();
        let [problem] = &problems[..] else { panic!("{problems:?}") };
        assert_eq!(problem.to_string(), format!("p.toml:10:11: unknown profile `{profile}`"));
        assert_eq!(problem.at.width as usize, profile.len() + 2);
        assert_eq!(problem.help.as_deref(), Some(help));
    }
}

// proves: memory.resolves_to
#[test]
fn p12_a_memory_service_is_reached_through_its_guard_or_not_at_all() {
    let memory = "name = \"team\"\n[[memory]]\nname = \"m\"\nhost = \"m.example:8443\"\nresolves_to = [\"10.3.0.0/16\"]\nprofile = \"astrocyte\"\nrecall = [\"staging:a\"]";
    let raw = "name = \"beside\"\n[[allow]]\nname = \"raw\"\nhosts = [\"m.example\"]\ntcp = [8443]\n";
    let beside = "name = \"beside\"\n\
        [[allow]]\nname = \"net\"\naddresses = [\"10.3.0.0/16\"]\nports = [8443]\n\
        [[allow]]\nname = \"alias\"\nhosts = [\"alias.example:8443\"]\nresolves_to = [\"10.3.0.0/16\"]";
    let configuration = "[[sandbox]]\nid = \"a\"\ntenant = \"t\"\nenvironment = \"staging\"\nbase = \"system\"\npolicies = [\"team\", \"beside\"]";
    let found = error_texts(compile_configured(configuration, &[memory, raw])).join("\n");
    assert!(found.contains("lets raw TCP pass to `m.example` on port 8443"), "{found}");
    let rules = unwrap_rules(compile_configured(configuration, &[memory, beside]));
    let probe = |text: &str, raw: bool| {
        let mut probe = rules::probe::PolicyProbe::parse(text).unwrap();
        if raw {
            probe.special = rules::probe::ProbeKind::Raw;
        }
        probe.decide(&rules, &sandbox_ref(&rules, "a"))
    };
    assert!(probe("m.example:8443", true).reason().is_some(), "raw TCP would bypass the guard");
    assert!(probe("http://m.example:8443", false).reason().is_some(), "in the clear");
    assert!(
        matches!(probe("m.example:8443", false), Decision::Allow(permit) if permit.treatment().as_str() == "hold")
    );
    let address = ["10.3.0.5".parse().unwrap()];
    for text in ["alias.example:8443", "10.3.0.5:8443"] {
        let Decision::Allow(permit) = probe(text, false) else { panic!("{text}") };
        assert_eq!(rules.admit(&permit, &address).unwrap_err().reason, MemoryOperation, "{text}");
    }
    let Decision::Allow(held) = probe("m.example:8443", false) else { panic!("held") };
    assert!(rules.admit(&held, &address).is_ok());
}

/// A rule whose every request would be refused causes a warning at load time.
#[test]
fn a_memory_rule_without_service_or_issuer_causes_a_warning() {
    let service = |host: &str| {
        format!(
            "[[memory_service]]\nhost = \"{host}\"\naudience = \"spiffe://a/memory\"\nmode = \"principal\"\n"
        )
    };
    let issuer = "[[identity.issuer]]\nname = \"i\"\ntrust_domain = \"a.example\"\nkeys = \"k\"\n";
    let both = service("memory.corp.example:8443") + &service("given.corp.example");
    for (more, expected) in [
        (format!("{both}{issuer}"), &[][..]),
        (both.clone(), &["rule `team memory` requires a signed identity"]),
        (
            service("memory.corp.example") + &service("given.corp.example:443") + issuer,
            &["`memory.corp.example` has no `[[memory_service]]`"],
        ),
        (
            issuer.to_owned(),
            &[
                "`memory.corp.example` has no `[[memory_service]]`",
                "`given.corp.example` has no `[[memory_service]]`",
            ],
        ),
    ] {
        let rules = unwrap_rules(compile_configured(&format!("{CONFIGURATION}{more}"), &[POLICY]));
        let warnings = problem_texts(rules.warnings());
        assert_eq!(warnings.len(), expected.len(), "{more}: {warnings:?}");
        for part in expected {
            assert!(warnings.iter().any(|one| one.contains(part)), "{part}: {warnings:?}");
        }
    }
}
