//! Cases 1 to 22: names.

use hickory_proto::op::ResponseCode;
use rules::Channel;

use crate::fixture::{
    A, AAAA, ALLOW, ClientAnswer, DnsFixture, HTTPS, arrival_from, build_packet, build_query, wire_name,
};
use crate::recording_resolver::plain_reply;
use dns_filter::message::DnsTransport;
use rules::DomainName;
use rules::configuration::{DenialForm, ForwardZone, HostEntry};

#[tokio::test]
async fn p5_case_01_a_name_that_is_not_listed_never_leaves() {
    let world = DnsFixture::new().await;
    world.assert_refused("pastebin.com", A, "not_listed").await;
    let answer = world.ask("pastebin.com", A).await;
    assert_eq!(answer.code(), ResponseCode::NXDomain);
    let records = world.records();
    let denied: Vec<_> = records.iter().filter(|record| record["status_detail"] == "not_listed").collect();
    assert_eq!(denied.len(), 2);
    assert_eq!(denied[0]["query"]["hostname"], "pastebin.com");
    assert_eq!(denied[0]["unmapped"]["sandbar"]["stage"], "denied");
}

// proves: dns.denial
#[tokio::test]
async fn case_01_a_denial_has_the_configured_form() {
    for (form, code, addresses) in [
        (DenialForm::NxDomain, ResponseCode::NXDomain, 0),
        (DenialForm::Refused, ResponseCode::Refused, 0),
        (DenialForm::NoData, ResponseCode::NoError, 0),
        (DenialForm::Sinkhole, ResponseCode::NoError, 1),
    ] {
        let world = DnsFixture::build(ALLOW, plain_reply, |settings| settings.denial = form).await;
        let answer = world.ask("pastebin.com", A).await;
        assert_eq!((answer.code(), answer.addresses().len()), (code, addresses), "{form:?}");
        assert_eq!(world.recorder.seen().len(), 0);
    }
}

#[tokio::test]
async fn p2_case_02_an_unknown_channel_is_refused() {
    let world = DnsFixture::new().await;
    for channel in [
        Channel::Mark(99),
        Channel::Interface("veth9".into()),
        Channel::SourceAddress("10.0.0.9".parse().unwrap()),
    ] {
        let arrived = dns_filter::QueryArrival { channel, ..arrival_from("s", DnsTransport::Udp) };
        let answer =
            ClientAnswer::parse(world.filter.answer(&build_query("github.com", A), &arrived).await.unwrap());
        assert_eq!(answer.code(), ResponseCode::Refused);
        assert_eq!(answer.ede.as_deref(), Some("unknown_channel"));
    }
    assert_eq!(world.recorder.seen().len(), 0);
    assert!(world.reasons().iter().all(|reason| reason == "unknown_channel"));
}

#[tokio::test]
async fn case_03_names_are_case_insensitive_and_echoed_as_sent() {
    let world = DnsFixture::new().await;
    let answer = world.ask("GitHub.COM", A).await;
    assert_eq!(answer.addresses().len(), 1);
    assert_eq!(answer.packet[12..12 + 12], wire_name("GitHub.COM")[..]);
    assert_eq!(world.recorder.names(), ["github.com."]);
    world.ask("gIThub.com", A).await;
    assert_eq!(world.recorder.seen().len(), 1, "one cache key for every spelling");
}

#[tokio::test]
async fn case_04_the_resolver_never_sees_the_sandboxes_case() {
    let world = DnsFixture::build(&ALLOW.replace("*.wild", ".wild"), plain_reply, |_| {}).await;
    let secret = "AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGhIjKl.WiLd.ExAmPlE";
    world.ask(secret, A).await;
    let sent = world.recorder.seen()[0].message.queries[0].name.to_string();
    assert_eq!(sent.to_lowercase(), secret.to_lowercase() + ".");
    assert_ne!(sent.trim_end_matches('.'), secret, "the case is randomised");
}

#[tokio::test]
async fn case_05_a_trailing_dot_changes_nothing() {
    let world = DnsFixture::build(&ALLOW.replace("github.com", "github.com."), plain_reply, |_| {}).await;
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
}

#[tokio::test]
async fn case_06_a_wildcard_matches_any_depth_but_not_the_apex() {
    let world = DnsFixture::new().await;
    world.assert_refused("wild.example", A, "not_listed").await;
    for name in ["a.wild.example", "a.b.wild.example"] {
        assert_eq!(world.ask(name, A).await.addresses().len(), 1, "{name}");
    }
}

#[tokio::test]
async fn case_07_suffixes_are_compared_by_label() {
    DnsFixture::new().await.assert_refused("evilwild.example", A, "not_listed").await;
}

#[tokio::test]
async fn case_08_a_dot_inside_a_label_is_not_a_separator() {
    let world = DnsFixture::new().await;
    let answer = ClientAnswer::parse(
        world
            .send_packet(&build_packet(0x100, b"\x0aa.wild.exa\x07example\x00", A, 1, Some(1232)))
            .await
            .unwrap(),
    );
    assert_eq!(answer.ede.as_deref(), Some("bad_name"));
    let answer = ClientAnswer::parse(
        world
            .send_packet(&build_packet(0x100, b"\x06a.wild\x07example\x00", A, 1, Some(1232)))
            .await
            .unwrap(),
    );
    assert_eq!(answer.ede.as_deref(), Some("bad_name"));
    assert_eq!(world.recorder.seen().len(), 0);
}

#[tokio::test]
async fn case_09_only_letters_digits_and_hyphens_leave() {
    let world = DnsFixture::new().await;
    for label in
        [&b"a\0b"[..], b"a b", b"a+b", b"a/b", b"a=b", b"\xff\xfe", "b\u{fc}cher".as_bytes(), b"a\nb", b"*"]
    {
        let mut name = vec![label.len() as u8];
        name.extend_from_slice(label);
        name.extend_from_slice(&wire_name("wild.example"));
        let answer = ClientAnswer::parse(
            world.send_packet(&build_packet(0x100, &name, A, 1, Some(1232))).await.unwrap(),
        );
        assert_eq!(answer.ede.as_deref(), Some("bad_name"), "{label:?}");
    }
    assert_eq!(world.recorder.seen().len(), 0);
    let records = world.records();
    assert!(
        records.iter().any(|record| record["query"]["hostname"] == r"a\nb.wild.example"),
        "escaped, on one line"
    );
}

#[tokio::test]
async fn case_10_underscores_are_letters_that_need_a_rule() {
    let world = DnsFixture::new().await;
    world.assert_refused("_dmarc.github.com", A, "not_listed").await;
    assert_eq!(world.ask("_acme-challenge.wild.example", A).await.addresses().len(), 1);
}

#[tokio::test]
async fn case_11_homographs_are_other_names() {
    let world = DnsFixture::build(
        "[[allow]]\nname = \"idn\"\nhosts = [\"b\u{fc}cher.example\"]\n",
        plain_reply,
        |_| {},
    )
    .await;
    world.assert_refused("xn--gthub-n4a.com", A, "not_listed").await;
    assert_eq!(world.ask("xn--bcher-kva.example", A).await.addresses().len(), 1);
    world.ask("XN--BCHER-KVA.example", A).await;
    assert_eq!(world.recorder.seen().len(), 1);
}

#[tokio::test]
async fn case_11_letters_beyond_ascii_below_a_wildcard_are_flagged() {
    let world = DnsFixture::new().await;
    for name in ["xn--gthub-n4a.wild.example", "a.xn--bcher-kva.wild.example", "plain.wild.example"] {
        assert_eq!(world.ask(name, A).await.addresses().len(), 1, "{name}");
    }
    world.ask("xn--gthub-n4a.wild.example", A).await; // from the cache
    let flagged = |records: &[serde_json::Value]| -> Vec<String> {
        let flagged = records.iter().filter(|record| record.to_string().contains("\"punycode\""));
        flagged.map(|record| record["query"]["hostname"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(
        flagged(&world.records_at_stage("decision")),
        ["xn--gthub-n4a.wild.example", "a.xn--bcher-kva.wild.example"]
    );
    assert_eq!(flagged(&world.records_at_stage("answered")), ["xn--gthub-n4a.wild.example"]);
    let exact = DnsFixture::build(
        "[[allow]]\nname = \"idn\"\nhosts = [\"b\u{fc}cher.example\"]\n",
        plain_reply,
        |_| {},
    )
    .await;
    exact.ask("xn--bcher-kva.example", A).await;
    assert!(
        flagged(&exact.records_at_stage("decision")).is_empty(),
        "names in the policy itself are not flagged"
    );
}

#[tokio::test]
async fn case_12_the_longest_names_pass_and_longer_ones_do_not_parse() {
    let world = DnsFixture::new().await;
    let label = "a".repeat(63);
    let longest = format!("{label}.{label}.{label}.{}.wild.example", "a".repeat(48));
    assert_eq!(wire_name(&longest).len(), 255);
    assert_eq!(world.ask(&longest, A).await.addresses().len(), 1);
    let longer = build_packet(
        0x100,
        &wire_name(&format!("a{longest}").replacen('a', "", 1).replace(&"a".repeat(48), &"a".repeat(49))),
        A,
        1,
        None,
    );
    assert_eq!(world.send_packet(&longer).await.unwrap()[3] & 0xf, 1);
    let mut wide = vec![64];
    wide.extend_from_slice(&[b'a'; 64]);
    wide.extend_from_slice(&wire_name("wild.example"));
    assert_eq!(world.send_packet(&build_packet(0x100, &wide, A, 1, None)).await.unwrap()[3] & 0xf, 1);
    assert_eq!(world.recorder.seen().len(), 1);
}

#[tokio::test]
async fn case_13_pointers_in_a_question_are_malformed() {
    let world = DnsFixture::new().await;
    for name in [&b"\xc0\x0c"[..], b"\x01a\xc0\x0c", b"\xc0\xff", b"\xff\xff"] {
        assert_eq!(
            world.send_packet(&build_packet(0x100, name, A, 1, None)).await.unwrap()[3] & 0xf,
            1,
            "{name:?}"
        );
    }
    assert_eq!(world.recorder.seen().len(), 0);
}

#[tokio::test]
async fn case_14_the_root_is_refused() {
    let world = DnsFixture::new().await;
    for kind in [2, A, 6, 48] {
        world.assert_refused(".", kind, "bad_name").await;
    }
}

#[tokio::test]
async fn case_15_single_labels_need_their_own_rule() {
    let world =
        DnsFixture::build("[[allow]]\nname = \"db\"\nhosts = [\"postgres\"]\n", plain_reply, |_| {}).await;
    world.assert_refused("wpad", A, "not_listed").await;
    assert_eq!(world.ask("postgres", A).await.addresses().len(), 1);
    assert_eq!(world.recorder.names(), ["postgres."], "no search domain is added");
}

#[tokio::test]
async fn p5_case_16_each_name_of_a_search_list_is_decided_separately() {
    let world = DnsFixture::new().await;
    for suffix in
        ["default.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example", "example"]
    {
        let answer = world.ask(&format!("github.com.{suffix}"), A).await;
        assert_eq!(answer.code(), ResponseCode::NXDomain, "{suffix}");
    }
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    assert_eq!(world.recorder.names(), ["github.com."]);
}

#[tokio::test]
async fn case_17_localhost_is_answered_locally() {
    let world = DnsFixture::new().await;
    for (name, kind, found) in
        [("localhost", A, "127.0.0.1"), ("a.localhost", A, "127.0.0.1"), ("LOCALHOST", AAAA, "::1")]
    {
        assert_eq!(
            world.ask(name, kind).await.addresses(),
            [found.parse::<std::net::IpAddr>().unwrap()],
            "{name}"
        );
    }
    let answer = world.ask("1.0.0.127.in-addr.arpa", 12).await;
    assert_eq!(answer.message.answers[0].data.to_string(), "localhost.");
    assert_eq!(world.recorder.seen().len(), 0);
}

// proves: dns.zone.name, dns.zone.upstreams, dns.host.name, dns.host.addresses
#[tokio::test]
async fn case_18_special_zones_need_a_rule_and_a_resolver_of_their_own() {
    let policy = "[[allow]]\nname = \"in\"\nhosts = [\"db.corp.internal\", \"svc.cluster.local\"]\nresolves_to = [\"10.0.0.0/8\"]\n";
    let world = DnsFixture::build(policy, plain_reply, |_| {}).await;
    for name in ["x.onion", "x.invalid", "x.test", "x.local", "y.internal", "x.home.arpa", "x.alt"] {
        world.assert_refused(name, A, "not_listed").await;
    }
    world.assert_refused("db.corp.internal", A, "special_name").await;
    let zoned = DnsFixture::build(
        policy,
        |query, _| {
            crate::recording_resolver::ScriptedReply::Answer(crate::recording_resolver::reply_with(
                query,
                vec![("", 60, crate::recording_resolver::a("10.1.2.3"))],
            ))
        },
        |settings| {
            let upstreams = settings.upstreams.clone();
            settings.upstreams = vec!["127.0.0.1:9".parse().unwrap()];
            settings.zones = vec![ForwardZone { name: DomainName::parse("internal").unwrap(), upstreams }];
        },
    )
    .await;
    assert_eq!(
        zoned.ask("db.corp.internal", A).await.addresses(),
        ["10.1.2.3".parse::<std::net::IpAddr>().unwrap()]
    );
    let configured = DnsFixture::build(policy, plain_reply, |settings| {
        let name = DomainName::parse("svc.cluster.local").unwrap();
        settings.hosts = vec![HostEntry {
            name,
            addresses: vec!["10.9.9.9".parse().unwrap(), "192.168.0.1".parse().unwrap()],
        }];
    })
    .await;
    assert_eq!(
        configured.ask("svc.cluster.local", A).await.addresses(),
        ["10.9.9.9".parse::<std::net::IpAddr>().unwrap()],
        "only addresses that the rule allows"
    );
    assert_eq!(configured.recorder.seen().len(), 0);
}

#[tokio::test]
async fn case_19_reverse_names_are_refused() {
    let world = DnsFixture::new().await;
    for name in ["4.3.2.1.in-addr.arpa", "1.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa"] {
        let answer = world.ask(name, 12).await;
        assert_eq!(answer.code(), ResponseCode::NXDomain, "{name}");
    }
    assert_eq!(world.recorder.seen().len(), 0);
}

// proves: dns.reverse
#[tokio::test]
async fn case_19_reverse_look_ups_of_known_addresses_can_be_enabled() {
    let policy = format!(
        "{ALLOW}\n[[allow]]\nname = \"db\"\nhosts = [\"db.corp.example\"]\ntcp = [5432]\nresolves_to = [\"10.1.0.0/16\"]\n"
    );
    let world = DnsFixture::build(&policy, plain_reply, |settings| {
        settings.reverse = rules::configuration::ReverseLookups::Known
    })
    .await;
    let names = |answer: ClientAnswer| -> Vec<String> {
        answer.message.answers.iter().map(|record| record.data.to_string()).collect()
    };
    let reverse = "34.216.184.93.in-addr.arpa";
    assert!(names(world.ask(reverse, 12).await).is_empty(), "nothing is known yet");
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    let v6 = "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.0.0.0.2.2.0.0.0.8.2.6.0.6.2.ip6.arpa";
    world.ask("github.com", AAAA).await;
    assert_eq!(world.ask("db.corp.example", A).await.addresses()[0].to_string(), "198.18.0.1");
    let asked = world.recorder.seen().len();
    for (name, known) in
        [(reverse, "github.com."), (v6, "github.com."), ("1.0.18.198.in-addr.arpa", "db.corp.example.")]
    {
        assert_eq!(names(world.ask(name, 12).await), [known], "{name}");
    }
    assert!(names(world.ask_as("t", reverse, 12).await).is_empty(), "another sandbox does not see it");
    assert!(names(world.ask("4.3.2.1.in-addr.arpa", 12).await).is_empty());
    world.rules.store(std::sync::Arc::new(crate::fixture::compile_rules(ALLOW, 2)));
    let before = world.ask(reverse, 12).await;
    assert!(names(before).is_empty(), "a reload clears known addresses");
    assert_eq!(world.recorder.seen().len(), asked, "no reverse name ever leaves");
}

#[tokio::test]
async fn case_20_canaries_are_refused_even_below_a_wildcard() {
    let policy = "[[allow]]\nname = \"all\"\nhosts = [\"*\", \"mask.icloud.com\"]\ndangerously_wide = true\n";
    let world = DnsFixture::build(policy, plain_reply, |_| {}).await;
    for name in ["use-application-dns.net", "mask.icloud.com", "mask-h2.icloud.com"] {
        world.assert_refused(name, A, "resolver_discovery").await;
        assert_eq!(world.ask(name, A).await.code(), ResponseCode::NXDomain);
    }
}

#[tokio::test]
async fn case_21_resolver_discovery_is_refused() {
    let world = DnsFixture::new().await;
    world.assert_refused("_dns.resolver.arpa", 64, "resolver_discovery").await;
    world.assert_refused("resolver.arpa", HTTPS, "resolver_discovery").await;
}

#[tokio::test]
async fn case_22_public_resolvers_need_their_exact_name() {
    let wide = "[[allow]]\nname = \"all\"\nhosts = [\"*\"]\ndangerously_wide = true\n";
    let world = DnsFixture::build(wide, plain_reply, |_| {}).await;
    for name in ["dns.google", "cloudflare-dns.com", "dns.quad9.net", "a.cloudflare-dns.com"] {
        world.assert_refused(name, A, "encrypted_resolver").await;
    }
    let exact =
        DnsFixture::build("[[allow]]\nname = \"doh\"\nhosts = [\"dns.google\"]\n", plain_reply, |_| {}).await;
    assert_eq!(exact.ask("dns.google", A).await.addresses().len(), 1);
}
