//! The agent of the story: this very binary, run in a jail, which does what it is told line by line. It has
//! what any program inside has: sockets, names, and the trust files.

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
/// Bytes of a body that are kept; the rest is counted.
const MAX_BODY_KEPT: usize = 64 << 10;
/// Largest head of an answer.
const MAX_HEAD: usize = 64 << 10;
/// Header fields of an answer.
const MAX_FIELDS: usize = 64;
/// Where the roots are, as for any program inside.
const ROOTS_VARIABLE: &str = "SSL_CERT_FILE";

/// The agent that `sandbar demo` runs in its jails
#[derive(clap::Args, Debug)]
pub(crate) struct AgentArgs {}

/// Something to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AgentRequest {
    pub(super) number: u64,
    pub(super) task: AgentTask,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum AgentTask {
    Fetch(FetchRequest),
    /// Looks a name up.
    Look(String),
}

/// One request, and how it lies.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct FetchRequest {
    pub(super) scheme: FetchScheme,
    pub(super) method: String,
    /// The host, as it is looked up and stands in the TLS hello.
    pub(super) host: String,
    pub(super) path: String,
    /// Where to connect to instead of looking the host up.
    pub(super) aim: Option<SocketAddr>,
    /// What stands in `Host` instead.
    pub(super) named: Option<String>,
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

/// What came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AgentReply {
    pub(super) number: u64,
    pub(super) outcome: TaskOutcome,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum TaskOutcome {
    Answered(FetchResponse),
    /// The name has an address.
    Found(String),
    /// There was no answer, and why.
    Nothing(String),
}

/// An answer, be it cut off.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FetchResponse {
    pub(super) status: u16,
    pub(super) fields: Vec<(String, String)>,
    pub(super) body: String,
    pub(super) bytes: u64,
    /// Whether it ended as it should.
    pub(super) whole: bool,
}

impl FetchResponse {
    pub(super) fn field(&self, name: &str) -> Option<&str> {
        let named = |(known, _): &&(String, String)| known.eq_ignore_ascii_case(name);
        self.fields.iter().find(named).map(|(_, value)| value.as_str())
    }
}

/// Obeys until nobody orders any more. Exit status: 0.
pub(crate) fn run_agent(_: &AgentArgs) -> anyhow::Result<ExitCode> {
    let trust = tls_config()?;
    let said = Arc::new(Mutex::new(io::stdout()));
    for line in io::stdin().lock().lines() {
        let order: AgentRequest = serde_json::from_str(&line?)?;
        let (trust, said) = (trust.clone(), said.clone());
        // Each on a thread of its own: a download goes on while the next is ordered.
        std::thread::spawn(move || {
            let reply = AgentReply { number: order.number, outcome: run_task(&order.task, trust) };
            let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
            if let Ok(line) = serde_json::to_string(&reply) {
                drop(writeln!(said, "{line}").and_then(|()| said.flush())); // nobody listens any more
            }
        });
    }
    Ok(ExitCode::SUCCESS)
}

fn tls_config() -> anyhow::Result<Arc<ClientConfig>> {
    let path = std::env::var_os(ROOTS_VARIABLE).context("there are no roots")?;
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

fn run_task(task: &AgentTask, trust: Arc<ClientConfig>) -> TaskOutcome {
    match task {
        AgentTask::Fetch(fetch) => match run_fetch(fetch, trust) {
            Ok(answer) => TaskOutcome::Answered(answer),
            Err(error) => TaskOutcome::Nothing(format!("{error:#}")),
        },
        AgentTask::Look(name) => match resolve_name(name, 0) {
            Ok(found) => TaskOutcome::Found(found.ip().to_string()),
            Err(error) => TaskOutcome::Nothing(format!("{error:#}")),
        },
    }
}

fn resolve_name(name: &str, port: u16) -> anyhow::Result<SocketAddr> {
    let mut found = (name, port).to_socket_addrs().context("the name is not known")?;
    found.next().context("the name has no address")
}

fn run_fetch(fetch: &FetchRequest, trust: Arc<ClientConfig>) -> anyhow::Result<FetchResponse> {
    let port = match fetch.scheme {
        FetchScheme::Http => 80,
        FetchScheme::Https => 443,
    };
    let to = fetch.aim.map_or_else(|| resolve_name(&fetch.host, port), Ok)?;
    let stream = TcpStream::connect_timeout(&to, IO_TIMEOUT).context("cannot connect")?;
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    match fetch.scheme {
        FetchScheme::Http => send_request(fetch, stream),
        FetchScheme::Https => {
            let name = ServerName::try_from(fetch.host.clone())?;
            let connection = ClientConnection::new(trust, name)?;
            send_request(fetch, StreamOwned::new(connection, stream))
        }
    }
}

fn send_request(
    fetch: &FetchRequest,
    mut stream: impl Read + Write,
) -> anyhow::Result<FetchResponse> {
    let FetchRequest { method, path, body, .. } = fetch;
    let host = fetch.named.as_ref().unwrap_or(&fetch.host);
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
    let (head, mut answer) = loop {
        if let Some(found) = parse_head(&bytes)? {
            break found;
        }
        if bytes.len() > MAX_HEAD || read_more(&mut stream, &mut bytes).context("no answer")? == 0 {
            bail!("the connection was closed without an answer");
        }
    };
    let mut body = ResponseBody::for_response(&answer);
    let mut piece = bytes.split_off(head);
    while !body.push(&piece) {
        piece.clear();
        if matches!(read_more(&mut stream, &mut piece), Ok(0) | Err(_)) {
            break; // cut: what came so far is the answer
        }
    }
    (answer.bytes, answer.whole) = (body.bytes, body.is_whole());
    answer.body = String::from_utf8_lossy(&body.kept).into_owned();
    Ok(answer)
}

fn read_more(stream: &mut impl Read, bytes: &mut Vec<u8>) -> io::Result<usize> {
    let mut piece = [0; 4096];
    let read = stream.read(&mut piece)?;
    bytes.extend_from_slice(piece.get(..read).unwrap_or_default());
    Ok(read)
}

/// The length of the head, and what it says; none while it is not all there.
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

/// A body as it arrives.
struct ResponseBody {
    kept: Vec<u8>,
    bytes: u64,
    end: ResponseFraming,
}

/// How it is known where a body ends.
enum ResponseFraming {
    Chunked(ChunkValidator),
    Length(u64),
}

impl ResponseBody {
    fn for_response(answer: &FetchResponse) -> Self {
        let length = answer.field("content-length").and_then(|length| length.parse().ok());
        let chunked = answer.field("transfer-encoding").is_some();
        let end = match (chunked, length) {
            (true, _) => ResponseFraming::Chunked(ChunkValidator::default()),
            (false, length) => ResponseFraming::Length(length.unwrap_or_default()),
        };
        ResponseBody { kept: Vec::new(), bytes: 0, end }
    }

    /// Takes a piece; whether that was the last.
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
