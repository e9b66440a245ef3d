//! Tests of the guarantee: what is recognised, what is not, and that nothing grows without bound (P15).
#![allow(clippy::string_slice, reason = "the texts of these tests are ASCII")]

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::ids::BankId;
use crate::signals::{Signal, SignalCode};

const NOW: u64 = 1_800_000_000;
const HOUR: u64 = 3600;
const RECALLED: &str = "The customer in Lindau prefers deliveries before nine; her gate code is 4417, and the \
                        spare key hangs behind the third flower pot on the left side of the garden shed.";

fn key() -> FlowKey {
    FlowKey::new(&[7; 32])
}

fn bank(name: &str) -> BankId {
    BankId::parse(name).unwrap()
}

fn limits() -> FlowLimits {
    FlowLimits { max_fingerprints: 4096, lifetime: Duration::from_secs(HOUR) }
}

fn table(text: &str) -> FlowTable {
    let mut table = FlowTable::new(&key(), limits());
    table.insert_text(&bank("prod:notes"), text, NOW);
    table
}

fn signals(snapshot: &FlowSnapshot, pieces: &[&[u8]], now: u64) -> Vec<Signal> {
    let mut matcher = FlowMatcher::new(&key());
    let found = pieces.iter().flat_map(|piece| {
        let signals: Vec<Signal> = matcher.feed(snapshot, piece, now).iter().map(FlowMatch::signal).collect();
        signals
    });
    found.collect()
}

fn is_found(table: &mut FlowTable, text: &str, now: u64) -> bool {
    !signals(&table.snapshot(), &[text.as_bytes()], now).is_empty()
}

/// Returns letters that repeat nowhere within a test.
fn noise(seed: u64, length: usize) -> String {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut letter = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        char::from(b'a' + (state >> 40) as u8 % 26)
    };
    (0..length).map(|_| letter()).collect()
}

fn normalized(text: &str) -> String {
    text.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

#[test]
fn p15_recalled_text_is_recognised_in_other_forms() {
    for (recalled, leaves, found) in [
        (RECALLED, RECALLED.to_owned(), true),
        (RECALLED, RECALLED.to_uppercase(), true),
        (RECALLED, RECALLED.replace(' ', "\r\n\t> "), true),
        (RECALLED, RECALLED.replace(' ', ""), true),
        (RECALLED, RECALLED.replace(' ', "**_").replace(';', "&"), true),
        (RECALLED, RECALLED.chars().map(|c| format!("{c}\u{200b}")).collect(), true),
        (RECALLED, RECALLED.chars().map(|c| format!("\"{c}\",")).collect(), true),
        (RECALLED, RECALLED.replace("e", "ｅ").replace("T", "Ｔ"), true),
        (RECALLED, RECALLED.replace(' ', "\\n"), false),
        (RECALLED, RECALLED.replace("e", "е"), false),
        (RECALLED, RECALLED.chars().rev().collect(), false),
        (RECALLED, "The customer in Lindau".to_owned(), false),
        (RECALLED, String::new(), false),
        ("Die Kundin in Zürich möchte Lieferungen nur vor neun Uhr, bitte nicht läuten, weil der Hund schläft",
         "DIE KUNDIN IN ZÜRICH MÖCHTE LIEFERUNGEN NUR VOR NEUN UHR, BITTE NICHT LÄUTEN, WEIL DER HUND SCHLÄFT".to_owned(), true),
        ("Ο πελάτης προτιμά παραδόσεις πριν από τις εννέα και ο κωδικός της πύλης είναι γραμμένος πίσω",
         "Ο ΠΕΛΆΤΗΣ ΠΡΟΤΙΜΆ ΠΑΡΑΔΌΣΕΙΣ ΠΡΙΝ ΑΠΌ ΤΙΣ ΕΝΝΈΑ ΚΑΙ Ο ΚΩΔΙΚΌΣ ΤΗΣ ΠΎΛΗΣ ΕΊΝΑΙ ΓΡΑΜΜΈΝΟΣ ΠΊΣΩ".to_owned(), true),
        ("林道の顧客は午前九時より前の配達を希望しており、門の暗証番号は四四一七で、予備の鍵は庭の物置の左側にある三番目の植木鉢の後ろに掛かっています",
         "「林道の顧客は午前九時より前の配達を希望しており門の暗証番号は四四一七で予備の鍵は庭の物置の左側にある三番目の植木鉢の後ろ".to_owned(), true),
        ("00000000-0000-0000-0000-000000000000 00000000-0000-0000-0000-000000000000",
         "00000000-0000-0000-0000-000000000000".to_owned(), false),
        ("", RECALLED.to_owned(), false),
    ] {
        assert_eq!(is_found(&mut table(recalled), &leaves, NOW), found, "{leaves}");
    }
}

#[test]
fn p15_a_finding_names_bank_and_amount_but_no_text() {
    let mut table = table(RECALLED);
    let snapshot = table.snapshot();
    let mut matcher = FlowMatcher::new(&key());
    let feed = |matcher: &mut FlowMatcher, text: &str| matcher.feed(&snapshot, text.as_bytes(), NOW).to_vec();
    let found = feed(&mut matcher, RECALLED);
    assert_eq!(feed(&mut matcher, " and again "), []);
    assert_eq!(feed(&mut matcher, RECALLED), [], "each bank is returned once");
    let [found] = found.as_slice() else { panic!("{found:?}") };
    let signal = found.signal();
    assert_eq!(signal.code, SignalCode::MemoryFlow);
    assert_eq!(signal.what, "text of memory bank `prod:notes`");
    assert_eq!(signal.threshold, 48);
    let length = normalized(RECALLED).len() as u64;
    assert!(signal.value.abs_diff(length) <= 24, "{} of {length}", signal.value);
    let [total] = matcher.matched() else { panic!() };
    assert!(total.characters.abs_diff(2 * length) <= 48, "{} of {}", total.characters, 2 * length);

    // The next view counts from the beginning.
    matcher.finish();
    assert_eq!((matcher.undecided(), matcher.matched()), (0, &[][..]));
    assert_eq!(feed(&mut matcher, RECALLED).len(), 1);
    assert!(matcher.undecided() <= MAX_UNDECIDED);
}

#[test]
fn p15_each_bank_counts_for_itself() {
    let mut table = table(RECALLED);
    let other = noise(3, 400);
    table.insert_text(&bank("prod:team-a"), &other, NOW);
    table.insert_text(&bank("prod:copy"), RECALLED, NOW);
    let snapshot = table.snapshot();
    for (text, reported) in
        [(RECALLED, vec!["prod:copy", "prod:notes"]), (other.as_str(), vec!["prod:team-a"])]
    {
        let mut banks: Vec<_> =
            snapshot.match_text(text, NOW).iter().map(|found| found.bank.to_string()).collect();
        banks.sort();
        assert_eq!(banks, reported);
    }
}

#[test]
fn p15_names_and_fields_are_joined_and_requests_are_not() {
    let text = "the gate code of the garden shed is four four one seven and the key is under the third pot";
    let mut table = table(text);
    let snapshot = table.snapshot();
    let name: String =
        normalized(text).as_bytes().chunks(20).map(|l| str::from_utf8(l).unwrap().to_owned() + ".").collect();
    assert_eq!(snapshot.match_text(&format!("{name}evil.example"), NOW).len(), 1);
    assert_eq!(snapshot.match_text("www.example.com", NOW), []);

    let fields: Vec<&[u8]> = text.as_bytes().chunks(10).collect();
    assert_eq!(signals(&snapshot, &fields, NOW).len(), 1);

    assert!(fields.iter().all(|field| signals(&snapshot, &[*field], NOW).is_empty()));
}

#[test]
fn p15_text_is_forgotten_when_it_expires() {
    let mut table = table(RECALLED);
    let old = table.snapshot();
    assert!(is_found(&mut table, RECALLED, NOW + HOUR - 1));
    assert!(!is_found(&mut table, RECALLED, NOW + HOUR));
    table.insert_text(&bank("prod:notes"), RECALLED, NOW + HOUR / 2);
    assert!(is_found(&mut table, RECALLED, NOW + HOUR));
    table.expire(NOW + HOUR);
    assert!(is_found(&mut table, RECALLED, NOW + HOUR));
    table.expire(NOW + 2 * HOUR);
    assert!(table.is_empty());
    assert!(!is_found(&mut table, RECALLED, NOW));
    assert_eq!(signals(&old, &[RECALLED.as_bytes()], NOW).len(), 1, "a snapshot keeps what it has");
}

#[test]
fn p15_repeated_recalls_add_nothing() {
    let text = noise(11, 5000);
    let mut table = table(&text);
    let once = table.len();
    assert_eq!(once, 2 * ((5000 - GRAM) / PAIR_DISTANCE + 1));
    table.insert_text(&bank("prod:notes"), &text, NOW + 1);
    assert_eq!(table.len(), once);
    // Behind another beginning, sampling falls in with what is known.
    table.insert_text(&bank("prod:notes"), &format!("7 results found: {text}"), NOW + 2);
    assert!(table.len() <= once + 4, "{} after {once}", table.len());
}

#[test]
fn p15_a_flood_stays_within_bounds() {
    let mut table = FlowTable::new(&key(), limits());
    for round in 0..200 {
        table.insert_text(&bank(&format!("prod:bank-{round}")), &noise(round, 2000), NOW + round);
        assert!(table.len() <= 4096);
    }
    assert!(table.evicted() > 0);
    assert!(table.bytes() < 4096 * 4 / 3 * 16 + 4096 * 4 + 1024 + 4096 / 16 * 512, "{}", table.bytes());
    assert!(!is_found(&mut table, &noise(0, 2000), NOW + 200), "the oldest gives way");
    assert!(is_found(&mut table, &noise(199, 2000), NOW + 200));

    // More banks than labels, and the same text in more banks than a gram is kept for.
    let mut table = FlowTable::new(&key(), limits());
    for round in 0..MAX_BANKS as u64 + 100 {
        table.insert_text(&bank(&format!("prod:bank-{round}")), RECALLED, NOW + round / 10);
    }
    assert!(table.len() <= 2 * normalized(RECALLED).len().div_ceil(PAIR_DISTANCE) * MAX_BANKS_PER_GRAM);
    let matches = table.snapshot().match_text(RECALLED, NOW + 420);
    assert_eq!(matches.len(), MAX_BANKS_PER_GRAM);
    assert!(matches.iter().any(|found| found.bank == bank(&format!("prod:bank-{}", MAX_BANKS + 99))));
}

#[test]
fn p15_more_banks_than_labels() {
    let mut table = FlowTable::new(&key(), FlowLimits { max_fingerprints: 1 << 16, ..limits() });
    let rounds = MAX_BANKS as u64 + 10;
    for round in 0..rounds {
        table.insert_text(&bank(&format!("prod:bank-{round}")), &noise(round, 100), NOW + round / 10);
    }
    assert!(!is_found(&mut table, &noise(0, 100), NOW + HOUR / 8));
    for round in [MAX_BANKS as u64 / 4, MAX_BANKS as u64, rounds - 1] {
        let matches = table.snapshot().match_text(&noise(round, 100), NOW + HOUR / 8);
        assert_eq!(
            matches.first().map(|found| found.bank.clone()),
            Some(bank(&format!("prod:bank-{round}")))
        );
    }
}

#[test]
fn p15_stored_tables_are_kept_and_damaged_ones_refused() {
    let mut before = table(RECALLED);
    before.insert_text(&bank("staging:x"), &noise(5, 3000), NOW);
    let bytes = before.to_bytes();
    assert!(!bytes.windows(8).any(|window| window == b"customer"));
    let mut after = FlowTable::from_bytes(&key(), limits(), &bytes, NOW + 1).unwrap();
    assert_eq!(after.len(), before.len());
    assert!(is_found(&mut after, RECALLED, NOW + 1));
    assert!(!is_found(&mut after, RECALLED, NOW + HOUR));
    let expired = FlowTable::from_bytes(&key(), limits(), &bytes, NOW + HOUR).unwrap();
    assert!(expired.is_empty());

    let read = |bytes: &[u8]| FlowTable::from_bytes(&key(), limits(), bytes, NOW).map(|table| table.len());
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        bytes
    };
    let other = FlowTable::from_bytes(&FlowKey::new(&[8; 32]), limits(), &bytes, NOW);
    assert!(matches!(other, Err(FlowTableError::Key)));
    for (bytes, error) in [
        (vec![], FlowTableError::Magic),
        (with(0, b'X'), FlowTableError::Magic),
        (with(4, 2), FlowTableError::Version { found: 2 }),
        (with(5, bytes[5] ^ 1), FlowTableError::Key),
        (with(13, 0xff), FlowTableError::TooMany { what: "banks", found: 0xff02, most: MAX_BANKS }),
        (with(18, bytes[18] ^ 1), FlowTableError::Length),
        ([bytes.as_slice(), b"x"].concat(), FlowTableError::Length),
        (with(bytes.len() - 1, 9), FlowTableError::Entry { at: before.len() - 1 }),
    ] {
        assert_eq!(read(&bytes), Err(error));
    }
    assert!(matches!(read(&with(15, 0xff)), Err(FlowTableError::TooMany { what: "fingerprints", .. })));
    assert!(matches!(read(&with(20, b'\n')), Err(FlowTableError::Bank { .. })));
    for length in 0..bytes.len() {
        assert!(read(&bytes[..length]).is_err(), "{length}");
    }
}

#[test]
fn keys_do_not_print() {
    assert_eq!(format!("{:?}", key()), "FlowKey(..)");
}

/// Writes a run again as a program might: other case, other white space and punctuation.
fn rewrite(run: &str, style: &[u8]) -> String {
    let mut text = String::new();
    for (at, character) in run.chars().enumerate() {
        let style = style[at % style.len()];
        text.push_str(
            ["", "", "", " ", "\n    ", "\", \"", "-", "**", "\u{a0}", "。"][usize::from(style % 10)],
        );
        match style & 16 {
            0 => text.push(character),
            _ => text.extend(character.to_uppercase()),
        }
    }
    text
}

proptest! {
    /// Any run of 48, anywhere, in any form and any chunking.
    #[test]
    fn p15_every_long_run_is_recognised(
        recalled in "[a-z0-9äöüéабвгд 世界地図本日晴天山川田中.,]{120,400}",
        start in any::<prop::sample::Index>(),
        style in prop::collection::vec(any::<u8>(), 1..40),
        around in ("[A-Za-z0-9 {}:\",é]{0,200}", "[A-Za-z0-9 {}:\",é]{0,200}"),
        chunks in prop::collection::vec(1_usize..90, 1..10),
        recall_chunks in prop::collection::vec(1_usize..90, 1..10),
    ) {
        let characters: Vec<char> = normalized(&recalled).chars().collect();
        prop_assume!(characters.len() >= GUARANTEED_RUN);
        let start = start.index(characters.len() - GUARANTEED_RUN + 1);
        let run: String = characters[start..start + GUARANTEED_RUN].iter().collect();

        let mut table = FlowTable::new(&key(), limits());
        let mut fingerprinter = Fingerprinter::new(&key(), &bank("prod:notes"));
        for piece in pieces(recalled.as_bytes(), &recall_chunks) {
            fingerprinter.feed(&mut table, piece, NOW);
        }
        fingerprinter.finish();

        let leaves = format!("{} {} {}", around.0, rewrite(&run, &style), around.1);
        let found = signals(&table.snapshot(), &pieces(leaves.as_bytes(), &chunks), NOW);
        prop_assert_eq!(found.len(), 1);

        let bytes = table.to_bytes();
        let mut restored = FlowTable::from_bytes(&key(), limits(), &bytes, NOW).unwrap();
        prop_assert!(is_found(&mut restored, &leaves, NOW));
        prop_assert!(!is_found(&mut restored, &leaves, NOW + HOUR));
    }

    /// Also behind other text that was recalled before, and with the same text recalled at another offset.
    #[test]
    fn p15_the_guarantee_holds_for_text_recalled_twice(
        recalled in "[a-z0-9]{150,300}",
        cuts in (0_usize..60, 0_usize..60),
        start in any::<prop::sample::Index>(),
    ) {
        let mut table = FlowTable::new(&key(), limits());
        let second = format!("{}{}", noise(1, cuts.0), &recalled[cuts.1..]);
        table.insert_text(&bank("prod:notes"), &recalled, NOW);
        table.insert_text(&bank("prod:notes"), &second, NOW + HOUR / 2);
        let start = start.index(second.len() - GUARANTEED_RUN + 1);
        prop_assert!(is_found(&mut table, &second[start..start + GUARANTEED_RUN], NOW + HOUR));
    }

    #[test]
    fn p15_short_runs_are_never_recognised(
        recalled in "[a-z0-9]{150,300}",
        start in any::<prop::sample::Index>(),
        length in 0..GRAM,
        seed in any::<u64>(),
    ) {
        let start = start.index(recalled.len() - length);
        let run = &recalled[start..start + length];
        // A neighbour that continues the run by chance would lengthen it.
        let leaves = format!("ÿ{}ÿ{run}ÿ{}", noise(seed, 100), noise(seed + 1, 100));
        prop_assert!(!is_found(&mut table(&recalled), &leaves, NOW));
    }

    #[test]
    fn p15_other_text_is_never_recognised(recalled in "\\PC{0,400}", seed in any::<u64>()) {
        let mut table = table(&recalled);
        table.insert_text(&bank("prod:notes"), &noise(seed, 20_000), NOW);
        prop_assert!(!is_found(&mut table, &noise(seed ^ 1 << 40, 20_000), NOW));
    }

    #[test]
    fn p15_hostile_bytes_are_refused_or_read(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        drop(FlowTable::from_bytes(&key(), limits(), &bytes, NOW));
        let mut damaged = table(RECALLED).to_bytes();
        let at = at.index(damaged.len());
        damaged[at] = byte;
        if let Ok(mut table) = FlowTable::from_bytes(&key(), limits(), &damaged, NOW) {
            is_found(&mut table, RECALLED, NOW);
        }
    }

    /// Splitting never changes the result, also within characters and for invalid UTF-8.
    #[test]
    fn p15_chunks_do_not_matter(
        bytes in prop::collection::vec(prop_oneof![any::<u8>(), Just(0xe4), Just(0xb8), Just(0x96), Just(b'a')], 0..300),
        chunks in prop::collection::vec(1_usize..9, 1..10),
    ) {
        let mut whole = window::Window::new(&key());
        let mut hashes = Vec::new();
        whole.feed(&bytes, |_, hash, _| hashes.push(hash));
        let mut split = window::Window::new(&key());
        let mut split_hashes = Vec::new();
        for piece in pieces(&bytes, &chunks) {
            split.feed(piece, |_, hash, _| split_hashes.push(hash));
        }
        prop_assert_eq!(hashes, split_hashes);
    }
}

fn pieces<'a>(bytes: &'a [u8], lengths: &[usize]) -> Vec<&'a [u8]> {
    let mut rest = bytes;
    let mut pieces = Vec::new();
    for length in lengths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (piece, after) = rest.split_at(rest.len().min(*length));
        pieces.push(piece);
        rest = after;
    }
    pieces
}

#[test]
fn p17_the_bound_of_a_table_can_change() {
    let limits = FlowLimits { max_fingerprints: 1024, ..limits() };
    let mut table = FlowTable::new(&key(), limits);
    let (old, new) = (noise(1, 10_000), noise(2, 40_000));
    table.insert_text(&bank("prod:old"), &old, NOW);
    assert_eq!(table.wanted_fingerprints(1_000), Some(2_048));
    table.set_max_fingerprints(4_096, NOW);
    assert_eq!(table.wanted_fingerprints(1_000), None);
    table.insert_text(&bank("prod:new"), &new, NOW + 1);
    assert!(table.len() > 3_000 && table.bytes() <= FlowTable::bytes_for(4_096));
    assert!(is_found(&mut table, &old, NOW + 1));
    table.set_max_fingerprints(1_024, NOW + 1);
    assert!(table.len() <= 1_024 && table.bytes() <= FlowTable::bytes_for(1_024));
    assert!(!is_found(&mut table, &old, NOW + 1), "the oldest is given up first");
    assert!(is_found(&mut table, &new, NOW + 1));
}
