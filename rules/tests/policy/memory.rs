//! Memory: identity against channel, banks against rules, environment always.

use rules::Reason::*;
use rules::facts::*;
use rules::name::Host;
use rules::word::{BankId, Environment, SandboxId, Tenant};
use rules::{Decision, Facts, Reason, RuleSet};

use super::{errors, good, lone, operated, sandbox, shown};

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
identity = "from-path"
environment = "staging"
recall = ["bank-a"]
"#;

const OPERATOR: &str = r#"
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

fn identity(
    sandbox: &str,
    tenant: &str,
    environment: &str,
    generation: Option<u64>,
) -> IdentityClaim {
    IdentityClaim::Verified(Identity {
        sandbox: SandboxId::parse(sandbox).unwrap(),
        tenant: Tenant::parse(tenant).unwrap(),
        environment: Environment::parse(environment).unwrap(),
        generation,
    })
}

fn own() -> IdentityClaim {
    identity("a", "acme", "staging", Some(4))
}

fn facts(
    host: &str,
    port: u16,
    operation: Operation,
    banks: &[&str],
    identity: IdentityClaim,
) -> Facts {
    let host = Host::parse(host).unwrap();
    Facts::Memory(MemoryFacts {
        request: RequestFacts {
            connection: Some(host.clone()),
            authorities: vec![Authority { host, port: None }],
            port,
            scheme: Scheme::Https,
            version: HttpVersion::Http1,
            method: Method::parse("POST").unwrap(),
            path: "/v1/recall".to_owned(),
        },
        operation,
        banks: banks.iter().map(|bank| BankId::parse(bank).unwrap()).collect(),
        identity,
    })
}

fn team(operation: Operation, banks: &[&str], identity: IdentityClaim) -> Facts {
    facts("memory.corp.example", 8443, operation, banks, identity)
}

fn outcome(rules: &RuleSet, id: &str, facts: &Facts) -> Result<&'static str, Reason> {
    match rules.decide(&sandbox(rules, id), facts) {
        Decision::Allow(permit) => Ok(permit.how().word()),
        Decision::Deny(denial) => Err(denial.reason),
    }
}

#[test]
fn a_request_is_its_own_sandboxes_for_banks_it_may_use() {
    use Operation::{Admin, Delete, None as Nothing, Read, Write};
    let rules = good(operated(OPERATOR, &[POLICY]));
    let given = |identity| facts("given.corp.example", 443, Read, &["bank-a"], identity);
    for (who, facts, expected) in [
        ("a", team(Read, &["staging:team-a"], own()), Ok("forward")),
        ("a", team(Read, &["staging:team-a", "staging:shared-1"], own()), Ok("forward")),
        ("a", team(Write, &["staging:team-a"], own()), Ok("forward")),
        ("a", team(Nothing, &[], IdentityClaim::Absent), Ok("forward")),
        ("a", team(Nothing, &[], own()), Ok("forward")),
        ("a", team(Nothing, &[], identity("b", "acme", "staging", Some(4))), Err(IdentityMismatch)),
        ("a", team(Nothing, &[], IdentityClaim::Invalid("expired")), Err(IdentityInvalid)),
        ("a", team(Nothing, &["staging:team-a"], own()), Err(MemoryOperation)),
        ("a", team(Read, &["staging:team-a", "staging:team-b"], own()), Err(ForeignBank)),
        ("a", team(Write, &["staging:shared-1"], own()), Err(ForeignBank)),
        ("a", team(Delete, &["staging:team-a"], own()), Err(ForeignBank)),
        ("a", team(Read, &["production:team-a"], own()), Err(ForeignBank)),
        ("a", team(Read, &[], own()), Err(BankMissing)),
        ("a", team(Admin, &["staging:team-a"], own()), Err(MemoryOperation)),
        ("a", team(Read, &["staging:team-a"], IdentityClaim::Absent), Err(IdentityAbsent)),
        (
            "a",
            team(Read, &["staging:team-a"], IdentityClaim::Invalid("expired")),
            Err(IdentityInvalid),
        ),
        (
            "a",
            team(Read, &["staging:team-a"], identity("b", "acme", "staging", Some(4))),
            Err(IdentityMismatch),
        ),
        (
            "a",
            team(Read, &["staging:team-a"], identity("A", "acme", "staging", Some(4))),
            Err(IdentityMismatch),
        ),
        (
            "a",
            team(Read, &["staging:team-a"], identity("a", "evil", "staging", Some(4))),
            Err(IdentityMismatch),
        ),
        (
            "a",
            team(Read, &["staging:team-a"], identity("a", "acme", "production", Some(4))),
            Err(IdentityMismatch),
        ),
        (
            "a",
            team(Read, &["staging:team-a"], identity("a", "acme", "staging", Some(3))),
            Err(IdentityStale),
        ),
        (
            "a",
            team(Read, &["staging:team-a"], identity("a", "acme", "staging", None)),
            Err(IdentityStale),
        ),
        ("pooled", team(Read, &["staging:team-a"], own()), Err(IdentityUnset)),
        ("a", given(IdentityClaim::Absent), Ok("forward")),
        ("a", given(own()), Ok("forward")),
        ("a", given(identity("b", "acme", "staging", Some(4))), Err(IdentityMismatch)),
        (
            "a",
            facts("memory.corp.example", 443, Read, &["staging:team-a"], own()),
            Err(PortNotListed),
        ),
        ("a", facts("docs.example", 443, Read, &["staging:team-a"], own()), Err(MemoryOperation)),
        ("a", facts("other.example", 443, Read, &["staging:team-a"], own()), Err(NotListed)),
    ] {
        assert_eq!(outcome(&rules, who, &facts), expected, "{who}: {facts:?}");
    }
}

#[test]
fn a_memory_host_is_held_and_takes_no_plain_requests() {
    let rules = good(operated(OPERATOR, &[POLICY]));
    let probe = rules::probe::Probe::parse("https://memory.corp.example:8443/v1/recall").unwrap();
    let steps = probe.facts(&sandbox(&rules, "a"));
    assert_eq!(outcome(&rules, "a", &steps[0]), Ok("hold"));
    assert_eq!(outcome(&rules, "a", &steps[1]), Err(MemoryOperation));
}

#[test]
fn a_bank_of_another_environment_is_a_load_error() {
    let production = OPERATOR.replace("\"staging\"", "\"production\"");
    let found = errors(operated(&production, &[POLICY])).join("\n");
    assert!(
        found.contains(
            "bank `staging:team-a` is of environment `staging`, but sandbox `a` is of `production`"
        ),
        "{found}"
    );
    assert!(found.contains("bank `bank-a` is of environment `staging`"), "{found}");
    good(lone(POLICY));
}

#[test]
fn banks_must_say_their_environment() {
    let rule = |extra: &str| {
        format!(
            "name = \"p\"\n[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"mem0\"\n{extra}"
        )
    };
    for (extra, part) in [
        ("recall = [\"team-a\"]", "bank `team-a` names no environment"),
        ("recall = [\"*\"]", "bank `*` is not good"),
        ("recall = [\"staging:a b\"]", "bank `staging:a b` is not good"),
        ("recall = []", "it opens no bank"),
        ("recall = [\"staging:a\"]\nenvironment = \"a b\"", "environment `a b` is not good"),
        (
            "recall = [\"production:*\"]\nenvironment = \"staging\"",
            "bank `production:*` names environment `production`",
        ),
    ] {
        let found = errors(lone(&rule(extra))).join("\n");
        assert!(found.contains(part), "{extra}\n---\n{found}");
    }
    good(lone(&rule("recall = [\"team-a\"]\nenvironment = \"staging\"")));
}

#[test]
fn what_passes_unseen_may_not_stand_beside_memory() {
    let tunnel = |extra: &str| {
        format!(
            "name = \"t\"\n[[allow]]\nname = \"blind\"\nhosts = [\"blind.example\"]\ntls = \"tunnel\"\n{extra}"
        )
    };
    let operator = OPERATOR.replace("[\"team\"]", "[\"team\", \"t\"]");
    let found = errors(operated(&operator, &[POLICY, &tunnel("")])).join("\n");
    assert!(found.contains("rule `blind` passes bytes unseen"), "{found}");
    good(operated(&operator, &[POLICY, &tunnel("memory = \"may-receive\"")]));
}

#[test]
fn a_memory_service_is_reached_through_its_guard_or_not_at_all() {
    let memory = "name = \"team\"\n[[memory]]\nname = \"m\"\nhost = \"m.example:8443\"\nresolves_to = [\"10.3.0.0/16\"]\nprofile = \"mcp\"\nrecall = [\"staging:a\"]";
    let beside = "name = \"beside\"\n[[allow]]\nname = \"raw\"\nhosts = [\"m.example\"]\ntcp = [8443]\nmemory = \"may-receive\"\n\
        [[allow]]\nname = \"net\"\naddresses = [\"10.3.0.0/16\"]\nports = [8443]\n\
        [[allow]]\nname = \"alias\"\nhosts = [\"alias.example:8443\"]\nresolves_to = [\"10.3.0.0/16\"]";
    let operator = "[[sandbox]]\nid = \"a\"\ntenant = \"t\"\nenvironment = \"staging\"\nbase = \"system\"\npolicies = [\"team\", \"beside\"]";
    let rules = good(operated(operator, &[memory, beside]));
    let probe = |text: &str, raw: bool| {
        let mut probe = rules::probe::Probe::parse(text).unwrap();
        if raw {
            probe.special = rules::probe::Special::Raw;
        }
        probe.decide(&rules, &sandbox(&rules, "a"))
    };
    assert!(probe("m.example:8443", true).reason().is_some(), "raw TCP goes around the guard");
    assert!(probe("http://m.example:8443", false).reason().is_some(), "in the clear");
    assert!(
        matches!(probe("m.example:8443", false), Decision::Allow(permit) if permit.how().word() == "hold")
    );
    let address = ["10.3.0.5".parse().unwrap()];
    for text in ["alias.example:8443", "10.3.0.5:8443"] {
        let Decision::Allow(permit) = probe(text, false) else { panic!("{text}") };
        assert_eq!(rules.admit(&permit, &address).unwrap_err().reason, MemoryOperation, "{text}");
    }
    let Decision::Allow(held) = probe("m.example:8443", false) else { panic!("held") };
    assert!(rules.admit(&held, &address).is_ok());
}

/// What would be refused at every request is said when the files are loaded.
#[test]
fn a_service_that_nobody_speaks_to_is_noticed() {
    let service = |host: &str| {
        format!(
            "[[memory_service]]\nhost = \"{host}\"\naudience = \"spiffe://a/memory\"\nmode = \"principal\"\n"
        )
    };
    let issuer = "[[identity.issuer]]\nname = \"i\"\ntrust_domain = \"a.example\"\nkeys = \"k\"\n";
    let both = service("memory.corp.example:8443") + &service("given.corp.example");
    for (more, noticed) in [
        (format!("{both}{issuer}"), &[][..]),
        (both.clone(), &["rule `team memory` asks for a signed identity"]),
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
        let rules = good(operated(&format!("{OPERATOR}{more}"), &[POLICY]));
        let warnings = shown(rules.warnings());
        assert_eq!(warnings.len(), noticed.len(), "{more}: {warnings:?}");
        for part in noticed {
            assert!(warnings.iter().any(|one| one.contains(part)), "{part}: {warnings:?}");
        }
    }
}
