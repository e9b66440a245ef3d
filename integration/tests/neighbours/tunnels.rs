//! Tunnels whose client does not read: memory of the kernel, which no process is charged for.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::attacker::take;
use crate::honest::connect_from;
use crate::scene::{B_NETWORK, PROXY, Scene};

/// A does it again and again: what was cut may still hold what the client never acknowledged.
const ROUNDS: usize = 3;
const TUNNELS: usize = 700;
/// Bytes that may wait in the gateway's sockets: a quarter of what its container has.
const WAITING: u64 = 128 << 20;
/// Bytes of B's download.
const DOWNLOAD: usize = 64 << 20;
/// What is left of B's throughput at least: a quarter, as attacker and origin share two cores with everybody.
const WORST_FACTOR: f64 = 4.0;

#[test]
fn p20_stalled_tunnels_take_tcp_memory() {
    let scene = Scene::new();
    let quiet = best_of_three();
    let mut waiting = 0;
    let (held, outcome) = scene.observe("3 x 700 stalled tunnels", async {
        let mut held = Vec::new();
        for _ in 0..ROUNDS {
            let taken = take(TUNNELS, 32, |_| {
                let attacker = scene.attacker.clone();
                async move { attacker.open_tunnel("raw.test:8006").await }
            });
            held.extend(taken.await.0);
            waiting = wait_until_stalled().await;
        }
        held
    });
    let busy = best_of_three();
    println!(
        "{} stalled tunnels: {} MiB wait in the gateway's sockets, B's tunnel {quiet:.0} -> {busy:.0} MB/s",
        held.len(),
        waiting >> 20
    );
    outcome.assert_unharmed();
    assert!(
        waiting <= WAITING,
        "{} MiB wait in the gateway's sockets, above {}",
        waiting >> 20,
        WAITING >> 20
    );
    assert!(busy * WORST_FACTOR >= quiet, "B's tunnel went from {quiet:.0} to {busy:.0} MB/s");
}

/// Waits until every buffer is full: until then the origin is as busy as it can be.
async fn wait_until_stalled() -> u64 {
    for _ in 0..20 {
        let before = bytes_waiting();
        tokio::time::sleep(Duration::from_millis(200)).await;
        if bytes_waiting() <= before + (1 << 20) {
            break;
        }
    }
    bytes_waiting()
}

/// Bytes in the kernel's queues of the gateway's sockets, those included that it has closed and the kernel still has.
fn bytes_waiting() -> u64 {
    const PROXY_PORT: &str = ":0C38";
    const ORIGIN_PORT: &str = ":1F46";
    let table = fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let own = table.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (local, remote) = (*words.get(1)?, *words.get(2)?);
        let (unsent, unread) = words.get(4)?.split_once(':')?;
        let gateway = local.ends_with(PROXY_PORT) || remote.ends_with(ORIGIN_PORT);
        let bytes = |text| u64::from_str_radix(text, 16).ok();
        gateway.then_some(bytes(unsent)? + bytes(unread)?)
    });
    own.sum()
}

/// Megabytes a second of B's tunnel, when the machine disturbed it least.
fn best_of_three() -> f64 {
    (0..3).map(|_| throughput()).fold(0.0, f64::max)
}

fn throughput() -> f64 {
    let mut stream: TcpStream = connect_from(B_NETWORK, PROXY.parse().unwrap()).unwrap();
    stream.write_all(b"CONNECT raw.test:8006 HTTP/1.1\r\nHost: raw.test:8006\r\n\r\n").unwrap();
    let mut buffer = vec![0; 256 << 10];
    let started = Instant::now();
    let mut left = DOWNLOAD;
    while left > 0 {
        let read = stream.read(&mut buffer).unwrap();
        assert!(read > 0, "the tunnel ended");
        left = left.saturating_sub(read);
    }
    DOWNLOAD as f64 / 1e6 / started.elapsed().as_secs_f64()
}
