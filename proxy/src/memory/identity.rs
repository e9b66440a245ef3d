//! The signed identity of a memory request: at most one token, verified by `certs` and compared with the channel by
//! `rules`.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use audit::StableCode;
use certs::UnixTime;
use certs::identity::{
    IdentityError, RequiredClaims, SigningAlgorithm, TrustDomain, TrustedIssuer, Verifier, VerifyContext,
};
use pingora_http::RequestHeader;
use rules::configuration::{IdentitySettings, IssuerSettings};
use rules::facts::{IdentityClaim, TokenIdentity};
use rules::policy::IdentityMode;
use rules::sandbox::Sandbox;

use super::form::header_values;

/// The request has more than one token.
const REPEATED_TOKEN: &str = "identity_repeated";
/// `Authorization` is not `Bearer <token>`.
const WRONG_SCHEME: &str = "identity_scheme";

/// The identity that a request presents, verified.
#[derive(Debug)]
pub(super) struct PresentedIdentity {
    pub(super) claim: IdentityClaim,
    /// The SPIFFE ID of a verified token.
    pub(super) subject: Option<String>,
    /// The outcome of the check, for the record.
    pub(super) checked: StableCode,
}

/// Builds the verifier of tokens from the trusted issuers of the configuration.
pub(super) fn build_verifier(settings: &IdentitySettings, base: &Path) -> anyhow::Result<Verifier> {
    let issuers = settings.issuers.iter().map(|issuer| trusted_issuer(issuer, base));
    let issuers = issuers.collect::<anyhow::Result<Vec<_>>>()?;
    let revocations = settings.revocations.as_ref().map(|path| base.join(path));
    Verifier::new(issuers, revocations, UnixTime::now())
        .context("cannot set up the verification of signed identities: check `[identity]`")
}

fn trusted_issuer(settings: &IssuerSettings, base: &Path) -> anyhow::Result<TrustedIssuer> {
    let domain = TrustDomain::parse(&settings.trust_domain)?;
    let mut issuer = TrustedIssuer::new("", domain, base.join(&settings.keys));
    issuer.issuer.clone_from(&settings.name);
    if issuer.issuer.is_none() {
        issuer.claims = RequiredClaims::JwtSvid; // an issuer without a name issues JWT-SVIDs
    }
    issuer.environments.clone_from(&settings.environments);
    issuer.tenants.clone_from(&settings.tenants);
    if let Some(names) = &settings.algorithms {
        issuer.algorithms = names.iter().filter_map(|name| SigningAlgorithm::from_name(name)).collect();
    }
    if let Some(life) = settings.life_seconds {
        issuer.life = Duration::from_secs(life);
    }
    Ok(issuer)
}

/// Finds the token of a request and verifies it. The sandbox of the channel is looked up among the revoked ones in any
/// case: otherwise one would get in by leaving its token out.
pub(super) fn verify_identity(
    head: &RequestHeader,
    verifier: Option<&Verifier>,
    sandbox: &Sandbox,
    audience: &str,
    mode: IdentityMode,
) -> PresentedIdentity {
    let now = UnixTime::now();
    let standing = verifier.map_or(Ok(()), |verifier| verifier.check_sandbox(sandbox, now));
    let token = match (find_token(head), standing) {
        (_, Err(error @ IdentityError::Revoked)) | (Ok(None), Err(error @ IdentityError::Generation)) => {
            let checked = StableCode(error.code());
            return PresentedIdentity { claim: IdentityClaim::Revoked, subject: None, checked };
        }
        (Ok(Some(token)), _) => token, // its own generation is checked with it
        (Ok(None), Err(error)) => return invalid_identity(error.code()),
        (Ok(None), Ok(())) => {
            let checked = match mode {
                IdentityMode::FromChannel => StableCode("from_channel"),
                IdentityMode::Required => StableCode("absent"),
            };
            return PresentedIdentity { claim: IdentityClaim::Absent, subject: None, checked };
        }
        (Err(code), _) => return invalid_identity(code),
    };
    let expected = VerifyContext::for_audience(audience);
    let verified = verifier
        .ok_or(IdentityError::UnknownIssuer)
        .and_then(|verifier| verifier.verify(token, &expected, now));
    match verified {
        Err(error) => invalid_identity(error.code()),
        Ok(identity) => {
            let subject = identity.subject();
            let claim = IdentityClaim::Verified(TokenIdentity {
                sandbox: subject.sandbox.clone(),
                tenant: subject.tenant.clone(),
                environment: subject.environment.clone(),
                generation: identity.generation(),
            });
            let subject = Some(identity.spiffe_id().to_owned());
            PresentedIdentity { claim, subject, checked: StableCode("verified") }
        }
    }
}

fn invalid_identity(code: &'static str) -> PresentedIdentity {
    PresentedIdentity { claim: IdentityClaim::Invalid(code), subject: None, checked: StableCode(code) }
}

/// Finds the token in `Sandbox-Identity` or `Authorization: Bearer`. Refuses two of them, even if they are equal:
/// servers differ in whether they read the first or the last.
fn find_token(head: &RequestHeader) -> Result<Option<&str>, &'static str> {
    let direct = header_values(head, "sandbox-identity").map(Ok);
    let bearer = header_values(head, "authorization").map(bearer_token);
    let mut all = direct.chain(bearer);
    let first = all.next();
    if all.next().is_some() {
        return Err(REPEATED_TOKEN);
    }
    let malformed = IdentityError::Malformed.code();
    first.transpose()?.map(|token| str::from_utf8(token).map_err(|_| malformed)).transpose()
}

/// Accepts only the exact spelling `Bearer <token>`: other servers parse variants differently.
fn bearer_token(value: &[u8]) -> Result<&[u8], &'static str> {
    value.strip_prefix(b"Bearer ").ok_or(WRONG_SCHEME)
}

#[cfg(test)]
mod tests {
    use certs::identity::{IssueRequest, IssuerOptions, LocalIssuer};
    use rules::load::{SourceFile, read_configuration};

    use super::*;

    // proves: identity.issuer.name, identity.issuer.trust_domain, identity.issuer.keys, identity.issuer.environments
    // proves: identity.issuer.tenants, identity.issuer.algorithms, identity.issuer.life_seconds
    #[test]
    fn p12_an_issuer_is_trusted_for_what_the_configuration_says() {
        let dir = tempfile::tempdir().unwrap();
        let issuer = |name: &str| {
            let options = IssuerOptions {
                issuer: "https://issuer.example".to_owned(),
                trust_domain: TrustDomain::parse("acme.example").unwrap(),
                environments: None,
                algorithm: SigningAlgorithm::Es256,
            };
            LocalIssuer::init(&dir.path().join(name), &options, UnixTime::now()).unwrap()
        };
        let (own, _other) = (issuer("own"), issuer("other"));
        let request = IssueRequest {
            tenant: "acme",
            environment: "staging",
            sandbox: "s",
            audience: "memory",
            life: Duration::from_secs(300),
            generation: None,
        };
        let token = own.issue(&request, UnixTime::now()).unwrap().expose().to_owned();
        let good = "[[identity.issuer]]\nname = \"https://issuer.example\"\ntrust_domain = \"acme.example\"\n\
                    keys = \"own/jwks.json\"\nenvironments = [\"staging\"]\ntenants = [\"acme\"]\n\
                    algorithms = [\"ES256\"]\nlife_seconds = 300\n";
        for (from, to, refused) in [
            ("", "", false),
            ("https://issuer.example", "https://another.example", true),
            ("\"acme.example\"", "\"evil.example\"", true),
            ("own/jwks.json", "other/jwks.json", true),
            ("[\"staging\"]", "[\"production\"]", true),
            ("[\"acme\"]", "[\"initech\"]", true),
            ("ES256", "RS256", true),
            ("= 300", "= 299", true),
        ] {
            let file = SourceFile { path: "sandbar.toml".into(), bytes: good.replacen(from, to, 1).into() };
            let settings = read_configuration(&file).unwrap().identity.unwrap();
            let found = build_verifier(&settings, dir.path()).map_err(|error| error.to_string()).and_then(
                |verifier| {
                    let context = VerifyContext::for_audience("memory");
                    verifier.verify(&token, &context, UnixTime::now()).map_err(|error| error.to_string())
                },
            );
            assert_eq!(found.is_err(), refused, "{to}: {:?}", found.err());
        }
    }

    #[test]
    fn p12_at_most_one_token_is_accepted() {
        for (fields, found) in [
            (&[][..], Ok(None)),
            (&[("sandbox-identity", "t")], Ok(Some("t"))),
            (&[("authorization", "Bearer t")], Ok(Some("t"))),
            (&[("authorization", "bearer t")], Err(WRONG_SCHEME)),
            (&[("authorization", "Basic t")], Err(WRONG_SCHEME)),
            (&[("authorization", "t")], Err(WRONG_SCHEME)),
            (&[("sandbox-identity", "t"), ("sandbox-identity", "t")], Err(REPEATED_TOKEN)),
            (&[("sandbox-identity", ""), ("sandbox-identity", "t")], Err(REPEATED_TOKEN)),
            (&[("sandbox-identity", "t"), ("authorization", "Bearer t")], Err(REPEATED_TOKEN)),
            (&[("x-sandbox-identity", "t"), ("sandbox_identity", "t")], Ok(None)),
            (&[("cookie", "sandbox-identity=t"), ("proxy-authorization", "Bearer t")], Ok(None)),
        ] {
            let mut head = RequestHeader::build("GET", b"/", None).unwrap();
            for (name, value) in fields {
                head.append_header(*name, *value).unwrap();
            }
            assert_eq!(find_token(&head), found, "{fields:?}");
        }
    }
}
