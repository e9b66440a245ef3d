//! The origin: every host of the world on every address, recording what arrives. It speaks HTTP/1.1 plain and
//! over TLS, and raw TCP; what it does is said by the path.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::net::NetNamespace;

/// No client of ours is silent for longer.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Ports of plain HTTP, of TLS, of TLS under a certificate that nobody believes, of an echo, and of a
/// server that speaks first.
pub(crate) const PLAIN_PORT: u16 = 80;
pub(crate) const TLS_PORT: u16 = 443;
pub(crate) const UNTRUSTED_PORT: u16 = 9443;
pub(crate) const ECHO: u16 = 5432;
pub(crate) const BANNER: u16 = 2525;
/// What a server that speaks first says.
pub(crate) const GREETING: &[u8] = b"220 ready\r\n";

/// A memory call with this in its body is not answered.
const HANG: &[u8] = b"hang";

/// One request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct ArrivedRequest {
    /// The address it was sent to.
    pub(crate) at: SocketAddr,
    pub(crate) sni: Option<String>,
    pub(crate) line: String,
    pub(crate) fields: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl ArrivedRequest {
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let named = |field: &&(String, String)| field.0.eq_ignore_ascii_case(name);
        self.fields.iter().find(named).map(|(_, value)| value.as_str())
    }

    fn path(&self) -> &str {
        self.line.split(' ').nth(1).unwrap_or_default()
    }
}

#[derive(Debug, Default)]
struct TestOriginState {
    requests: Mutex<Vec<ArrivedRequest>>,
    raw: Mutex<Vec<(SocketAddr, Vec<u8>)>>,
    /// How many times those who wait were let go on.
    released: Mutex<usize>,
    release: Condvar,
}

/// A certificate for every name of the tests, and the root it is believed by.
pub(crate) struct TestCertificate {
    pub(crate) root: String,
    pub(crate) chain: String,
    pub(crate) key: String,
    config: Arc<ServerConfig>,
}

impl TestCertificate {
    pub(crate) fn new(names: impl Iterator<Item = String>) -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, "root of the tests");
        let root = params.self_signed(&key).unwrap();
        let issuer = rcgen::Issuer::new(params, key);
        let leaf_key = rcgen::KeyPair::generate().unwrap();
        let mut leaf = rcgen::CertificateParams::new(names.collect::<Vec<_>>()).unwrap();
        leaf.distinguished_name.push(rcgen::DnType::CommonName, "origin of the tests");
        let leaf = leaf.signed_by(&leaf_key, &issuer).unwrap();
        let der = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(leaf_key.serialize_der()));
        let provider = certs::crypto_provider();
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], der)
            .unwrap();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        TestCertificate {
            root: certs::pem::encode_certificate(root.der()),
            chain: certs::pem::encode_certificate(leaf.der()),
            key: certs::pem::encode_private_key(&leaf_key.serialize_der()).to_string(),
            config: Arc::new(config),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct TestOrigin(Arc<TestOriginState>);

impl TestOrigin {
    pub(crate) fn start(world: &NetNamespace, minted: &TestCertificate) -> Self {
        let origin = TestOrigin(Arc::default());
        let false_one = TestCertificate::new(std::iter::once("false.example".to_owned())).config;
        for (port, config) in [
            (PLAIN_PORT, None),
            (8080, None),
            (TLS_PORT, Some(minted.config.clone())),
            (8443, Some(minted.config.clone())),
            (UNTRUSTED_PORT, Some(false_one)),
        ] {
            origin.listen(world, port, move |inner, stream| match config.clone() {
                Some(config) => {
                    let at = stream.local_addr()?;
                    let connection = ServerConnection::new(config).map_err(io::Error::other)?;
                    let mut tls = StreamOwned::new(connection, stream);
                    tls.flush()?;
                    while tls.conn.is_handshaking() {
                        tls.conn.complete_io(&mut tls.sock)?;
                    }
                    let sni = tls.conn.server_name().map(str::to_owned);
                    inner.serve_http(&mut tls, at, sni.as_deref())
                }
                None => {
                    let at = stream.local_addr()?;
                    inner.serve_http(&mut &stream, at, None)
                }
            });
        }
        origin.listen(world, ECHO, |inner, stream| inner.serve_echo(&stream, b""));
        origin.listen(world, BANNER, |inner, stream| inner.serve_echo(&stream, GREETING));
        origin
    }

    fn listen(
        &self,
        world: &NetNamespace,
        port: u16,
        serve: impl Fn(&TestOriginState, TcpStream) -> io::Result<()> + Clone + Send + 'static,
    ) {
        for any in ["0.0.0.0", "::"] {
            let listener = world.enter(|| bind_listener(any, port));
            let (inner, serve) = (self.0.clone(), serve.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let (inner, serve) = (inner.clone(), serve.clone());
                    std::thread::spawn(move || {
                        stream.set_read_timeout(Some(READ_TIMEOUT))?;
                        serve(&inner, stream)
                    });
                }
            });
        }
    }

    pub(crate) fn requests(&self) -> Vec<ArrivedRequest> {
        self.0.requests.lock().unwrap().clone()
    }

    /// What came to raw ports, by the address it was sent to.
    pub(crate) fn raw_connections(&self) -> Vec<(SocketAddr, Vec<u8>)> {
        self.0.raw.lock().unwrap().clone()
    }

    /// Lets those go on that wait at `/step`, once.
    pub(crate) fn release_step(&self) {
        *self.0.released.lock().unwrap() += 1;
        self.0.release.notify_all();
    }
}

fn bind_listener(any: &str, port: u16) -> TcpListener {
    let domain = if any.contains(':') { socket2::Domain::IPV6 } else { socket2::Domain::IPV4 };
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None).unwrap();
    if any.contains(':') {
        socket.set_only_v6(true).unwrap();
    }
    socket.set_reuse_address(true).unwrap();
    let address = SocketAddr::new(any.parse().unwrap(), port);
    socket.bind(&address.into()).unwrap_or_else(|error| panic!("{address}: {error}"));
    socket.listen(1024).unwrap();
    socket.into()
}

impl TestOriginState {
    /// Serves requests until the connection ends.
    fn serve_http(
        &self,
        stream: &mut (impl Read + Write),
        at: SocketAddr,
        sni: Option<&str>,
    ) -> io::Result<()> {
        let mut ahead = Vec::new();
        while let Some(request) = read_request(stream, &mut ahead, at, sni)? {
            let path = request.path().to_owned();
            let body = request.body.clone();
            self.requests.lock().unwrap().push(request);
            match path.split('/').nth(1).unwrap_or_default() {
                "hang" => {
                    drop(stream.read(&mut [0])); // until the other side loses patience
                    return Ok(());
                }
                "echo" => send_response(stream, "application/octet-stream", &body)?,
                "bytes" => {
                    let count = path.rsplit('/').next().unwrap_or_default().parse();
                    send_response(
                        stream,
                        "application/octet-stream",
                        &noise_bytes(count.unwrap_or_default()),
                    )?;
                }
                "interim" => {
                    send_interim(stream)?;
                    send_response(stream, "text/plain", b"done")?;
                }
                "steps" => self.send_steps(stream)?,
                "upgrade" => return serve_upgrade(stream),
                "v1" if body.windows(HANG.len()).any(|part| part == HANG) => {
                    drop(stream.read(&mut [0])); // as above, for a memory call
                    return Ok(());
                }
                "v1" => send_response(stream, "application/json", br#"{"hits":[]}"#)?,
                _ => send_response(stream, "text/plain", format!("hello from {at}\n").as_bytes())?,
            }
        }
        Ok(())
    }

    /// Server-sent events: one at once, and one each time somebody says so, three in all.
    fn send_steps(&self, stream: &mut impl Write) -> io::Result<()> {
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes())?;
        let before = *self.released.lock().unwrap();
        for step in 0..3 {
            let released = self.released.lock().unwrap();
            let still = |released: &mut usize| *released < before + step;
            let waited = self.release.wait_timeout_while(released, READ_TIMEOUT, still);
            drop(waited.unwrap());
            let event = format!("data: step {step}\n\n");
            write!(stream, "{:x}\r\n{event}\r\n", event.len())?;
            stream.flush()?;
        }
        stream.write_all(b"0\r\n\r\n")?;
        stream.flush()
    }

    /// Says `first`, then sends everything back, and ends when the other side has.
    fn serve_echo(&self, mut stream: &TcpStream, first: &[u8]) -> io::Result<()> {
        let at = stream.local_addr()?;
        let slot = {
            let mut raw = self.raw.lock().unwrap();
            raw.push((at, Vec::new()));
            raw.len() - 1
        };
        stream.write_all(first)?;
        let mut buffer = [0; 4096];
        loop {
            let read = stream.read(&mut buffer)?;
            if read == 0 {
                return Ok(());
            }
            self.raw.lock().unwrap()[slot].1.extend(&buffer[..read]);
            stream.write_all(&buffer[..read])?;
        }
    }
}

/// Says a lot before it answers, in the one place of a head that is no field.
fn send_interim(stream: &mut impl Write) -> io::Result<()> {
    for _ in 0..30 {
        write!(stream, "HTTP/1.1 103 {}\r\n\r\n", "y".repeat(1000))?;
    }
    stream.flush()
}

/// Another protocol from here on: an echo.
fn serve_upgrade(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n";
    stream.write_all(head.as_bytes())?;
    stream.flush()?;
    let mut buffer = [0; 4096];
    loop {
        let read = stream.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        stream.write_all(&buffer[..read])?;
        stream.flush()?;
    }
}

/// Bytes that compress badly and are always the same.
pub(crate) fn noise_bytes(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    std::iter::repeat_with(&mut next).take(count).collect()
}

fn send_response(stream: &mut impl Write, kind: &str, body: &[u8]) -> io::Result<()> {
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    stream.flush()
}

/// The next request; none at the end of the connection.
fn read_request(
    stream: &mut (impl Read + Write),
    ahead: &mut Vec<u8>,
    at: SocketAddr,
    sni: Option<&str>,
) -> io::Result<Option<ArrivedRequest>> {
    let Some(head) = read_through(stream, ahead, b"\r\n\r\n")? else { return Ok(None) };
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut lines = head.split("\r\n").filter(|line| !line.is_empty());
    let line = lines.next().unwrap_or_default().to_owned();
    let fields = lines.filter_map(|line| line.split_once(':'));
    let fields = fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
    let mut request = ArrivedRequest { at, sni: sni.map(str::to_owned), line, fields, body: Vec::new() };
    if request.field("expect").is_some() {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        stream.flush()?;
    }
    let length = request.field("content-length").and_then(|length| length.parse().ok());
    if request.field("transfer-encoding").is_some() {
        request.body = read_chunks(stream, ahead)?;
    } else if let Some(length) = length {
        request.body = read_count(stream, ahead, length)?;
    }
    Ok(Some(request))
}

fn read_chunks(stream: &mut impl Read, ahead: &mut Vec<u8>) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = read_through(stream, ahead, b"\r\n")?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let line = String::from_utf8_lossy(&line).into_owned();
        let size = line.trim().split(';').next().unwrap_or_default();
        let size = usize::from_str_radix(size, 16).map_err(io::Error::other)?;
        body.extend(read_count(stream, ahead, size)?);
        read_count(stream, ahead, 2)?;
        if size == 0 {
            return Ok(body);
        }
    }
}

fn read_count(stream: &mut impl Read, ahead: &mut Vec<u8>, count: usize) -> io::Result<Vec<u8>> {
    while ahead.len() < count {
        if fill(stream, ahead)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let rest = ahead.split_off(count);
    Ok(std::mem::replace(ahead, rest))
}

fn read_through(stream: &mut impl Read, ahead: &mut Vec<u8>, end: &[u8]) -> io::Result<Option<Vec<u8>>> {
    loop {
        if let Some(found) = ahead.windows(end.len()).position(|window| window == end) {
            return read_count(stream, ahead, found + end.len()).map(Some);
        }
        if fill(stream, ahead)? == 0 {
            return Ok(None);
        }
    }
}

fn fill(stream: &mut impl Read, ahead: &mut Vec<u8>) -> io::Result<usize> {
    let mut buffer = vec![0; 64 << 10];
    let read = stream.read(&mut buffer)?;
    ahead.extend(&buffer[..read]);
    Ok(read)
}
