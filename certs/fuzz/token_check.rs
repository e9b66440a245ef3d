//! Properties of every token; run by the fuzzer and, for a limited number of inputs, by every test run.

use std::sync::OnceLock;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use certs::UnixTime;
use certs::identity::{
    IssueRequest, IssuerOptions, LocalIssuer, SigningAlgorithm, TrustDomain, Verifier, VerifyContext, inspect,
};
use serde_json::Value;

const AUDIENCE: &str = "memory";

/// An issuer, a verifier that trusts it, and one of its tokens.
struct TokenFuzzFixture {
    verifier: Verifier,
    token: String,
}

fn now() -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000))
}

/// Checks that only the issuer can make a valid token, and that nothing makes the parser panic.
pub(crate) fn check_token(input: &[u8]) {
    static WORLD: OnceLock<Option<TokenFuzzFixture>> = OnceLock::new();
    let Some(world) = WORLD.get_or_init(make_fixture) else {
        panic!("the fixture has no issuer");
    };
    let text = String::from_utf8_lossy(input);
    assert_refused(world, &text);
    // The fuzzer rarely finds base64 on its own, so its bytes also replace each part.
    let part = URL_SAFE_NO_PAD.encode(input);
    let mut honest = world.token.split('.');
    let (header, claims, signature) = (honest.next(), honest.next(), honest.next());
    let [Some(header), Some(claims), Some(signature)] = [header, claims, signature] else {
        panic!("a token has three parts");
    };
    for token in [
        format!("{part}.{claims}.{signature}"),
        format!("{header}.{part}.{signature}"),
        format!("{header}.{claims}.{part}"),
        format!("{part}.{part}.{part}"),
    ] {
        assert_refused(world, &token);
    }
}

/// Checks the second signature that anyone can derive from an ECDSA signature: (r, n - s) from (r, s).
#[allow(dead_code, reason = "unused by the fuzzer, which needs no fixed inputs")]
pub(crate) fn check_twin_signature() {
    const ORDER: &str = "ffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551";
    let Some(world) = make_fixture() else {
        panic!("the fixture has no issuer");
    };
    let Some((message, signature)) = world.token.rsplit_once('.') else {
        panic!("a token has three parts");
    };
    let mut octets = URL_SAFE_NO_PAD.decode(signature).unwrap_or_default();
    let mut borrow = 0;
    for index in (0..32).rev() {
        let order = ORDER.get(2 * index..2 * index + 2).map(|hex| i32::from_str_radix(hex, 16));
        let (Some(Ok(order)), Some(octet)) = (order, octets.get_mut(32 + index)) else {
            panic!("a signature has 64 bytes");
        };
        let difference = order - i32::from(*octet) - borrow;
        borrow = i32::from(difference < 0);
        *octet = difference.rem_euclid(256) as u8;
    }
    let twin = format!("{message}.{}", URL_SAFE_NO_PAD.encode(octets));
    assert_ne!(twin, world.token);
    assert_refused(&world, &twin);
}

fn assert_refused(world: &TokenFuzzFixture, token: &str) {
    let verdict = world.verifier.verify(token, &VerifyContext::for_audience(AUDIENCE), now());
    // Compare messages, not tokens: anyone with an ECDSA signature (r, s) also has (r, n - s).
    let message = |token: &str| token.rsplit_once('.').map(|(message, _)| message.to_owned());
    let honest = message(token) == message(&world.token);
    assert!(verdict.is_err() || honest, "believed: {token:?}");
    assert!(verdict.is_ok() || token != world.token, "refused: {token:?}");
    if let Ok(parsed) = inspect(token) {
        // Serializing and parsing again gives the same claims: they have only one reading.
        let again = serde_json::to_string(&parsed.claims).ok();
        let again = again.and_then(|text| serde_json::from_str::<Value>(&text).ok());
        let claims = drop_fractions(Value::Object(parsed.claims));
        assert!(again.is_some_and(|again| drop_fractions(again) == claims), "two readings: {token:?}");
    }
}

/// Removes numbers that are not 64-bit integers: parsing does not preserve their last digit, and no claim
/// uses them.
fn drop_fractions(value: Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => Value::Null,
        Value::Array(list) => list.into_iter().map(drop_fractions).collect(),
        Value::Object(map) => map.into_iter().map(|(name, value)| (name, drop_fractions(value))).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value,
    }
}

fn make_fixture() -> Option<TokenFuzzFixture> {
    let dir = tempfile::tempdir().ok()?;
    let trust_domain = TrustDomain::parse("acme.example").ok()?;
    let options = IssuerOptions {
        issuer: "issuer".to_owned(),
        trust_domain,
        environments: None,
        algorithm: SigningAlgorithm::Es256,
    };
    let issuer = LocalIssuer::init(dir.path(), &options, now()).ok()?;
    let request = IssueRequest {
        tenant: "acme",
        environment: "staging",
        sandbox: "build-7",
        audience: AUDIENCE,
        life: Duration::from_secs(300),
        generation: None,
    };
    let token = issuer.issue(&request, now()).ok()?.expose().to_owned();
    let verifier = Verifier::new(vec![issuer.trusted_issuer().ok()?], None, now()).ok()?;
    Some(TokenFuzzFixture { verifier, token })
}
