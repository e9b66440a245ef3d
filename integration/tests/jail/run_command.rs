//! What a person at a terminal gets to see: answers, denials, the summary, exit statuses, the log.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::scene::{CommandResult, JailScene, RunAs, wait_until};

#[test]
fn p1_what_is_allowed_is_reached_and_nothing_else() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let ran = scene.run_shell(
            &["--allow", "open.example"],
            "curl -sSf https://open.example/fine && id -u && curl -sS https://denied.example/",
        );
        assert_eq!(ran.status.code(), Some(6), "{ran}"); // curl: the name is not known
        assert!(ran.out.contains(&format!("\n{}\n", who.uid())), "{ran}");
        assert!(scene.origin_saw("/fine"));
        assert_eq!(scene.net.arrivals().len(), 1, "{:?}", scene.net.arrivals());
        assert!(!scene.names.queried_names().iter().any(|name| name.contains("denied")));
        assert!(scene.has_refusal("not_listed", "denied.example"));
        let line = "denied denied.example (not_listed) - to allow it: --allow denied.example";
        assert_eq!(ran.err.matches(line).count(), 1, "one line, however often: {ran}");
        for shown in ["exit status 6", "open.example", "/log"] {
            assert!(ran.err.contains(shown), "{shown}: {ran}");
        }
        let ended = |record: &Value| record["unmapped"]["sandbar"]["event"] == "run_ended";
        let records = scene.records();
        let record = records.iter().find(|record| ended(record)).expect("the run is recorded");
        assert!(record["message"].as_str().unwrap().contains("exit status 6; 1 hosts"), "{record}");
    }
}

#[test]
fn p4_a_name_that_is_sent_by_other_ways_is_refused_and_recorded() {
    let scene = JailScene::new(RunAs::User);
    let script = "curl -sS -m 20 --resolve denied.example:443:93.184.216.99 https://denied.example/tls\n\
                  curl -sS -m 20 --resolve denied.example:80:93.184.216.99 http://denied.example/plain\n\
                  curl -sS -m 20 -6 --resolve 'denied.example:443:[2606:2800::99]' https://denied.example/six\n\
                  curl -sS -m 20 http://93.184.216.99/address\n\
                  curl -sS -m 20 http://169.254.169.254/latest/meta-data/\n\
                  curl -sS -m 20 -H 'Host: open.example' http://93.184.216.99/lie\n\
                  true";
    let ran = scene.run_shell(&["--allow", "open.example:80"], script);
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    let lines: Vec<_> = scene
        .origin
        .requests()
        .into_iter()
        .map(|request| (request.at.ip().to_string(), request.line))
        .collect();
    // The last names a host that is allowed: that very host is asked, not the address it was aimed at.
    assert!(lines.iter().all(|(at, line)| at == "93.184.216.34" && line.contains("/lie")), "{lines:?}");
    assert!(scene.has_refusal("not_listed", "denied.example"));
    assert!(scene.records().iter().any(|record| record["status_detail"] == "name_missing"));
    assert!(scene.net.arrivals().iter().all(|(_, address, _)| address.to_string() == "93.184.216.34"));
}

#[test]
fn p1_without_anything_allowed_nothing_passes() {
    let scene = JailScene::new(RunAs::User);
    let ran = scene.run_shell(&[], "curl -sS https://open.example/; getent hosts open.example; true");
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    assert!(scene.net.arrivals().is_empty() && scene.names.queried_names().is_empty(), "{ran}");
    assert!(scene.has_refusal("not_listed", "open.example"));
}

#[test]
fn p4_a_private_address_needs_a_policy_that_says_so() {
    let scene = JailScene::new(RunAs::User);
    scene.run_shell(&["--allow", "private.example:80"], "curl -sS http://private.example/one");
    assert!(!scene.origin_saw("/one"), "the name leads to a private address");
    let policy = "name = \"own\"\n[[allow]]\nname = \"near\"\nhosts = [\"private.example:80\"]\nresolves_to = [\"10.78.0.0/24\"]\n";
    let policy = scene.write_file("policies/own.toml", policy).display().to_string();
    scene.run_successfully(&["--policy", &policy], "curl -sSf http://private.example/two");
    assert!(scene.origin_saw("/two"));
}

#[test]
fn a_policy_is_followed_while_the_command_runs() {
    let scene = JailScene::new(RunAs::User);
    let rule = |hosts: &str| format!("name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = [{hosts}]\n");
    let path = scene.write_file("policies/own.toml", &rule(""));
    let named = path.display().to_string();
    let script = "curl -sf https://open.example/early; touch waiting\n\
                  while ! curl -sf https://open.example/later; do sleep 0.1; done";
    let mut command = scene.run_command(&["--policy", &named, "--timeout", "60s"]);
    let child = command.args(["sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    wait_until("the command runs", || scene.path("work/waiting").exists().then_some(()));
    fs::write(&path, rule("\"open.example\"")).unwrap();
    let ran = CommandResult::from_child(child.unwrap());
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    assert!(ran.err.contains(&format!("in an [[allow]] of {named}")), "{ran}");
    assert!(scene.origin_saw("/later") && !scene.origin_saw("/early"));
}

#[test]
fn the_exit_status_is_the_commands() {
    let scene = JailScene::new(RunAs::User);
    for (script, status) in [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -9 $$", 137)] {
        assert_eq!(scene.run_shell(&["-q"], script).status.code(), Some(status), "{script}");
    }
    for (program, status) in [("no-such-program", 127), ("/etc/passwd", 126)] {
        let ran = CommandResult::run(scene.run_command(&["-q"]).arg(program));
        assert_eq!(ran.status.code(), Some(status), "{ran}");
        assert!(ran.err.contains(program), "{ran}");
    }
    for options in [&["--sandbox", "no good"][..], &["--policy", "/no/such/policy"], &["--allow", "*"]] {
        let ran = scene.run_shell(options, "touch ran");
        assert_eq!(ran.status.code(), Some(125), "{ran}");
    }
    assert!(!scene.path("work/ran").exists(), "nothing runs under a policy that is not good");
}

#[test]
fn what_takes_too_long_is_ended() {
    let scene = JailScene::new(RunAs::User);
    let started = Instant::now();
    let ran = scene.run_shell(&["--timeout", "1s"], "trap 'echo told; exit 0' TERM; sleep 300 & wait");
    assert_eq!(ran.status.code(), Some(124), "{ran}");
    assert!(ran.out.contains("told"), "it is asked to end first: {ran}");
    let ran = scene.run_shell(&["--timeout", "1s"], "trap '' TERM; while :; do sleep 1; done");
    assert_eq!(ran.status.code(), Some(124), "{ran}");
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// Leaves the process group that it was put in for another.
const DESERTER_SCRIPT: &str = "
import os, time
other = os.fork()
if other == 0:
    time.sleep(300)
os.setpgid(other, other)
os.setpgid(0, other)
time.sleep(300)
";

#[test]
fn nobody_hides_from_the_end_of_its_time() {
    let scene = JailScene::new(RunAs::User);
    for (what, words) in [
        ("another group", ["/usr/bin/python3", "-c", DESERTER_SCRIPT]),
        ("stopped", ["sh", "-c", "kill -STOP $$"]),
        ("stopped and deaf", ["sh", "-c", "trap '' TERM; kill -STOP $$; while :; do sleep 1; done"]),
    ] {
        let started = Instant::now();
        // Without a terminal, as cron runs it.
        let words_before = [scene.run_arguments(), vec!["--timeout".into(), "1s".into(), "--".into()]];
        let mut command = scene.outside_command("setsid");
        let ran = CommandResult::run(command.arg("-w").args(words_before.concat()).args(words));
        assert_eq!(ran.status.code(), Some(124), "{what}: {ran}");
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
    }
}

#[test]
fn signals_are_passed_on() {
    let scene = JailScene::new(RunAs::User);
    let script =
        "trap 'echo hup' HUP; trap 'echo usr; exit 9' USR1; touch ready; while :; do sleep 0.05; done";
    let mut command = scene.run_command(&["-q"]);
    let child =
        command.args(["sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the command runs", || scene.path("work/ready").exists().then_some(()));
    // `ip netns exec` and `setpriv` have become the program: it is the child.
    for signal in ["-HUP", "-USR1"] {
        let pid = child.id().to_string();
        assert!(std::process::Command::new("kill").args([signal, &pid]).status().unwrap().success());
        std::thread::sleep(Duration::from_millis(200)); // two signals at once may come in any order
    }
    let ran = CommandResult::from_child(child);
    assert_eq!((ran.status.code(), ran.out.as_str()), (Some(9), "hup\nusr\n"), "{ran}");
}

#[test]
fn the_summary_is_for_machines_too() {
    let scene = JailScene::new(RunAs::User);
    let script =
        "curl -sSf https://open.example/bytes/50000 -o /dev/null; curl -s https://denied.example; exit 3";
    let ran = scene.run_shell(&["--json", "--allow", "open.example"], script);
    let last = ran.err.lines().last().unwrap_or_default();
    let summary: Value = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {ran}"));
    assert_eq!(summary["exit_status"], 3, "{summary}");
    assert_eq!(summary["reached"]["open.example"], 1, "{summary}");
    assert_eq!(summary["refused"][0]["destination"], "denied.example", "{summary}");
    assert!(summary["bytes_received"].as_u64().unwrap() >= 50_000, "{summary}");
    for figure in ["wall_seconds", "cpu_seconds", "peak_bytes"] {
        assert!(summary[figure].as_f64().unwrap() > 0.0, "{figure}: {summary}");
    }
    assert!(fs::metadata(summary["log"].as_str().unwrap()).unwrap().is_dir());
}

#[test]
fn servers_on_localhost_work_inside_and_are_not_seen_outside() {
    let scene = JailScene::new(RunAs::User);
    let script = "/usr/bin/python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &\n\
        /usr/bin/python3 -m http.server 8001 --bind ::1 >/dev/null 2>&1 &\n\
        for url in http://127.0.0.1:8000/ http://localhost:8000/ 'http://[::1]:8001/'; do\n\
          curl -sSf --retry 40 --retry-delay 0 --retry-all-errors --retry-max-time 40 -o /dev/null $url || exit 1\n\
        done; touch up; while [ -e up ]; do sleep 0.05; done";
    let mut command = scene.run_command(&["-q"]);
    let child =
        command.args(["sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the servers answer", || scene.path("work/up").exists().then_some(()));
    let outside = scene.net.gateway.enter(|| std::net::TcpStream::connect("127.0.0.1:8000").is_ok());
    fs::remove_file(scene.path("work/up")).unwrap();
    let ran = CommandResult::from_child(child);
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    assert!(!outside, "a server inside is no server outside");
}

#[test]
fn ten_jails_do_not_touch_each_other() {
    let scene = JailScene::new(RunAs::User);
    let script = "/usr/bin/python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &\n\
        curl -sSf --retry 40 --retry-delay 0 --retry-all-errors --retry-max-time 60 -o /dev/null http://127.0.0.1:8000/ || exit 1\n\
        curl -sSf -o /dev/null https://open.example/$SANDBAR_SANDBOX || exit 2; ls /tmp | wc -l; echo mine > /tmp/file";
    let start = |at: usize| {
        let name = format!("box-{at}");
        let mut command = scene.run_command(&["-q", "--allow", "open.example", "--sandbox", &name]);
        command.args(["sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..10).map(start).collect();
    for (at, child) in children.into_iter().enumerate() {
        let ran = CommandResult::from_child(child);
        assert_eq!((ran.status.code(), ran.out.trim()), (Some(0), "0"), "{at}: {ran}");
        assert!(scene.origin_saw(&format!("/box-{at} ")), "{at}");
    }
    assert_eq!(scene.run_dirs().len(), 10);
    let sandboxes: std::collections::BTreeSet<String> = scene
        .records()
        .iter()
        .filter_map(|record| Some(record.pointer("/src_endpoint/uid")?.as_str()?.to_owned()))
        .collect();
    assert_eq!(sandboxes.len(), 10, "{sandboxes:?}");
}

/// The program where no user namespace may be made: with the capabilities of root over it, or without any.
fn run_without_namespaces(scene: &JailScene, capabilities: &str) -> CommandResult {
    let words =
        [&scene.run_arguments()[..], &["-q", "--allow", "open.example", "--"].map(str::to_owned)].concat();
    let shell = "echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv $0 \"$@\"";
    let mut command = scene.outside_command("unshare");
    command.args(["-Ur", "sh", "-c", shell, capabilities]).args(words);
    let inside =
        "curl -sSf https://open.example/rooted; grep CapBnd /proc/self/status; ip link add x type dummy";
    CommandResult::run(command.args(["sh", "-c", inside]))
}

#[test]
fn p16_where_namespaces_are_forbidden_the_setting_is_named() {
    let scene = JailScene::new(RunAs::Root);
    let ran = run_without_namespaces(&scene, "--bounding-set=-all");
    assert_eq!(ran.status.code(), Some(125), "{ran}");
    for said in ["user.max_user_namespaces = 0 forbids it", "sudo sysctl -w user.max_user_namespaces="] {
        assert!(ran.err.contains(said), "{said}: {ran}");
    }
    assert!(scene.origin.requests().is_empty() && scene.run_dirs().is_empty(), "nothing is left of it");
}

#[test]
fn root_needs_no_user_namespace_and_gives_its_capabilities_up() {
    let scene = JailScene::new(RunAs::Root);
    let ran = run_without_namespaces(&scene, "--keep-groups");
    assert!(scene.origin_saw("/rooted"), "{ran}");
    assert!(ran.out.contains("CapBnd:\t0000000000000000"), "{ran}");
    assert_ne!(ran.status.code(), Some(0), "no link is made: {ran}");
}
