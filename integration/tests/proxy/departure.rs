//! Every kind of attempt departs alike, whichever way its client came: measured, recorded before it is counted as
//! allowed, listed and cut while it dials, and explained with the rule that permitted it (P7, P10, P16, P18).

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};

use serde_json::Value;

use super::client::{connect_tcp, read_head, send_text};
use super::operations::{fill_log, small_log_setup};
use super::origin::{ECHO, PLAIN_PORT, TLS_PORT};
use super::scene::{CurlResult, ProxyScene, ProxySetup, record_host, wait_until};

const PROXY_ADDRESS: &str = "10.77.0.1:3128";
/// Where transparent clients aim, which nobody uses.
const AIMED: &str = "1.2.3.4";
/// Longer than any client here waits: a dial that ends in time was cut.
const LONG_DIAL: &str = "connect_seconds = 120";
/// curl waited in vain.
const CURL_TIMEOUT: i32 = 28;

const SERVICE: &str = r#"
[[memory_service]]
host = "memory.example"
audience = "spiffe://acme.example/memory"
mode = "principal"
principal = "agent:{sandbox}"
"#;
const SANDBOXES: &str = r#"
[[sandbox]]
id = "box-0"
base = "system"
policies = ["p"]
interface = "sandbox0"
[[sandbox]]
id = "box-1"
tenant = "acme"
environment = "staging"
base = "system"
policies = ["m"]
interface = "sandbox1"
"#;

/// One kind of attempt, with a host and a rule of its own. The rule has the name of the kind.
#[derive(Clone, Copy, Debug)]
struct AttemptKind {
    rule: &'static str,
    host: &'static str,
    client: ClientKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientKind {
    Http(&'static [&'static str]),
    Memory,
    RawByAddress,
    RawByConnect,
    RawBySocks,
    TlsTunnel(&'static [&'static str]),
}

const KINDS: [AttemptKind; 10] = [
    AttemptKind { rule: "raw by address", host: "raw-address.example", client: ClientKind::RawByAddress },
    AttemptKind { rule: "raw by CONNECT", host: "raw-connect.example", client: ClientKind::RawByConnect },
    AttemptKind { rule: "raw by SOCKS5", host: "raw-socks.example", client: ClientKind::RawBySocks },
    AttemptKind { rule: "TLS by address", host: "tls-address.example", client: ClientKind::TlsTunnel(&[]) },
    AttemptKind {
        rule: "TLS by CONNECT",
        host: "tls-connect.example",
        client: ClientKind::TlsTunnel(&["-x", "http://10.77.0.1:3128"]),
    },
    AttemptKind {
        rule: "plain by address",
        host: "plain-address.example",
        client: ClientKind::Http(&["http"]),
    },
    AttemptKind {
        rule: "plain by proxy",
        host: "plain-proxy.example",
        client: ClientKind::Http(&["http", "-x", "http://10.77.0.1:3128"]),
    },
    AttemptKind {
        rule: "intercepted HTTP/1",
        host: "open.example",
        client: ClientKind::Http(&["https", "--http1.1"]),
    },
    AttemptKind {
        rule: "intercepted HTTP/2",
        host: "other.example",
        client: ClientKind::Http(&["https", "--http2"]),
    },
    AttemptKind { rule: "memory", host: "memory.example", client: ClientKind::Memory },
];

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    /// An answer at once; a refusal for people.
    Text,
    /// An answer at once; a refusal for machines.
    Json,
    /// An answer that never comes.
    Endless,
}

/// What the world does to connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DialFault {
    /// A SYN gets no answer.
    Drop,
    /// A SYN is answered with a reset.
    Refuse,
}

impl AttemptKind {
    fn is_http(&self) -> bool {
        matches!(self.client, ClientKind::Http(_) | ClientKind::Memory)
    }

    /// The sandbox that makes it. One that has memory may have no tunnels.
    fn sandbox(&self) -> usize {
        usize::from(self.client == ClientKind::Memory)
    }

    /// The policy of that sandbox.
    fn policy(&self) -> &'static str {
        ["p", "m"][self.sandbox()]
    }

    fn port(&self) -> u16 {
        match self.client {
            ClientKind::Http(["http", ..]) => PLAIN_PORT,
            ClientKind::Http(_) | ClientKind::Memory | ClientKind::TlsTunnel(_) => TLS_PORT,
            ClientKind::RawByAddress | ClientKind::RawByConnect | ClientKind::RawBySocks => ECHO,
        }
    }

    /// The addresses that the host may have.
    fn addresses(&self) -> [IpAddr; 2] {
        let at = 100 + KINDS.iter().position(|kind| kind.rule == self.rule).unwrap();
        [format!("93.184.216.{at}"), format!("2606:2800::{at}")].map(|text| text.parse().unwrap())
    }

    fn policy_rule(&self) -> String {
        let AttemptKind { rule, host, client } = self;
        let allow = |rest: &str| format!("[[allow]]\nname = \"{rule}\"\nhosts = [\"{host}\"]\n{rest}\n");
        match client {
            ClientKind::Http(_) => allow("ports = [80, 443]"),
            ClientKind::Memory => format!(
                "[[memory]]\nname = \"{rule}\"\nhost = \"{host}\"\nprofile = \"astrocyte\"\n\
                 identity = \"from-channel\"\nrecall = [\"staging:team\"]\n"
            ),
            ClientKind::RawByAddress | ClientKind::RawByConnect | ClientKind::RawBySocks => {
                allow(&format!("tcp = [{ECHO}]"))
            }
            ClientKind::TlsTunnel(_) => allow("tls = \"tunnel\""),
        }
    }

    /// Makes one attempt and sees it to its end.
    fn attempt(&self, scene: &DepartureScene, request: Request) -> CurlResult {
        match self.client {
            ClientKind::Http([scheme, options @ ..]) => self.curl(scene, scheme, options, request),
            ClientKind::Http([]) => panic!("{} has no scheme", self.rule),
            ClientKind::Memory => {
                let query = if request == Request::Endless { "hang" } else { "launch code" };
                let body = format!(r#"{{"query":"{query}","bank_id":"staging:team"}}"#);
                let options = ["-H", "Content-Type: application/json", "-d", &body];
                self.curl(scene, "https", &options, request)
            }
            ClientKind::RawByAddress | ClientKind::RawByConnect | ClientKind::RawBySocks => {
                let body = exchange_raw(self.connect_raw(scene), request);
                CurlResult { body, ..CurlResult::default() }
            }
            ClientKind::TlsTunnel(options) => {
                let options = [&["--insecure"], options].concat();
                self.curl(scene, "https", &options, request)
            }
        }
    }

    fn curl(&self, scene: &DepartureScene, scheme: &str, options: &[&str], request: Request) -> CurlResult {
        let AttemptKind { host, client, .. } = self;
        let path = match (client, request) {
            (ClientKind::Memory, _) => "/v1/recall",
            (_, Request::Endless) => "/hang",
            (_, Request::Json | Request::Text) => "/",
        };
        let (lie, url) = (format!("{host}:{}:{AIMED}", self.port()), format!("{scheme}://{host}{path}"));
        let accept = match request {
            Request::Json => "Accept: application/json",
            Request::Endless | Request::Text => "Accept: text/plain",
        };
        let args = [options, &["--resolve", &lie, "-H", accept, &url]].concat();
        let got = scene.inner.curl_in(self.sandbox(), &args);
        assert_ne!(got.exit, CURL_TIMEOUT, "{}: {got:?}", self.rule);
        got
    }

    fn connect_raw(&self, scene: &DepartureScene) -> TcpStream {
        let host = self.host;
        if self.client == ClientKind::RawByAddress {
            return connect_tcp(&scene.inner, 0, &format!("{}:{ECHO}", scene.synthetic_address));
        }
        let mut stream = connect_tcp(&scene.inner, 0, PROXY_ADDRESS);
        if self.client == ClientKind::RawByConnect {
            let target = format!("{host}:{ECHO}");
            send_text(&mut stream, &format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"));
            assert!(read_head(&mut stream).starts_with("HTTP/1.1 200"));
        } else {
            let length = u8::try_from(host.len()).unwrap();
            let greeting = [5, 1, 0, 5, 1, 0, 3, length];
            let asked = [&greeting, host.as_bytes(), &ECHO.to_be_bytes()].concat();
            stream.write_all(&asked).unwrap();
            let mut said = [0; 12];
            stream.read_exact(&mut said).unwrap();
            assert_eq!(said[..4], [5, 0, 5, 0], "SOCKS: {said:?}");
        }
        stream
    }
}

/// Sends `hello` and reads until the connection ends; a reset is an end.
fn exchange_raw(mut stream: TcpStream, request: Request) -> Vec<u8> {
    let sent = stream.write_all(b"hello");
    if sent.is_ok() && request != Request::Endless {
        drop(stream.shutdown(Shutdown::Write)); // it may have ended already
    }
    let mut body = Vec::new();
    if let Err(error) = stream.read_to_end(&mut body) {
        assert_ne!(error.kind(), ErrorKind::WouldBlock, "it goes on");
    }
    body
}

/// The scene with one host for each kind of attempt.
struct DepartureScene {
    inner: ProxyScene,
    /// The address that stands for the host of raw connections that come by address.
    synthetic_address: String,
}

impl DepartureScene {
    /// Starts a program for all kinds, whose hosts have their first `addresses` addresses.
    fn start(setup: ProxySetup, addresses: usize) -> Self {
        let inner = ProxyScene::prepare(ProxySetup {
            sandboxes: 2,
            head: SERVICE.to_owned(),
            identities: SANDBOXES.to_owned(),
            ..setup
        });
        write_policies(&inner, &KINDS);
        for kind in &KINDS {
            let all = kind.addresses().map(|address| address.to_string());
            let some: Vec<&str> = all.iter().take(addresses).map(String::as_str).collect();
            inner.names.set_addresses(kind.host, &some);
        }
        let mut scene = DepartureScene { inner, synthetic_address: String::new() };
        scene.inner.start();
        let args = ["+short", "+time=10", "+tries=2", "@10.77.0.1", "raw-address.example", "A"];
        let output = scene.inner.command_in(0, "dig").args(args).output().unwrap();
        scene.synthetic_address = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert!(scene.synthetic_address.starts_with("198.1"), "{}", scene.synthetic_address);
        scene
    }

    /// Lets connections to the first address of every host fail.
    fn set_fault(&self, fault: DialFault) {
        let verdict = match fault {
            DialFault::Drop => "drop",
            DialFault::Refuse => "reject with tcp reset",
        };
        let addresses: Vec<String> = KINDS.iter().map(|kind| kind.addresses()[0].to_string()).collect();
        self.inner.net.world.nft(&format!(
            "table inet fault {{\nchain arriving {{ type filter hook input priority 0;\n\
             ip daddr {{ {} }} meta l4proto tcp {verdict}\n}}\n}}\n",
            addresses.join(", ")
        ));
    }

    /// What is open, by host.
    fn connections(&self) -> BTreeMap<String, Value> {
        let (status, told) = self.inner.admin_request("GET", "/connections").unwrap();
        assert_eq!(status, 200, "{told}");
        let told: Value = serde_json::from_str(&told).unwrap();
        let listed = told["connections"].as_array().unwrap().iter();
        listed.map(|open| (open["host"].as_str().unwrap().to_owned(), open.clone())).collect()
    }

    /// Waits until every kind is listed under its rule with the address at `index` dialled.
    fn wait_all_listed(&self, index: usize) -> BTreeMap<String, Value> {
        let mut seen = BTreeMap::new();
        wait_until("all are listed with the address that is dialled", || {
            seen = self.connections();
            let listed = KINDS.iter().all(|kind| {
                seen.get(kind.host)
                    .is_some_and(|open| open["dialled"] == kind.addresses()[index].to_string().as_str())
            });
            listed.then_some(())
        });
        for kind in &KINDS {
            assert_eq!(seen[kind.host]["rule"], kind.rule);
            assert_eq!(seen[kind.host]["sandbox"], format!("box-{}", kind.sandbox()).as_str());
            assert_eq!(seen[kind.host]["port"], kind.port());
        }
        seen
    }

    /// Waits until the world has got a SYN for the address at `index` of every host.
    fn wait_all_dialled(&self, index: usize) {
        wait_until("all are dialled", || {
            let arrived = self.inner.net.arrivals();
            let dialled = |kind: &AttemptKind| {
                arrived.contains(&("tcp".to_owned(), kind.addresses()[index], kind.port()))
            };
            KINDS.iter().all(dialled).then_some(())
        });
    }

    fn cut(&self, open: &Value) {
        let path = format!("/connections/{}", open["id"]);
        let (status, said) = self.inner.admin_request("DELETE", &path).unwrap();
        assert!((200..300).contains(&status), "{path}: {status} {said}");
    }

    /// The records of how the attempts of a kind ended, once there are `count`.
    fn wait_for_outcomes(&self, kind: &AttemptKind, count: usize) -> Vec<Value> {
        let mut found = Vec::new();
        wait_until("the outcomes are recorded", || {
            found = self.inner.records();
            found.retain(|record| {
                let question = record["query"].is_object();
                !question && record_host(record) == kind.host && stage(record) == "outcome"
            });
            (found.len() >= count).then_some(())
        });
        assert_eq!(found.len(), count, "{found:#?}");
        found
    }

    /// The sum of all samples whose line begins like this.
    fn metric(&self, start: &str) -> u64 {
        let (_, text) = self.inner.admin_request("GET", "/metrics").unwrap();
        let samples = text.lines().filter(|line| line.starts_with(start));
        samples.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    }

    fn decisions(&self, reason: &str) -> u64 {
        self.metric(&format!("sandbar_decisions_total{{reason=\"{reason}\""))
    }

    fn assert_nothing_arrived(&self) {
        assert_eq!(self.inner.origin.requests().len(), 0);
        assert_eq!(self.inner.origin.raw_connections().len(), 0);
    }
}

/// Writes policies for some kinds, each with one rule that is always there.
fn write_policies(scene: &ProxyScene, kinds: &[AttemptKind]) {
    for name in ["p", "m"] {
        let own = kinds.iter().filter(|kind| kind.policy() == name);
        let rules: String = own.map(AttemptKind::policy_rule).collect();
        let always = "[[allow]]\nname = \"always\"\nhosts = [\"six.example\"]\nports = [80]\n";
        let text = format!("name = \"{name}\"\n{always}{rules}");
        fs::write(scene.dir.path().join(format!("policies/{name}.toml")), text).unwrap();
    }
}

fn stage(record: &Value) -> &str {
    record["unmapped"]["sandbar"]["stage"].as_str().unwrap_or_default()
}

fn ending(record: &Value) -> &str {
    record["unmapped"]["sandbar"]["ending"].as_str().unwrap_or_default()
}

/// Sees that every kind fails for `reason`, and that its rule is named wherever something can be said.
fn assert_failures_name_the_rule(scene: &DepartureScene, reason: &str) {
    for kind in &KINDS {
        for request in [Request::Text, Request::Json] {
            let got = kind.attempt(scene, request);
            let row = format!("{} {request:?}: {got:?}", kind.rule);
            if !kind.is_http() {
                // Nothing of ours is written into a tunnel: its client would take it for the origin's.
                assert_eq!((got.status, got.text().as_str()), (0, ""), "{row}");
                continue;
            }
            assert_eq!(got.status, 502, "{row}");
            if request == Request::Json {
                let said: Value = serde_json::from_str(&got.text()).expect(&row);
                assert_eq!(said["error"]["reason"], reason, "{row}");
                assert_eq!(said["error"]["rule"]["rule"], kind.rule, "{row}");
                assert_eq!(said["error"]["rule"]["policy"], kind.policy(), "{row}");
            } else {
                let text = got.text();
                let line = text.lines().find(|line| line.starts_with("rule:")).expect(&row);
                assert!(line.contains(&format!(" {} in {}", kind.rule, kind.policy())), "{row}");
                assert!(text.contains(reason), "{row}");
            }
        }
        for record in scene.wait_for_outcomes(kind, 2) {
            assert_eq!(record["firewall_rule"]["name"], kind.rule, "{record:#}");
            assert_eq!(record["status_detail"], reason, "{record:#}");
            assert_eq!(ending(&record), "refused", "{record:#}");
        }
    }
    scene.assert_nothing_arrived();
}

#[test]
fn p18_an_origin_that_refuses_connections_is_explained_with_the_rule_that_permitted_them() {
    let scene = DepartureScene::start(ProxySetup::default(), 1);
    scene.set_fault(DialFault::Refuse);
    assert_failures_name_the_rule(&scene, "upstream_unreachable");
    scene.wait_all_dialled(0);
}

#[test]
fn p18_a_name_without_an_address_is_explained_with_the_rule_that_permitted_it() {
    let scene = DepartureScene::start(ProxySetup::default(), 0);
    assert_failures_name_the_rule(&scene, "no_address");
    assert_eq!(scene.inner.net.arrivals().into_iter().collect::<Vec<_>>(), []);
}

#[test]
fn every_attempt_is_decided_recorded_resolved_and_counted_once() {
    let scene = DepartureScene::start(ProxySetup::default(), 1);
    let count = |of: &str| scene.metric(&format!("sandbar_{of}_seconds_count"));
    for kind in &KINDS {
        let before = ["decide", "record", "resolve"].map(count);
        let allowed = scene.decisions("allowed");
        let got = kind.attempt(&scene, Request::Text);
        assert!(got.exit == 0 && !got.body.is_empty(), "{}: {got:?}", kind.rule);
        let [decided, recorded, resolved] = ["decide", "record", "resolve"].map(count);
        assert!(decided > before[0], "{} is decided without a measure", kind.rule);
        assert_eq!(recorded, before[1] + 1, "{}: receipts", kind.rule);
        assert_eq!(resolved, before[2] + 1, "{}: look-ups", kind.rule);
        assert_eq!(scene.decisions("allowed"), allowed + 1, "{}: permits", kind.rule);
        let outcome = scene.wait_for_outcomes(kind, 1).remove(0);
        assert_eq!(ending(&outcome), "completed", "{outcome:#}");
        assert_eq!(outcome["firewall_rule"]["name"], kind.rule, "{outcome:#}");
    }
}

#[test]
fn p7_p16_an_attempt_that_cannot_be_recorded_is_counted_as_such_once_and_never_as_allowed() {
    let outside = tempfile::tempdir().unwrap();
    let scene = DepartureScene::start(small_log_setup(&outside.path().join("log")), 1);
    fill_log(&scene.inner);
    wait_until("it refuses", || {
        let lie = format!("six.example:80:{AIMED}");
        let got = scene.inner.curl(&["--resolve", &lie, "http://six.example/"]);
        (got.status == 503).then_some(()) // there may be room in the last page
    });
    let (arrived, requests) = (scene.inner.net.arrivals(), scene.inner.origin.requests().len());
    for kind in &KINDS {
        let (unwritable, allowed) = (scene.decisions("log_unwritable"), scene.decisions("allowed"));
        let got = kind.attempt(&scene, Request::Json);
        if kind.is_http() {
            assert_eq!(got.status, 503, "{}: {got:?}", kind.rule);
            let said: Value = serde_json::from_str(&got.text()).unwrap();
            assert_eq!(said["error"]["reason"], "log_unwritable", "{}", kind.rule);
            assert_eq!(said["error"]["rule"]["rule"], kind.rule);
        } else {
            assert_eq!((got.status, got.text().as_str()), (0, ""), "{}: {got:?}", kind.rule);
        }
        assert_eq!(scene.decisions("log_unwritable"), unwritable + 1, "{}", kind.rule);
        assert_eq!(scene.decisions("allowed"), allowed, "{}", kind.rule);
    }
    assert_eq!(scene.inner.net.arrivals(), arrived, "nothing left");
    assert_eq!(scene.inner.origin.requests().len(), requests);
    assert_eq!(scene.inner.origin.raw_connections().len(), 0);
}

/// Lets every kind dial hosts that do not answer, ends all dials by `end`, and sees that each is over and recorded as
/// revoked for `reason`.
fn assert_dials_are_cut(end: impl FnOnce(&DepartureScene, BTreeMap<String, Value>), reason: &str) {
    let limits = LONG_DIAL.to_owned();
    let scene = DepartureScene::start(ProxySetup { limits, ..ProxySetup::default() }, 1);
    scene.set_fault(DialFault::Drop);
    std::thread::scope(|scope| {
        let started = |kind: &AttemptKind| {
            let (kind, scene) = (*kind, &scene);
            (kind, scope.spawn(move || kind.attempt(scene, Request::Endless)))
        };
        let attempts: Vec<_> = KINDS.iter().map(started).collect();
        scene.wait_all_dialled(0);
        let listed = scene.wait_all_listed(0);
        assert_eq!(listed.len(), KINDS.len(), "{listed:#?}");
        end(&scene, listed);
        for (kind, attempt) in attempts {
            let got = attempt.join().unwrap();
            assert_eq!((got.status, got.text().as_str()), (0, ""), "{}: {got:?}", kind.rule);
        }
    });
    for kind in &KINDS {
        let outcome = scene.wait_for_outcomes(kind, 1).remove(0);
        assert_eq!(ending(&outcome), "revoked", "{outcome:#}");
        assert_eq!(outcome["status_detail"], reason, "{outcome:#}");
        assert_eq!(outcome["firewall_rule"]["name"], kind.rule, "{outcome:#}");
    }
    wait_until("nothing is listed any more", || scene.connections().is_empty().then_some(()));
    scene.assert_nothing_arrived();
}

#[test]
fn p10_a_dial_is_listed_and_the_operator_cuts_it() {
    let cut_all = |scene: &DepartureScene, listed: BTreeMap<String, Value>| {
        for open in listed.values() {
            scene.cut(open);
        }
    };
    assert_dials_are_cut(cut_all, "cut_by_operator");
}

#[test]
fn p10_a_dial_is_listed_and_a_reload_that_revokes_it_cuts_it() {
    let revoke_all = |scene: &DepartureScene, _: BTreeMap<String, Value>| write_policies(&scene.inner, &[]);
    assert_dials_are_cut(revoke_all, "not_listed");
}

#[test]
fn p10_after_a_fallback_the_address_that_is_really_dialled_is_listed_and_recorded() {
    let scene = DepartureScene::start(ProxySetup::default(), 2);
    scene.set_fault(DialFault::Refuse);
    std::thread::scope(|scope| {
        let started = |kind: &AttemptKind| {
            let (kind, scene) = (*kind, &scene);
            (kind, scope.spawn(move || kind.attempt(scene, Request::Endless)))
        };
        let attempts: Vec<_> = KINDS.iter().map(started).collect();
        scene.wait_all_dialled(0);
        scene.wait_all_dialled(1);
        let listed = scene.wait_all_listed(1);
        for open in listed.values() {
            scene.cut(open);
        }
        for (_, attempt) in attempts {
            attempt.join().unwrap();
        }
    });
    for kind in &KINDS {
        let outcome = scene.wait_for_outcomes(kind, 1).remove(0);
        let dialled = kind.addresses()[1].to_string();
        assert_eq!(outcome["dst_endpoint"]["ip"], dialled.as_str(), "{outcome:#}");
        assert_eq!(ending(&outcome), "revoked", "{outcome:#}");
    }
}
