//! `PolicyProbe`: an attempt as users describe it (`https://host/path`), turned into the facts that the data path
//! would gather. `explain`, `[[test]]` and `diff` decide with it, so their answers match enforcement.

use crate::decision::{Decision, Permit, Treatment};
use crate::facts::{
    BankOperation, ConnectFacts, ConnectTarget, EchPresence, Facts, HttpMethod, HttpVersion, IdentityClaim,
    MemoryFacts, NameFacts, Protocol, QueryType, RequestAuthority, RequestFacts, TokenIdentity, UrlScheme,
};
use crate::ids::BankId;
use crate::name::{Host, NameError};
use crate::reason::Reason;
use crate::ruleset::RuleSet;
use crate::sandbox::SandboxRef;
use crate::treatment::{ConnectionTreatment, FirstBytes};

/// An attempt to test a policy with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyProbe {
    pub host: Host,
    pub port: u16,
    pub scheme: UrlScheme,
    /// Without method and path the probe is a connection only.
    pub method: Option<HttpMethod>,
    pub path: Option<String>,
    pub special: ProbeKind,
}

/// The kind of attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    /// TLS or HTTP, depending on the scheme.
    Connection,
    /// A DNS lookup.
    Lookup(QueryType),
    /// A memory request.
    Memory { operation: BankOperation, bank: BankId },
    /// Raw TCP.
    Raw,
}

/// Why a text is not a probe.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    #[error("`{host}` is not a host: {source}")]
    Host { host: String, source: NameError },
    #[error("unsupported scheme `{0}`: use http or https")]
    Scheme(String),
}

impl PolicyProbe {
    /// Parses `https://host[:port]/path`, `host[:port]` or `host[:port]/path`; ignores a query.
    ///
    /// # Errors
    ///
    /// Returns [`ProbeError`] if the host is invalid or the scheme is neither http nor https.
    pub fn parse(text: &str) -> Result<Self, ProbeError> {
        let (scheme, rest) = match text.split_once("://") {
            None => (UrlScheme::Https, text),
            Some(("https", rest)) => (UrlScheme::Https, rest),
            Some(("http", rest)) => (UrlScheme::Http, rest),
            Some((other, _)) => return Err(ProbeError::Scheme(other.to_owned())),
        };
        let (authority, path) = match rest.find('/') {
            None => (rest, None),
            Some(at) => rest.split_at_checked(at).map_or((rest, None), |(host, path)| (host, Some(path))),
        };
        let RequestAuthority { host, port } =
            RequestAuthority::parse_written(authority).map_err(|source| ProbeError::Host {
                host: crate::load::problem::printable(authority),
                source,
            })?;
        let path = path.and_then(|path| path.split(['?', '#']).next()).map(str::to_owned);
        let default = match scheme {
            UrlScheme::Http => 80,
            UrlScheme::Https => 443,
        };
        let port = port.unwrap_or(default);
        // Like a browser, treat `host:80` without a scheme as plain HTTP.
        let scheme = if port == 80 && !text.contains("://") { UrlScheme::Http } else { scheme };
        Ok(PolicyProbe { host, port, scheme, method: None, path, special: ProbeKind::Connection })
    }

    /// Returns the facts that the data path gathers step by step, to find rules that came close.
    pub fn facts(&self, sandbox: &SandboxRef) -> Vec<Facts> {
        match &self.special {
            ProbeKind::Connection if self.method.is_some() || self.path.is_some() => {
                vec![self.connect_facts(), Facts::Request(self.request_facts())]
            }
            ProbeKind::Connection | ProbeKind::Raw => vec![self.connect_facts()],
            ProbeKind::Lookup(query) => self.lookup_facts(*query).into_iter().collect(),
            ProbeKind::Memory { operation, bank } => {
                vec![self.connect_facts(), self.memory_facts(sandbox, *operation, bank)]
            }
        }
    }

    /// Decides every step that the data path would; returns the first denial, else the last permit.
    pub fn decide(&self, rules: &RuleSet, sandbox: &SandboxRef) -> Decision {
        if let ProbeKind::Lookup(query) = self.special {
            return match self.lookup_facts(query) {
                Some(facts) => rules.decide(sandbox, &facts),
                None => Decision::Deny(Box::new(rules.build_denial(Reason::NameMissing))),
            };
        }
        let target = ConnectTarget::Named(self.host.clone());
        let first = FirstBytes::Read(self.protocol());
        let connection = match rules.treatment(sandbox, &target, self.port, &first) {
            Err(denial) => return Decision::Deny(denial),
            // Nothing reads a request inside, so nothing decides it.
            Ok(ConnectionTreatment::Relay(permit)) => return Decision::Allow(permit),
            Ok(ConnectionTreatment::Intercept(permit)) => Decision::Allow(permit),
            // A plain request needs its connection permitted too.
            Ok(ConnectionTreatment::Detect | ConnectionTreatment::Requests) => {
                rules.decide(sandbox, &self.connect_facts())
            }
        };
        match &connection {
            Decision::Allow(permit) if self.continues_after(permit) => self
                .facts(sandbox)
                .get(1)
                .map_or_else(|| connection.clone(), |facts| rules.decide(sandbox, facts)),
            Decision::Allow(_) | Decision::Deny(_) => connection,
        }
    }

    /// Returns whether a request on the connection can be decided: one to a memory service only as its profile
    /// parses it.
    fn continues_after(&self, permit: &Permit) -> bool {
        match permit.treatment() {
            Treatment::Hold { .. } => self.special != ProbeKind::Connection,
            Treatment::Forward
            | Treatment::Intercept
            | Treatment::Raw
            | Treatment::Resolve
            | Treatment::Tunnel => true,
        }
    }

    fn lookup_facts(&self, query: QueryType) -> Option<Facts> {
        self.host.name().map(|name| Facts::Name(NameFacts { name: name.clone(), query }))
    }

    fn connect_facts(&self) -> Facts {
        Facts::Connect(ConnectFacts {
            target: ConnectTarget::Named(self.host.clone()),
            port: self.port,
            protocol: self.protocol(),
        })
    }

    /// Returns the protocol that the first bytes of the attempt show.
    fn protocol(&self) -> Protocol {
        let named = self.host.name().map(|_| self.host.clone());
        match (&self.special, self.scheme) {
            (ProbeKind::Raw, _) => Protocol::Raw,
            (_, UrlScheme::Http) => Protocol::Http { host: Some(self.host.clone()) },
            (_, UrlScheme::Https) => Protocol::Tls { sni: named, ech: EchPresence::Absent },
        }
    }

    fn request_facts(&self) -> RequestFacts {
        RequestFacts {
            connection: Some(self.host.clone()),
            authorities: vec![RequestAuthority { host: self.host.clone(), port: None }],
            port: self.port,
            scheme: self.scheme,
            version: HttpVersion::Http1,
            method: self.method.clone().unwrap_or_else(HttpMethod::get),
            path: self.path.clone().unwrap_or_else(|| "/".to_owned()),
        }
    }

    /// Returns a memory request with the sandbox's own identity, as determined by its channel.
    fn memory_facts(&self, sandbox: &SandboxRef, operation: BankOperation, bank: &BankId) -> Facts {
        let identity = match (&sandbox.tenant, &sandbox.environment) {
            (Some(tenant), Some(environment)) => IdentityClaim::Verified(TokenIdentity {
                sandbox: sandbox.id.clone(),
                tenant: tenant.clone(),
                environment: environment.clone(),
                generation: sandbox.generation,
            }),
            _ => IdentityClaim::Absent,
        };
        Facts::Memory(MemoryFacts {
            request: self.request_facts(),
            operation,
            banks: vec![bank.clone()],
            identity,
        })
    }
}

impl std::fmt::Display for PolicyProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (host, port) = (&self.host, self.port);
        match &self.special {
            ProbeKind::Lookup(query) => return write!(f, "DNS {query} {host}"),
            ProbeKind::Memory { operation, bank } => {
                return write!(f, "{} {bank} at {host}:{port}", operation.as_str());
            }
            ProbeKind::Raw => return write!(f, "TCP {host}:{port}"),
            ProbeKind::Connection => {}
        }
        if let Some(method) = &self.method {
            write!(f, "{method} ")?;
        }
        match (self.scheme, port) {
            (UrlScheme::Http, 80) => write!(f, "http://{host}")?,
            (UrlScheme::Http, port) => write!(f, "http://{host}:{port}")?,
            (UrlScheme::Https, 443) => write!(f, "https://{host}")?,
            (UrlScheme::Https, port) => write!(f, "https://{host}:{port}")?,
        }
        f.write_str(self.path.as_deref().unwrap_or(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_and_bare_hosts_parse_alike() {
        for (text, shown) in [
            ("github.com", Some("https://github.com")),
            ("GitHub.com:443", Some("https://github.com")),
            ("https://github.com/a/b?token=x#y", Some("https://github.com/a/b")),
            ("http://x.example", Some("http://x.example")),
            ("x.example:80", Some("http://x.example")),
            ("https://x.example:80", Some("https://x.example:80")),
            ("10.0.0.1:8443", Some("https://10.0.0.1:8443")),
            ("https://[::1]:8443/", Some("https://[::1]:8443/")),
            ("ftp://x.example", None),
            ("https://user@x.example", None),
            ("https:///x", None),
            ("", None),
            ("x.example:0", None),
        ] {
            assert_eq!(
                PolicyProbe::parse(text).ok().map(|probe| probe.to_string()).as_deref(),
                shown,
                "{text}"
            );
        }
    }
}
