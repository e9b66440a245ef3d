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

/// Returns what requests cost together, as the ledger charges them: in whole bits.
fn charge<'a>(
    requests: impl IntoIterator<Item = (&'static str, String, &'a [(&'static str, &'a str)])>,
) -> u64 {
    let mut account = HeaderAccount::new(key());
    let mut bits = 0;
    for (host, path, fields) in requests {
        let fields: Vec<(&str, &[u8])> =
            fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        let components = account.split(&RequestParts {
            method: "GET",
            path: path.as_bytes(),
            query: None,
            fields: &fields,
        });
        bits += account.price(host, &components).millibits.div_ceil(1_000);
        account.learn(host, &components);
    }
    bits
}

/// Returns the fields of one of the common clients.
fn fields_of(name: &str) -> &'static [(&'static str, &'static str)] {
    CLIENTS.iter().find(|client| client.0 == name).unwrap().5
}

/// The name of a package, and the hash of its file.
fn package(at: u64) -> (String, String) {
    let number = at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let letters = (0..4 + at % 9).map(|place| char::from(b'a' + (number >> (5 * place) & 31) as u8 % 26));
    let hash = (0..4)
        .map(|part| format!("{:016x}", number.rotate_left(13 * part).wrapping_mul(0xd134_2543_de82_ef95)));
    (letters.collect(), hash.collect())
}

#[test]
fn p19_an_hour_of_honest_work_fits_the_budgets_that_the_documents_name() {
    let pip = fields_of("pip");
    let files = [&pip[1..2], &pip[3..]].concat();
    let files = [&[("accept", "*/*")], files.as_slice()].concat();
    let npm = fields_of("npm");
    let with_id: Vec<(String, Vec<String>)> = (0..200)
        .map(|at| {
            let name = package(at).0;
            (name.clone(), vec![format!("registry:{name}"), format!("registry:{name}@1.{at}.0")])
        })
        .collect();
    let npm_fields = |id: usize, at: usize| {
        let mut fields = npm.to_vec();
        fields[4].1 = with_id[at].1[id].as_str();
        fields[5].1 = ["packument", "tarball"][id];
        fields
    };
    let npm_fields: Vec<_> = (0..400).map(|at| npm_fields(at % 2, at / 2)).collect();
    let npm_path = |at: usize| {
        let name = &with_id[at / 2].0;
        if at.is_multiple_of(2) { format!("/{name}") } else { format!("/{name}/-/{name}-1.{}.0.tgz", at / 2) }
    };
    for (work, most, bits) in [
        (
            "1,800 polls with curl",
            2_100,
            charge((0..1_800).map(|_| ("a", "/v1/jobs/7f3a".to_owned(), fields_of("curl")))),
        ),
        (
            "600 calls with the SDK of OpenAI",
            1_000,
            charge((0..600).map(|_| ("a", "/v1/chat/completions".to_owned(), fields_of("OpenAI SDK")))),
        ),
        (
            "50 packages with pip",
            32_768,
            charge((0..100).map(|at| {
                let (name, hash) = package(at / 2);
                let (first, rest) = hash.split_at(2);
                let (second, rest) = rest.split_at(2);
                match at % 2 {
                    0 => ("index", format!("/simple/{name}/"), pip),
                    _ => (
                        "files",
                        format!("/packages/{first}/{second}/{rest}/{name}-1.{at}.0-py3-none-any.whl"),
                        files.as_slice(),
                    ),
                }
            })),
        ),
        (
            "200 packages with npm",
            131_072,
            charge((0..400).map(|at| ("registry", npm_path(at), npm_fields[at].as_slice()))),
        ),
    ] {
        println!("{work}: {bits} bits");
        assert!(bits <= most && bits * 4 > most, "{work}: {bits} bits");
    }
}
