//! How a text arrives makes no difference, and what cannot be an echo is not delayed.

use proptest::prelude::*;

use super::spellings::spellings;
use super::*;

#[test]
fn an_event_is_not_delayed() {
    let patterns = patterns();
    for event in ["data: one\n\n", "data: three s\n\n", "data: {\"a\":\"s\"}\n", "data: {\"a\":1}\r\n\r\n"] {
        let mut scrubber = ResponseScrubber::new(patterns.clone());
        let event = Bytes::copy_from_slice(event.as_bytes());
        assert_eq!(scrubber.scrub(Some(&event), false), event, "an event must not be delayed");
    }
}

#[test]
fn little_is_held_back_and_never_more_than_the_bound() {
    let patterns = patterns();
    for text in [
        format!("s{}", "\\n".repeat(10_000)),
        format!("s{}", " ".repeat(10_000)),
        "sk-".repeat(10_000),
        "\\".repeat(10_000),
        "&#0000".repeat(3_000),
        "A".repeat(10_000),
        "115, ".repeat(3_000),
    ] {
        let mut scrubber = ResponseScrubber::new(patterns.clone());
        let passed = scrubber.scrub(Some(&Bytes::from(text.clone())), false);
        assert!(text.len() - passed.len() < 600, "{} of {}", passed.len(), text.escape_debug());
        assert!(text.as_bytes().starts_with(&passed));
    }
    let value = "k".repeat(4) + &"x7Kq92Lz".repeat(1000);
    let long = Arc::new(EchoPatterns::new([("key", &value)]));
    let mut scrubber = ResponseScrubber::new(long);
    let mut spelled = value.get(..7900).unwrap().to_owned();
    spelled = spelled.bytes().map(|octet| format!("&#x00000000000000{octet:x};")).collect();
    let (mut passed, mut most) = (Vec::new(), 0);
    let mut taken = 0;
    for piece in spelled.as_bytes().chunks(1000) {
        taken += piece.len();
        passed.extend_from_slice(&scrubber.scrub(Some(&Bytes::copy_from_slice(piece)), false));
        most = most.max(taken - passed.len());
    }
    assert!(most <= search::MAX_HELD + 1000, "{most}");
    assert!(scrubber.echo_count() > 0, "what is too long to hold is masked");
    assert!(passed.iter().take(1000).all(|octet| *octet == b'*'));
}

#[test]
fn p11_an_echo_after_what_begins_like_one_is_covered() {
    let patterns = patterns();
    for text in [format!("sk-sk-live/{SECRET}"), format!("sk-l%73{SECRET}"), format!("\\\\\\{SECRET}")] {
        for size in 1..text.len() {
            let (out, found) = scrub_in_pieces(&patterns, text.as_bytes(), &[size]);
            assert_eq!(found, 1, "{text} by {size}");
            assert!(!String::from_utf8(out).unwrap().contains(SECRET), "{text} by {size}");
        }
    }
}

#[test]
fn a_message_that_ends_like_an_echo_begins_is_passed_whole() {
    let mut scrubber = ResponseScrubber::new(patterns());
    scrubber.expect_grpc();
    let message = Bytes::from_static(b"\0\0\0\0\x04ends\0\0\0\0\x02sk");
    assert_eq!(scrubber.scrub(Some(&message), false), message);
    let begun = Bytes::from_static(b"\0\0\0\0\x18sk-live/");
    let passed = scrubber.scrub(Some(&begun), false).len();
    assert!(passed <= 5, "within a message the start of an echo is held back: {passed}");
}

#[test]
fn p11_a_long_token_is_masked_whatever_the_pieces() {
    let mut seed = 7u64;
    let digit = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"[(seed >> 58) as usize])
    };
    let value: String = std::iter::repeat_with(digit).take(4096).collect();
    let patterns = Arc::new(EchoPatterns::new([("key", &value)]));
    for (what, spelled, _) in spellings(&value) {
        let text = [b"(", &*spelled, b")"].concat();
        for sizes in [&[usize::MAX][..], &[4099, 1]] {
            let (masked, found) = scrub_in_pieces(&patterns, &text, sizes);
            let clear = masked.iter().filter(|octet| **octet != b'*').count();
            assert!(found > 0 && clear <= 70, "{what} by {sizes:?}: {clear} octets");
        }
    }
}

/// Parts of spellings, so that they stand beside each other and are cut off.
fn words() -> Vec<Vec<u8>> {
    let parts = |(_, spelled, _): (&str, Vec<u8>, usize)| {
        let third = spelled.len() / 3;
        let parts: [&[u8]; 4] = [
            &spelled,
            spelled.get(..third).unwrap_or_default(),
            spelled.get(third..).unwrap_or_default(),
            spelled.get(..spelled.len() - 1).unwrap_or_default(),
        ];
        parts.map(<[u8]>::to_vec)
    };
    let marks = [
        "%", "%7", "\\", "\\u00", "&", "&#", "\\n", "\n", "\r\n", "\n\n", "x", "é", "=", " ", "\0", ",", "\"",
    ];
    let marks = marks.map(|mark| mark.as_bytes().to_vec());
    spellings("sk-live-8fJ2kq/0Z+p7=").into_iter().flat_map(parts).chain(marks).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn p11_pieces_make_no_difference(
        text in proptest::collection::vec(proptest::sample::select(words()), 0..6).prop_map(|words| words.concat()),
        sizes in proptest::collection::vec(1usize..40, 1..8),
    ) {
        let patterns = Arc::new(EchoPatterns::new([("key", "sk-live-8fJ2kq/0Z+p7=")]));
        let mut whole = text.clone();
        let found = patterns.mask(&mut whole);
        let (masked, count) = scrub_in_pieces(&patterns, &text, &sizes);
        prop_assert_eq!(masked.escape_ascii().to_string(), whole.escape_ascii().to_string(), "{}", text.escape_ascii());
        prop_assert_eq!(found > 0, count > 0);
    }
}
