//! Keys of AWS: as they are, from a profile of a shared credentials file, or of a role that STS gives for a token of
//! another identity provider.

use ::http::Method;
use rules::credential::AwsSource;
use secrecy::SecretString;

use super::endpoint::{Endpoint, EndpointRequest, FORM, TokenClient, element, form};
use super::github::time_until;
use super::{Fetched, read_secret};
use crate::credential::error::{CredentialError, EndpointFault};
use crate::credential::secret_file::SecretFiles;
use crate::credential::value::{AwsKeys, CredentialValue};

/// The name of a session, where the configuration gives none.
const SESSION_NAME: &str = "sandbar";

pub(super) async fn fetch(
    source: &AwsSource,
    files: &SecretFiles,
    client: &TokenClient,
) -> Result<Fetched, CredentialError> {
    match source {
        AwsSource::Keys { id, secret, session_token } => {
            let id = read_secret(id, files).await?.as_str().to_owned();
            let secret = SecretString::from(read_secret(secret, files).await?.as_str());
            let session_token = match session_token {
                Some(token) => Some(SecretString::from(read_secret(token, files).await?.as_str())),
                None => None,
            };
            let value = CredentialValue::from_aws_keys(AwsKeys { id, secret, session_token })?;
            Ok(Fetched { value, life: None })
        }
        AwsSource::Profile { file, profile } => {
            let text = files.bytes(file).await?;
            let content = |why: String| CredentialError::Content { path: files.resolve(file), why };
            let keys = read_profile(&text, profile).map_err(content)?;
            Ok(Fetched { value: CredentialValue::from_aws_keys(keys)?, life: None })
        }
        AwsSource::WebIdentity { role, token, session_name, sts_url, region } => {
            let url = match (sts_url, region) {
                (Some(url), _) => url.clone(),
                (None, Some(region)) => format!("https://sts.{region}.amazonaws.com/"),
                (None, None) => "https://sts.amazonaws.com/".to_owned(),
            };
            let endpoint = Endpoint::parse(&url)?;
            let token = files.line(token).await?;
            let fields = [
                ("Action", "AssumeRoleWithWebIdentity"),
                ("Version", "2011-06-15"),
                ("RoleArn", role.as_str()),
                ("RoleSessionName", session_name.as_deref().unwrap_or(SESSION_NAME)),
                ("WebIdentityToken", token.as_str()),
            ];
            let (body, secrets) = (form(fields), vec![token.as_str()]);
            let accept = ("accept", zeroize::Zeroizing::new("application/xml".to_owned()));
            let request =
                EndpointRequest { method: Method::POST, fields: vec![accept], kind: FORM, body, secrets };
            let answer = client.send(&endpoint, request).await?;
            parse_role(&endpoint, &answer)
        }
    }
}

/// Reads a profile of a file such as `~/.aws/credentials`.
pub(super) fn read_profile(text: &[u8], profile: &str) -> Result<AwsKeys, String> {
    let text = std::str::from_utf8(text).map_err(|_| "it is not text".to_owned())?;
    let (mut inside, mut seen) = (false, false);
    let (mut id, mut secret, mut session_token) = (None, None, None);
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            inside = name.trim() == profile;
            seen |= inside;
            continue;
        }
        let Some((name, value)) = line.split_once('=').filter(|_| inside) else { continue };
        match name.trim().to_ascii_lowercase().as_str() {
            "aws_access_key_id" => id = Some(value.trim()),
            "aws_secret_access_key" => secret = Some(value.trim()),
            "aws_session_token" => session_token = Some(value.trim()),
            _ => {} // region, output and whatever else the tools keep there
        }
    }
    match (seen, id, secret) {
        (false, ..) => Err(format!("it has no profile `{profile}`")),
        (true, Some(id), Some(secret)) => Ok(AwsKeys {
            id: id.to_owned(),
            secret: SecretString::from(secret),
            session_token: session_token.map(SecretString::from),
        }),
        (true, ..) => Err(format!(
            "profile `{profile}` needs `aws_access_key_id` and `aws_secret_access_key`; roles and processes are not followed"
        )),
    }
}

/// Reads the answer of `AssumeRoleWithWebIdentity`. The values in it are base64 and a time, which need no unescaping.
fn parse_role(endpoint: &Endpoint, answer: &[u8]) -> Result<Fetched, CredentialError> {
    let missing = || endpoint.malformed("it is not the XML of AssumeRoleWithWebIdentity with credentials");
    let text = std::str::from_utf8(answer).map_err(|_| missing())?;
    let credentials = element(text, "Credentials").ok_or_else(missing)?;
    let value = |name: &str| element(credentials, name).filter(|value| !value.contains(['<', '&']));
    let found = (value("AccessKeyId"), value("SecretAccessKey"), value("SessionToken"), value("Expiration"));
    let (Some(id), Some(secret), Some(token), Some(until)) = found else { return Err(missing()) };
    let life = time_until(until).ok_or_else(|| endpoint.malformed("its `Expiration` is not a time"))?;
    let (secret, session_token) = (SecretString::from(secret), Some(SecretString::from(token)));
    let keys = CredentialValue::from_aws_keys(AwsKeys { id: id.to_owned(), secret, session_token });
    let value = keys.map_err(|error| endpoint.fault(EndpointFault::Value(Box::new(error))))?;
    Ok(Fetched { value, life: Some(life) })
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;

    #[test]
    fn a_profile_is_read_and_its_neighbours_are_not() {
        let text = b"# of the team\n[default]\naws_access_key_id = AKIADEFAULT00000\naws_secret_access_key=default-secret-0123\n\
            [ci]\nregion = eu-central-1\nAWS_ACCESS_KEY_ID=AKIACI0000000000\naws_secret_access_key = ci=secret/0123+\n\
            aws_session_token = token==\n[half]\naws_access_key_id = AKIAHALF00000000\n";
        let ci = read_profile(text, "ci").unwrap();
        assert_eq!((ci.id.as_str(), ci.secret.expose_secret()), ("AKIACI0000000000", "ci=secret/0123+"));
        assert_eq!(ci.session_token.unwrap().expose_secret(), "token==");
        let default = read_profile(text, "default").unwrap();
        assert_eq!(default.secret.expose_secret(), "default-secret-0123");
        assert!(default.session_token.is_none());
        for (profile, why) in [("none", "no profile `none`"), ("half", "needs `aws_access_key_id`")] {
            let refused = read_profile(text, profile).err().unwrap();
            assert!(refused.contains(why) && !refused.contains("AKIA"), "{refused}");
        }
    }
}
