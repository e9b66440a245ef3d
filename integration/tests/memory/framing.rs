//! Attacks 22 to 26 and 48 to 69: fields, paths and framing by which a request could be two things at once.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use super::client::{ClientFraming, ClientRequest, SandboxClient};
use super::scene::{DEADLINE, MemoryScene};

const OWN: &str = "staging:team-b";

fn own_recall() -> ClientRequest {
    ClientRequest::recall(OWN)
}

#[test]
fn p13_attacks_22_to_26_nothing_a_sandbox_says_of_itself_arrives() {
    let scene = MemoryScene::new();
    let fields = [
        ("X-Api-Key", "mine"),
        ("X-Admin-Token", "t"),
        ("X-BARE-PASSWORD", "p"),
        ("X-Bank-Id", "staging:team-a"),
        ("X-Astrocyte-Bank", "staging:team-a"),
        ("X-Agent-ID", "a"),
        ("X-Tenant-Schema", "other"),
        ("X-Project-Id", "p"),
        ("user_id", "a"),
        ("X_Astrocyte_Principal", "agent:sandbox-a"),
        ("X-Astrocyte-Principal", "agent:sandbox-a"),
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Forwarded-Proto", "http"),
        ("Forwarded", "for=127.0.0.1"),
        ("X-Real-IP", "127.0.0.1"),
        ("X-Original-URL", "/v1/admin/banks"),
        ("X-Rewrite-URL", "/v1/admin/banks"),
        ("X-HTTP-Method-Override", "DELETE"),
        ("Cookie", "a=b"),
        ("TE", "trailers"),
        ("X-Request-ID", "\"} forged"),
        ("Connection", "close, X-Astrocyte-Principal, X-Api-Key, Content-Type"),
    ];
    let ask = fields.iter().fold(own_recall(), |ask, (name, value)| ask.with_field(name, value));
    let answer = scene.send_honest("sandbox-b", ask);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let seen = scene.arrived_requests().pop().unwrap();
    let mut names: Vec<&str> =
        seen["headers"].as_array().unwrap().iter().map(|pair| pair[0].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "accept-encoding",
            "content-length",
            "content-type",
            "host",
            "x-api-key",
            "x-astrocyte-principal",
            "x-request-id"
        ]
    );
    let all = seen["headers"].to_string();
    for said in ["sandbox-a", "forged", "mine", "team-a"] {
        assert!(!all.contains(said), "{said} arrived: {all}");
    }
}

#[test]
fn p12_attacks_48_to_54_a_path_has_one_spelling_and_a_route_one_method() {
    let scene = MemoryScene::new();
    for (row, target, reason) in [
        ("48 needless encoding", "/v1/re%63all", "ambiguous_path"),
        ("49 an encoded slash", "/v1%2Frecall", "ambiguous_path"),
        ("49 dots", "/v1/x/../recall", "ambiguous_path"),
        ("49 encoded dots", "/v1/%2e%2e/v1/recall", "ambiguous_path"),
        ("49 a double slash", "//v1/recall", "ambiguous_path"),
        ("49 a double slash inside", "/v1//recall", "ambiguous_path"),
        ("49 a backslash", "/v1\\recall", "ambiguous_path"),
        ("49 a parameter", "/v1/recall;x", "ambiguous_path"),
        ("49 NUL", "/v1/recall%00", "ambiguous_path"),
        ("49 overlong", "/v1/recall%c0%af", "ambiguous_path"),
        ("49 encoded twice", "/v1/recall%252e", "ambiguous_path"),
        ("50 a slash at the end", "/v1/recall/", "memory_operation"),
        ("51 another case", "/V1/Recall", "memory_operation"),
        ("51 another version", "/v2/recall", "memory_operation"),
        ("52 another's address", "http://other.example/v1/recall", "names_disagree"),
        ("49 a fragment", "/v1/recall#x", "bad_request"),
    ] {
        let answer = scene.send_honest("sandbox-b", ClientRequest { target: target.into(), ..own_recall() });
        scene.assert_refused(row, &answer, reason, 0);
    }
    for (row, method, reason) in [
        ("54 HEAD", "HEAD", "memory_operation"),
        ("54 lower case", "post", "bad_method"),
        ("54 unknown", "PATCH", "memory_operation"),
        ("54 TRACE", "TRACE", "method_not_allowed"),
    ] {
        let answer = scene.send_honest("sandbox-b", own_recall().with_method(method));
        scene.assert_refused(row, &answer, reason, 0);
    }
    let body = ClientRequest::get("/v1/mental-models?bank_id=staging:team-b").with_body(b"{}");
    scene.assert_refused("54 GET with a body", &scene.send_honest("sandbox-b", body), "memory_form", 0);
    let chunked =
        ClientRequest::get("/v1/mental-models?bank_id=staging:team-b").with_framing(ClientFraming::Chunked);
    scene.assert_refused("54 GET in chunks", &scene.send_honest("sandbox-b", chunked), "memory_form", 0);
}

#[test]
fn p6_attacks_53_and_75_the_host_is_the_connections_own() {
    let scene = MemoryScene::new();
    for (row, fields, reason) in [
        ("53 two hosts", "Host: {host}\r\nHost: {host}\r\n", "bad_request"),
        ("53 no host", "", "bad_request"),
        ("53 userinfo", "Host: a@{host}\r\n", "bad_name"),
        ("53 another port", "Host: memory.corp.example:1\r\n", "names_disagree"),
        ("75 another host", "Host: other.example\r\n", "names_disagree"),
    ] {
        let fields = fields.replace("{host}", &scene.service_host());
        let mut client = scene.connect("sandbox-b");
        let token = scene.token("sandbox-b");
        client.send_bytes(
            format!("GET /live HTTP/1.1\r\n{fields}Sandbox-Identity: {token}\r\n\r\n").as_bytes(),
        );
        scene.assert_refused(row, &client.read_response().expect(row), reason, 0);
    }
}

/// Without TLS, or in TLS for nobody or for somebody else, there is no way to the service.
#[test]
fn p12_attack_75_the_service_is_reached_in_tls_under_its_own_name_or_not_at_all() {
    let scene = MemoryScene::new();
    let host = scene.service_host();
    let body = r#"{"query":"x","bank_id":"staging:team-b"}"#;
    let request = |target: &str| {
        let (token, length) = (scene.token("sandbox-b"), body.len());
        format!(
            "POST {target} HTTP/1.1\r\nHost: {host}\r\nSandbox-Identity: {token}\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        )
    };
    let connect = |to: &str| format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n");
    let address = format!("127.0.0.1:{}", scene.service.port());
    let mapped = format!("[::ffff:127.0.0.1]:{}", scene.service.port());
    let decimal = format!("2130706433:{}", scene.service.port());
    for (row, said) in [
        ("75 in the clear", request(&format!("http://{host}/v1/recall"))),
        ("75 in the clear, in a tunnel", connect(&host) + &request("/v1/recall")),
        ("75 by its address", connect(&address) + &request("/v1/recall")),
        ("75 by its address, in the clear", request(&format!("http://{address}/v1/recall"))),
        ("76 by a mapped address", connect(&mapped) + &request("/v1/recall")),
        ("76 by a number", connect(&decimal) + &request("/v1/recall")),
    ] {
        let mut socket = TcpStream::connect(scene.listener("sandbox-b")).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        socket.write_all(said.as_bytes()).unwrap();
        let mut answer = Vec::new();
        drop(socket.read_to_end(&mut answer)); // it may be reset
        let answer = String::from_utf8_lossy(&answer).to_ascii_lowercase();
        assert!(answer.contains("sandbar-reason:"), "{row}: {answer}");
        assert_eq!(scene.arrived_requests().len(), 0, "{row}: something arrived");
    }
    let mut nameless = (*scene.trust).clone();
    nameless.enable_sni = false;
    for (row, client) in [
        (
            "75 no name in TLS",
            SandboxClient::connect(scene.listener("sandbox-b"), None, &host, &Arc::new(nameless)),
        ),
        (
            "75 another name in TLS",
            SandboxClient::connect_as(scene.listener("sandbox-b"), &host, "other.example", &scene.trust),
        ),
    ] {
        let mut client = client;
        client.send_bytes(request("/v1/recall").as_bytes());
        assert!(client.read_response().is_none(), "{row}: it is answered");
        assert_eq!(scene.arrived_requests().len(), 0, "{row}: something arrived");
    }
    let told = scene.records();
    for reason in ["name_missing", "names_disagree"] {
        assert!(told.iter().any(|record| record["status_detail"] == reason), "75 no {reason}");
    }
}

/// The hole in common servers: after `Upgrade` the body, when it comes later, is taken for a request.
#[test]
fn p12_attacks_55_to_57_nothing_becomes_another_protocol() {
    let scene = MemoryScene::new();
    let smuggled =
        ClientRequest::recall("staging:team-a").with_field("X-Astrocyte-Principal", "agent:sandbox-a");
    for (row, connection, upgrade) in [
        ("55 a made-up protocol", "Upgrade", "foo"),
        ("55 h2c", "Upgrade, HTTP2-Settings", "h2c"),
        ("56 WebSocket", "Upgrade", "websocket"),
        ("55 not said of the connection", "keep-alive", "foo"),
    ] {
        let inner = smuggled.encode(&scene.service_host());
        let ask = own_recall()
            .with_field("Connection", connection)
            .with_field("Upgrade", upgrade)
            .with_body(&inner);
        let ask = ask.with_field("Sandbox-Identity", &scene.token("sandbox-b"));
        let bytes = ask.encode(&scene.service_host());
        let (head, body) = bytes.split_at(bytes.len() - inner.len());
        let mut client = scene.connect("sandbox-b");
        client.send_bytes(head);
        let answer = client.read_response().expect(row);
        client.send_bytes(body);
        scene.assert_refused(row, &answer, "memory_form", 0);
        // If the body is read as a request, that is asked about too, and is refused.
        if let Some(second) = client.read_response() {
            scene.assert_refused(row, &second, second.reason().unwrap(), 0);
        }
    }
    let mut client = scene.connect("sandbox-b");
    client.send_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    scene.assert_refused("57 a preface", &client.read_response().unwrap(), "bad_request", 0);
}

#[test]
fn p12_attacks_58_to_60_a_body_has_one_length() {
    let scene = MemoryScene::new();
    let body = r#"{"query":"x","bank_id":"staging:team-b"}"#;
    let length = body.len();
    for (row, fields) in [
        ("58 both", format!("Content-Length: {length}\r\nTransfer-Encoding: chunked\r\n")),
        ("58 two lengths", format!("Content-Length: {length}\r\nContent-Length: {length}\r\n")),
        ("58 a plus", format!("Content-Length: +{length}\r\n")),
        ("58 xchunked", "Transfer-Encoding: xchunked\r\n".to_owned()),
        ("58 a folded line", format!("Content-Length: {length}\r\n folded: x\r\n")),
        ("58 a space before the colon", format!("Content-Length : {length}\r\n")),
        ("58 a bare line feed", format!("X: y\nContent-Length: {length}\r\n")),
        ("58 a bare carriage return", format!("X: y\rContent-Length: {length}\r\n")),
        ("58 NUL", format!("X: \0\r\nContent-Length: {length}\r\n")),
        ("59 identity, chunked", "Transfer-Encoding: identity, chunked\r\n".to_owned()),
        ("59 a tab", "Transfer-Encoding: \tchunked,\r\n".to_owned()),
        ("59 twice", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n".to_owned()),
    ] {
        let mut client = scene.connect("sandbox-b");
        let (host, token) = (scene.service_host(), scene.token("sandbox-b"));
        client.send_bytes(
            format!(
                "POST /v1/recall HTTP/1.1\r\nHost: {host}\r\nSandbox-Identity: {token}\r\n\
                 Content-Type: application/json\r\n{fields}\r\n{body}"
            )
            .as_bytes(),
        );
        scene.assert_refused(row, &client.read_response().expect(row), "bad_request", 0);
        assert!(client.is_closed(), "{row}: the connection goes on");
    }
    let answer = scene.send_honest("sandbox-b", own_recall().with_framing(ClientFraming::Chunked));
    assert_eq!(answer.status, 200, "60 extensions: {}", answer.text());
    let seen = scene.arrived_requests().pop().unwrap()["headers"].to_string();
    assert!(seen.contains("content-length") && !seen.contains("transfer-encoding"), "{seen}");
}

/// What is sent in one piece is still two requests, and each is asked about.
#[test]
fn p12_attack_61_a_second_request_is_judged_by_itself() {
    let scene = MemoryScene::new();
    let token = scene.token("sandbox-b");
    let first = own_recall().with_field("Sandbox-Identity", &token).encode(&scene.service_host());
    let second = ClientRequest::recall("staging:team-a")
        .with_field("Sandbox-Identity", &token)
        .encode(&scene.service_host());
    let mut client = scene.connect("sandbox-b");
    client.send_bytes(&[first, second].concat());
    assert_eq!(client.read_response().unwrap().status, 200);
    if let Some(answer) = client.read_response() {
        assert_eq!(answer.reason(), Some("foreign_bank"), "{}", answer.text());
    }
    assert_eq!(scene.arrived_requests().len(), 1);
}

#[test]
fn p12_attacks_63_and_66_to_68_a_body_is_plain_json() {
    let scene = MemoryScene::new();
    let body = r#"{"query":"x","bank_id":"staging:team-b"}"#;
    let wide = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let wider =
        |text: &str| text.chars().flat_map(|letter| u32::from(letter).to_le_bytes()).collect::<Vec<u8>>();
    let typed = |kind: &str| own_recall().without_field("Content-Type").with_field("Content-Type", kind);
    let rows: Vec<(&str, ClientRequest)> = vec![
        ("63 gzip", own_recall().with_field("Content-Encoding", "gzip")),
        ("63 br", own_recall().with_field("Content-Encoding", "br")),
        ("63 stacked", own_recall().with_field("Content-Encoding", "identity, gzip")),
        ("63 undeclared gzip", own_recall().with_body(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3])),
        ("66 UTF-16", own_recall().with_body(&wide(body))),
        ("66 UTF-32", own_recall().with_body(&wider(body))),
        ("66 BOM", own_recall().with_body(&[b"\xef\xbb\xbf", body.as_bytes()].concat())),
        ("66 another charset", typed("application/json; charset=utf-16")),
        ("67 text", typed("text/plain")),
        ("67 no type", own_recall().without_field("Content-Type")),
        ("67 two types", own_recall().with_field("Content-Type", "text/plain")),
        ("67 a suffix", typed("application/vnd.api+json")),
        ("68 multipart", typed("multipart/form-data; boundary=x")),
        ("68 a form", typed("application/x-www-form-urlencoded")),
    ];
    for (row, ask) in rows {
        scene.assert_refused(row, &scene.send_honest("sandbox-b", ask), "body_malformed", 0);
    }
    for (row, ask) in [
        ("63 identity", own_recall().with_field("Content-Encoding", "identity")),
        ("66 the right charset", typed("application/json; charset=UTF-8")),
    ] {
        assert_eq!(scene.send_honest("sandbox-b", ask).status, 200, "{row}");
    }
}
