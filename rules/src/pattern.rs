//! `DomainPattern`: an exact name, or a wildcard as the whole first label; parsing, matching and comparing.
//!
//! `x.com` matches that name, `*.x.com` any depth below but not the apex, `.x.com` both, `*` every name.

use std::fmt;

use crate::name::{DomainName, MAX_NAME, NameError, is_normal_form, normalise_host, split_port};

/// A pattern of names, as written in a policy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DomainPattern {
    /// Every name.
    Any,
    Below(DomainName),
    Exact(DomainName),
    /// The name and everything below it.
    Tree(DomainName),
}

/// One entry of `hosts`: a pattern with an optional port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPattern {
    pub pattern: DomainPattern,
    pub port: Option<u16>,
}

/// Why a text is not a host pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("it has a scheme; write the host alone, such as `api.example.com`")]
    Scheme,
    #[error("`**` is not supported in a host; `*.{base}` already covers every depth")]
    TwoStars { base: String },
    #[error("it covers {covers}; set `dangerously_wide = true` in the rule if you mean it")]
    Wide { covers: String },
    #[error("a wildcard must be the whole first label, such as `*.example.com`")]
    Wildcard,
}

/// Whether a rule sets `dangerously_wide = true`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatternWidth {
    DangerouslyWide,
    Narrow,
}

/// The form of a pattern without its base name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PatternReach {
    Below,
    Exact,
    Tree,
}

impl HostPattern {
    /// Parses one entry of `hosts` or one line of a list.
    ///
    /// # Errors
    ///
    /// Returns [`PatternError`], also for a public suffix unless `width` allows it.
    pub fn parse(text: &str, width: PatternWidth) -> Result<Self, PatternError> {
        let raw = RawPattern::parse(text, width)?;
        Ok(HostPattern { pattern: raw.to_pattern()?, port: raw.port })
    }
}

impl DomainPattern {
    pub fn matches(&self, name: &DomainName) -> bool {
        match self {
            DomainPattern::Any => true,
            DomainPattern::Below(base) => name != base && name.is_within(base.as_str()),
            DomainPattern::Exact(base) => name == base,
            DomainPattern::Tree(base) => name.is_within(base.as_str()),
        }
    }

    /// Returns whether this pattern matches every name that `other` matches.
    pub fn covers(&self, other: &DomainPattern) -> bool {
        use DomainPattern::{Any, Below, Exact, Tree};
        match (self, other) {
            (Any, _) => true,
            (_, Any) => false,
            (_, Exact(name)) => self.matches(name),
            (Exact(_), Below(_) | Tree(_)) => false,
            (Below(base) | Tree(base), Below(name)) => name.is_within(base.as_str()),
            (Below(_) | Tree(_), Tree(name)) => self.matches(name),
        }
    }

    pub fn base(&self) -> Option<&DomainName> {
        match self {
            DomainPattern::Any => None,
            DomainPattern::Below(base) | DomainPattern::Exact(base) | DomainPattern::Tree(base) => Some(base),
        }
    }

    pub fn is_exact(&self) -> bool {
        matches!(self, DomainPattern::Exact(_))
    }

    /// Describes what the pattern covers; `check` prints it, because wildcard syntax differs between tools.
    pub fn describe(&self) -> String {
        match self {
            DomainPattern::Any => "every name".to_owned(),
            DomainPattern::Below(base) => format!("every name below {base}, not {base} itself"),
            DomainPattern::Exact(base) => format!("{base} only"),
            DomainPattern::Tree(base) => format!("{base} and every name below it"),
        }
    }
}

impl fmt::Display for DomainPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DomainPattern::Any => f.write_str("*"),
            DomainPattern::Below(base) => write!(f, "*.{base}"),
            DomainPattern::Exact(base) => write!(f, "{base}"),
            DomainPattern::Tree(base) => write!(f, ".{base}"),
        }
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            None => write!(f, "{}", self.pattern),
            Some(port) => write!(f, "{}:{port}", self.pattern),
        }
    }
}

/// A parsed pattern that borrows its text, so that a list of a million lines needs no allocation per line.
pub(crate) struct RawPattern<'a> {
    pub(crate) reach: PatternReach,
    /// The base name in normal form; empty for `*`.
    pub(crate) base: std::borrow::Cow<'a, str>,
    pub(crate) port: Option<u16>,
}

impl<'a> RawPattern<'a> {
    pub(crate) fn parse(text: &'a str, width: PatternWidth) -> Result<Self, PatternError> {
        match Self::parse_plain(text) {
            Some(plain) => plain.validate(width),
            None => Self::parse_strict(text, width),
        }
    }

    /// Parses a pattern without port in normal form, as on most lines of a list; `None` if in doubt.
    fn parse_plain(text: &'a str) -> Option<Self> {
        let (reach, base) = match (text.strip_prefix("*."), text.strip_prefix('.')) {
            (Some(base), _) => (PatternReach::Below, base),
            (None, Some(base)) => (PatternReach::Tree, base),
            (None, None) => (PatternReach::Exact, text),
        };
        is_normal_form(base).then_some(RawPattern { reach, base: base.into(), port: None })
    }

    fn parse_strict(text: &'a str, width: PatternWidth) -> Result<Self, PatternError> {
        if text.contains("://") {
            return Err(PatternError::Scheme);
        }
        let (host, port) = split_port(text)?;
        let (reach, base) = match host.strip_prefix("*.").or_else(|| host.strip_prefix('.')) {
            _ if host == "*" => return parse_any(port, width),
            Some(base) if host.starts_with('*') => (PatternReach::Below, base),
            Some(base) => (PatternReach::Tree, base),
            None => (PatternReach::Exact, host),
        };
        if let Some(base) = host.strip_prefix("**.") {
            return Err(PatternError::TwoStars { base: base.to_owned() });
        }
        if base.contains('*') {
            return Err(PatternError::Wildcard);
        }
        RawPattern { reach, base: normalise_host(base)?, port }.validate(width)
    }

    fn validate(self, width: PatternWidth) -> Result<Self, PatternError> {
        match width {
            PatternWidth::DangerouslyWide => {}
            PatternWidth::Narrow => check_width(self.reach, &self.base)?,
        }
        Ok(self)
    }

    fn to_pattern(&self) -> Result<DomainPattern, NameError> {
        if self.base.is_empty() {
            return Ok(DomainPattern::Any);
        }
        let base = DomainName::parse(&self.base)?;
        Ok(match self.reach {
            PatternReach::Below => DomainPattern::Below(base),
            PatternReach::Exact => DomainPattern::Exact(base),
            PatternReach::Tree => DomainPattern::Tree(base),
        })
    }
}

fn parse_any(port: Option<u16>, width: PatternWidth) -> Result<RawPattern<'static>, PatternError> {
    match width {
        PatternWidth::DangerouslyWide => Ok(RawPattern { reach: PatternReach::Tree, base: "".into(), port }),
        PatternWidth::Narrow => Err(PatternError::Wide { covers: "every name".to_owned() }),
    }
}

/// Rejects public suffixes: anyone can register a name below them and would get access.
///
/// A single label that is not on the public suffix list (`postgres`) is allowed as exact name, not as wildcard.
fn check_width(reach: PatternReach, base: &str) -> Result<(), PatternError> {
    let wide = match reach {
        PatternReach::Exact => is_public_suffix(base.as_bytes(), true),
        // The list has wildcards too (`*.compute.amazonaws.com`): every name right below such a base is a suffix.
        PatternReach::Below | PatternReach::Tree => {
            is_public_suffix(base.as_bytes(), false) || covers_public_suffixes(base)
        }
    };
    if !wide {
        return Ok(());
    }
    Err(PatternError::Wide {
        covers: format!("`{base}`, a public suffix under which anyone can register a name"),
    })
}

/// Returns whether every name right below `base` is a public suffix.
fn covers_public_suffixes(base: &str) -> bool {
    const ANY: &[u8] = b"any.";
    let mut name = [0; ANY.len() + MAX_NAME];
    let (front, rest) = name.split_at_mut(ANY.len());
    front.copy_from_slice(ANY);
    let Some(rest) = rest.get_mut(..base.len()) else { return false };
    rest.copy_from_slice(base.as_bytes());
    name.get(..ANY.len() + base.len()).is_some_and(|name| is_public_suffix(name, true))
}

/// Returns whether `name` is a public suffix. By default every unlisted single label is one; with `known` only
/// listed suffixes count.
fn is_public_suffix(name: &[u8], known: bool) -> bool {
    psl::suffix(name).is_some_and(|suffix| suffix.as_bytes() == name && (suffix.is_known() || !known))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pattern(text: &str) -> DomainPattern {
        HostPattern::parse(text, PatternWidth::DangerouslyWide).unwrap().pattern
    }

    #[test]
    fn p1_a_wildcard_above_public_suffixes_is_wide() {
        for (text, wide) in [
            ("*.compute.amazonaws.com", true), // the list has `*.compute.amazonaws.com`
            ("*.us-east-1.compute.amazonaws.com", true),
            ("*.host.us-east-1.compute.amazonaws.com", false),
            ("*.amazonaws.com", false),
        ] {
            let parsed = HostPattern::parse(text, PatternWidth::Narrow);
            assert_eq!(parsed.is_err(), wide, "{text}: {parsed:?}");
            assert!(HostPattern::parse(text, PatternWidth::DangerouslyWide).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_pattern_says_what_it_covers() {
        for (text, covers) in [
            ("*", "every name"),
            ("*.x.example", "every name below x.example, not x.example itself"),
            ("x.example", "x.example only"),
            (".x.example", "x.example and every name below it"),
        ] {
            let pattern = HostPattern::parse(text, PatternWidth::DangerouslyWide).unwrap();
            assert_eq!(pattern.pattern.describe(), covers, "{text}");
        }
    }

    #[test]
    fn the_three_forms_match_what_check_prints() {
        for (text, name, matches) in [
            ("x.com", "x.com", true),
            ("x.com", "a.x.com", false),
            ("*.x.com", "x.com", false),
            ("*.x.com", "a.x.com", true),
            ("*.x.com", "a.b.x.com", true),
            ("*.x.com", "notx.com", false),
            ("*.x.com", "x.com.evil.com", false),
            (".x.com", "x.com", true),
            (".x.com", "a.b.x.com", true),
            (".x.com", "notx.com", false),
            ("*", "anything.example", true),
            ("X.COM.", "x.com", true),
            ("*.bücher.example", "a.xn--bcher-kva.example", true),
        ] {
            let name = DomainName::parse(name).unwrap();
            assert_eq!(pattern(text).matches(&name), matches, "{text} ~ {name}");
        }
    }

    #[test]
    fn ports_belong_to_the_pattern() {
        let with = HostPattern::parse("*.x.com:8443", PatternWidth::Narrow).unwrap();
        assert_eq!((with.port, with.to_string().as_str()), (Some(8443), "*.x.com:8443"));
    }

    #[test]
    fn wide_and_malformed_patterns_are_refused() {
        for text in [
            "*",
            "com",
            "*.com",
            ".com",
            "github.io",
            "*.github.io",
            "*.s3.amazonaws.com",
            "*.compute.amazonaws.com",
            "*.compute-1.amazonaws.com",
            "*.kawasaki.jp",
            "co.uk",
            "*.internal",
            ".postgres",
        ] {
            let error = HostPattern::parse(text, PatternWidth::Narrow).unwrap_err();
            assert!(matches!(error, PatternError::Wide { .. }), "{text}: {error}");
            assert!(HostPattern::parse(text, PatternWidth::DangerouslyWide).is_ok(), "{text}");
        }
        for text in [
            "",
            "*.",
            "**.x.com",
            "a*.x.com",
            "*a.x.com",
            "a.*.com",
            "*.*.com",
            "x.com:",
            "x.com:99999",
            "https://x.com",
            "x.com/a",
            "[x.com]",
            "10.0.0.1",
            "*.0.0.1",
            "a b",
        ] {
            assert!(HostPattern::parse(text, PatternWidth::DangerouslyWide).is_err(), "{text}");
        }
        for text in ["postgres", "x.com", "*.x.co.uk", "*.bucket.s3.amazonaws.com", "*.svc.cluster.local"] {
            assert!(HostPattern::parse(text, PatternWidth::Narrow).is_ok(), "{text}");
        }
    }

    #[test]
    fn covering_follows_the_form() {
        for (wide, narrow, covers) in [
            ("*", "*.x.com", true),
            ("*.x.com", "*", false),
            ("*.x.com", "a.x.com", true),
            ("*.x.com", "x.com", false),
            ("*.x.com", ".x.com", false),
            ("*.x.com", "*.x.com", true),
            ("*.x.com", ".a.x.com", true),
            (".x.com", "*.x.com", true),
            ("x.com", "*.x.com", false),
            ("*.a.x.com", "*.x.com", false),
        ] {
            assert_eq!(pattern(wide).covers(&pattern(narrow)), covers, "{wide} over {narrow}");
        }
    }

    proptest! {
        #[test]
        fn printed_patterns_parse_back(text in "(\\*\\.|\\.)?[a-c]{1,2}(\\.[a-c]{1,2}){0,3}(:[1-9][0-9]{0,3})?") {
            let parsed = HostPattern::parse(&text, PatternWidth::DangerouslyWide).unwrap();
            prop_assert_eq!(HostPattern::parse(&parsed.to_string(), PatternWidth::DangerouslyWide), Ok(parsed));
        }

        #[test]
        fn covering_means_matching_whatever_the_other_matches(
            wide in "(\\*\\.|\\.)?[ab](\\.[ab]){0,2}", narrow in "(\\*\\.|\\.)?[ab](\\.[ab]){0,2}", name in "[ab](\\.[ab]){0,4}",
        ) {
            let (wide, narrow, name) = (pattern(&wide), pattern(&narrow), DomainName::parse(&name).unwrap());
            prop_assert!(!wide.covers(&narrow) || !narrow.matches(&name) || wide.matches(&name));
        }
    }
}
