//! Attack 78: whatever gives way, nothing reaches the service unrecorded or unasked about.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;

use super::client::ClientRequest;
use super::scene::{LogVolume, MemoryScene, MemorySetup, wait_for};

const OWN: &str = "staging:team-b";

fn retain_note(scene: &MemoryScene, number: usize) -> u16 {
    let body = format!(r#"{{"content":"note {number}","bank_id":"{OWN}"}}"#);
    scene.send_honest("sandbox-b", ClientRequest::post("/v1/retain", &body)).status
}

#[test]
fn p16_attack_78_on_a_full_disk_nothing_reaches_the_service() {
    let scene = MemoryScene::with_setup(MemorySetup { room: LogVolume::Megabyte, ..MemorySetup::default() });
    assert_eq!(retain_note(&scene, 0), 200);
    let filler = scene.log_dir_inside().join("filler");
    let mut file = File::create(&filler).unwrap();
    while file.write_all(&[b'x'; 4096]).is_ok() {}
    while file.write_all(b"x").is_ok() {}
    let mut served = 1;
    wait_for("the refusal", || {
        let status = retain_note(&scene, served);
        served += usize::from(status == 200); // there may be room in the last page
        status == 503
    });
    for _ in 0..5 {
        let answer = scene.send_honest("sandbox-b", ClientRequest::recall(OWN));
        assert_eq!(answer.reason(), Some("log_unwritable"), "{}", answer.text());
    }
    assert_eq!(scene.arrived_requests().len(), served, "something arrived without its record");
    drop(file);
    fs::remove_file(&filler).unwrap();
    wait_for("there is room again", || retain_note(&scene, served) == 200);
}

#[test]
fn p17_attack_78_who_finds_no_place_is_turned_away() {
    let scene = MemoryScene::with_setup(MemorySetup {
        limits: "connections_per_sandbox = 2\n",
        ..MemorySetup::default()
    });
    let open = [scene.connect("sandbox-b"), scene.connect("sandbox-b")];
    for _ in 0..5 {
        let mut socket = TcpStream::connect(scene.listener("sandbox-b")).unwrap();
        let host = scene.service_host();
        // It may be gone before it is asked.
        drop(write!(socket, "CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        let mut answer = Vec::new();
        drop(socket.read_to_end(&mut answer));
        let answer = String::from_utf8_lossy(&answer);
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let refused =
        |reason: &str| scene.records().iter().filter(|record| record["status_detail"] == reason).count();
    wait_for("the records", || refused("too_many_connections") > 0);
    assert_eq!(scene.arrived_requests().len(), 0);
    let answer = scene.send_honest("sandbox-a", ClientRequest::recall("staging:team-a"));
    assert_eq!(answer.status, 200, "the others have their places: {}", answer.text());
    drop(open);
}

#[test]
fn p16_attack_78_after_a_crash_there_is_no_way() {
    let mut scene = MemoryScene::new();
    let mut client = scene.connect("sandbox-b");
    let ask = ClientRequest::recall(OWN).with_field("Sandbox-Identity", &scene.token("sandbox-b"));
    assert_eq!(client.send(&ask).status, 200);
    scene.crash();
    client.send_bytes(&ask.encode(&scene.service_host()));
    assert!(client.read_response().is_none());
    assert!(TcpStream::connect(scene.listener("sandbox-b")).is_err(), "somebody still listens");
    assert_eq!(scene.arrived_requests().len(), 1);
}
