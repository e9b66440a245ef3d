//! Every refusal explains itself (P18): to people, to machines that ask for it, in SOCKS and in TLS; and the
//! record it names is in the log.

use serde_json::Value;

use crate::handshake::RawClientHello;
use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::ScriptedOrigin;

fn start_instance() -> (SandbarInstance, ScriptedOrigin) {
    let origin = ScriptedOrigin::start_plain();
    let port = origin.port();
    let policy = format!(
        "[[allow]]\nname = \"readers\"\nhosts = [\"a.test:{port}\"]\nmethods = [\"GET\"]\npaths = [\"/open/**\"]\n\
         resolves_to = [\"127.0.0.0/8\"]\n\
         [[allow]]\nname = \"elsewhere\"\nhosts = [\"moved.test:{port}\"]\nresolves_to = [\"10.0.0.0/8\"]\n\
         [[allow]]\nname = \"outside\"\nhosts = [\"outside.test:{port}\"]\n\
         [[deny]]\nname = \"never\"\nhosts = [\"denied.test:{port}\"]\n"
    );
    let hosts = vec!["a.test", "moved.test", "outside.test", "denied.test"];
    (InstanceSetup { policy, hosts, ..InstanceSetup::default() }.start(), origin)
}

#[test]
fn p18_a_refusal_is_told_to_people_and_to_machines() {
    let (world, origin) = start_instance();
    let port = origin.port();
    for (what, request, status, code, rule) in [
        (
            "not listed",
            format!("GET http://c.test:{port}/ HTTP/1.1\r\nHost: c.test:{port}\r\n"),
            403,
            "not_listed",
            None,
        ),
        (
            "denied",
            format!("GET http://denied.test:{port}/ HTTP/1.1\r\nHost: denied.test:{port}\r\n"),
            403,
            "denied_by_rule",
            Some("never"),
        ),
        (
            "port",
            "GET http://a.test:1/open/x HTTP/1.1\r\nHost: a.test:1\r\n".into(),
            403,
            "port_not_listed",
            Some("readers"),
        ),
        (
            "method",
            format!("PUT http://a.test:{port}/open/x HTTP/1.1\r\nHost: a.test:{port}\r\n"),
            403,
            "method_not_allowed",
            Some("readers"),
        ),
        (
            "path",
            format!("GET http://a.test:{port}/shut HTTP/1.1\r\nHost: a.test:{port}\r\n"),
            403,
            "path_not_allowed",
            Some("readers"),
        ),
        (
            "ambiguous path",
            format!("GET http://a.test:{port}/open/%2e%2e/shut HTTP/1.1\r\nHost: a.test:{port}\r\n"),
            403,
            "ambiguous_path",
            Some("readers"),
        ),
        (
            "path with slash hidden",
            format!("GET http://a.test:{port}/open%2f..%2fshut HTTP/1.1\r\nHost: a.test:{port}\r\n"),
            403,
            "ambiguous_path",
            Some("readers"),
        ),
        (
            "address of another range",
            format!("GET http://moved.test:{port}/ HTTP/1.1\r\nHost: moved.test:{port}\r\n"),
            403,
            "private_address",
            None,
        ),
        (
            "private address",
            format!("GET http://outside.test:{port}/ HTTP/1.1\r\nHost: outside.test:{port}\r\n"),
            403,
            "private_address",
            None,
        ),
        (
            "literal address",
            format!("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"),
            403,
            "address_not_listed",
            None,
        ),
        (
            "connect",
            format!("CONNECT c.test:{port} HTTP/1.1\r\nHost: c.test:{port}\r\n"),
            403,
            "not_listed",
            None,
        ),
        (
            "connect without port",
            "CONNECT a.test HTTP/1.1\r\nHost: a.test\r\n".into(),
            400,
            "bad_request",
            None,
        ),
        (
            "names",
            format!("GET http://a.test:{port}/ HTTP/1.1\r\nHost: c.test:{port}\r\n"),
            403,
            "names_disagree",
            None,
        ),
    ] {
        for (accept, kind) in [
            ("", "text/plain; charset=utf-8"),
            ("Accept: text/html, */*\r\n", "text/plain; charset=utf-8"),
            ("Accept: application/json\r\n", "application/json"),
        ] {
            let mut wire = world.connect();
            wire.send(format!("{request}{accept}\r\n"));
            let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{what}: no answer"));
            world.assert_refused(what, &answer, status, code);
            let id = answer.field("sandbar-record").unwrap();
            // A head that could not be read has no Accept either.
            let person = matches!(code, "bad_request" | "names_disagree");
            let kind =
                if person && what != "connect without port" { "text/plain; charset=utf-8" } else { kind };
            assert_eq!(answer.field("content-type"), Some(kind), "{what} {accept}");
            let text = answer.text();
            assert!(text.contains(code) && text.contains(id), "{what}: {text}");
            // The sandbox learns nothing of the gateway's files.
            let dir = world.policy_dir();
            assert!(!text.contains(dir.to_str().unwrap()) && !text.contains(".toml"), "{what}: {text}");
            assert!(!text.split([' ', '"', '(']).any(|word| word.starts_with('/')), "{what}: {text}");
            if kind == "application/json" {
                let said: Value = serde_json::from_str(&text).unwrap();
                let said = &said["error"];
                assert_eq!(said["reason"], code, "{what}: {said}");
                assert_eq!(said["record"], id, "{what}: {said}");
                assert!(said["next_step"].as_str().is_some_and(|next| next.len() > 5), "{what}: {said}");
                if let Some(rule) = rule {
                    assert_eq!(
                        said["rule"],
                        serde_json::json!({ "rule": rule, "policy": "p" }),
                        "{what}: {said}"
                    );
                }
            } else {
                assert!(text.contains("next:"), "{what}: {text}");
            }
        }
    }
    assert_eq!(origin.connections().len(), 0, "something reached the origin");
}

#[test]
fn p18_socks_is_refused_in_its_own_words() {
    let (world, origin) = start_instance();
    let port = origin.port().to_be_bytes();
    for (what, request, reply, code) in [
        ("not listed", [&b"\x05\x01\x00\x03\x06c.test"[..], &port].concat(), 2, "not_listed"),
        ("an address", [&b"\x05\x01\x00\x01\x7f\x00\x00\x01"[..], &port].concat(), 2, "address_not_listed"),
        (
            "an IPv6 address",
            [&b"\x05\x01\x00\x04"[..], &[0; 15], &[1], &port].concat(),
            2,
            "address_not_listed",
        ),
        (
            "a mapped address",
            [&b"\x05\x01\x00\x04"[..], &[0; 10], &[255, 255, 127, 0, 0, 1], &port].concat(),
            2,
            "address_not_listed",
        ),
        ("no name", [&b"\x05\x01\x00\x03\x00"[..], &port].concat(), 2, "bad_name"),
        ("bytes that are no text", [&b"\x05\x01\x00\x03\x03\xff\xfe\x00"[..], &port].concat(), 2, "bad_name"),
        ("BIND", [&b"\x05\x02\x00\x03\x06a.test"[..], &port].concat(), 7, "socks_unsupported"),
        ("UDP", [&b"\x05\x03\x00\x03\x06a.test"[..], &port].concat(), 7, "socks_unsupported"),
        (
            "an unknown kind of address",
            [&b"\x05\x01\x00\x07\x06a.test"[..], &port].concat(),
            7,
            "socks_unsupported",
        ),
        (
            "another version inside",
            [&b"\x04\x01\x00\x03\x06a.test"[..], &port].concat(),
            7,
            "socks_unsupported",
        ),
    ] {
        let since = world.record_count();
        let mut wire = world.connect();
        wire.send([5, 2, 0, 2]);
        assert_eq!(wire.read_exact(2), Some(vec![5, 0]), "{what}");
        wire.send(&request);
        assert_eq!(wire.read_to_end(), [5, reply, 0, 1, 0, 0, 0, 0, 0, 0], "{what}");
        world.wait_for_record(since, what, |record| record["status_detail"] == code);
    }
    // A client that insists on a password is told that none is taken.
    let since = world.record_count();
    let mut wire = world.connect();
    wire.send([5, 1, 2]);
    assert!(wire.read_to_end().starts_with(&[5, 0xff]));
    world.wait_for_record(since, "passwords", |record| record["status_detail"] == "socks_unsupported");
    // SOCKS4 is no protocol of ours.
    let since = world.record_count();
    let mut wire = world.connect();
    wire.send([&b"\x04\x01"[..], &port, &[127, 0, 0, 1, 0]].concat());
    assert_eq!(wire.read_to_end(), b"");
    world.wait_for_record(since, "SOCKS4", |record| record["status_detail"] == "wrong_protocol");
    assert_eq!(origin.connections().len(), 0, "something reached the origin");
}

#[test]
fn p18_tls_is_refused_by_an_alert() {
    let (world, origin) = start_instance();
    let nameless = RawClientHello { names: None, ..RawClientHello::for_name("a.test") };
    for (what, hello, alert, code) in [
        ("another name", RawClientHello::for_name("b.test"), 49, "names_disagree"),
        ("no name", nameless, 112, "name_missing"),
        ("an address", RawClientHello::for_name("127.0.0.1"), 112, "address_as_sni"),
        ("not a name", RawClientHello::for_name("a_b.test"), 112, "bad_name"),
    ] {
        let since = world.record_count();
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(hello.record_bytes());
        assert_eq!(wire.read_to_end(), [21, 3, 3, 0, 2, 2, alert], "{what}");
        world.wait_for_record(since, what, |record| record["status_detail"] == code);
    }
    assert_eq!(origin.connections().len(), 0, "something reached the origin");
}
