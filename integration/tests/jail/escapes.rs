//! Every way out that is known, tried from inside by one program; what came of each, and what the world saw.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use super::scene::{CommandResult, JailScene, RunAs, wait_until};

/// A shared memory segment of the outside.
const SHM: i32 = 0x5a6d_ba12;
/// Variables that lead to sockets.
const SOCKET_VARIABLES: [&str; 6] =
    ["SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "DISPLAY", "WAYLAND_DISPLAY", "https_proxy"];

/// Sockets outside that count who comes.
#[derive(Default, Clone)]
struct SocketCounter(Arc<AtomicUsize>);

impl SocketCounter {
    fn listen(&self, scene: &JailScene, path: &Path) -> String {
        // Where the proxy is; who can be looked into outside of it is another matter.
        let listener = scene.net.gateway.enter(|| UnixListener::bind(path)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
        scene.chown_to_caller(path);
        self.count_connections(listener);
        path.display().to_string()
    }

    fn listen_abstract(&self, scene: &JailScene, name: &str) {
        let address = SocketAddr::from_abstract_name(name).unwrap();
        // Where the proxy is, which is not where the command is.
        self.count_connections(scene.net.gateway.enter(|| UnixListener::bind_addr(&address)).unwrap());
    }

    fn count_connections(&self, listener: UnixListener) {
        let count = self.0.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::SeqCst);
                drop(stream.read(&mut [0; 8]));
            }
        });
    }

    fn connections(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// A process of the caller's that listens at a name in the directory where it is.
struct NamedSocket {
    process: Child,
    path: PathBuf,
}

impl NamedSocket {
    fn listen(scene: &JailScene) -> Self {
        let path = scene.path("home/agents/named.sock");
        let script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind('named.sock'); s.listen(); sys.stdin.read()";
        let mut command = scene.outside_command("/usr/bin/python3");
        command.args(["-c", script]).current_dir(scene.path("home/agents")).stdin(Stdio::piped());
        let process = command.spawn().unwrap();
        wait_until("somebody listens", || UnixStream::connect(&path).ok());
        NamedSocket { process, path }
    }
}

impl Drop for NamedSocket {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        drop(self.process.wait());
    }
}

/// Runs the program of escapes; what each came to.
fn run_escapes(scene: &JailScene, counter: &SocketCounter) -> BTreeMap<String, String> {
    let home = scene.path("home");
    scene.write_file("home/.bashrc", "# mine\n");
    scene.write_file("home/.profile", "# mine\n");
    scene.write_file("home/.config/fish/config.fish", "# mine\n");
    scene.write_file("home/dots/zshrc", "# mine\n");
    std::os::unix::fs::symlink("dots/zshrc", home.join(".zshrc")).unwrap();
    scene.chown_to_caller(&scene.path("home/.config"));
    scene.write_file("home/.ssh/id", "secret");
    scene.write_file("home/.netrc", "secret");
    scene.write_file(
        "home/conf/own/policies/own.toml",
        "name = \"own\"\n[[allow]]\nname = \"x\"\nhosts = [\"open.example\"]\n",
    );
    for dir in ["home/conf", "home/conf/own"] {
        scene.chown_to_caller(&scene.path(dir));
    }
    fs::create_dir(scene.path("home/own-state")).unwrap();
    scene.chown_to_caller(&scene.path("home/own-state"));
    let suid = scene.path("id");
    fs::copy("/usr/bin/id", &suid).unwrap();
    fs::set_permissions(&suid, fs::Permissions::from_mode(0o4755)).unwrap();
    let tmp = tempfile::Builder::new().prefix("sandbar-jail-").tempdir_in("/tmp").unwrap();
    let run = tempfile::Builder::new().prefix("sandbar-jail-").tempdir_in("/run").unwrap();
    for dir in [&tmp, &run] {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let listening = scene.net.gateway.enter(|| std::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let secret = scene.write_file("secret", "secret");
    let name = format!("sandbar-jail-{}", std::process::id());
    counter.listen_abstract(scene, &name);
    fs::create_dir(scene.path("home/agents")).unwrap();
    scene.chown_to_caller(&scene.path("home/agents"));
    let named = NamedSocket::listen(scene);
    let policy = scene.path("home/conf/own/policies/own.toml");
    let prepared = json!({
        "port": listening.local_addr().unwrap().port(),
        "pid": std::process::id(),
        "home": home, "state": scene.path("home/own-state/sandbar"),
        "home_socket": counter.listen(scene, &home.join("agent.sock")),
        "work_socket": counter.listen(scene, &scene.path("work/agent.sock")),
        "tmp_socket": counter.listen(scene, &tmp.path().join("agent.sock")),
        "run_socket": counter.listen(scene, &run.path().join("agent.sock")),
        "named_socket": named.path,
        "abstract": name,
        "policy": policy, "policies": policy.parent(), "above": scene.path("home/conf"),
        "program": scene.path("sandbar"), "suid": suid, "disk": disk_device(),
        "shm": SHM, "variables": SOCKET_VARIABLES,
    });
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/jail/escapes.py"), scene.path("work/escapes.py"))
        .unwrap();
    let words = scene.run_arguments();
    let state = scene.path("home/own-state/sandbar").display().to_string();
    let words: Vec<String> =
        words.into_iter().map(|word| if word.ends_with("/state") { state.clone() } else { word }).collect();
    let mut command = scene.outside_command("sh");
    command.args(["-c", "exec 9<\"$0\"; exec \"$@\""]).arg(&secret).args(&words);
    command.args(["--policy", &policy.display().to_string(), "--", "/usr/bin/python3", "escapes.py"]);
    command.arg(prepared.to_string());
    for variable in SOCKET_VARIABLES {
        command.env(variable, "/somewhere");
    }
    let ran = CommandResult::run(&mut command);
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    serde_json::from_str(ran.out.lines().last().unwrap_or_default())
        .unwrap_or_else(|error| panic!("{error}: {ran}"))
}

/// A disk of this machine.
fn disk_device() -> String {
    let disks = fs::read_dir("/sys/block").unwrap().flatten();
    let mut names = disks.map(|disk| format!("/dev/{}", disk.file_name().display()));
    names.find(|name| Path::new(name).exists()).unwrap_or_else(|| "/dev/sda".to_owned())
}

/// What each attempt must come to, by what its name begins with. Several where kernels differ.
const EXPECTED_RESULTS: &[(&str, &[&str])] = &[
    ("add_key", &["EPERM"]),
    ("address", &["failed"]),
    ("admin socket", &["[]"]),
    ("capabilities", &[""]),
    ("cgroup namespace", &["failed"]),
    ("core pattern", &["EROFS", "EACCES"]),
    ("descriptors", &["[]"]),
    ("devices", &["fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"]),
    ("disk", &["ENOENT"]),
    ("family", &["EAFNOSUPPORT"]),
    ("first: descriptors", &["EACCES", "EPERM"]),
    ("first: environment", &["EACCES", "EPERM"]),
    ("first: kill", &["still here"]),
    ("first: memory", &["EACCES", "EPERM"]),
    ("first: ptrace", &["EPERM"]),
    ("first: root", &["EACCES", "EPERM"]),
    ("flush the firewall", &["failed"]),
    ("group", &["refused"]),
    ("home", &["done"]),
    ("icmp", &["EPERM", "EACCES"]),
    ("interfaces", &["lo"]),
    ("io_uring", &["ENOSYS"]),
    ("keyctl", &["EPERM"]),
    ("link", &["failed"]),
    ("list the firewall", &["failed"]),
    ("lo down", &["failed"]),
    ("mark", &["EPERM"]),
    ("mknod", &["EPERM"]),
    ("mount namespace", &["failed"]),
    ("netrc", &["empty"]),
    ("no new privileges", &["1"]),
    ("own user and net", &["failed"]),
    ("policy: move", &["EBUSY"]),
    ("policy: move above", &["EBUSY"]),
    ("policy: move from elsewhere", &["there"]),
    ("policy: remove", &["EROFS"]),
    ("policy: replace", &["EROFS"]),
    ("policy: write", &["EROFS"]),
    ("processes", &["True"]),
    ("program", &["EROFS", "EACCES", "ETXTBSY"]),
    ("raw", &["EPERM"]),
    ("remount", &["failed"]),
    ("route", &["failed"]),
    ("sctp", &["EPROTONOSUPPORT", "EPERM", "ESOCKTNOSUPPORT"]),
    ("see the proxy", &["not there"]),
    ("setns", &["EPERM", "EACCES", "EINVAL"]),
    ("shared memory", &["ENOENT"]),
    ("spoofed source", &["EPERM"]),
    ("ssh key", &["ENOENT"]),
    ("startup", &["EROFS"]),
    ("startup: above", &["EBUSY"]),
    ("startup: link removed", &["EBUSY"]),
    ("startup: link replaced", &["EBUSY", "EXDEV"]),
    ("startup: replace", &["EBUSY"]),
    ("state", &["[]"]),
    ("state: make", &["EROFS", "EACCES"]),
    ("state: move", &["EBUSY"]),
    ("tcp", &["nothing", "ConnectionResetError", "ECONNRESET", "EPIPE", "BrokenPipeError"]),
    ("tcp outside's loopback", &["ECONNREFUSED", "ConnectionRefusedError"]),
    ("tmp", &["done"]),
    ("typing", &["EPERM"]),
    ("udp", &["EPERM"]),
    ("uid", &["EINVAL", "EPERM"]),
    ("uncover", &["failed"]),
    ("unix abstract", &["ECONNREFUSED"]),
    ("unix by a name alone", &["ECONNREFUSED", "ENOTSOCK"]),
    ("unix in home", &["ECONNREFUSED", "ENOTSOCK"]),
    ("unix in run", &["ENOENT"]),
    ("unix in tmp", &["ENOENT"]),
    ("unix in work", &["ECONNREFUSED", "ENOTSOCK"]),
    ("unix: move above", &["EBUSY"]),
    ("unshare net", &["EPERM"]),
    ("user namespace", &["done"]),
    ("variables", &["[]"]),
    ("work", &["done"]),
    ("write", &["EROFS", "EACCES", "ENOENT"]),
    ("write through nested", &["failed"]),
];

/// What is wanted of an attempt: by the longest beginning of its name.
fn expected_results(name: &str) -> &'static [&'static str] {
    let fits = EXPECTED_RESULTS.iter().filter(|(begin, _)| name.starts_with(begin));
    fits.max_by_key(|(begin, _)| begin.len()).unwrap_or_else(|| panic!("`{name}` is not in the table")).1
}

#[test]
fn p1_no_way_out_leads_out() {
    let made = Command::new("/usr/bin/python3")
        .args(["-c", &format!("import ctypes; print(ctypes.CDLL(None).shmget({SHM}, 4096, 0o1666))")])
        .output()
        .unwrap();
    let shm = String::from_utf8_lossy(&made.stdout).trim().to_owned();
    assert!(shm.parse::<i32>().is_ok_and(|id| id >= 0), "no shared memory outside: {shm}");
    let mut troubles = Vec::new();
    for who in RunAs::BOTH {
        let (scene, counter) = (JailScene::new(who), SocketCounter::default());
        let found = run_escapes(&scene, &counter);
        assert!(found.len() > 100, "{}", found.len());
        for (name, came) in &found {
            let own = who.uid().to_string();
            let good = match name.as_str() {
                "set-user-id" => *came == own,
                _ => expected_results(name).contains(&came.as_str()),
            };
            if !good {
                troubles.push(format!("{who:?}: {name}: {came}"));
            }
        }
        let arrived = scene.net.arrivals();
        assert!(arrived.is_empty(), "{who:?}: it arrived in the world: {arrived:?}");
        assert!(scene.origin.requests().is_empty() && scene.origin.raw_connections().is_empty());
        assert_eq!(counter.connections(), 0, "{who:?}: a socket outside was reached");
        for path in ["/etc/escape", "/usr/bin/escape"] {
            assert!(!Path::new(path).exists(), "{who:?}: {path}");
        }
    }
    drop(Command::new("ipcrm").args(["-m", &shm]).stderr(Stdio::null()).status());
    assert!(troubles.is_empty(), "{}", troubles.join("\n"));
}

#[test]
fn p5_names_are_resolved_by_the_proxy_whoever_is_asked() {
    let scene = JailScene::new(RunAs::User);
    let script = "for at in @127.0.0.1 @8.8.8.8 @2001:4860:4860::8888 '@9.9.9.9 +tcp' @169.254.169.254; do\n\
        dig +short +tries=1 +time=20 $at open.example A; dig +tries=1 +time=20 $at denied.example A | grep -o NXDOMAIN; done\n\
        getent ahostsv4 open.example | head -1 | cut -d' ' -f1; getent hosts denied.example; true";
    let out = scene.run_successfully(&["--allow", "open.example"], script);
    assert_eq!(out, "93.184.216.34\nNXDOMAIN\n".repeat(5) + "93.184.216.34\n");
    assert!(
        scene.names.queried_names().iter().all(|name| name == "open.example"),
        "{:?}",
        scene.names.queried_names()
    );
    assert!(scene.has_refusal("not_listed", "denied.example"));
    assert!(scene.net.arrivals().is_empty(), "the names alone were asked for");
}
