//! What a record says of bytes: all that left for the sandbox and all that came back, heads included, to the byte.

use integration::sandbar;
use serde_json::Value;

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::http2;
use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::{OriginReply, ScriptedOrigin};

const SAID: &[u8] = b"HTTP/1.1 200 Fine\r\nContent-Length: 3\r\nX-Long: yyyyyyyyyyyyyyyyyyyy\r\n\r\nabc";

/// Bytes that the origin was sent on all its connections.
fn arrived(origin: &ScriptedOrigin) -> u64 {
    origin.connections().iter().map(|seen| seen.bytes.len() as u64).sum()
}

fn wait_for_outcome(world: &SandbarInstance, since: usize) -> Value {
    world.wait_for_record(since, "the outcome", |record| {
        record["unmapped"]["sandbar"]["ending"].is_string() && record["http_request"].is_object()
    })
}

#[test]
fn heads_count_in_the_record_to_the_byte() {
    let root = OriginCa::new();
    let (plain, tls) =
        (ScriptedOrigin::start_plain(), ScriptedOrigin::start_tls(root.server_config("a.test")));
    let hosts = [("a.test", plain.port()), ("a.test", tls.port())];
    let world = InstanceSetup::with_hosts(&hosts).with_roots(root.pem()).start();
    plain.set_reply(OriginReply::Say(SAID.to_vec()));
    tls.set_reply(OriginReply::Say(SAID.to_vec()));
    let (query, field) = ("q".repeat(4500), "f".repeat(4500));
    let host = format!("a.test:{}", plain.port());
    let head = format!(
        "GET /x?{query} HTTP/1.1\r\nHost: {host}\r\nX-Field: {field}\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n"
    );
    let since = world.record_count();
    let mut wire = world.open_tunnel("a.test", plain.port());
    wire.send(&head);
    assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200));
    let record = wait_for_outcome(&world, since);
    assert!(arrived(&plain) > 9000 && (arrived(&plain) as usize) < head.len(), "what is removed is not sent");
    assert_eq!(record["traffic"]["bytes_out"], arrived(&plain), "{record:#}");
    assert_eq!(record["traffic"]["bytes_in"], SAID.len(), "{record:#}");
    assert_eq!(record["unmapped"]["sandbar"].get("sends"), None, "{record:#}");
    // The same number, whatever version the sandbox uses.
    let since = world.record_count();
    let wire = tls_handshake(world.open_tunnel("a.test", tls.port()), &client_config(&world, "h2"), "a.test");
    let mut connection = http2::Http2Client::new(wire.unwrap());
    let mut fields =
        http2::request_fields("GET", "https", &format!("a.test:{}", tls.port()), &format!("/x?{query}"));
    fields.push(("x-field".into(), field.into_bytes()));
    connection.send_headers(1, &fields, true);
    assert_eq!(connection.wait_for_status(1), Some(200));
    let record = wait_for_outcome(&world, since);
    assert!(arrived(&tls) > 9000);
    assert_eq!(record["traffic"]["bytes_out"], arrived(&tls), "{record:#}");
    assert_eq!(record["traffic"]["bytes_in"], SAID.len(), "{record:#}");
    // And in what is added up from records.
    let sums = sandbar().args(["log", "query", "--json"]).arg(world.log_dir()).output().unwrap();
    let sums: Value = serde_json::from_slice(&sums.stdout).unwrap();
    let row = sums["hosts"].as_array().unwrap().iter().find(|row| row["host"] == "a.test").unwrap();
    assert_eq!(row["bytes_out"], arrived(&plain) + arrived(&tls), "{sums:#}");
    assert_eq!(row["bytes_in"], 2 * SAID.len(), "{sums:#}");
}

#[test]
fn a_request_that_is_sent_twice_says_so() {
    let origin = ScriptedOrigin::start_plain();
    let mut plan = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
    plan.policy = format!("[budget]\nupload_bytes_per_hour = 100000\n{}", plan.policy);
    let world = plan.start();
    let host = format!("a.test:{}", origin.port());
    let mut wire = world.open_tunnel("a.test", origin.port());
    wire.send(format!("GET /1 HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    assert_eq!(wire.read_response("GET").map(|answer| answer.status), Some(200));
    let first = arrived(&origin);
    // Its pooled connection ends without an answer, and so does the new one.
    origin.set_reply(OriginReply::SayAndClose(Vec::new()));
    wire.send(format!("GET /2 HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    let answer = wire.read_response("GET").unwrap();
    world.assert_refused("no answer", &answer, 502, "upstream_broke");
    let targets: Vec<String> = origin.requests().into_iter().map(|request| request.target).collect();
    assert_eq!(targets, ["/1", "/2", "/2"], "a GET is sent again");
    let record = world.wait_for_end(answer.field("sandbar-record").unwrap());
    assert_eq!(record["unmapped"]["sandbar"]["sends"], 2, "{record:#}");
    assert_eq!(record["traffic"]["bytes_out"], arrived(&origin) - first, "{record:#}");
    let used: Value = serde_json::from_str(&world.run_command(&["budget", "--json"])).unwrap();
    assert_eq!(used["sandboxes"][0]["budgets"][0]["used"], arrived(&origin), "{used:#}");
}
