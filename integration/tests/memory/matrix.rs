//! Who may do what: every sandbox, every bank, every operation, both environments. Each cell is asked for, and
//! what arrives at the service is what may.

use super::client::ClientRequest;
use super::scene::MemoryScene;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BankRight {
    /// Nobody's.
    Administer,
    Forget,
    Recall,
    Retain,
}

/// What policy and environment come to, said a second time and without patterns.
const RIGHTS: [(&str, &str, &[BankRight]); 6] = [
    ("sandbox-a", "staging:team-a", &[BankRight::Recall, BankRight::Retain, BankRight::Forget]),
    ("sandbox-a", "staging:shared", &[BankRight::Recall, BankRight::Retain]),
    ("sandbox-b", "staging:team-b", &[BankRight::Recall, BankRight::Retain, BankRight::Forget]),
    ("sandbox-b", "staging:shared", &[BankRight::Recall]),
    ("sandbox-c", "production:team-a", &[BankRight::Recall, BankRight::Retain]),
    ("sandbox-c", "production:shared", &[BankRight::Recall]),
];

const OPERATIONS: [(&str, &str, BankRight); 27] = [
    ("POST", "/v1/recall", BankRight::Recall),
    ("POST", "/v1/debug/recall", BankRight::Recall),
    ("POST", "/v1/reflect", BankRight::Recall),
    ("POST", "/v1/history", BankRight::Recall),
    ("POST", "/v1/audit", BankRight::Recall),
    ("POST", "/v1/graph/search", BankRight::Recall),
    ("POST", "/v1/graph/neighbors", BankRight::Recall),
    ("GET", "/v1/mental-models", BankRight::Recall),
    ("GET", "/v1/mental-models/m1", BankRight::Recall),
    ("POST", "/v1/retain", BankRight::Retain),
    ("POST", "/v1/compile", BankRight::Retain),
    ("POST", "/v1/mental-models", BankRight::Retain),
    ("POST", "/v1/mental-models/m1/refresh", BankRight::Retain),
    ("POST", "/v1/forget", BankRight::Forget),
    ("POST", "/v1/observations/invalidate", BankRight::Forget),
    ("DELETE", "/v1/mental-models/m1", BankRight::Forget),
    ("POST", "/v1/dsar/forget_principal", BankRight::Administer),
    ("POST", "/v1/export", BankRight::Administer),
    ("POST", "/v1/import", BankRight::Administer),
    ("POST", "/v1/ingest/webhook/s1", BankRight::Administer),
    ("POST", "/v1/admin/lifecycle", BankRight::Administer),
    ("GET", "/v1/admin/banks", BankRight::Administer),
    ("GET", "/v1/admin/banks/health", BankRight::Administer),
    ("POST", "/v1/admin/banks/m1/hold", BankRight::Administer),
    ("DELETE", "/v1/admin/banks/m1/hold/h1", BankRight::Administer),
    ("GET", "/v1/admin/sources", BankRight::Administer),
    ("GET", "/v1/admin/tenants/acme/storage", BankRight::Administer),
];

fn operation_request(method: &str, path: &str, bank: &str) -> ClientRequest {
    match method {
        "POST" => ClientRequest::post(
            path,
            &format!(r#"{{"query":"x","content":"x","memory_ids":["m"],"bank_id":"{bank}"}}"#),
        ),
        method => ClientRequest::get(&format!("{path}?bank_id={bank}")).with_method(method),
    }
}

// proves: memory.recall, memory.retain, memory.forget
#[test]
fn p12_every_cell_of_the_matrix_is_right() {
    let scene = MemoryScene::new();
    let (mut cells, mut allowed) = (0, 0);
    for sandbox in ["sandbox-a", "sandbox-b", "sandbox-c"] {
        let token = scene.token(sandbox);
        let mut client = scene.connect(sandbox);
        for environment in ["staging", "production"] {
            for bank in ["team-a", "team-b", "shared"] {
                let bank = format!("{environment}:{bank}");
                let rights = RIGHTS.iter().find(|(who, what, _)| *who == sandbox && *what == bank);
                let rights = rights.map(|(_, _, rights)| *rights).unwrap_or_default();
                for (method, path, right) in OPERATIONS {
                    let cell = format!("{sandbox} {method} {path} {bank}");
                    let answer = client
                        .send(&operation_request(method, path, &bank).with_field("Sandbox-Identity", &token));
                    cells += 1;
                    if rights.contains(&right) {
                        allowed += 1;
                        assert_eq!(answer.status, 200, "{cell}: {}", answer.text());
                        assert_eq!(answer.reason(), None, "{cell}");
                    } else {
                        let reason = match right {
                            BankRight::Administer => "memory_operation",
                            BankRight::Forget | BankRight::Recall | BankRight::Retain => "foreign_bank",
                        };
                        assert_eq!(answer.reason(), Some(reason), "{cell}: {}", answer.status);
                    }
                    assert_eq!(scene.arrived_requests().len(), allowed, "{cell}");
                }
            }
        }
    }
    assert_eq!(cells, 3 * 3 * 2 * OPERATIONS.len());
    for seen in scene.arrived_requests() {
        let headers = seen["headers"].as_array().unwrap();
        let principal = headers.iter().find(|pair| pair[0] == "x-astrocyte-principal").unwrap();
        let who = principal[1].as_str().unwrap().trim_start_matches("agent:").to_owned();
        let said = format!("{} {}", seen["target"], seen["body"]);
        let own = |(sandbox, bank, _): &&(&str, &str, &[BankRight])| *sandbox == who && said.contains(bank);
        assert!(RIGHTS.iter().any(|cell| own(&cell)), "{who}: {said}");
    }
}
