//! Whoever has the issuer's key can sign anything: so what is refused here is refused for what it says.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rcgen::{KeyPair, SigningKey};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;

/// The issuer's own key, in hands that write whatever they like.
pub(crate) struct IdentityForger(KeyPair);

impl IdentityForger {
    /// Takes the key from the directory of an issuer.
    pub(crate) fn new(dir: &Path, kid: &str) -> Self {
        let key = PrivateKeyDer::from_pem_file(dir.join(format!("{kid}.key"))).unwrap();
        IdentityForger(KeyPair::try_from(&key).unwrap())
    }

    /// A token with this header and these claims, and a signature that fits.
    pub(crate) fn sign(&self, header: &str, claims: &str) -> String {
        let message = signing_input(header, claims);
        let signature = self.0.sign(message.as_bytes()).unwrap();
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(raw_signature(&signature)))
    }
}

/// A token signed with HMAC, the key being any text.
pub(crate) fn sign_hmac(header: &str, claims: &str, key: &[u8]) -> String {
    let message = signing_input(header, claims);
    let key: String = key.iter().map(|octet| format!("{octet:02x}")).collect();
    let mut openssl = Command::new("openssl")
        .args(["dgst", "-sha256", "-mac", "HMAC", "-binary", "-macopt", &format!("hexkey:{key}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("openssl");
    openssl.stdin.take().unwrap().write_all(message.as_bytes()).unwrap();
    let done = openssl.wait_with_output().unwrap();
    assert!(done.status.success() && done.stdout.len() == 32, "openssl does not sign");
    format!("{message}.{}", URL_SAFE_NO_PAD.encode(done.stdout))
}

fn signing_input(header: &str, claims: &str) -> String {
    format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims))
}

/// Two integers of 32 octets (RFC 7518, section 3.4) from the DER that certificates use.
fn raw_signature(der: &[u8]) -> Vec<u8> {
    let mut rest = &der[2..];
    let mut both = Vec::new();
    for _ in 0..2 {
        let (number, after) = rest[2..].split_at(usize::from(rest[1]));
        let number = &number[number.len().saturating_sub(32)..];
        both.extend(vec![0; 32 - number.len()]);
        both.extend(number);
        rest = after;
    }
    both
}
