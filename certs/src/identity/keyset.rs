//! An issuer's public keys: a JWK Set or SPIFFE bundle, each key pinned to one algorithm.

use std::collections::HashMap;

use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED, ED25519, ParsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::DecodingKey;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use super::compact::MAX_KEY_ID;
use super::{SigningAlgorithm, is_plain};

/// Largest JWKS file.
pub(super) const MAX_FILE: u64 = 256 * 1024;
/// Maximum number of keys per issuer.
pub const MAX_KEYS: usize = 64;
/// Allowed RSA modulus sizes in bytes: neither weak nor slow.
const RSA_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;

/// Why a JWK Set was refused. The last good one stays in use until it is stale.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeySetError {
    #[error("key {0} has the same `kid` as another key")]
    DuplicateId(usize),
    #[error("key {0} is not a usable P-256, Ed25519 or RSA (2048 to 8192 bits) public key")]
    Malformed(usize),
    #[error("key {0} has no `kid` of 1 to {MAX_KEY_ID} printable characters without spaces")]
    NoId(usize),
    #[error(
        "it contains no key that this issuer may sign with; check that the algorithm of its keys is allowed"
    )]
    NoKeys,
    #[error("it is not a JWK Set: line {line}, column {column}")]
    NotJson { line: usize, column: usize },
    #[error("key {0} is a private or symmetric key; publish public keys only")]
    Private(usize),
    #[error("it contains more than {MAX_KEYS} keys")]
    TooMany,
}

/// The keys of one issuer by their `kid`.
pub(super) struct KeySet(HashMap<String, PublicKey>);

pub(super) struct PublicKey {
    pub(super) algorithm: SigningAlgorithm,
    key: DecodingKey,
    /// Unix seconds from which on its signatures are refused.
    ends: Option<u64>,
}

impl KeySet {
    /// Parses a JWK Set for an issuer that may use `allowed`.
    ///
    /// Skips keys for other uses or of other algorithms. A set without any key is valid: with it an issuer
    /// revokes everything it ever signed.
    pub(super) fn parse(text: &[u8], allowed: &[SigningAlgorithm]) -> Result<Self, KeySetError> {
        let document: JwksDocument = serde_json::from_slice(text).map_err(|error| {
            // serde's message could quote the file, perhaps a private key.
            KeySetError::NotJson { line: error.line(), column: error.column() }
        })?;
        if document.keys.len() > MAX_KEYS {
            return Err(KeySetError::TooMany);
        }
        let mut keys = HashMap::new();
        for (index, jwk) in document.keys.iter().enumerate() {
            if let Some((id, key)) = jwk.to_public_key(index + 1, allowed)?
                && keys.insert(id, key).is_some()
            {
                return Err(KeySetError::DuplicateId(index + 1));
            }
        }
        Ok(Self(keys))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the key with this id, unless it has retired.
    pub(super) fn key(&self, id: &str, now: u64) -> Option<&PublicKey> {
        self.0.get(id).filter(|key| key.ends.is_none_or(|end| now < end))
    }
}

impl PublicKey {
    /// Returns whether `signature` (base64url) is valid over `message`, by this key's own algorithm.
    pub(super) fn verifies(&self, message: &str, signature: &str) -> bool {
        let algorithm = self.algorithm.to_jsonwebtoken();
        jsonwebtoken::crypto::verify(signature, message.as_bytes(), &self.key, algorithm).unwrap_or(false)
    }
}

#[derive(Deserialize)]
struct JwksDocument {
    keys: Vec<Jwk>,
}

/// The members of RFC 7517 and 7518 used here; a set may contain others.
#[derive(Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    crv: Option<String>,
    x: Option<String>,
    y: Option<String>,
    n: Option<String>,
    e: Option<String>,
    key_ops: Option<Vec<String>>,
    /// When the key retires, as in our own issuer and OpenID Federation (section 8.6).
    exp: Option<u64>,
    #[serde(default, deserialize_with = "present")]
    d: bool,
    #[serde(default, deserialize_with = "present")]
    p: bool,
    #[serde(default, deserialize_with = "present")]
    q: bool,
    #[serde(default, deserialize_with = "present")]
    k: bool,
}

impl Jwk {
    /// Returns the key, or `None` if it is not for signing tokens.
    fn to_public_key(
        &self,
        index: usize,
        allowed: &[SigningAlgorithm],
    ) -> Result<Option<(String, PublicKey)>, KeySetError> {
        if self.kty == "oct" || self.d || self.p || self.q || self.k {
            return Err(KeySetError::Private(index));
        }
        let usable = |algorithm: &SigningAlgorithm| self.is_for_tokens(*algorithm, allowed);
        let Some(algorithm) = self.algorithm().filter(usable) else {
            return Ok(None);
        };
        // Refuse a `kid` that a token cannot contain: the key would never be found.
        let id = self.kid.clone().filter(|id| is_plain(id, MAX_KEY_ID));
        let id = id.ok_or(KeySetError::NoId(index))?;
        let key = self.decoding_key(algorithm).ok_or(KeySetError::Malformed(index))?;
        Ok(Some((id, PublicKey { algorithm, key, ends: self.exp })))
    }

    fn is_for_tokens(&self, algorithm: SigningAlgorithm, allowed: &[SigningAlgorithm]) -> bool {
        let named = |name: &str| name == algorithm.name();
        matches!(self.purpose.as_deref(), None | Some("sig" | "jwt-svid"))
            && self.key_ops.as_ref().is_none_or(|all| all.iter().any(|one| one == "verify"))
            && self.alg.as_deref().is_none_or(named)
            && allowed.contains(&algorithm)
    }

    /// Determines the algorithm from key type and curve; unknown types are skipped (RFC 7517, section 5).
    fn algorithm(&self) -> Option<SigningAlgorithm> {
        match (self.kty.as_str(), self.crv.as_deref()) {
            ("EC", Some("P-256")) => Some(SigningAlgorithm::Es256),
            ("OKP", Some("Ed25519")) => Some(SigningAlgorithm::EdDsa),
            ("RSA", _) => Some(SigningAlgorithm::Rs256),
            _ => None,
        }
    }

    /// Decodes the key. Finds a point that is not on its curve now, not at the first token.
    fn decoding_key(&self, algorithm: SigningAlgorithm) -> Option<DecodingKey> {
        match algorithm {
            SigningAlgorithm::EdDsa => {
                let x = decode_octets(&self.x)?;
                ParsedPublicKey::new(&ED25519, &x).ok()?;
                Some(DecodingKey::from_ed_der(&x))
            }
            SigningAlgorithm::Es256 => {
                let point = [&[4][..], &decode_octets(&self.x)?, &decode_octets(&self.y)?].concat();
                ParsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &point).ok()?;
                Some(DecodingKey::from_ec_der(&point))
            }
            SigningAlgorithm::Rs256 => {
                let (n, e) = (decode_octets(&self.n)?, decode_octets(&self.e)?);
                let exponent =
                    e.iter().try_fold(0u64, |sum, byte| sum.checked_mul(256)?.checked_add((*byte).into()));
                let good = RSA_BYTES.contains(&n.len()) && n.first() != Some(&0) && exponent? >= 65_537;
                good.then(|| DecodingKey::from_rsa_raw_components(&n, &e))
            }
        }
    }
}

/// Returns that a member is present, `null` or not, and discards its value.
fn present<'de, D: Deserializer<'de>>(input: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(input).map(|_| true)
}

fn decode_octets(text: &Option<String>) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text.as_ref()?).ok()
}
