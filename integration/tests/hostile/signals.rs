//! What leaves is searched and compared (P11, P15, P19): a signal is recorded where the policy flags it, and refused before
//! the bytes that raised it leave where the policy denies it. Judged at the origin and by the access log.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use rules::signals::canary::{CanaryShape, make};
use serde_json::Value;

use crate::instance::{InstanceSetup, SandbarInstance, record_stage};
use crate::origin::ScriptedOrigin;
use crate::wire::{RawConnection, RawResponse};

/// A GitHub token with a valid checksum, different for each seed.
fn token(seed: u8) -> String {
    let random: Vec<u8> = (0..64).map(|at: u8| at.wrapping_mul(37).wrapping_add(seed)).collect();
    make(CanaryShape::GithubToken, "test", &random).unwrap().values()[0].clone()
}

pub(crate) struct SignalScene {
    pub(crate) world: SandbarInstance,
    pub(crate) origin: ScriptedOrigin,
}

impl SignalScene {
    /// `rule` is added to the only rule, `policy` to the policy.
    pub(crate) fn start(rule: &str, policy: &str) -> Self {
        Self::with_tables(rule, policy, "")
    }

    fn with_tables(rule: &str, policy: &str, tables: &str) -> Self {
        let origin = ScriptedOrigin::start_plain();
        let mut setup = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
        setup.policy += &format!("{rule}\n{policy}");
        setup.tables = tables.to_owned();
        SignalScene { world: setup.start(), origin }
    }

    pub(crate) fn authority(&self) -> String {
        format!("a.test:{}", self.origin.port())
    }

    /// Sends a request in the given pieces, and returns its answer.
    fn send(&self, pieces: &[&[u8]]) -> RawResponse {
        let mut wire = RawConnection::connect(self.world.listeners[0]);
        for piece in pieces {
            if !wire.try_send(piece) {
                break; // refused meanwhile: the answer says why
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        wire.read_response("POST").expect("an answer")
    }

    fn post(&self, path: &str, fields: &str, body: &[u8]) -> RawResponse {
        let (authority, length) = (self.authority(), body.len());
        let head = format!(
            "POST http://{authority}{path} HTTP/1.1\r\nHost: {authority}\r\n{fields}Content-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        self.send(&[&[head.as_bytes(), body].concat()])
    }

    /// The findings since `since`, by code and message.
    fn findings(&self, since: usize) -> Vec<(String, String)> {
        let records = self.world.records();
        let findings = records.iter().skip(since).filter(|record| record["class_uid"] == 2004);
        findings.map(|record| (code_of(record), record["message"].as_str().unwrap().to_owned())).collect()
    }

    /// Everything that the origin got, as bytes.
    pub(crate) fn arrived(&self) -> Vec<u8> {
        self.origin.connections().iter().flat_map(|connection| connection.bytes.clone()).collect()
    }
}

fn code_of(record: &Value) -> String {
    record["finding_info"]["types"][0].as_str().unwrap_or_else(|| panic!("{record}")).to_owned()
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip =
        Command::new("gzip").arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    gzip.stdin.take().unwrap().write_all(bytes).unwrap();
    gzip.wait_with_output().unwrap().stdout
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// proves: signals.secrets
#[test]
fn p11_secrets_are_flagged_and_pass_or_are_denied_and_stay() {
    for denied in [false, true] {
        let mode = if denied { "deny" } else { "flag" };
        let scene = SignalScene::start("", &format!("[signals]\nsecrets = \"{mode}\"\n"));
        let secret = token(1);
        let json = format!("{{\"note\": \"here it is: {secret} \"}}");
        let forms: Vec<(&str, Vec<u8>, String)> = vec![
            ("raw", json.clone().into_bytes(), String::new()),
            ("base64", STANDARD.encode(&json).into_bytes(), String::new()),
            (
                "base64url in JSON",
                format!("{{\"d\":\"{}\"}}", URL_SAFE_NO_PAD.encode(&json)).into_bytes(),
                String::new(),
            ),
            ("hex", hex(json.as_bytes()).into_bytes(), String::new()),
            ("gzip, declared", gzip(json.as_bytes()), "Content-Encoding: gzip\r\n".to_owned()),
            ("gzip, undeclared", gzip(json.as_bytes()), String::new()),
            ("base64 of gzip", STANDARD.encode(gzip(json.as_bytes())).into_bytes(), String::new()),
            (
                "percent",
                secret.bytes().map(|byte| format!("%{byte:02X}")).collect::<String>().into_bytes(),
                String::new(),
            ),
            ("field", b"x".to_vec(), format!("X-Data: {secret}\r\n")),
            ("field, base64", b"x".to_vec(), format!("X-Data: {}\r\n", STANDARD.encode(&secret))),
        ];
        for (what, body, fields) in forms {
            let since = scene.world.record_count();
            let before = scene.origin.requests().len();
            let answer = scene.post("/upload", &fields, &body);
            if denied {
                scene.world.assert_refused(what, &answer, 403, "secret_found");
                assert_eq!(scene.origin.requests().len(), before, "{what}: no whole request arrived");
            } else {
                assert_eq!(answer.status, 200, "{what}: {}", answer.text());
            }
            scene.world.wait_for_record(since, "the finding", |record| record["class_uid"] == 2004);
            let findings = scene.findings(since);
            assert!(
                findings.iter().any(|(code, said)| code == "secret_found" && said.contains("GitHub")),
                "{what}: {findings:?}"
            );
            assert!(findings.iter().all(|(_, said)| !said.contains(&secret)), "{what}: {findings:?}");
        }
        let since = scene.world.record_count();
        let answer = scene.post(&format!("/{secret}?q={secret}"), "", b"x");
        assert_eq!(answer.status, if denied { 403 } else { 200 }, "in the URL: {}", answer.text());
        scene.world.wait_for_record(since, "the finding", |record| record["class_uid"] == 2004);
        assert_eq!(contains(&scene.arrived(), secret.as_bytes()), !denied, "what arrived");
    }
}

#[test]
fn p11_a_denied_secret_that_comes_in_pieces_has_not_begun_to_leave() {
    let scene = SignalScene::start("", "[signals]\nsecrets = \"deny\"\n");
    let secret = token(2);
    let body = format!("first part of the text, then {secret} and more text behind it");
    let (authority, length) = (scene.authority(), body.len());
    let head = format!(
        "POST http://{authority}/x HTTP/1.1\r\nHost: {authority}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    let mut pieces: Vec<&[u8]> = vec![head.as_bytes()];
    pieces.extend(body.as_bytes().chunks(7));
    let answer = scene.send(&pieces);
    scene.world.assert_refused("in pieces", &answer, 403, "secret_found");
    let arrived = scene.arrived();
    assert!(contains(&arrived, b"first part"), "what is not suspicious is not held back");
    assert!(!contains(&arrived, &secret.as_bytes()[..8]), "{}", String::from_utf8_lossy(&arrived));
}

#[test]
fn bodies_pass_unchanged_however_they_are_split() {
    let scene = SignalScene::start("", "[signals]\nsecrets = \"deny\"\n");
    // Looks like the beginning of many things, and is none of them.
    let body = "ghp_ sk- AKIA eyJ -----BEGIN xoxb- https://user@host %41%42 \\u0041 ".repeat(300);
    let (authority, length) = (scene.authority(), body.len());
    let head = format!(
        "POST http://{authority}/x HTTP/1.1\r\nHost: {authority}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    let mut pieces: Vec<&[u8]> = vec![head.as_bytes()];
    pieces.extend(body.as_bytes().chunks(1777));
    assert_eq!(scene.send(&pieces).status, 200);
    assert_eq!(scene.origin.requests().last().unwrap().body, body.as_bytes());
}

// proves: allow.signals.secrets, allow.inspect
#[test]
fn a_rule_overrides_its_policy_and_bodies_can_be_left_alone() {
    let secret = token(3);
    let strict = SignalScene::start("signals = { secrets = \"deny\" }", "[signals]\nsecrets = \"off\"\n");
    let answer = strict.post("/x", "", secret.as_bytes());
    strict.world.assert_refused("the rule's own", &answer, 403, "secret_found");
    let loose = SignalScene::start("inspect = false", "[signals]\nsecrets = \"deny\"\n");
    assert_eq!(loose.post("/x", "", secret.as_bytes()).status, 200, "the body is not searched");
    let answer = loose.post("/x", &format!("X-Data: {secret}\r\n"), b"x");
    loose.world.assert_refused("the head is", &answer, 403, "secret_found");
    let inspected = |record: &Value| record["unmapped"]["sandbar"]["inspected"].clone();
    let decision = loose.world.wait_for_record(0, "the decision", |record| {
        record["class_uid"] == 4002
            && record_stage(record) == "decision"
            && record["status_detail"] == "allowed"
    });
    assert_eq!(inspected(&decision), "head");
}

// proves: secret_pattern.name, secret_pattern.pattern
#[test]
fn p11_the_operators_own_patterns_count() {
    let tables = "[[secret_pattern]]\nname = \"badge\"\npattern = \"acme_[a-z0-9]{16}\"\n";
    let scene = SignalScene::with_tables("", "[signals]\nsecrets = \"deny\"\n", tables);
    let answer = scene.post("/x", "", b"acme_0123456789abcdef");
    scene.world.assert_refused("a badge", &answer, 403, "secret_found");
    assert!(scene.findings(0).iter().any(|(_, said)| said.contains("badge")), "{:?}", scene.findings(0));
    assert_eq!(scene.post("/x", "", b"acme_0123").status, 200);
}

// proves: budget.header_bits_per_hour
#[test]
fn p19_what_requests_say_outside_their_bodies_is_bounded() {
    let scene = SignalScene::start(
        "",
        "[signals]\nheaders = \"off\"\nurl = \"off\"\n[budget]\nheader_bits_per_hour = 8192\n",
    );
    let repeat = || scene.post("/same", "", b"x").status;
    assert_eq!(repeat(), 200);
    let mut passed = 0;
    let refused = (0..200_u32).find_map(|at| {
        let value: String =
            (0..40).map(|digit| char::from(b'a' + ((at * 7 + digit * digit + digit) % 26) as u8)).collect();
        let answer = scene.post("/same", &format!("X-Data: {value}{at}\r\n"), b"x");
        if answer.status != 200 {
            return Some(answer);
        }
        passed += 1;
        None
    });
    let refused = refused.expect("the budget ends");
    scene.world.assert_refused("more bits than the budget", &refused, 403, "budget_spent");
    assert!(refused.text().contains("header_bits_per_hour"), "{}", refused.text());
    // A value of 40 letters takes 40 x 4.7 bits at least.
    assert!((5..=43).contains(&passed), "{passed} values of 188 bits left with 8,192 bits");
    assert_eq!(scene.origin.requests().len(), passed + 1, "nothing else arrived");
    let said = scene.world.run_command(&["budget"]);
    assert!(said.contains("header_bits_per_hour"), "{said}");
}

// proves: allow.budget.header_bits_per_hour
#[test]
fn p19_a_rule_has_its_own_bits() {
    let scene = SignalScene::start("budget = { header_bits_per_hour = 100 }", "");
    let answer = scene.post("/first", "X-A: something-long-enough-for-a-hundred-bits\r\n", b"x");
    scene.world.assert_refused("the first request", &answer, 403, "budget_spent");
    assert!(scene.origin.requests().is_empty());
}

// proves: allow.headers
#[test]
fn p19_unlisted_fields_do_not_leave() {
    let scene = SignalScene::start("headers = [\"X-Known\"]", "");
    assert_eq!(
        scene.post("/x", "X-Known: 1\r\nX-Other: 2\r\nCookie: c=3\r\nUser-Agent: u\r\n", b"x").status,
        200
    );
    let request = scene.origin.requests().pop().unwrap();
    let names: Vec<String> = request.fields.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
    assert!(names.contains(&"x-known".to_owned()), "{names:?}");
    for name in ["x-other", "cookie", "user-agent"] {
        assert!(!names.contains(&name.to_owned()), "{name}: {names:?}");
    }
}

#[test]
fn p19_order_case_and_repetition_of_fields_do_not_leave() {
    let scene = SignalScene::start("", "");
    for fields in
        ["X-B: 1\r\nx-a: 2\r\nX-A: 3\r\n", "x-A: 2\r\nX-a: 3\r\nx-b: 1\r\n", "X-A:2,3\r\nX-B:  1  \r\n"]
    {
        assert_eq!(scene.post("/x", fields, b"x").status, 200, "{fields}");
    }
    let mut heads: Vec<Vec<(String, String)>> = scene
        .origin
        .requests()
        .into_iter()
        .map(|request| request.fields.iter().map(|(name, value)| (name.clone(), value.clone())).collect())
        .collect();
    assert_eq!(heads.len(), 3);
    heads.dedup();
    assert_eq!(heads.len(), 1, "{heads:?}");
}

#[test]
fn unusual_forms_are_flagged_and_denied() {
    let long: String = (0..600_u32)
        .map(|at| {
            char::from(
                b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                    [(at * at * 7 + at * 13) as usize % 62],
            )
        })
        .collect();
    for (key, path, field) in [
        ("headers", "/x".to_owned(), format!("X-Data: {long}\r\n")),
        ("url", format!("/{long}"), String::new()),
    ] {
        let flagged = SignalScene::start("", "");
        assert_eq!(flagged.post(&path, &field, b"x").status, 200, "{key}");
        flagged.world.wait_for_record(0, "the finding", |record| record["class_uid"] == 2004);
        let off = SignalScene::start("", &format!("[signals]\n{key} = \"off\"\n"));
        assert_eq!(off.post(&path, &field, b"x").status, 200, "{key}");
        assert_eq!(off.post("/end", "", b"x").status, 200);
        assert_eq!(off.findings(0), [], "{key}");
        let denied = SignalScene::start("", &format!("[signals]\n{key} = \"deny\"\n"));
        let answer = denied.post(&path, &field, b"x");
        denied.world.assert_refused(key, &answer, 403, "signal_denied");
        assert!(denied.origin.requests().is_empty());
    }
}

/// What only the outcome of requests shows is denied by refusing those that follow.
#[test]
fn requests_at_one_interval_are_denied_by_the_key_of_bodies() {
    let settings = |body: &str| {
        format!(
            "[signals]\nheaders = \"off\"\nurl = \"off\"\nbody = \"{body}\"\n[signals.thresholds]\nbeacon_requests = 2\n"
        )
    };
    let off = SignalScene::start("", &settings("off"));
    let scene = SignalScene::start("", &settings("deny"));
    let news = |at: usize| format!("X-News: news-{:05}\r\n", at * at * 7_919 % 99_991);
    let refused = (0..25).find_map(|at| {
        assert_eq!(off.post("/same", &news(at), b"x").status, 200);
        let answer = scene.post("/same", &news(at), b"x");
        std::thread::sleep(Duration::from_millis(1_200)); // the pace of the client
        (answer.status != 200).then_some((at, answer))
    });
    let (at, refused) = refused.expect("requests at one interval are found");
    scene.world.assert_refused("a beacon", &refused, 403, "signal_denied");
    scene.world.wait_for_record(0, "the finding", |record| record["finding_info"]["types"][0] == "beacon");
    assert_eq!(scene.origin.requests().len(), at, "the refused request did not leave");
    assert!(!contains(&scene.arrived(), news(at).trim_end().as_bytes()));
    assert_eq!(off.findings(0), []);
}

#[test]
fn p11_flagged_decoys_do_not_hide_what_is_denied() {
    let scene = SignalScene::start("", "");
    let made = scene.world.run_command(&["canary", "new", "decoy-test", "--json"]);
    let made: Value = serde_json::from_str(&made).unwrap();
    let canary = made["text"].as_str().unwrap().to_owned();
    let decoys: String =
        (0..60).map(|seed| format!("{} {} ", token(seed), STANDARD.encode(token(seed)))).collect();
    let answer = scene.post("/x", "", format!("{decoys}{canary}").as_bytes());
    scene.world.assert_refused("behind sixty tokens", &answer, 403, "canary_used");
    // What a client may show as its own credential is a secret elsewhere.
    let strict = SignalScene::start("", "[signals]\nsecrets = \"deny\"\n");
    let secret = token(9);
    assert_eq!(strict.post("/x", &format!("Authorization: Bearer {secret}\r\n"), b"x").status, 200);
    for (path, fields) in [
        (format!("/x?sig={secret}&q={secret}"), String::new()),
        (format!("/x?sig={secret}"), format!("X-Data: {secret}\r\n")),
        ("/x".to_owned(), format!("Authorization: Bearer {secret}\r\nX-Data: {secret}\r\n")),
    ] {
        let answer = strict.post(&path, &fields, b"x");
        strict.world.assert_refused(&path, &answer, 403, "secret_found");
    }
}

#[test]
fn p11_what_cannot_be_searched_says_so_and_is_no_way_past_a_denial() {
    let decoys = [&b"."[..], &b"\x1f\x8b\x08\x08\0\0\0\0\0\0".repeat(200)].concat();
    let corrupt = b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff\xff\xff".as_slice();
    for (name, fields, body, why) in [
        ("decoys of gzip", "", &decoys[..], "begin like gzip"),
        ("corrupt gzip", "Content-Encoding: gzip\r\n", corrupt, "its compression is corrupt"),
    ] {
        let flagged = SignalScene::start("", "");
        assert_eq!(flagged.post("/x", fields, body).status, 200, "{name}");
        let finding = flagged.world.wait_for_record(0, "the finding", |record| record["class_uid"] == 2004);
        assert_eq!(finding["finding_info"]["types"][0], "content_unsearched", "{finding}");
        assert!(finding["message"].as_str().unwrap().contains(why), "{finding}");
        for key in ["secrets", "body"] {
            let strict = SignalScene::start("", &format!("[signals]\n{key} = \"deny\"\n"));
            let answer = strict.post("/x", fields, body);
            strict.world.assert_refused(name, &answer, 403, "signal_denied");
            assert!(strict.origin.requests().is_empty(), "{name}");
        }
    }
}

#[test]
fn p19_the_spelling_of_host_and_length_does_not_leave() {
    let scene = SignalScene::start("", "");
    let port = scene.origin.port();
    for (host, length) in [("a.test", "1"), ("A.tEsT", "0001"), ("a.test.", "01")] {
        let request = format!(
            "POST http://{host}:{port}/x HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\nx"
        );
        assert_eq!(scene.send(&[request.as_bytes()]).status, 200, "{host} {length}");
    }
    let mut heads: Vec<Vec<(String, String)>> =
        scene.origin.requests().into_iter().map(|request| request.fields).collect();
    heads.dedup();
    assert_eq!(heads.len(), 1, "{heads:?}");
}

#[test]
fn messages_without_a_length_are_not_held_back() {
    let scene = SignalScene::start("", "");
    let authority = scene.authority();
    let mut wire = RawConnection::connect(scene.world.listeners[0]);
    wire.send(format!(
        "POST http://{authority}/x HTTP/1.1\r\nHost: {authority}\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nping\r\n"
    ));
    scene.origin.wait_until("the message arrives before the body ends", |seen| {
        seen.iter().any(|connection| contains(&connection.bytes, b"ping"))
    });
    wire.send("0\r\n\r\n");
    assert_eq!(wire.read_response("POST").unwrap().status, 200);
}
