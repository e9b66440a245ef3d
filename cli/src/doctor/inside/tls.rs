//! TLS directly to an address: with a denied name, and without SNI.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    AlertDescription, ClientConfig, ClientConnection, DigitallySignedStruct, Error, SignatureScheme, Stream,
};

use super::tcp::{CONNECT_TIMEOUT, judge_response, probe_connect, probe_request};
use super::{InsideProbe, PeerPresence, ProbeTargets};
use crate::doctor::probe::ProbeVerdict;
use crate::doctor::response::ProbeResponse;

const GROUP: &str = "TLS";
const FIX: &str =
    "redirect all TCP of the sandbox to Sandbar: a firewall that allows port 443 allows every name";

pub(super) fn probes(targets: &ProbeTargets) -> Vec<InsideProbe> {
    let (four, six): (IpAddr, IpAddr) = (targets.ipv4.into(), targets.ipv6.into());
    let resolver: IpAddr = targets.resolver.into();
    [
        ("tls.named", "TLS to an address, with a denied name", four, 443, true),
        ("tls.named.six", "TLS over IPv6, with a denied name", six, 443, true),
        ("tls.nameless", "TLS to an address, without SNI", four, 443, false),
        ("tls.odd-port", "TLS on another port", four, 8443, true),
        ("dns.over-tls", "DNS over TLS (DoT)", resolver, 853, false),
        ("dns.over-https", "DNS over HTTPS, by address", resolver, 443, false),
    ]
    .into_iter()
    .map(|(name, what, address, port, named)| {
        let to = SocketAddr::new(address, port);
        InsideProbe::new(GROUP, name, format!("{what}, {to}"), FIX, move |targets| {
            let name = if named {
                ServerName::try_from(targets.denied.clone()).ok()
            } else {
                Some(ServerName::from(to.ip()))
            };
            match name {
                Some(name) => probe_tls(targets, to, name),
                None => ProbeVerdict::Unknown(format!("`{}` is not a valid name", targets.denied)),
            }
        })
    })
    .collect()
}

/// Starts a TLS handshake. Any server can send an alert, so an alert counts only if Sandbar has just identified
/// itself over plain HTTP at the same address.
fn probe_tls(targets: &ProbeTargets, to: SocketAddr, name: ServerName<'static>) -> ProbeVerdict {
    let plain = probe_connect(targets, to, PeerPresence::Answers, |_| Ok(()));
    if !matches!(plain, ProbeVerdict::Answered(_)) {
        return plain;
    }
    match handshake(to, name, &targets.denied) {
        Ok(answer) => judge_response(&answer),
        Err(HandshakeFailure::Alert(alert)) => {
            ProbeVerdict::Answered(format!("refused by the TLS alert {alert:?}"))
        }
        Err(HandshakeFailure::Failed(why)) => ProbeVerdict::Blocked(why),
    }
}

/// Why there was no response.
pub(super) enum HandshakeFailure {
    Alert(AlertDescription),
    Failed(String),
}

/// Completes a handshake with any certificate and sends a request for `host`.
pub(super) fn handshake(
    to: SocketAddr,
    name: ServerName<'static>,
    host: &str,
) -> Result<ProbeResponse, HandshakeFailure> {
    let failed = |error: std::io::Error| HandshakeFailure::Failed(error.to_string());
    let config = ClientConfig::builder_with_provider(certs::crypto_provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| HandshakeFailure::Failed(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate))
        .with_no_client_auth();
    let mut tls = ClientConnection::new(Arc::new(config), name)
        .map_err(|error| HandshakeFailure::Failed(error.to_string()))?;
    // Only now: a client that says nothing for a moment is taken for one that waits for the server to speak first.
    let mut socket = TcpStream::connect_timeout(&to, CONNECT_TIMEOUT).map_err(failed)?;
    socket.set_read_timeout(Some(CONNECT_TIMEOUT)).map_err(failed)?;
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

/// Accepts any certificate: the probe only identifies the peer and sends nothing confidential.
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
