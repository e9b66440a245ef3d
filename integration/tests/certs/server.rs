//! A small HTTPS server on loopback that presents one of our leaves.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use certs::{HostName, LeafCache, UnixTime};
use rustls::{ServerConfig, ServerConnection, Stream};

/// No client of ours takes longer to say something.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// What every request is answered with.
pub(crate) const GREETING: &str = "hello from behind sandbar";

/// Serves one name until the test ends.
pub(crate) struct LeafServer {
    pub(crate) address: SocketAddr,
    requests: Arc<AtomicUsize>,
}

impl LeafServer {
    /// Serves `host` with a leaf of its own: an address at that address, a name on loopback.
    pub(crate) fn start(leaves: &LeafCache, host: &str) -> Self {
        let host = HostName::parse(host).unwrap();
        let leaf = leaves.leaf(&host, UnixTime::now()).unwrap();
        let mut config = ServerConfig::clone(leaf.server_config());
        config.alpn_protocols = vec![b"http/1.1".to_vec()]; // all that is spoken below
        let at = host.address().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let listener = TcpListener::bind((at, 0)).unwrap_or_else(|error| panic!("{at} is needed: {error}"));
        let server = Self { address: listener.local_addr().unwrap(), requests: Arc::default() };
        let (config, requests) = (Arc::new(config), server.requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (config, requests) = (config.clone(), requests.clone());
                std::thread::spawn(move || serve_connection(stream, config, &requests));
            }
        });
        server
    }

    /// How many requests have come through the handshake.
    pub(crate) fn request_count(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

/// A client that refuses us ends the conversation, which is what some tests are about.
fn serve_connection(mut stream: TcpStream, config: Arc<ServerConfig>, requests: &AtomicUsize) -> Option<()> {
    stream.set_read_timeout(Some(READ_TIMEOUT)).ok()?;
    let mut connection = ServerConnection::new(config).ok()?;
    let mut tls = Stream::new(&mut connection, &mut stream);
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        match tls.read(&mut buffer).ok()? {
            0 => return None,
            read => request.extend_from_slice(&buffer[..read]),
        }
    }
    requests.fetch_add(1, Ordering::SeqCst);
    tls.write_all(greeting_response().as_bytes()).ok()?;
    connection.send_close_notify();
    connection.complete_io(&mut stream).ok()?;
    Some(())
}

fn greeting_response() -> String {
    let length = GREETING.len();
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{GREETING}"
    )
}
