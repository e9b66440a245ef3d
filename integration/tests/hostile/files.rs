//! Files that never answer (P16, P20): a named pipe in the place of a file, and a mount whose server is gone. No request
//! waits for them, nobody else notices, and the operator is told which file it is.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::Value;

use crate::credentials::CredentialScene;
use crate::instance::{InstanceSetup, SandbarInstance, wait_until};
use crate::origin::ScriptedOrigin;
use crate::wire::RawResponse;

/// How long an answer may take that waits for no file.
const PROMPT: Duration = Duration::from_secs(10);

/// A file system on a directory that answers nothing: FUSE whose server never says hello, so that every call waits, as
/// it does for an NFS server that is gone. Its calls fail when this is dropped.
struct DeadMount {
    path: PathBuf,
    server: Option<File>,
}

impl DeadMount {
    fn over(path: PathBuf) -> Self {
        let server = File::options().read(true).write(true).open("/dev/fuse").expect("/dev/fuse");
        let data = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        mount(Some("dead"), &path, Some("fuse"), MsFlags::empty(), Some(data.as_str())).expect("mount");
        DeadMount { path, server: Some(server) }
    }
}

impl Drop for DeadMount {
    fn drop(&mut self) {
        drop(self.server.take()); // ends every call that waits
        umount2(&self.path, MntFlags::MNT_DETACH).expect("umount");
    }
}

pub(crate) fn ask_admin(world: &SandbarInstance, method: &str, path: &str) -> String {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--max-time", "50", "-X", method, "--unix-socket"]);
    curl.arg(world.log_dir().join("admin.sock")).arg(format!("http://sandbar/{path}"));
    let told = String::from_utf8(curl.output().expect("curl").stdout).unwrap();
    assert!(!told.is_empty(), "{method} {path} is not answered");
    told
}

fn status(world: &SandbarInstance) -> Value {
    serde_json::from_str(&ask_admin(world, "GET", "status")).unwrap()
}

/// Everything an operator asks is answered, and names the file that hangs.
fn assert_reported(world: &SandbarInstance, path: &Path) {
    let shown = path.display().to_string();
    wait_until("the file is reported", || {
        let files = status(world)["hanging_files"].as_array().unwrap().clone();
        files.iter().any(|file| file["path"] == shown.as_str() && file["seconds"].as_u64() >= Some(2))
    });
    let ready: Value = serde_json::from_str(&ask_admin(world, "GET", "ready")).unwrap();
    assert_eq!(ready["ready"], true, "what it serves does not depend on the file: {ready}");
    assert!(ready["hanging_files"].to_string().contains(&shown), "{ready}");
    let metrics = ask_admin(world, "GET", "metrics");
    let hanging = metrics.lines().find_map(|line| line.strip_prefix("sandbar_hanging_files "));
    assert!(hanging.is_some_and(|count| count != "0"), "{metrics}");
    wait_until("it is logged", || world.stderr_text().contains("a file does not answer"));
}

/// A request in the clear, through the proxy.
fn get(world: &SandbarInstance, host: &str, origin: &ScriptedOrigin) -> RawResponse {
    let (mut wire, port) = (world.connect(), origin.port());
    wire.send(format!("GET http://{host}:{port}/ HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"));
    wire.read_response("GET").expect("an answer")
}

fn thread_count(world: &SandbarInstance) -> usize {
    fs::read_dir(format!("/proc/{}/task", world.pid())).unwrap().count()
}

#[test]
fn p16_a_pipe_in_the_place_of_a_credential_stops_nobody() {
    let scene = CredentialScene::new();
    assert_eq!(scene.send_post("").status, 200);
    let pipe = scene.credential_file().with_file_name("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    fs::rename(&pipe, scene.credential_file()).unwrap();
    let refused = |answer: &RawResponse| scene.world.record_says(answer, "it is not a regular file");
    scene.wait_for_answer("the pipe is seen", refused);
    let arrived = scene.bound.requests().len();
    for _ in 0..20 {
        let answer = scene.send_post("");
        scene.world.assert_refused("a pipe", &answer, 502, "credential_unavailable");
    }
    assert_eq!(scene.bound.requests().len(), arrived, "nothing left without it");
    assert_eq!(scene.send_request("b.test", &scene.other, "GET /", "").status, 200);
    assert_eq!(status(&scene.world)["ready"], true);
}

#[test]
fn p16_a_credential_on_a_dead_mount_stays_in_use_and_stops_nobody() {
    let scene = CredentialScene::new();
    assert_eq!(scene.send_post("").status, 200);
    let dead = DeadMount::over(scene.credential_file().parent().unwrap().to_owned());
    assert_reported(&scene.world, &scene.credential_file());
    let started = Instant::now();
    for _ in 0..20 {
        assert_eq!(scene.send_post("").status, 200, "the last value is used");
        assert_eq!(scene.send_request("b.test", &scene.other, "GET /", "").status, 200);
    }
    assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
    drop(dead);
    wait_until("it answers again", || scene.world.stderr_text().contains("a file answers again"));
    scene.wait_for_answer("it is read again", |answer| answer.status == 200);
}

#[test]
fn p16_a_list_on_a_dead_mount_keeps_the_rules_and_stops_nobody() {
    let origin = ScriptedOrigin::start_plain();
    let mut setup = InstanceSetup::with_hosts(&[("a.test", origin.port())]);
    setup.policy += "[[allow]]\nname = \"listed\"\nhosts_file = \"lists/hosts.txt\"\n";
    setup.list = Some("listed.test\n");
    let mut world = setup.start();
    let lists = world.policy_dir().join("lists");
    let list = lists.join("hosts.txt");
    let dead = DeadMount::over(lists.clone());
    let told = ask_admin(&world, "POST", "reload");
    assert!(told.contains("has not finished") && told.contains("has not answered for"), "{told}");
    assert_reported(&world, &list);
    let threads = thread_count(&world);
    for _ in 0..3 {
        let started = Instant::now();
        assert_eq!(get(&world, "a.test", &origin).status, 200, "the rules in force stay");
        assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
        assert!(ask_admin(&world, "POST", "reload").contains("has not finished"));
    }
    assert!(thread_count(&world) <= threads + 1, "threads pile up: {threads}, {}", thread_count(&world));
    drop(dead);
    wait_until("it loads again", || !ask_admin(&world, "POST", "reload").contains("trouble"));
    let dead = DeadMount::over(lists);
    assert!(ask_admin(&world, "POST", "reload").contains("has not finished"));
    assert!(world.stop(), "it stops although a file hangs");
    drop(dead);
}

#[test]
fn p16_account_files_on_a_dead_mount_refuse_what_needs_them_and_nothing_else() {
    let (counted, free) = (ScriptedOrigin::start_plain(), ScriptedOrigin::start_plain());
    let mut setup = InstanceSetup::with_hosts(&[("free.test", free.port())]);
    setup.policy += &format!(
        "[[allow]]\nname = \"counted\"\nhosts = [\"counted.test:{}\"]\nresolves_to = [\"127.0.0.0/8\"]\n\
         [allow.budget]\nrequests_per_hour = 10\n",
        counted.port()
    );
    setup.hosts.push("counted.test");
    let world = setup.start();
    assert_eq!(get(&world, "counted.test", &counted).status, 200);
    let dead = DeadMount::over(world.log_dir().join("budgets"));
    let started = Instant::now();
    for _ in 0..3 {
        let answer = get(&world, "counted.test", &counted);
        world.assert_refused("not stored", &answer, 403, "budget_unkept");
    }
    assert_eq!(counted.requests().len(), 1, "nothing left uncounted");
    assert_eq!(get(&world, "free.test", &free).status, 200);
    assert!(started.elapsed() < PROMPT * 3, "{:?}", started.elapsed());
    assert_reported(&world, &world.log_dir().join("budgets/one.json"));
    assert!(ask_admin(&world, "GET", "budgets").contains("requests_per_hour"));
    drop(dead);
    wait_until("it counts again", || get(&world, "counted.test", &counted).status == 200);
}

#[test]
fn p16_a_start_that_waits_for_a_dead_mount_says_so() {
    let origin = ScriptedOrigin::start_plain();
    let mut world = InstanceSetup::with_hosts(&[("a.test", origin.port())]).start();
    assert!(world.stop());
    let dead = DeadMount::over(world.policy_dir());
    let mut command = integration::sandbar();
    command.args(["serve", "-c"]).arg(world.config_path());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let said = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let shown = world.policy_dir().display().to_string();
    let told = said.into_iter().find(|line| line.contains("still starting") && line.contains(&shown));
    assert!(told.is_some(), "it ended without a word");
    child.kill().unwrap();
    child.wait().unwrap();
    drop(dead);
}
