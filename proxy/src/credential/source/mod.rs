//! Sources: where the values of credentials come from, other than files that hold them as they are.

mod assertion;
mod aws;
mod check;
mod command;
pub(super) mod endpoint;
mod github;
mod google;
mod oauth2;
mod spiffe;

use std::path::Path;
use std::time::Duration;

use rules::credential::{Credential, CredentialSource, SourceSecret};
use zeroize::Zeroizing;

pub(super) use self::check::check;

/// What limits sources.
pub(super) mod bounds {
    pub(in crate::credential) use super::command::COMPLAINT;
    pub(in crate::credential) use super::endpoint::{ANSWER, CONNECT, MAX_ADDRESSES as ADDRESSES};
}

use self::endpoint::TokenClient;
use crate::credential::cell::ValueSource;
use crate::credential::error::CredentialError;
use crate::credential::secret_file::SecretFiles;
use crate::credential::value::CredentialValue;

/// How long the output of a command is used.
const COMMAND_CACHE: Duration = Duration::from_secs(300);
/// How long keys in files of AWS are used before the files are read again.
const FILE_CACHE: Duration = Duration::from_secs(60);
/// How long a token is used whose server states no end.
const TOKEN_CACHE: Duration = Duration::from_secs(300);

/// What a source gave.
pub(super) struct Fetched {
    pub(super) value: CredentialValue,
    /// How long the value is valid, if the source says so.
    pub(super) life: Option<Duration>,
}

/// How long a value is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lifetime {
    /// The source states when it ends.
    Stated(Duration),
    /// Then it is fetched again, because it may have changed.
    Cached(Duration),
    /// It cannot change while Sandbar runs.
    Endless,
}

/// A source that is asked.
pub(super) struct Source {
    definition: Credential,
    files: SecretFiles,
    client: TokenClient,
    refresh: oauth2::RefreshState,
}

impl Source {
    pub(super) fn open(definition: &Credential, base: &Path, client: &TokenClient) -> std::io::Result<Self> {
        let (definition, client) = (definition.clone(), client.clone());
        Ok(Source {
            definition,
            files: SecretFiles::start(base)?,
            client,
            refresh: oauth2::RefreshState::default(),
        })
    }
}

impl ValueSource for Source {
    async fn fetch(&mut self) -> Result<(CredentialValue, Lifetime), CredentialError> {
        let Source { definition, files, client, refresh } = self;
        let timeout = definition.timeout;
        let (fetched, unstated) = match &definition.source {
            CredentialSource::File(path) => {
                let value = CredentialValue::parse(&files.line(path).await?)?;
                (Fetched { value, life: None }, Some(FILE_CACHE))
            }
            CredentialSource::Env(name) => {
                let value = CredentialValue::parse(&read_variable(name)?)?;
                (Fetched { value, life: None }, None)
            }
            CredentialSource::Command(argv) => (command::run(argv, files).await?, Some(COMMAND_CACHE)),
            CredentialSource::OAuth2(source) => {
                (oauth2::fetch(source, files, client, refresh).await?, Some(TOKEN_CACHE))
            }
            CredentialSource::Google(source) => {
                (google::fetch(source, files, client).await?, Some(TOKEN_CACHE))
            }
            CredentialSource::GitHubApp(source) => {
                (github::fetch(source, files, client).await?, Some(TOKEN_CACHE))
            }
            CredentialSource::Aws(source) => (aws::fetch(source, files, client).await?, Some(FILE_CACHE)),
            CredentialSource::Spiffe(source) => {
                (spiffe::fetch(source, files, timeout).await?, Some(TOKEN_CACHE))
            }
        };
        let lifetime = match (fetched.life, definition.cache.or(unstated)) {
            (Some(life), _) => Lifetime::Stated(life),
            (None, Some(cache)) => Lifetime::Cached(cache),
            (None, None) => Lifetime::Endless,
        };
        Ok((fetched.value, lifetime))
    }
}

/// Names the kind of a source, as the key in the configuration.
pub fn kind(source: &CredentialSource) -> &'static str {
    match source {
        CredentialSource::File(_) => "file",
        CredentialSource::Env(_) => "env",
        CredentialSource::Command(_) => "command",
        CredentialSource::OAuth2(_) => "oauth2",
        CredentialSource::Google(_) => "google",
        CredentialSource::GitHubApp(_) => "github_app",
        CredentialSource::Aws(_) => "aws",
        CredentialSource::Spiffe(_) => "spiffe",
    }
}

fn read_variable(name: &str) -> Result<Zeroizing<String>, CredentialError> {
    std::env::var(name).map(Zeroizing::new).map_err(|_| CredentialError::Variable(name.to_owned()))
}

async fn read_secret(
    secret: &SourceSecret,
    files: &SecretFiles,
) -> Result<Zeroizing<String>, CredentialError> {
    match secret {
        SourceSecret::File(path) => files.line(path).await,
        SourceSecret::Env(name) => read_variable(name),
    }
}
