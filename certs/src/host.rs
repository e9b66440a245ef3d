//! [`HostName`]: the subject of a certificate, in one normal form.
//!
//! Leaves are minted for a `HostName` and upstreams are verified against one. It cannot be empty, so
//! neither step can be skipped by leaving the name out.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use rules::name::NameError;
use rules::{DomainName, Host};
use rustls_pki_types::{DnsName, ServerName};

/// Longest text to parse: a Unicode name may be longer than its ASCII form.
const MAX_TEXT: usize = 1024;

/// A DNS name in the normal form of [`DomainName`], or an address. Never empty.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct HostName {
    text: Arc<str>,
    server: ServerName<'static>,
}

/// Why a text is not a [`HostName`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostNameError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("TLS cannot represent this name")]
    Unspeakable,
}

impl HostName {
    /// Parses a name or an address, bracketed or not, as found in a rule, an SNI or an authority.
    ///
    /// # Errors
    ///
    /// Wildcards, ports and user names are not part of a host name and are refused.
    pub fn parse(text: &str) -> Result<Self, HostNameError> {
        if text.len() > MAX_TEXT {
            return Err(NameError::TooLong.into());
        }
        match text.parse::<IpAddr>() {
            Ok(address) => Ok(address.into()),
            Err(_) => Host::parse_written(text)?.try_into(),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the address, if this is one and not a name.
    pub fn address(&self) -> Option<IpAddr> {
        let ServerName::IpAddress(address) = &self.server else {
            return None;
        };
        Some((*address).into())
    }

    /// Returns the form that rustls takes.
    pub fn server_name(&self) -> &ServerName<'static> {
        &self.server
    }
}

/// Converts IPv4-mapped IPv6 to IPv4, as the decision does.
impl From<IpAddr> for HostName {
    fn from(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Self { text: address.to_string().into(), server: ServerName::IpAddress(address.into()) }
    }
}

/// Converts the decided host.
impl TryFrom<Host> for HostName {
    type Error = HostNameError;

    fn try_from(host: Host) -> Result<Self, HostNameError> {
        match host {
            Host::Address(address) => Ok(address.into()),
            Host::Name(name) => (&name).try_into(),
        }
    }
}

impl TryFrom<&DomainName> for HostName {
    type Error = HostNameError;

    fn try_from(name: &DomainName) -> Result<Self, HostNameError> {
        let server = DnsName::try_from(name.as_str().to_owned());
        let server = server.map_err(|_| HostNameError::Unspeakable)?;
        Ok(Self { text: name.as_str().into(), server: ServerName::DnsName(server) })
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl fmt::Debug for HostName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.text, formatter)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_normal_form() {
        for (text, expected) in [
            ("api.openai.com", Some("api.openai.com")),
            ("API.OpenAI.com.", Some("api.openai.com")),
            ("bücher.example", Some("xn--bcher-kva.example")),
            ("BÜCHER.example", Some("xn--bcher-kva.example")),
            ("xn--bcher-kva.example", Some("xn--bcher-kva.example")),
            ("localhost", Some("localhost")),
            ("192.0.2.1", Some("192.0.2.1")),
            ("[2001:DB8::1]", Some("2001:db8::1")),
            ("2001:db8:0:0::1", Some("2001:db8::1")),
            ("::ffff:10.1.2.3", Some("10.1.2.3")),
            ("[::ffff:a01:203]", Some("10.1.2.3")),
            ("", None),
            (".", None),
            ("..", None),
            ("a..b", None),
            ("-a.example", None),
            ("_dmarc.example", None),
            ("*.example", None),
            ("a b.example", None),
            ("a.example:443", None),
            ("user@a.example", None),
            ("a.example/x", None),
            ("a\0.example", None),
            ("a\u{202e}b.example", None),
            ("192.0.2.256", None),
            ("1.2.3", None),
            ("0x7f000001", None),
            ("a.0x7f", None),
            ("[1.2.3.4]", None),
            ("github\u{3002}com", None),
            ("ｇithub.com", None),
        ] {
            let found = HostName::parse(text).ok();
            assert_eq!(found.as_ref().map(HostName::as_str), expected, "{text:?}");
        }
        for long in ["a".repeat(2000), format!("{}.example", "a".repeat(64)), vec!["abc"; 64].join(".")] {
            assert!(HostName::parse(&long).is_err(), "{}", long.len());
        }
    }

    proptest! {
        #[test]
        fn what_parses_is_a_name_to_rustls_and_to_the_rules(text in "\\PC{0,40}|[a-zA-Z0-9._-]{1,80}|[0-9a-f:.]{2,40}") {
            if let Ok(name) = HostName::parse(&text) {
                prop_assert_eq!(HostName::parse(name.as_str()), Ok(name.clone()));
                prop_assert_eq!(name.server_name().to_str(), name.as_str());
                if name.address().is_none() {
                    let decided = DomainName::parse(&text).unwrap();
                    prop_assert_eq!(decided.as_str(), name.as_str());
                }
            }
        }
    }
}
