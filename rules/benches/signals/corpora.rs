//! What ordinary clients send, of every kind, and what an attacker sends to make the scanner slow. For the bench, and
//! for the tests of the scanner's bounds.

/// Source code, of which ordinary content is made.
const SOURCE: [&str; 6] = [
    include_str!("../../src/url_path.rs"),
    include_str!("../../src/pattern.rs"),
    include_str!("../../src/decide.rs"),
    include_str!("../../src/load/lint.rs"),
    include_str!("../../src/host_set.rs"),
    include_str!("../../src/name.rs"),
];
/// Text that people wrote.
const PROSE: [&str; 6] = [
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../CONTRIBUTING.md"),
    include_str!("../../../SECURITY.md"),
    include_str!("../../../audit/README.md"),
    include_str!("../../../jail/README.md"),
];
const WORDS: [&str; 32] = [
    "the",
    "of",
    "and",
    "conscious",
    "a",
    "in",
    "agreement",
    "is",
    "committee",
    "that",
    "for",
    "government",
    "which",
    "precious",
    "with",
    "as",
    "responsibility",
    "was",
    "on",
    "are",
    "discussion",
    "be",
    "question",
    "sky",
    "this",
    "risk",
    "independent",
    "at",
    "knowledge",
    "by",
    "second",
    "an",
];

/// A small generator of the same numbers in each run.
pub(crate) struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }

    fn word(&mut self) -> &'static str {
        WORDS[self.next(WORDS.len())]
    }

    fn words(&mut self, count: usize) -> String {
        (0..count).map(|_| self.word()).collect::<Vec<_>>().join(" ")
    }

    fn letters(&mut self, count: usize, alphabet: &[u8]) -> String {
        (0..count).map(|_| char::from(alphabet[self.next(alphabet.len())])).collect()
    }
}

/// Returns content of every kind that has no finding.
pub(crate) fn contents(size: usize) -> Vec<(&'static str, Vec<u8>)> {
    let mut numbers = Numbers(7);
    let source = SOURCE.concat();
    vec![
        ("prose", repeat(size, || PROSE.concat())),
        ("words", repeat(size, || words(&mut numbers))),
        ("JSON", repeat(size, || json(&mut numbers))),
        ("pretty JSON", repeat(size, || pretty_json(&mut numbers))),
        ("source", repeat(size, || source.clone())),
        ("source in JSON", repeat(size, || format!("{{\"role\":\"tool\",\"content\":{source:?}}},"))),
        ("image in JSON", repeat(size, || image(&mut numbers))),
        ("HTML", repeat(size, || html(&mut numbers))),
        ("minified JS", repeat(size, || minified(&mut numbers))),
        ("multipart", multipart(&mut numbers, size)),
        ("logs", repeat(size, || log(&mut numbers))),
        ("CSV", repeat(size, || csv(&mut numbers))),
        ("random bytes", random(&mut numbers, size)),
    ]
}

/// Returns content that makes candidates, escapes, runs and streams as often as possible, without a finding.
pub(crate) fn hostile(size: usize) -> Vec<(&'static str, Vec<u8>)> {
    let nested = "%2541%5cu0041&#92;u0041".to_owned() + &"QUJD".repeat(8) + "%20";
    let base64 = |text: &str| "QUJDREVGR0hJSktMTU5PUFFS".to_owned() + text;
    vec![
        ("headers of tokens", repeat(size, || format!("eyJ{}.", "a".repeat(1000)))),
        ("beginnings of tokens", repeat(size, || "eyJ.://a:b-----BEGIN A sk-SG.AKIA hf_SKa".to_owned())),
        ("prefix storm", repeat(size, || "sk-".to_owned())),
        ("prefix storm, words", repeat(size, || " sk-".to_owned())),
        ("two-byte prefix storm", repeat(size, || "SK".to_owned())),
        ("AWS pairs", repeat(size, || "AKIA0".to_owned())),
        ("AWS names", repeat(size, || "AccessKey".to_owned())),
        ("private keys without a key", repeat(size, || "-----BEGIN A PRIVATE KEY-----\nA: b\n".to_owned())),
        (
            "private keys with headers",
            repeat(size, || format!("-----BEGIN PRIVATE KEY-----\n{}", "A: \n".repeat(90))),
        ),
        ("addresses", repeat(size, || format!("a://{}:", "b".repeat(200)))),
        ("addresses with passwords", repeat(size, || format!("a://{}", "b:".repeat(4)))),
        ("OpenAI keys", repeat(size, || format!("sk-{}\n", "-sk".repeat(90)))),
        ("all escapes", repeat(size, || nested.clone())),
        ("escapes far apart", repeat(size, || format!("%41{}", " ".repeat(258)))),
        ("percent storm", repeat(size, || "%41".to_owned())),
        ("percent of percent", repeat(size, || "%2541".to_owned())),
        ("HTML in HTML", repeat(size, || "&amp;amp;".to_owned())),
        ("JSON escapes", repeat(size, || "\\\\\"\\u0041".to_owned())),
        ("JSON and percent in turn", repeat(size, || "\\n%41&lt;".to_owned())),
        ("broken escapes", repeat(size, || "&amx%4g\\q".to_owned())),
        ("numeric HTML", repeat(size, || "&#99999999999".to_owned())),
        ("short runs", repeat(size, || "41424344454647484950515253 ABCDEFGHIJKLMNOPQRSTUVWXYZ ".to_owned())),
        ("short base64", repeat(size, || base64(" "))),
        (
            "short base64, each phase",
            repeat(size, || base64("IQUJDREVGR0hJSktMTU5PUFFSxxaGVsbG8gd29ybGQgYWdhaW4.")),
        ),
        ("hex", repeat(size, || "41424344454647484950515253".to_owned())),
        ("hex of hex", repeat(size, || "3431343234333434".to_owned())),
        ("base64 of base64", repeat(size, || "UVVKRFJFVkdSMGhKU2t0TVRVNVA".to_owned())),
        ("runs in lines", repeat(size, || "QUJDREVGR0hJSktMTU5PUFFS\n".to_owned())),
        ("gzip headers", b"\x1f\x8b\x08\0".repeat(size / 4)),
    ]
}

fn repeat(size: usize, mut part: impl FnMut() -> String) -> Vec<u8> {
    let mut content = Vec::new();
    while content.len() < size {
        content.extend_from_slice(part().as_bytes());
    }
    content.truncate(size);
    content
}

fn random(numbers: &mut Numbers, length: usize) -> Vec<u8> {
    (0..length).map(|_| numbers.next(256) as u8).collect()
}

/// Words that look like the beginnings of tokens, and are none.
fn words(numbers: &mut Numbers) -> String {
    let (count, end) = (4 + numbers.next(30), [".\n\n", ", ", ". ", "; "][numbers.next(4)]);
    numbers.words(count) + end
}

fn json(numbers: &mut Numbers) -> String {
    let id = numbers.next(1_000_000);
    format!(
        "{{\"id\":{id},\"node_id\":\"MDU6SXNzdWU{id:08}\",\"url\":\"https://api.host.test/repos/octocat/Hello-World/issues/{id}\",\
         \"labels_url\":\"https://api.host.test/repos/octocat/Hello-World/issues/{id}/labels{{/name}}\",\
         \"state\":\"open\",\"title\":\"{}\",\"user\":{{\"login\":\"octocat\",\"type\":\"User\",\
         \"site_admin\":false}},\"sha\":\"6dcb09b5b57875f334f61aebed695e2e4193db{:02x}\",\"comments\":{},\
         \"created_at\":\"2026-04-22T13:33:48Z\",\"body\":\"I'm having a problem with {}, see https://docs.host.test/a#b.\"}},\n",
        numbers.words(6),
        id % 256,
        id % 17,
        numbers.words(8),
    )
}

fn pretty_json(numbers: &mut Numbers) -> String {
    let id = numbers.next(100_000);
    format!(
        "  {{\n    \"id\": {id},\n    \"name\": \"{}\",\n    \"tags\": [\n      \"{}\",\n      \"{}\"\n    ],\n    \
         \"price\": {}.5,\n    \"is_active\": true\n  }},\n",
        numbers.words(3),
        numbers.word(),
        numbers.word(),
        numbers.next(1000)
    )
}

fn image(numbers: &mut Numbers) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let data = numbers.letters(60_000, ALPHABET);
    format!("{{\"type\":\"image\",\"source\":{{\"media_type\":\"image/png\",\"data\":\"{data}\"}}}},\n")
}

fn html(numbers: &mut Numbers) -> String {
    format!(
        "<div class=\"{} {}\"><a href=\"/{}/{}?id={}&amp;view=list\">{}</a><p>{}&nbsp;&mdash; {}.</p></div>\n",
        numbers.word(),
        numbers.word(),
        numbers.word(),
        numbers.word(),
        numbers.next(10_000),
        numbers.words(3),
        numbers.words(25),
        numbers.words(12)
    )
}

fn minified(numbers: &mut Numbers) -> String {
    let [a, b, c, d] = [(); 4].map(|()| numbers.letters(1, b"abcdefghijklmnopqrstuvwxyz"));
    let (first, second) = (numbers.word(), numbers.word());
    format!(
        "function {a}({b},{c}){{var {d}={b}.{first}||[];return {d}.length>{}?{c}.{second}({d}.map((function({a}){{return \
         {a}.{second}&&\"{first}\\n\"+{a}.id}}))):void 0===({c}={b}.{second})&&({d}[{}]=!{c}%2),{d}}}",
        numbers.next(90),
        numbers.next(9)
    )
}

fn multipart(numbers: &mut Numbers, size: usize) -> Vec<u8> {
    let mut content = Vec::new();
    while content.len() < size {
        let (name, file) = (numbers.word(), numbers.word());
        let head = format!(
            "--------------------------d74496d66958873e\r\nContent-Disposition: form-data; name=\"{name}\"; \
             filename=\"{file}.bin\"\r\nContent-Type: application/octet-stream\r\n\r\n"
        );
        content.extend_from_slice(head.as_bytes());
        content.extend(random(numbers, 100_000));
        content.extend_from_slice(b"\r\n");
    }
    content.truncate(size);
    content
}

fn log(numbers: &mut Numbers) -> String {
    format!(
        "2026-04-22T13:{:02}:{:02}.{:03}Z INFO app::{}: request id={:08x} client=10.1.{}.{}:{} \"GET /{}/{} HTTP/1.1\" 200 {} \
         \"Mozilla/5.0 (X11; Linux x86_64)\" {}\n",
        numbers.next(60),
        numbers.next(60),
        numbers.next(1000),
        numbers.word(),
        numbers.next(1 << 30),
        numbers.next(256),
        numbers.next(256),
        numbers.next(60_000),
        numbers.word(),
        numbers.word(),
        numbers.next(100_000),
        numbers.words(4)
    )
}

fn csv(numbers: &mut Numbers) -> String {
    format!(
        "{},{},{}@{}.example,{}.{:02},2026-{:02}-{:02},\"{}\"\n",
        numbers.next(1_000_000),
        numbers.word(),
        numbers.word(),
        numbers.word(),
        numbers.next(1000),
        numbers.next(100),
        1 + numbers.next(12),
        1 + numbers.next(28),
        numbers.words(4)
    )
}
