//! Honest clients: none loses a query that its policy allows, and none raises an alarm.

use std::fs;

use super::{Net, findings, stage};

/// `resolv.conf` of a pod: five suffixes, so that every name is tried six times.
const SEARCH: &str = "nameserver 10.200.0.1\nsearch default.svc.cluster.local svc.cluster.local cluster.local corp.example example\noptions ndots:5 timeout:5\n";

#[test]
fn honest_clients_lose_nothing_and_raise_nothing() {
    let mut net = Net::new();
    let etc = format!("/etc/netns/{}", net.sandbox);
    fs::create_dir_all(&etc).unwrap();
    fs::write(format!("{etc}/resolv.conf"), SEARCH).unwrap();
    net.resolver();
    net.serve("127.0.0.1:5300");
    let commands: [(&str, &[&str]); 7] = [
        ("dig", &["+short", "@10.200.0.1", "api.openai.com", "AAAA"]),
        ("dig", &["+short", "@10.200.0.1", "static.wild.example", "HTTPS"]),
        ("getent", &["ahosts", "github.com"]),
        ("curl", &["-s", "--connect-timeout", "1", "http://files.wild.example/"]),
        ("timeout", &["5", "git", "ls-remote", "http://github.com/a/b"]),
        (
            "timeout",
            &[
                "6",
                "pip3",
                "download",
                "--no-input",
                "--isolated",
                "--trusted-host",
                "registry.example",
                "--retries",
                "0",
                "--timeout",
                "1",
                "--index-url",
                "http://registry.example/simple",
                "x",
            ],
        ),
        (
            "timeout",
            &[
                "8",
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--user-data-dir=/tmp/sandbar-test-browser",
                "--dump-dom",
                "http://github.com/",
            ],
        ),
    ];
    for (program, args) in commands {
        let run = net.inside(&net.sandbox.clone(), program, args).output();
        assert!(run.is_ok(), "{program} does not run");
    }
    fs::remove_dir_all(&etc).unwrap();
    let records = net.records();
    assert_eq!(findings(&records), Vec::<String>::new());
    let listed = [
        "api.openai.com",
        "static.wild.example",
        "github.com",
        "files.wild.example",
        "registry.example",
    ];
    for name in listed {
        assert!(
            stage(&records, "decision").any(|record| record["query"]["hostname"] == name),
            "{name} was not asked for"
        );
    }
    let lost = stage(&records, "denied").filter(|record| {
        listed.iter().any(|name| record["query"]["hostname"] == *name)
            && record["status_detail"] != "dns_type_not_allowed"
    });
    assert_eq!(lost.count(), 0);
    let failed = stage(&records, "outcome")
        .filter(|record| record["unmapped"]["sandbar"]["ending"] == "failed");
    assert_eq!(failed.count(), 0);
}
