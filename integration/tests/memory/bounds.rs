//! Attacks 39, 64 and 65, and every other bound: each is tried to exceed, and holds.

use std::time::Instant;

use super::client::{Ask, Framing};
use super::scene::{DEADLINE, Scene, Setup};

const OWN: &str = "staging:team-b";

#[test]
fn attacks_39_and_64_size_depth_and_number_are_bounded() {
    let scene = Scene::with(Setup { limits: "memory_body_bytes = 2000000\n", ..Setup::default() });
    let padded = |length: usize| {
        let start = format!(r#"{{"query":"x","bank_id":"{OWN}","pad":""#);
        let rest = length - start.len() - 2;
        format!("{start}{}\"}}", "p".repeat(rest))
    };
    let nested = |depth: usize| {
        format!(
            r#"{{"query":"x","bank_id":"{OWN}","n":{}{}}}"#,
            "[".repeat(depth),
            "]".repeat(depth)
        )
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
        for framing in [Framing::Length, Framing::Chunked] {
            let started = Instant::now();
            let answer = scene.honest("sandbox-b", Ask::post("/v1/recall", &body).framed(framing));
            match reason {
                None => {
                    assert_eq!(answer.status, 200, "{row}: {}", answer.text());
                    arrived += 1;
                }
                Some(reason) => scene.refused(row, &answer, reason, arrived),
            }
            assert!(started.elapsed() < DEADLINE, "{row} takes long");
        }
    }
    // Announced and never sent: nobody waits for it.
    let mut client = scene.client("sandbox-b");
    let ask = Ask::recall(OWN).framed(Framing::Own).with("Content-Length", "99999999999");
    client.say(&ask.with("Sandbox-Identity", &scene.token("sandbox-b")).bytes(&scene.host()));
    scene.refused("64 announced", &client.answer().unwrap(), "body_too_large", arrived);
}

#[test]
fn attack_65_a_body_that_does_not_come_is_not_waited_for() {
    let limits = "memory_body_seconds = 1\nmemory_answer_seconds = 2\n";
    let scene = Scene::with(Setup { limits, ..Setup::default() });
    let token = scene.token("sandbox-b");
    let stalled = Ask::recall(OWN).framed(Framing::Own).with("Content-Length", "1000");
    let stalled = stalled.with("Sandbox-Identity", &token);
    for (row, ask) in [
        ("65 stalled in the body", stalled.clone()),
        ("65 stalled after the head", stalled.clone().body(b"")),
        (
            "65 chunks that never end",
            Ask::recall(OWN)
                .framed(Framing::Own)
                .body(b"5\r\n{\"que\r\n")
                .with("Transfer-Encoding", "chunked")
                .with("Sandbox-Identity", &token),
        ),
    ] {
        let mut client = scene.client("sandbox-b");
        client.say(&ask.bytes(&scene.host()));
        let answer = client.answer().expect(row);
        scene.refused(row, &answer, "body_late", 0);
        assert_eq!(answer.status, 408, "{row}");
    }
    let mut client = scene.client("sandbox-b");
    client.say(&stalled.clone().body(b"").with("Expect", "100-continue").bytes(&scene.host()));
    assert_eq!(client.any_answer().unwrap().status, 100);
    scene.refused("65 expected, never sent", &client.answer().unwrap(), "body_late", 0);
    let expecting =
        Ask::recall(OWN).with("Expect", "100-continue").with("Sandbox-Identity", &token);
    let bytes = expecting.bytes(&scene.host());
    let (head, body) = bytes.split_at(bytes.len() - expecting.body.as_ref().unwrap().len());
    let mut client = scene.client("sandbox-b");
    client.say(head);
    assert_eq!(client.any_answer().unwrap().status, 100);
    client.say(body);
    assert_eq!(client.answer().unwrap().status, 200);
    let slow = format!(r#"{{"query":"strange:slow","bank_id":"{OWN}"}}"#);
    let answer = scene.honest("sandbox-b", Ask::post("/v1/recall", &slow));
    scene.refused("a service that does not answer", &answer, "upstream_timeout", 2);
}
