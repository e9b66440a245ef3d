//! Tests of the scanner.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use miniz_oxide::deflate::compress_to_vec_zlib;
use proptest::prelude::*;

use super::*;

#[path = "../../../benches/signals/corpora.rs"]
mod corpora;

mod bounds;

use crate::signals::decode::compressed::tests::gzip;
use crate::signals::secrets::tests::{known, samples};
use crate::signals::secrets::{ExactValue, PatternSet, SecretMatcher, SecretSettings};

fn scanner(place: SignalPlace) -> ContentScanner {
    let set = known();
    let factory =
        move || -> Vec<BoxedMatcher> { vec![Box::new(SecretMatcher::new(Arc::clone(&set))) as BoxedMatcher] };
    ContentScanner::new(place, Arc::new(factory), ScanLimits::default())
}

fn base64(bytes: &[u8], alphabet: &[u8; 64], padding: &str) -> String {
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits =
            group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for at in 0..=group.len() {
            text.push(alphabet[(bits >> (18 - 6 * at) & 63) as usize] as char);
        }
        text.push_str(&padding.repeat(3 - group.len()));
    }
    text
}

fn base32(bytes: &[u8]) -> String {
    let bits: Vec<u8> = bytes.iter().flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1)).collect();
    let value = |bits: &[u8]| bits.iter().chain([0; 5].iter()).take(5).fold(0, |value, bit| value << 1 | bit);
    bits.chunks(5).map(|bits| b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"[usize::from(value(bits))] as char).collect()
}

/// Returns `content` in `encoding`, as a client would write it.
fn encode(encoding: Encoding, content: &[u8]) -> Vec<u8> {
    const STANDARD: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const URL: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let each = |write: &dyn Fn(&mut String, u8)| {
        content.iter().fold(String::new(), |mut text, byte| {
            write(&mut text, *byte);
            text
        })
    };
    match encoding {
        Encoding::Base32 => base32(content).into_bytes(),
        Encoding::Base64 => base64(content, STANDARD, "=").into_bytes(),
        Encoding::Base64Url => base64(content, URL, "").into_bytes(),
        Encoding::Deflate => compress_to_vec_zlib(content, 6),
        Encoding::Gzip => gzip(content, 0),
        Encoding::Hex => each(&|text, byte| write!(text, "{byte:02x}").unwrap()).into_bytes(),
        Encoding::HtmlEscapes => each(&|text, byte| write!(text, "&#{byte};").unwrap()).into_bytes(),
        Encoding::JsonEscapes => each(&|text, byte| write!(text, "\\u{byte:04x}").unwrap()).into_bytes(),
        Encoding::Percent => each(&|text, byte| write!(text, "%{byte:02X}").unwrap()).into_bytes(),
    }
}

const ENCODINGS: [Encoding; 9] = [
    Encoding::Base32,
    Encoding::Base64,
    Encoding::Base64Url,
    Encoding::Deflate,
    Encoding::Gzip,
    Encoding::Hex,
    Encoding::HtmlEscapes,
    Encoding::JsonEscapes,
    Encoding::Percent,
];

type Finding = (String, Vec<Encoding>);

fn scan(scanner: &mut ContentScanner, pieces: &[&[u8]]) -> BTreeSet<Finding> {
    let mut signals = Vec::new();
    let mut sent = 0;
    for piece in pieces {
        scanner.feed(piece, &mut signals);
        sent += piece.len();
        assert!(
            scanner.undecided(UndecidedTail::Possible) <= MAX_UNDECIDED
                && scanner.shared.open <= MAX_OPEN_VIEWS
        );
        assert!(
            scanner.undecided(UndecidedTail::Possible) <= sent,
            "{} of {sent}",
            scanner.undecided(UndecidedTail::Possible)
        );
    }
    scanner.finish(&mut signals);
    assert_eq!(scanner.shared.open, 0, "a view is left open");
    signals.into_iter().map(|signal| (signal.what, signal.encodings)).collect()
}

fn scan_whole(content: &[u8]) -> BTreeSet<Finding> {
    scan(&mut scanner(SignalPlace::Body), &[content])
}

fn is_compressed(encoding: Encoding) -> bool {
    matches!(encoding, Encoding::Gzip | Encoding::Deflate)
}

/// Base64 without a character of its own is reported as the plain one.
fn finds(found: &BTreeSet<Finding>, what: &str, encodings: &[Encoding]) -> bool {
    let plain = |encoding: &Encoding| {
        if *encoding == Encoding::Base64Url { Encoding::Base64 } else { *encoding }
    };
    let wanted: Vec<_> = encodings.iter().map(plain).collect();
    found
        .iter()
        .any(|(found, around)| found == what && around.iter().map(plain).collect::<Vec<_>>() == wanted)
}

#[test]
fn every_secret_is_found_in_every_encoding() {
    for (what, secret) in samples() {
        for encoding in ENCODINGS {
            for (before, after) in [("", ""), ("user: ", " and more"), ("ab, ", "\n")] {
                let content = encode(encoding, format!("{before}{secret}{after}").as_bytes());
                let found = scan_whole(&content);
                assert!(
                    finds(&found, what, &[encoding]),
                    "{what} in {encoding:?} after {before:?}: {found:?}"
                );
                if is_compressed(encoding) {
                    continue;
                }
                let content = [b"{\"value\": \"", &content[..], b"\"}"].concat();
                let found = scan_whole(&content);
                assert!(finds(&found, what, &[encoding]), "{what} in {encoding:?} within JSON: {found:?}");
            }
        }
    }
}

#[test]
fn every_secret_is_found_in_every_pair_of_encodings() {
    for (what, secret) in samples() {
        for inner in ENCODINGS {
            let text = format!("a: {secret}\n");
            let content = encode(inner, text.as_bytes());
            for outer in ENCODINGS {
                // Escapes of characters do not hold bytes.
                if is_compressed(inner) && matches!(outer, Encoding::HtmlEscapes | Encoding::JsonEscapes) {
                    continue;
                }
                let found = scan_whole(&encode(outer, &content));
                assert!(finds(&found, what, &[outer, inner]), "{what} in {outer:?}, {inner:?}: {found:?}");
            }
        }
    }
}

#[test]
fn deeper_content_is_not_decoded() {
    let (_, secret) = samples().swap_remove(2);
    let twice = encode(Encoding::Base64, &encode(Encoding::Hex, secret.as_bytes()));
    assert_eq!(scan_whole(&twice).len(), 1);
    assert_eq!(scan_whole(&encode(Encoding::Hex, &twice)).len(), 0);
}

#[test]
fn content_in_odd_forms_is_found() {
    let id = ["AK", "IAQ3EGRTKX7PM2LZ5W"].concat();
    let found = |text: &str| !scan_whole(text.as_bytes()).is_empty();
    let prose = "The quick brown fox jumps over the lazy dog. ".repeat(8);
    let long =
        String::from_utf8(encode(Encoding::Base64, format!("{prose}{id} {prose}").as_bytes())).unwrap();
    let lines = |by: usize, end: &str| {
        long.as_bytes()
            .chunks(by)
            .map(|line| format!("{}{end}", str::from_utf8(line).unwrap()))
            .collect::<String>()
    };
    assert!(found(&lines(76, "\r\n")), "base64 in lines");
    assert!(found(&lines(64, "\n  ")), "base64 in indented lines");
    assert!(found(&format!("{{\"k\":\"{}\"}}", lines(60, "\\n"))), "base64 in lines within JSON");
    let short = String::from_utf8(encode(Encoding::Base64, format!("{id} is the key").as_bytes())).unwrap();
    for glue in ["a", "ab", "abc", "key_", "v1/keys/", "data-"] {
        assert!(found(&format!("https://host.test/{glue}{short}")), "after {glue}");
    }
    assert!(found(&format!("x={}", id.replacen('I', "%49", 1))), "one character in percent");
    assert!(found(&format!("a \\n{id}\\n")), "between escaped line breaks");
    assert!(
        found(&format!("0x{}", str::from_utf8(&encode(Encoding::Hex, id.as_bytes())).unwrap())),
        "hex with 0x"
    );
    let lower = base32(format!("key {id}").as_bytes()).to_lowercase();
    assert!(found(&format!("{lower}.tunnel.test")), "base32 in lower case");
}

#[test]
fn gzip_is_found_within_other_content() {
    let (what, secret) = samples().swap_remove(2);
    let file = gzip(format!("key: {secret}\n").as_bytes(), 30);
    let part = |before: &[u8], file: &[u8]| {
        let head = b"--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"a.gz\"\r\n\r\n";
        [before, head, file, b"\r\n--b--\r\n"].concat()
    };
    // Of what looks like a header, the last is one.
    let decoys = b"\x1f\x8b\x08\xe0\x1f\x8b\x08\x1f\x8b\x08\x08\0\0\0\0\0\0name without end".as_slice();
    for (name, content, encodings) in [
        ("part", part(b"", &file), &[Encoding::Gzip][..]),
        ("second part", part(&part(b"", &gzip(b"nothing", 0)), &file), &[Encoding::Gzip]),
        ("after decoys", part(decoys, &file), &[Encoding::Gzip]),
        ("overlapping", [b"\x1f\x8b\x08", &file[..]].concat(), &[Encoding::Gzip]),
        ("base64", encode(Encoding::Base64, &part(b"", &file)), &[Encoding::Base64, Encoding::Gzip]),
        ("cut", part(b"", &file)[..part(b"", &file).len() - 18].to_vec(), &[Encoding::Gzip]),
    ] {
        for cut in 0..content.len() {
            let (first, second) = content.split_at(cut);
            let mut scanner = scanner(SignalPlace::Body);
            let found = scan(&mut scanner, &[first, second]);
            assert!(finds(&found, what, encodings), "{name} at {cut}: {found:?}");
            assert_eq!(bounds::open_streams(&scanner), 0, "{name} at {cut}");
        }
        let bytes: Vec<&[u8]> = content.chunks(1).collect();
        let found = scan(&mut scanner(SignalPlace::Body), &bytes);
        assert!(finds(&found, what, encodings), "{name} a byte at a time: {found:?}");
    }
    let mut scanner_ = scanner(SignalPlace::Body);
    scanner_.declare(Encoding::Deflate);
    assert!(finds(&scan(&mut scanner_, &[&file]), what, &[Encoding::Gzip]), "declared as another");
    let mut scanner_ = scanner(SignalPlace::Body);
    assert!(finds(&scan(&mut scanner_, &[&file]), what, &[Encoding::Gzip]));
    assert_eq!(scanner_.shared.gzip_parts, 0, "a view that is gzip as a whole is decompressed once");
}

#[test]
fn gzip_within_other_content_has_bounds() {
    let (what, secret) = samples().swap_remove(2);
    let header = b"\x1f\x8b\x08\x08\0\0\0\0\0\0".repeat(2 * MAX_GZIP_PARTS);
    let stream = &gzip(secret.as_bytes(), 0)[10..];
    let empty_blocks = b"\0\0\0\xff\xff".repeat(100_000);
    for (name, content) in [
        ("headers", [b".", &header[..]].concat()),
        // Many names end at the same place, and the same stream follows each.
        ("names", [b".", &header[..], b"\0", stream].concat()),
        ("empty blocks", [b".", &header[..], b"\0", &empty_blocks].concat()),
    ] {
        let mut scanner = scanner(SignalPlace::Body);
        scanner.shared.limits.decompressed = 4 << 20;
        let found = scan(&mut scanner, &[&content, secret.as_bytes()]);
        assert!(finds(&found, what, &[]), "{name}: the raw view is scanned");
        assert_eq!(scanner.shared.gzip_parts, MAX_GZIP_PARTS, "{name}");
        assert!(scanner.trouble().over_budget > 0 && scanner.trouble().corrupt == 0, "{name}");
        assert!(scanner.shared.work < 8 << 20, "{name}: {}", scanner.shared.work);
    }
    let mut scanner_ = scanner(SignalPlace::Body);
    scan(&mut scanner_, &[b".", &gzip(&vec![0; 16 << 20], 0)]);
    assert_eq!(scanner_.trouble(), DecodeTrouble { expansion: 1, ..DecodeTrouble::default() });
    let mut scanner_ = scanner(SignalPlace::Body);
    scan(&mut scanner_, &[b".\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff\xff\xff\xff"]);
    assert!(scanner_.trouble() == DecodeTrouble::default(), "bytes that look like a header are no trouble");
}

#[test]
fn forms_write_spaces_as_plus() {
    let dashes = "-".repeat(5);
    let body = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEA%2Bx7".repeat(4);
    for (form, expected) in [
        (
            format!("a=1&key={dashes}BEGIN+PRIVATE+KEY{dashes}%0A{body}%0A{dashes}END+PRIVATE+KEY{dashes}"),
            true,
        ),
        (format!("a=%20b&key={dashes}BEGIN+PRIVATE+KEY{dashes}\n{}", body.replace("%2B", "")), true),
        (format!("a=b&key={dashes}BEGIN+PRIVATE+KEYS{dashes}%0A{body}"), false),
    ] {
        for cut in 0..form.len() {
            let (first, second) = form.as_bytes().split_at(cut);
            let found = scan(&mut scanner(SignalPlace::Body), &[first, second]);
            let is_found = found.iter().any(|(_, around)| *around == [Encoding::Percent]);
            assert_eq!(is_found, expected, "{form} at {cut}: {found:?}");
        }
    }
}

#[test]
fn declared_encodings_are_decoded() {
    let (what, secret) = samples().swap_remove(2);
    let raw = miniz_oxide::deflate::compress_to_vec(secret.as_bytes(), 6);
    let mut scanner = scanner(SignalPlace::Body);
    scanner.declare(Encoding::Deflate);
    assert!(finds(&scan(&mut scanner, &[&raw]), what, &[Encoding::Deflate]));
    assert!(scanner.trouble() == DecodeTrouble::default());
}

#[test]
fn bad_compression_ends_quietly() {
    let (what, secret) = samples().swap_remove(2);
    let noise: Vec<u8> = (0..20_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let content = [format!("{secret}\n").as_bytes(), &noise].concat();
    let good = gzip(&content, 0);

    let mut scanner_ = scanner(SignalPlace::Body);
    assert!(
        finds(&scan(&mut scanner_, &[&good[..good.len() / 2]]), what, &[Encoding::Gzip]),
        "before the cut"
    );
    assert_eq!(scanner_.trouble(), DecodeTrouble { truncated: 1, ..DecodeTrouble::default() });

    let mut scanner_ = scanner(SignalPlace::Body);
    scan(&mut scanner_, &[&gzip(&vec![0; 64 << 20], 0)]);
    assert_eq!(scanner_.trouble(), DecodeTrouble { expansion: 1, ..DecodeTrouble::default() });
    assert!(scanner_.shared.work < 16 << 20);

    let mut scanner_ = scanner(SignalPlace::Body);
    scan(&mut scanner_, &[b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff\xff\xff\xff"]);
    assert_eq!(scanner_.trouble(), DecodeTrouble { corrupt: 1, ..DecodeTrouble::default() });
}

/// Counts what the views take.
struct Counter(Arc<AtomicU64>);

impl ViewMatcher for Counter {
    fn feed(&mut self, bytes: &[u8], _found: &mut Vec<Signal>) {
        self.0.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }

    fn finish(&mut self, _found: &mut Vec<Signal>) {
        self.0.fetch_add(VIEW_WORK, Ordering::Relaxed);
    }

    fn undecided(&self) -> usize {
        0
    }
}

/// Returns how much the views take for each byte of content, and the signals.
fn work(content: &[u8], chunk: usize) -> (f64, Vec<Signal>) {
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    let factory = move || vec![Box::new(Counter(counted.clone())) as BoxedMatcher];
    let mut scanner = ContentScanner::new(SignalPlace::Body, Arc::new(factory), ScanLimits::default());
    let mut signals = Vec::new();
    content.chunks(chunk).for_each(|chunk| scanner.feed(chunk, &mut signals));
    scanner.finish(&mut signals);
    let free = if signals.is_empty() { 0 } else { FREE_WORK };
    let work = count.load(Ordering::Relaxed).saturating_sub(free);
    (work as f64 / content.len() as f64, signals)
}

#[test]
fn ordinary_content_is_searched_to_its_end() {
    for (name, content) in corpora::contents(200_000) {
        let (work, signals) = work(&content, 16 * 1024);
        assert!(work < 5.0, "{name}: {work}");
        assert_eq!(signals, [], "{name}");
    }
}

#[test]
fn hostile_content_costs_bounded_work_or_says_so() {
    let mut exceeded = 0;
    for (name, content) in corpora::hostile(200_000) {
        for chunk in [200, 16 * 1024] {
            let (work, signals) = work(&content, chunk);
            // The raw view is always searched; the last view may begin within the bound and end beyond it.
            assert!(work < MAX_WORK as f64 + 2.0, "{name} by {chunk}: {work}");
            let codes: Vec<SignalCode> = signals.iter().map(|signal| signal.code).collect();
            assert!(codes.is_empty() || codes == [SignalCode::ContentUnsearched], "{name}: {signals:?}");
            exceeded += usize::from(!codes.is_empty());
        }
    }
    assert!(exceeded > 0, "nothing reaches the bound");
}

#[test]
fn work_ends_decoding_but_not_the_raw_view() {
    let (what, secret) = samples().swap_remove(2);
    let hostile = corpora::hostile(200_000).into_iter().find(|(name, _)| *name == "all escapes").unwrap().1;
    let mut scanner = scanner(SignalPlace::Body);
    let found = scan(&mut scanner, &[&hostile, format!(" {secret}").as_bytes()]);
    assert!(finds(&found, what, &[]));
    assert!(scanner.trouble().over_budget > 0);
}

#[test]
fn what_is_not_searched_is_a_signal() {
    let text = b"some text that is compressed and cut, some text that is compressed and cut".repeat(20);
    let good = gzip(&text, 0);
    let cut = &good[..good.len() / 2];
    let corrupt = b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff\xff\xff\xff".as_slice();
    let bomb = gzip(&vec![0; 16 << 20], 0);
    let decoys = b"\x1f\x8b\x08\x08\0\0\0\0\0\0".repeat(2 * MAX_GZIP_PARTS);
    for (name, content, declared, expected) in [
        ("a bomb", &bomb[..], None, Some("expands like a bomb")),
        ("a declared bomb", &bomb, Some(Encoding::Gzip), Some("expands like a bomb")),
        ("a bomb within", &[b".", &bomb[..]].concat(), None, Some("expands like a bomb")),
        ("decoys", &[b".", &decoys[..]].concat(), None, Some("begin like gzip")),
        ("a cut", cut, Some(Encoding::Gzip), Some("ends early")),
        ("corrupt", corrupt, Some(Encoding::Gzip), Some("is corrupt")),
        ("no deflate", b"\xff\xff\xff\xff", Some(Encoding::Deflate), Some("is corrupt")),
        // Nobody says that these are compressed: a part of an upload is not an attack.
        ("a part of a file", cut, None, None),
        ("bytes that begin like gzip", corrupt, None, None),
        ("text that begins like zlib", b"x^2 + y^2 = z^2", None, None),
        ("good", &good, Some(Encoding::Gzip), None),
        ("invalid UTF-8", &[0xff, 0xc0, 0x80, 0xed, 0xa0].repeat(1000), None, None),
    ] {
        for chunk in [1, 1000, usize::MAX] {
            let mut scanner = scanner(SignalPlace::Body);
            declared.into_iter().for_each(|encoding| scanner.declare(encoding));
            let mut signals = Vec::new();
            content.chunks(chunk).for_each(|chunk| scanner.feed(chunk, &mut signals));
            scanner.finish(&mut signals);
            let found = signals.iter().find(|signal| signal.code == SignalCode::ContentUnsearched);
            let what = found.map(|signal| signal.what.as_str());
            assert_eq!(what.is_some(), expected.is_some(), "{name} by {chunk}: {signals:?}");
            assert!(what.unwrap_or_default().contains(expected.unwrap_or_default()), "{name}: {what:?}");
        }
    }
}

#[test]
fn findings_are_reported_once_and_with_their_place() {
    let (what, secret) = samples().swap_remove(2);
    let mut scanner = scanner(SignalPlace::Body);
    let mut signals = Vec::new();
    let field = || SignalPlace::Field("x-data".to_owned());
    let encoded = encode(Encoding::Base64, secret.as_bytes());
    scanner.scan_field(b"nothing", field, &mut signals);
    scanner.scan_field(&encoded, field, &mut signals);
    scanner.scan_field(&encoded, field, &mut signals);
    scanner.restart(SignalPlace::Body);
    scanner.feed(format!("{secret} {secret}").as_bytes(), &mut signals);
    scanner.feed(&encoded, &mut signals);
    scanner.finish(&mut signals);
    let places: Vec<_> = signals.iter().map(|signal| (&signal.place, signal.what.as_str())).collect();
    assert_eq!(places, [(&field(), what), (&SignalPlace::Body, what)]);
}

#[test]
fn fields_together_find_the_same_as_one_by_one() {
    let samples = samples();
    let place = |at: usize| SignalPlace::Field(format!("x-{at}"));
    for (sample, (what, secret)) in samples.iter().enumerate() {
        for encoding in
            [None].into_iter().chain(ENCODINGS.map(Some)).filter(|kind| !kind.is_some_and(is_compressed))
        {
            let encoded =
                encoding.map_or(secret.clone().into_bytes(), |kind| encode(kind, secret.as_bytes()));
            let fields: [&[u8]; 4] = [b"gzip, deflate", b"abcdefgh", &encoded, b"2"];
            let mut together = Vec::new();
            let mut scanner_ = scanner(SignalPlace::Body);
            scanner_.scan_fields(&fields, place, &mut together);
            let mut single = Vec::new();
            let mut scanner_ = scanner(SignalPlace::Body);
            for (at, field) in fields.iter().enumerate() {
                scanner_.scan_field(field, || place(at), &mut single);
            }
            assert_eq!(together, single, "{what} in {encoding:?}");
            assert!(
                together.iter().all(|signal| signal.place == place(2)) && !together.is_empty(),
                "{sample}"
            );
        }
    }
    let mut signals = Vec::new();
    let long = vec![b'a'; 3 * MAX_JOINED];
    let fields: [&[u8]; 3] = [b"1", &long, samples[2].1.as_bytes()];
    scanner(SignalPlace::Body).scan_fields(&fields, place, &mut signals);
    assert_eq!(signals.len(), 1);
    assert_eq!(signals[0].place, place(2));
}

#[test]
fn findings_have_a_bound() {
    let exact_values = (0..100)
        .map(|at| ExactValue {
            label: format!("value {at}"),
            code: SignalCode::CanaryUsed,
            bytes: format!("canary-{at:03}").into_bytes(),
        })
        .collect();
    let settings = SecretSettings { known_shapes: false, exact_values, ..SecretSettings::default() };
    let set = Arc::new(PatternSet::compile(&settings).unwrap());
    let factory = move || vec![Box::new(SecretMatcher::new(Arc::clone(&set))) as BoxedMatcher];
    let mut scanner = ContentScanner::new(SignalPlace::Body, Arc::new(factory), ScanLimits::default());
    let content: String = (0..100).map(|at| format!("canary-{at:03} ")).collect();
    assert_eq!(scan(&mut scanner, &[content.as_bytes()]).len(), MAX_SIGNALS);
}

/// Sends what the scanner does not hold back, and returns what had left when it found something.
fn left_at_finding(content: &[u8], piece: usize, tail: UndecidedTail) -> Option<usize> {
    let mut scanner = scanner(SignalPlace::Body);
    let mut signals = Vec::new();
    let mut sent = 0;
    for (at, bytes) in content.chunks(piece).enumerate() {
        scanner.feed(bytes, &mut signals);
        if !signals.is_empty() {
            return Some(sent);
        }
        sent = sent.max((at * piece + bytes.len()).saturating_sub(scanner.undecided(tail)));
    }
    scanner.finish(&mut signals);
    (!signals.is_empty()).then_some(sent)
}

#[test]
fn nothing_of_a_secret_leaves_before_it_is_found() {
    for (what, secret) in samples() {
        for encoding in
            [None].into_iter().chain(ENCODINGS.map(Some)).filter(|kind| !kind.is_some_and(is_compressed))
        {
            let encoded =
                encoding.map_or(secret.clone().into_bytes(), |kind| encode(kind, secret.as_bytes()));
            let prose = b"some text before it, ";
            let content = [prose, &encoded[..], b" and text after it"].concat();
            // A connection string is found by what follows its scheme, which is no secret.
            let scheme = if what.starts_with("connection") { &b"postgres:"[..] } else { b"" };
            let free = prose.len() + encoding.map_or(scheme.to_vec(), |kind| encode(kind, scheme)).len();
            for piece in [1, 3, 16, 100] {
                let left = left_at_finding(&content, piece, UndecidedTail::Possible);
                assert!(
                    left.is_some_and(|left| left <= free),
                    "{what} in {encoding:?} by {piece}: {left:?} left"
                );
            }
        }
    }
}

/// A client that pauses behind every byte gets out what is too short to hold back, and no more.
#[test]
fn a_pause_lets_out_less_than_a_begun_match() {
    for (what, secret) in samples() {
        for encoding in [None, Some(Encoding::Base64), Some(Encoding::Hex), Some(Encoding::JsonEscapes)] {
            let encoded =
                |text: &str| encoding.map_or(text.as_bytes().to_vec(), |kind| encode(kind, text.as_bytes()));
            let prose = b"some text before it, ";
            let content = [prose, &encoded(&secret)[..], b" and text after it"].concat();
            let scheme = if what.starts_with("connection") { "postgres:" } else { "" };
            let begun = format!("{scheme}{}", "x".repeat(MIN_BEGUN));
            let free = prose.len() + encoded(&begun).len();
            for piece in [1, 3, 16, 100] {
                let left = left_at_finding(&content, piece, UndecidedTail::Begun);
                assert!(
                    left.is_some_and(|left| left <= free),
                    "{what} in {encoding:?} by {piece}: {left:?} left of {free}"
                );
            }
        }
    }
}

#[test]
fn nothing_is_held_of_what_any_text_could_be() {
    for text in ["ping", "{\"id\":7}\n", "hello gh", "SELECT 1;", "YWJj", "%4", "ready\n"] {
        let mut scanner = scanner(SignalPlace::Body);
        let mut signals = Vec::new();
        scanner.feed(text.as_bytes(), &mut signals);
        assert_eq!(scanner.undecided(UndecidedTail::Begun), 0, "{text}");
    }
}

fn split<'a>(content: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(content.len() + 1)).collect();
    places.sort_unstable();
    let mut pieces = Vec::new();
    let mut from = 0;
    for place in places.into_iter().chain([content.len()]) {
        pieces.push(&content[from..place]);
        from = place;
    }
    pieces
}

proptest! {
    #[test]
    fn splitting_never_changes_the_findings(
        parts in prop::collection::vec((0..31_usize, 0..9_usize, 0..10_usize, "[ -~\n]{0,300}"), 0..5),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let samples = samples();
        let mut content = Vec::new();
        for (sample, inner, outer, filler) in parts {
            let inner = encode(ENCODINGS[inner], samples[sample].1.as_bytes());
            content.extend_from_slice(filler.as_bytes());
            content.extend(ENCODINGS.get(outer).map_or(inner.clone(), |outer| encode(*outer, &inner)));
        }
        let whole = scan_whole(&content);
        prop_assert_eq!(scan(&mut scanner(SignalPlace::Body), &split(&content, &cuts)), whole.clone());
        let bytes: Vec<&[u8]> = content.chunks(1).collect();
        prop_assert_eq!(scan(&mut scanner(SignalPlace::Body), &bytes), whole);
    }

    #[test]
    fn secrets_are_found_at_any_offset(
        before in 0..70_000_usize, sample in 0..31_usize, inner in 0..9_usize, outer in 0..9_usize, lead in "[a-z ,.]{0,50}",
    ) {
        let (what, secret) = samples().swap_remove(sample);
        let (inner, outer) = (ENCODINGS[inner], ENCODINGS[outer]);
        prop_assume!(!is_compressed(inner) && !is_compressed(outer));
        let text = format!("{lead} {secret}\n");
        let pair = encode(outer, &encode(inner, text.as_bytes()));
        let content = ["word, ".repeat(before / 6).as_bytes(), b"{\"", &pair[..], b"\"}"].concat();
        prop_assert!(finds(&scan_whole(&content), what, &[outer, inner]), "{what} in {outer:?}, {inner:?}");
    }

    #[test]
    fn any_bytes_are_scanned(content in prop::collection::vec(any::<u8>(), 0..2000), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6)) {
        let whole = scan_whole(&content);
        prop_assert_eq!(scan(&mut scanner(SignalPlace::Body), &split(&content, &cuts)), whole);
    }
}
