//! Every kind of connection loses its permission while it is open: it is cut and recorded, and its neighbour of
//! the same kind goes on (P10).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::client::{head, send, tcp, tls, trusting};
use super::origin::noise;
use super::reload::{echo, write};
use super::scene::{Scene, Setup, host_of, until};
use super::site::importing;

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
const PART: usize = 1000;

trait Wire: Read + Write + Send {}
impl<T: Read + Write + Send> Wire for T {}

/// What is done on a connection, so that it is known to work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// A long answer is being read.
    Download,
    /// What is said comes back.
    Echo,
    /// Requests are answered.
    Requests,
    /// A body is being sent.
    Upload,
}

struct Open {
    what: String,
    wire: Box<dyn Wire>,
    by: Use,
}

impl Open {
    fn new(what: &str, host: &str, mut wire: impl Wire + 'static, by: Use) -> Self {
        match by {
            Use::Download => {
                send(&mut wire, &format!("GET /bytes/{LONG} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
                wire.read_exact(&mut [0; 1000]).unwrap();
            }
            Use::Echo => echoed(&mut wire),
            Use::Requests => answered(&mut wire, host),
            Use::Upload => {
                let length = LONG;
                send(
                    &mut wire,
                    &format!(
                        "POST /echo HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
                    ),
                );
                wire.write_all(&noise(PART)).unwrap();
                wire.flush().unwrap();
            }
        }
        Open { what: format!("{what} to {host}"), wire: Box::new(wire), by }
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

    fn goes_on(mut self, host: &str) {
        match self.by {
            Use::Download => {
                let mut rest = vec![0; LONG - 1000];
                self.wire.read_exact(&mut rest).unwrap();
            }
            Use::Echo => echoed(&mut self.wire),
            Use::Requests => answered(&mut self.wire, host),
            Use::Upload => {
                self.wire.write_all(&noise(LONG)[PART..]).unwrap();
                self.wire.flush().unwrap();
                let said = head(&mut self.wire);
                assert!(said.starts_with("HTTP/1.1 200"), "{}: {said}", self.what);
            }
        }
    }
}

fn echoed(wire: &mut impl Wire) {
    let mut back = [0; 5];
    wire.write_all(b"hello").unwrap();
    wire.flush().unwrap();
    wire.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"hello");
}

fn answered(wire: &mut impl Wire, host: &str) {
    send(wire, &format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    let said = head(wire);
    assert!(said.starts_with("HTTP/1.1 200"), "{host}: {said}");
}

/// A connection to `host` through the explicit listener, by CONNECT or SOCKS5.
fn through(scene: &Scene, host: &str, tongue: &str) -> TcpStream {
    let mut stream = tcp(scene, 0, "10.77.0.1:3128");
    match tongue {
        "CONNECT" => {
            send(&mut stream, &format!("CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n"));
            assert!(head(&mut stream).starts_with("HTTP/1.1 200"));
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
fn open_all(scene: &Scene, web: (&str, &str), tunnel: (&str, &str), raw: &str) -> Vec<Open> {
    let config = trusting(scene);
    let inside = |stream: TcpStream, host: &str| {
        let name = rustls::pki_types::ServerName::try_from(host.to_owned()).unwrap();
        let connection = rustls::ClientConnection::new(config.clone(), name).unwrap();
        rustls::StreamOwned::new(connection, stream)
    };
    let web_tls = || tls(scene, 0, &format!("{}:443", web.1), &config, web.0);
    let mut upgraded = web_tls();
    send(
        &mut upgraded,
        &format!(
            "GET /upgrade HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
            web.0
        ),
    );
    assert!(head(&mut upgraded).starts_with("HTTP/1.1 101"));
    let transparent = tls(scene, 0, &format!("{}:443", tunnel.1), &config, tunnel.0);
    let database = echo(scene, raw);
    let (connect, socks) =
        (through(scene, tunnel.0, "CONNECT"), through(scene, tunnel.0, "SOCKS5"));
    let plain = tcp(scene, 0, &format!("{}:80", web.1));
    vec![
        Open::new("a transparent tunnel", tunnel.0, transparent, Use::Requests),
        Open::new("a tunnel by CONNECT", tunnel.0, inside(connect, tunnel.0), Use::Requests),
        Open::new("a tunnel by SOCKS5", tunnel.0, inside(socks, tunnel.0), Use::Requests),
        Open::new("raw TCP", raw, database, Use::Echo),
        Open::new("a WebSocket", web.0, upgraded, Use::Echo),
        Open::new("a download", web.0, web_tls(), Use::Download),
        Open::new("a download without TLS", web.0, plain, Use::Download),
        Open::new("an upload", web.0, web_tls(), Use::Upload),
    ]
}

fn is_revoked(record: &Value) -> bool {
    record["unmapped"]["sandbar"]["ending"] == "revoked"
}

#[test]
fn p10_each_kind_of_connection_is_cut_and_its_neighbour_is_not() {
    let scene = Scene::with(Setup { policy: POLICY.to_owned(), ..Setup::default() });
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
    until("all are open", || {
        let (_, told) = scene.admin("GET", "/connections")?;
        let told: Value = serde_json::from_str(&told).unwrap();
        (told["open"] == losers.len() + others.len()).then_some(())
    });
    let count = losers.len();
    let fewer = ["open.example", "tunnel.example", "db.example"];
    let policy = fewer
        .iter()
        .fold(POLICY.to_owned(), |text, host| text.replace(&format!("\"{host}\", "), ""));
    write(&scene, &policy);
    for mut open in losers {
        assert!(open.is_cut(), "{} goes on", open.what);
    }
    for open in others {
        let host = open.what.rsplit(' ').next().unwrap().to_owned();
        open.goes_on(&host);
    }
    let revoked = until("all are recorded", || {
        let revoked: Vec<Value> = scene.records().into_iter().filter(is_revoked).collect();
        (revoked.len() >= count).then_some(revoked)
    });
    assert_eq!(revoked.len(), count, "{revoked:#?}");
    for record in &revoked {
        assert!(fewer.contains(&host_of(record)), "{record:#}");
        assert_eq!(record["status_detail"], "not_listed", "{record:#}");
        let bytes = |way: &str| record["traffic"][way].as_u64().unwrap_or_default();
        assert!(bytes("bytes_in") + bytes("bytes_out") > 0, "{record:#}");
    }
    let whole = scene.origin.requests().iter().filter(|seen| seen.line.starts_with("POST")).count();
    assert_eq!(whole, 1, "of the uploads one arrived whole");
}

/// Two streams of one connection, told line by line what becomes of them.
const STREAMS: &str = r#"
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
fn lines_until(
    said: &mut impl Iterator<Item = std::io::Result<String>>,
    start: &str,
) -> Vec<String> {
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
        format!(
            "name = \"p\"\n[[allow]]\nname = \"web\"\nhosts = [\"open.example\"]\npaths = {list}\n"
        )
    };
    let policy = paths(r#"["/steps/lose", "/steps/keep"]"#);
    let scene = Scene::with(Setup { policy, ..Setup::default() });
    let python = importing("h2").expect("python3-h2 is installed");
    let mut command: Command = scene.inside(0, python);
    command.args(["-c", STREAMS]).stdout(Stdio::piped());
    let mut python = command.spawn().unwrap();
    let mut said = BufReader::new(python.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        lines_until(&mut said, "data"); // each has had its first event, and is silent now
    }
    write(&scene, &paths(r#"["/steps/keep"]"#));
    let lines = lines_until(&mut said, "reset");
    assert_eq!(lines, ["reset 1 8"], "RST_STREAM with CANCEL, and nothing else");
    scene.origin.release();
    let lines = lines_until(&mut said, "data 3");
    assert_eq!(lines, ["data 3 ['data:', 'step', '1']"], "its neighbour goes on");
    python.kill().unwrap();
    python.wait().unwrap();
    let revoked = scene.record("the cut", is_revoked);
    assert_eq!(revoked["http_request"]["url"]["path"], "/steps/lose");
    assert_eq!(revoked["status_detail"], "path_not_allowed");
    assert_eq!(scene.records().iter().filter(|record| is_revoked(record)).count(), 1);
}

#[test]
fn p10_what_is_decided_late_is_decided_by_the_rules_of_then() {
    let scene = Scene::with(Setup { policy: POLICY.to_owned(), ..Setup::default() });
    let mut early = tcp(&scene, 0, "93.184.216.36:443"); // accepted, and not a word yet
    let asked = scene.names.asked().len();
    write(&scene, &POLICY.replace("\"tunnel.example\", ", ""));
    until("the rules have changed", || {
        let (_, told) = scene.admin("GET", "/status")?;
        told.contains("\"generation\":2").then_some(())
    });
    let name = rustls::pki_types::ServerName::try_from("tunnel.example").unwrap();
    let mut client = rustls::ClientConnection::new(trusting(&scene), name).unwrap();
    while client.wants_write() {
        client.write_tls(&mut early).unwrap();
    }
    let mut answer = Vec::new();
    early.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.first(), Some(&21), "a TLS alert: {answer:?}");
    let refused = scene.refusal("not_listed", "tunnel.example");
    assert_eq!(refused["policy"]["version"], "2", "{refused:#}");
    assert_eq!(scene.names.asked().len(), asked, "nobody was asked where it is");
}
