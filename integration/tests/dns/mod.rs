//! The DNS filter as a sandbox meets it: the real program in a network namespace, real clients and
//! real tunnels in another. Judged by the log and by who was asked.

mod adversaries;
mod benign;
mod capture;
mod command;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use integration::{repository_root, sandbar};

/// How long anything may take on a busy machine before a test gives up.
const DEADLINE: Duration = Duration::from_secs(120);
/// Where every name of the test's own resolver lives: an address of the gateway, and a public one.
const SERVER: &str = "93.184.216.34";

/// A sandbox and its gateway, joined by one cable and by nothing else.
struct DnsNetwork {
    id: String,
    gateway: String,
    sandbox: String,
    dir: TempDir,
    children: Vec<Child>,
    filter: Option<Child>,
}

const POLICY: &str = r#"
name = "p"
[[allow]]
name = "exact"
hosts = ["github.com:80", "registry.example:80", "api.openai.com"]
[[allow]]
name = "wild"
hosts = ["*.wild.example"]
"#;

impl DnsNetwork {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}x{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let (gateway, sandbox) = (format!("sbg{id}"), format!("sbs{id}"));
        let dir = tempfile::tempdir().unwrap();
        let net = DnsNetwork { id, gateway, sandbox, dir, children: Vec::new(), filter: None };
        let (gateway, sandbox, id) = (&net.gateway, &net.sandbox, &net.id);
        for line in [
            format!("netns add {gateway}"),
            format!("netns add {sandbox}"),
            format!("link add g{id} netns {gateway} type veth peer name s{id} netns {sandbox}"),
            format!("-n {gateway} addr add 10.200.0.1/24 dev g{id}"),
            format!("-n {sandbox} addr add 10.200.0.2/24 dev s{id}"),
            format!("-n {gateway} link set g{id} up"),
            format!("-n {sandbox} link set s{id} up"),
            format!("-n {gateway} link set lo up"),
            format!("-n {sandbox} link set lo up"),
            format!("-n {gateway} addr add {SERVER}/32 dev lo"),
            format!("-n {sandbox} route add default via 10.200.0.1"),
        ] {
            let status = Command::new("ip").args(line.split(' ')).status().unwrap();
            assert!(status.success(), "needs root for network namespaces: ip {line}");
        }
        net
    }

    /// A command inside a namespace, with nothing of the machine's own settings: no proxies, no mirrors.
    fn command_in(&self, namespace: &str, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, program]).args(args);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.env("HOME", self.dir.path()).env("LANG", "C.UTF-8");
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    /// Starts a server and waits until it says `ready`, on either stream.
    fn start(&mut self, namespace: &str, program: &str, args: &[&str], ready: &str) {
        let child = self.spawn(namespace, program, args, ready);
        self.children.push(child);
    }

    fn spawn(&self, namespace: &str, program: &str, args: &[&str], ready: &str) -> Child {
        let mut command = self.command_in(namespace, program, args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let streams: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for stream in streams {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    drop(sender.send(line)); // read on, or the server would block
                }
            });
        }
        drop(sender);
        let until = Instant::now() + DEADLINE;
        let mut said = Vec::new();
        while !said.last().is_some_and(|line: &String| line.contains(ready)) {
            let left = until.saturating_duration_since(Instant::now());
            match lines.recv_timeout(left) {
                Ok(line) => said.push(line),
                Err(_) => {
                    drop(child.kill());
                    drop(child.wait());
                    panic!("{program} does not start: {said:?}");
                }
            }
        }
        child
    }

    /// Runs a script of this directory in a namespace, to its end.
    fn run_script(&self, namespace: &str, script: &str, args: &[&str]) -> String {
        let path = script_path(script);
        let args = [&[path.as_str()], args].concat();
        let output = self.command_in(namespace, "python3", &args).output().unwrap();
        let (said, complaint) = (integration::text(&output.stdout), integration::text(&output.stderr));
        assert!(output.status.success(), "{script}: {said}{complaint}");
        said
    }

    /// Starts the filter on the sandbox's interface, asking `upstream` inside the gateway.
    fn start_filter(&mut self, upstream: &str) {
        self.start_filter_with(POLICY, upstream, &[]);
    }

    /// Starts the filter with a policy, and with variables in its environment.
    fn start_filter_with(&mut self, policy: &str, upstream: &str, environment: &[&str]) {
        let operator = format!(
            "policies = \"policies\"\n[log]\ndir = \"log\"\n[dns]\nupstreams = [\"{upstream}\"]\npre_resolve = false\n\
             [[listener]]\nmode = \"dns\"\nbind = [\"0.0.0.0:53\"]\nidentify = \"interface\"\n\
             [[sandbox]]\nid = \"build-7\"\nbase = \"user\"\npolicies = [\"p\"]\ninterface = \"g{}\"\n",
            self.id
        );
        fs::create_dir_all(self.dir.path().join("policies")).unwrap();
        fs::write(self.dir.path().join("policies/p.toml"), policy).unwrap();
        fs::write(self.config_path(), operator).unwrap();
        let program = sandbar().get_program().to_str().unwrap().to_owned();
        let config = self.config_path().display().to_string();
        let args = [environment, &[program.as_str(), "serve", "-c", &config]].concat();
        self.filter = Some(self.spawn(&self.gateway, "env", &args, "listening: dns"));
    }

    /// Starts a resolver inside the gateway that has an answer to everything.
    fn start_resolver(&mut self) {
        let config = self.dir.path().join("unbound.conf");
        let text = "server:\n do-daemonize: no\n username: \"\"\n chroot: \"\"\n pidfile: \"\"\n use-syslog: no\n verbosity: 1\n interface: 127.0.0.1@5300\n access-control: 127.0.0.0/8 allow\n local-zone: \".\" redirect\n local-data: \". 60 IN A SERVER\"\n local-data: \". 60 IN AAAA 2606:2800::1\"\n";
        fs::write(&config, text.replace("SERVER", SERVER)).unwrap();
        let path = config.display().to_string();
        self.start(&self.gateway.clone(), "unbound", &["-d", "-c", &path], "start of service");
    }

    fn config_path(&self) -> PathBuf {
        self.dir.path().join("sandbar.toml")
    }

    /// Waits until the log says `word`.
    fn wait_for_log(&self, word: &str) {
        let until = Instant::now() + DEADLINE;
        while !self.log_text().contains(word) {
            assert!(Instant::now() < until, "the log does not say {word}: {}", self.log_text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn log_text(&self) -> String {
        let segments = audit::list_segments(&self.dir.path().join("log")).unwrap();
        segments.iter().map(|(_, path)| fs::read_to_string(path).unwrap()).collect()
    }

    /// Stops the filter as systemd would, and reads what it wrote.
    fn stop(&mut self) -> Vec<Value> {
        let filter = self.filter.as_mut().unwrap();
        let status = Command::new("kill").arg(filter.id().to_string()).status().unwrap();
        assert!(status.success());
        assert!(filter.wait().unwrap().success(), "a clean stop ends with 0");
        let verified = sandbar().args(["log", "verify"]).arg(self.dir.path().join("log")).output().unwrap();
        assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stdout));
        self.log_text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for DnsNetwork {
    fn drop(&mut self) {
        for child in self.children.iter_mut().chain(&mut self.filter) {
            drop(child.kill());
            drop(child.wait());
        }
        for namespace in [&self.gateway, &self.sandbox] {
            drop(Command::new("ip").args(["netns", "del", namespace]).status());
        }
        drop(fs::remove_dir_all(format!("/etc/netns/{}", self.sandbox)));
    }
}

fn records_at_stage<'a>(records: &'a [Value], stage: &'a str) -> impl Iterator<Item = &'a Value> {
    records
        .iter()
        .filter(move |record| record["unmapped"]["sandbar"]["stage"] == stage && record["class_uid"] == 4003)
}

fn finding_codes(records: &[Value]) -> Vec<String> {
    let found = records.iter().filter(|record| record["class_uid"] == 2004);
    found.map(|record| record["status_detail"].as_str().unwrap().to_owned()).collect()
}

fn script_path(script: &str) -> String {
    repository_root().join("integration/tests/dns").join(script).display().to_string()
}
