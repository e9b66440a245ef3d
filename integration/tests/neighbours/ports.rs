//! Connections that A makes the gateway dial, and the source ports they take from everybody.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::attacker::{HeldStreams, join_all, take, within};
use crate::honest::Kind;
use crate::scene::{Scene, Setup};

/// 2,000 ports towards one address, so few that a test can take them.
const PORTS: (&str, &str) = ("net.ipv4.ip_local_port_range", "40000 41999");

/// Codes that say whose fault a want of ports is.
const HONEST_CODES: [&str; 4] = ["out_of_ports", "quota_exhausted", "too_many_connections", "allowed"];

/// Hanging requests on HTTP/2 connections of A's; how often each reason was given.
async fn hang(scene: &Scene, connections: usize) -> (Vec<HeldStreams>, BTreeMap<String, usize>) {
    let (mut held, _) = take(connections, 4, |_| {
        let attacker = scene.attacker.clone();
        async move {
            let mut streams = attacker.open_http2("origin.test:8002").await?;
            for _ in 0..100 {
                if streams.start("GET", "/hang").await.is_err() {
                    break;
                }
            }
            Ok(streams)
        }
    })
    .await;
    let mut reasons = BTreeMap::new();
    let heads = held.iter_mut().map(|streams| streams.read_heads(Duration::from_secs(3)));
    for (status, reason) in join_all(heads).await.into_iter().flatten() {
        *reasons.entry(reason.unwrap_or(status.to_string())).or_default() += 1;
    }
    (held, reasons)
}

/// B needs ports of its own: an origin that closes leaves nothing in the pool.
fn without_pools() -> Setup {
    Setup { kinds: vec![Kind::CloseTls, Kind::Plain, Kind::Tunnel, Kind::Dns], ..Setup::default() }
}

/// B rests longer, so that it does not use up its own share of so few.
fn with_few_ports() -> Setup {
    let mut setup = Setup { rest: Duration::from_millis(50), ..without_pools() };
    setup.sysctls.push(PORTS);
    setup
}

fn assert_honest_codes(reasons: &BTreeMap<String, usize>) {
    println!("A was told {reasons:?}");
    let odd: Vec<_> = reasons.keys().filter(|code| !HONEST_CODES.contains(&code.as_str())).collect();
    assert!(odd.is_empty(), "a want of ports is told as {odd:?}");
}

#[test]
fn p20_hanging_requests_take_source_ports() {
    let scene = Scene::with_setup(with_few_ports());
    let ((held, reasons), outcome) =
        scene.observe("24 x 100 hanging requests, 2,000 ports", hang(&scene, 24));
    println!("{} connections to the origin at a time", scene.origins.arrivals.most(8002));
    outcome.assert_unharmed();
    assert_honest_codes(&reasons);
    drop(held);
}

#[test]
fn p20_tunnels_that_the_client_closes_keep_source_ports() {
    let scene = Scene::with_setup(with_few_ports());
    let ((taken, failed), outcome) = scene.observe(
        "3,000 tunnels closed by the client first, 2,000 ports",
        take(3000, 8, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut tunnel = attacker.open_tunnel("raw.test:8004").await?;
                tunnel.write_all(b"x").await?;
                tunnel.shutdown().await?;
                let mut rest = Vec::new();
                within(tunnel.read_to_end(&mut rest)).await
            }
        }),
    );
    println!("{} tunnels granted, {failed} not; {:?}", taken.len(), scene.count_refusals());
    outcome.assert_unharmed();
}

/// Connections that are being dialled have descriptors and ports already.
#[test]
fn p20_dials_that_nobody_answers() {
    let scene = Scene::with_setup(Setup {
        prefix: ["prlimit", "--nofile=4096:4096"].map(str::to_owned).to_vec(),
        ..without_pools()
    });
    let (held, failed) = scene.attack(
        "60 x 100 requests to an origin that drops SYNs, 4,096 descriptors",
        take(60, 8, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut streams = attacker.open_http2("origin.test:8008").await?;
                for _ in 0..100 {
                    streams.start("GET", "/").await?;
                }
                Ok(streams)
            }
        }),
    );
    println!("{} connections ({failed} not)", held.len());
}

#[test]
fn p17_a_budget_of_connections_counts_what_is_dialled() {
    let rules = "[budget]\nconnections = 5\n".to_owned();
    let kinds = vec![Kind::Tls];
    let scene = Scene::with_setup(Setup { rules, kinds, ..Setup::default() });
    let others = scene.origins.arrivals.now(8002); // B's, idle
    let (held, reasons) = scene.run(hang(&scene, 1));
    let dialled = scene.origins.arrivals.now(8002).saturating_sub(others);
    println!("{dialled} connections to the origin of a sandbox that may have 5; A was told {reasons:?}");
    assert!((1..=5).contains(&dialled), "{dialled} connections were let out");
    drop(held);
}
