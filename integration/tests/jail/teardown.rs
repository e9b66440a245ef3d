//! Whoever is killed, nothing is left: no process, no namespace, no socket.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Child, Command, Stdio};

use super::scene::{JailScene, RunAs, wait_until};

/// Starts a jail in which processes run, one of them in a session of its own.
fn start_jail(scene: &JailScene) -> (Child, u32) {
    let script = "setsid sleep 98765 & sleep 98765 & echo up > ready; wait";
    let mut command = scene.run_command(&["-q"]);
    command.args(["sh", "-c", script]).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().unwrap();
    wait_until("the command runs", || scene.path("work/ready").exists().then_some(()));
    let keeper = wait_until("there is a keeper", || children_of(child.id()).first().copied());
    (child, keeper)
}

fn children_of(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).map(Iterator::flatten);
    let lists = tasks.map(|tasks| {
        tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok()).collect::<String>()
    });
    lists.unwrap_or_default().split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// A process and all below it.
fn process_tree(pid: u32) -> BTreeSet<u32> {
    let below = children_of(pid).into_iter().flat_map(process_tree);
    below.chain([pid]).collect()
}

/// The namespaces of a process, as the kernel numbers them.
fn namespaces(pid: u32) -> BTreeSet<String> {
    let links = fs::read_dir(format!("/proc/{pid}/ns")).unwrap().flatten();
    links.filter_map(|link| Some(fs::read_link(link.path()).ok()?.display().to_string())).collect()
}

fn kill_process(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

/// Whether any process of the machine is in one of these namespaces.
fn is_inhabited(wanted: &BTreeSet<String>) -> bool {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| fs::metadata(format!("/proc/{pid}/ns")).is_ok()).any(|pid| {
        let links = fs::read_dir(format!("/proc/{pid}/ns")).map(Iterator::flatten);
        links.is_ok_and(|mut links| {
            links.any(|link| {
                fs::read_link(link.path()).is_ok_and(|name| wanted.contains(&name.display().to_string()))
            })
        })
    })
}

#[test]
fn kill_9_of_either_side_leaves_nothing_behind() {
    for who in RunAs::BOTH {
        for victim in ["proxy", "keeper", "first"] {
            let scene = JailScene::new(who);
            let (mut proxy, keeper) = start_jail(&scene);
            let all = process_tree(proxy.id());
            assert!(all.len() >= 5, "{all:?}");
            let first = children_of(keeper)[0];
            let own: BTreeSet<_> = namespaces(first).difference(&namespaces(proxy.id())).cloned().collect();
            for kind in ["net:", "mnt:", "pid:", "ipc:", "user:"] {
                assert!(own.iter().any(|name| name.starts_with(kind)), "{kind} {own:?}");
            }
            kill_process(match victim {
                "proxy" => proxy.id(),
                "keeper" => keeper,
                _ => first,
            });
            let status = proxy.wait().unwrap();
            if victim != "proxy" {
                assert_eq!(status.code(), Some(137), "{victim}");
            }
            wait_until("every process is gone", || {
                all.iter().all(|pid| fs::metadata(format!("/proc/{pid}")).is_err()).then_some(())
            });
            wait_until("every namespace is gone", || (!is_inhabited(&own)).then_some(()));
            let socket = scene.run_dirs()[0].join("admin.sock");
            wait_until("the socket is gone", || (!socket.exists()).then_some(()));
            let left: Vec<_> = fs::read_dir(&scene.run_dirs()[0])
                .unwrap()
                .flatten()
                .map(|entry| entry.file_name())
                .collect();
            assert_eq!(left, ["log"], "{victim} {who:?}");
            scene.records(); // and the log verifies
        }
    }
}

#[test]
fn what_the_command_leaves_running_ends_with_it() {
    let scene = JailScene::new(RunAs::User);
    let ran = scene.run_shell(&["-q"], "setsid sh -c 'sleep 1; echo late > late' & exit 0");
    assert_eq!(ran.status.code(), Some(0), "{ran}");
    assert!(children_of(std::process::id()).iter().all(|pid| !is_late_process(*pid)));
    std::thread::sleep(std::time::Duration::from_millis(1500)); // longer than it would have waited
    assert!(!scene.path("work/late").exists());
}

fn is_late_process(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("late"))
}

#[test]
fn nobody_of_the_same_user_looks_into_the_processes_around_the_command() {
    let scene = JailScene::new(RunAs::User);
    let (mut proxy, keeper) = start_jail(&scene);
    let first = children_of(keeper)[0];
    for pid in [proxy.id(), keeper, first] {
        for file in ["environ", "maps", "mem"] {
            let read = scene.outside_command("head").args(["-c1", &format!("/proc/{pid}/{file}")]).output();
            assert!(!read.unwrap().status.success(), "{file} of {pid} is read");
        }
    }
    let own = children_of(first)[0];
    let read = scene.outside_command("head").args(["-c1", &format!("/proc/{own}/maps")]).output().unwrap();
    assert!(read.status.success(), "the command itself is the caller's: the check can fail");
    kill_process(proxy.id());
    proxy.wait().unwrap();
}
