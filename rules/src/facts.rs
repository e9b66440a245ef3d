//! What is known of an attempt. Entry points differ only in how they gather these facts; all ask the
//! same `decide` with them, and a permit keeps them so that it can be asked again.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use crate::ids::{BankId, Environment, SandboxId, Tenant};
use crate::name::{DomainName, Host, NameError, split_port};

/// Longest request method.
pub const MAX_METHOD: usize = 24;

/// One attempt to leave the sandbox, as far as it can be seen.
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

/// A connection: who it is for, and what it speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectFacts {
    pub target: ConnectTarget,
    pub port: u16,
    pub protocol: Protocol,
}

/// Where a connection says it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectTarget {
    /// The address a transparent connection was sent to; a hint, never trusted as a name.
    Dialled(IpAddr),
    /// Named by CONNECT, SOCKS or a synthetic address.
    Named(Host),
}

/// What the first bytes of a connection turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Protocol {
    Http { host: Option<Host> },
    Raw,
    Tls { sni: Option<Host>, ech: EchPresence },
}

/// Whether the TLS hello carries encrypted-client-hello data; grease cannot be told from the real thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EchPresence {
    Absent,
    Present,
}

/// One HTTP request on a connection that is intercepted or plain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFacts {
    /// The host the connection was decided for; none on a plain explicit proxy connection.
    pub connection: Option<Host>,
    /// Every authority the request itself names: absolute target, `Host`, `:authority`.
    pub authorities: Vec<RequestAuthority>,
    pub port: u16,
    pub scheme: UrlScheme,
    pub version: HttpVersion,
    pub method: HttpMethod,
    /// The path as sent, without the query: canonical only where a rule needs it to be.
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

/// A host with the port it was written with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestAuthority {
    pub host: Host,
    pub port: Option<u16>,
}

/// One request to a memory service, as its profile reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFacts {
    pub request: RequestFacts,
    pub operation: BankOperation,
    /// Every value of every bank selector; each must be allowed.
    pub banks: Vec<BankId>,
    pub identity: IdentityClaim,
}

/// What a memory request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BankOperation {
    /// Administration, and every route the profile does not know: always refused.
    Admin,
    Delete,
    /// Touches no bank: health and the like.
    None,
    Read,
    Write,
}

/// The signed identity a memory request carries, after `certs` has looked at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityClaim {
    Absent,
    /// Carried but not verified; the code of the failed check goes into the record.
    Invalid(&'static str),
    Verified(TokenIdentity),
}

/// Who a verified token names.
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

/// The text is not a request method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a method is a word in upper-case letters, such as `GET`")]
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

    /// The method of a plain look.
    pub fn get() -> Self {
        HttpMethod(Arc::from("GET"))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// TRACE mirrors injected headers and CONNECT opens a second tunnel: neither is ever forwarded.
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
    /// The word for it in policies, records and on the terminal.
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
}

impl QueryType {
    pub const A: QueryType = QueryType(1);
    pub const AAAA: QueryType = QueryType(28);
    pub const HTTPS: QueryType = QueryType(65);

    /// What every rule allows: addresses, and the record browsers ask for beside them.
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

    /// The types a policy can name; zone transfers, ANY and tunnel types are not among them.
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
