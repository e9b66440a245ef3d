//! The local issuer and the tokens for services, checked with a strict reader from another library.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use certs::identity::{IssueRequest, LocalIssuer, SigningAlgorithm, SigningKey, Subject};
use certs::service_token::{MAX_TOKENS, ServiceClaims, ServiceProfile, ServiceTokenError, ServiceTokens};
use jsonwebtoken::jwk::JwkSet;
use jsonwebtoken::{DecodingKey, Validation};
use serde_json::Value;

use super::{AUDIENCE, ISSUER, IssuerFixture, SUBJECT, options, request};
use crate::{NOW, unix_time};

/// Reads a token with a JWK Set as a careful service would, except for the clock, which it cannot set.
fn decode_as_service(
    token: &str,
    set: &Value,
    algorithm: SigningAlgorithm,
    audience: &str,
    issuer: &str,
) -> Value {
    let set: JwkSet = serde_json::from_value(set.clone()).unwrap();
    let header = jsonwebtoken::decode_header(token).unwrap();
    let key = DecodingKey::from_jwk(set.find(&header.kid.unwrap()).unwrap()).unwrap();
    let mut validation = Validation::new(match algorithm {
        SigningAlgorithm::EdDsa => jsonwebtoken::Algorithm::EdDSA,
        SigningAlgorithm::Es256 => jsonwebtoken::Algorithm::ES256,
        SigningAlgorithm::Rs256 => jsonwebtoken::Algorithm::RS256,
    });
    validation.set_audience(&[audience]);
    validation.set_issuer(&[issuer]);
    validation.set_required_spec_claims(&["exp", "nbf", "iat", "aud", "iss", "sub"]);
    validation.validate_exp = false;
    jsonwebtoken::decode::<Value>(token, &key, &validation).unwrap().claims
}

#[test]
fn every_algorithm_is_verified_by_us_and_by_others() {
    for algorithm in [SigningAlgorithm::EdDsa, SigningAlgorithm::Es256, SigningAlgorithm::Rs256] {
        let world = IssuerFixture::with_algorithm(algorithm, None);
        let token = world.token();
        assert_eq!(world.verify(&token).as_deref(), Ok(SUBJECT), "{algorithm:?}");
        let claims = decode_as_service(
            &token,
            &world.issuer.jwks(unix_time(NOW)).unwrap(),
            algorithm,
            AUDIENCE,
            ISSUER,
        );
        assert_eq!(claims["sub"], SUBJECT);
        assert_eq!(claims["exp"], NOW + 300);
        assert_eq!(claims["sid"], "3");
        assert_eq!(claims["jti"].as_str().unwrap().len(), 32, "128 bits");
        assert_ne!(world.token(), token, "every token is unique");
    }
}

#[test]
fn what_the_issuer_will_not_say() {
    let world = IssuerFixture::new();
    let life = Duration::from_secs;
    for (what, request, good) in [
        ("good", request(), true),
        ("ten minutes", IssueRequest { life: life(600), ..request() }, true),
        ("too long", IssueRequest { life: life(601), ..request() }, false),
        ("no life", IssueRequest { life: life(0), ..request() }, false),
        ("empty sandbox", IssueRequest { sandbox: "", ..request() }, false),
        ("a path", IssueRequest { sandbox: "a/b", ..request() }, false),
        ("dots", IssueRequest { tenant: "..", ..request() }, false),
        ("space", IssueRequest { environment: "a b", ..request() }, false),
        ("long", IssueRequest { sandbox: &"a".repeat(250), ..request() }, false),
        ("no audience", IssueRequest { audience: "", ..request() }, false),
        ("audience with a newline", IssueRequest { audience: "a\nb", ..request() }, false),
    ] {
        assert_eq!(world.issuer.issue(&request, unix_time(NOW)).is_ok(), good, "{what}");
    }
    assert!(world.issuer.issue(&request(), unix_time(NOW - 1)).is_err(), "before its first key");
}

#[test]
fn keys_are_readable_by_their_owner_only_and_never_shown() {
    let world = IssuerFixture::new();
    let dir = world.dir.path().join("issuer");
    let kid = world.issuer.key_ids().next().unwrap();
    let path = dir.join(format!("{kid}.key"));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let secret = fs::read_to_string(&path).unwrap();
    let line = secret.lines().nth(1).unwrap();
    let token = world.issuer.issue(&request(), unix_time(NOW)).unwrap();
    let signing = SigningKey::load(&path).unwrap();
    let shown = format!("{:?} {:?} {token:?} {signing:?}", world.issuer, world.verifier);
    assert!(!shown.contains(line) && !shown.contains(token.expose()));
    let published = world.issuer.jwks(unix_time(NOW)).unwrap().to_string();
    assert!(!published.contains("\"d\""), "{published}");
    assert!(LocalIssuer::init(&dir, &options(SigningAlgorithm::Es256), unix_time(NOW)).is_err(), "not twice");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(world.issuer.issue(&request(), unix_time(NOW)).unwrap_err().to_string().contains("chmod 600"));
}

#[test]
fn keys_without_their_description_are_not_written_over() {
    for kept in ["jwks.json", "key"] {
        let dir = tempfile::tempdir().unwrap();
        let init = || LocalIssuer::init(dir.path(), &options(SigningAlgorithm::Es256), unix_time(NOW));
        let kid = init().unwrap().key_ids().next().unwrap().to_owned();
        let keep = if kept == "key" { format!("{kid}.key") } else { kept.to_owned() };
        for entry in fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()) {
            if !entry.ends_with(&keep) {
                fs::remove_file(entry).unwrap();
            }
        }
        let before = fs::read(dir.path().join(&keep)).unwrap();
        let refused = init().unwrap_err().to_string();
        assert!(refused.contains(&keep) && refused.contains("start over"), "{refused}");
        assert_eq!(fs::read(dir.path().join(&keep)).unwrap(), before);
    }
}

fn subject() -> Subject {
    Subject::new("acme.example", "acme", "staging", "build-7").unwrap()
}

fn service_tokens(
    algorithm: SigningAlgorithm,
    profile: ServiceProfile,
) -> Result<ServiceTokens, ServiceTokenError> {
    ServiceTokens::new(SigningKey::generate(algorithm).unwrap(), ISSUER, profile, Duration::from_secs(60))
}

fn service_claims<'a>(subject: &'a Subject, banks: &'a [String]) -> ServiceClaims<'a> {
    ServiceClaims { subject, audience: "memory", banks, certificate: None }
}

#[test]
fn a_service_verifies_what_we_sign_for_it() {
    let banks = ["staging:team-a".to_owned()];
    for (algorithm, profile) in [
        (SigningAlgorithm::Es256, ServiceProfile::Generic),
        (SigningAlgorithm::Rs256, ServiceProfile::Generic),
        (SigningAlgorithm::Rs256, ServiceProfile::Astrocyte),
    ] {
        let tokens = service_tokens(algorithm, profile).unwrap();
        let subject = subject();
        let bound = ServiceClaims { certificate: Some(&[7; 32]), ..service_claims(&subject, &banks) };
        let token = tokens.token(&bound, unix_time(NOW)).unwrap();
        let claims =
            decode_as_service(token.expose(), &tokens.jwks(unix_time(NOW)), algorithm, "memory", ISSUER);
        assert_eq!(claims["sub"], SUBJECT);
        assert_eq!(claims["act"]["sub"], ISSUER);
        assert_eq!((&claims["tid"], &claims["env"]), (&"acme".into(), &"staging".into()));
        assert_eq!(claims["banks"][0], "staging:team-a");
        assert_eq!(claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap(), 60);
        assert_eq!(claims["cnf"]["x5t#S256"].as_str().unwrap().len(), 43);
        let principal = claims.get("astrocyte_principal").and_then(Value::as_str);
        assert_eq!(principal, (profile == ServiceProfile::Astrocyte).then_some("agent:build-7"));
    }
}

#[test]
fn a_service_token_is_kept_for_half_its_life_and_for_its_claims_only() {
    let tokens = service_tokens(SigningAlgorithm::Es256, ServiceProfile::Generic).unwrap();
    let (mine, other) = (subject(), Subject::new("acme.example", "acme", "staging", "trial-2").unwrap());
    let banks = ["a".to_owned()];
    let first = tokens.token(&service_claims(&mine, &[]), unix_time(NOW)).unwrap();
    for (what, claims, now, same) in [
        ("again", service_claims(&mine, &[]), NOW, true),
        ("just before half", service_claims(&mine, &[]), NOW + 29, true),
        ("another sandbox", service_claims(&other, &[]), NOW, false),
        ("another bank", service_claims(&mine, &banks), NOW, false),
        ("another audience", ServiceClaims { audience: "b", ..service_claims(&mine, &[]) }, NOW, false),
        ("half its life", service_claims(&mine, &[]), NOW + 30, false),
    ] {
        assert_eq!(Arc::ptr_eq(&tokens.token(&claims, unix_time(now)).unwrap(), &first), same, "{what}");
    }
    let before = tokens.token(&service_claims(&mine, &[]), unix_time(NOW - 1)).unwrap();
    assert!(!Arc::ptr_eq(&before, &first), "after the clock is set back, no token from the future");
}

#[test]
fn a_new_key_is_published_beside_the_old_until_its_tokens_have_ended() {
    let old = service_tokens(SigningAlgorithm::Es256, ServiceProfile::Generic).unwrap();
    let subject = subject();
    let before = old.token(&service_claims(&subject, &[]), unix_time(NOW)).unwrap();
    let new = service_tokens(SigningAlgorithm::Es256, ServiceProfile::Generic)
        .unwrap()
        .with_previous(&old, unix_time(NOW));
    let new = new.with_actor("spiffe://acme.example/sandbar/host-1").unwrap();
    let after = new.token(&service_claims(&subject, &[]), unix_time(NOW)).unwrap();
    for (token, actor) in [(&before, ISSUER), (&after, "spiffe://acme.example/sandbar/host-1")] {
        let set = new.jwks(unix_time(NOW + 89));
        let claims = decode_as_service(token.expose(), &set, SigningAlgorithm::Es256, "memory", ISSUER);
        assert_eq!(claims["act"]["sub"], actor);
    }
    for (now, keys) in [(NOW + 89, 2), (NOW + 90, 1)] {
        assert_eq!(new.jwks(unix_time(now))["keys"].as_array().unwrap().len(), keys, "{now}");
    }
    assert!(new.with_actor("a b").is_err());
}

#[test]
fn p17_service_tokens_are_bounded() {
    let tokens = service_tokens(SigningAlgorithm::Es256, ServiceProfile::Generic).unwrap();
    for number in 0..MAX_TOKENS + 200 {
        let subject = Subject::new("acme.example", "acme", "staging", &format!("s{number}")).unwrap();
        tokens.token(&service_claims(&subject, &[]), unix_time(NOW)).unwrap();
    }
    assert!(tokens.len() <= MAX_TOKENS);
    let many = vec!["a".to_owned(); 65];
    assert!(tokens.token(&service_claims(&subject(), &many), unix_time(NOW)).is_err());
    assert!(tokens.token(&service_claims(&subject(), &["a\nb".to_owned()]), unix_time(NOW)).is_err());
    for (length, good) in [(40, true), (255, false)] {
        let banks: Vec<String> = (0..64).map(|number| format!("{number:0>length$}")).collect();
        let token = tokens.token(&service_claims(&subject(), &banks), unix_time(NOW));
        assert_eq!(token.is_ok(), good, "64 banks of {length} characters");
    }
    for life in [0, 3, 61, 3600] {
        let key = SigningKey::generate(SigningAlgorithm::Es256).unwrap();
        let made = ServiceTokens::new(key, ISSUER, ServiceProfile::Generic, Duration::from_secs(life));
        assert!(matches!(made, Err(ServiceTokenError::Life)), "{life}");
    }
    assert!(
        service_tokens(SigningAlgorithm::Es256, ServiceProfile::Astrocyte).is_err(),
        "it accepts RS256 only"
    );
    assert!(service_tokens(SigningAlgorithm::EdDsa, ServiceProfile::Generic).is_err());
}
