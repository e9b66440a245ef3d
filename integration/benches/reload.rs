//! How fast a written policy is in force, and what it costs meanwhile: loads of 10 to a million names, requests
//! beside them, and open connections that lose their permission. Figures of one run, not a test; but what must be
//! cut is cut, and what must stay stays, or it fails.
//!
//! `SANDBAR_BIN=target/release/sandbar cargo bench -p integration --bench reload`

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)] // a bench speaks, and fails where it cannot go on

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

const LIST_SIZES: [usize; 3] = [10, 10_000, 1_000_000];
const LOADS: usize = 5;
const OPEN_COUNTS: [usize; 3] = [100, 1000, 10_000];
/// Files that are not a connection's; each of those takes two, in the program and here.
const OTHER_FILES: usize = 200;
/// Between rewrites of the list while requests are sent.
const REWRITE_INTERVAL: Duration = Duration::from_millis(200);
const LOAD_DURATION: Duration = Duration::from_secs(10);
/// Between two requests of one client.
const REQUEST_INTERVAL: Duration = Duration::from_millis(2);
/// After which what was freed has been given back.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// Longest wait for anything.
const DEADLINE: Duration = Duration::from_secs(60);

fn main() {
    let room = (raise_file_limit() - OTHER_FILES) / 2;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for names in LIST_SIZES {
            bench_loads(names).await;
        }
        for open in OPEN_COUNTS {
            if open > room {
                println!("{open} do not fit under `ulimit -Hn`: {room} instead");
            }
            bench_cuts(open.min(room)).await;
        }
    });
}

/// Opens as many files as the kernel lets us and the program, which inherits it; how many that are.
fn raise_file_limit() -> usize {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, most, most).expect("the hard limit is allowed");
    usize::try_from(most).unwrap_or(usize::MAX)
}

/// The program with its files.
struct BenchInstance {
    child: Child,
    dir: TempDir,
    proxy: SocketAddr,
}

impl Drop for BenchInstance {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl BenchInstance {
    fn start(origin: u16, lists: &[(&str, String)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let proxy = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        fs::create_dir(dir.path().join("policies")).unwrap();
        for (name, text) in lists {
            fs::write(dir.path().join("policies").join(name), text).unwrap();
        }
        let operator = format!(
            r#"policies = "policies"
[log]
dir = "log"
[admin]
socket = "admin.sock"
[dns]
upstreams = ["127.0.0.1:9"]
pre_resolve = false
[[dns.host]]
name = "lose.example"
addresses = ["127.0.0.1"]
[[dns.host]]
name = "keep.example"
addresses = ["127.0.0.1"]
[limits]
connections_per_sandbox = 20000
[[listener]]
mode = "explicit"
bind = ["{proxy}"]
sandbox = "s"
[[sandbox]]
id = "s"
base = "system"
policies = ["p"]
"#
        );
        fs::write(dir.path().join("sandbar.toml"), operator).unwrap();
        let running = BenchInstance { child: start_sandbar(dir.path(), origin), dir, proxy };
        running.wait_until("it is ready", |told| told.contains("\"ready\":true"));
        running
    }

    fn admin_get(&self, path: &str) -> Option<String> {
        let mut socket = UnixStream::connect(self.dir.path().join("admin.sock")).ok()?;
        write!(socket, "GET {path} HTTP/1.1\r\nHost: s\r\nConnection: close\r\n\r\n").ok()?;
        let mut told = String::new();
        socket.read_to_string(&mut told).ok()?;
        Some(told.split_once("\r\n\r\n")?.1.to_owned())
    }

    fn wait_until(&self, what: &str, wanted: impl Fn(&str) -> bool) {
        let end = Instant::now() + DEADLINE;
        while !self.admin_get("/status").is_some_and(|told| wanted(&told)) {
            assert!(Instant::now() < end, "waited in vain until {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn generation(&self) -> u64 {
        let told: serde_json::Value = serde_json::from_str(&self.admin_get("/status").unwrap()).unwrap();
        told["policy"]["generation"].as_u64().unwrap()
    }

    /// Puts a file in place at once, and waits until it is in force; how long that took.
    fn replace_file(&self, name: &str, text: &str) -> Duration {
        let before = self.generation();
        let written = self.put_file(name, text);
        let fresh = format!("\"generation\":{}", before + 1);
        self.wait_until("the file is in force", |told| told.contains(&fresh));
        written.elapsed()
    }

    fn put_file(&self, name: &str, text: &str) -> Instant {
        let fresh = self.dir.path().join("policies/.fresh");
        fs::write(&fresh, text).unwrap();
        std::thread::sleep(Duration::from_millis(50)); // what the disk takes is not what is measured
        let written = Instant::now();
        fs::rename(&fresh, self.dir.path().join("policies").join(name)).unwrap();
        written
    }

    /// The time spent in loads so far, by its own account.
    fn reload_seconds(&self) -> f64 {
        let metrics = self.admin_get("/metrics").unwrap();
        let sum = metrics.lines().find_map(|line| line.strip_prefix("sandbar_reload_seconds_sum "));
        sum.and_then(|sum| sum.parse().ok()).unwrap_or_default()
    }

    /// A line of the process's own status, in MB.
    fn memory_mb(&self, line: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let found = status.lines().find_map(|text| text.strip_prefix(line)).unwrap();
        found.split_whitespace().next().unwrap().parse::<u64>().unwrap() / 1024
    }
}

fn start_sandbar(dir: &Path, origin: u16) -> Child {
    let policy = policy_text(origin, "\"lose.example\", \"keep.example\"");
    fs::write(dir.join("policies/p.toml"), policy).unwrap();
    let mut command = integration::sandbar();
    command.arg("serve").arg("-c").arg(dir.join("sandbar.toml")).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let said = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    std::thread::spawn(move || said.for_each(drop)); // read on, or it would block
    child
}

/// Two rules: one for what is open here, and one for the list.
fn policy_text(origin: u16, hosts: &str) -> String {
    format!(
        "name = \"p\"\n[[allow]]\nname = \"open\"\nhosts = [{hosts}]\ntcp = [{origin}]\n\
         resolves_to = [\"127.0.0.0/8\"]\n[[allow]]\nname = \"list\"\nhosts_file = \"list.txt\"\n"
    )
}

/// A name as lists have them, every eighth a wildcard.
fn host_list(names: usize, version: usize) -> String {
    let mut list = String::with_capacity(names * 40);
    for at in 0..names {
        let star = if at % 8 == 0 { "*." } else { "" };
        let team = at % 977;
        writeln!(list, "{star}host-{at:06}.team-{team}.v{version}.example").unwrap();
    }
    list
}

/// An echo for whoever comes.
async fn start_echo_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = [0; 64];
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    if stream.write_all(&buffer[..read]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// A connection through the proxy that has been heard at the other end.
async fn connect_through(proxy: SocketAddr, host: &str, origin: u16) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(proxy).await?;
    stream.set_nodelay(true)?;
    let asked = format!("CONNECT {host}:{origin} HTTP/1.1\r\nHost: {host}:{origin}\r\n\r\n");
    stream.write_all(asked.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    assert!(head.starts_with(b"HTTP/1.1 200"), "{host}: {}", String::from_utf8_lossy(&head));
    round_trip(&mut stream).await?;
    Ok(stream)
}

async fn round_trip(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"x").await?;
    stream.read_u8().await.map(drop)
}

/// Loads of lists of so many names, one after another, and what they cost requests.
async fn bench_loads(names: usize) {
    let origin = start_echo_server().await;
    let lists = [host_list(names, 1), host_list(names, 2)];
    let running = BenchInstance::start(origin, &[("list.txt", lists[0].clone())]);
    std::thread::sleep(SETTLE_TIME);
    let steady = running.memory_mb("VmRSS:");
    let mut took = Vec::new();
    for at in 0..LOADS {
        took.push(running.replace_file("list.txt", &lists[(at + 1) % 2]));
    }
    let inside = running.reload_seconds() / LOADS as f64;
    took.sort_unstable();
    let small = running.replace_file("q.toml", "name = \"q\"\n[[allow]]\nname = \"r\"\nhosts = []\n");
    std::thread::sleep(SETTLE_TIME);
    let (after, most) = (running.memory_mb("VmRSS:"), running.memory_mb("VmHWM:"));
    println!(
        "{names:>7} names: in force {:>4} ms after the write (median of {LOADS}, worst {} ms), {:.0} ms of it \
         reading, compiling and swapping; another policy in {} ms; resident {steady} MB, after loads \
         {after} MB, most {most} MB",
        took[LOADS / 2].as_millis(),
        took[LOADS - 1].as_millis(),
        inside * 1000.0,
        small.as_millis(),
    );
    let (quiet, _) = measure_requests(&running, origin, None).await;
    let (busy, loaded) = measure_requests(&running, origin, Some(&lists)).await;
    println!(
        "{names:>7} names: requests worst {:.1} ms, p99 {:.2} ms without loads; worst {:.1} ms, p99 {:.2} ms beside \
         {loaded} loads, one each {} ms ({} and {} requests, none failed)",
        worst_ms(&quiet),
        p99_ms(&quiet),
        worst_ms(&busy),
        p99_ms(&busy),
        REWRITE_INTERVAL.as_millis(),
        quiet.len(),
        busy.len(),
    );
}

fn worst_ms(times: &[Duration]) -> f64 {
    times.last().unwrap().as_secs_f64() * 1000.0
}

fn p99_ms(times: &[Duration]) -> f64 {
    times[times.len() * 99 / 100].as_secs_f64() * 1000.0
}

/// Connections opened and used at a steady pace, beside loads or not; their times, and how many loads there were.
async fn measure_requests(
    running: &BenchInstance,
    origin: u16,
    lists: Option<&[String; 2]>,
) -> (Vec<Duration>, u64) {
    let over = Arc::new(AtomicBool::new(false));
    let client = tokio::spawn({
        let (over, proxy) = (over.clone(), running.proxy);
        async move {
            let mut times = Vec::new();
            while !over.load(Ordering::Relaxed) {
                let started = Instant::now();
                connect_through(proxy, "keep.example", origin).await.unwrap();
                times.push(started.elapsed());
                tokio::time::sleep(REQUEST_INTERVAL).await;
            }
            times
        }
    });
    let before = running.generation();
    let end = Instant::now() + LOAD_DURATION;
    tokio::task::block_in_place(|| {
        for at in 0.. {
            let next = Instant::now() + REWRITE_INTERVAL;
            if let Some(lists) = lists {
                running.put_file("list.txt", &lists[at % 2]);
            }
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            if Instant::now() > end {
                break;
            }
        }
    });
    over.store(true, Ordering::Relaxed);
    let mut times = client.await.unwrap();
    times.sort_unstable();
    (times, running.generation() - before)
}

/// So many open connections, half of which lose their permission.
async fn bench_cuts(count: usize) {
    let origin = start_echo_server().await;
    let running = BenchInstance::start(origin, &[("list.txt", host_list(10, 1))]);
    let mut opening = JoinSet::new();
    let turns = Arc::new(tokio::sync::Semaphore::new(200));
    for at in 0..count {
        let host = if at % 2 == 0 { "lose.example" } else { "keep.example" };
        let (proxy, turns) = (running.proxy, turns.clone());
        opening.spawn(async move {
            let _turn = turns.acquire().await.unwrap();
            (at % 2 == 0, connect_through(proxy, host, origin).await.unwrap())
        });
    }
    let (losers, mut others): (Vec<_>, Vec<_>) =
        opening.join_all().await.into_iter().partition(|(loses, _)| *loses);
    let mut waiting = JoinSet::new();
    for (_, mut stream) in losers {
        waiting.spawn(async move {
            let read = tokio::time::timeout(DEADLINE, stream.read(&mut [0])).await;
            (matches!(read, Ok(Ok(0) | Err(_))), Instant::now())
        });
    }
    tokio::time::sleep(Duration::from_millis(200)).await; // all of them wait
    let fresh = policy_text(origin, "\"keep.example\"");
    let path = running.dir.path().join("policies/p.toml");
    let written = Instant::now();
    fs::write(path, fresh).unwrap();
    let ended = waiting.join_all().await;
    assert!(ended.iter().all(|(cut, _)| *cut), "all of them were cut");
    let mut took: Vec<Duration> = ended.iter().map(|(_, at)| *at - written).collect();
    took.sort_unstable();
    for (_, stream) in &mut others {
        round_trip(stream).await.expect("what stayed allowed goes on");
    }
    println!(
        "{count:>6} open, {} cut: the first {} ms, the median {} ms, the last {} ms after the write; the other {} \
         went on",
        took.len(),
        took[0].as_millis(),
        took[took.len() / 2].as_millis(),
        took[took.len() - 1].as_millis(),
        others.len(),
    );
}
