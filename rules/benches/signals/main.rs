//! Measures the content scanner: content of every kind, with the matchers of ordinary attempts together, beside a plain
//! copy of the bytes, a search for one byte, and a peer that looks for the same shapes.
//!
//! `ONLY=JSON cargo bench -p rules --bench signals` scans that kind alone, for a profiler.

mod corpora;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use regex::bytes::{RegexSet, RegexSetBuilder};
use rules::ids::BankId;
use rules::signals::canary::{CanaryScanner, CanarySet, CanaryShape, RANDOM_BYTES, make};
use rules::signals::content::{BoxedMatcher, ContentScanner, MatcherFactory, ScanLimits};
use rules::signals::flow::{
    FlowKey, FlowLimits, FlowMatch, FlowMatcher, FlowSnapshot, FlowTable, MAX_FINGERPRINTS,
};
use rules::signals::secrets::{PatternSet, SecretMatcher, SecretSettings};
use rules::signals::{Signal, SignalCode, SignalPlace, ViewMatcher};

/// Size of each kind of content: one pass is over before another program gets the processor.
const SIZE: usize = 1 << 19;
/// How the content arrives.
const CHUNK: usize = 64 * 1024;
const NOW: u64 = 1_800_000_000;
const FLOW_KEY: [u8; 32] = [7; 32];
const CANARIES: usize = 10;
const ROUNDS: usize = 25;

fn main() {
    if let Ok(only) = std::env::var("ONLY") {
        return scan_only(&only);
    }
    let factories = [factory(None), factory(Some(10_000)), factory(Some(1_000_000))];
    print_speeds(&factories);
    print_hostile(&factories);
    let mut criterion = Criterion::default()
        .configure_from_args()
        .without_plots()
        .sample_size(10)
        .measurement_time(Duration::from_secs(2))
        .warm_up_time(Duration::from_millis(300));
    bench_fields(&mut criterion, &factories[0]);
    criterion.final_summary();
}

/// Scans one kind of content, `FLOW` for recalled text too, `ROUNDS` times.
fn scan_only(name: &str) {
    let variable = |name| std::env::var(name).ok();
    let factory = factory(variable("FLOW").and_then(|count| count.parse().ok()));
    let rounds = variable("ROUNDS").and_then(|rounds| rounds.parse().ok()).unwrap_or(1);
    let all = corpora::contents(SIZE).into_iter().chain(corpora::hostile(SIZE));
    for (_, content) in all.filter(|(other, _)| *other == name) {
        (0..rounds).for_each(|_| scan(&factory, &content));
    }
}

/// Prints GB/s per core for each kind of content. All columns of a row are measured in turns.
#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn print_speeds(factories: &[Arc<dyn MatcherFactory>; 3]) {
    let peer = peer();
    println!(
        "GB/s per core          secrets+canaries  +10,000 fingerprints  +1,000,000   copy  memchr  regex set"
    );
    for (name, content) in corpora::contents(SIZE) {
        let [first, second, third] = factories;
        let mut copied = vec![0; content.len()];
        let speeds = in_turns(
            content.len(),
            &mut [
                &mut || scan(first, &content),
                &mut || scan(second, &content),
                &mut || scan(third, &content),
                &mut || copied.copy_from_slice(black_box(&content)),
                &mut || assert!(memchr::memchr_iter(0xff, black_box(&content)).count() < content.len()),
                &mut || assert!(content.chunks(CHUNK).all(|chunk| !peer.is_match(black_box(chunk)))),
            ],
        );
        let [secrets, flow, large_flow, copy, search, set] = speeds[..] else { return };
        println!(
            "{name:24} {secrets:14.2} {flow:21.2} {large_flow:11.2} {copy:6.1} {search:7.1} {set:10.2}   \
             {:.3} of a copy, {:.1} times the regex set",
            secrets / copy,
            secrets / set
        );
    }
}

/// Prints how many times longer hostile content takes than prose.
#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn print_hostile(factories: &[Arc<dyn MatcherFactory>; 3]) {
    let contents = corpora::contents(SIZE);
    let Some((_, prose)) = contents.first() else { return };
    println!("hostile content        GB/s per core  times prose   with 10,000 fingerprints  times prose");
    for (name, content) in corpora::hostile(SIZE) {
        let [first, second, _] = factories;
        let speeds = in_turns(
            content.len(),
            &mut [
                &mut || scan(first, prose),
                &mut || scan(first, &content),
                &mut || scan(second, prose),
                &mut || scan(second, &content),
            ],
        );
        let [plain, hostile, plain_flow, hostile_flow] = speeds[..] else { return };
        println!(
            "{name:28} {hostile:7.3} {:12.1} {hostile_flow:26.3} {:12.1}",
            plain / hostile,
            plain_flow / hostile_flow
        );
    }
}

/// Returns the best speed of each in GB/s.
fn in_turns(bytes: usize, each: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let mut best = vec![Duration::MAX; each.len()];
    for _ in 0..ROUNDS {
        for (work, best) in each.iter_mut().zip(&mut best) {
            let started = Instant::now();
            work();
            *best = started.elapsed().min(*best);
        }
    }
    best.iter().map(|best| bytes as f64 / best.as_secs_f64() / 1e9).collect()
}

fn bench_fields(criterion: &mut Criterion, factory: &Arc<dyn MatcherFactory>) {
    let fields = fields();
    let scanner = || ContentScanner::new(SignalPlace::Body, Arc::clone(factory), ScanLimits::default());
    criterion.bench_function("scan 20 field values", |bencher| {
        let (mut scanner, mut signals) = (scanner(), Vec::new());
        bencher.iter(|| {
            for field in &fields {
                scanner.scan_field(black_box(field.as_bytes()), || SignalPlace::Attempt, &mut signals);
            }
        });
        assert!(signals.is_empty(), "{signals:?}");
    });
    criterion.bench_function("scan 20 field values together", |bencher| {
        let (mut scanner, mut signals) = (scanner(), Vec::new());
        let fields: Vec<&[u8]> = fields.iter().map(String::as_bytes).collect();
        bencher.iter(|| scanner.scan_fields(black_box(&fields), |_| SignalPlace::Attempt, &mut signals));
        assert!(signals.is_empty(), "{signals:?}");
    });
    criterion.bench_function("new scanner", |bencher| bencher.iter(scanner));
}

/// Returns what makes the matchers of an attempt, with so many fingerprints of recalled text.
fn factory(fingerprints: Option<usize>) -> Arc<dyn MatcherFactory> {
    let set = PatternSet::compile(&SecretSettings::default()).unwrap_or_else(|error| panic!("{error}"));
    let (set, canaries) = (Arc::new(set), Arc::new(canaries()));
    let snapshot = fingerprints.map(|count| flow_table(count).snapshot());
    Arc::new(move || {
        let mut matchers: Vec<BoxedMatcher> = vec![
            Box::new(SecretMatcher::new(Arc::clone(&set))),
            Box::new(CanaryScanner::new(Arc::clone(&canaries))),
        ];
        if let Some(snapshot) = &snapshot {
            let matcher = FlowMatcher::new(&FlowKey::new(&FLOW_KEY));
            matchers.push(Box::new(FlowFeed { matcher, snapshot: snapshot.clone() }));
        }
        matchers
    })
}

/// Compares each piece with one state of the table.
struct FlowFeed {
    matcher: FlowMatcher,
    snapshot: FlowSnapshot,
}

impl ViewMatcher for FlowFeed {
    fn feed(&mut self, bytes: &[u8], found: &mut Vec<Signal>) {
        found.extend(self.matcher.feed(&self.snapshot, bytes, NOW).iter().map(FlowMatch::signal));
    }

    fn finish(&mut self, _found: &mut Vec<Signal>) {
        self.matcher.finish();
    }

    fn undecided(&self) -> usize {
        self.matcher.undecided()
    }
}

fn canaries() -> CanarySet {
    let shapes = CanaryShape::ALL.iter().cycle().take(CANARIES).enumerate();
    let canaries = shapes.map(|(at, shape)| {
        let random: Vec<u8> = (0..RANDOM_BYTES).map(|byte| (byte * 37 + at * 101) as u8).collect();
        make(*shape, &format!("canary-{at}"), &random).unwrap_or_else(|error| panic!("{error}"))
    });
    CanarySet::new(canaries.collect()).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a table with the fingerprints of text that is in no body.
fn flow_table(fingerprints: usize) -> FlowTable {
    let limits = FlowLimits { max_fingerprints: MAX_FINGERPRINTS, ..FlowLimits::default() };
    let bank = BankId::parse("prod:notes").unwrap_or_else(|error| panic!("{error}"));
    let mut table = FlowTable::new(&FlowKey::new(&FLOW_KEY), limits);
    let mut state = 99_u64;
    while table.len() < fingerprints {
        let text: String = (0..10_000)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                char::from(b'a' + (state >> 33) as u8 % 26)
            })
            .collect();
        table.insert_text(&bank, &text, NOW);
    }
    table
}

/// Returns a set of regular expressions for the same shapes, as scanners of repositories use them.
fn peer() -> RegexSet {
    const SHAPES: [&str; 28] = [
        r"AGE-SECRET-KEY-1[A-Z0-9]{58}",
        r"sk-ant-[a-z0-9]{1,12}-[A-Za-z0-9_-]{80}",
        r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b",
        r"(?:AccessKey|aws_secret_access_key|AWS_SECRET_ACCESS_KEY)[^A-Za-z0-9+/]{1,6}[A-Za-z0-9+/]{40}\b",
        r"AccountKey=[A-Za-z0-9+/]{86}==",
        r"SharedAccessKey=[A-Za-z0-9+/]{43}=",
        r"[a-z0-9]://[!-.0-9;-~]{1,256}:[!-.0-9;-~]{3,256}@[a-z0-9]",
        r"\bcio[A-Za-z0-9]{32}\b",
        r"do[opr]_v1_[a-f0-9]{64}\b",
        r"dckr_[op]at_[A-Za-z0-9_-]{27,40}\b",
        r"github_pat_[A-Za-z0-9_]{82}\b",
        r"gh[pousr]_[A-Za-z0-9]{36}\b",
        r"\bgl(?:pat|dt|rt|ptt|cbt|oas|ft|agent)-[A-Za-z0-9_-]{20}",
        r"\bAIza[A-Za-z0-9_-]{35}\b",
        r"GOCSPX-[A-Za-z0-9_-]{28}\b",
        r"\bya29\.[A-Za-z0-9_-]{40}",
        r"\bhf_[A-Za-z0-9]{34}\b",
        r"\beyJ[A-Za-z0-9_-]{8,1024}\.ey[A-Za-z0-9_-]{24}",
        r"npm_[A-Za-z0-9]{36}\b",
        r"sk-[A-Za-z0-9_-]{16,200}T3BlbkFJ[A-Za-z0-9_-]{16}",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY",
        r"pypi-AgE[A-Za-z0-9_-]{85}",
        r"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}\b",
        r"xapp-[0-9][A-Za-z0-9-]{24}",
        r"xox[abeoprs]-[A-Za-z0-9-]{24}",
        r"[sr]k_live_[A-Za-z0-9]{24}",
        r"\bSK[a-f0-9]{32}\b",
        r"\bhv[sb]\.[A-Za-z0-9_-]{24}",
    ];
    let mut builder = RegexSetBuilder::new(SHAPES);
    builder.unicode(false).size_limit(256 << 20).dfa_size_limit(64 << 20);
    builder.build().unwrap_or_else(|error| panic!("{error}"))
}

fn scan(factory: &Arc<dyn MatcherFactory>, content: &[u8]) {
    let mut scanner = ContentScanner::new(SignalPlace::Body, Arc::clone(factory), ScanLimits::default());
    let mut signals = Vec::new();
    for chunk in black_box(content).chunks(CHUNK) {
        scanner.feed(chunk, &mut signals);
    }
    scanner.finish(&mut signals);
    signals.retain(|signal| signal.code != SignalCode::ContentUnsearched);
    assert!(signals.is_empty(), "{signals:?}");
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
