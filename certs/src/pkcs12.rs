//! A PKCS#12 trust store for Java: certificates only, so it contains no secret.
//!
//! Java trusts a certificate in such a file only if it carries an Oracle-specific attribute. The password
//! protects nothing; it is part of the integrity code because tools require one.

use aws_lc_rs::{digest, hmac};
use rustls_pki_types::CertificateDer;
use yasna::models::ObjectIdentifier;
use yasna::{DERWriter, construct_der};

use crate::{NoRandomness, random_bytes};

/// Java's default password for a store of public certificates.
pub(crate) const PASSWORD: &str = "changeit";

/// The password is public; this many iterations satisfy every tool.
const ITERATIONS: u32 = 10_000;
/// The block size of SHA-256, RFC 7292, appendix B.
const BLOCK: usize = 64;
/// The diversifier for integrity keys (RFC 7292, B.3).
const FOR_INTEGRITY: u8 = 3;

const DATA: &[u64] = &[1, 2, 840, 113_549, 1, 7, 1];
const CERTIFICATE_BAG: &[u64] = &[1, 2, 840, 113_549, 1, 12, 10, 1, 3];
const X509: &[u64] = &[1, 2, 840, 113_549, 1, 9, 22, 1];
const FRIENDLY_NAME: &[u64] = &[1, 2, 840, 113_549, 1, 9, 20];
const TRUSTED_KEY_USAGE: &[u64] = &[2, 16, 840, 1, 113_894, 746_875, 1, 1];
const ANY_USAGE: &[u64] = &[2, 5, 29, 37, 0];
const SHA256: &[u64] = &[2, 16, 840, 1, 101, 3, 4, 2, 1];

/// Builds a store of `certificates`, each with its alias.
pub(crate) fn trust_store(certificates: &[(String, CertificateDer<'_>)]) -> Result<Vec<u8>, NoRandomness> {
    let salt = random_bytes::<16>()?;
    let bags = construct_der(|writer| {
        writer.write_sequence_of(|writer| {
            for (alias, certificate) in certificates {
                write_bag(writer.next(), alias, certificate);
            }
        });
    });
    let safe = construct_der(|writer| writer.write_sequence_of(|writer| write_data(writer.next(), &bags)));
    let code = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &integrity_key(&salt)), &safe);
    Ok(construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_u8(3);
            write_data(writer.next(), &safe);
            write_mac(writer.next(), code.as_ref(), &salt);
        });
    }))
}

/// Writes the `ContentInfo` of plain data.
fn write_data(writer: DERWriter<'_>, content: &[u8]) {
    writer.write_sequence(|writer| {
        writer.next().write_oid(&oid(DATA));
        writer.next().write_tagged(yasna::Tag::context(0), |writer| writer.write_bytes(content));
    });
}

/// Writes the `SafeBag` of one certificate.
fn write_bag(writer: DERWriter<'_>, alias: &str, certificate: &[u8]) {
    writer.write_sequence(|writer| {
        writer.next().write_oid(&oid(CERTIFICATE_BAG));
        writer.next().write_tagged(yasna::Tag::context(0), |writer| {
            writer.write_sequence(|writer| {
                writer.next().write_oid(&oid(X509));
                writer.next().write_tagged(yasna::Tag::context(0), |writer| writer.write_bytes(certificate));
            });
        });
        writer.next().write_set_of(|writer| {
            write_attribute(writer.next(), FRIENDLY_NAME, |writer| writer.write_bmp_string(alias));
            write_attribute(writer.next(), TRUSTED_KEY_USAGE, |writer| writer.write_oid(&oid(ANY_USAGE)));
        });
    });
}

fn write_attribute(writer: DERWriter<'_>, kind: &[u64], value: impl FnOnce(DERWriter<'_>)) {
    writer.write_sequence(|writer| {
        writer.next().write_oid(&oid(kind));
        writer.next().write_set_of(|writer| value(writer.next()));
    });
}

/// Writes the `MacData`.
fn write_mac(writer: DERWriter<'_>, code: &[u8], salt: &[u8]) {
    writer.write_sequence(|writer| {
        writer.next().write_sequence(|writer| {
            writer.next().write_sequence(|writer| {
                writer.next().write_oid(&oid(SHA256));
                writer.next().write_null();
            });
            writer.next().write_bytes(code);
        });
        writer.next().write_bytes(salt);
        writer.next().write_u32(ITERATIONS);
    });
}

/// Derives the key of RFC 7292, B.2. It is as long as one SHA-256, so one round of the outer loop suffices.
fn integrity_key(salt: &[u8]) -> [u8; 32] {
    let password: Vec<u8> = PASSWORD.encode_utf16().chain([0]).flat_map(u16::to_be_bytes).collect();
    let mut hash = digest::Context::new(&digest::SHA256);
    hash.update(&[FOR_INTEGRITY; BLOCK]);
    hash.update(&fill_blocks(salt));
    hash.update(&fill_blocks(&password));
    let mut key = hash.finish();
    for _ in 1..ITERATIONS {
        key = digest::digest(&digest::SHA256, key.as_ref());
    }
    let mut bytes = [0; 32];
    bytes.copy_from_slice(key.as_ref());
    bytes
}

/// Repeats `part` until it fills whole blocks.
fn fill_blocks(part: &[u8]) -> Vec<u8> {
    let length = part.len().next_multiple_of(BLOCK);
    part.iter().copied().cycle().take(length).collect()
}

fn oid(components: &[u64]) -> ObjectIdentifier {
    ObjectIdentifier::from_slice(components)
}
