//! Tunnels whose client does not read: memory of the kernel, which no process is charged for.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use crate::attacker::take;
use crate::honest::connect_from;
use crate::scene::{B_NETWORK, PROXY, Scene};

const TUNNELS: usize = 1024;
/// TCP memory that a stalled tunnel may hold, at the gateway and with both ends of it in the same kernel.
const BYTES_EACH: u64 = 640 << 10;
/// Bytes of B's download.
const DOWNLOAD: usize = 64 << 20;
/// What is left of B's throughput at least: a quarter, as attacker and origin share two cores with everybody.
const WORST_FACTOR: f64 = 4.0;

#[test]
fn p20_stalled_tunnels_take_tcp_memory() {
    let scene = Scene::new();
    let quiet = best_of_three();
    let before = tcp_memory();
    let ((held, failed), outcome) = scene.observe(
        "1,024 stalled tunnels",
        take(TUNNELS, 32, |_| {
            let attacker = scene.attacker.clone();
            async move { attacker.open_tunnel("raw.test:8006").await }
        }),
    );
    let busy = best_of_three();
    let grown = tcp_memory().saturating_sub(before);
    println!(
        "{} stalled tunnels ({failed} refused): TCP memory +{} MiB, B's tunnel {quiet:.0} -> {busy:.0} MB/s",
        held.len(),
        grown >> 20
    );
    outcome.assert_unharmed();
    let bound = BYTES_EACH * TUNNELS as u64;
    assert!(grown <= bound, "stalled tunnels hold {} MiB of TCP memory, above {}", grown >> 20, bound >> 20);
    assert!(busy * WORST_FACTOR >= quiet, "B's tunnel went from {quiet:.0} to {busy:.0} MB/s");
}

/// TCP memory of the machine, in bytes.
fn tcp_memory() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/sockstat").unwrap();
    let line = text.lines().find(|line| line.starts_with("TCP:")).unwrap();
    let pages = line.split_whitespace().skip_while(|word| *word != "mem").nth(1).unwrap();
    pages.parse::<u64>().unwrap() * 4096
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
