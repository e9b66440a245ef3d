//! Fields: what a sandbox says about itself goes no further, nothing is added to what it asks, and what the origin
//! answers is what the sandbox sees.

use crate::instance::InstanceSetup;
use crate::origin::{OriginReply, ScriptedOrigin};

#[test]
fn p13_nothing_is_invented_and_nobody_speaks_for_us() {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    let host = format!("a.test:{}", origin.port());
    let kept = "User-Agent: probe/1\r\nAccept: */*\r\nX-Api-Key: k\r\nCookie: a=b\r\nAuthorization: Bearer t\r\nx-MIXED-Case: Y\r\nReferer: http://r.test/\r\nOrigin: null\r\nX-Request-Id: 7\r\nAccept: text/html\r\n";
    let removed = [
        "X-Forwarded-For",
        "X-Forwarded-Host",
        "X-Forwarded-Proto",
        "X-Forwarded-Anything",
        "Forwarded",
        "Via",
        "X-Real-IP",
        "True-Client-IP",
        "CF-Connecting-IP",
        "Client-IP",
        "X-Client-IP",
        "X-Cluster-Client-IP",
        "Fastly-Client-IP",
        "Sandbox-Identity",
        "X-Sandbox-Id",
        "Sandbar-Record",
        "Sandbar-Anything",
        "X-HTTP-Method-Override",
        "X-HTTP-Method",
        "X-Method-Override",
        "X-Original-URL",
        "X-Rewrite-URL",
        "X-Original-Host",
        "X-Remote-User",
        "Remote-User",
        "X-User",
        "X-User-Id",
        "X-Spiffe-Id",
        "X-Client-Cert",
        "X-SSL-Client-Verify",
        "X-Envoy-Original-Path",
        "X-Auth-Request-User",
        "X-Goog-Authenticated-User-Email",
        "X-MS-Client-Principal-Name",
        "Proxy-Authorization",
        "Proxy-Anything",
        "X_Forwarded_For",
        "Sandbox_Identity",
        "X_HTTP_Method_Override",
        "X-Forwarded_Host",
        "x_real_ip",
        "Content_Length",
        "Transfer_Encoding",
        "Keep-Alive",
        "Proxy-Connection",
        "TE",
        "Upgrade",
        "HTTP2-Settings",
        "X-Nominated",
    ];
    let lies: String = removed.iter().map(|name| format!("{name}: 5\r\n")).collect();
    for (what, tunnelled) in [("in a tunnel", true), ("in absolute form", false)] {
        let before = origin.connections().iter().map(|seen| seen.bytes.len()).sum::<usize>();
        let mut wire = if tunnelled { world.open_tunnel("a.test", origin.port()) } else { world.connect() };
        let target = if tunnelled { "/x?q=1".to_owned() } else { format!("http://{host}/x?q=1") };
        wire.send(format!(
            "GET {target} HTTP/1.1\r\nHost: {host}\r\n{kept}{lies}Connection: close, x-nominated\r\n\r\n"
        ));
        assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200), "{what}");
        let bytes: Vec<u8> =
            origin.connections().into_iter().flat_map(|seen| seen.bytes).skip(before).collect();
        // Fields leave in one order and letter case, and those of one name as one.
        let joined =
            kept.replace("Accept: text/html\r\n", "").replace("Accept: */*", "Accept: */*,text/html");
        let mut fields: Vec<&str> = joined.lines().collect();
        fields.sort_by_key(|line| line.to_ascii_lowercase());
        let fields = fields.join("\r\n").replace("x-MIXED-Case", "X-Mixed-Case");
        let expected = format!("GET /x?q=1 HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n\r\n");
        assert_eq!(String::from_utf8(bytes).unwrap(), expected, "{what}");
    }
}

#[test]
fn grpc_keeps_its_trailers() {
    let origin = ScriptedOrigin::start_plain();
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    for (kind, te, kept) in [
        ("application/grpc", "trailers", Some("trailers")),
        ("application/grpc+proto", "trailers", Some("trailers")),
        ("application/grpc", "gzip, trailers", Some("trailers")),
        ("text/plain", "trailers", None),
    ] {
        let before = origin.requests().len();
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(format!("POST /x HTTP/1.1\r\nHost: a.test:{}\r\nContent-Type: {kind}\r\nTE: {te}\r\nConnection: TE\r\nContent-Length: 1\r\n\r\nx", origin.port()));
        assert_eq!(wire.read_response("POST").map(|answer| answer.status), Some(200), "{kind}");
        let requests = origin.requests().split_off(before);
        let [request] = &requests[..] else { panic!("{kind}: {requests:?}") };
        assert_eq!(request.field("te"), kept, "{kind} {te}");
    }
}

#[test]
fn an_answer_is_passed_on_as_it_is() {
    let (origin, elsewhere) = (ScriptedOrigin::start_plain(), ScriptedOrigin::start_plain());
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port()), ("b.test", elsewhere.port())]).start();
    let fields = format!(
        "Server: origin/1\r\nContent-Type: text/odd\r\nContent-Encoding: br\r\nSet-Cookie: a=b\r\nSet-Cookie: c=d\r\n\
         Via: 1.1 cdn\r\nX-Forwarded-For: 192.0.2.1\r\nETag: \"x\"\r\nX-MIXED: Y\r\nLocation: http://b.test:{}/\r\n\
         Strict-Transport-Security: max-age=1\r\nCache-Control: private\r\nContent-Length: 4\r\n",
        elsewhere.port()
    );
    let hops = "Alt-Svc: h3=\":443\"\r\nKeep-Alive: 5\r\nProxy-Authenticate: Basic\r\nUpgrade: h2c\r\nX-Hop: y\r\nConnection: x-hop, keep-alive\r\n";
    for status in [
        "200 OK",
        "301 Moved Permanently",
        "302 Found",
        "307 Temporary Redirect",
        "308 Permanent Redirect",
        "404 Not Found",
        "407 Proxy Authentication Required",
        "500 No",
        "599 Odd",
    ] {
        origin.set_reply(OriginReply::Say(
            format!("HTTP/1.1 {status}\r\n{fields}{hops}\r\n\x01\x02\x00\u{7f}").into_bytes(),
        ));
        let mut wire = world.open_tunnel("a.test", origin.port());
        wire.send(format!("GET /x HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", origin.port()));
        let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{status}: no answer"));
        assert!(status.starts_with(&answer.status.to_string()), "{status}: {answer:?}");
        assert_eq!(answer.body, b"\x01\x02\x00\x7f", "{status}");
        // The engine dates every answer by itself, and says whether the connection stays.
        let own = |name: &str| matches!(name, "date" | "connection");
        let mut got: Vec<_> = answer.fields.iter().filter(|(name, _)| !own(name)).cloned().collect();
        let mut said: Vec<_> = fields
            .lines()
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        got.sort();
        said.sort();
        assert_eq!(got, said, "{status}");
    }
    assert_eq!(elsewhere.connections().len(), 0, "a redirect was followed");
}
