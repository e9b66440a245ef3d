//! Every bound of `[limits]` on the data path, each exceeded (P17), with small values so that it takes no time.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

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

// proves: limits.first_bytes_seconds
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

// proves: limits.head_seconds, limits.keep_alive_seconds
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

// proves: limits.idle_seconds
#[test]
fn p17_a_request_that_stands_still_ends() {
    let (world, origin) = start_with_timeouts();
    let host = format!("a.test:{}", origin.port());
    // The sandbox stops in the middle of its body.
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!("POST /x HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\nabc"));
    wire.read_to_end();
    world.wait_for_record(since, "the body stands still", has_reason("body_late"));
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
    let late = |record: &Value| {
        ["body_late", "idle_too_long", "upstream_timeout"]
            .iter()
            .any(|code| record["status_detail"] == **code)
    };
    world.wait_for_record(since, "the answer stands still", late);
}

#[test]
fn p17_an_http2_head_comes_in_time() {
    let origin = ScriptedOrigin::start_plain();
    let limits = "head_seconds = 1\nkeep_alive_seconds = 60\n";
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).with_limits(limits).start();
    let fields = http2::request_fields("GET", "http", &format!("a.test:{}", origin.port()), "/x");
    let block = http2::encode_headers(&fields);
    for what in ["silence after HEADERS", "half a frame", "dripping CONTINUATION"] {
        let since = world.record_count();
        let mut connection = http2::Http2Client::new(world.open_tunnel("a.test", origin.port()));
        match what {
            "half a frame" => connection.wire.send([0, 0, 99, http2::HEADERS, http2::END_HEADERS, 0, 0]),
            _ => connection.send_frame(http2::HEADERS, http2::END_STREAM, 1, &block),
        }
        if what == "dripping CONTINUATION" {
            let frame = http2::encode_frame(http2::CONTINUATION, http2::END_HEADERS, 1, &[0; 1000]);
            send_slowly(&mut connection.wire, &frame);
        }
        connection.wire.read_to_end();
        let record = world.wait_for_record(since, what, has_reason("first_bytes_late"));
        assert_eq!(record["action_id"], 2, "{what}");
    }
    assert_eq!(origin.connections().len(), 0, "something reached the origin");
}

// proves: limits.body_bytes_per_second
#[test]
fn p17_a_body_has_a_least_rate() {
    let root = OriginCa::new();
    let (origin, tls) =
        (ScriptedOrigin::start_plain(), ScriptedOrigin::start_tls(root.server_config("a.test")));
    let limits = "idle_seconds = 1\nfirst_byte_seconds = 60\nbody_bytes_per_second = 200\n";
    let plan = InstanceSetup::with_hosts(&[("a.test", origin.port()), ("a.test", tls.port())]);
    let world = plan.with_roots(root.pem()).with_limits(limits).start();
    let head = format!("POST /x HTTP/1.1\r\nHost: a.test:{}\r\n", origin.port());
    for (what, framing, body) in [
        ("a measured body", "Content-Length: 5000\r\n\r\n", b"x".to_vec()),
        ("a chunked body", "Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n".to_vec()),
    ] {
        let since = world.record_count();
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(format!("{head}{framing}"));
        send_slowly(&mut wire, &body.repeat(DRIP_COUNT));
        let record = world.wait_for_record(since, what, has_reason("body_late"));
        assert_eq!(record["unmapped"]["sandbar"]["ending"], "failed", "{what}");
    }
    let since = world.record_count();
    let wire = tls_handshake(world.open_tunnel("a.test", tls.port()), &client_config(&world, "h2"), "a.test");
    let mut connection = http2::Http2Client::new(wire.unwrap());
    let fields = http2::request_fields("POST", "https", &format!("a.test:{}", tls.port()), "/x");
    connection.send_headers(1, &fields, false);
    for _ in 0..DRIP_COUNT {
        connection.send_frame(http2::DATA, 0, 1, b"x");
        std::thread::sleep(DRIP_INTERVAL);
        if world.records().iter().skip(since).any(has_reason("body_late")) {
            break;
        }
    }
    world.wait_for_record(since, "a body over HTTP/2", has_reason("body_late"));
    assert_eq!((origin.requests(), tls.requests()), (vec![], vec![]), "half a request is none");
    // Quick enough: more than the rate, though in small pieces.
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!("{head}Content-Length: 2000\r\n\r\n"));
    for _ in 0..50 {
        wire.send([b'x'; 40]);
        std::thread::sleep(DRIP_INTERVAL);
    }
    assert_eq!(wire.read_response("POST").map(|answer| answer.status), Some(200));
}

#[test]
fn p17_an_answer_that_announces_its_length_has_a_least_rate_and_a_stream_has_none() {
    for (what, head, end, cut) in [
        ("a measured answer", "Content-Length: 5000\r\n\r\n", "", true),
        ("a stream of events", "Transfer-Encoding: chunked\r\n\r\n", "0\r\n\r\n", false),
    ] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let limits = "idle_seconds = 1\nfirst_byte_seconds = 60\nbody_bytes_per_second = 200\n";
        let world = InstanceSetup::with_hosts(&[("a.test", port)]).with_limits(limits).start();
        let origin = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            stream.write_all(format!("HTTP/1.1 200 OK\r\n{head}").as_bytes()).unwrap();
            let piece: &[u8] = if cut { b"x" } else { b"1\r\nx\r\n" };
            for _ in 0..if cut { DRIP_COUNT } else { 80 } {
                if stream.write_all(piece).is_err() {
                    return; // it is cut
                }
                std::thread::sleep(DRIP_INTERVAL);
            }
            drop(stream.write_all(end.as_bytes()));
        });
        let since = world.record_count();
        let mut wire = world.open_tunnel("a.test", port);
        // The request goes on as slowly, in the second case: both sides speak once the answer has begun.
        let body = if cut { "Content-Length: 0" } else { "Content-Length: 5000" };
        wire.send(format!("POST /x HTTP/1.1\r\nHost: a.test:{port}\r\n{body}\r\n\r\n"));
        if cut {
            wire.read_to_end();
            world.wait_for_record(since, what, has_reason("body_late"));
        } else {
            assert!(wire.read_until(b"\r\n\r\n").unwrap().starts_with(b"HTTP/1.1 200 "), "{what}");
            for _ in 0..60 {
                wire.send("y");
                std::thread::sleep(DRIP_INTERVAL);
            }
            assert!(wire.read_until(b"0\r\n\r\n").is_some(), "{what} reaches its end");
            assert!(!world.records().iter().any(has_reason("body_late")), "{what}");
        }
        origin.join().unwrap();
    }
}

// proves: limits.connection_seconds
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

// proves: limits.tunnel_idle_seconds
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
    let plan = InstanceSetup::with_hosts(&[("a.test", plain.port()), ("a.test", tls.port())])
        .with_roots(root.pem())
        .with_limits("head_bytes = 2048\nhead_fields = 20\nhello_bytes = 1024\n");
    (plan.start(), plain, tls)
}

// proves: limits.head_bytes, limits.head_fields
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

// proves: limits.hello_bytes
#[test]
fn p17_hellos_have_a_size() {
    let (world, _, tls) = start_with_size_limits();
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", tls.port());
    wire.send(RawClientHello { padding: 8000, ..RawClientHello::for_name("a.test") }.record_bytes());
    assert_eq!(wire.read_to_end(), [21, 3, 3, 0, 2, 2, 50]);
    world.wait_for_record(since, "hello_bytes", has_reason("head_too_large"));
}

// proves: limits.connections, limits.connections_per_sandbox
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
// proves: quota.requests.total, quota.ports.total
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

// proves: limits.streams, limits.resets
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

// proves: limits.answer_head_bytes, limits.answer_head_fields
#[test]
fn p17_heads_of_answers_have_a_size() {
    let origin = ScriptedOrigin::start_plain();
    let plan = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
    let world = plan.with_limits("answer_head_bytes = 1000\nanswer_head_fields = 10\n").start();
    let get = format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port());
    for (what, fields, refused) in [
        ("as many as may be", "X: y\r\n".repeat(8), false),
        ("too many", "X: y\r\n".repeat(11), true),
        ("as long as may be", format!("X: {}\r\n", "y".repeat(800)), false),
        ("too long", format!("X: {}\r\n", "y".repeat(1000)), true),
    ] {
        let answer = format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 2\r\n\r\nok");
        origin.set_reply(OriginReply::SayAndClose(answer.into_bytes()));
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(&get);
        let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{what}: no answer"));
        match refused {
            true => world.assert_refused(what, &answer, 502, "answer_too_large"),
            false => assert_eq!((answer.status, answer.text()), (200, "ok".into()), "{what}"),
        }
    }
}

// proves: limits.connect_seconds
#[test]
fn p17_an_origin_that_does_not_finish_its_handshake_is_given_up() {
    let origin = ScriptedOrigin::start_plain();
    origin.set_reply(OriginReply::SayAndHang(Vec::new()));
    let plan = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
    let world = plan.with_limits("connect_seconds = 1\n").start();
    let config = client_config(&world, "http/1.1");
    let mut wire = tls_handshake(world.open_tunnel("a.test", origin.port()), &config, "a.test").unwrap();
    let started = Instant::now();
    wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
    let answer = wire.read_response("GET").unwrap();
    assert!(matches!(answer.status, 502 | 504), "{}", answer.text());
    let usual = Duration::from_secs(10); // without the key
    assert!(started.elapsed() < usual, "{:?}", started.elapsed());
    assert_eq!(origin.requests(), []);
}

/// Each thread keeps as many idle connections as the limit says, so more origins than threads do not fit.
// proves: limits.pool_connections
#[test]
fn p17_idle_connections_to_origins_are_counted() {
    let threads = std::thread::available_parallelism().unwrap().get();
    for (limits, pooled) in [("", true), ("pool_connections = 1\n", false)] {
        let origins: Vec<_> = (0..2 * threads + 2).map(|_| ScriptedOrigin::start_plain()).collect();
        let hosts: Vec<_> = origins.iter().map(|origin| ("a.test", origin.port())).collect();
        let world = InstanceSetup::with_hosts(&hosts).with_limits(limits).start();
        for _ in 0..2 {
            for origin in &origins {
                let mut wire = world.connect();
                let port = origin.port();
                wire.send(format!("GET http://a.test:{port}/x HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n"));
                assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200));
            }
        }
        let dialled: usize = origins.iter().map(|origin| origin.connections().len()).sum();
        match pooled {
            true => assert_eq!(dialled, origins.len(), "each is used again"),
            false => {
                assert!(dialled >= 2 * origins.len() - threads, "{dialled} for {} origins", origins.len())
            }
        }
    }
}

// proves: limits.drain_seconds
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
