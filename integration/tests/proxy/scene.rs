//! Everything at once: the network, the world's resolver and origin, and the program in the gateway.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use integration::sandbar;

use super::names::{FakeResolver, RESOLVER};
use super::net::{FirewallMode, TestNetwork, interface_name};
use super::origin::{TestCertificate, TestOrigin};

/// Longest wait for anything that must happen, on a machine that is busy with other things.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The hosts of the world.
pub(crate) const HOSTS: &[(&str, &[&str])] = &[
    ("open.example", &["93.184.216.34", "2606:2800::34"]),
    ("six.example", &["2606:2800::66"]),
    ("other.example", &["93.184.216.35"]),
    ("denied.example", &["93.184.216.99", "2606:2800::99"]),
    ("tunnel.example", &["93.184.216.36", "2606:2800::36"]),
    ("tolerant.example", &["93.184.216.37"]),
    ("db.example", &["93.184.216.54", "2606:2800::54"]),
    ("private.example", &["10.78.0.2"]),
    ("private6.example", &["fd78::2"]),
    ("mapped.example", &["::ffff:10.78.0.2"]),
    ("nat64.example", &["64:ff9b::a4e:2"]),
    ("metadata.example", &["169.254.169.254"]),
    ("mixed.example", &["10.78.0.2", "93.184.216.38"]),
    ("gateway.example", &["10.78.0.1"]),
    ("files.example", &["93.184.216.60", "2606:2800::60"]),
    ("memory.example", &["93.184.216.70", "2606:2800::70"]),
];

/// What most tests run under.
pub(crate) const POLICY: &str = r#"
name = "p"
[[allow]]
name  = "web"
hosts = ["open.example", "six.example", "other.example", "private.example", "private6.example", "mapped.example",
         "nat64.example", "metadata.example", "mixed.example", "gateway.example"]
ports = [80, 443, 9443]
[[allow]]
name  = "files"
hosts = ["files.example"]
ports = [8444, 8445, 8446]
[[allow]]
name  = "tunnel"
hosts = ["tunnel.example"]
tls   = "tunnel"
[[allow]]
name  = "tolerant"
hosts = ["tolerant.example"]
tls   = "tunnel"
ech   = "tolerate"
[[allow]]
name  = "database"
hosts = ["db.example"]
tcp   = [5432, 2525]
"#;

/// Every kind of listener, each knowing sandboxes by where their packets come in.
pub(crate) const LISTENERS: &str = r#"
[[listener]]
mode = "dns"
bind = ["0.0.0.0:53", "[::]:53"]
identify = "interface"
[[listener]]
mode = "redirect"
bind = ["0.0.0.0:15001", "[::]:15001"]
identify = "interface"
[[listener]]
mode = "tproxy"
bind = ["0.0.0.0:15002", "[::]:15002"]
identify = "interface"
[[listener]]
mode = "explicit"
bind = ["0.0.0.0:3128", "[::]:3128"]
identify = "interface"
[[listener]]
mode = "explicit"
bind = ["unix:proxy.sock"]
identify = "unix"
"#;

/// What a scene is made of.
#[derive(Clone, Debug)]
pub(crate) struct ProxySetup {
    pub(crate) sandboxes: usize,
    pub(crate) policy: String,
    /// Keys of the operator's file itself.
    pub(crate) head: String,
    pub(crate) limits: String,
    /// Further keys of `[log]`.
    pub(crate) log_keys: String,
    pub(crate) listeners: String,
    /// `[[sandbox]]` tables; the usual ones where it is empty.
    pub(crate) identities: String,
    /// Where the log is, if not beside the rest.
    pub(crate) log: Option<PathBuf>,
    /// What the program is started by.
    pub(crate) prefix: Vec<String>,
}

impl Default for ProxySetup {
    fn default() -> Self {
        ProxySetup {
            sandboxes: 1,
            policy: POLICY.to_owned(),
            head: String::new(),
            limits: String::new(),
            log_keys: String::new(),
            listeners: LISTENERS.to_owned(),
            identities: String::new(),
            log: None,
            prefix: Vec::new(),
        }
    }
}

pub(crate) struct ProxyScene {
    child: Option<Child>,
    setup: ProxySetup,
    pub(crate) net: TestNetwork,
    pub(crate) names: FakeResolver,
    pub(crate) origin: TestOrigin,
    pub(crate) minted: TestCertificate,
    pub(crate) dir: TempDir,
    pub(crate) trust: BTreeMap<String, String>,
}

impl ProxyScene {
    /// The scene with the program running behind a redirecting firewall.
    pub(crate) fn new() -> Self {
        Self::with_setup(ProxySetup::default())
    }

    pub(crate) fn with_setup(setup: ProxySetup) -> Self {
        let mut scene = Self::prepare(setup);
        scene.start();
        scene
    }

    /// Everything but the program.
    pub(crate) fn prepare(setup: ProxySetup) -> Self {
        let net = TestNetwork::new(setup.sandboxes);
        let minted = TestCertificate::new(HOSTS.iter().map(|(name, _)| (*name).to_owned()));
        let names = FakeResolver::start(&net.world);
        for (name, addresses) in HOSTS {
            names.set_addresses(name, addresses);
        }
        let origin = TestOrigin::start(&net.world, &minted);
        net.set_firewall(FirewallMode::Redirect);
        let dir = tempfile::Builder::new().prefix("sandbar-").tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let trust = create_authority(dir.path());
        fs::write(dir.path().join("origin.pem"), &minted.root).unwrap();
        let scene = ProxyScene { child: None, setup, net, names, origin, minted, dir, trust };
        scene.write_files();
        scene
    }

    fn write_files(&self) {
        let ProxySetup { sandboxes, policy, head, limits, log_keys, listeners, identities, .. } = &self.setup;
        let mut known = identities.clone();
        for at in (0..*sandboxes).filter(|_| identities.is_empty()) {
            let (uid, interface) = (4000 + at, interface_name(at));
            write!(
                known,
                "[[sandbox]]\nid = \"box-{at}\"\nbase = \"system\"\npolicies = [\"p\"]\n\
                 interface = \"{interface}\"\nunix_uid = {uid}\n"
            )
            .unwrap();
        }
        let log = self.log_dir().display().to_string();
        let text = format!(
            "policies = \"policies\"\n{head}\n[log]\ndir = \"{log}\"\n{log_keys}\n[admin]\nsocket = \"admin.sock\"\n\
             [dns]\nupstreams = [\"{RESOLVER}\"]\npre_resolve = false\ngrid_milliseconds = 0\nfold_seconds = 0\n\
             [upstream]\nroots = [\"origin.pem\"]\nsystem_roots = false\n\
             [limits]\n{limits}\n{listeners}\n{known}"
        );
        fs::create_dir_all(self.dir.path().join("policies")).unwrap();
        fs::write(self.dir.path().join("policies/p.toml"), policy).unwrap();
        fs::write(self.config_path(), text).unwrap();
    }

    pub(crate) fn config_path(&self) -> PathBuf {
        self.dir.path().join("sandbar.toml")
    }

    pub(crate) fn log_dir(&self) -> PathBuf {
        self.setup.log.clone().unwrap_or_else(|| self.dir.path().join("log"))
    }

    fn stderr_path(&self) -> PathBuf {
        self.dir.path().join("stderr")
    }

    fn serve_command(&self) -> Command {
        let program = sandbar().get_program().to_str().unwrap().to_owned();
        let mut words = self.setup.prefix.clone();
        words.push(program);
        let mut command = self.net.gateway.command(&words[0]);
        command.args(&words[1..]).args(["serve", "-c"]).arg(self.config_path());
        command
    }

    /// Starts the program and waits until it is ready.
    pub(crate) fn start(&mut self) {
        let said = fs::File::create(self.stderr_path()).unwrap();
        let mut command = self.serve_command();
        self.child = Some(command.stdout(Stdio::null()).stderr(said).spawn().unwrap());
        wait_until("the program is ready", || {
            if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().unwrap()) {
                panic!("it ended with {status}: {}", fs::read_to_string(self.stderr_path()).unwrap());
            }
            self.admin_request("GET", "/ready").filter(|(status, _)| *status == 200).map(drop)
        });
    }

    /// Starts the program where it must not start; its exit status and what it said.
    pub(crate) fn expect_start_refused(&self) -> (Option<i32>, String) {
        let mut child = self.serve_command().stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let status = wait_or_kill(&mut child);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (status.unwrap_or_else(|| panic!("it went on running: {said}")), said)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("the program runs").id()
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Waits until the program has ended by itself.
    pub(crate) fn wait_for_exit(&mut self) -> Option<i32> {
        let mut child = self.child.take().expect("the program runs");
        wait_or_kill(&mut child).unwrap_or_else(|| panic!("it does not end: {}", self.stderr()))
    }

    /// Stops as systemd would; the log must verify then.
    pub(crate) fn stop(&mut self) -> Vec<Value> {
        self.signal("-TERM");
        assert_eq!(self.wait_for_exit(), Some(0), "{}", self.stderr());
        self.verify_log();
        self.records()
    }

    pub(crate) fn verify_log(&self) {
        let verified = sandbar().args(["log", "verify"]).arg(self.log_dir()).output().unwrap();
        let said = String::from_utf8_lossy(&verified.stdout).into_owned();
        assert!(verified.status.success(), "the log does not verify: {said}");
    }

    pub(crate) fn stderr(&self) -> String {
        fs::read_to_string(self.stderr_path()).unwrap_or_default()
    }

    /// Asks over the admin socket; none where nobody answers.
    pub(crate) fn admin_request(&self, method: &str, path: &str) -> Option<(u16, String)> {
        self.admin_request_with(method, path, "")
    }

    pub(crate) fn admin_request_with(&self, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
        let mut socket = UnixStream::connect(self.dir.path().join("admin.sock")).ok()?;
        socket.set_read_timeout(Some(DEADLINE)).ok()?;
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: sandbar\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        socket.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
    }

    /// Every record written so far.
    pub(crate) fn records(&self) -> Vec<Value> {
        let segments = audit::list_segments(&self.log_dir()).unwrap();
        let mut records = Vec::new();
        for (_, path) in segments {
            audit::view::for_each_line(&path, |line| records.push(serde_json::from_slice(line).unwrap()))
                .unwrap();
        }
        records
    }

    /// The first record that is as wanted, once it is there.
    pub(crate) fn wait_for_record(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut all = Vec::new();
        let found = poll_within(DEADLINE, || {
            all = self.records();
            all.iter().find(|record| wanted(record)).cloned()
        });
        found.unwrap_or_else(|| panic!("no record of {what} among {all:#?}\n{}", self.stderr()))
    }

    /// The record of a refusal with this code towards a host.
    pub(crate) fn wait_for_refusal(&self, code: &str, host: &str) -> Value {
        self.wait_for_record(&format!("{code} for {host}"), |record| {
            record["status_detail"] == code && record_host(record) == host
        })
    }

    /// A program in a sandbox, with nothing of this machine's own but where programs are.
    pub(crate) fn command_in(&self, sandbox: usize, program: &str) -> Command {
        let mut command = self.net.sandboxes[sandbox].command(program);
        command.env_clear().env("HOME", self.dir.path()).env("LC_ALL", "C.UTF-8");
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.envs(&self.trust);
        command
    }

    /// curl in the first sandbox.
    pub(crate) fn curl(&self, args: &[&str]) -> CurlResult {
        self.curl_in(0, args)
    }

    pub(crate) fn curl_in(&self, sandbox: usize, args: &[&str]) -> CurlResult {
        let mut command = self.command_in(sandbox, "curl");
        let shown = "\n%{http_code} %{http_version} %{http_connect}";
        command.args(["-sS", "--max-time", "60", "--noproxy", "", "-w", shown]).args(args);
        CurlResult::run(&mut command)
    }
}

impl Drop for ProxyScene {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            drop(child.kill());
            drop(child.wait());
        }
        if std::thread::panicking() {
            eprintln!("the program said: {}", self.stderr());
        }
    }
}

/// Which host a record is about.
pub(crate) fn record_host(record: &Value) -> &str {
    let places = ["/http_request/url/hostname", "/dst_endpoint/hostname", "/query/hostname"];
    places.iter().find_map(|place| record.pointer(place)?.as_str()).unwrap_or_default()
}

/// Makes the authority that the sandboxes trust; the variables that make programs trust it.
fn create_authority(dir: &Path) -> BTreeMap<String, String> {
    let ca = dir.join("ca");
    let run = |args: &[&str]| {
        let output = sandbar().args(args).arg("--dir").arg(&ca).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    run(&["ca", "init"]);
    run(&["ca", "bundle"]);
    serde_json::from_slice(&run(&["ca", "env", "--json"])).unwrap()
}

/// What a client got.
#[derive(Clone, Debug, Default)]
pub(crate) struct CurlResult {
    pub(crate) status: u16,
    pub(crate) version: String,
    /// What CONNECT was answered with; 0 where there was none.
    pub(crate) connect: u16,
    pub(crate) body: Vec<u8>,
    pub(crate) exit: i32,
    pub(crate) said: String,
}

impl CurlResult {
    fn run(command: &mut Command) -> Self {
        let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let end = output.stdout.iter().rposition(|byte| *byte == b'\n').unwrap_or_default();
        let (body, last) = output.stdout.split_at(end);
        let last = String::from_utf8_lossy(last).trim().to_owned();
        let mut words = last.split(' ');
        let mut number = || words.next().unwrap_or_default().to_owned();
        let (status, version, connect) = (number(), number(), number());
        CurlResult {
            status: status.parse().unwrap_or_default(),
            version,
            connect: connect.parse().unwrap_or_default(),
            body: body.to_vec(),
            exit: output.status.code().unwrap_or(-1),
            said: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// The exit status, unless it goes on running.
fn wait_or_kill(child: &mut Child) -> Option<Option<i32>> {
    let status = poll_within(DEADLINE, || child.try_wait().unwrap());
    if status.is_none() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    status.map(|status| status.code())
}

/// Looks again and again until there is something.
pub(crate) fn wait_until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    poll_within(DEADLINE, look).unwrap_or_else(|| panic!("waited in vain until {what}"))
}

fn poll_within<T>(patience: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + patience;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
