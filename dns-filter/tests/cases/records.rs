//! Every query is recorded or counted: those that join a flight, those that are cancelled, floods, and packets on
//! unknown channels.

use std::sync::Arc;
use std::time::Duration;

use dns_filter::message::DnsTransport;
use dns_filter::{QueryArrival, Resolver};
use rules::facts::{ConnectFacts, ConnectTarget, EchPresence, Facts, Protocol};
use rules::ids::{Environment, SandboxId, Tenant};
use rules::{Channel, Decision, DomainName, Host, IdentityAssignment, Permit};

use crate::fixture::{
    A, ALLOW, ClientAnswer, DnsFixture, arrival_from, build_packet, build_query, count_queries,
};
use crate::recording_resolver::{ScriptedReply, plain_reply};

pub(crate) fn permit(world: &DnsFixture, name: &str) -> Permit {
    let host = Host::Name(DomainName::parse(name).unwrap());
    let protocol = Protocol::Tls { sni: Some(host.clone()), ech: EchPresence::Absent };
    let facts = Facts::Connect(ConnectFacts { target: ConnectTarget::Named(host), port: 443, protocol });
    let rules = world.rules.load_full();
    let sandbox = rules.sandboxes().get(&SandboxId::parse("s").unwrap()).unwrap();
    match rules.decide(sandbox, &facts) {
        Decision::Allow(permit) => permit,
        Decision::Deny(denial) => panic!("{denial:?}"),
    }
}

/// Waits until the resolver has received `count` queries.
async fn wait_for_queries(world: &DnsFixture, count: usize) {
    while world.recorder.seen().len() < count {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_that_joins_a_flight_is_recorded_or_counted() {
    for (fold, expected) in [(0, 49), (60, 2)] {
        let tune = |settings: &mut rules::configuration::DnsSettings| {
            (settings.grid_milliseconds, settings.fold_seconds) = (200, fold);
        };
        let world = Arc::new(DnsFixture::build(ALLOW, plain_reply, tune).await);
        let ask = |world: Arc<DnsFixture>| async move { world.ask("github.com", A).await };
        let all: Vec<_> = (0..50).map(|_| tokio::spawn(ask(world.clone()))).collect();
        for one in all {
            assert_eq!(one.await.unwrap().addresses().len(), 1);
        }
        assert_eq!(world.recorder.seen().len(), 1);
        let answered = world.records_at_stage("answered");
        assert_eq!(count_queries(&answered), 49, "with {fold} s of folding");
        assert_eq!(answered.len(), expected, "with {fold} s of folding");
        assert_eq!(world.records_at_stage("decision").len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_that_joins_a_failing_flight_is_recorded() {
    let world = Arc::new(
        DnsFixture::build(
            ALLOW,
            |_, _| ScriptedReply::Raw(vec![]),
            |settings| settings.grid_milliseconds = 200,
        )
        .await,
    );
    let ask = |world: Arc<DnsFixture>| async move { world.ask("github.com", A).await };
    let all: Vec<_> = (0..5).map(|_| tokio::spawn(ask(world.clone()))).collect();
    for one in all {
        assert_eq!(one.await.unwrap().ede.as_deref(), Some("resolver_unreachable"));
    }
    let denied = world.records_at_stage("denied");
    assert_eq!(count_queries(&denied), 4);
    assert!(denied.iter().all(|record| record["status_detail"] == "resolver_unreachable"));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_cancelled_leader_the_joined_queries_ask_again() {
    let silent = std::sync::atomic::AtomicBool::new(true);
    let world = Arc::new(
        DnsFixture::with_script(move |query, over| {
            match silent.swap(false, std::sync::atomic::Ordering::SeqCst) {
                true => ScriptedReply::Silence,
                false => plain_reply(query, over),
            }
        })
        .await,
    );
    let resolver = Resolver::new(world.filter.clone());
    let permit = permit(&world, "github.com");
    let leading = tokio::spawn(async move { resolver.resolve(&permit).await });
    wait_for_queries(&world, 2).await; // both types; the resolver never answers one of them
    let joined = tokio::spawn({
        let world = world.clone();
        async move { (world.ask("github.com", A).await, world.ask("github.com", 28).await) }
    });
    tokio::time::sleep(Duration::from_millis(50)).await; // long enough to join
    leading.abort();
    assert!(leading.await.unwrap_err().is_cancelled());
    let (v4, v6) = joined.await.unwrap();
    assert_eq!(v4.addresses().len() + v6.addresses().len(), 2, "both joined queries are answered");
    assert_eq!(world.filter.in_flight(), 0, "the cancelled query is no longer counted");
    let abandoned = world
        .records_at_stage("outcome")
        .iter()
        .filter(|record| record.to_string().contains("abandoned"))
        .count();
    assert_eq!(abandoned, 1, "the cancelled query has its outcome");
}

#[tokio::test]
async fn p17_cancelled_look_ups_do_not_accumulate() {
    let world = DnsFixture::with_script(|_, _| ScriptedReply::Silence).await;
    let resolver = Resolver::new(world.filter.clone());
    let permit = permit(&world, "github.com");
    for _ in 0..20 {
        let soon = Duration::from_millis(5);
        assert!(tokio::time::timeout(soon, resolver.resolve(&permit)).await.is_err());
    }
    assert_eq!(world.filter.in_flight(), 0);
}

#[tokio::test]
async fn queries_of_a_flood_are_summarised_by_reason() {
    let world = DnsFixture::build(ALLOW, plain_reply, |settings| settings.fold_seconds = 10).await;
    for at in 0..1500 {
        world.ask(&format!("n{at}.evil.example"), A).await;
        world.ask("github.com", 16).await;
        world.ask("localhost", A).await;
        world.send_packet(&build_packet(0x100, b"\x03a+b\x00", A, 1, None)).await;
    }
    world.wait_for_findings().await;
    let records = world.records();
    let dns: Vec<_> = records.into_iter().filter(|record| record["class_uid"] == 4003).collect();
    assert!(dns.len() < 3000, "{}", dns.len());
    for (reason, names) in [
        ("not_listed", "evil.example"),
        ("dns_type_not_allowed", "github.com"),
        ("allowed", "localhost"),
        ("bad_name", "a+b"),
    ] {
        let same_reason: Vec<_> =
            dns.iter().filter(|record| record["status_detail"] == reason).cloned().collect();
        assert_eq!(count_queries(&same_reason), 1500, "{reason}");
        let named = |record: &serde_json::Value| {
            record["query"]["hostname"].as_str().is_some_and(|name| name.ends_with(names))
        };
        assert!(same_reason.iter().all(named), "{reason}: only names refused for this reason");
    }
}

#[tokio::test]
async fn malformed_packets_are_counted_per_sandbox() {
    let world = DnsFixture::new().await;
    for sandbox in ["s", "t"] {
        for _ in 0..300 {
            world.filter.answer(&[1, 2, 3], &arrival_from(sandbox, DnsTransport::Udp)).await;
        }
    }
    let denied = world.records_at_stage("denied");
    for sandbox in ["s", "t"] {
        let of_sandbox: Vec<_> =
            denied.iter().filter(|record| record["actor"]["app_uid"] == sandbox).cloned().collect();
        assert_eq!(count_queries(&of_sandbox), 300, "{sandbox}");
    }
}

#[tokio::test]
async fn p2_an_interface_without_a_name_is_refused_and_recorded() {
    let world = DnsFixture::new().await;
    let channel = Channel::Interface("unnamed/77".into());
    let arrived = QueryArrival { channel, ..arrival_from("s", DnsTransport::Udp) };
    let answer =
        ClientAnswer::parse(world.filter.answer(&build_query("github.com", A), &arrived).await.unwrap());
    assert_eq!(answer.ede.as_deref(), Some("unknown_channel"));
    assert_eq!(world.recorder.seen().len(), 0);
    let denied = world.records_at_stage("denied");
    assert_eq!(denied.len(), 1);
    assert!(denied[0].to_string().contains("unnamed/77"), "{}", denied[0]);
}

/// After an assignment, what is denied, cached, local or folded is recorded with the new tenant, whether or not a
/// look-up has left since.
#[tokio::test]
async fn p2_every_record_has_the_identity_of_its_generation() {
    for fold in [0, 60] {
        let world = DnsFixture::build(ALLOW, plain_reply, |settings| settings.fold_seconds = fold).await;
        let ask_all = async || {
            for (name, kind) in [("github.com", A), ("evil.example", A), ("github.com", 16), ("localhost", A)]
            {
                world.ask_as("t", name, kind).await;
            }
        };
        ask_all().await;
        let given = IdentityAssignment {
            sandbox: SandboxId::parse("t").unwrap(),
            tenant: Tenant::parse("initech").unwrap(),
            environment: Environment::parse("staging").unwrap(),
            agent_card: None,
        };
        world.rules.store(Arc::new(world.rules.load().with_identity(&given).unwrap()));
        ask_all().await;
        for record in world.records().iter().filter(|record| record["class_uid"] == 4003) {
            let tenant = if record["policy"]["version"] == "2" { "initech" } else { "unset" };
            assert_eq!(record["metadata"]["tenant_uid"], tenant, "{fold}: {record}");
        }
        assert_eq!(world.recorder.seen().len(), 1, "the second time, nothing left");
    }
}
