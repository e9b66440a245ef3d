//! The signed identity of a memory request: exactly one token, checked by `certs`, compared with the channel
//! by `rules`.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use audit::Code;
use certs::UnixTime;
use certs::identity::{
    Algorithm, Claims, Expected, IdentityError, TrustDomain, TrustedIssuer, Verifier,
};
use pingora_http::RequestHeader;
use rules::facts::{Identity, IdentityClaim};
use rules::operator::{IdentitySettings, IssuerSettings};
use rules::policy::IdentityMode;

use super::form::values;

/// More than one token, or one in a form nobody should read.
const REPEATED: &str = "identity_repeated";
const SCHEME: &str = "identity_scheme";

/// What a request says of who sent it.
#[derive(Debug)]
pub(super) struct Presented {
    pub(super) claim: IdentityClaim,
    /// The subject of a token that was verified.
    pub(super) subject: Option<String>,
    /// The word for it in the record.
    pub(super) checked: Code,
}

/// What checks tokens, by the issuers the operator believes.
pub(super) fn verifier(settings: &IdentitySettings, base: &Path) -> anyhow::Result<Verifier> {
    let issuers = settings.issuers.iter().map(|issuer| trusted(issuer, base));
    let issuers = issuers.collect::<anyhow::Result<Vec<_>>>()?;
    let revocations = settings.revocations.as_ref().map(|path| base.join(path));
    Verifier::new(issuers, revocations, UnixTime::now())
        .context("cannot check signed identities: look at `[identity]`")
}

fn trusted(settings: &IssuerSettings, base: &Path) -> anyhow::Result<TrustedIssuer> {
    let domain = TrustDomain::parse(&settings.trust_domain)?;
    let mut issuer = TrustedIssuer::new("", domain, base.join(&settings.keys));
    issuer.issuer.clone_from(&settings.name);
    if issuer.issuer.is_none() {
        issuer.claims = Claims::JwtSvid; // what a nameless one writes
    }
    issuer.environments.clone_from(&settings.environments);
    issuer.tenants.clone_from(&settings.tenants);
    if let Some(names) = &settings.algorithms {
        issuer.algorithms = names.iter().filter_map(|name| Algorithm::named(name)).collect();
    }
    if let Some(life) = settings.life_seconds {
        issuer.life = Duration::from_secs(life);
    }
    Ok(issuer)
}

/// Looks for the token of a request and checks it.
pub(super) fn presented(
    head: &RequestHeader,
    verifier: Option<&Verifier>,
    audience: &str,
    mode: IdentityMode,
) -> Presented {
    let token = match token(head) {
        Ok(Some(token)) => token,
        Ok(None) => {
            let checked = match mode {
                IdentityMode::FromPath => Code("from_path"),
                IdentityMode::Required => Code("absent"),
            };
            return Presented { claim: IdentityClaim::Absent, subject: None, checked };
        }
        Err(code) => return invalid(code),
    };
    let expected = Expected::audience(audience);
    let found = verifier
        .ok_or(IdentityError::UnknownIssuer)
        .and_then(|verifier| verifier.verify(token, &expected, UnixTime::now()));
    match found {
        Err(error) => invalid(error.code()),
        Ok(found) => {
            let subject = found.subject();
            let claim = IdentityClaim::Verified(Identity {
                sandbox: subject.sandbox.clone(),
                tenant: subject.tenant.clone(),
                environment: subject.environment.clone(),
                generation: found.generation(),
            });
            let subject = Some(found.spiffe_id().to_owned());
            Presented { claim, subject, checked: Code("verified") }
        }
    }
}

fn invalid(code: &'static str) -> Presented {
    Presented { claim: IdentityClaim::Invalid(code), subject: None, checked: Code(code) }
}

/// The one token, from `Sandbox-Identity` or `Authorization: Bearer`. Two of them are an attack, even alike:
/// who reads the first and who reads the last would differ.
fn token(head: &RequestHeader) -> Result<Option<&str>, &'static str> {
    let own = values(head, "sandbox-identity").map(Ok);
    let bearer = values(head, "authorization").map(bearer);
    let mut all = own.chain(bearer);
    let first = all.next();
    if all.next().is_some() {
        return Err(REPEATED);
    }
    let malformed = IdentityError::Malformed.code();
    first.transpose()?.map(|token| str::from_utf8(token).map_err(|_| malformed)).transpose()
}

/// Whoever else reads `Authorization` in another way shall not be asked.
fn bearer(value: &[u8]) -> Result<&[u8], &'static str> {
    value.strip_prefix(b"Bearer ").ok_or(SCHEME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_one_token_is_taken() {
        for (fields, found) in [
            (&[][..], Ok(None)),
            (&[("sandbox-identity", "t")], Ok(Some("t"))),
            (&[("authorization", "Bearer t")], Ok(Some("t"))),
            (&[("authorization", "bearer t")], Err(SCHEME)),
            (&[("authorization", "Basic t")], Err(SCHEME)),
            (&[("authorization", "t")], Err(SCHEME)),
            (&[("sandbox-identity", "t"), ("sandbox-identity", "t")], Err(REPEATED)),
            (&[("sandbox-identity", ""), ("sandbox-identity", "t")], Err(REPEATED)),
            (&[("sandbox-identity", "t"), ("authorization", "Bearer t")], Err(REPEATED)),
            (&[("x-sandbox-identity", "t"), ("sandbox_identity", "t")], Ok(None)),
            (&[("cookie", "sandbox-identity=t"), ("proxy-authorization", "Bearer t")], Ok(None)),
        ] {
            let mut head = RequestHeader::build("GET", b"/", None).unwrap();
            for (name, value) in fields {
                head.append_header(*name, *value).unwrap();
            }
            assert_eq!(token(&head), found, "{fields:?}");
        }
    }
}
