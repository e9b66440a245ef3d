//! Every query is recorded or counted: those that join another, those that are cancelled, floods, and
//! what nobody sent.

use std::sync::Arc;
use std::time::Duration;

use dns_filter::message::Carrier;
use dns_filter::{Arrived, Resolver};
use rules::facts::{ConnectFacts, Ech, Facts, Protocol, Target};
use rules::word::SandboxId;
use rules::{Channel, Decision, DomainName, Host, Permit};

use crate::recorder::{Say, plain};
use crate::world::{A, ALLOW, Told, World, counted, from, packet, query};

pub(crate) fn permit(world: &World, name: &str) -> Permit {
    let host = Host::Name(DomainName::parse(name).unwrap());
    let protocol = Protocol::Tls { sni: Some(host.clone()), ech: Ech::Absent };
    let facts = Facts::Connect(ConnectFacts { target: Target::Named(host), port: 443, protocol });
    let rules = world.rules.load_full();
    let sandbox = rules.sandboxes().get(&SandboxId::parse("s").unwrap()).unwrap();
    match rules.decide(sandbox, &facts) {
        Decision::Allow(permit) => permit,
        Decision::Deny(denial) => panic!("{denial:?}"),
    }
}

/// Waits until the resolver has got `count` queries.
async fn sent(world: &World, count: usize) {
    while world.recorder.seen().len() < count {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_joins_a_query_in_flight_is_recorded_or_counted() {
    for (fold, own) in [(0, 49), (60, 2)] {
        let tune = |settings: &mut rules::operator::DnsSettings| {
            (settings.grid_milliseconds, settings.fold_seconds) = (200, fold);
        };
        let world = Arc::new(World::with(ALLOW, plain, tune).await);
        let ask = |world: Arc<World>| async move { world.ask("github.com", A).await };
        let all: Vec<_> = (0..50).map(|_| tokio::spawn(ask(world.clone()))).collect();
        for one in all {
            assert_eq!(one.await.unwrap().addresses().len(), 1);
        }
        assert_eq!(world.recorder.seen().len(), 1);
        let answered = world.staged("answered");
        assert_eq!(counted(&answered), 49, "with {fold} s of folding");
        assert_eq!(answered.len(), own, "with {fold} s of folding");
        assert_eq!(world.staged("decision").len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_joins_a_query_that_fails_is_recorded_too() {
    let world = Arc::new(
        World::with(ALLOW, |_, _| Say::Raw(vec![]), |settings| settings.grid_milliseconds = 200)
            .await,
    );
    let ask = |world: Arc<World>| async move { world.ask("github.com", A).await };
    let all: Vec<_> = (0..5).map(|_| tokio::spawn(ask(world.clone()))).collect();
    for one in all {
        assert_eq!(one.await.unwrap().ede.as_deref(), Some("resolver_unreachable"));
    }
    let denied = world.staged("denied");
    assert_eq!(counted(&denied), 4);
    assert!(denied.iter().all(|record| record["status_detail"] == "resolver_unreachable"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_look_up_gives_back_its_place_and_whoever_joined_asks_anew() {
    let silent = std::sync::atomic::AtomicBool::new(true);
    let world = Arc::new(
        World::scripted(move |query, over| {
            match silent.swap(false, std::sync::atomic::Ordering::SeqCst) {
                true => Say::Silence,
                false => plain(query, over),
            }
        })
        .await,
    );
    let resolver = Resolver::new(world.filter.clone());
    let permit = permit(&world, "github.com");
    let leading = tokio::spawn(async move { resolver.resolve(&permit).await });
    sent(&world, 2).await; // both types; one of them is never answered
    let joined = tokio::spawn({
        let world = world.clone();
        async move { (world.ask("github.com", A).await, world.ask("github.com", 28).await) }
    });
    tokio::time::sleep(Duration::from_millis(50)).await; // long enough to join
    leading.abort();
    assert!(leading.await.unwrap_err().is_cancelled());
    let (v4, v6) = joined.await.unwrap();
    assert_eq!(v4.addresses().len() + v6.addresses().len(), 2, "nobody is left behind");
    assert_eq!(world.filter.in_flight(), 0, "no place is lost");
    let abandoned = world
        .staged("outcome")
        .iter()
        .filter(|record| record.to_string().contains("abandoned"))
        .count();
    assert_eq!(abandoned, 1, "the cancelled query has its outcome");
}

#[tokio::test]
async fn cancelled_look_ups_do_not_add_up() {
    let world = World::scripted(|_, _| Say::Silence).await;
    let resolver = Resolver::new(world.filter.clone());
    let permit = permit(&world, "github.com");
    for _ in 0..20 {
        let soon = Duration::from_millis(5);
        assert!(tokio::time::timeout(soon, resolver.resolve(&permit)).await.is_err());
    }
    assert_eq!(world.filter.in_flight(), 0);
}

#[tokio::test]
async fn what_a_flood_left_uncounted_is_told_under_its_own_reason() {
    let world = World::with(ALLOW, plain, |settings| settings.fold_seconds = 10).await;
    for at in 0..1500 {
        world.ask(&format!("n{at}.evil.example"), A).await;
        world.ask("github.com", 16).await;
        world.ask("localhost", A).await;
        world.raw(&packet(0x100, b"\x03a+b\x00", A, 1, None)).await;
    }
    world.settled().await;
    let records = world.records();
    let dns: Vec<_> = records.into_iter().filter(|record| record["class_uid"] == 4003).collect();
    assert!(dns.len() < 3000, "{}", dns.len());
    for (reason, names) in [
        ("not_listed", "evil.example"),
        ("dns_type_not_allowed", "github.com"),
        ("allowed", "localhost"),
        ("bad_name", "a+b"),
    ] {
        let alike: Vec<_> =
            dns.iter().filter(|record| record["status_detail"] == reason).cloned().collect();
        assert_eq!(counted(&alike), 1500, "{reason}");
        let named = |record: &serde_json::Value| {
            record["query"]["hostname"].as_str().is_some_and(|name| name.ends_with(names))
        };
        assert!(alike.iter().all(named), "{reason}: only names that were asked for so");
    }
}

#[tokio::test]
async fn malformed_packets_are_all_counted_each_for_its_sandbox() {
    let world = World::new().await;
    for sandbox in ["s", "t"] {
        for _ in 0..300 {
            world.filter.answer(&[1, 2, 3], &from(sandbox, Carrier::Udp)).await;
        }
    }
    let denied = world.staged("denied");
    for sandbox in ["s", "t"] {
        let own: Vec<_> =
            denied.iter().filter(|record| record["actor"]["app_uid"] == sandbox).cloned().collect();
        assert_eq!(counted(&own), 300, "{sandbox}");
    }
}

#[tokio::test]
async fn an_interface_without_a_name_is_refused_and_recorded() {
    let world = World::new().await;
    let channel = Channel::Interface("unnamed/77".into());
    let arrived = Arrived { channel, ..from("s", Carrier::Udp) };
    let told = Told::read(world.filter.answer(&query("github.com", A), &arrived).await.unwrap());
    assert_eq!(told.ede.as_deref(), Some("unknown_channel"));
    assert_eq!(world.recorder.seen().len(), 0);
    let denied = world.staged("denied");
    assert_eq!(denied.len(), 1);
    assert!(denied[0].to_string().contains("unnamed/77"), "{}", denied[0]);
}
