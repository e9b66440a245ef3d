//! Layers, tiers, sandboxes and channels of the configuration.

use rules::Reason::*;
use rules::budget::BudgetKind;
use rules::decision::Treatment;
use rules::facts::HttpMethod;
use rules::ids::SandboxId;
use rules::pattern::{HostPattern, PatternWidth};
use rules::probe::PolicyProbe;
use rules::{Channel, Decision, Grant, LoadSources, Permit, RuleSet, TimedState, compile};

use super::{
    assert_decisions, compile_configured, decide_attempt, error_texts, problem_texts, sandbox_ref,
    source_file, unwrap_rules,
};

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

const CONFIGURATION: &str = r#"
policies = "policies"
[[credential]]
name = "openai"
file = "secrets/openai"
hosts = ["api.openai.com"]
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
    unwrap_rules(compile_configured(CONFIGURATION, &[POLICY, EXTRA, BASE]))
}

// proves: name, sandbox.id, sandbox.base, sandbox.policies
#[test]
fn p1_every_layer_must_allow_and_none_deny() {
    let rules = rules();
    assert_decisions(
        &rules,
        "a",
        &[
            ("github.com", Ok("code")),
            ("more.example", Ok("more")),
            ("db.corp.example:5432", Err(BaseForbids)),
            ("other.example", Err(NotListed)),
        ],
    );
    assert_decisions(&rules, "b", &[("github.com", Err(BaseForbids)), ("other.example", Err(NotListed))]);
    assert_decisions(
        &rules,
        "c",
        &[("github.com", Ok("code")), ("db.corp.example:5432", Ok("db")), ("more.example", Err(NotListed))],
    );
    assert_decisions(
        &rules,
        "d",
        &[
            ("github.com", Ok("code")),
            ("pypi.example", Err(BaseForbids)),
            ("more.example", Err(DeniedByRule)),
            ("POST https://api.openai.com/", Ok("key")),
            ("db.corp.example:5432", Err(BaseForbids)),
        ],
    );
    assert_decisions(&rules, "e", &[("github.com", Err(NotListed))]);
}

#[test]
fn the_smallest_budget_counts_over_all_layers() {
    let rules = rules();
    let budgets = rules.budgets_of(&sandbox_ref(&rules, "d"));
    assert_eq!(
        budgets.limits().map(|(budget, limit)| (budget.key(), limit)).collect::<Vec<_>>(),
        [("requests_per_hour", 5), ("upload_bytes_per_hour", 100)]
    );
}

#[test]
fn rules_that_the_base_makes_ineffective_cause_warnings() {
    let warnings = problem_texts(rules().warnings()).join("\n");
    for part in [
        "rule `db` has no effect: in sandbox `a`, base `user` allows no raw TCP",
        "rule `code` has no effect: in sandbox `b`, base `untrusted` allows nothing",
        "rule `more` has no effect: in sandbox `d`, base `floor` allows none of its hosts",
    ] {
        assert!(warnings.contains(part), "{part}\n---\n{warnings}");
    }
    assert!(!warnings.contains("sandbox `c`"), "{warnings}");
}

#[test]
fn p2_channels_come_from_the_configuration() {
    let rules = rules();
    let who = |seen: &[Channel]| rules.sandboxes().identify(seen).map(|found| found.id.to_string());
    assert_eq!(who(&[Channel::Mark(0xa1)]), Ok("a".to_owned()));
    assert_eq!(who(&[Channel::Interface("veth-c".to_owned())]), Ok("c".to_owned()));
    assert_eq!(who(&[Channel::UnixUser(1000)]), Ok("d".to_owned()));
    assert_eq!(who(&[Channel::UnixUser(0)]), Err(UnknownChannel));
    assert_eq!(who(&[Channel::Mark(0xa1), Channel::Mark(0xe5)]), Err(ChannelsDisagree));
}

#[test]
fn the_configuration_is_checked_like_a_policy() {
    let one = |entry: &str| format!("[[sandbox]]\nid = \"a\"\npolicies = [\"extra\"]\n{entry}");
    for (configuration, part) in [
        ("[[sandbox]]\nid = \"a\"\npolicies = [\"extr\"]".to_owned(), "unknown policy `extr`"),
        ("[[sandbox]]\nid = \"a\"\nbase = \"usr\"".to_owned(), "unknown base `usr`"),
        ("[[sandbox]]\nid = \"a b\"".to_owned(), "invalid sandbox id `a b`"),
        (
            "[[sandbox]]\nid = \"a\"\n[[sandbox]]\nid = \"a\"".to_owned(),
            "sandbox `a` is defined twice; first on line 2",
        ),
        (
            "[[sandbox]]\nid = \"a\"\nmark = 1\n[[sandbox]]\nid = \"b\"\nmark = 1".to_owned(),
            "channel `mark 0x1 (of sandbox a)` is defined twice; first on line 2",
        ),
        (one("mark = 0"), "every unmarked connection carries mark 0"),
        (one("interface = \"\""), "an interface name must have 1 to 15 characters"),
        (one("source_address = \"10.0.0.2/32\""), "dangerously_trust_source_address"),
        (one("dangerously_trust_source_address = true\nsource_address = \"10.0.0.2/8\""), "is not a network"),
        (
            one("[[listener]]\nmode = \"dns\"\nbind = [\"127.0.0.1:53\"]"),
            "a listener needs `sandbox`, or `identify`",
        ),
        (
            one("[[listener]]\nmode = \"dns\"\nbind = [\"nonsense\"]\nsandbox = \"a\""),
            "write a socket as `address:port`",
        ),
        (one("[[listener]]\nmode = \"dns\"\nbind = [\"unix:x\"]\nsandbox = \"a\""), "can bind a unix socket"),
        (one("[[listener]]\nmode = \"explicit\"\nbind = []\nsandbox = \"a\""), "at least one socket"),
        (one("[limits]\nstreams = 0"), "0 is out of range: use 1 to 1000"),
        (one("[limits]\nhead_bytes = 999999999"), "is out of range"),
        (one("[limits]\nstreems = 1"), "unknown key `streems`"),
        (one("[ca]\ndir = \"\""), "a path must not be empty"),
        (one("[[listener]]\nmode = \"dns\"\nbind = []\nsandbox = \"z\""), "unknown sandbox `z`"),
        (
            one("[[listener]]\nmode = \"dns\"\nbind = []\nsandbox = \"a\"\nidentify = \"mark\""),
            "cannot be used together",
        ),
        (one("[[listener]]\nmode = \"dsn\"\nbind = []"), "`dsn` is not one of"),
        (one("[dns]\nupstreams = [\"8.8.8.8\"]"), "write a resolver as `address:port`"),
        (one("[log]\ndir = \"\""), "a path must not be empty"),
        (one("[logg]"), "unknown key `logg`"),
        (one("[log]\ndir = \"l\"\nretention = \"30\""), "`retention` = `30` is not an age from 60s to 3650d"),
        (one("[log]\ndir = \"l\"\nretention = \"5s\""), "is not an age"),
        (one("[log]\ndir = \"l\"\nsegment_age = \"99999999999999999999d\""), "is not an age"),
        (one("[log]\ndir = \"l\"\nsegment_age = \"-1d\""), "is not an age"),
        (one("[log]\ndir = \"l\"\nmax_bytes = 1000"), "`max_bytes` = 1000 is out of range: use 1048576 to"),
        (
            one("[log]\ndir = \"l\"\nmax_bytes = 4000000\nsegment_bytes = 1000001"),
            "4 segments x 1000001 = 4000004, but `max_bytes` is 4000000",
        ),
        (one("[log]\ndir = \"l\"\nsegment_bytes = 1"), "use 65536 to 1073741824"),
        (one("[log]\ndir = \"l\"\nopen_decisions = 8"), "1 sandboxes x 8 = 8, but the total is 4 for shares"),
        (one("[log]\ndir = \"l\"\ndurability = \"tape\""), "`tape` is not one of"),
        (one("[log]\ndir = \"l\"\ncompress = \"zstd\""), "invalid type"),
        (one("[[credential]]\nname = \"x y\"\nfile = \"f\""), "invalid credential name"),
    ] {
        let found = error_texts(compile_configured(&configuration, &[EXTRA])).join("\n");
        assert!(found.contains(part), "{configuration}\n---\n{found}");
    }
}

// proves: listener.dangerously_share_address
#[test]
fn p2_a_process_does_not_choose_its_sandbox_by_port() {
    let listener = |bind: &str, whose: &str| {
        format!("[[listener]]\nmode = \"explicit\"\nbind = [\"{bind}\"]\n{whose}\n")
    };
    let (a, b) = ("sandbox = \"a\"", "sandbox = \"b\"");
    let known = "dangerously_share_address = true";
    for (first, second, refused) in [
        (
            listener("10.0.0.1:3201", a),
            listener("10.0.0.1:3202", b),
            &["6:11: sandbox `b` (line 8)", "10:11"][..],
        ),
        (listener("10.0.0.1:3201", a), listener("[::ffff:10.0.0.1]:3202", b), &["6:11", "10:11"]),
        (listener("0.0.0.0:3201", a), listener("10.0.0.1:3202", b), &["6:11", "10:11"]),
        (listener("10.0.0.1:3201", a), listener("[::]:3202", b), &["6:11", "10:11"]),
        (listener("127.0.0.1:3201", a), listener("127.0.0.2:3202", b), &["6:11", "10:11"]),
        (
            listener("10.0.0.1:3201", a),
            listener("10.0.0.1:3202", "identify = \"mark\""),
            &["6:11: a shared listener (line 8)"],
        ),
        (listener("10.0.0.1:3201", &format!("{a}\n{known}")), listener("10.0.0.1:3202", b), &["11:11"]),
        (
            listener("10.0.0.1:3201", &format!("{a}\n{known}")),
            listener("10.0.0.1:3202", &format!("{b}\n{known}")),
            &[],
        ),
        (listener("10.0.0.1:3201", a), listener("10.0.0.1:53", a), &[]),
        (listener("10.0.0.1:3201", a), listener("10.0.0.2:3201", b), &[]),
        (listener("127.0.0.1:3201", a), listener("10.0.0.2:3201", b), &[]),
        (listener("unix:a.sock", a), listener("unix:b.sock", b), &[]),
        (listener("inherited:a", a), listener("inherited:b", b), &[]),
        (
            listener("0.0.0.0:3201", "identify = \"mark\""),
            listener("0.0.0.0:53", "identify = \"interface\""),
            &[],
        ),
    ] {
        let text =
            format!("policies = \"p\"\n\n{first}{second}[[sandbox]]\nid = \"a\"\n[[sandbox]]\nid = \"b\"\n");
        let found = error_texts(compile_configured(&text, &[EXTRA]));
        assert_eq!(found.len(), refused.len(), "{text}\n---\n{found:#?}");
        for (found, place) in found.iter().zip(refused) {
            assert!(found.starts_with(&format!("sandbar.toml:{place}")), "{text}\n---\n{found}");
        }
    }
    let alone = listener("10.0.0.1:3201", a) + &listener("10.0.0.1:53", "identify = \"mark\"");
    let found = compile_configured(&format!("{alone}[[sandbox]]\nid = \"a\"\n"), &[EXTRA]);
    assert_eq!(error_texts(found), Vec::<String>::new(), "there is no other sandbox");
}

#[test]
fn credentials_must_exist_and_unused_policies_cause_warnings() {
    let configuration = "[[sandbox]]\nid = \"a\"\nbase = \"system\"\npolicies = [\"build\"]";
    let found = error_texts(compile_configured(configuration, &[POLICY, EXTRA])).join("\n");
    assert!(found.contains("unknown credential `openai`"), "{found}");
    let rules = unwrap_rules(compile_configured("[[sandbox]]\nid = \"a\"", &[EXTRA]));
    assert!(problem_texts(rules.warnings()).join("\n").contains("no sandbox uses policy `extra`"));
}

#[test]
fn a_sandbox_removed_from_the_configuration_may_do_nothing() {
    let before = rules();
    let gone = sandbox_ref(&before, "a");
    let after = unwrap_rules(compile_configured("[[sandbox]]\nid = \"z\"\npolicies = [\"extra\"]", &[EXTRA]));
    let facts = rules::probe::PolicyProbe::parse("more.example").unwrap().facts(&gone);
    let permit = match before.decide(&gone, &facts[0]) {
        rules::Decision::Allow(permit) => permit,
        rules::Decision::Deny(denial) => panic!("{}", denial.reason),
    };
    assert_eq!(after.decide(&gone, &facts[0]).reason(), Some(UnknownSandbox));
    assert_eq!(after.decide_again(&permit, None).reason(), Some(UnknownSandbox));
}

#[test]
fn grants_add_to_the_sandboxes_own_layer_only() {
    let grant = |sandbox: &str, host: &str, methods: Option<&str>| Grant {
        id: format!("g-{host}"),
        sandbox: SandboxId::parse(sandbox).unwrap(),
        host: HostPattern::parse(host, PatternWidth::Narrow).unwrap(),
        methods: methods.map(|method| vec![HttpMethod::parse(method).unwrap()]),
        paths: None,
        budgets: rules::budget::Budgets::default(),
    };
    let policies = [POLICY, EXTRA, BASE].iter().enumerate();
    let sources = LoadSources {
        operator: Some(source_file("sandbar.toml", CONFIGURATION)),
        policies: policies.map(|(at, text)| source_file(&format!("{at}.toml"), text)).collect(),
        ..LoadSources::default()
    };
    let grants = [
        grant("a", "new.example", Some("GET")),
        grant("b", "new.example", None),
        grant("d", "more.example", None),
    ];
    let with = unwrap_rules(compile(&sources, &grants));
    assert_eq!(decide_attempt(&with, "a", "GET https://new.example/"), Ok("grant g-new.example".to_owned()));
    assert_eq!(decide_attempt(&with, "a", "POST https://new.example/"), Err(MethodNotAllowed));
    assert_eq!(decide_attempt(&with, "b", "new.example"), Err(BaseForbids));
    assert_eq!(decide_attempt(&with, "c", "new.example"), Err(NotListed));
    assert_eq!(decide_attempt(&with, "d", "more.example"), Err(DeniedByRule));
    let without = unwrap_rules(compile(&sources, &[]));
    assert_eq!(decide_attempt(&without, "a", "GET https://new.example/"), Err(NotListed));
    assert_ne!(with.digest(), without.digest());
}

/// Compiles a base policy and a sandbox policy for sandbox `a`.
fn compile_layers(base: &str, own: &str) -> rules::RuleSet {
    let configuration = "[[credential]]\nname = \"k\"\nfile = \"f\"\nhosts = [\"x.example\"]\n[[sandbox]]\nid = \"a\"\nbase = \"b\"\npolicies = [\"o\"]";
    unwrap_rules(compile_configured(
        configuration,
        &[&format!("name = \"b\"\n{base}"), &format!("name = \"o\"\n{own}")],
    ))
}

fn allow_rule(body: &str) -> String {
    format!("[[allow]]\nname = \"r\"\n{body}\n")
}

#[test]
fn a_base_bounds_how_things_pass() {
    let filtered = allow_rule("hosts = [\"x.example\"]\nmethods = [\"GET\"]");
    let denied =
        allow_rule("hosts = [\"x.example\"]") + "[[deny]]\nhosts = [\".x.example\"]\npaths = [\"/admin/**\"]";
    let raw = allow_rule("hosts = [\"x.example\"]\ntcp = [443]");
    for (base, own, text, expected) in [
        (&filtered, &raw, "x.example", Err(BaseForbids)),
        (&denied, &raw, "x.example", Err(BaseForbids)),
        (&raw, &raw, "x.example", Ok("r")),
        (&raw, &allow_rule("hosts = [\"x.example\"]"), "GET https://x.example/", Ok("r")),
        (&filtered, &allow_rule("hosts = [\"x.example\"]"), "POST https://x.example/", Err(BaseForbids)),
    ] {
        assert_eq!(
            decide_attempt(&compile_layers(base, own), "a", text).as_deref(),
            expected.as_ref().copied(),
            "{base}{own}{text}"
        );
    }
}

#[test]
fn terms_of_both_layers_count() {
    let tunnel = allow_rule("hosts = [\"x.example\"]\ntls = \"tunnel\"\nech = \"tolerate\"");
    let plain =
        allow_rule("hosts = [\"x.example\"]\ncname = \"strict\"\n[allow.budget]\nrequests_per_hour = 3");
    let how = |base: &str, own: &str| {
        let rules = compile_layers(base, own);
        let decision =
            rules::probe::PolicyProbe::parse("x.example").unwrap().decide(&rules, &sandbox_ref(&rules, "a"));
        let rules::Decision::Allow(permit) = decision else { panic!("{decision:?}") };
        let budget = permit.rule_budgets().limit(rules::budget::BudgetKind::RequestsPerHour);
        (permit.treatment().as_str(), permit.lookup().strict_cname, budget)
    };
    assert_eq!(how(&tunnel, &tunnel), ("tunnel", false, None));
    assert_eq!(how(&allow_rule("hosts = [\"x.example\"]"), &tunnel), ("intercept", false, None));
    assert_eq!(how(&plain, &allow_rule("hosts = [\"x.example\"]")), ("intercept", true, Some(3)));
}

#[test]
fn a_lookup_counts_all_matching_rules() {
    let policy = "name = \"p\"\n[[allow]]\nname = \"db\"\nhosts = [\"x.example\"]\ntcp = [5432]\nresolves_to = [\"10.1.0.0/16\"]\n\
        [[allow]]\nname = \"web\"\nhosts = [\"x.example\"]";
    let rules = unwrap_rules(compile_configured("[[sandbox]]\nid = \"a\"\npolicies = [\"p\"]", &[policy]));
    let name = rules::DomainName::parse("x.example").unwrap();
    let facts = rules::Facts::Name(rules::facts::NameFacts { name, query: rules::facts::QueryType::A });
    let rules::Decision::Allow(permit) = rules.decide(&sandbox_ref(&rules, "a"), &facts) else {
        panic!("denied")
    };
    assert_eq!(&*permit.rule().rule, "web");
    assert!(rules.admit(&permit, &["9.9.9.9".parse().unwrap()]).is_ok());
    let system = unwrap_rules(compile_configured(
        "[[sandbox]]\nid = \"a\"\nbase = \"system\"\npolicies = [\"p\"]",
        &[policy],
    ));
    let rules::Decision::Allow(permit) = system.decide(&sandbox_ref(&system, "a"), &facts) else {
        panic!("denied")
    };
    for address in ["9.9.9.9", "10.1.2.3"] {
        assert!(system.admit(&permit, &[address.parse().unwrap()]).is_ok(), "{address}");
    }
    assert!(system.admit(&permit, &["10.2.2.3".parse().unwrap()]).is_err());
}

#[test]
fn every_grant_has_its_own_rule() {
    let grant = |id: usize, host: &str, method: Option<&str>| Grant {
        id: id.to_string(),
        sandbox: SandboxId::parse("extra").unwrap(),
        host: HostPattern::parse(host, PatternWidth::Narrow).unwrap(),
        methods: method.map(|method| vec![HttpMethod::parse(method).unwrap()]),
        paths: None,
        budgets: rules::budget::Budgets::default(),
    };
    let sources = LoadSources { policies: vec![source_file("p.toml", EXTRA)], ..LoadSources::default() };
    let crowd: Vec<Grant> = (0..257).map(|id| grant(id, "x.example", None)).collect();
    assert!(
        problem_texts(&compile(&sources, &crowd).unwrap_err())
            .join("")
            .contains("more than 256 entries for one name")
    );
    let few = [grant(1, "readonly.example", Some("GET")), grant(2, "other.example", None)];
    let rules = unwrap_rules(compile(&sources, &few));
    assert_eq!(decide_attempt(&rules, "extra", "DELETE https://readonly.example/"), Err(MethodNotAllowed));
    assert_eq!(decide_attempt(&rules, "extra", "DELETE https://other.example/"), Ok("grant 2".to_owned()));
}

#[test]
fn a_rule_takes_precedence_over_a_more_specific_grant() {
    let own = "name = \"p\"\n[[allow]]\nname = \"wild\"\nhosts = [\"*.x.example\"]\nmethods = [\"GET\"]\n\
               [allow.budget]\nrequests_per_hour = 3";
    let sources = LoadSources { policies: vec![source_file("p.toml", own)], ..LoadSources::default() };
    let grant = Grant {
        id: "1".into(),
        sandbox: SandboxId::parse("p").unwrap(),
        host: HostPattern::parse("a.x.example", PatternWidth::Narrow).unwrap(),
        methods: None,
        paths: None,
        budgets: rules::budget::Budgets::default(),
    };
    let rules = unwrap_rules(compile(&sources, &[grant]));
    for (text, rule) in [
        ("GET https://a.x.example/", "wild"), // its budget still applies
        ("POST https://a.x.example/", "grant 1"),
        ("GET https://b.x.example/", "wild"),
    ] {
        assert_eq!(decide_attempt(&rules, "p", text), Ok(rule.to_owned()), "{text}");
    }
}

#[test]
fn thousands_of_sandboxes_and_rules_load_quickly() {
    let sandboxes: String = (0..20_000)
        .map(|n| {
            format!("[[sandbox]]\nid = \"s{n}\"\nbase = \"system\"\npolicies = [\"p\"]\nmark = {}\n", n + 1)
        })
        .collect();
    let rules: String =
        (0..5_000).map(|n| format!("[[allow]]\nname = \"r{n}\"\nhosts = [\"h{n}.example\"]\n")).collect();
    let loaded = unwrap_rules(compile_configured(&sandboxes, &[&format!("name = \"p\"\n{rules}")]));
    assert_eq!(loaded.sandboxes().iter().count(), 20_000);
}

#[test]
fn the_log_section_has_defaults_that_fit_and_shares_that_must() {
    let read = |text: &str| {
        let file = rules::load::SourceFile { path: "sandbar.toml".into(), bytes: text.as_bytes().into() };
        rules::load::read_configuration(&file)
    };
    let log = read("[log]\ndir = \"l\"").unwrap().log.unwrap();
    assert_eq!(log, rules::configuration::LogSettings::new("l"));
    let small =
        read("[log]\ndir = \"l\"\nmax_bytes = 8388608\nretention = \"30d\"\ncompress = true").unwrap();
    let small = small.log.unwrap();
    assert_eq!((small.segment_bytes, small.retention.unwrap().as_secs()), (2_097_152, 30 * 86_400));
    let many: String = (0..100).map(|at| format!("[[sandbox]]\nid = \"s{at}\"\n")).collect();
    let problems = read(&format!("[log]\ndir = \"l\"\nmax_bytes = 8388608\n{many}")).unwrap_err();
    let text = problems[0].to_string();
    assert!(text.contains("sandbar.toml:3:13"), "{text}");
    assert!(text.contains("100 sandboxes x 65536 = 6553600, but the total is 3670016"), "{text}");
}

fn allowed(rules: &RuleSet, id: &str, text: &str, stage: usize) -> Permit {
    let sandbox = sandbox_ref(rules, id);
    let facts = PolicyProbe::parse(text).unwrap().facts(&sandbox);
    match rules.decide(&sandbox, &facts[stage]) {
        Decision::Allow(permit) => permit,
        Decision::Deny(denial) => panic!("{text}: {}", denial.reason),
    }
}

const LAYERED: &str = "[[sandbox]]\nid = \"s\"\nbase = \"base\"\npolicies = [\"own\"]\n";

#[test]
fn a_permit_carries_the_budgets_of_the_bases_rule() {
    let base = "name = \"base\"\n[[allow]]\nname = \"floor\"\nhosts = [\"a.example\", \"b.example\"]\n\
                budget = { requests_per_hour = 3 }\n[[allow]]\nname = \"free\"\nhosts = [\"c.example\"]\n";
    let own = "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = [\"a.example\", \"c.example\"]\n";
    let rules = unwrap_rules(compile_configured(LAYERED, &[base, own]));
    let permit = allowed(&rules, "s", "https://a.example/", 0);
    let (rule, budgets) = permit.base_budgets().expect("the base bounds it");
    assert_eq!((&*rule.rule, budgets.limit(BudgetKind::RequestsPerHour)), ("floor", Some(3)));
    assert!(allowed(&rules, "s", "https://c.example/", 0).base_budgets().is_none());
}

#[test]
fn a_tunnel_is_intercepted_where_the_base_must_see_requests() {
    let base = "name = \"base\"\n[[allow]]\nname = \"reads\"\nhosts = [\"a.example\"]\nmethods = [\"GET\"]\n\
                [[allow]]\nname = \"any\"\nhosts = [\"b.example\"]\ntls = \"tunnel\"\n";
    let own = "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = [\"a.example\", \"b.example\"]\ntls = \"tunnel\"\n";
    let rules = unwrap_rules(compile_configured(LAYERED, &[base, own]));
    let treatment = |text: &str| allowed(&rules, "s", text, 0).treatment().clone();
    assert_eq!(treatment("https://a.example/"), Treatment::Intercept);
    assert_eq!(treatment("https://b.example/"), Treatment::Tunnel);
}

#[test]
fn p11_a_permit_knows_whether_its_host_has_a_credential() {
    let policy = "name = \"own\"\n[[allow]]\nname = \"model\"\nhosts = [\"a.example\"]\npaths = [\"/v1/**\"]\n\
                  credential = \"key\"\n[[allow]]\nname = \"rest\"\nhosts = [\"a.example\", \"b.example\"]\n";
    let configuration = "[[credential]]\nname = \"key\"\nfile = \"key\"\nhosts = [\"a.example\"]\n[[sandbox]]\nid = \"s\"\npolicies = [\"own\"]\n";
    let rules = unwrap_rules(compile_configured(configuration, &[policy]));
    for (text, credential, bound) in [
        ("https://a.example/v1/x", true, true),
        ("https://a.example/other", false, true),
        ("https://b.example/v1/x", false, false),
    ] {
        let permit = allowed(&rules, "s", text, 1);
        assert_eq!(
            (permit.credential().is_some(), permit.is_credential_host()),
            (credential, bound),
            "{text}"
        );
    }
}

#[test]
fn p10_timed_state_ends_sandboxes_and_has_its_own_generation() {
    let own = "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = [\"a.example\"]\n";
    let rules = unwrap_rules(compile_configured("[[sandbox]]\nid = \"s\"\npolicies = [\"own\"]\n", &[own]));
    let ended = TimedState { ended: [SandboxId::parse("s").unwrap()].into(), ..TimedState::default() };
    let after = rules.with_timed_state(&ended, 9).unwrap();
    assert_eq!((after.generation(), allowed(&rules, "s", "https://a.example/", 0).generation()), (9, 0));
    assert_eq!(decide_attempt(&after, "s", "https://a.example/"), Err(SandboxEnded));
    assert_eq!(decide_attempt(&rules, "s", "https://a.example/").as_deref(), Ok("web"));
}
