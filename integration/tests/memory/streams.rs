//! Attacks 69 and 70: what HTTP/2 lets a sandbox say that HTTP/1 does not.

use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};

use super::http2::{Connection, DATA, END_STREAM, End, Fields, RST_STREAM, request};
use super::scene::{HOST, Scene, wait};
use super::wire::Wire;

const OWN: &str = r#"{"query":"x","bank_id":"staging:team-b"}"#;

/// A connection of a sandbox to a host, in HTTP/2.
fn connect(scene: &Scene, sandbox: &str, host: &str) -> Connection {
    let mut wire = Wire::to(scene.listener(sandbox));
    let port = scene.service.port();
    wire.send(format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"));
    let granted = wire.until(b"\r\n\r\n").unwrap();
    assert!(granted.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&granted));
    let mut config = (*scene.trust).clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from(host.to_owned()).unwrap();
    let tls = ClientConnection::new(Arc::new(config), name).unwrap();
    Connection::new(Wire::over(Box::new(StreamOwned::new(tls, wire.into_carrier()))))
}

/// An honest recall of B's, as fields.
fn recall(scene: &Scene) -> Fields {
    let mut fields = request("POST", "https", &scene.host(), "/v1/recall");
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
fn with(fields: &Fields, name: &str, value: &[u8]) -> Fields {
    let change = |(known, old): &(String, Vec<u8>)| {
        let value = if known == name { value.to_vec() } else { old.clone() };
        (known.clone(), value)
    };
    fields.iter().map(change).collect()
}

fn and(fields: &Fields, name: &str, value: &[u8]) -> Fields {
    [&fields[..], &[(name.to_owned(), value.to_vec())]].concat()
}

#[test]
fn attack_69_a_malformed_request_of_http2_reaches_nobody() {
    let scene = Scene::new();
    let own = recall(&scene);
    let port = scene.service.port();
    let other = format!("other.corp.example:{port}");
    let mut late = own.clone();
    late.insert(0, ("x".to_owned(), b"y".to_vec()));
    let rows: Vec<(&str, Fields, &str)> = vec![
        ("another host", and(&own, "host", other.as_bytes()), OWN),
        ("two hosts", and(&and(&own, "host", other.as_bytes()), "host", other.as_bytes()), OWN),
        ("a space in the path", with(&own, ":path", b"/v1/recall HTTP/1.1"), OWN),
        ("line ends in the path", with(&own, ":path", b"/v1/recall\r\nx-api-key: k"), OWN),
        ("an absolute path", with(&own, ":path", b"http://other.example/v1/recall"), OWN),
        ("a path encoded needlessly", with(&own, ":path", b"/v1/re%63all"), OWN),
        ("two methods", and(&own, ":method", b"GET"), OWN),
        ("two paths", and(&own, ":path", b"/v1/admin/banks"), OWN),
        ("two authorities", and(&own, ":authority", other.as_bytes()), OWN),
        ("a pseudo field too late", late, OWN),
        ("an upper-case name", and(&own, "X-Astrocyte-Principal", b"agent:sandbox-a"), OWN),
        ("connection", and(&own, "connection", b"close"), OWN),
        ("transfer-encoding", and(&own, "transfer-encoding", b"chunked"), OWN),
        ("upgrade", and(&own, "upgrade", b"websocket"), OWN),
        ("http2-settings", and(&own, "http2-settings", b"AAMAAABkAAQAAP__"), OWN),
        ("a shorter length", with(&own, "content-length", b"3"), OWN),
        ("a longer length", with(&own, "content-length", b"300"), OWN),
        ("two lengths", and(&own, "content-length", OWN.len().to_string().as_bytes()), OWN),
        ("line ends in a value", and(&own, "accept", b"a\r\nx-api-key: k"), OWN),
        ("line ends in the token", and(&own, "sandbox-identity", b"a\r\nx: y"), OWN),
        ("two tokens", and(&own, "sandbox-identity", b"x"), OWN),
        ("CONNECT", with(&own, ":method", b"CONNECT"), OWN),
        (
            "an extended CONNECT",
            and(&with(&own, ":method", b"CONNECT"), ":protocol", b"websocket"),
            OWN,
        ),
        ("a foreign bank", own.clone(), r#"{"query":"x","bank_id":"staging:team-a"}"#),
    ];
    for (row, fields, body) in rows {
        let mut connection = connect(&scene, "sandbox-b", HOST);
        connection.headers(1, &fields, false);
        connection.frame(DATA, END_STREAM, 1, body.as_bytes());
        let end = connection.end(1);
        let refused = matches!(end, End::Reset | End::Gone | End::Status(400..=499));
        assert!(refused, "69 {row}: {end:?}");
        assert_eq!(scene.seen().len(), 0, "69 {row}: something arrived");
    }
    // Trailers name nobody, and say nothing that counts.
    let nobody: Fields =
        own.iter().filter(|(name, _)| name != "sandbox-identity").cloned().collect();
    let mut connection = connect(&scene, "sandbox-b", HOST);
    connection.headers(1, &nobody, false);
    connection.frame(DATA, 0, 1, OWN.as_bytes());
    let token = scene.token("sandbox-b").into_bytes();
    connection.headers(1, &vec![("sandbox-identity".to_owned(), token)], true);
    assert_eq!(connection.end(1), End::Status(403), "15 a token in a trailer");
    // A fragment is cut off before anybody reads the path, so what arrives is what was decided upon.
    let fragment = with(&own, ":path", b"/v1/recall#/v1/admin/banks");
    for (row, fields) in [("79 an honest one", &own), ("69 a fragment", &fragment)] {
        let mut connection = connect(&scene, "sandbox-b", HOST);
        connection.headers(1, fields, false);
        connection.frame(DATA, END_STREAM, 1, OWN.as_bytes());
        assert_eq!(connection.end(1), End::Status(200), "{row}");
        assert_eq!(scene.seen().pop().unwrap()["target"], "/v1/recall", "{row}");
    }
    assert_eq!(scene.seen().len(), 2);
}

#[test]
fn attack_70_a_connection_is_for_one_host_and_resets_are_counted() {
    let scene = Scene::new();
    let port = scene.service.port();
    let memory = with(&recall(&scene), ":authority", scene.host().as_bytes());
    let alias = with(&memory, ":authority", format!("alias.corp.example:{port}").as_bytes());
    for (row, sandbox, host, fields) in [
        ("memory on another's connection", "sandbox-d", "alias.corp.example", &memory),
        ("another on memory's connection", "sandbox-d", HOST, &alias),
    ] {
        let mut connection = connect(&scene, sandbox, host);
        connection.headers(1, fields, false);
        connection.frame(DATA, END_STREAM, 1, OWN.as_bytes());
        assert_eq!(connection.end(1), End::Status(421), "70 {row}");
        assert_eq!(scene.seen().len(), 0, "70 {row}: something arrived");
    }
    let count = |reason: &str| {
        scene.records().iter().filter(|record| record["status_detail"] == reason).count()
    };
    wait("the records", || count("misdirected") == 2);
    // Requests that are taken back at once, by the thousand.
    let mut connection = connect(&scene, "sandbox-b", HOST);
    for stream in (1..4000).step_by(2) {
        connection.headers(stream, &memory, false);
        connection.frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]);
    }
    assert!(connection.is_ended(), "70 resets");
    wait("the flood's record", || count("too_many_resets") > 0);
    assert_eq!(scene.seen().len(), 0, "70 resets: something arrived");
    let mut connection = connect(&scene, "sandbox-b", HOST);
    connection.headers(1, &memory, false);
    connection.frame(DATA, END_STREAM, 1, OWN.as_bytes());
    assert_eq!(connection.end(1), End::Status(200), "others are served");
}
