//! Attacks on the token itself. Those on the path it comes by (another's token, headers sent twice, a bank of
//! another environment) are stopped where the path is known; here it shows whom such a token names.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use certs::identity::{Algorithm, Expected, IdentityError, MAX_TOKEN};
use jsonwebtoken::EncodingKey;
use serde_json::{Value, json};

use super::{AUDIENCE, Forger, SUBJECT, World, claims};
use crate::{NOW, at};

type Refused = IdentityError;

#[test]
fn an_honest_token_passes_whoever_wrote_it() {
    let world = World::new();
    for token in [world.token(), world.key().sign(&claims()), world.key().sign_plainly(&claims())] {
        assert_eq!(world.verify(&token).as_deref(), Ok(SUBJECT));
        assert_eq!(world.verify(&token).as_deref(), Ok(SUBJECT), "and again, until its end");
    }
}

#[test]
fn attacks_1_to_3_absent_random_and_changed() {
    let world = World::new();
    let token = world.token();
    let (message, signature) = token.rsplit_once('.').unwrap();
    let random = URL_SAFE_NO_PAD.encode([7; 64]);
    for (what, token, refused) in [
        ("1 absent", String::new(), Refused::Absent),
        ("1 blank", " ".to_owned(), Refused::Malformed),
        ("2 random signature", format!("{message}.{random}"), Refused::Signature),
        (
            "2 zero signature",
            format!("{message}.{}", URL_SAFE_NO_PAD.encode([0; 64])),
            Refused::Signature,
        ),
        (
            "2 short signature",
            format!("{message}.{}", URL_SAFE_NO_PAD.encode([7; 63])),
            Refused::Signature,
        ),
        (
            "2 signature of another message",
            format!("{}.{signature}", swap_claims(message)),
            Refused::Signature,
        ),
    ] {
        assert_eq!(world.verify(&token), Err(refused), "{what}");
    }
    for position in 0..token.len() {
        let changed = change(&token, position);
        assert!(world.verify(&changed).is_err(), "3 changed at {position}");
    }
}

#[test]
fn attacks_4_and_5_the_algorithm_is_the_keys_and_not_the_tokens() {
    let world = World::new();
    let forger = world.key();
    for algorithm in
        ["none", "None", "nOnE", "NONE", "", "HS256", "RS256", "ES384", "EdDSA", "es256", "ES256 "]
    {
        let header = json!({ "alg": algorithm, "kid": forger.kid, "typ": "JWT" }).to_string();
        let signed = forger.sign_text(&header, &claims().to_string());
        let unsigned = format!("{}.", signed.rsplit_once('.').unwrap().0);
        for token in [signed, unsigned] {
            assert_eq!(world.verify(&token), Err(Refused::Algorithm), "4 {algorithm}");
        }
    }
    for secret in
        [world.issuer.jwks(at(NOW)).unwrap().to_string(), public_point(&world), forger.kid.clone()]
    {
        let confused = Forger {
            kid: forger.kid.clone(),
            key: EncodingKey::from_secret(secret.as_bytes()),
            algorithm: jsonwebtoken::Algorithm::HS256,
        };
        let honest_header = confused.sign(&claims());
        assert_eq!(world.verify(&honest_header), Err(Refused::Signature), "5 says ES256");
        assert_eq!(
            world.verify(&confused.sign_plainly(&claims())),
            Err(Refused::Algorithm),
            "5 says HS256"
        );
    }
}

#[test]
fn attack_6_headers_that_would_choose_the_key() {
    let world = World::new();
    let forger = world.key();
    let own = json!({ "kty": "EC", "crv": "P-256", "x": "AA", "y": "AA" });
    for (what, header, refused) in [
        (
            "kid traversal",
            json!({ "alg": "ES256", "kid": "../../etc/passwd" }),
            Refused::UnknownKey,
        ),
        ("kid unknown", json!({ "alg": "ES256", "kid": "other" }), Refused::UnknownKey),
        ("kid injection", json!({ "alg": "ES256", "kid": "' OR 1=1 --" }), Refused::Header),
        ("kid a number", json!({ "alg": "ES256", "kid": 1 }), Refused::Header),
        ("kid absent", json!({ "alg": "ES256" }), Refused::UnknownKey),
        ("alg absent", json!({ "kid": forger.kid }), Refused::Header),
        ("alg a list", json!({ "alg": ["ES256"], "kid": forger.kid }), Refused::Header),
        ("jwk", json!({ "alg": "ES256", "kid": forger.kid, "jwk": own }), Refused::Header),
        (
            "jku",
            json!({ "alg": "ES256", "kid": forger.kid, "jku": "https://evil.example" }),
            Refused::Header,
        ),
        (
            "x5u",
            json!({ "alg": "ES256", "kid": forger.kid, "x5u": "https://evil.example" }),
            Refused::Header,
        ),
        ("x5c", json!({ "alg": "ES256", "kid": forger.kid, "x5c": ["AA"] }), Refused::Header),
        ("crit", json!({ "alg": "ES256", "kid": forger.kid, "crit": ["exp"] }), Refused::Header),
        ("b64", json!({ "alg": "ES256", "kid": forger.kid, "b64": false }), Refused::Header),
        ("zip", json!({ "alg": "ES256", "kid": forger.kid, "zip": "DEF" }), Refused::Header),
        (
            "strange typ",
            json!({ "alg": "ES256", "kid": forger.kid, "typ": "at+jwt" }),
            Refused::Header,
        ),
        ("typ a list", json!({ "alg": "ES256", "kid": forger.kid, "typ": [] }), Refused::Header),
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

/// Each row: what is set (or, if null, removed) in good claims signed by the right key.
fn spoiled(rows: &[(&str, Value, Option<Refused>)]) {
    let world = World::new();
    let forger = world.key();
    for (name, value, refused) in rows {
        let mut claims = claims();
        match value {
            Value::Null => drop(claims.as_object_mut().unwrap().remove(*name)),
            Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Array(_)
            | Value::Object(_) => {
                claims[*name] = value.clone();
            }
        }
        assert_eq!(world.verify(&forger.sign(&claims)).err(), *refused, "{name} = {value:.60}");
    }
}

#[test]
fn attack_7_times() {
    let malformed = |name| Some(Refused::ClaimMalformed(name));
    spoiled(&[
        ("exp", json!(NOW - 31), Some(Refused::Expired)),
        ("exp", json!(NOW - 1000), Some(Refused::Expired)),
        ("exp", Value::Null, Some(Refused::ClaimMissing("exp"))),
        ("exp", json!(NOW as f64 + 300.5), malformed("exp")),
        ("exp", json!((NOW + 300).to_string()), malformed("exp")),
        ("exp", json!(u64::MAX), malformed("exp")),
        ("exp", json!(1e300), malformed("exp")),
        ("exp", json!(-1), malformed("exp")),
        ("exp", json!([NOW + 300]), malformed("exp")),
        ("exp", json!(true), malformed("exp")),
        ("exp", json!(NOW + 601), Some(Refused::Life)),
        ("exp", json!(253_402_300_799_u64), Some(Refused::Life)),
        ("exp", json!(NOW + 600), None),
        ("nbf", json!(NOW + 31), Some(Refused::NotYetValid)),
        ("nbf", json!(NOW + 30), None),
        ("nbf", Value::Null, Some(Refused::ClaimMissing("nbf"))),
        ("nbf", json!("now"), malformed("nbf")),
        ("iat", json!(NOW + 31), Some(Refused::NotYetValid)),
        ("iat", json!(NOW + 30), None),
        ("iat", json!(NOW - 301), Some(Refused::Life)),
        ("iat", json!(0), Some(Refused::Life)),
        ("iat", Value::Null, Some(Refused::ClaimMissing("iat"))),
        ("iat", json!(0.5), malformed("iat")),
    ]);
    let world = World::new();
    let within = json!({ "exp": NOW - 29, "nbf": NOW - 300, "iat": NOW - 300 });
    let mut claims = claims();
    claims.as_object_mut().unwrap().extend(within.as_object().unwrap().clone());
    assert_eq!(world.verify(&world.key().sign(&claims)).as_deref(), Ok(SUBJECT), "small skew");
    claims["iat"] = (NOW - 10).into();
    claims["nbf"] = (NOW - 10).into();
    assert_eq!(
        world.verify(&world.key().sign(&claims)),
        Err(Refused::Expired),
        "ends before it begins"
    );
}

#[test]
fn attacks_8_and_9_audience_and_issuer() {
    let malformed = |name| Some(Refused::ClaimMalformed(name));
    spoiled(&[
        ("aud", json!("other"), Some(Refused::Audience)),
        ("aud", json!(AUDIENCE.to_uppercase()), Some(Refused::Audience)),
        ("aud", json!([AUDIENCE]), None),
        ("aud", json!([AUDIENCE, "other"]), Some(Refused::Audiences)),
        ("aud", json!([AUDIENCE, AUDIENCE]), Some(Refused::Audiences)),
        ("aud", json!([]), malformed("aud")),
        ("aud", json!([[AUDIENCE]]), malformed("aud")),
        ("aud", json!({ "0": AUDIENCE }), malformed("aud")),
        ("aud", json!(""), malformed("aud")),
        ("aud", Value::Null, Some(Refused::ClaimMissing("aud"))),
        ("iss", json!("https://evil.example"), Some(Refused::UnknownIssuer)),
        ("iss", json!("https://issuer.acme.example/"), Some(Refused::UnknownIssuer)),
        ("iss", json!("HTTPS://issuer.acme.example"), Some(Refused::UnknownIssuer)),
        ("iss", json!(["https://issuer.acme.example"]), malformed("iss")),
        ("iss", Value::Null, Some(Refused::ClaimMissing("iss"))),
        ("jti", Value::Null, Some(Refused::ClaimMissing("jti"))),
        ("jti", json!(7), malformed("jti")),
        ("jti", json!("a\nb"), malformed("jti")),
        ("jti", json!("a".repeat(256)), malformed("jti")),
    ]);
}

#[test]
fn attack_10_another_sandboxes_token_names_that_sandbox() {
    let world = World::new();
    let mut claims = claims();
    claims["sub"] = SUBJECT.replace("build-7", "trial-2").into();
    let token = world.key().sign(&claims);
    let identity = world.verifier.verify(&token, &Expected::audience(AUDIENCE), at(NOW)).unwrap();
    assert_eq!(identity.subject().sandbox.as_str(), "trial-2", "the caller compares, and refuses");
    assert_eq!(identity.generation(), Some(3));
    assert_eq!(identity.expires_at(), NOW + 300);
}

#[test]
fn attack_11_a_sandbox_made_anew_refuses_its_predecessors_tokens() {
    let sandbox =
        json!({ "tenant": "acme", "environment": "staging", "sandbox": "build-7", "oldest": 4 });
    let world = World::with(Algorithm::Es256, Some(&json!({ "generations": [sandbox] })));
    for (generation, refused) in [
        (json!("3"), Some(Refused::Generation)),
        (json!("4"), None),
        (json!("5"), None),
        (Value::Null, Some(Refused::Generation)),
        (json!(4), Some(Refused::ClaimMalformed("sid"))),
        (json!("04"), Some(Refused::ClaimMalformed("sid"))),
        (json!("-4"), Some(Refused::ClaimMalformed("sid"))),
        (json!("+4"), Some(Refused::ClaimMalformed("sid"))),
        (json!("99999999999999999999"), Some(Refused::ClaimMalformed("sid"))),
    ] {
        let mut claims = claims();
        claims["sid"] = generation.clone();
        if generation.is_null() {
            claims.as_object_mut().unwrap().remove("sid");
        }
        assert_eq!(world.verify(&world.key().sign(&claims)).err(), refused, "{generation}");
    }
}

#[test]
fn attack_12_the_token_may_be_used_until_its_end() {
    let world = World::new();
    let token = world.token();
    for second in 0..300 {
        assert_eq!(world.verify_at(&token, NOW + second).as_deref(), Ok(SUBJECT), "{second}");
    }
    assert_eq!(world.verify_at(&token, NOW + 330), Err(Refused::Expired), "remembered or not");
    assert_eq!(world.verifier.remembered_tokens(), 1);
}

/// 14 and 15, as far as they reach the token: several in one value are not one.
#[test]
fn attacks_14_and_15_several_tokens_in_one_value() {
    let world = World::new();
    let (token, forged) = (world.token(), change(&world.token(), 200));
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
        assert_eq!(world.verify(&value), Err(Refused::Malformed), "{value:.20}");
    }
}

#[test]
fn attack_16_two_ways_to_read_one_token() {
    let world = World::new();
    let forger = world.key();
    let good = claims().to_string();
    let header = forger.header().to_string();
    let victim = SUBJECT.replace("build-7", "victim");
    let twice = |member: &str| good.replacen('{', &format!("{{{member},"), 1);
    for (what, header, text, refused) in [
        ("sub twice", &header, twice(&format!(r#""sub":"{victim}""#)), Refused::Duplicate),
        (
            "sub twice, the same",
            &header,
            twice(&format!(r#""sub":"{SUBJECT}""#)),
            Refused::Duplicate,
        ),
        (
            "sub twice, escaped",
            &header,
            twice(&format!(r#""s\u0075b":"{victim}""#)),
            Refused::Duplicate,
        ),
        ("exp twice", &header, twice(r#""exp":1"#), Refused::Duplicate),
        ("deep duplicate", &header, twice(r#""x":{"a":1,"a":2}"#), Refused::Duplicate),
        (
            "alg twice",
            &header.replacen('{', r#"{"alg":"none","#, 1),
            good.clone(),
            Refused::Duplicate,
        ),
        ("two documents", &header, format!("{good}{good}"), Refused::Malformed),
        ("trailing text", &header, format!("{good}x"), Refused::Malformed),
        ("a list", &header, format!("[{good}]"), Refused::Malformed),
        ("not JSON", &header, "sub=build-7".to_owned(), Refused::Malformed),
        ("byte order mark", &header, format!("\u{feff}{good}"), Refused::Malformed),
        ("header not JSON", &"alg".to_owned(), good.clone(), Refused::Malformed),
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
        assert_eq!(world.verify(&changed), Err(Refused::Malformed), "16 {what}");
    }
}

#[test]
fn attack_17_oversized_and_deep() {
    let world = World::new();
    let forger = world.key();
    let mut large = claims();
    large["x"] = "a".repeat(64 * 1024).into();
    assert_eq!(world.verify(&forger.sign(&large)), Err(Refused::TooLarge));
    assert_eq!(world.verify(&"a".repeat(MAX_TOKEN + 1)), Err(Refused::TooLarge));
    assert_eq!(world.verify(&".".repeat(MAX_TOKEN)), Err(Refused::Malformed));
    let deep = format!(r#"{{"x":{}1{}}}"#, "[".repeat(1000), "]".repeat(1000));
    assert_eq!(
        world.verify(&forger.sign_text(&forger.header().to_string(), &deep)),
        Err(Refused::Malformed)
    );
}

#[test]
fn attacks_18_to_20_environment_and_look_alikes() {
    let with = |sandbox: &str| json!(SUBJECT.replace("build-7", sandbox));
    let subject = Some(Refused::Subject);
    let malformed = Some(Refused::ClaimMalformed("sub"));
    spoiled(&[
        ("sub", json!(SUBJECT.replace("/env/staging", "")), subject),
        ("sub", json!(SUBJECT.replace("staging", "")), subject),
        ("sub", json!(SUBJECT.replace("staging", "staging/env/production")), subject),
        ("sub", json!(SUBJECT.replace("acme.example", "evil.example")), Some(Refused::TrustDomain)),
        ("sub", json!(SUBJECT.replace("acme.example", "ACME.example")), subject),
        ("sub", with("build-7/"), subject),
        ("sub", with("../build-7"), subject),
        ("sub", with("build%2d7"), subject),
        ("sub", with("build-7\u{a0}"), malformed),
        ("sub", with("ｂuild-7"), malformed),
        ("sub", with("build-7 "), malformed),
        ("sub", with("bu\u{200b}ild-7"), malformed),
        ("sub", json!([SUBJECT]), malformed),
        ("sub", Value::Null, Some(Refused::ClaimMissing("sub"))),
    ]);
    let world = World::new();
    for other in ["Build-7", "BUILD-7", "build-7.", "build_7"] {
        let mut claims = claims();
        claims["sub"] = with(other);
        let named = world.verify(&world.key().sign(&claims)).unwrap();
        assert_ne!(named, SUBJECT, "20 {other} is itself, byte by byte, and not build-7");
    }
}

#[test]
fn a_token_bound_to_a_certificate_needs_that_certificate() {
    let world = World::new();
    let bound_to = |value: Value| {
        let mut claims = claims();
        claims["cnf"] = value;
        world.key().sign(&claims)
    };
    let (mine, other) = ([1; 32], [2; 32]);
    let print = URL_SAFE_NO_PAD.encode(mine);
    let good = bound_to(json!({ "x5t#S256": print }));
    for (what, token, presented, refused) in [
        ("right", &good, Some(&mine), None),
        ("right, remembered", &good, Some(&mine), None),
        ("another's, remembered", &good, Some(&other), Some(Refused::Confirmation)),
        ("none, remembered", &good, None, Some(Refused::Confirmation)),
        (
            "unknown kind",
            &bound_to(json!({ "jkt": print })),
            Some(&mine),
            Some(Refused::Confirmation),
        ),
        (
            "two kinds",
            &bound_to(json!({ "x5t#S256": print, "jkt": "x" })),
            Some(&mine),
            Some(Refused::Confirmation),
        ),
        ("empty", &bound_to(json!({})), Some(&mine), Some(Refused::Confirmation)),
        ("text", &bound_to(json!(print)), Some(&mine), Some(Refused::Confirmation)),
        (
            "short",
            &bound_to(json!({ "x5t#S256": "AAAA" })),
            Some(&mine),
            Some(Refused::Confirmation),
        ),
    ] {
        let expected = Expected { audience: AUDIENCE, certificate: presented };
        assert_eq!(world.verifier.verify(token, &expected, at(NOW)).err(), refused, "{what}");
    }
}

#[test]
fn only_good_tokens_are_remembered_and_only_for_their_audience() {
    let world = World::new();
    for position in (0..300).step_by(7) {
        assert!(world.verify(&change(&world.token(), position)).is_err());
    }
    assert_eq!(world.verifier.remembered_tokens(), 0);
    let token = world.token();
    assert!(world.verify(&token).is_ok());
    let elsewhere = world.verifier.verify(&token, &Expected::audience("other"), at(NOW));
    assert_eq!(elsewhere, Err(Refused::Audience));
}

fn change(token: &str, position: usize) -> String {
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

/// The last character of a 64-byte signature has four bits that say nothing; they must be zero.
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

fn public_point(world: &World) -> String {
    let set = world.issuer.jwks(at(NOW)).unwrap();
    format!("{}{}", set["keys"][0]["x"].as_str().unwrap(), set["keys"][0]["y"].as_str().unwrap())
}
