//! The agent of the demo: this binary, run in a jail, executes tasks that it reads line by line. It has what any
//! program inside has: sockets, DNS and the trust files.

use std::io::{self, BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde::{Deserialize, Serialize};

use proxy::chunks::ChunkValidator;

/// Longest wait for the next byte.
const IO_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of a body kept; the rest is only counted.
const MAX_BODY_KEPT: usize = 64 << 10;
/// Largest response head.
const MAX_HEAD: usize = 64 << 10;
/// Maximum number of header fields in a response.
const MAX_FIELDS: usize = 64;
/// Variable with the path of the trusted roots, as for any program inside.
const ROOTS_VARIABLE: &str = "SSL_CERT_FILE";

/// The agent that `sandbar demo` runs in its jails
#[derive(clap::Args, Debug)]
pub(crate) struct AgentArgs {}

/// A numbered task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AgentRequest {
    pub(super) number: u64,
    pub(super) task: AgentTask,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum AgentTask {
    Fetch(FetchRequest),
    /// Resolves a name.
    Look(String),
}

/// One HTTP request, with the ways in which it can lie.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct FetchRequest {
    pub(super) scheme: FetchScheme,
    pub(super) method: String,
    /// Host to resolve and to send as SNI.
    pub(super) host: String,
    pub(super) path: String,
    /// Address to connect to instead of resolving the host.
    pub(super) connect_to: Option<SocketAddr>,
    /// Value of `Host`, if not the host.
    pub(super) host_header: Option<String>,
    pub(super) fields: Vec<(String, String)>,
    pub(super) body: String,
}

impl FetchRequest {
    pub(super) fn get(host: &str, path: &str) -> Self {
        let (host, path) = (host.to_owned(), path.to_owned());
        FetchRequest { method: "GET".to_owned(), host, path, ..FetchRequest::default() }
    }

    pub(super) fn post(host: &str, path: &str) -> Self {
        FetchRequest { method: "POST".to_owned(), ..FetchRequest::get(host, path) }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FetchScheme {
    Http,
    #[default]
    Https,
}

/// The outcome of a task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AgentReply {
    pub(super) number: u64,
    pub(super) outcome: TaskOutcome,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum TaskOutcome {
    Answered(FetchResponse),
    /// The name resolved to this address.
    Found(String),
    /// There was no response, for this reason.
    Nothing(String),
}

/// A response, possibly cut off.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FetchResponse {
    pub(super) status: u16,
    pub(super) fields: Vec<(String, String)>,
    pub(super) body: String,
    pub(super) bytes: u64,
    /// Whether the body is complete.
    pub(super) whole: bool,
}

impl FetchResponse {
    pub(super) fn field(&self, name: &str) -> Option<&str> {
        let named = |(known, _): &&(String, String)| known.eq_ignore_ascii_case(name);
        self.fields.iter().find(named).map(|(_, value)| value.as_str())
    }
}

/// Executes tasks until stdin is closed. Exit status: 0.
pub(crate) fn run_agent(_: &AgentArgs) -> anyhow::Result<ExitCode> {
    let tls = tls_config()?;
    let stdout = Arc::new(Mutex::new(io::stdout()));
    for line in io::stdin().lock().lines() {
        let request: AgentRequest = serde_json::from_str(&line?)?;
        let (tls, stdout) = (tls.clone(), stdout.clone());
        // A thread per task, so that a download can run while the next task starts.
        std::thread::spawn(move || {
            let reply = AgentReply { number: request.number, outcome: run_task(&request.task, tls) };
            let mut stdout = stdout.lock().unwrap_or_else(PoisonError::into_inner);
            if let Ok(line) = serde_json::to_string(&reply) {
                drop(writeln!(stdout, "{line}").and_then(|()| stdout.flush())); // the demo has ended
            }
        });
    }
    Ok(ExitCode::SUCCESS)
}

fn tls_config() -> anyhow::Result<Arc<ClientConfig>> {
    let path = std::env::var_os(ROOTS_VARIABLE).context("SSL_CERT_FILE is not set")?;
    let mut roots = RootCertStore::empty();
    for root in certs::pem::certificates(&std::fs::read(path)?)? {
        roots.add(root)?;
    }
    let builder = ClientConfig::builder_with_provider(certs::crypto_provider());
    let builder = builder.with_safe_default_protocol_versions()?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn run_task(task: &AgentTask, tls: Arc<ClientConfig>) -> TaskOutcome {
    match task {
        AgentTask::Fetch(fetch) => match run_fetch(fetch, tls) {
            Ok(response) => TaskOutcome::Answered(response),
            Err(error) => TaskOutcome::Nothing(format!("{error:#}")),
        },
        AgentTask::Look(name) => match resolve_name(name, 0) {
            Ok(address) => TaskOutcome::Found(address.ip().to_string()),
            Err(error) => TaskOutcome::Nothing(format!("{error:#}")),
        },
    }
}

fn resolve_name(name: &str, port: u16) -> anyhow::Result<SocketAddr> {
    let mut addresses = (name, port).to_socket_addrs().context("cannot resolve the name")?;
    addresses.next().context("the name has no address")
}

fn run_fetch(fetch: &FetchRequest, tls: Arc<ClientConfig>) -> anyhow::Result<FetchResponse> {
    let port = match fetch.scheme {
        FetchScheme::Http => 80,
        FetchScheme::Https => 443,
    };
    let to = fetch.connect_to.map_or_else(|| resolve_name(&fetch.host, port), Ok)?;
    let stream = TcpStream::connect_timeout(&to, IO_TIMEOUT).context("cannot connect")?;
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    match fetch.scheme {
        FetchScheme::Http => send_request(fetch, stream),
        FetchScheme::Https => {
            let name = ServerName::try_from(fetch.host.clone())?;
            let connection = ClientConnection::new(tls, name)?;
            send_request(fetch, StreamOwned::new(connection, stream))
        }
    }
}

fn send_request(fetch: &FetchRequest, mut stream: impl Read + Write) -> anyhow::Result<FetchResponse> {
    let FetchRequest { method, path, body, .. } = fetch;
    let host = fetch.host_header.as_ref().unwrap_or(&fetch.host);
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n");
    for (name, value) in &fetch.fields {
        head += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    stream.write_all(format!("{head}\r\n{body}").as_bytes()).context("cannot send")?;
    read_response(stream)
}

fn read_response(mut stream: impl Read) -> anyhow::Result<FetchResponse> {
    let mut bytes = Vec::new();
    let (head, mut response) = loop {
        if let Some(found) = parse_head(&bytes)? {
            break found;
        }
        if bytes.len() > MAX_HEAD || read_more(&mut stream, &mut bytes).context("no response")? == 0 {
            bail!("the connection was closed without a response");
        }
    };
    let mut body = ResponseBody::for_response(&response);
    let mut piece = bytes.split_off(head);
    while !body.push(&piece) {
        piece.clear();
        if matches!(read_more(&mut stream, &mut piece), Ok(0) | Err(_)) {
            break; // cut: return what has arrived so far
        }
    }
    (response.bytes, response.whole) = (body.bytes, body.is_whole());
    response.body = String::from_utf8_lossy(&body.kept).into_owned();
    Ok(response)
}

fn read_more(stream: &mut impl Read, bytes: &mut Vec<u8>) -> io::Result<usize> {
    let mut piece = [0; 4096];
    let read = stream.read(&mut piece)?;
    bytes.extend_from_slice(piece.get(..read).unwrap_or_default());
    Ok(read)
}

/// Returns the length of the head and the parsed response, or `None` while the head is incomplete.
fn parse_head(bytes: &[u8]) -> anyhow::Result<Option<(usize, FetchResponse)>> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(length) = parsed.parse(bytes)? else { return Ok(None) };
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let fields = parsed.headers.iter().map(|field| (field.name.to_owned(), text(field.value)));
    let status = parsed.code.unwrap_or_default();
    let (fields, body) = (fields.collect(), String::new());
    Ok(Some((length, FetchResponse { status, fields, body, bytes: 0, whole: false })))
}

/// A body being received.
struct ResponseBody {
    kept: Vec<u8>,
    bytes: u64,
    end: ResponseFraming,
}

/// How the end of a body is determined.
enum ResponseFraming {
    Chunked(ChunkValidator),
    Length(u64),
}

impl ResponseBody {
    fn for_response(response: &FetchResponse) -> Self {
        let length = response.field("content-length").and_then(|length| length.parse().ok());
        let chunked = response.field("transfer-encoding").is_some();
        let end = match (chunked, length) {
            (true, _) => ResponseFraming::Chunked(ChunkValidator::default()),
            (false, length) => ResponseFraming::Length(length.unwrap_or_default()),
        };
        ResponseBody { kept: Vec::new(), bytes: 0, end }
    }

    /// Adds a piece; returns whether the body is complete or invalid.
    fn push(&mut self, piece: &[u8]) -> bool {
        self.bytes += piece.len() as u64;
        let room = MAX_BODY_KEPT.saturating_sub(self.kept.len()).min(piece.len());
        self.kept.extend_from_slice(piece.get(..room).unwrap_or_default());
        match &mut self.end {
            ResponseFraming::Chunked(chunks) => chunks.validate(piece).is_err() || chunks.is_done(),
            ResponseFraming::Length(length) => self.bytes >= *length,
        }
    }

    fn is_whole(&self) -> bool {
        match &self.end {
            ResponseFraming::Chunked(chunks) => chunks.is_done(),
            ResponseFraming::Length(length) => self.bytes == *length,
        }
    }
}
