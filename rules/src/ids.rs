//! The ids people give to things, each its own type, so that two cannot be swapped.

use std::fmt;
use std::sync::Arc;

/// Longest id of a sandbox, tenant, environment, agent card, policy, credential or profile.
pub const MAX_ID: usize = 63;
/// Longest bank id, as memory services have them.
pub const MAX_BANK_ID: usize = 255;

/// Why a text is not an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    #[error("it has a character other than letters, digits, `.`, `_` and `-`")]
    Character,
    #[error("it is empty")]
    Empty,
    #[error("it does not begin with a letter or a digit")]
    First,
    #[error("it is too long")]
    TooLong,
}

// The characters of a SPIFFE path segment, so that an id can stand in a signed identity as it is.
fn check_id(text: &str, extra: &[u8], longest: usize) -> Result<(), IdError> {
    let plain =
        |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte) || extra.contains(&byte);
    match text.as_bytes() {
        [] => Err(IdError::Empty),
        bytes if bytes.len() > longest => Err(IdError::TooLong),
        bytes if !bytes.iter().all(|byte| plain(*byte)) => Err(IdError::Character),
        [first, ..] if !first.is_ascii_alphanumeric() => Err(IdError::First),
        _ => Ok(()),
    }
}

/// Types of one shape: a macro says it once, and each still is a type of its own.
macro_rules! words {
    ($($(#[$doc:meta])* $name:ident($extra:expr, $longest:expr);)*) => { $(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Parses an id; ids are compared octet by octet, so there is nothing to normalise.
            ///
            /// # Errors
            ///
            /// Returns [`IdError`] for anything but a short plain word.
            pub fn parse(text: &str) -> Result<Self, IdError> {
                check_id(text, $extra, $longest).map(|()| $name(Arc::from(text)))
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

words! {
    /// The kind of agent that runs in a sandbox, for templates of principals.
    AgentCard(b"", MAX_ID);
    /// A memory bank. Services let `:` and `@` stand in it.
    BankId(b":@", MAX_BANK_ID);
    /// A credential's name in the operator's file; never its value.
    CredentialName(b"", MAX_ID);
    /// Where a sandbox belongs: staging, production, ...
    Environment(b"", MAX_ID);
    /// A policy's name.
    PolicyName(b"", MAX_ID);
    /// How a memory service is spoken to.
    ProfileName(b"", MAX_ID);
    /// One sandbox.
    SandboxId(b"", MAX_ID);
    /// Who owns a sandbox.
    Tenant(b"", MAX_ID);
}

impl BankId {
    /// The environment in front of the first colon: `staging:team-a` is a bank of `staging`.
    pub fn environment(&self) -> Option<Environment> {
        self.0.split_once(':').and_then(|(environment, _)| Environment::parse(environment).ok())
    }
}

/// Which banks a rule opens: one by name, or all that begin alike (`staging:shared-*`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BankPattern {
    Exact(BankId),
    Prefix(BankId),
}

impl BankPattern {
    /// Parses an entry of `recall`, `retain` or `forget`; `*` may only stand last, after something.
    ///
    /// # Errors
    ///
    /// Returns [`IdError`]; a bare `*` is refused, because it would name every environment's banks.
    pub fn parse(text: &str) -> Result<Self, IdError> {
        match text.strip_suffix('*') {
            None => BankId::parse(text).map(BankPattern::Exact),
            Some(prefix) => BankId::parse(prefix).map(BankPattern::Prefix),
        }
    }

    pub fn matches(&self, bank: &BankId) -> bool {
        match self {
            BankPattern::Exact(own) => own == bank,
            BankPattern::Prefix(prefix) => bank.as_str().starts_with(prefix.as_str()),
        }
    }

    /// The environment the pattern's banks are in, when it names one in full.
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
            let (pattern, bank) =
                (BankPattern::parse(pattern).unwrap(), BankId::parse(bank).unwrap());
            assert_eq!(pattern.matches(&bank), matches, "{pattern} ~ {bank}");
        }
        for text in ["", "*", "a*b", "**", "a**", "bank\n", "bank a", ":a", "\u{202e}a"] {
            assert!(BankPattern::parse(text).is_err(), "{text:?}");
        }
        assert_eq!(
            BankId::parse("staging:a:b").unwrap().environment().unwrap().as_str(),
            "staging"
        );
        assert_eq!(BankId::parse("bank-a").unwrap().environment(), None);
    }
}
