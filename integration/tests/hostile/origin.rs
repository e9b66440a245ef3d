//! Origins that write down every byte they are sent, and answer as the test wants.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::instance::{DEADLINE, wait_until};
use crate::strict_http::{self, StrictRequest};
use crate::wire::ByteStream;

/// What an origin does with a request.
#[derive(Clone, Debug)]
pub(crate) enum OriginReply {
    /// Says what it saw: method, target and body.
    Echo,
    /// Sends these bytes and goes on.
    Say(Vec<u8>),
    /// Sends these bytes and closes.
    SayAndClose(Vec<u8>),
    /// Sends these bytes and nothing more, until the other side gives up.
    SayAndHang(Vec<u8>),
}

/// One connection as the origin saw it.
#[derive(Clone, Debug, Default)]
pub(crate) struct SeenConnection {
    pub(crate) bytes: Vec<u8>,
    /// What made it unreadable, if anything did.
    pub(crate) fault: Option<String>,
    /// Bytes of a request that was never finished.
    pub(crate) partial: Vec<u8>,
    pub(crate) over: bool,
}

/// All that came, in the order in which it came.
#[derive(Debug, Default)]
struct OriginLog {
    connections: Vec<SeenConnection>,
    /// Whole requests, each with the number of its connection.
    requests: Vec<(usize, StrictRequest)>,
}

type SharedOriginLog = Arc<Mutex<OriginLog>>;

/// An origin on loopback.
pub(crate) struct ScriptedOrigin {
    pub(crate) address: SocketAddr,
    connections: SharedOriginLog,
    act: Arc<Mutex<OriginReply>>,
}

impl ScriptedOrigin {
    pub(crate) fn start_plain() -> Self {
        ScriptedOrigin::start(None)
    }

    pub(crate) fn start_tls(config: Arc<ServerConfig>) -> Self {
        ScriptedOrigin::start(Some(config))
    }

    fn start(tls: Option<Arc<ServerConfig>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let origin = ScriptedOrigin {
            address: listener.local_addr().unwrap(),
            connections: SharedOriginLog::default(),
            act: Arc::new(Mutex::new(OriginReply::Echo)),
        };
        let (connections, act) = (origin.connections.clone(), origin.act.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (connections, act, tls) = (connections.clone(), act.clone(), tls.clone());
                std::thread::spawn(move || serve_connection(stream, tls, &connections, &act));
            }
        });
        origin
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// What is done with every request from now on.
    pub(crate) fn set_reply(&self, act: OriginReply) {
        *self.act.lock().unwrap() = act;
    }

    pub(crate) fn connections(&self) -> Vec<SeenConnection> {
        self.connections.lock().unwrap().connections.clone()
    }

    /// Every request so far.
    pub(crate) fn requests(&self) -> Vec<StrictRequest> {
        self.numbered_requests().into_iter().map(|(_, request)| request).collect()
    }

    /// Every request so far, with the number of the connection that carried it.
    pub(crate) fn numbered_requests(&self) -> Vec<(usize, StrictRequest)> {
        self.connections.lock().unwrap().requests.clone()
    }

    pub(crate) fn faults(&self) -> Vec<String> {
        self.connections().into_iter().filter_map(|seen| seen.fault).collect()
    }

    /// Waits until `done` holds for what was seen.
    pub(crate) fn wait_until(&self, what: &str, done: impl Fn(&[SeenConnection]) -> bool) {
        wait_until(what, || done(&self.connections.lock().unwrap().connections));
    }
}

fn serve_connection(
    stream: TcpStream,
    tls: Option<Arc<ServerConfig>>,
    connections: &SharedOriginLog,
    act: &Mutex<OriginReply>,
) {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.set_nodelay(true).unwrap();
    let at = {
        let mut connections = connections.lock().unwrap();
        connections.connections.push(SeenConnection::default());
        connections.connections.len() - 1
    };
    let raw = stream.try_clone().unwrap();
    match tls {
        None => {
            let mut stream = stream;
            serve_requests(&mut stream, connections, at, act);
        }
        Some(config) => {
            let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
            serve_requests(&mut stream, connections, at, act);
            stream.conn.send_close_notify(); // whoever reads to the end shall know that it is
            drop(stream.flush());
        }
    }
    drop(raw.shutdown(Shutdown::Both)); // the other end has gone, or is to go
    connections.lock().unwrap().connections[at].over = true;
}

fn serve_requests(
    carrier: &mut dyn ByteStream,
    connections: &SharedOriginLog,
    at: usize,
    act: &Mutex<OriginReply>,
) {
    let mut buffer = [0; 64 << 10];
    let started = Instant::now();
    while started.elapsed() < DEADLINE * 4 {
        let count = carrier.read(&mut buffer).unwrap_or(0);
        let answers = log_bytes(&buffer[..count], &mut connections.lock().unwrap(), at, act);
        if count == 0 {
            return;
        }
        for answer in answers {
            let bytes = match &answer {
                OriginReply::Echo => unreachable!("an echo is made where the request is"),
                OriginReply::Say(bytes)
                | OriginReply::SayAndClose(bytes)
                | OriginReply::SayAndHang(bytes) => bytes,
            };
            if carrier.write_all(bytes).and_then(|()| carrier.flush()).is_err() {
                return;
            }
            match answer {
                OriginReply::SayAndClose(_) => return,
                OriginReply::SayAndHang(_) => {
                    while carrier.read(&mut buffer).unwrap_or(0) > 0 {}
                    return;
                }
                OriginReply::Echo | OriginReply::Say(_) => {}
            }
        }
    }
}

/// Writes bytes down; what is to be done about the requests that they complete.
fn log_bytes(bytes: &[u8], notes: &mut OriginLog, at: usize, act: &Mutex<OriginReply>) -> Vec<OriginReply> {
    let OriginLog { connections, requests } = notes;
    let seen = &mut connections[at];
    seen.bytes.extend_from_slice(bytes);
    seen.partial.extend_from_slice(bytes);
    let mut answers = Vec::new();
    while seen.fault.is_none() {
        match strict_http::parse_request(&seen.partial) {
            strict_http::StrictParse::Partial => break,
            strict_http::StrictParse::Malformed(fault) => {
                seen.fault = Some(fault);
                answers.push(OriginReply::SayAndClose(
                    b"HTTP/1.1 500 Malformed\r\nContent-Length: 0\r\n\r\n".to_vec(),
                ));
            }
            strict_http::StrictParse::Whole(request, length) => {
                seen.partial.drain(..length);
                answers.push(match act.lock().unwrap().clone() {
                    OriginReply::Echo => OriginReply::Say(echo_response(&request)),
                    said @ (OriginReply::Say(_)
                    | OriginReply::SayAndClose(_)
                    | OriginReply::SayAndHang(_)) => said,
                });
                requests.push((at, request));
            }
        }
    }
    answers
}

fn echo_response(request: &StrictRequest) -> Vec<u8> {
    let body = String::from_utf8_lossy(&request.body);
    let said = format!("{} {} {body}", request.method, request.target);
    let shown = if request.method == "HEAD" { "" } else { &said };
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{shown}", said.len()).into_bytes()
}
