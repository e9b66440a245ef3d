//! Case 70 and slow senders: hours of traffic on a paused clock.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use audit::{Log, Receipt};
use dns_filter::message::DnsTransport;
use dns_filter::upstream::{UpstreamAnswer, UpstreamClient, UpstreamError};
use dns_filter::{DnsConfig, DnsFilter};
use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::RecordType;
use rules::DomainName;
use rules::configuration::{DnsSettings, PreResolve};
use rules::facts::QueryType;
use tokio::time::{Instant, advance};

use crate::fixture::{A, ALLOW, arrival_from, build_query, compile_rules};
use crate::recording_resolver::{a, name, reply_with};

/// An authoritative server of the adversary. It has no sockets, so that the clock can be paused.
#[derive(Default)]
pub(crate) struct Adversary {
    received: Mutex<Vec<String>>,
}

impl UpstreamClient for Adversary {
    fn ask<'a>(
        &'a self,
        asked: &'a DomainName,
        kind: QueryType,
        _: &'a Receipt,
    ) -> Pin<Box<dyn Future<Output = Result<UpstreamAnswer, UpstreamError>> + Send + 'a>> {
        self.received.lock().unwrap().push(asked.to_string());
        let mut question = Message::new(1, MessageType::Query, OpCode::Query);
        question.add_query(Query::query(name(&format!("{asked}.")), RecordType::from(kind.0)));
        let message = reply_with(&question, vec![("", 60, a("93.184.216.34"))]);
        Box::pin(async move { Ok(UpstreamAnswer { message, from: SocketAddr::from(([127, 0, 0, 1], 53)) }) })
    }

    fn has_zone(&self, _: &DomainName) -> bool {
        false
    }
}

/// Sends random base32 in labels of `letters` letters, one every `pause`, for `hours`; returns the bytes that left in
/// each hour.
async fn slow_sender(pause: Duration, letters: usize, hours: u32) -> Vec<usize> {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(audit::LogConfig::new(dir.path())).unwrap();
    let adversary = Arc::new(Adversary::default());
    let mut settings = DnsSettings::new(Vec::new());
    (settings.pre_resolve, settings.grid_milliseconds) = (PreResolve::Off, 1000);
    settings.forwards_per_hour = 240;
    let config = DnsConfig { settings, budgets: None };
    let rules = Arc::new(ArcSwap::from_pointee(compile_rules(ALLOW, 1)));
    let filter = DnsFilter::with_upstreams(rules, log, config, adversary.clone()).unwrap();
    let started = Instant::now();
    let mut out = Vec::new();
    let mut state = 12345u64;
    for hour in 1..=hours {
        let before = adversary.received.lock().unwrap().len();
        while started.elapsed() < Duration::from_secs(3600) * hour {
            let label: String = (0..letters)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    char::from(b"abcdefghijklmnopqrstuvwxyz234567"[(state >> 59) as usize])
                })
                .collect();
            filter
                .answer(
                    &build_query(&format!("{label}.wild.example"), A),
                    &arrival_from("s", DnsTransport::Udp),
                )
                .await;
            advance(pause).await;
        }
        let sent = adversary.received.lock().unwrap().len() - before;
        out.push(sent * letters * 5 / 8);
    }
    out
}

#[tokio::test(start_paused = true)]
async fn p14_slow_base32_gets_out_no_more_than_the_budget() {
    for (pause, letters) in [(10, 20), (60, 20), (60, 60), (10, 4)] {
        let out = slow_sender(Duration::from_secs(pause), letters, 4).await;
        println!("one query per {pause} s of {letters} letters: {out:?} bytes in each hour");
        // Per rule S = 4096 and B = 2048 bits; of the 5.3 bits that an octet costs, base32 uses 5.
        assert!(out[0] <= (4096 + 2048) / 8, "{out:?}");
        assert!(out[1..].iter().all(|bytes| *bytes <= (2048 + 400) / 8), "{out:?}");
    }
}

/// Builds a filter with the adversary's server as its only upstream.
fn build_filter(adversary: Arc<dyn UpstreamClient>) -> (Arc<DnsFilter>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(audit::LogConfig::new(dir.path())).unwrap();
    let mut settings = DnsSettings::new(Vec::new());
    (settings.pre_resolve, settings.grid_milliseconds) = (PreResolve::Off, 0);
    let config = DnsConfig { settings, budgets: None };
    let rules = Arc::new(ArcSwap::from_pointee(compile_rules(ALLOW, 1)));
    (DnsFilter::with_upstreams(rules, log, config, adversary).unwrap(), dir)
}

async fn ask(filter: &Arc<DnsFilter>, name: &str) -> crate::fixture::ClientAnswer {
    let answer = filter.answer(&build_query(name, A), &arrival_from("s", DnsTransport::Udp)).await;
    crate::fixture::ClientAnswer::parse(answer.unwrap())
}

#[tokio::test(start_paused = true)]
async fn p14_case_70_ttls_and_budgets_follow_the_monotonic_clock_only() {
    let adversary = Arc::new(Adversary::default());
    let (filter, _dir) = build_filter(adversary.clone());
    let wall = std::time::SystemTime::now();
    let long = |at: usize| format!("{at:04}{}.wild.example", "a".repeat(50));
    let fill = async |from: usize| {
        for at in from..from + 100 {
            ask(&filter, &long(at)).await;
        }
        adversary.received.lock().unwrap().len()
    };
    ask(&filter, "github.com").await;
    ask(&filter, "github.com").await;
    assert_eq!(adversary.received.lock().unwrap().len(), 1, "cached while no time passes");
    fill(0).await;
    let spent = fill(500).await;
    assert_eq!(fill(1000).await, spent, "no refill while no time passes");
    advance(Duration::from_secs(3600)).await;
    // Before `fill` uses up the budget again, because this name is charged as well.
    let before = adversary.received.lock().unwrap().len();
    for _ in 0..5 {
        // The paused clock jumps while the log's thread writes, which can refuse a query; ask again.
        ask(&filter, "github.com").await;
        if adversary.received.lock().unwrap().len() > before {
            break;
        }
    }
    assert_eq!(adversary.received.lock().unwrap().len(), before + 1, "its TTL has expired");
    assert!(fill(2000).await > spent + 1, "an hour of the monotonic clock refills an hour's bits");
    let passed = wall.elapsed().unwrap_or_default();
    assert!(passed < Duration::from_secs(600), "the wall clock has not moved an hour: {passed:?}");
}

#[test]
fn case_70_no_code_of_the_filter_reads_the_wall_clock() {
    let mut files = vec![std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
    let mut read = 0;
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        read += 1;
        assert!(!text.contains("SystemTime"), "{}", path.display());
    }
    assert!(read > 15, "{read}");
}

/// Returns a link-local address from its second answer on, with a TTL of 0.
#[derive(Default)]
struct Rebinder {
    asked: std::sync::atomic::AtomicUsize,
}

impl UpstreamClient for Rebinder {
    fn ask<'a>(
        &'a self,
        asked: &'a DomainName,
        kind: QueryType,
        _: &'a Receipt,
    ) -> Pin<Box<dyn Future<Output = Result<UpstreamAnswer, UpstreamError>> + Send + 'a>> {
        let first = self.asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0;
        let mut question = Message::new(1, MessageType::Query, OpCode::Query);
        question.add_query(Query::query(name(&format!("{asked}.")), RecordType::from(kind.0)));
        let address = if first { "93.184.216.34" } else { "169.254.169.254" };
        let message = reply_with(&question, vec![("", 0, a(address))]);
        Box::pin(async move { Ok(UpstreamAnswer { message, from: SocketAddr::from(([127, 0, 0, 1], 53)) }) })
    }

    fn has_zone(&self, _: &DomainName) -> bool {
        false
    }
}

#[tokio::test(start_paused = true)]
async fn p4_case_47_a_name_that_rebinds_to_an_internal_address_is_withheld() {
    let (filter, _dir) = build_filter(Arc::new(Rebinder::default()));
    assert_eq!(ask(&filter, "github.com").await.addresses().len(), 1);
    assert_eq!(ask(&filter, "github.com").await.addresses().len(), 1, "within the TTL floor");
    advance(Duration::from_secs(31)).await;
    let answer = ask(&filter, "github.com").await;
    assert!(answer.addresses().is_empty());
    assert_eq!(answer.ede.as_deref(), Some("private_address"));
}

/// A sandbox that spends its budget, leaves the configuration and returns finds it spent, refilled only by the time
/// that passed; and nothing of it remains once the budget is full again.
#[tokio::test(start_paused = true)]
async fn p14_leaving_and_returning_refills_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(audit::LogConfig::new(dir.path())).unwrap();
    let adversary = Arc::new(Adversary::default());
    let mut settings = DnsSettings::new(Vec::new());
    (settings.pre_resolve, settings.grid_milliseconds) = (PreResolve::Off, 0);
    let config = DnsConfig { settings, budgets: None };
    let with = Arc::new(compile_rules(ALLOW, 1));
    let rules = Arc::new(ArcSwap::from(with.clone()));
    let filter = DnsFilter::with_upstreams(rules.clone(), log, config, adversary.clone()).unwrap();
    let spend = async |from: usize| {
        let before = adversary.received.lock().unwrap().len();
        for at in from..from + 200 {
            let packet = build_query(&format!("x{at:040}.wild.example"), A);
            filter.answer(&packet, &arrival_from("s", DnsTransport::Udp)).await;
        }
        adversary.received.lock().unwrap().len() - before
    };
    let without = || {
        let text = "[[sandbox]]\nid = \"other\"\nbase = \"system\"\npolicies = [\"p\"]\n";
        let file =
            |path: &str, text: String| rules::SourceFile { path: path.into(), bytes: text.into_bytes() };
        let sources = rules::LoadSources {
            operator: Some(file("sandbar.toml", text.to_owned())),
            policies: vec![file("p.toml", format!("name = \"p\"\n{ALLOW}"))],
            generation: 2,
            ..rules::LoadSources::default()
        };
        Arc::new(rules::compile(&sources, &[]).unwrap())
    };
    let leave_and_return = || {
        rules.store(without());
        filter.prune_sandboxes();
        assert_eq!(filter.sandbox_count(), 0, "its state is dropped");
        rules.store(with.clone());
    };
    let first = spend(0).await;
    assert!(first > 10, "{first}");
    for round in 1..4 {
        leave_and_return();
        assert_eq!(spend(1000 * round).await, 0, "round {round}");
    }
    leave_and_return();
    advance(Duration::from_secs(1800)).await;
    let later = spend(9000).await;
    assert!((1..first / 2).contains(&later), "{later} after half an hour, {first} at first");
    rules.store(without());
    filter.prune_sandboxes();
    advance(Duration::from_secs(3 * 3600)).await;
    filter.prune_sandboxes();
    assert_eq!(filter.departed_count(), 0, "full again, so forgotten");
}
