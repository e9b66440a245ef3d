//! Access tokens of Google service accounts: an assertion signed with the account's key (RFC 7523).

use ::http::Method;
use rules::credential::GoogleSource;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::json;

use super::assertion::{sign_text, unix_seconds};
use super::endpoint::{Endpoint, EndpointRequest, FORM, TokenClient, form};
use super::{Fetched, oauth2};
use crate::credential::error::CredentialError;
use crate::credential::secret_file::SecretFiles;

const JWT_BEARER: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";
const TOKEN_URL: &str = "https://oauth2.googleapis.com/token";
/// How long the assertion is valid, in seconds.
const LIFE: u64 = 300;

/// The key file, as far as it is used.
#[derive(Deserialize)]
struct KeyDocument {
    client_email: String,
    private_key: String,
    #[serde(default)]
    private_key_id: Option<String>,
    #[serde(default)]
    token_uri: Option<String>,
}

/// A service account.
pub(super) struct ServiceAccount {
    email: String,
    key: SecretString,
    key_id: Option<String>,
    token_url: String,
}

impl ServiceAccount {
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        // Without the parser's message, which may quote the file.
        let document: KeyDocument = serde_json::from_slice(text).map_err(
            |_| "it is not a key file of a service account (JSON with `client_email` and `private_key`)",
        )?;
        let KeyDocument { client_email, private_key, private_key_id, token_uri } = document;
        let token_url = token_uri.unwrap_or_else(|| TOKEN_URL.to_owned());
        Ok(ServiceAccount { email: client_email, key: private_key.into(), key_id: private_key_id, token_url })
    }

    /// Checks that the key can sign and that tokens can be asked for.
    pub(super) fn check(&self) -> Result<(), String> {
        super::assertion::check_key(self.key.expose_secret().as_bytes())?;
        Endpoint::parse(&self.token_url).map(drop).map_err(|error| error.to_string())
    }
}

pub(super) async fn fetch(
    source: &GoogleSource,
    files: &SecretFiles,
    client: &TokenClient,
) -> Result<Fetched, CredentialError> {
    let text = files.bytes(&source.file).await?;
    let content = |why: String| CredentialError::Content { path: files.resolve(&source.file), why };
    let account = ServiceAccount::parse(&text).map_err(content)?;
    let endpoint = Endpoint::parse(&account.token_url)?;
    let now = unix_seconds();
    let mut claims = json!({
        "iss": account.email,
        "aud": account.token_url,
        "scope": source.scopes.join(" "),
        "iat": now,
        "exp": now + LIFE,
    });
    if let Some(subject) = &source.subject {
        claims["sub"] = subject.as_str().into();
    }
    let key = account.key.expose_secret().as_bytes();
    let assertion = sign_text(key, account.key_id.as_deref(), &claims).map_err(content)?;
    let body = form([("grant_type", JWT_BEARER), ("assertion", assertion.expose())]);
    let secrets = vec![assertion.expose()];
    let request = EndpointRequest { method: Method::POST, fields: Vec::new(), kind: FORM, body, secrets };
    let answer = client.send(&endpoint, request).await?;
    let token = oauth2::parse_answer(&endpoint, &answer)?;
    Ok(Fetched { value: oauth2::to_value(&endpoint, &token)?, life: token.life() })
}
