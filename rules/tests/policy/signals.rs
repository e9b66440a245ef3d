//! What policies say about the content of attempts, as permits carry it.

use rules::signals::bits::{DigestKey, RequestComponents, RequestParts};
use rules::signals::settings::{BodyInspection, SignalKind};
use rules::signals::shape::{HostShape, RequestOutcome, ShapeThresholds};
use rules::signals::{Signal, SignalCode, SignalMode};
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

/// Requests of one sandbox to one host, judged by the thresholds of a permit.
struct Trace {
    thresholds: ShapeThresholds,
    shape: HostShape,
    now_ms: u64,
    found: Vec<Signal>,
}

impl Trace {
    /// Sends a request, gets its answer, and waits.
    fn send(
        &mut self,
        method: &str,
        target: &str,
        fields: &[(&str, &str)],
        (sent_bytes, received_bytes): (u64, u64),
        wait_ms: u64,
    ) {
        let (path, query) =
            target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
        let fields: Vec<(&str, &[u8])> =
            fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        let query = query.map(str::as_bytes);
        let parts = RequestParts { method, path: path.as_bytes(), query, fields: &fields };
        let components = RequestComponents::new(&DigestKey::new([7; 16]), &parts);
        let Trace { thresholds, shape, now_ms, found } = self;
        let observation = shape.observe(&components, *now_ms, thresholds, found);
        let outcome = RequestOutcome { sent_bytes, received_bytes, unchanged: false };
        shape.observe_outcome(observation, outcome, *now_ms, thresholds, found);
        self.now_ms += wait_ms;
    }
}

/// Asserts that a threshold of `value` raises `code` and its default does not, in a policy, an allow rule and a memory
/// rule, each for what it governs.
fn assert_raised(key: &str, value: &str, code: SignalCode, requests: impl Fn(&mut Trace)) {
    let set = format!("thresholds = {{ {key} = {value} }}");
    let mut rows = vec![(policy("", "", ""), false, false)];
    rows.push((policy(&set, "", ""), true, true));
    rows.push((policy("", &set, ""), true, false));
    rows.push((policy("", "", &set), false, true));
    for (text, web, memory) in rows {
        let rules = unwrap_rules(compile_lone(&text));
        for (host, expected) in [("https://a.example/", web), ("https://m.example/", memory)] {
            let thresholds = permit(&rules, "p", host).signals().thresholds();
            let now_ms = 1_700_000_000_000;
            let mut trace = Trace { thresholds, shape: HostShape::default(), now_ms, found: Vec::new() };
            requests(&mut trace);
            let raised = trace.found.iter().any(|signal| signal.code == code);
            assert_eq!(raised, expected, "{host}: {text}: {:?}", trace.found);
        }
    }
}

// proves: signals.thresholds.beacon_requests, allow.signals.thresholds.beacon_requests, memory.signals.thresholds.beacon_requests
#[test]
fn beacon_requests_is_a_threshold() {
    assert_raised("beacon_requests", "4", SignalCode::Beacon, |trace| {
        for at in 0..8 {
            trace.send("GET", &format!("/news?id=word{at}"), &[], (0, 0), 60_000);
        }
    });
}

// proves: signals.thresholds.choice_bits_per_day, allow.signals.thresholds.choice_bits_per_day, memory.signals.thresholds.choice_bits_per_day
#[test]
fn choice_bits_per_day_is_a_threshold() {
    assert_raised("choice_bits_per_day", "16", SignalCode::Drip, |trace| {
        for at in [0, 1, 2, 3, 0, 2, 1, 3, 1, 0, 3, 2, 0, 1, 2, 3, 2, 0, 1, 1, 3] {
            trace.send("GET", &format!("/page{at}"), &[], (0, 0), 7_777 * (at + 1));
        }
    });
}

// proves: signals.thresholds.credential_bytes_per_hour, allow.signals.thresholds.credential_bytes_per_hour, memory.signals.thresholds.credential_bytes_per_hour
#[test]
fn credential_bytes_per_hour_is_a_threshold() {
    assert_raised("credential_bytes_per_hour", "20", SignalCode::EncodedRun, |trace| {
        trace.send(
            "GET",
            "/",
            &[("authorization", "Bearer 0a1b2c3d4e5f60718293a4b5c6d7e8f901234567890abcdef0")],
            (0, 0),
            0,
        );
    });
}

// proves: signals.thresholds.encoded_run_characters, allow.signals.thresholds.encoded_run_characters, memory.signals.thresholds.encoded_run_characters
#[test]
fn encoded_run_characters_is_a_threshold() {
    assert_raised("encoded_run_characters", "16", SignalCode::EncodedRun, |trace| {
        trace.send("GET", "/0a1b2c3d4e5f60718293a4b5c6d7e8f9", &[], (0, 0), 0);
    });
}

// proves: signals.thresholds.field_names_per_hour, allow.signals.thresholds.field_names_per_hour, memory.signals.thresholds.field_names_per_hour
#[test]
fn field_names_per_hour_is_a_threshold() {
    assert_raised("field_names_per_hour", "2", SignalCode::FieldNovelty, |trace| {
        for at in 0..20 {
            trace.send("GET", &format!("/{at}"), &[], (0, 0), 1_000);
        }
        trace.send("GET", "/", &[("x-one", "1"), ("x-two", "1"), ("x-three", "1")], (0, 0), 0);
    });
}

// proves: signals.thresholds.fields_per_request, allow.signals.thresholds.fields_per_request, memory.signals.thresholds.fields_per_request
#[test]
fn fields_per_request_is_a_threshold() {
    assert_raised("fields_per_request", "2", SignalCode::ManyFields, |trace| {
        trace.send("GET", "/", &[("x-one", "1"), ("x-two", "1"), ("x-three", "1")], (0, 0), 0);
    });
}

// proves: signals.thresholds.identifier_bytes_per_hour, allow.signals.thresholds.identifier_bytes_per_hour, memory.signals.thresholds.identifier_bytes_per_hour
#[test]
fn identifier_bytes_per_hour_is_a_threshold() {
    assert_raised("identifier_bytes_per_hour", "24", SignalCode::Drip, |trace| {
        for id in ["0a1b2c3d4e5f60718293a4b5c6d7e8f9", "9f8e7d6c5b4a39281706f5e4d3c2b1a0"] {
            trace.send("GET", "/", &[("x-request-id", id)], (0, 0), 1_000);
        }
    });
}

// proves: signals.thresholds.new_bytes_per_day, allow.signals.thresholds.new_bytes_per_day, memory.signals.thresholds.new_bytes_per_day
#[test]
fn new_bytes_per_day_is_a_threshold() {
    assert_raised("new_bytes_per_day", "24", SignalCode::Drip, |trace| {
        trace.send(
            "GET",
            "/",
            &[("x-data", "0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f6071829")],
            (0, 0),
            0,
        );
    });
}

// proves: signals.thresholds.sequence_steps, allow.signals.thresholds.sequence_steps, memory.signals.thresholds.sequence_steps
#[test]
fn sequence_steps_is_a_threshold() {
    assert_raised("sequence_steps", "4", SignalCode::Sequence, |trace| {
        for (at, word) in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"].into_iter().enumerate() {
            trace.send("GET", &format!("/{at}/{word}"), &[], (0, 0), 1_234);
        }
    });
}

// proves: signals.thresholds.upload_bytes_per_hour, allow.signals.thresholds.upload_bytes_per_hour, memory.signals.thresholds.upload_bytes_per_hour
#[test]
fn upload_bytes_per_hour_is_a_threshold() {
    assert_raised("upload_bytes_per_hour", "1_000", SignalCode::UploadRatio, |trace| {
        for _ in 0..60 {
            trace.send("GET", "/", &[], (0, 10_000_000), 600_000);
        }
        trace.send("PUT", "/", &[], (2_000_000, 0), 0);
    });
}

// proves: signals.thresholds.user_agents_per_hour, allow.signals.thresholds.user_agents_per_hour, memory.signals.thresholds.user_agents_per_hour
#[test]
fn user_agents_per_hour_is_a_threshold() {
    assert_raised("user_agents_per_hour", "1", SignalCode::UserAgentChanged, |trace| {
        for agent in ["one/1", "two/2"] {
            trace.send("GET", "/", &[("user-agent", agent)], (0, 0), 1_000);
        }
    });
}

#[test]
fn the_smaller_threshold_counts() {
    let configuration = "[[sandbox]]\nid = \"s\"\nbase = \"base\"\npolicies = [\"own\"]\n";
    let rule = |name: &str, policy: &str, keys: &str| {
        format!(
            "name = \"{name}\"\n[[allow]]\nname = \"web {name}\"\nhosts = [\"a.example\"]\n{keys}\n{policy}\n"
        )
    };
    let in_rule = |value: u64| format!("signals = {{ thresholds = {{ new_bytes_per_day = {value} }} }}");
    let in_policy = |value: u64| format!("[signals.thresholds]\nnew_bytes_per_day = {value}");
    for (own, own_policy, base, expected) in [
        (String::new(), String::new(), String::new(), 896),
        (in_rule(8_192), String::new(), String::new(), 8_192),
        (in_rule(8_192), String::new(), in_rule(4_096), 4_096),
        (in_rule(2_048), String::new(), in_rule(4_096), 2_048),
        (String::new(), in_policy(512), in_rule(4_096), 512),
        (in_rule(8_192), in_policy(512), String::new(), 8_192),
    ] {
        let policies = [rule("base", "", &base), rule("own", &own_policy, &own)];
        let rules = unwrap_rules(compile_configured(configuration, &policies.each_ref().map(String::as_str)));
        let permit = permit(&rules, "s", "https://a.example/");
        assert_eq!(
            permit.signals().thresholds().new_bytes_per_day,
            expected,
            "{own} {own_policy} over {base}"
        );
        let shown = permit.signals().to_string();
        assert_eq!(shown.contains("new_bytes_per_day"), expected != 896, "{shown}");
    }
}

#[test]
fn absurd_thresholds_do_not_load() {
    for (set, says) in [
        ("new_bytes_per_day = 0", "0 is out of range: use 1 to 16777216"),
        ("new_bytes_per_day = 16777217", "16777217 is out of range"),
        ("fields_per_request = 251", "use 1 to 250"),
        ("new_bytes_per_day = -1", "-1"),
        ("new_bytes_per_day = \"8 KiB\"", "8 KiB"),
        ("new_bytes_per_hour = 5", "unknown key `new_bytes_per_hour`"),
    ] {
        let thresholds = format!("thresholds = {{ {set} }}");
        for text in [policy(&thresholds, "", ""), policy("", &thresholds, ""), policy("", "", &thresholds)] {
            let errors = error_texts(compile_lone(&text));
            let line = 1 + text.lines().position(|line| line.contains(set)).unwrap();
            assert!(errors.iter().any(|error| error.contains(says)), "{set}: {errors:?}");
            assert!(errors.iter().all(|error| error.contains(&format!(":{line}:"))), "{set}: {errors:?}");
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
