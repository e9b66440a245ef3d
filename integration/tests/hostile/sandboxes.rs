//! Sandboxes that come and go (P17): what the program keeps for one is dropped when it has left.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;

use socket2::{Domain, Socket, Type};

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::instance::{InstanceSetup, SandbarInstance, wait_until};
use crate::origin::{OriginReply, ScriptedOrigin};
use crate::wire::RawConnection;

/// Sandboxes at a time, and how often they are replaced by others.
const SANDBOXES: usize = 200;
const ROUNDS: usize = 6;
/// Most memory that may stay resident after all rounds beyond that after the first, in kilobytes: what the program does
/// not find worth returning to the kernel (32 MiB), and slack of the allocator. Neither grows with rounds; the 1,000
/// sandboxes that left would hold 240,000.
const SLACK: u64 = 48 << 10;
/// Connections of a burst, and the bytes that each is sent and does not read.
const BURST: usize = 300;
const BURST_BODY: usize = 4 << 20;
/// Most memory that may stay resident after a burst, in kilobytes: what is not worth returning, and caches.
const BURST_SLACK: u64 = 48 << 10;

fn address(round: usize, at: usize) -> String {
    format!("127.1.{round}.{}", at + 1)
}

fn sandboxes(round: usize) -> String {
    (0..SANDBOXES).fold(String::new(), |mut text, at| {
        let address = address(round, at);
        write!(
            text,
            "[[sandbox]]\nid = \"job-{round}-{at}\"\nbase = \"system\"\npolicies = [\"p\"]\n\
             source_address = \"{address}/32\"\ndangerously_trust_source_address = true\n"
        )
        .unwrap();
        text
    })
}

/// A connection to the proxy from the address of a sandbox.
fn connect_from(source: &str, proxy: SocketAddr) -> RawConnection {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let source: SocketAddr = format!("{source}:0").parse().unwrap();
    socket.bind(&source.into()).unwrap();
    socket.connect(&proxy.into()).unwrap();
    RawConnection::from_stream(Box::new(std::net::TcpStream::from(socket)))
}

fn metric(world: &SandbarInstance, name: &str) -> usize {
    let text = crate::files::ask_admin(world, "GET", "metrics");
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

#[test]
fn p17_what_is_kept_for_a_sandbox_is_dropped_when_it_leaves() {
    let root = OriginCa::new();
    let origin = ScriptedOrigin::start_tls(root.server_config("a.test"));
    let mut setup = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
    setup.policy += "[budget]\nrequests_per_hour = 100\n";
    setup.tables = format!(
        "[[listener]]\nmode = \"explicit\"\nbind = [\"127.0.0.1:0\"]\nidentify = \"source-address\"\n# jobs\n{}",
        sandboxes(0)
    );
    setup.others = Vec::new();
    let world = setup.with_roots(root.pem()).start();
    wait_until("both listen", || world.listener_addresses().len() == 2);
    let proxy = world.listener_addresses()[1];
    let file = world.config_path();
    let text = fs::read_to_string(&file).unwrap();
    let (fixed, _) = text.split_once("# jobs\n").unwrap();
    let config = client_config(&world, "http/1.1");
    let mut resident = Vec::new();
    for round in 0..=ROUNDS {
        let fresh = file.with_extension("new");
        fs::write(&fresh, format!("{fixed}# jobs\n{}", sandboxes(round))).unwrap();
        fs::rename(&fresh, &file).unwrap();
        let told = crate::files::ask_admin(&world, "POST", "reload");
        assert!(!told.contains("trouble"), "{told}");
        for at in 0..SANDBOXES {
            let mut wire = connect_from(&address(round, at), proxy);
            let port = origin.port();
            wire.send(format!("CONNECT a.test:{port} HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n"));
            wire.read_until(b"\r\n\r\n").unwrap();
            let mut wire = tls_handshake(wire, &config, "a.test").unwrap();
            wire.send(format!("GET / HTTP/1.1\r\nHost: a.test:{port}\r\nConnection: close\r\n\r\n"));
            let answer = wire.read_response("GET").unwrap();
            assert_eq!(answer.status, 200, "{round} {at}: {}", answer.text());
        }
        // Those of the round before have left.
        wait_until("they are dropped", || metric(&world, "sandbar_sandbox_states") == SANDBOXES + 1);
        assert_eq!(metric(&world, "sandbar_leaves"), SANDBOXES);
        resident.push(world.resident_kilobytes());
        println!("round {round}: {} KB resident", world.resident_kilobytes());
    }
    let bound = resident[1] + SLACK;
    wait_until(&format!("it is below {bound} KB: {resident:?}"), || world.resident_kilobytes() < bound);
}

#[test]
fn p17_memory_is_returned_after_a_burst() {
    let root = OriginCa::new();
    let origin = ScriptedOrigin::start_tls(root.server_config("a.test"));
    let body = vec![b'x'; BURST_BODY];
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BURST_BODY}\r\n\r\n");
    origin.set_reply(OriginReply::Say([head.as_bytes(), &body].concat()));
    let world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).with_roots(root.pem()).start();
    let config = client_config(&world, "http/1.1");
    let port = origin.port();
    let request = || {
        let mut wire = tls_handshake(world.open_tunnel("a.test", port), &config, "a.test").unwrap();
        wire.send(format!("GET / HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n"));
        wire
    };
    assert_eq!(request().read_response("GET").unwrap().status, 200);
    let quiet = world.resident_kilobytes();
    let open: Vec<RawConnection> = (0..BURST).map(|_| request()).collect();
    wait_until("all are asked", || origin.requests().len() > BURST);
    let peak = world.resident_kilobytes();
    // While the connections are open their memory is in use; that it was looked at then must not keep it later.
    let returns = || {
        let metrics = crate::files::ask_admin(&world, "GET", "metrics");
        metrics.lines().any(|line| line.starts_with("sandbar_memory_returns_total ")) // once it was counted
    };
    wait_until("memory was returned once", returns);
    drop(open);
    println!("{quiet} KB before, {peak} KB at the peak");
    assert!(peak > quiet + 2 * BURST_SLACK, "no burst: {quiet} KB before, {peak} KB at the peak");
    wait_until("memory is returned", || world.resident_kilobytes() < quiet + BURST_SLACK);
}
