//! Towards origins: certificates are checked for the name that was decided, nothing is sent twice, and no
//! connection serves two sandboxes.

use std::fs;
use std::net::TcpListener;

use rcgen::CertificateParams;

use crate::handshake::{OriginCa, client_config, client_config_with, self_signed_config, tls_handshake};
use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::{OriginReply, ScriptedOrigin};

// proves: upstream.roots
#[test]
fn a_wrong_certificate_stops_every_byte() {
    let (root, stranger) = (OriginCa::new(), OriginCa::new());
    let params = || CertificateParams::new(["a.test".to_owned()]).unwrap();
    let mut expired = params();
    (expired.not_before, expired.not_after) =
        (rcgen::date_time_ymd(2001, 1, 1), rcgen::date_time_ymd(2002, 1, 1));
    let mut unborn = params();
    (unborn.not_before, unborn.not_after) =
        (rcgen::date_time_ymd(2500, 1, 1), rcgen::date_time_ymd(2501, 1, 1));
    let origins = [
        ("good", root.server_config("a.test"), true),
        ("another name", root.server_config("b.test"), false),
        ("a name below", root.server_config("x.a.test"), false),
        ("a wildcard that does not cover it", root.server_config("*.a.test"), false),
        ("a wildcard of everything", root.server_config("*.test"), false),
        ("an address", root.server_config("127.0.0.1"), false),
        ("expired", root.server_config_with(expired), false),
        ("not yet valid", root.server_config_with(unborn), false),
        ("of an unknown root", stranger.server_config("a.test"), false),
        ("self-signed", self_signed_config("a.test"), false),
    ]
    .map(|(what, config, good)| (what, ScriptedOrigin::start_tls(config), good));
    let hosts: Vec<_> = origins.iter().map(|(_, origin, _)| ("a.test", origin.port())).collect();
    let world = InstanceSetup::with_hosts(&hosts).with_roots(root.pem()).start();
    let config = client_config(&world, "http/1.1");
    for (what, origin, good) in &origins {
        let mut wire = tls_handshake(world.open_tunnel("a.test", origin.port()), &config, "a.test").unwrap();
        wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\nX-Secret: s3cret\r\n\r\n", origin.port()));
        let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{what}: no answer"));
        if *good {
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
        } else {
            world.assert_refused(what, &answer, 502, "upstream_certificate");
            assert!(
                origin.connections().iter().all(|seen| seen.bytes.is_empty()),
                "{what}: {:?}",
                origin.connections()
            );
        }
    }
}

// proves: ca.dir
#[test]
fn the_authority_is_where_the_configuration_says() {
    let root = OriginCa::new();
    let origin = ScriptedOrigin::start_tls(root.server_config("a.test"));
    let plan = InstanceSetup::with_hosts(&[("a.test", origin.port())]).with_roots(root.pem());
    let world = InstanceSetup { tables: "[ca]\ndir = \"authority\"\n".to_owned(), ..plan }.start();
    let usual = world.ca_path();
    assert!(!usual.exists(), "{}", usual.display());
    let named = usual.parent().unwrap().with_file_name("authority").join("ca.pem");
    let config = client_config_with(&fs::read(named).unwrap(), "http/1.1");
    let mut wire = tls_handshake(world.open_tunnel("a.test", origin.port()), &config, "a.test").unwrap();
    wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
    assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200));
}

#[test]
fn an_origin_that_is_not_there_is_told() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let plain = ScriptedOrigin::start_plain();
    let plan = InstanceSetup::with_hosts(&[("a.test", gone), ("a.test", plain.port())]);
    let world = plan.with_limits("connect_seconds = 1\n").start();
    let mut wire = world.open_tunnel("a.test", gone);
    wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{gone}\r\n\r\n"));
    let answer = wire.read_response("GET").unwrap();
    world.assert_refused("nobody listens", &answer, 502, "upstream_unreachable");
    // One that does not speak TLS is no origin for TLS.
    let config = client_config(&world, "http/1.1");
    let mut wire = tls_handshake(world.open_tunnel("a.test", plain.port()), &config, "a.test").unwrap();
    plain.set_reply(OriginReply::SayAndClose(b"HTTP/1.1 400 No\r\n\r\n".to_vec()));
    wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", plain.port()));
    let answer = wire.read_response("GET").unwrap();
    assert!(matches!(answer.status, 502 | 504), "{}", answer.text());
    assert_eq!(plain.requests(), [], "a request has left in the clear");
}

fn send_request(world: &SandbarInstance, listener: usize, port: u16, request: &str) -> u16 {
    let mut wire = world.open_tunnel_via(listener, "a.test", port);
    wire.send(request.replace("HOST", &format!("a.test:{port}")));
    wire.read_response("GET").map_or(0, |answer| answer.status)
}

const GET: &str = "GET /x HTTP/1.1\r\nHost: HOST\r\n\r\n";
const POST: &str = "POST /x HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3\r\n\r\nabc";

#[test]
fn what_is_not_safe_to_repeat_is_sent_once() {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    for (what, request, most) in [
        ("POST", POST, 1),
        ("PATCH", "PATCH /x HTTP/1.1\r\nHost: HOST\r\nContent-Length: 1\r\n\r\nx", 1),
        ("GET", GET, 2),
    ] {
        origin.set_reply(OriginReply::Echo);
        assert_eq!(send_request(&world, 0, origin.port(), GET), 200, "{what}: a connection to be used again");
        // It takes the request on the connection it knows, and hangs up without a word.
        origin.set_reply(OriginReply::SayAndClose(Vec::new()));
        let before = origin.requests().len();
        assert_eq!(send_request(&world, 0, origin.port(), request), 502, "{what}");
        let sent = origin.requests().len() - before;
        assert!((1..=most).contains(&sent), "{what} was sent {sent} times");
    }
}

#[test]
fn a_pooled_connection_that_the_origin_closed_is_replaced() {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    origin.set_reply(OriginReply::SayAndClose(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec()));
    for round in 0..10 {
        assert_eq!(send_request(&world, 0, origin.port(), GET), 200, "round {round}");
        origin.wait_until("the origin has closed", |seen| seen.last().is_some_and(|seen| seen.over));
    }
    assert_eq!(origin.requests().len(), 10);
}

#[test]
fn no_connection_serves_two_sandboxes() {
    let root = OriginCa::new();
    let (plain, tls) =
        (ScriptedOrigin::start_plain(), ScriptedOrigin::start_tls(root.server_config("a.test")));
    let plan =
        InstanceSetup::with_hosts(&[("a.test", plain.port()), ("a.test", tls.port())]).with_roots(root.pem());
    let world = InstanceSetup { others: vec!["two"], ..plan }.start();
    let config = client_config(&world, "http/1.1");
    let rounds = [0, 1, 0, 1, 1, 0, 0, 1];
    for (origin, secure) in [(&plain, false), (&tls, true)] {
        for listener in rounds {
            let mut wire = world.open_tunnel_via(listener, "a.test", origin.port());
            if secure {
                wire = tls_handshake(wire, &config, "a.test").unwrap();
            }
            wire.send(format!("GET /{listener} HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
            assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200));
        }
        let carried = origin.numbered_requests();
        assert_eq!(carried.len(), rounds.len());
        let of = |target: &str| -> Vec<usize> {
            let own = carried.iter().filter(|(_, request)| request.target == target);
            own.map(|(connection, _)| *connection).collect()
        };
        let (one, two) = (of("/0"), of("/1"));
        assert!(one.iter().all(|connection| !two.contains(connection)), "{one:?} {two:?}");
        assert!(origin.connections().len() < rounds.len(), "none was used again, so nothing is shown");
    }
}
