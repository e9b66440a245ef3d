//! Invalid files: each yields all of its errors, with locations, and never loads in part.

use rules::load::problem::MAX_PROBLEMS;
use rules::{LoadSources, compile};

use super::{
    compile_lone, compile_with_lists, decide_attempt, error_texts, problem_texts, source_file, unwrap_rules,
};

fn allow(body: &str) -> String {
    format!("name = \"p\"\n[[allow]]\nname = \"r\"\n{body}")
}

// proves: allow.dangerously_wide
#[test]
fn invalid_entries_are_reported() {
    for (body, part) in [
        ("hosts = [\"\"]", "p.toml:4:10: `` is not a host pattern: it is empty"),
        ("hosts = [\"ok.example\", \"b d\"]", "p.toml:4:24: `b d` is not a host pattern"),
        ("hosts = [\"https://x.com\"]", "it has a scheme"),
        ("hosts = [\"*.com\"]", "dangerously_wide"),
        ("hosts = [\"**.x.com\"]", "`*.x.com` already covers every depth"),
        ("hosts = [\"10.0.0.1\"]", "list addresses under `addresses`"),
        ("hosts = [\"x.com\"]\nmethods = [\"get\"]", "`get` is not a request method"),
        ("hosts = [\"x.com\"]\nmethods = [\"TRACE\"]", "`TRACE` is never forwarded"),
        ("hosts = [\"x.com\"]\nmethods = [\"\"]", "`` is not a request method"),
        ("hosts = [\"x.com\"]\npaths = [\"v1\"]", "`v1` is not a path pattern: it does not begin with `/`"),
        ("hosts = [\"x.com\"]\npaths = [\"/a%252fb\"]", "`/a%252fb` is not a path pattern"),
        ("hosts = [\"x.com\"]\npaths = [\"/a?b=1\"]", "does not match the query"),
        ("hosts = [\"x.com\"]\npaths = [\"\"]", "`` is not a path pattern"),
        ("hosts = [\"x.com\"]\nports = [0]", "0 is not a port"),
        ("hosts = [\"x.com\"]\nports = [70000]", "70000"),
        ("hosts = [\"x.com\"]\nports = [\"443\"]", "invalid type: string"),
        ("hosts = [\"x.com\"]\nresolves_to = [\"10.1.0.0\"]", "`10.1.0.0` is not a network"),
        ("hosts = [\"x.com\"]\nresolves_to = [\"10.1.0.1/16\"]", "`10.1.0.1/16` is not a network"),
        ("hosts = [\"x.com\"]\nresolves_to = [\"224.0.0.0/8\"]", "can be dialled; remove it"),
        ("hosts = [\"x.com\"]\ndns_types = [\"NULL\"]", "unknown DNS query type `NULL`"),
        (
            "hosts = [\"x.com\"]\nmethods = [\"GET\"]\naccess = \"read-only\"",
            "`methods` and `access` cannot be used together",
        ),
        (
            "hosts = [\"x.com\"]\ntls = \"tunnel\"\nmethods = [\"GET\"]",
            "rule `r` has no effect: it tunnels TLS",
        ),
        (
            "hosts = [\"x.com\"]\ntls = \"tunnel\"\ncredential = \"k\"",
            "rule `r` has no effect: it tunnels TLS",
        ),
        ("hosts = [\"x.com\"]\ninspect = 1", "expected a boolean"),
        ("hosts = [\"x.com\"]\nmemory = \"may-send\"", "`may-send` is not"),
        ("hosts = [\"x.com\"]\nbudget = { lifetime_seconds = 9 }", "unknown key `lifetime_seconds`"),
        ("hosts = [\"x.com\"]\nech = \"tolerate\"", "`ech` applies to tunnels only"),
        ("hosts = [\"x.com\"]\ncredential = \"k\"\nports = [80]", "never sent in the clear"),
        ("hosts = [\"x.com:80\"]\ncredential = \"k\"", "never sent in the clear"),
        (
            "hosts = [\"*\"]\ndangerously_wide = true\ncredential = \"k\"",
            "anyone could register a matching name",
        ),
        (
            "hosts = [\"x.com\"]\naddresses = [\"9.9.9.9/32\"]\nports = [443]\ncredential = \"k\"",
            "it needs a verified host name",
        ),
        ("addresses = [\"0.0.0.0/0\"]\nports = [443]", "includes private or special ranges"),
        ("hosts = [\"x.com\"]\nresolves_to = [\"::/0\"]", "includes private or special ranges"),
        ("addresses = [\"::ffff:10.0.0.0/104\"]\nports = [443]", "is not a network"),
        ("hosts = [\"mask.icloud.com\"]", "is always refused"),
        ("hosts = [\".dns.google\"]", "by its exact name"),
        ("hosts = [\"*.compute.amazonaws.com\"]", "a public suffix"),
        (
            "hosts = [\"pinned.x.com\"]\ntls = \"tunnel\"\n[[deny]]\nhosts = [\".x.com\"]\npaths = [\"/a\"]",
            "rule `deny .x.com` needs",
        ),
        (
            "hosts = [\"db.x.com\"]\ntcp = [443]\n[[deny]]\nhosts = [\".x.com\"]\npaths = [\"/a\"]",
            "rule `deny .x.com` needs",
        ),
        (
            "hosts = [\"x.com\"]\n[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"mem0\"\nrecall = [\"s:a\"]",
            "unknown profile `mem0`",
        ),
        (
            "hosts = [\"x.com\"]\n[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"s:a\"]\n[[memory]]\nname = \"n\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"s:a\"]",
            "rule `n` has no effect",
        ),
        (
            "hosts = [\"x.com\"]\n[[test]]\nexpect = \"deny\"\nhost = \"x.com\"\noperation = \"recall\"",
            "`operation` needs a `bank`",
        ),
        (
            "hosts = [\"x.com\"]\n[[test]]\nexpect = \"deny\"\nhost = \"x.com\"\ndns = \"A\"\nmethod = \"GET\"",
            "`dns` tests a lookup only",
        ),
        (
            "hosts = [\"x.com\"]\n[[test]]\nexpect = \"deny\"\nhost = \"1.2.3.4\"\ndns = \"A\"",
            "not an address",
        ),
        (
            "hosts = [\"x.com\"]\npaths = [\"/a/*\"]\ncredential = \"one\"\n[[allow]]\nname = \"s\"\nhosts = [\"x.com\"]\npaths = [\"/*/b\"]\ncredential = \"two\"",
            "rules `r` and `s` tie for `x.com`",
        ),
        (
            "hosts = [\"x.com\"]\ncredential = \"one\"\n[[allow]]\nname = \"s\"\nhosts = [\"x.com\"]\npaths = [\"/**\"]\ncredential = \"two\"",
            "rules `r` and `s` tie for `x.com`",
        ),
        (
            "hosts = [\"*.x.com\"]\ncredential = \"one\"\n[[allow]]\nname = \"s\"\nhosts = [\".x.com\"]\ncredential = \"two\"",
            "tie for `.x.com`",
        ),
        ("addresses = [\"10.0.0.1/32\"]", "needs `ports` or `tcp`"),
        ("addresses = [\"10.0.0.1/32\"]\nports = [1]\ncredential = \"k\"", "it needs a verified host name"),
        (
            "addresses = [\"10.0.0.1/32\"]\nports = [1]\nresolves_to = [\"10.0.0.0/8\"]",
            "cannot be used together",
        ),
        ("addresses = [\"ff02::1/128\"]\nports = [1]", "can be dialled; remove it"),
        ("hosts = [\"*.x.com\"]\ntcp = [22]", "a raw TCP rule takes exact names"),
        ("hosts = [\"x.com:22\"]\ntcp = [22]", "a raw TCP rule takes exact names"),
        ("hosts = [\"x.com\"]\ntcp = [22]\nports = [22]", "`tcp` and `ports` cannot be used together"),
        ("hosts = [\"x.com\"]\ntcp = [22]\npaths = [\"/\"]", "raw TCP carries no requests"),
        ("", "an allow rule needs `hosts`, `hosts_file` or `addresses`"),
        ("hosts = \"x.com\"", "invalid type: string"),
        ("hosts = [\"x.com\"]\nhosts_file = \"../secrets\"", "it must be in the policy's directory or below"),
        (
            "hosts = [\"x.com\"]\nhosts_file = \"/etc/passwd\"",
            "it must be in the policy's directory or below",
        ),
        ("hosts_file = \"gone.txt\"", "cannot read the list `gone.txt`"),
        ("hosts = [\"x.com\"]\nhots = []", "unknown key `hots`"),
        ("hosts = [\"x.com\"]\ntls = \"tunel\"", "`tunel` is not one of `intercept`, `tunnel`"),
        ("hosts = [\"x.com\"]\n[[deny]]\nname = \"d\"", "a deny rule needs `hosts`"),
        ("hosts = [\"x.com\"]\n[[deny]]\nhosts = [\"x.com\"]", "rule `deny x.com` denies `x.com` entirely"),
        (
            "hosts = [\"a.x.com\"]\n[[deny]]\nhosts = [\"*.x.com\"]",
            "rule `deny *.x.com` denies `a.x.com` entirely",
        ),
        (
            "hosts = [\"x.com\"]\n[[allow]]\nname = \"r\"\nhosts = [\"y.com\"]",
            "rule `r` is defined twice; first on line 3",
        ),
        (
            "hosts = [\"x.com\"]\n[[allow]]\nname = \"\"\nhosts = [\"y.com\"]",
            "a rule name must have 1 to 100 bytes",
        ),
        (
            "hosts = [\"x.com\"]\n[[allow]]\nname = \"s\"\nhosts = [\"x.com\"]",
            "rule `r` already allows `x.com` in the same way",
        ),
        (
            "hosts = [\"x.com\"]\ntls = \"tunnel\"\n[[allow]]\nname = \"s\"\nhosts = [\"x.com\"]\nmethods = [\"GET\"]",
            "rule `s` needs `x.com` intercepted",
        ),
        (
            "hosts = [\"x.com\"]\ncredential = \"one\"\n[[allow]]\nname = \"s\"\nhosts = [\"x.com\"]\ncredential = \"two\"",
            "rules `r` and `s` tie for `x.com` but inject different credentials",
        ),
        (
            "hosts = [\"m.example\"]\n[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"s:a\"]",
            "`m.example` is the memory service of rule `m`",
        ),
        (
            "hosts = [\"x.com\"]\n[[memory]]\nname = \"m\"\nhost = \"*.m.example\"\nprofile = \"astrocyte\"\nrecall = [\"s:a\"]",
            "one exact host",
        ),
        ("hosts = [\"x.com\"]\n[[test]]\nexpect = \"deny\"\nhost = \"a b\"", "`a b` is not a host"),
        (
            "hosts = [\"x.com\"]\n[[test]]\nexpect = \"deny\"\nhost = \"x.com\"\nreason = \"not_list\"",
            "unknown reason `not_list`",
        ),
        (
            "hosts = [\"x.com\"]\n[[test]]\nexpect = \"allow\"\nhost = \"x.com\"\nreason = \"not_listed\"",
            "has no reason",
        ),
        ("hosts = [\"x.com\"]\n[[test]]\nexpect = \"maybe\"\nhost = \"x.com\"", "`maybe` is not one of"),
        ("hosts = [\"x.com\"]\n[budget]\nrequests_per_hour = -1", "requests_per_hour"),
        ("hosts = [\"x.com\"", "p.toml:4"),
    ] {
        let found = error_texts(compile_lone(&allow(body))).join("\n");
        assert!(
            found.contains(part) || (part == "requests_per_hour" && found.contains("p.toml:6")),
            "{body}\n---\n{found}"
        );
    }
}

#[test]
fn p11_a_pasted_secret_is_refused_and_not_repeated() {
    for secret in [
        "sk-abcdefghijklmnopqrstuvwxyz",
        "Bearer abc def",
        "ghp_0123456789",
        "A1b2C3d4E5f6A1b2C3d4E5f6A1b2C3d4E5f6A1b2C3",
    ] {
        let problems =
            compile_lone(&allow(&format!("hosts = [\"x.com\"]\ncredential = \"{secret}\""))).unwrap_err();
        let all = format!("{problems:?}");
        assert!(all.contains("never a secret itself"), "{all}");
        assert!(!all.contains(secret), "{all}");
    }
}

#[test]
fn p9_every_error_is_reported_and_nothing_loads() {
    let text = "name = \"p\"\ncolor = 1\n[[allow]]\nname = \"a\"\nhosts = [\"x y\", \"*.com\"]\nmethods = [\"get\"]\n[[deny]]\nhosts = [\"a..b\"]\n";
    let found = error_texts(compile_lone(text));
    assert_eq!(found.len(), 5, "{found:#?}");
    let lines: Vec<&str> = found.iter().filter_map(|text| text.split(':').nth(1)).collect();
    assert_eq!(lines, ["2", "5", "5", "6", "8"]);
}

#[test]
fn p17_problems_are_bounded() {
    let hosts: Vec<String> = (0..500).map(|n| format!("\"bad host {n}\"")).collect();
    assert_eq!(
        error_texts(compile_lone(&allow(&format!("hosts = [{}]", hosts.join(",\n"))))).len(),
        MAX_PROBLEMS
    );
}

#[test]
fn files_that_are_not_text_are_refused() {
    for (bytes, part) in [
        (&b"\xff\xfe\x00"[..], "the file is not UTF-8"),
        (b"\0\0\0\0", "p.toml:1"),
        (b"name = \"p\"\r\n[[allow]]\r\nname", "p.toml:3"),
        (b"{\"name\": \"p\"}", "p.toml:1"),
    ] {
        let policies = vec![rules::SourceFile { path: "p.toml".to_owned(), bytes: bytes.to_vec() }];
        let found = error_texts(compile(&LoadSources { policies, ..LoadSources::default() }, &[])).join("\n");
        assert!(found.contains(part), "{bytes:?}\n---\n{found}");
    }
    let policies =
        vec![rules::SourceFile { path: "p.toml".to_owned(), bytes: vec![b' '; rules::load::MAX_FILE + 1] }];
    assert!(
        error_texts(compile(&LoadSources { policies, ..LoadSources::default() }, &[]))
            .join("")
            .contains("bytes in one file")
    );
}

#[test]
fn p9_one_invalid_policy_stops_the_load() {
    let policies = vec![
        source_file("a.toml", "name = \"a\""),
        source_file("b.toml", "nam = \"b\""),
        source_file("c.toml", "name = \"a\""),
    ];
    let found = error_texts(compile(&LoadSources { policies, ..LoadSources::default() }, &[])).join("\n");
    assert!(found.contains("b.toml:1:1: unknown key `nam`"), "{found}");
    assert!(found.contains("policy `a (a.toml)` is defined twice"), "{found}");
}

#[test]
fn reserved_names_are_refused() {
    for name in ["user", "system", "untrusted", "grants"] {
        assert!(
            error_texts(compile_lone(&format!("name = \"{name}\""))).join("").contains("is a reserved name"),
            "{name}"
        );
    }
}

// proves: allow.hosts_file
#[test]
fn lists_are_relative_to_the_policy() {
    let text = allow("hosts_file = \"lists/mirrors.txt\"");
    let rules = unwrap_rules(compile_with_lists(
        &text,
        &[("lists/mirrors.txt", "# ours\na.example\n*.b.example:8443\n")],
    ));
    assert_eq!(decide_attempt(&rules, "p", "a.example").as_deref(), Ok("r"));
    assert_eq!(decide_attempt(&rules, "p", "x.b.example:8443").as_deref(), Ok("r"));
    assert!(decide_attempt(&rules, "p", "x.b.example").is_err());
    let found = error_texts(compile_with_lists(&text, &[("lists/mirrors.txt", "a.example\nb d\n*.com\n")]));
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("lists/mirrors.txt:2:1: `b d` is not a host pattern"), "{found:?}");
    let named = rules::load::list_files(&source_file("dir/p.toml", &text));
    assert_eq!(named, ["dir/lists/mirrors.txt"]);
}

#[test]
fn an_empty_list_allows_nothing_and_causes_a_warning() {
    let rules =
        unwrap_rules(compile_with_lists(&allow("hosts_file = \"l.txt\""), &[("l.txt", "# nothing yet\n")]));
    assert!(problem_texts(rules.warnings()).join("").contains("rule `r` lists no host"));
}

#[test]
fn a_list_that_is_denied_entirely_has_no_effect() {
    let text = allow("hosts_file = \"l.txt\"\n[[deny]]\nhosts = [\".x.example\"]");
    let found = error_texts(compile_with_lists(&text, &[("l.txt", "a.x.example\nb.x.example\n")])).join("");
    assert!(found.contains("rule `r` has no effect"), "{found}");
    unwrap_rules(compile_with_lists(&text, &[("l.txt", "a.x.example\nb.y.example\n")]));
}

#[test]
fn the_digest_covers_content_and_not_paths() {
    let at = |path: &str, text: &str| {
        unwrap_rules(compile(
            &LoadSources { policies: vec![source_file(path, text)], ..LoadSources::default() },
            &[],
        ))
        .digest()
    };
    assert_eq!(at("a.toml", "name = \"p\""), at("b/c.toml", "name = \"p\""));
    assert_ne!(at("a.toml", "name = \"p\""), at("a.toml", "name = \"p\" "));
}

// proves: test.expect, test.host, test.method, test.dns, test.reason, test.rule
#[test]
fn tests_in_a_policy_are_run() {
    let text = allow(
        "hosts = [\"x.com\"]\nmethods = [\"GET\"]\n\
         [[test]]\nexpect = \"allow\"\nhost = \"https://x.com/a\"\n\
         [[test]]\nexpect = \"deny\"\nhost = \"x.com\"\nmethod = \"POST\"\nreason = \"method_not_allowed\"\nrule = \"r\"\n\
         [[test]]\nexpect = \"deny\"\nhost = \"x.com\"\n\
         [[test]]\nexpect = \"deny\"\nhost = \"y.com\"\nreason = \"denied_by_rule\"\n\
         [[test]]\nexpect = \"allow\"\nhost = \"x.com\"\ndns = \"A\"\nrule = \"other\"\n",
    );
    let passed: Vec<bool> =
        unwrap_rules(compile_lone(&text)).run_tests().iter().map(|outcome| outcome.has_passed()).collect();
    assert_eq!(passed, [true, true, false, false, false]);
}

// proves: test.bank, test.operation, test.environment
#[test]
fn memory_can_be_tested_without_a_sandbox() {
    let text = "name = \"p\"\n[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"staging:a\"]\n\
        [[test]]\nexpect = \"allow\"\nhost = \"m.example\"\nbank = \"staging:a\"\noperation = \"recall\"\nenvironment = \"staging\"\n\
        [[test]]\nexpect = \"deny\"\nhost = \"m.example\"\nbank = \"staging:a\"\nenvironment = \"production\"\nreason = \"foreign_environment\"\n\
        [[test]]\nexpect = \"deny\"\nhost = \"m.example\"\nbank = \"staging:b\"\noperation = \"retain\"\nenvironment = \"staging\"\nreason = \"foreign_bank\"\n\
        [[test]]\nexpect = \"deny\"\nhost = \"m.example\"\nbank = \"staging:a\"\nreason = \"identity_unset\"\n";
    let failed: Vec<String> = unwrap_rules(compile_lone(text))
        .run_tests()
        .iter()
        .filter(|o| !o.has_passed())
        .map(|o| format!("{:?}", o.decision))
        .collect();
    assert_eq!(failed, [""; 0]);
}

#[test]
fn sensible_policies_cause_no_warning() {
    for body in [
        "hosts = [\"t.example\"]\ntls = \"tunnel\"\nmemory = \"may-receive\"\n[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"s:a\"]",
        "hosts = [\"x.com\"]\n[[deny]]\nhosts = [\"a.x.com\"]\npaths = [\"/a\"]\n[[deny]]\nhosts = [\"a.x.com\"]\npaths = [\"/b\"]",
        "hosts = [\"x.com\"]\n[[allow]]\nname = \"s\"\nhosts = [\"x.com\"]\ndns_types = [\"TXT\"]",
        "hosts = [\"x.com:443\"]\ncredential = \"one\"\n[[allow]]\nname = \"s\"\nhosts = [\"x.com\"]",
        "hosts = [\"x.com\"]\ncredential = \"one\"\npaths = [\"/v1/**\"]\n[[allow]]\nname = \"s\"\nhosts = [\"x.com\"]",
        "hosts = [\"x.com:443\"]\nports = [80]\ncredential = \"k\"",
        "hosts = [\"bücher.de\", \"日本語abc.jp\", \"xn--80ak6aa92e.xn--p1ai\", \"яндекс.рф\", \"a.internal\", \"db.corp\", \"x.test\", \"*.co.uk.example\"]",
        "hosts = [\"vault.prod\"]\nresolves_to = [\"10.0.0.0/8\"]\nmethods = [\"PROPFIND\", \"MKCOL\", \"QUERY\", \"PURGE\"]",
        "hosts = [\"x.com\"]\n[[deny]]\naddresses = [\"169.254.0.0/16\"]",
        "hosts = [\"*.x.com\"]\n[[allow]]\nname = \"s\"\nhosts = [\"api.x.com\"]\nmethods = [\"GET\"]\nbudget = { requests_per_hour = 9 }",
        "hosts = [\"*.x.com\"]\nmethods = [\"GET\"]\n[[allow]]\nname = \"s\"\nhosts = [\"api.x.com\"]\nmethods = [\"POST\"]",
        "hosts = [\"*.x.com:8443\"]\n[[allow]]\nname = \"s\"\nhosts = [\"api.x.com\"]\nmethods = [\"GET\"]",
        "hosts = [\"x.com\"]\n[[test]]\nexpect = \"deny\"\nhost = \"y.com\"\nsandbox = \"elsewhere\"",
    ] {
        let rules = unwrap_rules(compile_lone(&allow(body)));
        assert_eq!(problem_texts(rules.warnings()), [""; 0], "{body}");
    }
    let long = format!(
        "hosts = [\"x.com\"]\n[[deny]]\nhosts = [\"{}.example\"]",
        ["a".repeat(60), "b".repeat(60)].join(".")
    );
    unwrap_rules(compile_lone(&allow(&long)));
}

#[test]
fn suspicious_entries_cause_a_warning_at_their_place() {
    let wide = "hosts = [\"*.shop.com\"]\n[[allow]]\nname = \"n\"\nhosts = [\"api.shop.com\"]\n";
    for (body, place, expected) in [
        (
            "hosts = [\"ok.com\", \"\u{430}pple.com\"]",
            "4:20",
            "`\u{430}pple` mixes Cyrillic and Latin letters",
        ),
        ("hosts = [\"*.xn--pple-43d.com:8443\"]", "4:10", "`\u{430}pple` mixes Cyrillic and Latin letters"),
        (
            "hosts = [\"\u{440}\u{430}\u{443}\u{440}\u{430}\u{4cf}.com\"]",
            "4:10",
            "is Cyrillic but looks Latin",
        ),
        ("hosts = [\"g\u{3bf}ogle.com\"]", "4:10", "mixes Greek and Latin letters"),
        (
            "hosts = [\"api.github.con\"]",
            "4:10",
            "`.con` is not a public top-level domain, so `api.github.con` resolves nowhere; did you mean `.com`?",
        ),
        ("hosts = [\"x.com\"]\n[[deny]]\nhosts = [\".evil.ogr\"]", "6:10", "`.ogr` is not a public"),
        (
            "hosts = [\"x.com\"]\nresolves_to = [\"169.254.169.254/32\"]",
            "5:16",
            "covers 169.254.169.254, the metadata service",
        ),
        (
            "hosts = [\"x.com\"]\nresolves_to = [\"10.0.0.0/8\", \"fd00:ec2::/32\"]",
            "5:30",
            "covers fd00:ec2::254",
        ),
        ("hosts = [\"x.com\"]\nresolves_to = [\"100.100.0.0/16\"]", "5:16", "covers 100.100.100.200"),
        ("addresses = [\"168.63.129.16/32\"]\nports = [80]", "4:14", "covers 168.63.129.16"),
        (
            "addresses = [\"0.0.0.0/0\"]\nports = [80]\ndangerously_wide = true",
            "4:14",
            "covers 100.100.100.200",
        ),
        (
            "hosts = [\"x.com\"]\nmethods = [\"GET\", \"ALL\"]",
            "5:19",
            "`ALL` is one method of that name, not all of them",
        ),
        (
            "hosts = [\"x.com\"]\nmethods = [\"POTS\"]",
            "5:12",
            "`POTS` is not a registered method; did you mean `POST`?",
        ),
        (
            "hosts = [\"x.com\"]\n[[deny]]\nhosts = [\"y.com\"]\nmethods = [\"ANY\"]",
            "7:12",
            "`ANY` is one method",
        ),
        (
            &format!("{wide}methods = [\"GET\"]"),
            "6:8",
            "the methods and paths of rule `n` do not restrict `api.shop.com`: rule `r` (p.toml:4) allows more by `*.shop.com`",
        ),
        (&format!("{wide}paths = [\"/v1/**\"]"), "6:8", "do not restrict `api.shop.com`"),
        (
            "hosts = [\"x.com\"]\nmethods = [\"GET\"]\n[[allow]]\nname = \"all\"\nhosts = [\"x.com\"]",
            "3:8",
            "do not restrict `x.com`: rule `all` (p.toml:8)",
        ),
        (
            "hosts = [\"x.com\"]\nmethods = [\"GET\"]\n[[allow]]\nname = \"all\"\nhosts = [\"x.com\"]\nmethods = [\"GET\", \"PUT\"]",
            "3:8",
            "allows more by `x.com`",
        ),
    ] {
        let rules = unwrap_rules(compile_lone(&allow(body)));
        let found = problem_texts(rules.warnings());
        assert!(
            matches!(&found[..], [one] if one.starts_with(&format!("p.toml:{place}: ")) && one.contains(expected)),
            "{body}\n{found:?}"
        );
        assert!(rules.warnings().iter().all(|warning| warning.at.width > 1), "{body}");
    }
}

#[test]
fn a_filter_that_a_policy_beside_makes_idle_causes_a_warning() {
    let narrow = "name = \"narrow\"\n[[allow]]\nname = \"n\"\nhosts = [\"api.x.com\"]\nmethods = [\"GET\"]";
    let wide = "name = \"wide\"\n[[allow]]\nname = \"w\"\nhosts = [\".x.com\"]";
    let of = |policies: &str| {
        let operator = format!(
            "[[sandbox]]\nid = \"a\"\npolicies = [{policies}]\n[[sandbox]]\nid = \"b\"\npolicies = [\"wide\"]\n[[sandbox]]\nid = \"c\"\npolicies = [\"narrow\"]"
        );
        problem_texts(unwrap_rules(super::compile_configured(&operator, &[narrow, wide])).warnings())
    };
    assert_eq!(of("\"narrow\""), [""; 0]);
    let found = of("\"narrow\", \"wide\"");
    assert!(
        matches!(&found[..], [one] if one.contains("rule `n` do not restrict `api.x.com`: rule `w`")),
        "{found:?}"
    );
    // What the warning says is what the decider does.
    let rules = unwrap_rules(super::compile_configured(
        "[[sandbox]]\nid = \"a\"\npolicies = [\"narrow\", \"wide\"]",
        &[narrow, wide],
    ));
    assert_eq!(decide_attempt(&rules, "a", "POST https://api.x.com/").as_deref(), Ok("w"));
}

#[test]
fn ties_are_found_across_policies_of_one_sandbox() {
    let policy = |name: &str, credential: &str| {
        format!(
            "name = \"{name}\"\n[[allow]]\nname = \"of {name}\"\nhosts = [\"x.example\"]\ncredential = \"{credential}\""
        )
    };
    let operator = "[[credential]]\nname = \"one\"\nfile = \"f\"\nhosts = [\"x.example\"]\n[[credential]]\nname = \"two\"\nfile = \"f\"\nhosts = [\"x.example\"]\n[[sandbox]]\nid = \"a\"\npolicies = [\"p\", \"q\"]";
    let found = error_texts(super::compile_configured(operator, &[&policy("p", "one"), &policy("q", "two")]))
        .join("");
    assert!(found.contains("rules `of p` and `of q` tie for `x.example`"), "{found}");
    unwrap_rules(super::compile_configured(operator, &[&policy("p", "one"), &policy("q", "one")]));
}

#[test]
fn a_test_for_an_unknown_sandbox_is_an_error() {
    let policy = "name = \"p\"\n[[test]]\nexpect = \"deny\"\nhost = \"x.com\"\nsandbox = \"typo\"";
    let found =
        error_texts(super::compile_configured("[[sandbox]]\nid = \"a\"\npolicies = [\"p\"]", &[policy]))
            .join("");
    assert!(found.contains("unknown sandbox `typo`"), "{found}");
}
