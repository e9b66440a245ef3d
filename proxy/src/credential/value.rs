//! The value of a credential, and how a request carries it.

use std::sync::Arc;

use ::http::HeaderValue;
use pingora_http::RequestHeader;
use rules::Reason;
use secrecy::{ExposeSecret, SecretString};
use zeroize::Zeroizing;

use crate::credential::scrub::EchoPatterns;
use crate::credential::store::CredentialError;
use crate::report::refusal::Refusal;

/// Shortest credential: a shorter one would occur by chance in responses.
pub(super) const SHORTEST: usize = 8;

/// Request fields that ask for a response the scrubber cannot search: partial content, or compression inside the
/// body.
const UNSEARCHABLE_FIELDS: [&str; 6] = [
    "a-im",
    "connect-accept-encoding",
    "grpc-accept-encoding",
    "if-range",
    "range",
    "sec-websocket-extensions",
];

/// A credential, and the forms in which an origin server may echo it.
pub(crate) struct CredentialValue {
    value: SecretString,
    echoes: Arc<EchoPatterns>,
}

impl CredentialValue {
    /// Parses one line of visible characters, without the line end that editors add.
    pub(super) fn parse(text: &str) -> Result<Self, CredentialError> {
        let value = text.strip_suffix('\n').unwrap_or(text);
        let value = value.strip_suffix('\r').unwrap_or(value);
        match value.bytes().all(|byte| byte.is_ascii_graphic()) {
            false => Err(CredentialError::Malformed),
            true if value.len() < SHORTEST => Err(CredentialError::Short),
            true => {
                let echoes = Arc::new(EchoPatterns::new(value));
                Ok(CredentialValue { value: SecretString::from(value), echoes })
            }
        }
    }

    /// Sets `Authorization`, replacing whatever the sandbox sent there.
    ///
    /// Also removes the fields that ask for compressed or partial responses, in which the scrubber could not find
    /// an echo.
    pub(crate) fn inject(&self, request: &mut RequestHeader) -> Result<(), Refusal> {
        request.remove_header("authorization");
        for name in UNSEARCHABLE_FIELDS {
            request.remove_header(name);
        }
        let text = Zeroizing::new(format!("Bearer {}", self.value.expose_secret()));
        let mut value = HeaderValue::from_str(&text).map_err(|_| Reason::CredentialUnavailable)?;
        value.set_sensitive(true); // keeps it out of HPACK's dynamic table
        let set = request.insert_header("Authorization", value);
        set.map_err(|_| Reason::CredentialUnavailable)?;
        let set = request.insert_header("Accept-Encoding", "identity");
        set.map_err(|_| Reason::CredentialUnavailable.into())
    }

    /// Returns the bare value, for a header field other than `Authorization`.
    pub(crate) fn header_value(&self) -> Result<HeaderValue, Refusal> {
        let value = HeaderValue::from_str(self.value.expose_secret());
        let mut value = value.map_err(|_| Reason::CredentialUnavailable)?;
        value.set_sensitive(true);
        Ok(value)
    }

    pub(super) fn expose(&self) -> &str {
        self.value.expose_secret()
    }

    pub(crate) fn echoes(&self) -> Arc<EchoPatterns> {
        self.echoes.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_is_one_line_that_a_header_can_carry() {
        for (text, good) in [
            ("sk-0123456789", true),
            ("sk-0123456789\n", true),
            ("sk-0123456789\r\n", true),
            ("sk-0123456789\n\n", false),
            ("sk-01234 56789", false),
            ("sk-0123\r\nX: y", false),
            ("sk-0123456789\0", false),
            ("short", false),
            ("", false),
        ] {
            assert_eq!(CredentialValue::parse(text).is_ok(), good, "{text:?}");
        }
    }

    #[test]
    fn p11_whatever_the_sandbox_sent_is_gone() {
        let credential = CredentialValue::parse("sk-0123456789").unwrap();
        let mut request = RequestHeader::build("GET", b"/", None).unwrap();
        for value in ["Bearer mine", "Basic bWluZQ=="] {
            request.append_header("aUTHORIZATION", value).unwrap();
        }
        for name in UNSEARCHABLE_FIELDS.into_iter().chain(["Accept-Encoding"]) {
            request.append_header(name, "bytes=0-7").unwrap();
        }
        credential.inject(&mut request).unwrap();
        let sent: Vec<_> = request.headers.get_all("authorization").iter().collect();
        assert_eq!(sent.len(), 1);
        assert_eq!(sent[0].as_bytes(), b"Bearer sk-0123456789");
        assert!(sent[0].is_sensitive());
        let mut rest: Vec<_> = request.headers.keys().map(|name| name.as_str()).collect();
        rest.sort_unstable();
        assert_eq!(rest, ["accept-encoding", "authorization"]);
        assert_eq!(request.headers["accept-encoding"], "identity");
    }
}
