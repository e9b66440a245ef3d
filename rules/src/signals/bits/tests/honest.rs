//! What honest clients pay.

use super::super::{HeaderAccount, RequestParts};
use super::key;

const FIELDS: [(&str, &[u8]); 8] = [
    ("accept", b"application/json, text/html; q=0.1"),
    ("accept-encoding", b"gzip, deflate, br"),
    ("authorization", b"Bearer 0123456789abcdef0123456789abcdef"),
    ("cache-control", b"no-cache"),
    ("content-type", b"application/json"),
    ("user-agent", b"client/1.2.3 (linux; x86_64) runtime/4.5.6"),
    ("x-client-arch", b"x64"),
    ("x-client-os", b"Linux"),
];

/// Returns the price of each path in bits, one request after the other.
fn pay(paths: impl IntoIterator<Item = String>) -> Vec<f64> {
    let mut account = HeaderAccount::new(key());
    paths
        .into_iter()
        .map(|path| {
            let parts = RequestParts { method: "GET", path: path.as_bytes(), query: None, fields: &FIELDS };
            let components = account.split(&parts);
            let price = account.price("host", &components).millibits;
            account.learn("host", &components);
            price as f64 / 1_000.0
        })
        .collect()
}

#[test]
fn p19_a_poller_pays_almost_nothing() {
    let prices = pay((0..1_800).map(|_| "/v1/jobs/7f3a".to_owned()));
    let rest: f64 = prices[1..].iter().sum();
    println!("poller: first {:.1} bits, then {rest:.1} bits for 1,799 requests", prices[0]);
    assert!(prices[1] <= 1.0 && prices[1_799] < 0.03, "{:?}", &prices[..5]);
    assert!(rest < 60.0, "{rest}");
}

#[test]
fn p19_a_client_with_constant_fields_pays_for_the_path() {
    let prices = pay((0..300).map(|at| format!("/simple/package-{at:03}/")));
    let mean = prices[100..].iter().sum::<f64>() / 200.0;
    println!("package index: first {:.1} bits, later {mean:.1} bits each", prices[0]);
    // 11 characters of 39 are 58 bits; class and length are 11.
    assert!((58.0..76.0).contains(&mean), "{mean}");
}

#[test]
fn prices_name_the_dearest_components() {
    let mut account = HeaderAccount::new(key());
    let mut fields = FIELDS.to_vec();
    let parts = RequestParts { method: "GET", path: b"/", query: None, fields: &FIELDS };
    let components = account.split(&parts);
    account.learn("host", &components);
    fields[6].1 = b"0123456789abcdef0123456789abcdef0123456789abcdef";
    let components = account.split(&RequestParts { path: b"/a", fields: &fields, ..parts });
    let price = account.price("host", &components);
    let dearest = price.dearest(&components);
    let (place, bits) = &dearest[0];
    assert_eq!(*place, crate::signals::SignalPlace::Field("x-client-arch".into()));
    assert!((192..220).contains(bits), "{dearest:?}");
    assert!(dearest.windows(2).all(|pair| pair[0].1 >= pair[1].1));
}

/// The first requests of common clients, as their heads leave: without what follows from the connection or the body.
type ClientHead = (
    &'static str,
    u64,
    &'static str,
    &'static str,
    Option<&'static str>,
    &'static [(&'static str, &'static str)],
);

const PIP_AGENT: &str = "pip/24.0 {\"ci\":null,\"cpu\":\"x86_64\",\"distro\":{\"id\":\"bookworm\",\"libc\":{\"lib\":\"glibc\",\
    \"version\":\"2.36\"},\"name\":\"Debian GNU/Linux\",\"version\":\"12\"},\"implementation\":{\"name\":\"CPython\",\"version\":\
    \"3.12.7\"},\"installer\":{\"name\":\"pip\",\"version\":\"24.0\"},\"openssl_version\":\"OpenSSL 3.0.15 3 Sep 2024\",\"python\":\
    \"3.12.7\",\"rustc_version\":\"1.82.0\",\"system\":{\"name\":\"Linux\",\"release\":\"6.1.0-26-amd64\"}}";

const CLIENTS: [ClientHead; 7] = [
    ("curl", 120, "GET", "/v1/status", None, &[("accept", "*/*"), ("user-agent", "curl/8.5.0")]),
    (
        "python-requests",
        150,
        "GET",
        "/v1/status",
        None,
        &[("accept", "*/*"), ("accept-encoding", "gzip, deflate"), ("user-agent", "python-requests/2.32.3")],
    ),
    (
        "pip",
        560,
        "GET",
        "/simple/requests/",
        None,
        &[
            (
                "accept",
                "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html; q=0.1, text/html; q=0.01",
            ),
            ("accept-encoding", "gzip, deflate"),
            ("cache-control", "max-age=0"),
            ("user-agent", PIP_AGENT),
        ],
    ),
    (
        "git",
        260,
        "GET",
        "/owner/repository.git/info/refs",
        Some("service=git-upload-pack"),
        &[
            ("accept", "*/*"),
            ("accept-encoding", "deflate, gzip, br, zstd"),
            ("git-protocol", "version=2"),
            ("pragma", "no-cache"),
            ("user-agent", "git/2.39.5"),
        ],
    ),
    (
        "npm",
        500,
        "GET",
        "/left-pad",
        None,
        &[
            ("accept", "application/vnd.npm.install-v1+json; q=1.0, application/json; q=0.8, */*"),
            ("accept-encoding", "gzip,deflate"),
            ("npm-auth-type", "web"),
            ("npm-command", "install"),
            ("pacote-pkg-id", "registry:left-pad"),
            ("pacote-req-type", "packument"),
            ("pacote-version", "18.0.6"),
            ("user-agent", "npm/10.8.2 node/v20.18.1 linux x64 workspaces/false"),
        ],
    ),
    (
        "node fetch",
        150,
        "GET",
        "/v1/status",
        None,
        &[
            ("accept", "*/*"),
            ("accept-encoding", "gzip, deflate"),
            ("accept-language", "*"),
            ("sec-fetch-mode", "cors"),
            ("user-agent", "node"),
        ],
    ),
    (
        "OpenAI SDK",
        340,
        "POST",
        "/v1/chat/completions",
        None,
        &[
            ("accept", "application/json"),
            ("accept-encoding", "gzip, deflate"),
            ("content-type", "application/json"),
            ("user-agent", "OpenAI/Python 1.54.3"),
            ("x-stainless-arch", "x64"),
            ("x-stainless-async", "false"),
            ("x-stainless-lang", "python"),
            ("x-stainless-os", "Linux"),
            ("x-stainless-package-version", "1.54.3"),
            ("x-stainless-read-timeout", "600"),
            ("x-stainless-retry-count", "0"),
            ("x-stainless-runtime", "CPython"),
            ("x-stainless-runtime-version", "3.12.7"),
        ],
    ),
];

#[test]
fn p19_first_requests_of_common_clients_cost_some_hundred_bits() {
    for (client, most, method, path, query, fields) in CLIENTS {
        let fields: Vec<(&str, &[u8])> =
            fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        let parts =
            RequestParts { method, path: path.as_bytes(), query: query.map(str::as_bytes), fields: &fields };
        let account = HeaderAccount::new(key());
        let components = account.split(&parts);
        let price = account.price("host", &components);
        let bits = price.millibits.div_ceil(1_000);
        println!("first request of {client}: {bits} bits, most of them in {:?}", price.dearest(&components));
        assert!(bits <= most, "{client}: {bits} bits");
    }
}
