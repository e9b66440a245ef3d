//! `[[credential]]` as written; `credential` gives it meaning.

use std::collections::BTreeMap;
use std::fmt;

use schemars::{JsonSchema, Schema, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use toml::Spanned;

/// `[[credential]]`: where a secret comes from, how a request carries it, and the only hosts that may get it. The value itself is never in a policy or the configuration.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CredentialDocument {
    /// The credential's name, which rules refer to.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// The file that holds the value.
    #[schemars(with = "Option<String>")]
    pub(crate) file: Option<Spanned<String>>,
    /// The variable of Sandbar's own environment that holds the value.
    #[schemars(with = "Option<String>")]
    pub(crate) env: Option<Spanned<String>>,
    /// A program with its arguments that prints the value; run without a shell.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) command: Option<Spanned<Vec<Spanned<String>>>>,
    /// An OAuth 2.0 authorization server.
    #[schemars(with = "Option<OAuth2Document>")]
    pub(crate) oauth2: Option<Spanned<OAuth2Document>>,
    /// A Google service account.
    #[schemars(with = "Option<GoogleDocument>")]
    pub(crate) google: Option<Spanned<GoogleDocument>>,
    /// An installation of a GitHub App.
    #[schemars(with = "Option<GitHubAppDocument>")]
    pub(crate) github_app: Option<Spanned<GitHubAppDocument>>,
    /// Keys of AWS, for `form = { sigv4 = … }`.
    #[schemars(with = "Option<AwsDocument>")]
    pub(crate) aws: Option<Spanned<AwsDocument>>,
    /// The Workload API of SPIFFE.
    #[schemars(with = "Option<SpiffeDocument>")]
    pub(crate) spiffe: Option<Spanned<SpiffeDocument>>,
    /// How a request carries the value; default `"bearer"`.
    #[schemars(with = "Option<FormDocument>")]
    pub(crate) form: Option<Spanned<FormDocument>>,
    /// The only hosts that may get it, as patterns with `:port` if not 443. A rule for another host cannot name the credential.
    #[schemars(with = "Vec<String>")]
    pub(crate) hosts: Option<Spanned<Vec<Spanned<String>>>>,
    /// Seconds that one fetch of the value may take, 1 to 60; default 10.
    #[schemars(with = "Option<u64>")]
    pub(crate) timeout_seconds: Option<Spanned<u64>>,
    /// Seconds that a value of `command` or `oauth2` is used if nothing says when it ends; default 300.
    #[schemars(with = "Option<u64>")]
    pub(crate) cache_seconds: Option<Spanned<u64>>,
}

/// How a request carries a credential: `"bearer"`, or a table with one of the keys.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
#[schemars(transform = allow_bearer)]
pub(crate) struct FormDocument {
    /// A header field of its own, such as `x-api-key`.
    #[schemars(with = "Option<String>")]
    pub(crate) header: Option<Spanned<String>>,
    /// For `header`: what stands before the value, such as `token `.
    #[schemars(with = "Option<String>")]
    pub(crate) prefix: Option<Spanned<String>>,
    /// Basic authentication with the value as password.
    pub(crate) basic: Option<BasicDocument>,
    /// A signature of AWS, version 4.
    #[schemars(with = "Option<SigV4Document>")]
    pub(crate) sigv4: Option<Spanned<SigV4Document>>,
    /// A parameter of the query, which ends up in the logs of others.
    #[schemars(with = "Option<String>")]
    pub(crate) dangerously_query: Option<Spanned<String>>,
    /// A placeholder that the sandbox sends and Sandbar replaces.
    #[schemars(with = "Option<PlaceholderDocument>")]
    pub(crate) placeholder: Option<Spanned<PlaceholderDocument>>,
}

/// Basic authentication.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct BasicDocument {
    /// The user name, such as `x-access-token` for GitHub.
    #[schemars(with = "String")]
    pub(crate) user: Spanned<String>,
}

/// What AWS signatures are bound to.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SigV4Document {
    /// The service, such as `s3`.
    #[schemars(with = "String")]
    pub(crate) service: Spanned<String>,
    /// The region, such as `eu-central-1`.
    #[schemars(with = "String")]
    pub(crate) region: Spanned<String>,
}

/// Where a placeholder is replaced, and what it looks like.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlaceholderDocument {
    /// The places where it is replaced, such as `header:authorization`; also inside Basic authentication.
    #[serde(rename = "in")]
    #[schemars(with = "Vec<String>")]
    pub(crate) places: Vec<Spanned<String>>,
    /// What it begins with, for tools that check their keys, such as `sk-`.
    #[schemars(with = "Option<String>")]
    pub(crate) prefix: Option<Spanned<String>>,
}

/// Access tokens of an OAuth 2.0 authorization server.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OAuth2Document {
    /// The token endpoint, `https://`.
    #[schemars(with = "String")]
    pub(crate) token_url: Spanned<String>,
    /// The grant; default `client_credentials`.
    #[schemars(with = "Option<GrantDocument>")]
    pub(crate) grant: Option<Spanned<GrantDocument>>,
    /// The client's id.
    #[schemars(with = "Option<String>")]
    pub(crate) client_id: Option<Spanned<String>>,
    /// The file of the client's secret.
    #[schemars(with = "Option<String>")]
    pub(crate) client_secret_file: Option<Spanned<String>>,
    /// The variable of Sandbar's own environment that holds the client's secret.
    #[schemars(with = "Option<String>")]
    pub(crate) client_secret_env: Option<Spanned<String>>,
    /// How the client proves who it is; default `basic`.
    #[schemars(with = "Option<ClientAuthDocument>")]
    pub(crate) client_auth: Option<Spanned<ClientAuthDocument>>,
    /// For `refresh_token`: the file of the refresh token, which Sandbar replaces if the server rotates it.
    #[schemars(with = "Option<String>")]
    pub(crate) refresh_token_file: Option<Spanned<String>>,
    /// For `jwt_bearer` and `private_key_jwt`: the file of the private key, PEM.
    #[schemars(with = "Option<String>")]
    pub(crate) key_file: Option<Spanned<String>>,
    /// The `kid` of the assertion.
    #[schemars(with = "Option<String>")]
    pub(crate) key_id: Option<Spanned<String>>,
    /// The `iss` of the assertion; default the client's id.
    #[schemars(with = "Option<String>")]
    pub(crate) issuer: Option<Spanned<String>>,
    /// The `sub` of the assertion; default the issuer.
    #[schemars(with = "Option<String>")]
    pub(crate) subject: Option<Spanned<String>>,
    /// The `aud` of the assertion; default the token endpoint.
    #[schemars(with = "Option<String>")]
    pub(crate) assertion_audience: Option<Spanned<String>>,
    /// The scopes asked for.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) scopes: Vec<Spanned<String>>,
    /// The `audience` asked for.
    #[schemars(with = "Option<String>")]
    pub(crate) audience: Option<Spanned<String>>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum GrantDocument {
    ClientCredentials,
    JwtBearer,
    RefreshToken,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ClientAuthDocument {
    /// `Authorization: Basic`.
    Basic,
    /// Fields of the form.
    Post,
    /// An assertion signed with `key_file`.
    PrivateKeyJwt,
}

/// A Google service account.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct GoogleDocument {
    /// The key file in JSON, as the console hands it out.
    #[schemars(with = "String")]
    pub(crate) file: Spanned<String>,
    /// The scopes asked for.
    #[schemars(with = "Vec<String>")]
    pub(crate) scopes: Spanned<Vec<Spanned<String>>>,
    /// The user it acts for, with domain-wide delegation.
    #[schemars(with = "Option<String>")]
    pub(crate) subject: Option<Spanned<String>>,
}

/// An installation of a GitHub App.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct GitHubAppDocument {
    /// The app's id or client id, as text.
    #[schemars(with = "String")]
    pub(crate) id: Spanned<String>,
    /// The file of the private key, PEM.
    #[schemars(with = "String")]
    pub(crate) key_file: Spanned<String>,
    /// The number of the installation.
    pub(crate) installation: u64,
    /// Names of the repositories that the token is limited to; default: all of the installation.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) repositories: Vec<Spanned<String>>,
    /// Permissions that the token is limited to, such as `contents = "read"`; default: all of the app.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>")]
    pub(crate) permissions: BTreeMap<Spanned<String>, Spanned<String>>,
    /// The API of GitHub Enterprise; default `https://api.github.com`.
    #[schemars(with = "Option<String>")]
    pub(crate) api_url: Option<Spanned<String>>,
}

/// Keys of AWS: an id and a secret, a profile of a credentials file, or a role taken on with a token.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AwsDocument {
    /// The file of the access key's id.
    #[schemars(with = "Option<String>")]
    pub(crate) access_key_id_file: Option<Spanned<String>>,
    /// The variable of the access key's id.
    #[schemars(with = "Option<String>")]
    pub(crate) access_key_id_env: Option<Spanned<String>>,
    /// The file of the access key's secret.
    #[schemars(with = "Option<String>")]
    pub(crate) secret_access_key_file: Option<Spanned<String>>,
    /// The variable of the access key's secret.
    #[schemars(with = "Option<String>")]
    pub(crate) secret_access_key_env: Option<Spanned<String>>,
    /// The file of the session's token.
    #[schemars(with = "Option<String>")]
    pub(crate) session_token_file: Option<Spanned<String>>,
    /// The variable of the session's token.
    #[schemars(with = "Option<String>")]
    pub(crate) session_token_env: Option<Spanned<String>>,
    /// A shared credentials file, as the AWS command line writes it.
    #[schemars(with = "Option<String>")]
    pub(crate) credentials_file: Option<Spanned<String>>,
    /// The profile of the credentials file; default `default`.
    #[schemars(with = "Option<String>")]
    pub(crate) profile: Option<Spanned<String>>,
    /// The role to take on, as ARN.
    #[schemars(with = "Option<String>")]
    pub(crate) role: Option<Spanned<String>>,
    /// For `role`: the file of the token of another identity provider.
    #[schemars(with = "Option<String>")]
    pub(crate) web_identity_token_file: Option<Spanned<String>>,
    /// For `role`: the name of the session.
    #[schemars(with = "Option<String>")]
    pub(crate) session_name: Option<Spanned<String>>,
    /// For `role`: the security token service; default that of the region.
    #[schemars(with = "Option<String>")]
    pub(crate) sts_url: Option<Spanned<String>>,
    /// For `role`: the region of the security token service.
    #[schemars(with = "Option<String>")]
    pub(crate) region: Option<Spanned<String>>,
}

/// A JWT of a SPIFFE Workload API.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SpiffeDocument {
    /// The unix socket of the Workload API.
    #[schemars(with = "String")]
    pub(crate) socket: Spanned<String>,
    /// The audiences of the JWT.
    #[schemars(with = "Vec<String>")]
    pub(crate) audience: Spanned<Vec<Spanned<String>>>,
    /// The SPIFFE ID asked for, if the workload has several.
    #[schemars(with = "Option<String>")]
    pub(crate) id: Option<Spanned<String>>,
}

/// Accepts `"bearer"` beside a table, which no derived implementation does without losing the location of an error.
impl<'de> Deserialize<'de> for FormDocument {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FormVisitor)
    }
}

struct FormVisitor;

impl<'de> Visitor<'de> for FormVisitor {
    type Value = FormDocument;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`\"bearer\"` or a table such as `{ header = \"x-api-key\" }`")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<FormDocument, E> {
        match text {
            "bearer" => Ok(FormDocument::default()),
            _ => Err(E::invalid_value(Unexpected::Other("another word"), &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<FormDocument, A::Error> {
        let form = FormDocument::deserialize(MapAccessDeserializer::new(map))?;
        let is_empty = form.header.is_none()
            && form.basic.is_none()
            && form.sigv4.is_none()
            && form.dangerously_query.is_none()
            && form.placeholder.is_none();
        match is_empty {
            true => Err(A::Error::custom(
                "a form needs `header`, `basic`, `sigv4`, `dangerously_query` or `placeholder`, or is `\"bearer\"`",
            )),
            false => Ok(form),
        }
    }
}

fn allow_bearer(schema: &mut Schema) {
    let table = std::mem::take(schema);
    *schema = json_schema!({ "anyOf": [{ "const": "bearer" }, table] });
}
