//! Towards origins: certificates are checked for the name that was decided, nothing is sent twice, and no
//! connection serves two sandboxes.

use std::net::TcpListener;

use rcgen::CertificateParams;

use crate::handshake::{Root, client, self_signed, shake};
use crate::origin::{Act, Origin};
use crate::world::{Plan, World};

#[test]
fn a_wrong_certificate_stops_every_byte() {
    let (root, stranger) = (Root::new(), Root::new());
    let params = || CertificateParams::new(["a.test".to_owned()]).unwrap();
    let mut expired = params();
    (expired.not_before, expired.not_after) =
        (rcgen::date_time_ymd(2001, 1, 1), rcgen::date_time_ymd(2002, 1, 1));
    let mut unborn = params();
    (unborn.not_before, unborn.not_after) =
        (rcgen::date_time_ymd(2500, 1, 1), rcgen::date_time_ymd(2501, 1, 1));
    let origins = [
        ("good", root.server("a.test"), true),
        ("another name", root.server("b.test"), false),
        ("a name below", root.server("x.a.test"), false),
        ("a wildcard that does not cover it", root.server("*.a.test"), false),
        ("a wildcard of everything", root.server("*.test"), false),
        ("an address", root.server("127.0.0.1"), false),
        ("expired", root.server_as(expired), false),
        ("not yet valid", root.server_as(unborn), false),
        ("of an unknown root", stranger.server("a.test"), false),
        ("self-signed", self_signed("a.test"), false),
    ]
    .map(|(what, config, good)| (what, Origin::tls(config), good));
    let hosts: Vec<_> = origins.iter().map(|(_, origin, _)| ("a.test", origin.port())).collect();
    let world = Plan::allowing(&hosts).roots(root.pem()).start();
    let config = client(&world, "http/1.1");
    for (what, origin, good) in &origins {
        let mut wire = shake(world.tunnel("a.test", origin.port()), &config, "a.test").unwrap();
        wire.send(format!(
            "GET /x HTTP/1.1\r\nHost: a.test:{}\r\nX-Secret: s3cret\r\n\r\n",
            origin.port()
        ));
        let answer = wire.answer("GET").unwrap_or_else(|| panic!("{what}: no answer"));
        if *good {
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
        } else {
            world.assert_refused(what, &answer, 502, "upstream_certificate");
            assert!(
                origin.seen().iter().all(|seen| seen.bytes.is_empty()),
                "{what}: {:?}",
                origin.seen()
            );
        }
    }
}

#[test]
fn an_origin_that_is_not_there_is_told() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let plain = Origin::plain();
    let plan = Plan::allowing(&[("a.test", gone), ("a.test", plain.port())]);
    let world = plan.limits("connect_seconds = 1\n").start();
    let mut wire = world.tunnel("a.test", gone);
    wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{gone}\r\n\r\n"));
    let answer = wire.answer("GET").unwrap();
    world.assert_refused("nobody listens", &answer, 502, "upstream_unreachable");
    // One that does not speak TLS is no origin for TLS.
    let config = client(&world, "http/1.1");
    let mut wire = shake(world.tunnel("a.test", plain.port()), &config, "a.test").unwrap();
    plain.act(Act::SayAndClose(b"HTTP/1.1 400 No\r\n\r\n".to_vec()));
    wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", plain.port()));
    let answer = wire.answer("GET").unwrap();
    assert!(matches!(answer.status, 502 | 504), "{}", answer.text());
    assert_eq!(plain.requests(), [], "a request has left in the clear");
}

fn ask(world: &World, listener: usize, port: u16, request: &str) -> u16 {
    let mut wire = world.tunnel_by(listener, "a.test", port);
    wire.send(request.replace("HOST", &format!("a.test:{port}")));
    wire.answer("GET").map_or(0, |answer| answer.status)
}

const GET: &str = "GET /x HTTP/1.1\r\nHost: HOST\r\n\r\n";
const POST: &str = "POST /x HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3\r\n\r\nabc";

#[test]
fn what_is_not_safe_to_repeat_is_sent_once() {
    let origin = Origin::plain();
    let world = Plan::allowing(&[("a.test", origin.port())]).start();
    for (what, request, most) in [
        ("POST", POST, 1),
        ("PATCH", "PATCH /x HTTP/1.1\r\nHost: HOST\r\nContent-Length: 1\r\n\r\nx", 1),
        ("GET", GET, 2),
    ] {
        origin.act(Act::Echo);
        assert_eq!(
            ask(&world, 0, origin.port(), GET),
            200,
            "{what}: a connection to be used again"
        );
        // It takes the request on the connection it knows, and hangs up without a word.
        origin.act(Act::SayAndClose(Vec::new()));
        let before = origin.requests().len();
        assert_eq!(ask(&world, 0, origin.port(), request), 502, "{what}");
        let sent = origin.requests().len() - before;
        assert!((1..=most).contains(&sent), "{what} was sent {sent} times");
    }
}

#[test]
fn a_pooled_connection_that_the_origin_closed_is_replaced() {
    let origin = Origin::plain();
    let world = Plan::allowing(&[("a.test", origin.port())]).start();
    origin.act(Act::SayAndClose(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec()));
    for round in 0..10 {
        assert_eq!(ask(&world, 0, origin.port(), GET), 200, "round {round}");
        origin.until("the origin has closed", |seen| seen.last().is_some_and(|seen| seen.over));
    }
    assert_eq!(origin.requests().len(), 10);
}

#[test]
fn no_connection_serves_two_sandboxes() {
    let root = Root::new();
    let (plain, tls) = (Origin::plain(), Origin::tls(root.server("a.test")));
    let plan =
        Plan::allowing(&[("a.test", plain.port()), ("a.test", tls.port())]).roots(root.pem());
    let world = Plan { others: vec!["two"], ..plan }.start();
    let config = client(&world, "http/1.1");
    let rounds = [0, 1, 0, 1, 1, 0, 0, 1];
    for (origin, secure) in [(&plain, false), (&tls, true)] {
        for listener in rounds {
            let mut wire = world.tunnel_by(listener, "a.test", origin.port());
            if secure {
                wire = shake(wire, &config, "a.test").unwrap();
            }
            wire.send(format!(
                "GET /{listener} HTTP/1.1\r\nHost: a.test:{}\r\n\r\n",
                origin.port()
            ));
            assert_eq!(wire.answer("GET").map(|answer| answer.status), Some(200));
        }
        let carried = origin.carried();
        assert_eq!(carried.len(), rounds.len());
        let of = |target: &str| -> Vec<usize> {
            let own = carried.iter().filter(|(_, request)| request.target == target);
            own.map(|(connection, _)| *connection).collect()
        };
        let (one, two) = (of("/0"), of("/1"));
        assert!(one.iter().all(|connection| !two.contains(connection)), "{one:?} {two:?}");
        assert!(origin.seen().len() < rounds.len(), "none was used again, so nothing is shown");
    }
}
