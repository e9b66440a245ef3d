//! Attacks on the token itself. Attacks on the channel (another sandbox's token, duplicate headers, a bank of
//! another environment) are stopped where the channel is known; here the tests show which sandbox such a token names.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use certs::identity::{IdentityError, MAX_TOKEN, SigningAlgorithm, VerifyContext};
use jsonwebtoken::EncodingKey;
use serde_json::{Value, json};

use super::{AUDIENCE, IssuerFixture, SUBJECT, TokenForger, claims};
use crate::{NOW, unix_time};

type TokenRefusal = IdentityError;

#[test]
fn p12_an_honest_token_passes_whichever_library_wrote_it() {
    let world = IssuerFixture::new();
    for token in [world.token(), world.forger().sign(&claims()), world.forger().sign_plainly(&claims())] {
        assert_eq!(world.verify(&token).as_deref(), Ok(SUBJECT));
        assert_eq!(world.verify(&token).as_deref(), Ok(SUBJECT), "and again, until it expires");
    }
}

#[test]
fn p12_attacks_1_to_3_absent_random_and_changed() {
    let world = IssuerFixture::new();
    let token = world.token();
    let (message, signature) = token.rsplit_once('.').unwrap();
    let random = URL_SAFE_NO_PAD.encode([7; 64]);
    for (what, token, refused) in [
        ("1 absent", String::new(), TokenRefusal::Absent),
        ("1 blank", " ".to_owned(), TokenRefusal::Malformed),
        ("2 random signature", format!("{message}.{random}"), TokenRefusal::Signature),
        (
            "2 zero signature",
            format!("{message}.{}", URL_SAFE_NO_PAD.encode([0; 64])),
            TokenRefusal::Signature,
        ),
        (
            "2 short signature",
            format!("{message}.{}", URL_SAFE_NO_PAD.encode([7; 63])),
            TokenRefusal::Signature,
        ),
        (
            "2 signature of another message",
            format!("{}.{signature}", swap_claims(message)),
            TokenRefusal::Signature,
        ),
    ] {
        assert_eq!(world.verify(&token), Err(refused), "{what}");
    }
    for position in 0..token.len() {
        let changed = change_character(&token, position);
        assert!(world.verify(&changed).is_err(), "3 changed at {position}");
    }
}

#[test]
fn p12_attacks_4_and_5_the_algorithm_is_the_keys_and_not_the_tokens() {
    let world = IssuerFixture::new();
    let forger = world.forger();
    for algorithm in
        ["none", "None", "nOnE", "NONE", "", "HS256", "RS256", "ES384", "EdDSA", "es256", "ES256 "]
    {
        let header = json!({ "alg": algorithm, "kid": forger.kid, "typ": "JWT" }).to_string();
        let signed = forger.sign_text(&header, &claims().to_string());
        let unsigned = format!("{}.", signed.rsplit_once('.').unwrap().0);
        for token in [signed, unsigned] {
            assert_eq!(world.verify(&token), Err(TokenRefusal::Algorithm), "4 {algorithm}");
        }
    }
    for secret in
        [world.issuer.jwks(unix_time(NOW)).unwrap().to_string(), public_point(&world), forger.kid.clone()]
    {
        let confused = TokenForger {
            kid: forger.kid.clone(),
            key: EncodingKey::from_secret(secret.as_bytes()),
            algorithm: jsonwebtoken::Algorithm::HS256,
        };
        let honest_header = confused.sign(&claims());
        assert_eq!(world.verify(&honest_header), Err(TokenRefusal::Signature), "5 says ES256");
        assert_eq!(
            world.verify(&confused.sign_plainly(&claims())),
            Err(TokenRefusal::Algorithm),
            "5 says HS256"
        );
    }
}

#[test]
fn p12_attack_6_headers_that_would_choose_the_key() {
    let world = IssuerFixture::new();
    let forger = world.forger();
    let own = json!({ "kty": "EC", "crv": "P-256", "x": "AA", "y": "AA" });
    for (what, header, refused) in [
        ("kid traversal", json!({ "alg": "ES256", "kid": "../../etc/passwd" }), TokenRefusal::UnknownKey),
        ("kid unknown", json!({ "alg": "ES256", "kid": "other" }), TokenRefusal::UnknownKey),
        ("kid injection", json!({ "alg": "ES256", "kid": "' OR 1=1 --" }), TokenRefusal::Header),
        ("kid a number", json!({ "alg": "ES256", "kid": 1 }), TokenRefusal::Header),
        ("kid absent", json!({ "alg": "ES256" }), TokenRefusal::UnknownKey),
        ("alg absent", json!({ "kid": forger.kid }), TokenRefusal::Header),
        ("alg a list", json!({ "alg": ["ES256"], "kid": forger.kid }), TokenRefusal::Header),
        ("jwk", json!({ "alg": "ES256", "kid": forger.kid, "jwk": own }), TokenRefusal::Header),
        (
            "jku",
            json!({ "alg": "ES256", "kid": forger.kid, "jku": "https://evil.example" }),
            TokenRefusal::Header,
        ),
        (
            "x5u",
            json!({ "alg": "ES256", "kid": forger.kid, "x5u": "https://evil.example" }),
            TokenRefusal::Header,
        ),
        ("x5c", json!({ "alg": "ES256", "kid": forger.kid, "x5c": ["AA"] }), TokenRefusal::Header),
        ("crit", json!({ "alg": "ES256", "kid": forger.kid, "crit": ["exp"] }), TokenRefusal::Header),
        ("b64", json!({ "alg": "ES256", "kid": forger.kid, "b64": false }), TokenRefusal::Header),
        ("zip", json!({ "alg": "ES256", "kid": forger.kid, "zip": "DEF" }), TokenRefusal::Header),
        ("strange typ", json!({ "alg": "ES256", "kid": forger.kid, "typ": "at+jwt" }), TokenRefusal::Header),
        ("typ a list", json!({ "alg": "ES256", "kid": forger.kid, "typ": [] }), TokenRefusal::Header),
    ] {
        let token = forger.sign_text(&header.to_string(), &claims().to_string());
        assert_eq!(world.verify(&token), Err(refused), "6 {what}");
    }
    for typ in ["JWT", "JOSE"] {
        let header = json!({ "alg": "ES256", "kid": forger.kid, "typ": typ }).to_string();
        let token = forger.sign_text(&header, &claims().to_string());
        assert_eq!(world.verify(&token).as_deref(), Ok(SUBJECT), "{typ}");
    }
}

/// Each row sets a claim (or removes it, if null) in otherwise good claims signed by the right key.
fn assert_spoiled(rows: &[(&str, Value, Option<TokenRefusal>)]) {
    let world = IssuerFixture::new();
    let forger = world.forger();
    for (name, value, refused) in rows {
        let mut claims = claims();
        match value {
            Value::Null => drop(claims.as_object_mut().unwrap().remove(*name)),
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
                claims[*name] = value.clone();
            }
        }
        assert_eq!(world.verify(&forger.sign(&claims)).err(), *refused, "{name} = {value:.60}");
    }
}

#[test]
fn p12_attack_7_times() {
    let malformed = |name| Some(TokenRefusal::ClaimMalformed(name));
    assert_spoiled(&[
        ("exp", json!(NOW - 31), Some(TokenRefusal::Expired)),
        ("exp", json!(NOW - 1000), Some(TokenRefusal::Expired)),
        ("exp", Value::Null, Some(TokenRefusal::ClaimMissing("exp"))),
        ("exp", json!(NOW as f64 + 300.5), malformed("exp")),
        ("exp", json!((NOW + 300).to_string()), malformed("exp")),
        ("exp", json!(u64::MAX), malformed("exp")),
        ("exp", json!(1e300), malformed("exp")),
        ("exp", json!(-1), malformed("exp")),
        ("exp", json!([NOW + 300]), malformed("exp")),
        ("exp", json!(true), malformed("exp")),
        ("exp", json!(NOW + 601), Some(TokenRefusal::Life)),
        ("exp", json!(253_402_300_799_u64), Some(TokenRefusal::Life)),
        ("exp", json!(NOW + 600), None),
        ("nbf", json!(NOW + 31), Some(TokenRefusal::NotYetValid)),
        ("nbf", json!(NOW + 30), None),
        ("nbf", Value::Null, Some(TokenRefusal::ClaimMissing("nbf"))),
        ("nbf", json!("now"), malformed("nbf")),
        ("iat", json!(NOW + 31), Some(TokenRefusal::NotYetValid)),
        ("iat", json!(NOW + 30), None),
        ("iat", json!(NOW - 301), Some(TokenRefusal::Life)),
        ("iat", json!(0), Some(TokenRefusal::Life)),
        ("iat", Value::Null, Some(TokenRefusal::ClaimMissing("iat"))),
        ("iat", json!(0.5), malformed("iat")),
    ]);
    let world = IssuerFixture::new();
    let within = json!({ "exp": NOW - 29, "nbf": NOW - 300, "iat": NOW - 300 });
    let mut claims = claims();
    claims.as_object_mut().unwrap().extend(within.as_object().unwrap().clone());
    assert_eq!(world.verify(&world.forger().sign(&claims)).as_deref(), Ok(SUBJECT), "small skew");
    claims["iat"] = (NOW - 10).into();
    claims["nbf"] = (NOW - 10).into();
    assert_eq!(
        world.verify(&world.forger().sign(&claims)),
        Err(TokenRefusal::Expired),
        "expires before it is issued"
    );
}

#[test]
fn p12_attacks_8_and_9_audience_and_issuer() {
    let malformed = |name| Some(TokenRefusal::ClaimMalformed(name));
    assert_spoiled(&[
        ("aud", json!("other"), Some(TokenRefusal::Audience)),
        ("aud", json!(AUDIENCE.to_uppercase()), Some(TokenRefusal::Audience)),
        ("aud", json!([AUDIENCE]), None),
        ("aud", json!([AUDIENCE, "other"]), Some(TokenRefusal::Audiences)),
        ("aud", json!([AUDIENCE, AUDIENCE]), Some(TokenRefusal::Audiences)),
        ("aud", json!([]), malformed("aud")),
        ("aud", json!([[AUDIENCE]]), malformed("aud")),
        ("aud", json!({ "0": AUDIENCE }), malformed("aud")),
        ("aud", json!(""), malformed("aud")),
        ("aud", Value::Null, Some(TokenRefusal::ClaimMissing("aud"))),
        ("iss", json!("https://evil.example"), Some(TokenRefusal::UnknownIssuer)),
        ("iss", json!("https://issuer.acme.example/"), Some(TokenRefusal::UnknownIssuer)),
        ("iss", json!("HTTPS://issuer.acme.example"), Some(TokenRefusal::UnknownIssuer)),
        ("iss", json!(["https://issuer.acme.example"]), malformed("iss")),
        ("iss", Value::Null, Some(TokenRefusal::ClaimMissing("iss"))),
        ("jti", Value::Null, Some(TokenRefusal::ClaimMissing("jti"))),
        ("jti", json!(7), malformed("jti")),
        ("jti", json!("a\nb"), malformed("jti")),
        ("jti", json!("a".repeat(256)), malformed("jti")),
    ]);
}

#[test]
fn p12_attack_10_another_sandboxes_token_names_that_sandbox() {
    let world = IssuerFixture::new();
    let mut claims = claims();
    claims["sub"] = SUBJECT.replace("build-7", "trial-2").into();
    let token = world.forger().sign(&claims);
    let identity =
        world.verifier.verify(&token, &VerifyContext::for_audience(AUDIENCE), unix_time(NOW)).unwrap();
    assert_eq!(identity.subject().sandbox.as_str(), "trial-2", "the caller compares, and refuses");
    assert_eq!(identity.generation(), Some(3));
    assert_eq!(identity.expires_at(), NOW + 300);
}

#[test]
fn p12_attack_11_a_recreated_sandbox_refuses_its_predecessors_tokens() {
    let sandbox = json!({ "tenant": "acme", "environment": "staging", "sandbox": "build-7", "oldest": 4 });
    let world =
        IssuerFixture::with_algorithm(SigningAlgorithm::Es256, Some(&json!({ "generations": [sandbox] })));
    for (generation, refused) in [
        (json!("3"), Some(TokenRefusal::Generation)),
        (json!("4"), None),
        (json!("5"), None),
        (Value::Null, Some(TokenRefusal::Generation)),
        (json!(4), Some(TokenRefusal::ClaimMalformed("sid"))),
        (json!("04"), Some(TokenRefusal::ClaimMalformed("sid"))),
        (json!("-4"), Some(TokenRefusal::ClaimMalformed("sid"))),
        (json!("+4"), Some(TokenRefusal::ClaimMalformed("sid"))),
        (json!("99999999999999999999"), Some(TokenRefusal::ClaimMalformed("sid"))),
    ] {
        let mut claims = claims();
        claims["sid"] = generation.clone();
        if generation.is_null() {
            claims.as_object_mut().unwrap().remove("sid");
        }
        assert_eq!(world.verify(&world.forger().sign(&claims)).err(), refused, "{generation}");
    }
}

#[test]
fn attack_12_the_token_may_be_used_until_its_end() {
    let world = IssuerFixture::new();
    let token = world.token();
    for second in 0..300 {
        assert_eq!(world.verify_at(&token, NOW + second).as_deref(), Ok(SUBJECT), "{second}");
    }
    assert_eq!(world.verify_at(&token, NOW + 330), Err(TokenRefusal::Expired), "cached or not");
    assert_eq!(world.verifier.cached_tokens(), 1);
}

/// 14 and 15, as far as they concern the token: several in one value are not one.
#[test]
fn p12_attacks_14_and_15_several_tokens_in_one_value() {
    let world = IssuerFixture::new();
    let (token, forged) = (world.token(), change_character(&world.token(), 200));
    for value in [
        format!("{token},{forged}"),
        format!("{forged},{token}"),
        format!("{token}, {token}"),
        format!(",{token}"),
        format!("{token} "),
        format!(" {token}"),
        format!("Bearer {token}"),
        format!("{token}.{token}"),
        format!("{token}."),
        format!("{token}\n"),
        format!("{token}\0"),
    ] {
        assert_eq!(world.verify(&value), Err(TokenRefusal::Malformed), "{value:.20}");
    }
}

#[test]
fn p12_attack_16_two_ways_to_read_one_token() {
    let world = IssuerFixture::new();
    let forger = world.forger();
    let good = claims().to_string();
    let header = forger.header().to_string();
    let victim = SUBJECT.replace("build-7", "victim");
    let twice = |member: &str| good.replacen('{', &format!("{{{member},"), 1);
    for (what, header, text, refused) in [
        ("sub twice", &header, twice(&format!(r#""sub":"{victim}""#)), TokenRefusal::Duplicate),
        ("sub twice, the same", &header, twice(&format!(r#""sub":"{SUBJECT}""#)), TokenRefusal::Duplicate),
        ("sub twice, escaped", &header, twice(&format!(r#""s\u0075b":"{victim}""#)), TokenRefusal::Duplicate),
        ("exp twice", &header, twice(r#""exp":1"#), TokenRefusal::Duplicate),
        ("deep duplicate", &header, twice(r#""x":{"a":1,"a":2}"#), TokenRefusal::Duplicate),
        ("alg twice", &header.replacen('{', r#"{"alg":"none","#, 1), good.clone(), TokenRefusal::Duplicate),
        ("two documents", &header, format!("{good}{good}"), TokenRefusal::Malformed),
        ("trailing text", &header, format!("{good}x"), TokenRefusal::Malformed),
        ("a list", &header, format!("[{good}]"), TokenRefusal::Malformed),
        ("not JSON", &header, "sub=build-7".to_owned(), TokenRefusal::Malformed),
        ("byte order mark", &header, format!("\u{feff}{good}"), TokenRefusal::Malformed),
        ("header not JSON", &"alg".to_owned(), good.clone(), TokenRefusal::Malformed),
    ] {
        assert_eq!(world.verify(&forger.sign_text(header, &text)), Err(refused), "16 {what}");
    }
    let token = world.token();
    for (what, changed) in [
        ("padding", format!("{token}=")),
        ("other alphabet", token.replace('.', "+.")),
        ("stray bits", stray_bits(&token)),
        ("newline inside", token.replacen('.', ".\n", 1)),
    ] {
        assert_eq!(world.verify(&changed), Err(TokenRefusal::Malformed), "16 {what}");
    }
}

#[test]
fn p17_attack_17_oversized_and_deep() {
    let world = IssuerFixture::new();
    let forger = world.forger();
    let mut large = claims();
    large["x"] = "a".repeat(64 * 1024).into();
    assert_eq!(world.verify(&forger.sign(&large)), Err(TokenRefusal::TooLarge));
    assert_eq!(world.verify(&"a".repeat(MAX_TOKEN + 1)), Err(TokenRefusal::TooLarge));
    assert_eq!(world.verify(&".".repeat(MAX_TOKEN)), Err(TokenRefusal::Malformed));
    let deep = format!(r#"{{"x":{}1{}}}"#, "[".repeat(1000), "]".repeat(1000));
    assert_eq!(
        world.verify(&forger.sign_text(&forger.header().to_string(), &deep)),
        Err(TokenRefusal::Malformed)
    );
}

#[test]
fn p12_attacks_18_to_20_environment_and_look_alikes() {
    let with = |sandbox: &str| json!(SUBJECT.replace("build-7", sandbox));
    let subject = Some(TokenRefusal::Subject);
    let malformed = Some(TokenRefusal::ClaimMalformed("sub"));
    assert_spoiled(&[
        ("sub", json!(SUBJECT.replace("/env/staging", "")), subject),
        ("sub", json!(SUBJECT.replace("staging", "")), subject),
        ("sub", json!(SUBJECT.replace("staging", "staging/env/production")), subject),
        ("sub", json!(SUBJECT.replace("acme.example", "evil.example")), Some(TokenRefusal::TrustDomain)),
        ("sub", json!(SUBJECT.replace("acme.example", "ACME.example")), subject),
        ("sub", with("build-7/"), subject),
        ("sub", with("../build-7"), subject),
        ("sub", with("build%2d7"), subject),
        ("sub", with("build-7\u{a0}"), malformed),
        ("sub", with("ｂuild-7"), malformed),
        ("sub", with("build-7 "), malformed),
        ("sub", with("bu\u{200b}ild-7"), malformed),
        ("sub", json!([SUBJECT]), malformed),
        ("sub", Value::Null, Some(TokenRefusal::ClaimMissing("sub"))),
    ]);
    let world = IssuerFixture::new();
    for other in ["Build-7", "BUILD-7", "build-7.", "build_7"] {
        let mut claims = claims();
        claims["sub"] = with(other);
        let named = world.verify(&world.forger().sign(&claims)).unwrap();
        assert_ne!(named, SUBJECT, "20 {other} is compared byte by byte and is not build-7");
    }
}

#[test]
fn p12_a_token_bound_to_a_certificate_needs_that_certificate() {
    let world = IssuerFixture::new();
    let bound_to = |value: Value| {
        let mut claims = claims();
        claims["cnf"] = value;
        world.forger().sign(&claims)
    };
    let (mine, other) = ([1; 32], [2; 32]);
    let print = URL_SAFE_NO_PAD.encode(mine);
    let good = bound_to(json!({ "x5t#S256": print }));
    for (what, token, presented, refused) in [
        ("right", &good, Some(&mine), None),
        ("right, remembered", &good, Some(&mine), None),
        ("another's, remembered", &good, Some(&other), Some(TokenRefusal::Confirmation)),
        ("none, remembered", &good, None, Some(TokenRefusal::Confirmation)),
        ("unknown kind", &bound_to(json!({ "jkt": print })), Some(&mine), Some(TokenRefusal::Confirmation)),
        (
            "two kinds",
            &bound_to(json!({ "x5t#S256": print, "jkt": "x" })),
            Some(&mine),
            Some(TokenRefusal::Confirmation),
        ),
        ("empty", &bound_to(json!({})), Some(&mine), Some(TokenRefusal::Confirmation)),
        ("text", &bound_to(json!(print)), Some(&mine), Some(TokenRefusal::Confirmation)),
        ("short", &bound_to(json!({ "x5t#S256": "AAAA" })), Some(&mine), Some(TokenRefusal::Confirmation)),
    ] {
        let expected = VerifyContext { audience: AUDIENCE, certificate: presented };
        assert_eq!(world.verifier.verify(token, &expected, unix_time(NOW)).err(), refused, "{what}");
    }
}

#[test]
fn p12_only_good_tokens_are_remembered_and_only_for_their_audience() {
    let world = IssuerFixture::new();
    for position in (0..300).step_by(7) {
        assert!(world.verify(&change_character(&world.token(), position)).is_err());
    }
    assert_eq!(world.verifier.cached_tokens(), 0);
    let token = world.token();
    assert!(world.verify(&token).is_ok());
    let elsewhere = world.verifier.verify(&token, &VerifyContext::for_audience("other"), unix_time(NOW));
    assert_eq!(elsewhere, Err(TokenRefusal::Audience));
}

fn change_character(token: &str, position: usize) -> String {
    let mut bytes = token.as_bytes().to_vec();
    bytes[position] = if bytes[position] == b'A' { b'B' } else { b'A' };
    String::from_utf8(bytes).unwrap()
}

fn swap_claims(message: &str) -> String {
    let (header, _) = message.split_once('.').unwrap();
    let mut claims = claims();
    claims["sub"] = SUBJECT.replace("build-7", "victim").into();
    format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims.to_string()))
}

/// The last character of a 64-byte signature has four unused bits, which must be zero.
fn stray_bits(token: &str) -> String {
    let last = token.chars().last().unwrap();
    let next = match last {
        'A' => 'B',
        'Q' => 'R',
        'g' => 'h',
        _ => 'x',
    };
    format!("{}{next}", token.strip_suffix(last).unwrap())
}

fn public_point(world: &IssuerFixture) -> String {
    let set = world.issuer.jwks(unix_time(NOW)).unwrap();
    format!("{}{}", set["keys"][0]["x"].as_str().unwrap(), set["keys"][0]["y"].as_str().unwrap())
}
