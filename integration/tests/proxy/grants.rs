//! Grants: a person opens a host for a while. It is recorded, ends by itself, and takes what is open by it along.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;

use integration::{sandbar, text};

use super::scene::{ProxyScene, ProxySetup, wait_until};

const POLICY: &str = r#"
name = "p"
[[allow]]
name  = "web"
hosts = ["open.example"]
ports = [80, 443]
[[deny]]
hosts = ["denied.example"]
"#;

fn start_scene() -> ProxyScene {
    ProxyScene::with_setup(ProxySetup { policy: POLICY.to_owned(), ..ProxySetup::default() })
}

/// A scene whose operator says more.
fn start_scene_with(more: &str) -> ProxyScene {
    let listeners = format!("{}\n{more}", super::scene::LISTENERS);
    ProxyScene::with_setup(ProxySetup { policy: POLICY.to_owned(), listeners, ..ProxySetup::default() })
}

fn run_sandbar(scene: &ProxyScene, args: &[&str]) -> (bool, String) {
    let mut command = sandbar();
    let output = command.args(args).arg("-c").arg(scene.config_path()).output().unwrap();
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

fn make_grant(scene: &ProxyScene, host: &str, time: &str, more: &[&str]) -> (bool, String) {
    let args = ["grant", "--sandbox", "box-0", "--host", host, "--for", time, "--why", "a test"];
    run_sandbar(scene, &[&args[..], more].concat())
}

fn lifecycle_record(scene: &ProxyScene, event: &str) -> Value {
    scene.wait_for_record(event, |record| record["unmapped"]["sandbar"]["event"] == event)
}

fn is_reachable(scene: &ProxyScene, host: &str) -> bool {
    scene.curl(&[&format!("https://{host}/")]).status == 200
}

/// A download that goes on until it is cut.
fn start_download(scene: &ProxyScene, host: &str) -> std::process::Child {
    let mut command: Command = scene.command_in(0, "curl");
    command.args(["-sS", "-N", "--max-time", "60", &format!("https://{host}/steps")]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the download runs", || {
        let (_, told) = scene.admin_request("GET", "/connections")?;
        told.contains(host).then_some(())
    });
    child
}

#[test]
fn p10_a_grant_opens_a_host_for_its_sandbox_alone_and_its_end_cuts_a_running_download() {
    let scene = ProxyScene::with_setup(ProxySetup {
        policy: POLICY.to_owned(),
        sandboxes: 2,
        ..ProxySetup::default()
    });
    assert!(!is_reachable(&scene, "other.example"));
    let (good, said) = make_grant(&scene, "other.example", "6s", &["--by", "alice"]);
    assert!(good && said.contains("granted: 1 box-0 may reach other.example"), "{said}");
    let made = lifecycle_record(&scene, "grant_made")["message"].as_str().unwrap().to_owned();
    assert!(made.contains("box-0 may reach other.example for 6 s; by alice (uid 0): a test"), "{made}");
    let (running, kept) = (start_download(&scene, "other.example"), start_download(&scene, "open.example"));
    let other = scene.curl_in(1, &["https://other.example/"]);
    assert_ne!(other.status, 200, "another sandbox has no part in it: {other:?}");
    let used = lifecycle_record(&scene, "grant_used");
    assert!(used["message"].as_str().unwrap().contains("used for the first time"));
    let decided = scene.wait_for_record("its use", |record| record["firewall_rule"]["name"] == "grant 1");
    assert_eq!(decided["unmapped"]["sandbar"]["stage"], "decision");
    let output = running.wait_with_output().unwrap();
    assert!(!output.status.success(), "the download is cut");
    let cut = scene.wait_for_record("the cut", |record| record["status_detail"] == "grant_ended");
    assert_eq!(cut["unmapped"]["sandbar"]["ending"], "revoked");
    lifecycle_record(&scene, "grant_ended");
    assert!(!is_reachable(&scene, "other.example"), "and it is over");
    scene.origin.release_step();
    scene.origin.release_step();
    let output = kept.wait_with_output().unwrap();
    assert!(output.status.success(), "its neighbour goes on: {}", text(&output.stderr));
    let (_, said) = run_sandbar(&scene, &["grants"]);
    assert!(said.contains("no grants in force"), "{said}");
}

#[test]
fn a_grant_is_as_narrow_as_it_says() {
    let scene = start_scene();
    let more = ["--method", "GET", "--path", "/v1/**", "--bytes", "20000"];
    let (good, said) = make_grant(&scene, "other.example", "5m", &more);
    assert!(good, "{said}");
    let status = |args: &[&str]| scene.curl(args).status;
    assert_eq!(status(&["https://other.example/v1/x"]), 200);
    assert_eq!(status(&["-X", "POST", "https://other.example/v1/x"]), 403);
    assert_eq!(status(&["https://other.example/v2/x"]), 403);
    let before = scene.origin.requests().len();
    let got = scene.curl(&["-d", "x=1", "-X", "GET", "https://other.example/v1/../v2"]);
    assert_ne!(got.status, 200, "{got:?}");
    assert_eq!(scene.origin.requests().len(), before);
    // Its bytes are for all of its life: they do not come back.
    let got = scene.curl(&["https://other.example/v1/bytes/50000"]);
    assert!(got.body.len() <= 20_000, "{}", got.body.len());
    let scene_says = run_sandbar(&scene, &["grants"]).1;
    assert!(scene_says.contains("at most 20000 bytes"), "{scene_says}");
}

#[test]
fn a_grant_outlives_a_restart_and_ends_while_nobody_runs() {
    let mut scene = start_scene();
    assert!(make_grant(&scene, "other.example", "1h", &[]).0);
    assert!(make_grant(&scene, "six.example", "2s", &[]).0);
    let made = Instant::now();
    scene.signal("-KILL");
    scene.wait_for_exit();
    scene.start();
    assert!(is_reachable(&scene, "other.example"), "it outlives a crash");
    scene.stop();
    wait_until("the other's time is over", || (made.elapsed().as_secs() >= 3).then_some(()));
    scene.start();
    assert!(!is_reachable(&scene, "six.example"));
    let ended = lifecycle_record(&scene, "grant_ended");
    assert!(ended["message"].as_str().unwrap().contains("six.example"), "{ended}");
    let (good, said) = run_sandbar(&scene, &["revoke", "1"]);
    assert!(good, "{said}");
    assert!(!is_reachable(&scene, "other.example"), "revoked is over at once");
    let (good, said) = run_sandbar(&scene, &["revoke", "1"]);
    assert!(!good && said.contains("no grant 1 is in force"), "{said}");
    assert!(make_grant(&scene, "other.example", "1h", &[]).1.contains("granted: 3 "), "no number twice");
}

#[test]
fn a_grant_that_is_forbidden_since_it_was_made_is_in_force_no_more() {
    let mut scene = start_scene();
    assert!(make_grant(&scene, "other.example", "1h", &[]).0);
    assert!(make_grant(&scene, "six.example", "1h", &[]).0);
    assert!(is_reachable(&scene, "other.example"));
    scene.stop();
    let text = fs::read_to_string(scene.config_path()).unwrap();
    let text = format!("{text}[grants]\nforbid_hosts = [\"other.example\"]\n");
    fs::write(scene.config_path(), text).unwrap();
    scene.start();
    assert!(!is_reachable(&scene, "other.example"));
    let before = scene.origin.requests().len();
    assert_ne!(scene.curl(&["https://other.example/secret"]).status, 200);
    assert_eq!(scene.origin.requests().len(), before, "nothing left");
    scene.wait_for_refusal("not_listed", "other.example");
}

#[test]
fn words_that_would_write_another_line_are_refused() {
    let scene = start_scene();
    for (option, value) in [("--why", "fine\nsandbar: revoked"), ("--by", "al\u{1b}[2Jice")] {
        let mut args = ["--sandbox", "box-0", "--host", "other.example", "--for", "5m"].to_vec();
        args.extend([option, value]);
        if option == "--by" {
            args.extend(["--why", "fine"]);
        }
        let (good, said) = run_sandbar(&scene, &[&["grant"], &args[..]].concat());
        assert!(!good && said.contains("one line without control characters"), "{option}: {said}");
    }
    assert!(!is_reachable(&scene, "other.example"));
}

// proves: grants.forbid_hosts, grants.forbid_bases, grants.most_seconds
#[test]
fn a_grant_that_must_not_be_is_refused_and_that_is_recorded() {
    let scene = start_scene_with(
        "[grants]\nforbid_hosts = [\"*.corp.example\", \"pastebin.example\"]\nmost_seconds = 3600\n",
    );
    for (host, time, more, part) in [
        ("db.corp.example", "5m", &[][..], "forbids grants for `*.corp.example`"),
        (".corp.example", "5m", &[], "forbids grants for"),
        ("pastebin.example:8443", "5m", &[], "forbids grants for `pastebin.example`"),
        ("other.example", "2h", &[], "a grant lasts at most 3600 s"),
        ("denied.example", "5m", &[], "the grant would have no effect: denied_by_rule"),
        ("*.com", "5m", &[], "public suffix"),
        ("https://other.example", "5m", &[], "invalid host"),
        ("other.example", "5m", &["--method", "g e t"], "method `g e t`"),
        ("other.example", "5m", &["--path", "v1"], "path `v1`"),
        ("10.0.0.1", "5m", &[], "invalid host"),
    ] {
        let (good, said) = make_grant(&scene, host, time, more);
        assert!(!good && said.contains(part), "{host} {time}: {said}");
    }
    let (good, said) = run_sandbar(
        &scene,
        &["grant", "--sandbox", "nobody", "--host", "x.example", "--for", "5m", "--why", "y"],
    );
    assert!(!good && said.contains("unknown sandbox `nobody`"), "{said}");
    let (good, said) = make_grant(&scene, "other.example", "5m", &["--why", "  "]);
    assert!(!good, "{said}");
    let refused = lifecycle_record(&scene, "grant_refused");
    assert!(refused["message"].as_str().unwrap().contains("db.corp.example"), "{refused}");
    assert_eq!(run_sandbar(&scene, &["grants"]).1.trim(), "no grants in force");
    assert!(!is_reachable(&scene, "other.example"));
    for (base, why) in [("untrusted", "base_forbids"), ("system", "`forbid_bases` of `[grants]`")] {
        let identities = format!(
            "[grants]\nforbid_bases = [\"system\"]\n[[sandbox]]\nid = \"box-0\"\nbase = \"{base}\"\n\
             policies = [\"p\"]\ninterface = \"sandbox0\"\n"
        );
        let listeners = super::scene::LISTENERS.split("[[listener]]\nmode = \"explicit\"\nbind = [\"unix");
        let listeners = listeners.take(1).collect();
        let setup = ProxySetup { policy: POLICY.to_owned(), identities, listeners, ..ProxySetup::default() };
        let (good, said) = make_grant(&ProxyScene::with_setup(setup), "other.example", "5m", &[]);
        assert!(!good && said.contains(why), "{base}: {said}");
    }
}

#[test]
fn what_was_refused_is_pending_and_can_be_approved() {
    let scene = start_scene();
    for _ in 0..3 {
        assert!(!is_reachable(&scene, "other.example"));
    }
    assert!(!is_reachable(&scene, "denied.example"), "which a grant could not lift");
    let proxied = ["-x", "http://10.77.0.1:3128", "http://six.example/"];
    assert_eq!(scene.curl(&proxied).status, 403);
    let told = |scene: &ProxyScene| -> Vec<Value> {
        let output = sandbar().args(["pending", "--json", "-c"]).arg(scene.config_path()).output().unwrap();
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        told["pending"].as_array().unwrap().clone()
    };
    // A port of the request's own is the one that is shown, and each spelling of a name is the same name.
    let url = "http://OTHER.example:8080/x";
    assert_eq!(scene.curl(&["-x", "http://10.77.0.1:3128", url]).status, 403);
    let own = told(&scene);
    assert_eq!((&own[0]["host"], &own[0]["port"]), (&"other.example".into(), &8080.into()));
    assert_eq!(scene.curl(&proxied).status, 403);
    let pending = told(&scene);
    assert_eq!(pending[0]["host"], "six.example", "the newest first: {pending:#?}");
    assert!(!pending.iter().any(|one| one["host"] == "denied.example"), "{pending:#?}");
    let is_other = |one: &&Value| one["host"] == "other.example" && one["port"] != 8080;
    let other = pending.iter().find(is_other).unwrap();
    assert!(other["count"].as_u64().unwrap() >= 3, "folded: {other}");
    let number = other["number"].to_string();
    let (good, said) = run_sandbar(&scene, &["pending", "approve", &number, "--for", "5m", "--why", "fine"]);
    assert!(good && said.contains("granted:"), "{said}");
    assert!(is_reachable(&scene, "other.example"));
    assert!(!told(&scene).iter().any(|one| one["number"] == other["number"]));
    let (good, said) = run_sandbar(&scene, &["pending", "approve", &number, "--for", "5m", "--why", "again"]);
    assert!(!good && said.contains("is pending"), "{said}");
}

#[test]
fn p16_a_clock_that_is_set_back_does_not_lengthen_a_grant() {
    let mut scene = start_scene();
    assert!(make_grant(&scene, "other.example", "3s", &[]).0);
    scene.signal("-KILL");
    scene.wait_for_exit();
    // As if the wall clock had been an hour ahead when the grant was made.
    let path = scene.log_dir().join("grants.json");
    let mut book: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for key in ["made", "until"] {
        let later = book["grants"][0][key].as_u64().unwrap() + 3_600_000;
        book["grants"][0][key] = later.into();
    }
    fs::write(&path, book.to_string()).unwrap();
    scene.start();
    wait_until("it ends by the time since boot", || (!is_reachable(&scene, "other.example")).then_some(()));
    // A boot that is not this one, and a wall clock before it was made: it cannot be known how long it has lasted.
    assert!(make_grant(&scene, "other.example", "1h", &[]).0);
    scene.signal("-KILL");
    scene.wait_for_exit();
    let mut book: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    book["grants"][0]["boot"] = "another".into();
    for key in ["made", "until"] {
        let later = book["grants"][0][key].as_u64().unwrap() + 3_600_000;
        book["grants"][0][key] = later.into();
    }
    fs::write(&path, book.to_string()).unwrap();
    scene.start();
    assert!(!is_reachable(&scene, "other.example"));
}
