//! What policies say about the content of attempts, as permits carry it.

use rules::signals::SignalMode;
use rules::signals::settings::{BodyInspection, SignalKind};
use rules::{Decision, Permit, RuleSet};

use super::{compile_configured, compile_lone, error_texts, sandbox_ref, unwrap_rules};

/// A policy with a web host and a memory service; `{policy}`, `{allow}` and `{memory}` are `[signals]` of each.
fn policy(policy: &str, allow: &str, memory: &str) -> String {
    let table =
        |text: &str| if text.is_empty() { String::new() } else { format!("signals = {{ {text} }}\n") };
    format!(
        "name = \"p\"\n{}[[allow]]\nname = \"web\"\nhosts = [\"a.example\"]\n{}[[memory]]\nname = \"memory\"\n\
         host = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"staging:a\"]\n{}",
        table(policy),
        table(allow),
        table(memory)
    )
}

fn permit(rules: &RuleSet, id: &str, text: &str) -> Permit {
    let probe = rules::probe::PolicyProbe::parse(text).unwrap();
    match probe.decide(rules, &sandbox_ref(rules, id)) {
        Decision::Allow(permit) => permit,
        Decision::Deny(denial) => panic!("{text}: {}", denial.reason),
    }
}

// proves: signals.body, signals.canaries, signals.headers, signals.url
// proves: allow.signals.body, allow.signals.canaries, allow.signals.headers, allow.signals.url
// proves: memory.signals.body, memory.signals.canaries, memory.signals.headers, memory.signals.secrets
// proves: memory.signals.url
#[test]
fn each_kind_of_signal_is_set_by_policy_and_by_rule() {
    for kind in SignalKind::ALL {
        let key = kind.key();
        for (word, mode) in [("off", SignalMode::Off), ("flag", SignalMode::Flag), ("deny", SignalMode::Deny)]
        {
            if kind == SignalKind::Canaries && mode == SignalMode::Off {
                let errors = error_texts(compile_lone(&policy("canaries = \"off\"", "", "")));
                assert!(
                    errors.iter().any(|error| error.contains("off")),
                    "a canary is always an alarm: {errors:?}"
                );
                continue;
            }
            let set = format!("{key} = \"{word}\"");
            for (text, web, memory) in [
                (policy(&set, "", ""), true, true),
                (policy("", &set, ""), true, false),
                (policy("", "", &set), false, true),
            ] {
                let rules = unwrap_rules(compile_lone(&text));
                for (host, changed) in [("https://a.example/", web), ("https://m.example/", memory)] {
                    let found = permit(&rules, "p", host).signals().mode(kind);
                    let default =
                        if kind == SignalKind::Canaries { SignalMode::Deny } else { SignalMode::Flag };
                    assert_eq!(found, if changed { mode } else { default }, "{host}: {text}");
                }
            }
        }
    }
}

#[test]
fn p3_the_stricter_layer_counts() {
    let configuration = "[[sandbox]]\nid = \"s\"\nbase = \"base\"\npolicies = [\"own\"]\n";
    let rule = |name: &str, keys: &str| {
        format!("name = \"{name}\"\n[[allow]]\nname = \"web {name}\"\nhosts = [\"a.example\"]\n{keys}\n")
    };
    for (own, base, secrets, bodies, fields) in [
        ("", "", SignalMode::Flag, BodyInspection::Searched, None),
        ("signals = { secrets = \"off\" }", "", SignalMode::Off, BodyInspection::Searched, None),
        (
            "signals = { secrets = \"off\" }",
            "signals = { secrets = \"deny\" }",
            SignalMode::Deny,
            BodyInspection::Searched,
            None,
        ),
        ("inspect = false", "", SignalMode::Flag, BodyInspection::Searched, None),
        ("inspect = false", "inspect = false", SignalMode::Flag, BodyInspection::Skipped, None),
        (
            "headers = [\"X-A\", \"x-b\"]",
            "headers = [\"x-b\", \"x-c\"]",
            SignalMode::Flag,
            BodyInspection::Searched,
            Some(vec!["x-b".to_owned()]),
        ),
    ] {
        let rules =
            unwrap_rules(compile_configured(configuration, &[&rule("base", base), &rule("own", own)]));
        let permit = permit(&rules, "s", "https://a.example/");
        assert_eq!(permit.signals().mode(SignalKind::Secrets), secrets, "{own} over {base}");
        assert_eq!(permit.signals().bodies(), bodies, "{own} over {base}");
        assert_eq!(permit.signals().listed_fields().map(<[String]>::to_vec), fields, "{own} over {base}");
    }
}

#[test]
fn contradictions_and_slips_do_not_load() {
    let rule =
        |keys: &str| format!("name = \"p\"\n[[allow]]\nname = \"web\"\nhosts = [\"a.example\"]\n{keys}\n");
    for (keys, says) in [
        ("tls = \"tunnel\"\ninspect = true", "need interception"),
        ("tls = \"tunnel\"\nheaders = [\"x-a\"]", "need interception"),
        ("tcp = [5432]\ninspect = true", "raw TCP carries no requests"),
        ("memory = \"may-receive\"\nreceives_banks = [\"staging:a\"]", "memory"),
        ("receives_banks = [\"nowhere\"]", "environment"),
        ("headers = [\"not a name\"]", "names of header fields"),
        ("signals = { secret = \"deny\" }", "unknown key"),
        ("signals = { secrets = \"refuse\" }", "refuse"),
    ] {
        let errors = error_texts(compile_lone(&rule(keys)));
        assert!(errors.iter().any(|error| error.contains(says)), "{keys}: {errors:?}");
    }
}

#[test]
fn p15_bytes_that_nobody_sees_do_not_go_beside_memory() {
    let with = |keys: &str| {
        let rule = format!("[[allow]]\nname = \"raw\"\nhosts = [\"b.example\"]\n{keys}\n");
        compile_lone(&(policy("", "", "") + &rule))
    };
    for keys in ["tls = \"tunnel\"", "tcp = [5432]"] {
        let errors = error_texts(with(keys));
        assert!(
            errors.iter().any(|error| error.contains("may not receive recalled text")),
            "{keys}: {errors:?}"
        );
    }
    for keys in [
        "tls = \"tunnel\"\nmemory = \"may-receive\"",
        "tls = \"tunnel\"\nreceives_banks = [\"staging:a\"]",
        "tcp = [5432]\nsignals = { memory_flow = \"off\" }",
    ] {
        unwrap_rules(with(keys));
    }
}
