//! Throughput of the credential scrubber on one core. Run with `cargo bench -p proxy`.

use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use proxy::scrub::{EchoPatterns, ResponseScrubber};

/// As long as the API keys of model services.
const SECRET: &str =
    "sk-proj-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123-abcdefghijklmnop";
/// Size of one chunk from an origin server.
const PIECE: usize = 16 << 10;
const PIECES: usize = 64;

fn bench(criterion: &mut Criterion) {
    let echoes = Arc::new(EchoPatterns::new(SECRET));
    let mut group = criterion.benchmark_group("scrub");
    group.throughput(Throughput::Bytes((PIECE * PIECES) as u64));
    for (name, text) in [
        ("octets", octets()),
        ("prose", b"It is a truth universally acknowledged, that a sandbox asks. ".to_vec()),
        ("json", br#"{"role":"assistant","content":"One \"line\"\nand another, 50% of it"},"#.to_vec()),
        ("events", b"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word \"}}]}\n\n".to_vec()),
        ("near misses", b"sk-proj-0123456789abcdefghijklmnopqrstuvwxyz sk-proj-012".to_vec()),
        ("echoes", SECRET.as_bytes().to_vec()),
    ] {
        let piece = Bytes::from_iter(text.into_iter().cycle().take(PIECE));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut scrubber = ResponseScrubber::new(echoes.clone());
                for _ in 0..PIECES {
                    black_box(scrubber.scrub(Some(&piece), false));
                }
                scrubber.echo_count()
            });
        });
    }
    group.finish();
}

/// Random octets, as in an image or an archive.
fn octets() -> Vec<u8> {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed.to_le_bytes()[0]
    };
    std::iter::repeat_with(next).take(PIECE).collect()
}

criterion_group!(benches, bench);
criterion_main!(benches);
