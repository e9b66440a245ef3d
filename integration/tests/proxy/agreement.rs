//! All names an attempt shows are one host, or it ends (P6); and what names no host goes nowhere.

use super::client;
use super::scene::{CurlResult, ProxyScene, ProxySetup};

const PROXY_URL: &str = "http://10.77.0.1:3128";

/// Which names disagree, what curl is told, what it must see, and the code.
type AgreementRow<'a> = (&'a str, &'a [&'a str], &'a dyn Fn(&CurlResult) -> bool, &'a str);

fn assert_nothing_left(scene: &ProxyScene) {
    assert_eq!(scene.origin.requests().len(), 0);
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
}

#[test]
fn p6_names_that_disagree_end_the_attempt_before_anything_leaves() {
    let scene = ProxyScene::new();
    let asked: [AgreementRow<'_>; 8] = [
        (
            "CONNECT and SNI",
            &[
                "-x",
                PROXY_URL,
                "--connect-to",
                "other.example:443:open.example:443",
                "https://other.example/",
            ],
            &|got| got.connect == 200 && got.exit == 35,
            "names_disagree",
        ),
        (
            "SNI and Host",
            &["--http1.1", "-H", "Host: other.example", "https://open.example/"],
            &|got| got.status == 403,
            "names_disagree",
        ),
        (
            "SNI and :authority",
            &["--http2", "-H", "Host: other.example", "https://open.example/"],
            &|got| got.status == 421,
            "misdirected",
        ),
        (
            "CONNECT, SNI and Host",
            &["-x", PROXY_URL, "--http1.1", "-H", "Host: other.example", "https://open.example/"],
            &|got| got.connect == 200 && got.status == 403,
            "names_disagree",
        ),
        (
            "CONNECT and the Host inside it",
            &["-x", PROXY_URL, "-p", "-H", "Host: other.example", "http://open.example/"],
            &|got| got.status == 403 || got.exit != 0,
            "names_disagree",
        ),
        (
            "target and Host",
            &["-x", PROXY_URL, "-H", "Host: other.example", "http://open.example/"],
            &|got| got.status == 403,
            "names_disagree",
        ),
        (
            "a port of its own in Host",
            &["-H", "Host: open.example:8080", "http://open.example/"],
            &|got| got.status == 403,
            "names_disagree",
        ),
        (
            "a port of its own in :authority",
            &["--http2", "-H", "Host: open.example:8443", "https://open.example/"],
            &|got| got.status == 421,
            "misdirected",
        ),
    ];
    for (what, args, right, code) in asked {
        let before = scene.records().len();
        let got = scene.curl(args);
        assert!(right(&got), "{what}: {got:?}");
        scene.wait_for_record(what, |record| {
            record["status_detail"] == code && record["metadata"]["sequence"].as_u64() > Some(before as u64)
        });
    }
    assert_nothing_left(&scene);
}

#[test]
fn p6_a_name_is_the_same_however_it_is_written() {
    let scene = ProxyScene::new();
    for args in [
        &["--http1.1", "-H", "Host: OPEN.example.", "https://open.example/"][..],
        &["--http1.1", "-H", "Host: open.example:443", "https://open.example/"],
        &["--http2", "-H", "Host: Open.Example", "https://open.example/"],
        &["https://OPEN.EXAMPLE./"],
        &["-x", PROXY_URL, "https://OPEN.example/"],
    ] {
        let got = scene.curl(args);
        assert_eq!(got.status, 200, "{args:?}: {got:?}");
    }
    assert_eq!(scene.origin.requests().len(), 5);
    for request in scene.origin.requests() {
        assert_eq!(request.sni.as_deref(), Some("open.example"));
    }
}

#[test]
fn p6_each_request_of_a_connection_is_judged_by_itself() {
    let scene = ProxyScene::new();
    let mut tls =
        client::connect_tls(&scene, 0, "93.184.216.34:443", &client::client_config(&scene), "open.example");
    client::send_text(&mut tls, "GET /first HTTP/1.1\r\nHost: open.example\r\n\r\n");
    assert!(client::read_head(&mut tls).starts_with("HTTP/1.1 200 "));
    client::send_text(&mut tls, "GET /second HTTP/1.1\r\nHost: other.example\r\n\r\n");
    assert!(client::read_head(&mut tls).starts_with("HTTP/1.1 403 "));
    scene.wait_for_record("the second request", |record| {
        record["http_request"]["url"]["path"] == "/second" && record["status_detail"] == "names_disagree"
    });
    let lines: Vec<_> = scene.origin.requests().into_iter().map(|request| request.line).collect();
    assert_eq!(lines, ["GET /first HTTP/1.1"]);
}

#[test]
fn p6_a_hello_without_a_name_or_with_an_address_for_one_goes_nowhere() {
    let scene = ProxyScene::new();
    for (args, code) in [
        (&["-noservername"][..], "name_missing"),
        (&["-servername", "93.184.216.34"], "address_as_sni"),
        (&["-servername", "open.example\n"], "bad_handshake"),
    ] {
        let mut command = scene.command_in(0, "openssl");
        command.args(["s_client", "-connect", "93.184.216.34:443"]).args(args);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{code}");
        scene.wait_for_record(code, |record| record["status_detail"] == code);
    }
    assert_nothing_left(&scene);
}

#[test]
fn plain_http_on_the_tls_port_and_tls_on_the_plain_one_are_refused() {
    let scene = ProxyScene::new();
    assert_eq!(scene.curl(&["http://open.example:443/"]).status, 403);
    assert_eq!(scene.curl(&["https://open.example:80/"]).exit, 35);
    let wrong = |record: &&serde_json::Value| record["status_detail"] == "wrong_protocol";
    assert_eq!(scene.records().iter().filter(wrong).count(), 2);
    assert_nothing_left(&scene);
}

// proves: allow.ech
#[test]
fn p6_encrypted_hellos_are_refused_on_a_tunnel_and_ignored_where_we_look_inside() {
    let scene = ProxyScene::with_setup(ProxySetup::default());
    let grease = client::ech_grease_config(&scene);
    let mut seen = client::connect_tls(&scene, 0, "93.184.216.34:443", &grease, "open.example");
    client::send_text(&mut seen, "GET /seen HTTP/1.1\r\nHost: open.example\r\n\r\n");
    assert!(client::read_head(&mut seen).starts_with("HTTP/1.1 200 "));
    let refused = client::try_connect_tls(&scene, 0, "93.184.216.36:443", &grease, "tunnel.example");
    assert!(refused.is_err());
    scene.wait_for_refusal("ech_hidden_name", "tunnel.example");
    let mut passed = client::connect_tls(&scene, 0, "93.184.216.37:443", &grease, "tolerant.example");
    client::send_text(&mut passed, "GET /passed HTTP/1.1\r\nHost: tolerant.example\r\n\r\n");
    assert!(client::read_head(&mut passed).starts_with("HTTP/1.1 200 "));
    let lines: Vec<_> = scene.origin.requests().into_iter().map(|request| request.line).collect();
    assert_eq!(lines, ["GET /seen HTTP/1.1", "GET /passed HTTP/1.1"]);
}
