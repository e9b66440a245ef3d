//! Recalled memory is followed (P15): text that came out of a bank is recognised when it leaves, for a host or for another
//! bank, and is flagged or refused where the destination may not receive it.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use integration::{NameRecorder, ask_name};
use serde_json::Value;

use super::client::ClientRequest;
use super::scene::{DEADLINE, MemoryScene, MemorySetup, wait_for};

/// What bank A remembers: more than 48 letters and digits.
const TEXT: &str =
    "The launch code of the northern archive is kept by Marguerite Delacroix in the blue folder";

/// A web server that answers everything, and keeps what it got.
struct WebServer {
    port: u16,
    got: Arc<Mutex<Vec<u8>>>,
}

impl WebServer {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, got) = (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<u8>>>::default());
        let keep = got.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                serve(stream, &keep);
            }
        });
        WebServer { port, got }
    }

    fn got(&self) -> String {
        String::from_utf8_lossy(&self.got.lock().unwrap()).into_owned()
    }
}

/// Reads one request with its body, and answers it.
fn serve(mut stream: TcpStream, got: &Mutex<Vec<u8>>) {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes).to_ascii_lowercase();
        let head = text.find("\r\n\r\n").map(|at| at + 4);
        let length =
            text.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()?.parse().ok());
        if head.is_some_and(|head| bytes.len() >= head + length.unwrap_or(0)) {
            break;
        }
        match stream.read(&mut buffer) {
            Ok(count) if count > 0 => bytes.extend(&buffer[..count]),
            Ok(_) | Err(_) => break,
        }
    }
    got.lock().unwrap().extend(&bytes);
    drop(stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"));
}

struct FlowScene {
    scene: MemoryScene,
    web: WebServer,
}

impl FlowScene {
    /// Bank A has [`TEXT`], and sandbox A has recalled it. `rule` is added to the rule of the web server.
    fn start(rule: &str, policy: &str) -> Self {
        Self::with_setup(MemorySetup::default(), rule, policy)
    }

    fn with_setup(setup: MemorySetup, rule: &str, policy: &str) -> Self {
        let (scene, web) = (MemoryScene::with_setup(setup), WebServer::start());
        let path = scene.dir.path().join("policies/mem-a.toml");
        let text = fs::read_to_string(&path).unwrap();
        let allow = format!(
            "[[allow]]\nname = \"web\"\nhosts = [\"alias.corp.example:{}\"]\nresolves_to = [\"127.0.0.0/8\"]\n{rule}\n{policy}",
            web.port
        );
        fs::write(&path, text + &allow).unwrap();
        scene.run_command(&["reload", "--wait"]);
        let flow = FlowScene { scene, web };
        let body = format!(r#"{{"content":"{TEXT}","bank_id":"staging:team-a"}}"#);
        assert_eq!(flow.scene.send_honest("sandbox-a", ClientRequest::post("/v1/retain", &body)).status, 200);
        let recalled = flow.scene.send_honest("sandbox-a", ClientRequest::recall("staging:team-a"));
        assert!(recalled.text().contains(TEXT), "{}", recalled.text());
        flow
    }

    /// Posts to the web server as sandbox A; status and reason.
    fn post(&self, path: &str, fields: &str, body: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(self.scene.listener("sandbox-a")).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let authority = format!("alias.corp.example:{}", self.web.port);
        let head = format!(
            "POST http://{authority}{path} HTTP/1.1\r\nHost: {authority}\r\n{fields}Content-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let reason = answer.split("\r\n").find_map(|line| line.strip_prefix("Sandbar-Reason: "));
        (status, reason.unwrap_or_default().to_owned())
    }

    fn findings(&self) -> Vec<String> {
        let all = self.scene.records();
        let findings = all.iter().filter(|record| record["finding_info"]["types"][0] == "memory_flow");
        findings.map(|record| record["message"].as_str().unwrap().to_owned()).collect()
    }
}

/// The text in forms that a sandbox could give it.
fn disguises() -> Vec<(&'static str, &'static str, String, Vec<u8>)> {
    let wrapped = TEXT.to_ascii_uppercase().replace(' ', "  \n> ");
    let escaped: String = TEXT.chars().map(|letter| format!("\\u{:04x}", u32::from(letter))).collect();
    let percent = TEXT.replace(' ', "%20");
    let (first, second) = TEXT.split_at(40);
    vec![
        ("raw", "/x", String::new(), TEXT.as_bytes().to_vec()),
        ("wrapped and in capitals", "/x", String::new(), wrapped.into_bytes()),
        (
            "a part of it",
            "/x",
            String::new(),
            format!("prefix {} suffix", TEXT.get(10..75).unwrap()).into_bytes(),
        ),
        ("base64", "/x", String::new(), STANDARD.encode(TEXT).into_bytes()),
        ("escaped in JSON", "/x", String::new(), format!("{{\"t\":\"{escaped}\"}}").into_bytes()),
        ("in a field", "/x", format!("X-Note: {TEXT}\r\n"), b"x".to_vec()),
        ("in a field, base64", "/x", format!("X-Note: {}\r\n", STANDARD.encode(TEXT)), b"x".to_vec()),
        ("split over fields", "/x", format!("X-A: {}\r\nX-B: {}\r\n", first, second), b"x".to_vec()),
        ("in the query", "QUERY", format!("X-Path: {percent}\r\n"), b"x".to_vec()),
    ]
}

// proves: signals.memory_flow
#[test]
fn p15_recalled_text_is_denied_whatever_its_form() {
    let flow = FlowScene::start("", "[signals]\nmemory_flow = \"deny\"\nheaders = \"off\"\nurl = \"off\"\n");
    for (what, path, fields, body) in disguises() {
        let query = format!("/x?q={}", TEXT.replace(' ', "%20"));
        let (path, fields) = if path == "QUERY" { (query.as_str(), "") } else { (path, fields.as_str()) };
        let (status, reason) = flow.post(path, fields, &body);
        assert_eq!((status, reason.as_str()), (403, "memory_flow"), "{what}");
    }
    assert!(!flow.web.got().to_ascii_lowercase().contains("marguerite"), "{}", flow.web.got());
    assert!(flow.findings().iter().all(|said| said.contains("staging:team-a")), "{:?}", flow.findings());
    let (status, _) = flow.post("/x", "", b"Marguerite keeps a blue folder, they say.");
    assert_eq!(status, 200, "a few words are no recalled text");
}

#[test]
fn p15_recalled_text_in_a_name_reaches_no_resolver() {
    let resolver = NameRecorder::start();
    let service = "mode = \"api-key\"\ncredential = \"memory\"\n\
                   [[listener]]\nmode = \"dns\"\nbind = [\"127.0.0.77:0\"]\nsandbox = \"sandbox-a\"\ndangerously_share_address = true\n";
    let setup = MemorySetup { service, resolver: Some(resolver.address), ..MemorySetup::default() };
    let policy = "[[allow]]\nname = \"zone\"\nhosts = [\"*.zone.example\"]\n\
                  [signals]\nmemory_flow = \"deny\"\nheaders = \"off\"\nurl = \"off\"\n";
    let flow = FlowScene::with_setup(setup, "", policy);
    let status: Value = serde_json::from_str(&flow.scene.run_command(&["status", "--json"])).unwrap();
    let listeners = status["listeners"].as_array().unwrap().iter().filter_map(Value::as_str);
    let server = listeners.filter_map(|one| one.strip_prefix("dns")?.trim().parse().ok()).next();
    let server = server.unwrap_or_else(|| panic!("{status}"));
    assert_eq!(ask_name(server, "the.blue.folder.zone.example"), 0, "a few words are no recalled text");
    let name = format!("{}.zone.example", TEXT.to_ascii_lowercase().replace(' ', "."));
    assert_ne!(ask_name(server, &name), 0);
    assert_eq!(resolver.names(), ["the.blue.folder.zone.example"], "the text reached the resolver");
    let refused = || {
        let records = flow.scene.records();
        let refused =
            |record: &&Value| record["class_uid"] == 4003 && record["status_detail"] == "memory_flow";
        records.iter().find(refused).map(|record| record["metadata"]["correlation_uid"].clone())
    };
    wait_for("the refusal", || refused().is_some());
    let attempt = refused().unwrap();
    let linked = |record: &Value| {
        record["finding_info"]["types"][0] == "memory_flow"
            && record["finding_info"]["related_events"][0]["uid"] == attempt
    };
    wait_for("the finding names the attempt", || flow.scene.records().iter().any(linked));
}

#[test]
fn p15_recalled_text_is_flagged_by_default_and_its_way_can_be_seen() {
    let flow = FlowScene::start("", "");
    assert_eq!(flow.post("/x", "", TEXT.as_bytes()).0, 200);
    wait_for("the finding", || !flow.findings().is_empty());
    let said = flow.findings().join("\n");
    assert!(said.contains("text of memory bank `staging:team-a` in the body"), "{said}");
    assert!(!said.contains("Marguerite"), "{said}");
    let mut command = integration::sandbar();
    command.args(["flow", "--sandbox", "sandbox-a", "-c"]).arg(flow.scene.dir.path().join("sandbar.toml"));
    wait_for("the flow is listed", || {
        let output = command.output().unwrap();
        let listed = String::from_utf8(output.stdout).unwrap();
        listed.contains("staging:team-a") && listed.contains("alias.corp.example")
    });
}

// proves: allow.memory, allow.receives_banks, allow.signals.memory_flow
#[test]
fn p15_who_may_receive_it_gets_it() {
    for (rule, expected) in [
        ("memory = \"may-receive\"", 200),
        ("receives_banks = [\"staging:team-*\"]", 200),
        ("receives_banks = [\"staging:other\"]", 403),
        ("signals = { memory_flow = \"off\" }", 200),
    ] {
        let flow = FlowScene::start(rule, "[signals]\nmemory_flow = \"deny\"\n");
        assert_eq!(flow.post("/x", "", TEXT.as_bytes()).0, expected, "{rule}");
    }
}

// proves: memory.receives_banks, memory.signals.memory_flow
#[test]
fn p15_text_of_one_bank_does_not_infect_another() {
    let flow = FlowScene::start("", "");
    let retain = |bank: &str| {
        let body = format!(r#"{{"content":"noted: {TEXT}","bank_id":"{bank}"}}"#);
        flow.scene.send_honest("sandbox-a", ClientRequest::post("/v1/retain", &body))
    };
    let policy = flow.scene.dir.path().join("policies/mem-a.toml");
    let text = fs::read_to_string(&policy).unwrap();
    let change = |keys: &str| {
        fs::write(
            &policy,
            text.replacen("profile = \"astrocyte\"\n", &format!("profile = \"astrocyte\"\n{keys}\n"), 1),
        )
        .unwrap();
        flow.scene.run_command(&["reload", "--wait"]);
    };
    change("signals = { memory_flow = \"deny\" }");
    let before = flow.scene.arrived_requests().len();
    flow.scene.assert_refused("another bank", &retain("staging:shared"), "memory_flow", before);
    assert_eq!(retain("staging:team-a").status, 200, "its own bank may have it back");
    change("signals = { memory_flow = \"deny\" }\nreceives_banks = [\"staging:team-a\"]");
    assert_eq!(retain("staging:shared").status, 200, "the policy allows it");
}
