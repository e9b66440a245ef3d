//! The origins that both sandboxes may reach. They are innocent: each does what a path says, for whoever asks.
//!
//! | port | what |
//! | --- | --- |
//! | 53 | a resolver: `*.slow.example` gets no answer |
//! | 8001, 8002, 8007 | HTTP/1, plain, in TLS, and as a memory service |
//! | 8003 | HTTP/2 |
//! | 8004 | raw bytes, sent back |
//! | 8005 | HTTP/2 by hand: a GET is answered with a head that grows, a POST with such a trailer, a body gets no window |
//! | 8006 | raw bytes without end |
//! | 8008 | nobody accepts, and no SYN is answered |

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use rustls::ServerConfig;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;

/// Bytes of a large file.
pub(crate) const LARGE: usize = 10 << 20;
/// What every body consists of.
static PART: [u8; 64 << 10] = [b'x'; 64 << 10];
/// Bytes of a large head of HTTP/1, just below what a client could take for one of Pingora's limits.
const LARGE_HEAD: usize = 900 << 10;

/// Connections that came to the origins, by port.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    now: [AtomicUsize; 9],
    most: [AtomicUsize; 9],
}

fn place(port: u16) -> usize {
    usize::from(port - 8000)
}

impl Arrivals {
    /// Most connections at a time.
    pub(crate) fn most(&self, port: u16) -> usize {
        self.most[place(port)].load(Ordering::SeqCst)
    }

    /// Open connections.
    pub(crate) fn now(&self, port: u16) -> usize {
        self.now[place(port)].load(Ordering::SeqCst)
    }
}

pub(crate) struct Origins {
    pub(crate) arrivals: Arc<Arrivals>,
    _silent: [std::net::TcpStream; 2],
    _unanswered: socket2::Socket,
    runtime: Option<Runtime>,
}

impl Drop for Origins {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Origins {
    pub(crate) fn start(server: ServerConfig) -> Self {
        let runtime = Runtime::new().unwrap();
        let arrivals = Arc::<Arrivals>::default();
        let (plain, hidden) = (|stream| async { Some(stream) }, accept_tls(server.clone(), "http/1.1"));
        let two = accept_tls(server, "h2");
        runtime.block_on(async {
            serve(&arrivals, 8001, plain, serve_http1).await;
            serve(&arrivals, 8002, hidden.clone(), serve_http1).await;
            serve(&arrivals, 8007, hidden, serve_http1).await;
            serve(&arrivals, 8003, two.clone(), serve_http2).await;
            serve(&arrivals, 8004, plain, serve_echo).await;
            serve(&arrivals, 8005, two, serve_frames).await;
            serve(&arrivals, 8006, plain, serve_flood).await;
            let socket = UdpSocket::bind("127.0.0.1:53").await.unwrap();
            tokio::spawn(serve_names(socket));
        });
        let (silent, unanswered) = listen_without_answering(8008);
        Origins { arrivals, _silent: silent, _unanswered: unanswered, runtime: Some(runtime) }
    }
}

type TlsStream = tokio_rustls::server::TlsStream<TcpStream>;
type Accepted<T> = std::pin::Pin<Box<dyn Future<Output = Option<T>> + Send>>;

/// Ends TLS as a server that speaks one protocol.
fn accept_tls(
    mut server: ServerConfig,
    protocol: &str,
) -> impl Fn(TcpStream) -> Accepted<TlsStream> + Clone + Send + Sync + 'static {
    server.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(server));
    move |stream| {
        let handshake = acceptor.accept(stream);
        Box::pin(async { handshake.await.ok() })
    }
}

/// Listens, and serves each connection in a task of its own.
async fn serve<T, A, S>(
    arrivals: &Arc<Arrivals>,
    port: u16,
    accept: impl Fn(TcpStream) -> A + Send + Sync + 'static,
    serve: impl Fn(T) -> S + Send + Sync + Copy + 'static,
) where
    T: Send,
    A: Future<Output = Option<T>> + Send + 'static,
    S: Future<Output = Option<()>> + Send + 'static,
{
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], port)).into()).unwrap();
    socket.listen(4096).unwrap();
    socket.set_nonblocking(true).unwrap();
    let listener = TcpListener::from_std(socket.into()).unwrap();
    let arrivals = arrivals.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let at = place(port);
            let now = arrivals.now[at].fetch_add(1, Ordering::SeqCst) + 1;
            arrivals.most[at].fetch_max(now, Ordering::SeqCst);
            drop(stream.set_nodelay(true));
            let (accepted, arrivals) = (accept(stream), arrivals.clone());
            tokio::spawn(async move {
                if let Some(stream) = accepted.await {
                    serve(stream).await;
                }
                arrivals.now[at].fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
}

/// One request after the other; a path says what becomes of it.
async fn serve_http1(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Option<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            if stream.read_until(b'\n', &mut head).await.ok()? == 0 {
                return None;
            }
        }
        let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
        let path = head.split(' ').nth(1)?;
        if matches!(path, "/hang" | "/sink") {
            let mut end = [0; 1];
            if path == "/hang" {
                drop(stream.read(&mut end).await); // the client goes
                return None;
            }
            std::future::pending::<()>().await;
        }
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let mut body = vec![0; length.unwrap_or_default()];
        stream.read_exact(&mut body).await.ok()?;
        match path {
            "/large" => {
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LARGE}\r\n\r\n");
                stream.write_all(head.as_bytes()).await.ok()?;
                for _ in 0..LARGE / PART.len() {
                    stream.write_all(&PART).await.ok()?;
                }
            }
            "/large-head" => {
                let field = format!("X-Field: {}\r\n", "y".repeat(8 << 10));
                let fields = field.repeat(LARGE_HEAD / field.len());
                let answer = format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 0\r\n\r\n");
                stream.write_all(answer.as_bytes()).await.ok()?;
            }
            "/upgrade" => {
                let answer =
                    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                      Content-Length: 0\r\n\r\n"; // which says nothing of what follows
                stream.write_all(answer).await.ok()?;
                stream.flush().await.ok()?;
                return serve_flood(stream).await;
            }
            "/v1/recall" => {
                let text = String::from_utf8_lossy(&body);
                let filling = if text.contains("large") { "z".repeat(15 << 20) } else { String::new() };
                let hits = format!(r#"{{"hits":[],"trace":"{filling}"}}"#);
                let length = hits.len();
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
                );
                stream.write_all(head.as_bytes()).await.ok()?;
                stream.write_all(hits.as_bytes()).await.ok()?;
            }
            "/close" => {
                let answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello";
                stream.write_all(answer).await.ok()?;
                stream.shutdown().await.ok()?;
                return Some(());
            }
            _ => stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").await.ok()?,
        }
        stream.flush().await.ok()?;
    }
}

/// A listener whose queue is full, so that the kernel drops every further SYN.
fn listen_without_answering(port: u16) -> ([std::net::TcpStream; 2], socket2::Socket) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    socket.bind(&address.into()).unwrap();
    socket.listen(0).unwrap();
    let first = std::net::TcpStream::connect(address).unwrap();
    let second = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    second.set_nonblocking(true).unwrap();
    drop(second.connect(&address.into())); // in progress for ever
    ([first, second.into()], socket)
}

async fn serve_http2(stream: TlsStream) -> Option<()> {
    let mut builder = h2::server::Builder::new();
    builder.max_concurrent_streams(1 << 20); // as many as anybody wants
    let mut connection = builder.handshake::<_, Bytes>(stream).await.ok()?;
    while let Some(Ok((request, respond))) = connection.accept().await {
        tokio::spawn(serve_stream(request, respond));
    }
    Some(())
}

async fn serve_stream(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
) -> Option<()> {
    let path = request.uri().path().to_owned();
    let mut body = request.into_body();
    match path.as_str() {
        "/hang" | "/sink" => {
            std::future::poll_fn(|context| respond.poll_reset(context)).await.ok()?;
        }
        "/large" => {
            let mut answer = respond.send_response(http::Response::new(()), false).ok()?;
            let part = Bytes::from_static(&PART);
            let mut left = LARGE;
            while left > 0 {
                answer.reserve_capacity(part.len().min(left));
                let granted = std::future::poll_fn(|context| answer.poll_capacity(context)).await?.ok()?;
                let now = part.slice(..granted.min(left).min(part.len()));
                left -= now.len();
                answer.send_data(now, left == 0).ok()?;
            }
        }
        _ => {
            while let Some(Ok(data)) = body.data().await {
                body.flow_control().release_capacity(data.len()).ok()?;
            }
            let mut answer = respond.send_response(http::Response::new(()), false).ok()?;
            answer.send_data(Bytes::from_static(b"hello"), true).ok()?;
        }
    }
    Some(())
}

async fn serve_echo(mut stream: TcpStream) -> Option<()> {
    let (mut read, mut write) = stream.split();
    tokio::io::copy(&mut read, &mut write).await.ok().map(drop)
}

async fn serve_flood(mut stream: impl AsyncRead + AsyncWrite + Send + Unpin) -> Option<()> {
    loop {
        stream.write_all(&PART).await.ok()?;
    }
}

/// HTTP/2 by hand. A request without a body is answered with 8 KB that decode to 16 MB: one field in the table (RFC
/// 7541, 6.2.1), then named 4,000 times (6.1). A POST gets them as a trailer. A body gets no window, and no answer.
async fn serve_frames(mut stream: TlsStream) -> Option<()> {
    const HEADERS: u8 = 1;
    const SETTINGS: u8 = 4;
    const PING: u8 = 6;
    const CONTINUATION: u8 = 9;
    const ACK: u8 = 1;
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;
    let mut preface = [0; 24];
    stream.read_exact(&mut preface).await.ok()?;
    // INITIAL_WINDOW_SIZE 0: nobody may send a body before a window is opened, which never happens.
    stream.write_all(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])).await.ok()?;
    const STATUS_OK: u8 = 0x88; // of the static table, as is the method that a request begins with
    const METHOD_POST: u8 = 0x83;
    let mut field = vec![0x40, 3]; // a literal with indexing
    field.extend(b"x-b");
    field.extend([0x7f, 0xa1, 0x1e]); // 4,000 in seven bits and more (5.1)
    field.extend([b'v'; 4000]);
    loop {
        stream.flush().await.ok()?;
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.ok()?;
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).await.ok()?;
        let (kind, flags) = (head[3], head[4]);
        let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        match kind {
            SETTINGS if flags & ACK == 0 => stream.write_all(&frame(SETTINGS, ACK, 0, &[])).await.ok()?,
            PING if flags & ACK == 0 => stream.write_all(&frame(PING, ACK, 0, &payload)).await.ok()?,
            HEADERS if flags & END_STREAM != 0 => {
                let mut first = vec![STATUS_OK];
                if payload.first() == Some(&METHOD_POST) {
                    stream.write_all(&frame(HEADERS, END_HEADERS, id, &first)).await.ok()?;
                    first.clear();
                }
                first.extend(&field);
                stream.write_all(&frame(HEADERS, END_STREAM, id, &first)).await.ok()?;
                stream.write_all(&frame(CONTINUATION, END_HEADERS, id, &[0xbe; 4000])).await.ok()?;
            }
            _ => {}
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Answers every name with loopback, except those that nobody shall learn.
async fn serve_names(socket: UdpSocket) -> Option<()> {
    let mut query = [0; 1500];
    loop {
        let (length, from) = socket.recv_from(&mut query).await.ok()?;
        let query = &query[..length];
        let Some(end) = query.iter().skip(12).position(|byte| *byte == 0) else { continue };
        let question = query.get(12..12 + end + 5)?;
        if question.to_ascii_lowercase().windows(5).any(|label| label == b"\x04slow") {
            continue;
        }
        let mut answer = [&query[..2], &[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0], question].concat();
        match question.get(end + 1..end + 3)? {
            [0, 1] => answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 127, 0, 0, 1]),
            _ => answer[7] = 0,
        }
        drop(socket.send_to(&answer, from).await); // whoever has gone needs no answer
    }
}
