//! TLS from both sides: certificates for origins, a client that trusts the authority, and hellos made by hand.

use std::fs;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};

use crate::instance::SandbarInstance;
use crate::wire::RawConnection;

/// An authority of the test's own, for origins.
pub(crate) struct OriginCa(CertifiedIssuer<'static, KeyPair>);

impl OriginCa {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        params.distinguished_name.push(DnType::CommonName, "root of the test");
        OriginCa(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        certs::pem::encode_certificate(self.0.der())
    }

    /// A server that is `name`, speaking HTTP/1.
    pub(crate) fn server_config(&self, name: &str) -> Arc<ServerConfig> {
        self.server_config_with(CertificateParams::new([name.to_owned()]).unwrap())
    }

    /// The certificate and the key of a server that is `name`, as PEM.
    pub(crate) fn issue_leaf(&self, name: &str) -> (String, String) {
        self.issue_leaf_for([name.to_owned()])
    }

    /// The same for a server with several names.
    pub(crate) fn issue_leaf_for(&self, names: impl Into<Vec<String>>) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(names).unwrap();
        let leaf = params.signed_by(&key, &self.0).unwrap();
        let key = certs::pem::encode_private_key(&key.serialize_der());
        (certs::pem::encode_certificate(leaf.der()), key.to_string())
    }

    /// A server with a certificate of these properties.
    pub(crate) fn server_config_with(&self, params: CertificateParams) -> Arc<ServerConfig> {
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &self.0).unwrap();
        config_with_leaf(leaf.der().clone(), &key)
    }
}

/// A server whose certificate vouches for itself.
pub(crate) fn self_signed_config(name: &str) -> Arc<ServerConfig> {
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new([name.to_owned()]).unwrap().self_signed(&key).unwrap();
    config_with_leaf(leaf.der().clone(), &key)
}

fn config_with_leaf(leaf: CertificateDer<'static>, key: &KeyPair) -> Arc<ServerConfig> {
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(certs::crypto_provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![leaf], key);
    Arc::new(config.unwrap())
}

/// A client that trusts the authority of `world`.
pub(crate) fn client_config(world: &SandbarInstance, protocol: &str) -> Arc<ClientConfig> {
    client_config_with(&fs::read(world.ca_path()).unwrap(), protocol)
}

/// A client that trusts these roots, as PEM.
pub(crate) fn client_config_with(pem: &[u8], protocol: &str) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let mut config = ClientConfig::builder_with_provider(certs::crypto_provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    Arc::new(config)
}

/// Ends TLS as a client of `name` on a connection that is granted already.
pub(crate) fn tls_handshake(
    wire: RawConnection,
    config: &Arc<ClientConfig>,
    name: &str,
) -> Result<RawConnection, String> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut connection = ClientConnection::new(config.clone(), name).unwrap();
    let mut carrier = wire.into_stream();
    while connection.is_handshaking() {
        connection.complete_io(&mut carrier).map_err(|error| error.to_string())?;
    }
    Ok(RawConnection::from_stream(Box::new(StreamOwned::new(connection, carrier))))
}

/// What a hello made by hand says.
pub(crate) struct RawClientHello {
    /// The version of its own, before extensions had one.
    pub(crate) version: u16,
    /// The versions of the extension; none leaves it out.
    pub(crate) versions: Vec<u16>,
    /// The body of the `server_name` extension; none leaves it out.
    pub(crate) names: Option<Vec<u8>>,
    /// Bytes of padding.
    pub(crate) padding: usize,
}

impl RawClientHello {
    /// An ordinary hello for one name.
    pub(crate) fn for_name(name: impl AsRef<[u8]>) -> Self {
        RawClientHello {
            version: 0x0303,
            versions: vec![0x0304, 0x0303],
            names: Some(server_name_list(&[name.as_ref()])),
            padding: 0,
        }
    }

    /// The handshake message.
    pub(crate) fn handshake_message(&self) -> Vec<u8> {
        let mut extensions = Vec::new();
        let mut extension = |kind: u16, body: &[u8]| {
            extensions.extend(kind.to_be_bytes());
            extensions.extend(length_prefixed(body));
        };
        if let Some(names) = &self.names {
            extension(0, names);
        }
        if !self.versions.is_empty() {
            let list: Vec<u8> = self.versions.iter().flat_map(|one| one.to_be_bytes()).collect();
            extension(43, &[&[list.len() as u8][..], &list].concat());
        }
        extension(10, &length_prefixed(&[0, 23, 0, 29])); // groups
        extension(13, &length_prefixed(&[4, 3, 8, 4])); // signatures
        extension(51, &length_prefixed(&[])); // no key yet: the server asks for one
        if self.padding > 0 {
            extension(21, &vec![0; self.padding]);
        }
        let mut body = self.version.to_be_bytes().to_vec();
        body.extend([7; 32]); // random
        body.push(0); // session
        body.extend(length_prefixed(&[0x13, 1, 0xc0, 0x2b]));
        body.extend([1, 0]); // compression: none
        body.extend(length_prefixed(&extensions));
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        [&[1][..], &length[1..], &body].concat()
    }

    /// The message in one record.
    pub(crate) fn record_bytes(&self) -> Vec<u8> {
        tls_record(&self.handshake_message())
    }
}

/// A handshake record.
pub(crate) fn tls_record(payload: &[u8]) -> Vec<u8> {
    [&[22, 3, 1][..], &length_prefixed(payload)].concat()
}

/// The body of `server_name` for these names.
pub(crate) fn server_name_list(names: &[&[u8]]) -> Vec<u8> {
    let each = names.iter().flat_map(|name| [&[0][..], &length_prefixed(name)].concat());
    length_prefixed(&each.collect::<Vec<u8>>())
}

fn length_prefixed(bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).unwrap();
    [&length.to_be_bytes()[..], bytes].concat()
}
