//! Attacks 1 to 20: what a sandbox can try with tokens.

use std::fs;

use certs::UnixTime;
use certs::identity::IssueRequest;

use super::client::Ask;
use super::scene::{AUDIENCE, ISSUER, Scene, at, issuer, request, wait};

fn base64url(text: &str) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut out = String::new();
    for three in text.as_bytes().chunks(3) {
        let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte))
            << (8 * (3 - three.len()));
        let digits =
            (0..=three.len()).map(|at| DIGITS[(bits >> (18 - 6 * at) & 63) as usize] as char);
        out.extend(digits);
    }
    out
}

/// A token with any claims, whose signature is another's.
fn unsigned(header: &str, claims: &str, good: &str) -> String {
    let signature = good.rsplit('.').next().unwrap();
    format!("{}.{}.{signature}", base64url(header), base64url(claims))
}

#[test]
fn attacks_1_to_20_only_ones_own_fresh_token_is_taken() {
    let scene = Scene::new();
    let good = scene.token("sandbox-b");
    let own = || IssueRequest { generation: Some(2), ..request("sandbox-b", "staging") };
    let (head, rest) = good.split_once('.').unwrap();
    let (claims, signature) = rest.split_once('.').unwrap();
    let other = issuer(scene.dir.path(), "another-issuer");
    let issued = |request: &IssueRequest<'_>, offset| {
        scene.issuer.issue(request, at(offset)).unwrap().expose().to_owned()
    };
    let kid = scene.issuer.key_ids().next().unwrap().to_owned();
    let now = UnixTime::now().as_secs();
    let subject = "spiffe://acme.example/tenant/acme/env/staging/sandbox/sandbox-b";
    let said = |rest: &str| {
        format!(
            r#"{{"iss":"{ISSUER}","sub":"{subject}","aud":"{AUDIENCE}","nbf":{now},"iat":{now},"jti":"x","sid":"2"{rest}}}"#
        )
    };
    let es256 = format!(r#"{{"alg":"ES256","kid":"{kid}","typ":"JWT"}}"#);
    let exp = format!(r#","exp":{}"#, now + 300);
    let swap = |(at, letter)| match (at, letter) {
        (20, 'A') => 'B',
        (20, _) => 'A',
        (_, letter) => letter,
    };
    let changed: String = claims.chars().enumerate().map(swap).collect();
    let changed = format!("{head}.{changed}.{signature}");
    let none = |alg: &str| {
        let header = format!(r#"{{"alg":"{alg}","kid":"{kid}","typ":"JWT"}}"#);
        format!("{}.{claims}.", base64url(&header))
    };
    let header = |more: &str| format!(r#"{{"alg":"ES256","kid":"{kid}","typ":"JWT",{more}}}"#);
    let deep = format!(r#","x":{}{}"#, "[".repeat(1000), "]".repeat(1000));
    let rows: Vec<(&str, String, &str)> = vec![
        ("2 a random signature", format!("{head}.{claims}.{}", "A".repeat(86)), "identity_invalid"),
        ("3 a changed byte", changed, "identity_invalid"),
        ("4 alg none", none("none"), "identity_invalid"),
        ("4 alg None", none("None"), "identity_invalid"),
        ("4 alg nOnE", none("nOnE"), "identity_invalid"),
        ("4 an empty signature", format!("{head}.{claims}."), "identity_invalid"),
        (
            "5 HMAC with the public key",
            format!("{}.{claims}.{signature}", base64url(&es256.replace("ES256", "HS256"))),
            "identity_invalid",
        ),
        (
            "6 kid traversal",
            unsigned(&es256.replace(&kid, "../../keys/x"), &said(&exp), &good),
            "identity_invalid",
        ),
        (
            "6 jku",
            unsigned(&header(r#""jku":"http://127.0.0.1:9/""#), &said(&exp), &good),
            "identity_invalid",
        ),
        ("6 jwk", unsigned(&header(r#""jwk":{}"#), &said(&exp), &good), "identity_invalid"),
        (
            "6 x5u",
            unsigned(&header(r#""x5u":"http://127.0.0.1:9/""#), &said(&exp), &good),
            "identity_invalid",
        ),
        ("7 expired", issued(&own(), -700), "identity_invalid"),
        ("7 not yet valid", issued(&own(), 300), "identity_invalid"),
        ("7 no exp", unsigned(&es256, &said(""), &good), "identity_invalid"),
        (
            "7 exp as text",
            unsigned(&es256, &said(r#","exp":"9999999999""#), &good),
            "identity_invalid",
        ),
        ("7 exp as a float", unsigned(&es256, &said(r#","exp":1e12"#), &good), "identity_invalid"),
        (
            "8 another audience",
            issued(&IssueRequest { audience: "spiffe://acme.example/other", ..own() }, 0),
            "identity_invalid",
        ),
        (
            "9 another's key",
            other.issue(&own(), at(0)).unwrap().expose().to_owned(),
            "identity_invalid",
        ),
        ("10 A's token", scene.token("sandbox-a"), "identity_mismatch"),
        (
            "11 of an earlier generation",
            issued(&IssueRequest { generation: Some(1), ..own() }, 0),
            "identity_stale",
        ),
        ("11 of no generation", issued(&request("sandbox-b", "staging"), 0), "identity_stale"),
        ("14 a list", format!("{good}, {good}"), "identity_invalid"),
        (
            "16 sub twice",
            unsigned(&es256, &said(&format!(r#","sub":"x"{exp}"#)), &good),
            "identity_invalid",
        ),
        ("16 padded", format!("{head}=.{claims}.{signature}"), "identity_invalid"),
        (
            "17 a thousand deep",
            unsigned(&es256, &said(&format!("{exp}{deep}")), &good),
            "identity_invalid",
        ),
        ("17 too large", format!("{good}{}", "A".repeat(8000)), "identity_invalid"),
        (
            "18 another environment",
            issued(&IssueRequest { environment: "production", ..own() }, 0),
            "identity_mismatch",
        ),
        (
            "19 no environment",
            unsigned(&es256, &said(&exp).replace("/env/staging", ""), &good),
            "identity_invalid",
        ),
        (
            "20 another case",
            issued(&IssueRequest { sandbox: "Sandbox-B", ..own() }, 0),
            "identity_mismatch",
        ),
        (
            "20 another tenant",
            issued(&IssueRequest { tenant: "other", ..own() }, 0),
            "identity_mismatch",
        ),
    ];
    for (row, token, reason) in rows {
        let ask = Ask::recall("staging:team-b").with("Sandbox-Identity", &token);
        scene.refused(row, &scene.ask("sandbox-b", ask), reason, 0);
    }
    // A clock that is a little off, and the same token once more.
    for (row, token) in [
        ("7 a little early", issued(&own(), 20)),
        ("12 again", good.clone()),
        ("12 and again", good),
    ] {
        let ask = Ask::recall("staging:team-b").with("Sandbox-Identity", &token);
        let answer = scene.ask("sandbox-b", ask);
        assert_eq!(answer.status, 200, "{row}: {}", answer.text());
    }
    assert_eq!(scene.seen().len(), 3);
}

type Fields<'a> = &'a [(&'a str, &'a str)];

#[test]
fn attacks_1_14_and_15_there_is_exactly_one_token_in_its_place() {
    let scene = Scene::new();
    let good = scene.token("sandbox-b");
    let bearer = format!("Bearer {good}");
    let rows: [(&str, Fields<'_>, &str); 11] = [
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
        (
            "14 in both places",
            &[("Sandbox-Identity", &good), ("Authorization", &bearer)],
            "identity_invalid",
        ),
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
            .fold(Ask::recall("staging:team-b"), |ask, (name, value)| ask.with(name, value));
        scene.refused(row, &scene.ask("sandbox-b", ask), reason, 0);
    }
    let target = format!("/v1/recall?sandbox_identity={good}");
    let query = Ask { target, ..Ask::recall("staging:team-b") };
    scene.refused("15 in the query", &scene.ask("sandbox-b", query), "memory_form", 0);
    let ask = Ask::recall("staging:team-b").with("Authorization", &bearer);
    assert_eq!(scene.ask("sandbox-b", ask).status, 200);
}

/// A token that is revoked while its connection is open is not taken any more.
#[test]
fn attack_13_what_is_revoked_ends_on_an_open_connection() {
    let scene = Scene::new();
    let ask = Ask::recall("staging:team-b").with("Sandbox-Identity", &scene.token("sandbox-b"));
    let mut client = scene.client("sandbox-b");
    assert_eq!(client.ask(&ask).status, 200);
    let list = r#"{"sandboxes":[{"tenant":"acme","environment":"staging","sandbox":"sandbox-b"}]}"#;
    fs::write(scene.dir.path().join("revoked.json"), list).unwrap();
    let mut last = None;
    wait("the revocation", || {
        let answer = client.ask(&ask);
        let refused = answer.status != 200;
        last = Some(answer);
        refused
    });
    let last = last.unwrap();
    assert_eq!(last.reason(), Some("identity_invalid"));
    let told = scene.records_of(last.field("Sandbar-Record").unwrap());
    assert_eq!(told[0]["unmapped"]["sandbar"]["identity"], "identity_revoked", "{told:?}");
}
