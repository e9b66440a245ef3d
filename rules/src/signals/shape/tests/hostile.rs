//! Attempts to move a little more than a kilobyte. Each raises a signal.

use super::super::{HOUR_MS, ShapeThresholds};
use super::{SignalCode, Trace};

/// What is moved: random bytes, as one would take from a file.
const SECRET: usize = 1_100;

fn secret(trace: &mut Trace) -> Vec<u8> {
    (0..SECRET).map(|_| trace.below(256) as u8).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digits(bytes: &[u8], bits: usize, alphabet: &str) -> String {
    let alphabet: Vec<char> = alphabet.chars().collect();
    let all: Vec<u8> = bytes.iter().flat_map(|byte| (0..8).rev().map(move |at| byte >> at & 1)).collect();
    all.chunks(bits)
        .map(|chunk| alphabet[chunk.iter().fold(0, |sum, bit| sum << 1 | usize::from(*bit))])
        .collect()
}

fn base32(bytes: &[u8]) -> String {
    digits(bytes, 5, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")
}

pub(super) fn base64(bytes: &[u8]) -> String {
    digits(bytes, 6, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
}

fn percent(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| match byte {
            b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => char::from(*byte).to_string(),
            byte => format!("%{byte:02X}"),
        })
        .collect()
}

const WORDS: [&str; 8] = ["apple", "bridge", "cable", "doctor", "engine", "flower", "garden", "harbor"];

type Encode = fn(&[u8]) -> String;
const ENCODINGS: [(&str, Encode); 5] = [
    ("hex", hex),
    ("base32", base32),
    ("small base32", |bytes| base32(bytes).to_lowercase()),
    ("base64", base64),
    ("raw", percent),
];
const PIECES: [usize; 6] = [SECRET, 256, 128, 32, 16, 8];

/// Sends the secret in pieces with a minute between them, and asserts that a signal is raised.
fn assert_caught(
    what: &str,
    encode: Encode,
    piece: usize,
    send: impl Fn(&mut Trace, usize, &str),
) -> Vec<SignalCode> {
    let mut trace = Trace::new();
    // An honest start: the host is known.
    for _ in 0..20 {
        trace.send("GET", "/", &[("user-agent", "curl/8.5.0"), ("accept", "*/*")], (0, 500)).wait(10_000);
    }
    trace.assert_quiet(what);
    for (at, piece) in secret(&mut trace).chunks(piece).enumerate() {
        send(&mut trace, at, &encode(piece));
        // Irregular, so that the interval does not give it away.
        let gap = 500 + trace.below(20_000);
        trace.wait(gap);
    }
    let codes = trace.codes();
    assert!(!codes.is_empty(), "{what} in pieces of {piece} bytes");
    codes
}

fn each_encoding(what: &str, send: impl Fn(&mut Trace, usize, &str) + Copy) {
    for (name, encode) in ENCODINGS {
        for piece in PIECES {
            let codes = assert_caught(&format!("{what}, {name}"), encode, piece, send);
            println!("{what}, {name}, {piece} bytes each: {codes:?}");
        }
    }
}

#[test]
fn data_in_path_segments_is_noticed() {
    each_encoding("path", |trace, _, data| {
        trace.send("GET", &format!("/files/{data}"), &[("user-agent", "curl/8.5.0")], (0, 20));
    });
}

#[test]
fn data_in_query_values_is_noticed() {
    each_encoding("query", |trace, _, data| {
        trace.send("GET", &format!("/search?lang=en&q={data}"), &[("user-agent", "curl/8.5.0")], (0, 20));
    });
}

#[test]
fn data_in_query_names_is_noticed() {
    each_encoding("query name", |trace, _, data| {
        trace.send("GET", &format!("/search?{data}"), &[("user-agent", "curl/8.5.0")], (0, 20));
    });
}

#[test]
fn data_in_field_values_is_noticed() {
    for name in ["x-data", "accept-language", "user-agent", "x-forwarded-for"] {
        each_encoding(name, |trace, _, data| {
            trace.send("GET", "/", &[(name, data), ("accept", "*/*")], (0, 20));
        });
    }
}

#[test]
fn data_in_cookies_is_noticed() {
    each_encoding("cookie", |trace, _, data| {
        trace.send("GET", "/", &[("cookie", &format!("theme=dark; id={data}"))], (0, 20));
    });
}

#[test]
fn data_in_credentials_that_change_is_noticed() {
    for piece in [256, 96, 64] {
        assert_caught("authorization", base64, piece, |trace, _, data| {
            trace.send("GET", "/", &[("authorization", &format!("Bearer {data}"))], (0, 20));
        });
    }
}

#[test]
fn data_in_field_names_is_noticed() {
    for (piece, encode) in [(24, hex as Encode), (8, hex), (30, |bytes| base32(bytes).to_lowercase())] {
        assert_caught("field names", encode, piece, |trace, _, data| {
            trace.send("GET", "/", &[(data, "1")], (0, 20));
        });
    }
    // All in the first request that the host gets.
    let mut trace = Trace::new();
    let names: Vec<String> = secret(&mut trace).chunks(24).map(hex).collect();
    let fields: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
    trace.send("GET", "/", &fields, (0, 20));
    assert_eq!(trace.codes(), [SignalCode::Drip]);
}

#[test]
fn data_in_many_small_fields_is_noticed() {
    for (count, size) in [(64, 18), (40, 28), (20, 56), (8, 16)] {
        let mut trace = Trace::new();
        let values: Vec<String> = secret(&mut trace).chunks(size).map(hex).collect();
        for values in values.chunks(count) {
            let names: Vec<String> = (0..values.len()).map(|at| format!("x-{at}")).collect();
            let fields: Vec<(&str, &str)> =
                names.iter().zip(values).map(|(name, value)| (name.as_str(), value.as_str())).collect();
            trace.send("GET", "/", &fields, (0, 20)).wait(1_000);
        }
        assert!(!trace.codes().is_empty(), "{count} fields of {size} bytes");
    }
}

#[test]
fn presence_of_fields_is_noticed() {
    let mut trace = Trace::new();
    let names: Vec<String> = (0..16).map(|at| format!("x-flag-{at}")).collect();
    for pair in secret(&mut trace).chunks(2) {
        let set = u16::from_be_bytes([pair[0], pair[1]]);
        let fields: Vec<(&str, &str)> = names
            .iter()
            .enumerate()
            .filter(|(at, _)| set >> at & 1 == 1)
            .map(|(_, name)| (name.as_str(), "1"))
            .collect();
        trace.send("GET", "/", &fields, (0, 20)).wait(3_000);
    }
    assert_eq!(trace.codes(), [SignalCode::Drip]);
}

#[test]
fn choice_of_methods_is_noticed() {
    for methods in [&["GET", "HEAD"][..], &["GET", "HEAD", "OPTIONS", "POST"]] {
        let mut trace = Trace::new();
        let bits = methods.len().ilog2() as usize;
        let mut sent = 0;
        while sent < SECRET * 8 {
            let choice = trace.below(methods.len() as u64) as usize;
            // With an identifier, so that no request repeats exactly.
            let id = trace.uuid();
            trace.send(methods[choice], "/", &[("x-request-id", &id)], (0, 20)).wait(2_000);
            sent += bits;
        }
        assert_eq!(trace.codes(), [SignalCode::Drip], "{methods:?}");
    }
}

#[test]
fn one_byte_per_request_is_noticed() {
    type Send = fn(&mut Trace, usize, u8);
    let forms: [(&str, Send); 6] = [
        ("path", |trace, _, byte| {
            trace.send("GET", &format!("/{byte:02x}"), &[], (0, 20));
        }),
        ("query", |trace, _, byte| {
            trace.send("GET", &format!("/?b={byte}"), &[], (0, 20));
        }),
        ("field", |trace, _, byte| {
            trace.send("GET", "/", &[("x-b", &byte.to_string())], (0, 20));
        }),
        ("query with a counter", |trace, at, byte| {
            trace.send("GET", &format!("/?n={at}&b={byte:02x}"), &[], (0, 20));
        }),
        ("path with a counter", |trace, at, byte| {
            trace.send("GET", &format!("/{at}/{byte}"), &[], (0, 20));
        }),
        ("counter in the same value", |trace, at, byte| {
            trace.send("GET", &format!("/?d={at}.{byte:02x}"), &[], (0, 20));
        }),
    ];
    for (what, send) in forms {
        let mut trace = Trace::new();
        for (at, byte) in secret(&mut trace).into_iter().enumerate() {
            send(&mut trace, at, byte);
            let gap = 500 + trace.below(60_000);
            trace.wait(gap);
        }
        println!("one byte, {what}: {:?}", trace.codes());
        assert!(!trace.codes().is_empty(), "{what}");
    }
}

#[test]
fn a_kilobyte_a_day_is_noticed() {
    for (what, encode) in ENCODINGS {
        let mut trace = Trace::new();
        for piece in secret(&mut trace).chunks(12) {
            trace.send("GET", "/", &[("x-data", &encode(piece))], (0, 20)).wait(15 * 60_000);
        }
        assert!(trace.codes().contains(&SignalCode::Drip), "{what}");
    }
}

#[test]
fn a_mixture_over_places_is_noticed() {
    let mut trace = Trace::new();
    for piece in secret(&mut trace).chunks(44) {
        let parts: Vec<String> = piece.chunks(15).map(hex).collect();
        let fields = [("x-tag", parts[0].as_str()), ("cookie", &format!("id={}", parts[1]))];
        trace.send("GET", &format!("/search?q={}", parts.last().unwrap()), &fields, (0, 20)).wait(300_000);
    }
    assert!(!trace.codes().is_empty());
}

#[test]
fn data_in_fields_of_other_purposes_is_noticed() {
    type Send = fn(&mut Trace, &[u8]);
    let rows: [(&str, usize, Send); 11] = [
        ("words in an identifier", 40, |trace, data| {
            let words: Vec<&str> = data.iter().map(|byte| WORDS[usize::from(byte & 7)]).collect();
            trace.send("GET", "/", &[("x-request-id", &words.repeat(3).join(" "))], (0, 20));
        }),
        ("words in a signature", 5, |trace, data| {
            let words: Vec<&str> = data.iter().map(|byte| WORDS[usize::from(byte & 7)]).collect();
            let value = format!("Signature {}", words.repeat(110).join(" "));
            trace.send("GET", "/", &[("authorization", &value)], (0, 20));
        }),
        ("entity tag", 20, |trace, data| {
            trace.send("GET", "/", &[("if-none-match", &hex(data))], (0, 20));
        }),
        ("referer", 30, |trace, data| {
            trace.send("GET", "/", &[("referer", &format!("https://web.example/{}", hex(data)))], (0, 20));
        }),
        ("checksum without body", 32, |trace, data| {
            trace.send("GET", "/", &[("x-amz-checksum-sha256", &hex(data))], (0, 20));
        }),
        ("long identifier", 64, |trace, data| {
            trace.send("GET", "/", &[("x-request-id", &hex(data))], (0, 20));
        }),
        ("trace state", 40, |trace, data| {
            trace.send("GET", "/", &[("tracestate", &format!("v={}", hex(data)))], (0, 20));
        }),
        ("signature of a URL", 32, |trace, data| {
            trace.send("GET", &format!("/?X-Amz-Signature={}", hex(data)), &[], (0, 20));
        }),
        ("one credential", SECRET, |trace, data| {
            trace.send("GET", "/", &[("x-api-key", &hex(data))], (0, 20));
        }),
        ("web tokens", 64, |trace, data| {
            let claims = base64(format!("{{\"sub\":\"{}\"}}", hex(data)).as_bytes());
            let token = format!("Bearer eyJhbGciOiJIUzI1NiJ9.{claims}.{}", trace.base64(43));
            trace.send("GET", "/", &[("authorization", &token)], (0, 20));
        }),
        ("web token in a cookie", SECRET, |trace, data| {
            let claims = base64(format!("{{\"sub\":\"{}\"}}", hex(data)).as_bytes());
            let token = format!("s=eyJhbGciOiJIUzI1NiJ9.{claims}.{}", trace.base64(43));
            trace.send("GET", "/", &[("cookie", &token)], (0, 20));
        }),
    ];
    for (what, size, send) in rows {
        let mut trace = Trace::new();
        for piece in secret(&mut trace).chunks(size) {
            send(&mut trace, piece);
            trace.wait(7_000);
        }
        assert!(!trace.codes().is_empty(), "{what}");
    }
}

#[test]
fn answers_excuse_up_to_a_sum_and_only_in_proportion() {
    for (answer, raised) in [(0, true), (256, true), (8_192, false)] {
        let mut trace = Trace::new();
        for _ in 0..60 {
            let digest = trace.hex(64);
            let gap = 500 + trace.below(20_000);
            trace.send("GET", &format!("/blobs/{digest}"), &[], (0, answer)).wait(gap);
        }
        assert_eq!(!trace.codes().is_empty(), raised, "answers of {answer} bytes");
    }
    let mut trace = Trace::new();
    for _ in 0..9_000 {
        let digest = trace.hex(64);
        trace.send("GET", &format!("/blobs/{digest}"), &[], (0, 100_000)).wait(200);
    }
    assert_eq!(trace.codes(), [SignalCode::UrlNovelty]);
}

#[test]
fn what_an_answer_gave_is_not_new() {
    for (given, quiet) in [(true, true), (false, false)] {
        let mut trace = Trace::new();
        for _ in 0..60 {
            let session = trace.base64(40);
            if given {
                trace.shape.learn_answer(&trace.key, session.as_bytes());
            }
            trace.send("GET", "/", &[("x-state", &session)], (0, 20)).wait(9_000);
        }
        assert_eq!(trace.codes().is_empty(), quiet, "given: {given}");
    }
}

#[test]
fn beacons_and_sequences_are_noticed() {
    let mut trace = Trace::new();
    for _ in 0..40 {
        let (data, jitter) = (trace.hex(8), trace.below(2_000));
        trace.send("GET", &format!("/news?id={data}"), &[], (0, 20)).wait(60_000 + jitter);
    }
    assert_eq!(trace.codes(), [SignalCode::Beacon]);

    let mut trace = Trace::new();
    for at in 0..100 {
        let data = trace.text("abcdefgh", 4);
        trace.send("GET", &format!("/{at}/{data}"), &[], (0, 20)).wait(100);
    }
    assert_eq!(trace.codes(), [SignalCode::Sequence]);
}

#[test]
fn uploads_are_compared_with_the_past() {
    let mut trace = Trace::new();
    for _ in 0..100 {
        trace.send("GET", "/data", &[], (0, 10 << 20)).wait(HOUR_MS / 20);
    }
    trace.assert_quiet("downloads");
    trace.send("POST", "/data", &[], (100 << 20, 100));
    assert_eq!(trace.codes(), [SignalCode::UploadRatio]);
}

#[test]
fn user_agents_that_change_are_noticed() {
    let mut trace = Trace::new();
    for version in 0..=ShapeThresholds::default().user_agents_per_hour {
        trace.assert_quiet("a few");
        trace.send("GET", "/", &[("user-agent", &format!("agent/{version}"))], (0, 500)).wait(60_000);
    }
    assert_eq!(trace.codes(), [SignalCode::UserAgentChanged]);
}

#[test]
fn hostile_requests_do_not_panic() {
    let mut trace = Trace::new();
    let long = "%".repeat(70_000);
    for target in ["", "?", "/%", "/%f", "/%zz", &long, "/?=&=&;", "/\u{0}?\u{ff}=\u{1}"] {
        trace.send(
            "",
            target,
            &[("", ""), ("cookie", ""), ("cookie", "; ; ="), ("x", &long)],
            (u64::MAX, u64::MAX),
        );
        trace.now_ms = trace.now_ms.wrapping_mul(3);
    }
}
