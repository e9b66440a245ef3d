//! HTTP/2: malformed requests and frames end as RFC 9113 says, none of them reaches an HTTP/1 origin as something
//! else, floods end their own connection only, and whoever asks beside them is served.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::http2::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, HeaderList, Http2Client, PING, PRIORITY,
    PUSH_PROMISE, RST_STREAM, SETTINGS, StreamEnd, WINDOW_UPDATE, encode_frame, encode_headers,
    request_fields,
};
use crate::instance::{DEADLINE, InstanceSetup, SandbarInstance};
use crate::origin::ScriptedOrigin;

/// What must become of a request.
#[derive(Debug)]
enum StreamOutcome {
    /// Forwarded as one request.
    Passes,
    /// Answered with this status, and recorded with this code.
    Refused(u16, &'static str),
    /// A stream or connection error (RFC 9113, section 8.1.1), or 400; and nothing leaves.
    Malformed,
}

use StreamOutcome::{Malformed, Passes, Refused};

struct StreamScene {
    world: SandbarInstance,
    origin: ScriptedOrigin,
    config: std::sync::Arc<rustls::ClientConfig>,
}

impl StreamScene {
    fn new() -> Self {
        let root = OriginCa::new();
        let origin = ScriptedOrigin::start_tls(root.server_config("a.test"));
        let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).with_roots(root.pem()).start();
        let config = client_config(&world, "h2");
        StreamScene { world, origin, config }
    }

    fn connect(&self) -> Http2Client {
        let wire = self.world.open_tunnel("a.test", self.origin.port());
        Http2Client::new(tls_handshake(wire, &self.config, "a.test").unwrap())
    }

    fn plain_request(&self) -> HeaderList {
        request_fields("GET", "https", &format!("a.test:{}", self.origin.port()), "/x")
    }

    /// The program is there for others still.
    fn assert_alive(&self, what: &str) {
        let mut connection = self.connect();
        connection.send_headers(1, &self.plain_request(), true);
        assert_eq!(connection.wait_for_status(1), Some(200), "after {what}");
    }
}

/// `get` with one field changed, added or taken away.
fn with_field(get: &HeaderList, name: &str, value: &[u8]) -> HeaderList {
    let mut fields = get.clone();
    match fields.iter_mut().find(|(known, _)| known == name) {
        Some(field) => field.1 = value.to_vec(),
        None => fields.push((name.to_owned(), value.to_vec())),
    }
    fields
}

fn add_field(get: &HeaderList, name: &str, value: &[u8]) -> HeaderList {
    [&get[..], &[(name.to_owned(), value.to_vec())]].concat()
}

fn without_field(get: &HeaderList, name: &str) -> HeaderList {
    get.iter().filter(|(known, _)| known != name).cloned().collect()
}

#[test]
fn a_malformed_request_reaches_nobody() {
    let scene = StreamScene::new();
    let get = scene.plain_request();
    let mut late = get.clone();
    late.insert(0, ("x".to_owned(), b"y".to_vec()));
    let other = format!("b.test:{}", scene.origin.port());
    for (what, fields, fate) in [
        ("plain", get.clone(), Passes),
        ("te: trailers", add_field(&get, "te", b"trailers"), Passes),
        ("announced trailers", add_field(&get, "trailer", b"x-sum"), Refused(400, "bad_request")),
        ("cookie crumbs", add_field(&add_field(&get, "cookie", b"a=b"), "cookie", b"c=d"), Passes),
        ("no :authority", without_field(&get, ":authority"), Malformed),
        ("no :method", without_field(&get, ":method"), Malformed),
        ("no :scheme", without_field(&get, ":scheme"), Malformed),
        ("no :path", without_field(&get, ":path"), Malformed),
        ("two :method", add_field(&get, ":method", b"POST"), Malformed),
        ("two :path", add_field(&get, ":path", b"/y"), Malformed),
        ("two :authority", add_field(&get, ":authority", other.as_bytes()), Malformed),
        ("two :scheme", add_field(&get, ":scheme", b"http"), Malformed),
        ("unknown pseudo field", add_field(&get, ":x", b"y"), Malformed),
        (":status", add_field(&get, ":status", b"200"), Malformed),
        ("pseudo fields last", late, Malformed),
        ("upper-case name", add_field(&get, "X-Upper", b"y"), Malformed),
        ("connection", add_field(&get, "connection", b"close"), Malformed),
        ("keep-alive", add_field(&get, "keep-alive", b"5"), Malformed),
        ("proxy-connection", add_field(&get, "proxy-connection", b"close"), Malformed),
        ("transfer-encoding", add_field(&get, "transfer-encoding", b"chunked"), Malformed),
        ("upgrade", add_field(&get, "upgrade", b"websocket"), Malformed),
        ("te: gzip", add_field(&get, "te", b"gzip"), Malformed),
        ("line ends in a value", add_field(&get, "x", b"a\r\nx-smuggled: b"), Malformed),
        ("line feed in a value", add_field(&get, "x", b"a\nx-smuggled: b"), Malformed),
        ("return in a value", add_field(&get, "x", b"a\rb"), Malformed),
        ("NUL in a value", add_field(&get, "x", b"a\0b"), Malformed),
        ("line ends in a name", add_field(&get, "x\r\nx-smuggled", b"y"), Malformed),
        ("colon in a name", add_field(&get, "x:y", b"z"), Malformed),
        ("space in a name", add_field(&get, "x y", b"z"), Malformed),
        ("NUL in a name", add_field(&get, "x\0", b"z"), Malformed),
        ("no name", add_field(&get, "", b"z"), Malformed),
        ("line ends in :path", with_field(&get, ":path", b"/x HTTP/1.1\r\nx-smuggled: y\r\n\r\n"), Malformed),
        ("space in :path", with_field(&get, ":path", b"/x HTTP/1.1"), Malformed),
        ("NUL in :path", with_field(&get, ":path", b"/x\0"), Malformed),
        ("empty :path", with_field(&get, ":path", b""), Malformed),
        (":path without slash", with_field(&get, ":path", b"x"), Malformed),
        (":path with a host", with_field(&get, ":path", b"http://b.test/x"), Malformed),
        (":path that begins with two slashes", with_field(&get, ":path", b"//b.test/x"), Passes),
        (
            "line ends in :method",
            with_field(&get, ":method", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET"),
            Malformed,
        ),
        ("space in :method", with_field(&get, ":method", b"GET /smuggled"), Malformed),
        ("lower-case :method", with_field(&get, ":method", b"get"), Refused(400, "bad_method")),
        ("TRACE", with_field(&get, ":method", b"TRACE"), Refused(403, "method_not_allowed")),
        ("line ends in :authority", with_field(&get, ":authority", b"a.test\r\nx-smuggled: y"), Malformed),
        (
            "userinfo in :authority",
            with_field(&get, ":authority", format!("b.test@{}", "a.test").as_bytes()),
            Malformed,
        ),
        ("path in :authority", with_field(&get, ":authority", b"a.test/x"), Malformed),
        ("empty :authority", with_field(&get, ":authority", b""), Malformed),
        ("another host in Host", add_field(&get, "host", other.as_bytes()), Malformed),
        (
            "Host twice",
            add_field(&add_field(&get, "host", other.as_bytes()), "host", other.as_bytes()),
            Malformed,
        ),
        ("another length", add_field(&get, "content-length", b"5"), Malformed),
        (
            "two lengths",
            add_field(&add_field(&get, "content-length", b"0"), "content-length", b"5"),
            Malformed,
        ),
        ("a length with a sign", add_field(&get, "content-length", b"+0"), Malformed),
        ("a length that is none", add_field(&get, "content-length", b"x"), Malformed),
        (
            "CONNECT",
            without_field(&without_field(&with_field(&get, ":method", b"CONNECT"), ":path"), ":scheme"),
            Malformed,
        ),
        (
            "extended CONNECT",
            add_field(&with_field(&get, ":method", b"CONNECT"), ":protocol", b"websocket"),
            Malformed,
        ),
    ] {
        let before = scene.origin.requests().len();
        let mut connection = scene.connect();
        connection.send_headers(1, &fields, true);
        let end = connection.wait_for_end(1);
        match fate {
            Passes => assert_eq!(end, StreamEnd::Status(200), "{what}"),
            Refused(status, code) => {
                assert_eq!(end, StreamEnd::Status(status), "{what}");
                scene.world.wait_for_record(0, what, |record| record["status_detail"] == code);
            }
            Malformed => {
                let refused =
                    matches!(end, StreamEnd::Reset | StreamEnd::Gone | StreamEnd::Status(400 | 405 | 421));
                assert!(refused, "{what}: {end:?}");
            }
        }
        let passed = usize::from(matches!(fate, Passes));
        assert_eq!(scene.origin.requests().len(), before + passed, "{what}");
    }
    assert_eq!(scene.origin.faults(), [""; 0], "something malformed has reached the origin");
    let smuggled = |request: &crate::strict_http::StrictRequest| request.field("x-smuggled").is_some();
    assert!(!scene.origin.requests().iter().any(smuggled));
    scene.assert_alive("all of it");
}

#[test]
fn a_body_is_as_long_as_it_says() {
    let scene = StreamScene::new();
    let post = with_field(&scene.plain_request(), ":method", b"POST");
    for (what, length, data, passes) in [
        ("right", &b"3"[..], &b"abc"[..], true),
        ("too short", b"5", b"abc", false),
        ("too long", b"2", b"abc", false),
    ] {
        let before = scene.origin.requests().len();
        let mut connection = scene.connect();
        connection.send_headers(1, &add_field(&post, "content-length", length), false);
        connection.send_frame(DATA, END_STREAM, 1, data);
        let end = connection.wait_for_end(1);
        assert_eq!(end == StreamEnd::Status(200), passes, "{what}: {end:?}");
        assert_eq!(scene.origin.requests().len(), before + usize::from(passes), "{what}");
    }
    // Trailers: none of them becomes part of the request.
    let mut connection = scene.connect();
    connection.send_headers(1, &post, false);
    connection.send_frame(DATA, 0, 1, b"abc");
    connection.send_headers(1, &vec![(":path".to_owned(), b"/smuggled".to_vec())], true);
    connection.wait_for_end(1);
    assert_eq!(scene.origin.faults(), [""; 0]);
    assert!(scene.origin.requests().iter().all(|request| request.target == "/x"));
}

#[test]
fn a_malformed_frame_ends_its_connection() {
    let scene = StreamScene::new();
    let head = encode_headers(&scene.plain_request());
    let whole = END_HEADERS | END_STREAM;
    let headers = |stream: u32| encode_frame(HEADERS, whole, stream, &head);
    let setting = |id: u8, value: u32| [&[0, id][..], &value.to_be_bytes()].concat();
    for (what, bytes) in [
        ("DATA on stream 0", encode_frame(DATA, 0, 0, b"x")),
        ("HEADERS on stream 0", headers(0)),
        ("HEADERS on an even stream", headers(2)),
        ("DATA on an idle stream", encode_frame(DATA, 0, 1, b"x")),
        ("RST_STREAM on an idle stream", encode_frame(RST_STREAM, 0, 1, &[0; 4])),
        ("RST_STREAM on stream 0", encode_frame(RST_STREAM, 0, 0, &[0; 4])),
        ("RST_STREAM of another size", encode_frame(RST_STREAM, 0, 1, &[0; 3])),
        ("WINDOW_UPDATE on an idle stream", encode_frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1])),
        ("WINDOW_UPDATE by nothing", encode_frame(WINDOW_UPDATE, 0, 0, &[0; 4])),
        ("WINDOW_UPDATE of another size", encode_frame(WINDOW_UPDATE, 0, 0, &[0; 3])),
        ("a window that overflows", encode_frame(WINDOW_UPDATE, 0, 0, &[0x7f, 255, 255, 255]).repeat(2)),
        ("SETTINGS on a stream", encode_frame(SETTINGS, 0, 1, &[])),
        ("SETTINGS of another size", encode_frame(SETTINGS, 0, 0, &[0; 5])),
        ("SETTINGS that acknowledge with content", encode_frame(SETTINGS, 1, 0, &[0; 6])),
        ("a first window too large", encode_frame(SETTINGS, 0, 0, &setting(4, 1 << 31))),
        ("frames too small", encode_frame(SETTINGS, 0, 0, &setting(5, 1))),
        ("frames too large", encode_frame(SETTINGS, 0, 0, &setting(5, 1 << 24))),
        ("push neither on nor off", encode_frame(SETTINGS, 0, 0, &setting(2, 2))),
        ("PING of another size", encode_frame(PING, 0, 0, &[0; 6])),
        ("PING on a stream", encode_frame(PING, 0, 1, &[0; 8])),
        ("GOAWAY on a stream", encode_frame(GOAWAY, 0, 1, &[0; 8])),
        ("GOAWAY of another size", encode_frame(GOAWAY, 0, 0, &[0; 4])),
        ("PRIORITY on stream 0", encode_frame(PRIORITY, 0, 0, &[0; 5])),
        ("CONTINUATION of nothing", encode_frame(CONTINUATION, END_HEADERS, 1, &head)),
        (
            "CONTINUATION of another stream",
            [encode_frame(HEADERS, 0, 1, &head), encode_frame(CONTINUATION, END_HEADERS, 3, &head)].concat(),
        ),
        (
            "a PING inside a header block",
            [encode_frame(HEADERS, 0, 1, &head), encode_frame(PING, 0, 0, &[0; 8])].concat(),
        ),
        ("a frame that is too long", encode_frame(DATA, 0, 1, &vec![0; 20_000])),
        ("a header frame that is too long", encode_frame(HEADERS, whole, 1, &vec![0; 20_000])),
        ("PUSH_PROMISE from a client", encode_frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2])),
        ("padding longer than the frame", [headers(1), encode_frame(DATA, 8, 3, &[200, 0])].concat()),
        ("headers padded beyond their end", encode_frame(HEADERS, whole | 8, 1, &[200, 0x82])),
        ("an index of nothing", encode_frame(HEADERS, whole, 1, &[0x80])),
        ("an index beyond the table", encode_frame(HEADERS, whole, 1, &[0xff, 0x80, 0x01])),
        ("a table too large", encode_frame(HEADERS, whole, 1, &[0x3f, 0xe1, 0xff, 0x03])),
        ("a string that is cut", encode_frame(HEADERS, whole, 1, &[0, 5, b'x'])),
        ("an older stream", [headers(5), headers(3)].concat()),
        ("a stream used twice", [headers(1), headers(1)].concat()),
    ] {
        let mut connection = scene.connect();
        connection.wire.send(&bytes);
        // A stream error leaves the connection open: then it is asked to end.
        connection.send_frame(GOAWAY, 0, 0, &[0; 8]);
        assert!(connection.is_ended() || connection.wait_for_end(1) == StreamEnd::Reset, "{what}");
        assert!(!connection.has_ok_status(3), "{what}");
    }
    assert_eq!(scene.origin.faults(), [""; 0]);
    // What is merely unknown is read over.
    let mut connection = scene.connect();
    connection.send_frame(0xfe, 0xff, 7, b"whatever");
    connection.send_frame(PRIORITY, 0, 9, &[0, 0, 0, 0, 1]);
    connection.send_frame(SETTINGS, 0, 0, &setting(0xee, 5));
    connection.send_headers(11, &scene.plain_request(), true);
    assert_eq!(connection.wait_for_status(11), Some(200));
    scene.assert_alive("all of it");
}

/// Bytes of one flood, sent until they are not taken any more; what comes back is thrown away.
fn send_flood(world: &SandbarInstance, port: u16, start: &[u8], round: impl Fn(u32) -> Vec<u8>, rounds: u32) {
    let mut stream = TcpStream::connect(world.listeners[0]).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let head = format!("CONNECT a.test:{port} HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut granted = [0; 39];
    stream.read_exact(&mut granted).unwrap();
    assert!(granted.ends_with(b"\r\n\r\n"));
    let mut back = stream.try_clone().unwrap();
    let reader = thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while back.read(&mut buffer).is_ok_and(|count| count > 0) {}
    });
    let hello = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &encode_frame(SETTINGS, 0, 0, &[])[..], start].concat();
    let mut taken = stream.write_all(&hello).is_ok();
    for at in 0..rounds {
        taken = taken && stream.write_all(&round(at)).is_ok();
    }
    drop(stream.shutdown(std::net::Shutdown::Both));
    reader.join().unwrap();
}

#[test]
fn p17_floods_end_and_others_are_served_beside_them() {
    let scene = StreamScene::new();
    let (world, port) = (&scene.world, scene.origin.port());
    let head = encode_headers(&request_fields("GET", "http", &format!("a.test:{port}"), "/x"));
    let headers = |flags: u8, stream: u32| encode_frame(HEADERS, flags, stream, &head);
    let odd = |at: u32| at * 2 + 1;
    // One long field goes into the table; each later octet of the block stands for all of it again.
    let long = [&[0x40, 1, b'x', 0x7f, 0x81, 0x1e][..], &vec![b'y'; 4000]].concat();
    let bomb = |at: u32| {
        encode_frame(HEADERS, END_HEADERS | END_STREAM, odd(at), &[&long[..], &vec![0xbe; 12_000]].concat())
    };
    type FloodRound<'a> = Box<dyn Fn(u32) -> Vec<u8> + Send + Sync + 'a>;
    let floods: Vec<(&str, Vec<u8>, FloodRound<'_>, u32)> = vec![
        (
            "rapid reset",
            Vec::new(),
            Box::new(|at| {
                let each = (at * 100..at * 100 + 100).map(odd);
                each.flat_map(|stream| {
                    [
                        headers(END_HEADERS | END_STREAM, stream),
                        encode_frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]),
                    ]
                    .concat()
                })
                .collect()
            }),
            200,
        ),
        (
            "CONTINUATION",
            headers(0, 1),
            Box::new(|_| encode_frame(CONTINUATION, 0, 1, &[0, 1, b'x', 1, b'y'].repeat(2000))),
            2000,
        ),
        (
            "empty CONTINUATION",
            headers(0, 1),
            Box::new(|_| encode_frame(CONTINUATION, 0, 1, &[]).repeat(1000)),
            20,
        ),
        ("HPACK bomb", Vec::new(), Box::new(bomb), 50),
        ("PING", Vec::new(), Box::new(|_| encode_frame(PING, 0, 0, &[0; 8]).repeat(1000)), 20),
        (
            "SETTINGS",
            Vec::new(),
            Box::new(|_| encode_frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 9]).repeat(1000)),
            20,
        ),
        ("empty DATA", headers(END_HEADERS, 1), Box::new(|_| encode_frame(DATA, 0, 1, &[]).repeat(1000)), 20),
        (
            "WINDOW_UPDATE",
            headers(END_HEADERS, 1),
            Box::new(|_| encode_frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1]).repeat(1000)),
            20,
        ),
        (
            "PRIORITY",
            Vec::new(),
            Box::new(|at| encode_frame(PRIORITY, 0, odd(at), &[0, 0, 0, 0, 1]).repeat(1000)),
            20,
        ),
    ];
    scene.assert_alive("nothing yet");
    let before = world.resident_kilobytes();
    for (what, start, round, rounds) in &floods {
        thread::scope(|scope| {
            let flooding = scope.spawn(|| send_flood(world, port, start, round, *rounds));
            let asked = Instant::now();
            scene.assert_alive(what);
            assert!(asked.elapsed() < DEADLINE / 3, "{what} keeps others waiting");
            flooding.join().unwrap();
        });
        scene.assert_alive(what);
        let grown = world.resident_kilobytes().saturating_sub(before);
        assert!(grown < 128 << 10, "{what} took {grown} KB");
    }
    world
        .wait_for_record(0, "rapid reset is recorded", |record| record["status_detail"] == "too_many_resets");
}
