//! Two requests to show an operator: one that must be served, if a host is named, and one that must not.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};

use super::Ground;
use super::streams::{PATIENCE, request};
use crate::doctor::answer::Answer;
use crate::doctor::report::Evidence;

/// Variables that name a proxy, for sandboxes whose only way out is one.
const PROXIES: [&str; 4] = ["https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"];

pub(super) fn collect(ground: &Ground) -> Vec<Evidence> {
    let allowed = ground.allowed.iter().map(|host| {
        let request = format!("GET https://{host}/sandbar-doctor");
        told("allowed", request, by_https(host))
    });
    let denied =
        [told("refused", format!("GET http://{}/sandbar-doctor", ground.denied), by_http(ground))];
    allowed.chain(denied).collect()
}

fn told(wanted: &'static str, request: String, answer: io::Result<Answer>) -> Evidence {
    let (answer, record) = match answer {
        Ok(answer) => {
            let reason = answer.reason().map(|reason| format!(" ({reason})")).unwrap_or_default();
            (format!("{}{reason}", answer.first_line()), answer.record().map(str::to_owned))
        }
        Err(error) => (format!("no answer: {error}"), None),
    };
    Evidence { wanted, request, answer, record, line: None }
}

/// A plain request to wherever, which is Sandbar's to answer, or to the proxy that is named.
fn by_http(ground: &Ground) -> io::Result<Answer> {
    let host = &ground.denied;
    let (to, request) = match proxy() {
        None => (SocketAddr::new(ground.four.into(), 80), request(host)),
        Some(proxy) => {
            let target = format!("http://{host}/sandbar-doctor");
            (proxy, format!("GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
        }
    };
    let mut stream = connect(to)?;
    stream.write_all(request.as_bytes())?;
    Answer::read(&mut stream)
}

/// As any program would: by the system's resolver, believing whom the system believes.
fn by_https(host: &str) -> io::Result<Answer> {
    let mut socket = match proxy() {
        None => {
            let to = (host, 443).to_socket_addrs()?.next();
            connect(to.ok_or_else(|| io::Error::other("the host has no address"))?)?
        }
        Some(proxy) => {
            let mut stream = connect(proxy)?;
            write!(stream, "CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n")?;
            let answer = Answer::read(&mut stream)?;
            if answer.record().is_some() {
                return Ok(answer);
            }
            stream
        }
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certs::trust::system_roots());
    let config = ClientConfig::builder_with_provider(certs::provider())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let mut tls = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    let mut stream = Stream::new(&mut tls, &mut socket);
    stream.write_all(request(host).as_bytes())?;
    Answer::read(&mut stream)
}

fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn proxy() -> Option<SocketAddr> {
    let named =
        PROXIES.iter().find_map(|name| std::env::var(name).ok().filter(|text| !text.is_empty()))?;
    let place = named.strip_prefix("http://")?.trim_end_matches('/');
    place.to_socket_addrs().ok()?.next()
}
