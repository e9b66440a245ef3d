//! What is passed unseen: the origin's own certificate, half-closes, counts, and both ways of ending it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;

use integration::sandbar;

use super::client::connect_tcp;
use super::origin::{ECHO, noise_bytes};
use super::scene::{ProxyScene, ProxySetup, wait_until};

/// A connection to the database, which sends everything back.
fn connect_echo(scene: &ProxyScene) -> TcpStream {
    let args = ["+short", "+time=10", "+tries=2", "@10.77.0.1", "db.example", "A"];
    let output = scene.command_in(0, "dig").args(args).output().unwrap();
    let stands = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    connect_tcp(scene, 0, &format!("{stands}:{ECHO}"))
}

fn round_trip(stream: &mut TcpStream, bytes: &[u8]) -> bool {
    let mut back = vec![0; bytes.len()];
    stream.write_all(bytes).is_ok() && stream.read_exact(&mut back).is_ok() && back == bytes
}

fn record_with_ending(scene: &ProxyScene, ending: &str) -> Value {
    scene.wait_for_record(ending, |record| {
        record["unmapped"]["sandbar"]["stage"] == "outcome"
            && record["unmapped"]["sandbar"]["ending"] == ending
            && record["class_uid"] == 4001
    })
}

// proves: allow.tls
#[test]
fn the_client_sees_the_origins_own_certificate() {
    let scene = ProxyScene::new();
    let root = scene.dir.path().join("origin.pem").display().to_string();
    let got = scene.curl(&["--cacert", &root, "https://tunnel.example/unseen"]);
    assert_eq!(got.status, 200, "{got:?}");
    let got = scene.curl(&["https://tunnel.example/"]);
    assert_eq!(got.exit, 60, "our own authority does not stand for it: {got:?}");
    let got = scene.curl(&["--cacert", &root, "https://open.example/"]);
    assert_eq!(got.exit, 60, "where we look inside it is ours: {got:?}");
    let through = ["-x", "http://10.77.0.1:3128", "--cacert", &root, "https://tunnel.example/too"];
    let got = scene.curl(&through);
    assert_eq!((got.connect, got.status), (200, 200), "{got:?}");
    let record = record_with_ending(&scene, "completed");
    assert_eq!(record["unmapped"]["sandbar"]["carried"], "tunnel");
    assert_eq!(record["dst_endpoint"]["hostname"], "tunnel.example");
    assert!(!scene.records().iter().any(|record| record.to_string().contains("unseen")));
}

#[test]
fn every_byte_is_carried_and_counted_and_half_closes_are_kept() {
    const BYTES: usize = 8 << 20;
    let scene = ProxyScene::new();
    let mut stream = connect_echo(&scene);
    let sent = noise_bytes(BYTES);
    let mut writer = stream.try_clone().unwrap();
    let write = std::thread::spawn({
        let sent = sent.clone();
        move || {
            writer.write_all(&sent).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        }
    });
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    write.join().unwrap();
    assert!(back == sent, "{} bytes came back, or others", back.len());
    let record = record_with_ending(&scene, "completed");
    assert_eq!(record["traffic"]["bytes_out"], BYTES);
    assert_eq!(record["traffic"]["bytes_in"], BYTES);
}

#[test]
fn p17_an_idle_tunnel_is_cut_and_a_busy_one_is_not() {
    let limits = "tunnel_idle_seconds = 5".to_owned();
    let scene = ProxyScene::with_setup(ProxySetup { limits, ..ProxySetup::default() });
    let (mut busy, mut idle) = (connect_echo(&scene), connect_echo(&scene));
    assert!(round_trip(&mut idle, b"hello"));
    let cut = std::thread::spawn(move || (idle.read(&mut [0]), Instant::now()));
    let started = Instant::now();
    while !cut.is_finished() {
        assert!(round_trip(&mut busy, b"still here"), "the busy one was cut");
        assert!(started.elapsed() < Duration::from_secs(60), "the idle one was not cut");
        std::thread::sleep(Duration::from_millis(100));
    }
    let (read, when) = cut.join().unwrap();
    assert!(matches!(read, Ok(0) | Err(_)));
    assert!(when - started > Duration::from_secs(4), "it was cut too soon");
    let record = record_with_ending(&scene, "failed");
    assert_eq!(record["status_detail"], "idle_too_long");
    assert_eq!(record["traffic"]["bytes_out"], 5);
    assert!(round_trip(&mut busy, b"still here"));
}

/// The numbers of what is open, by host.
fn connection_ids(scene: &ProxyScene, host: &str) -> Vec<u64> {
    let mut command = sandbar();
    command.args(["status", "--connections", "--json", "-c"]).arg(scene.config_path());
    let told: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    let all = told["connections"].as_array().unwrap().iter();
    all.filter(|open| open["host"] == host).map(|open| open["id"].as_u64().unwrap()).collect()
}

fn cut_connection(scene: &ProxyScene, number: u64) -> Option<i32> {
    let mut command = sandbar();
    command.args(["status", "--cut", &number.to_string(), "-c"]).arg(scene.config_path());
    command.output().unwrap().status.code()
}

#[test]
fn the_operator_cuts_one_tunnel_and_no_other() {
    let scene = ProxyScene::new();
    let mut first = connect_echo(&scene);
    assert!(round_trip(&mut first, b"first"));
    let number = connection_ids(&scene, "db.example")[0];
    let mut second = connect_echo(&scene);
    assert!(round_trip(&mut second, b"second"));
    assert_eq!(cut_connection(&scene, number), Some(0));
    assert!(matches!(first.read(&mut [0]), Ok(0) | Err(_)), "it was cut");
    assert!(round_trip(&mut second, b"second again"), "and the other was not");
    let record = record_with_ending(&scene, "revoked");
    assert_eq!(record["status_detail"], "cut_by_operator");
    assert_eq!(record["traffic"]["bytes_out"], 5);
    wait_until("it is not open any more", || {
        (!connection_ids(&scene, "db.example").contains(&number)).then_some(())
    });
    assert_eq!(cut_connection(&scene, number), Some(2), "there is no such connection");
}

#[test]
fn the_operator_cuts_one_request() {
    let scene = ProxyScene::new();
    let mut command = scene.command_in(0, "curl");
    command.args(["-sS", "-N", "--max-time", "60", "https://open.example/steps"]);
    let mut curl = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut first = [0; 14];
    curl.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"data: step 0\n\n");
    assert_eq!(cut_connection(&scene, connection_ids(&scene, "open.example")[0]), Some(0));
    assert!(!curl.wait().unwrap().success(), "the stream was reset");
    let record = scene.wait_for_record("the cut", |record| {
        record["unmapped"]["sandbar"]["ending"] == "revoked" && record["class_uid"] == 4002
    });
    assert_eq!(record["status_detail"], "cut_by_operator");
    assert_eq!(scene.curl(&["https://open.example/"]).status, 200);
}
