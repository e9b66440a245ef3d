//! Case 70 and the slow senders: hours in a moment, by an injected clock.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use audit::{Log, Receipt};
use dns_filter::message::Carrier;
use dns_filter::upstream::{AskError, Exchange, Told};
use dns_filter::{Config, Filter};
use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::RecordType;
use rules::DomainName;
use rules::facts::QueryType;
use rules::operator::{DnsSettings, PreResolve};
use tokio::time::{Instant, advance};

use crate::recorder::{a, name, with};
use crate::world::{A, ALLOW, from, query, rules};

/// An authoritative server of the adversary's, without sockets, so that the clock can be ours.
#[derive(Default)]
struct Adversary {
    got: Mutex<Vec<String>>,
}

impl Exchange for Adversary {
    fn ask<'a>(
        &'a self,
        asked: &'a DomainName,
        kind: QueryType,
        _: &'a Receipt,
    ) -> Pin<Box<dyn Future<Output = Result<Told, AskError>> + Send + 'a>> {
        self.got.lock().unwrap().push(asked.to_string());
        let mut question = Message::new(1, MessageType::Query, OpCode::Query);
        question.add_query(Query::query(name(&format!("{asked}.")), RecordType::from(kind.0)));
        let message = with(&question, vec![("", 60, a("93.184.216.34"))]);
        Box::pin(async move { Ok(Told { message, from: SocketAddr::from(([127, 0, 0, 1], 53)) }) })
    }

    fn has_zone(&self, _: &DomainName) -> bool {
        false
    }
}

/// Sends base32 of random bytes in names of `letters`, one each `pause`, for `hours`; says the bytes that got out in each hour.
async fn slow_sender(pause: Duration, letters: usize, hours: u32) -> Vec<usize> {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(audit::Config::new(dir.path())).unwrap();
    let adversary = Arc::new(Adversary::default());
    let mut settings = DnsSettings::new(Vec::new());
    (settings.pre_resolve, settings.grid_milliseconds) = (PreResolve::Off, 1000);
    settings.forwards_per_hour = 240;
    let config = Config { settings, budgets: None };
    let rules = Arc::new(ArcSwap::from_pointee(rules(ALLOW, 1)));
    let filter = Filter::with_upstreams(rules, log, config, adversary.clone()).unwrap();
    let begun = Instant::now();
    let mut out = Vec::new();
    let mut state = 12345u64;
    for hour in 1..=hours {
        let before = adversary.got.lock().unwrap().len();
        while begun.elapsed() < Duration::from_secs(3600) * hour {
            let label: String = (0..letters)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    char::from(b"abcdefghijklmnopqrstuvwxyz234567"[(state >> 59) as usize])
                })
                .collect();
            filter
                .answer(&query(&format!("{label}.wild.example"), A), &from("s", Carrier::Udp))
                .await;
            advance(pause).await;
        }
        let sent = adversary.got.lock().unwrap().len() - before;
        out.push(sent * letters * 5 / 8);
    }
    out
}

#[tokio::test(start_paused = true)]
async fn slow_base32_gets_out_no_more_than_the_budget() {
    for (pause, letters) in [(10, 20), (60, 20), (60, 60), (10, 4)] {
        let out = slow_sender(Duration::from_secs(pause), letters, 4).await;
        println!("one query per {pause} s of {letters} letters: {out:?} bytes in each hour");
        // By rule: S = 4096 and B = 2048 bits; 5 of the 5.3 bits an octet costs can carry payload.
        assert!(out[0] <= (4096 + 2048) / 8, "{out:?}");
        assert!(out[1..].iter().all(|bytes| *bytes <= (2048 + 400) / 8), "{out:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn case_70_only_the_steady_clock_counts() {
    // Time that has not passed on the steady clock fills nothing, whatever the wall says.
    let out = slow_sender(Duration::from_millis(1), 60, 0).await;
    assert!(out.is_empty());
    let bucket = dns_filter::budget::Bucket::new(100.0, 3600.0, Instant::now());
    let level = bucket.level(Instant::now());
    advance(Duration::from_secs(10)).await;
    assert!((bucket.level(Instant::now()) - level).abs() < 1e-9, "full stays full");
}
