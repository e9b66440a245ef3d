use std::sync::Arc;

use bytes::Bytes;

use super::*;

mod benign;
mod spellings;
mod streams;

/// A key with every character that encodings treat differently.
pub(super) const SECRET: &str = "sk-live/8fJ2kq0Zp7+abQx91==";
/// Others beside it: of letters and digits, hexadecimal, and a token.
pub(super) const OTHERS: [&str; 3] = [
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "9f86d081884c7d659a2feaa0c55ad015",
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
];

pub(super) fn patterns() -> Arc<EchoPatterns> {
    let values = std::iter::once(SECRET).chain(OTHERS).enumerate();
    Arc::new(EchoPatterns::new(values.map(|(index, value)| (format!("key {index}"), value))))
}

/// What arrives of a text in pieces of these sizes, and how many echoes were masked.
pub(super) fn scrub_in_pieces(
    patterns: &Arc<EchoPatterns>,
    text: &[u8],
    sizes: &[usize],
) -> (Vec<u8>, usize) {
    let mut scrubber = ResponseScrubber::new(patterns.clone());
    let mut out = Vec::new();
    let (mut rest, mut sizes) = (Bytes::copy_from_slice(text), sizes.iter().cycle());
    while !rest.is_empty() {
        let size = (*sizes.next().unwrap()).min(rest.len());
        out.extend_from_slice(&scrubber.scrub(Some(&rest.split_to(size)), false));
    }
    out.extend_from_slice(&scrubber.scrub(None, true));
    (out, scrubber.echo_count())
}
