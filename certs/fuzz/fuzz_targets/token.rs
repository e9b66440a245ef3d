//! Any bytes as a token: `cargo +nightly fuzz run token`.
#![no_main]

#[path = "../token_check.rs"]
mod token_check;

libfuzzer_sys::fuzz_target!(|input: &[u8]| token_check::check_token(input));
