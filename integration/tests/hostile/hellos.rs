//! TLS hellos: in pieces, too long, too old, without a name, with two; and what is no TLS where TLS belongs.

use crate::handshake::{RawClientHello, client_config, server_name_list, tls_handshake, tls_record};
use crate::instance::InstanceSetup;
use crate::origin::ScriptedOrigin;

#[test]
fn a_hello_is_read_whole_or_refused() {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    let plain = || RawClientHello::for_name("a.test");
    let message = plain().handshake_message();
    let in_records = |size: usize| message.chunks(size).flat_map(tls_record).collect::<Vec<u8>>();
    let nameless = || RawClientHello { names: None, ..plain() };
    let two = RawClientHello { names: Some(server_name_list(&[b"a.test", b"b.test"])), ..plain() };
    let none = RawClientHello { names: Some(server_name_list(&[])), ..plain() };
    let torn = RawClientHello { names: Some(vec![0, 9, 0, 0, 6, b'a']), ..plain() };
    let with_nul = RawClientHello { names: Some(server_name_list(&[b"a.test\0.b.test"])), ..plain() };
    let old = |version| RawClientHello { version, versions: Vec::new(), ..plain() }.record_bytes();
    for (what, bytes, begins, code) in [
        ("plain", plain().record_bytes(), true, "bad_handshake"),
        ("in records of 100 bytes", in_records(100), true, "bad_handshake"),
        ("in records of one byte", in_records(1), true, "bad_handshake"),
        (
            "long",
            RawClientHello { padding: 30_000, ..plain() }
                .handshake_message()
                .chunks(16_000)
                .flat_map(tls_record)
                .collect(),
            true,
            "bad_handshake",
        ),
        (
            "giant",
            RawClientHello { padding: 65_000, ..plain() }
                .handshake_message()
                .chunks(16_000)
                .flat_map(tls_record)
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
        ("without a name", nameless().record_bytes(), false, "name_missing"),
        ("with two names", two.record_bytes(), false, ""),
        ("with an empty list of names", none.record_bytes(), false, ""),
        ("with a torn list of names", torn.record_bytes(), false, ""),
        ("with NUL in the name", with_nul.record_bytes(), false, ""),
        ("for an address", RawClientHello::for_name("127.0.0.1").record_bytes(), false, "address_as_sni"),
        ("for another name", RawClientHello::for_name("b.test").record_bytes(), false, "names_disagree"),
        ("TLS 1.1", old(0x0302), false, "bad_handshake"),
        ("TLS 1.0", old(0x0301), false, "bad_handshake"),
        ("SSL 3", old(0x0300), false, "bad_handshake"),
        (
            "TLS 1.1 by extension",
            RawClientHello { versions: vec![0x0302], ..plain() }.record_bytes(),
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
        ("another message", tls_record(&[2, 0, 0, 1, 0]), false, "bad_handshake"),
        ("garbage in a record", tls_record(&[0xff; 200]), false, "bad_handshake"),
        ("a record too long", [&[22, 3, 1, 0xff, 0xff][..], &[1; 500]].concat(), false, "bad_handshake"),
    ] {
        let since = world.record_count();
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(&bytes);
        let first = wire.read_exact(1);
        let begun = first.as_deref() == Some(&[22]);
        let told = matches!(first.as_deref(), None | Some([21]));
        assert!(begun || told, "{what}: {first:?} is no TLS");
        drop(wire);
        let denied = |record: &serde_json::Value| record["action_id"] == 2;
        let record = world.wait_for_record(since, what, denied);
        assert_eq!(begun, begins, "{what}: {record}");
        assert!(code.is_empty() || record["status_detail"] == code, "{what}: {record}");
    }
    assert_eq!(origin.connections().len(), 0, "something reached the origin");
}

#[test]
fn a_hello_in_segments_of_one_byte_is_a_hello() {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    let mut wire = world.open_tunnel("a.test", origin.port());
    for byte in RawClientHello::for_name("a.test").record_bytes() {
        wire.send([byte]);
    }
    assert_eq!(wire.read_exact(1), Some(vec![22]));
    // And a whole handshake is a whole handshake.
    assert!(
        tls_handshake(
            world.open_tunnel("a.test", origin.port()),
            &client_config(&world, "http/1.1"),
            "a.test"
        )
        .is_ok()
    );
}

#[test]
fn a_port_speaks_what_it_is_for() {
    let world = InstanceSetup::with_hosts(&[("a.test", 443), ("a.test", 80), ("a.test", 8443)]).start();
    let hello = RawClientHello::for_name("a.test").record_bytes();
    let get = b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
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
        let since = world.record_count();
        if code.is_empty() {
            let mut wire = world.connect();
            wire.send(format!("CONNECT a.test:{port} HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n"));
            let answer = wire.read_response("GET").unwrap();
            world.assert_refused(what, &answer, 403, "port_not_listed");
            continue;
        }
        let mut wire = world.open_tunnel("a.test", port);
        wire.send(bytes);
        let said = wire.read_to_end();
        let right = if begins.is_empty() { said.is_empty() } else { said.starts_with(begins) };
        assert!(right, "{what}: {}", String::from_utf8_lossy(&said));
        world.wait_for_record(since, what, |record| record["status_detail"] == code);
    }
    // To a proxy that is asked in the clear TLS is no language.
    let since = world.record_count();
    let mut wire = world.connect();
    wire.send(&hello);
    assert_eq!(wire.read_to_end(), b"");
    world.wait_for_record(since, "TLS to the proxy", |record| record["status_detail"] == "wrong_protocol");
}
