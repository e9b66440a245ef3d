//! A host with addresses of both families, of which one is dead: the other serves, at once, and the record names it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use socket2::{Domain, Socket, Type};

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::instance::{DEADLINE, InstanceSetup, SandbarInstance, record_stage};
use crate::wire::RawConnection;

/// Sequential dialling waits two seconds or more before it tries the second address.
const PROMPT: Duration = Duration::from_millis(1500);
/// A busy machine may be slow once, not every time.
const TRIES: usize = 4;

/// What the dead address does with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeadAddress {
    /// Never answers.
    Silent,
    /// Refuses at once.
    Refusing,
    /// Accepts, and closes before TLS.
    Closing,
}

/// A live address and a dead one with the same port.
struct TwoFamilies {
    live: SocketAddr,
    _dead: Vec<Box<dyn Send>>,
}

impl TwoFamilies {
    fn start(live: &str, dead: &str, kind: DeadAddress, tls: Option<Arc<ServerConfig>>) -> Self {
        let (listener, dead, held) = loop {
            let listener = TcpListener::bind((live, 0)).unwrap();
            let port = listener.local_addr().unwrap().port();
            let address: SocketAddr = (dead.parse::<std::net::IpAddr>().unwrap(), port).into();
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
            if socket.bind(&address.into()).is_ok() {
                break (listener, address, socket);
            }
        };
        let _dead = occupy(held, dead, kind);
        let live = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let tls = tls.clone();
                thread::spawn(move || serve(stream, tls));
            }
        });
        TwoFamilies { live, _dead }
    }

    fn port(&self) -> u16 {
        self.live.port()
    }

    /// Starts an instance that knows both addresses of `a.test`.
    fn start_instance(&self, rule: &str, limits: &str, roots: Option<String>) -> SandbarInstance {
        InstanceSetup {
            policy: format!(
                "[[allow]]\nname = \"origins\"\n{rule}\nresolves_to = [\"127.0.0.0/8\", \"::1/128\"]\n"
            ),
            limits: limits.to_owned(),
            tables: "[[dns.host]]\nname = \"a.test\"\naddresses = [\"::1\", \"127.0.0.1\"]\n".to_owned(),
            roots,
            ..InstanceSetup::default()
        }
        .start()
    }
}

/// Makes a bound socket behave as `kind`; what must stay open for that.
fn occupy(socket: Socket, address: SocketAddr, kind: DeadAddress) -> Vec<Box<dyn Send>> {
    match kind {
        DeadAddress::Refusing => vec![Box::new(socket)], // bound, so that nobody else takes the port; not listening
        DeadAddress::Silent => {
            socket.listen(0).unwrap();
            let mut held: Vec<Box<dyn Send>> = vec![Box::new(socket)];
            while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
                assert!(held.len() < 10, "its queue never fills");
                held.push(Box::new(stream));
            }
            held
        }
        DeadAddress::Closing => {
            socket.listen(16).unwrap();
            let listener = TcpListener::from(socket);
            thread::spawn(move || listener.incoming().for_each(drop));
            Vec::new()
        }
    }
}

fn serve(mut stream: TcpStream, tls: Option<Arc<ServerConfig>>) {
    drop(stream.set_read_timeout(Some(DEADLINE)));
    match tls {
        Some(config) => say_hello(&mut StreamOwned::new(ServerConnection::new(config).unwrap(), stream)),
        None => say_hello(&mut stream),
    }
}

/// Answers a request and ends.
fn say_hello(stream: &mut (impl Read + Write)) {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    while !bytes.ends_with(b"\r\n\r\n") {
        match stream.read(&mut buffer) {
            Ok(read) if read > 0 => bytes.extend_from_slice(&buffer[..read]),
            Ok(_) | Err(_) => return,
        }
    }
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
    drop(stream.write_all(answer.as_bytes()).and_then(|()| stream.flush()));
}

fn get(wire: &mut RawConnection, port: u16) {
    wire.send(format!("GET / HTTP/1.1\r\nHost: a.test:{port}\r\nConnection: close\r\n\r\n"));
    let answer = wire.read_response("GET").expect("an answer");
    assert_eq!((answer.status, &*answer.text()), (200, "hello"), "{answer:?}");
}

/// The fastest of a few tries is prompt, and every outcome names the live address.
fn assert_prompt(world: &SandbarInstance, families: &TwoFamilies, ask: impl Fn()) {
    let fastest = (0..TRIES).map(|_| {
        let started = Instant::now();
        ask();
        started.elapsed()
    });
    let fastest = fastest.min().unwrap();
    assert!(fastest < PROMPT, "{fastest:?}");
    let named = || {
        let records = world.records().into_iter();
        let ends = records.filter(|record| record_stage(record) == "outcome" && !record["traffic"].is_null());
        let live = families.live.ip().to_string();
        ends.filter(|record| record["dst_endpoint"]["ip"] == *live).count()
    };
    crate::instance::wait_until("every outcome names the address", || named() >= TRIES);
}

#[test]
fn a_dead_family_delays_no_request() {
    for kind in [DeadAddress::Silent, DeadAddress::Refusing] {
        for (live, dead) in [("127.0.0.1", "::1"), ("::1", "127.0.0.1")] {
            let families = TwoFamilies::start(live, dead, kind, None);
            let port = families.port();
            let rule = format!("hosts = [\"a.test:{port}\"]");
            let world = families.start_instance(&rule, "connect_seconds = 30", None);
            assert_prompt(&world, &families, || get(&mut world.open_tunnel("a.test", port), port));
        }
    }
}

#[test]
fn a_dead_family_delays_no_tunnel() {
    for kind in [DeadAddress::Silent, DeadAddress::Refusing] {
        for (live, dead) in [("127.0.0.1", "::1"), ("::1", "127.0.0.1")] {
            let families = TwoFamilies::start(live, dead, kind, None);
            let port = families.port();
            let rule = format!("hosts = [\"a.test\"]\ntcp = [{port}]");
            let world = families.start_instance(&rule, "connect_seconds = 30", None);
            assert_prompt(&world, &families, || get(&mut world.open_tunnel("a.test", port), port));
        }
    }
}

/// An address that accepts a connection and then fails in TLS is left for the next one.
#[test]
fn an_address_without_tls_is_left_for_the_next() {
    for (live, dead) in [("127.0.0.1", "::1"), ("::1", "127.0.0.1")] {
        let root = OriginCa::new();
        let tls = Some(root.server_config("a.test"));
        let families = TwoFamilies::start(live, dead, DeadAddress::Closing, tls);
        let port = families.port();
        let world = families.start_instance(&format!("hosts = [\"a.test:{port}\"]"), "", Some(root.pem()));
        let config = client_config(&world, "http/1.1");
        assert_prompt(&world, &families, || {
            let mut wire = tls_handshake(world.open_tunnel("a.test", port), &config, "a.test").unwrap();
            get(&mut wire, port);
        });
    }
}

/// With nobody to answer, the attempt ends at `connect_seconds`, and says so.
#[test]
fn a_silent_host_is_a_timeout() {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let _held = occupy(socket, address, DeadAddress::Silent);
    let hosts = InstanceSetup::with_hosts(&[("a.test", address.port())]);
    let world = hosts.with_limits("connect_seconds = 1").start();
    let mut wire = world.open_tunnel("a.test", address.port());
    wire.send(format!("GET / HTTP/1.1\r\nHost: a.test:{}\r\n\r\n", address.port()));
    let answer = wire.read_response("GET").unwrap();
    world.assert_refused("nobody answers", &answer, 504, "upstream_timeout");
}
