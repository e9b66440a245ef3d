//! Answers that A asks for and does not read.

use std::time::Duration;

use tokio::io::AsyncWriteExt;

use crate::attacker::{Attacker, HeldStreams, take};
use crate::scene::Scene;

/// Connections to one HTTP/2 origin that are few: each carries a hundred requests or more.
const FEW: usize = 8;

/// A hundred downloads on one connection, of which nothing but heads is read.
async fn start_downloads(attacker: Attacker, target: &'static str) -> std::io::Result<HeldStreams> {
    let mut streams = attacker.open_http2(target).await?;
    for _ in 0..100 {
        if streams.start("GET", "/large").await.is_err() {
            break;
        }
    }
    streams.read_heads(Duration::from_secs(2)).await;
    Ok(streams)
}

#[test]
fn p20_downloads_from_an_http2_origin_that_are_not_read() {
    let scene = Scene::new();
    for (connections, what) in [
        (1, "100 unread downloads of 10 MB, HTTP/2 origin"),
        (10, "10 x 100 unread downloads of 10 MB, HTTP/2 origin"),
    ] {
        let (held, outcome) = scene.observe(
            what,
            take(connections, 10, |_| start_downloads(scene.attacker.clone(), "origin.test:8003")),
        );
        let most = scene.origins.arrivals.most(8003);
        println!("{what}: {most} connections to the origin at a time");
        outcome.assert_unharmed();
        assert!(most <= FEW * connections, "{what}: {most} connections to an HTTP/2 origin");
        drop(held);
    }
}

#[test]
fn p20_downloads_from_an_http1_origin_that_are_not_read() {
    let scene = Scene::new();
    let held = scene.attack(
        "10 x 100 unread downloads of 10 MB, HTTP/1 origin",
        take(10, 10, |_| start_downloads(scene.attacker.clone(), "origin.test:8002")),
    );
    println!("{} connections to the HTTP/1 origin at a time", scene.origins.arrivals.most(8002));
    drop(held);
}

#[test]
fn p20_downloads_by_http1_that_are_not_read() {
    let scene = Scene::new();
    let held = scene.attack(
        "400 unread downloads of 10 MB, HTTP/1 client, HTTP/2 origin",
        take(400, 20, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut stream = attacker.open_tls("origin.test:8003", "http/1.1").await?;
                stream.write_all(b"GET /large HTTP/1.1\r\nHost: origin.test:8003\r\n\r\n").await?;
                Ok(stream)
            }
        }),
    );
    drop(held);
}
