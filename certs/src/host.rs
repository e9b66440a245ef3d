//! [`HostName`]: what a certificate is for, in one normal form.
//!
//! A leaf is minted for one and an upstream is verified as one. Neither can be empty, so neither can be
//! left out.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use rustls_pki_types::{DnsName, ServerName};

/// RFC 1035, section 2.3.4, without the trailing dot.
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;
/// Longest text looked at: a Unicode name may be longer than its ASCII form.
const MAX_TEXT: usize = 1024;

/// A DNS name (lower case, A-labels, no trailing dot) or an address. Never empty.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct HostName {
    text: Arc<str>,
    server: ServerName<'static>,
}

/// Why a text is not a [`HostName`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostNameError {
    #[error("a host name has letters, digits, `-`, `_` and `.` only")]
    Character,
    #[error("a host name must not be empty")]
    Empty,
    #[error("a label of a host name is empty, longer than 63 or begins or ends with `-`")]
    Label,
    #[error("a host name is at most 253 characters long")]
    Long,
    #[error("the last label of a host name must not be a number; write addresses as addresses")]
    Numeric,
}

impl HostName {
    /// Parses a name or an address, bracketed or not, as it stands in a rule, an SNI or an authority.
    ///
    /// # Errors
    ///
    /// Wildcards, ports and user names are not part of a host name and are refused.
    pub fn parse(text: &str) -> Result<Self, HostNameError> {
        if text.len() > MAX_TEXT {
            return Err(HostNameError::Long);
        }
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        if let Ok(address) = bare.parse::<IpAddr>() {
            return Ok(address.into());
        }
        let name = ascii(text.strip_suffix('.').unwrap_or(text))?;
        check(&name)?;
        let server = DnsName::try_from(name.clone()).map_err(|_| HostNameError::Character)?;
        Ok(Self { text: name.into(), server: ServerName::DnsName(server) })
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The address, if this is one and not a name.
    pub fn address(&self) -> Option<IpAddr> {
        let ServerName::IpAddress(address) = &self.server else {
            return None;
        };
        Some((*address).into())
    }

    /// The form in which rustls takes it.
    pub fn server_name(&self) -> &ServerName<'static> {
        &self.server
    }
}

impl From<IpAddr> for HostName {
    fn from(address: IpAddr) -> Self {
        Self { text: address.to_string().into(), server: ServerName::IpAddress(address.into()) }
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

fn ascii(text: &str) -> Result<String, HostNameError> {
    if text.is_empty() {
        return Err(HostNameError::Empty);
    }
    idna::domain_to_ascii_cow(text.as_bytes(), idna::AsciiDenyList::URL)
        .map(|name| name.into_owned())
        .map_err(|_| HostNameError::Character)
}

fn check(name: &str) -> Result<(), HostNameError> {
    if name.is_empty() {
        return Err(HostNameError::Empty);
    }
    if name.len() > MAX_NAME {
        return Err(HostNameError::Long);
    }
    for label in name.split('.') {
        check_label(label)?;
    }
    match name.rsplit('.').next() {
        Some(last) if last.bytes().all(|byte| byte.is_ascii_digit()) => Err(HostNameError::Numeric),
        Some(_) | None => Ok(()),
    }
}

fn check_label(label: &str) -> Result<(), HostNameError> {
    if !label
        .bytes()
        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_')
    {
        return Err(HostNameError::Character);
    }
    let edge = label.starts_with('-') || label.ends_with('-');
    if label.is_empty() || label.len() > MAX_LABEL || edge {
        return Err(HostNameError::Label);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_normal_form() {
        for (text, expected) in [
            ("api.openai.com", Ok("api.openai.com")),
            ("API.OpenAI.com.", Ok("api.openai.com")),
            ("bücher.example", Ok("xn--bcher-kva.example")),
            ("BÜCHER.example", Ok("xn--bcher-kva.example")),
            ("xn--bcher-kva.example", Ok("xn--bcher-kva.example")),
            ("_dmarc.example", Ok("_dmarc.example")),
            ("localhost", Ok("localhost")),
            ("192.0.2.1", Ok("192.0.2.1")),
            ("[2001:DB8::1]", Ok("2001:db8::1")),
            ("2001:db8:0:0::1", Ok("2001:db8::1")),
            ("", Err(HostNameError::Empty)),
            (".", Err(HostNameError::Empty)),
            ("..", Err(HostNameError::Label)),
            ("a..b", Err(HostNameError::Label)),
            ("-a.example", Err(HostNameError::Label)),
            ("*.example", Err(HostNameError::Character)),
            ("a b.example", Err(HostNameError::Character)),
            ("a.example:443", Err(HostNameError::Character)),
            ("user@a.example", Err(HostNameError::Character)),
            ("a.example/x", Err(HostNameError::Character)),
            ("a\0.example", Err(HostNameError::Character)),
            ("a\u{202e}b.example", Err(HostNameError::Character)),
            ("192.0.2.256", Err(HostNameError::Numeric)),
            ("1.2.3", Err(HostNameError::Numeric)),
        ] {
            let found = HostName::parse(text);
            assert_eq!(
                found.as_ref().map(HostName::as_str),
                expected.as_ref().copied(),
                "{text:?}"
            );
        }
        assert_eq!(HostName::parse(&"a".repeat(2000)), Err(HostNameError::Long));
        assert_eq!(
            HostName::parse(&format!("{}.example", "a".repeat(64))),
            Err(HostNameError::Label)
        );
        assert_eq!(HostName::parse(&vec!["abc"; 64].join(".")), Err(HostNameError::Long));
    }

    proptest! {
        #[test]
        fn what_parses_is_a_name_to_rustls_and_parses_again(text in "\\PC{0,40}|[a-zA-Z0-9._-]{1,80}|[0-9a-f:.]{2,40}") {
            if let Ok(name) = HostName::parse(&text) {
                prop_assert_eq!(HostName::parse(name.as_str()), Ok(name.clone()));
                prop_assert_eq!(name.server_name().to_str(), name.as_str());
            }
        }
    }
}
