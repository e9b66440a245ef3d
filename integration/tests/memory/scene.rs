//! Everything at once: the engine behind its service, an issuer of identities, and the program between the
//! sandboxes and them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use certs::UnixTime;
use certs::identity::{IssueRequest, IssuerOptions, LocalIssuer, SigningAlgorithm, TrustDomain};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tempfile::TempDir;

use integration::sandbar;

use super::client::{ClientRequest, ClientResponse, SandboxClient};
use super::engine;

/// Longest wait for anything that must happen.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
pub(crate) const HOST: &str = "memory.corp.example";
pub(crate) const AUDIENCE: &str = "spiffe://acme.example/memory";
pub(crate) const ISSUER: &str = "https://issuer.acme.example";
pub(crate) const DOMAIN: &str = "acme.example";
/// The key that the service knows and no sandbox does.
pub(crate) const KEY: &str = "the-shared-key-of-the-service";
/// What bank A keeps from B.
pub(crate) const SECRET: &str = "A-SECRET launch code 7741";

/// The sandboxes: id, environment, generation, and the banks of each right.
pub(crate) const SANDBOXES: [(&str, &str, Option<u64>); 4] = [
    ("sandbox-a", "staging", None),
    ("sandbox-b", "staging", Some(2)),
    ("sandbox-c", "production", None),
    ("sandbox-d", "staging", None),
];

/// What a scene is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemorySetup {
    /// How the service knows its callers.
    pub(crate) mode: &'static str,
    pub(crate) limits: &'static str,
    /// What `[[memory_service]]` says beside host and audience.
    pub(crate) service: &'static str,
    pub(crate) room: LogVolume,
    /// The resolver that is asked, if any.
    pub(crate) resolver: Option<SocketAddr>,
}

/// How much room the log has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogVolume {
    Enough,
    /// A megabyte, in a file system of its own that only the program sees.
    Megabyte,
}

impl Default for MemorySetup {
    fn default() -> Self {
        let service = "mode = \"api-key\"\ncredential = \"memory\"\n";
        MemorySetup { mode: "api_key", limits: "", service, room: LogVolume::Enough, resolver: None }
    }
}

pub(crate) struct MemoryScene {
    pub(crate) dir: TempDir,
    pub(crate) service: SocketAddr,
    pub(crate) issuer: LocalIssuer,
    /// Of the sandboxes in their order, then the one that they share.
    listeners: Vec<SocketAddr>,
    children: Vec<Child>,
    pub(crate) trust: Arc<ClientConfig>,
    pub(crate) origin: Arc<ClientConfig>,
}

impl MemoryScene {
    pub(crate) fn new() -> Self {
        Self::with_setup(MemorySetup::default())
    }

    pub(crate) fn with_setup(setup: MemorySetup) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let origin = write_certificate(dir.path());
        let mut children = Vec::new();
        let port = start_service(dir.path(), setup.mode, &mut children);
        let issuer = create_issuer(dir.path(), "issuer");
        write_files(dir.path(), &setup, port);
        let listeners = start_sandbar(dir.path(), setup.room, &mut children);
        let trust = client_config(&dir.path().join("ca/ca.pem"));
        let service = SocketAddr::from(([127, 0, 0, 1], port));
        MemoryScene { dir, service, issuer, listeners, children, trust, origin }
    }

    /// The host of the service, with its port.
    pub(crate) fn service_host(&self) -> String {
        format!("{HOST}:{}", self.service.port())
    }

    /// The listener of one sandbox, or the one they share.
    pub(crate) fn listener(&self, sandbox: &str) -> SocketAddr {
        let at = SANDBOXES.iter().position(|(id, ..)| *id == sandbox).unwrap_or(SANDBOXES.len());
        self.listeners[at]
    }

    /// A connection of a sandbox to the service.
    pub(crate) fn connect(&self, sandbox: &str) -> SandboxClient {
        SandboxClient::connect(self.listener(sandbox), None, &self.service_host(), &self.trust)
    }

    /// A connection to the service around the program.
    pub(crate) fn connect_directly(&self) -> SandboxClient {
        SandboxClient::connect_directly(self.service, &self.service_host(), &self.origin)
    }

    /// A good token of a sandbox.
    pub(crate) fn token(&self, sandbox: &str) -> String {
        let (_, environment, generation) = SANDBOXES.iter().find(|(id, ..)| *id == sandbox).unwrap();
        self.issue_token(&IssueRequest { generation: *generation, ..issue_request(sandbox, environment) })
    }

    pub(crate) fn issue_token(&self, request: &IssueRequest<'_>) -> String {
        self.issuer.issue(request, UnixTime::now()).unwrap().expose().to_owned()
    }

    /// Asks as a sandbox that sends its own token, on a connection of its own.
    pub(crate) fn send_honest(&self, sandbox: &str, ask: ClientRequest) -> ClientResponse {
        self.send(sandbox, ask.with_field("Sandbox-Identity", &self.token(sandbox)))
    }

    pub(crate) fn send(&self, sandbox: &str, ask: ClientRequest) -> ClientResponse {
        self.connect(sandbox).send(&ask)
    }

    /// Every request that arrived at the service.
    pub(crate) fn arrived_requests(&self) -> Vec<Value> {
        read_json_lines(&self.dir.path().join("seen.jsonl"))
    }

    /// Every record of the access log.
    pub(crate) fn records(&self) -> Vec<Value> {
        let segments = audit::list_segments(&self.dir.path().join("log")).unwrap();
        segments.iter().flat_map(|(_, segment)| read_json_lines(segment)).collect()
    }

    /// The records of one attempt.
    pub(crate) fn attempt_records(&self, attempt: &str) -> Vec<Value> {
        let all = self.records();
        let of = |record: &Value| record["metadata"]["correlation_uid"] == attempt;
        all.into_iter().filter(of).collect()
    }

    /// Sees that an ask is refused for `reason`, that this is recorded, and that nothing arrived.
    pub(crate) fn assert_refused(&self, row: &str, answer: &ClientResponse, reason: &str, before: usize) {
        assert_eq!(answer.reason(), Some(reason), "{row}: {} {}", answer.status, answer.text());
        assert!(answer.status >= 400, "{row}: {}", answer.status);
        let attempt = answer.field("Sandbar-Record").unwrap();
        let told = self.attempt_records(attempt);
        let denied = |record: &&Value| record["class_uid"] != 2004 && record["status_detail"] == reason;
        assert_eq!(told.iter().filter(denied).count(), 1, "{row}: {told:?}");
        assert_eq!(self.arrived_requests().len(), before, "{row}: something arrived");
    }

    /// Writes the list of what is revoked, and waits until it is in force for a sandbox. What it asks for meanwhile is
    /// refused before and after, so nothing arrives and nothing is cut.
    pub(crate) fn revoke(&self, list: &str, sandbox: &str) {
        fs::write(self.dir.path().join("revoked.json"), list).unwrap();
        let mut client = self.connect(sandbox);
        wait_for("the revocation", || {
            client.send(&ClientRequest::recall("staging:nobody")).reason() == Some("sandbox_revoked")
        });
    }

    /// Changes the operator's file and waits until it is in force.
    pub(crate) fn reconfigure(&self, from: &str, to: &str) {
        let path = self.dir.path().join("sandbar.toml");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(&path, text.replace(from, to)).unwrap();
        self.run_command(&["reload", "--wait"]);
    }

    /// Runs a command against the program; what it said.
    pub(crate) fn run_command(&self, args: &[&str]) -> String {
        let mut command = sandbar();
        let output = command.args(args).arg("-c").arg(self.dir.path().join("sandbar.toml")).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The log's directory as the program sees it.
    pub(crate) fn log_dir_inside(&self) -> PathBuf {
        let log = self.dir.path().join("log");
        let pid = self.children.last().unwrap().id();
        PathBuf::from(format!("/proc/{pid}/root")).join(log.strip_prefix("/").unwrap())
    }

    /// Ends the program as a crash would.
    pub(crate) fn crash(&mut self) {
        let program = self.children.last_mut().unwrap();
        program.kill().unwrap();
        program.wait().unwrap();
    }

    /// Puts A's secret into A's bank.
    pub(crate) fn plant_secret(&self) {
        let body = format!(r#"{{"content":"{SECRET}","bank_id":"staging:team-a"}}"#);
        let answer = self.send_honest("sandbox-a", ClientRequest::post("/v1/retain", &body));
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

impl Drop for MemoryScene {
    fn drop(&mut self) {
        for child in &mut self.children {
            drop(child.kill()); // it may have ended by itself
            drop(child.wait());
        }
    }
}

/// What a token of a sandbox says.
pub(crate) fn issue_request<'a>(sandbox: &'a str, environment: &'a str) -> IssueRequest<'a> {
    let life = Duration::from_secs(300);
    IssueRequest { tenant: "acme", environment, sandbox, audience: AUDIENCE, life, generation: None }
}

/// An issuer with a key of its own.
pub(crate) fn create_issuer(dir: &Path, name: &str) -> LocalIssuer {
    let options = IssuerOptions {
        issuer: ISSUER.to_owned(),
        trust_domain: TrustDomain::parse(DOMAIN).unwrap(),
        environments: None,
        algorithm: SigningAlgorithm::Es256,
    };
    LocalIssuer::init(&dir.join(name), &options, time_at(-3600)).unwrap() // it has been signing for a while
}

/// So many seconds from now.
pub(crate) fn time_at(offset: i64) -> UnixTime {
    let now = UnixTime::now().as_secs().checked_add_signed(offset).unwrap();
    UnixTime::since_unix_epoch(Duration::from_secs(now))
}

/// Waits until `holds`, or fails and says what did not happen.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < until, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn read_json_lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Writes the certificate of the service, and gives back whoever believes it.
fn write_certificate(dir: &Path) -> Arc<ClientConfig> {
    let made = rcgen::generate_simple_self_signed(vec![HOST.to_owned()]).unwrap();
    fs::write(dir.join("origin.pem"), certs::pem::encode_certificate(made.cert.der())).unwrap();
    let key = certs::pem::encode_private_key(&made.signing_key.serialize_der());
    fs::write(dir.join("origin.key"), key.as_bytes()).unwrap();
    client_config(&dir.join("origin.pem"))
}

fn client_config(pem: &Path) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_file_iter(pem).unwrap() {
        roots.add(root.unwrap()).unwrap();
    }
    let builder = ClientConfig::builder_with_provider(certs::crypto_provider());
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    Arc::new(builder.with_root_certificates(roots).with_no_client_auth())
}

fn start_service(dir: &Path, mode: &str, children: &mut Vec<Child>) -> u16 {
    let script = integration::repository_root().join("integration/tests/memory/service.py");
    let mut command = Command::new(engine::engine_python());
    command.arg(script).arg(mode).arg(dir.join("origin.pem")).arg(dir.join("origin.key"));
    command.arg(dir.join("seen.jsonl"));
    let said = start_program(command, children, "listening on ", 1);
    last_word(&said[0]).parse().unwrap()
}

/// Starts the program; its listeners, in the order of the file.
fn start_sandbar(dir: &Path, room: LogVolume, children: &mut Vec<Child>) -> Vec<SocketAddr> {
    let mut command = sandbar();
    if room == LogVolume::Megabyte {
        let log = dir.join("log");
        fs::create_dir(&log).unwrap();
        let mount = format!("mount -t tmpfs -o size=1m tmpfs {} && exec \"$@\"", log.display());
        let program = command.get_program().to_owned();
        command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &mount, "sh"]).arg(program);
    }
    command.arg("serve").arg("-c").arg(dir.join("sandbar.toml"));
    let said = start_program(command, children, "listening: explicit", SANDBOXES.len() + 1);
    said.iter().map(|line| last_word(line).parse().unwrap()).collect()
}

fn last_word(line: &str) -> &str {
    line.rsplit(' ').next().unwrap()
}

/// Starts a program and waits until it has said `ready` so many times, on either stream; the lines it said it with.
fn start_program(mut command: Command, children: &mut Vec<Child>, ready: &str, times: usize) -> Vec<String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (sender, lines) = channel();
    let streams: [Box<dyn std::io::Read + Send>; 2] =
        [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
    for stream in streams {
        let sender = sender.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                drop(sender.send(line)); // read on, or it would block
            }
        });
    }
    drop(sender);
    children.push(child);
    let until = Instant::now() + DEADLINE;
    let mut said = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let line = lines.recv_timeout(left);
        let line = line.unwrap_or_else(|_| panic!("{command:?} does not start: {said:#?}"));
        said.push(line);
        if said.iter().filter(|line| line.contains(ready)).count() == times {
            said.retain(|line| line.contains(ready));
            return said;
        }
    }
}

fn write_files(dir: &Path, setup: &MemorySetup, service: u16) {
    fs::create_dir(dir.join("policies")).unwrap();
    for (name, text) in policy_files(service) {
        fs::write(dir.join(format!("policies/{name}.toml")), text).unwrap();
    }
    write_secret(&dir.join("memory.key"), &format!("{KEY}\n"));
    fs::write(dir.join("revoked.json"), "{}").unwrap();
    fs::write(dir.join("sandbar.toml"), configuration(setup, service)).unwrap();
}

pub(crate) fn write_secret(path: &PathBuf, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

fn policy_files(service: u16) -> Vec<(&'static str, String)> {
    let rule = |name: &str, rest: &str| {
        format!(
            "name = \"{name}\"\n[[memory]]\nname = \"memory of {name}\"\nhost = \"{HOST}:{service}\"\n\
             resolves_to = [\"127.0.0.0/8\"]\nprofile = \"astrocyte\"\n{}",
            rest.replace("PORT", &service.to_string())
        )
    };
    vec![
        (
            "mem-a",
            rule(
                "mem-a",
                "recall = [\"staging:team-a\", \"staging:shared\"]\nretain = [\"staging:team-a\", \"staging:shared\"]\n\
                 forget = [\"staging:team-a\"]\n",
            ),
        ),
        (
            "mem-b",
            rule(
                "mem-b",
                "recall = [\"staging:team-b\", \"staging:shared\"]\nretain = [\"staging:team-b\"]\n\
                 forget = [\"staging:team-b\"]\n",
            ),
        ),
        (
            "mem-c",
            rule(
                "mem-c",
                "recall = [\"production:team-a\", \"production:shared\"]\nretain = [\"production:team-a\"]\n",
            ),
        ),
        (
            "mem-d",
            rule(
                "mem-d",
                "identity = \"from-channel\"\nrecall = [\"staging:team-d\"]\nretain = [\"staging:team-d\"]\n\
                 [[memory]]\nname = \"nobody speaks to it\"\nhost = \"other.corp.example\"\nprofile = \"astrocyte\"\n\
                 recall = [\"staging:team-d\"]\n\
                 [[allow]]\nname = \"another name\"\nhosts = [\"alias.corp.example:PORT\"]\nresolves_to = [\"127.0.0.0/8\"]\n",
            ),
        ),
    ]
}

fn configuration(setup: &MemorySetup, service: u16) -> String {
    let MemorySetup { limits, service: rest, resolver, .. } = setup;
    let resolver = resolver.map_or_else(|| "127.0.0.1:9".to_owned(), |address| address.to_string());
    let mut text = format!(
        r#"policies = "policies"
[log]
dir = "log"
[dns]
upstreams = ["{resolver}"]
pre_resolve = false
[[dns.host]]
name = "{HOST}"
addresses = ["127.0.0.1"]
[[dns.host]]
name = "alias.corp.example"
addresses = ["127.0.0.1"]
[upstream]
roots = ["origin.pem"]
system_roots = false
[limits]
{limits}
[[credential]]
name = "memory"
file = "memory.key"
hosts = ["{HOST}:{service}"]
[identity]
revocations = "revoked.json"
[[identity.issuer]]
name = "{ISSUER}"
trust_domain = "{DOMAIN}"
keys = "issuer/jwks.json"
[[memory_service]]
host = "{HOST}:{service}"
audience = "{AUDIENCE}"
{rest}
"#
    );
    for (at, (id, environment, generation)) in SANDBOXES.iter().enumerate() {
        let generation = generation.map(|number| format!("generation = {number}\n")).unwrap_or_default();
        let letter = id.rsplit('-').next().unwrap();
        text += &format!(
            "[[listener]]\nmode = \"explicit\"\nbind = [\"127.0.0.1:0\"]\nsandbox = \"{id}\"\n\
             dangerously_share_address = true\n\
             [[sandbox]]\nid = \"{id}\"\ntenant = \"acme\"\nenvironment = \"{environment}\"\n{generation}\
             base = \"system\"\npolicies = [\"mem-{letter}\"]\nsource_address = \"127.0.1.{}/32\"\n\
             dangerously_trust_source_address = true\n",
            at + 1
        );
    }
    text + "[[listener]]\nmode = \"explicit\"\nbind = [\"127.0.0.1:0\"]\nidentify = \"source-address\"\n"
}
