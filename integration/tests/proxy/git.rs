//! git over HTTPS with a key that is not in the sandbox (P11): a real `git`, a real `git http-backend`, and nginx
//! before it, which wants Basic authentication.

use std::fs;
use std::path::Path;
use std::process::Command;

use integration::is_installed;

use super::clients::{run_successfully, run_to_end};
use super::origin::noise_bytes;
use super::scene::{LISTENERS, ProxyScene, ProxySetup};
use super::site::{self, SiteServer, run_in_site, www_dir};

const KEY: &str = "ghs_0123456789abcdefghijklmnopqrstuvwxyz";

const POLICY: &str = r#"
name = "p"
[[allow]]
name       = "repositories of the team"
hosts      = ["files.example:8444"]
methods    = ["GET", "POST"]
paths      = ["/team/**"]
credential = "git"
"#;

const CREDENTIAL: &str = r#"
[[credential]]
name  = "git"
file  = "git.key"
form  = { basic = { user = "x-access-token" } }
hosts = ["files.example:8444"]
"#;

/// A repository behind nginx, and the servers.
struct GitScene {
    scene: ProxyScene,
    site: SiteServer,
    _backend: SiteServer,
}

impl GitScene {
    fn new() -> Self {
        let listeners = format!("{LISTENERS}{CREDENTIAL}");
        let setup = ProxySetup { policy: POLICY.to_owned(), listeners, ..ProxySetup::default() };
        let mut scene = ProxyScene::prepare(setup);
        fs::write(scene.dir.path().join("git.key"), KEY).unwrap();
        scene.start();
        let www = www_dir(&scene);
        run_in_site(
            &www,
            "git init -q -b main work; cd work; echo hello > file; git add file; git commit -qm one; cd ..\n\
             mkdir team other\n\
             for at in team other; do git clone -q --bare work $at/repo.git; done",
        );
        let backend = site::start_git_backend(&scene, &www);
        let site = site::start_nginx_with_password(&scene, "x-access-token", KEY);
        GitScene { scene, site, _backend: backend }
    }

    /// A `git` of the sandbox, which has no key and can ask nobody for one.
    fn git(&self, dir: &Path) -> Command {
        let mut git = self.scene.command_in(0, "git");
        git.current_dir(dir).env("HOME", dir).env("GIT_TERMINAL_PROMPT", "0");
        for identity in ["AUTHOR", "COMMITTER"] {
            git.env(format!("GIT_{identity}_NAME"), "a").env(format!("GIT_{identity}_EMAIL"), "a@b");
        }
        git
    }

    /// What the repository of the server has as its last commit.
    fn last_commit(&self) -> String {
        let mut git = Command::new("git");
        git.current_dir(www_dir(&self.scene).join("team/repo.git"));
        run_successfully(git.args(["log", "-1", "--format=%s", "main"])).trim().to_owned()
    }
}

#[test]
fn p11_git_clones_fetches_and_pushes_without_a_key() {
    if !is_installed("nginx") || !is_installed("git") {
        return;
    }
    let scene = GitScene::new();
    let dir = scene.scene.dir.path().to_owned();
    let url = "https://files.example:8444/team/repo.git";
    for copy in ["copy", "second"] {
        run_successfully(scene.git(&dir).args(["clone", "-q", url, copy]));
    }
    let (copy, second) = (dir.join("copy"), dir.join("second"));
    assert_eq!(fs::read_to_string(copy.join("file")).unwrap(), "hello\n");
    // Noise, so that nothing makes it smaller: in chunks, with its length, and in many small pieces.
    for (at, buffer) in ["1048576", "67108864", "65536"].into_iter().enumerate() {
        fs::write(copy.join("noise"), noise_bytes((6 << 20) + at)).unwrap();
        run_successfully(scene.git(&copy).args(["add", "noise"]));
        let message = format!("noise {at}");
        run_successfully(scene.git(&copy).args(["commit", "-qm", &message]));
        let post_buffer = format!("http.postBuffer={buffer}");
        run_successfully(scene.git(&copy).args(["-c", &post_buffer, "push", "-q", "origin", "main"]));
        assert_eq!(scene.last_commit(), message, "{buffer}");
        run_successfully(scene.git(&second).args(["pull", "-q", "--ff-only"]));
        let pulled = fs::read(second.join("noise")).unwrap();
        assert!(pulled == noise_bytes((6 << 20) + at), "{buffer}");
    }
    let log = scene.site.access_log();
    assert!(log.contains("x-access-token") && log.contains("git-receive-pack"), "{log}");
    assert!(!log.contains(" 401 "), "git was never asked for a key: {log}");
    let found = Command::new("grep").args(["-r", "-l", KEY]).args([&copy, &second]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "", "no file of the sandbox has the key");
}

#[test]
fn p11_the_key_of_git_goes_to_its_path_and_nobody_else_uses_the_host() {
    if !is_installed("nginx") || !is_installed("git") {
        return;
    }
    let scene = GitScene::new();
    let dir = scene.scene.dir.path().to_owned();
    let refused =
        run_to_end(scene.git(&dir).args(["clone", "-q", "https://files.example:8444/other/repo.git"]));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("403"), "{said}");
    let record =
        scene.scene.wait_for_record("the refusal", |record| record["status_detail"] == "path_not_allowed");
    assert!(record.to_string().contains("/other/repo.git/info/refs"), "{record}");
    assert_eq!(scene.site.access_log(), "", "nothing arrived");
    // A key of the sandbox's own, in the field and in the URL, is not what arrives.
    let own = "http.extraHeader=Authorization: Basic bWluZTptaW5lLW1pbmUtbWluZQ==";
    let url = "https://mine:mine-mine-mine@files.example:8444/team/repo.git";
    run_successfully(scene.git(&dir).args(["-c", own, "clone", "-q", url, "own"]));
    let log = scene.site.access_log();
    assert!(log.lines().all(|line| line.starts_with("x-access-token ")), "{log}");
}
