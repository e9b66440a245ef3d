//! Cases 39, 43 to 53, 67 and 68: which parts of an answer reach the sandbox.

use std::net::Ipv4Addr;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::rdata::svcb::{Alpn, EchConfigList, IpHint, Mandatory, SvcParamKey, SvcParamValue};
use hickory_proto::rr::rdata::{A as Address, HTTPS as Https, SVCB};
use hickory_proto::rr::{Name, RData};

use crate::fixture::{A, AAAA, ALLOW, ClientAnswer, DnsFixture, HTTPS, build_packet, wire_name};
use crate::recording_resolver::{
    ScriptedReply, UpstreamTransport, a, aaaa, cname, negative_reply, plain_reply, reply_with,
};

fn many_addresses(count: u8) -> impl Fn(&Message, UpstreamTransport) -> ScriptedReply {
    move |query, over| {
        let address = |at: u8| ("", 300, RData::A(Address(Ipv4Addr::new(93, 184, 0, at))));
        let mut message = reply_with(query, (0..count).map(address).collect());
        if over == UpstreamTransport::Udp {
            message.answers.truncate(1);
            message.metadata.truncation = true;
        }
        ScriptedReply::Answer(message)
    }
}

#[tokio::test]
async fn case_39_truncation_towards_the_client_and_from_upstream() {
    let world = DnsFixture::with_script(many_addresses(32)).await;
    let small = build_packet(0x100, &wire_name("github.com"), A, 1, None);
    let answer = ClientAnswer::parse(world.send_packet(&small).await.unwrap());
    assert!(
        answer.message.metadata.truncation && answer.addresses().is_empty() && answer.packet.len() <= 512
    );
    let over: Vec<UpstreamTransport> = world.recorder.seen().iter().map(|seen| seen.over).collect();
    assert_eq!(
        over,
        [UpstreamTransport::Udp, UpstreamTransport::Tcp],
        "the filter itself repeats a truncated upstream answer over TCP"
    );
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 32, "complete with EDNS");
}

// proves: allow.cname
#[tokio::test]
async fn case_43_chains_are_flattened_and_never_followed_by_us() {
    let world = DnsFixture::with_script(|query, _| {
        ScriptedReply::Answer(reply_with(
            query,
            vec![
                ("", 300, cname("cdn.elsewhere.example.")),
                ("cdn.elsewhere.example.", 300, a("93.184.216.34")),
            ],
        ))
    })
    .await;
    let answer = world.ask("github.com", A).await;
    assert_eq!(answer.addresses().len(), 1);
    assert!(answer.message.answers.iter().all(|record| record.name.to_string() == "github.com."));
    assert_eq!(
        world.ask("cdn.elsewhere.example", A).await.code(),
        ResponseCode::NXDomain,
        "a CNAME does not allow its target"
    );
    let bare = DnsFixture::with_script(|query, _| {
        ScriptedReply::Answer(reply_with(query, vec![("", 300, cname("secret-payload.evil.example."))]))
    })
    .await;
    assert_eq!(bare.ask("github.com", A).await.code(), ResponseCode::ServFail);
    assert_eq!(bare.recorder.names(), ["github.com."]);
    let policy = "[[allow]]\nname = \"strict\"\nhosts = [\"github.com\"]\ncname = \"strict\"\n";
    let strict = DnsFixture::build(
        policy,
        |query, _| {
            ScriptedReply::Answer(reply_with(
                query,
                vec![
                    ("", 300, cname("cdn.elsewhere.example.")),
                    ("cdn.elsewhere.example.", 300, a("93.184.216.34")),
                ],
            ))
        },
        |_| {},
    )
    .await;
    assert!(strict.ask("github.com", A).await.addresses().is_empty());
}

#[tokio::test]
async fn p17_case_44_loops_and_long_chains_fail() {
    let looped = DnsFixture::with_script(|query, _| {
        ScriptedReply::Answer(reply_with(
            query,
            vec![("", 300, cname("b.example.")), ("b.example.", 300, cname("github.com."))],
        ))
    })
    .await;
    assert_eq!(looped.ask("github.com", A).await.code(), ResponseCode::ServFail);
    let long = DnsFixture::with_script(|query, _| {
        let mut message = reply_with(query, vec![("", 300, cname("h0.example."))]);
        for at in 0..12 {
            let next = reply_with(
                query,
                vec![(&format!("h{at}.example."), 300, cname(&format!("h{}.example.", at + 1)))],
            );
            message.answers.extend(next.answers);
        }
        ScriptedReply::Answer(message)
    })
    .await;
    assert_eq!(long.ask("github.com", A).await.code(), ResponseCode::ServFail);
}

#[tokio::test]
async fn p4_case_45_special_addresses_are_removed() {
    let world = DnsFixture::with_script(|query, _| {
        let all = [
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "192.168.1.1",
            "224.0.0.1",
            "0.0.0.0",
            "240.0.0.1",
            "192.0.2.1",
            "93.184.216.34",
        ];
        let only = query.queries[0].name.to_lowercase().to_string().starts_with("only");
        let addresses = if only { &all[..9] } else { &all[..] };
        ScriptedReply::Answer(reply_with(
            query,
            addresses.iter().map(|address| ("", 300, a(address))).collect(),
        ))
    })
    .await;
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    let answer = world.ask("only.wild.example", A).await;
    assert_eq!((answer.code(), answer.addresses().len()), (ResponseCode::NoError, 0));
    assert_eq!(answer.ede.as_deref(), Some("private_address"));
    assert!(world.reasons().contains(&"private_address".to_owned()));
}

#[tokio::test]
async fn p4_case_45_a_rule_opens_a_private_range() {
    let policy = "[[allow]]\nname = \"db\"\nhosts = [\"db.corp.example\"]\nresolves_to = [\"10.1.0.0/16\"]\n";
    let world = DnsFixture::build(
        policy,
        |query, _| {
            ScriptedReply::Answer(reply_with(
                query,
                vec![("", 300, a("10.1.2.3")), ("", 300, a("10.2.0.1")), ("", 300, a("93.184.216.34"))],
            ))
        },
        |_| {},
    )
    .await;
    assert_eq!(
        world.ask("db.corp.example", A).await.addresses(),
        ["10.1.2.3".parse::<std::net::IpAddr>().unwrap()]
    );
}

#[tokio::test]
async fn p4_case_46_embedded_addresses_are_checked() {
    let world = DnsFixture::with_script(|query, _| {
        let hidden = [
            "::ffff:10.0.0.1",
            "::10.0.0.1",
            "2002:a00:1::",
            "64:ff9b::a9fe:a9fe",
            "2001:0:a00:1::1",
            "fd00:ec2::254",
        ];
        ScriptedReply::Answer(reply_with(
            query,
            hidden.iter().map(|address| ("", 300, aaaa(address))).collect(),
        ))
    })
    .await;
    assert!(world.ask("github.com", AAAA).await.addresses().is_empty());
}

#[tokio::test]
async fn p4_case_47_each_answer_is_checked_separately() {
    let world = DnsFixture::with_script(|query, _| match query.queries[0].query_type {
        hickory_proto::rr::RecordType::A => {
            ScriptedReply::Answer(reply_with(query, vec![("", 0, a("93.184.216.34"))]))
        }
        _ => ScriptedReply::Answer(reply_with(query, vec![("", 0, aaaa("fd00::1"))])),
    })
    .await;
    assert_eq!(world.ask("github.com", A).await.addresses().len(), 1);
    assert!(world.ask("github.com", AAAA).await.addresses().is_empty());
}

fn service_reply(
    params: Vec<(SvcParamKey, SvcParamValue)>,
) -> impl Fn(&Message, UpstreamTransport) -> ScriptedReply {
    move |query, _| {
        ScriptedReply::Answer(reply_with(
            query,
            vec![("", 300, RData::HTTPS(Https(SVCB::new(1, Name::root(), params.clone()))))],
        ))
    }
}

fn service_params(answer: &ClientAnswer) -> Vec<SvcParamKey> {
    answer
        .message
        .answers
        .iter()
        .flat_map(|record| match &record.data {
            RData::HTTPS(https) => https.0.svc_params.iter().map(|(key, _)| *key).collect(),
            _ => Vec::new(),
        })
        .collect()
}

#[tokio::test]
async fn case_48_ech_is_removed_and_so_is_a_record_that_requires_it() {
    let ech = (SvcParamKey::EchConfigList, SvcParamValue::EchConfigList(EchConfigList(vec![1, 2, 3])));
    let alpn = (SvcParamKey::Alpn, SvcParamValue::Alpn(Alpn(vec!["h2".into(), "h3".into()])));
    let world = DnsFixture::with_script(service_reply(vec![alpn.clone(), ech.clone()])).await;
    assert_eq!(service_params(&world.ask("github.com", HTTPS).await), [SvcParamKey::Alpn]);
    let needs =
        (SvcParamKey::Mandatory, SvcParamValue::Mandatory(Mandatory(vec![SvcParamKey::EchConfigList])));
    let world = DnsFixture::with_script(service_reply(vec![needs, alpn, ech])).await;
    assert!(world.ask("github.com", HTTPS).await.message.answers.is_empty());
}

#[tokio::test]
async fn case_49_hints_ports_and_protocols_do_not_bypass_the_proxy() {
    let hints = |list: &[&str]| {
        (
            SvcParamKey::Ipv4Hint,
            SvcParamValue::Ipv4Hint(IpHint(list.iter().map(|text| Address(text.parse().unwrap())).collect())),
        )
    };
    let alpn = |names: &[&str]| {
        (SvcParamKey::Alpn, SvcParamValue::Alpn(Alpn(names.iter().map(|name| (*name).to_owned()).collect())))
    };
    let port = |port| (SvcParamKey::Port, SvcParamValue::Port(port));
    for (what, given, expected) in [
        ("private hint", vec![hints(&["10.0.0.1"])], vec![]),
        ("public hint", vec![hints(&["93.184.216.34", "10.0.0.1"])], vec![SvcParamKey::Ipv4Hint]),
        ("only h3", vec![alpn(&["h3"])], vec![]),
        ("usual port", vec![port(443)], vec![SvcParamKey::Port]),
    ] {
        let world = DnsFixture::with_script(service_reply(given)).await;
        assert_eq!(service_params(&world.ask("github.com", HTTPS).await), expected, "{what}");
    }
    let other = DnsFixture::with_script(service_reply(vec![port(8443)])).await;
    assert!(other.ask("github.com", HTTPS).await.message.answers.is_empty(), "no rule allows the port");
    let alias = DnsFixture::with_script(|query, _| {
        ScriptedReply::Answer(reply_with(
            query,
            vec![(
                "",
                300,
                RData::HTTPS(Https(SVCB::new(0, Name::from_ascii("other.example.").unwrap(), vec![]))),
            )],
        ))
    })
    .await;
    assert!(alias.ask("github.com", HTTPS).await.message.answers.is_empty());
}

#[tokio::test]
async fn case_50_unasked_records_are_dropped() {
    let world = DnsFixture::with_script(|query, _| {
        let mut message = reply_with(
            query,
            vec![
                ("", 300, a("93.184.216.34")),
                ("other.example.", 300, a("93.184.216.35")),
                ("", 300, aaaa("2606:2800::1")),
            ],
        );
        let extra = reply_with(query, vec![("ns.example.", 300, a("93.184.216.36"))]).answers;
        message.authorities = extra.clone();
        message.additionals = extra;
        ScriptedReply::Answer(message)
    })
    .await;
    let answer = world.ask("github.com", A).await;
    assert_eq!(answer.addresses().len(), 1);
    assert!(answer.message.authorities.is_empty() && answer.message.additionals.is_empty());
}

#[tokio::test]
async fn cases_51_and_52_ttls_are_clamped() {
    for (given, expected) in [(0, 30), (5, 30), (300, 300), (604_800, 3600)] {
        let world = DnsFixture::with_script(move |query, _| {
            ScriptedReply::Answer(reply_with(query, vec![("", given, a("93.184.216.34"))]))
        })
        .await;
        assert_eq!(world.ask("github.com", A).await.ttl(), expected);
    }
}

#[tokio::test]
async fn case_51_a_tiny_ttl_does_not_repeat_a_query() {
    let world = DnsFixture::with_script(|query, _| {
        ScriptedReply::Answer(reply_with(query, vec![("", 0, a("93.184.216.34"))]))
    })
    .await;
    for _ in 0..5 {
        world.ask("github.com", A).await;
    }
    assert_eq!(world.recorder.seen().len(), 1);
}

#[tokio::test]
async fn case_52_a_ttl_of_a_week_becomes_an_hour() {
    let world = DnsFixture::with_script(|query, _| {
        ScriptedReply::Answer(reply_with(query, vec![("", 604_800, a("93.184.216.34"))]))
    })
    .await;
    assert_eq!(world.ask("github.com", A).await.ttl(), 3600);
}

#[tokio::test]
async fn case_53_a_negative_answer_is_cached_for_one_sandbox() {
    let world = DnsFixture::with_script(|query, _| {
        ScriptedReply::Answer(negative_reply(query, ResponseCode::NXDomain, 86_400))
    })
    .await;
    for _ in 0..3 {
        assert_eq!(world.ask("no.wild.example", A).await.code(), ResponseCode::NXDomain);
    }
    assert_eq!(world.recorder.seen().len(), 1);
    world.ask("below.no.wild.example", A).await;
    world.ask_as("t", "no.wild.example", A).await;
    assert_eq!(world.recorder.seen().len(), 3, "not for names below, and not for other sandboxes");
}

#[tokio::test]
async fn p17_case_67_at_most_32_addresses_are_returned() {
    let world = DnsFixture::with_script(many_addresses(200)).await;
    let answer = world.ask("github.com", A).await;
    assert_eq!(answer.addresses().len(), 32);
}

#[tokio::test]
async fn case_68_dnssec_is_neither_requested_nor_claimed() {
    let world = DnsFixture::build(ALLOW, plain_reply, |_| {}).await;
    let mut query = crate::fixture::build_query("github.com", A);
    let at = query.len() - 4;
    query[at] = 0x80;
    let answer = ClientAnswer::parse(world.send_packet(&query).await.unwrap());
    assert!(!answer.message.metadata.authentic_data);
    assert!(!world.recorder.seen()[0].message.edns.as_ref().unwrap().flags().dnssec_ok);
}
