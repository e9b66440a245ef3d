//! What a sandbox is known to say before it said anything: the fixed, public part of the code.
//!
//! A value that is new in its slot is coded by the alternatives of its place: a literal, one of some usual values, a
//! usual beginning with a literal behind it, or, for `user-agent`, a sequence of words. Each place has weights for them,
//! so the shares add up to 1. A text that has several codewords costs what the cheapest does.
//!
//! The entries are what common clients send (curl, pip, git, npm, browsers' engines, the SDKs of model services), so
//! that budgets of some thousand bits suffice for their first requests. Any entry is safe: it only divides the code.

use super::literal::{choice_price, literal_price};
use super::request::ComponentPlace;

/// The alternatives of one place.
pub(super) struct Baseline {
    /// Weight of a literal.
    literal: u32,
    /// Weight of a sequence of [`WORDS`].
    words: u32,
    entries: &'static [Entry],
    total: u32,
}

pub(super) struct Entry {
    pub(super) text: &'static str,
    weight: u32,
    /// Whether a literal follows.
    is_stem: bool,
}

/// How a text is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextForm {
    Literal,
    Words,
    Entry(usize),
}

/// The names of fields that a common client sends, in canonical order.
pub(super) struct FieldList {
    pub(super) names: &'static [&'static str],
    weight: u32,
}

/// Returns the alternatives of a place.
pub(super) fn baseline(place: ComponentPlace<'_>) -> &'static Baseline {
    match place {
        ComponentPlace::Method => &METHOD,
        ComponentPlace::Segment(0) => &FIRST_SEGMENT,
        ComponentPlace::Segment(_) => &SEGMENT,
        ComponentPlace::FieldName => &FIELD_NAME,
        ComponentPlace::Field(name) => field(name),
        ComponentPlace::Query => &QUERY_NAME,
        ComponentPlace::QueryValue(b"service") => &GIT_SERVICE,
        ComponentPlace::QueryValue(_) => &QUERY_VALUE,
        ComponentPlace::Sending => &SENDING,
        ComponentPlace::Path | ComponentPlace::Cookies | ComponentPlace::Cookie(_) => &NONE,
    }
}

fn field(name: &str) -> &'static Baseline {
    match name {
        "accept" => &ACCEPT,
        "accept-encoding" => &ACCEPT_ENCODING,
        "accept-language" => &ACCEPT_LANGUAGE,
        "anthropic-version" => &ANTHROPIC_VERSION,
        "authorization" => &AUTHORIZATION,
        "cache-control" | "pragma" => &CACHE_CONTROL,
        "content-type" => &CONTENT_TYPE,
        "git-protocol" => &GIT_PROTOCOL,
        "user-agent" => &USER_AGENT,
        _ => match name.starts_with("x-stainless-") || name.starts_with("npm-") || name.starts_with("sec-") {
            true => &CLIENT_FACT,
            false => &NONE,
        },
    }
}

impl Baseline {
    const fn new(literal: u32, words: u32, entries: &'static [Entry]) -> Self {
        let (mut total, mut at) = (literal + words, 0);
        while at < entries.len() {
            total += entries[at].weight;
            at += 1;
        }
        Baseline { literal, words, entries, total }
    }

    /// Returns the cheapest form of a text, and its price.
    pub(super) fn cheapest(&self, text: &[u8]) -> (TextForm, u64) {
        let mut best = (TextForm::Literal, self.choice(self.literal) + literal_price(text));
        for (at, entry) in self.entries.iter().enumerate() {
            let Some(rest) = text.strip_prefix(entry.text.as_bytes()) else { continue };
            let follows = match (entry.is_stem, rest) {
                (true, rest) => literal_price(rest),
                (false, []) => 0,
                (false, _) => continue,
            };
            let price = self.choice(entry.weight) + follows;
            if price < best.1 {
                best = (TextForm::Entry(at), price);
            }
        }
        if self.words > 0
            && let Some(words) = words_price(text)
        {
            let price = self.choice(self.words) + words;
            if price < best.1 {
                best = (TextForm::Words, price);
            }
        }
        best
    }

    fn choice(&self, weight: u32) -> u64 {
        choice_price(weight, self.total)
    }
}

/// Returns the price of the names of a request's fields if they are a known list, or of the choice of none of them.
pub(super) fn field_list_price<'a>(names: impl Iterator<Item = &'a [u8]> + Clone) -> (Option<usize>, u64) {
    let found = FIELD_LISTS.iter().position(|list| {
        let known = list.names.iter().map(|name| name.as_bytes());
        known.eq(names.clone())
    });
    let weight = found.and_then(|at| FIELD_LISTS.get(at)).map_or(OTHER_LIST, |list| list.weight);
    (found, choice_price(weight, FIELD_LIST_TOTAL))
}

/// Longest text that is split into words.
const WORDS_TEXT: usize = 1 << 10;

/// Returns the price of a text as a sequence of words and characters and the end, or `None` if it cannot be one.
fn words_price(text: &[u8]) -> Option<u64> {
    if text.len() > WORDS_TEXT {
        return None;
    }
    let (mut rest, mut price) = (text, choice_price(WORDS_END, *WORDS_TOTAL));
    while !rest.is_empty() {
        let (token, length) = next_word(rest)?;
        price += choice_price(word_weight(token), *WORDS_TOTAL);
        rest = rest.get(length..).unwrap_or_default();
    }
    Some(price)
}

/// Returns the token at the beginning of a text and its length: the index of the longest word, or that of a character,
/// which follow the words.
pub(super) fn next_word(text: &[u8]) -> Option<(usize, usize)> {
    let words = WORDS.iter().enumerate().filter(|(_, word)| text.starts_with(word.as_bytes()));
    if let Some((at, word)) = words.max_by_key(|(_, word)| word.len()) {
        return Some((at, word.len()));
    }
    let first = text.first().filter(|byte| matches!(byte, 0x20..=0x7e))?;
    Some((WORDS.len() + usize::from(first - 0x20), 1))
}

/// Returns the weight of a token of [`next_word`].
pub(super) fn word_weight(token: usize) -> u32 {
    match token.checked_sub(WORDS.len()).map(|at| at as u8 + 0x20) {
        None => 4,
        Some(b'0'..=b'9' | b'.') => 12,
        Some(b'a'..=b'z' | b'-' | b'/' | b' ' | b'"' | b',') => 3,
        Some(_) => 1,
    }
}

/// Weight of the end of a sequence of words.
pub(super) const WORDS_END: u32 = 24;
/// Words, and the characters from space to tilde.
pub(super) const WORD_TOKENS: usize = WORDS.len() + 95;
static WORDS_TOTAL: std::sync::LazyLock<u32> =
    std::sync::LazyLock::new(|| (0..WORD_TOKENS).map(word_weight).sum::<u32>() + WORDS_END);

const fn whole(weight: u32, text: &'static str) -> Entry {
    Entry { text, weight, is_stem: false }
}

const fn stem(weight: u32, text: &'static str) -> Entry {
    Entry { text, weight, is_stem: true }
}

const fn list(weight: u32, names: &'static [&'static str]) -> FieldList {
    FieldList { names, weight }
}

static NONE: Baseline = Baseline::new(1, 0, &[]);

static METHOD: Baseline = Baseline::new(
    2,
    0,
    &[
        whole(32, "GET"),
        whole(20, "POST"),
        whole(3, "HEAD"),
        whole(3, "PUT"),
        whole(1, "DELETE"),
        whole(1, "OPTIONS"),
        whole(1, "PATCH"),
    ],
);

/// Scheme, version, framing and port.
static SENDING: Baseline = Baseline::new(
    1,
    0,
    &[
        whole(32, "https 2 none 443"),
        whole(32, "https 1 none 443"),
        whole(20, "https 2 length 443"),
        whole(20, "https 1 length 443"),
        whole(4, "https 2 open 443"),
        whole(4, "https 1 open 443"),
        whole(8, "http 1 none 80"),
        whole(4, "http 1 length 80"),
        whole(1, "http 1 open 80"),
        stem(2, "https 2 none "),
        stem(2, "https 1 none "),
        stem(2, "https 2 length "),
        stem(2, "https 1 length "),
        stem(1, "https 2 open "),
        stem(1, "https 1 open "),
        stem(2, "http 1 none "),
        stem(2, "http 1 length "),
        stem(1, "http 1 open "),
        stem(1, "http 2 none "),
        stem(1, "http 2 length "),
        stem(1, "http 2 open "),
    ],
);

/// What precedes the first slash: nothing.
static FIRST_SEGMENT: Baseline = Baseline::new(1, 0, &[whole(255, "")]);

static SEGMENT: Baseline = Baseline::new(
    64,
    0,
    &[
        whole(8, ""),
        whole(4, "api"),
        whole(4, "v1"),
        whole(2, "v2"),
        whole(2, "v3"),
        whole(1, "v1beta"),
        whole(2, "simple"),
        whole(1, "pypi"),
        whole(2, "packages"),
        whole(2, "info"),
        whole(2, "refs"),
        whole(2, "git-upload-pack"),
        whole(1, "git-receive-pack"),
        whole(2, "chat"),
        whole(2, "completions"),
        whole(1, "responses"),
        whole(1, "embeddings"),
        whole(2, "messages"),
        whole(1, "models"),
        whole(1, "files"),
        whole(1, "traces"),
        whole(1, "metrics"),
        whole(1, "logs"),
        whole(1, "repos"),
        whole(1, "index.html"),
        whole(1, "index.json"),
        whole(1, "download"),
        whole(1, "releases"),
    ],
);

static QUERY_NAME: Baseline = Baseline::new(
    32,
    0,
    &[
        whole(4, "service"),
        whole(4, "page"),
        whole(4, "per_page"),
        whole(4, "limit"),
        whole(4, "q"),
        whole(2, "cursor"),
        whole(2, "after"),
        whole(2, "id"),
        whole(2, "format"),
        whole(2, "api-version"),
        whole(2, "key"),
    ],
);

static GIT_SERVICE: Baseline =
    Baseline::new(4, 0, &[whole(8, "git-upload-pack"), whole(4, "git-receive-pack")]);

static QUERY_VALUE: Baseline =
    Baseline::new(12, 0, &[whole(1, "true"), whole(1, "false"), whole(1, "json"), whole(1, "100")]);

static FIELD_NAME: Baseline = Baseline::new(
    48,
    0,
    &[
        whole(8, "accept"),
        whole(8, "accept-encoding"),
        whole(4, "accept-language"),
        whole(8, "authorization"),
        whole(4, "cache-control"),
        whole(8, "content-type"),
        whole(4, "cookie"),
        whole(2, "expect"),
        whole(2, "if-modified-since"),
        whole(2, "if-none-match"),
        whole(2, "origin"),
        whole(2, "pragma"),
        whole(2, "priority"),
        whole(2, "range"),
        whole(2, "referer"),
        whole(2, "upgrade-insecure-requests"),
        whole(8, "user-agent"),
        whole(2, "x-api-key"),
        whole(2, "x-request-id"),
        whole(1, "anthropic-version"),
        whole(1, "api-key"),
        whole(1, "content-encoding"),
        whole(1, "git-protocol"),
        whole(1, "idempotency-key"),
        whole(1, "npm-auth-type"),
        whole(1, "npm-command"),
        whole(1, "openai-organization"),
        whole(1, "pacote-pkg-id"),
        whole(1, "pacote-req-type"),
        whole(1, "pacote-version"),
        whole(1, "sec-fetch-dest"),
        whole(1, "sec-fetch-mode"),
        whole(1, "sec-fetch-site"),
        whole(1, "traceparent"),
        whole(1, "x-stainless-arch"),
        whole(1, "x-stainless-async"),
        whole(1, "x-stainless-lang"),
        whole(1, "x-stainless-os"),
        whole(1, "x-stainless-package-version"),
        whole(1, "x-stainless-read-timeout"),
        whole(1, "x-stainless-retry-count"),
        whole(1, "x-stainless-runtime"),
        whole(1, "x-stainless-runtime-version"),
        whole(1, "x-stainless-timeout"),
    ],
);

static ACCEPT: Baseline = Baseline::new(
    8,
    0,
    &[
        whole(24, "*/*"),
        whole(16, "application/json"),
        whole(2, "text/html"),
        whole(
            2,
            "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html; q=0.1, text/html; q=0.01",
        ),
        whole(2, "application/vnd.npm.install-v1+json; q=1.0, application/json; q=0.8, */*"),
        whole(2, "application/x-git-upload-pack-result"),
        whole(1, "application/x-git-receive-pack-result"),
        whole(2, "text/event-stream"),
        whole(1, "application/json, text/event-stream"),
        whole(1, "application/json, text/plain, */*"),
        whole(1, "application/vnd.github+json"),
        whole(
            1,
            "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8",
        ),
        whole(1, "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"),
    ],
);

static ACCEPT_ENCODING: Baseline = Baseline::new(
    4,
    0,
    &[
        whole(16, "gzip, deflate"),
        whole(8, "gzip, deflate, br"),
        whole(8, "gzip, deflate, br, zstd"),
        whole(8, "identity"),
        whole(8, "gzip"),
        whole(4, "deflate, gzip"),
        whole(2, "deflate, gzip, br"),
        whole(4, "deflate, gzip, br, zstd"),
        whole(4, "gzip,deflate"),
        whole(2, "gzip, br"),
    ],
);

static ACCEPT_LANGUAGE: Baseline = Baseline::new(
    8,
    0,
    &[
        whole(4, "*"),
        whole(4, "en-US,en;q=0.9"),
        whole(2, "en-US,en;q=0.5"),
        whole(2, "en-US, *;q=0.9"),
        whole(2, "en-US"),
        whole(2, "C, *;q=0.9"),
    ],
);

static ANTHROPIC_VERSION: Baseline = Baseline::new(4, 0, &[whole(12, "2023-06-01")]);

static AUTHORIZATION: Baseline =
    Baseline::new(6, 0, &[stem(16, "Bearer "), stem(4, "Bearer sk-"), stem(8, "Basic "), stem(2, "token ")]);

static CACHE_CONTROL: Baseline =
    Baseline::new(4, 0, &[whole(16, "no-cache"), whole(8, "max-age=0"), whole(4, "no-store")]);

static CONTENT_TYPE: Baseline = Baseline::new(
    8,
    0,
    &[
        whole(24, "application/json"),
        whole(6, "application/x-www-form-urlencoded"),
        whole(4, "application/octet-stream"),
        whole(2, "application/json; charset=utf-8"),
        whole(2, "application/json;charset=UTF-8"),
        whole(4, "application/x-git-upload-pack-request"),
        whole(2, "application/x-git-receive-pack-request"),
        whole(4, "application/x-protobuf"),
        whole(2, "application/grpc"),
        stem(4, "multipart/form-data; boundary="),
        whole(2, "text/plain"),
    ],
);

static GIT_PROTOCOL: Baseline = Baseline::new(4, 0, &[whole(12, "version=2")]);

static USER_AGENT: Baseline = Baseline::new(
    8,
    32,
    &[
        stem(4, "curl/"),
        stem(4, "python-requests/"),
        stem(4, "git/"),
        stem(2, "python-httpx/"),
        stem(2, "OpenAI/Python "),
        stem(2, "Anthropic/Python "),
        whole(2, "node"),
        whole(2, "Go-http-client/1.1"),
        whole(2, "Go-http-client/2.0"),
    ],
);

/// The values of `x-stainless-*`, `npm-*` and `sec-*`.
static CLIENT_FACT: Baseline = Baseline::new(
    16,
    0,
    &[
        whole(8, "0"),
        whole(4, "false"),
        whole(2, "true"),
        whole(4, "Linux"),
        whole(4, "x64"),
        whole(1, "arm64"),
        whole(4, "python"),
        whole(2, "js"),
        whole(4, "CPython"),
        whole(2, "node"),
        whole(4, "600"),
        whole(2, "web"),
        whole(2, "install"),
        whole(1, "ci"),
        whole(2, "cors"),
        whole(1, "navigate"),
        whole(1, "empty"),
        whole(1, "document"),
        whole(1, "same-origin"),
    ],
);

/// Weight of a list that is not known.
const OTHER_LIST: u32 = 24;

pub(super) static FIELD_LISTS: [FieldList; 17] = [
    list(4, &["accept", "user-agent"]),
    list(2, &["accept", "content-type", "user-agent"]),
    list(2, &["accept", "authorization", "user-agent"]),
    list(2, &["accept", "authorization", "content-type", "user-agent"]),
    list(4, &["accept", "accept-encoding", "user-agent"]),
    list(2, &["accept", "accept-encoding", "content-type", "user-agent"]),
    list(2, &["accept", "accept-encoding", "authorization", "content-type", "user-agent"]),
    list(2, &["accept-encoding", "user-agent"]),
    list(2, &["accept", "accept-encoding", "cache-control", "user-agent"]),
    list(2, &["accept", "accept-encoding", "git-protocol", "pragma", "user-agent"]),
    list(2, &["accept", "accept-encoding", "content-type", "git-protocol", "user-agent"]),
    list(2, &["accept", "accept-encoding", "accept-language", "sec-fetch-mode", "user-agent"]),
    list(
        2,
        &["accept", "accept-encoding", "accept-language", "content-type", "sec-fetch-mode", "user-agent"],
    ),
    list(
        2,
        &[
            "accept",
            "accept-encoding",
            "npm-auth-type",
            "npm-command",
            "pacote-pkg-id",
            "pacote-req-type",
            "pacote-version",
            "user-agent",
        ],
    ),
    list(2, &OPENAI_FIELDS),
    list(
        2,
        &[
            "accept",
            "accept-encoding",
            "content-type",
            "user-agent",
            "x-stainless-arch",
            "x-stainless-async",
            "x-stainless-lang",
            "x-stainless-os",
            "x-stainless-package-version",
            "x-stainless-read-timeout",
            "x-stainless-retry-count",
            "x-stainless-runtime",
            "x-stainless-runtime-version",
        ],
    ),
    list(
        2,
        &[
            "accept",
            "accept-encoding",
            "anthropic-version",
            "content-type",
            "user-agent",
            "x-api-key",
            "x-stainless-arch",
            "x-stainless-async",
            "x-stainless-lang",
            "x-stainless-os",
            "x-stainless-package-version",
            "x-stainless-read-timeout",
            "x-stainless-retry-count",
            "x-stainless-runtime",
            "x-stainless-runtime-version",
            "x-stainless-timeout",
        ],
    ),
];

const OPENAI_FIELDS: [&str; 14] = [
    "accept",
    "accept-encoding",
    "authorization",
    "content-type",
    "user-agent",
    "x-stainless-arch",
    "x-stainless-async",
    "x-stainless-lang",
    "x-stainless-os",
    "x-stainless-package-version",
    "x-stainless-read-timeout",
    "x-stainless-retry-count",
    "x-stainless-runtime",
    "x-stainless-runtime-version",
];

const FIELD_LIST_TOTAL: u32 = {
    let (mut total, mut at) = (OTHER_LIST, 0);
    while at < FIELD_LISTS.len() {
        total += FIELD_LISTS[at].weight;
        at += 1;
    }
    total
};

/// What `user-agent` is made of: the facts that pip, npm and browsers tell about their machine.
pub(super) const WORDS: [&str; 58] = [
    " (",
    " (KHTML, like Gecko) Chrome/",
    " AppleWebKit/537.36",
    " Safari/537.36",
    " linux",
    " node/v",
    " workspaces/false",
    " x64",
    ".0.0.0",
    "(X11; Linux x86_64)",
    "-Ubuntu ",
    "-amd64",
    "-aws",
    "-azure",
    "-cloud",
    "-generic",
    "Alpine Linux",
    "AsyncOpenAI/",
    "AsyncAnthropic/",
    "Anthropic/",
    "CPython",
    "Debian GNU/Linux",
    "HeadlessChrome/",
    "Linux",
    "Mozilla/5.0 ",
    "OpenAI/",
    "OpenSSL ",
    "Python ",
    "Python-urllib/",
    "Python/3.",
    "Ubuntu",
    "Wget/",
    "\",\"libc\":{\"lib\":\"glibc\",\"version\":\"",
    "\",\"name\":\"",
    "\",\"python\":\"",
    "\",\"rustc_version\":\"",
    "\",\"setuptools_version\":\"",
    "\",\"system\":{\"name\":\"Linux\",\"release\":\"",
    "\",\"version\":\"",
    "\"},\"implementation\":{\"name\":\"CPython\",\"version\":\"",
    "\"},\"installer\":{\"name\":\"pip\",\"version\":\"",
    "\"},\"name\":\"",
    "\"},\"openssl_version\":\"",
    "\"}}",
    " {\"ci\":null,\"cpu\":\"x86_64\",\"distro\":{\"id\":\"",
    " {\"ci\":null,\"cpu\":\"aarch64\",\"distro\":{\"id\":\"",
    " {\"ci\":true,\"cpu\":\"x86_64\",\"distro\":{\"id\":\"",
    "aiohttp/",
    "axios/",
    "bookworm",
    "cargo/",
    "debian",
    "jammy",
    "noble",
    "npm/",
    "pip/",
    "ubuntu",
    "x86_64",
];

#[cfg(test)]
impl Baseline {
    /// Returns the weights of the alternatives: literal, words, entries.
    pub(super) fn weights(&self) -> Vec<u32> {
        [self.literal, self.words].into_iter().chain(self.entries.iter().map(|entry| entry.weight)).collect()
    }

    pub(super) fn entries(&self) -> &'static [Entry] {
        self.entries
    }
}

#[cfg(test)]
impl Entry {
    pub(super) fn is_stem(&self) -> bool {
        self.is_stem
    }
}

/// Returns the weights of the known lists, and of a list that is not known behind them.
#[cfg(test)]
pub(super) fn field_list_weights() -> Vec<u32> {
    FIELD_LISTS.iter().map(|list| list.weight).chain([OTHER_LIST]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::literal::BIT;
    use super::*;

    fn share(price: u64) -> f64 {
        (-(price as f64) / BIT as f64).exp2()
    }

    fn all() -> [&'static Baseline; 21] {
        [
            &NONE,
            &METHOD,
            &SENDING,
            &FIRST_SEGMENT,
            &SEGMENT,
            &QUERY_NAME,
            &GIT_SERVICE,
            &QUERY_VALUE,
            &FIELD_NAME,
            &ACCEPT,
            &ACCEPT_ENCODING,
            &ACCEPT_LANGUAGE,
            &ANTHROPIC_VERSION,
            &AUTHORIZATION,
            &CACHE_CONTROL,
            &CONTENT_TYPE,
            &GIT_PROTOCOL,
            &USER_AGENT,
            &CLIENT_FACT,
            field("x-other"),
            field("sec-fetch-mode"),
        ]
    }

    #[test]
    fn p19_the_shares_of_all_alternatives_add_up_to_one_at_most() {
        for (at, baseline) in all().into_iter().enumerate() {
            let weights = baseline.weights();
            assert_eq!(weights.iter().sum::<u32>(), baseline.total, "baseline {at}");
            let alternatives = weights.iter().filter(|weight| **weight > 0);
            let sum: f64 = alternatives.map(|weight| share(baseline.choice(*weight))).sum();
            assert!((0.99..=1.0).contains(&sum), "baseline {at}: {sum}");
        }
        let tokens = (0..WORD_TOKENS).map(word_weight).chain([WORDS_END]);
        let sum: f64 = tokens.map(|weight| share(choice_price(weight, *WORDS_TOTAL))).sum();
        assert!((0.99..=1.0).contains(&sum), "words: {sum}");
        let lists = field_list_weights();
        assert_eq!(lists.iter().sum::<u32>(), FIELD_LIST_TOTAL);
        let sum: f64 = lists.iter().map(|weight| share(choice_price(*weight, FIELD_LIST_TOTAL))).sum();
        assert!((0.99..=1.0).contains(&sum), "lists: {sum}");
    }

    /// The prices of short texts over a few characters and every entry, in one place, satisfy Kraft's inequality.
    #[test]
    fn p19_the_prices_of_texts_in_one_place_satisfy_krafts_inequality() {
        for (at, baseline) in all().into_iter().enumerate() {
            let mut texts: std::collections::BTreeSet<Vec<u8>> = [Vec::new()].into();
            for length in 1..=2 {
                let shorter: Vec<Vec<u8>> =
                    texts.iter().filter(|text| text.len() == length - 1).cloned().collect();
                texts.extend(
                    shorter
                        .iter()
                        .flat_map(|text| (0..=u8::MAX).map(|byte| [text.as_slice(), &[byte]].concat())),
                );
            }
            for entry in baseline.entries {
                texts.insert(entry.text.into());
                texts.extend((0..=u8::MAX).map(|byte| [entry.text.as_bytes(), &[byte]].concat()));
            }
            let sum: f64 = texts.iter().map(|text| share(baseline.cheapest(text).1)).sum();
            assert!(sum <= 1.0, "baseline {at}: {sum}");
        }
    }

    #[test]
    fn entries_are_distinct_and_lists_are_in_canonical_order() {
        for baseline in all() {
            for (at, entry) in baseline.entries.iter().enumerate() {
                assert!(
                    baseline.entries.iter().skip(at + 1).all(|other| other.text != entry.text),
                    "{}",
                    entry.text
                );
            }
        }
        for list in &FIELD_LISTS {
            assert!(list.names.is_sorted(), "{:?}", list.names);
        }
        for (at, word) in WORDS.iter().enumerate() {
            assert!(word.len() > 1 && WORDS.iter().skip(at + 1).all(|other| other != word), "{word}");
        }
    }
}
