//! What DNS names say: a canary or an injected value in a name that a rule allows is refused before any resolver is asked
//! (P5, P11), recorded with its code, and the finding names the attempt.

use std::fs;
use std::net::SocketAddr;

use integration::{NameRecorder, ask_name};
use serde_json::Value;

use crate::instance::{InstanceSetup, SandbarInstance, wait_until};

/// The value of a credential that fits into a name.
const INJECTED: &str = "k7f3q9x2m5v8t1z4w6r0";

fn dns_address(world: &SandbarInstance) -> SocketAddr {
    let find = || {
        let told = world.stderr_text();
        let said = told.lines().find_map(|line| line.split_once("listening: dns "));
        said.and_then(|(_, address)| address.split_whitespace().next()?.parse().ok())
    };
    wait_until("the DNS filter listens", || find().is_some());
    find().unwrap()
}

/// The refusal of `name` is recorded with `code`, with a finding that names its attempt.
fn assert_name_refused(world: &SandbarInstance, name: &str, code: &str) {
    let refused = world.wait_for_record(0, &format!("{name} is refused as {code}"), |record| {
        record["class_uid"] == 4003
            && record["status_detail"] == code
            && record.to_string().to_ascii_lowercase().contains(name)
    });
    let attempt = &refused["metadata"]["correlation_uid"];
    assert!(attempt.is_string(), "{refused}");
    world.wait_for_record(0, "the finding names the attempt", |record| {
        record["class_uid"] == 2004
            && record["finding_info"]["types"][0] == code
            && record["finding_info"]["related_events"][0]["uid"] == *attempt
    });
}

#[test]
fn p11_a_canary_or_an_injected_value_in_a_name_reaches_no_resolver() {
    let resolver = NameRecorder::start();
    let secret = tempfile::tempdir().unwrap();
    fs::write(secret.path().join("key"), INJECTED).unwrap();
    let tables = format!(
        "[[credential]]\nname = \"key\"\nfile = \"{}\"\nhosts = [\"keyed.test\"]\n\
         [[listener]]\nmode = \"dns\"\nbind = [\"127.0.0.9:0\"]\nsandbox = \"one\"\ndangerously_share_address = true\n",
        secret.path().join("key").display()
    );
    let policy = "[[allow]]\nname = \"zone\"\nhosts = [\"*.zone.example\"]\n".to_owned();
    let resolver_address = Some(resolver.address);
    let setup = InstanceSetup { policy, tables, resolver: resolver_address, ..InstanceSetup::default() };
    let world = setup.start();
    let server = dns_address(&world);
    let made = world.run_command(&["canary", "new", "planted", "--shape", "dns-name", "--json"]);
    let made: Value = serde_json::from_str(&made).unwrap();
    let planted = made["text"].as_str().unwrap().split('.').next().unwrap().to_ascii_lowercase();
    assert_eq!(ask_name(server, "plain.zone.example"), 0);
    assert_eq!(resolver.names(), ["plain.zone.example"], "an honest name is asked for");
    for (label, code) in [(planted.as_str(), "canary_used"), (INJECTED, "credential_leaving")] {
        for name in
            [format!("{label}.zone.example"), format!("x{}.a.zone.example", label.to_ascii_uppercase())]
        {
            assert_ne!(ask_name(server, &name), 0, "{name}");
            assert_name_refused(&world, &name.to_ascii_lowercase(), code);
        }
    }
    assert_eq!(resolver.names(), ["plain.zone.example"], "nothing else reached the resolver");
}
