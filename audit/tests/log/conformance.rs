//! Every class against the OCSF 1.8 schema: required members, enumerations, constraints.

use audit::{
    AttemptOutcome, DetectionFinding, Ending, FindingSeverity, Lifecycle, LifecycleEvent, Log, StableCode,
};
use serde_json::Value;

use crate::support::*;

/// The published schema of a class: its number, its activities, the required members, groups of
/// which at least one member is required, and its status values.
struct ClassSchema {
    uid: u64,
    name: &'static str,
    category: (u64, &'static str),
    activities: &'static [(u64, &'static str)],
    required: &'static [&'static str],
    at_least_one: &'static [&'static [&'static str]],
    status: &'static [(u64, &'static str)],
    /// Members that the class, its category or its profile `host` defines.
    members: &'static [&'static str],
    profiles: &'static [&'static str],
}

const STATUS: &[(u64, &str)] = &[(0, "Unknown"), (1, "Success"), (2, "Failure"), (99, "Other")];
const PROFILES: &[&str] = &["security_control", "datetime"];
/// The profile `host` defines `actor` for classes that do not.
const PROFILES_HOST: &[&str] = &["security_control", "datetime", "host"];
const NETWORK: (u64, &str) = (4, "Network Activity");
const APPLICATION: (u64, &str) = (6, "Application Activity");

const CLASSES: &[ClassSchema] = &[
    ClassSchema {
        uid: 4001,
        name: "Network Activity",
        category: NETWORK,
        activities: &[
            (0, "Unknown"),
            (1, "Open"),
            (2, "Close"),
            (3, "Reset"),
            (4, "Fail"),
            (5, "Refuse"),
            (6, "Traffic"),
            (7, "Listen"),
            (99, "Other"),
        ],
        required: &[],
        at_least_one: &[&["dst_endpoint", "src_endpoint"]],
        status: STATUS,
        members: &["actor", "src_endpoint", "dst_endpoint", "connection_info", "tls", "traffic"],
        profiles: PROFILES_HOST,
    },
    ClassSchema {
        uid: 4002,
        name: "HTTP Activity",
        category: NETWORK,
        activities: &[
            (0, "Unknown"),
            (1, "Connect"),
            (2, "Delete"),
            (3, "Get"),
            (4, "Head"),
            (5, "Options"),
            (6, "Post"),
            (7, "Put"),
            (8, "Trace"),
            (9, "Patch"),
            (99, "Other"),
        ],
        required: &[],
        at_least_one: &[&["http_request", "http_response"], &["dst_endpoint", "src_endpoint"]],
        status: STATUS,
        members: &[
            "src_endpoint",
            "dst_endpoint",
            "connection_info",
            "traffic",
            "http_request",
            "http_response",
            "actor",
        ],
        profiles: PROFILES_HOST,
    },
    ClassSchema {
        uid: 4003,
        name: "DNS Activity",
        category: NETWORK,
        activities: &[(0, "Unknown"), (1, "Query"), (2, "Response"), (6, "Traffic"), (99, "Other")],
        required: &[],
        at_least_one: &[&["dst_endpoint", "src_endpoint"]],
        status: STATUS,
        members: &[
            "src_endpoint",
            "dst_endpoint",
            "connection_info",
            "traffic",
            "query",
            "answers",
            "rcode_id",
            "actor",
        ],
        profiles: PROFILES_HOST,
    },
    ClassSchema {
        uid: 6003,
        name: "API Activity",
        category: APPLICATION,
        activities: &[
            (0, "Unknown"),
            (1, "Create"),
            (2, "Read"),
            (3, "Update"),
            (4, "Delete"),
            (99, "Other"),
        ],
        required: &["actor", "api", "src_endpoint"],
        at_least_one: &[],
        status: STATUS,
        members: &[
            "src_endpoint",
            "dst_endpoint",
            "http_request",
            "http_response",
            "api",
            "resources",
            "actor",
        ],
        profiles: PROFILES,
    },
    ClassSchema {
        uid: 2004,
        name: "Detection Finding",
        category: (2, "Findings"),
        activities: &[(0, "Unknown"), (1, "Create"), (2, "Update"), (3, "Close"), (99, "Other")],
        required: &["finding_info"],
        at_least_one: &[],
        status: &[(0, "Unknown"), (1, "New"), (2, "In Progress"), (4, "Resolved"), (99, "Other")],
        members: &["actor", "evidences", "finding_info"],
        profiles: PROFILES_HOST,
    },
    ClassSchema {
        uid: 6002,
        name: "Application Lifecycle",
        category: APPLICATION,
        activities: &[
            (0, "Unknown"),
            (1, "Install"),
            (2, "Remove"),
            (3, "Start"),
            (4, "Stop"),
            (99, "Other"),
        ],
        required: &["app"],
        at_least_one: &[],
        status: STATUS,
        members: &["app"],
        profiles: PROFILES,
    },
];

/// Members that the base event and the profiles `security_control` and `datetime` define.
const BASE: &[&str] = &[
    "action",
    "action_id",
    "activity_id",
    "activity_name",
    "category_name",
    "category_uid",
    "class_name",
    "class_uid",
    "disposition",
    "disposition_id",
    "duration",
    "firewall_rule",
    "is_alert",
    "message",
    "metadata",
    "policy",
    "severity",
    "severity_id",
    "status",
    "status_detail",
    "status_id",
    "time",
    "time_dt",
    "type_uid",
    "unmapped",
];
const REQUIRED: &[&str] =
    &["activity_id", "category_uid", "class_uid", "metadata", "severity_id", "time", "type_uid"];
const SEVERITY: &[(u64, &str)] = &[
    (0, "Unknown"),
    (1, "Informational"),
    (2, "Low"),
    (3, "Medium"),
    (4, "High"),
    (5, "Critical"),
    (6, "Fatal"),
    (99, "Other"),
];
const ACTION: &[(u64, &str)] = &[(0, "Unknown"), (1, "Allowed"), (2, "Denied")];
const DISPOSITION: &[(u64, &str)] = &[
    (0, "Unknown"),
    (1, "Allowed"),
    (2, "Blocked"),
    (6, "Dropped"),
    (15, "Detected"),
    (16, "No Action"),
    (24, "Access Revoked"),
    (25, "Rejected"),
    (26, "Unauthorized"),
    (27, "Error"),
];
/// Response codes of RFC 6895 that the schema numbers identically.
const RCODE: std::ops::RangeInclusive<u64> = 0..=11;

/// Requirements of objects: path, required members, members of which one is required.
const OBJECTS: &[(&str, &[&str], &[&str])] = &[
    ("/metadata", &["product", "version"], &[]),
    ("/metadata/product", &["vendor_name"], &["name", "uid"]),
    ("/app", &["vendor_name"], &["name", "uid"]),
    ("/actor", &[], &["process", "user", "invoked_by", "session", "app_name", "app_uid"]),
    ("/actor/user", &[], &["account", "name", "uid"]),
    ("/src_endpoint", &[], &["ip", "uid", "name", "hostname"]),
    ("/dst_endpoint", &[], &["ip", "uid", "name", "hostname"]),
    ("/connection_info", &["direction_id"], &[]),
    ("/tls", &["version"], &[]),
    ("/http_request/url", &[], &["url_string", "path"]),
    ("/http_response", &["code"], &[]),
    ("/query", &["hostname"], &[]),
    ("/answers/0", &["rdata"], &[]),
    ("/api", &["operation"], &[]),
    ("/resources/0", &[], &["name", "uid"]),
    ("/finding_info", &["uid", "title"], &[]),
    ("/finding_info/related_events/0", &["uid"], &[]),
    ("/evidences/0", &[], &["dst_endpoint", "src_endpoint", "actor"]),
    ("/evidences/0/dst_endpoint", &[], &["ip", "uid", "name", "hostname"]),
    ("/firewall_rule", &[], &["name", "uid"]),
    ("/policy", &[], &["name", "uid"]),
];

#[tokio::test]
async fn every_record_conforms() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config.clone()).unwrap();
    write_everything(&log).await;
    log.reopen().unwrap();
    log.close();
    drop(log);
    drop(Log::open(config).unwrap()); // closes open decisions as unknown
    let mut seen = Vec::new();
    for record in records(&dir) {
        assert_conforms(&record);
        seen.push(record["class_uid"].as_u64().unwrap());
    }
    for class in CLASSES {
        assert!(seen.contains(&class.uid), "no record of {}", class.name);
    }
}

/// Writes every class, allowed and denied, with every ending.
async fn write_everything(log: &Log) {
    for method in ["GET", "POST", "BREW"] {
        let host = "api.openai.com".into();
        let facts = audit::RecordedRequest::new(method.as_bytes(), audit::HttpScheme::Http, host, 80, b"/");
        open_record(log, audit::RecordedFacts::Request(facts))
            .record_refusal(verdict("not_listed"))
            .await
            .unwrap();
    }
    let reason = rules::Reason::UpstreamBroke;
    let endings = [
        Ending::Abandoned,
        Ending::Completed,
        Ending::Failed(reason.into()),
        Ending::Refused(reason.into()),
        Ending::Revoked(reason),
    ];
    for ending in endings {
        for facts in [tunnel("a.example"), audit::RecordedFacts::Request(request("/")), query(), memory()] {
            let mut decided = open_record(log, facts.clone());
            let _receipt = decided.record_decision(verdict("allowed")).await.unwrap();
            decided.close(AttemptOutcome { ending, status: Some(200), ..answered_outcome() });
            open_record(log, facts.clone()).close(AttemptOutcome::new(ending));
            log.open_record(arrival()).close(AttemptOutcome::new(ending));
            let mut forgotten = open_record(log, facts);
            let _receipt = forgotten.record_decision(verdict("allowed")).await.unwrap();
            std::mem::forget(forgotten);
        }
    }
    // A channel without a sandbox or an address.
    let unattributed = audit::RecordedArrival { source: None, original_dst: None, ..arrival() };
    for facts in [tunnel("a.example"), memory()] {
        let mut record = log.open_record(unattributed.clone());
        record.set_facts(facts);
        record.record_refusal(audit::DecisionDetails::new(StableCode("unknown_channel"))).await.unwrap();
    }
    write_events(log).await;
}

async fn write_events(log: &Log) {
    use LifecycleEvent::*;
    for event in [
        CanaryMade,
        CanaryRemoved,
        GrantEnded,
        GrantMade,
        GrantRefused,
        GrantUsed,
        PolicyLoaded,
        PolicyRejected,
        RunEnded,
        Started,
        Stopped,
    ] {
        let policy = verdict("x").policy;
        let event = Lifecycle { event, message: Some("policies/build-agent.toml".into()), policy };
        log.record_lifecycle(&event).await.unwrap();
    }
    for severity in
        [FindingSeverity::Critical, FindingSeverity::High, FindingSeverity::Low, FindingSeverity::Medium]
    {
        let finding = DetectionFinding {
            code: audit::FindingCode::IdentityMismatch,
            title: "the signed identity is another sandbox's".into(),
            severity,
            message: None,
            score: Some(70),
            features: vec![audit::ScoreFeature { name: StableCode("header_entropy"), score: 70 }],
        };
        open_record(log, tunnel("a.example")).record_finding(&finding).await.unwrap();
    }
}

/// Checks that every member is in the README's table.
fn assert_documented(path: &str, value: &Value) {
    const README: &str = include_str!("../../README.md");
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                assert_documented(format!("{path}.{name}").trim_start_matches('.'), value);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items.iter().for_each(|item| assert_documented(&format!("{path}[]"), item));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            assert!(README.contains(&format!("| `{path}` |")), "{path} is not documented");
        }
    }
}

fn assert_conforms(record: &Value) {
    assert_documented("", record);
    let uid = record["class_uid"].as_u64().unwrap();
    let class = CLASSES.iter().find(|class| class.uid == uid).unwrap();
    for member in REQUIRED.iter().chain(class.required) {
        assert!(record.get(member).is_some(), "{member} is required: {record}");
    }
    for group in class.at_least_one {
        assert!(group.iter().any(|member| record.get(member).is_some()), "{group:?}: {record}");
    }
    for member in record.as_object().unwrap().keys() {
        let known = BASE.contains(&member.as_str()) || class.members.contains(&member.as_str());
        assert!(known, "{} has no {member}", class.name);
    }
    assert_eq!(record["class_name"], class.name);
    assert_eq!(
        (&record["category_uid"], &record["category_name"]),
        (&class.category.0.into(), &class.category.1.into())
    );
    assert_listed(record, "activity_id", "activity_name", class.activities);
    assert_listed(record, "severity_id", "severity", SEVERITY);
    assert_listed(record, "status_id", "status", class.status);
    assert_listed(record, "action_id", "action", ACTION);
    assert_listed(record, "disposition_id", "disposition", DISPOSITION);
    assert!(record.get("rcode_id").is_none_or(|code| RCODE.contains(&code.as_u64().unwrap())));
    let activity = record["activity_id"].as_u64().unwrap();
    assert_eq!(record["type_uid"], uid * 100 + activity);
    assert_eq!(record["metadata"]["version"], "1.8.0");
    assert_eq!(record["metadata"]["profiles"], serde_json::json!(class.profiles));
    assert_objects(record);
}

fn assert_listed(record: &Value, id: &str, name: &str, values: &[(u64, &str)]) {
    let Some(found) = record.get(id).map(|id| id.as_u64().unwrap()) else { return };
    let expected = values.iter().find(|(value, _)| *value == found);
    let (_, caption) = expected.unwrap_or_else(|| panic!("{id} {found} is not in the schema"));
    assert_eq!(record[name], *caption, "{record}");
}

fn assert_objects(record: &Value) {
    for (path, required, one_of) in OBJECTS {
        let Some(object) = record.pointer(path) else { continue };
        for member in *required {
            assert!(object.get(member).is_some(), "{path}/{member} is required: {record}");
        }
        let one = one_of.is_empty() || one_of.iter().any(|member| object.get(member).is_some());
        assert!(one, "{path} needs one of {one_of:?}: {record}");
    }
}

#[tokio::test]
async fn members_are_in_one_order() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    write_everything(&log).await;
    log.close();
    let order = documented_order();
    for line in lines(&dir) {
        let record: Value = serde_json::from_str(&line).unwrap();
        let mut at = 0;
        for member in order.iter().filter(|member| record.get(member.as_str()).is_some()) {
            let key = format!("\"{member}\":");
            // Nested members may share a name: look for the top-level one after the previous member.
            let found = line.get(at..).and_then(|rest| rest.find(&key));
            let found = found.unwrap_or_else(|| panic!("{member} is out of order: {line}"));
            at += found + key.len() + record[member.as_str()].to_string().len();
        }
        assert!(line.ends_with("\"}}}}"), "the hash is last: {line}");
    }
}

/// Returns the top-level members of a record, in the order of the README's table.
fn documented_order() -> Vec<String> {
    let rows = include_str!("../../README.md").lines().filter_map(|line| line.strip_prefix("| `"));
    let names = rows.filter_map(|row| row.split('`').next()).skip_while(|name| *name != "time");
    let mut order: Vec<String> =
        names.map(|name| name.split(['.', '[']).next().unwrap().to_owned()).collect();
    order.dedup();
    order
}
