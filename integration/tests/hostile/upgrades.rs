//! WebSocket, whatever the timing: an origin that speaks right behind its 101, a client that does not wait for it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use crate::instance::{DEADLINE, InstanceSetup, SandbarInstance, record_stage};
use crate::wire::RawConnection;

const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                      Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n";

/// Rounds of the race; the old relay lost within the first ten.
const ROUNDS: usize = 300;

/// Starts an origin that handles each connection with `serve`; its port.
fn start_origin(serve: impl Fn(TcpStream) + Send + Sync + Clone + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            stream.set_nodelay(true).unwrap();
            let serve = serve.clone();
            thread::spawn(move || serve(stream));
        }
    });
    port
}

/// Reads a request head, and `count` bytes behind it.
fn read_request(stream: &mut TcpStream, count: usize) -> (String, Vec<u8>) {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4);
        match end {
            Some(end) if bytes.len() >= end + count => {
                let rest = bytes.split_off(end);
                return (String::from_utf8(bytes).unwrap(), rest);
            }
            Some(_) | None => {}
        }
        let read = stream.read(&mut buffer).unwrap();
        assert!(read > 0, "the request ends early: {:?}", String::from_utf8_lossy(&bytes));
        bytes.extend_from_slice(&buffer[..read]);
    }
}

fn upgrade_request(port: u16) -> String {
    format!(
        "GET /ws HTTP/1.1\r\nHost: a.test:{port}\r\nConnection: keep-alive, Upgrade, x-hop\r\nX-Hop: 1\r\n\
         Upgrade: websocket\r\nX-Forwarded-For: 10.0.0.1\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
}

/// Opens a connection and sends a request to upgrade with `early` right behind it.
fn ask(world: &SandbarInstance, port: u16, early: &[u8]) -> RawConnection {
    let mut wire = world.open_tunnel("a.test", port);
    wire.send([upgrade_request(port).as_bytes(), early].concat());
    wire
}

#[test]
fn an_upgrade_loses_nothing_however_fast_both_sides_are() {
    const FIRST: &[u8] = b"the origin speaks at once";
    const EARLY: &[u8] = b"the client does not wait";
    let port = start_origin(|mut stream| {
        let (head, mut early) = read_request(&mut stream, 0);
        assert!(!head.to_ascii_lowercase().contains("x-hop"), "{head}");
        assert!(!head.to_ascii_lowercase().contains("x-forwarded"), "{head}");
        stream.write_all(&[SWITCH.as_bytes(), b"Sandbar-Reason: x\r\n\r\n", FIRST].concat()).unwrap();
        let mut rest = vec![0; EARLY.len() - early.len()];
        stream.read_exact(&mut rest).unwrap();
        early.append(&mut rest);
        stream.write_all(&early).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "nothing follows");
    });
    let world = InstanceSetup::with_hosts(&[("a.test", port)]).start();
    for round in 0..ROUNDS {
        let mut wire = ask(&world, port, EARLY);
        let answer = wire.read_response("GET").unwrap_or_else(|| panic!("round {round}: no answer"));
        assert_eq!(answer.status, 101, "round {round}: {}", answer.text());
        assert_eq!(answer.field("upgrade"), Some("websocket"), "round {round}");
        assert_eq!(answer.field("sandbar-reason"), None, "round {round}");
        let told = wire.read_to_end();
        assert_eq!(
            String::from_utf8_lossy(&told),
            String::from_utf8_lossy(&[FIRST, EARLY].concat()),
            "{round}"
        );
    }
    let ended = world.wait_for_record(0, "an outcome", |record| record_stage(record) == "outcome");
    assert_eq!(ended["http_response"]["code"], 101, "{ended}");
    // The heads of the request and of the 101 count too.
    for (member, least) in [("bytes_in", FIRST.len() + EARLY.len()), ("bytes_out", EARLY.len())] {
        let heads = ended["traffic"][member].as_u64().unwrap() - least as u64;
        assert!((50..1000).contains(&heads), "{member}: {ended}");
    }
}

/// Both sides send much before they read anything of it.
#[test]
fn an_upgrade_carries_both_directions_at_once() {
    const EACH: usize = 4 << 20;
    let both = |mut stream: TcpStream| {
        let mut other = stream.try_clone().unwrap();
        let writer = thread::spawn(move || {
            other.write_all(&vec![b'o'; EACH]).unwrap();
            other.shutdown(Shutdown::Write).unwrap();
        });
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        writer.join().unwrap();
        all.len()
    };
    let port = start_origin(move |mut stream| {
        read_request(&mut stream, 0);
        stream.write_all(format!("{SWITCH}\r\n").as_bytes()).unwrap();
        both(stream);
    });
    let world = InstanceSetup::with_hosts(&[("a.test", port)]).start();
    let mut stream = TcpStream::connect(world.listeners[0]).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let connect = format!("CONNECT a.test:{port} HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n");
    stream.write_all(connect.as_bytes()).unwrap();
    read_request(&mut stream, 0);
    stream.write_all(upgrade_request(port).as_bytes()).unwrap();
    let (head, early) = read_request(&mut stream, 0);
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert_eq!(early.len() + both(stream), EACH);
}

#[test]
fn an_origin_may_decline_to_upgrade() {
    for (said, body) in [
        ("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno", "no"),
        ("HTTP/1.1 403 Forbidden\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n", "no"),
        ("HTTP/1.0 403 Forbidden\r\n\r\nno", "no"),
        ("HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", ""),
    ] {
        let port = start_origin(move |mut stream| {
            read_request(&mut stream, 0);
            stream.write_all(said.as_bytes()).unwrap();
        });
        let world = InstanceSetup::with_hosts(&[("a.test", port)]).start();
        let answer = ask(&world, port, b"").read_response("GET").unwrap();
        assert_eq!((answer.status, &*answer.text()), (403, body), "{said}");
        world.wait_for_record(0, said, |record| {
            record_stage(record) == "outcome" && record["http_response"]["code"] == 403
        });
    }
}

/// Only a request that has one meaning is upgraded; the others go without `Upgrade`, and a 101 to them is refused.
#[test]
fn nothing_but_a_plain_websocket_is_switched() {
    for (what, request) in [
        ("another protocol", "GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"),
        ("two protocols", "GET / HTTP/1.1\r\nUpgrade: websocket\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"),
        (
            "another method",
            "POST / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: 0\r\n",
        ),
    ] {
        let port = start_origin(|mut stream| {
            let (head, _) = read_request(&mut stream, 0);
            assert!(!head.to_ascii_lowercase().contains("upgrade"), "{head}");
            stream.write_all(format!("{SWITCH}\r\nraw").as_bytes()).unwrap();
        });
        let world = InstanceSetup::with_hosts(&[("a.test", port)]).start();
        let mut wire = world.open_tunnel("a.test", port);
        wire.send(format!("{request}Host: a.test:{port}\r\n\r\n"));
        let answer = wire.read_response("GET").unwrap();
        world.assert_refused(what, &answer, 502, "upstream_broke");
    }
}

/// A client that leaves before it is answered takes its connection to the origin along.
#[test]
fn an_upgrade_ends_with_its_client() {
    let (tell, told) = std::sync::mpsc::channel();
    let port = start_origin(move |mut stream| {
        read_request(&mut stream, 0);
        tell.send("asked").unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0, "nothing passes before the 101");
        tell.send("left").unwrap();
    });
    let world = InstanceSetup::with_hosts(&[("a.test", port)]).start();
    let wire = ask(&world, port, b"early");
    assert_eq!(told.recv_timeout(DEADLINE), Ok("asked"));
    drop(wire);
    assert_eq!(told.recv_timeout(DEADLINE), Ok("left"));
    world.wait_for_record(0, "the outcome", |record| record["status_detail"] == "client_gone");
}

/// Both directions of an upgraded connection are charged, and cut at the limit.
#[test]
fn an_upgraded_connection_is_charged_both_ways() {
    for budget in ["upload_bytes_per_hour = 5000", "download_bytes_per_hour = 5000"] {
        let port = start_origin(|mut stream| {
            read_request(&mut stream, 0);
            drop(stream.write_all(format!("{SWITCH}\r\n").as_bytes()));
            let (mut all, mut buffer) = (0, [0; 1000]);
            while let Ok(read @ 1..) = stream.read(&mut buffer) {
                all += read;
                assert!(all <= 5000, "more than the budget has come");
                drop(stream.write_all(&buffer[..read]));
            }
        });
        let mut setup = InstanceSetup::with_hosts(&[("a.test", port)]);
        setup.policy += &format!("[allow.budget]\n{budget}\n");
        let world = setup.start();
        let mut wire = ask(&world, port, b"");
        assert_eq!(wire.read_response("GET").unwrap().status, 101, "{budget}");
        let mut back = 0;
        for _ in 0..20 {
            wire.send([b'x'; 500]);
            match wire.read_exact(500) {
                Some(bytes) => back += bytes.len(),
                None => break,
            }
        }
        assert!((1..=5000).contains(&back), "{budget}: {back}");
        world.wait_for_record(0, budget, |record| record["status_detail"] == "budget_spent");
    }
}
