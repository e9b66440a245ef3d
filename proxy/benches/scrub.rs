//! Throughput of the credential scrubber on one core. Run with `cargo bench -p proxy --bench scrub`.

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
    let prose = b"It is a truth universally acknowledged, that a sandbox asks. ".to_vec();
    let json = br#"{"role":"assistant","content":"One \"line\"\nand another, 50% of it"},"#.to_vec();
    let html = b"<a href=\"/x?a=1&amp;b=2\" class='q'>&lt;x&gt; and some text</a>\n".to_vec();
    let events = b"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word \"}}]}\n\n".to_vec();
    let one = || vec![SECRET.to_owned()];
    let token = || vec![random_text(7, 4096)];
    let many = || (0..16).map(|seed| random_text(seed + 100, 51)).collect::<Vec<_>>();
    let most = || (0..64).map(|seed| random_text(seed + 100, 51)).collect::<Vec<_>>();
    let long = random_text(7, 4096).into_bytes();
    let escaped =
        |text: &str| text.bytes().flat_map(|octet| format!("\\u{octet:04x}").into_bytes()).collect();
    bench_group(
        criterion,
        "scrub",
        vec![
            ("prose", one(), prose.clone()),
            ("json", one(), json.clone()),
            ("html", one(), html.clone()),
            ("events", one(), events.clone()),
            ("octets", one(), octets()),
            ("prose, token of 4 KB", token(), prose.clone()),
            ("json, token of 4 KB", token(), json.clone()),
            ("prose, 16 values", many(), prose.clone()),
            ("json, 16 values", many(), json.clone()),
            ("html, 16 values", many(), html),
            ("events, 16 values", many(), events),
            ("prose, 64 values", most(), prose),
            ("json, 64 values", most(), json),
        ],
    );
    bench_group(
        criterion,
        "hostile",
        vec![
            ("starts", one(), SECRET.as_bytes()[..SECRET.len() - 1].to_vec()),
            ("short starts", one(), b"sk-proj-0123456789abcdefghijklmnopqrstuvwxyz sk-proj-012".to_vec()),
            ("starts of a token of 4 KB", token(), long[..4000].to_vec()),
            ("escaped starts", one(), escaped(&SECRET[..SECRET.len() - 1])),
            ("alphabet", one(), b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/".to_vec()),
            ("backslashes", one(), b"\\\\".to_vec()),
            ("references", one(), b"&#00000115;".to_vec()),
            ("numbers", one(), b"115, 107, 45, 112, 114, 111, 106, 46, ".to_vec()),
            ("echoes", one(), SECRET.as_bytes().to_vec()),
        ],
    );
}

fn bench_group(criterion: &mut Criterion, group: &str, rows: Vec<(&str, Vec<String>, Vec<u8>)>) {
    let mut group = criterion.benchmark_group(group);
    group.throughput(Throughput::Bytes((PIECE * PIECES) as u64));
    for (name, values, text) in rows {
        let patterns = Arc::new(EchoPatterns::new(values.iter().map(|value| ("key", value))));
        let piece = Bytes::from_iter(text.into_iter().cycle().take(PIECE));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut scrubber = ResponseScrubber::new(patterns.clone());
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
    let mut next = xorshift(0x9e37_79b9_7f4a_7c15);
    std::iter::repeat_with(|| next().to_le_bytes()[0]).take(PIECE).collect()
}

fn random_text(seed: u64, length: usize) -> String {
    let mut next = xorshift(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    std::iter::repeat_with(|| char::from(alphabet[(next() >> 58) as usize])).take(length).collect()
}

fn xorshift(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
