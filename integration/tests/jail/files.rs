//! What is seen and written inside.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::Stdio;

use super::scene::{Ran, Scene, Who, until};

#[test]
fn work_and_home_are_written_and_the_rest_is_not() {
    for who in Who::BOTH {
        let scene = Scene::new(who);
        let data = scene.write("data/file", "as it was\n");
        let into = |path: &str| format!("echo changed > {path}");
        let data = data.display().to_string();
        let dir = scene.at("data").display().to_string();
        let script = format!(
            "{} && {} && {} && ! {} 2>/dev/null && cat {data}",
            into("here"),
            into("$HOME/there"),
            into("/tmp/gone"),
            into(&data)
        );
        assert_eq!(scene.succeed(&["-q"], &script), "as it was\n");
        for (path, text) in
            [("work/here", "changed\n"), ("home/there", "changed\n"), ("data/file", "as it was\n")]
        {
            assert_eq!(fs::read_to_string(scene.at(path)).unwrap(), text, "{who:?} {path}");
        }
        assert!(!std::path::Path::new("/tmp/gone").exists());
        scene.succeed(&["-q", "--writable", &dir], &into(&data));
        assert_eq!(fs::read_to_string(scene.at("data/file")).unwrap(), "changed\n");
    }
}

#[test]
fn what_is_hidden_can_be_shown() {
    let scene = Scene::new(Who::User);
    scene.write("home/.config/gh/hosts.yml", "token\n");
    scene.give(&scene.at("home/.config"));
    let script = "cat ~/.config/gh/hosts.yml";
    assert_eq!(scene.shell(&["-q"], script).out, "");
    let path = scene.at("home/.config/gh").display().to_string();
    assert_eq!(scene.succeed(&["-q", "--visible", &path], script), "token\n");
    let ran = scene.shell(&["-q", "--visible", &path], "echo more >> ~/.config/gh/hosts.yml");
    assert!(!ran.status.success(), "it is shown, not given: {ran}");
}

#[test]
fn a_working_directory_in_tmp_is_seen_there() {
    for who in Who::BOTH {
        let scene = Scene::new(who);
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        scene.give(dir.path());
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = scene.run(&["-q"]);
        let ran = Ran::of(command.current_dir(dir.path()).args([
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
    let scene = Scene::new(Who::User);
    let policy =
        scene.write("work/own.toml", "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = []\n");
    let named = policy.display().to_string();
    let wide =
        "printf 'name = \"own\"\\n[[allow]]\\nname = \"web\"\\nhosts = [\"open.example\"]\\n'";
    let script = format!(
        "{wide} > own.toml; {wide} > new.toml; mv -f new.toml own.toml; mv own.toml old.toml; \
         for at in 1 2 3 4 5 6 7 8; do curl -sf https://open.example/ && exit 1; sleep 0.1; done; exit 0"
    );
    let ran = scene.shell(&["--policy", &named], &script);
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    assert!(ran.err.contains("read once"), "{ran}");
    assert!(scene.net.arrived().is_empty() && scene.names.asked().is_empty());
    assert!(fs::read_to_string(&policy).unwrap().contains("hosts = []"));
}

/// What the command does to have a policy that allows more; then it asks, again and again.
fn replaced(scene: &Scene, policy: &str, how: &str) -> Ran {
    let wide =
        "printf 'name = \"own\"\\n[[allow]]\\nname = \"web\"\\nhosts = [\"open.example\"]\\n'";
    let script = format!(
        "wide() {{ {wide} > \"$1\"; }}; cd ~; {how}\n\
         for at in 1 2 3 4 5 6 7 8; do curl -sf https://open.example/ && exit 1; sleep 0.1; done; exit 0"
    );
    let policy = scene.at(policy).display().to_string();
    scene.shell(&["--policy", &policy], &script)
}

#[test]
fn a_policy_is_not_replaced_by_what_leads_to_it() {
    let narrow = "name = \"own\"\n[[allow]]\nname = \"web\"\nhosts = []\n";
    for who in Who::BOTH {
        let scene = Scene::new(who);
        scene.write("home/.config/sandbar/own.toml", narrow);
        scene.write("home/real/own.toml", narrow);
        scene.give(&scene.at("home/.config"));
        std::os::unix::fs::symlink("real", scene.at("home/linked")).unwrap();
        scene.write("home/many/note", "");
        std::os::unix::fs::symlink("../real/own.toml", scene.at("home/many/own.toml")).unwrap();
        for (policy, how) in [
            (
                "home/.config/sandbar/own.toml",
                "mv .config old; mkdir -p .config/sandbar; wide .config/sandbar/own.toml",
            ),
            ("home/linked/own.toml", "rm linked; mkdir linked; wide linked/own.toml"),
            ("home/many", "wide real/own.toml; mv real old; mkdir real; wide real/own.toml"),
        ] {
            let ran = replaced(&scene, policy, how);
            assert_eq!(ran.status.code(), Some(0), "{who:?} {policy}: {ran}");
            assert!(scene.net.arrived().is_empty() && scene.names.asked().is_empty(), "{policy}");
        }
        assert!(scene.refused("not_listed", "open.example"));
    }
}

#[test]
fn what_is_hidden_is_hidden_wherever_it_is_mounted() {
    let scene = Scene::new(Who::User);
    scene.write("home/.ssh/id", "secret\n");
    fs::create_dir(scene.at("again")).unwrap();
    let uid = scene.who.uid().to_string();
    let again = scene.at("again").display().to_string();
    let home = scene.at("home").display().to_string();
    let mut command = scene.net.gateway.command("unshare");
    command.args(["-m", "sh", "-c", "mount --bind \"$0\" \"$1\" && shift && exec \"$@\""]);
    command.args([&home, &again]).args(["setpriv", "--reuid", &uid, "--regid", &uid]);
    command.args(["--clear-groups", "--"]).args(scene.words()).args(["-q", "--", "sh", "-c"]);
    command.arg(format!("ls -A {again}; cat {again}/.ssh/id"));
    let ran = Ran::of(command.env("HOME", &home).current_dir(scene.at("work")));
    assert!(ran.out.contains(".ssh"), "it is mounted there too: {ran}");
    assert!(!ran.out.contains("secret"), "{ran}");
}

#[test]
fn a_run_from_sandbars_own_directory_is_refused() {
    let scene = Scene::new(Who::User);
    let mut command = scene.run(&[]);
    let ran = Ran::of(command.current_dir(scene.at("state")).args(["touch", "x"]));
    assert_eq!(ran.status.code(), Some(125), "{ran}");
    assert!(!scene.at("state/x").exists() && ran.err.contains("elsewhere"), "{ran}");
}

const KNOCK: &str = "
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
    for who in Who::BOTH {
        let scene = Scene::new(who);
        let path = scene.at("work/agent.sock");
        let mut command = scene.run(&["-q"]);
        command.args(["/usr/bin/python3", "-c", KNOCK]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until("the jail stands", || {
            scene.runs().first()?.join("admin.sock").exists().then_some(())
        });
        let mut listening = Vec::new();
        for made in ["first", "second"] {
            drop(fs::remove_file(&path)); // there is none at first
            listening.push(scene.net.gateway.enter(|| UnixListener::bind(&path)).unwrap());
            fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
            scene.write(&format!("work/{made}"), "");
            let covered = scene.at(&format!("work/{made}-covered"));
            until("it is covered", || covered.exists().then_some(()));
        }
        let ran = Ran::from(child);
        assert_eq!(ran.status.code(), Some(0), "{who:?} {ran}");
    }
}
