//! Layers, tiers, sandboxes and channels, from the operator's file.

use rules::Reason::*;
use rules::facts::Method;
use rules::pattern::{HostPattern, Width};
use rules::word::SandboxId;
use rules::{Channel, Grant, Sources, compile};

use super::{attempt, errors, file, good, operated, sandbox, shown, table};

const POLICY: &str = r#"
name = "build"
[[allow]]
name = "code"
hosts = ["github.com", "pypi.example"]
[[allow]]
name = "db"
hosts = ["db.corp.example"]
tcp = [5432]
resolves_to = ["10.1.0.0/16"]
[[allow]]
name = "key"
hosts = ["api.openai.com"]
credential = "openai"
"#;

const EXTRA: &str = "name = \"extra\"\n[budget]\nrequests_per_hour = 5\n[[allow]]\nname = \"more\"\nhosts = [\"more.example\"]";

const BASE: &str = r#"
name = "floor"
[budget]
requests_per_hour = 9
upload_bytes_per_hour = 100
[[allow]]
name = "floor"
hosts = ["github.com", "api.openai.com", "*.corp.example"]
[[deny]]
name = "never"
hosts = ["more.example"]
"#;

const OPERATOR: &str = r#"
policies = "policies"
[[credential]]
name = "openai"
file = "secrets/openai"
[[sandbox]]
id = "a"
policies = ["build", "extra"]
mark = 0xa1
[[sandbox]]
id = "b"
base = "untrusted"
policies = ["build"]
mark = 0xb2
[[sandbox]]
id = "c"
base = "system"
policies = ["build"]
interface = "veth-c"
[[sandbox]]
id = "d"
base = "floor"
policies = ["build", "extra"]
unix_uid = 1000
[[sandbox]]
id = "e"
mark = 0xe5
"#;

fn rules() -> rules::RuleSet {
    good(operated(OPERATOR, &[POLICY, EXTRA, BASE]))
}

#[test]
fn every_layer_must_allow_and_none_deny() {
    let rules = rules();
    table(
        &rules,
        "a",
        &[
            ("github.com", Ok("code")),
            ("more.example", Ok("more")),
            ("db.corp.example:5432", Err(BaseForbids)),
            ("other.example", Err(NotListed)),
        ],
    );
    table(&rules, "b", &[("github.com", Err(BaseForbids)), ("other.example", Err(NotListed))]);
    table(
        &rules,
        "c",
        &[
            ("github.com", Ok("code")),
            ("db.corp.example:5432", Ok("db")),
            ("more.example", Err(NotListed)),
        ],
    );
    table(
        &rules,
        "d",
        &[
            ("github.com", Ok("code")),
            ("pypi.example", Err(NotListed)),
            ("more.example", Err(DeniedByRule)),
            ("POST https://api.openai.com/", Ok("key")),
            ("db.corp.example:5432", Err(PortNotListed)),
        ],
    );
    table(&rules, "e", &[("github.com", Err(NotListed))]);
}

#[test]
fn the_smallest_budget_counts_over_all_layers() {
    let rules = rules();
    let budgets = rules.budgets_of(&sandbox(&rules, "d"));
    assert_eq!(
        budgets.set().collect::<Vec<_>>(),
        [("requests_per_hour", 5), ("upload_bytes_per_hour", 100)]
    );
}

#[test]
fn rules_the_base_leaves_nothing_of_are_warned_about() {
    let warnings = shown(rules().warnings()).join("\n");
    for part in [
        "rule `db` can never act: in sandbox `a`, base `user` allows no raw TCP",
        "rule `code` can never act: in sandbox `b`, base `untrusted` allows nothing",
        "rule `more` can never act: in sandbox `d`, base `floor` allows none of its hosts",
    ] {
        assert!(warnings.contains(part), "{part}\n---\n{warnings}");
    }
    assert!(!warnings.contains("sandbox `c`"), "{warnings}");
}

#[test]
fn channels_come_from_the_operators_file() {
    let rules = rules();
    let who = |seen: &[Channel]| rules.sandboxes().identify(seen).map(|found| found.id.to_string());
    assert_eq!(who(&[Channel::Mark(0xa1)]), Ok("a".to_owned()));
    assert_eq!(who(&[Channel::Interface("veth-c".to_owned())]), Ok("c".to_owned()));
    assert_eq!(who(&[Channel::UnixUser(1000)]), Ok("d".to_owned()));
    assert_eq!(who(&[Channel::UnixUser(0)]), Err(UnknownChannel));
    assert_eq!(who(&[Channel::Mark(0xa1), Channel::Mark(0xe5)]), Err(ChannelsDisagree));
}

#[test]
fn the_operators_file_is_checked_like_a_policy() {
    let one = |entry: &str| format!("[[sandbox]]\nid = \"a\"\npolicies = [\"extra\"]\n{entry}");
    for (operator, part) in [
        ("[[sandbox]]\nid = \"a\"\npolicies = [\"extr\"]".to_owned(), "there is no policy `extr`"),
        ("[[sandbox]]\nid = \"a\"\nbase = \"usr\"".to_owned(), "there is no base `usr`"),
        ("[[sandbox]]\nid = \"a b\"".to_owned(), "sandbox id `a b` is not good"),
        (
            "[[sandbox]]\nid = \"a\"\n[[sandbox]]\nid = \"a\"".to_owned(),
            "sandbox `a` stands twice; first on line 2",
        ),
        (
            "[[sandbox]]\nid = \"a\"\nmark = 1\n[[sandbox]]\nid = \"b\"\nmark = 1".to_owned(),
            "channel `mark 0x1 (of sandbox a)` stands twice; first on line 2",
        ),
        (one("mark = 0"), "mark 0 is what every unmarked connection carries"),
        (one("interface = \"\""), "an interface name has 1 to 15 characters"),
        (one("source_address = \"10.0.0.2/32\""), "dangerously_trust_source_address"),
        (
            one("dangerously_trust_source_address = true\nsource_address = \"10.0.0.2/8\""),
            "is not a network",
        ),
        (
            one("[[listener]]\nmode = \"dns\"\nbind = [\"127.0.0.1:53\"]"),
            "a listener says whose it is",
        ),
        (
            one("[[listener]]\nmode = \"dns\"\nbind = [\"nonsense\"]\nsandbox = \"a\""),
            "an address to bind",
        ),
        (
            one("[[listener]]\nmode = \"dns\"\nbind = []\nsandbox = \"z\""),
            "there is no sandbox `z`",
        ),
        (
            one("[[listener]]\nmode = \"dns\"\nbind = []\nsandbox = \"a\"\nidentify = \"mark\""),
            "exclude each other",
        ),
        (one("[[listener]]\nmode = \"dsn\"\nbind = []"), "`dsn` is not one of"),
        (one("[dns]\nupstreams = [\"8.8.8.8\"]"), "a resolver is written `address:port`"),
        (one("[log]\ndir = \"\""), "a path must not be empty"),
        (one("[logg]"), "`logg` is not a key here"),
        (one("[[credential]]\nname = \"x y\"\nfile = \"f\""), "credential `x y` is not good"),
    ] {
        let found = errors(operated(&operator, &[EXTRA])).join("\n");
        assert!(found.contains(part), "{operator}\n---\n{found}");
    }
}

#[test]
fn credentials_must_exist_and_unused_policies_are_noticed() {
    let operator = "[[sandbox]]\nid = \"a\"\nbase = \"system\"\npolicies = [\"build\"]";
    let found = errors(operated(operator, &[POLICY, EXTRA])).join("\n");
    assert!(found.contains("there is no credential `openai`"), "{found}");
    let rules = good(operated("[[sandbox]]\nid = \"a\"", &[EXTRA]));
    assert!(shown(rules.warnings()).join("\n").contains("no sandbox names policy `extra`"));
}

#[test]
fn a_sandbox_that_leaves_the_file_may_do_nothing() {
    let before = rules();
    let gone = sandbox(&before, "a");
    let after = good(operated("[[sandbox]]\nid = \"z\"\npolicies = [\"extra\"]", &[EXTRA]));
    let facts = rules::probe::Probe::parse("more.example").unwrap().facts(&gone);
    let permit = match before.decide(&gone, &facts[0]) {
        rules::Decision::Allow(permit) => permit,
        rules::Decision::Deny(denial) => panic!("{}", denial.reason),
    };
    assert_eq!(after.decide(&gone, &facts[0]).reason(), Some(UnknownSandbox));
    assert_eq!(after.decide_again(&permit).reason(), Some(UnknownSandbox));
}

#[test]
fn grants_add_to_the_sandboxes_own_layer_only() {
    let grant = |sandbox: &str, host: &str, methods: Option<&str>| Grant {
        id: format!("g-{host}"),
        sandbox: SandboxId::parse(sandbox).unwrap(),
        host: HostPattern::parse(host, Width::Narrow).unwrap(),
        methods: methods.map(|method| vec![Method::parse(method).unwrap()]),
        paths: None,
    };
    let policies = [POLICY, EXTRA, BASE].iter().enumerate();
    let sources = Sources {
        operator: Some(file("sandbar.toml", OPERATOR)),
        policies: policies.map(|(at, text)| file(&format!("{at}.toml"), text)).collect(),
        ..Sources::default()
    };
    let grants = [
        grant("a", "new.example", Some("GET")),
        grant("b", "new.example", None),
        grant("d", "more.example", None),
    ];
    let with = good(compile(&sources, &grants));
    assert_eq!(
        attempt(&with, "a", "GET https://new.example/"),
        Ok("grant g-new.example".to_owned())
    );
    assert_eq!(attempt(&with, "a", "POST https://new.example/"), Err(MethodNotAllowed));
    assert_eq!(attempt(&with, "b", "new.example"), Err(BaseForbids));
    assert_eq!(attempt(&with, "c", "new.example"), Err(NotListed));
    assert_eq!(attempt(&with, "d", "more.example"), Err(DeniedByRule));
    let without = good(compile(&sources, &[]));
    assert_eq!(attempt(&without, "a", "GET https://new.example/"), Err(NotListed));
    assert_ne!(with.digest(), without.digest());
}
