//! `sandbar demo`: the story goes as promised for root and for an ordinary user, nothing leaves the machine and
//! nothing is left on it; where there can be no jail it says so.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::scene::{CommandResult, JailScene, RunAs, wait_until};

/// The steps, and the reasons and events that their records must tell.
const STEPS: &[(&str, &[&str])] = &[
    ("allowed", &["allowed"]),
    ("denied", &["not_listed", "method_not_allowed"]),
    ("fronting", &["names_disagree"]),
    ("raw-address", &["name_missing", "allowed"]),
    ("metadata", &["name_missing"]),
    ("rebinding", &["private_address"]),
    ("tunnel", &["dns_budget"]),
    ("mistake", &["policy_rejected"]),
    ("credential", &["allowed"]),
    ("memory", &["allowed", "identity_mismatch"]),
    ("cut", &["not_listed"]),
    ("grant", &["grant_made", "grant_ended", "grant_ended", "not_listed"]),
    ("log", &["checkpoint"]),
];

fn demo_command(scene: &JailScene, words: &[&str]) -> Command {
    let mut command = scene.outside_command(&scene.run_arguments()[0]);
    command.arg("demo").args(words).env("TMPDIR", scene.path("state"));
    command
}

/// Processes of this scene's program.
fn remaining_processes(scene: &JailScene) -> Vec<String> {
    let own = scene.run_arguments()[0].clone();
    let all = fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.starts_with(&own)).collect()
}

fn is_clean(scene: &JailScene) -> bool {
    fs::read_dir(scene.path("state")).unwrap().next().is_none() && remaining_processes(scene).is_empty()
}

#[test]
fn the_story_goes_as_promised() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let ran = CommandResult::run(demo_command(&scene, &["--json"]).stdin(Stdio::null()));
        assert_eq!(ran.status.code(), Some(0), "{who:?}: {ran}");
        let played: Vec<Value> = serde_json::from_str(&ran.out).unwrap();
        let names: Vec<&str> = played.iter().map(|step| step["step"].as_str().unwrap()).collect();
        assert_eq!(names, STEPS.iter().map(|(name, _)| *name).collect::<Vec<_>>(), "{who:?}");
        for (step, (name, codes)) in played.iter().zip(STEPS) {
            assert_eq!(step["good"], true, "{who:?} {name}: {step}");
            assert!(!step["tried"].as_array().unwrap().is_empty(), "{name}: {step}");
            assert!(!step["happened"].as_array().unwrap().is_empty(), "{name}: {step}");
            let records = step["records"].as_array().unwrap();
            let told: Vec<&str> = records
                .iter()
                .map(|record| record["reason"].as_str().or(record["event"].as_str()).unwrap())
                .collect();
            assert_eq!(told, *codes, "{who:?} {name}: {step}");
        }
        assert!(scene.net.arrivals().is_empty(), "it left: {:?}", scene.net.arrivals());
        assert!(is_clean(&scene), "{who:?}: {:?}", remaining_processes(&scene));
    }
}

#[test]
fn one_step_is_told_for_people_without_colours_and_kept_if_wished() {
    let scene = JailScene::new(RunAs::User);
    let ran =
        CommandResult::run(demo_command(&scene, &["--step", "fronting", "--keep"]).stdin(Stdio::null()));
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    for shown in ["tried", "happened", "record", "names_disagree", "1 step, all passed"] {
        assert!(ran.out.contains(shown), "{shown}: {ran}");
    }
    assert!(!ran.out.contains('\u{1b}'), "{ran}");
    let kept = ran.err.split_once("kept: ").expect("it says where").1.trim().to_owned();
    assert!(fs::metadata(format!("{kept}/sandbar.toml")).is_ok(), "{kept}");
    let list = CommandResult::run(demo_command(&scene, &["--list"]).stdin(Stdio::null()));
    for (name, _) in STEPS {
        assert!(list.out.lines().any(|line| line.starts_with(name)), "{name}: {list}");
    }
    let none = CommandResult::run(demo_command(&scene, &["--step", "nothing"]).stdin(Stdio::null()));
    assert_eq!(none.status.code(), Some(64), "{none}");
}

#[test]
fn whoever_has_seen_enough_leaves_nothing_behind() {
    let scene = JailScene::new(RunAs::User);
    let mut command = demo_command(&scene, &["--step", "grant"]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.unwrap();
    // The agents run once the log is there and the proxy is ready.
    wait_until("an agent runs", || {
        remaining_processes(&scene).iter().any(|line| line.contains("agent")).then_some(())
    });
    let told = Command::new("kill").arg(child.id().to_string()).status();
    assert!(told.unwrap().success());
    let ran = CommandResult::from_child(child);
    assert_eq!(ran.status.code(), Some(143), "{ran}");
    wait_until("everything is gone", || is_clean(&scene).then_some(()));
}

#[test]
fn p16_where_there_can_be_no_jail_it_says_what_run_says() {
    let scene = JailScene::new(RunAs::User);
    let program = scene.run_arguments()[0].clone();
    let state = scene.path("state").display().to_string();
    let forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec \"$@\"";
    let forbidden = |words: &[&str]| {
        let mut command = scene.outside_command("unshare");
        command.args(["--user", "--map-current-user", "--keep-caps", "sh", "-c", forbid, "sh"]);
        CommandResult::run(command.arg(&program).args(words).env("TMPDIR", &state).stdin(Stdio::null()))
    };
    let run = forbidden(&["run", "--state", &state, "--resolver", "127.0.0.1:9", "--", "true"]);
    assert_eq!(run.status.code(), Some(125), "{run}");
    assert!(run.err.contains("user.max_user_namespaces = 0 forbids it"), "{run}");
    let told = forbidden(&["demo"]);
    assert_eq!(told.status.code(), Some(1), "{told}");
    assert_eq!(told.err, run.err);
    let json = forbidden(&["demo", "--json"]);
    assert_eq!(json.status.code(), Some(1), "{json}");
    assert_eq!(serde_json::from_str::<Value>(&json.out).unwrap()["ok"], false);
}
