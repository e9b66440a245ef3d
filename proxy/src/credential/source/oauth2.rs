//! Access tokens of OAuth 2.0 authorization servers: client credentials, refresh tokens (which the server may rotate)
//! and signed assertions.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ::http::Method;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rules::credential::{OAuth2ClientAuth, OAuth2Grant, OAuth2Source};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use sys::file::{Durability, Mode};
use zeroize::Zeroizing;

use super::assertion;
use super::endpoint::{Endpoint, EndpointRequest, FORM, TokenClient, encode_into, form};
use super::{Fetched, read_secret};
use crate::credential::error::{CredentialError, EndpointFault};
use crate::credential::secret_file::SecretFiles;
use crate::credential::value::CredentialValue;

const JWT_BEARER: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";
const CLIENT_ASSERTION: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
/// Kinds of tokens that need a proof of possession, which a bearer token lacks (RFC 6749, section 7.1).
const BOUND_TOKENS: [&str; 3] = ["dpop", "mac", "pop"];

/// A refresh token that the server gave in place of the one in the file, until it is stored there.
#[derive(Default)]
pub(super) struct RefreshState {
    unsaved: Option<SecretString>,
}

/// The answer of a token endpoint (RFC 6749, section 5.1).
#[derive(Deserialize)]
struct TokenAnswer {
    access_token: String,
    #[serde(default)]
    token_type: Option<String>,
    #[serde(default)]
    expires_in: Option<serde_json::Value>,
    #[serde(default)]
    refresh_token: Option<String>,
}

/// Asks for an access token.
pub(super) async fn fetch(
    source: &OAuth2Source,
    files: &SecretFiles,
    client: &TokenClient,
    refresh: &mut RefreshState,
) -> Result<Fetched, CredentialError> {
    let endpoint = Endpoint::parse(&source.token_url)?;
    let scope = source.scopes.join(" ");
    let assertion;
    let mut refresh_token = None;
    let mut fields: Vec<(&str, &str)> = Vec::new();
    match &source.grant {
        OAuth2Grant::ClientCredentials => fields.push(("grant_type", "client_credentials")),
        OAuth2Grant::RefreshToken { file } => {
            let token = &*refresh_token.insert(current_refresh_token(refresh, files, file).await?);
            fields.extend([("grant_type", "refresh_token"), ("refresh_token", token.expose_secret())]);
        }
        OAuth2Grant::JwtBearer(settings) => {
            assertion =
                assertion::sign(files, settings, source.client_id.as_deref(), &source.token_url, None)
                    .await?;
            fields.extend([("grant_type", JWT_BEARER), ("assertion", assertion.expose())]);
        }
    }
    if !scope.is_empty() {
        fields.push(("scope", &scope));
    }
    if let Some(audience) = &source.audience {
        fields.push(("audience", audience));
    }

    let secret = match &source.client_secret {
        Some(secret) => Some(read_secret(secret, files).await?),
        None => None,
    };
    let mut headers = Vec::new();
    let client_assertion;
    let id = source.client_id.as_deref();
    match (&source.client_auth, &secret) {
        (OAuth2ClientAuth::PrivateKeyJwt(settings), _) => {
            client_assertion = assertion::sign(files, settings, id, &source.token_url, None).await?;
            fields.extend([
                ("client_assertion_type", CLIENT_ASSERTION),
                ("client_assertion", client_assertion.expose()),
            ]);
            fields.extend(id.map(|id| ("client_id", id)));
        }
        (OAuth2ClientAuth::Basic, Some(secret)) => {
            headers.push(("authorization", basic(id.unwrap_or_default(), secret)));
        }
        (OAuth2ClientAuth::Post, Some(secret)) => {
            fields.extend(id.map(|id| ("client_id", id)));
            fields.push(("client_secret", secret));
        }
        // A public client only says which it is.
        (OAuth2ClientAuth::Basic | OAuth2ClientAuth::Post, None) => {
            fields.extend(id.map(|id| ("client_id", id)))
        }
    }
    let secrets = fields
        .iter()
        .filter(|(name, _)| {
            matches!(*name, "refresh_token" | "client_secret" | "assertion" | "client_assertion")
        })
        .map(|(_, value)| *value)
        .chain(secret.as_ref().map(|secret| secret.as_str()))
        .collect();
    let request =
        EndpointRequest { method: Method::POST, fields: headers, kind: FORM, body: form(fields), secrets };
    let answer = client.send(&endpoint, request).await?;

    let answer = parse_answer(&endpoint, &answer)?;
    let hidden = secret.map(|secret| SecretString::from(secret.as_str()));
    let sent = refresh_token.clone();
    let mut value = to_value(&endpoint, &answer)?;
    if let (OAuth2Grant::RefreshToken { file }, Some(rotated)) = (&source.grant, &answer.rotated)
        && sent.as_ref().is_none_or(|sent| sent.expose_secret() != rotated.expose_secret())
    {
        refresh.unsaved = Some(rotated.clone());
        save_refresh_token(refresh, files, file).await;
    }
    value.hide(hidden.into_iter().chain(sent).chain(answer.rotated.clone()));
    Ok(Fetched { value, life: answer.life })
}

/// A token endpoint's answer, as far as it is used.
pub(super) struct Token {
    access: SecretString,
    rotated: Option<SecretString>,
    life: Option<Duration>,
}

impl Token {
    pub(super) fn life(&self) -> Option<Duration> {
        self.life
    }
}

/// Reads the answer of a token endpoint.
pub(super) fn parse_answer(endpoint: &Endpoint, answer: &[u8]) -> Result<Token, CredentialError> {
    let parsed: TokenAnswer = serde_json::from_slice(answer)
        .map_err(|_| endpoint.malformed("it is not JSON with an `access_token`"))?; // the error may quote it
    let TokenAnswer { access_token, token_type, expires_in, refresh_token } = parsed;
    let (access, rotated) = (SecretString::from(access_token), refresh_token.map(SecretString::from));
    if let Some(kind) =
        token_type.filter(|kind| BOUND_TOKENS.iter().any(|bound| kind.eq_ignore_ascii_case(bound)))
    {
        return Err(endpoint.malformed(&format!(
            "a token of type {} needs more than Sandbar can add",
            kind.to_ascii_lowercase()
        )));
    }
    // Some servers write the number as text.
    let seconds = match &expires_in {
        None | Some(serde_json::Value::Null) => None,
        Some(value) => {
            let seconds = value.as_u64().or_else(|| value.as_str()?.parse().ok());
            Some(seconds.ok_or_else(|| endpoint.malformed("its `expires_in` is not a number of seconds"))?)
        }
    };
    let rotated = rotated.filter(|token| !token.expose_secret().is_empty());
    Ok(Token { access, rotated, life: seconds.map(Duration::from_secs) })
}

pub(super) fn to_value(endpoint: &Endpoint, token: &Token) -> Result<CredentialValue, CredentialError> {
    let value = CredentialValue::parse(token.access.expose_secret());
    value.map_err(|error| endpoint.fault(EndpointFault::Value(Box::new(error))))
}

/// `Authorization: Basic`, whose parts are form-encoded first (RFC 6749, section 2.3.1).
fn basic(id: &str, secret: &str) -> Zeroizing<String> {
    let mut plain = Zeroizing::new(String::with_capacity(3 * (id.len() + secret.len()) + 1));
    encode_into(&mut plain, id);
    plain.push(':');
    encode_into(&mut plain, secret);
    Zeroizing::new(format!("Basic {}", Zeroizing::new(STANDARD.encode(plain.as_bytes())).as_str()))
}

/// The refresh token to use: the one in the file, or a later one that could not be stored there yet.
async fn current_refresh_token(
    refresh: &mut RefreshState,
    files: &SecretFiles,
    file: &str,
) -> Result<SecretString, CredentialError> {
    if refresh.unsaved.is_some() {
        save_refresh_token(refresh, files, file).await;
    }
    match &refresh.unsaved {
        Some(token) => Ok(token.clone()),
        None => Ok(SecretString::from(files.line(file).await?.as_str())),
    }
}

/// Stores a rotated refresh token in place of the old one. If that fails, the old one in the file is worthless and a
/// restart would lose the new one, so it is tried again with each fetch.
async fn save_refresh_token(refresh: &mut RefreshState, files: &SecretFiles, file: &str) {
    let Some(token) = refresh.unsaved.clone() else { return };
    let path = files.resolve(file);
    let shown = path.clone();
    let saved = files.run(move || replace(&path, &token)).await;
    match saved {
        Ok(()) => refresh.unsaved = None,
        Err(error) => tracing::error!(
            path = %shown.display(), %error,
            "cannot store the new refresh token: it is lost if Sandbar stops before that succeeds"
        ),
    }
}

fn replace(path: &Path, token: &SecretString) -> Result<(), CredentialError> {
    // The file itself, not a link to it.
    let target: PathBuf = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let line = Zeroizing::new(format!("{}\n", token.expose_secret()));
    let failed =
        |error: std::io::Error| CredentialError::File { path: path.to_owned(), why: error.to_string() };
    sys::file::replace(&target, line.as_bytes(), Mode::Owner, Durability::Disk).map_err(failed)
}
