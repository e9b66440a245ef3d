//! Benchmarks what the bit account and the shape detectors cost one request with 15 fields.

use std::hint::black_box;

use criterion::Criterion;
use rules::budget::BudgetKind;
use rules::budget::window::SlidingWindow;
use rules::signals::bits::{DigestKey, HeaderAccount, RequestParts};
use rules::signals::shape::{HostShape, RequestOutcome, ShapeThresholds};

const FIELDS: [(&str, &[u8]); 15] = [
    ("accept", b"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"),
    ("accept-encoding", b"gzip, deflate, br"),
    ("accept-language", b"en-US,en;q=0.9"),
    ("authorization", b"Bearer 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"),
    ("cache-control", b"no-cache"),
    ("cookie", b"theme=dark; session=0123456789abcdef0123456789abcdef; consent=yes"),
    ("pragma", b"no-cache"),
    ("referer", b"https://www.example.com/docs/index.html"),
    ("sec-ch-ua", br#""Not A(Brand";v="99", "Google Chrome";v="121", "Chromium";v="121""#),
    ("sec-fetch-dest", b"document"),
    ("sec-fetch-mode", b"navigate"),
    ("sec-fetch-site", b"same-origin"),
    ("upgrade-insecure-requests", b"1"),
    (
        "user-agent",
        b"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/121.0.0.0",
    ),
    ("x-request-id", b"7f3a0b1c-8d9e-4f00-a1b2-c3d4e5f60718"),
];

fn main() {
    let mut criterion = Criterion::default().configure_from_args().without_plots();
    let key = DigestKey::new(*b"0123456789abcdef");
    let thresholds = ShapeThresholds::default();
    let outcome = RequestOutcome { sent_bytes: 0, received_bytes: 50_000, unchanged: false };
    for (name, new_path, new_id) in [
        ("a repeat", false, false),
        ("a new identifier", false, true),
        ("a new path and identifier", true, true),
    ] {
        for (what, priced, observed) in
            [("price", true, false), ("shape", false, true), ("price and shape", true, true)]
        {
            let mut account = HeaderAccount::new(key);
            let (mut window, mut shape) = (SlidingWindow::default(), HostShape::default());
            let mut found = Vec::new();
            let (mut number, mut now_ms) = (0_u64, 1_700_000_000_000_u64);
            let (mut path, mut id) = (b"/docs/page-000000.html".to_vec(), FIELDS[14].1.to_vec());
            criterion.bench_function(&format!("{what} of {name}, 15 fields"), |bencher| {
                bencher.iter(|| {
                    number += 1;
                    now_ms += 1_000;
                    if new_path {
                        write_number(&mut path, 11, number);
                    }
                    if new_id {
                        write_number(&mut id, 0, number);
                    }
                    let mut fields = FIELDS;
                    fields[14].1 = &id;
                    let parts = RequestParts {
                        method: "GET",
                        path: &path,
                        query: Some(b"lang=en&page=2"),
                        fields: &fields,
                    };
                    let request = account.split(black_box(&parts));
                    if priced {
                        let bits = account.price("www.example.com", &request).millibits.div_ceil(1_000);
                        let budget = BudgetKind::HeaderBitsPerHour;
                        if black_box(window.left(now_ms, budget, u64::MAX)) >= bits {
                            window.charge(now_ms, budget.window(), bits);
                        }
                        account.learn("www.example.com", &request);
                    }
                    if observed {
                        let observation = shape.observe(&request, now_ms, &thresholds, &mut found);
                        shape.observe_outcome(observation, outcome, now_ms, &thresholds, &mut found);
                    }
                });
            });
        }
    }
    criterion.final_summary();
}

/// Writes a number of six digits at `at`.
fn write_number(text: &mut [u8], at: usize, number: u64) {
    for (place, digit) in text.iter_mut().skip(at).take(6).zip((0..6).rev()) {
        *place = b'0' + (number / 10_u64.pow(digit) % 10) as u8;
    }
}
