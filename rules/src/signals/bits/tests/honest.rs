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
