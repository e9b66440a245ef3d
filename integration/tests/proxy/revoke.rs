//! Every kind of connection loses its permission while it is open: it is cut and recorded, and its neighbour of
//! the same kind goes on (P10).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::client::{client_config, connect_tcp, connect_tls, read_head, send_text};
use super::origin::noise_bytes;
use super::reload::{connect_echo, write_policy};
use super::scene::{ProxyScene, ProxySetup, record_host, wait_until};
use super::site::python_with;

/// The first host of each pair loses its permission.
const POLICY: &str = r#"
name = "p"
[[allow]]
name  = "web"
hosts = ["open.example", "other.example"]
ports = [80, 443]
[[allow]]
name  = "tunnel"
hosts = ["tunnel.example", "tolerant.example"]
tls   = "tunnel"
[[allow]]
name  = "database"
hosts = ["db.example", "six.example"]
tcp   = [5432]
"#;

/// Longer than what all the buffers on the way hold.
const LONG: usize = 40 << 20;
/// The part of an upload that is sent before the policy changes.
const PART_BYTES: usize = 1000;

trait ReadWrite: Read + Write + Send {}
impl<T: Read + Write + Send> ReadWrite for T {}

/// What is done on a connection, so that it is known to work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionUse {
    /// A long answer is being read.
    Download,
    /// What is said comes back.
    Echo,
    /// Requests are answered.
    Requests,
    /// A body is being sent.
    Upload,
}

struct OpenConnection {
    what: String,
    wire: Box<dyn ReadWrite>,
    by: ConnectionUse,
}

impl OpenConnection {
    fn new(what: &str, host: &str, mut wire: impl ReadWrite + 'static, by: ConnectionUse) -> Self {
        match by {
            ConnectionUse::Download => {
                send_text(&mut wire, &format!("GET /bytes/{LONG} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
                wire.read_exact(&mut [0; 1000]).unwrap();
            }
            ConnectionUse::Echo => assert_echo(&mut wire),
            ConnectionUse::Requests => assert_response(&mut wire, host),
            ConnectionUse::Upload => {
                let length = LONG;
                send_text(
                    &mut wire,
                    &format!("POST /echo HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"),
                );
                wire.write_all(&noise_bytes(PART_BYTES)).unwrap();
                wire.flush().unwrap();
            }
        }
        OpenConnection { what: format!("{what} to {host}"), wire: Box::new(wire), by }
    }

    /// Whether it was cut: it ends, in an error or not, and not with all that was announced.
    fn is_cut(&mut self) -> bool {
        let (mut seen, mut buffer) = (0, vec![0; 64 << 10]);
        loop {
            match self.wire.read(&mut buffer) {
                Ok(0) => return seen < LONG - 1000,
                Ok(more) => seen += more,
                Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
            }
        }
    }

    fn assert_continues(mut self, host: &str) {
        match self.by {
            ConnectionUse::Download => {
                let mut rest = vec![0; LONG - 1000];
                self.wire.read_exact(&mut rest).unwrap();
            }
            ConnectionUse::Echo => assert_echo(&mut self.wire),
            ConnectionUse::Requests => assert_response(&mut self.wire, host),
            ConnectionUse::Upload => {
                self.wire.write_all(&noise_bytes(LONG)[PART_BYTES..]).unwrap();
                self.wire.flush().unwrap();
                let said = read_head(&mut self.wire);
                assert!(said.starts_with("HTTP/1.1 200"), "{}: {said}", self.what);
            }
        }
    }
}

fn assert_echo(wire: &mut impl ReadWrite) {
    let mut back = [0; 5];
    wire.write_all(b"hello").unwrap();
    wire.flush().unwrap();
    wire.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"hello");
}

fn assert_response(wire: &mut impl ReadWrite, host: &str) {
    send_text(wire, &format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    let said = read_head(wire);
    assert!(said.starts_with("HTTP/1.1 200"), "{host}: {said}");
}

/// A connection to `host` through the explicit listener, by CONNECT or SOCKS5.
fn connect_through(scene: &ProxyScene, host: &str, tongue: &str) -> TcpStream {
    let mut stream = connect_tcp(scene, 0, "10.77.0.1:3128");
    match tongue {
        "CONNECT" => {
            send_text(&mut stream, &format!("CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n"));
            assert!(read_head(&mut stream).starts_with("HTTP/1.1 200"));
        }
        _ => {
            let length = u8::try_from(host.len()).unwrap();
            let asked = [&[5, 1, 0, 5, 1, 0, 3, length][..], host.as_bytes(), &[1, 187]].concat();
            stream.write_all(&asked).unwrap();
            let mut said = [0; 12];
            stream.read_exact(&mut said).unwrap();
            assert_eq!(said[..4], [5, 0, 5, 0], "SOCKS: {said:?}");
        }
    }
    stream
}

/// One of each kind, to the hosts of one side.
fn open_all(scene: &ProxyScene, web: (&str, &str), tunnel: (&str, &str), raw: &str) -> Vec<OpenConnection> {
    let config = client_config(scene);
    let inside = |stream: TcpStream, host: &str| {
        let name = rustls::pki_types::ServerName::try_from(host.to_owned()).unwrap();
        let connection = rustls::ClientConnection::new(config.clone(), name).unwrap();
        rustls::StreamOwned::new(connection, stream)
    };
    let web_tls = || connect_tls(scene, 0, &format!("{}:443", web.1), &config, web.0);
    let mut upgraded = web_tls();
    send_text(
        &mut upgraded,
        &format!(
            "GET /upgrade HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
            web.0
        ),
    );
    assert!(read_head(&mut upgraded).starts_with("HTTP/1.1 101"));
    let transparent = connect_tls(scene, 0, &format!("{}:443", tunnel.1), &config, tunnel.0);
    let database = connect_echo(scene, raw);
    let (connect, socks) =
        (connect_through(scene, tunnel.0, "CONNECT"), connect_through(scene, tunnel.0, "SOCKS5"));
    let plain = connect_tcp(scene, 0, &format!("{}:80", web.1));
    vec![
        OpenConnection::new("a transparent tunnel", tunnel.0, transparent, ConnectionUse::Requests),
        OpenConnection::new(
            "a tunnel by CONNECT",
            tunnel.0,
            inside(connect, tunnel.0),
            ConnectionUse::Requests,
        ),
        OpenConnection::new("a tunnel by SOCKS5", tunnel.0, inside(socks, tunnel.0), ConnectionUse::Requests),
        OpenConnection::new("raw TCP", raw, database, ConnectionUse::Echo),
        OpenConnection::new("a WebSocket", web.0, upgraded, ConnectionUse::Echo),
        OpenConnection::new("a download", web.0, web_tls(), ConnectionUse::Download),
        OpenConnection::new("a download without TLS", web.0, plain, ConnectionUse::Download),
        OpenConnection::new("an upload", web.0, web_tls(), ConnectionUse::Upload),
    ]
}

fn is_revoked(record: &Value) -> bool {
    record["unmapped"]["sandbar"]["ending"] == "revoked"
}

#[test]
fn p10_each_kind_of_connection_is_cut_and_its_neighbour_is_not() {
    let scene = ProxyScene::with_setup(ProxySetup { policy: POLICY.to_owned(), ..ProxySetup::default() });
    let losers = open_all(
        &scene,
        ("open.example", "93.184.216.34"),
        ("tunnel.example", "93.184.216.36"),
        "db.example",
    );
    let others = open_all(
        &scene,
        ("other.example", "93.184.216.35"),
        ("tolerant.example", "93.184.216.37"),
        "six.example",
    );
    wait_until("all are open", || {
        let (_, told) = scene.admin_request("GET", "/connections")?;
        let told: Value = serde_json::from_str(&told).unwrap();
        (told["open"] == losers.len() + others.len()).then_some(())
    });
    let count = losers.len();
    let fewer = ["open.example", "tunnel.example", "db.example"];
    let policy =
        fewer.iter().fold(POLICY.to_owned(), |text, host| text.replace(&format!("\"{host}\", "), ""));
    write_policy(&scene, &policy);
    for mut open in losers {
        assert!(open.is_cut(), "{} goes on", open.what);
    }
    for open in others {
        let host = open.what.rsplit(' ').next().unwrap().to_owned();
        open.assert_continues(&host);
    }
    let revoked = wait_until("all are recorded", || {
        let revoked: Vec<Value> = scene.records().into_iter().filter(is_revoked).collect();
        (revoked.len() >= count).then_some(revoked)
    });
    assert_eq!(revoked.len(), count, "{revoked:#?}");
    for record in &revoked {
        assert!(fewer.contains(&record_host(record)), "{record:#}");
        assert_eq!(record["status_detail"], "not_listed", "{record:#}");
        let bytes = |way: &str| record["traffic"][way].as_u64().unwrap_or_default();
        assert!(bytes("bytes_in") + bytes("bytes_out") > 0, "{record:#}");
    }
    let whole = scene.origin.requests().iter().filter(|seen| seen.line.starts_with("POST")).count();
    assert_eq!(whole, 1, "of the uploads one arrived whole");
}

/// Two streams of one connection, told line by line what becomes of them.
const STREAMS_SCRIPT: &str = r#"
import socket, ssl, h2.connection, h2.events
context = ssl.create_default_context()
context.set_alpn_protocols(['h2'])
sock = context.wrap_socket(socket.create_connection(('open.example', 443)), server_hostname='open.example')
conn = h2.connection.H2Connection()
conn.initiate_connection()
for path in ['/steps/lose', '/steps/keep']:
    stream = conn.get_next_available_stream_id()
    conn.send_headers(stream, [(':method', 'GET'), (':scheme', 'https'), (':authority', 'open.example'), (':path', path)], end_stream=True)
sock.sendall(conn.data_to_send())
while True:
    data = sock.recv(65536)
    if not data:
        print('end', flush=True)
        break
    for event in conn.receive_data(data):
        if isinstance(event, h2.events.DataReceived):
            conn.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            print('data', event.stream_id, event.data.decode().split(), flush=True)
        elif isinstance(event, h2.events.StreamReset):
            print('reset', event.stream_id, int(event.error_code), flush=True)
        elif isinstance(event, h2.events.ConnectionTerminated):
            print('goaway', flush=True)
    sock.sendall(conn.data_to_send())
"#;

/// Reads lines until one begins with `start`; all that was read.
fn read_lines_until(said: &mut impl Iterator<Item = std::io::Result<String>>, start: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for line in said {
        lines.push(line.unwrap());
        if lines.last().unwrap().starts_with(start) {
            return lines;
        }
    }
    panic!("no `{start}` in {lines:?}");
}

#[test]
fn p10_an_idle_stream_is_reset_and_the_one_beside_it_goes_on() {
    let paths = |list: &str| {
        format!("name = \"p\"\n[[allow]]\nname = \"web\"\nhosts = [\"open.example\"]\npaths = {list}\n")
    };
    let policy = paths(r#"["/steps/lose", "/steps/keep"]"#);
    let scene = ProxyScene::with_setup(ProxySetup { policy, ..ProxySetup::default() });
    let python = python_with("h2").expect("python3-h2 is installed");
    let mut command: Command = scene.command_in(0, python);
    command.args(["-c", STREAMS_SCRIPT]).stdout(Stdio::piped());
    let mut python = command.spawn().unwrap();
    let mut said = BufReader::new(python.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        read_lines_until(&mut said, "data"); // each has had its first event, and is silent now
    }
    write_policy(&scene, &paths(r#"["/steps/keep"]"#));
    let lines = read_lines_until(&mut said, "reset");
    assert_eq!(lines, ["reset 1 8"], "RST_STREAM with CANCEL, and nothing else");
    scene.origin.release_step();
    let lines = read_lines_until(&mut said, "data 3");
    assert_eq!(lines, ["data 3 ['data:', 'step', '1']"], "its neighbour goes on");
    python.kill().unwrap();
    python.wait().unwrap();
    let revoked = scene.wait_for_record("the cut", is_revoked);
    assert_eq!(revoked["http_request"]["url"]["path"], "/steps/lose");
    assert_eq!(revoked["status_detail"], "path_not_allowed");
    assert_eq!(scene.records().iter().filter(|record| is_revoked(record)).count(), 1);
}

#[test]
fn p10_what_is_decided_late_is_decided_by_the_rules_of_then() {
    let scene = ProxyScene::with_setup(ProxySetup { policy: POLICY.to_owned(), ..ProxySetup::default() });
    let mut early = connect_tcp(&scene, 0, "93.184.216.36:443"); // accepted, and not a word yet
    let asked = scene.names.queried_names().len();
    write_policy(&scene, &POLICY.replace("\"tunnel.example\", ", ""));
    wait_until("the rules have changed", || {
        let (_, told) = scene.admin_request("GET", "/status")?;
        told.contains("\"generation\":2").then_some(())
    });
    let name = rustls::pki_types::ServerName::try_from("tunnel.example").unwrap();
    let mut client = rustls::ClientConnection::new(client_config(&scene), name).unwrap();
    while client.wants_write() {
        client.write_tls(&mut early).unwrap();
    }
    let mut answer = Vec::new();
    early.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.first(), Some(&21), "a TLS alert: {answer:?}");
    let refused = scene.wait_for_refusal("not_listed", "tunnel.example");
    assert_eq!(refused["policy"]["version"], "2", "{refused:#}");
    assert_eq!(scene.names.queried_names().len(), asked, "nobody was asked where it is");
}
