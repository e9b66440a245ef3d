//! Places and bytes of the access log.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;

use crate::attacker::{read_head, take, within};
use crate::scene::{Scene, Setup};

#[test]
fn p20_requests_without_an_answer_take_open_decisions() {
    let scene = Scene::new();
    let (held, failed) = scene.attack(
        "700 x 100 requests without an answer",
        take(700, 8, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut streams = attacker.open_http2("origin.test:8003").await?;
                for _ in 0..100 {
                    streams.start("GET", "/hang").await?;
                }
                Ok(streams)
            }
        }),
    );
    println!("{} connections with 100 requests each ({failed} not)", held.len());
    scene.release(held);
    scene.assert_ready("while A holds its decisions");
}

/// The same with heads that are 300 bytes on the wire and nearly `head_bytes` when they are read.
#[test]
fn p20_large_heads_of_requests_without_an_answer() {
    let scene = Scene::new();
    let (held, failed) = scene.attack(
        "200 x 100 requests with heads of 30 KB, without an answer",
        take(200, 8, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut streams = attacker.open_http2("origin.test:8003").await?;
                let value = http::HeaderValue::from_str(&"y".repeat(3900)).unwrap();
                for _ in 0..7 {
                    streams.fields.append("x-large", value.clone());
                }
                for _ in 0..100 {
                    streams.start("GET", "/hang").await?;
                }
                Ok(streams)
            }
        }),
    );
    println!("{} connections with 100 requests each ({failed} not)", held.len());
    scene.release(held);
}

/// Connections until there are no more, then streams on each: they are refused for want of quota, and nothing of them may
/// wait for a window that never comes.
#[test]
fn p20_streams_without_quota_hold_nothing() {
    let scene = Scene::new();
    let held =
        scene.attack("connections until there are no more, 100 streams without a window on each", async {
            let open = |_| {
                let attacker = scene.attacker.clone();
                async move { attacker.open_http2_with_window("origin.test:8003", 0).await }
            };
            let (mut held, _) = take(1000, 8, open).await;
            let value = http::HeaderValue::from_str(&"y".repeat(3900)).unwrap();
            for streams in &mut held {
                for _ in 0..4 {
                    streams.fields.append("x-large", value.clone());
                }
                for _ in 0..100 {
                    if streams.start("GET", "/hang").await.is_err() {
                        break;
                    }
                }
            }
            held
        });
    println!("{} connections", held.len());
    scene.release(held);
}

/// Denied requests of A's in a loop, on several connections, each as long a record as can be had.
async fn deny(scene: &Scene, duration: Duration) -> usize {
    let end = Instant::now() + duration;
    let (counts, _) = take(8, 8, |_| {
        let attacker = scene.attacker.clone();
        async move {
            let path = "x".repeat(3800);
            let mut count = 0;
            while Instant::now() < end {
                let Ok(mut stream) = attacker.connect().await else { continue };
                loop {
                    let request =
                        format!("GET http://denied.test/{path} HTTP/1.1\r\nHost: denied.test\r\n\r\n");
                    if Instant::now() > end || stream.write_all(request.as_bytes()).await.is_err() {
                        break;
                    }
                    if within(read_head(&mut stream)).await.is_err() {
                        break;
                    }
                    count += 1;
                }
            }
            Ok(count)
        }
    })
    .await;
    counts.iter().sum()
}

#[test]
fn p20_denials_fill_the_log() {
    let scene = Scene::with_setup(Setup { log_megabytes: Some(16), ..Setup::default() });
    let before = scene.log_bytes();
    let (mut denied, started) = (0, Instant::now());
    scene.attack("denials in a loop, 16 MB for the log", async {
        denied = deny(&scene, Duration::from_secs(8)).await;
    });
    let (written, took) = (scene.log_bytes() - before, started.elapsed().as_secs_f64());
    println!(
        "{denied} denials ({:.0}/s), {:.2} MB of log ({:.2} MB/s)",
        denied as f64 / took,
        written as f64 / 1e6,
        written as f64 / 1e6 / took
    );
    scene.assert_ready("after the denials");
}

/// Connections beyond the limit are refused one by one, and each refusal is a record too.
#[test]
fn p20_refused_connections_fill_the_log() {
    let limits = "connections_per_sandbox = 20\n".to_owned();
    let scene = Scene::with_setup(Setup { limits, log_megabytes: Some(16), ..Setup::default() });
    let before = scene.log_bytes();
    let started = Instant::now();
    let held = scene.attack("connections beyond the limit in a loop, 16 MB for the log", async {
        let (held, _) = take(20, 20, |_| {
            let attacker = scene.attacker.clone();
            async move { attacker.connect().await }
        })
        .await;
        let refused = Arc::new(AtomicUsize::new(0));
        take(20_000, 64, |_| {
            let (attacker, refused) = (scene.attacker.clone(), refused.clone());
            async move {
                let mut stream = attacker.connect().await?;
                let request = b"GET http://origin.test:8001/hello HTTP/1.1\r\nHost: origin.test:8001\r\n\r\n";
                stream.write_all(request).await?;
                let head = within(read_head(&mut stream)).await;
                refused.fetch_add(usize::from(!head?.starts_with("HTTP/1.1 200")), Ordering::SeqCst);
                Ok(())
            }
        })
        .await;
        (held, refused.load(Ordering::SeqCst))
    });
    let (written, took) = (scene.log_bytes() - before, started.elapsed().as_secs_f64());
    println!(
        "{} refused, {:.2} MB of log ({:.2} MB/s)",
        held.1,
        written as f64 / 1e6,
        written as f64 / 1e6 / took
    );
    scene.assert_ready("after the refusals");
}
