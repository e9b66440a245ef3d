//! The story of a key that never enters the jail: official clients of two vendors and a coding agent, unmodified, as
//! their makers ship them, talk to an origin of the vendors' shape, and nothing inside has the key.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use integration::repository_root;
use serde_json::Value;

use super::scene::{CommandResult, JailScene, RunAs, wait_until};

const OPENAI_KEY: &str = "sk-proj-2nFq8Zr5LwXc7Vb1Kt9Yd4Hs6Jm3Pg0A";
const ANTHROPIC_KEY: &str = "sk-ant-api03-9uTg4Wb7Rx2Nc5Vm8Qz1Ly6Kd3Hf0Sj";
/// Where the names of the vendors lead in the scene, and the port on which their origin really listens.
const ADDRESS: &str = "93.184.216.80";
const PORT: u16 = 8450;

/// The directory with the clients that `make setup` installs.
fn clients_dir() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(repository_root().join("target"), PathBuf::from);
    let dir = target.join("model-clients");
    fs::create_dir_all(&target).unwrap();
    let lock = File::create(dir.with_extension("lock")).unwrap();
    lock.lock().unwrap(); // tests begin together
    let made = Command::new(repository_root().join("deploy/model-clients.sh")).arg(&dir).output().unwrap();
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "the clients of model services cannot be installed: {said}");
    dir
}

/// The vendors, ended with the test.
struct Vendors(Child);

impl Drop for Vendors {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn start_vendors(scene: &JailScene) -> Vendors {
    scene.net.world.nft(&format!(
        "table ip vendors {{ chain arriving {{ type nat hook prerouting priority dstnat;\n\
         ip daddr {ADDRESS} tcp dport 443 redirect to :{PORT}\n}}\n}}\n"
    ));
    let at = |name: &str| scene.path(name).display().to_string();
    fs::write(at("chain.pem"), &scene.minted.chain).unwrap();
    fs::write(at("key.pem"), &scene.minted.key).unwrap();
    let mut vendors = scene.net.world.command("/usr/bin/python3");
    vendors.arg(repository_root().join("integration/tests/jail/model_clients/vendor.py"));
    vendors.args([&PORT.to_string(), &at("chain.pem"), &at("key.pem"), &at("vendor.log")]);
    vendors.args([OPENAI_KEY, ANTHROPIC_KEY]);
    let vendors = Vendors(vendors.spawn().unwrap());
    wait_until("the vendors listen", || {
        scene.net.world.enter(|| std::net::TcpStream::connect(("127.0.0.1", PORT)).ok()).map(drop)
    });
    vendors
}

fn vendor_log(scene: &JailScene) -> Vec<Value> {
    let text = fs::read_to_string(scene.path("vendor.log")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// `sandbar run` with the clients at `clients` of the scene, and both keys in its environment.
fn run_with_keys(scene: &JailScene, clients: &Path, options: &[&str]) -> Command {
    let mounted = scene.path("clients");
    fs::create_dir(&mounted).unwrap();
    let uid = scene.who.uid().to_string();
    let mut command = scene.net.gateway.command("unshare");
    command.args(["-m", "sh", "-c", "mount --bind \"$0\" \"$1\" && shift && exec \"$@\""]);
    command.arg(clients).arg(&mounted).args([
        "setpriv",
        "--reuid",
        &uid,
        "--regid",
        &uid,
        "--clear-groups",
        "--",
    ]);
    command.args(scene.run_arguments()).args(options).arg("--");
    command.env_clear().env("HOME", scene.path("home")).env("LC_ALL", "C.UTF-8");
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("OPENAI_API_KEY", OPENAI_KEY).env("ANTHROPIC_API_KEY", ANTHROPIC_KEY);
    command.current_dir(scene.path("work"));
    command
}

/// The processes below one, as `/proc` has them.
fn descendants(of: u32) -> Vec<u32> {
    let children = |parent: u32| {
        let listed = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
        listed.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>()
    };
    let (mut found, mut next) = (Vec::new(), children(of));
    while let Some(pid) = next.pop() {
        found.push(pid);
        next.extend(children(pid));
    }
    found
}

/// Whether a key is in the memory, the environment or the arguments of a process.
fn has_key(pid: u32) -> bool {
    let holds = |text: &[u8]| {
        [OPENAI_KEY, ANTHROPIC_KEY]
            .iter()
            .any(|key| text.windows(key.len()).any(|part| part == key.as_bytes()))
    };
    let of = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    if holds(&of("environ")) || holds(&of("cmdline")) {
        return true;
    }
    let Ok(mut memory) = File::open(format!("/proc/{pid}/mem")) else { return false };
    String::from_utf8_lossy(&of("maps")).lines().any(|line| {
        let mut words = line.split_whitespace();
        let (start, end) = words.next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        let readable = words.next().unwrap().starts_with('r') && end - start <= 1 << 30;
        let mut text = Vec::new();
        readable
            && memory.seek(SeekFrom::Start(start)).is_ok()
            && (&mut memory).take(end - start).read_to_end(&mut text).is_ok()
            && holds(&text)
    })
}

#[test]
fn p11_clients_of_two_vendors_and_an_agent_work_without_a_key_inside() {
    let clients = clients_dir();
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let _vendors = start_vendors(&scene);
        for name in ["clients.py", "clients.mjs", "search.py"] {
            let text =
                fs::read_to_string(repository_root().join("integration/tests/jail/model_clients").join(name));
            scene.write_file(&format!("work/{name}"), &text.unwrap());
        }
        let reversed = [OPENAI_KEY, ANTHROPIC_KEY].map(|key| key.chars().rev().collect::<String>());
        let script = format!(
            "set -e\nclients={}\n$clients/python/bin/python clients.py\n\
             $clients/node_modules/.bin/claude -p 'say hello' </dev/null\n\
             node clients.mjs $clients & node=$!\n\
             while ! test -e node-ready; do kill -0 $node; sleep 0.05; done\n\
             /usr/bin/python3 search.py {}\ntouch ready\nwait $node\n",
            scene.path("clients").display(),
            reversed.join(" ")
        );
        let mut command =
            run_with_keys(&scene, &clients, &["--with", "openai,claude-code", "--timeout", "80s"]);
        command.args(["sh", "-c", &script]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        let proxy = child.id();
        let mut searched = Vec::new();
        wait_until("the clients are done", || {
            let ended = !Path::new(&format!("/proc/{proxy}/environ")).exists();
            (ended
                || scene.path("work/ready").exists()
                || descendants(proxy).is_empty() && !scene.run_dirs().is_empty())
            .then_some(())
        });
        // As root and from outside: the keeper, init, and everything in the jail.
        for pid in descendants(proxy) {
            searched.push((pid, has_key(pid)));
        }
        let environ = fs::read(format!("/proc/{proxy}/environ")).unwrap_or_default();
        let shows = [OPENAI_KEY, ANTHROPIC_KEY]
            .map(|key| environ.windows(key.len()).any(|part| part == key.as_bytes()));
        scene.write_file("work/searched", "");
        let ran = CommandResult::from_child(child);
        assert_eq!(ran.status.code(), Some(0), "{who:?} {ran}");
        let whole = "hello from the origin";
        let streamed = "hello |from |the |origin";
        for client in ["openai", "anthropic"] {
            assert_eq!(ran.out.matches(&format!("{client}: {whole}\n")).count(), 2, "{who:?} {ran}");
            assert_eq!(ran.out.matches(&format!("{client} streams: {streamed}")).count(), 2, "{who:?} {ran}");
        }
        assert!(ran.out.contains(&format!("\n{whole}\n")), "{who:?} the agent: {ran}");
        assert!(ran.out.contains("found []"), "{who:?} {ran}");
        assert!(searched.len() >= 4, "keeper, init, shell and node: {searched:?}");
        assert!(searched.iter().all(|(_, found)| !found), "{who:?} {searched:?}");
        assert_eq!(shows, [false; 2], "{who:?} the environment of the proxy shows the key");
        assert!(has_key(std::process::id()), "the search finds what is there");

        let log = vendor_log(&scene);
        assert!(log.len() >= 9, "{log:#?}");
        for request in &log {
            assert_eq!(request["known"], true, "{who:?} {request:#}");
            assert!(!request.to_string().contains("sbxph"), "no placeholder leaves: {request:#}");
        }
        let agents = ["OpenAI/Python", "OpenAI/JS", "Anthropic/Python", "Anthropic/JS", "claude-cli"];
        for agent in agents {
            let sent = |request: &&Value| request["agent"].as_str().unwrap_or_default().contains(agent);
            assert!(log.iter().any(|request| sent(&request)), "{agent}: {log:#?}");
        }
        let records = scene.records().iter().map(Value::to_string).collect::<String>();
        assert!(!records.contains(OPENAI_KEY) && !records.contains(ANTHROPIC_KEY), "{who:?}");
    }
}
