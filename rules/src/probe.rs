//! A `Probe`: one attempt as a person would describe it (`https://host/path`), turned into the facts
//! the data path would gather. `explain`, `[[test]]` and `diff` ask with it, so they ask what is enforced.

use crate::decision::{Decision, How};
use crate::facts::{
    Authority, ConnectFacts, Ech, Facts, HttpVersion, Identity, IdentityClaim, MemoryFacts, Method,
    NameFacts, Operation, Protocol, QueryType, RequestFacts, Scheme, Target,
};
use crate::name::{Host, NameError};
use crate::reason::Reason;
use crate::ruleset::RuleSet;
use crate::sandbox::SandboxRef;
use crate::word::BankId;

/// An attempt to try a policy with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    pub host: Host,
    pub port: u16,
    pub scheme: Scheme,
    /// Without method and path only the connection is tried.
    pub method: Option<Method>,
    pub path: Option<String>,
    pub special: Special,
}

/// What is tried in place of an ordinary connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Special {
    /// Nothing special: TLS or HTTP, as the scheme says.
    Connection,
    /// A DNS look-up alone.
    Lookup(QueryType),
    /// A memory request.
    Memory { operation: Operation, bank: BankId },
    /// Raw TCP.
    Raw,
}

/// Why a text is not something to try.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    #[error("`{host}` is not a host: {source}")]
    Host { host: String, source: NameError },
    #[error("only http and https can be tried, not `{0}`")]
    Scheme(String),
}

impl Probe {
    /// Parses `https://host[:port]/path`, `host[:port]` or `host[:port]/path`; a query is left out.
    ///
    /// # Errors
    ///
    /// Returns [`ProbeError`] when the host is not one, or the scheme is neither http nor https.
    pub fn parse(text: &str) -> Result<Self, ProbeError> {
        let (scheme, rest) = match text.split_once("://") {
            None => (Scheme::Https, text),
            Some(("https", rest)) => (Scheme::Https, rest),
            Some(("http", rest)) => (Scheme::Http, rest),
            Some((other, _)) => return Err(ProbeError::Scheme(other.to_owned())),
        };
        let (authority, path) = match rest.find('/') {
            None => (rest, None),
            Some(at) => {
                rest.split_at_checked(at).map_or((rest, None), |(host, path)| (host, Some(path)))
            }
        };
        let Authority { host, port } = Authority::parse(authority).map_err(|source| {
            ProbeError::Host { host: crate::load::problem::printable(authority), source }
        })?;
        let path = path.and_then(|path| path.split(['?', '#']).next()).map(str::to_owned);
        let default = match scheme {
            Scheme::Http => 80,
            Scheme::Https => 443,
        };
        let port = port.unwrap_or(default);
        // `host:80` without a scheme means what a browser would make of it.
        let scheme = if port == 80 && !text.contains("://") { Scheme::Http } else { scheme };
        Ok(Probe { host, port, scheme, method: None, path, special: Special::Connection })
    }

    /// The facts of each step, in the order the data path would gather them.
    pub fn facts(&self, sandbox: &SandboxRef) -> Vec<Facts> {
        match &self.special {
            Special::Connection if self.method.is_some() || self.path.is_some() => {
                vec![self.connect(), Facts::Request(self.request())]
            }
            Special::Connection | Special::Raw => vec![self.connect()],
            Special::Lookup(query) => self.lookup(*query).into_iter().collect(),
            Special::Memory { operation, bank } => {
                vec![self.connect(), self.memory(sandbox, *operation, bank)]
            }
        }
    }

    /// Decides every step; the first refusal is the answer, else the last permit.
    pub fn decide(&self, rules: &RuleSet, sandbox: &SandboxRef) -> Decision {
        let mut answer = Decision::Deny(Box::new(rules.plain(Reason::NameMissing)));
        for facts in self.facts(sandbox) {
            answer = rules.decide(sandbox, &facts);
            if !self.goes_on(&answer) {
                break;
            }
        }
        answer
    }

    /// Whether another step would be asked: nothing is after a refusal, nor where bytes pass unseen, and what
    /// a plain request to a memory service says is for its profile to read.
    fn goes_on(&self, answer: &Decision) -> bool {
        match answer {
            Decision::Deny(_) => false,
            Decision::Allow(permit) => match permit.how() {
                How::Raw | How::Tunnel => false,
                How::Hold { .. } => self.special != Special::Connection,
                How::Forward | How::Intercept | How::Resolve => true,
            },
        }
    }

    fn lookup(&self, query: QueryType) -> Option<Facts> {
        self.host.name().map(|name| Facts::Name(NameFacts { name: name.clone(), query }))
    }

    fn connect(&self) -> Facts {
        let named = self.host.name().map(|_| self.host.clone());
        let protocol = match (&self.special, self.scheme) {
            (Special::Raw, _) => Protocol::Raw,
            (_, Scheme::Http) => Protocol::Http { host: Some(self.host.clone()) },
            (_, Scheme::Https) => Protocol::Tls { sni: named, ech: Ech::Absent },
        };
        Facts::Connect(ConnectFacts {
            target: Target::Named(self.host.clone()),
            port: self.port,
            protocol,
        })
    }

    fn request(&self) -> RequestFacts {
        RequestFacts {
            connection: Some(self.host.clone()),
            authorities: vec![Authority { host: self.host.clone(), port: None }],
            port: self.port,
            scheme: self.scheme,
            version: HttpVersion::Http1,
            method: self.method.clone().unwrap_or_else(Method::get),
            path: self.path.clone().unwrap_or_else(|| "/".to_owned()),
        }
    }

    /// A memory request with the sandbox's own identity: whose it is, the path says.
    fn memory(&self, sandbox: &SandboxRef, operation: Operation, bank: &BankId) -> Facts {
        let identity = match (&sandbox.tenant, &sandbox.environment) {
            (Some(tenant), Some(environment)) => IdentityClaim::Verified(Identity {
                sandbox: sandbox.id.clone(),
                tenant: tenant.clone(),
                environment: environment.clone(),
                generation: sandbox.generation,
            }),
            _ => IdentityClaim::Absent,
        };
        Facts::Memory(MemoryFacts {
            request: self.request(),
            operation,
            banks: vec![bank.clone()],
            identity,
        })
    }
}

impl std::fmt::Display for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (host, port) = (&self.host, self.port);
        match &self.special {
            Special::Lookup(query) => return write!(f, "DNS {query} {host}"),
            Special::Memory { operation, bank } => {
                return write!(f, "{} {bank} at {host}:{port}", operation.word());
            }
            Special::Raw => return write!(f, "TCP {host}:{port}"),
            Special::Connection => {}
        }
        if let Some(method) = &self.method {
            write!(f, "{method} ")?;
        }
        match (self.scheme, port) {
            (Scheme::Http, 80) => write!(f, "http://{host}")?,
            (Scheme::Http, port) => write!(f, "http://{host}:{port}")?,
            (Scheme::Https, 443) => write!(f, "https://{host}")?,
            (Scheme::Https, port) => write!(f, "https://{host}:{port}")?,
        }
        f.write_str(self.path.as_deref().unwrap_or(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_and_bare_hosts_are_read_alike() {
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
                Probe::parse(text).ok().map(|probe| probe.to_string()).as_deref(),
                shown,
                "{text}"
            );
        }
    }
}
