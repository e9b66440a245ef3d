//! Identity: a table of attacks, tokens of other issuers, rotation, revocation, and clocks that jump.

mod attacks;
mod issuers;
mod life;
mod spire;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use certs::identity::{
    IdentityError, IssueRequest, IssuerOptions, LocalIssuer, SigningAlgorithm, TrustDomain, Verifier,
    VerifyContext,
};
use jsonwebtoken::{EncodingKey, Header};
use serde_json::{Value, json};

use crate::{NOW, unix_time};

pub(crate) const AUDIENCE: &str = "spiffe://acme.example/memory";
pub(crate) const ISSUER: &str = "https://issuer.acme.example";
pub(crate) const SUBJECT: &str = "spiffe://acme.example/tenant/acme/env/staging/sandbox/build-7";

/// An issuer, its directory, and a verifier that trusts it.
pub(crate) struct IssuerFixture {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) issuer: LocalIssuer,
    pub(crate) verifier: Verifier,
}

impl IssuerFixture {
    pub(crate) fn new() -> Self {
        Self::with_algorithm(SigningAlgorithm::Es256, None)
    }

    pub(crate) fn with_algorithm(algorithm: SigningAlgorithm, revocations: Option<&Value>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let issuer =
            LocalIssuer::init(&dir.path().join("issuer"), &options(algorithm), unix_time(NOW)).unwrap();
        let list = revocations.map(|list| {
            let path = dir.path().join("revocations.json");
            fs::write(&path, list.to_string()).unwrap();
            path
        });
        let verifier = Verifier::new(vec![issuer.trusted_issuer().unwrap()], list, unix_time(NOW)).unwrap();
        Self { dir, issuer, verifier }
    }

    pub(crate) fn token(&self) -> String {
        self.issuer.issue(&request(), unix_time(NOW)).unwrap().expose().to_owned()
    }

    pub(crate) fn verify(&self, token: &str) -> Result<String, IdentityError> {
        self.verify_at(token, NOW)
    }

    pub(crate) fn verify_at(&self, token: &str, now: u64) -> Result<String, IdentityError> {
        let identity = self.verifier.verify(token, &VerifyContext::for_audience(AUDIENCE), unix_time(now))?;
        Ok(identity.subject().to_string())
    }

    pub(crate) fn forger(&self) -> TokenForger {
        TokenForger::from_key_file(&self.dir.path().join("issuer"), self.issuer.key_ids().next().unwrap())
    }
}

pub(crate) fn options(algorithm: SigningAlgorithm) -> IssuerOptions {
    let trust_domain = TrustDomain::parse("acme.example").unwrap();
    IssuerOptions { issuer: ISSUER.to_owned(), trust_domain, environments: None, algorithm }
}

pub(crate) fn request<'a>() -> IssueRequest<'a> {
    IssueRequest {
        tenant: "acme",
        environment: "staging",
        sandbox: "build-7",
        audience: AUDIENCE,
        life: Duration::from_secs(300),
        generation: Some(3),
    }
}

/// Good claims, for a test to change.
pub(crate) fn claims() -> Value {
    json!({
        "iss": ISSUER, "sub": SUBJECT, "aud": AUDIENCE, "exp": NOW + 300, "nbf": NOW, "iat": NOW,
        "jti": "00112233445566778899aabbccddeeff", "sid": "3",
    })
}

/// An attacker with a key who signs anything; uses other library calls than the product.
pub(crate) struct TokenForger {
    pub(crate) kid: String,
    pub(crate) key: EncodingKey,
    pub(crate) algorithm: jsonwebtoken::Algorithm,
}

impl TokenForger {
    /// Uses the issuer's own key.
    pub(crate) fn from_key_file(dir: &Path, kid: &str) -> Self {
        let path: PathBuf = dir.join(format!("{kid}.key"));
        let der = certs::pem::private_key(&fs::read(path).unwrap()).unwrap();
        let key = EncodingKey::from_ec_der(der.secret_der());
        Self { kid: kid.to_owned(), key, algorithm: jsonwebtoken::Algorithm::ES256 }
    }

    /// Signs header and claims as text, so that they need not even be JSON.
    pub(crate) fn sign_text(&self, header: &str, claims: &str) -> String {
        let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
        let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &self.key, self.algorithm).unwrap();
        format!("{message}.{signature}")
    }

    pub(crate) fn header(&self) -> Value {
        json!({ "alg": "ES256", "kid": self.kid, "typ": "JWT" })
    }

    pub(crate) fn sign(&self, claims: &Value) -> String {
        self.sign_text(&self.header().to_string(), &claims.to_string())
    }

    /// Encodes the token as the library itself would.
    pub(crate) fn sign_plainly(&self, claims: &Value) -> String {
        let mut header = Header::new(self.algorithm);
        header.kid = Some(self.kid.clone());
        jsonwebtoken::encode(&header, claims, &self.key).unwrap()
    }
}
