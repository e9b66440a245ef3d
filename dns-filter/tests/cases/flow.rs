//! Cases 54 to 61, 65, 66 and 69: reload, isolation, spoofing, failure, floods; records, synthetic addresses,
//! pre-resolution.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hickory_proto::op::ResponseCode;
use rules::configuration::PreResolve;
use rules::facts::{ConnectFacts, ConnectTarget, EchPresence, Facts, Protocol};
use rules::ids::SandboxId;
use rules::{Decision, DomainName, Host};

use crate::fixture::{A, AAAA, ALLOW, DnsFixture, compile_rules};
use crate::recording_resolver::{ScriptedReply, UpstreamTransport, a, error_reply, plain_reply, reply_with};

#[tokio::test]
async fn p10_case_54_a_reload_revokes_cached_answers_at_once() {
    let world = DnsFixture::new().await;
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    world.rules.store(Arc::new(compile_rules(&format!("{ALLOW}\n[[deny]]\nhosts = [\"x.example\"]\n"), 2)));
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    world.rules.store(Arc::new(compile_rules(&ALLOW.replace(", \"github.com\"", ""), 3)));
    assert_eq!(world.ask("github.com", A).await.ede.as_deref(), Some("not_listed"));
    world.rules.store(Arc::new(compile_rules(ALLOW, 4)));
    let before = world.recorder.seen().len();
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    assert_eq!(world.recorder.seen().len(), before + 1, "a revoked answer is not reused");
}

#[tokio::test]
async fn p10_case_54_a_reload_revokes_pre_resolved_and_synthetic_answers_at_once() {
    let policy = format!(
        "{ALLOW}\n[[allow]]\nname = \"db\"\nhosts = [\"db.corp.example\"]\ntcp = [5432]\nresolves_to = [\"10.1.0.0/16\"]\n"
    );
    let world =
        DnsFixture::build(&policy, plain_reply, |settings| settings.pre_resolve = PreResolve::On).await;
    world.filter.pre_resolve_once().await;
    let asked = world.recorder.seen().len();
    assert!(asked > 0, "names were pre-resolved");
    let synthetic = world.ask("db.corp.example", A).await.addresses();
    assert_eq!(synthetic[0].to_string(), "198.18.0.1");
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    let fewer = ALLOW.replace(", \"github.com\"", "");
    for (generation, closed) in [(2, false), (3, true)] {
        let fewer = compile_rules(&fewer, generation);
        world.rules.store(Arc::new(if closed { fewer.to_closed() } else { fewer }));
        let reason = if closed { "policy_invalid" } else { "not_listed" };
        for name in ["github.com", "db.corp.example"] {
            let answer = world.ask(name, A).await;
            assert_eq!(answer.ede.as_deref(), Some(reason), "{name}");
            assert!(answer.addresses().is_empty(), "{name}");
        }
    }
    assert_eq!(world.recorder.seen().len(), asked, "nothing left");
    world.rules.store(Arc::new(compile_rules(&policy, 5)));
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    assert_eq!(world.ask("db.corp.example", A).await.addresses(), synthetic, "for the sandbox's life");
}

#[tokio::test]
async fn case_55_sandboxes_share_no_answer() {
    let world = DnsFixture::new().await;
    world.ask_as("s", "github.com", A).await;
    world.ask_as("t", "github.com", A).await;
    world.ask_as("s", "github.com", A).await;
    assert_eq!(world.recorder.seen().len(), 2);
}

#[tokio::test]
async fn case_56_answers_that_fit_nothing_are_ignored_and_lead_to_tcp() {
    let world = DnsFixture::with_script(|query, over| {
        let good = reply_with(query, vec![("", 300, a("93.184.216.34"))]);
        if over == UpstreamTransport::Tcp {
            return ScriptedReply::Answer(good);
        }
        let mut id = reply_with(query, vec![("", 300, a("66.66.66.66"))]);
        id.metadata.id = !id.metadata.id;
        let mut case = reply_with(query, vec![("", 300, a("66.66.66.66"))]);
        let name = case.queries[0].name.to_string();
        let swapped: String = name
            .chars()
            .map(|c| if c.is_ascii_uppercase() { c.to_ascii_lowercase() } else { c.to_ascii_uppercase() })
            .collect();
        case.queries[0].name = crate::recording_resolver::name(&swapped);
        let bad = [id.to_vec().unwrap(), case.to_vec().unwrap(), vec![1, 2, 3]];
        let one = query.queries[0].name.to_lowercase().to_string().starts_with("few");
        let mut packets: Vec<Vec<u8>> = bad.iter().cycle().take(if one { 3 } else { 9 }).cloned().collect();
        packets.extend(one.then(|| good.to_vec().unwrap()));
        ScriptedReply::Raw(packets)
    })
    .await;
    let good: std::net::IpAddr = "93.184.216.34".parse().unwrap();
    assert_eq!(world.ask("few.wild.example", A).await.addresses(), [good]);
    assert!(world.recorder.seen().iter().all(|seen| seen.over == UpstreamTransport::Udp));
    assert_eq!(world.ask("many.wild.example", A).await.addresses(), [good]);
    assert_eq!(world.recorder.seen().last().unwrap().over, UpstreamTransport::Tcp);
}

#[tokio::test]
async fn case_57_ports_ids_and_case_are_random() {
    let policy = "[[allow]]\nname = \"wild\"\nhosts = [\"*.wild.example\"]\ndns_bits_per_hour = 1000000\n[budget]\ndns_bits_per_hour = 1000000\n";
    let world = DnsFixture::build(policy, plain_reply, |_| {}).await;
    for at in 0..100 {
        world.ask(&format!("name{at}.wild.example"), A).await;
    }
    let seen = world.recorder.seen();
    assert_eq!(seen.len(), 100);
    let ports: HashSet<u16> = seen.iter().map(|one| one.source.port()).collect();
    let ids: HashSet<u16> = seen.iter().map(|one| one.message.metadata.id).collect();
    assert!(ports.len() > 30 && ids.len() > 90, "{} ports, {} ids", ports.len(), ids.len());
    assert!(
        seen.iter()
            .filter(|one| one.message.queries[0].name.to_string().bytes().any(|b| b.is_ascii_uppercase()))
            .count()
            > 95
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn case_58_one_question_is_asked_once_at_a_time() {
    let world =
        Arc::new(DnsFixture::build(ALLOW, plain_reply, |settings| settings.grid_milliseconds = 200).await);
    let all: Vec<_> = (0..50)
        .map(|_| {
            let world = world.clone();
            tokio::spawn(async move { world.ask("github.com", A).await.addresses().len() })
        })
        .collect();
    for one in all {
        assert_eq!(one.await.unwrap(), 1);
    }
    assert_eq!(world.recorder.seen().len(), 1);
}

#[tokio::test]
async fn p16_case_59_a_resolver_that_fails_fails_closed() {
    for code in [ResponseCode::ServFail, ResponseCode::Refused, ResponseCode::NotImp] {
        let world =
            DnsFixture::with_script(move |query, _| ScriptedReply::Answer(error_reply(query, code))).await;
        let answer = world.ask("github.com", A).await;
        assert_eq!(
            (answer.code(), answer.ede.as_deref()),
            (ResponseCode::ServFail, Some("resolver_unreachable"))
        );
        assert!(world.reasons().contains(&"resolver_unreachable".to_owned()));
    }
    let down = DnsFixture::build(ALLOW, plain_reply, |settings| {
        settings.upstreams = vec!["127.0.0.1:9".parse().unwrap()]
    })
    .await;
    assert_eq!(down.ask("github.com", A).await.code(), ResponseCode::ServFail);
}

#[tokio::test]
async fn case_59_another_resolver_takes_over() {
    let world = DnsFixture::build(ALLOW, plain_reply, |settings| {
        settings.upstreams.insert(0, "127.0.0.1:9".parse().unwrap())
    })
    .await;
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
}

#[tokio::test]
async fn case_60_a_resolver_without_edns_is_asked_without_it() {
    let world = DnsFixture::with_script(|query, _| match &query.edns {
        Some(_) => ScriptedReply::Answer(error_reply(query, ResponseCode::FormErr)),
        None => ScriptedReply::Answer(reply_with(query, vec![("", 300, a("93.184.216.34"))])),
    })
    .await;
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    assert_eq!(world.recorder.seen().len(), 2);
}

#[tokio::test]
async fn case_61_our_own_query_that_comes_back_is_not_forwarded() {
    let world = Arc::new(DnsFixture::with_script(|_, _| ScriptedReply::Silence).await);
    let asking = tokio::spawn({
        let world = world.clone();
        async move { world.ask("github.com", A).await.code() }
    });
    while world.recorder.seen().is_empty() {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    let ours = world.recorder.seen()[0].packet.clone();
    for sandbox in ["s", "t"] {
        let back = crate::fixture::arrival_from(sandbox, dns_filter::message::DnsTransport::Udp);
        let soon = std::time::Duration::from_millis(500);
        let answer = tokio::time::timeout(soon, world.filter.answer(&ours, &back)).await;
        let answer = crate::fixture::ClientAnswer::parse(answer.expect("at once").unwrap());
        assert_eq!(
            (answer.code(), answer.ede.as_deref()),
            (ResponseCode::ServFail, Some("resolver_unreachable")),
            "{sandbox}"
        );
    }
    assert_eq!(world.recorder.seen().len(), 1, "the loop ends here");
    let mut other = ours.clone();
    other[0] ^= 0xff; // a sandbox cannot know the id or the letter case
    let from = crate::fixture::arrival_from("t", dns_filter::message::DnsTransport::Udp);
    let soon = std::time::Duration::from_millis(100);
    let waits = tokio::time::timeout(soon, world.filter.answer(&other, &from)).await;
    assert!(waits.is_err(), "a sandbox's own query for the same name is forwarded");
    assert_eq!(asking.await.unwrap(), ResponseCode::ServFail);
    world.wait_for_findings().await;
    let records = world.records();
    let findings = records.iter().filter(|record| record["status_detail"] == "dns_forwarding_loop");
    assert_eq!(findings.count(), 2, "one for each sandbox it came back through");
}

#[tokio::test]
async fn case_62_a_query_sent_to_another_resolver_is_flagged_in_its_record() {
    let world = DnsFixture::new().await;
    let around = dns_filter::QueryArrival {
        original_dst: Some("8.8.8.8:53".parse().unwrap()),
        toward: dns_filter::QueryTarget::Elsewhere,
        ..crate::fixture::arrival_from("s", dns_filter::message::DnsTransport::Udp)
    };
    for name in ["github.com", "github.com", "pastebin.com"] {
        world.filter.answer(&crate::fixture::build_query(name, A), &around).await.unwrap();
    }
    world.ask("api.openai.com", A).await;
    world.wait_for_findings().await;
    let records = world.records();
    let flagged = |stage: &str| {
        let matches = |record: &&serde_json::Value| {
            record["unmapped"]["sandbar"]["stage"] == stage
                && record.to_string().contains("dns_bypass_attempt")
        };
        records.iter().filter(matches).count()
    };
    assert_eq!((flagged("decision"), flagged("answered"), flagged("denied")), (1, 1, 1));
    let findings: Vec<_> =
        records.iter().filter(|record| record["status_detail"] == "dns_bypass_attempt").collect();
    assert_eq!(findings.len(), 1, "one finding, not one per query");
    assert!(findings[0].to_string().contains("8.8.8.8:53"));
}

#[tokio::test]
async fn p17_case_65_a_flood_of_refused_names_is_counted() {
    let world = DnsFixture::build(ALLOW, plain_reply, |settings| settings.fold_seconds = 10).await;
    for at in 0..20_000 {
        world.ask(&format!("n{at}.evil.example"), A).await;
    }
    world.wait_for_findings().await;
    assert_eq!(world.recorder.seen().len(), 0);
    let records = world.records();
    let denied: Vec<_> = records.iter().filter(|record| record["class_uid"] == 4003).collect();
    let folded: u64 =
        denied.iter().map(|record| record["unmapped"]["sandbar"]["folded"].as_u64().unwrap_or(0) + 1).sum();
    assert_eq!(folded, 20_000, "every one is counted");
    assert!(denied.len() < 20_000 / 4, "{}", denied.len());
}

#[tokio::test]
async fn p14_case_66_a_flood_under_a_wildcard_is_stopped_by_the_budget() {
    let world = DnsFixture::new().await;
    let mut passed = 0;
    for at in 0..200 {
        let answer = world.ask(&format!("{at:04}{}.wild.example", "a".repeat(40)), A).await;
        passed += usize::from(!answer.addresses().is_empty());
        if answer.addresses().is_empty() {
            assert_eq!(answer.ede.as_deref(), Some("dns_budget"));
        }
    }
    assert!((5..25).contains(&passed), "{passed}");
    assert_eq!(world.recorder.seen().len(), passed);
    assert_eq!(
        world.ask(&format!("0000{}.wild.example", "a".repeat(40)), A).await.addresses().len(),
        1,
        "cached answers still work"
    );
    let records = world.records();
    let findings = records.iter().filter(|record| record["status_detail"] == "dns_budget_exhausted").count();
    assert_eq!(findings, 1, "one finding, not one per query");
}

#[tokio::test]
async fn p7_case_69_without_a_log_nothing_leaves() {
    let world = DnsFixture::new().await;
    world.log.close();
    let answer = world.ask("github.com", A).await;
    assert_eq!((answer.code(), answer.ede.as_deref()), (ResponseCode::ServFail, Some("log_unwritable")));
    assert_eq!(world.recorder.seen().len(), 0);
}

#[tokio::test]
async fn p7_the_record_is_written_before_the_query_leaves() {
    let order = Arc::new(AtomicUsize::new(0));
    let (noted, dir) = (order.clone(), Arc::new(std::sync::OnceLock::<std::path::PathBuf>::new()));
    let at = dir.clone();
    let world = DnsFixture::with_script(move |query, over| {
        let written = std::fs::read_dir(at.get().unwrap()).unwrap().any(|entry| {
            std::fs::read_to_string(entry.unwrap().path())
                .is_ok_and(|text| text.contains("\"stage\":\"decision\"") && text.contains("github.com"))
        });
        noted.fetch_add(usize::from(written), Ordering::SeqCst);
        plain_reply(query, over)
    })
    .await;
    dir.set(world.dir.path().join("log")).unwrap();
    world.ask("github.com", A).await;
    assert_eq!(order.load(Ordering::SeqCst), 1);
}

// proves: dns.fold_seconds
#[tokio::test]
async fn answers_from_the_cache_share_a_record_with_a_count() {
    let world = DnsFixture::build(ALLOW, plain_reply, |settings| settings.fold_seconds = 60).await;
    for _ in 0..10 {
        world.ask("github.com", A).await;
    }
    let records = world.records();
    let answered: Vec<_> =
        records.iter().filter(|record| record["unmapped"]["sandbar"]["stage"] == "answered").collect();
    let counted: u64 =
        answered.iter().map(|record| 1 + record["unmapped"]["sandbar"]["folded"].as_u64().unwrap_or(0)).sum();
    assert_eq!(counted, 9, "the first was forwarded and has a record of its own");
    assert_eq!(answered.len(), 2);
    let each = DnsFixture::new().await;
    for _ in 0..10 {
        each.ask("github.com", A).await;
    }
    assert_eq!(
        each.records().iter().filter(|record| record["unmapped"]["sandbar"]["stage"] == "answered").count(),
        9
    );
}

const RAW: &str = "[[allow]]\nname = \"db\"\nhosts = [\"db.corp.example\"]\ntcp = [5432]\nresolves_to = [\"10.1.0.0/16\"]\n";

// proves: dns.synthetic
#[tokio::test]
async fn synthetic_addresses_come_from_the_configured_range() {
    let world = DnsFixture::build(RAW, plain_reply, |settings| {
        settings.synthetic = "10.200.0.0/24".parse().unwrap();
    })
    .await;
    assert_eq!(world.ask("db.corp.example", A).await.addresses()[0].to_string(), "10.200.0.1");
}

#[tokio::test]
async fn names_for_raw_tcp_get_a_synthetic_address() {
    let world = DnsFixture::build(
        RAW,
        |query, _| ScriptedReply::Answer(reply_with(query, vec![("", 60, a("10.1.2.3"))])),
        |_| {},
    )
    .await;
    let address = world.ask("db.corp.example", A).await.addresses()[0];
    assert_eq!(world.recorder.seen().len(), 0, "nothing left");
    assert!(world.ask("db.corp.example", AAAA).await.addresses().is_empty());
    let resolver = dns_filter::Resolver::new(world.filter.clone());
    let sandbox = |id: &str| SandboxId::parse(id).unwrap();
    assert_eq!(resolver.name_of(&sandbox("s"), address).unwrap().as_str(), "db.corp.example");
    assert_eq!(
        resolver.name_of(&sandbox("t"), address),
        None,
        "the address means nothing in another sandbox"
    );
    let snapshot = world.rules.load_full();
    let facts = Facts::Connect(ConnectFacts {
        target: ConnectTarget::Named(Host::Name(DomainName::parse("db.corp.example").unwrap())),
        port: 5432,
        protocol: Protocol::Raw,
    });
    let Decision::Allow(permit) = snapshot.decide(snapshot.sandboxes().get(&sandbox("s")).unwrap(), &facts)
    else {
        panic!()
    };
    let found = resolver.resolve(&permit).await.unwrap();
    assert!(snapshot.admit(&permit, &found).is_ok(), "the proxy gets the real address");
}

#[tokio::test]
async fn the_proxys_look_ups_are_charged_to_the_sandbox() {
    let world = DnsFixture::new().await;
    let snapshot = world.rules.load_full();
    let host = Host::Name(DomainName::parse("long-name-of-a-bucket.wild.example").unwrap());
    let facts = Facts::Connect(ConnectFacts {
        target: ConnectTarget::Named(host.clone()),
        port: 443,
        protocol: Protocol::Tls { sni: Some(host), ech: EchPresence::Absent },
    });
    let Decision::Allow(permit) =
        snapshot.decide(snapshot.sandboxes().get(&SandboxId::parse("s").unwrap()).unwrap(), &facts)
    else {
        panic!()
    };
    let resolver = dns_filter::Resolver::new(world.filter.clone());
    assert_eq!(resolver.resolve(&permit).await.unwrap().len(), 2);
    assert_eq!(world.recorder.seen().len(), 2);
    world.ask("long-name-of-a-bucket.wild.example", A).await;
    assert_eq!(world.recorder.seen().len(), 2, "one cache for both");
    let decisions =
        world.records().iter().filter(|record| record["unmapped"]["sandbar"]["stage"] == "decision").count();
    assert_eq!(decisions, 2, "each has a decision record");
}

// proves: dns.pre_resolve
#[tokio::test]
async fn exact_names_are_pre_resolved() {
    let world = DnsFixture::build(ALLOW, plain_reply, |settings| {
        settings.pre_resolve = rules::configuration::PreResolve::On
    })
    .await;
    world.filter.pre_resolve_once().await;
    let before = world.recorder.seen().len();
    assert_eq!(before, 6, "two names, three types, no wildcard");
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    assert_eq!(world.ask("api.openai.com", AAAA).await.addresses().len(), 1);
    assert_eq!(world.recorder.seen().len(), before, "a sandbox's query does not leave");
    let timers = world
        .records()
        .iter()
        .filter(|record| record["unmapped"]["sandbar"]["carried"] == "pre_resolve")
        .count();
    assert_eq!(timers, 12, "six decisions and six outcomes");
    let without = DnsFixture::new().await;
    without.filter.pre_resolve_once().await;
    assert_eq!(without.recorder.seen().len(), 0, "switched off");
}
