//! Keys that sign tokens, and their public halves as JWKs.

use std::fmt;
use std::path::Path;

use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, RsaKeyPair};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::EncodingKey;
use jsonwebtoken::jwk::{Jwk, ThumbprintHash};
use rustls_pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use crate::files::{self, FileError};
use crate::pem::{self, PemError};

/// A signature algorithm. It belongs to a key, the operator chooses it, and it is never read from a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SigningAlgorithm {
    /// Not in the JWT-SVID list: only for issuers and verifiers that both support it.
    EdDsa,
    Es256,
    Rs256,
}

impl SigningAlgorithm {
    /// Returns the name in a header and in a JWK.
    pub fn name(self) -> &'static str {
        match self {
            Self::EdDsa => "EdDSA",
            Self::Es256 => "ES256",
            Self::Rs256 => "RS256",
        }
    }

    /// Returns the algorithm of exactly this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::EdDsa, Self::Es256, Self::Rs256].into_iter().find(|algorithm| algorithm.name() == name)
    }

    pub(super) fn to_jsonwebtoken(self) -> jsonwebtoken::Algorithm {
        match self {
            Self::EdDsa => jsonwebtoken::Algorithm::EdDSA,
            Self::Es256 => jsonwebtoken::Algorithm::ES256,
            Self::Rs256 => jsonwebtoken::Algorithm::RS256,
        }
    }
}

/// Why there is no key to sign with. The messages contain nothing of a key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("cannot generate a key")]
    Generation,
    #[error("{path}: {source}")]
    Pem { path: String, source: PemError },
    #[error(transparent)]
    Text(PemError),
    #[error("cannot represent the key as a JWK")]
    Publication,
    #[error("the key cannot sign")]
    Signing,
    #[error(
        "unsupported key for signing tokens; use PKCS#8 with ECDSA P-256, Ed25519 or RSA of at least 2048 bits"
    )]
    Unsupported,
}

/// A signed token. It is a secret: only [`SignedToken::expose`] returns it.
#[derive(Clone)]
pub struct SignedToken(Zeroizing<String>);

impl SignedToken {
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SignedToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(..)")
    }
}

/// A private key that signs tokens. It is zeroized on drop.
pub struct SigningKey {
    algorithm: SigningAlgorithm,
    id: String,
    key: EncodingKey,
    jwk: Value,
}

impl SigningKey {
    /// Generates a key in memory only.
    pub fn generate(algorithm: SigningAlgorithm) -> Result<Self, KeyError> {
        Self::from_pkcs8(&generate_pkcs8(algorithm)?)
    }

    /// Parses the private key in a PEM text: PKCS#8, or PKCS#1 for RSA.
    pub fn from_pem(text: &[u8]) -> Result<Self, KeyError> {
        let der = pem::private_key(text).map_err(KeyError::Text)?;
        match &*der {
            PrivateKeyDer::Pkcs8(pkcs8) => Self::from_pkcs8(pkcs8.secret_pkcs8_der()),
            PrivateKeyDer::Pkcs1(pkcs1) => {
                RsaKeyPair::from_der(pkcs1.secret_pkcs1_der()).map_err(|_| KeyError::Unsupported)?;
                let key = EncodingKey::from_rsa_der(pkcs1.secret_pkcs1_der());
                Self::from_encoding_key(SigningAlgorithm::Rs256, key)
            }
            _ => Err(KeyError::Unsupported), // SEC1, and what the crate may add
        }
    }

    /// Loads a PKCS#8 PEM file, readable by its owner only.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let in_file = |source| KeyError::Pem { path: path.display().to_string(), source };
        let der = pem::private_key(&files::read_secret(path)?).map_err(in_file)?;
        let PrivateKeyDer::Pkcs8(pkcs8) = &*der else {
            return Err(KeyError::Unsupported);
        };
        Self::from_pkcs8(pkcs8.secret_pkcs8_der())
    }

    pub(super) fn from_pkcs8(pkcs8: &[u8]) -> Result<Self, KeyError> {
        let (algorithm, key) = encoding_key(pkcs8)?;
        Self::from_encoding_key(algorithm, key)
    }

    fn from_encoding_key(algorithm: SigningAlgorithm, key: EncodingKey) -> Result<Self, KeyError> {
        let jwk = Jwk::from_encoding_key(&key, algorithm.to_jsonwebtoken());
        let jwk = jwk.map_err(|_| KeyError::Publication)?;
        let id = jwk.thumbprint(ThumbprintHash::SHA256).map_err(|_| KeyError::Publication)?;
        let mut jwk = serde_json::to_value(&jwk).map_err(|_| KeyError::Publication)?;
        jwk["kid"] = id.clone().into();
        jwk["use"] = "sig".into();
        Ok(Self { algorithm, id, key, jwk })
    }

    pub fn algorithm(&self) -> SigningAlgorithm {
        self.algorithm
    }

    /// Returns the `kid`: the RFC 7638 thumbprint, which identifies the key.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the public half.
    pub fn jwk(&self) -> &Value {
        &self.jwk
    }

    /// Signs `claims` as a compact token.
    pub(crate) fn sign(&self, claims: &Value) -> Result<SignedToken, KeyError> {
        self.sign_with(&json!({ "kid": self.id }), claims)
    }

    /// Signs `claims` as a compact token, with these members of the header besides the algorithm and the type.
    pub fn sign_with(&self, header: &Value, claims: &Value) -> Result<SignedToken, KeyError> {
        let mut header = header.clone();
        header["alg"] = self.algorithm.name().into();
        header["typ"] = "JWT".into();
        let encode = |part: &Value| URL_SAFE_NO_PAD.encode(part.to_string());
        let mut token = format!("{}.{}", encode(&header), encode(claims));
        let algorithm = self.algorithm.to_jsonwebtoken();
        let signature = jsonwebtoken::crypto::sign(token.as_bytes(), &self.key, algorithm);
        token.push('.');
        token.push_str(&signature.map_err(|_| KeyError::Signing)?);
        Ok(SignedToken(Zeroizing::new(token)))
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("SigningKey").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Returns the public halves of `keys` as a JWK Set.
pub fn jwks<'a>(keys: impl IntoIterator<Item = &'a SigningKey>) -> Value {
    let keys: Vec<&Value> = keys.into_iter().map(SigningKey::jwk).collect();
    json!({ "keys": keys })
}

pub(super) fn generate_pkcs8(algorithm: SigningAlgorithm) -> Result<Zeroizing<Vec<u8>>, KeyError> {
    let random = SystemRandom::new();
    let failed = |_| KeyError::Generation;
    let pkcs8 = match algorithm {
        SigningAlgorithm::EdDsa => {
            Ed25519KeyPair::generate_pkcs8v1(&random).map_err(failed)?.as_ref().to_vec()
        }
        SigningAlgorithm::Es256 => EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random)
            .map_err(failed)?
            .as_ref()
            .to_vec(),
        SigningAlgorithm::Rs256 => {
            let pair = RsaKeyPair::generate(aws_lc_rs::rsa::KeySize::Rsa2048).map_err(failed)?;
            pair.as_der().map_err(failed)?.as_ref().to_vec()
        }
    };
    Ok(Zeroizing::new(pkcs8))
}

/// Determines the algorithm from the key and nothing else.
fn encoding_key(pkcs8: &[u8]) -> Result<(SigningAlgorithm, EncodingKey), KeyError> {
    if EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pkcs8).is_ok() {
        return Ok((SigningAlgorithm::Es256, EncodingKey::from_ec_der(pkcs8)));
    }
    if Ed25519KeyPair::from_pkcs8(pkcs8).is_ok() {
        return Ok((SigningAlgorithm::EdDsa, EncodingKey::from_ed_der(pkcs8)));
    }
    let pkcs1 = extract_rsa_key(pkcs8).ok_or(KeyError::Unsupported)?;
    RsaKeyPair::from_der(&pkcs1).map_err(|_| KeyError::Unsupported)?;
    Ok((SigningAlgorithm::Rs256, EncodingKey::from_rsa_der(&pkcs1)))
}

/// Extracts the PKCS#1 key from a PKCS#8 RSA key (RFC 5208, section 5), because the signer takes that.
fn extract_rsa_key(pkcs8: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let unwrapped = yasna::parse_der(pkcs8, |reader| {
        reader.read_sequence(|reader| {
            reader.next().read_u8()?;
            reader.next().read_der()?;
            reader.next().read_bytes()
        })
    });
    unwrapped.ok().map(Zeroizing::new)
}
