//! Bodies that an origin does not read.

use crate::attacker::take;
use crate::scene::Scene;

fn attack_with_uploads(what: &str, target: &'static str, connections: usize, streams_each: usize) {
    let scene = Scene::new();
    let held = scene.attack(
        what,
        take(connections, 20, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut streams = attacker.open_http2(target).await?;
                for _ in 0..streams_each {
                    if streams.start("POST", "/sink").await.is_err() {
                        break;
                    }
                }
                streams.pour(2 << 20).await;
                Ok(streams)
            }
        }),
    );
    drop(held);
}

#[test]
fn p20_uploads_to_an_http2_origin_without_a_window() {
    attack_with_uploads("150 x 10 uploads, HTTP/2 origin without a window", "origin.test:8005", 150, 10);
}

#[test]
fn p20_uploads_to_an_http1_origin_that_does_not_read() {
    attack_with_uploads("150 x 10 uploads, HTTP/1 origin that does not read", "origin.test:8002", 150, 10);
}
