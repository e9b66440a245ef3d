//! Policies change while connections are open: whole or not at all (P9), and permission ends when it ends (P10).

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use integration::{sandbar, text};

use super::client::tcp;
use super::origin::ECHO;
use super::scene::{Scene, Setup, until};

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

fn scene() -> Scene {
    Scene::with(Setup { policy: POLICY.to_owned(), ..Setup::default() })
}

fn write(scene: &Scene, policy: &str) {
    fs::write(scene.dir.path().join("policies/p.toml"), policy).unwrap();
}

/// A connection to an echo by the address that stands for its name.
fn echo(scene: &Scene, name: &str) -> TcpStream {
    let args = ["+short", "+time=10", "+tries=2", "@10.77.0.1", name, "A"];
    let output = scene.inside(0, "dig").args(args).output().unwrap();
    let stands = text(&output.stdout).trim().to_owned();
    tcp(scene, 0, &format!("{stands}:{ECHO}"))
}

fn says(stream: &mut TcpStream, bytes: &[u8]) -> bool {
    let mut back = vec![0; bytes.len()];
    stream.write_all(bytes).is_ok() && stream.read_exact(&mut back).is_ok() && back == bytes
}

fn generation(scene: &Scene) -> u64 {
    status(scene)["policy"]["generation"].as_u64().unwrap()
}

fn status(scene: &Scene) -> Value {
    let (_, told) = scene.admin("GET", "/status").unwrap();
    serde_json::from_str(&told).unwrap()
}

fn reload(scene: &Scene, args: &[&str]) -> (Option<i32>, String) {
    let mut command = sandbar();
    let output = command.arg("reload").args(args).arg("-c").arg(scene.config()).output().unwrap();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn p10_what_lost_its_permission_is_cut_and_its_neighbour_is_not() {
    let scene = scene();
    let (mut loser, mut neighbour) = (echo(&scene, "db.example"), echo(&scene, "tolerant.example"));
    assert!(says(&mut loser, b"hello") && says(&mut neighbour, b"hello"));
    let written = Instant::now();
    write(&scene, &POLICY.replace("db.example", "db2.example"));
    let read = loser.read(&mut [0]);
    let took = written.elapsed();
    assert!(matches!(read, Ok(0) | Err(_)), "it was cut: {read:?}");
    println!("cut {took:?} after the file was written");
    assert!(took < Duration::from_secs(20), "{took:?}, on whatever machine");
    assert!(says(&mut neighbour, b"still here"), "and the neighbour was not");
    let record = scene.record("revoked", |record| {
        record["unmapped"]["sandbar"]["ending"] == "revoked"
            && record["dst_endpoint"]["hostname"] == "db.example"
    });
    assert_eq!(record["status_detail"], "not_listed");
    assert_eq!(record["traffic"]["bytes_out"], 5);
    assert!(generation(&scene) > 1);
}

#[test]
fn p10_a_silent_stream_of_http2_is_reset_and_its_connection_goes_on() {
    let scene = scene();
    let mut command = scene.inside(0, "curl");
    command.args(["-sS", "-N", "--http2", "--max-time", "60", "https://open.example/steps"]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let curl = command.spawn().unwrap();
    until("the request is open", || {
        let (_, told) = scene.admin("GET", "/connections")?;
        told.contains("/steps").then_some(())
    });
    write(&scene, &POLICY.replace("\"open.example\", ", ""));
    let output = curl.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("CANCEL"), "RST_STREAM is seen: {said}");
    let got = scene.curl(&["https://other.example/"]);
    assert_eq!(got.status, 200, "{got:?}");
}

#[test]
fn p9_a_bad_file_changes_nothing_and_says_where() {
    let scene = scene();
    let bad: [(&str, Vec<u8>, &str); 6] = [
        ("a slip", POLICY.replace("hosts", "hsots").into_bytes(), "`hsots` is not a key here"),
        ("empty", Vec::new(), "the key `name` is missing"),
        ("garbage", b"\x00\xff\xfe\x00".to_vec(), "not UTF-8"),
        ("cut off", POLICY.as_bytes()[..POLICY.len() - 4].to_vec(), "p.toml:"),
        ("a public suffix", POLICY.replace("open.example", "*.com").into_bytes(), "public suffix"),
        (
            "a test that fails",
            [POLICY.as_bytes(), b"[[test]]\nexpect = \"deny\"\nhost = \"open.example\"\n"].concat(),
            "the test of",
        ),
    ];
    for (what, bytes, part) in bad {
        fs::write(scene.dir.path().join("policies/p.toml"), bytes).unwrap();
        let (code, said) = reload(&scene, &[]);
        assert_eq!(code, Some(1), "{what}: {said}");
        assert!(said.contains(part) && said.contains("p.toml"), "{what}: {said}");
        let got = scene.curl(&["https://open.example/"]);
        assert_eq!(got.status, 200, "{what}: the rules in force stay");
        let status = status(&scene);
        assert_eq!(status["policy"]["policy_stale"], true, "{what}");
        assert_eq!(status["ready"], true, "{what}");
    }
    assert_eq!(generation(&scene), 1);
    scene.record("the refusal of a load", |record| record.to_string().contains("policy_rejected"));
    write(&scene, &POLICY.replace("open.example", "six.example"));
    until("the good one is in force", || (generation(&scene) == 2).then_some(()));
    assert_eq!(status(&scene)["policy"]["policy_stale"], false);
    let got = scene.curl(&["https://open.example/"]);
    assert_ne!(got.status, 200, "{got:?}");
}

#[test]
fn p9_every_way_to_write_a_file_is_seen_and_a_storm_ends_in_its_last_content() {
    let scene = scene();
    let dir = scene.dir.path().join("policies");
    let with = |host: &str| POLICY.replace("open.example", host);
    let allows = |host: &str| scene.curl(&[&format!("https://{host}/")]).status == 200;
    fs::write(scene.dir.path().join("fresh"), with("other.example")).unwrap();
    fs::rename(scene.dir.path().join("fresh"), dir.join("p.toml")).unwrap();
    until("a rename is seen", || (generation(&scene) == 2).then_some(()));
    assert!(!allows("open.example"));
    for at in 0..50 {
        write(&scene, &with(&format!("n{at}.example")));
    }
    write(&scene, POLICY);
    until("the last of a storm is in force", || allows("open.example").then_some(()));
    // As Kubernetes swaps a ConfigMap: `..data` is renamed, the file itself is a link through it.
    for (version, host) in [("v1", "open.example"), ("v2", "other.example")] {
        fs::create_dir(dir.join(format!("..{version}"))).unwrap();
        fs::write(dir.join(format!("..{version}/p.toml")), with(host)).unwrap();
    }
    std::os::unix::fs::symlink("..v1", dir.join("..data")).unwrap();
    fs::remove_file(dir.join("p.toml")).unwrap();
    std::os::unix::fs::symlink("..data/p.toml", dir.join("p.toml")).unwrap();
    std::os::unix::fs::symlink("..v2", dir.join("..data_tmp")).unwrap();
    fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    until("the swap is seen", || (!allows("open.example")).then_some(()));
    scene.signal("-HUP");
    assert_eq!(reload(&scene, &["--wait"]).0, Some(0));
}
