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

use super::scene::{Ran, Scene, Who};

/// Fewest ways around that are tried.
const FEWEST: u64 = 120;

/// What each must come to in a jail, by what its name begins with; the longest beginning counts.
const WANTED: &[(&str, &[&str])] = &[
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

fn wanted(name: &str) -> &'static [&'static str] {
    let fits = WANTED.iter().filter(|(begin, _)| name.starts_with(begin));
    fits.max_by_key(|(begin, _)| begin.len())
        .unwrap_or_else(|| panic!("`{name}` is not in the table"))
        .1
}

fn report(ran: &Ran) -> Value {
    serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}: {ran}"))
}

/// What each probe came to, and how that is known.
fn verdicts(report: &Value) -> BTreeMap<String, (String, String)> {
    let text = |probe: &Value, key: &str| probe[key].as_str().unwrap_or_default().to_owned();
    let probes = report["probes"].as_array().unwrap_or_else(|| panic!("{report:#}"));
    probes
        .iter()
        .map(|probe| (text(probe, "name"), (text(probe, "verdict"), text(probe, "how"))))
        .collect()
}

/// A socket that somebody outside listens on, in the network of whoever runs the jail.
fn listen(scene: &Scene, path: PathBuf) -> UnixListener {
    let listener = scene.net.gateway.enter(|| UnixListener::bind(&path)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
    scene.give(&path);
    listener
}

/// Leaves only the scene to be seen of where sockets are: those of other tests are not to be reached by a doctor
/// that nothing holds, nor found by one in a jail.
const ALONE: &str = "set -e; dir=$0; uid=$1; shift; mount --bind \"$dir\" /mnt; \
    mount -t tmpfs none /var/lib; mkdir -p \"$dir\"; mount --move /mnt \"$dir\"; \
    for at in /run /tmp /var/tmp; do mount -t tmpfs -o mode=1777 none $at; done; cd \"$dir/work\"; \
    exec setpriv --reuid $uid --regid $uid --clear-groups -- \"$@\"";

/// A program as the caller, outside of any jail, alone with its scene.
fn alone(scene: &Scene) -> Command {
    let mut command = scene.net.gateway.command("sh");
    command.args(["-c", ALONE]).arg(scene.dir.path()).arg(scene.who.uid().to_string());
    command.env_clear().env("HOME", scene.at("home")).env("LC_ALL", "C.UTF-8");
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

/// The doctor, outside of any jail.
fn unguarded(scene: &Scene) -> Command {
    let mut command = alone(scene);
    command.arg(scene.at("sandbar"));
    command
}

/// A machine with what a sandbox would like to have.
fn tempting(who: Who) -> (Scene, Vec<UnixListener>) {
    let scene = Scene::new(who);
    for name in [".ssh/id", ".netrc", ".aws/credentials", ".config/gh/hosts.yml", ".bashrc"] {
        scene.write(&format!("home/{name}"), "secret");
    }
    scene.give(&scene.at("home/.config"));
    scene.write("secret", "secret");
    let open = vec![
        listen(&scene, scene.at("home/agent.sock")),
        listen(&scene, scene.at("work/agent.sock")),
    ];
    for listener in &open {
        listener.set_nonblocking(true).unwrap();
    }
    (scene, open)
}

#[test]
fn a_jail_withstands_everything_the_doctor_tries() {
    for who in Who::BOTH {
        let (scene, open) = tempting(who);
        let policy = scene.write(
            "home/conf/own.toml",
            "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = [\"open.example\", \"open.example:80\"]\n",
        );
        let named = policy.display().to_string();
        let mut command = alone(&scene);
        command.args(scene.words()).args(["-q", "--policy", &named, "--"]);
        command.env("SSH_AUTH_SOCK", scene.at("home/agent.sock")).arg(scene.at("sandbar"));
        command.args(["doctor", "--json", "--allowed", "open.example", "--policy", &named]);
        command.arg("--path").arg(scene.at("state"));
        let ran = Ran::of(&mut command);
        let report = report(&ran);
        let found = verdicts(&report);
        let strange = |(name, (verdict, _)): &(&String, &(String, String))| {
            !wanted(name).contains(&verdict.as_str())
        };
        let strange: Vec<_> = found.iter().filter(strange).collect();
        assert!(strange.is_empty(), "{who:?}: {strange:#?}");
        assert_eq!(ran.status.code(), Some(0), "{who:?}: {ran}");
        assert_eq!((&report["ok"], &report["bad"]), (&true.into(), &0.into()), "{who:?}");
        assert!(report["tried"].as_u64().unwrap() >= FEWEST, "{who:?}: {}", report["tried"]);
        assert!(report["milliseconds"].as_u64().unwrap() < 20_000, "{}", report["milliseconds"]);

        // Judged where it would have arrived.
        let strays: Vec<_> = scene
            .net
            .arrived()
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
        let asked = scene.names.asked();
        assert!(asked.iter().all(|name| name == "open.example"), "{who:?}: {asked:?}");
        assert!(
            open.iter().all(|socket| socket.accept().is_err()),
            "{who:?}: a socket was reached"
        );
        evident(&scene, &report);
    }
}

/// The evidence: one request served, one refused, and the log has the refused one by its id.
fn evident(scene: &Scene, report: &Value) {
    let [allowed, refused] = report["evidence"].as_array().unwrap().as_slice() else {
        panic!("{:#}", report["evidence"]);
    };
    assert_eq!(allowed["wanted"], "allowed");
    assert!(allowed["answer"].as_str().unwrap().contains(" 200"), "{allowed:#}");
    assert!(scene.reached("/sandbar-doctor"), "the allowed one arrived");
    assert!(refused["answer"].as_str().unwrap().contains("403"), "{refused:#}");
    let id = refused["record"].as_str().unwrap();
    let records = scene.records();
    let record = records.iter().find(|record| record["metadata"]["correlation_uid"] == id);
    let record = record.unwrap_or_else(|| panic!("{id} is not in the log"));
    assert_eq!(record["status_detail"], "not_listed", "{record:#}");
}

#[test]
fn without_a_jail_it_says_so() {
    let (scene, _open) = tempting(Who::User);
    let mut command = unguarded(&scene);
    command.env("SSH_AUTH_SOCK", scene.at("home/agent.sock"));
    command.args(["doctor", "--inside", "--json", "--path"]).arg(scene.at("secret"));
    let ran = Ran::of(&mut command);
    assert_eq!(ran.status.code(), Some(1), "{ran}");
    let report = report(&ran);
    assert_eq!(report["ok"], false);
    let found = verdicts(&report);
    let path = format!("files.path.{}", scene.at("secret").display());
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
    let arrived = scene.net.arrived();
    let there = ("tcp".to_owned(), "1.1.1.1".parse::<IpAddr>().unwrap(), 80);
    assert!(arrived.contains(&there), "it told the truth: {arrived:?}");
    let human = Ran::of(unguarded(&scene).args(["doctor", "--inside"]));
    assert_eq!(human.status.code(), Some(1), "{human}");
    assert!(human.out.contains("ESCAPED") && human.out.contains("fix:"), "{human}");
    assert!(human.out.lines().last().unwrap().starts_with("not good:"), "{human}");
}

/// One probe by itself; its verdict.
fn probe(command: &mut Command, name: &str) -> String {
    let ran = Ran::of(command.args(["doctor", "--inside", "--probe", name]));
    let verdict: Value =
        serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{name}: {error}: {ran}"));
    verdict["verdict"].as_str().unwrap().to_owned()
}

#[test]
fn every_kind_of_way_around_can_be_found() {
    let (scene, _open) = tempting(Who::Root);
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
        let verdict = probe(&mut unguarded(&scene), name);
        assert_eq!(verdict, "escaped", "{name}");
    }
    // In a process namespace of its own, to which everybody else is outside.
    for name in ["unix.abstract", "unix.anywhere"] {
        let mut command = alone(&scene);
        command.args(["unshare", "--pid", "--fork", "--mount-proc"]).arg(scene.at("sandbar"));
        assert_eq!(probe(&mut command, name), "escaped", "{name}");
    }
    // With a file open that is gone.
    let gone = scene.at("gone");
    fs::write(&gone, "secret").unwrap();
    let mut command = scene.outside("sh");
    command
        .args(["-c", "exec 9<\"$0\"; rm \"$0\"; exec \"$@\""])
        .arg(&gone)
        .arg(scene.at("sandbar"));
    assert_eq!(probe(&mut command, "processes.inherited"), "escaped");
    // Beside a process of Sandbar's, which has the same user.
    let mut running = scene.run(&["-q"]);
    let mut running = running.args(["sleep", "60"]).spawn().unwrap();
    let seen = super::scene::until("its memory is open", || {
        let verdict = probe(&mut scene.outside(scene.at("sandbar")), "processes.memory");
        (verdict == "escaped").then_some(verdict)
    });
    running.kill().unwrap();
    running.wait().unwrap();
    assert_eq!(seen, "escaped");
}

#[test]
fn which_side_it_is_on_must_be_known() {
    let scene = Scene::new(Who::User);
    let ran = Ran::of(scene.outside(scene.at("sandbar")).arg("doctor"));
    assert_eq!(ran.status.code(), Some(64), "{ran}");
    assert!(ran.err.contains("--inside") && ran.err.contains("--outside"), "{ran}");
}
