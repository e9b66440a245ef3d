//! The hosts of the fake internet, on every address at once: they record every connection and request.

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

/// Longest lifetime of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest request, head and body.
const MAX_REQUEST: usize = 64 << 10;
/// Maximum number of header fields in a request.
const MAX_FIELDS: usize = 64;
/// Chunk size of an endless download, and the pause between chunks.
const CHUNK: usize = 1000;
const CHUNK_PAUSE: Duration = Duration::from_millis(5);

/// Accepts connections; speaks TLS if there are leaf certificates.
pub(super) async fn serve(
    listener: TcpListener,
    leaves: Option<Arc<LeafCache>>,
    observed: Arc<ObservedTraffic>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        let (leaves, observed) = (leaves.clone(), observed.clone());
        tokio::spawn(async move {
            timeout(CONNECTION_TIMEOUT, handle_connection(stream, leaves, &observed)).await
        });
    }
}

/// Handles one connection; ignores errors, since clients may hang up.
async fn handle_connection(
    stream: TcpStream,
    leaves: Option<Arc<LeafCache>>,
    observed: &ObservedTraffic,
) -> Option<()> {
    let number = observed.add_connection(stream.local_addr().ok()?);
    let Some(leaves) = leaves else { return handle_request(stream, number, observed).await };
    let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await.ok()?;
    let host = HostName::parse(start.client_hello().server_name()?).ok()?;
    let config = server_config(&leaves, &host)?;
    handle_request(start.into_stream(config).await.ok()?, number, observed).await
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
    observed: &ObservedTraffic,
) -> Option<()> {
    let request = read_request(&mut stream).await?;
    observed.add_request(number, request.clone());
    if request.line.contains(" /endless ") {
        return stream_endless(&mut stream, &request.host, observed).await;
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
        // Like the real service, it trusts the principal that the proxy sends.
        let hit = json!({ "content": MEMORY, "bank_id": "staging:team-a", "score": 0.9 });
        return ("application/json", json!({ "hits": [hit] }).to_string());
    }
    if request.line.contains(" /v1/echo ") {
        let fields = request.fields.iter().map(|(name, value)| format!("{name}: {value}\n"));
        return ("text/plain", fields.collect());
    }
    ("text/plain", format!("hello from {}", request.host))
}

/// Streams chunks until `stop_streaming` is set.
async fn stream_endless(
    stream: &mut (impl AsyncWrite + Unpin),
    host: &str,
    observed: &ObservedTraffic,
) -> Option<()> {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n\
                Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).await.ok()?;
    let sent = observed.sent_counter(host);
    let chunk = format!("{CHUNK:x}\r\n{}\r\n", "~".repeat(CHUNK));
    while !observed.stop_streaming.load(Ordering::Relaxed) {
        stream.write_all(chunk.as_bytes()).await.ok()?;
        stream.flush().await.ok()?;
        sent.fetch_add(CHUNK as u64, Ordering::Relaxed);
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

/// Parses the request once it is complete.
fn parse_request(bytes: &[u8]) -> Option<ObservedRequest> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut head = httparse::Request::new(&mut fields);
    let httparse::Status::Complete(length) = head.parse(bytes).ok()? else { return None };
    let line = format!("{} {} ", head.method?, head.path?);
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let fields: Vec<(String, String)> =
        head.headers.iter().map(|field| (field.name.to_ascii_lowercase(), text(field.value))).collect();
    let field = |name: &str| fields.iter().find(|(known, _)| known == name).map(|(_, value)| value);
    let host = field("host").cloned().unwrap_or_default();
    let expected = field("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let body = bytes.get(length..).unwrap_or_default();
    (body.len() >= expected).then_some(ObservedRequest { host, line, fields })
}
