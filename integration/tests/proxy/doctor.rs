//! `sandbar doctor` outside: a gateway as it must be, and what it says of each thing that is broken; and inside,
//! behind that gateway.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use certs::{AuthorityOptions, CertificateAuthority, UnixTime};
use integration::sandbar;
use serde_json::Value;

use super::scene::{ProxyScene, ProxySetup, wait_until};

/// A gateway that one would be content with.
fn good_setup() -> ProxySetup {
    ProxySetup { limits: "connections = 100".to_owned(), ..ProxySetup::default() }
}

fn doctor_command(scene: &ProxyScene) -> Command {
    let program = sandbar().get_program().to_str().unwrap().to_owned();
    let mut command = scene.net.gateway.command(&program);
    command.args(["doctor", "--json", "-c"]).arg(scene.config_path());
    command
}

struct DoctorRun {
    status: Option<i32>,
    report: Value,
    /// The verdict on each thing, and how it is known.
    found: BTreeMap<String, (String, String)>,
}

fn run_doctor(command: &mut Command) -> DoctorRun {
    let output = command.output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&output.stderr));
    });
    let text = |probe: &Value, key: &str| probe[key].as_str().unwrap_or_default().to_owned();
    let probes = report["probes"].as_array().unwrap().iter();
    let found =
        probes.map(|probe| (text(probe, "name"), (text(probe, "verdict"), text(probe, "how")))).collect();
    DoctorRun { status: output.status.code(), report, found }
}

impl DoctorRun {
    /// The names of what is wrong.
    fn wrong_probes(&self) -> Vec<&str> {
        let wrong = self.found.iter().filter(|(_, (verdict, _))| verdict == "wrong");
        wrong.map(|(name, _)| name.as_str()).collect()
    }
}

#[test]
fn a_good_gateway_is_called_good_and_shows_its_evidence() {
    let scene = ProxyScene::with_setup(good_setup());
    assert_eq!(scene.curl(&["http://open.example/"]).status, 200);
    let examined = run_doctor(&mut doctor_command(&scene));
    assert!(examined.wrong_probes().is_empty(), "{:#?}", examined.found);
    assert_eq!(examined.status, Some(0));
    assert!(examined.report["good"].as_u64().unwrap() >= 18, "{:#?}", examined.found);
    for name in ["firewall.streams", "firewall.names", "firewall.rest", "firewall.exempt"] {
        assert_eq!(examined.found[name].0, "fine", "{name}: {:?}", examined.found[name]);
    }
    let [allowed, refused] = examined.report["evidence"].as_array().unwrap().as_slice() else {
        panic!("{:#}", examined.report["evidence"]);
    };
    assert_eq!((&allowed["wanted"], &allowed["line"]["action_id"]), (&"allowed".into(), &1.into()));
    assert_eq!((&refused["wanted"], &refused["line"]["action_id"]), (&"refused".into(), &2.into()));
    assert_eq!(refused["line"]["metadata"]["correlation_uid"], refused["record"]);
}

/// What is broken, by what, and what is wrong then.
type BrokenCase = (&'static str, fn(&mut ProxyScene), &'static [&'static str]);

const BROKEN_CASES: &[BrokenCase] = &[
    (
        "a key that others read",
        |scene| set_mode(scene, "ca/ca.key", 0o644),
        &["keys.authority", "keys.private"],
    ),
    ("an open admin socket", |scene| set_mode(scene, "admin.sock", 0o666), &["keys.private"]),
    ("a policy that others write", |scene| set_mode(scene, "policies/p.toml", 0o666), &["keys.policies"]),
    ("an open directory of policies", |scene| set_mode(scene, "policies", 0o777), &["keys.policies"]),
    ("a bad policy", break_policy, &["instance.files", "instance.policy"]),
    ("a silent resolver", |scene| scene.names.stop_answering(), &["machine.resolvers"]),
    ("a policy mounted alone", mount_over_policy, &["files.mounts"]),
    (
        "a firewall that is gone",
        |scene| scene.net.gateway.nft("flush ruleset"),
        &["firewall.names", "firewall.rest", "firewall.streams"],
    ),
    ("a firewall for IPv4 alone", redirect_ipv4_only, &["firewall.names", "firewall.streams"]),
    ("a user who is exempt", exempt_root, &["firewall.exempt"]),
    ("nobody there", stop_instance, &["instance.ready"]),
    ("a changed log", tamper_log, &["log.intact"]),
    ("a log of tomorrow", postdate_log, &["log.intact", "machine.clock"]),
];

fn set_mode(scene: &ProxyScene, name: &str, mode: u32) {
    fs::set_permissions(scene.dir.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
}

fn break_policy(scene: &mut ProxyScene) {
    fs::write(scene.dir.path().join("policies/p.toml"), "name = \"p\"\nnonsense = 1\n").unwrap();
    wait_until("it is noticed", || {
        let (_, told) = scene.admin_request("GET", "/status")?;
        told.contains("\"policy_stale\":true").then_some(())
    });
}

fn mount_over_policy(scene: &mut ProxyScene) {
    let (pid, file) = (scene.pid().to_string(), scene.dir.path().join("policies/p.toml"));
    let mut command = Command::new("nsenter");
    command.args(["-t", &pid, "-m", "mount", "--bind"]).arg(&file).arg(&file);
    assert!(command.status().unwrap().success());
}

fn redirect_ipv4_only(scene: &mut ProxyScene) {
    scene.net.gateway.nft(
        "flush ruleset\ntable ip gate { chain names { type nat hook prerouting priority dstnat;\n\
         udp dport 53 redirect to :53\nmeta l4proto tcp redirect to :15001\n}\n\
         chain passing { type filter hook forward priority 0; policy drop; }\n}\n",
    );
}

fn exempt_root(scene: &mut ProxyScene) {
    scene.net.gateway.nft(
        "table inet gate {\nchain own { type filter hook output priority 0;\nmeta skuid 0 accept\n}\n}\n",
    );
}

fn stop_instance(scene: &mut ProxyScene) {
    scene.stop();
}

/// The newest segment of the log.
fn rewrite_log(scene: &ProxyScene, change: impl Fn(&str) -> String) {
    let (_, path) = audit::list_segments(&scene.log_dir()).unwrap().pop().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    fs::write(path, change(&text)).unwrap();
}

fn tamper_log(scene: &mut ProxyScene) {
    scene.stop();
    rewrite_log(scene, |text| text.replacen("started", "Started", 1));
}

fn postdate_log(scene: &mut ProxyScene) {
    scene.stop();
    rewrite_log(scene, |text| {
        let last = text.lines().last().unwrap();
        let (before, after) = last.split_once("\"time_dt\":\"").unwrap();
        let after = &after[4..];
        text.replace(last, &format!("{before}\"time_dt\":\"9999{after}"))
    });
}

#[test]
fn each_broken_thing_is_found() {
    for (what, break_it, wanted) in BROKEN_CASES {
        let mut scene = ProxyScene::with_setup(good_setup());
        assert_eq!(scene.curl(&["http://open.example/"]).status, 200, "{what}");
        break_it(&mut scene);
        let examined = run_doctor(&mut doctor_command(&scene));
        let wrong = examined.wrong_probes();
        let found = wanted.iter().all(|name| wrong.contains(name));
        assert!(found, "{what}: {wrong:?} of {:#?}", examined.found);
        let more: Vec<_> = wrong.iter().filter(|name| !wanted.contains(name)).collect();
        assert!(more.iter().all(|name| **name == "instance.ready"), "{what}: {more:?} too");
        assert_eq!(examined.status, Some(1), "{what}");
        let probes = examined.report["probes"].as_array().unwrap();
        let fixed = probes.iter().all(|probe| (probe["verdict"] == "wrong") == probe["fix"].is_string());
        assert!(fixed, "{what}: what is wrong comes with what to change");
    }
}

#[test]
fn an_authority_that_ends_soon_or_has_ended_is_found() {
    let day = 86_400;
    for (age, how) in [(360, "expires in"), (400, "")] {
        let mut scene = ProxyScene::with_setup(good_setup());
        scene.stop();
        let dir = scene.dir.path().join("ca");
        fs::remove_dir_all(&dir).unwrap();
        let made = UnixTime::now().as_secs() - age * day;
        let made = UnixTime::since_unix_epoch(Duration::from_secs(made));
        CertificateAuthority::create(&dir, &AuthorityOptions::default(), made).unwrap();
        let examined = run_doctor(&mut doctor_command(&scene));
        let (verdict, told) = &examined.found["keys.authority"];
        assert!(verdict == "wrong" && told.contains(how), "{age} days: {verdict}: {told}");
        assert_eq!(examined.status, Some(1), "{age} days");
    }
}

#[test]
fn too_few_descriptors_and_a_full_disk_are_found() {
    let log = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size=8m tmpfs {} && exec \"$@\"", log.path().display());
    let prefix = ["prlimit", "--nofile=256:256", "sh", "-c", &mount, "sh"].map(str::to_owned).into();
    let limits = "connections = 1000".to_owned();
    let setup = ProxySetup { prefix, limits, log: Some(log.path().to_owned()), ..ProxySetup::default() };
    let scene = ProxyScene::with_setup(setup);
    // Where the instance is, whose mounts these are.
    let program = sandbar().get_program().to_owned();
    let mut command = Command::new("nsenter");
    command.args(["-t", &scene.pid().to_string(), "-m", "-n"]).arg(program);
    let examined = run_doctor(command.args(["doctor", "--json", "-c"]).arg(scene.config_path()));
    assert_eq!(examined.wrong_probes(), ["instance.descriptors", "log.room"], "{:#?}", examined.found);
}

#[test]
fn p1_behind_a_gateway_the_network_leads_nowhere_else() {
    let scene = ProxyScene::with_setup(good_setup());
    let program = sandbar().get_program().to_str().unwrap().to_owned();
    let mut command = scene.command_in(0, "setpriv");
    command.args(["--reuid", "4000", "--regid", "4000", "--clear-groups", "--no-new-privs"]);
    command.args(["--bounding-set", "-all", "--inh-caps", "-all", &program]);
    let examined = run_doctor(command.args(["doctor", "--inside", "--json"]));
    let network = |name: &&String| {
        ["tcp.", "tls.", "dns.", "udp", "icmp", "raw.", "socket.", "network."]
            .iter()
            .any(|begin| name.starts_with(begin))
    };
    let escaped: Vec<_> =
        examined.found.iter().filter(|(name, (verdict, _))| network(name) && verdict == "escaped").collect();
    assert!(escaped.is_empty(), "{escaped:#?}");
    for name in ["tcp.80", "tcp.six.443", "tcp.metadata", "tls.named", "dns.udp", "dns.tcp.six"] {
        assert_eq!(examined.found[name].0, "answered", "{name}: {:?}", examined.found[name]);
    }
    let arrived = scene.net.arrivals();
    assert!(arrived.is_empty(), "{arrived:?}");
    assert!(scene.names.queried_names().is_empty(), "{:?}", scene.names.queried_names());
}
