//! What sandboxes leave behind.

use std::fs;
use std::time::{Duration, Instant};

use crate::attacker::take;
use crate::scene::{Network, Scene, Setup, configuration, sandbox_table, wait_within};

/// Sandboxes at a time, and how often all of them are replaced.
const SANDBOXES: usize = 100;
const GENERATIONS: usize = 6;
/// What replaced sandboxes may add to the memory, all together: far below the 240 KB that each once left behind.
const LEFT_BEHIND: u64 = 40 << 20;
/// How long memory may take to return to the system.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(60);
/// What a burst may leave behind then.
const AFTER_BURST: u64 = 48 << 20;

#[test]
fn p17_sandboxes_that_leave_take_their_memory_with_them() {
    let scene = Scene::new();
    let mut sizes = Vec::new();
    for generation in 0..=GENERATIONS {
        let tables = (0..SANDBOXES).map(|at| {
            sandbox_table(&format!("job-{generation}-{at}"), &format!("127.{}.0.0/16", 100 + at), "p")
        });
        let text = configuration(&Setup::default(), &tables.collect::<String>());
        fs::write(scene.configuration_path(), text).unwrap();
        let reloaded = scene.admin("POST", "/reload?wait=true");
        assert!(reloaded.as_ref().is_some_and(|(status, _)| *status == 200), "{reloaded:?}");
        let (done, failed) = scene.run(take(SANDBOXES, 8, |at| {
            let network = Network(format!("127.{}", 100 + at).leak());
            let attacker = scene.attacker.in_network(network);
            async move { attacker.request("origin.test:8002", "GET /hello").await }
        }));
        assert!(failed == 0 && done.iter().all(|(status, _)| *status == 200), "{failed} failed, {done:?}");
        sizes.push(scene.resident());
    }
    let shown: Vec<_> = sizes.iter().map(|size| size >> 20).collect();
    println!("{SANDBOXES} sandboxes, replaced {GENERATIONS} times: {shown:?} MiB");
    let first = sizes[1];
    wait_within(GIVEN_BACK_WITHIN, "the memory of sandboxes that left is given back", || {
        (scene.resident() <= first + LEFT_BEHIND).then_some(())
    });
}

#[test]
fn p17_memory_is_given_back_after_a_burst() {
    let scene = Scene::new();
    let before = scene.resident();
    let held = scene.attack(
        "80 memory bodies of 4 MB without end",
        take(1, 1, |_| {
            let attacker = scene.attacker.clone();
            async move {
                let mut streams = attacker.open_http2("memory.test:8007").await?;
                for _ in 0..80 {
                    streams.start("POST", "/v1/recall").await?;
                }
                streams.pour(4_000_000).await;
                Ok(streams)
            }
        }),
    );
    let burst = scene.resident();
    scene.release(held);
    let started = Instant::now();
    wait_within(GIVEN_BACK_WITHIN, "memory is given back", || {
        (scene.resident() <= before + AFTER_BURST).then_some(())
    });
    println!(
        "{} MiB before, {} at the end of the burst, {} after {:?}",
        before >> 20,
        burst >> 20,
        scene.resident() >> 20,
        started.elapsed()
    );
}
