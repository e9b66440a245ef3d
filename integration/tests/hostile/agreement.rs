//! Names agree (P6): CONNECT host, SNI, Host and `:authority` are one host, on every request of a connection.

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::http2;
use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::ScriptedOrigin;

struct AgreementScene {
    world: SandbarInstance,
    plain: ScriptedOrigin,
    tls: ScriptedOrigin,
}

/// Both names are permitted on both ports: only that they disagree can be what is refused.
fn start_scene() -> AgreementScene {
    let root = OriginCa::new();
    let (plain, tls) =
        (ScriptedOrigin::start_plain(), ScriptedOrigin::start_tls(root.server_config("a.test")));
    let ports = [plain.port(), tls.port()];
    let hosts = ["a.test", "b.test"].map(|host| ports.map(|port| (host, port)));
    let world = InstanceSetup::with_hosts(&hosts.concat()).with_roots(root.pem()).start();
    AgreementScene { world, plain, tls }
}

fn request_for(host: &str) -> String {
    format!("GET /x HTTP/1.1\r\nHost: {host}\r\n\r\n")
}

#[test]
fn p6_each_request_of_a_kept_alive_connection_is_for_its_host() {
    let AgreementScene { world, plain, tls } = start_scene();
    let config = client_config(&world, "http/1.1");
    for (origin, secure) in [(&plain, false), (&tls, true)] {
        let port = origin.port();
        let good = format!("a.test:{port}");
        for (what, hosts, code) in [
            ("the same, always", vec![good.clone(), good.clone(), good.clone()], None),
            (
                "other spellings",
                vec![good.clone(), format!("A.TEST:{port}"), "a.test".into(), format!("a.test.:{port}")],
                None,
            ),
            ("another host first", vec![format!("b.test:{port}")], Some("names_disagree")),
            (
                "another host later",
                vec![good.clone(), good.clone(), format!("b.test:{port}")],
                Some("names_disagree"),
            ),
            ("another port", vec![good.clone(), "a.test:1".into()], Some("names_disagree")),
            ("an address", vec![good.clone(), format!("127.0.0.1:{port}")], Some("names_disagree")),
            (
                "a name that is not permitted",
                vec![good.clone(), format!("c.test:{port}")],
                Some("names_disagree"),
            ),
            ("no name", vec![good.clone(), format!("a.test@b.test:{port}")], Some("bad_name")),
        ] {
            let before = origin.requests().len();
            let mut wire = world.open_tunnel("a.test", port);
            if secure {
                wire = tls_handshake(wire, &config, "a.test").unwrap();
            }
            let (last, first) = hosts.split_last().unwrap();
            for host in first {
                wire.send(request_for(host));
                assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200), "{what}");
            }
            wire.send(request_for(last));
            let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{what}: no answer"));
            match code {
                None => assert_eq!(answer.status, 200, "{what}: {}", answer.text()),
                Some(code) => {
                    let status = if code == "bad_name" { 400 } else { 403 };
                    world.assert_refused(what, &answer, status, code);
                }
            }
            let passed = first.len() + usize::from(code.is_none());
            assert_eq!(origin.requests().len(), before + passed, "{what}");
        }
    }
}

#[test]
fn p6_absolute_form_and_host_are_one() {
    let AgreementScene { world, plain, .. } = start_scene();
    let port = plain.port();
    for (what, target, host, code) in [
        ("alike", format!("http://a.test:{port}/x"), format!("a.test:{port}"), None),
        ("scheme in capitals", format!("HTTP://a.test:{port}/x"), format!("a.test:{port}"), None),
        ("port left out", format!("http://a.test:{port}/x"), "a.test".into(), None),
        (
            "another host",
            format!("http://a.test:{port}/x"),
            format!("b.test:{port}"),
            Some((403, "names_disagree")),
        ),
        (
            "another host in the target",
            format!("http://b.test:{port}/x"),
            format!("a.test:{port}"),
            Some((403, "names_disagree")),
        ),
        ("another port", format!("http://a.test:{port}/x"), "a.test:1".into(), Some((403, "names_disagree"))),
        (
            "a host that is not permitted",
            format!("http://c.test:{port}/x"),
            format!("c.test:{port}"),
            Some((403, "not_listed")),
        ),
        (
            "userinfo",
            format!("http://b.test@a.test:{port}/x"),
            format!("a.test:{port}"),
            Some((400, "bad_name")),
        ),
        (
            "userinfo as host",
            format!("http://a.test:{port}@b.test/x"),
            format!("a.test:{port}"),
            Some((400, "bad_name")),
        ),
        (
            "backslash",
            format!("http://a.test:{port}\\@b.test/x"),
            format!("a.test:{port}"),
            Some((400, "bad_name")),
        ),
        (
            "two slashes too few",
            format!("http:a.test:{port}/x"),
            format!("a.test:{port}"),
            Some((400, "bad_request")),
        ),
        (
            "a slash too many",
            format!("http:///a.test:{port}/x"),
            format!("a.test:{port}"),
            Some((400, "bad_name")),
        ),
        ("https", format!("https://a.test:{port}/x"), format!("a.test:{port}"), Some((400, "bad_request"))),
        ("ftp", format!("ftp://a.test:{port}/x"), format!("a.test:{port}"), Some((400, "bad_request"))),
        ("origin form", "/x".into(), format!("a.test:{port}"), Some((400, "bad_request"))),
        (
            "host in fragment",
            format!("http://a.test:{port}#@b.test/"),
            format!("a.test:{port}"),
            Some((400, "bad_request")),
        ),
        ("host in query", format!("http://a.test:{port}?@b.test/x"), format!("a.test:{port}"), None),
    ] {
        let before = plain.requests().len();
        let mut wire = world.connect();
        wire.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        let answer = wire.read_response("GET").unwrap_or_else(|| panic!("{what}: no answer"));
        match code {
            None => {
                assert_eq!(answer.status, 200, "{what}: {}", answer.text());
                let requests = plain.requests().split_off(before);
                let [request] = &requests[..] else { panic!("{what}: {requests:?}") };
                assert!(request.target.starts_with('/'), "{what}: {request:?}");
                let said = request.field("host").unwrap();
                assert_eq!(said.to_ascii_lowercase(), format!("a.test:{port}"), "{what}");
            }
            Some((status, code)) => {
                world.assert_refused(what, &answer, status, code);
                assert_eq!(plain.requests().len(), before, "{what}");
            }
        }
    }
}

/// A proxy's connection may go from host to host, each request decided by itself.
#[test]
fn p3_a_forward_connection_is_decided_request_by_request() {
    let AgreementScene { world, plain, .. } = start_scene();
    let port = plain.port();
    let mut wire = world.connect();
    for (host, refused) in
        [("a.test", None), ("b.test", None), ("c.test", Some("not_listed")), ("a.test", None)]
    {
        let before = plain.requests().len();
        wire.send(format!("GET http://{host}:{port}/x HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"));
        let answer = wire.read_response("GET").unwrap();
        match refused {
            None => assert_eq!(answer.status, 200, "{host}: {}", answer.text()),
            Some(code) => world.assert_refused(host, &answer, 403, code),
        }
        let passed = usize::from(refused.is_none());
        assert_eq!(plain.requests().len(), before + passed, "{host}");
    }
}

#[test]
fn p6_sni_is_the_host_of_connect() {
    let AgreementScene { world, tls, .. } = start_scene();
    let config = client_config(&world, "http/1.1");
    for (connect, sni, passes) in [
        ("a.test", "a.test", true),
        ("A.TEST", "a.test", true),
        ("a.test", "b.test", false),
        ("b.test", "a.test", false),
        ("a.test", "c.test", false),
    ] {
        let before = tls.connections().len();
        let since = world.record_count();
        let shaken = tls_handshake(world.open_tunnel(connect, tls.port()), &config, sni);
        assert_eq!(shaken.is_ok(), passes, "{connect} and {sni}");
        if !passes {
            world.wait_for_record(since, sni, |record| record["status_detail"] == "names_disagree");
            assert_eq!(tls.connections().len(), before, "{connect} and {sni}");
        }
    }
}

/// Honest clients reuse an HTTP/2 connection for every name its certificate covers: 421 sends them away.
#[test]
fn p6_an_http2_request_for_another_host_is_misdirected() {
    let AgreementScene { world, tls, .. } = start_scene();
    let config = client_config(&world, "h2");
    let port = tls.port();
    for (what, authority, host, status) in [
        ("alike", format!("a.test:{port}"), None, 200),
        ("other spelling", format!("A.test:{port}"), None, 200),
        ("another host", format!("b.test:{port}"), None, 421),
        ("a host that is not permitted", format!("c.test:{port}"), None, 421),
        ("another port", "a.test:1".to_owned(), None, 421),
        ("an address", format!("127.0.0.1:{port}"), None, 421),
        ("Host alike", format!("a.test:{port}"), Some(format!("a.test:{port}")), 200),
    ] {
        let before = tls.requests().len();
        let wire = tls_handshake(world.open_tunnel("a.test", port), &config, "a.test").unwrap();
        let mut connection = http2::Http2Client::new(wire);
        let mut fields = http2::request_fields("GET", "https", &authority, "/x");
        fields.extend(host.as_deref().map(|host| ("host".to_owned(), host.as_bytes().to_vec())));
        connection.send_headers(1, &fields, true);
        assert_eq!(connection.wait_for_status(1), Some(status), "{what}");
        assert_eq!(tls.requests().len(), before + usize::from(status == 200), "{what}");
        // The connection is still good for its own host.
        connection.send_headers(
            3,
            &http2::request_fields("GET", "https", &format!("a.test:{port}"), "/y"),
            true,
        );
        assert_eq!(connection.wait_for_status(3), Some(200), "{what}");
        if status == 421 {
            world.wait_for_record(0, what, |record| record["status_detail"] == "misdirected");
        }
    }
}
