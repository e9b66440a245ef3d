//! What a sandbox gets through in an hour if it knows the code and aims at the budget, which is charged as the ledger of
//! the proxy charges it.

use super::super::{END_BITS, HeaderAccount, RequestParts};
use super::key;
use crate::budget::BudgetKind;
use crate::budget::window::SlidingWindow;

/// Random bits to send: a linear congruential generator is random enough for that.
struct Secret(u64);

impl Secret {
    fn take(&mut self, bits: u32) -> u64 {
        (0..bits).fold(0, |taken, _| {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            taken << 1 | self.0 >> 63
        })
    }

    fn text(&mut self, alphabet: &[u8], symbol_bits: u32, length: usize) -> Vec<u8> {
        (0..length).map(|_| alphabet[self.take(symbol_bits) as usize]).collect()
    }
}

/// A request made of secret bits: path, query, fields, method.
#[derive(Default)]
struct Message {
    method: &'static str,
    path: Vec<u8>,
    fields: Vec<(String, Vec<u8>)>,
    sending: Vec<u8>,
}

/// Encodes secret bits, given the number of the request. Returns how many.
type Strategy = fn(&mut Secret, u64, &mut Message) -> u64;

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const HEX: &[u8; 16] = b"0123456789abcdef";

const STRATEGIES: [(&str, Strategy); 11] = [
    ("choice of 8 ports", |secret, _, message| {
        message.sending = format!("https 2 none 844{}", secret.take(3)).into_bytes();
        3
    }),
    ("choice of scheme, version and framing", |secret, _, message| {
        let (scheme, version) =
            ([("https", 1), ("http", 1), ("http", 2), ("https", 2)])[secret.take(2) as usize];
        let framing = ["length", "open"][secret.take(1) as usize];
        message.sending = format!("{scheme} {version} {framing} 8443").into_bytes();
        3
    }),
    ("choice of 2 methods", |secret, _, message| {
        message.method = ["GET", "HEAD"][secret.take(1) as usize];
        1
    }),
    ("choice of 4 known requests", |secret, _, message| {
        message.path = format!("/{}", secret.take(2)).into_bytes();
        2
    }),
    ("choice of 256 known requests", |secret, _, message| {
        message.path = format!("/{:02x}", secret.take(8)).into_bytes();
        8
    }),
    ("one new hex value of 4,096 bits in a field", |secret, _, message| {
        message.fields.push(("x-data".into(), secret.text(HEX, 4, 1_024)));
        4_096
    }),
    ("new base64 values of 1,536 bits in the path", |secret, _, message| {
        message.path.extend(secret.text(BASE64, 6, 256));
        1_536
    }),
    ("raw bytes of 256 bits in a field", |secret, _, message| {
        let bytes = (0..32).map(|_| secret.take(8) as u8).collect();
        message.fields.push(("x-data".into(), bytes));
        256
    }),
    ("new field names of 120 bits", |secret, _, message| {
        let name = secret.text(b"abcdefghijklmnopqrstuvwxyz012345", 5, 24);
        message.fields.push((String::from_utf8(name).unwrap(), b"1".to_vec()));
        120
    }),
    ("16 fields there or not", |secret, _, message| {
        let set = secret.take(16);
        let names = (0..16).filter(|at| set >> at & 1 == 1).map(|at| (format!("x-{at}"), b"1".to_vec()));
        message.fields.extend(names);
        16
    }),
    ("two known choices in each of 16 fields", |secret, _, message| {
        let values = (0..16).map(|at| (format!("x-{at}"), vec![b'0' + secret.take(1) as u8]));
        message.fields.extend(values);
        16
    }),
];

/// Returns the secret bits and the requests that passed within an hour.
fn play(strategy: Strategy, limit: u64) -> (u64, u64) {
    let mut account = HeaderAccount::new(key());
    let (budget, mut window) = (BudgetKind::HeaderBitsPerHour, SlidingWindow::default());
    let (mut secret, mut passed, mut requests) = (Secret(limit), 0, 0);
    // 50 requests per second: the hour is not over before they are.
    for number in 0..180_000 {
        let mut message = Message {
            method: "GET",
            path: b"/".to_vec(),
            sending: b"https 2 none 443".to_vec(),
            ..Message::default()
        };
        let bits = strategy(&mut secret, number, &mut message);
        let fields: Vec<(&str, &[u8])> =
            message.fields.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
        let parts =
            RequestParts { method: message.method, path: &message.path, query: None, fields: &fields };
        let components = account.split(&parts).sent_as(&message.sending);
        let (price, now) = (account.price("host", &components).millibits.div_ceil(1_000), number * 20);
        if window.left(now, budget, limit) < price {
            break;
        }
        window.charge(now, budget.window(), price);
        account.learn("host", &components);
        (passed, requests) = (passed + bits, requests + 1);
    }
    (passed, requests)
}

#[test]
fn p19_no_strategy_says_more_than_the_budget() {
    for limit in [1_024, 8_192, 65_536] {
        let mut best = 0;
        for (name, strategy) in STRATEGIES {
            let (passed, requests) = play(strategy, limit);
            println!("{limit:>6} bits per hour: {passed:>6} said by {requests:>5} requests ({name})");
            assert!(passed + END_BITS <= limit, "{name}: {passed} of {limit}");
            best = best.max(passed);
        }
        println!("{limit:>6} bits per hour: {best:>6} at best");
        assert!(best * 2 > limit, "the strategies are too weak to tell: {best} of {limit}");
    }
}
