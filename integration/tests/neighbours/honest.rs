//! B: an honest client with one thread for each kind of thing it does, over and over, on fresh connections. It
//! remembers how long each took, and why it failed if it did.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use crate::scene::{DEADLINE, DNS, Network, PROXY, Setup};

/// An honest client gives up after this.
const PATIENCE: Duration = Duration::from_secs(30);

/// What B does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A request in intercepted TLS.
    Tls,
    /// The same, on a connection to the origin that nobody uses again.
    CloseTls,
    /// The same, to an origin that speaks HTTP/2.
    Http2Origin,
    /// A plain request in absolute form.
    Plain,
    /// Bytes through a tunnel and back.
    Tunnel,
    /// A name.
    Dns,
    /// A name that no cache and no file knows.
    FreshName,
    /// A question to the memory service.
    Memory,
}

/// What B saw of one kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct KindSamples {
    pub(crate) latencies: Vec<Duration>,
    pub(crate) failures: Vec<String>,
}

impl KindSamples {
    /// The latency that so many of a hundred stayed within; zero where all failed.
    pub(crate) fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
        sorted.get(at).copied().unwrap_or_default()
    }

    pub(crate) fn rounds(&self) -> usize {
        self.latencies.len() + self.failures.len()
    }
}

/// What B saw.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(BTreeMap<Kind, KindSamples>);

impl Samples {
    pub(crate) fn kinds(&self) -> impl Iterator<Item = Kind> {
        self.0.keys().copied()
    }

    pub(crate) fn of(&self, kind: Kind) -> KindSamples {
        self.0.get(&kind).cloned().unwrap_or_default()
    }

    pub(crate) fn assert_all_succeeded(&self, when: &str) {
        for (kind, seen) in &self.0 {
            let count = seen.failures.len();
            let few: Vec<_> = seen.failures.iter().take(3).collect();
            assert!(count == 0, "{when}: {count} of B's {} {kind:?} failed: {few:#?}", seen.rounds());
        }
    }

    pub(crate) fn has_failures(&self) -> bool {
        self.0.values().any(|seen| !seen.failures.is_empty())
    }

    fn least_rounds(&self) -> usize {
        self.0.values().map(KindSamples::rounds).min().unwrap_or_default()
    }
}

/// B at work.
pub(crate) struct HonestClient {
    over: Arc<AtomicBool>,
    seen: Arc<Mutex<Samples>>,
    threads: Vec<JoinHandle<()>>,
}

impl HonestClient {
    pub(crate) fn start(setup: &Setup, network: Network, trust: &Arc<ClientConfig>) -> Self {
        let (over, seen) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Samples>>::default());
        seen.lock().unwrap().0.extend(setup.kinds.iter().map(|kind| (*kind, KindSamples::default())));
        let start = |kind: Kind| {
            let (over, seen, trust, rest) = (over.clone(), seen.clone(), trust.clone(), setup.rest);
            std::thread::spawn(move || {
                let worker = Worker { network, trust };
                while !over.load(Ordering::SeqCst) {
                    let started = Instant::now();
                    let done = worker.work(kind);
                    let took = started.elapsed();
                    let mut seen = seen.lock().unwrap();
                    let samples = seen.0.entry(kind).or_default();
                    match done {
                        Ok(()) => samples.latencies.push(took),
                        Err(why) => samples.failures.push(format!("{why} (after {took:?})")),
                    }
                    drop(seen);
                    std::thread::sleep(rest);
                }
            })
        };
        let threads = setup.kinds.iter().map(|kind| start(*kind)).collect();
        HonestClient { over, seen, threads }
    }

    /// Waits until B has done so many more rounds of each kind, or its patience is at an end.
    fn wait_for_rounds(&self, rounds: usize) {
        let done = self.seen.lock().unwrap().least_rounds();
        let end = Instant::now() + DEADLINE / 4;
        while self.seen.lock().unwrap().least_rounds() < done + rounds && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The same, and ends B's work.
    pub(crate) fn finish_rounds(self, rounds: usize) -> Samples {
        self.wait_for_rounds(rounds);
        self.over.store(true, Ordering::SeqCst);
        for thread in self.threads {
            thread.join().unwrap();
        }
        self.seen.lock().unwrap().clone()
    }
}

/// Who works.
struct Worker {
    network: Network,
    trust: Arc<ClientConfig>,
}

impl Worker {
    fn work(&self, kind: Kind) -> Result<(), String> {
        let done = match kind {
            Kind::Tls => self.request_tls("origin.test:8002", "GET /hello", ""),
            Kind::CloseTls => self.request_tls("origin.test:8002", "GET /close", ""),
            Kind::Http2Origin => self.request_tls("origin.test:8003", "GET /hello", ""),
            Kind::Plain => self.request_plain(),
            Kind::Tunnel => self.echo(),
            Kind::Dns => self.resolve("origin.test"),
            Kind::FreshName => self.resolve(&next_fresh_name()),
            Kind::Memory => self.request_tls(
                "memory.test:8007",
                "POST /v1/recall",
                r#"{"query":"x","bank_id":"staging:team"}"#,
            ),
        };
        done.map_err(|error| error.to_string())
    }

    fn connect(&self) -> io::Result<TcpStream> {
        let stream = connect_from(self.network, PROXY.parse().unwrap())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    fn open_tunnel(&self, target: &str) -> io::Result<TcpStream> {
        let mut stream = self.connect()?;
        write!(stream, "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n")?;
        let head = read_head(&mut stream)?;
        if head.starts_with("HTTP/1.1 200 ") { Ok(stream) } else { Err(io::Error::other(head)) }
    }

    fn request_tls(&self, target: &str, request: &str, body: &str) -> io::Result<()> {
        let host = target.split(':').next().unwrap();
        let name = ServerName::try_from(host.to_owned()).unwrap();
        let tls = ClientConnection::new(self.trust.clone(), name).unwrap();
        let mut stream = StreamOwned::new(tls, self.open_tunnel(target)?);
        let length = body.len();
        write!(
            stream,
            "{request} HTTP/1.1\r\nHost: {target}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )?;
        expect_ok(&mut stream)
    }

    fn request_plain(&self) -> io::Result<()> {
        let mut stream = self.connect()?;
        write!(stream, "GET http://origin.test:8001/hello HTTP/1.1\r\nHost: origin.test:8001\r\n\r\n")?;
        expect_ok(&mut stream)
    }

    fn echo(&self) -> io::Result<()> {
        let mut stream = self.open_tunnel("raw.test:8004")?;
        stream.write_all(b"hello")?;
        let mut back = [0; 5];
        stream.read_exact(&mut back)?;
        if &back == b"hello" { Ok(()) } else { Err(io::Error::other("another echo")) }
    }

    /// Asks again twice, as every resolver of a system does: datagrams may be lost.
    fn resolve(&self, name: &str) -> io::Result<()> {
        let socket = UdpSocket::bind(self.network.next_address())?;
        socket.connect(DNS)?;
        socket.set_read_timeout(Some(PATIENCE / 6))?;
        let mut answer = [0; 1500];
        let mut ask = || socket.send(&dns_query(7, name)).and_then(|_| socket.recv(&mut answer));
        let length = ask().or_else(|_| ask()).or_else(|_| ask())?;
        match (answer[3] & 15, answer[7]) {
            (0, 1..) => Ok(()),
            (code, count) => {
                Err(io::Error::other(format!("code {code}, {count} answers, {length} bytes for {name}")))
            }
        }
    }
}

/// A name that nobody has asked for yet.
fn next_fresh_name() -> String {
    use std::sync::atomic::AtomicUsize;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("b{}.quick.example", NEXT.fetch_add(1, Ordering::SeqCst))
}

/// A question for the A record of a name.
pub(crate) fn dns_query(id: u16, name: &str) -> Vec<u8> {
    let mut query = id.to_be_bytes().to_vec();
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        query.push(u8::try_from(label.len()).unwrap());
        query.extend(label.as_bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    query
}

/// A connection whose source address names the sandbox.
pub(crate) fn connect_from(network: Network, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    network.bind(&socket)?;
    socket.connect_timeout(&to.into(), PATIENCE)?;
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn read_head(stream: &mut impl Read) -> io::Result<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.extend(byte);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

fn expect_ok(stream: &mut impl Read) -> io::Result<()> {
    let head = read_head(stream)?;
    if head.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(io::Error::other(head)) }
}
