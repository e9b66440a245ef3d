//! Ids that users choose, each with its own type so that two cannot be confused.

use std::fmt;
use std::sync::Arc;

/// Longest id of a sandbox, tenant, environment, agent card, policy, credential or profile.
pub const MAX_ID: usize = 63;
/// Longest bank id, in line with memory services.
pub const MAX_BANK_ID: usize = 255;

/// Why a text is not an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    #[error("use only letters, digits, `.`, `_` and `-`")]
    Character,
    #[error("it is empty")]
    Empty,
    #[error("it must begin with a letter or digit")]
    First,
    #[error("it is too long")]
    TooLong,
}

// Allows the characters of a SPIFFE path segment, so that a signed identity can contain an id unescaped.
fn check_id(text: &str, extra: &[u8], max: usize) -> Result<(), IdError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte) || extra.contains(&byte);
    match text.as_bytes() {
        [] => Err(IdError::Empty),
        bytes if bytes.len() > max => Err(IdError::TooLong),
        bytes if !bytes.iter().all(|byte| plain(*byte)) => Err(IdError::Character),
        [first, ..] if !first.is_ascii_alphanumeric() => Err(IdError::First),
        _ => Ok(()),
    }
}

/// Defines id types with the same interface.
macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident($extra:expr, $max:expr);)*) => { $(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Parses an id. Ids are compared octet by octet, without normalisation.
            ///
            /// # Errors
            ///
            /// Returns [`IdError`] if the text is not a short plain word.
            pub fn parse(text: &str) -> Result<Self, IdError> {
                check_id(text, $extra, $max).map(|()| $name(Arc::from(text)))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )* };
}

ids! {
    /// The kind of agent that runs in a sandbox, for templates of principals.
    AgentCard(b"", MAX_ID);
    /// A memory bank; services also allow `:` and `@`.
    BankId(b":@", MAX_BANK_ID);
    /// The name of a credential in the configuration, never its value.
    CredentialName(b"", MAX_ID);
    /// The environment of a sandbox: staging, production, ...
    Environment(b"", MAX_ID);
    /// A policy's name.
    PolicyName(b"", MAX_ID);
    /// The protocol profile of a memory service.
    ProfileName(b"", MAX_ID);
    /// One sandbox.
    SandboxId(b"", MAX_ID);
    /// The owner of a sandbox.
    Tenant(b"", MAX_ID);
}

impl ProfileName {
    /// The profiles that the memory guard has.
    pub const BUILT_IN: [&str; 1] = ["astrocyte"];
}

impl BankId {
    /// Returns the environment before the first colon: `staging:team-a` belongs to `staging`.
    pub fn environment(&self) -> Option<Environment> {
        self.0.split_once(':').and_then(|(environment, _)| Environment::parse(environment).ok())
    }
}

/// The banks that a rule opens: one by name, or all with a prefix (`staging:shared-*`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BankPattern {
    Exact(BankId),
    Prefix(BankId),
}

impl BankPattern {
    /// Parses an entry of `recall`, `retain` or `forget`; `*` is allowed only at the end of a prefix.
    ///
    /// # Errors
    ///
    /// Returns [`IdError`], also for a bare `*`, which would match the banks of every environment.
    pub fn parse(text: &str) -> Result<Self, IdError> {
        match text.strip_suffix('*') {
            None => BankId::parse(text).map(BankPattern::Exact),
            Some(prefix) => BankId::parse(prefix).map(BankPattern::Prefix),
        }
    }

    pub fn matches(&self, bank: &BankId) -> bool {
        match self {
            BankPattern::Exact(name) => name == bank,
            BankPattern::Prefix(prefix) => bank.as_str().starts_with(prefix.as_str()),
        }
    }

    /// Returns the environment of the pattern's banks, if the pattern names it completely.
    pub fn environment(&self) -> Option<Environment> {
        match self {
            BankPattern::Exact(bank) | BankPattern::Prefix(bank) => bank.environment(),
        }
    }
}

impl fmt::Display for BankPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BankPattern::Exact(bank) => write!(f, "{bank}"),
            BankPattern::Prefix(prefix) => write!(f, "{prefix}*"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_plain_words() {
        for (text, good) in [
            ("build-7", true),
            ("a.b_c-D", true),
            ("", false),
            (".", false),
            ("..", false),
            ("-x", false),
            ("a b", false),
            ("a/b", false),
            ("a\n", false),
            ("sandbox-a\u{a0}", false),
            ("ｓandbox", false),
            ("a:b", false),
        ] {
            assert_eq!(SandboxId::parse(text).is_ok(), good, "{text:?}");
        }
        assert!(SandboxId::parse(&"a".repeat(MAX_ID)).is_ok());
        assert!(SandboxId::parse(&"a".repeat(MAX_ID + 1)).is_err());
    }

    #[test]
    fn banks_name_their_environment() {
        for (pattern, bank, matches) in [
            ("staging:team-a", "staging:team-a", true),
            ("staging:team-a", "staging:team-ab", false),
            ("staging:shared-*", "staging:shared-1", true),
            ("staging:shared-*", "staging:shared-", true),
            ("staging:shared-*", "prod:shared-1", false),
            ("staging:*", "staging:anything", true),
        ] {
            let (pattern, bank) = (BankPattern::parse(pattern).unwrap(), BankId::parse(bank).unwrap());
            assert_eq!(pattern.matches(&bank), matches, "{pattern} ~ {bank}");
        }
        for text in ["", "*", "a*b", "**", "a**", "bank\n", "bank a", ":a", "\u{202e}a"] {
            assert!(BankPattern::parse(text).is_err(), "{text:?}");
        }
        assert_eq!(BankId::parse("staging:a:b").unwrap().environment().unwrap().as_str(), "staging");
        assert_eq!(BankId::parse("bank-a").unwrap().environment(), None);
    }
}
