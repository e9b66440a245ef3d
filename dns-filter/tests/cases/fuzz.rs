//! Runs the fuzzers' checks on a bounded number of packets: fragments in random order, and random bytes.

use proptest::prelude::*;
use proptest::strategy::ValueTree;

#[path = "../../fuzz/checks.rs"]
mod checks;

/// Number of packets per check.
const PACKETS: u32 = 3000;

const QUESTIONS: &[&[u8]] = &[
    b"\x01a\x07example\x00",
    b"\x01A\x07eXample\x00",
    b"\x01x\x01b\x07example\x00",
    b"\x05x\x01b.e\x01b\x07example\x00",
    b"\x01x",
    b"\x03x.b",
    b"\x04x\xff\x00+",
    b"\x09localhost\x00",
    b"\x013\x012\x011\x03127\x07in-addr\x04arpa\x00",
    b"\x3faaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    b"\x00\x01\x00\x01",
    b"\x00\x1c\x00\x01",
    b"\x00\xff\x00\x01",
    b"\x00\x01\x00\x03",
    b"\xc0\x0c",
    b"\xc0\xff",
    b"\x40",
    b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00",
    b"\x00\x00\x29\xff\xff\x00\x01\x80\x00\x00\x04\x00\x0f\x00\x00",
    b"\x00",
    b"\xff\xff",
];

const RECORDS: &[&[u8]] = &[
    b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\x5d\xb8\xd8\x22",
    b"\xc0\x0c\x00\x01\x00\x01\xff\xff\xff\xff\x00\x04\x0a\x00\x00\x01",
    b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x04\x7f\x00\x00\x01",
    b"\xc0\x0c\x00\x1c\x00\x01\x00\x00\x00\x3c\x00\x10\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01",
    b"\xc0\x0c\x00\x1c\x00\x01\x00\x00\x00\x3c\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x0a\x00\x00\x01",
    b"\xc0\x0c\x00\x05\x00\x01\x00\x00\x00\x3c\x00\x02\xc0\x0c",
    b"\xc0\x0c\x00\x05\x00\x01\x00\x00\x00\x3c\x00\x05\x01t\xc0\x0e\x00",
    b"\x01t\xc0\x0e\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\x5d\xb8\xd8\x22",
    b"\xc0\x0c\x00\x10\x00\x01\x00\x00\x00\x3c\x00\x03\x02hi",
    b"\xc0\x0c\x00\x41\x00\x01\x00\x00\x00\x3c\x00\x0d\x00\x01\x00\x00\x04\x00\x04\x0a\x00\x00\x01\x00\x00",
    b"\xc0\x0c\x00\x06\x00\x01\x00\x00\x00\x3c\x00\x18\xc0\x0c\xc0\x0c\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x01",
    b"\xc0\x0c\x00\x0f\x00\x01\x00\x00\x00\x3c\x00\x04\x00\x01\xc0\x0c",
    b"\xc0\x0c\x00\x21\x00\x01\x00\x00\x00\x3c\x00\x08\x00\x01\x00\x01\x01\xbb\xc0\x0c",
    b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x40",
];

const NAMES: &[&[u8]] = &[b"\x01a\x07example\x00", b"\x01x\x01b\x07example\x00"];

fn header(flags: u16, counts: [u16; 4]) -> Vec<u8> {
    [0xabcd, flags].iter().chain(&counts).flat_map(|field| field.to_be_bytes()).collect()
}

fn any_query() -> impl Strategy<Value = Vec<u8>> {
    let flags = prop_oneof![4 => Just(0x0100u16), 1 => any::<u16>()];
    let count = || prop_oneof![6 => Just(0u16), 2 => Just(1u16), 1 => any::<u16>()];
    let one = prop_oneof![6 => Just(1u16), 1 => any::<u16>()];
    let pieces = proptest::collection::vec(proptest::sample::select(QUESTIONS), 0..8);
    (flags, one, count(), count(), count(), pieces)
        .prop_map(|(flags, one, a, b, c, pieces)| [header(flags, [one, a, b, c]), pieces.concat()].concat())
}

fn any_answer() -> impl Strategy<Value = Vec<u8>> {
    let code = prop_oneof![4 => Just(0u16), 1 => 0u16..16];
    let records = proptest::collection::vec(proptest::sample::select(RECORDS), 0..60);
    let question = proptest::sample::select(NAMES);
    (code, question, records, 0u16..3).prop_map(|(code, question, records, late)| {
        let all = records.len() as u16;
        let counts = [1, all.saturating_sub(late), late.min(all), 0];
        [header(0x8180 | code, counts), question.to_vec(), b"\x00\x01\x00\x01".to_vec(), records.concat()]
            .concat()
    })
}

fn or_any_bytes(packets: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![6 => packets, 1 => proptest::collection::vec(any::<u8>(), 0..300)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(PACKETS))]

    #[test]
    fn query(data in or_any_bytes(any_query())) {
        checks::query(&data);
    }

    #[test]
    fn answer(data in or_any_bytes(any_answer())) {
        checks::answer(&data);
    }
}

/// An answer with a question and no record, which the checks once got wrong.
#[test]
fn an_answer_without_records() {
    let packet = b"\xab\xcd\x81\x80\0\x01\0\0\0\0\0\0\x01a\x07example\0\0\x01\0\x01";
    checks::query(packet);
    checks::answer(packet);
}

/// The fragments must make valid and invalid packets, or the checks above would check nothing.
#[test]
fn the_pieces_reach_every_kind_of_packet() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut read, mut refused, mut messages) = (0, 0, 0);
    for _ in 0..2000 {
        let query = any_query().new_tree(&mut runner).unwrap().current();
        match dns_filter::message::DnsQuery::parse(&query) {
            Ok(_) => read += 1,
            Err(_) => refused += 1,
        }
        let answer = any_answer().new_tree(&mut runner).unwrap().current();
        let message = hickory_proto::op::Message::from_vec(&answer);
        messages += usize::from(message.is_ok_and(|message| message.answers.len() > 1));
    }
    assert!(read > 50 && refused > 50 && messages > 50, "{read} {refused} {messages}");
}
