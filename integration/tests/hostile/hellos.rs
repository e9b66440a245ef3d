//! TLS hellos: in pieces, too long, too old, without a name, with two; and what is no TLS where TLS belongs.

use crate::handshake::{Hello, client, names, record, shake};
use crate::origin::Origin;
use crate::world::Plan;

#[test]
fn a_hello_is_read_whole_or_refused() {
    let origin = Origin::plain();
    let world = Plan::allowing(&[("a.test", origin.port())]).start();
    let plain = || Hello::naming("a.test");
    let message = plain().message();
    let in_records = |size: usize| message.chunks(size).flat_map(record).collect::<Vec<u8>>();
    let nameless = || Hello { names: None, ..plain() };
    let two = Hello { names: Some(names(&[b"a.test", b"b.test"])), ..plain() };
    let none = Hello { names: Some(names(&[])), ..plain() };
    let torn = Hello { names: Some(vec![0, 9, 0, 0, 6, b'a']), ..plain() };
    let with_nul = Hello { names: Some(names(&[b"a.test\0.b.test"])), ..plain() };
    let old = |version| Hello { version, versions: Vec::new(), ..plain() }.bytes();
    for (what, bytes, begins, code) in [
        ("plain", plain().bytes(), true, "bad_handshake"),
        ("in records of 100 bytes", in_records(100), true, "bad_handshake"),
        ("in records of one byte", in_records(1), true, "bad_handshake"),
        (
            "long",
            Hello { padding: 30_000, ..plain() }
                .message()
                .chunks(16_000)
                .flat_map(record)
                .collect(),
            true,
            "bad_handshake",
        ),
        (
            "giant",
            Hello { padding: 65_000, ..plain() }
                .message()
                .chunks(16_000)
                .flat_map(record)
                .collect(),
            true,
            "",
        ),
        (
            "endless",
            [&[22, 3, 1, 0x40, 0][..], &[1, 0xff, 0xff, 0xff], &vec![0; 300_000]].concat(),
            false,
            "",
        ),
        ("without a name", nameless().bytes(), false, "name_missing"),
        ("with two names", two.bytes(), false, ""),
        ("with an empty list of names", none.bytes(), false, ""),
        ("with a torn list of names", torn.bytes(), false, ""),
        ("with NUL in the name", with_nul.bytes(), false, ""),
        ("for an address", Hello::naming("127.0.0.1").bytes(), false, "address_as_sni"),
        ("for another name", Hello::naming("b.test").bytes(), false, "names_disagree"),
        ("TLS 1.1", old(0x0302), false, "bad_handshake"),
        ("TLS 1.0", old(0x0301), false, "bad_handshake"),
        ("SSL 3", old(0x0300), false, "bad_handshake"),
        (
            "TLS 1.1 by extension",
            Hello { versions: vec![0x0302], ..plain() }.bytes(),
            false,
            "bad_handshake",
        ),
        (
            "SSL 2",
            [&[0x80, 0x2e, 1, 3, 1, 0, 0x15, 0, 0, 0, 0x10][..], &[7; 37]].concat(),
            false,
            "raw_tcp_not_allowed",
        ),
        ("an alert first", vec![21, 3, 3, 0, 2, 2, 40], false, "raw_tcp_not_allowed"),
        ("data first", [&[23, 3, 3, 0, 5][..], b"hello"].concat(), false, "raw_tcp_not_allowed"),
        ("a record of nothing", vec![22, 3, 1, 0, 0], false, "bad_handshake"),
        ("another message", record(&[2, 0, 0, 1, 0]), false, "bad_handshake"),
        ("garbage in a record", record(&[0xff; 200]), false, "bad_handshake"),
        (
            "a record too long",
            [&[22, 3, 1, 0xff, 0xff][..], &[1; 500]].concat(),
            false,
            "bad_handshake",
        ),
    ] {
        let since = world.count();
        let mut wire = world.tunnel("a.test", origin.port());
        wire.send(&bytes);
        let first = wire.exactly(1);
        let begun = first.as_deref() == Some(&[22]);
        let told = matches!(first.as_deref(), None | Some([21]));
        assert!(begun || told, "{what}: {first:?} is no TLS");
        drop(wire);
        let denied = |record: &serde_json::Value| record["action_id"] == 2;
        let record = world.find(since, what, denied);
        assert_eq!(begun, begins, "{what}: {record}");
        assert!(code.is_empty() || record["status_detail"] == code, "{what}: {record}");
    }
    assert_eq!(origin.seen().len(), 0, "something reached the origin");
}

#[test]
fn a_hello_in_segments_of_one_byte_is_a_hello() {
    let origin = Origin::plain();
    let world = Plan::allowing(&[("a.test", origin.port())]).start();
    let mut wire = world.tunnel("a.test", origin.port());
    for byte in Hello::naming("a.test").bytes() {
        wire.send([byte]);
    }
    assert_eq!(wire.exactly(1), Some(vec![22]));
    // And a whole handshake is a whole handshake.
    assert!(
        shake(world.tunnel("a.test", origin.port()), &client(&world, "http/1.1"), "a.test").is_ok()
    );
}

#[test]
fn a_port_speaks_what_it_is_for() {
    let world = Plan::allowing(&[("a.test", 443), ("a.test", 80), ("a.test", 8443)]).start();
    let hello = Hello::naming("a.test").bytes();
    let get = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n";
    for (what, port, bytes, begins, code) in [
        ("plaintext on 443", 443, &get[..], &b"HTTP/1.1 403 "[..], "wrong_protocol"),
        ("TLS on 80", 80, &hello, &[21, 3, 3, 0, 2, 2, 49], "wrong_protocol"),
        ("SSH on 443", 443, b"SSH-2.0-OpenSSH_9.2p1\r\n", b"", "raw_tcp_not_allowed"),
        ("SSH on 80", 80, b"SSH-2.0-OpenSSH_9.2p1\r\n", b"", "raw_tcp_not_allowed"),
        ("SMTP on 443", 443, b"EHLO a.test\r\n\r\n", b"HTTP/1.1 400 ", "bad_request"),
        ("garbage", 8443, b"\x00\x01\x02\x03garbage", b"", "raw_tcp_not_allowed"),
        ("a DNS message", 443, b"\x00\x1d\xbe\xef\x01\x00\x00\x01", b"", "raw_tcp_not_allowed"),
        ("SOCKS inside", 8443, b"\x05\x01\x00", b"", "raw_tcp_not_allowed"),
        (
            "CONNECT inside",
            8443,
            b"CONNECT a.test:8443 HTTP/1.1\r\nHost: a.test:8443\r\n\r\n",
            b"HTTP/1.1 400 ",
            "bad_request",
        ),
        ("a port that is not listed", 8444, b"", b"", ""),
    ] {
        let since = world.count();
        if code.is_empty() {
            let mut wire = world.connect();
            wire.send(format!("CONNECT a.test:{port} HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n"));
            let answer = wire.answer("GET").unwrap();
            world.assert_refused(what, &answer, 403, "port_not_listed");
            continue;
        }
        let mut wire = world.tunnel("a.test", port);
        wire.send(bytes);
        let said = wire.rest();
        let right = if begins.is_empty() { said.is_empty() } else { said.starts_with(begins) };
        assert!(right, "{what}: {}", String::from_utf8_lossy(&said));
        world.find(since, what, |record| record["status_detail"] == code);
    }
    // To a proxy that is asked in the clear TLS is no language.
    let since = world.count();
    let mut wire = world.connect();
    wire.send(&hello);
    assert_eq!(wire.rest(), b"");
    world.find(since, "TLS to the proxy", |record| record["status_detail"] == "wrong_protocol");
}
