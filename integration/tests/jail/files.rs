//! What is seen and written inside.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::Stdio;

use super::scene::{CommandResult, JailScene, RunAs, wait_until};

#[test]
fn work_and_home_are_written_and_the_rest_is_not() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let data = scene.write_file("data/file", "as it was\n");
        let into = |path: &str| format!("echo changed > {path}");
        let data = data.display().to_string();
        let dir = scene.path("data").display().to_string();
        let script = format!(
            "{} && {} && {} && ! {} 2>/dev/null && cat {data}",
            into("here"),
            into("$HOME/there"),
            into("/tmp/gone"),
            into(&data)
        );
        assert_eq!(scene.run_successfully(&["-q"], &script), "as it was\n");
        for (path, text) in
            [("work/here", "changed\n"), ("home/there", "changed\n"), ("data/file", "as it was\n")]
        {
            assert_eq!(fs::read_to_string(scene.path(path)).unwrap(), text, "{who:?} {path}");
        }
        assert!(!std::path::Path::new("/tmp/gone").exists());
        scene.run_successfully(&["-q", "--writable", &dir], &into(&data));
        assert_eq!(fs::read_to_string(scene.path("data/file")).unwrap(), "changed\n");
    }
}

#[test]
fn what_is_hidden_can_be_shown() {
    let scene = JailScene::new(RunAs::User);
    scene.write_file("home/.config/gh/hosts.yml", "token\n");
    scene.chown_to_caller(&scene.path("home/.config"));
    let script = "cat ~/.config/gh/hosts.yml";
    assert_eq!(scene.run_shell(&["-q"], script).out, "");
    let path = scene.path("home/.config/gh").display().to_string();
    assert_eq!(scene.run_successfully(&["-q", "--visible", &path], script), "token\n");
    let ran = scene.run_shell(&["-q", "--visible", &path], "echo more >> ~/.config/gh/hosts.yml");
    assert!(!ran.status.success(), "it is shown, not given: {ran}");
}

#[test]
fn a_working_directory_in_tmp_is_seen_there() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        scene.chown_to_caller(dir.path());
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = scene.run_command(&["-q"]);
        let ran = CommandResult::run(command.current_dir(dir.path()).args([
            "sh",
            "-c",
            "echo x > file; ls -A /tmp | wc -l; pwd",
        ]));
        assert_eq!(ran.out, format!("1\n{}\n", dir.path().display()), "{ran}");
        assert_eq!(fs::read_to_string(dir.path().join("file")).unwrap(), "x\n");
    }
}

#[test]
fn a_policy_beside_the_work_is_read_once_and_cannot_be_written() {
    let scene = JailScene::new(RunAs::User);
    let policy = scene.write_file("work/own.toml", "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = []\n");
    let named = policy.display().to_string();
    let wide = "printf 'name = \"own\"\\n[[allow]]\\nname = \"web\"\\nhosts = [\"open.example\"]\\n'";
    let script = format!(
        "{wide} > own.toml; {wide} > new.toml; mv -f new.toml own.toml; mv own.toml old.toml; \
         for at in 1 2 3 4 5 6 7 8; do curl -sf https://open.example/ && exit 1; sleep 0.1; done; exit 0"
    );
    let ran = scene.run_shell(&["--policy", &named], &script);
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    assert!(ran.err.contains("read once"), "{ran}");
    assert!(scene.net.arrivals().is_empty() && scene.names.queried_names().is_empty());
    assert!(fs::read_to_string(&policy).unwrap().contains("hosts = []"));
}

/// What the command does to have a policy that allows more; then it asks, again and again.
fn try_replace_policy(scene: &JailScene, policy: &str, how: &str) -> CommandResult {
    let wide = "printf 'name = \"own\"\\n[[allow]]\\nname = \"web\"\\nhosts = [\"open.example\"]\\n'";
    let script = format!(
        "wide() {{ {wide} > \"$1\"; }}; cd ~; {how}\n\
         for at in 1 2 3 4 5 6 7 8; do curl -sf https://open.example/ && exit 1; sleep 0.1; done; exit 0"
    );
    let policy = scene.path(policy).display().to_string();
    scene.run_shell(&["--policy", &policy], &script)
}

#[test]
fn a_policy_is_not_replaced_by_what_leads_to_it() {
    let narrow = "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = []\n";
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        scene.write_file("home/.config/sandbar/own.toml", narrow);
        scene.write_file("home/real/own.toml", narrow);
        scene.chown_to_caller(&scene.path("home/.config"));
        std::os::unix::fs::symlink("real", scene.path("home/linked")).unwrap();
        scene.write_file("home/many/note", "");
        std::os::unix::fs::symlink("../real/own.toml", scene.path("home/many/own.toml")).unwrap();
        for (policy, how) in [
            (
                "home/.config/sandbar/own.toml",
                "mv .config old; mkdir -p .config/sandbar; wide .config/sandbar/own.toml",
            ),
            ("home/linked/own.toml", "rm linked; mkdir linked; wide linked/own.toml"),
            ("home/many", "wide real/own.toml; mv real old; mkdir real; wide real/own.toml"),
        ] {
            let ran = try_replace_policy(&scene, policy, how);
            assert_eq!(ran.status.code(), Some(0), "{who:?} {policy}: {ran}");
            assert!(scene.net.arrivals().is_empty() && scene.names.queried_names().is_empty(), "{policy}");
        }
        assert!(scene.has_refusal("not_listed", "open.example"));
    }
}

#[test]
fn a_policy_with_another_hard_link_is_read_once() {
    let narrow = "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = []\n";
    let listed = "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts_file = \"hosts.txt\"\n";
    for (who, policy, text, linked, how) in [
        (RunAs::User, "home/pol/own.toml", narrow, "home/pol/own.toml", "wide other/backup"),
        (RunAs::Root, "home/pol/own.toml", narrow, "home/pol/own.toml", "wide other/backup"),
        (RunAs::User, "home/pol", narrow, "home/pol/own.toml", "wide other/backup"),
        (RunAs::User, "home/pol/own.toml", listed, "home/pol/hosts.txt", "echo open.example > other/backup"),
    ] {
        let scene = JailScene::new(who);
        scene.write_file("home/pol/own.toml", text);
        scene.write_file("home/pol/hosts.txt", "other.example\n");
        scene.write_file("home/other/note", "");
        fs::hard_link(scene.path(linked), scene.path("home/other/backup")).unwrap();
        let ran = try_replace_policy(&scene, policy, &format!("{how} || exit 2"));
        assert_eq!(ran.status.code(), Some(0), "{who:?} {policy} {linked}: {ran}");
        let now = fs::read_to_string(scene.path(linked)).unwrap();
        assert!(now.contains("open.example"), "the command has written it: {now}");
        let said = format!("{} has another hard link", scene.path(linked).display());
        assert!(ran.err.contains(&said), "{ran}");
        assert!(scene.net.arrivals().is_empty() && scene.names.queried_names().is_empty(), "{policy}");
        assert!(scene.has_refusal("not_listed", "open.example"));
    }
}

#[test]
fn a_policy_that_gets_another_hard_link_is_not_followed() {
    let scene = JailScene::new(RunAs::User);
    let rule = |hosts: &str| format!("name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = [{hosts}]\n");
    let path = scene.write_file("home/pol/own.toml", &rule(""));
    scene.write_file("home/other/note", "");
    let wide = rule("\\\"open.example\\\"").replace('"', "\\\"").replace("\\\\\"", "\\\"");
    let script = format!(
        "touch waiting; while ! test -e linked; do sleep 0.05; done; printf \"{}\" > ~/other/backup; \
         while ! test -e rejected; do curl -sf https://open.example/ && exit 1; sleep 0.1; done; \
         curl -sf https://open.example/ && exit 1; exit 0",
        wide.replace('\n', "\\n")
    );
    let named = path.display().to_string();
    let mut command = scene.run_command(&["--policy", &named, "--timeout", "80s"]);
    let child = command.args(["sh", "-c", &script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    wait_until("the command runs", || scene.path("work/waiting").exists().then_some(()));
    fs::hard_link(&path, scene.path("home/other/backup")).unwrap();
    scene.write_file("work/linked", "");
    // Once the proxy has read the file again and said what it thinks of it.
    let rejected = |record: &serde_json::Value| record["unmapped"]["sandbar"]["event"] == "policy_rejected";
    wait_until("the proxy has looked", || scene.records().iter().any(rejected).then_some(()));
    scene.write_file("work/rejected", "");
    let ran = CommandResult::from_child(child.unwrap());
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    assert!(fs::read_to_string(&path).unwrap().contains("open.example"), "the command has written it");
    assert!(ran.err.contains("has got another hard link"), "{ran}");
    assert!(scene.net.arrivals().is_empty() && scene.names.queried_names().is_empty());
}

#[test]
fn a_policy_directory_that_is_mounted_elsewhere_too_is_read_once() {
    let scene = JailScene::new(RunAs::User);
    let policy =
        scene.write_file("home/pol/own.toml", "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = []\n");
    fs::create_dir(scene.path("again")).unwrap();
    let uid = scene.who.uid().to_string();
    let [again, home, pol] = ["again", "home", "home/pol"].map(|name| scene.path(name).display().to_string());
    let mut command = scene.net.gateway.command("unshare");
    command.args(["-m", "sh", "-c", "mount --bind \"$0\" \"$1\" && shift && exec \"$@\""]);
    command.args([&pol, &again]).args(["setpriv", "--reuid", &uid, "--regid", &uid]);
    command.args(["--clear-groups", "--"]).args(scene.run_arguments());
    command.args(["--policy", &policy.display().to_string(), "--writable", &again, "--", "true"]);
    let ran = CommandResult::run(command.env("HOME", &home).current_dir(scene.path("work")));
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    assert!(ran.err.contains("read once"), "{ran}");
}

/// Runs a script with standard streams that are files, as a shell would.
fn run_redirected(scene: &JailScene, redirections: &str, script: &str) -> CommandResult {
    let mut command = scene.outside_command("sh");
    command.args(["-c", &format!("exec {redirections}; exec \"$@\""), "sh"]);
    CommandResult::run(command.args(scene.run_arguments()).args(["-q", "--", "sh", "-c", script]))
}

#[test]
fn a_file_given_as_standard_input_is_only_read() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let data = scene.write_file("data/in", "one\ntwo\nthree\n");
        let data = data.display().to_string();
        let spoil = "cat; for how in '>' '>>' '1<>'; do eval \"echo spoilt $how /proc/self/fd/0\"; done; \
                     chmod 777 /proc/self/fd/0; python3 -c 'import os; os.fchmod(0, 0o777)'; exit 0";
        let ran = run_redirected(&scene, &format!("<{data}"), spoil);
        assert_eq!((ran.status.code(), ran.out.as_str()), (Some(0), "one\ntwo\nthree\n"), "{who:?} {ran}");
        // Not readable again by its name: it has none any more.
        let ran =
            run_redirected(&scene, &format!("<{data}; mv {data} {data}.old; cp {data}.old {data}"), spoil);
        assert_eq!(ran.out, "one\ntwo\nthree\n", "{who:?} {ran}");
        let gone = scene.path("data/gone").display().to_string();
        let ran = run_redirected(&scene, &format!("7>{gone}; echo x >&7; exec <{gone}; rm {gone}"), spoil);
        assert_eq!(ran.out, "x\n", "{who:?} {ran}");
        for name in ["data/in", "data/in.old"] {
            let path = scene.path(name);
            assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\n", "{who:?} {name}");
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644, "{who:?} {name}");
        }
        // The offset is shared with whoever reads before and after, and the file can be sought in.
        let words = scene.run_arguments().join(" ");
        let script = format!(
            "{{ read first; {words} -q -- sh -c 'read next; echo \"<$next>\"'; cat; \
             {words} -q -- python3 -c 'import os; print(os.lseek(0, 0, 2))'; }} < {data}"
        );
        let ran = CommandResult::run(scene.outside_command("sh").args(["-c", &script]));
        assert_eq!(ran.out, "<two>\nthree\n14\n", "{who:?} {ran}");
    }
}

#[test]
fn a_file_given_as_standard_output_is_only_appended_to() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        fs::create_dir(scene.path("data")).unwrap();
        scene.chown_to_caller(&scene.path("data"));
        let log = scene.write_file("data/log", "before\n");
        let shown = log.display().to_string();
        let script = "for at in 1 2 3; do echo out $at; echo err $at >&2; done; \
                      : 2>/dev/null > /proc/self/fd/1; exit 3";
        let ran = run_redirected(&scene, &format!(">>{shown} 2>&1"), script);
        assert_eq!(ran.status.code(), Some(3), "{who:?} {ran}");
        let written = fs::read_to_string(&log).unwrap();
        let wanted = "before\nout 1\nerr 1\nout 2\nerr 2\nout 3\nerr 3\n";
        assert!(written.starts_with(wanted), "{who:?}: in order, nothing lost: {written}");
        // What it reads of its own output at most is what it has just written.
        let script = "timeout 1 head -c 6 /proc/self/fd/2 > stolen; exit 0";
        let ran = run_redirected(&scene, &format!(">>{shown} 2>&1"), script);
        assert_eq!(ran.status.code(), Some(0), "{who:?} {ran}");
        let stolen = fs::read_to_string(scene.path("work/stolen")).unwrap();
        assert!(!stolen.contains("before"), "{who:?}: {stolen}");
        // Everything is written by the time the run has ended.
        let big = scene.path("data/big").display().to_string();
        let ran = run_redirected(&scene, &format!(">{big}"), "head -c 3000000 /dev/zero");
        assert_eq!(ran.status.code(), Some(0), "{who:?} {ran}");
        assert_eq!(fs::metadata(&big).unwrap().len(), 3_000_000, "{who:?}");
        // What the command may write anyway is its own.
        let own = scene.path("work/own").display().to_string();
        let seek = "python3 -c 'import os; os.write(1, b\"aXc\"); os.lseek(1, 1, 0); os.write(1, b\"b\")'";
        assert_eq!(run_redirected(&scene, &format!(">{own}"), seek).status.code(), Some(0));
        assert_eq!(fs::read_to_string(&own).unwrap(), "abc");
    }
}

#[test]
fn a_directory_is_no_standard_stream() {
    let scene = JailScene::new(RunAs::User);
    let secret = scene.write_file("home/.ssh/id", "secret\n");
    let home = scene.path("home").display().to_string();
    let ran = run_redirected(&scene, &format!("<{home}"), "cat /proc/self/fd/0/.ssh/id");
    assert_eq!(ran.status.code(), Some(125), "{ran}");
    assert!(ran.out.is_empty() && ran.err.contains("cannot pass standard input on"), "{ran}");
    assert!(secret.exists());
}

#[test]
fn what_is_hidden_is_hidden_wherever_it_is_mounted() {
    let scene = JailScene::new(RunAs::User);
    scene.write_file("home/.ssh/id", "secret\n");
    fs::create_dir(scene.path("again")).unwrap();
    let uid = scene.who.uid().to_string();
    let again = scene.path("again").display().to_string();
    let home = scene.path("home").display().to_string();
    let mut command = scene.net.gateway.command("unshare");
    command.args(["-m", "sh", "-c", "mount --bind \"$0\" \"$1\" && shift && exec \"$@\""]);
    command.args([&home, &again]).args(["setpriv", "--reuid", &uid, "--regid", &uid]);
    command.args(["--clear-groups", "--"]).args(scene.run_arguments()).args(["-q", "--", "sh", "-c"]);
    command.arg(format!("ls -A {again}; cat {again}/.ssh/id"));
    let ran = CommandResult::run(command.env("HOME", &home).current_dir(scene.path("work")));
    assert!(ran.out.contains(".ssh"), "it is mounted there too: {ran}");
    assert!(!ran.out.contains("secret"), "{ran}");
}

#[test]
fn a_run_from_sandbars_own_directory_is_refused() {
    let scene = JailScene::new(RunAs::User);
    let mut command = scene.run_command(&[]);
    let ran = CommandResult::run(command.current_dir(scene.path("state")).args(["touch", "x"]));
    assert_eq!(ran.status.code(), Some(125), "{ran}");
    assert!(!scene.path("state/x").exists() && ran.err.contains("from another directory"), "{ran}");
}

const KNOCK_SCRIPT: &str = "
import os, socket, time
end = time.time() + 60
for made in ['first', 'second']:
    while not os.path.exists(made):
        time.sleep(0.01)
    while True:
        try:
            socket.socket(socket.AF_UNIX).connect('agent.sock')
        except ConnectionRefusedError:
            break
        if time.time() > end:
            raise SystemExit(made + ' is never covered')
        time.sleep(0.05)
    os.rename(made, made + '-covered')
";

#[test]
fn a_socket_that_is_made_later_is_covered_and_so_is_the_next_in_its_place() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let path = scene.path("work/agent.sock");
        let mut command = scene.run_command(&["-q"]);
        command.args(["/usr/bin/python3", "-c", KNOCK_SCRIPT]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("the jail stands", || scene.run_dirs().first()?.join("admin.sock").exists().then_some(()));
        let mut listening = Vec::new();
        for made in ["first", "second"] {
            drop(fs::remove_file(&path)); // there is none at first
            listening.push(scene.net.gateway.enter(|| UnixListener::bind(&path)).unwrap());
            fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
            scene.write_file(&format!("work/{made}"), "");
            let covered = scene.path(&format!("work/{made}-covered"));
            wait_until("it is covered", || covered.exists().then_some(()));
        }
        let ran = CommandResult::from_child(child);
        assert_eq!(ran.status.code(), Some(0), "{who:?} {ran}");
    }
}
