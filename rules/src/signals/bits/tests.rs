//! Tests of P19: the prices are those of a code that decodes, they satisfy Kraft's inequality, and no strategy says more
//! than the budget.

mod adversary;
mod codec;
mod coder;
mod honest;

use proptest::prelude::*;

use super::*;
use codec::{Codec, PlainRequest};

pub(super) fn key() -> DigestKey {
    DigestKey::new(*b"0123456789abcdef")
}

/// A request of few distinct parts, so that repeats and new combinations are both common.
fn small_request() -> impl Strategy<Value = PlainRequest> {
    let text = prop_oneof![
        4 => prop::sample::select(vec!["", "a", "v1", "items", "7", "x y", "QUJD", "0f"]).prop_map(|t| t.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>().prop_filter("separators", |b| !b"/&=; ?".contains(b)), 0..6),
    ];
    let usual = vec!["*/*", "application/json", "Bearer 7", "curl/8.5.0", "pip/24.0 x86_64", "\u{e4}/1"];
    let usual = prop::sample::select(usual).prop_map(|value| value.as_bytes().to_vec());
    let value = prop_oneof![usual, text.clone()];
    let pair = (text.clone(), prop::option::of(text.clone()));
    let pairs = || prop::collection::vec(pair.clone(), 0..3);
    let name = prop::sample::select(vec!["accept", "authorization", "user-agent", "x-a", "x-b"]);
    (
        prop::sample::select(vec!["GET", "POST", "BREW", ""]),
        prop::collection::vec(text.clone(), 1..4),
        pairs(),
        prop::collection::vec((name, value), 0..4),
        prop::option::of(prop::collection::vec(pair.clone(), 1..3)),
        prop::sample::select(vec!["https 2 none 443", "https 1 length 8443", "http 2 open 80", "x"]),
    )
        .prop_map(|(method, segments, query, fields, cookies, sending)| PlainRequest {
            method: method.as_bytes().to_vec(),
            segments,
            query,
            fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            cookies,
            sending: sending.as_bytes().to_vec(),
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn p19_the_code_decodes_and_is_as_long_as_the_price(
        requests in prop::collection::vec(small_request(), 1..40),
        repeats in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let mut sequence = requests.clone();
        sequence.extend(repeats.iter().map(|at| at.get(&requests).clone()));

        let mut account = HeaderAccount::new(key());
        let mut encoder = Codec::encoder();
        let mut price = 0;
        for request in &sequence {
            request.with_components(|components| {
                price += account.price("host", &components).millibits;
                account.learn("host", &components);
            });
            encoder.encode(request);
        }
        let bits = encoder.finish();
        // The rest is what rounding adds: less than a thousandth of a bit for each request, and 2 bits to end the code.
        let (length, price) = (bits.len() as f64, price as f64 / 1_000.0);
        prop_assert!(length <= price + 8.0 + 2.0, "{length} bits cost {price}");
        prop_assert!(length >= price - 0.002 * sequence.len() as f64 - 1.0, "{length} bits cost {price}");

        let mut decoder = Codec::decoder(bits);
        for request in &sequence {
            prop_assert_eq!(decoder.decode(), Some(request.clone()));
        }
        prop_assert_eq!(decoder.decode(), None);
    }

    #[test]
    fn hostile_requests_have_a_price(
        method in ".{0,4}",
        path in prop::collection::vec(any::<u8>(), 0..200),
        query in prop::option::of(prop::collection::vec(prop::sample::select(b"a=&;% ".to_vec()), 0..200)),
        fields in prop::collection::vec(("cookie|[a-z]{0,3}", prop::collection::vec(any::<u8>(), 0..50)), 0..20),
    ) {
        let fields: Vec<(&str, &[u8])> = fields.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
        let parts = RequestParts { method: &method, path: &path, query: query.as_deref(), fields: &fields };
        let mut account = HeaderAccount::new(key());
        let components = account.split(&parts);
        let first = account.price("host", &components);
        account.learn("host", &components);
        let second = account.price("host", &components);
        prop_assert!(!first.repeat && second.repeat && second.millibits < first.millibits);
        let (mut shape, mut found) = (crate::signals::shape::HostShape::default(), Vec::new());
        let observation = shape.observe(&components, 0, &Default::default(), &mut found);
        prop_assert_eq!(observation.raised(crate::signals::SignalCode::Beacon), false);
    }

    #[test]
    fn p19_the_split_of_a_request_is_injective(left in small_request(), right in small_request()) {
        let identity =
            |request: &PlainRequest| request.with_components(|components| components.identity());
        let joined = |request: &PlainRequest| {
            (request.with_parts(|parts| format!("{parts:?}")), request.sending.clone())
        };
        prop_assert_eq!(identity(&left) == identity(&right), joined(&left) == joined(&right));
    }
}

/// All requests of a small world.
fn all_small_requests() -> Vec<PlainRequest> {
    let texts = ["", "a", "b", "0", "v1"];
    let mut all = Vec::new();
    for method in ["", "GET", "P"] {
        for path in
            texts.iter().map(|a| vec![*a]).chain(texts.iter().flat_map(|a| texts.map(|b| vec![*a, b])))
        {
            for query in [None, Some(("a", None)), Some(("a", Some("b"))), Some(("b", Some("0")))] {
                for fields in [
                    vec![],
                    vec![("accept", "*/*")],
                    vec![("a", "0")],
                    vec![("accept", "*/*"), ("user-agent", "curl/")],
                ] {
                    let bytes = |text: &str| text.as_bytes().to_vec();
                    all.push(PlainRequest {
                        method: bytes(method),
                        segments: path.iter().map(|segment| bytes(segment)).collect(),
                        query: query.iter().map(|(name, value)| (bytes(name), value.map(bytes))).collect(),
                        fields: fields
                            .iter()
                            .map(|(name, value)| ((*name).to_owned(), bytes(value)))
                            .collect(),
                        cookies: None,
                        sending: bytes("https 2 none 443"),
                    });
                }
            }
        }
    }
    all
}

fn prices(account: &HeaderAccount, all: &[PlainRequest]) -> Vec<u64> {
    all.iter()
        .map(|request| request.with_components(|components| account.price("host", &components).millibits))
        .collect()
}

fn learn(account: &mut HeaderAccount, request: &PlainRequest) {
    request.with_components(|components| account.learn("host", &components));
}

#[test]
fn p19_prices_satisfy_krafts_inequality_in_every_state() {
    let all = all_small_requests();
    let mut account = HeaderAccount::new(key());
    let mut least: f64 = 1.0;
    for step in 0..400_usize {
        // 4 of 256 of the code space belong to the other marks.
        let sum: f64 = prices(&account, &all).iter().map(|price| (-(*price as f64) / 1_000.0).exp2()).sum();
        assert!(sum <= 252.0 / 256.0, "step {step}: {sum}");
        least = least.min(1.0 - sum);
        let next = if step % 3 == 0 { step * 7919 } else { step % 5 };
        learn(&mut account, &all[next % all.len()]);
    }
    assert!(least < 0.4, "the sum stays at {}, so the test sees little of the code", 1.0 - least);
}

#[test]
fn p19_there_are_at_most_2_to_the_n_sequences_of_n_bits() {
    /// Counts the sequences that cost at most `room` with the mark of their end, from the state of `account`.
    fn count(account: &HeaderAccount, all: &[PlainRequest], room: u64) -> u64 {
        let Some(room) = room.checked_sub(END_BITS * 1_000) else { return 0 };
        let mut sequences = 1; // the one that ends here
        for (request, price) in all.iter().zip(prices(account, all)) {
            // Repeats that cost next to nothing would never end; the test of Kraft's inequality has them.
            if price <= room && price > 100 {
                let mut after = account.clone();
                learn(&mut after, request);
                sequences += count(&after, all, room - price + END_BITS * 1_000);
            }
        }
        sequences
    }
    let all: Vec<_> = all_small_requests().into_iter().step_by(9).collect();
    for warm in [0, 1, 8, 40] {
        let mut account = HeaderAccount::new(key());
        all.iter().cycle().step_by(3).take(warm).for_each(|request| learn(&mut account, request));
        for bits in 8..=19 {
            let sequences = count(&account, &all, bits * 1_000);
            assert!(sequences <= 1 << bits, "{sequences} sequences of {bits} bits after {warm} requests");
        }
    }
}

#[test]
fn p19_marks_cost_what_they_leave_to_others() {
    assert!(NEXT as f64 >= (256.0_f64 / 252.0).log2() * BIT as f64);
    assert_eq!(FIRST, 8 * BIT);
    assert_eq!(END_BITS, 8);
}

#[test]
fn p19_a_refused_request_makes_none_cheaper() {
    let mut account = HeaderAccount::new(key());
    let all = all_small_requests();
    all.iter().take(5).for_each(|request| learn(&mut account, request));
    let before = prices(&account, &all);
    assert_eq!(before, prices(&account, &all));
}

#[test]
fn p19_what_exceeds_the_bounds_is_priced_in_full() {
    let mut account = HeaderAccount::new(key());
    let query: Vec<u8> = (0..5_000).map(|at| format!("{at}=v&")).collect::<String>().into_bytes();
    let names: Vec<String> = (0..3_000).map(|at| format!("x-{at}")).collect();
    let fields: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b"value"[..])).collect();
    let parts = RequestParts { method: "GET", path: &[b'/'; 3_000], query: Some(&query), fields: &fields };
    let mut last = u64::MAX;
    for _ in 0..3 {
        let components = account.split(&parts);
        assert!(components.components().len() <= COMPONENTS);
        let price = account.price("host", &components).millibits;
        assert!(price <= last);
        last = price;
        account.learn("host", &components);
    }
    // Another value at the end is new, however far behind.
    let mut changed = fields.clone();
    changed[2_999].1 = b"other";
    let components = account.split(&RequestParts { fields: &changed, ..parts });
    assert!(account.price("host", &components).millibits > 1_000_000);
}

#[test]
fn accounts_survive_storage_and_forget_the_oldest_host() {
    let mut account = HeaderAccount::new(key());
    let parts =
        RequestParts { method: "GET", path: b"/secret-path", query: None, fields: &[("accept", b"*/*")] };
    for host in 0..HOSTS + 1 {
        let components = account.split(&parts);
        account.learn(&format!("host-{host}"), &components);
    }
    let json = serde_json::to_string(&account.state()).unwrap();
    assert!(!json.contains("secret") && !json.contains("host-"), "{json}");
    let restored = HeaderAccount::from_state(key(), &serde_json::from_str(&json).unwrap());
    assert_eq!(restored.state(), account.state());
    let components = account.split(&parts);
    for (host, known) in [("host-0", false), ("host-1", true), ("host-64", true), ("host-99", false)] {
        assert_eq!(restored.price(host, &components).repeat, known, "{host}");
        assert_eq!(restored.price(host, &components), account.price(host, &components), "{host}");
    }
    account.limit_hosts(2);
    assert_eq!(account.host_count(), 2);
    for (host, known) in [("host-64", true), ("host-63", true), ("host-62", false)] {
        assert_eq!(account.has_room_for(host), known, "{host}");
        assert_eq!(account.price(host, &components).repeat, known, "{host}");
    }
    let components = account.split(&parts);
    account.limit_hosts(0);
    account.learn("host-64", &components);
    assert_eq!(account.host_count(), 0, "nothing is remembered");
    let other = HeaderAccount::from_state(DigestKey::new([1; 16]), &restored.state());
    assert!(!other.price("host-1", &other.split(&parts)).repeat);
}
