//! Attacks 62 and 80: two sandboxes at once over one listener, told apart by their path and by nothing else.

use serde_json::Value;

use super::client::{ClientRequest, ClientResponse, SandboxClient};
use super::scene::{MemoryScene, SANDBOXES};

const AT_ONCE: usize = 50;

#[test]
fn p12_attacks_62_and_80_fifty_at_once_do_not_mix() {
    let scene = MemoryScene::new();
    let answers: Vec<(usize, ClientResponse)> = std::thread::scope(|scope| {
        let scene = &scene;
        let one = |number: usize| {
            move || {
                let who = number % 2;
                let (sandbox, ..) = SANDBOXES[who];
                let own = ["staging:team-a", "staging:team-b"][who];
                let token = scene.token(sandbox);
                let from = format!("127.0.1.{}", who + 1);
                let listener = scene.listener("shared");
                let mut client =
                    SandboxClient::connect(listener, Some(&from), &scene.service_host(), &scene.trust);
                let body = format!(r#"{{"content":"note {number} of {sandbox}","bank_id":"{own}"}}"#);
                let kept = client
                    .send(&ClientRequest::post("/v1/retain", &body).with_field("Sandbox-Identity", &token));
                assert_eq!(kept.status, 200, "{number}: {}", kept.text());
                let body = format!(r#"{{"query":"note","max_results":100,"bank_id":"{own}"}}"#);
                (
                    number,
                    client.send(
                        &ClientRequest::post("/v1/recall", &body).with_field("Sandbox-Identity", &token),
                    ),
                )
            }
        };
        let running: Vec<_> = (0..AT_ONCE).map(|number| scope.spawn(one(number))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (number, answer) in &answers {
        assert_eq!(answer.status, 200, "{number}: {}", answer.text());
        let (own, other) = [("sandbox-a", "sandbox-b"), ("sandbox-b", "sandbox-a")][number % 2];
        let text = answer.text();
        assert!(text.contains(&format!("of {own}")) && !text.contains(other), "{number}: {text}");
    }
    assert_eq!(scene.arrived_requests().len(), 2 * AT_ONCE);
    for seen in scene.arrived_requests() {
        let headers = seen["headers"].to_string();
        let body = seen["body"].as_str().unwrap();
        let who = if body.contains("team-a") { "agent:sandbox-a" } else { "agent:sandbox-b" };
        assert!(headers.contains(who), "{headers} {body}");
    }
    let told: Vec<Value> = scene.records().into_iter().filter(|record| record["class_uid"] == 6003).collect();
    let decisions = told.iter().filter(|record| record["unmapped"]["sandbar"]["stage"] == "decision");
    assert_eq!(decisions.count(), 2 * AT_ONCE);
    for record in &told {
        let bank = record["resources"][0]["uid"].as_str().unwrap();
        let who = if bank == "staging:team-a" { "sandbox-a" } else { "sandbox-b" };
        assert_eq!(record["actor"]["app_uid"], who, "{record}");
        assert!(record["actor"]["user"]["uid"].as_str().unwrap().ends_with(who), "{record}");
        assert_eq!(record["unmapped"]["sandbar"]["channel"]["kind"], "source_address");
    }
}
