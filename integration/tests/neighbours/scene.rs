//! Everything at once, in a network namespace of the test's own: the gateway in its container, origins that both
//! sandboxes may reach, an attacker and an honest neighbour.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::future::Future;
use std::io::{Read, Write as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nix::sched::CloneFlags;
use nix::sys::socket::{SockaddrStorage, setsockopt, sockopt};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use integration::sandbar;

use crate::attacker::Attacker;
use crate::honest::{HonestClient, Kind, Samples};
use crate::memory_limit::{self, MEMORY_LIMIT, MemoryCgroup, MemoryWatch, resident_bytes};
use crate::origin::Origins;

/// Longest wait for anything that must happen, on a machine that is busy with other things.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Where the gateway listens, in a namespace that has nothing else.
pub(crate) const PROXY: &str = "127.0.0.1:3128";
pub(crate) const DNS: &str = "127.0.0.1:5353";

/// Networks of the sandboxes, which the listeners know them by.
pub(crate) const A_NETWORK: Network = Network("127.1");
pub(crate) const B_NETWORK: Network = Network("127.2");
const C_NETWORK: Network = Network("127.3");

/// The first half of a sandbox's source addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Network(pub(crate) &'static str);

impl Network {
    /// Another address for each connection: ports that clients keep after closing are not what is tested.
    pub(crate) fn next_address(self) -> SocketAddr {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        format!("{}.{}.{}:0", self.0, next / 200 % 200, next % 200 + 1).parse().unwrap()
    }

    /// Binds to an address of this network but to no port: the kernel keeps bound ports from the gateway, too, which
    /// shares the network with its clients here.
    pub(crate) fn bind(self, socket: &impl AsFd) -> nix::Result<()> {
        let address = SockaddrStorage::from(self.next_address());
        setsockopt(socket, sockopt::IpBindAddressNoPort, &true)?;
        nix::sys::socket::bind(socket.as_fd().as_raw_fd(), &address)
    }
}

/// How often B does each kind of thing: before the attack, and when A has taken what it can get.
const ROUNDS: usize = 40;

/// How long the gateway may take to notice that a client has gone, and to end what it did for it.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(60);

/// How often that is measured until B's latency is what it was: work that A has left behind ends.
const TRIES: usize = 3;

/// Latency below which a ratio means nothing: what a busy scheduler on two cores does to an honest client.
const LATENCY_FLOOR: Duration = Duration::from_millis(250);

/// How many of B's quiet medians its p99 may be: on a slow machine the floor is less than a few of them.
const SLOW_MACHINE: u32 = 60;

/// What a scene is made of.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Lines of `[limits]`.
    pub(crate) limits: String,
    /// Further rules of the policy that both sandboxes have.
    pub(crate) rules: String,
    /// Further tables of the configuration.
    pub(crate) tables: String,
    /// Further names that lead to loopback.
    pub(crate) hosts: Vec<String>,
    /// What the gateway is started by.
    pub(crate) prefix: Vec<String>,
    /// A log on a file system of so many megabytes, which only the gateway sees.
    pub(crate) log_megabytes: Option<u32>,
    /// What B does, and how long it rests after each.
    pub(crate) kinds: Vec<Kind>,
    pub(crate) rest: Duration,
    /// Settings of the kernel, for the test's own network.
    pub(crate) sysctls: Vec<(&'static str, &'static str)>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            limits: String::new(),
            rules: String::new(),
            tables: String::new(),
            hosts: Vec::new(),
            prefix: Vec::new(),
            log_megabytes: None,
            kinds: vec![Kind::Tls, Kind::Plain, Kind::Tunnel, Kind::Dns],
            rest: Duration::from_millis(20),
            // A real network keeps a port for a minute; only on loopback the kernel gives it out again at once.
            sysctls: vec![("net.ipv4.tcp_tw_reuse", "0")],
        }
    }
}

/// The policy of both sandboxes; ports as in `origin`.
const POLICY: &str = r#"name = "p"
[[allow]]
name = "web"
hosts = ["origin.test:8001", "origin.test:8002", "origin.test:8003", "origin.test:8005", "origin.test:8008"]
resolves_to = ["127.0.0.0/8"]
[[allow]]
name = "raw"
hosts = ["raw.test"]
tcp = [8004, 8006]
memory = "may-receive"
resolves_to = ["127.0.0.0/8"]
[[memory]]
name = "memory"
host = "memory.test:8007"
profile = "astrocyte"
identity = "from-channel"
resolves_to = ["127.0.0.0/8"]
recall = ["staging:team"]
"#;

pub(crate) struct Scene {
    setup: Setup,
    quiet: Samples,
    pub(crate) origins: Origins,
    pub(crate) attacker: Attacker,
    attack: Option<Runtime>,
    watch: MemoryWatch,
    child: Arc<Mutex<Child>>,
    cgroup: Option<MemoryCgroup>,
    trust: Arc<ClientConfig>,
    pub(crate) dir: TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self::with_setup(Setup::default())
    }

    /// Starts everything, and measures B in peace.
    pub(crate) fn with_setup(setup: Setup) -> Self {
        static ALONE: Mutex<()> = Mutex::new(()); // latencies of two tests at once mean nothing
        let alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        enter_own_network();
        for (name, value) in &setup.sysctls {
            set_sysctl(name, value);
        }
        let dir = tempfile::Builder::new().prefix("sandbar-").tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let server = write_certificate(dir.path());
        let origins = Origins::start(server);
        write_files(dir.path(), &setup);
        let cgroup = MemoryCgroup::create();
        let (mut child, stderr) = start_gateway(dir.path(), &setup, cgroup.as_ref());
        wait_until("the gateway is ready", || {
            let over = child.try_wait().unwrap();
            assert!(over.is_none(), "it ended: {}", fs::read_to_string(&stderr).unwrap());
            admin_request(dir.path(), "GET", "/ready").is_some_and(|(status, _)| status == 200).then_some(())
        });
        let child = Arc::new(Mutex::new(child));
        let watch = MemoryWatch::start(child.clone(), cgroup.is_some());
        let trust = trust_authority(dir.path());
        let attack = Runtime::new().unwrap();
        let attacker = Attacker::new(A_NETWORK, trust.clone());
        let quiet = Samples::default();
        let mut scene = Scene {
            setup,
            quiet,
            origins,
            attacker,
            attack: Some(attack),
            watch,
            child,
            cgroup,
            trust,
            dir,
            _alone: alone,
        };
        scene.honest().finish_rounds(3); // certificates are made, pools are warm
        scene.quiet = scene.honest().finish_rounds(ROUNDS);
        scene.quiet.assert_all_succeeded("before the attack");
        scene
    }

    /// B, at work from now on.
    pub(crate) fn honest(&self) -> HonestClient {
        HonestClient::start(&self.setup, B_NETWORK, &self.trust)
    }

    /// Runs something of A's to its end.
    pub(crate) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.attack.as_ref().unwrap().block_on(work)
    }

    /// Lets A build something up and hold it while B works; asserts that B has noticed nothing, and prints the
    /// figures. Gives back what A holds.
    pub(crate) fn attack<T>(&self, what: &str, build: impl Future<Output = T>) -> T {
        let (held, outcome) = self.observe(what, build);
        outcome.assert_unharmed();
        held
    }

    /// The same, with nothing asserted yet.
    pub(crate) fn observe<T>(&self, what: &str, build: impl Future<Output = T>) -> (T, Outcome) {
        let before = self.resident();
        let honest = self.honest();
        let held = self.run(build);
        let building = honest.finish_rounds(0);
        let mut holding = self.honest().finish_rounds(ROUNDS);
        for _ in 1..TRIES {
            if self.slowest_kind(&holding).is_none() || holding.has_failures() {
                break;
            }
            holding = self.honest().finish_rounds(ROUNDS); // what A built up had not settled
        }
        let newcomer = HonestClient::start(&self.setup, C_NETWORK, &self.trust).finish_rounds(3);
        let killed = self.watch.has_killed() || self.cgroup.as_ref().is_some_and(MemoryCgroup::has_killed);
        let outcome = Outcome {
            what: what.to_owned(),
            quiet: self.quiet.clone(),
            building,
            slow: self.slowest_kind(&holding),
            holding,
            newcomer,
            killed,
            before,
            peak: self.watch.peak(),
            descriptors: self.watch.descriptors(),
        };
        outcome.print(self.cgroup.is_some());
        (held, outcome)
    }

    /// Lets A give up what it holds, and waits until the gateway has given it back: a quota that leaks is used up one
    /// day, and the part that all share with it.
    pub(crate) fn release<T>(&self, held: T) {
        drop(held);
        let mut used = BTreeMap::new();
        let end = Instant::now() + GIVEN_BACK_WITHIN;
        while Instant::now() < end {
            used = self.quotas_used("a");
            if ["connections", "requests", "stalled"].iter().all(|resource| used.get(*resource) == Some(&0)) {
                println!("A's quotas afterwards: {used:?}");
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("A has closed everything and still uses {used:?}");
    }

    /// What a sandbox uses of each resource, as the operator sees it.
    fn quotas_used(&self, sandbox: &str) -> BTreeMap<String, u64> {
        let answer = self.admin("GET", &format!("/sandboxes/{sandbox}"));
        let (_, body) = answer.unwrap_or_else(|| panic!("the admin socket does not answer"));
        let described: Value = serde_json::from_str(&body).expect(&body);
        let quotas = described["quotas"].as_array().unwrap_or_else(|| panic!("no quotas in {body}"));
        let row = |quota: &Value| Some((quota["resource"].as_str()?.to_owned(), quota["used"].as_u64()?));
        quotas.iter().filter_map(row).collect()
    }

    /// The first kind whose latency is out of bounds, with its p99 and the bound.
    fn slowest_kind(&self, seen: &Samples) -> Option<(Kind, Duration, Duration)> {
        let rows = self.quiet.kinds().map(|kind| {
            let quiet = self.quiet.of(kind);
            let bound = LATENCY_FLOOR.max(2 * quiet.percentile(99)).max(SLOW_MACHINE * quiet.percentile(50));
            (kind, seen.of(kind).percentile(99), bound)
        });
        rows.into_iter().find(|(_, latency, bound)| latency > bound)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.lock().unwrap().id()
    }

    /// Resident bytes of the gateway now.
    pub(crate) fn resident(&self) -> u64 {
        resident_bytes(self.pid()).expect("the gateway runs")
    }

    pub(crate) fn configuration_path(&self) -> PathBuf {
        self.dir.path().join("sandbar.toml")
    }

    /// The log's directory as the gateway sees it.
    pub(crate) fn log_dir(&self) -> PathBuf {
        let log = self.dir.path().join("log");
        PathBuf::from(format!("/proc/{}/root", self.pid())).join(log.strip_prefix("/").unwrap())
    }

    /// Bytes of the log so far.
    pub(crate) fn log_bytes(&self) -> u64 {
        let files = fs::read_dir(self.log_dir()).into_iter().flatten().flatten();
        files.filter_map(|file| file.metadata().ok()).map(|data| data.len()).sum()
    }

    /// Every record written so far.
    pub(crate) fn records(&self) -> Vec<Value> {
        let segments = audit::list_segments(&self.log_dir()).unwrap();
        let text: String = segments.iter().map(|(_, path)| fs::read_to_string(path).unwrap()).collect();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    /// How many records of A's have this code.
    pub(crate) fn count_records(&self, code: &str) -> usize {
        let of = |record: &Value| record["status_detail"] == code && record["actor"]["app_uid"] == "a";
        self.records().iter().filter(|record| of(record)).count()
    }

    /// How often each sandbox was refused, and why.
    pub(crate) fn count_refusals(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for record in self.records().iter().filter(|record| record["action_id"] == 2) {
            let of = |value: &Value| value.as_str().unwrap_or("-").to_owned();
            let key = format!("{} {}", of(&record["actor"]["app_uid"]), of(&record["status_detail"]));
            *counts.entry(key).or_default() += 1;
        }
        counts
    }

    /// Asks over the admin socket; none where nobody answers in time.
    pub(crate) fn admin(&self, method: &str, path: &str) -> Option<(u16, String)> {
        admin_request(self.dir.path(), method, path)
    }

    /// The instance says of itself that it serves.
    pub(crate) fn assert_ready(&self, when: &str) {
        let answer = self.admin("GET", "/ready");
        assert!(answer.as_ref().is_some_and(|(status, _)| *status == 200), "{when}: /ready is {answer:?}");
    }

    pub(crate) fn stderr(&self) -> String {
        fs::read_to_string(self.dir.path().join("stderr")).unwrap_or_default()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(runtime) = self.attack.take() {
            runtime.shutdown_background();
        }
        let mut child = self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        drop(child.kill()); // it may have ended by itself
        drop(child.wait());
        if std::thread::panicking() {
            let said = self.stderr();
            let last: Vec<_> = said.lines().rev().take(3).collect();
            println!("the gateway said {} lines, the last of them: {last:#?}", said.lines().count());
        }
    }
}

/// What an attack did.
pub(crate) struct Outcome {
    what: String,
    quiet: Samples,
    /// B's attempts while A built up, and while it held what it had got.
    building: Samples,
    holding: Samples,
    /// Those of a third sandbox, which had done nothing before A had taken everything.
    newcomer: Samples,
    /// A kind whose p99 was out of bounds every time.
    slow: Option<(Kind, Duration, Duration)>,
    killed: bool,
    before: u64,
    pub(crate) peak: u64,
    descriptors: u64,
}

impl Outcome {
    fn print(&self, cgroup: bool) {
        let mut line = format!(
            "{}: memory {} -> {} MiB{} ({}), {} descriptors",
            self.what,
            self.before >> 20,
            self.peak >> 20,
            if self.killed { ", KILLED" } else { "" },
            if cgroup { "cgroup of 512 MiB" } else { "killed by the test beyond 512 MiB" },
            self.descriptors,
        );
        for kind in self.quiet.kinds() {
            let phases = [&self.quiet, &self.building, &self.holding].map(|phase| phase.of(kind));
            let [_, building, holding] = &phases;
            write!(line, "; {kind:?}").unwrap();
            for percent in [50, 99] {
                let [quiet, building, holding] = phases.each_ref().map(|phase| phase.percentile(percent));
                write!(line, " p{percent} {quiet:.1?}, {building:.1?}, {holding:.1?}").unwrap();
            }
            let failed = building.failures.len() + holding.failures.len();
            write!(line, ", {failed} of {} failed", building.rounds() + holding.rounds()).unwrap();
        }
        println!("{line}");
    }

    /// B was served as before, and nobody had to kill the gateway. While A builds up, it and the origins use the
    /// cores that B and the gateway need, so B's latency counts once A holds what it got; its success counts always.
    pub(crate) fn assert_unharmed(&self) {
        self.assert_served();
        if let Some((kind, latency, bound)) = self.slow {
            panic!(
                "{}: B's {kind:?} has a p99 of {latency:?}, above {bound:?} (twice its quiet one, {SLOW_MACHINE} times its quiet median, at least {LATENCY_FLOOR:?})",
                self.what
            );
        }
    }

    /// B was served, however slowly: for attacks on the processor, which both ends of this test share.
    pub(crate) fn assert_served(&self) {
        assert!(
            !self.killed && self.peak <= MEMORY_LIMIT,
            "{}: the gateway took {} MiB, and a container of {} MiB would have killed it",
            self.what,
            self.peak >> 20,
            MEMORY_LIMIT >> 20
        );
        self.building.assert_all_succeeded(&self.what);
        self.holding.assert_all_succeeded(&self.what);
        self.newcomer.assert_all_succeeded(&format!("{}, for a newcomer", self.what));
    }
}

/// Moves this thread, and all that it starts, into a network that only loopback belongs to.
fn enter_own_network() {
    nix::sched::unshare(CloneFlags::CLONE_NEWNET).expect("network namespaces need root");
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
    assert!(up.is_ok_and(|status| status.success()), "`ip` is needed");
}

/// Sets a kernel setting of this test's network alone.
fn set_sysctl(name: &str, value: &str) {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
}

/// Writes the certificate that all origins have, and gives back a server that shows it.
fn write_certificate(dir: &Path) -> ServerConfig {
    let names = ["origin.test", "memory.test", "keyed.test", "*.many.example"].map(str::to_owned);
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    fs::write(dir.join("origin.pem"), certs::pem::encode_certificate(made.cert.der())).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    ServerConfig::builder_with_provider(certs::crypto_provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap()
}

/// The client that a sandbox has: it trusts the gateway's authority.
fn trust_authority(dir: &Path) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_file_iter(dir.join("ca/ca.pem")).unwrap() {
        roots.add(root.unwrap()).unwrap();
    }
    let builder = ClientConfig::builder_with_provider(certs::crypto_provider());
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    Arc::new(builder.with_root_certificates(roots).with_no_client_auth())
}

fn write_files(dir: &Path, setup: &Setup) {
    fs::create_dir(dir.join("policies")).unwrap();
    fs::write(dir.join("policies/p.toml"), format!("{POLICY}{}", setup.rules)).unwrap();
    fs::write(dir.join("policies/list.txt"), "listed.test\n").unwrap();
    fs::write(dir.join("key"), "a-key-of-the-test\n").unwrap();
    fs::set_permissions(dir.join("key"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(dir.join("sandbar.toml"), configuration(setup, "")).unwrap();
}

/// The configuration, with further sandboxes.
pub(crate) fn configuration(setup: &Setup, sandboxes: &str) -> String {
    let mut text = format!(
        r#"policies = "policies"
[log]
dir = "log"
[admin]
socket = "admin.sock"
[dns]
upstreams = ["127.0.0.1:53"]
pre_resolve = false
grid_milliseconds = 0
[upstream]
roots = ["origin.pem"]
system_roots = false
[limits]
{}
[[memory_service]]
host = "memory.test:8007"
audience = "spiffe://test.example/memory"
mode = "principal"
[[listener]]
mode = "explicit"
bind = ["{PROXY}"]
identify = "source-address"
[[listener]]
mode = "dns"
bind = ["{DNS}"]
identify = "source-address"
{}
"#,
        setup.limits, setup.tables
    );
    let fixed = ["origin.test", "raw.test", "memory.test"].map(str::to_owned);
    for name in fixed.iter().chain(&setup.hosts) {
        writeln!(text, "[[dns.host]]\nname = \"{name}\"\naddresses = [\"127.0.0.1\"]").unwrap();
    }
    text += &sandbox_table("a", "127.1.0.0/16", "p");
    text += &sandbox_table("b", "127.2.0.0/16", "p");
    text += &sandbox_table("c", "127.3.0.0/16", "p");
    text + sandboxes
}

pub(crate) fn sandbox_table(id: &str, network: &str, policy: &str) -> String {
    format!(
        "[[sandbox]]\nid = \"{id}\"\ntenant = \"acme\"\nenvironment = \"staging\"\nbase = \"system\"\n\
         policies = [\"{policy}\"]\nsource_address = \"{network}\"\ndangerously_trust_source_address = true\n"
    )
}

/// Starts the gateway in its container; the process, and the file with what it says.
fn start_gateway(dir: &Path, setup: &Setup, cgroup: Option<&MemoryCgroup>) -> (Child, PathBuf) {
    let mut script = String::new();
    if let Some(megabytes) = setup.log_megabytes {
        let log = dir.join("log");
        fs::create_dir(&log).unwrap();
        write!(script, "mount -t tmpfs -o size={megabytes}m tmpfs {} && ", log.display()).unwrap();
    }
    script += &cgroup.map_or_else(memory_limit::tell_limit, MemoryCgroup::join_script);
    let mut command = Command::new("unshare"); // mounts that only the gateway sees
    command.args(["--mount", "sh", "-c", &format!("{script} && exec \"$@\""), "sh"]);
    command.args(&setup.prefix).arg(sandbar().get_program());
    command.args(["serve", "-c"]).arg(dir.join("sandbar.toml")).env("NO_COLOR", "1");
    let stderr = dir.join("stderr");
    let said = fs::File::create(&stderr).unwrap();
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said).spawn();
    (child.unwrap_or_else(|error| panic!("{command:?}: {error}")), stderr)
}

fn admin_request(dir: &Path, method: &str, path: &str) -> Option<(u16, String)> {
    let mut socket = UnixStream::connect(dir.join("admin.sock")).ok()?;
    socket.set_read_timeout(Some(DEADLINE / 4)).ok()?;
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: sandbar\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    );
    socket.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

/// Looks again and again until there is something.
pub(crate) fn wait_until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_within(DEADLINE, what, look)
}

pub(crate) fn wait_within<T>(patience: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + patience;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
