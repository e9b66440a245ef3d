//! The metrics: each query counts under one outcome; the gauge of queries in flight returns to 0.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};

use crate::fixture::{A, ALLOW, DnsFixture, TXT};
use crate::recording_resolver::plain_reply;

/// A metrics recorder that keeps values by name and first label.
#[derive(Clone, Default)]
struct MetricsBoard(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

struct SampleCount(Arc<AtomicU64>);

impl HistogramFn for SampleCount {
    fn record(&self, _: f64) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl MetricsBoard {
    fn cell(&self, key: &Key) -> Arc<AtomicU64> {
        let label = key.labels().next().map_or("", |label| label.value());
        let name = format!("{} {label}", key.name());
        self.0.lock().unwrap().entry(name).or_default().clone()
    }

    fn read(&self, name: &str) -> u64 {
        self.0.lock().unwrap().get(name).expect(name).load(Ordering::SeqCst)
    }
}

impl Recorder for MetricsBoard {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.cell(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.cell(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(SampleCount(self.cell(key))))
    }
}

#[tokio::test]
async fn each_query_is_counted_under_one_outcome() {
    let board = MetricsBoard::default();
    metrics::set_global_recorder(board.clone()).expect("the only recorder in this process");
    let world = DnsFixture::build(ALLOW, plain_reply, |_| {}).await;
    world.ask("github.com", A).await;
    world.ask("github.com", A).await;
    world.ask("github.com", A).await;
    world.ask("localhost", A).await;
    world.ask("pastebin.com", A).await;
    world.ask("github.com", TXT).await;
    world.send_packet(&[1, 2, 3]).await;
    let mut budget = 0;
    for at in 0..40 {
        let answer = world.ask(&format!("{at:02}{}.wild.example", "a".repeat(60)), A).await;
        budget += u64::from(answer.ede.as_deref() == Some("dns_budget"));
    }
    let queries = |outcome: &str| board.read(&format!("sandbar_dns_queries_total {outcome}"));
    assert_eq!((queries("cached"), queries("here"), queries("unread")), (2, 1, 1));
    assert!(budget > 0);
    assert_eq!(queries("sent"), 1 + 40 - budget);
    assert_eq!(queries("refused"), 2 + budget);
    assert_eq!(queries("joined"), 0);
    assert_eq!(board.read("sandbar_dns_budget_refusals_total "), budget);
    assert_eq!(board.read("sandbar_dns_upstream_seconds "), queries("sent"));
    assert_eq!(f64::from_bits(board.read("sandbar_dns_in_flight ")), 0.0);
}
