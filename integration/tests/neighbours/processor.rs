//! Processor time. Attacker, origins and B share the cores with the gateway here, so latency is printed and success
//! is what must hold.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::net::UdpSocket;

use crate::attacker::take;
use crate::honest::dns_query;
use crate::scene::{A_NETWORK, DNS, Scene, Setup};

const STORM: Duration = Duration::from_secs(4);

/// Handshakes as fast as they go, each for a name that needs a certificate of its own.
#[test]
fn p20_certificates_for_many_names() {
    let rules =
        "[[allow]]\nname = \"many\"\nhosts = [\"*.many.example:8002\"]\nresolves_to = [\"127.0.0.0/8\"]\n";
    let scene = Scene::with_setup(Setup { rules: rules.to_owned(), ..Setup::default() });
    let made = AtomicUsize::new(0);
    let end = Instant::now() + STORM;
    let made = std::sync::Arc::new(made);
    let (_, outcome) = scene.observe(
        "handshakes for many names in a loop",
        take(32, 32, |task| {
            let (attacker, made) = (scene.attacker.clone(), made.clone());
            async move {
                for at in 0.. {
                    if Instant::now() > end {
                        break;
                    }
                    let target = format!("n{task}-{at}.many.example:8002");
                    if attacker.open_tls(&target, "http/1.1").await.is_ok() {
                        made.fetch_add(1, Ordering::SeqCst);
                    }
                }
                Ok(())
            }
        }),
    );
    println!("{} handshakes, each with a new name", made.load(Ordering::SeqCst));
    outcome.assert_served();
}

/// Requests as fast as they go on many connections.
#[test]
fn p20_requests_in_a_loop() {
    let scene = Scene::new();
    let end = Instant::now() + STORM;
    let (counts, outcome) = scene.observe(
        "requests on 32 connections x 100 streams in a loop",
        take(32, 32, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut count = BTreeMap::new();
                while Instant::now() < end {
                    let mut streams = attacker.open_http2("origin.test:8003").await?;
                    for _ in 0..100 {
                        if streams.start("GET", "/hello").await.is_err() {
                            break;
                        }
                    }
                    for (status, reason) in streams.read_heads(Duration::from_secs(2)).await {
                        *count.entry(reason.unwrap_or(status.to_string())).or_insert(0) += 1;
                    }
                }
                Ok(count)
            }
        }),
    );
    println!("A was told {:?}", counts.0);
    outcome.assert_served();
}

/// Some thousand datagrams a second, for names that are denied, to the socket that everybody's queries arrive at. At
/// full speed the kernel drops B's datagrams too, before anybody can tell whose they are.
#[test]
fn p20_denied_names_in_a_loop() {
    let scene = Scene::new();
    let end = Instant::now() + STORM;
    let (counts, outcome) = scene.observe(
        "denied names on 8 sockets in a loop",
        take(8, 8, |task| async move {
            let socket = UdpSocket::bind(A_NETWORK.next_address()).await?;
            socket.connect(DNS).await?;
            let mut count = 0;
            while Instant::now() < end {
                let query = dns_query(7, &format!("n{task}-{count}.denied.example"));
                count += usize::from(socket.send(&query).await.is_ok());
                while socket.try_recv(&mut [0; 1500]).is_ok() {}
                if count % 10 == 0 {
                    tokio::time::sleep(Duration::from_millis(16)).await;
                }
            }
            Ok(count)
        }),
    );
    println!("{} queries sent", counts.0.iter().sum::<usize>());
    outcome.assert_served();
}
