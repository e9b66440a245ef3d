//! Every bound of `[limits]` on the data path, each exceeded (P17), with small values so that it takes no time.

use std::time::Duration;

use serde_json::Value;

use crate::handshake::{OriginCa, RawClientHello, client_config, tls_handshake};
use crate::http2;
use crate::instance::{InstanceSetup, SandbarInstance, wait_until};
use crate::origin::{OriginReply, ScriptedOrigin};
use crate::wire::RawConnection;

/// How often a slow client sends another byte, and how many it sends: far longer than any bound here.
const DRIP_INTERVAL: Duration = Duration::from_millis(50);
const DRIP_COUNT: usize = 300;

fn has_reason(code: &'static str) -> impl Fn(&Value) -> bool {
    move |record| record["status_detail"] == code
}

/// Sends `bytes` drop by drop until the other side has had enough; what it said.
fn send_slowly(wire: &mut RawConnection, bytes: &[u8]) -> Vec<u8> {
    for byte in bytes.iter().take(DRIP_COUNT) {
        if !wire.try_send(&[*byte]) {
            break;
        }
        std::thread::sleep(DRIP_INTERVAL);
    }
    wire.read_to_end()
}

fn start_with_timeouts() -> (SandbarInstance, ScriptedOrigin) {
    let origin = ScriptedOrigin::start_plain();
    let limits = "first_bytes_seconds = 1\nhead_seconds = 1\nkeep_alive_seconds = 1\nidle_seconds = 1\nfirst_byte_seconds = 1\n";
    (InstanceSetup::with_hosts(&[("a.test", origin.port())]).with_limits(limits).start(), origin)
}

#[test]
fn p17_the_first_bytes_come_in_time() {
    let (world, origin) = start_with_timeouts();
    let port = origin.port();
    let endless = [b"GET / HTTP/1.1\r\nHost: a.test\r\n".to_vec(), b"X: y\r\n".repeat(60)].concat();
    let greeting = [vec![5, 255], vec![0; 200]].concat();
    let hello = RawClientHello { padding: 400, ..RawClientHello::for_name("a.test") }.record_bytes();
    for (what, tunnelled, bytes, answered) in [
        ("silence", false, &b""[..], false),
        ("silence in a tunnel", true, b"", false),
        ("a slow proxy head", false, &endless, true),
        ("a slow head in a tunnel", true, &endless, true),
        ("a slow hello", true, &hello, true),
        ("a slow SOCKS greeting", false, &greeting, true),
        ("half a preface", true, b"PRI * HTTP/2.0\r\n", true),
    ] {
        let since = world.record_count();
        let mut wire = if tunnelled { world.open_tunnel("a.test", port) } else { world.connect() };
        let said = send_slowly(&mut wire, bytes);
        assert!(answered || said.is_empty(), "{what}: {said:?}");
        let record = world.wait_for_record(since, what, has_reason("first_bytes_late"));
        assert_eq!(record["action_id"], 2, "{what}");
    }
    assert_eq!(origin.connections().len(), 0, "something reached the origin");
}

#[test]
fn p17_a_handshake_that_is_not_finished_ends() {
    let (world, origin) = start_with_timeouts();
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(RawClientHello::for_name("a.test").record_bytes());
    wire.read_to_end(); // the server's part, then the end
    world.wait_for_record(since, "the handshake is late", has_reason("first_bytes_late"));
}

#[test]
fn p17_a_kept_alive_connection_ends_by_itself() {
    let (world, origin) = start_with_timeouts();
    let get = format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port());
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(&get);
    assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200));
    assert_eq!(wire.read_to_end(), b"", "keep_alive_seconds");
    // The second head is as bounded as the first.
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(&get);
    assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200));
    let slow = [b"GET /x HTTP/1.1\r\n".to_vec(), b"X: y\r\n".repeat(60)].concat();
    let said = send_slowly(&mut wire, &slow);
    assert!(said.starts_with(b"HTTP/1.1 408 "), "{}", String::from_utf8_lossy(&said));
    world.wait_for_record(since, "head_seconds", has_reason("first_bytes_late"));
}

#[test]
fn p17_a_request_that_stands_still_ends() {
    let (world, origin) = start_with_timeouts();
    let host = format!("a.test:{}", origin.port());
    // The sandbox stops in the middle of its body.
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!("POST /x HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\nabc"));
    wire.read_to_end();
    let ended = |record: &Value| record["unmapped"]["sandbar"]["ending"].is_string();
    world.wait_for_record(since, "the body stands still", ended);
    assert_eq!(origin.requests(), [], "half a request is none");
    // The origin says nothing, or stops in the middle.
    origin.set_reply(OriginReply::SayAndHang(Vec::new()));
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!("GET /x HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    let answer = wire.read_response("GET").unwrap();
    world.assert_refused("first_byte_seconds", &answer, 504, "upstream_timeout");
    origin.set_reply(OriginReply::SayAndHang(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc".to_vec()));
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!("GET /x HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    let said = String::from_utf8(wire.read_to_end()).unwrap();
    assert!(said.ends_with("abc"), "{said}");
    world.wait_for_record(since, "the answer stands still", ended);
}

#[test]
fn p17_no_connection_lives_for_ever() {
    let root = OriginCa::new();
    let (plain, tls) =
        (ScriptedOrigin::start_plain(), ScriptedOrigin::start_tls(root.server_config("a.test")));
    let raw = ScriptedOrigin::start_plain();
    let mut plan = InstanceSetup::with_hosts(&[("a.test", plain.port()), ("a.test", tls.port())])
        .with_roots(root.pem())
        .with_limits("connection_seconds = 2\n");
    plan.hosts.push("raw.test");
    plan.policy += &format!(
        "[[allow]]\nname = \"raw\"\nhosts = [\"raw.test\"]\ntcp = [{}]\nresolves_to = [\"127.0.0.0/8\"]\n",
        raw.port()
    );
    let world = plan.start();
    // However busy it is.
    let mut wire = world.open_tunnel("a.test", plain.port());
    let mut served = 0;
    wait_until("a busy HTTP/1 connection is ended", || {
        wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", plain.port()));
        let answered = wire.read_response("GET").is_some();
        served += usize::from(answered);
        !answered
    });
    assert!(served > 0);
    let config = client_config(&world, "h2");
    let wire = tls_handshake(world.open_tunnel("a.test", tls.port()), &config, "a.test").unwrap();
    let mut connection = http2::Http2Client::new(wire);
    let fields = http2::request_fields("GET", "https", &format!("a.test:{}", tls.port()), "/x");
    let mut stream = 1;
    wait_until("a busy HTTP/2 connection is ended", || {
        connection.send_headers(stream, &fields, true);
        stream += 2;
        connection.wait_for_status(stream - 2).is_none()
    });
    assert!(stream > 3);
    let since = world.record_count();
    let mut wire = world.open_tunnel("raw.test", raw.port());
    wire.send("hello");
    assert_eq!(wire.read_to_end(), b"");
    world.wait_for_record(since, "a tunnel is ended", has_reason("lifetime_spent"));
}

#[test]
fn p17_a_tunnel_that_stands_still_ends() {
    let raw = ScriptedOrigin::start_plain();
    let policy = format!(
        "[[allow]]\nname = \"raw\"\nhosts = [\"raw.test\"]\ntcp = [{}]\nresolves_to = [\"127.0.0.0/8\"]\n",
        raw.port()
    );
    let limits = "tunnel_idle_seconds = 1\n".to_owned();
    let world = InstanceSetup { policy, limits, hosts: vec!["raw.test"], ..InstanceSetup::default() }.start();
    let mut wire = world.open_tunnel("raw.test", raw.port());
    wire.send("hello");
    assert_eq!(wire.read_to_end(), b"");
    world.wait_for_record(0, "a tunnel is ended", has_reason("idle_too_long"));
}

fn start_with_size_limits() -> (SandbarInstance, ScriptedOrigin, ScriptedOrigin) {
    let root = OriginCa::new();
    let (plain, tls) =
        (ScriptedOrigin::start_plain(), ScriptedOrigin::start_tls(root.server_config("a.test")));
    let mut plan = InstanceSetup::with_hosts(&[("a.test", plain.port()), ("a.test", tls.port())])
        .with_roots(root.pem())
        .with_limits(
            "head_bytes = 2048\nhead_fields = 20\nhello_bytes = 1024\ninspected_body_bytes = 1000\n",
        );
    plan.hosts.push("inspected.test");
    plan.policy += &format!(
        "[[allow]]\nname = \"inspected\"\nhosts = [\"inspected.test:{}\"]\ninspect = true\nresolves_to = [\"127.0.0.0/8\"]\n",
        plain.port()
    );
    (plan.start(), plain, tls)
}

#[test]
fn p17_heads_have_a_size() {
    let (world, plain, tls) = start_with_size_limits();
    let port = plain.port();
    let long = format!("X: {}\r\n", "y".repeat(2048));
    let many = "X: y\r\n".repeat(20); // and Host
    let few = "X: y\r\n".repeat(19);
    for (what, tunnelled, start, fields, refused) in [
        ("as many as may be", true, "GET /x", &few, false),
        ("too many in a tunnel", true, "GET /x", &many, true),
        ("too long in a tunnel", true, "GET /x", &long, true),
        ("as many as may be, absolute", false, "GET http://a.test:PORT/x", &few, false),
        ("too many, absolute", false, "GET http://a.test:PORT/x", &many, true),
        ("too long, absolute", false, "GET http://a.test:PORT/x", &long, true),
        ("too many for CONNECT", false, "CONNECT a.test:PORT", &many, true),
        ("too long for CONNECT", false, "CONNECT a.test:PORT", &long, true),
    ] {
        let before = plain.requests().len();
        let mut wire = if tunnelled { world.open_tunnel("a.test", port) } else { world.connect() };
        let start = start.replace("PORT", &port.to_string());
        wire.send(format!("{start} HTTP/1.1\r\nHost: a.test:{port}\r\n{fields}\r\n"));
        let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{what}: no answer"));
        if refused {
            world.assert_refused(what, &answer, 431, "head_too_large");
        } else {
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
        }
        assert_eq!(plain.requests().len() - before, usize::from(!refused), "{what}");
    }
    let config = client_config(&world, "h2");
    for (what, value, times) in [("too many", 1, 21), ("too long", 2048, 1)] {
        let wire = tls_handshake(world.open_tunnel("a.test", tls.port()), &config, "a.test").unwrap();
        let mut connection = http2::Http2Client::new(wire);
        let mut fields = http2::request_fields("GET", "https", &format!("a.test:{}", tls.port()), "/x");
        fields.extend((0..times).map(|at| (format!("x-{at}"), vec![b'y'; value])));
        connection.send_headers(1, &fields, true);
        assert_eq!(connection.wait_for_status(1), Some(431), "{what} over HTTP/2");
    }
    assert_eq!(tls.requests(), []);
}

#[test]
fn p17_hellos_have_a_size() {
    let (world, _, tls) = start_with_size_limits();
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", tls.port());
    wire.send(RawClientHello { padding: 8000, ..RawClientHello::for_name("a.test") }.record_bytes());
    assert_eq!(wire.read_to_end(), [21, 3, 3, 0, 2, 2, 50]);
    world.wait_for_record(since, "hello_bytes", has_reason("head_too_large"));
}

#[test]
fn p17_inspected_bodies_have_a_size() {
    let (world, plain, _) = start_with_size_limits();
    let host = format!("inspected.test:{}", plain.port());
    let chunked = |length: usize| {
        format!("Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n{}\r\n0\r\n\r\n", "z".repeat(length))
    };
    let measured = |length: usize| format!("Content-Length: {length}\r\n\r\n{}", "z".repeat(length));
    for (what, body, refused) in [
        ("as long as may be", measured(1000), false),
        ("too long", measured(1001), true),
        ("much too long", measured(100_000), true),
        ("as long as may be, in chunks", chunked(1000), false),
        ("too long, in chunks", chunked(1001), true),
    ] {
        let before = plain.requests().len();
        let mut wire = world.open_tunnel("inspected.test", plain.port());
        wire.send(format!("POST /x HTTP/1.1\r\nHost: {host}\r\n{body}"));
        let answer = wire.read_response("POST").unwrap_or_else(|| panic!("{what}: no answer"));
        if refused {
            world.assert_refused(what, &answer, 413, "body_too_large");
        } else {
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
        }
        assert_eq!(plain.requests().len() - before, usize::from(!refused), "{what}");
    }
}

#[test]
fn p17_connections_are_counted() {
    let origin = ScriptedOrigin::start_plain();
    for (limits, mine, others) in [("connections_per_sandbox = 3\n", 3, 3), ("connections = 3\n", 3, 0)] {
        let plan = InstanceSetup::with_hosts(&[("a.test", origin.port())]).with_limits(limits);
        let world = InstanceSetup { others: vec!["two"], ..plan }.start();
        let mut held: Vec<_> = (0..mine).map(|_| world.open_tunnel("a.test", origin.port())).collect();
        let since = world.record_count();
        assert_eq!(RawConnection::connect(world.listeners[0]).read_to_end(), b"", "{limits}");
        world.wait_for_record(since, limits, has_reason("too_many_connections"));
        for _ in 0..others {
            held.push(world.open_tunnel_via(1, "a.test", origin.port())); // another sandbox has its own
        }
        held.remove(0);
        let get = format!("GET http://a.test:{0}/x HTTP/1.1\r\nHost: a.test:{0}\r\n\r\n", origin.port());
        wait_until("a place that was given up is taken", || {
            let mut wire = world.connect();
            wire.send(&get);
            wire.read_response("GET").is_some_and(|answer| answer.status == 200)
        });
    }
}

/// Each quota: one attempt has it all, the next is refused, recorded, explained, and reaches nothing.
#[test]
fn p17_who_has_no_quota_is_refused() {
    for (quota, code, noun) in [
        ("requests = { total = 1, share = 1 }", "quota_exhausted", "open requests and tunnels"),
        ("ports = { total = 1, share = 1 }", "out_of_ports", "source ports towards one address"),
    ] {
        let origin = ScriptedOrigin::start_plain();
        origin.set_reply(OriginReply::SayAndHang(Vec::new()));
        let plan = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
        let world = InstanceSetup { tables: format!("[quota]\n{quota}\n"), ..plan }.start();
        let get = format!("GET http://a.test:{0}/x HTTP/1.1\r\nHost: a.test:{0}\r\n\r\n", origin.port());
        let mut first = world.connect();
        first.send(&get);
        origin.wait_until("the first request", |seen| !seen.is_empty());
        let mut second = world.connect();
        second.send(&get);
        let answer = second.read_response("GET").unwrap_or_else(|| panic!("{quota}: no answer"));
        world.assert_refused(quota, &answer, 503, code);
        assert!(answer.text().contains(noun), "{quota}: {}", answer.text());
        assert_eq!(origin.connections().len(), 1, "{quota}");
        let record = world.wait_for_record(0, quota, has_reason(code));
        let message = record["message"].as_str().unwrap_or_default();
        assert!(message.contains(&format!("{noun}: sandbox `one` uses 1")), "{quota}: {message}");
        let status = world.run_command(&["status", "--sandbox", "one"]);
        let key = quota.split(' ').next().unwrap_or_default();
        let line = status.lines().find(|line| line.trim_start().starts_with(key)).unwrap_or_default();
        assert!(line.contains("1 used; 1 kept for it, 1 at most"), "{quota}: {status}");
    }
}

#[test]
fn p17_streams_are_counted() {
    let root = OriginCa::new();
    let tls = ScriptedOrigin::start_tls(root.server_config("a.test"));
    tls.set_reply(OriginReply::SayAndHang(Vec::new()));
    let plan = InstanceSetup::with_hosts(&[("a.test", tls.port())]).with_roots(root.pem());
    let world = plan.with_limits("streams = 3\nresets = 8\n").start();
    let config = client_config(&world, "h2");
    let connect = || {
        let wire = tls_handshake(world.open_tunnel("a.test", tls.port()), &config, "a.test").unwrap();
        http2::Http2Client::new(wire)
    };
    let fields = http2::request_fields("GET", "https", &format!("a.test:{}", tls.port()), "/x");
    let mut connection = connect();
    for stream in [1, 3, 5, 7] {
        connection.send_headers(stream, &fields, true);
    }
    assert_eq!(connection.wait_for_end(7), http2::StreamEnd::Reset, "streams");
    assert!(tls.requests().len() <= 3);
    let since = world.record_count();
    let mut connection = connect();
    for stream in (1..200).step_by(2) {
        connection.send_headers(stream, &fields, true);
        connection.send_frame(http2::RST_STREAM, 0, stream, &[0, 0, 0, 8]);
    }
    assert!(connection.is_ended());
    world.wait_for_record(since, "resets", has_reason("too_many_resets"));
}

#[test]
fn p17_a_stop_waits_no_longer_than_it_should() {
    let origin = ScriptedOrigin::start_plain();
    let mut world =
        InstanceSetup::with_hosts(&[("a.test", origin.port())]).with_limits("drain_seconds = 1\n").start();
    origin.set_reply(OriginReply::SayAndHang(Vec::new()));
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
    origin.wait_until("the request has come", |seen| seen.iter().any(|seen| !seen.bytes.is_empty()));
    let idle = world.open_tunnel("a.test", origin.port());
    assert!(world.stop(), "a stop ends well");
    wire.read_to_end();
    drop(idle);
    world.wait_for_record(0, "what did not finish is cut", has_reason("cut_by_operator"));
}
