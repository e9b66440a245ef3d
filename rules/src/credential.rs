//! What a credential is: where its value comes from, how a request carries it, and to which hosts it may go. All three
//! belong to the operator, so no policy can send a key to a host that the operator did not name (P11).

use std::time::Duration;

use crate::ids::CredentialName;
use crate::name::DomainName;
use crate::pattern::{DomainPattern, HostPattern};

/// Most credentials of one rule.
pub const MAX_CREDENTIALS: usize = 8;

/// One `[[credential]]` of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    pub name: CredentialName,
    pub source: CredentialSource,
    pub form: CredentialForm,
    /// The only hosts that a rule may send it to.
    pub hosts: Vec<HostPattern>,
    /// The deadline of one fetch.
    pub timeout: Duration,
    /// How long a fetched value is used if its source states no end; `None`: the default of the source.
    pub cache: Option<Duration>,
}

/// The port of a host without one, as in policies.
const DEFAULT_PORT: u16 = 443;

impl Credential {
    /// Returns whether a request to this host and port may carry it.
    pub fn covers(&self, name: &DomainName, port: u16) -> bool {
        self.covers_all(&DomainPattern::Exact(name.clone()), port)
    }

    /// Returns whether requests to every name of a pattern may carry it.
    pub fn covers_all(&self, pattern: &DomainPattern, port: u16) -> bool {
        let on_port = |host: &&HostPattern| host.port.unwrap_or(DEFAULT_PORT) == port;
        self.hosts.iter().filter(on_port).any(|host| host.pattern.covers(pattern))
    }

    /// Returns what to change if a host is not covered.
    pub(crate) fn hosts_help(&self) -> String {
        let hosts: Vec<String> = self.hosts.iter().take(4).map(|host| format!("`{host}`")).collect();
        let more = if self.hosts.len() > 4 { ", …" } else { "" };
        format!(
            "its `hosts` in the configuration are {}{more}; a host without port means 443",
            hosts.join(", ")
        )
    }
}

impl CredentialSource {
    /// Returns the files that the value is made from, as written.
    pub fn files(&self) -> Vec<&str> {
        match self {
            CredentialSource::File(file) => vec![file],
            CredentialSource::Env(_) | CredentialSource::Command(_) => Vec::new(),
            CredentialSource::OAuth2(source) => {
                let auth = match &source.client_auth {
                    OAuth2ClientAuth::Basic | OAuth2ClientAuth::Post => None,
                    OAuth2ClientAuth::PrivateKeyJwt(settings) => Some(settings.key.as_str()),
                };
                let grant = match &source.grant {
                    OAuth2Grant::ClientCredentials => None,
                    OAuth2Grant::RefreshToken { file } => Some(file.as_str()),
                    OAuth2Grant::JwtBearer(settings) => Some(settings.key.as_str()),
                };
                source
                    .client_secret
                    .as_ref()
                    .and_then(SourceSecret::file)
                    .into_iter()
                    .chain(auth)
                    .chain(grant)
                    .collect()
            }
            CredentialSource::Google(source) => vec![&source.file],
            CredentialSource::GitHubApp(source) => vec![&source.key],
            CredentialSource::Aws(AwsSource::Keys { id, secret, session_token }) => {
                [Some(id), Some(secret), session_token.as_ref()]
                    .into_iter()
                    .flatten()
                    .filter_map(SourceSecret::file)
                    .collect()
            }
            CredentialSource::Aws(AwsSource::Profile { file, .. }) => vec![file],
            CredentialSource::Aws(AwsSource::WebIdentity { token, .. }) => vec![token],
            CredentialSource::Spiffe(_) => Vec::new(),
        }
    }
}

impl SourceSecret {
    fn file(&self) -> Option<&str> {
        match self {
            SourceSecret::File(file) => Some(file),
            SourceSecret::Env(_) => None,
        }
    }
}

/// How a request carries a credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CredentialForm {
    /// `Authorization: Bearer VALUE`.
    Bearer,
    /// A header field of its own, such as `x-api-key`.
    Header {
        /// In lower case.
        name: String,
        /// What stands before the value, such as `token `.
        prefix: String,
    },
    /// `Authorization: Basic`, with this user and the value as password.
    Basic { user: String },
    /// A signature of AWS, version 4; the value is a pair of keys.
    SigV4 { service: String, region: String },
    /// A parameter of the query, which ends up in the logs of others.
    DangerouslyQuery { name: String },
    /// The sandbox sends a placeholder, which Sandbar replaces where it stands in one of these header fields, also
    /// inside Basic authentication.
    Placeholder {
        /// Names of header fields, in lower case.
        headers: Vec<String>,
        /// What the placeholder begins with, for tools that check their keys.
        prefix: String,
    },
}

/// Where the value of a credential comes from. Paths are as written: relative to the configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CredentialSource {
    File(String),
    /// A variable of Sandbar's own environment.
    Env(String),
    /// A program with its arguments, run without a shell; it prints the value.
    Command(Vec<String>),
    OAuth2(OAuth2Source),
    Google(GoogleSource),
    GitHubApp(GitHubAppSource),
    Aws(AwsSource),
    Spiffe(SpiffeSource),
}

/// A secret that a source needs to get its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceSecret {
    File(String),
    Env(String),
}

/// Access tokens of an OAuth 2.0 authorization server (RFC 6749, RFC 7523).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OAuth2Source {
    pub token_url: String,
    pub grant: OAuth2Grant,
    pub client_id: Option<String>,
    pub client_secret: Option<SourceSecret>,
    pub client_auth: OAuth2ClientAuth,
    pub scopes: Vec<String>,
    pub audience: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OAuth2Grant {
    ClientCredentials,
    /// The file is replaced if the server rotates the token.
    RefreshToken {
        file: String,
    },
    JwtBearer(AssertionSettings),
}

/// How a client proves who it is at the token endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OAuth2ClientAuth {
    /// `Authorization: Basic`.
    Basic,
    /// Fields of the form.
    Post,
    /// A signed assertion in place of a secret, which Azure AD calls a certificate credential.
    PrivateKeyJwt(AssertionSettings),
}

/// A JSON web token that Sandbar signs to get another token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssertionSettings {
    /// The file of the private key, PEM.
    pub key: String,
    pub key_id: Option<String>,
    pub issuer: Option<String>,
    pub subject: Option<String>,
    pub audience: Option<String>,
}

/// A Google service account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoogleSource {
    /// The key file in JSON, as the console hands it out.
    pub file: String,
    pub scopes: Vec<String>,
    /// The user that a service account with domain-wide delegation acts for.
    pub subject: Option<String>,
}

/// An installation of a GitHub App.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GitHubAppSource {
    /// The app's id or client id.
    pub id: String,
    /// The file of the private key, PEM.
    pub key: String,
    pub installation: u64,
    /// Names of repositories that the token is limited to; empty: all of the installation.
    pub repositories: Vec<String>,
    /// Permissions that the token is limited to, such as `contents` and `read`; empty: all of the app.
    pub permissions: Vec<(String, String)>,
    /// For GitHub Enterprise; `None`: `https://api.github.com`.
    pub api_url: Option<String>,
}

/// Keys of AWS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AwsSource {
    /// An id and a secret, and the token of a session.
    Keys { id: SourceSecret, secret: SourceSecret, session_token: Option<SourceSecret> },
    /// A profile of a shared credentials file.
    Profile { file: String, profile: String },
    /// A role taken on with a token of another identity provider.
    WebIdentity {
        role: String,
        token: String,
        session_name: Option<String>,
        /// `None`: the endpoint of the region.
        sts_url: Option<String>,
        region: Option<String>,
    },
}

/// A JWT of a SPIFFE Workload API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpiffeSource {
    /// The unix socket of the Workload API.
    pub socket: String,
    pub audience: Vec<String>,
    /// The identity asked for, if the workload has several.
    pub id: Option<String>,
}

/// Whether requests may use another account than Sandbar's on a host that gets a credential.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PinAccount {
    /// Fields, cookies and parameters that look like credentials are removed.
    #[default]
    Remove,
    /// A request with such a field is refused.
    Refuse,
    Off,
}
