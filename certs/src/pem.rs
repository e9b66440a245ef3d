//! PEM: reading and writing certificates and keys.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::{Zeroize, Zeroizing};

/// Line length of encoded text (RFC 7468, section 2).
const LINE: usize = 64;

/// Why PEM text was refused. The message never contains the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PemError {
    #[error("the private key is encrypted; provide it without a passphrase, in a file only Sandbar can read")]
    EncryptedKey,
    #[error("certificate {0} in the file is not PEM")]
    Malformed(usize),
    #[error("the file contains no certificate")]
    NoCertificate,
    #[error("the file contains no private key (PKCS#8, SEC1 or PKCS#1 PEM)")]
    NoKey,
}

/// Parses every certificate in `text`, in order; at least one.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text)
        .enumerate()
        .map(|(index, found)| found.map_err(|_| PemError::Malformed(index + 1)))
        .collect();
    match found? {
        none if none.is_empty() => Err(PemError::NoCertificate),
        some => Ok(some),
    }
}

/// Parses the first private key in `text`. It is zeroized on drop.
pub fn private_key(text: &[u8]) -> Result<Zeroizing<PrivateKeyDer<'static>>, PemError> {
    const ENCRYPTED: [&[u8]; 2] = [b"BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED"];
    if ENCRYPTED.iter().any(|mark| text.windows(mark.len()).any(|window| window == *mark)) {
        return Err(PemError::EncryptedKey);
    }
    let (kind, body) = first_key(text).ok_or(PemError::NoKey)?;
    let der = decode_base64(body).ok_or(PemError::NoKey)?.to_vec();
    Ok(Zeroizing::new(match kind {
        KeyFormat::Pkcs1 => PrivateKeyDer::Pkcs1(der.into()),
        KeyFormat::Pkcs8 => PrivateKeyDer::Pkcs8(der.into()),
        KeyFormat::Sec1 => PrivateKeyDer::Sec1(der.into()),
    }))
}

#[derive(Clone, Copy)]
enum KeyFormat {
    Pkcs1,
    Pkcs8,
    Sec1,
}

/// Returns the format and the base64 of the first key.
fn first_key(text: &[u8]) -> Option<(KeyFormat, &[u8])> {
    let kinds = [
        (KeyFormat::Pkcs1, "RSA PRIVATE KEY"),
        (KeyFormat::Pkcs8, "PRIVATE KEY"),
        (KeyFormat::Sec1, "EC PRIVATE KEY"),
    ];
    let found = kinds.into_iter().filter_map(|(kind, label)| {
        let (start, after) = find_after(text, format!("-----BEGIN {label}-----").as_bytes())?;
        let (length, _) = self::find_after(after, format!("-----END {label}-----").as_bytes())?;
        Some((start, kind, after.get(..length)?))
    });
    found.min_by_key(|(start, _, _)| *start).map(|(_, kind, body)| (kind, body))
}

/// Returns where `mark` starts in `text`, and the text after it.
fn find_after<'a>(text: &'a [u8], mark: &[u8]) -> Option<(usize, &'a [u8])> {
    let start = text.windows(mark.len()).position(|window| window == mark)?;
    Some((start, text.get(start + mark.len()..)?))
}

/// Decodes a key. Buffers are allocated at full size and zeroized, so that no copy of it stays in memory.
fn decode_base64(body: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let mut plain = Zeroizing::new(Vec::with_capacity(body.len()));
    plain.extend(body.iter().copied().filter(|byte| !byte.is_ascii_whitespace()));
    let mut der = Zeroizing::new(vec![0; base64::decoded_len_estimate(plain.len())]);
    let length = STANDARD.decode_slice(&*plain, &mut der).ok()?;
    der.truncate(length);
    Some(der)
}

/// Encodes `der` as a `CERTIFICATE`.
pub fn encode_certificate(der: &CertificateDer<'_>) -> String {
    encode_block("CERTIFICATE", der).to_string()
}

/// Encodes `der` (PKCS#8) as a `PRIVATE KEY`. It is zeroized on drop.
pub fn encode_private_key(der: &[u8]) -> Zeroizing<String> {
    encode_block("PRIVATE KEY", der)
}

fn encode_block(label: &str, der: &[u8]) -> Zeroizing<String> {
    let mut body = STANDARD.encode(der).into_bytes();
    // One allocation, so that a buffer that grows leaves no copy of a key behind.
    let mut text = String::with_capacity(body.len() + body.len() / LINE + 2 * label.len() + 40);
    text.push_str(&format!("-----BEGIN {label}-----\n"));
    for line in body.chunks(LINE) {
        text.extend(line.iter().copied().map(char::from));
        text.push('\n');
    }
    text.push_str(&format!("-----END {label}-----\n"));
    body.zeroize();
    Zeroizing::new(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_back() {
        for length in [1, 47, 48, 49, 96, 1000] {
            let der = CertificateDer::from(vec![0x30; length]);
            let text = encode_certificate(&der);
            assert!(text.lines().all(|line| line.len() <= LINE), "{length}");
            assert_eq!(certificates(text.as_bytes()).unwrap(), [der], "{length}");
        }
    }

    #[test]
    fn a_key_is_found_among_other_things_and_whatever_its_kind() {
        let parameters = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n";
        let wrapped = |label: &str| {
            format!(
                "# caf\u{e9}\n{parameters}-----BEGIN {label}-----\r\nMA\r\nAA\r\n-----END {label}-----\r\n"
            )
        };
        for label in ["PRIVATE KEY", "EC PRIVATE KEY", "RSA PRIVATE KEY"] {
            let key = private_key(wrapped(label).as_bytes()).unwrap();
            assert_eq!(key.secret_der(), [0x30, 0, 0], "{label}");
            let (pkcs1, sec1) =
                (matches!(&*key, PrivateKeyDer::Pkcs1(_)), matches!(&*key, PrivateKeyDer::Sec1(_)));
            assert_eq!((pkcs1, sec1), (label.starts_with("RSA"), label.starts_with("EC")), "{label}");
        }
        let two = format!("{}{}", wrapped("EC PRIVATE KEY"), wrapped("PRIVATE KEY"));
        assert!(matches!(&*private_key(two.as_bytes()).unwrap(), PrivateKeyDer::Sec1(_)));
        for bad in [
            "-----BEGIN PRIVATE KEY-----\nMAAA\n",
            "-----BEGIN PRIVATE KEY-----\n!!\n-----END PRIVATE KEY-----",
        ] {
            assert_eq!(private_key(bad.as_bytes()).unwrap_err(), PemError::NoKey, "{bad}");
        }
    }

    #[test]
    fn refusals_say_what_is_missing() {
        for (text, refused) in [
            ("", PemError::NoKey),
            ("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n", PemError::NoKey),
            ("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMAA=\n", PemError::EncryptedKey),
            ("-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n", PemError::EncryptedKey),
        ] {
            assert_eq!(private_key(text.as_bytes()).unwrap_err(), refused, "{text}");
        }
        assert_eq!(certificates(b"hello").unwrap_err(), PemError::NoCertificate);
        let broken = b"-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----\n";
        assert_eq!(certificates(broken).unwrap_err(), PemError::Malformed(1));
    }
}
