//! Bodies on their way out: the sizes in which a client writes one do not reach the origin for nothing (P19), what a
//! server may be waiting for is not held back, and a request that is sent again carries its body once.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;

use serde_json::Value;

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::http2::{DATA, END_STREAM, HeaderList, Http2Client, request_fields};
use crate::http2_origin::Http2Origin;
use crate::instance::{InstanceSetup, wait_until};
use crate::signals::SignalScene;
use crate::strict_http::{StrictParse, StrictRequest, parse_request};
use crate::wire::RawConnection;

/// Bytes of a block.
const BLOCK: usize = 16 << 10;
const QUIET: &str = "[signals]\nheaders = \"off\"\nurl = \"off\"\n";

/// The sizes of the chunks in what an origin got, without the last one of zero.
fn chunk_sizes(bytes: &[u8]) -> Vec<usize> {
    let head = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head") + 4;
    let (mut rest, mut sizes) = (&bytes[head..], Vec::new());
    while let Some(end) = rest.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(str::from_utf8(&rest[..end]).unwrap(), 16).expect("a size alone");
        if size == 0 || rest.len() < end + 2 + size + 2 {
            break;
        }
        sizes.push(size);
        rest = &rest[end + 2 + size + 2..];
    }
    sizes
}

fn chunk(size: usize) -> Vec<u8> {
    [format!("{size:x};x=y\r\n").into_bytes(), vec![b'-'; size], b"\r\n".to_vec()].concat()
}

impl SignalScene {
    fn start_upload(&self) -> RawConnection {
        let authority = self.authority();
        let mut wire = RawConnection::connect(self.world.listeners[0]);
        wire.send(format!(
            "PUT http://{authority}/up HTTP/1.1\r\nHost: {authority}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        ));
        wire
    }

    /// Bits that were charged so far.
    pub(crate) fn header_bits(&self) -> u64 {
        let told: Value = serde_json::from_str(&self.world.run_command(&["budget", "--json"])).unwrap();
        let all = told.to_string();
        let find = |value: &Value| value["budget"] == "header_bits_per_hour";
        fn search<'a>(value: &'a Value, find: &dyn Fn(&Value) -> bool) -> Option<&'a Value> {
            match value {
                Value::Array(items) => items.iter().find_map(|item| search(item, find)),
                Value::Object(fields) if find(value) => Some(value).filter(|_| !fields.is_empty()),
                Value::Object(fields) => fields.values().find_map(|item| search(item, find)),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
            }
        }
        search(&told, &find).and_then(|row| row["used"].as_u64()).unwrap_or_else(|| panic!("{all}"))
    }
}

#[test]
fn p19_sizes_of_chunks_do_not_spell_a_message() {
    let scene = SignalScene::start("", QUIET);
    let message = b"the key is under the third stone";
    let mut wire = scene.start_upload();
    let mut body: Vec<u8> = message.iter().flat_map(|byte| chunk(usize::from(*byte))).collect();
    body.extend(chunk(3 * BLOCK));
    body.extend(b"0\r\n\r\n");
    wire.send(body);
    assert_eq!(wire.read_response("PUT").unwrap().status, 200);
    let arrived = scene.arrived();
    let (sizes, total) =
        (chunk_sizes(&arrived), message.iter().map(|byte| usize::from(*byte)).sum::<usize>());
    assert_eq!(sizes.iter().sum::<usize>(), total + 3 * BLOCK);
    // Where the sockets made it wait there may be a boundary, and at the end what is left.
    assert!(sizes.iter().filter(|size| **size != BLOCK).count() <= 4, "{sizes:?}");
    assert!(!String::from_utf8_lossy(&arrived).contains("x=y"), "extensions do not leave");
}

#[test]
fn p19_boundaries_of_blocks_are_charged_and_the_budget_ends_them() {
    let scene = SignalScene::start("", &format!("{QUIET}[budget]\nheader_bits_per_hour = 2000\n"));
    let mut wire = scene.start_upload();
    scene.origin.wait_until("the request begins", |seen| seen.iter().any(|seen| !seen.bytes.is_empty()));
    let before = scene.header_bits();
    let mut passed = 0;
    // Each chunk leaves alone, because nothing follows until it has arrived.
    while passed < 200 && wire.try_send(&chunk(100 + passed)) {
        let arrived = || scene.origin.connections().first().map_or(0, |seen| chunk_sizes(&seen.bytes).len());
        let refused = || scene.world.records().iter().any(|record| record["status_detail"] == "budget_spent");
        wait_until("the chunk leaves, or is refused", || arrived() > passed || refused());
        if arrived() <= passed {
            break;
        }
        passed += 1;
    }
    let answer = wire.read_response("PUT").expect("an answer");
    scene.world.assert_refused("boundaries", &answer, 403, "budget_spent");
    assert!(
        (20..=100).contains(&passed),
        "{passed} boundaries left with 2,000 bits, {before} of them for the head"
    );
    assert!(scene.origin.requests().is_empty(), "the request is cut");
}

#[test]
fn p19_an_honest_upload_from_a_pipe_costs_little() {
    const LENGTH: usize = 10 << 20;
    let scene = SignalScene::start("", &format!("{QUIET}[budget]\nheader_bits_per_hour = 1000000\n"));
    let mut curl = Command::new("curl")
        .args(["-sS", "-o", "/dev/null", "-w", "%{http_code}", "-T", "-", "-x"])
        .arg(format!("http://{}", scene.world.listeners[0]))
        .arg(format!("http://{}/up", scene.authority()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = curl.stdin.take().unwrap();
    let body: Vec<u8> = (0..LENGTH).map(|at| (at * 31 % 251) as u8).collect();
    let written = body.clone();
    let writer = thread::spawn(move || pipe.write_all(&written).unwrap());
    let said = curl.wait_with_output().unwrap();
    writer.join().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout), "200");
    let sizes = chunk_sizes(&scene.origin.connections()[0].bytes);
    let partial = sizes.iter().filter(|size| **size != BLOCK).count();
    let bits = scene.header_bits();
    println!(
        "10 MiB from a pipe: {} chunks, {partial} of them partial, {bits} bits with the head",
        sizes.len()
    );
    assert!(scene.origin.requests()[0].body == body, "the body arrives as it is");
    assert!(bits < 8192, "{bits} bits for {partial} partial blocks of {}", sizes.len());
}

#[test]
fn what_a_server_may_wait_for_is_not_held_back() {
    // A policy that denies all content, and a credential whose value would be denied.
    let scene = SignalScene::start("", "[signals]\nsecrets = \"deny\"\n");
    let mut wire = scene.start_upload();
    for message in ["ping", "{\"id\":7}\n", "SELECT 1;", "ghp_"] {
        wire.send(format!("{:x}\r\n{message}\r\n", message.len()));
        scene.origin.wait_until(message, |seen| {
            seen.iter().any(|seen| String::from_utf8_lossy(&seen.bytes).contains(message))
        });
    }
    wire.send("0\r\n\r\n");
    assert_eq!(wire.read_response("PUT").unwrap().status, 200);
}

fn with_type(fields: &HeaderList, kind: &str) -> HeaderList {
    [&fields[..], &[("content-type".to_owned(), kind.as_bytes().to_vec())]].concat()
}

fn message(length: usize) -> Vec<u8> {
    [&[0][..], &u32::try_from(length).unwrap().to_be_bytes(), &vec![b'.'; length]].concat()
}

#[test]
fn p19_frames_of_http2_leave_in_blocks_and_messages_whole() {
    let root = OriginCa::new();
    let origin = Http2Origin::start(&root, "a.test");
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port)]).with_roots(root.pem()).start();
    let config = client_config(&world, "h2");
    let connect = || {
        let wire = world.open_tunnel("a.test", origin.port);
        Http2Client::new(tls_handshake(wire, &config, "a.test").unwrap())
    };
    let post = request_fields("POST", "https", &format!("a.test:{}", origin.port), "/plain");
    let frames = || -> Vec<u64> {
        let frames = origin.frames();
        frames.iter().map(|frame| frame["length"].as_u64().unwrap()).collect()
    };
    // With a length, the sizes of frames say nothing.
    let mut client = connect();
    let fields = [&post[..], &[("content-length".to_owned(), b"20000".to_vec())]].concat();
    client.send_headers(1, &fields, false);
    for size in [1, 7, 492, 4_500, 15_000] {
        client.send_frame(DATA, if size == 15_000 { END_STREAM } else { 0 }, 1, &vec![b'-'; size]);
    }
    assert_eq!(client.wait_for_status(1), Some(200));
    assert_eq!(frames(), [16_384, 3_616]);
    // Messages: a part of one stays until the rest comes, a whole one leaves while the request goes on.
    let seen = frames().len();
    let mut client = connect();
    client.send_headers(1, &with_type(&post, "application/grpc"), false);
    let bytes = message(300);
    client.send_frame(DATA, 0, 1, &bytes[..100]);
    client.send_frame(DATA, 0, 1, &bytes[100..]);
    wait_until("the message leaves", || frames().len() > seen);
    client.send_frame(DATA, 0, 1, &message(40));
    wait_until("the next one leaves", || frames().len() > seen + 1);
    client.send_frame(DATA, END_STREAM, 1, b"");
    assert_eq!(client.wait_for_status(1), Some(200));
    assert_eq!(frames()[seen..].iter().filter(|length| **length > 0).collect::<Vec<_>>(), [&305, &45]);
}

/// What the first part of a body ends with, before what is held back of it.
const MARK: &[u8] = b" and then ";

/// An origin that answers one request, closes that connection when [`MARK`] of the next has come, and answers the rest on
/// another. Tells when that begins, and sends the request that arrived there.
fn start_forgetful_origin() -> (u16, mpsc::Receiver<Option<StrictRequest>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (report, arrived) = mpsc::channel();
    thread::spawn(move || {
        let mut first = listener.accept().unwrap().0;
        answer_request(&mut first);
        let mut begun = Vec::new();
        while !begun.windows(MARK.len()).any(|window| window == MARK) {
            let mut bytes = [0; 4096];
            let count = first.read(&mut bytes).unwrap();
            assert!(count > 0, "the connection is used again");
            begun.extend_from_slice(&bytes[..count]);
        }
        assert!(!String::from_utf8_lossy(&begun).contains("ghp_"), "the beginning of a token has left");
        drop(first);
        let mut second = listener.accept().unwrap().0;
        report.send(None).unwrap();
        report.send(Some(answer_request(&mut second))).unwrap();
    });
    (port, arrived)
}

fn answer_request(stream: &mut TcpStream) -> StrictRequest {
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "the request is complete");
        bytes.extend_from_slice(&buffer[..count]);
        if let StrictParse::Whole(request, _) = parse_request(&bytes) {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
            return request;
        }
    }
}

#[test]
fn a_request_that_is_sent_again_carries_its_body_once() {
    // The first part ends like the beginning of a token, which is held back when the connection breaks.
    let parts = [[&[b'-'; 20_000], MARK, b"ghp_0123456789abcd"].concat(), b" no token at all".to_vec()];
    for chunked in [false, true] {
        let (port, arrived) = start_forgetful_origin();
        let mut setup = InstanceSetup::with_hosts(&[("a.test", port)]);
        setup.policy += "\n[signals]\nsecrets = \"deny\"\n";
        let world = setup.start();
        let mut wire = RawConnection::connect(world.listeners[0]);
        let authority = format!("a.test:{port}");
        wire.send(format!("GET http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n"));
        assert_eq!(wire.read_response("GET").unwrap().status, 200);
        let framed = |part: &Vec<u8>| match chunked {
            true => [format!("{:x}\r\n", part.len()).as_bytes(), part, b"\r\n"].concat(),
            false => part.clone(),
        };
        let (framing, end) = match chunked {
            true => ("Transfer-Encoding: chunked".to_owned(), &b"0\r\n\r\n"[..]),
            false => (format!("Content-Length: {}", parts.concat().len()), &b""[..]),
        };
        wire.send(format!("PUT http://{authority}/up HTTP/1.1\r\nHost: {authority}\r\n{framing}\r\n\r\n"));
        wire.send(framed(&parts[0]));
        assert!(arrived.recv().unwrap().is_none(), "the second connection begins");
        wire.send([&framed(&parts[1]), end].concat());
        assert_eq!(wire.read_response("PUT").unwrap().status, 200, "chunked: {chunked}");
        let request = arrived.recv().unwrap().unwrap();
        assert!(request.body == parts.concat(), "chunked: {chunked}, {} bytes", request.body.len());
    }
}
