//! The words of findings: what a signal means for an analyst, and the reason of a refusal.

use audit::{DetectionFinding, FindingCode, FindingSeverity};
use rules::signals::{Encoding, Signal, SignalCode, SignalMode, SignalPlace};
use rules::{DomainName, Permit, Reason};

/// Every signal, in the order of its code.
pub(super) const SIGNALS: [SignalCode; 16] = [
    SignalCode::Beacon,
    SignalCode::CanaryUsed,
    SignalCode::ContentUnsearched,
    SignalCode::CredentialLeaving,
    SignalCode::Drip,
    SignalCode::EncodedRun,
    SignalCode::FieldNovelty,
    SignalCode::HeaderBits,
    SignalCode::ManyFields,
    SignalCode::MemoryFlow,
    SignalCode::PlaceholderMisused,
    SignalCode::SecretFound,
    SignalCode::Sequence,
    SignalCode::UploadRatio,
    SignalCode::UrlNovelty,
    SignalCode::UserAgentChanged,
];

/// The codes of [`rules::signals::shape`] that a request can raise before it leaves.
pub(super) const SHAPES: [SignalCode; 7] = [
    SignalCode::Drip,
    SignalCode::EncodedRun,
    SignalCode::FieldNovelty,
    SignalCode::ManyFields,
    SignalCode::Sequence,
    SignalCode::UrlNovelty,
    SignalCode::UserAgentChanged,
];

/// Returns the code of the finding.
pub(super) fn code(signal: SignalCode) -> FindingCode {
    match signal {
        SignalCode::Beacon => FindingCode::Beacon,
        SignalCode::CanaryUsed => FindingCode::CanaryUsed,
        SignalCode::ContentUnsearched => FindingCode::ContentUnsearched,
        SignalCode::CredentialLeaving => FindingCode::CredentialLeaving,
        SignalCode::Drip => FindingCode::Drip,
        SignalCode::EncodedRun => FindingCode::EncodedRun,
        SignalCode::FieldNovelty => FindingCode::FieldNovelty,
        SignalCode::HeaderBits => FindingCode::HeaderBits,
        SignalCode::ManyFields => FindingCode::ManyFields,
        SignalCode::MemoryFlow => FindingCode::MemoryFlow,
        SignalCode::PlaceholderMisused => FindingCode::PlaceholderMisused,
        SignalCode::SecretFound => FindingCode::SecretFound,
        SignalCode::Sequence => FindingCode::Sequence,
        SignalCode::UploadRatio => FindingCode::UploadRatio,
        SignalCode::UrlNovelty => FindingCode::UrlNovelty,
        SignalCode::UserAgentChanged => FindingCode::UserAgentChanged,
    }
}

/// Returns the reason of a refusal for a signal.
pub(super) fn reason(signal: SignalCode) -> Reason {
    match signal {
        SignalCode::CanaryUsed => Reason::CanaryUsed,
        SignalCode::CredentialLeaving => Reason::CredentialLeaving,
        SignalCode::MemoryFlow => Reason::MemoryFlow,
        SignalCode::PlaceholderMisused => Reason::PlaceholderMisused,
        SignalCode::SecretFound => Reason::SecretFound,
        SignalCode::Beacon
        | SignalCode::ContentUnsearched
        | SignalCode::Drip
        | SignalCode::EncodedRun
        | SignalCode::FieldNovelty
        | SignalCode::HeaderBits
        | SignalCode::ManyFields
        | SignalCode::Sequence
        | SignalCode::UploadRatio
        | SignalCode::UrlNovelty
        | SignalCode::UserAgentChanged => Reason::SignalDenied,
    }
}

/// Returns the record of a signal.
pub(super) fn finding(signal: &Signal, mode: SignalMode, permit: &Permit) -> DetectionFinding {
    let code = code(signal.code);
    let verdict = if mode == SignalMode::Deny { "refused" } else { "flagged" };
    let (host, rule) = (permit.host(), &permit.rule().rule);
    let message = format!("{} for {host} by rule `{rule}`: {verdict}.", describe(signal));
    DetectionFinding {
        code,
        title: code.meaning().into(),
        severity: severity(signal.code),
        message: Some(message.into()),
        score: None,
        features: Vec::new(),
    }
}

/// Returns the record of a signal in a name that the DNS filter was asked for.
pub(super) fn name_finding(signal: &Signal, mode: SignalMode, name: &DomainName) -> DetectionFinding {
    let code = code(signal.code);
    let verdict = if mode == SignalMode::Deny { "refused" } else { "flagged" };
    DetectionFinding {
        code,
        title: code.meaning().into(),
        severity: severity(signal.code),
        message: Some(format!("{} {name}: {verdict}.", describe(signal)).into()),
        score: None,
        features: Vec::new(),
    }
}

/// Describes a signal in words, never with its content.
pub(super) fn describe(signal: &Signal) -> String {
    let Signal { what, value, threshold, .. } = signal;
    let place = place(&signal.place);
    let within: Vec<&str> = signal.encodings.iter().rev().map(|encoding| encoding_name(*encoding)).collect();
    let within = if within.is_empty() { String::new() } else { format!(", as {}", within.join(" within ")) };
    let measure = match (value, threshold) {
        (1, 1) => String::new(),
        (value, threshold) => format!(" ({value}, from {threshold} on)"),
    };
    format!("{what} in {place}{within}{measure}")
}

/// Stands for a signal that was reported a short time ago.
pub(super) fn repeated(code: SignalCode) -> Signal {
    let what = format!("more of `{}`", self::code(code).code());
    Signal { code, place: SignalPlace::Attempt, encodings: Vec::new(), what, value: 1, threshold: 1 }
}

fn severity(code: SignalCode) -> FindingSeverity {
    match code {
        SignalCode::CanaryUsed | SignalCode::CredentialLeaving => FindingSeverity::Critical,
        SignalCode::MemoryFlow | SignalCode::PlaceholderMisused | SignalCode::SecretFound => {
            FindingSeverity::High
        }
        SignalCode::Beacon
        | SignalCode::ContentUnsearched
        | SignalCode::Drip
        | SignalCode::EncodedRun
        | SignalCode::HeaderBits
        | SignalCode::UploadRatio
        | SignalCode::UrlNovelty => FindingSeverity::Medium,
        SignalCode::FieldNovelty
        | SignalCode::ManyFields
        | SignalCode::Sequence
        | SignalCode::UserAgentChanged => FindingSeverity::Low,
    }
}

pub(super) fn place(place: &SignalPlace) -> String {
    let shown =
        |name: &str| name.chars().filter(|character| !character.is_control()).take(64).collect::<String>();
    match place {
        SignalPlace::Attempt => "the request".to_owned(),
        SignalPlace::Body => "the body".to_owned(),
        SignalPlace::Cookie(name) => format!("cookie `{}`", shown(name)),
        SignalPlace::Field(name) => format!("header field `{}`", shown(name)),
        SignalPlace::FieldName => "the name of a header field".to_owned(),
        SignalPlace::HostName => "the host name".to_owned(),
        SignalPlace::Method => "the method".to_owned(),
        SignalPlace::Path => "the path".to_owned(),
        SignalPlace::Query => "the query".to_owned(),
    }
}

pub(super) fn encoding_name(encoding: Encoding) -> &'static str {
    match encoding {
        Encoding::Base32 => "base32",
        Encoding::Base64 => "base64",
        Encoding::Base64Url => "base64url",
        Encoding::Deflate => "deflate",
        Encoding::Gzip => "gzip",
        Encoding::Hex => "hex",
        Encoding::HtmlEscapes => "HTML escapes",
        Encoding::JsonEscapes => "JSON escapes",
        Encoding::Percent => "percent encoding",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_signal_is_listed_by_its_code() {
        assert!(SIGNALS.is_sorted_by_key(|signal| code(*signal).code()));
        let unlisted = [
            FindingCode::AnswerForeignBank,
            FindingCode::AnswerUnchecked,
            FindingCode::CredentialEchoed,
            FindingCode::DnsBudgetExhausted,
            FindingCode::DnsBypassAttempt,
            FindingCode::DnsForwardingLoop,
            FindingCode::DnsTunnelSuspected,
            FindingCode::IdentityMismatch,
            FindingCode::IdentityStale,
        ];
        for finding in FindingCode::ALL {
            let listed = SIGNALS.iter().any(|signal| code(*signal) == *finding);
            assert!(listed != unlisted.contains(finding), "{finding:?}");
        }
    }
}
