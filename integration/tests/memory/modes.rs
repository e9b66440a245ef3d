//! The other ways: an identity that the path gives, and a token that is signed for the service.

use std::fs;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::client::{ClientRequest, SandboxClient};
use super::scene::{AUDIENCE, MemoryScene, MemorySetup, SECRET, wait_for};

#[test]
fn p12_a_sandbox_without_a_token_is_identified_by_its_channel() {
    let scene = MemoryScene::new();
    let answer = scene.send("sandbox-d", ClientRequest::recall("staging:team-d"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let seen = scene.arrived_requests()[0]["headers"].to_string();
    assert!(seen.contains("agent:sandbox-d"), "{seen}");
    for (row, ask, reason) in [
        ("28 foreign", ClientRequest::recall("staging:team-b"), "foreign_bank"),
        (
            "10 with A's token",
            ClientRequest::recall("staging:team-d").with_field("Sandbox-Identity", &scene.token("sandbox-a")),
            "identity_mismatch",
        ),
        (
            "2 with a bad token",
            ClientRequest::recall("staging:team-d").with_field("Sandbox-Identity", "x.y.z"),
            "identity_invalid",
        ),
    ] {
        scene.assert_refused(row, &scene.send("sandbox-d", ask), reason, 1);
    }
    let of = |record: &Value| record["class_uid"] == 6003 && record["status_detail"] == "allowed";
    let told = scene.records().into_iter().find(of).unwrap();
    assert_eq!(told["unmapped"]["sandbar"]["identity"], "from_channel");
}

// proves: memory_service.credential
#[test]
fn p16_without_its_key_nothing_is_sent_to_the_service() {
    let scene = MemoryScene::new();
    assert_eq!(scene.send_honest("sandbox-b", ClientRequest::recall("staging:team-b")).status, 200);
    fs::remove_file(scene.dir.path().join("memory.key")).unwrap();
    let recall = || scene.send_honest("sandbox-b", ClientRequest::recall("staging:team-b"));
    let mut sent = 1; // until the file was looked at
    let answer = loop {
        match recall() {
            answer if answer.status == 200 => sent += 1,
            answer => break answer,
        }
    };
    scene.assert_refused("no key", &answer, "credential_unavailable", sent);
    assert_eq!(answer.status, 502);
}

/// A rule opens a service; only the operator says how it is spoken to.
// proves: memory_service.host
#[test]
fn p16_nothing_is_sent_to_a_service_that_the_operator_does_not_name() {
    let scene = MemoryScene::new();
    let host = "other.corp.example:443";
    let mut client = SandboxClient::connect(scene.listener("sandbox-d"), None, host, &scene.trust);
    let answer = client.send(&ClientRequest::recall("staging:team-d"));
    scene.assert_refused("no service", &answer, "memory_service", 0);
}

/// The service's address is closed to every other name, whatever a rule says.
#[test]
fn p12_attack_76_no_other_name_leads_around_the_guard() {
    let scene = MemoryScene::new();
    let host = format!("alias.corp.example:{}", scene.service.port());
    let mut client = SandboxClient::connect(scene.listener("sandbox-d"), None, &host, &scene.trust);
    let answer = client.send(&ClientRequest::recall("staging:team-d"));
    scene.assert_refused("76 by another name", &answer, "memory_operation", 0);
}

/// Rules that change count for the next request on an open connection; rules that are broken change nothing.
#[test]
fn p9_attack_77_a_reload_counts_at_once_and_a_broken_one_not_at_all() {
    let scene = MemoryScene::new();
    let policy = scene.dir.path().join("policies/mem-b.toml");
    let good = fs::read_to_string(&policy).unwrap();
    let ask =
        ClientRequest::recall("staging:team-b").with_field("Sandbox-Identity", &scene.token("sandbox-b"));
    let mut client = scene.connect("sandbox-b");
    assert_eq!(client.send(&ask).status, 200);
    fs::write(&policy, format!("{good}\nnonsense = [")).unwrap();
    let rejected = |record: &Value| record["unmapped"]["sandbar"]["event"] == "policy_rejected";
    wait_for("the rejection", || scene.records().iter().any(rejected));
    assert_eq!(client.send(&ask).status, 200, "the old rules hold");
    fs::write(&policy, good.replace("recall = [\"staging:team-b\", ", "recall = [")).unwrap();
    let mut last = None;
    wait_for("the reload", || {
        client.send_bytes(&ask.encode(&scene.service_host()));
        match client.read_response() {
            Some(answer) if answer.status == 200 => return false,
            Some(answer) => last = Some(answer),
            None => client = scene.connect("sandbox-b"), // it was cut in the middle of a request
        }
        last.is_some()
    });
    assert_eq!(last.unwrap().reason(), Some("foreign_bank"));
}

/// A recall that is under way when its bank is taken away brings nothing back.
#[test]
fn p10_attack_77_a_request_that_waits_for_the_service_is_cut_and_its_neighbour_is_not() {
    let scene = MemoryScene::new();
    let policy = scene.dir.path().join("policies/mem-b.toml");
    let good = fs::read_to_string(&policy).unwrap();
    let slow = |bank: &str| {
        ClientRequest::post("/v1/recall", &format!(r#"{{"query":"strange:slow","bank_id":"{bank}"}}"#))
    };
    let (mut loser, mut neighbour) = (scene.connect("sandbox-b"), scene.connect("sandbox-d"));
    let ask = slow("staging:team-b").with_field("Sandbox-Identity", &scene.token("sandbox-b"));
    loser.send_bytes(&ask.encode(&scene.service_host()));
    neighbour.send_bytes(&slow("staging:team-d").encode(&scene.service_host()));
    wait_for("both are at the service", || scene.arrived_requests().len() == 2);
    fs::write(&policy, good.replace("recall = [\"staging:team-b\", ", "recall = [")).unwrap();
    assert!(loser.read_response().is_none(), "it is cut, without an answer");
    let revoked = |record: &Value| record["unmapped"]["sandbar"]["ending"] == "revoked";
    wait_for("the record", || scene.records().iter().any(revoked));
    let answer = neighbour.read_response().expect("the neighbour is answered");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let cut: Vec<Value> = scene.records().into_iter().filter(revoked).collect();
    assert_eq!((cut.len(), &cut[0]["status_detail"]), (1, &"foreign_bank".into()), "{cut:#?}");
}

fn decode_part(part: &str) -> Value {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'-' => 62,
        _ => 63,
    };
    let mut bytes = Vec::new();
    for four in part.as_bytes().chunks(4) {
        let bits = four.iter().fold(0u32, |bits, byte| bits << 6 | u32::from(digit(*byte)))
            << (6 * (4 - four.len()));
        bytes.extend(&bits.to_be_bytes()[1..four.len()]);
    }
    serde_json::from_slice(&bytes).unwrap()
}

/// A scene in which the service is told by a token of ours; the key lies beside it.
fn scene_with_tokens() -> (MemoryScene, TempDir) {
    // The scene's directory is not there yet when the key is made, so it lies beside.
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("service.key");
    let made = Command::new("openssl")
        .args(["genpkey", "-quiet", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out"])
        .arg(&key)
        .output()
        .expect("openssl");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let service = format!(
        "mode = \"token\"\nkey = \"{}\"\nissuer = \"https://sandbar.acme.example\"\ntrust_domain = \"acme.example\"\n",
        key.display()
    );
    let setup = MemorySetup { mode: "jwt_oidc", service: service.leak(), ..MemorySetup::default() };
    (MemoryScene::with_setup(setup), dir)
}

/// What `sandbar identity jwks` prints.
fn print_jwks(scene: &MemoryScene) -> String {
    let mut command = integration::sandbar();
    command.args(["identity", "jwks", "-c"]).arg(scene.dir.path().join("sandbar.toml"));
    let told = command.output().unwrap();
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    String::from_utf8(told.stdout).unwrap()
}

/// The service is told by a token of ours; the sandbox's own never gets there.
// proves: memory_service.mode, memory_service.key, memory_service.issuer, memory_service.trust_domain
#[test]
fn p13_a_token_is_signed_anew_for_the_service() {
    let (scene, _key) = scene_with_tokens();
    let own = scene.token("sandbox-b");
    let ask = ClientRequest::recall("staging:team-b").with_field("Authorization", &format!("Bearer {own}"));
    assert_eq!(scene.send("sandbox-b", ask).status, 401, "nothing is published to it yet");
    let seen = scene.arrived_requests().pop().expect("it arrived");
    let headers = seen["headers"].as_array().unwrap();
    let bearers: Vec<&str> = headers
        .iter()
        .filter(|pair| pair[0] == "authorization")
        .map(|pair| pair[1].as_str().unwrap())
        .collect();
    let [bearer] = bearers[..] else { panic!("{bearers:?}") };
    assert!(!bearer.contains(&own), "the sandbox's own token arrived");
    assert!(!headers.iter().any(|pair| pair[0] == "x-api-key" || pair[0] == "x-astrocyte-principal"));
    let mut parts = bearer.strip_prefix("Bearer ").unwrap().split('.');
    let (head, claims) = (decode_part(parts.next().unwrap()), decode_part(parts.next().unwrap()));
    assert_eq!(head["alg"], "RS256");
    assert_eq!(claims["sub"], "spiffe://acme.example/tenant/acme/env/staging/sandbox/sandbox-b");
    assert_eq!((&claims["aud"], &claims["iss"]), (&AUDIENCE.into(), &"https://sandbar.acme.example".into()));
    assert_eq!(claims["astrocyte_principal"], "agent:sandbox-b");
    assert_eq!(claims["banks"], serde_json::json!(["staging:team-b"]));
    let life = claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap();
    assert!(life <= 60, "{life}");
}

/// The service checks what is signed for it by the keys that are published, and by nothing else.
#[test]
fn the_service_checks_tokens_by_the_published_keys() {
    let (scene, _key) = scene_with_tokens();
    let file = scene.dir.path().join("jwks.json");
    let set = print_jwks(&scene);
    for private in ["\"d\"", "\"p\"", "\"q\"", "\"dp\"", "\"dq\"", "\"qi\""] {
        assert!(!set.contains(private), "{private} is published: {set}");
    }
    let (other, _other_key) = scene_with_tokens();
    fs::write(&file, print_jwks(&other)).unwrap();
    let answer = scene.send_honest("sandbox-a", ClientRequest::recall("staging:team-a"));
    assert_eq!(answer.status, 401, "by another's keys: {}", answer.text());
    fs::write(&file, set).unwrap();
    scene.plant_secret();
    let answer = scene.send_honest("sandbox-a", ClientRequest::recall("staging:team-a"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.text().contains(SECRET), "{}", answer.text());
    let answer = scene.send_honest("sandbox-b", ClientRequest::recall("staging:team-b"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let before = scene.arrived_requests().len();
    let answer = scene.send_honest("sandbox-b", ClientRequest::recall("staging:team-a"));
    scene.assert_refused("28 foreign", &answer, "foreign_bank", before);
    // Around the program nobody is believed: a sandbox's own token is no token of the service's.
    let own = format!("Bearer {}", scene.token("sandbox-a"));
    let answer = scene
        .connect_directly()
        .send(&ClientRequest::recall("staging:team-a").with_field("Authorization", &own));
    assert_eq!(answer.status, 401, "{}", answer.text());
}

/// A token that the service sends back is a credential like any other.
#[test]
fn p11_a_token_of_ours_does_not_come_back() {
    let (scene, _key) = scene_with_tokens();
    fs::write(scene.dir.path().join("jwks.json"), print_jwks(&scene)).unwrap();
    let body = r#"{"query":"strange:token","bank_id":"staging:team-b"}"#;
    let answer = scene.send_honest("sandbox-b", ClientRequest::post("/v1/recall", body));
    scene.assert_refused("a token echoed", &answer, "answer_unchecked", 1);
    assert!(!answer.text().contains("eyJ"), "{}", answer.text());
}
