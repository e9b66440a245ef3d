//! A: a hostile client, asynchronous because it wants thousands of everything.

use std::future::{Future, poll_fn};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{Request, Response};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;

use crate::scene::{Network, PROXY};

/// How long A waits for any one thing before it goes on with the next.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long A goes on building something up.
const LONGEST_BUILD: Duration = Duration::from_secs(6);

pub(crate) type TlsStream = tokio_rustls::client::TlsStream<TcpStream>;

#[derive(Clone)]
pub(crate) struct Attacker {
    network: Network,
    trust: Arc<ClientConfig>,
}

/// One HTTP/2 connection of A's, and whatever it holds open on it.
pub(crate) struct HeldStreams {
    pub(crate) sender: SendRequest<Bytes>,
    target: String,
    /// Sent with every request; after the first an index says each (RFC 7541, 6.1).
    pub(crate) fields: http::HeaderMap,
    responses: Vec<ResponseFuture>,
    bodies: Vec<SendStream<Bytes>>,
    answers: Vec<Response<RecvStream>>,
}

impl Attacker {
    pub(crate) fn new(network: Network, trust: Arc<ClientConfig>) -> Self {
        Attacker { network, trust }
    }

    /// The same client in another sandbox.
    pub(crate) fn in_network(&self, network: Network) -> Self {
        Attacker { network, trust: self.trust.clone() }
    }

    /// A connection to the gateway, with a receive buffer so small that what A does not read stays outside.
    pub(crate) async fn connect(&self) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(16 << 10)?;
        self.network.bind(&socket)?;
        let stream = within(socket.connect(PROXY.parse().unwrap())).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// A tunnel, granted.
    pub(crate) async fn open_tunnel(&self, target: &str) -> io::Result<TcpStream> {
        let mut stream = self.connect().await?;
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let head = within(read_head(&mut stream)).await?;
        if head.starts_with("HTTP/1.1 200 ") { Ok(stream) } else { Err(io::Error::other(head)) }
    }

    /// TLS in a tunnel.
    pub(crate) async fn open_tls(&self, target: &str, protocol: &str) -> io::Result<TlsStream> {
        let mut config = (*self.trust).clone();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let name = ServerName::try_from(target.split(':').next().unwrap().to_owned()).unwrap();
        let tunnel = self.open_tunnel(target).await?;
        within(TlsConnector::from(Arc::new(config)).connect(name, tunnel)).await
    }

    /// HTTP/2 in a tunnel. A never gives back a window, so nothing that comes is ever read.
    pub(crate) async fn open_http2(&self, target: &str) -> io::Result<HeldStreams> {
        self.open_http2_with_window(target, 65_535).await
    }

    /// The same with another window for each stream; with none, not even the body of a refusal can be sent.
    pub(crate) async fn open_http2_with_window(&self, target: &str, window: u32) -> io::Result<HeldStreams> {
        let stream = self.open_tls(target, "h2").await?;
        let mut builder = h2::client::Builder::new();
        builder.initial_max_send_streams(100).max_send_buffer_size(8 << 20).initial_window_size(window);
        let (sender, connection) = within_h2(builder.handshake::<_, Bytes>(stream)).await?;
        tokio::spawn(async move { drop(connection.await) });
        let sender = within_h2(sender.ready()).await?;
        let (responses, bodies, answers) = (Vec::new(), Vec::new(), Vec::new());
        let (target, fields) = (target.to_owned(), http::HeaderMap::new());
        Ok(HeldStreams { sender, target, fields, responses, bodies, answers })
    }

    /// One request on a connection of its own; the status and, if it is a refusal, its reason.
    pub(crate) async fn request(&self, target: &str, request: &str) -> io::Result<(u16, Option<String>)> {
        let mut stream = self.open_tls(target, "http/1.1").await?;
        let text = format!("{request} HTTP/1.1\r\nHost: {target}\r\n\r\n");
        stream.write_all(text.as_bytes()).await?;
        let head = within(read_head(&mut stream)).await?;
        Ok((status_of(&head), reason_of(&head)))
    }
}

impl HeldStreams {
    fn new_request(&self, method: &str, path: &str) -> Request<()> {
        let uri = format!("https://{}{path}", self.target);
        let builder = Request::builder().method(method).uri(uri);
        let mut request = builder.header("content-type", "application/json").body(()).unwrap();
        request.headers_mut().extend(self.fields.clone());
        request
    }

    /// Starts a request; what becomes of it is seen later, if at all.
    pub(crate) async fn start(&mut self, method: &str, path: &str) -> io::Result<()> {
        let request = self.new_request(method, path);
        let unfinished = method == "POST";
        self.sender = within_h2(self.sender.clone().ready()).await?;
        let (response, body) = self.sender.send_request(request, !unfinished).map_err(io::Error::other)?;
        self.responses.push(response);
        if unfinished {
            self.bodies.push(body);
        }
        Ok(())
    }

    /// Sends so many bytes of every body that is open, as far as windows allow, and never the end.
    pub(crate) async fn pour(&mut self, each: usize) {
        let part = Bytes::from(vec![b'x'; 64 << 10]);
        let pours = self.bodies.iter_mut().map(|body| {
            let part = part.clone();
            async move {
                let mut left = each;
                while left > 0 {
                    body.reserve_capacity(part.len().min(left));
                    let granted = poll_fn(|context| body.poll_capacity(context));
                    let Ok(Some(Ok(granted))) = tokio::time::timeout(PATIENCE / 3, granted).await else {
                        break;
                    };
                    let now = part.slice(..granted.min(left).min(part.len()));
                    left -= now.len();
                    if body.send_data(now, false).is_err() {
                        break;
                    }
                }
            }
        });
        join_all(pours).await;
    }

    /// The heads of answers that come in time: status, and the reason of a refusal. Bodies stay unread.
    pub(crate) async fn read_heads(&mut self, patience: Duration) -> Vec<(u16, Option<String>)> {
        let heads = self.responses.drain(..).map(|response| tokio::time::timeout(patience, response));
        let heads = join_all(heads).await;
        self.answers.extend(heads.into_iter().filter_map(|head| head.ok()?.ok()));
        let describe = |answer: &Response<RecvStream>| {
            let reason = answer.headers().get("sandbar-reason").and_then(|reason| reason.to_str().ok());
            (answer.status().as_u16(), reason.map(str::to_owned))
        };
        self.answers.iter().map(describe).collect()
    }
}

/// All of them, one waiting for none of the others.
pub(crate) async fn join_all<F: Future>(all: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = all.into_iter().map(|one| (Box::pin(one), None)).collect();
    poll_fn(|context| {
        let mut waiting = false;
        for (future, done) in all.iter_mut().filter(|(_, done)| done.is_none()) {
            match future.as_mut().poll(context) {
                std::task::Poll::Ready(output) => *done = Some(output),
                std::task::Poll::Pending => waiting = true,
            }
        }
        if waiting { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    all.into_iter().filter_map(|(_, done)| done).collect()
}

/// Runs `make` so many times, some at a time, each in a task of its own, and begins none after a while; what succeeded,
/// and how often it did not.
pub(crate) async fn take<T, F>(count: usize, at_once: usize, make: impl Fn(usize) -> F) -> (Vec<T>, usize)
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    let mut tasks = tokio::task::JoinSet::new();
    let (mut taken, mut failed) = (Vec::new(), 0);
    let mut keep = |done: Result<io::Result<T>, _>| match done {
        Ok(Ok(one)) => taken.push(one),
        Ok(Err(_)) | Err(_) => failed += 1,
    };
    let end = Instant::now() + LONGEST_BUILD;
    let mut begun = 0;
    while begun < count && Instant::now() < end {
        tasks.spawn(make(begun));
        begun += 1;
        if tasks.len() >= at_once {
            keep(tasks.join_next().await.unwrap());
        }
    }
    while let Some(done) = tasks.join_next().await {
        keep(done);
    }
    (taken, failed + count - begun)
}

pub(crate) async fn read_head(stream: &mut (impl AsyncReadExt + Unpin)) -> io::Result<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).await?;
        head.extend(byte);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

pub(crate) fn status_of(head: &str) -> u16 {
    head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default()
}

pub(crate) fn reason_of(head: &str) -> Option<String> {
    let field = head
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("sandbar-reason:").map(str::to_owned));
    field.map(|reason| reason.trim().to_owned())
}

pub(crate) async fn within<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn within_h2<T>(work: impl Future<Output = Result<T, h2::Error>>) -> io::Result<T> {
    within(async { work.await.map_err(io::Error::other) }).await
}
