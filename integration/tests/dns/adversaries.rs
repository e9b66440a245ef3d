//! Real tunnels under an allowed wildcard whose server the adversary owns: the worst case.

use std::fs;

use super::{Net, findings, stage};

/// How long a tunnel may try; by then its budget has been gone for long.
const TRY: &str = "12";
/// Bits of a rule in the first hour, at the price of 5.3 an octet: what names can carry at most.
const OCTETS: usize = (4096 + 2048) * 10 / 53;

fn chosen_octets(records: &[serde_json::Value]) -> usize {
    let name = |record: &serde_json::Value| record["query"]["hostname"].as_str().unwrap().len();
    stage(records, "decision").map(|record| name(record) - "wild.example".len()).sum()
}

#[test]
fn iodine_gets_no_more_out_than_the_budget() {
    assert!(fs::metadata("/dev/net/tun").is_ok(), "iodine needs /dev/net/tun");
    let mut net = Net::new();
    let gateway = net.gateway.clone();
    let server =
        ["-f", "-c", "-P", "pw", "-l", "127.0.0.1", "-p", "5300", "10.99.0.1", "t.wild.example"];
    net.start(&gateway, "iodined", &server, "Listening to dns");
    net.serve("127.0.0.1:5300");
    let client = [
        "-k",
        "2",
        TRY,
        "iodine",
        "-f",
        "-r",
        "-P",
        "pw",
        "-T",
        "A",
        "10.200.0.1",
        "t.wild.example",
    ];
    let output = net.inside(&net.sandbox.clone(), "timeout", &client).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let records = net.records();
    let (octets, sent) = (chosen_octets(&records), stage(&records, "decision").count());
    println!(
        "iodine: {sent} queries with {octets} octets got out; the budget of an hour is {OCTETS} octets"
    );
    assert!(sent > 0, "iodine did not even try: {said}");
    assert!(octets <= OCTETS, "{octets}");
    assert!(
        !said.contains("Connection setup complete")
            || findings(&records).iter().any(|code| code == "dns_budget_exhausted"),
        "{said}"
    );
}

#[test]
fn dns2tcp_gets_nothing_out() {
    let mut net = Net::new();
    let config = net.dir.path().join("dns2tcpd.conf");
    fs::write(&config, "listen = 127.0.0.1\nport = 5300\nuser = nobody\nchroot = /tmp\ndomain = t.wild.example\nkey = k\nresources = ssh:127.0.0.1:22\n").unwrap();
    let path = config.display().to_string();
    let gateway = net.gateway.clone();
    net.start(&gateway, "dns2tcpd", &["-F", "-d", "1", "-f", &path], "isten");
    net.serve("127.0.0.1:5300");
    // It asks once somebody connects to its end of the tunnel.
    let script = "dns2tcpc -z t.wild.example -k k -r ssh -l 2222 10.200.0.1 & \
                  for turn in 1 2 3 4 5 6 7 8; do curl -s -m 3 telnet://127.0.0.1:2222 && break; done; wait";
    net.inside(&net.sandbox.clone(), "timeout", &["-k", "2", "8", "sh", "-c", script])
        .output()
        .unwrap();
    let records = net.records();
    assert!(stage(&records, "denied").count() > 0, "dns2tcp did not even try");
    assert_eq!(stage(&records, "decision").count(), 0, "TXT and KEY are no types of the rule");
    println!("dns2tcp: {} queries refused, none got out", stage(&records, "denied").count());
}

#[test]
fn case_62_a_query_to_another_resolver_comes_to_the_filter_and_case_63_nothing_else_passes() {
    let mut net = Net::new();
    net.resolver();
    net.serve("127.0.0.1:5300");
    let rules = "table ip t { chain p { type nat hook prerouting priority dstnat; udp dport 53 redirect; tcp dport 53 redirect; }\n\
        chain f { type filter hook forward priority 0; policy drop; }\n}\n";
    let file = net.dir.path().join("rules.nft");
    fs::write(&file, rules).unwrap();
    let path = file.display().to_string();
    assert!(net.inside(&net.gateway.clone(), "nft", &["-f", &path]).status().unwrap().success());
    for (over, expected) in [("+notcp", "93.184.216.34"), ("+tcp", "93.184.216.34")] {
        let output = net
            .inside(
                &net.sandbox.clone(),
                "dig",
                &["+short", "+time=5", "+tries=1", over, "@8.8.8.8", "github.com", "A"],
            )
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected, "{over}");
    }
    for port in ["443", "853", "784", "8853"] {
        let output = net
            .inside(
                &net.sandbox.clone(),
                "dig",
                &["+time=1", "+tries=1", "-p", port, "@8.8.8.8", "github.com"],
            )
            .output()
            .unwrap();
        assert!(!output.status.success(), "port {port}");
    }
    let records = net.records();
    assert_eq!(stage(&records, "decision").count(), 1);
}
