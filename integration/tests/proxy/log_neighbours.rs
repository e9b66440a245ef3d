//! One sandbox does not cost another its log (P20): whatever it does to the log's disk and places, the other is served.

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use integration::sandbar;
use serde_json::Value;

use super::client::{connect_tcp, send_text};
use super::scene::{ProxyScene, ProxySetup, record_host, wait_until};

const PROXY_ADDRESS: &str = "10.77.0.1:3128";

fn scene_with(log_keys: &str) -> ProxyScene {
    let setup = ProxySetup { sandboxes: 2, log_keys: log_keys.to_owned(), ..ProxySetup::default() };
    ProxyScene::with_setup(setup)
}

/// A client of the first sandbox that uses a connection as long as it lasts.
struct Requester<'a> {
    scene: &'a ProxyScene,
    stream: Option<TcpStream>,
}

impl Requester<'_> {
    /// Sends a request; the head of the answer and its body.
    fn get(&mut self, url: &str) -> (String, String) {
        let mut stream = self.stream.take().unwrap_or_else(|| connect_tcp(self.scene, 0, PROXY_ADDRESS));
        let host = url.split('/').nth(2).unwrap();
        send_text(&mut stream, &format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut one = [0];
            stream.read_exact(&mut one).unwrap();
            head.push(one[0]);
        }
        let head = String::from_utf8(head).unwrap();
        let length = field(&head, "content-length").and_then(|text| text.parse().ok());
        let mut body = vec![0; length.unwrap_or_default()];
        stream.read_exact(&mut body).unwrap();
        let closes = field(&head, "connection").is_some_and(|value| value == "close");
        self.stream = Some(stream).filter(|_| !closes && length.is_some());
        (head, String::from_utf8_lossy(&body).into_owned())
    }
}

fn field(head: &str, name: &str) -> Option<String> {
    let mut lines = head.lines().filter_map(|line| line.split_once(": "));
    lines.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim().to_owned())
}

fn serves_neighbour(scene: &ProxyScene) {
    let got = scene.curl_in(1, &["-x", "http://10.77.1.1:3128", "http://open.example/neighbour"]);
    assert_eq!(got.status, 200, "the neighbour is served: {got:?}");
    assert_eq!(scene.admin_request("GET", "/ready").unwrap().0, 200);
}

fn log_size(scene: &ProxyScene) -> u64 {
    let segments = audit::list_segments(&scene.log_dir()).unwrap();
    segments.iter().map(|(_, path)| fs::metadata(path).unwrap().len()).sum()
}

fn log_usage(scene: &ProxyScene) -> Value {
    let (_, status) = scene.admin_request("GET", "/status").unwrap();
    serde_json::from_str::<Value>(&status).unwrap()["log"]["usage"].clone()
}

#[test]
fn p20_a_flood_of_refusals_is_folded_and_the_neighbour_is_served() {
    const FLOOD: usize = 4000;
    let mut scene = scene_with("max_bytes = 8388608");
    let started = Instant::now();
    let done = AtomicBool::new(false);
    let (ids, served) = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let mut requester = Requester { scene: &scene, stream: None };
            let path = "x".repeat(1500);
            let ids: HashSet<String> = (0..FLOOD)
                .map(|_| {
                    let (head, _) = requester.get(&format!("http://open.example:8080/{path}"));
                    assert!(head.starts_with("HTTP/1.1 403"), "{head}");
                    field(&head, "sandbar-record").unwrap()
                })
                .collect();
            done.store(true, Ordering::Relaxed);
            ids
        });
        let mut served = 0;
        while !done.load(Ordering::Relaxed) && !flood.is_finished() {
            serves_neighbour(&scene);
            served += 1;
        }
        (flood.join().unwrap(), served)
    });
    let seconds = started.elapsed().as_secs_f64();
    let pending: Value = serde_json::from_str(&scene.admin_request("GET", "/pending").unwrap().1).unwrap();
    assert_eq!(pending["pending"][0]["count"], FLOOD, "{pending}");
    let metrics = scene.admin_request("GET", "/metrics").unwrap().1;
    let counted = format!("sandbar_decisions_total{{reason=\"port_not_listed\",how=\"refused\"}} {FLOOD}");
    assert!(metrics.contains(&counted), "{metrics}");
    let all = scene.stop();
    let denied: Vec<&Value> =
        all.iter().filter(|record| record["status_detail"] == "port_not_listed").collect();
    let folded = |record: &Value| record["unmapped"]["sandbar"]["folded"].as_u64().unwrap_or_default();
    let total: u64 = denied.iter().map(|record| 1 + folded(record)).sum();
    assert_eq!(total, FLOOD as u64, "exact, in {} records", denied.len());
    let known: HashSet<&str> =
        denied.iter().filter_map(|r| r["metadata"]["correlation_uid"].as_str()).collect();
    assert!(ids.iter().all(|id| known.contains(id.as_str())), "every id that a client got is in the log");
    let written: usize = denied.iter().map(|record| record.to_string().len()).sum();
    // Half a megabyte at once, then 64 KiB and a summary or two a second.
    let most = (1 << 20) + seconds as usize * (100 << 10);
    assert!(written < most, "{written} bytes in {seconds} s");
    assert!(served > 0);
    assert_eq!(scene.origin.requests().len(), served, "nothing else arrived");
    let query = sandbar().args(["log", "query", "--json"]).arg(scene.log_dir()).output().unwrap();
    let sums: Value = serde_json::from_slice(&query.stdout).unwrap();
    assert_eq!(sums["reasons"][0]["attempts"], FLOOD, "{sums}");
}

// proves: log.max_bytes
#[test]
fn p20_a_sandbox_that_used_up_its_part_of_the_log_is_refused_alone() {
    let mut scene = scene_with("max_bytes = 1048576");
    let mut requester = Requester { scene: &scene, stream: None };
    let (mut passed, mut refused, mut in_a_row) = (0, 0, 0);
    // An outcome needs less than was reserved for it, so a few requests still pass after the first refusal.
    let (head, body) = loop {
        let (head, body) = requester.get("http://open.example/a");
        match head.starts_with("HTTP/1.1 200") {
            true => (passed, in_a_row) = (passed + 1, 0),
            false => (refused, in_a_row) = (refused + 1, in_a_row + 1),
        }
        assert!(passed < 5000, "its part is never used up");
        if in_a_row == 50 {
            break (head, body);
        }
    };
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    assert_eq!(field(&head, "sandbar-reason").as_deref(), Some("log_quota"), "{body}");
    assert!(body.contains("Ask the operator"), "{body}");
    assert!(passed > 50, "{passed}");
    let arrived = scene.origin.requests().len();
    for _ in 0..500 {
        assert!(requester.get("http://open.example/a").0.starts_with("HTTP/1.1 503"));
    }
    assert_eq!(scene.origin.requests().len(), arrived, "nothing left");
    for _ in 0..20 {
        serves_neighbour(&scene);
    }
    let usage = log_usage(&scene);
    let bytes = |name: &str| usage["sandboxes"][name]["bytes"].as_u64().unwrap();
    assert!(bytes("box-0") > usage["share"].as_u64().unwrap(), "{usage}");
    assert!(bytes("box-1") < usage["share"].as_u64().unwrap(), "{usage}");
    assert!(usage["percent"].as_u64().unwrap() < 100, "{usage}");
    assert!(log_size(&scene) < 1 << 20);
    let shown = sandbar().args(["status", "-c"]).arg(scene.config_path()).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("of 1048576 bytes of log") && shown.contains("`box-0`"), "{shown}");
    drop(requester);
    let all = scene.stop();
    let recorded = all.iter().filter(|record| record["status_detail"] == "log_quota");
    let total: u64 =
        recorded.map(|r| 1 + r["unmapped"]["sandbar"]["folded"].as_u64().unwrap_or_default()).sum();
    assert_eq!(total, refused + 500, "folded to the bone, and exact");
    // A restart knows what is used, but for the little that was charged too much.
    scene.start();
    let mut requester = Requester { scene: &scene, stream: None };
    let again =
        (0..passed).take_while(|_| requester.get("http://open.example/a").0.starts_with("HTTP/1.1 200"));
    assert!(again.count() < passed / 4);
    serves_neighbour(&scene);
}

// proves: log.open_decisions
#[test]
fn p20_requests_that_hang_take_only_their_sandboxs_places_in_the_log() {
    let scene = scene_with("open_decisions = 32");
    let mut held = Vec::new();
    let refused = loop {
        let mut stream = connect_tcp(&scene, 0, PROXY_ADDRESS);
        let hangs = scene.origin.requests().len();
        send_text(&mut stream, "GET http://open.example/hang HTTP/1.1\r\nHost: open.example\r\n\r\n");
        // Either it arrives, and hangs, or it is answered.
        stream.set_nonblocking(true).unwrap();
        let mut answer = vec![0; 4096];
        let answered = wait_until("it hangs or is refused", || match stream.read(&mut answer) {
            Ok(count) => Some(Some(String::from_utf8_lossy(&answer[..count]).into_owned())),
            Err(_) => (scene.origin.requests().len() > hangs).then_some(None),
        });
        match answered {
            None => held.push(stream),
            Some(answer) => break answer,
        }
        assert!(held.len() <= 24, "its share of 8, and the common 16");
    };
    assert!(held.len() >= 20, "{} are open", held.len());
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    for part in ["quota_exhausted", "open decisions in the log", "`box-0`", "`open_decisions` under `[log]`"]
    {
        assert!(refused.contains(part), "{refused}");
    }
    scene.wait_for_record("the refusal", |record| {
        record["status_detail"] == "quota_exhausted" && record_host(record) == "open.example"
    });
    for _ in 0..5 {
        serves_neighbour(&scene);
    }
    drop(held);
    wait_until("places are given back", || {
        let (head, _) = Requester { scene: &scene, stream: None }.get("http://open.example/again");
        head.starts_with("HTTP/1.1 200").then_some(())
    });
}

// proves: log.retention, log.segment_bytes, log.compress, log.query_strings
#[test]
fn p8_compressed_segments_verify_are_read_and_expire() {
    let keys = "segment_bytes = 65536\ncompress = true\nquery_strings = true\ndurability = \"disk\"";
    let mut scene = scene_with(keys);
    let mut requester = Requester { scene: &scene, stream: None };
    let compressed = |scene: &ProxyScene| -> Vec<PathBuf> {
        let segments = audit::list_segments(&scene.log_dir()).unwrap().into_iter().map(|(_, path)| path);
        segments.filter(|path| path.extension().is_some_and(|extension| extension == "zst")).collect()
    };
    let mut sent = 0;
    wait_until("some segments are compressed", || {
        assert!(requester.get(&format!("http://open.example/n?number={sent}")).0.starts_with("HTTP/1.1 200"));
        sent += 1;
        (compressed(&scene).len() >= 3).then_some(())
    });
    drop(requester);
    let all = scene.stop();
    let decided =
        |record: &&Value| record["unmapped"]["sandbar"]["stage"] == "decision" && record["class_uid"] == 4002;
    let queries: Vec<&str> = all
        .iter()
        .filter(decided)
        .filter_map(|r| r["http_request"]["url"]["query_string"].as_str())
        .collect();
    assert_eq!(queries.len(), sent, "nothing is missing");
    assert_eq!(queries.last().copied(), Some(&*format!("number={}", sent - 1)));
    let output = sandbar().args(["log", "query", "--json"]).arg(scene.log_dir()).output().unwrap();
    let sums: Value = serde_json::from_slice(&output.stdout).unwrap();
    let hosts = sums["hosts"].as_array().unwrap().iter();
    let allowed: u64 =
        hosts.filter(|row| row["host"] == "open.example").map(|r| r["allowed"].as_u64().unwrap()).sum();
    assert!(allowed >= sent as u64, "{sums}");
    let tail = sandbar().args(["log", "tail", "--json", "--reason", "allowed"]).arg(scene.log_dir()).output();
    assert!(!tail.unwrap().stdout.is_empty());

    // Everything closed is older than the retention now, and goes; what is left verifies.
    let old = SystemTime::now() - Duration::from_secs(7200);
    for (_, path) in audit::list_segments(&scene.log_dir()).unwrap() {
        fs::File::options().append(true).open(path).unwrap().set_modified(old).unwrap();
    }
    let text = fs::read_to_string(scene.config_path()).unwrap();
    fs::write(scene.config_path(), text.replace("compress = true", "compress = true\nretention = \"1h\""))
        .unwrap();
    scene.start();
    wait_until("expired segments are removed", || compressed(&scene).is_empty().then_some(()));
    assert_eq!(scene.curl(&["http://open.example/after"]).status, 200);
    let left = scene.stop();
    assert!(left.iter().any(|record| record["unmapped"]["sandbar"]["event"] == "segments_removed"));
    assert!(left[0]["metadata"]["sequence"].as_u64().unwrap() > 1);
}

#[test]
fn a_log_that_cannot_hold_the_shares_is_not_served() {
    let keys = "max_bytes = 1048576\nsegment_bytes = 1048576";
    let setup = ProxySetup { sandboxes: 2, log_keys: keys.to_owned(), ..ProxySetup::default() };
    let (status, said) = ProxyScene::prepare(setup).expect_start_refused();
    assert_ne!(status, Some(0));
    assert!(said.contains("4 segments x 1048576 = 4194304, but `max_bytes` is 1048576"), "{said}");
}
