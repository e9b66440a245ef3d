//! Reads credentials from the configuration: one source, one form, and the hosts that may get them.
//!
//! People paste secrets where names and paths belong, so no error of this file shows what was written there.

use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use toml::Spanned;

use super::credential_document::{CredentialDocument, FormDocument, PlaceholderDocument};
use super::credential_source::SourceReader;
use super::document::ConfigurationDocument;
use super::problem::{ProblemKind, Problems, SourceText, has_key_shape};
use crate::credential::{Credential, CredentialForm, CredentialSource};
use crate::facts::RequestAuthority;
use crate::ids::CredentialName;
use crate::name::Host;
use crate::pattern::{HostPattern, PatternWidth};

/// Most credentials of one configuration; each has a thread.
const MAX_ENTRIES: usize = 256;
/// Most hosts of one credential, and most entries of its other lists.
pub(super) const MAX_LIST: usize = 256;
/// Upper limit of `timeout_seconds`.
const MAX_TIMEOUT: u64 = 60;
/// Default of `timeout_seconds`.
const TIMEOUT: u64 = 10;
/// Upper limit of `cache_seconds`: a day.
const MAX_CACHE: u64 = 86_400;
/// Longest name of a header field, a parameter or a user, and longest prefix.
const MAX_WORD: usize = 128;

/// Fields that belong to the connection, the message or another part of Sandbar, so that no credential can be one.
const RESERVED_FIELDS: [&str; 38] = [
    "accept",
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-location",
    "content-range",
    "content-type",
    "cookie",
    "cookie2",
    "date",
    "expect",
    "forwarded",
    "host",
    "http2-settings",
    "if-range",
    "keep-alive",
    "max-forwards",
    "origin",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "range",
    "referer",
    "sec-websocket-accept",
    "sec-websocket-extensions",
    "sec-websocket-key",
    "sec-websocket-protocol",
    "sec-websocket-version",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
];

/// Reads the credentials and reports their problems; leaves out those with errors.
pub(crate) fn read_credentials(
    source: &SourceText<'_>,
    document: &ConfigurationDocument,
    problems: &mut Problems,
) -> Vec<Credential> {
    let mut reader = CredentialReader { source, problems };
    if document.credential.len() > MAX_ENTRIES {
        reader.report(0..0, ProblemKind::TooMany { what: "credentials", limit: MAX_ENTRIES });
    }
    let mut lines: HashMap<CredentialName, u32> = HashMap::new();
    let mut credentials = Vec::new();
    for entry in document.credential.iter().take(MAX_ENTRIES).map(Spanned::get_ref) {
        let name = reader.parse_name(&entry.name);
        if let Some(name) = &name
            && let Some(line) = lines.insert(name.clone(), source.line(entry.name.span().start))
        {
            let fault = ProblemKind::Twice { what: "credential", name: name.to_string(), line };
            reader.report(entry.name.span(), fault);
        }
        credentials.extend(reader.read_credential(entry, name));
    }
    credentials
}

pub(super) struct CredentialReader<'a, 'b> {
    pub(super) source: &'a SourceText<'a>,
    pub(super) problems: &'b mut Problems,
}

impl CredentialReader<'_, '_> {
    fn read_credential(
        &mut self,
        document: &CredentialDocument,
        name: Option<CredentialName>,
    ) -> Option<Credential> {
        let origin = self.read_source(document);
        let form = document.form.as_ref().map_or(Some(CredentialForm::Bearer), |form| self.read_form(form));
        if let (Some(origin), Some(form)) = (&origin, &form) {
            self.check_pair(document, origin, form);
        }
        let hosts = self.read_hosts(document);
        let timeout = self.read_seconds(document.timeout_seconds.as_ref(), MAX_TIMEOUT);
        let cache = self.read_seconds(document.cache_seconds.as_ref(), MAX_CACHE);
        if let (Some(entry), Some(_)) = (&document.timeout_seconds, &document.env) {
            let why = "a variable is read at once; remove `timeout_seconds`";
            self.report(entry.span(), ProblemKind::Missing(why));
        }
        if let Some(entry) = &document.cache_seconds
            && document.command.is_none()
            && document.oauth2.is_none()
        {
            let why = "only values of `command` and `oauth2` are cached; remove `cache_seconds`";
            self.report(entry.span(), ProblemKind::Missing(why));
        }
        Some(Credential {
            name: name?,
            source: origin?,
            form: form?,
            hosts: hosts?,
            timeout: timeout.unwrap_or(Duration::from_secs(TIMEOUT)),
            cache,
        })
    }

    /// Parses the name of a credential; the error does not echo the text, which may be a pasted secret.
    fn parse_name(&mut self, entry: &Spanned<String>) -> Option<CredentialName> {
        let parsed = CredentialName::parse(entry.get_ref()).ok().filter(|_| !has_key_shape(entry.get_ref()));
        if parsed.is_none() {
            self.report_secretly(
                entry.span(),
                "invalid credential name: use 1 to 63 letters, digits, `.`, `_` and `-`, never the secret itself",
            );
        }
        parsed
    }

    fn read_source(&mut self, document: &CredentialDocument) -> Option<CredentialSource> {
        let at = |written: Option<Range<usize>>, key| written.map(|span| (key, span));
        let written: Vec<(&'static str, Range<usize>)> = [
            at(document.file.as_ref().map(Spanned::span), "file"),
            at(document.env.as_ref().map(Spanned::span), "env"),
            at(document.command.as_ref().map(Spanned::span), "command"),
            at(document.oauth2.as_ref().map(Spanned::span), "oauth2"),
            at(document.google.as_ref().map(Spanned::span), "google"),
            at(document.github_app.as_ref().map(Spanned::span), "github_app"),
            at(document.aws.as_ref().map(Spanned::span), "aws"),
            at(document.spiffe.as_ref().map(Spanned::span), "spiffe"),
        ]
        .into_iter()
        .flatten()
        .collect();
        match written.as_slice() {
            [] => {
                let why = "a credential needs a source: `file`, `env`, `command`, `oauth2`, `google`, `github_app`, `aws` or `spiffe`";
                self.report(document.name.span(), ProblemKind::Missing(why));
            }
            [_] => {}
            [(first, _), rest @ ..] => {
                for (other, span) in rest {
                    self.report(span.clone(), ProblemKind::Exclusive(first, other));
                }
                return None;
            }
        }
        let mut reader = SourceReader { reader: self };
        if let Some(entry) = &document.file {
            return reader.read_path(entry).map(CredentialSource::File);
        }
        if let Some(entry) = &document.env {
            return reader.read_variable(entry).map(CredentialSource::Env);
        }
        if let Some(entry) = &document.command {
            return reader.read_command(entry).map(CredentialSource::Command);
        }
        if let Some(entry) = &document.oauth2 {
            return reader.read_oauth2(entry).map(CredentialSource::OAuth2);
        }
        if let Some(entry) = &document.google {
            return reader.read_google(entry).map(CredentialSource::Google);
        }
        if let Some(entry) = &document.github_app {
            return reader.read_github_app(entry).map(CredentialSource::GitHubApp);
        }
        if let Some(entry) = &document.aws {
            return reader.read_aws(entry).map(CredentialSource::Aws);
        }
        document.spiffe.as_ref().and_then(|entry| reader.read_spiffe(entry).map(CredentialSource::Spiffe))
    }

    fn read_form(&mut self, entry: &Spanned<FormDocument>) -> Option<CredentialForm> {
        let form = entry.get_ref();
        let written: Vec<&'static str> = [
            form.header.as_ref().map(|_| "header"),
            form.basic.as_ref().map(|_| "basic"),
            form.sigv4.as_ref().map(|_| "sigv4"),
            form.dangerously_query.as_ref().map(|_| "dangerously_query"),
            form.placeholder.as_ref().map(|_| "placeholder"),
        ]
        .into_iter()
        .flatten()
        .collect();
        if let [first, second, ..] = written.as_slice() {
            self.report(entry.span(), ProblemKind::Exclusive(first, second));
            return None;
        }
        if let Some(prefix) = form.prefix.as_ref().filter(|_| form.header.is_none()) {
            self.report(prefix.span(), ProblemKind::Missing("`prefix` needs `header`"));
        }
        if let Some(header) = &form.header {
            let (name, prefix) = (self.read_field_name(header), self.read_prefix(form.prefix.as_ref()));
            return Some(CredentialForm::Header { name: name?, prefix: prefix? });
        }
        if let Some(basic) = &form.basic {
            let user = &basic.user;
            let plain = |byte: u8| byte.is_ascii_graphic() && byte != b':';
            let why = "a user of Basic authentication has 1 to 128 printable ASCII characters and no `:`";
            return self.read_word(user, plain, why).map(|user| CredentialForm::Basic { user });
        }
        if let Some(sigv4) = &form.sigv4 {
            let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            let why = "write a service and a region in lower case, such as `s3` and `eu-central-1`";
            let service = self.read_word(&sigv4.get_ref().service, plain, why);
            let region = self.read_word(&sigv4.get_ref().region, plain, why);
            return Some(CredentialForm::SigV4 { service: service?, region: region? });
        }
        if let Some(query) = &form.dangerously_query {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
            let why = "the name of a parameter has letters, digits, `-`, `.`, `_` and `~`";
            return self.read_word(query, plain, why).map(|name| CredentialForm::DangerouslyQuery { name });
        }
        match &form.placeholder {
            Some(placeholder) => self.read_placeholder(placeholder),
            None => Some(CredentialForm::Bearer),
        }
    }

    fn read_placeholder(&mut self, entry: &Spanned<PlaceholderDocument>) -> Option<CredentialForm> {
        let document = entry.get_ref();
        if document.places.is_empty() || document.places.len() > MAX_LIST {
            let why = "`in` needs at least one place, such as `header:authorization`";
            self.report(entry.span(), ProblemKind::Missing(why));
            return None;
        }
        let mut headers = Vec::new();
        for place in &document.places {
            let Some(name) = place.get_ref().strip_prefix("header:") else {
                let why = "a placeholder is replaced in header fields only; write `header:NAME`";
                self.report(place.span(), ProblemKind::Missing(why));
                continue;
            };
            let name = self.check_field_name(name, place.span())?;
            if headers.contains(&name) {
                let line = self.source.line(place.span().start);
                self.report(place.span(), ProblemKind::Twice { what: "place", name, line });
                continue;
            }
            headers.push(name);
        }
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let why = "the prefix of a placeholder has letters, digits, `-`, `.` and `_`";
        let prefix = match &document.prefix {
            Some(prefix) if !prefix.get_ref().is_empty() => self.read_word(prefix, plain, why)?,
            Some(_) | None => String::new(),
        };
        Some(CredentialForm::Placeholder { headers, prefix })
    }

    fn read_prefix(&mut self, entry: Option<&Spanned<String>>) -> Option<String> {
        let Some(entry) = entry.filter(|entry| !entry.get_ref().is_empty()) else {
            return Some(String::new());
        };
        let plain = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
        let why = "a prefix has at most 128 printable ASCII characters, such as `token `";
        if entry.get_ref().starts_with(' ') {
            self.report_secretly(entry.span(), "a prefix must not begin with a space");
            return None;
        }
        self.read_word(entry, plain, why)
    }

    fn read_field_name(&mut self, entry: &Spanned<String>) -> Option<String> {
        self.check_field_name(entry.get_ref(), entry.span())
    }

    /// Returns the name of a header field in lower case.
    fn check_field_name(&mut self, text: &str, span: Range<usize>) -> Option<String> {
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if text.is_empty() || text.len() > MAX_WORD || !text.bytes().all(token) || has_key_shape(text) {
            let why =
                "`header` takes the name of a header field, such as `x-api-key`, never the secret itself";
            self.report_secretly(span, why);
            return None;
        }
        let name = text.to_ascii_lowercase();
        if RESERVED_FIELDS.contains(&name.as_str()) {
            let why = "no credential can be carried in this header field: it belongs to the connection, the message or the client; use the field that the service documents, such as `authorization`";
            self.report(span, ProblemKind::Missing(why));
            return None;
        }
        Some(name)
    }

    /// Reads a short text of certain characters, in which nothing looks like a key.
    fn read_word(
        &mut self,
        entry: &Spanned<String>,
        plain: impl Fn(u8) -> bool,
        why: &'static str,
    ) -> Option<String> {
        let text = entry.get_ref();
        let fits = (1..=MAX_WORD).contains(&text.len()) && text.bytes().all(plain) && !has_key_shape(text);
        if !fits {
            self.report_secretly(entry.span(), why);
        }
        fits.then(|| text.clone())
    }

    /// Reports a form that the source has no value for: AWS keys sign, and only they do.
    fn check_pair(
        &mut self,
        document: &CredentialDocument,
        origin: &CredentialSource,
        form: &CredentialForm,
    ) {
        let is_aws = matches!(origin, CredentialSource::Aws(_));
        let signs = matches!(form, CredentialForm::SigV4 { .. });
        if is_aws != signs {
            let span = document.form.as_ref().map_or_else(|| document.name.span(), Spanned::span);
            let why = "AWS keys sign requests and are never sent: `aws` needs `form = { sigv4 = { service = …, region = … } }`, and `sigv4` needs `aws`";
            self.report(span, ProblemKind::Missing(why));
        }
    }

    fn read_hosts(&mut self, document: &CredentialDocument) -> Option<Vec<HostPattern>> {
        let entries = document.hosts.as_ref().filter(|hosts| !hosts.get_ref().is_empty());
        let Some(entries) = entries else {
            let span = document.hosts.as_ref().map_or_else(|| document.name.span(), Spanned::span);
            let why = "a credential needs `hosts`, the only hosts that may get it, such as `hosts = [\"api.example.com\"]`";
            self.report(span, ProblemKind::Missing(why));
            return None;
        };
        if entries.get_ref().len() > MAX_LIST {
            self.report(
                entries.span(),
                ProblemKind::TooMany { what: "hosts of one credential", limit: MAX_LIST },
            );
        }
        let mut hosts: Vec<HostPattern> = Vec::new();
        for entry in entries.get_ref().iter().take(MAX_LIST) {
            // Not wide, whatever a policy allows: anyone could register a name that gets the key.
            match HostPattern::parse(entry.get_ref(), PatternWidth::Narrow) {
                Ok(host) if hosts.contains(&host) => {
                    let line = self.source.line(entry.span().start);
                    let fault = ProblemKind::Twice { what: "host", name: host.to_string(), line };
                    self.report(entry.span(), fault);
                }
                Ok(host) => hosts.push(host),
                Err(error) => self.report_host(entry, error),
            }
        }
        Some(hosts)
    }

    fn report_host(&mut self, entry: &Spanned<String>, error: crate::pattern::PatternError) {
        use crate::pattern::PatternError;
        match error {
            PatternError::Wide { .. } => {
                let why = "a credential never goes to every name below a public suffix: anyone could register one; name the hosts";
                self.report(entry.span(), ProblemKind::Missing(why));
            }
            source @ (PatternError::Name(_)
            | PatternError::Scheme
            | PatternError::TwoStars { .. }
            | PatternError::Wildcard) => match has_key_shape(entry.get_ref()) {
                true => self.report_secretly(entry.span(), "`hosts` takes host names, never a secret"),
                false => {
                    let text = super::problem::printable(entry.get_ref());
                    self.report(entry.span(), ProblemKind::Host { entry: text, source });
                }
            },
        }
    }

    fn read_seconds(&mut self, entry: Option<&Spanned<u64>>, most: u64) -> Option<Duration> {
        let entry = entry?;
        let given = *entry.get_ref();
        if !(1..=most).contains(&given) {
            self.report(entry.span(), ProblemKind::Limit { given, most });
        }
        Some(Duration::from_secs(given))
    }

    pub(super) fn report(&mut self, span: Range<usize>, fault: ProblemKind) {
        self.problems.error(self.source.location(span), fault);
    }

    /// Reports a problem of a text that may be a secret, with nothing of the text.
    pub(super) fn report_secretly(&mut self, span: Range<usize>, why: &'static str) {
        self.problems.error(self.source.masked_location(span), ProblemKind::Missing(why));
    }
}

/// Returns whether a URL is `https://`, or `http://` to this machine, with a host, no user and no fragment.
pub(super) fn is_service_url(url: &str) -> bool {
    let (rest, clear) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
        (Some(rest), _) => (rest, false),
        (None, Some(rest)) => (rest, true),
        (None, None) => return false,
    };
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    let plain = url.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#' && byte != b'\\');
    let Ok(RequestAuthority { host, .. }) = RequestAuthority::parse_written(authority) else { return false };
    let is_local = match &host {
        Host::Address(IpAddr::V4(address)) => address.is_loopback(),
        Host::Address(IpAddr::V6(address)) => address.is_loopback(),
        Host::Name(name) => name.as_str() == "localhost",
    };
    plain && !authority.contains('@') && (!clear || is_local)
}
