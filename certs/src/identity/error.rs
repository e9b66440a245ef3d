//! Why a token was refused. The messages contain nothing of the token; the sandbox gets only the code.

/// Why a token was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum IdentityError {
    #[error("the token is missing")]
    Absent,
    #[error("the algorithm does not match the issuer's key")]
    Algorithm,
    #[error("the token is for another audience")]
    Audience,
    #[error("the token names several audiences; it must name exactly one")]
    Audiences,
    #[error("the claim `{0}` has the wrong form")]
    ClaimMalformed(&'static str),
    #[error("the claim `{0}` is missing")]
    ClaimMissing(&'static str),
    #[error("the token is bound to a client certificate (`cnf`) that was not presented")]
    Confirmation,
    #[error("the token contains a duplicate member")]
    Duplicate,
    #[error("the issuer may not name this environment")]
    Environment,
    #[error("the token has expired")]
    Expired,
    #[error("the sandbox has a newer generation than the token")]
    Generation,
    #[error("the token's header has a member other than `alg`, `kid` and `typ`, or an unknown `typ`")]
    Header,
    #[error("the issuer's keys have not been readable for too long; check the JWKS file")]
    KeysStale,
    #[error("the token's lifetime exceeds the limit for its issuer")]
    Life,
    #[error("the token is not three parts of canonical base64url containing JSON")]
    Malformed,
    #[error("the token is not valid yet, or was issued in the future")]
    NotYetValid,
    #[error("the revocation list has not been readable for too long; check the file")]
    RevocationsStale,
    #[error("the token, its key, its sandbox or its tenant is revoked")]
    Revoked,
    #[error("the signature is invalid")]
    Signature,
    #[error("the subject does not have the form configured for its issuer")]
    Subject,
    #[error("the issuer may not name this tenant")]
    Tenant,
    #[error("the token is larger than {} bytes", super::MAX_TOKEN)]
    TooLarge,
    #[error("the subject's trust domain is not that of its issuer")]
    TrustDomain,
    #[error("the issuer is not trusted")]
    UnknownIssuer,
    #[error("the issuer has no key with this `kid`")]
    UnknownKey,
}

impl IdentityError {
    /// Returns the stable code for records, metrics and the sandbox. Never renamed, never reused.
    pub fn code(self) -> &'static str {
        match self {
            Self::Absent => "identity_absent",
            Self::Algorithm => "identity_algorithm",
            Self::Audience => "identity_audience",
            Self::Audiences => "identity_several_audiences",
            Self::ClaimMalformed(_) => "identity_claim_malformed",
            Self::ClaimMissing(_) => "identity_claim_missing",
            Self::Confirmation => "identity_confirmation",
            Self::Duplicate => "identity_duplicate",
            Self::Environment => "identity_environment",
            Self::Expired => "identity_expired",
            Self::Generation => "identity_generation",
            Self::Header => "identity_header",
            Self::KeysStale => "identity_keys_stale",
            Self::Life => "identity_life",
            Self::Malformed => "identity_malformed",
            Self::NotYetValid => "identity_not_yet_valid",
            Self::RevocationsStale => "identity_revocations_stale",
            Self::Revoked => "identity_revoked",
            Self::Signature => "identity_signature",
            Self::Subject => "identity_subject",
            Self::Tenant => "identity_tenant",
            Self::TooLarge => "identity_too_large",
            Self::TrustDomain => "identity_trust_domain",
            Self::UnknownIssuer => "identity_unknown_issuer",
            Self::UnknownKey => "identity_unknown_key",
        }
    }
}
