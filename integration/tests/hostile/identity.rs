//! Who a connection belongs to is what its channel says now (P2, P10): a reload gives the channel to another sandbox, to
//! nobody or to another tenant while connections are open on it.

use std::time::Instant;

use serde_json::Value;

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::http2::{Http2Client, request_fields};
use crate::instance::{InstanceSetup, SandbarInstance, record_stage};
use crate::origin::{OriginReply, ScriptedOrigin};
use crate::wire::{RawConnection, RawResponse};

/// The address that the test's own connections come from, and that of nobody.
const OURS: &str = "127.0.0.1/32";
const OTHER: &str = "127.0.0.9/32";

/// Two sandboxes with the same policy behind one listener, told apart by where they connect from.
struct ChannelScene {
    world: SandbarInstance,
    /// Speaks TLS; requests to it are intercepted.
    web: ScriptedOrigin,
    /// Reached by raw TCP.
    raw: ScriptedOrigin,
}

/// One connection of each kind, each known to work but the silent one.
struct OpenConnections {
    http1: RawConnection,
    http2: Http2Client,
    tunnel: RawConnection,
    /// Accepted; its client has not sent a byte.
    silent: RawConnection,
    /// A request on it waits for its answer.
    waiting: RawConnection,
}

impl ChannelScene {
    fn start() -> Self {
        let root = OriginCa::new();
        let web = ScriptedOrigin::start_tls(root.server_config("web.test"));
        let raw = ScriptedOrigin::start_plain();
        let sandbox = |id: &str, source: &str| {
            format!(
                "[[sandbox]]\nid = \"{id}\"\nbase = \"system\"\npolicies = [\"p\"]\nsource_address = \"{source}\"\n\
                 dangerously_trust_source_address = true\n"
            )
        };
        let mut setup = InstanceSetup::with_hosts(&[("web.test", web.port())]).with_roots(root.pem());
        setup.hosts.push("raw.test");
        setup.policy += &format!(
            "[[allow]]\nname = \"raw\"\nhosts = [\"raw.test\"]\ntcp = [{}]\nresolves_to = [\"127.0.0.0/8\"]\n",
            raw.port()
        );
        setup.tables =
            "[[listener]]\nmode = \"explicit\"\nbind = [\"127.0.0.1:0\"]\nidentify = \"source-address\"\n"
                .to_owned()
                + &sandbox("trusted", OURS)
                + &sandbox("quarantine", OTHER);
        ChannelScene { world: setup.start(), web, raw }
    }

    fn connect_web(&self, protocol: &str) -> RawConnection {
        let wire = self.world.open_tunnel_via(1, "web.test", self.web.port());
        tls_handshake(wire, &client_config(&self.world, protocol), "web.test").unwrap()
    }

    fn send_get(&self, wire: &mut RawConnection) {
        wire.send(format!("GET / HTTP/1.1\r\nHost: web.test:{}\r\n\r\n", self.web.port()));
    }

    fn ask_web(&self, wire: &mut RawConnection) -> RawResponse {
        self.send_get(wire);
        wire.read_response("GET").expect("an answer")
    }

    fn ask_http2(&self, client: &mut Http2Client, stream: u32) -> Option<u16> {
        let authority = format!("web.test:{}", self.web.port());
        client.send_headers(stream, &request_fields("GET", "https", &authority, "/"), true);
        client.wait_for_status(stream)
    }

    fn open_tunnel(&self) -> RawConnection {
        let mut tunnel = self.world.open_tunnel_via(1, "raw.test", self.raw.port());
        assert_tunnel_works(&mut tunnel);
        tunnel
    }

    fn open_all(&self) -> OpenConnections {
        let silent = RawConnection::connect(self.world.listeners[1]);
        let (mut http1, tunnel) = (self.connect_web("http/1.1"), self.open_tunnel());
        assert_eq!(self.ask_web(&mut http1).status, 200);
        let mut http2 = Http2Client::new(self.connect_web("h2"));
        assert_eq!(self.ask_http2(&mut http2, 1), Some(200));
        let mut waiting = self.connect_web("http/1.1");
        self.web
            .set_reply(OriginReply::SayAndHang(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1".to_vec()));
        self.send_get(&mut waiting);
        assert!(waiting.read_until(b"\r\n\r\n1").is_some());
        self.web.set_reply(OriginReply::Echo);
        OpenConnections { http1, http2, tunnel, silent, waiting }
    }

    /// Puts the sources of the two sandboxes in place of what they are.
    fn move_sources(&self, trusted: &str, quarantine: &str) -> String {
        self.world.reconfigure(|text| {
            let text = text.replace(OURS, "TRUSTED").replace(OTHER, "QUARANTINE");
            text.replace("TRUSTED", trusted).replace("QUARANTINE", quarantine)
        })
    }

    /// The ending of what was cut: under the name that its decision has, for `reason`.
    fn assert_cut(&self, host: &str, reason: &str) {
        let record = self.world.wait_for_record(0, "the cut is recorded", |record| {
            record["unmapped"]["sandbar"]["ending"] == "revoked" && record["dst_endpoint"]["hostname"] == host
        });
        assert_eq!((&record["status_detail"], sandbox_of(&record)), (&Value::from(reason), Some("trusted")));
    }
}

fn assert_tunnel_works(tunnel: &mut RawConnection) {
    tunnel.send("GET /raw HTTP/1.1\r\nHost: raw.test\r\n\r\n");
    assert_eq!(tunnel.read_response("GET").expect("an answer").status, 200);
}

fn sandbox_of(record: &Value) -> Option<&str> {
    record["actor"]["app_uid"].as_str()
}

/// Every decision is recorded under the sandbox, if any, that its generation gives the test's address to.
fn assert_records_agree(world: &SandbarInstance, since: usize, owners: [Option<&str>; 2]) {
    world.wait_for_record(since, "a later decision", |record| record["policy"]["version"] == "2");
    for record in world.records().into_iter().skip(since) {
        if !matches!(record_stage(&record), "decision" | "denied") || record["class_uid"] == 4003 {
            continue;
        }
        let owner = match record["policy"]["version"].as_str() {
            Some("1") => owners[0],
            _ => owners[1],
        };
        assert_eq!(sandbox_of(&record), owner, "{record}");
    }
}

#[test]
fn p2_p10_a_channel_that_changes_hands_takes_its_connections_from_the_first_sandbox() {
    let scene = ChannelScene::start();
    let before = scene.world.record_count();
    let mut open = scene.open_all();
    let (asked, moved) = (scene.web.requests().len(), Instant::now());
    let said = scene.move_sources(OTHER, OURS);
    assert!(said.contains("generation 2"), "{said}");
    assert_eq!(open.tunnel.read_to_end(), b"", "the tunnel is cut");
    assert_eq!(open.waiting.read_to_end(), b"", "the open request is cut");
    println!("cut {:?} after the file was written, the reload included", moved.elapsed());
    scene.assert_cut("raw.test", "identity_changed");
    scene.assert_cut("web.test", "identity_changed");
    let refused = scene.ask_web(&mut open.http1);
    scene.world.assert_refused("HTTP/1", &refused, 403, "identity_changed");
    assert_eq!(open.http1.read_to_end(), b"", "and the connection ends");
    assert_eq!(scene.ask_http2(&mut open.http2, 3), Some(403), "HTTP/2");
    assert!(open.http2.is_ended(), "and the connection ends");
    let port = scene.web.port();
    open.silent.send(format!("CONNECT web.test:{port} HTTP/1.1\r\nHost: web.test:{port}\r\n\r\n"));
    let refused = open.silent.read_response("CONNECT").expect("an answer");
    scene.world.assert_refused("its first bytes came late", &refused, 403, "identity_changed");
    assert_eq!(scene.web.requests().len(), asked, "nothing reached the origin");
    assert_eq!(
        scene.ask_web(&mut scene.connect_web("http/1.1")).status,
        200,
        "a new one is the other sandbox's"
    );
    assert_records_agree(&scene.world, before, [Some("trusted"), Some("quarantine")]);
}

#[test]
fn p2_p10_a_channel_of_nobodys_ends_what_is_open_on_it() {
    let scene = ChannelScene::start();
    let before = scene.world.record_count();
    let mut open = scene.open_all();
    let asked = scene.web.requests().len();
    scene.move_sources("127.0.0.10/32", OTHER);
    assert_eq!(open.tunnel.read_to_end(), b"");
    scene.assert_cut("raw.test", "unknown_channel");
    let refused = scene.ask_web(&mut open.http1);
    scene.world.assert_refused("HTTP/1", &refused, 403, "unknown_channel");
    assert_eq!(scene.ask_http2(&mut open.http2, 3), Some(403));
    assert!(open.http2.is_ended());
    assert_eq!(scene.web.requests().len(), asked, "nothing reached the origin");
    assert_records_agree(&scene.world, before, [Some("trusted"), None]);
}

/// In a warm pool connections are opened before the identity is assigned: they go on, under it. A tenant that changes
/// later ends what is under way, and what follows is the new one's.
#[test]
fn p2_p10_an_assigned_identity_breaks_nothing_and_a_changed_one_does() {
    let scene = ChannelScene::start();
    let mut open = scene.open_all();
    let tenants = |since| {
        let own =
            scene.world.records().into_iter().skip(since).filter(|record| record_stage(record) == "decision");
        own.map(|record| record["metadata"]["tenant_uid"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let since = scene.world.record_count();
    scene.world.run_command(&[
        "identity",
        "assign",
        "--sandbox",
        "trusted",
        "--tenant",
        "acme",
        "--environment",
        "staging",
    ]);
    assert_tunnel_works(&mut open.tunnel);
    assert_eq!(scene.ask_web(&mut open.http1).status, 200);
    assert_eq!(scene.ask_http2(&mut open.http2, 3), Some(200));
    assert_eq!(tenants(since), ["acme", "acme"]);
    let since = scene.world.record_count();
    let said = scene.world.reconfigure(|text| {
        text.replace(
            "id = \"trusted\"\n",
            "id = \"trusted\"\ntenant = \"initech\"\nenvironment = \"staging\"\n",
        )
    });
    assert!(said.contains("generation 3"), "{said}");
    assert_eq!((open.tunnel.read_to_end(), open.waiting.read_to_end()), (Vec::new(), Vec::new()));
    scene.assert_cut("raw.test", "identity_changed");
    assert_eq!(scene.ask_web(&mut open.http1).status, 200);
    assert_eq!(scene.ask_http2(&mut open.http2, 5), Some(200));
    assert_eq!(tenants(since), ["initech", "initech"]);
}
