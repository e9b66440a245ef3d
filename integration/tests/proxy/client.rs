//! A TLS client of the tests' own, for what ordinary clients do not do.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::client::{EchGreaseConfig, EchMode};
use rustls::crypto::aws_lc_rs::hpke::DH_KEM_X25519_HKDF_SHA256_AES_128;
use rustls::crypto::hpke::HpkePublicKey;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::scene::{DEADLINE, ProxyScene};

pub(crate) type TlsClientStream = StreamOwned<ClientConnection, TcpStream>;

/// The roots a client of these tests believes: ours, and the origin's own.
fn root_store(scene: &ProxyScene) -> RootCertStore {
    let ours = std::fs::read(scene.trust.get("SSL_CERT_FILE").expect("a bundle")).unwrap();
    let mut roots = RootCertStore::empty();
    for text in [ours, scene.minted.root.clone().into_bytes()] {
        for certificate in certs::pem::certificates(&text).unwrap() {
            roots.add(certificate).unwrap();
        }
    }
    roots
}

/// An ordinary client.
pub(crate) fn client_config(scene: &ProxyScene) -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(certs::crypto_provider());
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    Arc::new(builder.with_root_certificates(root_store(scene)).with_no_client_auth())
}

/// One that sends an ECH extension which means nothing, as browsers do.
pub(crate) fn ech_grease_config(scene: &ProxyScene) -> Arc<ClientConfig> {
    let anybody = HpkePublicKey(vec![7; 32]);
    let mode = EchMode::from(EchGreaseConfig::new(DH_KEM_X25519_HKDF_SHA256_AES_128, anybody));
    let builder = ClientConfig::builder_with_provider(certs::crypto_provider()).with_ech(mode).unwrap();
    Arc::new(builder.with_root_certificates(root_store(scene)).with_no_client_auth())
}

/// A connection from a sandbox.
pub(crate) fn connect_tcp(scene: &ProxyScene, sandbox: usize, to: &str) -> TcpStream {
    let connect = || TcpStream::connect(to);
    let stream = scene.net.sandboxes[sandbox].enter(connect).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

pub(crate) fn connect_tls(
    scene: &ProxyScene,
    sandbox: usize,
    to: &str,
    config: &Arc<ClientConfig>,
    name: &str,
) -> TlsClientStream {
    try_connect_tls(scene, sandbox, to, config, name).unwrap_or_else(|error| panic!("{name}: {error}"))
}

pub(crate) fn try_connect_tls(
    scene: &ProxyScene,
    sandbox: usize,
    to: &str,
    config: &Arc<ClientConfig>,
    name: &str,
) -> io::Result<TlsClientStream> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let connection = ClientConnection::new(config.clone(), name).unwrap();
    let mut tls = StreamOwned::new(connection, connect_tcp(scene, sandbox, to));
    while tls.conn.is_handshaking() {
        tls.conn.complete_io(&mut tls.sock)?;
    }
    Ok(tls)
}

pub(crate) fn send_text(stream: &mut impl Write, text: &str) {
    stream.write_all(text.as_bytes()).unwrap();
    stream.flush().unwrap();
}

/// The head of an answer; its body, if it announces one, is read and thrown away.
pub(crate) fn read_head(stream: &mut impl Read) -> String {
    let mut head = Vec::new();
    let mut one = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut one) {
            Ok(1) => head.push(one[0]),
            other => panic!("{other:?} after {:?}", String::from_utf8_lossy(&head)),
        }
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| {
        line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse::<usize>().ok()
    });
    stream.read_exact(&mut vec![0; length.unwrap_or_default()]).unwrap();
    head
}
