//! The stable codes of records besides [`rules::Reason`]: how an allowed attempt ends, and what findings report. A code is
//! never renamed or reused.

use rules::Reason;

use crate::record::StableCode;

/// Defines an enum of codes and its texts from one table.
macro_rules! codes {
    ($(#[$doc:meta])* $kind:ident { $($name:ident $code:literal $meaning:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $kind {
            $(#[doc = $meaning] $name,)*
        }

        impl $kind {
            /// Every code, in the order of the table.
            pub const ALL: &[$kind] = &[$($kind::$name,)*];

            /// The stable code.
            pub const fn code(self) -> &'static str {
                match self { $($kind::$name => $code,)* }
            }

            /// What it means, in one sentence.
            pub const fn meaning(self) -> &'static str {
                match self { $($kind::$name => $meaning,)* }
            }
        }
    };
}

codes! {
    /// How an allowed attempt failed, where no [`Reason`] says it.
    FailureCode {
        ClientGone "client_gone" "The client went away before the answer was complete.";
        ConnectionBroke "connection_broke" "One side of a tunnel broke the connection.";
    }
}

codes! {
    /// What a finding reports.
    FindingCode {
        AnswerForeignBank "answer_foreign_bank" "A memory service answered with content of a bank that the call did not select; the answer was withheld.";
        AnswerUnchecked "answer_unchecked" "The answer of a memory service could not be checked and was withheld.";
        Beacon "beacon" "A sandbox calls a host at regular intervals with small requests that are alike.";
        CanaryUsed "canary_used" "A canary left or tried to: a value that no honest program sends.";
        ContentUnsearched "content_unsearched" "A part of what a sandbox sent could not be searched: its coding is corrupt, cut, or too costly to decode.";
        CredentialEchoed "credential_echoed" "An origin server sent an injected credential back; it was masked.";
        CredentialLeaving "credential_leaving" "A sandbox tried to send the value of a credential that only Sandbar may send.";
        DnsBudgetExhausted "dns_budget_exhausted" "A sandbox has used up the DNS bits of a rule or its own.";
        DnsBypassAttempt "dns_bypass_attempt" "A sandbox sent a query to another resolver; the firewall redirected it here.";
        DnsForwardingLoop "dns_forwarding_loop" "A configured resolver sends our queries back to us.";
        DnsTunnelSuspected "dns_tunnel_suspected" "The names a sandbox asks for look like encoded data.";
        Drip "drip" "Small amounts that a sandbox sent to a host add up.";
        EncodedRun "encoded_run" "A URL or a header field carries a long encoded value.";
        FieldNovelty "field_novelty" "Requests carry header fields that this sandbox never sent to this host before.";
        HeaderBits "header_bits" "Requests say more outside their bodies than usual, or than their budget.";
        IdentityMismatch "identity_mismatch" "A signed identity arrived on the channel of another sandbox.";
        IdentityStale "identity_stale" "A signed identity names an earlier generation of the sandbox.";
        ManyFields "many_fields" "A request carries more small header fields than usual.";
        MemoryFlow "memory_flow" "Text of a memory bank left, or tried to, for a destination that may not receive it.";
        PlaceholderMisused "placeholder_misused" "A sandbox sent the placeholder of a credential where it is not replaced.";
        SecretFound "secret_found" "Something that left, or tried to, has the shape of a key, a token or a password.";
        Sequence "sequence" "Paths, queries or header fields count up from request to request.";
        UploadRatio "upload_ratio" "A sandbox sends a host far more than the host usually gets for what it answers.";
        UrlNovelty "url_novelty" "Paths or queries keep changing in ways that carry data.";
        UserAgentChanged "user_agent_changed" "The `User-Agent` of a sandbox keeps changing.";
    }
}

/// Why an allowed attempt did not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndCode {
    Failure(FailureCode),
    Reason(Reason),
}

impl EndCode {
    pub const fn code(self) -> StableCode {
        StableCode(match self {
            EndCode::Failure(failure) => failure.code(),
            EndCode::Reason(reason) => reason.code(),
        })
    }
}

impl From<FailureCode> for EndCode {
    fn from(failure: FailureCode) -> Self {
        EndCode::Failure(failure)
    }
}

impl From<Reason> for EndCode {
    fn from(reason: Reason) -> Self {
        EndCode::Reason(reason)
    }
}

impl From<Reason> for StableCode {
    fn from(reason: Reason) -> Self {
        StableCode(reason.code())
    }
}

impl From<FindingCode> for StableCode {
    fn from(finding: FindingCode) -> Self {
        StableCode(finding.code())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A finding about a refusal shares the reason's code; no failure code does.
    #[test]
    fn codes_are_unique_and_lower_snake_case() {
        let reasons: HashSet<_> = Reason::ALL.iter().map(|reason| reason.code()).collect();
        let failures = FailureCode::ALL.iter().map(|failure| failure.code());
        let findings: HashSet<_> = FindingCode::ALL.iter().map(|finding| finding.code()).collect();
        assert_eq!(findings.len(), FindingCode::ALL.len(), "a finding code stands twice");
        for code in failures {
            assert!(!reasons.contains(code) && !findings.contains(code), "{code} stands twice");
        }
        for code in &findings {
            assert!(code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{code}");
        }
    }
}
