//! An origin that sends a credential back, wherever an answer has room for it, over HTTP/1 and HTTP/2; and a
//! sandbox that tries to make it do so unseen (P11).

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::credentials::{CredentialScene, SECRET};
use crate::handshake::OriginCa;
use crate::http2_origin::Http2Origin;
use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::OriginReply;

/// What of the secret must never be seen: any of its longer parts, which escapes would leave as they are.
const SECRET_PARTS: [&str; 3] = ["0123456789", "live/01", "abcdef=="];

fn assert_covered(what: &str, shown: &str) {
    for part in SECRET_PARTS {
        assert!(!shown.contains(part), "{what}: {part} in {shown}");
    }
}

fn wait_for_finding(world: &SandbarInstance, what: &str) {
    world.wait_for_record(0, what, |record| {
        record["finding_info"]["uid"].as_str().is_some() && is_echo(record)
    });
}

fn is_echo(record: &Value) -> bool {
    record.to_string().contains("credential_echoed")
}

#[test]
fn p11_no_part_of_an_answer_brings_it_back() {
    let quoted = "sk-live/0123456789%2Babcdef%3D%3D"; // as Python quotes: the slash stays
    for (what, answer) in [
        ("the reason", format!("HTTP/1.1 400 Bad token {SECRET}\r\nContent-Length: 2\r\n\r\nno")),
        (
            "early hints",
            format!(
                "HTTP/1.1 103 Early Hints\r\nLink: </{SECRET}>; rel=preload\r\n\r\n\
                 HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
            ),
        ),
        (
            "a redirect",
            format!(
                "HTTP/1.1 302 Found\r\nLocation: https://b.test/?next={quoted}\r\nContent-Length: 0\r\n\r\n"
            ),
        ),
        (
            "cookies",
            format!(
                "HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nSet-Cookie: t={SECRET}; Secure\r\nContent-Length: 0\r\n\r\n"
            ),
        ),
        ("no content", format!("HTTP/1.1 204 No Content\r\nX-Echo: {SECRET}\r\n\r\n")),
        ("not modified", format!("HTTP/1.1 304 Not Modified\r\nETag: \"{SECRET}\"\r\n\r\n")),
        (
            "chunks",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
             a\r\nsk-live/01\r\n1\r\n2\r\n10\r\n3456789+abcdef==\r\n0\r\n\r\n"
                .to_owned(),
        ),
        (
            "trailers",
            format!(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Echo\r\n\r\n\
                 2\r\nok\r\n0\r\nX-Echo: {SECRET}\r\n\r\n"
            ),
        ),
        (
            "JSON",
            "HTTP/1.1 200 OK\r\nContent-Length: 43\r\n\r\n{\"token\":\"sk-live\\/0123456789\\u002Babcdef==\"}"
                .to_owned(),
        ),
        ("an answer of HTTP/1.0", format!("HTTP/1.0 200 OK\r\n\r\nyou sent {SECRET}")),
    ] {
        let scene = CredentialScene::new();
        let close = what.contains("1.0");
        let bytes = answer.into_bytes();
        scene.bound.set_reply(if close { OriginReply::SayAndClose(bytes) } else { OriginReply::Say(bytes) });
        let answer = scene.send_post("");
        assert_covered(what, &String::from_utf8_lossy(&answer.raw));
        assert!(answer.status < 500, "{what}: {}", answer.text());
        assert_eq!(answer.field("trailer"), None, "{what}: what it announces does not follow");
        // A trailer of HTTP/1 and a reason go no further, so there is nothing in them to find.
        if !matches!(what, "trailers" | "the reason") {
            wait_for_finding(&scene.world, what);
        }
    }
}

/// The name of a field has room for it too: as it is where its characters allow, else encoded.
#[test]
fn p11_no_field_is_named_after_it() {
    let hex: String = SECRET.bytes().map(|octet| format!("{octet:02X}")).collect();
    let quoted = SECRET.replace('/', "%2f").replace('+', "%2B").replace('=', "%3d");
    for name in [format!("X-You-Sent-{hex}"), hex.to_ascii_lowercase(), quoted.to_ascii_uppercase(), quoted] {
        for head in ["200 OK\r\nContent-Length: 2\r\n", "103 Early Hints\r\n"] {
            let (first, then) = match head.starts_with("103") {
                true => (String::new(), "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
                false => ("ok".to_owned(), ""),
            };
            let scene = CredentialScene::new();
            let said = format!("HTTP/1.1 {head}{name}: 1\r\nX-Kept: 1\r\n\r\n{first}{then}");
            scene.bound.set_reply(OriginReply::Say(said.into_bytes()));
            let answer = scene.send_post("");
            assert_eq!((answer.status, answer.text()), (200, "ok".to_owned()), "{name}");
            let raw = String::from_utf8_lossy(&answer.raw).to_ascii_lowercase();
            assert!(!raw.contains(&name.to_ascii_lowercase()), "{raw}");
            assert!(raw.contains("x-kept: 1"), "{raw}");
            wait_for_finding(&scene.world, &name);
        }
    }
}

#[test]
fn p11_what_only_begins_like_it_arrives_whole() {
    let scene = CredentialScene::new();
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nends sk-live";
    scene.bound.set_reply(OriginReply::Say(answer.as_bytes().to_vec()));
    assert_eq!(scene.send_post("").text(), "ends sk-live");
    scene.bound.set_reply(OriginReply::SayAndClose(b"HTTP/1.0 200 OK\r\n\r\nends sk-live".to_vec()));
    assert_eq!(scene.send_post("").text(), "ends sk-live");
}

#[test]
fn p11_nobody_can_ask_for_an_answer_that_cannot_be_searched() {
    let scene = CredentialScene::new();
    let fields = "Range: bytes=0-7\r\nIf-Range: \"x\"\r\nAccept-Encoding: gzip\r\naccept-encoding: br\r\n\
                  gRPC-Accept-Encoding: gzip\r\nConnect-Accept-Encoding: gzip\r\nA-IM: gzip\r\nTE: gzip\r\n";
    assert_eq!(scene.send_post(fields).status, 200);
    let requests = scene.bound.requests();
    let told = requests
        .last()
        .unwrap()
        .fields
        .iter()
        .map(|(name, value)| format!("{}: {value}\n", name.to_ascii_lowercase()));
    let told: String = told.collect();
    for gone in ["range", "gzip", "br\n", "a-im"] {
        assert!(!told.contains(gone), "{gone} in {told}");
    }
    for (what, fields) in [
        ("the second is another", "Content-Encoding: identity\r\nContent-Encoding: gzip\r\n"),
        ("stacked", "Content-Encoding: identity, gzip\r\n"),
        ("messages", "Content-Type: application/grpc\r\nGrpc-Encoding: gzip\r\n"),
    ] {
        let answer = format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 4\r\n\r\nzzzz");
        scene.bound.set_reply(OriginReply::Say(answer.into_bytes()));
        let answer = scene.send_post("");
        scene.world.assert_refused(what, &answer, 502, "answer_unreadable");
        assert!(!answer.text().contains("zzzz"), "{what}");
    }
}

#[test]
fn p11_a_websocket_is_searched_too() {
    let scene = CredentialScene::new();
    let frame = format!("\u{1}\u{22}you sent {SECRET}");
    let answer = format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n{frame}"
    );
    scene.bound.set_reply(OriginReply::SayAndHang(answer.into_bytes()));
    let mut wire = scene.connect_bound();
    wire.send(format!(
        "GET /ws/x HTTP/1.1\r\nHost: a.test:{}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Extensions: permessage-deflate\r\nAuthorization: Bearer mine\r\n\r\n",
        scene.bound.port()
    ));
    let answer = wire.read_response("GET").unwrap();
    assert_eq!(answer.status, 101, "{}", answer.text());
    let rest = wire.read_exact(frame.len()).expect("the frame arrives");
    let shown = String::from_utf8_lossy(&rest);
    assert!(shown.contains("you sent ****"), "{shown}");
    assert_covered("a frame", &shown);
    assert_eq!(CredentialScene::received_authorization(&scene.bound), [format!("Bearer {SECRET}")]);
    let requests = scene.bound.requests();
    let asked = &requests.last().unwrap().fields;
    assert!(!asked.iter().any(|(name, _)| name.eq_ignore_ascii_case("sec-websocket-extensions")));
    drop(wire); // what was found is told when it is over
    wait_for_finding(&scene.world, "the echo in a frame");
}

/// Three requests on one connection, of which only the second is bound; and an old client.
#[test]
fn p11_each_request_of_a_connection_is_bound_by_itself() {
    let scene = CredentialScene::new();
    let host = format!("Host: a.test:{}\r\n", scene.bound.port());
    let mut wire = scene.connect_bound();
    for request in [
        format!("GET /v1/x HTTP/1.1\r\n{host}Authorization: Bearer mine\r\n\r\n"),
        format!("POST /v1/x HTTP/1.1\r\n{host}Authorization: Bearer mine\r\nContent-Length: 0\r\n\r\n"),
        format!("GET /v1/x HTTP/1.1\r\n{host}\r\n"),
    ] {
        wire.send(&request);
        assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200), "{request}");
    }
    let mut wire = scene.connect_bound();
    wire.send(format!("POST /v1/x HTTP/1.0\r\n{host}Content-Length: 0\r\n\r\n"));
    assert_eq!(wire.read_response("POST").map(|answer| answer.status), Some(200));
    let bound = format!("Bearer {SECRET}");
    let sent: Vec<Vec<String>> = scene.bound.requests().iter().map(authorization_fields).collect();
    let [first, second, third, fourth] = &sent[..] else { panic!("{sent:?}") };
    assert!(
        first.is_empty() && third.is_empty(),
        "by no rule does that host get the sandbox's own: {sent:?}"
    );
    assert_eq!((second, fourth), (&vec![bound.clone()], &vec![bound]));
}

fn authorization_fields(request: &crate::strict_http::StrictRequest) -> Vec<String> {
    let named = |(name, _): &&(String, String)| name.eq_ignore_ascii_case("authorization");
    request.fields.iter().filter(named).map(|(_, value)| value.clone()).collect()
}

/// It is told to nobody: not in the clear, not by the methods that repeat requests, not to whoever asks the program.
#[test]
fn p11_it_is_told_to_nobody() {
    let scene = CredentialScene::new();
    scene.bound.set_reply(OriginReply::Say(
        format!("HTTP/1.1 500 {SECRET}\r\nX-Echo: {SECRET}\r\nContent-Length: 0\r\n\r\n").into_bytes(),
    ));
    assert_eq!(scene.send_post("").status, 500);
    let port = scene.bound.port();
    let arrived = scene.bound.requests().len();
    let mut wire = scene.world.connect();
    wire.send(format!(
        "POST http://a.test:{port}/v1/x HTTP/1.1\r\nHost: a.test:{port}\r\nContent-Length: 0\r\n\r\n"
    ));
    let answer = wire.read_response("POST").unwrap();
    scene.world.assert_refused("in the clear", &answer, 403, "credential_needs_tls");
    let mut wire = scene.connect_bound();
    wire.send(format!("TRACE /v1/x HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n"));
    let answer = wire.read_response("TRACE").unwrap();
    scene.world.assert_refused("TRACE", &answer, 403, "method_not_allowed");
    assert_eq!(scene.bound.requests().len(), arrived, "something arrived");
    fs::remove_file(scene.credential_file()).unwrap();
    let answer = scene.wait_for_answer("it is gone", |answer| answer.status == 502);
    scene.world.assert_refused("gone", &answer, 502, "credential_unavailable");
    let socket = scene.world.log_dir().join("admin.sock");
    let asked = ["health", "ready", "metrics", "status", "connections", "jwks"].map(|what| {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--max-time", "20", "--unix-socket"]).arg(&socket);
        let told = curl.arg(format!("http://sandbar/{what}")).output().expect("curl").stdout;
        assert!(!told.is_empty(), "{what} is not answered");
        String::from_utf8(told).unwrap()
    });
    let told =
        format!("{}\n{}\n{}\n{}", scene.log_text(), scene.world.stderr_text(), answer.text(), asked.concat());
    assert_covered("somebody is told", &told);
}

/// The same over HTTP/2, towards an origin that speaks nothing else.
struct Http2EchoScene {
    world: SandbarInstance,
    origin: Http2Origin,
    _secret: tempfile::TempDir,
}

impl Http2EchoScene {
    fn new() -> Self {
        Http2EchoScene::with_rule("")
    }

    /// One whose rule says more.
    fn with_rule(more: &str) -> Self {
        let root = OriginCa::new();
        let origin = Http2Origin::start(&root, "a.test");
        let secret = tempfile::tempdir().unwrap();
        fs::write(secret.path().join("key"), format!("{SECRET}\n")).unwrap();
        let policy = format!(
            "[[allow]]\nname = \"model\"\nhosts = [\"a.test:{}\"]\npaths = [\"/v1/**\"]\ncredential = \"key\"\n\
             resolves_to = [\"127.0.0.0/8\"]\n{more}",
            origin.port
        );
        let file = secret.path().join("key").display().to_string();
        let tables = format!(
            "[[credential]]\nname = \"key\"\nfile = \"{file}\"\nhosts = [\"a.test:{}\"]\n",
            origin.port
        );
        let plan = InstanceSetup { policy, tables, hosts: vec!["a.test"], ..InstanceSetup::default() };
        Http2EchoScene { world: plan.with_roots(root.pem()).start(), origin, _secret: secret }
    }

    /// What curl is answered, heads and trailers and all.
    fn curl_output(&self, version: &str, path: &str, fields: &[&str]) -> String {
        let done = self.curl(version, path, fields);
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{version} {path}: {said}");
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    fn curl(&self, version: &str, path: &str, fields: &[&str]) -> std::process::Output {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--max-time", "30", "--dump-header", "-", version]);
        curl.arg("--proxy").arg(format!("http://{}", self.world.listeners[0]));
        curl.arg("--cacert").arg(self.world.ca_path());
        curl.args(fields.iter().flat_map(|field| ["--header", field]));
        curl.arg(format!("https://a.test:{}{path}", self.origin.port));
        curl.env_remove("NO_PROXY").env_remove("no_proxy").output().expect("curl")
    }
}

#[test]
fn trailers_are_counted_as_bodies_are() {
    let scene = Http2EchoScene::new();
    assert!(scene.curl_output("--http2", "/v1/long-trailers", &[]).contains("x-long: yyyy"));
    let scene = Http2EchoScene::with_rule("[allow.budget]\ndownload_bytes_per_hour = 3000\n");
    let done = scene.curl("--http2", "/v1/long-trailers", &[]);
    let shown = String::from_utf8_lossy(&done.stdout);
    assert!(!shown.contains("x-long"), "{shown}");
    let cut = |record: &Value| record["status_detail"] == "budget_spent";
    scene.world.wait_for_record(0, "the cut", cut);
}

#[test]
fn p11_over_http2_it_is_put_in_once_and_kept_in_no_table() {
    let scene = Http2EchoScene::new();
    for (round, version) in ["--http2", "--http1.1", "--http2"].iter().enumerate() {
        let fields = [
            "Authorization: Bearer one",
            "AUTHORIZATION: Basic dHdv",
            "Connection: authorization",
            "Range: bytes=0-3",
        ];
        // Connection is HTTP/1's; over HTTP/2 a request with it is none.
        let fields = if *version == "--http2" { &fields[..2] } else { &fields[..] };
        let shown = scene.curl_output(version, "/v1/x", fields);
        assert!(shown.contains("plain"), "{version}: {shown}");
        let seen = scene.origin.requests();
        assert_eq!(seen.len(), round + 1, "{version}");
        let told = seen[round]["fields"].as_array().unwrap();
        let named: Vec<&Value> = told.iter().filter(|field| field[0] == "authorization").collect();
        let [only] = named[..] else { panic!("{version}: {named:?}") };
        assert_eq!(only[1], format!("Bearer {SECRET}"), "{version}");
        assert_eq!(only[2], false, "{version}: a table of HPACK's may keep it");
        assert!(!told.iter().any(|field| field[0] == "range"), "{version}");
    }
}

#[test]
fn p11_over_http2_what_comes_back_is_covered() {
    let scene = Http2EchoScene::new();
    for version in ["--http2", "--http1.1"] {
        for (path, rest) in [
            ("/v1/echo", &["u=v", " thanks", "x-echo: ****"][..]),
            ("/v1/hints", &["plain"]),
            ("/v1/trailers", &["plain"]),
            ("/v1/grpc", &["all of this is sk-"]),
            ("/v1/ends-like-it", &["all of this is sk-"]),
        ] {
            let shown = scene.curl_output(version, path, &[]);
            assert_covered(&format!("{version} {path}"), &shown);
            for part in rest {
                assert!(shown.contains(part), "{version} {path}: no {part} in {shown}");
            }
        }
        let shown = scene.curl_output(version, "/v1/grpc-gzip", &["grpc-accept-encoding: gzip"]);
        assert!(shown.contains("answer_unreadable"), "{version}: {shown}");
    }
    for version in ["--http2", "--http1.1"] {
        let shown = scene.curl_output(version, "/v1/named", &[]).to_ascii_lowercase();
        let hex: String = SECRET.bytes().map(|octet| format!("{octet:02x}")).collect();
        assert!(!shown.contains(&hex) && !shown.contains("sandbar"), "{version}: {shown}");
        assert!(shown.contains("x-kept: yes"), "{version}: {shown}");
        // Trailers reach a client of HTTP/2 only.
        assert_eq!(shown.contains("x-end: yes"), version == "--http2", "{version}: {shown}");
        assert!(!shown.contains("evil"), "{version}: {shown}");
    }
    let shown = scene.curl_output("--http2", "/v1/grpc", &[]);
    assert!(shown.contains("grpc-status: 0"), "trailers arrive: {shown}");
    let count = || {
        let log = fs::read_dir(scene.world.log_dir()).unwrap().map(|entry| entry.unwrap().path());
        let segments = log.filter(|path| path.extension().is_some_and(|kind| kind == "jsonl"));
        let text: String = segments.map(|path| fs::read_to_string(path).unwrap()).collect();
        text.matches("credential_echoed").count()
    };
    crate::instance::wait_until("every echo is found", || count() >= 10);
}
