//! Heads of answers that are larger in memory than on the wire, or large on the wire already.

use tokio::io::AsyncWriteExt;

use crate::attacker::take;
use crate::scene::{Scene, wait_until};

/// Connections that ask for such a head and do not read it.
fn ask_without_reading(what: &str, target: &'static str, request: &'static str, count: usize) -> Scene {
    let scene = Scene::new();
    let held = scene.attack(
        what,
        take(count, 20, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut stream = attacker.open_tls(target, "http/1.1").await?;
                let request = format!("{request} HTTP/1.1\r\nHost: {target}\r\nContent-Length: 0\r\n\r\n");
                stream.write_all(request.as_bytes()).await?;
                Ok(stream)
            }
        }),
    );
    drop(held);
    scene
}

/// The same, then one connection that reads and is refused.
fn attack_with_heads(what: &str, target: &'static str, request: &'static str, count: usize) {
    let scene = ask_without_reading(what, target, request, count);
    let answer = scene.run(scene.attacker.request(target, request)).unwrap();
    assert_eq!(answer, (502, Some("answer_too_large".to_owned())), "{what}");
    wait_until("refusals are recorded", || (scene.count_records("answer_too_large") > 0).then_some(()));
}

#[test]
fn p20_heads_of_http2_answers_that_grow() {
    attack_with_heads("100 heads of 8 KB that become 16 MB", "origin.test:8005", "GET /", 100);
}

#[test]
fn p20_heads_of_http1_answers() {
    attack_with_heads("400 heads of 900 KB", "origin.test:8002", "GET /large-head", 400);
}

#[test]
fn p20_trailers_of_http2_answers_that_grow() {
    ask_without_reading("100 trailers of 8 KB that become 16 MB", "origin.test:8005", "POST /", 100);
}
