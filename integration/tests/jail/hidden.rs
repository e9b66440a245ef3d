//! Credentials of the caller: files in the home directory and variables. None is to be seen inside.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::scene::{CommandResult, JailScene, RunAs, wait_until};

/// Prints every file at or below its arguments that has content.
const READ_SCRIPT: &str = "
import os, sys
def show(path):
    try:
        text = open(path, 'rb').read()
    except OSError:
        return
    if text.strip() not in (b'', b'{}'):
        print(path, text)
for path in sys.argv[1:]:
    show(path)
    for folder, _, names in os.walk(path):
        for name in names:
            show(os.path.join(folder, name))
";

/// The paths of the table, made in a home directory: files, or directories with a file in them.
fn make_credentials(scene: &JailScene, home: &str, as_dirs: bool) -> Vec<PathBuf> {
    let paths: Vec<PathBuf> =
        jail::HOME_CREDENTIALS.iter().map(|name| scene.path(home).join(name.replace('*', "some"))).collect();
    for path in &paths {
        let file = if as_dirs { path.join("inner") } else { path.clone() };
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "secret\n").unwrap();
    }
    let uid = scene.who.uid().to_string();
    let owned = std::process::Command::new("chown").args(["-R", &uid]).arg(scene.path(home)).status();
    assert!(owned.unwrap().success());
    paths
}

fn read_inside(scene: &JailScene, options: &[&str], cwd: &Path, paths: &[PathBuf]) -> CommandResult {
    let mut command = scene.run_command(&[&["-q"][..], options].concat());
    command.args(["/usr/bin/python3", "-c", READ_SCRIPT]).args(paths);
    CommandResult::run(command.current_dir(cwd))
}

#[test]
fn p11_no_credential_of_the_home_directory_is_readable() {
    for (who, as_dirs) in [(RunAs::User, false), (RunAs::User, true), (RunAs::Root, false)] {
        let scene = JailScene::new(who);
        let paths = make_credentials(&scene, "home", as_dirs);
        assert!(paths.len() >= 120);
        let home = scene.path("home");
        let shown = home.display().to_string();
        for (options, cwd) in [
            (&[][..], scene.path("work")),
            (&[], home.clone()),
            (&["--writable", &shown], scene.path("work")),
            (&["--visible", &shown], scene.path("work")),
        ] {
            let ran = read_inside(&scene, options, &cwd, &paths);
            assert_eq!((ran.status.code(), ran.out.as_str()), (Some(0), ""), "{who:?} {options:?} {ran}");
        }
        // It is there, and a walk finds it where nothing hides it.
        let outside = CommandResult::run(
            scene.outside_command("/usr/bin/python3").args(["-c", READ_SCRIPT]).args(&paths),
        );
        assert_eq!(outside.out.lines().count(), paths.len(), "{outside}");
    }
}

#[test]
fn p11_credentials_are_hidden_behind_links_and_where_variables_lead() {
    let scene = JailScene::new(RunAs::User);
    scene.write_file("home/dots/npmrc", "secret\n");
    scene.write_file("home/dots/aws/credentials", "secret\n");
    scene.write_file("moved/cargo/credentials.toml", "secret\n");
    scene.write_file("moved/xdg/gh/hosts.yml", "secret\n");
    scene.write_file("moved/kube", "secret\n");
    symlink("dots/npmrc", scene.path("home/.npmrc")).unwrap();
    symlink(scene.path("home/dots/aws"), scene.path("home/.aws")).unwrap();
    let paths = ["home/dots", "home/.npmrc", "home/.aws", "moved"].map(|name| scene.path(name));
    let mut command = scene.run_command(&["-q"]);
    command.env("CARGO_HOME", scene.path("moved/cargo")).env("XDG_CONFIG_HOME", scene.path("moved/xdg"));
    command.env("KUBECONFIG", scene.path("moved/kube"));
    let ran = CommandResult::run(command.args(["/usr/bin/python3", "-c", READ_SCRIPT]).args(&paths));
    assert_eq!((ran.status.code(), ran.out.as_str()), (Some(0), ""), "{ran}");
    // A link cannot be turned elsewhere, nor what it leads to be moved away.
    let ran =
        scene.run_shell(&["-q"], "rm ~/.npmrc; mv ~/dots ~/away; cat ~/.npmrc ~/away/npmrc ~/dots/npmrc");
    assert!(!ran.out.contains("secret"), "{ran}");
}

#[test]
fn one_credential_can_be_shown() {
    let scene = JailScene::new(RunAs::User);
    scene.write_file("home/.npmrc", "secret\n");
    scene.write_file("home/.netrc", "other\n");
    scene.write_file("home/.aws/config", "region\n");
    scene.write_file("home/.aws/credentials", "other\n");
    for (path, shown) in [(".npmrc", "secret\n"), (".aws/config", "region\n")] {
        let visible = scene.path("home").join(path).display().to_string();
        let script = "cat ~/.npmrc ~/.netrc ~/.aws/config ~/.aws/credentials 2>/dev/null; true";
        assert_eq!(scene.run_successfully(&["-q", "--visible", &visible], script), shown, "{path}");
    }
}

#[test]
fn a_run_in_a_hidden_directory_is_refused() {
    let scene = JailScene::new(RunAs::User);
    scene.write_file("home/.aws/credentials", "secret\n");
    let aws = scene.path("home/.aws");
    let mut command = scene.run_command(&["-q"]);
    let ran = CommandResult::run(command.args(["cat", "credentials"]).current_dir(&aws));
    assert_eq!((ran.status.code(), ran.out.as_str()), (Some(125), ""), "{ran}");
    assert!(ran.err.contains("is hidden inside"), "{ran}");
    let shown = aws.display().to_string();
    let mut command = scene.run_command(&["-q", "--writable", &shown]);
    let ran = CommandResult::run(command.args(["cat", "credentials"]).current_dir(&aws));
    assert_eq!((ran.status.code(), ran.out.as_str()), (Some(0), "secret\n"), "{ran}");
}

#[test]
fn programs_work_with_what_is_hidden() {
    let scene = JailScene::new(RunAs::User);
    make_credentials(&scene, "home", false);
    scene.write_file("home/.gitconfig", "[user]\nname = Ann\n");
    let script = "set -e; git config user.name; git init -q x; npm config get fund; \
        node -e 'JSON.parse(require(\"fs\").readFileSync(process.env.HOME + \"/.codex/auth.json\"))'; \
        echo more >> ~/.bash_history; cat ~/.bash_history; \
        npm config set fund=false; npm config get fund";
    let ran = scene.run_shell(&["-q"], script);
    assert_eq!((ran.status.code(), ran.out.as_str()), (Some(0), "Ann\ntrue\nmore\nfalse\n"), "{ran}");
    // What it wrote is gone with the jail.
    assert_eq!(fs::read_to_string(scene.path("home/.bash_history")).unwrap(), "secret\n");
}

#[test]
fn p11_a_credential_that_is_replaced_outside_is_hidden_again() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let path = scene.write_file("home/.claude/.credentials.json", "secret one");
        let script = "touch waiting; while ! test -e replaced; do sleep 0.02; done; \
             for at in $(seq 500); do grep -q secret ~/.claude/.credentials.json || exit 0; sleep 0.02; done; exit 1";
        let mut command = scene.run_command(&["-q"]);
        command.args(["sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        wait_until("the command runs", || scene.path("work/waiting").exists().then_some(()));
        let other = scene.write_file("home/new", "secret two");
        fs::rename(other, path).unwrap();
        scene.write_file("work/replaced", "");
        let ran = CommandResult::from_child(child);
        assert_eq!(ran.status.code(), Some(0), "{who:?} {ran}");
    }
}

#[test]
fn p11_variables_with_credentials_are_removed() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        let script = "env; tr '\\0' '\\n' < /proc/1/environ; tr '\\0' '\\n' < /proc/self/environ; true";
        let mut command = scene.run_command(&["-q", "--env", "NPM_TOKEN"]);
        for name in [
            "AWS_SECRET_ACCESS_KEY",
            "GITHUB_TOKEN",
            "MY_API_KEY",
            "NPM_TOKEN",
            "PGPASSWORD",
            "SOME_PASSWORD",
        ] {
            command.env(name, format!("secret of {name}"));
        }
        let ran = CommandResult::run(command.env("HARMLESS", "fine").args(["sh", "-c", script]));
        assert_eq!(ran.status.code(), Some(0), "{ran}");
        let secrets: Vec<&str> = ran.out.lines().filter(|line| line.contains("secret of")).collect();
        assert_eq!(secrets, ["NPM_TOKEN=secret of NPM_TOKEN"; 2], "{who:?} {ran}");
        assert!(ran.out.contains("HARMLESS=fine"), "{ran}");
    }
}

#[test]
fn a_mistyped_option_is_not_run_as_the_command() {
    let scene = JailScene::new(RunAs::User);
    let run = |words: &[&str]| {
        let typed = scene.run_arguments();
        let mut command = scene.outside_command(&typed[0]);
        CommandResult::run(command.args(&typed[1..]).args(words))
    };
    let ran = run(&["--wiht", "openai", "touch", "ran"]);
    assert_eq!(ran.status.code(), Some(64), "{ran}");
    assert!(ran.err.contains("--wiht") && ran.err.contains("'--with'"), "{ran}");
    assert!(!scene.path("work/ran").exists() && scene.run_dirs().is_empty());
    assert_eq!(run(&[]).status.code(), Some(64), "no command");
    // After the command, and after `--`, nothing is an option of ours.
    let ran = run(&["-q", "sh", "-c", "echo \"$@\"", "sh", "--allow", "-q"]);
    assert_eq!((ran.status.code(), ran.out.as_str()), (Some(0), "--allow -q\n"), "{ran}");
    let ran = run(&["-q", "--", "--wiht"]);
    assert_eq!(ran.status.code(), Some(127), "{ran}");
}
