//! Attack 78: whatever gives way, nothing reaches the service unrecorded or unasked about.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;

use super::client::Ask;
use super::scene::{Room, Scene, Setup, wait};

const OWN: &str = "staging:team-b";

fn remember(scene: &Scene, number: usize) -> u16 {
    let body = format!(r#"{{"content":"note {number}","bank_id":"{OWN}"}}"#);
    scene.honest("sandbox-b", Ask::post("/v1/retain", &body)).status
}

#[test]
fn attack_78_on_a_full_disk_nothing_reaches_the_service() {
    let scene = Scene::with(Setup { room: Room::Megabyte, ..Setup::default() });
    assert_eq!(remember(&scene, 0), 200);
    let filler = scene.log_within().join("filler");
    let mut file = File::create(&filler).unwrap();
    while file.write_all(&[b'x'; 4096]).is_ok() {}
    while file.write_all(b"x").is_ok() {}
    let mut served = 1;
    wait("the refusal", || {
        let status = remember(&scene, served);
        served += usize::from(status == 200); // there may be room in the last page
        status == 503
    });
    for _ in 0..5 {
        let answer = scene.honest("sandbox-b", Ask::recall(OWN));
        assert_eq!(answer.reason(), Some("log_unwritable"), "{}", answer.text());
    }
    assert_eq!(scene.seen().len(), served, "something arrived without its record");
    drop(file);
    fs::remove_file(&filler).unwrap();
    wait("there is room again", || remember(&scene, served) == 200);
}

#[test]
fn attack_78_who_finds_no_place_is_turned_away() {
    let scene = Scene::with(Setup { limits: "connections_per_sandbox = 2\n", ..Setup::default() });
    let open = [scene.client("sandbox-b"), scene.client("sandbox-b")];
    for _ in 0..5 {
        let mut socket = TcpStream::connect(scene.listener("sandbox-b")).unwrap();
        let host = scene.host();
        // It may be gone before it is asked.
        drop(write!(socket, "CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        let mut answer = Vec::new();
        drop(socket.read_to_end(&mut answer));
        let answer = String::from_utf8_lossy(&answer);
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let refused = |reason: &str| {
        scene.records().iter().filter(|record| record["status_detail"] == reason).count()
    };
    wait("the records", || refused("too_many_connections") > 0);
    assert_eq!(scene.seen().len(), 0);
    let answer = scene.honest("sandbox-a", Ask::recall("staging:team-a"));
    assert_eq!(answer.status, 200, "the others have their places: {}", answer.text());
    drop(open);
}

#[test]
fn attack_78_after_a_crash_there_is_no_way() {
    let mut scene = Scene::new();
    let mut client = scene.client("sandbox-b");
    let ask = Ask::recall(OWN).with("Sandbox-Identity", &scene.token("sandbox-b"));
    assert_eq!(client.ask(&ask).status, 200);
    scene.crash();
    client.say(&ask.bytes(&scene.host()));
    assert!(client.answer().is_none());
    assert!(TcpStream::connect(scene.listener("sandbox-b")).is_err(), "somebody still listens");
    assert_eq!(scene.seen().len(), 1);
}
