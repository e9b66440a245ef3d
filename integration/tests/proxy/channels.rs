//! The path names the sandbox (P2): every kind of channel, and what comes by none.

use super::client::{client_config, connect_tls, read_head, send_text};
use super::net::FirewallMode;
use super::reload::{connect_echo, round_trip, run_reload};
use super::scene::{POLICY, ProxyScene, ProxySetup};

/// Two sandboxes with a policy each: the first may reach one host, the second another.
fn two_sandboxes(keys: [&str; 2], listeners: &str) -> ProxySetup {
    let sandbox = |id: &str, key: &str| {
        format!("[[sandbox]]\nid = \"{id}\"\nbase = \"system\"\npolicies = [\"{id}\"]\n{key}\n")
    };
    let identities = sandbox("box-0", keys[0]) + &sandbox("box-1", keys[1]);
    ProxySetup { sandboxes: 2, identities, listeners: listeners.to_owned(), ..ProxySetup::default() }
}

fn listener_table(mode: &str, bind: &str, whose: &str) -> String {
    format!("[[listener]]\nmode = \"{mode}\"\nbind = [{bind}]\n{whose}\n")
}

/// Everything but the program, the policies in their place.
fn prepare_scene(setup: ProxySetup) -> ProxyScene {
    let scene = ProxyScene::prepare(setup);
    for (id, host) in [("box-0", "open.example"), ("box-1", "other.example")] {
        let policy = format!(
            "name = \"{id}\"\n[[allow]]\nname = \"only {id}\"\nhosts = [\"{host}\"]\nports = [80, 443]\n"
        );
        std::fs::write(scene.dir.path().join(format!("policies/{id}.toml")), policy).unwrap();
    }
    scene
}

fn start_scene(setup: ProxySetup) -> ProxyScene {
    let mut scene = prepare_scene(setup);
    scene.start();
    scene
}

/// Each sandbox reaches its own host and not the other's, and the records name the channel.
fn assert_attribution(scene: &ProxyScene, kind: &str, details: [&str; 2], ask: impl Fn(usize, &str) -> u16) {
    for (sandbox, detail) in details.iter().enumerate() {
        let (own, foreign) = match sandbox {
            0 => ("open.example", "other.example"),
            _ => ("other.example", "open.example"),
        };
        assert_eq!(ask(sandbox, own), 200, "{kind}: box-{sandbox} to {own}");
        assert_eq!(ask(sandbox, foreign), 403, "{kind}: box-{sandbox} to {foreign}");
        for (host, code) in [(own, "allowed"), (foreign, "not_listed")] {
            scene.wait_for_record(&format!("{kind} {detail} {host}"), |record| {
                record["status_detail"] == code
                    && super::scene::record_host(record) == host
                    && record["actor"]["app_uid"] == format!("box-{sandbox}").as_str()
                    && record["unmapped"]["sandbar"]["channel"]["kind"] == kind
                    && record["unmapped"]["sandbar"]["channel"]["detail"] == *detail
            });
        }
    }
    assert_eq!(scene.origin.requests().len(), 2);
}

/// A plain request whose packets go to an address of nobody's.
fn curl_plain(scene: &ProxyScene, sandbox: usize, host: &str) -> u16 {
    let lie = format!("{host}:80:198.51.100.7");
    scene.curl_in(sandbox, &["--resolve", &lie, &format!("http://{host}/")]).status
}

const REDIRECT_BINDS: &str = r#""0.0.0.0:15001", "[::]:15001""#;
const TPROXY_BINDS: &str = r#""0.0.0.0:15002", "[::]:15002""#;

// proves: listener.mode, listener.bind, listener.identify, sandbox.interface
#[test]
fn p2_two_sandboxes_behind_one_listener_are_told_apart_by_interface() {
    let keys = ["interface = \"sandbox0\"", "interface = \"sandbox1\""];
    for (mode, bind, firewall) in
        [("redirect", REDIRECT_BINDS, FirewallMode::Redirect), ("tproxy", TPROXY_BINDS, FirewallMode::Tproxy)]
    {
        let scene = start_scene(two_sandboxes(keys, &listener_table(mode, bind, "identify = \"interface\"")));
        scene.net.set_firewall(firewall);
        assert_attribution(&scene, "interface", ["sandbox0", "sandbox1"], |at, host| {
            curl_plain(&scene, at, host)
        });
    }
}

// proves: listener.identify, sandbox.mark
#[test]
fn p2_two_sandboxes_behind_one_listener_are_told_apart_by_firewall_mark() {
    let listeners = listener_table("redirect", REDIRECT_BINDS, "identify = \"mark\"");
    let mut scene = prepare_scene(two_sandboxes(["mark = 0xa0", "mark = 0xa1"], &listeners));
    let (status, said) = scene.expect_start_refused();
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("sysctl -w net.ipv4.tcp_fwmark_accept=1"), "{said}");
    scene.net.gateway.sysctl("net.ipv4.tcp_fwmark_accept", "1");
    scene.start();
    scene.net.gateway.nft(
        "table inet marks { chain marking { type filter hook prerouting priority mangle;\n\
         iifname \"sandbox0\" meta mark set 0xa0\niifname \"sandbox1\" meta mark set 0xa1\n}\n}\n",
    );
    assert_attribution(&scene, "mark", ["0xa0", "0xa1"], |at, host| curl_plain(&scene, at, host));
}

// proves: listener.identify, sandbox.unix_uid
#[test]
fn p2_users_of_a_unix_socket_are_told_apart_by_the_kernel() {
    let listeners = listener_table("explicit", "\"unix:proxy.sock\"", "identify = \"unix\"");
    let scene = start_scene(two_sandboxes(["unix_uid = 4000", "unix_uid = 4001"], &listeners));
    let ask = |user: usize, host: &str| {
        let uid = format!("--reuid={}", 4000 + user);
        let socket = scene.dir.path().join("proxy.sock");
        let proxy = format!("socks5h://localhost{}", socket.display());
        let mut command = scene.command_in(0, "setpriv");
        command.args([&uid, "--clear-groups", "curl", "-sS", "-o", "/dev/null"]);
        command.args(["--max-time", "60", "-w", "%{http_code}", "-x", &proxy]);
        let output = command.arg(format!("http://{host}/")).output().unwrap();
        match String::from_utf8_lossy(&output.stdout).trim() {
            "000" if output.status.code() == Some(97) => 403, // said in SOCKS
            status => status.parse().unwrap(),
        }
    };
    assert_attribution(&scene, "unix", ["4000", "4001"], ask);
    assert_ne!(ask(1000, "open.example"), 200, "a user who is nobody's");
    scene.wait_for_record("a user who is nobody's", |record| {
        record["status_detail"] == "unknown_channel"
            && record["unmapped"]["sandbar"]["channel"]["detail"] == "5000"
    });
    assert_eq!(scene.origin.requests().len(), 2);
}

// proves: listener.sandbox
#[test]
fn p2_a_dedicated_listener_needs_no_more() {
    let listeners = listener_table("redirect", REDIRECT_BINDS, "sandbox = \"box-1\"");
    let scene = start_scene(two_sandboxes(["", ""], &listeners));
    assert_eq!(curl_plain(&scene, 0, "other.example"), 200);
    assert_eq!(curl_plain(&scene, 0, "open.example"), 403);
    scene.wait_for_record("the dedicated one", |record| {
        record["actor"]["app_uid"] == "box-1"
            && record["unmapped"]["sandbar"]["channel"]["kind"] == "dedicated"
            && record["http_request"]["url"]["hostname"] == "other.example"
    });
}

// proves: listener.identify, sandbox.source_address, sandbox.dangerously_trust_source_address
#[test]
fn p2_source_addresses_are_believed_only_where_that_is_said_to_be_dangerous() {
    let listeners = listener_table("redirect", REDIRECT_BINDS, "identify = \"source-address\"");
    let keys = ["source_address = \"10.77.0.2/32\"", "source_address = \"10.77.1.2/32\""];
    let (status, said) = prepare_scene(two_sandboxes(keys, &listeners)).expect_start_refused();
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("dangerously_trust_source_address"), "{said}");
    let keys = keys.map(|key| format!("{key}\ndangerously_trust_source_address = true"));
    let scene = start_scene(two_sandboxes([&keys[0], &keys[1]], &listeners));
    assert_attribution(&scene, "source_address", ["10.77.0.2", "10.77.1.2"], |at, host| {
        curl_plain(&scene, at, host)
    });
}

#[test]
fn p2_what_comes_by_a_path_of_nobodys_is_refused_and_recorded() {
    let identities =
        "[[sandbox]]\nid = \"box-0\"\nbase = \"system\"\npolicies = [\"p\"]\ninterface = \"sandbox0\"\n";
    let scene = ProxyScene::with_setup(ProxySetup {
        sandboxes: 2,
        identities: identities.to_owned(),
        policy: POLICY.to_owned(),
        ..ProxySetup::default()
    });
    for firewall in [FirewallMode::Redirect, FirewallMode::Tproxy] {
        scene.net.set_firewall(firewall);
        assert_eq!(curl_plain(&scene, 1, "open.example"), 0, "{firewall:?}");
    }
    let proxy = ["-x", "http://10.77.1.1:3128", "http://open.example/"];
    assert_eq!(scene.curl_in(1, &proxy).status, 403, "and told so");
    let dig = ["+short", "+time=5", "+tries=1", "@10.77.1.1", "open.example"];
    let answer = scene.command_in(1, "dig").args(dig).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&answer.stdout).trim(), "");
    let unknown = |record: &&serde_json::Value| {
        record["status_detail"] == "unknown_channel"
            && record["class_uid"] == 4001
            && record["unmapped"]["sandbar"]["channel"]["detail"] == "sandbox1"
    };
    let records = scene.records();
    let tried: Vec<_> =
        records.iter().filter(unknown).map(|record| &record["unmapped"]["sandbar"]["attempted"]).collect();
    println!("tried: {tried:?}");
    // Where a transparent connection was going, and what a client of the proxy asks for.
    let [redirected, tproxied, explicit] = tried[..] else { panic!("{tried:?}") };
    for transparent in [redirected, tproxied] {
        assert!(transparent.as_str().is_some_and(|to| to.ends_with(":80")), "{tried:?}");
    }
    assert_eq!(explicit, "GET http://open.example /");
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
    assert_eq!(scene.names.queried_names(), Vec::<String>::new());
}

/// A reload exchanges the interfaces of two sandboxes that may do the same. What is open on an interface is the first
/// one's no longer, and DNS, tunnels and requests on it are the other's.
#[test]
fn p2_p10_exchanged_interfaces_take_open_connections_along() {
    let scene = ProxyScene::with_setup(ProxySetup { sandboxes: 2, ..ProxySetup::default() });
    let mut tunnel = connect_echo(&scene, "db.example");
    assert!(round_trip(&mut tunnel, b"hello"));
    let mut web = connect_tls(&scene, 0, "93.184.216.34:443", &client_config(&scene), "open.example");
    let mut ask = || {
        send_text(&mut web, "GET / HTTP/1.1\r\nHost: open.example\r\n\r\n");
        read_head(&mut web)
    };
    assert!(ask().starts_with("HTTP/1.1 200"));
    let arrived = scene.origin.requests().len();
    let text = std::fs::read_to_string(scene.config_path()).unwrap();
    let text = text
        .replace("\"sandbox0\"", "EXCHANGED")
        .replace("\"sandbox1\"", "\"sandbox0\"")
        .replace("EXCHANGED", "\"sandbox1\"");
    std::fs::write(scene.config_path(), text).unwrap();
    let (status, said) = run_reload(&scene, &["--wait"]);
    assert!(status == Some(0) && said.contains("generation 2"), "{said}");
    assert!(!round_trip(&mut tunnel, b"still here?"), "the tunnel is cut");
    let refused = ask();
    assert!(refused.starts_with("HTTP/1.1 403") && refused.contains("identity_changed"), "{refused}");
    assert_eq!(scene.origin.requests().len(), arrived);
    assert!(
        round_trip(&mut connect_echo(&scene, "db.example"), b"again"),
        "a new one is the other sandbox's"
    );
    let changed = |record: &serde_json::Value, owner: &str| {
        record["status_detail"] == "identity_changed" && record["actor"]["app_uid"] == owner
    };
    scene.wait_for_record("the tunnel that was cut", |record| {
        changed(record, "box-0") && record["unmapped"]["sandbar"]["ending"] == "revoked"
    });
    scene.wait_for_record("the request that was refused", |record| {
        changed(record, "box-1") && record["unmapped"]["sandbar"]["stage"] == "denied"
    });
    for record in scene.records() {
        let sandbar = &record["unmapped"]["sandbar"];
        if sandbar["channel"]["detail"] == "sandbox0" && sandbar["stage"] != "outcome" {
            let owner = if record["policy"]["version"] == "1" { "box-0" } else { "box-1" };
            assert_eq!(record["actor"]["app_uid"], owner, "{record}");
        }
    }
}
