//! Names: every spelling of a host is that host, or no host at all. By CONNECT, SOCKS5, absolute form, Host and
//! SNI alike, whatever is not plainly a permitted name is refused, and no packet of it reaches anybody.

use crate::handshake::RawClientHello;
use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::ScriptedOrigin;

/// What a name comes to: by CONNECT, absolute form, SOCKS5, Host, SNI.
type NameRow = (&'static str, [&'static str; 5]);

/// A way to say a name; what comes of it.
type NameProbe = fn(&SandbarInstance, u16, &str) -> String;

#[rustfmt::skip]
const NAME_TABLE: &[NameRow] = &[
    ("a.test", ["passes", "passes", "passes", "passes", "passes"]),
    ("A.TEST", ["passes", "passes", "passes", "passes", "passes"]),
    ("a.test.", ["passes", "passes", "passes", "passes", "passes"]),
    ("A.tEsT.", ["passes", "passes", "passes", "passes", "passes"]),
    ("a.test..", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    (".a.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a..test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test.evil.test", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("evil-a.test", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("xa.test", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("sub.a.test", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("b.test", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("test", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    (".", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("[a.test]", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("[[a.test]]", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test\0", ["bad_request", "bad_request", "bad_name", "bad_request", "bad_handshake"]),
    ("evil.test\0.a.test", ["bad_request", "bad_request", "bad_name", "bad_request", "bad_handshake"]),
    ("a.test\0.evil.test", ["bad_request", "bad_request", "bad_name", "bad_request", "bad_handshake"]),
    ("a.test%00", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test%2eevil.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a%2etest", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("%61.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test\t", ["bad_request", "bad_request", "bad_name", "bad_name", "bad_handshake"]),
    (" a.test", ["bad_request", "bad_request", "bad_name", "passes", "bad_handshake"]),
    ("a.test\r", ["bad_request", "bad_request", "bad_name", "bad_request", "bad_handshake"]),
    ("a.test\u{1}", ["bad_request", "bad_request", "bad_name", "bad_request", "bad_handshake"]),
    ("a.test\u{7f}", ["bad_request", "bad_request", "bad_name", "bad_request", "bad_handshake"]),
    ("user@a.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test@evil.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("user:pw@a.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test#evil.test", ["bad_request", "bad_request", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test/evil.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test?evil.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test\\evil.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test;evil.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a.test,evil.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a_b.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_name"]),
    ("_a.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_name"]),
    ("-a.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a-.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("*.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("*", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("ａ.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a。test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a．test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a｡test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("á.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("ü.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("xn--tda.test", ["passes", "passes", "passes", "names_disagree", "names_disagree"]),
    ("xn--", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("xn--a.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_name"]),
    ("a\u{ad}.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("a\u{200d}.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("127.0.0.1", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "address_as_sni"]),
    ("127.1", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("127.0.1", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("0", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("0.0.0.0", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "address_as_sni"]),
    ("2130706433", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("0x7f000001", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_name"]),
    ("0x7f.1", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("0177.0.0.1", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("127.0.0.01", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("127.0.0.1.", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("127.0.0.256", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("1.2.3.4.5", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("[::1]", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "bad_handshake"]),
    ("::1", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_name"]),
    ("[::1%25lo]", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("[::1%lo]", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("[fe80::1%eth0]", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("[::ffff:127.0.0.1]", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "bad_handshake"]),
    ("[::ffff:7f00:1]", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "bad_handshake"]),
    ("::ffff:127.0.0.1", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_name"]),
    ("[64:ff9b::7f00:1]", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "bad_handshake"]),
    ("[2002:7f00:1::]", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "bad_handshake"]),
    ("[127.0.0.1]", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
    ("169.254.169.254", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "address_as_sni"]),
    ("[fd00:ec2::254]", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "bad_handshake"]),
    ("[::ffff:169.254.169.254]", ["address_not_listed", "address_not_listed", "address_not_listed", "names_disagree", "bad_handshake"]),
    ("metadata.google.internal", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("localhost", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("localhost.", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("LOCALHOST", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("a.localhost", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("localhost.localdomain", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("ip6-localhost", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("a.test.localhost", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("a.local", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("a.internal", ["not_listed", "not_listed", "not_listed", "names_disagree", "names_disagree"]),
    ("use-application-dns.net", ["resolver_discovery", "resolver_discovery", "resolver_discovery", "names_disagree", "names_disagree"]),
    ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.test", ["bad_name", "bad_name", "bad_name", "bad_name", "bad_handshake"]),
];

#[test]
fn p6_every_spelling_is_that_host_or_none() {
    let (origin, tls) = (ScriptedOrigin::start_plain(), ScriptedOrigin::start_plain());
    let mut plan = InstanceSetup::with_hosts(&[("a.test", origin.port()), ("a.test", tls.port())]);
    // A policy may be written in Unicode; names in traffic are A-labels.
    plan.policy += &format!(
        "[[allow]]\nname = \"unicode\"\nhosts = [\"ü.test:{}\"]\nresolves_to = [\"127.0.0.0/8\"]\n",
        origin.port()
    );
    plan.hosts.push("xn--tda.test");
    let world = plan.start();
    let mut wrong = Vec::new();
    for (name, expected) in NAME_TABLE {
        let before = origin.connections().len() + tls.connections().len();
        let ways: [NameProbe; 4] = [try_connect, try_absolute_form, try_socks, try_host_field];
        let mut got = ways.map(|way| way(&world, origin.port(), name)).to_vec();
        got.push(try_sni(&world, tls.port(), name));
        if got != *expected {
            wrong.push((name, got.clone()));
        }
        if got.iter().all(|code| code != "passes") {
            let now = origin.connections().len() + tls.connections().len();
            assert_eq!(now, before, "{name:?} has reached an origin");
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(origin.faults(), [""; 0]);
}

/// An encoded slash passes where a rule spells it, as it was written; every other spelling goes nowhere.
#[test]
fn p1_an_encoded_slash_passes_only_where_a_rule_spells_it() {
    let origin = ScriptedOrigin::start_plain();
    let policy = format!(
        "[[allow]]\nname = \"packages\"\nhosts = [\"a.test:{0}\"]\npaths = [\"/*%2f*\", \"/plain\"]\nresolves_to = [\"127.0.0.0/8\"]\n\
         [[deny]]\nname = \"scope\"\nhosts = [\"a.test:{0}\"]\npaths = [\"/@evil/**\"]\n",
        origin.port()
    );
    let world = InstanceSetup { policy, hosts: vec!["a.test"], ..InstanceSetup::default() }.start();
    let mut passed = Vec::new();
    for (path, refused) in [
        ("/plain", None),
        ("/@babel%2fcore", None),
        ("/@babel%2Fcore?v=%2f", None),
        ("/@babel/core", Some("path_not_allowed")),
        ("/@evil%2fx", Some("denied_by_rule")),
        ("/@evil%2Fx", Some("denied_by_rule")),
        ("/@babel%252fcore", Some("ambiguous_path")),
        ("/@babel%5ccore", Some("ambiguous_path")),
        ("/..%2f@evil", Some("ambiguous_path")),
        ("/x%2f..%2f@evil", Some("ambiguous_path")),
        ("/%2e%2e%2f@evil", Some("ambiguous_path")),
        ("/@babel%2fcore%2fx", Some("ambiguous_path")),
        ("/@babel%2f%2fcore", Some("ambiguous_path")),
        ("/@babel%2f", Some("ambiguous_path")),
    ] {
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(format!("GET {path} HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
        let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{path}: no answer"));
        match refused {
            Some(code) => world.assert_refused(path, &answer, 403, code),
            None => {
                assert_eq!(answer.status, 200, "{path}: {}", answer.text());
                passed.push(path.to_owned());
            }
        }
    }
    let arrived: Vec<String> = origin.requests().into_iter().map(|request| request.target).collect();
    assert_eq!(arrived, passed, "what was judged is what is forwarded");
}

/// The code of the last refusal among records from `since` on.
fn refusal_code(world: &SandbarInstance, since: usize) -> String {
    let denied = |record: &serde_json::Value| record["action_id"] == 2;
    let record = world.wait_for_record(since, "a refusal is recorded", denied);
    record["status_detail"].as_str().unwrap().to_owned()
}

fn try_connect(world: &SandbarInstance, port: u16, name: &str) -> String {
    let since = world.record_count();
    let mut wire = world.connect();
    wire.send(format!("CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n"));
    match wire.read_until(b"\r\n\r\n") {
        Some(head) if head.starts_with(b"HTTP/1.1 200") => {
            wire.send(format!("GET / HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n"));
            assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200), "{name:?}");
            "passes".to_owned()
        }
        _ => refusal_code(world, since),
    }
}

fn try_absolute_form(world: &SandbarInstance, port: u16, name: &str) -> String {
    let since = world.record_count();
    let mut wire = world.connect();
    wire.send(format!("GET http://{name}:{port}/ HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n"));
    outcome_code(world, since, wire.read_response("GET").map(|answer| answer.status))
}

fn try_host_field(world: &SandbarInstance, port: u16, name: &str) -> String {
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", port);
    wire.send(format!("GET / HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n"));
    outcome_code(world, since, wire.read_response("GET").map(|answer| answer.status))
}

fn outcome_code(world: &SandbarInstance, since: usize, status: Option<u16>) -> String {
    if status == Some(200) { "passes".to_owned() } else { refusal_code(world, since) }
}

fn try_socks(world: &SandbarInstance, port: u16, name: &str) -> String {
    let since = world.record_count();
    let mut wire = world.connect();
    wire.send([5, 1, 0]);
    assert_eq!(wire.read_exact(2), Some(vec![5, 0]));
    let length = u8::try_from(name.len()).unwrap();
    wire.send([&[5, 1, 0, 3, length][..], name.as_bytes(), &port.to_be_bytes()].concat());
    let answer = wire.read_exact(10).expect("SOCKS is answered");
    if answer[1] == 0 {
        wire.send(format!("GET / HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n"));
        return outcome_code(world, since, wire.read_response("GET").map(|answer| answer.status));
    }
    assert_eq!(answer[1], 2, "{name:?}: not allowed, and nothing else");
    refusal_code(world, since)
}

/// By SNI inside a tunnel that is granted; where the name is ours the handshake begins.
fn try_sni(world: &SandbarInstance, port: u16, name: &str) -> String {
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", port);
    wire.send(RawClientHello::for_name(name).record_bytes());
    match wire.read_exact(1).as_deref() {
        Some([22]) => {
            drop(wire); // in the middle of the handshake, which is recorded as well
            assert_eq!(refusal_code(world, since), "bad_handshake", "{name:?}");
            "passes".to_owned()
        }
        Some([21]) => refusal_code(world, since),
        other => panic!("{name:?}: {other:?} is no TLS"),
    }
}
