//! Checks what a source needs on this machine, without asking anybody: files that are missing, open to others or
//! malformed, and variables that are not set.

use std::path::Path;

use rules::credential::{
    AssertionSettings, AwsSource, Credential, CredentialSource, OAuth2ClientAuth, OAuth2Grant, SourceSecret,
};

use super::endpoint::Endpoint;
use super::google::ServiceAccount;
use super::{assertion, aws, read_variable};
use crate::credential::error::CredentialError;
use crate::credential::secret_file::{SOURCE_FILE, read, read_line};
use crate::credential::value::CredentialValue;

/// Checks a credential. Blocks while a file system does not answer.
///
/// # Errors
///
/// Returns the first thing that is wrong.
pub(in crate::credential) fn check(credential: &Credential, base: &Path) -> Result<(), CredentialError> {
    let (here, value) = (|path: &str| base.join(path), |text: &str| CredentialValue::parse(text).map(drop));
    match &credential.source {
        CredentialSource::File(path) => value(&read_line(&here(path))?),
        CredentialSource::Env(name) => value(&read_variable(name)?),
        CredentialSource::Command(_) | CredentialSource::Spiffe(_) => Ok(()),
        CredentialSource::OAuth2(source) => {
            Endpoint::parse(&source.token_url)?;
            if let Some(secret) = &source.client_secret {
                check_secret(secret, base)?;
            }
            match &source.client_auth {
                OAuth2ClientAuth::Basic | OAuth2ClientAuth::Post => {}
                OAuth2ClientAuth::PrivateKeyJwt(settings) => check_assertion(settings, base)?,
            }
            match &source.grant {
                OAuth2Grant::ClientCredentials => Ok(()),
                OAuth2Grant::RefreshToken { file } => check_line(&here(file)),
                OAuth2Grant::JwtBearer(settings) => check_assertion(settings, base),
            }
        }
        CredentialSource::Google(source) => {
            let account = |text: &[u8]| ServiceAccount::parse(text)?.check();
            check_content(&here(&source.file), account)
        }
        CredentialSource::GitHubApp(source) => {
            source.api_url.as_deref().map(Endpoint::parse).transpose()?;
            check_content(&here(&source.key), assertion::check_key)
        }
        CredentialSource::Aws(AwsSource::Keys { id, secret, session_token }) => {
            let all = [Some(id), Some(secret), session_token.as_ref()];
            all.into_iter().flatten().try_for_each(|secret| check_secret(secret, base))
        }
        CredentialSource::Aws(AwsSource::Profile { file, profile }) => {
            check_content(&here(file), |text| aws::read_profile(text, profile).map(drop))
        }
        CredentialSource::Aws(AwsSource::WebIdentity { token, sts_url, .. }) => {
            sts_url.as_deref().map(Endpoint::parse).transpose()?;
            check_line(&here(token))
        }
    }
}

fn check_assertion(settings: &AssertionSettings, base: &Path) -> Result<(), CredentialError> {
    check_content(&base.join(&settings.key), assertion::check_key)
}

fn check_secret(secret: &SourceSecret, base: &Path) -> Result<(), CredentialError> {
    match secret {
        SourceSecret::File(path) => check_line(&base.join(path)),
        SourceSecret::Env(name) => read_variable(name).map(drop),
    }
}

fn check_line(path: &Path) -> Result<(), CredentialError> {
    let content = |why: &str| Err(CredentialError::Content { path: path.to_owned(), why: why.to_owned() });
    let line = read_line(path)?;
    match line.is_empty() {
        true => content("it is empty"),
        false if !line.bytes().all(|byte| byte.is_ascii_graphic()) => {
            content("it is not one line of printable characters")
        }
        false => Ok(()),
    }
}

fn check_content(
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<(), String>,
) -> Result<(), CredentialError> {
    let text = read(path, SOURCE_FILE)?;
    parse(&text).map_err(|why| CredentialError::Content { path: path.to_owned(), why })
}
