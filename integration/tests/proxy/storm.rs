//! Long lists rewritten again and again under load: no request that is allowed fails, and none that is denied
//! passes (P9).

use std::fmt::Write as _;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::client::{client_config, connect_tls, read_head, send_text, try_connect_tls};
use super::reload::generation;
use super::scene::{ProxyScene, ProxySetup};

/// The bench does this with a million, by a release build.
const LIST_SIZE: usize = 100_000;
const LOAD_DURATION: Duration = Duration::from_secs(12);
const REWRITE_INTERVAL: Duration = Duration::from_millis(200);

const POLICY: &str = r#"
name = "p"
[[allow]]
name  = "web"
hosts = ["open.example"]
[[allow]]
name       = "list"
hosts_file = "list.txt"
"#;

fn host_list(version: &str) -> String {
    let mut list = format!("other.example\n{version}.example\n");
    for at in 0..LIST_SIZE {
        writeln!(list, "host-{at}.{version}.list.example").unwrap();
    }
    list
}

#[test]
fn p9_a_long_list_rewritten_under_load_fails_no_request_and_opens_nothing() {
    let mut scene = ProxyScene::prepare(ProxySetup { policy: POLICY.to_owned(), ..ProxySetup::default() });
    let path = scene.dir.path().join("policies/list.txt");
    let (one, other) = (host_list("one"), host_list("other"));
    fs::write(&path, &one).unwrap();
    scene.start();
    let config = client_config(&scene);
    let (over, passed, slowest) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let (scene, config) = (&scene, &config);
    let (over, passed, slowest) = (&over, &passed, &slowest);
    std::thread::scope(|threads| {
        // Both names are always allowed, one by the policy and one by the list that changes.
        for (name, to) in [("open.example", "93.184.216.34:443"), ("other.example", "93.184.216.35:443")] {
            threads.spawn(move || {
                let mut kept = connect_tls(scene, 0, to, config, name);
                while !over.load(Ordering::Relaxed) {
                    let mut fresh = connect_tls(scene, 0, to, config, name);
                    for stream in [&mut kept, &mut fresh] {
                        let started = Instant::now();
                        send_text(stream, &format!("GET / HTTP/1.1\r\nHost: {name}\r\n\r\n"));
                        let said = read_head(stream);
                        assert!(said.starts_with("HTTP/1.1 200"), "{name}: {said}");
                        let took = usize::try_from(started.elapsed().as_micros()).unwrap();
                        slowest.fetch_max(took, Ordering::Relaxed);
                        passed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        threads.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                let denied = try_connect_tls(scene, 0, "93.184.216.99:443", config, "denied.example");
                assert!(denied.is_err(), "denied.example was let through");
                let got = scene.curl(&["https://open.example/", "https://denied.example/"]);
                assert!(got.exit != 0 && got.text().contains("hello"), "{got:?}");
            }
        });
        let ends = Instant::now() + LOAD_DURATION;
        for text in [&other, &one].into_iter().cycle() {
            let next = Instant::now() + REWRITE_INTERVAL;
            fs::write(&path, text).unwrap(); // in place: whoever reads meanwhile sees half of it
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            if Instant::now() > ends {
                break;
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    let passed = passed.load(Ordering::Relaxed);
    let slowest = Duration::from_micros(slowest.load(Ordering::Relaxed) as u64);
    println!("{passed} requests, {} loads, slowest {slowest:?}", generation(scene) - 1);
    assert!(passed > 100 && generation(scene) > 3, "{passed}, {}", generation(scene));
    let denied = |name: Option<&str>| name == Some("denied.example");
    assert!(!scene.origin.requests().iter().any(|seen| denied(seen.sni.as_deref())));
    assert!(!scene.names.queried_names().iter().any(|name| name == "denied.example"));
    let revoked = |record: &serde_json::Value| record["unmapped"]["sandbar"]["ending"] == "revoked";
    assert!(!scene.records().iter().any(revoked), "nothing that stayed allowed was cut");
}
