//! Files that block whoever opens them: a FIFO here, a dead network mount elsewhere.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::attacker::take;
use crate::scene::{Scene, Setup};

/// Puts a FIFO that nobody writes to in the place of a file.
fn replace_by_fifo(path: &Path) {
    let fifo = path.with_extension("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status();
    assert!(made.is_ok_and(|status| status.success()), "`mkfifo` is needed");
    fs::rename(fifo, path).unwrap();
}

fn assert_admin_answers(scene: &Scene, when: &str) {
    scene.assert_ready(when);
    let status = scene.admin("GET", "/status");
    assert!(status.as_ref().is_some_and(|(code, _)| *code == 200), "{when}: /status is {status:?}");
}

#[test]
fn p20_a_credential_that_blocks() {
    let rules = "[[allow]]\nname = \"keyed\"\nhosts = [\"keyed.test:8002\"]\nresolves_to = [\"127.0.0.0/8\"]\n\
                 credential = \"key\"\n";
    let scene = Scene::with_setup(Setup {
        rules: rules.to_owned(),
        tables: "[[credential]]\nname = \"key\"\nfile = \"key\"\nhosts = [\"keyed.test:8002\"]\n".to_owned(),
        hosts: vec!["keyed.test".to_owned()],
        ..Setup::default()
    });
    let key = scene.dir.path().join("key");
    let request = || scene.run(scene.attacker.request("keyed.test:8002", "GET /hello"));
    assert_eq!(request().unwrap().0, 200, "with a credential that can be read");
    replace_by_fifo(&key);
    let held = scene.attack("32 requests that need a credential which blocks", async {
        let (held, _) =
            take(32, 32, |_| {
                let attacker = scene.attacker.clone();
                // In tasks of their own, as an answer may never come.
                async move {
                    Ok(tokio::spawn(async move { attacker.request("keyed.test:8002", "GET /hello").await }))
                }
            })
            .await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        held
    });
    assert_admin_answers(&scene, "while a credential blocks");
    drop(held);
}

#[test]
fn p20_a_list_and_a_policy_that_block() {
    let rules = "[[allow]]\nname = \"listed\"\nhosts_file = \"list.txt\"\n".to_owned();
    let scene = Scene::with_setup(Setup { rules, ..Setup::default() });
    let directory = scene.dir.path().join("policies");
    for file in ["list.txt", "p.toml"] {
        let kept = fs::read(directory.join(file)).unwrap();
        replace_by_fifo(&directory.join(file));
        scene.attack(&format!("{file} blocks, and eight reloads are asked for"), async {
            for _ in 0..8 {
                let asked = Command::new("kill").args(["-HUP", &scene.pid().to_string()]).status();
                assert!(asked.is_ok_and(|status| status.success()), "kill is needed");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        assert_admin_answers(&scene, "while a policy blocks");
        fs::remove_file(directory.join(file)).unwrap();
        fs::write(directory.join(file), kept).unwrap();
    }
}
