//! Rotation, revocation during use, files that turn bad, and clocks that jump.

use std::fs;

use certs::identity::{
    IdentityError, LocalIssuer, MAX_STALE, PUBLISHED_AHEAD, SigningAlgorithm, Verifier, VerifyContext,
};
use certs::trust::RefreshStatus;
use rules::ids::{Environment, SandboxId, Tenant};
use rules::sandbox::Sandbox;
use serde_json::{Value, json};

use super::{AUDIENCE, IssuerFixture, SUBJECT, TokenForger, options, request};
use crate::{DAY, HOUR, NOW, unix_time};

#[test]
fn rotation_refuses_no_honest_token_and_retires_the_old_key() {
    let dir = tempfile::tempdir().unwrap();
    let issuer = LocalIssuer::init(dir.path(), &options(SigningAlgorithm::Es256), unix_time(NOW)).unwrap();
    let verifier = Verifier::new(vec![issuer.trusted_issuer().unwrap()], None, unix_time(NOW)).unwrap();
    let check = |issuer: &LocalIssuer, now: u64| {
        let token = issuer.issue(&request(), unix_time(now)).unwrap();
        let identity =
            verifier.verify(token.expose(), &VerifyContext::for_audience(AUDIENCE), unix_time(now)).unwrap();
        (token, identity.key_id().to_owned())
    };
    let (old_token, old_key) = check(&issuer, NOW);

    let rotated = LocalIssuer::rotate(dir.path(), unix_time(NOW + 10)).unwrap();
    let (_, still) = check(&rotated, NOW + 20);
    assert_eq!(still, old_key, "verifiers that have not refreshed yet must know the signing key");
    assert_eq!(verifier.refresh(unix_time(NOW + 30)).unwrap(), RefreshStatus::Changed);
    let signs = NOW + 10 + PUBLISHED_AHEAD.as_secs();
    let (_, new_key) = check(&rotated, signs);
    assert_ne!(new_key, old_key);
    let still_good =
        verifier.verify(old_token.expose(), &VerifyContext::for_audience(AUDIENCE), unix_time(NOW + 299));
    assert!(still_good.is_ok(), "a token of the old key is valid until it expires");

    let retired = LocalIssuer::rotate(dir.path(), unix_time(NOW + HOUR)).unwrap();
    assert!(!retired.key_ids().any(|kid| kid == old_key));
    assert!(!dir.path().join(format!("{old_key}.key")).exists());
    verifier.refresh(unix_time(NOW + HOUR)).unwrap();
    let gone =
        verifier.verify(old_token.expose(), &VerifyContext::for_audience(AUDIENCE), unix_time(NOW + 299));
    assert_eq!(gone.unwrap_err(), IdentityError::UnknownKey, "cached tokens go with their key");
    assert_eq!(check(&retired, NOW + HOUR).1, new_key);
}

/// Good claims issued at another time.
fn claims_at(now: u64) -> Value {
    let mut claims = super::claims();
    for (name, moment) in [("exp", now + 300), ("nbf", now), ("iat", now)] {
        claims[name] = moment.into();
    }
    claims
}

#[test]
fn p12_one_rotation_is_enough_for_a_stolen_key_to_come_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let issuer = LocalIssuer::init(dir.path(), &options(SigningAlgorithm::Es256), unix_time(NOW)).unwrap();
    let old = issuer.key_ids().next().unwrap().to_owned();
    let thief = TokenForger::from_key_file(dir.path(), &old);
    let rotated = LocalIssuer::rotate(dir.path(), unix_time(NOW)).unwrap();
    let verifier = Verifier::new(vec![rotated.trusted_issuer().unwrap()], None, unix_time(NOW)).unwrap();
    let verify = |token: &str, now| {
        verifier.refresh(unix_time(now)).unwrap();
        verifier.verify(token, &VerifyContext::for_audience(AUDIENCE), unix_time(now)).map(drop)
    };
    let ends = NOW + PUBLISHED_AHEAD.as_secs() + 600 + 30;
    let remembered = thief.sign(&claims_at(ends - 1));
    for (what, token, now, expected) in [
        ("until its last token has expired", &remembered, ends - 1, Ok(())),
        ("remembered", &remembered, ends, Err(IdentityError::UnknownKey)),
        ("new", &thief.sign(&claims_at(ends)), ends, Err(IdentityError::UnknownKey)),
        (
            "a month later",
            &thief.sign(&claims_at(NOW + 30 * DAY)),
            NOW + 30 * DAY,
            Err(IdentityError::UnknownKey),
        ),
    ] {
        assert_eq!(verify(token, now), expected, "{what}");
    }
    // Opening the issuer deletes the key and its entry in the set.
    let jwks = fs::read_to_string(rotated.jwks_path()).unwrap();
    assert!(jwks.contains(&old));
    let reopened = LocalIssuer::open(dir.path(), unix_time(ends)).unwrap();
    assert!(!reopened.key_ids().any(|kid| kid == old));
    assert!(!fs::read_to_string(rotated.jwks_path()).unwrap().contains(&old));
    assert!(!dir.path().join(format!("{old}.key")).exists());
    let fresh = reopened.issue(&request(), unix_time(ends)).unwrap();
    assert_eq!(verify(fresh.expose(), ends), Ok(()));
}

#[test]
fn rotating_what_is_not_there_says_how_to_make_it() {
    let dir = tempfile::tempdir().unwrap();
    let missing = LocalIssuer::rotate(&dir.path().join("none"), unix_time(NOW)).unwrap_err().to_string();
    assert!(missing.contains("identity init"), "{missing}");
}

#[test]
fn p12_an_emptied_set_of_keys_revokes_everything() {
    for empty in [r#"{"keys":[]}"#, r#"{"keys":[{"kty":"XYZ"}]}"#] {
        let world = IssuerFixture::new();
        let token = world.token();
        assert_eq!(world.verify(&token).as_deref(), Ok(SUBJECT));
        fs::write(world.issuer.jwks_path(), empty).unwrap();
        assert_eq!(world.verifier.refresh(unix_time(NOW)).unwrap(), RefreshStatus::Changed, "{empty}");
        assert_eq!(world.verify(&token), Err(IdentityError::UnknownKey), "{empty}");
    }
}

#[test]
fn p12_a_forged_token_learns_nothing_of_what_is_revoked() {
    let list = json!({
        "sandboxes": [{ "tenant": "acme", "environment": "staging", "sandbox": "build-7" }],
        "generations": [{ "tenant": "other", "environment": "production", "sandbox": "victim", "oldest": 4711 }],
        "tenants": [{ "tenant": "third", "issued_before": NOW }],
    });
    let world = IssuerFixture::with_algorithm(SigningAlgorithm::Es256, Some(&list));
    let subject = |tenant, rest| format!("spiffe://acme.example/tenant/{tenant}/env/{rest}");
    for (sub, sid, iat) in [
        (SUBJECT.to_owned(), "3", NOW),
        (subject("other", "production/sandbox/victim"), "4710", NOW),
        (subject("other", "production/sandbox/victim"), "4711", NOW),
        (subject("third", "production/sandbox/x"), "1", NOW - 1),
    ] {
        let mut claims = claims_at(NOW);
        (claims["sub"], claims["sid"], claims["iat"]) = (sub.into(), sid.into(), iat.into());
        let signed = world.forger().sign(&claims);
        let forged = format!("{}.{}", signed.rsplit_once('.').unwrap().0, "A".repeat(86));
        assert_eq!(world.verify(&forged), Err(IdentityError::Signature), "{claims}");
        let refused = world.verify(&signed).err();
        let revoked = matches!(refused, Some(IdentityError::Revoked | IdentityError::Generation));
        assert_eq!(revoked, sid != "4711", "{claims}: a token with a valid signature gets the answer");
    }
}

#[test]
fn rotating_faster_than_tokens_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    LocalIssuer::init(dir.path(), &options(SigningAlgorithm::Es256), unix_time(NOW)).unwrap();
    let rotations =
        (0..20).map(|_| LocalIssuer::rotate(dir.path(), unix_time(NOW))).filter(Result::is_ok).count();
    assert_eq!(rotations, 15, "sixteen keys at most");
}

/// Without a token there is only the sandbox of the channel, and what the operator's file says of it.
#[test]
fn p12_a_sandbox_is_revoked_whether_or_not_it_shows_a_token() {
    let known = |tenant: &str, generation| Sandbox {
        id: SandboxId::parse("build-7").unwrap(),
        tenant: Some(Tenant::parse(tenant).unwrap()),
        environment: Some(Environment::parse("staging").unwrap()),
        agent_card: None,
        generation,
    };
    let unset = Sandbox { tenant: None, environment: None, ..known("acme", None) };
    let entry = json!({"tenant": "acme", "environment": "staging", "sandbox": "build-7"});
    let mut from_three = entry.clone();
    from_three["oldest"] = 3.into();
    let (revoked, generation) = (Err(IdentityError::Revoked), Err(IdentityError::Generation));
    for (what, list, sandbox, expected) in [
        ("listed", json!({"sandboxes": [entry]}), known("acme", None), revoked),
        ("listed, of any generation", json!({"sandboxes": [entry]}), known("acme", Some(9)), revoked),
        ("another tenant's", json!({"sandboxes": [entry]}), known("initech", None), Ok(())),
        ("no identity yet", json!({"sandboxes": [entry]}), unset, Ok(())),
        ("an earlier generation", json!({"generations": [from_three]}), known("acme", Some(2)), generation),
        ("no generation", json!({"generations": [from_three]}), known("acme", None), generation),
        ("new enough", json!({"generations": [from_three]}), known("acme", Some(3)), Ok(())),
        (
            "its tenant's tokens",
            json!({"tenants": [{"tenant": "acme", "issued_before": NOW}]}),
            known("acme", None),
            Ok(()),
        ),
    ] {
        let world = IssuerFixture::with_algorithm(SigningAlgorithm::Es256, Some(&list));
        assert_eq!(world.verifier.check_sandbox(&sandbox, unix_time(NOW)), expected, "{what}");
        let stale = unix_time(NOW + MAX_STALE.as_secs() + DAY);
        assert_eq!(
            world.verifier.check_sandbox(&sandbox, stale),
            Err(IdentityError::RevocationsStale),
            "{what}"
        );
    }
    let none = IssuerFixture::new();
    assert_eq!(none.verifier.check_sandbox(&known("acme", None), unix_time(NOW)), Ok(()), "no list");
}

/// Attack 13: revoked while a connection is open, refused at the next request.
#[test]
fn p12_a_revocation_counts_at_the_next_use_even_of_a_remembered_token() {
    let sandbox = json!({ "tenant": "acme", "environment": "staging", "sandbox": "build-7" });
    let other = json!({ "tenant": "acme", "environment": "production", "sandbox": "build-7" });
    let kid_of = |world: &IssuerFixture| world.issuer.key_ids().next().unwrap().to_owned();
    let token_id = |token: &str| {
        let unverified = certs::identity::inspect(token).unwrap();
        unverified.claims["jti"].as_str().unwrap().to_owned()
    };
    type RevocationCase<'a> = (&'a str, &'a dyn Fn(&IssuerFixture, &str) -> Value, bool);
    let lists: [RevocationCase<'_>; 8] = [
        ("sandbox", &|_, _| json!({ "sandboxes": [sandbox] }), true),
        ("its namesake elsewhere", &|_, _| json!({ "sandboxes": [other] }), false),
        (
            "tenant, issued before",
            &|_, _| json!({ "tenants": [{ "tenant": "acme", "issued_before": NOW + 1 }] }),
            true,
        ),
        (
            "tenant, issued after",
            &|_, _| json!({ "tenants": [{ "tenant": "acme", "issued_before": NOW }] }),
            false,
        ),
        (
            "two limits, the stricter counts",
            &|_, _| {
                let limit = |moment| json!({ "tenant": "acme", "issued_before": moment });
                json!({ "tenants": [limit(NOW + 1), limit(0)] })
            },
            true,
        ),
        ("key", &|world, _| json!({ "keys": [kid_of(world)] }), true),
        ("token", &|_, token| json!({ "tokens": [token_id(token)] }), true),
        ("nothing", &|_, _| json!({}), false),
    ];
    for (what, list, revoked) in lists {
        let world = IssuerFixture::with_algorithm(SigningAlgorithm::Es256, Some(&json!({})));
        let token = world.token();
        assert_eq!(world.verify(&token).as_deref(), Ok(SUBJECT), "{what}");
        let path = world.dir.path().join("revocations.json");
        fs::write(path, list(&world, &token).to_string()).unwrap();
        world.verifier.refresh(unix_time(NOW)).unwrap();
        assert_eq!(world.verify(&token).err(), revoked.then_some(IdentityError::Revoked), "{what}");
    }
}

#[test]
fn p16_a_file_that_turns_bad_changes_nothing_for_a_while_and_then_closes() {
    for (file, stale) in [
        ("issuer/jwks.json", IdentityError::KeysStale),
        ("revocations.json", IdentityError::RevocationsStale),
    ] {
        let world = IssuerFixture::with_algorithm(SigningAlgorithm::Es256, Some(&json!({})));
        let path = world.dir.path().join(file);
        let good = fs::read(&path).unwrap();
        for bad in ["", "{", r#"{"keys":{}}"#, r#"{"unknown":[]}"#] {
            fs::write(&path, bad).unwrap();
            let complaints = world.verifier.refresh(unix_time(NOW + 60)).unwrap_err();
            assert!(complaints[0].to_string().contains(file), "{bad}: {}", complaints[0]);
            assert_eq!(world.verify(&world.token()).as_deref(), Ok(SUBJECT), "{bad}");
        }
        fs::remove_file(&path).unwrap();
        let late = NOW + MAX_STALE.as_secs() + 1;
        assert!(world.verifier.refresh(unix_time(late)).is_err());
        let token = world.issuer.issue(&request(), unix_time(late)).unwrap();
        assert_eq!(world.verify_at(token.expose(), late), Err(stale), "{file}");
        fs::write(&path, good).unwrap();
        world.verifier.refresh(unix_time(late)).unwrap();
        assert_eq!(world.verify_at(token.expose(), late).as_deref(), Ok(SUBJECT), "{file} is valid again");
    }
}

#[test]
fn p16_a_clock_that_was_ahead_does_not_lengthen_the_patience() {
    let world = IssuerFixture::new();
    world.verifier.refresh(unix_time(NOW + DAY)).unwrap();
    let jwks = world.issuer.jwks_path();
    fs::remove_file(jwks).unwrap();
    assert!(world.verifier.refresh(unix_time(NOW)).is_err());
    let late = NOW + MAX_STALE.as_secs() + 1;
    let token = world.issuer.issue(&request(), unix_time(late)).unwrap();
    assert_eq!(world.verify_at(token.expose(), late), Err(IdentityError::KeysStale));
}

#[test]
fn p16_a_clock_that_jumps_closes_and_heals() {
    let world = IssuerFixture::new();
    let token = world.token();
    assert_eq!(world.verify(&token).as_deref(), Ok(SUBJECT));
    for (jump, refused) in [
        (29_i64, None),
        (329, None),
        (330, Some(IdentityError::Expired)),
        (-30, None),
        (-31, Some(IdentityError::NotYetValid)),
        (-(DAY as i64), Some(IdentityError::NotYetValid)),
        (DAY as i64, Some(IdentityError::KeysStale)),
        (0, None),
    ] {
        let now = NOW.checked_add_signed(jump).unwrap();
        assert_eq!(world.verify_at(&token, now).err(), refused, "{jump}");
    }
    assert_eq!(world.verify_at(&token, 0), Err(IdentityError::NotYetValid));
    assert_eq!(world.verify_at(&token, u64::MAX), Err(IdentityError::KeysStale));
}

#[test]
fn p17_a_flood_of_good_tokens_stays_within_the_bound() {
    let world = IssuerFixture::new();
    for number in 0..certs::identity::MAX_CACHED_TOKENS + 100 {
        let token = world.token();
        assert!(world.verify(&token).is_ok(), "{number}");
    }
    assert!(world.verifier.cached_tokens() <= certs::identity::MAX_CACHED_TOKENS);
}
