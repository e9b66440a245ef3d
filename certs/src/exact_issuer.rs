//! Certificates with the exact issuer name.
//!
//! A leaf is valid only if its issuer equals the subject of its authority byte for byte. rcgen parses names
//! and keeps one attribute of each type, so `DC=example, DC=corp` comes out as another name. Therefore rcgen
//! only builds the certificate; this module replaces the issuer with the raw DER and signs the result.

use rcgen::{Error, PublicKeyData, SignatureAlgorithm, SigningKey};
use rustls_pki_types::CertificateDer;
use yasna::{ASN1Result, BERReader};

/// Index of the issuer in a version 3 certificate: version, serial number, algorithm, issuer (RFC 5280, 4.1).
const ISSUER_INDEX: usize = 3;

/// The public half of a signing key. It produces an empty signature, to be replaced later.
pub(crate) struct PlaceholderSigner {
    pub(crate) public_key: Vec<u8>,
    pub(crate) algorithm: &'static SignatureAlgorithm,
}

impl PublicKeyData for PlaceholderSigner {
    fn der_bytes(&self) -> &[u8] {
        &self.public_key
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.algorithm
    }
}

impl SigningKey for PlaceholderSigner {
    fn sign(&self, _: &[u8]) -> Result<Vec<u8>, Error> {
        Ok(Vec::new())
    }
}

/// Signs `blank`, a certificate built with a [`PlaceholderSigner`], under the issuer name `issuer` (DER).
pub(crate) fn issue_certificate(
    blank: &[u8],
    issuer: &[u8],
    key: &impl SigningKey,
) -> Result<CertificateDer<'static>, Error> {
    let parts = yasna::parse_der(blank, |reader| {
        reader.read_sequence(|reader| {
            let parts = (read_members(reader.next())?, reader.next().read_der()?);
            reader.next().read_der()?; // the empty signature
            Ok(parts)
        })
    });
    let (mut body, algorithm) = parts.map_err(|_| Error::CouldNotParseCertificate)?;
    *body.get_mut(ISSUER_INDEX).ok_or(Error::CouldNotParseCertificate)? = issuer.to_vec();
    let body = write_sequence(&body);
    let signature = key.sign(&body)?;
    let signature = yasna::construct_der(|writer| {
        writer.write_bitvec_bytes(&signature, 8 * signature.len());
    });
    Ok(write_sequence(&[body, algorithm, signature]).into())
}

fn read_members(reader: BERReader<'_, '_>) -> ASN1Result<Vec<Vec<u8>>> {
    let mut members = Vec::new();
    reader.read_sequence_of(|reader| {
        members.push(reader.read_der()?);
        Ok(())
    })?;
    Ok(members)
}

fn write_sequence(members: &[Vec<u8>]) -> Vec<u8> {
    yasna::construct_der(|writer| {
        writer.write_sequence(|writer| members.iter().for_each(|der| writer.next().write_der(der)));
    })
}
