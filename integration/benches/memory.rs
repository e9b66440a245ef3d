//! What the memory guard adds: a recall of 2 KiB, answered with 2 KiB, through the guard and, unguarded, through
//! the same program; both in turn, each on one connection. Figures of one run, not a test.
//!
//! `cargo bench -p integration --bench memory`

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)] // a bench speaks, and fails where it cannot go on

#[path = "../tests/memory/client.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod client;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use certs::UnixTime;
use certs::identity::{IssueRequest, IssuerOptions, LocalIssuer, SigningAlgorithm, TrustDomain};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use client::{ClientRequest, SandboxClient};

const GUARDED: &str = "memory.corp.example";
const PLAIN: &str = "plain.corp.example";
const AUDIENCE: &str = "spiffe://acme.example/memory";
const ROUNDS: usize = 5000;
const WARM_UP: usize = 500;

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let service = start_service(dir.path());
    let issuer = create_issuer(dir.path());
    let proxies = [free_port(), free_port()].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    write_files(dir.path(), service, proxies);
    let mut program = start_sandbar(dir.path());
    let trust = client_config(&dir.path().join("ca/ca.pem"));
    let measured = measure(&trust, proxies, service, &issuer);
    program.kill().unwrap();
    program.wait().unwrap();
    for (name, times) in measured {
        let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
        println!("{name:>10}: p50 {:>6} us   p99 {:>6} us", p50.as_micros(), p99.as_micros());
    }
}

fn measure(
    trust: &Arc<ClientConfig>,
    proxies: [SocketAddr; 2],
    service: u16,
    issuer: &LocalIssuer,
) -> [(&'static str, Vec<Duration>); 2] {
    let life = Duration::from_secs(600);
    let request = IssueRequest {
        tenant: "acme",
        environment: "staging",
        sandbox: "sandbox-a",
        audience: AUDIENCE,
        life,
        generation: None,
    };
    let token = issuer.issue(&request, UnixTime::now()).unwrap().expose().to_owned();
    let query = "launch code ".repeat(168);
    let body = format!(r#"{{"query":"{query}","bank_id":"staging:team-a"}}"#);
    let ask = ClientRequest::post("/v1/recall", &body).with_field("Sandbox-Identity", &token);
    let [guarded, plain] = [GUARDED, PLAIN].map(|host| format!("{host}:{service}"));
    let mut through = [
        ("guarded", SandboxClient::connect(proxies[0], None, &guarded, trust), Vec::new()),
        ("unguarded", SandboxClient::connect(proxies[1], None, &plain, trust), Vec::new()),
    ];
    for round in 0..WARM_UP + ROUNDS {
        for (name, client, times) in &mut through {
            let started = Instant::now();
            let answer = client.send(&ask);
            let took = started.elapsed();
            assert_eq!(answer.status, 200, "{name}: {}", answer.text());
            if round >= WARM_UP {
                times.push(took);
            }
        }
    }
    through.map(|(name, _, mut times)| {
        times.sort_unstable();
        (name, times)
    })
}

/// A service that answers every request alike, so that what is measured is what lies before it.
fn start_service(dir: &Path) -> u16 {
    let made = rcgen::generate_simple_self_signed(vec![GUARDED.to_owned(), PLAIN.to_owned()]).unwrap();
    fs::write(dir.join("origin.pem"), certs::pem::encode_certificate(made.cert.der())).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(certs::crypto_provider());
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let config = Arc::new(config.with_single_cert(vec![made.cert.der().clone()], key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let config = config.clone();
            std::thread::spawn(move || serve_connection(stream, config));
        }
    });
    port
}

fn serve_connection(stream: TcpStream, config: Arc<ServerConfig>) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let tls = StreamOwned::new(ServerConnection::new(config).ok()?, stream);
    let mut tls = BufReader::new(tls);
    let hit = format!(r#"{{"text":"{}","bank_id":"staging:team-a","score":1.0}}"#, "x".repeat(1960));
    let body = format!(r#"{{"hits":[{hit}],"truncated":false}}"#);
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n";
    let reply = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if tls.read_line(&mut line).ok()? <= 2 {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().ok()?;
            }
        }
        if length == 0 {
            return None;
        }
        tls.read_exact(&mut vec![0; length]).ok()?;
        tls.get_mut().write_all(reply.as_bytes()).ok()?;
        tls.get_mut().flush().ok()?;
    }
}

fn create_issuer(dir: &Path) -> LocalIssuer {
    let options = IssuerOptions {
        issuer: "https://issuer.acme.example".to_owned(),
        trust_domain: TrustDomain::parse("acme.example").unwrap(),
        environments: None,
        algorithm: SigningAlgorithm::Es256,
    };
    LocalIssuer::init(&dir.join("issuer"), &options, UnixTime::now()).unwrap()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Two sandboxes, because to one that has memory the service's address is closed under any other name.
fn write_files(dir: &Path, service: u16, [guarded, unguarded]: [SocketAddr; 2]) {
    fs::create_dir(dir.join("policies")).unwrap();
    let policy = format!(
        r#"name = "p"
[[memory]]
name = "memory"
host = "{GUARDED}:{service}"
resolves_to = ["127.0.0.0/8"]
profile = "astrocyte"
recall = ["staging:team-a"]
"#
    );
    fs::write(dir.join("policies/p.toml"), policy).unwrap();
    let policy = format!(
        r#"name = "q"
[[allow]]
name = "plain"
hosts = ["{PLAIN}:{service}"]
resolves_to = ["127.0.0.0/8"]
"#
    );
    fs::write(dir.join("policies/q.toml"), policy).unwrap();
    fs::write(dir.join("memory.key"), "the-shared-key-of-the-service\n").unwrap();
    fs::set_permissions(dir.join("memory.key"), fs::Permissions::from_mode(0o600)).unwrap();
    let operator = format!(
        r#"policies = "policies"
[log]
dir = "log"
[dns]
upstreams = ["127.0.0.1:9"]
pre_resolve = false
[[dns.host]]
name = "{GUARDED}"
addresses = ["127.0.0.1"]
[[dns.host]]
name = "{PLAIN}"
addresses = ["127.0.0.1"]
[upstream]
roots = ["origin.pem"]
system_roots = false
[[credential]]
name = "memory"
file = "memory.key"
hosts = ["{GUARDED}:{service}"]
[identity]
[[identity.issuer]]
name = "https://issuer.acme.example"
trust_domain = "acme.example"
keys = "issuer/jwks.json"
[[memory_service]]
host = "{GUARDED}:{service}"
audience = "{AUDIENCE}"
mode = "api-key"
credential = "memory"
[[listener]]
mode = "explicit"
bind = ["{guarded}"]
sandbox = "sandbox-a"
dangerously_share_address = true
[[listener]]
mode = "explicit"
bind = ["{unguarded}"]
sandbox = "sandbox-b"
dangerously_share_address = true
[[sandbox]]
id = "sandbox-a"
tenant = "acme"
environment = "staging"
base = "system"
policies = ["p"]
[[sandbox]]
id = "sandbox-b"
tenant = "acme"
environment = "staging"
base = "system"
policies = ["q"]
"#
    );
    fs::write(dir.join("sandbar.toml"), operator).unwrap();
}

fn start_sandbar(dir: &Path) -> std::process::Child {
    let mut command = integration::sandbar();
    command.arg("serve").arg("-c").arg(dir.join("sandbar.toml")).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    said.find(|line| line.contains("listening: explicit")).expect("sandbar does not start");
    std::thread::spawn(move || said.for_each(drop)); // read on, or it would block
    child
}

fn client_config(pem: &Path) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_file_iter(pem).unwrap() {
        roots.add(root.unwrap()).unwrap();
    }
    let builder = ClientConfig::builder_with_provider(certs::crypto_provider());
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    Arc::new(builder.with_root_certificates(roots).with_no_client_auth())
}
