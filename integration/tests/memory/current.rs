//! The identity towards the service is that of now (P2, P10, P12): a tenant that changes or is assigned while a
//! connection is open, and a sandbox that is revoked and shows no token.

use std::fs;

use serde_json::Value;

use super::client::ClientRequest;
use super::scene::{MemoryScene, MemorySetup, wait_for};

const PRINCIPAL: &str =
    "mode = \"api-key\"\ncredential = \"memory\"\nprincipal = \"{tenant}/{environment}/{sandbox}\"\n";
/// What the file says of D, who is known by its channel.
const D: &str = "id = \"sandbox-d\"\ntenant = \"acme\"\nenvironment = \"staging\"\n";
const REVOKED: &str = r#"{"sandboxes":[{"tenant":"acme","environment":"staging","sandbox":"sandbox-d"}]}"#;

/// The service is told who calls, tenant included; it knows nobody by such a name, and refuses what arrives.
fn scene_with_principals() -> MemoryScene {
    MemoryScene::with_setup(MemorySetup { service: PRINCIPAL, ..MemorySetup::default() })
}

fn recall() -> ClientRequest {
    ClientRequest::recall("staging:team-d")
}

/// The tenants of all calls that were allowed, as their decisions are recorded.
fn recorded_tenants(scene: &MemoryScene) -> Vec<String> {
    let of =
        |record: &Value| record["class_uid"] == 6003 && record["unmapped"]["sandbar"]["stage"] == "decision";
    let tenant = |record: Value| record["metadata"]["tenant_uid"].as_str().unwrap().to_owned();
    scene.records().into_iter().filter(of).map(tenant).collect()
}

/// The principals that arrived at the service.
fn arrived_principals(scene: &MemoryScene) -> Vec<String> {
    let told = scene.arrived_requests();
    let principal = |seen: &Value| {
        let fields = seen["headers"].to_string();
        let known = ["acme/staging/sandbox-d", "initech/staging/sandbox-d"];
        known.into_iter().find(|name| fields.contains(name)).unwrap_or_else(|| panic!("{fields}")).to_owned()
    };
    told.iter().map(principal).collect()
}

// proves: memory_service.principal
#[test]
fn p12_the_service_is_told_the_tenant_of_now_on_an_open_connection() {
    let scene = scene_with_principals();
    let mut client = scene.connect("sandbox-d");
    assert_eq!(client.send(&recall()).reason(), None);
    scene.reconfigure(D, &D.replace("acme", "initech"));
    assert_eq!(client.send(&recall()).reason(), None);
    assert_eq!(arrived_principals(&scene), ["acme/staging/sandbox-d", "initech/staging/sandbox-d"]);
    assert_eq!(recorded_tenants(&scene), ["acme", "initech"]);
}

#[test]
fn p12_a_connection_of_a_warm_pool_works_once_the_identity_is_assigned() {
    let scene = scene_with_principals();
    scene.reconfigure(D, "id = \"sandbox-d\"\n");
    let mut client = scene.connect("sandbox-d");
    scene.assert_refused("before", &client.send(&recall()), "identity_unset", 0);
    scene.run_command(&[
        "identity",
        "assign",
        "--sandbox",
        "sandbox-d",
        "--tenant",
        "initech",
        "--environment",
        "staging",
    ]);
    assert_eq!(client.send(&recall()).reason(), None);
    assert_eq!(arrived_principals(&scene), ["initech/staging/sandbox-d"]);
    assert_eq!(recorded_tenants(&scene), ["initech"]);
}

#[test]
fn p12_a_revoked_sandbox_does_not_get_in_by_leaving_its_token_out() {
    let scene = MemoryScene::new();
    let mut client = scene.connect("sandbox-d");
    assert_eq!(client.send(&recall()).status, 200);
    scene.revoke(REVOKED, "sandbox-d");
    let before = scene.arrived_requests().len();
    for (row, ask) in [
        ("no token", recall()),
        ("its own token", recall().with_field("Sandbox-Identity", &scene.token("sandbox-d"))),
        ("a bad token", recall().with_field("Sandbox-Identity", "x.y.z")),
    ] {
        let answer = client.send(&ask);
        scene.assert_refused(row, &answer, "sandbox_revoked", before);
        let told = scene.attempt_records(answer.field("Sandbar-Record").unwrap());
        assert_eq!(told[0]["unmapped"]["sandbar"]["identity"], "identity_revoked", "{row}: {told:?}");
    }
    assert_eq!(scene.send_honest("sandbox-b", ClientRequest::recall("staging:team-b")).status, 200);
}

/// From one generation on: the operator's file says none for D, so nothing proves that it is a later one.
#[test]
fn p12_a_sandbox_of_an_earlier_generation_does_not_get_in_either() {
    let scene = MemoryScene::new();
    let mut client = scene.connect("sandbox-d");
    assert_eq!(client.send(&recall()).status, 200);
    let list = REVOKED.replace("sandboxes", "generations").replace("\"}", "\",\"oldest\":3}");
    scene.revoke(&list, "sandbox-d");
    assert_eq!(client.send(&recall()).reason(), Some("sandbox_revoked"));
    scene.reconfigure(D, &format!("{D}generation = 3\n"));
    assert_eq!(client.send(&recall()).status, 200, "it was created again");
}

#[test]
fn p10_a_revocation_cuts_an_open_call() {
    let scene = MemoryScene::new();
    let mut client = scene.connect("sandbox-d");
    let slow = ClientRequest::post("/v1/recall", r#"{"query":"strange:slow","bank_id":"staging:team-d"}"#);
    client.send_bytes(&slow.encode(&scene.service_host()));
    wait_for("the call arrives", || scene.arrived_requests().len() == 1);
    fs::write(scene.dir.path().join("revoked.json"), REVOKED).unwrap();
    assert!(client.read_response().is_none(), "it is cut before the service answers");
    wait_for("the record of it", || {
        scene.records().iter().any(|record| {
            record["unmapped"]["sandbar"]["ending"] == "revoked"
                && record["status_detail"] == "sandbox_revoked"
        })
    });
}
