//! Budgets: what is counted, that nothing overshoots, that spent is told with when it refills, and that a restart
//! gives nothing back. Judged by what arrived in the world.

use std::io::{Read, Write};

use serde_json::Value;

use integration::{sandbar, text};

use super::client::connect_tcp;
use super::origin::ECHO;
use super::scene::{ProxyScene, ProxySetup, wait_until};

/// A policy whose sandbox and whose rule have these budgets.
fn budget_policy(sandbox: &str, rule: &str) -> String {
    format!(
        r#"
name = "p"
[budget]
{sandbox}
[[allow]]
name  = "web"
hosts = ["open.example", "tunnel.example"]
ports = [80, 443]
[allow.budget]
{rule}
[[allow]]
name  = "free"
hosts = ["other.example"]
ports = [80, 443]
[[allow]]
name  = "database"
hosts = ["db.example"]
tcp   = [5432]
"#
    )
}

fn start_scene(sandbox: &str, rule: &str) -> ProxyScene {
    ProxyScene::with_setup(ProxySetup { policy: budget_policy(sandbox, rule), ..ProxySetup::default() })
}

fn read_budgets(scene: &ProxyScene) -> Value {
    let told = sandbar().args(["budget", "--json", "-c"]).arg(scene.config_path()).output().unwrap();
    serde_json::from_slice(&told.stdout).unwrap_or_else(|_| panic!("{}", text(&told.stderr)))
}

fn connect_echo(scene: &ProxyScene) -> std::net::TcpStream {
    let args = ["+short", "+time=10", "+tries=2", "@10.77.0.1", "db.example", "A"];
    let output = scene.command_in(0, "dig").args(args).output().unwrap();
    connect_tcp(scene, 0, &format!("{}:{ECHO}", text(&output.stdout).trim()))
}

// proves: allow.budget.requests_per_hour
#[test]
fn requests_of_a_rule_are_counted_and_the_next_is_refused_with_when_it_refills() {
    let mut scene = start_scene("", "requests_per_hour = 3");
    for at in 0..3 {
        assert_eq!(scene.curl(&["https://open.example/"]).status, 200, "request {at}");
    }
    let got = scene.curl(&["-H", "Accept: application/json", "https://open.example/secret"]);
    assert_eq!(got.status, 403, "never 429, which clients try again: {got:?}");
    let said: Value = serde_json::from_str(&got.text()).unwrap();
    assert_eq!(said["error"]["reason"], "budget_spent");
    assert_eq!(said["error"]["rule"]["rule"], "web");
    let detail = said["error"]["detail"].as_str().unwrap();
    assert!(detail.contains("requests_per_hour = 3") && detail.contains("refills in 3"), "{detail}");
    assert_eq!(scene.origin.requests().len(), 3, "the refused one did not leave");
    assert_eq!(scene.curl(&["https://other.example/"]).status, 200, "another rule goes on");
    let asked = scene.names.queried_names().len();
    assert_eq!(scene.curl(&["https://open.example/secret"]).status, 403);
    assert_eq!(scene.names.queried_names().len(), asked, "nor was its name asked for");
    let record = scene.wait_for_refusal("budget_spent", "open.example");
    assert!(record["message"].as_str().unwrap().contains("refills in"), "{record}");
    let told = read_budgets(&scene);
    assert_eq!(told["sandboxes"][0]["rules"][0]["budgets"][0]["used"], 3, "{told}");
    scene.stop();
    scene.start();
    assert_eq!(scene.curl(&["https://open.example/"]).status, 403, "a restart gives nothing back");
    scene.signal("-KILL");
    scene.wait_for_exit();
    scene.start();
    assert_eq!(scene.curl(&["https://open.example/"]).status, 403, "nor does a crash");
}

// proves: budget.upload_bytes_per_hour
#[test]
fn uploads_are_counted_with_their_heads_and_never_overshoot() {
    let scene = start_scene("upload_bytes_per_hour = 20000", "");
    let body = "x".repeat(15_000);
    let got = scene.curl(&["--data-binary", &body, "https://open.example/echo"]);
    assert_eq!((got.status, got.body.len()), (200, 15_000));
    let got = scene.curl(&["--data-binary", &body, "https://other.example/echo"]);
    assert_eq!(got.status, 403, "{got:?}");
    let bodies = |host: &str| -> usize {
        let requests = scene.origin.requests();
        let there = requests.iter().filter(|one| one.field("host") == Some(host));
        there.map(|one| one.body.len()).sum()
    };
    assert_eq!(bodies("open.example"), 15_000);
    assert!(bodies("other.example") <= 5_000);
    // What is spelled out in a header leaves as well.
    let scene = self::start_scene("upload_bytes_per_hour = 2000", "");
    let header = format!("X-Leak: {}", "s".repeat(3000));
    let got = scene.curl(&["-H", &header, "https://open.example/"]);
    assert_eq!(got.status, 403, "{got:?}");
    let path = format!("https://open.example/{}", "s".repeat(3000));
    assert_eq!(scene.curl(&[&path]).status, 403);
    assert!(scene.origin.requests().is_empty(), "{:?}", scene.origin.requests());
    scene.wait_for_refusal("budget_spent", "open.example");
}

// proves: allow.budget.download_bytes_per_hour
#[test]
fn p10_a_download_is_cut_at_the_limit_over_both_versions_of_http() {
    for version in ["--http1.1", "--http2"] {
        let scene = start_scene("", "download_bytes_per_hour = 100000");
        let got = scene.curl(&[version, "https://open.example/bytes/3000000"]);
        // Refused if its head is not on its way yet, and else cut where it is.
        let cut = got.exit != 0 || got.status == 403;
        assert!(cut && got.exit != 28, "{version}: {} {} {}", got.exit, got.status, got.said);
        assert!(got.body.len() <= 100_000, "{version}: {}", got.body.len());
        let record = scene.wait_for_record("the cut", |record| {
            record["status_detail"] == "budget_spent" && record["traffic"].is_object()
        });
        assert!(record["traffic"]["bytes_in"].as_u64().unwrap() <= 100_000, "{record}");
        let got = scene.curl(&["https://other.example/bytes/300000"]);
        assert_eq!((got.status, got.body.len()), (200, 300_000), "{version}: another rule goes on");
    }
}

#[test]
fn what_is_said_before_an_answer_is_counted_too() {
    let scene = start_scene("", "download_bytes_per_hour = 20000");
    let args = ["--http1.1", "-i"];
    let got = scene.curl(&[&args[..], &["https://other.example/interim"]].concat());
    assert_eq!(got.status, 200, "where there is no budget it passes: {}", got.said);
    let got = scene.curl(&[&args[..], &["https://open.example/interim"]].concat());
    assert_ne!(got.status, 200, "{}", got.said);
    assert!(got.body.len() <= 20_000 + 2000, "with our own refusal: {}", got.body.len());
    scene.wait_for_refusal("budget_spent", "open.example");
}

#[test]
fn an_upgraded_connection_is_counted_both_ways() {
    let scene = start_scene("", "upload_bytes_per_hour = 5000");
    let upgrade = ["-N", "--http1.1", "-H", "Connection: Upgrade", "-H", "Upgrade: websocket"];
    let body = "x".repeat(20_000);
    let more = ["-T", "-", "--max-time", "20", "https://open.example/upgrade"];
    let mut curl = scene.command_in(0, "curl");
    curl.args(upgrade).args(more).stdin(std::process::Stdio::piped());
    let mut curl = curl.stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(curl.stdin.take().unwrap().write_all(body.as_bytes())); // it may be cut meanwhile
    let back = curl.wait_with_output().unwrap().stdout;
    assert!(back.len() <= 5000, "{}", back.len());
    scene.wait_for_record("the cut", |record| record["status_detail"] == "budget_spent");
}

#[test]
fn p10_a_raw_connection_passes_exactly_its_bytes_and_is_cut_when_there_are_more() {
    let scene = start_scene("upload_bytes_per_hour = 10000", "");
    let mut stream = connect_echo(&scene);
    let mut back = vec![0; 10_000];
    stream.write_all(&[7; 10_000]).unwrap();
    stream.read_exact(&mut back).unwrap();
    stream.write_all(&[7; 1]).unwrap();
    assert!(matches!(stream.read(&mut back), Ok(0) | Err(_)), "it is cut");
    let record = scene.wait_for_record("the cut", |record| record["status_detail"] == "budget_spent");
    assert_eq!(record["unmapped"]["sandbar"]["ending"], "revoked");
    assert_eq!(record["traffic"]["bytes_out"], 10_000);
    let arrived: usize = scene.origin.raw_connections().iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(arrived, 10_000, "to the byte");
}

#[test]
fn a_raw_connection_that_ends_with_its_budget_ends_well() {
    let scene = start_scene("upload_bytes_per_hour = 10000", "");
    let mut stream = connect_echo(&scene);
    stream.write_all(&[7; 10_000]).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert_eq!(back.len(), 10_000);
    scene.wait_for_record("its end", |record| {
        record["unmapped"]["sandbar"]["ending"] == "completed" && record["traffic"]["bytes_out"] == 10_000
    });
}

#[test]
fn parallel_uploads_share_one_budget_to_the_byte() {
    let scene = start_scene("upload_bytes_per_hour = 300000", "");
    let streams: Vec<_> = (0..6).map(|_| connect_echo(&scene)).collect();
    std::thread::scope(|scope| {
        for mut stream in streams {
            scope.spawn(move || {
                // Until it is cut; what comes back is read, or both sides would wait for each other.
                let mut read = stream.try_clone().unwrap();
                std::thread::spawn(move || std::io::copy(&mut read, &mut std::io::sink()));
                while stream.write_all(&[7; 10_000]).is_ok() {}
            });
        }
    });
    let sent = || {
        let records = scene.records();
        let ended = records.iter().filter(|one| one["status_detail"] == "budget_spent");
        let sent: Vec<u64> = ended.filter_map(|one| one["traffic"]["bytes_out"].as_u64()).collect();
        (sent.len() == 6).then(|| sent.iter().sum::<u64>())
    };
    assert_eq!(wait_until("all are cut", sent), 300_000);
    // A connection that is cut may lose what the other side has not read yet; more than it may it never gets.
    let arrived: usize = scene.origin.raw_connections().iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(arrived <= 300_000, "{arrived}");
}

// proves: budget.connections
#[test]
fn so_many_connections_are_open_at_once() {
    let scene = start_scene("connections = 2", "");
    let (mut one, mut two) = (connect_echo(&scene), connect_echo(&scene));
    for stream in [&mut one, &mut two] {
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
    }
    let got = scene.curl(&["-H", "Accept: application/json", "http://open.example/"]);
    assert_ne!(got.status, 200, "{got:?}");
    scene.wait_for_record("the refusal", |record| record["status_detail"] == "budget_spent");
    assert!(scene.origin.requests().is_empty());
    drop(one);
    wait_until("a place is free", || (scene.curl(&["http://open.example/"]).status == 200).then_some(()));
}

// proves: budget.lifetime_seconds
#[test]
fn p10_a_sandbox_whose_life_is_over_may_do_nothing_and_what_it_has_open_is_cut() {
    let mut scene = start_scene("lifetime_seconds = 4", "");
    let mut stream = connect_echo(&scene);
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut [0]).unwrap();
    assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)), "it is cut when the life ends");
    let record = scene.wait_for_record("the end", |record| {
        record["status_detail"] == "sandbox_ended" && record["traffic"].is_object()
    });
    assert_eq!(record["unmapped"]["sandbar"]["ending"], "revoked");
    let asked = scene.names.queried_names().len();
    let ask = |scene: &ProxyScene| {
        let args = ["+time=5", "+tries=1", "@10.77.0.1", "open.example", "A"];
        text(&scene.command_in(0, "dig").args(args).output().unwrap().stdout)
    };
    assert!(ask(&scene).contains("NXDOMAIN"), "names are refused too");
    assert_eq!(scene.curl(&["-x", "http://10.77.0.1:3128", "http://open.example/"]).status, 403);
    assert_eq!((scene.names.queried_names().len(), scene.origin.requests().len()), (asked, 0));
    scene.stop();
    scene.start();
    assert!(ask(&scene).contains("NXDOMAIN"), "a restart gives no new life");
}

#[test]
fn p10_a_budget_that_is_lowered_counts_for_what_is_open() {
    let scene = start_scene("upload_bytes_per_hour = 1000000", "");
    let mut stream = connect_echo(&scene);
    stream.write_all(&[7; 5000]).unwrap();
    stream.read_exact(&mut [0; 5000]).unwrap();
    let lower = budget_policy("upload_bytes_per_hour = 5001", "");
    std::fs::write(scene.dir.path().join("policies/p.toml"), lower).unwrap();
    wait_until("it is in force", || {
        (read_budgets(&scene)["sandboxes"][0]["budgets"][0]["limit"] == 5001).then_some(())
    });
    stream.write_all(&[7; 2]).unwrap();
    assert!(stream.read_exact(&mut [0; 2]).is_err(), "the second byte does not pass");
    let record = scene.wait_for_record("the cut", |record| record["status_detail"] == "budget_spent");
    assert_eq!(record["traffic"]["bytes_out"], 5001);
    let arrived: usize = scene.origin.raw_connections().iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(arrived <= 5001, "{arrived}");
}
