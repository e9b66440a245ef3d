//! Every refusal's record says what was tried (P18): the name that disagrees, the text that is no name, the request
//! that could not be read. Never a secret: no password, query, field or body.

use std::sync::Arc;

use rustls::ClientConfig;
use serde_json::Value;

use crate::handshake::{OriginCa, RawClientHello, client_config, tls_handshake};
use crate::http2;
use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::ScriptedOrigin;
use crate::wire::RawConnection;

/// Stands for every secret that the requests of this file carry where a client may carry one.
const SECRET: &str = "hunter2";
const HEAD_BYTES: usize = 8192;

struct RefusalScene {
    world: SandbarInstance,
    plain: ScriptedOrigin,
    tls: ScriptedOrigin,
    http1: Arc<ClientConfig>,
    http2: Arc<ClientConfig>,
}

/// A kind of refusal. `{P}` and `{T}` in its texts are the ports of the two origins.
struct RefusedKind {
    kind: &'static str,
    code: &'static str,
    /// What must not be missing from the record.
    tried: &'static str,
    /// The whole member.
    attempted: &'static str,
    make: fn(&RefusalScene),
}

fn start_scene() -> RefusalScene {
    let root = OriginCa::new();
    let plain = ScriptedOrigin::start_plain();
    let tls = ScriptedOrigin::start_tls(root.server_config("a.test"));
    let (p, t) = (plain.port(), tls.port());
    let policy = format!(
        "[[allow]]\nname = \"origins\"\nhosts = [\"a.test:{p}\", \"a.test:{t}\", \"b.test:{t}\", \"down.test:9\"]\n\
         resolves_to = [\"127.0.0.0/8\"]\n\
         [[allow]]\nname = \"readers\"\nhosts = [\"read.test:{p}\"]\nmethods = [\"GET\"]\npaths = [\"/open/**\"]\n\
         resolves_to = [\"127.0.0.0/8\"]\n\
         [[allow]]\nname = \"outside\"\nhosts = [\"outside.test:{p}\"]\n\
         [[allow]]\nname = \"resolvers\"\nhosts = [\"unknown.test:{p}\"]\n\
         [[deny]]\nname = \"never\"\nhosts = [\"never.test\"]\n"
    );
    let hosts = vec!["a.test", "b.test", "down.test", "never.test", "outside.test", "read.test"];
    let setup = InstanceSetup { policy, hosts, ..InstanceSetup::default() };
    let limits = format!("head_bytes = {HEAD_BYTES}\nhead_fields = 20\nhello_bytes = 4096");
    let world = setup.with_roots(root.pem()).with_limits(&limits).start();
    let (http1, http2) = (client_config(&world, "http/1.1"), client_config(&world, "h2"));
    RefusalScene { world, plain, tls, http1, http2 }
}

impl RefusalScene {
    fn ports(&self, text: &str) -> String {
        text.replace("{P}", &self.plain.port().to_string()).replace("{T}", &self.tls.port().to_string())
    }

    /// Sends a head to the proxy and reads its answer.
    fn ask(&self, head: &str) {
        exchange(self.world.connect(), &self.ports(head));
    }

    /// The same in a granted tunnel, without TLS.
    fn ask_inside(&self, head: &str) {
        exchange(self.world.open_tunnel("a.test", self.plain.port()), &self.ports(head));
    }

    /// The same in TLS.
    fn ask_in_tls(&self, head: &str) {
        let wire = self.world.open_tunnel("a.test", self.tls.port());
        exchange(tls_handshake(wire, &self.http1, "a.test").unwrap(), &self.ports(head));
    }

    /// Sends a request of HTTP/2 in TLS.
    fn ask_http2(&self, method: &str, scheme: &str, authority: &str, path: &str, more: &[(&str, &str)]) {
        let wire = self.world.open_tunnel("a.test", self.tls.port());
        let wire = tls_handshake(wire, &self.http2, "a.test").unwrap();
        let mut fields = http2::request_fields(method, scheme, &self.ports(authority), path);
        let more = more.iter().map(|(name, value)| ((*name).to_owned(), self.ports(value).into_bytes()));
        fields.extend(more);
        let mut connection = http2::Http2Client::new(wire);
        connection.send_headers(1, &fields, true);
        assert_ne!(connection.wait_for_status(1), Some(200), "{authority}");
    }

    /// Sends a ClientHello into a granted tunnel.
    fn greet(&self, hello: &[u8]) {
        let mut wire = self.world.open_tunnel("a.test", self.tls.port());
        wire.send(hello);
        wire.read_to_end();
    }

    /// Sends a SOCKS5 request; its port is added.
    fn ask_socks(&self, request: &[u8]) {
        let mut wire = self.world.connect();
        wire.send([5, 1, 0]);
        assert_eq!(wire.read_exact(2), Some(vec![5, 0]));
        wire.send([request, &self.plain.port().to_be_bytes()].concat());
        wire.read_to_end();
    }

    /// Sends bytes that are no request of the proxy.
    fn send_raw(&self, bytes: &[u8]) {
        let mut wire = self.world.connect();
        wire.send(bytes);
        wire.read_to_end();
    }
}

fn exchange(mut wire: RawConnection, head: &str) {
    wire.send(head);
    let answer = wire.read_response("GET").unwrap_or_else(|| panic!("no answer to {head:?}"));
    assert_ne!(answer.status, 200, "{head:?}");
}

/// The kinds whose records once lacked what was tried come first.
#[rustfmt::skip]
const KINDS: &[RefusedKind] = &[
    RefusedKind { kind: "CONNECT and Host", code: "names_disagree", tried: "denied.test", attempted: "GET denied.test:{P} /x",
        make: |s| s.ask_inside("GET /x?k=hunter2 HTTP/1.1\r\nHost: denied.test:{P}\r\nCookie: hunter2\r\n\r\n") },
    RefusedKind { kind: "SNI and Host", code: "names_disagree", tried: "denied.test", attempted: "GET denied.test:{T} /x",
        make: |s| s.ask_in_tls("GET /x HTTP/1.1\r\nHost: denied.test:{T}\r\nAuthorization: Bearer hunter2\r\n\r\n") },
    RefusedKind { kind: "SNI and :authority", code: "misdirected", tried: "denied.test", attempted: "GET https://denied.test:{T} /x",
        make: |s| s.ask_http2("GET", "https", "denied.test:{T}", "/x?k=hunter2", &[("cookie", "hunter2")]) },
    RefusedKind { kind: "target and Host", code: "names_disagree", tried: "denied.test", attempted: "GET http://a.test:{P} denied.test:{P} /x",
        make: |s| s.ask("GET http://a.test:{P}/x?k=hunter2 HTTP/1.1\r\nHost: denied.test:{P}\r\n\r\n") },
    RefusedKind { kind: "Host and target", code: "names_disagree", tried: "denied.test", attempted: "GET http://denied.test:{P} a.test:{P} /x",
        make: |s| s.ask("GET http://denied.test:{P}/x HTTP/1.1\r\nHost: a.test:{P}\r\n\r\n") },
    RefusedKind { kind: "CONNECT and its Host", code: "names_disagree", tried: "denied.test", attempted: "CONNECT a.test:{P} denied.test:{P}",
        make: |s| s.ask("CONNECT a.test:{P} HTTP/1.1\r\nHost: denied.test:{P}\r\n\r\n") },
    RefusedKind { kind: "bad name: number", code: "bad_name", tried: "2852039166", attempted: "CONNECT 2852039166:{P}",
        make: |s| s.ask("CONNECT 2852039166:{P} HTTP/1.1\r\nHost: 2852039166:{P}\r\n\r\n") },
    RefusedKind { kind: "bad name: number in target", code: "bad_name", tried: "2852039166", attempted: "GET http://2852039166:{P} /x",
        make: |s| s.ask("GET http://2852039166:{P}/x HTTP/1.1\r\nHost: 2852039166:{P}\r\n\r\n") },
    RefusedKind { kind: "bad name: brackets", code: "bad_name", tried: "[denied.test]", attempted: "CONNECT [denied.test]:{P}",
        make: |s| s.ask("CONNECT [denied.test]:{P} HTTP/1.1\r\nHost: [denied.test]:{P}\r\n\r\n") },
    RefusedKind { kind: "bad name: user in CONNECT", code: "bad_name", tried: "@denied.test", attempted: "CONNECT ***@denied.test:{P}",
        make: |s| s.ask("CONNECT a.test:hunter2@denied.test:{P} HTTP/1.1\r\nHost: a.test:hunter2@denied.test:{P}\r\n\r\n") },
    RefusedKind { kind: "bad name: user in target", code: "bad_name", tried: "@denied.test", attempted: "GET http://***@denied.test:{P} a.test:{P} /x",
        make: |s| s.ask("GET http://a.test:hunter2@denied.test:{P}/x HTTP/1.1\r\nHost: a.test:{P}\r\n\r\n") },
    RefusedKind { kind: "bad name: user in Host", code: "bad_name", tried: "@denied.test", attempted: "GET ***@denied.test:{T} /x",
        make: |s| s.ask_in_tls("GET /x HTTP/1.1\r\nHost: hunter2@denied.test:{T}\r\n\r\n") },
    RefusedKind { kind: "bad name: Unicode", code: "bad_name", tried: "d\u{e9}nied.test", attempted: "GET d\u{e9}nied.test:{P} /x",
        make: |s| s.ask_inside("GET /x HTTP/1.1\r\nHost: d\u{e9}nied.test:{P}\r\n\r\n") },
    RefusedKind { kind: "bad name: SNI", code: "bad_name", tried: "denied_.test", attempted: "denied_.test",
        make: |s| s.greet(&RawClientHello::for_name("denied_.test").record_bytes()) },
    RefusedKind { kind: "bad name: SOCKS", code: "bad_name", tried: "denied_.test", attempted: "SOCKS CONNECT denied_.test:{P}",
        make: |s| s.ask_socks(b"\x05\x01\x00\x03\x0cdenied_.test") },
    RefusedKind { kind: "bad SNI", code: "bad_handshake", tried: "@denied.test", attempted: "***@denied.test",
        make: |s| s.greet(&RawClientHello::for_name("hunter2@denied.test").record_bytes()) },
    RefusedKind { kind: "bare LF", code: "bad_request", tried: "denied.test", attempted: "GET http://denied.test /x",
        make: |s| s.ask("GET http://denied.test/x?k=hunter2 HTTP/1.1\nHost: denied.test\nCookie: hunter2\n\nhunter2") },
    RefusedKind { kind: "bare LF in a tunnel", code: "bad_request", tried: "/x", attempted: "GET denied.test /x",
        make: |s| s.ask_inside("GET /x HTTP/1.1\r\nHost: denied.test\nX: hunter2\r\n\r\n") },
    RefusedKind { kind: "bare CR", code: "bad_request", tried: "denied.test", attempted: "GET http://a.test:{P} denied.test /x",
        make: |s| s.ask("GET http://a.test:{P}/x HTTP/1.1\r\nX: hunter2\rHost: denied.test\r\n\r\n") },
    RefusedKind { kind: "long target", code: "head_too_large", tried: "denied.test", attempted: "GET http://denied.test /{long}",
        make: |s| s.ask(&format!("GET http://denied.test/{} HTTP/1.1\r\nHost: denied.test\r\n\r\n", "x".repeat(HEAD_BYTES))) },
    RefusedKind { kind: "long field", code: "head_too_large", tried: "denied.test", attempted: "GET http://denied.test /x",
        make: |s| s.ask(&format!("GET http://denied.test/x HTTP/1.1\r\nHost: denied.test\r\nX: {}\r\n\r\n", "hunter2".repeat(HEAD_BYTES))) },
    RefusedKind { kind: "long field in TLS", code: "head_too_large", tried: "denied.test", attempted: "GET denied.test /x",
        make: |s| s.ask_in_tls(&format!("GET /x HTTP/1.1\r\nHost: denied.test\r\nX: {}\r\n\r\n", "hunter2".repeat(HEAD_BYTES))) },
    RefusedKind { kind: "many fields", code: "head_too_large", tried: "denied.test", attempted: "GET http://denied.test /x",
        make: |s| s.ask(&format!("GET http://denied.test/x HTTP/1.1\r\nHost: denied.test\r\n{}\r\n", "X: hunter2\r\n".repeat(21))) },
    RefusedKind { kind: "long hello", code: "head_too_large", tried: "denied.test", attempted: "denied.test",
        make: |s| s.greet(&RawClientHello { padding: 5000, ..RawClientHello::for_name("denied.test") }.record_bytes()) },
    RefusedKind { kind: "https in the target", code: "bad_request", tried: "https://denied.test", attempted: "GET https://denied.test /x",
        make: |s| s.ask("GET https://denied.test/x HTTP/1.1\r\nHost: denied.test\r\n\r\n") },
    RefusedKind { kind: "another scheme", code: "bad_request", tried: "ftp://", attempted: "GET ftp://***@denied.test denied.test /x",
        make: |s| s.ask("GET ftp://u:hunter2@denied.test/x HTTP/1.1\r\nHost: denied.test\r\n\r\n") },
    RefusedKind { kind: "SOCKS BIND", code: "socks_unsupported", tried: "denied.test", attempted: "SOCKS BIND denied.test:{P}",
        make: |s| s.ask_socks(b"\x05\x02\x00\x03\x0bdenied.test") },
    RefusedKind { kind: "SOCKS UDP", code: "socks_unsupported", tried: "192.0.2.7", attempted: "SOCKS UDP 192.0.2.7:{P}",
        make: |s| s.ask_socks(b"\x05\x03\x00\x01\xc0\x00\x02\x07") },
    RefusedKind { kind: "SOCKS command", code: "socks_unsupported", tried: "2001:db8::7", attempted: "SOCKS command 9 [2001:db8::7]:{P}",
        make: |s| s.ask_socks(b"\x05\x09\x00\x04\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\x07") },
    RefusedKind { kind: "SOCKS address type", code: "socks_unsupported", tried: "address type 7", attempted: "SOCKS CONNECT address type 7",
        make: |s| s.ask_socks(b"\x05\x01\x00\x07\x0bdenied.test") },
    RefusedKind { kind: "SOCKS version", code: "socks_unsupported", tried: "denied.test", attempted: "SOCKS version 4 CONNECT denied.test:{P}",
        make: |s| s.ask_socks(b"\x04\x01\x00\x03\x0bdenied.test") },
    RefusedKind { kind: "SOCKS4", code: "wrong_protocol", tried: "192.0.2.7", attempted: "SOCKS4 CONNECT 192.0.2.7:80",
        make: |s| s.send_raw(b"\x04\x01\x00\x50\xc0\x00\x02\x07hunter2\0") },
    RefusedKind { kind: "method", code: "bad_method", tried: "g-et", attempted: "g-et a.test:{P} /x",
        make: |s| s.ask("g-et http://a.test:{P}/x HTTP/1.1\r\nHost: a.test:{P}\r\n\r\n") },
    RefusedKind { kind: "CONNECT without port", code: "bad_request", tried: "denied.test", attempted: "CONNECT denied.test",
        make: |s| s.ask("CONNECT denied.test HTTP/1.1\r\nHost: denied.test\r\n\r\n") },
    RefusedKind { kind: "CONNECT with path", code: "bad_name", tried: "denied.test", attempted: "CONNECT denied.test:443 denied.test /x",
        make: |s| s.ask("CONNECT denied.test:443/x HTTP/1.1\r\nHost: denied.test\r\n\r\n") },
    RefusedKind { kind: "CONNECT in a tunnel", code: "bad_request", tried: "denied.test", attempted: "CONNECT denied.test:443",
        make: |s| s.ask_inside("CONNECT denied.test:443 HTTP/1.1\r\nHost: denied.test:443\r\n\r\n") },
    RefusedKind { kind: "two Hosts", code: "bad_request", tried: "denied.test", attempted: "GET a.test:{P} denied.test /x",
        make: |s| s.ask_inside("GET /x HTTP/1.1\r\nHost: a.test:{P}\r\nHost: denied.test\r\n\r\n") },
    RefusedKind { kind: "no Host", code: "bad_request", tried: "/x", attempted: "GET /x",
        make: |s| s.ask_inside("GET /x HTTP/1.1\r\n\r\n") },
    RefusedKind { kind: "two lengths", code: "bad_request", tried: "/x", attempted: "POST a.test /x",
        make: |s| s.ask_inside("POST /x HTTP/1.1\r\nHost: a.test\r\nContent-Length: 7\r\nContent-Length: 7\r\n\r\nhunter2") },
    RefusedKind { kind: "origin form", code: "bad_request", tried: "denied.test", attempted: "GET denied.test /x",
        make: |s| s.ask("GET /x HTTP/1.1\r\nHost: denied.test\r\n\r\n") },
    RefusedKind { kind: "TLS to the proxy", code: "wrong_protocol", tried: "denied.test", attempted: "denied.test",
        make: |s| s.send_raw(&RawClientHello::for_name("denied.test").record_bytes()) },
    RefusedKind { kind: "CONNECT and SNI", code: "names_disagree", tried: "denied.test", attempted: "denied.test",
        make: |s| s.greet(&RawClientHello::for_name("denied.test").record_bytes()) },
    RefusedKind { kind: "address as SNI", code: "address_as_sni", tried: "192.0.2.7", attempted: "192.0.2.7",
        make: |s| s.greet(&RawClientHello::for_name("192.0.2.7").record_bytes()) },
    RefusedKind { kind: "no SNI", code: "name_missing", tried: "a.test", attempted: "a.test:{T}",
        make: |s| s.greet(&RawClientHello { names: None, ..RawClientHello::for_name("") }.record_bytes()) },
    RefusedKind { kind: "no hello", code: "bad_handshake", tried: "a.test", attempted: "a.test:{T}",
        make: |s| s.greet(b"\x16\x03\x01\x00\x05hello") },
    RefusedKind { kind: "raw TCP", code: "raw_tcp_not_allowed", tried: "a.test", attempted: "a.test:{T}",
        make: |s| s.greet(b"\x00\x00hunter2") },
    RefusedKind { kind: "many fields of HTTP/2", code: "head_too_large", tried: "denied.test", attempted: "GET https://denied.test /x",
        make: |s| s.ask_http2("GET", "https", "denied.test", "/x", &[("x", "hunter2"); 21]) },
    // Pingora answers it before we see it: the connection's own host is all that is known.
    RefusedKind { kind: ":authority and host", code: "bad_request", tried: "a.test", attempted: "a.test:{T}",
        make: |s| s.ask_http2("GET", "https", "a.test:{T}", "/x", &[("host", "denied.test")]) },
    RefusedKind { kind: "method of HTTP/2", code: "bad_method", tried: "g-et", attempted: "g-et https://a.test:{T} /x",
        make: |s| s.ask_http2("g-et", "https", "a.test:{T}", "/x", &[]) },
    RefusedKind { kind: "bad :authority", code: "bad_name", tried: "denied_.test", attempted: "GET https://denied_.test /x",
        make: |s| s.ask_http2("GET", "https", "denied_.test", "/x", &[]) },
    RefusedKind { kind: "not listed: CONNECT", code: "not_listed", tried: "denied.test", attempted: "CONNECT denied.test:443",
        make: |s| s.ask("CONNECT denied.test:443 HTTP/1.1\r\nHost: denied.test:443\r\n\r\nGET / HTTP/1.1\r\nHost: a.test\r\n\r\n") },
    RefusedKind { kind: "not listed: target", code: "not_listed", tried: "denied.test", attempted: "GET denied.test /x",
        make: |s| s.ask("GET http://denied.test/x?k=hunter2 HTTP/1.1\r\nHost: denied.test\r\n\r\n") },
    RefusedKind { kind: "not listed: SOCKS", code: "not_listed", tried: "denied.test", attempted: "SOCKS CONNECT denied.test:{P}",
        make: |s| s.ask_socks(b"\x05\x01\x00\x03\x0bdenied.test") },
    RefusedKind { kind: "denied", code: "denied_by_rule", tried: "never.test", attempted: "CONNECT never.test:443",
        make: |s| s.ask("CONNECT never.test:443 HTTP/1.1\r\nHost: never.test:443\r\n\r\n") },
    RefusedKind { kind: "address", code: "address_not_listed", tried: "169.254.169.254", attempted: "GET 169.254.169.254 /x",
        make: |s| s.ask("GET http://169.254.169.254/x HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n") },
    RefusedKind { kind: "port", code: "port_not_listed", tried: "a.test", attempted: "CONNECT a.test:1",
        make: |s| s.ask("CONNECT a.test:1 HTTP/1.1\r\nHost: a.test:1\r\n\r\n") },
    RefusedKind { kind: "method not allowed", code: "method_not_allowed", tried: "PUT", attempted: "PUT read.test:{P} /open/x",
        make: |s| s.ask("PUT http://read.test:{P}/open/x HTTP/1.1\r\nHost: read.test:{P}\r\nContent-Length: 7\r\n\r\nhunter2") },
    RefusedKind { kind: "path", code: "path_not_allowed", tried: "/shut", attempted: "GET read.test:{P} /shut",
        make: |s| s.ask("GET http://read.test:{P}/shut?k=hunter2 HTTP/1.1\r\nHost: read.test:{P}\r\n\r\n") },
    RefusedKind { kind: "ambiguous path", code: "ambiguous_path", tried: "%2e%2e", attempted: "GET read.test:{P} /open/%2e%2e/shut",
        make: |s| s.ask("GET http://read.test:{P}/open/%2e%2e/shut HTTP/1.1\r\nHost: read.test:{P}\r\n\r\n") },
    RefusedKind { kind: "resolver discovery", code: "resolver_discovery", tried: "use-application-dns.net", attempted: "CONNECT use-application-dns.net:443",
        make: |s| s.ask("CONNECT use-application-dns.net:443 HTTP/1.1\r\nHost: use-application-dns.net:443\r\n\r\n") },
    RefusedKind { kind: "private address", code: "private_address", tried: "outside.test", attempted: "GET outside.test:{P} /x",
        make: |s| s.ask("GET http://outside.test:{P}/x HTTP/1.1\r\nHost: outside.test:{P}\r\n\r\n") },
    RefusedKind { kind: "no resolver", code: "resolver_unreachable", tried: "unknown.test", attempted: "GET unknown.test:{P} /x",
        make: |s| s.ask("GET http://unknown.test:{P}/x HTTP/1.1\r\nHost: unknown.test:{P}\r\n\r\n") },
    RefusedKind { kind: "unreachable", code: "upstream_unreachable", tried: "down.test", attempted: "GET down.test:9 /x",
        make: |s| s.ask("GET http://down.test:9/x HTTP/1.1\r\nHost: down.test:9\r\n\r\n") },
];

#[test]
fn p18_every_refusal_says_what_was_tried() {
    let scene = start_scene();
    let mut wrong = Vec::new();
    for RefusedKind { kind, code, tried, attempted, make } in KINDS {
        let since = scene.world.record_count();
        make(&scene);
        let record = scene.world.wait_for_record(since, kind, |record| record["action_id"] == 2);
        let said = record["unmapped"]["sandbar"]["attempted"].as_str().unwrap_or_default();
        let long = format!("{}\u{2026}+", "x".repeat(10));
        let expected = scene.ports(attempted);
        let whole = match expected.split_once("{long}") {
            None => said == expected,
            Some((start, _)) => {
                said.starts_with(start) && said.contains(&long) && said.len() <= ATTEMPTED_MAX
            }
        };
        let named = names(&record, tried);
        println!("{kind} | {} | {} | {said:?}", record["status_detail"].as_str().unwrap_or("-"), told(named));
        if !(whole && named && record["status_detail"] == *code) {
            wrong.push(format!("{kind}: {code} {expected:?}, not {} {said:?}", record["status_detail"]));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), KINDS.len(), wrong.join("\n"));
    // The rules are those of the origins: nothing that was refused reached one.
    assert_eq!((scene.plain.connections().len(), scene.tls.connections().len()), (0, 0));
    for record in scene.world.records() {
        assert!(!record.to_string().contains(SECRET), "a secret is in {record:#}");
    }
}

/// The longest `attempted`, decoded.
const ATTEMPTED_MAX: usize = 640;

fn told(named: bool) -> &'static str {
    if named { "told" } else { "NOT TOLD" }
}

/// Whether a record names `text` in any member but its sentence for people.
fn names(record: &Value, text: &str) -> bool {
    match record {
        Value::String(said) => said.contains(text),
        Value::Array(all) => all.iter().any(|one| names(one, text)),
        Value::Object(all) => all.iter().any(|(key, one)| key != "message" && names(one, text)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}
