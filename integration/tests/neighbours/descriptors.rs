//! Descriptors of the process.

use std::fs;

use crate::attacker::{read_head, take, within};
use crate::scene::{Scene, Setup};

fn attack_with_silence(what: &str, nofile: &str) -> Scene {
    let prefix = ["prlimit", &format!("--nofile={nofile}")].map(str::to_owned).to_vec();
    let scene = Scene::with_setup(Setup { prefix, ..Setup::default() });
    let (held, failed) = scene.attack(
        what,
        take(1100, 32, |_| {
            let attacker = scene.attacker.clone();
            async move { attacker.connect().await }
        }),
    );
    println!("{} silent connections ({failed} not)", held.len());
    scene
}

#[test]
fn p20_silent_connections_take_descriptors() {
    let scene = attack_with_silence("1,100 silent connections, soft limit 1,024", "1024:20000");
    let limits = fs::read_to_string(format!("/proc/{}/limits", scene.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let soft: u64 = line.split_whitespace().nth(3).unwrap().parse().unwrap();
    assert!(soft > 1024, "the soft limit is not raised: {line}");
}

#[test]
fn p20_silent_connections_under_a_hard_limit() {
    attack_with_silence("1,100 silent connections, hard limit 1,024", "1024:1024");
}

/// A refused connection has a descriptor until the client has read why.
#[test]
fn p20_connections_beyond_the_limit_under_a_hard_limit() {
    let prefix = ["prlimit", "--nofile=1024:1024"].map(str::to_owned).to_vec();
    let limits = "connections_per_sandbox = 20\n".to_owned();
    let scene = Scene::with_setup(Setup { prefix, limits, ..Setup::default() });
    let (_, refused) = scene.attack(
        "1,500 connections at a time beyond a limit of 20, hard limit 1,024",
        take(20_000, 1500, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut stream = attacker.connect().await?;
                within(read_head(&mut stream)).await
            }
        }),
    );
    println!("{refused} refused or not begun");
}

/// Tunnels have four descriptors each: two sockets and a pipe.
#[test]
fn p20_tunnels_under_a_hard_limit() {
    let prefix = ["prlimit", "--nofile=1024:1024"].map(str::to_owned).to_vec();
    let scene = Scene::with_setup(Setup { prefix, ..Setup::default() });
    let (held, failed) = scene.attack(
        "600 tunnels, hard limit 1,024",
        take(600, 16, |_| {
            let attacker = scene.attacker.clone();
            async move { attacker.open_tunnel("raw.test:8006").await }
        }),
    );
    println!("{} tunnels ({failed} not)", held.len());
}
