//! The program under test: its files, its process, its log.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, thread};

use integration::sandbar;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) use crate::wire::DEADLINE;
use crate::wire::{RawConnection, RawResponse};

/// What an instance is made of.
#[derive(Default)]
pub(crate) struct InstanceSetup {
    /// Rules, in the form of a policy file without its name.
    pub(crate) policy: String,
    /// Lines of `[limits]`.
    pub(crate) limits: String,
    /// Names that lead to loopback.
    pub(crate) hosts: Vec<&'static str>,
    /// Roots to believe, as PEM.
    pub(crate) roots: Option<String>,
    /// Further tables of the operator's file.
    pub(crate) tables: String,
    /// Further sandboxes, each with a listener of its own.
    pub(crate) others: Vec<&'static str>,
    /// The list that rules may name as `lists/hosts.txt`.
    pub(crate) list: Option<&'static str>,
    /// The resolver; by default one that never answers.
    pub(crate) resolver: Option<SocketAddr>,
}

/// A running instance.
pub(crate) struct SandbarInstance {
    dir: TempDir,
    child: Child,
    /// One listener a sandbox: the first is `one`'s.
    pub(crate) listeners: Vec<SocketAddr>,
    told: Arc<Mutex<Vec<String>>>,
}

impl InstanceSetup {
    /// Allows `host:port` for each, wherever on loopback it leads.
    pub(crate) fn with_hosts(hosts: &[(&'static str, u16)]) -> Self {
        let each = hosts.iter().map(|(host, port)| format!("\"{host}:{port}\""));
        let list = each.collect::<Vec<_>>().join(", ");
        InstanceSetup {
            policy: format!(
                "[[allow]]\nname = \"origins\"\nhosts = [{list}]\nresolves_to = [\"127.0.0.0/8\"]\n"
            ),
            hosts: hosts.iter().map(|(host, _)| *host).collect(),
            ..InstanceSetup::default()
        }
    }

    pub(crate) fn with_limits(self, limits: &str) -> Self {
        InstanceSetup { limits: limits.to_owned(), ..self }
    }

    pub(crate) fn with_roots(self, roots: String) -> Self {
        InstanceSetup { roots: Some(roots), ..self }
    }

    pub(crate) fn start(self) -> SandbarInstance {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir_all(path("policies/lists")).unwrap();
        if let Some(list) = self.list {
            fs::write(path("policies/lists/hosts.txt"), list).unwrap();
        }
        fs::write(path("policies/p.toml"), format!("name = \"p\"\n{}", self.policy)).unwrap();
        let upstream = match &self.roots {
            Some(roots) => {
                fs::write(path("roots.pem"), roots).unwrap();
                "[upstream]\nsystem_roots = false\nroots = [\"roots.pem\"]\n"
            }
            None => "",
        };
        let mut hosts = self.hosts.clone();
        hosts.sort_unstable();
        hosts.dedup();
        let hosts: String = hosts
            .iter()
            .map(|host| format!("[[dns.host]]\nname = \"{host}\"\naddresses = [\"127.0.0.1\"]\n"))
            .collect();
        let sandboxes = std::iter::once("one").chain(self.others.iter().copied());
        let sandboxes: String = sandboxes
            .map(|id| {
                format!(
                    "[[listener]]\nmode = \"explicit\"\nbind = [\"127.0.0.1:0\"]\nsandbox = \"{id}\"\n\
                     dangerously_share_address = true\n\
                     [[sandbox]]\nid = \"{id}\"\nbase = \"system\"\npolicies = [\"p\"]\n"
                )
            })
            .collect();
        let resolver = self.resolver.unwrap_or(([127, 0, 0, 1], 9).into());
        let operator = format!(
            "policies = \"policies\"\n[log]\ndir = \"log\"\n\
             [dns]\nupstreams = [\"{resolver}\"]\ngrid_milliseconds = 0\npre_resolve = false\n\
             {hosts}{upstream}[limits]\n{}\n{sandboxes}{}",
            self.limits, self.tables
        );
        fs::write(path("sandbar.toml"), operator).unwrap();
        let mut child = sandbar()
            .args(["serve", "-c"])
            .arg(path("sandbar.toml"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let told = collect_stderr(&mut child);
        let mut world = SandbarInstance { dir, child, listeners: Vec::new(), told };
        let further = self.tables.split("[[listener]]").skip(1).filter(|table| !table.contains("\"dns\""));
        let count = 1 + self.others.len() + further.count();
        wait_until("sandbar listens", || world.count_listeners() >= count);
        world.listeners = world.listener_addresses();
        // Its self-test is recorded, and none of the test's business.
        world.wait_for_record(0, "sandbar is ready", |record| record["status_detail"] == "not_listed");
        world
    }
}

/// Reads what the program tells, so that it never blocks on it.
fn collect_stderr(child: &mut Child) -> Arc<Mutex<Vec<String>>> {
    let told = Arc::<Mutex<Vec<String>>>::default();
    let (lines, keep) = (BufReader::new(child.stderr.take().unwrap()).lines(), told.clone());
    thread::spawn(move || lines.map_while(Result::ok).for_each(|line| keep.lock().unwrap().push(line)));
    told
}

impl SandbarInstance {
    pub(crate) fn listener_addresses(&self) -> Vec<SocketAddr> {
        let told = self.told.lock().unwrap();
        let said = told.iter().filter_map(|line| line.split_once("listening: explicit "));
        said.map(|(_, address)| address.parse().unwrap()).collect()
    }

    fn count_listeners(&mut self) -> usize {
        let over = self.child.try_wait().unwrap();
        assert!(over.is_none(), "sandbar does not start");
        self.listener_addresses().len()
    }

    /// A connection to the first listener.
    pub(crate) fn connect(&self) -> RawConnection {
        RawConnection::connect(self.listeners[0])
    }

    /// A tunnel to `host`, granted.
    pub(crate) fn open_tunnel(&self, host: &str, port: u16) -> RawConnection {
        self.open_tunnel_via(0, host, port)
    }

    /// A tunnel by the listener of another sandbox.
    pub(crate) fn open_tunnel_via(&self, listener: usize, host: &str, port: u16) -> RawConnection {
        let mut wire = RawConnection::connect(self.listeners[listener]);
        wire.send(format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"));
        let granted = wire.read_until(b"\r\n\r\n").expect("CONNECT is answered");
        assert!(granted.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&granted));
        wire
    }

    /// Changes the operator's file and waits until it is in force; what `reload` said.
    pub(crate) fn reconfigure(&self, edit: impl Fn(&str) -> String) -> String {
        let path = self.dir.path().join("sandbar.toml");
        fs::write(&path, edit(&fs::read_to_string(&path).unwrap())).unwrap();
        self.run_command(&["reload", "--wait"])
    }

    /// Runs a command against this instance; what it said.
    pub(crate) fn run_command(&self, args: &[&str]) -> String {
        let output =
            sandbar().args(args).arg("-c").arg(self.dir.path().join("sandbar.toml")).output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{args:?}: {said}");
        said
    }

    /// The authority's certificate, which a sandbox is told to trust.
    pub(crate) fn ca_path(&self) -> PathBuf {
        self.dir.path().join("ca/ca.pem")
    }

    pub(crate) fn config_path(&self) -> PathBuf {
        self.dir.path().join("sandbar.toml")
    }

    pub(crate) fn policy_dir(&self) -> PathBuf {
        self.dir.path().join("policies")
    }

    /// Where the log is, and the admin socket beside it.
    pub(crate) fn log_dir(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    /// Everything the program has told its operator.
    pub(crate) fn stderr_text(&self) -> String {
        self.told.lock().unwrap().join("\n")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kilobytes of memory the program holds.
    pub(crate) fn resident_kilobytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// The whole lines of the log that are of attempts.
    fn log_lines(&self) -> Vec<String> {
        let segments = audit::list_segments(&self.dir.path().join("log")).unwrap();
        let text: String = segments.iter().map(|(_, path)| fs::read_to_string(path).unwrap()).collect();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        whole.filter(|line| !line.contains("\"class_uid\":6002,")).map(str::to_owned).collect()
    }

    pub(crate) fn records(&self) -> Vec<Value> {
        self.log_lines().iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// How many records there are, to look at later ones only.
    pub(crate) fn record_count(&self) -> usize {
        self.log_lines().len()
    }

    /// The last record of an attempt, once it has ended.
    pub(crate) fn wait_for_end(&self, id: &str) -> Value {
        let last = || {
            let own = self.log_lines().into_iter().rev().find(|line| line.contains(id));
            let record = own.map(|type_run| serde_json::from_str::<Value>(&type_run).unwrap());
            record.filter(|record| record_stage(record) != "decision")
        };
        wait_until(&format!("the attempt {id} has ended"), || last().is_some());
        last().unwrap()
    }

    /// Waits for a record that fits, among those from `since` on.
    pub(crate) fn wait_for_record(&self, since: usize, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let read = |line: String| serde_json::from_str(&line).unwrap();
        let found = || self.log_lines().into_iter().skip(since).map(read).find(|record| fits(record));
        wait_until(what, || found().is_some());
        found().unwrap()
    }

    /// The refusal that an answer tells of is in the log, with the same code.
    pub(crate) fn assert_refused(&self, what: &str, answer: &RawResponse, status: u16, code: &str) {
        assert_eq!(answer.field("sandbar-reason"), Some(code), "{what}: {}", answer.text());
        assert_eq!(answer.status, status, "{what}: {}", answer.text());
        assert!(answer.field("sandbar-generation").is_some(), "{what}: {answer:?}");
        let id = answer.field("sandbar-record").unwrap_or_else(|| panic!("{what}: no record"));
        assert_eq!(self.wait_for_end(id)["status_detail"], code, "{what}");
        assert_unbranded(what, answer);
    }

    /// Whether the record of the refusal that an answer tells of says `why`. The answer itself does not, where it
    /// concerns the operator alone.
    pub(crate) fn record_says(&self, answer: &RawResponse, why: &str) -> bool {
        let told = answer.text();
        assert!(!told.contains(why), "the sandbox is told what concerns the operator: {told}");
        let record = answer.field("sandbar-record").map(|id| self.wait_for_end(id));
        record.is_some_and(|record| record["message"].as_str().is_some_and(|said| said.contains(why)))
    }

    /// Stops as systemd would: true where it ended well.
    pub(crate) fn stop(&mut self) -> bool {
        let killed = Command::new("kill").arg(self.pid().to_string()).status();
        assert!(killed.is_ok_and(|status| status.success()), "kill is needed");
        self.child.wait().unwrap().success()
    }
}

impl Drop for SandbarInstance {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if thread::panicking() {
            for line in self.told.lock().unwrap().iter() {
                println!("sandbar said: {line}");
            }
        }
    }
}

/// Nobody needs to know what we are made of.
pub(crate) fn assert_unbranded(what: &str, answer: &RawResponse) {
    let text = String::from_utf8_lossy(&answer.raw).to_ascii_lowercase();
    assert!(!text.contains("pingora"), "{what}: {text}");
}

pub(crate) fn record_stage(record: &Value) -> &str {
    record["unmapped"]["sandbar"]["stage"].as_str().unwrap_or_default()
}

pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < DEADLINE, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
