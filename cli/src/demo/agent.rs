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

use proxy::chunks::Chunks;

/// Longest wait for the next byte.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of a body that are kept; the rest is counted.
const KEPT: usize = 64 << 10;
/// Largest head of an answer.
const HEAD: usize = 64 << 10;
/// Header fields of an answer.
const FIELDS: usize = 64;
/// Where the roots are, as for any program inside.
const ROOTS: &str = "SSL_CERT_FILE";

/// The agent that `sandbar demo` runs in its jails
#[derive(clap::Args, Debug)]
pub(crate) struct AgentArgs {}

/// Something to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) number: u64,
    pub(super) task: Task,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Task {
    Fetch(Fetch),
    /// Looks a name up.
    Look(String),
}

/// One request, and how it lies.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Fetch {
    pub(super) scheme: Scheme,
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

impl Fetch {
    pub(super) fn get(host: &str, path: &str) -> Self {
        let (host, path) = (host.to_owned(), path.to_owned());
        Fetch { method: "GET".to_owned(), host, path, ..Fetch::default() }
    }

    pub(super) fn post(host: &str, path: &str) -> Self {
        Fetch { method: "POST".to_owned(), ..Fetch::get(host, path) }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Scheme {
    Http,
    #[default]
    Https,
}

/// What came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Reply {
    pub(super) number: u64,
    pub(super) outcome: Outcome,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Outcome {
    Answered(Answer),
    /// The name has an address.
    Found(String),
    /// There was no answer, and why.
    Nothing(String),
}

/// An answer, be it cut off.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) fields: Vec<(String, String)>,
    pub(super) body: String,
    pub(super) bytes: u64,
    /// Whether it ended as it should.
    pub(super) whole: bool,
}

impl Answer {
    pub(super) fn field(&self, name: &str) -> Option<&str> {
        let named = |(known, _): &&(String, String)| known.eq_ignore_ascii_case(name);
        self.fields.iter().find(named).map(|(_, value)| value.as_str())
    }
}

/// Obeys until nobody orders any more. Exit status: 0.
pub(crate) fn agent(_: &AgentArgs) -> anyhow::Result<ExitCode> {
    let trust = trust()?;
    let said = Arc::new(Mutex::new(io::stdout()));
    for line in io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line?)?;
        let (trust, said) = (trust.clone(), said.clone());
        // Each on a thread of its own: a download goes on while the next is ordered.
        std::thread::spawn(move || {
            let reply = Reply { number: order.number, outcome: obey(&order.task, trust) };
            let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
            if let Ok(line) = serde_json::to_string(&reply) {
                drop(writeln!(said, "{line}").and_then(|()| said.flush())); // nobody listens any more
            }
        });
    }
    Ok(ExitCode::SUCCESS)
}

fn trust() -> anyhow::Result<Arc<ClientConfig>> {
    let path = std::env::var_os(ROOTS).context("there are no roots")?;
    let mut roots = RootCertStore::empty();
    for root in certs::pem::certificates(&std::fs::read(path)?)? {
        roots.add(root)?;
    }
    let builder = ClientConfig::builder_with_provider(certs::provider());
    let builder = builder.with_safe_default_protocol_versions()?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn obey(task: &Task, trust: Arc<ClientConfig>) -> Outcome {
    match task {
        Task::Fetch(fetch) => match fetched(fetch, trust) {
            Ok(answer) => Outcome::Answered(answer),
            Err(error) => Outcome::Nothing(format!("{error:#}")),
        },
        Task::Look(name) => match look(name, 0) {
            Ok(found) => Outcome::Found(found.ip().to_string()),
            Err(error) => Outcome::Nothing(format!("{error:#}")),
        },
    }
}

fn look(name: &str, port: u16) -> anyhow::Result<SocketAddr> {
    let mut found = (name, port).to_socket_addrs().context("the name is not known")?;
    found.next().context("the name has no address")
}

fn fetched(fetch: &Fetch, trust: Arc<ClientConfig>) -> anyhow::Result<Answer> {
    let port = match fetch.scheme {
        Scheme::Http => 80,
        Scheme::Https => 443,
    };
    let to = fetch.aim.map_or_else(|| look(&fetch.host, port), Ok)?;
    let stream = TcpStream::connect_timeout(&to, PATIENCE).context("cannot connect")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    match fetch.scheme {
        Scheme::Http => asked(fetch, stream),
        Scheme::Https => {
            let name = ServerName::try_from(fetch.host.clone())?;
            let connection = ClientConnection::new(trust, name)?;
            asked(fetch, StreamOwned::new(connection, stream))
        }
    }
}

fn asked(fetch: &Fetch, mut stream: impl Read + Write) -> anyhow::Result<Answer> {
    let Fetch { method, path, body, .. } = fetch;
    let host = fetch.named.as_ref().unwrap_or(&fetch.host);
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n");
    for (name, value) in &fetch.fields {
        head += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    stream.write_all(format!("{head}\r\n{body}").as_bytes()).context("cannot send")?;
    answered(stream)
}

fn answered(mut stream: impl Read) -> anyhow::Result<Answer> {
    let mut bytes = Vec::new();
    let (head, mut answer) = loop {
        if let Some(found) = head(&bytes)? {
            break found;
        }
        if bytes.len() > HEAD || more(&mut stream, &mut bytes).context("no answer")? == 0 {
            bail!("the connection was closed without an answer");
        }
    };
    let mut body = Body::of(&answer);
    let mut piece = bytes.split_off(head);
    while !body.take(&piece) {
        piece.clear();
        if matches!(more(&mut stream, &mut piece), Ok(0) | Err(_)) {
            break; // cut: what came so far is the answer
        }
    }
    (answer.bytes, answer.whole) = (body.bytes, body.is_whole());
    answer.body = String::from_utf8_lossy(&body.kept).into_owned();
    Ok(answer)
}

fn more(stream: &mut impl Read, bytes: &mut Vec<u8>) -> io::Result<usize> {
    let mut piece = [0; 4096];
    let read = stream.read(&mut piece)?;
    bytes.extend_from_slice(piece.get(..read).unwrap_or_default());
    Ok(read)
}

/// The length of the head, and what it says; none while it is not all there.
fn head(bytes: &[u8]) -> anyhow::Result<Option<(usize, Answer)>> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut parsed = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(length) = parsed.parse(bytes)? else { return Ok(None) };
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let fields = parsed.headers.iter().map(|field| (field.name.to_owned(), text(field.value)));
    let status = parsed.code.unwrap_or_default();
    let (fields, body) = (fields.collect(), String::new());
    Ok(Some((length, Answer { status, fields, body, bytes: 0, whole: false })))
}

/// A body as it arrives.
struct Body {
    kept: Vec<u8>,
    bytes: u64,
    end: End,
}

/// How it is known where a body ends.
enum End {
    Chunked(Chunks),
    Length(u64),
}

impl Body {
    fn of(answer: &Answer) -> Self {
        let length = answer.field("content-length").and_then(|length| length.parse().ok());
        let chunked = answer.field("transfer-encoding").is_some();
        let end = match (chunked, length) {
            (true, _) => End::Chunked(Chunks::default()),
            (false, length) => End::Length(length.unwrap_or_default()),
        };
        Body { kept: Vec::new(), bytes: 0, end }
    }

    /// Takes a piece; whether that was the last.
    fn take(&mut self, piece: &[u8]) -> bool {
        self.bytes += piece.len() as u64;
        let room = KEPT.saturating_sub(self.kept.len()).min(piece.len());
        self.kept.extend_from_slice(piece.get(..room).unwrap_or_default());
        match &mut self.end {
            End::Chunked(chunks) => chunks.pass(piece).is_err() || chunks.is_done(),
            End::Length(length) => self.bytes >= *length,
        }
    }

    fn is_whole(&self) -> bool {
        match &self.end {
            End::Chunked(chunks) => chunks.is_done(),
            End::Length(length) => self.bytes == *length,
        }
    }
}
