//! Benchmarks the detectors of recalled text and of canaries over prose, JSON, source code and base64.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use rules::ids::BankId;
use rules::signals::canary::{CanaryScanner, CanarySet, CanaryShape, RANDOM_BYTES, make};
use rules::signals::flow::{FlowKey, FlowLimits, FlowMatcher, FlowTable, MAX_FINGERPRINTS};

const NOW: u64 = 1_800_000_000;
const LENGTH: usize = 1 << 20;
const WORDS: [&str; 24] = [
    "the", "of", "delivery", "customer", "before", "a", "window", "garden", "is", "not", "when", "in",
    "Lindau", "and", "prefers", "to", "number", "because", "left", "side", "that", "was", "people", "key",
];

fn main() {
    let mut criterion = Criterion::default()
        .configure_from_args()
        .without_plots()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    bench_matcher(&mut criterion);
    bench_fingerprinter(&mut criterion);
    bench_scanner(&mut criterion);
    criterion.final_summary();
}

#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn bench_matcher(criterion: &mut Criterion) {
    for size in [0, 10_000, 1_000_000] {
        let mut table = table(size);
        println!("{} fingerprints occupy {} KB", table.len(), table.bytes() / 1024);
        let snapshot = table.snapshot();
        let mut group = criterion.benchmark_group(format!("flow/{size}"));
        group.throughput(Throughput::Bytes(LENGTH as u64));
        for (kind, text) in texts() {
            let mut matcher = FlowMatcher::new(&key());
            group.bench_function(BenchmarkId::from_parameter(kind), |bencher| {
                bencher.iter(|| {
                    for chunk in text.as_bytes().chunks(16 * 1024) {
                        assert!(matcher.feed(&snapshot, black_box(chunk), NOW).is_empty());
                    }
                    matcher.finish();
                });
            });
        }
    }
}

#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn bench_fingerprinter(criterion: &mut Criterion) {
    let prose = texts().swap_remove(0).1;
    let bank = bank();
    let mut table = FlowTable::new(&key(), limits());
    table.insert_text(&bank, &prose, NOW);
    let bytes = table.to_bytes().len();
    println!(
        "{} KB of prose: {} fingerprints, {:.0} bytes stored and {:.0} in memory per KB",
        prose.len() / 1024,
        table.len(),
        bytes as f64 / (prose.len() as f64 / 1024.0),
        table.bytes() as f64 / (prose.len() as f64 / 1024.0),
    );
    let mut group = criterion.benchmark_group("flow/recall");
    group.throughput(Throughput::Bytes(prose.len() as u64));
    group.bench_function("new", |bencher| {
        bencher.iter(|| {
            let mut table = FlowTable::new(&key(), limits());
            table.insert_text(&bank, black_box(&prose), NOW);
        });
    });
    group.bench_function("known", |bencher| {
        bencher.iter(|| table.insert_text(&bank, black_box(&prose), NOW));
    });
}

fn bench_scanner(criterion: &mut Criterion) {
    for count in [1, 100] {
        let set = Arc::new(canaries(count));
        let mut group = criterion.benchmark_group(format!("canary/{count}"));
        group.throughput(Throughput::Bytes(LENGTH as u64));
        for (kind, text) in texts() {
            let mut scanner = CanaryScanner::new(Arc::clone(&set));
            group.bench_function(BenchmarkId::from_parameter(kind), |bencher| {
                bencher.iter(|| {
                    for chunk in text.as_bytes().chunks(16 * 1024) {
                        scanner.scan(black_box(chunk));
                    }
                });
            });
        }
    }
}

/// Returns canaries of all shapes in turn.
fn canaries(count: usize) -> CanarySet {
    let mut random = Random(5);
    let shapes = CanaryShape::ALL.iter().cycle().skip(2).take(count).enumerate();
    let canaries = shapes.map(|(at, shape)| {
        let random: Vec<u8> = (0..RANDOM_BYTES).map(|_| random.next() as u8).collect();
        make(*shape, &format!("canary-{at}"), &random).unwrap_or_else(|error| panic!("{error}"))
    });
    CanarySet::new(canaries.collect()).unwrap_or_else(|error| panic!("{error}"))
}

fn key() -> FlowKey {
    FlowKey::new(&[7; 32])
}

fn bank() -> BankId {
    BankId::parse("prod:notes").unwrap_or_else(|error| panic!("{error}"))
}

fn limits() -> FlowLimits {
    FlowLimits { max_fingerprints: MAX_FINGERPRINTS, ..FlowLimits::default() }
}

/// Returns a table with the fingerprints of text that is in no body.
fn table(size: usize) -> FlowTable {
    let mut table = FlowTable::new(&key(), limits());
    let mut random = Random(99);
    while table.len() < size {
        let text: String = (0..10_000).map(|_| char::from(b'a' + (random.next() % 26) as u8)).collect();
        table.insert_text(&bank(), &text, NOW);
    }
    table
}

/// Returns bodies of about a megabyte that are not made of one repeated block.
fn texts() -> Vec<(&'static str, String)> {
    let mut random = Random(1);
    let mut word = move || WORDS[(random.next() % WORDS.len() as u64) as usize];
    let mut number = Random(2);
    let base64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut prose, mut json, mut code) = (String::new(), String::new(), String::new());
    while prose.len() < LENGTH {
        prose += word();
        prose += if number.next().is_multiple_of(9) { ".\n" } else { " " };
    }
    while json.len() < LENGTH {
        let (id, value) = (number.next() % 100_000, number.next() % 1000);
        json += &format!(
            "  {{\"id\": {id}, \"{}\": \"{} {}\", \"value\": {value}.5}},\n",
            word(),
            word(),
            word()
        );
    }
    while code.len() < LENGTH {
        let (a, b, c) = (word(), word(), word());
        code += &format!(
            "    if self.{a}.is_some() && {b} != 0 {{\n        return Err({c}::new(&{a}, {b}));\n    }}\n"
        );
    }
    let german: String = prose.chars().map(|c| if c == 'a' { 'ä' } else { c }).collect();
    let cyrillic: String = prose
        .chars()
        .map(|c| char::from_u32(u32::from(c) + 0x3cf).filter(|_| c.is_ascii_lowercase()).unwrap_or(c))
        .collect();
    let base64 = (0..LENGTH).map(|_| char::from(base64[(number.next() % 64) as usize])).collect();
    let cut = |text: String| {
        text.chars()
            .scan(0, |length, c| {
                *length += c.len_utf8();
                (*length <= LENGTH).then_some(c)
            })
            .collect()
    };
    [
        ("prose", prose),
        ("json", json),
        ("code", code),
        ("base64", base64),
        ("umlauts", german),
        ("cyrillic", cyrillic),
    ]
    .map(|(kind, text)| (kind, cut(text)))
    .into()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) ^ (self.0 >> 50)
    }
}
