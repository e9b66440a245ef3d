//! `cargo fuzz run query`, in `dns-filter/fuzz`.
#![no_main]

#[path = "../checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::query(data));
