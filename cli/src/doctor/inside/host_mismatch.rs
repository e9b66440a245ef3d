//! Misuse of an allowed host: different names in TLS and in the request, or another address than the resolved one.

use std::io::Write;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};

use rustls::pki_types::ServerName;

use super::tcp::{CONNECT_TIMEOUT, judge_response};
use super::tls::{HandshakeFailure, handshake};
use super::{InsideProbe, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;
use crate::doctor::response::ProbeResponse;

const GROUP: &str = "misuse of an allowed host";
const FIX: &str =
    "Sandbar must prevent this: check that the sandbox's requests reach it, and report a bug with the record";

pub(super) fn probes() -> Vec<InsideProbe> {
    vec![
        with_allowed(
            "agreement.fronting",
            "an allowed name in TLS, another in the request",
            |to, allowed, targets| try_handshake(to, allowed, &targets.denied),
        ),
        with_allowed(
            "agreement.address",
            "the address of an allowed host, another name in TLS",
            |to, _, targets| try_handshake(to, &targets.denied, &targets.denied),
        ),
        with_allowed(
            "agreement.borrowed",
            "an allowed name, at an arbitrary address",
            |_, allowed, targets| {
                try_handshake(SocketAddr::new(targets.ipv4.into(), 443), allowed, &targets.denied)
            },
        ),
        with_allowed(
            "agreement.absolute",
            "an absolute URL with another host than `Host`",
            |to, allowed, targets| {
                let to = SocketAddr::new(to.ip(), 80);
                let target = format!("http://{}/sandbar-doctor", targets.denied);
                try_plain_http(
                    to,
                    &format!("GET {target} HTTP/1.1\r\nHost: {allowed}\r\nConnection: close\r\n\r\n"),
                )
            },
        ),
        with_allowed(
            "agreement.connect",
            "CONNECT to another host through an allowed one",
            |to, allowed, targets| {
                let to = SocketAddr::new(to.ip(), 80);
                let target = format!("{}:443", targets.denied);
                try_plain_http(to, &format!("CONNECT {target} HTTP/1.1\r\nHost: {allowed}\r\n\r\n"))
            },
        ),
    ]
}

fn with_allowed(
    name: &'static str,
    what: &'static str,
    run: impl Fn(SocketAddr, &str, &ProbeTargets) -> ProbeVerdict + Send + Sync + 'static,
) -> InsideProbe {
    InsideProbe::new(GROUP, name, what, FIX, move |targets| {
        let Some(allowed) = &targets.allowed else {
            return ProbeVerdict::Unknown("not tried: give an allowed host with --allowed".to_owned());
        };
        match (allowed.as_str(), 443).to_socket_addrs().map(|mut all| all.next()) {
            Ok(Some(to)) => run(to, allowed, targets),
            Ok(None) => ProbeVerdict::Unknown(format!("{allowed} has no address")),
            Err(error) => ProbeVerdict::Unknown(format!("{allowed} cannot be resolved: {error}")),
        }
    })
}

fn try_handshake(to: SocketAddr, name: &str, host: &str) -> ProbeVerdict {
    let Ok(name) = ServerName::try_from(name.to_owned()) else {
        return ProbeVerdict::Unknown(format!("`{name}` is not a valid name"));
    };
    match handshake(to, name, host) {
        Ok(answer) => judge_response(&answer),
        Err(HandshakeFailure::Alert(alert)) => {
            ProbeVerdict::Answered(format!("refused by the TLS alert {alert:?}"))
        }
        Err(HandshakeFailure::Failed(why)) => ProbeVerdict::Blocked(why),
    }
}

fn try_plain_http(to: SocketAddr, request: &str) -> ProbeVerdict {
    let answer = TcpStream::connect_timeout(&to, CONNECT_TIMEOUT).and_then(|mut stream| {
        stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        stream.write_all(request.as_bytes())?;
        ProbeResponse::read(&mut stream)
    });
    match answer {
        Ok(answer) => judge_response(&answer),
        Err(error) => ProbeVerdict::Blocked(error.to_string()),
    }
}
