//! What must hold for any token whatsoever; run by the fuzzer and, for a while, by every test run.

use std::sync::OnceLock;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use certs::UnixTime;
use certs::identity::{
    IssueRequest, IssuerOptions, LocalIssuer, SigningAlgorithm, TrustDomain, Verifier,
    VerifyContext, inspect,
};
use serde_json::Value;

const AUDIENCE: &str = "memory";

/// An issuer, a verifier that believes it, and a token of its own.
struct TokenFuzzFixture {
    verifier: Verifier,
    token: String,
}

fn now() -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000))
}

/// Nobody but the issuer makes a token that is believed, and nothing makes the parser panic.
pub(crate) fn check_token(input: &[u8]) {
    static WORLD: OnceLock<Option<TokenFuzzFixture>> = OnceLock::new();
    let Some(world) = WORLD.get_or_init(make_fixture) else {
        panic!("no issuer to check against");
    };
    let text = String::from_utf8_lossy(input);
    assert_refused(world, &text);
    // The fuzzer rarely finds base64 by itself, so its bytes also stand for each part.
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

/// The other signature that everybody can make of an honest ECDSA one: (r, n - s) for (r, s).
#[allow(dead_code, reason = "the fuzzer has no single input to try")]
pub(crate) fn check_twin_signature() {
    const ORDER: &str = "ffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551";
    let Some(world) = make_fixture() else {
        panic!("no issuer to check against");
    };
    let Some((message, signature)) = world.token.rsplit_once('.') else {
        panic!("a token has three parts");
    };
    let mut octets = URL_SAFE_NO_PAD.decode(signature).unwrap_or_default();
    let mut borrow = 0;
    for index in (0..32).rev() {
        let order = ORDER.get(2 * index..2 * index + 2).map(|hex| i32::from_str_radix(hex, 16));
        let (Some(Ok(order)), Some(octet)) = (order, octets.get_mut(32 + index)) else {
            panic!("a signature has 64 octets");
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
    // The message and not the token: whoever has an ECDSA signature (r, s) also has (r, n - s).
    let message = |token: &str| token.rsplit_once('.').map(|(message, _)| message.to_owned());
    let honest = message(token) == message(&world.token);
    assert!(verdict.is_err() || honest, "believed: {token:?}");
    assert!(verdict.is_ok() || token != world.token, "refused: {token:?}");
    if let Ok(said) = inspect(token) {
        // What was read once reads the same again: there are no two ways to take it.
        let again = serde_json::to_string(&said.claims).ok();
        let again = again.and_then(|text| serde_json::from_str::<Value>(&text).ok());
        let said = drop_fractions(Value::Object(said.claims));
        assert!(
            again.is_some_and(|again| drop_fractions(again) == said),
            "two readings: {token:?}"
        );
    }
}

/// Without the numbers that are not whole, or too large to be: their last digit is nobody's claim, and reading
/// does not keep it.
fn drop_fractions(value: Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => Value::Null,
        Value::Array(list) => list.into_iter().map(drop_fractions).collect(),
        Value::Object(map) => {
            map.into_iter().map(|(name, value)| (name, drop_fractions(value))).collect()
        }
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
