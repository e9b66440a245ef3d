//! Cases 23 to 38: types, operations, classes, counts and EDNS.

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RData;
use hickory_proto::rr::rdata::TXT as Text;
use hickory_proto::rr::rdata::opt::{EdnsCode, EdnsOption};

use crate::fixture::{
    A, AAAA, ALLOW, ClientAnswer, DnsFixture, HTTPS, TXT, build_packet, build_query, wire_name,
};
use crate::recording_resolver::{ScriptedReply, plain_reply, reply_with};

#[tokio::test]
async fn case_23_addresses_and_https_are_asked_by_default() {
    let world = DnsFixture::new().await;
    for kind in [A, AAAA, HTTPS] {
        assert_eq!(world.ask("github.com", kind).await.code(), ResponseCode::NoError, "{kind}");
    }
    assert_eq!(world.recorder.seen().len(), 3);
}

// proves: allow.dns_types
#[tokio::test]
async fn p1_case_24_other_types_need_the_rule() {
    let world = DnsFixture::new().await;
    for kind in [TXT, 10, 25, 33, 15, 5, 64, 65399, 999, 2, 6, 43] {
        world.assert_refused("github.com", kind, "dns_type_not_allowed").await;
    }
    let policy = "[[allow]]\nname = \"txt\"\nhosts = [\"github.com\"]\ndns_types = [\"A\", \"TXT\"]\n";
    let opened = DnsFixture::build(
        policy,
        |query, _| {
            ScriptedReply::Answer(reply_with(
                query,
                vec![("", 60, RData::TXT(Text::new(vec!["hello".into()])))],
            ))
        },
        |_| {},
    )
    .await;
    assert_eq!(opened.ask("github.com", TXT).await.message.answers.len(), 1);
}

#[tokio::test]
async fn p5_case_25_any_is_refused_and_never_forwarded() {
    DnsFixture::new().await.assert_refused("github.com", 255, "dns_type_not_allowed").await;
}

#[tokio::test]
async fn case_26_transfers_are_refused() {
    let world = DnsFixture::new().await;
    for kind in [251, 252] {
        let answer = world.ask("github.com", kind).await;
        assert_eq!(answer.code(), ResponseCode::Refused);
    }
    assert_eq!(world.recorder.seen().len(), 0);
    assert_eq!(world.reasons(), ["dns_operation", "dns_operation"]);
}

#[tokio::test]
async fn case_27_other_operations_are_not_implemented() {
    let world = DnsFixture::new().await;
    for (opcode, code) in [(1u16, 4), (2, 4), (4, 4), (5, 5), (6, 4), (15, 4)] {
        let answer = world
            .send_packet(&build_packet(opcode << 11, &wire_name("github.com"), A, 1, None))
            .await
            .unwrap();
        assert_eq!(answer[3] & 0xf, code, "opcode {opcode}");
        assert_eq!(answer.len(), 12, "only a header with the code");
    }
    assert_eq!(world.recorder.seen().len(), 0);
}

#[tokio::test]
async fn p18_a_refused_packet_is_recorded_with_the_name_it_asks_for() {
    let world = DnsFixture::new().await;
    let (name, long) = (wire_name("denied.test"), [&[200][..], &[b'x'; 200], b"\0"].concat());
    for packet in [
        build_packet(5 << 11, &name, A, 1, None), // UPDATE
        build_packet(0, &name, A, 1, None)[..12 + name.len()].to_vec(), // without type and class
        build_packet(0, b"\x06denied\xc0\x0c", A, 1, None), // a pointer
        build_packet(0, &wire_name("d\u{e9}nied\n.test"), A, 1, None),
        build_packet(0, &long, A, 1, None),
        build_packet(0, &name, 252, 1, None), // a zone transfer
        build_packet(0, &name, A, 1, None)[..12].to_vec(),
    ] {
        world.send_packet(&packet).await;
    }
    assert_eq!(world.recorder.seen().len(), 0);
    let tried = |record: &serde_json::Value| {
        let said = |value: &serde_json::Value| value.as_str().unwrap_or("-").to_owned();
        (said(&record["status_detail"]), said(&record["unmapped"]["sandbar"]["attempted"]))
    };
    let found: Vec<_> = world.records_at_stage("denied").iter().map(tried).collect();
    let expected = [
        ("dns_operation", "denied.test"),
        ("dns_malformed", "denied.test"),
        ("dns_malformed", "denied"),
        ("bad_name", "d\\xc3\\xa9nied\\n.test A"),
        ("dns_malformed", "(unreadable)"),
        ("dns_operation", "denied.test TYPE252"),
        ("dns_malformed", "(unreadable)"),
    ];
    let expected: Vec<_> = expected.map(|(code, tried)| (code.to_owned(), tried.to_owned())).to_vec();
    assert_eq!(found, expected);
}

#[tokio::test]
async fn case_28_other_classes_are_refused() {
    let world = DnsFixture::new().await;
    for class in [3, 4, 255, 0, 254] {
        let answer = ClientAnswer::parse(
            world
                .send_packet(&build_packet(0x100, &wire_name("version.bind"), TXT, class, Some(1232)))
                .await
                .unwrap(),
        );
        assert_eq!((answer.code(), answer.message.answers.len()), (ResponseCode::Refused, 0), "{class}");
    }
    assert_eq!(world.recorder.seen().len(), 0);
}

#[tokio::test]
async fn case_29_no_question_is_malformed() {
    let world = DnsFixture::new().await;
    let answer = world.send_packet(&[1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]).await.unwrap();
    assert_eq!(answer, [1, 2, 0x81, 0x81, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[tokio::test]
async fn case_30_two_questions_are_malformed_and_counts_allocate_nothing() {
    let world = DnsFixture::new().await;
    let mut two = build_packet(0x100, &wire_name("github.com"), A, 1, None);
    two[5] = 2;
    two.extend_from_slice(&two.clone()[12..]);
    assert_eq!(world.send_packet(&two).await.unwrap()[3] & 0xf, 1);
    let huge = [1, 2, 1, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    assert_eq!(world.send_packet(&huge).await.unwrap().len(), 12);
    assert_eq!(world.recorder.seen().len(), 0);
}

#[tokio::test]
async fn case_31_records_inside_a_query_never_leave() {
    let world = DnsFixture::new().await;
    let mut query = build_packet(0x100, &wire_name("github.com"), A, 1, None);
    query[7] = 1;
    query.extend_from_slice(&wire_name("secret.evil.example"));
    query.extend_from_slice(b"\x00\x10\x00\x01\x00\x00\x00\x00\x00\x07\x06secret");
    assert_eq!(ClientAnswer::parse(world.send_packet(&query).await.unwrap()).addresses().len(), 1);
    let seen = &world.recorder.seen()[0];
    assert!(seen.message.answers.is_empty() && !seen.packet.windows(6).any(|part| part == b"secret"));
}

#[tokio::test]
async fn case_32_an_answer_is_never_answered() {
    assert_eq!(
        DnsFixture::new()
            .await
            .send_packet(&build_packet(0x8180, &wire_name("github.com"), A, 1, None))
            .await,
        None
    );
}

#[tokio::test]
async fn p17_case_33_garbage_is_dropped_and_does_not_flood_the_log() {
    let world = DnsFixture::new().await;
    for length in 0..12 {
        assert_eq!(world.send_packet(&vec![7; length]).await, None);
    }
    for at in 0..2000u32 {
        world.send_packet(&at.to_be_bytes()).await;
    }
    let records = world.reasons();
    assert!(!records.is_empty() && records.len() <= 400, "{}", records.len());
}

#[tokio::test]
async fn case_34_another_edns_version_gets_badvers() {
    let world = DnsFixture::new().await;
    let mut query = build_query("github.com", A);
    let at = query.len() - 5;
    query[at] = 1;
    let answer = ClientAnswer::parse(world.send_packet(&query).await.unwrap());
    assert_eq!(u16::from(answer.code()), 16);
    assert_eq!(world.recorder.seen().len(), 0);
}

#[tokio::test]
async fn case_35_the_client_subnet_never_leaves() {
    let world = DnsFixture::new().await;
    let mut query = build_query("github.com", A);
    let at = query.len() - 1;
    query[at] = 12;
    query.extend_from_slice(&[0, 8, 0, 8, 0, 1, 32, 0, 10, 66, 77, 88]);
    world.send_packet(&query).await.unwrap();
    let seen = &world.recorder.seen()[0];
    assert!(!seen.packet.windows(4).any(|part| part == [10, 66, 77, 88]));
    let Some(EdnsOption::Subnet(subnet)) = seen.message.edns.as_ref().unwrap().option(EdnsCode::Subnet)
    else {
        panic!()
    };
    assert_eq!(subnet.source_prefix(), 0);
}

#[tokio::test]
async fn case_36_no_option_of_the_sandbox_leaves() {
    let world = DnsFixture::new().await;
    for code in [3u16, 10, 12, 65001] {
        let mut query = build_query(&format!("o{code}.wild.example"), A);
        let at = query.len() - 1;
        query[at] = 12;
        query.extend_from_slice(&code.to_be_bytes());
        query.extend_from_slice(b"\x00\x08SECRET!!");
        world.send_packet(&query).await.unwrap();
    }
    assert_eq!(world.recorder.seen().len(), 4);
    assert!(world.recorder.seen().iter().all(|seen| !seen.packet.windows(6).any(|part| part == b"SECRET")));
}

#[tokio::test]
async fn case_37_flags_id_and_payload_size_are_ours() {
    let world = DnsFixture::new().await;
    for (at, flags) in [0x0000u16, 0x0100, 0x0110, 0x0120, 0x0130, 0x0170, 0x06f0].into_iter().enumerate() {
        world
            .send_packet(&build_packet(
                flags,
                &wire_name(&format!("f{at}.wild.example")),
                A,
                1,
                Some(512 + at as u16),
            ))
            .await
            .unwrap();
    }
    let seen = world.recorder.seen();
    assert_eq!(seen.len(), 7);
    for one in &seen {
        assert_eq!(one.packet[2..4], [0x01, 0x00], "only RD is set");
        assert_eq!(one.message.edns.as_ref().unwrap().max_payload(), 1232);
        assert!(!one.message.edns.as_ref().unwrap().flags().dnssec_ok);
    }
    let ids: std::collections::HashSet<u16> = seen.iter().map(|one| one.message.metadata.id).collect();
    assert!(ids.len() > 1 && !ids.contains(&0x1234) || ids.len() > 5);
}

#[tokio::test]
async fn case_38_two_opt_records_are_malformed() {
    let world = DnsFixture::build(ALLOW, plain_reply, |_| {}).await;
    let mut query = build_query("github.com", A);
    let opt = query[query.len() - 11..].to_vec();
    query[11] = 2;
    query.extend_from_slice(&opt);
    assert_eq!(world.send_packet(&query).await.unwrap()[3] & 0xf, 1);
    assert_eq!(world.recorder.seen().len(), 0);
}
