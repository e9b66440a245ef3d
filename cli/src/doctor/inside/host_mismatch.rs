//! Misuse of a host that is allowed: another name in the request than in TLS, another host than was resolved.

use std::io::Write;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};

use rustls::pki_types::ServerName;

use super::tcp::{CONNECT_TIMEOUT, judge_response};
use super::tls::{HandshakeFailure, handshake};
use super::{InsideProbe, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;
use crate::doctor::response::ProbeResponse;

const GROUP: &str = "misuse of an allowed host";
const FIX: &str = "this is Sandbar's own to prevent: check that requests of the sandbox arrive at it, and report it with the record";

pub(super) fn probes() -> Vec<InsideProbe> {
    vec![
        with_allowed(
            "agreement.fronting",
            "an allowed name in TLS, another in the request",
            |to, allowed, ground| try_handshake(to, allowed, &ground.denied),
        ),
        with_allowed(
            "agreement.address",
            "an allowed host's address, another name in TLS",
            |to, _, ground| try_handshake(to, &ground.denied, &ground.denied),
        ),
        with_allowed(
            "agreement.borrowed",
            "an allowed name, at an address of one's own choice",
            |_, allowed, ground| {
                try_handshake(SocketAddr::new(ground.four.into(), 443), allowed, &ground.denied)
            },
        ),
        with_allowed(
            "agreement.absolute",
            "an absolute address, of another host than `Host`",
            |to, allowed, ground| {
                let to = SocketAddr::new(to.ip(), 80);
                let target = format!("http://{}/sandbar-doctor", ground.denied);
                try_plain_http(
                    to,
                    &format!(
                        "GET {target} HTTP/1.1\r\nHost: {allowed}\r\nConnection: close\r\n\r\n"
                    ),
                )
            },
        ),
        with_allowed(
            "agreement.connect",
            "CONNECT to another host, inside",
            |to, allowed, ground| {
                let to = SocketAddr::new(to.ip(), 80);
                let target = format!("{}:443", ground.denied);
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
    InsideProbe::new(GROUP, name, what, FIX, move |ground| {
        let Some(allowed) = &ground.allowed else {
            return ProbeVerdict::Unknown(
                "not tried: name a host that is allowed with --allowed".to_owned(),
            );
        };
        match (allowed.as_str(), 443).to_socket_addrs().map(|mut all| all.next()) {
            Ok(Some(to)) => run(to, allowed, ground),
            Ok(None) => ProbeVerdict::Unknown(format!("{allowed} has no address")),
            Err(error) => ProbeVerdict::Unknown(format!("{allowed} cannot be resolved: {error}")),
        }
    })
}

fn try_handshake(to: SocketAddr, name: &str, host: &str) -> ProbeVerdict {
    let Ok(name) = ServerName::try_from(name.to_owned()) else {
        return ProbeVerdict::Unknown(format!("`{name}` is no name"));
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
