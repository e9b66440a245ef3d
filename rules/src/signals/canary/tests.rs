//! Tests of canaries: that they look real, that pieces are put together, and that other content is no alarm.
#![allow(clippy::string_slice, reason = "the texts of these tests are ASCII")]

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::signals::{Signal, SignalCode, SignalPlace, ViewMatcher};

const NOW: u64 = 1_800_000_000;
const WINDOW: Duration = Duration::from_secs(600);

fn random(seed: u64) -> [u8; RANDOM_BYTES] {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    std::array::from_fn(|_| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 40) as u8
    })
}

fn canary(shape: CanaryShape, seed: u64) -> Canary {
    make(shape, &format!("{shape}-{seed}"), &random(seed * 8 + shape as u64)).unwrap()
}

/// Returns a set with one canary of each shape.
fn set() -> Arc<CanarySet> {
    Arc::new(CanarySet::new(CanaryShape::ALL.map(|shape| canary(shape, 1)).into()).unwrap())
}

/// Sends each content as a request of its own.
fn send(tracker: &mut CanaryTracker, set: &Arc<CanarySet>, requests: &[&[u8]], now: u64) -> Vec<Signal> {
    let mut found = Vec::new();
    for request in requests {
        let mut scanner = CanaryScanner::new(Arc::clone(set));
        scanner.feed(request, &mut found);
        scanner.finish(&mut found);
        tracker.record(&mut scanner, &SignalPlace::Attempt, now, &mut found);
    }
    found
}

#[test]
fn canaries_look_real() {
    for seed in 0..200 {
        let aws = canary(CanaryShape::AwsKey, seed);
        let [id, secret] = aws.values() else { panic!("{aws:?}") };
        assert_eq!((id.len(), secret.len()), (20, 40));
        let bits = id[4..].bytes().fold(0_u128, |bits, byte| {
            bits << 5 | BASE32.iter().position(|letter| *letter == byte).unwrap() as u128
        });
        assert!((bits >> 39 & ((1 << 40) - 1)) < 1_000_000_000_000, "an account has twelve digits");
        assert_eq!(bits >> 79, 1);

        let github = canary(CanaryShape::GithubToken, seed);
        assert_eq!(github.text().len(), 40);
        assert_eq!(github_checksum(&github.text()[4..34]), github.text()[34..]);

        let name = canary(CanaryShape::DnsName, seed).text();
        assert_eq!(crate::DomainName::parse(&name).unwrap().as_str(), name);

        for shape in CanaryShape::ALL {
            let made = canary(shape, seed);
            assert_eq!(Canary::from_values(shape, made.name(), made.values().to_vec()).unwrap(), made);
            assert!(made.values().iter().all(|value| made.text().contains(value)), "{}", made.text());
            assert_ne!(made.values(), canary(shape, seed + 1).values());
            assert!(!format!("{made:?}").contains(&made.values()[0]), "a canary's value is not for logs");
            assert_eq!(shape.to_string().parse(), Ok(shape));
        }
    }
    // A token from GitHub's own documentation.
    assert_eq!(github_checksum("zQWBuTSOoRi4A9spHcVY5ncnsDkxkJ"), "0mLq17");
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}

#[test]
fn what_is_no_canary_is_refused() {
    let token = canary(CanaryShape::Token, 1).values().to_vec();
    let github = canary(CanaryShape::GithubToken, 1).values().to_vec();
    let wrong_checksum = vec![format!("{}0", &github[0][..39])];
    for (shape, name, values, error) in [
        (CanaryShape::Token, "", token.clone(), CanaryError::Name),
        (CanaryShape::Token, "a b", token.clone(), CanaryError::Name),
        (CanaryShape::Token, "a\n", token.clone(), CanaryError::Name),
        (CanaryShape::Token, "a", vec![], CanaryError::Value),
        (CanaryShape::Token, "a", vec!["the".to_owned()], CanaryError::Value),
        (CanaryShape::GithubToken, "a", token.clone(), CanaryError::Value),
        (CanaryShape::GithubToken, "a", wrong_checksum, CanaryError::Value),
        (CanaryShape::GithubToken, "a", vec!["ghp_ä".repeat(8)], CanaryError::Value),
        (CanaryShape::Sentence, "a", vec!["all work and no play".to_owned()], CanaryError::Value),
        (CanaryShape::DnsName, "a", vec!["www.example.com".to_owned()], CanaryError::Value),
        (CanaryShape::AwsKey, "a", token.clone(), CanaryError::Value),
    ] {
        assert_eq!(Canary::from_values(shape, name, values.clone()), Err(error), "{name} {values:?}");
    }
    assert_eq!(make(CanaryShape::Token, "a", &[1; 63]), Err(CanaryError::Random { found: 63 }));
    assert_eq!("AWS-key".parse::<CanaryShape>(), Err(CanaryError::Shape));

    let one = canary(CanaryShape::Token, 1);
    let same_value = Canary::from_values(CanaryShape::Token, "other", token).unwrap();
    for (canaries, error) in [
        (vec![one.clone(), one.clone()], CanaryError::Duplicate),
        (vec![one.clone(), same_value], CanaryError::Duplicate),
        (
            (0..=MAX_CANARIES as u64).map(|seed| canary(CanaryShape::Token, seed)).collect(),
            CanaryError::TooMany,
        ),
    ] {
        assert_eq!(CanarySet::new(canaries).map(|_| ()), Err(error));
    }
}

#[test]
fn whole_values_are_an_alarm() {
    let set = set();
    assert_eq!(set.exact_values().count(), 6);
    for (canary, value) in set.exact_values() {
        let mut tracker = CanaryTracker::new(Arc::clone(&set), WINDOW);
        let content = format!("{{\"note\": \"{value}\"}}");
        let found = send(&mut tracker, &set, &[content.as_bytes()], NOW);
        let [signal] = found.as_slice() else { panic!("{canary:?}: {found:?}") };
        assert_eq!(signal.code, SignalCode::CanaryUsed);
        assert_eq!(signal.what, format!("canary \"{}\"", canary.name()));
        assert!(signal.value >= signal.threshold);
        assert!(tracker.is_empty());
    }
}

#[test]
fn pieces_count_within_the_window_only() {
    let set = set();
    let token = canary(CanaryShape::Token, 1).values()[0].clone();
    let (first, second) = token.split_at(20);
    for (pause, alarms) in [(0, 1), (599, 1), (600, 0), (100_000, 0)] {
        let mut tracker = CanaryTracker::new(Arc::clone(&set), WINDOW);
        assert_eq!(send(&mut tracker, &set, &[first.as_bytes()], NOW), []);
        assert_eq!(tracker.len(), 1);
        let found = send(&mut tracker, &set, &[second.as_bytes()], NOW + pause);
        assert_eq!(found.len(), alarms, "after {pause} s");
    }
    let mut tracker = CanaryTracker::new(Arc::clone(&set), WINDOW);
    // The same half again is not the other half, and a new set with the same canary keeps the first.
    assert_eq!(send(&mut tracker, &set, &[first.as_bytes(), first.as_bytes()], NOW), []);
    let canaries = vec![canary(CanaryShape::Token, 9), canary(CanaryShape::Token, 1)];
    let replaced = Arc::new(CanarySet::new(canaries).unwrap());
    tracker.replace_set(Arc::clone(&replaced));
    assert_eq!(send(&mut tracker, &set, &[second.as_bytes()], NOW), [], "pieces of another set do not count");
    assert_eq!(send(&mut tracker, &replaced, &[second.as_bytes()], NOW).len(), 1);
    send(&mut tracker, &replaced, &[first.as_bytes()], NOW);
    tracker.expire(NOW + 600);
    assert!(tracker.is_empty());
}

#[test]
fn other_content_is_no_alarm() {
    let canaries = (0..20).flat_map(|seed| CanaryShape::ALL.map(|shape| canary(shape, seed)));
    let set = Arc::new(CanarySet::new(canaries.collect()).unwrap());
    let mut tracker = CanaryTracker::new(Arc::clone(&set), WINDOW);
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) as usize
    };
    let words =
        ["banana", "to", "reduce", "a", "copper", "vase", "the", "before", "harbour", "key-value", "we"];
    for request in 0..1000 {
        let content: String = match request % 4 {
            0 => (0..2000).map(|_| words[next() % words.len()].to_owned() + " ").collect(),
            1 => (0..10_000).map(|_| char::from(BASE64[next() % 64])).collect(),
            2 => (0..10_000).map(|_| char::from(BASE32[next() % 32])).collect(),
            _ => (0..1500).map(|_| word(&next().to_le_bytes()[..7]) + "-").collect(),
        };
        assert_eq!(send(&mut tracker, &set, &[content.as_bytes()], NOW), []);
    }
}

#[test]
fn a_flood_stays_within_bounds() {
    let canaries = (0..MAX_CANARIES as u64).map(|seed| canary(CanaryShape::Token, seed)).collect();
    let set = Arc::new(CanarySet::new(canaries).unwrap());
    let mut tracker = CanaryTracker::new(Arc::clone(&set), WINDOW);
    let halves: String = set.exact_values().map(|(_, value)| value[..20].to_owned() + " ").collect();
    for _ in 0..5 {
        assert_eq!(send(&mut tracker, &set, &[halves.as_bytes()], NOW), []);
        assert_eq!(tracker.len(), MAX_CANARIES);
    }
    let whole: String = set.exact_values().map(|(_, value)| value.to_owned() + " ").collect();
    assert_eq!(send(&mut tracker, &set, &[whole.as_bytes()], NOW).len(), MAX_CANARIES);
    assert!(tracker.is_empty());
}

/// Cuts `text` into pieces of at least `least` characters.
fn cut<'a>(text: &'a str, least: usize, lengths: &[usize]) -> Vec<&'a str> {
    let mut rest = text;
    let mut pieces = Vec::new();
    for length in lengths.iter().cycle() {
        let length = least + length;
        if rest.len() < length + least {
            pieces.push(rest);
            break;
        }
        let (piece, after) = rest.split_at(length);
        pieces.push(piece);
        rest = after;
    }
    pieces
}

proptest! {
    /// In order or shuffled, in either case, with other content around, in any chunking.
    #[test]
    fn pieces_are_put_together(
        shape in prop::sample::select(CanaryShape::ALL.to_vec()),
        lengths in prop::collection::vec(0_usize..30, 1..6),
        order in prop::collection::vec(any::<u8>(), 40),
        case in any::<bool>(),
        around in ("[ -~]{0,40}", "[ -~]{0,40}"),
        chunks in prop::collection::vec(1_usize..30, 1..6),
    ) {
        let set = set();
        let least = if shape == CanaryShape::Sentence { MIN_SENTENCE_PIECE } else { MIN_PIECE };
        let mut tracker = CanaryTracker::new(Arc::clone(&set), WINDOW);
        let mut found = Vec::new();
        for value in canary(shape, 1).values() {
            let mut pieces: Vec<_> = cut(value, least, &lengths).into_iter().zip(&order).collect();
            pieces.sort_by_key(|(_, order)| **order);
            for (at, (piece, _)) in pieces.into_iter().enumerate() {
                let piece = if case { piece.to_ascii_uppercase() } else { piece.to_owned() };
                let content = format!("{}\n{piece}\n{}", around.0, around.1);
                let mut scanner = CanaryScanner::new(Arc::clone(&set));
                let mut rest = content.as_bytes();
                for length in chunks.iter().cycle() {
                    let (chunk, after) = rest.split_at(rest.len().min(*length));
                    scanner.feed(chunk, &mut found);
                    rest = after;
                    if rest.is_empty() {
                        break;
                    }
                }
                scanner.finish(&mut found);
                tracker.record(&mut scanner, &SignalPlace::Query, NOW + at as u64, &mut found);
            }
        }
        prop_assert!(!found.is_empty());
    }

    #[test]
    fn short_pieces_are_out_of_reach(length in 1_usize..MIN_PIECE) {
        let set = set();
        let mut tracker = CanaryTracker::new(Arc::clone(&set), WINDOW);
        for (_, value) in set.exact_values() {
            let requests: Vec<&[u8]> = value.as_bytes().chunks(length).collect();
            prop_assert_eq!(send(&mut tracker, &set, &requests, NOW), []);
        }
    }
}
