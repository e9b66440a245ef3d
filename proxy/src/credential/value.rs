//! The value of a credential, and how a request carries it.

use ::http::HeaderValue;
use rules::Reason;
use secrecy::{ExposeSecret, SecretString};

use crate::credential::error::CredentialError;
use crate::report::refusal::Refusal;

/// Shortest credential: a shorter one would occur by chance in responses.
pub(super) const SHORTEST: usize = 8;
/// Shortest secret of a source that is searched for.
const SHORTEST_HIDDEN: usize = 16;

/// The value of a credential.
pub(crate) struct CredentialValue {
    content: CredentialContent,
    /// What was shown to its source, such as a client's secret: no answer may contain it either.
    hidden: Vec<SecretString>,
}

/// What a credential consists of.
enum CredentialContent {
    /// What a request carries as it is.
    Text(SecretString),
    /// What a request is signed with.
    Aws(AwsKeys),
}

/// Keys of AWS.
pub(crate) struct AwsKeys {
    pub(crate) id: String,
    pub(crate) secret: SecretString,
    pub(crate) session_token: Option<SecretString>,
}

impl CredentialValue {
    /// Parses one line of visible characters, without the line end that editors add.
    pub(super) fn parse(text: &str) -> Result<Self, CredentialError> {
        let value = text.strip_suffix('\n').unwrap_or(text);
        let value = value.strip_suffix('\r').unwrap_or(value);
        check_secret(value)?;
        Ok(CredentialValue {
            content: CredentialContent::Text(SecretString::from(value)),
            hidden: Vec::new(),
        })
    }

    /// Takes keys of AWS, each a line of visible characters.
    pub(super) fn from_aws_keys(keys: AwsKeys) -> Result<Self, CredentialError> {
        check_secret(&keys.id)?;
        check_secret(keys.secret.expose_secret())?;
        keys.session_token.as_ref().map_or(Ok(()), |token| check_secret(token.expose_secret()))?;
        Ok(CredentialValue { content: CredentialContent::Aws(keys), hidden: Vec::new() })
    }

    /// Adds secrets of its source that must not reach the sandbox. Short ones would occur by chance.
    pub(super) fn hide(&mut self, secrets: impl IntoIterator<Item = SecretString>) {
        let long = secrets.into_iter().filter(|secret| secret.expose_secret().len() >= SHORTEST_HIDDEN);
        self.hidden.extend(long);
    }

    /// Returns what a request carries as it is; `None` if requests are signed with it.
    pub(crate) fn text(&self) -> Option<&str> {
        match &self.content {
            CredentialContent::Text(text) => Some(text.expose_secret()),
            CredentialContent::Aws(_) => None,
        }
    }

    /// Returns the keys that requests are signed with.
    pub(crate) fn aws_keys(&self) -> Option<&AwsKeys> {
        match &self.content {
            CredentialContent::Text(_) => None,
            CredentialContent::Aws(keys) => Some(keys),
        }
    }

    /// Returns every part that must not reach the sandbox.
    pub(crate) fn secrets(&self) -> impl Iterator<Item = &str> {
        let (first, second) = match &self.content {
            CredentialContent::Text(text) => (text, None),
            CredentialContent::Aws(keys) => (&keys.secret, keys.session_token.as_ref()),
        };
        [Some(first), second].into_iter().flatten().chain(&self.hidden).map(ExposeSecret::expose_secret)
    }

    /// Returns the bare value, for a header field other than `Authorization`.
    pub(crate) fn header_value(&self) -> Result<HeaderValue, Refusal> {
        let text = self.text().ok_or(Reason::CredentialUnavailable)?;
        let mut value = HeaderValue::from_str(text).map_err(|_| Reason::CredentialUnavailable)?;
        value.set_sensitive(true);
        Ok(value)
    }
}

fn check_secret(value: &str) -> Result<(), CredentialError> {
    match value.bytes().all(|byte| byte.is_ascii_graphic()) {
        false => Err(CredentialError::Malformed),
        true if value.is_empty() => Err(CredentialError::Empty),
        true if value.len() < SHORTEST => Err(CredentialError::Short),
        true => Ok(()),
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
}
