//! The hosts of the world, on every address at once: they write down whoever comes, and what is asked of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use certs::{HostName, LeafCache, UnixTime};
use rustls::ServerConfig;
use rustls::server::Acceptor;
use rustls::sign::SingleCertAndKey;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::LazyConfigAcceptor;

use super::{MEMORY, ObservedRequest, ObservedTraffic};

/// Longest conversation.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest request, head and body.
const MAX_REQUEST: usize = 64 << 10;
/// Header fields of a request.
const MAX_FIELDS: usize = 64;
/// What an endless download sends at a time, and how long it rests in between.
const PIECE: usize = 1000;
const CHUNK_PAUSE: Duration = Duration::from_millis(5);

/// Serves whoever comes; over TLS where there are leaves.
pub(super) async fn serve(
    listener: TcpListener,
    leaves: Option<Arc<LeafCache>>,
    seen: Arc<ObservedTraffic>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        let (leaves, seen) = (leaves.clone(), seen.clone());
        tokio::spawn(async move {
            timeout(CONNECTION_TIMEOUT, handle_connection(stream, leaves, &seen)).await
        });
    }
}

/// One conversation; none of it matters to whoever hangs up.
async fn handle_connection(
    stream: TcpStream,
    leaves: Option<Arc<LeafCache>>,
    seen: &ObservedTraffic,
) -> Option<()> {
    let number = seen.add_connection(stream.local_addr().ok()?);
    let Some(leaves) = leaves else { return handle_request(stream, number, seen).await };
    let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await.ok()?;
    let host = HostName::parse(start.client_hello().server_name()?).ok()?;
    let config = server_config(&leaves, &host)?;
    handle_request(start.into_stream(config).await.ok()?, number, seen).await
}

fn server_config(leaves: &LeafCache, host: &HostName) -> Option<Arc<ServerConfig>> {
    let leaf = leaves.leaf(host, UnixTime::now()).ok()?;
    let key = SingleCertAndKey::from(leaf.certified_key().as_ref().clone());
    let builder = ServerConfig::builder_with_provider(certs::crypto_provider());
    let builder = builder.with_safe_default_protocol_versions().ok()?;
    let mut config = builder.with_no_client_auth().with_cert_resolver(Arc::new(key));
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Some(Arc::new(config))
}

async fn handle_request(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    number: usize,
    seen: &ObservedTraffic,
) -> Option<()> {
    let request = read_request(&mut stream).await?;
    seen.add_request(number, request.clone());
    if request.line.contains(" /endless ") {
        return stream_endless(&mut stream, &request.host, seen).await;
    }
    let (kind, body) = respond(&request);
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.ok()?;
    stream.shutdown().await.ok()
}

fn respond(request: &ObservedRequest) -> (&'static str, String) {
    if request.line.starts_with("POST /v1/recall ") {
        // Like the real one it believes whatever principal it is told.
        let hit = json!({ "content": MEMORY, "bank_id": "staging:team-a", "score": 0.9 });
        return ("application/json", json!({ "hits": [hit] }).to_string());
    }
    if request.line.contains(" /v1/echo ") {
        let fields = request.fields.iter().map(|(name, value)| format!("{name}: {value}\n"));
        return ("text/plain", fields.collect());
    }
    ("text/plain", format!("hello from {}", request.host))
}

/// Sends until somebody has enough.
async fn stream_endless(
    stream: &mut (impl AsyncWrite + Unpin),
    host: &str,
    seen: &ObservedTraffic,
) -> Option<()> {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n\
                Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).await.ok()?;
    let sent = seen.sent_counter(host);
    let piece = format!("{PIECE:x}\r\n{}\r\n", "~".repeat(PIECE));
    while !seen.enough.load(Ordering::Relaxed) {
        stream.write_all(piece.as_bytes()).await.ok()?;
        stream.flush().await.ok()?;
        sent.fetch_add(PIECE as u64, Ordering::Relaxed);
        tokio::time::sleep(CHUNK_PAUSE).await;
    }
    stream.write_all(b"0\r\n\r\n").await.ok()?;
    stream.shutdown().await.ok()
}

async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> Option<ObservedRequest> {
    let mut bytes = Vec::new();
    while bytes.len() < MAX_REQUEST {
        if let Some(request) = parse_request(&bytes) {
            return Some(request);
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    None
}

/// The request, once all of it is there.
fn parse_request(bytes: &[u8]) -> Option<ObservedRequest> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut head = httparse::Request::new(&mut fields);
    let httparse::Status::Complete(length) = head.parse(bytes).ok()? else { return None };
    let line = format!("{} {} ", head.method?, head.path?);
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let fields: Vec<(String, String)> = head
        .headers
        .iter()
        .map(|field| (field.name.to_ascii_lowercase(), text(field.value)))
        .collect();
    let field = |name: &str| fields.iter().find(|(known, _)| known == name).map(|(_, value)| value);
    let host = field("host").cloned().unwrap_or_default();
    let wanted = field("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let body = bytes.get(length..).unwrap_or_default();
    (body.len() >= wanted).then_some(ObservedRequest { host, line, fields })
}
