//! `sandbar doctor` inside: in a jail nothing it tries gets around, and where there is no jail it says so.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::scene::{CommandResult, JailScene, RunAs};

/// Fewest ways around that are tried.
const MIN_PROBES: u64 = 120;

/// What each must come to in a jail, by what its name begins with; the longest beginning counts.
const EXPECTED_VERDICTS: &[(&str, &[&str])] = &[
    ("agreement.", &["answered", "blocked"]),
    ("dns.", &["answered"]),
    ("dns.odd-port", &["blocked"]),
    ("dns.system", &["blocked"]),
    ("dccp", &["blocked"]),
    ("family.", &["blocked"]),
    ("files.", &["blocked"]),
    ("icmp", &["blocked"]),
    ("machine.", &["blocked"]),
    ("namespaces.", &["blocked"]),
    ("network.", &["blocked"]),
    ("processes.", &["blocked"]),
    ("raw.", &["blocked"]),
    ("sctp", &["blocked"]),
    ("socket.", &["blocked"]),
    ("socket.device", &["answered"]),
    ("tcp.", &["answered"]),
    ("tls.", &["answered"]),
    ("udp", &["blocked"]),
    ("unix.", &["blocked"]),
];

fn expected_verdicts(name: &str) -> &'static [&'static str] {
    let fits = EXPECTED_VERDICTS.iter().filter(|(begin, _)| name.starts_with(begin));
    fits.max_by_key(|(begin, _)| begin.len()).unwrap_or_else(|| panic!("`{name}` is not in the table")).1
}

fn parse_report(ran: &CommandResult) -> Value {
    serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}: {ran}"))
}

/// What each probe came to, and how that is known.
fn verdicts(report: &Value) -> BTreeMap<String, (String, String)> {
    let text = |probe: &Value, key: &str| probe[key].as_str().unwrap_or_default().to_owned();
    let probes = report["probes"].as_array().unwrap_or_else(|| panic!("{report:#}"));
    probes.iter().map(|probe| (text(probe, "name"), (text(probe, "verdict"), text(probe, "how")))).collect()
}

/// A socket that somebody outside listens on, in the network of whoever runs the jail.
fn listen_outside(scene: &JailScene, path: PathBuf) -> UnixListener {
    let listener = scene.net.gateway.enter(|| UnixListener::bind(&path)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
    scene.chown_to_caller(&path);
    listener
}

/// Leaves only the scene to be seen of where sockets are: those of other tests are not to be reached by a doctor
/// that nothing holds, nor found by one in a jail.
const ISOLATE_SCRIPT: &str = "set -e; dir=$0; uid=$1; shift; mount --bind \"$dir\" /mnt; \
    mount -t tmpfs none /var/lib; mkdir -p \"$dir\"; mount --move /mnt \"$dir\"; \
    for at in /run /tmp /var/tmp; do mount -t tmpfs -o mode=1777 none $at; done; cd \"$dir/work\"; \
    exec setpriv --reuid $uid --regid $uid --clear-groups -- \"$@\"";

/// A program as the caller, outside of any jail, alone with its scene.
fn isolated_command(scene: &JailScene) -> Command {
    let mut command = scene.net.gateway.command("sh");
    command.args(["-c", ISOLATE_SCRIPT]).arg(scene.dir.path()).arg(scene.who.uid().to_string());
    command.env_clear().env("HOME", scene.path("home")).env("LC_ALL", "C.UTF-8");
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

/// The doctor, outside of any jail.
fn unjailed_doctor(scene: &JailScene) -> Command {
    let mut command = isolated_command(scene);
    command.arg(scene.path("sandbar"));
    command
}

/// A machine with what a sandbox would like to have.
fn scene_with_secrets(who: RunAs) -> (JailScene, Vec<UnixListener>) {
    let scene = JailScene::new(who);
    for name in [".ssh/id", ".netrc", ".aws/credentials", ".config/gh/hosts.yml", ".bashrc"] {
        scene.write_file(&format!("home/{name}"), "secret");
    }
    scene.chown_to_caller(&scene.path("home/.config"));
    scene.write_file("secret", "secret");
    let open = vec![
        listen_outside(&scene, scene.path("home/agent.sock")),
        listen_outside(&scene, scene.path("work/agent.sock")),
    ];
    for listener in &open {
        listener.set_nonblocking(true).unwrap();
    }
    (scene, open)
}

#[test]
fn p1_a_jail_withstands_everything_the_doctor_tries() {
    for who in RunAs::BOTH {
        let (scene, open) = scene_with_secrets(who);
        let policy = scene.write_file(
            "home/conf/own.toml",
            "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = [\"open.example\", \"open.example:80\"]\n",
        );
        let named = policy.display().to_string();
        let mut command = isolated_command(&scene);
        command.args(scene.run_arguments()).args(["-q", "--policy", &named, "--"]);
        command.env("SSH_AUTH_SOCK", scene.path("home/agent.sock")).arg(scene.path("sandbar"));
        command.args(["doctor", "--json", "--allowed", "open.example", "--policy", &named]);
        command.arg("--path").arg(scene.path("state"));
        let ran = CommandResult::run(&mut command);
        let report = parse_report(&ran);
        let found = verdicts(&report);
        let strange = |(name, (verdict, _)): &(&String, &(String, String))| {
            !expected_verdicts(name).contains(&verdict.as_str())
        };
        let strange: Vec<_> = found.iter().filter(strange).collect();
        assert!(strange.is_empty(), "{who:?}: {strange:#?}");
        assert_eq!(ran.status.code(), Some(0), "{who:?}: {ran}");
        assert_eq!((&report["ok"], &report["bad"]), (&true.into(), &0.into()), "{who:?}");
        assert!(report["tried"].as_u64().unwrap() >= MIN_PROBES, "{who:?}: {}", report["tried"]);
        assert!(report["milliseconds"].as_u64().unwrap() < 20_000, "{}", report["milliseconds"]);

        // Judged where it would have arrived.
        let strays: Vec<_> = scene
            .net
            .arrivals()
            .into_iter()
            .filter(|(_, address, _)| {
                !["93.184.216.34", "2606:2800::34"].contains(&address.to_string().as_str())
            })
            .collect();
        assert!(strays.is_empty(), "{who:?}: it arrived in the world: {strays:?}");
        let hosts = scene.origin.requests();
        assert!(
            hosts.iter().all(|request| request.field("host") == Some("open.example")),
            "{who:?}: {hosts:?}"
        );
        let asked = scene.names.queried_names();
        assert!(asked.iter().all(|name| name == "open.example"), "{who:?}: {asked:?}");
        assert!(open.iter().all(|socket| socket.accept().is_err()), "{who:?}: a socket was reached");
        assert_evidence(&scene, &report);
    }
}

/// The evidence: one request served, one refused, and the log has the refused one by its id.
fn assert_evidence(scene: &JailScene, report: &Value) {
    let [allowed, refused] = report["evidence"].as_array().unwrap().as_slice() else {
        panic!("{:#}", report["evidence"]);
    };
    assert_eq!(allowed["wanted"], "allowed");
    assert!(allowed["answer"].as_str().unwrap().contains(" 200"), "{allowed:#}");
    assert!(scene.origin_saw("/sandbar-doctor"), "the allowed one arrived");
    assert!(refused["answer"].as_str().unwrap().contains("403"), "{refused:#}");
    let id = refused["record"].as_str().unwrap();
    let records = scene.records();
    let record = records.iter().find(|record| record["metadata"]["correlation_uid"] == id);
    let record = record.unwrap_or_else(|| panic!("{id} is not in the log"));
    assert_eq!(record["status_detail"], "not_listed", "{record:#}");
}

#[test]
fn without_a_jail_it_says_so() {
    let (scene, _open) = scene_with_secrets(RunAs::User);
    let mut command = unjailed_doctor(&scene);
    command.env("SSH_AUTH_SOCK", scene.path("home/agent.sock"));
    command.args(["doctor", "--inside", "--json", "--path"]).arg(scene.path("secret"));
    let ran = CommandResult::run(&mut command);
    assert_eq!(ran.status.code(), Some(1), "{ran}");
    let report = parse_report(&ran);
    assert_eq!(report["ok"], false);
    let found = verdicts(&report);
    let path = format!("files.path.{}", scene.path("secret").display());
    for name in [
        "tcp.80",
        "tcp.443",
        "tcp.8080",
        "tcp.six.80",
        "tcp.mapped",
        "tcp.metadata",
        "tls.named",
        "dns.udp",
        "dns.txt",
        "socket.device",
        "unix.variables",
        "files.credentials",
        &path,
    ] {
        assert_eq!(found[name].0, "escaped", "{name}: {:?}", found[name]);
    }
    let fixed = report["probes"].as_array().unwrap().iter().all(|probe| {
        (probe["verdict"] == "escaped") == probe["fix"].as_str().is_some_and(|fix| !fix.is_empty())
    });
    assert!(fixed, "what escaped comes with what to change, and nothing else does");
    let arrived = scene.net.arrivals();
    let there = ("tcp".to_owned(), "1.1.1.1".parse::<IpAddr>().unwrap(), 80);
    assert!(arrived.contains(&there), "it told the truth: {arrived:?}");
    let human = CommandResult::run(unjailed_doctor(&scene).args(["doctor", "--inside"]));
    assert_eq!(human.status.code(), Some(1), "{human}");
    assert!(human.out.contains("ESCAPED") && human.out.contains("fix:"), "{human}");
    assert!(human.out.lines().last().unwrap().starts_with("failed:"), "{human}");
}

/// One probe by itself; its verdict.
fn run_probe(command: &mut Command, name: &str) -> String {
    let ran = CommandResult::run(command.args(["doctor", "--inside", "--probe", name]));
    let verdict: Value =
        serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{name}: {error}: {ran}"));
    verdict["verdict"].as_str().unwrap().to_owned()
}

#[test]
fn every_kind_of_way_around_can_be_found() {
    let (scene, _open) = scene_with_secrets(RunAs::Root);
    // Somebody in the world who answers any datagram.
    for (address, port) in [("1.1.1.1", 443), ("1.1.1.1", 51820)] {
        scene.net.world.ip(&format!("addr replace {address}/32 dev lo\n"));
        let socket = scene.net.world.enter(|| UdpSocket::bind((address, port))).unwrap();
        std::thread::spawn(move || {
            while let Ok((_, from)) = socket.recv_from(&mut [0; 2048]) {
                drop(socket.send_to(b"here", from));
            }
        });
    }
    let name = format!("sandbar-doctor-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = scene.net.gateway.enter(|| UnixListener::bind_addr(&address)).unwrap();
    // As root, with every privilege there is.
    for name in [
        "udp.quic",
        "udp.wireguard",
        "icmp.raw",
        "icmp.raw.six",
        "raw.ip",
        "raw.gre",
        "family.packet",
        "network.address",
        "network.firewall",
        "network.interface",
        "network.neighbour",
        "network.route",
        "socket.mark",
        "socket.transparent",
        "namespaces.net",
        "machine.capabilities",
        "machine.set-user-id",
        "machine.bpf",
        "machine.restart",
        "machine.by-number",
        "machine.mount",
        "machine.settings",
    ] {
        let verdict = run_probe(&mut unjailed_doctor(&scene), name);
        assert_eq!(verdict, "escaped", "{name}");
    }
    // In a process namespace of its own, to which everybody else is outside.
    for name in ["unix.abstract", "unix.anywhere"] {
        let mut command = isolated_command(&scene);
        command.args(["unshare", "--pid", "--fork", "--mount-proc"]).arg(scene.path("sandbar"));
        assert_eq!(run_probe(&mut command, name), "escaped", "{name}");
    }
    // With a file open that is gone.
    let gone = scene.path("gone");
    fs::write(&gone, "secret").unwrap();
    let mut command = scene.outside_command("sh");
    command.args(["-c", "exec 9<\"$0\"; rm \"$0\"; exec \"$@\""]).arg(&gone).arg(scene.path("sandbar"));
    assert_eq!(run_probe(&mut command, "processes.inherited"), "escaped");
    // Beside a process of Sandbar's, which has the same user.
    let mut running = scene.run_command(&["-q"]);
    let mut running = running.args(["sleep", "60"]).spawn().unwrap();
    let seen = super::scene::wait_until("its memory is open", || {
        let verdict = run_probe(&mut scene.outside_command(scene.path("sandbar")), "processes.memory");
        (verdict == "escaped").then_some(verdict)
    });
    running.kill().unwrap();
    running.wait().unwrap();
    assert_eq!(seen, "escaped");
}

#[test]
fn which_side_it_is_on_must_be_known() {
    let scene = JailScene::new(RunAs::User);
    let ran = CommandResult::run(scene.outside_command(scene.path("sandbar")).arg("doctor"));
    assert_eq!(ran.status.code(), Some(64), "{ran}");
    assert!(ran.err.contains("--inside") && ran.err.contains("--outside"), "{ran}");
}
