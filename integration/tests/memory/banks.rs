//! Attacks 27 to 47: every way to name a bank that is not one's own, or none, or one that cannot be told.

use super::client::ClientRequest;
use super::scene::{KEY, MemoryScene, MemorySetup};

const OWN: &str = "staging:team-b";
const FOREIGN: &str = "staging:team-a";

#[test]
fn p12_attacks_27_to_39_every_bank_that_is_named_is_ones_own() {
    let scene = MemoryScene::new();
    let rows: Vec<(&str, String, &str)> = vec![
        ("27 a line end", r#"{"bank_id":"staging:team-b\n"}"#.into(), "bank_malformed"),
        ("27 a terminal's escape", r#"{"bank_id":"staging:\u001b[31m"}"#.into(), "bank_malformed"),
        ("27 too long", format!(r#"{{"bank_id":"staging:{}"}}"#, "x".repeat(255)), "bank_malformed"),
        ("28 foreign", format!(r#"{{"bank_id":"{FOREIGN}"}}"#), "foreign_bank"),
        ("28 of another environment", r#"{"bank_id":"production:team-b"}"#.into(), "foreign_bank"),
        ("28 of no environment", r#"{"bank_id":"team-b"}"#.into(), "foreign_bank"),
        (
            "30 banks beside bank_id",
            format!(r#"{{"bank_id":"{OWN}","banks":["{FOREIGN}"]}}"#),
            "foreign_bank",
        ),
        ("30 one of several", format!(r#"{{"banks":["{OWN}","{FOREIGN}"]}}"#), "foreign_bank"),
        (
            "30 bank_id beside banks",
            format!(r#"{{"bank_id":"{FOREIGN}","banks":["{OWN}"]}}"#),
            "foreign_bank",
        ),
        ("31 an empty list", r#"{"banks":[]}"#.into(), "bank_malformed"),
        (
            "31 an empty list beside one's own",
            format!(r#"{{"bank_id":"{OWN}","banks":[]}}"#),
            "bank_malformed",
        ),
        ("31 null", r#"{"banks":null}"#.into(), "bank_missing"),
        ("31 missing", r#"{"query":"x"}"#.into(), "bank_missing"),
        ("32 a number", r#"{"bank_id":7}"#.into(), "bank_malformed"),
        ("32 an object", r#"{"bank_id":{"a":"b"}}"#.into(), "bank_malformed"),
        ("32 an array", format!(r#"{{"bank_id":["{OWN}"]}}"#), "bank_malformed"),
        ("32 a boolean", r#"{"bank_id":true}"#.into(), "bank_malformed"),
        ("32 null", r#"{"bank_id":null}"#.into(), "bank_missing"),
        ("32 a text for a list", format!(r#"{{"bank_id":"{OWN}","banks":"{OWN}"}}"#), "bank_malformed"),
        ("33 a star", r#"{"bank_id":"*"}"#.into(), "bank_malformed"),
        ("33 empty", r#"{"bank_id":""}"#.into(), "bank_malformed"),
        ("33 all", r#"{"bank_id":"all"}"#.into(), "foreign_bank"),
        ("34 twice", format!(r#"{{"bank_id":"{OWN}","bank_id":"{FOREIGN}"}}"#), "body_malformed"),
        (
            "34 twice, the other way",
            format!(r#"{{"bank_id":"{FOREIGN}","bank_id":"{OWN}"}}"#),
            "body_malformed",
        ),
        ("34 twice, deep", format!(r#"{{"bank_id":"{OWN}","metadata":{{"a":1,"a":2}}}}"#), "body_malformed"),
        (
            "35 twice, once escaped",
            format!(r#"{{"bank_id":"{OWN}","bank\u005fid":"{FOREIGN}"}}"#),
            "body_malformed",
        ),
        ("36 escaped, foreign", r#"{"bank\u005fid":"staging:team-\u0061"}"#.into(), "foreign_bank"),
        ("37 almost the key", format!(r#"{{"bank_id":"{OWN}","Bank_Id":"{FOREIGN}"}}"#), "bank_malformed"),
        (
            "37 almost the key, too",
            format!(r#"{{"bank_id":"{OWN}","bankId":"{FOREIGN}"}}"#),
            "bank_malformed",
        ),
        ("37 with a hyphen", format!(r#"{{"bank_id":"{OWN}","bank-id":"{FOREIGN}"}}"#), "bank_malformed"),
        ("38 fullwidth", r#"{"bank_id":"staging:team-ｂ"}"#.into(), "bank_malformed"),
        ("38 no-break space", "{\"bank_id\":\"staging:team-b\u{a0}\"}".into(), "bank_malformed"),
        ("38 zero width", "{\"bank_id\":\"staging:team\u{200b}-b\"}".into(), "bank_malformed"),
        ("38 a lone surrogate", r#"{"bank_id":"staging:team-b\ud800"}"#.into(), "body_malformed"),
        ("39 NaN", format!(r#"{{"bank_id":"{OWN}","n":NaN}}"#), "body_malformed"),
        ("39 a huge number", format!(r#"{{"bank_id":"{OWN}","n":1e999999}}"#), "body_malformed"),
        (
            "39 a second document",
            format!(r#"{{"bank_id":"{OWN}"}}{{"bank_id":"{FOREIGN}"}}"#),
            "body_malformed",
        ),
        ("39 an array", format!(r#"[{{"bank_id":"{OWN}"}}]"#), "body_malformed"),
        ("39 a text", format!("\"{OWN}\""), "body_malformed"),
        ("39 nothing", String::new(), "body_malformed"),
    ];
    for (row, body, reason) in rows {
        for path in ["/v1/recall", "/v1/retain", "/v1/forget"] {
            let answer = scene.send_honest("sandbox-b", ClientRequest::post(path, &body));
            scene.assert_refused(&format!("{row} on {path}"), &answer, reason, 0);
        }
    }
    let escaped = r#"{"query":"x","bank\u005fid":"staging:team-\u0062"}"#;
    let answer = scene.send_honest("sandbox-b", ClientRequest::post("/v1/recall", escaped));
    assert_eq!(answer.status, 200, "36: {}", answer.text());
    assert_eq!(scene.arrived_requests().len(), 1);
    assert_eq!(scene.arrived_requests()[0]["body"], escaped, "36: it arrives as it was sent");
}

#[test]
fn p12_attacks_40_and_41_a_bank_in_the_query_is_named_once_and_only_where_it_belongs() {
    let scene = MemoryScene::new();
    for (row, target, reason) in [
        ("28 foreign", "/v1/mental-models?bank_id=staging:team-a", "foreign_bank"),
        ("28 foreign, encoded", "/v1/mental-models?bank_id=staging%3Ateam-a", "foreign_bank"),
        ("31 none", "/v1/mental-models", "bank_missing"),
        ("31 empty", "/v1/mental-models?bank_id=", "bank_malformed"),
        ("40 twice", "/v1/mental-models?bank_id=staging:team-b&bank_id=staging:team-a", "memory_form"),
        ("40 an encoded name", "/v1/mental-models?bank%5Fid=staging:team-b", "memory_form"),
        ("40 by semicolon", "/v1/mental-models?bank_id=staging:team-b;bank_id=staging:team-a", "memory_form"),
        ("40 a list", "/v1/mental-models?bank_id[]=staging:team-b", "memory_form"),
        ("40 a stray value", "/v1/mental-models?bank_id=staging:team-b&tenant=x", "memory_form"),
        ("40 a line end", "/v1/mental-models?bank_id=staging:team-b%0a", "memory_form"),
    ] {
        scene.assert_refused(row, &scene.send_honest("sandbox-b", ClientRequest::get(target)), reason, 0);
    }
    let ask =
        ClientRequest { target: "/v1/recall?bank_id=staging:team-b".into(), ..ClientRequest::recall(OWN) };
    scene.assert_refused(
        "41 where the body names it",
        &scene.send_honest("sandbox-b", ask),
        "memory_form",
        0,
    );
    for target in
        ["/v1/mental-models?bank_id=staging%3Ateam-b&limit=5", "/v1/mental-models/m1?bank_id=staging:team-b"]
    {
        let answer = scene.send_honest("sandbox-b", ClientRequest::get(target));
        assert_eq!(answer.status, 200, "{target}: {}", answer.text());
    }
    assert_eq!(scene.arrived_requests()[0]["target"], "/v1/mental-models?bank_id=staging:team-b&limit=5");
}

#[test]
fn p12_attacks_43_to_46_what_leads_beyond_a_bank_is_refused() {
    let scene = MemoryScene::new();
    let own = format!(r#"{{"bank_id":"{OWN}","query":"x","content":"x"}}"#);
    for (method, path) in [
        ("POST", "/v1/dsar/forget_principal"),
        ("POST", "/v1/export"),
        ("POST", "/v1/import"),
        ("POST", "/v1/ingest/webhook/s1"),
        ("POST", "/v1/admin/lifecycle"),
        ("GET", "/v1/admin/banks"),
        ("GET", "/v1/admin/banks/health"),
        ("GET", "/v1/admin/banks/staging:team-b/health"),
        ("POST", "/v1/admin/banks/staging:team-b/hold"),
        ("DELETE", "/v1/admin/banks/staging:team-b/hold/h1"),
        ("GET", "/v1/admin/sources"),
        ("GET", "/v1/admin/tenants/acme/storage"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/metrics"),
        ("GET", "/memories/123"),
        ("DELETE", "/memories/123"),
        ("POST", "/mcp"),
        ("POST", "/messages/?session_id=1"),
        ("GET", "/sse"),
    ] {
        let ask = match method {
            "POST" => ClientRequest::post(path, &own),
            method => ClientRequest::get(path).with_method(method),
        };
        let row = format!("44 {method} {path}");
        scene.assert_refused(&row, &scene.send_honest("sandbox-b", ask), "memory_operation", 0);
    }
    let routed = format!(r#"{{"bank_id":"{OWN}","content":"x","metadata":{{"beneficiary_user_id":"a"}}}}"#);
    let answer = scene.send_honest("sandbox-b", ClientRequest::post("/v1/retain", &routed));
    scene.assert_refused("46 routed to another's bank", &answer, "memory_operation", 0);
    let everything = format!(r#"{{"bank_id":"{OWN}","scope":"all"}}"#);
    let answer = scene.send_honest("sandbox-b", ClientRequest::post("/v1/forget", &everything));
    scene.assert_refused("44 a whole bank", &answer, "memory_operation", 0);
    for path in ["/live", "/health", "/health/live", "/health/ingest"] {
        assert_eq!(scene.send("sandbox-b", ClientRequest::get(path)).status, 200, "{path} needs no identity");
    }
}

// proves: limits.memory_answer_bytes
#[test]
fn p12_attack_47_an_answer_of_another_bank_is_withheld() {
    let scene = MemoryScene::with_setup(MemorySetup {
        limits: "memory_answer_bytes = 300000\n",
        ..MemorySetup::default()
    });
    for (row, kind, reason) in [
        ("47 a foreign hit", "foreign", "answer_foreign_bank"),
        ("47 a hit of no bank", "nameless", "answer_unchecked"),
        ("47 no hits to look at", "hitless", "answer_unchecked"),
        ("the key of the service", "key", "answer_unchecked"),
        ("a field named after the key", "named", "answer_unchecked"),
        ("longer than may be", "huge", "answer_unchecked"),
    ] {
        let body = format!(r#"{{"query":"strange:{kind}","bank_id":"{OWN}"}}"#);
        let before = scene.arrived_requests().len();
        let answer = scene.send_honest("sandbox-b", ClientRequest::post("/v1/recall", &body));
        scene.assert_refused(row, &answer, reason, before + 1);
        assert_eq!(answer.status, 502, "{row}");
        assert!(!answer.text().contains(KEY) && !answer.text().contains("of another bank"), "{row}");
        let told = scene.attempt_records(answer.field("Sandbar-Record").unwrap());
        let found = told.iter().any(|record| record["class_uid"] == 2004);
        assert_eq!(found, kind != "huge", "{row}: {told:?}");
    }
    let body = format!(r#"{{"query":"strange:forged","bank_id":"{OWN}"}}"#);
    let answer = scene.send_honest("sandbox-b", ClientRequest::post("/v1/recall", &body));
    assert_eq!((answer.status, answer.field("X-Kept")), (200, Some("1")), "{}", answer.text());
    for name in ["Sandbar-Reason", "sandbar_record"] {
        assert_eq!(answer.field(name), None, "a refusal that never was");
    }
}
