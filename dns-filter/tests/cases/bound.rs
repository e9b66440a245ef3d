//! P14: an observer at the resolver learns at most S + B·t bits from names, plus the timing term, whatever a sandbox
//! asks and whenever. The tests run the whole filter on a paused clock.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use audit::{Log, Receipt};
use dns_filter::budget::{RULE_BURST, RULE_RATE, SANDBOX_BURST, SANDBOX_RATE, timing_bits};
use dns_filter::message::DnsTransport;
use dns_filter::upstream::{UpstreamAnswer, UpstreamClient, UpstreamError};
use dns_filter::{DnsConfig, DnsFilter};
use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::RecordType;
use proptest::prelude::*;
use rules::DomainName;
use rules::configuration::{DnsSettings, PreResolve};
use rules::facts::QueryType;
use tokio::time::{Instant, sleep};

use crate::fixture::{arrival_from, build_query, compile_rules};
use crate::recording_resolver::{a, name, reply_with};

const POLICY: &str = "[[allow]]\nname = \"wide\"\nhosts = [\"*.a.example\", \"*.b.example\", \"c.example\"]\n[[allow]]\nname = \"poor\"\nhosts = [\"*.d.example\"]\ndns_bits_per_hour = 512\n";
const BASES: [&str; 3] = ["a.example", "b.example", "d.example"];
const GRID: Duration = Duration::from_secs(1);
const FORWARDS: u64 = 240;
const HOUR: f64 = 3600.0;

/// An upstream that records everything that leaves.
#[derive(Default)]
struct Observer {
    observed: Mutex<Vec<(Instant, String, u16)>>,
}

impl UpstreamClient for Observer {
    fn ask<'a>(
        &'a self,
        asked: &'a DomainName,
        kind: QueryType,
        _: &'a Receipt,
    ) -> Pin<Box<dyn Future<Output = Result<UpstreamAnswer, UpstreamError>> + Send + 'a>> {
        self.observed.lock().unwrap().push((Instant::now(), asked.to_string(), kind.0));
        let mut question = Message::new(1, MessageType::Query, OpCode::Query);
        question.add_query(Query::query(name(&format!("{asked}.")), RecordType::from(kind.0)));
        let message = reply_with(&question, vec![("", 0, a("93.184.216.34"))]);
        Box::pin(async move { Ok(UpstreamAnswer { message, from: SocketAddr::from(([127, 0, 0, 1], 53)) }) })
    }

    fn has_zone(&self, _: &DomainName) -> bool {
        false
    }
}

/// A query of the adversary, `pause` milliseconds after the one before.
#[derive(Clone, Debug)]
struct AdversaryQuery {
    pause: u64,
    base: usize,
    label: String,
    kind: u16,
    /// Whether to repeat an earlier name instead.
    again: bool,
}

fn any_query() -> impl Strategy<Value = AdversaryQuery> {
    let pause = prop_oneof![4 => 0u64..1500, 2 => 0u64..90_000, 1 => 0u64..3_000_000];
    let kind = proptest::sample::select(vec![1u16, 28, 65]);
    (pause, 0usize..3, "[a-z0-9]{1,50}", kind, any::<bool>())
        .prop_map(|(pause, base, label, kind, again)| AdversaryQuery { pause, base, label, kind, again })
}

/// Sends a stream without waiting for answers; returns the start time and what left.
async fn observe_stream(stream: &[AdversaryQuery]) -> (Instant, Vec<(Instant, String, u16)>) {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(audit::LogConfig::new(dir.path())).unwrap();
    let observer = Arc::new(Observer::default());
    let mut settings = DnsSettings::new(Vec::new());
    settings.pre_resolve = PreResolve::Off;
    settings.grid_milliseconds = GRID.as_millis() as u64;
    settings.forwards_per_hour = FORWARDS;
    let config = DnsConfig { settings, budgets: None };
    let rules = Arc::new(ArcSwap::from_pointee(compile_rules(POLICY, 1)));
    let started = Instant::now();
    let filter = DnsFilter::with_upstreams(rules, log, config, observer.clone()).unwrap();
    let mut names: Vec<String> = Vec::new();
    let mut all = tokio::task::JoinSet::new();
    for one in stream {
        sleep(Duration::from_millis(one.pause)).await; // not `advance`: timers in between fire on time
        let fresh = format!("{}.{}", one.label, BASES[one.base]);
        let name = match names.get(one.label.len() % names.len().max(1)) {
            Some(earlier) if one.again => earlier.clone(),
            Some(_) | None => fresh,
        };
        names.push(name.clone());
        let (filter, packet) = (filter.clone(), build_query(&name, one.kind));
        all.spawn(async move { filter.answer(&packet, &arrival_from("s", DnsTransport::Udp)).await });
        tokio::task::yield_now().await;
    }
    while all.join_next().await.is_some() {}
    let observed = observer.observed.lock().unwrap().clone();
    (started, observed)
}

/// Counts the bits in the names with the observer's own code: letters and type of a new name, or the index of a
/// repeated one.
fn name_bits(observed: &[(Instant, String, u16)]) -> (f64, HashMap<&'static str, f64>) {
    let mut known = HashSet::new();
    let mut by_rule: HashMap<&'static str, f64> = HashMap::new();
    for (_, name, kind) in observed {
        let base = BASES.into_iter().find(|base| name.ends_with(base)).expect("an allowed name");
        let bits = match known.insert((name, kind)) {
            true => (name.len() - base.len() - 1) as f64 * 36f64.log2() + 3f64.log2(),
            false => (known.len() as f64).log2(),
        };
        *by_rule.entry(if base == "d.example" { "poor" } else { "wide" }).or_default() += bits;
    }
    (by_rule.values().sum(), by_rule)
}

/// Counts the bits in the timing: log2 of the number of ways to spread queries over the points of the grid.
fn moment_bits(points: f64, queries: usize) -> f64 {
    (1..=queries).map(|at| ((points + at as f64 - 1.0) / at as f64).log2()).sum()
}

fn check_bound(started: Instant, observed: &[(Instant, String, u16)]) {
    for count in 1..=observed.len() {
        let time = observed[count - 1].0 - started;
        let off = time.as_millis() % GRID.as_millis();
        assert_eq!(off, 0, "query {count} left {off} ms after a grid point");
        let hours = time.as_secs_f64() / HOUR;
        let (bits, by_rule) = name_bits(&observed[..count]);
        for (rule, bits) in by_rule {
            let (burst, rate) = if rule == "poor" { (1024.0, 512.0) } else { (RULE_BURST, RULE_RATE) };
            assert!(bits <= burst + rate * hours, "{rule}: {bits} bits in {hours} h");
        }
        let limit = FORWARDS as f64 * (1.0 + hours);
        assert!(count as f64 <= limit + 1e-6, "{count} queries in {hours} h");
        let stated = SANDBOX_BURST + SANDBOX_RATE * hours + timing_bits(limit, time + GRID, GRID);
        let points = time.as_secs_f64() / GRID.as_secs_f64() + 1.0;
        let learned = bits + moment_bits(points, count);
        assert!(learned <= stated, "{learned} of {stated} bits in {hours} h");
    }
}

fn run_stream(stream: &[AdversaryQuery]) -> usize {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let (started, observed) = runtime.block_on(observe_stream(stream));
    check_bound(started, &observed);
    observed.len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    // proves: dns.grid_milliseconds
    #[test]
    fn p14_no_stream_carries_more_than_burst_rate_and_timing(
        stream in proptest::collection::vec(any_query(), 1..160)
    ) {
        run_stream(&stream);
    }
}

/// The bound is tight: a greedy sender reaches it, and then nothing more leaves.
#[test]
fn p14_a_greedy_sender_gets_what_it_may_and_no_more() {
    let label = |at: usize| format!("{at:04}{}", "z".repeat(46));
    let stream: Vec<AdversaryQuery> = (0..400)
        .map(|at| AdversaryQuery { pause: 10, base: at % 3, label: label(at), kind: 1, again: false })
        .collect();
    let left = run_stream(&stream);
    let price = 51.0 * 5.3;
    assert!((left as f64) < (2.0 * RULE_BURST) / price, "{left}");
    assert!(left as f64 > 0.8 * (RULE_BURST + 1024.0) / (price + 12.0), "{left}");
}

/// Queries that choose almost nothing are bounded by their number, because of their timing.
// proves: dns.forwards_per_hour
#[test]
fn p14_queries_that_choose_nothing_are_bounded_by_number() {
    // A few short names, each repeated after its answer has expired: about 348 queries per hour.
    let label = |at: usize| char::from(b'a' + (at % 25) as u8).to_string();
    let stream: Vec<AdversaryQuery> = (0..1200)
        .map(|at| AdversaryQuery { pause: 10_334, base: at % 3, label: label(at), kind: 1, again: false })
        .collect();
    let left = run_stream(&stream);
    assert!((700..1100).contains(&left), "{left} of 1200");
}
