//! Bodies that are slow to search: encoded twice, full of what could begin a secret, and compressed to a thousandth.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::io::AsyncWriteExt;

use crate::attacker::{read_head, take, within};
use crate::scene::Scene;

/// Uploads at once.
const UPLOADS: usize = 6;
/// Bytes of one body.
const BODY: usize = 4 << 20;

/// Ends the uploads when it is dropped.
struct Uploads(Arc<AtomicBool>);

impl Drop for Uploads {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn encoded_body() -> Vec<u8> {
    let words =
        "ghp_ sk-ant- AKIA eyJhbGciOi -----BEGIN postgres://u:p@h %41%42 \\u0041\\u0042 &#65;&#66; xoxb-1 ";
    let once = STANDARD.encode(words.repeat(3));
    let line = format!("{words}{once} {} ", STANDARD.encode(&once));
    line.into_bytes().into_iter().cycle().take(BODY).collect()
}

fn compressed_body() -> Vec<u8> {
    let mut gzip =
        Command::new("gzip").arg("-9c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = gzip.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(&b"%41 ".repeat(16 << 20)).unwrap());
    let body = gzip.wait_with_output().unwrap().stdout;
    writer.join().unwrap();
    body
}

#[test]
fn p20_bodies_that_are_slow_to_search() {
    let scene = Scene::new();
    let bodies =
        [(Arc::new(encoded_body()), ""), (Arc::new(compressed_body()), "Content-Encoding: gzip\r\n")];
    let (over, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let held = scene.attack(&format!("{UPLOADS} uploads that are slow to search, again and again"), async {
        let begun = take(UPLOADS, UPLOADS, |at| {
            let (attacker, over, sent) = (scene.attacker.clone(), over.clone(), sent.clone());
            let (body, coding) = bodies[at % bodies.len()].clone();
            async move {
                tokio::spawn(async move {
                    while !over.load(Ordering::SeqCst) {
                        let mut stream = attacker.connect().await?;
                        let head = format!(
                            "POST http://origin.test:8001/hello HTTP/1.1\r\nHost: origin.test:8001\r\n{coding}Content-Length: {}\r\n\r\n",
                            body.len()
                        );
                        stream.write_all(head.as_bytes()).await?;
                        for piece in body.chunks(64 << 10) {
                            stream.write_all(piece).await?;
                            sent.fetch_add(piece.len() as u64, Ordering::SeqCst);
                            if over.load(Ordering::SeqCst) {
                                return Ok(());
                            }
                        }
                        within(read_head(&mut stream)).await?;
                    }
                    std::io::Result::Ok(())
                });
                Ok(())
            }
        });
        begun.await;
        Uploads(over.clone())
    });
    println!("{} MiB sent", sent.load(Ordering::SeqCst) >> 20);
    assert!(sent.load(Ordering::SeqCst) > BODY as u64 / 4, "A has hardly sent anything");
    scene.release(held);
}
