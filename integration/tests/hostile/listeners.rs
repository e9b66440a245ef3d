//! A reload opens, changes and closes listeners (P2, P9, P10), and says which settings wait for a restart.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use serde_json::Value;

use crate::files::ask_admin;
use crate::instance::{DEADLINE, InstanceSetup, SandbarInstance, record_stage, wait_until};
use crate::origin::{OriginReply, ScriptedOrigin};
use crate::wire::RawConnection;

/// Everything that follows the first sandbox and its listener stands behind this line.
const MARK: &str = "# listeners\n";

/// An origin reached by raw TCP and one reached by plain requests.
struct ListenerScene {
    world: SandbarInstance,
    raw: ScriptedOrigin,
    web: ScriptedOrigin,
}

impl ListenerScene {
    fn start(limits: &str) -> Self {
        let (raw, web) = (ScriptedOrigin::start_plain(), ScriptedOrigin::start_plain());
        raw.set_reply(OriginReply::Echo);
        let mut setup = InstanceSetup::with_hosts(&[("web.test", web.port())]).with_limits(limits);
        setup.hosts.push("raw.test");
        setup.policy += &format!(
            "[[allow]]\nname = \"raw\"\nhosts = [\"raw.test\"]\ntcp = [{}]\nresolves_to = [\"127.0.0.0/8\"]\n",
            raw.port()
        );
        setup.tables = format!("[[sandbox]]\nid = \"two\"\nbase = \"system\"\npolicies = [\"p\"]\n{MARK}");
        ListenerScene { world: setup.start(), raw, web }
    }

    /// Replaces the listeners behind the mark, and waits until the file is in force.
    fn set_listeners(&self, tables: &str) -> String {
        self.world.reconfigure(|text| {
            let (before, _) = text.split_once(MARK).unwrap();
            format!("{before}{MARK}{tables}")
        })
    }

    fn status(&self) -> Value {
        serde_json::from_str(&ask_admin(&self.world, "GET", "status")).unwrap()
    }

    /// The listeners of a mode, as `status` has them.
    fn addresses(&self, mode: &str) -> Vec<SocketAddr> {
        let status = self.status();
        let all = status["listeners"].as_array().unwrap().iter().filter_map(Value::as_str);
        all.filter_map(|one| one.strip_prefix(mode)?.trim().parse().ok()).collect()
    }

    /// A request by way of a listener; the sandbox in its record, if it passed.
    fn ask_via(&self, proxy: SocketAddr) -> String {
        let since = self.world.record_count();
        let mut wire = RawConnection::connect(proxy);
        let authority = format!("web.test:{}", self.web.port());
        wire.send(format!(
            "GET http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n"
        ));
        let answer = wire.read_response("GET").expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text());
        let record = self.world.wait_for_record(since, "the request is recorded", |record| {
            record["class_uid"] == 4002 && record_stage(record) == "decision"
        });
        record["actor"]["app_uid"].as_str().unwrap().to_owned()
    }

    /// An open tunnel by way of a listener, known to work.
    fn tunnel_via(&self, proxy: SocketAddr) -> RawConnection {
        let mut wire = RawConnection::connect(proxy);
        let port = self.raw.port();
        wire.send(format!("CONNECT raw.test:{port} HTTP/1.1\r\nHost: raw.test:{port}\r\n\r\n"));
        let granted = wire.read_until(b"\r\n\r\n").expect("CONNECT is answered");
        assert!(granted.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&granted));
        self.assert_echoes(&mut wire);
        wire
    }

    fn assert_echoes(&self, wire: &mut RawConnection) {
        wire.send("GET /hello HTTP/1.1\r\nHost: raw.test\r\n\r\n");
        assert!(wire.read_response("GET").is_some_and(|answer| answer.text().contains("/hello")));
    }

    fn wait_for_cut(&self, since: usize, code: &str) {
        self.world.wait_for_record(since, &format!("a tunnel ends as {code}"), |record| {
            record["class_uid"] == 4001
                && record["unmapped"]["sandbar"]["ending"] == "revoked"
                && record["status_detail"] == code
        });
    }
}

fn explicit(bind: &str, sandbox: &str) -> String {
    listener("explicit", bind, sandbox)
}

fn dns(sandbox: &str) -> String {
    listener("dns", "127.0.0.8:0", sandbox)
}

fn listener(mode: &str, bind: &str, sandbox: &str) -> String {
    format!(
        "[[listener]]\nmode = \"{mode}\"\nbind = [\"{bind}\"]\nsandbox = \"{sandbox}\"\n\
         dangerously_share_address = true\n"
    )
}

fn is_listening(address: SocketAddr) -> bool {
    std::net::TcpStream::connect_timeout(&address, DEADLINE).is_ok()
}

/// Asks for a name that no rule allows; whether an answer came.
fn answers_dns(server: SocketAddr) -> bool {
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let query = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06denied\x04test\x00\x00\x01\x00\x01";
    let sent = client.send_to(query, server).is_ok();
    sent && client.recv(&mut [0; 512]).is_ok()
}

#[test]
fn p9_new_listeners_serve_and_removed_ones_are_closed() {
    let scene = ListenerScene::start("");
    let first = scene.addresses("explicit")[0];
    let mut open = scene.tunnel_via(first);
    let dns = dns("two");
    let unix = explicit("unix:second.sock", "two");
    scene.set_listeners(&format!("{}{dns}{unix}", explicit("127.0.0.7:0", "two")));
    wait_until("both listen", || scene.addresses("explicit").len() == 2);
    let second = scene.addresses("explicit")[1];
    assert!(second.ip().to_string() == "127.0.0.7" && second.port() != 0, "{second}");
    assert_eq!(scene.ask_via(second), "two");
    assert_eq!(scene.ask_via(first), "one");
    let resolver = scene.addresses("dns")[0];
    wait_until("queries are answered", || answers_dns(resolver));
    let socket = scene.world.config_path().with_file_name("second.sock");
    assert!(std::os::unix::net::UnixStream::connect(&socket).is_ok());
    let said = scene.set_listeners("");
    assert!(said.starts_with("in force:"), "{said}");
    wait_until("they are closed", || !is_listening(second) && !answers_dns(resolver));
    assert!(std::os::unix::net::UnixStream::connect(&socket).is_err());
    assert_eq!(scene.status()["listeners"].as_array().map(Vec::len), Some(1));
    assert_eq!(scene.ask_via(first), "one");
    scene.assert_echoes(&mut open);
}

#[test]
fn p10_connections_of_a_removed_listener_finish_or_are_cut() {
    let scene = ListenerScene::start("drain_seconds = 1");
    scene.set_listeners(&explicit("127.0.0.7:0", "two"));
    wait_until("both listen", || scene.addresses("explicit").len() == 2);
    let (first, second) = (scene.addresses("explicit")[0], scene.addresses("explicit")[1]);
    let (mut neighbour, mut tunnel) = (scene.tunnel_via(first), scene.tunnel_via(second));
    let mut idle = RawConnection::connect(second);
    let authority = format!("web.test:{}", scene.web.port());
    idle.send(format!("GET http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n"));
    assert_eq!(idle.read_response("GET").unwrap().status, 200);
    let mut silent = RawConnection::connect(second);
    let since = scene.world.record_count();
    scene.set_listeners("");
    assert!(idle.read_to_end().is_empty(), "an idle connection is closed");
    assert!(tunnel.read_to_end().is_empty(), "an open tunnel is cut");
    scene.wait_for_cut(since, "cut_by_operator");
    assert!(silent.read_to_end().is_empty(), "a silent connection is closed");
    scene.assert_echoes(&mut neighbour);
}

#[test]
fn p2_p10_a_listener_that_goes_to_another_sandbox_takes_no_connection_along() {
    let scene = ListenerScene::start("");
    scene.set_listeners(&explicit("127.0.0.7:0", "one"));
    wait_until("both listen", || scene.addresses("explicit").len() == 2);
    let address = scene.addresses("explicit")[1];
    let mut tunnel = scene.tunnel_via(address);
    let mut silent = RawConnection::connect(address);
    assert_eq!(scene.ask_via(address), "one");
    let since = scene.world.record_count();
    scene.set_listeners(&explicit("127.0.0.7:0", "two"));
    assert!(tunnel.read_to_end().is_empty(), "the tunnel of the former sandbox is cut");
    scene.wait_for_cut(since, "identity_changed");
    assert!(silent.read_to_end().is_empty());
    assert_eq!(scene.addresses("explicit")[1], address, "the socket stays");
    assert_eq!(scene.ask_via(address), "two");
}

#[test]
fn p9_a_listener_that_cannot_be_bound_changes_nothing_until_it_can() {
    let scene = ListenerScene::start("");
    let taken = TcpListener::bind("127.0.0.7:0").unwrap();
    let address = taken.local_addr().unwrap();
    let generation = scene.status()["policy"]["generation"].clone();
    let path = scene.world.config_path();
    let before = std::fs::read_to_string(&path).unwrap();
    let text = format!("{before}{}{}", explicit("127.0.0.6:0", "two"), explicit(&address.to_string(), "two"));
    std::fs::write(&path, text).unwrap();
    let told: Value = serde_json::from_str(&ask_admin(&scene.world, "POST", "reload")).unwrap();
    let trouble = told["trouble"].as_str().unwrap_or_else(|| panic!("it is refused: {told}"));
    assert!(trouble.contains(&format!("cannot listen on {address}")), "{trouble}");
    assert!(trouble.contains("free the address or change `bind`"), "{trouble}");
    let status = scene.status();
    assert_eq!(status["policy"]["generation"], generation);
    assert_eq!(
        status["listeners"].as_array().map(Vec::len),
        Some(1),
        "not even the other one is opened: {status}"
    );
    drop(taken);
    let said = scene.world.run_command(&["reload"]);
    assert!(said.contains("in force:"), "the same files load once the address is free: {said}");
    wait_until("all listen", || scene.addresses("explicit").len() == 3);
    assert_eq!(scene.ask_via(address), "two");
}

#[test]
fn p9_the_port_of_a_listener_that_leaves_is_not_free_yet_and_the_reload_says_so() {
    let scene = ListenerScene::start("");
    let free = TcpListener::bind("127.0.0.7:0").unwrap().local_addr().unwrap();
    scene.set_listeners(&explicit(&free.to_string(), "two"));
    wait_until("both listen", || scene.addresses("explicit").contains(&free));
    let path = scene.world.config_path();
    let text = std::fs::read_to_string(&path).unwrap();
    let all = format!("0.0.0.0:{}", free.port());
    std::fs::write(&path, text.replace(&free.to_string(), &all)).unwrap();
    let told = ask_admin(&scene.world, "POST", "reload");
    assert!(told.contains("has the port: remove it first and reload, or restart"), "{told}");
    assert_eq!(scene.ask_via(free), "two");
}

#[test]
fn p4_a_listener_that_a_reload_opened_is_never_dialled() {
    let scene = ListenerScene::start("");
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let policy = scene.world.policy_dir().join("p.toml");
    let text = std::fs::read_to_string(&policy).unwrap();
    let wider = text
        .replace("hosts = [\"web.test:", &format!("hosts = [\"web.test:{}\", \"web.test:", address.port()));
    std::fs::write(&policy, wider).unwrap();
    scene.set_listeners(&explicit(&address.to_string(), "two"));
    wait_until("both listen", || scene.addresses("explicit").contains(&address));
    let mut wire = RawConnection::connect(scene.world.listeners[0]);
    let authority = format!("web.test:{}", address.port());
    wire.send(format!("GET http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n"));
    let answer = wire.read_response("GET").expect("an answer");
    scene.world.assert_refused("our own listener", &answer, 403, "own_address");
    assert!(scene.web.requests().is_empty());
}

#[test]
fn p9_a_reload_names_the_settings_that_wait_for_a_restart() {
    let scene = ListenerScene::start("drain_seconds = 7");
    scene.set_listeners(&dns("one"));
    wait_until("it listens", || !scene.addresses("dns").is_empty());
    let resolver = scene.addresses("dns")[0];
    assert_eq!(scene.status()["unapplied"], serde_json::json!([]));
    let said = scene.world.reconfigure(|text| {
        text.replace("drain_seconds = 7", "drain_seconds = 8")
            .replace("[dns]\n", "[dns]\nforwards_per_hour = 77\n")
            .replace(&dns("one"), &dns("two"))
    });
    let restart = "not applied until a restart: ";
    assert!(said.contains(restart), "{said}");
    let named = said.split_once(restart).unwrap().1.lines().next().unwrap().to_owned();
    assert_eq!(named, format!("the change of listener dns {resolver}, `[dns]`, `[limits]`"));
    let unapplied = scene.status()["unapplied"].clone();
    assert_eq!(unapplied.as_array().unwrap().len(), 3, "{unapplied}");
    assert!(
        scene
            .world
            .run_command(&["status"])
            .contains("`[limits]` has changed and is not applied until a restart")
    );
    assert!(ask_admin(&scene.world, "GET", "metrics").contains("sandbar_unapplied_settings 3"));
    assert!(scene.world.stderr_text().contains("not applied until a restart"));
    assert!(answers_dns(resolver), "it goes on as it was");
    let again = scene.world.run_command(&["reload"]);
    assert!(again.contains(restart), "said again while it is true: {again}");
    let back = scene.world.reconfigure(|text| {
        text.replace("drain_seconds = 8", "drain_seconds = 7")
            .replace("forwards_per_hour = 77\n", "")
            .replace(&dns("two"), &dns("one"))
    });
    assert!(!back.contains(restart), "{back}");
    assert_eq!(scene.status()["unapplied"], serde_json::json!([]));
}
