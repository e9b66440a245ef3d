//! Installation tokens of GitHub Apps.

use std::time::{Duration, SystemTime};

use ::http::Method;
use rules::credential::GitHubAppSource;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::json;
use zeroize::Zeroizing;

use super::Fetched;
use super::assertion::{sign_claims, unix_seconds};
use super::endpoint::{Endpoint, EndpointRequest, TokenClient};
use crate::credential::error::{CredentialError, EndpointFault};
use crate::credential::secret_file::SecretFiles;
use crate::credential::value::CredentialValue;

const API: &str = "https://api.github.com";
const API_VERSION: &str = "2022-11-28";
/// Seconds for which the app's own token is valid; GitHub allows ten minutes.
const LIFE: u64 = 300;
/// Seconds by which its start lies in the past, for clocks that differ, as GitHub advises.
const SKEW: u64 = 60;

#[derive(Deserialize)]
struct InstallationToken {
    token: String,
    expires_at: String,
}

pub(super) async fn fetch(
    source: &GitHubAppSource,
    files: &SecretFiles,
    client: &TokenClient,
) -> Result<Fetched, CredentialError> {
    let GitHubAppSource { id, key, installation, repositories, permissions, api_url } = source;
    let base = Endpoint::parse(api_url.as_deref().unwrap_or(API))?;
    let endpoint =
        base.with_path(format!("{}/app/installations/{installation}/access_tokens", base.base_path()));
    let now = unix_seconds();
    let claims = json!({ "iss": id, "iat": now - SKEW, "exp": now + LIFE });
    let assertion = sign_claims(files, key, None, claims).await?;

    let mut body = json!({});
    if !repositories.is_empty() {
        body["repositories"] = json!(repositories);
    }
    if !permissions.is_empty() {
        let wanted = permissions.iter().map(|(name, access)| (name.clone(), access.as_str().into()));
        body["permissions"] = serde_json::Value::Object(wanted.collect());
    }
    let fields = vec![
        ("authorization", Zeroizing::new(format!("Bearer {}", assertion.expose()))),
        ("accept", Zeroizing::new("application/vnd.github+json".to_owned())),
        ("x-github-api-version", Zeroizing::new(API_VERSION.to_owned())),
    ];
    let (body, secrets) = (Zeroizing::new(body.to_string()), vec![assertion.expose()]);
    let request = EndpointRequest { method: Method::POST, fields, kind: "application/json", body, secrets };
    let answer = client.send(&endpoint, request).await?;

    let answer: InstallationToken = serde_json::from_slice(&answer)
        .map_err(|_| endpoint.malformed("it is not JSON with `token` and `expires_at`"))?;
    let token = SecretString::from(answer.token);
    let life =
        time_until(&answer.expires_at).ok_or_else(|| endpoint.malformed("its `expires_at` is not a time"))?;
    let value = CredentialValue::parse(token.expose_secret());
    let value = value.map_err(|error| endpoint.fault(EndpointFault::Value(Box::new(error))))?;
    Ok(Fetched { value, life: Some(life) })
}

/// How long it is until a time as RFC 3339 writes it; nothing if it has passed.
pub(super) fn time_until(text: &str) -> Option<Duration> {
    let until: jiff::Timestamp = text.parse().ok()?;
    Some(SystemTime::from(until).duration_since(SystemTime::now()).unwrap_or_default())
}
