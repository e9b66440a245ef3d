//! Benchmarks compilation and lookup with 10, 10 thousand and 1 million host patterns, and their memory use.

use std::collections::BTreeMap;
use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion};
use rules::facts::{NameFacts, QueryType};
use rules::host_set::HostSet;
use rules::ids::SandboxId;
use rules::pattern::{HostPattern, PatternWidth};
use rules::{DomainName, Facts, LoadSources, RuleSet, SourceFile, compile};

const SIZES: [usize; 3] = [10, 10_000, 1_000_000];
const POLICY: &str = "name = \"p\"\n[[allow]]\nname = \"list\"\nhosts_file = \"list.txt\"\n";

fn main() {
    let mut criterion = Criterion::default().configure_from_args().without_plots();
    for size in SIZES {
        let sources = sources(size);
        report_memory(size, &sources);
        bench_lookup(&mut criterion, size);
        bench_decide(&mut criterion, size, &load(&sources));
        bench_compile(&mut criterion, size, &sources);
    }
    criterion.final_summary();
}

/// Returns a name typical of lists: a few labels, some shared parents, every eighth a wildcard.
fn pattern(at: usize) -> String {
    let star = if at.is_multiple_of(8) { "*." } else { "" };
    format!("{star}host-{at:06}.team-{}.{}.example", at % 977, ["cdn", "mirror", "static", "api"][at % 4])
}

fn sources(size: usize) -> LoadSources {
    let list: String = (0..size).map(|at| pattern(at) + "\n").collect();
    LoadSources {
        policies: vec![SourceFile { path: "p.toml".to_owned(), bytes: POLICY.into() }],
        lists: BTreeMap::from([("list.txt".to_owned(), Ok(list.into_bytes()))]),
        ..LoadSources::default()
    }
}

fn load(sources: &LoadSources) -> RuleSet {
    compile(sources, &[]).unwrap_or_else(|problems| panic!("{problems:?}"))
}

fn host_set(size: usize) -> HostSet {
    let mut set = HostSet::default();
    for at in 0..size {
        let parsed =
            HostPattern::parse(&pattern(at), PatternWidth::Narrow).unwrap_or_else(|error| panic!("{error}"));
        set.insert(&parsed, 0, 1).unwrap_or_else(|error| panic!("{error}"));
    }
    set.shrink();
    set
}

/// Prints the bytes per pattern without its text, and the growth of resident memory.
#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn report_memory(size: usize, sources: &LoadSources) {
    let counted = host_set(size);
    let per_pattern = counted.overhead() as f64 / size as f64;
    drop(counted);
    let before = resident_bytes();
    let started = Instant::now();
    let rules = load(sources);
    let took = started.elapsed();
    let grown = resident_bytes().saturating_sub(before);
    println!(
        "{size} patterns: compiled once in {took:.1?}, {per_pattern:.1} bytes per pattern without its text, resident memory grew by {} KiB",
        grown / 1024
    );
    drop(rules);
}

fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Returns names spread over the set, so that CPU cache misses are realistic.
fn sample_names(size: usize, name: impl Fn(usize) -> String) -> Vec<DomainName> {
    let spread = (0..4096).map(|at| name(at * 7919 % size));
    spread.map(|name| DomainName::parse(&name).unwrap_or_else(|error| panic!("{name}: {error}"))).collect()
}

fn bench_lookup(criterion: &mut Criterion, size: usize) {
    let set = host_set(size);
    let present = sample_names(size, |at| pattern(at).replace("*.", "below."));
    let absent = sample_names(size, |at| format!("not-there-{at}.team-1.cdn.example"));
    for (kind, names) in [("present", present), ("absent", absent)] {
        let mut next = names.iter().cycle();
        criterion.bench_function(&format!("lookup/{kind}/{size}"), |bench| {
            bench.iter(|| next.next().map(|name| set.hits(black_box(name)).count()));
        });
    }
}

fn bench_decide(criterion: &mut Criterion, size: usize, rules: &RuleSet) {
    let sandbox = SandboxId::parse("p").ok().and_then(|id| rules.sandboxes().get(&id).cloned());
    let Some(sandbox) = sandbox else { panic!("the policy has no sandbox") };
    let question = |name: DomainName| Facts::Name(NameFacts { name, query: QueryType::A });
    let allowed: Vec<Facts> =
        sample_names(size, |at| pattern(at).replace("*.", "below.")).into_iter().map(question).collect();
    let denied: Vec<Facts> =
        sample_names(size, |at| format!("not-there-{at}.example")).into_iter().map(question).collect();
    for (kind, facts) in [("allowed", allowed), ("denied", denied)] {
        let mut next = facts.iter().cycle();
        criterion.bench_function(&format!("decide/{kind}/{size}"), |bench| {
            bench.iter(|| next.next().map(|facts| rules.decide(&sandbox, black_box(facts))));
        });
    }
}

fn bench_compile(criterion: &mut Criterion, size: usize, sources: &LoadSources) {
    let mut group = criterion.benchmark_group("compile");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(5));
    group.bench_function(size.to_string(), |bench| {
        bench.iter_batched(|| (), |()| load(black_box(sources)), BatchSize::PerIteration);
    });
    group.finish();
}
