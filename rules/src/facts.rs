//! The facts of an attempt. Entry points differ only in how they gather facts; all pass them to the same
//! `decide`, and a permit stores them so that the attempt can be decided again after a reload.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use crate::ids::{BankId, Environment, SandboxId, Tenant};
use crate::name::{DomainName, Host, NameError, split_port};

/// Longest request method.
pub const MAX_METHOD: usize = 24;

/// Everything visible about one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Facts {
    Connect(ConnectFacts),
    Memory(MemoryFacts),
    Name(NameFacts),
    Request(RequestFacts),
}

/// A DNS question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameFacts {
    pub name: DomainName,
    pub query: QueryType,
}

/// A DNS query type, by its number (RFC 1035, 3.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueryType(pub u16);

/// A connection: its target and its protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectFacts {
    pub target: ConnectTarget,
    pub port: u16,
    pub protocol: Protocol,
}

/// The target of a connection, as the client named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectTarget {
    /// The original destination of a transparent connection; Sandbar never trusts it as a name.
    Dialled(IpAddr),
    /// The host from CONNECT, SOCKS or a synthetic address.
    Named(Host),
}

/// The protocol detected from the first bytes of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Protocol {
    Http { host: Option<Host> },
    Raw,
    Tls { sni: Option<Host>, ech: EchPresence },
}

/// Whether the ClientHello carries an ECH extension; GREASE ECH is indistinguishable from real ECH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EchPresence {
    Absent,
    Present,
}

/// One HTTP request on an intercepted or plain connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFacts {
    /// The host of the connection's permit; `None` on a plain explicit proxy connection.
    pub connection: Option<Host>,
    /// Every authority the request itself names: absolute target, `Host`, `:authority`.
    pub authorities: Vec<RequestAuthority>,
    pub port: u16,
    pub scheme: UrlScheme,
    pub version: HttpVersion,
    pub method: HttpMethod,
    /// The path as sent, without the query; made canonical only if a rule matches on paths.
    pub path: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpVersion {
    Http1,
    Http2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UrlScheme {
    Http,
    Https,
}

/// A host with its port, if written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestAuthority {
    pub host: Host,
    pub port: Option<u16>,
}

/// One request to a memory service, as parsed by its profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFacts {
    pub request: RequestFacts,
    pub operation: BankOperation,
    /// Every value of every bank selector; the rule must allow each.
    pub banks: Vec<BankId>,
    pub identity: IdentityClaim,
}

/// The operation of a memory request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BankOperation {
    /// Administration, or a route unknown to the profile; always refused.
    Admin,
    Delete,
    /// Touches no bank, such as a health check.
    None,
    Read,
    Write,
}

/// The signed identity of a memory request, after verification by `certs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityClaim {
    Absent,
    /// Failed verification; the record carries the code of the failed check.
    Invalid(&'static str),
    /// The channel's own sandbox is revoked, whatever token it shows or leaves out.
    Revoked,
    Verified(TokenIdentity),
}

/// The claims of a verified token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenIdentity {
    pub sandbox: SandboxId,
    pub tenant: Tenant,
    pub environment: Environment,
    pub generation: Option<u64>,
}

/// A request method: upper-case letters and hyphens, compared octet by octet (RFC 9110, 9.1).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HttpMethod(Arc<str>);

/// Error for a text that is not a request method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a method is an upper-case word, such as `GET`")]
pub struct MethodError;

impl HttpMethod {
    /// Parses a request method.
    ///
    /// # Errors
    ///
    /// Returns [`MethodError`] for lower case too: servers differ on whether `get` is `GET`.
    pub fn parse(text: &str) -> Result<Self, MethodError> {
        let plain = text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-');
        match text.len() {
            1..=MAX_METHOD if plain => Ok(HttpMethod(Arc::from(text))),
            _ => Err(MethodError),
        }
    }

    /// Returns `GET`.
    pub fn get() -> Self {
        HttpMethod(Arc::from("GET"))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether Sandbar may forward the method: TRACE reflects injected headers, and CONNECT opens a second
    /// tunnel.
    pub fn is_forwardable(&self) -> bool {
        !matches!(self.as_str(), "CONNECT" | "TRACE")
    }
}

impl fmt::Display for HttpMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl BankOperation {
    /// Returns the word for it in policies, records and command output.
    pub fn as_str(self) -> &'static str {
        match self {
            BankOperation::Admin => "administer",
            BankOperation::Delete => "forget",
            BankOperation::None => "none",
            BankOperation::Read => "recall",
            BankOperation::Write => "retain",
        }
    }
}

impl RequestAuthority {
    /// Parses `host`, `host:port`, or the bracketed form of an IPv6 address.
    ///
    /// # Errors
    ///
    /// Returns [`NameError`]; userinfo is refused like any other stray character.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let (host, port) = split_port(text)?;
        Ok(RequestAuthority { host: Host::parse(host)?, port })
    }

    /// The same for text that people write: a Unicode name becomes A-labels.
    ///
    /// # Errors
    ///
    /// As [`RequestAuthority::parse`].
    pub fn parse_written(text: &str) -> Result<Self, NameError> {
        let (host, port) = split_port(text)?;
        Ok(RequestAuthority { host: Host::parse_written(host)?, port })
    }
}

impl QueryType {
    pub const A: QueryType = QueryType(1);
    pub const AAAA: QueryType = QueryType(28);
    pub const HTTPS: QueryType = QueryType(65);

    /// The types that every rule allows by default: addresses, and the HTTPS record that browsers query with them.
    pub const DEFAULT: [QueryType; 3] = [Self::A, Self::AAAA, Self::HTTPS];

    const NAMES: [(&str, u16); 9] = [
        ("A", 1),
        ("AAAA", 28),
        ("CAA", 257),
        ("CNAME", 5),
        ("HTTPS", 65),
        ("MX", 15),
        ("SRV", 33),
        ("SVCB", 64),
        ("TXT", 16),
    ];

    /// Returns the types that a policy can allow; they exclude zone transfers, ANY and types used for tunnels.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::NAMES.iter().map(|(name, _)| *name)
    }

    pub fn by_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| QueryType(*number))
    }
}

impl fmt::Display for QueryType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(_, number)| *number == self.0) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "TYPE{}", self.0), // RFC 3597, section 5
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_upper_case_words() {
        for (text, good) in [
            ("GET", true),
            ("M-SEARCH", true),
            ("", false),
            ("get", false),
            ("Get", false),
            ("GET ", false),
            ("GET\r\n", false),
            ("GÉT", false),
            ("A_B", false),
            ("AAAAAAAAAAAAAAAAAAAAAAAAA", false),
        ] {
            assert_eq!(HttpMethod::parse(text).is_ok(), good, "{text:?}");
        }
    }

    #[test]
    fn authorities_have_no_userinfo_and_one_port() {
        for (text, good) in [
            ("x.com", true),
            ("x.com:443", true),
            ("[::1]:443", true),
            ("user@x.com", false),
            ("x.com:443:443", false),
            ("x.com:", false),
            ("[x.com]:443", false),
            ("", false),
        ] {
            assert_eq!(RequestAuthority::parse(text).is_ok(), good, "{text:?}");
        }
    }
}
