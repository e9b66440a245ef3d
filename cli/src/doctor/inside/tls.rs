//! TLS straight to an address: with a name that nobody allows, and without one.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    AlertDescription, ClientConfig, ClientConnection, DigitallySignedStruct, Error,
    SignatureScheme, Stream,
};

use super::streams::{PATIENCE, ask, judge, request};
use super::{Ground, Presence, Probe};
use crate::doctor::answer::Answer;
use crate::doctor::probe::Verdict;

const GROUP: &str = "TLS";
const FIX: &str = "redirect all TCP of the sandbox to Sandbar: a firewall that passes port 443 lets every name pass";

pub(super) fn probes(ground: &Ground) -> Vec<Probe> {
    let (four, six): (IpAddr, IpAddr) = (ground.four.into(), ground.six.into());
    let resolver: IpAddr = ground.resolver.into();
    [
        ("tls.named", "TLS to an address, by a name nobody allows", four, 443, true),
        ("tls.named.six", "TLS over IPv6, by a name nobody allows", six, 443, true),
        ("tls.nameless", "TLS to an address, without a name", four, 443, false),
        ("tls.odd-port", "TLS on another port", four, 8443, true),
        ("dns.over-tls", "DNS over TLS (DoT)", resolver, 853, false),
        ("dns.over-https", "DNS over HTTPS, by address", resolver, 443, false),
    ]
    .into_iter()
    .map(|(name, what, address, port, named)| {
        let to = SocketAddr::new(address, port);
        Probe::new(GROUP, name, format!("{what}, {to}"), FIX, move |ground| {
            let name = if named {
                ServerName::try_from(ground.denied.clone()).ok()
            } else {
                Some(ServerName::from(to.ip()))
            };
            match name {
                Some(name) => greeted(ground, to, name),
                None => Verdict::Unknown(format!("`{}` is no name", ground.denied)),
            }
        })
    })
    .collect()
}

/// Greets. An alert could be anybody's, so it counts only where Sandbar has said before that it is there.
fn greeted(ground: &Ground, to: SocketAddr, name: ServerName<'static>) -> Verdict {
    let plain = ask(ground, to, Presence::Answers, |_| Ok(()));
    if !matches!(plain, Verdict::Answered(_)) {
        return plain;
    }
    match handshake(to, name, &ground.denied) {
        Ok(answer) => judge(&answer),
        Err(Refused::Alert(alert)) => {
            Verdict::Answered(format!("refused by the TLS alert {alert:?}"))
        }
        Err(Refused::Failed(why)) => Verdict::Blocked(why),
    }
}

/// Why there was no answer.
pub(super) enum Refused {
    Alert(AlertDescription),
    Failed(String),
}

/// Shakes hands with whoever is there, believing everybody, and asks for `host`.
pub(super) fn handshake(
    to: SocketAddr,
    name: ServerName<'static>,
    host: &str,
) -> Result<Answer, Refused> {
    let failed = |error: std::io::Error| Refused::Failed(error.to_string());
    let mut socket = TcpStream::connect_timeout(&to, PATIENCE).map_err(failed)?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    let config = ClientConfig::builder_with_provider(certs::provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| Refused::Failed(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody))
        .with_no_client_auth();
    let mut tls = ClientConnection::new(Arc::new(config), name)
        .map_err(|error| Refused::Failed(error.to_string()))?;
    let mut stream = Stream::new(&mut tls, &mut socket);
    stream
        .write_all(request(host).as_bytes())
        .and_then(|()| Answer::read(&mut stream))
        .map_err(|error| alert(&error).map_or_else(|| failed(error), Refused::Alert))
}

fn alert(error: &std::io::Error) -> Option<AlertDescription> {
    let Error::AlertReceived(alert) = error.get_ref()?.downcast_ref()? else { return None };
    Some(*alert)
}

/// Believes everybody: here it is asked who is there, and nothing is told.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        certs::provider().signature_verification_algorithms.supported_schemes()
    }
}
