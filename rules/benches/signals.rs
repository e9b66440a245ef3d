//! Benchmarks the content scanner with the known shapes of secrets, per kind of content.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use rules::signals::SignalPlace;
use rules::signals::content::{BoxedMatcher, ContentScanner, MatcherFactory, ScanLimits};
use rules::signals::secrets::{PatternSet, SecretMatcher, SecretSettings};

/// Size of each kind of content.
const SIZE: usize = 4 << 20;
/// How the content arrives.
const CHUNK: usize = 64 * 1024;

fn main() {
    let mut criterion = Criterion::default()
        .configure_from_args()
        .without_plots()
        .sample_size(10)
        .measurement_time(Duration::from_secs(2))
        .warm_up_time(Duration::from_millis(300));
    let factory = factory();
    for (name, content) in contents() {
        report_speed(name, &content, &factory);
        criterion.bench_function(&format!("scan 4 MiB of {name}"), |bencher| {
            bencher.iter(|| scan(&factory, black_box(&content)));
        });
    }
    for (name, content) in hostile() {
        report_speed(name, &content, &factory);
    }
    let fields = fields();
    criterion.bench_function("scan 20 field values", |bencher| {
        let mut scanner = ContentScanner::new(SignalPlace::Body, Arc::clone(&factory), ScanLimits::default());
        let mut signals = Vec::new();
        bencher.iter(|| {
            for field in &fields {
                scanner.scan_field(black_box(field.as_bytes()), || SignalPlace::Attempt, &mut signals);
            }
        });
        assert!(signals.is_empty(), "{signals:?}");
    });
    criterion.bench_function("scan 20 field values together", |bencher| {
        let mut scanner = ContentScanner::new(SignalPlace::Body, Arc::clone(&factory), ScanLimits::default());
        let mut signals = Vec::new();
        let fields: Vec<&[u8]> = fields.iter().map(String::as_bytes).collect();
        bencher.iter(|| scanner.scan_fields(black_box(&fields), |_| SignalPlace::Attempt, &mut signals));
        assert!(signals.is_empty(), "{signals:?}");
    });
    criterion.bench_function("new scanner", |bencher| {
        bencher.iter(|| ContentScanner::new(SignalPlace::Body, Arc::clone(&factory), ScanLimits::default()));
    });
    criterion.final_summary();
}

fn factory() -> Arc<dyn MatcherFactory> {
    let set = PatternSet::compile(&SecretSettings::default()).unwrap_or_else(|error| panic!("{error}"));
    let set = Arc::new(set);
    Arc::new(move || vec![Box::new(SecretMatcher::new(Arc::clone(&set))) as BoxedMatcher])
}

fn scan(factory: &Arc<dyn MatcherFactory>, content: &[u8]) -> usize {
    let mut scanner = ContentScanner::new(SignalPlace::Body, Arc::clone(factory), ScanLimits::default());
    let mut signals = Vec::new();
    for chunk in content.chunks(CHUNK) {
        scanner.feed(chunk, &mut signals);
    }
    scanner.finish(&mut signals);
    assert!(signals.is_empty(), "{signals:?}");
    signals.len()
}

/// Prints the best of several passes in MB/s.
#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn report_speed(name: &str, content: &[u8], factory: &Arc<dyn MatcherFactory>) {
    let best = (0..20)
        .map(|_| {
            let started = Instant::now();
            black_box(scan(factory, content));
            started.elapsed()
        })
        .min()
        .unwrap_or_default();
    println!("{name}: {:.0} MB/s", content.len() as f64 / best.as_secs_f64() / 1e6);
}

/// A small generator of the same numbers in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

fn contents() -> Vec<(&'static str, Vec<u8>)> {
    let mut numbers = Numbers(7);
    vec![
        ("prose", fill(|| prose(&mut Numbers(3)))),
        ("JSON of an API", fill(|| json(&mut numbers))),
        (
            "source code",
            fill(|| include_str!("../src/url_path.rs").to_owned() + include_str!("../src/pattern.rs")),
        ),
        ("source code in JSON", {
            let code = include_str!("../src/url_path.rs").to_owned() + include_str!("../src/pattern.rs");
            fill(|| format!("{:?},", code))
        }),
        ("base64 in JSON", fill(|| base64_json(&mut Numbers(11)))),
        ("random bytes", {
            let mut numbers = Numbers(5);
            (0..SIZE).map(|_| numbers.next(256) as u8).collect()
        }),
    ]
}

/// Content that makes candidates, escapes and runs as often as possible, without a finding.
fn hostile() -> Vec<(&'static str, Vec<u8>)> {
    let nested = "%2541%5cu0041&#92;u0041".to_owned() + &"QUJD".repeat(8) + "%20";
    vec![
        ("hostile: headers of tokens", fill(|| format!("eyJ{}.", "a".repeat(1000)))),
        ("hostile: beginnings of tokens", fill(|| "eyJ.://a:b-----BEGIN A sk-SG.AKIA hf_SKa".to_owned())),
        ("hostile: private keys without a key", fill(|| "-----BEGIN A PRIVATE KEY-----\nA: b\n".to_owned())),
        ("hostile: addresses", fill(|| format!("a://{}:", "b".repeat(200)))),
        ("hostile: OpenAI keys", fill(|| format!("sk-{}\n", "-sk".repeat(90)))),
        ("hostile: all escapes", fill(|| nested.clone())),
        ("hostile: escapes far apart", fill(|| format!("%41{}", " ".repeat(258)))),
        ("hostile: short runs", fill(|| "41424344454647484950515253 ABCDEFGHIJKLMNOPQRSTUVWXYZ ".to_owned())),
    ]
}

fn fill(mut part: impl FnMut() -> String) -> Vec<u8> {
    let mut content = Vec::with_capacity(SIZE);
    while content.len() < SIZE {
        content.extend_from_slice(part().as_bytes());
    }
    content.truncate(SIZE);
    content
}

fn prose(numbers: &mut Numbers) -> String {
    const WORDS: [&str; 32] = [
        "the",
        "of",
        "and",
        "conscious",
        "a",
        "in",
        "agreement",
        "is",
        "committee",
        "that",
        "for",
        "government",
        "which",
        "precious",
        "with",
        "as",
        "responsibility",
        "was",
        "on",
        "are",
        "discussion",
        "be",
        "question",
        "sky",
        "this",
        "risk",
        "independent",
        "at",
        "knowledge",
        "by",
        "second",
        "an",
    ];
    let mut text = String::new();
    for at in 0..4000 {
        text.push_str(WORDS[numbers.next(WORDS.len())]);
        text.push_str(match at % 90 {
            89 => ".\n\n",
            44 => ", ",
            _ => " ",
        });
    }
    text
}

fn json(numbers: &mut Numbers) -> String {
    let id = numbers.next(1_000_000);
    let node = format!("MDU6SXNzdWU{id:08}");
    format!(
        "{{\"id\":{id},\"node_id\":\"{node}\",\"url\":\"https://api.host.test/repos/octocat/Hello-World/issues/{id}\",\
         \"labels_url\":\"https://api.host.test/repos/octocat/Hello-World/issues/{id}/labels{{/name}}\",\
         \"state\":\"open\",\"title\":\"Found a bug in the second part\",\"user\":{{\"login\":\"octocat\",\"type\":\"User\",\
         \"site_admin\":false}},\"sha\":\"6dcb09b5b57875f334f61aebed695e2e4193db{:02x}\",\"comments\":{},\
         \"created_at\":\"2026-04-22T13:33:48Z\",\"body\":\"I'm having a problem with this, see https://docs.host.test/a#b.\"}},\n",
        id % 256,
        id % 17
    )
}

fn base64_json(numbers: &mut Numbers) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let data: String = (0..60_000).map(|_| ALPHABET[numbers.next(64)] as char).collect();
    format!("{{\"type\":\"image\",\"source\":{{\"media_type\":\"image/png\",\"data\":\"{data}\"}}}},\n")
}

fn fields() -> Vec<String> {
    [
        "api.host.test",
        "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko)",
        "*/*",
        "gzip, deflate, br",
        "en-US,en;q=0.9",
        "application/json",
        "keep-alive",
        "no-cache",
        "1472",
        "https://app.host.test/board/17?view=list",
        "same-origin",
        "cors",
        "empty",
        "2026-04-22",
        "XMLHttpRequest",
        "8f14e45f-ceea-467f-a0e6-8d2f1c3b5a79",
        "W/\"0815-cafe\"",
        "max-age=0",
        "bytes=0-1023",
        "u=1, i",
    ]
    .map(str::to_owned)
    .to_vec()
}
