//! Bodies and answers that the memory guard holds whole.

use crate::attacker::take;
use crate::honest::Kind;
use crate::scene::{Scene, Setup};

fn scene_with_memory() -> Scene {
    Scene::with_setup(Setup { kinds: vec![Kind::Tls, Kind::Tunnel, Kind::Memory], ..Setup::default() })
}

#[test]
fn p20_unfinished_bodies_for_the_memory_service() {
    let scene = scene_with_memory();
    let attacker = scene.attacker.clone();
    let held = scene.attack("6 x 100 memory bodies of 4 MB without end", async {
        take(6, 2, |_| {
            let attacker = attacker.clone();
            async move {
                let mut streams = attacker.open_http2("memory.test:8007").await?;
                for _ in 0..100 {
                    if streams.start("POST", "/v1/recall").await.is_err() {
                        break;
                    }
                }
                streams.pour(4_000_000).await;
                Ok(streams)
            }
        })
        .await
    });
    drop(held);
}

#[test]
fn p20_answers_of_the_memory_service_that_are_not_read() {
    let scene = scene_with_memory();
    let attacker = scene.attacker.clone();
    let (held, outcome) = scene.observe("60 memory answers of 15 MB that are not read", async {
        take(60, 20, |_| {
            let attacker = attacker.clone();
            async move {
                use tokio::io::AsyncWriteExt;
                let mut stream = attacker.open_tls("memory.test:8007", "http/1.1").await?;
                let body = r#"{"query":"large","bank_id":"staging:team"}"#;
                let request = format!(
                    "POST /v1/recall HTTP/1.1\r\nHost: memory.test:8007\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                );
                stream.write_all(request.as_bytes()).await?;
                Ok(stream)
            }
        })
        .await
    });
    drop(held);
    outcome.assert_served(); // the guard reads megabytes of JSON, in a build that is not optimised
}
