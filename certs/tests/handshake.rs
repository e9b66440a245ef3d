//! A TLS handshake between two ends in memory, at a time that the test chooses.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, ServerConfig, ServerConnection,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

/// Runs a handshake and returns the error of the client, or else of the server.
pub(crate) fn handshake(
    client: Arc<ClientConfig>,
    name: ServerName<'static>,
    server: Arc<ServerConfig>,
) -> Result<(), rustls::Error> {
    let mut client = ClientConnection::new(client, name)?;
    let mut server = ServerConnection::new(server)?;
    while client.is_handshaking() || server.is_handshaking() {
        let mut flight = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut flight).unwrap();
        }
        server.read_tls(&mut flight.as_slice()).unwrap();
        server.process_new_packets()?;
        let mut flight = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut flight).unwrap();
        }
        client.read_tls(&mut flight.as_slice()).unwrap();
        client.process_new_packets()?;
    }
    Ok(())
}

/// A client that trusts only `anchor`, at the time `now`.
pub(crate) fn client_at(anchor: &CertificateDer<'static>, now: UnixTime) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(anchor.clone()).unwrap();
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), certs::crypto_provider());
    let verifier = Arc::new(FixedTimeVerifier { verifier: verifier.build().unwrap(), now });
    let config = ClientConfig::builder_with_provider(certs::crypto_provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    Arc::new(config)
}

/// The standard verifier, with the test's clock instead of the system's.
#[derive(Debug)]
struct FixedTimeVerifier {
    verifier: Arc<WebPkiServerVerifier>,
    now: UnixTime,
}

impl ServerCertVerifier for FixedTimeVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verifier.verify_server_cert(leaf, chain, name, ocsp, self.now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
