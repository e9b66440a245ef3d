//! Raw TCP by name: the sandbox is given an address that stands for the name, and nothing else opens it.

use std::io::{Read, Write};
use std::net::Shutdown;

use super::client::connect_tcp;
use super::net::FirewallMode;
use super::origin::{BANNER, ECHO, GREETING};
use super::scene::{POLICY, ProxyScene, ProxySetup};

/// What the name is said to be in a sandbox.
fn look_up(scene: &ProxyScene, sandbox: usize, name: &str) -> String {
    let resolver = format!("@10.77.{sandbox}.1");
    let args = ["+short", "+time=10", "+tries=2", resolver.as_str(), name, "A"];
    let output = scene.command_in(sandbox, "dig").args(args).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn a_database_is_reached_by_the_address_that_stands_for_its_name() {
    let scene = ProxyScene::new();
    for firewall in [FirewallMode::Redirect, FirewallMode::Tproxy] {
        scene.net.set_firewall(firewall);
        let stands = look_up(&scene, 0, "db.example");
        assert!(stands.starts_with("198.18.") || stands.starts_with("198.19."), "{stands}");
        let sent = format!("\0\0\0\x08 startup by {firewall:?}");
        let mut stream = connect_tcp(&scene, 0, &format!("{stands}:{ECHO}"));
        stream.write_all(sent.as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut back = String::new();
        stream.read_to_string(&mut back).unwrap();
        assert_eq!(back, sent);
        let (at, bytes) = scene.origin.raw_connections().pop().unwrap();
        assert_eq!(bytes, sent.as_bytes());
        assert!(["93.184.216.54", "2606:2800::54"].contains(&at.ip().to_string().as_str()), "{at}");
        let length = sent.len() as u64;
        let outcome = scene.wait_for_record("the outcome", |record| {
            record["unmapped"]["sandbar"]["stage"] == "outcome"
                && record["dst_endpoint"]["hostname"] == "db.example"
                && record["traffic"]["bytes_out"] == length
        });
        assert_eq!(outcome["traffic"]["bytes_in"], length);
        assert_eq!(outcome["unmapped"]["sandbar"]["carried"], "raw");
        assert_eq!(outcome["dst_endpoint"]["ip"], at.ip().to_string());
        assert_eq!(outcome["firewall_rule"]["name"], "database");
    }
}

#[test]
fn a_server_that_speaks_first_is_heard_before_the_client_has_said_a_word() {
    let scene = ProxyScene::new();
    let stands = look_up(&scene, 0, "db.example");
    let mut stream = connect_tcp(&scene, 0, &format!("{stands}:{BANNER}"));
    let mut heard = vec![0; GREETING.len()];
    stream.read_exact(&mut heard).unwrap();
    assert_eq!(heard, GREETING);
}

// proves: allow.tcp
#[test]
fn p1_raw_bytes_go_nowhere_but_to_the_name_and_port_of_the_rule() {
    let scene = ProxyScene::new();
    let stands = look_up(&scene, 0, "db.example");
    for (to, why) in [
        (format!("{stands}:22"), "another port of the name"),
        (format!("93.184.216.54:{ECHO}"), "the real address of the name"),
        (format!("[2606:2800::54]:{ECHO}"), "the same over IPv6"),
        ("93.184.216.34:443".to_owned(), "bytes that are no TLS on its port"),
        ("198.18.77.77:5432".to_owned(), "an address that stands for nothing"),
    ] {
        let mut stream = connect_tcp(&scene, 0, &to);
        stream.write_all(b"\0\0\0\x08 no protocol anybody knows").unwrap();
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        assert!(read.is_err() || answer.is_empty(), "{why}: {answer:?}");
        let aimed: std::net::SocketAddr = to.parse().unwrap();
        scene.wait_for_record(why, |record| {
            record["unmapped"]["sandbar"]["stage"] == "denied"
                && record["dst_endpoint"]["ip"] == aimed.ip().to_string().as_str()
                && record["dst_endpoint"]["port"] == aimed.port()
        });
    }
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
}

#[test]
fn p2_an_address_that_stands_for_a_name_does_so_in_its_own_sandbox_only() {
    let identities = r#"
[[sandbox]]
id = "box-0"
base = "system"
policies = ["p"]
interface = "sandbox0"
[[sandbox]]
id = "box-1"
base = "system"
policies = ["q"]
interface = "sandbox1"
"#;
    let setup = ProxySetup { sandboxes: 2, identities: identities.to_owned(), ..ProxySetup::default() };
    let mut scene = ProxyScene::prepare(setup);
    let policy = POLICY.replace("name = \"p\"", "name = \"q\"").replace("[5432, 2525]", "[2525]");
    std::fs::write(scene.dir.path().join("policies/q.toml"), policy).unwrap();
    scene.start();
    let stands = look_up(&scene, 0, "db.example");
    let mut stream = connect_tcp(&scene, 1, &format!("{stands}:{ECHO}"));
    stream.write_all(b"\0\0\0\x08").unwrap();
    let mut answer = Vec::new();
    drop(stream.read_to_end(&mut answer));
    assert_eq!(answer, b"");
    let denied = scene.wait_for_record("the other sandbox", |record| {
        record["unmapped"]["sandbar"]["stage"] == "denied" && record["actor"]["app_uid"] == "box-1"
    });
    assert_ne!(denied["dst_endpoint"]["hostname"], "db.example");
    assert_eq!(scene.origin.raw_connections().len(), 0);
}
