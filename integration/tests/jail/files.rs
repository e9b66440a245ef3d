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
