//! Attacks 39, 64 and 65, and every other bound: each is tried to exceed, and holds.

use std::time::Instant;

use super::client::{ClientFraming, ClientRequest};
use super::scene::{DEADLINE, MemoryScene, MemorySetup};

const OWN: &str = "staging:team-b";

// proves: limits.memory_body_bytes
#[test]
fn p17_attacks_39_and_64_size_depth_and_number_are_bounded() {
    let scene = MemoryScene::with_setup(MemorySetup {
        limits: "memory_body_bytes = 2000000\n",
        ..MemorySetup::default()
    });
    let padded = |length: usize| {
        let start = format!(r#"{{"query":"x","bank_id":"{OWN}","pad":""#);
        let rest = length - start.len() - 2;
        format!("{start}{}\"}}", "p".repeat(rest))
    };
    let nested = |depth: usize| {
        format!(r#"{{"query":"x","bank_id":"{OWN}","n":{}{}}}"#, "[".repeat(depth), "]".repeat(depth))
    };
    let keys = |count: usize| {
        let keys: Vec<String> = (0..count).map(|key| format!("\"{key}\":0")).collect();
        format!(r#"{{"query":"x","bank_id":"{OWN}","n":{{{}}}}}"#, keys.join(","))
    };
    let banks = |count: usize| {
        let banks = vec![format!("\"{OWN}\""); 1]
            .into_iter()
            .chain((1..count).map(|at| format!("\"staging:x{at}\"")));
        format!(r#"{{"query":"x","banks":[{}]}}"#, banks.collect::<Vec<_>>().join(","))
    };
    let mut arrived = 0;
    for (row, body, reason) in [
        ("a body as long as may be", padded(2_000_000), None),
        ("a longer one", padded(2_000_001), Some("body_too_large")),
        ("as deep as may be", nested(63), None),
        ("deeper", nested(64), Some("body_malformed")),
        ("2000 deep", nested(2000), Some("body_malformed")),
        ("many keys", keys(90_000), None),
        ("too many keys", keys(100_000), Some("body_malformed")),
        ("as many banks as may be, not all one's own", banks(64), Some("foreign_bank")),
        ("too many banks", banks(65), Some("bank_malformed")),
    ] {
        for framing in [ClientFraming::Length, ClientFraming::Chunked] {
            let started = Instant::now();
            let answer = scene
                .send_honest("sandbox-b", ClientRequest::post("/v1/recall", &body).with_framing(framing));
            match reason {
                None => {
                    assert_eq!(answer.status, 200, "{row}: {}", answer.text());
                    arrived += 1;
                }
                Some(reason) => scene.assert_refused(row, &answer, reason, arrived),
            }
            assert!(started.elapsed() < DEADLINE, "{row} takes long");
        }
    }
    // Announced and never sent: nobody waits for it.
    let mut client = scene.connect("sandbox-b");
    let ask = ClientRequest::recall(OWN)
        .with_framing(ClientFraming::Own)
        .with_field("Content-Length", "99999999999");
    client.send_bytes(
        &ask.with_field("Sandbox-Identity", &scene.token("sandbox-b")).encode(&scene.service_host()),
    );
    scene.assert_refused("64 announced", &client.read_response().unwrap(), "body_too_large", arrived);
}

// proves: limits.memory_body_seconds, limits.memory_answer_seconds
#[test]
fn p17_attack_65_a_body_that_does_not_come_is_not_waited_for() {
    let limits = "memory_body_seconds = 1\nmemory_answer_seconds = 2\n";
    let scene = MemoryScene::with_setup(MemorySetup { limits, ..MemorySetup::default() });
    let token = scene.token("sandbox-b");
    let stalled =
        ClientRequest::recall(OWN).with_framing(ClientFraming::Own).with_field("Content-Length", "1000");
    let stalled = stalled.with_field("Sandbox-Identity", &token);
    for (row, ask) in [
        ("65 stalled in the body", stalled.clone()),
        ("65 stalled after the head", stalled.clone().with_body(b"")),
        (
            "65 chunks that never end",
            ClientRequest::recall(OWN)
                .with_framing(ClientFraming::Own)
                .with_body(b"5\r\n{\"que\r\n")
                .with_field("Transfer-Encoding", "chunked")
                .with_field("Sandbox-Identity", &token),
        ),
    ] {
        let mut client = scene.connect("sandbox-b");
        client.send_bytes(&ask.encode(&scene.service_host()));
        let answer = client.read_response().expect(row);
        scene.assert_refused(row, &answer, "body_late", 0);
        assert_eq!(answer.status, 408, "{row}");
    }
    let mut client = scene.connect("sandbox-b");
    client.send_bytes(
        &stalled.clone().with_body(b"").with_field("Expect", "100-continue").encode(&scene.service_host()),
    );
    assert_eq!(client.read_any_response().unwrap().status, 100);
    scene.assert_refused("65 expected, never sent", &client.read_response().unwrap(), "body_late", 0);
    let expecting = ClientRequest::recall(OWN)
        .with_field("Expect", "100-continue")
        .with_field("Sandbox-Identity", &token);
    let bytes = expecting.encode(&scene.service_host());
    let (head, body) = bytes.split_at(bytes.len() - expecting.body.as_ref().unwrap().len());
    let mut client = scene.connect("sandbox-b");
    client.send_bytes(head);
    assert_eq!(client.read_any_response().unwrap().status, 100);
    client.send_bytes(body);
    assert_eq!(client.read_response().unwrap().status, 200);
    let slow = format!(r#"{{"query":"strange:slow","bank_id":"{OWN}"}}"#);
    let answer = scene.send_honest("sandbox-b", ClientRequest::post("/v1/recall", &slow));
    scene.assert_refused("a service that does not answer", &answer, "upstream_timeout", 2);
}
