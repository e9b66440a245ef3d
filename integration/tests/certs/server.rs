//! A small HTTPS server on loopback that presents one of our leaves.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use certs::{HostName, LeafCache, UnixTime};
use rustls::{ServerConfig, ServerConnection, Stream};

/// No client of ours takes longer to say something.
const PATIENCE: Duration = Duration::from_secs(20);

/// What every request is answered with.
pub(crate) const GREETING: &str = "hello from behind sandbar";

/// Serves `host` until the test ends; an address at that address, a name on loopback.
pub(crate) fn serve(leaves: &LeafCache, host: &str) -> SocketAddr {
    let host = HostName::parse(host).unwrap();
    let leaf = leaves.leaf(&host, UnixTime::now()).unwrap();
    let mut config = ServerConfig::clone(leaf.server_config());
    config.alpn_protocols = vec![b"http/1.1".to_vec()]; // all that is spoken below
    let config = Arc::new(config);
    let at = host.address().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let listener = TcpListener::bind((at, 0)).unwrap_or_else(|error| panic!("{at} is needed: {error}"));
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let config = config.clone();
            std::thread::spawn(move || answer(stream, config));
        }
    });
    address
}

/// A client that refuses us ends the conversation, which is what some tests are about.
fn answer(mut stream: TcpStream, config: Arc<ServerConfig>) -> Option<()> {
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
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
    let length = GREETING.len();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    tls.write_all(head.as_bytes()).ok()?;
    tls.write_all(GREETING.as_bytes()).ok()?;
    connection.send_close_notify();
    connection.complete_io(&mut stream).ok()?;
    Some(())
}
