//! What is seen and written inside.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::scene::{Ran, Scene, Who};

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

#[test]
fn a_run_from_sandbars_own_directory_is_refused() {
    let scene = Scene::new(Who::User);
    let mut command = scene.run(&[]);
    let ran = Ran::of(command.current_dir(scene.at("state")).args(["touch", "x"]));
    assert_eq!(ran.status.code(), Some(125), "{ran}");
    assert!(!scene.at("state/x").exists() && ran.err.contains("elsewhere"), "{ran}");
}
