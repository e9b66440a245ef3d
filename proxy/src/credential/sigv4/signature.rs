//! Keys and signatures: what is computed with the secret.

use std::time::SystemTime;

use aws_lc_rs::{digest, hmac};
use secrecy::ExposeSecret;
use zeroize::Zeroizing;

use super::SigningFault;
use crate::credential::value::AwsKeys;

/// Digest of nothing.
pub(super) const EMPTY_DIGEST: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const ALGORITHM: &str = "AWS4-HMAC-SHA256";
const TERMINATOR: &str = "aws4_request";

/// What everything in a request is signed with.
///
/// Derived anew for each request: the four rounds take two microseconds, and a cache would keep keys of other days
/// and of replaced secrets in memory.
pub(super) struct SigningKey {
    key: hmac::Key,
    /// `YYYYMMDDTHHMMSSZ`.
    pub(super) time: String,
    /// Day, region, service and terminator, with slashes between.
    pub(super) scope: String,
}

impl SigningKey {
    pub(super) fn derive(
        keys: &AwsKeys,
        service: &str,
        region: &str,
        now: SystemTime,
    ) -> Result<Self, SigningFault> {
        let now = jiff::Timestamp::try_from(now).map_err(|_| SigningFault::Clock)?;
        let (time, day) = (now.strftime("%Y%m%dT%H%M%SZ").to_string(), now.strftime("%Y%m%d").to_string());
        let secret = Zeroizing::new(format!("AWS4{}", keys.secret.expose_secret()));
        let mut key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
        for part in [day.as_str(), region, service, TERMINATOR] {
            key = hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&key, part.as_bytes()).as_ref());
        }
        Ok(SigningKey { key, time, scope: format!("{day}/{region}/{service}/{TERMINATOR}") })
    }

    /// Signs a request by its canonical form.
    pub(super) fn sign_request(&self, canonical: &[u8]) -> String {
        self.sign(&format!("{ALGORITHM}\n{}\n{}\n{}", self.time, self.scope, digest_hex(canonical)))
    }

    /// Signs a chunk of a body, of which the one before, or the request, had the signature `previous`.
    pub(super) fn sign_chunk(&self, previous: &str, content: &[u8]) -> String {
        self.sign(&format!(
            "{ALGORITHM}-PAYLOAD\n{}\n{}\n{previous}\n{EMPTY_DIGEST}\n{}",
            self.time,
            self.scope,
            digest_hex(content)
        ))
    }

    /// Signs the trailers after the last chunk, one in a line.
    pub(super) fn sign_trailers(&self, previous: &str, lines: &str) -> String {
        let digest = digest_hex(lines.as_bytes());
        self.sign(&format!("{ALGORITHM}-TRAILER\n{}\n{}\n{previous}\n{digest}", self.time, self.scope))
    }

    fn sign(&self, text: &str) -> String {
        hex(hmac::sign(&self.key, text.as_bytes()).as_ref())
    }

    /// Returns the value of `Authorization`.
    pub(super) fn authorization(&self, keys: &AwsKeys, signed_fields: &str, signature: &str) -> String {
        let (id, scope) = (&keys.id, &self.scope);
        format!("{ALGORITHM} Credential={id}/{scope}, SignedHeaders={signed_fields}, Signature={signature}")
    }
}

pub(super) fn digest_hex(bytes: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, bytes).as_ref())
}

pub(super) fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(u32::from(nibble), 16).unwrap_or_default();
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}
