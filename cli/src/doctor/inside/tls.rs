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

use super::tcp::{CONNECT_TIMEOUT, judge_response, probe_connect, probe_request};
use super::{InsideProbe, PeerPresence, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;
use crate::doctor::response::ProbeResponse;

const GROUP: &str = "TLS";
const FIX: &str = "redirect all TCP of the sandbox to Sandbar: a firewall that passes port 443 lets every name pass";

pub(super) fn probes(ground: &ProbeTargets) -> Vec<InsideProbe> {
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
        InsideProbe::new(GROUP, name, format!("{what}, {to}"), FIX, move |ground| {
            let name = if named {
                ServerName::try_from(ground.denied.clone()).ok()
            } else {
                Some(ServerName::from(to.ip()))
            };
            match name {
                Some(name) => probe_tls(ground, to, name),
                None => ProbeVerdict::Unknown(format!("`{}` is no name", ground.denied)),
            }
        })
    })
    .collect()
}

/// Greets. An alert could be anybody's, so it counts only where Sandbar has said before that it is there.
fn probe_tls(ground: &ProbeTargets, to: SocketAddr, name: ServerName<'static>) -> ProbeVerdict {
    let plain = probe_connect(ground, to, PeerPresence::Answers, |_| Ok(()));
    if !matches!(plain, ProbeVerdict::Answered(_)) {
        return plain;
    }
    match handshake(to, name, &ground.denied) {
        Ok(answer) => judge_response(&answer),
        Err(HandshakeFailure::Alert(alert)) => {
            ProbeVerdict::Answered(format!("refused by the TLS alert {alert:?}"))
        }
        Err(HandshakeFailure::Failed(why)) => ProbeVerdict::Blocked(why),
    }
}

/// Why there was no answer.
pub(super) enum HandshakeFailure {
    Alert(AlertDescription),
    Failed(String),
}

/// Shakes hands with whoever is there, believing everybody, and asks for `host`.
pub(super) fn handshake(
    to: SocketAddr,
    name: ServerName<'static>,
    host: &str,
) -> Result<ProbeResponse, HandshakeFailure> {
    let failed = |error: std::io::Error| HandshakeFailure::Failed(error.to_string());
    let mut socket = TcpStream::connect_timeout(&to, CONNECT_TIMEOUT).map_err(failed)?;
    socket.set_read_timeout(Some(CONNECT_TIMEOUT)).map_err(failed)?;
    let config = ClientConfig::builder_with_provider(certs::crypto_provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| HandshakeFailure::Failed(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate))
        .with_no_client_auth();
    let mut tls = ClientConnection::new(Arc::new(config), name)
        .map_err(|error| HandshakeFailure::Failed(error.to_string()))?;
    let mut stream = Stream::new(&mut tls, &mut socket);
    stream
        .write_all(probe_request(host).as_bytes())
        .and_then(|()| ProbeResponse::read(&mut stream))
        .map_err(|error| find_alert(&error).map_or_else(|| failed(error), HandshakeFailure::Alert))
}

fn find_alert(error: &std::io::Error) -> Option<AlertDescription> {
    let Error::AlertReceived(alert) = error.get_ref()?.downcast_ref()? else { return None };
    Some(*alert)
}

/// Believes everybody: here it is asked who is there, and nothing is told.
#[derive(Debug)]
struct AcceptAnyCertificate;

impl ServerCertVerifier for AcceptAnyCertificate {
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
        certs::crypto_provider().signature_verification_algorithms.supported_schemes()
    }
}
