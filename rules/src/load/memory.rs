//! Reads memory services and identity issuers from the configuration.

use std::collections::HashMap;
use std::ops::Range;

use toml::Spanned;

use super::document::{ConfigurationDocument, IssuerDocument, MemoryServiceDocument, ServiceModeDocument};
use super::problem::{ProblemKind, Problems, SourceText, may_be_secret, printable};
use crate::configuration::{IdentitySettings, IssuerSettings, MemoryService, ServiceAuthSettings};
use crate::credential::{Credential, CredentialForm};
use crate::facts::RequestAuthority;
use crate::ids::{CredentialName, Environment, IdError, Tenant};
use crate::principal::PrincipalTemplate;

/// Most memory services and issuers, of each kind.
const MAX_ENTRIES: usize = 256;
/// The port of a service without one.
const DEFAULT_PORT: u16 = 443;
/// Upper limit of `life_seconds`, since a stolen token stays valid until it expires.
const MAX_TOKEN_LIFE: u64 = 3600;
/// Longest audience or issuer name.
const MAX_NAME: usize = 255;
const ALGORITHMS: [&str; 3] = ["ES256", "EdDSA", "RS256"];

/// Reads the memory services and reports their problems.
pub(crate) fn read_services(
    source: &SourceText<'_>,
    document: &ConfigurationDocument,
    credentials: &[Credential],
    problems: &mut Problems,
) -> Vec<MemoryService> {
    let mut reader = ServiceReader { source, problems };
    reader.check_count("memory services", document.memory_service.len());
    let known: Vec<&str> =
        document.credential.iter().map(|entry| entry.get_ref().name.get_ref().as_str()).collect();
    let mut lines = HashMap::new();
    let mut services = Vec::new();
    for entry in document.memory_service.iter().take(MAX_ENTRIES).map(Spanned::get_ref) {
        let Some(service) = reader.read_service(entry, &known) else { continue };
        reader.check_key(entry, &service, credentials);
        let key = format!("{}:{}", service.host, service.port);
        if let Some(line) = lines.insert(key.clone(), source.line(entry.host.span().start)) {
            let fault = ProblemKind::Twice { what: "memory service", name: key, line };
            reader.report(entry.host.span(), fault);
        }
        services.push(service);
    }
    services
}

/// Reads the trusted issuers and reports their problems.
pub(crate) fn read_identity(
    source: &SourceText<'_>,
    document: &ConfigurationDocument,
    problems: &mut Problems,
) -> Option<IdentitySettings> {
    let document = document.identity.as_ref()?;
    let mut reader = ServiceReader { source, problems };
    reader.check_count("issuers", document.issuer.len());
    let issuers = document.issuer.iter().take(MAX_ENTRIES);
    Some(IdentitySettings {
        revocations: document.revocations.as_ref().map(|path| path.get_ref().clone()),
        issuers: issuers.map(|issuer| reader.read_issuer(issuer.get_ref())).collect(),
    })
}

struct ServiceReader<'a, 'b> {
    source: &'a SourceText<'a>,
    problems: &'b mut Problems,
}

impl ServiceReader<'_, '_> {
    fn read_service(&mut self, document: &MemoryServiceDocument, known: &[&str]) -> Option<MemoryService> {
        let authority = RequestAuthority::parse_written(document.host.get_ref()).ok();
        let named = authority.filter(|authority| authority.host.name().is_some());
        if named.is_none() {
            let why = "a memory service must be one exact host name, with its port if not 443";
            self.report(document.host.span(), ProblemKind::Missing(why));
        }
        self.check_printable(&document.audience);
        let proof = self.read_auth(document, known);
        let RequestAuthority { host, port } = named?;
        let audience = document.audience.get_ref().clone();
        Some(MemoryService { host, port: port.unwrap_or(DEFAULT_PORT), audience, proof: proof? })
    }

    /// Reports a key that the service cannot get, because of where the operator lets the key go or what it is.
    fn check_key(
        &mut self,
        document: &MemoryServiceDocument,
        service: &MemoryService,
        credentials: &[Credential],
    ) {
        let ServiceAuthSettings::ApiKey { credential, .. } = &service.proof else { return };
        let Some(found) = credentials.iter().find(|known| known.name == *credential) else { return };
        if !service.host.name().is_some_and(|name| found.covers(name, service.port)) {
            let (credential, host) = (credential.to_string(), format!("{}:{}", service.host, service.port));
            let help = found.hosts_help();
            let at = self.source.location(document.host.span());
            self.problems.error_with_help(at, ProblemKind::CredentialHost { credential, host }, help);
        }
        if found.form != CredentialForm::Bearer {
            let why = "the profile of the memory service says how its key is carried; use a credential without `form`";
            self.report(document.mode.span(), ProblemKind::Missing(why));
        }
    }

    fn read_auth(&mut self, document: &MemoryServiceDocument, known: &[&str]) -> Option<ServiceAuthSettings> {
        let at = document.mode.span();
        let mode = *document.mode.get_ref();
        let (key, token) = (&document.credential, [&document.key, &document.issuer]);
        let signs = token.into_iter().chain([&document.trust_domain]).flatten().next();
        if let Some(stray) = signs.filter(|_| mode != ServiceModeDocument::Token) {
            let why = "`key`, `issuer` and `trust_domain` need `mode = \"token\"`";
            self.report(stray.span(), ProblemKind::Missing(why));
        }
        if let Some(stray) = key.as_ref().filter(|_| mode != ServiceModeDocument::ApiKey) {
            self.report(stray.span(), ProblemKind::Missing("`credential` needs `mode = \"api-key\"`"));
        }
        match mode {
            ServiceModeDocument::ApiKey => {
                let principal = self.read_principal(document)?;
                let credential = self.read_credential(key.as_ref(), known, at)?;
                Some(ServiceAuthSettings::ApiKey { credential, principal })
            }
            ServiceModeDocument::Principal => {
                self.read_principal(document).map(ServiceAuthSettings::Principal)
            }
            ServiceModeDocument::Token => self.read_token_auth(document),
        }
    }

    fn read_token_auth(&mut self, document: &MemoryServiceDocument) -> Option<ServiceAuthSettings> {
        if let Some(stray) = &document.principal {
            let why = "a token already names its sandbox; remove `principal`";
            self.report(stray.span(), ProblemKind::Missing(why));
        }
        let (Some(key), Some(issuer), Some(domain)) =
            (&document.key, &document.issuer, &document.trust_domain)
        else {
            let why = "`mode = \"token\"` needs `key`, `issuer` and `trust_domain`";
            self.report(document.mode.span(), ProblemKind::Missing(why));
            return None;
        };
        [key, issuer, domain].into_iter().for_each(|text| self.check_printable(text));
        let text = |entry: &Spanned<String>| entry.get_ref().clone();
        Some(ServiceAuthSettings::Token { key: text(key), issuer: text(issuer), trust_domain: text(domain) })
    }

    fn read_principal(&mut self, document: &MemoryServiceDocument) -> Option<PrincipalTemplate> {
        let entry = document.principal.as_ref();
        let text = entry.map_or(PrincipalTemplate::DEFAULT, |entry| entry.get_ref());
        let parsed = PrincipalTemplate::parse(text).ok();
        if let (None, Some(entry)) = (&parsed, entry) {
            let why = "a principal must contain `{sandbox}`, and may contain printable text, `{agent_card}`, `{environment}` and `{tenant}`";
            self.report(entry.span(), ProblemKind::Missing(why));
        }
        parsed
    }

    fn read_credential(
        &mut self,
        entry: Option<&Spanned<String>>,
        known: &[&str],
        at: Range<usize>,
    ) -> Option<CredentialName> {
        let Some(entry) = entry else {
            self.report(at, ProblemKind::Missing("`mode = \"api-key\"` needs a `credential`"));
            return None;
        };
        if !known.contains(&entry.get_ref().as_str()) {
            let fault = match may_be_secret(entry.get_ref()) {
                true => ProblemKind::Missing(
                    "`credential` takes the name of a `[[credential]]`, never a secret itself",
                ),
                false => ProblemKind::Unknown { what: "credential", name: printable(entry.get_ref()) },
            };
            self.problems.error(self.source.masked_location(entry.span()), fault);
            return None;
        }
        CredentialName::parse(entry.get_ref()).ok()
    }

    fn read_issuer(&mut self, document: &IssuerDocument) -> IssuerSettings {
        document.name.iter().chain([&document.trust_domain]).for_each(|text| self.check_printable(text));
        for name in document.algorithms.iter().flatten() {
            if !ALGORITHMS.contains(&name.get_ref().as_str()) {
                self.report(
                    name.span(),
                    ProblemKind::Missing("unsupported algorithm: use `ES256`, `EdDSA` or `RS256`"),
                );
            }
        }
        if document.life_seconds.is_some_and(|life| !(1..=MAX_TOKEN_LIFE).contains(&life)) {
            let fault =
                ProblemKind::Limit { given: document.life_seconds.unwrap_or_default(), most: MAX_TOKEN_LIFE };
            self.report(document.trust_domain.span(), fault);
        }
        let texts =
            |list: &[Spanned<String>]| list.iter().map(|entry| entry.get_ref().clone()).collect::<Vec<_>>();
        IssuerSettings {
            name: document.name.as_ref().map(|name| name.get_ref().clone()),
            trust_domain: document.trust_domain.get_ref().clone(),
            keys: document.keys.get_ref().clone(),
            environments: self.parse_ids("environment", &document.environments, Environment::parse),
            tenants: self.parse_ids("tenant", &document.tenants, Tenant::parse),
            algorithms: document.algorithms.as_deref().map(texts),
            life_seconds: document.life_seconds,
        }
    }

    fn parse_ids<T>(
        &mut self,
        what: &'static str,
        list: &Option<Vec<Spanned<String>>>,
        parse: impl Fn(&str) -> Result<T, IdError>,
    ) -> Option<Vec<T>> {
        let mut ids = Vec::new();
        for entry in list.as_ref()? {
            match parse(entry.get_ref()) {
                Ok(id) => ids.push(id),
                Err(source) => {
                    let entry_text = printable(entry.get_ref());
                    self.report(entry.span(), ProblemKind::Word { what, entry: entry_text, source });
                }
            }
        }
        Some(ids)
    }

    fn check_printable(&mut self, entry: &Spanned<String>) {
        let text = entry.get_ref();
        let plain = text.bytes().all(|byte| byte.is_ascii_graphic());
        if !plain || !(1..=MAX_NAME).contains(&text.len()) {
            let why = "this must be 1 to 255 printable ASCII characters without spaces";
            self.report(entry.span(), ProblemKind::Missing(why));
        }
    }

    fn check_count(&mut self, what: &'static str, count: usize) {
        if count > MAX_ENTRIES {
            self.report(0..0, ProblemKind::TooMany { what, limit: MAX_ENTRIES });
        }
    }

    fn report(&mut self, span: Range<usize>, fault: ProblemKind) {
        self.problems.error(self.source.location(span), fault);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{SourceFile, read_configuration};

    fn is_accepted(text: &str) -> bool {
        let credential = "[[credential]]\nname = \"memory\"\nfile = \"memory.key\"\nhosts = [\"memory.corp.example:8443\"]\n\
                          [[credential]]\nname = \"elsewhere\"\nfile = \"memory.key\"\nhosts = [\"memory.corp.example\"]\n\
                          [[credential]]\nname = \"own\"\nfile = \"memory.key\"\nhosts = [\"*.corp.example:8443\"]\nform = { header = \"x-key\" }\n";
        let text = format!("{credential}{text}");
        read_configuration(&SourceFile { path: "sandbar.toml".into(), bytes: text.into_bytes() }).is_ok()
    }

    #[test]
    fn a_memory_service_sets_how_sandbar_authenticates() {
        let head = "[[memory_service]]\naudience = \"spiffe://a/memory\"\n";
        let host = "host = \"memory.corp.example:8443\"\n";
        let token = "mode = \"token\"\nkey = \"k.pem\"\nissuer = \"https://s\"\n";
        for (rest, expected) in [
            (format!("{host}mode = \"api-key\"\ncredential = \"memory\""), true),
            (format!("{host}mode = \"principal\"\nprincipal = \"x:{{tenant}}:{{sandbox}}\""), true),
            (format!("{host}{token}trust_domain = \"acme.example\""), true),
            (format!("{host}{token}"), false),
            (format!("{host}mode = \"api-key\""), false),
            (format!("{host}mode = \"api-key\"\ncredential = \"other\""), false),
            (format!("{host}mode = \"api-key\"\ncredential = \"elsewhere\""), false),
            (format!("{host}mode = \"api-key\"\ncredential = \"own\""), false),
            (format!("{host}mode = \"principal\"\ncredential = \"memory\""), false),
            (format!("{host}mode = \"principal\"\nprincipal = \"everybody\""), false),
            (format!("{host}mode = \"principal\"\nkey = \"k.pem\""), false),
            (format!("{host}{token}trust_domain = \"a\"\nprincipal = \"{{sandbox}}\""), false),
            (format!("{host}mode = \"open\""), false),
            ("host = \"*.corp.example\"\nmode = \"principal\"".to_owned(), false),
            ("host = \"10.0.0.1:443\"\nmode = \"principal\"".to_owned(), false),
        ] {
            assert_eq!(is_accepted(&format!("{head}{rest}")), expected, "{rest}");
        }
        let one = format!("{head}{host}mode = \"principal\"\n");
        assert!(!is_accepted(&format!("{one}{one}")), "one host, two services");
    }

    #[test]
    fn an_issuer_has_valid_settings() {
        let head = "[[identity.issuer]]\ntrust_domain = \"acme.example\"\nkeys = \"jwks.json\"\n";
        for (rest, expected) in [
            ("name = \"https://i\"", true),
            ("", true),
            ("environments = [\"staging\"]\nalgorithms = [\"RS256\", \"ES256\"]\nlife_seconds = 300", true),
            ("algorithms = [\"HS256\"]", false),
            ("environments = [\"a b\"]", false),
            ("tenants = [\"\"]", false),
            ("life_seconds = 3601", false),
            ("name = \"two words\"", false),
            ("secret = \"x\"", false),
        ] {
            assert_eq!(is_accepted(&format!("{head}{rest}")), expected, "{rest}");
        }
    }
}
