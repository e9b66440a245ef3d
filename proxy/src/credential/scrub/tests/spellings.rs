//! The table: every spelling, in every kind of text, however it arrives.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};

use super::*;

/// A spelling of a value, and how many octets at either end may say less than one octet of it.
pub(super) type Spelled = (&'static str, Vec<u8>, usize);

fn each(value: &str, spell: impl Fn(u8) -> String) -> Vec<u8> {
    value.bytes().flat_map(|octet| spell(octet).into_bytes()).collect()
}

fn reserved(value: &str, spell: impl Fn(u8) -> String) -> Vec<u8> {
    let plain = |octet: u8| octet.is_ascii_alphanumeric() || b"-_.~".contains(&octet);
    each(value, |octet| if plain(octet) { char::from(octet).to_string() } else { spell(octet) })
}

fn fold(text: &[u8], width: usize, end: &str) -> Vec<u8> {
    let lines: Vec<&[u8]> = text.chunks(width).collect();
    lines.join(end.as_bytes())
}

fn joined(value: &str, separator: &str, spell: impl Fn(u8) -> String) -> Vec<u8> {
    value.bytes().map(spell).collect::<Vec<_>>().join(separator).into_bytes()
}

fn wide(value: &str, before: usize, after: usize) -> Vec<u8> {
    value.bytes().flat_map(|octet| [vec![0; before], vec![octet], vec![0; after]].concat()).collect()
}

fn alternating_hex(value: &str) -> Vec<u8> {
    let digits = each(value, |octet| format!("{octet:02x}"));
    let mixed = digits.iter().enumerate();
    mixed.map(|(at, digit)| if at % 2 == 0 { digit.to_ascii_uppercase() } else { *digit }).collect()
}

/// Every spelling that is promised to be recognised.
pub(super) fn spellings(value: &str) -> Vec<Spelled> {
    let based = STANDARD.encode(value).into_bytes();
    let json = |text: &str| serde_json::to_string(text).unwrap().trim_matches('"').to_owned();
    let slashed = value.replace('/', r"\/");
    let percent = String::from_utf8(reserved(value, |octet| format!("%{octet:02X}"))).unwrap();
    let inner = |before: &str, after: &str| STANDARD.encode(format!("{before}{value}{after}"));
    let utf16: Vec<u8> = value.bytes().flat_map(|octet| [octet, 0]).collect();
    let hex = each(value, |octet| format!("{octet:02x}"));
    let named = value.replace('/', "&sol;").replace('+', "&plus;").replace('=', "&equals;");
    let mut rows: Vec<Spelled> = vec![
        ("plain", value.into(), 0),
        ("upper case", value.to_ascii_uppercase().into(), 0),
        ("lower case", value.to_ascii_lowercase().into(), 0),
        ("percent, reserved", percent.clone().into(), 0),
        ("percent, lower case", reserved(value, |octet| format!("%{octet:02x}")), 0),
        ("percent, slash kept", percent.replace("%2F", "/").into(), 0),
        ("percent, all", each(value, |octet| format!("%{octet:02X}")), 0),
        ("percent, all, lower case", each(value, |octet| format!("%{octet:02x}")), 0),
        ("percent, twice", percent.replace('%', "%25").into(), 0),
        ("percent, all, twice", each(value, |octet| format!("%25{octet:02X}")), 0),
        ("percent u", each(value, |octet| format!("%u{octet:04x}")), 0),
        ("percent u, reserved", reserved(value, |octet| format!("%u{octet:04X}")), 0),
        ("JSON, slash", slashed.clone().into(), 0),
        ("JSON in JSON", json(&slashed).into(), 0),
        ("JSON in JSON in JSON", json(&json(value).replace('/', r"\/")).into(), 0),
        ("JSON, u", reserved(value, |octet| format!("\\u{octet:04x}")), 0),
        ("JSON, U", reserved(value, |octet| format!("\\u{octet:04X}")), 0),
        ("JSON, u, twice", reserved(value, |octet| format!("\\\\u{octet:04x}")), 0),
        ("JSON, all", each(value, |octet| format!("\\u{octet:04x}")), 0),
        ("JSON, all, twice", each(value, |octet| format!("\\\\u{octet:04x}")), 0),
        ("JavaScript, braces", reserved(value, |octet| format!("\\u{{{octet:x}}}")), 0),
        ("JavaScript, braces, all", each(value, |octet| format!("\\u{{{octet:x}}}")), 0),
        ("x escapes", reserved(value, |octet| format!("\\x{octet:02x}")), 0),
        ("x escapes, all", each(value, |octet| format!("\\x{octet:02X}")), 0),
        ("octal", reserved(value, |octet| format!("\\{octet:03o}")), 0),
        ("octal, all", each(value, |octet| format!("\\{octet:03o}")), 0),
        ("percent of JSON", percent.replace("%2F", "%5C%2F").into(), 0),
        ("percent of JSON, u", reserved(value, |octet| format!("%5Cu{octet:04x}")), 0),
        ("HTML, decimal", reserved(value, |octet| format!("&#{octet};")), 0),
        ("HTML, decimal, all", each(value, |octet| format!("&#{octet};")), 0),
        ("HTML, open", each(value, |octet| format!("&#{octet}")), 0),
        ("HTML, hexadecimal", reserved(value, |octet| format!("&#x{octet:X};")), 0),
        ("HTML, hexadecimal, all", each(value, |octet| format!("&#x{octet:x};")), 0),
        ("HTML, zeros", reserved(value, |octet| format!("&#x000000{octet:x};")), 0),
        ("HTML, zeros, all", each(value, |octet| format!("&#00000{octet};")), 0),
        ("HTML, named", named.clone().into(), 0),
        (
            "HTML, named, open",
            value.replace('/', "&sol").replace('+', "&plus").replace('=', "&equals").into(),
            0,
        ),
        ("HTML, twice", named.replace('&', "&amp;").into(), 0),
        ("HTML, numbers twice", each(value, |octet| format!("&amp;#{octet};")), 0),
        ("quoted-printable", value.replace('=', "=3D").into(), 0),
        ("quoted-printable, all", each(value, |octet| format!("={octet:02X}")), 0),
        ("quoted-printable, soft break", fold(value.replace('=', "=3D").as_bytes(), 15, "=\r\n"), 0),
        ("hexadecimal", hex.clone(), 0),
        ("hexadecimal, upper case", each(value, |octet| format!("{octet:02X}")), 0),
        ("hexadecimal, mixed case", alternating_hex(value), 0),
        ("hexadecimal, colons", joined(value, ":", |octet| format!("{octet:02x}")), 0),
        ("hexadecimal, colons, upper case", joined(value, ":", |octet| format!("{octet:02X}")), 0),
        ("hexadecimal, blanks", joined(value, " ", |octet| format!("{octet:02x}")), 0),
        ("hexadecimal, hyphens", joined(value, "-", |octet| format!("{octet:02X}")), 0),
        ("hexadecimal, pairs", fold(&hex, 4, " "), 0),
        ("hexadecimal, C", joined(value, ", ", |octet| format!("0x{octet:02x}")), 0),
        ("hexadecimal, C, tight", joined(value, ",", |octet| format!("0x{octet:02X}")), 0),
        ("hexadecimal, lines", fold(&hex, 32, "\n"), 0),
        ("octets", joined(value, ", ", |octet| octet.to_string()), 0),
        ("octets, tight", joined(value, ",", |octet| octet.to_string()), 0),
        ("octets, blanks", joined(value, " ", |octet| octet.to_string()), 0),
        ("octets, lines", joined(value, ",\n    ", |octet| octet.to_string()), 0),
        ("UTF-16LE", wide(value, 0, 1), 1),
        ("UTF-16BE", wide(value, 1, 0), 1),
        ("UTF-32LE", wide(value, 0, 3), 3),
        ("UTF-32BE", wide(value, 3, 0), 3),
        ("UTF-16 of JSON", wide(&slashed, 0, 1), 1),
        ("base64", based.clone(), 4),
        ("base64, no padding", STANDARD_NO_PAD.encode(value).into(), 4),
        ("base64url", URL_SAFE.encode(value).into(), 4),
        ("base64url, no padding", URL_SAFE_NO_PAD.encode(value).into(), 4),
        ("base64, second octet", inner("x", "yz").into(), 6),
        ("base64, third octet", inner("xy", "z").into(), 7),
        ("base64 of Basic", inner("user:", "").into(), 10),
        ("base64 in JSON", inner("", "").replace('/', r"\/").into(), 4),
        ("base64 in JSON, u", inner("", "").replace('+', r"\u002b").replace('=', r"\u003d").into(), 14),
        (
            "base64, percent",
            inner("", "").replace('+', "%2B").replace('/', "%2F").replace('=', "%3D").into(),
            10,
        ),
        ("base64, lines", fold(&based, 20, "\r\n"), 4),
        ("base64, lines in JSON", fold(&based, 20, r"\n"), 4),
        ("base64, lines in JSON, both", fold(&based, 20, r"\r\n"), 4),
        ("base64, folded header", fold(&based, 20, "\r\n "), 4),
        ("base64, blanks", fold(&based, 20, " "), 4),
        ("base64 of base64", STANDARD.encode(&based).into(), 8),
        ("base64 of base64, moved", STANDARD.encode(inner("xy", "z")).into(), 16),
        ("base64 of base64 of Basic", STANDARD.encode(format!("Basic {}", inner("u:", ""))).into(), 24),
        ("base64 of UTF-16LE", STANDARD.encode(&utf16).into(), 8),
        ("base64 of hexadecimal", STANDARD.encode(&hex).into(), 4),
        ("base64 of percent", STANDARD.encode(format!("t={percent}&x")).into(), 10),
        ("base64 of JSON", STANDARD.encode(format!("{{\"t\":\"{slashed}\"}}")).into(), 12),
        ("hexadecimal of base64", each(&inner("", ""), |octet| format!("{octet:02x}")), 8),
        ("UTF-16 of base64", wide(&inner("", ""), 0, 1), 8),
    ];
    rows.retain(|row| !row.1.is_empty());
    rows
}

/// Checks that a spelling is masked, and nothing else.
fn assert_masked(what: &str, masked: &[u8], before: &[u8], spelled: &[u8], after: &[u8], edge: usize) {
    assert_eq!(
        masked.len(),
        before.len() + spelled.len() + after.len(),
        "{what}: the length must not change"
    );
    let (start, rest) = masked.split_at(before.len());
    let (middle, end) = rest.split_at(spelled.len());
    assert_eq!(start, before, "{what}: what precedes it");
    assert_eq!(end, after, "{what}: what follows it");
    let covered = middle.get(edge..middle.len().saturating_sub(edge)).unwrap_or_default();
    assert!(covered.iter().all(|octet| *octet == b'*'), "{what}: {}", middle.escape_ascii());
}

#[test]
fn p11_every_spelling_is_masked_whatever_the_pieces() {
    let patterns = patterns();
    let texts: [(&str, &str); 6] = [
        ("{\"you sent\": \"", "\", \"more\": 1}"),
        ("<p title='", "'>and more</p>"),
        ("data: {\"token\":\"", "\"}\n\ndata: more\n\n"),
        ("--b\r\nContent-Disposition: form-data; name=t\r\n\r\n", "\r\n--b--\r\n"),
        ("(", ")"),
        ("", ""),
    ];
    assert!(spellings(SECRET).len() >= 70);
    for (value, texts) in
        std::iter::once((SECRET, &texts[..])).chain(OTHERS.map(|other| (other, &texts[..1])))
    {
        for (what, spelled, edge) in spellings(value) {
            for (before, after) in texts {
                let text = [before.as_bytes(), &spelled, after.as_bytes()].concat();
                let mut whole = text.clone();
                assert!(
                    patterns.mask(&mut whole) > 0,
                    "{value}: {what} in {before:?}: {}",
                    text.escape_ascii()
                );
                assert_masked(what, &whole, before.as_bytes(), &spelled, after.as_bytes(), edge);
                for sizes in [&[usize::MAX][..], &[1], &[7], &[3, 1, 29, 5]] {
                    let (masked, found) = scrub_in_pieces(&patterns, &text, sizes);
                    assert!(found > 0, "{value}: {what} in {before:?} by {sizes:?}");
                    assert_eq!(
                        masked.escape_ascii().to_string(),
                        whole.escape_ascii().to_string(),
                        "{sizes:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn p11_each_of_several_values_is_masked_and_named() {
    let patterns = patterns();
    let text = format!(
        "{{\"a\":\"{}\",\"b\":\"{}\",\"c\":\"{}\"}}",
        OTHERS[0],
        SECRET.replace('/', r"\/"),
        OTHERS[2]
    );
    let mut scrubber = ResponseScrubber::new(patterns);
    let shown = scrubber.scrub(Some(&Bytes::from(text)), true);
    let labels: Vec<&str> = scrubber.found_labels().collect();
    assert_eq!(labels, ["key 0", "key 1", "key 3"]);
    assert_eq!(scrubber.echo_count(), 3);
    let (secret, first, last) = ("*".repeat(28), "*".repeat(40), "*".repeat(OTHERS[2].len()));
    assert_eq!(shown, format!("{{\"a\":\"{first}\",\"b\":\"{secret}\",\"c\":\"{last}\"}}"));
}

#[test]
fn p11_an_echo_is_found_in_a_name_whatever_its_case() {
    let value = "Sk-Live-8fJ2kq0Zp7_456";
    let echoes = EchoPatterns::new([("key", value)]);
    let hex: String = value.bytes().map(|octet| format!("{octet:02X}")).collect();
    let base64 = STANDARD.encode(value).replace('=', "");
    for (name, found) in [
        (format!("X-You-Sent-{value}"), true),
        (format!("x-{}-thanks", value.to_ascii_lowercase()), true),
        (value.to_ascii_uppercase(), true),
        (value.replace('-', "%2d").replace('_', "%5F"), true),
        (value.replace('S', "%53"), true),
        (format!("x-{hex}"), true),
        (format!("x-{}", base64.to_ascii_lowercase()), true),
        ("sk-live-8fj2kq0zp7_45".to_owned(), false),
        ("content-type".to_owned(), false),
        (String::new(), false),
    ] {
        assert_eq!(echoes.is_in_name(&name), found, "{name}");
    }
}

/// A server of one encoding leaves the marks of the others as they are, also beside a value and within it.
#[test]
fn marks_of_other_encodings_are_literal() {
    for (value, spelled) in [
        ("nab12/cd34+ef56", r"\nab12&#x2F;cd34&#x2B;ef56"),
        ("ab12cd/34ef56gh", "%ab12cd&#x2F;34ef56gh"),
        ("key=ab12cd34/ef", r"key=ab12cd34\/ef"),
        ("a%41b%42c%43d/e", r"a%41b%42c%43d\/e"),
        ("a&lt;b&gt;c+d0123", "a&lt;b&gt;c%2Bd0123"),
    ] {
        let echoes = EchoPatterns::new([("key", value)]);
        let mut text = format!("({spelled})").into_bytes();
        assert_eq!(echoes.mask(&mut text), 1, "{spelled}");
    }
}

#[test]
fn a_value_of_few_letters_is_found_too() {
    for value in ["a/b+c=d9/e", "p@s$w0rd!", "--------", "12345678", "sk-a/b+c=d9"] {
        let echoes = Arc::new(EchoPatterns::new([("key", value)]));
        for (what, spelled, edge) in spellings(value) {
            if value == "--------" && (what.starts_with("UTF") || what.contains("blanks")) {
                continue; // hyphens separate numbers too
            }
            let text = [b"<", &*spelled, b">"].concat();
            for sizes in [&[1][..], &[usize::MAX]] {
                let (masked, found) = scrub_in_pieces(&echoes, &text, sizes);
                assert!(found > 0, "{value}: {what} by {sizes:?}: {}", text.escape_ascii());
                assert_masked(what, &masked, b"<", &spelled, b">", edge);
            }
        }
    }
}
