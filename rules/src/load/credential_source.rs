//! Reads where the value of a credential comes from.

use toml::Spanned;

use super::credential::{CredentialReader, MAX_LIST, is_service_url};
use super::credential_document::{
    AwsDocument, ClientAuthDocument, GitHubAppDocument, GoogleDocument, GrantDocument, OAuth2Document,
    SpiffeDocument,
};
use super::problem::{ProblemKind, has_key_shape};
use crate::credential::{
    AssertionSettings, AwsSource, GitHubAppSource, GoogleSource, OAuth2ClientAuth, OAuth2Grant, OAuth2Source,
    SourceSecret, SpiffeSource,
};

/// Longest path and longest argument.
const MAX_TEXT: usize = 4096;
/// Most arguments of a program.
const MAX_ARGUMENTS: usize = 64;
/// Longest name of a variable.
const MAX_VARIABLE: usize = 128;
const PERMISSION_LEVELS: [&str; 3] = ["admin", "read", "write"];

pub(super) struct SourceReader<'r, 'a, 'b> {
    pub(super) reader: &'r mut CredentialReader<'a, 'b>,
}

impl SourceReader<'_, '_, '_> {
    pub(super) fn read_path(&mut self, entry: &Spanned<String>) -> Option<String> {
        let text = entry.get_ref();
        if text.is_empty() {
            self.reader.report(entry.span(), ProblemKind::Missing("a path must not be empty"));
            return None;
        }
        let fits = text.len() <= MAX_TEXT && !text.chars().any(char::is_control) && !has_key_shape(text);
        if !fits {
            let why = "this takes the path of a file, never the secret itself";
            self.reader.report_secretly(entry.span(), why);
        }
        fits.then(|| text.clone())
    }

    pub(super) fn read_variable(&mut self, entry: &Spanned<String>) -> Option<String> {
        let text = entry.get_ref();
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let fits = (1..=MAX_VARIABLE).contains(&text.len())
            && text.bytes().all(plain)
            && !text.starts_with(|first: char| first.is_ascii_digit())
            && !has_key_shape(text);
        if !fits {
            let why = "this takes the name of a variable, such as `API_KEY`, never its value";
            self.reader.report_secretly(entry.span(), why);
        }
        fits.then(|| text.clone())
    }

    pub(super) fn read_command(&mut self, entry: &Spanned<Vec<Spanned<String>>>) -> Option<Vec<String>> {
        let words = entry.get_ref();
        let fits =
            |word: &Spanned<String>| word.get_ref().len() <= MAX_TEXT && !word.get_ref().contains('\0');
        let runs = words.first().is_some_and(|program| !program.get_ref().is_empty());
        if !runs || words.len() > MAX_ARGUMENTS || !words.iter().all(fits) {
            let why =
                "`command` takes a program and at most 63 arguments, such as `[\"pass\", \"show\", \"x\"]`";
            self.reader.report_secretly(entry.span(), why);
            return None;
        }
        Some(words.iter().map(|word| word.get_ref().clone()).collect())
    }

    pub(super) fn read_oauth2(&mut self, entry: &Spanned<OAuth2Document>) -> Option<OAuth2Source> {
        let document = entry.get_ref();
        let grant =
            document.grant.as_ref().map_or(GrantDocument::ClientCredentials, |grant| *grant.get_ref());
        let auth = document.client_auth.as_ref().map(|auth| *auth.get_ref());
        self.check_oauth2_keys(document, grant, auth);
        let secret = self.read_secret(
            document.client_secret_file.as_ref(),
            document.client_secret_env.as_ref(),
            ["client_secret_file", "client_secret_env"],
        );
        let token_url = self.read_url(&document.token_url);
        let client_id = self.read_printable(document.client_id.as_ref());
        let signs = auth == Some(ClientAuthDocument::PrivateKeyJwt);
        if grant == GrantDocument::ClientCredentials && (client_id.is_none() || secret.is_none() && !signs) {
            let why = "`grant = \"client_credentials\"` needs `client_id`, and `client_secret_file`, `client_secret_env` or `client_auth = \"private_key_jwt\"`";
            self.reader.report(document.token_url.span(), ProblemKind::Missing(why));
            return None;
        }
        if client_id.is_none() && (secret.is_some() || signs) {
            let why = "a client's secret or key needs its `client_id`";
            self.reader.report(document.token_url.span(), ProblemKind::Missing(why));
            return None;
        }
        let assertion = self.read_assertion(document);
        let client_auth = match auth {
            None | Some(ClientAuthDocument::Basic) => OAuth2ClientAuth::Basic,
            Some(ClientAuthDocument::Post) => OAuth2ClientAuth::Post,
            Some(ClientAuthDocument::PrivateKeyJwt) => {
                OAuth2ClientAuth::PrivateKeyJwt(self.required_assertion(document, assertion.clone())?)
            }
        };
        let grant = match grant {
            GrantDocument::ClientCredentials => OAuth2Grant::ClientCredentials,
            GrantDocument::JwtBearer => {
                let assertion = self.required_assertion(document, assertion)?;
                if assertion.issuer.is_none() && client_id.is_none() {
                    let why = "`grant = \"jwt_bearer\"` needs `issuer` or `client_id`";
                    self.reader.report(document.token_url.span(), ProblemKind::Missing(why));
                }
                OAuth2Grant::JwtBearer(assertion)
            }
            GrantDocument::RefreshToken => match &document.refresh_token_file {
                Some(file) => OAuth2Grant::RefreshToken { file: self.read_path(file)? },
                None => {
                    let why = "`grant = \"refresh_token\"` needs `refresh_token_file`";
                    self.reader.report(document.token_url.span(), ProblemKind::Missing(why));
                    return None;
                }
            },
        };
        Some(OAuth2Source {
            token_url: token_url?,
            grant,
            client_id,
            client_secret: secret,
            client_auth,
            scopes: self.read_words(&document.scopes),
            audience: self.read_printable(document.audience.as_ref()),
        })
    }

    /// Reports keys that the grant and the client's authentication do not use.
    fn check_oauth2_keys(
        &mut self,
        document: &OAuth2Document,
        grant: GrantDocument,
        auth: Option<ClientAuthDocument>,
    ) {
        let signs = grant == GrantDocument::JwtBearer || auth == Some(ClientAuthDocument::PrivateKeyJwt);
        if let Some(file) =
            document.refresh_token_file.as_ref().filter(|_| grant != GrantDocument::RefreshToken)
        {
            let why = "`refresh_token_file` needs `grant = \"refresh_token\"`";
            self.reader.report(file.span(), ProblemKind::Missing(why));
        }
        let assertion = [
            &document.key_file,
            &document.key_id,
            &document.issuer,
            &document.subject,
            &document.assertion_audience,
        ];
        if let Some(stray) = assertion.into_iter().flatten().next().filter(|_| !signs) {
            let why =
                "keys of an assertion need `grant = \"jwt_bearer\"` or `client_auth = \"private_key_jwt\"`";
            self.reader.report(stray.span(), ProblemKind::Missing(why));
        }
        let secret = document.client_secret_file.as_ref().or(document.client_secret_env.as_ref());
        match (auth, secret) {
            (Some(ClientAuthDocument::PrivateKeyJwt), Some(secret)) => {
                let why = "`client_auth = \"private_key_jwt\"` uses `key_file` in place of a secret; remove the secret";
                self.reader.report(secret.span(), ProblemKind::Missing(why));
            }
            (Some(ClientAuthDocument::Basic | ClientAuthDocument::Post), None) => {
                let why = "`client_auth` needs `client_secret_file` or `client_secret_env`";
                let span = document.client_auth.as_ref().map_or(0..0, Spanned::span);
                self.reader.report(span, ProblemKind::Missing(why));
            }
            (Some(_) | None, _) => {}
        }
    }

    fn read_assertion(&mut self, document: &OAuth2Document) -> Option<AssertionSettings> {
        let key = self.read_path(document.key_file.as_ref()?)?;
        Some(AssertionSettings {
            key,
            key_id: self.read_printable(document.key_id.as_ref()),
            issuer: self.read_printable(document.issuer.as_ref()),
            subject: self.read_printable(document.subject.as_ref()),
            audience: self.read_printable(document.assertion_audience.as_ref()),
        })
    }

    fn required_assertion(
        &mut self,
        document: &OAuth2Document,
        assertion: Option<AssertionSettings>,
    ) -> Option<AssertionSettings> {
        if document.key_file.is_none() {
            let why = "a signed assertion needs `key_file`";
            self.reader.report(document.token_url.span(), ProblemKind::Missing(why));
        }
        assertion
    }

    pub(super) fn read_google(&mut self, entry: &Spanned<GoogleDocument>) -> Option<GoogleSource> {
        let document = entry.get_ref();
        if document.scopes.get_ref().is_empty() {
            let why = "a service account needs at least one scope";
            self.reader.report(document.scopes.span(), ProblemKind::Missing(why));
        }
        let scopes = self.read_words(document.scopes.get_ref());
        let subject = self.read_printable(document.subject.as_ref());
        Some(GoogleSource { file: self.read_path(&document.file)?, scopes, subject })
    }

    pub(super) fn read_github_app(&mut self, entry: &Spanned<GitHubAppDocument>) -> Option<GitHubAppSource> {
        let document = entry.get_ref();
        let mut permissions = Vec::new();
        for (name, level) in &document.permissions {
            let word = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
            if !name.get_ref().bytes().all(word) || !PERMISSION_LEVELS.contains(&level.get_ref().as_str()) {
                let why = "write a permission such as `contents = \"read\"`; levels are `read`, `write` and `admin`";
                self.reader.report_secretly(level.span(), why);
            }
            permissions.push((name.get_ref().clone(), level.get_ref().clone()));
        }
        let repositories = self.read_words(&document.repositories);
        let api_url = match &document.api_url {
            Some(url) => Some(self.read_url(url)?),
            None => None,
        };
        let (id, key) = (self.read_printable(Some(&document.id)), self.read_path(&document.key_file));
        let installation = document.installation;
        Some(GitHubAppSource { id: id?, key: key?, installation, repositories, permissions, api_url })
    }

    pub(super) fn read_aws(&mut self, entry: &Spanned<AwsDocument>) -> Option<AwsSource> {
        let document = entry.get_ref();
        let keys = [
            &document.access_key_id_file,
            &document.access_key_id_env,
            &document.secret_access_key_file,
            &document.secret_access_key_env,
            &document.session_token_file,
            &document.session_token_env,
        ];
        let profile = [&document.credentials_file, &document.profile];
        let role = [
            &document.role,
            &document.web_identity_token_file,
            &document.session_name,
            &document.sts_url,
            &document.region,
        ];
        fn first<'d, const N: usize>(keys: [&'d Option<Spanned<String>>; N]) -> Option<&'d Spanned<String>> {
            keys.into_iter().flatten().next()
        }
        let groups = [
            first(keys).map(|entry| ("access_key_id_…", entry)),
            first(profile).map(|entry| ("credentials_file", entry)),
            first(role).map(|entry| ("role", entry)),
        ];
        let written: Vec<_> = groups.into_iter().flatten().collect();
        match written.as_slice() {
            [(_, _)] => {}
            [] => {
                let why =
                    "`aws` needs `access_key_id_…` and `secret_access_key_…`, `credentials_file`, or `role`";
                self.reader.report(entry.span(), ProblemKind::Missing(why));
                return None;
            }
            [(one, _), (other, second), ..] => {
                self.reader.report(second.span(), ProblemKind::Exclusive(one, other));
                return None;
            }
        }
        match (first(keys), first(profile)) {
            (Some(_), _) => self.read_aws_keys(entry),
            (None, Some(_)) => {
                let Some(file) = &document.credentials_file else {
                    let why = "`profile` needs `credentials_file`";
                    self.reader.report(entry.span(), ProblemKind::Missing(why));
                    return None;
                };
                let profile = match &document.profile {
                    Some(profile) => self.read_printable(Some(profile))?,
                    None => "default".to_owned(),
                };
                Some(AwsSource::Profile { file: self.read_path(file)?, profile })
            }
            (None, None) => self.read_aws_role(entry),
        }
    }

    fn read_aws_keys(&mut self, entry: &Spanned<AwsDocument>) -> Option<AwsSource> {
        let document = entry.get_ref();
        let id = self.read_secret(
            document.access_key_id_file.as_ref(),
            document.access_key_id_env.as_ref(),
            ["access_key_id_file", "access_key_id_env"],
        );
        let secret = self.read_secret(
            document.secret_access_key_file.as_ref(),
            document.secret_access_key_env.as_ref(),
            ["secret_access_key_file", "secret_access_key_env"],
        );
        let session_token = self.read_secret(
            document.session_token_file.as_ref(),
            document.session_token_env.as_ref(),
            ["session_token_file", "session_token_env"],
        );
        if let (Some(id), Some(secret)) = (id, secret) {
            return Some(AwsSource::Keys { id, secret, session_token });
        }
        let why = "AWS keys are an `access_key_id_file` or `access_key_id_env`, and a `secret_access_key_file` or `secret_access_key_env`";
        self.reader.report(entry.span(), ProblemKind::Missing(why));
        None
    }

    fn read_aws_role(&mut self, entry: &Spanned<AwsDocument>) -> Option<AwsSource> {
        let document = entry.get_ref();
        let (Some(role), Some(token)) = (&document.role, &document.web_identity_token_file) else {
            let why = "a role of AWS needs `role` and `web_identity_token_file`";
            self.reader.report(entry.span(), ProblemKind::Missing(why));
            return None;
        };
        if !role.get_ref().starts_with("arn:") {
            self.reader.report_secretly(
                role.span(),
                "write a role as ARN, such as `arn:aws:iam::123456789012:role/x`",
            );
            return None;
        }
        if document.sts_url.is_none() && document.region.is_none() {
            let why = "a role of AWS needs `region`, or `sts_url`";
            self.reader.report(entry.span(), ProblemKind::Missing(why));
        }
        let sts_url = match &document.sts_url {
            Some(url) => Some(self.read_url(url)?),
            None => None,
        };
        Some(AwsSource::WebIdentity {
            role: self.read_printable(Some(role))?,
            token: self.read_path(token)?,
            session_name: self.read_printable(document.session_name.as_ref()),
            sts_url,
            region: self.read_printable(document.region.as_ref()),
        })
    }

    pub(super) fn read_spiffe(&mut self, entry: &Spanned<SpiffeDocument>) -> Option<SpiffeSource> {
        let document = entry.get_ref();
        if document.audience.get_ref().is_empty() {
            let why = "a JWT of SPIFFE needs at least one audience";
            self.reader.report(document.audience.span(), ProblemKind::Missing(why));
        }
        if let Some(id) = document.id.as_ref().filter(|id| !id.get_ref().starts_with("spiffe://")) {
            self.reader.report_secretly(id.span(), "a SPIFFE ID begins with `spiffe://`");
        }
        let audience = self.read_words(document.audience.get_ref());
        let id = self.read_printable(document.id.as_ref());
        Some(SpiffeSource { socket: self.read_path(&document.socket)?, audience, id })
    }

    fn read_secret(
        &mut self,
        file: Option<&Spanned<String>>,
        variable: Option<&Spanned<String>>,
        keys: [&'static str; 2],
    ) -> Option<SourceSecret> {
        match (file, variable) {
            (Some(_), Some(variable)) => {
                let [one, other] = keys;
                self.reader.report(variable.span(), ProblemKind::Exclusive(one, other));
                None
            }
            (Some(file), None) => self.read_path(file).map(SourceSecret::File),
            (None, Some(variable)) => self.read_variable(variable).map(SourceSecret::Env),
            (None, None) => None,
        }
    }

    fn read_url(&mut self, entry: &Spanned<String>) -> Option<String> {
        let fits = entry.get_ref().len() <= MAX_TEXT && is_service_url(entry.get_ref());
        if !fits {
            let why = "write a URL with `https://`; `http://` only to this machine, such as `http://127.0.0.1:8200/token`; no user, no fragment";
            self.reader.report_secretly(entry.span(), why);
        }
        fits.then(|| entry.get_ref().clone())
    }

    fn read_printable(&mut self, entry: Option<&Spanned<String>>) -> Option<String> {
        let entry = entry?;
        let text = entry.get_ref();
        let fits = (1..=MAX_TEXT).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_graphic())
            && !has_key_shape(text);
        if !fits {
            let why = "this takes printable ASCII characters without spaces, and never a secret";
            self.reader.report_secretly(entry.span(), why);
        }
        fits.then(|| text.clone())
    }

    fn read_words(&mut self, entries: &[Spanned<String>]) -> Vec<String> {
        if let Some(over) = entries.get(MAX_LIST) {
            self.reader.report(over.span(), ProblemKind::TooMany { what: "entries", limit: MAX_LIST });
        }
        entries.iter().take(MAX_LIST).filter_map(|entry| self.read_printable(Some(entry))).collect()
    }
}
