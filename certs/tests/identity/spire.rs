//! Tokens as SPIRE, Vault and Kubernetes issue them, accepted only through a template.

use std::fs;
use std::path::Path;
use std::time::Duration;

use certs::identity::{
    Environment, IdentityError, IssueRequest, IssuerOptions, LocalIssuer, RequiredClaims, SigningAlgorithm,
    SigningKey, SubjectTemplate, Tenant, TrustDomain, TrustedIssuer, Verifier, VerifyContext,
};
use jsonwebtoken::EncodingKey;
use serde_json::{Value, json};

use super::{AUDIENCE, TokenForger};
use crate::{NOW, unix_time};

const SUBJECT: &str = "spiffe://prod.acme.example/ns/acme/sa/build-7";

/// A SPIRE server: a key, and the bundle it publishes.
struct SpireIssuer {
    forger: TokenForger,
    bundle: Value,
}

impl SpireIssuer {
    fn new() -> Self {
        let pair = rcgen::KeyPair::generate().unwrap();
        let key = EncodingKey::from_ec_der(pair.serialized_der());
        let jwk = jsonwebtoken::jwk::Jwk::from_encoding_key(&key, jsonwebtoken::Algorithm::ES256).unwrap();
        let jwk = serde_json::to_value(jwk).unwrap();
        // As printed by `spire-server bundle show -format spiffe`: keys for both uses, no `alg`.
        let bundle = json!({
            "keys": [
                { "use": "x509-svid", "kty": "EC", "crv": "P-256", "x": jwk["x"], "y": jwk["y"], "x5c": ["MAA="] },
                { "use": "jwt-svid", "kty": "EC", "kid": "C6vs25welZOx6WksNYfbMfiw9l96pMnD",
                  "crv": "P-256", "x": jwk["x"], "y": jwk["y"] },
            ],
            "spiffe_sequence": 7,
            "spiffe_refresh_hint": 300,
        });
        let kid = "C6vs25welZOx6WksNYfbMfiw9l96pMnD".to_owned();
        Self { forger: TokenForger { kid, key, algorithm: jsonwebtoken::Algorithm::ES256 }, bundle }
    }

    fn write(&self, dir: &Path) -> TrustedIssuer {
        let keys = dir.join("bundle.json");
        fs::write(&keys, self.bundle.to_string()).unwrap();
        TrustedIssuer {
            issuer: None,
            trust_domain: TrustDomain::parse("prod.acme.example").unwrap(),
            environments: None,
            tenants: None,
            algorithms: vec![SigningAlgorithm::Es256],
            claims: RequiredClaims::JwtSvid,
            subject: template(),
            life: TrustedIssuer::DEFAULT_LIFE,
            skew: Duration::from_secs(30),
            keys,
        }
    }
}

fn template() -> SubjectTemplate {
    let environment = Some(Environment::parse("production").unwrap());
    SubjectTemplate::parse("/ns/{tenant}/sa/{sandbox}", None, environment).unwrap()
}

/// The claims of a SPIRE token with default settings.
fn claims() -> Value {
    json!({ "aud": [AUDIENCE], "exp": NOW + 300, "iat": NOW, "sub": SUBJECT })
}

fn verify(verifier: &Verifier, token: &str) -> Result<String, IdentityError> {
    let identity = verifier.verify(token, &VerifyContext::for_audience(AUDIENCE), unix_time(NOW))?;
    Ok(identity.subject().to_string())
}

#[test]
fn p12_a_spire_token_names_a_sandbox_through_the_template() {
    let dir = tempfile::tempdir().unwrap();
    let spire = SpireIssuer::new();
    let verifier = Verifier::new(vec![spire.write(dir.path())], None, unix_time(NOW)).unwrap();
    let ours = "spiffe://prod.acme.example/tenant/acme/env/production/sandbox/build-7";
    for (what, change, expected) in [
        ("as issued", json!({}), Ok(ours)),
        ("with jti and nbf", json!({ "jti": "x", "nbf": NOW }), Ok(ours)),
        ("without iat", json!({ "iat": null }), Ok(ours)),
        ("without iat, too long", json!({ "iat": null, "exp": NOW + 601 }), Err(IdentityError::Life)),
        ("too long", json!({ "exp": NOW + 601 }), Err(IdentityError::Life)),
        ("without exp", json!({ "exp": null }), Err(IdentityError::ClaimMissing("exp"))),
        ("with a stranger's iss", json!({ "iss": "https://x.example" }), Err(IdentityError::UnknownIssuer)),
        ("two audiences", json!({ "aud": [AUDIENCE, "b"] }), Err(IdentityError::Audiences)),
        (
            "another domain",
            json!({ "sub": "spiffe://x.example/ns/acme/sa/b" }),
            Err(IdentityError::ClaimMissing("iss")),
        ),
        (
            "another path",
            json!({ "sub": "spiffe://prod.acme.example/host/acme/sa/b" }),
            Err(IdentityError::Subject),
        ),
        (
            "an agent",
            json!({ "sub": "spiffe://prod.acme.example/spire/agent/x" }),
            Err(IdentityError::Subject),
        ),
        ("our own form", json!({ "sub": ours }), Err(IdentityError::Subject)),
    ] {
        let mut claims = claims();
        for (name, value) in change.as_object().unwrap() {
            claims[name] = value.clone();
        }
        claims.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        let found = verify(&verifier, &spire.forger.sign(&claims));
        assert_eq!(found.as_deref().map_err(|error| *error), expected, "{what}");
    }
}

#[test]
fn p12_issuers_side_by_side_do_not_speak_for_each_other() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (spire, vault) = (SpireIssuer::new(), SigningKey::generate(SigningAlgorithm::Rs256).unwrap());
    let mut trusted_vault = SpireIssuer::new().write(two.path());
    trusted_vault.issuer = Some("https://vault.acme.example".to_owned());
    trusted_vault.algorithms = vec![SigningAlgorithm::Rs256];
    fs::write(&trusted_vault.keys, certs::identity::jwks([&vault]).to_string()).unwrap();
    let verifier = Verifier::new(vec![spire.write(one.path()), trusted_vault], None, unix_time(NOW)).unwrap();
    let mut claims = claims();
    assert!(verify(&verifier, &spire.forger.sign(&claims)).is_ok());
    claims["iss"] = "https://vault.acme.example".into();
    let refused = verify(&verifier, &spire.forger.sign(&claims));
    assert_eq!(refused, Err(IdentityError::UnknownKey), "SPIRE's key under Vault's name");
}

// proves: identity.issuer.environments, identity.issuer.tenants
#[test]
fn p12_an_issuer_names_its_own_environments_and_tenants_only() {
    let dir = tempfile::tempdir().unwrap();
    let made = |name: &str, environments: &[&str]| {
        let parse = |text: &&str| Environment::parse(text).unwrap();
        let options = IssuerOptions {
            issuer: format!("https://{name}.example"),
            trust_domain: TrustDomain::parse(&format!("{name}.acme.example")).unwrap(),
            environments: Some(environments.iter().map(parse).collect()),
            algorithm: SigningAlgorithm::Es256,
        };
        LocalIssuer::init(&dir.path().join(name), &options, unix_time(NOW)).unwrap()
    };
    let (staging, production) = (made("staging", &["staging", "trial"]), made("prod", &["production"]));
    let mut tenants = production.trusted_issuer().unwrap();
    tenants.tenants = Some(vec![Tenant::parse("acme").unwrap()]);
    let verifier =
        Verifier::new(vec![staging.trusted_issuer().unwrap(), tenants], None, unix_time(NOW)).unwrap();
    let key = |issuer: &LocalIssuer, name: &str| {
        TokenForger::from_key_file(&dir.path().join(name), issuer.key_ids().next().unwrap())
    };
    let (stolen, own) = (key(&staging, "staging"), key(&production, "prod"));
    for (forger, name, tenant, environment, refused) in [
        (&stolen, "staging", "acme", "staging", None),
        (&stolen, "staging", "other", "trial", None),
        (&stolen, "staging", "acme", "production", Some(IdentityError::Environment)),
        (&stolen, "staging", "acme", "Staging", Some(IdentityError::Environment)),
        (&own, "prod", "acme", "production", None),
        (&own, "prod", "acme", "staging", Some(IdentityError::Environment)),
        (&own, "prod", "other", "production", Some(IdentityError::Tenant)),
    ] {
        let mut claims = super::claims();
        claims["iss"] = format!("https://{name}.example").into();
        claims["sub"] =
            format!("spiffe://{name}.acme.example/tenant/{tenant}/env/{environment}/sandbox/build-7").into();
        let found = verify(&verifier, &forger.sign(&claims)).err();
        assert_eq!(found, refused, "{name}: {tenant} {environment}");
    }
    let request = IssueRequest { environment: "production", ..super::request() };
    assert!(staging.issue(&request, unix_time(NOW)).unwrap_err().to_string().contains("production"));
    let reopened = LocalIssuer::open(&dir.path().join("staging"), unix_time(NOW)).unwrap();
    assert!(reopened.issue(&request, unix_time(NOW)).is_err(), "the limit is stored with the issuer");
}

#[test]
fn p12_key_files_are_read_strictly() {
    let dir = tempfile::tempdir().unwrap();
    let spire = SpireIssuer::new();
    let jwk = spire.bundle["keys"][1].clone();
    let with = |change: Value| {
        let mut jwk = jwk.clone();
        jwk.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        jwk.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        json!({ "keys": [jwk] })
    };
    let weak = json!({ "keys": [{ "kty": "RSA", "kid": "a", "n": "AQAB", "e": "AQAB" }] });
    let rsa = certs::identity::jwks([&SigningKey::generate(SigningAlgorithm::Rs256).unwrap()]);
    let beside = |others: &[&Value]| {
        let keys: Vec<&Value> = std::iter::once(&jwk).chain(others.iter().copied()).collect();
        json!({ "keys": keys })
    };
    let p384 = json!({ "kty": "EC", "crv": "P-384", "kid": "b", "x": "AAAA", "y": "AAAA" });
    let pss = json!({ "kty": "RSA", "alg": "PS256", "kid": "c", "n": "AQAB", "e": "AQAB" });
    let empty_half = json!({ "kty": "EC", "crv": "P-256", "kid": "d", "d": null });
    let off_curve = json!({ "kty": "EC", "crv": "P-256", "kid": "e", "x": jwk["y"], "y": jwk["x"] });
    for (what, set, complaint) in [
        ("good", with(json!({})), None),
        ("says its algorithm", with(json!({ "alg": "ES256" })), None),
        ("with a stranger beside", json!({ "keys": [jwk, { "kty": "XYZ", "kid": "b" }] }), None),
        ("with keys of other algorithms beside", beside(&[&rsa["keys"][0], &p384, &pss]), None),
        ("for verifying", with(json!({ "key_ops": ["verify"] })), None),
        ("for encryption", with(json!({ "key_ops": ["encrypt"] })), Some("no key")),
        ("says another algorithm", with(json!({ "alg": "HS256" })), Some("no key")),
        ("without kid", with(json!({ "kid": null })), Some("no `kid`")),
        ("a kid that no token can name", with(json!({ "kid": "a b" })), Some("no `kid`")),
        ("an `exp` that is not a time", with(json!({ "exp": "soon" })), Some("not a JWK Set")),
        ("with its private half", with(json!({ "d": "AAAA" })), Some("private")),
        ("with half of its private half", with(json!({ "p": "AAAA" })), Some("private")),
        ("with an empty private half", beside(&[&empty_half]), Some("private")),
        ("with a malformed one beside", beside(&[&off_curve]), Some("not a usable")),
        ("symmetric", json!({ "keys": [{ "kty": "oct", "k": "AAAA", "kid": "a" }] }), Some("private")),
        ("not on the curve", with(json!({ "x": jwk["y"] })), Some("not a usable")),
        ("short coordinate", with(json!({ "x": "AAAA" })), Some("not a usable")),
        ("the same kid twice", json!({ "keys": [jwk, jwk] }), Some("same `kid` as another key")),
        ("an algorithm not allowed", rsa.clone(), Some("no key")),
        ("weak", weak, Some("no key")),
        ("for certificates only", json!({ "keys": [spire.bundle["keys"][0]] }), Some("no key")),
        ("empty", json!({ "keys": [] }), Some("no key")),
        ("too many", json!({ "keys": vec![jwk.clone(); 65] }), Some("more than 64")),
        ("not a set", json!({}), Some("not a JWK Set")),
    ] {
        let trusted = spire.write(dir.path());
        fs::write(&trusted.keys, set.to_string()).unwrap();
        let error = Verifier::new(vec![trusted], None, unix_time(NOW)).err().map(|error| error.to_string());
        match (complaint, &error) {
            (None, None) => {}
            (Some(expected), Some(found)) => assert!(found.contains(expected), "{what}: {found}"),
            (None, Some(_)) | (Some(_), None) => panic!("{what}: {error:?}"),
        }
    }
    let mut weak_rsa = spire.write(dir.path());
    weak_rsa.algorithms = vec![SigningAlgorithm::Rs256];
    fs::write(
        &weak_rsa.keys,
        json!({ "keys": [{ "kty": "RSA", "kid": "a", "n": "AQAB", "e": "AQAB" }] }).to_string(),
    )
    .unwrap();
    assert!(
        Verifier::new(vec![weak_rsa], None, unix_time(NOW)).unwrap_err().to_string().contains("not a usable")
    );
}

#[test]
fn what_an_operator_must_not_configure() {
    let dir = tempfile::tempdir().unwrap();
    let good = SpireIssuer::new().write(dir.path());
    let change = |alter: fn(&mut TrustedIssuer)| {
        let mut issuer = good.clone();
        alter(&mut issuer);
        vec![issuer]
    };
    for (what, issuers) in [
        ("no algorithm", change(|issuer| issuer.algorithms.clear())),
        ("too long a life", change(|issuer| issuer.life = Duration::from_secs(3601))),
        ("too much skew", change(|issuer| issuer.skew = Duration::from_secs(31))),
        ("nameless and ours", change(|issuer| issuer.claims = RequiredClaims::Ours)),
        ("twice", vec![good.clone(), good.clone()]),
    ] {
        assert!(Verifier::new(issuers, None, unix_time(NOW)).is_err(), "{what}");
    }
}
