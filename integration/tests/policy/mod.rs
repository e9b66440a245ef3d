//! `check`, `explain`, `test`, `diff`, `schema`, `reasons`: what people and scripts get to see.

mod readme;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use integration::{repository_root, run_sandbar, sandbar, text};
use serde_json::Value;
use tempfile::TempDir;

const GATEWAY: &str = "deploy/gateway";

/// A directory with these files.
fn write_files(entries: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in entries {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

fn run_in(dir: &Path, arguments: &[&str]) -> Output {
    sandbar().current_dir(dir).args(arguments).output().unwrap()
}

fn exit_code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn parse_json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)))
}

const POLICY: &str = "name = \"p\"\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\nmethods = [\"GET\"]\n";

#[test]
fn every_example_is_good_and_its_tests_pass() {
    let checked = run_sandbar(&format!("check --without-credentials {GATEWAY}"));
    assert_eq!(exit_code(&checked), 0, "{}", text(&checked.stderr));
    for line in [
        "every name below packages.example, not packages.example itself",
        "lists/mirrors.txt:3",
        "tests passed",
        "base user",
    ] {
        assert!(text(&checked.stdout).contains(line), "{line}\n{}", text(&checked.stdout));
    }
    for entry in fs::read_dir(repository_root().join(GATEWAY).join("policies")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            let alone = sandbar().args(["check", "--quiet"]).arg(&path).output().unwrap();
            assert_eq!(exit_code(&alone), 0, "{}: {}", path.display(), text(&alone.stderr));
            assert!(
                text(&alone.stdout).contains("not checked without a sandbar.toml"),
                "{}",
                text(&alone.stdout)
            );
        }
    }
}

#[test]
fn exit_codes_are_what_scripts_rely_on() {
    let dir = write_files(&[
        ("good.toml", POLICY),
        ("failing.toml", &format!("{POLICY}[[test]]\nexpect = \"deny\"\nhost = \"x.example\"\n")),
        ("bad.toml", "name = \"p\"\nhots = []\n"),
        ("empty.toml", ""),
        ("nothing.toml", "name = \"p\"\n"),
        ("none/readme.txt", "no policy here"),
        ("two/a.toml", "name = \"a\"\n"),
        ("two/b.toml", "name = \"b\"\n"),
    ]);
    for (arguments, expected) in [
        (&["check", "good.toml"][..], 0),
        (&["check", "nothing.toml"], 0),
        (&["check", "failing.toml"], 1),
        (&["check", "bad.toml"], 2),
        (&["check", "empty.toml"], 2),
        (&["check", "absent.toml"], 2),
        (&["check", "none"], 2),
        (&["check", "good.toml", "bad.toml"], 2),
        (&["check"], 64),
        (&["test", "good.toml"], 0),
        (&["test", "failing.toml"], 1),
        (&["test", "bad.toml"], 2),
        (&["explain", "-p", "good.toml", "x.example"], 0),
        (&["explain", "-p", "good.toml", "-m", "POST", "https://x.example/"], 1),
        (&["explain", "-p", "good.toml", "y.example"], 1),
        (&["explain", "-p", "good.toml", "a b"], 1),
        (&["explain", "-p", "nothing.toml", "x.example"], 1),
        (&["explain", "-p", "good.toml", "ftp://x.example"], 64),
        (&["explain", "-p", "good.toml", "-m", "get", "x.example"], 64),
        (&["explain", "-p", "good.toml", "-m", "TRACE", "x.example"], 1),
        (&["explain", "-p", "good.toml", "--dns", "A", "x.example"], 0),
        (&["explain", "-p", "good.toml", "--dns", "NONSENSE", "x.example"], 64),
        (&["explain", "-p", "good.toml", "--dns", "A", "1.2.3.4"], 64),
        (&["explain", "-p", "good.toml", "--bank", "a b", "x.example"], 64),
        (&["explain", "-p", "good.toml", "-s", "zzz", "x.example"], 64),
        (&["explain", "-p", "two", "x.example"], 64),
        (&["explain", "x.example"], 64),
        (&["explain", "-p", "absent.toml", "x.example"], 2),
        (&["explain", "-p", "bad.toml", "x.example"], 2),
        (&["diff", "good.toml", "nothing.toml"], 0),
        (&["diff", "--exit-code", "good.toml", "nothing.toml"], 1),
        (&["diff", "--exit-code", "good.toml", "good.toml"], 0),
        (&["diff", "good.toml", "bad.toml"], 2),
        (&["reasons", "not_listed"], 0),
        (&["reasons", "nonsense"], 64),
        (&["schema"], 0),
        (&["--version"], 0),
        (&["--help"], 0),
        (&["explode"], 64),
        (&["explain"], 64),
        (&["explain", "--color", "sometimes", "x.example"], 64),
    ] {
        let output = run_in(dir.path(), arguments);
        assert_eq!(
            exit_code(&output),
            expected,
            "{arguments:?}\n{}{}",
            text(&output.stdout),
            text(&output.stderr)
        );
        assert!(
            expected == 0 || expected == 1 || !output.stderr.is_empty(),
            "{arguments:?} fails in silence"
        );
        if expected == 2 || expected == 64 {
            let told = parse_json(&run_in(dir.path(), &[&["--json"], arguments].concat()));
            assert_eq!(told["ok"], false, "{arguments:?}: {told}");
            assert!(told["error"].is_string() || told["problems"].is_array(), "{told}");
        }
    }
}

const FULL_POLICY: &str = r#"name = "p"
[[allow]]
name = "tunnel"
hosts = ["t.example"]
tls = "tunnel"
ech = "tolerate"
memory = "may-receive"
[[allow]]
name = "odd"
hosts = [".o.example"]
dns_types = ["A", "TXT"]
cname = "strict"
budget = { connections = 3 }
[[allow]]
name = "range"
addresses = ["10.2.0.0/16"]
ports = [8443]
[[memory]]
name = "m"
host = "m.example"
profile = "astrocyte"
identity = "from-channel"
environment = "s"
recall = ["shared-*"]
retain = ["a"]
"#;

#[test]
fn check_shows_all_that_is_in_effect() {
    let operator = "policies = \"d\"\n[[sandbox]]\nid = \"a\"\nbase = \"floor\"\npolicies = [\"p\"]\n";
    let floor = "name = \"floor\"\n[[allow]]\nname = \"all\"\nhosts = [\"*\"]\ndangerously_wide = true\n";
    let dir = write_files(&[("sandbar.toml", operator), ("d/p.toml", FULL_POLICY), ("d/floor.toml", floor)]);
    let shown = text(&run_in(dir.path(), &["check"]).stdout);
    for line in [
        "tunnel (tunnel; ech tolerate; memory may-receive)",
        "odd (intercept; dns_types A TXT; cname strict; connections = 3)",
        "m (memory; profile astrocyte; identity from-channel; environment s; recall shared-*; retain a)",
        "10.2.0.0/16                      this address range, port 8443",
        "o.example and every name below it, port 443",
        "base floor, policies p\n",
    ] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
    let told = parse_json(&run_in(dir.path(), &["--json", "check"]));
    assert_eq!(told["judged"]["sandboxes"], true);
    assert_eq!(told["sandboxes"][0]["policies"], serde_json::json!(["p"]));
    let rules = &told["policies"][1]["rules"];
    assert_eq!((&rules[0]["tls"], &rules[0]["ech"]), (&"tunnel".into(), &"tolerate".into()));
    assert_eq!(rules[1]["dns_types"], serde_json::json!(["A", "TXT"]));
    assert_eq!(rules[1]["budget"]["connections"], 3);
    assert_eq!(rules[2]["addresses"], serde_json::json!(["10.2.0.0/16"]));
    assert_eq!(rules[3]["recall"], serde_json::json!(["shared-*"]));
    let alone = parse_json(&run_in(dir.path(), &["--json", "check", "d/p.toml"]));
    assert_eq!(alone["judged"]["sandboxes"], false);
}

#[test]
fn a_refusal_names_who_refuses() {
    let operator = "policies = \"d\"\n[[sandbox]]\nid = \"a\"\nbase = \"floor\"\npolicies = [\"p\"]\n[[sandbox]]\nid = \"b\"\nbase = \"untrusted\"\npolicies = [\"p\"]\n[[sandbox]]\nid = \"c\"\npolicies = [\"p\"]\n";
    let floor = "name = \"floor\"\n[[allow]]\nname = \"f\"\nhosts = [\"y.example\"]\n";
    let dir = write_files(&[("sandbar.toml", operator), ("d/p.toml", POLICY), ("d/floor.toml", floor)]);
    for (arguments, expected) in [
        (&["-s", "a", "x.example"][..], "rule       no rule of base `floor` allows it\n"),
        (&["-s", "a", "x.example"], "`r` x.example: would allow it; the base denies it"),
        (&["-s", "b", "x.example"], "`r` would allow it; base `untrusted` denies it"),
        (&["-s", "c", "-m", "TRACE", "https://x.example/"], "are never forwarded"),
        (&["-s", "c", "-m", "TRACE", "https://x.example/"], "next step  Use another method."),
    ] {
        let output = run_in(dir.path(), &[&["explain"], arguments].concat());
        let shown = text(&output.stdout);
        assert!(shown.contains(expected), "{arguments:?}: {expected}\n{shown}");
        assert!(!shown.contains("to allow"), "{shown}");
    }
}

#[test]
fn errors_point_at_the_character() {
    let dir = write_files(&[(
        "p.toml",
        "name = \"p\"\n[[allow]]\nname = \"a\"\nhots = []\nhosts = [\"ü.example\", \"b d\"]\nmethods = [\"get\"]\n",
    )]);
    let output = run_in(dir.path(), &["check", "p.toml"]);
    let expected = "error: unknown key `hots`
 --> p.toml:4:1
  |
4 | hots = []
  | ^^^^
  |
  = help: did you mean `hosts`?
error: `b d` is not a host pattern: ` ` is not allowed in a host name
 --> p.toml:5:23
  |
5 | hosts = [\"ü.example\", \"b d\"]
  |                       ^^^^^
error: `get` is not a request method: methods are upper-case words, such as `GET`
 --> p.toml:6:12
  |
6 | methods = [\"get\"]
  |            ^^^^^
  |
  = help: did you mean `GET`?
sandbar: 3 errors; nothing was loaded
";
    assert_eq!((text(&output.stderr).as_str(), text(&output.stdout).as_str()), (expected, ""));
}

#[test]
fn json_is_for_machines() {
    let dir = write_files(&[
        ("good.toml", POLICY),
        ("new.toml", &POLICY.replace("x.example", "y.example")),
        ("bad.toml", "name = 1"),
    ]);
    let of = |arguments: &[&str]| parse_json(&run_in(dir.path(), &[&["--json"], arguments].concat()));
    assert_eq!(
        of(&["check", "good.toml"])["policies"][0]["rules"][0]["hosts"][0]["covers"],
        "x.example only, port 443"
    );
    let bad = of(&["check", "bad.toml"]);
    assert_eq!((bad["ok"].as_bool(), bad["problems"][0]["line"].as_u64()), (Some(false), Some(1)));
    let denied = of(&["explain", "-p", "good.toml", "-m", "POST", "https://x.example/"]);
    assert_eq!(
        (&denied["decision"], &denied["reason"], &denied["change"]["entry"]),
        (&"deny".into(), &"method_not_allowed".into(), &"POST".into())
    );
    let allowed = of(&["explain", "-p", "good.toml", "x.example"]);
    assert_eq!((&allowed["decision"], &allowed["rule"]["rule"]), (&"allow".into(), &"r".into()));
    assert!(allowed["budget"].is_object() && allowed["digest"] == allowed["rule"]["digest"]);
    let diff = of(&["diff", "good.toml", "new.toml"]);
    let changes: Vec<&str> = diff["sandboxes"][0]["differences"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["change"].as_str().unwrap())
        .collect();
    assert_eq!(changes, ["becomes_reachable", "stops_being_reachable"]);
    assert_eq!(of(&["test", "good.toml"])["passed"], 0);
    assert_eq!(of(&["reasons", "not_listed"])[0]["code"], "not_listed");
    assert_eq!(of(&["explain", "-p", "good.toml", "a b"])["reason"], "bad_name");
}

#[test]
fn colours_are_for_terminals() {
    let plain = run_sandbar(&format!("check --without-credentials {GATEWAY}"));
    let painted = run_sandbar(&format!("--color always check --without-credentials {GATEWAY}"));
    assert!(!plain.stdout.contains(&0x1b) && painted.stdout.contains(&0x1b));
}

#[test]
fn a_policy_cannot_steer_the_terminal() {
    let dir = write_files(&[(
        "p.toml",
        "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts = [\"\\u001b[2Jx\"]\n# \u{1b}[31m\n\u{1b} = 1\n",
    )]);
    let output = run_in(dir.path(), &["check", "p.toml"]);
    assert_eq!(exit_code(&output), 2);
    assert!(!output.stderr.contains(&0x1b), "{}", text(&output.stderr));
    let asked = run_in(dir.path(), &["explain", "-p", "p.toml", "\u{1b}[2J"]);
    assert!(!asked.stdout.contains(&0x1b) && !asked.stderr.contains(&0x1b));
}

// proves: policies
#[test]
fn the_operators_file_says_where_policies_are() {
    let dir = write_files(&[
        (
            "sandbar.toml",
            "policies = \"rules.d\"\n[[sandbox]]\nid = \"a\"\npolicies = [\"p\"]\n[[sandbox]]\nid = \"b\"\nbase = \"untrusted\"\npolicies = [\"p\"]\n",
        ),
        ("rules.d/p.toml", POLICY),
        ("rules.d/.hidden.toml", "not toml at all"),
        ("rules.d/notes.txt", "nor this"),
    ]);
    let checked = run_in(dir.path(), &["check"]);
    assert_eq!(exit_code(&checked), 0, "{}", text(&checked.stderr));
    assert!(text(&checked.stderr).contains("base `untrusted` allows nothing"), "{}", text(&checked.stderr));
    assert_eq!(exit_code(&run_in(dir.path(), &["explain", "-s", "a", "x.example"])), 0);
    let below = run_in(dir.path(), &["explain", "-s", "b", "x.example"]);
    assert!(text(&below.stdout).contains("base_forbids"), "{}", text(&below.stdout));
    let which = run_in(dir.path(), &["explain", "x.example"]);
    assert!(text(&which.stderr).contains("choose a sandbox with --sandbox: a, b"), "{}", text(&which.stderr));
}

#[test]
fn files_that_would_hang_or_escape_are_refused() {
    let dir = write_files(&[("p.toml", "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts_file = \"pipe\"\n")]);
    let made = Command::new("mkfifo").arg(dir.path().join("pipe")).status().unwrap();
    assert!(made.success());
    let output = run_in(dir.path(), &["check", "p.toml"]);
    assert!(
        text(&output.stderr).contains("cannot read the list `pipe`: it is not a regular file"),
        "{}",
        text(&output.stderr)
    );
    assert!(
        text(&run_in(dir.path(), &["check", "pipe"]).stderr)
            .contains("cannot read pipe: it is not a regular file")
    );
}

#[test]
fn a_diff_of_directories_tells_added_and_removed_sandboxes() {
    let operator = |ids: &str| format!("policies = \"d\"\n{ids}");
    let sandbox = |id: &str| format!("[[sandbox]]\nid = \"{id}\"\npolicies = [\"p\"]\n");
    let old =
        write_files(&[("sandbar.toml", &operator(&(sandbox("a") + &sandbox("b")))), ("d/p.toml", POLICY)]);
    let new =
        write_files(&[("sandbar.toml", &operator(&(sandbox("a") + &sandbox("c")))), ("d/p.toml", POLICY)]);
    let output = sandbar().arg("diff").args([old.path(), new.path()]).output().unwrap();
    let shown = text(&output.stdout);
    assert!(
        shown.contains("sandbox b (removed)\n  - GET x.example stops being reachable")
            || shown.contains("- x.example stops being reachable"),
        "{shown}"
    );
    assert!(shown.contains("sandbox c (added)\n  + x.example becomes reachable"), "{shown}");
    assert!(!shown.contains("sandbox a"), "{shown}");
}

#[test]
fn a_sandbox_that_is_renamed_is_another_and_a_lone_policy_is_not() {
    let sandbox = |id: &str| format!("policies = \"d\"\n[[sandbox]]\nid = \"{id}\"\npolicies = [\"p\"]\n");
    let dir = write_files(&[
        ("old/sandbar.toml", &sandbox("a")),
        ("old/d/p.toml", POLICY),
        ("new/sandbar.toml", &sandbox("b")),
        ("new/d/p.toml", POLICY),
        ("q.toml", &POLICY.replace("\"p\"", "\"q\"")),
    ]);
    let renamed = text(&run_in(dir.path(), &["diff", "old", "new"]).stdout);
    assert!(renamed.contains("sandbox a (removed)") && renamed.contains("sandbox b (added)"), "{renamed}");
    let lone = text(&run_in(dir.path(), &["diff", "old/d/p.toml", "q.toml"]).stdout);
    assert_eq!(lone, "no difference in what is reachable\n");
}

#[test]
fn the_schemas_take_the_examples_and_refuse_slips() {
    let script = "
import json, sys, tomllib, jsonschema
schema = json.load(open(sys.argv[1]))
document = tomllib.load(open(sys.argv[2], 'rb'))
jsonschema.Draft202012Validator.check_schema(schema)
sys.exit(1 if list(jsonschema.Draft202012Validator(schema).iter_errors(document)) else 0)
";
    let dir = write_files(&[("slip.toml", "name = \"p\"\n[[allow]]\nname = \"a\"\nhots = []\n")]);
    let valid = |which: &str, document: &Path| {
        let schema = dir.path().join(format!("{which}.json"));
        fs::write(&schema, run_sandbar(&format!("schema {which}")).stdout).unwrap();
        let python =
            Command::new("/usr/bin/python3").args(["-c", script]).arg(&schema).arg(document).output();
        let python = python.expect("python3 is installed by `make test`");
        assert!(
            !text(&python.stderr).contains("Error"),
            "python3-jsonschema is installed by `make test`: {}",
            text(&python.stderr)
        );
        python.status.success()
    };
    let gateway = repository_root().join(GATEWAY);
    assert!(valid("policy", &gateway.join("policies/build-agent.toml")));
    assert!(valid("policy", &gateway.join("policies/team-memory.toml")));
    assert!(valid("operator", &gateway.join("sandbar.toml")));
    assert!(!valid("policy", &dir.path().join("slip.toml")));
    assert!(!valid("operator", &gateway.join("policies/build-agent.toml")));
}

#[test]
fn completions_and_manual_are_made_for_every_command() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = run_sandbar(&format!("completions {shell}"));
        assert!(exit_code(&script) == 0 && text(&script.stdout).contains("explain"), "{shell}");
    }
    let dir = tempfile::tempdir().unwrap();
    let made = sandbar().args(["man", "--dir"]).arg(dir.path()).output().unwrap();
    assert_eq!(exit_code(&made), 0, "{}", text(&made.stderr));
    for page in ["sandbar.1", "sandbar-check.1", "sandbar-explain.1", "sandbar-diff.1"] {
        assert!(dir.path().join(page).is_file(), "{page}");
    }
    assert!(text(&run_sandbar("man").stdout).contains(".TH sandbar"));
}

#[test]
fn a_million_names_are_checked_in_one_go() {
    let list: String = (0..1_000_000).map(|at| format!("host-{at}.mirror.example\n")).collect();
    let dir = write_files(&[
        ("p.toml", "name = \"p\"\n[[allow]]\nname = \"a\"\nhosts_file = \"l.txt\"\n"),
        ("l.txt", &list),
    ]);
    let output = run_in(dir.path(), &["check", "p.toml"]);
    assert!(
        text(&output.stdout).contains("1000000 patterns"),
        "{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    assert!(text(&output.stdout).contains("... and 999992 more"), "{}", text(&output.stdout));
}
