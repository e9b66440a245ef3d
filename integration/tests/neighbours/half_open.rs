//! Connections that never get as far as a request, and requests that never end.

use std::time::Duration;

use tokio::io::AsyncWriteExt;

use crate::attacker::{read_head, take, within};
use crate::scene::Scene;

/// As many connections as a sandbox may have.
const ALL: usize = 4096;

/// Connections that say `bytes` and then nothing, directly or in a granted tunnel.
fn attack_with_bytes(what: &str, tunnel: Option<&'static str>, bytes: Vec<u8>) {
    let scene = Scene::new();
    let (held, failed) = scene.attack(
        what,
        take(ALL, 32, |_| {
            let (attacker, bytes) = (scene.attacker.clone(), bytes.clone());
            async move {
                let mut stream = match tunnel {
                    Some(target) => attacker.open_tunnel(target).await?,
                    None => attacker.connect().await?,
                };
                within(stream.write_all(&bytes)).await?;
                Ok(stream)
            }
        }),
    );
    println!("{} connections ({failed} not)", held.len());
}

#[test]
fn p20_client_hellos_without_end() {
    // A handshake message of 65,000 bytes in records of 16 KB, short of its last ones.
    let message = [&[1, 0, 0xfd, 0xe8, 3, 3][..], &[7; 60_000]].concat();
    let records: Vec<u8> = message
        .chunks(16 << 10)
        .flat_map(|part| [&[22, 3, 1], &u16::try_from(part.len()).unwrap().to_be_bytes()[..], part].concat())
        .collect();
    attack_with_bytes("4,096 ClientHellos of 60 KB without end", Some("origin.test:8002"), records);
}

#[test]
fn p20_request_heads_without_end() {
    let head = format!(
        "GET http://origin.test:8001/ HTTP/1.1\r\nHost: origin.test:8001\r\nX: {}",
        "y".repeat(30_000)
    );
    attack_with_bytes("4,096 heads of 30 KB without end", None, head.into_bytes());
}

#[test]
fn p20_socks_greetings_without_end() {
    attack_with_bytes("4,096 SOCKS greetings without end", None, vec![5, 255]);
}

/// HTTP/2 header blocks that are continued and never ended, on connections that stand.
#[test]
fn p20_header_blocks_without_end() {
    let scene = Scene::new();
    let (held, failed) = scene.attack(
        "4,096 header blocks of 30 KB without end",
        take(ALL, 16, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut stream = attacker.open_tls("origin.test:8003", "h2").await?;
                let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
                // Literals without indexing (RFC 7541, 6.2.2) of 100 bytes each, in HEADERS and CONTINUATION frames.
                let field = [&[0, 1, b'x', 100][..], &[b'y'; 100]].concat();
                let block = field.repeat(300);
                for (at, part) in block.chunks(16_000).enumerate() {
                    let length = u32::try_from(part.len()).unwrap().to_be_bytes();
                    bytes.extend([
                        length[1],
                        length[2],
                        length[3],
                        if at == 0 { 1 } else { 9 },
                        0,
                        0,
                        0,
                        0,
                        1,
                    ]);
                    bytes.extend(part);
                }
                stream.write_all(&bytes).await?;
                stream.flush().await?;
                Ok(stream)
            }
        }),
    );
    println!("{} connections ({failed} not)", held.len());
}

/// Upgraded connections whose origin sends without end and whose client does not read.
#[test]
fn p20_upgraded_connections_that_are_not_read() {
    let scene = Scene::new();
    let (held, failed) = scene.attack(
        "1,500 upgraded connections that are not read",
        take(1500, 16, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut stream = attacker.open_tls("origin.test:8002", "http/1.1").await?;
                let request = b"GET /upgrade HTTP/1.1\r\nHost: origin.test:8002\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                    Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n";
                stream.write_all(request).await?;
                let head = within(read_head(&mut stream)).await?;
                if head.starts_with("HTTP/1.1 101") { Ok(stream) } else { Err(std::io::Error::other(head)) }
            }
        }),
    );
    println!("{} upgraded connections ({failed} not)", held.len());
    assert!(!held.is_empty(), "no connection was upgraded");
}

/// Bodies of one byte now and then, on as many streams as there are.
#[test]
fn p20_bodies_that_trickle() {
    let scene = Scene::new();
    let (held, failed) = scene.attack(
        "50 x 100 bodies that trickle",
        take(50, 10, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut streams = attacker.open_http2("origin.test:8002").await?;
                for _ in 0..100 {
                    streams.start("POST", "/hello").await?;
                }
                for _ in 0..20 {
                    streams.pour(1).await;
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Ok(streams)
            }
        }),
    );
    println!("{} connections ({failed} not)", held.len());
}

/// Pings whose answers are not read: what an endpoint owes must not pile up.
#[test]
fn p20_pings_whose_answers_are_not_read() {
    let scene = Scene::new();
    let held = scene.attack(
        "20 connections with 20 MB of pings each, answers unread",
        take(20, 20, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut stream = attacker.open_tls("origin.test:8003", "h2").await?;
                stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await?;
                let pings = b"\0\0\x08\x06\0\0\0\0\0abcdefgh".repeat(4096);
                let mut sent = 0;
                while sent < 20 << 20 {
                    let write = tokio::time::timeout(Duration::from_secs(1), stream.write_all(&pings));
                    if !matches!(write.await, Ok(Ok(()))) {
                        break; // it stopped reading, as it should
                    }
                    sent += pings.len();
                }
                Ok((stream, sent))
            }
        }),
    );
    let sent: usize = held.0.iter().map(|(_, sent)| sent).sum();
    println!("{} MB of pings were taken", sent >> 20);
}
