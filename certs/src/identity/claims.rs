//! The claims of a token, strictly typed, and the checks that need nothing but the claims.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

use super::subject::Subject;
use super::verify::{RequiredClaims, TrustedIssuer, VerifyContext};
use super::{IdentityError, is_plain};

/// The end of the year 9999; later times are refused.
const LAST_MOMENT: u64 = 253_402_300_799;
/// Longest `iss`, `aud` or `jti`.
pub(super) const MAX_TEXT: usize = 255;

/// The identity in a verified token. Only [`Verifier`](super::Verifier) creates one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedIdentity {
    subject: Subject,
    spiffe_id: String,
    issuer: Option<String>,
    audience: String,
    generation: Option<u64>,
    token_id: Option<String>,
    key_id: String,
    issued_at: Option<u64>,
    valid_from: Option<u64>,
    expires_at: u64,
    confirmation: Option<[u8; 32]>,
}

impl VerifiedIdentity {
    /// Returns the sandbox, its tenant and its environment.
    pub fn subject(&self) -> &Subject {
        &self.subject
    }

    /// Returns the `sub` as its issuer wrote it.
    pub fn spiffe_id(&self) -> &str {
        &self.spiffe_id
    }

    pub fn issuer(&self) -> Option<&str> {
        self.issuer.as_deref()
    }

    pub fn audience(&self) -> &str {
        &self.audience
    }

    /// Returns the generation (`sid`): the boot of the sandbox that the token was issued to.
    pub fn generation(&self) -> Option<u64> {
        self.generation
    }

    /// Returns the `jti`.
    pub fn token_id(&self) -> Option<&str> {
        self.token_id.as_deref()
    }

    /// Returns the `kid` of the key that signed.
    pub fn key_id(&self) -> &str {
        &self.key_id
    }

    pub fn issued_at(&self) -> Option<u64> {
        self.issued_at
    }

    /// Returns the expiry in Unix seconds.
    pub fn expires_at(&self) -> u64 {
        self.expires_at
    }

    pub(super) fn check_times(&self, limits: &TrustedIssuer, now: u64) -> Result<(), IdentityError> {
        let skew = limits.skew.as_secs();
        let begins = [self.issued_at, self.valid_from].into_iter().flatten();
        if begins.max().unwrap_or(0) > now.saturating_add(skew) {
            return Err(IdentityError::NotYetValid);
        }
        if now >= self.expires_at.saturating_add(skew) {
            return Err(IdentityError::Expired);
        }
        // Without `iat` and `nbf`, limit the remaining lifetime instead of the whole.
        let from = self.issued_at.or(self.valid_from).unwrap_or(now.min(self.expires_at));
        match self.expires_at.checked_sub(from) {
            Some(life) if life <= limits.life.as_secs() => Ok(()),
            Some(_) => Err(IdentityError::Life),
            None => Err(IdentityError::Expired),
        }
    }

    pub(super) fn check_expected(&self, expected: &VerifyContext<'_>) -> Result<(), IdentityError> {
        if self.audience != expected.audience {
            return Err(IdentityError::Audience);
        }
        match (self.confirmation, expected.certificate) {
            (None, _) => Ok(()),
            (Some(bound), Some(presented)) if bound == *presented => Ok(()),
            (Some(_), _) => Err(IdentityError::Confirmation),
        }
    }
}

/// Reads claims from a token, strictly typed.
pub(super) struct ClaimReader<'a> {
    pub(super) claims: &'a Map<String, Value>,
}

impl<'a> ClaimReader<'a> {
    pub(super) fn identity(
        &self,
        limits: &TrustedIssuer,
        key_id: &str,
    ) -> Result<VerifiedIdentity, IdentityError> {
        let expires_at = self.unix_time("exp")?.ok_or(IdentityError::ClaimMissing("exp"))?;
        let (issued_at, valid_from) = (self.unix_time("iat")?, self.unix_time("nbf")?);
        let (issuer, token_id) = (self.text("iss")?, self.text("jti")?);
        if limits.claims == RequiredClaims::Ours {
            issued_at.ok_or(IdentityError::ClaimMissing("iat"))?;
            valid_from.ok_or(IdentityError::ClaimMissing("nbf"))?;
            token_id.ok_or(IdentityError::ClaimMissing("jti"))?;
        }
        Ok(VerifiedIdentity {
            subject: self.subject(limits)?,
            spiffe_id: self.text("sub")?.unwrap_or_default().to_owned(),
            issuer: issuer.map(str::to_owned),
            audience: self.audience()?.to_owned(),
            generation: self.generation()?,
            token_id: token_id.map(str::to_owned),
            key_id: key_id.to_owned(),
            issued_at,
            valid_from,
            expires_at,
            confirmation: self.confirmation()?,
        })
    }

    /// Parses the subject with the issuer's template and checks trust domain, environment and tenant.
    fn subject(&self, limits: &TrustedIssuer) -> Result<Subject, IdentityError> {
        let text = self.text("sub")?.ok_or(IdentityError::ClaimMissing("sub"))?;
        let subject = limits.subject.parse_subject(text).map_err(|_| IdentityError::Subject)?;
        if subject.trust_domain != limits.trust_domain {
            return Err(IdentityError::TrustDomain);
        }
        if limits.environments.as_ref().is_some_and(|all| !all.contains(&subject.environment)) {
            return Err(IdentityError::Environment);
        }
        if limits.tenants.as_ref().is_some_and(|all| !all.contains(&subject.tenant)) {
            return Err(IdentityError::Tenant);
        }
        Ok(subject)
    }

    /// Returns the only audience, a string or the only entry of a list.
    fn audience(&self) -> Result<&'a str, IdentityError> {
        let malformed = IdentityError::ClaimMalformed("aud");
        let text = match self.claims.get("aud") {
            None => return Err(IdentityError::ClaimMissing("aud")),
            Some(Value::String(one)) => one,
            Some(Value::Array(list)) => match list.as_slice() {
                [Value::String(one)] => one,
                [] | [_] => return Err(malformed),
                [_, _, ..] => return Err(IdentityError::Audiences),
            },
            Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) => {
                return Err(malformed);
            }
        };
        if is_plain(text, MAX_TEXT) { Ok(text) } else { Err(malformed) }
    }

    /// Parses `sid`: a decimal number without leading zeros, as a string, which OpenID Connect requires.
    fn generation(&self) -> Result<Option<u64>, IdentityError> {
        let Some(text) = self.text("sid")? else {
            return Ok(None);
        };
        let number = text.parse::<u64>().ok().filter(|number| number.to_string() == text);
        number.map(Some).ok_or(IdentityError::ClaimMalformed("sid"))
    }

    /// Parses `cnf`. Only a certificate thumbprint can be checked here; any other form is refused.
    fn confirmation(&self) -> Result<Option<[u8; 32]>, IdentityError> {
        let Some(claim) = self.claims.get("cnf") else {
            return Ok(None);
        };
        let members = claim.as_object().filter(|members| members.len() == 1);
        let thumbprint = members.and_then(|members| members.get("x5t#S256")).and_then(Value::as_str);
        let bytes = thumbprint.and_then(|text| URL_SAFE_NO_PAD.decode(text).ok());
        let bytes = bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
        bytes.map(Some).ok_or(IdentityError::Confirmation)
    }

    pub(super) fn text(&self, name: &'static str) -> Result<Option<&'a str>, IdentityError> {
        match self.claims.get(name) {
            None => Ok(None),
            Some(Value::String(text)) if is_plain(text, MAX_TEXT) => Ok(Some(text)),
            Some(_) => Err(IdentityError::ClaimMalformed(name)),
        }
    }

    /// Parses whole Unix seconds up to the year 9999; no string, fraction or exponent.
    fn unix_time(&self, name: &'static str) -> Result<Option<u64>, IdentityError> {
        let Some(claim) = self.claims.get(name) else {
            return Ok(None);
        };
        let moment = claim.as_u64().filter(|moment| *moment <= LAST_MOMENT);
        moment.map(Some).ok_or(IdentityError::ClaimMalformed(name))
    }
}
