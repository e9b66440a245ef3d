//! Every way to the program, over IPv4 and IPv6: what is allowed arrives, what is not never leaves, and where
//! the sandbox aimed is recorded and not used (P1, P3, P4, P5).

use std::io::{ErrorKind, Read};
use std::net::IpAddr;

use super::client;
use super::net::{FirewallMode, sandbox_addresses};
use super::scene::{ProxyScene, ProxySetup, record_host};

/// How a client comes to the program.
#[derive(Clone, Copy, Debug)]
enum ArrivalMode {
    Connect,
    Redirect,
    Socks,
    Tproxy,
}

const ARRIVAL_MODES: [ArrivalMode; 4] =
    [ArrivalMode::Redirect, ArrivalMode::Tproxy, ArrivalMode::Connect, ArrivalMode::Socks];

impl ArrivalMode {
    /// What curl is told; the firewall is set where it matters.
    fn curl_arguments(self, scene: &ProxyScene, family: &str) -> Vec<String> {
        let [four, _, six, _] = sandbox_addresses(0);
        let gateway = if family == "-4" { four } else { format!("[{six}]") };
        match self {
            ArrivalMode::Redirect => scene.net.set_firewall(FirewallMode::Redirect),
            ArrivalMode::Tproxy => scene.net.set_firewall(FirewallMode::Tproxy),
            ArrivalMode::Connect | ArrivalMode::Socks => {}
        }
        match self {
            ArrivalMode::Redirect | ArrivalMode::Tproxy => vec![family.to_owned()],
            ArrivalMode::Connect => vec!["-x".to_owned(), format!("http://{gateway}:3128")],
            ArrivalMode::Socks => vec!["-x".to_owned(), format!("socks5h://{gateway}:3128")],
        }
    }
}

fn join_arguments<'a>(before: &'a [String], after: &[&'a str]) -> Vec<&'a str> {
    before.iter().map(String::as_str).chain(after.iter().copied()).collect()
}

// proves: listener.mode, listener.bind, dns.upstreams
#[test]
fn p3_what_a_rule_names_arrives_by_every_way_and_is_recorded() {
    let scene = ProxyScene::new();
    for way in ARRIVAL_MODES {
        for family in ["-4", "-6"] {
            let told = way.curl_arguments(&scene, family);
            for (scheme, version) in [("https", "2"), ("https", "1.1"), ("http", "1.1")] {
                let path = format!("/{way:?}{family}-{scheme}-{version}");
                let asked = if version == "2" { "--http2" } else { "--http1.1" };
                let url = format!("{scheme}://open.example{path}");
                let got = scene.curl(&join_arguments(&told, &[asked, &url]));
                assert_eq!((got.status, got.exit), (200, 0), "{path}: {got:?}");
                assert_eq!(got.version, version, "{path}");
                let arrived = scene.origin.requests();
                let request = arrived.iter().find(|request| request.line.contains(&path));
                let request = request.unwrap_or_else(|| panic!("{path} did not arrive"));
                assert_eq!(request.field("host"), Some("open.example"), "{path}");
                let sni = (scheme == "https").then_some("open.example");
                assert_eq!(request.sni.as_deref(), sni, "{path}");
                for stage in ["decision", "outcome"] {
                    let record = scene.wait_for_record(&path, |record| {
                        record["http_request"]["url"]["path"] == path.as_str()
                            && record["unmapped"]["sandbar"]["stage"] == stage
                    });
                    assert_eq!(record["actor"]["app_uid"], "box-0", "{path}");
                    assert_eq!(record["firewall_rule"]["name"], "web", "{path}");
                    let code = if stage == "outcome" { 200.into() } else { serde_json::Value::Null };
                    assert_eq!(record["http_response"]["code"], code, "{path}");
                }
            }
        }
    }
}

#[test]
fn an_origin_that_has_only_ipv6_is_reached_from_a_sandbox_that_uses_ipv4() {
    let scene = ProxyScene::new();
    let got = scene.curl(&["-4", "--resolve", "six.example:443:1.2.3.4", "https://six.example/"]);
    assert_eq!((got.status, got.text().as_str()), (200, "hello from [2606:2800::66]:443\n"));
}

#[test]
fn p5_what_no_rule_names_never_leaves_not_even_as_a_question() {
    let scene = ProxyScene::new();
    for way in ARRIVAL_MODES {
        for family in ["-4", "-6"] {
            let told = way.curl_arguments(&scene, family);
            for scheme in ["https", "http"] {
                let address = if family == "-4" { "93.184.216.99" } else { "[2606:2800::99]" };
                let port = if scheme == "https" { 443 } else { 80 };
                let lie = format!("denied.example:{port}:{address}");
                let url = format!("{scheme}://denied.example/{way:?}{family}");
                let got = scene.curl(&join_arguments(&told, &["--resolve", &lie, &url]));
                assert_ne!((got.status, got.exit), (200, 0), "{url}");
                let told_why = match (way, scheme) {
                    (ArrivalMode::Redirect | ArrivalMode::Tproxy, "http") => got.status == 403,
                    (ArrivalMode::Connect, "http") => got.status == 403,
                    (ArrivalMode::Connect, _) => got.connect == 403,
                    (ArrivalMode::Redirect | ArrivalMode::Tproxy, _) => got.said.contains("access denied"),
                    (ArrivalMode::Socks, _) => got.exit == 97,
                };
                assert!(told_why, "{url}: {got:?}");
            }
        }
    }
    let dig = ["+short", "+time=5", "+tries=1", "@10.77.0.1", "denied.example"];
    let answer = scene.command_in(0, "dig").args(dig).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&answer.stdout).trim(), "");
    assert_eq!(scene.origin.requests().len(), 0);
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
    assert!(!scene.names.queried_names().iter().any(|name| name.contains("denied")));
    let records = scene.records();
    let denied = |record: &&serde_json::Value| {
        record_host(record) == "denied.example" && record["status_detail"] == "not_listed"
    };
    assert_eq!(records.iter().filter(denied).count(), 16 + 1, "sixteen tries and a question");
}

#[test]
fn what_leaves_by_another_way_than_the_program_is_dropped() {
    let scene = ProxyScene::new();
    let dig = ["+time=1", "+tries=1", "-p", "5353", "@93.184.216.34", "open.example"];
    assert!(!scene.command_in(0, "dig").args(dig).output().unwrap().status.success());
    let ping = scene.command_in(0, "ping").args(["-c", "1", "-W", "1", "93.184.216.34"]).output();
    assert!(ping.is_err() || !ping.unwrap().status.success());
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
    // The judge sees what leaves: the gateway itself may.
    let sent = scene.net.gateway.enter(|| std::net::TcpStream::connect(("93.184.216.34", 80)));
    assert!(sent.is_ok());
    assert_eq!(scene.net.arrivals().len(), 1);
}

#[test]
fn p4_where_the_sandbox_aimed_is_recorded_and_never_used() {
    let scene = ProxyScene::new();
    for firewall in [FirewallMode::Redirect, FirewallMode::Tproxy] {
        scene.net.set_firewall(firewall);
        for aimed in [
            "93.184.216.99",
            "169.254.169.254",
            "10.78.0.2",
            "10.78.0.1",
            "192.168.1.1",
            "2606:2800::99",
            "fd78::2",
            "64:ff9b::a9fe:a9fe",
        ] {
            let address: IpAddr = aimed.parse().unwrap();
            let bracketed = if address.is_ipv6() { format!("[{aimed}]") } else { aimed.to_owned() };
            for (scheme, port) in [("https", 443), ("http", 80)] {
                let path = format!("/{firewall:?}/{}", aimed.replace(':', "-"));
                let lie = format!("open.example:{port}:{bracketed}");
                let url = format!("{scheme}://open.example{path}");
                let got = scene.curl(&["--resolve", &lie, &url]);
                assert_eq!(got.status, 200, "{scheme} {path}: {got:?}");
                let record = scene.wait_for_record(&url, |record| {
                    record["http_request"]["url"]["path"] == path.as_str()
                        && record["http_request"]["url"]["scheme"] == scheme
                        && record["unmapped"]["sandbar"]["stage"] == "decision"
                });
                let recorded = record["dst_endpoint"]["ip"].as_str().unwrap();
                assert_eq!(recorded.parse::<IpAddr>().unwrap(), address, "{path}");
            }
        }
    }
    let own: Vec<IpAddr> = ["93.184.216.34", "2606:2800::34"].map(|address| address.parse().unwrap()).into();
    for (protocol, address, port) in scene.net.arrivals() {
        assert!(own.contains(&address), "{protocol} {address}:{port} was dialled");
    }
    for request in scene.origin.requests() {
        assert!(own.contains(&request.at.ip()), "{request:?}");
    }
}

#[test]
fn an_origin_under_a_certificate_nobody_believes_gets_no_request() {
    let scene = ProxyScene::new();
    let got = scene.curl(&["https://open.example:9443/"]);
    assert_eq!(got.status, 502, "{got:?}");
    assert!(got.text().contains("upstream_certificate"), "{got:?}");
    scene.wait_for_refusal("upstream_certificate", "open.example");
    assert_eq!(scene.origin.requests().len(), 0);
}

// proves: upstream.mark
#[test]
fn connections_to_origins_carry_the_mark() {
    let mut scene = ProxyScene::prepare(ProxySetup::default());
    let text = std::fs::read_to_string(scene.config_path()).unwrap();
    std::fs::write(scene.config_path(), text.replace("[upstream]\n", "[upstream]\nmark = 119\n")).unwrap();
    scene.start();
    scene.net.gateway.nft(
        "table inet marks { chain leaving { type filter hook output priority 0;\n\
         oifname != \"lo\" ip daddr 93.184.216.0/24 tcp dport { 80, 443 } meta mark != 119 drop\n\
         ip6 daddr 2606:2800::/32 tcp dport { 80, 443 } meta mark != 119 drop\n}\n}\n",
    );
    for url in ["http://open.example/", "https://open.example/", "https://tunnel.example/"] {
        let got = scene.curl(&["-k", url]); // a tunnel shows the origin's own certificate
        assert_eq!(got.status, 200, "{url}: {got:?}");
    }
    let unmarked = scene.net.gateway.enter(|| {
        let address = "93.184.216.34:80".parse().unwrap();
        std::net::TcpStream::connect_timeout(&address, std::time::Duration::from_secs(1))
    });
    assert!(unmarked.is_err(), "without the mark nothing leaves");
}

#[test]
fn p1_a_port_that_no_rule_names_is_refused() {
    let scene = ProxyScene::new();
    let got = scene.curl(&["http://open.example:8080/"]);
    assert_eq!(got.status, 403, "{got:?}");
    scene.wait_for_refusal("port_not_listed", "open.example");
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
}

/// A client that waits for the server to speak, as SSH does, learns at once that no rule opens the port. Waiting for
/// its first bytes would take longer here than the test lets it.
#[test]
fn p18_a_silent_connection_to_a_port_that_no_rule_names_is_refused_at_once() {
    let scene = ProxyScene::with_setup(ProxySetup {
        limits: "first_bytes_seconds = 120".to_owned(),
        ..ProxySetup::default()
    });
    for firewall in [FirewallMode::Redirect, FirewallMode::Tproxy] {
        scene.net.set_firewall(firewall);
        for port in [22, 4444] {
            let mut socket = client::connect_tcp(&scene, 0, &format!("93.184.216.34:{port}"));
            let mut said = Vec::new();
            let ended = socket.read_to_end(&mut said).map_err(|error| error.kind());
            assert!(
                matches!(ended, Ok(0) | Err(ErrorKind::ConnectionReset)),
                "{firewall:?} {port}: {ended:?}"
            );
            scene.wait_for_record(&format!("{firewall:?} {port}"), |record| {
                record["status_detail"] == "port_not_listed" && record["dst_endpoint"]["port"] == port
            });
        }
    }
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
}
