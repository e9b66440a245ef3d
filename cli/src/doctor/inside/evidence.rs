//! Two requests as evidence: one that must be served, if a host is given, and one that must be refused.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};

use super::ProbeTargets;
use super::tcp::{CONNECT_TIMEOUT, probe_request};
use crate::doctor::report::RequestEvidence;
use crate::doctor::response::ProbeResponse;

/// Variables that name a proxy, for sandboxes with an explicit proxy as their only way out.
const PROXY_VARIABLES: [&str; 4] = ["https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"];

pub(super) fn collect(targets: &ProbeTargets) -> Vec<RequestEvidence> {
    let allowed = targets.allowed.iter().map(|host| {
        let request = format!("GET https://{host}/sandbar-doctor");
        to_evidence("allowed", request, request_https(host))
    });
    let denied = [to_evidence(
        "refused",
        format!("GET http://{}/sandbar-doctor", targets.denied),
        request_http(targets),
    )];
    allowed.chain(denied).collect()
}

fn to_evidence(wanted: &'static str, request: String, answer: io::Result<ProbeResponse>) -> RequestEvidence {
    let (answer, record) = match answer {
        Ok(answer) => {
            let reason = answer.reason().map(|reason| format!(" ({reason})")).unwrap_or_default();
            (format!("{}{reason}", answer.first_line()), answer.record_id().map(str::to_owned))
        }
        Err(error) => (format!("no answer: {error}"), None),
    };
    RequestEvidence { wanted, request, answer, record, line: None }
}

/// Sends a plain HTTP request to any address, which Sandbar intercepts, or to the configured proxy.
fn request_http(targets: &ProbeTargets) -> io::Result<ProbeResponse> {
    let host = &targets.denied;
    let (to, request) = match proxy_from_env() {
        None => (SocketAddr::new(targets.ipv4.into(), 80), probe_request(host)),
        Some(proxy) => {
            let target = format!("http://{host}/sandbar-doctor");
            (proxy, format!("GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
        }
    };
    let mut stream = connect(to)?;
    stream.write_all(request.as_bytes())?;
    ProbeResponse::read(&mut stream)
}

/// Sends an HTTPS request as any program would: with the system's resolver and trusted roots.
fn request_https(host: &str) -> io::Result<ProbeResponse> {
    let mut socket = match proxy_from_env() {
        None => {
            let to = (host, 443).to_socket_addrs()?.next();
            connect(to.ok_or_else(|| io::Error::other("the host has no address"))?)?
        }
        Some(proxy) => {
            let mut stream = connect(proxy)?;
            write!(stream, "CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n")?;
            let answer = ProbeResponse::read(&mut stream)?;
            if answer.record_id().is_some() {
                return Ok(answer);
            }
            stream
        }
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certs::trust::system_roots());
    let config = ClientConfig::builder_with_provider(certs::crypto_provider())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let mut tls = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    let mut stream = Stream::new(&mut tls, &mut socket);
    stream.write_all(probe_request(host).as_bytes())?;
    ProbeResponse::read(&mut stream)
}

fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, CONNECT_TIMEOUT)?;
    stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    Ok(stream)
}

fn proxy_from_env() -> Option<SocketAddr> {
    let named =
        PROXY_VARIABLES.iter().find_map(|name| std::env::var(name).ok().filter(|text| !text.is_empty()))?;
    let address = named.strip_prefix("http://")?.trim_end_matches('/');
    address.to_socket_addrs().ok()?.next()
}
