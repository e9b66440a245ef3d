//! What a policy says about signals: off, flag or deny for each kind, and who may receive text of memory banks.

use std::fmt;

use super::shape::{ShapeThresholds, ThresholdSettings};
use super::{SignalCode, SignalMode, SignalPlace};
use crate::ids::{BankId, BankPattern};

/// A kind of signal, one per key of `[signals]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SignalKind {
    Body,
    Canaries,
    Headers,
    MemoryFlow,
    Secrets,
    Url,
}

impl SignalKind {
    pub const ALL: [SignalKind; 6] = [
        SignalKind::Body,
        SignalKind::Canaries,
        SignalKind::Headers,
        SignalKind::MemoryFlow,
        SignalKind::Secrets,
        SignalKind::Url,
    ];

    pub fn key(self) -> &'static str {
        match self {
            SignalKind::Body => "body",
            SignalKind::Canaries => "canaries",
            SignalKind::Headers => "headers",
            SignalKind::MemoryFlow => "memory_flow",
            SignalKind::Secrets => "secrets",
            SignalKind::Url => "url",
        }
    }

    /// Returns the kind whose key decides about a signal; `None` for one that is always denied.
    pub fn of(code: SignalCode, place: &SignalPlace) -> Option<Self> {
        let by_place = match place {
            SignalPlace::Method | SignalPlace::Path | SignalPlace::Query | SignalPlace::HostName => {
                SignalKind::Url
            }
            SignalPlace::Attempt
            | SignalPlace::FieldName
            | SignalPlace::Field(_)
            | SignalPlace::Cookie(_) => SignalKind::Headers,
            SignalPlace::Body => SignalKind::Body,
        };
        match code {
            SignalCode::CanaryUsed => Some(SignalKind::Canaries),
            SignalCode::CredentialLeaving | SignalCode::PlaceholderMisused => None,
            SignalCode::MemoryFlow => Some(SignalKind::MemoryFlow),
            SignalCode::SecretFound => Some(SignalKind::Secrets),
            SignalCode::FieldNovelty
            | SignalCode::HeaderBits
            | SignalCode::ManyFields
            | SignalCode::UserAgentChanged => Some(SignalKind::Headers),
            SignalCode::Sequence | SignalCode::UrlNovelty => Some(SignalKind::Url),
            SignalCode::Beacon | SignalCode::UploadRatio => Some(SignalKind::Body),
            SignalCode::ContentUnsearched | SignalCode::Drip | SignalCode::EncodedRun => Some(by_place),
        }
    }

    /// What happens if no policy says anything.
    fn default_mode(self) -> SignalMode {
        match self {
            SignalKind::Canaries => SignalMode::Deny,
            SignalKind::Body
            | SignalKind::Headers
            | SignalKind::MemoryFlow
            | SignalKind::Secrets
            | SignalKind::Url => SignalMode::Flag,
        }
    }
}

/// The `[signals]` of one policy or rule: what it sets, and nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SignalSettings {
    modes: [Option<SignalMode>; SignalKind::ALL.len()],
    thresholds: ThresholdSettings,
}

impl SignalSettings {
    pub(crate) fn with(mut self, kind: SignalKind, mode: Option<SignalMode>) -> Self {
        self.modes[kind as usize] = mode;
        self
    }

    pub(crate) fn with_thresholds(self, thresholds: ThresholdSettings) -> Self {
        SignalSettings { thresholds, ..self }
    }

    /// Returns the mode of a kind that is in force.
    pub fn mode(&self, kind: SignalKind) -> SignalMode {
        self.modes[kind as usize].unwrap_or_else(|| kind.default_mode())
    }

    /// Returns the thresholds that are in force.
    pub fn thresholds(&self) -> ShapeThresholds {
        self.thresholds.in_force()
    }

    /// Returns the thresholds that are set.
    pub fn set_thresholds(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.thresholds.set()
    }

    /// Returns what is set, by kind.
    pub fn set(&self) -> impl Iterator<Item = (SignalKind, SignalMode)> {
        SignalKind::ALL.into_iter().filter_map(|kind| Some((kind, self.modes[kind as usize]?)))
    }

    /// Returns what `self`, a rule's, sets; where it is silent, what its policy sets.
    pub(crate) fn or(&self, policy: &SignalSettings) -> Self {
        let thresholds = self.thresholds.merge(&policy.thresholds, Option::or);
        SignalKind::ALL
            .into_iter()
            .fold(SignalSettings::default().with_thresholds(thresholds), |settings, kind| {
                settings.with(kind, self.modes[kind as usize].or(policy.modes[kind as usize]))
            })
    }

    /// Returns the stricter of two layers, and the smaller thresholds. A layer that is silent about one leaves it to the
    /// other.
    pub(crate) fn strictest(&self, other: &SignalSettings) -> Self {
        let smaller = |own: Option<u64>, other: Option<u64>| own.into_iter().chain(other).min();
        let thresholds = self.thresholds.merge(&other.thresholds, smaller);
        SignalKind::ALL
            .into_iter()
            .fold(SignalSettings::default().with_thresholds(thresholds), |settings, kind| {
                settings.with(kind, self.modes[kind as usize].max(other.modes[kind as usize]))
            })
    }
}

/// Which recalled text a destination may receive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MemoryReceipt {
    #[default]
    Nothing,
    /// Text of these banks.
    Banks(Box<[BankPattern]>),
    Everything,
}

impl MemoryReceipt {
    /// Returns whether text of `bank` may go there.
    pub fn admits(&self, bank: &BankId) -> bool {
        match self {
            MemoryReceipt::Nothing => false,
            MemoryReceipt::Banks(banks) => banks.iter().any(|pattern| pattern.matches(bank)),
            MemoryReceipt::Everything => true,
        }
    }
}

/// What a permit says about the content of its attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SignalTerms {
    pub(crate) settings: SignalSettings,
    pub(crate) bodies: BodyInspection,
    /// Per layer, what the destination may receive.
    pub(crate) receipts: [MemoryReceipt; 2],
    /// The header fields that pass, besides those that every request needs; `None`: all.
    pub(crate) fields: Option<Box<[String]>>,
}

/// Whether bodies are searched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BodyInspection {
    #[default]
    Searched,
    /// The rule says `inspect = false`.
    Skipped,
}

impl SignalTerms {
    pub fn mode(&self, kind: SignalKind) -> SignalMode {
        self.settings.mode(kind)
    }

    /// Returns the thresholds of the shape detectors.
    pub fn thresholds(&self) -> ShapeThresholds {
        self.settings.thresholds()
    }

    pub fn bodies(&self) -> BodyInspection {
        self.bodies
    }

    /// Returns whether text of `bank` may leave by this permit.
    pub fn may_receive(&self, bank: &BankId) -> bool {
        self.receipts.iter().all(|receipt| receipt.admits(bank))
    }

    /// Returns the names of the header fields that pass, in lower case, besides those that every request needs.
    pub fn listed_fields(&self) -> Option<&[String]> {
        self.fields.as_deref()
    }
}

impl fmt::Display for SignalSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = SignalKind::ALL.map(|kind| format!("{} {}", kind.key(), self.mode(kind)));
        f.write_str(&each.join(", "))?;
        self.set_thresholds().try_for_each(|(name, value)| write!(f, ", {name} {value}"))
    }
}

impl fmt::Display for SignalTerms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.settings)?;
        if self.bodies == BodyInspection::Skipped {
            f.write_str(", bodies not searched")?;
        }
        if let Some(fields) = &self.fields {
            write!(f, ", header fields {}", fields.join(" "))?;
        }
        match &self.receipts {
            [MemoryReceipt::Nothing, _] | [_, MemoryReceipt::Nothing] => Ok(()),
            [MemoryReceipt::Everything, MemoryReceipt::Everything] => f.write_str(", may receive memory"),
            [MemoryReceipt::Banks(banks), _] | [_, MemoryReceipt::Banks(banks)] => {
                let banks: Vec<String> = banks.iter().map(ToString::to_string).collect();
                write!(f, ", may receive memory of {}", banks.join(" "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stricter_layer_counts_and_silence_says_nothing() {
        let set = |kind, mode| SignalSettings::default().with(kind, Some(mode));
        let off = set(SignalKind::Secrets, SignalMode::Off);
        assert_eq!(off.mode(SignalKind::Secrets), SignalMode::Off);
        assert_eq!(off.mode(SignalKind::Url), SignalMode::Flag);
        assert_eq!(SignalSettings::default().mode(SignalKind::Canaries), SignalMode::Deny);
        let silent = SignalSettings::default();
        assert_eq!(off.strictest(&silent).mode(SignalKind::Secrets), SignalMode::Off);
        for (one, other, strictest) in [
            (SignalMode::Off, SignalMode::Flag, SignalMode::Flag),
            (SignalMode::Deny, SignalMode::Off, SignalMode::Deny),
            (SignalMode::Flag, SignalMode::Deny, SignalMode::Deny),
        ] {
            let both = set(SignalKind::Url, one).strictest(&set(SignalKind::Url, other));
            assert_eq!(both.mode(SignalKind::Url), strictest, "{one} {other}");
        }
        let rule = off.or(&set(SignalKind::Secrets, SignalMode::Deny));
        assert_eq!(rule.mode(SignalKind::Secrets), SignalMode::Off, "a rule overrides its own policy");
    }

    #[test]
    fn p15_text_goes_where_every_layer_admits_its_bank() {
        let bank = |name: &str| BankId::parse(name).unwrap();
        let banks = |names: &[&str]| {
            MemoryReceipt::Banks(names.iter().map(|name| BankPattern::parse(name).unwrap()).collect())
        };
        let terms = SignalTerms {
            receipts: [banks(&["staging:team-*"]), MemoryReceipt::Everything],
            ..SignalTerms::default()
        };
        assert!(terms.may_receive(&bank("staging:team-a")));
        assert!(!terms.may_receive(&bank("staging:other")));
        let closed = SignalTerms { receipts: [MemoryReceipt::Everything, MemoryReceipt::Nothing], ..terms };
        assert!(!closed.may_receive(&bank("staging:team-a")));
    }
}
