//! A client in a sandbox: it can say anything, byte for byte.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

/// Nothing takes longer, on a machine that is busy with other things.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// What a sandbox asks.
#[derive(Clone, Debug)]
pub(crate) struct ClientRequest {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) fields: Vec<(String, String)>,
    pub(crate) body: Option<Vec<u8>>,
    /// How the end of the body is told.
    pub(crate) framing: ClientFraming,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientFraming {
    Chunked,
    Length,
    /// As the fields say.
    Own,
}

/// What it is answered.
#[derive(Clone, Debug)]
pub(crate) struct ClientResponse {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl ClientRequest {
    pub(crate) fn post(path: &str, body: &str) -> Self {
        let ask = ClientRequest {
            method: "POST".to_owned(),
            target: path.to_owned(),
            fields: Vec::new(),
            body: Some(body.as_bytes().to_vec()),
            framing: ClientFraming::Length,
        };
        ask.with_field("Content-Type", "application/json")
    }

    pub(crate) fn recall(bank: &str) -> Self {
        Self::post("/v1/recall", &format!(r#"{{"query":"launch code","bank_id":"{bank}"}}"#))
    }

    pub(crate) fn get(target: &str) -> Self {
        ClientRequest {
            method: "GET".to_owned(),
            target: target.to_owned(),
            body: None,
            ..Self::post("", "")
        }
        .without_field("Content-Type")
    }

    pub(crate) fn with_field(mut self, name: &str, value: &str) -> Self {
        self.fields.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn without_field(mut self, name: &str) -> Self {
        self.fields.retain(|(known, _)| known != name);
        self
    }

    pub(crate) fn with_method(self, method: &str) -> Self {
        ClientRequest { method: method.to_owned(), ..self }
    }

    pub(crate) fn with_framing(self, framing: ClientFraming) -> Self {
        ClientRequest { framing, ..self }
    }

    pub(crate) fn with_body(self, body: &[u8]) -> Self {
        ClientRequest { body: Some(body.to_vec()), ..self }
    }

    fn encode_head(&self, host: &str) -> String {
        let mut head = format!("{} {} HTTP/1.1\r\nHost: {host}\r\n", self.method, self.target);
        for (name, value) in &self.fields {
            head += &format!("{name}: {value}\r\n");
        }
        match (self.framing, &self.body) {
            (ClientFraming::Length, Some(body)) => head += &format!("Content-Length: {}\r\n", body.len()),
            (ClientFraming::Chunked, _) => head += "Transfer-Encoding: chunked\r\n",
            (ClientFraming::Length | ClientFraming::Own, _) => {}
        }
        head + "\r\n"
    }

    /// As it is written.
    pub(crate) fn encode(&self, host: &str) -> Vec<u8> {
        let mut bytes = self.encode_head(host).into_bytes();
        let body = self.body.as_deref().unwrap_or_default();
        match self.framing {
            ClientFraming::Chunked => {
                for part in body.chunks(1000) {
                    bytes.extend(format!("{:x};ext=1\r\n", part.len()).into_bytes());
                    bytes.extend(part);
                    bytes.extend(b"\r\n");
                }
                bytes.extend(b"0\r\n\r\n");
            }
            ClientFraming::Length | ClientFraming::Own => bytes.extend(body),
        }
        bytes
    }
}

impl ClientResponse {
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let named =
            |line: &&str| line.split_once(':').is_some_and(|(known, _)| known.eq_ignore_ascii_case(name));
        self.head.lines().find(named).and_then(|line| line.split_once(':')).map(|(_, value)| value.trim())
    }

    /// The reason of a refusal of ours; none if somebody else answered.
    pub(crate) fn reason(&self) -> Option<&str> {
        self.field("Sandbar-Reason")
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A connection through the proxy to one host, in TLS.
pub(crate) struct SandboxClient {
    stream: StreamOwned<ClientConnection, TcpStream>,
    host: String,
    /// Whether the answer has a length and no body.
    bodiless: bool,
}

impl SandboxClient {
    /// Connects to `proxy`, from an address of the sandbox's own if it has one.
    pub(crate) fn connect(
        proxy: SocketAddr,
        from: Option<&str>,
        host: &str,
        trust: &Arc<ClientConfig>,
    ) -> Self {
        Self::start_tls(open_tunnel(proxy, from, host), host, host, trust)
    }

    /// Connects to `host` and then, in TLS, asks for another name.
    pub(crate) fn connect_as(proxy: SocketAddr, host: &str, name: &str, trust: &Arc<ClientConfig>) -> Self {
        Self::start_tls(open_tunnel(proxy, None, host), host, name, trust)
    }

    /// Connects without a proxy.
    pub(crate) fn connect_directly(at: SocketAddr, host: &str, trust: &Arc<ClientConfig>) -> Self {
        let socket = TcpStream::connect(at).unwrap();
        socket.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        Self::start_tls(socket, host, host, trust)
    }

    fn start_tls(socket: TcpStream, host: &str, name: &str, trust: &Arc<ClientConfig>) -> Self {
        socket.set_nodelay(true).unwrap();
        let name = name.split(':').next().unwrap().to_owned();
        let tls = ClientConnection::new(trust.clone(), ServerName::try_from(name).unwrap()).unwrap();
        SandboxClient { stream: StreamOwned::new(tls, socket), host: host.to_owned(), bodiless: false }
    }

    pub(crate) fn send(&mut self, ask: &ClientRequest) -> ClientResponse {
        let bytes = ask.encode(&self.host);
        self.send_bytes(&bytes);
        self.bodiless = ask.method == "HEAD";
        self.read_response().unwrap_or_else(|| {
            let body = ask.body.as_ref().map_or(0, Vec::len);
            let ClientRequest { method, target, framing, .. } = ask;
            let why = self.stream.read(&mut [0]);
            panic!("no answer to {method} {target} with {body} bytes of body ({framing:?}): {why:?}")
        })
    }

    /// Says something; a server that has heard enough may be gone.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) {
        drop(self.stream.write_all(bytes).and_then(|()| self.stream.flush()));
    }

    /// The next answer that is not an interim one.
    pub(crate) fn read_response(&mut self) -> Option<ClientResponse> {
        loop {
            let answer = self.read_any_response()?;
            if answer.status >= 200 {
                return Some(answer);
            }
        }
    }

    /// The next answer of any kind.
    pub(crate) fn read_any_response(&mut self) -> Option<ClientResponse> {
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") {
            match self.stream.read(&mut byte) {
                Ok(1) => head.extend(byte),
                Ok(_) | Err(_) => return None,
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let status = head.split(' ').nth(1)?.parse().ok()?;
        let mut answer = ClientResponse { status, head, body: Vec::new() };
        let length = answer.field("Content-Length").map_or(0, |length| length.parse().unwrap());
        answer.body = vec![0; if self.bodiless { 0 } else { length }];
        self.stream.read_exact(&mut answer.body).ok()?;
        Some(answer)
    }

    /// Whether the other side has closed.
    pub(crate) fn is_closed(&mut self) -> bool {
        !matches!(self.stream.read(&mut [0]), Ok(1))
    }
}

fn connect_from(to: SocketAddr, from: Option<&str>) -> TcpStream {
    let Some(from) = from else { return TcpStream::connect(to).unwrap() };
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let from: SocketAddr = format!("{from}:0").parse().unwrap();
    socket.bind(&from.into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.into()
}

/// A tunnel to `host`, granted.
fn open_tunnel(proxy: SocketAddr, from: Option<&str>, host: &str) -> TcpStream {
    let mut socket = connect_from(proxy, from);
    socket.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
    socket.write_all(format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap();
    let mut said = Vec::new();
    let mut byte = [0];
    while !said.ends_with(b"\r\n\r\n") {
        assert_eq!(socket.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&said));
        said.extend(byte);
    }
    assert!(said.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&said));
    socket
}
