//! Who may do what: every sandbox, every bank, every operation, both environments. Each cell is asked for, and
//! what arrives at the service is what may.

use super::client::Ask;
use super::scene::Scene;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Right {
    /// Nobody's.
    Administer,
    Forget,
    Recall,
    Retain,
}

/// What policy and environment come to, said a second time and without patterns.
const MAY: [(&str, &str, &[Right]); 6] = [
    ("sandbox-a", "staging:team-a", &[Right::Recall, Right::Retain, Right::Forget]),
    ("sandbox-a", "staging:shared", &[Right::Recall, Right::Retain]),
    ("sandbox-b", "staging:team-b", &[Right::Recall, Right::Retain, Right::Forget]),
    ("sandbox-b", "staging:shared", &[Right::Recall]),
    ("sandbox-c", "production:team-a", &[Right::Recall, Right::Retain]),
    ("sandbox-c", "production:shared", &[Right::Recall]),
];

const OPERATIONS: [(&str, &str, Right); 27] = [
    ("POST", "/v1/recall", Right::Recall),
    ("POST", "/v1/debug/recall", Right::Recall),
    ("POST", "/v1/reflect", Right::Recall),
    ("POST", "/v1/history", Right::Recall),
    ("POST", "/v1/audit", Right::Recall),
    ("POST", "/v1/graph/search", Right::Recall),
    ("POST", "/v1/graph/neighbors", Right::Recall),
    ("GET", "/v1/mental-models", Right::Recall),
    ("GET", "/v1/mental-models/m1", Right::Recall),
    ("POST", "/v1/retain", Right::Retain),
    ("POST", "/v1/compile", Right::Retain),
    ("POST", "/v1/mental-models", Right::Retain),
    ("POST", "/v1/mental-models/m1/refresh", Right::Retain),
    ("POST", "/v1/forget", Right::Forget),
    ("POST", "/v1/observations/invalidate", Right::Forget),
    ("DELETE", "/v1/mental-models/m1", Right::Forget),
    ("POST", "/v1/dsar/forget_principal", Right::Administer),
    ("POST", "/v1/export", Right::Administer),
    ("POST", "/v1/import", Right::Administer),
    ("POST", "/v1/ingest/webhook/s1", Right::Administer),
    ("POST", "/v1/admin/lifecycle", Right::Administer),
    ("GET", "/v1/admin/banks", Right::Administer),
    ("GET", "/v1/admin/banks/health", Right::Administer),
    ("POST", "/v1/admin/banks/m1/hold", Right::Administer),
    ("DELETE", "/v1/admin/banks/m1/hold/h1", Right::Administer),
    ("GET", "/v1/admin/sources", Right::Administer),
    ("GET", "/v1/admin/tenants/acme/storage", Right::Administer),
];

fn ask(method: &str, path: &str, bank: &str) -> Ask {
    match method {
        "POST" => Ask::post(
            path,
            &format!(r#"{{"query":"x","content":"x","memory_ids":["m"],"bank_id":"{bank}"}}"#),
        ),
        method => Ask::get(&format!("{path}?bank_id={bank}")).method(method),
    }
}

#[test]
fn every_cell_of_the_matrix_is_right() {
    let scene = Scene::new();
    let (mut cells, mut allowed) = (0, 0);
    for sandbox in ["sandbox-a", "sandbox-b", "sandbox-c"] {
        let token = scene.token(sandbox);
        let mut client = scene.client(sandbox);
        for environment in ["staging", "production"] {
            for bank in ["team-a", "team-b", "shared"] {
                let bank = format!("{environment}:{bank}");
                let rights = MAY.iter().find(|(who, what, _)| *who == sandbox && *what == bank);
                let rights = rights.map(|(_, _, rights)| *rights).unwrap_or_default();
                for (method, path, right) in OPERATIONS {
                    let cell = format!("{sandbox} {method} {path} {bank}");
                    let answer =
                        client.ask(&ask(method, path, &bank).with("Sandbox-Identity", &token));
                    cells += 1;
                    if rights.contains(&right) {
                        allowed += 1;
                        assert_eq!(answer.status, 200, "{cell}: {}", answer.text());
                        assert_eq!(answer.reason(), None, "{cell}");
                    } else {
                        let reason = match right {
                            Right::Administer => "memory_operation",
                            Right::Forget | Right::Recall | Right::Retain => "foreign_bank",
                        };
                        assert_eq!(answer.reason(), Some(reason), "{cell}: {}", answer.status);
                    }
                    assert_eq!(scene.seen().len(), allowed, "{cell}");
                }
            }
        }
    }
    assert_eq!(cells, 3 * 3 * 2 * OPERATIONS.len());
    for seen in scene.seen() {
        let headers = seen["headers"].as_array().unwrap();
        let principal = headers.iter().find(|pair| pair[0] == "x-astrocyte-principal").unwrap();
        let who = principal[1].as_str().unwrap().trim_start_matches("agent:").to_owned();
        let said = format!("{} {}", seen["target"], seen["body"]);
        let own =
            |(sandbox, bank, _): &&(&str, &str, &[Right])| *sandbox == who && said.contains(bank);
        assert!(MAY.iter().any(|cell| own(&cell)), "{who}: {said}");
    }
}
