//! Why a token was refused. Nothing of the token is in here; the sandbox is told the code only.

/// Why a token names nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum IdentityError {
    #[error("there is no token")]
    Absent,
    #[error("the algorithm is not the one of the issuer's key")]
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
    #[error("a member stands twice in the token")]
    Duplicate,
    #[error("the issuer may not name this environment")]
    Environment,
    #[error("the token has expired")]
    Expired,
    #[error("the sandbox has a newer generation than the token")]
    Generation,
    #[error(
        "the token's header has a member other than `alg`, `kid` and `typ`, or a strange `typ`"
    )]
    Header,
    #[error("the issuer's keys could not be read for too long; check the JWKS file")]
    KeysStale,
    #[error("the token lives longer than its issuer may let it")]
    Life,
    #[error("the token is not three parts of canonical base64url that hold JSON")]
    Malformed,
    #[error("the token is not valid yet, or was issued in the future")]
    NotYetValid,
    #[error("the revocation list could not be read for too long; check the file")]
    RevocationsStale,
    #[error("the token, its key, its sandbox or its tenant is revoked")]
    Revoked,
    #[error("the signature is wrong")]
    Signature,
    #[error("the subject is not of the form the issuer may name")]
    Subject,
    #[error("the issuer may not name this tenant")]
    Tenant,
    #[error("the token is larger than {} bytes", super::MAX_TOKEN)]
    TooLarge,
    #[error("the subject is of another trust domain than its issuer")]
    TrustDomain,
    #[error("no issuer of this name is trusted")]
    UnknownIssuer,
    #[error("the issuer has no key of this `kid`")]
    UnknownKey,
}

impl IdentityError {
    /// The stable code for records, metrics and the sandbox. Never renamed, never reused.
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
