//! Attacks 69 and 70: what HTTP/2 lets a sandbox say that HTTP/1 does not.

use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};

use super::http2::{DATA, END_STREAM, HeaderList, Http2Client, RST_STREAM, StreamEnd, request_fields};
use super::scene::{HOST, MemoryScene, wait_for};
use super::wire::RawConnection;

const OWN: &str = r#"{"query":"x","bank_id":"staging:team-b"}"#;

/// A connection of a sandbox to a host, in HTTP/2.
fn connect_http2(scene: &MemoryScene, sandbox: &str, host: &str) -> Http2Client {
    let mut wire = RawConnection::connect(scene.listener(sandbox));
    let port = scene.service.port();
    wire.send(format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"));
    let granted = wire.read_until(b"\r\n\r\n").unwrap();
    assert!(granted.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&granted));
    let mut config = (*scene.trust).clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from(host.to_owned()).unwrap();
    let tls = ClientConnection::new(Arc::new(config), name).unwrap();
    Http2Client::new(RawConnection::from_stream(Box::new(StreamOwned::new(tls, wire.into_stream()))))
}

/// An honest recall of B's, as fields.
fn recall_fields(scene: &MemoryScene) -> HeaderList {
    let mut fields = request_fields("POST", "https", &scene.service_host(), "/v1/recall");
    for (name, value) in [
        ("content-type", "application/json"),
        ("content-length", &OWN.len().to_string()),
        ("sandbox-identity", &scene.token("sandbox-b")),
    ] {
        fields.push((name.to_owned(), value.as_bytes().to_vec()));
    }
    fields
}

/// `fields` with another value for `name`.
fn with_field(fields: &HeaderList, name: &str, value: &[u8]) -> HeaderList {
    let change = |(known, old): &(String, Vec<u8>)| {
        let value = if known == name { value.to_vec() } else { old.clone() };
        (known.clone(), value)
    };
    fields.iter().map(change).collect()
}

fn add_field(fields: &HeaderList, name: &str, value: &[u8]) -> HeaderList {
    [&fields[..], &[(name.to_owned(), value.to_vec())]].concat()
}

#[test]
fn p12_attack_69_a_malformed_request_of_http2_reaches_nobody() {
    let scene = MemoryScene::new();
    let own = recall_fields(&scene);
    let port = scene.service.port();
    let other = format!("other.corp.example:{port}");
    let mut late = own.clone();
    late.insert(0, ("x".to_owned(), b"y".to_vec()));
    let rows: Vec<(&str, HeaderList, &str)> = vec![
        ("another host", add_field(&own, "host", other.as_bytes()), OWN),
        ("two hosts", add_field(&add_field(&own, "host", other.as_bytes()), "host", other.as_bytes()), OWN),
        ("a space in the path", with_field(&own, ":path", b"/v1/recall HTTP/1.1"), OWN),
        ("line ends in the path", with_field(&own, ":path", b"/v1/recall\r\nx-api-key: k"), OWN),
        ("an absolute path", with_field(&own, ":path", b"http://other.example/v1/recall"), OWN),
        ("a path encoded needlessly", with_field(&own, ":path", b"/v1/re%63all"), OWN),
        ("two methods", add_field(&own, ":method", b"GET"), OWN),
        ("two paths", add_field(&own, ":path", b"/v1/admin/banks"), OWN),
        ("two authorities", add_field(&own, ":authority", other.as_bytes()), OWN),
        ("a pseudo field too late", late, OWN),
        ("an upper-case name", add_field(&own, "X-Astrocyte-Principal", b"agent:sandbox-a"), OWN),
        ("connection", add_field(&own, "connection", b"close"), OWN),
        ("transfer-encoding", add_field(&own, "transfer-encoding", b"chunked"), OWN),
        ("upgrade", add_field(&own, "upgrade", b"websocket"), OWN),
        ("http2-settings", add_field(&own, "http2-settings", b"AAMAAABkAAQAAP__"), OWN),
        ("a shorter length", with_field(&own, "content-length", b"3"), OWN),
        ("a longer length", with_field(&own, "content-length", b"300"), OWN),
        ("two lengths", add_field(&own, "content-length", OWN.len().to_string().as_bytes()), OWN),
        ("line ends in a value", add_field(&own, "accept", b"a\r\nx-api-key: k"), OWN),
        ("line ends in the token", add_field(&own, "sandbox-identity", b"a\r\nx: y"), OWN),
        ("two tokens", add_field(&own, "sandbox-identity", b"x"), OWN),
        ("CONNECT", with_field(&own, ":method", b"CONNECT"), OWN),
        (
            "an extended CONNECT",
            add_field(&with_field(&own, ":method", b"CONNECT"), ":protocol", b"websocket"),
            OWN,
        ),
        ("a foreign bank", own.clone(), r#"{"query":"x","bank_id":"staging:team-a"}"#),
    ];
    for (row, fields, body) in rows {
        let mut connection = connect_http2(&scene, "sandbox-b", HOST);
        connection.send_headers(1, &fields, false);
        connection.send_frame(DATA, END_STREAM, 1, body.as_bytes());
        let end = connection.wait_for_end(1);
        let refused = matches!(end, StreamEnd::Reset | StreamEnd::Gone | StreamEnd::Status(400..=499));
        assert!(refused, "69 {row}: {end:?}");
        assert_eq!(scene.arrived_requests().len(), 0, "69 {row}: something arrived");
    }
    // Trailers name nobody, and say nothing that counts.
    let nobody: HeaderList = own.iter().filter(|(name, _)| name != "sandbox-identity").cloned().collect();
    let mut connection = connect_http2(&scene, "sandbox-b", HOST);
    connection.send_headers(1, &nobody, false);
    connection.send_frame(DATA, 0, 1, OWN.as_bytes());
    let token = scene.token("sandbox-b").into_bytes();
    connection.send_headers(1, &vec![("sandbox-identity".to_owned(), token)], true);
    assert_eq!(connection.wait_for_end(1), StreamEnd::Status(403), "15 a token in a trailer");
    // A fragment is cut off before anybody reads the path, so what arrives is what was decided upon.
    let fragment = with_field(&own, ":path", b"/v1/recall#/v1/admin/banks");
    for (row, fields) in [("79 an honest one", &own), ("69 a fragment", &fragment)] {
        let mut connection = connect_http2(&scene, "sandbox-b", HOST);
        connection.send_headers(1, fields, false);
        connection.send_frame(DATA, END_STREAM, 1, OWN.as_bytes());
        assert_eq!(connection.wait_for_end(1), StreamEnd::Status(200), "{row}");
        assert_eq!(scene.arrived_requests().pop().unwrap()["target"], "/v1/recall", "{row}");
    }
    assert_eq!(scene.arrived_requests().len(), 2);
}

#[test]
fn p6_attack_70_a_connection_is_for_one_host_and_resets_are_counted() {
    let scene = MemoryScene::new();
    let port = scene.service.port();
    let memory = with_field(&recall_fields(&scene), ":authority", scene.service_host().as_bytes());
    let alias = with_field(&memory, ":authority", format!("alias.corp.example:{port}").as_bytes());
    for (row, sandbox, host, fields) in [
        ("memory on another's connection", "sandbox-d", "alias.corp.example", &memory),
        ("another on memory's connection", "sandbox-d", HOST, &alias),
    ] {
        let mut connection = connect_http2(&scene, sandbox, host);
        connection.send_headers(1, fields, false);
        connection.send_frame(DATA, END_STREAM, 1, OWN.as_bytes());
        assert_eq!(connection.wait_for_end(1), StreamEnd::Status(421), "70 {row}");
        assert_eq!(scene.arrived_requests().len(), 0, "70 {row}: something arrived");
    }
    let count =
        |reason: &str| scene.records().iter().filter(|record| record["status_detail"] == reason).count();
    wait_for("the records", || count("misdirected") == 2);
    // Requests that are taken back at once, by the thousand.
    let mut connection = connect_http2(&scene, "sandbox-b", HOST);
    for stream in (1..4000).step_by(2) {
        connection.send_headers(stream, &memory, false);
        connection.send_frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]);
    }
    assert!(connection.is_ended(), "70 resets");
    wait_for("the flood's record", || count("too_many_resets") > 0);
    assert_eq!(scene.arrived_requests().len(), 0, "70 resets: something arrived");
    let mut connection = connect_http2(&scene, "sandbox-b", HOST);
    connection.send_headers(1, &memory, false);
    connection.send_frame(DATA, END_STREAM, 1, OWN.as_bytes());
    assert_eq!(connection.wait_for_end(1), StreamEnd::Status(200), "others are served");
}
