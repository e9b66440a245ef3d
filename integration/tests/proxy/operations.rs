//! What operators do to it and what happens to it: stops, kills, full disks, dead resolvers, hanging origins,
//! too many connections. It stays closed, recorded and explained (P7, P16, P17).

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::client::{self, connect_tcp};
use super::scene::{ProxyScene, ProxySetup, wait_until};

const PROXY_ADDRESS: &str = "10.77.0.1:3128";

#[test]
fn a_stop_lets_a_running_download_finish() {
    let mut scene = ProxyScene::new();
    for version in ["--http1.1", "--http2"] {
        let mut command = scene.command_in(0, "curl");
        command.args(["-sS", "-N", version, "--max-time", "60", "https://open.example/steps"]);
        let mut curl = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut answer = curl.stdout.take().unwrap();
        let mut first = [0; 14];
        answer.read_exact(&mut first).unwrap();
        scene.signal("-TERM");
        let connect = || TcpStream::connect(PROXY_ADDRESS);
        wait_until("nothing new is taken", || scene.net.sandboxes[0].enter(connect).err());
        scene.origin.release_step();
        scene.origin.release_step();
        let mut rest = String::new();
        answer.read_to_string(&mut rest).unwrap();
        assert!(curl.wait().unwrap().success(), "{version}");
        assert_eq!(rest, "data: step 1\n\ndata: step 2\n\n", "{version}");
        assert_eq!(scene.wait_for_exit(), Some(0), "{}", scene.stderr());
        scene.verify_log();
        let done = |record: &&Value| {
            record["http_request"]["url"]["path"] == "/steps"
                && record["unmapped"]["sandbar"]["ending"] == "completed"
        };
        assert_eq!(scene.records().iter().filter(done).count(), 1, "{version}");
        fs::remove_dir_all(scene.log_dir()).unwrap();
        scene.start();
    }
    let records = scene.stop();
    assert!(records.iter().any(|record| record["unmapped"]["sandbar"]["event"] == "stopped"));
}

/// Ticks of processor time the program has used.
fn cpu_ticks(scene: &ProxyScene) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", scene.pid())).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let fields: Vec<_> = fields.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn p16_without_descriptors_it_sheds_does_not_spin_and_recovers() {
    let prefix = ["prlimit", "--nofile=256:256"].map(str::to_owned).into();
    let limits = "first_bytes_seconds = 120".to_owned();
    let scene = ProxyScene::with_setup(ProxySetup { prefix, limits, ..ProxySetup::default() });
    let idle: Vec<_> = (0..300).map(|_| connect_tcp(&scene, 0, PROXY_ADDRESS)).collect();
    let told = "cannot accept a connection";
    wait_until("descriptors run out", || scene.stderr().contains(told).then_some(()));
    let before = cpu_ticks(&scene);
    std::thread::sleep(Duration::from_secs(2)); // the time over which it is measured
    let used = cpu_ticks(&scene) - before;
    assert!(used < 100, "{used} hundredths of a second of processor time in two seconds");
    drop(idle);
    wait_until("it serves again", || (scene.curl(&["http://open.example/"]).status == 200).then_some(()));
    let (_, metrics) = wait_until("it answers", || scene.admin_request("GET", "/metrics"));
    let shed = metrics.lines().find_map(|line| line.strip_prefix("sandbar_accepts_shed_total "));
    assert!(shed.is_some_and(|count| count != "0"), "{metrics}");
}

// proves: log.dir
#[test]
fn p7_after_a_kill_every_answered_request_has_its_record_and_the_log_verifies() {
    const ANSWERED: usize = 300;
    let mut scene = ProxyScene::new();
    let (answered, over) = (Mutex::new(BTreeSet::new()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (scene, answered, over) = (&scene, &answered, &over);
            scope.spawn(move || {
                for turn in 0.. {
                    if over.load(Ordering::SeqCst) {
                        return;
                    }
                    let path = format!("/{worker}-{turn}");
                    let connect = || TcpStream::connect("93.184.216.34:80");
                    let Ok(mut stream) = scene.net.sandboxes[0].enter(connect) else { continue };
                    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                    let request =
                        format!("GET {path} HTTP/1.1\r\nHost: open.example\r\nConnection: close\r\n\r\n");
                    let mut answer = String::new();
                    let sent = stream.write_all(request.as_bytes());
                    let read = sent.and_then(|()| stream.read_to_string(&mut answer));
                    if read.is_ok() && answer.starts_with("HTTP/1.1 200 ") && answer.contains("hello") {
                        answered.lock().unwrap().insert(path);
                    }
                }
            });
        }
        wait_until("enough is answered", || (answered.lock().unwrap().len() >= ANSWERED).then_some(()));
        scene.signal("-KILL");
        over.store(true, Ordering::SeqCst);
    });
    assert_eq!(scene.wait_for_exit(), None);
    let recorded: BTreeSet<_> = scene
        .records()
        .iter()
        .filter(|record| record["unmapped"]["sandbar"]["stage"] == "decision")
        .filter_map(|record| record["http_request"]["url"]["path"].as_str().map(str::to_owned))
        .collect();
    let arrived = scene.origin.requests();
    let arrived = arrived.iter().filter_map(|request| request.line.split(' ').nth(1));
    let unrecorded: Vec<_> = arrived.filter(|path| !recorded.contains(*path)).collect();
    assert_eq!(unrecorded, Vec::<&str>::new(), "arrived without a record");
    let lost: Vec<_> = answered.lock().unwrap().difference(&recorded).cloned().collect();
    assert_eq!(lost, Vec::<String>::new(), "answered without a record");
    scene.verify_log();
    scene.start();
    // The budget of look-ups begins empty after a kill, so that a crash is no way to a new one.
    wait_until("it serves again", || {
        let lie = ["--resolve", "open.example:80:1.2.3.4", "http://open.example/again"];
        (scene.curl(&lie).status == 200).then_some(())
    });
    scene.stop();
}

/// A program whose log has a megabyte, in a file system of its own at `log` that only the program sees.
pub(crate) fn small_log_setup(log: &Path) -> ProxySetup {
    fs::create_dir(log).unwrap();
    let mount = format!("mount -t tmpfs -o size=1m tmpfs {} && exec \"$@\"", log.display());
    let prefix = ["sh", "-c", &mount, "sh"].map(str::to_owned).into();
    ProxySetup { prefix, log: Some(log.to_owned()), ..ProxySetup::default() }
}

/// The log's directory as the program sees it, which has a file system of its own there.
fn log_dir_inside(scene: &ProxyScene) -> PathBuf {
    let log = scene.log_dir();
    PathBuf::from(format!("/proc/{}/root", scene.pid())).join(log.strip_prefix("/").unwrap())
}

/// Takes all the room that a small log has; the file that holds it.
pub(crate) fn fill_log(scene: &ProxyScene) -> PathBuf {
    let filler = log_dir_inside(scene).join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    while file.write_all(&[b'x'; 4096]).is_ok() {}
    while file.write_all(b"x").is_ok() {}
    filler
}

#[test]
fn p16_on_a_full_disk_nothing_leaves_until_there_is_room_again() {
    let outside = tempfile::tempdir().unwrap();
    let scene = ProxyScene::with_setup(small_log_setup(&outside.path().join("log")));
    assert_eq!(scene.curl(&["http://open.example/before"]).status, 200);

    let filler = fill_log(&scene);
    let mut served = 0;
    let full = wait_until("it refuses", || {
        let lie = "open.example:80:93.184.216.34"; // questions are not answered either
        let got = scene.curl(&["--resolve", lie, "http://open.example/full"]);
        served += usize::from(got.status == 200);
        (got.status != 200).then_some(got)
    });
    assert_eq!(full.status, 503, "{full:?}");
    assert!(full.text().contains("log_unwritable"), "{full:?}");
    let (arrived, requests) = (scene.net.arrivals(), scene.origin.requests().len());
    assert_eq!(requests, 1 + served, "what was served had its record: there was room in the last page");
    for _ in 0..10 {
        for (url, port) in [("http://other.example/full", 80), ("https://other.example/full", 443)] {
            let lie = format!("other.example:{port}:93.184.216.35"); // questions are not answered either
            let got = scene.curl(&["--resolve", &lie, url]);
            assert_eq!(got.status, 503, "{url}: {got:?}");
        }
    }
    let lie = "tunnel.example:443:93.184.216.36";
    let tunnel = scene.curl(&["--insecure", "--resolve", lie, "https://tunnel.example/"]);
    assert_eq!(tunnel.status, 0, "{tunnel:?}");
    assert_eq!(scene.net.arrivals(), arrived, "nothing left");
    assert_eq!(scene.origin.requests().len(), requests);
    assert_eq!(scene.admin_request("GET", "/ready").unwrap().0, 503);

    fs::remove_file(&filler).unwrap();
    wait_until("it serves again", || {
        (scene.curl(&["http://open.example/after"]).status == 200).then_some(())
    });
    wait_until("it is ready again", || {
        scene.admin_request("GET", "/ready").filter(|(status, _)| *status == 200).map(drop)
    });
    let copy = outside.path().join("copy");
    let status = Command::new("cp").arg("-r").arg(log_dir_inside(&scene)).arg(&copy).status().unwrap();
    assert!(status.success());
    let verified = integration::sandbar().args(["log", "verify"]).arg(&copy).output().unwrap();
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stdout));
}

#[test]
fn p16_with_the_resolver_gone_allowed_names_fail_in_time_and_denied_ones_are_refused_as_ever() {
    let scene = ProxyScene::new();
    scene.names.stop_answering();
    let started = Instant::now();
    let got = scene.curl(&["--resolve", "open.example:80:1.2.3.4", "http://open.example/"]);
    assert_eq!(got.status, 502, "{got:?}");
    assert!(got.text().contains("resolver_unreachable"), "{got:?}");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    scene.wait_for_refusal("resolver_unreachable", "open.example");
    let got = scene.curl(&["--resolve", "denied.example:80:1.2.3.4", "http://denied.example/"]);
    assert_eq!(got.status, 403, "{got:?}");
    assert!(!scene.names.queried_names().contains(&"denied.example".to_owned()));
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
}

// proves: limits.first_byte_seconds
#[test]
fn p17_an_origin_that_hangs_is_given_up_in_time() {
    let limits = "first_byte_seconds = 2\nidle_seconds = 2".to_owned();
    let scene = ProxyScene::with_setup(ProxySetup { limits, ..ProxySetup::default() });
    for args in [
        &["http://open.example/hang"][..],
        &["--http1.1", "https://open.example/hang"],
        &["--http2", "https://open.example/hang"],
        &["--http2", "-d", "a small body", "https://open.example/hang"],
    ] {
        let started = Instant::now();
        let got = scene.curl(args);
        assert_eq!(got.status, 504, "{args:?}: {got:?}");
        assert!(got.text().contains("upstream_timeout"), "{args:?}: {got:?}");
        assert!(started.elapsed() > Duration::from_secs(1), "{args:?}: too soon");
        assert!(started.elapsed() < Duration::from_secs(30), "{args:?}: {:?}", started.elapsed());
    }
    let late = |record: &&Value| record["status_detail"] == "upstream_timeout";
    assert_eq!(scene.records().iter().filter(late).count(), 4);
}

#[test]
fn an_origin_where_nobody_listens_is_told_as_such() {
    let mut scene = ProxyScene::prepare(ProxySetup {
        policy: "name = \"p\"\n[[allow]]\nname = \"x\"\nhosts = [\"open.example:7777\"]\n".to_owned(),
        ..ProxySetup::default()
    });
    scene.start();
    let got = scene.curl(&["http://open.example:7777/"]);
    assert_eq!(got.status, 502, "{got:?}");
    scene.wait_for_refusal("upstream_unreachable", "open.example");
}

// proves: admin.socket
#[test]
fn the_admin_socket_tells_how_it_stands() {
    let scene = ProxyScene::new();
    assert_eq!(scene.curl(&["http://open.example/"]).status, 200);
    assert_eq!(scene.curl(&["http://open.example:8080/"]).status, 403);
    let socket = scene.dir.path().join("admin.sock");
    let ask = |path: &str| {
        let mut command = Command::new("curl");
        command.args(["-sS", "-w", "\n%{http_code}", "--unix-socket"]).arg(&socket);
        let output = command.arg(format!("http://sandbar{path}")).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (body, status) = text.rsplit_once('\n').unwrap();
        (status.to_owned(), body.to_owned())
    };
    for path in ["/health", "/ready", "/status", "/metrics", "/connections"] {
        assert_eq!(ask(path).0, "200", "{path}");
    }
    assert_eq!(ask("/else").0, "404");
    let mut twice = Command::new("curl");
    twice.args(["-sSi", "-w", "%{num_connects}\n", "--unix-socket"]).arg(&socket);
    let twice = twice.args(["http://sandbar/health", "http://sandbar/else"]).output().unwrap();
    let twice = String::from_utf8(twice.stdout).unwrap();
    let wanted = ["HTTP/1.1 200 OK", "1", "HTTP/1.1 404 Not Found", "0"];
    let lines = twice.lines().filter(|line| line.len() == 1 || line.starts_with("HTTP/"));
    assert_eq!(lines.collect::<Vec<_>>(), wanted, "one connection carries both: {twice}");
    let status: Value = serde_json::from_str(&ask("/status").1).unwrap();
    assert_eq!(status["ready"], true);
    assert_eq!(status["policy"]["generation"], 1);
    assert_eq!(status["log"]["lost"], 0);
    assert_eq!(status["listeners"].as_array().map(Vec::len), Some(9));
    let metrics = ask("/metrics").1;
    for line in [
        "sandbar_decisions_total{reason=\"allowed\",how=\"forward\"} 1",
        "sandbar_decisions_total{reason=\"port_not_listed\",how=\"refused\"} 1",
        "sandbar_log_lost 0",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    let mode = fs::metadata(&socket).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o600);
}

#[test]
fn p20_one_sandbox_cannot_take_the_connections_of_another() {
    const MOST: usize = 8;
    let limits = format!("connections_per_sandbox = {MOST}\nfirst_bytes_seconds = 120");
    let scene = ProxyScene::with_setup(ProxySetup { sandboxes: 2, limits, ..ProxySetup::default() });
    let held: Vec<_> = (0..MOST).map(|_| connect_tcp(&scene, 0, PROXY_ADDRESS)).collect();
    let taken = |scene: &ProxyScene| {
        let (_, status) = scene.admin_request("GET", "/status")?;
        serde_json::from_str::<Value>(&status).ok()?["connections"].as_u64()
    };
    wait_until("all are taken", || taken(&scene).filter(|taken| *taken == MOST as u64));
    let mut over = connect_tcp(&scene, 0, PROXY_ADDRESS);
    let mut answer = Vec::new();
    drop(over.read_to_end(&mut answer));
    scene.wait_for_record("one too many", |record| {
        record["status_detail"] == "too_many_connections" && record["actor"]["app_uid"] == "box-0"
    });
    let other = ["-x", "http://10.77.1.1:3128", "http://open.example/"];
    assert_eq!(scene.curl_in(1, &other).status, 200, "the neighbour is served");
    drop(held);
    wait_until("they are given back", || taken(&scene).filter(|taken| *taken == 0));
    assert_eq!(scene.curl(&["http://open.example/"]).status, 200);
}

#[test]
fn p17_a_request_head_that_comes_drop_by_drop_is_not_waited_for() {
    let limits = "first_bytes_seconds = 2\nhead_seconds = 2".to_owned();
    let scene = ProxyScene::with_setup(ProxySetup { limits, ..ProxySetup::default() });
    let mut stream = connect_tcp(&scene, 0, "93.184.216.34:80");
    let started = Instant::now();
    for letter in "GET / HTTP/1.1\r\nHost: open.example\r\nX-Slow: ".bytes().chain(std::iter::repeat(b'x')) {
        if stream.write_all(&[letter]).is_err() || started.elapsed() > Duration::from_secs(40) {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(started.elapsed() < Duration::from_secs(40), "it was waited for");
    scene.wait_for_record("the slow one", |record| record["status_detail"] == "first_bytes_late");
    let mut quick = connect_tcp(&scene, 0, "93.184.216.34:80");
    client::send_text(&mut quick, "GET / HTTP/1.1\r\nHost: open.example\r\n\r\n");
    assert!(client::read_head(&mut quick).starts_with("HTTP/1.1 200 "));
}
