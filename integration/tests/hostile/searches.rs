//! The memory that a search takes (P17), where it holds a body back, and how requests are sent (P19). Judged at the
//! origin, by the access log and by the memory of the program.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rules::signals::canary::{CanaryShape, make};

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::http2::{DATA, END_STREAM, Http2Client, request_fields};
use crate::http2_origin::Http2Origin;
use crate::instance::{InstanceSetup, record_stage, wait_until};
use crate::signals::SignalScene;
use crate::wire::RawConnection;

/// Uploads at once.
const UPLOADS: usize = 100;

/// A GitHub token with a valid checksum.
fn token() -> String {
    let random: Vec<u8> = (0..64).map(|at: u8| at.wrapping_mul(37).wrapping_add(9)).collect();
    make(CanaryShape::GithubToken, "test", &random).unwrap().values()[0].clone()
}

/// Gzip headers whose names end at the same place, where a block begins that does not end.
fn stalled_streams() -> Vec<u8> {
    [&b"\x1f\x8b\x08\x08\x01\x01\x01\x01\x01\x01".repeat(64)[..], b"\0\0\xff\xff\0\0and no end"].concat()
}

/// Begins an upload that goes on, and waits until what comes before `body` has left.
fn begin_upload(scene: &SignalScene, mark: &str, body: &[u8]) -> RawConnection {
    let authority = scene.authority();
    let mut wire = RawConnection::connect(scene.world.listeners[0]);
    let head = format!(
        "POST http://{authority}/up HTTP/1.1\r\nHost: {authority}\r\nContent-Length: 100000\r\n\r\n{mark} ... "
    );
    wire.send([head.as_bytes(), body].concat());
    scene
        .origin
        .wait_until(mark, |seen| seen.iter().any(|seen| String::from_utf8_lossy(&seen.bytes).contains(mark)));
    wire
}

#[test]
fn p17_bodies_that_open_many_streams_take_little_memory() {
    let words = "some text %41 \\u0041 &#65; and more of it, ".repeat(8);
    let nested = STANDARD.encode(format!("{words}{} {words}", STANDARD.encode(&words)));
    for (what, body) in [
        ("streams", stalled_streams()),
        ("streams in base64", STANDARD.encode([b".", &stalled_streams()[..]].concat()).into_bytes()),
        ("encoded parts", nested.into_bytes()),
    ] {
        let scene = SignalScene::start("", "[signals]\nheaders = \"off\"\nurl = \"off\"\n");
        drop(begin_upload(&scene, "warm", b""));
        let before = scene.world.resident_kilobytes() << 10;
        let open: Vec<RawConnection> =
            (0..UPLOADS).map(|at| begin_upload(&scene, &format!("mark{at}."), &body)).collect();
        let taken = (scene.world.resident_kilobytes() << 10).saturating_sub(before) / UPLOADS as u64;
        println!("{what}: {} KiB for each upload of {} bytes", taken >> 10, body.len());
        assert!(taken < 1 << 20, "{what}: {taken} bytes for each upload");
        drop(open);
    }
}

#[test]
fn p17_a_search_that_the_quota_has_no_memory_for_is_refused() {
    let body = STANDARD.encode([b".", &stalled_streams()[..]].concat());
    let origin = crate::origin::ScriptedOrigin::start_plain();
    let mut setup = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
    setup.tables = "[quota]\nbuffers = { total = 500000 }\n".to_owned();
    let world = setup.start();
    let authority = format!("a.test:{}", origin.port());
    let send = |body: &str| {
        let mut wire = RawConnection::connect(world.listeners[0]);
        let length = body.len();
        wire.send(format!(
            "POST http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        ));
        wire.read_response("POST").expect("an answer")
    };
    assert_eq!(send("some text").status, 200);
    let answer = send(&body);
    world.assert_refused("streams", &answer, 503, "quota_exhausted");
    assert_eq!(origin.requests().len(), 1, "nothing else arrived whole");
    assert_eq!(send("some text").status, 200, "what was reserved is given back");
}

/// Returns the body of what an origin got in chunks, as far as it came.
fn join_chunks(bytes: &[u8]) -> Vec<u8> {
    let head = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head") + 4;
    let (mut rest, mut body) = (&bytes[head..], Vec::new());
    while let Some(end) = rest.windows(2).position(|window| window == b"\r\n") {
        let size =
            usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).expect("a size alone");
        let data = &rest[end + 2..];
        body.extend_from_slice(&data[..size.min(data.len())]);
        rest = data.get(size + 2..).unwrap_or_default();
    }
    body
}

#[test]
fn p11_a_denied_secret_that_its_encoding_spreads_has_not_begun_to_leave() {
    let scene = SignalScene::start("", "[signals]\nsecrets = \"deny\"\n");
    let hex: String =
        format!("{}{}", "a word. ".repeat(40), token()).bytes().map(|byte| format!("{byte:02x}")).collect();
    let (prose, secret) = hex.split_at(hex.len() - 2 * token().len());
    // One digit in each line, with as much white space as a run may have between two of them.
    let spread: String = secret.chars().map(|digit| format!("{digit}\n{}", " ".repeat(15))).collect();
    let body = format!("{prose}{spread}, and text after it, {}", "and more of it. ".repeat(20));
    let authority = scene.authority();
    for chunked in [false, true] {
        let framing = match chunked {
            true => "Transfer-Encoding: chunked".to_owned(),
            false => format!("Content-Length: {}", body.len()),
        };
        let mut wire = RawConnection::connect(scene.world.listeners[0]);
        wire.send(format!(
            "POST http://{authority}/up HTTP/1.1\r\nHost: {authority}\r\n{framing}\r\nConnection: close\r\n\r\n"
        ));
        for byte in body.chars() {
            let piece = if chunked { format!("1\r\n{byte}\r\n") } else { byte.to_string() };
            if !wire.try_send(piece.as_bytes()) {
                break;
            }
        }
        let answer = wire.read_response("POST").expect("an answer");
        scene.world.assert_refused(&framing, &answer, 403, "secret_found");
        let arrived = scene.origin.connections().last().expect("a connection").bytes.clone();
        let arrived = if chunked { join_chunks(&arrived) } else { arrived };
        let spaced = arrived.windows(17).filter(|window| window.starts_with(b"\n               "));
        // A client that pauses gets out less than twelve bytes of what begins a match: 24 digits.
        let (left, most) = (spaced.count(), if chunked { 24 } else { 1 });
        assert!(left <= most, "{framing}: {left} digits of the secret left");
        assert!(scene.origin.requests().is_empty(), "no whole request arrived");
    }
}

#[test]
fn p19_how_a_request_is_sent_has_a_price_or_one_form() {
    let other = crate::origin::ScriptedOrigin::start_plain();
    let origin = crate::origin::ScriptedOrigin::start_plain();
    let mut setup = InstanceSetup::with_hosts(&[("a.test", origin.port()), ("a.test", other.port())]);
    setup.policy += "[signals]\nheaders = \"off\"\nurl = \"off\"\n[budget]\nheader_bits_per_hour = 100000\n";
    let scene = SignalScene { world: setup.start(), origin };
    let send = |method: &str, port: u16, rest: &str| {
        let before = scene.header_bits();
        let mut wire = RawConnection::connect(scene.world.listeners[0]);
        wire.send(format!("{method} http://a.test:{port}/x HTTP/1.1\r\nHost: a.test:{port}\r\n{rest}"));
        assert_eq!(wire.read_response(method).unwrap().status, 200, "{method} {rest:?}");
        scene.header_bits() - before
    };
    let port = scene.origin.port();
    let known = "Content-Length: 2\r\n\r\nhi";
    send("POST", port, known);
    assert!(send("POST", port, known) <= 2, "a repeat says nothing");
    for (what, bits) in [
        ("another port", send("POST", other.port(), known)),
        ("without a length", send("POST", port, "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n")),
        ("without a body", send("POST", port, "\r\n")),
    ] {
        assert!(bits >= 3, "{what} says more than {bits} bits");
    }
    // A length that is announced and not sent is charged, and one that is sent is not.
    let before = scene.header_bits();
    let since = scene.world.record_count();
    let mut wire = RawConnection::connect(scene.world.listeners[0]);
    wire.send(format!(
        "POST http://a.test:{port}/x HTTP/1.1\r\nHost: a.test:{port}\r\nContent-Length: 8374629174\r\n\r\nhi"
    ));
    scene.origin.wait_until("the length leaves", |seen| {
        seen.iter().any(|seen| String::from_utf8_lossy(&seen.bytes).contains("8374629174"))
    });
    drop(wire);
    scene.world.wait_for_record(since, "it is broken off", |record| record_stage(record) == "outcome");
    let broken = scene.header_bits() - before;
    assert!(broken > 70, "{broken} bits for a length of 33 bits and a place within it");
    // The two ways to have no body are one.
    assert!(send("POST", port, "Content-Length: 0\r\n\r\n") <= 2);
    send("GET", port, "\r\n");
    assert!(send("GET", port, "Content-Length: 0\r\n\r\n") <= 2);
    let heads: Vec<String> = scene
        .origin
        .connections()
        .iter()
        .map(|seen| String::from_utf8_lossy(&seen.bytes).into_owned())
        .collect();
    let heads = heads.concat();
    let count = |method: &str, field: bool| {
        let requests = heads.split("\r\n\r\n").filter(|head| head.contains(&format!("{method} /x ")));
        requests.filter(|head| head.to_ascii_lowercase().contains("content-length: 0") == field).count()
    };
    assert_eq!((count("GET", true), count("GET", false)), (0, 2));
    assert_eq!(count("POST", true), 2, "{heads}");
}

#[test]
fn p17_a_slow_upload_that_is_held_back_is_the_clients_progress() {
    let root = OriginCa::new();
    let origin = Http2Origin::start(&root, "a.test");
    let limits = "idle_seconds = 1\nfirst_byte_seconds = 60\nbody_bytes_per_second = 200\n";
    let setup = InstanceSetup::with_hosts(&[("a.test", origin.port)]).with_roots(root.pem());
    let world = setup.with_limits(limits).start();
    let config = client_config(&world, "h2");
    let post = request_fields("POST", "https", &format!("a.test:{}", origin.port), "/plain");
    let fields = [&post[..], &[("content-length".to_owned(), b"2000".to_vec())]].concat();
    // Over HTTP/2 it leaves in one block, so none of it leaves for two seconds.
    for (what, size, passes) in [("quick enough", 40, true), ("a drip", 1, false)] {
        let since = world.record_count();
        let wire = world.open_tunnel("a.test", origin.port);
        let mut client = Http2Client::new(tls_handshake(wire, &config, "a.test").unwrap());
        client.send_headers(1, &fields, false);
        let late = || world.records().iter().skip(since).any(|record| record["status_detail"] == "body_late");
        for at in 0..50 {
            let end = if at == 49 && passes { END_STREAM } else { 0 };
            client.send_frame(DATA, end, 1, &vec![b'-'; size]);
            std::thread::sleep(std::time::Duration::from_millis(50));
            if late() {
                break;
            }
        }
        if passes {
            assert_eq!(client.wait_for_status(1), Some(200), "{what}");
            assert!(!late(), "{what}");
        } else {
            wait_until(what, late);
        }
    }
}
