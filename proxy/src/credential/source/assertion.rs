//! JSON web tokens that Sandbar signs to get other tokens (RFC 7523).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use certs::identity::{SignedToken, SigningKey};
use rules::credential::AssertionSettings;
use serde_json::{Value, json};

use crate::credential::error::CredentialError;
use crate::credential::secret_file::SecretFiles;

/// How long an assertion is valid. It is used at once, and once.
const LIFE: Duration = Duration::from_secs(300);

/// Signs an assertion for a token endpoint: `audience` and `issuer` where the settings name none.
pub(super) async fn sign(
    files: &SecretFiles,
    settings: &AssertionSettings,
    issuer: Option<&str>,
    audience: &str,
    scope: Option<&str>,
) -> Result<SignedToken, CredentialError> {
    let now = unix_seconds();
    let issuer = settings.issuer.as_deref().or(issuer).unwrap_or_default();
    let mut claims = json!({
        "iss": issuer,
        "sub": settings.subject.as_deref().unwrap_or(issuer),
        "aud": settings.audience.as_deref().unwrap_or(audience),
        "iat": now,
        "nbf": now,
        "exp": now + LIFE.as_secs(),
        "jti": format!("{:032x}", rand::random::<u128>()),
    });
    if let Some(scope) = scope {
        claims["scope"] = scope.into();
    }
    sign_claims(files, &settings.key, settings.key_id.as_deref(), claims).await
}

/// Signs `claims` with the key in a PEM file. If a certificate follows the key, the header names it, as Azure AD wants.
pub(super) async fn sign_claims(
    files: &SecretFiles,
    key: &str,
    key_id: Option<&str>,
    claims: Value,
) -> Result<SignedToken, CredentialError> {
    let text = files.bytes(key).await?;
    sign_text(&text, key_id, &claims)
        .map_err(|why| CredentialError::Content { path: files.resolve(key), why })
}

/// Signs `claims` with a key in PEM.
pub(super) fn sign_text(text: &[u8], key_id: Option<&str>, claims: &Value) -> Result<SignedToken, String> {
    let key = SigningKey::from_pem(text).map_err(|error| error.to_string())?;
    let mut header = json!({});
    if let Some(id) = key_id {
        header["kid"] = id.into();
    }
    if let Some(certificate) = certs::pem::certificates(text).ok().and_then(|found| found.into_iter().next())
    {
        header["x5t#S256"] = URL_SAFE_NO_PAD.encode(certs::sha256(&certificate)).into();
    }
    key.sign_with(&header, claims).map_err(|error| error.to_string())
}

/// Checks that a file holds a key that can sign.
pub(super) fn check_key(text: &[u8]) -> Result<(), String> {
    SigningKey::from_pem(text).map(drop).map_err(|error| error.to_string())
}

pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
