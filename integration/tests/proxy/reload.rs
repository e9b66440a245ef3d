//! Policies change while connections are open: whole or not at all (P9), and permission ends when it ends (P10).

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use integration::{sandbar, text};

use super::client::connect_tcp;
use super::origin::ECHO;
use super::scene::{ProxyScene, ProxySetup, wait_until};

const POLICY: &str = r#"
name = "p"
[[allow]]
name  = "web"
hosts = ["open.example", "other.example"]
[[allow]]
name  = "database"
hosts = ["db.example"]
tcp   = [5432]
[[allow]]
name  = "copy"
hosts = ["six.example", "tolerant.example"]
tcp   = [5432]
"#;

pub(crate) fn start_scene() -> ProxyScene {
    ProxyScene::with_setup(ProxySetup { policy: POLICY.to_owned(), ..ProxySetup::default() })
}

pub(crate) fn write_policy(scene: &ProxyScene, policy: &str) {
    fs::write(scene.dir.path().join("policies/p.toml"), policy).unwrap();
}

/// A connection to an echo by the address that stands for its name.
pub(crate) fn connect_echo(scene: &ProxyScene, name: &str) -> TcpStream {
    let args = ["+short", "+time=10", "+tries=2", "@10.77.0.1", name, "A"];
    let output = scene.command_in(0, "dig").args(args).output().unwrap();
    let stands = text(&output.stdout).trim().to_owned();
    connect_tcp(scene, 0, &format!("{stands}:{ECHO}"))
}

pub(crate) fn round_trip(stream: &mut TcpStream, bytes: &[u8]) -> bool {
    let mut back = vec![0; bytes.len()];
    stream.write_all(bytes).is_ok() && stream.read_exact(&mut back).is_ok() && back == bytes
}

pub(crate) fn generation(scene: &ProxyScene) -> u64 {
    read_status(scene)["policy"]["generation"].as_u64().unwrap()
}

pub(crate) fn read_status(scene: &ProxyScene) -> Value {
    let (_, told) = scene.admin_request("GET", "/status").unwrap();
    serde_json::from_str(&told).unwrap()
}

pub(crate) fn run_reload(scene: &ProxyScene, args: &[&str]) -> (Option<i32>, String) {
    let mut command = sandbar();
    let output = command.arg("reload").args(args).arg("-c").arg(scene.config_path()).output().unwrap();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn p10_what_lost_its_permission_is_cut_and_its_neighbour_is_not() {
    let scene = start_scene();
    let (mut loser, mut neighbour) =
        (connect_echo(&scene, "db.example"), connect_echo(&scene, "tolerant.example"));
    assert!(round_trip(&mut loser, b"hello") && round_trip(&mut neighbour, b"hello"));
    let written = Instant::now();
    write_policy(&scene, &POLICY.replace("db.example", "db2.example"));
    let read = loser.read(&mut [0]);
    let took = written.elapsed();
    assert!(matches!(read, Ok(0) | Err(_)), "it was cut: {read:?}");
    println!("cut {took:?} after the file was written");
    assert!(took < Duration::from_secs(20), "{took:?}, on whatever machine");
    assert!(round_trip(&mut neighbour, b"still here"), "and the neighbour was not");
    let record = scene.wait_for_record("revoked", |record| {
        record["unmapped"]["sandbar"]["ending"] == "revoked"
            && record["dst_endpoint"]["hostname"] == "db.example"
    });
    assert_eq!(record["status_detail"], "not_listed");
    assert_eq!(record["traffic"]["bytes_out"], 5);
    assert!(generation(&scene) > 1);
}

#[test]
fn p10_a_silent_stream_of_http2_is_reset_and_its_connection_goes_on() {
    let scene = start_scene();
    let mut command = scene.command_in(0, "curl");
    command.args(["-sS", "-N", "--http2", "--max-time", "60", "https://open.example/steps"]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let curl = command.spawn().unwrap();
    wait_until("the request is open", || {
        let (_, told) = scene.admin_request("GET", "/connections")?;
        told.contains("/steps").then_some(())
    });
    write_policy(&scene, &POLICY.replace("\"open.example\", ", ""));
    let output = curl.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("CANCEL"), "RST_STREAM is seen: {said}");
    let got = scene.curl(&["https://other.example/"]);
    assert_eq!(got.status, 200, "{got:?}");
}

/// The policy directory as it was.
fn restore_policies(scene: &ProxyScene) {
    let dir = scene.dir.path().join("policies");
    match fs::metadata(&dir) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(&dir).unwrap(),
        Ok(_) => fs::remove_file(&dir).unwrap(),
        Err(_) => {}
    }
    fs::create_dir(&dir).unwrap();
    write_policy(scene, POLICY);
    wait_until("the good files are read", || {
        (read_status(scene)["policy"]["policy_stale"] == false).then_some(())
    });
}

/// A way to spoil the policy directory, what is said then, and where.
type BadPolicyCase = (&'static str, fn(&Path), &'static str, &'static str);

const LIST_RULE: &str = "\n[[allow]]\nname = \"listed\"\nhosts_file = \"l.txt\"\n";

fn put_policy(dir: &Path, text: &str) {
    fs::write(dir.join("p.toml"), text).unwrap();
}

fn put_list(dir: &Path, list: &[u8]) {
    fs::write(dir.join("l.txt"), list).unwrap();
    put_policy(dir, &(POLICY.to_owned() + LIST_RULE));
}

/// A list one byte longer than lists may be; the disk holds none of it.
fn put_endless_list(dir: &Path) {
    let list = fs::File::create(dir.join("l.txt")).unwrap();
    list.set_len((256 << 20) + 1).unwrap();
    put_policy(dir, &(POLICY.to_owned() + LIST_RULE));
}

/// A pipe that nobody writes to: whoever opens it waits.
fn make_pipe(dir: &Path) {
    let made = std::process::Command::new("mkfifo").arg(dir.join("q.toml")).status().unwrap();
    assert!(made.success());
}

const BAD_POLICIES: [BadPolicyCase; 22] = [
    ("syntax", |dir| put_policy(dir, "name = \"p\"\n[[allow\n"), "unclosed", "p.toml:2:8"),
    (
        "a slip",
        |dir| put_policy(dir, &POLICY.replacen("hosts", "hsots", 1)),
        "unknown key `hsots`",
        "p.toml:5:1",
    ),
    ("empty", |dir| put_policy(dir, ""), "missing key `name`", "p.toml:1:1"),
    ("not UTF-8", |dir| fs::write(dir.join("p.toml"), b"\0\xff").unwrap(), "UTF-8", "p.toml:1:1"),
    ("half", |dir| put_policy(dir, &POLICY[..POLICY.len() - 9]), "p.toml", "p.toml:13:7"),
    ("a bad name", |dir| put_policy(dir, &POLICY.replace("db.e", "d_b.e")), "is not a host", "p.toml:8:10"),
    ("wide", |dir| put_policy(dir, &POLICY.replace("db.e", "*.com\", \"db.e")), "suffix", "p.toml:8:10"),
    ("huge", |dir| put_policy(dir, &"#".repeat((4 << 20) + 1)), "more than 4194304 bytes", "p.toml:1:1"),
    (
        "a test that fails",
        |dir| {
            put_policy(dir, &(POLICY.to_owned() + "[[test]]\nexpect = \"deny\"\nhost = \"open.example\"\n"))
        },
        "the test of",
        "p.toml:16:8",
    ),
    (
        "no list",
        |dir| put_policy(dir, &(POLICY.to_owned() + LIST_RULE)),
        "cannot read the list",
        "p.toml:17:14",
    ),
    ("a bad line", |dir| put_list(dir, b"a.example\n b*d.example\n"), "is not a host", "l.txt:2:2"),
    ("a wide line", |dir| put_list(dir, b"co.uk\n"), "public suffix", "l.txt:1:1"),
    ("a list not UTF-8", |dir| put_list(dir, b"\xff\n"), "it is not UTF-8", "p.toml:17:14"),
    ("a list too long", put_endless_list, "larger than 268435456 bytes", "p.toml:17:14"),
    (
        "a list elsewhere",
        |dir| put_policy(dir, &(POLICY.to_owned() + &LIST_RULE.replace("l.txt", "../l.txt"))),
        "in the policy's directory or below",
        "p.toml:17:14",
    ),
    ("two of a name", |dir| fs::write(dir.join("q.toml"), POLICY).unwrap(), "twice", "q.toml:2:8"),
    (
        "a loop",
        |dir| {
            fs::remove_file(dir.join("p.toml")).unwrap();
            symlink("p.toml", dir.join("p.toml")).unwrap();
        },
        "cannot read",
        "symbolic links",
    ),
    ("a directory", |dir| fs::create_dir(dir.join("q.toml")).unwrap(), "not a regular", "q.toml"),
    ("a pipe", make_pipe, "not a regular file", "q.toml"),
    ("none", |dir| fs::remove_file(dir.join("p.toml")).unwrap(), "holds no policy", "policies"),
    ("gone", |dir| fs::remove_dir_all(dir).unwrap(), "cannot read the directory", "policies"),
    (
        "no directory",
        |dir| {
            fs::remove_dir_all(dir).unwrap();
            fs::write(dir, "").unwrap();
        },
        "cannot read the directory",
        "policies",
    ),
];

#[test]
fn p9_a_bad_file_changes_nothing_and_says_where() {
    let scene = start_scene();
    let dir = scene.dir.path().join("policies");
    let looked_up = || {
        let args = ["+short", "+time=10", "+tries=2", "@10.77.0.1", "open.example", "A"];
        text(&scene.command_in(0, "dig").args(args).output().unwrap().stdout)
    };
    for (what, spoil, part, place) in BAD_POLICIES {
        spoil(&dir);
        let (code, said) = run_reload(&scene, &[]);
        assert_eq!(code, Some(1), "{what}: {said}");
        assert!(said.contains(part) && said.contains(place), "{what}: {said}");
        let told = read_status(&scene);
        assert_eq!(told["policy"]["policy_stale"], true, "{what}");
        assert!(told["policy"]["trouble"].as_str().unwrap().contains(place), "{what}: {told}");
        assert_eq!((&told["ready"], generation(&scene)), (&Value::Bool(true), 1), "{what}");
        assert!(scene.stderr().contains(part), "{what}: {}", scene.stderr());
        let got = scene.curl(&["https://open.example/"]);
        assert_eq!(got.status, 200, "{what}: the rules in force stay: {got:?}");
        assert_eq!(looked_up().trim(), "93.184.216.34", "{what}");
        restore_policies(&scene);
        assert_eq!(generation(&scene), 1, "{what}: nothing has changed after all");
    }
    let got = scene.curl(&["-x", "http://10.77.0.1:3128", "https://open.example/"]);
    assert_eq!((got.connect, got.status), (200, 200), "{got:?}");
    let (_, metrics) = scene.admin_request("GET", "/metrics").unwrap();
    let refused = metrics.lines().find(|line| line.starts_with("sandbar_reloads_total"));
    let refused = refused.filter(|line| line.contains("refused")).expect("a count of refusals");
    let count: usize = refused.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(count >= BAD_POLICIES.len(), "{refused}");
    assert!(metrics.contains("sandbar_policy_stale 0"), "{metrics}");
    scene.wait_for_record("the refusal of a load", |record| record.to_string().contains("policy_rejected"));
    write_policy(&scene, &POLICY.replace("open.example", "six.example"));
    wait_until("the good one is in force", || (generation(&scene) == 2).then_some(()));
    assert_ne!(scene.curl(&["https://open.example/"]).status, 200);
}

// proves: on_invalid
#[test]
fn p16_where_the_operator_wants_it_a_bad_file_closes_everything_until_it_is_mended() {
    let head = "on_invalid = \"deny\"".to_owned();
    let scene =
        ProxyScene::with_setup(ProxySetup { policy: POLICY.to_owned(), head, ..ProxySetup::default() });
    let mut open = connect_echo(&scene, "db.example");
    assert!(round_trip(&mut open, b"hello"));
    let asked = scene.names.queried_names().len();
    let arrived = scene.origin.requests().len();
    write_policy(&scene, "name = \"p\"\n[[allow\n");
    let read = open.read(&mut [0]);
    assert!(matches!(read, Ok(0) | Err(_)), "what was open is cut: {read:?}");
    let told = read_status(&scene);
    assert_eq!((&told["ready"], &told["policy"]["policy_stale"]), (&true.into(), &true.into()));
    assert_eq!((generation(&scene), &told["policy"]["closed"]), (2, &true.into()));
    for args in [
        &["https://open.example/"][..],
        &["http://open.example/"],
        &["-x", "http://10.77.0.1:3128", "https://open.example/"],
        &["-x", "http://10.77.0.1:3128", "http://open.example/"],
        &["-x", "socks5h://10.77.0.1:3128", "https://open.example/"],
    ] {
        let to = [args, &["--resolve", "open.example:443:93.184.216.34"]].concat();
        let to = [&to[..], &["--resolve", "open.example:80:93.184.216.34"]].concat();
        let got = scene.curl(&to);
        assert_ne!(got.status, 200, "{args:?}: {got:?}");
    }
    let args = ["+time=10", "+tries=1", "@10.77.0.1", "open.example", "A"];
    let said = text(&scene.command_in(0, "dig").args(args).output().unwrap().stdout);
    assert!(said.contains("SERVFAIL") && said.contains("policy_invalid"), "{said}");
    scene.wait_for_refusal("policy_invalid", "open.example");
    scene.wait_for_record("the cut", |record| {
        record["unmapped"]["sandbar"]["ending"] == "revoked"
            && record["status_detail"] == "policy_invalid"
            && record["traffic"]["bytes_out"] == 5
    });
    let asked_since = scene.names.queried_names().split_off(asked);
    assert_eq!((asked_since, scene.origin.requests().len()), (Vec::<String>::new(), arrived));
    let (_, explained) = run_explain(&scene, &["--live", "open.example"]);
    assert!(explained.contains("policy_invalid"), "{explained}");
    write_policy(&scene, POLICY); // the very text of before
    wait_until("everything is back", || (read_status(&scene)["policy"]["closed"] == false).then_some(()));
    assert_eq!(generation(&scene), 3);
    let got = scene.curl(&["https://open.example/"]);
    assert_eq!(got.status, 200, "{got:?}");
    assert!(round_trip(&mut connect_echo(&scene, "db.example"), b"hello"));
}

fn run_explain(scene: &ProxyScene, args: &[&str]) -> (Option<i32>, String) {
    let mut command = sandbar();
    let output = command.arg("explain").args(args).arg("-c").arg(scene.config_path()).output().unwrap();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn p3_what_runs_is_explained_even_where_the_files_say_something_else() {
    let scene = start_scene();
    for (target, code, part) in [
        ("https://open.example/x", 0, "allowed"),
        ("https://denied.example/", 1, "not_listed"),
        ("ht!tp", 1, "bad_name"),
    ] {
        let (live, said) = run_explain(&scene, &["--live", target]);
        assert_eq!((live, run_explain(&scene, &[target]).0), (Some(code), Some(code)), "{said}");
        assert!(said.contains(part), "{target}: {said}");
    }
    let digest = read_status(&scene)["policy"]["digest"].as_str().unwrap().to_owned();
    write_policy(&scene, &POLICY.replace("\"open.example\", ", "").replace("[[allow]]", "[[alow]]"));
    assert_eq!(run_reload(&scene, &[]).0, Some(1));
    let (code, said) = run_explain(&scene, &["https://open.example/"]);
    assert_eq!(code, Some(2), "the files are bad: {said}");
    let (code, said) = run_explain(&scene, &["--live", "https://open.example/"]);
    assert_eq!(code, Some(0), "and what runs allows it: {said}");
    assert!(said.contains("generation 1"), "{said}");
    let (_, said) = run_explain(&scene, &["--live", "--json", "https://denied.example/"]);
    let told: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&told["generation"], &told["digest"]), (&1.into(), &digest.into()));
    let (code, said) = run_explain(&scene, &["--live", "--sandbox", "nobody", "open.example"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("unknown sandbox `nobody`"), "{said}");
    let (code, said) = run_explain(&scene, &["--live", "--socket", "/nowhere", "open.example"]);
    assert_eq!(code, Some(2), "{said}");
}

#[test]
fn a_directory_that_takes_anothers_place_is_watched_in_its_stead() {
    let scene = start_scene();
    let dir = scene.dir.path().join("policies");
    for (round, host) in [(1, "six.example"), (2, "tolerant.example")] {
        let fresh = scene.dir.path().join("fresh");
        fs::create_dir(&fresh).unwrap();
        fs::write(fresh.join("p.toml"), POLICY.replace("open.example", host)).unwrap();
        fs::rename(&dir, scene.dir.path().join(format!("old{round}"))).unwrap();
        fs::rename(&fresh, &dir).unwrap();
        wait_until("the new directory is read", || (generation(&scene) == round * 2).then_some(()));
        write_policy(&scene, POLICY);
        wait_until("and what is written there", || (generation(&scene) == round * 2 + 1).then_some(()));
    }
    // What no event of these directories tells is seen by looking now and then.
    let far = scene.dir.path().join("a/b/c");
    fs::create_dir_all(&far).unwrap();
    fs::write(far.join("p.toml"), POLICY.replace("open.example", "six.example")).unwrap();
    symlink(far.join("p.toml"), scene.dir.path().join("link")).unwrap();
    fs::rename(scene.dir.path().join("link"), dir.join("p.toml")).unwrap();
    wait_until("the link is read", || (generation(&scene) == 6).then_some(()));
    fs::write(far.join("p.toml"), POLICY).unwrap();
    wait_until("what the link leads to is read", || (generation(&scene) == 7).then_some(()));
}

#[test]
fn p9_a_list_that_is_half_written_is_waited_for() {
    let policy = "name = \"p\"\n[[allow]]\nname = \"list\"\nhosts_file = \"l.txt\"\ntcp = [5432]\n";
    let mut scene = ProxyScene::prepare(ProxySetup { policy: policy.to_owned(), ..ProxySetup::default() });
    let path = scene.dir.path().join("policies/l.txt");
    let names = |version: &str| -> String {
        (0..1000).map(|at| format!("n{at}.{version}.example\n")).collect::<String>() + "db.example\n"
    };
    fs::write(&path, names("one")).unwrap();
    scene.start();
    let mut open = connect_echo(&scene, "db.example");
    assert!(round_trip(&mut open, b"hello"));
    let text = names("two");
    let (half, rest) = text.split_at(text.len() / 2);
    let mut file = fs::File::create(&path).unwrap();
    file.write_all(half.as_bytes()).unwrap();
    let mut command = sandbar();
    let mut asked = command.args(["reload", "-c"]).arg(scene.config_path()).spawn().unwrap();
    scene.signal("-HUP");
    std::thread::sleep(Duration::from_millis(300)); // so long it is half a list, and a good one
    file.write_all(rest.as_bytes()).unwrap();
    drop(file);
    assert!(asked.wait().unwrap().success());
    wait_until("the whole list is in force", || (generation(&scene) == 2).then_some(()));
    assert!(round_trip(&mut open, b"still here"), "its name is at the end of the list");
    let revoked = |record: &Value| record["unmapped"]["sandbar"]["ending"] == "revoked";
    assert!(!scene.records().iter().any(revoked));
}

#[test]
fn an_identity_given_during_a_load_is_not_lost() {
    const POOL: usize = 12;
    let pool: String = (0..POOL)
        .map(|at| format!("[[sandbox]]\nid = \"pool-{at}\"\npolicies = [\"p\"]\nmark = {}\n", at + 1))
        .collect();
    let scene = ProxyScene::with_setup(ProxySetup {
        policy: POLICY.to_owned(),
        identities: pool,
        ..ProxySetup::default()
    });
    let mut last = 1;
    for at in 0..POOL {
        write_policy(&scene, &POLICY.replace("open.example", &format!("n{at}.example")));
        let body = format!("{{\"sandbox\":\"pool-{at}\",\"tenant\":\"t\",\"environment\":\"e\"}}");
        let (code, said) = scene.admin_request_with("POST", "/identities", &body).unwrap();
        assert_eq!(code, 200, "{said}");
        let now = generation(&scene);
        assert!(now > last, "{now} came after {last}");
        last = now;
    }
    wait_until("the last file is read", || (generation(&scene) >= 2 + POOL as u64).then_some(()));
    for at in 0..POOL {
        let body = format!("{{\"sandbox\":\"pool-{at}\",\"tenant\":\"x\",\"environment\":\"e\"}}");
        let (code, said) = scene.admin_request_with("POST", "/identities", &body).unwrap();
        assert_eq!(code, 409, "pool-{at} has its identity: {said}");
    }
}

#[test]
fn p10_permission_ends_while_connections_drain_too() {
    let mut scene = start_scene();
    let (mut loser, mut neighbour) =
        (connect_echo(&scene, "db.example"), connect_echo(&scene, "tolerant.example"));
    assert!(round_trip(&mut loser, b"hello") && round_trip(&mut neighbour, b"hello"));
    scene.signal("-TERM");
    wait_until("it is not ready any more", || {
        let (_, told) = scene.admin_request("GET", "/ready")?;
        told.contains("\"self_test\":false").then_some(())
    });
    let written = Instant::now();
    write_policy(&scene, &POLICY.replace("db.example", "db2.example"));
    assert!(matches!(loser.read(&mut [0]), Ok(0) | Err(_)));
    println!("cut {:?} after the file was written, while draining", written.elapsed());
    assert!(round_trip(&mut neighbour, b"still here"));
    drop(neighbour);
    assert_eq!(scene.wait_for_exit(), Some(0), "{}", scene.stderr());
    let cut = scene.records().into_iter().find(|record| {
        record["unmapped"]["sandbar"]["ending"] == "revoked"
            && record["dst_endpoint"]["hostname"] == "db.example"
    });
    assert_eq!(cut.expect("a record of the cut")["status_detail"], "not_listed");
}

#[test]
fn p9_every_way_to_write_a_file_is_seen_and_a_storm_ends_in_its_last_content() {
    let scene = start_scene();
    let dir = scene.dir.path().join("policies");
    let with = |host: &str| POLICY.replace("open.example", host);
    let allows = |host: &str| scene.curl(&[&format!("https://{host}/")]).status == 200;
    fs::write(scene.dir.path().join("fresh"), with("other.example")).unwrap();
    fs::rename(scene.dir.path().join("fresh"), dir.join("p.toml")).unwrap();
    wait_until("a rename is seen", || (generation(&scene) == 2).then_some(()));
    assert!(!allows("open.example"));
    for at in 0..50 {
        write_policy(&scene, &with(&format!("n{at}.example")));
    }
    write_policy(&scene, POLICY);
    wait_until("the last of a storm is in force", || allows("open.example").then_some(()));
    // As Kubernetes swaps a ConfigMap: `..data` is renamed, the file itself is a link through it.
    for (version, host) in [("v1", "open.example"), ("v2", "other.example")] {
        fs::create_dir(dir.join(format!("..{version}"))).unwrap();
        fs::write(dir.join(format!("..{version}/p.toml")), with(host)).unwrap();
    }
    symlink("..v1", dir.join("..data")).unwrap();
    fs::remove_file(dir.join("p.toml")).unwrap();
    symlink("..data/p.toml", dir.join("p.toml")).unwrap();
    symlink("..v2", dir.join("..data_tmp")).unwrap();
    fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    wait_until("the swap is seen", || (!allows("open.example")).then_some(()));
    scene.signal("-HUP");
    assert_eq!(run_reload(&scene, &["--wait"]).0, Some(0));
}
