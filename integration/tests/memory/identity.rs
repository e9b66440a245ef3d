//! Attacks 1 to 20: what a sandbox can try with tokens.

use std::fs;

use certs::UnixTime;
use certs::identity::IssueRequest;

use super::client::ClientRequest;
use super::forger::{IdentityForger, sign_hmac};
use super::scene::{AUDIENCE, ISSUER, MemoryScene, create_issuer, issue_request, time_at};

/// What of a token is kept when another signature, or another part, is put to it.
fn token_parts(token: &str) -> (&str, &str, &str) {
    let mut parts = token.split('.');
    let mut part = || parts.next().unwrap();
    (part(), part(), part())
}

// proves: identity.issuer.name, identity.issuer.keys, memory_service.audience, sandbox.tenant, sandbox.environment,
// proves: sandbox.generation
#[test]
fn p12_attacks_2_to_20_only_ones_own_fresh_token_is_taken() {
    let scene = MemoryScene::new();
    let good = scene.token("sandbox-b");
    let own = || IssueRequest { generation: Some(2), ..issue_request("sandbox-b", "staging") };
    let (head, claims, signature) = token_parts(&good);
    let other = create_issuer(scene.dir.path(), "another-issuer");
    let issued = |request: &IssueRequest<'_>, offset| {
        scene.issuer.issue(request, time_at(offset)).unwrap().expose().to_owned()
    };
    let kid = scene.issuer.key_ids().next().unwrap().to_owned();
    let forger = IdentityForger::new(&scene.dir.path().join("issuer"), &kid);
    let published = fs::read(scene.dir.path().join("issuer/jwks.json")).unwrap();
    let now = UnixTime::now().as_secs();
    let subject = "spiffe://acme.example/tenant/acme/env/staging/sandbox/sandbox-b";
    let said = |rest: &str| {
        format!(r#"{{"iss":"{ISSUER}","sub":"{subject}","nbf":{now},"iat":{now},"jti":"x","sid":"2"{rest}}}"#)
    };
    let es256 = format!(r#"{{"alg":"ES256","kid":"{kid}","typ":"JWT"}}"#);
    let header = |more: &str| format!(r#"{{"alg":"ES256","kid":"{kid}","typ":"JWT",{more}}}"#);
    let (aud, exp) = (format!(r#","aud":"{AUDIENCE}""#), format!(r#","exp":{}"#, now + 300));
    let full = said(&format!("{aud}{exp}"));
    let signed = |claims: &str| forger.sign(&es256, claims);
    let swap = |(at, letter)| match (at, letter) {
        (20, 'A') => 'B',
        (20, _) => 'A',
        (_, letter) => letter,
    };
    let changed: String = claims.chars().enumerate().map(swap).collect();
    let none = |alg: &str| {
        let token = forger.sign(&es256.replace("ES256", alg), &full);
        let (head, claims, _) = token_parts(&token);
        format!("{head}.{claims}.")
    };
    let hs256 = es256.replace("ES256", "HS256");
    let deep = format!(r#","x":{}{}"#, "[".repeat(1000), "]".repeat(1000));
    let aud_list = |list: &str| signed(&said(&format!(r#","aud":[{list}]{exp}"#)));
    let ours = format!("\"{AUDIENCE}\"");
    let both = [
        aud_list(&format!(r#"{ours},"spiffe://acme.example/other""#)),
        aud_list(&format!(r#""spiffe://acme.example/other",{ours}"#)),
    ];
    let spaced = signed(&full.replace("sandbox-b\"", "sandbox-b\u{a0}\""));
    let wide = signed(&full.replace("sandbox-b\"", "sandbox-\u{ff42}\""));
    let rows: Vec<(&str, String, &str)> = vec![
        ("2 a random signature", format!("{head}.{claims}.{}", "A".repeat(86)), "identity_signature"),
        ("3 a changed byte", format!("{head}.{changed}.{signature}"), ""),
        ("4 alg none", none("none"), ""),
        ("4 alg None", none("None"), ""),
        ("4 alg nOnE", none("nOnE"), ""),
        ("4 an empty signature", format!("{head}.{claims}."), ""),
        ("5 HMAC with the public key", sign_hmac(&hs256, &full, &published), "identity_algorithm"),
        ("5 HMAC under the name of the curve", sign_hmac(&es256, &full, &published), "identity_signature"),
        ("5 the right key, another algorithm", forger.sign(&hs256, &full), "identity_algorithm"),
        ("6 kid traversal", forger.sign(&es256.replace(&kid, "../../keys/x"), &full), "identity_unknown_key"),
        ("6 jku", forger.sign(&header(r#""jku":"http://127.0.0.1:9/""#), &full), "identity_header"),
        ("6 jwk", forger.sign(&header(r#""jwk":{}"#), &full), "identity_header"),
        ("6 x5u", forger.sign(&header(r#""x5u":"http://127.0.0.1:9/""#), &full), "identity_header"),
        ("7 expired", issued(&own(), -700), "identity_expired"),
        ("7 not yet valid", issued(&own(), 300), "identity_not_yet_valid"),
        ("7 no exp", signed(&said(&aud)), "identity_claim_missing"),
        (
            "7 exp as text",
            signed(&said(&format!(r#"{aud},"exp":"{}""#, now + 300))),
            "identity_claim_malformed",
        ),
        (
            "7 exp as a float",
            signed(&said(&format!(r#"{aud},"exp":{}.5"#, now + 300))),
            "identity_claim_malformed",
        ),
        (
            "7 exp beyond all clocks",
            signed(&said(&format!(r#"{aud},"exp":18446744073709551615"#))),
            "identity_claim_malformed",
        ),
        ("7 too long a life", signed(&said(&format!(r#"{aud},"exp":{}"#, now + 3600))), "identity_life"),
        (
            "8 another audience",
            issued(&IssueRequest { audience: "spiffe://acme.example/other", ..own() }, 0),
            "identity_audience",
        ),
        ("8 ours and another", both[0].clone(), "identity_several_audiences"),
        ("8 another and ours", both[1].clone(), "identity_several_audiences"),
        ("8 ours twice", aud_list(&format!("{ours},{ours}")), "identity_several_audiences"),
        ("8 none in the list", aud_list(""), "identity_claim_malformed"),
        ("8 none", signed(&said(&exp)), "identity_claim_missing"),
        (
            "9 another issuer",
            signed(&full.replace(ISSUER, "https://other.example")),
            "identity_unknown_issuer",
        ),
        ("9 another's key", other.issue(&own(), time_at(0)).unwrap().expose().to_owned(), ""),
        ("14 a list", format!("{good}, {good}"), "identity_malformed"),
        ("16 sub twice", signed(&said(&format!(r#"{aud}{exp},"sub":"{subject}""#))), "identity_duplicate"),
        (
            "16 sub twice, once escaped",
            signed(&said(&format!(r#"{aud}{exp},"s\u0075b":"x""#))),
            "identity_duplicate",
        ),
        ("16 padded", format!("{head}=.{claims}.{signature}"), "identity_malformed"),
        ("16 a last digit that is not canonical", set_unused_bits(&good), "identity_malformed"),
        ("17 a thousand deep", signed(&said(&format!("{aud}{exp}{deep}"))), "identity_malformed"),
        ("17 too large", format!("{good}{}", "A".repeat(8000)), "identity_too_large"),
        ("19 no environment", signed(&full.replace("/env/staging", "")), "identity_subject"),
        ("20 a no-break space", spaced, ""),
        ("20 fullwidth", wide, ""),
    ];
    for (row, token, code) in rows {
        assert_token_refused(&scene, row, &token, "identity_invalid", code);
    }
    for (row, token, reason) in [
        ("10 A's token", scene.token("sandbox-a"), "identity_mismatch"),
        (
            "11 of an earlier generation",
            issued(&IssueRequest { generation: Some(1), ..own() }, 0),
            "identity_stale",
        ),
        ("11 of no generation", issued(&issue_request("sandbox-b", "staging"), 0), "identity_stale"),
        (
            "18 another environment",
            issued(&IssueRequest { environment: "production", ..own() }, 0),
            "identity_mismatch",
        ),
        ("20 another case", issued(&IssueRequest { sandbox: "Sandbox-B", ..own() }, 0), "identity_mismatch"),
        ("20 another tenant", issued(&IssueRequest { tenant: "other", ..own() }, 0), "identity_mismatch"),
    ] {
        assert_token_refused(&scene, row, &token, reason, "verified");
    }
    // A clock that is a little off, the same token once more, and what the forger writes when it is true.
    for (row, token) in [
        ("7 a little early", issued(&own(), 20)),
        ("8 a list of one", aud_list(&ours)),
        ("12 again", good.clone()),
        ("12 and again", good.clone()),
        ("a token by hand", signed(&full)),
    ] {
        let ask = ClientRequest::recall("staging:team-b").with_field("Sandbox-Identity", &token);
        let answer = scene.send("sandbox-b", ask);
        assert_eq!(answer.status, 200, "{row}: {}", answer.text());
    }
    assert_eq!(scene.arrived_requests().len(), 5);
}

/// The same octets, written with a last digit whose unused bits are set.
fn set_unused_bits(token: &str) -> String {
    const DIGITS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let (rest, last) = token.split_at(token.len() - 1);
    let at = DIGITS.find(last).unwrap(); // 64 octets leave four bits unused
    format!("{rest}{}", char::from(DIGITS.as_bytes()[at + 1]))
}

/// Sees that a token is refused, and for what; an empty code leaves open for what.
fn assert_token_refused(scene: &MemoryScene, row: &str, token: &str, reason: &str, code: &str) {
    let ask = ClientRequest::recall("staging:team-b").with_field("Sandbox-Identity", token);
    let answer = scene.send("sandbox-b", ask);
    scene.assert_refused(row, &answer, reason, 0);
    let told = scene.attempt_records(answer.field("Sandbar-Record").unwrap());
    let told = told.iter().find(|record| record["class_uid"] == 6003).unwrap();
    let found = told["unmapped"]["sandbar"]["identity"].as_str().unwrap();
    assert!(code.is_empty() || found == code, "{row}: {found}");
}

type HeaderPairs<'a> = &'a [(&'a str, &'a str)];

#[test]
fn p12_attacks_1_14_and_15_there_is_exactly_one_token_in_its_place() {
    let scene = MemoryScene::new();
    let good = scene.token("sandbox-b");
    let bearer = format!("Bearer {good}");
    let rows: [(&str, HeaderPairs<'_>, &str); 11] = [
        ("1 none", &[], "identity_absent"),
        ("14 two", &[("Sandbox-Identity", &good), ("Sandbox-Identity", "x")], "identity_invalid"),
        (
            "14 two, the other way",
            &[("Sandbox-Identity", "x"), ("Sandbox-Identity", &good)],
            "identity_invalid",
        ),
        (
            "14 an empty one first",
            &[("Sandbox-Identity", ""), ("Sandbox-Identity", &good)],
            "identity_invalid",
        ),
        ("14 in both places", &[("Sandbox-Identity", &good), ("Authorization", &bearer)], "identity_invalid"),
        ("14 another scheme", &[("Authorization", &good)], "identity_invalid"),
        ("14 an empty one", &[("Sandbox-Identity", "")], "identity_invalid"),
        ("15 in a cookie", &[("Cookie", &good)], "identity_absent"),
        ("15 for the proxy", &[("Proxy-Authorization", &bearer)], "identity_absent"),
        ("15 under another name", &[("X-Sandbox-Identity", &good)], "identity_absent"),
        ("15 with an underscore", &[("Sandbox_Identity", &good)], "identity_absent"),
    ];
    for (row, fields, reason) in rows {
        let ask = fields
            .iter()
            .fold(ClientRequest::recall("staging:team-b"), |ask, (name, value)| ask.with_field(name, value));
        scene.assert_refused(row, &scene.send("sandbox-b", ask), reason, 0);
    }
    let target = format!("/v1/recall?sandbox_identity={good}");
    let query = ClientRequest { target, ..ClientRequest::recall("staging:team-b") };
    scene.assert_refused("15 in the query", &scene.send("sandbox-b", query), "memory_form", 0);
    let ask = ClientRequest::recall("staging:team-b").with_field("Authorization", &bearer);
    assert_eq!(scene.send("sandbox-b", ask).status, 200);
}

/// A token that is revoked while its connection is open is not taken any more.
// proves: identity.revocations
#[test]
fn p12_attack_13_what_is_revoked_ends_on_an_open_connection() {
    let scene = MemoryScene::new();
    let ask =
        ClientRequest::recall("staging:team-b").with_field("Sandbox-Identity", &scene.token("sandbox-b"));
    let mut client = scene.connect("sandbox-b");
    assert_eq!(client.send(&ask).status, 200);
    let list = r#"{"sandboxes":[{"tenant":"acme","environment":"staging","sandbox":"sandbox-b"}]}"#;
    scene.revoke(list, "sandbox-b");
    let last = client.send(&ask);
    assert_eq!(last.reason(), Some("sandbox_revoked"));
    let told = scene.attempt_records(last.field("Sandbar-Record").unwrap());
    assert_eq!(told[0]["unmapped"]["sandbar"]["identity"], "identity_revoked", "{told:?}");
}
