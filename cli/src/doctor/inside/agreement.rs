//! Misuse of a host that is allowed: another name in the request than in TLS, another host than was resolved.

use std::io::Write;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};

use rustls::pki_types::ServerName;

use super::streams::{PATIENCE, judge};
use super::tls::{Refused, handshake};
use super::{Ground, Probe};
use crate::doctor::answer::Answer;
use crate::doctor::probe::Verdict;

const GROUP: &str = "misuse of an allowed host";
const FIX: &str = "this is Sandbar's own to prevent: check that requests of the sandbox arrive at it, and report it with the record";

pub(super) fn probes() -> Vec<Probe> {
    vec![
        with_allowed(
            "agreement.fronting",
            "an allowed name in TLS, another in the request",
            |to, allowed, ground| shaken(to, allowed, &ground.denied),
        ),
        with_allowed(
            "agreement.address",
            "an allowed host's address, another name in TLS",
            |to, _, ground| shaken(to, &ground.denied, &ground.denied),
        ),
        with_allowed(
            "agreement.borrowed",
            "an allowed name, at an address of one's own choice",
            |_, allowed, ground| {
                shaken(SocketAddr::new(ground.four.into(), 443), allowed, &ground.denied)
            },
        ),
        with_allowed(
            "agreement.absolute",
            "an absolute address, of another host than `Host`",
            |to, allowed, ground| {
                let to = SocketAddr::new(to.ip(), 80);
                let target = format!("http://{}/sandbar-doctor", ground.denied);
                plain(
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
                plain(to, &format!("CONNECT {target} HTTP/1.1\r\nHost: {allowed}\r\n\r\n"))
            },
        ),
    ]
}

fn with_allowed(
    name: &'static str,
    what: &'static str,
    run: impl Fn(SocketAddr, &str, &Ground) -> Verdict + Send + Sync + 'static,
) -> Probe {
    Probe::new(GROUP, name, what, FIX, move |ground| {
        let Some(allowed) = &ground.allowed else {
            return Verdict::Unknown(
                "not tried: name a host that is allowed with --allowed".to_owned(),
            );
        };
        match (allowed.as_str(), 443).to_socket_addrs().map(|mut all| all.next()) {
            Ok(Some(to)) => run(to, allowed, ground),
            Ok(None) => Verdict::Unknown(format!("{allowed} has no address")),
            Err(error) => Verdict::Unknown(format!("{allowed} cannot be resolved: {error}")),
        }
    })
}

fn shaken(to: SocketAddr, name: &str, host: &str) -> Verdict {
    let Ok(name) = ServerName::try_from(name.to_owned()) else {
        return Verdict::Unknown(format!("`{name}` is no name"));
    };
    match handshake(to, name, host) {
        Ok(answer) => judge(&answer),
        Err(Refused::Alert(alert)) => {
            Verdict::Answered(format!("refused by the TLS alert {alert:?}"))
        }
        Err(Refused::Failed(why)) => Verdict::Blocked(why),
    }
}

fn plain(to: SocketAddr, request: &str) -> Verdict {
    let answer = TcpStream::connect_timeout(&to, PATIENCE).and_then(|mut stream| {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(request.as_bytes())?;
        Answer::read(&mut stream)
    });
    match answer {
        Ok(answer) => judge(&answer),
        Err(error) => Verdict::Blocked(error.to_string()),
    }
}
