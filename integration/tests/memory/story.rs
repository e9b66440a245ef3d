//! Why there is a guard: one header opens another's bank, unless somebody asks whose header it is.

use serde_json::Value;

use super::client::{ClientFraming, ClientRequest};
use super::scene::{KEY, MemoryScene, MemorySetup, SECRET, wait_for};

fn header_values<'a>(seen: &'a Value, name: &str) -> Vec<&'a str> {
    let all = seen["headers"].as_array().unwrap();
    all.iter().filter(|pair| pair[0] == name).map(|pair| pair[1].as_str().unwrap()).collect()
}

#[test]
fn without_the_guard_one_header_opens_anothers_bank() {
    for mode in ["api_key", "dev"] {
        let scene = MemoryScene::with_setup(MemorySetup { mode, ..MemorySetup::default() });
        let mut direct = scene.connect_directly();
        let body = format!(r#"{{"content":"{SECRET}","bank_id":"staging:team-a"}}"#);
        let as_a = |ask: ClientRequest| {
            ask.with_field("X-Api-Key", KEY).with_field("X-Astrocyte-Principal", "agent:sandbox-a")
        };
        let as_b = |ask: ClientRequest| {
            ask.with_field("X-Api-Key", KEY).with_field("X-Astrocyte-Principal", "agent:sandbox-b")
        };
        assert_eq!(direct.send(&as_a(ClientRequest::post("/v1/retain", &body))).status, 200, "{mode}");
        assert_eq!(direct.send(&as_b(ClientRequest::recall("staging:team-a"))).status, 403, "{mode}");
        // The same caller, another name in one header.
        let fooled = direct.send(&as_a(ClientRequest::recall("staging:team-a")));
        assert!(fooled.status == 200 && fooled.text().contains(SECRET), "{mode}: {}", fooled.text());
    }
}

#[test]
fn p12_attack_21_and_10_with_the_guard_nobody_reads_anothers_bank() {
    let scene = MemoryScene::new();
    scene.plant_secret();
    let before = scene.arrived_requests().len();
    let forged = ClientRequest::recall("staging:team-a")
        .with_field("X-Api-Key", KEY)
        .with_field("X-Astrocyte-Principal", "agent:sandbox-a");
    let answer = scene.send_honest("sandbox-b", forged.clone());
    scene.assert_refused("21 A's name", &answer, "foreign_bank", before);
    let stolen = forged.with_field("Sandbox-Identity", &scene.token("sandbox-a"));
    let answer = scene.send("sandbox-b", stolen);
    scene.assert_refused("10 A's token on B's path", &answer, "identity_mismatch", before);
    let bearer = format!("Bearer {}", scene.token("sandbox-a"));
    let answer =
        scene.send("sandbox-b", ClientRequest::recall("staging:team-b").with_field("Authorization", &bearer));
    scene.assert_refused("10 A's token for B's own bank", &answer, "identity_mismatch", before);
    let attempt = answer.field("Sandbar-Record").unwrap();
    let told = scene.attempt_records(attempt);
    let finding = told.iter().find(|record| record["class_uid"] == 2004).expect("a finding");
    let message = finding["message"].as_str().unwrap();
    assert!(message.contains("sandbox-b") && message.contains("sandbox/sandbox-a"), "{message}");
}

#[test]
fn p13_attack_21_own_bank_is_asked_for_under_ones_own_name() {
    let scene = MemoryScene::new();
    let ask = ClientRequest::recall("staging:team-b")
        .with_field("X-Astrocyte-Principal", "agent:sandbox-a")
        .with_field("X-Api-Key", "another")
        .with_field("X-Admin-Token", "admin");
    let answer = scene.send_honest("sandbox-b", ask);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let seen = scene.arrived_requests().pop().unwrap();
    assert_eq!(header_values(&seen, "x-astrocyte-principal"), ["agent:sandbox-b"]);
    assert_eq!(header_values(&seen, "x-api-key"), [KEY]);
    for gone in ["x-admin-token", "sandbox-identity", "authorization", "transfer-encoding"] {
        assert!(header_values(&seen, gone).is_empty(), "{gone} arrived");
    }
}

/// Byte for byte: as if nobody sat in between.
#[test]
fn attack_79_honest_sandboxes_notice_nothing() {
    let scene = MemoryScene::new();
    scene.plant_secret();
    let escaped = r#"{"content":"n\u00e4chste \ud83d\ude00 \"Zeile\"\n","bank_id":"staging:team-b","tags":["a","b"],"metadata":{"n":1.50,"x":null}}"#;
    let large = format!(r#"{{"content":"{}","bank_id":"staging:team-b"}}"#, "0123456789abcdef".repeat(2800));
    let token = scene.token("sandbox-b");
    let mut client = scene.connect("sandbox-b");
    for (row, body, framing) in [
        ("escaped", escaped, ClientFraming::Length),
        ("chunked", escaped, ClientFraming::Chunked),
        ("large", &large, ClientFraming::Length),
        ("large, chunked", &large, ClientFraming::Chunked),
    ] {
        let ask = ClientRequest::post("/v1/retain", body)
            .with_framing(framing)
            .with_field("Sandbox-Identity", &token);
        let answer = client.send(&ask); // all on one connection, with one token
        assert_eq!(answer.status, 200, "{row}: {}", answer.text());
        let seen = scene.arrived_requests().pop().unwrap();
        assert_eq!(seen["body"], body, "{row}");
        assert_eq!(header_values(&seen, "content-length"), [body.len().to_string()], "{row}");
        assert_eq!(header_values(&seen, "x-astrocyte-principal"), ["agent:sandbox-b"], "{row}");
    }
    let through = scene.send_honest("sandbox-a", ClientRequest::recall("staging:team-a"));
    let around = scene.connect_directly().send(
        &ClientRequest::recall("staging:team-a")
            .with_field("X-Api-Key", KEY)
            .with_field("X-Astrocyte-Principal", "agent:sandbox-a"),
    );
    assert!(through.text().contains(SECRET));
    assert_eq!(through.body, around.body);
    assert_eq!(through.field("Content-Type"), around.field("Content-Type"));
}

/// A megabyte, by a client that speaks HTTP/2.
#[test]
fn attack_79_http2_carries_a_megabyte() {
    let scene = MemoryScene::new();
    // The engine bounds a memory's content itself; what matters is what arrives.
    let body = format!(r#"{{"bank_id":"staging:team-b","content":"{}"}}"#, "x".repeat(1 << 20));
    let file = scene.dir.path().join("body.json");
    std::fs::write(&file, &body).unwrap();
    let mut curl = std::process::Command::new("curl");
    curl.args(["--silent", "--show-error", "--http2", "--max-time", "60", "--write-out", "%{http_version}"]);
    curl.arg("--proxy").arg(format!("http://{}", scene.listener("sandbox-b")));
    curl.arg("--cacert").arg(scene.dir.path().join("ca/ca.pem"));
    curl.arg("--header").arg(format!("Sandbox-Identity: {}", scene.token("sandbox-b")));
    curl.args(["--header", "Content-Type: application/json", "--output", "/dev/null"]);
    curl.arg("--data-binary").arg(format!("@{}", file.display()));
    curl.arg(format!("https://{}/v1/retain", scene.service_host()))
        .env_remove("NO_PROXY")
        .env_remove("no_proxy");
    let done = curl.output().expect("curl");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&done.stdout), "2", "{said}");
    let seen = scene.arrived_requests().pop().expect("it arrived");
    assert_eq!(seen["body"], body.as_str());
    assert_eq!(header_values(&seen, "x-astrocyte-principal"), ["agent:sandbox-b"]);
}

/// What the record says: operation, banks, identity and channel; and never what was said or kept.
#[test]
fn p11_records_say_who_asked_what_and_never_what_was_said() {
    let scene = MemoryScene::new();
    scene.plant_secret();
    let token = scene.token("sandbox-a");
    let answer = scene
        .send("sandbox-a", ClientRequest::recall("staging:team-a").with_field("Sandbox-Identity", &token));
    assert!(answer.text().contains(SECRET));
    let of = |record: &Value| record["class_uid"] == 6003 && record["api"]["operation"] == "recall";
    wait_for("the outcome", || scene.records().iter().filter(|record| of(record)).count() == 2);
    let told: Vec<Value> = scene.records().into_iter().filter(of).collect();
    let stages: Vec<_> = told.iter().map(|record| &record["unmapped"]["sandbar"]["stage"]).collect();
    assert_eq!(stages, ["decision", "outcome"], "{told:?}");
    for record in &told {
        assert_eq!(record["api"]["service"]["name"], "astrocyte");
        assert_eq!(record["resources"][0]["uid"], "staging:team-a");
        assert_eq!(record["actor"]["app_uid"], "sandbox-a");
        let uid = record["actor"]["user"]["uid"].as_str().unwrap();
        assert_eq!(uid, "spiffe://acme.example/tenant/acme/env/staging/sandbox/sandbox-a");
        assert_eq!(record["unmapped"]["sandbar"]["identity"], "verified");
        assert_eq!(record["unmapped"]["sandbar"]["credential"], "memory");
        assert_eq!(record["unmapped"]["sandbar"]["channel"]["kind"], "dedicated");
    }
    let log = scene.records().iter().map(Value::to_string).collect::<String>();
    for secret in [SECRET, "launch code", KEY, token.as_str()] {
        assert!(!log.contains(secret), "the log has `{secret}`");
    }
}
